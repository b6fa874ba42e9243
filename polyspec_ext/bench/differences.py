"""How texts compare with the target's: where greedy ones part, and whether by rounding alone; how
likely sampled ones are."""

from __future__ import annotations

from collections.abc import Sequence
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


@torch.inference_mode()
def surprise(
    model: Any, prompt: list[int], text: Sequence[int], temperature: float = 1.0
) -> tuple[float, float]:
    """Sum over a text's tokens of log p(token) less its mean under the target, and the variance of
    that sum: a text drawn from the target is off by chance alone."""
    ids = torch.tensor([[*prompt, *text]], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double()
    logp = (logits / temperature).log_softmax(-1)
    mean = (logp.exp() * logp).sum(-1)
    variance = (logp.exp() * (logp - mean[:, None]).square()).sum(-1)
    drawn = logp.gather(-1, torch.tensor(text, device=model.device)[:, None])[:, 0]
    return float((drawn - mean).sum()), float(variance.sum())
