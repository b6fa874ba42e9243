"""``python -m polyspec_ext bench chains``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ... import tiny
from ...bench import chains
from ...bench.published_shapes import SHAPES
from ...command import options


def add_command(kinds: Any) -> None:
    """Adds ``chains`` to the kinds of benchmarks."""
    sub = kinds.add_parser(
        "chains",
        help="every chain of two to four levels beside plain decoding",
        description="Every chain below the shipped target, or below the same target grown, of its "
        "4-bit copy, the middle, the drafter, prompt lookup and an EAGLE head: acceptance "
        "lengths, passes and tokens per second beside plain decoding and transformers, in turns "
        "within one run. Prints Markdown, or JSON.",
    )
    options.add_json(sub)
    options.add_json_file(sub)
    options.add_count(sub, "--prompts", 4, "questions")
    options.add_count(sub, "--repeats", 3, "")
    options.add_count(sub, "--max-new-tokens", 96, "")
    options.add_questions(sub)
    size = sub.add_mutually_exclusive_group()
    options.add_count(size, "--times", 4, "how much the target is grown; 1: as it is shipped")
    size.add_argument(
        "--shape",
        choices=tuple(SHAPES),
        help="grow the target to the width and depth of this published model instead, with the "
        "same distribution: a trained small model at the shape's cost",
    )
    options.add_device(sub)
    options.add_count(sub, "--levels", 4, "most levels of a chain")
    sub.add_argument(
        "--chains",
        type=_chains,
        metavar="CHAIN;...",
        help="only these, each by its levels below the target: 'W4 copy,drafter;EAGLE tree'",
    )
    sub.add_argument(
        "--head",
        choices=tiny.HEADS,
        default=tiny.HEADS[0],
        help="the EAGLE head (default: %(default)s)",
    )
    sub.add_argument(
        "--compile",
        action="store_const",
        const="auto",
        default=False,
        help="the models decode through torch.compile where that is faster, plain decoding as well "
        "(needs a C++ compiler and minutes)",
    )
    sub.add_argument(
        "--plan-seconds",
        type=options.COUNT_OR_NONE,
        default=60,
        metavar="S",
        help="that the planner may measure, for each temperature, to find windows; 0: windows that "
        "double from level to level (default: %(default)s)",
    )
    sub.add_argument(
        "--w4",
        type=Path,
        metavar="DIR",
        help="where the 4-bit copy is kept, so that it is calibrated once (default: made anew)",
    )
    options.add_temperatures(sub)
    options.add_seed(sub)
    options.add_threads(sub)
    sub.set_defaults(run=chains.run)


def _chains(text: str) -> list[tuple[str, ...]]:
    known = [one[1:] for one in chains.combinations(5)]
    asked = [tuple(name.strip() for name in one.split(",")) for one in text.split(";")]
    for one in asked:
        if one not in known:
            raise argparse.ArgumentTypeError(
                f"expected chains among {'; '.join(','.join(each) for each in known)}, given "
                f"{','.join(one)}"
            )
    return asked
