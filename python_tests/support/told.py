"""What an engine tells drafters that read hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from polyspec_ext.drafters.base import DraftInput, HiddenStates
from polyspec_ext.levels.base import PromptBatch
from polyspec_ext.sampling import Sampling
from polyspec_ext.tensors import RowParameters


def told(
    layers: Sequence[int], features: Sequence[torch.Tensor], begins: Sequence[int], level: int = 1
) -> HiddenStates:
    """A pass whose states of row b are ``features[b]``, the layers' side by side."""
    width = max(len(own) for own in features)
    size = features[0].shape[1] // len(layers)
    states = {layer: torch.full((len(features), width, size), 7.0) for layer in layers}
    for b, own in enumerate(features):
        for i, layer in enumerate(layers):
            states[layer][b, : len(own)] = own[:, i * size : (i + 1) * size]
    return HiddenStates(level, states, list(begins), [len(own) for own in features])


def draft_input(
    texts: Sequence[Sequence[int]], lengths: Sequence[int], hidden: Sequence[HiddenStates]
) -> DraftInput:
    """A greedy draft of ``lengths[b]`` tokens behind ``texts[b]``, of which all but the last have
    been read."""
    batch = len(texts)
    return DraftInput(
        tokens=torch.tensor([[text[-1]] for text in texts]),
        counts=[int(length > 0) for length in lengths],
        lengths=list(lengths),
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


def prompts(batch: int) -> PromptBatch:
    return PromptBatch(torch.zeros(batch, 1, dtype=torch.int64), None, 64)
