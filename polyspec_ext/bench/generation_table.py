"""The report of ``bench generate`` as Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from polyspec_ext.bench import machine, output

Report = dict[str, Any]


def markdown(report: Report) -> str:
    """The whole report."""
    where, settings = report["machine"], report["settings"]
    limit = "EOS ignored," if settings["ignore_eos"] else "up to"
    lines = [
        f"# Generation with the shipped models, {report['date']}",
        "",
        f"{where['cpu']}, transformers {where['transformers']}, commit {where['commit']}; "
        f"{machine.conditions(report)}.",
        "",
        f"Tokens per second of {settings['clock']}, prefill included, over "
        f"{settings['prompts']} questions ({settings['source']}), {limit} "
        f"{settings['max_new_tokens']} new tokens each: median, lowest and highest of "
        f"{settings['repeats']} repeats, in turns. x plain: over plain "
        "decoding at batch 1, repeat by repeat. Decoding: tokens per second of wall time without "
        "the prefill, as our chains tell it.",
        "",
    ]
    lines += ["Fastest on this processor, by timing each level's passes:", ""]
    lines += [f"- {name}: {choice}" for name, choice in report["choices"].items()]
    lines.append("")
    for result in report["results"]:
        lines += [*_result(result), ""]
    return "\n".join(lines).rstrip()


def _result(result: Report) -> Iterator[str]:
    greedy = result["temperature"] == 0
    yield f"## Temperature {result['temperature']:g}{' (greedy)' if greedy else ''}"
    yield ""
    own = "text as plain decoding" if greedy else "likelihood under the target"
    heads = ["", "window", "batch", "tokens/s", "range", "x plain", "range", "decoding", own]
    yield from output.table(heads, map(_cells, result["rows"]))
    yield ""
    for target in result["targets"]:
        word = "met" if target["met"] else "**missed**"
        yield (
            f"- {target['text']}: {target['median']:.2f}x ({target['low']:.2f} to "
            f"{target['high']:.2f}), {word}"
            + ("" if "decoding" not in target else f"; decoding alone {target['decoding']:.2f}x")
        )


def _cells(row: Report) -> list[str]:
    rate, times = row["tokens_per_second"], row["x_plain"]
    return [
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
