"""Conversations as a model reads them: messages through the chat template of its tokenizer."""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from . import arguments

_IN_FRONT = ("system", "developer")  # roles of messages that are never left out
_WINDOW = 8  # tokens that go on being decoded, for what they tell of the next
_BYTE = re.compile("<0x[0-9A-F]{2}>")  # how vocabularies with byte fallback write a byte
# Ends of texts that `clean_up_tokenization` of transformers may still join to what follows.
_UNTIDIED = re.compile(r"(?: n? ?'?|'| '[rv])$")


class ChatPrompt(NamedTuple):
    """What a model reads before it answers.

    Attributes:
        text: the conversation as the template writes it, up to where the answer begins.
        input_ids: its tokens.
    """

    text: str
    input_ids: list[int]


def has_template(tokenizer: Any) -> bool:
    """Return whether a tokenizer of transformers has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def chat_prompt(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], system: str | None = None
) -> ChatPrompt:
    """Return the prompt for the next answer of a conversation.

    Args:
        tokenizer: of transformers, with a chat template. If it has several, its "default" is used.
        messages: the oldest first, each a mapping with "role" ("system", "user" or "assistant")
            and "content", a string.
        system: a system prompt in front of them.

    Raises:
        TypeError, ValueError: `messages` are something else, the tokenizer has no template, or the
            template refuses the conversation; some take no system prompt.
    """
    from jinja2 import TemplateError

    conversation = _conversation(messages)
    if system is not None:
        conversation.insert(0, {"role": "system", "content": system})
    if not has_template(tokenizer):
        raise ValueError("tokenizer: expected one with a chat template, given one without")
    try:
        text: str = tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True
        )
    except TemplateError as error:
        raise ValueError(
            f"{'messages' if system is None else 'system'}: expected a conversation that the chat "
            f"template takes, given one that it refuses: {error}"
        ) from error
    # The template writes the special tokens itself.
    return ChatPrompt(text, tokenizer(text, add_special_tokens=False)["input_ids"])


def prompt_of_text(
    tokenizer: Any, text: str, system: str | None = None, raw: bool = False
) -> ChatPrompt:
    """Return the prompt for an answer to `text`, through the chat template where there is one.

    Args:
        tokenizer: of transformers.
        system: a system prompt in front of it.
        raw: leave out the template.

    Raises:
        ValueError: no token, or a system prompt and no template, or one that refuses it.
    """
    if not raw and has_template(tokenizer):
        return chat_prompt(tokenizer, [{"role": "user", "content": text}], system)
    if system is not None:
        raise ValueError("system: expected a target with a chat template, given one without")
    ids: list[int] = tokenizer(text)["input_ids"]
    if not ids:
        raise ValueError(f"prompt: expected at least 1 token, given none in {text[:20]!r}")
    return ChatPrompt(text, ids)


def ends_of_turn(tokenizer: Any, level: Any) -> list[int]:
    """Return the ids that end an answer: those of the level's configurations, and the tokenizer's
    end of a text, which is the end of a turn in its template. Fine-tunes have that there alone."""
    ends = {*getattr(level, "eos_token_ids", ()), getattr(tokenizer, "eos_token_id", None)}
    return sorted(i for i in ends if i is not None and 0 <= i < level.vocab_size)


class FittedPrompt(NamedTuple):
    """A prompt that leaves room for an answer.

    Attributes:
        prompt: of the messages that it has room for.
        left_out: how many of the oldest messages it has not.
        limit: tokens that the answer may have.
        context: tokens that both may have; None: any number.
    """

    prompt: ChatPrompt
    left_out: int
    limit: int
    context: int | None


def fitted_prompt(
    tokenizer: Any,
    messages: Sequence[Mapping[str, str]],
    system: str | None,
    limit: int,
    context: int | None,
) -> FittedPrompt:
    """Return the prompt for an answer of `limit` tokens in a context of so many; None: of any
    number. Exchanges, a question with all up to the next one, are left out while it has no room,
    the oldest first; then the answer may have fewer tokens.

    Raises:
        TypeError, ValueError: as of `chat_prompt`; the last exchange alone is too long.
    """
    prompt = chat_prompt(tokenizer, messages, system)
    if context is None:
        return FittedPrompt(prompt, 0, limit, None)
    begin = next((n for n, one in enumerate(messages) if one["role"] not in _IN_FRONT), 0)
    # Where a prompt may go on behind the messages in front: at a question, not within an exchange,
    # since templates refuse tool results without their call.
    questions = [
        number
        for number in range(begin + 1, len(messages))
        if messages[number]["role"] == "user" and messages[number - 1]["role"] != "user"
    ]
    cuts = [begin, *questions]
    prompts = {0: prompt}

    def fits(number: int) -> bool:
        if number not in prompts:
            rest = [*messages[:begin], *messages[cuts[number] :]]
            prompts[number] = chat_prompt(tokenizer, rest, system)
        return len(prompts[number].input_ids) + limit <= context

    last = len(cuts) - 1
    few = 0
    if not fits(0):
        few = min(1 + bisect.bisect_left(range(1, last), True, key=fits), last)
        fits(few)  # also writes the prompt
    prompt = prompts[few]
    room = context - len(prompt.input_ids)
    if room < 1:
        raise ValueError(
            f"message: expected fewer than {context} tokens with the chat template, given "
            f"{len(prompt.input_ids)}"
        )
    return FittedPrompt(prompt, cuts[few] - begin, min(limit, room), context)


class TextDecoder:
    """Text of tokens as they come, in pieces that together are the text of all tokens.

    Each token costs a decode of the last few tokens only. Held back is what later tokens may still
    change: unfinished characters, runs of byte tokens and, where the tokenizer tidies spaces, those
    in front of what may become a contraction or punctuation. Where a tokenizer changes other text,
    the pieces go on from what both texts have in common.

    Attributes:
        tokens: so far.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokens: list[int] = []
        self._tokenizer = tokenizer
        self._tidies = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        self._begin, self._due = 0, 0  # first token of the window, number of tokens to decode at
        self._in_bytes = False
        self._shown = ""  # the text of the window, as far as it was returned

    @property
    def text(self) -> str:
        """Of all tokens, without the special ones."""
        return self.decoded(0)

    def add(self, token: int) -> str:
        """Return the text that is settled with this token and was not returned before."""
        self.tokens.append(token)
        # Bytes that turn out to be no UTF-8 change the text of their whole run. Special tokens do
        # not end it.
        if _BYTE.fullmatch(str(self._tokenizer.convert_ids_to_tokens(token))):
            self._in_bytes = True
        elif self._in_bytes and self.decoded(-1):
            self._in_bytes = False
        if self._in_bytes or len(self.tokens) < self._due:
            return ""
        text = self.decoded(self._begin)
        piece = self._show(text[: self._num_settled(text)])
        size = len(self.tokens) - self._begin
        if size >= 2 * _WINDOW and not self._move_window(text):
            self._due = len(self.tokens) + size // 4  # all decodes together stay linear
        return piece

    def rest(self) -> str:
        """Return the text that was not returned before, settled or not."""
        return self._show(self.decoded(self._begin))

    def decoded(self, begin: int, end: int | None = None) -> str:
        """Return the text of a span of tokens, without the special ones."""
        return str(self._tokenizer.decode(self.tokens[begin:end], skip_special_tokens=True))

    def _num_settled(self, text: str) -> int:
        settled = len(text.rstrip("\ufffd"))  # which unfinished characters show as
        untidied = _UNTIDIED.search(text, 0, settled) if self._tidies else None
        return settled if untidied is None else untidied.start()

    def _show(self, text: str) -> str:
        if self._shown.startswith(text):
            return ""
        same = zip(self._shown, text, strict=False)
        common = next((n for n, (old, new) in enumerate(same) if old != new), len(self._shown))
        self._shown = text
        return text[common:]

    def _move_window(self, text: str) -> bool:
        """Keep the last `_WINDOW` tokens, if their text ends as `text`, that of the whole window,
        from before what is held back on. Its beginning may be another: decoders strip spaces."""
        held = len(text) - len(self._shown)
        begin = len(self.tokens) - _WINDOW
        short = self.decoded(begin)
        if not 0 <= held < len(text) or not short.endswith(text[-held - 1 :]):
            return False
        self._begin, self._shown = begin, short[: len(short) - held]
        return True


