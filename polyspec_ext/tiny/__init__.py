"""The shipped chain: three small Llama-architecture models with one tokenizer, trained on GSM8K
and Tiny Shakespeare.

They are ordinary Hugging Face directories; `python -m training.tiny_models` makes them anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import progress

if TYPE_CHECKING:
    from ..chain import Chain
    from ..levels import HuggingFaceLevel
    from ..tuning import Switch

LEVELS = ("target", "middle", "drafter")
HEADS = ("eagle2", "eagle3")  # EAGLE heads for the target
# Window of each shipped chain, by its levels: among the fastest of a small sweep on two CPU cores,
# for one prompt and for batches of about eight, where a verified token costs more and rows that
# wait for each other cost time.
WINDOWS: dict[tuple[str, ...], tuple[int, ...]] = {
    ("target",): (),
    ("target", "middle"): (6,),
    ("target", "drafter"): (5,),
    ("target", "middle", "drafter"): (5, 3),
}
# Rounds of the middle for one prompt: a third one where the first two have not filled the window.
ROUNDS: dict[tuple[str, ...], tuple[int, ...]] = {("target", "middle", "drafter"): (3,)}

# Sums in the words of the training texts.
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
    """Return the folder of the models: beside this file, or where POLYSPEC_TINY points."""
    return Path(os.environ.get("POLYSPEC_TINY") or Path(__file__).parent)


def path(level: str) -> Path:
    """Return the directory of "target", "middle", "drafter", "eagle2" or "eagle3".

    Raises:
        ValueError: no such level.
        FileNotFoundError: the model is not there.
    """
    if level not in (*LEVELS, *HEADS):
        known = ", ".join((*LEVELS, *HEADS))
        raise ValueError(f"level: expected one of {known}, given {level!r}")
    place = root() / level
    if not (place / "config.json").exists():
        raise FileNotFoundError(
            f"no model in {place}; train one with `python -m training.tiny_models --output "
            f"{root()}`"
        )
    return place


# As `prompt_of` has it; answers and the EOS behind them follow as in training.
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
        dtype: of all of them. None: float32; on the CPU the draft levels in bfloat16, if the
            processor multiplies that. A draft's dtype costs speed only, never exactness.
        pack: "auto": whatever is faster on this processor (`tuning.choose`, which keeps its
            answers).
    """
    from .. import arguments
    from ..tuning import level_for, widths_of

    dtype = arguments.loaded_dtype("dtype", dtype)
    device = arguments.device("device", device) or torch.device("cpu")
    on_cpu = device.type == "cpu"
    window = WINDOWS.get(tuple(names), (5,) * (len(names) - 1))
    made: dict[str, Any] = {}
    for name, widths in zip(names, widths_of(window), strict=True):
        draft = on_cpu and name != LEVELS[0]
        kind = dtype if dtype or draft else torch.float32
        with progress.loading(shown=False):  # which takes a blink
            made[name] = level_for(path(name), widths, kind, device, pack=pack)
    return made


def chain(
    names: Sequence[str] = LEVELS,
    window: Sequence[int] | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    pack: Switch = "auto",
    **options: Any,
) -> Chain:
    """Load the shipped chain, or part of it: `levels`, and the other options of `Chain`."""
    from ..chain import Chain

    if window is None:
        window = WINDOWS.get(tuple(names))
        if options.get("rounds") is None:
            options["rounds"] = ROUNDS.get(tuple(names))
    made = levels(names, dtype=dtype, device=device, pack=pack)
    return Chain(list(made.values()), window, **options)


def grown(
    times: int = 4,
    *,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    layers: int | None = None,
    intermediate_size: int | None = None,
    key_value_heads: int | None = None,
) -> Any:
    """Make the shipped target with hidden and intermediate widths and heads `times` as wide and the
    same distribution to rounding: 112 million parameters at 4, 445 million at 8. It is made in
    memory, in seconds; it costs what a model of that size costs and says what the target says.

    Args:
        times: >= 1.
        dtype: of the model; None: float32.
        device: where it is made; None: the CPU.
        layers: in all; None: the target's. The others stand behind them.
        intermediate_size: at least `times` the target's; None: that.
        key_value_heads: a multiple of the target's that divides the grown query heads, since copies
            of a query head read the same keys; None: `times` the target's.

    Raises:
        TypeError, ValueError: the target is no Llama with tied embeddings and without biases, or a
            number is not as it is said above.
    """
    from ..levels import load_model
    from .growth import grown_model

    with progress.loading(shown=False):
        model = load_model(path("target"), dtype, device)
    return grown_model(model, times, layers, intermediate_size, key_value_heads)


def grown_head(name: str, times: int, folder: str | Path) -> Path:
    """Write a shipped EAGLE head, "eagle2" or "eagle3", for `grown(times)`: a directory in the
    format that it was trained in, for `ps.Eagle.from_pretrained`.

    Args:
        times: >= 1.
        folder: it is written there, under the head's name.
    """
    from ..levels import load_model
    from .growth import grown_head as made

    if name not in HEADS:
        raise ValueError(f"name: expected one of {', '.join(HEADS)}, given {name!r}")
    with progress.loading(shown=False):
        model = load_model(path("target"), torch.float32)
    made(path(name), model, times, Path(folder) / name)
    return Path(folder) / name
