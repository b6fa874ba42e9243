"""The calls that benchmarks measure, on a chain of untrained models; and their questions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import generation_calls, machine
from polyspec_ext import tiny
from polyspec_ext.chain import Chain


@pytest.fixture(scope="module")
def models(untrained: Path) -> dict[str, Any]:
    from polyspec_ext.levels import load

    return {name: load(untrained / name).model for name in tiny.LEVELS}


def request(count: int, temperature: float = 0.0) -> generation_calls.Request:
    prompts = [[0, 30, 31, 32], [0, 40], [0, 50, 51]]
    return generation_calls.Request(prompts[:count], 9, temperature, [3, 4, 5][:count])


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_everybody_answers_alike(models: dict[str, Any], batch: int, ends: bool) -> None:
    """Greedy texts are equal, whoever makes them; ragged prompts and texts are no obstacle."""
    target, drafter = models["target"], models["drafter"]
    config = target.generation_config
    before = config.eos_token_id
    alone = generation_calls.Request(request(batch).prompts[-1:], 9, 0.0, [3])
    if ends:  # in the middle of the last text, and wherever else it comes up
        config.eos_token_id = generation_calls.chain_call(Chain([target]))(alone).texts[0][3]
    eos = frozenset() if config.eos_token_id is None else frozenset([config.eos_token_id])
    try:
        calls = [
            generation_calls.chain_call(Chain([target])),
            generation_calls.chain_call(Chain(list(models.values()), [5, 3])),
            generation_calls.generate_call(target, eos),
        ]
        if batch == 1:
            calls.append(generation_calls.generate_call(target, eos, drafter))
        first, *others = (call(request(batch)).texts for call in calls)
    finally:
        config.eos_token_id = before
    assert len(first) == batch
    assert all(len(text) == 9 or text[-1] in eos for text in first)
    assert (len(first[-1]) < 9) == ends
    assert all(own == first for own in others)


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
    generation_calls.generate_call(models["target"], eos, drafter)(request(1, 1.0))
    del drafter.forward
    assert seen[-1] is not before
    assert seen[-1].num_assistant_tokens == before.num_assistant_tokens
    assert drafter.generation_config is before
    assert before.to_dict() == told


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
    assert machine.questions(2, None) == (list(tiny.QUESTIONS[:2]), "built-in questions")
