"""Where greedy texts part, and whether by rounding alone."""

from __future__ import annotations

from typing import Any

import torch

# A first difference counts as a tie of rounding where the two largest logits are closer than this.
TIE = 1e-4


@torch.inference_mode()
def first_difference(
    model: Any, prompt: list[int], plain: list[int], other: list[int]
) -> dict[str, Any] | None:
    """None where both texts are the same; else the first place they differ and the gap of the
    target's two largest logits there, from one forward pass over the whole text."""
    if plain == other:
        return None
    place = next(
        (i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b),
        min(len(plain), len(other)),
    )
    logits = model(
        input_ids=torch.tensor([prompt + plain[:place]], device=model.device), use_cache=False
    ).logits[0, -1]
    top = logits.float().topk(2).values.tolist()
    return {"place": place, "gap": top[0] - top[1], "tie": top[0] - top[1] < TIE}
