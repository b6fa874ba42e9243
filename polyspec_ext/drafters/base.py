"""The drafter's contract: from committed tokens to a block that the level above verifies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch

from ..levels.base import LevelCapabilities, PromptBatch
from ..sampling import Sampling
from ..tensors import RowCounts, RowParameters

if TYPE_CHECKING:
    from ..sampling import RequestProcessors

LONGEST = 256  # maximum tokens of a captured pass; longer passes hide the launches
Outputs = tuple[torch.Tensor | None, ...]


class HiddenStates(NamedTuple):
    """Verifier hidden states since the last draft; with the first draft the prompt's. Every token
    but the last has a state, unless its verifiers lack the width or the layers that the drafter
    reads. The target's state replaces a lower level's, and a later state an earlier.

    Attributes:
        layers: ``[B, W, H]`` by layer; the state after token ``positions[b] + j`` of row b. Empty:
            no states.
        positions: ``[B]`` int64, absolute position of each row's first token.
        counts: ``[B]`` int64, tokens of each row; on the device of the state rows.
    """

    layers: dict[int, torch.Tensor]
    positions: torch.Tensor
    counts: torch.Tensor


class TreeSize(NamedTuple):
    """Maximum numbers of nodes that the level above verifies, and that the drafter reads; the
    drafter's passes."""

    nodes: int
    read: int
    passes: int


@dataclass(frozen=True, slots=True)
class DrafterCapabilities(LevelCapabilities):
    """Capabilities of a drafter, as of a level, and the hidden states that it reads.

    Attributes:
        device_lengths: can draft the current batch without counts and lengths on the host.
        trees: blocks are trees, a chain being a tree with a single path; the level above must read
            trees.
        keeps_paths: the drafter reads the nodes of its trees except the deepest, in order, and has
            `keep_path`, as a level, called instead of `rollback` after the verification of a tree.
            It counts all nodes of a path but the last as read.
        hidden_layers: layers of the verifiers with the hidden states that the drafter reads.
        hidden_size: width of these states; None: any.
        tree_size: maps the number of tree levels to the size of a row's tree; None: it may
            depend on more.
        one_pass: a draft is a single pass for any number of tokens.
    """

    batches: bool = True
    keeps_paths: bool = False
    hidden_layers: tuple[int, ...] = ()
    tree_size: Callable[[int], TreeSize] | None = None
    one_pass: bool = False


class RowBuffer(NamedTuple):
    """Rows of logits ``[B, N, Vd]`` and their statistics ``[B, N, 2]`` int64; None: unknown."""

    logits: torch.Tensor
    statistics: torch.Tensor | None


@dataclass(slots=True)
class DraftInput:
    """Inputs of a draft. Inactive rows have 0 `counts` and `lengths`. The next step may overwrite
    the tensors.

    Attributes:
        tokens: ``[B, T]`` int64 on the drafter's device, the unread tokens of each text, at the
            front of its row, including the last. For a drafter that reads hidden states: the tokens
            after the last token with a state in an earlier draft, or from the first token with a
            replaced state.
        counts: ``[B]``, number of tokens of each row.
        lengths: ``[B]``, number of tokens to draft, or of levels of a tree; fewer are allowed if
            the number does not depend on the values of sampled tokens (contract C2).
        most: maximum of `lengths`, as a host number.
        positions: ``[B]`` int64, absolute position of the first token to draft.
        rounds: ``[B]`` int64, previous drafting rounds of each row, a key of draws (contract C3).
        level: the drafter's number in the chain, n (papers: M_n).
        parameters: the rows' sampling parameters, which define the distribution of draft tokens.
        wants_rows: the level above reads the rows of logits; False if every row is greedy.
        requests: number of each row's request, for messages.
        rows: logits and statistics of an earlier block of the batch, to be overwritten if the new
            sizes fit: captured graphs need fixed addresses.
        eos: ids that end each row's text; tokens after them are wasted work. None: the host must
            not wait for draft tokens.
        processors: change logits first; `text` returns the ``[N]`` int64 tokens of a row.
        hidden: new states of the verifiers. Inactive rows get them again. None: the drafter reads
            no states.
        vocab_size: ids of the level above, and so of draft tokens, are below it.
        passes: `runtime.graphs.Passes`, which run passes by CUDA graphs; None: eagerly.
    """

    tokens: torch.Tensor
    counts: RowCounts
    lengths: RowCounts
    most: int
    positions: torch.Tensor
    rounds: torch.Tensor
    level: int
    parameters: RowParameters
    wants_rows: bool
    requests: Sequence[int]
    rows: RowBuffer | None = None
    eos: Sequence[frozenset[int]] | None = None
    processors: RequestProcessors | None = None
    text: Callable[[int], torch.Tensor] | None = None
    hidden: HiddenStates | None = None
    vocab_size: int = 2**31 - 1
    passes: Any = None


