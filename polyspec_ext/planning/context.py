"""How the time of a level's steps depends on the tokens before them, all of which attention reads:
linearly, and alike for steps of any width, as drafts are so many passes."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import NamedTuple, TypeVar

import numpy as np

FAR = 2.0  # times the median: something else had the processor
_MOST = 0.9  # of the time at the mean context: without any, a pass takes time as well
_Part = TypeVar("_Part", bound=Hashable)


class Sample(NamedTuple):
    """One step."""

    kind: Hashable  # steps of one kind take the same time at the same context
    context: int  # tokens of the text before it
    seconds: float


class ContextCost(NamedTuple):
    """Of one level."""

    mean: float = 1.0  # tokens before the steps that were timed, on average
    share: float = 0.0  # of a step's time there, what grows in proportion to these tokens

    def factor(self, context: float) -> float:
        """Of the time that a step takes at the mean."""
        return 1 + self.share * (context / self.mean - 1)


def context_costs(samples: Iterable[tuple[_Part, Sample]]) -> dict[_Part, ContextCost]:
    """By part, least squares over all of its steps, each over the mean of its kind. What is far
    from the others of its kind is left out."""
    kinds: dict[_Part, dict[Hashable, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for part, one in samples:
        kinds[part][one.kind].append(one)
    return {part: _fitted(list(own.values())) for part, own in kinds.items()}


def _fitted(kinds: list[list[Sample]]) -> ContextCost:
    contexts, slopes = [np.zeros(0)], [0.0, 0.0]  # the sums of products, and of squares
    for own in kinds:
        far = FAR * statistics.median(one.seconds for one in own)
        near = np.array([one[1:] for one in own if one.seconds <= far])
        contexts.append(near[:, 0])
        if near[:, 1].mean() > 0:
            apart = near[:, 0] - near[:, 0].mean()
            slopes[0] += float(apart @ (near[:, 1] / near[:, 1].mean()))
            slopes[1] += float(apart @ apart)
    mean = max(1.0, float(np.concatenate(contexts).mean()))
    slope = slopes[0] / slopes[1] if slopes[1] > 0 else 0.0
    return ContextCost(mean, min(max(0.0, slope * mean), _MOST))
