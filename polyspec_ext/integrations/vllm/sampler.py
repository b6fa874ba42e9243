"""Draws of tokens for vLLM's V1 model runner, by `ops.verify` on the runner's logits after vLLM's
rules, which change the logits of every row of a step: after the text and each draft."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed
from typing import Any

import torch

from ... import ops
from ...errors import ERROR_BITS, describe
from . import Options, replace

LOG = logging.getLogger("vllm.polyspec")
_NEGATIVE = -float("inf")
_DRAFT_LEVEL = 2
# Attributes of vLLM.
_PROBS, _DRAWS = "_draft_probs", "_enable_probabilistic_draft_probs"


def install() -> None:
    """Replace the sampling of V1 runners, in engines with the plug-in."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    replace(GPUModelRunner, "__init__", _make_runner)


def _make_runner(original: Any, runner: Any, *args: Any, **options: Any) -> None:
    from vllm.v1.sample.logits_processor.builtin import (
        LogitBiasLogitsProcessor,
        MinPLogitsProcessor,
        MinTokensLogitsProcessor,
    )

    original(runner, *args, **options)
    settings = Options.of(runner.vllm_config)
    if settings is None:
        return
    served = (LogitBiasLogitsProcessor, MinPLogitsProcessor, MinTokensLogitsProcessor)
    for processor in runner.input_batch.logitsprocs.all:
        if not isinstance(processor, served):
            raise ValueError(
                f"logits_processors: expected none beside polyspec, given {type(processor)}"
            )
    drafter = getattr(runner, "drafter", None)
    sampler = drafter if isinstance(drafter, Sampler) else Sampler(settings)
    sampler.runner = runner
    replace(runner, "_sample", sampler.sample)
    if getattr(drafter, _DRAWS, False):
        replace(runner, "propose_draft_token_ids", sampler.keep)
        replace(drafter, "_sample_from_logits", sampler.draw)


@dataclass
class Proposal:
    """Draft tokens of a request before their verification."""

    tokens: torch.Tensor  # [K] integers
    pool: torch.Tensor | None = None  # [R, V], logits of the draws; None: no tokens
    row: int = 0  # of the first token in `pool`
    rows: int | None = None  # target rows that follow the request's text and `tokens`; None: all
    round: int | None = None  # of the draws; None: the step's


@dataclass
class Step:
    """Requests of a step, row by row, and the parameters of their draws."""

    ids: list[str]
    states: list[Any]  # the runner's
    kept: list[bool]  # whether vLLM keeps the request's tokens (false for an unfinished prompt)
    counts: list[int]  # scheduled draft tokens
    offsets: torch.Tensor  # [B+1], first row of each request
    draws: dict[str, Any]  # keyword arguments of `ops.verify`, but for position and round
    # [B] int64, position of the next token: the first to verify, then the first to draft. It is the
    # round too, since it differs between rounds.
    position: torch.Tensor
    drawn: int = 0  # draft tokens since verification


