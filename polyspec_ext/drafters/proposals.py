"""Drafters of a single text (`Drafter`) as the engine calls them, and drafters without a model:
prompt lookup, suffix matching, a table of n-grams; and several drafters, of which one is active.

A drafter may be a user's. Errors name the drafter, the expected and the actual value. TypeError:
wrong type or dtype. ValueError: wrong shape, layout, device or range.

A drafter without a model searches earlier tokens for the end of the text, and proposes the tokens
that followed. The proposals are deterministic: without draws and logits, with a one-hot
distribution.
"""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import arguments
from ..arguments import require_ids, row_integers
from ..errors import add_note
from ..files import replace_text
from ..levels.base import Ints, PromptBatch, id_map_of, input_vocab_size
from ..tensors import RowCounts, on_device, padded
from ..validate import LEVEL_MAX, LOGITS_DTYPES, wrong_kind
from .base import (
    BatchedDrafter,
    Context,
    DraftBlock,
    Drafter,
    DrafterCapabilities,
    DraftInput,
    Proposal,
    RowBuffer,
    levels_of,
)


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
    def one_at_a_time(self) -> str:
        """Reason why the drafter takes no batches."""
        return f"{type(self.drafter).__name__} has no `fork` and serves one at a time"

    @property
    def num_forward_passes(self) -> int:
        return sum(getattr(drafter, "num_forward_passes", 0) for drafter in self._drafters)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the state of a batch, for `copy` and `pickle`."""
        return {**self.__dict__, "_drafters": [], "_contexts": []}

    def prefill(self, prompts: PromptBatch) -> None:
        rows: list[list[int]] = prompts.tokens.tolist()
        if prompts.counts is not None:
            rows = [row[:n] for row, n in zip(rows, prompts.counts, strict=True)]
        self._contexts = [Context(row, level=self._level) for row in rows]
        self._drafters = [self.drafter, *(self._fork() for _ in rows[1:])]

    def _fork(self) -> Drafter:
        fork = self.drafter.fork()  # type: ignore[attr-defined]
        if not isinstance(fork, Drafter):
            wrong_kind(self.name, "fork to return a drafter, with a method propose", fork)
        return fork

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
        contexts = [Context(text, level=self._level) for text in sequences]
        if rows is None:
            self._contexts = contexts
            self._drafters = [self.drafter, *(self._fork() for _ in contexts[1:])]
            return
        for row, context in zip(rows, contexts, strict=True):
            self._contexts[row : row + 1] = [context]
            self._drafters[row : row + 1] = [self._fork()]

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
            _require_tree(name, tokens, parents, count, logits is None)
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
        # Keep nodes with their ids and all ancestors' ids below `vocab_size`.
        index = {-1: -1}
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if token < vocab_size and parent in index:
                index[node] = len(index) - 1
        nodes = [node for node in index if node >= 0]
        return _Checked([tokens[node] for node in nodes], [index[parents[node]] for node in nodes])

    def _block(
        self, proposals: Sequence[_Checked], wants_rows: bool, vocab_size: int
    ) -> DraftBlock:
        counts = [len(proposal.tokens) for proposal in proposals]
        width = max(1, *counts)
        sampled = wants_rows and any(p.tokens and p.logits is not None for p in proposals)
        parents = drawn = None
        # By the drafter's capability, not by its proposals: the rule that verifies a row's chain
        # must not depend on another row's tree (contract C3).
        if self._trees:
            chain = range(-1, width)
            parents = self._padded(
                [
                    chain[:n] if proposal.parents is None else proposal.parents
                    for n, proposal in zip(counts, proposals, strict=True)
                ],
                width,
            )
            from_rows = [[proposal.logits is not None] * (width + 1) for proposal in proposals]
            drawn = on_device(from_rows, torch.bool, self.device) if sampled else None
        return DraftBlock(
            self._padded([proposal.tokens for proposal in proposals], width),
            on_device(counts, torch.int64, self.device),
            rows=_rows(proposals, width, vocab_size, self._trees) if sampled else None,
            parents=parents,
            drawn=drawn,
        )

    def _padded(self, rows: Sequence[Sequence[int]], width: int) -> Tensor:
        lists = [[*row, *[-1] * (width - len(row))] for row in rows]
        return on_device(lists, torch.int64, self.device)


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
    for b, draft in enumerate(proposals):
        if not draft.tokens or (draft.logits is None and tree):
            continue
        logits[b, : draft.rows] = -float("inf")  # ids beyond a smaller vocabulary are never drawn
        if draft.logits is None:
            logits[b, range(draft.rows), draft.tokens] = 0
            continue
        logits[b, : draft.rows, : draft.logits.shape[2]] = draft.logits[0, : draft.rows]
        if known and draft.statistics is not None:
            statistics[b, : draft.rows] = draft.statistics[0, : draft.rows]
    return RowBuffer(logits, statistics if known else None)


def cut_at_eos(tokens: Sequence[int], eos: frozenset[int]) -> list[int]:
    """Return the tokens up to and including the first EOS (contract C2: it is kept)."""
    end = next((i for i, token in enumerate(tokens, 1) if token in eos), None)
    return list(tokens[:end])


def _require_tree(
    name: str, tokens: Sequence[int], parents: Sequence[int], most: int, deterministic: bool
) -> None:
    if len(parents) != len(tokens):
        raise ValueError(
            f"{name}: expected as many parents as tokens, {len(tokens)}, given {len(parents)}"
        )
    from .trees import require_parents

    require_parents(name, parents, most)
    if deterministic and len(set(zip(parents, tokens, strict=True))) < len(tokens):
        raise ValueError(
            f"{name}: expected the children of a node to differ where there are no draft logits, "
            f"given parents {list(parents)} of tokens {list(tokens)}"
        )


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


# ---- several drafters ----------------------------------------------------------------------------


class SwitchingDrafter:
    """A drafter that drafts with its member number `active`, for all rows of a batch.

    A member reads missed tokens when it drafts: this is the cost of a switch, and an unused member
    reads only the prompt. `active` changes between drafts, and may depend only on past rounds
    (contract C2); a window policy sets it (`policies.DrafterChoice`).

    Args:
        members: drafters of chains of tokens without hidden states: `DraftModel`, `PromptLookup`,
            a user's `Drafter`.
        level: the drafter's number in the chain, n; for members of the last two kinds.
        vocab_size: ids of the level above are below it; for the same members. None: the largest of
            the other members'.

    Attributes:
        active: index of the member that drafts next.
        member_levels: results of `levels_of` for all members.

    Raises:
        TypeError: a member is no drafter, or a number is of another type.
        ValueError: less than two members, a member with hidden states or trees, two members with
            the same level, members on several devices, or `vocab_size` is missing or out of range.
    """

    def __init__(
        self,
        members: Sequence[BatchedDrafter | Drafter],
        *,
        level: int = 2,
        vocab_size: int | None = None,
    ) -> None:
        entries = arguments.listed("members", members, "drafters")
        if len(entries) < 2:
            raise ValueError(f"members: expected at least 2 drafters, given {len(entries)}")
        level = arguments.integer("level", level, LEVEL_MAX, 1)
        for number, member in enumerate(entries):
            if isinstance(member, type) or not isinstance(member, Drafter | BatchedDrafter):
                raise TypeError(
                    f"members[{number}]: expected a drafter, given {arguments.shown(member)}"
                )
        sizes = [entry.vocab_size for entry in entries if isinstance(entry, BatchedDrafter)]
        if vocab_size is None and not sizes:
            raise ValueError("vocab_size: expected that of the level above, given None")
        size = max(sizes) if vocab_size is None else vocab_size
        size = arguments.integer("vocab_size", size, arguments.SIZE_MAX, 1)
        self.members: list[BatchedDrafter] = [
            item if isinstance(item, BatchedDrafter) else ProposalDrafter(item, level, size, size)
            for item in entries
        ]
        self.member_levels: list[object] = []
        for number, entry in enumerate(self.members):
            if entry.capabilities.hidden_layers:
                raise ValueError(f"{entry.name}: expected a drafter without hidden states")
            if entry.capabilities.trees:
                raise ValueError(f"{entry.name}: expected a drafter of chains, given one of trees")
            caches = levels_of(entry)
            if any(cache is other for cache in caches for other in self.member_levels):
                raise ValueError(
                    f"members[{number}]: expected a drafter with a cache of its own, given "
                    f"{entry.name} again"
                )
            self.member_levels += caches
        devices = {member.device for member in self.members}
        if len(devices) > 1:
            raise ValueError(
                f"members: expected drafters on one device, given {sorted(map(str, devices))}"
            )
        self.device = self.members[0].device
        self.vocab_size = max(member.vocab_size for member in self.members)
        self.input_vocab_size = max(map(input_vocab_size, self.members))
        self._maps = [id_map_of(member).of_text(arguments.SIZE_MAX) for member in self.members]
        self.max_length = min(
            (m.max_length for m in self.members if m.max_length is not None), default=None
        )
        self.name = " | ".join(member.name for member in self.members)
        self.active = 0
        # By member: number of tokens read by row, and rows of logits of the latest draft.
        self._lengths: list[list[int]] = [[] for _ in self.members]
        self._rows: list[RowBuffer | None] = [None] * len(self.members)

    @property
    def num_forward_passes(self) -> int:
        return sum(member.num_forward_passes for member in self.members)

    @property
    def capabilities(self) -> DrafterCapabilities:
        return DrafterCapabilities(batches=all(m.capabilities.batches for m in self.members))

    @property
    def one_at_a_time(self) -> str:
        """Reason why a member takes no batches."""
        alone: Any = next(member for member in self.members if not member.capabilities.batches)
        return str(getattr(alone, "one_at_a_time", f"{alone.name} serves one at a time"))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the state of a batch, for `copy` and `pickle`."""
        count = len(self.members)
        return {**self.__dict__, "_lengths": [[] for _ in self.members], "_rows": [None] * count}

    def prefill(self, prompts: PromptBatch) -> None:
        batch, width = prompts.tokens.shape
        counts = [width] * batch if prompts.counts is None else [int(n) for n in prompts.counts]
        for number, member in enumerate(self.members):
            known = self._maps[number].to_below(prompts.tokens)
            member.prefill(prompts._replace(tokens=known))
            self._lengths[number] = list(counts)

    def read(self, tokens: Tensor, counts: Sequence[int]) -> None:
        """Read nothing: a member reads missed tokens when it drafts."""

    def draft(self, inputs: DraftInput) -> DraftBlock:
        assert inputs.text is not None
        assert inputs.eos is not None
        member, read = self.members[self.active], self._lengths[self.active]
        lengths = list(inputs.lengths)
        texts = [inputs.text(b)[read[b] :].tolist() if n else [] for b, n in enumerate(lengths)]
        tokens, counts = padded(texts, self.device)
        tokens = self._maps[self.active].to_below(tokens)
        # A member overwrites its rows of logits, never another member's, which may be a user's.
        rows = self._rows[self.active]
        block = member.draft(replace(inputs, tokens=tokens, counts=RowCounts(counts), rows=rows))
        self._rows[self.active] = block.rows
        if block.rows is not None and id_map_of(member).drawn is not None:
            # Members draw different ids: the level above gets rows over all ids.
            size = min(self.vocab_size, inputs.vocab_size)
            whole = id_map_of(member).spread(block.rows.logits, size)
            block = replace(block, rows=RowBuffer(whole, None))
        drafted = block.counts.tolist() if block.counts is not None else lengths
        for b, ids in enumerate(block.tokens.tolist()):
            if counts[b]:
                # The last token of a text is read with the next draft.
                read[b] += counts[b] + len(cut_at_eos(ids[: drafted[b]], inputs.eos[b])) - 1
        return block

    def rollback(self, lengths: RowCounts) -> RowCounts:
        for number, member in enumerate(self.members):
            counts = list(map(min, lengths, self._lengths[number]))
            if counts != self._lengths[number]:
                self._lengths[number] = list(member.rollback(RowCounts(counts)))
        return lengths

    def select(self, rows: Sequence[int]) -> None:
        for number, member in enumerate(self.members):
            member.select(rows)
            self._lengths[number] = [self._lengths[number][row] for row in rows]


