"""The steps of a round as functions of device tensors alone, so that they can be captured.

Drafting k tokens is one step: k forward passes and k samples. A verification is one step: forward
pass, verification and the new lengths of the cache. They do what `DraftModel.draft` and
`Batch._verify` do one operator after another, with tensors in place of host lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from .. import ops
from .graphs import Place


@runtime_checkable
class CapturableLevel(Protocol):
    """A level whose passes can be captured, as `HuggingFaceLevel` over a `RollbackCache`."""

    def graph_key(self, passes: Sequence[int]) -> Place | None:
        """Passes of so many tokens each begin, from here on; `passed` ends them. Returns what they
        use beside their inputs. None, and nothing begun: they cannot be captured."""
        ...

    def passed(self, lengths: Sequence[int]) -> None:
        """The rows hold so many tokens now: what the host could not see happen."""
        ...

    def forward_captured(
        self, tokens: torch.Tensor, keep: int, counts: torch.Tensor, first: torch.Tensor
    ) -> torch.Tensor:
        """`forward` with `counts` and `first` as ``[B]`` int64 tensors, read on the device only."""
        ...


def draft_step(
    level: Any, vocab_size: int, number: int, k: int, keep_rows: bool
) -> Callable[..., tuple[torch.Tensor | None, ...]]:
    """A step that drafts `k` tokens for every row whose count is not 0.

    Args:
        number: of the drafter in the chain, which keys its draws.
        keep_rows: whether anybody will ask for the rows of logits.

    Returns:
        A function of fed ``[B, T]``, counts, ends, rounds ``[B]`` and the parameters ``[B]``, which
        returns drawn ``[B, k]``, status ``[B, k]``, logits ``[B, k, Vd]`` and laws ``[B, k, 2]``.
    """

    def step(
        fed: torch.Tensor,
        counts: torch.Tensor,
        ends: torch.Tensor,
        rounds: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        seed: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        one = counts.clamp(max=1)  # rows without a part append nothing
        first, zero = (counts - 1).clamp_min(0), torch.zeros_like(counts)
        samples: list[ops.SampleResult] = []
        rows: list[torch.Tensor] = []
        tokens = fed
        for i in range(k):
            logits = level.forward_captured(tokens, 1, one if i else counts, zero if i else first)
            logits = logits[..., :vocab_size]
            s = ops.sample(
                logits[:, 0], temperature, top_k, top_p, min_p, seed, ends + i, number, rounds
            )
            samples.append(s)
            rows.append(logits)
            # A token that could not be drawn is -1; until that is looked at it must stay an id.
            tokens = s.tokens.clamp_min(0)[:, None]
        return (
            torch.stack([s.tokens for s in samples], 1),
            torch.stack([s.status for s in samples], 1),
            torch.cat(rows, 1) if keep_rows else None,
            torch.stack([s.laws for s in samples], 1) if keep_rows else None,
        )

    return step


def verify_step(
    level: Any, vocab_size: int, number: int, width: int, rule: str
) -> Callable[..., tuple[torch.Tensor | None, ...]]:
    """A step that judges up to `width` pending tokens of every row.

    Returns:
        A function of fed ``[B, T]``, counts, first, lengths, positions, rounds ``[B]``, the draft's
        logits ``[B, width, Vd]`` and laws ``[B, width, 2]`` (or None) and the parameters ``[B]``,
        which returns the fields of `ops.VerifyResult` and the logits ``[B, width + 1, V]``.
    """

    def step(
        fed: torch.Tensor,
        counts: torch.Tensor,
        first: torch.Tensor,
        lengths: torch.Tensor,
        positions: torch.Tensor,
        rounds: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_laws: torch.Tensor | None,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        seed: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        logits = level.forward_captured(fed, width + 1, counts, first)[..., :vocab_size]
        reach = first[:, None] + torch.arange(1, width + 1, device=fed.device)
        drafted = fed.gather(1, reach.clamp_max(fed.shape[1] - 1))
        r = ops.verify(
            logits,
            drafted,
            draft_logits,
            draft_lengths=lengths,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            position=positions,
            level=number,
            round=rounds,
            rule=rule,
            draft_laws=draft_laws,
        )
        return (*r, logits)

    return step
