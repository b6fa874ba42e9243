"""Early exit: the target's own first k layers, its final norm and its head, as a level that drafts
for it (self-speculative decoding; Zhang et al., ACL 2024; LayerSkip, Elhoushi et al., ACL 2024).

The weights are the target's, not copies, and so is the cache: the first k layers write the very
keys and values that the target's would, and what they have written for tokens that stand is
overwritten by the target's next pass with the same numbers. Acceptance is good where a model was
trained for it, poor elsewhere: a head that reads layer k without training sees another space.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from ..kv_cache.factory import name_of
from ..levels import HuggingFaceLevel
from ..levels.replacement import shallow


def early_exit(target: HuggingFaceLevel | Any, layers: int) -> HuggingFaceLevel:
    """A level of the first `layers` layers of `target`, which shares its weights and its cache.

    Args:
        target: a level, or the model of one.
        layers: 1 to one less than it has.

    Raises:
        TypeError: no level of a Hugging Face model.
        ValueError: another number of layers; a model whose layers are not one list; a level that
            has no cache to share (`HuggingFaceLevel`).
    """
    model = target.model if isinstance(target, HuggingFaceLevel) else target
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise TypeError(
            f"target: expected a level of a Hugging Face model, given {type(target).__name__}"
        )
    return HuggingFaceLevel(
        _first_layers(model, layers),
        name=f"{name_of(model)}, {layers} layers",
        shares_cache_with=target,
    )


def _first_layers(model: Any, layers: int) -> Any:
    """`model` with the first of its layers only, on the same parameters."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    if type(layers) is not int or not 1 <= layers < count:
        raise ValueError(f"layers: expected 1 to {count - 1}, of {count}, given {layers!r}")
    lists = [
        name
        for name, part in model.named_modules()
        if isinstance(part, torch.nn.ModuleList) and len(part) == count
    ]
    if len(lists) != 1:
        raise ValueError(
            f"target: expected a model with one list of its {count} layers, given {name_of(model)} "
            f"with {len(lists)}"
        )
    made = shallow(model)
    made.config = copy.deepcopy(model.config)
    text = made.config.get_text_config(decoder=True)
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = text.layer_types[:layers]
    text.num_hidden_layers = layers
    part = made
    *path, last = lists[0].split(".")
    for name in path:
        own = shallow(getattr(part, name))
        if hasattr(own, "config"):
            own.config = text
        setattr(part, name, own)
        part = own
    setattr(part, last, torch.nn.ModuleList(list(getattr(part, last))[:layers]))
    return made
