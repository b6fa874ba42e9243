"""``python -m benchmarks demo``: chains beside plain decoding of the same target.

The longest chain streams an answer; then plain decoding, two levels and three levels answer in
turns (`measuring`). The baselines are transformers' `generate` and the same engine with one level,
its weights packed and not; ratios are over the fastest. That takes two minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from typing import Any, NamedTuple

from benchmarks import machine
from benchmarks.engines import llama_cpp
from benchmarks.measuring import Contender, generate_call, measure, verdict
from polyspec_ext import columns, processor, progress, tiny
from polyspec_ext.chain import Chain
from polyspec_ext.cli import options
from polyspec_ext.cli.run import INTERRUPTED
from polyspec_ext.cli.texts import SHIPPED, print_text, speed, text_prompt, tokenizer_of
from polyspec_ext.levels import HuggingFaceLevel
from polyspec_ext.levels.models import has_quantised_layers
from polyspec_ext.tuning import default_store, level_for

PLAIN, GENERATE = "plain decoding, same engine", "plain decoding, transformers generate"
SECONDS = 75  # of the table, so that the whole takes two minutes on two cores
_WIDTHS = (1, 6)  # tokens of the passes by which the form of a level is chosen
_SHIPPED_QUESTIONS = 6  # that two minutes are enough for
# Code, prose and arithmetic.
CHAT = (
    "Write a Python class for a stack with push, pop and peek, with a docstring for each method.",
    "Describe a harbour town on a winter morning in two paragraphs.",
    "A baker makes 12 trays of 8 rolls each and sells 70 rolls. How many are left? Show each step.",
)
_LEGEND = (
    "ratio: over the fastest plain decoding ({fastest_plain}), prefill included; decoding: over "
    "the fastest by the same engine, without the prefill; /generate: over transformers' generate; "
    "mean length: tokens of a verification; accepted: share of the draft tokens",
    "{prompts} questions, median of {repeats} interleaved runs each, up to {max_new_tokens} new "
    "tokens, temperature {temperature:g}",
)


class Models(NamedTuple):
    """Levels by name, the target first; questions and their tokens; chains of the levels, the one
    to stream last; and other engines."""

    levels: dict[str, HuggingFaceLevel]
    tokenizer: Any
    prompts: list[list[int]]
    chains: list[Chain]
    others: list[Contender]


def add_command(commands: Any) -> None:
    """Add ``demo`` to the subcommands of a parser."""
    sub = commands.add_parser(
        "demo",
        help="plain decoding, two levels and three levels side by side",
        description="An answer of the longest chain as it comes, then plain decoding, two-level "
        "chains and the three-level chain measured in turns. Ctrl-C keeps finished repeats.",
    )
    group = sub.add_argument_group(
        "models",
        "the shipped ones, or yours: plain decoding, the target with the draft, and with its 4-bit "
        "copy between them (below a target that is such a copy: the draft and prompt lookup)",
    )
    group.add_argument(
        "--target", metavar="MODEL", help="directory, id or GGUF file; 'w4:MODEL': its 4-bit copy"
    )
    what = "the same, or a drafter, as 'suffix' or an EAGLE head (default: prompt lookup)"
    options.add_draft(group, what)
    options.add_llama(group)
    what = "questions (default: the first 6 of the shipped models, else 3)"
    sub.add_argument("--prompts", type=options.COUNT, metavar="N", help=what)
    options.add_count(sub, "--repeats", 3, "runs per question")
    what = "after which no repeat is begun"
    options.add(sub, "--seconds", options.number(0), SECONDS, "S", what)
    what = "(default: 128 of the shipped models, else 48)"
    sub.add_argument("--max-new-tokens", type=options.COUNT, metavar="N", help=what)
    options.add_temperature(sub, 0.0)
    options.add_seed(sub)
    options.add_threads(sub)
    options.add_json(sub, "tables")
    options.add_measure_again(sub)
    sub.set_defaults(run=run, raw=False, system=None)


def run(args: argparse.Namespace) -> int:
    """Measure and print. Return 1 where texts are not the target's own, 130 after Ctrl-C."""
    is_shipped = args.target is None
    if is_shipped and (args.draft or args.gguf):
        raise ValueError("--draft, --gguf: expected a --target with them")
    if args.measure_again:
        default_store().clear()
    args.max_new_tokens = args.max_new_tokens or (128 if is_shipped else 48)
    questions = list(tiny.QUESTIONS if is_shipped else CHAT)
    if (args.prompts or 0) > len(questions):
        raise ValueError(f"--prompts: expected at most {len(questions)}, given {args.prompts}")
    questions = questions[: args.prompts or (_SHIPPED_QUESTIONS if is_shipped else None)]
    models = (shipped if is_shipped else users)(args, questions)
    load = machine.load_average()
    result: dict[str, Any] = {
        "machine": machine.describe("cpu"),
        "load": {"before": load},
        "temperature": args.temperature,
        "max_new_tokens": args.max_new_tokens,
        "text": _stream(args, models, questions[0]),
    }
    table, interrupted = _measured(args, models)
    result["tables"] = [table]
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        show(table, result["machine"], processor.load_line(load))
    if interrupted:
        progress.phase("interrupted: what was finished is kept")
        return INTERRUPTED
    return int(any(row["lossless"] is False for row in table["configurations"]))


