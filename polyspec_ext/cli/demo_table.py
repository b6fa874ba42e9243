"""The demo's tables: a row per configuration, then what every level did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..bench.differences import verdict
from ..bench.measuring import Contender
from ..stats import merge

WIDTH = 56  # of the labels, in characters


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


def show(table: dict[str, Any], where: dict[str, Any]) -> None:
    """Prints a table of `rows_of`, with what was measured and the levels' "choices"; `where`: of
    `machine.describe`."""
    greedy = table["temperature"] == 0
    print(
        f"{'configuration':{WIDTH}} {'window':>6} {'tokens/s':>9} {'ratio':>6} {'decoding':>8} "
        f"{'/generate':>9}  "
        f"{'same text as plain' if greedy else 'likelihood under the target'}"
    )
    for row in table["configurations"]:
        window = ",".join(map(str, row["window"])) or "-"
        line = f"{row['label']:{WIDTH}} {window:>6} {row['tokens_per_second']:9.1f}"
        alone = row["decoding_ratio"]
        line += f" {row['ratio']:5.2f}x {'-' if alone is None else f'{alone:.2f}x':>8}"
        print(f"{line} {row['ratio_to_generate']:8.2f}x  {row['verdict']}")
    print(
        f"\n{'per level':{WIDTH}} forward passes   ms/pass  mean acceptance length  acceptance rate"
    )
    for row in table["configurations"]:
        if row["stats"] is None or len(row["stats"]["levels"]) == 1:
            continue
        print(row["label"])
        for level in row["stats"]["levels"]:
            passes = level["num_forward_passes"]
            each = f"{level['seconds'] / passes * 1e3:.2f}" if passes else "-"
            line = f"  {level['name']:{WIDTH - 2}} {passes:14}  {each:>8}"
            if level["mean_acceptance_length"] is not None:
                line += f"  {level['mean_acceptance_length']:22.2f}"
                line += f"  {level['draft_acceptance_rate']:15.2f}"
            print(line)
    print("\nfastest on this processor, by timing each level's passes")
    for name, choice in table["choices"].items():
        print(f"  {name}: {choice}")
    print(
        f"\nratio: over the fastest plain decoding ({table['fastest_plain']}), prefill included; "
        "decoding: over the\nfastest by the same engine, without the prefill; /generate: over "
        "transformers' generate"
    )
    print(
        f"{table['prompts']} questions, median of {table['repeats']} interleaved runs each, up to "
        f"{table['max_new_tokens']} new tokens, temperature {table['temperature']:g}\n"
        f"{where['cpu']}, {where['cores']} cores, {where['threads']} threads; "
        f"torch {where['torch']}, transformers {where['transformers']}\n",
        flush=True,
    )
