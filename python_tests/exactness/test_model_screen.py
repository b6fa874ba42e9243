"""Random chains of models against the loop of examples/one_screen.py: caches and executors."""

import functools
from collections.abc import Sequence
from typing import Any

import captured_chains
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_chains import new_tokens, require_same_alone, rows, run, screen, shapes
from recorder import Recorder
from small_models import FAMILIES, make, rough

import polyspec_ext as ps
from polyspec_ext.runtime.graphs import Graphs


class Plain:
    """A level without a cache, which reads its text anew with every pass."""

    def __init__(self, model: Any) -> None:
        self.model, self.vocab_size = model, model.config.vocab_size

    def prefill(self, tokens: torch.Tensor) -> None:
        self.text: list[int] = tokens[0].tolist()

    @torch.inference_mode()
    def forward(self, tokens: torch.Tensor, keep: int) -> torch.Tensor:
        self.text += tokens[0].tolist()
        logits: torch.Tensor = self.model(torch.tensor([self.text]), use_cache=False).logits
        return logits[:, -keep:]

    def rollback(self, lengths: Sequence[int]) -> None:
        del self.text[lengths[0] :]


@functools.cache
def small(family: str, captured: bool) -> tuple[list[Any], list[Any]]:
    """Return levels of small random models, and the same models without a cache."""
    if captured:
        made = [captured_chains.level(i, 3 - min(i, 2), f"level {i}", True) for i in range(4)]
    else:
        target = make(family, vocab=40, seed=5 if family == "qwen3" else 0)
        models = [target, *(rough(target, 0.03, seed=i) for i in range(3))]
        made = [ps.HuggingFaceLevel(model, name=str(i)) for i, model in enumerate(models)]
    return made, [Plain(level.model) for level in made]


@pytest.mark.parametrize(
    ("family", "captured"), [*((family, False) for family in FAMILIES), ("llama", True)]
)
@settings(max_examples=6)
@given(shapes(), rows(st.lists(st.integers(0, 39), min_size=1, max_size=9), 16), st.booleans())
def test_small_models(family, captured, shape, batch, early) -> None:
    """Twice, so that the second call has captured steps, or goes on with caches, of the first."""
    levels, plain = (own[: len(shape.window) + 1] for own in small(family, captured))
    if early and shape.window and not captured:  # the target's first layer, in its cache
        drafter = ps.early_exit(levels[0], 1)
        levels, plain = [*levels[:-1], drafter], [*plain[:-1], Plain(drafter.model)]
    graphs = Graphs(Recorder()) if captured else None
    chain = ps.Chain(levels, **shape.options(), graphs=graphs)
    found: list[Any] = []
    for goes_on in (False, not captured):
        if goes_on:
            batch = [row._replace(prompt=own.tokens) for row, own in zip(batch, found, strict=True)]
        found = run(chain, batch, goes_on)
        for row, own in zip(batch, found, strict=True):
            assert new_tokens(own, row) == screen(plain, shape, row)
    require_same_alone(levels, shape, batch, found)
