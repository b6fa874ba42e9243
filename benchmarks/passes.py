"""``benchmarks shapes``: what the passes of a chain cost at the true shape of a published model,
with random weights, or those of the shipped models by how they run; with ``--chains``, chains with
a chosen acceptance (`chosen`)."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

import polyspec_ext as ps
from benchmarks import chosen, machine, output, timing
from benchmarks.chains import packed
from benchmarks.shapes import SHAPES, Shape, random_head, random_model, require_memory
from benchmarks.weights import weight_bytes
from polyspec_ext import progress, tiny
from polyspec_ext.cli import options
from polyspec_ext.drafters.eagle import HeadPasses
from polyspec_ext.drafters.trees import DynamicTree
from polyspec_ext.levels import HuggingFaceLevel, InputBlock, load_model
from polyspec_ext.quantization import quantize_w4
from polyspec_ext.tensors import RowCounts
from polyspec_ext.tuning import LevelConfig

SCHEMA = 2  # of the JSON report
TARGET, W4, HEAD, TREE = "target", "W4 copy", "EAGLE-2 head", "EAGLE-2 tree"
VERIFY = "verify"
EAGER, GRAPH = "eager", "graph"
WIDTHS = {"cpu": (1, 2, 4, 8, 12, 16), "cuda": (1, 2, 4, 8, 12, 16, 32, 60)}
TINY, SHIPPED_WIDTHS = "tiny", (1, 2, 4, 6, 8)
CHECKED = (1, 4, 8, 16)  # tokens verified at once
CONTEXT = 64  # tokens before a pass
TREE_DEPTH = 6
Pass = Callable[[], torch.Tensor]
Key = tuple[str, str, int]  # what, how it runs, tokens
Levels = Mapping[tuple[str, str], HuggingFaceLevel]  # by what and how it runs


def level_pass(level: HuggingFaceLevel, width: int, context: int, fixed: bool) -> Pass:
    """Return a pass of `width` tokens after `context` others, which is rolled back.

    Args:
        level: that has read the context.
        fixed: lengths are read on the device alone, so that a graph can be captured.
    """
    tokens = torch.arange(context, context + width, device=level.device) % level.vocab_size
    counts, first, kept = (
        RowCounts(None, torch.tensor([n], device=level.device)) for n in (width, 0, context)
    )
    block = InputBlock(tokens[None], width, counts, first)

    @torch.inference_mode()
    def eager() -> torch.Tensor:
        logits = level.forward(tokens[None], width)
        level.rollback([context])
        return logits

    @torch.inference_mode()
    def on_device() -> torch.Tensor:
        level.reserve_span(context + width)
        logits = level.forward(block).logits
        level.rollback(kept)
        level.note_lengths([context])
        return logits

    return on_device if fixed else eager


def head_pass(head: HeadPasses, width: int, context: int) -> Pass:
    """Return a step of a head over `width` tokens after `context` pairs, with its output head."""
    tokens = torch.zeros(1, width, dtype=torch.int64, device=head.device)
    states = _zeros(head, 1, width, head.config.hidden_size)
    seen = torch.eye(width, dtype=torch.bool, device=head.device)[None]

    @torch.inference_mode()
    def call() -> torch.Tensor:
        head.features.keep(RowCounts([context]))
        return head.logits(head.step(tokens, states, 1, seen))

    return call


def tree_draft(head: HeadPasses, context: int, depth: int = TREE_DEPTH) -> Pass:
    """Return the drafting of EAGLE-2's tree below one root."""
    tree, lengths = DynamicTree(), torch.tensor([depth], device=head.device)
    logits, states = _zeros(head, 1, head.vocab_size), _zeros(head, 1, 1, head.config.hidden_size)

    def expand(*step: Any) -> tuple[torch.Tensor, torch.Tensor]:
        states = head.step(*step)
        return states, head.logits(states)

    @torch.inference_mode()
    def call() -> torch.Tensor:
        head.features.keep(RowCounts([context]))
        return tree.grow(logits, states, lengths, depth, expand).tokens

    return call


def verification(head: HeadPasses, tokens: int) -> Pass:
    """Return the verification of so many tokens."""
    random = torch.Generator(head.device).manual_seed(tokens)
    rows = [
        torch.randn(1, n, head.vocab_size, device=head.device, generator=random).to(head.dtype)
        for n in (tokens + 1, tokens)
    ]
    drafted = rows[1].argmax(-1)
    return lambda: ps.verify(rows[0], drafted, rows[1], temperature=1.0, seed=0).tokens


def _zeros(head: HeadPasses, *form: int) -> torch.Tensor:
    return torch.zeros(*form, dtype=head.dtype, device=head.device)


