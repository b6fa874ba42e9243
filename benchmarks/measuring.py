"""Measurement in turns: every contender once per turn, in a rotating order, so that a change in the
machine's load or clock affects all of them.

Tokens of generations are counted alike, up to and including the EOS, over wall time from the prompt
to the last token, prefill included. Texts are compared with the target's plain decoding.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils.rnn import pad_sequence

from polyspec_ext.chain import Chain
from polyspec_ext.drafters.proposals import cut_at_eos
from polyspec_ext.errors import PolyspecError
from polyspec_ext.stats import Stats

WARM_UP = 3  # uncounted calls
MIB = 1 << 20
T = TypeVar("T")
C = TypeVar("C", bound="Contender")
Call = Callable[[], Any]


# ---- calls in turns ------------------------------------------------------------------------------


def rotated(things: Sequence[T], turn: int) -> list[T]:
    """Return `things` in the order of a turn, rotated by 1 per turn."""
    shift = turn % max(len(things), 1)
    return [*things[shift:], *things[:shift]]


@dataclass
class Contender:
    """A call to be measured."""

    name: str
    call: Call
    graph: bool = True  # try to capture the call as a CUDA graph
    seconds: list[float] = field(default_factory=list)  # of every turn
    captured: bool = False  # whether replays of a graph were timed
    error: str | None = None  # of a contender that failed, which takes part no longer
    run: Call | None = None  # the call, or its replay


def quartiles(values: Sequence[float] | npt.NDArray[np.float64]) -> dict[str, float]:
    """Return q25, median and q75."""
    found = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return dict(zip(("q25", "median", "q75"), found, strict=True))


def ratio(peer: Sequence[float], ours: Sequence[float]) -> dict[str, float]:
    """Return how many times as long the peer takes, turn by turn: q25, median and q75."""
    return quartiles(np.divide(peer, ours))


class Clock:
    """Measure calls on a device: "cpu", by wall time; "cuda", by events around the replay of a
    graph, which is queued while the L2 cache is overwritten; None: calls return their seconds."""

    def __init__(self, device: str | None) -> None:
        self.device, self.kind = device, "events" if device == "cuda" else "wall time"
        self._flush: torch.Tensor | None = None
        if device == "cuda":
            properties = torch.cuda.get_device_properties(torch.cuda.current_device())
            # Long enough that the next call is queued before the reading ends.
            size = max(8 * getattr(properties, "L2_cache_size", 64 * MIB), 512 * MIB)
            self._flush = torch.zeros(size // 4, device="cuda")

    def prepare(self, contender: Contender) -> Call:
        """Return the replay of a captured call, or the call if it cannot be captured."""
        if self._flush is None or not contender.graph:
            return contender.call
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                contender.call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                contender.call()
        except RuntimeError:  # it synchronises, or allocates outside the pool
            torch.cuda.synchronize()
            return contender.call
        contender.captured = True
        return graph.replay

    def seconds(self, run: Call) -> float:
        """Return the seconds of a call."""
        if self.device is None:
            return float(run())
        if self._flush is None:
            began = time.perf_counter()
            run()
            return time.perf_counter() - began
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Read, not written: a timed call would also wait for modified lines that it evicts.
        self._flush.amax()
        started.record()
        run()
        ended.record()
        ended.synchronize()
        return float(started.elapsed_time(ended)) * 1e-3


def turns(
    contenders: Sequence[C],
    repeats: int,
    clock: Clock,
    load: Callable[[int], None] = lambda turn: None,
    warm_up: int = WARM_UP,
    goes_on: Callable[[int], bool] = lambda turn: True,
) -> Iterator[C]:
    """Time the contenders in turns; yield a contender after its call. Before every call `load` gets
    the number of the turn, and -1 before each of `warm_up` calls that are not counted. `goes_on`:
    whether a turn begins."""
    for turn in itertools.takewhile(goes_on, range(repeats)):
        for contender in rotated([c for c in contenders if c.error is None], turn):
            try:
                if contender.run is None:
                    load(-1)
                    contender.run = clock.prepare(contender)
                    for _ in range(warm_up):
                        load(-1)
                        clock.seconds(contender.run)
                load(turn)
                contender.seconds.append(clock.seconds(contender.run))
            except Exception as error:  # a peer that fails must not end the run
                contender.error = f"{type(error).__name__}: {error}".splitlines()[0]
            yield contender


def required(calls: Iterable[C]) -> Iterator[C]:
    """Yield the contenders of `turns`; raise the first error as a PolyspecError."""
    for contender in calls:
        if contender.error is not None:
            raise PolyspecError(f"{contender.name}: {contender.error}")
        yield contender


def copy_bandwidth(device: str) -> float:
    """Return GB/s of a copy between buffers larger than caches, bytes read and written; on CUDA of
    a kernel, since the copy engines, which ``copy_`` uses in a graph, are slower than products."""
    size = 1024 * MIB if device == "cuda" else 128 * MIB
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    call = partial(torch.neg, out=target) if device == "cuda" else target.copy_
    (copy, *_) = turns([Contender("copy", partial(call, source))], 9, Clock(device))
    return 2 * size / statistics.median(copy.seconds) * 1e-9


# ---- generations ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """A call: prompts, a seed for each prompt, and generation options."""

    prompts: list[list[int]]
    max_new_tokens: int
    temperature: float
    seeds: list[int]
    filters: Mapping[str, float] = field(default_factory=dict)


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
    sampling: dict[str, Any] = {"seed": request.seeds, **request.filters}
    out = chain.generate(request.prompts, request.max_new_tokens, request.temperature, **sampling)
    return Answer([list(text) for text in out.new_tokens], out.stats, out.requests)


def generate_call(
    target: Any, eos: frozenset[int], request: Request, assistant: Any = None
) -> Answer:
    """Answer by transformers' ``generate``, perhaps with a draft model."""
    # Some checkpoints set a penalty, which the other methods do not apply.
    options: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.0}
    if request.temperature > 0:
        torch.manual_seed(request.seeds[0])
        options |= {"do_sample": True, "temperature": request.temperature}
        options |= {"top_k": 0, "top_p": 1.0, **request.filters}
    rows = list(map(torch.tensor, request.prompts))
    ids, mask = (
        pad_sequence(some, batch_first=True, padding_side="left").to(target.device)
        for some in (rows, list(map(torch.ones_like, rows)))
    )
    fresh: Any = contextlib.nullcontext()
    if assistant is not None:
        # Calls change this configuration (the confidence threshold); all start with a copy.
        config = copy.deepcopy(assistant.generation_config)
        fresh = mock.patch.object(assistant, "generation_config", config)
        options["assistant_model"] = assistant
    with torch.inference_mode(), fresh:
        texts = target.generate(
            ids, attention_mask=mask, max_new_tokens=request.max_new_tokens, **options
        )
    return Answer([cut_at_eos(text, eos) for text in texts[:, ids.shape[1] :].tolist()])


