"""``bench model``: an estimate of the CUDA kernels' time from what is counted without a GPU.

Instructions per logit and barriers per row are counts, which tests hold: test_loop_budget.py and
barrier_budget_test.cpp. What a device makes of them is assumed: `Device` says what, and the table
calls itself an estimate. One launch verifies chains with the token rule, or trees of deterministic
nodes. Groups of one to eight multiprocessors share the rows of chains out, the first ones first;
without a workspace one group reads those of a request until the first rejection. The rows of a few
trees are read at the same time, by a group each.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from polyspec_ext.bench import output
from polyspec_ext.command import options

SCHEMA = 3  # of the JSON report
_SIMULATED = 16  # launches

# Most instructions per logit of the loops over a row, bfloat16, sm_90.
INSTRUCTIONS = {
    "maximum": 0.8,
    "mass": 15.8,
    "mass of filtered": 1.8,
    "candidates": 1.7,
    "residual": 38.5,
    "count_digit": 11.1,
    "mass_digit": 36.3,
}
BYTES = 2  # of a logit
CLUSTER_CTAS = 8  # at most; csrc/src/cuda/launch_shape.hpp, as is what follows
TOKENS_PER_CTA = 4096  # at least
MARKED_ROWS, MOST_RECORDS = 32, 3072


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
TICKET_BARRIERS = 1  # of a row that is shared out
TREE_BARRIERS = 3  # of a row, to find its children
TREE_LAUNCH_BARRIERS = 2  # to check the parents, and to find the group that comes last


@dataclass(frozen=True)
class Tree:
    """A tree's nodes, its depth, and the nodes that a walk goes down to, on average."""

    nodes: int = 60
    depth: int = 6
    accepted: float = 3.0


@dataclass(frozen=True)
class Device:
    """What is assumed of a device: all but the first three are from other kernels' measurements.
    Times are in microseconds."""

    name: str
    multiprocessors: int
    gigahertz: float  # of their clock under load
    lanes: int = 128  # instructions of single threads that a multiprocessor begins per cycle
    issue: float = 0.5  # share of those that a loop over a row reaches
    terabytes: float = 4.3  # per second, from the device's memory, by all multiprocessors
    gigabytes: float = 110.0  # per second, by one multiprocessor
    launch: float = 2.5  # as a stream sees it
    latency: float = 0.8  # from a pass's beginning to its first logits, and the last to the result
    barrier: float = 0.3  # of a cluster
    candidates: float = 4.0  # that one CTA takes to filter the tokens that are left
    atomic: float = 0.7  # of the device's memory


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


