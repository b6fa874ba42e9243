"""How a matrix becomes 4-bit numbers: to the nearest, or with error feedback (GPTQ)."""

from __future__ import annotations

import torch

from ..levels.quantized import Int4Weights

DAMPING = 0.01  # of the Hessian's diagonal, in its mean
# Ranges tried for a group, in parts of the span of its weights: cutting the largest ones costs
# less than coarser steps for all.
_SHARES = tuple(1 - 0.05 * i for i in range(7))


def ranges(
    weight: torch.Tensor, importance: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero of groups ``[N, group]``, each [N] and exact in bfloat16: the least squared
    error of rounding to the nearest, weighted by ``importance [group]``, among a few ranges."""
    low, high = weight.amin(1), weight.amax(1)
    best: torch.Tensor | None = None
    chosen_scale = chosen_zero = low
    for share in _SHARES:
        scale = ((high - low) * share / 15).bfloat16().float()
        zero = ((high + low) / 2 + scale / 2).bfloat16().float()
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))  # all weights alike
        error = (_dequantised(nearest(weight, scale, zero), scale, zero) - weight).square()
        total = (error if importance is None else error * importance).sum(1)
        if best is None:
            best, chosen_scale, chosen_zero = total, scale, zero
            continue
        better = total < best
        best = torch.where(better, total, best)
        chosen_scale = torch.where(better, scale, chosen_scale)
        chosen_zero = torch.where(better, zero, chosen_zero)
    return chosen_scale, chosen_zero


def nearest(weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """q of ``weight [N, any]`` in float32, in 0 to 15."""
    return ((weight - zero[:, None]) / scale[:, None] + 8).round_().clamp_(0, 15)


def _dequantised(q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    return (q - 8) * scale[:, None] + zero[:, None]


def round_to_nearest(weight: torch.Tensor, group: int) -> Int4Weights:
    """``weight [N, K]``, each number by itself."""
    outputs = weight.shape[0]
    groups = weight.float().reshape(-1, group)
    scale, zero = ranges(groups)
    values = nearest(groups, scale, zero).to(torch.uint8)
    return Int4Weights(values.view(outputs, -1), scale.view(outputs, -1), zero.view(outputs, -1))


def with_feedback(weight: torch.Tensor, hessian: torch.Tensor, group: int) -> Int4Weights:
    """``weight [N, K]`` column by column, each rounding error pushed into the columns behind it
    that are correlated with it (GPTQ, Frantar et al. 2023, arXiv 2210.17323, algorithm 1).

    Args:
        hessian: ``[K, K]`` float32, the inputs' ``X^T X`` up to a factor.
    """
    rest = weight.float().clone()
    diagonal = hessian.diagonal()
    damped = hessian.clone()
    damped.diagonal().add_(DAMPING * diagonal.mean().clamp_min(1e-30))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    # Row j: how an error of column j is made good by the columns behind it.
    feedback = torch.linalg.cholesky(inverse, upper=True)
    values = torch.empty_like(rest, dtype=torch.uint8)
    scales, zeros = [], []
    for begin in range(0, rest.shape[1], group):
        end = begin + group
        scale, zero = ranges(rest[:, begin:end], diagonal[begin:end])
        scales.append(scale)
        zeros.append(zero)
        columns = rest[:, begin:end].T.contiguous()
        block = feedback[begin:end, begin:end]
        errors = torch.empty_like(columns)
        for j in range(group):
            q = ((columns[j] - zero) / scale + 8).round_().clamp_(0, 15)
            values[:, begin + j] = q.to(torch.uint8)
            errors[j] = (columns[j] - (q - 8) * scale - zero) / block[j, j]
            columns[j + 1 :] -= block[j, j + 1 :, None] * errors[j]
        rest[:, end:] -= errors.T @ feedback[begin:end, end:]
    return Int4Weights(values, torch.stack(scales, 1), torch.stack(zeros, 1))