class Sampler:
    """Sampler of a runner's tokens."""

    runner: Any = None  # vLLM's, set after its creation
    step: Step  # the last with drawn tokens

    def __init__(self, options: Options) -> None:
        self.options = options
        self._proposals: dict[str, Proposal] = {}

    def sample(self, original: Any, logits: torch.Tensor, spec_decode_metadata: Any) -> Any:
        """Return vLLM's `SamplerOutput` for the logits [N, V] of a step."""
        from vllm.v1.outputs import SamplerOutput

        batch, metadata = self.runner.input_batch, spec_decode_metadata
        batch.generators.clear()  # unused, and on a CPU vLLM cannot restore them
        step = self.begin(metadata)
        raw, logits = logits, logits.float()
        if logits is raw and batch.num_logprobs:
            logits = logits.clone()
        process(logits, step.counts, batch, step.states)
        tokens = self._verify(logits, metadata, step)
        step.position = step.position + (tokens >= 0).sum(1)
        self.step = step
        return SamplerOutput(
            sampled_token_ids=tokens.to(torch.int32),
            logprobs_tensors=self._logprobs(raw, step.offsets, tokens),
        )

    def begin(self, metadata: Any) -> Step:
        """Return the step of the runner's batch, before its draws."""
        runner, ids = self.runner, list(self.runner.input_batch.req_ids)
        states = [runner.requests[name] for name in ids]
        counts = [0] * len(ids) if metadata is None else metadata.num_draft_tokens
        offsets = torch.tensor([0, *(count + 1 for count in counts)]).cumsum(0)
        laws = [
            {**law(state.sampling_params), "seed": self.seed(name)}
            for name, state in zip(ids, states, strict=True)
        ]
        draws = {
            name: torch.tensor([law[name] for law in laws]).to(runner.device) for name in laws[0]
        }
        position = torch.from_numpy(runner.input_batch.num_tokens_no_spec[: len(ids)]).long()
        valid = (~runner.discard_request_mask.np[: len(ids)]).tolist()
        return Step(ids, states, valid, counts, offsets, draws, position.to(runner.device))

    def seed(self, name: str) -> int:
        """Return the seed of a request, 64 bits with a sign. Default: a hash of the engine's seed
        and the request's id, equal on all ranks."""
        seed = self.runner.requests[name].sampling_params.seed
        if seed is not None:
            return int((seed + 2**63) % 2**64 - 2**63)
        text = f"{self.runner.model_config.seed} {name}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)

    def _verify(self, logits: torch.Tensor, metadata: Any, step: Step) -> torch.Tensor:
        device, counts, offsets = logits.device, step.counts, step.offsets
        drafts = torch.zeros(len(logits), dtype=torch.int64, device=device)
        if any(counts):
            drafts[metadata.target_logits_indices] = metadata.draft_token_ids.long()
        lengths, room = list(counts), [count + 1 for count in counts]
        round = step.position.clone()
        pools: list[torch.Tensor] = []
        begins: dict[int, int] = {}  # first row of each concatenated pool
        sources = torch.full((len(logits),), -1)
        for i, name in enumerate(step.ids):
            proposal = self.take(i, name, counts[i]) if step.kept[i] else None
            if proposal is None:
                continue
            first, lengths[i] = int(offsets[i]), len(proposal.tokens)
            room[i] = proposal.rows or room[i]
            if proposal.round is not None:
                round[i] = proposal.round
            if proposal.pool is not None:
                if id(proposal.pool) not in begins:
                    begins[id(proposal.pool)] = sum(map(len, pools))
                    pools.append(proposal.pool)
                begin, last = begins[id(proposal.pool)] + proposal.row, first + lengths[i]
                drafts[first:last] = proposal.tokens
                sources[first:last] = torch.arange(begin, begin + lengths[i])
        verified = ops.verify(
            logits,
            drafts,
            torch.cat(pools) if len(pools) > 1 else next(iter(pools), None),
            draft_rows=sources.to(device) if pools else None,
            draft_lengths=torch.tensor(lengths, device=device),
            offsets=offsets.to(device),
            draft_len=max(lengths),
            position=step.position,
            room=torch.tensor(room, device=device),
            round=round,
            rule=self.options.rule,
            **step.draws,
        )
        self.settle(verified.num_accepted)
        tokens, status = verified.tokens, verified.status & ERROR_BITS
        # An error would end every request. As in vLLM a row without a distribution has its
        # likeliest id or 0.
        for i in status.nonzero()[:, 0].tolist():
            if step.kept[i]:
                LOG.error("request %s: %s", step.ids[i], describe(int(status[i])))
            at = int(verified.num_accepted[i])
            tokens[i, at] = logits[int(offsets[i]) + at].nan_to_num(-float("inf")).argmax()
        return tokens[:, : max(counts) + 1]

    def take(self, row: int, name: str, count: int) -> Proposal | None:
        """Remove and return the proposal for `count` + 1 rows of a request; None: the scheduled
        drafts are deterministic.

        A grammar may have cut a window at a token for its value. So the next token is verified too,
        and there is no bonus: otherwise the text would have another distribution.
        """
        proposal = self._proposals.pop(name, None)
        return proposal and changed(proposal, tokens=proposal.tokens[: count + 1])

    def settle(self, accepted: torch.Tensor) -> None:
        """Record the numbers [B] of accepted draft tokens."""

    def _logprobs(self, raw: torch.Tensor, offsets: torch.Tensor, tokens: torch.Tensor) -> Any:
        runner, sampling = self.runner, self.runner.input_batch.sampling_metadata
        count, sampler = sampling.max_num_logprobs, self.runner.sampler
        if count is None and not sampling.logprob_token_ids:
            return None
        index = offsets[:-1, None] + torch.arange(tokens.shape[1])
        values = raw[index.flatten().clamp_max(len(raw) - 1).to(raw.device)].float()
        if runner.model_config.logprobs_mode == "raw_logprobs":
            values = sampler.compute_logprobs(values)
        ids = tokens.flatten().clamp_min(0)
        if sampling.logprob_token_ids and tokens.shape[1] == 1:
            return sampler.gather_specific_token_logprobs(values, sampling.logprob_token_ids, ids)
        return sampler.gather_logprobs(values, count or 0, ids)

    def draw(self, original: Callable[..., Any], logits: torch.Tensor, sampling: Any) -> Any:
        """Return draft tokens [n], the next or several per request, and the logits [n, V] of the
        draws, where vLLM expects probabilities."""
        if sampling.all_greedy:
            return original(logits, sampling)
        step, count = self.step, len(logits) // len(self.step.ids)
        ahead = torch.arange(step.drawn, step.drawn + count, device=logits.device)
        step.drawn += count
        draws = {name: value.repeat_interleave(count) for name, value in step.draws.items()}
        drawn = ops.sample(
            logits,
            **draws,
            position=(step.position[:, None] + ahead).flatten(),
            round=step.position.repeat_interleave(count),
            level=_DRAFT_LEVEL,
        )
        # Verification reports rows without a distribution.
        return drawn.tokens.clamp_min(0), logits

    def keep(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return vLLM's sampled drafts [B, K], and store them with their logits [B, K, V]."""
        drafts = original(*args, **options)
        pool = getattr(self.runner, _PROBS)
        if pool is not None:
            known = self._proposals.items()
            self._proposals = {k: proposal for k, proposal in known if k in self.runner.requests}
            width, flat = pool.shape[1], pool.flatten(0, 1)
            for i, name in enumerate(self.step.ids):
                if self.step.kept[i]:
                    self._proposals[name] = Proposal(drafts[i], flat, i * width)
        return drafts


# ---- rules that change logits --------------------------------------------------------------------


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
