"""The command line: ``python -m polyspec_ext generate|chat|plan|export ...``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch

from ..command import options
from ..command.run import help_of, run_command
from . import chat, export, generate, plan


def make_parser() -> argparse.ArgumentParser:
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

    for command in (generate, chat, plan, export):
        command.add_command(commands)
    return parser


class _Version(argparse.Action):
    """Looked up when asked for: the rest of the command line does not need it."""

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
    """Run one command. Returns the exit status; bad input is one line on stderr and status 2."""
    return run_command(make_parser(), arguments)