class StopStrings:
    """Text of tokens as they come, as of `TextDecoder`, up to a stop string: the stop string that
    is complete first; of several that end there, the longest.

    Text that may be the beginning of a stop string is held back until it cannot be.

    Args:
        tokenizer: of transformers.
        stops: none of them empty; none at all: the whole text.

    Attributes:
        stopped: the stop string that has ended the text, or None.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        for stop in stops:
            if not stop:
                raise ValueError("stop: expected strings of at least 1 character, given ''")
        self.stopped: str | None = None
        self._decoder = TextDecoder(tokenizer)
        self._stops, self._end = tuple(stops), 0  # its tokens, once it has stopped
        self._text, self._waiting = "", ""  # returned, and settled but held back

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far, up to the end of the stop string."""
        return len(self._decoder.tokens) if self.stopped is None else self._end

    @property
    def tokens(self) -> list[int]:
        """So far, those of the stop string among them."""
        return self._decoder.tokens[: self.num_tokens]

    @property
    def text(self) -> str:
        """So far, returned or not, without the special tokens."""
        return self._text if self.stopped is not None else self._decoder.text

    def add(self, token: int) -> str:
        """Return the text that is settled with this token, is not part of a stop string and was not
        returned before; "" behind a stop."""
        if self.stopped is not None:
            return ""
        return self._show(self._decoder.add(token), self._num_waiting)

    def rest(self) -> str:
        """Return the text that was not returned before, as no token comes any more."""
        return "" if self.stopped is not None else self._show(self._decoder.rest(), lambda text: 0)

    def _show(self, piece: str, num_waiting: Callable[[str], int]) -> str:
        text = self._waiting + piece
        begins = [(text.find(stop), stop) for stop in self._stops]
        ends = [(at + len(stop), at, stop) for at, stop in begins if at >= 0]
        if ends:
            end, begin, stop = min(ends)
            self._end = self._num_tokens_of(self._text + text[:end])
            shown, self._waiting, self.stopped = text[:begin], "", stop
            self._text += shown
            return shown
        shown = text[: len(text) - num_waiting(text)]
        self._text, self._waiting = self._text + shown, text[len(shown) :]
        return shown

    def _num_waiting(self, text: str) -> int:
        # The longest end of the text that a stop string begins with.
        longest = max(map(len, self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0

    def _num_tokens_of(self, text: str) -> int:
        decoder = self._decoder  # the least number whose text begins with `text`
        return bisect.bisect_left(
            range(len(decoder.tokens)),
            True,
            key=lambda count: decoder.decoded(0, count).startswith(text),
        )


def _conversation(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    wanted = 'messages: expected mappings with "role" and "content", both strings'
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise TypeError(f"{wanted}, in a list, given {arguments.shown(messages)}")
    if not messages:
        raise ValueError(f"{wanted}, at least one, given none")
    for message in messages:
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise TypeError(f"{wanted}, given {arguments.shown(message)}")
    return [dict(message) for message in messages]
