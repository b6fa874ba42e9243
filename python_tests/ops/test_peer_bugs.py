"""One test for every bug that other implementations shipped. Each says in a line what went wrong
there.

Elsewhere: caches that cannot be rolled back (sliding window, recurrent) are refused by name in
levels/test_hugging_face.py.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from typing import Any

import evidence
import numpy as np
import pytest
import reference as ref
import torch
from draws import distributions_of, injected, one_round, rows, tensor_of
from reference import Sampling
from reference_rules import pick, verify

import polyspec_ext as ps

RULES = ("token", "block")
MAP_NORESERVE = 0x4000  # Linux; the mmap module names it from Python 3.13 on
by_rule = pytest.mark.parametrize("rule", RULES)


def fixed(*draws: int) -> torch.Tensor:
    return tensor_of(np.asarray([draws], dtype=np.uint64))


@by_rule
def test_zero_residual(rule: str) -> None:
    # FlashInfer emitted uninitialised memory, transformers NaN: p ~ q, and u rounds to 1.
    vocab = 1000
    target = torch.zeros(1, 2, vocab)
    target[..., 7] = -20.0
    draft = target[:, :1].clone()
    draft[..., 7] = -20.0 + 1e-4  # a token of probability 2e-12: what is left rounds to nothing
    for last in (0, 2**63, ref.ALL_ONES):
        got = ps.verify(
            target, torch.tensor([[7]]), draft, rule=rule, draws=fixed(ref.ALL_ONES, last)
        )
        assert got.num_accepted.item() == 0
        assert got.status.item() == ref.ZERO_RESIDUAL
        distribution = ref.processed_distribution(target[0, 0].numpy())
        assert got.tokens.tolist() == [[pick(distribution.masses, last), -1]]
        assert got.logprobs[0, 0].isfinite()


@by_rule
def test_equal_distributions_accept_everything(rule: str) -> None:
    # The same corner, met with p = q bit for bit: the ratio is 1 and u < 1 always.
    logits = rows(3, 1, 5, 333)
    got = ps.verify(
        logits,
        torch.tensor([[5, 50, 200, 332]]),
        logits[:, :4],
        rule=rule,
        draws=fixed(*[ref.ALL_ONES] * 5),
    )
    assert got.num_accepted.item() == 4
    assert got.status.item() == 0


@by_rule
@pytest.mark.parametrize("filtered", [False, True])
def test_u_of_zero_accepts_no_impossible_token(rule: str, filtered: bool) -> None:
    # SGLang 35771, transformers: u <= p/q holds at u = 0 = p(y).
    target, draft = rows(4, 1, 2, 40), torch.zeros(1, 1, 40)
    options: dict[str, Any] = {}
    y = int(target[0, 0].argmin())
    if filtered:
        options = {"min_p": 0.5}
    else:
        target[0, 0, y] = -torch.inf
    for proposal in (draft, None):
        got = ps.verify(
            target, torch.tensor([[y]]), proposal, rule=rule, draws=fixed(0, 0), **options
        )
        assert got.num_accepted.item() == 0
        assert got.tokens[0, 0].item() not in (y, -1)
        assert got.status.item() == 0


def test_extreme_draws_emit_possible_tokens() -> None:
    # The same for the inverse CDF: r = 0 and r = total - 1 land on tokens with mass.
    logits = torch.full((1, 9), -torch.inf)
    logits[0, 3] = logits[0, 6] = 0.0
    for bits, token in ((0, 3), (2**63 - 1, 3), (2**63, 6), (ref.ALL_ONES, 6)):
        assert ps.sample(logits, draws=fixed(bits)).tokens.item() == token


@by_rule
@pytest.mark.parametrize(
    "sampling", [Sampling(0.5), Sampling(1.0, top_k=3), Sampling(1.0, top_p=0.7)], ids=str
)
def test_q_is_the_distribution_sampled_from(rule: str, sampling: Sampling) -> None:
    # transformers 47932 divided by the unprocessed q, vLLM 54282 shared noise: the distribution
    # drifts.
    assert one_round(17, 50_000, 4, 2, sampling, rule) > evidence.ALPHA


@by_rule
def test_distributions_handed_up_are_the_distributions_recomputed(rule: str) -> None:
    # The same bug by another road: scalars carried from the sampler that do not fit the row.
    options: dict[str, Any] = {"temperature": 0.8, "top_k": 30, "top_p": 0.95, "min_p": 0.01}
    draft, target = rows(1, 24, 3, 257), rows(2, 24, 4, 257)
    draft = target[:, :3] + 0.3 * draft
    drawn = [ps.sample(draft[:, i], **options, position=i, level=2, seed=8) for i in range(3)]
    tokens = torch.stack([d.tokens for d in drawn], 1)
    statistics = torch.stack([d.statistics for d in drawn], 1)
    with_statistics = ps.verify(
        target, tokens, draft, **options, rule=rule, seed=8, draft_statistics=statistics
    )
    without = ps.verify(target, tokens, draft, **options, rule=rule, seed=8)
    for a, b in zip(with_statistics, without, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    above = torch.stack([ps.sample(target[:, i], **options).statistics for i in range(4)], 1)
    for i, n in enumerate(without.num_accepted.tolist()):
        assert without.statistics[i, : n + 1].tolist() == above[i, : n + 1].tolist()


@by_rule
def test_draws_of_two_purposes_are_not_shared(rule: str) -> None:
    # vLLM 54282: the same uniform drafts and verifies. Here each purpose has its own Philox block.
    n, k = 64, 2
    seeds = np.arange(n)
    options: dict[str, Any] = {"seed": torch.arange(n), "position": 40, "round": 6, "level": 3}
    target, draft = rows(5, 1, k + 1, 29), rows(6, 1, k, 29)
    target, draft = target.expand(n, -1, -1), draft.expand(n, -1, -1)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 29, (n, k)))
    keyed = ps.verify(target, tokens, draft, rule=rule, **options)
    accept = [ref.draw_bits(seeds, 40 + i, 3, 6, ref.ACCEPT) for i in range(k)]
    at = 40 + keyed.num_accepted.numpy()  # the emitted token's own position
    draws = np.stack([*accept, ref.draw_bits(seeds, at, 3, 6, ref.EMIT)], 1)
    injected = ps.verify(target, tokens, draft, rule=rule, draws=tensor_of(draws))
    assert keyed.num_accepted.tolist() == injected.num_accepted.tolist()
    # Behind all draft tokens the last one is kEmit's; a correction is one of its tries'.
    whole = keyed.num_accepted == k
    assert keyed.tokens[whole].tolist() == injected.tokens[whole].tolist()
    assert whole.any()
    assert keyed.tokens[~whole].tolist() != injected.tokens[~whole].tolist()
    bits = ref.draw_bits(seeds, 40, 3, 6, ref.SAMPLE)[:, None]
    assert (
        ps.sample(target[:, 0], **options).tokens.tolist()
        == ps.sample(target[:, 0], draws=tensor_of(bits)).tokens.tolist()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_all_nan_row_emits_nothing(dtype: torch.dtype) -> None:
    # vLLM 53029, 50183: id == vocab_size came out and crashed later.
    logits = rows(1, 3, 50).to(dtype)
    logits[1] = torch.nan
    got = ps.sample(logits, seed=1)
    assert got.status.tolist() == [0, ref.NAN, 0]
    assert got.tokens[1].item() == -1
    assert got.logprobs.isnan().tolist() == [False, True, False]
    with pytest.raises(ps.RequestError) as caught:
        ps.raise_for_status(got.status, level=2, position=torch.tensor([5, 6, 7]))
    assert (caught.value.request, caught.value.level, caught.value.position) == (1, 2, 6)
    both = logits[None].expand(2, 3, 50)
    for rule in RULES:
        verified = ps.verify(both, torch.zeros(2, 2, dtype=torch.long), None, rule=rule)
        assert (verified.tokens < 50).all()
        assert (verified.tokens >= -1).all()


def sparse(elements: int) -> torch.Tensor:
    """A float16 tensor of zeros whose pages cost nothing until they are written to."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, 2 * elements, flags), dtype=torch.float16)


