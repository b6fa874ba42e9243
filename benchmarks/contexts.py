"""Chains after long texts: a 4-bit copy in the target's cache that reads all keys, or the first and
the last keys alone, beside prompt lookup and plain decoding, in turns.

``python -m benchmarks.contexts --target MODEL --text FILE --lengths 4000 8000`` prints a table.
"""

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
from polyspec_ext.errors import PolyspecError

NEAR = {"window": 2048, "sinks": 4}
HEADS = ("chain", "ms a token", "x plain", "accepted", "tokens a verification")
MOST = 9  # tokens of a round
_TURNS = 2


def chains(target: Any, group: int) -> dict[str, ps.Chain]:
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


def run(args: argparse.Namespace) -> None:
    """Print a table for each length of prompts. Refuses too few tokens (PolyspecError)."""
    level = load_level(args.target, name="--target")
    ids = level.tokenizer()(args.text.read_text(encoding="utf-8"))["input_ids"]
    known, apart = chains(level, args.group_size), len(ids) // args.texts
    if apart < max(args.lengths):
        needed = args.texts * max(args.lengths)
        raise PolyspecError(f"--text: expected {needed} tokens or more, given {len(ids)}")
    if (new := args.max_new_tokens) <= MOST:
        raise PolyspecError(f"--max-new-tokens: expected more than a round's {MOST}, given {new}")
    machine = output.describe("cpu")
    for length in args.lengths:
        prompts = [ids[i * apart : i * apart + length] for i in range(args.texts)]
        print(f"{length} tokens, {machine['cpu']}, {machine['threads']} threads\n")
        print("\n".join(output.table(HEADS, compare(known, prompts, args.max_new_tokens))))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--target", required=True, help="folder or GGUF file")
    made.add_argument("--text", required=True, type=Path, help="a long text, as of a book")
    made.add_argument("--lengths", type=int, nargs="+", default=[4000, 8000], help="of prompts")
    made.add_argument("--texts", type=int, default=2, help="prompts of each length")
    made.add_argument("--max-new-tokens", type=int, default=48)
    made.add_argument("--group-size", type=int, default=64)
    made.set_defaults(run=run)
    return made


if __name__ == "__main__":
    given = parser().parse_args()
    given.run(given)
