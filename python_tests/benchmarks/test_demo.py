"""``python -m benchmarks demo`` on a chain of untrained models behind POLYSPEC_TINY."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
import saved_chain
import torch

import polyspec_ext as ps
from benchmarks import demo
from benchmarks.__main__ import main
from polyspec_ext import tiny

pytestmark = pytest.mark.usefixtures("tiny_untrained")


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    out = capsys.readouterr()
    return status, out.out, out.err


DEMO = ("demo", "--prompts", "2", "--max-new-tokens", "8")


def test_demo_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, *DEMO, "--repeats", "1", "--json")
    assert status == 0
    report = json.loads(out)
    assert report["text"]
    assert {"cpu", "cores", "torch"} <= report["machine"].keys()
    (table,) = report["tables"]
    assert len(table["configurations"]) == 6
    assert list(table["choices"]) == [*tiny.LEVELS]
    assert "ms per pass of 1/6 tokens" in table["choices"]["target"]
    rows = table["configurations"]
    theirs = next(row for row in rows if row["label"] == demo.GENERATE)
    assert theirs["ratio_to_generate"] == 1.0
    # Ratios are over the fastest of the ways to decode plainly.
    alone = [row for row in rows if row["label"].startswith("plain decoding")]
    assert len(alone) == 3
    best = max(alone, key=lambda row: row["tokens_per_second"])
    assert table["fastest_plain"] == best["label"]
    assert max(row["ratio"] for row in alone) == best["ratio"] == 1.0
    assert max(row["decoding_ratio"] for row in alone if row is not theirs) == 1.0
    for row in rows:
        assert row["tokens_per_second"] > 0
        assert row["new_tokens"] > 0
        assert row["lossless"]
        assert row["verdict"].startswith(("2 of 2", "1 of 2, 1 part at a tie"))


def test_demo_streams_an_answer_and_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    """One line per phase, also where there is no terminal, and no bar."""
    status, out, err = call(capsys, *DEMO, "--repeats", "1")
    assert status == 0
    answer, _, table = out.partition("(three levels: ")
    assert answer.startswith("Question: A baker")
    assert len(answer.partition("\nAnswer:")[2].strip()) > 0
    assert table.count("\nconfiguration\n") == 1
    assert max(map(len, table.splitlines())) <= 80
    loading, measuring = err.splitlines()
    assert "loading" in loading
    assert "measuring 6 configurations: 2 questions" in measuring


@pytest.mark.parametrize(("load", "busy"), [(0.0, False), (9.25, True)])
def test_the_demo_says_what_the_load_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, load: float, busy: bool
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    command = (*DEMO, "--repeats", "1")
    status, out, err = call(capsys, *command)
    assert status == 0, err
    shown = " ".join(out.split())
    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    assert f"load average {load:.1f} beside {threads} threads on {cores} cores" in shown
    assert ("times may be too long, and ratios uncertain" in shown) == busy
    assert json.loads(call(capsys, *command, "--json")[1])["load"] == {"before": load}


def test_demo_stops_behind_a_repeat_when_the_time_is_over(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, out, _ = call(capsys, *DEMO, "--repeats", "3", "--seconds", "0", "--json")
    (table,) = json.loads(out)["tables"]
    assert table["repeats"] == 1
    for row in table["configurations"]:
        assert row["stats"] is None or row["stats"]["num_requests"] == 2


@pytest.mark.parametrize(("calls", "repeats"), [(8, 0), (24, 1)])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_ctrl_c_keeps_the_repeats_that_the_demo_has_finished(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    calls: int,
    repeats: int,
) -> None:
    """Five chains answer two prompts twice, behind a first call of each."""
    generate, left = ps.Chain.generate, iter(range(calls))

    def interrupted(self: ps.Chain, *args: Any, **more: Any) -> ps.Output:
        if next(left, None) is None:
            signal.raise_signal(signal.SIGINT)
        return generate(self, *args, **more)

    monkeypatch.setattr(ps.Chain, "generate", interrupted)
    status, out, _ = call(capsys, *DEMO, "--repeats", "2", *options)
    assert status == 130
    assert ("\nconfiguration\n" in out) == (repeats == 1 and not options)
    if repeats and options:
        assert [table["repeats"] for table in json.loads(out)["tables"]] == [1]
    elif repeats:
        assert "median of 1 " in out


def test_demo_says_when_the_text_differs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_chain.end_wrongly(monkeypatch)
    command = ("demo", "--prompts", "1", "--repeats", "1", "--max-new-tokens", "6")
    status, out, _ = call(capsys, *command)
    assert status == 1
    assert "DIFFER" in out
    # What was chosen for this processor, a line per level.
    for level in tiny.LEVELS:
        assert f"\n  {level}: " in out
    assert out.count("ms per pass of") == len(tiny.LEVELS)
