"""The seams of a drafter that is told hidden states, and begins behind copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
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
from polyspec_ext.policies import RoundReport

V = 5
PROMPT = [1, 3, 0]
LAYER = 7


class HiddenLevel(TreeLevel):
    """A level whose state of a token is the token, its position and the level's seed."""

    def __init__(self, seed: int, name: str, size: int = 3) -> None:
        super().__init__(V, seed, name, size)
        self.seed = seed

    @property
    def capabilities(self) -> LevelCapabilities:
        return LevelCapabilities(batches=True, hidden_states=True, hidden_size=self.size)

    def _named(self, states: Any) -> Any:
        for own in states.values():
            own[..., 2] = self.seed
        return states

    def prefill(self, prompts: PromptBatch) -> dict[int, torch.Tensor]:
        return self._named(super().prefill(prompts))

    def forward(self, block: InputBlock) -> LevelOutput:
        out = super().forward(block)
        return out._replace(hidden=self._named(out.hidden) or None)


class OwnLevel(HiddenLevel):
    """The same, of one sequence. `wrong` makes what it returns instead of its states."""

    def __init__(self, wrong: Any = None) -> None:
        super().__init__(1, "own")
        self._wrong = wrong

    capabilities = LevelCapabilities(hidden_states=True)

    def prefill(self, prompts: PromptBatch) -> Any:
        states = super().prefill(prompts)
        return states if self._wrong is None else self._wrong(states)


class HiddenDrafter(TreeDrafter):
    """A batched drafter that counts upwards, and checks which tokens states are of."""

    name = "hidden"

    def __init__(self, size: int | None = None) -> None:
        self.vocab_size = V
        self._size = size  # None: every level's states are told
        self.seen: dict[int, dict[int, set[int]]] = {}  # positions by request and level
        self._requests: Sequence[int] = []

    def rollback(self, lengths: RowCounts) -> RowCounts:
        for request, length in zip(self._requests, lengths, strict=True):
            for level, positions in self.seen.get(request, {}).items():
                self.seen[request][level] = {at for at in positions if at < length}
        return lengths

    def select(self, rows: Sequence[int]) -> None:
        self._requests = [self._requests[row] for row in rows]

    @property
    def capabilities(self) -> DrafterCapabilities:
        return DrafterCapabilities(hidden_layers=(LAYER,), hidden_size=self._size)

    def draft(self, inputs: DraftInput) -> DraftBlock:
        self._requests = inputs.requests
        hidden = inputs.hidden
        assert isinstance(hidden, HiddenStates)
        for b, request in enumerate(inputs.requests):
            text, begin = inputs.text(b).tolist(), int(hidden.positions[b])
            if inputs.counts[b]:  # what is to be read begins with what is told
                unread = inputs.tokens[b, : int(inputs.counts[b])].tolist()
                assert unread == text[begin:]
            for j in range(int(hidden.counts[b])):
                token, position, level = hidden.layers[LAYER][b, j].tolist()
                assert [token, position] == [text[begin + j], begin + j]
                levels = self.seen.setdefault(request, {})
                levels.setdefault(int(level), set()).add(begin + j)
        for b, request in enumerate(inputs.requests):
            if inputs.lengths[b] and self._size is None:  # all but the last token has a state
                told_of = set().union(*self.seen.get(request, {}).values())
                assert told_of == set(range(len(inputs.text(b)) - 1))
        counts = torch.as_tensor(inputs.counts)
        last = inputs.tokens.gather(1, (counts - 1).clamp_min(0)[:, None])
        return DraftBlock((last + torch.arange(1, inputs.most + 1)) % V)


def test_states_of_rejected_tokens_are_not_told() -> None:
    """The level between has other states, and rejects tokens that the lower one has read."""
    levels = [HiddenLevel(1, "a"), HiddenLevel(2, "wider", size=4), HiddenLevel(3, "c")]
    drafter = HiddenDrafter(size=3)
    chain = ps.Chain([*levels, drafter], [6, 4, 2])
    out = chain.generate([PROMPT, [2]], 40, temperature=1.0, seed=3, eos_token_id=[])
    assert out.stats.levels[1].num_accepted_tokens < out.stats.levels[1].num_draft_tokens - 5
    assert all(set(drafter.seen[b]) == {1, 3} for b in range(2))


def test_states_wait_for_a_rows_next_draft() -> None:
    """Every third round of the target a request is drafted for, each in a round of its own."""
    rounds: Counter[int] = Counter()

    def windows(report: RoundReport) -> Sequence[int]:
        rounds[report.request] += 1
        return [2] if (rounds[report.request] + report.request) % 3 == 0 else [0]

    drafter, policy = HiddenDrafter(), SimpleNamespace(next=windows)
    chain = ps.Chain([HiddenLevel(1, "a"), drafter], [2], policy=policy)
    out = chain.generate([PROMPT, [2], [4, 4, 1, 0]], max_new_tokens=20)
    assert out.sequences.shape[0] == 3
    assert all(len(drafter.seen[request][1]) > 10 for request in range(3))


def test_a_level_of_a_users_own() -> None:
    chain = ps.Chain([OwnLevel(), HiddenDrafter()])
    out = chain.generate(PROMPT, max_new_tokens=20)
    assert torch.equal(out.sequences, ps.Chain([ToyLevel(V, 1)]).generate(PROMPT, 20).sequences)


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
    above: list[Any] = [HiddenLevel(1, "first"), HiddenLevel(2, "second")]
    above[place] = ToyLevel(V, 3, name="plain")
    with pytest.raises(ValueError, match=r"^plain: expected a level that gives hidden states"):
        ps.Chain([*above, HiddenDrafter()])


class Going(Admitting):
    """A level whose batch can begin behind copies, and no row can join."""

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
        restore = property()  # type: ignore[assignment]

    wrong = levels()
    wrong[place] = Silent(V, 1, name="silent")
    with pytest.raises(ValueError, match="silent: expected an attribute `restore` beside"):
        ps.Chain(wrong, [2])
