"""What a chain behind `model.generate` can honour, and the refusal by name of what it cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from .. import inputs
from ..chain import Chain
from ..kv_cache.factory import name_of
from ..levels.base import EncodedInput

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def require_chain(chain: Any, model: PreTrainedModel) -> Any:
    """Return the target's level, which has to run `model`."""
    if not isinstance(chain, Chain):
        raise TypeError(
            f"chain: expected a polyspec_ext.Chain whose target is {name_of(model)}, given "
            f"{type(chain).__name__}"
        )
    target: Any = chain.levels[0]
    own = getattr(target, "model", None)
    if getattr(own, "_orig_mod", own) is not getattr(model, "_orig_mod", model):
        raise ValueError(
            f"chain: expected {name_of(model)}, the very model that generate was called on, as its "
            f"target, given {'another ' if chain.names[0] == name_of(model) else ''}"
            f"{chain.names[0]}; build it as Chain([model, ...])"
        )
    return target


# What a generation configuration can ask for and a chain cannot do.
REFUSED_OPTIONS: dict[str, Callable[[Any], bool]] = {
    "num_beams": lambda value: value > 1,
    "num_beam_groups": lambda value: value > 1,
    "penalty_alpha": lambda value: value > 0,
    "dola_layers": bool,
    "constraints": bool,
    "force_words_ids": bool,
    "prompt_lookup_num_tokens": bool,
    "assistant_early_exit": bool,
    "use_mtp": bool,
    "speculation_type": bool,
    "is_assistant": bool,
    "output_attentions": bool,
    "output_hidden_states": bool,
    "cache_implementation": lambda value: value == "quantized",
}
_CACHES = ("cache", "past_key_values")  # of transformers 5.24 and of older ones
# Arguments of the model's forward pass that `generate` prepares and a chain needs or may ignore.
_KNOWN = {
    "attention_mask", "position_ids", *_CACHES, "cache_position", "use_cache", "logits_to_keep",
}  # fmt: skip


def require_supported(config: Any, model_kwargs: dict[str, Any]) -> None:
    """Refuses what a chain cannot honour.

    Raises:
        ValueError: names it.
    """
    for name, is_set in REFUSED_OPTIONS.items():
        value = getattr(config, name, None)
        if value is not None and is_set(value):
            raise ValueError(
                f"{name}: expected its default with a chain, which cannot honour it, given {value}"
            )
    for name in _CACHES:
        cache = model_kwargs.get(name)
        if cache is not None and cache.get_seq_length() > 0:
            raise ValueError(
                f"{name}: expected none with a chain, whose levels have caches of their own, "
                f"given a {type(cache).__name__}"
            )
    for name, value in model_kwargs.items():
        # A model of images and text is handed an empty dict where there is no image.
        absent = value is None or value is False or (isinstance(value, Mapping) and not value)
        if name not in _KNOWN and not absent:
            raise ValueError(
                f"{name}: expected token ids and their attention_mask only, which is what every "
                f"level of a chain reads, given a {type(value).__name__}"
            )


def take_encoded(encoder_input_ids: Any, model_kwargs: dict[str, Any]) -> EncodedInput:
    """Take the encoder's outputs out of the arguments of `generate`.

    Raises:
        TypeError, ValueError: the ids are missing, none, or not those of the states.
    """
    name = "encoder_input_ids"
    states = model_kwargs.pop("encoder_outputs")[0]
    mask = model_kwargs.pop("attention_mask", None)
    wanted = list(states.shape[:2])
    ids, _ = inputs.unwrapped(name, encoder_input_ids)
    rows = [] if ids is None else inputs.rows_of(name, ids)
    widths = [len(row) for row in rows]
    if widths != [wanted[1]] * wanted[0]:
        given = f"rows of {widths}" if rows else "None"
        raise ValueError(
            f"{name}: expected the ids that generate was given to encode, of shape {wanted}, for "
            f"the other levels' encoders, given {given}"
        )
    return EncodedInput(torch.tensor(rows), mask, states)


def padding_of(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> list[int]:
    """Return the number of padding ids on the left of each row.

    Raises:
        ValueError: padding elsewhere, or positions other than the padding gives.
    """
    batch, width = input_ids.shape
    mask = model_kwargs.get("attention_mask")
    place = torch.arange(width, device=input_ids.device)
    if mask is None:
        sizes = torch.zeros(batch, 1, dtype=torch.int64, device=input_ids.device)
    else:
        seen = mask.to(input_ids.device) != 0
        sizes = width - seen.sum(1, keepdim=True)
        wrong = (seen != (place >= sizes)).any(1)
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise ValueError(
                "attention_mask: expected padding on the left of a prompt only, given "
                f"{mask[row].tolist()} in row {row}"
            )
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        expected = (place - sizes).clamp_min(0)
        own = positions.to(input_ids.device)
        # Models of images and text have several planes, which agree where there is text alone.
        if own.shape[-1] != width or ((own != expected) & (place >= sizes)).any():
            raise ValueError(
                "position_ids: expected 0, 1, 2, ... from the first token of each prompt, which "
                f"is what a chain's levels use, given {positions.tolist()}"
            )
    return [int(size) for size in sizes[:, 0].tolist()]
