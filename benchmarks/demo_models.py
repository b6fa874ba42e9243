"""The models that a demo shows: the shipped ones, or a user's own beside other engines."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from polyspec_ext import progress, tiny
from polyspec_ext.chain import Chain
from polyspec_ext.cli.texts import text_prompt, tokenizer_of
from polyspec_ext.levels import HuggingFaceLevel
from polyspec_ext.levels.describe import has_quantised_layers
from polyspec_ext.tuning import level_for

from .measuring import Contender
from .paper.engines import llama_cpp

Levels = dict[str, HuggingFaceLevel]
# Code, prose and arithmetic.
CHAT = (
    "Write a Python class for a stack with push, pop and peek, with a docstring for each method.",
    "Describe a harbour town on a winter morning in two paragraphs.",
    "A baker makes 12 trays of 8 rolls each and sells 70 rolls. How many are left? Show each step.",
)
_WIDTHS = (1, 6)  # tokens of the passes by which it is chosen how a level runs
_SHIPPED_QUESTIONS = 6  # that two minutes are enough for
_WINDOW, _ABOVE = 5, 9  # where a policy begins


class Models(NamedTuple):
    """What a demo needs of models."""

    levels: Levels  # by name, the target first
    tokenizer: Any
    questions: list[str]
    prompts: list[list[int]]  # the questions as the target reads them
    # With their labels, of these levels or of others of the same names; the last one streams.
    chains: Callable[[Levels], list[tuple[str, Chain]]]
    others: list[Contender]  # other engines with models of their own


def shipped(args: argparse.Namespace) -> Models:
    """The shipped models, as are fastest here."""
    questions = _some(tiny.QUESTIONS, args.prompts or _SHIPPED_QUESTIONS)
    progress.phase("loading the shipped models, and timing how they run fastest here")

    def chains(levels: Levels) -> list[tuple[str, Chain]]:
        made = []
        for names in (("target", "drafter"), ("target", "middle"), tiny.LEVELS):
            window = args.window if len(names) == 3 else args.two_level_window
            chosen = list(tiny.WINDOWS[names]) if window is None else window
            rounds = tiny.ROUNDS.get(names) if window is None else None
            chain = Chain([levels[name] for name in names], chosen, rounds=rounds)
            made.append((_label(names), chain))
        return made

    prompts = tiny.prompt_ids(questions)
    return Models(tiny.levels(), tiny.tokenizer(), questions, prompts, chains, [])


def own(args: argparse.Namespace) -> Models:
    """A target and a drafter of the user's, a model or whatever else drafts in a chain. Of a target
    in 16 or 32 bits its 4-bit copy is the middle, else prompt lookup drafts below the drafter.
    Windows are a policy's.

    Raises:
        ValueError: models that do not load, or more questions than there are.
    """
    questions = _some(CHAT, args.prompts)
    # Before minutes are spent on loading.
    engine = llama_cpp(args.gguf, args.llama)
    progress.phase("loading the models, and timing how they run fastest here")
    tokenizer = tokenizer_of(args)

    def element(place: str, name: str, *above: Any) -> Any:
        return level_for(place, _WIDTHS, pack="auto", name=name, above=above)

    target = element(args.target, "--target")
    if not isinstance(target, HuggingFaceLevel):
        raise ValueError(f"--target: expected a causal language model, given {args.target}")
    levels = {"target": target}
    if args.draft is not None:
        drafter = element(args.draft, "--draft", target)
        if isinstance(drafter, HuggingFaceLevel):
            levels["drafter"] = drafter
    prompts = [text_prompt(args, tokenizer, question).input_ids for question in questions]
    quantized = has_quantised_layers(target.model)

    def chains(levels: Levels) -> list[tuple[str, Chain]]:
        target, *models = levels.values()
        lowest: list[Any] = [*models] or [args.draft or "prompt-lookup"]
        made = [Chain([target, *lowest], args.two_level_window or [_WINDOW], policy="online")]
        three = [target, *models, "prompt-lookup"] if quantized else [target, "w4", *lowest]
        if len(three) == 3:
            made.append(Chain(three, args.window or [_ABOVE, _WINDOW], policy="joint"))
        return [(_label(chain.names), chain) for chain in made]

    others = []
    if engine is not None:
        eos = frozenset(target.eos_token_ids)
        labels = {variant.key: variant.label for variant in engine.variants}
        for one in engine.variants:
            decode = engine.decoder(one.key, eos)
            others.append(Contender(one.label, decode, plain=labels[one.plain]))
    return Models(levels, tokenizer, questions, prompts, chains, others)


def _label(names: Sequence[str]) -> str:
    return f"{'three' if len(names) == 3 else 'two'} levels: {', '.join(names)}"


def _some(questions: Sequence[str], count: int | None) -> list[str]:
    if count is not None and count > len(questions):
        raise ValueError(f"--prompts: expected at most {len(questions)}, given {count}")
    return list(questions[:count])
