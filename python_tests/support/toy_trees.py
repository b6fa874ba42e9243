"""Toy levels and drafters of trees, and verification with every draw enumerated, plainly."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import toy_rows
from toy import Enumerator, ToyLevel, distribution, masked, of_row

from polyspec_ext.drafters.base import DraftBlock, DrafterCapabilities, DraftInput, RowBuffer
from polyspec_ext.errors import Status
from polyspec_ext.levels import RowCounts
from polyspec_ext.levels.base import InputBlock, LevelCapabilities, LevelOutput, PromptBatch
from polyspec_ext.runtime.plan import Operators


class TreeLevel:
    """A batched level that reads trees. Its cache holds tokens as they were read; the logits of a
    token follow from its ancestors alone. A hidden state is the token and its position, then zeros.

    Args:
        seed: of the table.
        size: of a hidden state.
    """

    def __init__(self, vocab_size: int, seed: int, name: str | None = None, size: int = 2) -> None:
        self.table, self.size = ToyLevel(vocab_size, seed), size
        self.name, self.vocab_size = name or f"level {seed}", vocab_size
        self.max_length, self.device = None, torch.device("cpu")
        self.caches: list[list[int]] = []
        self.most = 0  # nodes that a row has read at once

    @property
    def capabilities(self) -> LevelCapabilities:
        return LevelCapabilities(batches=True, hidden_states=True, trees=True)

    def prefill(self, prompts: PromptBatch) -> dict[int, torch.Tensor]:
        counts = prompts.counts or [prompts.tokens.shape[1]] * len(prompts.tokens)
        self.caches = [
            row[:count] for row, count in zip(prompts.tokens.tolist(), counts, strict=True)
        ]
        places = torch.arange(prompts.tokens.shape[1]).expand_as(prompts.tokens)
        states = torch.zeros(*prompts.tokens.shape, self.size)
        states[..., 0], states[..., 1] = prompts.tokens, places
        return dict.fromkeys(prompts.hidden_layers, states)

    def forward(self, block: InputBlock) -> LevelOutput:
        batch, width = block.tokens.shape
        counts: Any = [width] * batch if block.counts is None else block.counts
        first: Any = [width - block.keep] * batch if block.first is None else block.first
        chain = torch.arange(-1, width - 1).expand(batch, width)
        parents = (chain if block.parents is None else block.parents).tolist()
        logits = torch.full((batch, block.keep, self.vocab_size), math.nan)
        states = torch.full((batch, width, self.size), -1.0)
        for b, row in enumerate(block.tokens.tolist()):
            before = len(parents[b]) - width if counts[b] else 0  # nodes of earlier passes
            root = self.caches[b][: len(self.caches[b]) - before]
            nodes = [*self.caches[b][len(root) :], *row[: counts[b]]]
            assert before == 0 or counts[b] == width
            texts: list[list[int]] = []
            for i, token in enumerate(nodes):
                j, parent = i - before, parents[b][i]
                assert -1 <= parent < i
                texts.append([*(root if parent < 0 else texts[parent]), token])
                if j >= 0:
                    own = [token, len(texts[-1]) - 1, *[0] * (self.size - 2)]
                    states[b, j] = torch.tensor(own)
                if j >= 0 and 0 <= j - first[b] < block.keep:
                    logits[b, j - first[b]] = self.table.row(texts[-1])
            self.caches[b] = [*root, *nodes]
        return LevelOutput(logits, dict.fromkeys(block.hidden_layers, states))

    def read(self, tokens, counts, hidden_layers=()) -> None:
        for cache, row, count in zip(self.caches, tokens.tolist(), counts, strict=True):
            cache += row[:count]

    def rollback(self, lengths: RowCounts) -> RowCounts:
        for cache, length in zip(self.caches, lengths, strict=True):
            assert 0 <= length <= len(cache)
            del cache[length:]
        return lengths

    def keep_path(self, begin: RowCounts, path: torch.Tensor, lengths: RowCounts) -> RowCounts:
        for b, cache in enumerate(self.caches):
            if lengths[b] < begin[b]:  # without a part, or stopped
                del cache[lengths[b] :]
                continue
            nodes = [int(begin[b]) + node for node in path[b].tolist() if node >= 0]
            assert nodes == sorted(set(nodes))
            kept = [cache[at] for at in nodes]
            assert int(begin[b]) <= len(cache)
            self.most = max(self.most, len(cache) - int(begin[b]))
            cache[int(begin[b]) :] = kept
            assert lengths[b] <= len(cache)
            del cache[lengths[b] :]
        return lengths

    def select(self, rows: Sequence[int]) -> None:
        self.caches = [self.caches[row] for row in rows]


class StayingTrees(TreeLevel):
    """The same level as on a device, where its lengths may stay for a round."""

    @property
    def capabilities(self) -> LevelCapabilities:
        return replace(
            super().capabilities, device_lengths=True, keeps_lengths=True, hidden_size=self.size
        )

    reserve_span = toy_rows.Staying.reserve_span
    note_lengths = toy_rows.Staying.note_lengths


class TreeDrafter:
    """Trees with `widths[depth]` children of each node.

    Args:
        table: by a node's ancestors, the distribution of its children.
        sample: draws the children, each independently, as `ps.sample` does; None: the likeliest
            tokens.
    """

    name, max_length = "tree", None
    device = torch.device("cpu")
    num_forward_passes = 0

    def __init__(self, table, widths, sample=None, hidden_layers=()) -> None:
        self.table, self.widths, self.sample = table, widths, sample
        self.vocab_size = table.vocab_size
        self.capabilities = DrafterCapabilities(trees=True, hidden_layers=hidden_layers)

    def prefill(self, prompts: PromptBatch) -> None:
        pass

    def read(self, tokens: torch.Tensor, counts: Sequence[int]) -> None:
        pass

    def rollback(self, lengths: RowCounts) -> RowCounts:
        return lengths

    def select(self, rows: Sequence[int]) -> None:
        pass

    def draft(self, inputs: DraftInput) -> DraftBlock:
        assert inputs.text is not None
        self._check_states(inputs)
        made = [self._tree(inputs, b) for b in range(len(inputs.lengths))]
        width = max(1, *(len(tokens) for tokens, _, _ in made))
        tokens = torch.full((len(made), width), 9**9)
        parents = torch.full((len(made), width), 9**9)
        # Rows that no child was drawn from are not read.
        rows = torch.full((len(made), width + 1, self.vocab_size), math.nan)
        for b, (own, above, drawn) in enumerate(made):
            tokens[b, : len(own)], parents[b, : len(own)] = torch.tensor([own, above]).long()
            for place, row in drawn.items():
                rows[b, place] = row
        counts = torch.tensor([len(own) for own, _, _ in made])
        given = RowBuffer(rows, None) if self.sample and inputs.wants_rows else None
        return DraftBlock(tokens, counts, rows=given, parents=parents)

    def _tree(self, inputs, b) -> tuple[list[int], list[int], dict[int, torch.Tensor]]:
        text = inputs.text(b).tolist()
        depth = int(inputs.lengths[b])
        of, seed = inputs.parameters.sampling[b], inputs.parameters.seeds[b]
        tokens: list[int] = []
        parents: list[int] = []
        drawn: dict[int, torch.Tensor] = {}
        level: list[tuple[int, list[int]]] = [(-1, text)]
        for width in self.widths[: max(depth, 0)]:
            below: list[tuple[int, list[int]]] = []
            for node, before in level:
                row = self.table.row(before)
                drawn[node + 1] = row
                if self.sample is None:
                    children = row.argsort(descending=True, stable=True)[:width].tolist()
                else:
                    parameters = (of.temperature, of.top_k, of.top_p, of.min_p, seed)
                    children = [
                        int(self.sample(row[None], *parameters).tokens) for _ in range(width)
                    ]
                for child in children:
                    below.append((len(tokens), [*before, child]))
                    tokens.append(child)
                    parents.append(node)
            level = below
        return tokens, parents, drawn

    def _check_states(self, inputs: DraftInput) -> None:
        if inputs.hidden is None:
            return
        for states in inputs.hidden.layers.values():
            for b in range(len(inputs.requests)):
                text, begin = inputs.text(b).tolist(), int(inputs.hidden.positions[b])
                for j in range(int(inputs.hidden.counts[b])):
                    assert states[b, j].tolist() == [text[begin + j], begin + j]


class TreeResult(NamedTuple):
    tokens: torch.Tensor
    num_accepted: torch.Tensor
    path: torch.Tensor
    rows: torch.Tensor
    logprobs: torch.Tensor
    status: torch.Tensor
    statistics: torch.Tensor


class TreeEnumerator(Enumerator):
    """Also walks through every outcome of `verify_tree`."""

    @property
    def operators(self) -> Operators:
        return Operators(self.draw, self.verify, self.verify_tree)

    def verify_tree(
        self,
        target: torch.Tensor,
        tokens: torch.Tensor,
        parents: torch.Tensor,
        pool: torch.Tensor | None = None,
        *,
        counts: torch.Tensor,
        draft_rows: torch.Tensor | None,
        draft_statistics: torch.Tensor | None,
        depth: int,
        position: Any,
        level: int,
        round: Any,
        **options: Any,
    ) -> TreeResult:
        batch, target = len(tokens), masked(target, options.pop("allowed", None))
        made = TreeResult(
            torch.full((batch, depth + 1), -1),
            torch.zeros(batch, dtype=torch.int64),
            torch.full((batch, depth), -1),
            torch.full((batch, depth + 1), -1),
            torch.full((batch, depth + 1), math.nan),
            torch.zeros(batch, dtype=torch.int32),
            torch.zeros(batch, depth + 1, 2, dtype=torch.int64),
        )
        names = ("temperature", "top_k", "top_p", "min_p")
        for b in range(batch):
            if target[b, 0].isnan().any():
                continue
            self._row(options["seed"], b)
            sampling = {name: of_row(options[name], b) for name in names}
            p = [distribution(row, **sampling) for row in target[b, : int(counts[b]) + 1]]
            at, path, emitted, rows = 0, [], [], []
            while True:
                if not any(p[at]):
                    made.status[b] = Status.EMPTY_ROW
                    break
                children = [i for i in range(int(counts[b])) if parents[b, i] == at - 1]
                q = None
                if pool is not None and children and sampling["temperature"] > 0:
                    row = int(draft_rows[b, at])  # -1: the children are deterministic
                    q = None if row < 0 else distribution(pool[row], **sampling)
                token, node = self._step(p[at], q, children, tokens[b].tolist())
                emitted.append(token)
                rows.append(at)
                made.logprobs[b, len(rows) - 1] = math.log(p[at][token])
                if node is None:
                    break
                path.append(node)
                at = node + 1
            made.tokens[b, : len(emitted)] = torch.tensor(emitted)
            made.rows[b, : len(rows)] = torch.tensor(rows)
            made.path[b, : len(path)] = torch.tensor(path, dtype=torch.int64)
            made.num_accepted[b] = len(path)
        if target.shape[0] and pool is None:
            assert draft_statistics is None
        return made._replace(statistics=self._statistics(target, made, options))

    def _step(self, p, q, children, tokens) -> tuple[int, int | None]:
        """A token, and the child that it is."""
        if q is None:
            token = self.choose(p)
            return token, next((node for node in children if tokens[node] == token), None)
        left = list(p)
        for node in children:
            x = tokens[node]
            accept = min(1.0, left[x] / q[x])
            if self.choose([accept, 1 - accept]) == 0:
                return x, node
            left = [max(a - b, 0.0) for a, b in zip(left, q, strict=True)]
            left = [a if a > 1e-13 else 0.0 for a in left]
            left = [a / sum(left) for a in left]
        return self.choose(left), None

    def _statistics(self, target: torch.Tensor, made: TreeResult, options: Any) -> torch.Tensor:
        import polyspec_ext as ps

        out = made.statistics
        names = ("temperature", "top_k", "top_p", "min_p")
        for b in range(len(target)):
            for j, row in enumerate(made.rows[b].tolist()):
                if row >= 0:
                    given = [of_row(options[name], b) for name in names]
                    out[b, j] = ps.sample(target[b, row][None], *given).statistics[0]
        return out


def likeliest_tree(logits, k, depth, total) -> set[tuple[int, ...]]:
    """Return EAGLE-2's tree by the logits after a path: of every level the k likeliest nodes have k
    children each; of all, the total - 1 likeliest."""
    scores: dict[tuple[int, ...], float] = {}
    level: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        below: dict[tuple[int, ...], float] = {}
        for path in level:
            own = logits(path).double().log_softmax(0)
            for token in own.topk(k).indices.tolist():
                below[(*path, token)] = scores.get(path, 0.0) + float(own[token])
        scores |= below
        level = sorted(below, key=lambda path: -below[path])[:k]
    return set(sorted(scores, key=lambda path: -scores[path])[: total - 1])
