"""How a matrix becomes 4-bit numbers, to the nearest or with error feedback (GPTQ); and 8-bit
ones."""

from __future__ import annotations

import torch

from .. import processor
from ..ops import int4
from .weights import Int4Weights, joined

INPUTS_8_BITS = 32  # with one scale
DAMPING = 0.01  # of the Hessian's diagonal, in its mean
_ROWS = 1 << 14  # whose errors are in memory at once


def round_to_nearest(weight: torch.Tensor, group: int) -> Int4Weights:
    """Round ``weight [N, K]``, each number by itself."""
    return Int4Weights(*int4.round_to_nearest(weight.detach().cpu(), group))


def to_8_bits(weight: torch.Tensor) -> torch.Tensor:
    """Return ``weight [N, K]`` as blocks of GGUF's type Q8_0, ``[N, K / 32 * 34]`` uint8: of 32
    inputs a float16 scale, the largest magnitude over 127, and whole numbers of it to the
    nearest."""
    made = []
    for rows in weight.detach().cpu().split(_ROWS):
        groups = rows.float().unflatten(1, (-1, INPUTS_8_BITS))
        scales = groups.abs().amax(-1, keepdim=True) / 127
        scales = scales.clamp_max(torch.finfo(torch.float16).max).half()
        # A scale that is too small for float16 is 0, and so are its weights.
        wide = torch.where(scales == 0, torch.inf, scales.float())
        numbers = (groups / wide).round_().clamp_(-127, 127).to(torch.int8)
        blocks = [scales.view(torch.uint8), numbers.view(torch.uint8)]
        made.append(torch.cat(blocks, -1).flatten(1))
    return torch.cat(made)


def with_feedback(weight: torch.Tensor, hessian: torch.Tensor, group: int) -> Int4Weights:
    """Round ``weight [N, K]`` column by column, and push each rounding error into the later columns
    that are correlated with it (GPTQ, Frantar et al. 2023, arXiv 2210.17323, algorithm 1). Groups
    of the largest inputs come first, as most columns are left for their errors then.

    With ``H = L L^T``, L lower triangular, errors E cost ``|E L|^2``, whose column j has no error
    before j. So, from the last column to the first, ``w_j + (E L)_j / L_jj`` is best for column j,
    and no inverse of H is needed.

    Args:
        hessian: H, ``[K, K]`` float32, symmetric: the inputs' ``X^T X`` up to a factor.
    """
    importance = hessian.diagonal().cpu().view(-1, group)
    order = importance.sum(1).argsort()
    places = order.to(hessian.device)
    by_group = hessian.view(len(order), group, len(order), group)
    damped = torch.empty_like(hessian)
    for own, rows in zip(order.tolist(), damped.view(by_group.shape), strict=True):
        torch.index_select(by_group[own], 1, places, out=rows)
    damped.diagonal().add_(DAMPING * importance.mean().clamp_min(1e-30))
    factor = torch.linalg.cholesky(damped, upper=True).mT
    importance = importance[order].flatten()
    given = weight.unflatten(1, (-1, group)).index_select(1, order.to(weight.device)).flatten(1)
    made = joined([_fed_back(rows, importance, factor, group) for rows in given.split(_ROWS)])
    back = order.argsort()
    values = made.values.unflatten(1, (-1, group)).index_select(1, back).flatten(1)
    return Int4Weights(values, made.scales.index_select(1, back), made.zeros.index_select(1, back))


def _fed_back(
    weight: torch.Tensor, importance: torch.Tensor, factor: torch.Tensor, group: int
) -> Int4Weights:
    """Round some rows, which do not depend on each other (`with_feedback`)."""
    given = weight.float()
    owed = torch.zeros_like(given)  # E L, of the errors so far
    unit = torch.eye(group, device=given.device)
    made = []
    for begin in reversed(range(0, given.shape[1], group)):
        own = slice(begin, begin + group)
        # Row j: how an error of column j is made good by the columns before it.
        feedback = torch.linalg.solve_triangular(factor[own, own], unit, upper=False)
        rest = given[:, own] + owed[:, own] @ feedback
        # The range of a group is that of its weights as they are by now.
        _, scales, zeros = int4.round_to_nearest(rest.cpu(), group, importance[own])
        scale, zero = scales[:, 0].to(rest.device), zeros[:, 0].to(rest.device)
        columns = rest.T.contiguous()
        rounded = torch.empty_like(columns, dtype=torch.uint8)
        for j in reversed(range(group)):
            rounded[j] = ((columns[j] - zero) / scale + 8).round_().clamp_(0, 15)
            value = (rounded[j] - 8.0) * scale + zero
            error = (columns[j] - value) / feedback[j, j]
            columns[:j].addr_(feedback[j, :j], error, alpha=-1)
            columns[j] = value
        made.append((rounded.T.cpu(), scales, zeros))
        errors = given[:, own] - columns.T
        with processor.bfloat16_factors():  # an error's 256th part is not worth more
            owed[:, :begin].addmm_(errors, factor[own, :begin])
    return Int4Weights(*(torch.cat(part[::-1], 1) for part in zip(*made, strict=True)))
