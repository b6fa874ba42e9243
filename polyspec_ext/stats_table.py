"""Statistics as a table for people, at most 100 columns wide."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .stats import LevelStats, Stats

WIDTH = 100
_NAME = 20  # columns of a level's name
_POSITIONS = 14  # positions that fit in a line


def table(stats: Stats) -> str:
    """A summary line, a line per level, and acceptance by position where anything was judged."""
    lines = [*_summary(stats), "", *_levels(stats)]
    judged = [(n, level) for n, level in enumerate(stats.levels, 1) if level.num_drafts]
    if judged:
        lines += ["", *_positions(judged)]
    return "\n".join(lines)


def _summary(stats: Stats) -> list[str]:
    several = "" if stats.num_requests == 1 else f"{stats.num_requests} requests, "
    spent = stats.decode_seconds
    rate = "-" if math.isnan(stats.tokens_per_second) else f"{stats.tokens_per_second:.1f}"
    outside = f"{stats.overhead_seconds * 1e3:.1f} ms ({_percent(stats.overhead_seconds, spent)} %)"
    return [
        f"{several}{stats.num_prompt_tokens} prompt tokens, {stats.num_new_tokens} new tokens, "
        f"{rate} tokens/s",
        f"prefill {stats.prefill_seconds * 1e3:.1f} ms, decoding {spent * 1e3:.1f} ms, of which "
        f"{outside} outside the levels",
    ]


def _levels(stats: Stats) -> list[str]:
    heads = ("passes", "ms/pass", "time %", "drafts", "drafted", "accepted", "rate", "mean length")
    widths = [max(7, len(head)) for head in heads]
    lines = [_line("level", heads, widths)]
    for number, level in enumerate(stats.levels, 1):
        passes = level.num_forward_passes
        cells = [
            str(passes),
            f"{level.seconds / passes * 1e3:.2f}" if passes else "-",
            _percent(level.seconds, stats.decode_seconds),
        ]
        if level.num_drafts:
            cells += [
                str(level.num_drafts),
                str(level.num_draft_tokens),
                str(level.num_accepted_tokens),
                f"{level.draft_acceptance_rate:.2f}",
                f"{level.mean_acceptance_length:.2f}",
            ]
        elif level.num_proposed_tokens:
            cells += ["", str(level.num_proposed_tokens)]
        lines.append(_line(f"{number} {level.name}", cells, widths))
    return lines


def _positions(judged: Sequence[tuple[int, LevelStats]]) -> list[str]:
    longest = max(len(level.num_draft_tokens_per_pos) for _, level in judged)
    shown = min(longest, _POSITIONS)
    widths = [4] * shown
    more = f" (the first {shown} of {longest})" if longest > shown else ""
    lines = [
        f"accepted, in % of the blocks that had a token there{more}",
        _line("at position", [str(i + 1) for i in range(shown)], widths),
    ]
    for number, level in judged:
        rates = level.draft_acceptance_rate_per_pos[:shown]
        lines.append(_line(f"{number} {level.name}", [f"{100 * r:.0f}" for r in rates], widths))
    return lines


def _line(name: str, cells: Sequence[str], widths: Sequence[int]) -> str:
    if len(name) > _NAME:
        name = name[: _NAME - 3] + "..."
    padded = (cell.rjust(width) for cell, width in zip(cells, widths, strict=False))
    return (name.ljust(_NAME + 2) + " ".join(padded)).rstrip()


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}" if whole > 0 else "-"
