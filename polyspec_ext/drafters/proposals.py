"""Drafters of one text (`Drafter`) as the engine calls them: one for each request, its context kept
for it, and proposals that fit.

A drafter may be a user's own. Errors name it, what its contract expects, and what came.
TypeError: wrong kind or dtype. ValueError: wrong shape, layout, device or range.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..arguments import require_ids
from ..errors import add_note
from ..levels.base import PromptBatch
from ..tensors import RowCounts, on_device
from ..validate import INT_DTYPES, LOGITS_DTYPES, kind_of
from .base import (
    Context,
    DraftBlock,
    Drafter,
    DrafterCapabilities,
    DraftInput,
    Proposal,
    RowBuffer,
)
from .trees import require_parents


class ProposalDrafter:
    """A `Drafter` behind a batch.

    Args:
        drafter: serves the first request; its forks serve the others.
        level: its number in the chain, n.
        vocab_size: ids of the level above are below it.
        target_vocab_size: ids of the target are below it. A deterministic proposal ends before an
            id that only levels further up have.
    """

    def __init__(
        self, drafter: Drafter, level: int, vocab_size: int, target_vocab_size: int
    ) -> None:
        self.drafter = drafter
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
            batches=hasattr(self.drafter, "fork"), trees=self._trees, reads_apart=True
        )

    @property
    def one_at_a_time(self) -> str:
        """Why it takes no batches."""
        return f"{type(self.drafter).__name__} has no `fork` and serves one at a time"

    @property
    def num_forward_passes(self) -> int:
        return sum(getattr(own, "num_forward_passes", 0) for own in self._drafters)

    def __getstate__(self) -> dict[str, Any]:
        """For `copy` and `pickle`: without what belongs to a batch."""
        return {**self.__dict__, "_drafters": [], "_contexts": []}

    def prefill(self, prompts: PromptBatch) -> None:
        rows: list[list[int]] = prompts.tokens.tolist()
        if prompts.counts is not None:
            rows = [row[:n] for row, n in zip(rows, prompts.counts, strict=True)]
        self._contexts = [Context(row, level=self._level) for row in rows]
        self._drafters = [self.drafter]
        for _ in rows[1:]:
            fork = self.drafter.fork()  # type: ignore[attr-defined]
            if not isinstance(fork, Drafter):
                raise TypeError(
                    f"{self.name}: expected fork to return a drafter, with a method propose, given "
                    f"{kind_of(fork)}"
                )
            self._drafters.append(fork)

    def read(self, tokens: torch.Tensor, counts: Sequence[int]) -> None:
        for context, row, count in zip(self._contexts, tokens.tolist(), counts, strict=True):
            context.tokens += row[:count]

    def rollback(self, lengths: RowCounts) -> RowCounts:
        for context, length in zip(self._contexts, lengths, strict=True):
            del context.tokens[length:]
            context.valid = min(context.valid, length)
        return lengths

    def select(self, rows: Sequence[int]) -> None:
        self._contexts = [self._contexts[row] for row in rows]
        self._drafters = [self._drafters[row] for row in rows]

    def draft(self, inputs: DraftInput) -> DraftBlock:
        """See `BatchedDrafter.draft`.

        Raises:
            TypeError, ValueError: a proposal that the level above cannot verify; names the drafter.
        """
        assert inputs.eos is not None
        rounds, lengths = inputs.rounds.tolist(), list(inputs.lengths)
        proposals: list[Proposed | None] = []
        for b, (row, count) in enumerate(zip(inputs.tokens.tolist(), inputs.counts, strict=True)):
            length = lengths[b]
            if length == 0:
                proposals.append(None)
                continue
            context = self._contexts[b]
            if self._trees:
                # Behind a tree the text goes on along the path that stood.
                assert inputs.text is not None
                context.tokens[:] = inputs.text(b).tolist()
            else:
                context.tokens += row[:count]
            context.round, context.eos = rounds[b], inputs.eos[b]
            context.sampling, context.seed = (
                inputs.parameters.sampling[b],
                inputs.parameters.seeds[b],
            )
            context.request = inputs.requests[b]
            before = len(context.tokens)
            try:
                proposal = self._drafters[b].propose(context, length)
            except Exception as error:
                kind = type(self._drafters[b]).__name__
                add_note(error, f"in propose of the drafter {self.name} ({kind})")
                raise
            if len(context.tokens) != before:
                raise ValueError(
                    f"{self.name}: expected propose to leave context.tokens as they are, {before} "
                    f"ids, given {len(context.tokens)}"
                )
            proposed = checked(
                proposal,
                length,
                name=self.name,
                vocab_size=min(self.vocab_size, inputs.vocab_size),
                target_vocab_size=self.input_vocab_size,
                trees=self._trees,
            )
            if proposed.parents is None:
                proposed = proposed._replace(tokens=cut_at_eos(proposed.tokens, context.eos))
                # The last token of a text is given again with the next draft.
                context.tokens += proposed.tokens
                context.tokens.pop()
            if len(self._contexts) > 1 and proposed.logits is not None:
                # Another row's drafter may write its rows in the same buffer.
                known = proposed.statistics
                known = None if known is None else known.clone()
                proposed = proposed._replace(logits=proposed.logits.clone(), statistics=known)
            context.valid = len(context.tokens)
            proposals.append(proposed)
        return self._block(proposals, inputs)

    def _block(self, proposals: Sequence[Proposed | None], inputs: DraftInput) -> DraftBlock:
        given = [Proposed([]) if own is None else own for own in proposals]
        width = max(1, *(len(own.tokens) for own in given))
        vocab_size = min(self.vocab_size, inputs.vocab_size)
        sampled = inputs.wants_rows and any(own.tokens and own.logits is not None for own in given)
        # By what the drafter may propose and not by what it does: a row's chain is verified by the
        # same rule alone as beside another row's tree (contract C3).
        tree = self._trees
        parents = drawn = None
        if tree:
            above = [
                range(-1, len(own.tokens) - 1) if own.parents is None else own.parents
                for own in given
            ]
            parents = self._padded(above, width)
            from_rows = [[own.logits is not None] * (width + 1) for own in given]
            drawn = on_device(from_rows, torch.bool, self.device) if sampled else None
        return DraftBlock(
            self._padded([own.tokens for own in given], width),
            on_device([len(own.tokens) for own in given], torch.int64, self.device),
            rows=_rows(given, width, vocab_size, tree) if sampled else None,
            parents=parents,
            drawn=drawn,
        )

    def _padded(self, rows: Sequence[Sequence[int]], width: int) -> torch.Tensor:
        lists = [[*row, *[-1] * (width - len(row))] for row in rows]
        return on_device(lists, torch.int64, self.device)


class Proposed(NamedTuple):
    """A proposal that the level above can verify.

    Attributes:
        tokens: ids.
        parents: of a tree, as of `Proposal`.
        logits, statistics: as of `Proposal`.
    """

    tokens: list[int]
    parents: list[int] | None = None
    logits: torch.Tensor | None = None
    statistics: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        """Rows of logits that it needs."""
        return len(self.tokens) + (self.parents is not None)


def _rows(proposals: Sequence[Proposed], width: int, vocab_size: int, tree: bool) -> RowBuffer:
    """The rows of logits that the tokens were drawn from, side by side; of a chain that is
    deterministic among chains they are one-hot."""
    one = proposals[0]
    if len(proposals) == 1 and one.logits is not None and one.logits.shape[1] == width + tree:
        logits = one.logits if one.logits.stride(2) == 1 else one.logits.contiguous()
        return RowBuffer(logits, one.statistics)
    given = [own for own in proposals if own.logits is not None]
    rows = [own.logits for own in given if own.logits is not None]
    dtypes = {own.dtype for own in rows}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    even = len({own.shape[2] for own in rows}) == 1 and len(rows) == len(proposals)
    vocab = rows[0].shape[2] if even else vocab_size
    device = rows[0].device
    # What no row fills is handed to the operator as well, and must be harmless.
    shape = (len(proposals), width + tree)
    logits = torch.zeros(*shape, vocab, dtype=dtype, device=device)
    statistics = torch.zeros(*shape, 2, dtype=torch.int64, device=device)
    known = even and all(own.statistics is not None for own in given)
    for b, own in enumerate(proposals):
        count = own.rows
        if not own.tokens or (own.logits is None and tree):
            continue
        logits[b, :count] = -float("inf")  # what a smaller vocabulary lacks is never drawn
        if own.logits is None:
            logits[b, range(count), own.tokens] = 0
            continue
        logits[b, :count, : own.logits.shape[2]] = own.logits[0, :count]
        if known and own.statistics is not None:
            statistics[b, :count] = own.statistics[0, :count]
    return RowBuffer(logits, statistics if known else None)


def cut_at_eos(tokens: Sequence[int], eos: frozenset[int]) -> list[int]:
    """Tokens up to and including the first EOS (contract C2: it is kept)."""
    end = next((i for i, token in enumerate(tokens, 1) if token in eos), None)
    return list(tokens[:end])


def checked(
    proposal: Any,
    count: int,
    *,
    name: str,
    vocab_size: int,
    target_vocab_size: int,
    trees: bool = False,
) -> Proposed:
    """A proposal, if it is one that the level above can verify.

    Args:
        proposal: whatever the drafter returned.
        count: tokens asked for, or levels of a tree.
        name: of the drafter, for messages.
        vocab_size: ids of the level above are below it.
        target_vocab_size: ids of the target are below it. A deterministic proposal ends before an
            id that only levels further up have.
        trees: whether it may be a tree.

    Raises:
        TypeError: no Proposal, ids that are no integers, logits or statistics of another kind.
        ValueError: too many tokens, an id out of range, what is no tree, or rows that do not fit.
    """
    if not isinstance(proposal, Proposal):
        raise TypeError(f"{name}: expected propose to return a Proposal, given {kind_of(proposal)}")
    tokens, parents = _ids(name, "token ids", proposal.tokens), None
    if proposal.parents is not None:
        parents = _ids(name, "parents", proposal.parents)
        _require_tree(name, tokens, parents, count, trees, proposal.logits is None)
    elif len(tokens) > count:
        raise ValueError(f"{name}: expected at most {count} tokens, given {len(tokens)}")
    made = Proposed(tokens, parents, proposal.logits, proposal.statistics)
    if proposal.logits is not None:
        width = _require_rows(name, proposal.logits, proposal.statistics, made.rows, vocab_size)
        require_ids(name, tokens, width)
        return made
    if proposal.statistics is not None:
        raise ValueError(f"{name}: expected no draft statistics without draft logits, given both")
    require_ids(name, tokens, target_vocab_size)
    if parents is None:
        return Proposed(list(itertools.takewhile(vocab_size.__gt__, tokens)))
    return _known_nodes(tokens, parents, vocab_size)


def _require_tree(
    name: str,
    tokens: Sequence[int],
    parents: Sequence[int],
    most: int,
    trees: bool,
    deterministic: bool,
) -> None:
    if not trees:
        raise ValueError(
            f"{name}: expected a chain of tokens from a drafter without `trees = True`, given a "
            "tree"
        )
    if len(parents) != len(tokens):
        raise ValueError(
            f"{name}: expected as many parents as tokens, {len(tokens)}, given {len(parents)}"
        )
    require_parents(name, parents, most)
    if deterministic and len(set(zip(parents, tokens, strict=True))) < len(tokens):
        raise ValueError(
            f"{name}: expected the children of a node to differ where there are no draft logits, "
            f"given parents {list(parents)} of tokens {list(tokens)}"
        )


def _known_nodes(tokens: Sequence[int], parents: Sequence[int], vocab_size: int) -> Proposed:
    """The nodes whose ids and ancestors' ids are below `vocab_size`."""
    place = {-1: -1}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if token < vocab_size and parent in place:
            place[node] = len(place) - 1
    kept = [node for node in place if node >= 0]
    return Proposed([tokens[node] for node in kept], [place[parents[node]] for node in kept])


