"""What a model of `transformers` says of itself beside its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .. import arguments
from ..validate import LOGITS_DTYPES

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Ids that end a text, from the generation configuration."""
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    if ids is None:
        ids = getattr(model.config, "eos_token_id", None)
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase | None:
    """The tokenizer that lies beside the model's weights, or None. Never asks the network."""
    place = getattr(model, "name_or_path", "")
    if not place:
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(place, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError):
        return None


def require_eval(model: PreTrainedModel, name: str) -> None:
    """Refuse a model in training mode.

    Raises:
        ValueError: names the level.
    """
    if model.training:
        raise ValueError(
            f"{name}: expected a model in eval mode, given one in training mode; call model.eval()"
        )


def require_logits(model: PreTrainedModel, device: torch.device, name: str) -> None:
    """Refuse a model whose logits `verify` cannot read, as far as its head tells.

    Raises:
        ValueError: names the level.
    """
    # Weights that accelerate keeps elsewhere are on the meta device between passes.
    offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    missing = not offloaded and any(p.is_meta for p in model.parameters())
    if missing or device.type == "meta":
        raise ValueError(f"{name}: expected a model with its weights, given one on the meta device")
    arguments.place(f"{name}: device", device)
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    # A quantised head, which is of another class, multiplies in a type that its weights do not
    # tell.
    kind = weight.dtype if isinstance(weight, torch.Tensor) else torch.float32
    told = type(head) is torch.nn.Linear or kind == torch.float64
    if told and kind not in LOGITS_DTYPES:
        raise ValueError(
            f"{name}: expected a model whose logits are float32, bfloat16 or float16, given a head "
            f"of {kind}"
        )
