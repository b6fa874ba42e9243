"""A chain below vLLM's target: ``method="custom_class"`` with `ChainProposer` as its model."""

from __future__ import annotations

import time
from collections.abc import Set
from typing import Any

import torch

from ...chain import Chain
from ...tensors import common_prefix
from ..draft_chain import DraftChain, Pending
from . import Options
from .sampler import LOG, Proposal, Sampler, Step, law


def load_chain(vllm_config: Any, options: Options) -> DraftChain:
    """Return the configured levels below the engine's target. TypeError, ValueError: a level cannot
    be loaded, or does not fit the target."""
    model, tokenizer = vllm_config.model_config, None
    if not model.skip_tokenizer_init:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            model.tokenizer,
            revision=model.tokenizer_revision,
            trust_remote_code=model.trust_remote_code,
        )
    levels, inner = list(options.levels), list(options.window[1:])
    device = vllm_config.device_config.device
    return DraftChain(
        Chain(levels, inner, rule=options.rule, device=device),
        policy=options.policy,
        vocab_size=model.get_vocab_size(),
        tokenizer=tokenizer,
        max_tokens=model.max_model_len,
    )


class ChainProposer(Sampler):
    """Proposer of the configured levels' drafts, and their verifier. vLLM creates it from the
    engine's configuration.

    A request keeps its drafts by its id until each is verified, at any row of the batch, so that
    its text does not depend on drafts that the scheduler cuts.
    """

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(Options.of(vllm_config) or Options())
        self._config = vllm_config
        self._lengths: dict[Any, int] = {}  # by text of the chain
        self._pending: dict[str, Pending] = {}  # by request of the step
        self._taken: dict[int, tuple[str, int, int, bool]] = {}  # by row
        # Round of a bonus token without a row after the last draft. It is drawn before the next
        # draft, as with a row.
        self._owed: dict[str, int] = {}
        self._began: float | None = None  # start of the target's pass; None: with a prompt

    def load_model(self, target: Any) -> None:
        """Load the levels, as `load_chain`. vLLM calls it after loading the target. RuntimeError:
        the plug-in is not loaded, or has no settings."""
        if self.runner is None:
            raise RuntimeError(
                "additional_config: expected {'polyspec': {'levels': [...]}} beside ChainProposer, "
                f"and the plug-in polyspec loaded, given {self._config.additional_config}"
            )
        self.chain = load_chain(self._config, self.options)

    def begin(self, metadata: Any) -> Step:
        step = super().begin(metadata)
        known = self._lengths.keys()
        if not (known >= set(step.ids) and all(step.kept)):
            self._began = None
        # Where any request is near the context's end, vLLM does not ask for drafts.
        self._draft(step, known)
        return step

    def take(self, row: int, name: str, count: int) -> Proposal | None:
        if name not in self._pending:
            return None
        tokens, logits, round = self._pending[name]
        # Near the context's end vLLM schedules zeros instead of drafts.
        scheduled = self.runner.input_batch.spec_token_ids[row][:count]
        agreed = common_prefix(tokens, scheduled) + 1
        length = min(len(tokens), agreed)
        if name in self._owed:
            round, length = self._owed.pop(name), 0
        self._taken[row] = (name, round, length, length == len(tokens) == agreed)
        ids = torch.tensor(tokens[:length], dtype=torch.int64)
        return Proposal(ids, logits if length else None, rows=agreed, round=round)

    def settle(self, accepted: torch.Tensor) -> None:
        counts = accepted.tolist()
        seconds = 0.0 if self._began is None else time.perf_counter() - self._began
        verified = {}
        for row, (name, round, length, last) in self._taken.items():
            verified[name] = length, min(counts[row], length)
            if last and counts[row] == length:
                self._owed[name] = round
        self.chain.observe(verified, seconds)
        self._taken.clear()
        self._began = None

    def propose(self, *given: Any, **others: Any) -> list[list[int]]:
        """Return drafts of the step's requests, by row. vLLM's arguments are not sufficient, so
        they are read from the runner."""
        self._draft(self.step, self.runner.requests.keys())
        most, none = self.runner.num_spec_tokens, Pending([], None, 0)
        self._began = time.perf_counter()
        return [self._pending.get(name, none).tokens[:most] for name in self.step.ids]

    def _draft(self, step: Step, names: Set[str]) -> None:
        """Draft for the requests without drafts that owe no bonus token."""
        self._update(step)
        chain, ids = self.chain, zip(step.ids, step.kept, strict=True)
        texts = [name for name, valid in ids if valid and name in self._lengths]
        self._pending = {name: chain.pending(name) for name in texts}
        free = names - self._owed.keys()
        lacking = [
            name
            for name, drafts in self._pending.items()
            if name in free and not (drafts.tokens or self._ended(name) or chain.error(name))
        ]
        chain.propose(dict.fromkeys(lacking, self.options.window[0]))
        for name in lacking:
            self._pending[name] = chain.pending(name)
            error = chain.error(name)
            if error is not None:
                LOG.error("request %s: decodes without drafts: %s", name, error)

    def _ended(self, name: str) -> bool:
        state = self.runner.requests[name]
        parameters, ids = state.sampling_params, state.output_token_ids
        full = parameters.max_tokens is not None and len(ids) >= parameters.max_tokens
        return full or bool(ids and ids[-1] in parameters.all_stop_token_ids)

    def _update(self, step: Step) -> None:
        """Append vLLM's new tokens to the chain's texts; remove texts that vLLM has dropped."""
        chain, batch, states = self.chain, self.runner.input_batch, self.runner.requests
        lengths = self._lengths
        for name in lengths.keys() - states.keys():
            chain.remove(name)
            self._owed.pop(name, None)
        for i, name in enumerate(step.ids):
            begin, end = lengths.get(name, 0), int(batch.num_tokens_no_spec[i])
            if not step.kept[i] or begin == end:
                continue
            tokens = batch.token_ids_cpu[i, begin:end].tolist()
            if begin:
                chain.commit(name, tokens)
            elif batch.is_token_ids[i, :end].all():  # else the prompt has embeddings
                parameters = states[name].sampling_params
                chain.add(
                    name,
                    tokens,
                    **law(parameters),
                    seed=self.seed(name) % 2**64,
                    eos_token_id=sorted(parameters.all_stop_token_ids),
                )
        self._lengths = chain.lengths
