"""Plain decoding, two levels and three levels side by side.

An answer of the longest chain, then all methods in turns (`measuring`). The planner chooses the
chains of the shipped models: the fastest of two and of three levels on this machine. Baselines:
transformers' `generate`, and the same engine with the target alone, packed and not. Ratios: over
the fastest.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks import measuring, output
from benchmarks import questions as asked
from benchmarks.engines import LLAMA_OPTIONS, engines_of
from benchmarks.measuring import Answer, Decode, Request, chain_call
from benchmarks.methods import load_level
from polyspec_ext import columns, progress, tiny
from polyspec_ext.chain import Chain
from polyspec_ext.chat import prompt_of_text
from polyspec_ext.cli import INTERRUPTED, options
from polyspec_ext.cli.generate import SHIPPED, print_text, tokenizer_of
from polyspec_ext.levels import HuggingFaceLevel
from polyspec_ext.levels.models import has_quantised_layers, level_line
from polyspec_ext.planning.planner import plan
from polyspec_ext.stats import merge

PLAIN, GENERATE = "plain decoding, same engine", "plain decoding, transformers generate"
OPTIONS: tuple[Any, ...] = (
    ("--target", None, None, "MODEL", "a directory, id or GGUF file, or 'w4:MODEL', its 4-bit copy "
     "(default: shipped models)"),
    ("--draft", None, None, "MODEL", "the same, or as 'suffix' or an EAGLE head (default: prompt "
     "lookup)"),
    *LLAMA_OPTIONS,
    ("--prompts", options.COUNT, None, "N", "questions (default: the first 6 of the shipped models,"
     " else 3)"),
    ("--max-new-tokens", options.COUNT, None, "N", "(default: 128 of the shipped models, else 48)"),
    ("--planning", options.number(0), 20, "S", "seconds to choose the shipped models' chains"),
    ("--repeats", options.COUNT, 3, "N", "runs per question"),
    ("--seconds", options.number(0), 75, "S", "after which no repeat begins"),
)  # fmt: skip


class Entry(measuring.Contender):
    """A configuration, and its answers in the turns.

    Args:
        window: of a chain; empty: plain decoding.
        plain: name of the reference texts. Another engine has another form of the target.
    """

    def __init__(
        self, name: str, decode: Decode, window: Sequence[int] = (), plain: str = PLAIN
    ) -> None:
        super().__init__(name, self.answer)
        self.decode, self.window, self.plain = decode, window, plain
        self.request = Request([], 0, 0.0, [0])
        self.answers: list[Answer] = []

    def answer(self) -> float:
        """Answer the request, and return the seconds."""
        answer, seconds = measuring.timed(self.decode, self.request)
        self.answers.append(answer)
        return seconds

    def rate(self, count: int) -> float:
        """Return tokens per second: the median of the repeats with `count` questions each."""
        tokens = np.array([len(answer.texts[0]) for answer in self.answers]).reshape(-1, count)
        return float(np.median(tokens.sum(1) / np.reshape(self.seconds, (-1, count)).sum(1)))


def report_of(args: argparse.Namespace) -> dict[str, Any]:
    """Answer a question by the longest chain, and measure; return the JSON report."""
    shipped = args.target is None
    if shipped and (args.draft or args.gguf):
        raise ValueError("--draft, --gguf: expected a --target with them")
    packaged = [question.turns[0] for question in asked.read(asked.PACKAGED)]
    questions = list(tiny.QUESTIONS) if shipped else packaged
    if (args.prompts or 0) > len(questions):
        raise ValueError(f"--prompts: expected at most {len(questions)}, given {args.prompts}")
    # Number of questions for two minutes.
    questions = questions[: args.prompts or (6 if shipped else 3)]
    args.max_new_tokens = args.max_new_tokens or (128 if shipped else 48)
    engines = engines_of(args.gguf, args.llama)  # errors come before minutes of loading
    progress.phase("loading the models")
    tokenizer = tokenizer_of(args)
    if shipped:
        levels, prompts = tiny.levels(), tiny.prompt_ids(questions)
        progress.phase("choosing the fastest chains of two and of three levels")
        parts, seconds = [*levels.values(), "prompt-lookup"], args.planning
        planned = plan(parts, prompts, args.max_new_tokens, seconds=seconds)
        best = [next(x for x in planned.candidates if len(x.levels) == count) for count in (2, 3)]
        chains = [planned.chain(candidate) for candidate in best]
    else:
        levels, chains = chains_of(args.target, args.draft)
        prompts = [prompt_of_text(tokenizer, text).input_ids for text in questions]
    report = output.header("demo", 1)
    stream = chains[-1].stream(prompts[0], args.max_new_tokens)
    if args.json:
        text = tokenizer.decode(list(stream), skip_special_tokens=True)
    else:
        print(f"Question: {questions[0]}\nAnswer:", end="", flush=True)
        text = print_text(stream, tokenizer)
        words = f"({_label(chains[-1]).partition(':')[0]}: {stream.stats.speed})\n"
        print(columns.wrapped(words + (SHIPPED if shipped else "")), end="\n\n", flush=True)
    target, about = levels["target"], {}
    eos = frozenset(target.eos_token_ids)
    generate = partial(measuring.generate_call, target.model, eos)
    entries = [Entry(PLAIN, partial(chain_call, Chain([target]))), Entry(GENERATE, generate)]
    with contextlib.suppress(ValueError):  # where nothing can be packed
        other = HuggingFaceLevel(target.model, pack=not target.pack)
        how = ", packed" if other.pack else ", weights as torch keeps them"
        entries.append(Entry(PLAIN + how, partial(chain_call, Chain([other]))))
    for chain in chains:
        entries.append(Entry(_label(chain), partial(chain_call, chain), list(chain.window)))
    for engine in engines:
        labels = {variant.key: variant.label for variant in engine.variants}
        for variant in engine.variants:
            decode = engine.decoder(variant.key, eos)
            entries.append(Entry(variant.label, decode, plain=labels[variant.plain]))
            about[variant.label] = f"{engine.version}; {engine.flags(variant.key)}"
    repeats, interrupted = _measure(entries, prompts, args)
    table = {
        "prompts": len(prompts),
        "repeats": repeats,
        "max_new_tokens": args.max_new_tokens,
        "temperature": 0.0,
        **rows_of(entries, prompts, target.model),
        "engines": about,
        "choices": {name: level_line(level) for name, level in levels.items()},
    }
    return {**report, "text": text, "tables": [table], "interrupted": interrupted}


def chains_of(target: str, draft: str | None) -> tuple[dict[str, HuggingFaceLevel], list[Chain]]:
    """Return the levels of a user's target and draft, and chains with a policy for the windows."""
    level = load_level(target, name="--target")
    if not isinstance(level, HuggingFaceLevel):
        raise ValueError(f"--target: expected a causal language model, given {target}")
    lowest: Any = draft or "prompt-lookup"
    levels = {"target": level}
    if draft is not None:
        loaded = load_level(draft, name="--draft", above=(level,))
        if isinstance(loaded, HuggingFaceLevel):
            levels["drafter"] = lowest = loaded
    chains = [Chain([level, lowest], [5], policy="online")]
    if not has_quantised_layers(level.model):
        chains.append(Chain([level, "w4", lowest], [9, 5], policy="joint"))
    elif "drafter" in levels:
        chains.append(Chain([level, lowest, "prompt-lookup"], [9, 5], policy="joint"))
    return levels, chains


