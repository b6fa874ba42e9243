"""The shipped chain: three small Llama-architecture models with one tokenizer, trained on GSM8K
and Tiny Shakespeare.

They are ordinary Hugging Face directories; `python -m training.tiny_models` trains them again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import arguments, progress

if TYPE_CHECKING:
    from ..arguments import Switch
    from ..chain import Chain
    from ..levels import HuggingFaceLevel

LEVELS = ("target", "middle", "drafter")
HEADS = ("eagle2", "eagle3")  # EAGLE heads for the target
# Window of each shipped chain, by its levels: among the fastest of a small sweep on two CPU cores,
# for a single prompt and for batches of about eight, where a verified token costs more and rows
# that wait for each other cost time.
WINDOWS: dict[tuple[str, ...], tuple[int, ...]] = {
    ("target",): (),
    ("target", "middle"): (6,),
    ("target", "drafter"): (5,),
    ("target", "middle", "drafter"): (5, 3),
}
# Rounds of the middle for a single prompt: a third round if two have not filled the window.
ROUNDS: dict[tuple[str, ...], tuple[int, ...]] = {("target", "middle", "drafter"): (3,)}

# Arithmetic problems in the style of the training texts.
QUESTIONS = (
    "A baker makes 12 trays of rolls with 8 rolls on each tray. She sells 70 rolls in the morning. "
    "How many rolls are left?",
    "Maria reads 15 pages of her book every day. The book has 240 pages. How many days does she "
    "need to read half of it?",
    "A farmer has 5 rows of apple trees with 9 trees in each row. Each tree gives 20 apples. How "
    "many apples does he have?",
    "Ben buys 3 notebooks for $4 each and a pen for $2. He pays with a $20 bill. How much change "
    "does he get?",
    "A train has 8 cars. Each car has 45 seats, and 60 seats in the whole train are empty. How "
    "many people are on the train?",
    "Lena saves $6 a week for 10 weeks. Then she spends a third of her money on a game. How much "
    "money does she have left?",
    "There are 24 students in a class. Half of them play soccer and 5 others play chess. How many "
    "play neither of the two?",
    "A gardener plants 7 flowers an hour for 4 hours on Monday and twice as many on Tuesday. How "
    "many does he plant in all?",
)


def root() -> Path:
    """Return the folder of the models: POLYSPEC_TINY of the environment, or this file's folder."""
    return Path(os.environ.get("POLYSPEC_TINY") or Path(__file__).parent)


def path(level: str) -> Path:
    """Return the directory of "target", "middle", "drafter", "eagle2" or "eagle3".

    Raises:
        ValueError: another name.
        FileNotFoundError: the directory has no model.
    """
    if level not in (*LEVELS, *HEADS):
        known = ", ".join((*LEVELS, *HEADS))
        raise ValueError(f"level: expected one of {known}, given {level!r}")
    folder = root() / level
    if not (folder / "config.json").exists():
        raise FileNotFoundError(
            f"no model in {folder}; train one with `python -m training.tiny_models --output "
            f"{root()}`"
        )
    return folder


# The form of `prompt_of`; an answer and an EOS follow as in training.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'user' %}"
    "{{ bos_token + 'Question: ' + message.content.strip() + '\nAnswer:' }}"
    "{% elif message.role == 'assistant' %}"
    "{{ ' ' + message.content.strip() + eos_token }}"
    "{% else %}"
    "{{ raise_exception('the shipped models take questions and answers, and no system prompt') }}"
    "{% endif %}"
    "{% endfor %}"
)


def prompt_of(question: str) -> str:
    """Return a question in the form that the models were trained on."""
    return f"Question: {question.strip()}\nAnswer:"


def tokenizer() -> Any:
    """Load the tokenizer that the shipped models share."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path("target")))


def prompt_ids(questions: Iterable[str]) -> list[list[int]]:
    """Return token ids of questions in the form that the models were trained on (`prompt_of`)."""
    read = tokenizer()
    return [read(prompt_of(question))["input_ids"] for question in questions]


def levels(
    names: Sequence[str] = LEVELS,
    *,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    pack: Switch = "auto",
) -> dict[str, HuggingFaceLevel]:
    """Load the shipped models as levels, by name, target first.

    Args:
        dtype: of all levels. None: float32; on the CPU the draft levels in bfloat16, if the
            processor has products of it. A draft's dtype affects speed only, never exactness.
        pack: as for `Chain`.
    """
    from ..drafters import resolve
    from ..levels import Options

    arguments.switch("pack", pack)
    dtype = arguments.loaded_dtype("dtype", dtype)
    device = arguments.device("device", device) or torch.device("cpu")
    on_cpu = device.type == "cpu"
    loaded: dict[str, Any] = {}
    for name in names:
        draft = on_cpu and name != LEVELS[0]
        kind = dtype if dtype or draft else torch.float32
        with progress.loading(shown=False):  # too short for a progress bar
            options = Options(name, (), kind, device, pack)
            loaded[name] = resolve(path(name), options)
    return loaded


def chain(
    names: Sequence[str] = LEVELS,
    window: Sequence[int] | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    pack: Switch = "auto",
    **options: Any,
) -> Chain:
    """Load a chain of shipped models: arguments of `levels`, and further options of `Chain`."""
    from ..chain import Chain

    if window is None:
        window = WINDOWS.get(tuple(names))
        if options.get("rounds") is None:
            options["rounds"] = ROUNDS.get(tuple(names))
    loaded = levels(names, dtype=dtype, device=device, pack=pack)
    return Chain(list(loaded.values()), window, **options)
