"""A chain's element as the level that runs it fastest on this processor."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .. import arguments
from ..levels import ELEMENTS, HuggingFaceLevel, ModelSource, Options
from ..levels.cpu_packed import can_pack
from ..levels.describe import is_sharded
from ..levels.quantized import QuantizedLinear
from ..levels.trimmed import TrimmedHead
from . import processor
from .choice import LevelConfig, Switch, choose

# Of a configuration: what does not change the cost of a pass, or is a candidate's own.
_ASIDE = ("_name_or_path", "dtype", "torch_dtype", "transformers_version")


def level_for(
    thing: Any,
    widths: Sequence[int],
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    *,
    pack: Switch = "auto",
    name: str = "level",
    above: Sequence[Any] = (),
) -> Any:
    """Return what an element of a chain stands for (`levels.ELEMENTS`): a level, or a drafter
    without one.

    Where the level is that of a model in float32 on the CPU, what is "auto" is chosen by timing
    (`choose`), and its `choice` tells what was chosen and why. Models in other data types are
    packed where they can be: packed products round otherwise there, and no clock should choose a
    text. With a target that is sharded over processes, which must not differ, nothing is timed
    either. Elsewhere "auto" is off. A level is returned as it is, as is that
    of a model whose cache other levels share.

    Args:
        widths: numbers of tokens of the level's passes.
        dtype: of a model that is loaded here. "auto" and None: as `levels.load` has it. But on the
            CPU None is bfloat16 of a checkpoint in it, if the processor multiplies that. Of a
            target also the packed level's logits must not depend on the tokens beside a token
            (`HuggingFaceLevel.varies`); else it is float32.
        name: of `thing`, for messages.
        above: the levels above it, target first.

    Raises:
        ValueError: `pack` is not True, False or "auto".
        TypeError, ValueError: as `Registry.resolve` has it.
    """
    arguments.switch("pack", pack)
    some = isinstance(pack, str) or (pack and dtype is None and isinstance(thing, str | Path))
    timed = not any(map(is_sharded, (thing, *above[:1])))
    fastest = partial(_fastest, widths, dtype, pack, timed, bool(above)) if some else None
    options = Options(name, above, dtype, device, pack is True, fastest)
    return ELEMENTS.resolve(thing, options)


def _fastest(
    widths: Sequence[int],
    dtype: torch.dtype | str | None,
    pack: Switch,
    timed: bool,
    drafts: bool,
    source: ModelSource,
) -> Any:
    """Return the level that runs fastest of those that can be made of a model on the CPU. Not
    `timed`: one that is packed where it can be."""
    given, models, plain = source.model, {}, None
    kind: Any

    def model_in(dtype: torch.dtype | str | None) -> Any:
        if dtype not in models:
            models[dtype] = source.level(dtype, False).model
        return models[dtype]

    if given is None:
        config = source.config()
        if config.is_encoder_decoder:  # of which there is one way to run
            return source.level(dtype, False)
        # Where "auto" is not told, loading finds it out.
        if dtype == "auto":
            dtype = config.dtype or model_in("auto").dtype
        half = config.dtype == torch.bfloat16 and pack and processor.multiplies_bfloat16()
        kind = dtype or (torch.bfloat16 if half else torch.float32)
    else:
        plain = source.level(None, False)
        if not plain.reads_apart:
            return plain
        config, dtype = given.config, given.dtype
        models[dtype] = given
        kind = dtype

    def make(config: LevelConfig) -> Any:
        if plain is not None and not config.pack:
            return plain
        return HuggingFaceLevel(model_in(config.dtype), pack=config.pack)

    def chosen(*packs: bool) -> Any:
        candidates = [LevelConfig(kind, each) for each in packs]
        shape = _digest(config, () if given is None else given.modules())
        level, choice = choose(make, candidates, widths, shape=shape)
        level.choice = choice
        return level

    if dtype is None and kind == torch.bfloat16:
        # The text of a target would depend on the passes' widths were its bits to.
        with contextlib.suppress(ValueError):
            level = chosen(True)
            if drafts or level.varies == ():
                return level
        models.clear()
        kind = torch.float32
    if pack != "auto":
        return chosen(pack)
    by_clock = timed and kind == torch.float32
    # Nothing to choose where all layers have 4-bit weights.
    if (given is None and by_clock) or can_pack(model_in(kind)):
        if by_clock:
            return chosen(False, True)
        with contextlib.suppress(ValueError, RuntimeError):  # oneDNN's, of what it cannot pack
            return chosen(True)
    return chosen(False)


def _digest(config: Any, modules: Iterable[torch.nn.Module]) -> str:
    told = {key: value for key, value in config.to_dict().items() if key not in _ASIDE}
    for module in modules:
        if isinstance(module, QuantizedLinear):
            told["int4"] = told.get("int4", 0) + 1
        elif isinstance(module, TrimmedHead):
            told["drawn"] = len(module.drawn)
    return hashlib.sha256(repr(sorted(told.items())).encode()).hexdigest()[:16]
