"""What an engine tells drafters that read hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import polyspec_ext as ps
from polyspec_ext.drafters.base import DraftBlock, DraftInput, HiddenStates
from polyspec_ext.levels.base import PromptBatch
from polyspec_ext.sampling import Sampling
from polyspec_ext.tensors import RowCounts, RowParameters, padded


def told(
    layers: Sequence[int], features: Sequence[torch.Tensor], begins: Sequence[int]
) -> HiddenStates:
    """What is told: the states of row b are ``features[b]``, the layers' side by side."""
    width = max(len(own) for own in features)
    size = features[0].shape[1] // len(layers)
    states = {layer: torch.full((len(features), width, size), 7.0) for layer in layers}
    for b, own in enumerate(features):
        for i, layer in enumerate(layers):
            states[layer][b, : len(own)] = own[:, i * size : (i + 1) * size]
    counts = [len(own) for own in features]
    return HiddenStates(states, torch.tensor(begins), torch.tensor(counts))


def draft_input(
    texts: Sequence[Sequence[int]], lengths: Sequence[int], hidden: HiddenStates | None
) -> DraftInput:
    """A greedy draft of ``lengths[b]`` tokens behind ``texts[b]``; None: no states are told."""
    batch = len(texts)
    if hidden is None:
        none = torch.zeros(batch, dtype=torch.int64)
        hidden = HiddenStates({}, none, none)
    rest = [
        text[begin if told else 0 :] if length else []
        for text, length, begin, told in zip(
            texts, lengths, hidden.positions.tolist(), hidden.counts.tolist(), strict=True
        )
    ]
    tokens, counts = padded(rest, torch.device("cpu"))
    return DraftInput(
        tokens=tokens,
        counts=RowCounts(counts),
        lengths=RowCounts(lengths),
        most=max(lengths),
        positions=torch.tensor([len(text) for text in texts]),
        rounds=torch.zeros(batch, dtype=torch.int64),
        level=2,
        parameters=RowParameters(batch, torch.device("cpu")).write(
            [Sampling(0.0)] * batch, list(range(batch))
        ),
        wants_rows=True,
        requests=list(range(batch)),
        eos=[frozenset()] * batch,
        text=lambda b: torch.tensor(texts[b]),
        hidden=hidden,
    )


def drawn_from(head: ps.Eagle, block: DraftBlock, row: int) -> torch.Tensor:
    """What the tokens of a row were drawn from, ``[N, V]`` float64: -inf for ids without entry."""
    id_map = head.capabilities.id_map
    return id_map.spread(block.rows.logits[row], head.vocab_size).double()


def prompts(batch: int) -> PromptBatch:
    return PromptBatch(torch.zeros(batch, 1, dtype=torch.int64), None, 64)
