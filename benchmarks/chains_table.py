"""The report of ``benchmarks chains`` as Markdown."""

from __future__ import annotations

from typing import Any

from benchmarks import machine, output

_HEADS = (
    "chain", "window", "predicted", "+-", "tokens/s", "predicted/measured", "at the run's speed",
    "x plain", "predicted/measured, x plain", "decoding", "L", "F", "T", "engine", "lossless",
)  # fmt: skip


def markdown(report: dict[str, Any]) -> str:
    """The report as tables."""
    where, settings = report["machine"], report["settings"]
    lines = [
        f"# Chains below a target of {settings['parameters'] / 1e6:.0f} million parameters, "
        f"{where['device_name']}",
        "",
        f"{machine.conditions(report)}. The target is {_target(settings)}, in {settings['dtype']}; "
        f"{settings['prompts']} questions ({settings['source']}), up to "
        f"{settings['max_new_tokens']} new tokens, median of {settings['repeats']} repeats in "
        f"turns, prefill included; decoding: without it. {_windows(settings)}",
        "",
    ]
    passes = {name: times for name, times in report["pass_ms"].items() if name != "tokens"}
    shared = {name: report["overlap"].get(name.split(",")[0]) for name in passes}
    widths = map(output.token_count, report["pass_ms"]["tokens"])
    lines += output.table(
        ["ms of a pass", *widths, "E[1 - TV]"],
        (
            [name, *(f"{ms:.2f}" for ms in times), output.number(shared[name], ".3f")]
            for name, times in passes.items()
        ),
    )
    for result in report["results"]:
        lines += [
            "",
            f"## Temperature {result['temperature']:g}",
            "",
            "L: mean acceptance length; F: passes per token; T: ms of a pass with its "
            "verification; by level, the target first.",
            "",
            *output.table(_HEADS, map(_cells, result["rows"])),
        ]
        choice, now = result["choice"], result["choice_at_the_runs_speed"]
        if choice is not None:
            lines += [
                "",
                f"By prediction: {choice['chosen']}; the fastest: {choice['fastest']}; "
                f"{choice['of_fastest']:.3f} of it. By prediction at the run's speed: "
                f"{now['chosen']}; {now['of_fastest']:.3f}.",
            ]
    return "\n".join(lines)


def _target(settings: dict[str, Any]) -> str:
    """What it is, in words."""
    if settings["shape"] is None:
        return f"the shipped one grown {settings['times']} times"
    return (
        f"a trained small model at the cost of {settings['shape']}: the shipped one, grown to its "
        "width and depth, with the same distribution; its vocabulary stays the small one, and its "
        "4-bit copy is not calibrated"
    )


def _windows(settings: dict[str, Any]) -> str:
    if not settings["plan_seconds"]:
        return "Windows: the engine's own choice."
    return (
        f"Windows and tails (+): the planner's, from at most {settings['plan_seconds']} seconds of "
        "measuring on these questions, and a moment of every chain's own work, with what it "
        "predicts and twice the standard error of that; at the run's speed: predicted over "
        "measured where the machine is as fast as the other chains of the run were on average over "
        "their predictions."
    )


def _window(row: dict[str, Any]) -> str:
    text = ",".join(map(str, row["window"])) or "-"
    return f"{text} + {row['tail']}" if row["tail"] else text


def _cells(row: dict[str, Any]) -> list[str]:
    levels = row["levels"]
    lengths = [x["acceptance_length"] for x in levels if x["acceptance_length"] is not None]
    return [
        row["label"],
        _window(row),
        output.number(row["predicted_tokens_per_second"], ".1f"),
        output.number(row["uncertainty"], ".1%"),
        f"{row['tokens_per_second']:.1f}",
        output.number(row["predicted_over_measured"], ".2f"),
        output.number(row["predicted_at_the_runs_speed_over_measured"], ".2f"),
        f"{row['x_plain']['median']:.2f}",
        output.number(row["predicted_over_measured_x_plain"], ".2f"),
        output.number(row["decoding_tokens_per_second"], ".1f"),
        ", ".join(f"{x:.2f}" for x in lengths) or "-",
        ", ".join(f"{x['passes_per_token']:.2f}" for x in levels) or "-",
        ", ".join(output.number(x["ms"], ".1f") for x in levels) or "-",
        "-" if row["engine_share"] is None else f"{100 * row['engine_share']:.0f} %",
        row["verdict"],
    ]
