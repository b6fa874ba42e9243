"""The SGLang plug-in: signatures against its sources, and its code against stand-ins."""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_stand_in as stand_in
import torch
import toy
import toy_rows
from evidence import chi_square, law_of_texts
from foreign import signature, sources

import polyspec_ext as ps
from polyspec_ext import tiny
from polyspec_ext.integrations import Settings, sglang
from polyspec_ext.integrations.sglang import rule as plugin

# What the plug-in uses of SGLang 0.5.23: module, name, parameters or fields (none: whatever it
# has).
NAMES = """
srt/speculative/eagle_utils.py eagle_sample PARAMETERS
srt/speculative/eagle_worker_common.py eagle_sample
srt/speculative/ngram_worker.py eagle_sample
srt/speculative/eagle_info.py EagleVerifyInput.max_tree_depth self
srt/speculative/eagle_info.py EagleVerifyInput.tree_topk self
srt/speculative/eagle_info.py EagleVerifyInput draft_token custom_mask positions retrieve_index
   retrieve_next_token retrieve_next_sibling retrieve_cum_len spec_steps topk draft_token_num
   capture_hidden_mode seq_lens_sum seq_lens_cpu draft_probs prepared_out_cache_loc
   prepared_mrope_positions kv_loc_plan num_tokens_per_req
srt/speculative/ngram_info.py NgramVerifyInput.__init__ self draft_token custom_mask positions
   retrieve_index retrieve_next_token retrieve_next_sibling draft_token_num future_indices
   new_seq_lens accept_tokens accept_lens
srt/speculative/ngram_worker.py NGRAMWorker.__init__ self server_args gpu_id nccl_port
   target_worker
srt/speculative/ngram_worker.py NGRAMWorker._prepare_draft_tokens self batch
srt/speculative/ngram_worker.py NGRAMWorker._prepare_for_speculative_decoding self batch
srt/speculative/ngram_worker.py NGRAMWorker._update_ngram_corpus self batch
srt/speculative/spec_info.py SpeculativeAlgorithm.register cls name supports_overlap
   validate_server_args spec_class
srt/speculative/spec_info.py SpeculativeAlgorithm.NGRAM
srt/speculative/spec_info.py SpeculativeAlgorithm.create_future_map self device req_to_token_pool
   needs_cpu_seq_lens needs_confidence_relay
srt/speculative/spec_registry.py CustomSpecAlgo.__init__ self name factory supports_overlap
   validate_server_args
srt/speculative/spec_registry.py CustomSpecAlgo.handle_server_args self server_args
srt/plugins/hook_registry.py HookRegistry.register cls target hook hook_type source
srt/plugins/hook_registry.py HookType.AROUND
srt/plugins/__init__.py GENERAL_PLUGINS_GROUP
srt/sampling/penaltylib/repetition_penalty.py apply_scaling_penalties logits scaling_penalties
srt/layers/dp_attention.py is_dp_attention_enabled
srt/runtime_context.py get_parallel
kernels/ops/speculative/spec_tree.py verify_tree_greedy_func predicts accept_index
   accept_token_num candidates retrieve_index retrieve_next_token retrieve_next_sibling
   target_predict topk
srt/constrained/base_grammar_backend.py GrammarMask.apply self logits
srt/sampling/sampling_batch_info.py SamplingBatchInfo.sampling_seed
srt/sampling/sampling_batch_info.py SamplingBatchInfo.acc_additive_penalties
srt/sampling/sampling_batch_info.py SamplingBatchInfo.acc_scaling_penalties
srt/sampling/sampling_batch_info.py SamplingBatchInfo.logit_bias
srt/sampling/sampling_params.py SamplingParams.sampling_seed
"""
ROOT = sources("sglang")
V, K, LENGTH = 3, 2, 3


@pytest.mark.skipif(ROOT is None, reason="SGLang's sources are not here (POLYSPEC_SOURCES)")
@pytest.mark.parametrize("line", NAMES.replace("\n   ", "").strip().splitlines())
def test_sglang_has_these_names(line: str) -> None:
    module, name, *parameters = line.split()
    wanted = plugin.PARAMETERS if parameters == ["PARAMETERS"] else " ".join(parameters)
    assert wanted in ("", signature(ROOT, module, name))


@pytest.fixture(autouse=True)
def _sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in.install(monkeypatch)


