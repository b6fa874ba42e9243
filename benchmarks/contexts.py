"""Chains after long texts: a 4-bit copy in the target's cache that reads all keys, or the first and
the last keys alone, beside prompt lookup and plain decoding, in turns."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import polyspec_ext as ps
from benchmarks import measuring, output
from benchmarks.methods import load_level
from polyspec_ext.cli import options
from polyspec_ext.errors import PolyspecError

NEAR = {"window": 2048, "sinks": 4}
HEADS = ("chain", "ms a token", "x plain", "accepted", "tokens a verification")
MOST = 9  # tokens of a round
_TURNS, _TEXTS = 2, 2  # of each prompt, and prompts of each length


def chains(target: Any, group: int = 64) -> dict[str, ps.Chain]:
    """Return the chains by name, plain decoding first."""
    copies = {
        name: ps.HuggingFaceLevel(
            ps.quantize_w4(target.model, group_size=group),
            shares_cache_with=target,
            streaming=near,
            pack=True,
            name=name,
        )
        for name, near in (("copy", None), (f"copy, last {NEAR['window']:,} keys", NEAR))
    }
    lookup = "prompt-lookup"
    below: dict[str, tuple[list[Any], list[int]]] = {
        "plain decoding": ([], []),
        f"{lookup} (6)": ([lookup], [6]),
        **{f"{name} (6)": ([copy], [6]) for name, copy in copies.items()},
        **{f"{name}, {lookup} (8, 4)": ([copy, lookup], [8, 4]) for name, copy in copies.items()},
    }
    return {name: ps.Chain([target, *levels], window) for name, (levels, window) in below.items()}


def decode(chain: ps.Chain, prompt: Sequence[int], count: int) -> tuple[list[int], float, Any]:
    """Return the greedy text, milliseconds a token after the first round, and statistics."""
    stream = chain.stream([*prompt], count, temperature=0.0, eos_token_id=[], cache_prompt=True)
    text, ticks = [], []
    for token in stream:
        text.append(int(token))
        ticks.append(time.perf_counter())
    first = sum(tick - ticks[0] < 1e-3 for tick in ticks)  # tokens of a round come at once
    return text, 1e3 * (ticks[-1] - ticks[0]) / (count - first), stream.stats.levels[0]


def compare(
    of: dict[str, ps.Chain], prompts: Sequence[Sequence[int]], count: int
) -> list[tuple[str, ...]]:
    """Return the rows of a table by `HEADS`. Raises RuntimeError where texts differ."""
    results: dict[str, list[Any]] = {name: [] for name in of}
    now: list[Sequence[int]] = []

    def load(turn: int) -> None:
        now[:] = [prompts[turn // _TURNS]]

    def call(name: str) -> float:
        result = decode(of[name], now[0], count)
        results[name].append(result)
        return result[1]

    timed = [measuring.Contender(name, partial(call, name)) for name in of]
    calls = measuring.turns(timed, _TURNS * len(prompts), measuring.Clock(None), load, 0)
    for _ in measuring.required(calls):
        pass
    for texts in zip(*([text for text, *_ in rows] for rows in results.values()), strict=True):
        if (different := len(set(map(tuple, texts)))) > 1:
            raise RuntimeError(f"expected plain decoding's text of all chains, given {different}")
    spent = [np.reshape(one.seconds, (-1, _TURNS)).min(1).mean() for one in timed]
    rows: list[tuple[str, ...]] = []
    for name, mean in zip(of, spent, strict=True):
        levels = [stats for *_, stats in results[name]]
        drafted, accepted, passes = (
            sum(getattr(level, field) for level in levels)
            for field in ("num_draft_tokens", "num_accepted_tokens", "num_forward_passes")
        )
        share, per_pass = accepted / drafted if drafted else None, count * len(levels) / passes
        numbers = f"{mean:.1f}", f"{spent[0] / mean:.2f}", output.number(share, ".2f")
        rows.append((name, *numbers, f"{per_pass:.2f}"))
    return rows


def report_of(args: argparse.Namespace) -> dict[str, Any]:
    """Measure; return the JSON report. Refuses too few tokens (PolyspecError)."""
    level = load_level(args.target, name="--target")
    ids = level.tokenizer()(args.text.read_text(encoding="utf-8"))["input_ids"]
    known, apart = chains(level), len(ids) // _TEXTS
    if apart < max(args.lengths):
        needed = _TEXTS * max(args.lengths)
        raise PolyspecError(f"--text: expected {needed} tokens or more, given {len(ids)}")
    if (new := args.max_new_tokens) <= MOST:
        raise PolyspecError(f"--max-new-tokens: expected more than a round's {MOST}, given {new}")
    report = output.header("contexts", 1)
    starts = range(0, _TEXTS * apart, apart)
    report["lengths"] = {
        length: compare(known, [ids[start : start + length] for start in starts], new)
        for length in args.lengths
    }
    return report


def markdown(report: dict[str, Any]) -> str:
    """Return a table for each length of prompts."""
    lines = [f"{report['machine']['cpu']}, {output.conditions(report)}."]
    for length, rows in report["lengths"].items():
        lines += ["", f"After {length} tokens:", "", *output.table(HEADS, rows)]
    return "\n".join(lines)


OPTIONS = (
    ("--target", {"required": True}, None, "MODEL", "folder or GGUF file"),
    ("--text", {"required": True, "type": Path}, None, "FILE", "a long text"),
    ("--lengths", options.COUNTS, [4000, 8000], "N,...", "tokens of prompts"),
    ("--max-new-tokens", options.COUNT, 48, "N", "of a text"),
)
