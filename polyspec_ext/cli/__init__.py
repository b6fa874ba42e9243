"""The command line: ``python -m polyspec_ext generate|chat|plan|serve ...``.

A command's module is imported when the command runs, and models with it: ``--help`` stays quick.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import re
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path

import torch

from . import options

# Commands that define their options in their module.
_OTHERS = ("plan", "serve")
BAD_INPUT = 2
INTERRUPTED = 128 + 2  # as a shell shows SIGINT
READER_LEFT = 128 + 13  # and SIGPIPE


def make_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of the command line.

    Args:
        command: the command to parse; the parser has its options alone. None: all.
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
    options.share(sub, "--raw", "--show-levels", "--system", "--verbose")
    for name, text in (
        ("--json", "one JSON object instead of streamed text; of several prompts, with their "
         "requests"),
        ("--stats", "a table of every level's work and acceptance at the end"),
        ("--auto", "the chain of these models, their copies and drafters without a model that "
         "`plan` recommends for the prompts; planned once, and kept"),
    ):  # fmt: skip
        options.add_flag(sub, name, text)
    options.add_chain_options(sub)
    options.add_sampling_options(sub)
    options.add_count(sub, "--n", 1, "texts for each prompt")
    sub.set_defaults(run=partial(_later, "generate"))


def _add_chat(sub: argparse.ArgumentParser) -> None:
    options.share(sub, "--system", "--verbose", "--show-levels")
    text = "a table of every level's work and acceptance behind each answer, instead of a line"
    options.add_flag(sub, "--stats", text)
    options.add_chain_options(sub)
    options.add_sampling_options(sub)
    sub.set_defaults(run=partial(_later, "chat"))


def _later(command: str, args: argparse.Namespace) -> int:
    status: int = importlib.import_module(f".{command}", __package__).run(args)
    return status


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
    """Run a command and return the exit status. Bad input: a line on stderr and status 2."""
    words = sys.argv[1:] if arguments is None else arguments
    command = next((word for word in words if not word.startswith("-")), None)
    return run_command(make_parser(command), arguments)


# ---- running -------------------------------------------------------------------------------------


def run_command(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> int:
    """Parse `arguments` and call the chosen command's ``run`` with them, after setting the number
    of torch threads to ``--threads``.

    Returns:
        The exit status: that of ``run``; 2 for bad input, with a line on standard error; 130 for
        Ctrl-C; 141 if the reader of the output has left, as in ``... | head -1``.

    Raises:
        SystemExit: after ``--help`` and ``--version``, with status 0.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may not know every character
    try:
        status = _run(parser, arguments)
        _flush()
        return status
    except BrokenPipeError:
        _abandon()
        return READER_LEFT
    except OSError as error:  # of the output, for example a full disk
        _abandon()
        print(f"error: {_line(error, ())}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> int:
    try:
        args = parser.parse_args(arguments)
    except SystemExit as end:
        if end.code != 0:
            return BAD_INPUT
        _flush()
        raise
    try:
        if getattr(args, "threads", None):
            torch.set_num_threads(args.threads)
        status: int = args.run(args)
    except BrokenPipeError:
        raise
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        print(f"error: {_line(error, vars(args))}", file=sys.stderr)
        return BAD_INPUT
    return status


def _line(error: Exception, options: Collection[str]) -> str:
    """Return the message in a line. An argument is named as on the command line."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    match = re.match(r"(\w+): ", text)
    if match is not None and match[1] in options and match[1] != "prompt":
        return f"--{match[1].replace('_', '-')}: {text[match.end() :]}"
    return text


def _flush() -> None:
    if sys.stdout is not None:  # None: closed by the caller
        sys.stdout.flush()


def _abandon() -> None:
    """Drop the contents of the buffers; the interpreter would report an error at exit."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            null_device = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null_device, stream.fileno())
            os.close(null_device)


def help_of(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Return a command that prints the help as an error: a word is missing."""

    def show_help(_: argparse.Namespace) -> int:
        parser.print_help(sys.stderr)
        return BAD_INPUT

    return show_help
