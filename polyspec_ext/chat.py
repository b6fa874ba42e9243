"""Conversations as a model reads them: messages through the chat template of its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from . import arguments


class ChatPrompt(NamedTuple):
    """What a model reads before it answers.

    Attributes:
        text: the conversation as the template writes it, up to where the answer begins.
        input_ids: its tokens.
    """

    text: str
    input_ids: list[int]


def has_template(tokenizer: Any) -> bool:
    """Whether a tokenizer of transformers has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def chat_prompt(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], system: str | None = None
) -> ChatPrompt:
    """The prompt for the next answer of a conversation.

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
    """The prompt for an answer of `limit` tokens in a context of so many; None: of any number.
    Turns, a question and its answer, are left out while it has no room, the oldest first; then the
    answer may have fewer tokens.

    Raises:
        TypeError, ValueError: as of `chat_prompt`; the last message alone is too long.
    """
    prompt = chat_prompt(tokenizer, messages, system)
    if context is None:
        return FittedPrompt(prompt, 0, limit, None)
    left_out = 0
    begin = 1 if messages[0]["role"] == "system" else 0
    while len(prompt.input_ids) + limit > context and begin + left_out + 2 < len(messages):
        left_out += 2
        rest = [*messages[:begin], *messages[begin + left_out :]]
        prompt = chat_prompt(tokenizer, rest, system)
    room = context - len(prompt.input_ids)
    if room < 1:
        raise ValueError(
            f"message: expected fewer than {context} tokens with the chat template, given "
            f"{len(prompt.input_ids)}"
        )
    return FittedPrompt(prompt, left_out, min(limit, room), context)


class TextDecoder:
    """A text while its tokens come.

    Attributes:
        tokens: so far.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokens: list[int] = []
        self._tokenizer, self._told = tokenizer, ""

    @property
    def text(self) -> str:
        """Of all tokens, without the special ones."""
        return str(self._tokenizer.decode(self.tokens, skip_special_tokens=True))

    def add(self, token: int) -> str:
        """What is complete with this token and was not given before."""
        self.tokens.append(token)
        # Decoding from the start each time keeps multi-token characters whole: an unfinished one
        # shows as U+FFFD.
        text = self.text
        return "" if text.endswith("\ufffd") else self._new(text)

    def rest(self) -> str:
        """What was not given before, complete or not."""
        return self._new(self.text)

    def _new(self, text: str) -> str:
        if not text.startswith(self._told):
            return ""
        new, self._told = text[len(self._told) :], text
        return new


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