# ---- drafters without a model --------------------------------------------------------------------


_LONGEST = 1024  # maximum n-gram: every token is indexed under an n-gram of each length
_FORMAT = 1  # format version of an n-gram table's file
_SUFFIX = 64  # maximum compared tokens of a suffix

Key = tuple[int, ...]


def _ngram_sizes(max_ngram: int, min_ngram: int) -> range:
    longest = arguments.integer("max_ngram", max_ngram, _LONGEST, 1)
    return range(longest, arguments.integer("min_ngram", min_ngram, longest, 1) - 1, -1)


def _suffixes(tokens: Sequence[int], sizes: range) -> list[Key]:
    count = len(tokens)
    return [tuple(tokens[count - size :]) for size in sizes if size <= count]


# ---- earlier tokens of the text ------------------------------------------------------------------


class _Text:
    """The text of a request, which grows and is truncated."""

    def __init__(self) -> None:
        self._tokens = array("q")

    def followed(self, context: Context, shortest: int, longest: int) -> int | None:
        """Return the index of the token after the latest earlier occurrence of the context's
        longest suffix of at most `longest` tokens; None: no suffix of `shortest` tokens occurred
        before."""
        del self._tokens[context.valid :]
        self._tokens.extend(context.tokens[len(self._tokens) :])
        count, size, end = len(self._tokens), 0, 0
        if count < 2:
            return None
        text = np.array(self._tokens)  # a copy, since an array with views cannot grow
        ends = np.flatnonzero(text[:-1] == text[-1]) + 1  # of earlier occurrences
        while len(ends) and size < longest:
            size, end = size + 1, int(ends[-1])
            ends = ends[ends > size]
            ends = ends[text[ends - size - 1] == text[count - size - 1]]
        return end if size >= shortest else None


