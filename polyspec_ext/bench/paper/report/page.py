"""The parts of a report as Markdown, and as one static page that is readable without a network."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .form import Table

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5b6675; --line: #d5dae1;
  --paper: #ffffff; --shade: #f4f6f9; --bad: #a3341f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --soft: #9aa5b3; --line: #39424e;
  --paper: #14181e; --shade: #1d232b; --bad: #ff9a83; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem clamp(0.8rem, 3vw, 2.5rem) 4rem; max-width: 90rem;
  color: var(--ink); background: var(--paper); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 0.3rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 0.5rem; padding-top: 1rem;
  border-top: 2px solid var(--line); overflow-wrap: anywhere; }
h3 { font-size: 1.02rem; margin: 1.8rem 0 0.3rem; }
p { margin: 0.3rem 0 0.6rem; max-width: 75ch; color: var(--soft); overflow-wrap: anywhere; }
nav ul { display: flex; flex-wrap: wrap; gap: 0.2rem 1.1rem; padding: 0; margin: 0.6rem 0;
  list-style: none; }
a { color: inherit; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-size: 0.86rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: 0.32rem 0.6rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th { font-weight: 600; background: var(--shade); vertical-align: bottom; }
th.words, td.words { text-align: left; }
td.words div { width: max-content; max-width: min(20rem, 60vw); white-space: normal; }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--paper); }
th:first-child { background: var(--shade); }
td:first-child div { max-width: min(16rem, 34vw); }
tbody tr:last-child td { border-bottom: 0; }
td.loses { color: var(--bad); }
figure { margin: 1rem 0; padding: 0.6rem; background: #ffffff; border: 1px solid var(--line);
  border-radius: 6px; width: fit-content; max-width: 100%; }
figure img { display: block; max-width: 100%; height: auto; }
figcaption { color: #5b6675; font-size: 0.82rem; }
details { margin: 1rem 0; }
summary { cursor: pointer; font-weight: 600; }
pre { overflow-x: auto; padding: 0.8rem; background: var(--shade); border-radius: 6px;
  font-size: 0.8rem; }
"""
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

    def html(self, name: str) -> str:
        """The part with `name` as its id."""
        shown = [
            f"<h3>{html.escape(table.title)}</h3><p>{html.escape(table.note)}</p>\n{table.html()}"
            for table in self.tables
        ]
        pictures = [_figure(_caption(name), data) for name, data in self.figures.items()]
        lines = [f'<section id="{name}">', f"<h2>{html.escape(self.title)}</h2>"]
        lines += [f"<p>{html.escape(self.note)}</p>", *shown[:1], *pictures, *shown[1:]]
        if self.facts is not None:
            lines.append(
                "<details><summary>Settings, machine and versions</summary>"
                f"<pre>{html.escape(self.facts)}</pre></details>"
            )
        return "\n".join([*lines, "</section>"])


def _caption(figure: str) -> str:
    """Of a figure's name, which may have a number behind it."""
    return _CAPTIONS[figure.partition("-")[0]]


def _figure(caption: str, picture: bytes) -> str:
    data = base64.b64encode(picture).decode("ascii")
    return (
        f'<figure><img alt="{html.escape(caption, quote=True)}" '
        f'src="data:image/png;base64,{data}"><figcaption>{html.escape(caption)}</figcaption>'
        "</figure>"
    )


def page(title: str, note: str, sections: Sequence[Section]) -> str:
    """The page as HTML."""
    parts = [section.html(f"part{at}") for at, section in enumerate(sections)]
    links = "".join(
        f'<li><a href="#part{at}">{html.escape(section.title)}</a></li>'
        for at, section in enumerate(sections)
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n<p>{html.escape(note)}</p>\n"
        f'<nav aria-label="Parts"><ul>{links}</ul></nav>\n<main>\n'
        + "\n".join(parts)
        + "\n</main>\n</body>\n</html>\n"
    )