@pytest.mark.skipif(sys.platform != "linux", reason="needs unreserved memory")
@pytest.mark.parametrize("stride", [2**31 + 3, 2**32 + 5])
def test_offsets_past_32_bits(stride: int) -> None:
    # Everybody: B * (K + 1) * V >= 2^32 wraps. The rows lie one stride apart and differ, so an
    # offset that wraps finds another token.
    vocab = 33
    memory = sparse(2 * stride + vocab)
    for i, token in enumerate((10, 20, 30)):
        memory[i * stride + token] = 40.0
    by_request = memory.as_strided((3, vocab), (stride, 1))
    assert ps.sample(by_request).tokens.tolist() == [10, 20, 30]
    by_row = memory.as_strided((1, 3, vocab), (0, stride, 1))
    drafts = torch.tensor([[10, 20]])
    got = ps.verify(by_row, drafts, by_row[:, :2])
    assert got.tokens.tolist() == [[10, 20, 30]]
    got = ps.verify(by_row, drafts, None, rule="block", temperature=0.0)
    assert got.tokens.tolist() == [[10, 20, 30]]
    requests = by_request[:, None]
    got = ps.verify(requests.expand(3, 2, vocab), torch.tensor([[10], [20], [30]]), requests)
    assert got.tokens.tolist() == [[10, 10], [20, 20], [30, 30]]