def eagle_sample(given: Any, logits: torch.Tensor, info: Any, seq_lens: torch.Tensor, **more: Any):
    """Call the replacement as SGLang does; return its results and the tokens [B, depth], or -1."""
    batch = SimpleNamespace(
        sampling_info=info, forward_mode=stand_in.ForwardMode(verify=True), seq_lens=seq_lens
    )
    output = SimpleNamespace(next_token_logits=logits)
    rule = more.pop("rule", "token")
    predict, lengths, nodes = plugin.eagle_sample(
        stand_in.eagle_sample, given, batch, output, rule=rule, **more
    )
    for tensor in (predict, lengths, nodes):
        assert tensor.dtype == torch.int32
    assert torch.equal((nodes >= 0).sum(1), lengths.long())
    tokens = predict[nodes.clamp(min=0).long()].masked_fill(nodes < 0, -1)
    return tokens.long(), lengths.long(), nodes


CASES = ["picked", "tree", "probabilities", "filtered", "logits", "short", "grammar"]


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("case", CASES)
def test_texts_have_the_targets_law(case: str, rule: str) -> None:
    """Texts of three tokens, all in a batch, by: drafts that are picked, in chains and in trees;
    drawn drafts with probabilities, also under top-p, as SGLang's EAGLE has them; a chain's drafts
    with logits, also fewer than fit; and a mask that forbids an id that is drafted."""
    count = 5_000 if case in ("picked", "tree") else 20_000  # the stand-in walks node by node
    generator = torch.Generator().manual_seed(2)
    table, drafter = (torch.randn(V, V, generator=generator) * 1.5 for _ in range(2))
    temperature, top_p = 0.7, 0.8 if case == "filtered" else 1.0
    info = stand_in.sampling_info(count, V, temperatures=temperature, top_ps=top_p)
    seeds = info.sampling_seed
    text = torch.zeros(count, LENGTH + K + 2, dtype=torch.int64)
    known = torch.ones(count, dtype=torch.int64)
    each = torch.arange(count)
    mask = SimpleNamespace(apply=lambda logits: logits[:, 2].fill_(-torch.inf))
    while bool((known <= LENGTH).any()):
        nodes = [text[each, known - 1]]
        logits = []
        for step in range(K):
            logits.append(drafter[nodes[-1]])
            drawn = ps.sample(
                logits[-1], temperature, seed=seeds, position=known + step, level=2, round=known
            )
            nodes.append(logits[-1].argmax(-1) if case == "picked" else drawn.tokens)
        stacked = torch.stack(logits, 1)
        drafts, fields = torch.stack(nodes, 1), {}
        if case in ("probabilities", "filtered", "grammar"):
            fields["draft_probs"] = (stacked / temperature).softmax(-1)
        if case in ("logits", "short"):
            rows = torch.arange(count * K).view(count, K)
            if case == "short":
                short = torch.rand(count, generator=generator) < 0.5
                rows[short, K - 1], drafts[short, K] = -1, 0
            fields |= {"polyspec": plugin.Drawn(stacked.flatten(0, 1), rows), "tree_topk": -1}
        given = stand_in.chain_input(drafts, known - 1, **fields)
        if case == "tree":  # the root has the children 0 and 1, two nodes that are the same too
            drafts = torch.cat([drafts[:, :1], torch.tensor([[0, 1, 1]]).expand(count, -1)], 1)
            given = stand_in.chain_input(drafts, known - 1, tree_topk=2)
            given.positions = (known[:, None] - 1 + torch.tensor([0, 1, 1, 1])).flatten()
            given.retrieve_next_token = torch.tensor([[1, -1, -1, -1]]).expand(count, -1)
            given.retrieve_next_sibling = torch.tensor([[-1, 2, 3, -1]]).expand(count, -1)
        tokens, lengths, _ = eagle_sample(
            given,
            table[drafts].flatten(0, 1),
            info,
            known - 1,
            rule=rule,
            grammar_mask=mask if case == "grammar" else None,
        )
        for j in range(tokens.shape[1]):
            more = (j < lengths) & (known <= LENGTH)
            to = (known + j).clamp(max=text.shape[1] - 1)
            text[each[more], to[more]] = tokens[more, j]
        known = torch.where(known <= LENGTH, known + lengths, known)
    table = table / temperature
    if case == "grammar":
        table[:, 2] = -torch.inf
    if case == "filtered":
        chances = table.softmax(-1)
        ordered = chances.sort(-1, descending=True).values
        kept = ordered.cumsum(-1) - ordered < top_p
        edge = ordered.masked_fill(~kept, 1).amin(-1, keepdim=True)
        table = table.masked_fill(chances < edge, -torch.inf)
        assert bool(table.isinf().any())
    code = (text[:, 1 : LENGTH + 1] * V ** torch.arange(LENGTH - 1, -1, -1)).sum(1)
    counts = torch.bincount(code, minlength=V**LENGTH)
    assert chi_square(counts.numpy(), law_of_texts(table, LENGTH)) > 1e-4


