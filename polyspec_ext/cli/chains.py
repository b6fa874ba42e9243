"""The chain that the options of a command describe, and a request to it."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from .. import chain_file, tiny
from ..chain import Chain
from ..rules import LogitsRules
from ..tuning import default_store
from .options import SWITCHES, add_chain_options

_PLANNED = 32  # new tokens that a plan is made for, at least: fewer do not show every step


def sampling_of(args: argparse.Namespace, count: int, n: int = 1) -> dict[str, Any]:
    """Return the sampling options for `n` texts of each of `count` prompts as keyword arguments of
    `Chain.generate`, but for n."""
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    given: dict[str, list[Any]] = {name: getattr(args, name) for name in (*names, *penalties)}
    for name, values in given.items():
        things, wanted = ("texts", count * n) if name == "seed" and n > 1 else ("prompts", count)
        if len(values) not in (1, wanted):
            raise ValueError(
                f"{name}: expected one value, or as many as {things} ({wanted}), given "
                f"{len(values)}"
            )
    of_rules = [(given.pop(name) * count)[:count] for name in penalties]
    given["rules"] = [LogitsRules(*values) for values in zip(*of_rules, strict=True)]
    request = {name: values if len(values) > 1 else values[0] for name, values in given.items()}
    return {**request, "stop": args.stop}


def build_chain(args: argparse.Namespace) -> Chain:
    """Build the chain that the options describe."""
    if args.chain is not None:
        return _saved_chain(args)
    if args.measure_again:
        default_store().clear()
    names = ("rule", "dtype", "device", "rounds", "tail", "policy")
    chosen: dict[str, Any] = {name: getattr(args, name) for name in names}
    chosen["pack"] = SWITCHES[args.pack]
    if args.target is None and not args.middle and not args.draft:
        return tiny.chain(window=args.window, **chosen)
    target = tiny.path("target") if args.target is None else args.target
    levels = [("--target", target), *(("--middle", place) for place in args.middle)]
    if args.draft:
        levels.append(("--draft", args.draft))
    try:
        return Chain([place for _, place in levels], args.window, **chosen)
    except (TypeError, ValueError) as error:
        # A level is named as the command line has it.
        text = re.sub(r"^levels\[(\d+)\]", lambda found: levels[int(found[1])][0], str(error))
        raise ValueError(text) from error


def _saved_chain(args: argparse.Namespace) -> Chain:
    """Load the chain of ``--chain``, and set the target of the options to its target.

    Raises:
        ValueError: no such chain, or options that it decides.
    """
    parser = argparse.ArgumentParser()
    add_chain_options(parser)
    for name, default in vars(parser.parse_args([])).items():
        value = getattr(args, name)
        if value != default and name not in ("chain", "threads"):
            raise ValueError(f"{name}: expected none beside --chain, given {value}")
    try:
        chain = Chain.from_plan(args.chain)
    except ValueError as error:
        raise ValueError(re.sub("^path:", "chain:", str(error))) from error
    args.target = chain_file.read("chain", Path(args.chain)).elements[0].source
    return chain


def planned_chain(args: argparse.Namespace, prompts: list[list[int]]) -> Chain:
    """Plan a chain of the options' models for such prompts (``--auto``).

    Raises:
        ValueError: no target, or options that a plan chooses.
    """
    for name in ("chain", "window", "rounds", "policy", "dtype"):
        if getattr(args, name) is not None:
            raise ValueError(f"auto: expected no --{name} beside it, given {getattr(args, name)}")
    if args.target is None:
        raise ValueError("auto: expected a --target beside it, given none")
    if args.measure_again:
        default_store().clear()
    given = [args.target, *args.middle, *([args.draft] if args.draft else [])]
    return Chain.planned(
        given,
        prompts,
        max(_PLANNED, *args.max_new_tokens),
        args.temperature[0],
        pack=SWITCHES[args.pack],
        consider=True,
        batch=len(prompts),
    )
