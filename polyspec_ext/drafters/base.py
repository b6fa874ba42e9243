"""The drafter's contract: from the committed tokens to a block for the level above to verify."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch

from ..levels.base import BatchedLevel, InputBlock, LevelCapabilities, LevelOutput, PromptBatch
from ..sampling import Sampling
from ..tensors import RowCounts, RowParameters

if TYPE_CHECKING:
    from ..sampling import RequestProcessors

LONGEST = 256  # tokens of a pass that is captured; longer ones have work to hide the launches
Outputs = tuple[torch.Tensor | None, ...]


class HiddenStates(NamedTuple):
    """Verifier hidden states since the last draft; with the first draft those of the prompt. Every
    token but the last has one, unless its verifiers lack the width or the layers that the drafter
    reads. The target's state replaces a lower level's, and a later state an earlier one.

    Attributes:
        layers: ``[B, W, H]`` by layer; the state behind token ``positions[b] + j`` of row b. Empty
            if there are none.
        positions: ``[B]`` int64, absolute position of each row's first token.
        counts: ``[B]`` int64, tokens of each row; on the device of the state rows.
    """

    layers: dict[int, torch.Tensor]
    positions: torch.Tensor
    counts: torch.Tensor


class TreeSize(NamedTuple):
    """Nodes that the level above reads, and those that the drafter reads itself, at most."""

    nodes: int
    read: int


@dataclass(frozen=True, slots=True)
class DrafterCapabilities(LevelCapabilities):
    """Capabilities of a drafter, and the hidden states that it reads.

    Attributes:
        batches, reads_apart, keeps_lengths: as of a level.
        device_lengths: it drafts in the batch at hand where the host knows no counts and lengths.
        trees: its blocks are trees, a chain one of a single path; the level above it must read
            them.
        keeps_paths: it has read the nodes of its trees but for the deepest, in their order, and has
            `keep_path`, as a level. That is called behind the verification of a tree in place of
            `rollback`; it counts all nodes but the last of a path as read.
        hidden_layers: layers of the verifiers whose hidden states it reads.
        hidden_size: width of these states; None: any.
        tree_size: from the levels asked for to the size of a row's tree; None: it may depend on
            more.
        one_pass: a draft is one pass, however many tokens it has.
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


class CapturedPasses(Protocol):
    """Runs passes by CUDA graphs while the host follows (`runtime.graphs.Passes`)."""

    def forward(self, level: BatchedLevel, block: InputBlock) -> LevelOutput:
        """Return the output of ``level.forward``."""
        ...

    def call(
        self,
        kind: str,
        form: Hashable,
        reserve: Callable[[int], Hashable | None],
        inputs: Sequence[torch.Tensor],
        run: Callable[..., Outputs],
    ) -> Outputs:
        """Return ``run(*inputs)``, valid until the next call of the kind.

        Args:
            kind: of the call, for a message.
            form: what else `run` depends on, such as numbers that it has closed over.
            reserve: as `DeviceLengths.reserve_span`, for texts of so many tokens.
            inputs: ``[B, ..]``, copied to a fixed address; of two dimensions and more with columns
                of zeros, or of earlier calls, up to one of few widths.
        """
        ...


