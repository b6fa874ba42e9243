#!/usr/bin/env python3
"""Fills the tables of README and docs from committed measurements.

    python docs/tables.py            # writes them and the charts anew
    python docs/tables.py --check    # exit status 1, and their names, where some are stale

A page has `<!-- table: NAME -->`, and later `<!-- end of table -->`; the text between is written
here. Numbers come from docs/results and from the report of the shipped models, and the cells are
formatted by the benchmarks' code. A table without results is left empty.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [
    str(ROOT / folder) for folder in ("", "csrc/examples/llama_cpp", "python_tests/support")
]

import compare  # noqa: E402
import model_families  # noqa: E402

from benchmarks import chosen, int4, output, overhead, report, serving  # noqa: E402

RESULTS = ROOT / "docs" / "results"
# The newest results of every benchmark. A commit of newer results names them here.
GENERATE = "cpu-2026-11-22-generate.json"
KERNELS = "cpu-2026-11-25-kernels.json"
GPU_RESULTS = "gpu-2026-11-27-h200"
OVERHEAD = "cpu-2026-11-28-overhead.json"
ADAPTATION = "cpu-2026-11-22-adaptation/adaptation.json"
CHAINS = {
    "1 time, greedy": "cpu-2026-11-22-chains/grown1.json",
    "4 times, greedy": "cpu-2026-11-22-chains/grown4.json",
    "8 times, greedy": "cpu-2026-11-22-chains/grown8.json",
    "8 times, temperature 1": "cpu-2026-11-22-chains/grown8-temperature1.json",
}
LLAMA = "cpu-2026-11-23-llama/llama.json"
REAL_DEMO = "cpu-2026-11-27-demo-real/demo-real.json"
BLOCKS_DEMO = "cpu-2026-11-25-demo-real/demo-blocks.json"
# Runs of `benchmarks paper`, by the table that shows them.
PAPER = {
    "paper": ["cpu-2026-11-22-paper"],
    "paper-real": ["cpu-2026-11-25-paper-real/greedy"],
    "paper-real-epyc": ["cpu-2026-11-25-paper-real/greedy-epyc"],
    "paper-real-w4": ["cpu-2026-11-25-paper-real/w4-greedy"],
    "paper-real-now": [f"cpu-2026-11-28-paper-real/{name}" for name in ("bf16-epyc", "w4-epyc")],
    "paper-real-sampled": ["cpu-2026-11-25-paper-real/sampled-epyc"],
    "paper-sampled-texts": ["cpu-2026-11-26-paper-sampled"],
    "paper-real-batches": [
        f"cpu-2026-11-25-paper-real/{name}" for name in ("batch4-epyc", "batch8-epyc", "batch8")
    ],
}

# Runs of `benchmarks serving`, with their options.
_LLAMA_SERVER = "--llama-server build/llama/server/bin/llama-server --threads 2"
_VLLM = "--vllm build/vllm/bin/python --threads 2"
SERVING = {
    "serving-smollm2": (
        "cpu-2026-11-27-serving/smollm2.json",
        f"--target smollm2.gguf --gguf smollm2.gguf {_LLAMA_SERVER} --clients 1,8,16 "
        "--per-client 4 --max-new-tokens 96 --temperatures 0 --repeats 2 --seconds 60",
    ),
    "serving-policy": (
        "cpu-2026-11-27-serving/smollm2-policy.json",
        "--target smollm2.gguf --threads 2 --methods plain,policy --clients 1,16 --per-client 4 "
        "--max-new-tokens 96 --temperatures 0 --repeats 3 --seconds 125",
    ),
    "serving-qwen": (
        "cpu-2026-11-27-serving/qwen.json",
        "--target qwen1.5b.gguf --draft qwen0.5b.gguf --draft prompt-lookup "
        f"--gguf qwen1.5b.gguf,qwen0.5b.gguf {_LLAMA_SERVER} "
        "--methods plain,chain,policy,generate,llama.cpp --clients 1,4,8 --per-client 2 "
        "--max-new-tokens 96 --temperatures 0 --repeats 2 --seconds 150",
    ),
    "serving-qwen-policy": (
        "cpu-2026-11-27-serving/qwen-policy.json",
        "--target qwen1.5b.gguf --draft qwen0.5b.gguf --draft prompt-lookup --threads 2 "
        "--methods plain,policy --clients 8 --per-client 2 --max-new-tokens 96 --temperatures 0 "
        "--repeats 6 --seconds 400",
    ),
    "serving-shipped-policy": (
        "cpu-2026-11-27-serving/shipped-policy.json",
        "--threads 2 --methods plain,policy --clients 1,8,16 --per-client 8 --temperatures 0 "
        "--repeats 8 --seconds 120",
    ),
    "serving-shipped": (
        "cpu-2026-11-27-serving/shipped.json",
        "--threads 2 --methods plain,chain,policy,generate,transformers --clients 1,8,16 "
        "--per-client 4 --temperatures 0 --repeats 3 --seconds 75",
    ),
    "vllm-policy": (
        "cpu-2026-11-26-vllm/policy.json",
        "--target qwen1.5b --draft w4:qwen0.5b --draft prompt-lookup --window 8,4 "
        f"{_VLLM} --methods vllm,vllm-two,vllm-policy --clients 1,4,8 --max-new-tokens 48 "
        "--per-client 2 --repeats 2 --seconds 420",
    ),
    "vllm-peers": (
        "cpu-2026-11-26-vllm/peers.json",
        "--target qwen1.5b --draft w4:qwen0.5b --draft prompt-lookup "
        f"{_VLLM} --methods vllm,vllm-draft,vllm-rule --clients 1,8 --max-new-tokens 48 "
        "--per-client 1 --repeats 1",
    ),
    "vllm-shipped": (
        "cpu-2026-11-26-vllm/shipped.json",
        f"--draft SHIPPED_DRAFTER --draft prompt-lookup --window 8,4 {_VLLM} --methods plain,chain,"
        "policy,vllm,vllm-ngram,vllm-draft,vllm-two,vllm-policy --clients 1,8 --max-new-tokens 48 "
        "--per-client 2 --repeats 2 --seconds 60",
    ),
}

BEGIN, END = "<!-- table: {} -->", "<!-- end of table -->"
BLOCK = re.compile(
    rf"^{re.escape(BEGIN).replace(re.escape('{}'), '([a-z0-9-]+)')}\n(.*?)^{re.escape(END)}$",
    re.MULTILINE | re.DOTALL,
)
Lines = list[str]


def result(name: str) -> Any:
    """Return a benchmark's results; FileNotFoundError where they are not committed."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def caption(report: Any, command: str, name: str) -> str:
    """Command, processor, versions and load of a report."""
    where = report["machine"]
    device = where["device_name" if report.get("device") == "cuda" else "cpu"]
    return (
        f"`{command}`: {device}, {output.conditions(report)}, transformers "
        f"{where['transformers']}, commit {where['commit']}; `docs/results/{name}`."
    )


