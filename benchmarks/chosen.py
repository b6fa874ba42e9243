"""Time chains at the true shape of a published model, with a chosen acceptance.

A target, its 4-bit copy, an EAGLE-2 head and a small model have random weights, so a pass takes the
time of that shape. Acceptance is drawn before the run: each level has a table with a token per
position, and a large logit at that token. The target's table is the text. A level below has the
token of the level above with probability `a`, else another token, independently at each position.
At temperature 0 every verification accepts with probability `a`.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import polyspec_ext as ps
from benchmarks import measuring, output
from benchmarks.shapes import SHAPES, Shape, random_head, random_model, require_memory, weight_bytes
from polyspec_ext import progress
from polyspec_ext.cli import options
from polyspec_ext.drafters.eagle import Eagle
from polyspec_ext.levels import HuggingFaceLevel, InputBlock, LevelOutput
from polyspec_ext.ops import unchecked
from polyspec_ext.planning.theory import Acceptance, ConstantSeconds, expectation
from polyspec_ext.quantization import quantize_w4

PLAIN, EAGER = "plain decoding", "plain decoding, no graphs"
FUSED = "fused layers: "  # of the target and its head; the W4 copy always has them
W4, HEAD, DRAFT = "W4 copy", "EAGLE head", "draft"
DRAFT_SHAPE = SHAPES["qwen2.5-0.5b"]
PROMPT = 32  # tokens
LARGE = 1.0e4  # logit of the table's token
WARM_UP = 2  # calls as long as the run: the first is eager, the second captures
# Windows by the levels below the target.
WINDOWS: dict[tuple[str, ...], tuple[tuple[int, ...], ...]] = {
    (HEAD,): ((4,), (6,)),
    (DRAFT,): ((3,),),
    (W4,): ((6,),),
    (W4, HEAD): ((8, 4), (12, 4)),
    (W4, DRAFT): ((8, 3),),
}


class ChosenLevel(HuggingFaceLevel):
    """A level with the largest logit at the token of a table."""

    # [P], the token at each position; None: the model's logits, for the checks of a new level.
    table: torch.Tensor | None = None

    def run(self, block: InputBlock) -> LevelOutput:
        result = super().run(block)
        if self.table is None:
            return result
        width, keep = block.tokens.shape[1], result.logits.shape[1]
        first = width - keep if block.first is None else block.first.on(self.device)
        begin = self.cache.rows.base + first  # `base`: cached lengths before the pass
        positions = begin[:, None] + torch.arange(1, keep + 1, device=self.device)
        return result._replace(logits=chosen(result.logits, self.table, positions))


def chosen(logits: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return logits ``[B, n, V]`` with `LARGE` at the table's tokens of positions ``[B, n]``."""
    tokens = table[positions.clamp(0, len(table) - 1)]
    return logits.scatter(2, tokens.expand(logits.shape[:2])[..., None], LARGE)


