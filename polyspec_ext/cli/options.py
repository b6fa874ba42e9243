"""Options of the commands: parse each value on the command line; an error is a line with the
option, the expected and the given value. No model library is imported."""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ..policies import NAMES

T = TypeVar("T")
N = TypeVar("N", int, float)
NO_END = float("inf")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}
SWITCHES: dict[str, Any] = {"auto": "auto", "on": True, "off": False}  # of `arguments.Switch`


class Parser(argparse.ArgumentParser):
    """A parser with errors of a single line, without the usage that ``--help`` prints."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message.removeprefix('argument ')}\n")


def _number(kind: Callable[[str], N], noun: str, low: float, high: float) -> Callable[[str], N]:
    def read(text: str) -> N:
        with contextlib.suppress(ValueError):
            value = kind(text)
            if low <= value <= high and value < NO_END:  # NaN is in no range
                return value
        span = f">= {low}" if high == NO_END else f"in [{low}, {high}]"
        raise argparse.ArgumentTypeError(f"expected {noun} {span}, given {text!r}")

    return read


def integer(low: int, high: float = NO_END) -> Callable[[str], int]:
    """Return a parser of integers in [low, high]."""
    return _number(int, "an integer", low, high)


def number(low: float, high: float = NO_END) -> Callable[[str], float]:
    """Return a parser of finite numbers in [low, high]."""
    return _number(float, "a number", low, high)


def listed(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return a parser of values with commas between: ``"8,4"`` -> ``[8, 4]``."""

    def read(text: str) -> list[T]:
        try:
            return [kind(item.strip()) for item in text.split(",")]
        except argparse.ArgumentTypeError as error:
            expected = str(error).partition(", given ")[0]
            raise argparse.ArgumentTypeError(
                f"{expected}, or several with commas between, given {text!r}"
            ) from None

    return read


COUNT = integer(1)
COUNT_OR_NONE = integer(0)
SEED = integer(0, 2**64 - 1)
COUNTS = listed(COUNT)
COUNTS_OR_NONE = listed(COUNT_OR_NONE)
SEEDS = listed(SEED)
TEMPERATURES = listed(number(0))
REPETITION = listed(number(0.01, 100))
PENALTIES = listed(number(-2, 2))
SHARE = number(0, 1)
SHARES = listed(SHARE)


def words(text: str) -> list[str]:
    """Split ``"a,b"`` into ``["a", "b"]``."""
    return [word.strip() for word in text.split(",") if word.strip()]


def _existing(noun: str, exists: Callable[[Path], bool]) -> Callable[[str], Path]:
    def read(text: str) -> Path:
        if not exists(Path(text)):
            raise argparse.ArgumentTypeError(f"expected {noun}, given {text!r}")
        return Path(text)

    return read


file, folder = _existing("a file", Path.is_file), _existing("a folder", Path.is_dir)


