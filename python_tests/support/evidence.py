"""Evidence: tests of drawn counts, and the result of the rules for a block in closed form."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats

ALPHA = 1e-6  # false alarms per statistical test
Floats = npt.NDArray[np.float64]


def chi_square(counts: npt.ArrayLike, probs: npt.ArrayLike) -> float:
    """p-value of `counts` under `probs`; cells that expect fewer than 5 are pooled."""
    seen, distribution = np.asarray(counts, float).ravel(), np.asarray(probs, float).ravel()
    assert not seen[distribution == 0].any(), "a token of probability 0 was drawn"
    expected = distribution * seen.sum()
    big = expected >= 5.0
    seen = np.append(seen[big], seen[~big].sum())
    expected = np.append(expected[big], expected[~big].sum())
    seen, expected = seen[expected > 0], expected[expected > 0]
    if seen.size < 2:
        return 1.0
    return float(stats.chi2.sf(((seen - expected) ** 2 / expected).sum(), seen.size - 1))


def law_of_texts(table: torch.Tensor, length: int) -> torch.Tensor:
    """Return the law ``[V ** length]`` of texts: the next token follows row `last` of a table ``[V,
    V]`` of logits, from last = 0 on."""
    steps = table.double().softmax(-1)
    law = steps[0]
    for _ in range(length - 1):
        law = (law.view(-1, len(table))[:, :, None] * steps).flatten()
    return law


class Verified(NamedTuple):
    """The distribution [m+1] of the number of accepted tokens, and [m+1, V] of the token that
    follows them."""

    stop: Floats
    emit: Floats


def verify(p: Floats, q: Floats, block: Sequence[int], rule: str) -> Verified:
    """Return the result of a rule for a block of m tokens (Leviathan et al. 2023; Sun et al. 2024).

    Args:
        p: [m+1, V], the target's.
        q: [m, V], the proposals', with q > 0 for the block's tokens.
    """
    m = len(block)
    ratio = np.asarray([p[i, y] / q[i, y] for i, y in enumerate(block)])
    weight = np.ones(m + 1)  # p_i of the block rule
    if rule == "block":
        for i in range(m):
            weight[i + 1] = min(1.0, weight[i] * ratio[i])
    left = np.maximum(weight[:m, None] * p[:m] - q, 0.0)
    emit = np.stack([*(row / row.sum() if row.any() else p[i] for i, row in enumerate(left)), p[m]])
    if rule == "token":  # up to the first test that fails
        accept = np.minimum(ratio, 1.0)
        return Verified(np.append(1.0, accept.cumprod()) * np.append(1.0 - accept, 1.0), emit)
    some, rest = left.sum(axis=1)[1:], 1.0 - weight[1:m]
    accept = np.append(np.where(rest > 0, some / np.where(rest > 0, some + rest, 1), 1), weight[m])
    fails_after = np.append(np.cumprod(1.0 - accept[::-1])[::-1], 1.0)  # the last test that passes
    return Verified(np.append(1.0, accept) * fails_after, emit)
