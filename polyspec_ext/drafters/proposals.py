"""Drafters of a single text (`Drafter`) as the engine calls them: a drafter and a context for each
request, with checked proposals.

A drafter may be a user's. Errors name the drafter, the expected and the actual value. TypeError:
wrong type or dtype. ValueError: wrong shape, layout, device or range.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import rooms
from ..arguments import LOGITS_DTYPES, require_ids, row_integers, wrong_kind
from ..errors import add_note
from ..levels.base import Ints, PromptBatch
from ..tensors import RowCounts, on_device
from .base import Context, DraftBlock, Drafter, DrafterCapabilities, DraftInput, Proposal, RowBuffer


class ProposalDrafter:
    """A `Drafter` and its forks as a drafter of a batch.

    Args:
        drafter: serves the first request; its forks serve the others.
        level: the drafter's number in the chain, n.
        vocab_size: ids of the level above are below it.
        target_vocab_size: ids of the target are below it. A deterministic proposal ends before an
            id that the level above lacks.
    """

    def __init__(
        self, drafter: Drafter, level: int, vocab_size: int, target_vocab_size: int
    ) -> None:
        self.drafter = drafter
        self.member_levels: list[object] = [drafter]  # owner of the caches
        self.name = str(getattr(drafter, "name", type(drafter).__name__))
        kind = type(drafter).__name__
        self.one_at_a_time = f"{kind} has no `fork` and serves one at a time"
        self.device = torch.device("cpu")
        self.max_length: int | None = None
        self.vocab_size, self.input_vocab_size = vocab_size, target_vocab_size
        self._level = level
        self._trees = bool(getattr(drafter, "trees", False))
        self._drafters: list[Drafter] = []
        self._contexts: list[Context] = []

    @property
    def capabilities(self) -> DrafterCapabilities:
        return DrafterCapabilities(
            batches=hasattr(self.drafter, "fork"),
            trees=self._trees,
            reads_apart=True,
            checked=True,
            admits=True,
        )

    @property
    def num_forward_passes(self) -> int:
        return sum(getattr(drafter, "num_forward_passes", 0) for drafter in self._drafters)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the state of a batch, for `copy` and `pickle`."""
        return {**self.__dict__, "_drafters": [], "_contexts": []}

    def prefill(self, prompts: PromptBatch) -> None:
        rows: list[list[int]] = prompts.tokens.tolist()
        counts = prompts.counts or map(len, rows)
        self.admit([row[:n] for row, n in zip(rows, counts, strict=True)], (), 0, None)

    def read(self, tokens: Tensor, counts: Sequence[int]) -> None:
        for context, row, count in zip(self._contexts, tokens.tolist(), counts, strict=True):
            context.tokens += row[:count]

    def rollback(self, lengths: RowCounts) -> RowCounts:
        for context, length in zip(self._contexts, lengths, strict=True):
            del context.tokens[length:]
            context.valid = min(context.valid, length)
        return lengths

    def open(self, capacity: int) -> list[int]:
        return []

    def extend(self, sequence: list[int], tokens: Tensor, layers: tuple[int, ...]) -> None:
        sequence += tokens[0].tolist()

    def admit(
        self, sequences: Sequence[list[int]], lengths: Ints, capacity: int, rows: Ints | None
    ) -> None:
        if rows is None:
            self._contexts, self._drafters = [], []
        numbers = range(len(sequences)) if rows is None else rows
        for row, text in zip(numbers, sequences, strict=True):
            drafter: Any = self.drafter
            if rows is not None or row > 0:
                drafter = drafter.fork()
            if not isinstance(drafter, Drafter):
                wrong_kind(self.name, "fork to return a drafter, with a method propose", drafter)
            self._contexts[row : row + 1] = [Context(text, level=self._level)]
            self._drafters[row : row + 1] = [drafter]

    def save(self, row: int, begin: int, end: int) -> None:
        """Save nothing: reading is as cheap."""

    def restore(self, sequence: list[int], saved: None, count: int) -> None: ...

    def select(self, rows: Sequence[int]) -> None:
        self._contexts = [self._contexts[row] for row in rows]
        self._drafters = [self._drafters[row] for row in rows]

    def draft(self, inputs: DraftInput) -> DraftBlock:
        """Draft as `BatchedDrafter.draft`. Refuse a proposal that the level above cannot verify."""
        assert inputs.eos is not None
        rounds, lengths = inputs.rounds.tolist(), list(inputs.lengths)
        vocab_size = min(self.vocab_size, inputs.vocab_size)
        proposals = [_Checked([])] * len(lengths)
        for b, (row, count) in enumerate(zip(inputs.tokens.tolist(), inputs.counts, strict=True)):
            context = self._contexts[b]
            if count and self._trees:
                # After a tree the text continues along the accepted path.
                assert inputs.text is not None
                context.tokens[:] = inputs.text(b).tolist()
            else:
                context.tokens += row[:count]
            if lengths[b] == 0:
                continue
            context.round, context.eos = rounds[b], inputs.eos[b]
            context.sampling = inputs.parameters.sampling[b]
            context.seed = inputs.parameters.seeds[b]
            context.request = inputs.requests[b]
            proposal = self._checked(self._propose(b, lengths[b]), lengths[b], vocab_size)
            if proposal.parents is None:
                proposal = proposal._replace(tokens=cut_at_eos(proposal.tokens, context.eos))
                # The last token of a text is repeated by the next draft.
                context.tokens += proposal.tokens
                context.tokens.pop()
            if len(lengths) > 1 and proposal.logits is not None:
                # Another row's drafter may write its logits to the same buffer.
                copied = None if proposal.statistics is None else proposal.statistics.clone()
                proposal = proposal._replace(logits=proposal.logits.clone(), statistics=copied)
            context.valid = len(context.tokens)
            proposals[b] = proposal
        return self._block(proposals, inputs.wants_rows, vocab_size)

    def _propose(self, row: int, count: int) -> Any:
        drafter, context = self._drafters[row], self._contexts[row]
        before = len(context.tokens)
        try:
            proposal = drafter.propose(context, count)
        except Exception as error:
            add_note(error, f"in propose of the drafter {self.name} ({type(drafter).__name__})")
            raise
        if len(context.tokens) != before:
            raise ValueError(
                f"{self.name}: expected propose to leave context.tokens as they are, {before} ids, "
                f"given {len(context.tokens)}"
            )
        return proposal

    def _checked(self, proposal: Any, count: int, vocab_size: int) -> _Checked:
        """Check the result of `propose` for `count` tokens or tree levels, and return it without
        ids that the level above, of `vocab_size` ids, lacks."""
        name = self.name
        if not isinstance(proposal, Proposal):
            wrong_kind(name, "propose to return a Proposal", proposal)
        tokens, parents = _ids(f"{name}: token ids", proposal.tokens), None
        logits, statistics = proposal.logits, proposal.statistics
        if proposal.parents is not None:
            if not self._trees:
                raise ValueError(
                    f"{name}: expected a chain of tokens from a drafter without `trees = True`, "
                    "given a tree"
                )
            parents = _ids(f"{name}: parents", proposal.parents)
            rooms.draft_trees.require_nodes(name, tokens, parents, count, logits is None)
        elif len(tokens) > count:
            raise ValueError(f"{name}: expected at most {count} tokens, given {len(tokens)}")
        checked = _Checked(tokens, parents, logits, statistics)
        if logits is not None:
            _require_rows(name, logits, statistics, checked.rows, vocab_size)
            require_ids(name, tokens, logits.shape[2])
            return checked
        if statistics is not None:
            raise ValueError(
                f"{name}: expected no draft statistics without draft logits, given both"
            )
        require_ids(name, tokens, self.input_vocab_size)
        if parents is None:
            return _Checked(list(itertools.takewhile(vocab_size.__gt__, tokens)))
        return _Checked(*rooms.draft_trees.nodes_below(vocab_size, tokens, parents))

    def _block(
        self, proposals: Sequence[_Checked], wants_rows: bool, vocab_size: int
    ) -> DraftBlock:
        counts = [len(proposal.tokens) for proposal in proposals]
        width = max(1, *counts)
        sampled = wants_rows and any(p.tokens and p.logits is not None for p in proposals)

        def padded(rows: Sequence[Sequence[int]]) -> Tensor:
            lists = [[*row, *[-1] * (width - len(row))] for row in rows]
            return on_device(lists, torch.int64, self.device)

        block = DraftBlock(padded([proposal.tokens for proposal in proposals]))
        block.counts = on_device(counts, torch.int64, self.device)
        if sampled:
            block.rows = _rows(proposals, width, vocab_size, self._trees)
        # By the drafter's capability, not by its proposals: the rule that verifies a row's chain
        # must not depend on another row's tree (contract C3).
        if self._trees:
            rows = zip(counts, proposals, strict=True)
            parents = [range(-1, n - 1) if p.parents is None else p.parents for n, p in rows]
            block.parents = padded(parents)
            from_rows = [[proposal.logits is not None] * (width + 1) for proposal in proposals]
            block.drawn = on_device(from_rows, torch.bool, self.device) if sampled else None
        return block


