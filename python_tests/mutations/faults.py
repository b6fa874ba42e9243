"""Faults to plant, each in one place, and the tests that catch them.

A test of the suite that catches none of them, and costs more than a second, has to say why it stays.
"""

# ruff: noqa: E501

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A fault: in `file`, `text`, which occurs there once, becomes `planted`.

    Attributes:
        tests: the tests that catch it, each by its node id below the repository, or as
            "ctest NAME"; the cheapest first. All faults but one in ten have one that `make test`
            runs.
        areas: folders or files below python_tests where `--search` looks for tests, beside the
            files of `tests`.
    """

    name: str
    file: str
    text: str
    planted: str
    tests: tuple[str, ...]
    areas: tuple[str, ...] = ()


FAULTS = (
    Fault(
        "runtime: rows that idle in a round lose their hidden states",
        "polyspec_ext/runtime/engine.py",
        "list(map(_ENDED, self.slots)), states",
        "[not row.active for row in self.slots], states",
        (
            "python_tests/runtime/test_cached_prompts.py::"
            "test_requests_that_come_and_go_have_their_texts[eagle]",
        ),
    ),
    Fault(
        "kv_cache: rows that move up take the keys of the row above",
        "polyspec_ext/kv_cache/layers.py",
        "self.keys[slot].copy_(self.keys[row])",
        "self.keys[slot].copy_(self.keys[max(0, row - 1)])",
        (
            "python_tests/runtime/test_cached_prompts.py::"
            "test_requests_that_come_and_go_have_their_texts[three]",
        ),
    ),
    Fault(
        "kv_cache: a copy is restored with tokens of another text",
        "polyspec_ext/runtime/prefixes.py",
        "copies.setdefault(level, []).append((copy, min(size, count)))",
        "copies.setdefault(level, []).append((copy, size))",
        (
            "python_tests/runtime/test_cached_prompts.py::"
            "test_requests_that_come_and_go_have_their_texts[three]",
        ),
    ),
    Fault(
        "runtime: draws are keyed anew after a failed round",
        "polyspec_ext/runtime/engine.py",
        "self._rows.state.begin_again(counts[[indices[id(row)] for row in self.slots]])",
        "self._rows.state.begin_again(self._rows.state.round_counts)",
        ("python_tests/serving/test_server.py::test_a_request_that_fails_ends_alone[raises]",),
    ),
    Fault(
        "runtime: the core imports captured graphs",
        "polyspec_ext/runtime/engine.py",
        "from .prefill import Caches\n",
        "from .graphs import Queue as Queue\nfrom .prefill import Caches\n",
        (
            "python_tests/system/test_structure.py::test_the_core_names_no_room",
            "python_tests/system/test_structure.py::test_the_core_runs_alone",
        ),
    ),
    Fault(
        "system: a folder imports from a layer above",
        "polyspec_ext/policies/base.py",
        "from typing import NamedTuple, Protocol, runtime_checkable\n",
        "from typing import NamedTuple, Protocol, runtime_checkable\n\nfrom ..inputs import Ends as Ends\n",
        (
            "python_tests/system/test_structure.py::test_folders_import_from_lower_layers_only",
            "python_tests/system/test_structure.py::test_imports_form_no_cycle",
        ),
    ),
    Fault(
        "system: a file uses the private name of another",
        "polyspec_ext/serving/server.py",
        "self.chain.owner.end(self._batch)",
        "self.chain.owner.end(self._batch._engine and self._batch)",
        ("python_tests/system/test_structure.py::test_private_names_stay_in_their_file",),
    ),
    Fault(
        "system: the bar of a prompt overwrites a streamed text",
        "polyspec_ext/progress.py",
        "        first = list(itertools.islice(rest, 1))\n    yield from first\n    yield from rest\n",
        "        yield from rest\n",
        ("python_tests/system/test_chat.py::test_a_long_prompt_is_read_with_a_bar[generate-True]",),
    ),
    Fault(
        "system: weights are counted and not their bytes",
        "polyspec_ext/progress.py",
        "counts = [sizes.get(thing[0], mean) for thing in things]",
        "counts = [1 for thing in things]",
        ("python_tests/system/test_progress.py::test_models_load_with_a_bar_of_bytes[True]",),
    ),
    Fault(
        "system: the docstring of a short private function",
        "polyspec_ext/serving/server.py",
        "def _size(row: Row) -> int:\n",
        'def _size(row: Row) -> int:\n    """Return the tokens of a request."""\n',
        ("python_tests/system/test_words.py::test_short_private_functions_have_no_docstring",),
    ),
    Fault(
        "runtime: paused rows take part in rounds",
        "polyspec_ext/runtime/engine.py",
        "row.paused = any(row is other for other in paused)",
        "row.paused = False",
        ("python_tests/serving/test_server.py::test_a_request_that_fails_ends_alone[drafter]",),
    ),
    Fault(
        "runtime: a replaced text keeps its last token in the caches",
        "polyspec_ext/runtime/prefixes.py",
        "min(common_prefix(row.tokens, text), len(text) - 1)",
        "common_prefix(row.tokens, text)",
        (
            "python_tests/integrations/test_draft_chain.py::test_vocabularies_of_different_sizes[7]",
            "python_tests/integrations/test_draft_chain.py::test_an_interrupt_at_any_line_leaves_no_draft_of_another_text",
        ),
    ),
    Fault(
        "runtime: log-probabilities of a replaced text stay",
        "polyspec_ext/runtime/engine.py",
        "            row.logprobs.clear()\n            row.origins.clear()",
        "            row.origins.clear()",
        (
            "python_tests/integrations/test_draft_chain.py::test_drafts_go_on_and_end_where_there_is_no_room",
        ),
    ),
    Fault(
        "runtime: the bound of a request's windows is ignored",
        "polyspec_ext/runtime/engine.py",
        "sizes = tuple(min(size, row.request.window_bound) for size in sizes)",
        "pass",
        ("python_tests/serving/test_server.py::test_windows_are_bounded_by_request[1]",),
    ),
    Fault(
        "runtime: new windows wait for the end of the plan",
        "polyspec_ext/runtime/engine.py",
        "            self._rows.state.set_windows(slot, (*sizes, *rounds))\n"
        "            self._rounds_left = 0",
        "            self._rows.state.set_windows(slot, (*sizes, *rounds))",
        (
            "python_tests/exactness/test_law.py::test_the_law_is_the_targets[random windows below 1-token-None]",
            "python_tests/exactness/test_law.py::test_the_law_is_the_targets[windows [[1], [0], [2]]-token-False]",
        ),
    ),
    Fault(
        "runtime: rows that move keep their old slot",
        "polyspec_ext/runtime/engine.py",
        "        for slot, row in enumerate(staying):\n            row.slot = slot\n",
        "",
        (
            "python_tests/runtime/test_batches.py::test_passes_and_seconds_are_counted_once_for_the_batch",
            "python_tests/runtime/test_batches.py::test_rows_leave_and_the_caches_shrink",
        ),
    ),
    Fault(
        "runtime: the bonus token of every level has the target's keys",
        "polyspec_ext/runtime/engine.py",
        '"level": number,',
        '"level": 1,',
        (
            "python_tests/exactness/test_one_screen.py::test_every_row_of_a_chain_is_that_of_the_one_screen",
        ),
    ),
    Fault(
        "runtime: verifications of a position share a draw",
        "polyspec_ext/runtime/engine.py",
        '"round": local.rounds,',
        '"round": torch.zeros_like(local.rounds),',
        ("python_tests/integrations/test_draft_chain.py::test_no_draw_comes_twice[[]]",),
    ),
    Fault(
        "runtime: rows verify more draft tokens than they have",
        "polyspec_ext/runtime/engine.py",
        '"draft_lengths": local.lengths, "draft_statistics"',
        '"draft_lengths": None, "draft_statistics"',
        (
            "python_tests/exactness/test_law.py::test_the_law_is_the_targets[tail, [1, 1, 1]-block-False]",
        ),
    ),
    Fault(
        "runtime: forbidden ids stay in the rows for the level above",
        "polyspec_ext/runtime/forced.py",
        "        if step.level == 1 and not observed:\n",
        "        if not observed:\n",
        (
            "python_tests/exactness/test_grammar.py::test_the_law_with_trees[True-2]",
            "python_tests/exactness/test_grammar.py::test_the_law_where_the_drafter_has_no_allowed_id",
        ),
    ),
    Fault(
        "runtime: a level returns to a checkpoint unnoticed",
        "polyspec_ext/runtime/engine.py",
        "        if least != list(asked):",
        "        if not least:",
        (
            "python_tests/levels/test_recurrent.py::test_a_hugging_face_model_with_a_recurrent_state[[1, 3]-1.0]",
        ),
    ),
    Fault(
        "runtime: observers get the logits of rejected tokens",
        "polyspec_ext/runtime/engine.py",
        "self._observe(row.number, logits[slot, :emitted])",
        "self._observe(row.number, logits[slot, -emitted:])",
        (
            "python_tests/runtime/test_request_options.py::test_alternatives_are_the_likeliest_ids[{'temperature': 1.0}-3]",
        ),
    ),
    Fault(
        "runtime: an error names the first position of its block",
        "polyspec_ext/runtime/engine.py",
        "at = position + (emitted if level == self._count else accepted)",
        "at = position",
        ("python_tests/runtime/test_batches.py::test_a_bad_row_is_named[1-5-inf]",),
    ),
    Fault(
        "runtime: a text has a token more than allowed",
        "polyspec_ext/runtime/engine.py",
        "if ended or len(row.logprobs) >= row.max_new_tokens:",
        "if ended or len(row.logprobs) > row.max_new_tokens:",
        (
            "python_tests/runtime/test_batches.py::test_padding",
            "python_tests/runtime/test_batches.py::test_passes_and_seconds_are_counted_once_for_the_batch",
        ),
    ),
    Fault(
        "runtime: a rejected draft token counts as the level's own",
        "polyspec_ext/runtime/rows.py",
        "[Origin(level, accepted < checked)]",
        "[Origin(level, False)]",
        ("python_tests/runtime/test_stats.py::test_origins_name_the_level_and_the_corrections",),
    ),
    Fault(
        "runtime: a row takes the windows of another row's slot",
        "polyspec_ext/runtime/rows.py",
        "                state.windows[index] = self.windows[row]\n",
        "                state.windows[index] = self.windows[index]\n",
        (
            "python_tests/runtime/test_batches.py::test_a_level_reads_the_rows_that_it_drafts_for[100-True]",
        ),
    ),
    Fault(
        "runtime: tails are verified with statistics of other rows",
        "polyspec_ext/runtime/rows.py",
        "        if level == 1 and not self.tail_has_statistics:\n            statistics = None\n",
        "",
        (
            "python_tests/exactness/test_law.py::test_the_law_is_the_targets[some ids last, tail-token-None]",
        ),
    ),
    Fault(
        "runtime: rows of a tail go to rows without one",
        "polyspec_ext/runtime/rows.py",
        "        slots = slots.where(of_tail[:, None] > 0, padding)\n",
        "",
        (
            "python_tests/exactness/test_one_screen.py::test_every_row_of_a_chain_is_that_of_the_one_screen",
        ),
    ),
    Fault(
        "runtime: processors do not see the bonus row",
        "polyspec_ext/runtime/forced.py",
        "yield slot, slice(0, length + 1), text",
        "yield slot, slice(0, length), text",
        (
            "python_tests/runtime/test_request_options.py::test_rules_go_before_the_processors_of_a_batch",
            "python_tests/runtime/test_request_options.py::test_the_law_is_the_targets_under_its_rules[(3, 2)-[2]-3-{'bad_words': [[1, 2], [0, 1, 1], [0, 0]]}-token]",
        ),
    ),
    Fault(
        "runtime: a retry leaves the other rows paused",
        "polyspec_ext/runtime/batch.py",
        "                engine.begin_again()\n        engine.pause(paused)",
        "                engine.begin_again()",
        ("python_tests/serving/test_server.py::test_a_request_that_fails_ends_alone[raises]",),
    ),
    Fault(
        "runtime: a policy is told of all tokens in every round",
        "polyspec_ext/runtime/batch.py",
        "new, row.num_reported = len(row.tokens) - row.num_reported, len(row.tokens)",
        "new = len(row.tokens) - row.num_reported",
        ("python_tests/policies/test_window_policy.py::test_reports",),
    ),
    Fault(
        "runtime: a level of two chains keeps the first one's batch",
        "polyspec_ext/runtime/batch.py",
        "        for _, cache in self._caches:\n            cache.batch = weakref.ref(batch)",
        "        self._chain.batch = weakref.ref(batch)",
        (
            "python_tests/runtime/test_threads.py::test_a_stream_ends_where_another_chain_takes_one_of_its_levels[0]",
            "python_tests/levels/test_shared_cache.py::test_a_stream_ends_where_another_chain_takes_the_cache[copy]",
        ),
    ),
    Fault(
        "runtime: rules of requests that join are forgotten",
        "polyspec_ext/runtime/batch.py",
        "            self._engine.join(rows, readings)\n"
        "        for row in rows:\n"
        "            self._processors.add(row.number, row.request.processors)\n",
        "            self._engine.join(rows, readings)\n",
        (
            "python_tests/serving/test_server.py::test_rules_and_alternatives_are_those_of_the_request",
            "python_tests/serving/test_endpoint.py::test_rules_change_the_text[logit_bias]",
        ),
    ),
    Fault(
        "runtime: a failed batch goes on",
        "polyspec_ext/runtime/batch.py",
        "        except BaseException:\n            self._owner.end(self)\n            raise",
        "        except BaseException:\n            raise",
        ("python_tests/runtime/test_failures.py::test_an_observer_or_a_stream_that_fails",),
    ),
    Fault(
        "runtime: a tail is missing in the tokens that a level has not read",
        "polyspec_ext/runtime/plan.py",
        "return level + (self.tail if 1 < level < self.levels else 0)",
        "return level",
        ("python_tests/runtime/test_tail.py::test_a_tail_saves_passes_of_the_level_between",),
    ),
    Fault(
        "runtime: a block has no correction",
        "polyspec_ext/runtime/plan.py",
        "block, bound = max_pending[level] + 1, rounds[level - 1]",
        "block, bound = max_pending[level], rounds[level - 1]",
        ("python_tests/runtime/test_plan.py::test_plans",),
    ),
    Fault(
        "runtime: as many rounds as tokens fill a window",
        "polyspec_ext/runtime/plan.py",
        "return [max(1, -(-window // (below + 1))) for window, below in pairs]",
        "return [max(1, -(-window // max(below, 1))) for window, below in pairs]",
        ("python_tests/runtime/test_plan.py::test_default_rounds",),
    ),
    Fault(
        "runtime: a tail's draft never reads what is pending",
        "polyspec_ext/runtime/graphs.py",
        "late = plan.tail > 0 and plan.levels > 3 and index == len(plan.steps) - 2",
        "late = False",
        ("python_tests/runtime/test_plan.py::test_a_tail_s_draft_may_be_the_drafter_s_first",),
    ),
    Fault(
        "runtime: trees have a tail",
        "polyspec_ext/runtime/plan.py",
        "        if config.tail:\n",
        "        if False:\n",
        ("python_tests/runtime/test_tail.py::test_what_is_refused",),
    ),
    Fault(
        "runtime: a queued round passes the end of a context",
        "polyspec_ext/runtime/graphs.py",
        "short = member.max_length is not None and longest > member.max_length",
        "short = False",
        (
            "python_tests/runtime/test_device_rounds.py::test_processors_and_ends_of_the_context_are_followed",
        ),
    ),
    Fault(
        "runtime: a plan outlives the room of its rows",
        "polyspec_ext/runtime/plan.py",
        "return 1 + max(0, left // (plan.max_pending[0] + 1))",
        "return 1 + max(0, left)",
        (
            "python_tests/runtime/test_device_rounds.py::test_processors_and_ends_of_the_context_are_followed",
        ),
    ),
    Fault(
        "runtime: missed tokens are read with the last one",
        "polyspec_ext/runtime/prefill.py",
        "unread[row.slot] = row.tokens[cached[row.slot] : -1]",
        "unread[row.slot] = row.tokens[cached[row.slot] :]",
        (
            "python_tests/runtime/test_batches.py::test_a_level_reads_the_rows_that_it_drafts_for[20-True]",
            "python_tests/serving/test_server.py::test_a_prompt_is_read_by_the_levels_that_draft",
        ),
    ),
    Fault(
        "runtime: a draft model reads ids that it does not know",
        "polyspec_ext/runtime/prefill.py",
        "counted = None if min(counts) == tokens.shape[1] else counts\n"
        "                    tokens = self.config.id_maps[number - 1].to_below(tokens)\n",
        "counted = None if min(counts) == tokens.shape[1] else counts\n",
        (
            "python_tests/levels/test_hugging_face.py::test_a_smaller_draft_never_reads_ids_that_it_does_not_know",
        ),
    ),
    Fault(
        "runtime: padding of prompts is read",
        "polyspec_ext/runtime/prefill.py",
        "counted = None if min(counts) == tokens.shape[1] else counts",
        "counted = None",
        (
            "python_tests/runtime/test_batches.py::test_padding",
            "python_tests/runtime/test_batches.py::test_a_level_reads_the_rows_that_it_drafts_for[100-True]",
        ),
    ),
    Fault(
        "runtime: a side stream begins before the queued work",
        "polyspec_ext/runtime/prefill.py",
        "        stream.wait_event(self._begun[device])\n",
        "",
        (
            "python_tests/runtime/test_streams.py::test_side_streams_follow_what_was_queued_and_not_each_other",
        ),
    ),
    Fault(
        "runtime: a draft's encoder is the target's",
        "polyspec_ext/runtime/prefill.py",
        "known = encoded if number == 1 else below",
        "known = encoded",
        ("python_tests/levels/test_encoder_decoder.py::test_generate_gives_the_same_text",),
    ),
    Fault(
        "runtime: a later pass overwrites the hidden states of a replay",
        "polyspec_ext/runtime/graphs.py",
        "hidden = {at: x.clone() for at, x in zip(",
        "hidden = {at: x for at, x in zip(",
        (
            "python_tests/runtime/test_passes.py::test_a_head_that_the_host_follows[eagle-late-False]",
        ),
    ),
    Fault(
        "runtime: the host does not learn the lengths of a queued round",
        "polyspec_ext/runtime/graphs.py",
        "        for level in plan.asked:\n"
        "            self._lengths(level).note_lengths(state.cached(level))\n",
        "",
        (
            "python_tests/runtime/test_device_rounds.py::test_caches_hold_what_they_hold_step_by_step[[3]]",
        ),
    ),
    Fault(
        "runtime: the latest graph goes first",
        "polyspec_ext/runtime/graphs.py",
        "            if len(self._graphs) > self._limit:\n"
        "                self._graphs.popitem(last=False)",
        "            if len(self._graphs) > self._limit:\n"
        "                self._graphs.popitem(last=True)",
        ("python_tests/runtime/test_graphs.py::test_graphs_are_bounded_and_the_oldest_goes",),
    ),
    Fault(
        "runtime: a failed capture leaves its stream current",
        "polyspec_ext/runtime/graphs.py",
        "                cuda.set_stream(current)\n",
        "",
        ("python_tests/runtime/test_graphs.py::test_a_capture_that_fails_restores_the_stream",),
    ),
    Fault(
        "runtime: failures of captures add up for ever",
        "polyspec_ext/runtime/graphs.py",
        "        self._failures.pop(kind, None)\n        self.num_captures += 1",
        "        self.num_captures += 1",
        (
            "python_tests/runtime/test_graphs.py::test_failures_that_do_not_follow_each_other_do_not_add_up",
        ),
    ),
    Fault(
        "runtime: forced tokens leave out the last draft tokens",
        "polyspec_ext/runtime/forced.py",
        "        begin, end = len(run), len(run) + count\n",
        "        begin, end = len(run), max(len(run), count)\n",
        (
            "python_tests/exactness/test_grammar.py::test_forced_tokens_are_free_drafts[lookup, rules-1.0]",
        ),
    ),
    Fault(
        "runtime: memory of another owner is the same",
        "polyspec_ext/runtime/graphs.py",
        "            and self.owner() is other.owner()\n",
        "",
        (
            "python_tests/runtime/test_graphs.py::test_the_same_address_of_another_owner_is_another_place",
        ),
    ),
    Fault(
        "kv_cache: status bits are lost as rows leave",
        "polyspec_ext/kv_cache/lengths.py",
        "        self.status.copy_(status)\n",
        "",
        ("python_tests/kv_cache/test_rollback.py::test_bad_counts_set_a_status_and_keep_the_row",),
    ),
    Fault(
        "tensors: seeds from 2**63 on are one seed",
        "polyspec_ext/tensors.py",
        "bits = [seed - 2**64 if seed >= 2**63 else seed for seed in seeds]",
        "bits = [min(seed, 2**63 - 1) for seed in seeds]",
        (
            "python_tests/runtime/test_batches.py::test_a_row_of_a_batch_with_one_seed_can_be_drawn_alone[18446744073709551615]",
        ),
    ),
    Fault(
        "tensors: ids that a level does not draw have logit 0",
        "polyspec_ext/tensors.py",
        'full = rows.new_full((*rows.shape[:-1], vocab_size), -float("inf"))',
        "full = rows.new_full((*rows.shape[:-1], vocab_size), 0.0)",
        (
            "python_tests/exactness/test_law.py::test_the_law_is_the_targets[switching, some ids-block-None]",
            "python_tests/exactness/test_law.py::test_the_law_is_the_targets[some ids last, tail-token-None]",
        ),
    ),
    Fault(
        "tensors: the last common token differs",
        "polyspec_ext/tensors.py",
        "return next(differ, min(len(one), len(other)))",
        "return next(differ, min(len(one), len(other)) - 1)",
        (
            "python_tests/runtime/test_prefixes.py::test_no_token_is_kept_twice",
            "python_tests/runtime/test_prefixes.py::test_the_least_recently_used_go_first",
        ),
    ),
    Fault(
        "kv_cache: a pass of some rows counts as one of all",
        "polyspec_ext/kv_cache/lengths.py",
        "            if min(known) == new:\n",
        "            if max(known) == new:\n",
        ("python_tests/kv_cache/test_rollback.py::test_rows_equal_each_row_alone[llama-sdpa]",),
    ),
    Fault(
        "kv_cache: a mask of a few tokens shows a later one",
        "polyspec_ext/kv_cache/rollback.py",
        "before = self._strip.shape[1] - _STRIP - base\n",
        "before = self._strip.shape[1] - _STRIP - base - 1\n",
        ("python_tests/levels/test_model_families.py::test_family[opt]",),
    ),
    Fault(
        "kv_cache: paths move where keys lay before",
        "polyspec_ext/kv_cache/layers.py",
        "self.keys, self.values = self.keys[: len(chosen)], self.values[: len(chosen)]\n"
        "            self.rows.memory.clear()",
        "self.keys, self.values = self.keys[: len(chosen)], self.values[: len(chosen)]",
        ("python_tests/kv_cache/test_rollback.py::test_paths_move_where_keys_lie_now[leave]",),
    ),
    Fault(
        "kv_cache: a batch begins with the keys of the one before",
        "polyspec_ext/kv_cache/rollback.py",
        "  # even if unchanged: an interrupt may have left it half done\n        self.reset()\n",
        "\n        self.rows.reset()\n",
        ("python_tests/levels/test_admit.py::test_a_batch_that_begins_with_sequences",),
    ),
    Fault(
        "kv_cache: rows that join have the tokens of rows that left",
        "polyspec_ext/kv_cache/rollback.py",
        "        self.rows.clear(rows)\n",
        "",
        (
            "python_tests/levels/test_admit.py::test_a_text_without_tokens_takes_the_place_of_another",
        ),
    ),
    Fault(
        "kv_cache: padding of a tree has positions past the context",
        "polyspec_ext/kv_cache/rollback.py",
        "                positions = torch.where(inside, positions, last[:, None])\n",
        "",
        ("python_tests/levels/test_trees.py::test_a_tree_in_several_passes[gpt2-False]",),
    ),
    Fault(
        "kv_cache: values do not grow with their keys",
        "polyspec_ext/kv_cache/layers.py",
        "            values[:, :, : old_values.shape[2]] = old_values\n",
        "",
        (
            "python_tests/kv_cache/test_rollback.py::test_rollback_moves_no_bytes_and_growth_keeps_them",
            "python_tests/kv_cache/test_rollback.py::test_without_inputs_while_rows_are_equally_long",
        ),
    ),
    Fault(
        "kv_cache: a row in the place of another has its NaNs",
        "polyspec_ext/kv_cache/layers.py",
        "            self.keys[row].zero_()\n            self.values[row].zero_()",
        "            self.keys[row].zero_()",
        ("python_tests/levels/test_admit.py::test_nothing_of_the_row_before_is_left[True]",),
    ),
    Fault(
        "kv_cache: slots behind a rollback keep their NaNs",
        "polyspec_ext/kv_cache/layers.py",
        "dirty = min(self.rows.peak, self._slots()) if self.on_cpu",
        "dirty = min(self.rows.bound, self._slots()) if self.on_cpu",
        ("python_tests/kv_cache/test_rollback.py::test_a_new_batch_begins_with_zeros",),
    ),
    Fault(
        "kv_cache: padding in an empty row has position -1",
        "polyspec_ext/kv_cache/layers.py",
        "counts[:, None] - 1)).clamp_(min=0)",
        "counts[:, None] - 1))",
        (
            "python_tests/kv_cache/test_rollback_variants.py::test_padding_repeats_a_position_that_there_is",
        ),
    ),
    Fault(
        "kv_cache: a sliding window has a token more in a tree",
        "polyspec_ext/kv_cache/layers.py",
        "behind[:, None, :] > depth[..., None] - window",
        "behind[:, None, :] >= depth[..., None] - window",
        (
            "python_tests/levels/test_trees.py::test_nodes_see_their_own_text[mistral, sliding window-eager]",
        ),
    ),
    Fault(
        "kv_cache: sinks leave the window",
        "polyspec_ext/kv_cache/layers.py",
        "seen = seen & (near if sinks == 0 else near | (held < sinks))",
        "seen = seen & near",
        (
            "python_tests/kv_cache/test_rollback_variants.py::test_streaming_equals_positions_within_the_cache[llama]",
        ),
    ),
    Fault(
        "kv_cache: a state is found without the token before it",
        "polyspec_ext/runtime/prefixes.py",
        "most = lengths.get(ahead[level], 0) - 1",
        "most = lengths.get(ahead[level], 0)",
        ("python_tests/runtime/test_prefixes.py::test_states_of_whole_texts",),
    ),
    Fault(
        "kv_cache: leaves outlive the runs above them",
        "polyspec_ext/runtime/prefixes.py",
        "for run, _ in reversed(path):",
        "for run, _ in path:",
        ("python_tests/runtime/test_prefixes.py::test_what_is_found_was_read",),
    ),
    Fault(
        "kv_cache: one state too many is kept",
        "polyspec_ext/runtime/prefixes.py",
        "while len(known) > self._most_states:",
        "while len(known) > self._most_states + 1:",
        ("python_tests/runtime/test_prefixes.py::test_states_of_whole_texts",),
    ),
    Fault(
        "kv_cache: sinks stay at their first positions",
        "polyspec_ext/kv_cache/streaming.py",
        "sinks.copy_(turn(self.sink_keys, evicted, self.frequencies))",
        "sinks.copy_(self.sink_keys)",
        (
            "python_tests/kv_cache/test_rollback_variants.py::test_streaming_equals_positions_within_the_cache[llama]",
        ),
    ),
    Fault(
        "kv_cache: a ring overwrites its sinks",
        "csrc/src/core/kv_index.hpp",
        "return p.sinks + (position - p.sinks) % ring;",
        "return position % p.capacity;",
        (
            "ctest kv_cache_test",
            "python_tests/kv_cache/test_rollback_variants.py::test_streaming_equals_positions_within_the_cache[llama]",
        ),
    ),
    Fault(
        "kv_cache: a path may have a node twice",
        "csrc/src/core/kv_index.hpp",
        "if (nodes[count] <= last || nodes",
        "if (nodes[count] < last || nodes",
        ("ctest kv_tree_test",),
    ),
    Fault(
        "kv_cache: a page more than needed is reserved",
        "csrc/src/core/kv_pages.hpp",
        "return tokens / p.page_size + (tokens % p.page_size != 0);",
        "return tokens / p.page_size + 1;",
        (
            "ctest kv_pages_test",
            "python_tests/ops/test_kv.py::test_pages_are_reserved_filled_and_given_back[cpu-dtype0]",
        ),
    ),
    Fault(
        "kv_cache: a node next to its place is not moved",
        "csrc/src/cpu/kv_cache.cpp",
        "if (path.nodes[j] == j) continue;",
        "if (path.nodes[j] <= j + 1) continue;",
        (
            "ctest kv_tree_test",
            "python_tests/kv_cache/test_rollback.py::test_paths_move_where_keys_lie_now[select]",
        ),
    ),
    Fault(
        "ops: seeds from 2**63 on are refused or another seed",
        "polyspec_ext/ops/verification.py",
        "numbers[_SEED] -= 2**64  #",
        "numbers[_SEED] = INT64_MAX  #",
        ("python_tests/ops/test_torch_integration.py::test_seed_is_64_bits[cpu]",),
    ),
    Fault(
        "ops: an allow-mask may be a word too short",
        "csrc/bindings/torch_ops.cpp",
        "const int64_t words = (params->vocab + 31) / 32;",
        "const int64_t words = params->vocab < 32 ? 1 : params->vocab / 32;",
        ("python_tests/ops/test_properties.py::test_every_token_is_recomputed[25]",),
    ),
    Fault(
        "ops: draft rows may be wider than the target's",
        "csrc/bindings/torch_ops.cpp",
        "draft->size(rank - 1) <= params.vocab",
        "draft->size(rank - 1) >= 0",
        (
            "python_tests/ops/test_errors.py::test_wrong_argument_is_named[verify-verify_arguments-case97]",
        ),
    ),
    Fault(
        "ops: the parameters at slots count as many as requests",
        "csrc/bindings/torch_ops.cpp",
        "params->num_slots = place->holders = (*value)->size(0);",
        "params->num_slots = (*value)->size(0);",
        (
            "python_tests/ops/test_indexed_verify.py::test_same_bits_however_the_rows_lie[cpu-slotted-token]",
        ),
    ),
    Fault(
        "ops: a fake result has the shape of another argument",
        "polyspec_ext/ops/decoder.py",
        '"polyspec::compact_tree", _lengths(3)',
        '"polyspec::compact_tree", _lengths(4)',
        ("python_tests/ops/test_kv.py::test_opcheck",),
    ),
    Fault(
        "ops: a compiled report has levels and rows exchanged",
        "polyspec_ext/ops/schedule.py",
        "return state.new_empty(tokens.shape), state.new_empty(levels, state.shape[0])",
        "return state.new_empty(tokens.shape), state.new_empty(state.shape[0], levels)",
        ("python_tests/ops/test_schedule.py::test_opcheck",),
    ),
    Fault(
        "ops: paths draw at the position before their depth",
        "polyspec_ext/ops/verification.py",
        '"position": positions + column, "level"',
        '"position": positions, "level"',
        ("python_tests/drafters/test_paths.py::test_draws_are_keyed_by_path",),
    ),
    Fault(
        "drafters: nodes of a level have the parents of the level before",
        "polyspec_ext/drafters/trees.py",
        "read.append(chosen + (k + (level - 1) * k * k))",
        "read.append(chosen + (level - 1) * k * k)",
        (
            "python_tests/drafters/test_draft_trees.py::test_dynamic_tree[3-4-12]",
            "python_tests/drafters/test_draft_trees.py::test_nothing_follows_a_row_without_a_distribution",
        ),
    ),
    Fault(
        "drafters: a static tree leaves out its deepest nodes",
        "polyspec_ext/drafters/trees.py",
        "counts = (depths <= lengths[:, None]).sum(1)",
        "counts = (depths < lengths[:, None]).sum(1)",
        (
            "python_tests/drafters/test_draft_trees.py::test_rows_of_different_depth[tree1]",
            "python_tests/drafters/test_draft_trees.py::test_static_tree",
        ),
    ),
    Fault(
        "drafters: all paths have the same draws",
        "polyspec_ext/drafters/trees.py",
        "self._nodes = torch.arange(paths, device=device).repeat(batch)",
        "self._nodes = torch.zeros(paths * batch, dtype=torch.int64, device=device)",
        ("python_tests/drafters/test_paths.py::test_draws_are_keyed_by_path",),
    ),
    Fault(
        "drafters: the children of the root see no token before the tree",
        "polyspec_ext/runtime/trees.py",
        "self.parents.gather(1, at) + lags[:, None], parents)",
        "self.parents.gather(1, at) + lags[:, None] - 1, parents)",
        (
            "python_tests/exactness/test_law.py::test_the_law_is_the_targets[tree [2, 2]-token-None]",
        ),
    ),
    Fault(
        "drafters: hidden states of a path are those of its first nodes",
        "polyspec_ext/runtime/trees.py",
        "nodes = path.gather(1, (reach - lags).clamp(0, path.shape[1] - 1)) if path.shape[1] else 0",
        "nodes = (reach - lags).clamp_min(0)",
        ("python_tests/exactness/test_head_screen.py::test_heads[eagle static]",),
    ),
    Fault(
        "drafters: a tree may be deeper than asked",
        "polyspec_ext/drafters/trees.py",
        "if (deepest := max(depths.values())) > most:",
        "if (deepest := max(depths.values())) > most + 1:",
        (
            "python_tests/drafters/test_draft_trees.py::test_wrong_trees_are_named[a tree of at most 2 levels, given 3]",
        ),
    ),
    Fault(
        "drafters: a suffix is compared with one token too few",
        "polyspec_ext/drafters/lookup.py",
        "ends = ends[text[ends - size - 1] == text[count - size - 1]]",
        "ends = ends[text[ends - size] == text[count - size]]",
        (
            "python_tests/drafters/test_lookup.py::test_prompt_lookup_finds_what_a_search_finds[(3, 1)]",
            "python_tests/drafters/test_lookup.py::test_suffixes_are_those_that_a_search_finds[8]",
        ),
    ),
    Fault(
        "drafters: of equally frequent tokens the first is drafted",
        "polyspec_ext/drafters/lookup.py",
        "return max(reversed(counts), key=counts.__getitem__)",
        "return max(counts, key=counts.__getitem__)",
        (
            "python_tests/drafters/test_lookup.py::test_what_followed_most_often",
            "python_tests/drafters/test_lookup.py::test_only_so_many_are_kept",
        ),
    ),
    Fault(
        "drafters: a row learns from the row before it",
        "polyspec_ext/drafters/lookup.py",
        "            self._close(self._text)  # a request ends when the next begins",
        "            self._close()",
        ("python_tests/drafters/test_lookup.py::test_rows_of_a_batch_do_not_see_each_other",),
    ),
    Fault(
        "drafters: a suffix that reaches the end of the text is not repeated",
        "polyspec_ext/drafters/lookup.py",
        "return Proposal([tokens[start + i % period] for i in range(k)])",
        "return Proposal([tokens[start + min(i, period - 1)] for i in range(k)])",
        ("python_tests/drafters/test_lookup.py::test_a_period_goes_on_behind_the_end_of_the_text",),
    ),
    Fault(
        "drafters: a user's drafter is not told of a rollback",
        "polyspec_ext/drafters/proposals.py",
        "            context.valid = min(context.valid, length)\n",
        "",
        ("python_tests/drafters/test_lookup.py::test_a_context_says_how_much_of_the_text_stands",),
    ),
    Fault(
        "drafters: ids beyond a smaller vocabulary may be drawn",
        "polyspec_ext/drafters/proposals.py",
        '    logits[: draft.rows] = -float("inf")  # ids beyond a smaller vocabulary are never drawn\n',
        "",
        (
            "python_tests/drafters/test_proposal_kinds.py::test_forks_may_share_their_memory_and_not_their_vocabulary[20]",
        ),
    ),
    Fault(
        "drafters: the first end of a text is cut off",
        "polyspec_ext/drafters/proposals.py",
        "end = next((i for i, token in enumerate(tokens, 1) if token in eos), None)",
        "end = next((i for i, token in enumerate(tokens) if token in eos), None)",
        ("python_tests/drafters/test_lookup.py::test_drafts_end_with_the_first_end_of_a_text",),
    ),
    Fault(
        "drafters: rows that are done read padding",
        "polyspec_ext/drafters/model.py",
        "counts = None if all(left) else RowCounts(left).less(0, 1)",
        "counts = None",
        (
            "python_tests/policies/test_window_policy.py::test_rows_do_not_see_each_others_windows[False]",
        ),
    ),
    Fault(
        "drafters: the last node of a path is kept unread",
        "polyspec_ext/drafters/model.py",
        "return self._level.keep_path(begin, path.where(is_read, -1), lengths)",
        "return self._level.keep_path(begin, path, lengths)",
        (
            "python_tests/drafters/test_paths.py::test_the_accepted_path_stays_in_the_cache[[3]-0.0]",
        ),
    ),
    Fault(
        "drafters: rows of logits fit any window",
        "polyspec_ext/drafters/model.py",
        "fits = shape[0] == batch and shape[1] >= most and shape[2] == vocab",
        "fits = shape[0] == batch and shape[2] == vocab",
        (
            "python_tests/exactness/test_law.py::test_the_law_is_the_targets[random windows below 1-token-None]",
        ),
    ),
    Fault(
        "drafters: EAGLE-3 reads the layers of another head by default",
        "polyspec_ext/drafters/eagle.py",
        "value = [2, target_layers // 2, target_layers - 3]",
        "value = [2, target_layers // 2, target_layers - 2]",
        (
            "python_tests/drafters/test_eagle_network.py::test_variants_against_the_reference[eagle3 wide target]",
        ),
    ),
    Fault(
        "drafters: EAGLE's next step reads the state before the final norm",
        "polyspec_ext/drafters/eagle.py",
        "normed: Tensor = self.norm(states) if self.config.norm_output else states",
        "normed: Tensor = states",
        (
            "python_tests/drafters/test_eagle_network.py::test_variants_against_the_reference[eagle3.1]",
        ),
    ),
    Fault(
        "drafters: a head keeps states of rejected tokens",
        "polyspec_ext/drafters/features.py",
        "        torch.minimum(self.end, lengths, out=self.end)\n"
        "        torch.minimum(self.begin, lengths, out=self.begin)",
        "        torch.minimum(self.begin, lengths, out=self.begin)",
        (
            "python_tests/runtime/test_hidden_window.py::test_a_window_has_the_latest_state_of_every_token[in place]",
        ),
    ),
    Fault(
        "drafters: heads take the state of the last token",
        "polyspec_ext/drafters/features.py",
        "at = inputs.positions.to(device) - 2 - hidden.positions.to(device)",
        "at = inputs.positions.to(device) - 1 - hidden.positions.to(device)",
        ("python_tests/drafters/test_heads.py::test_against_the_plain_heads[hydra-1-True-False]",),
    ),
    Fault(
        "drafters: a window of states forgets the rows that stay",
        "polyspec_ext/drafters/features.py",
        "self.begin = self.begin[index].masked_fill(fresh, 0)",
        "self.begin = self.begin[: len(index)].masked_fill(fresh, 0)",
        (
            "python_tests/drafters/test_own_feature_drafter.py::test_both_executors_draft_from_the_same_states[[3]]",
        ),
    ),
    Fault(
        "drafters: heads are rotated by halves in place of pairs",
        "polyspec_ext/drafters/heads.py",
        "signed[..., : sin.shape[-1] // 2].neg_()",
        "signed[..., sin.shape[-1] // 2 :].neg_()",
        (
            "python_tests/drafters/test_eagle_network.py::test_variants_against_the_reference[eagle1 without bias]",
        ),
    ),
    Fault(
        "drafters: up projections of experts come first",
        "polyspec_ext/drafters/mtp.py",
        "gates = torch.cat([gates, ups], 1)",
        "gates = torch.cat([ups, gates], 1)",
        ("python_tests/drafters/test_mtp.py::test_logits_are_those_of_transformers[glm4_moe]",),
    ),
    Fault(
        "drafters: blocks of 8 bits have the factors of other columns",
        "polyspec_ext/drafters/mtp.py",
        "factors = factors.repeat_interleave(block[1], 1)[:, :columns]",
        "factors = factors.repeat(1, block[1])[:, :columns]",
        ("python_tests/drafters/test_mtp.py::test_blocks_of_8_bits[False]",),
    ),
    Fault(
        "drafters: DFlash drafts from the state of the next token",
        "polyspec_ext/drafters/dflash.py",
        "first = not config.from_anchor",
        "first = config.from_anchor",
        (
            "python_tests/drafters/test_dflash.py::test_drafts_are_those_of_the_plain_forward_pass[z-lab, keys at the top-False]",
        ),
    ),
    Fault(
        "drafters: a window of DFlash is a token wider",
        "polyspec_ext/drafters/dflash.py",
        "seen &= (slots[:, None] - positions[..., None]).abs() < window",
        "seen &= (slots[:, None] - positions[..., None]).abs() <= window",
        (
            "python_tests/drafters/test_dflash.py::test_drafts_are_those_of_the_plain_forward_pass[z-lab, sliding-False]",
        ),
    ),
    Fault(
        "drafters: DSpark's bias follows the first token only",
        "polyspec_ext/drafters/dflash.py",
        "bias = head.bias(anchors if step == 1 else block.tokens)",
        "bias = head.bias(anchors)",
        (
            "python_tests/drafters/test_dflash.py::test_drafts_are_those_of_the_plain_forward_pass[dspark-False]",
        ),
    ),
    Fault(
        "drafters: rows of a switched drafter are another's ids",
        "polyspec_ext/drafters/switching.py",
        "if block.rows is not None and id_map_of(member).drawn is not None:",
        "if False:",
        (
            "python_tests/exactness/test_law.py::test_the_law_is_the_targets[switching, some ids-block-None]",
        ),
    ),
    Fault(
        "drafters: a translated context depends on draft tokens",
        "polyspec_ext/drafters/translated.py",
        "            text.tokens += row[: min(begin + 1, count)]\n"
        "            contexts.append(self.translate(text) if count else None)\n"
        "            text.tokens += row[begin + 1 : count]\n",
        "            text.tokens += row[:count]\n"
        "            contexts.append(self.translate(text) if count else None)\n",
        (
            "python_tests/drafters/test_translated.py::test_the_same_model_in_another_order_is_accepted[middle-1.0]",
            "python_tests/drafters/test_translated.py::test_rows_of_one_pass_are_those_of_many",
        ),
    ),
    Fault(
        "levels: a failed pass leaves its cache in use",
        "polyspec_ext/levels/hugging_face.py",
        "            self.cache.failed = True",
        "            pass",
        (
            "python_tests/runtime/test_failures.py::test_a_first_pass_that_fails_leaves_no_cache_behind",
        ),
    ),
    Fault(
        "levels: a long block returns the rows of its first piece",
        "polyspec_ext/levels/hugging_face.py",
        "begin = tokens.shape[1] - keep if first is None else min(first)",
        "begin = tokens.shape[1] - keep if first is None else max(first)",
        (
            "python_tests/levels/test_streaming.py::test_ragged_pieces",
            "python_tests/levels/test_streaming.py::test_passes_longer_than_the_slack_go_in_pieces",
        ),
    ),
    Fault(
        "levels: prompts read together are restored whole",
        "polyspec_ext/levels/hugging_face.py",
        "copies = [self.cache.save(row, 0, count) for row, count in enumerate(counts)]",
        "copies = [self.cache.save(0, 0, count) for row, count in enumerate(counts)]",
        (
            "python_tests/serving/test_server.py::test_short_prompts_are_read_together_beside_others[models]",
        ),
    ),
    Fault(
        "levels: groups of prompts take the rows of the batch in order",
        "polyspec_ext/levels/hugging_face.py",
        "            whole.take(cache, group)\n",
        "            whole.take(cache, sorted(range(len(group))))\n",
        ("python_tests/levels/test_prefill.py::test_rows_read_apart_are_what_they_are_alone[opt]",),
    ),
    Fault(
        "levels: a level keeps more than it was asked to",
        "polyspec_ext/levels/base.py",
        "not 0 <= n <= m for n, m in zip(left, asked, strict=True)",
        "not 0 <= n for n, m in zip(left, asked, strict=True)",
        (
            "python_tests/drafters/test_returned.py::test_what_rollback_returns[<lambda>-ValueError-leave at most \\\\[.*\\\\] tokens, given-0-1]",
        ),
    ),
    Fault(
        "levels: logits of a user's level may be of another width",
        "polyspec_ext/levels/base.py",
        "    if logits.shape != shape:\n",
        "    if logits.shape[:2] != shape[:2]:\n",
        (
            "python_tests/drafters/test_returned.py::test_logits[<lambda>-ValueError-= \\\\[1, \\\\d, 5\\\\], given \\\\[1, \\\\d, 4\\\\]-0]",
        ),
    ),
    Fault(
        "levels: a draft of another tokenizer is taken",
        "polyspec_ext/levels/base.py",
        "differ = [i for i in shared if texts[i] != drafts[i]]",
        "differ = [i for i in shared[:1] if texts[i] != drafts[i]]",
        ("python_tests/levels/test_hugging_face.py::test_other_tokenizer_is_refused_by_name",),
    ),
    Fault(
        "levels: merged projections keep the product of another input",
        "polyspec_ext/levels/products.py",
        "if latest is None or latest[0] is not x:",
        "if latest is None or latest[0].shape != x.shape:",
        (
            "python_tests/levels/test_packed.py::test_siblings_with_different_inputs_are_told_apart",
            "python_tests/levels/test_packed.py::test_threads_may_run_one_model_at_once",
        ),
    ),
    Fault(
        "levels: attention is scaled by the width of a head alone",
        "polyspec_ext/kv_cache/layers.py",
        "scale = q.shape[3] ** -0.5 if scale is None else scale",
        "scale = q.shape[3] ** -0.5",
        ("python_tests/levels/test_packed.py::test_grouped_attention_is_sdpa[torch.float32-32]",),
    ),
    Fault(
        "levels: hooks of a fused model do not run",
        "polyspec_ext/levels/fused.py",
        "    if not has_operators(module) or any(map(hooked, module.modules())):\n",
        "    if not has_operators(module):\n",
        (
            "python_tests/levels/test_stack.py::test_modules_with_hooks_are_called[model.layers.1]",
            "python_tests/levels/test_stack.py::test_modules_with_hooks_are_called[model.layers.0.mlp.act_fn]",
        ),
    ),
    Fault(
        "levels: the residual is left out behind the attention",
        "polyspec_ext/levels/fused.py",
        "            rows, normed = operators.add_rms_norm(rows, added, layer.gated_norm, epsilon)",
        "            _, normed = operators.add_rms_norm(rows, added, layer.gated_norm, epsilon)",
        (
            "python_tests/levels/test_stack.py::test_other_models_run_their_forward[llama-more2-None]",
        ),
    ),
    Fault(
        "levels: hidden states of the last layer are behind the norm",
        "polyspec_ext/levels/fused.py",
        "count: deepest, -1: last}",
        "count: last, -1: last}",
        ("python_tests/levels/test_stack.py::test_modules_with_hooks_are_called[lm_head]",),
    ),
    Fault(
        "levels: queries of a GGUF file stay in llama.cpp's order",
        "polyspec_ext/levels/gguf.py",
        'names = ("q_proj", "k_proj")',
        'names = ("x_proj", "k_proj")',
        ("python_tests/levels/test_gguf_levels.py::test_a_file_in_float32_is_its_model[False]",),
    ),
    Fault(
        "levels: Gemma's norms of a file are one too large",
        "polyspec_ext/levels/gguf.py",
        "            numbers -= 1\n",
        "            pass\n",
        ("python_tests/levels/test_gguf_truth.py::test_logits[Gemma2-gemma2-window-config6]",),
    ),
    Fault(
        "levels: factors of frequencies are not followed",
        "polyspec_ext/levels/gguf.py",
        "setattr(remade, table, getattr(remade, table) / factors)",
        "setattr(remade, table, getattr(remade, table) * factors)",
        ("python_tests/levels/test_gguf_levels.py::test_factors_of_frequencies[blocks]",),
    ),
    Fault(
        "levels: files of a split model come in any order",
        "polyspec_ext/levels/gguf.py",
        "            if split != (number, len(files)):\n",
        "            if split[1] != len(files):\n",
        ("python_tests/levels/test_gguf_levels.py::test_a_model_in_several_files[llama-blocks]",),
    ),
    Fault(
        "levels: a tied head of a file has its own blocks",
        "polyspec_ext/levels/gguf.py",
        "if key not in self._matrices:",
        "if True:",
        ("python_tests/levels/test_gguf_levels.py::test_memory_of_a_file[True]",),
    ),
    Fault(
        "levels: ranges of a file stay in memory",
        "polyspec_ext/levels/gguf.py",
        "self._file.madvise(mmap.MADV_DONTNEED, page, end - page)",
        "pass",
        ("python_tests/levels/test_gguf_levels.py::test_memory_of_a_file[False]",),
    ),
    Fault(
        "levels: Gemma's embeddings in blocks have no scale",
        "polyspec_ext/levels/gguf.py",
        'scale = getattr(embeds, "scalar_embed_scale", 1.0)',
        "scale = 1.0",
        (
            "python_tests/levels/test_gguf_levels.py::test_embeddings_are_the_dequantised_bits[Q8_0-torch.bfloat16]",
        ),
    ),
    Fault(
        "levels: a state is rolled back to its newest copy, however long",
        "polyspec_ext/levels/stateful.py",
        "pinned = [state for state in self.pinned if state.length <= length]",
        "pinned = list(self.pinned)",
        ("python_tests/levels/test_stateful.py::test_logits_behind_any_rollbacks[8-False-lfm2]",),
    ),
    Fault(
        "levels: hidden states told before a rollback stay told",
        "polyspec_ext/levels/stateful.py",
        "        self.told = min(self.told, length)\n",
        "",
        (
            "python_tests/levels/test_stateful.py::test_hidden_states_are_those_of_one_pass[lfm2-False]",
        ),
    ),
    Fault(
        "levels: rows share the states in modules",
        "polyspec_ext/levels/stateful.py",
        "            vars(states).update({name: vars(module)[name] for name in vars(states)})\n",
        "            pass\n",
        ("python_tests/levels/test_stateful.py::test_states_in_modules_are_the_levels",),
    ),
    Fault(
        "levels: a checkpoint is overwritten by the next pass",
        "polyspec_ext/levels/stateful.py",
        "            copies[name] = {key: copy.deepcopy(state) for key, state in states.items()}",
        "            copies[name] = dict(states)",
        ("python_tests/levels/test_stateful.py::test_logits_behind_any_rollbacks[8-False-lfm2]",),
    ),
    Fault(
        "levels: a copy writes over the target's keys",
        "polyspec_ext/levels/shared_cache.py",
        "            x.scatter_(2, index, torch.where(saved.to(x.device), values, after))\n",
        "            pass\n",
        (
            "python_tests/levels/test_shared_cache.py::test_a_draft_that_looks_back_leaves_the_owners_keys",
        ),
    ),
    Fault(
        "levels: a copy skips the token whose logits are asked for",
        "polyspec_ext/levels/shared_cache.py",
        "skips = torch.where(first < counts, torch.minimum(skip, first), skip)",
        "skips = skip",
        (
            "python_tests/levels/test_shared_cache.py::test_a_draft_that_looks_back_leaves_the_owners_keys",
        ),
    ),
    Fault(
        "levels: padding of an encoder's input is attended to",
        "polyspec_ext/levels/encoder_decoder.py",
        "            attention_mask=self._mask,\n            decoder_input_ids=tokens,",
        "            attention_mask=None,\n            decoder_input_ids=tokens,",
        ("python_tests/levels/test_encoder_decoder.py::test_a_masked_source",),
    ),
    Fault(
        "serving: low priorities go first",
        "polyspec_ext/serving/server.py",
        "heapq.heappush(self._waiting, (-priority, row.number, row))",
        "heapq.heappush(self._waiting, (priority, row.number, row))",
        ("python_tests/serving/test_server.py::test_the_queue_is_bounded_and_goes_by_priority",),
    ),
    Fault(
        "serving: the queue takes one request more",
        "polyspec_ext/serving/server.py",
        "if len(self._waiting) >= self.max_waiting + len(self._numbers):",
        "if len(self._waiting) > self.max_waiting + len(self._numbers):",
        (
            "python_tests/serving/test_server.py::test_the_queue_is_bounded_and_goes_by_priority",
            "python_tests/serving/test_endpoint_limits.py::test_a_full_queue_and_time_that_is_over",
        ),
    ),
    Fault(
        "serving: aborted requests still wait",
        "polyspec_ext/serving/server.py",
        "self._waiting = [entry for entry in self._waiting if entry[1] not in aborted]",
        "pass",
        ("python_tests/serving/test_server.py::test_a_request_that_is_aborted",),
    ),
    Fault(
        "serving: a request has the alternatives of the step before",
        "polyspec_ext/serving/server.py",
        "            event.alternatives = list(pending)\n            pending.clear()",
        "            event.alternatives = list(pending)",
        (
            "python_tests/serving/test_server.py::test_rules_and_alternatives_are_those_of_the_request",
            "python_tests/serving/test_endpoint.py::test_log_probabilities_are_those_of_the_chain[False-0]",
        ),
    ),
    Fault(
        "serving: a consumer that leaves keeps its slot",
        "polyspec_ext/serving/server.py",
        "            if not finished:\n"
        "                with self._wake:\n"
        "                    self.server.abort(request)\n"
        "                    self._wake.notify_all()",
        "            if not finished:\n                pass",
        (
            "python_tests/serving/test_asynchronous.py::test_a_consumer_that_leaves_aborts_its_request",
        ),
    ),
    Fault(
        "serving: all choices of a request have its seed",
        "polyspec_ext/serving/protocol.py",
        "else row_seeds(seed % (arguments.SEED_MAX + 1), count)",
        "else [seed % (arguments.SEED_MAX + 1)] * count",
        ("python_tests/serving/test_endpoint.py::test_choices_have_the_seeds_of_rows",),
    ),
    Fault(
        "serving: an answer may be longer than the context",
        "polyspec_ext/serving/protocol.py",
        "        if room is not None and new > room:\n",
        "        if room is not None and len(ids) > model.context:\n",
        (
            "python_tests/serving/test_endpoint_limits.py::test_errors_name_the_field_what_was_expected_and_what_came",
        ),
    ),
    Fault(
        "serving: tokens behind a stop string are counted",
        "polyspec_ext/serving/protocol.py",
        "            if self._text.stopped is not None:\n"
        "                break\n"
        "        added, self.count = self.count + len(piece.tokens), self._text.num_tokens\n",
        "        added = self.count = self.count + len(piece.tokens)\n",
        (
            "python_tests/serving/test_endpoint.py::test_tokens_behind_a_stop_string_are_not_counted",
        ),
    ),
    Fault(
        "serving: offsets of a text leave out its echo",
        "polyspec_ext/serving/protocol.py",
        "            self._offsets[index] += len(front)\n",
        "",
        ("python_tests/serving/test_endpoint.py::test_an_echo_begins_with_the_prompt",),
    ),
    Fault(
        "serving: any key opens the endpoint",
        "polyspec_ext/serving/api.py",
        'not (same and scheme.lower() == "bearer")',
        'not scheme.lower() == "bearer"',
        ("python_tests/serving/test_endpoint_limits.py::test_a_key_is_asked_for",),
    ),
    Fault(
        "serving: a request goes on behind its stop string",
        "polyspec_ext/serving/api.py",
        "                    self._endpoint.abort(event.request)\n",
        "                    pass\n",
        ("python_tests/serving/test_endpoint.py::test_a_stop_string_ends_the_request",),
    ),
    Fault(
        "serving: pages of other hosts may send requests",
        "polyspec_ext/serving/api.py",
        'if kind != "application/json":',
        "if not kind:",
        (
            "python_tests/serving/test_endpoint_limits.py::test_other_paths_methods_types_and_hosts_are_refused",
        ),
    ),
    Fault(
        "policies: a native policy reads the tokens before the committed ones",
        "polyspec_ext/policies/adaptive.py",
        "text = report.text if begins else report.text[len(report.text) - report.committed :]",
        "text = report.text if begins else report.text[: report.committed]",
        (
            "python_tests/policies/test_adaptive.py::test_cached_state_machine_finds_what_was_there_before",
        ),
    ),
    Fault(
        "policies: a tail counts as the level's draft tokens",
        "polyspec_ext/policies/adaptive.py",
        "            drafted = tokens - of_tail\n",
        "            drafted = tokens\n",
        (
            "python_tests/runtime/test_tail.py::test_windows_that_follow_are_told_of_verified_tokens_only[online]",
        ),
    ),
    Fault(
        "policies: prompts that a drafter reads are free",
        "polyspec_ext/policies/adaptive.py",
        "            self._reading[index + 1] = self._reading.get(index + 1, 0.0) + seconds",
        "            self._reading[index + 1] = 0.0",
        (
            "python_tests/runtime/test_stats.py::test_a_policy_is_told_once_of_a_step_and_of_what_was_read",
        ),
    ),
    Fault(
        "policies: each row's time of a step counts",
        "polyspec_ext/policies/adaptive.py",
        "step = StepReport(level, tokens, accepted, width, len(took), seconds, number > 0)",
        "step = StepReport(level, tokens, accepted, width, len(took), seconds, False)",
        (
            "python_tests/runtime/test_stats.py::test_a_policy_is_told_once_of_a_step_and_of_what_was_read",
        ),
    ),
    Fault(
        "policies: every request of a batch changes the drafter",
        "polyspec_ext/policies/adaptive.py",
        "elif self._first is None or report.request <= self._first:",
        "else:",
        ("python_tests/drafters/test_switching.py::test_rows_of_a_round_have_one_drafter",),
    ),
    Fault(
        "policies: a drafter that was never tried is not preferred",
        "polyspec_ext/policies/adaptive.py",
        "if rounds >= 1e-3 else math.inf",
        "if rounds >= 1e-3 else 0.0",
        (
            "python_tests/drafters/test_switching.py::test_bandit_finds_the_better_drafter_and_the_change",
            "python_tests/drafters/test_switching.py::test_rows_of_a_round_have_one_drafter",
        ),
    ),
    Fault(
        "policies: trials that lose do not become rare",
        "csrc/src/policy/guard.hpp",
        "rest(std::min(2 * hold_, kLongest * limits_.hold));",
        "rest(limits_.hold);",
        ("python_tests/policies/test_guard.py::test_trials_become_rare_and_are_paid_for[online]",),
    ),
    Fault(
        "policies: a block that is accepted whole counts a rejection",
        "csrc/src/policy/online.cpp",
        "accepted < tokens ? 1 : 0",
        "1",
        (
            "python_tests/policies/test_adaptive.py::test_naive_share_would_be_biased",
            "python_tests/policies/test_adaptive.py::test_window_is_the_argmax[Online-0.9]",
        ),
    ),
    Fault(
        "policies: a renewal block has no correction",
        "csrc/src/policy/renewal_steps.hpp",
        "    sum += more * survival(j);\n    more -= pending[j];",
        "    more -= pending[j];\n    sum += more * survival(j);",
        (
            "python_tests/policies/test_guard.py::test_drafting_that_wins_is_as_fast_as_the_best_window[joint-0.6]",
        ),
    ),
    Fault(
        "planning: a text goes on where the next one begins",
        "polyspec_ext/planning/theory.py",
        "        after[begins] = 0.0  # the text before is complete\n",
        "",
        (
            "python_tests/planning/test_renewal.py::test_texts_one_behind_the_other_are_apart",
            "python_tests/planning/test_renewal.py::test_the_target_alone",
        ),
    ),
    Fault(
        "planning: rows of a batch do not wait for each other",
        "polyspec_ext/planning/theory.py",
        "            below *= np.concatenate([nothing, nothing + reach], 1)",
        "            below = np.concatenate([nothing, nothing + reach], 1)",
        (
            "python_tests/planning/test_renewal.py::test_rows_of_a_batch_wait_for_each_other",
            "python_tests/planning/test_renewal.py::test_batches_take_the_steps_of_the_state_rows",
        ),
    ),
    Fault(
        "planning: a verification hands up no correction",
        "polyspec_ext/planning/theory.py",
        "            yield accepted + 1, chance\n            return",
        "            yield max(accepted, 1), chance\n            return",
        (
            "python_tests/planning/test_renewal.py::test_rows_of_a_batch_wait_for_each_other",
            "python_tests/planning/test_theory.py::test_windows_of_the_papers_times",
        ),
    ),
    Fault(
        "planning: the slowest chain is recommended",
        "polyspec_ext/planning/planner.py",
        "return sorted(some, key=lambda c: -c.predicted_tokens_per_second)",
        "return sorted(some, key=lambda c: c.predicted_tokens_per_second)",
        (
            "python_tests/planning/test_planner.py::test_plain_decoding_wins_where_drafts_are_dear",
            "python_tests/planning/test_planner.py::test_what_comes_first_has_been_run",
        ),
    ),
    Fault(
        "sampling: a row of seeds begins with a hash",
        "polyspec_ext/sampling.py",
        "return [_C.row_seed(seed, row) if row else seed for row in rows]",
        "return [_C.row_seed(seed, row) for row in rows]",
        ("python_tests/runtime/test_batches.py::test_row_seeds",),
    ),
    Fault(
        "sampling: ids past the last word are allowed",
        "polyspec_ext/grammar.py",
        "row[:known], row[known:] = words[:known], 0",
        "row[:known] = words[:known]",
        (
            "python_tests/exactness/test_grammar.py::test_a_grammar_serves_many_requests_and_other_vocabularies",
        ),
    ),
    Fault(
        "sampling: ties at the edge of top-p are cut",
        "polyspec_ext/sampling.py",
        "edge = scores.gather(-1, order.gather(-1, last))\n"
        '        scores = scores.masked_fill(scores < edge, -float("inf"))',
        "drop = torch.zeros_like(nucleus).scatter(-1, order, ~nucleus)\n"
        '        scores = scores.masked_fill(drop, -float("inf"))',
        (
            "python_tests/integrations/test_processors.py::test_ties_at_the_edge_of_top_p_all_stay",
            "python_tests/runtime/test_request_options.py::test_alternatives_are_the_likeliest_ids[{'temperature': 1.3, 'top_p': 0.6, 'min_p': 0.1}-1]",
        ),
    ),
    Fault(
        "sampling: min-p is of the mass before top-p",
        "polyspec_ext/sampling.py",
        "least = sampling.min_p * mass.amax(-1, keepdim=True)",
        "least = sampling.min_p",
        (
            "python_tests/runtime/test_request_options.py::test_alternatives_are_the_likeliest_ids[{'temperature': 1.3, 'top_p': 0.6, 'min_p': 0.1}-1]",
        ),
    ),
    Fault(
        "rules: negative logits of repeated tokens grow",
        "polyspec_ext/rules.py",
        "torch.where(values < 0, values * repeats, values / repeats)",
        "values / repeats",
        (
            "python_tests/runtime/test_request_options.py::test_rules_are_what_each_position_asks_for",
        ),
    ),
    Fault(
        "rules: presence counts every occurrence",
        "polyspec_ext/rules.py",
        "rules.presence_penalty * (new > 0)",
        "rules.presence_penalty * new",
        (
            "python_tests/runtime/test_request_options.py::test_the_law_is_the_targets_under_its_rules[(3, 3)-[2]-3-{'presence_penalty': 1.0}-token]",
            "python_tests/runtime/test_request_options.py::test_rules_are_what_each_position_asks_for",
        ),
    ),
    Fault(
        "rules: frequencies count the prompt",
        "polyspec_ext/rules.py",
        "new = often(seen & (at >= self._prompt_length))",
        "new = often(seen)",
        (
            "python_tests/runtime/test_request_options.py::test_the_law_is_the_targets_under_its_rules[tree-[2]-3-{'repetition_penalty': 0.5, 'presence_penalty': 0.5, 'frequency_penalty': 0.25, 'logit_bias': {1: 0.5}, 'bad_words': [[0, 0]], 'min_new_tokens': 1}-block]",
        ),
    ),
    Fault(
        "rules: a text may end a token early",
        "polyspec_ext/rules.py",
        "early = self._prompt_length + self._rules.min_new_tokens - first",
        "early = self._prompt_length + self._rules.min_new_tokens - first - 1",
        (
            "python_tests/runtime/test_request_options.py::test_the_law_is_the_targets_under_its_rules[tree-[2]-3-{'repetition_penalty': 0.5, 'presence_penalty': 0.5, 'frequency_penalty': 0.25, 'logit_bias': {1: 0.5}, 'bad_words': [[0, 0]], 'min_new_tokens': 1}-block]",
        ),
    ),
    Fault(
        "rules: bad words across the end of the prompt are allowed",
        "polyspec_ext/rules.py",
        "missing = max(width - first, 0)\n"
        "        text = torch.nn.functional.pad(prefix[max(first - width, 0) :], (missing, 0), value=_NONE)",
        "missing = max(width - first, 0)\n"
        "        text = torch.nn.functional.pad(prefix[max(first - width, 0) :], (missing, 0), value=_NONE)\n"
        "        text[: max(0, self._prompt_length - first + width)] = _NONE",
        (
            "python_tests/runtime/test_request_options.py::test_the_law_is_the_targets_under_its_rules[(3, 2)-[2]-3-{'bad_words': [[1, 2], [0, 1, 1], [0, 0]]}-block]",
        ),
    ),
    Fault(
        "grammar: the state is not rolled back",
        "polyspec_ext/grammar.py",
        "            self._matcher.rollback(len(self._tokens) - matched)\n",
        "",
        (
            "python_tests/exactness/test_grammar.py::test_masks_are_of_the_text_behind_the_prompt",
            "python_tests/exactness/test_grammar.py::test_forced_tokens_follow_the_text",
        ),
    ),
    Fault(
        "grammar: a mask of an earlier text is kept",
        "polyspec_ext/grammar.py",
        "del self._tokens[matched:], self._masks[matched + 1 :]",
        "del self._tokens[matched:]",
        ("python_tests/exactness/test_grammar.py::test_masks_are_of_the_text_behind_the_prompt",),
    ),
    Fault(
        "grammar: a text may end at any place",
        "polyspec_ext/grammar.py",
        "words = np.pad(words, (0, len(ends) - len(words))) & ~ends",
        "words = np.pad(words, (0, len(ends) - len(words))) | ends",
        (
            "python_tests/exactness/test_grammar.py::test_masks_are_of_the_text_behind_the_prompt",
            "python_tests/exactness/test_grammar.py::test_an_id_that_ends_the_request_is_allowed_behind_a_complete_text_only",
        ),
    ),
    Fault(
        "inputs: padding in the middle of a row is left out",
        "polyspec_ext/inputs.py",
        "if seen and seen[-1] - seen[0] + 1 != len(seen):",
        "if not seen:",
        ("python_tests/runtime/test_batches.py::test_padding",),
    ),
    Fault(
        "inputs: the texts of a prompt have its seed",
        "polyspec_ext/inputs.py",
        "        return row_seeds(seed, count)\n",
        "        return [seed] * count\n",
        (
            "python_tests/runtime/test_request_options.py::test_n_texts_of_each_prompt_are_rows_with_their_seeds",
            "python_tests/runtime/test_batches.py::test_a_row_of_a_batch_with_one_seed_can_be_drawn_alone[0]",
        ),
    ),
    Fault(
        "inputs: short rows are padded before their new tokens",
        "polyspec_ext/tensors.py",
        "table = [[*row, *[pad] * (width - len(row))] for row in rows]",
        "table = [[*[pad] * (width - len(row)), *row] for row in rows]",
        ("python_tests/runtime/test_batches.py::test_padding",),
    ),
    Fault(
        "outputs: tokens behind a stop string are counted as new",
        "polyspec_ext/runtime/batch.py",
        "            stats.num_new_tokens -= excess\n",
        "            pass\n",
        (
            "python_tests/runtime/test_request_options.py::test_stop_strings_cut_the_text_that_would_be[1-True-1.0-token]",
        ),
    ),
    Fault(
        "outputs: a text that ends at its limit has stopped",
        "polyspec_ext/outputs.py",
        'return "stop" if at_end or self.stops() else "length"',
        'return "stop"',
        (
            "python_tests/runtime/test_request_options.py::test_stop_strings_cut_the_text_that_would_be[1-False-1.0-token]",
        ),
    ),
    Fault(
        "inputs: ends of each of several texts are those of the first prompt",
        "polyspec_ext/inputs.py",
        "seed, eos[row], processors, encoded",
        "seed, eos[0], processors, encoded",
        (
            "python_tests/runtime/test_request_options.py::test_n_texts_of_each_prompt_are_rows_with_their_seeds",
        ),
    ),
    Fault(
        "chain: default ends outside the vocabulary are refused",
        "polyspec_ext/chain.py",
        'ends = [i for i in getattr(target, "eos_token_ids", ()) if 0 <= i < vocab_size]',
        'ends = list(getattr(target, "eos_token_ids", ()))',
        (
            "python_tests/runtime/test_arguments.py::test_default_ends_outside_the_vocabulary_are_no_error",
        ),
    ),
    Fault(
        "chat: the newest exchange is left out first",
        "polyspec_ext/chat.py",
        "rest = [*conversation[:begin], *conversation[cuts[number] :]]",
        "rest = [*conversation[:begin], *conversation[: len(conversation) - cuts[number] + begin]]",
        (
            "python_tests/system/test_chat.py::test_whole_exchanges_are_left_out_by_halving[40-system1]",
        ),
    ),
    Fault(
        "chat: the last stop string wins",
        "polyspec_ext/chat.py",
        "            end, begin, stop = min(ends)\n",
        "            end, begin, stop = max(ends)\n",
        (
            "python_tests/runtime/test_request_options.py::test_stop_strings_cut_the_text_that_would_be[1-False-1.0-token]",
        ),
    ),
    Fault(
        "chat: text that may begin a stop string is shown",
        "polyspec_ext/chat.py",
        "longest = max(map(len, self._stops), default=1) - 1",
        "longest = max(map(len, self._stops), default=1) - 2",
        (
            "python_tests/system/test_streamed_text.py::test_pieces_end_in_front_of_a_stop_string[byte-level-False]",
        ),
    ),
    Fault(
        "chat: bytes of an unfinished character are shown",
        "polyspec_ext/chat.py",
        'settled = len(text.rstrip("\\ufffd"))',
        "settled = len(text)",
        (
            "python_tests/system/test_streamed_text.py::test_pieces_are_the_text_of_the_whole[byte-level-True]",
        ),
    ),
    Fault(
        "quantization: nibbles of a kept copy are exchanged",
        "polyspec_ext/quantization/weights.py",
        "pairs = matrix.values[:, ::2] | matrix.values[:, 1::2] << 4",
        "pairs = matrix.values[:, 1::2] | matrix.values[:, ::2] << 4",
        (
            "python_tests/levels/test_quantized.py::test_layers_are_unpacked_and_kept_one_after_the_other",
            "python_tests/levels/test_quantized.py::test_a_kept_copy_has_the_head_that_it_had[False]",
        ),
    ),
    Fault(
        "quantization: a damaged copy is used",
        "polyspec_ext/quantization/weights.py",
        "            if given_sum != sums[key]:\n",
        "            if len(given_sum) != len(sums[key]):\n",
        ("python_tests/levels/test_quantized.py::test_a_damaged_file_is_refused",),
    ),
    Fault(
        "quantization: errors are fed back in the order of columns",
        "polyspec_ext/quantization/calibration.py",
        "back = order.argsort()\n",
        "back = order\n",
        (
            "python_tests/levels/test_quantized.py::test_groups_of_the_largest_inputs_are_rounded_first",
        ),
    ),
    Fault(
        "stats: a tail's rejected tokens count as accepted",
        "polyspec_ext/stats.py",
        "self.num_accepted_tail_tokens += max(0, accepted - (drafted - of_tail))",
        "self.num_accepted_tail_tokens += min(accepted, of_tail)",
        ("python_tests/runtime/test_tail.py::test_counts_of_a_block",),
    ),
    Fault(
        "stats: a batch of one row is counted twice",
        "polyspec_ext/stats.py",
        "self._both = [(row,) if row is total else (row, total) for row in rows]",
        "self._both = [(row, total) for row in rows]",
        ("python_tests/runtime/test_stats.py::test_metrics_have_the_counts_of_all_requests",),
    ),
    Fault(
        "core: a block is not walked again where no remembered row ends a prefix",
        "csrc/src/core/block_rules.hpp",
        "    } while (kEndings > 1 && !found && n < remembered);",
        "    } while (kEndings > 1 && !found && n < remembered);\n    found = true;",
        ("python_tests/ops/test_properties.py::test_a_long_block_ends_where_the_rule_says",),
    ),
    Fault(
        "core: rows that may end a prefix are passed over",
        "csrc/src/core/block_rules.hpp",
        "scale * (1.0 + 0x1p-32)",
        "scale * 0.75",
        (
            "python_tests/ops/test_properties.py::test_a_long_block_ends_where_the_rule_says",
            "python_tests/ops/test_properties.py::test_every_token_is_recomputed[25]",
        ),
    ),
    Fault(
        "core: the residual is p itself",
        "csrc/src/core/verify_parts.hpp",
        "const double left = static_cast<double>(p(i)) * p_scale - draft_share(i);",
        "const double left = static_cast<double>(p(i)) * p_scale;",
        (
            "ctest correction_enumeration_test",
            "python_tests/ops/test_properties.py::test_zero_residual[token]",
        ),
    ),
    Fault(
        "core: a try keeps what the draft would have drawn",
        "csrc/src/core/verify_parts.hpp",
        "return draw * whole < whole - draft_share(i);",
        "return draw * whole < draft_share(i);",
        (
            "ctest correction_enumeration_test",
            "python_tests/ops/test_properties.py::test_every_token_is_recomputed[25]",
        ),
    ),
    Fault(
        "core: a test divides by p's total and not by q's",
        "csrc/src/core/verify_parts.hpp",
        "*ratio = (p_mass * static_cast<double>(q_statistics.mass)) / (static_cast<double>(own) * p_total);",
        "*ratio = (p_mass * p_total) / (static_cast<double>(own) * static_cast<double>(q_statistics.mass));",
        (
            "ctest ops_test",
            "python_tests/ops/test_properties.py::test_every_token_is_recomputed[25]",
        ),
    ),
    Fault(
        "core: an id that the draft lacks is its id 0",
        "csrc/src/core/verify_parts.hpp",
        "return token < params.draft_vocab ? token : -1;",
        "return token < params.draft_vocab ? token : 0;",
        (
            "python_tests/ops/test_draft_statistics.py::test_a_token_that_the_draft_lacks_was_not_drawn_from_its_row[token]",
        ),
    ),
    Fault(
        "core: min-p ignores the temperature",
        "csrc/src/core/distribution.hpp",
        "static_cast<double>(filter.temperature) * portable_log(share));",
        "portable_log(share));",
        ("python_tests/ops/test_properties.py::test_every_token_is_recomputed[125]",),
    ),
    Fault(
        "core: top-p keeps the mass that it should cut",
        "csrc/src/core/distribution.hpp",
        "select_from_top(group, row, kept, share_of(filter.top_p, total));",
        "select_from_top(group, row, kept, share_of(1.0f - filter.top_p, total));",
        (
            "ctest ops_test",
            "python_tests/ops/test_properties.py::test_every_token_is_recomputed[25]",
        ),
    ),
    Fault(
        "core: ties at the maximum go to the last id",
        "csrc/src/core/distribution.hpp",
        "  for (int64_t i = group.rank(); i < row.n; i += group.size()) {\n"
        "    if (row[i] == max) return i;\n"
        "  }\n"
        "  return row.n;",
        "  for (int64_t i = row.n - 1; i >= 0; --i) {\n"
        "    if (row[i] == max) return i;\n"
        "  }\n"
        "  return row.n;",
        ("ctest cpu_rows_test",),
    ),
    Fault(
        "core: a third sibling is tested against the first one's residual",
        "csrc/src/core/rule_tree.hpp",
        "    if (sibling > 0) scale += static_cast<double>(total) / unit;\n",
        "",
        (
            "ctest tree_enumeration_test",
            "python_tests/ops/test_properties.py::test_siblings_of_a_tree_are_recomputed[token]",
        ),
    ),
    Fault(
        "core: all children of a node have the first one's draw",
        "csrc/src/core/rule_tree.hpp",
        "return open_unit(draws.at(depth, node, Purpose::kAccept, sibling));",
        "return open_unit(draws.at(depth, node, Purpose::kAccept, 0));",
        ("python_tests/ops/test_properties.py::test_siblings_of_a_tree_are_recomputed[token]",),
    ),
    Fault(
        "core: equal deterministic siblings pass",
        "csrc/src/core/rule_tree.hpp",
        "faults += tree.parent(j) == row - 1 && tree.token(j) == tree.token(i) ? 1 : 0;",
        "faults += 0;",
        ("python_tests/ops/test_verify_tree.py::test_faults_are_of_their_request[token-cpu]",),
    ),
    Fault(
        "core: a path that does not stand gives nothing back",
        "csrc/src/core/rule_paths.hpp",
        "now.left / (now.left + (1.0 - now.scale))",
        "now.left / (now.left + 1.0)",
        (
            "ctest tree_enumeration_test",
            "python_tests/ops/test_verify_tree.py::test_a_chain_with_draft_rows_gets_what_verify_gives[cpu-block]",
        ),
    ),
    Fault(
        "core: a later path's test forgets what is left",
        "csrc/src/core/rule_paths.hpp",
        "const double d = opening ? 1.0 : (1.0 - now.scale) + now.left;",
        "const double d = 1.0;",
        (
            "ctest tree_enumeration_test",
            "python_tests/ops/test_properties.py::test_siblings_of_a_tree_are_recomputed[block]",
        ),
    ),
    Fault(
        "core: the block rule's ratios are not capped",
        "csrc/src/core/block_rules.hpp",
        "if (whole) scale = scale * ratio < 1.0 ? scale * ratio : 1.0;",
        "if (whole) scale = scale * ratio;",
        (
            "ctest enumeration_test",
            "python_tests/ops/test_properties.py::test_every_token_is_recomputed[25]",
        ),
    ),
    Fault(
        "core: the block rule's residual has the whole of p",
        "csrc/src/core/block_rules.hpp",
        "endings[slot] = {i, p_statistics, q_statistics, scale};",
        "endings[slot] = {i, p_statistics, q_statistics, 1.0};",
        (
            "ctest enumeration_test",
            "python_tests/ops/test_properties.py::test_every_token_is_recomputed[75]",
        ),
    ),
    Fault(
        "core: the block rule takes whole blocks without a test",
        "csrc/src/core/block_rules.hpp",
        "      if (behind && !(draw < scale)) break;\n",
        "",
        (
            "ctest enumeration_test",
            "python_tests/ops/test_properties.py::test_zero_residual[block]",
        ),
    ),
    Fault(
        "core: all levels have the target's draws",
        "csrc/src/core/request.hpp",
        "return keyed_draw(seed, position + offset, level, round, purpose, node);",
        "return keyed_draw(seed, position + offset, 1, round, purpose, node);",
        ("python_tests/ops/test_properties.py::test_every_token_is_recomputed[25]",),
    ),
    Fault(
        "core: a try's token and its test have one draw",
        "csrc/src/core/request.hpp",
        "const int64_t node = 2 * number + which;",
        "const int64_t node = 2 * number;",
        (
            "ctest correction_enumeration_test",
            "python_tests/ops/test_properties.py::test_every_token_is_recomputed[25]",
        ),
    ),
    Fault(
        "core: every word of a mask is its first",
        "csrc/src/core/row.hpp",
        "const uint32_t bits = allowed[at / 32] >> shift;",
        "const uint32_t bits = allowed[0] >> shift;",
        (
            "python_tests/ops/test_properties.py::test_every_token_is_recomputed[25]",
            "python_tests/ops/test_properties.py::test_a_token_out_of_range_stops_its_request[token]",
        ),
    ),
    Fault(
        "core: a text goes on behind its end",
        "csrc/src/core/cuts.hpp",
        "    kept = i + 1;\n    ended = kEndedEos;",
        "    ended = kEndedEos;",
        ("ctest cuts_test",),
    ),
    Fault(
        "core: a fault behind the end is reported",
        "csrc/src/core/cuts.hpp",
        "    outcome->status = 0;  // it was about a row that the text does not reach\n",
        "",
        (
            "ctest cuts_test",
            "python_tests/ops/test_cuts.py::test_a_fault_behind_the_end_is_not_reported[cpu]",
        ),
    ),
    Fault(
        "core: the block rule's longest prefix is not tested",
        "csrc/src/core/block_rules.hpp",
        "found = end == 0 || prefix_ends(group, block, endings[slot]);",
        "found = true;",
        ("ctest enumeration_test",),
    ),
    Fault(
        "schedule: a tail is longer than the room",
        "csrc/src/core/schedule_row.hpp",
        "int64_t length = words[Shape::kRoom] - 1 - target[Shape::kPending];",
        "int64_t length = words[Shape::kRoom] - target[Shape::kPending];",
        ("ctest scheduler_tail_test",),
    ),
    Fault(
        "schedule: lower levels keep rejected tokens",
        "csrc/src/core/schedule_row.hpp",
        "if (*cached > start + accepted) *cached = start + accepted;",
        "if (*cached > start + count) *cached = start + count;",
        (
            "ctest round_state_test",
            "python_tests/runtime/test_device_rounds.py::test_caches_hold_what_they_hold_step_by_step[[4, 2]]",
        ),
    ),
    Fault(
        "schedule: the last draft token counts as read",
        "csrc/src/core/schedule_row.hpp",
        "own[Shape::kCached] = start + emitted - 1;",
        "own[Shape::kCached] = start + emitted;",
        (
            "ctest round_state_test",
            "python_tests/ops/test_schedule.py::test_a_draft",
        ),
    ),
    Fault(
        "schedule: only the first id of several ends a text",
        "csrc/src/core/schedule_row.hpp",
        "  for (int64_t i = 0; i < p.num_eos; ++i) {",
        "  for (int64_t i = 0; i < p.num_eos && i < 1; ++i) {",
        ("ctest round_state_test",),
    ),
    Fault(
        "schedule: a row that cannot be goes on",
        "csrc/src/core/schedule_row.hpp",
        "  if (stops) words[Shape::kStopped] = 1;\n",
        "",
        ("ctest round_state_edges_test",),
    ),
    Fault(
        "cpu: heads are turned the other way",
        "csrc/src/cpu/layer.cpp",
        "turned<T>(first, -second,",
        "turned<T>(first, second,",
        (
            "python_tests/ops/test_layer.py::test_heads_are_turned_as_transformers_turns_them[torch.float32]",
        ),
    ),
    Fault(
        "cpu: all tokens have the mask of the first",
        "csrc/src/cpu/attention.cpp",
        "(of.first + m) % p.tokens * p.mask_stride[1] + begin;",
        "begin;",
        (
            "python_tests/ops/test_attention.py::test_a_row_is_what_it_is_alone[270-torch.float32]",
            "python_tests/ops/test_attention.py::test_scores_that_are_not_finite[nan]",
        ),
    ),
    Fault(
        "cpu: sums of an earlier span are not scaled",
        "csrc/src/cpu/attention.cpp",
        "const float own = weight_of(all.highest[m] - highest);",
        "const float own = 1.0f;",
        ("python_tests/ops/test_attention.py::test_is_attention[(4, 4)-torch.float32]",),
    ),
    Fault(
        "drafters: paths that meet again are one",
        "polyspec_ext/drafters/trees.py",
        "self._same &= depth",
        "self._same = depth",
        ("python_tests/drafters/test_paths.py::test_paths_with_equal_last_tokens_stay_apart",),
    ),
    Fault(
        "drafters: rows of a head stay unsorted where their ids are sorted",
        "polyspec_ext/drafters/checkpoint.py",
        "weight.copy_(weight[order.to(weight.device)])",
        "weight.copy_(weight)",
        (
            "python_tests/drafters/test_eagle_checkpoints.py::test_ids_in_any_order_draft_the_same_tokens",
        ),
    ),
    Fault(
        "drafters: states of a middle level replace the target's",
        "polyspec_ext/drafters/features.py",
        "read = (above - begin).clamp_min(0)",
        "read = torch.zeros_like(begin)",
        (
            "python_tests/runtime/test_seams.py::test_a_drafter_reads_the_states_of_the_target_where_it_has_them",
        ),
    ),
    Fault(
        "runtime: a filter that a single row sets is off in all rows",
        "polyspec_ext/tensors.py",
        "if all(row.greedy or getattr",
        "if any(row.greedy or getattr",
        (
            "python_tests/runtime/test_batches.py::test_a_filter_of_one_row_stays_beside_rows_without_it[{'top_k': 1}]",
        ),
    ),
    Fault(
        "serving: a chunked body is read whole before it is refused",
        "polyspec_ext/serving/api.py",
        "            if len(body) > self.limits.body:\n                raise too_long\n        return",
        "        if len(body) > self.limits.body:\n            raise too_long\n        return",
        (
            "python_tests/serving/test_endpoint_limits.py::test_a_chunked_body_is_refused_before_its_end",
        ),
    ),
    Fault(
        "policies: the slowest step is what steps cost",
        "csrc/src/policy/step_times.cpp",
        "return values[(n - 1) / 2];",
        "return values[n - 1];",
        (
            "python_tests/policies/test_adaptive.py::test_a_single_slow_step_changes_no_window[Joint]",
        ),
    ),
    Fault(
        "cpu: zeros of 4-bit groups are left out",
        "csrc/src/cpu/int4_product.cpp",
        "totals[n][m] = fused(zero, scales[m].sum, fused(sum, scale, totals[n][m]));",
        "totals[n][m] = fused(sum, scale, totals[n][m]);",
        (
            "ctest int4_test",
            "python_tests/ops/test_int4.py::test_is_the_dequantised_product[32-torch.float32]",
        ),
    ),
    Fault(
        "cpu: blocks of 8 bits have no bias",
        "csrc/src/cpu/block_product.cpp",
        "const int32_t offset = form.offset + (form.bits == 8 ? bias_of<8>() : 0);",
        "const int32_t offset = form.offset + 1;",
        ("ctest blocks_test",),
    ),
    Fault(
        "cpu: a row of blocks adds the minimum of a type without minima",
        "csrc/src/cpu/block_pack.cpp",
        "*to++ = form.minima ? weight + minimum : weight;",
        "*to++ = weight + minimum;",
        ("python_tests/ops/test_blocks.py::test_rows_have_the_bits_of_another_reader[Q8_0]",),
    ),
    Fault(
        "api: sizes whose product overflows are taken",
        "csrc/src/api/checks.hpp",
        "return a == 0 || b == 0 || a <= limit / b;",
        "return a == 0 || b == 0 || static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b)) <= limit;",
        ("ctest sizes_test",),
    ),
    Fault(
        "runtime: draft tokens are verified with the rows of others",
        "polyspec_ext/runtime/engine.py",
        '            shared |= {"draft_lengths": local.lengths, "draft_statistics": statistics}\n',
        '            draft_logits = None if draft_logits is None else draft_logits.roll(1, 1)\n            shared |= {"draft_lengths": local.lengths, "draft_statistics": None}\n',
        ("python_tests/exactness/test_law.py::test_the_law_is_the_targets[2, 2, [3]-token-None]",),
    ),
    Fault(
        "runtime: a level's last token is not handed up",
        "polyspec_ext/runtime/engine.py",
        "step, emitted.tokens, emitted.num_accepted, emitted.status, padding",
        "step, emitted.tokens, (emitted.num_accepted - (number > 1)).clamp_min(0), emitted.status, padding",
        (
            "python_tests/exactness/test_law.py::test_the_law_is_the_targets[3, 2, [3, 2]-token-None]",
        ),
    ),
    Fault(
        "runtime: the target's cache keeps rejected tokens",
        "polyspec_ext/runtime/engine.py",
        "            if level >= number:\n",
        "            if level > number:\n",
        (
            "python_tests/exactness/test_law.py::test_the_law_is_the_targets[four methods-token-None]",
        ),
    ),
    Fault(
        "runtime: drafts end before token 0",
        "polyspec_ext/runtime/engine.py",
        "step, block.tokens, block.counts, block.status, padding, ends=tree is None",
        "step, block.tokens, block.tokens.ne(0).cumprod(1).sum(1), block.status, padding, ends=tree is None",
        ("python_tests/exactness/test_law.py::test_the_law_is_the_targets[2, 2, [3]-token-None]",),
    ),
    Fault(
        "runtime: rows of a verification lie a slot early",
        "polyspec_ext/runtime/rows.py",
        "        logits, slots = logits.to(table.dtype), slots.to(device)\n",
        "        logits, slots = logits.to(table.dtype), slots.to(device).sub(1).clamp_min(0)\n",
        (
            "python_tests/exactness/test_law.py::test_the_law_is_the_targets[3, 2, [3, 2]-token-None]",
        ),
    ),
    Fault(
        "runtime: rows of a tail are in the place of the first",
        "polyspec_ext/runtime/rows.py",
        "        logits, slots = logits.to(dtype), slots.to(device)\n",
        "        logits, slots = logits.to(dtype), (slots - slots.min()).to(device)\n",
        (
            "python_tests/exactness/test_law.py::test_the_law_is_the_targets[tail, [2, 1]-token-None]",
        ),
    ),
    Fault(
        "runtime: the target gets no rows of tails",
        "polyspec_ext/runtime/rows.py",
        "        put_rows(table.logits, known, logits, statistics, slots, padding)\n        self.tail_has_statistics = self.tail_has_statistics and statistics is not None\n",
        "        self.tail_has_statistics = False\n",
        (
            "python_tests/exactness/test_law.py::test_the_law_is_the_targets[tail, [2, 1]-token-None]",
        ),
    ),
    Fault(
        "drafters: children of a node are verified with the root's row",
        "polyspec_ext/runtime/trees.py",
        "ids = torch.arange(batch * (nodes + 1), device=device).view(batch, nodes + 1)",
        "ids = torch.arange(batch, device=device)[:, None].expand(batch, nodes + 1) * (nodes + 1)",
        ("python_tests/exactness/test_law.py::test_the_law_is_the_targets[drawn tree-token-None]",),
    ),
    Fault(
        "drafters: rows of a path are those of the first nodes",
        "polyspec_ext/runtime/trees.py",
        "        drawn = result.rows.clamp_min(0)[..., None]\n",
        "        drawn = torch.arange(result.rows.shape[1]).expand_as(result.rows)[..., None]\n",
        (
            "python_tests/exactness/test_law.py::test_the_law_is_the_targets[tree below two-token-None]",
        ),
    ),
    Fault(
        "drafters: paths draw from the rows of the first",
        "polyspec_ext/drafters/trees.py",
        "        behind = logits[batch[:, None], first].flatten(0, 1)[:, None]\n",
        "        behind = logits[batch[:, None], first * 0].flatten(0, 1)[:, None]\n",
        ("python_tests/exactness/test_law.py::test_the_law_is_the_targets[paths [2]-token-None]",),
    ),
    Fault(
        "tensors: entries of drawn ids are those of others",
        "polyspec_ext/tensors.py",
        "        entries[known] = torch.arange(len(known), dtype=torch.int32, device=known.device)\n",
        "        entries[known] = torch.arange(len(known), dtype=torch.int32, device=known.device).flip(0)\n",
        (
            "python_tests/exactness/test_law.py::test_the_law_is_the_targets[some ids last-token-None]",
        ),
    ),
    Fault(
        "drafters: a member's rows are written by the next",
        "polyspec_ext/drafters/switching.py",
        "        rows = self._rows[self.active]\n",
        "        rows = next((rows for rows in self._rows if rows is not None), None)\n",
        (
            "python_tests/drafters/test_proposal_kinds.py::test_a_switch_leaves_the_rows_of_others_alone",
        ),
    ),
)
