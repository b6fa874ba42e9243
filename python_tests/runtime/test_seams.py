"""The interface of a drafter that reads hidden states, and begins after copies."""

from typing import Any

import pytest
import torch
from toy import ToyLevel
from toy_rows import Admitting
from toy_trees import TreeDrafter, TreeLevel

import polyspec_ext as ps
from polyspec_ext.drafters.base import DraftBlock, DrafterCapabilities, DraftInput, HiddenStates
from polyspec_ext.levels import RowCounts
from polyspec_ext.levels.base import InputBlock, LevelCapabilities, LevelOutput, PromptBatch

V = 5
PROMPT = [1, 3, 0]
LAYER = 7


class OwnLevel(TreeLevel):
    """A level of one sequence. `wrong` replaces the states that it returns."""

    capabilities = LevelCapabilities(hidden_states=True)

    def __init__(self, wrong: Any = lambda states: states) -> None:
        super().__init__(V, 1, "own")
        self._wrong = wrong

    def prefill(self, prompts: PromptBatch) -> Any:
        return self._wrong(super().prefill(prompts))


class HiddenDrafter(TreeDrafter):
    """A batched drafter that counts upwards, and checks which tokens states are of."""

    name = "hidden"
    capabilities = DrafterCapabilities(hidden_layers=(LAYER,))

    def __init__(self) -> None:
        self.vocab_size = V

    def rollback(self, lengths: RowCounts) -> RowCounts:
        return lengths

    def draft(self, inputs: DraftInput) -> DraftBlock:
        assert isinstance(inputs.hidden, HiddenStates)
        begin, count = int(inputs.hidden.positions[0]), int(inputs.hidden.counts[0])
        text = inputs.text(0).tolist()
        told = inputs.hidden.layers[LAYER][0, :count].tolist()
        assert told == [[text[at], at] for at in range(begin, begin + count)]
        return DraftBlock((text[-1] + torch.arange(1, inputs.most + 1))[None] % V)


class Marked(TreeLevel):
    """A level with states that are the level's number."""

    capabilities = LevelCapabilities(batches=True, hidden_states=True, trees=True)

    def __init__(self, number: int) -> None:
        super().__init__(V, 1, f"level {number}")  # all are accepted
        self._number = number

    def prefill(self, prompts: PromptBatch) -> Any:
        states = super().prefill(prompts)
        return {layer: torch.full_like(x, self._number) for layer, x in states.items()}

    def forward(self, block: InputBlock) -> LevelOutput:
        out = super().forward(block)
        hidden = out.hidden or {}
        marked = {layer: torch.full_like(x, self._number) for layer, x in hidden.items()}
        return out._replace(hidden=marked)


def test_a_drafter_reads_the_states_of_the_target_where_it_has_them() -> None:
    levels, sources = [Marked(1), Marked(2)], set()

    class Sources(HiddenDrafter):
        def draft(self, inputs: DraftInput) -> DraftBlock:
            text, begin = inputs.text(0).tolist(), int(inputs.hidden.positions[0])
            read = len(levels[0].caches[0])
            assert levels[0].caches[0] == text[:read]
            for at in range(int(inputs.hidden.counts[0])):
                source = int(inputs.hidden.layers[LAYER][0, at, 0])
                assert source == (1 if begin + at < read else 2)
                sources.add(source)
            return DraftBlock((text[-1] + torch.arange(1, inputs.most + 1))[None] % V)

    ps.Chain([*levels, Sources()], [4, 2]).generate(PROMPT, 60, eos_token_id=[])
    assert sources == {1, 2}


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (lambda x: None, TypeError, "hidden states by layer, given NoneType"),
        (lambda x: {}, TypeError, "hidden states of layer 7, given NoneType"),
        (lambda x: {LAYER: x[LAYER].long()}, TypeError, "of layer 7, given a tensor of dtype"),
        (lambda x: {LAYER: x[LAYER][:, :-1]}, ValueError, r"\[B, T, H\] = \[1, 2, H\] of layer 7"),
    ],
    ids=["none", "no layers", "integers", "too few"],
)
def test_wrong_states_of_a_users_level(wrong: Any, error: type[Exception], text: str) -> None:
    chain = ps.Chain([OwnLevel(wrong), HiddenDrafter()])
    with pytest.raises(error, match=f"^own: expected .*{text}"):
        chain.generate(PROMPT, 4)


@pytest.mark.parametrize("place", [0, 1])
def test_levels_without_hidden_states_are_named(place: int) -> None:
    above: list[Any] = [TreeLevel(V, 1, "first"), TreeLevel(V, 2, "second")]
    above[place] = ToyLevel(V, 3, name="plain")
    with pytest.raises(ValueError, match=r"^plain: expected a level that gives hidden states"):
        ps.Chain([*above, HiddenDrafter()])


class Going(Admitting):
    """A level with batches that can begin after copies, and cannot be joined."""

    capabilities = LevelCapabilities(batches=True, continues=True)


@pytest.mark.parametrize("place", [0, 1], ids=["target", "draft"])
def test_a_users_level_begins_behind_copies(place: int) -> None:
    def levels() -> list[Any]:
        return [Going(V, 1), Going(V, 2)]

    chain, text = ps.Chain(levels(), [2]), [1, 2, 3]
    for _ in range(3):
        stream = chain.stream(text, 4, temperature=1.0, seed=5, cache_prompt=True)
        more = list(stream)
        alone = ps.Chain(levels(), [2]).generate(text, 4, temperature=1.0, seed=5)
        assert alone.sequences[0].tolist() == [*text, *more]
        assert stream.stats.num_cached_tokens == (len(text) - 2 if len(text) > 3 else 0)
        text = [*text, *more, 1]

    class Silent(Going):
        restore = property()

    wrong = levels()
    wrong[place] = Silent(V, 1, name="silent")
    with pytest.raises(ValueError, match="silent: expected an attribute `restore` beside"):
        ps.Chain(wrong, [2])
