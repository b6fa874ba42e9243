"""Whether two levels speak of the same tokens.

The verification compares distributions id by id, so ids must mean the same text on every level. A
chain of levels with different tokenizers would still emit the target's distribution, but every
draft would be nonsense: it is refused instead.
"""

from __future__ import annotations

from typing import Any

# Vocabularies that are padded differ by less: ids, or this part of the target's.
_PADDING, _PART = 1024, 10


def _vocabulary(level: Any) -> dict[str, int] | None:
    """Text of each token -> id, where the level knows its tokenizer."""
    find = getattr(level, "tokenizer", None)
    tokenizer = find() if callable(find) else None
    return None if tokenizer is None else dict(tokenizer.get_vocab())


def _place(level: Any) -> str | None:
    """Where its model was loaded from, if it is one of transformers'."""
    return getattr(getattr(level, "model", None), "name_or_path", None) or None


def require_same(names: list[str], levels: list[Any]) -> None:
    """Check every level against the target, ``levels[0]``.

    Known tokenizers must give the same id to the same token wherever both levels have that id.
    Unknown ones can only be verified by size: a draft vocabulary larger than the target's is then
    refused, and one smaller by more than padding explains. Vocabularies padded to different sizes
    are fine, and so is a smaller one for the draft whose tokenizer is known.
    """
    # A tokenizer takes a second to load, and copies of the target have its own.
    pairs, place = zip(names[1:], levels[1:], strict=True), _place(levels[0])
    others = [(name, level) for name, level in pairs if place is None or _place(level) != place]
    if not others:
        return
    target, size = _vocabulary(levels[0]), levels[0].vocab_size
    for name, level in others:
        draft = _vocabulary(level)
        common = min(size, level.vocab_size)
        if target is None or draft is None:
            if level.vocab_size > size:
                raise ValueError(
                    f"vocabulary of {name}: expected at most the {size} ids of the target "
                    f"{names[0]}, given {level.vocab_size}, and no tokenizers that would show that "
                    "the rest is padding"
                )
            if size - level.vocab_size > max(_PADDING, size // _PART):
                raise ValueError(
                    f"vocabulary of {name}: expected about the {size} ids of the target "
                    f"{names[0]}, given {level.vocab_size}, and no tokenizers that would show that "
                    "their tokens are the same; check_vocabulary=False if you know that they are"
                )
            continue
        if draft == target:
            continue
        by_id = {i: token for token, i in target.items() if i < common}
        other = {i: token for token, i in draft.items() if i < common}
        differ = sorted(i for i in by_id.keys() & other.keys() if by_id[i] != other[i])
        if differ:
            i = differ[0]
            raise ValueError(
                f"tokenizer of {name}: expected that of the target {names[0]}, given one that "
                f"differs in {len(differ)} of {common} ids (first: id {i} is {other[i]!r} and not "
                f"{by_id[i]!r})"
            )
