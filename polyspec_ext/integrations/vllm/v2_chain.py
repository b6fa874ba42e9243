"""A chain below the target of vLLM's Model Runner V2, if ``VLLM_USE_V2_MODEL_RUNNER=1`` selects
that runner with ``method="custom_class"``.

The runner takes the same number of drafts from every request, and reads the logits of their draws
by slot. A request with fewer drafts is padded with id 0, as proposals of probability 1.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import _C
from .chain import load_chain
from .options import Options


class ChainSpeculator:
    """Speculator with the drafts of the configured levels.

    Attributes:
        draft_logits: [slots, K, V] float32, before temperature, as the runner's verification reads
            them. Drafts are drawn by temperature alone, without a request's filters.
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
        self.draft_logits = torch.zeros(*shape, vocab_size, device=device)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Leave the levels as they are: the runner's graphs are the target's."""

    def capture(self) -> None:
        """Capture nothing."""

    def load(self, sampler: Any) -> None:
        """Load the levels, after the target.

        Raises:
            TypeError, ValueError: a level cannot be loaded, or does not fit the target.
        """
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


def make_speculator(original: Any, vllm_config: Any, device: Any, states: Any) -> Any:
    """Return the speculator of a runner: `ChainSpeculator` in engines with levels."""
    options = Options.of(vllm_config)
    if options is None or not options.levels:
        return original(vllm_config, device, states)
    return ChainSpeculator(vllm_config, options, device, states)