def _require_rows(name: str, rows: Any, statistics: Any, count: int, vocab_size: int) -> int:
    """Draft logits and statistics of `count` tokens. Returns Vd."""
    if not isinstance(rows, torch.Tensor) or rows.dtype not in LOGITS_DTYPES:
        raise TypeError(
            f"{name}: expected draft logits as a float32, bfloat16 or float16 tensor, given "
            f"{kind_of(rows)}"
        )
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
        what = "the meta device" if rows.is_meta else f"layout {rows.layout}"
        raise ValueError(f"{name}: expected draft logits with values in memory, given {what}")
    if statistics is not None:
        _require_statistics(name, statistics, count)
    return int(rows.shape[2])


def _require_statistics(name: str, statistics: Any, count: int) -> None:
    if not isinstance(statistics, torch.Tensor) or statistics.dtype != torch.int64:
        raise TypeError(
            f"{name}: expected draft statistics as an int64 tensor from ps.sample, given "
            f"{kind_of(statistics)}"
        )
    if tuple(statistics.shape) != (1, count, 2) or statistics.is_meta:
        raise ValueError(
            f"{name}: expected draft statistics of shape [1, {count}, 2], given "
            f"{list(statistics.shape)} on {statistics.device}"
        )


def _ids(name: str, what: str, tokens: Any) -> list[int]:
    """Token ids or other indices as Python has them, ``[n]``."""
    if isinstance(tokens, torch.Tensor):
        if tokens.dtype not in INT_DTYPES:
            raise TypeError(f"{name}: expected integer {what}, given {kind_of(tokens)}")
        if tokens.dim() != 1 or tokens.is_meta:
            raise ValueError(
                f"{name}: expected {what} of shape [n], given {list(tokens.shape)} on "
                f"{tokens.device}"
            )
        ids: list[int] = tokens.tolist()
        return ids
    if not isinstance(tokens, Sequence) and not hasattr(tokens, "__array__"):
        raise TypeError(f"{name}: expected a sequence of {what}, given {kind_of(tokens)}")
    return [_id(name, what, token) for token in tokens]


def _id(name: str, what: str, token: Any) -> int:
    if type(token) is int:
        return token
    if not isinstance(token, bool):
        try:
            return operator.index(token)
        except TypeError:
            pass
    raise TypeError(f"{name}: expected integer {what}, given {kind_of(token)} among them")
