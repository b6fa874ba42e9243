"""Chains with trees and hidden states against a loop without caches: the same tokens."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import any_head
import pytest
import torch
from device_rounds import counted
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

# ---- the rule without caches: every pass reads the whole text anew -------------------------------


class Draft(NamedTuple):
    """Draft tokens, with the parents of a tree and the logits that they were drawn from."""

    tokens: list[int]
    parents: list[int] | None = None
    logits: torch.Tensor | None = None  # [N, V], of a tree [N + 1, V]; None: deterministic


# From a text to the logits after each token, [N, V], and its hidden states, [N, H].
Reads = Callable[[Sequence[int]], tuple[torch.Tensor, torch.Tensor]]
# From a text, the hidden states of all tokens but the last, the tokens or levels of a tree that are
# wanted, and the drafting rounds so far.
Drafts = Callable[[list[int], torch.Tensor, int, int], Draft]


def generate(
    levels: Sequence[Reads],
    drafter: Drafts,
    windows: Sequence[int],
    prompt: Sequence[int],
    max_new_tokens: int,
    rounds: Sequence[int],
    tail: int = 0,
    rule: str = "token",
    eos: Collection[int] = (),
    **sampling: Any,
) -> list[int]:
    """Continue `prompt` with the distribution of levels[0]; see examples/one_screen.py."""
    text, last, steps = list(prompt), len(levels) - 1, [0] * (len(levels) + 1)
    cached = [len(text) - 1] * len(levels)
    source = [0] * (len(text) - 1)  # by token, the level with the state that the drafter reads

    def draft(k: int) -> Draft:
        states = [levels[i](text)[1] for i in range(len(levels))]
        read = [states[source[at]][at] for at in range(len(text) - 1)]
        block = drafter(text, torch.stack(read) if read else states[0][:0], k, steps[-1])
        steps[-1] += 1
        if block.parents is None:
            count = next((i for i, t in enumerate(block.tokens, 1) if t in eos), len(block.tokens))
            logits = None if block.logits is None else block.logits[:count]
            block = Draft(block.tokens[:count], None, logits)
            text.extend(block.tokens)
        return block

    def emit(i: int, room: int) -> list[torch.Tensor]:
        begin, want, block = len(text), min(windows[i], room - 1), Draft([])
        q: list[torch.Tensor] | None = []  # None: the draft tokens are deterministic
        if i == last and want > 0:
            block = draft(want)
            q = None if block.logits is None else list(block.logits)
        for _ in range(rounds[i] or want if i < last else 0):
            if len(q) < want and not set(text[begin:]) & set(eos):
                q += emit(i + 1, room - 1 - len(q))
        if i == 0 and last > 0 and q and not set(text[begin:]) & set(eos):
            more = min(tail, windows[last], room - 1 - len(q))
            drawn = draft(more).logits if more > 0 else None
            q += [] if drawn is None else list(drawn)
        key: dict[str, Any] = {"position": begin, "level": i + 1, "round": steps[i], "eos": eos}
        key["rule"] = rule
        if block.parents:
            parents = [[], *([] for _ in block.tokens)]
            for node, parent in enumerate(block.parents):
                parents[node + 1] = [*parents[parent + 1], block.tokens[node]]
            p = torch.stack([levels[i](text + path)[0][-1] for path in parents])
            pool = None if q is None else torch.stack(q)
            rows = None if q is None else torch.arange(len(q))[None]
            nodes = (torch.tensor([own]) for own in (block.tokens, block.parents))
            r: Any = ps.verify_tree(p[None], *nodes, pool, draft_rows=rows, **key, **sampling)
            p = p[r.rows[0, : int(r.num_emitted)]]
        else:
            p = levels[i](text)[0][begin - 1 :]
            tokens = torch.tensor([text[begin:]], dtype=torch.int64)
            r = ps.verify(p[None], tokens, torch.stack(q)[None] if q else None, **key, **sampling)
        kept, steps[i] = int(r.cache_lengths), steps[i] + 1
        text[begin:] = r.tokens[0, : int(r.num_emitted)].tolist()
        # The latest pass passes on its states, except of tokens that the target has read.
        told = range(cached[i] if i == 0 else max(cached[0], cached[i]), kept)
        source[kept:] = [i] * (kept - len(source))
        source[told.start : told.stop] = [i] * len(told)
        cached[i] = kept
        cached[:] = [min(length, kept) for length in cached]
        return list(p[: int(r.num_emitted)])

    while (left := len(prompt) + max_new_tokens - len(text)) > 0 and not (
        set(text[len(prompt) :]) & set(eos)
    ):
        emit(0, left)
    return text[len(prompt) :]


# ---- chains of toy levels ------------------------------------------------------------------------


class Level(StayingTrees):
    """A level with hidden states that name the level, and as the oracle reads it."""

    def __init__(self, number: int, layers: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(VOCAB, 11 + number, size=SIZE)
        self.number, self.layers, self.dtype = number, layers, dtype  # of logits, which it holds

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
        return out._replace(logits=out.logits.to(self.dtype), hidden=named)

    def __call__(self, text: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits = [self.table.row(text[: end + 1]) for end in range(len(text))]
        states = torch.zeros(len(text), SIZE)
        states[:, 0], states[:, 1] = torch.tensor(text), torch.arange(len(text))
        return torch.stack(logits), self._named(states).repeat(1, self.layers)


TREES = {"dynamic": ps.DynamicTree(2, 5), "static": ps.StaticTree([[0], [1], [2], [0, 0], [0, 1]])}
HEADS = [*any_head.KINDS, "eagle static"]


class Forgetful(NamedTuple):
    """A head that reads the whole text before every draft."""

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


def compare(shape, batch, drafter, forgetful, levels=(), anew=()) -> bool:
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
        window, rounds, tail, rule, _ = shape
        options = {"tail": tail, "rule": rule, "eos": row.eos, **row.sampling}
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
    shape = shape._replace(tail=0 if head.capabilities.trees else shape.tail)
    without_host = compare(shape, batch, head, lambda *own: Forgetful(other, *own))
    event(f"{len(shape.window) + 1} levels, without the host: {without_host}")


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Bush:
    """A drafter of one text. Its trees or chains, whether they are drawn, and type, width and
    statistics of their logits follow the length of the text."""

    name = "bush"

    def __init__(self, trees: bool) -> None:
        self.trees = trees
        # By type and width, the logits of all forks: a new fork overwrites the old contents.
        self.memory: dict[tuple[torch.dtype, int], torch.Tensor] = {}

    def fork(self) -> Any:
        return copy.copy(self)

    def propose(self, context: ps.Context, k: int) -> ps.Proposal:
        sampling = {**dataclasses.asdict(context.sampling), "seed": context.seed}
        draft, known = self.grow(context.tokens, k, context.round, sampling)
        tokens, parents, logits = draft
        if parents == list(range(-1, len(tokens) - 1)) and len(context.tokens) % 2:
            # A chain, which is verified as a tree of one path.
            parents, logits = None, None if logits is None else logits[: len(tokens)]
        if logits is None:
            return ps.Proposal(tokens, None, parents)
        statistics = known[None, : len(logits)] if len(context.tokens) // 2 % 2 else None
        own = logits.new_empty(1, 99, logits.shape[1])
        own = self.memory.setdefault((logits.dtype, logits.shape[1]), own)
        own.copy_(torch.linspace(-2, 2, logits.shape[1]).expand_as(own))
        own[0, : len(logits)] = logits
        return ps.Proposal(tokens, own[:, : len(logits)], parents, statistics)

    def grow(self, text, k, rounds, sampling) -> tuple[Draft, torch.Tensor]:
        """Return a tree of at most `k` levels, or at most `k` tokens, and statistics of its
        rows."""
        table, size = Level(9), len(text)
        dtype, width = DTYPES[size % 3], (VOCAB, 4)[size // 3 % 2]
        more = 1000.0 if dtype == torch.float32 else 0.0  # narrower types would round them

        def row(path: list[int]) -> torch.Tensor:
            return (table(text + path)[0][-1] + more)[:width].to(dtype)

        drawn = sampling["temperature"] > 0 and size // 4 % 2 == 0
        tokens: list[int] = []
        parents: list[int] = []
        logits = [row([])]
        paths: list[list[int]] = [[]]
        known = torch.zeros(9 * VOCAB, 2, dtype=torch.int64)
        nodes = (0, 1, 1, 6)[size % 4] if self.trees else k - 1 - size % 3
        for node in range(-1, nodes):
            if node >= len(tokens) or len(paths[node + 1]) == k:
                break
            own, many = logits[node + 1], 1 + (size // 4 + node) % 3 * self.trees
            draw = ps.sample(
                own.expand(many, -1), position=torch.arange(many) + 99 * (rounds + 1), **sampling
            )
            known[node + 1] = draw.statistics[0]
            children = draw.tokens if drawn else own.argsort(descending=True)[:many]
            for child in children.tolist():
                tokens.append(child)
                parents.append(node)
                paths.append([*paths[node + 1], child])
                logits.append(row(paths[-1]))
        rows = torch.stack(logits) if drawn else None
        if self.trees:
            return Draft(tokens, parents, rows), known
        return Draft(tokens, None, None if rows is None else rows[: len(tokens)]), known


class Stateless(NamedTuple):
    bush: Bush
    sampling: dict[str, Any]

    def __call__(self, text: list[int], states: torch.Tensor, k: int, rounds: int) -> Draft:
        draft, _ = self.bush.grow(text, k, rounds, self.sampling)
        if draft.logits is not None:
            missing = VOCAB - draft.logits.shape[1]
            rows = torch.nn.functional.pad(draft.logits.float(), (0, missing), value=-float("inf"))
            return draft._replace(logits=rows)
        if draft.parents is not None:
            return draft
        tokens = torch.tensor(draft.tokens, dtype=torch.int64)
        return draft._replace(logits=torch.nn.functional.one_hot(tokens, VOCAB).float().log())


@pytest.mark.parametrize("trees", [False, True])
@settings(max_examples=60)
@given(
    shapes(least=2), rows(PROMPTS, 20), st.lists(st.sampled_from(DTYPES), min_size=4, max_size=4)
)
def test_drafters_of_one_text(trees, shape, batch, dtypes) -> None:
    """Fewer tokens than asked for, or none; drawn and deterministic tokens, logits of any type and
    width, with row statistics or without, in one batch and one row."""
    shape = shape._replace(tail=0 if trees else shape.tail, sync_each_step=None)
    bush = Bush(trees)
    levels = [Level(i, 1, dtype) for i, dtype in enumerate(dtypes[: len(shape.window)])]
    compare(shape, batch, bush.fork(), lambda _, sampling: Stateless(bush, sampling), levels)


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
    shape = shape._replace(tail=0 if name == "eagle2" else shape.tail)
    count, layers = len(shape.window), head.capabilities.hidden_layers
    anew = [Anew(level, layers) for level in others[:count]]
    compare(shape, batch[:2], head, lambda *own: Forgetful(other, *own), levels[:count], anew)
