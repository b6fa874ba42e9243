"""``bench generate``, on a chain of untrained models behind POLYSPEC_TINY."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import saved_chain
import torch

from polyspec_ext import cli, tiny
from polyspec_ext.bench import generation, generation_calls, machine, measuring

pytestmark = pytest.mark.usefixtures("tiny_untrained")

SMALL = [
    "--prompts",
    "3",
    "--batch",
    "2",
    "--repeats",
    "2",
    "--max-new-tokens",
    "6",
    "--compile",
    "none",
]


def bench(capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, dict[str, Any]]:
    status = cli.main(["bench", "generate", "--json", *SMALL, *more])
    return status, json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def models(untrained: Path) -> dict[str, Any]:
    from polyspec_ext.levels import load

    return {name: load(untrained / name).model for name in tiny.LEVELS}


def packed(models: dict[str, Any]) -> dict[str, Any]:
    from polyspec_ext.levels import HuggingFaceLevel

    return {name: HuggingFaceLevel(model, pack=True) for name, model in models.items()}


KINDS = (generation.PLAIN, generation_calls.GENERATE)


def request(count: int, temperature: float = 0.0) -> generation_calls.Request:
    prompts = [[0, 30, 31, 32], [0, 40], [0, 50, 51]]
    return generation_calls.Request(prompts[:count], 9, temperature, [3, 4, 5][:count])


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    status, report = bench(capsys)
    assert status == 0
    assert report["settings"]["prompts"] == 3
    assert report["machine"]["threads"] == torch.get_num_threads()
    assert [result["temperature"] for result in report["results"]] == [0, 1]
    for result in report["results"]:
        rows = result["rows"]
        assert [row["batch"] for row in rows].count(2) == 5
        assert sum(row["kind"] == generation_calls.ASSISTED for row in rows) == 4
        assert rows[0]["kind"] == generation.PLAIN
        assert rows[0]["x_plain"]["median"] == 1
        for row in rows:
            rate = row["tokens_per_second"]
            assert 0 < rate["low"] <= rate["median"] <= rate["high"]
            assert (row["stats"] is not None) == (row["kind"] in ("chain", generation.PLAIN))
            if row["stats"] is not None:
                decoding = row["decoding_tokens_per_second"]
                assert decoding == row["stats"]["tokens_per_second"]
                # Every repeat of every prompt, and not the warm-up.
                assert row["stats"]["num_requests"] == 6
                assert row["stats"]["num_new_tokens"] == row["new_tokens"]
        assert len(result["targets"]) == 8
        plain = [row for row in rows if row["batch"] == 1 and row["kind"] in KINDS]
        best = max(plain, key=lambda row: row["tokens_per_second"]["median"])
        over = result["targets"][4]
        assert over["text"].endswith(f"the fastest plain decoding, {best['label']}")
        chains = [row for row in rows if row["batch"] == 1 and row["kind"] == "chain"]
        assert over["text"].startswith(
            max(chains, key=lambda row: row["tokens_per_second"]["median"])["label"]
        )
        assert result["targets"][0]["text"].endswith("at least 1x transformers generate")
    for row in report["results"][0]["rows"]:
        assert row["new_tokens"] == report["results"][0]["rows"][0]["new_tokens"]
        assert row["differences"] == []
    text = generation.generation_table.markdown(report)
    assert f"{report['machine']['threads']} threads of" in text
    assert text.count(" 3 of 3 |") == len(report["results"][0]["rows"])
    assert text.count("at least 1.3x") == 6
    assert text.count("; decoding alone ") == 6
    assert list(report["choices"]) == list(tiny.LEVELS)
    assert f"- target: {report['choices']['target']}" in text


def test_ignoring_the_eos(capsys: pytest.CaptureFixture[str]) -> None:
    status, report = bench(capsys, "--ignore-eos", "--temperature", "0,1")
    assert status == 0
    for result in report["results"]:
        assert {row["new_tokens"] for row in result["rows"]} == {2 * 3 * 6}
    assert "EOS ignored, 6 new tokens each" in generation.generation_table.markdown(report)


def test_a_text_that_differs_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_chain.end_wrongly(monkeypatch)
    status, report = bench(capsys, "--temperature", "0")
    assert status == 1
    wrongs = [row["label"] for row in report["results"][0]["rows"] if row["differences"]]
    assert set(wrongs) == {"chain: target, middle, drafter"}
    assert "DIFFER**" in generation.generation_table.markdown(report)


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_everybody_answers_alike(models: dict[str, Any], batch: int, ends: bool) -> None:
    """Greedy texts are equal, whoever makes them; ragged prompts and texts are no obstacle."""
    config = models["target"].generation_config
    before = config.eos_token_id
    if ends:  # in the middle of the last text, and wherever else it comes up
        plain = generation.contenders(models, batch, packed(models))[0]
        text = plain.decode(
            generation_calls.Request(request(batch).prompts[-1:], 9, 0.0, [3])
        ).texts[0]
        config.eos_token_id = text[3]
    try:
        texts = {
            one.label + str(one.batch): one.decode(request(one.batch)).texts
            for one in generation.contenders(models, batch, packed(models))
            if one.batch == batch
        }
    finally:
        eos, config.eos_token_id = config.eos_token_id, before
    first = next(iter(texts.values()))
    assert len(first) == batch
    assert all(len(text) == 9 or text[-1] == eos for text in first)
    assert (len(first[-1]) < 9) == ends
    for label, own in texts.items():
        assert own == first, label


def test_a_prompt_has_one_seed_however_it_is_run(models: dict[str, Any]) -> None:
    made = [
        one
        for one in generation.contenders(models, 3, tiny.levels())
        if one.kind == generation.PLAIN
    ]
    prompts = request(3).prompts
    options: dict[str, Any] = {"max_new_tokens": 7, "temperature": 1.0, "seed": 5}
    measuring.measure(made, prompts, repeats=2, **options)
    assert made[0].texts == made[1].texts
    assert sum(made[0].tokens.values()) == sum(made[1].tokens.values())
    assert len(made[0].rates()) == 2


def test_the_assistant_keeps_its_settings(models: dict[str, Any]) -> None:
    drafter = models["drafter"]
    before = drafter.generation_config
    told = before.to_dict()
    seen: list[Any] = []
    forward = drafter.forward

    def watched(*args: Any, **options: Any) -> Any:
        seen.append(drafter.generation_config)
        return forward(*args, **options)

    drafter.forward = watched
    eos = frozenset({1})
    generation_calls.generate_call(models["target"], eos, drafter, 3)(request(1))
    constant = seen[-1]
    generation_calls.generate_call(models["target"], eos, drafter)(request(1, 1.0))
    del drafter.forward
    assert constant.num_assistant_tokens == 3
    assert constant.assistant_confidence_threshold == 0
    assert seen[-1].num_assistant_tokens == before.num_assistant_tokens
    assert drafter.generation_config is before
    assert before.to_dict() == told


def test_passes_by_how_a_level_runs(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "levels", "--repeats", "2", "--tokens", "1,3"]
    assert cli.main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {row["level"] for row in report["rows"]} == set(tiny.LEVELS)
    for name in tiny.LEVELS:
        configs = [row["config"] for row in report["rows"] if row["level"] == name]
        assert configs[0] == "float32"
        assert set(configs) <= {f"{d}{p}" for d in ("float32", "bfloat16") for p in ("", " packed")}
    assert all(len(row["ms"]) == 2 and min(row["ms"]) > 0 for row in report["rows"])
    assert cli.main(words) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].endswith(report["machine"]["cpu"])
    assert sum(line.startswith("| target, float32") for line in table) >= 1
    assert len([line for line in table if line.startswith("|")]) == 2 + len(report["rows"])


def test_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text('{"question": "a?"}\n{"question": "b?"}\n')
    assert machine.questions(1, file) == (["a?"], "some")
    with pytest.raises(ValueError, match="expected at most 2 of some, given 3"):
        machine.questions(3, file)
    for line in ('{"prompt": "a?"}', "a?", "7"):
        file.write_text(line)
        with pytest.raises(ValueError, match='--questions: expected JSON lines with "question"'):
            machine.questions(1, file)
    monkeypatch.setattr(machine, "GSM8K", tmp_path / "none")
    assert machine.questions(2, None) == (list(machine.QUESTIONS[:2]), "built-in questions")


def test_bad_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "generate", "--repeats", "0"]) == 2
    assert "--repeats" in capsys.readouterr().err