def tables_of(markdown: str) -> list[Lines]:
    """The tables of a report, in order."""
    parts = itertools.groupby(markdown.splitlines(), lambda line: line.startswith("|"))
    return [list(lines) for is_table, lines in parts if is_table]


# ---- whole generations ---------------------------------------------------------------------------

# (Of that commit. Since then `benchmarks paper --questions gsm8k` asks the same questions.)
GENERATE_COMMAND = "bench generate --temperature 0 --compile none --repeats 3"


def generate() -> Lines:
    """Tokens per second of the shipped models and of transformers."""
    report = result(GENERATE)
    (found,), settings = report["results"], report["settings"]
    heads = ["", "window", "batch", "tokens/s", "range", "x plain", "range", "decoding"]
    rows = []
    for row in found["rows"]:
        rate, times = row["tokens_per_second"], row["x_plain"]
        rows.append(
            [
                row["label"],
                ",".join(map(str, row["window"])) or "-",
                str(row["batch"]),
                f"{rate['median']:.1f}",
                f"{rate['low']:.1f} to {rate['high']:.1f}",
                f"{times['median']:.2f}",
                f"{times['low']:.2f} to {times['high']:.2f}",
                output.number(row["decoding_tokens_per_second"], ".1f"),
                row["verdict"],
            ]
        )
    return [
        caption(report, GENERATE_COMMAND, GENERATE),
        f"{settings['prompts']} questions ({settings['source']}), up to "
        f"{settings['max_new_tokens']} new tokens, prefill included: medians of "
        f"{settings['repeats']} repeats in turns.",
        "",
        *output.table([*heads, "text as plain decoding"], rows),
    ]


