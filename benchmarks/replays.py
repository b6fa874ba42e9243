"""Take the replays of captured graphs apart: the kernels of each, their times and the gaps between
them, from a trace of torch's profiler."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

KINDS = ("kernel", "gpu_memcpy", "gpu_memset")


def trace_of(call: Callable[[], object]) -> list[dict[str, Any]]:
    """Return the events of a call as the profiler exports them; times in microseconds."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        call()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(file))
        events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return events


def replays(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the replays of a trace, the longest in total first. Nodes of a graph's launch have one
    correlation; replays with the same nodes in the same order are one row with medians."""
    launches: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in KINDS:
            launches[event["args"]["correlation"]].append(event)
    kinds: dict[tuple[str, ...], list[list[dict[str, Any]]]] = defaultdict(list)
    for nodes in launches.values():
        nodes.sort(key=lambda node: float(node["ts"]))
        if len(nodes) > 1:
            kinds[tuple(node["name"] for node in nodes)].append(nodes)
    rows = []
    for names, same in kinds.items():
        spans = [nodes[-1]["ts"] + nodes[-1]["dur"] - nodes[0]["ts"] for nodes in same]
        times = [statistics.median(column) for column in zip(*map(_durations, same), strict=True)]
        by_name: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        for name, microseconds in zip(names, times, strict=True):
            by_name[name][0] += 1
            by_name[name][1] += microseconds
        span = statistics.median(spans)
        rows.append(
            {
                "replays": len(same),
                "nodes": len(names),
                "us": span,
                "gaps_us": span - sum(times),
                "by_name": dict(sorted(by_name.items(), key=lambda item: -item[1][1])),
            }
        )
    return sorted(rows, key=lambda row: -row["replays"] * row["us"])


def _durations(nodes: list[dict[str, Any]]) -> list[float]:
    return [float(node["dur"]) for node in nodes]
