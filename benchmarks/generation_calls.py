"""The calls that are measured: our chains, and transformers' ``generate``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from polyspec_ext.chain import Chain
from polyspec_ext.drafters.proposals import cut_at_eos
from polyspec_ext.stats import Stats

GENERATE, ASSISTED = "transformers generate", "transformers assisted"  # their labels


@dataclass(frozen=True)
class Request:
    """One call: prompts and how to continue them."""

    prompts: list[list[int]]
    max_new_tokens: int
    temperature: float
    seeds: list[int]  # one for each prompt


class Answer(NamedTuple):
    """What came of a call."""

    texts: list[list[int]]  # new tokens of each prompt, up to and including an EOS
    stats: Stats | None = None  # what the engine counted; None: another one than ours
    rows: Sequence[Stats] = ()  # what ours counted of each prompt
    seconds: float | None = None  # of an engine that times itself; None: the caller does
    prefill_seconds: float | None = None  # of an engine that tells them without `stats`


Decode = Callable[[Request], Answer]


def chain_call(chain: Chain) -> Decode:
    """Our own chain."""

    def call(request: Request) -> Answer:
        out = chain.generate(
            request.prompts,
            request.max_new_tokens,
            request.temperature,
            seed=request.seeds,
        )
        # Rows of prompts of different lengths stand at the front, and have padding behind.
        texts = [
            row[len(prompt) : len(prompt) + one.num_new_tokens]
            for row, prompt, one in zip(
                out.sequences.tolist(), request.prompts, out.requests, strict=True
            )
        ]
        return Answer(texts, out.stats, out.requests)

    return call


def generate_call(
    target: Any, eos: frozenset[int], assistant: Any = None, static: bool = False
) -> Decode:
    """transformers' ``generate``, with an assistant model or without.

    Args:
        static: a static cache, over which transformers compiles the passes on CUDA.
    """

    def call(request: Request) -> Answer:
        # (Some checkpoints bring a penalty along, which is part of no distribution here.)
        options: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.0}
        if request.temperature > 0:
            torch.manual_seed(request.seeds[0])
            options |= {
                "do_sample": True,
                "temperature": request.temperature,
                "top_k": 0,
                "top_p": 1.0,
            }
        if static:
            options["cache_implementation"] = "static"
        width = max(map(len, request.prompts))
        pads = [width - len(prompt) for prompt in request.prompts]
        padded = zip(pads, request.prompts, strict=True)
        ids = torch.tensor([[0] * pad + prompt for pad, prompt in padded], device=target.device)
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads], device=target.device)
        if assistant is not None:
            options["assistant_model"] = assistant
        with torch.inference_mode(), _settings_kept(assistant):
            rows = target.generate(
                ids, attention_mask=mask, max_new_tokens=request.max_new_tokens, **options
            )
        return Answer([cut_at_eos(row[width:], eos) for row in rows.tolist()])

    return call


@contextmanager
def _settings_kept(assistant: Any) -> Iterator[None]:
    """A call changes the assistant's generation configuration (the confidence threshold): every one
    starts from the same."""
    if assistant is None:
        yield
        return
    before = assistant.generation_config
    assistant.generation_config = copy.deepcopy(before)
    try:
        yield
    finally:
        assistant.generation_config = before
