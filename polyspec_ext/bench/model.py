"""``bench model``: an estimate of the CUDA kernels' time from what is counted without a GPU.

Instructions per logit and barriers per row are counts, which tests hold: test_loop_budget.py and
barrier_budget_test.cpp. What a device makes of them is assumed: `Device` says what, and the table
calls itself an estimate. One launch verifies chains with the token rule. A request's rows are read
one after the other until the first rejection, by a group of one to eight multiprocessors.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from polyspec_ext.bench import output
from polyspec_ext.command import options

SCHEMA = 1  # of the JSON report

# Most instructions per logit of the loops over a row, bfloat16, sm_90.
INSTRUCTIONS = {
    "maximum": 0.75,
    "mass": 17.0,
    "mass of filtered": 2.5,
    "candidates": 2.1,
    "residual": 51.0,
    "count_digit": 15.0,
    "mass_digit": 40.0,
}
BYTES = 2  # of a logit
CLUSTER_CTAS = 8  # at most; csrc/src/cuda/launch_shape.hpp, as is what follows
TOKENS_PER_CTA = 4096  # at least


@dataclass(frozen=True)
class Filters:
    """What a row takes: its passes by name, and barriers of the cluster."""

    name: str
    passes: tuple[str, ...]
    barriers: int


FILTERS = (
    Filters("no filter", ("maximum", "mass"), 2),
    Filters("top-k and top-p", ("maximum", "candidates"), 3),
)
LAUNCH_BARRIERS = 2  # where a kernel begins and ends
EMIT_BARRIERS = 3  # to find the token that is drawn at the end


@dataclass(frozen=True)
class Device:
    """What is assumed of a device: all but the first three are from other kernels' measurements.

    Attributes:
        multiprocessors: of the device.
        gigahertz: of their clock under load.
        lanes: instructions of single threads that a multiprocessor begins per cycle.
        issue: share of those that a loop over a row reaches.
        terabytes: per second, from the device's memory, by all multiprocessors.
        gigabytes: per second, by one multiprocessor.
        launch: microseconds, as a stream sees it.
        latency: microseconds from the beginning of a pass to its first logits, and from its last
            ones to its result.
        barrier: microseconds, of a cluster.
        candidates: microseconds that one CTA takes to filter the tokens that are left.
    """

    name: str
    multiprocessors: int
    gigahertz: float
    lanes: int = 128
    issue: float = 0.5
    terabytes: float = 4.3
    gigabytes: float = 110.0
    launch: float = 2.5
    latency: float = 0.8
    barrier: float = 0.3
    candidates: float = 4.0


DEVICES = (
    Device("H200", 132, 1.83),
    Device("H100", 132, 1.83, terabytes=3.0),
)


def ctas_per_group(batch: int, vocab: int, multiprocessors: int) -> int:
    """How many multiprocessors a request gets."""
    ctas = 1
    while (
        ctas < CLUSTER_CTAS
        and 2 * ctas * batch <= multiprocessors
        and vocab >= 2 * ctas * TOKENS_PER_CTA
    ):
        ctas *= 2
    return ctas


def mean_rows(draft_len: int, acceptance: float) -> float:
    """Rows that a request reads: one more than it accepts tokens."""
    return sum(acceptance**i for i in range(draft_len + 1))


def longest_rows(requests: int, draft_len: int, acceptance: float) -> float:
    """Mean of the most rows that one of so many requests reads."""
    return sum(1.0 - (1.0 - acceptance**i) ** requests for i in range(draft_len + 1))


def row_microseconds(filters: Filters, ctas: int, groups: int, vocab: int, device: Device) -> float:
    """One row, by `ctas` multiprocessors, while `groups` such groups run."""
    logits = vocab / ctas  # of one multiprocessor
    time = 0.0
    for name in filters.passes:
        cycles = INSTRUCTIONS[name] * logits / (device.lanes * device.issue)
        compute = cycles / (device.gigahertz * 1e3)
        load = BYTES * logits / (device.gigabytes * 1e3)
        memory = BYTES * vocab * groups / (device.terabytes * 1e6)
        time += max(compute, load, memory) + device.latency
    if "candidates" in filters.passes:
        time += device.candidates
    return time + (filters.barriers * device.barrier if ctas > 1 else 0.0)


def call_microseconds(
    batch: int, filters: Filters, vocab: int, draft_len: int, acceptance: float, device: Device
) -> float:
    """One launch, its tail included: a device is not done before its longest request."""
    ctas = ctas_per_group(batch, vocab, device.multiprocessors)
    groups = min(batch, device.multiprocessors // ctas)
    longest = longest_rows(batch, draft_len, acceptance)
    mean = mean_rows(draft_len, acceptance)
    rows = longest if batch <= groups else mean * batch / groups + (longest - mean)
    ends = device.latency * 2
    if ctas > 1:
        ends += (LAUNCH_BARRIERS + EMIT_BARRIERS) * device.barrier
    return device.launch + rows * row_microseconds(filters, ctas, groups, vocab, device) + ends


def report(batches: Sequence[int], vocab: int, draft_len: int, acceptance: float) -> dict[str, Any]:
    """The estimates, and all that goes into them."""
    cases = [
        {
            "device": device.name,
            "filters": filters.name,
            "batch": batch,
            "ctas": ctas_per_group(batch, vocab, device.multiprocessors),
            "microseconds": call_microseconds(batch, filters, vocab, draft_len, acceptance, device),
        }
        for device in DEVICES
        for filters in FILTERS
        for batch in batches
    ]
    return {
        "schema": SCHEMA,
        "estimate": True,
        "vocab": vocab,
        "draft_len": draft_len,
        "acceptance": acceptance,
        "instructions_per_logit": INSTRUCTIONS,
        "devices": [asdict(device) for device in DEVICES],
        "filters": [asdict(filters) for filters in FILTERS],
        "cases": cases,
    }


def markdown(results: dict[str, Any]) -> str:
    """The table of a report."""
    batches = sorted({case["batch"] for case in results["cases"]})
    rows = []
    for device in results["devices"]:
        for filters in results["filters"]:
            times = {
                case["batch"]: case["microseconds"]
                for case in results["cases"]
                if (case["device"], case["filters"]) == (device["name"], filters["name"])
            }
            rows.append([device["name"], filters["name"], *(f"{times[b]:.0f}" for b in batches)])
    heads = ["device", "filters", *(f"batch {batch}" for batch in batches)]
    title = (
        f"Estimate, not measured: microseconds of `verify` on a device, "
        f"K = {results['draft_len']}, V = {results['vocab']}, bfloat16, "
        f"acceptance {results['acceptance']}, from counted instructions and barriers."
    )
    return "\n".join([title, "", *output.table(heads, rows, range(2, len(heads)))])


def run(args: argparse.Namespace) -> int:
    """The command."""
    results = report(args.batch or (1, 8, 64, 256), args.vocab, args.draft_len, args.acceptance)
    output.show(results, markdown, as_json=args.json)
    return 0


def add_command(kinds: Any) -> None:
    """Adds ``model`` to the kinds of benchmarks."""
    sub = kinds.add_parser(
        "model",
        help="an estimate of the CUDA kernels' time from counts",
        description="Estimated microseconds of one verification on H200 and H100, from counted "
        "instructions per logit, bytes and barriers. Nothing is measured. Prints Markdown, or "
        "JSON.",
    )
    options.add_json(sub)
    sub.add_argument("--batch", type=options.COUNTS, metavar="B,...", help="(default: 1,8,64,256)")
    sub.add_argument("--vocab", type=options.COUNT, default=128256, metavar="V")
    sub.add_argument("--draft-len", type=options.COUNT, default=10, metavar="K")
    sub.add_argument("--acceptance", type=float, default=0.7, metavar="A")
    sub.set_defaults(run=run)
