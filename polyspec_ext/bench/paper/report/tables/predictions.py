"""Predicted against measured."""

from __future__ import annotations

from collections.abc import Sequence

from polyspec_ext.planning.theory import lemma_seconds

from .. import statistics
from ..form import Column, Table, number, word
from ..saved import Saved
from .sums import Sums, over, sums


def _lemma(found: Sequence[Sums]) -> float | None:
    """Lemma 3.1's seconds per token, of measured L, T and beta; None where a level never ran."""
    if len(found) < 2 or any(not level.verified for level in found[:-1]):
        return None
    lengths = [level.accepted / level.verified for level in found[:-1]]
    seconds = [level.pass_seconds or 0.0 for level in found]
    return lemma_seconds(1, lengths, seconds, found[-1].passes / found[-2].verified)


def predictions(run: Saved) -> Table:
    """What was predicted, against what was measured."""
    records = []
    planned = run.about.get("prediction") or {}
    for name, method in run.methods.items():
        turns = run.turns[name]
        tokens, decode, found = sums(turns)
        forecast = (planned.get(name) or {}).get("tokens_per_second")
        lemma = _lemma(found)
        if not tokens or (forecast is None and lemma is None):
            continue
        measured = statistics.rate(turns, statistics.decode_seconds)
        per_token = None if decode is None else 1e3 * decode / tokens
        in_passes = 1e3 * sum(level.seconds for level in found) / tokens
        records.append(
            {
                "method": name,
                "label": method["label"],
                "predicted_tokens_per_second": forecast,
                "decode_tokens_per_second": measured,
                "predicted_over_measured": None if forecast is None else over(forecast, measured),
                "lemma_ms": None if lemma is None else 1e3 * lemma,
                "passes_ms": in_passes,
                "decode_ms": per_token,
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
            Column("method", word("label"), words=True),
            Column("planner, tokens/s", number("predicted_tokens_per_second", 1)),
            Column("measured, tokens/s", number("decode_tokens_per_second", 1)),
            Column("ratio", number("predicted_over_measured")),
            Column("Lemma 3.1, ms/token", number("lemma_ms", 3)),
            Column("sum of F T, ms/token", number("passes_ms", 3)),
            Column("decode, ms/token", number("decode_ms", 3)),
        ],
        records,
    )
