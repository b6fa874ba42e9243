"""Faults to plant, each in one place, and the tests that catch them.

A test of the suite that catches none of them, and costs more than a second, has to say why it stays.
"""

# ruff: noqa: E501

from typing import NamedTuple


class Fault(NamedTuple):
    """A fault: in `file`, `text`, which occurs there once, becomes `planted`.

    Attributes:
        tests: the tests that catch it, the cheapest first, each by its node id below python_tests,
            or as "ctest NAME". All faults but one in ten have one that `make test` runs.
    """

    name: str
    file: str
    text: str
    planted: str
    tests: tuple[str, ...]


# By file and name: the text, its replacement, and the tests.
_BY_FILE: dict[str, dict[str, tuple[str, ...]]] = {
    "polyspec_ext/runtime/engine.py": {
        "runtime: rows that idle in a round lose their hidden states": (
            "list(map(_ENDED, self.slots)), states",
            "[not row.active for row in self.slots], states",
            "runtime/test_cached_prompts.py::test_requests_that_come_and_go_have_their_texts[eagle]",
        ),
        "runtime: the core imports captured graphs": (
            "from .prefill import Caches\n",
            "from .graphs import Queue as Queue\nfrom .prefill import Caches\n",
            "system/test_structure.py::test_the_core_names_no_room",
            "system/test_structure.py::test_the_core_runs_alone",
        ),
        "runtime: the bound of a request's windows is ignored": (
            "sizes = tuple(min(size, row.request.window_bound) for size in sizes)",
            "pass",
            "serving/test_server.py::test_windows_are_bounded_by_request[1]",
        ),
        "runtime: new windows wait for the end of the plan": (
            "            self.rows.state.set_windows(slot, (*sizes, *rounds))\n"
            "            self._rounds_left = 0",
            "            self.rows.state.set_windows(slot, (*sizes, *rounds))",
            "exactness/test_law.py::test_the_law_is_the_targets[random windows below 1-token-None]",
            "exactness/test_law.py::test_the_law_is_the_targets[windows [[1], [0], [2]]-token-False]",
        ),
        "runtime: rows that move keep their old slot": (
            "        for slot, row in enumerate(staying):\n            row.slot = slot\n",
            "",
            "runtime/test_batches.py::test_passes_and_seconds_are_counted_once_for_the_batch",
            "runtime/test_batches.py::test_rows_leave_and_the_caches_shrink",
        ),
        "runtime: the bonus token of every level has the target's keys": (
            '"level": number,',
            '"level": 1,',
            "exactness/test_one_screen.py::test_every_row_of_a_chain_is_that_of_the_one_screen",
        ),
        "runtime: verifications of a position share a draw": (
            '"round": local.rounds,',
            '"round": torch.zeros_like(local.rounds),',
            "integrations/test_draft_chain.py::test_no_draw_comes_twice[[]]",
        ),
        "runtime: rows verify more draft tokens than they have": (
            '"draft_lengths": local.lengths, "draft_statistics"',
            '"draft_lengths": None, "draft_statistics"',
            "exactness/test_law.py::test_the_law_is_the_targets[tail, [1, 1, 1]-block-False]",
        ),
        "runtime: a level returns to a checkpoint unnoticed": (
            "        if least != list(asked):",
            "        if not least:",
            "levels/test_recurrent.py::test_a_hugging_face_model_with_a_recurrent_state[[1, 3]-1.0]",
        ),
        "runtime: observers get the logits of rejected tokens": (
            "self._observe(row.number, logits[slot, :emitted])",
            "self._observe(row.number, logits[slot, -emitted:])",
            "runtime/test_request_options.py::test_alternatives_are_the_likeliest_ids[{'temperature': 1.0}-3]",
        ),
        "runtime: an error names the first position of its block": (
            "at = position + (emitted if level == self._count else accepted)",
            "at = position",
            "runtime/test_batches.py::test_a_bad_row_is_named[1-5-inf]",
        ),
        "runtime: a text has a token more than allowed": (
            "if ended or len(row.logprobs) >= row.max_new_tokens:",
            "if ended or len(row.logprobs) > row.max_new_tokens:",
            "runtime/test_batches.py::test_padding",
            "runtime/test_batches.py::test_passes_and_seconds_are_counted_once_for_the_batch",
        ),
        "runtime: draft tokens are verified with the rows of others": (
            '            shared |= {"draft_lengths": local.lengths, "draft_statistics": statistics}\n',
            '            draft_logits = None if draft_logits is None else draft_logits.roll(1, 1)\n            shared |= {"draft_lengths": local.lengths, "draft_statistics": None}\n',
            "exactness/test_law.py::test_the_law_is_the_targets[2, 2, [3]-token-None]",
        ),
        "runtime: a level's last token is not handed up": (
            "step, emitted.tokens, emitted.num_accepted, emitted.status)",
            "step, emitted.tokens, (emitted.num_accepted - (number > 1)).clamp_min(0), emitted.status)",
            "exactness/test_law.py::test_the_law_is_the_targets[3, 2, [3, 2]-token-None]",
        ),
        "runtime: the target's cache keeps rejected tokens": (
            "            if level >= number:\n",
            "            if level > number:\n",
            "exactness/test_law.py::test_the_law_is_the_targets[four methods-token-None]",
        ),
        "runtime: drafts end before token 0": (
            "step, block.tokens, block.counts, block.status, ends=tree is None",
            "step, block.tokens, block.tokens.ne(0).cumprod(1).sum(1), block.status, ends=tree is None",
            "exactness/test_law.py::test_the_law_is_the_targets[2, 2, [3]-token-None]",
        ),
    },
    "polyspec_ext/kv_cache/layers.py": {
        "kv_cache: rows that move up take the keys of the row above": (
            "self.keys[slot].copy_(self.keys[row])",
            "self.keys[slot].copy_(self.keys[max(0, row - 1)])",
            "runtime/test_cached_prompts.py::test_requests_that_come_and_go_have_their_texts[three]",
        ),
        "kv_cache: paths move where keys lay before": (
            "self.keys, self.values = self.keys[: len(chosen)], self.values[: len(chosen)]\n"
            "            self.rows.memory.clear()",
            "self.keys, self.values = self.keys[: len(chosen)], self.values[: len(chosen)]",
            "kv_cache/test_rollback.py::test_paths_move_where_keys_lie_now[leave]",
        ),
        "kv_cache: values do not grow with their keys": (
            "            values[:, :, : old_values.shape[2]] = old_values\n",
            "",
            "kv_cache/test_rollback.py::test_rollback_moves_no_bytes_and_growth_keeps_them",
            "kv_cache/test_rollback.py::test_without_inputs_while_rows_are_equally_long",
        ),
        "kv_cache: a row in the place of another has its NaNs": (
            "            self.keys[row].zero_()\n            self.values[row].zero_()",
            "            self.keys[row].zero_()",
            "levels/test_admit.py::test_nothing_of_the_row_before_is_left[True]",
        ),
        "kv_cache: slots behind a rollback keep their NaNs": (
            "dirty = min(self.rows.peak, self._slots()) if self.on_cpu",
            "dirty = min(self.rows.bound, self._slots()) if self.on_cpu",
            "kv_cache/test_rollback.py::test_a_new_batch_begins_with_zeros",
        ),
        "kv_cache: padding in an empty row has position -1": (
            "counts[:, None] - 1)).clamp_(min=0)",
            "counts[:, None] - 1))",
            "kv_cache/test_rollback_variants.py::test_padding_repeats_a_position_that_there_is",
        ),
        "kv_cache: sinks leave the window": (
            "seen = seen & (near if sinks == 0 else near | (held < sinks))",
            "seen = seen & near",
            "kv_cache/test_rollback_variants.py::test_streaming_equals_positions_within_the_cache[llama]",
        ),
        "levels: attention is scaled by the width of a head alone": (
            "scale = q.shape[3] ** -0.5 if scale is None else scale",
            "scale = q.shape[3] ** -0.5",
            "levels/test_packed.py::test_grouped_attention_is_sdpa[torch.float32-32]",
        ),
    },
    "polyspec_ext/runtime/joining.py": {
        "runtime: draws are keyed anew after a failed round": (
            "engine.rows.state.begin_again(counts[[indices[id(row)] for row in engine.slots]])",
            "engine.rows.state.begin_again(engine.rows.state.round_counts)",
            "serving/test_server.py::test_a_request_that_fails_ends_alone[raises]",
        ),
        "runtime: paused rows take part in rounds": (
            "row.paused = any(row is other for other in rows)",
            "row.paused = False",
            "serving/test_server.py::test_a_request_that_fails_ends_alone[drafter]",
        ),
        "runtime: log-probabilities of a replaced text stay": (
            "                row.logprobs.clear()\n                row.origins.clear()",
            "                row.origins.clear()",
            "integrations/test_draft_chain.py::test_drafts_go_on_and_end_where_there_is_no_room",
        ),
        "runtime: a retry leaves the other rows paused": (
            "                self._fail(row, error)\n        self._pause(paused)",
            "                self._fail(row, error)",
            "serving/test_server.py::test_a_request_that_fails_ends_alone[raises]",
        ),
        "runtime: rules of requests that join are forgotten": (
            "            self._join(rows, readings)\n"
            "        for row in rows:\n"
            "            self._processors.add(row.number, row.request.processors)\n",
            "            self._join(rows, readings)\n",
            "serving/test_server.py::test_rules_and_alternatives_are_those_of_the_request",
            "serving/test_endpoint.py::test_rules_change_the_text[logit_bias]",
        ),
        "runtime: a replaced text keeps its last token in the caches": (
            "min(common_prefix(row.tokens, text), len(text) - 1)",
            "common_prefix(row.tokens, text)",
            "integrations/test_draft_chain.py::test_vocabularies_of_different_sizes[7]",
            "integrations/test_draft_chain.py::test_an_interrupt_at_any_line_leaves_no_draft_of_another_text",
        ),
    },
    "polyspec_ext/runtime/prefixes.py": {
        "kv_cache: a copy is restored with tokens of another text": (
            "copies.setdefault(level, []).append((copy, min(size, count)))",
            "copies.setdefault(level, []).append((copy, size))",
            "runtime/test_cached_prompts.py::test_requests_that_come_and_go_have_their_texts[three]",
        ),
        "kv_cache: a state is found without the token before it": (
            "most = lengths.get(ahead[level], 0) - 1",
            "most = lengths.get(ahead[level], 0)",
            "runtime/test_prefixes.py::test_states_of_whole_texts",
        ),
        "kv_cache: leaves outlive the runs above them": (
            "for run, _ in reversed(path):",
            "for run, _ in path:",
            "runtime/test_prefixes.py::test_what_is_found_was_read",
        ),
        "kv_cache: one state too many is kept": (
            "while len(known) > self._most_states:",
            "while len(known) > self._most_states + 1:",
            "runtime/test_prefixes.py::test_states_of_whole_texts",
        ),
    },
    "polyspec_ext/policies/__init__.py": {
        "system: a folder imports from a layer above": (
            "\nfrom .. import rooms\n",
            "\nfrom .. import rooms\nfrom ..inputs import Ends as Ends\n",
            "system/test_structure.py::test_folders_import_from_lower_layers_only",
            "system/test_structure.py::test_imports_form_no_cycle",
        ),
    },
    "polyspec_ext/serving/server.py": {
        "system: a file uses the private name of another": (
            "self.chain.owner.end(self._batch)",
            "self.chain.owner.end(self._batch._engine and self._batch)",
            "system/test_structure.py::test_private_names_stay_in_their_file",
        ),
        "system: the docstring of a short private function": (
            "def _size(row: Row) -> int:\n",
            'def _size(row: Row) -> int:\n    """Return the tokens of a request."""\n',
            "system/test_words.py::test_short_private_functions_have_no_docstring",
        ),
        "serving: low priorities go first": (
            "heapq.heappush(self._waiting, (-priority, row.number, row))",
            "heapq.heappush(self._waiting, (priority, row.number, row))",
            "serving/test_server.py::test_the_queue_is_bounded_and_goes_by_priority",
        ),
        "serving: the queue takes one request more": (
            "if len(self._waiting) >= self.max_waiting + len(self._numbers):",
            "if len(self._waiting) > self.max_waiting + len(self._numbers):",
            "serving/test_server.py::test_the_queue_is_bounded_and_goes_by_priority",
            "serving/test_endpoint_limits.py::test_a_full_queue_and_time_that_is_over",
        ),
        "serving: aborted requests still wait": (
            "self._waiting = [entry for entry in self._waiting if entry[1] not in aborted]",
            "pass",
            "serving/test_server.py::test_a_request_that_is_aborted",
        ),
        "serving: a request has the alternatives of the step before": (
            "            event.alternatives = list(pending)\n            pending.clear()",
            "            event.alternatives = list(pending)",
            "serving/test_server.py::test_rules_and_alternatives_are_those_of_the_request",
            "serving/test_endpoint.py::test_log_probabilities_are_those_of_the_chain[False-0]",
        ),
        "serving: a consumer that leaves keeps its slot": (
            "            if not finished:\n"
            "                with self._wake:\n"
            "                    self.server.abort(request)\n"
            "                    self._wake.notify_all()",
            "            if not finished:\n                pass",
            "serving/test_asynchronous.py::test_a_consumer_that_leaves_aborts_its_request",
        ),
    },
    "polyspec_ext/progress.py": {
        "system: the bar of a prompt overwrites a streamed text": (
            "        first = list(itertools.islice(rest, 1))\n    yield from first\n    yield from rest\n",
            "        yield from rest\n",
            "system/test_chat.py::test_a_long_prompt_is_read_with_a_bar[generate-True]",
        ),
        "system: weights are counted and not their bytes": (
            "counts = [sizes.get(thing[0], mean) for thing in things]",
            "counts = [1 for thing in things]",
            "system/test_progress.py::test_models_load_with_a_bar_of_bytes[True]",
        ),
    },
    "polyspec_ext/runtime/forced.py": {
        "runtime: forbidden ids stay in the rows for the level above": (
            "        if step.level == 1 and not observed:\n",
            "        if not observed:\n",
            "exactness/test_grammar.py::test_the_law_with_trees[True-2]",
            "exactness/test_grammar.py::test_the_law_where_the_drafter_has_no_allowed_id",
        ),
        "runtime: processors do not see the bonus row": (
            "yield slot, slice(0, length + 1), text",
            "yield slot, slice(0, length), text",
            "runtime/test_request_options.py::test_rules_go_before_the_processors_of_a_batch",
            "runtime/test_request_options.py::test_the_law_is_the_targets_under_its_rules[(3, 2)-[2]-3-{'bad_words': [[1, 2], [0, 1, 1], [0, 0]]}-token]",
        ),
        "runtime: forced tokens leave out the last draft tokens": (
            "        begin, end = len(run), len(run) + count\n",
            "        begin, end = len(run), max(len(run), count)\n",
            "exactness/test_grammar.py::test_forced_tokens_are_free_drafts[lookup, rules-1.0]",
        ),
    },
    "polyspec_ext/runtime/rows.py": {
        "runtime: a rejected draft token counts as the level's own": (
            "[Origin(level, accepted < checked)]",
            "[Origin(level, False)]",
            "runtime/test_stats.py::test_origins_name_the_level_and_the_corrections",
        ),
        "runtime: a row takes the windows of another row's slot": (
            "                state.windows[index] = self.windows[row]\n",
            "                state.windows[index] = self.windows[index]\n",
            "runtime/test_batches.py::test_a_level_reads_the_rows_that_it_drafts_for[100-True]",
        ),
        "runtime: tails are verified with statistics of other rows": (
            "        if level == 1 and not self.tail_has_statistics:\n            statistics = None\n",
            "",
            "exactness/test_law.py::test_the_law_is_the_targets[some ids last, tail-token-None]",
        ),
        "runtime: rows of a tail go to rows without one": (
            "        counts = counts.minimum(of_tail)  # all of a draft's tokens, or none\n",
            "",
            "exactness/test_one_screen.py::test_every_row_of_a_chain_is_that_of_the_one_screen",
        ),
        "runtime: rows of a verification are those of the tokens before": (
            "        _append_rows(old, logits, statistics, *appended.to(device).unbind())\n",
            "        _append_rows(old, logits.roll(1, 1), statistics, *appended.to(device).unbind())\n",
            "exactness/test_law.py::test_the_law_is_the_targets[3, 2, [3, 2]-token-None]",
        ),
        "runtime: rows of a tail are in the place of the first": (
            "        begins, counts = appended\n",
            "        begins, counts = appended[0] * 0, appended[1]\n",
            "exactness/test_law.py::test_the_law_is_the_targets[tail, [2, 1]-token-None]",
        ),
        "runtime: the target gets no rows of tails": (
            "        counts = counts.minimum(of_tail)  # all of a draft's tokens, or none\n",
            "        counts = counts * 0\n",
            "exactness/test_law.py::test_the_law_is_the_targets[tail, [2, 1]-token-None]",
        ),
    },
    "polyspec_ext/runtime/batch.py": {
        "runtime: a policy is told of all tokens in every round": (
            "new, row.num_reported = len(row.tokens) - row.num_reported, len(row.tokens)",
            "new = len(row.tokens) - row.num_reported",
            "policies/test_window_policy.py::test_reports",
        ),
        "runtime: a level of two chains keeps the first one's batch": (
            "        for _, cache in self._caches:\n            cache.batch = weakref.ref(batch)",
            "        self._chain.batch = weakref.ref(batch)",
            "runtime/test_threads.py::test_a_stream_ends_where_another_chain_takes_one_of_its_levels[0]",
            "levels/test_shared_cache.py::test_a_stream_ends_where_another_chain_takes_the_cache[copy]",
        ),
        "runtime: a failed batch goes on": (
            "        except BaseException:\n            self._owner.end(self)\n            raise",
            "        except BaseException:\n            raise",
            "runtime/test_failures.py::test_an_observer_or_a_stream_that_fails",
        ),
        "outputs: tokens behind a stop string are counted as new": (
            "            stats.num_new_tokens -= excess\n",
            "            pass\n",
            "runtime/test_request_options.py::test_stop_strings_cut_the_text_that_would_be[1-True-1.0-token]",
        ),
    },
    "polyspec_ext/runtime/plan.py": {
        "runtime: a tail is missing in the tokens that a level has not read": (
            "return level + (self.tail if 1 < level < self.levels else 0)",
            "return level",
            "runtime/test_tail.py::test_a_tail_saves_passes_of_the_level_between",
        ),
        "runtime: a block has no correction": (
            "block, bound = max_pending[level] + 1, rounds[level - 1]",
            "block, bound = max_pending[level], rounds[level - 1]",
            "runtime/test_plan.py::test_plans",
        ),
        "runtime: as many rounds as tokens fill a window": (
            "return [max(1, -(-window // (below + 1))) for window, below in pairs]",
            "return [max(1, -(-window // max(below, 1))) for window, below in pairs]",
            "runtime/test_plan.py::test_default_rounds",
        ),
        "runtime: trees have a tail": (
            "        if config.tail:\n",
            "        if False:\n",
            "runtime/test_tail.py::test_what_is_refused",
        ),
        "runtime: a plan outlives the room of its rows": (
            "return 1 + max(0, left // (plan.max_pending[0] + 1))",
            "return 1 + max(0, left)",
            "runtime/test_device_rounds.py::test_rules_and_ends_of_the_context_are_followed",
        ),
    },
    "polyspec_ext/runtime/graphs.py": {
        "ops: a compiled report has levels and rows exchanged": (
            "return state.new_empty(2, state.shape[0]), state.new_empty(levels, state.shape[0])",
            "return state.new_empty(2, state.shape[0]), state.new_empty(state.shape[0], levels)",
            "ops/test_schedule.py::test_opcheck",
        ),
        "runtime: a tail's draft never reads what is pending": (
            "late = plan.tail > 0 and plan.levels > 3 and index == len(plan.steps) - 2",
            "late = False",
            "runtime/test_plan.py::test_a_tail_s_draft_may_be_the_drafter_s_first",
        ),
        "runtime: a queued round passes the end of a context": (
            "short = member.max_length is not None and longest > member.max_length",
            "short = False",
            "runtime/test_device_rounds.py::test_rules_and_ends_of_the_context_are_followed",
        ),
        "runtime: a later pass overwrites the hidden states of a replay": (
            "hidden = {at: x.clone() for at, x in zip(",
            "hidden = {at: x for at, x in zip(",
            "runtime/test_passes.py::test_a_head_that_the_host_follows[eagle-late-False]",
        ),
        "runtime: the host does not learn the lengths of a queued round": (
            "        for level in plan.asked:\n"
            "            self._lengths(level).note_lengths(state.cached(level))\n",
            "",
            "runtime/test_device_rounds.py::test_caches_hold_what_they_hold_step_by_step[[3]]",
        ),
        "runtime: the latest graph goes first": (
            "            if len(self._graphs) > self._limit:\n"
            "                self._graphs.popitem(last=False)",
            "            if len(self._graphs) > self._limit:\n"
            "                self._graphs.popitem(last=True)",
            "runtime/test_graphs.py::test_graphs_are_bounded_and_the_oldest_goes",
        ),
        "runtime: a failed capture leaves its stream current": (
            "                cuda.set_stream(current)\n",
            "",
            "runtime/test_graphs.py::test_a_capture_that_fails_restores_the_stream",
        ),
        "runtime: failures of captures add up for ever": (
            "        self._failures.pop(kind, None)\n        self.num_captures += 1",
            "        self.num_captures += 1",
            "runtime/test_graphs.py::test_failures_that_do_not_follow_each_other_do_not_add_up",
        ),
        "runtime: memory of another owner is the same": (
            "            and self.owner() is other.owner()\n",
            "",
            "runtime/test_graphs.py::test_the_same_address_of_another_owner_is_another_place",
        ),
    },
    "polyspec_ext/runtime/prefill.py": {
        "runtime: missed tokens are read with the last one": (
            "unread[row.slot] = row.tokens[cached[row.slot] : -1]",
            "unread[row.slot] = row.tokens[cached[row.slot] :]",
            "runtime/test_batches.py::test_a_level_reads_the_rows_that_it_drafts_for[20-True]",
            "serving/test_server.py::test_a_prompt_is_read_by_the_levels_that_draft",
        ),
        "runtime: a draft model reads ids that it does not know": (
            "counted = None if min(counts) == tokens.shape[1] else counts\n"
            "                    tokens = self.config.id_maps[number - 1].to_below(tokens)\n",
            "counted = None if min(counts) == tokens.shape[1] else counts\n",
            "levels/test_hugging_face.py::test_a_smaller_draft_never_reads_ids_that_it_does_not_know",
        ),
        "runtime: padding of prompts is read": (
            "counted = None if min(counts) == tokens.shape[1] else counts",
            "counted = None",
            "runtime/test_batches.py::test_padding",
            "runtime/test_batches.py::test_a_level_reads_the_rows_that_it_drafts_for[100-True]",
        ),
        "runtime: a side stream begins before the queued work": (
            "        stream.wait_event(self._begun[device])\n",
            "",
            "runtime/test_streams.py::test_side_streams_follow_what_was_queued_and_not_each_other",
        ),
        "runtime: a draft's encoder is the target's": (
            "known = encoded if number == 1 else below",
            "known = encoded",
            "levels/test_encoder_decoder.py::test_generate_gives_the_same_text",
        ),
    },
    "polyspec_ext/kv_cache/lengths.py": {
        "kv_cache: status bits are lost as rows leave": (
            "        self.status.copy_(status)\n",
            "",
            "kv_cache/test_rollback.py::test_bad_counts_set_a_status_and_keep_the_row",
        ),
        "kv_cache: a pass of some rows counts as one of all": (
            "            if min(known) == new:\n",
            "            if max(known) == new:\n",
            "kv_cache/test_rollback.py::test_rows_equal_each_row_alone[llama-sdpa]",
        ),
    },
    "polyspec_ext/tensors.py": {
        "tensors: seeds from 2**63 on are one seed": (
            "bits = [seed - 2**64 if seed >= 2**63 else seed for seed in seeds]",
            "bits = [min(seed, 2**63 - 1) for seed in seeds]",
            "runtime/test_batches.py::test_a_row_of_a_batch_with_one_seed_can_be_drawn_alone[18446744073709551615]",
        ),
        "tensors: ids that a level does not draw have logit 0": (
            'full = rows.new_full((*rows.shape[:-1], vocab_size), -float("inf"))',
            "full = rows.new_full((*rows.shape[:-1], vocab_size), 0.0)",
            "exactness/test_law.py::test_the_law_is_the_targets[switching, some ids-block-None]",
            "exactness/test_law.py::test_the_law_is_the_targets[some ids last, tail-token-None]",
        ),
        "tensors: the last common token differs": (
            "return next(differ, min(len(one), len(other)))",
            "return next(differ, min(len(one), len(other)) - 1)",
            "runtime/test_prefixes.py::test_no_token_is_kept_twice",
            "runtime/test_prefixes.py::test_the_least_recently_used_go_first",
        ),
        "inputs: short rows are padded before their new tokens": (
            "table = [[*row, *[pad] * (width - len(row))] for row in rows]",
            "table = [[*[pad] * (width - len(row)), *row] for row in rows]",
            "runtime/test_batches.py::test_padding",
        ),
        "runtime: a filter that a single row sets is off in all rows": (
            "if all(row.greedy or getattr",
            "if any(row.greedy or getattr",
            "runtime/test_batches.py::test_a_filter_of_one_row_stays_beside_rows_without_it[{'top_k': 1}]",
        ),
        "tensors: entries of drawn ids are those of others": (
            "        entries[known] = torch.arange(len(known), dtype=torch.int32, device=known.device)\n",
            "        entries[known] = torch.arange(len(known), dtype=torch.int32, device=known.device).flip(0)\n",
            "exactness/test_law.py::test_the_law_is_the_targets[some ids last-token-None]",
        ),
    },
    "polyspec_ext/kv_cache/rollback.py": {
        "kv_cache: a mask of a few tokens shows a later one": (
            "before = self._strip.shape[1] - _STRIP - base\n",
            "before = self._strip.shape[1] - _STRIP - base - 1\n",
            "levels/test_model_families.py::test_family[opt]",
        ),
        "kv_cache: a batch begins with the keys of the one before": (
            "  # even if unchanged: an interrupt may have left it half done\n        self.reset()\n",
            "\n        self.rows.reset()\n",
            "levels/test_admit.py::test_a_batch_that_begins_with_sequences",
        ),
        "kv_cache: rows that join have the tokens of rows that left": (
            "        self.rows.clear(rows)\n",
            "",
            "levels/test_admit.py::test_a_text_without_tokens_takes_the_place_of_another",
        ),
    },
    "polyspec_ext/kv_cache/streaming.py": {
        "kv_cache: sinks stay at their first positions": (
            "sinks.copy_(turn(self.sink_keys, evicted, self.frequencies))",
            "sinks.copy_(self.sink_keys)",
            "kv_cache/test_rollback_variants.py::test_streaming_equals_positions_within_the_cache[llama]",
        ),
    },
    "csrc/src/core/kv_index.hpp": {
        "kv_cache: a ring overwrites its sinks": (
            "return p.sinks + (position - p.sinks) % ring;",
            "return position % p.capacity;",
            "ctest kv_cache_test",
            "kv_cache/test_rollback_variants.py::test_streaming_equals_positions_within_the_cache[llama]",
        ),
        "kv_cache: lengths on a device are not cut": (
            "    if (length > p.most[row]) length = p.most[row];\n",
            "",
            "ops/test_kv.py::test_lengths_are_cut_and_increased[cpu]",
            "runtime/test_device_rounds.py::test_caches_hold_what_they_hold_step_by_step[[3]]",
        ),
        "kv_cache: the lengths before a pass are those after": (
            "p.base[row] = length + out;",
            "p.base[row] = length + count;",
            "ops/test_kv.py::test_lengths_are_cut_and_increased[cpu]",
        ),
        "kv_cache: a ring takes the rows of a level above": (
            " || (p.skip != nullptr && j < p.skip[row]) ||\n",
            " ||\n",
            "runtime/test_hidden_window.py::test_a_window_has_the_latest_state_of_every_token[in place]",
            "ops/test_kv.py::test_rows_from_a_position[cpu-torch.float32]",
        ),
        "levels: a copy skips the token whose logits are asked for": (
            "    if (out > p.first[row]) out = p.first[row];\n",
            "",
            "levels/test_shared_cache.py::test_a_draft_that_looks_back_leaves_the_owners_keys",
            "ops/test_kv.py::test_tokens_that_a_level_above_has_read_are_skipped[cpu]",
        ),
        "kv_cache: a path may have a node twice": (
            "if (nodes[count] <= last || nodes",
            "if (nodes[count] < last || nodes",
            "ctest kv_tree_test",
        ),
    },
    "csrc/src/core/kv_pages.hpp": {
        "kv_cache: a page more than needed is reserved": (
            "return tokens / p.page_size + (tokens % p.page_size != 0);",
            "return tokens / p.page_size + 1;",
            "ctest kv_pages_test",
        ),
    },
    "csrc/src/cpu/kv_cache.cpp": {
        "kv_cache: a node next to its place is not moved": (
            "if (path.nodes[j] == j) continue;",
            "if (path.nodes[j] <= j + 1) continue;",
            "ctest kv_tree_test",
            "kv_cache/test_rollback.py::test_paths_move_where_keys_lie_now[select]",
        ),
    },
    "polyspec_ext/ops/verification.py": {
        "ops: seeds from 2**63 on are refused or another seed": (
            "numbers[_SEED] -= 2**64  #",
            "numbers[_SEED] = INT64_MAX  #",
            "ops/test_torch_integration.py::test_seed_is_64_bits[cpu]",
        ),
        "ops: paths draw at the position before their depth": (
            '"position": positions + column, "level"',
            '"position": positions, "level"',
            "drafters/test_paths.py::test_draws_are_keyed_by_path",
        ),
    },
    "csrc/bindings/torch_ops.cpp": {
        "ops: an allow-mask may be a word too short": (
            "const int64_t words = (params->vocab + 31) / 32;",
            "const int64_t words = params->vocab < 32 ? 1 : params->vocab / 32;",
            "ops/test_properties.py::test_every_token_is_recomputed[25]",
        ),
        "ops: draft rows may be wider than the target's": (
            "draft->size(rank - 1) <= params.vocab",
            "draft->size(rank - 1) >= 0",
            "ops/test_errors.py::test_wrong_argument_is_named[verify-verify_arguments-case97]",
        ),
        "ops: the parameters at slots count as many as requests": (
            "params->num_slots = place->holders = (*value)->size(0);",
            "params->num_slots = (*value)->size(0);",
            "ops/test_indexed_verify.py::test_same_bits_however_the_rows_lie[cpu-slotted-token]",
        ),
    },
    "polyspec_ext/ops/trees.py": {
        "kv_cache: a sliding window has a token more in a tree": (
            "behind[:, None, :] > depth[..., None] - window",
            "behind[:, None, :] >= depth[..., None] - window",
            "levels/test_trees.py::test_nodes_see_their_own_text[mistral, sliding window-eager]",
        ),
        "kv_cache: nodes of a tree do not see the first keys": (
            "(behind[:, None, :] > depth[..., None] - window) | (slots < sinks)",
            "behind[:, None, :] > depth[..., None] - window",
            "levels/test_shared_cache.py::test_a_window_in_the_targets_cache[llama-False]",
        ),
        "kv_cache: padding of a tree has positions past the context": (
            "        positions = torch.where(inside, positions, (base - 1).clamp_min(0)[:, None])\n",
            "",
            "levels/test_trees.py::test_a_tree_in_several_passes[gpt2-False]",
        ),
        "ops: a fake result has the shape of another argument": (
            "    lengths = arguments[3]\n",
            "    lengths = arguments[4]\n",
            "ops/test_kv.py::test_opcheck",
        ),
    },
    "polyspec_ext/drafters/trees.py": {
        "drafters: nodes of a level have the parents of the level before": (
            "read.append(chosen + (k + (level - 1) * k * k))",
            "read.append(chosen + (level - 1) * k * k)",
            "drafters/test_draft_trees.py::test_dynamic_tree[3-4-12]",
            "drafters/test_draft_trees.py::test_nothing_follows_a_row_without_a_distribution",
        ),
        "drafters: a static tree leaves out its deepest nodes": (
            "counts = (depths <= lengths[:, None]).sum(1)",
            "counts = (depths < lengths[:, None]).sum(1)",
            "drafters/test_draft_trees.py::test_rows_of_different_depth[tree1]",
            "drafters/test_draft_trees.py::test_static_tree",
        ),
        "drafters: all paths have the same draws": (
            "self._nodes = torch.arange(paths, device=device).repeat(batch)",
            "self._nodes = torch.zeros(paths * batch, dtype=torch.int64, device=device)",
            "drafters/test_paths.py::test_draws_are_keyed_by_path",
        ),
        "drafters: a tree may be deeper than asked": (
            "if (deepest := max(depths.values())) > most:",
            "if (deepest := max(depths.values())) > most + 1:",
            "drafters/test_draft_trees.py::test_wrong_trees_are_named[a tree of at most 2 levels, given 3]",
        ),
        "drafters: paths that meet again are one": (
            "self._same &= depth",
            "self._same = depth",
            "drafters/test_paths.py::test_paths_with_equal_last_tokens_stay_apart",
        ),
        "drafters: paths draw from the rows of the first": (
            "        behind = logits[batch[:, None], first].flatten(0, 1)[:, None]\n",
            "        behind = logits[batch[:, None], first * 0].flatten(0, 1)[:, None]\n",
            "exactness/test_law.py::test_the_law_is_the_targets[paths [2]-token-None]",
        ),
    },
    "polyspec_ext/runtime/trees.py": {
        "drafters: the children of the root see no token before the tree": (
            "self.parents.gather(1, at) + lags[:, None], parents)",
            "self.parents.gather(1, at) + lags[:, None] - 1, parents)",
            "exactness/test_law.py::test_the_law_is_the_targets[tree [2, 2]-token-None]",
        ),
        "drafters: hidden states of a path are those of its first nodes": (
            "nodes = path.gather(1, (reach - lags).clamp(0, path.shape[1] - 1)) if path.shape[1] else 0",
            "nodes = (reach - lags).clamp_min(0)",
            "exactness/test_head_screen.py::test_heads[eagle static]",
        ),
        "drafters: children of a node are verified with the root's row": (
            "ids = torch.arange(batch * (nodes + 1), device=device).view(batch, nodes + 1)",
            "ids = torch.arange(batch, device=device)[:, None].expand(batch, nodes + 1) * (nodes + 1)",
            "exactness/test_law.py::test_the_law_is_the_targets[drawn tree-token-None]",
        ),
        "drafters: rows of a path are those of the first nodes": (
            "        drawn = result.rows.clamp_min(0)[..., None]\n",
            "        drawn = torch.arange(result.rows.shape[1]).expand_as(result.rows)[..., None]\n",
            "exactness/test_law.py::test_the_law_is_the_targets[tree below two-token-None]",
        ),
    },
    "polyspec_ext/drafters/lookup.py": {
        "drafters: a suffix is compared with one token too few": (
            "ends = ends[text[ends - size - 1] == text[count - size - 1]]",
            "ends = ends[text[ends - size] == text[count - size]]",
            "drafters/test_lookup.py::test_prompt_lookup_finds_what_a_search_finds[(3, 1)]",
            "drafters/test_lookup.py::test_suffixes_are_those_that_a_search_finds[8]",
        ),
        "drafters: of equally frequent tokens the first is drafted": (
            "return max(reversed(counts), key=counts.__getitem__)",
            "return max(counts, key=counts.__getitem__)",
            "drafters/test_lookup.py::test_what_followed_most_often",
            "drafters/test_lookup.py::test_only_so_many_are_kept",
        ),
        "drafters: a row learns from the row before it": (
            "            self._close(self._text)  # a request ends when the next begins",
            "            self._close()",
            "drafters/test_lookup.py::test_rows_of_a_batch_do_not_see_each_other",
        ),
        "drafters: a suffix that reaches the end of the text is not repeated": (
            "return Proposal([tokens[start + i % period] for i in range(k)])",
            "return Proposal([tokens[start + min(i, period - 1)] for i in range(k)])",
            "drafters/test_lookup.py::test_a_period_goes_on_behind_the_end_of_the_text",
        ),
    },
    "polyspec_ext/drafters/proposals.py": {
        "drafters: a user's drafter is not told of a rollback": (
            "            context.valid = min(context.valid, length)\n",
            "",
            "drafters/test_lookup.py::test_a_context_says_how_much_of_the_text_stands",
        ),
        "drafters: ids beyond a smaller vocabulary may be drawn": (
            '    logits[: draft.rows] = -float("inf")  # ids beyond a smaller vocabulary are never drawn\n',
            "",
            "drafters/test_proposal_kinds.py::test_forks_may_share_their_memory_and_not_their_vocabulary[20]",
        ),
        "drafters: the first end of a text is cut off": (
            "end = next((i for i, token in enumerate(tokens, 1) if token in eos), None)",
            "end = next((i for i, token in enumerate(tokens) if token in eos), None)",
            "drafters/test_lookup.py::test_drafts_end_with_the_first_end_of_a_text",
        ),
    },
    "polyspec_ext/drafters/model.py": {
        "drafters: rows that are done read padding": (
            "counts = None if all(left) else RowCounts(left).less(0, 1)",
            "counts = None",
            "policies/test_window_policy.py::test_rows_do_not_see_each_others_windows[False]",
        ),
        "drafters: the last node of a path is kept unread": (
            "return self._level.keep_path(begin, path.where(is_read, -1), lengths)",
            "return self._level.keep_path(begin, path, lengths)",
            "drafters/test_paths.py::test_the_accepted_path_stays_in_the_cache[[3]-0.0]",
        ),
        "drafters: rows of logits fit any window": (
            "fits = shape[0] == batch and shape[1] >= most and shape[2] == vocab",
            "fits = shape[0] == batch and shape[2] == vocab",
            "exactness/test_law.py::test_the_law_is_the_targets[random windows below 1-token-None]",
        ),
    },
    "polyspec_ext/drafters/eagle.py": {
        "drafters: EAGLE-3 reads the layers of another head by default": (
            "value = [2, target_layers // 2, target_layers - 3]",
            "value = [2, target_layers // 2, target_layers - 2]",
            "drafters/test_eagle_network.py::test_variants_against_the_reference[eagle3 wide target]",
        ),
        "drafters: EAGLE's next step reads the state before the final norm": (
            "normed: Tensor = self.norm(states) if self.config.norm_output else states",
            "normed: Tensor = states",
            "drafters/test_eagle_network.py::test_variants_against_the_reference[eagle3.1]",
        ),
    },
    "polyspec_ext/drafters/features.py": {
        "drafters: a head keeps states of rejected tokens": (
            "        torch.minimum(self.end, lengths, out=self.end)\n"
            "        torch.minimum(self.begin, lengths, out=self.begin)",
            "        torch.minimum(self.begin, lengths, out=self.begin)",
            "runtime/test_hidden_window.py::test_a_window_has_the_latest_state_of_every_token[in place]",
        ),
        "drafters: heads take the state of the last token": (
            "at = inputs.positions.to(device) - 2 - hidden.positions.to(device)",
            "at = inputs.positions.to(device) - 1 - hidden.positions.to(device)",
            "drafters/test_heads.py::test_against_the_plain_heads[hydra-1-True-False]",
        ),
        "drafters: a window of states forgets the rows that stay": (
            "self.begin = self.begin[index].masked_fill(fresh, 0)",
            "self.begin = self.begin[: len(index)].masked_fill(fresh, 0)",
            "drafters/test_own_feature_drafter.py::test_both_executors_draft_from_the_same_states[[3]]",
        ),
        "drafters: states of a middle level replace the target's": (
            "read = (above - begin).clamp_min(0)",
            "read = torch.zeros_like(begin)",
            "runtime/test_seams.py::test_a_drafter_reads_the_states_of_the_target_where_it_has_them",
        ),
    },
    "polyspec_ext/drafters/heads.py": {
        "drafters: heads are rotated by halves in place of pairs": (
            "signed[..., : sin.shape[-1] // 2].neg_()",
            "signed[..., sin.shape[-1] // 2 :].neg_()",
            "drafters/test_eagle_network.py::test_variants_against_the_reference[eagle1 without bias]",
        ),
    },
    "polyspec_ext/drafters/mtp.py": {
        "drafters: up projections of experts come first": (
            "gates = torch.cat([gates, ups], 1)",
            "gates = torch.cat([ups, gates], 1)",
            "drafters/test_mtp.py::test_logits_are_those_of_transformers[glm4_moe]",
        ),
        "drafters: blocks of 8 bits have the factors of other columns": (
            "factors = factors.repeat_interleave(block[1], 1)[:, :columns]",
            "factors = factors.repeat(1, block[1])[:, :columns]",
            "drafters/test_mtp.py::test_blocks_of_8_bits[False]",
        ),
    },
    "polyspec_ext/drafters/dflash.py": {
        "drafters: DFlash drafts from the state of the next token": (
            "first = not config.from_anchor",
            "first = config.from_anchor",
            "drafters/test_dflash.py::test_drafts_are_those_of_the_plain_forward_pass[z-lab, keys at the top-False]",
        ),
        "drafters: a window of DFlash is a token wider": (
            "seen &= (slots[:, None] - positions[..., None]).abs() < window",
            "seen &= (slots[:, None] - positions[..., None]).abs() <= window",
            "drafters/test_dflash.py::test_drafts_are_those_of_the_plain_forward_pass[z-lab, sliding-False]",
        ),
        "drafters: DSpark's bias follows the first token only": (
            "bias = head.bias(anchors if step == 1 else block.tokens)",
            "bias = head.bias(anchors)",
            "drafters/test_dflash.py::test_drafts_are_those_of_the_plain_forward_pass[dspark-False]",
        ),
    },
    "polyspec_ext/drafters/switching.py": {
        "drafters: rows of a switched drafter are another's ids": (
            "if block.rows is not None and id_map_of(member).drawn is not None:",
            "if False:",
            "exactness/test_law.py::test_the_law_is_the_targets[switching, some ids-block-None]",
        ),
        "drafters: a member's rows are written by the next": (
            "        rows = self._rows[self.active]\n",
            "        rows = next((rows for rows in self._rows if rows is not None), None)\n",
            "drafters/test_proposal_kinds.py::test_a_switch_leaves_the_rows_of_others_alone",
        ),
    },
    "polyspec_ext/drafters/translated.py": {
        "drafters: a translated context depends on draft tokens": (
            "            text.tokens += row[: min(begin + 1, count)]\n"
            "            contexts.append(self.translate(text) if count else None)\n"
            "            text.tokens += row[begin + 1 : count]\n",
            "            text.tokens += row[:count]\n"
            "            contexts.append(self.translate(text) if count else None)\n",
            "drafters/test_translated.py::test_the_same_model_in_another_order_is_accepted[middle-1.0]",
            "drafters/test_translated.py::test_rows_of_one_pass_are_those_of_many",
        ),
    },
    "polyspec_ext/levels/hugging_face.py": {
        "levels: a failed pass leaves its cache in use": (
            "            self.cache.failed = True",
            "            pass",
            "runtime/test_failures.py::test_a_first_pass_that_fails_leaves_no_cache_behind",
        ),
        "levels: a long block returns the rows of its first piece": (
            "begin = tokens.shape[1] - keep if first is None else min(first)",
            "begin = tokens.shape[1] - keep if first is None else max(first)",
            "levels/test_streaming.py::test_ragged_pieces",
            "levels/test_streaming.py::test_passes_longer_than_the_slack_go_in_pieces",
        ),
        "levels: prompts read together are restored whole": (
            "copies = [self.cache.save(row, 0, count) for row, count in enumerate(counts)]",
            "copies = [self.cache.save(0, 0, count) for row, count in enumerate(counts)]",
            "serving/test_server.py::test_short_prompts_are_read_together_beside_others[models]",
        ),
        "levels: groups of prompts take the rows of the batch in order": (
            "            whole.take(cache, group)\n",
            "            whole.take(cache, sorted(range(len(group))))\n",
            "levels/test_prefill.py::test_rows_read_apart_are_what_they_are_alone[opt]",
        ),
    },
    "polyspec_ext/levels/users.py": {
        "levels: a level keeps more than it was asked to": (
            "not 0 <= n <= m for n, m in zip(left, asked, strict=True)",
            "not 0 <= n for n, m in zip(left, asked, strict=True)",
            "drafters/test_returned.py::test_what_rollback_returns[<lambda>-ValueError-leave at most \\\\[.*\\\\] tokens, given-0-1]",
        ),
        "levels: logits of a user's level may be of another width": (
            "    if logits.shape != shape:\n",
            "    if logits.shape[:2] != shape[:2]:\n",
            "drafters/test_returned.py::test_logits[<lambda>-ValueError-= \\\\[1, \\\\d, 5\\\\], given \\\\[1, \\\\d, 4\\\\]-0]",
        ),
    },
    "polyspec_ext/levels/base.py": {
        "levels: a draft of another tokenizer is taken": (
            "differ = [i for i in shared if texts[i] != drafts[i]]",
            "differ = [i for i in shared[:1] if texts[i] != drafts[i]]",
            "levels/test_hugging_face.py::test_other_tokenizer_is_refused_by_name",
        ),
    },
    "polyspec_ext/levels/products.py": {
        "levels: merged projections keep the product of another input": (
            "if latest is None or latest[0] is not x:",
            "if latest is None or latest[0].shape != x.shape:",
            "levels/test_packed.py::test_siblings_with_different_inputs_are_told_apart",
            "levels/test_packed.py::test_threads_may_run_one_model_at_once",
        ),
    },
    "polyspec_ext/levels/fused.py": {
        "levels: hooks of a fused model do not run": (
            "    if not has_operators(module) or any(map(hooked, module.modules())):\n",
            "    if not has_operators(module):\n",
            "levels/test_stack.py::test_modules_with_hooks_are_called[model.layers.1]",
            "levels/test_stack.py::test_modules_with_hooks_are_called[model.layers.0.mlp.act_fn]",
        ),
        "levels: the residual is left out behind the attention": (
            "            rows, gates = layer.gated_in(rows, more, layer.gated_norm, epsilon)",
            "            _, gates = layer.gated_in(rows, more, layer.gated_norm, epsilon)",
            "levels/test_stack.py::test_other_models_run_their_forward[llama-more2-None]",
        ),
        "levels: hidden states of the last layer are behind the norm": (
            "count: deepest, -1: last}",
            "count: last, -1: last}",
            "levels/test_stack.py::test_modules_with_hooks_are_called[lm_head]",
        ),
        "levels: graphs do not name the tables of angles that they read": (
            "return rooms.graphs.MemoryKey(self, self.tables)",
            "return rooms.graphs.MemoryKey(self, ())",
            "runtime/test_device_trees.py::test_its_steps_are_captured[third tree]",
        ),
        "levels: angles that follow the longest position are computed once": (
            'FOLLOW_LENGTH = ("dynamic", "longrope")',
            'FOLLOW_LENGTH = ("longrope",)',
            "levels/test_stack.py::test_angles_are_the_modules[dynamic-torch.float32]",
            "drafters/test_eagle_network.py::test_rotations_that_were_computed_ahead[dynamic]",
        ),
    },
    "csrc/src/core/layer_math.hpp": {
        "ops: positions outside of the tables of angles are read": (
            "return (at < p.angles ? at : p.angles - 1) * p.width;",
            "return at * p.width;",
            "ops/test_layer.py::test_positions_outside_of_the_tables_are_the_nearest_inside",
        ),
        "ops: every new token of a row has the first one's position": (
            "  at += token * p.position_step;\n",
            "",
            "ops/test_layer.py::test_heads_are_appended_as_by_themselves[torch.float32]",
            "ctest decoder_test",
        ),
    },
    "polyspec_ext/levels/gguf.py": {
        "levels: queries of a GGUF file stay in llama.cpp's order": (
            'names = ("q_proj", "k_proj")',
            'names = ("x_proj", "k_proj")',
            "levels/test_gguf_levels.py::test_a_file_in_float32_is_its_model[False]",
        ),
        "levels: Gemma's norms of a file are one too large": (
            "            numbers -= 1\n",
            "            pass\n",
            "levels/test_gguf_truth.py::test_logits[Gemma2-gemma2-window-config6]",
        ),
        "levels: factors of frequencies are not followed": (
            "setattr(remade, table, getattr(remade, table) / factors)",
            "setattr(remade, table, getattr(remade, table) * factors)",
            "levels/test_gguf_levels.py::test_factors_of_frequencies[blocks]",
        ),
        "levels: files of a split model come in any order": (
            "            if split != (number, len(files)):\n",
            "            if split[1] != len(files):\n",
            "levels/test_gguf_levels.py::test_a_model_in_several_files[llama-blocks]",
        ),
        "levels: a tied head of a file has its own blocks": (
            "if key not in self._matrices:",
            "if True:",
            "levels/test_gguf_levels.py::test_memory_of_a_file[True]",
        ),
        "levels: ranges of a file stay in memory": (
            "self._file.madvise(mmap.MADV_DONTNEED, page, end - page)",
            "pass",
            "levels/test_gguf_levels.py::test_memory_of_a_file[False]",
        ),
        "levels: Gemma's embeddings in blocks have no scale": (
            'scale = getattr(embeds, "scalar_embed_scale", 1.0)',
            "scale = 1.0",
            "levels/test_gguf_levels.py::test_embeddings_are_the_dequantised_bits[Q8_0-torch.bfloat16]",
        ),
    },
    "polyspec_ext/levels/stateful.py": {
        "levels: a state is rolled back to its newest copy, however long": (
            "pinned = [state for state in self.pinned if state.length <= length]",
            "pinned = list(self.pinned)",
            "levels/test_stateful.py::test_logits_behind_any_rollbacks[8-False-lfm2]",
        ),
        "levels: hidden states told before a rollback stay told": (
            "        self.told = min(self.told, length)\n",
            "",
            "levels/test_stateful.py::test_hidden_states_are_those_of_one_pass[lfm2-False]",
        ),
        "levels: rows share the states in modules": (
            "            vars(states).update({name: vars(module)[name] for name in vars(states)})\n",
            "            pass\n",
            "levels/test_stateful.py::test_states_in_modules_are_the_levels",
        ),
        "levels: a checkpoint is overwritten by the next pass": (
            "            copies[name] = {key: copy.deepcopy(state) for key, state in states.items()}",
            "            copies[name] = dict(states)",
            "levels/test_stateful.py::test_logits_behind_any_rollbacks[8-False-lfm2]",
        ),
    },
    "polyspec_ext/levels/shared_cache.py": {
        "levels: a copy writes over the target's keys": (
            "            x.scatter_(2, index, torch.where(saved.to(x.device), values, after))\n",
            "            pass\n",
            "levels/test_shared_cache.py::test_a_draft_that_looks_back_leaves_the_owners_keys",
        ),
        "levels: a copy writes over the target's keys, unseen by the host": (
            "again = blind or not start.equal(end)",
            "again = not blind and not start.equal(end)",
            "levels/test_shared_cache.py::test_states_read_again_leave_the_owners_keys",
        ),
    },
    "polyspec_ext/levels/encoder_decoder.py": {
        "levels: padding of an encoder's input is attended to": (
            "            attention_mask=self._mask,\n            decoder_input_ids=tokens,",
            "            attention_mask=None,\n            decoder_input_ids=tokens,",
            "levels/test_encoder_decoder.py::test_a_masked_source",
        ),
    },
    "polyspec_ext/serving/protocol.py": {
        "serving: all choices of a request have its seed": (
            "else row_seeds(seed % (arguments.SEED_MAX + 1), count)",
            "else [seed % (arguments.SEED_MAX + 1)] * count",
            "serving/test_endpoint.py::test_choices_have_the_seeds_of_rows",
        ),
        "serving: an answer may be longer than the context": (
            "        if room is not None and new > room:\n",
            "        if room is not None and len(ids) > model.context:\n",
            "serving/test_endpoint_limits.py::test_errors_name_the_field_what_was_expected_and_what_came",
        ),
        "serving: tokens behind a stop string are counted": (
            "            if self._text.stopped is not None:\n"
            "                break\n"
            "        added, self.count = self.count + len(piece.tokens), self._text.num_tokens\n",
            "        added = self.count = self.count + len(piece.tokens)\n",
            "serving/test_endpoint.py::test_tokens_behind_a_stop_string_are_not_counted",
        ),
        "serving: offsets of a text leave out its echo": (
            "            self._offsets[index] += len(front)\n",
            "",
            "serving/test_endpoint.py::test_an_echo_begins_with_the_prompt",
        ),
    },
    "polyspec_ext/serving/api.py": {
        "serving: any key opens the endpoint": (
            'not (same and scheme.lower() == "bearer")',
            'not scheme.lower() == "bearer"',
            "serving/test_endpoint_limits.py::test_a_key_is_asked_for",
        ),
        "serving: a request goes on behind its stop string": (
            "                    self._endpoint.abort(event.request)\n",
            "                    pass\n",
            "serving/test_endpoint.py::test_a_stop_string_ends_the_request",
        ),
        "serving: pages of other hosts may send requests": (
            'if kind != "application/json":',
            "if not kind:",
            "serving/test_endpoint_limits.py::test_other_paths_methods_types_and_hosts_are_refused",
        ),
        "serving: a chunked body is read whole before it is refused": (
            "            if len(body) > self.limits.body:\n                raise too_long\n        return",
            "        if len(body) > self.limits.body:\n            raise too_long\n        return",
            "serving/test_endpoint_limits.py::test_a_chunked_body_is_refused_before_its_end",
        ),
    },
    "polyspec_ext/policies/adaptive.py": {
        "policies: a native policy reads the tokens before the committed ones": (
            "text = report.text if begins else report.text[len(report.text) - report.committed :]",
            "text = report.text if begins else report.text[: report.committed]",
            "policies/test_adaptive.py::test_cached_state_machine_finds_what_was_there_before",
        ),
        "policies: a tail counts as the level's draft tokens": (
            "            drafted = tokens - of_tail\n",
            "            drafted = tokens\n",
            "runtime/test_tail.py::test_windows_that_follow_are_told_of_verified_tokens_only[online]",
        ),
        "policies: prompts that a drafter reads are free": (
            "            self._reading[index + 1] = self._reading.get(index + 1, 0.0) + seconds",
            "            self._reading[index + 1] = 0.0",
            "runtime/test_stats.py::test_a_policy_is_told_once_of_a_step_and_of_what_was_read",
        ),
        "policies: each row's time of a step counts": (
            "step = StepReport(level, tokens, accepted, width, len(took), seconds, number > 0)",
            "step = StepReport(level, tokens, accepted, width, len(took), seconds, False)",
            "runtime/test_stats.py::test_a_policy_is_told_once_of_a_step_and_of_what_was_read",
        ),
        "policies: every request of a batch changes the drafter": (
            "elif self._first is None or report.request <= self._first:",
            "else:",
            "drafters/test_switching.py::test_rows_of_a_round_have_one_drafter",
        ),
        "policies: a drafter that was never tried is not preferred": (
            "if rounds >= 1e-3 else math.inf",
            "if rounds >= 1e-3 else 0.0",
            "drafters/test_switching.py::test_bandit_finds_the_better_drafter_and_the_change",
            "drafters/test_switching.py::test_rows_of_a_round_have_one_drafter",
        ),
    },
    "csrc/src/policy/guard.hpp": {
        "policies: trials that lose do not become rare": (
            "rest(std::min(2 * hold_, kLongest * limits_.hold));",
            "rest(limits_.hold);",
            "policies/test_guard.py::test_trials_become_rare_and_are_paid_for[online]",
        ),
    },
    "csrc/src/policy/online.cpp": {
        "policies: a block that is accepted whole counts a rejection": (
            "accepted < tokens ? 1 : 0",
            "1",
            "policies/test_adaptive.py::test_naive_share_would_be_biased",
            "policies/test_adaptive.py::test_window_is_the_argmax[Online-0.9]",
        ),
    },
    "csrc/src/policy/renewal_steps.hpp": {
        "policies: a renewal block has no correction": (
            "    sum += more * survival(j);\n    more -= pending[j];",
            "    more -= pending[j];\n    sum += more * survival(j);",
            "policies/test_guard.py::test_drafting_that_wins_is_as_fast_as_the_best_window[joint-0.3]",
        ),
    },
    "polyspec_ext/planning/theory.py": {
        "planning: a text goes on where the next one begins": (
            "        after[begins] = 0.0  # the text before is complete\n",
            "",
            "planning/test_renewal.py::test_texts_one_behind_the_other_are_apart",
            "planning/test_renewal.py::test_the_target_alone",
        ),
        "planning: rows of a batch do not wait for each other": (
            "            below *= np.concatenate([nothing, nothing + reach], 1)",
            "            below = np.concatenate([nothing, nothing + reach], 1)",
            "planning/test_renewal.py::test_rows_of_a_batch_wait_for_each_other",
            "planning/test_renewal.py::test_batches_take_the_steps_of_the_state_rows",
        ),
        "planning: a verification hands up no correction": (
            "            yield accepted + 1, chance\n            return",
            "            yield max(accepted, 1), chance\n            return",
            "planning/test_renewal.py::test_rows_of_a_batch_wait_for_each_other",
            "planning/test_theory.py::test_windows_of_the_papers_times",
        ),
    },
    "polyspec_ext/planning/planner.py": {
        "planning: the slowest chain is recommended": (
            "return sorted(some, key=lambda c: -c.predicted_tokens_per_second)",
            "return sorted(some, key=lambda c: c.predicted_tokens_per_second)",
            "planning/test_planner.py::test_plain_decoding_wins_where_drafts_are_dear",
            "planning/test_planner.py::test_what_comes_first_has_been_run",
        ),
    },
    "polyspec_ext/sampling.py": {
        "sampling: a row of seeds begins with a hash": (
            "return [_C.row_seed(seed, row) if row else seed for row in rows]",
            "return [_C.row_seed(seed, row) for row in rows]",
            "runtime/test_batches.py::test_row_seeds",
        ),
        "sampling: ties at the edge of top-p are cut": (
            "edge = scores.gather(-1, order.gather(-1, last))\n"
            '        scores = scores.masked_fill(scores < edge, -float("inf"))',
            "drop = torch.zeros_like(nucleus).scatter(-1, order, ~nucleus)\n"
            '        scores = scores.masked_fill(drop, -float("inf"))',
            "integrations/test_processors.py::test_ties_at_the_edge_of_top_p_all_stay",
            "runtime/test_request_options.py::test_alternatives_are_the_likeliest_ids[{'temperature': 1.3, 'top_p': 0.6, 'min_p': 0.1}-1]",
        ),
        "sampling: min-p is of the mass before top-p": (
            "least = sampling.min_p * mass.amax(-1, keepdim=True)",
            "least = sampling.min_p",
            "runtime/test_request_options.py::test_alternatives_are_the_likeliest_ids[{'temperature': 1.3, 'top_p': 0.6, 'min_p': 0.1}-1]",
        ),
    },
    "polyspec_ext/grammar.py": {
        "sampling: ids past the last word are allowed": (
            "row[:known], row[known:] = words[:known], 0",
            "row[:known] = words[:known]",
            "exactness/test_grammar.py::test_a_grammar_serves_many_requests_and_other_vocabularies",
        ),
        "grammar: the state is not rolled back": (
            "            self._matcher.rollback(len(self._tokens) - matched)\n",
            "",
            "exactness/test_grammar.py::test_masks_are_of_the_text_behind_the_prompt",
            "exactness/test_grammar.py::test_forced_tokens_follow_the_text",
        ),
        "grammar: a mask of an earlier text is kept": (
            "del self._tokens[matched:], self._masks[matched + 1 :]",
            "del self._tokens[matched:]",
            "exactness/test_grammar.py::test_masks_are_of_the_text_behind_the_prompt",
        ),
        "grammar: a text may end at any place": (
            "words = np.pad(words, (0, len(ends) - len(words))) & ~ends",
            "words = np.pad(words, (0, len(ends) - len(words))) | ends",
            "exactness/test_grammar.py::test_masks_are_of_the_text_behind_the_prompt",
            "exactness/test_grammar.py::test_an_id_that_ends_the_request_is_allowed_behind_a_complete_text_only",
        ),
    },
    "polyspec_ext/rules.py": {
        "rules: negative logits of repeated tokens grow": (
            "torch.where(values < 0, values * repeats, values / repeats)",
            "values / repeats",
            "runtime/test_request_options.py::test_rules_are_what_each_position_asks_for",
        ),
        "rules: presence counts every occurrence": (
            "rules.presence_penalty * (new > 0)",
            "rules.presence_penalty * new",
            "runtime/test_request_options.py::test_the_law_is_the_targets_under_its_rules[(3, 3)-[2]-3-{'presence_penalty': 1.0}-token]",
            "runtime/test_request_options.py::test_rules_are_what_each_position_asks_for",
        ),
        "rules: frequencies count the prompt": (
            "new = often(seen & (at >= self._prompt_length))",
            "new = often(seen)",
            "runtime/test_request_options.py::test_the_law_is_the_targets_under_its_rules[tree-[2]-3-{'repetition_penalty': 0.5, 'presence_penalty': 0.5, 'frequency_penalty': 0.25, 'logit_bias': {1: 0.5}, 'bad_words': [[0, 0]], 'min_new_tokens': 1}-block]",
        ),
        "rules: a text may end a token early": (
            "early = self._prompt_length + self._rules.min_new_tokens - first",
            "early = self._prompt_length + self._rules.min_new_tokens - first - 1",
            "runtime/test_request_options.py::test_the_law_is_the_targets_under_its_rules[tree-[2]-3-{'repetition_penalty': 0.5, 'presence_penalty': 0.5, 'frequency_penalty': 0.25, 'logit_bias': {1: 0.5}, 'bad_words': [[0, 0]], 'min_new_tokens': 1}-block]",
        ),
        "rules: bad words across the end of the prompt are allowed": (
            "missing = max(width - first, 0)\n"
            "        text = torch.nn.functional.pad(prefix[max(first - width, 0) :], (missing, 0), value=_NONE)",
            "missing = max(width - first, 0)\n"
            "        text = torch.nn.functional.pad(prefix[max(first - width, 0) :], (missing, 0), value=_NONE)\n"
            "        text[: max(0, self._prompt_length - first + width)] = _NONE",
            "runtime/test_request_options.py::test_the_law_is_the_targets_under_its_rules[(3, 2)-[2]-3-{'bad_words': [[1, 2], [0, 1, 1], [0, 0]]}-block]",
        ),
    },
    "polyspec_ext/inputs.py": {
        "inputs: padding in the middle of a row is left out": (
            "if seen and seen[-1] - seen[0] + 1 != len(seen):",
            "if not seen:",
            "runtime/test_batches.py::test_padding",
        ),
        "inputs: the texts of a prompt have its seed": (
            "        return row_seeds(seed, count)\n",
            "        return [seed] * count\n",
            "runtime/test_request_options.py::test_n_texts_of_each_prompt_are_rows_with_their_seeds",
            "runtime/test_batches.py::test_a_row_of_a_batch_with_one_seed_can_be_drawn_alone[0]",
        ),
        "inputs: ends of each of several texts are those of the first prompt": (
            "seed, eos[row], processors, encoded",
            "seed, eos[0], processors, encoded",
            "runtime/test_request_options.py::test_n_texts_of_each_prompt_are_rows_with_their_seeds",
        ),
    },
    "polyspec_ext/outputs.py": {
        "outputs: a text that ends at its limit has stopped": (
            'return "stop" if at_end or self.stops() else "length"',
            'return "stop"',
            "runtime/test_request_options.py::test_stop_strings_cut_the_text_that_would_be[1-False-1.0-token]",
        ),
    },
    "polyspec_ext/chain.py": {
        "chain: default ends outside the vocabulary are refused": (
            'ends = [i for i in getattr(target, "eos_token_ids", ()) if 0 <= i < vocab_size]',
            'ends = list(getattr(target, "eos_token_ids", ()))',
            "runtime/test_arguments.py::test_default_ends_outside_the_vocabulary_are_no_error",
        ),
    },
    "polyspec_ext/chat.py": {
        "chat: the newest exchange is left out first": (
            "rest = [*conversation[:begin], *conversation[cuts[number] :]]",
            "rest = [*conversation[:begin], *conversation[: len(conversation) - cuts[number] + begin]]",
            "system/test_chat.py::test_whole_exchanges_are_left_out_by_halving[40-system1]",
        ),
        "chat: the last stop string wins": (
            "            end, begin, stop = min(ends)\n",
            "            end, begin, stop = max(ends)\n",
            "runtime/test_request_options.py::test_stop_strings_cut_the_text_that_would_be[1-False-1.0-token]",
        ),
        "chat: text that may begin a stop string is shown": (
            "longest = max(map(len, self._stops), default=1) - 1",
            "longest = max(map(len, self._stops), default=1) - 2",
            "system/test_streamed_text.py::test_pieces_end_in_front_of_a_stop_string[byte-level-False]",
        ),
        "chat: bytes of an unfinished character are shown": (
            'settled = len(text.rstrip("\\ufffd"))',
            "settled = len(text)",
            "system/test_streamed_text.py::test_pieces_are_the_text_of_the_whole[byte-level-True]",
        ),
    },
    "polyspec_ext/quantization/weights.py": {
        "quantization: nibbles of a kept copy are exchanged": (
            "pairs = matrix.values[:, ::2] | matrix.values[:, 1::2] << 4",
            "pairs = matrix.values[:, 1::2] | matrix.values[:, ::2] << 4",
            "levels/test_quantized.py::test_layers_are_unpacked_and_kept_one_after_the_other",
            "levels/test_quantized.py::test_a_kept_copy_has_the_head_that_it_had[False]",
        ),
        "quantization: a damaged copy is used": (
            "            if given_sum != sums[key]:\n",
            "            if len(given_sum) != len(sums[key]):\n",
            "levels/test_quantized.py::test_a_damaged_file_is_refused",
        ),
    },
    "polyspec_ext/quantization/calibration.py": {
        "quantization: errors are fed back in the order of columns": (
            "back = order.argsort()\n",
            "back = order\n",
            "levels/test_quantized.py::test_groups_of_the_largest_inputs_are_rounded_first",
        ),
    },
    "polyspec_ext/stats.py": {
        "stats: a tail's rejected tokens count as accepted": (
            "self.num_accepted_tail_tokens += max(0, accepted - (drafted - of_tail))",
            "self.num_accepted_tail_tokens += min(accepted, of_tail)",
            "runtime/test_tail.py::test_counts_of_a_block",
        ),
        "stats: a batch of one row is counted twice": (
            "self._both = [(row,) if row is total else (row, total) for row in rows]",
            "self._both = [(row, total) for row in rows]",
            "runtime/test_stats.py::test_metrics_have_the_counts_of_all_requests",
        ),
    },
    "csrc/src/core/block_rules.hpp": {
        "core: a block is not walked again where no remembered row ends a prefix": (
            "    } while (kEndings > 1 && !found && n < remembered);",
            "    } while (kEndings > 1 && !found && n < remembered);\n    found = true;",
            "ops/test_properties.py::test_a_long_block_ends_where_the_rule_says",
        ),
        "core: rows that may end a prefix are passed over": (
            "scale * (1.0 + 0x1p-32)",
            "scale * 0.75",
            "ops/test_properties.py::test_a_long_block_ends_where_the_rule_says",
            "ops/test_properties.py::test_every_token_is_recomputed[25]",
        ),
        "core: the block rule's ratios are not capped": (
            "if (whole) scale = scale * ratio < 1.0 ? scale * ratio : 1.0;",
            "if (whole) scale = scale * ratio;",
            "ctest enumeration_test",
            "ops/test_properties.py::test_every_token_is_recomputed[25]",
        ),
        "core: the block rule's residual has the whole of p": (
            "endings[slot] = {i, p_statistics, q_statistics, scale};",
            "endings[slot] = {i, p_statistics, q_statistics, 1.0};",
            "ctest enumeration_test",
            "ops/test_properties.py::test_every_token_is_recomputed[75]",
        ),
        "core: the block rule takes whole blocks without a test": (
            "      if (behind && !(draw < scale)) break;\n",
            "",
            "ctest enumeration_test",
            "ops/test_properties.py::test_zero_residual[block]",
        ),
        "core: the block rule's longest prefix is not tested": (
            "found = end == 0 || prefix_ends(group, block, endings[slot]);",
            "found = true;",
            "ctest enumeration_test",
        ),
    },
    "csrc/src/core/verify_parts.hpp": {
        "core: the residual is p itself": (
            "const double left = static_cast<double>(p(i)) * p_scale - draft_share(i);",
            "const double left = static_cast<double>(p(i)) * p_scale;",
            "ctest correction_enumeration_test",
            "ops/test_properties.py::test_zero_residual[token]",
        ),
        "core: a try keeps what the draft would have drawn": (
            "return draw * whole < whole - draft_share(i);",
            "return draw * whole < draft_share(i);",
            "ctest correction_enumeration_test",
            "ops/test_properties.py::test_every_token_is_recomputed[25]",
        ),
        "core: a test divides by p's total and not by q's": (
            "*ratio = (p_mass * static_cast<double>(q_statistics.mass)) / (static_cast<double>(own) * p_total);",
            "*ratio = (p_mass * p_total) / (static_cast<double>(own) * static_cast<double>(q_statistics.mass));",
            "ctest ops_test",
            "ops/test_properties.py::test_every_token_is_recomputed[25]",
        ),
        "core: an id that the draft lacks is its id 0": (
            "return token < params.draft_vocab ? token : -1;",
            "return token < params.draft_vocab ? token : 0;",
            "ops/test_draft_statistics.py::test_a_token_that_the_draft_lacks_was_not_drawn_from_its_row[token]",
        ),
    },
    "csrc/src/core/distribution.hpp": {
        "core: min-p ignores the temperature": (
            "static_cast<double>(filter.temperature) * portable_log(share));",
            "portable_log(share));",
            "ops/test_properties.py::test_every_token_is_recomputed[125]",
        ),
        "core: top-p keeps the mass that it should cut": (
            "select_from_top(group, row, kept, share_of(filter.top_p, total));",
            "select_from_top(group, row, kept, share_of(1.0f - filter.top_p, total));",
            "ctest ops_test",
            "ops/test_properties.py::test_every_token_is_recomputed[25]",
        ),
        "core: ties at the maximum go to the last id": (
            "  for (int64_t i = group.rank(); i < row.n; i += group.size()) {\n"
            "    if (row[i] == max) return i;\n"
            "  }\n"
            "  return row.n;",
            "  for (int64_t i = row.n - 1; i >= 0; --i) {\n"
            "    if (row[i] == max) return i;\n"
            "  }\n"
            "  return row.n;",
            "ctest cpu_rows_test",
        ),
    },
    "csrc/src/core/rule_tree.hpp": {
        "core: a third sibling is tested against the first one's residual": (
            "    if (sibling > 0) scale += static_cast<double>(total) / unit;\n",
            "",
            "ctest tree_enumeration_test",
            "ops/test_properties.py::test_siblings_of_a_tree_are_recomputed[token]",
        ),
        "core: all children of a node have the first one's draw": (
            "return open_unit(draws.at(depth, node, Purpose::kAccept, sibling));",
            "return open_unit(draws.at(depth, node, Purpose::kAccept, 0));",
            "ops/test_properties.py::test_siblings_of_a_tree_are_recomputed[token]",
        ),
        "core: equal deterministic siblings pass": (
            "faults += tree.parent(j) == row - 1 && tree.token(j) == tree.token(i) ? 1 : 0;",
            "faults += 0;",
            "ops/test_verify_tree.py::test_faults_are_of_their_request[token-cpu]",
        ),
    },
    "csrc/src/core/rule_paths.hpp": {
        "core: a path that does not stand gives nothing back": (
            "now.left / (now.left + (1.0 - now.scale))",
            "now.left / (now.left + 1.0)",
            "ctest tree_enumeration_test",
            "ops/test_verify_tree.py::test_a_chain_with_draft_rows_gets_what_verify_gives[cpu-block]",
        ),
        "core: a later path's test forgets what is left": (
            "const double d = opening ? 1.0 : (1.0 - now.scale) + now.left;",
            "const double d = 1.0;",
            "ctest tree_enumeration_test",
            "ops/test_properties.py::test_siblings_of_a_tree_are_recomputed[block]",
        ),
    },
    "csrc/src/core/request.hpp": {
        "core: all levels have the target's draws": (
            "return keyed_draw(seed, position + offset, level, round, purpose, node);",
            "return keyed_draw(seed, position + offset, 1, round, purpose, node);",
            "ops/test_properties.py::test_every_token_is_recomputed[25]",
        ),
        "core: a try's token and its test have one draw": (
            "const int64_t node = 2 * number + which;",
            "const int64_t node = 2 * number;",
            "ctest correction_enumeration_test",
            "ops/test_properties.py::test_every_token_is_recomputed[25]",
        ),
    },
    "csrc/src/core/row.hpp": {
        "core: every word of a mask is its first": (
            "const uint32_t bits = allowed[at / 32] >> shift;",
            "const uint32_t bits = allowed[0] >> shift;",
            "ops/test_properties.py::test_every_token_is_recomputed[25]",
            "ops/test_properties.py::test_a_token_out_of_range_stops_its_request[token]",
        ),
    },
    "csrc/src/core/cuts.hpp": {
        "core: a text goes on behind its end": (
            "    kept = i + 1;\n    ended = kEndedEos;",
            "    ended = kEndedEos;",
            "ctest cuts_test",
        ),
        "core: a fault behind the end is reported": (
            "    outcome->status = 0;  // it was about a row that the text does not reach\n",
            "",
            "ctest cuts_test",
            "ops/test_cuts.py::test_a_fault_behind_the_end_is_not_reported[cpu]",
        ),
    },
    "csrc/src/core/schedule_row.hpp": {
        "schedule: a tail is longer than the room": (
            "int64_t length = words[Shape::kRoom] - 1 - target[Shape::kPending];",
            "int64_t length = words[Shape::kRoom] - target[Shape::kPending];",
            "ctest scheduler_tail_test",
        ),
        "schedule: lower levels keep rejected tokens": (
            "if (*cached > start + accepted) *cached = start + accepted;",
            "if (*cached > start + count) *cached = start + count;",
            "ctest round_state_test",
            "runtime/test_device_rounds.py::test_caches_hold_what_they_hold_step_by_step[[4, 2]]",
        ),
        "schedule: the tokens to verify begin with the token before": (
            "text[total - pending + i]",
            "text[total - pending + i - 1]",
            "ctest c_api_round_state_test",
            "ctest round_state_test",
        ),
        "schedule: the last draft token counts as read": (
            "own[Shape::kCached] = start + emitted - 1;",
            "own[Shape::kCached] = start + emitted;",
            "ctest round_state_test",
        ),
        "schedule: only the first id of several ends a text": (
            "  for (int64_t i = 0; i < p.num_eos; ++i) {",
            "  for (int64_t i = 0; i < p.num_eos && i < 1; ++i) {",
            "ctest round_state_test",
        ),
        "schedule: a row that cannot be goes on": (
            "  if (stops) words[Shape::kStopped] = 1;\n",
            "",
            "ctest round_state_edges_test",
        ),
    },
    "csrc/src/cpu/layer.cpp": {
        "cpu: a pass clears the status of earlier ones": (
            "p.status[row] |= plan.status;",
            "p.status[row] = plan.status;",
            "ops/test_layer.py::test_heads_are_appended_as_by_themselves[torch.float32]",
        ),
        "cpu: heads are turned the other way": (
            "turned<T>(first, -second,",
            "turned<T>(first, second,",
            "ops/test_layer.py::test_heads_are_turned_as_transformers_turns_them[torch.float32]",
        ),
    },
    "csrc/src/cpu/attention.cpp": {
        "attention: keys of hidden blocks are read": (
            "is_hidden<T>(p, of, begin, keys)) continue;",
            'is_hidden<T>(p, of, begin, keys)) asm volatile("");',
            "ops/test_attention.py::test_blocks_that_the_mask_hides_are_not_read[torch.bfloat16]",
        ),
        "attention: a block is hidden by its first query": (
            "const int64_t count = std::min(of.last - of.first, p.tokens);  // heads have the same mask",
            "const int64_t count = 1;",
            "ops/test_attention.py::test_blocks_that_the_mask_hides_are_not_read[torch.bfloat16]",
        ),
        "cpu: all tokens have the mask of the first": (
            "(of.first + m) % p.tokens * p.mask_stride[1] + key;",
            "key;",
            "ops/test_attention.py::test_a_row_is_what_it_is_alone[270-torch.float32]",
            "ops/test_attention.py::test_scores_that_are_not_finite[nan]",
        ),
        "cpu: sums of an earlier span are not scaled": (
            "const float own = weight_of(all.highest[m] - highest);",
            "const float own = 1.0f;",
            "ops/test_attention.py::test_is_attention[(4, 4)-torch.float32]",
        ),
    },
    "polyspec_ext/drafters/checkpoint.py": {
        "drafters: rows of a head stay unsorted where their ids are sorted": (
            "weight.copy_(weight[order.to(weight.device)])",
            "weight.copy_(weight)",
            "drafters/test_eagle_checkpoints.py::test_ids_in_any_order_draft_the_same_tokens",
        ),
    },
    "csrc/src/policy/step_times.cpp": {
        "policies: the slowest step is what steps cost": (
            "return values[(n - 1) / 2];",
            "return values[n - 1];",
            "policies/test_adaptive.py::test_a_single_slow_step_changes_no_window[Joint]",
        ),
    },
    "csrc/src/cpu/int4_product.cpp": {
        "cpu: zeros of 4-bit groups are left out": (
            "totals[n][m] = fused(zero, scales[m].sum, fused(sum, scale, totals[n][m]));",
            "totals[n][m] = fused(sum, scale, totals[n][m]);",
            "ctest int4_test",
        ),
    },
    "csrc/src/cpu/block_product.cpp": {
        "cpu: blocks of 8 bits have no bias": (
            "const int32_t offset = form.offset + (form.bits == 8 ? bias_of<8>() : 0);",
            "const int32_t offset = form.offset + 1;",
            "ctest blocks_test",
        ),
    },
    "csrc/src/cpu/block_pack.cpp": {
        "cpu: a row of blocks adds the minimum of a type without minima": (
            "*to++ = form.minima ? weight + minimum : weight;",
            "*to++ = weight + minimum;",
            "ops/test_blocks.py::test_rows_have_the_bits_of_another_reader[Q8_0]",
        ),
    },
    "csrc/src/api/checks.hpp": {
        "api: sizes whose product overflows are taken": (
            "return a == 0 || b == 0 || a <= limit / b;",
            "return a == 0 || b == 0 || static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b)) <= limit;",
            "ctest sizes_test",
        ),
    },
}

FAULTS = tuple(
    Fault(name, file, text, planted, tuple(tests))
    for file, faults in _BY_FILE.items()
    for name, (text, planted, *tests) in faults.items()
)
