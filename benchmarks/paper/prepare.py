"""What is found out before a run: windows and predictions of the planner, what passes cost, how
often the levels agree with the target, and what memory gives."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks import chains, timing
from benchmarks.generation_calls import Request
from benchmarks.measuring import device_clock
from benchmarks.weights import weight_bytes
from polyspec_ext.planning.planner import plan
from polyspec_ext.tuning import pass_seconds

from .methods import CASCADE, COMPILED, PLANNED, Call, Method
from .parts import TARGET, W4, Parts

_PREDICTED = ("chain", "eagle", PLANNED)
_KINDS = (*_PREDICTED, "adaptive")  # which have windows of the planner's
_COMPILED = ("chain", "eagle", "adaptive", CASCADE)  # where anything is
WIDTHS = (1, 4, 8, 12, 16)  # tokens of the passes that are timed
_TEXTS = 6  # that the overlap is read off
_FIRST_TOKENS = 8  # of a method's first call


def models(methods: Sequence[Method], parts: Parts) -> list[str]:
    """Names of the models below the target that methods have."""
    names = {name for method in methods for name in method.levels[1:]}
    return [name for name in (W4, *parts.places.models) if name in names]


def compiled(
    methods: Sequence[Method], parts: Parts, prompts: list[list[int]], temperature: float
) -> None:
    """A first call of every chain, by which each kind of pass is compiled; where nothing is, none.
    What fails here fails again, and is recorded, where it counts."""
    if not (parts.compile and parts.on_cpu):
        return
    for method in methods:
        if method.name == COMPILED or method.kind in _COMPILED:
            call = Call(method, parts)
            with contextlib.suppress(Exception):
                call.answer(Request(prompts, _FIRST_TOKENS, temperature, [0] * len(prompts)))


def planned(
    methods: Sequence[Method],
    parts: Parts,
    prompts: Sequence[list[int]],
    asked: argparse.Namespace,
) -> tuple[list[Method], dict[str, dict[str, Any]]]:
    """Plans once for all levels of the methods: chains of models, heads and other drafters.
    Cascades keep their windows; a chain's policy begins with the windows of that chain, and the
    window of a head's trees is their depth.

    Args:
        prompts: such as will be asked.
        asked: ``max_new_tokens``, ``temperature``, ``batch``, the prompts of a call, and
            ``plan_seconds`` that the planner may measure. What is compiled has been before
            (`compiled`).

    Returns:
        The methods with the windows that the planner found for them; and what it predicts, by key:
        tokens per second of decoding, and windows.
    """
    known = [TARGET, W4, *parts.places.models, *parts.places.drafters]
    some = [method for method in methods if method.kind in _KINDS]
    if not some:
        return list(methods), {}
    names = [name for name in known if any(name in method.levels for method in some)]
    found = plan(
        [parts.thing(name) for name in names],
        [list(prompt) for prompt in prompts],
        asked.max_new_tokens,
        asked.temperature,
        batch=asked.batch,
        pack=False,
        seconds=asked.plan_seconds,
    )
    # The planner puts levels in order by their times, which may not be ours.
    by_levels = {frozenset(one.levels): one for one in found.candidates}
    made, prediction = [], {}
    for method in methods:
        one = by_levels.get(frozenset(method.levels))
        if method.kind == PLANNED:
            one = found.recommended
            label = f"planned: {' <- '.join(one.levels)}"
            shape = parts.places.tree_of(one.levels[-1])
            tree = None if shape is None else shape._asdict()
            method = replace(method, label=label, levels=tuple(one.levels), tree=tree)
        if one is not None and method.kind in _KINDS:
            tree = None if method.tree is None else {**method.tree, "depth": one.windows[-1]}
            windows, rounds = tuple(one.windows), tuple(one.rounds)
            method = replace(
                method, windows=windows, rounds=rounds, rule=one.rule, tail=one.tail, tree=tree
            )
        if one is not None and (method.baseline or method.kind in _PREDICTED):
            prediction[method.name] = {
                "tokens_per_second": one.predicted_decode_tokens_per_second,
                "windows": list(one.windows),
            }
        made.append(method)
    return made, prediction


def surroundings(
    calls: Sequence[Call], parts: Parts, prompts: Sequence[list[int]], asked: argparse.Namespace
) -> dict[str, Any]:
    """Seconds of passes, overlap with the target, bytes of weights and copy bandwidth, as
    ``run.json`` has them.

    Args:
        calls: of all methods.
        prompts: a few, the tasks in turns; the overlap is that along the baseline's texts behind
            the first of them, at temperature 1.
        asked: ``max_new_tokens`` and ``seed`` of these.
    """
    used = models([call.method for call in calls], parts)
    levels = {TARGET: parts.target, **{name: parts.apart(name) for name in used}}
    device = "cpu" if parts.on_cpu else "cuda"
    # (On the CPU it is the measurement's own choice.)
    clock = None if parts.on_cpu else device_clock(torch.device(parts.device))
    times = pass_seconds(list(levels.values()), WIDTHS, limit=2.0, clock=clock)
    baseline = next(call for call in calls if call.method.baseline)
    texts = {
        n: baseline.answer(Request([prompt], asked.max_new_tokens, 0.0, [asked.seed])).texts[0]
        for n, prompt in enumerate(prompts[:_TEXTS])
    }
    model = parts.eager.model
    others = {name: levels[name].model for name in used}
    vocab = model.config.vocab_size
    others = {name: other for name, other in others.items() if other.config.vocab_size == vocab}
    copying: timing.Clock = timing.CpuClock() if parts.on_cpu else timing.CudaClock()
    return {
        "pass_seconds": {
            name: {str(width): value for width, value in own.items()}
            for name, own in zip(levels, times, strict=True)
        },
        "overlap": chains.overlaps(model, others, list(prompts[:_TEXTS]), texts),
        "weight_bytes": {name: weight_bytes(level.model) for name, level in levels.items()},
        "copy_bandwidth_bytes_per_second": 1e9 * timing.copy_bandwidth(copying, device),
    }
