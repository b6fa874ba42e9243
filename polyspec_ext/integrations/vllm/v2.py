"""vLLM's Model Runner V2 (0.32 and 0.33): `ps.verify` instead of its rejection kernels, and chains
below its target, if ``VLLM_USE_V2_MODEL_RUNNER=1`` selects it with ``method="custom_class"``.

Steps with and without draft tokens use the same keyed draws. A draw's round is the position of its
verification's first token, so that no counter or state is kept between steps.
`RejectionSampler._verify` is the lowest method that distinguishes draft tokens forbidden by a
grammar from tokens never drawn. Below it both are -1, but their distributions differ.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from ... import _C
from ...ops import verify
from . import Options, replace
from .chain import load_chain

# Parameters of the replaced methods.
SAMPLE = (
    "self logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids expanded_local_pos"
    " seq_lens_upper_bound_np return_logprobs"
)
VERIFY = (
    "self logits draft_logits draft_sampled pos cu_num_logits idx_mapping idx_mapping_np"
    " expanded_idx_mapping expanded_local_pos seq_lens_upper_bound_np verify_draft_sampled"
)
STEP_BIT = 22  # positions are below 2**22, draft steps below 2**8; bit 30 marks draft noise


def decide(
    logits: torch.Tensor,  # [N, V], temperature and filters applied
    draft_logits: torch.Tensor | None,  # [slots, K, V], raw; None: one-hot proposals
    sampled: torch.Tensor,  # [N], input of each row; -1: a draft token that was never drawn
    usable: torch.Tensor,  # [N] bool: false where the rows from this input on are not the text's
    pos: torch.Tensor,  # [N], positions of the inputs
    first: torch.Tensor,  # [R+1], first row of each request
    slots: torch.Tensor,  # [N]
    local: torch.Tensor,  # [N], row within its request
    temperature: torch.Tensor,  # [slots], 0: greedy
    seeds: torch.Tensor,  # [slots] int64
    draft_len: int,
    rule: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens [R, K+1] int64 of a batch, -1 after the last, and their numbers [R] int32.

    A request ends at its first unusable draft token. That token is verified if it was drawn. A row
    without a distribution has id 0.
    """
    first, slots, local = first.long(), slots.long(), local.long()
    rows = torch.arange(len(logits), device=logits.device)
    request = torch.searchsorted(first[1:].contiguous(), rows, right=True)
    ends = local.masked_fill(usable | (local == 0), draft_len + 1)
    room = ends.new_full((len(first),), draft_len + 1).scatter_reduce(0, request, ends, "amin")
    tokens = sampled.roll(-1).long()  # row i verifies the input of row i + 1
    scale = temperature[slots]
    pool, pool_rows = None, None
    if draft_logits is not None:
        step = local.clamp(max=draft_logits.shape[1] - 1)
        divisor = scale.masked_fill(scale == 0, 1).unsqueeze(1)
        pool = draft_logits[slots, step].float().div_(divisor)  # as the drafter drew
        pool_rows = rows.masked_fill(tokens < 0, -1)
    start = first[:-1]
    position = pos[start].long() + 1
    result = verify(
        logits,
        tokens.clamp(min=0),
        pool,
        draft_rows=pool_rows,
        offsets=first,
        draft_len=draft_len,
        temperature=(scale[start] != 0).float(),
        seed=seeds[slots[start]],
        position=position,
        round=position,
        rule=rule,
        room=room[:-1],
    )
    # An error would end every request. Padding and warm-up have rows without a distribution.
    result.tokens[:, 0].clamp_(min=0)
    return result.tokens, result.num_emitted.clamp(min=1).int()


