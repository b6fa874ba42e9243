"""Tables as data, and as Markdown, CSV and HTML."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyspec_ext.bench import output

Record = Mapping[str, Any]
NONE = "-"


@dataclass(frozen=True)
class Column:
    """What a table shows of its records.

    Args:
        head: above it.
        text: of a record.
        words: whether it has words and no numbers.
        loses: whether a record is worse there than plain decoding.
    """

    head: str
    text: Callable[[Record], str]
    words: bool = False
    loses: Callable[[Record], bool] = lambda record: False


@dataclass(frozen=True)
class Table:
    """Records of numbers and words, and how they are shown.

    Args:
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
        if not self.records:
            return ""
        file = io.StringIO()
        writer = csv.DictWriter(file, list(self.records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.records)
        return file.getvalue()

    def html(self) -> str:
        """The table in a box that scrolls sideways where it is too wide."""
        head = "".join(
            f'<th scope="col"{_class(column.words)}>{html.escape(column.head)}</th>'
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


def _class(words: bool, loses: bool = False) -> str:
    names = ["words"] * words + ["loses"] * loses
    return f' class="{" ".join(names)}"' if names else ""


def _cell(column: Column, record: Record) -> str:
    text = html.escape(column.text(record))
    if column.words:
        text = f"<div>{text}</div>"
    return f"<td{_class(column.words, column.loses(record))}>{text}</td>"


def number(key: str, digits: int = 2, scale: float = 1) -> Callable[[Record], str]:
    """Shows one number of a record."""

    def text(record: Record) -> str:
        value = record[key]
        return NONE if value is None else f"{scale * value:.{digits}f}"

    return text


def word(key: str) -> Callable[[Record], str]:
    """Shows one word of a record."""

    def text(record: Record) -> str:
        value = record[key]
        return NONE if value is None or value == "" else str(value)

    return text


def interval(key: str, digits: int = 2) -> Callable[[Record], str]:
    """Shows ``key`` with ``key_low`` and ``key_high``, where these are."""
    only, low, high = (number(name, digits) for name in (key, f"{key}_low", f"{key}_high"))

    def text(record: Record) -> str:
        if record[f"{key}_low"] is None:
            return only(record)
        return f"{only(record)} [{low(record)}, {high(record)}]"

    return text


def beside(shown: Callable[[Record], str], key: str) -> Callable[[Record], str]:
    """Shows something, and in brackets the number that the paper prints there, if one."""

    def text(record: Record) -> str:
        paper = record[key]
        return shown(record) + ("" if paper is None else f" (paper {paper:.2f})")

    return text


def below_one(key: str) -> Callable[[Record], bool]:
    """Whether a ratio is below 1."""

    def loses(record: Record) -> bool:
        return record[key] is not None and record[key] < 1

    return loses