def test_a_vocabulary_that_is_no_multiple_of_a_vector() -> None:
    # 50257: the tail of a row was dropped, or read past its end into the next row.
    for vocab in (50257, 50256, 17):
        for offset in range(3):
            memory = torch.full((offset + vocab + 64,), 1e4, dtype=torch.float16)
            row = memory[offset : offset + vocab]
            row.fill_(-40.0)
            row[-1] = 0.0
            got = ps.sample(row[None].expand(2, vocab), seed=torch.tensor([1, 2]))
            assert got.tokens.tolist() == [vocab - 1] * 2
            greedy = ps.sample(row[None], temperature=0.0)
            assert greedy.tokens.item() == vocab - 1


@by_rule
def test_a_draft_vocabulary_smaller_or_mapped(rule: str) -> None:
    # xLLM 2175: target ids indexed the draft's row. Here by ids that the draft does not have.
    vocab, known = 64, [5, 9, 33, 60]
    target = rows(2, 1, 2, vocab)
    draft = rows(3, 1, 1, len(known))
    mapped = torch.full((vocab,), -1)
    mapped[known] = torch.arange(len(known))
    p, q = distributions_of(target[0], Sampling()), distributions_of(draft[0], Sampling())
    rng = np.random.default_rng(5)
    for y in known:
        bits = ref.random_bits((200, 2), rng)
        got = ps.verify(
            target.expand(200, -1, -1),
            torch.full((200, 1), y),
            draft.expand(200, -1, -1),
            target_to_draft=mapped,
            rule=rule,
            draws=tensor_of(bits),
        )
        want = [verify(p, [y], q, injected(row), rule, mapped.tolist())[0] for row in bits]
        assert [[t for t in row if t >= 0] for row in got.tokens.tolist()] == want
    unknown = ps.verify(target, torch.tensor([[6]]), draft, target_to_draft=mapped, rule=rule)
    assert unknown.status.tolist() == [ref.DRAFT_STATISTICS_MISMATCH]
    with pytest.raises(ValueError, match="65"):
        ps.verify(target, torch.tensor([[6]]), torch.zeros(1, 1, 65))


def test_seeds_are_per_request() -> None:
    # FlashInfer 4861, vLLM 6038: the first request's seed drew for all.
    logits = rows(9, 1, 4096)
    seeds = torch.tensor([11, 22, 33, 11, 2**62])
    got = ps.sample(logits.expand(5, -1) / 3, seed=seeds).tokens.tolist()
    assert got == [ps.sample(logits / 3, seed=int(s)).tokens.item() for s in seeds]
    assert got[0] == got[3]
    assert len(set(got)) == 4
    for key in ("position", "round", "level", "seed"):
        keys: list[dict[str, Any]] = [{key: i} for i in range(1, 9)]
        drawn = {ps.sample(logits / 3, **k).tokens.item() for k in keys}
        assert len(drawn) >= 7, key


@by_rule
def test_a_request_does_not_depend_on_its_batch(rule: str) -> None:
    # vLLM 52522: a request's tokens change with its neighbours.
    n, k, vocab = 37, 4, 1003
    rng = np.random.default_rng(2)
    target = rows(1, n, k + 1, vocab)
    draft = target[:, :k] + 0.3 * rows(2, n, k, vocab)
    tokens = ps.sample(draft.reshape(-1, vocab), seed=torch.arange(n * k)).tokens.reshape(n, k)
    each: dict[str, Any] = {
        "temperature": torch.from_numpy(rng.uniform(0, 2, n)) * (torch.arange(n) % 5 > 0),
        "top_k": torch.from_numpy(rng.integers(0, 40, n)),
        "top_p": torch.from_numpy(rng.uniform(0.3, 1, n)),
        "min_p": torch.from_numpy(rng.uniform(0, 0.1, n)),
        "seed": torch.from_numpy(rng.integers(0, 2**63, n)),
        "position": torch.from_numpy(rng.integers(0, 2**40, n)),
        "round": torch.from_numpy(rng.integers(0, 2**32, n)),
        "draft_lengths": torch.from_numpy(rng.integers(0, k + 1, n)),
    }
    whole = ps.verify(target, tokens, draft, rule=rule, **each)
    for b in range(n):
        alone: dict[str, Any] = {name: value[b : b + 1] for name, value in each.items()}
        one = ps.verify(target[b : b + 1], tokens[b : b + 1], draft[b : b + 1], rule=rule, **alone)
        for a, part in zip(one, whole, strict=True):
            torch.testing.assert_close(a[0], part[b], rtol=0, atol=0, equal_nan=True)