def choosing_draw(table: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return `ops.unchecked.draw` for a drafter with the largest logit at the table's token."""

    def draw(
        logits: torch.Tensor, parameters: Any, positions: torch.Tensor, rounds: torch.Tensor,
        level: int, column: int, *outputs: Any,
    ) -> torch.Tensor:  # fmt: skip
        logits = chosen(logits, table, (positions + column)[:, None])
        return unchecked.draw(logits, parameters, positions, rounds, level, column, *outputs)

    return draw


class Tables:
    """Tokens by position of the target and the levels below. Ids of the text are in
    ``[2, vocab)``; 1 and 0 are rejected. The tensors keep their addresses."""

    def __init__(self, length: int, vocab: int, device: torch.device) -> None:
        self._random = torch.Generator().manual_seed(0)
        text = torch.randint(2, vocab, (length,), generator=self._random)
        self.target = text.to(device)
        self.second, self.third, self.below = (self.target.clone() for _ in range(3))

    def draw(self, outer: float, inner: float) -> None:
        """Draw the tables of the levels below: `second` and `below` from the target's, with
        probability `outer` and `inner` of the same token, `third` from `second` with `inner`."""
        for table, above, acceptance, rejected in (
            (self.second, self.target, outer, 1),
            (self.third, self.second, inner, 0),
            (self.below, self.target, inner, 1),
        ):
            rejects = torch.rand(len(above), generator=self._random) >= acceptance
            table.copy_(torch.where(rejects.to(above.device), rejected, above))


@dataclass
class Row:
    """A chain at a pair of acceptances, with `tokens` new tokens of a call."""

    label: str
    outer: float
    inner: float
    tokens: int
    chain: ps.Chain
    acceptance: tuple[float, ...] = ()
    output: Any = None

    def __post_init__(self) -> None:
        self.timed = measuring.Contender(self.label, self.call)

    def call(self) -> float:
        """Generate, keep the result and return the seconds of decoding."""
        options: dict[str, Any] = {"temperature": 0.0, "eos_token_id": []}
        self.output = self.chain.generate([[3] * PROMPT], self.tokens, **options)
        return float(self.output.stats.decode_seconds)

    def report(self, plain: Row) -> dict[str, Any]:
        """Return the row of the JSON report."""
        row: dict[str, Any] = {name: getattr(self, name) for name in ("label", "outer", "inner")}
        row |= {"window": list(self.chain.window), "error": self.timed.error}
        seconds, length, expected = self.timed.seconds, 1.0, 1.0
        if not seconds or self.timed.error is not None:
            return row
        levels = self.output.stats.levels
        if self.acceptance:
            ones = ConstantSeconds([1.0] * (len(self.acceptance) + 1))
            accept = Acceptance.constant(*self.acceptance)
            expected = expectation(self.chain.window, self.chain.rounds, accept, ones).length
            length = levels[0].mean_acceptance_length
        row |= {
            "ms_per_token": 1e3 * statistics.median(seconds) / self.tokens,
            "levels": [{"name": row.name, "passes": row.num_forward_passes} for row in levels],
            "length": length,
            "expected_length": expected,
        }
        if plain.timed.seconds:
            pairs = zip(plain.timed.seconds, seconds, strict=False)
            row["x_plain"] = statistics.median(a / b for a, b in pairs)
            row["same_text"] = bool(self.output.sequences.equal(plain.output.sequences))
        return row


class ChosenChains:
    """The models of a shape, a small model, and their chains with a chosen acceptance.

    Args:
        tokens: new tokens of a call.
    """

    def __init__(self, shape: Shape, draft: Shape, device: str, tokens: int) -> None:
        self.tokens, self.device = tokens, torch.device(device)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model = random_model(shape, dtype, device)
        group = next(g for g in (128, 64, 32) if shape.hidden % g == 0 and shape.inner % g == 0)
        small = random_model(replace(draft, vocab=shape.vocab), dtype, device)
        self.tables = tables = Tables(PROMPT + tokens + 256, shape.vocab, self.device)
        lowest = (tables.below, tables.third)  # of chains of two levels, and of three
        self.drafts = [ChosenLevel(small, name=DRAFT) for _ in lowest]
        self.drafts[0].table, self.drafts[1].table = lowest
        quantised = quantize_w4(model, group)
        self.targets, self.copies, self.heads = [], [], []
        for pack in (False, True) if device == "cuda" else (False,):
            target = ChosenLevel(model, name="target", pack=pack)
            copy = ChosenLevel(quantised, name=W4, shares_cache_with=target)
            target.table, copy.table = tables.target, tables.second
            head = random_head(shape, target)
            self.targets.append(target)
            self.copies.append(copy)
            self.heads.append([Eagle(head, name=HEAD, draw=choosing_draw(t)) for t in lowest])

    def rows(self, outer: float, inner: float) -> list[Row]:
        """Draw the tables of a pair of acceptances; return its chains, plain decoding first."""
        self.tables.draw(outer, inner)
        rows = []
        add = partial(Row, outer=outer, inner=inner, tokens=self.tokens)
        for prefix, target, copy, heads in zip(
            ("", FUSED), self.targets, self.copies, self.heads, strict=False
        ):
            rows.append(add(prefix + PLAIN, chain=ps.Chain([target])))
            if self.device.type == "cuda" and not prefix:
                rows.append(add(EAGER, chain=ps.Chain([target], graphs=False)))
            for below, windows in WINDOWS.items():
                three = len(below) > 1
                parts = {W4: copy, HEAD: heads[three], DRAFT: self.drafts[three]}
                acceptance = (outer, inner) if three else (outer if below == (W4,) else inner,)
                label = prefix + " <- ".join(("target", *below))
                for window in windows:
                    chain = ps.Chain([target, *(parts[name] for name in below)], list(window))
                    rows.append(add(label, chain=chain, acceptance=acceptance))
        return rows


def measure(
    chains: ChosenChains, acceptances: Sequence[tuple[float, float]], repeats: int
) -> Iterator[list[dict[str, Any]]]:
    """Measure every chain at every pair of acceptances, in turns; yield the report's rows so far
    after every call. A chain that fails is a row with its error."""
    done, latest = list[dict[str, Any]](), list[dict[str, Any]]()
    for outer, inner in acceptances:
        rows = chains.rows(outer, inner)
        timed, clock = [row.timed for row in rows], measuring.Clock(None)
        calls = measuring.turns(timed, repeats, clock, warm_up=WARM_UP)
        for _ in progress.bar(calls, total=repeats * len(rows), desc=f"{outer:g}, {inner:g}"):
            latest = [row.report(rows[0]) for row in rows]
            yield [*done, *latest]
        done += latest


def report_of(args: argparse.Namespace) -> dict[str, Any]:
    """Measure; return the JSON report, written to ``--json-file`` after every call."""
    end = time.perf_counter() + (args.seconds or float("inf"))
    output.require_device(args.device)
    shape = SHAPES[args.shape]
    layers = args.layers or shape.layers
    if layers > shape.layers:
        raise ValueError(f"--layers: expected an integer in [1, {shape.layers}], given {layers}")
    reduced = replace(shape, layers=layers)
    draft = replace(DRAFT_SHAPE, layers=min(layers, DRAFT_SHAPE.layers))
    require_memory(reduced, args.device, "; --layers N makes fewer")
    settings = {name: getattr(args, name) for name in ("shape", "max_new_tokens", "repeats")}
    report = {
        **output.header("shapes", 3, args.device),
        "settings": {**settings, "layers": layers, "of_layers": shape.layers, "warm_up": WARM_UP},
        "copy_gbs": measuring.copy_bandwidth(args.device),
    }
    chains = ChosenChains(reduced, draft, args.device, args.max_new_tokens)
    report["weight_bytes"] = weight_bytes(chains.targets[0].model)
    report["rows"] = []
    for report["rows"] in measure(chains, args.acceptance, args.repeats):
        output.save(args, report)
        if time.perf_counter() > end:
            break
    return report


def markdown(report: dict[str, Any]) -> str:
    """Return the report as a table."""
    settings = report["settings"]
    numbers = {"ms_per_token": ".3f", "x_plain": ".2f", "length": ".2f", "expected_length": ".2f"}
    cells = []
    for row in report["rows"]:
        window = ", ".join(map(str, row["window"]))
        name = f"{row['label']} ({window})" if window else row["label"]
        measured = [output.number(row.get(key), form) for key, form in numbers.items()]
        text = row["error"] or {True: "yes", False: "**NO**", None: "-"}[row.get("same_text")]
        cells.append([name, f"{row['outer']:g}", f"{row['inner']:g}", *measured, text])
    heads = ["chain (windows)", "outer", "inner", "ms per token", "x plain", "tokens per round"]
    heads += ["expected", "text as plain decoding"]
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
            f"{report['copy_gbs']:.1f} GB/s, which counts bytes read and written.",
            "",
            *output.table(heads, cells, range(1, 7)),
        ]
    )


def _pair(text: str) -> tuple[float, float]:
    with contextlib.suppress(ValueError):
        outer, inner = map(float, text.split(":"))
        if 0 < outer < 1 and 0 < inner < 1:
            return outer, inner
    expected = "expected two numbers in (0, 1) with a colon between"
    raise argparse.ArgumentTypeError(f"{expected}, given {text!r}")


OPTIONS = (
    ("--shape", tuple(SHAPES), "llama2-7b", None, "of the target"),
    "--device",
    ("--layers", options.COUNT, None, "N", "make so many of the layers"),
    ("--acceptance", options.listed(_pair), [(0.93, 0.7), (0.97, 0.8)], "A:B,...",
     "of the W4 copy's tokens by the target, and of the drafter's by the level above it"),
    ("--max-new-tokens", options.COUNT, 128, "N", "of a call"),
    ("--repeats", options.COUNT, 7, "N", "turns"),
    ("--seconds", options.COUNT, None, "S", "after which no turn begins, with making models"),
)  # fmt: skip
