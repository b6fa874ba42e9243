"""Time `sample` and `verify` on a grid of shapes, beside every peer that can be imported, in turns.

Draft logits are normal with deviation 3. Target logits are the draft's plus noise, scaled in every
row so that sum_x min(p(x), q(x)) is the requested acceptance. Draft tokens are drawn from q for
every turn.

The byte model counts the rows that the rule needs once, whole; per verified token the draft token,
its distribution's statistics and its logit; and the outputs. The file of ``--json-file`` is written
after every case.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

import polyspec_ext as ps
from benchmarks import measuring, output, peers
from benchmarks.peers import Block, Filters
from polyspec_ext import progress
from polyspec_ext.cli import options
from polyspec_ext.errors import PolyspecError

DTYPES = ("float32", "bfloat16", "float16")
# The acceptance rule of each verifying operator. "bare": without the drafts' distributions.
RULES = {"verify-token": "token", "verify-token-bare": "token", "verify-block": "block"}
OPERATORS = ("sample", *RULES)
TOKEN, LOGPROB, STATISTICS, COUNT, STATUS = 8, 4, 16, 8, 4  # bytes
SPREAD = 3.0  # deviation of the draft's logits
CALIBRATION_ELEMENTS = 1 << 22  # logits calibrated at a time
DRAWS = 64  # sets of draft tokens per case; further turns start over
HEADS = ["", "median", "quartiles", "mean", "GB/s", "% copy", "x polyspec", ""]
LEGEND = (
    "Microseconds per call. GB/s: the bytes that the operator must move over the median; a peer's "
    "are the same bytes. % copy: of the copy bandwidth of this run, on buffers that no cache "
    "holds. x polyspec: how many times as long, median of the turns' ratios with its 95 % interval."
    " polyspec, allowed=: with an allow-mask for each row of the target."
)


@dataclass(frozen=True)
class Case:
    """A point of the grid. ``draft_len`` and ``acceptance_asked`` are 0 where nothing is
    verified."""

    operator: str
    batch: int
    draft_len: int
    vocab: int
    dtype: str
    acceptance_asked: float
    filters: Filters

    @property
    def element_size(self) -> int:
        return 4 if self.dtype == "float32" else 2

    def __str__(self) -> str:
        verified = f", K {self.draft_len}, acceptance {self.acceptance_asked:g}"
        return (
            f"{self.operator}, batch {self.batch}{verified * bool(self.draft_len)}, "
            f"V {self.vocab}, {self.dtype}, filters {self.filters}"
        )


def cases_of(args: argparse.Namespace) -> list[Case]:
    """Return the grid of the options."""
    for name, known in (("operators", OPERATORS), ("dtype", DTYPES)):
        for value in getattr(args, name) or ():
            if value not in known:
                raise ValueError(f"--{name}: expected {', '.join(known)}, given {value!r}")
    dtypes = args.dtype or ["float32" if args.device == "cpu" else "bfloat16"]
    filters = [Filters.parse(text) for text in args.filters]
    operators = args.operators or OPERATORS
    axes = (operators, args.batch, args.draft_len, args.vocab, dtypes, args.acceptance, filters)
    cases = itertools.starmap(Case, itertools.product(*axes))
    alone: dict[str, Any] = {"sample": {"draft_len": 0, "acceptance_asked": 0.0}}
    return list(dict.fromkeys(replace(case, **alone.get(case.operator, {})) for case in cases))


def bytes_of(case: Case, accepted: Sequence[int]) -> int:
    """Return the bytes that a call must move.

    Token rule: target rows up to the first rejection, and a draft row for the residual; without
    distributions every verified draft row. Block rule: all K rows of both sides, but target row K
    only for the bonus, and draft row 0 only for its residual.

    Args:
        accepted: draft tokens accepted, by request.
    """
    k, row = case.draft_len, case.vocab * case.element_size
    if case.operator == "sample":
        return case.batch * (row + TOKEN + LOGPROB + STATISTICS + STATUS)
    verified = sum(min(n + 1, k) for n in accepted)
    if case.operator == "verify-block":
        verified = k * len(accepted)
        rows = sum(k + (n == k) + k - 1 + (n == 0) for n in accepted)
    elif case.operator == "verify-token":
        rows = sum(n + 1 + (n < k) for n in accepted)
    else:
        rows = sum(n + 1 for n in accepted) + verified
    written = case.batch * ((k + 1) * (TOKEN + LOGPROB + STATISTICS) + COUNT + STATUS)
    return rows * row + verified * (TOKEN + STATISTICS + case.element_size) + written


# ---- inputs --------------------------------------------------------------------------------------


@dataclass
class Feed(Block):
    """Tensors of a case. `load` fills the buffers that the calls, and captured graphs, read."""

    statistics: torch.Tensor  # [B, K, 2], of the draft rows
    drawn: torch.Tensor  # [DRAWS, B, K]
    seeds: torch.Tensor  # [B], loaded
    acceptance: float  # expected

    def load(self, turn: int) -> None:
        """Load the draft tokens and seeds of a turn."""
        if self.tokens.numel():
            self.tokens.copy_(self.drawn[turn % len(self.drawn)])
        first = turn * len(self.seeds)
        self.seeds.copy_(torch.arange(first, first + len(self.seeds), device=self.seeds.device))


def calibrated(
    draft: torch.Tensor, noise: torch.Tensor, acceptance: float, filters: Filters
) -> tuple[torch.Tensor, float]:
    """Return target logits [n, V] for draft logits and noise [n, V], and the sum of the rows'
    acceptance, which is 1 at noise size 0 and falls; 14 halvings of [0, 16] reach 0.001."""
    q = peers.processed(draft, filters)

    def overlap(size: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        target = (draft + size * noise).to(draft.dtype)
        return target, torch.minimum(peers.processed(target, filters), q).sum(-1, keepdim=True)

    low = torch.zeros((len(draft), 1), device=draft.device)
    high = torch.full_like(low, 16.0)
    for _ in range(14):
        size = (low + high) / 2
        above = overlap(size)[1] > acceptance
        low, high = torch.where(above, size, low), torch.where(above, high, size)
    target, accepted = overlap((low + high) / 2)
    return target, float(accepted.sum())


def make(case: Case, device: str, seed: int, draws: int = DRAWS) -> Feed:
    """Create the inputs of a case. For `sample` the drafts are empty."""
    b, k, v = case.batch, case.draft_len, case.vocab
    generator = torch.Generator(device).manual_seed(seed)

    def normal(rows: int) -> torch.Tensor:
        empty = torch.empty((b, rows, v), dtype=getattr(torch, case.dtype), device=device)
        return empty.normal_(0.0, 1.0, generator=generator)

    draft, noise, last = normal(k).mul_(SPREAD), normal(k), normal(1).mul_(SPREAD)
    step = max(1, CALIBRATION_ELEMENTS // v)
    pairs = zip(draft.flatten(0, 1).split(step), noise.flatten(0, 1).split(step), strict=True)
    chunks = [calibrated(rows, some, case.acceptance_asked, case.filters) for rows, some in pairs]
    target = torch.cat([torch.cat([rows for rows, _ in chunks]).view_as(draft), last], 1)
    drawn = torch.zeros((draws, b, k), dtype=torch.int64, device=device)
    statistics = torch.zeros((b, k, 2), dtype=torch.int64, device=device)
    if k:
        positions = torch.arange(k, device=device).repeat(b)
        requests = torch.arange(b, device=device).repeat_interleave(k)
        for turn in range(draws):
            seeds = (seed << 40) + turn * b + requests
            more: dict[str, Any] = {"seed": seeds, "position": positions, "level": 2}
            drafted = ps.sample(draft.flatten(0, 1), **case.filters.options(), **more)
            ps.raise_for_status(drafted.status, level=2, position=positions)
            drawn[turn] = drafted.tokens.view(b, k)
            statistics = drafted.statistics.view(b, k, 2)
    seeds = torch.zeros(b, dtype=torch.int64, device=device)
    expected = sum(part for _, part in chunks) / max(b * k, 1)
    tokens = torch.zeros_like(drawn[0])
    return Feed(target, tokens, draft, case.filters, statistics, drawn, seeds, expected)


# ---- measurement ---------------------------------------------------------------------------------


def call_of(operator: str, feed: Feed, masked: bool = False) -> Callable[[], Any]:
    """Return the call of an operator. `masked`: with masks that allow all ids and do not change
    the results."""
    given: dict[str, Any] = {**feed.filters.options(), "seed": feed.seeds}
    if masked:
        rows = feed.target[:, -1] if operator == "sample" else feed.target
        shape = *rows.shape[:-1], -(-rows.shape[-1] // 32)
        given["allowed"] = feed.seeds.new_full(shape, -1, dtype=torch.int32)
    if operator == "sample":
        return partial(ps.sample, feed.target[:, -1], **given)
    given["rule"] = RULES[operator]
    if operator != "verify-token-bare":
        given["draft_statistics"] = feed.statistics
    return partial(ps.verify, feed.target, feed.tokens, feed.draft, **given)


def accepted_counts(feed: Feed, verify: Callable[[], Any], turns: int) -> list[list[int]]:
    """Return accepted draft tokens by turn and request; the draws of a turn are fixed."""
    counts = []
    for turn in range(turns):
        feed.load(turn)
        counts.append(verify().num_accepted.tolist())
    return counts


def measure_case(case: Case, args: argparse.Namespace, copy_gbs: float) -> dict[str, Any]:
    """Measure a case; return its entry of the report."""
    feed = make(case, args.device, args.seed)
    ours = measuring.Contender("polyspec", call_of(case.operator, feed))
    masked = measuring.Contender("polyspec, allowed=", call_of(case.operator, feed, masked=True))
    others, notes = peers.contenders(case.operator, feed, compiled=not args.no_compile)
    every = [ours, masked, *others]
    for one in measuring.turns(every, args.repeats, measuring.Clock(args.device), feed.load):
        if one is ours and one.error is not None:
            raise PolyspecError(f"{case} does not run: {one.error}")
    counts = accepted_counts(feed, ours.call, args.repeats) if case.draft_len else [[]]
    useful = statistics.fmean(bytes_of(case, turn) for turn in counts)
    rows = []
    for one in every:
        if one.error is not None:
            notes.append(f"{one.name}: {one.error}")
            continue
        times = measuring.summary(one.seconds)
        gbs = useful / times["median"] * 1e-3
        rows.append(
            {
                "name": one.name,
                **{f"{name}_us": value for name, value in times.items()},
                "gbs": gbs,
                "percent_of_copy": 100 * gbs / copy_gbs,
                "ratio": None if one is ours else measuring.ratio(one.seconds, ours.seconds),
                "graph": one.captured,
            }
        )
    return {
        "case": str(case),
        **asdict(case),
        "filters": str(case.filters),
        "acceptance_expected": feed.acceptance,
        "mean_accepted": statistics.fmean(itertools.chain(*counts)) if case.draft_len else None,
        "bytes": useful,
        "rows": rows,
        "notes": notes,
    }


@torch.inference_mode()
def report_of(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all cases; return the JSON report, written to ``--json-file`` after every case."""
    output.require_device(args.device)
    report = output.header("kernels", 2, args.device)
    cases = cases_of(args)
    torch.manual_seed(args.seed)
    report["settings"] = {"repeats": args.repeats, "seed": args.seed}
    report["settings"]["clock"] = measuring.Clock(args.device).kind
    copy_gbs = report["copy_gbs"] = measuring.copy_bandwidth(args.device)
    report |= {"complete": False, "cases": []}
    for case in progress.bar(cases, unit="case"):
        report["cases"].append(measure_case(case, args, copy_gbs))
        report["complete"] = len(report["cases"]) == len(cases)
        output.save(args, report)
    return report


