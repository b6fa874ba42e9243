"""What a chain asks of any drafter: one for each request, its counters, and proposals that fit.

A drafter may be a user's own. Errors name it, what its contract (`Drafter`) expects, and what came.
TypeError: wrong kind or dtype. ValueError: wrong shape, layout, device or range.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch

from ..arguments import LOGITS_DTYPES
from ..returned import kind_of
from .base import Drafter, Proposal
from .model import DraftModel

_INTEGERS = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))


def for_request(drafter: Drafter | None, number: int, name: str) -> Drafter | None:
    """The drafter of request `number` of a batch: a drafter that is no model remembers one text,
    so every request but the first gets a fork of it.

    Raises:
        TypeError: its fork is no drafter; says so by its `name`.
    """
    if drafter is None or isinstance(drafter, DraftModel) or number == 0:
        return drafter
    fork = drafter.fork()  # type: ignore[attr-defined]
    if not isinstance(fork, Drafter):
        raise TypeError(
            f"{name}: expected fork to return a drafter, with a method propose, given "
            f"{kind_of(fork)}"
        )
    return fork


def counters(drafter: Drafter | None) -> tuple[int, float]:
    """Forward passes and prefill seconds the drafter has counted so far, over all requests."""
    return getattr(drafter, "num_forward_passes", 0), getattr(drafter, "prefill_seconds", 0.0)


def proposed_tokens(
    proposal: Any, count: int, *, name: str, vocab_size: int, target_vocab_size: int
) -> list[int]:
    """The tokens of a proposal, if it is one that the level above can verify.

    Args:
        proposal: whatever the drafter returned.
        count: tokens asked for.
        name: of the drafter, for messages.
        vocab_size: ids of the level above are below it.
        target_vocab_size: ids of the target are below it. A deterministic proposal ends before an
            id that only levels further up have.

    Raises:
        TypeError: no Proposal, ids that are no integers, logits or laws of another kind.
        ValueError: too many tokens, an id out of range, or rows that do not fit.
        NotImplementedError: a tree.
    """
    if not isinstance(proposal, Proposal):
        raise TypeError(f"{name}: expected propose to return a Proposal, given {kind_of(proposal)}")
    if proposal.parents is not None:
        raise NotImplementedError(
            f"{name}: expected a chain of tokens, given a tree; trees are not judged yet"
        )
    tokens = _ids(name, proposal.tokens)
    if len(tokens) > count:
        raise ValueError(f"{name}: expected at most {count} tokens, given {len(tokens)}")
    if proposal.logits is not None:
        width = _require_rows(name, proposal.logits, proposal.laws, len(tokens), vocab_size)
        _require_below(name, tokens, width)
        return tokens
    if proposal.laws is not None:
        raise ValueError(f"{name}: expected no draft laws without draft logits, given both")
    _require_below(name, tokens, target_vocab_size)
    return list(itertools.takewhile(vocab_size.__gt__, tokens))


def _require_below(name: str, tokens: Sequence[int], limit: int) -> None:
    for token in tokens:
        if not 0 <= token < limit:
            raise ValueError(f"{name}: expected token ids in [0, {limit}), given {token}")


def _require_rows(name: str, rows: Any, laws: Any, count: int, vocab_size: int) -> int:
    """Draft logits and laws of `count` tokens. Returns Vd."""
    if not isinstance(rows, torch.Tensor) or rows.dtype not in LOGITS_DTYPES:
        raise TypeError(
            f"{name}: expected draft logits as a float32, bfloat16 or float16 tensor, given "
            f"{kind_of(rows)}"
        )
    if rows.dim() != 3 or rows.shape[:2] != (1, count):
        raise ValueError(
            f"{name}: expected draft logits of shape [1, {count}, Vd], given {list(rows.shape)}"
        )
    if not 1 <= rows.shape[2] <= vocab_size:
        raise ValueError(
            f"{name}: expected draft logits of width Vd in [1, {vocab_size}], as wide as those of "
            f"the level above at most, given {rows.shape[2]}"
        )
    if rows.is_meta or rows.layout != torch.strided:
        what = "the meta device" if rows.is_meta else f"layout {rows.layout}"
        raise ValueError(f"{name}: expected draft logits with values in memory, given {what}")
    if laws is not None:
        _require_laws(name, laws, count)
    return int(rows.shape[2])


def _require_laws(name: str, laws: Any, count: int) -> None:
    if not isinstance(laws, torch.Tensor) or laws.dtype != torch.int64:
        raise TypeError(
            f"{name}: expected draft laws as an int64 tensor from ps.sample, given {kind_of(laws)}"
        )
    if tuple(laws.shape) != (1, count, 2) or laws.is_meta:
        raise ValueError(
            f"{name}: expected draft laws of shape [1, {count}, 2], given {list(laws.shape)} on "
            f"{laws.device}"
        )


def _ids(name: str, tokens: Any) -> list[int]:
    """Token ids as Python has them, ``[n]``."""
    if isinstance(tokens, torch.Tensor):
        if tokens.dtype not in _INTEGERS:
            raise TypeError(f"{name}: expected integer token ids, given {kind_of(tokens)}")
        if tokens.dim() != 1 or tokens.is_meta:
            raise ValueError(
                f"{name}: expected token ids of shape [n], given {list(tokens.shape)} on "
                f"{tokens.device}"
            )
        ids: list[int] = tokens.tolist()
        return ids
    if not isinstance(tokens, Sequence) and not hasattr(tokens, "__array__"):
        raise TypeError(f"{name}: expected a sequence of token ids, given {kind_of(tokens)}")
    return [_id(name, token) for token in tokens]


def _id(name: str, token: Any) -> int:
    if type(token) is int:
        return token
    if not isinstance(token, bool):
        try:
            return operator.index(token)
        except TypeError:
            pass
    raise TypeError(f"{name}: expected integer token ids, given {kind_of(token)} among them")
