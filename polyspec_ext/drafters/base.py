"""The drafter's contract: from a context to a proposal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from ..sampling import Sampling


@dataclass(slots=True)
class Context:
    """What a drafter is told. One object lives as long as its request and is updated between calls.

    Attributes:
        tokens: prompt, committed and pending tokens, oldest first. The chain's own list: read it,
            never change it.
        valid: the first `valid` tokens are those of the previous call and its proposal; what a
            drafter remembers of later ones is void. 0 on the first call of a request: forget
            everything.
        sampling: the request's parameters. A proposal with logits must be drawn from the law they
            give.
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
    """Tokens for the level above to judge.

    Attributes:
        tokens: at most the k asked for, a sequence or a tensor ``[n]``. Fewer, or none, is fine
            where the number does not depend on the values of sampled tokens (contract C2); nothing
            sampled may be dropped.
        logits: ``[1, len(tokens), Vd]``, the row each token was drawn from, before temperature and
            filters, with Vd at most the vocabulary of the level above; read until the next call of
            `propose`, of this drafter or a fork of it. None: the proposal is deterministic, its law
            one-hot. One call may differ from the next in this, and in dtype and width.
        parents: for trees: the index of each token's parent, -1 for the root. None: a chain.
        laws: ``[1, len(tokens), 2]`` int64, the laws that `ps.sample` returned beside the tokens,
            which saves the verifier from reducing the rows again. None: it reduces them.
    """

    tokens: Sequence[int] | torch.Tensor
    logits: torch.Tensor | None = None
    parents: Sequence[int] | None = None
    laws: torch.Tensor | None = None


@runtime_checkable
class Drafter(Protocol):
    """Anything that proposes tokens. Optional attributes: `name`, `num_forward_passes`,
    `prefill_seconds`, and ``fork()``, which gives another of the same kind for another request:
    without it a chain with this drafter takes one prompt at a time."""

    def propose(self, context: Context, k: int) -> Proposal:
        """At most `k` >= 1 tokens to follow ``context.tokens``."""
        ...
