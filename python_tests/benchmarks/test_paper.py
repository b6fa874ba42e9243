"""``paper``: methods by their keys, runs over the shipped models, and how a run goes on."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llama_program
import pytest

import polyspec_ext as ps
from benchmarks import measuring, methods, paper, record
from benchmarks import questions as asked
from benchmarks.__main__ import main
from benchmarks.engines import LlamaCpp, OpenVino
from benchmarks.measuring import Request
from benchmarks.methods import Method, Models, decoder, default_keys, read_keys, shipped
from polyspec_ext import tiny

pytest.importorskip("pandas")

# Five questions in Spec-Bench's format, of five tasks, one of them with two turns.
QUESTIONS: list[dict[str, Any]] = [
    {
        "question_id": 81,
        "category": "math",
        "turns": ["Tom has 3 bags of 8 apples. How many apples?", "And 2 bags more?"],
        "reference": ["24", "40"],
    },
    {"question_id": 161, "category": "translation", "turns": ["Translate: drei Äpfel."]},
    {"question_id": 241, "category": "summarization", "turns": ["Summarize: " + "a b c. " * 20]},
    {"question_id": 321, "category": "qa", "turns": ["who has 12 eggs"]},
    {"question_id": 401, "category": "math_reasoning", "turns": ["Ann saves $6 a week. 10 weeks?"]},
]
TURNS, TOKENS = 6, 6
KEYS = ("plain", "generate", "drafter")
ALL = (
    "plain", "generate", "assisted:drafter", "drafter", "prompt-lookup", "suffix", "w4",
    "eagle2", "eagle2-chain", "w4+drafter", "w4+eagle2", "w4+middle+drafter", "online:drafter",
    "joint:middle+drafter",
)  # fmt: skip
ENGINE_KEYS = ["plain", "llama.cpp", "llama.cpp-assisted", "llama.cpp-exact", "llama.cpp-chain"]
PROMPT = "How many legs have 2 cows?"


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "question.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in QUESTIONS) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only turns are timed, and no report is drawn."""
    monkeypatch.setattr(measuring, "copy_bandwidth", lambda _: 1.0)
    monkeypatch.setattr(paper, "report", lambda _: 0)


def command(folder: Path, questions: Path, *more: str) -> list[str]:
    return [
        "paper", "--output", str(folder), "--questions", str(questions),
        "--max-new-tokens", str(TOKENS), "--plan-seconds", "0",
        "--methods", ",".join(KEYS), *more,
    ]  # fmt: skip


def answering(
    monkeypatch: pytest.MonkeyPatch, wrap: Callable[[Callable[[], Any], str, Request], Any]
) -> None:
    """Calls go through `wrap`, with the call, the method's name and the request."""
    real = methods.decoder

    def decoder(method: Method, models: Models) -> Any:
        decode = real(method, models)
        return lambda request: wrap(lambda: decode(request), method.name, request)

    monkeypatch.setattr(methods, "decoder", decoder)


# ---- runs ----------------------------------------------------------------------------------------


