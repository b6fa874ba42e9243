"""``bench generate``: tokens per second of the shipped chains beside plain decoding and
transformers' own assisted generation, with the same target and drafters, in turns within one run
(`bench.measuring`).
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence
from typing import Any

from polyspec_ext import progress, tiny
from polyspec_ext.bench import generation_table, machine, output
from polyspec_ext.bench.differences import verdict
from polyspec_ext.bench.generation_calls import ASSISTED, GENERATE, chain_call, generate_call
from polyspec_ext.bench.measuring import Contender, measure, ratios
from polyspec_ext.chain import Chain
from polyspec_ext.levels import HuggingFaceLevel, load
from polyspec_ext.stats import merge

SCHEMA, BATCH = 1, 8  # of the JSON report; rows of the batched runs
PLAIN = "plain decoding"
PACKED, UNPACKED = ", packed", ", weights as torch keeps them"
# What the runtime must reach, in multiples of what stands beside it.
OVER_GENERATE, OVER_ASSISTED, OVER_FASTEST, BATCHED = 1.0, 1.3, 1.5, 3.0


def contenders(
    models: dict[str, Any],
    batch: int,
    levels: dict[str, Any],
    compiled: dict[str, Any] | None = None,
) -> list[Contender]:
    """Everybody, plain decoding first.

    Args:
        models: for transformers, by name.
        levels: of the same models, for our chains.
        compiled: levels that decode through torch.compile: they run beside the others, at batch 1.
    """
    target = models["target"]
    eos = frozenset(levels["target"].eos_token_ids)
    made: list[Contender] = []

    def own(names: tuple[str, ...], rows: int, parts: dict[str, Any], how: str = "") -> None:
        window = list((tiny.WINDOWS if rows == 1 else tiny.BATCH_WINDOWS)[names])
        rounds = tiny.ROUNDS.get(names) if rows == 1 else None
        kind = PLAIN if len(names) == 1 else "chain"
        label = PLAIN + how if len(names) == 1 else f"chain{how}: {', '.join(names)}"
        call = chain_call(Chain([parts[name] for name in names], window, rounds=rounds))
        made.append(Contender(label, kind, names, call, rows, window))

    chains: list[tuple[str, ...]] = [("target", "drafter"), ("target", "middle"), tiny.LEVELS]
    own(("target",), 1, levels)
    with contextlib.suppress(ValueError):  # where nothing can be packed
        # As the chains' target does not run on this processor, since it is slower or was not asked.
        other = HuggingFaceLevel(target, pack=not levels["target"].pack)
        own(("target",), 1, {"target": other}, PACKED if other.pack else UNPACKED)
    made.append(Contender(GENERATE, GENERATE, ("target",), generate_call(target, eos)))
    for name in ("drafter", "middle"):
        (window,) = tiny.WINDOWS["target", name]
        for constant in (None, window):
            how = "defaults" if constant is None else f"{constant} tokens"
            call = generate_call(target, eos, models[name], constant)
            label = f"{ASSISTED}: target, {name}, {how}"
            made.append(Contender(label, ASSISTED, ("target", name), call))
    for names in chains:
        own(names, 1, levels)
    if compiled is not None:
        for names in [("target",), *chains]:
            own(names, 1, compiled, ", compiled")
    if batch > 1:
        own(("target",), batch, levels)
        made.append(Contender(GENERATE, GENERATE, ("target",), generate_call(target, eos), batch))
        for names in chains:
            own(names, batch, levels)
    return made


def _results(
    made: Sequence[Contender], prompts: Sequence[list[int]], target: Any, temperature: float
) -> dict[str, Any]:
    rows = []
    for one in made:
        rates = one.rates()
        found = verdict(target, prompts, made[0].texts, one.texts, temperature)
        row: dict[str, Any] = {
            "label": one.label,
            "kind": one.kind,
            "levels": list(one.levels),
            "window": one.window,
            "batch": one.batch,
            "tokens_per_second": {
                "median": one.rate(), "low": min(rates), "high": max(rates)
            },
            "new_tokens": sum(one.tokens.values()),
            "x_plain": ratios(one, made[0]),
            # Without the prefill, by our own clock; transformers does not tell.
            "decoding_tokens_per_second": one.decoding_rate(),
            "stats": merge(one.stats).to_dict() if one.stats else None,
            "differences": found.differences,
            "lossless": found.lossless,
            "verdict": str(found),
        }  # fmt: skip
        rows.append(row)
    return {"temperature": temperature, "rows": rows, "targets": _targets(made)}


def _targets(made: Sequence[Contender]) -> list[dict[str, Any]]:
    """The aims of the runtime: plain decoding not slower than transformers'; 1.3x assisted
    generation with the same target and drafter, whichever way that runs faster; the best chain 1.5x
    the fastest plain decoding of all; 3x with 8 rows."""

    found: list[dict[str, Any]] = []
    singles = [one for one in made if one.batch == 1]
    chains = [one for one in singles if one.kind == "chain"]
    theirs = next(one for one in singles if one.kind == GENERATE)
    text = f"{made[0].label}: at least {OVER_GENERATE:g}x {GENERATE}"
    found.append({"text": text, "wanted": OVER_GENERATE, **ratios(made[0], theirs)})
    for one in chains:
        same = (one.levels[0], one.levels[-1])
        rivals = [r for r in made if r.kind == ASSISTED and r.levels == same]
        if rivals:
            best = max(rivals, key=Contender.rate)
            text = f"{one.label}: at least {OVER_ASSISTED:g}x {best.label}"
            found.append({"text": text, "wanted": OVER_ASSISTED, **ratios(one, best)})
    chain = max(chains, key=Contender.rate)
    fastest = max((one for one in singles if one.kind in (PLAIN, GENERATE)), key=Contender.rate)
    text = f"{chain.label}: at least {OVER_FASTEST:g}x the fastest plain decoding, {fastest.label}"
    found.append({"text": text, "wanted": OVER_FASTEST, **ratios(chain, fastest)})
    for one in chains:
        for more in made:
            if more.batch > 1 and more.label == one.label:
                text = f"{one.label}: batch {more.batch} at least {BATCHED:g}x batch 1"
                found.append({"text": text, "wanted": BATCHED, **ratios(more, one)})
                together, apart = more.decoding_rate(), one.decoding_rate()
                if together and apart:
                    found[-1]["decoding"] = together / apart
    for target in found:
        target["met"] = target["median"] >= target["wanted"]
    return found


def report_of(args: argparse.Namespace) -> dict[str, Any]:
    """Measures; gives the report that the JSON holds."""
    asked, source = machine.questions(args.prompts, args.questions)
    models = {name: load(tiny.path(name)).model for name in tiny.LEVELS}
    levels = tiny.levels()
    compiled = tiny.levels(compile=True) if args.compile == "all" else None
    if args.ignore_eos:
        ours = [level.model for level in (*levels.values(), *(compiled or {}).values())]
        for model in (*models.values(), *ours):
            model.config.eos_token_id = model.generation_config.eos_token_id = None
    prompts = tiny.prompt_ids(asked)
    before = machine.load_average()
    results = []
    everybody = [contenders(models, args.batch, levels, compiled) for _ in args.temperature]
    total = sum(map(len, everybody)) * len(prompts) * args.repeats
    with progress.bar(total=total, unit="prompt", leave=False) as bar:
        for temperature, made in zip(args.temperature, everybody, strict=True):
            bar.set_description(f"temperature {temperature:g}")
            measure(
                made,
                prompts,
                repeats=args.repeats,
                max_new_tokens=args.max_new_tokens,
                temperature=temperature,
                seed=args.seed,
                clock=time.process_time if args.processor_time else time.perf_counter,
                tick=bar.update,
            )
            results.append(_results(made, prompts, models["target"], temperature))
    return {
        **machine.header("generate", SCHEMA, "cpu", dated=True),
        "settings": {
            "prompts": len(prompts),
            "source": source,
            "repeats": args.repeats,
            "max_new_tokens": args.max_new_tokens,
            "ignore_eos": args.ignore_eos,
            "seed": args.seed,
            "clock": "processor time" if args.processor_time else "wall time",
        },
        "choices": {
            f"{name}{how}": str(level.choice)
            for how, parts in (("", levels), (", compiled", compiled or {}))
            for name, level in parts.items()
        },
        "load": {"before": before, "after": machine.load_average()},
        "results": results,
    }


def run(args: argparse.Namespace) -> int:
    """The subcommand. Returns 1 where texts are not the target's own."""
    report = report_of(args)
    output.show(report, generation_table.markdown, as_json=args.json)
    rows = (row for result in report["results"] for row in result["rows"])
    return 0 if all(row["lossless"] for row in rows) else 1
