"""``python -m benchmarks demo``: chains beside plain decoding of the same target.

It streams an answer of the longest chain; then plain decoding, two levels and three levels answer
in turns (`measuring`). The baselines are transformers' greedy `generate` and the same engine with
one level, its weights packed and not; ratios are over the fastest. That takes two minutes.
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
from polyspec_ext.stats import merge
from polyspec_ext.tuning import default_store, level_for

PLAIN, GENERATE = "plain decoding, same engine", "plain decoding, transformers generate"
SECONDS = 75  # of the table, so that the whole takes two minutes on two cores
_WARM_UP = 12  # tokens of a first call of the user's models
_WIDTHS = (1, 6)  # tokens of the passes by which the form of a level is chosen
_SHIPPED_QUESTIONS = 6  # that two minutes are enough for
_WINDOW, _ABOVE = 5, 9  # where a policy begins
# Code, prose and arithmetic.
CHAT = (
    "Write a Python class for a stack with push, pop and peek, with a docstring for each method.",
    "Describe a harbour town on a winter morning in two paragraphs.",
    "A baker makes 12 trays of 8 rolls each and sells 70 rolls. How many are left? Show each step.",
)


class Models(NamedTuple):
    """Levels by name, the target first; questions and their tokens; chains of the levels, the one
    to stream last; and other engines."""

    levels: dict[str, HuggingFaceLevel]
    tokenizer: Any
    questions: list[str]
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
    options.add_draft(
        group, "the same, or a drafter, as 'suffix' or an EAGLE head (default: prompt lookup)"
    )
    options.add_llama(group)
    options.add_count(sub, "--repeats", 3, "runs per question")
    window = [options.COUNT_OR_NONE]
    for name, kind, metavar, what in (
        ("--prompts", options.COUNT, "N", "questions (default: all, but 6 of the shipped models)"),
        ("--seconds", options.number(0), "S", "after which no repeat but the first is begun or "
         f"finished (default: {SECONDS})"),
        ("--max-new-tokens", options.COUNT, "N", "(default: 128 of the shipped models, else 48)"),
        ("--window", options.COUNTS_OR_NONE, "MU,K", "of the three-level chain"),
        ("--two-level-window", lambda text: [window[0](text)], "K", "of the two-level chains"),
    ):  # fmt: skip
        sub.add_argument(name, type=kind, metavar=metavar, help=what)
    options.add_temperature(sub, 0.0)
    options.add_seed(sub)
    options.add_threads(sub)
    options.add_json(sub, "tables")
    options.add_measure_again(sub)
    sub.set_defaults(run=run, raw=False, system=None)


def run(args: argparse.Namespace) -> int:
    """Measure and print. Return 1 where texts are not the target's own, 130 after Ctrl-C."""
    if args.target is None and (args.draft or args.gguf):
        raise ValueError("--draft, --gguf: expected a --target with them")
    if args.measure_again:
        default_store().clear()
    if args.max_new_tokens is None:
        args.max_new_tokens = 128 if args.target is None else 48
    questions = list(tiny.QUESTIONS if args.target is None else CHAT)
    if (args.prompts or 0) > len(questions):
        raise ValueError(f"--prompts: expected at most {len(questions)}, given {args.prompts}")
    questions = questions[: args.prompts or (_SHIPPED_QUESTIONS if args.target is None else None)]
    models = (shipped if args.target is None else users)(args, questions)
    load = machine.load_average()
    result: dict[str, Any] = {
        "machine": machine.describe("cpu"),
        "load": {"before": load},
        "temperature": args.temperature,
        "max_new_tokens": args.max_new_tokens,
        "text": _stream(args, models),
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
    levels, chains = tiny.levels(), []
    for names in (("target", "drafter"), ("target", "middle"), tiny.LEVELS):
        window = args.window if len(names) == 3 else args.two_level_window
        rounds = tiny.ROUNDS.get(names) if window is None else None
        elements = [levels[name] for name in names]
        chains.append(Chain(elements, window or list(tiny.WINDOWS[names]), rounds=rounds))
    return Models(levels, tiny.tokenizer(), questions, tiny.prompt_ids(questions), chains, [])


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
    levels = {"target": target}
    if args.draft is not None:
        draft = element(args.draft, "--draft", target)
        if isinstance(draft, HuggingFaceLevel):
            levels["drafter"] = draft
    _, *drafts = levels.values()
    lowest: list[Any] = [*drafts] or [args.draft or "prompt-lookup"]
    chains = [Chain([target, *lowest], args.two_level_window or [_WINDOW], policy="online")]
    three = [target, "w4", *lowest]
    if has_quantised_layers(target.model):
        three = [target, *drafts, "prompt-lookup"]
    if len(three) == 3:
        chains.append(Chain(three, args.window or [_ABOVE, _WINDOW], policy="joint"))
    others, eos = [], frozenset(target.eos_token_ids)
    if engine is not None:
        labels = {one.key: one.label for one in engine.variants}
        others = [
            Contender(one.label, engine.decoder(one.key, eos), plain=labels[one.plain])
            for one in engine.variants
        ]
    prompts = [text_prompt(args, tokenizer, question).input_ids for question in questions]
    return Models(levels, tokenizer, questions, prompts, chains, others)


def _label(chain: Chain) -> str:
    names = list(chain.names)
    return f"{'three' if len(names) == 3 else 'two'} levels: {', '.join(names)}"


def _stream(args: argparse.Namespace, models: Models) -> str:
    """Answer the first question as a stream."""
    chain, prompt = models.chains[-1], models.prompts[0]
    stream = chain.stream(prompt, args.max_new_tokens, args.temperature, seed=args.seed)
    if args.json:
        return str(models.tokenizer.decode(list(stream), skip_special_tokens=True))
    print(f"Question: {models.questions[0]}\nAnswer:", end="", flush=True)
    text = print_text(stream, models.tokenizer)
    print(columns.wrapped(f"({_label(chain).partition(':')[0]}: {speed(stream.stats)})"))
    print(columns.wrapped(SHIPPED) if args.target is None else "", end="\n\n", flush=True)
    return text


class _Late(Exception):
    """The time for the table is over."""


def _measured(args: argparse.Namespace, models: Models) -> tuple[dict[str, Any], bool]:
    """The table, and whether Ctrl-C ended it; before the first repeat ends, Ctrl-C ends all."""
    target, count = models.levels["target"], len(models.prompts)
    generate = generate_call(target.model, frozenset(target.eos_token_ids))
    entries = [Contender.of_chain(PLAIN, Chain([target])), Contender(GENERATE, generate)]
    with contextlib.suppress(ValueError):  # where nothing can be packed
        other = HuggingFaceLevel(target.model, pack=not target.pack)
        how = ", packed" if other.pack else ", weights as torch keeps them"
        entries.append(Contender.of_chain(PLAIN + how, Chain([other])))
    entries += [Contender.of_chain(_label(chain), chain) for chain in models.chains]
    entries += models.others
    progress.phase(
        f"measuring {len(entries)} configurations: {count} questions, up to {args.repeats} "
        "repeats each"
    )
    began, seconds = time.monotonic(), SECONDS if args.seconds is None else args.seconds

    def whole() -> int:
        return min(len(one.seconds) for one in entries) // count

    def tick() -> None:
        if whole():
            spent = time.monotonic() - began
            between = all(len(one.seconds) == whole() * count for one in entries)
            if (spent + spent / whole() if between else spent) > seconds:
                raise _Late

    interrupted = False
    try:
        measure(
            entries,
            models.prompts,
            repeats=args.repeats,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            seed=args.seed,
            warm_up=args.max_new_tokens if args.target is None else _WARM_UP,
            tick=tick,
        )
    except (_Late, KeyboardInterrupt) as error:
        if not whole():
            raise
        interrupted = isinstance(error, KeyboardInterrupt)
    repeats = whole()
    for one in entries:  # which may have begun another
        one.seconds = {key: value for key, value in one.seconds.items() if key[0] < repeats}
        one.tokens = {key: value for key, value in one.tokens.items() if key[0] < repeats}
        del one.stats[repeats * count :]
    table = {
        "prompts": count,
        "repeats": repeats,
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        **rows_of(entries, models.prompts, target.model, args.temperature),
        "choices": {name: str(level.choice) for name, level in models.levels.items()},
    }
    return table, interrupted


def rows_of(
    entries: list[Contender], prompts: list[list[int]], target: Any, temperature: float
) -> dict[str, Any]:
    """Return a row for each contender, plain decoding first; ratios are over the fastest."""
    (theirs,) = (one for one in entries if one.label == GENERATE)
    alone = [one for one in entries if not one.window and one.plain is None]
    fastest = max(alone, key=Contender.rate)
    decoding = max(one.decoding_rate() or 0.0 for one in alone)
    rows = []
    for one in entries:
        # Another engine has its own form of the target.
        reference = next((other for other in entries if other.label == one.plain), None)
        if reference is None:
            found = verdict(target, prompts, entries[0].texts, one.texts, temperature)
            lossless, words = found.lossless, str(found)
        else:
            same = sum(one.texts[n] == reference.texts[n] for n in one.texts)
            lossless = None
            words = "-" if temperature else f"{same} of {len(one.texts)} of its own"
        rate, own = one.rate(), one.decoding_rate()
        rows.append(
            {
                "label": one.label,
                "window": one.window,
                "tokens_per_second": rate,
                "ratio": rate / fastest.rate(),
                "ratio_to_generate": rate / theirs.rate(),
                "decoding_ratio": None if own is None else own / decoding,
                "new_tokens": sum(map(len, one.texts.values())),
                "lossless": lossless,
                "verdict": words,
                "stats": merge(one.stats).to_dict() if one.stats else None,
            }
        )
    return {"fastest_plain": fastest.label, "configurations": rows}


def show(table: dict[str, Any], where: dict[str, Any], load: str) -> None:
    """Print a table of at most 80 columns, and what the levels did."""
    texts = "likelihood under target" if table["temperature"] else "same text as plain"
    heads = ("window", "tokens/s", "ratio", "decoding", "/generate", texts)
    per_level = ("passes", "ms/pass", "mean length", "accepted")
    rows: list[columns.Row] = []
    levels: list[columns.Row] = []
    for row in table["configurations"]:
        alone, stats = row["decoding_ratio"], row["stats"]
        rows.append((row["label"], (
            ",".join(map(str, row["window"])) or "-", f"{row['tokens_per_second']:.1f}",
            f"{row['ratio']:.2f}x", "-" if alone is None else f"{alone:.2f}x",
            f"{row['ratio_to_generate']:.2f}x", row["verdict"],
        )))  # fmt: skip
        if stats is None or len(stats["levels"]) == 1:
            continue
        levels.append((row["label"], ("",) * len(per_level)))
        for level in stats["levels"]:
            passes, length = level["num_forward_passes"], level["mean_acceptance_length"]
            levels.append((f"  {level['name']}", (
                str(passes), f"{level['seconds'] / passes * 1e3:.2f}" if passes else "-",
                "-" if length is None else f"{length:.2f}",
                "-" if length is None else f"{level['draft_acceptance_rate']:.2f}",
            )))  # fmt: skip
    print(columns.table("configuration", heads, rows, left=1))
    print(f"\n{columns.table('per level', per_level, levels)}")
    for line in (
        "\nfastest on this processor, by timing each level's passes",
        *(f"  {name}: {choice}" for name, choice in table["choices"].items()),
        f"\nratio: over the fastest plain decoding ({table['fastest_plain']}), prefill included; "
        "decoding: over the fastest by the same engine, without the prefill; /generate: over "
        "transformers' generate; mean length: tokens that a verification hands up; accepted: share "
        "of the draft tokens",
        f"{table['prompts']} questions, median of {table['repeats']} interleaved runs each, up to "
        f"{table['max_new_tokens']} new tokens, temperature {table['temperature']:g}",
        f"{where['cpu']}, {where['cores']} cores, {where['threads']} threads; torch "
        f"{where['torch']}, transformers {where['transformers']}",
        f"{load}\n",
    ):
        print(columns.wrapped(line), flush=True)
