"""A run on one screen."""

from __future__ import annotations

from collections.abc import Sequence

from polyspec_ext.bench.paper.record import Run, Turn


def rate(turns: Sequence[Turn]) -> float | None:
    """New tokens per second over turns, prefill included; None without one."""
    seconds = sum(turn.seconds or 0.0 for turn in turns)
    return sum(turn.new_tokens or 0 for turn in turns) / seconds if seconds else None


def accepted_length(turns: Sequence[Turn]) -> float | None:
    """Mean tokens per verification of the target, over all of them; None where there is none."""
    counts = [count for turn in turns if turn.levels for count in turn.levels[0].accepted]
    return sum(counts) / len(counts) if counts else None


def table(run: Run) -> str:
    """A line per method: tokens per second, over the baseline's on the same turns, mean accepted
    length, and how many texts are the baseline's own."""
    ok = [turn for turn in run.turns if turn.ok]
    base = {
        (turn.question_id, turn.turn, turn.repeat): turn
        for turn in ok
        if turn.method == run.baseline
    }
    width = max(len(method["label"]) for method in run.methods)
    lines = [f"{'method':{width}}  tokens/s  x baseline  length  identical  failed"]
    for method in run.methods:
        own = [turn for turn in ok if turn.method == method["name"]]
        both = [turn for turn in own if (turn.question_id, turn.turn, turn.repeat) in base]
        same = [base[turn.question_id, turn.turn, turn.repeat] for turn in both]
        failed = sum(turn.method == method["name"] and not turn.ok for turn in run.turns)
        speed, other = rate(both), rate(same)
        over = speed / other if speed and other else None
        known = [t.lossless["identical"] for t in own if t.lossless and "identical" in t.lossless]
        cells = [
            _shown(rate(own), 8, 1),
            _shown(over, 10, 2),
            _shown(accepted_length(own), 6, 2),
            f"{f'{sum(known)} of {len(known)}' if known else '-':>9}",
            f"{failed:6d}",
        ]
        lines.append(f"{method['label']:{width}}  {'  '.join(cells)}")
    return "\n".join(lines)


def _shown(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"
