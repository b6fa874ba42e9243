"""Tables as data, and as Markdown, CSV and HTML."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from polyspec_ext.bench import output

from .statistics import Interval

Record = Mapping[str, Any]


class Column(NamedTuple):
    """What a table shows of its records.

    Attributes:
        head: above it.
        text: of a record.
        words: whether it has words and no numbers.
        ratio: key of a ratio of rates, which is marked where it is below 1.
    """

    head: str
    text: Callable[[Record], str]
    words: bool = False
    ratio: str | None = None


class Table(NamedTuple):
    """Records of numbers and words, and how they are shown.

    Attributes:
        key: part of the name of its file.
        title, note: of the report.
        columns: in order.
        records: all with the same keys, in the same order.
    """

    key: str
    title: str
    note: str
    columns: Sequence[Column]
    records: Sequence[Record]

    def data(self) -> dict[str, Any]:
        """For JSON."""
        return {"title": self.title, "note": self.note, "records": [dict(r) for r in self.records]}

    def markdown(self) -> str:
        """Heading, note and table."""
        heads = [column.head for column in self.columns]
        rows = (
            [column.text(record).replace("|", "\\|") for column in self.columns]
            for record in self.records
        )
        numbers = [at for at, column in enumerate(self.columns) if not column.words]
        table = output.table(heads, rows, numbers)
        return "\n".join([f"### {self.title}", "", self.note, "", *table]) + "\n"

    def csv(self) -> str:
        """The records, numbers in full; what is None is empty."""
        file = io.StringIO()
        writer = csv.DictWriter(file, list(self.records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.records)
        return file.getvalue()

    def html(self) -> str:
        """The table in a box that scrolls sideways where it is too wide."""
        head = "".join(
            f'<th scope="col"{_class(words=column.words)}>{html.escape(column.head)}</th>'
            for column in self.columns
        )
        rows = "".join(
            "<tr>" + "".join(_cell(column, record) for column in self.columns) + "</tr>"
            for record in self.records
        )
        return (
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{rows}</tbody></table></div>"
        )


def _cell(column: Column, record: Record) -> str:
    text = html.escape(column.text(record))
    if column.words:
        text = f"<div>{text}</div>"
    value = None if column.ratio is None else record[column.ratio]
    loses = value is not None and value < 1
    return f"<td{_class(words=column.words, loses=loses)}>{text}</td>"


def _class(**names: bool) -> str:
    shown = " ".join(name for name, has in names.items() if has)
    return f' class="{shown}"' if shown else ""


def word(head: str, key: str) -> Column:
    """Shows one word of a record."""

    def text(record: Record) -> str:
        return "-" if record[key] in (None, "") else str(record[key])

    return Column(head, text, words=True)


def number(
    head: str,
    key: str,
    digits: int = 2,
    scale: float = 1,
    *,
    ratio: bool = False,
    paper: str | None = None,
) -> Column:
    """Shows one number of a record, with ``key_low`` and ``key_high`` where these are.

    Args:
        ratio: whether it is one of rates.
        paper: key of the number that the paper prints there, which stands behind in brackets.
    """

    def text(record: Record) -> str:
        shown = shown_number(record, key, digits, scale)
        printed = None if paper is None else record[paper]
        return shown if printed is None else f"{shown} (paper {printed:.2f})"

    return Column(head, text, ratio=key if ratio else None)


def shown_number(record: Record, key: str, digits: int = 2, scale: float = 1) -> str:
    """One number of a record, with its bounds in brackets; "-" where there is none."""
    form = f".{digits}f"
    value, low, high = (record.get(name) for name in (key, f"{key}_low", f"{key}_high"))
    shown = output.number(None if value is None else scale * value, form)
    return shown if low is None else f"{shown} [{low:{form}}, {high:{form}}]"


def spread(key: str, value: Interval | None) -> dict[str, Any]:
    """A value and its bounds as entries of a record, which `number` shows."""
    names = (key, f"{key}_low", f"{key}_high")
    return dict(zip(names, value or (None, None, None), strict=True))
