"""``paper`` beside other engines: whose texts are compared with whose, and whose clock it
is."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import llama_program
import pytest

from benchmarks.__main__ import main
from benchmarks.generation_calls import Request
from benchmarks.paper import record
from benchmarks.paper.engines import LlamaCpp, OpenVino
from benchmarks.paper.methods import Method, read_keys
from benchmarks.paper.parts import Places

KEYS = ["plain", "llama.cpp", "llama.cpp-assisted", "llama.cpp-exact", "llama.cpp-chain"]


@pytest.fixture
def llama(tmp_path: Path) -> LlamaCpp:
    return LlamaCpp(*llama_program.write(tmp_path))


def test_every_text_beside_its_own_engines_plain_one(llama: LlamaCpp) -> None:
    places = Places("x", {}, {}, None, 1, None, [llama])
    made = {one.name: one for one in read_keys(KEYS, places)}
    plain = {name: one.plain for name, one in made.items()}
    assert plain["plain"] is None
    assert plain["llama.cpp"] == plain["llama.cpp-assisted"] == "llama.cpp"
    assert plain["llama.cpp-exact"] == plain["llama.cpp-chain"] == "llama.cpp-exact"
    assert made["llama.cpp-chain"].levels == ("target", "draft")
    for one in made.values():
        assert Method.from_dict(asdict(one)) == one
    with pytest.raises(ValueError, match=r"llama.cpp-chain: expected llama.cpp-exact as well"):
        read_keys(["plain", "llama.cpp-chain"], places)
    with pytest.raises(ValueError, match=r"an engine that is given.*given 'llama.cpp'"):
        read_keys(["plain", "llama.cpp"], Places("x"))


def test_its_own_clock(llama: LlamaCpp) -> None:
    found = llama.decoder("llama.cpp-chain", frozenset())(Request([[4, 5]], 3, 0.0, [9]))
    assert found.texts == [[6, 7, 8]]
    assert (found.seconds, found.prefill_seconds) == (7.5, 1.5)


def test_a_program_that_fails_says_why(llama: LlamaCpp) -> None:
    decode = llama.decoder("llama.cpp", frozenset())
    with pytest.raises(RuntimeError, match=r"polyspec_llama: .*invalid literal"):
        decode(Request([["x"]], 3, 0.0, [9]))  # type: ignore[list-item]


def test_files_that_are_not_there(tmp_path: Path, llama: LlamaCpp) -> None:
    there = tmp_path / "target.gguf"
    with pytest.raises(ValueError, match=r"--llama: expected a file"):
        LlamaCpp(tmp_path / "none", there)
    with pytest.raises(ValueError, match=r"--gguf: expected a file"):
        LlamaCpp(there, tmp_path / "none")
    with pytest.raises(ValueError, match=r"--openvino: expected (the package|openvino_model.xml)"):
        OpenVino(tmp_path)


@pytest.mark.slow
def test_a_run_beside_an_engine(
    tmp_path: Path, llama: LlamaCpp, capfd: pytest.CaptureFixture[str]
) -> None:
    """From the command line: the shipped models by path, so that others stand beside them."""
    from polyspec_ext import tiny

    out = tmp_path / "run"
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question_id": 1, "category": "qa", "turns": ["Who?", "Why?"]}\n')
    words = ["paper", "--target", str(tiny.path("target")), "--no-compile"]
    words += ["--draft", f"small={tiny.path('drafter')}", "--questions", str(questions)]
    words += ["--llama", str(tmp_path / "polyspec_llama")]
    words += ["--gguf", f"{tmp_path / 'target.gguf'},{tmp_path / 'draft.gguf'}"]
    words += ["--methods", ",".join([*KEYS, "small"]), "--max-new-tokens", "8"]
    words += ["--plan-seconds", "0", "--output", str(out)]
    assert main(words) == 0
    turns = {(turn.method, turn.turn): turn for turn in record.read_run(out).turns}
    assert len(turns) == 2 * 6
    for name in ("llama.cpp", "llama.cpp-exact", "llama.cpp-chain", "small"):
        assert turns[name, 0].lossless == {"identical": True, "at": None, "gap": None}
    assert turns["llama.cpp-assisted", 0].lossless == {"identical": False, "at": 2, "gap": None}
    assert turns["llama.cpp-assisted", 1].lossless is None  # another prompt
    assert turns["llama.cpp-chain", 1].seconds == 7.5
    assert turns["llama.cpp-chain", 1].prefill_seconds == 1.5
    said = capfd.readouterr().out
    assert "0 of 1 identical, 1 DIFFER, 1 not compared" in said
    assert "our chain in llama.cpp" in said
