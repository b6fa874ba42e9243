"""``paper``: a run over the shipped models, what lies in its folder, and how it goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.paper import methods, prepare, record, report
from benchmarks.paper import questions as asked
from polyspec_ext import tiny

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
TURNS = 6
KEYS = ("plain", "generate", "drafter")
TOKENS = 6


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    place = tmp_path / "question.jsonl"
    place.write_text("\n".join(json.dumps(row) for row in QUESTIONS) + "\n", encoding="utf-8")
    return place


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed but the turns, and no report is drawn."""
    only_turns(monkeypatch)


def only_turns(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prepare, "surroundings", lambda *_, **__: {})
    patch.setattr(report, "run", lambda _: 0)


def command(folder: Path, questions: Path, *more: str) -> list[str]:
    return [
        "paper", "--output", str(folder), "--questions", str(questions),
        "--max-new-tokens", str(TOKENS), "--plan-seconds", "0", "--no-compile",
        "--methods", ",".join(KEYS), *more,
    ]  # fmt: skip


def test_a_run(tmp_path: Path, questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert main(command(folder, questions, "--repeats", "2")) == 0
    out = capsys.readouterr().out
    assert "plain decoding, eager" in out
    assert "target <- drafter" in out
    assert {"report.md", "report.json", "report.html"} <= {one.name for one in folder.iterdir()}
    run = record.read_run(folder)
    facts, turns = run.facts, run.turns
    assert [one["name"] for one in facts["methods"]] == list(KEYS)
    assert [one["name"] for one in facts["methods"] if one["baseline"]] == ["plain"]
    assert facts["settings"]["template"] == "tiny"
    assert facts["versions"]["torch"]
    assert {one["name"] for one in facts["models"]} == {"eager target", "drafter"}
    assert set(facts["pass_seconds"]) == {"target", "drafter"}
    assert 0.3 < facts["overlap"]["drafter"] < 1
    assert facts["weight_bytes"]["target"] > facts["weight_bytes"]["drafter"] > 1e6
    assert facts["copy_bandwidth_bytes_per_second"] > 1e8
    # What was spent, by part: turns are a little more than what is measured of them.
    (spent,) = facts["seconds"]
    assert list(spent) == [
        "models", "W4 copy", "compilation", "passes", "warm-up", "turns",
    ]  # fmt: skip
    measured = sum(turn.seconds or 0.0 for turn in turns)
    assert measured < spent["turns"] < 2 * measured + 1
    report_text = (folder / "report.md").read_text()
    whole = sum(spent.values()) - spent["turns"]
    assert f"Preparation: {whole:.0f} s (models {spent['models']:.0f} s, " in report_text
    assert f"; turns: {spent['turns']:.0f} s; in all " in report_text
    # Every turn of every question, method and repeat once, the baseline before the others.
    assert len({turn.key for turn in turns}) == len(turns) == TURNS * len(KEYS) * 2
    assert [turn.method for turn in turns[:: len(KEYS)]] == ["plain"] * TURNS * 2
    # The others take turns in coming next.
    assert len({turns[n + 1].method for n in range(0, len(turns), len(KEYS))}) == 2
    tasks = {turn.question_id: turn.task for turn in turns}
    assert list(tasks.values()) == ["mt_bench", "translation", "summarization", "qa", "math"]
    for turn in turns:
        assert turn.ok
        assert turn.tokens is not None
        assert turn.new_tokens == len(turn.tokens) <= TOKENS
        assert turn.seconds is not None
        assert turn.lossless is not None
        # Greedy texts are the same but for ties of rounding.
        assert turn.lossless["identical"] or turn.lossless["gap"] < 1e-4
        assert 1 not in turn.tokens[:-1]
        assert turn.ended == ("eos" if turn.tokens[-1] == 1 else "length")
        if turn.method == "generate":
            assert turn.levels == []
            assert turn.prefill_seconds is None
            continue
        names = [level.name for level in turn.levels]
        assert names == (["target"] if turn.method == "plain" else ["target", "drafter"])
        target = turn.levels[0]
        assert sum(target.accepted) == turn.new_tokens
        assert len(target.accepted) == target.passes
        assert turn.prefill_seconds is not None
        assert 0 < turn.prefill_seconds < turn.seconds
        assert 0 < sum(level.seconds for level in turn.levels) < turn.seconds
    drafted = [turn.levels[0].accepted for turn in turns if turn.method == "drafter"]
    assert max(max(counts) for counts in drafted) > 1


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("temperature", ["0", "1"])
def test_questions_in_batches(tmp_path: Path, questions: Path, temperature: str) -> None:
    """A batch has questions with as many turns; each has its own text, counts and share of the
    seconds, and the seed that it has alone."""
    sampled = ("--temperature", temperature)
    assert main(command(tmp_path / "one", questions, *sampled)) == 0
    assert main(command(tmp_path / "two", questions, *sampled, "--batch", "2")) == 0
    alone = {turn.key: turn for turn in record.read_run(tmp_path / "one").turns}
    run = record.read_run(tmp_path / "two")
    assert run.facts["settings"]["batch"] == 2
    together = [(81,), (81,), (161, 241), (321, 401)]
    found = [tuple(t.question_id for t in run.turns if t.method == "plain")]
    assert found == [tuple(one for batch in together for one in batch)]
    assert {turn.question_id: turn.batch for turn in run.turns} == {
        81: 1, 161: 2, 241: 2, 321: 2, 401: 2,
    }  # fmt: skip
    (spent,) = run.facts["seconds"]
    assert sum(turn.seconds or 0.0 for turn in run.turns) < spent["turns"]
    for turn in run.turns:
        assert turn.tokens is not None
        assert turn.prompt_tokens == alone[turn.key].prompt_tokens
        if turn.method != "generate" or temperature == "0":  # which has one seed for all rows
            assert turn.tokens == alone[turn.key].tokens
        for level in turn.levels[:1]:
            assert sum(level.accepted) == turn.new_tokens
            assert level.passes >= len(level.accepted)
    # Killed between the rows of a batch: the batch is measured again, what is there stays.
    lines = (tmp_path / "two" / record.TURNS).read_text().splitlines(keepends=True)
    places = [n for n, turn in enumerate(run.turns) if turn.question_id == 161]
    kept = places[1] + 1
    (tmp_path / "two" / record.TURNS).write_text("".join(lines[:kept]))
    assert main(command(tmp_path / "two", questions, *sampled, "--batch", "2")) == 0
    after = record.read_run(tmp_path / "two").turns
    assert after[:kept] == run.turns[:kept]
    assert [(t.key, t.tokens) for t in after] == [(t.key, t.tokens) for t in run.turns]


METHOD = """
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
import torch
zero = 0
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
        "--no-compile", "--max-new-tokens", str(TOKENS), "--per-task", "1", "--methods", "plain",
    ]  # fmt: skip
    for name in ("greedy", "few"):
        words += ["--method", f"{name}={tmp_path / 'mine.py'}:{name}"]
    assert main(words) == 1  # since `few` gives too few rows
    run = record.read_run(tmp_path / "run")
    assert run.facts["settings"]["questions"] == "polyspec_ext"
    assert len(run.turns) == 7 * 3
    for turn in run.turns:
        assert turn.ok == (turn.method != "few")
        if turn.ok:
            assert len(turn.tokens or []) <= TOKENS
            assert turn.lossless is not None
            assert turn.lossless["identical"] or turn.lossless["gap"] < 1e-4
    for wrong, text in (
        ("mine.py:few", "expected NAME=FILE.py:FUNCTION"),
        (f"plain={tmp_path / 'mine.py'}:few", "whose name is another's"),
        (f"x={tmp_path / 'none.py'}:few", "with no such file"),
        (f"x={tmp_path / 'mine.py'}:zero", "with no such function"),
    ):
        capsys.readouterr()
        assert main([*words, "--method", wrong]) == 2
        assert text in capsys.readouterr().err


def test_methods_that_answer_one_prompt_at_a_time(
    tmp_path: Path, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--batch", "2", "--methods", "plain,assisted:drafter")
    assert main(command(tmp_path / "run", questions, *more)) == 2
    assert "--batch: expected 1 with assisted:drafter" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("bare")
def test_a_killed_run_goes_on(
    tmp_path: Path, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    called = counted(monkeypatch)
    assert main(command(folder, questions)) == 0
    before = record.read_run(folder)
    whole = len(before.turns)
    warm_up = len(called) - whole
    assert warm_up == len(KEYS)
    # Killed in the middle of a line, between the two turns of a question.
    lines = (folder / record.TURNS).read_text().splitlines(keepends=True)
    kept = 4
    (folder / record.TURNS).write_text("".join(lines[:kept]) + lines[kept][:70])
    assert len(record.read_turns(folder)) == kept
    called.clear()
    assert main(command(folder, questions)) == 0
    assert len(called) == warm_up + whole - kept
    after = record.read_run(folder)
    assert [turn.key for turn in after.turns] == [turn.key for turn in before.turns]
    assert after.turns[:kept] == before.turns[:kept]
    assert [turn.tokens for turn in after.turns] == [turn.tokens for turn in before.turns]
    assert len(after.facts["continued"]) == 1
    # The one that was killed would not tell of its turns; this one ended.
    assert ["turns" in one for one in after.facts["seconds"]] == [True, True]
    # A finished one has nothing left to do, and neither has one whose last line lacks its end.
    text = (folder / record.TURNS).read_text()
    (folder / record.TURNS).write_text(text.rstrip("\n"))
    called.clear()
    assert main(command(folder, questions)) == 0
    assert len(called) == warm_up
    assert (folder / record.TURNS).read_text() == text


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Methods in the order in which they are called from now on."""
    called: list[str] = []
    real = methods.Call.answer

    def answer(self: methods.Call, request: Any) -> Any:
        called.append(self.method.name)
        return real(self, request)

    monkeypatch.setattr(methods.Call, "answer", answer)
    return called


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (("--max-new-tokens", "11"), "settings.max_new_tokens: 6 there, 11 now"),
        (("--seed", "3"), "settings.seed"),
        (("--methods", "plain,drafter"), "settings.methods"),
        (("--per-task", "1", "--temperature", "0.5"), "settings.temperature"),
    ],
)
def test_other_settings_are_refused(
    begun: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], named: str
) -> None:
    text = (begun / record.TURNS).read_text()
    facts = (begun / record.FACTS).read_text()
    assert main(command(begun, begun.parent / "question.jsonl", *more)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --output: expected the settings of the run that")
    assert named in error
    assert (begun / record.TURNS).read_text() == text
    assert (begun / record.FACTS).read_text() == facts


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("begun")
    place = folder / "question.jsonl"
    place.write_text(json.dumps(QUESTIONS[3]) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        only_turns(patch)
        assert main(command(folder / "run", place)) == 0
    return folder / "run"


def test_other_questions_are_refused(begun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = begun.parent / "others.jsonl"
    place.write_text(json.dumps({**QUESTIONS[3], "turns": ["who has 13 eggs"]}) + "\n")
    assert main(command(begun, place)) == 2
    assert "settings.digest" in capsys.readouterr().err


def failing(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[[methods.Call, Any], bool]
) -> list[list[int]]:
    """Calls for which `wrong` holds raise; the prompts of the others that follow."""
    real, prompts = methods.Call.answer, []

    def answer(self: methods.Call, request: Any) -> Any:
        if wrong(self, request):
            raise RuntimeError("no memory\nleft")
        prompts.append(request.prompts[0])
        return real(self, request)

    monkeypatch.setattr(methods.Call, "answer", answer)
    return prompts


@pytest.mark.usefixtures("bare")
def test_a_failed_turn_has_no_numbers(
    tmp_path: Path, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first question's first turn has the seed of the warm-up: that must not end the run.
    failing(monkeypatch, lambda call, asked: call.method.name == "drafter" and asked.seeds == [0])
    folder = tmp_path / "run"
    assert main(command(folder, questions)) == 1
    turns = record.read_run(folder).turns
    failed = [turn for turn in turns if not turn.ok]
    assert [(turn.question_id, turn.turn, turn.method) for turn in failed] == [
        (81, 0, "drafter"),
        (81, 1, "drafter"),
    ]
    assert [turn.error for turn in failed] == [
        "RuntimeError: no memory left",
        "the turn before failed",
    ]
    numbers = ("prompt_tokens", "new_tokens", "seconds", "prefill_seconds", "ended", "tokens")
    for turn in failed:
        assert all(getattr(turn, name) is None for name in (*numbers, "lossless", "cut"))
        assert turn.levels == []
    later = [turn for turn in turns if turn.method == "drafter" and turn.question_id != 81]
    assert len(later) == 4
    assert all(turn.ok for turn in later)
    # A failed turn is done: it is not tried again.
    monkeypatch.undo()
    only_turns(monkeypatch)
    assert main(command(folder, questions)) == 1
    assert record.read_run(folder).turns == turns


@pytest.mark.usefixtures("bare")
def test_where_the_baseline_fails_nothing_is_said_of_the_others(
    tmp_path: Path, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, lambda call, asked: call.method.name == "plain" and asked.seeds == [16])
    folder = tmp_path / "run"
    assert main(command(folder, questions)) == 1
    turns = record.read_run(folder).turns
    assert [turn.question_id for turn in turns if not turn.ok] == [161]
    others = [turn for turn in turns if turn.question_id == 161 and turn.ok]
    assert [turn.lossless for turn in others] == [None, None]


@pytest.mark.usefixtures("bare")
def test_later_turns_have_the_methods_own_answers(
    tmp_path: Path, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = methods.Call.answer

    def answer(self: methods.Call, request: Any) -> Any:
        new = real(self, request)
        return new._replace(texts=[[75, 76, 77]]) if self.method.name == "drafter" else new

    monkeypatch.setattr(methods.Call, "answer", answer)
    prompts: dict[tuple[str, int], list[int]] = {}
    watched = methods.Call.answer

    def note(self: methods.Call, request: Any) -> Any:
        prompts[self.method.name, request.seeds[0]] = request.prompts[0]
        return watched(self, request)

    monkeypatch.setattr(methods.Call, "answer", note)
    folder = tmp_path / "run"
    assert main(command(folder, questions)) == 0
    tokenizer = tiny.tokenizer()
    turns = {turn.key: turn for turn in record.read_run(folder).turns}
    first, second = QUESTIONS[0]["turns"]
    for name in KEYS:
        own = turns[81, 0, name, 0].tokens
        assert own is not None
        said = tokenizer.decode(own, skip_special_tokens=True).strip()
        text = f"Question: {first}\nAnswer: {said}\n\nQuestion: {second}\nAnswer:"
        assert prompts[name, 1] == tokenizer(text).input_ids
    assert prompts["plain", 1] == prompts["generate", 1] != prompts["drafter", 1]
    # Prompts that differ leave nothing to compare.
    assert turns[81, 0, "drafter", 0].lossless["identical"] is False  # type: ignore[index]
    assert turns[81, 1, "drafter", 0].lossless is None
    assert turns[81, 1, "generate", 0].lossless is not None
