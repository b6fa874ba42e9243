"""From a conversation to the ids that a model reads: templates, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from polyspec_ext import tiny

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
    end = tokenizer.eos_token
    said = [f" USER: {turn} ASSISTANT:" for turn in turns]
    replies = [f" {answer}{end}" for answer in answers]
    # A reply ends with the EOS, and no space stands behind that.
    text = _VICUNA + said[0]
    for reply, turn in zip(replies, said[1:], strict=True):
        text += reply + turn.lstrip()
    return text


def _chat(tokenizer: Any, turns: Sequence[str], answers: Sequence[str]) -> str:
    messages = []
    for n, turn in enumerate(turns):
        messages.append({"role": "user", "content": turn})
        if n < len(answers):
            messages.append({"role": "assistant", "content": answers[n]})
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text


def _question(tokenizer: Any, turns: Sequence[str], answers: Sequence[str]) -> str:
    text = ""
    for turn, answer in zip(turns, [*answers, ""], strict=True):
        text += tiny.prompt_of(turn) + (f" {answer}\n\n" if answer else "")
    return text


def _plain(tokenizer: Any, turns: Sequence[str], answers: Sequence[str]) -> str:
    parts = [part for pair in zip(turns, [*answers, ""], strict=True) for part in pair]
    return "\n\n".join(part for part in parts if part)


# By name: the text, and whether the tokenizer puts its own BOS in front of it.
TEMPLATES: dict[str, tuple[Template, bool]] = {
    "chat": (_chat, False),  # the tokenizer's own, which has it
    "vicuna": (_vicuna, True),
    "tiny": (_question, True),  # of the shipped models
    "plain": (_plain, True),
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
        has = bool(getattr(tokenizer, "chat_template", None))
        if template == AUTO:
            template = "chat" if has else "plain"
        if template not in TEMPLATES:
            known = ", ".join((AUTO, *TEMPLATES))
            raise ValueError(f"--template: expected one of {known}, given {template!r}")
        if template == "chat" and not has:
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
        make, _ = TEMPLATES[self.template]
        return make(self.tokenizer, turns, answers)

    def prompt(self, turns: Sequence[str], answers: Sequence[str]) -> Prompt:
        """The same as ids that the models have room for."""
        _, special = TEMPLATES[self.template]
        text = self.text(turns, answers)
        ids = list(self.tokenizer(text, add_special_tokens=special)["input_ids"])
        if len(ids) <= self.room:
            return Prompt(ids, None)
        front = self.room // 2
        return Prompt([*ids[:front], *ids[len(ids) - (self.room - front) :]], len(ids))

    def answer(self, tokens: Sequence[int]) -> str:
        """The text of a model's answer, as it stands in the turns to come."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text.strip()
