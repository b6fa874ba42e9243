"""The target's states of rows of text, from which a head learns; its loss, by the places of a
draft, and how often its tokens will be accepted there.

An EAGLE or MTP head is unrolled over a few steps of a draft ("training-time test", arXiv
2503.01840). From the second step on it reads its own states, and its attention sees the target's
states up to the token where the draft begins and its own behind it, as in use.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache

from polyspec_ext import progress
from polyspec_ext.drafters.eagle import EagleNetwork
from polyspec_ext.drafters.heads import HeadConfig, HeadNetwork

from .texts import Document, Rows

_OUTLIER = 8  # times the median size: a state that no scale is measured on


class States(NamedTuple):
    """A target's states of some rows, in bfloat16."""

    tokens: torch.Tensor  # [R, T] int64
    learnt: torch.Tensor  # [R, T] bool
    features: torch.Tensor  # [R, T, F], what a head reads, in units of `Teacher.scale`
    last: torch.Tensor  # [R, T, H], what the target's output head reads

    @property
    def about(self) -> torch.Tensor:
        """Which states [R, T] have a learnt token behind them; of the last one nothing is known."""
        return torch.cat([self.learnt[:, 1:], self.learnt[:, -1:]], 1)


class Teacher:
    """A target, as a head of `config` that knows `ids` ``[Vd]`` (None: all) learns from it.

    Attributes:
        scale: ``[F]`` float32, the size of each feature. A few are a thousand times as large as
            others in many models, so a head learns from features in units of it.
        gain: ``[H]`` float32, the size of each number of the last states.
    """

    def __init__(self, model: Any, config: HeadConfig, ids: torch.Tensor | None) -> None:
        self._model, self._layers, self.ids = model, config.hidden_layers, ids
        self.embed = model.get_input_embeddings()
        weight = model.get_output_embeddings().weight.detach()
        self.head = weight if ids is None else weight[ids].contiguous()
        self._all = weight
        self.scale, self.gain = torch.ones(config.feature_size), torch.ones(weight.shape[1])

    def readout(self, states: torch.Tensor) -> torch.Tensor:
        """Return ``[.., Vd]``, logits of states that the output head reads."""
        return F.linear(states, self.head.to(states.dtype))

    @torch.no_grad()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits ``[.., V]`` of all ids, float32."""
        return F.linear(states.to(self._all.dtype), self._all).float()

    @torch.no_grad()
    def read(self, rows: Rows, batch: int = 4) -> States:
        """Run a pass of the target over every row."""
        features, last = self.passes(rows.tokens, batch)
        return States(*rows, (features / self.scale).bfloat16(), last.bfloat16())

    @torch.no_grad()
    def measure(self, rows: Rows) -> None:
        """Set `scale` and `gain`, from these rows."""
        self.scale, self.gain = map(_sizes, self.passes(rows.tokens))

    def require_plain_head(self, tokens: torch.Tensor) -> None:
        """Refuse a model that makes something else of its last states than their product with the
        output head, such as capped or scaled logits."""
        with torch.no_grad():
            whole = self._model(input_ids=tokens).logits.float()
            own = self.logits(self.passes(tokens)[1])
        if whole.shape != own.shape or (whole - own).abs().max() > 0.05 * whole.abs().max():
            raise ValueError(
                "target: expected a model whose logits are the product of its last hidden states "
                f"and its output head, given {type(self._model).__name__}, which does something "
                "else with them"
            )

    def passes(
        self, tokens: torch.Tensor, batch: int = 4, layers: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``[R, T, F]`` and ``[R, T, H]``, states of layers (the head's) side by side and
        the last ones, read so many rows at a time."""
        decoder, features, last = self._model.get_decoder(), [], []
        for part in tokens.split(batch):
            out = decoder(input_ids=part, output_hidden_states=True, use_cache=False)
            features.append(torch.cat([out.hidden_states[k] for k in layers or self._layers], -1))
            last.append(out.last_hidden_state)
        return torch.cat(features), torch.cat(last)


def _sizes(states: torch.Tensor) -> torch.Tensor:
    rows = states.flatten(0, -2).float()
    size = rows.norm(dim=-1)
    return rows[size < _OUTLIER * size.median()].pow(2).mean(0).sqrt().clamp_min(1e-6)


_DECAY = 0.8  # weight of a step's loss relative to the one before
_KL, _FEATURES = 0.5, 0.2  # weights beside total variation


@contextmanager
def mixed() -> Iterator[None]:
    """Products in bfloat16 of weights in float32."""
    with torch.autocast("cpu", dtype=torch.bfloat16), warnings.catch_warnings():
        # Norms keep their weights, which is meant.
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
        yield


