"""Random chains with trees and hidden states against a loop without caches: every row of `Chain`
has its tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import any_head
import pytest
import torch
from device_rounds import counted
from head_screen import Draft, generate
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from random_chains import Row, Shape, new_tokens, require_same_alone, rows, run, shapes
from told import draft_input, prompts, told
from toy_trees import StayingTrees
from transformers import AutoModelForCausalLM

import polyspec_ext as ps
from polyspec_ext import tiny
from polyspec_ext.drafters.base import DrafterCapabilities
from polyspec_ext.levels.base import InputBlock, PromptBatch
from polyspec_ext.sampling import Sampling
from polyspec_ext.tensors import RowParameters

VOCAB, SIZE = 7, any_head.SIZE


class Level(StayingTrees):
    """A level whose hidden states name it, and as the oracle reads it."""

    def __init__(self, number: int, layers: int = 1) -> None:
        super().__init__(VOCAB, 11 + number, size=SIZE)
        self.number, self.layers = number, layers

    def _named(self, states: torch.Tensor) -> torch.Tensor:
        states = states.clone()
        states[..., 0] -= VOCAB / 2
        states[..., 1] = (states[..., 1] * 0.7).cos()
        states[..., 2] = 2.0 * self.number - 1
        return states

    def prefill(self, prompts: Any) -> Any:
        return {layer: self._named(own) for layer, own in super().prefill(prompts).items()}

    def forward(self, block: Any) -> Any:
        out = super().forward(block)
        named = {layer: self._named(own) for layer, own in (out.hidden or {}).items()}
        return out._replace(hidden=named)

    def __call__(self, text: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits = [self.table.row(text[: end + 1]) for end in range(len(text))]
        states = torch.zeros(len(text), SIZE)
        states[:, 0], states[:, 1] = torch.tensor(text), torch.arange(len(text))
        return torch.stack(logits), self._named(states).repeat(1, self.layers)


TREES = {"dynamic": ps.DynamicTree(2, 5), "static": ps.StaticTree([[0], [1], [2], [0, 0], [0, 1]])}
HEADS = [*any_head.KINDS, "eagle static", "mtp 3"]


class Forgetful(NamedTuple):
    """A head that is told of the whole text before every draft."""

    head: Any
    number: int
    sampling: dict[str, Any]

    def __call__(self, text: list[int], states: torch.Tensor, k: int, rounds: int) -> Draft:
        can, seed = self.head.capabilities, self.sampling["seed"]
        names = ("temperature", "top_k", "top_p", "min_p")
        sampling = Sampling(*[self.sampling[name] for name in names])
        layers = can.hidden_layers
        hidden = told(layers, [states], [0]) if len(states) else None
        inputs = dataclasses.replace(
            draft_input([text], [k], hidden),
            level=self.number,
            rounds=torch.tensor([rounds]),
            parameters=RowParameters(1, torch.device("cpu")).write([sampling], [seed]),
            vocab_size=self.head.vocab_size,
        )
        self.head.prefill(prompts(1))
        block = self.head.draft(inputs)
        count = k if block.counts is None else int(block.counts[0])
        tokens = block.tokens[0, :count].tolist()
        if block.parents is not None:
            return Draft(tokens, block.parents[0, :count].tolist())
        logits = block.rows.logits[0, :count]
        return Draft(tokens, None, can.id_map.spread(logits, self.head.vocab_size))


def compare(
    shape: Shape,
    batch: list[Row],
    drafter: Any,
    forgetful: Any,
    levels: Sequence[Any] = (),
    anew: Sequence[Any] = (),
) -> bool:
    """Compare every row; return whether the host stayed out of a round.

    Args:
        drafter: of the chain.
        forgetful: from the drafter's number and a row's parameters to the drafter of the loop.
        levels: of the chain; none: toy levels.
        anew: the same as the loop reads them.
    """
    layers = getattr(drafter, "capabilities", DrafterCapabilities()).hidden_layers
    levels = levels or [Level(i, len(layers)) for i in range(len(shape.window))]
    chain = ps.Chain([*levels, drafter], **shape.options())
    with counted() as read:
        found = run(chain, batch)
    require_same_alone([*levels, drafter], shape, batch, found)
    for row, own in zip(batch, found, strict=True):
        alone = forgetful(len(levels) + 1, row.sampling)
        window, rounds, tail, _, _ = shape
        options = {"tail": tail, "eos": row.eos, **row.sampling}
        assert new_tokens(own, row) == generate(
            anew or levels, alone, window, row.prompt, row.max_new_tokens, rounds, **options
        )
    return bool(read)


PROMPTS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)


@pytest.mark.parametrize("kind", HEADS)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes(least=2), rows(PROMPTS, 20))
def test_heads(kind: str, tmp_path: Path, shape: Shape, batch: list[Row]) -> None:
    """Hidden states name the level that gives them; trees are dynamic, or of fixed shape."""
    head, other = (any_head.head_of(kind, VOCAB, tmp_path, TREES, 5) for _ in range(2))
    shape = shape._replace(rule="token", tail=0 if head.capabilities.trees else shape.tail)
    if kind == "mtp 3":  # whose host knows what each head has read
        shape = shape._replace(sync_each_step=None)
    without_host = compare(shape, batch, head, lambda *own: Forgetful(other, *own))
    event(f"{len(shape.window) + 1} levels, without the host: {without_host}")


class Bush:
    """A drafter of one text, whose trees or chains follow the length of the text."""

    name = "bush"

    def __init__(self, trees: bool) -> None:
        self.trees = trees

    def fork(self) -> Bush:
        return Bush(self.trees)

    def propose(self, context: ps.Context, k: int) -> ps.Proposal:
        sampling = {**dataclasses.asdict(context.sampling), "seed": context.seed}
        tokens, parents, logits = self.grow(context.tokens, k, context.round, sampling)
        if parents == list(range(-1, len(tokens) - 1)) and len(context.tokens) % 2:
            # A chain, which is verified as a tree of one path.
            parents, logits = None, None if logits is None else logits[: len(tokens)]
        return ps.Proposal(tokens, None if logits is None else logits[None], parents)

    def grow(self, text: list[int], k: int, rounds: int, sampling: dict[str, Any]) -> Draft:
        """Return a tree of at most `k` levels, or at most `k` tokens."""
        table = Level(9)
        drawn = sampling["temperature"] > 0 and len(text) // 4 % 2 == 0
        tokens: list[int] = []
        parents: list[int] = []
        logits = [table(text)[0][-1]]
        paths: list[list[int]] = [[]]
        nodes = (0, 1, 1, 6)[len(text) % 4] if self.trees else k - 1 - len(text) % 3
        for node in range(-1, nodes):
            if node >= len(tokens) or len(paths[node + 1]) == k:
                break
            row, many = logits[node + 1], 1 + (len(text) // 4 + node) % 3 * self.trees
            draw = ps.sample(
                row.expand(many, -1), position=torch.arange(many) + 99 * (rounds + 1), **sampling
            )
            children = draw.tokens if drawn else row.argsort(descending=True)[:many]
            for child in children.tolist():
                tokens.append(child)
                parents.append(node)
                paths.append([*paths[node + 1], child])
                logits.append(table(text + paths[-1])[0][-1])
        if self.trees:
            return Draft(tokens, parents, torch.stack(logits) if drawn else None)
        return Draft(tokens, None, torch.stack(logits)[: len(tokens)] if drawn else None)


class Stateless(NamedTuple):
    """The same for the loop."""

    bush: Bush
    sampling: dict[str, Any]

    def __call__(self, text: list[int], states: torch.Tensor, k: int, rounds: int) -> Draft:
        draft = self.bush.grow(text, k, rounds, self.sampling)
        if draft.parents is not None or draft.logits is not None:
            return draft
        tokens = torch.tensor(draft.tokens, dtype=torch.int64)
        return draft._replace(logits=torch.nn.functional.one_hot(tokens, VOCAB).float().log())


@pytest.mark.parametrize("trees", [False, True])
@settings(max_examples=60)
@given(shapes(least=2), rows(PROMPTS, 20))
def test_drafters_of_one_text(trees: bool, shape: Shape, batch: list[Row]) -> None:
    """Fewer tokens than asked for, or none; drawn and deterministic ones in one batch."""
    shape = shape._replace(rule="token", tail=0 if trees else shape.tail, sync_each_step=None)
    bush = Bush(trees)
    compare(shape, batch, bush.fork(), lambda _, sampling: Stateless(bush, sampling))


class Anew(NamedTuple):
    """A level of a model that reads the whole text in one pass."""

    level: Any
    layers: tuple[int, ...]

    def __call__(self, text: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.tensor([text])
        self.level.prefill(PromptBatch(tokens[:, :0]))
        out = self.level.forward(InputBlock(tokens, len(text), hidden_layers=self.layers))
        return out.logits[0].clone(), torch.cat([out.hidden[i][0] for i in self.layers], 1)


@functools.cache
def shipped(head: str, use: str) -> tuple[list[Any], Any]:
    """Return the shipped target, its 4-bit copy, and a head for them."""
    model = AutoModelForCausalLM.from_pretrained(tiny.path("target"), dtype="float32")
    levels = [ps.HuggingFaceLevel(model, pack=True), ps.HuggingFaceLevel(ps.quantize_w4(model))]
    tree = ps.DynamicTree(3, 8) if head == "eagle2" else None
    return levels, ps.Eagle.from_pretrained(tiny.path(head), levels[0], tree=tree)


QUESTIONS = tiny.prompt_ids(["How many legs have 2 cows?", "What is 3 + 4?", "Tom has 3 bags."])


@pytest.mark.parametrize("name", ["eagle2", "eagle3"])
@settings(max_examples=8)
@given(shapes(least=2, most=3), rows(st.sampled_from(QUESTIONS), 16))
def test_shipped_heads(name: str, shape: Shape, batch: list[Row]) -> None:
    """Keys and values of paths that move, states of packed passes, and a cache of pairs."""
    (levels, head), (others, other) = shipped(name, "chain"), shipped(name, "alone")
    shape = shape._replace(rule="token", tail=0 if name == "eagle2" else shape.tail)
    count, layers = len(shape.window), head.capabilities.hidden_layers
    anew = [Anew(level, layers) for level in others[:count]]
    compare(shape, batch[:2], head, lambda *own: Forgetful(other, *own), levels[:count], anew)