class _Checked(NamedTuple):
    """A proposal that the level above can verify, with the attributes of `Proposal`."""

    tokens: list[int]
    parents: list[int] | None = None
    logits: Tensor | None = None
    statistics: Tensor | None = None

    @property
    def rows(self) -> int:
        return len(self.tokens) + (self.parents is not None)


def _rows(proposals: Sequence[_Checked], width: int, vocab_size: int, tree: bool) -> RowBuffer:
    """Return the rows of logits that the tokens were drawn from, padded to a batch; one-hot for a
    deterministic chain."""
    first = proposals[0]
    if len(proposals) == 1 and first.logits is not None and first.logits.shape[1] == width + tree:
        logits = first.logits if first.logits.stride(2) == 1 else first.logits.contiguous()
        return RowBuffer(logits, first.statistics)
    sampled = [proposal.logits for proposal in proposals if proposal.logits is not None]
    dtypes = {logits.dtype for logits in sampled}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    even = len(sampled) == len(proposals) and len({logits.shape[2] for logits in sampled}) == 1
    known = even and all(proposal.statistics is not None for proposal in proposals)
    # Zeros: the operator also reads rows that are never filled.
    shape = len(proposals), width + tree
    logits = torch.zeros(
        *shape, sampled[0].shape[2] if even else vocab_size, dtype=dtype, device=sampled[0].device
    )
    statistics = torch.zeros(*shape, 2, dtype=torch.int64, device=logits.device)
    for draft, into, about in zip(proposals, logits, statistics, strict=True):
        _fill(draft, into, about, tree)
    return RowBuffer(logits, statistics if known else None)