@dataclass(slots=True)
class DraftBlock:
    """Tokens for the level above to verify.

    Attributes:
        tokens: ``[B, N]`` int64; -1 if a row of logits had no distribution.
        counts: ``[B]`` int64, number of tokens of each row, at most `DraftInput.lengths`; None:
            equal to these, or up to an EOS.
        status: ``[B, N]`` int32, status bits of `ps.sample`; None: no draws.
        rows: ``[B, at least N, Vd]``, the row of logits that each token was drawn from, before
            temperature and filters, with the statistics of `ps.sample`; valid until the drafter's
            next block. None: every proposal is deterministic, or the level above reads no rows.
        parents: ``[B, N]`` int64, index of each token's parent, below the token's index, -1 for the
            root; nodes with the same parent in the order of verification. None: a chain. For a tree
            `counts` are numbers of nodes, and `rows` ``[B, N+1, Vd]``: children of the root are
            drawn from row 0, independently of each other, and children of node i from row i+1;
            `status` is None. A drafter drafts either trees or chains, by its capabilities: the rule
            that verifies a row must not depend on other rows (contract C3).
        drawn: ``[B, N+1]`` bool, for a tree with `rows`: whether the children were drawn from the
            row; else they are deterministic. None: all were drawn.
    """

    tokens: torch.Tensor
    counts: torch.Tensor | None = None
    status: torch.Tensor | None = None
    rows: RowBuffer | None = None
    parents: torch.Tensor | None = None
    drawn: torch.Tensor | None = None


@runtime_checkable
class BatchedDrafter(Protocol):
    """A drafter as the engine calls it.

    Attributes:
        name: for messages and statistics.
        vocab_size: drawn ids are below it, and so are ids read unless the drafter has an
            `input_vocab_size`; higher ids are passed as 0.
        max_length: longest context; None: no limit.
        device: device of tokens and logits.
        capabilities: stated, not probed by the caller.
        num_forward_passes: forward passes of models while drafting, over all requests.
    """

    name: str
    vocab_size: int
    max_length: int | None
    device: torch.device

    @property
    def num_forward_passes(self) -> int: ...

    @property
    def capabilities(self) -> DrafterCapabilities: ...

    def prefill(self, prompts: PromptBatch) -> object:
        """Forget everything and begin a batch. `prompts` are without their last token, which is
        read with the first draft. Results of `prefill` and `read` are ignored."""
        ...

    def read(self, tokens: torch.Tensor, counts: Sequence[int]) -> object:
        """Append ``counts[b]`` committed tokens to row b, between two drafts."""
        ...

    def draft(self, inputs: DraftInput) -> DraftBlock:
        """Draft a block for every active row."""
        ...

    def rollback(self, lengths: RowCounts) -> Sequence[int]:
        """Keep the first ``lengths[b]`` tokens of row b. Returns the kept numbers of tokens."""
        ...

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        ...


# ---- a user's drafter ----------------------------------------------------------------------------


@dataclass(slots=True)
class Context:
    """Inputs of a drafter of a single text. A request has one object for its lifetime, updated
    between calls.

    Attributes:
        tokens: prompt, committed and pending tokens, oldest first. Read-only.
        valid: the first `valid` tokens are unchanged since the previous call, including its
            proposal if that was a chain; state for later tokens is void. 0 on the first call of a
            request: all state is void.
        sampling: the request's parameters, which define the distribution that a proposal with
            logits must be drawn from.
        seed: a key of draws, with the absolute position, `level` and `round` (contract C3).
        level: the drafter's number in the chain, n (papers: M_n).
        round: number of the request's previous drafting rounds.
        eos: ids that end the text; tokens after them are wasted work.
        request: number of the request in the batch, for messages.
    """

    tokens: list[int]
    valid: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    level: int = 2
    round: int = 0
    eos: frozenset[int] = frozenset()
    request: int = 0


@dataclass(slots=True)
class Proposal:
    """Tokens for the level above to verify.

    Attributes:
        tokens: at most k tokens, a sequence or a tensor ``[n]``; for a tree any number, with paths
            of at most k. Fewer, or none, are allowed if the number does not depend on the values of
            sampled tokens (contract C2); no sampled token may be dropped.
        logits: ``[1, len(tokens), Vd]``, the row each token was drawn from, before temperature and
            filters, with Vd at most the vocabulary of the level above; read until the next call of
            `propose`, of this drafter or a fork. None: the proposal is deterministic, its
            distribution one-hot. Calls may differ in this, and in dtype and width. For a tree
            ``[1, len(tokens) + 1, Vd]``, as `DraftBlock.rows`; without logits, siblings differ.
        parents: for a tree, which a drafter with ``trees = True`` may propose: the index of each
            token's parent, as in `DraftBlock`. None: a chain.
        statistics: ``[1, rows of logits, 2]`` int64, the row statistics that `ps.sample` returned
            with the tokens. None: the verifier reads the rows again.
    """

    tokens: Sequence[int] | torch.Tensor
    logits: torch.Tensor | None = None
    parents: Sequence[int] | None = None
    statistics: torch.Tensor | None = None


@runtime_checkable
class Drafter(Protocol):
    """A drafter of a single text, as users write it. Optional attributes: `name`,
    `num_forward_passes`, ``trees = True`` if its proposals may be trees, and ``fork()``, which
    returns a drafter of the same kind for another request: without it a chain with this drafter
    runs a single prompt at a time."""

    def propose(self, context: Context, k: int) -> Proposal:
        """Propose at most `k` >= 1 tokens after ``context.tokens``, or a tree of at most `k`
        levels."""
        ...


def levels_of(drafter: object) -> list[object]:
    """Return the objects with a drafter's caches: its levels, or the drafter."""
    several: list[object] | None = getattr(drafter, "member_levels", None)
    return several or [getattr(drafter, "level", drafter)]
