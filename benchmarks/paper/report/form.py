"""Tables as data, and as Markdown and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks import output

from .statistics import Interval


class Cell(NamedTuple):
    """What a row has in one column.

    Attributes:
        values: for JSON and CSV, by key.
        head: above the column; "": it is not shown.
        text: as it is shown.
        words: whether the column has words and no numbers.
        loses: whether it is a ratio of rates below 1.
    """

    values: dict[str, Any]
    head: str = ""
    text: str = ""
    words: bool = False
    loses: bool = False


def hidden(**values: Any) -> Cell:
    """Values that are in JSON and CSV alone."""
    return Cell(values)


def word(head: str, key: str, value: Any) -> Cell:
    """One word or several."""
    return Cell({key: value}, head, "-" if value in (None, "") else str(value), words=True)


def method_cell(name: str, label: str) -> Cell:
    """A method: its label is shown."""
    return Cell({"method": name, "label": label}, "method", label, words=True)


def number(
    head: str,
    key: str,
    value: float | None,
    digits: int = 2,
    scale: float = 1,
    *,
    ratio: bool = False,
) -> Cell:
    """One number, shown times `scale`.

    Args:
        ratio: whether it is one of rates.
    """
    text = output.number(None if value is None else scale * value, f".{digits}f")
    return Cell({key: value}, head, text, loses=ratio and value is not None and value < 1)


def interval(
    head: str,
    key: str,
    value: Interval | None,
    digits: int = 2,
    *,
    ratio: bool = False,
    paper: dict[str, float | None] | None = None,
) -> Cell:
    """A number with its bounds, which have ``_low`` and ``_high`` behind their key.

    Args:
        ratio: whether it is one of rates.
        paper: key and number of what the paper prints there, which stands behind in brackets.
    """
    names = (key, f"{key}_low", f"{key}_high")
    values = dict(zip(names, value or (None, None, None), strict=True))
    text = bounded(value, digits)
    for printed in (paper or {}).values():
        text += "" if printed is None else f" (paper {printed:.2f})"
    loses = ratio and value is not None and value.value < 1
    return Cell({**values, **(paper or {})}, head, text, loses=loses)


def bounded(value: Interval | None, digits: int = 2) -> str:
    """A number with its bounds in brackets, where it has any."""
    if value is None:
        return "-"
    form = f".{digits}f"
    text = format(value.value, form)
    return text if value.low is None else f"{text} [{value.low:{form}}, {value.high:{form}}]"


class Table(NamedTuple):
    """Rows with the same columns, and what is said about them.

    Attributes:
        key: part of the name of its file.
        title, note: of the report.
        rows: in order.
    """

    key: str
    title: str
    note: str
    rows: Sequence[Sequence[Cell]]

    @property
    def records(self) -> list[dict[str, Any]]:
        """The values of every row."""
        return [{k: v for cell in row for k, v in cell.values.items()} for row in self.rows]

    @property
    def shown(self) -> list[list[Cell]]:
        """The cells of the columns that are shown."""
        return [[cell for cell in row if cell.head] for row in self.rows]

    def data(self) -> dict[str, Any]:
        """For JSON."""
        return {"title": self.title, "note": self.note, "records": self.records}

    def markdown(self) -> str:
        """Heading, note and table."""
        shown = self.shown
        heads = [cell.head for cell in shown[0]]
        rows = ([cell.text.replace("|", "\\|") for cell in row] for row in shown)
        table = output.table(heads, rows, [at for at, c in enumerate(shown[0]) if not c.words])
        return "\n".join([f"### {self.title}", "", self.note, "", *table]) + "\n"

    def csv(self) -> str:
        """The records, numbers in full; what is None is empty."""
        file = io.StringIO()
        writer = csv.DictWriter(file, list(self.records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.records)
        return file.getvalue()
