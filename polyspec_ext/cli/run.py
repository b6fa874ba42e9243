"""How a command ends: its exit status, one line for an error, no noise when the reader leaves."""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections.abc import Callable, Collection, Sequence

import torch

BAD_INPUT = 2
INTERRUPTED = 128 + 2  # as a shell shows SIGINT
READER_LEFT = 128 + 13  # and SIGPIPE


def run_command(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> int:
    """Parse `arguments` and call what the chosen command has set as ``run``, with them and as many
    threads of torch as its ``--threads`` says.

    Returns:
        The exit status: what ``run`` returned; 2 for bad input, with one line on standard error;
        130 for Ctrl-C; 141 where the reader of the output has left, as in ``... | head -1``.

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
    except OSError as error:  # of the output itself: a full disk
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
    """Return the message in one line. An argument is named as on the command line."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    found = re.match(r"(\w+): ", text)
    if found is not None and found[1] in options and found[1] != "prompt":
        return f"--{found[1].replace('_', '-')}: {text[found.end() :]}"
    return text


def _flush() -> None:
    if sys.stdout is not None:  # None: closed by who called
        sys.stdout.flush()


def _abandon() -> None:
    """Drop the buffers' contents, which the interpreter would complain of at exit."""
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
