"""``python -m benchmarks demo``: chains beside plain decoding of the same target.

An answer of the longest chain, then all methods in turns (`measuring`). Baselines: transformers'
`generate`, and the same engine with the target alone, packed and not. Ratios: over the fastest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from functools import partial
from typing import Any, NamedTuple

from benchmarks import output
from benchmarks import questions as asked
from benchmarks.engines import LLAMA_OPTIONS, llama_cpp
from benchmarks.measuring import Contender, chain_call, generate_call, measure, verdict
from benchmarks.methods import load_level
from polyspec_ext import columns, processor, progress, tiny
from polyspec_ext.chain import Chain
from polyspec_ext.cli import options
from polyspec_ext.cli.entry import INTERRUPTED
from polyspec_ext.cli.texts import SHIPPED, print_text, speed, text_prompt, tokenizer_of
from polyspec_ext.levels import HuggingFaceLevel
from polyspec_ext.levels.models import has_quantised_layers

PLAIN, GENERATE = "plain decoding, same engine", "plain decoding, transformers generate"


class Models(NamedTuple):
    """Levels, the target first; prompts; chains, the streamed chain last; other engines, and their
    versions and flags by label."""

    levels: dict[str, HuggingFaceLevel]
    tokenizer: Any
    prompts: list[list[int]]
    chains: list[Chain]
    others: list[Contender]
    engines: dict[str, str]


OPTIONS = (
    ("--target", None, None, "MODEL", "a directory, id or GGUF file, or 'w4:MODEL', its 4-bit copy "
     "(default: shipped models)"),
    ("--draft", None, None, "MODEL", "the same, or as 'suffix' or an EAGLE head (default: prompt "
     "lookup)"),
    *LLAMA_OPTIONS,
    ("--prompts", options.COUNT, None, "N", "questions (default: the first 6 of the shipped models,"
     " else 3)"),
    ("--max-new-tokens", options.COUNT, None, "N", "(default: 128 of the shipped models, else 48)"),
    ("--repeats", options.COUNT, 3, "N", "runs per question"),
    ("--seconds", options.number(0), 75, "S", "after which no repeat begins"),
    "--temperature",
    "--seed",
    "--threads",
    ("--json", "one JSON object instead of tables"),
)  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure and print. Return 1 if texts differ from the target's, 130 after Ctrl-C."""
    is_shipped = args.target is None
    if is_shipped and (args.draft or args.gguf):
        raise ValueError("--draft, --gguf: expected a --target with them")
    packaged = [question.turns[0] for question in asked.read(asked.PACKAGED)]
    questions = list(tiny.QUESTIONS) if is_shipped else packaged
    if (args.prompts or 0) > len(questions):
        raise ValueError(f"--prompts: expected at most {len(questions)}, given {args.prompts}")
    # Number of questions for two minutes.
    questions = questions[: args.prompts or (6 if is_shipped else 3)]
    args.max_new_tokens = args.max_new_tokens or (128 if is_shipped else 48)
    progress.phase("loading the models, and timing how they run fastest here")
    models = shipped(questions) if is_shipped else users(args, questions)
    load, where = processor.load_average(), output.describe("cpu")
    tokens, chain = args.max_new_tokens, models.chains[-1]
    stream = chain.stream(models.prompts[0], tokens, args.temperature, seed=args.seed)
    if args.json:
        text = models.tokenizer.decode(list(stream), skip_special_tokens=True)
    else:
        print(f"Question: {questions[0]}\nAnswer:", end="", flush=True)
        text = print_text(stream, models.tokenizer)
        words = f"({_label(chain).partition(':')[0]}: {speed(stream.stats)})\n"
        print(columns.wrapped(words + (SHIPPED if is_shipped else "")), end="\n\n", flush=True)
    table, interrupted = _measured(args, models)
    if args.json:
        result = {"machine": where, "load": {"before": load}, "text": text, "tables": [table]}
        print(json.dumps(result, indent=2))
    else:
        show(table, where, processor.load_line(load))
    differs = any(row["lossless"] is False for row in table["configurations"])
    return INTERRUPTED if interrupted else int(differs)


