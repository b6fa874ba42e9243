"""The shipped chain: three small Llama-architecture models with one tokenizer, trained on GSM8K
and Tiny Shakespeare.

They are ordinary Hugging Face directories; `python -m training.tiny_models` trains them again.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import arguments, progress

if TYPE_CHECKING:
    from ..arguments import Switch
    from ..chain import Chain
    from ..levels import HuggingFaceLevel

_WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
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


# Wider: every hidden vector becomes `times` copies of itself, so that norms do not change; the
# rows of a matrix are repeated, and its input columns divided among the copies (Net2Net's widening,
# Chen et al. 2016, arXiv 1511.05641, with equal shares). Deeper: layers with output projections of
# zero add nothing to the residual stream, and take the time of any other layer.


@torch.no_grad()
def grown(
    times: int = 4,
    *,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    layers: int | None = None,
    intermediate_size: int | None = None,
    key_value_heads: int | None = None,
) -> Any:
    """Build the shipped target with `times` its hidden and intermediate widths and heads and the
    same distribution to rounding: 112 million parameters at 4, 445 million at 8. This takes
    seconds, in memory; the model has the costs of its size and the texts of the target.

    Args:
        times: >= 1.
        dtype: of the model; None: float32.
        device: of the model; None: the CPU.
        layers: number of layers, at least the target's, which come first; None: the target's.
        intermediate_size: at least `times` the target's; None: `times` the target's.
        key_value_heads: a multiple of the target's that divides the grown query heads, since copies
            of a query head read the same keys; None: `times` the target's.

    Raises:
        TypeError, ValueError: the target is no Llama with tied embeddings and without biases, or a
            number is out of its range.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    model = _target(dtype, device)
    if type(model) is not LlamaForCausalLM or not model.config.tie_word_embeddings:
        raise TypeError(
            f"model: expected a LlamaForCausalLM with tied embeddings, given {type(model).__name__}"
        )
    base = model.config
    if base.attention_bias or base.mlp_bias:
        raise ValueError("model: expected projections without biases, given some")
    if arguments.integer("times", times) < 1:
        raise ValueError(f"times: expected >= 1, given {times}")
    config = base.to_dict()
    for name in _WIDTHS:
        config[name] *= times
    heads, own_heads = config["num_attention_heads"], base.num_key_value_heads
    for name, size in (("num_hidden_layers", layers), ("intermediate_size", intermediate_size)):
        if size is not None:
            if arguments.integer(name, size) < config[name]:
                raise ValueError(f"{name}: expected >= {config[name]}, given {size}")
            config[name] = size
    if key_value_heads is not None:
        count = arguments.integer("key_value_heads", key_value_heads)
        if count < 1 or count % own_heads or heads % count:
            raise ValueError(
                f"key_value_heads: expected a multiple of {own_heads} that divides {heads}, given "
                f"{count}"
            )
        config["num_key_value_heads"] = count
    # The head stays tied: the final norm's weight is divided instead of the head's columns.
    with torch.device("meta"):
        larger = LlamaForCausalLM(LlamaConfig.from_dict(config))
    larger = larger.to(model.dtype).to_empty(device=model.device).eval()
    larger.model.rotary_emb = model.model.rotary_emb
    larger.generation_config = model.generation_config
    larger.name_or_path = model.name_or_path
    source = model.state_dict()
    shares = config["num_key_value_heads"] // own_heads
    for name, weight in larger.state_dict().items():
        match = _LAYER.match(name)
        number = int(match[1]) if match else 0
        original = name.replace(f".{number}.", f".{number % base.num_hidden_layers}.", 1)
        tensor, module = source[original if match else name], name.split(".")[-2]
        if number >= base.num_hidden_layers and module in ("o_proj", "down_proj"):
            weight.zero_()
        elif name == "model.norm.weight":
            weight.copy_(tensor.repeat(times) / times)
        elif module in ("embed_tokens", "lm_head"):
            weight.copy_(tensor.repeat(1, times))
        elif weight.dim() == 1:
            weight.copy_(tensor.repeat(times))
        elif module == "o_proj":  # its input columns are heads, copies of a head adjacent
            by_head = _heads_repeated(tensor.T, base.head_dim, times).T
            weight.copy_((by_head / times).repeat(times, 1))
        elif module == "q_proj":
            weight.copy_(_heads_repeated(tensor.repeat(1, times) / times, base.head_dim, times))
        elif module in ("k_proj", "v_proj"):
            weight.copy_(_heads_repeated(tensor.repeat(1, times) / times, base.head_dim, shares))
        elif module == "down_proj":  # zero columns for additional intermediate width
            weight.zero_()
            weight[:, : tensor.shape[1] * times] = (tensor / times).repeat(times, times)
        else:
            rows = torch.arange(weight.shape[0], device=tensor.device) % tensor.shape[0]
            weight.copy_((tensor / times).repeat(1, times)[rows])
    larger.tie_weights()
    return larger


