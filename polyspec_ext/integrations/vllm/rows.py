"""vLLM's rules that change logits, for every row of a step: after the text and each draft."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

_NEGATIVE = -float("inf")


def law(parameters: Any) -> dict[str, Any]:
    """Return a request's sampling parameters for the operators. vLLM applies min-p before top-p,
    the operators after it, so `process` applies min-p where a request has both."""
    return {
        "temperature": float(parameters.temperature),
        "top_k": max(parameters.top_k, 0),
        "top_p": float(parameters.top_p),
        "min_p": 0.0 if parameters.top_p < 1 else float(parameters.min_p),
    }


def process(logits: torch.Tensor, counts: Sequence[int], batch: Any, states: Any) -> None:
    """Apply allowed ids, bad words, minimum lengths, biases, penalties and thinking budgets, in the
    order of vLLM's sampler. Rows change in place.

    Args:
        logits: [N, V] float32: for request i the rows after 0 ... counts[i] of its draft tokens.
        counts: draft tokens of each request.
        batch: the runner's input batch.
        states: the runner's states of the batch's requests.
    """
    sampling, words = batch.sampling_metadata, batch.sampling_metadata.bad_words_token_ids
    owners = [i for i, count in enumerate(counts) for _ in range(count + 1)]
    rows = torch.tensor(owners, device=logits.device)
    parts = logits.split([count + 1 for count in counts])
    if sampling.allowed_token_ids_mask is not None:
        logits.masked_fill_(sampling.allowed_token_ids_mask[rows], _NEGATIVE)
    texts: list[list[int]] = []
    if words or not sampling.no_penalties:
        texts = [
            [*states[i].output_token_ids, *sampling.spec_token_ids[i][:j]]
            for i, count in enumerate(counts)
            for j in range(count + 1)
        ]
    if words:
        from vllm.v1.sample.ops.bad_words import apply_bad_words

        by_row = {row: words[i] for row, i in enumerate(owners) if i in words}
        apply_bad_words(logits, by_row, texts)
    for span, state in zip(parts, states, strict=True):
        parameters = state.sampling_params
        early = parameters.min_tokens - len(state.output_token_ids)
        if early > 0:
            _forbid_ends(span[:early], parameters)
        if parameters.logit_bias:
            ids = torch.tensor(list(parameters.logit_bias), device=logits.device)
            span[:, ids] += logits.new_tensor(list(parameters.logit_bias.values()))
    if not sampling.no_penalties:
        from vllm.v1.sample.ops.penalties import apply_all_penalties

        apply_all_penalties(
            logits,
            sampling.prompt_token_ids[rows],
            sampling.presence_penalties[rows],
            sampling.frequency_penalties[rows],
            sampling.repetition_penalties[rows],
            texts,
        )
    holder = sampling.thinking_budget_state_holder
    if holder is not None and holder.has_tracked_requests():
        holder.update_state(sampling.output_token_ids, sampling.spec_token_ids, repeat_indices=None)
        last = torch.cat([torch.arange(len(span)) == len(span) - 1 for span in parts])
        for chosen, bonus in ((last, True), (~last, False)):
            if bonus or any(counts):
                drafts = sampling.spec_token_ids
                logits[chosen] = holder.apply_to_logits(logits[chosen], bonus, drafts)
    for span, state in zip(parts, states, strict=True):
        parameters = state.sampling_params
        if parameters.min_p > 0 and parameters.top_p < 1:
            cut = span.amax(-1, keepdim=True) + parameters.temperature * math.log(parameters.min_p)
            span.masked_fill_(span < cut, _NEGATIVE)


def _forbid_ends(rows: torch.Tensor, parameters: Any) -> None:
    ids = torch.tensor(sorted(parameters.all_stop_token_ids), dtype=torch.int64, device=rows.device)
    ends = rows[:, ids]
    rows[:, ids] = _NEGATIVE
    if parameters.structured_outputs is not None:  # the grammar may allow no other id
        rows[:, ids] = torch.where(rows.isneginf().all(1, keepdim=True), ends, rows[:, ids])
