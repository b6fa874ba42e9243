"""Serve questions of several clients by every method in turns, beside other servers.

Tokens per second are all new tokens over the wall time from the first question to the last token.
The time between two tokens is the time between two arrivals over the later arrival's tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import operator
import queue
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from benchmarks import measuring, output, questions
from benchmarks.engines import LlamaServer
from benchmarks.measuring import Request, chain_call, compared, is_lossless, verdict
from benchmarks.methods import WORDS, load_level
from benchmarks.questions import Conversation
from benchmarks.vllm_engine import OF_VLLM, VLLM, VllmEngine, ways
from polyspec_ext import processor, progress, tiny
from polyspec_ext.chain import Chain
from polyspec_ext.cli import options
from polyspec_ext.drafters.words import original
from polyspec_ext.levels import HuggingFaceLevel, tokenizer_at
from polyspec_ext.levels.models import level_line
from polyspec_ext.serving import Server

PLAIN, CHAIN, POLICY, BATCHES = "plain", "chain", "policy", "generate"
TRANSFORMERS, LLAMA, LLAMA_DRAFTS = "transformers", "llama.cpp", "llama.cpp-drafts"
METHODS = (PLAIN, CHAIN, POLICY, BATCHES, TRANSFORMERS, LLAMA, LLAMA_DRAFTS, *OF_VLLM)
_WARM_UP = 8  # tokens
_DRAFTS = 64  # tokens by which other servers may run ahead
_POLICY = "joint"
_QUESTIONS = 64  # of a run
_PROMPT = 256  # tokens of a prompt, longer prompts lose their middle
_SETTINGS = ("per_client", "max_new_tokens", "repeats", "seconds", "window")
_BATCH = 8  # questions of a call of `generate`
_PAGE, _STEP_TOKENS = 256, 512  # of transformers' cache and steps


class Ask(NamedTuple):
    """A question, by number, which is the seed of its answer."""

    number: int
    prompt: list[int]


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

    def arrived(self, tokens: Sequence[int], now: float) -> None:
        """Record new tokens."""
        if tokens:
            self.tokens += tokens
            self.arrivals.append((now, len(tokens)))

    def gaps(self) -> Iterator[float]:
        """Yield the seconds before each token after the first arrival."""
        for (before, _), (now, count) in itertools.pairwise(self.arrivals):
            yield from itertools.repeat((now - before) / count, count)


# Key of a request, its new tokens, and whether it has ended.
Arrival = tuple[Hashable, list[int], bool]


class Service(NamedTuple):
    """A method that answers the clients of a load."""

    add: Callable[[Ask], Hashable]  # begins a request, and returns its key in `step`
    step: Callable[[], Iterable[Arrival]]  # waits for the next arrivals


Open = Callable[[Load], contextlib.AbstractContextManager[Service]]


def served(open_service: Open, asks: Iterable[Ask], load: Load) -> list[Trace]:
    """Serve questions, of which each client asks the next when it is answered; return the requests
    in the order of completion."""
    running, done, waiting = dict[Hashable, Trace](), list[Trace](), iter(asks)
    with open_service(load) as service:

        def ask(clients: int) -> None:
            for request in itertools.islice(waiting, clients):
                trace = Trace(request, time.perf_counter())
                running[service.add(request)] = trace

        ask(load.clients)
        while running:
            arrivals = list(service.step())
            now = time.perf_counter()
            for key, tokens, ended in arrivals:
                running[key].arrived(tokens, now)
                if ended:
                    done.append(running.pop(key))
                    ask(1)
    return done


# ---- services ------------------------------------------------------------------------------------


@contextlib.contextmanager
def by_server(chain: Chain, load: Load, speculation: bool = True) -> Iterator[Service]:
    """Open a `Server` with a slot for each client."""
    server = Server(chain, load.clients)

    def add(ask: Ask) -> int:
        options: dict[str, Any] = {"seed": ask.number, "speculation": speculation}
        return server.add(ask.prompt, load.max_new_tokens, temperature=load.temperature, **options)

    def step() -> Iterator[Arrival]:
        for event in server.step():
            if event.error is not None:
                raise event.error
            yield event.request, event.tokens, event.stats is not None

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
        numbers, prompts = (list(column) for column in zip(*batch, strict=True))
        request = Request(prompts, load.max_new_tokens, load.temperature, numbers)
        texts = chain_call(chain, request).texts
        return [(number, text, True) for number, text in zip(numbers, texts, strict=True)]

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
            request = Request([ask.prompt], load.max_new_tokens, load.temperature, [ask.number])
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


@contextlib.contextmanager
def by_vllm(engine: VllmEngine, load: Load) -> Iterator[Service]:
    """Ask vLLM in its process."""

    def add(ask: Ask) -> str:
        sampling = {"max_tokens": load.max_new_tokens, "temperature": load.temperature}
        engine.ask(key=str(ask.number), prompt=ask.prompt, seed=ask.number, **sampling)
        return str(ask.number)

    yield Service(add, lambda: engine.ask()["arrivals"])


class Method(NamedTuple):
    """A serving method."""

    name: str
    label: str
    open: Open
    plain: str = PLAIN  # name of the method with the reference greedy texts
    ours: bool = True  # the texts must be the same


@dataclass
class Cell:
    """Measurements of a method at a load: the requests of each repeat, or an error."""

    method: Method
    load: Load
    repeats: dict[int, list[Trace]] = field(default_factory=dict)
    error: str | None = None

    @property
    def traces(self) -> list[Trace]:
        return list(itertools.chain.from_iterable(self.repeats.values()))

    def rates(self) -> dict[int, float]:
        """Return tokens per second by repeat."""
        speeds = {}
        for number, traces in self.repeats.items():
            ends = [trace.arrivals[-1][0] for trace in traces if trace.arrivals]
            seconds = max(ends) - min(trace.began for trace in traces)
            speeds[number] = sum(len(trace.tokens) for trace in traces) / seconds
        return speeds

    def row(self, base: Mapping[int, float], texts: str | None) -> dict[str, Any]:
        """Return the row of the report; `base`: tokens per second of plain decoding by repeat."""
        traces, rates = self.traces, self.rates()
        answered = [trace for trace in traces if trace.arrivals]
        tokens = sum(len(trace.tokens) for trace in traces)
        arrivals = sum(len(trace.arrivals) for trace in traces)
        return {
            "method": self.method.name,
            "label": self.method.label,
            "clients": self.load.clients,
            "temperature": self.load.temperature,
            "error": self.error,
            "requests": len(traces),
            "tokens": tokens,
            "prompt_tokens": sum(len(trace.ask.prompt) for trace in traces),
            "repeats": len(rates),
            "tokens_per_second": _spread(rates.values()),
            "x_plain": _spread(rates[n] / base[n] for n in rates if n in base),
            "tokens_per_arrival": tokens / max(1, arrivals),
            "first_token": percentiles([x.arrivals[0][0] - x.began for x in answered]),
            "between_tokens": percentiles([gap for trace in traces for gap in trace.gaps()]),
            "texts": texts,
        }


def percentiles(values: Sequence[float]) -> list[float] | None:
    """Return the median and the 95th percentile; None: no values."""
    return np.percentile(values, [50, 95]).tolist() if len(values) else None


def _spread(values: Iterable[float]) -> dict[str, float] | None:
    every = list(values)
    spread = np.quantile(every, (0.5, 0, 1)).tolist() if every else None
    return spread and dict(zip(("median", "low", "high"), spread, strict=True))


# ---- options -------------------------------------------------------------------------------------


OPTIONS: tuple[Any, ...] = (
    ("--target", None, None, "MODEL", "directory, id or GGUF file (default: the shipped models)"),
    ("--draft", output.REPEATED, [], "MODEL", "the same, or prompt-lookup, suffix or ngram; may "
     "be repeated, the dearest first (default: prompt-lookup, the shipped drafter)"),
    ("--window", options.COUNTS, None, "K,...", "of the chain (default: of `Chain`)"),
    ("--questions", options.file, None, "FILE", "as of `paper`"),
    ("--methods", options.words, [], "KEY,...", f"of {', '.join(METHODS)} (default: all)"),
    ("--gguf", options.words, [], "FILE[,FILE]", "target and draft for llama.cpp's server; without "
     "a draft its own speculation is --spec-default"),
    ("--llama-server", options.file, None, "PROGRAM", "of make llama-server"),
    ("--vllm", options.file, None, "PYTHON", "of an environment that has vLLM and this package, as "
     "make test-vllm makes it. All engines start at once"),
    ("--clients", options.COUNTS, [1, 4, 8, 16], "N,...", "at a time"),
    ("--temperatures", options.TEMPERATURES, [0.0, 0.8], "T,...", ""),
    ("--per-client", options.COUNT, 2, "N", "questions that each client asks, of these"),
    ("--max-new-tokens", options.COUNT, 64, "N", "of an answer"),
    ("--repeats", options.COUNT, 5, "N", "of every load at most"),
    ("--seconds", options.number(0), 600.0, "S", "after which no load begins anew"),
)  # fmt: skip


# ---- measuring -----------------------------------------------------------------------------------


def report_of(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the methods and loads of the options; return the JSON report."""
    if bool(args.gguf) != bool(args.llama_server) or len(args.gguf) > 2:
        raise ValueError("--gguf: expected one or two files and --llama-server with them")
    before = processor.load_average()
    source = args.target or tiny.path("target")
    drafts = args.draft or [tiny.path("drafter") if args.target is None else "prompt-lookup"]
    apart = bool(args.methods) and set(args.methods) <= {*OF_VLLM}  # memory is for vLLM alone
    levels = [_outline(source) if apart else load_level(source, name="--target")]
    for draft in drafts:
        named = apart or draft in WORDS  # each chain has a separate drafter
        levels.append(draft if named else load_level(draft, name="--draft", above=levels))
    target = levels[0]
    template = questions.AUTO if args.target else "tiny"
    room = min(_PROMPT, (target.max_length or 1 << 30) - args.max_new_tokens)
    talk = Conversation(tokenizer_at(original(source)), template, room)
    with contextlib.ExitStack() as stack:
        servers: list[Any] = []
        methods = _methods(args, levels, stack, servers)
        pairs = itertools.product(args.temperatures, args.clients)
        loads = [Load(count, heat, args.max_new_tokens) for heat, count in pairs]
        cells = _measure(args, methods, loads, talk)
    rows, differs = _rows(cells, target)
    return {
        **output.header("serving", 1),
        "load": {"before": before, "after": processor.load_average()},
        "settings": {name: getattr(args, name) for name in _SETTINGS},
        "source": (args.questions or questions.default_path()).stem,
        "levels": [Path(getattr(level, "name", level)).name for level in levels],
        "choices": [level_line(level) for level in levels if isinstance(level, HuggingFaceLevel)],
        "servers": [{"command": server.command, "version": server.version} for server in servers],
        "rows": rows,
        "differs": differs,
    }


