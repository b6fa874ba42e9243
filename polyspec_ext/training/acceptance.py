"""How often a head's tokens will be accepted, by their place in a draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import progress
from .rows import Document, Rows
from .unrolled import Unrolled, mixed


@torch.no_grad()
def measure_acceptance(unrolled: Unrolled, documents: Sequence[Document]) -> dict[str, Any]:
    """By step of a draft of the text itself: overlap with the target, E[1 - TV], at temperature 1
    over all of the target's ids, and how often both have the same argmax.

    Args:
        documents: that the head has not learnt from.
    """
    teacher, ids = unrolled.teacher, unrolled.teacher.ids
    sums = torch.zeros(2, unrolled.steps, dtype=torch.float64)
    counts = torch.zeros(unrolled.steps)
    for document in progress.bar(documents, desc="held out", mininterval=5, leave=False):
        tokens = document.ids[None]
        learnt = torch.arange(tokens.shape[1])[None] >= document.begin
        states = teacher.read(Rows(tokens, learnt))
        about = torch.cat([learnt[:, 1:], torch.zeros_like(learnt[:, :1])], 1)
        with mixed():
            for step, _, before in unrolled.outputs(tokens, states.features):
                some = about[:, 1 + step :]
                goal = teacher.logits(states.last[:, 1 + step :][some]).softmax(-1)
                q = teacher.readout(before[some]).float().softmax(-1)
                best = q.argmax(-1) if ids is None else ids[q.argmax(-1)]
                known = goal if ids is None else goal[:, ids]
                sums[0, step] += torch.minimum(known, q).sum()
                sums[1, step] += (best == goal.argmax(-1)).sum()
                counts[step] += len(goal)
    overlap, agreement = (sums / counts.clamp_min(1)).tolist()
    return {
        "overlap": [round(x, 4) for x in overlap],
        "greedy_agreement": [round(x, 4) for x in agreement],
        "tokens": int(counts[0]),
    }
