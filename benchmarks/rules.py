"""The operators in plain torch, to measure against: batched, without host synchronisation."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

Verified = tuple[torch.Tensor, torch.Tensor]  # tokens [B, K+1] padded with -1, num_accepted [B]


@dataclass(frozen=True)
class Filters:
    """Sampling filters; the defaults are off."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Filters:
        """Read ``"none"`` or ``"top_k=50+top_p=.9"``."""
        if text == "none":
            return cls()
        values: dict[str, Any] = {}
        for part in text.split("+"):
            name, _, value = part.partition("=")
            try:
                values[name] = int(value) if name == "top_k" else float(value)
            except ValueError:
                raise ValueError(f"--filters: expected a number in {part!r}") from None
        if not values.keys() <= {"top_k", "top_p", "min_p"}:
            raise ValueError(f"--filters: expected top_k, top_p, min_p or none, given {text!r}")
        filters = cls(**values)
        if filters.top_k < 0 or not 0 <= filters.top_p <= 1 or not 0 <= filters.min_p <= 1:
            raise ValueError(f"--filters: out of range: {text!r}")
        return filters

    def options(self) -> dict[str, Any]:
        """Return the active filters as keyword arguments of ``ps.sample`` and ``ps.verify``."""
        off = asdict(Filters())
        return {name: value for name, value in asdict(self).items() if value != off[name]}

    def __str__(self) -> str:
        return "+".join(f"{name}={value:g}" for name, value in self.options().items()) or "none"


@dataclass
class Block:
    """Logits and draft tokens of one call."""

    target: torch.Tensor  # [B, K+1, V]
    tokens: torch.Tensor  # [B, K]
    draft: torch.Tensor  # [B, K, V]
    filters: Filters


def processed(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Return the distribution [..., V] fp32 of logits [..., V] after top-k, then top-p, then min-p.

    Only the threshold is computed, so a top-k needs no sort of the whole row.
    """
    z = logits.float()
    if filters == Filters():
        return z.softmax(-1)
    k = filters.top_k if 0 < filters.top_k < z.shape[-1] else z.shape[-1]
    if k < z.shape[-1]:
        kept = z.topk(k).values
    elif filters.top_p < 1:
        kept = z.sort(descending=True).values
    else:
        kept = z.amax(-1, keepdim=True)
    last = kept[..., -1:]
    if filters.top_p < 1:
        probs = kept.softmax(-1)
        in_nucleus = (probs.cumsum(-1) - probs < filters.top_p).sum(-1, keepdim=True)
        last = kept.gather(-1, (in_nucleus - 1).clamp(min=0))
    elif k == z.shape[-1]:
        last = torch.full_like(last, -math.inf)
    if filters.min_p > 0:
        last = torch.maximum(last, kept[..., :1] + math.log(filters.min_p))
    return z.masked_fill(z < last, -math.inf).softmax(-1)


def draw(weights: torch.Tensor) -> torch.Tensor:
    """Draw an index [...] per row of non-negative weights [..., V] by an exponential race."""
    return (weights / torch.empty_like(weights).exponential_()).argmax(-1)


def sample(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Draw tokens [B] from the processed distribution of logits [B, V]."""
    return draw(processed(logits, filters))


def sort_sample(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Sort each row, cut the sorted distribution and draw a rank."""
    z, ids = logits.float().sort(descending=True)
    if filters.top_k:
        z[..., filters.top_k :] = -math.inf
    probs = z.softmax(-1)
    probs = probs.masked_fill(probs.cumsum(-1) - probs >= filters.top_p, 0.0)
    if filters.min_p:
        probs = probs.masked_fill(probs < filters.min_p * probs[..., :1], 0.0)
    return ids.gather(-1, torch.multinomial(probs, 1)).squeeze(-1)


def _distributions(block: Block) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    p, q = processed(block.target, block.filters), processed(block.draft, block.filters)
    y = block.tokens[..., None]
    return p, q, (p[:, :-1].gather(-1, y) / q.gather(-1, y)).squeeze(-1)


def _finish(
    block: Block, p: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, accepted: torch.Tensor
) -> Verified:
    """Draw the last token from (scale p - q)+, q = 0 after all K tokens, and emit the block."""
    requests = torch.arange(len(accepted), device=accepted.device)
    k = q.shape[1]
    below = q[requests, accepted.clamp(max=k - 1)].masked_fill((accepted == k)[:, None], 0.0)
    last = draw((scale * p[requests, accepted] - below).clamp(min=0))
    column = torch.arange(k + 1, device=last.device)
    tokens = torch.nn.functional.pad(block.tokens, (0, 1))
    tokens = torch.where(column < accepted[:, None], tokens, -1)
    return torch.where(column == accepted[:, None], last[:, None], tokens), accepted


def token_rule(block: Block) -> Verified:
    """Verify by Leviathan et al. 2023, algorithm 1; K >= 1."""
    p, q, ratio = _distributions(block)
    accepted = (torch.rand_like(ratio) < ratio).long().cumprod(-1).sum(-1)
    return _finish(block, p, q, torch.ones_like(ratio[:, :1]), accepted)


def block_rule(block: Block) -> Verified:
    """Verify by Sun et al. 2024 (arXiv 2403.10444); K >= 1."""
    p, q, ratio = _distributions(block)
    k = block.tokens.shape[1]
    scales = [torch.ones_like(ratio[:, 0])]  # p_0 = 1, p_i = min(1, p_{i-1} p(y_i)/q(y_i))
    for i in range(k):
        scales.append((scales[-1] * ratio[:, i]).clamp(max=1.0))
    scale = torch.stack(scales, 1)  # [B, K+1]
    s = (scale[:, 1:k, None] * p[:, 1:k] - q[:, 1:]).clamp(min=0).sum(-1)  # S_1 ... S_{K-1}
    h = torch.cat([s / (s + 1 - scale[:, 1:k]), scale[:, k:]], 1)  # h_i, with h_K = p_K
    passes = torch.rand_like(h) < h.nan_to_num(0.0)
    accepted = (torch.arange(1, k + 1, device=h.device) * passes).amax(-1)
    return _finish(block, p, q, scale.gather(1, accepted[:, None]), accepted)
