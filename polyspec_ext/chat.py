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


def chat_prompt(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> ChatPrompt:
    """The prompt for the next answer of a conversation.

    Args:
        tokenizer: of transformers, with a chat template. If it has several, its "default" is used.
        messages: the oldest first, each a mapping with "role" ("system", "user" or "assistant")
            and "content", a string.

    Raises:
        TypeError, ValueError: `messages` are something else, the tokenizer has no template, or the
            template refuses the conversation; some take no system prompt.
    """
    from jinja2 import TemplateError

    conversation = _conversation(messages)
    if not has_template(tokenizer):
        raise ValueError("tokenizer: expected one with a chat template, given one without")
    try:
        text: str = tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True
        )
    except TemplateError as error:
        raise ValueError(
            "messages: expected a conversation that the chat template takes, given one that it "
            f"refuses: {error}"
        ) from error
    # The template writes the special tokens itself.
    return ChatPrompt(text, tokenizer(text, add_special_tokens=False)["input_ids"])


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
