"""The drafter's contract: from what stands to a block of tokens for the level above to verify."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch

from ..levels.base import LevelCapabilities, PromptBatch
from ..sampling import Sampling
from ..tensors import RowCounts, RowParameters

if TYPE_CHECKING:
    from ..sampling import LogitsProcessors


class HiddenStates(NamedTuple):
    """Hidden states of the tokens that a drafter has not been told of: the target's of the prompts
    (all tokens but the last), and those of verifications since its last draft. Every committed
    token but the last has a state of the target's, and every token of a text but the last one of
    some verifier, unless a verifier's have another width than the drafter wants, or fewer layers:
    those are not told. Where the target has read a token, its state is the target's, and replaces
    that of a level below it; between others it is that of the later one.

    Attributes:
        layers: ``[B, W, H]`` by layer; the state behind token ``positions[b] + j`` of row b. Empty
            if nothing is told.
        positions: ``[B]`` int64, absolute position of each row's first token.
        counts: ``[B]`` int64, tokens of each row. They lie where the state rows do: on the CPU
            where the host reads them.
    """

    layers: dict[int, torch.Tensor]
    positions: torch.Tensor
    counts: torch.Tensor


class TreeSize(NamedTuple):
    """What a tree takes.

    Attributes:
        nodes: that the level above reads.
        read: nodes that the drafter reads itself, at most.
    """

    nodes: int
    read: int


@dataclass(frozen=True, slots=True)
class DrafterCapabilities(LevelCapabilities):
    """What a drafter can do, and wants to be told.

    Attributes:
        batches, reads_apart, keeps_lengths: as of a level.
        device_lengths: it drafts in the batch at hand where the host knows no counts and lengths.
        trees: its blocks are trees, a chain one of a single path; the level above it must read
            them.
        hidden_layers: layers of the verifiers whose hidden states it wants.
        hidden_size: width of these states; None: any.
        tree_size: from the levels asked for to the size of a row's tree, where that depends on
            nothing else; None: it may.
    """

    batches: bool = True
    hidden_layers: tuple[int, ...] = ()
    tree_size: Callable[[int], TreeSize] | None = None


class RowBuffer(NamedTuple):
    """Rows of logits and their statistics.

    Attributes:
        logits: ``[B, N, Vd]``.
        statistics: ``[B, N, 2]`` int64; None: not known.
    """

    logits: torch.Tensor
    statistics: torch.Tensor | None


@dataclass(slots=True)
class DraftInput:
    """What a drafter is told. Rows without a part in the step have 0 `counts` and `lengths`. The
    tensors by row are the step's: the next one may write over them.

    Attributes:
        tokens: ``[B, T]`` int64 on the drafter's device, what it has not read of each text, at the
            front of each row. The last token of a text is always among them. Where it wants hidden
            states they begin behind the last token whose state it was told in an earlier draft, or
            with the first whose state is told anew.
        counts: ``[B]``, tokens of each row.
        lengths: ``[B]``, tokens to draft, or the levels of a tree; fewer are fine where their
            number does not depend on the values of sampled tokens (contract C2).
        most: the largest of `lengths`; the host knows it.
        positions: ``[B]`` int64, absolute position of the first token to draft.
        rounds: ``[B]`` int64, drafting rounds of each row so far; key the draws (contract C3).
        level: the drafter's number in the chain, n (papers: M_n).
        parameters: of the rows; a sampled token must be drawn from the distribution they give.
        wants_rows: somebody will ask for the rows of logits; not where every row is greedy.
        requests: number of each row's request, for messages.
        rows: logits and statistics of an earlier block of the batch, to be written again where the
            new ones fit: captured graphs need them at their place.
        eos: ids that end each row's text: drafting past one is wasted work. None: the host must not
            wait for the tokens while they are drafted.
        processors: change logits first, and `text` gives the ``[N]`` int64 tokens of a row.
        hidden: the verifiers' states since a row's last draft: with the first draft the prompt's,
            from position 0 on. Rows without a part are told again. None: it wants none.
        vocab_size: ids of the level above are below it, and so must be those that are drafted.
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
    processors: LogitsProcessors | None = None
    text: Callable[[int], torch.Tensor] | None = None
    hidden: HiddenStates | None = None
    vocab_size: int = 2**31 - 1