def targets() -> Lines:
    """The project's targets for whole generations, and whether they were met."""
    (found,) = result(GENERATE)["results"]
    return [
        f"- {one['text']}: {one['median']:.2f}x ({one['low']:.2f} to {one['high']:.2f}), "
        + ("met" if one["met"] else "**missed**")
        + (f"; decoding alone {one['decoding']:.2f}x" if "decoding" in one else "")
        for one in found["targets"]
    ]


def llama_command(report: Any) -> str:
    """Return the command of a report of chains inside llama.cpp."""
    words = ["--rounds", report["rounds"], "--tokens", report["tokens"]]
    if list(report["temperatures"]) != ["0.0", "0.8"]:
        words += ["--temperatures", *report["temperatures"]]
    if report.get("contenders") is not None:
        words += ["--contenders", *map(json.dumps, report["contenders"])]
    if "peer" in report:
        words += ["--peer", "llama-speculative-simple"]
    return f"make llama LLAMA='{' '.join(map(str, words))}'"


def llama(name: str) -> Lines:
    """Chains inside llama.cpp, as its program prints them, at every temperature."""
    report = result(name)
    lines = [
        f"`{llama_command(report)}`: "
        f"{' <- '.join(report['models'])}; {report['processor']}, "
        f"{report['threads']} threads; {len(report['prompts'])} prompts, {report['tokens']} new "
        f"tokens each, contenders in turns, medians; `docs/results/{name}`.",
    ]
    for temperature, rows in report["temperatures"].items():
        greedy = float(temperature) == 0
        lines += ["", f"Temperature {float(temperature):g}{', greedy' * greedy}:", ""]
        lines += [*compare.HEAD.splitlines(), *(compare.row(row, greedy) for row in rows)]
        if "peer" in report:
            lines.append(compare.peer_row(report["peer"][temperature]))
    return lines


def demo(name: str, how: str, options: str = "") -> Lines:
    """Real models, transformers and llama.cpp, as ``demo --json`` writes them: ratios are
    over the fastest plain decoding of each.

    Args:
        name: of the file.
        how: the form of the models.
        options: of ``make demo-real``.
    """
    report = result(name)
    where = report["machine"]
    asked = report["tables"][0]
    flags = "--repeats 1 --json"
    if "engines" in asked:  # as of files that name them
        flags = f"--prompts {asked['prompts']} --repeats {asked['repeats']} --max-new-tokens "
        flags += f"{asked['max_new_tokens']} --seconds 3600 --json"
    lines = [
        f"Qwen2.5-Coder 1.5B and 0.5B {how}, `make demo-real {options}DEMO='{flags}'`: "
        f"{where['cpu']} ({where['cpu_capability']}), {where['threads']} threads of "
        f"{where['cores']} cores, torch {where['torch']}, transformers {where['transformers']}; "
        f"`docs/results/{name}`.",
    ]
    for table in report["tables"]:
        greedy = table["temperature"] == 0
        heads = ["", "tokens/s", "ratio", "same text as plain decoding" if greedy else "likelihood"]
        rows = []
        for row in table["configurations"]:
            window = f" ({','.join(map(str, row['window']))})" if row["window"] else ""
            numbers = [f"{row['tokens_per_second']:.1f}", f"{row['ratio']:.2f}"]
            verdict = row["verdict"]
            if verdict.endswith(" of its own"):
                verdict = f"as its own plain text: {verdict.removesuffix(' of its own')}"
            rows.append([row["label"] + window, *numbers, verdict])
        lines += [
            f"{table['prompts']} questions, up to {table['max_new_tokens']} new tokens, "
            f"temperature {table['temperature']:g}; median over repeats: "
            f"{table['repeats']}.",
            "",
            *output.table(heads, rows, [1, 2]),
            "",
        ]
        versions = {about.partition("; ")[0] for about in table.get("engines", {}).values()}
        named = (
            f"{label}: `{about.partition('; ')[2]}`"
            for label, about in table.get("engines", {}).items()
        )
        if versions:
            lines += [f"llama.cpp is {', '.join(sorted(versions))}. {'; '.join(named)}.", ""]
    return lines[:-1]


def paper(name: str) -> Lines:
    """Return every method of some runs of ``benchmarks paper`` over all their questions."""
    lines: Lines = []
    for run in report.load([RESULTS / folder for folder in PAPER[name]]):
        table = report.overall(run)
        lines += [report.summary(run), table.note, "", *table.lines(), ""]
    return lines[:-1]


