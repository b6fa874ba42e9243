"""The tokens of vLLM's V1 model runner, drawn by `ops.verify` from the logits where they lie."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ... import ops
from ...errors import ERROR_BITS, describe
from . import replace, rows
from .options import Options

_LOG = logging.getLogger("vllm.polyspec")
_DRAFT_LEVEL = 2
_STATE = "polyspec_state"  # of a runner, and of a drafter while it drafts
# Names of vLLM that are replaced or read.
_SAMPLE, _PROBS, _DRAW = "_sample", "_draft_probs", "_sample_from_logits"
_DRAWS = "_enable_probabilistic_draft_probs"


def install() -> None:
    """Replace what the runner draws tokens with, in engines that ask for it."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    replace(GPUModelRunner, "__init__", _make_runner)
    replace(GPUModelRunner, _SAMPLE, _sample)
    replace(GPUModelRunner, "propose_draft_token_ids", _propose)
    replace(SpecDecodeBaseProposer, _DRAW, _draw_drafts)


@dataclass
class Proposal:
    """Draft tokens of a request that wait for their verification.

    Args:
        tokens: [K] integers.
        pool: [R, V], the logits that they were drawn from; row: of the first of them. None: there
            are no tokens.
        rows: of the target that stand behind the request's text and these tokens; None: all.
        round: of the draws; None: that of the step.
    """

    tokens: torch.Tensor
    pool: torch.Tensor | None = None
    row: int = 0
    rows: int | None = None
    round: int | None = None


@dataclass
class _Request:
    seed: int
    proposal: Proposal | None = None


@dataclass
class Step:
    """Requests of a step, row by row, and the parameters of their draws.

    Attributes:
        ids: of the requests; kept: whether their tokens are (an unfinished prompt's are not).
        draws: keyword arguments of `ops.verify`, but for position and round.
        position: [B] int64, of the next token: of the first that is verified, then of the first
            that is drafted. It is the round too, since each round has another.
    """

    ids: list[str]
    kept: list[bool]
    draws: dict[str, Any]
    position: torch.Tensor
    drawn: int = 0  # draft tokens since

    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        """Draw draft tokens [n] from logits [n, V]: the next of each request, or several."""
        count = len(logits) // len(self.ids)
        ahead = torch.arange(self.drawn, self.drawn + count, device=logits.device)
        self.drawn += count
        draws = {name: value.repeat_interleave(count) for name, value in self.draws.items()}
        drawn = ops.sample(
            logits,
            **draws,
            position=(self.position[:, None] + ahead).flatten(),
            round=self.position.repeat_interleave(count),
            level=_DRAFT_LEVEL,
        )
        return drawn.tokens.clamp_min(0)  # a row without a distribution is verification's to tell


