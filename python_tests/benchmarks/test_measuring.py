"""Calls, the loop that the generation benchmarks share, and the loop's statements about texts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.measuring import (
    Z_LIMIT,
    Request,
    chain_call,
    compared,
    generate_call,
    is_lossless,
    verdict,
)
from polyspec_ext import tiny
from polyspec_ext.chain import Chain


def test_ragged_prompts_are_answered_alike() -> None:
    level = tiny.levels(["target"], pack=False)["target"]
    request = Request([[0, 300, 31, 320, 17, 5], [0, 40], [0, 500, 51]], 9, 0.0, [3, 4, 5])
    ours = chain_call(Chain([level]), request).texts
    assert generate_call(level.model, frozenset(level.eos_token_ids), request).texts == ours


class Scores:
    """A model with the same next logits at every position."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, logits: list[float]) -> None:
        self.logits = torch.tensor(logits)

    def __call__(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=self.logits.expand(1, input_ids.shape[1], -1))


def test_greedy_texts_part_at_ties_alone() -> None:
    def judged(second: float, *texts: list[int], dtype: str = "float32") -> dict[str, Any]:
        model = Scores([1.0, second])
        return verdict([compared(model, [2], [0, 0], text) for text in texts], dtype)

    tied = judged(1.0 - 5e-5, [0, 0], [0, 1])
    assert is_lossless(tied)
    assert tied["lossless"].startswith("1 of 2 identical, 1 tied, gap <= 5")
    apart = judged(0.9, [0, 0], [0, 1])
    assert not is_lossless(apart)
    assert "1 of 2 identical, 1 DIFFER" in apart["lossless"]
    assert judged(0.9, [0, 0])["lossless"] == "1 of 1 identical"
    # The data type decides where logits tie.
    assert is_lossless(judged(0.9, [0, 1], dtype="torch.bfloat16"))
    assert compared(Scores([1.0, 0.9]), [2], [0, 0], [0])["at"] == 1
    # Without a model, of another engine, no gap is known.
    assert not is_lossless(verdict([compared(None, [2], [0, 0], [1, 0])], "float32"))


def test_texts_of_another_distribution_are_seen() -> None:
    target = tiny.levels(["target"], pack=False)["target"].model
    drafter = tiny.levels(["drafter"], pack=False, dtype=torch.float32)["drafter"].model
    prompt = [0, 5, 6, 7]

    def deviations(model: Any, temperature: float) -> float:
        rows = Chain([model]).generate([prompt] * 8, 30, temperature, seed=3, eos_token_id=[])
        texts = rows.sequences[:, 4:].tolist()
        found = verdict([compared(target, prompt, [], text, 1.0) for text in texts], target.dtype)
        assert is_lossless(found) == (abs(found["z"]) < Z_LIMIT)
        assert ("NOT the target's" in found["lossless"]) != is_lossless(found)
        return float(found["z"])

    assert abs(deviations(target, 1.0)) < 4
    assert deviations(target, 0.6) > Z_LIMIT
    assert deviations(drafter, 1.0) < -Z_LIMIT