def shipped(questions: list[str]) -> Models:
    """Return the shipped models in their fastest form."""
    levels = tiny.levels()
    chains = [
        Chain([levels[n] for n in names], list(tiny.WINDOWS[names]), rounds=tiny.ROUNDS.get(names))
        for names in (("target", "drafter"), ("target", "middle"), tiny.LEVELS)
    ]
    return Models(levels, tiny.tokenizer(), tiny.prompt_ids(questions), chains, [], {})


def users(args: argparse.Namespace, questions: list[str]) -> Models:
    """Return the user's target and draft, and other engines; a policy chooses windows."""
    engines = llama_cpp(args.gguf, args.llama)  # errors come before minutes of loading
    tokenizer = tokenizer_of(args)
    target = load_level(args.target, name="--target")
    if not isinstance(target, HuggingFaceLevel):
        raise ValueError(f"--target: expected a causal language model, given {args.target}")
    levels, lowest = {"target": target}, args.draft or "prompt-lookup"
    if args.draft is not None:
        draft = load_level(args.draft, name="--draft", above=(target,))
        if isinstance(draft, HuggingFaceLevel):
            levels["drafter"] = lowest = draft
    chains = [Chain([target, lowest], [5], policy="online")]
    if not has_quantised_layers(target.model):
        chains.append(Chain([target, "w4", lowest], [9, 5], policy="joint"))
    elif "drafter" in levels:
        chains.append(Chain([target, lowest, "prompt-lookup"], [9, 5], policy="joint"))
    others, about, eos = [], {}, frozenset(target.eos_token_ids)
    for engine in engines:
        labels = {one.key: one.label for one in engine.variants}
        for one in engine.variants:
            decode = engine.decoder(one.key, eos)
            others.append(Contender(one.label, decode, plain=labels[one.plain]))
            about[one.label] = f"{engine.version}; {engine.flags(one.key)}"
    prompts = [text_prompt(args, tokenizer, question).input_ids for question in questions]
    return Models(levels, tokenizer, prompts, chains, others, about)


def _label(chain: Chain) -> str:
    return f"{'three' if len(chain.names) == 3 else 'two'} levels: {', '.join(chain.names)}"


def _measured(args: argparse.Namespace, models: Models) -> tuple[dict[str, Any], bool]:
    """Return the table, and whether Ctrl-C ended the repeats; in the first repeat Ctrl-C is
    raised."""
    target = models.levels["target"]
    generate = partial(generate_call, target.model, frozenset(target.eos_token_ids))
    plain = partial(chain_call, Chain([target]))
    entries = [Contender(PLAIN, plain), Contender(GENERATE, generate)]
    with contextlib.suppress(ValueError):  # where nothing can be packed
        other = HuggingFaceLevel(target.model, pack=not target.pack)
        how = ", packed" if other.pack else ", weights as torch keeps them"
        entries.append(Contender(PLAIN + how, partial(chain_call, Chain([other]))))
    for chain in models.chains:
        entries.append(Contender(_label(chain), partial(chain_call, chain), list(chain.window)))
    entries += models.others
    count = len(models.prompts)
    progress.phase(
        f"measuring {len(entries)} configurations: {count} questions, {args.repeats} repeats"
    )
    settings = {name: getattr(args, name) for name in ("max_new_tokens", "temperature")}
    warm_up = args.max_new_tokens if args.target is None else 12
    more = {"seed": args.seed, "repeats": args.repeats, "warm_up": warm_up}
    began, repeats, interrupted = time.monotonic(), 0, False
    try:
        for repeats in measure(entries, models.prompts, **settings, **more):
            if (time.monotonic() - began) * (repeats + 1) / repeats > args.seconds:
                break
    except KeyboardInterrupt:
        if not repeats:
            raise
        interrupted = True
        progress.phase("interrupted: what was finished is kept")
    for one in entries:  # without a partial repeat
        one.calls = [call for call in one.calls if call.repeat < repeats]
    table = {
        "prompts": count,
        "repeats": repeats,
        **settings,
        **rows_of(entries, models.prompts, target.model, args.temperature),
        "engines": models.engines,
        "choices": {name: str(level.choice) for name, level in models.levels.items()},
    }
    return table, interrupted


