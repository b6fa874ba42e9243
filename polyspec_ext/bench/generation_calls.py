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
    """New tokens of each prompt, up to and including an EOS, and what the engine counted (None for
    others than ours).

    Attributes:
        rows: what ours counted of each prompt.
        seconds: of an engine that times itself; None: the caller does.
        prefill_seconds: of an engine that tells them without `stats`.
    """

    texts: list[list[int]]
    stats: Stats | None = None
    rows: Sequence[Stats] = ()
    seconds: float | None = None
    prefill_seconds: float | None = None


Decode = Callable[[Request], Answer]


def chain_call(chain: Chain) -> Decode:
    """Our own chain."""

    def call(request: Request) -> Answer:
        out = chain.generate(
            request.prompts if len(request.prompts) > 1 else request.prompts[0],
            request.max_new_tokens,
            request.temperature,
            seed=request.seeds,
        )
        rows = out.sequences.tolist()
        widths = [len(prompt) for prompt in request.prompts]
        if len(rows) > 1:  # ragged prompts stand at the front of their rows
            news = [one.num_new_tokens for one in out.requests]
            ends = zip(rows, widths, news, strict=True)
            texts = [row[width : width + new] for row, width, new in ends]
            return Answer(texts, out.stats, out.requests)
        return Answer([rows[0][widths[0] :]], out.stats, out.requests)

    return call


def generate_call(
    target: Any,
    eos: frozenset[int],
    assistant: Any = None,
    constant: int | None = None,
    static: bool = False,
) -> Decode:
    """transformers' ``generate``, with an assistant model or without.

    Args:
        constant: draft so many tokens every time; None leaves the assistant's defaults.
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
        with torch.inference_mode():
            rows = target.generate(
                ids, attention_mask=mask, max_new_tokens=request.max_new_tokens, **options
            )
        return Answer([cut_at_eos(row[width:], eos) for row in rows.tolist()])

    if assistant is None:
        return call

    def assisted(request: Request) -> Answer:
        with _assistant_settings(assistant, constant):
            return call(request)

    return assisted


@contextmanager
def _assistant_settings(assistant: Any, constant: int | None) -> Iterator[None]:
    """The assistant's generation configuration for one call. A call changes what it finds there
    (the confidence threshold), so every one starts from the same."""
    before = assistant.generation_config
    config = assistant.generation_config = copy.deepcopy(before)
    if constant is not None:
        config.num_assistant_tokens = constant
        config.num_assistant_tokens_schedule = "constant"
        config.assistant_confidence_threshold = 0.0
    try:
        yield
    finally:
        assistant.generation_config = before