# ---- the chart of the front page -----------------------------------------------------------------

# Bars: of a drafter alone, of chains with three and with four levels, of another engine's drafts.
_FILLS = {
    "light": ("#1d2024", "#5a616b", "#d6d8d3", "#8fb8e8", "#0b57d0", "#06306f", "#b9bdc4"),
    "dark": ("#eceded", "#a5abb4", "#383c43", "#33578a", "#5b9bff", "#b4d2ff", "#5a616b"),
}
_NAMES = ("two levels", "three levels", "four levels", "another engine with drafts")
_SCALE, _LEFT, _BAR = 150, 250, 14  # pixels: of one time plain decoding, before the bars, a bar
_ENGINES = ("OpenVINO GenAI with draft", "llama.cpp's rule with draft")
Speeds = list[tuple[int, float]]  # number in `_NAMES`, times plain decoding


def _real(name: str, number: int = 0) -> Speeds:
    """Return the best chain of each number of levels of a run of ``benchmarks paper``."""
    run = report.load([RESULTS / folder for folder in PAPER[name]])[number]
    best: dict[int, float] = {}
    for method in run.methods:
        label, speed = run.labels[method], run.compared(method)["speedup"]
        kind = 3 if label in _ENGINES else label.count(" <- ") - 1
        if kind >= 0:
            best[kind] = max(best.get(kind, 0.0), speed)
    return sorted(best.items())


def speeds() -> list[tuple[str, str, Speeds]]:
    """Return the groups of bars: name, device, and speed."""
    rows = [row for row in result(f"{GPU_RESULTS}/chosen.json")["rows"] if not row["error"]]
    expected = {
        (row["label"], *row["window"]): row["ms_per_token"] * row["length"] / row["expected_length"]
        for row in rows
        if row["label"].startswith("fused layers: ")
    }
    plain = expected.pop(("fused layers: plain decoding",))
    chains: dict[int, float] = {}
    for (label, *_), time in expected.items():
        kind = label.count(" <- ") - 1
        chains[kind] = max(chains.get(kind, 0.0), plain / time)
    demo = result(REAL_DEMO)["tables"][0]["configurations"]
    best = max(row["ratio"] for row in demo if row["label"].startswith("plain"))
    small = [
        (number, max(row["ratio"] for row in demo if row["label"].startswith(label)) / best)
        for number, label in enumerate(_NAMES[:2])
    ]
    engine = next(row["ratio"] for row in demo if row["label"] == _ENGINES[1])
    return [
        ("7B shape, bfloat16", "H200, chosen acceptance", sorted(chains.items())),
        ("1.5B, bfloat16", "Intel Xeon with AMX", _real("paper-real")),
        ("1.5B, bfloat16", "AMD EPYC, AVX-512", _real("paper-real-epyc")),
        ("1.5B, 4 bits", "Intel Xeon with AMX", _real("paper-real-w4")),
        ("1.5B, 4 bits", "AMD EPYC, AVX-512", _real("paper-real-now", 1)),
        ("1.5B, 4 bits", "AMD EPYC, AVX2", [*small, (3, engine)]),
    ]