@torch.inference_mode()
def _read(level: HuggingFaceLevel, context: int, longest: int) -> None:
    tokens = torch.arange(context, device=level.device)[None] % level.vocab_size
    level.reserve(context + longest)
    level.prefill(tokens)


@torch.inference_mode()
def read_pairs(head: HeadPasses, context: int, longest: int) -> None:
    """Begin a head's batch with `context` pairs."""
    head.begin(1, context + longest)
    tokens = torch.zeros(1, context, dtype=torch.int64, device=head.device)
    head.extend(tokens, _zeros(head, 1, context, head.config.feature_size), RowCounts([context]))


def _level_passes(levels: Levels, widths: Sequence[int], context: int) -> dict[Key, Pass]:
    for level in dict.fromkeys(levels.values()):
        _read(level, context, max(widths))
    return {
        (name, runs, width): level_pass(level, width, context, runs == GRAPH)
        for (name, runs), level in levels.items()
        for width in widths
    }


def published(
    shape: Shape, dtype: torch.dtype, device: str, widths: Sequence[int], context: int
) -> tuple[list[dict[Key, Pass]], dict[str, int]]:
    """Return the passes of a shape by kind, and the bytes of weights that a pass reads.

    Raises:
        ValueError: memory is short.
    """
    require_memory(shape, dtype, device, "; --layers N measures fewer")
    model = random_model(shape, dtype, device)
    copy = quantize_w4(model, 128)
    ways = (EAGER, GRAPH) if device == "cuda" else (EAGER,)
    both = {name: packed(some, name=name) for name, some in ((TARGET, model), (W4, copy))}
    levels = {(name, way): level for name, level in both.items() for way in ways}
    head = random_head(shape, both[TARGET])
    read_pairs(head, context, 16 * TREE_DEPTH)
    heads: dict[Key, Pass] = {}
    for way in ways:
        narrow = [width for width in widths if width <= 12]
        heads |= {(HEAD, way, width): head_pass(head, width, context) for width in narrow}
        heads[TREE, way, DynamicTree().total_tokens] = tree_draft(head, context)
    checks = {(VERIFY, ways[-1], tokens): verification(head, tokens) for tokens in CHECKED}
    tensors = (*head.network.parameters(), model.get_output_embeddings().weight)
    sizes = {TARGET: weight_bytes(model), W4: weight_bytes(copy)}
    sizes[HEAD] = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return [_level_passes(levels, widths, context), heads, checks], sizes


def shipped(widths: Sequence[int], context: int) -> tuple[dict[Key, Pass], list[str]]:
    """Return the passes of the shipped models on the CPU, by data type and packing; and what this
    processor cannot run."""
    levels: dict[tuple[str, str], HuggingFaceLevel] = {}
    left_out: list[str] = []
    for name, dtype in itertools.product(tiny.LEVELS, (torch.float32, torch.bfloat16)):
        with progress.loading(shown=False):
            model = load_model(tiny.path(name), dtype)
        for pack in (False, True):
            config = str(LevelConfig(dtype, pack))
            try:
                levels[name, config] = HuggingFaceLevel(model, pack=pack)
            except (ValueError, RuntimeError) as error:
                left_out.append(f"{name}/{config}: {error}")
    return _level_passes(levels, widths, context), left_out


def measured(
    calls: Mapping[Key, Pass],
    repeats: int,
    clock: timing.Clock,
    floors: Mapping[str, float],
    tick: Callable[[], object],
) -> tuple[list[dict[str, Any]], list[str]]:
    """Time passes in turns; return their rows, and what failed.

    Args:
        floors: milliseconds in which the weights can be read.
    """
    names = {"/".join(map(str, key)): key for key in calls}
    done, failures = timing.measure(
        [timing.Contender(name, calls[key], key[1] == GRAPH) for name, key in names.items()],
        repeats,
        clock,
        tick=tick,
    )
    rows = []
    for one in done:
        what, runs, tokens = names[one.name]
        if runs == GRAPH and not one.captured:
            failures[one.name] = "cannot be captured as a CUDA graph"
            continue
        ms, floor = 1e3 * median(one.seconds), floors.get(what)
        over = None if floor is None else ms / floor
        row = {"what": what, "runs": runs, "tokens": tokens, "ms": ms}
        rows.append({**row, "floor_ms": floor, "over_floor": over})
    return rows, [f"{name}: {reason}" for name, reason in failures.items()]