class PromptLookup:
    """A drafter that proposes the tokens after the latest earlier occurrence of the text's longest
    suffix of `min_ngram` to `max_ngram` tokens.

    Raises:
        TypeError, ValueError: not 1 <= min_ngram <= max_ngram <= 1024.
    """

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        self.name = "prompt lookup"
        self.num_forward_passes = 0
        sizes = _ngram_sizes(max_ngram, min_ngram)
        self._longest, self._shortest, self._text = sizes.start, sizes.stop + 1, _Text()

    def fork(self) -> PromptLookup:
        """Return a drafter with the same settings and an empty text."""
        return PromptLookup(self._longest, self._shortest)

    def propose(self, context: Context, k: int) -> Proposal:
        """Propose up to `k` tokens; none if no suffix has occurred before."""
        start = self._text.followed(context, self._shortest, self._longest)
        return Proposal([] if start is None else context.tokens[start : start + k])


class SuffixMatch:
    """A drafter that proposes the tokens after the latest earlier occurrence of the text's longest
    suffix, comparing at most max(64, `min_length`) tokens. A proposal that reaches the end of the
    text repeats itself.

    Args:
        min_length: minimum length of the suffix in tokens; without a match the proposal is empty.

    Raises:
        TypeError, ValueError: min_length < 1.
    """

    def __init__(self, min_length: int = 1) -> None:
        self.name = "suffix match"
        self.num_forward_passes = 0
        self.min_length = arguments.integer("min_length", min_length, arguments.SIZE_MAX, 1)
        self._text = _Text()

    def fork(self) -> SuffixMatch:
        """Return a drafter with the same setting and an empty text."""
        return SuffixMatch(self.min_length)

    def propose(self, context: Context, k: int) -> Proposal:
        """Propose `k` tokens; none if no suffix of `min_length` tokens has occurred before."""
        tokens, longest = context.tokens, max(self.min_length, _SUFFIX)
        start = self._text.followed(context, self.min_length, longest)
        if start is None:
            return Proposal([])
        period = len(tokens) - start
        return Proposal([tokens[start + i % period] for i in range(k)])


