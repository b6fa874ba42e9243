"""Caches of keys and values that roll back; other caches are refused by name (contract C7).

After a rejection every level must drop its latest tokens. A cache of keys and values by position
is cut. A recurrent state has folded the tokens in. A static or ring-buffer cache has overwritten
older tokens.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .. import arguments, rooms
from .layers import DEVICE_BUCKET
from .rollback import CroppedState, RollbackCache, SequenceState

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["CroppedState", "RollbackCache", "SequenceState"]

# Layer types of a configuration with a state computed from all tokens so far. "conv" layers keep a
# short window.
_STATEFUL = ("linear_attention", "mamba", "recurrent", "conv", "ssm", "rwkv", "hybrid")


def name_of(model: Any) -> str:
    """Return a model's name for messages: its id, the name of its folder or file, or its class."""
    source = str(getattr(model, "name_or_path", "") or "")
    name = os.path.basename(os.path.normpath(source)) if os.path.exists(source) else source
    return name or type(model).__name__


def device_of(model: PreTrainedModel) -> torch.device:
    """Return the device of a model's tokens and, as accelerate arranges it, of its logits.

    For a model spread by `device_map`, this is the device of its outermost hook; its first weights
    may be on another device, or on no device while offloaded.
    """
    device = getattr(getattr(model, "_hf_hook", None), "execution_device", None)
    if device is None:
        device = model.device
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def require_rollback(model: PreTrainedModel, name: str) -> None:
    """Refuse a model whose state cannot be cut at a token."""
    config = getattr(model, "config", None)
    if config is None or not callable(getattr(model, "get_output_embeddings", None)):
        raise TypeError(
            f"{name}: expected a causal language model of transformers, given "
            f"{type(model).__name__}"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{name}: expected a decoder-only model, given the encoder-decoder "
            f"{type(model).__name__} ({config.model_type}), which EncoderDecoderLevel is for"
        )
    if model.get_output_embeddings() is None:
        raise TypeError(
            f"{name}: expected a model with a language-model head, given {type(model).__name__}"
        )
    types, stateful = _layer_types(model)
    if stateful or getattr(model, "_is_stateful", False):
        kind = "a recurrent state"
        if types and not stateful:
            kind = "something else beside keys and values"
        elif len(stateful) < len(types):
            kind = "a hybrid of attention and recurrent layers"
        listed = f" (layer types: {', '.join(types)})" if types else ""
        raise ValueError(
            f"{name}: {type(model).__name__} keeps {kind}{listed}, which cannot be "
            "cut after a rejected token; expected a model whose cache holds keys and values by "
            "position, or a StatefulLevel"
        )


def _layer_types(model: Any) -> tuple[list[str], list[str]]:
    # All types, and the types with a state.
    text_config = model.config.get_text_config(decoder=True)
    types = sorted({str(t) for t in getattr(text_config, "layer_types", None) or ()})
    return types, [t for t in types if any(word in t for word in _STATEFUL)]


def is_stateful(model: Any) -> bool:
    """Return whether a model of `transformers` keeps a recurrent state, or any other state than
    keys and values by position."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config") or config.is_encoder_decoder:
        return False
    if _layer_types(model)[1] or getattr(model, "_is_stateful", False):
        return True
    try:
        layers = DynamicCache(config=config).layers
    except (AttributeError, KeyError, TypeError, ValueError):  # a user's configuration
        return False
    # (DummyLayer by name, because not all releases have the class: it reads another layer's keys.)
    known = (DynamicLayer, DynamicSlidingWindowLayer)
    return any(type(item) not in known and type(item).__name__ != "DummyLayer" for item in layers)


def state_of(cache: Any, name: str) -> SequenceState:
    """Return the state of a level called `name`: a `SequenceState`, or a cache of `transformers`
    with layers that can be cut at any token.

    Raises:
        ValueError: names the level, the cache and the kind of layer.
    """
    if isinstance(cache, SequenceState):
        return cache
    # Layers of this type are known to cut exactly: they keep all keys and values, in order.
    later = getattr(cache, "layer_class_to_replicate", None) or DynamicLayer
    kinds = {later, *(type(layer) for layer in getattr(cache, "layers", ()))} - {DynamicLayer}
    bad = sorted(kind.__name__ for kind in kinds)
    if bad or not callable(getattr(cache, "crop", None)):
        raise ValueError(
            f"{name}: {type(cache).__name__} with layers {', '.join(bad) or 'that have no crop'} "
            "cannot be rolled back exactly after a rejected token; expected a cache that keeps all "
            "keys and values, such as DynamicCache()"
        )
    return CroppedState(cache)


_OPTIONS = ("capacity", "step", "bucket")  # of the default cache
_STEP = 256  # tokens per row that a cache grows by


def factory(
    model: PreTrainedModel,
    name: str,
    new_cache: Callable[..., Any] | None,
    streaming: int | Mapping[str, int] | None,
    options: Mapping[str, Any],
    *,
    wanted: bool,
) -> tuple[Callable[..., SequenceState], bool]:
    """Return a function that maps rows and capacity (tokens per row) to an empty cache of a level
    called `name` (arguments of `HuggingFaceLevel`), and whether it takes several rows.

    Args:
        wanted: whether the model supports batches with a `RollbackCache`. False, or unsupported
            layers in the configuration: the default is a `DynamicCache` of a single sequence.
    """

    def states(make: Callable[[int, int], Any]) -> Callable[..., SequenceState]:
        return lambda rows, capacity=1: state_of(make(rows, capacity), name)

    arguments.function("new_cache", new_cache, none=True)
    for option, value in options.items():
        if option not in _OPTIONS:
            raise TypeError(
                f"{option}: expected no such argument of a level, given {arguments.shown(value)}; "
                f"those of its cache are {', '.join(_OPTIONS)}"
            )
        arguments.integer(option, value, arguments.SIZE_MAX, 1)
    if new_cache is not None:
        if streaming is not None or options:
            raise ValueError(f"{name}: expected new_cache or options of the default, given both")
        create = new_cache
        takes = any(
            p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
            for p in inspect.signature(create).parameters.values()
        )
        return states(lambda rows, _: create(rows) if takes else create()), takes
    device = device_of(model)
    if streaming is not None:
        sizes = rooms.streaming.window_of(streaming)
        window: dict[str, Any] = {**sizes, "device": device, **options}
        return states(lambda rows, _: RollbackCache.streaming(model, rows, **window)), True
    step = int(options.get("step", _STEP))
    # On a device attention reads spare slots, so that captured graphs have few shapes.
    bucket = 1 if device.type == "cpu" else DEVICE_BUCKET

    def default(rows: int, capacity: int = 1) -> RollbackCache:
        least = max(capacity, int(options.get("capacity", 1)))
        sizes = {"bucket": bucket, **options, "step": step, "capacity": -(-least // step) * step}
        return RollbackCache.for_model(model, rows, device=device, **sizes)

    if wanted or options:
        try:
            default(1)
        except ValueError:
            if options:
                raise
        else:
            return default, True
    # Without a configuration no layer drops keys outside a sliding window; the model masks them.
    return states(lambda *_: DynamicCache()), False
