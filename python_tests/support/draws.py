"""Logits and draws of a test's own for ps.sample and ps.verify, and rounds over many seeds."""

from __future__ import annotations

import itertools
from typing import Any

import evidence
import numpy as np
import reference as ref
import torch
from reference import Sampling, Words
from reference_rules import ACCEPT, TRY, Distribution, Draw, distribution

import polyspec_ext as ps


def tensor_of(bits: Words) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(bits).view(np.int64))


def rows(seed: int, *shape: int) -> torch.Tensor:
    """Random logits, with the long rows as peaked as a language model's."""
    scale = 2.5 if shape[-1] < 2000 else 4.0
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def distributions_of(logits: torch.Tensor, sampling: Sampling) -> list[Distribution]:
    return [distribution(row, **sampling.kwargs()) for row in logits.float().numpy()]


def injected(bits: Words) -> Draw:
    """Draws of the test's own as `draws` has them: K acceptance tests, then the emitted token; a
    correction is not tried by rejection."""
    return lambda offset, purpose, node=0: (
        None if purpose == TRY else int(bits[offset if purpose == ACCEPT else -1])
    )


def one_round(
    seed: int, n: int, vocab: int, k: int, sampling: Sampling, rule: str, *, leak: float = 0.0
) -> float:
    """p-value of the first k+1 tokens of n requests: drafted, verified, and completed from p.

    leak: share of the requests that take the draft's tokens unverified (a wrong sampler).
    """
    rng = np.random.default_rng(seed)
    p, q = (evidence.markov_rows(rng, vocab, k + 1, 1.3) for _ in range(2))

    def logits(table: dict[tuple[int, ...], np.ndarray], prefix: torch.Tensor) -> torch.Tensor:
        depth = prefix.shape[1]
        rows_ = [table[t] for t in itertools.product(range(vocab), repeat=depth)]
        index = sum((prefix[:, i] * vocab ** (depth - 1 - i) for i in range(depth)), torch.zeros(n))
        return torch.tensor(np.stack(rows_), dtype=torch.float32)[index.long()]

    options: dict[str, Any] = {**sampling.kwargs(), "seed": torch.arange(n)}
    drafts = torch.zeros(n, 0, dtype=torch.int64)
    target_rows, draft_rows, statistics = [], [], []
    for i in range(k):
        target_rows.append(logits(p, drafts))
        draft_rows.append(logits(q, drafts))
        drawn = ps.sample(draft_rows[-1], **options, position=5 + i, level=2)
        statistics.append(drawn.statistics)
        drafts = torch.cat([drafts, drawn.tokens[:, None]], 1)
    target_rows.append(logits(p, drafts))
    got = ps.verify(
        torch.stack(target_rows, 1),
        drafts,
        torch.stack(draft_rows, 1),
        **options,
        position=5,
        rule=rule,
        draft_statistics=torch.stack(statistics, 1),
    )
    assert not got.status.any()
    out, have = got.tokens, got.num_accepted + 1
    leaks = torch.arange(n) < leak * n
    out[leaks, :k], have[leaks] = drafts[leaks], k
    for i in range(1, k + 1):
        more = ps.sample(logits(p, out[:, :i]), **options, position=5 + i, round=1)
        out[:, i] = torch.where(have > i, out[:, i], more.tokens)
    distribution = evidence.target_distribution(
        lambda prefix: ref.processed_distribution(p[prefix].astype(np.float32), sampling).probs,
        vocab,
        k,
    )
    counts = np.zeros(distribution.shape)
    np.add.at(counts, tuple(out.numpy().T), 1)
    return evidence.chi_square(counts, distribution)
