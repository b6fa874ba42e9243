"""``shapes``: what the passes of a chain cost at the true shape of a published model, without
its weights, and the speedup that follows from these times at given acceptances.

Weights are random, so nothing here is an acceptance: every speedup is a prediction from measured
times by the renewal model (`planning.theory`), and is called that.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch

import polyspec_ext as ps
from benchmarks import chosen, machine, output, timing
from benchmarks.memory import require_memory
from benchmarks.published_shapes import SHAPES, Shape
from benchmarks.random_models import random_head, random_model
from benchmarks.weights import weight_bytes
from polyspec_ext import progress, tiny
from polyspec_ext.cli import options
from polyspec_ext.drafters.eagle import HeadPasses
from polyspec_ext.drafters.trees import DynamicTree
from polyspec_ext.levels import HuggingFaceLevel, InputBlock, load_model
from polyspec_ext.planning.measure import Times
from polyspec_ext.planning.theory import Acceptance, expectation
from polyspec_ext.quantization import quantize_w4
from polyspec_ext.tensors import RowCounts
from polyspec_ext.tuning import LevelConfig

SCHEMA = 1  # of the JSON report
TARGET, W4, HEAD, TREE = "target", "W4 copy", "EAGLE-2 head", "EAGLE-2 tree"
_END, _VERIFY = "output head", "verify"
EAGER, GRAPH = "eager", "graph"
WIDTHS = {"cpu": (1, 2, 4, 8, 12, 16), "cuda": (1, 2, 4, 8, 12, 16, 32, 60)}
TINY, SHIPPED_WIDTHS = "tiny", (1, 2, 4, 6, 8)
CHECKED = (1, 4, 8, 16)  # tokens verified at once
CONTEXT, LONG = 64, 1024  # tokens before a pass
GROUP = 128
TREE_DEPTH = 6
MS = 1e3
LABEL = (
    "A prediction from measured times; random weights say nothing about acceptance. Acceptances "
    "are assumed, and the same at every token."
)
# Assumed: of the W4 copy's tokens by the target; of the head's by either.
OUTER, INNER = (0.85, 0.90, 0.93, 0.95, 0.97, 0.99), (0.6, 0.7, 0.8)
# Windows tried: of two levels, and of three.
TWO = tuple((n,) for n in range(1, 9))
THREE = tuple((m, n) for m in (4, 8, 12, 16, 20) for n in (2, 4, 6))
Pass = Callable[[], torch.Tensor]
Key = tuple[str, str, int]  # what, how it runs, tokens
Levels = Mapping[tuple[str, str], HuggingFaceLevel]  # by what and how it runs


# ---- passes --------------------------------------------------------------------------------------


def level_pass(level: HuggingFaceLevel, width: int, context: int, fixed: bool) -> Pass:
    """A pass of `width` tokens behind `context` others, which is rolled back.

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
    """A step of a head over `width` tokens behind `context` pairs, with its output head."""
    tokens = torch.zeros(1, width, dtype=torch.int64, device=head.device)
    states = _zeros(head, 1, width, head.config.hidden_size)
    seen = torch.eye(width, dtype=torch.bool, device=head.device)[None]

    @torch.inference_mode()
    def call() -> torch.Tensor:
        head.features.keep(RowCounts([context]))
        return head.logits(head.step(tokens, states, 1, seen))

    return call


def tree_draft(head: HeadPasses, context: int, depth: int = TREE_DEPTH) -> Pass:
    """EAGLE-2's tree below one root: as many levels of the head as it is deep, and its choice."""
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


def _zeros(head: HeadPasses, *form: int) -> torch.Tensor:
    return torch.zeros(*form, dtype=head.dtype, device=head.device)


@torch.inference_mode()
def _read(level: HuggingFaceLevel, context: int, longest: int) -> None:
    tokens = torch.arange(context, device=level.device)[None] % level.vocab_size
    level.reserve(context + longest)
    level.prefill(tokens)


@torch.inference_mode()
def _read_pairs(head: HeadPasses, context: int, longest: int) -> None:
    head.begin(1, context + longest)
    tokens = torch.zeros(1, context, dtype=torch.int64, device=head.device)
    head.extend(tokens, _zeros(head, 1, context, head.config.feature_size), RowCounts([context]))


def _verification(head: HeadPasses, tokens: int) -> Pass:
    random = torch.Generator(head.device).manual_seed(tokens)
    rows = [
        torch.randn(1, n, head.vocab_size, device=head.device, generator=random).to(head.dtype)
        for n in (tokens + 1, tokens)
    ]
    drafted = rows[1].argmax(-1)
    return lambda: ps.verify(rows[0], drafted, rows[1], temperature=1.0, seed=0).tokens


