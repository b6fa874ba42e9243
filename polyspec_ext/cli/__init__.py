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
from pathlib import Path
from typing import Any

from . import options

API_KEY = "POLYSPEC_API_KEY"  # variable of the environment
BAD_INPUT = 2
INTERRUPTED = 128 + 2  # as a shell shows SIGINT
READER_LEFT = 128 + 13  # and SIGPIPE


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    script = Path(sys.argv[0]).name if sys.argv else ""
    parser = options.Parser(
        prog=script if script == "polyspec" else "python -m polyspec_ext",
        description="Lossless polybasic speculative decoding.",
    )
    text = "show the versions that matter, and exit"
    parser.add_argument("--version", action=_Version, nargs=0, help=text)
    parser.set_defaults(run=help_of(parser))
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, add_options, about in (
        ("generate", add_generate, "continue a prompt, or several at once"),
        ("chat", add_chat, "a conversation on the terminal"),
        ("plan", add_plan, "which chain of models decodes your prompts fastest on this machine"),
        ("serve", add_serve, "an endpoint with OpenAI's API, and a page to chat on"),
    ):
        sub = commands.add_parser(name, help=about, description=add_options.__doc__)
        add_options(sub)
        sub.set_defaults(run=partial(_later, name))
    return parser


# Docstrings of the functions below are the descriptions of the commands.


def add_generate(sub: argparse.ArgumentParser) -> None:
    """Answer or continue prompts with the target's distribution. If its tokenizer has a chat
    template, a prompt is a question and goes through it; else, or with --raw, it is continued as
    it is."""
    sub.add_argument("prompt", nargs="+", type=options.prompt, help="text; '-' reads it from stdin")
    options.share(sub, "--raw", "--show-levels", "--system", "--verbose")
    text = "one JSON object instead of streamed text; of several prompts, with their requests"
    options.add_flag(sub, "--json", text)
    text = "a table of every level's work and acceptance at the end"
    options.add_flag(sub, "--stats", text)
    text = (
        "the chain of these models, their copies and drafters without a model that `plan` "
        "recommends for the prompts; planned once, and kept"
    )
    options.add_flag(sub, "--auto", text)
    options.add_chain_options(sub)
    options.add_sampling_options(sub)
    options.add_count(sub, "--n", 1, "texts for each prompt")


def add_chat(sub: argparse.ArgumentParser) -> None:
    """Talk with a chain whose target's tokenizer has a chat template. Answers stream; statistics
    follow each on standard error. Pasted lines are one message. /help lists the commands. Tokens
    in the caches are not read again. Turns for which the context has no room are left out, the
    oldest first."""
    options.share(sub, "--system", "--verbose", "--show-levels")
    text = "a table of every level's work and acceptance after each answer, instead of a line"
    options.add_flag(sub, "--stats", text)
    options.add_chain_options(sub)
    options.add_sampling_options(sub)


def add_plan(sub: argparse.ArgumentParser) -> None:
    """Measure levels and acceptances on prompts, predict every chain of them by the renewal model,
    and recommend one, or none. Without --target: the shipped models."""
    text = "text, read as by generate (default: six built-in questions)"
    sub.add_argument("prompt", nargs="*", type=options.prompt, help=text)
    options.share(sub, "--raw")
    models = sub.add_argument_group("models")
    models.add_argument("--target", metavar="MODEL", help="model directory or id")
    text = (
        "a smaller model, or a drafter's word, as 'prompt-lookup' or 'suffix'; may be "
        "repeated, the plan chooses among them"
    )
    models.add_argument("--draft", metavar="MODEL", action="append", default=[], help=text)
    text = (
        "plan with these alone, and not with 4-bit copies of them, drafts with fewer ids, "
        "prompt lookup and suffixes as well"
    )
    options.add_flag(models, "--only", text)
    options.share(models, "--pack")
    group = sub.add_argument_group("requests")
    options.add(group, "--max-new-tokens", options.integer(2), 128, "N")
    options.add(group, "--batch", options.COUNT, 1, "B")
    options.share(group, "--temperature")
    options.add(group, "--top-k", options.COUNT_OR_NONE, 0, "K")
    options.add(group, "--top-p", options.SHARE, 1.0, "P")
    options.add(group, "--min-p", options.SHARE, 0.0, "P")
    options.share(group, "--seed")
    work = sub.add_argument_group("measurement")
    options.add(work, "--seconds", options.number(0), 40.0, "S", "that measuring may take")
    text = "run the recommendation, the runners-up and plain decoding, and recommend the fastest"
    options.add_flag(work, "--verify", text)
    options.add_count(work, "--repeats", 3, "of runs")
    options.share(work, "--threads", "--measure-again")
    options.add_flag(sub, "--json", "one JSON object instead of tables")
    options.add_flag(sub, "--verbose", "also rates of decoding and the measurements")
    text = "write the recommended chain, for --chain of generate and chat and Chain.from_plan"
    sub.add_argument("--save", type=Path, metavar="FILE", help=text)


def add_serve(sub: argparse.ArgumentParser) -> None:
    """Answer requests of OpenAI's completions and chat completions API with a chain. A page to chat
    on is at /, metrics for Prometheus are at /metrics. SIGTERM and Ctrl-C finish what runs, a
    second time end at once."""
    sub.add_argument("model", nargs="?", metavar="TARGET", help="as --target")
    group = sub.add_argument_group("server")
    several: dict[str, Any] = {"action": "append", "default": []}
    for name, metavar, extra, about in (
        ("--host", "ADDRESS", {"default": "127.0.0.1"}, "to listen at (default: %(default)s)"),
        ("--port", "N", {"type": options.integer(0, 65535), "default": 8000}, "0: a free one "
         "(default: %(default)s)"),
        ("--api-key", "KEY", {}, "that clients show as a bearer token (default: "
         f"{API_KEY} of the environment, or none)"),
        ("--allow-host", "NAME", several, "beside localhost, a name by which clients may ask for a "
         "server that listens at a loopback address, as behind a proxy; may be repeated"),
        ("--name", "NAME", {}, "of the model (default: the target's, without its folder)"),
        ("--max-tokens", "N", {"type": options.COUNT}, "of prompts and answers that run, together "
         "(default: as many as the slots take)"),
        ("--max-prompt", "N", {"type": options.COUNT}, "tokens (default: the context)"),
    ):  # fmt: skip
        group.add_argument(name, metavar=metavar, help=about, **extra)
    options.add_count(group, "--slots", 8, "requests that run at a time")
    options.add(group, "--max-waiting", options.COUNT_OR_NONE, 256, "N", "requests that wait")
    text = "of texts whose keys and values are kept for prompts that begin alike"
    options.add(group, "--cache-tokens", options.COUNT_OR_NONE, 16384, "N", text)
    options.add_count(group, "--max-body", 2 * 2**20, "bytes of a request")
    options.add(group, "--timeout", options.number(0), 600.0, "S", "seconds of a request")
    options.add_flag(group, "--verbose", "a line for each request on stderr")
    options.add_chain_options(sub)


def _later(command: str, args: argparse.Namespace) -> int:
    status: int = importlib.import_module(f".{command}", __package__).run(args)
    return status


class _Version(argparse.Action):
    """Print versions, which are looked up when asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        from importlib import metadata

        ours, *others = map(metadata.version, ("polyspec_ext", "torch", "transformers"))
        print(f"polyspec_ext {ours} (torch {others[0]}, transformers {others[1]})")
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status. Bad input: a line on stderr and status 2."""
    return run_command(make_parser(), arguments)


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
            import torch

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
