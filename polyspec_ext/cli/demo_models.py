"""The models that a demo shows: the shipped ones, or a user's own beside other engines."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

from .. import progress, tiny
from ..bench.machine import QUESTIONS
from ..bench.measuring import Contender
from ..bench.paper.engines import LlamaCpp, llama_cpp
from ..chain import Chain
from ..chat import chat_prompt, has_template
from ..levels import HuggingFaceLevel, tokenizer_at
from ..levels.describe import has_quantised_layers
from ..quantization.stored import original
from ..tuning import level_for

ENGINE = "another engine"  # the kind of its contenders
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


class Shown(NamedTuple):
    """A chain."""

    label: str
    names: tuple[str, ...]
    chain: Chain


class Models(NamedTuple):
    """What a demo needs of models.

    Attributes:
        levels: by name, the target first.
        questions, prompts: what is asked, and as the target reads it.
        chains: of these levels or of others of the same names, the one that streams last.
        others: other engines with models of their own.
    """

    levels: Levels
    tokenizer: Any
    questions: list[str]
    prompts: list[list[int]]
    chains: Callable[[Levels], list[Shown]]
    others: list[Contender]


def shipped(args: argparse.Namespace) -> Models:
    """The shipped models, as are fastest here.

    Raises:
        ValueError: more questions are asked for than there are.
    """
    questions = _some(QUESTIONS, args.prompts or _SHIPPED_QUESTIONS)
    progress.phase("loading the shipped models, and timing how they run fastest here")

    def chains(levels: Levels) -> list[Shown]:
        made = []
        for label, names, window in (
            ("two levels: target, drafter", ("target", "drafter"), args.two_level_window),
            ("two levels: target, middle", ("target", "middle"), args.two_level_window),
            ("three levels: target, middle, drafter", tiny.LEVELS, args.window),
        ):
            chosen = list(tiny.WINDOWS[names]) if window is None else window
            rounds = tiny.ROUNDS.get(names) if window is None else None
            chain = Chain([levels[name] for name in names], chosen, rounds=rounds)
            made.append(Shown(label, names, chain))
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
    try:
        tokenizer = tokenizer_at(original(args.target))
    except ValueError as error:
        raise ValueError(f"--target: {error}") from error
    target = _element(args.target, "--target")
    if not isinstance(target, HuggingFaceLevel):
        raise ValueError(f"--target: expected a causal language model, given {args.target}")
    levels = {"target": target}
    if args.drafter is not None:
        drafter = _element(args.drafter, "--drafter", target)
        if isinstance(drafter, HuggingFaceLevel):
            levels["drafter"] = drafter
    prompts = [
        chat_prompt(tokenizer, [{"role": "user", "content": question}]).input_ids
        if has_template(tokenizer)
        else list(tokenizer(question)["input_ids"])
        for question in questions
    ]

    quantized = has_quantised_layers(levels["target"].model)

    def chains(levels: Levels) -> list[Shown]:
        target, *models = levels.values()
        lowest: list[Any] = [*models] or [args.drafter or "prompt-lookup"]
        made = [Chain([target, *lowest], args.two_level_window or [_WINDOW], policy="online")]
        three = [target, *models, "prompt-lookup"] if quantized else [target, "w4", *lowest]
        if len(three) == 3:
            made.append(Chain(three, args.window or [_ABOVE, _WINDOW], policy="joint"))
        words = ("two", "three")
        return [
            Shown(f"{word} levels: {', '.join(chain.names)}", tuple(chain.names), chain)
            for word, chain in zip(words, made, strict=False)
        ]

    others = [] if engine is None else _contenders(engine, levels["target"])
    return Models(levels, tokenizer, questions, prompts, chains, others)


def _some(questions: tuple[str, ...] | list[str], count: int | None) -> list[str]:
    if count is not None and count > len(questions):
        raise ValueError(f"--prompts: expected at most {len(questions)}, given {count}")
    return list(questions[:count])


def _element(place: str, name: str, *above: Any) -> Any:
    return level_for(place, _WIDTHS, pack="auto", compile=False, name=name, above=above)


def _contenders(engine: LlamaCpp, target: HuggingFaceLevel) -> list[Contender]:
    eos = frozenset(target.eos_token_ids)
    labels = {variant.key: variant.label for variant in engine.variants}
    return [
        Contender(
            variant.label,
            ENGINE,
            ("target", "drafter")[: 1 + variant.drafts],
            engine.decoder(variant.key, eos),
            plain=labels[variant.plain],
        )
        for variant in engine.variants
    ]
