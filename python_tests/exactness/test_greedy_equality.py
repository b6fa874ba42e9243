"""Greedy text through the shipped chain is the shipped target's own greedy text, in float32."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.measuring import first_difference
from polyspec_ext import tiny
from polyspec_ext.tiny import QUESTIONS

TOKENS = 96
GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k_test.jsonl"


def questions(count: int) -> list[str]:
    """GSM8K's test split where it lies beside the repository, else our own questions with other
    numbers."""
    if GSM8K.exists():
        lines = GSM8K.read_text(encoding="utf-8").splitlines()[:count]
        return [json.loads(line)["question"] for line in lines]
    own = [q.replace("8", str(2 + i)) for i in range(7) for q in QUESTIONS]
    return own[:count]


@dataclass
class Plain:
    """What transformers makes of the prompts with the target alone."""

    model: Any
    prompts: list[list[int]]
    texts: list[list[int]]


@pytest.fixture(scope="module")
def plain(shipped: None) -> Plain:
    """Decoded once for all chains."""
    model = AutoModelForCausalLM.from_pretrained(str(tiny.path("target")), dtype=torch.float32)
    prompts = tiny.prompt_ids(questions(12))
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            row = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False
            )
        texts.append(row[0, len(prompt) :].tolist())
    return Plain(model, prompts, texts)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("levels", [("target", "drafter"), tiny.LEVELS], ids="-".join)
def test_greedy_equals_plain_decoding(
    levels: tuple[str, ...], rule: str, capsys: pytest.CaptureFixture[str], plain: Plain
) -> None:
    """A first difference passes only as a tie: the two largest logits closer than 1e-4. Ties are
    counted and printed."""
    count = 3 if rule == "block" else 12 if levels == tiny.LEVELS else 5
    chain = tiny.chain(levels, rule=rule)
    ties = []
    for number, (prompt, wanted) in enumerate(
        zip(plain.prompts[:count], plain.texts[:count], strict=True)
    ):
        text = chain.generate(prompt, TOKENS).sequences[0, len(prompt) :].tolist()
        difference = first_difference(plain.model, prompt, wanted, text)
        if difference is not None:
            assert difference["tie"], (
                f"prompt {number}, token {difference['at']}: gap {difference['gap']:.3e}"
            )
            ties.append((number, difference["at"], difference["gap"]))
    with capsys.disabled():
        print(
            f"\n{'-'.join(levels)}, rule {rule}: {count - len(ties)} of {count} texts equal, "
            f"{len(ties)} ties {ties or ''}"
        )


def test_a_difference_that_is_no_tie_is_seen(shipped: None) -> None:
    chain = tiny.chain(("target", "drafter"))
    (prompt,) = tiny.prompt_ids(QUESTIONS[:1])
    plain = chain.generate(prompt, 12).sequences[0, len(prompt) :].tolist()
    model = chain.levels[0].model  # type: ignore[attr-defined]
    assert first_difference(model, prompt, plain, list(plain)) is None
    found = first_difference(model, prompt, plain, [*plain[:5], plain[5] ^ 1, *plain[6:]])
    assert found is not None
    assert found["at"] == 5
    assert not found["tie"]


@pytest.fixture(scope="module")
def shipped() -> None:
    for level in tiny.LEVELS:
        if not (tiny.root() / level / "config.json").exists():
            pytest.skip(f"no shipped {level} in {tiny.root()}")


def test_windows_and_rounds_of_the_shipped_chain() -> None:
    """Its own, unless the caller names others."""
    chain = tiny.chain()
    assert (tuple(chain.window), tuple(chain.rounds)) == ((5, 3), (3,))
    assert tiny.chain(window=[6, 2]).rounds == [2]
    assert tiny.chain(rounds=[1]).rounds == [1]
    assert tiny.chain(("target", "drafter")).rounds == []
