"""``python -m polyspec_ext demo``: the shipped chain beside plain decoding of the same target, in
one run.

The baselines are all the same target with its cache: transformers' own greedy `generate`, and the
same engine with one level, its weights packed and not, and compiled. The fastest of them is what
ratios are over. Configurations take turns, so that a change in the machine's load meets them all.

A second table has chains below the same target grown, whose passes are dear enough that a 4-bit
copy between target and drafter pays.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import platformdirs

from .. import progress, tiny
from ..bench import chains as grown_chains
from ..bench import chains_table, machine
from ..bench.differences import verdict
from ..bench.generation_calls import chain_call, generate_call
from ..bench.machine import QUESTIONS
from ..bench.measuring import Contender, measure
from ..chain import Chain
from ..levels import HuggingFaceLevel
from ..planning import default_store
from ..quantization import FORMAT
from ..stats import merge
from ..tiny import growth
from . import chain_options, options

PLAIN, GENERATE = "plain decoding, same engine", "plain decoding, transformers generate"
COMPILED = ", compiled"
WIDTH = 56  # of the labels, in characters
# Of the second table, each by its levels below the grown target.
GROWN = (
    (grown_chains.TREE,),
    (grown_chains.DRAFTER,),
    (grown_chains.W4,),
    (grown_chains.W4, grown_chains.TREE),
    (grown_chains.W4, grown_chains.DRAFTER),
    (grown_chains.W4, grown_chains.MIDDLE),
    (grown_chains.W4, grown_chains.NGRAM),
)


def add_command(commands: Any) -> None:
    """Adds ``demo`` to the subcommands of a parser."""
    sub = commands.add_parser(
        "demo",
        help="plain decoding, two levels and three levels side by side",
        description=(
            "The shipped models: plain decoding, two-level chains and the three-level "
            "chain in one run."
        ),
    )
    options.add_count(sub, "--prompts", 6, "questions")
    options.add_count(sub, "--repeats", 3, "runs per question")
    options.add_count(sub, "--max-new-tokens", 128)
    options.add_temperature(sub, 0.0)
    options.add_seed(sub)
    sub.add_argument(
        "--window", type=options.COUNTS_OR_NONE, metavar="MU,K", help="of the three-level chain"
    )
    sub.add_argument(
        "--two-level-window",
        type=lambda text: [options.COUNT_OR_NONE(text)],
        metavar="K",
        help="of the two-level chains",
    )
    options.add_threads(sub)
    options.add_json(sub, "tables")
    sub.add_argument(
        "--compile",
        choices=("auto", "none", "all"),
        default="auto",
        help="what goes through torch.compile, beside the same without: the levels that it makes "
        "faster on this processor, none, or all (needs a C++ compiler; default: %(default)s)",
    )
    sub.add_argument(
        "--grown",
        type=options.COUNT_OR_NONE,
        default=4,
        metavar="N",
        help="how many times as wide the target of the second table is; 0: no second table "
        "(default: %(default)s, 112 million parameters)",
    )
    chain_options.add_measure_again(sub)
    sub.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print. Returns 1 where texts are not the target's own."""
    if args.prompts > len(QUESTIONS):
        raise ValueError(f"--prompts: expected at most {len(QUESTIONS)}, given {args.prompts}")
    tokenizer = tiny.tokenizer()
    # One level each for all chains: they take turns.
    if args.measure_again:
        default_store().clear()
    levels = tiny.levels()
    target = levels["target"]
    prompts = tiny.prompt_ids(QUESTIONS[: args.prompts])
    eos = frozenset(target.eos_token_ids)
    entries: list[Contender] = []

    def plain(level: HuggingFaceLevel, how: str) -> None:
        call = chain_call(Chain([level]))
        entries.append(Contender(PLAIN + how, PLAIN, ("target",), call))

    def chains(parts: dict[str, HuggingFaceLevel], how: str) -> None:
        for label, names, window in (
            ("two levels: target, drafter", ("target", "drafter"), args.two_level_window),
            ("two levels: target, middle", ("target", "middle"), args.two_level_window),
            ("three levels: target, middle, drafter", tiny.LEVELS, args.window),
        ):
            chosen = list(tiny.WINDOWS[names]) if window is None else window
            rounds = tiny.ROUNDS.get(names) if window is None else None
            chain = Chain([parts[name] for name in names], chosen, rounds=rounds)
            call = chain_call(chain)
            entries.append(Contender(label + how, "chain", names, call, window=chosen))

    plain(target, "")
    alone = generate_call(target.model, eos)
    entries.append(Contender(GENERATE, GENERATE, ("target",), alone))
    with contextlib.suppress(ValueError):  # where nothing can be packed
        other = HuggingFaceLevel(target.model, pack=not target.pack)
        plain(other, ", packed" if other.pack else ", weights as torch keeps them")
    chains(levels, "")
    choices = {name: str(level.choice) for name, level in levels.items()}
    if args.compile != "none" and _compiler() is None:
        print("no C++ compiler found: nothing is compiled", file=sys.stderr)
        args.compile = "none"
    if args.compile != "none":
        progress.note("compiling, which takes a few minutes the first time on a machine")
        levels = tiny.levels(compile="auto" if args.compile == "auto" else True)
        choices |= {name + COMPILED: str(level.choice) for name, level in levels.items()}
        if levels["target"].compile:
            plain(levels["target"], COMPILED)
        if any(level.compile for level in levels.values()):
            chains(levels, COMPILED)
    total = len(entries) * len(prompts) * args.repeats
    with progress.bar(total=total, desc="measuring", leave=False) as bar:
        measure(
            entries,
            prompts,
            repeats=args.repeats,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            seed=args.seed,
            warm_up=args.max_new_tokens,
            tick=bar.update,
        )
    result = _report(entries, prompts, target.model, args)
    result["choices"] = choices
    if args.grown:
        progress.note("the same target grown: its 4-bit copy is calibrated the first time")
        result["grown"] = grown_chains.report_of(
            grown_chains.Settings(
                prompts=min(3, args.prompts),
                repeats=args.repeats,
                max_new_tokens=args.max_new_tokens,
                times=args.grown,
                chains=GROWN,
                w4=_copy_folder(args.grown),
                compile="auto" if args.compile == "auto" else args.compile == "all",
                temperature=(args.temperature,),
                seed=args.seed,
            ),
            levels,
        )
    if args.json:
        result["texts"] = [
            tokenizer.decode(entries[-1].texts[n], skip_special_tokens=True)
            for n in range(len(prompts))
        ]
        print(json.dumps(result, indent=2))
    else:
        _print(result, entries[-1], tokenizer)
        if args.grown:
            print("\n" + chains_table.markdown(result["grown"]))
    same = all(row["lossless"] for row in result["configurations"])
    if args.grown:
        same = same and grown_chains.is_lossless(result["grown"])
    return 0 if same else 1


