"""Hundreds of calls, three in ten of which fail, leave nothing behind."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from failing import PROMPTS, SAMPLING, Failing, model
from resident import resident_bytes

import polyspec_ext as ps
from polyspec_ext.levels import HuggingFaceLevel


def make(alone: bool = False) -> tuple[ps.Chain, list[HuggingFaceLevel]]:
    """`alone`: rounds of the target without host synchronisation, as on a CUDA device."""
    levels = [HuggingFaceLevel(model(seed, 1), name=f"level {seed}") for seed in range(2)]
    return ps.Chain(levels, [2], sync_each_step=not alone), levels


def living() -> tuple[int, int]:
    """Tensors and all objects that the garbage collector knows."""
    gc.collect()
    objects = gc.get_objects()
    tensors = sum(issubclass(type(thing), torch.Tensor) for thing in objects)
    return tensors, len(objects)


def calls(chain: ps.Chain, levels: list[HuggingFaceLevel], count: int) -> Iterator[str]:
    """Short calls of every kind and what became of them."""
    layer = levels[0].model.model.layers[0]
    forward = layer.forward

    def nan(*args: Any, **options: Any) -> Any:
        return forward(*args, **options) * math.nan

    for i in range(count):
        prompts = PROMPTS[0] if i % 3 else PROMPTS[:2]
        kind = i % 10
        if kind == 2:
            layer.forward = Failing(forward, 1 + i % 4, RuntimeError("fails"))
        elif kind == 4:
            layer.forward = Failing(forward, 1 + i % 4, KeyboardInterrupt())
        elif kind == 6:
            layer.forward = nan
        try:
            if kind == 8:
                next(chain.stream(PROMPTS[1], 4, **SAMPLING))
            else:
                chain.generate(prompts, 3, temperature=float(i % 2), seed=i, eos_token_id=[])
            yield "good"
        except (RuntimeError, KeyboardInterrupt) as error:
            yield type(error).__name__
        finally:
            layer.forward = forward


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize("alone", [False, True], ids=["step by step", "at once"])
def test_hundreds_of_calls_leave_nothing_behind(alone: bool) -> None:
    chain, levels = make(alone)
    list(calls(chain, levels, 60))
    # What the latest call keeps depends on which of its rows left: the same call before each count.
    chain.generate(PROMPTS[0], 3, eos_token_id=[])
    before, memory = living(), resident_bytes()
    seen = list(calls(chain, levels, 300))
    chain.generate(PROMPTS[0], 3, eos_token_id=[])
    after = living()
    assert {kind: seen.count(kind) for kind in sorted(set(seen))} == {
        "KeyboardInterrupt": 30, "RequestError": 30, "RuntimeError": 30, "good": 210
    }  # fmt: skip
    assert after[0] == before[0]
    assert after[1] - before[1] < 60
    assert resident_bytes() - memory < 8 << 20


def test_what_a_leak_looks_like() -> None:
    """The test above would see one tensor per call."""
    chain, levels = make()
    list(calls(chain, levels, 20))
    before = living()
    kept = [chain.generate(PROMPTS[0], 3).sequences for _ in range(10)]
    assert living()[0] - before[0] == len(kept)
