"""Random chains against the loop of examples/one_screen.py: every row of `Chain` has its tokens."""

from collections.abc import Sequence
from typing import Any

import torch
import toy_rows
from device_rounds import counted
from hypothesis import event, given, settings
from hypothesis import strategies as st
from random_chains import Row, Shape, new_tokens, require_same_alone, rows, run, screen, shapes
from toy import ToyLevel

import polyspec_ext as ps
from polyspec_ext.levels.base import InputBlock, LevelOutput


class Alone(ToyLevel):
    """The level of one row, with logits as wide as the target's."""

    def __init__(self, vocab: int, seed: int, scale: float, above: int) -> None:
        super().__init__(vocab, seed, scale)
        self.above = above  # ids that every level above draws

    def forward(self, tokens: torch.Tensor, keep: int) -> torch.Tensor:
        tokens = tokens.where(tokens < self.vocab_size, 0)
        logits = super().forward(tokens, keep)[..., : self.above]
        missing = max(VOCABS) - logits.shape[2]
        return torch.nn.functional.pad(logits, (0, missing), value=-float("inf"))


class Reusing(toy_rows.Staying):
    """A level with logits in a buffer that every pass overwrites."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.output = toy_rows.Output()

    def forward(self, block: InputBlock) -> LevelOutput:
        with torch._C.DisableTorchFunction():
            return LevelOutput(self.output.view(super().forward(block).logits))


class Checkpoints(toy_rows.Rows):
    """A level that goes back to a checkpoint, of which it has one every `every` tokens."""

    every = 3

    def rollback(self, lengths: Sequence[int]) -> Any:
        kept = [length // self.every * self.every for length in lengths]
        super().rollback(kept)
        return (kept, tuple(kept), torch.tensor(kept))[sum(kept) // self.every % 3]  # any form


def same_tokens(shape, batch, scale, vocabs, checkpoints) -> bool:
    """Compare the rows of a chain of toy levels; return whether the host stayed out of a round."""
    sizes = [vocabs[0], *vocabs[1 : len(shape.window) + 1]]
    levels: list[Any] = [Reusing(size, 11 + i, scale) for i, size in enumerate(sizes)]
    for place in checkpoints & set(range(len(sizes))):
        levels[place] = Checkpoints(sizes[place], 11 + place, scale)
        shape = shape._replace(sync_each_step=None)
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


@settings(max_examples=400)
@given(
    shapes(),
    rows(PROMPTS, 30),
    st.sampled_from([0.6, 1.2]),
    st.lists(st.sampled_from(VOCABS), min_size=4, max_size=4),
    st.one_of(st.just(set()), st.sets(st.integers(0, 3))),
)
def test_every_row_of_a_chain_is_that_of_the_one_screen(
    shape: Shape, batch: list[Row], scale: float, vocabs: list[int], checkpoints: set[int]
) -> None:
    """Toy levels, one cache per row: a wrong cached length shows in the logits."""
    without_host = same_tokens(shape, batch, scale, vocabs, checkpoints)
    event(f"{len(shape.window) + 1} levels, without the host: {without_host}")
