"""The demo's tables: a row per configuration, then what every level did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyspec_ext import columns
from polyspec_ext.stats import merge

from .differences import verdict
from .measuring import Contender


def rows_of(
    entries: Sequence[Contender],
    prompts: Sequence[list[int]],
    target: Any,
    temperature: float,
    baseline: str,
) -> dict[str, Any]:
    """The rows of a table, and the fastest plain decoding, which ratios are over.

    Args:
        entries: as they were measured, plain decoding first.
        target: the model, as transformers has it.
        baseline: label of the entry that is transformers' `generate`.
    """
    theirs = next(e for e in entries if e.label == baseline)
    alone = [e for e in entries if not e.window and e.plain is None]
    fastest = max(alone, key=Contender.rate)
    decoding = max(e.decoding_rate() or 0.0 for e in alone)
    rows = []
    for e in entries:
        # Another engine has its own form of the target, and its texts are that one's.
        reference = next((one for one in entries if one.label == e.plain), None)
        if reference is None:
            found = verdict(target, prompts, entries[0].texts, e.texts, temperature)
            lossless, said = found.lossless, str(found)
        else:
            same = sum(e.texts[n] == reference.texts[n] for n in e.texts)
            lossless, said = None, f"{same} of {len(e.texts)} of its own"
            said = said if temperature == 0 else "-"
        rate, own = e.rate(), e.decoding_rate()
        rows.append(
            {
                "label": e.label,
                "window": e.window,
                "tokens_per_second": rate,
                "ratio": rate / fastest.rate(),
                "ratio_to_generate": rate / theirs.rate(),
                "decoding_ratio": None if own is None else own / decoding,
                "new_tokens": sum(map(len, e.texts.values())),
                "lossless": lossless,
                "verdict": said,
                "stats": merge(e.stats).to_dict() if e.stats else None,
            }
        )
    return {"fastest_plain": fastest.label, "configurations": rows}


def show(table: dict[str, Any], where: dict[str, Any], load: str) -> None:
    """Print a table of `rows_of`, with what was measured and the levels' "choices"; `where`: of
    `machine.describe`, `load`: of `processor.load_line`."""
    greedy = table["temperature"] == 0
    heads = ("window", "tokens/s", "ratio", "decoding", "/generate",
             "same text as plain" if greedy else "likelihood under target")  # fmt: skip
    rows: list[columns.Row] = []
    for row in table["configurations"]:
        alone = row["decoding_ratio"]
        rows.append((row["label"], (
            ",".join(map(str, row["window"])) or "-", f"{row['tokens_per_second']:.1f}",
            f"{row['ratio']:.2f}x", "-" if alone is None else f"{alone:.2f}x",
            f"{row['ratio_to_generate']:.2f}x", row["verdict"],
        )))  # fmt: skip
    print(columns.table("configuration", heads, rows, left=1))
    per_level = ("passes", "ms/pass", "mean length", "accepted")
    rows = []
    for row in table["configurations"]:
        if row["stats"] is None or len(row["stats"]["levels"]) == 1:
            continue
        rows.append((row["label"], ("",) * len(per_level)))
        for level in row["stats"]["levels"]:
            passes, length = level["num_forward_passes"], level["mean_acceptance_length"]
            accepts = length is not None
            rows.append((f"  {level['name']}", (
                str(passes), f"{level['seconds'] / passes * 1e3:.2f}" if passes else "-",
                f"{length:.2f}" if accepts else "-",
                f"{level['draft_acceptance_rate']:.2f}" if accepts else "-",
            )))  # fmt: skip
    if rows:
        print(f"\n{columns.table('per level', per_level, rows)}")
    print("\nfastest on this processor, by timing each level's passes")
    for name, choice in table["choices"].items():
        print(columns.wrapped(f"  {name}: {choice}"))
    counts = f"{table['prompts']} questions, median of {table['repeats']} interleaved runs each"
    for line in (
        f"\nratio: over the fastest plain decoding ({table['fastest_plain']}), prefill included; "
        "decoding: over the fastest by the same engine, without the prefill; /generate: over "
        "transformers' generate; mean length: tokens that a verification hands up; accepted: share "
        "of the draft tokens",
        f"{counts}, up to {table['max_new_tokens']} new tokens, temperature "
        f"{table['temperature']:g}",
        f"{where['cpu']}, {where['cores']} cores, {where['threads']} threads; torch "
        f"{where['torch']}, transformers {where['transformers']}",
        f"{load}\n",
    ):
        print(columns.wrapped(line), flush=True)