def chart(theme: str) -> str:
    """Return the chart as SVG."""
    ink, soft, line, *fills = _FILLS[theme]
    groups, top = speeds(), 34
    parts: list[str] = []
    for title, where, bars in groups:
        middle = top + _BAR * len(bars) / 2
        parts.append(f'<text x="{_LEFT - 10}" y="{middle:g}" text-anchor="end">{title}</text>')
        parts.append(
            f'<text x="{_LEFT - 10}" y="{middle + 14:g}" text-anchor="end" font-size="11" '
            f'fill="{soft}">{where}</text>'
        )
        for kind, speed in bars:
            width = _SCALE * speed
            parts.append(
                f'<rect x="{_LEFT}" y="{top}" width="{width:.1f}" height="{_BAR - 2}" rx="2" '
                f'fill="{fills[kind]}"/><text x="{_LEFT + width + 5:.1f}" y="{top + 10}" '
                f'font-size="11">{speed:.2f}</text>'
            )
            top += _BAR
        top += 16
    one, legend = _LEFT + _SCALE, top + 8
    parts.append(f'<path d="M{one} 24V{top - 8}" stroke="{soft}" stroke-dasharray="4 3"/>')
    parts.append(f'<text x="{one}" y="16" text-anchor="middle">plain decoding = 1</text>')
    for number, (name, left) in enumerate(zip(_NAMES, (20, 130, 250, 370), strict=True)):
        parts.append(
            f'<rect x="{left}" y="{legend}" width="12" height="12" rx="2" fill="{fills[number]}"/>'
            f'<text x="{left + 18}" y="{legend + 10}" font-size="12">{name}</text>'
        )
    said = "; ".join(
        f"{title}, {where}: " + ", ".join(f"{_NAMES[kind]} {speed:.2f}" for kind, speed in bars)
        for title, where, bars in groups
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 {legend + 22}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{ink}">'
        f"<title>Tokens per second over plain decoding. {said}</title>\n"
        f'<path d="M{_LEFT} 24V{top - 8}" stroke="{line}"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


CHARTS = {ROOT / "docs" / f"speedup-{theme}.svg": theme for theme in _FILLS}


# ---- chains below a target of any cost -----------------------------------------------------------


CHAINS_COMMAND = "bench chains --compile --head eagle3 --prompts 3 --repeats 2 --threads 2"


def chains() -> Lines:
    """Every chain below the shipped target and wider targets: over plain decoding."""
    reports = [result(name) for name in CHAINS.values()]
    columns = [{row["label"]: row for row in one["results"][0]["rows"]} for one in reports]
    plain = [rows["plain decoding"] for rows in columns]

    def cell(row: Any, plain: Any) -> str:
        if row is None:
            return ""
        alone, base = row["decoding_tokens_per_second"], plain["decoding_tokens_per_second"]
        decoding = "" if alone is None else f" ({alone / base:.2f}x)"
        return f"{row['x_plain']['median']:.2f}x{decoding}"

    commands = (
        f"`--times {one['settings']['times']} --plan-seconds {one['settings']['plan_seconds']}` at "
        f"commit {one['machine']['commit']}"
        for one in reports
    )
    settings = reports[0]["settings"]
    rates = (f"{row['tokens_per_second']:.1f}" for row in plain)
    rows = [["plain decoding, tokens/s", *rates]]
    for label in dict.fromkeys(itertools.chain(*columns)):
        if label != "plain decoding":
            rows.append([label, *map(cell, (column.get(label) for column in columns), plain)])
    return [
        f"`{CHAINS_COMMAND}`: {reports[0]['machine']['cpu']}, {output.conditions(reports[0])}; by "
        f"column {', '.join(commands)}; `docs/results/{Path(CHAINS['4 times, greedy']).parent}`.",
        "Over plain decoding, compiled as the chains are: prefill included, in brackets without "
        f"it. {settings['prompts']} questions, up to {settings['max_new_tokens']} new tokens; "
        "windows by the planner.",
        "",
        *output.table(["", *CHAINS], rows),
    ]


def predictions() -> Lines:
    """How near the planner's predictions came in the same runs."""
    rows = []
    for head, name in CHAINS.items():
        (found,) = result(name)["results"]
        ratios = [
            row["predicted_over_measured"]
            for row in found["rows"]
            if row["predicted_over_measured"] is not None
        ]
        near = sum(0.9 <= ratio <= 1.1 for ratio in ratios)
        rows.append(
            [
                head,
                f"{min(ratios):.2f} to {max(ratios):.2f}",
                f"{near} of {len(ratios)}",
                found["choice"]["chosen"],
                f"{found['choice']['of_fastest']:.3f}",
            ]
        )
    heads = ["target", "predicted over measured", "within 10 %", "recommended", "of the fastest"]
    return output.table(heads, rows)


# ---- parts of it ---------------------------------------------------------------------------------


KERNELS_COMMAND = (
    "python -m benchmarks kernels --batch 1 --vocab 128256 --draft-len 10 "
    "--acceptance 0.7 --filters none,top_k=50+top_p=.9"
)


def kernels(name: str = KERNELS, command: str = KERNELS_COMMAND) -> Lines:
    """Medians of the operators and how many times as long their peers take."""
    report = result(name)
    rows = []
    for case in report["cases"]:
        ours, *peers = case["rows"]
        beside = [f"{row['name']} {row['ratio']['median']:.1f}x" for row in peers]
        rows.append(
            [
                case["operator"],
                case["filters"],
                str(case["batch"]),
                f"{ours['median_us']:.0f}",
                "; ".join(beside),
            ]
        )
    heads = ["operator", "filters", "batch", "us, median", "how many times as long others take"]
    case, batches = report["cases"][-1], {row[2] for row in rows}
    if len(batches) == 1:
        rows = [[*row[:2], *row[3:]] for row in rows]
        heads.remove("batch")
    return [
        caption(report, command, name),
        f"{f'Batch {batches.pop()}, ' if len(batches) == 1 else ''}K = {case['draft_len']}, V = "
        f"{case['vocab']}, {case['dtype']}, acceptance {case['acceptance_asked']:g}; `bare` has no "
        "draft statistics.",
        "",
        *output.table(heads, rows, range(2, len(heads) - 1)),
    ]


# Of benchmarks on a GPU: the module that prints the report, and the command.
GPU = {
    "chosen": (
        chosen,
        "python -m benchmarks shapes --device cuda --shape llama2-7b --acceptance .97:.8 "
        "--repeats 3 --max-new-tokens 80",
    ),
    "int4": (
        int4,
        "python -m benchmarks int4 --device cuda --shapes 4096x4096,12288x4096,22016x4096,"
        "4096x11008 --tokens 1,4,8,16,32,64 --repeats 20",
    ),
}
GPU_KERNELS = (
    f"{GPU_RESULTS}/kernels.json",
    "python -m benchmarks kernels --device cuda --repeats 20 --batch 1,8,64 "
    "--filters none,top_k=50+top_p=.9",
)


def gpu(name: str) -> Lines:
    """The tables of a benchmark that a GPU ran, each after its title, if it has one."""
    file, (module, command) = f"{GPU_RESULTS}/{name}.json", GPU[name]
    report = result(file)
    lines = [caption(report, command, file), ""]
    for line in module.markdown(report).splitlines():
        if line.startswith("## "):
            lines += ["", f"**{line[3:]}**", ""]
        elif line.startswith("|"):
            lines.append(line)
    return lines


def components() -> Lines:
    """Components of passes as the benchmark of that commit timed them."""
    file = f"{GPU_RESULTS}/preflight.json"
    report = result(file)
    rows = [
        [group, name, format(value, ".2f") if isinstance(value, float) else str(value)]
        for group, numbers in report["parts"].items()
        for name, value in numbers.items()
    ]
    heads = ["part", "", "us"]
    return [caption(report, "bench preflight", file), "", *output.table(heads, rows, [2])]


OVERHEAD_COMMAND = "python -m benchmarks overhead --levels 2,3,4 --batch 1,8"


def overheads() -> Lines:
    """Host time of the chain itself."""
    report = result(OVERHEAD)
    table, *calls = tables_of(overhead.markdown(report))
    return [
        caption(report, OVERHEAD_COMMAND, OVERHEAD),
        "Microseconds per verification round outside forward passes and compiled operators.",
        "",
        *table,
        *(line for more in calls for line in ["", *more]),
    ]


def policies() -> Lines:
    """Return the simulated speed of window policies for three levels, as a command of that commit
    wrote it."""
    report, best = result(ADAPTATION), "best fixed windows"
    sets = report["chains"]["target, middle, drafter"]
    speeds = {name: found["policies"] for name, found in sets.items()}
    rows = [
        [row, *(f"{each[row]['speed'] / each[best]['speed']:.3f}" for each in speeds.values())]
        for row in next(iter(speeds.values()))
    ]
    return [
        f"`bench adaptation --threads 1`: {report['machine']['cpu']}, commit "
        f"{report['machine']['commit']}; `docs/results/{ADAPTATION}`.",
        "Tokens per second in simulated time over the best fixed windows, three levels, the "
        f"{report['half']} half of the prompts:",
        "",
        *output.table(["", *speeds], rows),
    ]


# ---- models --------------------------------------------------------------------------------------


def shipped_models() -> Lines:
    """Size and quality of the shipped models."""
    place = ROOT / "polyspec_ext" / "tiny"
    report = json.loads((place / "report.json").read_text())
    rows = []
    for name in ("target", "middle", "drafter"):
        config = json.loads((place / name / "config.json").read_text())
        own = report[name]
        rows.append(
            [
                name,
                f"{config['num_hidden_layers']} x {config['hidden_size']}",
                f"{own['held_out_loss']:.3f}",
                f"{own['overlap']:.3f}",
                f"{own['greedy_agreement']:.3f}",
            ]
        )
    heads = [
        "", "layers x width", "held-out loss, nats per token",
        "overlap with the target, E[1 - TV]", "same argmax",
    ]  # fmt: skip
    return output.table(heads, rows)


def shipped_heads() -> Lines:
    """Overlap of the shipped EAGLE heads by the position of a token in a draft."""
    report = json.loads((ROOT / "polyspec_ext" / "tiny" / "report.json").read_text())
    names = ("eagle2", "eagle3")
    depth = max(len(report[name]["overlap"]) for name in names)
    rows = []
    for name in names:
        cells = [f"{value:.3f}" for value in report[name]["overlap"]]
        rows.append([name, *cells, *[""] * (depth - len(cells))])
    heads = ["overlap with the target", *(f"token {i + 1}" for i in range(depth))]
    return output.table(heads, rows)


def clients(name: str) -> Lines:
    """Servers under loads of several clients."""
    file, options = SERVING[name]
    command = f"`python -m benchmarks serving {options}`; `docs/results/{file}`."
    return [command, "", *serving.markdown(result(file)).splitlines()]


def conversations() -> Lines:
    """Return the speed with the prefix cache and without, of a command of that commit."""
    name = "cpu-2026-11-26-serving/conversations.json"
    report, heads = result(name), ["temperature", "", "tokens/s", "first token, ms", "tokens read"]
    rows = [
        [
            f"{row['temperature']:g}",
            row["label"],
            f"{row['tokens_per_second']['median']:.1f}",
            " / ".join(f"{1000 * value:.0f}" for value in row["first_token"]),
            f"{row['prompt_tokens_read']} of {row['prompt_tokens']}",
        ]
        for row in report["rows"]
    ]
    command = "bench serving --target smollm2.gguf --threads 2 --conversations --repeats 1"
    return [caption(report, command, name), "", *output.table(heads, rows, range(2, len(heads)))]


demo_real = functools.partial(demo, REAL_DEMO, "in 4 bits")
TABLES: dict[str, Callable[[], Lines]] = {
    "generate": generate,
    "demo-real": demo_real,
    "demo-blocks": functools.partial(demo, BLOCKS_DEMO, "as they lie in their files", "COPY= "),
    **{name: functools.partial(paper, name) for name in PAPER},
    **{name: functools.partial(clients, name) for name in SERVING},
    "serving-conversations": conversations,
    "targets": targets,
    "llama": functools.partial(llama, LLAMA),
    "chains": chains,
    "predictions": predictions,
    "kernels": kernels,
    "gpu-kernels": functools.partial(kernels, *GPU_KERNELS),
    **{f"gpu-{name}": functools.partial(gpu, name) for name in GPU},
    "gpu-preflight": components,
    "overhead": overheads,
    "policies": policies,
    # Model families and their support by a level.
    "models": lambda: [*model_families.HEAD, *model_families.table_rows()],
    "shipped-models": shipped_models,
    "shipped-heads": shipped_heads,
}


def pages() -> Iterator[Path]:
    """README, and the pages of docs that people write."""
    yield ROOT / "README.md"
    for path in sorted((ROOT / "docs").rglob("*.md")):
        if RESULTS not in path.parents:
            yield path


def made(name: str) -> str:
    """Return the text of a table with its last newline; "" without results.

    Raises:
        KeyError: there is no such table.
    """
    try:
        lines = TABLES[name]()
    except FileNotFoundError:
        return ""
    return "\n".join(lines) + "\n"


def filled(text: str) -> str:
    """Return a page with its tables filled anew."""

    def block(found: re.Match[str]) -> str:
        name = found[1]
        return f"{BEGIN.format(name)}\n{made(name)}{END}"

    return BLOCK.sub(block, text)


def stale(text: str) -> list[str]:
    """Names of the tables of a page that are not as they should be."""
    return [name for name, body in BLOCK.findall(text) if body != made(name)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args(arguments)
    status = 0
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if args.check:
            for name in stale(text):
                print(f"{page.relative_to(ROOT)}: table {name} is not as docs/tables.py makes it")
                status = 1
        else:
            page.write_text(filled(text), encoding="utf-8")
    for path, theme in CHARTS.items():
        if not args.check:
            path.write_text(chart(theme), encoding="utf-8")
        elif path.read_text(encoding="utf-8") != chart(theme):
            print(f"{path.relative_to(ROOT)} is not as docs/tables.py makes it")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
