"""The loss of an EAGLE head, unrolled over a few steps of a draft ("training-time test", arXiv
2503.01840), and how often its tokens will be accepted, by their place in a draft.

From the second step on the head reads its own states, and its attention sees the target's states up
to the token where the draft begins and its own behind it, as in use.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from polyspec_ext import progress
from polyspec_ext.drafters.eagle import EagleNetwork

from .rows import Document, Rows
from .states import States, Teacher

_DECAY = 0.8  # weight of a step's loss relative to the one before
_KL, _FEATURES = 0.5, 0.2  # weights beside total variation


@contextmanager
def mixed() -> Iterator[None]:
    """Products in bfloat16 of weights in float32."""
    with torch.autocast("cpu", dtype=torch.bfloat16), warnings.catch_warnings():
        # Norms keep their weights, which is meant.
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
        yield


class Unrolled(nn.Module):
    """A head over a few steps of the drafts that begin at every token of a text.

    Args:
        head: trained.
        teacher: whose embeddings and output head it uses.
        steps: of a draft.
    """

    def __init__(self, head: EagleNetwork, teacher: Teacher, steps: int) -> None:
        super().__init__()
        self.head, self.teacher, self.steps = head, teacher, steps

    def outputs(self, rows: States) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield of each step its number s, its states ``[R, T - 1 - s, H]``, and those as the
        output head reads them, which are about the token s + 2 places behind each."""
        head, tokens = self.head, rows.tokens
        embeds = self.teacher.embed(tokens).to(rows.features.dtype)
        states = head.fuse(rows.features)
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        for step in range(self.steps):
            count = tokens.shape[1] - 1 - step
            seen = [(k[:, :, :count], v[:, :, :count]) for k, v in seen]

            def attention(
                layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
            ) -> torch.Tensor:
                seen.append((k, v))  # noqa: B023
                return _attend(q, seen)  # noqa: B023

            positions = torch.arange(step, step + count)[None]
            own = embeds[:, 1 + step : 1 + step + count]
            out = head(own, states[:, :count], positions, attention)
            yield step, out, head.before_head(out)
            states = head.carried(out)

    def forward(self, rows: States) -> tuple[torch.Tensor, list[float]]:
        """Return the loss of all steps: total variation, which is what acceptance loses, and
        forward KL, which has a gradient where total variation has none.

        Returns:
            The loss, and the overlap with the target's distribution over the head's ids at each
            step.
        """
        total, overlaps = torch.zeros(()), []
        # A state is about the token behind it; of the last one nothing is known.
        about, last = torch.cat([rows.learnt[:, 1:], rows.learnt[:, -1:]], 1), rows.last
        for step, states, before in self.outputs(rows):
            some = about[:, 1 + step :]
            with torch.no_grad():
                goal = self.teacher.readout(last[:, 1 + step :][some]).float().log_softmax(-1)
            given = self.teacher.readout(before[some]).float().log_softmax(-1)
            p, q = goal.exp(), given.exp()
            count = max(1, len(goal))
            kl = (p * (goal - given)).sum() / count
            overlap = torch.minimum(p, q).sum() / count
            overlaps.append(overlap.item())
            loss = 1 - overlap + _KL * kl
            if self.head.config.version == 1:
                # What the next step reads is trained to be what the target will say.
                error = F.smooth_l1_loss(states.float(), last[:, 1 + step :].float())
                loss = loss + _FEATURES * error
            total = total + _DECAY**step * loss
        return total, overlaps


def _attend(q: torch.Tensor, seen: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Causal over the first step's keys; of later ones each query sees its own draft's only."""
    count, first = q.shape[2], seen[0]
    diagonal = torch.eye(count, dtype=torch.bool)
    causal = torch.ones(count, count, dtype=torch.bool).tril()
    mask = torch.cat([causal, *[diagonal for _ in seen[1:]]], 1)
    keys = torch.cat([first[0], *[k for k, _ in seen[1:]]], 2)
    values = torch.cat([first[1], *[v for _, v in seen[1:]]], 2)
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2)


@torch.no_grad()
def measure_acceptance(unrolled: Unrolled, documents: Sequence[Document]) -> dict[str, Any]:
    """Measure by step of a draft of the text itself the overlap with the target, E[1 - TV], at
    temperature 1 over all of the target's ids, and how often both have the same argmax.

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
            for step, _, before in unrolled.outputs(states):
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
