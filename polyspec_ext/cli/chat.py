"""``python -m polyspec_ext chat``: a conversation with a chain on the terminal."""

from __future__ import annotations

import argparse
import contextlib
import re
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from ..chain import Chain
from ..chat import has_template
from ..command import options
from ..outputs import Answer
from ..stats import Stats
from .chain_options import add_chain_options, add_sampling_options, build_chain, sampling_of
from .texts import add_prompt_options, drawn_seeds, show_prompt, speed, tokenizer_of

COMMANDS = (
    "/reset forgets the conversation, /quit or Ctrl-D ends; Ctrl-C ends an answer, twice at once"
)


def add_command(commands: Any) -> None:
    """Adds ``chat`` to the subcommands of a parser."""
    sub = commands.add_parser(
        "chat",
        help="a conversation on the terminal",
        description="Talk with a chain, whose target's tokenizer needs a chat template. Answers "
        f"stream; statistics follow each on standard error. {COMMANDS}. What stands in the caches "
        "is not read again. Turns for which the context has no room are left out, the oldest "
        "first.",
    )
    add_prompt_options(sub)
    sub.add_argument(
        "--stats",
        action="store_true",
        help="a table of every level's work and acceptance behind each answer, instead of a line",
    )
    add_chain_options(sub)
    add_sampling_options(sub)
    sub.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Answers lines of stdin until it ends."""
    request = sampling_of(args, 1)
    chain = build_chain(args)
    if not has_template(tokenizer_of(args)):
        raise ValueError(
            f"target: expected a model whose tokenizer has a chat template, given {args.target}; "
            "`generate` continues text without one"
        )
    messages: list[dict[str, str]] = []  # without the system prompt, the oldest first
    if args.verbose:
        _note(str(chain))
    _note(COMMANDS)
    while True:
        try:
            text = _line()
            if text == "/quit":
                return 0
            if text == "/reset":
                messages = []
                _note("the conversation is forgotten")
            elif re.fullmatch(r"/\w*", text):
                _note(f"expected a message or a command, given {text}; {COMMANDS}")
            elif text:
                messages = _answered(args, chain, request, messages, text)
        except EOFError:
            return 0
        except KeyboardInterrupt:
            _note(f"\n{COMMANDS}")


def _answered(
    args: argparse.Namespace,
    chain: Chain,
    request: dict[str, Any],
    earlier: list[dict[str, str]],
    text: str,
) -> list[dict[str, str]]:
    """Print the answer to `text`; returns the conversation with both. What was answered when Ctrl-C
    came is an answer; a question without one is forgotten, and so is one that fails.

    Args:
        request: sampling parameters and `max_new_tokens`, as of `Chain.chat`.
        earlier: questions and answers in turns.
    """
    question = {"role": "user", "content": text}
    try:
        answer = chain.chat([*earlier, question], system=args.system, **request)
        if answer.left_out:
            earlier = earlier[answer.left_out :]
            _note(
                f"the context of {answer.context} tokens has no room for the oldest "
                f"{answer.left_out // 2} of the turns, which are left out"
            )
        _print(args, answer)
    except (ValueError, RuntimeError) as error:
        _note(f"error: {error}")
        return earlier
    return [*earlier, question, answer.message] if answer.text else earlier


def _print(args: argparse.Namespace, answer: Answer) -> None:
    if args.verbose:
        show_prompt(answer.prompt)
    ending = ""
    try:
        with _between_rounds() as asked:
            for piece in answer:
                print(piece, end="", flush=True)
                if asked:
                    ending = "ended by Ctrl-C"
                    break
        if len(answer.tokens) == answer.limit and answer.tokens[-1] not in answer.ends:
            ending = f"cut off at {answer.limit} tokens"
    except KeyboardInterrupt:
        ending = "ended by Ctrl-C"
    print(answer.rest(), flush=True)
    lines = []
    if answer.tokens:
        stats = answer.stats
        lines = [stats.table() if args.stats else _figures(stats)]
        lines.append(drawn_seeds(args, answer.seeds))
    _note("\n".join(filter(None, [*lines, ending])))


def _figures(stats: Stats) -> str:
    """A line about an answer: speed, and how much of the drafts each level took."""
    lengths = [
        f"{level.mean_acceptance_length:.2f} ({level.name})"
        for level in stats.levels
        if level.num_drafts
    ]
    accepted = f"; mean acceptance length {', '.join(lengths)}" if lengths else ""
    read = stats.num_prompt_tokens - stats.num_cached_tokens
    return f"{speed(stats)}; prompt of {stats.num_prompt_tokens} tokens, {read} read{accepted}"


@contextlib.contextmanager
def _between_rounds() -> Iterator[list[int]]:
    """Meanwhile Ctrl-C is noted, so that a round is completed and leaves its caches as they should
    be. The second one interrupts."""
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if asked:
            signal.default_int_handler(number, frame)
        asked.append(number)

    if threading.current_thread() is not threading.main_thread():  # which alone has handlers
        yield asked
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def _line() -> str:
    """The next line, without white space at its ends.

    Raises:
        EOFError: there is none.
        ValueError: bytes that are no text.
    """
    try:
        if sys.stdin.isatty() and sys.stdout.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (`input` edits with it, and finds earlier lines)
            line = input("> ")
        elif not (line := sys.stdin.readline()):
            raise EOFError
        return options.prompt(line).strip()
    except (UnicodeDecodeError, argparse.ArgumentTypeError):
        raise ValueError("message: expected UTF-8 text, given other bytes") from None


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
