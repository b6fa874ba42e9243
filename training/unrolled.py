"""The target's states of rows of text, from which a head learns; the head's loss and acceptance by
position of a draft.

An EAGLE or MTP head is unrolled over a few steps of a draft ("training-time test", arXiv
2503.01840). From the second step on it reads its own states, and its attention sees the target's
states up to the start of the draft, then its own, as in use.
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

_OUTLIER = 8  # times the median size: larger states are left out of scales


class States(NamedTuple):
    """A target's states of some rows, in bfloat16."""

    tokens: torch.Tensor  # [R, T] int64
    learnt: torch.Tensor  # [R, T] bool
    features: torch.Tensor  # [R, T, F], input of a head, in units of `Teacher.scale`
    last: torch.Tensor  # [R, T, H], input of the target's output head

    @property
    def about(self) -> torch.Tensor:
        """Mask [R, T] of states before a learnt token; the last state has its token's flag."""
        return torch.cat([self.learnt[:, 1:], self.learnt[:, -1:]], 1)


class Teacher:
    """The target of a head with `config` and the vocabulary `ids` ``[Vd]`` (None: all).

    Attributes:
        scale: ``[F]`` float32, the size of each feature. In many models a few are a thousand times
            as large as others, so a head learns from features in units of `scale`.
        gain: ``[H]`` float32, the size of each component of the last states.
    """

    def __init__(self, model: Any, config: HeadConfig, ids: torch.Tensor | None) -> None:
        self._model, self._layers, self.ids = model, config.hidden_layers, ids
        self.embed = model.get_input_embeddings()
        weight = model.get_output_embeddings().weight.detach()
        self.head = weight if ids is None else weight[ids].contiguous()
        self._all = weight
        self.scale, self.gain = torch.ones(config.feature_size), torch.ones(weight.shape[1])

    def readout(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits ``[.., Vd]`` of last states."""
        return F.linear(states, self.head.to(states.dtype))

    @torch.no_grad()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits ``[.., V]`` of all ids, float32."""
        return F.linear(states.to(self._all.dtype), self._all).float()

    @torch.no_grad()
    def read(self, rows: Rows, batch: int = 4) -> States:
        """Return the target's states of `rows`, by passes of `batch` rows."""
        features, last = self.passes(rows.tokens, batch)
        return States(*rows, (features / self.scale).bfloat16(), last.bfloat16())

    @torch.no_grad()
    def measure(self, rows: Rows) -> None:
        """Set `scale` and `gain` from `rows`."""
        self.scale, self.gain = map(_sizes, self.passes(rows.tokens))

    def require_plain_head(self, tokens: torch.Tensor) -> None:
        """Refuse a model with logits other than the product of its last states and its output
        head, for example capped or scaled logits."""
        with torch.no_grad():
            whole = self._model(input_ids=tokens).logits.float()
            product = self.logits(self.passes(tokens)[1])
        if whole.shape != product.shape or (whole - product).abs().max() > 0.05 * whole.abs().max():
            raise ValueError(
                "target: expected a model whose logits are the product of its last hidden states "
                f"and its output head, given {type(self._model).__name__}, which does something "
                "else with them"
            )

    def passes(
        self, tokens: torch.Tensor, batch: int = 4, layers: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``[R, T, F]``, concatenated states of `layers` (default: the head's), and
        ``[R, T, H]``, last states, by passes of `batch` rows."""
        decoder, features, last = self._model.get_decoder(), [], []
        for rows in tokens.split(batch):
            out = decoder(input_ids=rows, output_hidden_states=True, use_cache=False)
            features.append(torch.cat([out.hidden_states[k] for k in layers or self._layers], -1))
            last.append(out.last_hidden_state)
        return torch.cat(features), torch.cat(last)


def _sizes(states: torch.Tensor) -> torch.Tensor:
    rows = states.flatten(0, -2).float()
    size = rows.norm(dim=-1)
    return rows[size < _OUTLIER * size.median()].pow(2).mean(0).sqrt().clamp_min(1e-6)


_DECAY = 0.8  # weight of a step's loss relative to the previous step
_KL, _FEATURES = 0.5, 0.2  # weights relative to total variation


@contextmanager
def mixed() -> Iterator[None]:
    """Multiply float32 weights in bfloat16 within the context."""
    with torch.autocast("cpu", dtype=torch.bfloat16), warnings.catch_warnings():
        # Norms keep float32 weights on purpose.
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
        yield


class Draft(NamedTuple):
    """Tokens of many drafts at the same position of each draft."""

    states: torch.Tensor  # [R, N, H], the head's
    before: torch.Tensor  # [R, N, H], the head's as input of the output head
    last: torch.Tensor  # [R, N, H], the target's as input of its output head
    some: torch.Tensor  # [R, N] bool, whether a token is learnt
    previous: torch.Tensor  # [R, N] int64, the token before each


class Drafts(nn.Module):
    """A head that drafts `steps` tokens after tokens of a text, with its teacher's embeddings and
    output head."""

    head: HeadNetwork

    def __init__(self, head: HeadNetwork, teacher: Teacher, steps: int) -> None:
        super().__init__()
        self.head, self.teacher, self.steps = head, teacher, steps

    def drafts(self, rows: States, every: bool = False) -> Iterator[Draft]:
        """Yield the drafts of the texts by position; `every`: drafts after every token."""
        raise NotImplementedError

    def logits(self, draft: Draft) -> torch.Tensor:
        """Return logits ``[n, Vd]`` float32 of the learnt tokens."""
        return self.teacher.readout(draft.before[draft.some]).float()

    def more(self, draft: Draft) -> torch.Tensor | float:
        """Return the additional loss of a position."""
        return 0.0

    def forward(self, rows: States) -> tuple[torch.Tensor, list[float]]:
        """Return the loss over all positions: total variation, the loss of acceptance, and forward
        KL, which has a gradient where total variation has none; and per position the overlap with
        the target's distribution over the head's ids."""
        total, overlaps = torch.zeros(()), []
        for step, draft in enumerate(self.drafts(rows)):
            with torch.no_grad():
                goal = self.teacher.readout(draft.last[draft.some]).float().log_softmax(-1)
            log_q = self.logits(draft).log_softmax(-1)
            p, q = goal.exp(), log_q.exp()
            count = max(1, len(goal))
            kl = (p * (goal - log_q)).sum() / count
            overlap = torch.minimum(p, q).sum() / count
            overlaps.append(overlap.item())
            total = total + _DECAY**step * (1 - overlap + _KL * kl + self.more(draft))
        return total, overlaps


class Unrolled(Drafts):
    """An EAGLE or MTP head, unrolled over a few steps of drafts from every token of a text."""

    def drafts(self, rows: States, every: bool = False) -> Iterator[Draft]:
        head, tokens = self.head, rows.tokens
        embeds = self.teacher.embed(tokens).to(rows.features.dtype)
        states, masks = head.fuse(rows.features), list[torch.Tensor]()
        cache: Any = DynamicCache()  # heads use only `update`
        for step in range(self.steps):
            count = tokens.shape[1] - 1 - step
            positions, behind = torch.arange(step, step + count)[None], slice(1 + step, None)
            # Causal over the first step's keys; for later keys each draft sees its own.
            seen = torch.eye(count, dtype=torch.bool)
            masks.append(seen if step else torch.ones_like(seen).tril())
            mask = torch.cat([step_mask[:count] for step_mask in masks], 1)[None, None]
            where = positions, mask
            out = head.read(embeds[:, behind], states[:, :count], where, cache)
            about, last = rows.about[:, behind], rows.last[:, behind]
            yield Draft(out, head.before_head(out), last, about, tokens[:, behind])
            states = head.carried(out)

    def more(self, draft: Draft) -> torch.Tensor | float:
        if not isinstance(self.head, EagleNetwork) or self.head.config.version != 1:
            return 0.0
        # The next step reads the states in place of the target's.
        return _FEATURES * F.smooth_l1_loss(draft.states.float(), draft.last.float())


@torch.no_grad()
def measure_acceptance(head: Drafts, documents: Sequence[Document]) -> dict[str, Any]:
    """Measure, by position of drafts along the texts, the overlap with the target, E[1 - TV], at
    temperature 1 over all of the target's ids, and the share of equal argmaxes."""
    teacher, ids = head.teacher, head.teacher.ids
    sums = torch.zeros(2, head.steps, dtype=torch.float64)
    counts = torch.zeros(head.steps)
    for document in progress.bar(documents, desc="held out", mininterval=5, leave=False):
        tokens = document.ids[None]
        learnt = torch.arange(tokens.shape[1])[None] >= document.begin
        states = teacher.read(Rows(tokens, learnt))
        with mixed():
            for step, draft in enumerate(head.drafts(states, every=True)):
                # The token after a text is unknown.
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
