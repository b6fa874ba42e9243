"""vLLM's Model Runner V2 (0.32 and 0.33): `ps.verify` instead of its rejection kernels.

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

from ...ops import verify
from . import replace, v2_chain
from .options import Options

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

    replace(model_runner, "init_speculator", v2_chain.make_speculator)
    replace(model_runner.GPUModelRunner, "load_model", load_model)
