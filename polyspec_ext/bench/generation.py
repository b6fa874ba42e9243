"""``bench generate``: tokens per second of the shipped chains beside plain decoding and
transformers' own assisted generation, with the same target and drafters, in turns within one run.

Everybody's tokens are counted alike, up to and including the EOS, over wall time from the prompt to
the last token, prefill included.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import torch

from polyspec_ext import progress, tiny
from polyspec_ext.bench import generation_table, machine
from polyspec_ext.bench.differences import first_difference
from polyspec_ext.bench.generation_calls import Request, Texts, chain_call, generate_call
from polyspec_ext.chain import Chain
from polyspec_ext.levels import HuggingFaceLevel
from polyspec_ext.stats import Stats, merge

SCHEMA, BATCH = 1, 8  # of the JSON report; rows of the batched runs
PLAIN, GENERATE, ASSISTED = "plain decoding", "transformers generate", "transformers assisted"
PACKED, UNPACKED = ", packed", ", weights as torch keeps them"
# What the runtime must reach, in multiples of what stands beside it.
OVER_GENERATE, OVER_ASSISTED, OVER_FASTEST, BATCHED = 1.0, 1.3, 1.5, 3.0


@dataclass
class Contender:
    """One way to generate, and what it measured.

    Attributes:
        kind: PLAIN, GENERATE, ASSISTED or "chain".
        levels: the shipped models it uses.
        batch: prompts per call.
        seconds, tokens: by repeat, over all prompts.
        texts: by prompt, of the last repeat.
    """

    label: str
    kind: str
    levels: tuple[str, ...]
    batch: int
    call: Callable[[Request], Texts]
    window: list[int] = field(default_factory=list)
    seconds: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    texts: dict[int, list[int]] = field(default_factory=dict)
    stats: list[Stats] = field(default_factory=list)

    def rates(self) -> list[float]:
        """Tokens per second of every repeat."""
        return [self.tokens[repeat] / self.seconds[repeat] for repeat in sorted(self.seconds)]


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
        kept: list[Stats] = []
        kind = PLAIN if len(names) == 1 else "chain"
        label = PLAIN + how if len(names) == 1 else f"chain{how}: {', '.join(names)}"
        call = chain_call(Chain([parts[name] for name in names], window, rounds=rounds), kept)
        made.append(Contender(label, kind, names, rows, call, window, stats=kept))

    chains: list[tuple[str, ...]] = [("target", "drafter"), ("target", "middle"), tiny.LEVELS]
    own(("target",), 1, levels)
    with contextlib.suppress(ValueError):  # where nothing can be packed
        # As the chains' target does not run on this processor, since it is slower or was not asked.
        other = HuggingFaceLevel(target, pack=not levels["target"].pack)
        own(("target",), 1, {"target": other}, PACKED if other.pack else UNPACKED)
    made.append(Contender(GENERATE, GENERATE, ("target",), 1, generate_call(target, eos)))
    for name in ("drafter", "middle"):
        (window,) = tiny.WINDOWS["target", name]
        for constant in (None, window):
            how = "defaults" if constant is None else f"{constant} tokens"
            call = generate_call(target, eos, models[name], constant)
            label = f"{ASSISTED}: target, {name}, {how}"
            made.append(Contender(label, ASSISTED, ("target", name), 1, call))
    for names in chains:
        own(names, 1, levels)
    if compiled is not None:
        for names in [("target",), *chains]:
            own(names, 1, compiled, ", compiled")
    if batch > 1:
        own(("target",), batch, levels)
        made.append(Contender(GENERATE, GENERATE, ("target",), batch, generate_call(target, eos)))
        for names in chains:
            own(names, batch, levels)
    return made


def measure(
    made: Sequence[Contender],
    prompts: Sequence[list[int]],
    *,
    repeats: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    clock: Callable[[], float] = time.perf_counter,
    tick: Callable[[int], object] = lambda n: None,
) -> None:
    """Everybody in turns: the ones that take one prompt at every prompt, the others at every group
    of prompts, in an order that rotates. A first call each warms up."""
    for one in made:
        # Compiled passes meet their sizes only on the way.
        for tokens in (8, max_new_tokens) if "compiled" in one.label else (8,):
            first = list(prompts[: one.batch])
            one.call(Request(first, tokens, temperature, [seed] * len(first)))
    one_at_a_time = [one for one in made if one.batch == 1]
    together = [one for one in made if one.batch > 1]
    size = max((one.batch for one in together), default=len(prompts))
    for one in made:
        one.stats.clear()
    for repeat in range(repeats):
        turns = [(one_at_a_time, [number]) for number in range(len(prompts))]
        for start in range(0, len(prompts), size):
            group = list(range(start, min(start + size, len(prompts))))
            turns.append((together, group))
        for turn, (some, numbers) in enumerate(turns):
            # A prompt has one seed however it is run.
            seeds = [seed + repeat * len(prompts) + n for n in numbers]
            request = Request([prompts[n] for n in numbers], max_new_tokens, temperature, seeds)
            shift = (turn + repeat) % max(1, len(some))
            for one in [*some[shift:], *some[:shift]]:
                began = clock()
                texts = one.call(request)
                seconds = clock() - began
                one.seconds[repeat] = one.seconds.get(repeat, 0.0) + seconds
                one.tokens[repeat] = one.tokens.get(repeat, 0) + sum(map(len, texts))
                one.texts.update(zip(numbers, texts, strict=True))
                tick(len(numbers))


def ratios(a: Contender, b: Contender) -> dict[str, float]:
    """Rate of `a` over that of `b`, repeat by repeat: median, lowest and highest."""
    each = [x / y for x, y in zip(a.rates(), b.rates(), strict=True)]
    return {"median": statistics.median(each), "low": min(each), "high": max(each)}


def decoding_rate(one: Contender) -> float | None:
    """Tokens per second of wall time without the prefill, over all repeats; None for
    transformers."""
    return merge(one.stats).tokens_per_second if one.stats else None


def _results(
    made: Sequence[Contender], prompts: Sequence[list[int]], target: Any, temperature: float
) -> dict[str, Any]:
    rows = []
    for one in made:
        rates = one.rates()
        row: dict[str, Any] = {
            "label": one.label,
            "kind": one.kind,
            "levels": list(one.levels),
            "window": one.window,
            "batch": one.batch,
            "tokens_per_second": {
                "median": statistics.median(rates), "low": min(rates), "high": max(rates)
            },
            "new_tokens": sum(one.tokens.values()),
            "x_plain": ratios(one, made[0]),
            # Without the prefill, by our own clock; transformers does not tell.
            "decoding_tokens_per_second": decoding_rate(one),
            "stats": merge(one.stats).to_dict() if one.stats else None,
        }  # fmt: skip
        if temperature == 0:
            found = [
                first_difference(target, p, made[0].texts[n], one.texts[n])
                for n, p in enumerate(prompts)
            ]
            row["differences"] = [d | {"prompt": n} for n, d in enumerate(found) if d is not None]
        rows.append(row)
    return {"temperature": temperature, "rows": rows, "targets": _targets(made)}


def _targets(made: Sequence[Contender]) -> list[dict[str, Any]]:
    """The aims of the runtime: plain decoding not slower than transformers'; 1.3x assisted
    generation with the same target and drafter, whichever way that runs faster; the best chain 1.5x
    the fastest plain decoding of all; 3x with 8 rows."""

    def rate(one: Contender) -> float:
        return statistics.median(one.rates())

    found: list[dict[str, Any]] = []
    singles = [one for one in made if one.batch == 1]
    alone = [one for one in singles if one.kind == "chain"]
    theirs = next(one for one in singles if one.kind == GENERATE)
    text = f"{made[0].label}: at least {OVER_GENERATE:g}x {GENERATE}"
    found.append({"text": text, "wanted": OVER_GENERATE, **ratios(made[0], theirs)})
    for one in alone:
        same = (one.levels[0], one.levels[-1])
        rivals = [r for r in made if r.kind == ASSISTED and r.levels == same]
        if rivals:
            best = max(rivals, key=rate)
            text = f"{one.label}: at least {OVER_ASSISTED:g}x {best.label}"
            found.append({"text": text, "wanted": OVER_ASSISTED, **ratios(one, best)})
    chain = max(alone, key=rate)
    fastest = max((one for one in singles if one.kind in (PLAIN, GENERATE)), key=rate)
    text = f"{chain.label}: at least {OVER_FASTEST:g}x the fastest plain decoding, {fastest.label}"
    found.append({"text": text, "wanted": OVER_FASTEST, **ratios(chain, fastest)})
    for one in alone:
        for more in made:
            if more.batch > 1 and more.label == one.label:
                text = f"{one.label}: batch {more.batch} at least {BATCHED:g}x batch 1"
                found.append({"text": text, "wanted": BATCHED, **ratios(more, one)})
                together, apart = decoding_rate(more), decoding_rate(one)
                if together and apart:
                    found[-1]["decoding"] = together / apart
    for target in found:
        target["met"] = target["median"] >= target["wanted"]
    return found


def report_of(args: argparse.Namespace) -> dict[str, Any]:
    """Measures; gives the report that the JSON holds."""
    from transformers import AutoTokenizer

    from polyspec_ext.levels import load

    if args.threads:
        torch.set_num_threads(args.threads)
    asked, source = machine.questions(args.prompts, args.questions)
    tokenizer = AutoTokenizer.from_pretrained(str(tiny.path("target")))
    models = {name: load(tiny.path(name)).model for name in tiny.LEVELS}
    levels = tiny.levels()
    compiled = tiny.levels(compile=True) if args.compile == "all" else None
    if args.ignore_eos:
        ours = [level.model for level in (*levels.values(), *(compiled or {}).values())]
        for model in (*models.values(), *ours):
            model.config.eos_token_id = model.generation_config.eos_token_id = None
    prompts: list[list[int]] = [tokenizer(tiny.prompt_of(q))["input_ids"] for q in asked]
    before = machine.load_average()
    results = []
    per_run = len(contenders(models, args.batch, levels, compiled)) * len(prompts) * args.repeats
    with progress.bar(total=per_run * len(args.temperature), unit="prompt", leave=False) as bar:
        for temperature in args.temperature:
            bar.set_description(f"temperature {temperature:g}")
            made = contenders(models, args.batch, levels, compiled)
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
        "schema": SCHEMA,
        "command": "bench generate",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "device": "cpu",
        "machine": machine.describe("cpu"),
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
    """The subcommand. Returns 1 where greedy texts differ by more than a tie."""
    report = report_of(args)
    print(json.dumps(report, indent=1) if args.json else generation_table.markdown(report))
    differences = (
        d for r in report["results"] for row in r["rows"] for d in row.get("differences", ())
    )
    return 0 if all(d["tie"] for d in differences) else 1
