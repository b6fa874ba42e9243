"""What callers hand to a chain, checked and brought into one form: lists, one entry per request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .drafters import DraftModel

if TYPE_CHECKING:
    from .chain import Chain

# One value for all rows, or one per row.
Ints = int | Sequence[int] | torch.Tensor
Floats = float | Sequence[float] | torch.Tensor
Prompt = torch.Tensor | Sequence[int] | Sequence[Sequence[int]]


def prompts(
    input_ids: Prompt, vocab_size: int, attention_mask: torch.Tensor | None = None
) -> list[list[int]]:
    """Fresh lists of ids, one per prompt, without padding.

    Raises:
        TypeError: not integers.
        ValueError: an empty prompt, an id out of range, or a mask of another shape or with a gap.
    """
    if isinstance(input_ids, torch.Tensor):
        rows = _of_tensor(input_ids, attention_mask)
    else:
        if attention_mask is not None:
            raise ValueError("attention_mask: expected input_ids as a tensor, given a list")
        given: list[Any] = list(input_ids)
        nested = bool(given) and all(isinstance(row, list | tuple) for row in given)
        rows = [list(row) for row in given] if nested else [given]
        if not all(isinstance(token, int) for row in rows for token in row):
            raise TypeError(
                "input_ids: expected token ids of one prompt, or a list of such lists; given "
                "something else in the list"
            )
    for row in rows:
        if not row:
            raise ValueError("input_ids: expected at least 1 token, given 0")
        if min(row) < 0 or max(row) >= vocab_size:
            bad = next(token for token in row if not 0 <= token < vocab_size)
            raise ValueError(f"input_ids: expected token ids in [0, {vocab_size}), given {bad}")
    return rows


def _of_tensor(ids: torch.Tensor, mask: torch.Tensor | None) -> list[list[int]]:
    if ids.dtype.is_floating_point or ids.dtype == torch.bool:
        raise TypeError(f"input_ids: expected an integer dtype, given {ids.dtype}")
    if ids.dim() not in (1, 2):
        raise ValueError(f"input_ids: expected shape [N] or [B, N], given {list(ids.shape)}")
    if ids.dim() == 2 and ids.shape[0] == 0:
        raise ValueError("input_ids: expected at least 1 prompt, given 0")
    rows: list[list[int]] = ids.reshape(-1, ids.shape[-1]).tolist()
    if mask is None:
        return rows
    if mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask: expected the shape of input_ids, {list(ids.shape)}, given "
            f"{list(mask.shape)}"
        )
    kept = []
    for row, own in zip(rows, mask.reshape(len(rows), -1).tolist(), strict=True):
        seen = [i for i, bit in enumerate(own) if bit]
        if seen and seen[-1] - seen[0] + 1 != len(seen):
            raise ValueError("attention_mask: expected padding at the ends of a row, given a gap")
        kept.append([row[i] for i in seen])
    return kept


def per_row(name: str, value: Any, count: int) -> list[Any]:
    """`value` once per row.

    Raises:
        ValueError: another number of values.
    """
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise ValueError(
            f"{name}: expected one value or one for each of {count} prompts, given {len(value)}"
        )
    return list(value)


def seeds(seed: Any, count: int) -> list[int]:
    """One seed per row, modulo 2**64. A single one is counted up, so that equal prompts differ."""
    if isinstance(seed, int):
        return [(seed + i) % 2**64 for i in range(count)]
    return [int(own) % 2**64 for own in per_row("seed", seed, count)]


def eos_sets(ids: Any, count: int) -> list[frozenset[int]]:
    """The ids that end each row's text."""
    if isinstance(ids, torch.Tensor):
        ids = ids.tolist()
    if isinstance(ids, int):
        ids = [ids]
    ids = list(ids or ())
    if any(isinstance(one, list | tuple) for one in ids):
        return [frozenset(one) for one in per_row("eos_token_id", ids, count)]
    return [frozenset(ids)] * count


def require_batches(chain: Chain, count: int) -> None:
    """Refuse several prompts where a level or the drafter takes one at a time.

    Raises:
        ValueError: names the level.
    """
    if count < 2:
        return
    drafter = chain.drafter
    parts: list[tuple[str, Any, str]] = [
        (name, level, "supports_batches")
        for name, level in zip(chain.names, chain.levels, strict=False)
    ]
    if isinstance(drafter, DraftModel):
        parts.append((chain.names[-1], drafter.level, "supports_batches"))
    elif drafter is not None:
        parts.append((chain.names[-1], drafter, "fork"))
    for name, part, needed in parts:
        if not getattr(part, needed, False):
            raise ValueError(
                f"{name}: expected one prompt, given {count}; {type(part).__name__} has no "
                f"`{needed}` and serves one at a time"
            )


def require_room(limits: Sequence[tuple[str, int | None]], prompt: int, new: Any) -> None:
    """Refuse what no context has room for.

    Raises:
        ValueError: names the level.
    """
    if new < 0:
        raise ValueError(f"max_new_tokens: expected a number >= 0, given {new}")
    for name, limit in limits:
        if limit is not None and prompt + new > limit:
            raise ValueError(
                f"{name}: expected at most {limit} tokens in its context, given a prompt of "
                f"{prompt} and max_new_tokens={new}"
            )


def padded(
    input_ids: Prompt, given: Sequence[list[int]], rows: Sequence[list[int]], pad: int
) -> torch.Tensor:
    """``[B, N]`` int64 on the prompts' device: what `input_ids` held, then the new tokens, then
    padding. Ragged lists have no padding in front."""
    tensor = isinstance(input_ids, torch.Tensor)
    if tensor and input_ids.dim() == 2 and len(rows) > 1:  # type: ignore[union-attr]
        fronts: list[list[int]] = input_ids.tolist()  # type: ignore[union-attr]
        rows = [f + row[len(p) :] for f, p, row in zip(fronts, given, rows, strict=True)]
    width = max(map(len, rows))
    table = [row + [pad] * (width - len(row)) for row in rows]
    device = input_ids.device if tensor else None  # type: ignore[union-attr]
    return torch.tensor(table, dtype=torch.int64, device=device)