# ---- a table of n-grams --------------------------------------------------------------------------


class _Counts:
    """Counts of the tokens after each n-gram, and texts that are not counted yet."""

    def __init__(self, sizes: range, limit: int) -> None:
        self.sizes, self.limit = sizes, limit
        self.followers: dict[Key, dict[int, int]] = {}  # oldest n-gram first
        self.open: list[list[int]] = []  # texts of requests begun since the last `close`

    def add(self, tokens: Sequence[int]) -> None:
        for end, token in enumerate(tokens):
            for key in _suffixes(tokens[max(0, end - self.sizes.start) : end], self.sizes):
                counts = self.followers.pop(key, {})
                counts[token] = counts.pop(token, 0) + 1
                self.followers[key] = counts  # the latest last
        while len(self.followers) > self.limit:
            del self.followers[next(iter(self.followers))]

    def close(self, ended: list[int] | None = None) -> None:
        """Count and close all open texts, or only `ended`: their requests have ended."""
        for text in list(self.open):
            if ended is None or text is ended:
                self.open = [other for other in self.open if other is not text]
                self.add(text)

    def best(self, tokens: Sequence[int]) -> int | None:
        """Return the most frequent token after the longest known suffix; of equals the latest."""
        for key in _suffixes(tokens, self.sizes):
            if counts := self.followers.get(key):
                return max(reversed(counts), key=counts.__getitem__)
        return None