@dataclass(slots=True)
class DraftBlock:
    """Tokens for the level above to verify.

    Attributes:
        tokens: ``[B, N]`` int64; -1 where a row of logits had no distribution.
        counts: ``[B]`` int64, tokens of each row, at most what was asked for; None: as many as were
            asked for, or up to an EOS.
        status: ``[B, N]`` int32, status bits of `ps.sample`; None: nothing was drawn.
        rows: ``[B, at least N, Vd]``, the row that each token was drawn from, before temperature
            and filters, and the statistics that `ps.sample` returned beside the tokens, which save
            the verifier from reading the rows again. They must stand until the drafter's next
            block. None: every proposal is deterministic, its distribution one-hot, or nobody asked.
        parents: ``[B, N]`` int64, the index of each token's parent, below its own, -1 for the root;
            the nodes of one parent in the order in which they are tried. None: a chain. Of a tree
            `counts` are its nodes, and `rows` ``[B, N+1, Vd]``: row 0 is what the children of the
            root were drawn from, each independently of the others, and row i+1 those of node i;
            `status` is None. A drafter drafts trees or chains, as its capabilities say: what rule
            a row is verified by must not depend on its neighbours (contract C3).
        drawn: ``[B, N+1]`` bool, of a tree with `rows`: whether the children behind each were drawn
            from it; elsewhere they are deterministic. None: all were.
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
        vocab_size: ids that it draws are below it. Those that it reads are, too, unless it has an
            `input_vocab_size`; others come as 0.
        max_length: longest context; None: no limit.
        device: of tokens and logits.
        capabilities: stated, not probed by the caller.
        num_forward_passes: of models, while drafting, over all requests.
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
        """Forget everything; a batch begins. `prompts` are without their last token, which is read
        with the first draft. Nobody asks what this and `read` return."""
        ...

    def read(self, tokens: torch.Tensor, counts: Sequence[int]) -> object:
        """Append ``counts[b]`` tokens to row b: what stands, but was not read while nobody asked
        for a draft."""
        ...

    def draft(self, inputs: DraftInput) -> DraftBlock:
        """One block for every row with a part."""
        ...

    def rollback(self, lengths: RowCounts) -> Sequence[int]:
        """Only the first ``lengths[b]`` tokens of row b still stand. Returns how many are kept."""
        ...

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in that order."""
        ...


# ---- a drafter of a user's own -----------------------------------------------------------------


@dataclass(slots=True)
class Context:
    """What a drafter of one text is told. One object lives as long as its request and is updated
    between calls.

    Attributes:
        tokens: prompt, committed and pending tokens, oldest first. Read it, never change it.
        valid: the first `valid` tokens are those of the previous call and its proposal, if that
            was a chain; what a drafter remembers of later ones is void. 0 on the first call of a
            request: forget everything.
        sampling: the request's parameters. A proposal with logits must be drawn from the
            distribution they give.
        seed: keys the draws, with the absolute position, `level` and `round` (contract C3).
        level: the drafter's number in the chain, n (papers: M_n).
        round: counts the drafting rounds of the request.
        eos: ids that end the text; drafting past one is wasted work.
        request: its number in the batch, for messages.
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
        tokens: at most the k asked for, a sequence or a tensor ``[n]``; of a tree any number, its
            paths at most k long. Fewer, or none, is fine where the number does not depend on the
            values of sampled tokens (contract C2); nothing sampled may be dropped.
        logits: ``[1, len(tokens), Vd]``, the row each token was drawn from, before temperature and
            filters, with Vd at most the vocabulary of the level above; read until the next call of
            `propose`, of this drafter or a fork of it. None: the proposal is deterministic, its
            distribution one-hot. One call may differ from the next in this, and in dtype and width.
            Of a tree ``[1, len(tokens) + 1, Vd]``: row 0 is what the children of the root were
            drawn from, each independently of the others, and row i+1 those of node i. Without,
            siblings differ.
        parents: of a tree, which a drafter with ``trees = True`` may propose: the index of each
            token's parent, below its own, -1 for the root; the nodes of one parent in the order in
            which they are tried. None: a chain.
        statistics: ``[1, rows of logits, 2]`` int64, the row statistics that `ps.sample` returned
            beside the tokens, which saves the verifier from reading the rows again. None: it reads
            them.
    """

    tokens: Sequence[int] | torch.Tensor
    logits: torch.Tensor | None = None
    parents: Sequence[int] | None = None
    statistics: torch.Tensor | None = None


@runtime_checkable
class Drafter(Protocol):
    """Anything that proposes tokens for one text. Optional attributes: `name`,
    `num_forward_passes`, ``trees = True`` where its proposals may be trees, and ``fork()``, which
    gives another of the same kind for another request: without it a chain with this drafter takes
    one prompt at a time."""

    def propose(self, context: Context, k: int) -> Proposal:
        """At most `k` >= 1 tokens to follow ``context.tokens``, or a tree of at most `k` levels."""
        ...
