"""The EAGLE heads that are shipped for the small target."""

from __future__ import annotations

import json

import pytest
import torch

import polyspec_ext as ps
from polyspec_ext import tiny
from polyspec_ext.drafters import eagle
from polyspec_ext.levels import load

QUESTIONS = (
    "Tom has 3 bags of 8 apples. He eats 4 of them. How many are left?",
    "A train goes 60 miles an hour. How far does it go in 2 hours?",
)


@pytest.mark.parametrize("name", tiny.HEADS)
def test_shipped_heads_draft_for_the_target(name: str) -> None:
    place = tiny.path(name)
    assert eagle.is_head(place)
    level = load(tiny.path("target"))
    tokenizer = level.tokenizer()
    assert tokenizer is not None
    prompts = [tokenizer(tiny.prompt_of(question))["input_ids"] for question in QUESTIONS]
    plain = ps.Chain([level]).generate(prompts, max_new_tokens=40)
    out = ps.Chain([level, place], [4]).generate(prompts, max_new_tokens=40)
    assert torch.equal(out.sequences, plain.sequences)
    # Far above chance, which is 1 in 2,048.
    target = out.stats.levels[0]
    assert target.num_accepted_tokens > 0.05 * target.num_draft_tokens


def test_the_report_has_the_heads() -> None:
    report = json.loads((tiny.root() / "report.json").read_text())
    for name in tiny.HEADS:
        assert len(report[name]["overlap"]) >= 2
        assert 0 < report[name]["overlap"][0] < 1


def test_all_that_is_shipped_stays_small() -> None:
    total = sum(file.stat().st_size for file in tiny.root().rglob("*") if file.is_file())
    assert total < 30e6
