"""Logits of some tokens of a pass only. Their hidden states are gathered in front of the head, as
the logits of all would be large. What a model does to its logits still happens to them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def gather(states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``states[b, rows[b, j]]``, ``[B, keep, H]``.

    Args:
        states: ``[B, T, H]``.
        rows: ``[B, keep]`` int64 in [0, T), on any device.
    """
    index = rows.to(states.device, non_blocking=True)[..., None]
    return states.gather(1, index.expand(-1, -1, states.shape[2]))


@contextmanager
def gathering(head: torch.nn.Module, rows: torch.Tensor | None) -> Iterator[None]:
    """Meanwhile `head` is given the hidden states of `rows` alone (see `gather`); None: of all."""
    if rows is None:
        yield
        return
    wanted: list[torch.Tensor] = [rows]
    thread = threading.get_ident()

    def hook(module: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        # Once: a hook that an interrupt has left behind must not change later passes. And here:
        # chains of other threads may run the same model.
        if not wanted or threading.get_ident() != thread:
            return arguments
        return (gather(arguments[0], wanted.pop()), *arguments[1:])

    handle = None
    try:
        handle = head.register_forward_pre_hook(hook, prepend=True)
        yield
    finally:
        wanted.clear()
        if handle is not None:
            handle.remove()