def shipped(args: argparse.Namespace, questions: list[str]) -> Models:
    """Return the shipped models in their fastest form."""
    progress.phase("loading the shipped models, and timing how they run fastest here")
    levels = tiny.levels()
    chains = [
        Chain([levels[n] for n in names], list(tiny.WINDOWS[names]), rounds=tiny.ROUNDS.get(names))
        for names in (("target", "drafter"), ("target", "middle"), tiny.LEVELS)
    ]
    return Models(levels, tiny.tokenizer(), tiny.prompt_ids(questions), chains, [])


def users(args: argparse.Namespace, questions: list[str]) -> Models:
    """Return the user's target and draft, and other engines; windows are a policy's.

    The target's 4-bit copy is the middle; of a target that is one, prompt lookup drafts below.
    """
    engine = llama_cpp(args.gguf, args.llama)  # before minutes are spent on loading
    progress.phase("loading the models, and timing how they run fastest here")
    tokenizer = tokenizer_of(args)

    def element(name: str, option: str, *above: Any) -> Any:
        return level_for(name, _WIDTHS, pack="auto", name=option, above=above)

    target = element(args.target, "--target")
    if not isinstance(target, HuggingFaceLevel):
        raise ValueError(f"--target: expected a causal language model, given {args.target}")
    levels, lowest = {"target": target}, args.draft or "prompt-lookup"
    if args.draft is not None:
        draft = element(args.draft, "--draft", target)
        if isinstance(draft, HuggingFaceLevel):
            levels["drafter"] = lowest = draft
    chains = [Chain([target, lowest], [5], policy="online")]
    if not has_quantised_layers(target.model):
        chains.append(Chain([target, "w4", lowest], [9, 5], policy="joint"))
    elif "drafter" in levels:
        chains.append(Chain([target, lowest, "prompt-lookup"], [9, 5], policy="joint"))
    variants = [] if engine is None else engine.variants
    labels, eos = {one.key: one.label for one in variants}, frozenset(target.eos_token_ids)
    others = [
        Contender(one.label, engine.decoder(one.key, eos), plain=labels[one.plain])
        for one in variants
        if engine is not None
    ]
    prompts = [text_prompt(args, tokenizer, question).input_ids for question in questions]
    return Models(levels, tokenizer, prompts, chains, others)


def _stream(args: argparse.Namespace, models: Models, question: str) -> str:
    """Answer the first question as a stream."""
    chain, prompt = models.chains[-1], models.prompts[0]
    stream = chain.stream(prompt, args.max_new_tokens, args.temperature, seed=args.seed)
    if args.json:
        return str(models.tokenizer.decode(list(stream), skip_special_tokens=True))
    print(f"Question: {question}\nAnswer:", end="", flush=True)
    text = print_text(stream, models.tokenizer)
    print(columns.wrapped(f"({_label(chain).partition(':')[0]}: {speed(stream.stats)})"))
    print(columns.wrapped(SHIPPED) if args.target is None else "", end="\n\n", flush=True)
    return text


