"""`Server`: requests that join the batch of a chain, and leave it, between rounds of the target."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from .. import arguments, inputs
from ..chain import Chain
from ..errors import PolyspecError
from ..inputs import Tokenized
from ..runtime.batch import Batch
from ..stats import Stats


class ServerFull(PolyspecError):
    """As many requests wait as the server lets wait."""


@dataclass(slots=True)
class Event:
    """What a step has brought to one request.

    Attributes:
        request: its id.
        tokens: new ones, committed by the target.
        logprobs: of each, under the target's processed distribution.
        levels: number of the level that proposed each: n for the drafter, 1 for the target.
        corrected: whether the level that proposed each did so in place of a rejected token.
        alternatives: of each token the likeliest ids with their log-probabilities, as many as
            `logprobs` of `Server.add` asked for.
        finish_reason: None while the request runs; "stop" at an end-of-text id, "length",
            "abort", "error".
        error: why it failed, with "error".
        stats: of the whole request, once it has finished.
    """

    request: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)
    corrected: list[bool] = field(default_factory=list)
    alternatives: list[list[tuple[int, float]]] = field(default_factory=list)
    finish_reason: str | None = None
    error: Exception | None = None
    stats: Stats | None = None


class Server:
    """Serves requests with one chain.

    Args:
        chain: nobody else uses it meanwhile.
        slots: requests that run at a time.
        max_waiting: requests that wait for a slot at most.

    Attributes:
        running, waiting: number of requests.
    """

    def __init__(self, chain: Chain, slots: int = 8, *, max_waiting: int = 256) -> None:
        self.chain, self.slots, self.max_waiting = chain, slots, max_waiting
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._waiting: dict[int, Batch] = {}
        self._aborted: list[int] = []

    @property
    def waiting(self) -> int:
        return max(0, len(self._waiting) - self.slots)

    @property
    def running(self) -> int:
        return min(self.slots, len(self._waiting))

    def add(
        self,
        prompt: Tokenized,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        *,
        speculation: bool = True,
        priority: int = 0,
        logprobs: int = 0,
        **others: NoReturn,
    ) -> int:
        """Add a request, which joins the batch in a step to come. Threads may call it.

        Returns:
            The request's id.

        Raises:
            TypeError, ValueError: as of `Chain.generate`.
            ServerFull: too many requests wait.
        """
        inputs.refuse(self.add, others)
        arguments.flag("speculation", speculation)
        with self._lock:
            if self.waiting >= self.max_waiting:
                raise ServerFull(
                    f"expected at most {self.max_waiting} waiting requests, given one more"
                )
            number = next(self._ids)
            self._waiting[number] = self.chain.batch(
                prompt, max_new_tokens, temperature, top_k, top_p, min_p, seed, eos_token_id
            )
        return number

    def abort(self, request: int) -> None:
        """End a request. Threads may call it. A request that has finished stays as it is."""
        with self._lock:
            if request in self._waiting:
                self._aborted.append(request)

    def step(self) -> list[Event]:
        """Run one round of the target for all requests that run.

        Returns:
            An event for each request with new tokens, and one that finishes each request.
        """
        with self._lock:
            aborted, self._aborted = self._aborted, []
            events = [
                Event(number, finish_reason="abort")
                for number in aborted
                if self._waiting.pop(number, None) is not None
            ]
            first = next(iter(self._waiting.items()), None)
        if first is None:
            return events
        number, batch = first
        row = batch.rows[0]
        before = len(row.logprobs)
        self.chain.owner.begin(batch)
        tokens = [token for _, new in batch.advance() for token in new]
        event = Event(number, tokens, row.logprobs[before:])
        event.levels, event.corrected = [1] * len(tokens), [False] * len(tokens)
        event.alternatives = [[] for _ in tokens]
        if row.ended:
            event.finish_reason = "stop" if tokens and tokens[-1] in row.eos else "length"
            event.stats = batch.stats
            with self._lock:
                del self._waiting[number]
        return [*events, event]
