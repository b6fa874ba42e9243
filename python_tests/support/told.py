"""Inputs, from an engine, of drafters that read hidden states."""

import torch

import polyspec_ext as ps
from polyspec_ext.drafters.base import DraftBlock, DraftInput, HiddenStates
from polyspec_ext.levels.base import PromptBatch
from polyspec_ext.sampling import Sampling
from polyspec_ext.tensors import RowCounts, RowParameters, padded


def told(layers, features, begins) -> HiddenStates:
    """Return the input of a draft: the states of row b are ``features[b]``, the layers' side by
    side."""
    width = max(len(own) for own in features)
    size = features[0].shape[1] // len(layers)
    states = {layer: torch.full((len(features), width, size), 7.0) for layer in layers}
    for b, own in enumerate(features):
        for i, layer in enumerate(layers):
            states[layer][b, : len(own)] = own[:, i * size : (i + 1) * size]
    counts = [len(own) for own in features]
    return HiddenStates(states, torch.tensor(begins), torch.tensor(counts))


def draft_input(texts, lengths, hidden) -> DraftInput:
    """Return the input of a greedy draft of ``lengths[b]`` tokens after ``texts[b]``; None: without
    states."""
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
    """Return the logits of the tokens of a row, ``[N, V]`` float64: -inf for ids without entry."""
    id_map = head.capabilities.id_map
    return id_map.spread(block.rows.logits[row], head.vocab_size).double()


def prompts(batch: int) -> PromptBatch:
    return PromptBatch(torch.zeros(batch, 1, dtype=torch.int64), None, 64)


def rounds_of(head, vocab, size):
    """Yield two texts of different lengths, their states, and the input of `head` before a draft:
    after a prompt, after accepted or rejected tokens, and with states that replace earlier states.

    Args:
        size: of a layer's states.
    """
    layers, generator = head.capabilities.hidden_layers, torch.Generator().manual_seed(1)

    def random(*counts: int) -> list[torch.Tensor]:
        return [torch.randn(n, size * len(layers), generator=generator) for n in counts]

    texts = [torch.randint(vocab, (n,), generator=generator).tolist() for n in (9, 5)]
    states = random(8, 4)
    head.prefill(prompts(2))
    yield texts, states, told(layers, states, [0, 0])
    # Row 0 goes on by three tokens, row 1 is rolled back by one and goes on by two.
    head.rollback([9, 4])
    texts, new = [[*texts[0], 3, 1, 2], [*texts[1][:4], 6, 0]], random(3, 2)
    states = [torch.cat([states[0], new[0]]), torch.cat([states[1][:3], new[1]])]
    yield texts, states, told(layers, new, [8, 3])
    # The target passes on other states of the latest tokens, and of one more of row 1.
    texts, better = [texts[0], [*texts[1], 4]], random(2, 3)
    states = [torch.cat([own[:-2], others]) for own, others in zip(states, better, strict=True)]
    yield texts, states, told(layers, better, [9, 3])
