"""``python -m polyspec_ext chat``: a conversation with a chain on the terminal."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from .. import columns, progress
from ..chat import Answer, chat_prompt, has_template
from ..files import replace_text
from ..stats import Stats
from . import options
from .generate import (
    SHIPPED,
    Colours,
    build_chain,
    followed,
    samples,
    sampling_of,
    show_prompt,
    tokenizer_of,
)

COMMANDS = {
    "/help": "list these commands",
    "/reset": "forget the conversation",
    "/retry": "answer the last question again, with another seed",
    "/system TEXT": "replace the system prompt (without TEXT: by none), and begin anew",
    "/save FILE": "write the conversation as JSON messages",
    "/quit": "end, as Ctrl-D does",
}
HINT = "/help lists the commands, /quit ends; Ctrl-C ends an answer, twice at once"
_PASTE = ("\x1b[200~", "\x1b[201~")  # sent by terminals around pasted text
_PASTES = ("\x1b[?2004h", "\x1b[?2004l")  # switch it on, and off


def run(args: argparse.Namespace) -> int:
    """Answer lines of stdin until it ends."""
    talk = Conversation(args)
    if args.verbose:
        _note(str(talk.chain))
    if args.target is None:
        _note(SHIPPED)
    _note(HINT)
    while True:
        try:
            text = _line()
            if text and not talk.take(text):
                return 0
        except EOFError:
            return 0
        except KeyboardInterrupt:
            _note(f"\n{HINT}")


class Conversation:
    """A conversation with the chain that the options describe.

    Attributes:
        messages: questions and answers in turns, the oldest first.
        system: the system prompt.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._request = args, sampling_of(args, 1)
        self.chain = build_chain(args, looks_up=True)
        self._request = followed(self.chain, self._request)
        self._tokenizer = tokenizer_of(args)
        if not has_template(self._tokenizer):
            raise ValueError(
                "target: expected a model whose tokenizer has a chat template, given "
                f"{args.target}; `generate` continues text without one"
            )
        self.messages: list[dict[str, str]] = []
        self.system: str | None = args.system
        self._asked: str | None = None  # the last question

    def take(self, text: str) -> bool:
        """Answer a message or follow a command. Return whether the conversation continues."""
        word, rest = [*text.split(maxsplit=1), ""][:2]
        if re.fullmatch(r"/\w*", word) is None:
            self._answer(text, self.messages, self._request["seed"])
        elif word not in {name.partition(" ")[0] for name in COMMANDS}:
            _note(
                f"error: expected a message or a command, given {word}; the commands are "
                f"{', '.join(COMMANDS)}"
            )
        elif rest and word in COMMANDS:
            _note(f"error: expected nothing behind {word}, given {rest[:20]!r}")
        elif word == "/quit":
            return False
        elif word == "/help":
            _note("\n".join(f"  {name:13} {about}" for name, about in COMMANDS.items()))
        elif word == "/reset":
            self._begin_anew()
        elif word == "/retry":
            self._retry()
        elif word == "/system":
            self._replace_system(rest or None)
        else:
            self._save(rest)
        return True

    def _begin_anew(self) -> None:
        self.messages, self._asked = [], None
        _note("the conversation is forgotten")

    def _replace_system(self, text: str | None) -> None:
        try:
            chat_prompt(self._tokenizer, [{"role": "user", "content": "?"}], text)
        except ValueError as error:  # the template has no system prompt
            _note(f"error: {error}")
            return
        self.system = text
        self._begin_anew()

    def _retry(self) -> None:
        if self._asked is None:
            _note("error: /retry: expected a question before it, given none")
            return
        if not samples(self._request):
            _note("at temperature 0 every answer is the same; --temperature T lets them differ")
        answered = [message["content"] for message in self.messages[-2:-1]] == [self._asked]
        self._answer(self._asked, self.messages[:-2] if answered else self.messages, None)

    def _save(self, file: str) -> None:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages = [*system, *self.messages]
        if not file:
            _note("error: /save: expected a file, given none")
            return
        text = json.dumps(messages, indent=1, ensure_ascii=False)
        try:
            replace_text(Path(file).expanduser(), text + "\n")
            _note(f"wrote {len(messages)} messages to {file}")
        except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home folder
            reason = getattr(error, "strerror", None) or error
            _note(f"error: /save: expected a file to write, given {file}: {reason}")

    def _answer(self, text: str, earlier: list[dict[str, str]], seed: int | None) -> None:
        """Print the answer to `text` after `earlier` messages, and keep both. Ctrl-C keeps the
        answer so far; an empty or failed answer leaves the conversation unchanged."""
        self._asked = text
        question = {"role": "user", "content": text}
        try:
            with progress.prompts():  # what follows the caches is read here
                answer = self.chain.chat(
                    [*earlier, question], system=self.system, **{**self._request, "seed": seed}
                )
            if answer.left_out:
                earlier = earlier[answer.left_out :]
                _note(
                    f"the context of {answer.context} tokens has no room for the oldest "
                    f"{answer.left_out // 2} of the turns, which are left out"
                )
            shown = Colours(self.chain, answer.stream.batch) if self._args.show_levels else None
            _print(self._args, answer, seed is None and samples(self._request), shown)
        except (ValueError, RuntimeError) as error:
            _note(f"error: {error}")
            return
        except KeyboardInterrupt:
            _note("ended by Ctrl-C")
            return
        if answer.text:
            self.messages = [*earlier, question, answer.message]


