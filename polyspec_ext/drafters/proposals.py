"""What a chain asks of any drafter: one for each request, its counters, and proposals that fit."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .base import Drafter, Proposal
from .model import DraftModel


def for_request(drafter: Drafter | None, number: int) -> Drafter | None:
    """The drafter of request `number` of a batch: a drafter that is no model remembers one text,
    so every request but the first gets a fork of it."""
    if drafter is None or isinstance(drafter, DraftModel) or number == 0:
        return drafter
    fork: Callable[[], Drafter] = drafter.fork  # type: ignore[attr-defined]
    return fork()


def counters(drafter: Drafter | None) -> tuple[int, float]:
    """Forward passes and prefill seconds the drafter has counted so far, over all requests."""
    return getattr(drafter, "num_forward_passes", 0), getattr(drafter, "prefill_seconds", 0.0)


def proposed_tokens(
    proposal: Proposal, count: int, *, name: str, vocab_size: int, target_vocab_size: int
) -> list[int]:
    """The tokens of a proposal, if it is one that the level above can verify.

    Args:
        count: tokens asked for.
        name: of the drafter, for messages.
        vocab_size: ids of the level above are below it.
        target_vocab_size: ids of the target are below it. A deterministic proposal ends before an
            id that only levels further up have.

    Raises:
        ValueError: too many tokens, an id out of range or rows that do not fit; names the
            drafter.
        NotImplementedError: a tree.
    """
    given = proposal.tokens
    tokens: list[int] = given.tolist() if isinstance(given, torch.Tensor) else list(given)
    if proposal.parents is not None:
        raise NotImplementedError(
            f"{name}: expected a chain of tokens, given a tree; trees are not judged yet"
        )
    if len(tokens) > count:
        raise ValueError(f"{name}: expected at most {count} tokens, given {len(tokens)}")
    rows = proposal.logits
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        place, bad = next(
            (i, token) for i, token in enumerate(tokens) if not 0 <= token < vocab_size
        )
        if rows is not None or not 0 <= bad < target_vocab_size:
            raise ValueError(f"{name}: expected token ids in [0, {vocab_size}), given {bad}")
        tokens = tokens[:place]
    if rows is not None and (rows.dim() != 3 or rows.shape[0] != 1 or rows.shape[1] != len(tokens)):
        raise ValueError(
            f"{name}: expected draft logits of shape [1, {len(tokens)}, Vd], given "
            f"{list(rows.shape)}"
        )
    return tokens
