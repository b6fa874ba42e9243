"""Seconds of a level's forward passes, by their number of tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..levels import Level

REPEATS, CONTEXT = 12, 64
# Seconds after which a profile stops repeating; every pass is measured at least twice.
LIMIT = 1.0


def pass_seconds(
    levels: Sequence[Level],
    widths: Sequence[int],
    *,
    repeats: int = REPEATS,
    limit: float = LIMIT,
    clock: Callable[[], float] | None = None,
) -> list[dict[int, float]]:
    """Time passes of one sequence through each level, in turns, so that a change in the machine's
    load meets all of them. Every pass has `CONTEXT` tokens before it, fewer where a level has no
    room for them. The levels begin a batch of their own and are left in it.

    Args:
        levels: measured side by side.
        widths: numbers of tokens of a pass, >= 1 each.
        repeats: turns, after an untimed one.
        limit: seconds for each of `levels`; where they are over, the turns end after the second.
        clock: seconds from any origin. None: wall time, or, where torch has one thread, that
            thread's processor time, which stands still while others have the processor.

    Returns:
        by level and width, the seconds of the fastest pass: whatever else runs on the machine only
        adds to it.
    """
    if not levels or not widths or min(widths) < 1 or repeats < 1:
        raise ValueError(
            "expected levels, widths >= 1 and repeats >= 1, given "
            f"{len(levels)} levels, widths {list(widths)} and {repeats} repeats"
        )
    devices = [torch.device(getattr(level, "device", "cpu")) for level in levels]
    if clock is None:
        on_cpu = all(device.type == "cpu" for device in devices)
        alone = torch.get_num_threads() == 1 and on_cpu
        clock = time.thread_time if alone else time.perf_counter
    fastest: list[dict[int, float]] = [{} for _ in levels]
    longest = max(widths)
    rooms = [getattr(level, "max_length", None) for level in levels]
    context = max(min([CONTEXT, *(room - longest for room in rooms if room is not None)]), 0)
    blocks = []
    for level, device in zip(levels, devices, strict=True):
        tokens = torch.arange(context + longest, device=device)
        blocks.append((tokens % level.vocab_size)[None])
        if hasattr(level, "reserve"):
            level.reserve(context + longest)
        level.prefill(blocks[-1][:, :context])
    began = clock()
    for turn in range(repeats + 1):
        if turn == 1:  # the untimed turn may have compiled
            began = clock()
        elif turn > 2 and clock() - began > limit * len(levels):
            break
        for width in widths:
            for place in range(len(levels)):
                number = (place + turn) % len(levels)
                level, tokens = levels[number], blocks[number][:, context : context + width]
                started = clock()
                level.forward(tokens, width)
                seconds = clock() - started
                level.rollback([context])
                if turn > 0:
                    known = fastest[number].get(width, seconds)
                    fastest[number][width] = min(known, seconds)
    return fastest
