"""vLLM's rules that change logits, for every row of a step: behind the text and its drafts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

_NEGATIVE = -float("inf")


def process(logits: torch.Tensor, counts: Sequence[int], batch: Any, states: Any) -> torch.Tensor:
    """Apply allowed ids, bad words, least lengths, biases, penalties and thinking budgets, in the
    order of vLLM's sampler. Rows change in place.

    Args:
        logits: [N, V] float32: of request i the rows behind 0 ... counts[i] of its drafts.
        counts: drafts of each request.
        batch: the runner's input batch.
        states: of its requests, the runner's.
    """
    sampling = batch.sampling_metadata
    owners = [i for i, count in enumerate(counts) for _ in range(count + 1)]
    behind = [j for count in counts for j in range(count + 1)]
    if sampling.allowed_token_ids_mask is not None:
        rows = torch.tensor(owners, device=logits.device)
        logits.masked_fill_(sampling.allowed_token_ids_mask[rows], _NEGATIVE)
    words = sampling.bad_words_token_ids
    texts: list[list[int]] = []
    if words or not sampling.no_penalties:
        texts = [
            [*states[i].output_token_ids, *sampling.spec_token_ids[i][:j]]
            for i, j in zip(owners, behind, strict=True)
        ]
    if words:
        from vllm.v1.sample.ops.bad_words import apply_bad_words

        by_row = {row: words[i] for row, i in enumerate(owners) if i in words}
        apply_bad_words(logits, by_row, texts)
    for row, (i, j) in enumerate(zip(owners, behind, strict=True)):
        parameters = states[i].sampling_params
        if parameters.min_tokens > len(states[i].output_token_ids) + j:
            _forbid_ends(logits[row], parameters)
        if parameters.logit_bias:
            ids = torch.tensor(list(parameters.logit_bias), device=logits.device)
            logits[row, ids] += logits.new_tensor(list(parameters.logit_bias.values()))
    if not sampling.no_penalties:
        from vllm.v1.sample.ops.penalties import apply_all_penalties

        rows = torch.tensor(owners, device=logits.device)
        logits = apply_all_penalties(
            logits,
            sampling.prompt_token_ids[rows],
            sampling.presence_penalties[rows],
            sampling.frequency_penalties[rows],
            sampling.repetition_penalties[rows],
            texts,
        )
    holder = sampling.thinking_budget_state_holder
    if holder is not None and holder.has_tracked_requests():
        logits = _limit_thinking(holder, logits, counts, sampling)
    return _cut_min_p(logits, owners, states)


def min_p_of(parameters: Any) -> float:
    """Return the min-p that is left to the operators. vLLM applies it in front of top-p, and the
    operators behind, so `process` applies it where a request has both."""
    return 0.0 if parameters.top_p < 1 else float(parameters.min_p)


def _forbid_ends(row: torch.Tensor, parameters: Any) -> None:
    ids = torch.tensor(sorted(parameters.all_stop_token_ids), dtype=torch.int64, device=row.device)
    kept = row[ids]
    row[ids] = _NEGATIVE
    if parameters.structured_outputs is not None:  # a grammar that allows nothing else
        row[ids] = torch.where(row.isneginf().all(), kept, row[ids])


def _limit_thinking(
    holder: Any, logits: torch.Tensor, counts: Sequence[int], sampling: Any
) -> torch.Tensor:
    drafts = sampling.spec_token_ids
    holder.update_state(sampling.output_token_ids, drafts, repeat_indices=None)
    last = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    last[torch.tensor([count + 1 for count in counts], device=logits.device).cumsum(0) - 1] = True
    for rows, bonus in ((last, True), (~last, False)):
        if bonus or any(counts):
            logits[rows] = holder.apply_to_logits(logits[rows], bonus, drafts)
    return logits


def _cut_min_p(logits: torch.Tensor, owners: Sequence[int], states: Any) -> torch.Tensor:
    both = []
    for row, i in enumerate(owners):
        parameters = states[i].sampling_params
        if parameters.min_p > 0 and parameters.top_p < 1:
            both.append((row, parameters.temperature * math.log(parameters.min_p)))
    if both:
        rows = torch.tensor([row for row, _ in both], device=logits.device)
        cuts = logits.new_tensor([cut for _, cut in both])[:, None]
        cut = logits[rows]
        logits[rows] = cut.masked_fill(cut < cut.amax(-1, keepdim=True) + cuts, _NEGATIVE)
    return logits


def changes(states: Sequence[Any], sampling: Any) -> bool:
    """Return whether `process` changes any row."""
    holder = sampling.thinking_budget_state_holder
    return (
        sampling.allowed_token_ids_mask is not None
        or bool(sampling.bad_words_token_ids)
        or not sampling.no_penalties
        or (holder is not None and holder.has_tracked_requests())
        or any(
            state.sampling_params.min_tokens > len(state.output_token_ids)
            or state.sampling_params.logit_bias
            or (state.sampling_params.min_p > 0 and state.sampling_params.top_p < 1)
            for state in states
        )
    )