def _label(chain: Chain) -> str:
    return f"{'three' if len(chain.names) == 3 else 'two'} levels: {', '.join(chain.names)}"


def _measured(args: argparse.Namespace, models: Models) -> tuple[dict[str, Any], bool]:
    """The table, and whether Ctrl-C ended it; before the first repeat ends, Ctrl-C ends all."""
    target = models.levels["target"]
    generate = generate_call(target.model, frozenset(target.eos_token_ids))
    entries = [Contender.of_chain(PLAIN, Chain([target])), Contender(GENERATE, generate)]
    with contextlib.suppress(ValueError):  # where nothing can be packed
        other = HuggingFaceLevel(target.model, pack=not target.pack)
        how = ", packed" if other.pack else ", weights as torch keeps them"
        entries.append(Contender.of_chain(PLAIN + how, Chain([other])))
    entries += [Contender.of_chain(_label(chain), chain) for chain in models.chains]
    entries += models.others
    progress.phase(
        f"measuring {len(entries)} configurations: {len(models.prompts)} questions, up to "
        f"{args.repeats} repeats each"
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
    for one in entries:  # which may have begun another
        one.calls = [call for call in one.calls if call.repeat < repeats]
    table = {
        "prompts": len(models.prompts),
        "repeats": repeats,
        **settings,
        **rows_of(entries, models.prompts, target.model, args.temperature),
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
        else:  # another engine, whose form of the target is another
            same = sum(one.texts[n] == by_label[one.plain].texts[n] for n in one.texts)
            lossless = None
            words = "-" if temperature else f"{same} of {len(one.texts)} of its own"
        rate, stats = one.rate(), one.stats
        rows.append(
            {
                "label": one.label,
                "window": one.window,
                "tokens_per_second": rate,
                "ratio": rate / fastest.rate(),
                "ratio_to_generate": rate / by_label[GENERATE].rate(),
                "decoding_ratio": None if stats is None else stats.tokens_per_second / decoding,
                "new_tokens": sum(map(len, one.texts.values())),
                "lossless": lossless,
                "verdict": words,
                "stats": None if stats is None else stats.to_dict(),
            }
        )
    return {"fastest_plain": fastest.label, "configurations": rows}


def show(table: dict[str, Any], where: dict[str, Any], load: str) -> None:
    """Print a table of at most 80 columns, and what the levels did."""

    def ratio(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    texts = "likelihood under target" if table["temperature"] else "same text as plain"
    heads = ("window", "tokens/s", "ratio", "decoding", "/generate", texts)
    per_level = ("passes", "ms/pass", "mean length", "accepted")
    rows: list[columns.Row] = []
    levels: list[columns.Row] = []
    for row in table["configurations"]:
        rates = (ratio(row[n]) for n in ("ratio", "decoding_ratio", "ratio_to_generate"))
        window = ",".join(map(str, row["window"])) or "-"
        cells = (window, f"{row['tokens_per_second']:.1f}", *rates, row["verdict"])
        rows.append((row["label"], cells))
        by_level = (row["stats"] or {"levels": []})["levels"]
        if len(by_level) > 1:
            levels.append((row["label"], ("",) * len(per_level)))
        for level in by_level if len(by_level) > 1 else ():
            passes, length = level["num_forward_passes"], level["mean_acceptance_length"]
            ms = level["seconds"] / passes * 1e3 if passes else None
            rate = None if length is None else level["draft_acceptance_rate"]
            levels.append((f"  {level['name']}", (str(passes), *map(ratio, (ms, length, rate)))))
    print(columns.table("configuration", heads, rows, left=1))
    print(f"\n{columns.table('per level', per_level, levels)}")
    for line in (
        "\nfastest on this processor, by timing each level's passes",
        *(f"  {name}: {choice}" for name, choice in table["choices"].items()),
        "",
        *(line.format_map(table) for line in _LEGEND),
        f"{where['cpu']}, {where['cores']} cores, {where['threads']} threads; torch "
        f"{where['torch']}, transformers {where['transformers']}",
        f"{load}\n",
    ):
        print(columns.wrapped(line), flush=True)
