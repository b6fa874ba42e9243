"""What is found out before a run: windows and predictions of the planner, what passes cost, how
often the levels agree with the target, and what memory gives."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from polyspec_ext.bench import chains, timing
from polyspec_ext.bench.generation_calls import Request
from polyspec_ext.bench.paper.methods import PLANNED, Call, Method, with_windows
from polyspec_ext.bench.paper.parts import TARGET, W4, WORDS, Parts, weight_bytes
from polyspec_ext.levels import HuggingFaceLevel
from polyspec_ext.planned import plan
from polyspec_ext.planning import pass_seconds

_PREDICTED = ("chain", PLANNED)
_KINDS = (*_PREDICTED, "adaptive")  # which have windows of the planner's
WIDTHS = (1, 4, 8, 12, 16)  # tokens of the passes that are timed


@dataclass
class Planned:
    """The methods with the windows that the planner found for them, and what it predicts, by key:
    tokens per second of decoding, and windows."""

    methods: list[Method]
    prediction: dict[str, dict[str, Any]] = field(default_factory=dict)


def planned(
    methods: Sequence[Method],
    parts: Parts,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    seconds: float,
) -> Planned:
    """Plans once for all levels of the methods that the planner can predict: chains of models, and
    of models with a drafter without hidden states below. Heads, policies and cascades keep their
    windows; a chain's policy begins with the windows of that chain.

    Args:
        prompts: such as will be asked.
        seconds: that the planner may measure.
    """
    known = [TARGET, W4, *parts.places.models, *WORDS]
    some = [method for method in methods if method.kind in _KINDS]
    if not some:
        return Planned(list(methods))
    names = [name for name in known if any(name in method.levels for method in some)]
    found = plan(
        [parts.thing(name) for name in names],
        [list(prompt) for prompt in prompts],
        max_new_tokens,
        temperature,
        pack=False,
        seconds=seconds,
    )
    # The planner puts levels in order by their times, which may not be ours.
    by_levels = {frozenset(one.levels): one for one in found.candidates}
    made = Planned([])
    for method in methods:
        one = by_levels.get(frozenset(method.levels))
        if method.kind == PLANNED:
            one = found.recommended
            label = f"planned: {' <- '.join(one.levels)}"
            method = replace(method, label=label, levels=tuple(one.levels))
        if one is not None and method.kind in _KINDS:
            method = with_windows(method, one.windows, one.rounds, one.rule)
        if one is not None and (method.baseline or method.kind in _PREDICTED):
            made.prediction[method.name] = {
                "tokens_per_second": one.predicted_decode_tokens_per_second,
                "windows": list(one.windows),
            }
        made.methods.append(method)
    return made


def surroundings(
    methods: Sequence[Method],
    parts: Parts,
    calls: Sequence[Call],
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    seed: int,
) -> dict[str, Any]:
    """Seconds of passes, overlap with the target, bytes of weights and copy bandwidth, as
    ``run.json`` has them.

    Args:
        calls: of `methods`, ready to decode.
        prompts: a few; the overlap is that along the baseline's texts behind them, at temperature
            1.
    """
    used = _models(methods, parts)
    levels: dict[str, HuggingFaceLevel] = {TARGET: parts.target}
    levels |= {name: parts.apart(name) for name in used}
    times = pass_seconds(list(levels.values()), WIDTHS, limit=2.0, clock=_clock(parts))
    baseline = next(call for call in calls if call.method.baseline)
    texts = {
        n: baseline.texts(Request([prompt], max_new_tokens, 0.0, [seed]))[0]
        for n, prompt in enumerate(prompts)
    }
    model, overlaps = parts.eager.model, {}
    for name in used:
        other = levels[name].model
        if other.config.vocab_size == model.config.vocab_size:
            overlaps[name] = chains.overlap(model, other, list(prompts), texts)
    clock: Any = timing.CpuClock() if parts.on_cpu else timing.CudaClock()
    return {
        "pass_seconds": {
            name: {str(width): value for width, value in own.items()}
            for name, own in zip(levels, times, strict=True)
        },
        "overlap": overlaps,
        "weight_bytes": {name: weight_bytes(level.model) for name, level in levels.items()},
        "copy_bandwidth_bytes_per_second": 1e9
        * timing.copy_bandwidth(clock, "cpu" if parts.on_cpu else "cuda"),
    }


def _clock(parts: Parts) -> Callable[[], float] | None:
    """Of passes; on CUDA they are over when the device is."""
    if parts.on_cpu:
        return None

    def clock() -> float:
        torch.cuda.synchronize(parts.device)
        return time.perf_counter()

    return clock


def _models(methods: Sequence[Method], parts: Parts) -> list[str]:
    names = [name for method in methods for name in method.levels[1:]]
    known = [W4, *parts.places.models]
    return [name for name in known if name in names]