def markdown(report: dict[str, Any]) -> str:
    """Return the report as a table per case."""
    lines = [
        f"# Kernels, {report['machine']['device_name']}",
        "",
        f"{output.conditions(report)}; copy bandwidth {report['copy_gbs']:.1f} GB/s; "
        f"{report['settings']['clock']}, {report['settings']['repeats']} turns. {LEGEND}",
    ]
    shares = [row["percent_of_copy"] / 100 for case in report["cases"] for row in case["rows"]]
    lines += [text for line in output.contradiction(shares) for text in ("", line)]
    for case in report["cases"]:
        lines += ["", f"### {case['case']}", ""]
        if case["draft_len"]:
            accepted = f"{case['mean_accepted']:.2f} tokens accepted per call and request"
            lines += [f"{accepted}; acceptance {case['acceptance_expected']:.3f}.", ""]
        lines += output.table(HEADS, map(_cells, case["rows"]), range(1, 7))
        lines += [f"Left out: {note}" for note in case["notes"]]
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> list[str]:
    ratio, times = row["ratio"], "1"
    if ratio is not None:
        times = f"{ratio['median']:.3g} ({ratio['low']:.3g} to {ratio['high']:.3g})"
    numbers = [f"{row[key]:.3g}" for key in ("mean_us", "gbs", "percent_of_copy")]
    quartiles = f"{row['q25_us']:.3g} to {row['q75_us']:.3g}"
    median = f"{row['median_us']:.3g}"
    return [row["name"], median, quartiles, *numbers, times, "graph" if row["graph"] else ""]


OPTIONS = (
    "--device",
    "--seed",
    ("--operators", options.words, None, "NAME,...", "of all"),
    ("--batch", options.COUNTS, [1], "B,...", "requests"),
    ("--draft-len", options.COUNTS, [10], "K,...", "draft tokens"),
    ("--vocab", options.listed(options.integer(2)), [128256], "V,...", ""),
    ("--dtype", options.words, None, "NAME,...", ", ".join(DTYPES)),
    ("--acceptance", options.SHARES, [0.7], "A,...", "per draft token"),
    ("--filters", options.words, ["none", "top_k=50+top_p=.9"], "F,...", "joined by +"),
    ("--repeats", options.COUNT, 60, "N", "turns per case"),
    ("--no-compile", "no torch.compile'd peers"),
)
