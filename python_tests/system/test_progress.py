"""Progress is written to standard error, and only to a terminal, but for phases."""

import io
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers.utils import logging

import polyspec_ext as ps
from polyspec_ext import levels, progress, tiny
from polyspec_ext.runtime.graphs import Graphs


@contextmanager
def shown(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> Iterator[io.StringIO]:
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    with monkeypatch.context() as here:
        here.setattr("sys.stderr", stream)
        yield stream


@pytest.mark.parametrize("terminal", [True, False])
def test_a_captured_graph_is_told_to_a_terminal_only(monkeypatch, capsys, terminal) -> None:
    graphs = Graphs(SimpleNamespace(capture=lambda step: ((lambda: None), step())))
    with shown(monkeypatch, terminal) as stream:
        for _ in range(2):
            graphs.run("a step", ["which"], tuple)
    assert graphs.num_captures == 1
    assert ("captured CUDA graph 1" in stream.getvalue()) == terminal
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_models_load_with_a_bar_of_bytes(monkeypatch, terminal) -> None:
    """Load a user's model: a bar, in lines off a terminal. Shipped models load without a bar."""
    monkeypatch.setattr(progress, "_SECONDS", 0.0)
    path = tiny.path("target")
    with shown(monkeypatch, terminal) as stream:
        tiny.levels(["target"], pack=False)
        assert stream.getvalue() == ""
        levels.load_model(path)
    size = sum(file.stat().st_size for file in path.glob("*.safetensors")) / 1e6
    totals = re.findall(r"Loading weights: .*?/([\d.]+)M ", stream.getvalue())
    assert totals
    assert all(float(total) == pytest.approx(size, rel=0.02) for total in totals)
    assert ("\r" in stream.getvalue()) == terminal
    assert logging.is_progress_bar_enabled(), "the caller's setting is as before"


def test_the_callers_choice_of_no_bars_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    logging.disable_progress_bar()
    try:
        with shown(monkeypatch, True) as stream:
            levels.load(tiny.path("drafter"))
        assert not logging.is_progress_bar_enabled()
        assert stream.getvalue() == ""
    finally:
        logging.enable_progress_bar()


@pytest.mark.parametrize("terminal", [True, False])
def test_phases_stand_in_a_log_and_notes_do_not(monkeypatch, capsys, terminal) -> None:
    with shown(monkeypatch, terminal) as stream:
        progress.phase("measuring")
        progress.note("by the way")
    assert stream.getvalue() == "measuring\n" + ("by the way\n" if terminal else "")
    assert capsys.readouterr().out == ""


def test_a_long_bar_is_a_line_from_time_to_time_off_a_terminal(monkeypatch) -> None:
    monkeypatch.setattr(progress, "_SECONDS", 0.2)
    with shown(monkeypatch, False) as stream:
        assert list(progress.bar(range(2), desc="short")) == [0, 1]
        assert stream.getvalue() == ""
        for _ in progress.bar(range(6), desc="file.gguf", unit=" layers"):
            time.sleep(0.1)
    lines = stream.getvalue().splitlines()
    assert 2 <= len(lines) <= 3
    assert all(re.search(r"^file\.gguf: .*\d/6 ", line) for line in lines)
    assert "\r" not in stream.getvalue()


def test_nobody_makes_a_bar_that_does_not_look_for_a_terminal() -> None:
    package = Path(ps.__file__).parent
    makers = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"\btqdm\b", path.read_text(encoding="utf-8"))
    }
    assert makers == {"progress.py"}
