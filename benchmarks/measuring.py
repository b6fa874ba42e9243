"""Measurement of generations: every method answers every prompt in turns, in a rotating order, so
that a change in the machine's load affects all methods.

``benchmarks paper`` and the demo share it. Tokens are counted alike, up to and including the EOS,
over wall time from the prompt to the last token, prefill included. Texts are compared with the
target's plain decoding.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.timing import rotated
from polyspec_ext import progress
from polyspec_ext.chain import Chain
from polyspec_ext.drafters.proposals import cut_at_eos
from polyspec_ext.stats import Stats, merge

Clock = Callable[[], float]
Texts = Mapping[int, list[int]] | Sequence[list[int]]  # by the number of the prompt


# ---- calls ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """A call: prompts, a seed for each prompt, and generation options."""

    prompts: list[list[int]]
    max_new_tokens: int
    temperature: float
    seeds: list[int]


class Answer(NamedTuple):
    """New tokens of each prompt, up to and including an EOS, and statistics of the engine."""

    texts: list[list[int]]
    stats: Stats | None = None  # of the call, in our engine
    rows: Sequence[Stats] = ()  # and of each prompt
    seconds: float | None = None  # None: the caller measures them
    prefill_seconds: float | None = None  # of an engine without `stats`


Decode = Callable[[Request], Answer]


def chain_call(chain: Chain, request: Request) -> Answer:
    """Answer by a chain."""
    out = chain.generate(
        request.prompts, request.max_new_tokens, request.temperature, seed=request.seeds
    )
    # Shorter rows are padded at the end.
    rows = zip(out.sequences.tolist(), request.prompts, out.requests, strict=True)
    texts = [row[len(prompt) : len(prompt) + one.num_new_tokens] for row, prompt, one in rows]
    return Answer(texts, out.stats, out.requests)


def generate_call(
    target: Any,
    eos: frozenset[int],
    request: Request,
    assistant: Any = None,
    static: bool = False,
) -> Answer:
    """Answer by transformers' ``generate``, perhaps with a draft model or a static cache, with
    which transformers compiles the passes on CUDA."""
    # Some checkpoints set a penalty, which the other methods do not apply.
    options: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.0}
    if request.temperature > 0:
        torch.manual_seed(request.seeds[0])
        options |= {"do_sample": True, "temperature": request.temperature}
        options |= {"top_k": 0, "top_p": 1.0}
    if static:
        options["cache_implementation"] = "static"
    width = max(map(len, request.prompts))
    pads = [width - len(prompt) for prompt in request.prompts]
    padded = zip(pads, request.prompts, strict=True)
    ids = torch.tensor([[0] * pad + prompt for pad, prompt in padded], device=target.device)
    mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads], device=target.device)
    before = None
    if assistant is not None:
        # Calls change this configuration (the confidence threshold); all start with a copy.
        before = assistant.generation_config
        options["assistant_model"] = assistant
        assistant.generation_config = copy.deepcopy(before)
    try:
        with torch.inference_mode():
            rows = target.generate(
                ids, attention_mask=mask, max_new_tokens=request.max_new_tokens, **options
            )
    finally:
        if assistant is not None:
            assistant.generation_config = before
    return Answer([cut_at_eos(row[width:], eos) for row in rows.tolist()])


# ---- turns ---------------------------------------------------------------------------------------


def device_clock(device: torch.device) -> Clock:
    """Return a wall clock that first waits for all work on the device."""
    if device.type != "cuda":
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


def timed(decode: Decode, request: Request, clock: Clock) -> tuple[Answer, float]:
    """Return an answer and its seconds, by the engine's clock if it reports seconds."""
    began = clock()
    answer = decode(request)
    spent = clock() - began
    return answer, spent if answer.seconds is None else answer.seconds


class Call(NamedTuple):
    """A measured call of a contender."""

    repeat: int
    tokens: int
    seconds: float
    stats: Stats | None  # None: another engine's


@dataclass
class Contender:
    """A generation method and its measurements."""

    label: str
    decode: Decode
    window: Sequence[int] = ()  # of a chain; empty: plain decoding
    plain: str | None = None  # label of the reference texts; None: the first contender
    calls: list[Call] = field(default_factory=list)
    texts: dict[int, list[int]] = field(default_factory=dict)  # by prompt, of the last repeat

    @property
    def stats(self) -> Stats | None:
        """Sum over all calls; None for other engines."""
        every = [call.stats for call in self.calls if call.stats is not None]
        return merge(every) if every else None

    def rate(self) -> float:
        """Return tokens per second: the median of the repeats."""
        repeats, tokens, seconds, _ = zip(*self.calls, strict=True)
        return float(np.median(np.bincount(repeats, tokens) / np.bincount(repeats, seconds)))


