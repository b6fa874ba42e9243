"""Options that choose a chain and say what is asked of it, and the chain that they describe."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import chain_file, tiny
from ..command import options
from ..planned import Chain
from ..policies import POLICIES
from ..tuning import default_store

_PLANNED = 32  # new tokens that a plan is made for, at least: fewer do not show every step


def add_chain_options(parser: argparse.ArgumentParser) -> None:
    """Options that choose the models of a chain."""
    group = parser.add_argument_group(
        "chain",
        "without --target: the shipped target, and below it the shipped middle and drafter where "
        "neither --middle nor --draft is given",
    )
    group.add_argument(
        "--chain",
        metavar="FILE",
        help="a chain that `plan --save FILE` wrote, instead of the options below but --threads",
    )
    group.add_argument(
        "--target",
        metavar="MODEL",
        help="model directory or id; here and below 'w4:MODEL' is its 4-bit copy, made once and "
        "kept in polyspec_ext/w4 of the user's cache folder, 'w8:MODEL' its 8-bit one",
    )
    group.add_argument(
        "--middle",
        metavar="MODEL",
        action="append",
        default=[],
        help="level between target and draft, or 'w4' or 'w8', the target's 4-bit or 8-bit copy "
        "over the target's cache; may be repeated",
    )
    options.add_draft(
        group, "model directory or id, or 'prompt-lookup', 'suffix', 'ngram' or 'early-exit:K'"
    )
    group.add_argument(
        "--window",
        type=options.COUNTS_OR_NONE,
        metavar="MU,K",
        help="tokens that each level but the last waits for, target first",
    )
    group.add_argument(
        "--rounds",
        type=options.COUNTS_OR_NONE,
        metavar="R,...",
        help="blocks from below after which a level waits no longer, for each above the lowest "
        "that verifies; 0: no bound (default: as many as fill its window if all is accepted)",
    )
    options.add(
        group,
        "--tail",
        options.COUNT_OR_NONE,
        0,
        "T",
        "tokens that the drafter adds, unverified, to those that the target is about to verify",
    )
    group.add_argument(
        "--rule",
        choices=("token", "block"),
        default="token",
        help="acceptance rule (default: %(default)s)",
    )
    group.add_argument(
        "--policy",
        choices=tuple(POLICIES),
        help="chooses the windows before every round, from --window on (default: they stay)",
    )
    group.add_argument(
        "--dtype",
        help="of the models; auto: each checkpoint's own (default: auto, but on the CPU float32 "
        "unless it is bfloat16, packed, and the processor multiplies that; of the shipped chain "
        "there float32, its draft levels by the same rule)",
    )
    group.add_argument("--device", default="cpu", help="of the models (default: %(default)s)")
    options.add_threads(group)
    group.add_argument(
        "--pack",
        choices=tuple(options.SWITCHES),
        default="auto",
        help="pack the weights for the CPU's matrix kernels, which takes their memory again; auto: "
        "where that is faster on this processor (default: %(default)s)",
    )
    add_measure_again(group)


def add_measure_again(parser: Any) -> None:
    """Option that forgets what was timed on this processor."""
    parser.add_argument(
        "--measure-again",
        action="store_true",
        help="forget what was found to be fastest on this processor, which is kept in "
        "polyspec_ext/levels of the user's cache folder, and time it again",
    )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Options of a request, each one value or one for every prompt."""
    group = parser.add_argument_group(
        "sampling", "each takes one value, or one for every prompt with commas between"
    )
    for name, kind, default, metavar, meaning in (
        ("--max-new-tokens", options.COUNTS_OR_NONE, 256, "N,...", "never more than that"),
        ("--temperature", options.TEMPERATURES, 0.0, "T,...", "0 is greedy"),
        ("--top-k", options.COUNTS_OR_NONE, 0, "K,...", "0 is off"),
        ("--top-p", options.SHARES, 1.0, "P,...", "1 is off"),
        ("--min-p", options.SHARES, 0.0, "P,...", "0 is off"),
        ("--seed", options.SEEDS, None, "S,...", "the same seed, the same text"),
    ):
        read: Callable[[str], Any] = kind
        group.add_argument(
            name,
            type=read,
            default=[default],
            metavar=metavar,
            help=f"{meaning} (default: {'a fresh one' if default is None else f'{default:g}'})",
        )


def sampling_of(args: argparse.Namespace, count: int) -> dict[str, Any]:
    """What `add_sampling_options` has read, for `count` prompts, as `Chain.generate` takes it."""
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
    given: dict[str, list[Any]] = {name: getattr(args, name) for name in names}
    for name, values in given.items():
        if len(values) not in (1, count):
            raise ValueError(
                f"{name}: expected one value, or as many as prompts ({count}), given {len(values)}"
            )
    return {name: values if len(values) > 1 else values[0] for name, values in given.items()}


def build_chain(args: argparse.Namespace) -> Chain:
    """The chain that the options describe."""
    if args.chain is not None:
        return _saved_chain(args)
    if args.measure_again:
        default_store().clear()
    names = ("rule", "dtype", "device", "rounds", "tail", "policy")
    chosen: dict[str, Any] = {name: getattr(args, name) for name in names}
    chosen["pack"] = options.SWITCHES[args.pack]
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
    """The chain of ``--chain``, whose target becomes that of the options.

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
    """The chain that is recommended for such prompts and the options' models (``--auto``).

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
        pack=options.SWITCHES[args.pack],
        consider=True,
        batch=len(prompts),
    )