def test_a_run(tmp_path: Path, questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert main(command(folder, questions)) == 0
    assert "target <- drafter" in capsys.readouterr().out
    facts, turns = record.read_facts(folder), record.read_turns(folder)
    assert [one["name"] for one in facts["methods"] if one["baseline"]] == ["plain"]
    assert facts["settings"]["template"] == "tiny"
    assert {one["name"] for one in facts["models"]} == {"target", "drafter"}
    assert facts["weight_bytes"]["target"] > facts["weight_bytes"]["drafter"] > 1e6
    assert facts["copy_bandwidth_bytes_per_second"] > 1e8
    assert (folder / "report.md").is_file()
    # Every turn of every question and method once, the baseline before the others.
    assert len({record.key_of(turn) for turn in turns}) == len(turns) == TURNS * len(KEYS)
    assert [turn["method"] for turn in turns[:: len(KEYS)]] == ["plain"] * TURNS
    # The others take turns in coming next.
    assert len({turns[n + 1]["method"] for n in range(0, len(turns), len(KEYS))}) == 2
    tasks = {turn["question_id"]: turn["task"] for turn in turns}
    assert list(tasks.values()) == ["mt_bench", "translation", "summarization", "qa", "math"]
    for turn in turns:
        assert turn["status"] == "ok"
        assert turn["new_tokens"] == len(turn["tokens"]) <= TOKENS
        assert turn["lossless"]["identical"] or turn["lossless"]["gap"] < 1e-4
        assert 1 not in turn["tokens"][:-1]
        if turn["method"] == "generate":
            assert turn["levels"] == []
            assert turn["prefill_seconds"] is None
            continue
        names = [level["name"] for level in turn["levels"]]
        assert names == (["target"] if turn["method"] == "plain" else ["target", "drafter"])
        target = turn["levels"][0]
        assert sum(target["accepted"]) == turn["new_tokens"]
        assert len(target["accepted"]) == target["passes"]
        assert 0 < turn["prefill_seconds"] < turn["seconds"]
        assert 0 < sum(level["seconds"] for level in turn["levels"]) < turn["seconds"]


@pytest.mark.usefixtures("bare")
def test_a_killed_run_goes_on(
    tmp_path: Path, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, called = tmp_path / "run", []

    def count(call: Callable[[], Any], name: str, _: Request) -> Any:
        called.append(name)
        return call()

    answering(monkeypatch, count)
    assert main(command(folder, questions)) == 0
    before = record.read_turns(folder)
    warm_up = len(called) - len(before)
    assert warm_up == len(KEYS)
    # Killed in the middle of a line, between the two turns of a question.
    file, kept = folder / record.TURNS, 4
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:kept]) + lines[kept][:70])
    assert len(record.read_turns(folder)) == kept
    called.clear()
    assert main(command(folder, questions)) == 0
    assert len(called) == warm_up + len(before) - kept
    after = record.read_turns(folder)
    assert after[:kept] == before[:kept]
    assert [(record.key_of(turn), turn["tokens"]) for turn in after] == [
        (record.key_of(turn), turn["tokens"]) for turn in before
    ]
    facts = record.read_facts(folder)
    assert len(facts["continued"]) == 1
    # A finished run has nothing left to do, also without the end of its last line.
    text = file.read_text()
    file.write_text(text.rstrip("\n"))
    called.clear()
    assert main(command(folder, questions)) == 0
    assert len(called) == warm_up
    assert file.read_text() == text


@pytest.mark.usefixtures("bare")
def test_other_settings_are_refused(
    tmp_path: Path, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path / "run", questions)) == 0
    files = [tmp_path / "run" / name for name in (record.TURNS, record.FACTS)]
    before = [file.read_text() for file in files]
    other = tmp_path / "others.jsonl"
    other.write_text(json.dumps({**QUESTIONS[3], "turns": ["who has 13 eggs"]}) + "\n")
    for more, named in (
        (("--max-new-tokens", "11"), "settings.max_new_tokens: 6 there, 11 now"),
        (("--methods", "plain,drafter"), "settings.methods"),
        (("--per-task", "2", "--temperature", "0.5"), "settings.temperature"),
        (("--questions", str(other)), "settings.digest"),
    ):
        assert main(command(tmp_path / "run", questions, *more)) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: --output: expected the settings of the run that")
        assert named in error
    assert [file.read_text() for file in files] == before


