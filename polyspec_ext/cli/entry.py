"""The command line: ``python -m polyspec_ext generate|chat|plan|serve ...``.

A command's module is imported when the command runs, and models with it: ``--help`` stays quick.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

import torch

from . import options
from .run import help_of, run_command

# Commands whose options lie in their module.
_OTHERS = ("plan", "serve")


def make_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of the command line.

    Args:
        command: the command that will be parsed, whose options suffice; None: all.
    """
    script = Path(sys.argv[0]).name if sys.argv else ""
    parser = options.Parser(
        prog=script if script == "polyspec" else "python -m polyspec_ext",
        description="Lossless polybasic speculative decoding.",
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="show the versions that matter, and exit"
    )
    parser.set_defaults(run=help_of(parser))
    commands = parser.add_subparsers(metavar="COMMAND")
    _add_generate(
        commands.add_parser(
            "generate",
            help="continue a prompt, or several at once",
            description="Answer or continue prompts with the target's distribution. If its "
            "tokenizer has a chat template, a prompt is a question and goes through it; else, or "
            "with --raw, it is continued as it is.",
        )
    )
    _add_chat(
        commands.add_parser(
            "chat",
            help="a conversation on the terminal",
            description="Talk with a chain whose target's tokenizer has a chat template. Answers "
            "stream; statistics follow each on standard error. Pasted lines are one message. "
            "/help lists the commands. Tokens in the caches are not read again. Turns for which "
            "the context has no room are left out, the oldest first.",
        )
    )
    if command not in commands.choices:
        for name in _OTHERS:
            importlib.import_module(f".{name}", __package__).add_command(commands)
    return parser


def _add_generate(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("prompt", nargs="+", type=options.prompt, help="text; '-' reads it from stdin")
    options.add_raw(sub)
    options.add_show_levels(sub)
    options.add_prompt_options(sub)
    sub.add_argument(
        "--json",
        action="store_true",
        help="one JSON object instead of streamed text; of several prompts, with their requests",
    )
    sub.add_argument(
        "--stats",
        action="store_true",
        help="a table of every level's work and acceptance at the end",
    )
    sub.add_argument(
        "--auto",
        action="store_true",
        help="the chain of these models, their copies and drafters without a model that `plan` "
        "recommends for the prompts; planned once, and kept",
    )
    options.add_chain_options(sub)
    options.add_sampling_options(sub)
    options.add_count(sub, "--n", 1, "texts for each prompt")
    sub.set_defaults(run=_later("generate"))


def _add_chat(sub: argparse.ArgumentParser) -> None:
    options.add_prompt_options(sub)
    options.add_show_levels(sub)
    sub.add_argument(
        "--stats",
        action="store_true",
        help="a table of every level's work and acceptance behind each answer, instead of a line",
    )
    options.add_chain_options(sub)
    options.add_sampling_options(sub)
    sub.set_defaults(run=_later("chat"))


def _later(command: str) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        status: int = importlib.import_module(f".{command}", __package__).run(args)
        return status

    return run


class _Version(argparse.Action):
    """Print versions, which are looked up when asked for."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        from .. import __version__, has_cuda

        parts = [f"torch {torch.__version__}", f"transformers {metadata.version('transformers')}"]
        parts.append("CUDA device" if has_cuda() else "CPU only")
        print(f"polyspec_ext {__version__} ({', '.join(parts)})")
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Return the exit status; bad input is one line on stderr and status 2."""
    words = sys.argv[1:] if arguments is None else arguments
    command = next((word for word in words if not word.startswith("-")), None)
    return run_command(make_parser(command), arguments)
