"""The operators as a chain calls them, with tensors of its own making: no argument is checked again
but where its pointer is taken.

Arguments are those of `ps.sample`, `ps.verify` and `ps.verify_tree`, with what every request has a
value of as a tensor ``[B]`` on the logits' device: float32 (temperature, top_p, min_p) or int64.
`target_to_draft` is int32, on that device.
"""

from __future__ import annotations

import torch

from ..validate import RULES
from .verify_sample import SampleResult, VerifyResult
from .verify_tree import TreeVerifyResult

__all__ = ["sample", "verify", "verify_tree"]

_sample = torch.ops.polyspec.sample.default
_verify = torch.ops.polyspec.verify.default
_verify_tree = torch.ops.polyspec.verify_tree.default
_NO_LIMIT = 2**63 - 1  # of emitted tokens


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    level: int,
    round: torch.Tensor,
) -> SampleResult:
    """`ps.sample`."""
    # fmt: off
    return SampleResult._make(
        _sample(
            logits, 0.0, temperature, 0, top_k, 0.0, top_p, 0.0, min_p, 0, seed, 0, position, 0,
            round, 0, None, level, None,
        )
    )
    # fmt: on


def verify(
    target_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_logits: torch.Tensor | None,
    *,
    draft_lengths: torch.Tensor | None,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    level: int,
    round: torch.Tensor,
    rule: str,
    draft_statistics: torch.Tensor | None,
    target_to_draft: torch.Tensor | None = None,
) -> VerifyResult:
    """`ps.verify` of a text that is cut nowhere."""
    if draft_statistics is not None:
        draft_statistics = draft_statistics.contiguous()
    # fmt: off
    *outputs, _ = _verify(
        target_logits, draft_tokens, None, 0, draft_logits, draft_lengths, None, draft_statistics,
        target_to_draft, 0.0, temperature, 0, top_k, 0.0, top_p, 0.0, min_p, 0, seed, 0, position,
        0, round, level, RULES[rule], None, None, 0, None, _NO_LIMIT, None,
    )
    # fmt: on
    return VerifyResult._make(outputs)


def verify_tree(
    target_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    parents: torch.Tensor,
    draft_logits: torch.Tensor | None,
    *,
    counts: torch.Tensor,
    draft_rows: torch.Tensor | None,
    draft_statistics: torch.Tensor | None,
    depth: int,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    level: int,
    round: torch.Tensor,
    target_to_draft: torch.Tensor | None = None,
) -> TreeVerifyResult:
    """`ps.verify_tree` of a text that is cut nowhere."""
    # fmt: off
    tokens, accepted, logprobs, status, statistics, path, rows, ends = _verify_tree(
        target_logits, draft_tokens.contiguous(), parents.contiguous(), None, parents.shape[1],
        depth, counts, draft_logits, draft_rows, draft_statistics, target_to_draft, 0.0,
        temperature, 0, top_k, 0.0, top_p, 0.0, min_p, 0, seed, 0, position, 0, round, level, None,
        None, 0, None, _NO_LIMIT, None,
    )
    # fmt: on
    return TreeVerifyResult(
        tokens, accepted, path, rows, logprobs, status, statistics, *ends.unbind(0)
    )
