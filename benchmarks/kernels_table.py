"""The report of ``benchmarks kernels`` as Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks import machine, output
from polyspec_ext import processor

Report = dict[str, Any]

LEGEND = (
    "Times in microseconds per call: median, quartiles and mean over turns in which everybody "
    "ran once. GB/s: the bytes that the operator must move (every needed row of logits once, "
    "drafts and outputs) over the median time; a peer's are the same useful bytes, whatever it "
    "moves itself, except logsumexp, which reads all K+1 rows. % copy: of the copy bandwidth of "
    "this run, on buffers that no cache holds; data that a cache holds can pass 100. x polyspec: "
    "how many times longer, median of the turns' ratios with its 95 % interval."
)

BUSY = (
    f"**The machine was busy: {processor.BUSY}; the targets are not verified.** Repeat it on an "
    "idle machine, or with --threads 1 --processor-time."
)


def _number(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _case(case: Report) -> Iterator[str]:
    verified = ""
    if case["draft_len"]:
        verified = f"K {case['draft_len']}, acceptance {case['acceptance_asked']:g}, "
    yield (
        f"### {case['operator']}, batch {case['batch']}, {verified}V {case['vocab']}, "
        f"{case['dtype']}, filters {case['filters']}"
    )
    yield ""
    if case["draft_len"]:
        found = case["acceptance"]
        yield (
            f"Acceptance {found['asked']:g} asked, {found['expected']:.3f} by construction, "
            f"{found['measured']:.3f} measured over {found['blocks']} blocks; "
            f"{case['mean_accepted']:.2f} tokens accepted per timed call and request."
        )
        yield ""
    heads = ["", "median", "quartiles", "mean", "GB/s", "% copy", "x polyspec", ""]
    yield from output.table(heads, map(_cells, case["rows"]))
    yield ""
    if case["notes"]:
        yield from (f"Left out: {note}" for note in case["notes"])
        yield ""


def _cells(row: Report) -> list[str]:
    ratio = row["ratio"]
    times = (
        "1"
        if ratio is None
        else f"{_number(ratio['median'])} ({_number(ratio['low'])} to {_number(ratio['high'])})"
    )
    return [
        row["name"],
        _number(row["median_us"]),
        f"{_number(row['q25_us'])} to {_number(row['q75_us'])}",
        _number(row["mean_us"]),
        _number(row["gbs"]),
        _number(row["percent_of_copy"]),
        times,
        "graph" if row["graph"] else "",
    ]


def _machine_line(report: Report) -> str:
    """What the numbers were measured on, and how busy it was."""
    where, load, settings = report["machine"], report["load"], report["settings"]
    busy = ""
    if load["before"] is not None:
        busy = f"load average {load['before']:.1f} before, {load['after']:.1f} after; "
    caches = "flushed before every call" if settings["cold"] else "as they are"
    return (
        f"{where['device_name']}, {where['threads']} threads of {where['cores']} cores, "
        f"torch {where['torch']}, transformers {where['transformers']}, "
        f"commit {where['commit']}; copy bandwidth {report['copy_gbs']:.1f} GB/s; {busy}"
        f"{settings['clock']}, caches {caches}."
    )


def markdown(report: Report) -> str:
    """The whole report."""
    lines = [f"# Kernel benchmark, {report['device']}, {report['date']}", ""]
    lines += [_machine_line(report), ""]
    if report["load"]["busy"]:
        lines += [BUSY, ""]
    lines += [LEGEND, ""]
    shares = [row["percent_of_copy"] / 100 for case in report["cases"] for row in case["rows"]]
    for line in machine.contradiction(shares):
        lines += [line, ""]
    for case in report["cases"]:
        lines += _case(case)
    words = {True: "yes", False: "**no**", None: "-"}
    rows = ([one["text"], one["measured"], words[one["met"]]] for one in report["targets"])
    lines += ["## Targets", "", *output.table(["target", "measured", "met"], rows), ""]
    return "\n".join(lines)