def _methods(
    args: argparse.Namespace, levels: Sequence[Any], stack: contextlib.ExitStack, servers: list[Any]
) -> list[Method]:
    target, room = levels[0], _PROMPT + args.max_new_tokens
    every: list[Method] = []
    if isinstance(target, HuggingFaceLevel):
        chain, serve = Chain(levels, args.window), by_server
        by_policy = Chain(levels, args.window, policy=_POLICY)
        continuous = partial(by_transformers, target.model, target.eos_token_ids, room)
        every = [
            Method(PLAIN, "Server, speculation=False", partial(serve, chain, speculation=False)),
            Method(CHAIN, "Server", partial(serve, chain)),
            Method(POLICY, f"Server, {_POLICY} policy", partial(serve, by_policy)),
            Method(BATCHES, "Chain.generate, batches of 8", partial(by_batches, chain)),
            Method(TRANSFORMERS, "transformers, continuous batching", continuous, ours=False),
        ]
    known = [method.name for method in every] + [LLAMA, LLAMA_DRAFTS] * bool(args.gguf)
    known += [*OF_VLLM] * bool(args.vllm)
    chosen = args.methods or known
    if unknown := [name for name in chosen if name not in known]:
        every_name, wrong = ", ".join(known), ", ".join(unknown)
        raise ValueError(f"--methods: expected some of {every_name}, given {wrong}")
    draft = ["-md", *args.gguf[1:], "--spec-type", "draft-simple"]
    draft_flags = draft if args.gguf[1:] else ["--spec-default"]
    for name, label, flags in (
        (LLAMA, "llama.cpp's server", []),
        (LLAMA_DRAFTS, "llama.cpp's server, its speculation", draft_flags),
    ):
        if name in chosen:
            flags = ["-m", args.gguf[0], *flags]
            server = LlamaServer(args.llama_server, flags, max(args.clients), room + _DRAFTS)
            stack.callback(server.close)
            servers.append(server)
            every.append(Method(name, label, partial(by_llama, server), LLAMA, ours=False))
    if args.vllm:
        source = str(original(args.target or tiny.path("target")))
        dtype = str(target.model.dtype).removeprefix("torch.")
        drafts = [str(path) for path in args.draft or [tiny.path("drafter"), "prompt-lookup"]]
        common = {"max_num_seqs": max(args.clients), "max_model_len": room + _DRAFTS}
        for key, (label, options) in ways(source, dtype, drafts, args.window, _POLICY).items():
            if key in chosen:
                engine = VllmEngine(args.vllm, common | options)
                stack.callback(engine.close)
                servers.append(engine)
                every.append(Method(key, label, partial(by_vllm, engine), VLLM, ours=False))
    return [method for method in every if method.name in chosen]


