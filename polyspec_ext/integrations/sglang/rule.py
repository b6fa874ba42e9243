"""SGLang's verification, `eagle_sample`, by this package's operators, and the algorithm POLYSPEC:
levels below its target draft.

SGLang's deterministic drafts, for example a head's likeliest tokens or an n-gram, need no rule: a
token is drawn at each node, keyed by the node's position, and the walk follows the equal drafts. A
text then depends on its seed alone. Sampled drafts are verified by `verify`.

The worker is SGLang's n-gram worker, which supports drafters on the host, with replaced drafts. It
passes them to the target as trees; a chain's tree has no branches.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from ...ops import sample, verify
from .. import Settings

NAME = "POLYSPEC"
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


# ---- the algorithm -------------------------------------------------------------------------------


def register(settings: Settings) -> None:
    """Register the algorithm with workers that draft by a chain of the settings' levels."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class Algorithm(CustomSpecAlgo):  # type: ignore[misc]
        """An algorithm with SGLang's properties of n-gram, but other drafts."""

        ngram = SpeculativeAlgorithm.NGRAM

        def handle_server_args(self, server_args: Any) -> None:
            """Set the width of a verification to the first level's window and the root."""
            width = settings.window[0] + 1
            configured = server_args.speculative_num_draft_tokens
            if configured not in (None, width):
                raise ValueError(
                    f"speculative_num_draft_tokens: expected {width}, the first window and 1, given"
                    f" {configured}"
                )
            server_args.speculative_num_draft_tokens = width
            server_args.speculative_num_steps = settings.window[0]
            server_args.speculative_eagle_topk = 1
            server_args.enable_mixed_chunk = False
            if server_args.max_running_requests is None:
                server_args.max_running_requests = 48

    for name in vars(SpeculativeAlgorithm):
        missing = name[0] != "_" and not hasattr(Algorithm, name)
        if missing or name.startswith(("is_", "supports_", "has_")):
            setattr(Algorithm, name, property(operator.attrgetter(f"ngram.{name}")))
    registers = SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=Algorithm)
    registers(lambda server_args: worker_class(settings))


def worker_class(settings: Settings) -> type:
    """Return the class of the workers that draft by a chain of the settings' levels."""
    from sglang.srt.speculative.ngram_worker import NGRAMWorker

    class Worker(NGRAMWorker):  # type: ignore[misc]
        """SGLang's n-gram worker with the drafts of a chain."""

        def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any):
            super().__init__(server_args, gpu_id, nccl_port, target_worker)
            config = target_worker.model_runner.model_config
            self.chain = settings.load(
                self.device,
                vocab_size=config.vocab_size,
                tokenizer=getattr(target_worker, "tokenizer", None),
                max_tokens=config.context_len,
            )
            self.drawn: Drawn | None = None

        def _prepare_draft_tokens(self, batch: Any) -> tuple[np.ndarray, np.ndarray]:
            """Return ids [B * width] of roots and drafts, and the mask [B * width * width]."""
            width, count = self.draft_token_num, len(batch.reqs)
            names = [request.rid for request in batch.reqs]
            lengths = self.chain.lengths
            for name in lengths.keys() - set(names):  # finished, or retracted
                self.chain.remove(name)
            ids = np.zeros((count, width), dtype=np.int64)
            for row, accepted in enumerate(self._accepted(batch)):
                ids[row, 0] = self._follow(batch.reqs[row], accepted, lengths.get(names[row], 0))
            self.chain.propose(dict.fromkeys(names, width - 1))
            rows = torch.full((count, width - 1), -1)
            pools, size = [], 0
            for row, name in enumerate(names):
                drafts = self.chain.pending(name)
                number = min(len(drafts.tokens), width - 1)
                if drafts.logits is not None:
                    ids[row, 1 : number + 1] = drafts.tokens[:number]
                    rows[row, :number] = torch.arange(size, size + number)
                    pools.append(drafts.logits[:number])
                    size += number
            self.drawn = None
            if pools:
                self.drawn = Drawn(torch.cat(pools).to(self.device), rows.to(self.device))
            mask = np.tile(np.tri(width, dtype=bool), (count, 1, 1))
            return ids.reshape(-1), mask.reshape(-1)

        def _prepare_for_speculative_decoding(self, batch: Any) -> None:
            super()._prepare_for_speculative_decoding(batch)
            if batch.forward_mode.is_target_verify():
                batch.spec_info.polyspec = self.drawn

        def _update_ngram_corpus(self, batch: Any) -> None:
            """Leave the corpus empty."""

        def _accepted(self, batch: Any) -> list[list[int]]:
            # With overlap the results of a step are processed after the next step's draft.
            if not self.enable_overlap or batch.grammar_needs_sync():
                return [[] for _ in batch.reqs]
            counts = batch.spec_info.accept_lens.tolist()
            tokens = batch.spec_info.accept_tokens.view(len(counts), -1).tolist()
            return [row[:count] for row, count in zip(tokens, counts, strict=True)]

        def _follow(self, request: Any, accepted: list[int], known: int) -> int:
            """Send a request's tokens after the first `known` to the chain; return the last."""
            name, prompt = request.rid, request.origin_input_ids_unpadded
            if known:
                text = [*request.output_ids[known - len(prompt) :], *accepted]
                self.chain.commit(name, text)
            else:
                sampling = request.sampling_params
                text = [*prompt, *request.output_ids, *accepted]
                seed = sampling.sampling_seed
                if seed is None:  # the same on all ranks
                    digest = hashlib.sha256(name.encode()).digest()
                    seed = int.from_bytes(digest[:8], "little")
                self.chain.add(
                    name,
                    text,
                    temperature=0.0 if sampling.top_k == 1 else sampling.temperature,
                    top_k=min(max(sampling.top_k, 0), self.chain.vocab_size),
                    top_p=sampling.top_p,
                    min_p=sampling.min_p,
                    seed=seed % 2**64,
                )
            return int(text[-1])

    return Worker
