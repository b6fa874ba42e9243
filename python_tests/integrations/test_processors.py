"""Processors in front of the distribution: what transformers' list does, position by position."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy
import pytest
import torch
from small_models import llama
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import logits_process as lp

import polyspec_ext as ps
from polyspec_ext.integrations.processors import (
    REFUSED_PROCESSORS,
    TransformersProcessors,
    require_applicable,
    shown_scores,
    take_apart,
)
from polyspec_ext.sampling import Sampling

V, PAD = 13, 0
PROMPTS = [[PAD, PAD, 3, 4, 3], [5, 6, 5, 6, 5]]  # left-padded
PADDING = [2, 0]
NEW = [[4, 3, 4], [6, 5, 6]]


def make(processors: list[Any], **options: Any) -> TransformersProcessors:
    return TransformersProcessors(
        processors,
        **{
            "vocab_size": V,
            "padding": [torch.tensor(p[:n]) for p, n in zip(PROMPTS, PADDING, strict=True)],
            "prompts": [3, 5],
            "eos": [frozenset({1})] * 2,
            "committed": [99, 99],
            **options,
        },
    )


def prefix_of(row: int) -> torch.Tensor:
    return torch.tensor(PROMPTS[row][PADDING[row] :] + NEW[row])


def allowed(row: int, sent: torch.Tensor) -> list[int]:
    assert sent[0] == PROMPTS[row][0]
    return [row, int(sent[-1]), 7]


def biased(rows: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A processor of one's own that depends on the row's number and writes in place."""

    def processor(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert len(scores) == rows
        for row in range(rows):
            scores[row, row + 2] += 3 + input_ids.shape[1]
        return scores

    return processor


IGNORED = torch.tensor(PADDING)
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
    "own": lambda: [biased(2)],
    "several": lambda: [
        lp.RepetitionPenaltyLogitsProcessor(1.7),
        lp.NoRepeatNGramLogitsProcessor(2),
        lp.TemperatureLogitsWarper(0.7),
        lp.TopPLogitsWarper(0.8),
        biased(2),
        lp.TypicalLogitsWarper(0.9),
        lp.LogitNormalization(),
    ],
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_position_gets_what_generate_would_give_it(name: str, dtype: torch.dtype) -> None:
    """Several positions at once against transformers' list step by step."""
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
    """Refused ones are listed with a reason, all others compared."""
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
    ids = torch.tensor([[3, 4, 5, 6]])
    logits = torch.randn(3, 50)
    processor = lp.WatermarkLogitsProcessor(50, "cpu", seeding_scheme="selfhash", context_width=2)
    ours = TransformersProcessors(
        [processor],
        vocab_size=50,
        padding=[ids[0, :0]],
        prompts=[2],
        eos=[frozenset()],
        committed=[99],
    )
    got = ours.apply(logits, ids[0], 0)
    for i in range(3):
        expected = processor(ids[:, : 2 + i], logits[i : i + 1])
        assert not torch.equal(expected, logits[i : i + 1])
        assert torch.equal(got[i : i + 1], expected)


def test_padding_is_ignored_where_generate_ignores_it() -> None:
    """The repetition penalty of a padded batch comes with one length per row."""
    kinds = lp.RepetitionPenaltyLogitsProcessor.__init__.__annotations__
    if "Tensor" not in str(kinds.get("prompt_ignore_length")):
        pytest.skip("this release of transformers penalises padding")
    processor = lp.RepetitionPenaltyLogitsProcessor(2.0, prompt_ignore_length=IGNORED)
    logits = torch.ones(4, V)
    assert make([processor]).apply(logits, prefix_of(0), 0)[0].tolist().count(0.5) == 2  # 3 and 4
    assert float(make([processor]).apply(logits, prefix_of(0), 0)[0, PAD]) == 1.0
    plain = lp.RepetitionPenaltyLogitsProcessor(2.0)
    assert float(make([plain]).apply(logits, prefix_of(0), 0)[0, PAD]) == 0.5


def test_the_logits_stay_as_they_are() -> None:
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
    """A bias on a token that the draft does not have, and a first call from the draft."""
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
    """Forced to a token that it does not have, or (beyond what is committed) to none at all."""

    def nothing(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -math.inf)

    only = lp.PrefixConstrainedLogitsProcessor(lambda _, sent: [V - 1], 1)
    logits = torch.randn(1, width)
    processor = only if width < V else nothing
    out = make([processor], committed=[3, 5]).apply(logits, prefix_of(1)[:6], 1)
    assert torch.equal(out, logits)
    if width == V:  # the target's own position: no distribution, which the operators report
        out = make([processor], committed=[3, 5]).apply(logits, prefix_of(1)[:5], 1)
        assert torch.isneginf(out).all()


def failing(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Knows texts up to seven tokens, padding included."""
    if input_ids.shape[1] > 7:
        raise KeyError("no such text")
    return scores + 1


@pytest.mark.parametrize(
    ("committed", "first", "raises"), [([3, 5], 5, True), ([3, 5], 6, False), ([3, 6], 6, True)]
)
def test_a_failure_on_a_drafted_text(committed: list[int], first: int, raises: bool) -> None:
    """A draft level goes on with its own logits; the target's own block fails with a note."""
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
    """Behind an EOS, or a token that the processors themselves have ruled out."""

    def never_six(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.tensor(6), -math.inf)

    logits = torch.randn(4, V)
    processors = [failing, never_six] if why == "ruled out" else [failing]
    eos = [frozenset({6} if why == "eos" else {1})] * 2
    out = make(processors, committed=[3, 5], eos=eos).apply(logits, prefix_of(1), 1)
    assert torch.equal(out[3], logits[3])
    assert torch.equal(out[2, :6], logits[2, :6] + 1)
    with pytest.raises(KeyError):
        make([failing], committed=[3, 5]).apply(logits, prefix_of(1), 1)


# ---- what cannot be applied ----------------------------------------------------------------------


CALLS = 0


class Counting:
    """Counts its calls in a `state` of any kind, by `count`."""

    shared: ClassVar[list[int]] = [0]
    __slots__ = ("__dict__", "count", "slot", "state")

    def __init__(self, state: Any, count: Callable[[Any], Any]) -> None:
        self.state, self.count, self.slot = state, count, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.count(self)
        return scores


def add(owner: Any, key: Any = 0) -> None:
    owner[key] = owner[key] + 1


def of_function(function: Callable[[], Any]) -> Callable[[Any, Any], Any]:
    def processor(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        function()
        return scores

    return processor


def closure() -> Any:
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1

    return of_function(count)


def count_globally(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    global CALLS
    CALLS += 1
    return scores


def count_in_default(ids: Any, scores: torch.Tensor, calls: Any = SimpleNamespace(n=0)) -> Any:  # noqa: B008
    calls.n += 1
    return scores


def numbers() -> Any:
    number = 0
    while True:
        yield number
        number += 1


def held(state: Any, count: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: Counting(state, lambda self: count(self.state))


# Processors whose state follows their calls, with the path at which that shows.
STATEFUL: dict[str, tuple[Callable[[], Any], str]] = {
    "int": (lambda: Counting(0, lambda own: setattr(own, "state", own.state + 1)), "state"),
    "list": (held([0], add), "state[0]"),
    "longer list": (held([], lambda state: state.append(1)), "state[1]"),
    "dict": (held({0: 0}, add), "state{0}"),
    "set": (held({1}, lambda state: state.add(len(state) + 1)), "state{3}"),
    "tensor": (held(torch.zeros(3), add), "state"),
    "bfloat16": (held(torch.zeros(1, dtype=torch.bfloat16), add), "state"),
    "array": (held(numpy.zeros(2), add), "state"),
    "nested": (held([({"a": deque([0])},)], lambda state: add(state[0][0]["a"])), "state"),
    "module": (held(torch.nn.BatchNorm1d(1), lambda m: m.running_mean.add_(1)), "state"),
    "object": (held(SimpleNamespace(n=0), lambda state: add(vars(state), "n")), "state.n"),
    "slot": (lambda: Counting(0, lambda own: setattr(own, "slot", own.slot + 1)), "slot"),
    "class": (lambda: Counting(0, lambda own: add(type(own).shared)), "shared[0]"),
    "itself": (held(recursive := [0], lambda _: add(recursive)), "state[0]"),
    "closure": (closure, "function.calls"),
    "list in a closure": (lambda: of_function(partial(add, [0])), "function.args[0][0]"),
    "method": (lambda: of_function(Holder().count), ""),
    "global": (lambda: count_globally, "CALLS"),
    "default": (lambda: count_in_default, "__defaults__[0].n"),
    "partial": (
        lambda: partial(count_in_default, calls=SimpleNamespace(n=0)),
        "keywords{'calls'}.n",
    ),
    "counter": (held(itertools.count(), next), "state"),
    "iterator": (held(iter(range(9)), next), "state"),
    "generator": (held(numbers(), next), "state.numbe"),
    "random": (held(random.Random(0), lambda state: state.random()), "state"),
    "torch's random": (held(torch.Generator(), lambda g: torch.rand(1, generator=g)), "state"),
    "numpy's random": (held(numpy.random.default_rng(0), lambda g: g.random()), "state"),
    "allowed": (
        lambda: lp.PrefixConstrainedLogitsProcessor(Holder().allowed, 1),
        "_prefix_allowed_tokens_fn",
    ),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_a_state_that_follows_the_calls_is_refused(name: str) -> None:
    build, path = STATEFUL[name]
    processor = build()
    with pytest.raises(ValueError, match=re.escape(f"every call changes its state {path}")):
        make([processor]).apply(torch.randn(2, V), prefix_of(1), 1)


def test_scores_that_follow_the_calls_are_refused() -> None:
    """By a state that Python does not see."""
    with pytest.raises(ValueError, match=r"function: .*called again, it returned other scores"):
        make([lambda ids, scores: scores + torch.rand(1)]).apply(torch.randn(2, V), prefix_of(1), 1)


@pytest.mark.parametrize("state", [[0], {5: 0}, {0}])
def test_a_state_that_begins_later_is_refused(state: Any) -> None:
    """Behind a token that the prompt lacks; the end of a call asks as well."""
    path = {list: "state[0]", dict: "state{5}", set: "state{1}"}[type(state)]

    def thinking(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if 4 in ids[0, 6:]:
            state.add(1) if isinstance(state, set) else add(state, 5 if 5 in state else 0)
        return scores

    ours = make([thinking])

    def call() -> None:
        for end in range(4, 7):
            ours.apply(torch.randn(1, V), prefix_of(0)[:end], 0)
        ours.require_unchanged()

    with pytest.raises(ValueError, match=re.escape(f"its calls have changed its state {path}.")):
        call()


class Holder:
    n = 0

    def count(self) -> None:
        self.n += 1

    def allowed(self, row: int, sent: torch.Tensor) -> list[int]:
        self.n += 1
        return [1]


def test_what_is_no_state() -> None:
    """A memo of results, what the first call makes, what each makes anew, and not a number."""

    class Grammar:
        def __init__(self) -> None:
            self.memo: dict[Any, list[int]] = {}
            self.known: set[str] = set()
            self.mask: torch.Tensor | None = None
            self.limit, self.me = math.nan, self

        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if self.mask is None:
                self.mask = torch.zeros(scores.shape[1])
            self.scratch = [torch.full((2,), math.nan)]
            self.limit = float("nan")
            self.memo.setdefault(tuple(ids[0].tolist()), [*ids[0].tolist()])
            self.known.add(str(ids.tolist()))
            return scores + self.mask

    ours = make([Grammar(), lp.WatermarkLogitsProcessor(V, "cpu", context_width=2)])
    for end in range(3, 7):
        for row in range(2):
            ours.apply(torch.randn(2, V), prefix_of(row)[:end], row)
    ours.require_unchanged()


def test_what_is_said_to_be_a_function_of_the_prefix() -> None:
    """It may keep state, and is called with one row: a batch costs what its rows cost."""
    rows = []

    def vouched(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows.append(len(ids))
        return scores + 1

    vouched.function_of_prefix = True  # type: ignore[attr-defined]
    logits = torch.randn(2, V)
    assert torch.equal(make([vouched]).apply(logits, prefix_of(1), 1), logits + 1)
    assert rows == [1, 1]


def test_an_exception_of_the_second_call_is_passed_on() -> None:
    calls: list[int] = []

    def fragile(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 1:
            raise KeyError("one text only")
        return scores

    with pytest.raises(KeyError, match="one text only") as error:
        make([fragile]).apply(torch.randn(2, V), prefix_of(1), 1)
    assert error.value.__notes__[1].startswith("called again with the same arguments")


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
    ],
)
def test_refused_by_name(processor: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        require_applicable(processor())
    with pytest.raises(ValueError, match=text):
        take_apart([processor()], True)
    with pytest.raises(ValueError, match=text):
        make([processor()])


def test_a_subclass_of_what_is_refused_is_refused() -> None:
    class Mine(lp.ClassifierFreeGuidanceLogitsProcessor):
        pass

    with pytest.raises(ValueError, match="Mine: "):
        require_applicable(Mine(2.0))


def test_more_arguments_than_prefix_and_scores() -> None:
    def beams(input_ids: Any, scores: Any, beam_indices: Any) -> Any:
        return scores

    with pytest.raises(TypeError, match=r"function: .*beam_indices"):
        require_applicable(beams)
    with pytest.raises(TypeError, match="expected callables, given int"):
        require_applicable(3)
    require_applicable(lambda input_ids, scores, extra=None, **more: scores)


@pytest.mark.parametrize(
    ("returned", "text"), [(None, "given NoneType"), (torch.zeros(V), r"given \[13\]")]
)
def test_what_is_no_row_of_scores(returned: Any, text: str) -> None:
    with pytest.raises(ValueError, match=r"function: .*shape \[2, 13\], " + text):
        make([lambda input_ids, scores: returned]).apply(torch.randn(1, V), prefix_of(0), 0)


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
    """On rows without ties: the operators, the scores shown, and transformers' scores."""
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
    """Guards the assumption about the warpers' names in a list made by `generate`."""
    config = GenerationConfig(do_sample=True, temperature=0.5, top_k=3, top_p=0.9, min_p=0.01)
    config._eos_token_tensor = None
    model = llama(0, 1, 8)
    made = model._get_logits_processor(config, 1, logits_processor=LogitsProcessorList())
    assert take_apart(made, True) == ([], Sampling(0.5, 3, 0.9, 0.01), False)
