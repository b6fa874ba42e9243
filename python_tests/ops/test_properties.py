"""What holds for every input: shapes, strides, ties, one-hot rows, equal and disjoint
distributions, filters that keep one token, NaN, infinities and values out of range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import reference as ref
import torch
from draws import distributions_of, injected, tensor_of
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from reference import Sampling
from reference_rules import Distribution, pick, verify

import polyspec_ext as ps

settings.register_profile(
    "operators",
    max_examples=120,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
operators = settings.get_profile("operators")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = ("normal", "ties", "flat", "one_hot", "holes", "wide", "lone")
RELATIONS = ("close", "equal", "unrelated", "disjoint", "none")
BAD_VALUES = {torch.nan: ref.NAN, torch.inf: ref.INF, -torch.inf: ref.EMPTY_ROW}

temperatures = st.sampled_from([0.0, 1e-45, 1e-30, 0.01, 0.5, 1.0, 1.7, 100.0, 1e30])
samplings = st.builds(
    Sampling,
    temperatures,
    st.sampled_from([0, 1, 2, 5, 40, 2**40]),
    st.sampled_from([1.0, 0.999, 0.7, 0.2, 1e-30, 0.0]),
    st.sampled_from([0.0, 1e-40, 1e-3, 0.2, 0.999, 1.0]),
)


def make_row(kind: str, vocab: int, rng: np.random.Generator) -> np.ndarray:
    """One row of logits, all finite in float16 or -inf."""
    normal = rng.normal(0, 2, vocab)
    if kind == "ties":
        return rng.integers(-2, 3, vocab).astype(float)
    if kind == "flat":
        return np.full(vocab, rng.normal())
    if kind == "one_hot":
        return np.where(np.arange(vocab) == rng.integers(vocab), 500.0, -6e4)
    if kind == "holes":
        return np.where((rng.random(vocab) < 0.5) & (normal < normal.max()), -np.inf, normal)
    if kind == "wide":
        return normal * 1000
    if kind == "lone":
        return np.where(np.arange(vocab) == rng.integers(vocab), -0.0, -np.inf)
    return normal


def lay_out(rows: np.ndarray, dtype: torch.dtype, rng: np.random.Generator) -> torch.Tensor:
    """The rows [B, R, V] as a view with odd strides in a buffer full of NaN."""
    values = torch.from_numpy(rows).to(dtype)
    batch, count, vocab = rows.shape
    pad, head = (int(x) for x in rng.integers(0, 5, 2))
    order = (batch, count) if rng.random() < 0.5 else (count, batch)
    buffer = torch.full((*order, vocab + pad + head), torch.nan, dtype=dtype)
    view = buffer[..., head : head + vocab]
    if order != (batch, count) or (batch == count and rng.random() < 0.5):
        view = view.transpose(0, 1)
    view.copy_(values)
    return view


@dataclass
class Case:
    """One call of ps.verify whose every row has a distribution, with its draws and the reference's
    rows."""

    target: torch.Tensor
    draft: torch.Tensor | None
    tokens: torch.Tensor
    lengths: torch.Tensor
    draws: torch.Tensor
    sampling: Sampling
    rule: str
    p: list[list[Distribution]]
    q: list[list[Distribution]] | None

    def verify(self, **changes: Any) -> ps.VerifyResult:
        arguments: dict[str, Any] = {
            "target_logits": self.target,
            "draft_tokens": self.tokens,
            "draft_logits": self.draft,
            "draft_lengths": self.lengths,
            "draws": self.draws,
            "rule": self.rule,
            **self.sampling.kwargs(),
        }
        return ps.verify(**{**arguments, **changes})

    @property
    def shape(self) -> tuple[int, int, int]:
        batch, rows, vocab = self.target.shape
        return batch, rows - 1, vocab


@st.composite
def cases(draw: st.DrawFn, at_least: int = 0) -> Case:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    batch, k = draw(st.integers(1, 4)), draw(st.integers(at_least, 4))
    vocab = draw(st.sampled_from([1, 2, 3, 5, 16, 33, 70]))
    dtype, draft_dtype = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
    sampling, rule = draw(samplings), draw(st.sampled_from(["token", "block"]))
    relation = draw(st.sampled_from(RELATIONS))
    kinds = draw(st.lists(st.sampled_from(ROWS), min_size=2, max_size=2))
    target = np.stack([make_row(rng.choice(kinds), vocab, rng) for _ in range(batch * (k + 1))])
    target = target.reshape(batch, k + 1, vocab)
    above = target[:, :k]
    if relation == "equal":
        proposal = above
        draft_dtype = dtype
    elif relation == "close":
        proposal = above + 0.3 * rng.normal(size=above.shape)
    elif relation == "disjoint":
        proposal = np.where(above == above.max(-1, keepdims=True), -np.inf, 0.0)
        assume(bool((proposal.max(-1) == 0).all()))
    else:
        proposal = np.array(
            [make_row(draw(st.sampled_from(ROWS)), vocab, rng) for _ in range(batch * k)]
        )
        proposal = proposal.reshape(batch, k, vocab)
    logits, draft = lay_out(target, dtype, rng), lay_out(proposal, draft_dtype, rng)
    p = [distributions_of(rows, sampling) for rows in logits]
    q = [distributions_of(rows, sampling) for rows in draft]
    tokens = torch.from_numpy(rng.integers(0, vocab, (batch, k)))
    if relation != "none":  # a proposal with a distribution is drawn from it
        for b in range(batch):
            for i in range(k):
                tokens[b, i] = pick(q[b][i].masses, int(ref.random_bits((), rng)))
    bits = ref.random_bits((batch, k + 1), rng)
    bits[rng.random(bits.shape) < 0.1] = 0
    bits[rng.random(bits.shape) < 0.1] = ref.ALL_ONES
    lengths = torch.from_numpy(rng.integers(at_least, k + 1, batch))
    none = relation == "none"
    return Case(
        logits,
        None if none else draft,
        tokens,
        lengths,
        tensor_of(bits),
        sampling,
        rule,
        p,
        None if none else q,
    )


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@operators
@given(cases())
def test_every_verification(case: Case) -> None:
    batch, k, vocab = case.shape
    got = case.verify()
    assert got.tokens.shape == got.logprobs.shape == (batch, k + 1)
    assert not (got.status & (ref.ZERO_RESIDUAL - 1)).any()
    for b in range(batch):
        block = case.tokens[b, : int(case.lengths[b])].tolist()
        q = None if case.q is None else case.q[b]
        draw = injected(case.draws[b].numpy().view(np.uint64))
        tokens, logprobs = verify(case.p[b], block, q, draw, case.rule)
        n = len(tokens)
        assert got.tokens[b].tolist() == tokens + [-1] * (k + 1 - n)
        assert int(got.num_accepted[b]) == n - 1
        assert all(0 <= token < vocab for token in tokens)
        assert all(case.p[b][i].masses[token] > 0 for i, token in enumerate(tokens))
        assert got.logprobs[b, :n].tolist() == logprobs
        assert got.logprobs[b, n:].isnan().all()


@operators
@given(cases())
def test_a_verification_repeats_and_stands_alone(case: Case) -> None:
    got, again = case.verify(), case.verify()
    for first, second in zip(got, again, strict=True):
        same(first, second)
    for b in range(case.shape[0]):
        row = slice(b, b + 1)
        alone = case.verify(
            target_logits=case.target[row].clone(),
            draft_logits=None if case.draft is None else case.draft[row].clone(),
            draft_tokens=case.tokens[row],
            draft_lengths=case.lengths[row],
            draws=case.draws[row],
        )
        for a, part in zip(alone, got, strict=True):
            same(a[0], part[b])


@operators
@given(cases(), st.integers(0, 2**32))
def test_every_sample(case: Case, seed: int) -> None:
    logits = case.target[:, 0]
    drawn = ps.sample(logits, **case.sampling.kwargs(), draws=case.draws[:, :1])
    assert not drawn.status.any()
    for b, token in enumerate(drawn.tokens.tolist()):
        bits = int(case.draws[b].numpy().view(np.uint64)[0])
        assert token == pick(case.p[b][0].masses, bits)
    keyed = [ps.sample(logits, **case.sampling.kwargs(), seed=seed) for _ in range(2)]
    same(keyed[0].tokens, keyed[1].tokens)


@operators
@given(
    cases(at_least=1), st.sampled_from(list(BAD_VALUES)), st.booleans(), st.booleans(), st.data()
)
def test_a_bad_row_stops_its_request_alone(
    case: Case, value: float, in_draft: bool, whole: bool, data: st.DataObject
) -> None:
    batch, k, vocab = case.shape
    b = data.draw(st.integers(0, batch - 1))
    m = int(case.lengths[b])
    assume(not in_draft or case.draft is not None)
    i = data.draw(st.integers(0, m - 1 if in_draft else m))
    clean = case.verify()
    assume(not (clean.status & (ref.ZERO_RESIDUAL - 1)).any())
    side = case.draft if in_draft else case.target
    assert side is not None
    bad = side.clone()
    whole |= value == -torch.inf
    bad[b, i, slice(None) if whole else data.draw(st.integers(0, vocab - 1))] = value
    got = case.verify(**{"draft_logits" if in_draft else "target_logits": bad})
    others = torch.arange(batch) != b
    for x, y in zip(got, clean, strict=True):
        same(x[others], y[others])
    bit = BAD_VALUES[value] | (ref.DRAFT_ROW if in_draft else 0)
    greedy = case.sampling.temperature == 0
    by_token = greedy or case.rule == "token"
    if (in_draft and greedy) or (
        int(clean.num_accepted[b]) < i and (by_token or not got.status[b])
    ):
        for x, y in zip(got, clean, strict=True):  # the row was not needed
            same(x[b], y[b])
        return
    assert int(got.status[b]) == bit
    assert int(got.num_accepted[b]) == i
    stands = i if by_token else 0  # a block verified as a whole has no prefix that stands
    assert got.tokens[b].tolist() == case.tokens[b, :stands].tolist() + [-1] * (k + 1 - stands)
    assert got.logprobs[b, :stands].isfinite().all()
    assert got.logprobs[b, stands:].isnan().all()


@operators
@given(cases(at_least=1), st.sampled_from([-1, -(2**40), 0, 1, 2**31, 2**62]), st.data())
def test_a_token_out_of_range_stops_its_request(
    case: Case, token: int, data: st.DataObject
) -> None:
    batch, k, vocab = case.shape
    b = data.draw(st.integers(0, batch - 1))
    i = data.draw(st.integers(0, int(case.lengths[b]) - 1))
    clean = case.verify()
    assume(not (clean.status & (ref.ZERO_RESIDUAL - 1)).any())
    tokens = case.tokens.clone()
    tokens[b, i] = token if token < 0 else vocab + token
    got = case.verify(draft_tokens=tokens)
    if case.rule == "token" and int(clean.num_accepted[b]) < i:
        same(got.tokens, clean.tokens)
        return
    assert int(got.status[b]) & ref.TOKEN_OUT_OF_RANGE or case.rule == "block"
    assert (got.tokens < vocab).all()
    assert (got.tokens >= -1).all()
    if case.rule == "token":
        assert got.num_accepted[b] == i
        assert got.tokens[b, i:].tolist() == [-1] * (k + 1 - i)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("length", [-1, 4, 2**40])
def test_a_length_out_of_range(rule: str, length: int) -> None:
    logits = torch.zeros(2, 4, 9)
    lengths = torch.tensor([3, length])
    got = ps.verify(logits, torch.zeros(2, 3, dtype=torch.long), draft_lengths=lengths, rule=rule)
    assert got.status.tolist() == [0, ref.BAD_LENGTH]
    assert got.num_accepted[1] == 0
    assert got.tokens[1].tolist() == [-1] * 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", torch.nan),
        ("temperature", torch.inf),
        ("top_k", -1),
        ("top_p", 1.5),
        ("top_p", -0.5),
        ("top_p", torch.nan),
        ("min_p", 1.5),
        ("min_p", torch.nan),
        ("position", -1),
        ("round", -1),
        ("round", 2**32),
    ],
)
def test_a_parameter_out_of_range(name: str, value: float) -> None:
    good = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0}.get(name, 0)
    options: dict[str, Any] = {name: torch.tensor([good, value])}
    alone: dict[str, Any] = {name: value}
    drawn = ps.sample(torch.zeros(2, 9), **options)
    verified = ps.verify(torch.zeros(2, 2, 9), torch.zeros(2, 1, dtype=torch.long), **options)
    for got in (drawn, verified):
        assert got.status.tolist() == [0, ref.BAD_PARAMETER]
        assert (got.tokens[1] == -1).all()
        assert got.logprobs[1].isnan().all()
    with pytest.raises(ValueError, match=name):
        ps.sample(torch.zeros(2, 9), **alone)