class NGramTable:
    """A drafter that proposes, token by token, the most frequent token after the longest known
    suffix of `min_ngram` to `max_ngram` tokens, in earlier outputs and in texts passed to `learn`.

    The texts of a batch are counted when the next batch begins, so that no row of a batch depends
    on another (contract C3). The text that a seed gives depends on earlier texts, unless `learning`
    is False. Forks share a table. An unfinished text is known up to the latest draft.

    Args:
        max_ngram: maximum length of counted n-grams; the longest known is used.
        min_ngram: minimum length.
        max_entries: maximum number of n-grams; the least recently seen are dropped.
        learning: count the texts of requests. `learn` works in any case.

    Raises:
        TypeError, ValueError: not 1 <= min_ngram <= max_ngram <= 1024, or max_entries < 1.
    """

    def __init__(
        self,
        max_ngram: int = 4,
        min_ngram: int = 2,
        max_entries: int = 1_000_000,
        learning: bool = True,
    ) -> None:
        sizes = _ngram_sizes(max_ngram, min_ngram)
        self.name = "n-gram table"
        self.num_forward_passes = 0
        self.learning = arguments.flag("learning", learning)
        self._counts = _Counts(sizes, arguments.integer("max_entries", max_entries, low=1))
        self._text: list[int] = []

    def __len__(self) -> int:
        """Return the number of known n-grams."""
        return len(self._counts.followers)

    def fork(self) -> NGramTable:
        """Return a drafter over the same table."""
        self._counts.close()
        other = NGramTable.__new__(NGramTable)
        other.__dict__.update(self.__dict__, _text=[])
        return other

    def learn(self, tokens: Sequence[int]) -> None:
        """Count the n-grams of a text ``[n]``, for example an earlier output."""
        self._counts.add(arguments.row_integers("tokens", tokens))

    def propose(self, context: Context, k: int) -> Proposal:
        """Propose up to `k` tokens, as many as the table knows."""
        if context.valid == 0:
            self._counts.close(self._text)  # a request ends when the next begins
            self._text = []
            if self.learning:
                self._counts.open.append(self._text)
        self._text[context.valid :] = context.tokens[context.valid :]
        recent = context.tokens[-self._counts.sizes.start :]
        known = len(recent)
        while len(recent) < known + k:
            token = self._counts.best(recent)
            if token is None:
                break
            recent.append(token)
        return Proposal(recent[known:])

    def save(self, path: str | Path) -> None:
        """Write the table as JSON, including unfinished texts."""
        path = arguments.path("path", path)
        self._counts.close()
        counts = self._counts
        content = {
            "format": _FORMAT,
            "max_ngram": counts.sizes.start,
            "min_ngram": counts.sizes.stop + 1,
            "max_entries": counts.limit,
            "followers": [[list(k), list(n.items())] for k, n in counts.followers.items()],
        }
        replace_text(path, json.dumps(content))

    @classmethod
    def load(cls, path: str | Path, learning: bool = True) -> NGramTable:
        """Read the table that `save` wrote."""
        path = arguments.path("path", path)
        arguments.flag("learning", learning)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != _FORMAT:
                raise ValueError(f"format {content['format']}")
            table = cls(
                content["max_ngram"], content["min_ngram"], content["max_entries"], learning
            )
            table._counts.followers = {
                tuple(map(int, key)): {int(token): int(count) for token, count in counts}
                for key, counts in content["followers"]
            }
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"path: expected a file that NGramTable.save wrote, given {str(path)!r}: {error}"
            ) from error
        return table
