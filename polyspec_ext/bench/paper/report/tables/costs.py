"""What levels and passes cost: L, F and T, prefill and decode, bandwidth, and predictions."""

from __future__ import annotations

from collections.abc import Sequence

from polyspec_ext.bench.output import token_count
from polyspec_ext.planning.theory import lemma_seconds

from .. import statistics
from ..form import Table, number, spread, word
from ..saved import Saved
from .sums import Sums, over, sums

GB = 1e-9


def levels(run: Saved) -> Table:
    """L_i, F_i and T_i of every level of every method, and the bandwidth of its passes."""
    copy, weights = run.about["copy_bandwidth_bytes_per_second"], run.about["weight_bytes"]
    records = []
    for name, method in run.methods.items():
        tokens, decode, found = sums(run.turns[name])
        for place, level in enumerate(found, 1):
            seconds = level.pass_seconds
            speed = over(weights.get(level.name), seconds)
            records.append(
                {
                    "method": name,
                    "label": method["label"],
                    "level": place,
                    "name": level.name,
                    "length": level.length,
                    "passes_per_token": over(level.passes, tokens),
                    "ms": None if seconds is None else 1e3 * seconds,
                    "share": over(level.seconds, decode),
                    "gbs": None if speed is None else GB * speed,
                    "of_copy": over(speed, copy),
                }
            )
    return Table(
        "levels",
        "Levels: L, F and T",
        "L: mean acceptance length of the level's verifications; F: its forward passes per new "
        "token; T: milliseconds of a pass; share: of the decode time. GB/s: bytes of weights read "
        "in a pass, over T, and in per cent of the copy bandwidth measured in the run "
        f"({GB * copy:.1f} GB/s), which counts bytes read and written.",
        [
            word("method", "label"),
            number("i", "level", 0),
            word("level", "name"),
            number("L", "length"),
            number("F", "passes_per_token", 3),
            number("T, ms", "ms"),
            number("share, %", "share", 0, 100),
            number("GB/s", "gbs", 1),
            number("of copy, %", "of_copy", 0, 100),
        ],
        records,
    )


def times(run: Saved) -> Table:
    """Prefill and decode apart."""
    base = run.turns[run.baseline]
    records = []
    for name, method in run.methods.items():
        turns = run.turns[name]
        _, decode, found = sums(turns)
        told = [turn for turn in turns.values() if turn.prefill_seconds is not None]
        prefill = sum(turn.prefill_seconds or 0 for turn in told)
        wall = sum(turn.seconds or 0 for turn in told)
        read = sum(turn.prompt_tokens or 0 for turn in told)
        inside = sum(level.seconds for level in found)
        records.append(
            {
                "method": name,
                "label": method["label"],
                "turns": len(turns),
                "prefill_ms": 1e3 * prefill / len(told) if told else None,
                "prefill_tokens_per_second": over(read, prefill),
                "prefill_share": over(prefill, wall),
                "decode_tokens_per_second": statistics.rate(turns, statistics.decode_seconds),
                **spread(
                    "decode_speedup", statistics.speedup(turns, base, statistics.decode_seconds)
                ),
                "engine_share": 1 - inside / decode if decode and found else None,
            }
        )
    return Table(
        "times",
        "Prefill and decode apart",
        "Decode: wall time less prefill. Engine: the share of the decode time that no level's "
        "passes account for.",
        [
            word("method", "label"),
            number("prefill, ms/turn", "prefill_ms", 1),
            number("prompt tokens/s", "prefill_tokens_per_second", 0),
            number("prefill share, %", "prefill_share", 0, 100),
            number("decode tokens/s", "decode_tokens_per_second", 1),
            number("decode speedup", "decode_speedup", ratio=True),
            number("engine, %", "engine_share", 0, 100),
        ],
        records,
    )


def passes(run: Saved) -> Table:
    """Seconds of the models' passes by number of tokens, and how alike they are to the target."""
    found, weights = run.about["pass_seconds"], run.about["weight_bytes"]
    widths = sorted({int(width) for times in found.values() for width in times})
    records = []
    for name, times_of in found.items():
        speed = over(weights.get(name), times_of.get("1"))
        milliseconds = {width: 1e3 * seconds for width, seconds in times_of.items()}
        records.append(
            {
                "name": name,
                **{f"ms_{width}": milliseconds.get(str(width)) for width in widths},
                "weight_bytes": weights.get(name),
                "gbs": None if speed is None else GB * speed,
                "of_copy": over(speed, run.about["copy_bandwidth_bytes_per_second"]),
                "overlap": run.about["overlap"].get(name),
            }
        )
    return Table(
        "passes",
        "Passes of the models by themselves",
        "Milliseconds by number of tokens; GB/s of the weights in a pass of one token. E[1 - TV]: "
        "overlap of a model's distribution with the target's, at temperature 1.",
        [
            word("model", "name"),
            *(number(token_count(width), f"ms_{width}") for width in widths),
            number("weights, MB", "weight_bytes", 1, 1e-6),
            number("GB/s", "gbs", 1),
            number("of copy, %", "of_copy", 0, 100),
            number("E[1 - TV]", "overlap", 3),
        ],
        records,
    )


def predictions(run: Saved) -> Table:
    """What was predicted, against what was measured."""
    records = []
    for name, method in run.methods.items():
        turns = run.turns[name]
        tokens, decode, found = sums(turns)
        forecast = run.about["prediction"].get(name, {}).get("tokens_per_second")
        lemma = _lemma(found)
        if not tokens or (forecast is None and lemma is None):
            continue
        measured = statistics.rate(turns, statistics.decode_seconds)
        records.append(
            {
                "method": name,
                "label": method["label"],
                "predicted_tokens_per_second": forecast,
                "decode_tokens_per_second": measured,
                "predicted_over_measured": over(forecast, measured),
                "lemma_ms": None if lemma is None else 1e3 * lemma,
                "passes_ms": 1e3 * sum(level.seconds for level in found) / tokens,
                "decode_ms": None if decode is None else 1e3 * decode / tokens,
            }
        )
    return Table(
        "predictions",
        "Predicted against measured",
        "Tokens per second: the planner's prediction from measured passes and acceptances, beside "
        "those of decoding. Milliseconds per token: Lemma 3.1 with the run's own L, T and beta "
        "(it leaves out what a middle level emits and the target rejects); what the levels' passes "
        "took, sum of F T; and all of the decode time.",
        [
            word("method", "label"),
            number("planner, tokens/s", "predicted_tokens_per_second", 1),
            number("measured, tokens/s", "decode_tokens_per_second", 1),
            number("ratio", "predicted_over_measured"),
            number("Lemma 3.1, ms/token", "lemma_ms", 3),
            number("sum of F T, ms/token", "passes_ms", 3),
            number("decode, ms/token", "decode_ms", 3),
        ],
        records,
    )


def _lemma(found: Sequence[Sums]) -> float | None:
    """Lemma 3.1's seconds per token, of measured L, T and beta; None where a level never ran."""
    if len(found) < 2 or any(not level.verified for level in found[:-1]):
        return None
    lengths = [level.accepted / level.verified for level in found[:-1]]
    seconds = [level.pass_seconds or 0.0 for level in found]
    return lemma_seconds(1, lengths, seconds, found[-1].passes / found[-2].verified)
