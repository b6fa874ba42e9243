"""Random chains against the loop of examples/one_screen.py: every row of `Chain` has its tokens."""

from __future__ import annotations

import functools
import runpy
from pathlib import Path
from typing import Any

import torch
import toy_rows
from device_rounds import counted
from hypothesis import event, given, settings
from hypothesis import strategies as st
from random_chains import Row, Shape, new_tokens, require_same_alone, rows, run, shapes
from toy import ToyLevel
from transformers import AutoModelForCausalLM

import polyspec_ext as ps
from polyspec_ext import tiny

EXAMPLE = Path(__file__).parents[2] / "examples" / "one_screen.py"
generate = runpy.run_path(str(EXAMPLE))["generate"]


def screen(levels: list[Any], shape: Shape, row: Row) -> list[int]:
    """Return the tokens of the loop on one screen."""
    window, rounds, tail, rule, _ = shape
    options = {"rounds": rounds, "tail": tail, "rule": rule, "eos": row.eos, **row.sampling}
    tokens: list[int] = generate(levels, window, row.prompt, row.max_new_tokens, **options)
    return tokens


class Alone(ToyLevel):
    """The level of one row, whose logits are as wide as the target's."""

    def __init__(self, vocab: int, seed: int, scale: float, above: int) -> None:
        super().__init__(vocab, seed, scale)
        self.above = above  # ids that every level above draws

    def forward(self, tokens: torch.Tensor, keep: int) -> torch.Tensor:
        tokens = tokens.where(tokens < self.vocab_size, 0)
        logits = super().forward(tokens, keep)[..., : self.above]
        missing = max(VOCABS) - logits.shape[2]
        return torch.nn.functional.pad(logits, (0, missing), value=-float("inf"))


def same_tokens(shape: Shape, batch: list[Row], scale: float, vocabs: list[int]) -> bool:
    """Compare the rows of a chain of toy levels; return whether the host stayed out of a round."""
    sizes = [vocabs[0], *vocabs[1 : len(shape.window) + 1]]
    levels = [toy_rows.Staying(size, 11 + i, scale) for i, size in enumerate(sizes)]
    with counted() as read:
        found = run(ps.Chain(levels, **shape.options(), check_vocabulary=False), batch)
    require_same_alone(levels, shape, batch, found)
    for row, own in zip(batch, found, strict=True):
        alone: list[Any] = [
            Alone(size, 11 + i, scale, min(sizes[: i + 1])) for i, size in enumerate(sizes)
        ]
        assert new_tokens(own, row) == screen(alone, shape, row)
    return bool(read)


VOCABS = [7, 9, 9, 9, 12]
PROMPTS = st.lists(st.integers(0, min(VOCABS) - 1), min_size=1, max_size=6)


@settings(max_examples=500)
@given(
    shapes(),
    rows(PROMPTS, 30),
    st.sampled_from([0.6, 1.2]),
    st.lists(st.sampled_from(VOCABS), min_size=4, max_size=4),
)
def test_every_row_of_a_chain_is_that_of_the_one_screen(
    shape: Shape, batch: list[Row], scale: float, vocabs: list[int]
) -> None:
    """Toy levels, one cache per row: a wrong cached length shows in the logits."""
    without_host = same_tokens(shape, batch, scale, vocabs)
    event(f"{len(shape.window) + 1} levels, without the host: {without_host}")


@functools.cache
def shipped(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny.path(name), dtype="float32")


def packed(names: tuple[str, ...]) -> list[Any]:
    """Return levels whose logits do not depend on the batch."""
    return [
        ps.HuggingFaceLevel(shipped(name), name=f"{i}", pack=True) for i, name in enumerate(names)
    ]


@functools.cache
def shipped_levels(names: tuple[str, ...], use: str) -> list[Any]:
    return packed(names)


QUESTIONS = tiny.prompt_ids(["How many legs have 2 cows?", "What is 3 + 4?", "Tom has 3 bags."])
QUESTIONS.append([5])


@settings(max_examples=25)
@given(
    shapes(least=2),
    rows(st.sampled_from(QUESTIONS), 24),
    st.integers(0, 12),
    st.booleans(),
)
def test_the_shipped_models(shape: Shape, batch: list[Row], more: int, cache_prompt: bool) -> None:
    """Two calls, the second of which may go on with the caches of the first."""
    names = ("target", *["middle"] * (len(shape.window) - 1), "drafter")
    eos = list(shipped_levels(names, "chain")[0].eos_token_ids)
    batch = [row._replace(eos=eos) for row in batch]
    chain = ps.Chain(shipped_levels(names, "chain"), **shape.options())
    alone = shipped_levels(names, "alone")
    for turn in range(2):
        found = run(chain, batch, cache_prompt and turn > 0)
        require_same_alone(alone, shape, batch, found)
        texts = [new_tokens(*pair) for pair in zip(found, batch, strict=True)]
        assert texts == [screen(alone, shape, row) for row in batch]
        pairs = zip(batch, texts, strict=True)
        batch = [row._replace(prompt=row.prompt + text, max_new_tokens=more) for row, text in pairs]