def measure(
    contenders: Sequence[Contender],
    prompts: Sequence[list[int]],
    *,
    repeats: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    warm_up: int,
    clock: Clock = time.perf_counter,
) -> Iterator[int]:
    """Measure every contender at every prompt in turns; yield the number of finished repeats. All
    contenders have the same seeds. A first call of `warm_up` tokens is not counted."""

    def request(number: int, repeat: int, tokens: int) -> Request:
        seeds = [seed + repeat * len(prompts) + number]
        return Request([prompts[number]], tokens, temperature, seeds)

    for one in contenders:
        one.decode(request(0, 0, warm_up))
    total = repeats * len(prompts) * len(contenders)
    with progress.bar(total=total, desc="measuring", leave=False) as bar:
        for repeat in range(repeats):
            for number in range(len(prompts)):
                asked = request(number, repeat, max_new_tokens)
                for one in rotated(contenders, number + repeat, 1):
                    answer, seconds = timed(one.decode, asked, clock)
                    (text,) = answer.texts
                    one.calls.append(Call(repeat, len(text), seconds, answer.stats))
                    one.texts[number] = text
                    bar.update()
            yield repeat + 1


# ---- texts ---------------------------------------------------------------------------------------

# Maximum gap of the target's two largest logits at a tie of rounding, by data type: for 16 bits
# twice the spacing of numbers between 16 and 32, the range of language models' largest logits.
TIES = {"float32": 1e-4, "float16": 2 * 2**-6, "bfloat16": 2 * 2**-3}
# Deviations, exceeded by texts of the target only once in 3 million runs.
Z_LIMIT = 5.0


def largest_tie(dtype: object) -> float:
    """Return the entry of `TIES` for a torch dtype or its name."""
    return TIES.get(str(dtype).removeprefix("torch."), TIES["float32"])


@torch.inference_mode()
def first_difference(
    model: Any, prompt: list[int], plain: list[int], other: list[int]
) -> dict[str, Any] | None:
    """Return the first difference of two texts: its token, "at", the "gap" of the target's two
    largest logits there, from a single pass over the text, and whether the gap is a "tie" of
    rounding. None: equal texts. Without a model, for other engines, the token alone."""
    if plain == other:
        return None
    pairs = itertools.zip_longest(plain, other)
    at = next(number for number, (a, b) in enumerate(pairs) if a != b)
    if model is None:
        return {"at": at, "gap": None, "tie": False}
    ids = torch.tensor([prompt + plain[:at]], device=model.device)
    top = model(input_ids=ids, use_cache=False).logits[0, -1].float().topk(2).values.tolist()
    gap = top[0] - top[1]
    return {"at": at, "gap": gap, "tie": gap <= largest_tie(model.dtype)}


@torch.inference_mode()
def surprise(
    model: Any, prompt: list[int], text: Sequence[int], temperature: float = 1.0
) -> tuple[float, float]:
    """Return the sum over a text's tokens of log p(token) less its mean under the target, and the
    variance of the sum. For a text drawn from the target only chance moves the sum from 0."""
    ids = torch.tensor([[*prompt, *text]], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double()
    logp = (logits / temperature).log_softmax(-1)
    mean = (logp.exp() * logp).sum(-1)
    variance = (logp.exp() * (logp - mean[:, None]).square()).sum(-1)
    drawn = logp.gather(-1, torch.tensor(text, device=model.device)[:, None])[:, 0]
    return float((drawn - mean).sum()), float(variance.sum())


@dataclass(frozen=True)
class Verdict:
    """Comparison of texts with the target."""

    texts: int  # number of compared texts
    differences: list[dict[str, Any]]  # greedy: each `first_difference`, with its "prompt"
    deviations: float | None = None  # sampled: of the texts' likelihood from its mean

    @property
    def lossless(self) -> bool:
        return all(d["tie"] for d in self.differences) and abs(self.deviations or 0.0) < Z_LIMIT

    def __str__(self) -> str:
        if self.deviations is not None:
            note = "" if self.lossless else ", NOT the target's"
            return f"{self.deviations:+.1f} deviations{note}"
        ties = [d["gap"] for d in self.differences if d["tie"]]
        text = f"{self.texts - len(self.differences)} of {self.texts}"
        if ties:
            text += f", {len(ties)} part at a tie (gap <= {max(ties):.1e})"
        if len(self.differences) > len(ties):
            text += f", **{len(self.differences) - len(ties)} DIFFER**"
        return text


def verdict(
    model: Any,
    prompts: Sequence[list[int]],
    plain: Texts,
    texts: Texts,
    temperature: float,
) -> Verdict:
    """Compare texts with plain decoding's texts, or with the distribution of the
    target in transformers."""
    if temperature == 0:
        found = [first_difference(model, p, plain[n], texts[n]) for n, p in enumerate(prompts)]
        different = [{**d, "prompt": n} for n, d in enumerate(found) if d is not None]
        return Verdict(len(prompts), different)
    sums = [surprise(model, p, texts[n], temperature) for n, p in enumerate(prompts) if texts[n]]
    total, variance = sum(s for s, _ in sums), sum(v for _, v in sums)
    return Verdict(len(sums), [], total / math.sqrt(max(variance, 1e-12)))
