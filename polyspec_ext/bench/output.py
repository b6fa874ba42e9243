"""How a benchmark puts out its report: tables in Markdown, JSON on standard output and in files."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[int] = ()
) -> list[str]:
    """The lines of a Markdown table.

    Args:
        heads: of the columns.
        rows: cells, as many as heads.
        numbers: columns, from 0, that are aligned to the right.
    """
    marks = ["---:" if column in numbers else "---" for column in range(len(heads))]
    return [_line(heads), "|" + "|".join(marks) + "|", *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def number(value: float | None, form: str) -> str:
    """A value in the format `form`; "-" where there is none."""
    return "-" if value is None else format(value, form)


def token_count(count: int) -> str:
    """ "1 token", "2 tokens"."""
    return f"{count} token{'s' * (count > 1)}"


def show(
    report: dict[str, Any],
    markdown: Callable[[dict[str, Any]], str],
    *,
    as_json: bool,
    json_file: str | None = None,
) -> None:
    """Prints a report as JSON or as Markdown; writes the JSON to `json_file` as well."""
    text = json.dumps(report, indent=1)
    if json_file:
        Path(json_file).write_text(text + "\n", encoding="utf-8")
    print(text if as_json else markdown(report))


def replace_file(path: Path, text: str) -> None:
    """Whoever reads or stops at whatever moment finds the old text or the new one."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
