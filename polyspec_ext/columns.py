"""Tables and Markdown for terminals of a fixed width."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

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
