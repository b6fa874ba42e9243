"""Speculative decoding in a loop of one's own, with the two operators and nothing else.

Two models of transformers, without caches to keep it short: the drafter proposes, the target
verifies. The greedy text is the target's own.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import polyspec_ext as ps
from polyspec_ext import tiny

DRAFTED, NEW_TOKENS = 4, 24


def speculative(
    target: Any, drafter: Any, text: torch.Tensor, end: int, **sampling: Any
) -> torch.Tensor:
    """`text` [1, N] continued to `end` tokens, each with the target's distribution."""
    while text.shape[1] < end:
        begin, draft, rows = text.shape[1], text, []
        for _ in range(DRAFTED):
            logits = drafter(draft).logits[:, -1]
            drawn = ps.sample(logits, position=draft.shape[1], level=2, **sampling)
            draft = torch.cat([draft, drawn.tokens[:, None]], 1)
            rows.append(logits)
        logits = target(draft).logits[:, begin - 1 :]  # [1, DRAFTED + 1, V]
        tokens = draft[:, begin:]
        r = ps.verify(logits, tokens, torch.stack(rows, 1), position=begin, **sampling)
        ps.raise_for_status(r.status, level=1, position=begin, num_accepted=r.num_accepted)
        text = torch.cat([text, r.tokens[:, : int(r.num_accepted) + 1]], 1)
    return text[:, :end]


def plain(target: Any, text: torch.Tensor, end: int) -> torch.Tensor:
    """The target's greedy text."""
    while text.shape[1] < end:
        text = torch.cat([text, target(text).logits[:, -1:].argmax(-1)], 1)
    return text


@torch.inference_mode()
def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny.path("target"))
    target, drafter = (
        AutoModelForCausalLM.from_pretrained(tiny.path(name), dtype="float32")
        for name in ("target", "drafter")
    )
    text = tokenizer(tiny.prompt_of("How many legs have 2 cows?"), return_tensors="pt").input_ids
    end = text.shape[1] + NEW_TOKENS
    greedy = speculative(target, drafter, text, end, temperature=0.0)
    print(tokenizer.decode(greedy[0]))
    print("as plain decoding:", greedy.equal(plain(target, text, end)))
    sampled = speculative(target, drafter, text, end, temperature=0.8, top_p=0.9, seed=7)
    print(tokenizer.decode(sampled[0]))


if __name__ == "__main__":
    main()