def _target(dtype: torch.dtype | str | None, device: str | torch.device | None = None) -> Any:
    from ..levels import load_model

    with progress.loading(shown=False):
        return load_model(path("target"), dtype, device)


def _heads_repeated(rows: torch.Tensor, size: int, copies: int) -> torch.Tensor:
    by_head = rows.reshape(-1, size, rows.shape[1])
    return by_head.repeat_interleave(copies, 0).reshape(-1, rows.shape[1])


@torch.no_grad()
def grown_head(name: str, times: int, folder: str | Path) -> Path:
    """Write a shipped EAGLE head, "eagle2" or "eagle3", for `grown(times)`, with its distribution
    to rounding: a directory in its training format, for `ps.Eagle.from_pretrained`.

    An EAGLE-2 head reads and returns states of the target's width, so it grows as the target does.
    An EAGLE-3 head keeps its width: the columns of the product that fuses the target's states are
    divided among the copies, and the head gets the embeddings of the target.

    Args:
        times: >= 1.
        folder: parent of the directory, which has the head's name.
    """
    from safetensors.torch import save_file

    from ..drafters import checkpoint

    if name not in HEADS:
        raise ValueError(f"name: expected one of {', '.join(HEADS)}, given {name!r}")
    model, output = _target(torch.float32), Path(folder) / name
    config, tensors = checkpoint.read_config(path(name)), checkpoint.read_folder(path(name))
    if "midlayer.hidden_norm.weight" in tensors:
        config["target_hidden_size"] = config["hidden_size"] * times
        # The layers of its training: a grown target may have more layers.
        count = model.config.num_hidden_layers
        config.setdefault("eagle_aux_hidden_state_layer_ids", [2, count // 2, count - 3])
        parts = tensors["fc.weight"].split(config["hidden_size"], 1)
        tensors["fc.weight"] = torch.cat([piece.repeat(1, times) / times for piece in parts], 1)
        embeds = model.get_input_embeddings().weight
        tensors["embed_tokens.weight"] = embeds.to(tensors["fc.weight"].dtype)
    else:
        # States enter and leave with the grown final norm's factor 1 / times, so the whole
        # residual stream has it; the single norm in between divides it out.
        config["rms_norm_eps"] /= times**2
        embeds, states = tensors["fc.weight"].chunk(2, 1)
        for name in _WIDTHS:
            config[name] *= times
        for name, weight in tensors.items():
            if weight.dim() == 1:
                tensors[name] = weight.repeat(times)
                continue
            reads = name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            factor = 1 if reads else times**2 if adds else times
            tensors[name] = weight.repeat(times, times) / factor
        halves = [embeds.repeat(times, times) / times, states.repeat(times, times)]
        tensors["fc.weight"] = torch.cat(halves, 1) / times
    output.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, output / "model.safetensors", {"format": "pt"})
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return output