def _label(chain: Chain) -> str:
    return f"{'three' if len(chain.names) == 3 else 'two'} levels: {', '.join(chain.names)}"


def _measure(
    entries: list[Entry], prompts: list[list[int]], args: argparse.Namespace
) -> tuple[int, bool]:
    """Measure; return the number of repeats, and whether Ctrl-C ended them. In the first repeat
    Ctrl-C is raised."""
    count, interrupted = len(prompts), False
    progress.phase(
        f"measuring {len(entries)} configurations: {count} questions, {args.repeats} repeats"
    )
    began = time.monotonic()

    def load(turn: int) -> None:
        tokens = 12 if turn < 0 and args.target else args.max_new_tokens
        for entry in entries:
            entry.request = Request([prompts[turn % count]], tokens, 0.0, [0])

    def goes_on(turn: int) -> bool:
        repeats = turn / count
        spent = time.monotonic() - began
        return not repeats or turn % count != 0 or spent * (repeats + 1) / repeats <= args.seconds

    turns = args.repeats * count
    calls = measuring.turns(entries, turns, measuring.Clock(None), load, 1, goes_on)
    bar = progress.bar(calls, total=turns * len(entries), desc="measuring", leave=False)
    try:
        for _ in measuring.required(bar):
            pass
    except KeyboardInterrupt:
        interrupted = True
    repeats = min(len(entry.seconds) for entry in entries) // count
    if interrupted and not repeats:
        raise KeyboardInterrupt
    if interrupted:
        progress.phase("interrupted: what was finished is kept")
    for entry in entries:  # the first answer is of the warm-up
        entry.seconds = entry.seconds[: repeats * count]
        entry.answers = entry.answers[1 : 1 + repeats * count]
    return repeats, interrupted


