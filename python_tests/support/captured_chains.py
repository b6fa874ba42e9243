"""Chains of small models with captured steps, and the same chains without."""

from typing import Any

from recorder import Recorder, on_a_device
from small_models import llama

import polyspec_ext as ps
from polyspec_ext.levels.hugging_face import HuggingFaceLevel
from polyspec_ext.runtime.graphs import Graphs


def level(seed, layers, name, device=False, *, capacity=256, bucket=32, **config) -> Any:
    """`device`: its caches are written as on CUDA."""
    model = llama(seed, layers, 40, **{"max_position_embeddings": 256, **config})
    if not device:
        return HuggingFaceLevel(model, name=name, bucket=bucket, capacity=capacity)

    def cache(rows: int) -> Any:
        return on_a_device(model, rows, bucket=bucket, capacity=capacity)

    return HuggingFaceLevel(model, name=name, new_cache=cache)


def make(window, captured, recorder=None, policy=None, tail=0, graphs=None, **config):
    """`captured`: rounds without host synchronisation, with graphs; else step by step, without."""
    count = len(window) + 1
    levels = [level(i, 3 - min(i, 2), f"level {i}", captured, **config) for i in range(count)]
    options: dict[str, Any] = {"policy": policy, "tail": tail}
    if not captured:
        return ps.Chain(levels, window, **options), None
    if graphs is None:
        graphs = Graphs(recorder or Recorder())
    chain = ps.Chain(levels, window, graphs=graphs, sync_each_step=False, **options)
    assert chain.engine.graphs is graphs
    return chain, graphs


def models(chain: ps.Chain) -> list[Any]:
    return [*chain.levels, chain.drafter.level]


PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]]