def row_groups(batch: int, rows: int, vocab: int, multiprocessors: int) -> tuple[int, int]:
    """How many groups share the rows of a call out, and multiprocessors of each; (0, 1): none."""
    every = batch * rows
    if not 2 <= rows <= MARKED_ROWS or every > MOST_RECORDS or vocab < 2 * TOKENS_PER_CTA:
        return 0, 1
    wanted = every if every <= multiprocessors else 2 * batch
    ctas = ctas_per_group(wanted, vocab, multiprocessors)
    return min(every, multiprocessors // ctas), ctas


def shared_out(
    ends: Sequence[int], rows: int, groups: int, row: float, verify: float, ticket: float
) -> float:
    """When the last group is through, as csrc/src/cuda/row_tickets.cuh has it.

    Args:
        ends: of each request the number of the row that rejects, or the last one's.
        rows: of a request.
        row, verify, ticket: what it takes to read a row, to verify a request whose rows are read,
            and to draw a ticket.
    """
    batch, every = len(ends), len(ends) * rows
    missing = [end + 1 for end in ends]  # rows that count and are not read
    ended = [math.inf] * batch  # when the row that rejects is
    free = [0.0] * groups
    number = 0
    while number < every:
        now = heapq.heappop(free)
        if number >= groups:
            now += ticket
        i, request = divmod(number, batch)
        number += 1
        if i <= ends[request] or ended[request] > now:
            now += row
            if i == ends[request]:
                ended[request] = now
            if i <= ends[request]:
                missing[request] -= 1
                now += 0.0 if missing[request] else verify
        heapq.heappush(free, now)
    return max(free)


def shared_microseconds(
    batch: int, filters: Filters, vocab: int, draft_len: int, acceptance: float, device: Device
) -> float | None:
    """One launch whose rows are shared out, as some simulated ones have it; None: none are."""
    groups, ctas = row_groups(batch, draft_len + 1, vocab, device.multiprocessors)
    if groups == 0:
        return None
    row = row_microseconds(filters, ctas, groups, vocab, device) + device.atomic
    begin = device.launch
    if ctas > 1:
        row += TICKET_BARRIERS * device.barrier
        begin += LAUNCH_BARRIERS * device.barrier
    generator, total = random.Random(0), 0.0
    for _ in range(_SIMULATED):
        ends = [0] * batch
        for b in range(batch):
            while ends[b] < draft_len and generator.random() < acceptance:
                ends[b] += 1
        total += shared_out(ends, draft_len + 1, groups, row, 2 * device.latency, 2 * device.atomic)
    return begin + total / _SIMULATED


def walk_microseconds(
    batch: int, filters: Filters, vocab: int, draft_len: int, acceptance: float, device: Device
) -> float:
    """One launch without a workspace, its tail included: a device is not done before its longest
    request."""
    ctas = ctas_per_group(batch, vocab, device.multiprocessors)
    groups = min(batch, device.multiprocessors // ctas)
    longest = longest_rows(batch, draft_len, acceptance)
    mean = mean_rows(draft_len, acceptance)
    rows = longest if batch <= groups else mean * batch / groups + (longest - mean)
    ends = device.latency * 2
    if ctas > 1:
        ends += LAUNCH_BARRIERS * device.barrier
    return device.launch + rows * row_microseconds(filters, ctas, groups, vocab, device) + ends


def tree_rows_at_once(batch: int, tree: Tree, vocab: int, multiprocessors: int) -> bool:
    """Whether all rows of the trees are read at the same time."""
    groups = batch * (tree.nodes + 1)
    if tree.nodes == 0 or groups > multiprocessors or vocab < 2 * TOKENS_PER_CTA:
        return False
    of_walk = ctas_per_group(batch, vocab, multiprocessors)
    return 2 * of_walk <= (tree.depth + 2) * ctas_per_group(groups, vocab, multiprocessors)


def tree_microseconds(
    batch: int, tree: Tree, vocab: int, device: Device, *, at_once: bool
) -> float:
    """One launch over trees without filters, by walks or with all rows at once."""
    groups = batch * (tree.nodes + 1) if at_once else batch
    ctas = ctas_per_group(groups, vocab, device.multiprocessors)
    running = min(groups, device.multiprocessors // ctas)
    row = row_microseconds(FILTERS[0], ctas, running, vocab, device) + device.latency
    barriers = LAUNCH_BARRIERS + TREE_LAUNCH_BARRIERS
    if ctas > 1:
        row += TREE_BARRIERS * device.barrier
    waves = -(-groups // running)
    rows = waves if at_once else waves * (tree.accepted + 1)
    ends = device.latency + (barriers * device.barrier if ctas > 1 else 0.0)
    return device.launch + rows * row + ends


def report_of(args: argparse.Namespace) -> dict[str, Any]:
    """The estimates, and all that goes into them."""
    vocab, draft_len, acceptance = args.vocab, args.draft_len, args.acceptance
    batches, tree = sorted(set(args.batch)), Tree()
    trees = [
        {
            "device": device.name,
            "batch": batch,
            "at_once": tree_rows_at_once(batch, tree, vocab, device.multiprocessors),
            "walk_microseconds": tree_microseconds(batch, tree, vocab, device, at_once=False),
            "at_once_microseconds": tree_microseconds(batch, tree, vocab, device, at_once=True),
        }
        for device, batch in itertools.product(DEVICES, batches)
    ]
    cases = []
    for device, filters, batch in itertools.product(DEVICES, FILTERS, batches):
        call = (batch, filters, vocab, draft_len, acceptance, device)
        cases.append(
            {
                "device": device.name,
                "filters": filters.name,
                "batch": batch,
                "walk_microseconds": walk_microseconds(*call),
                "shared_microseconds": shared_microseconds(*call),
            }
        )
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
        "tree": asdict(tree),
        "trees": trees,
    }


def markdown(results: dict[str, Any]) -> str:
    """The table of a report."""
    nodes = results["tree"]["nodes"]
    rows: dict[tuple[str, str], list[str]] = {}  # cells by device and what is verified
    for case in results["cases"]:
        for name, key in (("", "shared"), (", without a workspace", "walk")):
            cell = output.number(case[f"{key}_microseconds"], ".0f")
            rows.setdefault((case["device"], case["filters"] + name), []).append(cell)
    for case in results["trees"]:
        for name, key, at_once in (("a walk", "walk", False), ("rows at once", "at_once", True)):
            chosen = " (chosen)" if case["at_once"] == at_once else ""
            cell = f"{case[f'{key}_microseconds']:.0f}{chosen}"
            rows.setdefault((case["device"], f"tree of {nodes} nodes, {name}"), []).append(cell)
    names = [device["name"] for device in results["devices"]]
    lines = [[*key, *rows[key]] for key in sorted(rows, key=lambda key: names.index(key[0]))]
    batches = dict.fromkeys(case["batch"] for case in results["cases"])
    heads = ["device", "filters", *(f"batch {batch}" for batch in batches)]
    title = (
        f"Estimate, not measured: microseconds of `verify` on a device, "
        f"K = {results['draft_len']}, V = {results['vocab']}, bfloat16, "
        f"acceptance {results['acceptance']}, from counted instructions and barriers. A "
        f"tree's walk goes {results['tree']['accepted']:g} nodes down."
    )
    return "\n".join([title, "", *output.table(heads, lines, range(2, len(heads)))])


def add_command(kinds: Any) -> None:
    """Adds ``model`` to the kinds of benchmarks."""
    sub = kinds.add_parser(
        "model",
        help="an estimate of the CUDA kernels' time from counts",
        description="Estimated microseconds of one verification on H200 and H100, from counted "
        "instructions per logit, bytes and barriers. Nothing is measured. Prints Markdown, or "
        "JSON.",
    )
    output.add_report(sub, report_of, markdown)
    sub.add_argument(
        "--batch",
        type=options.COUNTS,
        default=[1, 8, 64, 256],
        metavar="B,...",
        help="(default: 1,8,64,256)",
    )
    options.add(sub, "--vocab", options.COUNT, 128256, "V")
    options.add(sub, "--draft-len", options.COUNT, 10, "K")
    options.add(sub, "--acceptance", options.SHARE, 0.7, "A")
