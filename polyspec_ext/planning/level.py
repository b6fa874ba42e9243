"""A chain's element as the level that runs it fastest on this processor."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import arguments
from ..kv_cache.factory import device_of
from ..levels import HuggingFaceLevel, Level, as_level, found
from ..levels.cpu_packed import can_pack
from ..levels.quantized import Int4Linear
from ..quantization.stored import is_copy, original, stored_w4
from .choice import LevelConfig, Switch, choose

# Of a configuration: what does not change the cost of a pass, or is a candidate's own.
_ASIDE = ("_name_or_path", "dtype", "torch_dtype", "transformers_version")


def level_for(
    thing: Any,
    widths: Sequence[int],
    dtypes: Sequence[torch.dtype | str | None] = (None,),
    device: str | torch.device | None = None,
    *,
    pack: Switch = "auto",
    compile: Switch = "auto",
    name: str = "level",
) -> Level:
    """Like `as_level`, with what is "auto" chosen by timing (`choose`) where the model is on the
    CPU, and off elsewhere. The level's `choice` tells what was chosen and why.

    Args:
        thing: a model id, path or Hugging Face causal model, or "w4:" in front of an id or path
            for that model's 4-bit copy (`stored_w4`), with the checkpoint's own data type unless
            another is given; a Level is given back as it is, as is that of a model whose cache
            other levels share.
        widths: numbers of tokens of the level's passes.
        dtypes: candidates for a model that is loaded here, on the CPU; elsewhere the first. Several
            only for a draft level, since the data type of a target is part of its distribution.
            None and "auto": as `as_level` has it.
        name: of `thing`, for messages.

    Raises:
        ValueError: `pack` or `compile` is not True, False or "auto"; or as `as_level` has it.
        TypeError: `thing` is none of the above.
    """
    arguments.switch("pack", pack)
    arguments.switch("compile", compile)
    if is_copy(thing):
        whole = as_level(original(thing), dtypes[0] or "auto", device, name=name)
        thing = stored_w4(whole.model, name)  # type: ignore[attr-defined]
        dtypes, device = (None,), None
    loads = isinstance(thing, str | Path)
    given = arguments.device("device", device) or torch.device("cpu")
    where = given if loads else _device(thing)
    if where is None or where.type != "cpu":
        pack, compile, dtypes = pack is True, compile is True, dtypes[:1]
    if isinstance(pack, bool) and isinstance(compile, bool) and len(dtypes) == 1:
        return as_level(thing, dtypes[0], device, pack=pack, compile=compile, name=name)
    models: dict[torch.dtype, Any] = {}

    def model_in(dtype: torch.dtype) -> Any:
        if dtype not in models:
            models[dtype] = as_level(thing, dtype, device, name=name).model  # type: ignore[attr-defined]
        return models[dtype]

    if loads:
        with found(name, thing) as source:
            config = source.config()
        if config.is_encoder_decoder:  # of which there is one way to run
            return as_level(thing, dtypes[0], device, name=name)
        # Where "auto" is not told, `as_level` finds it out.
        if "auto" in dtypes and config.dtype is None:
            dtypes = [as_level(thing, "auto", device, name=name).model.dtype]  # type: ignore[attr-defined]
        own = config.dtype if "auto" in dtypes else torch.float32
        kinds = [kind if isinstance(kind, torch.dtype) else own for kind in dtypes]
    else:
        plain = as_level(thing, name=name)
        if not isinstance(plain, HuggingFaceLevel) or not plain.reads_apart:
            return plain
        config, kinds = thing.config, [thing.dtype]
        models[thing.dtype] = thing
    packs: tuple[bool, ...] = (False, True) if pack == "auto" else (pack,)
    if pack == "auto" and not loads and not can_pack(thing):
        packs = (False,)  # there is nothing to choose, as where all layers have 4-bit weights
    level, choice = choose(
        lambda c: HuggingFaceLevel(model_in(c.dtype), pack=c.pack, compile=c.compile),
        [LevelConfig(kind, each) for kind in kinds for each in packs],
        widths,
        compile=compile,
        shape=_digest(config, () if loads else thing.modules()),
    )
    level.choice = choice
    return level


def _device(thing: Any) -> torch.device | None:
    is_model = isinstance(thing, torch.nn.Module) and hasattr(thing, "config")
    return device_of(thing) if is_model else None


def _digest(config: Any, modules: Iterable[torch.nn.Module]) -> str:
    told = {key: value for key, value in config.to_dict().items() if key not in _ASIDE}
    quantised = sum(isinstance(module, Int4Linear) for module in modules)
    if quantised:
        told["int4"] = quantised
    return hashlib.sha256(repr(sorted(told.items())).encode()).hexdigest()[:16]