def random_step(count: int, width: int, vocabulary: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    drafts = torch.randint(0, vocabulary, (count, width), generator=generator)
    seq_lens = torch.randint(3, 60, (count,), generator=generator)
    probabilities = torch.rand(count, width - 1, vocabulary, generator=generator)
    given = stand_in.chain_input(
        drafts, seq_lens, draft_probs=probabilities / probabilities.sum(-1, keepdim=True)
    )
    return given, torch.randn(count * width, vocabulary, generator=generator) * 2, seq_lens


PARAMETERS = {
    "temperatures": [1.0, 0.7, 1.3, 1.0, 0.5, 1.0],
    "top_ks": [1 << 30, 3, 1 << 30, 1, 4, 2],
    "top_ps": [1.0, 1.0, 0.6, 1.0, 0.8, 0.4],
    "min_ps": [0.0, 0.0, 0.0, 0.0, 0.3, 0.0],
}


@pytest.mark.parametrize("drawn", [False, True])
def test_requests_have_their_parameters_and_seeds(drawn: bool) -> None:
    """A request has the tokens that it has alone, those that `ps` draws for it."""
    given, logits, seq_lens = random_step(6, 3, 9)
    if not drawn:
        del given.draft_probs
    info = stand_in.sampling_info(6, 9, **PARAMETERS)
    tokens, lengths, _ = eagle_sample(given, logits.clone(), info, seq_lens, rule="block")
    for i in range(6):
        one = stand_in.chain_input(given.draft_token.view(6, 3)[i : i + 1], seq_lens[i : i + 1])
        if drawn:
            one.draft_probs = given.draft_probs[i : i + 1]
        alone = stand_in.sampling_info(1, 9, **{k: [v[i]] for k, v in PARAMETERS.items()})
        alone.sampling_seed = info.sampling_seed[i : i + 1]
        rows = logits[3 * i : 3 * i + 3]
        again, length, _ = eagle_sample(one, rows.clone(), alone, seq_lens[i : i + 1], rule="block")
        assert again[0, : length[0]].tolist() == tokens[i, : lengths[i]].tolist()
        greedy = PARAMETERS["top_ks"][i] == 1
        first = ps.sample(
            rows[:1],
            0.0 if greedy else PARAMETERS["temperatures"][i],
            PARAMETERS["top_ks"][i],
            PARAMETERS["top_ps"][i],
            PARAMETERS["min_ps"][i],
            seed=int(info.sampling_seed[i]),
            position=int(seq_lens[i]) + 1,
        )
        if greedy or not drawn:
            assert int(tokens[i, 0]) == int(first.tokens[0])
        if greedy:
            assert tokens[i, : lengths[i]].tolist() == rows.argmax(-1)[: lengths[i]].tolist()


@pytest.mark.parametrize("drawn", [False, True])
def test_greedy_is_the_lowest_id_among_equals(drawn: bool) -> None:
    given, _, seq_lens = random_step(200, 3, 5)
    if not drawn:
        del given.draft_probs
    logits = torch.tensor([0.0, 2.0, 1.0, 2.0, 2.0]).repeat(600, 1)
    info = stand_in.sampling_info(200, 5, top_ks=1)
    tokens, _, _ = eagle_sample(given, logits, info, seq_lens)
    assert set(tokens.flatten().tolist()) == {1, -1}


def test_filters_cut_as_the_operators_do() -> None:
    """Drafts that cannot be accepted: tokens are drawn of the target alone, in both ways."""
    count = 3_000
    logits = torch.tensor([3.0, 2.5, 2.5, 1.0, 0.5, 0.0]).expand(count * 2, -1)
    drafts = torch.full((count, 2), 5)
    certain = torch.zeros(count, 1, 6)
    certain[:, :, 5] = 1.0
    for parameters in (
        {"top_ks": 2},
        {"top_ps": 0.7},
        {"min_ps": 0.2},
        {"top_ks": 4, "top_ps": 0.9},
    ):
        info = stand_in.sampling_info(count, 6, temperatures=0.8, **parameters)
        picked = stand_in.chain_input(drafts, torch.full((count,), 9))
        drawn = stand_in.chain_input(drafts, torch.full((count,), 9), draft_probs=certain)
        seen = [
            eagle_sample(given, logits.clone(), info, torch.full((count,), 9))[0][:, 0]
            for given in (picked, drawn)
        ]
        assert set(seen[0].tolist()) == set(seen[1].tolist()) < set(range(5))


def test_penalties_biases_and_masks_are_applied_in_place() -> None:
    given, logits, seq_lens = random_step(2, 3, 5)
    del given.draft_probs
    info = stand_in.sampling_info(2, 5, top_ks=1)
    info.acc_additive_penalties = torch.randn(2, 5)
    info.acc_scaling_penalties = torch.rand(2, 5) + 0.5
    info.logit_bias = torch.randn(2, 5)
    expected = logits + info.acc_additive_penalties.repeat_interleave(3, 0)
    scale = info.acc_scaling_penalties.repeat_interleave(3, 0)
    expected = torch.where(expected < 0, expected * scale, expected / scale)
    expected += info.logit_bias.repeat_interleave(3, 0)
    expected[:, 1] = -torch.inf
    mask = SimpleNamespace(apply=lambda logits: logits[:, 1].fill_(-torch.inf))
    tokens, _, _ = eagle_sample(given, logits, info, seq_lens, grammar_mask=mask)
    assert torch.equal(logits, expected)
    assert tokens[:, 0].tolist() == expected.argmax(-1)[::3].tolist()


def test_rows_without_a_distribution_watermarks_idle_steps_and_drawn_trees() -> None:
    given, logits, seq_lens = random_step(2, 3, 5)
    info = stand_in.sampling_info(2, 5)
    picked = stand_in.chain_input(given.draft_token.view(2, 3) + 1, seq_lens)
    for step in (given, picked):
        tokens, lengths, _ = eagle_sample(step, logits.fill_(torch.nan), info, seq_lens)
        assert lengths.tolist() == [1, 1]
        assert tokens[:, 0].tolist() == [0, 0]
    idle = SimpleNamespace(sampling_info=info, forward_mode=stand_in.ForwardMode(idle=True))
    assert plugin.eagle_sample(stand_in.eagle_sample, given, idle, None, rule="token") == "original"
    given.tree_topk = 4
    with pytest.raises(ValueError, match="speculative_eagle_topk: expected 1"):
        eagle_sample(given, logits, info, seq_lens)
    info.has_watermark_candidates = True
    with pytest.raises(ValueError, match="watermark: expected none"):
        eagle_sample(given, logits, info, seq_lens, watermark_state=object())


# ---- registration --------------------------------------------------------------------------------


def test_nothing_is_registered_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYSPEC", raising=False)
    sglang.register()
    assert not stand_in.HookRegistry.hooks
    monkeypatch.setenv("POLYSPEC", '{"rule": "block"}')
    sglang.register()
    ((target, (hook, kind)),) = stand_in.HookRegistry.hooks.items()
    assert target == "sglang.srt.speculative.eagle_utils.eagle_sample"
    assert kind is stand_in.HookType.AROUND
    assert hook.keywords == {"rule": "block"}
    assert not stand_in.REGISTERED


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting"),
        ('["block"]', "POLYSPEC: expected a mapping with any of rule, levels, window"),
        ('{"rules": "block"}', "POLYSPEC: expected any of rule, levels, window, given 'rules'"),
        ('{"rule": "fly"}', 'rule: expected "token" or "block", given'),
        ('{"levels": 3}', "levels: expected a string or a list of strings"),
        ('{"window": [4]}', "window: expected none without levels"),
        ('{"levels": ["a"], "window": [4, 2]}', "window: expected 1 integers"),
    ],
)
def test_wrong_settings_end_the_process(text, message, monkeypatch) -> None:
    monkeypatch.setenv("POLYSPEC", text)
    with pytest.raises(SystemExit, match=message):
        sglang.register()