def rows_of(entries: list[Entry], prompts: list[list[int]], target: Any) -> dict[str, Any]:
    """Return a row for each contender, plain decoding first; ratios are over the fastest."""
    count, rows = len(prompts), []
    rates = {entry.name: entry.rate(count) for entry in entries}
    texts = {entry.name: [answer.texts[0] for answer in entry.answers] for entry in entries}
    alone = [entry.name for entry in entries if entry.plain == PLAIN and not entry.window]
    fastest = max(alone, key=rates.__getitem__)
    for entry in entries:
        ours, stats = entry.plain == PLAIN, [x.stats for x in entry.answers if x.stats]
        compared = partial(measuring.compared, target if ours else None)
        pairs = prompts, texts[entry.plain], texts[entry.name]
        judged = measuring.verdict(list(map(compared, *pairs)), target.dtype)
        rows.append(
            {
                "label": entry.name,
                "window": list(entry.window),
                "tokens_per_second": rates[entry.name],
                "ratio": rates[entry.name] / rates[fastest],
                "lossless": measuring.is_lossless(judged) if ours else None,
                "verdict": judged["lossless"] + " (its own)" * (not ours),
                "stats": merge(stats).to_dict() if stats else None,
            }
        )
    return {"fastest_plain": fastest, "configurations": rows}


def status(report: dict[str, Any]) -> int:
    """Return 130 after Ctrl-C, 1 if texts differ from the target's, else 0."""
    (table,) = report["tables"]
    differs = any(row["lossless"] is False for row in table["configurations"])
    return INTERRUPTED if report["interrupted"] else int(differs)


def reason(table: dict[str, Any]) -> str:
    """Return in a sentence why the fastest method is the fastest."""
    best = max(table["configurations"], key=lambda row: row["tokens_per_second"])
    if not best["window"] or best["stats"] is None:
        return f"{best['label']} is the fastest here: drafts cost more than they save."
    target, *below = best["stats"]["levels"]
    share = sum(level["seconds"] for level in below) / best["stats"]["decode_seconds"]
    return (
        f"{best['label']} is the fastest: a pass of the target yields "
        f"{target['mean_acceptance_length']:.1f} tokens, and the levels below take {share:.0%} of "
        "the time."
    )


def markdown(report: dict[str, Any]) -> str:
    """Return the methods, the passes of the longest chain's levels, and the conditions."""
    (table,) = report["tables"]
    heads = ["configuration", "window", "tokens/s", "ratio", "same text as plain"]
    rows = []
    for row in table["configurations"]:
        window = ",".join(map(str, row["window"])) or "-"
        speeds = f"{row['tokens_per_second']:.1f}", f"{row['ratio']:.2f}"
        rows.append([row["label"], window, *speeds, row["verdict"]])
    (*_, longest) = (row for row in table["configurations"] if row["stats"] is not None)
    levels = []
    for level in longest["stats"]["levels"]:
        passes, length = level["num_forward_passes"], level["mean_acceptance_length"]
        ms = level["seconds"] / passes * 1e3 if passes else None
        rate = None if length is None else level["draft_acceptance_rate"]
        numbers = (output.number(value, ".2f") for value in (ms, length, rate))
        levels.append([level["name"], str(passes), *numbers])
    return "\n".join(
        [
            *output.table(heads, rows, range(1, 4)),
            f"\n{reason(table)}",
            f"\n{longest['label']}:\n",
            *output.table(["level", "passes", "ms/pass", "mean length", "accepted"], levels),
            "\nThe levels, as this processor runs them:\n",
            *(f"- {name}: {choice}" for name, choice in table["choices"].items()),
            f"\nRatio: over the fastest plain decoding ({table['fastest_plain']}), prefill "
            "included; mean length: tokens of a verification; accepted: share of the draft tokens.",
            f"\n{table['prompts']} questions, median of {table['repeats']} interleaved runs each, "
            f"up to {table['max_new_tokens']} new tokens, temperature {table['temperature']:g}; "
            f"{report['machine']['cpu']}, {output.conditions(report)}.",
        ]
    )
