"""How texts compare with the target's: where greedy ones part, and whether by rounding alone; how
likely sampled ones are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# A first difference counts as a tie of rounding where the target's two largest logits are no
# further apart, by its data type: of the small ones twice the spacing of numbers between 16 and 32,
# where the largest logits of language models lie.
TIES = {"float32": 1e-4, "float16": 2 * 2**-6, "bfloat16": 2 * 2**-3}
# A text that is not the target's own would be so many deviations off only once in 3 million runs.
Z_LIMIT = 5.0


def largest_tie(dtype: object) -> float:
    """Of `TIES`, for a torch dtype or its name."""
    return TIES.get(str(dtype).removeprefix("torch."), TIES["float32"])


@torch.inference_mode()
def first_difference(
    model: Any, prompt: list[int], plain: list[int], other: list[int]
) -> dict[str, Any] | None:
    """None where both texts are the same; else the first place they differ and the gap of the
    target's two largest logits there, from one forward pass over the whole text; `tie`: whether
    that is one of rounding."""
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
    gap = top[0] - top[1]
    return {"place": place, "gap": gap, "tie": gap <= largest_tie(model.dtype)}


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


@dataclass(frozen=True)
class Verdict:
    """Whether texts are the target's own."""

    texts: int  # that were looked at
    # Greedy: `first_difference` from plain decoding's, with the "prompt" by number.
    differences: list[dict[str, Any]]
    # Sampled: how far the texts' likelihood is from its mean under the target, in standard
    # deviations of chance.
    deviations: float | None = None

    @property
    def lossless(self) -> bool:
        return all(d["tie"] for d in self.differences) and abs(self.deviations or 0.0) < Z_LIMIT

    def __str__(self) -> str:
        if self.deviations is not None:
            note = "" if self.lossless else ", NOT the target's"
            return f"{self.deviations:+.1f} deviations{note}"
        ties = sum(d["tie"] for d in self.differences)
        text = f"{self.texts - len(self.differences)} of {self.texts}"
        if ties:
            gap = max(d["gap"] for d in self.differences if d["tie"])
            text += f", {ties} part at a tie (gap <= {gap:.1e})"
        if len(self.differences) > ties:
            text += f", **{len(self.differences) - ties} DIFFER**"
        return text


def verdict(
    model: Any,
    prompts: Sequence[list[int]],
    plain: Mapping[int, list[int]],
    texts: Mapping[int, list[int]],
    temperature: float,
) -> Verdict:
    """
    Args:
        model: the target as transformers has it.
        plain, texts: of plain decoding and those in question, by number of the prompt.
    """
    if temperature == 0:
        found = [first_difference(model, p, plain[n], texts[n]) for n, p in enumerate(prompts)]
        different = [{**d, "prompt": n} for n, d in enumerate(found) if d is not None]
        return Verdict(len(prompts), different)
    sums = [surprise(model, p, texts[n], temperature) for n, p in enumerate(prompts) if texts[n]]
    total, variance = sum(s for s, _ in sums), sum(v for _, v in sums)
    return Verdict(len(sums), [], total / math.sqrt(max(variance, 1e-12)))