class Draft(NamedTuple):
    """One token of each of many drafts, all at the same place of theirs."""

    states: torch.Tensor  # [R, N, H], of the head
    before: torch.Tensor  # [R, N, H], the same as the output head reads them
    last: torch.Tensor  # [R, N, H], the target's, as its output head reads them
    some: torch.Tensor  # [R, N] bool, which of the tokens are learnt
    previous: torch.Tensor  # [R, N] int64, the token before each


class Drafts(nn.Module):
    """A head that drafts `steps` tokens behind those of a text, with its teacher's embeddings and
    output head."""

    head: HeadNetwork

    def __init__(self, head: HeadNetwork, teacher: Teacher, steps: int) -> None:
        super().__init__()
        self.head, self.teacher, self.steps = head, teacher, steps

    def drafts(self, rows: States, every: bool = False) -> Iterator[Draft]:
        """Yield the drafts of the texts by place; `every`: behind each token."""
        raise NotImplementedError

    def logits(self, draft: Draft) -> torch.Tensor:
        """Return ``[n, Vd]`` float32, of the tokens that are learnt."""
        return self.teacher.readout(draft.before[draft.some]).float()

    def more(self, draft: Draft) -> torch.Tensor | float:
        """Return what is added to the loss of a place."""
        return 0.0

    def forward(self, rows: States) -> tuple[torch.Tensor, list[float]]:
        """Return the loss of all places: total variation, which is what acceptance loses, and
        forward KL, which has a gradient where total variation has none; and the overlap with the
        target's distribution over the head's ids at each place."""
        total, overlaps = torch.zeros(()), []
        for step, draft in enumerate(self.drafts(rows)):
            with torch.no_grad():
                goal = self.teacher.readout(draft.last[draft.some]).float().log_softmax(-1)
            given = self.logits(draft).log_softmax(-1)
            p, q = goal.exp(), given.exp()
            count = max(1, len(goal))
            kl = (p * (goal - given)).sum() / count
            overlap = torch.minimum(p, q).sum() / count
            overlaps.append(overlap.item())
            total = total + _DECAY**step * (1 - overlap + _KL * kl + self.more(draft))
        return total, overlaps


class Unrolled(Drafts):
    """An EAGLE or MTP head over a few steps of the drafts that begin at every token of a text."""

    def drafts(self, rows: States, every: bool = False) -> Iterator[Draft]:
        head, tokens = self.head, rows.tokens
        embeds = self.teacher.embed(tokens).to(rows.features.dtype)
        states, masks = head.fuse(rows.features), list[torch.Tensor]()
        cache: Any = DynamicCache()  # of a cache a head asks for `update` alone
        for step in range(self.steps):
            count = tokens.shape[1] - 1 - step
            positions, behind = torch.arange(step, step + count)[None], slice(1 + step, None)
            # Causal over the first step's keys; of later ones each draft sees its own.
            seen = torch.eye(count, dtype=torch.bool)
            masks.append(seen if step else torch.ones_like(seen).tril())
            mask = torch.cat([part[:count] for part in masks], 1)[None, None]
            where = positions, mask
            out = head.read(embeds[:, behind], states[:, :count], where, cache)
            some, last = rows.about[:, behind], rows.last[:, behind]
            yield Draft(out, head.before_head(out), last, some, tokens[:, behind])
            states = head.carried(out)

    def more(self, draft: Draft) -> torch.Tensor | float:
        if not isinstance(self.head, EagleNetwork) or self.head.config.version != 1:
            return 0.0
        # What the next step reads is trained to be what the target will say.
        return _FEATURES * F.smooth_l1_loss(draft.states.float(), draft.last.float())


@torch.no_grad()
def measure_acceptance(head: Drafts, documents: Sequence[Document]) -> dict[str, Any]:
    """Measure by place in a draft of the text itself the overlap with the target, E[1 - TV], at
    temperature 1 over all of the target's ids, and how often both have the same argmax."""
    teacher, ids = head.teacher, head.teacher.ids
    sums = torch.zeros(2, head.steps, dtype=torch.float64)
    counts = torch.zeros(head.steps)
    for document in progress.bar(documents, desc="held out", mininterval=5, leave=False):
        tokens = document.ids[None]
        learnt = torch.arange(tokens.shape[1])[None] >= document.begin
        states = teacher.read(Rows(tokens, learnt))
        with mixed():
            for step, draft in enumerate(head.drafts(states, every=True)):
                # Of what follows a text nothing is known.
                draft.some[:, -1] = False
                goal = teacher.logits(draft.last[draft.some]).softmax(-1)
                q = head.logits(draft).softmax(-1)
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
