"""SGLang's verification, `eagle_sample`, by this package's operators.

SGLang's deterministic drafts, for example a head's likeliest tokens or an n-gram, need no rule: a
token is drawn at each node, keyed by the node's position, and the walk follows the equal drafts. A
text then depends on its seed alone. Sampled drafts are verified by `verify`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...ops import sample, verify

PARAMETERS = (
    "verify_input batch logits_output grammar_mask uno_target_max_top_k watermark_state"
    " watermark_full_mask"
)

Verified = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Drawn(NamedTuple):
    """Logits of a chain's sampled drafts, `verify_input.polyspec`.

    Attributes:
        pool: [R, Vd], logits before temperature and filters.
        rows: [B, K], row of `pool` for each draft token; -1: no row, a deterministic draft.
    """

    pool: torch.Tensor
    rows: torch.Tensor


def eagle_sample(
    original: Callable[..., Verified],
    verify_input: Any,
    batch: Any,
    logits_output: Any,
    grammar_mask: Any = None,
    uno_target_max_top_k: int | None = None,
    *,
    rule: str,
    watermark_state: Any = None,
    watermark_full_mask: bool = True,
) -> Verified:
    """Verify a batch as SGLang's `eagle_sample` does.

    Returns:
        The token after each node, int32 [B * nodes]; the numbers of accepted tokens, the bonus or
        correction included, int32 [B]; the accepted nodes, int32 [B, depth], padded with -1. A row
        without a distribution has id 0.

    Raises:
        ValueError: a watermark is wanted, or drafts of a tree were drawn.
    """
    info = batch.sampling_info
    if batch.forward_mode.is_idle():
        return original(verify_input, batch, logits_output, grammar_mask, uno_target_max_top_k)
    if watermark_state is not None and info.has_watermark_candidates:
        raise ValueError("watermark: expected none beside polyspec's rule, given one")
    logits, width = logits_output.next_token_logits, verify_input.draft_token_num
    _adjust(logits, info, width, grammar_mask)
    count = len(batch.seq_lens)
    seed = info.sampling_seed
    if seed is None:  # `_agree` sends the first rank's tokens to all
        seed = torch.randint(2**63 - 1, (count,), device=logits.device)
    law: dict[str, Any] = {
        # SGLang writes temperature 0 as top-k 1.
        "temperature": info.temperatures.view(-1).masked_fill(info.top_ks == 1, 0),
        "top_k": info.top_ks,
        "top_p": info.top_ps,
        "min_p": info.min_ps,
        "seed": seed,
    }
    drawn = getattr(verify_input, "polyspec", None)
    probabilities = getattr(verify_input, "draft_probs", None)
    if drawn is None and probabilities is None:
        result = _walk(verify_input, logits, law)
    else:
        if drawn is None and verify_input.tree_topk != 1:
            raise ValueError("speculative_eagle_topk: expected 1 where drafts are drawn")
        law["position"] = batch.seq_lens.long() + 1
        law["round"] = law["position"]
        rows = logits.view(count, width, -1)
        result = _chain(verify_input, rows, drawn, probabilities, law, rule)
    _agree(result)
    return result


def _adjust(logits: torch.Tensor, info: Any, width: int, grammar_mask: Any) -> None:
    """Apply penalties, biases and the grammar's mask in place, as SGLang does. Its penalties count
    the text before the step."""
    from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties

    if info.acc_additive_penalties is not None:
        logits.add_(info.acc_additive_penalties.repeat_interleave(width, dim=0))
    if info.acc_scaling_penalties is not None:
        apply_scaling_penalties(logits, info.acc_scaling_penalties.repeat_interleave(width, dim=0))
    if info.logit_bias is not None:
        logits.add_(info.logit_bias.repeat_interleave(width, dim=0))
    if grammar_mask is not None:
        grammar_mask.apply(logits)


def _walk(verify_input: Any, logits: torch.Tensor, law: dict[str, Any]) -> Verified:
    from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_func

    width = verify_input.draft_token_num
    rows = {name: value.repeat_interleave(width) for name, value in law.items()}
    tokens = sample(logits, position=verify_input.positions.long() + 1, **rows).tokens
    count = len(law["seed"])
    nodes = logits.new_full((count, verify_input.max_tree_depth), -1, dtype=torch.int32)
    predict, nodes, accepted = verify_tree_greedy_func(
        predicts=nodes.new_zeros(len(logits)),
        accept_index=nodes,
        accept_token_num=nodes.new_zeros(count),
        candidates=verify_input.draft_token.view(count, width),
        retrieve_index=verify_input.retrieve_index,
        retrieve_next_token=verify_input.retrieve_next_token,
        retrieve_next_sibling=verify_input.retrieve_next_sibling,
        target_predict=tokens.clamp(min=0).view(count, width),
        topk=verify_input.tree_topk,
    )
    return predict, accepted + 1, nodes


def _chain(
    verify_input: Any,
    logits: torch.Tensor,
    drawn: Drawn | None,
    probabilities: torch.Tensor | None,
    law: dict[str, Any],
    rule: str,
) -> Verified:
    drafts, pool, rows = verify_input.draft_token.view(len(logits), -1)[:, 1:], None, None
    if drawn is not None:
        pool, rows = drawn
    elif probabilities is not None:  # drawn by temperature; filters are the target's
        logits, law = _filtered(logits, law)
        pool = probabilities.log()
    result = verify(logits, drafts, pool, draft_rows=rows, rule=rule, **law)
    step = torch.arange(logits.shape[1], device=logits.device)
    accepted = result.num_accepted[:, None]
    nodes = verify_input.retrieve_index.masked_fill(step > accepted, -1).int()
    predict = result.tokens.clamp(min=0).int().flatten()
    nodes = nodes[:, : verify_input.max_tree_depth].contiguous()  # to be sent to other ranks
    return predict, accepted[:, 0].int() + 1, nodes


def _filtered(logits: torch.Tensor, law: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return logits [B, K+1, V] after temperature, top-k, top-p and min-p, -inf where a token is
    cut, and the remaining parameters. Ties at an edge are kept."""
    scale, most, mass, least = (
        law[name].view(-1, 1, 1) for name in ("temperature", "top_k", "top_p", "min_p")
    )
    logits = logits.float() / scale.masked_fill(scale == 0, 1)
    ordered = logits.sort(-1, descending=True).values
    last = (most.long() - 1).clamp(0, logits.shape[-1] - 1).expand(*logits.shape[:2], 1)
    edge = ordered.gather(-1, last)
    allowed = ordered >= edge
    chances = ordered.masked_fill(~allowed, -torch.inf).softmax(-1)
    before = chances.cumsum(-1) - chances
    allowed &= ((before < mass) | (mass >= 1)) & (chances >= least * chances[..., :1])
    allowed[..., 0] = True
    edge = ordered.masked_fill(~allowed, torch.inf).amin(-1, keepdim=True)
    left = {name: law[name] for name in ("seed", "position", "round")}
    left["temperature"] = (law["temperature"] != 0).float()
    return logits.masked_fill(logits < edge, -torch.inf), left


def _agree(tensors: Verified) -> None:
    """Send the first rank's tokens to all tensor-parallel ranks, as SGLang does."""
    from sglang.srt.layers.dp_attention import is_dp_attention_enabled
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    group = parallel.attn_tp_group if is_dp_attention_enabled() else parallel.tp_group
    if group.world_size > 1:
        for tensor in tensors:
            group.broadcast(tensor, src=0)
