"""What levels and passes cost: L, F and T, prefill and decode, bandwidth, and predictions."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import machine
from benchmarks.output import token_count
from polyspec_ext.planning.theory import lemma_seconds

from .. import statistics
from ..form import Cell, Table, hidden, interval, method_cell, number, word
from ..saved import Saved
from ..statistics import Sums, over, sums

GB = 1e-9


def levels(run: Saved) -> Table:
    """L_i, F_i and T_i of every level of every method, and the bandwidth of its passes."""
    rows = []
    for name, method in run.methods.items():
        tokens, decode, found = sums(run.turns[name])
        for place, level in enumerate(found, 1):
            seconds = level.pass_seconds
            rows.append(
                [
                    method_cell(name, method["label"]),
                    number("i", "level", place, 0),
                    word("level", "name", level.name),
                    number("L", "length", level.length),
                    number("F", "passes_per_token", over(level.passes, tokens), 3),
                    number("T, ms", "ms", None if seconds is None else 1e3 * seconds),
                    number("share, %", "share", over(level.seconds, decode), 0, 100),
                    *_bandwidth(run, level.name, seconds),
                ]
            )
    shares = [cell.values["of_copy"] for row in rows for cell in row if "of_copy" in cell.values]
    return Table(
        "levels",
        "Levels: L, F and T",
        "L: mean acceptance length of the level's verifications; F: its forward passes per new "
        "token; T: milliseconds of a pass; share: of the decode time. GB/s: bytes of weights read "
        "in a pass, over T, and in per cent of the copy bandwidth measured in the run "
        f"({GB * run.about['copy_bandwidth_bytes_per_second']:.1f} GB/s), which counts bytes read "
        f"and written. {' '.join(machine.contradiction(shares))}".rstrip(),
        rows,
    )


def _bandwidth(run: Saved, name: str, seconds: float | None) -> list[Cell]:
    """Of the weights of a model in a pass."""
    speed = over(run.about["weight_bytes"].get(name), seconds)
    of_copy = over(speed, run.about["copy_bandwidth_bytes_per_second"])
    return [
        number("GB/s", "gbs", None if speed is None else GB * speed, 1),
        number("of copy, %", "of_copy", of_copy, 0, 100),
    ]


def times(run: Saved) -> Table:
    """Prefill and decode apart."""
    base = run.turns[run.baseline]
    rows = []
    for name, method in run.methods.items():
        turns = run.turns[name]
        _, decode, found = sums(turns)
        told = [turn for turn in turns.values() if turn.prefill_seconds is not None]
        prefill = sum(turn.prefill_seconds or 0 for turn in told)
        wall = sum(turn.seconds or 0 for turn in told)
        read = sum(turn.prompt_tokens or 0 for turn in told)
        inside = sum(level.seconds for level in found)
        engine = 1 - inside / decode if decode and found else None
        per_turn = 1e3 * prefill / len(told) if told else None
        speedup = statistics.speedup(turns, base, decode=True)
        rate = statistics.rate(turns, decode=True)
        rows.append(
            [
                method_cell(name, method["label"]),
                hidden(turns=len(turns)),
                number("prefill, ms/turn", "prefill_ms", per_turn, 1),
                number("prompt tokens/s", "prefill_tokens_per_second", over(read, prefill), 0),
                number("prefill share, %", "prefill_share", over(prefill, wall), 0, 100),
                number("decode tokens/s", "decode_tokens_per_second", rate, 1),
                interval("decode speedup", "decode_speedup", speedup, ratio=True),
                number("engine, %", "engine_share", engine, 0, 100),
            ]
        )
    return Table(
        "times",
        "Prefill and decode apart",
        "Decode: wall time less prefill. Engine: the share of the decode time that no level's "
        "passes account for.",
        rows,
    )


def passes(run: Saved) -> Table:
    """Seconds of the models' passes by number of tokens, and how alike they are to the target."""
    about = run.about
    widths = sorted({int(width) for times in about["pass_seconds"].values() for width in times})
    rows = []
    for name, seconds in about["pass_seconds"].items():
        ms = {int(width): 1e3 * value for width, value in seconds.items()}
        rows.append(
            [
                word("model", "name", name),
                *(number(token_count(n), f"ms_{n}", ms.get(n)) for n in widths),
                number("weights, MB", "weight_bytes", about["weight_bytes"].get(name), 1, 1e-6),
                *_bandwidth(run, name, seconds.get("1")),
                number("E[1 - TV]", "overlap", about["overlap"].get(name), 3),
            ]
        )
    return Table(
        "passes",
        "Passes of the models by themselves",
        "Milliseconds by number of tokens; GB/s of the weights in a pass of one token. E[1 - TV]: "
        "overlap of a model's distribution with the target's, at temperature 1.",
        rows,
    )


def predictions(run: Saved) -> Table:
    """What was predicted, against what was measured."""
    rows = []
    for name, method in run.methods.items():
        turns = run.turns[name]
        tokens, decode, found = sums(turns)
        forecast = run.about["prediction"].get(name, {}).get("tokens_per_second")
        lemma = _lemma(found)
        if not tokens or (forecast is None and lemma is None):
            continue
        rate = statistics.rate(turns, decode=True)
        in_passes = 1e3 * sum(level.seconds for level in found) / tokens
        per_token = None if decode is None else 1e3 * decode / tokens
        lemma_ms = None if lemma is None else 1e3 * lemma
        rows.append(
            [
                method_cell(name, method["label"]),
                number("planner, tokens/s", "predicted_tokens_per_second", forecast, 1),
                number("measured, tokens/s", "decode_tokens_per_second", rate, 1),
                number("ratio", "predicted_over_measured", over(forecast, rate)),
                number("Lemma 3.1, ms/token", "lemma_ms", lemma_ms, 3),
                number("sum of F T, ms/token", "passes_ms", in_passes, 3),
                number("decode, ms/token", "decode_ms", per_token, 3),
            ]
        )
    return Table(
        "predictions",
        "Predicted against measured",
        "Tokens per second: the planner's prediction from measured passes and acceptances, beside "
        "those of decoding. Milliseconds per token: Lemma 3.1 with the run's own L, T and beta "
        "(it leaves out what a middle level emits and the target rejects); what the levels' passes "
        "took, sum of F T; and all of the decode time.",
        rows,
    )


def _lemma(found: Sequence[Sums]) -> float | None:
    """Lemma 3.1's seconds per token, of measured L, T and beta; None where a level never ran."""
    if len(found) < 2 or any(not level.verified for level in found[:-1]):
        return None
    lengths = [level.accepted / level.verified for level in found[:-1]]
    seconds = [level.pass_seconds or 0.0 for level in found]
    return lemma_seconds(1, lengths, seconds, found[-1].passes / found[-2].verified)