def rows_of(
    entries: list[Contender], prompts: list[list[int]], target: Any, temperature: float
) -> dict[str, Any]:
    """Return a row for each contender, plain decoding first; ratios are over the fastest."""
    by_label = {one.label: one for one in entries}
    alone = [one for one in entries if not one.window and one.plain is None]
    fastest = max(alone, key=Contender.rate)
    decoding = max(one.stats.tokens_per_second for one in alone if one.stats is not None)
    rows = []
    for one in entries:
        if one.plain is None:
            found = verdict(target, prompts, entries[0].texts, one.texts, temperature)
            lossless, words = found.lossless, str(found)
        else:  # another engine, with another form of the target
            same = sum(one.texts[n] == by_label[one.plain].texts[n] for n in one.texts)
            words = "-" if temperature else f"{same} of {len(one.texts)} of its own"
            lossless = None
        rate, stats = one.rate(), one.stats
        rows.append(
            {
                "label": one.label,
                "window": list(one.window),
                "tokens_per_second": rate,
                "ratio": rate / fastest.rate(),
                "ratio_to_generate": rate / by_label[GENERATE].rate(),
                "decoding_ratio": None if stats is None else stats.tokens_per_second / decoding,
                "lossless": lossless,
                "verdict": words,
                "stats": None if stats is None else stats.to_dict(),
            }
        )
    return {"fastest_plain": fastest.label, "configurations": rows}


def show(table: dict[str, Any], where: dict[str, Any], load: str) -> None:
    """Print a table of at most 80 columns, and the passes of the levels."""
    texts = "likelihood under target" if table["temperature"] else "same text as plain"
    heads = ("window", "tokens/s", "ratio", "decoding", "/generate", texts)
    per_level = ("passes", "ms/pass", "mean length", "accepted")
    rows: list[columns.Row] = []
    for row in table["configurations"]:
        names = ("ratio", "decoding_ratio", "ratio_to_generate")
        rates = (output.number(row[name], ".2f") for name in names)
        window = ",".join(map(str, row["window"])) or "-"
        cells = (window, f"{row['tokens_per_second']:.1f}", *rates, row["verdict"])
        rows.append((row["label"], cells))
    print(columns.table("configuration", heads, rows, left=1))
    (*_, longest) = (row for row in table["configurations"] if row["stats"] is not None)
    rows = []
    for level in longest["stats"]["levels"]:
        passes, length = level["num_forward_passes"], level["mean_acceptance_length"]
        ms = level["seconds"] / passes * 1e3 if passes else None
        rate = None if length is None else level["draft_acceptance_rate"]
        numbers = (output.number(value, ".2f") for value in (ms, length, rate))
        rows.append((level["name"], (str(passes), *numbers)))
    print(f"\n{longest['label']}\n{columns.table('level', per_level, rows)}")
    for line in (
        "\nfastest on this processor, by timing each level's passes",
        *(f"  {name}: {choice}" for name, choice in table["choices"].items()),
        f"\nratio: over the fastest plain decoding ({table['fastest_plain']}), prefill included; "
        "decoding: over the fastest by the same engine, without the prefill; /generate: over "
        "transformers' generate; mean length: tokens of a verification; accepted: share of the "
        "draft tokens",
        f"{table['prompts']} questions, median of {table['repeats']} interleaved runs each, up to "
        f"{table['max_new_tokens']} new tokens, temperature {table['temperature']:g}",
        f"{where['cpu']}, {where['cores']} cores, {where['threads']} threads; torch "
        f"{where['torch']}, transformers {where['transformers']}",
        f"{load}\n",
    ):
        print(columns.wrapped(line), flush=True)