def _outline(source: str | Path) -> Any:
    """Return context, EOS ids and dtype of a target that other engines load."""
    from transformers import AutoConfig, GenerationConfig

    config, ends = AutoConfig.from_pretrained(source), GenerationConfig.from_pretrained(source)
    eos = ends.eos_token_id
    return SimpleNamespace(
        name=str(source),
        max_length=config.max_position_embeddings,
        eos_token_ids=[eos] if isinstance(eos, int) else eos,
        model=SimpleNamespace(dtype=config.dtype),
    )


def _measure(
    args: argparse.Namespace, methods: Sequence[Method], loads: Sequence[Load], talk: Conversation
) -> list[Cell]:
    """Measure the methods in turns, a load in each; return the cells, load after load."""
    every, began = questions.read(args.questions), time.monotonic()
    cells = {(load, m.name): Cell(m, load) for load in loads for m in methods}
    now = [0]

    def call(method: Method) -> float:
        repeat, number = divmod(max(now[0], 0), len(loads))
        load, cell = loads[number], cells[loads[number], method.name]
        if now[0] < 0:  # the warm-up
            load = load._replace(max_new_tokens=_WARM_UP)
        traces = served(method.open, _asks(args, load, every, talk, repeat), load)
        if now[0] >= 0:
            cell.repeats[repeat] = traces
        return 0.0

    def goes_on(turn: int) -> bool:
        return turn < len(loads) or time.monotonic() - began <= args.seconds

    timed = [measuring.Contender(method.name, partial(call, method)) for method in methods]
    count, load = args.repeats * len(loads), partial(operator.setitem, now, 0)
    calls = measuring.turns(timed, count, measuring.Clock(None), load, 1, goes_on)
    for one in progress.bar(calls, total=count * len(timed), desc="serving", leave=False):
        for cell in cells.values():
            if cell.method.name == one.name:
                cell.error = one.error
    return list(cells.values())


