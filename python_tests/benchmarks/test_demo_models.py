"""``demo`` with a user's own models, beside another engine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import llama_program
import pytest

from benchmarks.__main__ import main
from polyspec_ext import tiny

WORDS = ["demo", "--repeats", "1", "--max-new-tokens", "6", "--json"]
TARGET, DRAFTER = str(tiny.path("target")), str(tiny.path("drafter"))


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_beside_llama_cpp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, *files = llama_program.write(tmp_path)
    words = [*WORDS, "--prompts", "1", "--target", TARGET, "--draft", DRAFTER]
    words += ["--llama", str(program), "--gguf", ",".join(map(str, files))]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["text"]
    (table,) = report["tables"]
    rows = {row["label"]: row for row in table["configurations"]}
    assert "two levels: target, drafter" in rows
    three = rows["three levels: target, w4, drafter"]
    assert len(three["stats"]["levels"]) == 3
    assert three["lossless"]
    assert three["verdict"].startswith(("1 of 1", "0 of 1, 1 part at a tie"))
    # Their plain decoding is no baseline of ours, and their texts are beside their own.
    assert table["fastest_plain"].startswith("plain decoding, ")
    assert rows["llama.cpp, plain"]["verdict"] == "1 of 1 of its own"
    assert rows["llama.cpp's rule with draft"]["verdict"] == "0 of 1 of its own"
    assert rows["our chain in llama.cpp"]["verdict"] == "1 of 1 of its own"
    assert rows["llama.cpp, plain"]["tokens_per_second"] == pytest.approx(6 / 7.5)


def test_a_copy_as_the_target(capsys: pytest.CaptureFixture[str]) -> None:
    """It is no middle below itself: prompt lookup drafts below the drafter."""
    words = [*WORDS, "--prompts", "1", "--target", f"w4:{TARGET}", "--draft", f"w4:{DRAFTER}"]
    assert main(words) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    assert table["configurations"][-1]["label"] == "three levels: target, drafter, prompt lookup"


@pytest.mark.parametrize("drafter", ["eagle3", "suffix"])
def test_another_drafter_than_a_model(drafter: str, capsys: pytest.CaptureFixture[str]) -> None:
    place = str(tiny.path(drafter)) if drafter == "eagle3" else drafter
    name = "eagle3" if drafter == "eagle3" else "suffix match"
    assert main([*WORDS, "--prompts", "1", "--target", TARGET, "--draft", place]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    rows = {row["label"]: row for row in table["configurations"]}
    for label in (f"two levels: target, {name}", f"three levels: target, w4, {name}"):
        assert rows[label]["lossless"], rows.keys()


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["--draft", DRAFTER], "--draft, --gguf: expected a --target"),
        (["--target", TARGET, "--prompts", "4"], "--prompts: expected at most 3, given 4"),
        (["--target", "nowhere/at/all"], "--target: expected a model id, the directory"),
        (["--target", TARGET, "--gguf", "x.gguf"], "--gguf: expected --llama PROGRAM"),
    ],
)
def test_what_does_not_go_together(
    words: list[str], wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, *words]) == 2
    assert wrong in capsys.readouterr().err


@pytest.mark.parametrize(("names", "status"), [(("small", "large", "least"), 0), (("one",), 2)])
def test_make_takes_models_that_are_there(
    names: tuple[str, ...], status: int, tmp_path: Path
) -> None:
    """The largest is the target, the next one the draft, and none is fetched."""
    sizes = {"small": 20, "large": 30, "least": 10, "one": 1}
    for name in names:
        (tmp_path / f"{name}.gguf").write_bytes(b"x" * sizes[name])
    words = ["make", "--no-print-directory", "demo-real", f"MODELS={tmp_path}", "PY=echo"]
    words += ["PIP=true", "-o", "environment"]
    program = "build/llama/program/polyspec_llama"
    done = subprocess.run(
        [*words, "-o", program], cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert (done.returncode == 0) == (status == 0)
    shown = done.stdout.splitlines()[-1] if status == 0 else done.stderr
    large, small = (f"w4:{tmp_path}/{name}.gguf" for name in ("large", "small"))
    expected = (
        f"--target {large} --draft {small} --gguf {tmp_path}/large.gguf,{tmp_path}/small.gguf"
    )
    assert (expected if status == 0 else "expected two GGUF files or more, given") in shown
    assert "get.py" not in shown
