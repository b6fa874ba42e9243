"""From a conversation to the ids that a model reads: templates, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from polyspec_ext import tiny
from polyspec_ext.chat import has_template

# The system message of FastChat's vicuna_v1.1, with which the Vicuna models were trained.
_VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions."
)
AUTO = "auto"
# What the user says, from the first turn to the one to be answered, and the model's answers to all
# but that; to the text.
Template = Callable[[Any, Sequence[str], Sequence[str]], str]


def _vicuna(tokenizer: Any, turns: Sequence[str], answers: Sequence[str]) -> str:
    # A reply ends with the EOS, and no space stands behind that.
    replies = [*(f" {answer}{tokenizer.eos_token}" for answer in answers), ""]
    said = zip(turns, replies, strict=True)
    return f"{_VICUNA} " + "".join(f"USER: {turn} ASSISTANT:{reply}" for turn, reply in said)


def _chat(tokenizer: Any, turns: Sequence[str], answers: Sequence[str]) -> str:
    messages = [{"role": "user", "content": turns[0]}]
    for answer, turn in zip(answers, turns[1:], strict=True):
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": turn})
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


def _question(tokenizer: Any, turns: Sequence[str], answers: Sequence[str]) -> str:
    replies = [*(f" {answer}\n\n" if answer else "" for answer in answers), ""]
    said = zip(turns, replies, strict=True)
    return "".join(tiny.prompt_of(turn) + reply for turn, reply in said)


def _plain(tokenizer: Any, turns: Sequence[str], answers: Sequence[str]) -> str:
    parts = [part for pair in zip(turns, [*answers, ""], strict=True) for part in pair]
    return "\n\n".join(part for part in parts if part)


CHAT = "chat"  # the tokenizer's own, which has its BOS; in front of the others it puts that
TEMPLATES: dict[str, Template] = {
    CHAT: _chat,
    "vicuna": _vicuna,
    "tiny": _question,  # of the shipped models
    "plain": _plain,
}


class Prompt(NamedTuple):
    """Ids to continue; `cut`: how many there were before the middle was left out, or None."""

    ids: list[int]
    cut: int | None


class Conversation:
    """Makes prompts.

    Args:
        tokenizer: of the target.
        template: a name of `TEMPLATES`, or "auto": "chat" where the tokenizer has a chat template,
            else "plain".
        room: ids that a prompt may have. Of a longer one the middle is left out, so that its
            beginning and its end, where it is said what to do, stay.

    Raises:
        ValueError: no such template, or the tokenizer has none.
    """

    def __init__(self, tokenizer: Any, template: str, room: int) -> None:
        has = has_template(tokenizer)
        if template == AUTO:
            template = CHAT if has else "plain"
        if template not in TEMPLATES:
            known = ", ".join((AUTO, *TEMPLATES))
            raise ValueError(f"--template: expected one of {known}, given {template!r}")
        if template == CHAT and not has:
            raise ValueError(
                "--template: expected another than chat, since the target's tokenizer has no chat "
                "template"
            )
        if room < 2:
            raise ValueError(
                "--max-new-tokens: expected to leave room for a prompt in the models' contexts, "
                f"given room for {room} tokens"
            )
        self.tokenizer, self.template, self.room = tokenizer, template, room

    def text(self, turns: Sequence[str], answers: Sequence[str]) -> str:
        """What stands before the next answer.

        Args:
            turns: of the user, the one to be answered last.
            answers: of the model, to the turns before.
        """
        return TEMPLATES[self.template](self.tokenizer, turns, answers)

    def prompt(self, turns: Sequence[str], answers: Sequence[str]) -> Prompt:
        """The same as ids that the models have room for."""
        text, special = self.text(turns, answers), self.template != CHAT
        ids = list(self.tokenizer(text, add_special_tokens=special)["input_ids"])
        if len(ids) <= self.room:
            return Prompt(ids, None)
        front = self.room // 2
        return Prompt([*ids[:front], *ids[len(ids) - (self.room - front) :]], len(ids))

    def answer(self, tokens: Sequence[int]) -> str:
        """The text of a model's answer, as it stands in the turns to come."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text.strip()