@dataclass(slots=True)
class DraftInput:
    """Inputs of a draft. Rows without a part in the step have 0 `counts` and `lengths`. The next
    step may write over the tensors.

    Attributes:
        tokens: ``[B, T]`` int64 on the drafter's device, the unread tokens of each text, at the
            front of each row; always with the last one. A drafter that reads hidden states gets
            those behind the last token whose state an earlier draft had, or from the first whose
            state is replaced.
        counts: ``[B]``, tokens of each row.
        lengths: ``[B]``, tokens to draft, or the levels of a tree; fewer are fine where their
            number does not depend on the values of sampled tokens (contract C2).
        most: the largest of `lengths`, as a host number.
        positions: ``[B]`` int64, absolute position of the first token to draft.
        rounds: ``[B]`` int64, drafting rounds of each row so far; key the draws (contract C3).
        level: the drafter's number in the chain, n (papers: M_n).
        parameters: of the rows; a sampled token must be drawn from the distribution they give.
        wants_rows: the level above reads the rows of logits; False where every row is greedy.
        requests: number of each row's request, for messages.
        rows: logits and statistics of an earlier block of the batch, to be written again where the
            new ones fit: captured graphs need fixed addresses.
        eos: ids that end each row's text: drafting past one is wasted work. None: the host must not
            wait for the tokens while they are drafted.
        processors: change logits first, and `text` gives the ``[N]`` int64 tokens of a row.
        hidden: new states of the verifiers. Rows without a part get them again. None: the drafter
            reads none.
        vocab_size: ids of the level above, and so of draft tokens, are below it.
        passes: run passes by CUDA graphs; None: they run as they are.
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
    passes: CapturedPasses | None = None


@dataclass(slots=True)
class DraftBlock:
    """Tokens for the level above to verify.

    Attributes:
        tokens: ``[B, N]`` int64; -1 where a row of logits had no distribution.
        counts: ``[B]`` int64, tokens of each row, at most what was asked for; None: as many as were
            asked for, or up to an EOS.
        status: ``[B, N]`` int32, status bits of `ps.sample`; None: nothing was drawn.
        rows: ``[B, at least N, Vd]``, the row that each token was drawn from, before temperature
            and filters, with the statistics of `ps.sample`. They must stay until the drafter's next
            block. None: every proposal is deterministic, or the level above reads none.
        parents: ``[B, N]`` int64, the index of each token's parent, below its index, -1 for the
            root; the nodes of one parent in the order in which they are tried. None: a chain. Of a
            tree `counts` are its nodes, and `rows` ``[B, N+1, Vd]``: row 0 is what the children of
            the root were drawn from, each independently of the others, and row i+1 those of node
            i; `status` is None. A drafter drafts trees or chains, as its capabilities say: what
            rule a row is verified by must not depend on its neighbours (contract C3).
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
        with the first draft. Results of this and of `read` are ignored."""
        ...

    def read(self, tokens: torch.Tensor, counts: Sequence[int]) -> object:
        """Append ``counts[b]`` committed tokens to row b, between two drafts."""
        ...

    def draft(self, inputs: DraftInput) -> DraftBlock:
        """Draft one block for every row with a part."""
        ...

    def rollback(self, lengths: RowCounts) -> Sequence[int]:
        """Keep the first ``lengths[b]`` tokens of row b. Returns how many are kept."""
        ...

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in that order."""
        ...


# ---- a user's drafter ----------------------------------------------------------------------------


@dataclass(slots=True)
class Context:
    """Inputs of a drafter of one text. One object lives as long as its request and is updated
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
            distribution one-hot. Calls may differ in this, and in dtype and width. Of a tree
            ``[1, len(tokens) + 1, Vd]``, as `DraftBlock.rows`; without, siblings differ.
        parents: of a tree, which a drafter with ``trees = True`` may propose: the index of each
            token's parent, as of `DraftBlock`. None: a chain.
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
    returns another of the same kind for another request: without it a chain with this drafter
    takes one prompt at a time."""

    def propose(self, context: Context, k: int) -> Proposal:
        """Propose at most `k` >= 1 tokens to follow ``context.tokens``, or a tree of at most `k`
        levels."""
        ...


def processed(
    logits: torch.Tensor, inputs: DraftInput, left: Sequence[int], drafted: torch.Tensor
) -> torch.Tensor:
    """Return the logits ``[B, n, V]`` behind the processors, of the rows that draw another token;
    they follow the tokens `drafted`, ``[B, n, N]``."""
    assert inputs.text is not None
    assert inputs.processors is not None
    out = logits.to(torch.float32, copy=True)  # what processors return, whatever the dtype
    for b, more in enumerate(left):
        for j, tokens in enumerate(drafted[b] if more else ()):
            prefix, at = torch.cat([inputs.text(b).to(logits.device), tokens]), slice(j, j + 1)
            changed = inputs.processors.apply(logits[b, at], prefix, inputs.requests[b])
            # Where every id of a smaller vocabulary is forbidden, the draft is drawn as without
            # processors (out has these logits), and the level above rejects it.
            if not bool(changed.isneginf().all()):
                out[b, at] = changed
    return out