def test_another_signature_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang.srt.speculative.eagle_utils as utils

    monkeypatch.setenv("POLYSPEC", "{}")
    monkeypatch.setattr(utils, "eagle_sample", lambda verify_input, batch: None)
    with pytest.raises(
        SystemExit, match=r"expected eagle_sample\(verify_input batch logits_output"
    ):
        sglang.register()


def test_the_algorithm_is_the_n_gram_one_but_for_its_drafts(monkeypatch) -> None:
    monkeypatch.setenv("POLYSPEC", '{"levels": ["prompt-lookup"], "window": [5]}')
    sglang.register()
    algorithm, factory, overlaps = stand_in.REGISTERED["POLYSPEC"]
    assert overlaps
    assert algorithm.is_ngram()
    assert not algorithm.is_eagle()
    assert not algorithm.has_draft_kv()
    assert algorithm.create_future_map("cpu") == "NGRAM on cpu"  # SGLang's base class lacks it
    assert issubclass(factory(None), stand_in.NGRAMWorker)
    given = SimpleNamespace(speculative_num_draft_tokens=None, max_running_requests=None)
    algorithm.handle_server_args(given)
    assert given.speculative_num_draft_tokens == 6
    assert (given.speculative_num_steps, given.speculative_eagle_topk) == (5, 1)
    given.speculative_num_draft_tokens = 9
    with pytest.raises(ValueError, match="speculative_num_draft_tokens: expected 6"):
        algorithm.handle_server_args(given)


