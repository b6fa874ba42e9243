"""Clients that ask the next question after each answer, and the services for them: ours,
transformers' continuous batching, and llama.cpp's server."""

from __future__ import annotations

import contextlib
import itertools
import queue
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from benchmarks.engines import LlamaServer
from benchmarks.measuring import Request, chain_call
from polyspec_ext.chain import Chain
from polyspec_ext.serving.server import Server
from polyspec_ext.stats import Stats

_BATCH = 8  # questions of a call of `generate`
_PAGE, _STEP_TOKENS = 256, 512  # of transformers' cache and steps


class Ask(NamedTuple):
    """A question of a client, by number."""

    number: int
    prompt: list[int]
    seed: int


class Load(NamedTuple):
    """Number of simultaneous clients, and options of all their requests."""

    clients: int
    temperature: float
    max_new_tokens: int


@dataclass
class Trace:
    """A request from the client's view."""

    ask: Ask
    began: float  # seconds of the clock
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # time, number of tokens
    tokens: list[int] = field(default_factory=list)
    read: int | None = None  # tokens of the prompt that the target read, if known

    def arrived(self, tokens: Sequence[int], now: float) -> None:
        """Record new tokens."""
        if tokens:
            self.tokens += tokens
            self.arrivals.append((now, len(tokens)))

    def gaps(self) -> Iterator[float]:
        """Yield the seconds before each token after the first arrival."""
        for (before, _), (now, count) in itertools.pairwise(self.arrivals):
            yield from itertools.repeat((now - before) / count, count)


# Yields questions, and is sent the answer to each.
Client = Generator[Ask, list[int], None]
# Key of a request, its new tokens, and its statistics or `True` once it has ended.
Arrival = tuple[Hashable, list[int], Any]


class Service(NamedTuple):
    """A method that answers the clients of a load."""

    add: Callable[[Ask], Hashable]  # begins a request, and returns its key in `step`
    step: Callable[[], Iterable[Arrival]]  # waits for the next arrivals


Open = Callable[[Load], contextlib.AbstractContextManager[Service]]


def served(open_service: Open, clients: Sequence[Client], load: Load) -> list[Trace]:
    """Serve clients, and return their requests in the order of completion."""
    running: dict[Hashable, tuple[Client, Trace]] = {}
    done = []
    with open_service(load) as service:

        def ask(client: Client, answer: list[int] | None) -> None:
            with contextlib.suppress(StopIteration):
                asked = next(client) if answer is None else client.send(answer)
                trace = Trace(asked, time.perf_counter())
                running[service.add(asked)] = client, trace

        for client in clients:
            ask(client, None)
        while running:
            arrivals = list(service.step())
            now = time.perf_counter()
            for key, tokens, ended in arrivals:
                client, trace = running[key]
                trace.arrived(tokens, now)
                if ended:
                    if isinstance(ended, Stats):
                        trace.read = ended.num_prompt_tokens - ended.num_cached_tokens
                    del running[key]
                    done.append(trace)
                    ask(client, trace.tokens)
    return done


# ---- methods -------------------------------------------------------------------------------------


@contextlib.contextmanager
def by_server(
    chain: Chain, load: Load, speculation: bool = True, slots: int = 0, **more: Any
) -> Iterator[Service]:
    """Open a `Server`. `slots` 0: a slot for each client."""
    server = Server(chain, slots or load.clients, **more)

    def add(ask: Ask) -> int:
        options: dict[str, Any] = {"seed": ask.seed, "speculation": speculation}
        return server.add(ask.prompt, load.max_new_tokens, load.temperature, **options)

    def step() -> Iterator[Arrival]:
        for event in server.step():
            if event.error is not None:
                raise event.error
            yield event.request, event.tokens, event.stats

    yield Service(add, step)


@contextlib.contextmanager
def by_batches(chain: Chain, load: Load) -> Iterator[Service]:
    """Open `Chain.generate`: waiting questions are a batch of at most eight, and the answers arrive
    when the whole batch is complete."""
    waiting: deque[Ask] = deque()

    def add(ask: Ask) -> int:
        waiting.append(ask)
        return ask.number

    def step() -> list[Arrival]:
        batch = [waiting.popleft() for _ in range(min(_BATCH, len(waiting)))]
        prompts, seeds = [ask.prompt for ask in batch], [ask.seed for ask in batch]
        request = Request(prompts, load.max_new_tokens, load.temperature, seeds)
        answer = chain_call(chain, request)
        numbers = [ask.number for ask in batch]
        return list(zip(numbers, answer.texts, answer.rows, strict=True))

    yield Service(add, step)


@contextlib.contextmanager
def by_transformers(model: Any, eos: Sequence[int], room: int, load: Load) -> Iterator[Service]:
    """Open transformers' continuous batching; `room`: tokens of a request."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    sampled = {"do_sample": True, "temperature": load.temperature, "top_k": 0, "top_p": 1.0}
    chosen = sampled if load.temperature > 0 else {"do_sample": False}
    pages = load.clients * (room // _PAGE + 2)
    manager = model.init_continuous_batching(
        GenerationConfig(eos_token_id=list(eos) or -1, **chosen),
        ContinuousBatchingConfig(
            num_blocks=pages, page_size=_PAGE, max_batch_tokens=_STEP_TOKENS, seed=0
        ),
    )
    counts: dict[str, int] = {}  # tokens that have arrived

    def add(ask: Ask) -> str:
        key = str(ask.number)
        counts[key] = 0
        manager.add_request(ask.prompt, key, load.max_new_tokens, streaming=True)
        return key

    def step() -> Iterator[Arrival]:
        result = manager.get_result(timeout=1.0)
        if result is None and not manager.is_running():
            raise RuntimeError(str(manager.background_thread_status.fatal_error))
        if result is not None and result.error is not None:
            raise RuntimeError(result.error)
        if result is not None:
            tokens = result.generated_tokens[counts[result.request_id] :]
            counts[result.request_id] += len(tokens)
            yield result.request_id, tokens, result.is_finished()

    manager.start()
    try:
        yield Service(add, step)
    finally:
        manager.stop(block=True, timeout=10.0)


@contextlib.contextmanager
def by_llama(server: LlamaServer, load: Load) -> Iterator[Service]:
    """Ask llama.cpp's server in a thread for each client."""
    arrivals: queue.SimpleQueue[Arrival | Exception] = queue.SimpleQueue()

    def answer(ask: Ask) -> None:
        try:
            request = Request([ask.prompt], load.max_new_tokens, load.temperature, [ask.seed])
            for tokens in server.stream(request):
                arrivals.put((ask.number, tokens, False))
            arrivals.put((ask.number, [], True))
        except Exception as error:
            arrivals.put(error)

    def add(ask: Ask) -> int:
        pool.submit(answer, ask)
        return ask.number

    def step() -> Iterator[Arrival]:
        arrival = arrivals.get()
        if isinstance(arrival, Exception):
            raise arrival
        yield arrival

    with ThreadPoolExecutor(load.clients) as pool:
        yield Service(add, step)
