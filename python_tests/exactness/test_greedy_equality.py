"""Greedy texts that differ by a tie of two logits, or by a mistake."""

from __future__ import annotations

from benchmarks.measuring import first_difference
from polyspec_ext import tiny
from polyspec_ext.tiny import QUESTIONS


def test_a_difference_that_is_no_tie_is_seen() -> None:
    chain = tiny.chain(("target", "drafter"))
    (prompt,) = tiny.prompt_ids(QUESTIONS[:1])
    plain = chain.generate(prompt, 12).sequences[0, len(prompt) :].tolist()
    model = chain.levels[0].model  # type: ignore[attr-defined]
    assert first_difference(model, prompt, plain, list(plain)) is None
    found = first_difference(model, prompt, plain, [*plain[:5], plain[5] ^ 1, *plain[6:]])
    assert found is not None
    assert found["at"] == 5
    assert not found["tie"]
