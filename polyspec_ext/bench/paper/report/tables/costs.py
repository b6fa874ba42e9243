"""What levels and passes cost: L, F and T, prefill and decode, bandwidth."""

from __future__ import annotations

from collections.abc import Mapping

from polyspec_ext.bench.output import token_count

from .. import statistics
from ..form import Column, Table, below_one, interval, number, word
from ..saved import Saved
from .compared import spread
from .sums import over, sums

GB = 1e-9


def levels(run: Saved) -> Table:
    """L_i, F_i and T_i of every level of every method, and the bandwidth of its passes."""
    copy = run.about.get("copy_bandwidth_bytes_per_second")
    weights = run.about.get("weight_bytes") or {}
    records = []
    for name, method in run.methods.items():
        tokens, decode, found = sums(run.turns[name])
        for place, level in enumerate(found, 1):
            seconds = level.pass_seconds
            size = weights.get(level.name)
            speed = None if not size or not seconds else size / seconds
            records.append(
                {
                    "method": name,
                    "label": method["label"],
                    "level": place,
                    "name": level.name,
                    "length": level.length,
                    "passes_per_token": over(level.passes, tokens),
                    "ms": None if seconds is None else 1e3 * seconds,
                    "share": None if decode is None else over(level.seconds, decode),
                    "gbs": None if speed is None else GB * speed,
                    "of_copy": None if speed is None else over(speed, copy),
                }
            )
    bandwidth = "" if not copy else f" ({GB * copy:.1f} GB/s)"
    return Table(
        "levels",
        "Levels: L, F and T",
        "L: mean acceptance length of the level's verifications; F: its forward passes per new "
        "token; T: milliseconds of a pass; share: of the decode time. GB/s: bytes of weights read "
        "in a pass, over T, and in per cent of the copy bandwidth measured in the run"
        f"{bandwidth}, which counts bytes read and written.",
        [
            Column("method", word("label"), words=True),
            Column("i", number("level", 0)),
            Column("level", word("name"), words=True),
            Column("L", number("length")),
            Column("F", number("passes_per_token", 3)),
            Column("T, ms", number("ms")),
            Column("share, %", number("share", 0, 100)),
            Column("GB/s", number("gbs", 1)),
            Column("of copy, %", number("of_copy", 0, 100)),
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
                "prefill_share": over(prefill, wall) if told else None,
                "decode_tokens_per_second": statistics.rate(turns, statistics.decode_seconds),
                **spread(
                    "decode_speedup",
                    statistics.speedup(turns, base, seconds=statistics.decode_seconds),
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
            Column("method", word("label"), words=True),
            Column("prefill, ms/turn", number("prefill_ms", 1)),
            Column("prompt tokens/s", number("prefill_tokens_per_second", 0)),
            Column("prefill share, %", number("prefill_share", 0, 100)),
            Column("decode tokens/s", number("decode_tokens_per_second", 1)),
            Column("decode speedup", interval("decode_speedup"), loses=below_one("decode_speedup")),
            Column("engine, %", number("engine_share", 0, 100)),
        ],
        records,
    )


def passes(run: Saved) -> Table:
    """Seconds of the models' passes by number of tokens, and how alike they are to the target."""
    found: Mapping[str, Mapping[str, float]] = run.about.get("pass_seconds") or {}
    overlap = run.about.get("overlap") or {}
    weights = run.about.get("weight_bytes") or {}
    copy = run.about.get("copy_bandwidth_bytes_per_second")
    widths = sorted({int(width) for times in found.values() for width in times})
    records = []
    for name, times_of in found.items():
        size, one = weights.get(name), times_of.get("1")
        speed = size / one if size and one else None
        records.append(
            {
                "name": name,
                **{
                    f"ms_{width}": None if (s := times_of.get(str(width))) is None else 1e3 * s
                    for width in widths
                },
                "weight_bytes": size,
                "gbs": None if speed is None else GB * speed,
                "of_copy": None if speed is None else over(speed, copy),
                "overlap": overlap.get(name),
            }
        )
    return Table(
        "passes",
        "Passes of the models by themselves",
        "Milliseconds by number of tokens; GB/s of the weights in a pass of one token. E[1 - TV]: "
        "overlap of a model's distribution with the target's, at temperature 1.",
        [
            Column("model", word("name"), words=True),
            *(Column(token_count(width), number(f"ms_{width}")) for width in widths),
            Column("weights, MB", number("weight_bytes", 1, 1e-6)),
            Column("GB/s", number("gbs", 1)),
            Column("of copy, %", number("of_copy", 0, 100)),
            Column("E[1 - TV]", number("overlap", 3)),
        ],
        records,
    )
