"""Processors before the distribution: the same changes as transformers' list, position by
position."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from calls import function_of_prefix
from small_models import llama
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import logits_process as lp

import polyspec_ext as ps
from polyspec_ext.integrations.processors import (
    REFUSED_PROCESSORS,
    TransformersProcessors,
    shown_scores,
    take_apart,
)
from polyspec_ext.sampling import Sampling

V, PAD = 13, 0
PROMPTS = [[PAD, PAD, 3, 4, 3], [5, 6, 5, 6, 5]]  # left-padded
PADDING = [2, 0]
NEW = [[4, 3, 4], [6, 5, 6]]


def make(processors, committed=(99, 99), **options) -> TransformersProcessors:
    lengths = [3, 5]
    usual = {
        "vocab_size": V,
        "padding": [torch.tensor(p[:n]) for p, n in zip(PROMPTS, PADDING, strict=True)],
        "eos": frozenset({1}),
    }
    made = TransformersProcessors(processors, committed=lengths, **{**usual, **options})
    lengths[:] = committed
    return made


def prefix_of(row: int) -> torch.Tensor:
    return torch.tensor(PROMPTS[row][PADDING[row] :] + NEW[row])


@function_of_prefix
def allowed(row: int, sent: torch.Tensor) -> list[int]:
    assert sent[0] == PROMPTS[row][0]
    return [row, int(sent[-1]), 7]


@function_of_prefix
def biased(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A user's processor that writes in place."""
    for row, ids in enumerate(input_ids):
        scores[row, int(ids[-1])] += 3 + len(ids)
    return scores


OWN: dict[str, Callable[[], list[Any]]] = {
    "repetition": lambda: [lp.RepetitionPenaltyLogitsProcessor(1.7)],
    "ngram": lambda: [lp.NoRepeatNGramLogitsProcessor(2)],
    "bad words": lambda: [lp.NoBadWordsLogitsProcessor([[4, 3], [9], [6, 5, 6]])],
    "bias": lambda: [lp.SequenceBiasLogitsProcessor({(3, 4): 2.0, (8,): -1.5})],
    "min length": lambda: [lp.MinLengthLogitsProcessor(7, 1)],
    "min new": lambda: [lp.MinNewTokensLengthLogitsProcessor(5, 2, 1)],
    "forced eos": lambda: [lp.ForcedEOSTokenLogitsProcessor(8, 1)],
    "decay": lambda: [lp.ExponentialDecayLengthPenalty((1, 1.5), 1, 5)],
    "suppress": lambda: [lp.SuppressTokensLogitsProcessor([2, 3])],
    "begin": lambda: [lp.SuppressTokensAtBeginLogitsProcessor([2, 3], 5)],
    "watermark": lambda: [lp.WatermarkLogitsProcessor(V, "cpu", context_width=2)],
    "allowed": lambda: [lp.PrefixConstrainedLogitsProcessor(allowed, 1)],
    "encoder": lambda: [lp.EncoderRepetitionPenaltyLogitsProcessor(1.4, torch.tensor(PROMPTS))],
    "encoder ngram": lambda: [lp.EncoderNoRepeatNGramLogitsProcessor(2, torch.tensor(PROMPTS))],
    "invalid": lambda: [lp.InfNanRemoveLogitsProcessor()],
    "typical": lambda: [lp.TypicalLogitsWarper(0.6)],
    "eta": lambda: [
        lp.EtaLogitsWarper(0.1),
        lp.EpsilonLogitsWarper(0.02),
        lp.TopHLogitsWarper(0.5),
    ],
    "top k": lambda: [lp.TopKLogitsWarper(6), lp.MinPLogitsWarper(0.1)],
    "codebooks": lambda: [lp.AlternatingCodebooksLogitsProcessor(4, 3, 6)],
    "forced bos": lambda: [
        lp.ForcedBOSTokenLogitsProcessor(4),
        lp.SuppressTokensLogitsProcessor([2]),
    ],
    "bark": lambda: [lp.BarkEosPrioritizerLogitsProcessor(1, 0.05)],
    "timestamps": lambda: [
        lp.WhisperTimeStampLogitsProcessor(
            GenerationConfig(eos_token_id=1, no_timestamps_token_id=8), begin_index=5
        )
    ],
    "own": lambda: [biased],
    "several": lambda: [
        lp.RepetitionPenaltyLogitsProcessor(1.7),
        lp.NoRepeatNGramLogitsProcessor(2),
        lp.TemperatureLogitsWarper(0.7),
        lp.TopPLogitsWarper(0.8),
        biased,
        lp.TypicalLogitsWarper(0.9),
        lp.LogitNormalization(),
    ],
}
if "Tensor" in str(lp.RepetitionPenaltyLogitsProcessor.__init__.__annotations__):
    # With a length per row, the penalty leaves padding out.
    OWN["ignored padding"] = lambda: [
        lp.RepetitionPenaltyLogitsProcessor(2.0, prompt_ignore_length=torch.tensor(PADDING))
    ]


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_position_gets_what_generate_would_give_it(name: str, dtype: torch.dtype) -> None:
    count = len(NEW[0]) + 1
    logits = (3 * torch.randn(2, count, V)).to(dtype)
    theirs = LogitsProcessorList(OWN[name]())
    ours = make(OWN[name]())
    got = [ours.apply(logits[row], prefix_of(row), row) for row in range(2)]
    changed = False
    for i in range(count):
        ids = torch.tensor([p + n[:i] for p, n in zip(PROMPTS, NEW, strict=True)])
        raw = logits[:, i].float()
        expected = theirs(ids, raw.clone())
        changed = changed or not torch.equal(expected, raw)
        for row in range(2):
            assert torch.equal(got[row][i], expected[row]), (row, i)
    assert changed or name == "invalid"
    assert got[0].dtype == torch.float32


