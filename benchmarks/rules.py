"""The rules in plain torch: peers to measure against, short enough to read as definitions.

Batched, no host synchronisation, no Python loop over tokens in the token rule. Draws are torch's.
"""

from __future__ import annotations

import math

import torch

from benchmarks.grid import Filters

Verified = tuple[torch.Tensor, torch.Tensor]  # tokens [B, K+1] padded with -1, num_accepted [B]


def processed(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """The processed distribution [..., V] fp32 of logits [..., V]: top-k, then top-p, then min-p.

    Only the threshold is looked for, so a top-k needs no sort of the whole row.
    """
    z = logits.float()
    if filters.off:
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
    """One index [...] per row of non-negative weights [..., V]: an exponential race."""
    return (weights / torch.empty_like(weights).exponential_()).argmax(-1)


def sample(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Tokens [B] from the processed distribution of logits [B, V]."""
    return draw(processed(logits, filters))


def sort_sample(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """The same by sorting the row, cutting the sorted distribution and drawing a rank."""
    z, ids = logits.float().sort(descending=True)
    if filters.top_k:
        z[..., filters.top_k :] = -math.inf
    probs = z.softmax(-1)
    probs = probs.masked_fill(probs.cumsum(-1) - probs >= filters.top_p, 0.0)
    if filters.min_p:
        probs = probs.masked_fill(probs < filters.min_p * probs[..., :1], 0.0)
    return ids.gather(-1, torch.multinomial(probs, 1)).squeeze(-1)


def _emit(draft_tokens: torch.Tensor, accepted: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    place = torch.arange(draft_tokens.shape[1] + 1, device=last.device)
    tokens = torch.nn.functional.pad(draft_tokens, (0, 1))
    tokens = torch.where(place < accepted[:, None], tokens, -1)
    return torch.where(place == accepted[:, None], last[:, None], tokens)


def _rows(p: torch.Tensor, q: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    requests = torch.arange(len(at), device=at.device)
    k = q.shape[1]
    below = q[requests, at.clamp(max=k - 1)]
    return p[requests, at], below.masked_fill((at == k)[:, None], 0.0)


def _ratio(p: torch.Tensor, q: torch.Tensor, draft_tokens: torch.Tensor) -> torch.Tensor:
    y = draft_tokens[..., None]
    return (p[:, :-1].gather(-1, y) / q.gather(-1, y)).squeeze(-1)


def token_rule(
    target_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_logits: torch.Tensor,
    filters: Filters,
) -> Verified:
    """Leviathan et al. 2023, algorithm 1. Shapes [B, K+1, V], [B, K], [B, K, V], K >= 1."""
    p, q = processed(target_logits, filters), processed(draft_logits, filters)
    ratio = _ratio(p, q, draft_tokens)
    accepted = (torch.rand_like(ratio) < ratio).long().cumprod(-1).sum(-1)
    p_last, q_last = _rows(p, q, accepted)
    last = draw((p_last - q_last).clamp(min=0))
    return _emit(draft_tokens, accepted, last), accepted


def block_rule(
    target_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_logits: torch.Tensor,
    filters: Filters,
) -> Verified:
    """Block verification (Sun et al. 2024, arXiv 2403.10444). Shapes as in ``token_rule``."""
    p, q = processed(target_logits, filters), processed(draft_logits, filters)
    k = draft_tokens.shape[1]
    ratio = _ratio(p, q, draft_tokens)
    scales = [torch.ones_like(ratio[:, 0])]  # p_0 = 1, p_i = min(1, p_{i-1} p(y_i)/q(y_i))
    for i in range(k):
        scales.append((scales[-1] * ratio[:, i]).clamp(max=1.0))
    scale = torch.stack(scales, 1)  # [B, K+1]
    s = (scale[:, 1:k, None] * p[:, 1:k] - q[:, 1:]).clamp(min=0).sum(-1)  # S_1 ... S_{K-1}
    h = torch.cat([s / (s + 1 - scale[:, 1:k]), scale[:, k:]], 1)  # h_i, with h_K = p_K
    stands = torch.rand_like(h) < h.nan_to_num(0.0)
    place = torch.arange(1, k + 1, device=h.device)
    accepted = (place * stands).amax(-1)
    p_last, q_last = _rows(p, q, accepted)
    last = draw((scale.gather(1, accepted[:, None]) * p_last - q_last).clamp(min=0))
    return _emit(draft_tokens, accepted, last), accepted