def _copy_folder(times: int) -> Path | None:
    """Where the 4-bit copy of the grown target is kept: in the user's cache folder, by what it was
    made of."""
    folder = platformdirs.user_cache_path("polyspec_ext")
    if not folder.is_absolute():
        return None
    made_of = hashlib.sha256((tiny.path("target") / "model.safetensors").read_bytes())
    return folder / "w4" / f"{FORMAT}-{made_of.hexdigest()[:16]}-{growth.LAYOUT}-{times}"


def _compiler() -> str | None:
    """What torch.compile would call."""
    return next(
        filter(None, map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++"))), None
    )


def _report(
    entries: list[Contender], prompts: list[list[int]], target: Any, args: argparse.Namespace
) -> dict[str, Any]:
    theirs = next(e for e in entries if e.kind == GENERATE)
    alone = [e for e in entries if len(e.levels) == 1]
    fastest = max(alone, key=Contender.rate)
    decoding = max(e.decoding_rate() or 0.0 for e in alone)
    rows = []
    for e in entries:
        found = verdict(target, prompts, entries[0].texts, e.texts, args.temperature)
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
                "lossless": found.lossless,
                "verdict": str(found),
                "stats": merge(e.stats).to_dict() if e.stats else None,
            }
        )
    return {
        "machine": machine.describe("cpu"),
        "temperature": args.temperature,
        "prompts": len(prompts),
        "repeats": args.repeats,
        "max_new_tokens": args.max_new_tokens,
        "fastest_plain": fastest.label,
        "configurations": rows,
    }


def _print(result: dict[str, Any], shown: Contender, tokenizer: Any) -> None:
    for number, text in shown.texts.items():
        print(
            "Question: "
            f"{QUESTIONS[number]}\nAnswer:{tokenizer.decode(text, skip_special_tokens=True)}\n"
        )
    print("(the text above is the three-level chain's)\n")
    greedy = result["temperature"] == 0
    print(
        f"{'configuration':{WIDTH}} {'window':>6} {'tokens/s':>9} {'ratio':>6} {'decoding':>8} "
        f"{'/generate':>9}  "
        f"{'same text as plain' if greedy else 'likelihood under the target'}"
    )
    for row in result["configurations"]:
        window = ",".join(map(str, row["window"])) or "-"
        line = f"{row['label']:{WIDTH}} {window:>6} {row['tokens_per_second']:9.1f}"
        alone = row["decoding_ratio"]
        line += f" {row['ratio']:5.2f}x {'-' if alone is None else f'{alone:.2f}x':>8}"
        print(f"{line} {row['ratio_to_generate']:8.2f}x  {row['verdict']}")
    print(
        f"\n{'per level':{WIDTH}} forward passes   ms/pass  mean acceptance length  acceptance rate"
    )
    for row in result["configurations"]:
        if row["stats"] is None or len(row["stats"]["levels"]) == 1:
            continue
        print(row["label"])
        for level in row["stats"]["levels"]:
            passes = level["num_forward_passes"]
            each = level["seconds"] / max(1, passes) * 1e3
            line = f"  {level['name']:{WIDTH - 2}} {passes:14}  {each:8.2f}"
            if level["mean_acceptance_length"] is not None:
                line += f"  {level['mean_acceptance_length']:22.2f}"
                line += f"  {level['draft_acceptance_rate']:15.2f}"
            print(line)
    where = result["machine"]
    print("\nfastest on this processor, by timing each level's passes")
    for name, choice in result["choices"].items():
        print(f"  {name}: {choice}")
    print(
        f"\nratio: over the fastest plain decoding ({result['fastest_plain']}), prefill included; "
        "decoding: over the\nfastest by the same engine, without the prefill; /generate: over "
        "transformers' generate"
    )
    print(
        f"{result['prompts']} questions, median of {result['repeats']} interleaved runs each, up "
        f"to {result['max_new_tokens']} new "
        f"tokens, temperature {result['temperature']:g}\n{where['cpu']}, "
        f"{where['cores']} cores, "
        f"{where['threads']} threads; torch {where['torch']}, transformers {where['transformers']}"
    )