# ---- the worker ----------------------------------------------------------------------------------


class Engine:
    """SGLang's decode loop on the CPU: a target, requests that join and leave, and the worker."""

    def __init__(
        self, levels: list[Any], window: list[int], overlap: bool = False, target: Any = None
    ) -> None:
        from transformers import AutoModelForCausalLM

        if target is None:
            target = AutoModelForCausalLM.from_pretrained(tiny.path("target"), dtype="float32")
        self.target = target
        vocab_size = getattr(target, "config", target).vocab_size
        config = SimpleNamespace(vocab_size=vocab_size, context_len=256)
        target = SimpleNamespace(model_runner=SimpleNamespace(model_config=config))
        arguments = SimpleNamespace(speculative_num_draft_tokens=window[0] + 1, overlap=overlap)
        settings = Settings("block", tuple(levels), tuple(window))
        kind = plugin.worker_class(settings)
        self.worker = kind(arguments, 0, 0, target)
        self.overlap = overlap
        self.accepted = 0

    def prefill(self, requests: list[Any]) -> None:
        """Give requests their first token, the likeliest or by the seed."""
        for request in requests:
            logits = self._logits([list(request.origin_input_ids_unpadded)])[0][-1:]
            given = request.sampling_params
            greedy = given.top_k == 1
            token = ps.sample(
                logits,
                0.0 if greedy else given.temperature,
                given.top_k,
                seed=given.sampling_seed,
                position=len(request.origin_input_ids_unpadded),
            )
            request.output_ids.append(int(token.tokens))

    def step(self, requests: list[Any], last: Any = None) -> Any:
        """Run a step. With overlap requests have its tokens when the next one has drafted."""
        given = [request.sampling_params for request in requests]
        texts = [
            [*request.origin_input_ids_unpadded, *request.output_ids, *extra]
            for request, extra in zip(requests, last or [[]] * len(requests), strict=True)
        ]
        info = stand_in.sampling_info(
            len(given),
            0,
            temperatures=[one.temperature for one in given],
            top_ks=[one.top_k for one in given],
            sampling_seed=torch.tensor([one.sampling_seed for one in given]),
        )
        seq_lens = torch.tensor([len(text) - 1 for text in texts])
        batch = SimpleNamespace(
            reqs=requests,
            seq_lens=seq_lens,
            sampling_info=info,
            forward_mode=stand_in.ForwardMode(),
            grammar_needs_sync=lambda: False,
            spec_info=None,
        )
        width = self.worker.draft_token_num
        if last is not None:
            rows = torch.zeros(len(last), width, dtype=torch.int64)
            for row, extra in enumerate(last):
                rows[row, : len(extra)] = torch.tensor(extra)
            lengths = torch.tensor([len(extra) for extra in last])
            batch.spec_info = SimpleNamespace(accept_tokens=rows.flatten(), accept_lens=lengths)
        self.worker._prepare_for_speculative_decoding(batch)
        for request, extra in zip(requests, last or [[]] * len(requests), strict=True):
            request.output_ids += extra
        drafts = batch.spec_info.draft_token.view(len(requests), -1).tolist()
        assert [row[0] for row in drafts] == [text[-1] for text in texts]
        whole = [[*text, *row[1:]] for text, row in zip(texts, drafts, strict=True)]
        logits = torch.cat([rows[-width:] for rows in self._logits(whole)])
        tokens, lengths, _ = eagle_sample(batch.spec_info, logits, info, seq_lens, rule="block")
        self.worker._update_ngram_corpus(batch)
        self.accepted += int((lengths - 1).sum())
        new = [row[:n] for row, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]
        if not self.overlap:
            for request, extra in zip(requests, new, strict=True):
                request.output_ids += extra
        return new

    def _logits(self, texts: list[list[int]]) -> list[torch.Tensor]:
        if isinstance(self.target, toy.ToyLevel):
            return [
                torch.stack([self.target.row(text[: i + 1]) for i in range(len(text))])
                for text in texts
            ]
        longest = max(map(len, texts))
        padded = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
        with torch.no_grad():
            logits = self.target(padded).logits
        return [rows[: len(text)] for rows, text in zip(logits, texts, strict=True)]