def _timed(
    calls: Mapping[Key, Pass],
    repeats: int,
    clock: timing.Clock,
    tick: Callable[[], object] = lambda: None,
) -> tuple[dict[Key, float], list[str]]:
    """Median seconds, and what failed."""
    names = {"/".join(map(str, key)): key for key in calls}
    contenders = [
        timing.Contender(name, calls[key], graph=key[1] == GRAPH) for name, key in names.items()
    ]
    done, failures = timing.measure(contenders, repeats, clock, tick=tick)
    found = {}
    for one in done:
        key = names[one.name]
        if key[1] == GRAPH and not one.captured:
            failures[one.name] = "cannot be captured as a CUDA graph"
            continue
        found[key] = median(one.seconds)
    return found, [f"{name}: {reason}" for name, reason in failures.items()]


def measure(
    shape: Shape,
    *,
    layers: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    widths: Sequence[int] | None = None,
    repeats: int = 7,
    save: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """Make the models and time their passes, those of a kind in turns.

    Args:
        layers: measured in place of the shape's; the whole is extrapolated by their number.
        widths: tokens of a pass; 1 is always among them.
        save: called with the report so far behind every kind of pass.

    Returns:
        what the JSON report has of it: passes, verification and predictions.

    Raises:
        ValueError: `layers` is not in 1 ... the shape's, or memory is short.
    """
    if layers is not None and not 1 <= layers <= shape.layers:
        raise ValueError(f"layers: expected an integer in [1, {shape.layers}], given {layers}")
    part = replace(shape, layers=layers or shape.layers)
    require_memory(part, dtype, device, "; --layers N measures fewer and extrapolates")
    widths = sorted({1, *(widths or WIDTHS[device])})
    with progress.bar(total=2, desc="models", leave=False) as bar:
        model = random_model(part, dtype, device)
        bar.update()
        copy = quantize_w4(model, GROUP)
        bar.update()
    left_out: list[str] = []
    models = {TARGET: model, W4: copy}
    levels = {(n, EAGER): _level(m, n, device, left_out) for n, m in models.items()}
    if device == "cuda":
        levels |= {(name, GRAPH): levels[name, EAGER] for name in models}
    target = levels[TARGET, EAGER]
    head = random_head(part, target)
    clock: timing.Clock = timing.CpuClock() if device == "cpu" else timing.CudaClock()
    for level in dict.fromkeys(levels.values()):
        _read(level, CONTEXT, max(widths))
    _read_pairs(head, CONTEXT, 16 * TREE_DEPTH)
    copy_gbs = timing.copy_bandwidth(clock, device)
    embedding = model.get_output_embeddings().weight
    bytes_of = {
        TARGET: weight_bytes(model),
        W4: weight_bytes(copy),
        HEAD: sum(p.numel() * p.element_size() for p in (*head.network.parameters(), embedding)),
    }
    # Milliseconds in which the weights can be read.
    floors = {what: 1e-6 * size / copy_gbs for what, size in bytes_of.items()}
    found: dict[Key, float] = {}
    long: dict[Key, float] = {}
    rollback: float | None = None

    def measured() -> dict[str, Any]:
        passes = {key: s for key, s in found.items() if key[0] not in (_END, _VERIFY)}
        whole = {key: _whole(key, s, found, shape, part) for key, s in passes.items()}
        verify = {key[2]: s for key, s in found.items() if key[0] == _VERIFY}
        return {
            "copy_gbs": copy_gbs,
            "passes": [
                {
                    "what": key[0],
                    "runs": key[1],
                    "tokens": key[2],
                    "ms": MS * seconds,
                    "whole_ms": MS * whole[key],
                    "floor_ms": (floor := floors.get(key[0])),
                    "over_floor": None if floor is None else MS * seconds / floor,
                }
                for key, seconds in passes.items()
            ],
            "behind_long_context": [
                {
                    "what": key[0],
                    "runs": key[1],
                    "whole_ms": MS * _whole(key, s, found, shape, part),
                }
                for key, s in long.items()
            ],
            "verify_ms": {str(n): MS * s for n, s in verify.items()},
            "rollback_us": None if rollback is None else 1e6 * rollback,
            "weight_bytes": bytes_of,
            "left_out": left_out,
            "predictions": _predictions(whole, verify),
        }

    kinds = _calls(levels, head, widths, (EAGER, GRAPH) if device == "cuda" else (EAGER,))
    total = repeats * len(kinds)
    with progress.bar(total=total, desc="passes", leave=False) as bar, torch.inference_mode():
        for calls in kinds:
            some, failed = _timed(calls, repeats, clock, bar.update)
            found |= some
            left_out += failed
            save(measured())
    for level in dict.fromkeys(levels.values()):
        _read(level, LONG, 1)
    long, failed = _timed(_level_passes(levels, [1], LONG), repeats, clock)
    left_out += failed
    rollback = _rollback_seconds(target)
    return measured()


def _level_passes(levels: Levels, widths: Sequence[int], context: int) -> dict[Key, Pass]:
    return {
        (name, runs, width): level_pass(level, width, context, runs == GRAPH)
        for (name, runs), level in levels.items()
        for width in widths
    }


def _calls(
    levels: Levels, head: HeadPasses, widths: Sequence[int], ways: Sequence[str]
) -> list[dict[Key, Pass]]:
    """Return what is timed behind `CONTEXT` tokens, by kind; heads and verifications in `ways`. The
    output head comes first, since passes of a part of the layers are extrapolated by it."""
    target, narrow = levels[TARGET, EAGER], [width for width in widths if width <= 12]
    ends: dict[Key, Pass] = {}
    heads: dict[Key, Pass] = {}
    for way in ways:
        for width in widths:
            states = _zeros(head, 1, width, head.config.hidden_size)
            ends[_END, way, width] = partial(target.output_head, states)
        heads |= {(HEAD, way, width): head_pass(head, width, CONTEXT) for width in narrow}
        heads[TREE, way, DynamicTree().total_tokens] = tree_draft(head, CONTEXT)
    checks = {(_VERIFY, ways[-1], tokens): _verification(head, tokens) for tokens in CHECKED}
    return [ends, _level_passes(levels, widths, CONTEXT), heads, checks]


def _predictions(whole: Mapping[Key, float], verify: Mapping[int, float]) -> list[dict[str, Any]]:
    """Of every way in which the target's passes run; what does not run so runs eagerly."""
    made = []
    for runs in dict.fromkeys(key[1] for key in whole if key[0] == TARGET):
        target, copy, head = (
            Times(_by_tokens(whole, what, runs) or _by_tokens(whole, what, EAGER))
            for what in (TARGET, W4, HEAD)
        )
        if verify and target.seconds and copy.seconds and head.seconds:
            check = Times({0: min(verify.values()), **verify})
            made.append({"runs": runs, "rows": predicted(target, copy, head, check)})
    return made


def _by_tokens(seconds: Mapping[Key, float], what: str, runs: str) -> dict[int, float]:
    return {key[2]: own for key, own in seconds.items() if key[:2] == (what, runs)}


def _level(model: Any, name: str, device: str, notes: list[str]) -> HuggingFaceLevel:
    if device == "cpu":
        try:
            return HuggingFaceLevel(model, name=name, pack=True)
        except ValueError as error:  # a type that oneDNN does not multiply here
            notes.append(f"{name}: weights not packed: {error}")
    return HuggingFaceLevel(model, name=name)


def _rollback_seconds(level: HuggingFaceLevel) -> float:
    level.forward(torch.zeros(1, 1, dtype=torch.int64, device=level.device), 1)
    began = time.perf_counter()
    for _ in range(100):
        level.rollback([LONG])
    return (time.perf_counter() - began) / 100


def _whole(
    key: Key, seconds: float, found: Mapping[Key, float], shape: Shape, part: Shape
) -> float:
    if key[0] not in (TARGET, W4) or shape.layers == part.layers:
        return seconds
    way = key[1] if (_END, key[1], key[2]) in found else EAGER
    end = min(found.get((_END, way, key[2]), 0.0), seconds)  # it may be the slower by chance
    return end + (seconds - end) * shape.layers / part.layers


# ---- the shipped models --------------------------------------------------------------------------


def _shipped_report(args: argparse.Namespace) -> dict[str, Any]:
    """Passes of the shipped models on the CPU, by data type and packing; and what this processor
    cannot run."""
    if args.layers is not None or args.device != "cpu":
        raise ValueError("--layers, --device: expected neither with --shape tiny")
    before, widths = machine.load_average(), args.tokens or SHIPPED_WIDTHS
    levels: dict[tuple[str, str], HuggingFaceLevel] = {}
    left_out: list[str] = []
    for name, dtype in itertools.product(tiny.LEVELS, (torch.float32, torch.bfloat16)):
        with progress.loading(shown=False):
            model = load_model(tiny.path(name), dtype)
        for pack in (False, True):
            config = str(LevelConfig(dtype, pack))
            try:
                level = HuggingFaceLevel(model, pack=pack)
                _read(level, CONTEXT, max(widths))
            except (ValueError, RuntimeError) as error:
                left_out.append(f"{name}/{config}: {error}")
            else:
                levels[name, config] = level
    with progress.bar(total=args.repeats, desc="passes", leave=False) as bar:
        calls = _level_passes(levels, widths, CONTEXT)
        found, failed = _timed(calls, args.repeats, timing.CpuClock(), bar.update)
    return {
        **machine.header("shapes", SCHEMA, "cpu"),
        "settings": {"shape": TINY, "repeats": args.repeats, "context": CONTEXT},
        "load": {"before": before, "after": machine.load_average()},
        "passes": [
            {"what": what, "runs": runs, "tokens": tokens, "ms": MS * seconds}
            for (what, runs, tokens), seconds in found.items()
        ],
        "left_out": [*left_out, *failed],
    }


def _shipped_markdown(report: dict[str, Any]) -> str:
    rows: dict[str, list[str]] = {}
    for one in report["passes"]:
        rows.setdefault(f"{one['what']}, {one['runs']}", []).append(f"{one['ms']:.2f}")
    widths = dict.fromkeys(one["tokens"] for one in report["passes"])
    return "\n".join(
        [
            f"# Forward passes of the shipped models, {report['machine']['cpu']}",
            "",
            f"{report['machine']['cpu_capability']}, {machine.conditions(report)}. Milliseconds of "
            f"one pass of one sequence, medians of {report['settings']['repeats']} turns.",
            "",
            *output.table(
                ["", *map(output.token_count, widths)],
                ([name, *cells] for name, cells in rows.items()),
            ),
            *(f"Left out: {one}" for one in report["left_out"]),
        ]
    )


# ---- prediction ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimedPasses:
    """`theory.PassSeconds` of measured times, of one row.

    Args:
        passes: of every level, the target first, by tokens read.
        check: of a verification beside its pass, by tokens verified.
    """

    passes: Sequence[Times]
    check: Times

    def verify(self, level: int, pending: int) -> float:
        return self.passes[level - 1].at(pending + 1) + self.check.at(pending)

    def draft(self, tokens: int) -> float:
        return tokens * self.passes[-1].at(1)


def predicted(
    target: Times,
    copy: Times,
    head: Times,
    check: Times,
    outer: Sequence[float] = OUTER,
    inner: Sequence[float] = INNER,
) -> list[dict[str, Any]]:
    """Speedups over plain decoding by assumed acceptances, each with the best of the windows tried.

    Args:
        target, copy, head: seconds of passes by tokens read; `check`: of a verification.
        outer: acceptances of the copy's tokens by the target.
        inner: acceptances of the head's tokens, by the copy and by the target alike.

    Returns:
        A row per pair: of the target with the head, with the copy, and with both, the speedup and
        the windows.
    """
    plain = target.at(1) + check.at(0)
    rows = []
    for above in outer:
        with_copy = _best(TWO, [above], [target, copy], check)
        for below in inner:
            two = _best(TWO, [below], [target, head], check)
            three = _best(THREE, [above, below], [target, copy, head], check)
            row: dict[str, Any] = {"outer": above, "inner": below}
            ways = (("head", two), ("copy", with_copy), ("both", three))
            for name, (rate, windows) in ways:
                row |= {name: rate * plain, f"{name}_windows": list(windows)}
            rows.append(row | {"both_over_two": three[0] / max(two[0], with_copy[0])})
    return rows


def _best(
    tried: Sequence[tuple[int, ...]],
    acceptances: Sequence[float],
    passes: Sequence[Times],
    check: Times,
) -> tuple[float, tuple[int, ...]]:
    """Tokens per second and windows of the fastest."""
    seconds, accept = TimedPasses(passes, check), Acceptance.constant(*acceptances)

    def rate(windows: tuple[int, ...]) -> float:
        unbounded = [0] * (len(windows) - 1)
        return expectation(windows, unbounded, accept, seconds).tokens_per_second

    return max((rate(windows), windows) for windows in tried)


# ---- report --------------------------------------------------------------------------------------


def report_of(args: argparse.Namespace) -> dict[str, Any]:
    """Measures; gives the report that the JSON holds."""
    if args.shape == TINY:
        return _shipped_report(args)
    if args.chains:
        return chosen.report_of(args)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: expected cpu where torch sees no CUDA device, given cuda")
    shape, before = SHAPES[args.shape], machine.load_average()
    layers = args.layers or shape.layers

    def report(measured: dict[str, Any]) -> dict[str, Any]:
        return {
            **machine.header("shapes", SCHEMA, args.device),
            "label": LABEL,
            "settings": {
                "shape": args.shape,
                "layers": layers,
                "of_layers": shape.layers,
                "extrapolated": layers != shape.layers,
                "dtype": args.dtype,
                "repeats": args.repeats,
                "context": CONTEXT,
                "long_context": LONG,
                "group": GROUP,
            },
            "load": {"before": before, "after": machine.load_average()},
            **measured,
        }

    return report(
        measure(
            shape,
            layers=args.layers,
            dtype=getattr(torch, args.dtype),
            device=args.device,
            widths=args.tokens,
            repeats=args.repeats,
            save=lambda measured: output.save(args, report(measured)),
        )
    )


_PREDICTED = (
    "target accepts the copy's", "the head's are accepted", "with the head", "with the copy",
    "with both", "over the better of the two",
)  # fmt: skip


def _predicted_cells(row: dict[str, Any]) -> list[str]:
    cells = [f"{row['outer']:.2f}", f"{row['inner']:.2f}"]
    for name in ("head", "copy", "both"):
        windows = ", ".join(map(str, row[f"{name}_windows"]))
        cells.append(f"{row[name]:.2f} ({windows})")
    return [*cells, f"{row['both_over_two']:.2f}"]


def markdown(report: dict[str, Any]) -> str:
    """The report as tables."""
    where, settings = report["machine"], report["settings"]
    if settings["shape"] == TINY:
        return _shipped_markdown(report)
    if "rows" in report:
        return chosen.markdown(report)
    lines = [
        f"# Passes at the shape of {settings['shape']}, random weights, {where['device_name']}",
        "",
        f"{machine.conditions(report)}; "
        f"{settings['dtype']}, copy bandwidth {report['copy_gbs']:.1f} GB/s. Medians of "
        f"{settings['repeats']} turns, behind {settings['context']} tokens. Floor: the weights of "
        "the pass over the copy bandwidth, which counts bytes read and written.",
    ]
    if settings["extrapolated"]:
        lines += [
            "",
            f"**{settings['layers']} of {settings['of_layers']} layers were measured; the whole is "
            "extrapolated by layer count**, the output head counted once.",
        ]
    rows = []
    for row in report["passes"]:
        cells = [row["what"], row["runs"], str(row["tokens"]), f"{row['ms']:.3f}"]
        cells += [output.number(row["floor_ms"], ".3f"), output.number(row["over_floor"], ".2f")]
        rows.append([*cells, f"{row['whole_ms']:.3f}"])
    for row in report["behind_long_context"]:
        name = f"{row['what']}, behind {settings['long_context']} tokens"
        rows.append([name, row["runs"], "1", "", "", "", f"{row['whole_ms']:.3f}"])
    heads = ["", "runs", "tokens", "ms", "floor, ms", "x floor", "ms of the whole"]
    lines += ["", *output.table(heads, rows, range(2, 7))]
    shares = [1 / row["over_floor"] for row in report["passes"] if row["over_floor"]]
    lines += [text for line in machine.contradiction(shares) for text in ("", line)]
    checks = ", ".join(f"{ms:.3f} for {n}" for n, ms in report["verify_ms"].items())
    lines += [
        "",
        f"Verification, ms by tokens: {checks}. A rollback of the cache moves nothing: "
        f"{report['rollback_us']:.1f} microseconds of the host.",
    ]
    lines += [f"Left out: {one}" for one in report["left_out"]]
    for table in report["predictions"]:
        lines += [
            "",
            f"## Predicted speedup over plain decoding, passes {table['runs']}",
            "",
            f"**{report['label']}** Windows: the best of those tried. The head's tokens are taken "
            "to be accepted alike by the target and by the copy; drafts are chains, not trees.",
            "",
            *output.table(_PREDICTED, map(_predicted_cells, table["rows"]), range(6)),
        ]
    return "\n".join(lines)


def add_command(kinds: Any) -> None:
    """Adds ``shapes`` to the kinds of benchmarks."""
    sub = kinds.add_parser(
        "shapes",
        help="passes at the true shape of a published model, with random weights",
        description="Times the passes of a target, its 4-bit copy and an EAGLE-2 head at the true "
        "shape of a published model, with random weights, against the bandwidth floor, and "
        "predicts from them the speedups that given acceptances would have. Random weights say "
        "nothing about acceptance. Prints Markdown, or JSON.",
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
        "--layers",
        type=options.COUNT,
        metavar="N",
        help="measure N of the layers, and extrapolate the whole by their number (default: all)",
    )
    sub.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="(default: %(default)s)",
    )
    sub.add_argument("--tokens", type=options.COUNTS, metavar="N,...", help="of a pass")
    options.add_count(sub, "--repeats", 7, "turns")
    chosen.add_options(sub)