def _sample(sampler: Any, *args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    options.pop("return_logprobs", None)
    processed = sampler.apply_sampling_params(*args, **options)
    slots, pos, states = args[1], args[4], sampler.sampling_states
    first = torch.arange(len(slots) + 1, device=slots.device)
    none = torch.zeros_like(slots)
    laws = states.temperature.gpu, states.seeds.gpu
    tokens, _ = decide(processed, None, none, none == 0, pos, first, slots, none, *laws, 0, "token")
    return tokens.view(-1), processed


def _verify(rejection: Any, rule: str, *args: Any) -> tuple[torch.Tensor, ...]:
    logits, drafts, sampled, pos, first, index, index_np, slots, local, lengths, verified = args
    processed = rejection.sampler.apply_sampling_params(
        logits, slots, index, index_np, pos, sampled, local, lengths
    )
    states, most = rejection.sampler.sampling_states, rejection.num_speculative_steps
    batch = processed, drafts, sampled, verified >= 0, pos, first, slots, local
    laws = states.temperature.gpu, states.seeds.gpu
    return processed, *decide(*batch, *laws, most, rule)


def _mend_noise(runner: Any, rule: str) -> None:
    """Make draft draws of vLLM 0.32 depend on the draft step, as in 0.33.

    Otherwise a position drafted again has the same noise, which the block rule has already used.
    """
    from vllm.v1.worker.gpu.sample import gumbel
    from vllm.v1.worker.gpu.spec_decode import speculator
    from vllm.v1.worker.gpu.spec_decode.dspark import speculator as dspark

    draw = gumbel.gumbel_sample
    if hasattr(gumbel, "spec_step_seed") or speculator.gumbel_sample is not draw:
        return
    if rule == "block" and type(runner.speculator).__name__ == "DFlash2Speculator":
        raise ValueError('rule: expected "token" for DFlash2 in vLLM 0.32, given "block"')

    def by_step(logits: Any, slots: Any, scale: Any, seed: Any, pos: Any, **options: Any) -> Any:
        step = options.get("logits_cache_col")
        pos = pos if step is None else pos + (step.to(pos.dtype) << STEP_BIT)
        return draw(logits, slots, scale, seed, pos, **options)

    speculator.gumbel_sample = dspark.gumbel_sample = by_step


class ChainSpeculator:
    """Speculator with the drafts of the configured levels, drawn by temperature alone, without a
    request's filters. The runner takes the same number of drafts from every request: one with fewer
    is padded with id 0, as proposals of probability 1.
    """

    num_query_per_req, num_extra_query_per_req = 1, 0
    supports_mm_inputs = False

    def __init__(self, vllm_config: Any, options: Options, device: Any, states: Any) -> None:
        if options.policy is not None:
            raise ValueError(
                "policy: expected none on Model Runner V2, which wants as many drafts of every "
                "request, given one"
            )
        self._config, self._options, self._states = vllm_config, options, states
        self.num_speculative_steps = vllm_config.speculative_config.num_speculative_tokens
        shape = vllm_config.scheduler_config.max_num_seqs, self.num_speculative_steps
        vocab_size = vllm_config.model_config.get_vocab_size()
        # [slots, K, V] before temperature, as the runner's verification reads them
        self.draft_logits = torch.zeros(*shape, vocab_size, device=device)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Leave the levels as they are: the runner's graphs are the target's."""

    def capture(self) -> None:
        """Capture nothing."""

    def load(self, sampler: Any) -> None:
        """Load the levels, after the target (`load_chain`)."""
        self._sampling = sampler.sampling_states
        self._chain = load_chain(self._config, self._options)

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        *others: Any,
        dummy_run: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        """Return drafts [R, K] of a batch. `num_sampled` [R]: new tokens per request, 0 for an
        unfinished prompt."""
        shape = input_batch.num_reqs, self.num_speculative_steps
        drafts = torch.zeros(shape, dtype=torch.int64, device=self.draft_logits.device)
        if dummy_run:
            return drafts
        slots = input_batch.idx_mapping_np[: input_batch.num_reqs].tolist()
        ready = [i for i, count in enumerate(num_sampled.tolist()) if count > 0]
        names = {input_batch.req_ids[i]: slots[i] for i in ready}
        self._update(names)
        self._chain.propose(dict.fromkeys(names, self._options.window[0]))
        for i in ready:
            tokens, logits, _ = self._chain.pending(input_batch.req_ids[i])
            count = min(len(tokens), self.num_speculative_steps)
            rows = self.draft_logits[slots[i]].fill_(-torch.inf)
            rows[count:, 0] = 0
            if logits is not None:
                drafts[i, :count] = torch.tensor(tokens[:count])
                rows[:count, : logits.shape[1]] = logits[:count]
        return drafts

    def _update(self, names: dict[str, int]) -> None:
        """Append the runner's new tokens to the chain's texts; remove texts that it has dropped."""
        chain, states, sampling = self._chain, self._states, self._sampling
        lengths = chain.lengths
        for name in lengths.keys() - states.req_id_to_index.keys():
            chain.remove(name)
        ends = states.total_len.gpu.tolist()
        for name, slot in names.items():
            begin, end = lengths.get(name, 0), ends[slot]
            tokens = states.all_token_ids.gpu[slot, begin:end].tolist()
            if begin:
                chain.commit(name, tokens)
            else:
                # Preempted requests return as new requests. The length separates their draws from
                # the draws of earlier verifications.
                seed = _C.row_seed(int(sampling.seeds.np[slot]) % 2**64, end)
                chain.add(name, tokens, temperature=float(sampling.temperature.np[slot]), seed=seed)


def _make_speculator(original: Any, vllm_config: Any, device: Any, states: Any) -> Any:
    options = Options.of(vllm_config)
    if options is None or not options.levels:
        return original(vllm_config, device, states)
    return ChainSpeculator(vllm_config, options, device, states)


def install() -> None:
    """Replace the verification of V2 runners, in engines with the plug-in.

    ImportError: signatures differ from vLLM 0.32 and 0.33.
    """
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    for method, names in ((Sampler.sample, SAMPLE), (RejectionSampler._verify, VERIFY)):
        actual = " ".join(inspect.signature(method).parameters)
        if actual != names:
            raise ImportError(f"vllm: expected {method.__qualname__}({names}), given ({actual})")

    def load_model(original: Any, runner: Any, *args: Any, **options: Any) -> None:
        original(runner, *args, **options)
        settings, sampler = Options.of(runner.vllm_config), runner.sampler
        if settings is None or sampler is None:
            return
        rejection = runner.rejection_sampler
        for actual, expected in ((sampler, Sampler), (rejection, RejectionSampler)):
            if actual is not None and type(actual) is not expected:
                raise ValueError(f"vllm: expected its {expected.__name__}, given {type(actual)}")
        sampler.sample = functools.partial(_sample, sampler)
        if rejection is not None:
            rejection._verify = functools.partial(_verify, rejection, settings.rule)
            _mend_noise(runner, settings.rule)
        if settings.levels:
            runner.speculator.load(sampler)

    replace(model_runner, "init_speculator", _make_speculator)
    replace(model_runner.GPUModelRunner, "load_model", load_model)
