"""What `benchmarks report` writes: files that say the same, and a page that needs nothing else."""

from __future__ import annotations

import csv
import html.parser
import json
import struct
from pathlib import Path
from typing import Any

import bench_runs as runs
import pytest

from benchmarks import plot
from benchmarks.__main__ import main
from benchmarks.paper import report

VOID = {"meta", "img", "br", "hr", "link", "input", "source"}


class Page(html.parser.HTMLParser):
    """Checks that elements are closed in order, and keeps what refers to something."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    about = runs.facts(0.0, place="lmsys/vicuna-7b-v1.3")
    about["machine"]["device_name"] = "a <script>alert(1)</script> & processor"
    place = runs.save(tmp_path_factory.mktemp("run"), about, runs.lines(about, seed=4))
    assert main(["report", str(place)]) == 0
    return place


def records_of(folder: Path) -> dict[str, list[dict[str, Any]]]:
    whole = json.loads((folder / "report.json").read_text())
    tables = dict(whole["several"])
    for run in whole["runs"]:
        tables |= run["tables"]
    return {key: table["records"] for key, table in tables.items()}


def test_csv_and_json_hold_the_same(folder: Path) -> None:
    tables = records_of(folder)
    assert {path.stem for path in folder.glob("*.csv")} == set(tables)
    for key, records in tables.items():
        with (folder / f"{key}.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == len(records) > 0
        for row, record in zip(rows, records, strict=True):
            assert list(row) == list(record)
            for name, value in record.items():
                cell = row[name]
                if value is None:
                    assert cell == ""
                elif isinstance(value, int | float):
                    assert float(cell) == value
                else:
                    assert cell == value


def test_markdown_has_every_table_and_cell(folder: Path) -> None:
    text = (folder / "report.md").read_text()
    tables = records_of(folder)
    lines = text.splitlines()
    headings = [line for line in lines if line.startswith("### ")]
    assert len(headings) == len(tables)
    first = text[text.index("### Overall") : text.index("### Speedup / mean")].splitlines()
    rows = [line for line in first if line.startswith("|")][2:]
    for row, line in zip(tables["overall"], rows, strict=True):
        label = row["label"].replace("|", "\\|")
        assert line.startswith(f"| {label} | ")
        assert f"| {row['speedup']:.2f} [{row['speedup_low']:.2f}, " in line
    widths = [line.replace("\\|", "").count("|") for line in lines if line.startswith("|")]
    assert min(widths) > 2
    assert "(paper 3.48)" in text


def test_page_refers_to_nothing_outside(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    page = Page(text)
    tags = [tag for tag, _ in page.seen]
    assert not {"script", "link", "iframe", "object", "base"} & set(tags)
    for tag, attributes in page.seen:
        for name in ("src", "href", "srcset", "style", "background", "action", "data"):
            value = attributes.get(name)
            if value is not None:
                assert value.startswith(("data:image/png;base64,", "#")), (tag, name, value[:60])
        assert not any(name.startswith("on") for name in attributes)
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert "http" not in style
    targets = {attributes["id"] for _, attributes in page.seen if "id" in attributes}
    links = {str(a["href"])[1:] for t, a in page.seen if t == "a"}
    assert links <= targets


def test_page_shows_every_cell(folder: Path) -> None:
    page = Page((folder / "report.html").read_text())
    tables = records_of(folder)
    assert sum(tag == "table" for tag, _ in page.seen) == len(tables)
    rows = sum(tag == "tr" for tag, _ in page.seen)
    assert rows == sum(len(records) + 1 for records in tables.values())
    words = set(page.text)
    assert "a method | that <loses>" in words
    assert any("<script>alert(1)</script> & processor" in word for word in words)
    losing = [a for tag, a in page.seen if tag == "td" and "loses" in str(a.get("class"))]
    assert losing
    images = [a for tag, a in page.seen if tag == "img"]
    assert len(images) == 3
    assert all(a["alt"] for a in images)


def test_figures_are_pictures(folder: Path) -> None:
    for name in ("figure2", "figure3", "figure4"):
        data = (folder / f"{name}.png").read_bytes()
        assert data.startswith(b"\x89PNG\r\n")
        width, height = struct.unpack(">II", data[16:24])
        assert width > 400
        assert height > 200


def test_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plot, "available", lambda: False)
    about = runs.facts(1.0)
    folder = runs.save(tmp_path / "run", about, runs.lines(about))
    out = tmp_path / "out"
    assert main(["report", str(folder), "--output", str(out)]) == 0
    assert "matplotlib" in capsys.readouterr().out
    assert not list(out.glob("*.png"))
    assert not any(tag == "img" for tag, _ in Page((out / "report.html").read_text()).seen)
    assert (out / "overall.csv").exists()


def test_several_runs_on_a_page(tmp_path: Path) -> None:
    greedy, sampled = runs.facts(0.0), runs.facts(1.0)
    folders = [
        runs.save(tmp_path / "x" / "run", greedy, runs.lines(greedy, questions=2)),
        runs.save(tmp_path / "y" / "run", sampled, runs.lines(sampled, questions=2)),
    ]
    out = tmp_path / "out"
    assert main(["report", *map(str, folders), "--output", str(out)]) == 0
    names = {path.name for path in out.iterdir()}
    assert {"x-run-overall.csv", "y-run-overall.csv", "x-run-figure2.png", "printed.csv"} <= names
    Page((out / "report.html").read_text())
    # Figure 4 has sampled and greedy runs of the same models side by side.
    wide, _ = struct.unpack(">II", (out / "figure4-1.png").read_bytes()[16:24])
    narrow, _ = struct.unpack(">II", (out / "x-run-figure4.png").read_bytes()[16:24])
    assert wide > 1.4 * narrow


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    about = runs.facts()
    good = runs.save(tmp_path / "good", about, runs.lines(about, questions=2))
    other = runs.save(tmp_path / "other", about, runs.lines(about, questions=2))
    empty = runs.save(tmp_path / "empty", about, [])
    bare = tmp_path / "bare"
    bare.mkdir()
    no_baseline = runs.facts()
    for one in no_baseline["methods"]:
        one["baseline"] = False
    without = runs.save(tmp_path / "without", no_baseline, runs.lines(no_baseline, questions=2))
    for arguments, words in (
        (["nowhere"], "expected a folder"),
        ([str(bare)], "run.json"),
        ([str(empty)], "expected a run with turns"),
        ([str(without)], "one method that is the baseline, given 0"),
        ([str(good), str(other)], "--output: expected a folder for 2 runs"),
        ([str(good), str(good), "--output", "x"], "expected different folders"),
    ):
        assert main(["report", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert words in error


def test_a_run_that_was_cut_short_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "available", lambda: False)
    about = runs.facts()
    whole = runs.lines(about)
    assert len(whole) == 14 * 3 * len(runs.METHODS)
    for lines, said in ((whole, False), (whole[:-1], True)):
        folder = runs.save(tmp_path / str(said), about, lines)
        report.write(report.load([folder]), folder)
        for name in ("report.md", "report.html"):
            text = (folder / name).read_text()
            assert (f"NOT FINISHED: {len(lines)} of {len(whole)} turns" in text) == said


@pytest.mark.parametrize(
    ("sessions", "words"),
    [
        (None, None),
        ([{"models": 3.2, "plan": 30.4}], "Preparation: 34 s (models 3 s, plan 30 s)."),
        (
            [{"models": 3.2, "plan": 30.4, "turns": 600.0}],
            "Preparation: 34 s (models 3 s, plan 30 s); turns: 600 s; in all 10.6 minutes.",
        ),
        (  # the first was killed
            [{"models": 3.2, "plan": 30.4}, {"models": 4.0, "turns": 60.0}],
            "Preparation: 38 s (models 7 s, plan 30 s), in 2 sessions.",
        ),
        (
            [{"models": 3.0, "turns": 60.0}, {"models": 3.0, "turns": 54.0}],
            "Preparation: 6 s (models 6 s); turns: 114 s; in all 2.0 minutes, in 2 sessions.",
        ),
    ],
)
def test_what_a_run_spent(
    tmp_path: Path, sessions: list[dict[str, float]] | None, words: str | None
) -> None:
    about = runs.facts() | ({} if sessions is None else {"seconds": sessions})
    folder = runs.save(tmp_path, about, runs.lines(about, questions=2))
    (found,) = report.load([folder])
    text = report.summary(found)
    assert ("Preparation" in text) == (words is not None)
    assert words is None or f" {words} " in text