def prompt(text: str) -> str:
    """Require UTF-8 text: a shell may pass other bytes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("expected UTF-8 text, given other bytes") from None
    return text


def stop(text: str) -> str:
    """Require a nonempty stop string, and read its escapes as in Python."""
    if not text:
        raise argparse.ArgumentTypeError("expected at least 1 character, given ''")
    return re.sub(r"\\([\\nrt])", lambda match: _ESCAPES[match[1]], prompt(text))


def add(
    group: Any,
    name: str,
    kind: Callable[[str], object],
    default: object,
    metavar: str,
    what: str = "",
) -> None:
    """Add an option with a value. Its help ends with the default, if any."""
    text = what if default is None else f"{what} (default: %(default)s)".strip()
    group.add_argument(name, type=kind, default=default, metavar=metavar, help=text)


def add_count(group: Any, name: str, default: int | None, what: str = "") -> None:
    """Add an option that takes an integer >= 1."""
    add(group, name, COUNT, default, "N", what)


def add_flag(group: Any, name: str, what: str) -> None:
    """Add an option without a value."""
    group.add_argument(name, action="store_true", help=what)


# Options of several commands, as arguments of `add_argument`.
SHARED: dict[str, dict[str, Any]] = {
    "--threads": {
        "type": COUNT,
        "metavar": "N",
        "help": "threads of torch; fewer than the cores where others use the machine as well "
        "(default: torch's own choice)",
    },
    "--device": {"choices": ("cpu", "cuda"), "default": "cpu", "help": "(default: cpu)"},
    "--pack": {"choices": tuple(SWITCHES), "default": "auto", "help": "(default: %(default)s)"},
    "--temperature": {"type": number(0), "default": 0.0, "metavar": "T", "help": "(default: 0.0)"},
    "--seed": {"type": SEED, "default": 0, "metavar": "S", "help": "(default: 0)"},
    "--measure-again": {
        "action": "store_true",
        "help": "forget the plans that are kept in polyspec_ext/plans of the user's cache folder, "
        "and measure again",
    },
    "--raw": {"action": "store_true", "help": "without the chat template"},
    "--system": {"metavar": "TEXT", "help": "system prompt, where the chat template takes one"},
    "--verbose": {
        "action": "store_true",
        "help": "also show the chain and the prompts as the target reads them, on standard error",
    },
    "--show-levels": {
        "action": "store_true",
        "help": "show each token in the colour of the level that proposed it, underlined where it "
        "came in place of a rejected one",
    },
}


def share(group: Any, *names: str) -> None:
    """Add options of `SHARED`."""
    for name in names:
        group.add_argument(name, **SHARED[name])


def add_chain_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the models of a chain."""
    group = parser.add_argument_group(
        "chain",
        "without --target: the shipped target, and below it the shipped middle and drafter where "
        "neither --middle nor --draft is given",
    )
    several: dict[str, Any] = {"action": "append", "default": []}
    rows: tuple[tuple[str, str | None, dict[str, Any], str], ...] = (
        ("--chain", "FILE", {}, "a chain that `plan --save FILE` wrote, instead of the options "
         "below but --threads"),
        ("--target", "MODEL", {}, "model directory or id; here and below 'w4:MODEL' is its 4-bit "
         "copy, made once and kept in polyspec_ext/w4 of the user's cache folder"),
        ("--middle", "MODEL", several, "level between target and draft, or 'w4', the target's "
         "4-bit copy over the target's cache; may be repeated"),
        ("--draft", "MODEL", {}, "model directory or id, or 'prompt-lookup', 'suffix', 'ngram', "
         "'mtp' or 'early-exit:K' (default of chat and serve for a --target alone: 'prompt-lookup' "
         "with --policy joint)"),
        ("--window", "MU,K", {"type": COUNTS_OR_NONE}, "tokens that each level but the last waits "
         "for, target first"),
        ("--rounds", "R,...", {"type": COUNTS_OR_NONE}, "blocks from below after which a level "
         "waits no longer, for each above the lowest that verifies; 0: no bound (default: as many "
         "as fill its window if all is accepted)"),
        ("--tail", "T", {"type": COUNT_OR_NONE, "default": 0}, "tokens that the drafter adds, "
         "unverified, to those that the target is about to verify (default: %(default)s)"),
        ("--rule", None, {"choices": ("token", "block"), "default": "token"}, "acceptance rule "
         "(default: %(default)s)"),
        ("--policy", None, {"choices": NAMES}, "chooses the windows before every round, "
         "from --window on (default: they stay)"),
        ("--dtype", None, {}, "of the models; auto: each checkpoint's own (default: auto, but on "
         "the CPU float32 unless it is bfloat16, packed, and the processor multiplies that; of "
         "the shipped chain there float32, its draft levels by the same rule)"),
        ("--device", None, {"default": "cpu"}, "of the models (default: %(default)s)"),
        ("--pack", None, {"choices": tuple(SWITCHES), "default": "auto"}, "pack the weights for "
         "the CPU's matrix kernels, which takes their memory again; auto: where that is faster on "
         "this processor (default: %(default)s)"),
    )  # fmt: skip
    for name, metavar, extra, about in rows:
        group.add_argument(name, metavar=metavar, help=about, **extra)
    share(group, "--threads", "--measure-again")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a request, each with a value for all prompts or a value per prompt."""
    group = parser.add_argument_group(
        "sampling", "each takes one value, or one for every prompt with commas between"
    )
    for name, kind, default, metavar, meaning in (
        ("--max-new-tokens", COUNTS_OR_NONE, 256, "N,...", "never more than that"),
        ("--temperature", TEMPERATURES, None, "T,...", "0 is greedy (default: the model's, or 0)"),
        ("--top-k", COUNTS_OR_NONE, None, "K,...", "0 is off (default: the model's)"),
        ("--top-p", SHARES, None, "P,...", "1 is off (default: the model's)"),
        ("--min-p", SHARES, None, "P,...", "0 is off (default: the model's)"),
        ("--seed", SEEDS, None, "S,...", "the same seed, the same text (default: a fresh one)"),
        (
            "--repetition-penalty",
            REPETITION,
            None,
            "R,...",
            "of the prompt's tokens too; 1 is off (default: the model's)",
        ),
        ("--presence-penalty", PENALTIES, 0.0, "P,...", "of tokens that the text has; 0 is off"),
        ("--frequency-penalty", PENALTIES, 0.0, "F,...", "as often as it has them; 0 is off"),
    ):
        read: Callable[[str], Any] = kind
        group.add_argument(
            name,
            type=read,
            default=[default],
            metavar=metavar,
            help=meaning if default is None else f"{meaning} (default: {default:g})",
        )
    parser.add_argument(
        "--stop",
        action="append",
        type=stop,
        metavar="TEXT",
        help="end a text before this string, in which \\n is a line break, \\t a tab and \\\\ a "
        "backslash; may be repeated",
    )