def test_every_processor_of_transformers_is_applied_or_refused() -> None:
    own = {type(processor).__name__ for make_list in OWN.values() for processor in make_list()}
    base = lp.LogitsProcessor
    every = {
        name
        for name, kind in vars(lp).items()
        if isinstance(kind, type) and issubclass(kind, base) and kind is not base
    }
    assert every <= own | set(REFUSED_PROCESSORS)
    assert own.isdisjoint(REFUSED_PROCESSORS)


def test_a_watermark_that_looks_at_candidates() -> None:
    ids, logits = torch.tensor([[3, 4, 5, 6]]), torch.randn(3, 50)
    processor = lp.WatermarkLogitsProcessor(50, "cpu", seeding_scheme="selfhash", context_width=2)
    ours = make([processor], vocab_size=50, padding=[ids[0, :0]] * 2).apply(logits, ids[0], 0)
    for i in range(3):
        expected = processor(ids[:, : 2 + i], logits[i : i + 1])
        assert not torch.equal(expected, logits[i : i + 1])
        assert torch.equal(ours[i : i + 1], expected)


def test_the_logits_stay_as_they_are() -> None:
    @function_of_prefix
    def zero(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.zero_()

    logits = torch.randn(4, V)
    before = logits.clone()
    ours = make([zero], keep=True)
    with torch.inference_mode():
        out = ours.apply(logits, prefix_of(0), 0)
    assert not out.is_inference()
    assert torch.equal(logits, before)
    assert torch.equal(ours.given[0], before)
    assert out.abs().sum() == 0


# ---- draft levels --------------------------------------------------------------------------------


def test_a_smaller_vocabulary() -> None:
    processors = [lp.SequenceBiasLogitsProcessor({(12,): 2.0, (3,): 1.0}), lp.LogitNormalization()]
    logits = torch.randn(2, V - 3)
    ours = make(processors)
    out = ours.apply(logits, prefix_of(1), 1)
    assert out.shape == (2, V - 3)
    biased = logits + torch.nn.functional.one_hot(torch.tensor(3), V - 3)
    assert torch.allclose(out, biased.log_softmax(-1), atol=1e-6)
    assert ours.apply(torch.randn(2, V), prefix_of(1), 1).shape == (2, V)


@pytest.mark.parametrize("width", [V - 3, V])
def test_a_draft_with_no_token_left_drafts_from_its_own_logits(width: int) -> None:
    """Forced to a token that it does not have, or (beyond the committed text) to none at all."""

    @function_of_prefix
    def nothing(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -math.inf)

    only = lp.PrefixConstrainedLogitsProcessor(function_of_prefix(lambda _, sent: [V - 1]), 1)
    logits = torch.randn(1, width)
    processor = only if width < V else nothing
    out = make([processor], committed=[3, 5]).apply(logits, prefix_of(1)[:6], 1)
    assert torch.equal(out, logits)
    if width == V:  # the target's position: no distribution, which the operators report
        out = make([processor], committed=[3, 5]).apply(logits, prefix_of(1)[:5], 1)
        assert torch.isneginf(out).all()


@function_of_prefix
def failing(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Knows texts up to seven tokens, padding included."""
    if input_ids.shape[1] > 7:
        raise KeyError("no such text")
    return scores + 1


@pytest.mark.parametrize(
    ("committed", "first", "raises"), [([3, 5], 5, True), ([3, 5], 6, False), ([3, 6], 6, True)]
)
def test_a_failure_on_a_drafted_text(committed: list[int], first: int, raises: bool) -> None:
    """A draft level goes on with unchanged logits; the target's block fails with a note."""
    logits = torch.randn(9 - first, V)
    ours = make([failing], committed=committed)
    if raises:
        with pytest.raises(KeyError, match="no such text") as error:
            ours.apply(logits, prefix_of(1), 1)
        assert error.value.__notes__ == ["in function, request 1, position 8"]
    else:
        out = ours.apply(logits, prefix_of(1), 1)
        assert torch.equal(out[:2], logits[:2] + 1)
        assert torch.equal(out[2:], logits[2:])


@pytest.mark.parametrize("why", ["eos", "ruled out"])
def test_a_failure_where_no_text_gets(why: str) -> None:
    @function_of_prefix
    def never_six(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.tensor(6), -math.inf)

    logits = torch.randn(4, V)
    processors = [failing, never_six] if why == "ruled out" else [failing]
    eos = frozenset({6} if why == "eos" else {1})
    out = make(processors, committed=[3, 5], eos=eos).apply(logits, prefix_of(1), 1)
    assert torch.equal(out[3], logits[3])
    assert torch.equal(out[2, :6], logits[2, :6] + 1)
    with pytest.raises(KeyError):
        make([failing], committed=[3, 5]).apply(logits, prefix_of(1), 1)


# ---- processors that cannot be applied -----------------------------------------------------------


@pytest.mark.parametrize("stated", [False, True])
def test_a_users_processor_states_what_it_depends_on(stated: bool) -> None:
    """A processor is called with one row. A subclass of a class of transformers is a user's as
    well."""
    rows = []

    class Penalty(lp.RepetitionPenaltyLogitsProcessor):
        function_of_prefix = stated

    def own(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows.append(len(ids))
        return scores + 1

    own.function_of_prefix = stated
    logits = torch.randn(2, V)
    prefix = partial(own)
    for processor, name in (
        (own, "function"),
        (Penalty(1.5), "Penalty"),
        (lp.PrefixConstrainedLogitsProcessor(lambda row, sent: [1], 1), "prefix_allowed_tokens_fn"),
        (prefix, "partial"),
    ):
        if stated and name in ("function", "Penalty"):
            make([processor]).apply(logits, prefix_of(1), 1)
        else:
            with pytest.raises(ValueError, match=f"^{name}: .*set its attribute function_of_pre"):
                take_apart([processor], True)
    assert rows == ([1, 1] if stated else [])


def synth_id() -> Any:
    return lp.SynthIDTextWatermarkLogitsProcessor(3, [1, 2], 16, 0, 8, torch.device("cpu"))


@pytest.mark.parametrize(
    ("processor", "text"),
    [
        (synth_id, "SynthIDTextWatermarkLogitsProcessor: .*earlier calls"),
        (lambda: lp.ClassifierFreeGuidanceLogitsProcessor(2.0), "ClassifierFreeGuidance.*mixes"),
        (
            lambda: lp.UnbatchedClassifierFreeGuidanceLogitsProcessor(2.0, None),
            "UnbatchedClassifierFreeGuidance.*guidance_scale",
        ),
        (
            lambda: lp.PrefixConstrainedLogitsProcessor(allowed, 2),
            "PrefixConstrainedLogitsProcessor: expected 1 beam, given 2",
        ),
        # A subclass of a refused processor is refused.
        (lambda: type("Mine", (lp.ClassifierFreeGuidanceLogitsProcessor,), {})(2.0), "Mine: "),
        (lambda: lambda input_ids, scores, beam_indices: scores, "function: .*beam_indices"),
        (lambda: 3, "expected callables, given int"),
    ],
)
def test_refused_by_name(processor: Callable[[], Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        take_apart([processor()], True)


@pytest.mark.parametrize(
    ("returned", "text"), [(None, "given NoneType"), (torch.zeros(V), r"given \[13\]")]
)
def test_what_is_no_row_of_scores(returned: Any, text: str) -> None:
    with pytest.raises(ValueError, match=r"function: .*shape \[1, 13\], " + text):
        make([function_of_prefix(lambda ids, scores: returned)]).apply(
            torch.randn(1, V), prefix_of(0), 0
        )


# ---- temperature and filters ---------------------------------------------------------------------

T, K, P, M = (
    lp.TemperatureLogitsWarper(0.7),
    lp.TopKLogitsWarper(5),
    lp.TopPLogitsWarper(0.8),
    lp.MinPLogitsWarper(0.1),
)
BAN, TYPICAL, NORM = (
    lp.SuppressTokensLogitsProcessor([2]),
    lp.TypicalLogitsWarper(0.9),
    lp.LogitNormalization(),
)


@pytest.mark.parametrize(
    ("given", "left", "sampling"),
    [
        ([], [], Sampling()),
        ([BAN, T, K, P, M], [BAN], Sampling(0.7, 5, 0.8, 0.1)),
        ([T, P, NORM], [], Sampling(0.7, 0, 0.8)),
        ([K, BAN, T], [K, BAN], Sampling(0.7)),
        ([T, K, TYPICAL], [T, K, TYPICAL], Sampling()),
        ([P, K], [P], Sampling(1.0, 5)),
        ([T, T], [T], Sampling(0.7)),
        ([T, lp.TopPLogitsWarper(0.8, min_tokens_to_keep=2)], None, Sampling()),
        ([T, lp.TopKLogitsWarper(5, filter_value=-9.0)], None, Sampling()),
        ([NORM, T], [NORM], Sampling(0.7)),
    ],
)
def test_what_the_operators_take_over(given, left, sampling) -> None:
    parts = take_apart(given, True)
    assert parts.processors == (given if left is None else left)
    assert parts.sampling == sampling
    assert parts.normalize == (bool(given) and given[-1] is NORM)
    assert take_apart(given, False).sampling.greedy
    greedy = [p for i, p in enumerate(given) if not (p is NORM and i == len(given) - 1)]
    assert take_apart(given, False).processors == greedy


@pytest.mark.parametrize(
    "warpers", [[T], [T, K], [T, P], [T, M], [K, P, M], [T, K, P, M], [T, K, P, M, NORM]]
)
def test_the_same_distribution_as_the_warpers(warpers: list[Any]) -> None:
    rows = 4 * torch.randn(64, V)
    expected = LogitsProcessorList(warpers)(torch.zeros(64, 1, dtype=torch.int64), rows)
    parts = take_apart(warpers, True)
    assert parts.processors == []
    shown = shown_scores(rows, parts)
    assert torch.equal(torch.isneginf(shown), torch.isneginf(expected))
    assert torch.allclose(shown.exp(), expected.exp(), rtol=1e-5)
    one = parts.sampling
    seen = set()
    for seed in range(20):
        s = ps.sample(rows, one.temperature, one.top_k, one.top_p, one.min_p, seed)
        distribution = expected.log_softmax(-1).gather(1, s.tokens[:, None])[:, 0]
        assert torch.allclose(s.logprobs, distribution, atol=1e-5)
        seen.update(zip(range(64), s.tokens.tolist(), strict=True))
    assert len(seen) > 64


def test_ties_at_the_edge_of_top_p_all_stay() -> None:
    """The one difference: transformers' warper keeps some of them."""
    row = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    kept = {}
    for name, scores in (
        ("ours", shown_scores(row, take_apart([lp.TopPLogitsWarper(0.6)], True))),
        ("theirs", lp.TopPLogitsWarper(0.6)(torch.zeros(1, 1), row)),
    ):
        kept[name] = int((~torch.isneginf(scores)).sum())
    assert kept == {"ours": 4, "theirs": 2}
    drawn = {int(ps.sample(row, top_p=0.6, seed=seed).tokens) for seed in range(100)}
    assert drawn == {0, 1, 2, 3}


def test_the_configuration_that_generate_reads() -> None:
    config = GenerationConfig(do_sample=True, temperature=0.5, top_k=3, top_p=0.9, min_p=0.01)
    config._eos_token_tensor = None
    model = llama(0, 1, 8)
    made = model._get_logits_processor(config, 1, logits_processor=LogitsProcessorList())
    assert take_apart(made, True) == ([], Sampling(0.5, 3, 0.9, 0.01), False)