def _fill(draft: _Checked, logits: Tensor, statistics: Tensor, tree: bool) -> None:
    if not draft.tokens or (draft.logits is None and tree):
        return
    logits[: draft.rows] = -float("inf")  # ids beyond a smaller vocabulary are never drawn
    if draft.logits is None:
        logits[range(draft.rows), draft.tokens] = 0
        return
    logits[: draft.rows, : draft.logits.shape[2]] = draft.logits[0, : draft.rows]
    if draft.statistics is not None:
        statistics[: draft.rows] = draft.statistics[0, : draft.rows]


def cut_at_eos(tokens: Sequence[int], eos: frozenset[int]) -> list[int]:
    """Return the tokens up to and including the first EOS (contract C2: it is kept)."""
    end = next((i for i, token in enumerate(tokens, 1) if token in eos), None)
    return list(tokens[:end])


def _require_rows(name: str, rows: Any, statistics: Any, count: int, vocab_size: int) -> None:
    """Refuse draft logits or statistics of other than `count` rows."""
    if not isinstance(rows, Tensor) or rows.dtype not in LOGITS_DTYPES:
        wrong_kind(name, "draft logits as a float32, bfloat16 or float16 tensor", rows)
    if rows.dim() != 3 or rows.shape[:2] != (1, count):
        raise ValueError(
            f"{name}: expected draft logits of shape [1, {count}, Vd], given {list(rows.shape)}"
        )
    if not 1 <= rows.shape[2] <= vocab_size:
        raise ValueError(
            f"{name}: expected draft logits of width Vd in [1, {vocab_size}], as wide as those of "
            f"the level above at most, given {rows.shape[2]}"
        )
    if rows.is_meta or rows.layout != torch.strided:
        actual = "the meta device" if rows.is_meta else f"layout {rows.layout}"
        raise ValueError(f"{name}: expected draft logits with values in memory, given {actual}")
    if statistics is None:
        return
    if not isinstance(statistics, Tensor) or statistics.dtype != torch.int64:
        wrong_kind(name, "draft statistics as an int64 tensor from ps.sample", statistics)
    if statistics.shape != (1, count, 2) or statistics.is_meta:
        raise ValueError(
            f"{name}: expected draft statistics of shape [1, {count}, 2], given "
            f"{list(statistics.shape)} on {statistics.device}"
        )


def _ids(name: str, ids: Any) -> list[int]:
    if isinstance(ids, Tensor) and (ids.dim() != 1 or ids.is_meta):
        raise ValueError(f"{name}: expected shape [n], given {list(ids.shape)} on {ids.device}")
    return row_integers(name, ids)
