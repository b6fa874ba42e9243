"""Time chains at the true shape of a published model, with a chosen acceptance.

A target, its 4-bit copy, an EAGLE-2 head and a small model have random weights, so a pass takes the
time of that shape. Acceptance is drawn before the run: each level has a table with a token per
position, and a large logit at that token. The target's table is the text. A level below has the
token of the level above with probability `a`, else another token, independently at each position.
At temperature 0 every verification accepts with probability `a`. Or levels agree as in a recorded
trace of real chains (`traces`).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import polyspec_ext as ps
from benchmarks import measuring, output, traces
from benchmarks.shapes import SHAPES, Shape, random_head, random_model, require_memory, weight_bytes
from benchmarks.traces import BELOW, DRAFT, HEAD
from benchmarks.traces import COPY as W4
from polyspec_ext import progress
from polyspec_ext.cli import options
from polyspec_ext.drafters.eagle import Eagle
from polyspec_ext.levels import HuggingFaceLevel, InputBlock, LevelOutput
from polyspec_ext.ops import verification
from polyspec_ext.planning.theory import Acceptance, constant_seconds, expectation
from polyspec_ext.quantization import quantize_w4

PLAIN, EAGER = "plain decoding", "plain decoding, no graphs"
SYNC = ", followed by the host"
FUSED = "fused layers: "  # on CUDA
DRAFT_SHAPE = SHAPES["qwen2.5-0.5b"]
Chosen = tuple[float, float] | str  # acceptances of the copy and of drafters, or a trace
LARGE = 1.0e4  # logit of the table's token
WARM_UP = 2  # calls as long as the run: the first is eager, the second captures
# By the words of ``--chains``: the levels below the target, and their windows.
CHAINS: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "eagle": ((HEAD,), (6,)),
    "draft": ((DRAFT,), (3,)),
    "w4": ((W4,), (6,)),
    "w4+eagle": ((W4, HEAD), (10, 5)),
    "w4+draft": ((W4, DRAFT), (8, 3)),
}


class ChosenLevel(HuggingFaceLevel):
    """A level with the largest logit at the token of a table: three operators in a pass."""

    # Set after the checks of a new level, which need the model's logits.
    tables: Tables | None = None
    table: torch.Tensor  # [P] of `tables`, the token at each position

    def choose(self, tables: Tables, table: torch.Tensor) -> None:
        """Answer with the tokens of a table."""
        self.tables, self.table = tables, table

    def run(self, block: InputBlock) -> LevelOutput:
        result = super().run(block)
        if self.tables is None:
            return result
        keep = result.logits.shape[1]
        begin, skipped = self.cache.rows.base, block.tokens.shape[1] - keep
        if block.first is not None:
            begin, skipped = begin + block.first.on(self.device), 0
        # `base`: cached lengths before the pass
        positions = begin[:, None] + self.tables.numbers[skipped + 1 : skipped + keep + 1]
        return result._replace(logits=chosen(result.logits, self.table, positions))


def chosen(logits: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Write `LARGE` into logits ``[B, n, V]`` at the table's tokens of positions ``[B, n]``."""
    return logits.scatter_(2, table[positions].expand(logits.shape[:2])[..., None], LARGE)


