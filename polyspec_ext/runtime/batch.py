"""A batch of requests on its way through a chain.

Every row has its own windows, parameters, seed, end and length; the batch only lets rows do
together what they would do anyway. No token of a row depends on its neighbours, since draws are
keyed by the row's own seed and position (contract C3).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from .. import arguments
from ..levels.base import EncodedInput
from ..policies.base import RoundReport, WindowPolicy
from ..policies.recorder import RoundRecorder
from ..sampling import LogitsProcessors, Sampling
from ..stats import LevelStats, Stats, StatsRecorder
from .engine import Committed, Engine, Observer
from .ownership import CacheOwner
from .request import Row


class Batch:
    """B prompts on their way through a chain. The chain's caches belong to its latest batch.

    Args:
        engine: of the chain.
        owner: says which batch the caches belong to.
        prompts: token ids, at least one each; the lists grow by what is generated.
        max_new_tokens: upper bounds of new tokens, >= 0.
        sampling: parameters, the same on every level of a row's chain.
        seeds: key the draws; in [0, 2**64).
        eos: ids that end each text.
        policy: chooses the windows before each round of the target. None: they stay.
        processors: change logits before they become a distribution, on every level alike
            (contract C1).
        encoded: what the encoder of an encoder-decoder target reads, of one request.
        observe: called with a row's number and the target's logits ``[e, V]``, processed, behind
            which its e committed tokens were emitted.
        cache_prompt: whether to keep what the caches hold of the prompts (`Engine.keep`).

    Attributes:
        rows: one per request, in the order given.
        stats: the whole batch: counts added up, times and forward passes counted once.
    """

    def __init__(
        self,
        engine: Engine,
        owner: CacheOwner,
        prompts: Sequence[list[int]],
        *,
        max_new_tokens: Sequence[int],
        sampling: Sequence[Sampling],
        seeds: Sequence[int],
        eos: Sequence[frozenset[int]],
        policy: WindowPolicy | None = None,
        processors: LogitsProcessors | None = None,
        observe: Observer | None = None,
        encoded: EncodedInput | None = None,
        cache_prompt: bool = False,
    ) -> None:
        self._engine, self._owner = engine, owner
        self._policy = policy if engine.config.levels > 1 else None  # else there is no window
        names = engine.config.names
        self.stats = Stats([LevelStats(name) for name in names])
        single = len(prompts) == 1
        self.rows: list[Row] = []
        for number, prompt in enumerate(prompts):
            stats = self.stats if single else Stats([LevelStats(name) for name in names])
            stats.num_prompt_tokens = len(prompt)
            self.rows.append(
                Row(
                    number,
                    prompt,
                    max_new_tokens[number],
                    sampling[number],
                    seeds[number],
                    eos[number],
                    stats,
                    encoded,
                )
            )
        if not single:
            self.stats.num_prompt_tokens = sum(map(len, prompts))
            self.stats.num_requests = len(prompts)
        self._recorder = StatsRecorder(self.stats)
        if self._policy is not None:
            # Processes that share a level must choose the same windows.
            timed = not any(part.capabilities.sharded for part in engine.parts)
            self._recorder = RoundRecorder(self.stats, [row.stats for row in self.rows], timed)
        self._before = [len(row.tokens) for row in self.rows]
        with owner.work():
            owner.begin(self)
            held = engine.keep(self.rows) if cache_prompt else {}
            if not held:
                owner.forget()
            engine.begin(self.rows, self._recorder, processors, observe, held)
        if not single:
            self.stats.num_cached_tokens = sum(row.stats.num_cached_tokens for row in self.rows)

    @property
    def seeds(self) -> list[int]:
        """Of each row."""
        return [row.seed for row in self.rows]

    def advance(self) -> Committed:
        """One round of the target: the tokens that it commits, by the number of their row; nothing
        when every text is complete.

        Raises:
            RequestError: a row of logits has no distribution; names request, level and position.
            RuntimeError: the chain has begun another batch since, or this one failed; or it is at
                work for another call.
        """
        with torch.inference_mode(), self._owner.work():
            return self._advance()

    def complete(self) -> None:
        """`advance` until every text is complete, with no other call in between."""
        with torch.inference_mode(), self._owner.work():
            while self._advance():
                pass

    def _advance(self) -> Committed:
        self._owner.require(self)
        began, recorder = time.perf_counter(), self._recorder
        prefilled = recorder.prefill_seconds
        committed: Committed = []
        try:
            if False in [row.ended for row in self.rows]:
                self._engine.leave()
                if self._policy is not None:
                    self._choose_windows(self._policy)
                committed = self._engine.round()
            seconds = time.perf_counter() - began - (recorder.prefill_seconds - prefilled)
            recorder.decoded(seconds)
        except BaseException:
            self._owner.end(self)
            raise
        return committed

    def stop(self, number: int) -> None:
        """Row `number` is complete now; what is pending for it is forgotten."""
        row = self.rows[number]
        if not row.ended:
            row.ended = True
            self._engine.end(row)

    def _choose_windows(self, policy: WindowPolicy) -> None:
        assert isinstance(self._recorder, RoundRecorder)
        rows = [row for row in self._engine.slots if not row.ended]
        for row in rows:
            now = self._engine.windows(row.slot)
            before, self._before[row.number] = self._before[row.number], len(row.tokens)
            steps = self._recorder.take(row.number)
            new = len(row.tokens) - before
            report = RoundReport(row.number, now, row.tokens, new, steps, len(rows))
            name = f"policy ({type(policy).__name__})"
            windows = arguments.sizes(name, policy.next(report), len(now), len(now) + 1)
            self._engine.set_windows(row.slot, windows)
