"""A chain below vLLM's target: ``method="custom_class"`` with `ChainProposer` as its model."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch

from ...chain import Chain
from ...tensors import common_prefix
from ..draft_chain import DraftChain, Pending
from .options import Options
from .rows import min_p_of
from .sampler import Proposal, Sampler, Step

_LOG = logging.getLogger("vllm.polyspec")


def load_chain(vllm_config: Any, options: Options) -> DraftChain:
    """Return the configured levels below the engine's target.

    Raises:
        TypeError, ValueError: a level cannot be loaded, or does not fit the target.
    """
    model, tokenizer = vllm_config.model_config, None
    if not model.skip_tokenizer_init:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            model.tokenizer,
            revision=model.tokenizer_revision,
            trust_remote_code=model.trust_remote_code,
        )
    chain = Chain(
        list(options.levels),
        list(options.window[1:]),
        rule=options.rule,
        device=vllm_config.device_config.device,
    )
    return DraftChain(
        chain,
        policy=options.policy,
        vocab_size=model.get_vocab_size(),
        tokenizer=tokenizer,
        max_tokens=model.max_model_len,
    )


class ChainProposer:
    """Propose the drafts of the configured levels. vLLM makes it from the engine's configuration,
    and `ChainSampler` tells it the requests."""

    def __init__(self, vllm_config: Any) -> None:
        options = Options.of(vllm_config)
        if options is None:
            raise ValueError(
                "additional_config: expected {'polyspec': {'levels': [...]}} beside ChainProposer, "
                f"given {vllm_config.additional_config}"
            )
        self._config, self._options = vllm_config, options
        self.polyspec_state: ChainSampler | None = None  # while the runner asks for drafts

    def make_sampler(self, runner: Any, options: Options) -> ChainSampler:
        return ChainSampler(runner, options)

    def load_model(self, target: Any) -> None:
        """Load the levels. vLLM calls it behind its own model.

        Raises:
            TypeError, ValueError: as of `load_chain`.
        """
        self.drafts = load_chain(self._config, self._options)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return drafts for the requests of the step. What vLLM tells about them is not enough, and
        the runner's sampler knows the rest."""
        state = self.polyspec_state
        if state is None:
            raise RuntimeError("ChainProposer: expected a call by vLLM's model runner")
        return state.propose()


class ChainSampler(Sampler):
    """Verify the drafts of a chain. A request keeps them by its id until each is verified, wherever
    it lies in the batch, so that its text does not depend on what the scheduler cuts."""

    def __init__(self, runner: Any, options: Options) -> None:
        super().__init__(runner, options)
        self._lengths: dict[str, int] = {}  # of the chain's texts
        self._pending: dict[str, Pending] = {}  # as the chain has them
        self._taken: dict[int, tuple[str, int, int, bool]] = {}  # by row
        # Round of a bonus token that had no row behind the last draft. It is drawn before more is
        # drafted, as with a row.
        self._owed: dict[str, int] = {}
        self._failed: set[str] = set()
        self._began: float | None = None  # the pass of the target; None: it reads a prompt

    @property
    def _chain(self) -> DraftChain:
        chain: DraftChain = self.runner.drafter.drafts
        return chain

    def begin(self, ids: list[str], states: Sequence[Any]) -> Step:
        step = super().begin(ids, states)
        known = set(self._lengths)
        if not (known.issuperset(ids) and all(step.kept)):
            self._began = None
        self._update(step)
        # Where any request is near the context's end, vLLM does not ask for drafts.
        self._draft([name for name in self._going(step) if name in known])
        return step

    def take(self, row: int, name: str, count: int) -> Proposal | None:
        if name not in self._lengths:
            return None
        tokens, logits, round = self._of(name)
        # Near the context's end vLLM schedules zeros in the place of drafts.
        scheduled = self.runner.input_batch.spec_token_ids[row][:count]
        rows = common_prefix(tokens, scheduled) + 1
        length = min(len(tokens), rows)
        if name in self._owed:
            round, length = self._owed.pop(name), 0
        self._taken[row] = (name, round, length, length == len(tokens) == rows)
        ids = torch.tensor(tokens[:length], dtype=torch.int64)
        return Proposal(ids, logits if length else None, rows=rows, round=round)

    def settle(self, accepted: torch.Tensor) -> None:
        counts = accepted.tolist()
        seconds = 0.0 if self._began is None else time.perf_counter() - self._began
        verified = {}
        for row, (name, round, length, last) in self._taken.items():
            verified[name] = length, min(counts[row], length)
            if last and counts[row] == length:
                self._owed[name] = round
        self._chain.observe(verified, seconds)
        self._taken.clear()
        self._began = None

    def propose(self) -> list[list[int]]:
        """Return drafts of the step's requests, by row."""
        step = self.step
        assert step is not None
        self._update(step)
        going = self._going(step)
        self._draft(going)
        most = self.runner.num_spec_tokens
        self._began = time.perf_counter()
        return [self._of(name).tokens[:most] if name in going else [] for name in step.ids]

    def _going(self, step: Step) -> list[str]:
        return [
            name
            for name, kept in zip(step.ids, step.kept, strict=True)
            if kept and name in self._lengths and not self._ended(name)
        ]

    def _draft(self, names: Sequence[str]) -> None:
        """Draft for those of the requests that have no drafts and owe no bonus token."""
        wanted = [name for name in names if name not in self._owed and not self._of(name).tokens]
        self._chain.propose(dict.fromkeys(wanted, self.options.window[0]))
        for name in wanted:
            del self._pending[name]
            error = self._chain.error(name)
            if error is not None and name not in self._failed:
                self._failed.add(name)
                _LOG.error("request %s: decodes without drafts: %s", name, error)

    def _of(self, name: str) -> Pending:
        if name not in self._pending:
            self._pending[name] = self._chain.pending(name)
        return self._pending[name]

    def _ended(self, name: str) -> bool:
        state = self.runner.requests[name]
        parameters, ids = state.sampling_params, state.output_token_ids
        full = parameters.max_tokens is not None and len(ids) >= parameters.max_tokens
        return full or bool(ids and ids[-1] in parameters.all_stop_token_ids)

    def _update(self, step: Step) -> None:
        """Bring the chain's texts to the length of vLLM's, and remove those of other requests."""
        chain, batch, states = self._chain, self.runner.input_batch, self.runner.requests
        for name in [name for name in self._lengths if name not in states]:
            chain.remove(name)
            del self._lengths[name]
            self._pending.pop(name, None)
            self._owed.pop(name, None)
            self._failed.discard(name)
        for i, name in enumerate(step.ids):
            length = int(batch.num_tokens_no_spec[i])
            known = self._lengths.get(name)
            if not step.kept[i] or known == length:
                continue
            if known is not None:
                chain.commit(name, batch.token_ids_cpu[i, known:length].tolist())
            elif batch.is_token_ids[i, :length].all():  # else the prompt has embeddings
                parameters = states[name].sampling_params
                chain.add(
                    name,
                    batch.token_ids_cpu[i, :length].tolist(),
                    temperature=parameters.temperature,
                    top_k=max(parameters.top_k, 0),
                    top_p=parameters.top_p,
                    min_p=min_p_of(parameters),
                    seed=self.requests[name].seed % 2**64,
                    eos_token_id=sorted(parameters.all_stop_token_ids),
                )
            else:
                continue
            self._lengths[name] = length
            self._pending.pop(name, None)
