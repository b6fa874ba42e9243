"""Chains after long texts, compared in turns."""

from __future__ import annotations

import pytest
from small_models import make

import polyspec_ext as ps
from benchmarks import contexts

PROMPTS = [[*range(3, 30)], [*range(30, 50)]]


def test_chains_of_copies_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy with a window that hides nothing is accepted as often as a copy with all keys."""
    target = ps.HuggingFaceLevel(make("llama"))
    rows = contexts.compare(contexts.chains(target, 32), PROMPTS, 12)
    plain, lookup, copy, near, both, near_both = rows
    assert plain[0] == "plain decoding"
    assert plain[2:] == ("1.00", "-", "1.00")
    assert copy[3:] == near[3:]
    assert both[3:] == near_both[3:]
    assert float(copy[3]) > float(lookup[3])
    monkeypatch.setattr(contexts, "NEAR", {"window": 1, "sinks": 0})
    (*_, near, _, _) = contexts.compare(contexts.chains(target, 32), PROMPTS, 12)
    assert float(near[3]) < float(copy[3])


def test_another_text_is_an_error() -> None:
    chains = {str(seed): ps.Chain([make("llama", seed=seed)]) for seed in (0, 1)}
    with pytest.raises(RuntimeError, match="expected plain decoding's text of all chains, given 2"):
        contexts.compare(chains, PROMPTS, 12)
