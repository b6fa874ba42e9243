"""Prefilling a batch: every level that will be asked reads what stands for good, but the last
token, whose logits are wanted.

All levels are set going before anybody waits: levels on several devices read at the same time, and
so do those of one CUDA device, as far as it has room, since each level below the target has a
stream of its own (`SideStreams`), unless it shares a cache with another.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch

from ..drafters.base import BatchedDrafter
from ..errors import named
from ..levels.base import BatchedLevel, Hidden, IdMap, PromptBatch
from ..stats import StatsRecorder
from ..tensors import padded
from .graphs import SideStreams
from .request import Row
from .requirements import ChainConfig

Part = BatchedLevel | BatchedDrafter


def prefill(
    parts: Sequence[Part],
    numbers: Sequence[int],
    config: ChainConfig,
    slots: Sequence[Row],
    ahead: int,
    streams: SideStreams,
    recorder: StatsRecorder,
    hidden_layers: tuple[int, ...] = (),
    held: Mapping[int, Sequence[int]] | None = None,
) -> Hidden | None:
    """Has the levels `numbers` (from 1) begin a batch and read `slots`.

    Args:
        parts: levels and drafter, target first.
        config: of the chain.
        ahead: tokens by which a text may run ahead of what is committed.
        hidden_layers: that the drafter wants.
        held: of each level that goes on with the batch at hand, the tokens of each row that it has;
            it reads those behind them.

    Returns:
        The target's hidden states of what it has read, if it is among the levels and they are
        wanted.
    """
    found: Hidden | None = None
    capacity = max(row.committed + row.room for row in slots) + ahead
    chosen = [(number, parts[number - 1]) for number in numbers]
    devices = {part.device for _, part in chosen}
    with streams.open(list(devices)):
        for number, part in chosen:
            began = time.perf_counter()
            # The target stays where its collectives may be, if it is sharded.
            apart = number > 1 and part.capabilities.reads_apart
            place = streams.stream(part.device, number) if apart else nullcontext()
            with named(config.names, number - 1, slots), place:
                own = None if held is None else held.get(number)
                begin = [0] * len(slots) if own is None else own
                rest = [row.tokens[n:-1] for row, n in zip(slots, begin, strict=True)]
                tokens, counts = padded(rest, part.device)
                even = min(counts) == tokens.shape[1]
                tokens = config.id_maps[number - 1].to_below(tokens)
                layers = hidden_layers if number == 1 else ()
                encoded = slots[0].encoded  # levels with an encoder take one row
                if encoded is not None and number > 1:
                    encoded = encoded._replace(states=None)
                counted = None if even else counts
                prompts = PromptBatch(tokens, counted, capacity, layers, encoded, own)
                hidden = part.prefill(prompts)
                if layers and isinstance(hidden, Mapping):
                    found = hidden
            recorder.prefilled(number - 1, time.perf_counter() - began)
    began = time.perf_counter()
    for device in devices:
        if device.type == "cuda":  # so that prefill and decoding are timed apart
            torch.cuda.synchronize(device)
    recorder.prefilled(0, time.perf_counter() - began)
    return found


def read_rest(part: Part, id_map: IdMap, slots: Sequence[Row], held: Sequence[int]) -> list[int]:
    """Has a level read what it lacks of `slots`, but the last token of each.

    Args:
        held: tokens in its cache, by row.

    Returns:
        The same afterwards.
    """
    rest = [[] if row.ended else row.tokens[have:-1] for row, have in zip(slots, held, strict=True)]
    tokens, counts = padded(rest, part.device)
    part.read(id_map.to_below(tokens), counts)
    return [have + count for have, count in zip(held, counts, strict=True)]