@pytest.mark.usefixtures("bare")
def test_a_failed_turn_has_no_numbers(
    tmp_path: Path, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first question's first turn has the seed of the warm-up: that must not end the run.
    def fail(call: Callable[[], Any], name: str, request: Request) -> Any:
        if (name, request.seeds) in (("drafter", [0]), ("plain", [16])):
            raise RuntimeError("no memory\nleft")
        return call()

    with pytest.MonkeyPatch.context() as patch:
        answering(patch, fail)
        assert main(command(tmp_path / "run", questions)) == 1
    turns = record.read_turns(tmp_path / "run")
    failed = [turn for turn in turns if turn["status"] != "ok"]
    keys = [(turn["question_id"], turn["turn"], turn["method"]) for turn in failed]
    assert keys == [(81, 0, "drafter"), (81, 1, "drafter"), (161, 0, "plain")]
    memory = "RuntimeError: no memory left"
    assert [turn["error"] for turn in failed] == [memory, "the turn before failed", memory]
    numbers = ("prompt_tokens", "new_tokens", "seconds", "prefill_seconds", "tokens")
    for turn in failed:
        assert all(turn[name] is None for name in (*numbers, "lossless"))
        assert turn["levels"] == []
    # Where the baseline fails the others have nothing to be compared with.
    others = [turn for turn in turns if turn["question_id"] == 161 and turn["status"] == "ok"]
    assert [turn["lossless"] for turn in others] == [None, None]
    # A failed turn is done: it is not tried again.
    assert main(command(tmp_path / "run", questions)) == 1
    assert record.read_turns(tmp_path / "run") == turns


@pytest.mark.usefixtures("bare")
def test_later_turns_have_the_methods_own_answers(
    tmp_path: Path, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: dict[tuple[str, int], list[int]] = {}

    def note(call: Callable[[], Any], name: str, request: Request) -> Any:
        prompts[name, request.seeds[0]] = request.prompts[0]
        new = call()
        return new._replace(texts=[[75, 76, 77]]) if name == "drafter" else new

    answering(monkeypatch, note)
    assert main(command(tmp_path / "run", questions)) == 0
    tokenizer = tiny.tokenizer()
    turns = {record.key_of(turn): turn for turn in record.read_turns(tmp_path / "run")}
    first, second = QUESTIONS[0]["turns"]
    for name in KEYS:
        words = tokenizer.decode(turns[81, 0, name]["tokens"], skip_special_tokens=True).strip()
        text = f"Question: {first}\nAnswer: {words}\n\nQuestion: {second}\nAnswer:"
        assert prompts[name, 1] == tokenizer(text).input_ids
    # Prompts that differ leave nothing to compare.
    assert turns[81, 0, "drafter"]["lossless"]["identical"] is False
    assert turns[81, 1, "drafter"]["lossless"] is None
    assert turns[81, 1, "generate"]["lossless"] is not None


METHOD = """
import torch
zero = 0
def greedy(model, tokenizer):
    def generate(request):
        assert tokenizer.eos_token_id == 1
        rows = []
        for prompt in request.prompts:
            ids = torch.tensor([prompt])
            out = model.generate(ids, max_new_tokens=request.max_new_tokens + 3, do_sample=False)
            rows.append(out[0, len(prompt):])
        return rows
    return generate
def few(model, tokenizer):
    return lambda request: []
"""


@pytest.mark.usefixtures("bare")
def test_methods_of_ones_own_and_the_questions_of_a_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(asked, "SPEC_BENCH", tmp_path / "none.jsonl")
    (tmp_path / "mine.py").write_text(METHOD)
    words = [
        "paper", "--output", str(tmp_path / "run"), "--plan-seconds", "0",
        "--max-new-tokens", str(TOKENS), "--per-task", "1", "--methods", "plain",
    ]  # fmt: skip
    for name in ("greedy", "few"):
        words += ["--method", f"{name}={tmp_path / 'mine.py'}:{name}"]
    assert main(words) == 1  # since `few` gives too few rows
    turns = record.read_turns(tmp_path / "run")
    assert record.read_facts(tmp_path / "run")["settings"]["questions"] == "polyspec_ext"
    assert len(turns) == 7 * 3
    for turn in turns:
        assert (turn["status"] == "ok") == (turn["method"] != "few")
        if turn["status"] == "ok":
            assert len(turn["tokens"]) <= TOKENS
            assert turn["lossless"]["identical"] or turn["lossless"]["gap"] < 1e-4
    for wrong, text in (
        ("mine.py:few", "expected NAME=FILE.py:FUNCTION"),
        (f"plain={tmp_path / 'mine.py'}:few", "is another's name"),
        (f"x={tmp_path / 'none.py'}:few", "a file that fails: FileNotFoundError"),
        (f"x={tmp_path / 'mine.py'}:zero", "with no such function"),
    ):
        capsys.readouterr()
        assert main([*words, "--method", wrong]) == 2
        assert text in capsys.readouterr().err


# ---- models and methods --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models() -> Models:
    return shipped()


def request(models: Models, tokens: int) -> Request:
    return Request([models.tokenizer(tiny.prompt_of(PROMPT)).input_ids], tokens, 0.0, [0])


def test_keys() -> None:
    made = {one.name: one for one in read_keys(ALL, shipped())}
    assert tuple(made) == ALL
    assert [one.name for one in made.values() if one.baseline] == ["plain"]
    kinds = {name: one.kind for name, one in made.items()}
    assert kinds["assisted:drafter"] == "assisted"
    assert kinds["eagle2"] == kinds["eagle2-chain"] == "eagle"
    assert made["eagle2-chain"].tree is None
    assert kinds["w4+eagle2"] == kinds["w4+middle+drafter"] == kinds["suffix"] == "chain"
    assert made["joint:middle+drafter"].policy == "joint"
    assert made["drafter"].windows == tiny.WINDOWS["target", "drafter"]
    assert made["w4+eagle2"].tree == {"top_k": 4, "total_tokens": 12, "depth": 5}
    assert made["w4+eagle2"].windows == (9, 5)
    assert made["w4+middle+drafter"].levels == ("target", "w4", "middle", "drafter")
    for one in made.values():
        assert Method.from_dict(json.loads(json.dumps(asdict(one)))) == one


@pytest.mark.parametrize(
    ("keys", "wrong"),
    [
        (["plain", "plain"], "each method once, given plain again"),
        (["drafter"], "expected plain or plain-captured among them"),
        (["plain", "w5"], "given 'w5'"),
        (["plain", "drafter+middle+drafter"], "given 'drafter.middle.drafter'"),
        (["plain", "best:drafter"], "given 'best:drafter'"),
        (["plain", "assisted:w4"], "given 'assisted:w4'"),
        (["plain", "plain-captured"], "given 'plain-captured'"),
        (["plain", "llama.cpp"], "an engine that is given.*given 'llama.cpp'"),
        (["plain", "suffix+drafter"], "suffix.* last of the levels"),
    ],
)
def test_keys_that_are_none(keys: list[str], wrong: str) -> None:
    with pytest.raises(ValueError, match=rf"--methods: .*{wrong}"):
        read_keys(keys, shipped())


def test_defaults() -> None:
    own = shipped()
    made = read_keys(default_keys(own), own)
    assert [one.name for one in made if one.baseline] == ["plain"]
    assert {len(one.levels) for one in made} == {1, 2, 3, 4}
    # A preset: no draft model, one head.
    other = Models("x", {}, {"eagle2": "y"}, ps.DynamicTree(), device="cuda")
    keys = default_keys(other)
    assert keys[:3] == ["plain", "plain-captured", "generate"]
    assert {"eagle2", "w4", "w4+eagle2", "planned"} <= set(keys)
    (eagle,) = (one for one in read_keys(keys, other) if one.name == "eagle2")
    assert eagle.windows == (6,)


def test_every_method_counts_up_to_the_eos(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    made = read_keys(ALL, models)
    whole = decoder(made[0], models)(request(models, 16)).texts[0]
    assert len(whole) == 16
    # An id that the text has further on, so that drafts go beyond it.
    end = next(token for n, token in enumerate(whole) if n > 5 and token not in whole[:n])
    monkeypatch.setattr(models.level.model.generation_config, "eos_token_id", [end])
    cut = whole[: whole.index(end) + 1]
    for method in made:
        answer = decoder(method, models)(request(models, 16))
        assert answer.texts == [cut], method.name
        if answer.stats is None:
            assert method.kind in ("generate", "assisted")
            continue
        assert answer.stats.num_new_tokens == len(cut)
        assert [level.name for level in answer.stats.levels] == list(method.levels)
        assert sum(answer.stats.levels[0].emitted_per_verification) == len(cut)


def test_windows_are_the_planners(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run planned windows of chains, policies and heads, tail and all."""

    def candidate(rate: float, *levels: str, **more: Any) -> Any:
        windows = tuple(range(len(levels) + 1, 2, -1))
        own = {"windows": windows, "rounds": (1,) * (len(levels) - 2), "rule": "token", "tail": 0}
        own |= {"levels": levels, "predicted_decode_tokens_per_second": rate}
        return SimpleNamespace(**own | more)

    best = candidate(9.0, "target", "middle", "drafter", windows=(5, 3), rounds=(2,), tail=2)
    plain = candidate(1.0, "target", windows=(), rounds=())
    found = SimpleNamespace(
        candidates=[plain, candidate(3.0, "target", "eagle2"), best], recommended=best
    )
    planned: list[Any] = []
    monkeypatch.setattr(paper, "plan", lambda levels, *_, **__: planned.extend(levels) or found)
    keys = (
        "plain", "drafter", "eagle2", "joint:middle+drafter", "planned",
    )  # fmt: skip
    given = argparse.Namespace(temperature=0.0, max_new_tokens=6, plan_seconds=1.0)
    before = read_keys(keys, models)
    session = paper.Session(given, models, before, [], None)  # type: ignore[arg-type]
    prediction = paper.plan_windows(session)
    after = {one.name: one for one in session.made}
    assert [one.name for one in planned] == ["target", "middle", "drafter", "eagle2"]
    assert after["drafter"] == before[1]  # which the planner left out
    assert (after["eagle2"].windows, after["eagle2"].tree) == (
        (3,), {"top_k": 4, "total_tokens": 12, "depth": 3},
    )  # fmt: skip
    for name in ("joint:middle+drafter", "planned"):
        assert (after[name].windows, after[name].rounds, after[name].tail) == ((5, 3), (2,), 2)
    assert after["planned"].label == "planned: target <- middle <- drafter"
    rates = {name: one["tokens_per_second"] for name, one in prediction.items()}
    assert rates == {"plain": 1.0, "eagle2": 3.0, "planned": 9.0}
    stats = decoder(after["planned"], models)(request(models, 20)).stats
    assert stats is not None
    assert stats.levels[0].num_tails > 0


@pytest.fixture
def empty_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", sorted(methods.PRESETS))
def test_a_preset_that_is_not_here(
    name: str, empty_hub: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, head, *_ = methods.PRESETS[name]
    assert main(["paper", "--preset", name, "--output", str(empty_hub / "run")]) == 2
    error = capsys.readouterr().err
    assert f"hf download {target} && hf download {head}\n" in error
    assert not (empty_hub / "run").exists()
    assert main(["paper", "--preset", name, "--target", str(tiny.path("target"))]) == 2
    assert f"given none for {head}; fetch" in capsys.readouterr().err


@pytest.mark.usefixtures("bare")
def test_models_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "question.jsonl"
    path.write_text(json.dumps({"question_id": 1, "category": "rag", "turns": ["So?"]}))
    words = command(tmp_path / "run", path, "--target", str(tiny.path("target")))
    words += ["--draft", f"small={tiny.path('drafter')}", "--eagle2", str(tiny.path("eagle2"))]
    words += ["--methods", "plain,small,assisted,eagle2"]
    assert main(words) == 0
    facts, turns = (read(tmp_path / "run") for read in (record.read_facts, record.read_turns))
    assert facts["settings"]["template"] == "chat"
    names = [turn["method"] for turn in turns if turn["status"] == "ok"]
    assert names == ["plain", "small", "assisted", "eagle2"]
    assert [level["name"] for level in turns[1]["levels"]] == ["target", "small"]
    assert facts["methods"][3]["tree"] == {"top_k": 10, "total_tokens": 60, "depth": 6}
    assert str(tmp_path) not in (tmp_path / "run" / record.FACTS).read_text()
    assert main(["paper", "--draft", "x=y"]) == 2
    assert "expected a --target with them" in capsys.readouterr().err
    for name in ("w4=y", "eagle2=y", "a+b=y", "=y"):
        assert main([*words, "--draft", name]) == 2
        assert "--draft: expected NAME=MODEL" in capsys.readouterr().err


# ---- other engines -------------------------------------------------------------------------------


@pytest.fixture
def llama(tmp_path: Path) -> LlamaCpp:
    return LlamaCpp(*llama_program.write(tmp_path))


def test_engines(llama: LlamaCpp, tmp_path: Path) -> None:
    """Compare texts with the plain texts of the same engine, by the engine's clock."""
    models = Models("x", engines=[llama])
    made = {one.name: one for one in read_keys(ENGINE_KEYS, models)}
    plain = {name: one.plain for name, one in made.items()}
    assert plain["plain"] is None
    assert plain["llama.cpp"] == plain["llama.cpp-assisted"] == "llama.cpp"
    assert plain["llama.cpp-exact"] == plain["llama.cpp-chain"] == "llama.cpp-exact"
    assert made["llama.cpp-chain"].levels == ("target", "draft")
    with pytest.raises(ValueError, match=r"llama.cpp-chain: expected llama.cpp-exact as well"):
        read_keys(["plain", "llama.cpp-chain"], models)
    assert llama.version == "ggml 0.1, commit 1a2b"
    assert llama.flags("llama.cpp").startswith("--fast --threads ")
    assert llama.flags("llama.cpp-chain").startswith("--exact --windows 4 --rule block ")
    decode = llama.decoder("llama.cpp-chain", frozenset())
    found = decode(Request([[4, 5]], 3, 0.0, [9]))
    assert (found.texts, found.seconds, found.prefill_seconds) == ([[6, 7, 8]], 7.5, 1.5)
    with pytest.raises(RuntimeError, match=r"polyspec_llama: .*invalid literal"):
        decode(Request([["x"]], 3, 0.0, [9]))  # type: ignore[list-item]
    there, none = tmp_path / "target.gguf", tmp_path / "none"
    with pytest.raises(ValueError, match=r"--llama: expected a file"):
        LlamaCpp(none, there)
    with pytest.raises(ValueError, match=r"--gguf: expected a file"):
        LlamaCpp(there, none)
    with pytest.raises(ValueError, match=r"--openvino: expected (the package|openvino_model.xml)"):
        OpenVino(tmp_path)