RANK = """
import sys, torch, polyspec_ext as ps
torch.set_num_threads(int(sys.argv[1]))
g = torch.Generator().manual_seed(0)
t, d = torch.randn(6, 4, 50257, generator=g), torch.randn(6, 3, 50257, generator=g)
distribution = {"temperature": 0.9, "top_k": 100, "top_p": 0.9, "min_p": 0.01}
q = ps.sample(d.flatten(0, 1), **distribution, seed=torch.arange(18), level=2).tokens.view(6, 3)
for rule in ("token", "block"):
    r = ps.verify(t, q, d, **distribution, seed=torch.arange(6), rule=rule)
    print(q.tolist(), [x.tolist() for x in r])
"""


def test_ranks_agree() -> None:
    # SGLang 31071: tensor-parallel ranks drew apart and hung. Two processes with unlike threads and
    # instruction sets.
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, threads],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **isa},
        )
        for threads, isa in (("1", {"POLYSPEC_CPU_ISA": "baseline"}), ("2", {}))
    ]
    first, second = (rank.communicate(timeout=300)[0] for rank in ranks)
    assert first == second
    assert len(first) > 100


@by_rule
@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p", "temperature"])
def test_filters_apply_to_both_sides(rule: str, name: str) -> None:
    # vLLM 42744: only the target was filtered. With one row for both, p = q after any filter.
    values: dict[str, Any] = {"top_k": 4, "top_p": 0.6, "min_p": 0.2, "temperature": 0.3}
    only: dict[str, Any] = {name: values[name]}
    logits = rows(6, 1, 1, 80)
    drawn = ps.sample(logits[:, 0], **only, draws=fixed(2**62))
    got = ps.verify(
        logits.expand(1, 2, 80),
        drawn.tokens[:, None],
        logits,
        rule=rule,
        draws=fixed(ref.ALL_ONES, 0),
        **only,
    )
    assert got.num_accepted.item() == 1
    outside = int(logits.argmin())
    if name != "temperature":  # a token that the draft's own filter removes was not sampled
        wrong = ps.verify(logits.expand(1, 2, 80), torch.tensor([[outside]]), logits, **only)
        assert wrong.status.item() == ref.DRAFT_STATISTICS_MISMATCH


def test_the_scan_is_monotone_and_deterministic() -> None:
    # FlashInfer 225, 417: a parallel float scan was neither, and tokens of mass 0 came out.
    vocab = 20_011
    logits = rows(3, 1, vocab)
    logits[0, ::3] = -torch.inf
    bits = ref.stratified_bits(256, np.random.default_rng(0))
    draws = tensor_of(bits[:, None])
    tokens = ps.sample(logits.expand(256, -1), draws=draws).tokens
    assert (tokens.diff() >= 0).all()
    assert (tokens % 3 != 0).all()
    for _ in range(3):
        assert torch.equal(ps.sample(logits.expand(256, -1), draws=draws).tokens, tokens)


def test_a_leak_of_a_tenth_is_seen() -> None:
    # FlashInfer's frequency tests ask for a cosine > 0.99, which such a leak passes.
    rng = np.random.default_rng(1)
    p, q = rng.dirichlet(np.ones(30), 2)
    leaky = 0.9 * p + 0.1 * q
    counts = rng.multinomial(100_000, leaky)
    assert counts @ p / np.linalg.norm(counts) / np.linalg.norm(p) > 0.99
    assert evidence.chi_square(counts, p) < evidence.ALPHA
    assert evidence.chi_square(rng.multinomial(100_000, p), p) > evidence.ALPHA


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_lowest_id_of_a_tie(dtype: torch.dtype) -> None:
    # llama.cpp 25618 found ties broken by the kernel: here by the id, in every path.
    logits = torch.zeros(1, 3, 700, dtype=dtype)
    logits[0, 0, [400, 30, 650]] = 2.5
    logits[0, 1, 5] = -0.0
    logits[0, 2, 699] = 1.0
    assert ps.sample(logits[0], temperature=0.0).tokens.tolist() == [30, 0, 699]
    for rule in RULES:
        for draft in (None, torch.full((1, 2, 700), torch.nan)):
            got = ps.verify(logits, torch.tensor([[30, 0]]), draft, temperature=0.0, rule=rule)
            assert got.tokens.tolist() == [[30, 0, 699]]
            assert got.logprobs.tolist() == [[0.0, 0.0, 0.0]]
            got = ps.verify(logits, torch.tensor([[400, 0]]), draft, temperature=0.0, rule=rule)
            assert got.tokens.tolist() == [[30, -1, -1]]
