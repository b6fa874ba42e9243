"""Tables, Markdown and statistics for terminals of a fixed width; tables for notebooks."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from html import escape

from .stats import LevelStats, Stats

WIDTH = 80  # columns of the narrowest terminal that tables fit
_GAP = "  "
_LABEL = 30  # characters of labels that are wrapped beside their cells
_RULE = re.compile(r":?-{3,}:?")  # a cell of the line below a Markdown table's heads

Row = tuple[str, Sequence[str]]  # label and cells


def table(corner: str, heads: Sequence[str], rows: Sequence[Row], width: int = WIDTH) -> str:
    """Return a table of at most `width` characters a line, as far as its cells allow.

    Long labels are wrapped. If cells leave them too little room, labels are on separate lines, and
    if the cells of a row need more than a line, columns become tables below each other. `corner` is
    the head of the labels.
    """
    rows = [(corner, heads), *rows]
    widths = [max(map(len, column)) for column in zip(*(cells for _, cells in rows), strict=True)]
    room = width - sum(len(_GAP) + size for size in widths)
    label = min(max(len(name) for name, _ in rows), room)
    beside = label == max(len(name) for name, _ in rows) or room >= _LABEL
    lines: list[str] = []
    for block in [range(len(heads))] if beside else _blocks(widths, width):
        lines += [""] * bool(lines)
        for name, cells in rows:
            padded = [cells[n].rjust(widths[n]) for n in block]
            if beside:
                first, *rest = textwrap.wrap(name, label, subsequent_indent=_GAP) or [""]
                lines += [_GAP.join([first.ljust(label), *padded]).rstrip(), *rest]
            else:
                lines += textwrap.wrap(name, width, subsequent_indent=_GAP)
                lines += [_GAP.join(["", *padded]).rstrip()] if any(map(str.strip, padded)) else []
    return "\n".join(lines)


def wrapped(text: str, width: int = WIDTH) -> str:
    """Wrap each line to `width` columns, with continuation lines indented."""
    return "\n".join(
        textwrap.fill(
            line, width, subsequent_indent=" " * (len(line) - len(line.lstrip()) + 2 * len(_GAP)),
            break_long_words=False, break_on_hyphens=False,
        )
        for line in text.split("\n")
    )  # fmt: skip


def _blocks(widths: Sequence[int], width: int) -> list[range]:
    """Split the columns into runs that fit."""
    blocks, begin, used = [], 0, 0
    for n, size in enumerate(widths):
        if n > begin and used + len(_GAP) + size > width:
            blocks.append(range(begin, n))
            begin, used = n, 0
        used += len(_GAP) + size
    return [*blocks, range(begin, len(widths))]


def fitted(markdown: str, width: int = WIDTH) -> str:
    """Return Markdown with its tables drawn and its paragraphs wrapped for a terminal."""
    lines: list[str] = []
    rows: list[list[str]] = []
    for line in [*markdown.split("\n"), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip().strip("|").split("|")])
            continue
        if rows:
            marks = next((r for r in rows if all(map(_RULE.fullmatch, r))), None)
            drawn = [(row[0], row[1:]) for row in rows if row is not marks]
            (corner, heads), *rest = drawn
            lines.append(table(corner, heads, rest, width))
            rows = []
        lines += textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) or [""]
    return "\n".join(lines[:-1])


# ---- statistics ----------------------------------------------------------------------------------

STATS_WIDTH = 100
_NAME = 18  # columns of a level's name
_POSITIONS = 14  # positions that fit in a line


def of_stats(stats: Stats) -> str:
    """Format a line per level, then acceptance by position."""
    lines = [*_summary(stats), "", _levels(stats)]
    verified = [(n, level) for n, level in enumerate(stats.levels, 1) if level.num_drafts]
    return "\n".join([*lines, *(["", *_positions(verified)] if verified else [])])


def _summary(stats: Stats) -> list[str]:
    several = "" if stats.num_requests == 1 else f"{stats.num_requests} requests, "
    spent = stats.decode_seconds
    rate = "-" if math.isnan(stats.tokens_per_second) else f"{stats.tokens_per_second:.1f}"
    outside = f"{stats.overhead_seconds * 1e3:.1f} ms ({_percent(stats.overhead_seconds, spent)} %)"
    cached = f" ({stats.num_cached_tokens} in the caches)" if stats.num_cached_tokens else ""
    return [
        f"{several}{stats.num_prompt_tokens} prompt tokens{cached}, "
        f"{stats.num_new_tokens} new tokens, {rate} tokens/s",
        f"prefill {stats.prefill_seconds * 1e3:.1f} ms, decoding {spent * 1e3:.1f} ms, of which "
        f"{outside} outside the levels",
    ]


def _levels(stats: Stats) -> str:
    heads = ("passes", "ms/pass", "time %", "drafts", "drafted", "accepted", "rate", "mean length")
    rows: list[Row] = []
    for number, level in enumerate(stats.levels, 1):
        passes, counts, rates = level.num_forward_passes, [""] * 3, [""] * 2
        mean = f"{level.seconds / passes * 1e3:.2f}" if passes else "-"
        if level.num_drafts:
            numbers = level.num_drafts, level.num_draft_tokens, level.num_accepted_tokens
            shares = level.draft_acceptance_rate, level.mean_acceptance_length
            counts, rates = [*map(str, numbers)], [f"{share:.2f}" for share in shares]
        elif level.num_proposed_tokens:
            counts[1] = str(level.num_proposed_tokens)
        time = _percent(level.seconds, stats.decode_seconds)
        rows.append((_named(number, level), [str(passes), mean, time, *counts, *rates]))
    return table("level", heads, rows, STATS_WIDTH)


def _positions(verified: Sequence[tuple[int, LevelStats]]) -> list[str]:
    longest = max(len(level.num_draft_tokens_per_pos) for _, level in verified)
    shown = min(longest, _POSITIONS)
    note = f" (the first {shown} of {longest})" if longest > shown else ""
    rows: list[Row] = []
    for number, level in verified:
        rates = [f"{100 * rate:.0f}" for rate in level.draft_acceptance_rate_per_pos[:shown]]
        rows.append((_named(number, level), rates + [""] * (shown - len(rates))))
    heads = [str(position + 1) for position in range(shown)]
    title = f"accepted, in % of the blocks that had a token there{note}"
    return [title, table("at position", heads, rows, STATS_WIDTH)]


def _named(number: int, level: LevelStats) -> str:
    name = level.name if len(level.name) <= _NAME else f"{level.name[: _NAME - 3]}..."
    return f"{number} {name}"


def _percent(value: float, whole: float) -> str:
    return f"{100 * value / whole:.1f}" if whole > 0 else "-"


def html(corner: str, heads: Sequence[str], rows: Sequence[Row], above: str = "") -> str:
    """Return a table for notebooks, with a line of text above it."""
    shown = [
        "".join(f"<{cell}>{escape(text)}</{cell}>" for text in (name, *cells))
        for cell, (name, cells) in [("th", (corner, heads)), *(("td", row) for row in rows)]
    ]
    body = "".join(f"<tr>{row}</tr>" for row in shown)
    return f"<p>{escape(above)}</p>" * bool(above) + f"<table>{body}</table>"