def _print(args: argparse.Namespace, answer: Answer, drawn: bool, colours: Colours | None) -> None:
    """Stream an answer to stdout, then print its statistics; `drawn`: and its seed."""
    if args.verbose:
        show_prompt(answer.prompt)
    ending = ""
    try:
        with _between_rounds(answer) as interrupts:
            for piece in progress.after_prompts(answer):
                shown = piece if colours is None else colours(piece, len(answer.tokens) - 1)
                print(shown, end="", flush=True)
                if interrupts:
                    ending = "ended by Ctrl-C"
                    break
        if answer.stream.finish_reason == "length" and len(answer.tokens) == answer.limit:
            ending = f"cut off at {answer.limit} tokens"
    except KeyboardInterrupt:
        ending = "ended by Ctrl-C"
    print(answer.rest(), flush=True)
    lines = [] if colours is None else [colours.legend]
    if answer.tokens:
        stats = answer.stats
        lines.append(columns.of_stats(stats) if args.stats else _figures(stats))
        if drawn:
            lines.append(f"--seed {answer.seeds[0]}")
    _note("\n".join(filter(None, [*lines, ending])))


def _figures(stats: Stats) -> str:
    """Format a line about an answer: speed, and the mean acceptance length of each level."""
    lengths = [
        f"{level.mean_acceptance_length:.2f} ({level.name})"
        for level in stats.levels
        if level.num_drafts
    ]
    accepted = f"; mean acceptance length {', '.join(lengths)}" if lengths else ""
    read = stats.num_prompt_tokens - stats.num_cached_tokens
    return f"{stats.speed}; prompt of {stats.num_prompt_tokens} tokens, {read} read{accepted}"


@contextlib.contextmanager
def _between_rounds(answer: Answer) -> Iterator[list[int]]:
    """Record Ctrl-C in the yielded list, so that the round is completed and its caches stay
    consistent. A second Ctrl-C interrupts, and so does the first while the prompt is read."""
    interrupts: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if interrupts or not answer.tokens:
            signal.default_int_handler(number, frame)
        interrupts.append(number)

    if threading.current_thread() is not threading.main_thread():  # other threads have no handlers
        yield interrupts
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


def _line() -> str:
    try:
        if sys.stdin.isatty() and sys.stdout.isatty():
            return options.prompt(_typed()).strip()
        return options.prompt(_read()).strip()
    except (UnicodeDecodeError, argparse.ArgumentTypeError):
        raise ValueError("message: expected UTF-8 text, given other bytes") from None


def _typed() -> str:
    """Read a message from the terminal. Pasted lines are a single message: readline knows where a
    paste ends; without readline the terminal marks the end."""
    with contextlib.suppress(ImportError):
        import readline

        if "libedit" not in (readline.__doc__ or ""):  # libedit submits every pasted line
            readline.parse_and_bind("set enable-bracketed-paste on")
            return input("> ")
    begin, end = _PASTE
    print(f"{_PASTES[0]}> ", end="", flush=True)
    try:
        text = _read()
        while text.count(begin) > text.count(end):
            text += _read()
    finally:
        print(_PASTES[1], end="", flush=True)
    return text.replace(begin, "").replace(end, "")


def _read() -> str:
    if not (line := sys.stdin.readline()):
        raise EOFError
    return line


def _note(text: str) -> None:
    print(columns.wrapped(text) if sys.stderr.isatty() else text, file=sys.stderr, flush=True)