def timed(decode: Decode, request: Request, device: str = "cpu") -> tuple[Answer, float]:
    """Return an answer and its seconds, with all work on the device, or by the engine's clock."""

    def now() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    began = now()
    answer = decode(request)
    spent = now() - began
    return answer, spent if answer.seconds is None else answer.seconds


# ---- texts ---------------------------------------------------------------------------------------

# Maximum gap of the target's two largest logits at a tie of rounding, by data type: for 16 bits
# twice the spacing of numbers between 16 and 32, the range of language models' largest logits.
TIES = {"float32": 1e-4, "float16": 2 * 2**-6, "bfloat16": 2 * 2**-3}
# Deviations from the mean likelihood, exceeded by texts of the target only once in 3 million runs.
Z_LIMIT = 5.0


@torch.inference_mode()
def compared(
    model: Any, prompt: list[int], plain: list[int], text: list[int], temperature: float = 0.0
) -> dict[str, Any]:
    """Compare a text with plain decoding's, or with the distribution of the target in transformers.

    Greedy: whether the texts are "identical", else the first token that differs, "at", and the
    "gap" of the target's two largest logits there, from a single pass over the text; None without a
    model, for other engines. Sampled: "surprise", the sum over the tokens of log p(token) less its
    mean under the target, and the "variance" of the sum. For a text drawn from the target only
    chance moves the sum from 0.
    """
    if temperature > 0:
        ids = torch.tensor([[*prompt, *text]], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double()
        logp = (logits / temperature).log_softmax(-1)
        mean = (logp.exp() * logp).sum(-1)
        variance = (logp.exp() * (logp - mean[:, None]).square()).sum()
        drawn = logp.gather(-1, torch.tensor(text, device=model.device)[:, None])[:, 0]
        return {"surprise": float((drawn - mean).sum()), "variance": float(variance)}
    if plain == text:
        return {"identical": True, "at": None, "gap": None}
    pairs = itertools.zip_longest(plain, text)
    at = next(number for number, (a, b) in enumerate(pairs) if a != b)
    gap = None
    if model is not None:
        ids = torch.tensor([prompt + plain[:at]], device=model.device)
        top = model(input_ids=ids, use_cache=False).logits[0, -1].float().topk(2).values.tolist()
        gap = top[0] - top[1]
    return {"identical": False, "at": at, "gap": gap}


def verdict(texts: Sequence[Mapping[str, Any]], dtype: object) -> dict[str, Any]:
    """Sum up the results of `compared`, "lossless" in words, for a target's data type."""
    if "surprise" in texts[0]:
        variance = sum(text["variance"] for text in texts)
        z = sum(text["surprise"] for text in texts) / math.sqrt(max(variance, 1e-12))
        p = math.erfc(abs(z) / math.sqrt(2))
        words = f"p = {p:.2g} (z {z:+.1f}, {len(texts)} texts)"
        words += ", NOT the target's" * (abs(z) >= Z_LIMIT)
        return {"z": z, "p_value": p, "texts": len(texts), "lossless": words}
    gaps = [text["gap"] for text in texts if not text["identical"]]
    known = [gap for gap in gaps if gap is not None]
    tied = sum(gap <= TIES.get(str(dtype).removeprefix("torch."), TIES["float32"]) for gap in known)
    counts = {"identical": len(texts) - len(gaps), "tied": tied, "other": len(gaps) - tied}
    parts = [
        f"{counts['identical']} of {len(texts)} identical",
        f"{tied} tied" * (tied > 0),
        f"{counts['other']} DIFFER" * (counts["other"] > 0),
        f"gap <= {max(known):.1e}" if known else "",
    ]
    gap = max(known, default=None)
    return {**counts, "gap": gap, "lossless": ", ".join(filter(None, parts))}


def is_lossless(summed: Mapping[str, Any]) -> bool:
    """Return whether the texts of a `verdict` are the target's."""
    return not summed.get("other") and abs(summed.get("z", 0.0)) < Z_LIMIT
