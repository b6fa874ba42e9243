"""The parts of a report as Markdown, and as one static page that is readable without a network."""

from __future__ import annotations

import base64
import importlib.resources
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jinja2 import StrictUndefined, Template

from .form import Table

_CAPTIONS = {
    "figure2": "Overall speedup of every method (Figure 2)",
    "figure3": "Speedup by task (Figure 3)",
    "figure4": "Variance of the acceptance length by query (Figure 4)",
}


class Section(NamedTuple):
    """A part of a report.

    Attributes:
        title, note: its heading, and what stands below it.
        tables: the main one first; figures stand behind that.
        figures: PNG by the name of the file, without its suffix.
        facts: settings and machine, shown when asked for.
        prefix: of the names of its files.
    """

    title: str
    note: str
    tables: Sequence[Table]
    figures: Mapping[str, bytes]
    facts: str | None = None
    prefix: str = ""

    def markdown(self) -> list[str]:
        """Its lines."""
        shown = [table.markdown() for table in self.tables]
        pictures = [f"![{_caption(name)}]({self.prefix}{name}.png)\n" for name in self.figures]
        return [f"## {self.title}", "", self.note, "", *shown[:1], *pictures, *shown[1:]]

    @property
    def pictures(self) -> list[tuple[str, str]]:
        """Captions, and the figures in base64."""
        coded = ((name, base64.b64encode(data)) for name, data in self.figures.items())
        return [(_caption(name), data.decode("ascii")) for name, data in coded]


def _caption(figure: str) -> str:
    """Of a figure's name, which may have a number behind it."""
    return _CAPTIONS[figure.partition("-")[0]]


def page(title: str, note: str, sections: Sequence[Section]) -> str:
    """The page as HTML."""
    text = importlib.resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    template = Template(text, autoescape=True, trim_blocks=True, undefined=StrictUndefined)
    return str(template.render(title=title, note=note, sections=sections))
