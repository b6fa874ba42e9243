"""``python -m polyspec_ext chat``: a conversation with a chain on the terminal."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from typing import Any

from ..chain import Chain
from ..chat import ChatPrompt, has_template
from ..command import options
from ..stats import Stats
from .chain_options import add_chain_options, add_sampling_options, build_chain, sampling_of
from .texts import (
    TextPrinter,
    add_prompt_options,
    conversation_prompt,
    drawn_seeds,
    show_prompt,
    speed,
    tokenizer_of,
)

COMMANDS = "/reset forgets the conversation, /quit or Ctrl-D ends; Ctrl-C ends an answer"


def add_command(commands: Any) -> None:
    """Adds ``chat`` to the subcommands of a parser."""
    sub = commands.add_parser(
        "chat",
        help="a conversation on the terminal",
        description="Talk with a chain, whose target's tokenizer needs a chat template. Answers "
        f"stream; statistics follow each on standard error. {COMMANDS}. Caches are not kept "
        "between turns: every answer begins with reading the conversation again. Turns for which "
        "the context has no room are left out, the oldest first.",
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
    tokenizer = tokenizer_of(args)
    if not has_template(tokenizer):
        raise ValueError(
            f"target: expected a model whose tokenizer has a chat template, given {args.target}; "
            "`generate` continues text without one"
        )
    conversation = Conversation(args, chain, tokenizer, request)
    if args.verbose:
        _note(str(chain))
    _note(COMMANDS)
    while True:
        try:
            text = _line()
            if text == "/quit":
                return 0
            if text == "/reset":
                conversation.messages.clear()
                _note("the conversation is forgotten")
            elif re.fullmatch(r"/\w*", text):
                _note(f"expected a message or a command, given {text}; {COMMANDS}")
            elif text:
                conversation.answer(text)
        except EOFError:
            return 0
        except KeyboardInterrupt:
            _note(f"\n{COMMANDS}")


class Conversation:
    """What was said, and how it goes on.

    Args:
        request: sampling parameters and `max_new_tokens`, as of `Chain.stream`.

    Attributes:
        messages: without the system prompt, the oldest first: questions and answers in turns.
    """

    def __init__(
        self, args: argparse.Namespace, chain: Chain, tokenizer: Any, request: dict[str, Any]
    ) -> None:
        self.messages: list[dict[str, str]] = []
        self._args, self._chain, self._tokenizer = args, chain, tokenizer
        self._request = request
        limits = [part.max_length for part in chain.engine.parts if part.max_length is not None]
        self._context = min(limits, default=None)
        self._ends = getattr(chain.levels[0], "eos_token_ids", ())

    def answer(self, text: str) -> None:
        """Print the answer to `text`, and remember both. What was answered when Ctrl-C came is an
        answer; a question without one is forgotten, and so is one that fails."""
        before = list(self.messages)
        self.messages.append({"role": "user", "content": text})
        answered = ""
        try:
            answered = self._answer()
        except (ValueError, RuntimeError) as error:
            _note(f"error: {error}")
        finally:
            if answered:
                self.messages.append({"role": "assistant", "content": answered})
            else:
                self.messages = before

    def _answer(self) -> str:
        prompt, limit = self._prompt()
        if self._args.verbose:
            show_prompt(prompt)
        printer = TextPrinter(self._tokenizer)
        stream = None
        ending = ""
        try:
            stream = self._chain.stream(
                prompt.input_ids, **{**self._request, "max_new_tokens": limit}
            )
            for token in stream:
                printer.add(token)
            if len(printer.tokens) == limit and printer.tokens[-1] not in self._ends:
                ending = f"cut off at {limit} tokens"
        except KeyboardInterrupt:
            ending = "ended by Ctrl-C"
        printer.end()
        lines = []
        if stream is not None and printer.tokens:
            stats = stream.stats
            lines = [stats.table() if self._args.stats else _figures(stats)]
            lines.append(drawn_seeds(self._args, stream.seeds))
        _note("\n".join(filter(None, [*lines, ending])))
        return printer.text

    def _prompt(self) -> tuple[ChatPrompt, int]:
        """What the target reads, and how many tokens the answer may have. Turns for which the
        context has no room are forgotten.

        Raises:
            ValueError: the last message alone is too long.
        """
        wanted: int = self._request["max_new_tokens"]
        prompt = conversation_prompt(self._args, self._tokenizer, self.messages)
        if self._context is None:
            return prompt, wanted
        forgotten = 0
        while len(prompt.input_ids) + wanted > self._context and len(self.messages) > 1:
            del self.messages[:2]  # a question and its answer
            forgotten += 1
            prompt = conversation_prompt(self._args, self._tokenizer, self.messages)
        if forgotten:
            _note(
                f"the context of {self._context} tokens has no room for the oldest {forgotten} of "
                "the turns, which are left out"
            )
        room = self._context - len(prompt.input_ids)
        if room < 1:
            raise ValueError(
                f"message: expected fewer than {self._context} tokens with the chat template, "
                f"given {len(prompt.input_ids)}"
            )
        return prompt, min(wanted, room)


def _figures(stats: Stats) -> str:
    """A line about an answer: speed, and how much of the drafts each level took."""
    lengths = [
        f"{level.mean_acceptance_length:.2f} ({level.name})"
        for level in stats.levels
        if level.num_drafts
    ]
    accepted = f"; mean acceptance length {', '.join(lengths)}" if lengths else ""
    return f"{speed(stats)}; prompt of {stats.num_prompt_tokens} tokens{accepted}"


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