def requests(prompts: list[list[int]], **parameters: Any) -> list[Any]:
    return [
        SimpleNamespace(
            rid=f"request {i}",
            origin_input_ids_unpadded=prompt,
            output_ids=[],
            sampling_params=SimpleNamespace(
                **{
                    "temperature": 1.0,
                    "top_k": 1,
                    "top_p": 1.0,
                    "min_p": 0.0,
                    "sampling_seed": i + 5,
                    **parameters,
                }
            ),
        )
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "levels", [["drafter"], ["middle", "drafter"], ["middle", "prompt-lookup"]]
)
def test_greedy_texts_are_the_targets(levels: list[str], overlap: bool) -> None:
    """Requests that join, leave and come back; with overlap their tokens come a step later."""
    names = [name if "-" in name else str(tiny.path(name)) for name in levels]
    engine = Engine(names, [4, 3][: len(levels)], overlap)
    prompts = [[5, 6, 7, 5, 6], [9, 8], [100, 200, 300, 100, 200, 300]]
    asked = requests(prompts)
    engine.prefill(asked)
    last: dict[str, list[int]] = {}
    for batch in ([0, 1], [0, 1], [0, 1, 2], [0, 2], [2], [0, 2, 1], [0, 2, 1], [1, 0]):
        chosen = [asked[i] for i in batch]
        given = [last.pop(one.rid, []) for one in chosen] if overlap else None
        new = engine.step(chosen, given)
        if overlap:
            # What a request that is left out of the next step has accepted is processed meanwhile.
            last |= {one.rid: tokens for one, tokens in zip(chosen, new, strict=True)}
    for one in asked:
        text = torch.tensor([one.origin_input_ids_unpadded])
        expected = engine.target.generate(
            text, max_new_tokens=len(one.output_ids), do_sample=False, eos_token_id=None
        )
        assert one.output_ids == expected[0, text.shape[1] :].tolist()
    assert engine.accepted > 5


def test_sampled_texts_have_the_targets_law() -> None:
    """Compare three levels over tables, at a temperature that all of them need."""
    target, middle, drafter = (toy_rows.Rows(V, 11 + i, scale=1.5) for i in range(3))
    engine = Engine([middle, drafter], [2, 1], target=target)
    prompt, count = [0, 1], 3_000
    asked = requests([prompt] * count, temperature=1.5, top_k=1 << 30)
    engine.prefill(asked)
    while any(len(one.output_ids) < LENGTH for one in asked):
        engine.step(asked)
    law = {}
    for text in itertools.product(range(V), repeat=LENGTH):
        steps = [target.row([*prompt, *text[:i]]).double() / 1.5 for i in range(LENGTH)]
        law[text] = float(torch.stack(steps).softmax(-1)[range(LENGTH), text].prod())
    seen = Counter(tuple(one.output_ids[:LENGTH]) for one in asked)
    assert engine.accepted > count
    assert chi_square([seen[text] for text in law], list(law.values())) > 1e-4