class Sampler:
    """Draw the tokens of a runner."""

    def __init__(self, runner: Any, options: Options) -> None:
        self.runner, self.options = runner, options
        self.requests: dict[str, _Request] = {}
        self.step: Step | None = None

    def sample(self, logits: torch.Tensor, metadata: Any) -> Any:
        """Return vLLM's `SamplerOutput` for the logits [N, V] of a step."""
        from vllm.v1.outputs import SamplerOutput

        runner, batch = self.runner, self.runner.input_batch
        batch.generators.clear()  # no draw is theirs, and on a CPU vLLM cannot set them back
        ids = list(batch.req_ids)
        states = [runner.requests[name] for name in ids]
        counts = [0] * len(ids) if metadata is None else metadata.num_draft_tokens
        step = self.begin(ids, states)
        raw, logits = logits, logits.float()
        if rows.changes(states, batch.sampling_metadata):
            if logits is raw and batch.num_logprobs:
                logits = logits.clone()
            logits = rows.process(logits, counts, batch, states)
        ends = torch.tensor([count + 1 for count in counts]).cumsum(0)
        offsets = torch.cat([ends.new_zeros(1), ends])
        tokens = self._verify(logits, metadata, counts, offsets, step)
        step.position = step.position + (tokens >= 0).sum(1)
        self.step = step
        return SamplerOutput(
            sampled_token_ids=tokens.to(torch.int32),
            logprobs_tensors=self._logprobs(raw, offsets, tokens),
        )

    def begin(self, ids: list[str], states: Sequence[Any]) -> Step:
        runner, count = self.runner, len(ids)
        if len(self.requests) > 2 * len(runner.requests) + 8:
            self.requests = {k: v for k, v in self.requests.items() if k in runner.requests}
        for name, state in zip(ids, states, strict=True):
            if name not in self.requests:
                self.requests[name] = _Request(self._seed(name, state.sampling_params.seed))
        mine = [self.requests[name] for name in ids]
        given = [state.sampling_params for state in states]
        columns: dict[str, tuple[list[Any], torch.dtype]] = {
            "temperature": ([p.temperature for p in given], torch.float32),
            "top_k": ([max(p.top_k, 0) for p in given], torch.int64),
            "top_p": ([p.top_p for p in given], torch.float32),
            "min_p": ([rows.min_p_of(p) for p in given], torch.float32),
            "seed": ([request.seed for request in mine], torch.int64),
        }
        draws = {
            name: torch.tensor(values, dtype=dtype).to(runner.device)
            for name, (values, dtype) in columns.items()
        }
        position = torch.from_numpy(runner.input_batch.num_tokens_no_spec[:count]).long()
        kept = (~runner.discard_request_mask.np[:count]).tolist()
        return Step(ids, kept, draws, position.to(runner.device))

    def _seed(self, name: str, seed: int | None) -> int:
        # 64 bits with a sign. Without the request's seed they are those of its id, on all ranks.
        if seed is not None:
            return (seed + 2**63) % 2**64 - 2**63
        text = f"{self.runner.model_config.seed} {name}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)

    def _verify(
        self,
        logits: torch.Tensor,
        metadata: Any,
        counts: Sequence[int],
        offsets: torch.Tensor,
        step: Step,
    ) -> torch.Tensor:
        device = logits.device
        drafts = torch.zeros(len(logits), dtype=torch.int64, device=device)
        if any(counts):
            drafts[metadata.target_logits_indices] = metadata.draft_token_ids.long()
        lengths, room = list(counts), [count + 1 for count in counts]
        round = step.position.clone()
        pools: dict[int, torch.Tensor] = {}
        sources: list[tuple[int, int] | None] = [None] * len(logits)
        for i, name in enumerate(step.ids):
            proposal = self.take(i, name, counts[i]) if step.kept[i] else None
            if proposal is None:
                continue
            first, lengths[i] = int(offsets[i]), len(proposal.tokens)
            if proposal.rows is not None:
                room[i] = proposal.rows
            if proposal.round is not None:
                round[i] = proposal.round
            if proposal.pool is not None:
                drafts[first : first + lengths[i]] = proposal.tokens
                pools[id(proposal.pool)] = proposal.pool
                for j in range(lengths[i]):
                    sources[first + j] = (id(proposal.pool), proposal.row + j)
        pool, begins = _join(pools)
        indices = [-1 if source is None else begins[source[0]] + source[1] for source in sources]
        verified = ops.verify(
            logits,
            drafts,
            pool,
            draft_rows=None if pool is None else torch.tensor(indices, device=device),
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
        return self._report(verified, logits, offsets, step)[:, : max(counts) + 1]

    def take(self, row: int, name: str, count: int) -> Proposal | None:
        """Return what is verified with `count` + 1 rows of a request, and forget it; None: the
        scheduled drafts, which were not drawn.

        A grammar may have cut a window at a token for its value. So the next token is verified too,
        and there is no bonus: without it the text would have another law.
        """
        request = self.requests[name]
        proposal, request.proposal = request.proposal, None
        if proposal is None:
            return None
        return Proposal(proposal.tokens[: count + 1], proposal.pool, proposal.row)

    def settle(self, accepted: torch.Tensor) -> None:
        """Note how many drafts [B] of each request were accepted."""

    def _report(
        self, verified: ops.CutVerifyResult, logits: torch.Tensor, offsets: torch.Tensor, step: Step
    ) -> torch.Tensor:
        """Return the tokens. A row without a distribution has its likeliest id or 0, as in vLLM,
        since an error would end every request; the log has it."""
        tokens, status = verified.tokens, verified.status & ERROR_BITS
        for i in status.nonzero()[:, 0].tolist():
            if step.kept[i]:
                _LOG.error("request %s: %s", step.ids[i], describe(int(status[i])))
            at = int(verified.num_accepted[i])
            row = logits[int(offsets[i]) + at].nan_to_num(-float("inf"))
            tokens[i, at] = row.argmax()
        return tokens

    def _logprobs(self, raw: torch.Tensor, offsets: torch.Tensor, tokens: torch.Tensor) -> Any:
        runner, sampling = self.runner, self.runner.input_batch.sampling_metadata
        wanted, sampler = sampling.max_num_logprobs, self.runner.sampler
        if wanted is None and not sampling.logprob_token_ids:
            return None
        index = offsets[:-1, None] + torch.arange(tokens.shape[1])
        logits = raw[index.flatten().clamp_max(len(raw) - 1).to(raw.device)].float()
        values = logits
        if runner.model_config.logprobs_mode == "raw_logprobs":
            values = sampler.compute_logprobs(logits)
        ids = tokens.flatten().clamp_min(0)
        if sampling.logprob_token_ids and tokens.shape[1] == 1:
            return sampler.gather_specific_token_logprobs(values, sampling.logprob_token_ids, ids)
        return sampler.gather_logprobs(values, wanted or 0, ids)

    def keep(self, drafts: Any, pool: torch.Tensor | None) -> None:
        """Keep the drafts [B, K] of a step and the logits [B, K, V] that they were drawn from."""
        step = self.step
        if step is None or pool is None:
            return
        width, flat = pool.shape[1], pool.flatten(0, 1)
        for i, name in enumerate(step.ids):
            if step.kept[i]:
                self.requests[name].proposal = Proposal(drafts[i], flat, i * width)


def _join(pools: Mapping[int, torch.Tensor]) -> tuple[torch.Tensor | None, dict[int, int]]:
    """Return a pool of all rows, and where each begins in it."""
    begins, count = {}, 0
    for name, pool in pools.items():
        begins[name] = count
        count += len(pool)
    parts = list(pools.values())
    if len(parts) > 1:
        return torch.cat(parts), begins
    return (parts[0] if parts else None), begins


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
    make = getattr(getattr(runner, "drafter", None), "make_sampler", Sampler)
    setattr(runner, _STATE, make(runner, settings))


def _sample(original: Any, runner: Any, logits: Any, spec_decode_metadata: Any) -> Any:
    state = getattr(runner, _STATE, None)
    if state is None:
        return original(runner, logits, spec_decode_metadata)
    return state.sample(logits, spec_decode_metadata)


def _propose(original: Any, runner: Any, *args: Any, **options: Any) -> Any:
    state = getattr(runner, _STATE, None)
    if state is None:
        return original(runner, *args, **options)
    setattr(runner.drafter, _STATE, state)
    try:
        drafts = original(runner, *args, **options)
    finally:
        setattr(runner.drafter, _STATE, None)
    state.keep(drafts, getattr(runner, _PROBS))
    return drafts


def _draw_drafts(original: Any, drafter: Any, logits: Any, sampling_metadata: Any) -> Any:
    # Beside the tokens come the logits, in the place of probabilities.
    state = getattr(drafter, _STATE, None)
    draws = getattr(drafter, _DRAWS) and not sampling_metadata.all_greedy
    if state is None or not draws:
        return original(drafter, logits, sampling_metadata)
    return state.step.draw(logits), logits
