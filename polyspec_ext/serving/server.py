"""`Server`: requests that join the batch of a chain, and leave it, between rounds of the target;
`AsyncServer`: a thread that steps it, and its events as asynchronous iterators."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from .. import arguments, inputs
from ..chain import Chain
from ..errors import PolyspecError
from ..inputs import Parameters, Tokenized
from ..outputs import alternatives
from ..runtime.joining import OpenBatch, Reading
from ..runtime.prefixes import Prefixes
from ..runtime.rows import Row
from ..sampling import Alternatives
from ..stats import Stats

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Prompt tokens that a step reads: at most beside running requests, at least (fewer take about as
# long), and at most while no request runs, in about `_PIECE` seconds: then a request can end.
_CHUNK, _LEAST, _TOGETHER = 512, 64, 1024
_PIECE = 1.0
_WEIGHT = 0.2  # of the latest measurement in a moving average


class ServerFull(PolyspecError):
    """The queue of waiting requests is full."""


@dataclass(slots=True)
class Event:
    """New tokens of the request with the id `request`, committed by the target, or its end.

    Attributes:
        logprobs: log-probability of each token, as in `Output.logprobs`.
        levels: level that proposed each token: n for the drafter, 1 for the target.
        corrected: whether each token replaced a rejected one.
        alternatives: for each token the likeliest ids with their log-probabilities, as many as
            the `logprobs` of `Server.add`.
        finish_reason: None while the request runs; "stop" at an end-of-text id, "length",
            "abort", "error".
        error: cause of an "error".
        stats: statistics of the whole request, with its last event.
        read: while the prompt is being read, its number of tokens so far; else None.
    """

    request: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)
    corrected: list[bool] = field(default_factory=list)
    alternatives: list[Alternatives] = field(default_factory=list)
    finish_reason: str | None = None
    error: Exception | None = None
    stats: Stats | None = None
    read: int | None = None


class Server:
    """Serve requests with one chain. `step` runs one round of the target for all running requests;
    requests join and leave between steps. The text of a request does not depend on the others.

    Args:
        chain: for the exclusive use of the server.
        slots: maximum number of running requests.
        max_waiting: maximum number of requests that wait for a slot.
        max_tokens: maximum number of tokens of all running requests, prompts and answers; a
            request waits until there is room. None: no limit but the slots.
        cache_tokens: size of the prefix cache in tokens, of running and finished requests. A level
            whose state cannot be truncated keeps states at the ends of prompts and answers, two
            for each slot. 0: no prefix cache.

    Raises:
        TypeError, ValueError: an argument is of another type or out of range; `slots` > 1 with a
            level that reads one request at a time; an encoder-decoder target.
    """

    def __init__(
        self,
        chain: Chain,
        slots: int = 8,
        *,
        max_waiting: int = 256,
        max_tokens: int | None = None,
        cache_tokens: int = 16384,
    ) -> None:
        arguments.instance("chain", chain, Chain)
        self.chain = chain
        self.slots = arguments.integer("slots", slots, arguments.SIZE_MAX, 1)
        self.max_waiting = arguments.integer("max_waiting", max_waiting, arguments.SIZE_MAX)
        if max_tokens is not None:
            arguments.integer("max_tokens", max_tokens, arguments.SIZE_MAX, 1)
        self.max_tokens = max_tokens
        self.prefixes = Prefixes(arguments.integer("cache_tokens", cache_tokens), 2 * slots)
        inputs.require_batches(chain.names, chain.engine.parts, slots)
        if getattr(chain.levels[0], "reads_encoder_input", False):
            raise ValueError(f"chain: expected a decoder-only target, given {chain.names[0]}")
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._waiting: list[tuple[int, int, Row]] = []  # a heap, by priority and id
        self._aborted: set[int] = set()
        self._readings: list[Reading] = []
        self._running: dict[int, Row] = {}  # with the requests of unread prompts
        self._numbers = list(range(slots))  # free numbers for the policy
        # Alternatives asked for by token, and the alternatives since the last event.
        self._alternatives: dict[int, tuple[int, list[Alternatives]]] = {}
        self._round_seconds = 0.0  # as measured
        self._reading_time = _ReadingTime()
        self._batch = OpenBatch(
            chain.engine,
            chain.owner,
            [],
            policy=chain.policy,
            observe=self._observe,
            prefixes=self.prefixes if cache_tokens else None,
            isolates=True,
            traces=True,
        )

    @property
    def running(self) -> int:
        """Return the number of requests with a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Return the number of requests that wait for a slot."""
        return len(self._waiting)

    @property
    def stats(self) -> Stats:
        """Return the statistics of all running and finished requests."""
        return self._batch.stats

    def add(
        self,
        prompt: Tokenized,
        max_new_tokens: int = 256,
        *,
        speculation: bool | int = True,
        priority: int = 0,
        logprobs: int = 0,
        **options: Unpack[Parameters],
    ) -> int:
        """Queue a request; it joins the batch in a later step. Thread-safe.

        Args:
            prompt: a single prompt, as for `Chain.stream`.
            max_new_tokens, options: as for `Chain.stream`.
            speculation: False decodes with the target alone; a number bounds every window.
            priority: requests of a higher priority leave the queue first.
            logprobs: number of likeliest ids in `Event.alternatives` for each token.

        Returns:
            The id of the request.

        Raises:
            TypeError, ValueError: as for `Chain.stream`; more tokens than `max_tokens`.
            ServerFull: the queue is full.
        """
        bound = None if speculation else 0
        if not isinstance(speculation, bool):
            bound = arguments.integer("speculation", speculation, arguments.SIZE_MAX)
        priority = arguments.integer("priority", priority, arguments.SIZE_MAX, -arguments.SIZE_MAX)
        logprobs = arguments.integer("logprobs", logprobs, arguments.SIZE_MAX)
        rows, mask = inputs.read("prompt", prompt)
        if len(rows) != 1:
            raise ValueError(f"prompt: expected one, given {len(rows)}")
        [request] = self.chain.requests(
            self.add, rows, max_new_tokens, options, name="prompt", mask=mask
        )
        request = replace(request, window_bound=bound)
        size = len(request.tokens) + request.max_new_tokens
        if self.max_tokens is not None and size > self.max_tokens:
            raise ValueError(
                f"max_new_tokens: expected a prompt and an answer of at most {self.max_tokens} "
                f"tokens together, given {size}"
            )
        with self._lock:
            if len(self._waiting) >= self.max_waiting + len(self._numbers):
                raise ServerFull(
                    f"expected at most {self.max_waiting} waiting requests, given one more"
                )
            row = Row(next(self._ids), request, self.chain.names)
            if logprobs:
                self._alternatives[row.number] = logprobs, []
            heapq.heappush(self._waiting, (-priority, row.number, row))
        return row.number

    def abort(self, request: int) -> None:
        """End a request in the next step. Thread-safe; a finished request does not change."""
        with self._lock:
            self._aborted.add(request)

    def step(self) -> list[Event]:
        """Give free slots to waiting requests, read a chunk of their prompts, and run one round of
        the target.

        Returns:
            An event for each request that has new tokens, reads a long prompt, or has finished.

        Raises:
            RuntimeError: the chain has begun another batch, or an earlier step was interrupted.
        """
        try:
            events = self._end_aborted()
            self._leave()
            self._open(events)
            self._read(events)
            self._join(events)
            rows = [row for row in self._batch.rows if not row.ended]
            if rows:
                began = time.perf_counter()
                before = {row.number: len(row.logprobs) for row in rows}
                self._batch.advance()
                seconds = time.perf_counter() - began
                mean = self._round_seconds or seconds
                self._round_seconds = (1 - _WEIGHT) * mean + _WEIGHT * seconds
                events += [self._event(row, before[row.number]) for row in rows]
            self._leave()
            return events
        except BaseException:
            # A request may be lost between queue and batch: the server stops.
            self.chain.owner.end(self._batch)
            raise

    # ---- the parts of a step ---------------------------------------------------------------------

    def _observe(self, number: int, logits: torch.Tensor) -> None:
        if number in self._alternatives:
            count, pending = self._alternatives[number]
            pending += alternatives(self._running[number], logits, count)

    def _end_aborted(self) -> list[Event]:
        with self._lock:
            aborted, self._aborted = self._aborted, set()
            gone = [row for _, number, row in self._waiting if number in aborted]
            if gone:
                self._waiting = [entry for entry in self._waiting if entry[1] not in aborted]
                heapq.heapify(self._waiting)
        for number in aborted & self._running.keys():
            row = self._running[number]
            self._batch.end(row)
            gone.append(row)
        for row in gone:
            self._alternatives.pop(row.number, None)
        return [Event(row.number, finish_reason="abort", stats=row.stats) for row in gone]

    def _open(self, events: list[Event]) -> None:
        rows: list[Row] = []
        while (row := self._next()) is not None:
            self._running[row.number] = row
            row.policy_number = self._numbers.pop()
            if row.ended:  # of no new tokens
                events.append(self._event(row, 0))
            else:
                rows.append(row)
        if rows and not self._batch.admits:
            self._add(rows, (), events)
            return
        for row in rows:
            try:
                self._readings.append(self._batch.open(row))
            except Exception as error:
                self._fail(row, error, events)

    def _next(self) -> Row | None:
        """Pop the next request from the queue, if there is room for it."""
        with self._lock:
            if not self._waiting or not self._numbers:
                return None
            if self.max_tokens is not None:
                taken = sum(map(_size, self._running.values()))
                if taken + _size(self._waiting[0][2]) > self.max_tokens:
                    return None
            return heapq.heappop(self._waiting)[2]

    def _read(self, events: list[Event]) -> None:
        """Read a chunk of the prompts that takes no longer than a round, so that the tokens of
        running requests wait for at most one round."""
        budget = min(max(self._reading_time.tokens_in(_PIECE), _LEAST), _TOGETHER)
        if any(not row.ended for row in self._batch.rows):
            fitting = self._reading_time.tokens_in(self._round_seconds)
            budget = min(max(fitting, _LEAST), _CHUNK)
        self._readings = [reading for reading in self._readings if not reading.row.ended]
        budget -= self._read_together(budget)
        for reading in list(self._readings):
            count = min(budget, reading.left)
            if count <= 0:
                continue
            began = time.perf_counter()
            try:
                self._batch.read(reading, count)
            except Exception as error:
                self._readings.remove(reading)
                self._fail(reading.row, error, events)
                continue
            self._reading_time.add(count, time.perf_counter() - began)
            budget -= count

    def _read_together(self, budget: int) -> int:
        """Read short unread prompts in one pass, in the order of arrival. Returns their number of
        tokens."""
        chosen: list[Reading] = []
        count = 0
        for reading in self._readings:
            if any(reading.lengths.values()) or count + reading.left > budget:
                break
            chosen.append(reading)
            count += reading.left
        if len(chosen) < 2:
            return 0
        began = time.perf_counter()
        try:
            self._batch.read_all(chosen)
        except Exception:  # prompts are then read alone, so that only the failing request ends
            return 0
        self._reading_time.add(count, time.perf_counter() - began)
        return count

    def _join(self, events: list[Event]) -> None:
        for reading in self._readings:
            if reading.left and any(reading.lengths.values()):
                read = reading.row.committed - 1 - reading.left
                events.append(Event(reading.row.number, read=read))
        ready = [reading for reading in self._readings if reading.left == 0]
        if not ready:
            return
        self._readings = [reading for reading in self._readings if reading.left]
        self._add([reading.row for reading in ready], ready, events)

    def _add(self, rows: list[Row], readings: Sequence[Reading], events: list[Event]) -> None:
        try:
            self._batch.join(rows, readings)
        except Exception as error:
            for row in rows:  # no row has joined
                self._fail(row, error, events)

    def _event(self, row: Row, begin: int) -> Event:
        """Return the event of a request with its new tokens from `begin` on."""
        tokens = row.tokens[len(row.tokens) - len(row.logprobs) + begin :]
        origins = row.origins[begin:]
        event = Event(
            row.number,
            tokens,
            levels=[origin.level for origin in origins],
            corrected=[origin.corrected for origin in origins],
        )
        asked = row.number in self._alternatives
        if asked or not row.request.sampling.greedy:
            event.logprobs = row.logprobs[begin:]
        if asked:
            pending = self._alternatives[row.number][1]
            event.alternatives = list(pending)
            pending.clear()
        if row.error is not None:
            event.finish_reason, event.error = "error", row.error
        elif row.ended:
            event.finish_reason = "stop" if tokens and tokens[-1] in row.request.eos else "length"
        event.stats = row.stats if row.ended else None
        return event

    def _fail(self, row: Row, error: Exception, events: list[Event]) -> None:
        row.error, row.ended = error, True
        events.append(self._event(row, 0))

    def _leave(self) -> None:
        for row in [row for row in self._running.values() if row.ended]:
            if any(other is row for other in self._batch.rows):
                self._batch.leave(row)
            del self._running[row.number]
            self._alternatives.pop(row.number, None)
            self._numbers.append(row.policy_number)


def _size(row: Row) -> int:
    return row.stats.num_prompt_tokens + row.max_new_tokens


class _ReadingTime:
    """Time of reading n tokens: a line fitted to the latest measurements, because a pass reads all
    weights for any number of tokens."""

    def __init__(self) -> None:
        self._means = [0.0] * 4  # weighted: of x, y, x x and x y

    def add(self, tokens: int, seconds: float) -> None:
        values = tokens, seconds, tokens * tokens, tokens * seconds
        before = self._means if self._means[0] else values
        pairs = zip(before, values, strict=True)
        self._means = [(1 - _WEIGHT) * mean + _WEIGHT * value for mean, value in pairs]

    def tokens_in(self, seconds: float) -> int:
        """Return how many tokens can be read in that time; many before the first measurement."""
        x, y, xx, xy = self._means
        variance = xx - x**2
        slope = (xy - x * y) / variance if variance > 1 else 0.0
        if slope <= 0:
            slope = y / x if x else 0.0
        fixed = max(0.0, y - slope * x)
        return int((seconds - fixed) / slope) if slope > 0 else _CHUNK


class AsyncServer:
    """Step a server in a background thread, for asyncio tasks.

        async with AsyncServer(ps.Server(chain)) as server:
            async for event in server.stream(prompt, max_new_tokens=64):
                ...

    Args:
        server: for the exclusive use of the thread; `Server.add` and `Server.abort` stay allowed.

    Raises:
        RuntimeError: by `start`: the thread has been started already.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self._wake = threading.Condition()
        self._put: dict[int, Callable[[Event], None]] = {}
        self._accepting = self._running = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        if self._thread is not None:
            raise RuntimeError("expected a server that has not been started, given one that has")
        self._accepting = self._running = True
        self._thread = threading.Thread(target=self._run, name="polyspec server", daemon=True)
        self._thread.start()

    def stop(self, finish: bool = True) -> None:
        """Refuse new requests, and wait for the thread to stop.

        Args:
            finish: complete running and waiting requests first; else abort them.
        """
        with self._wake:
            self._accepting = False
            if not finish:
                for request in self._put:
                    self.server.abort(request)
            self._running = False
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join()

    async def __aenter__(self) -> AsyncServer:
        self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.stop, error[0] is None)

    async def stream(self, prompt: Tokenized, *args: Any, **options: Any) -> AsyncIterator[Event]:
        """Add a request (`Server.add`) and yield its events. Closing the iterator early, or
        cancelling the task, aborts the request.

        Raises:
            TypeError, ValueError, ServerFull: as for `Server.add`.
            RuntimeError: the server has stopped, or its thread has failed.
        """
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def put(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(queue.put_nowait, event)

        with self._wake:
            if not self._accepting:
                raise RuntimeError("expected a server that runs, given one that was stopped")
            request = self.server.add(prompt, *args, **options)
            self._put[request] = put
            self._wake.notify_all()
        finished = False
        try:
            while not finished:
                event = await queue.get()
                finished = event.finish_reason is not None
                yield event
        finally:
            if not finished:
                with self._wake:
                    self.server.abort(request)
                    self._wake.notify_all()

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    while self._running and not self._put:
                        self._wake.wait()
                    if not self._put:
                        return
                self._deliver(self.server.step())
        except BaseException as failure:
            with self._wake:
                self._accepting = False
                left = list(self._put)
            error = RuntimeError(f"the server's thread has failed: {failure!r}")
            self._deliver([Event(number, finish_reason="error", error=error) for number in left])
            raise

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            with self._wake:
                put = self._put.get(event.request)
                if event.finish_reason is not None:
                    self._put.pop(event.request, None)
            if put is not None:
                put(event)