@torch.inference_mode()
def report_of(args: argparse.Namespace) -> dict[str, Any]:
    """Measure; return the JSON report, which is in ``--json-file`` after every kind of pass."""
    if args.chains and args.shape != TINY:
        return chosen.report_of(args)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: expected cpu where torch sees no CUDA device, given cuda")
    settings: dict[str, Any] = {"shape": args.shape, "repeats": args.repeats}
    settings |= {"context": args.context}
    report: dict[str, Any] = {
        **machine.header("shapes", SCHEMA, args.device),
        "settings": settings,
        "load": {"before": machine.load_average()},
    }
    if args.shape == TINY:
        if args.layers is not None or args.device != "cpu":
            raise ValueError("--layers, --device: expected neither with --shape tiny")
        calls, left_out = shipped(args.tokens or SHIPPED_WIDTHS, args.context)
        kinds, sizes = [calls], dict[str, int]()
    else:
        shape, left_out = SHAPES[args.shape], []
        layers = args.layers or shape.layers
        if layers > shape.layers:
            raise ValueError(
                f"--layers: expected an integer in [1, {shape.layers}], given {layers}"
            )
        settings |= {"layers": layers, "of_layers": shape.layers, "dtype": args.dtype}
        widths = sorted({1, *(args.tokens or WIDTHS[args.device])})
        part, dtype = replace(shape, layers=layers), getattr(torch, args.dtype)
        kinds, sizes = published(part, dtype, args.device, widths, args.context)
    clock = timing.clock_of(args.device)
    copy_gbs = timing.copy_bandwidth(clock, args.device) if sizes else 0.0
    report |= {"weight_bytes": sizes, "copy_gbs": copy_gbs, "passes": [], "left_out": left_out}
    floors = {what: 1e-6 * size / copy_gbs for what, size in sizes.items()}
    total = args.repeats * len(kinds)
    with progress.bar(total=total, desc="passes", leave=False) as bar:
        for some in kinds:
            rows, failed = measured(some, args.repeats, clock, floors, bar.update)
            report["passes"] += rows
            report["left_out"] += failed
            output.save(args, report)
    return report


def markdown(report: dict[str, Any]) -> str:
    """Return the report as a table."""
    settings, rows = report["settings"], report.get("passes")
    if rows is None:
        return chosen.markdown(report)
    copy = layers = ""
    if report["weight_bytes"]:
        copy = (
            f", copy bandwidth {report['copy_gbs']:.1f} GB/s. Floor: the weights of the pass over "
            "the copy bandwidth, which counts bytes read and written"
        )
        layers = f", random weights, {settings['layers']} of {settings['of_layers']} layers"
    widths = sorted({row["tokens"] for row in rows})
    cells: dict[str, dict[int, str]] = {}
    for row in rows:
        over = "" if row["over_floor"] is None else f" ({row['over_floor']:.2f}x)"
        columns = cells.setdefault(f"{row['what']}, {row['runs']}", {})
        columns[row["tokens"]] = f"{row['ms']:.3f}{over}"
    shares = [1 / row["over_floor"] for row in rows if row["over_floor"]]
    table = ([name, *(own.get(n, "") for n in widths)] for name, own in cells.items())
    return "\n".join(
        [
            f"# Passes of {settings['shape']}{layers}, {report['machine']['device_name']}",
            "",
            f"{report['machine']['cpu_capability']}, {machine.conditions(report)}{copy}. "
            f"Milliseconds after {settings['context']} tokens (times the floor), medians of "
            f"{settings['repeats']} turns.",
            "",
            *output.table(["", *map(output.token_count, widths)], table, range(1, 99)),
            *(text for line in machine.contradiction(shares) for text in ("", line)),
            *(f"Left out: {one}" for one in report["left_out"]),
        ]
    )


def add_command(kinds: Any) -> None:
    """Add ``shapes`` to the kinds of benchmarks."""
    sub = kinds.add_parser(
        "shapes",
        help="passes at the true shape of a published model, with random weights",
        description="Times the passes of a target, its 4-bit copy and an EAGLE-2 head at the true "
        "shape of a published model, with random weights, against the bandwidth floor. Prints "
        "Markdown, or JSON.",
    )
    sub.add_argument(
        "--shape",
        choices=(*SHAPES, TINY),
        required=True,
        help=f"{TINY}: the shipped models, by data type and packing",
    )
    options.add_device(sub)
    output.add_report(sub, report_of, markdown)
    sub.add_argument(
        "--layers", type=options.COUNT, metavar="N", help="make N of the layers (default: all)"
    )
    sub.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="(default: %(default)s)",
    )
    sub.add_argument("--tokens", type=options.COUNTS, metavar="N,...", help="of a pass")
    options.add_count(sub, "--context", CONTEXT, "tokens before a pass")
    options.add_count(sub, "--repeats", 7, "turns")
    chosen.add_options(sub)
