"""Inputs with a wanted acceptance rate.

Draft logits are normal with deviation 3 (a distribution with a head and a long tail); target logits
are the draft's plus noise whose size is found by bisection in every row, so that sum_x min(p(x),
q(x)), which is the probability that a token drawn from q is accepted against p, is what was asked.
Both are the processed distributions. Draft tokens are drawn from q anew for every repeat.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import polyspec_ext as ps
from benchmarks import rules
from benchmarks.grid import Case

SPREAD = 3.0  # deviation of the draft's logits
CALIBRATION_ELEMENTS = 1 << 22  # logits calibrated at a time
DRAWS = 64  # sets of draft tokens per case; repeats beyond them start over


@dataclass
class Feed:
    """Tensors of one case. ``load`` puts the next draw into the buffers that the calls read, so
    that a captured graph sees it too."""

    case: Case
    target: torch.Tensor  # [B, K+1, V]
    draft: torch.Tensor  # [B, K, V]
    statistics: torch.Tensor  # [B, K, 2], of the draft rows
    drawn: torch.Tensor  # [DRAWS, B, K]
    tokens: torch.Tensor  # [B, K], loaded
    seeds: torch.Tensor  # [B], loaded
    expected_acceptance: float
    seed: int

    def load(self, turn: int) -> None:
        """Draft tokens and seeds of a repeat, the same for everybody who takes part in it."""
        if self.tokens.numel():
            self.tokens.copy_(self.drawn[turn % len(self.drawn)])
        first = (self.seed << 40) + turn * self.case.batch
        self.seeds.copy_(torch.arange(first, first + self.case.batch, device=self.seeds.device))


def overlap(target: torch.Tensor, draft_distribution: torch.Tensor, case: Case) -> torch.Tensor:
    """sum_x min(p(x), q(x)) [n] for target logits and draft distributions [n, V]."""
    return torch.minimum(rules.processed(target, case.filters), draft_distribution).sum(-1)


def calibrated(draft: torch.Tensor, noise: torch.Tensor, case: Case) -> tuple[torch.Tensor, float]:
    """Target logits [n, V] for draft logits and noise [n, V], and the sum of the rows' acceptance.

    A row's acceptance falls from 1 at size 0; 14 halvings of [0, 16] find it to a thousandth.
    """
    draft_distribution = rules.processed(draft, case.filters)
    low = torch.zeros((len(draft), 1), device=draft.device)
    high = torch.full_like(low, 16.0)
    for _ in range(14):
        size = (low + high) / 2
        found = overlap(_shifted(draft, noise, size), draft_distribution, case)[:, None]
        low = torch.where(found > case.acceptance, size, low)
        high = torch.where(found > case.acceptance, high, size)
    target = _shifted(draft, noise, (low + high) / 2)
    return target, float(overlap(target, draft_distribution, case).sum())


def _shifted(draft: torch.Tensor, noise: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    return (draft + size * noise).to(draft.dtype)


def make(case: Case, device: str, seed: int, draws: int = DRAWS) -> Feed:
    """Inputs of a case. The drafts of sample's cases are empty."""
    b, k, v = case.batch, case.draft_len, case.vocab
    dtype: torch.dtype = getattr(torch, case.dtype)
    generator = torch.Generator(device).manual_seed(seed)

    def normal(rows: int) -> torch.Tensor:
        made = torch.empty((b, rows, v), dtype=dtype, device=device)
        return made.normal_(0.0, 1.0, generator=generator)

    draft, noise, last = normal(k).mul_(SPREAD), normal(k), normal(1).mul_(SPREAD)
    total, calibrations = 0.0, []
    step = max(1, CALIBRATION_ELEMENTS // v)
    pairs = zip(draft.flatten(0, 1).split(step), noise.flatten(0, 1).split(step), strict=True)
    for some, noises in pairs:
        rows, part = calibrated(some, noises, case)
        calibrations.append(rows)
        total += part
    target = torch.cat([torch.cat(calibrations).view_as(draft), last], 1)

    statistics = torch.zeros((b, k, 2), dtype=torch.int64, device=device)
    drawn = torch.zeros((draws, b, k), dtype=torch.int64, device=device)
    if k:
        positions = torch.arange(k, device=device).repeat(b)
        requests = torch.arange(b, device=device).repeat_interleave(k)
        for turn in range(draws):
            seeds = (seed << 40) + turn * b + requests
            drafted = ps.sample(
                draft.flatten(0, 1), **case.filters.given(), seed=seeds, position=positions, level=2
            )
            ps.raise_for_status(drafted.status, level=2, position=positions)
            drawn[turn] = drafted.tokens.view(b, k)
            statistics = drafted.statistics.view(b, k, 2)
    return Feed(
        case, target, draft, statistics, drawn, torch.zeros_like(drawn[0]),
        torch.zeros(b, dtype=torch.int64, device=device), total / max(b * k, 1), seed,
    )  # fmt: skip


def acceptance_rate(accepted: torch.Tensor, draft_len: int) -> float:
    """Acceptance per verified token from counts of the token rule: every block that did not stand
    whole had one rejection (papers: the maximum-likelihood estimate, not sum V / sum K)."""
    counts = accepted.double().flatten()
    rejected = (counts < draft_len).sum()
    return float(counts.sum() / (counts.sum() + rejected).clamp(min=1))


def measured_acceptance(feed: Feed, blocks: int = 200) -> tuple[float, int]:
    """Acceptance rate of ``ps.verify`` on the feed's own draws, and the blocks verified for it."""
    turns = max(1, min(len(feed.drawn), -(-blocks // feed.case.batch)))
    counts = []
    for turn in range(turns):
        feed.load(turn)
        r = ps.verify(
            feed.target, feed.tokens, feed.draft, draft_statistics=feed.statistics, seed=feed.seeds,
            **feed.case.filters.given(),
        )  # fmt: skip
        ps.raise_for_status(r.status, level=1, position=0)
        counts.append(r.num_accepted)
    accepted = torch.stack(counts)
    return acceptance_rate(accepted, feed.case.draft_len), accepted.numel()