def choosing_draw(table: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return `ops.verification.draw` for a drafter with the largest logit at the table's token."""

    def draw(
        logits: torch.Tensor, parameters: Any, positions: torch.Tensor, rounds: torch.Tensor,
        level: int, column: int, *outputs: Any,
    ) -> torch.Tensor:  # fmt: skip
        logits = chosen(logits, table[column:], positions[:, None])
        return verification.draw(logits, parameters, positions, rounds, level, column, *outputs)

    return draw


class Tables:
    """Tokens by position of the target and the levels below. Ids of the text are in
    ``[2, vocab)``; 1 and 0 are rejected. The tensors keep their addresses."""

    def __init__(self, length: int, vocab: int, device: torch.device) -> None:
        self._random = torch.Generator().manual_seed(0)
        self.numbers = torch.arange(length, device=device)  # positions are added to these
        text = torch.randint(2, vocab, (length,), generator=self._random)
        self.target = text.to(device)
        names = (W4, DRAFT, HEAD, DRAFT + BELOW, HEAD + BELOW)
        self.below = {name: self.target.clone() for name in names}

    def drawn(self, outer: float, inner: float) -> dict[str, torch.Tensor]:
        """Draw where levels agree: the copy with probability `outer`, drafters with `inner`."""
        shares = {W4: outer, DRAFT: inner, DRAFT + BELOW: inner}
        size = (len(self.target),)
        agrees = {name: torch.rand(size, generator=self._random) < p for name, p in shares.items()}
        return agrees | {HEAD: agrees[DRAFT], HEAD + BELOW: agrees[DRAFT + BELOW]}

    def recorded(self, trace: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Return where the levels of a trace agree, over and over."""
        size = len(self.target)
        return {
            name: torch.tensor(
                [bit == "1" for bit in itertools.islice(itertools.cycle(bits), size)]
            )
            for name, bits in trace.items()
        }

    def enter(self, agrees: Mapping[str, torch.Tensor]) -> None:
        """Write the tables of the levels below: of the copy and of drafters from the target's, of
        drafters below the copy from the copy's."""
        for name in sorted(agrees, key=lambda name: name.endswith(BELOW)):
            below = name.endswith(BELOW)
            above = self.below[W4] if below else self.target
            rejected = above.new_tensor(0 if below else 1)
            self.below[name].copy_(torch.where(agrees[name].to(above.device), above, rejected))


@dataclass(kw_only=True)
class Row(measuring.Contender):
    """A chain at a pair of acceptances, or at a trace with the means `outer` and `inner`: `tokens`
    new tokens after `prompt` for each of `batch` texts."""

    call: Callable[[], Any] = field(init=False)
    outer: float
    inner: float
    tokens: int
    prompt: int
    batch: int
    chain: ps.Chain
    acceptance: tuple[float, ...] = ()
    output: Any = None

    def __post_init__(self) -> None:
        self.call = self.generate

    def generate(self, tokens: int | None = None) -> float:
        """Generate, keep the result and return the seconds of decoding."""
        options: dict[str, Any] = {"temperature": 0.0, "eos_token_id": []}
        prompts = [[3] * self.prompt] * self.batch
        self.output = self.chain.generate(prompts, tokens or self.tokens, **options)
        return float(self.output.stats.decode_seconds)

    def report(self, plain: Row) -> dict[str, Any]:
        """Return the row of the JSON report."""
        row = {name: getattr(self, name) for name in ("outer", "inner", "batch", "error")}
        row |= {"label": self.name, "window": list(self.chain.window)}
        if not self.seconds or self.error is not None:
            return row
        levels = self.output.stats.levels
        expected = length = levels[0].mean_acceptance_length if len(levels) > 1 else 1.0
        if self.acceptance:
            ones = constant_seconds(*[1.0] * (len(self.acceptance) + 1))
            accept = Acceptance.constant(*self.acceptance)
            expected = expectation(self.chain.window, self.chain.rounds, accept, ones).length
        row |= {
            "ms_per_token": 1e3 * statistics.median(self.seconds) / self.tokens,
            "levels": [{"name": x.name, "passes": x.num_forward_passes} for x in levels],
            "length": length,
            "expected_length": expected,
        }
        if plain.seconds:
            pairs = zip(plain.seconds, self.seconds, strict=False)
            row["x_plain"] = statistics.median(a / b for a, b in pairs)
            row["same_text"] = bool(self.output.sequences.equal(plain.output.sequences))
        return row


class ChosenChains:
    """The models of a shape, a small model, and their chains with a chosen acceptance: each level
    below the target twice, for chains of two levels and of three.

    Args:
        prompt: tokens of a prompt.
        tokens: new tokens of a text.
        words: of `CHAINS`, the chains to time.
        sync: add each chain with rounds that the host follows.
    """

    def __init__(
        self, shape: Shape, draft: Shape, device: str, prompt: int, tokens: int,
        words: Sequence[str] = tuple(CHAINS), sync: bool = False,
    ) -> None:  # fmt: skip
        self.prompt, self.tokens, self.sync = prompt, tokens, sync
        self.cuda, self.latest = device == "cuda", list[Row]()
        self.chains = [CHAINS[word] for word in words]
        dtype = torch.bfloat16 if self.cuda else torch.float32
        model = random_model(shape, dtype, device)
        group = next(g for g in (128, 64, 32) if shape.hidden % g == 0 and shape.inner % g == 0)
        small = random_model(replace(draft, vocab=shape.vocab), dtype, device)
        positions = model.config.max_position_embeddings + 256
        self.tables = tables = Tables(positions, shape.vocab, torch.device(device))
        quantised = quantize_w4(model, group)
        self.target = ChosenLevel(model, name="target", pack=self.cuda)
        copy = ChosenLevel(quantised, name=W4, shares_cache_with=self.target)
        drafts = [ChosenLevel(small, name=DRAFT, pack=self.cuda) for _ in range(2)]
        self.target.choose(tables, tables.target)
        for level, name in zip((copy, *drafts), (W4, DRAFT, DRAFT + BELOW), strict=True):
            level.choose(tables, tables.below[name])
        network = random_head(shape, self.target)
        draws = (choosing_draw(tables.below[name]) for name in (HEAD, HEAD + BELOW))
        heads = [Eagle(network, name=HEAD, draw=draw) for draw in draws]
        self.by_name: dict[str, list[Any]] = {W4: [copy, copy], DRAFT: drafts, HEAD: heads}

    def rows(self, chosen: Chosen, batch: int = 1) -> list[Row]:
        """Enter the tables of acceptances or of a trace; return the chains, the target first."""
        pair = None if isinstance(chosen, str) else chosen
        if isinstance(chosen, str):
            agrees = self.tables.recorded(traces.recorded()[chosen])
        else:
            agrees = self.tables.drawn(*chosen)
        self.tables.enter(agrees)
        shares = {name: float(bits.float().mean()) for name, bits in agrees.items()}
        prefix, prompt, tokens = FUSED * self.cuda, self.prompt, self.tokens
        outer, inner = pair or (shares[W4], shares.get(HEAD, shares[DRAFT]))
        alone = partial(Row, prompt=prompt, tokens=tokens, batch=batch, outer=outer, inner=inner)
        rows = [alone(name=prefix + PLAIN, chain=ps.Chain([self.target]))]
        if self.cuda:
            eager = ps.Chain([self.target], graphs=False)
            rows.append(alone(name=prefix + EAGER, chain=eager))
        for below, window in self.chains:
            three = len(below) > 1
            lowest = below[-1] + BELOW * three
            if lowest not in agrees:
                continue  # not in the trace
            inner = pair[1] if pair else shares[lowest]
            share = outer if below == (W4,) else inner
            acceptance = () if pair is None else pair if three else (share,)
            members = [self.target, *(self.by_name[name][three] for name in below)]
            for sync in (None, True)[: 1 + self.sync]:
                label = prefix + " <- ".join(("target", *below)) + SYNC * bool(sync)
                chain = ps.Chain(members, list(window), sync_each_step=sync)
                rows.append(alone(name=label, inner=inner, chain=chain, acceptance=acceptance))
        return rows


def measure(
    chains: ChosenChains, acceptances: Sequence[Chosen], repeats: int, batches: Sequence[int] = (1,)
) -> Iterator[list[dict[str, Any]]]:
    """Measure every chain at every pair of acceptances or trace, and batch size, in turns; yield
    the report's rows so far after every call. A chain that fails is a row with its error."""
    done, latest = list[dict[str, Any]](), list[dict[str, Any]]()
    for chosen, batch in itertools.product(acceptances, batches):
        chains.latest = rows = chains.rows(chosen, batch)
        calls = measuring.turns(rows, repeats, measuring.Clock(None), warm_up=WARM_UP)
        for _ in progress.bar(calls, total=repeats * len(rows), desc=f"{chosen}, batch {batch}"):
            latest = [row.report(rows[0]) for row in rows]
            yield [*done, *latest]
        done += latest


def replays(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the replays of captured graphs in a trace of torch's profiler, the longest in total
    first: their kernels and the gaps between them, in microseconds. Nodes of a launch have one
    correlation; replays with the same nodes in the same order are one row with medians."""
    launches: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            launches[event["args"]["correlation"]].append(event)
    kinds: dict[tuple[str, ...], list[list[dict[str, Any]]]] = defaultdict(list)
    for nodes in launches.values():
        if len(nodes) > 1:
            nodes.sort(key=lambda node: float(node["ts"]))
            kinds[tuple(node["name"] for node in nodes)].append(nodes)
    rows = []
    for names, same in kinds.items():
        spans = [nodes[-1]["ts"] + nodes[-1]["dur"] - nodes[0]["ts"] for nodes in same]
        columns = zip(*([float(node["dur"]) for node in nodes] for nodes in same), strict=True)
        times, span = list(map(statistics.median, columns)), statistics.median(spans)
        by_name: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        for name, microseconds in zip(names, times, strict=True):
            by_name[name][0] += 1
            by_name[name][1] += microseconds
        row = {"replays": len(same), "nodes": len(names), "us": span, "gaps_us": span - sum(times)}
        row["by_name"] = dict(sorted(by_name.items(), key=lambda item: -item[1][1]))
        rows.append(row)
    return sorted(rows, key=lambda row: -row["replays"] * row["us"])


def trace_of(call: Callable[[], object]) -> list[dict[str, Any]]:
    """Return the events of a call as torch's profiler exports them; times in microseconds."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        call()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(file))
        events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return events


def report_of(args: argparse.Namespace) -> dict[str, Any]:
    """Measure; return the JSON report, written to ``--json-file`` after every call."""
    end = time.perf_counter() + (args.seconds or float("inf"))
    output.require_device(args.device)
    shape = SHAPES[args.shape]
    layers = args.layers or shape.layers
    if layers > shape.layers:
        raise ValueError(f"--layers: expected an integer in [1, {shape.layers}], given {layers}")
    if wrong := [word for word in args.chains if word not in CHAINS]:
        raise ValueError(f"--chains: expected some of {', '.join(CHAINS)}, given {wrong[0]!r}")
    reduced = replace(shape, layers=layers)
    draft = replace(DRAFT_SHAPE, layers=min(layers, DRAFT_SHAPE.layers))
    require_memory(reduced, args.device)
    names = ("shape", "prompt", "max_new_tokens", "repeats")
    settings = {name: getattr(args, name) for name in names}
    report = {
        **output.header("shapes", 3, args.device),
        "settings": {**settings, "layers": layers, "of_layers": shape.layers, "warm_up": WARM_UP},
        "copy_gbs": measuring.copy_bandwidth(args.device),
    }
    chains = ChosenChains(
        reduced, draft, args.device, args.prompt, args.max_new_tokens,
        args.chains, args.sync_each_step,
    )  # fmt: skip
    report["weight_bytes"] = weight_bytes(chains.target.model)
    report["rows"] = []
    for report["rows"] in measure(chains, args.acceptance, args.repeats, args.batch):
        output.save(args, report)
        if time.perf_counter() > end:
            break
    if args.profile:
        # All sizes are captured: the rows of the last pair of acceptances have run.
        report["replays"] = [
            {"label": row.name, "graphs": replays(trace_of(partial(row.generate, 32)))}
            for row in chains.latest
        ]
        output.save(args, report)
    return report


def at_expected_length(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its time for a token, and its ratio to plain decoding, had its rounds been
    of the expected length: a text of some hundred tokens is one draw of the tables."""
    if "x_plain" not in row:
        return row
    luck = row["length"] / row["expected_length"]
    return row | {"expected_ms": row["ms_per_token"] * luck, "expected_x": row["x_plain"] / luck}


def markdown(report: dict[str, Any]) -> str:
    """Return the report as a table."""
    settings = report["settings"]
    numbers = {
        "ms_per_token": ".3f", "length": ".2f", "expected_length": ".2f",
        "expected_ms": ".3f", "expected_x": ".2f",
    }  # fmt: skip
    batched = any(row.get("batch", 1) > 1 for row in report["rows"])
    cells = []
    for row in map(at_expected_length, report["rows"]):
        window = ", ".join(map(str, row["window"]))
        name = f"{row['label']} ({window})" if window else row["label"]
        measured = [output.number(row.get(key), form) for key, form in numbers.items()]
        text = row["error"] or {True: "yes", False: "**NO**", None: "-"}[row.get("same_text")]
        batch = [str(row.get("batch", 1))] * batched
        cells.append([name, *batch, f"{row['outer']:g}", f"{row['inner']:g}", *measured, text])
    heads = ["chain (windows)", *["batch"] * batched, "outer", "inner", "ms per token"]
    heads += ["tokens per round", "expected", "ms per token, expected", "x plain, expected"]
    heads += ["same text as plain decoding"]
    floor = 1e-6 * report["weight_bytes"] / report["copy_gbs"]
    return "\n".join(
        [
            f"# Chains at the shape of {settings['shape']}, {report['machine']['device_name']}",
            "",
            f"{output.conditions(report)}. Random weights, {settings['layers']} of "
            f"{settings['of_layers']} layers; acceptance is chosen, not measured. Up to "
            f"{settings['max_new_tokens']} new tokens at temperature 0, medians of "
            f"{settings['repeats']} turns after {settings['warm_up']} calls of warm-up. Floor of a "
            f"pass of the target: {floor:.3f} ms, its weights over the copy bandwidth of "
            f"{report['copy_gbs']:.1f} GB/s, which counts bytes read and written. Expected: the "
            "time of a round over the expected number of its tokens, since one draw of the tables "
            "can be a lucky one.",
            "",
            *output.table(heads, cells, range(1, len(heads) - 1)),
        ]
    )


def _pair(text: str) -> Chosen:
    if text in traces.recorded():
        return text
    with contextlib.suppress(ValueError):
        outer, inner = map(float, text.split(":"))
        if 0 < outer < 1 and 0 < inner < 1:
            return outer, inner
    expected = "expected two numbers in (0, 1) with a colon between"
    expected += f", or {' or '.join(traces.recorded())}"
    raise argparse.ArgumentTypeError(f"{expected}, given {text!r}")


OPTIONS = (
    ("--shape", tuple(SHAPES), "llama2-7b", None, "of the target"),
    "--device",
    ("--layers", options.COUNT, None, "N", "make so many of the layers"),
    ("--acceptance", options.listed(_pair), [(0.93, 0.7), (0.97, 0.8)], "A:B,...",
     "of the W4 copy's tokens by the target, and of the drafter's by the level above it; or a "
     f"recorded trace: {', '.join(traces.recorded())}"),
    ("--chains", options.words, list(CHAINS), "WORD,...", f"of {', '.join(CHAINS)}"),
    ("--batch", options.COUNTS, [1], "N,...", "texts of a call"),
    ("--sync-each-step", "add every chain with rounds that the host follows"),
    ("--profile", "take the replays of every chain's graphs apart, into the JSON"),
    ("--prompt", options.COUNT, 32, "N", "tokens of a prompt"),
    ("--max-new-tokens", options.COUNT, 512, "N", "of a text"),
    ("--repeats", options.COUNT, 7, "N", "turns"),
    ("--seconds", options.COUNT, None, "S", "after which no turn begins, with making models"),
)  # fmt: skip
