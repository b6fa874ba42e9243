"""``python -m benchmarks demo``: the shipped chain beside plain decoding of the same target.

It streams an answer of the three-level chain, then measures: plain decoding, two levels and three
levels answer in turns, so that a change in the machine's load meets them all. The baselines are the
same target with its cache: transformers' own greedy `generate`, and the same engine with one level,
its weights packed and not. Ratios are over the fastest of them. That takes two minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from typing import Any

from polyspec_ext import columns, processor, progress
from polyspec_ext.chain import Chain
from polyspec_ext.cli import options
from polyspec_ext.cli.run import INTERRUPTED
from polyspec_ext.cli.texts import SHIPPED, print_text, speed
from polyspec_ext.levels import HuggingFaceLevel
from polyspec_ext.tuning import default_store

from . import demo_models, demo_table, machine
from .demo_models import Levels, Models
from .generation_calls import generate_call
from .measuring import Contender, measure

PLAIN, GENERATE = "plain decoding, same engine", "plain decoding, transformers generate"
_WARM_UP = 12  # tokens of a first call of a user's own models
SECONDS = 75  # of the first table, so that the whole takes two minutes on two cores


def add_command(commands: Any) -> None:
    """Adds ``demo`` to the subcommands of a parser."""
    sub = commands.add_parser(
        "demo",
        help="plain decoding, two levels and three levels side by side",
        description="The shipped models: an answer of the three-level chain as it comes, then "
        "plain decoding, two-level chains and the three-level chain measured in turns. Tables are "
        "printed as they are finished; Ctrl-C keeps them.",
    )
    own = sub.add_argument_group(
        "models",
        "the shipped ones, or your own: plain decoding, the target with the draft, and with its "
        "4-bit copy between them (of a target that is one itself, with prompt lookup below)",
    )
    own.add_argument(
        "--target", metavar="MODEL", help="directory, id or GGUF file; 'w4:MODEL': its 4-bit copy"
    )
    options.add_draft(
        own, "the same, or a drafter, as 'suffix' or an EAGLE head (default: prompt lookup)"
    )
    options.add_llama(own)
    sub.add_argument(
        "--prompts",
        type=options.COUNT,
        metavar="N",
        help="questions (default: the 6 of the shipped models, the 3 of others)",
    )
    options.add_count(sub, "--repeats", 3, "runs per question")
    sub.add_argument(
        "--seconds",
        type=options.number(0),
        metavar="S",
        help="after which no repeat of the first table is begun or finished any more, but the "
        f"first (default: {SECONDS})",
    )
    sub.add_argument(
        "--max-new-tokens",
        type=options.COUNT,
        metavar="N",
        help="(default: 128 of the shipped models, 48 of others, whose tokens take longer)",
    )
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
    options.add_measure_again(sub)
    sub.set_defaults(run=run, raw=False, system=None)


def run(args: argparse.Namespace) -> int:
    """Measure and print. Returns 1 where texts are not the target's own, 130 where Ctrl-C came
    behind the first table."""
    if args.target is None and (args.draft or args.gguf):
        raise ValueError("--draft, --gguf: expected a --target with them")
    if args.measure_again:
        default_store().clear()
    if args.max_new_tokens is None:
        args.max_new_tokens = 128 if args.target is None else 48
    demo = Demo(args, (demo_models.shipped if args.target is None else demo_models.own)(args))
    interrupted = False
    try:
        demo.answer()
        demo.chains(SECONDS if args.seconds is None else args.seconds)
    except KeyboardInterrupt:
        if not demo.result["tables"]:
            raise
        interrupted = True
        progress.phase("interrupted: what was finished is kept")
    if args.json:
        print(json.dumps(demo.result, indent=2))
    if interrupted:
        return INTERRUPTED
    return 0 if demo.is_lossless else 1


class Demo:
    """What is shown, one part after the other; the levels are shared by all chains, which take
    turns.

    Attributes:
        result: the JSON object, with every part that is finished.
    """

    def __init__(self, args: argparse.Namespace, models: Models) -> None:
        self._args, self._models = args, models
        self._levels, self._prompts = models.levels, models.prompts
        self._tables: list[dict[str, Any]] = []
        load = machine.load_average()
        self._load_line = processor.load_line(load)
        self.result: dict[str, Any] = {
            "machine": machine.describe("cpu"),
            "load": {"before": load},
            "temperature": args.temperature,
            "max_new_tokens": args.max_new_tokens,
            "tables": self._tables,
        }

    @property
    def is_lossless(self) -> bool:
        """Whether all texts are the target's own."""
        rows = [row for table in self._tables for row in table["configurations"]]
        return all(row["lossless"] is not False for row in rows)

    def answer(self) -> None:
        """The longest chain answers the first question, as a stream."""
        args, models = self._args, self._models
        label, chain = models.chains(self._levels)[-1]
        stream = chain.stream(
            self._prompts[0], args.max_new_tokens, args.temperature, seed=args.seed
        )
        if args.json:
            text = models.tokenizer.decode(list(stream), skip_special_tokens=True)
        else:
            print(f"Question: {models.questions[0]}\nAnswer:", end="", flush=True)
            text = print_text(stream, models.tokenizer)
            print(columns.wrapped(f"({label.partition(':')[0]}: {speed(stream.stats)})"))
            print(columns.wrapped(SHIPPED) if args.target is None else "", end="\n\n", flush=True)
        self.result["text"] = text

    def chains(self, seconds: float | None) -> None:
        """Measure the table. After `seconds` no repeat but the first is
        finished."""
        target = self._levels["target"]
        entries = [Contender.of_chain(PLAIN, Chain([target])), self._generate()]
        with contextlib.suppress(ValueError):  # where nothing can be packed
            other = HuggingFaceLevel(target.model, pack=not target.pack)
            how = ", packed" if other.pack else ", weights as torch keeps them"
            entries.append(Contender.of_chain(PLAIN + how, Chain([other])))
        entries += [*self._contenders(self._levels, ""), *self._models.others]
        self._measure(entries, self._levels, "", seconds)

    def _generate(self) -> Contender:
        target = self._levels["target"]
        return Contender(GENERATE, generate_call(target.model, frozenset(target.eos_token_ids)))

    def _contenders(self, levels: Levels, how: str) -> list[Contender]:
        return [
            Contender.of_chain(label + how, chain) for label, chain in self._models.chains(levels)
        ]

    def _measure(
        self, entries: list[Contender], levels: Levels, how: str, seconds: float | None
    ) -> None:
        """A table of `entries`: measured, kept and printed. Where Ctrl-C comes behind the first
        repeat, it has the repeats until then."""
        args, count = self._args, len(self._prompts)
        progress.phase(
            f"measuring {len(entries)} configurations{how}: {count} questions, up to "
            f"{args.repeats} repeats each"
        )
        stopped: BaseException | None = None
        began = time.monotonic()

        def tick() -> None:
            whole = _whole_repeats(entries, count)
            if seconds is None or not whole:
                return
            spent = time.monotonic() - began
            between = all(len(one.seconds) == whole * count for one in entries)
            if (spent + spent / whole if between else spent) > seconds:
                raise _Late

        try:
            measure(
                entries,
                self._prompts,
                repeats=args.repeats,
                max_new_tokens=args.max_new_tokens,
                temperature=args.temperature,
                seed=args.seed,
                warm_up=args.max_new_tokens if args.target is None else _WARM_UP,
                tick=tick,
            )
        except (_Late, KeyboardInterrupt) as error:
            if not _whole_repeats(entries, count):
                raise
            stopped = error
        repeats = _keep_whole_repeats(entries, count)
        table = {
            "prompts": count,
            "repeats": repeats,
            "max_new_tokens": args.max_new_tokens,
            "temperature": args.temperature,
            **demo_table.rows_of(
                entries, self._prompts, levels["target"].model, args.temperature, GENERATE
            ),
            "choices": {name + how: str(level.choice) for name, level in levels.items()},
        }
        self._tables.append(table)
        if not args.json:
            demo_table.show(table, self.result["machine"], self._load_line)
        if isinstance(stopped, KeyboardInterrupt):
            raise stopped


class _Late(Exception):
    """The time for a table is over."""


def _whole_repeats(entries: list[Contender], count: int) -> int:
    """Repeats in which everybody has answered all of `count` prompts."""
    return min(len(one.seconds) for one in entries) // count


def _keep_whole_repeats(entries: list[Contender], count: int) -> int:
    """Forget what everybody has measured behind them; returns how many there are."""
    whole = _whole_repeats(entries, count)
    for one in entries:
        for key in [key for key in one.seconds if key[0] >= whole]:
            del one.seconds[key]
            del one.tokens[key]
        del one.stats[whole * count :]
    return whole