def _asks(
    args: argparse.Namespace, load: Load, every: Sequence[Any], talk: Conversation, repeat: int
) -> list[Ask]:
    # Questions differ between repeats if a load does not ask all.
    chosen = questions.select(every, -(-_QUESTIONS // len(questions.TASKS)))[:_QUESTIONS]
    count = min(len(chosen), load.clients * args.per_client)
    numbers = [(repeat * count + at) % len(chosen) for at in range(count)]
    return [Ask(number, talk.prompt(chosen[number].turns[:1], [])) for number in numbers]


# ---- the report ----------------------------------------------------------------------------------


def _rows(cells: Sequence[Cell], target: Any) -> tuple[list[dict[str, Any]], bool]:
    """Return a row for each cell, and whether a method of ours failed, or its greedy texts differ
    from plain decoding's."""
    ends = set(target.eos_token_ids)
    # The first greedy text of each method and question.
    plain = {
        (cell.method.name, trace.ask.number): trace.tokens
        for cell in reversed(cells)
        if cell.load.temperature == 0
        for trace in reversed(cell.traces)
    }
    rates = {(cell.method.name, cell.load): cell.rates() for cell in cells}
    rows, differs = [], False
    for cell in cells:
        method, load, same = cell.method, cell.load, None
        if not cell.traces and cell.error is None:
            continue
        texts, model = [], target.model if method.ours else None
        for trace in cell.traces if load.temperature == 0 else ():
            tokens = plain.get((method.plain, trace.ask.number))
            if tokens is not None:  # other servers may leave out the EOS
                reference, text = (
                    [t for t in own if method.ours or t not in ends]
                    for own in (tokens, trace.tokens)
                )
                texts.append(compared(model, trace.ask.prompt, reference, text))
        if texts:
            judged = verdict(texts, target.model.dtype)
            same = judged["lossless"] + " (its own)" * (method.plain != PLAIN)
            differs = differs or (method.ours and not is_lossless(judged))
        differs = differs or (method.ours and cell.error is not None)
        base = rates.get((PLAIN, load)) or rates.get((method.plain, load), {})
        rows.append(cell.row(base, same))
    return rows, differs


def status(report: Mapping[str, Any]) -> int:
    """Return 1 if a method of ours failed, or its greedy texts differ from plain decoding's."""
    return int(report["differs"])


def markdown(report: Mapping[str, Any]) -> str:
    """Return a table for each temperature."""
    settings, where = report["settings"], report["machine"]
    lines = [
        f"{' <- '.join(report['levels'])}: {where['cpu']}, {output.conditions(report)}, "
        f"{report['load']['after']:.1f} after, transformers {where['transformers']}, commit "
        f"{where['commit']}.",
        f"Questions of {report['source']}, up to {settings['max_new_tokens']} new tokens, prefill "
        "included; medians of repeats in turns; milliseconds as median / 95 %.",
        *(f"- {choice}" for choice in report["choices"]),
        *(f"- `{server['command']}`: {server['version']}" for server in report["servers"]),
    ]
    heads = ["clients", "method", "tokens/s", "range", "x plain", "range", "first token, ms"]
    heads += ["between tokens, ms", "tokens at once", "greedy texts as plain's"]
    for temperature, rows in itertools.groupby(report["rows"], lambda row: row["temperature"]):
        lines += ["", f"Temperature {temperature:g}:", ""]
        lines += output.table(heads, map(_cells, rows), range(2, len(heads) - 1))
    return "\n".join(lines)


def _cells(row: Mapping[str, Any]) -> list[str]:
    cells = [str(row["clients"]), row["label"]]
    if row["tokens_per_second"] is None:
        return [*cells, *["-"] * 7, row["error"]]
    for form, spread in ((".1f", row["tokens_per_second"]), (".2f", row["x_plain"])):
        median, low, high = (format(x, form) for x in spread.values()) if spread else "---"
        cells += [median, f"{low} to {high}" if spread else "-"]
    for pair in (row["first_token"], row["between_tokens"]):
        cells.append(" / ".join(f"{1000 * value:.0f}" for value in pair) if pair else "-")
    return [*cells, f"{row['tokens_per_arrival']:.2f}", row["error"] or row["texts"] or "-"]
