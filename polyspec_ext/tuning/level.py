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
    dtypes: Sequence[torch.dtype | str | None] = (None,),
    device: str | torch.device | None = None,
    *,
    pack: Switch = "auto",
    compile: Switch = "auto",
    name: str = "level",
    above: Sequence[Any] = (),
) -> Any:
    """What an element of a chain stands for (`levels.ELEMENTS`): a level, or a drafter without one.

    Where the level is that of a model on the CPU, what is "auto" is chosen by timing (`choose`),
    and its `choice` tells what was chosen and why; elsewhere it is off. With a
    target that is sharded over processes, which must not differ, nothing is timed: the first of
    `dtypes`, packed where it can be, not compiled. A level is given back as it is, as is that of a
    model whose cache other levels share.

    Args:
        widths: numbers of tokens of the level's passes.
        dtypes: candidates for a model that is loaded here, on the CPU; elsewhere the first. Several
            only for a draft level, since the data type of a target is part of its distribution.
            "auto" and None: as `levels.load` has it. But None is bfloat16 of a checkpoint in it,
            if the processor multiplies that, and the packed level's logits do not depend on the
            tokens beside a token (`HuggingFaceLevel.varies`).
        name: of `thing`, for messages.
        above: the levels above it, target first.

    Raises:
        ValueError: `pack` or `compile` is not True, False or "auto".
        TypeError, ValueError: as `Registry.resolve` has it.
    """
    arguments.switch("pack", pack)
    arguments.switch("compile", compile)
    some = isinstance(pack, str) or isinstance(compile, str) or len(dtypes) > 1
    some = some or (pack and dtypes[0] is None and isinstance(thing, str | Path))
    timed = not any(map(is_sharded, (thing, *above[:1])))
    if not timed:
        dtypes, compile = dtypes[:1], compile is True
    fastest = partial(_fastest, widths, dtypes, pack, compile, timed) if some else None
    options = Options(name, above, dtypes[0], device, pack is True, compile is True, fastest)
    return ELEMENTS.resolve(thing, options)


def _fastest(
    widths: Sequence[int],
    dtypes: Sequence[torch.dtype | str | None],
    pack: Switch,
    compile: Switch,
    timed: bool,
    source: ModelSource,
) -> Any:
    """The level that runs fastest of those that can be made of a model on the CPU. Not `timed`: one
    that is packed where it can be; there is one of `dtypes`, and `compile` is not "auto"."""
    given, models, plain = source.model, {}, None

    def model_in(dtype: torch.dtype | str | None) -> Any:
        if dtype not in models:
            models[dtype] = source.level(dtype, False, False).model
        return models[dtype]

    if given is None:
        config = source.config()
        if config.is_encoder_decoder:  # of which there is one way to run
            return source.level(dtypes[0], False, False)
        # Where "auto" is not told, loading finds it out.
        if "auto" in dtypes and config.dtype is None:
            dtypes = [model_in("auto").dtype]
        half = config.dtype == torch.bfloat16 and pack and processor.multiplies_bfloat16()
        own = {"auto": config.dtype, None: torch.bfloat16 if half else torch.float32}
        kinds = [kind if isinstance(kind, torch.dtype) else own[kind] for kind in dtypes]
        kinds = list(dict.fromkeys(kinds))
    else:
        plain = source.level(None, False, False)
        if not plain.reads_apart:
            return plain
        config, kinds = given.config, [given.dtype]
        models[given.dtype] = given
    packs: tuple[bool, ...] = (False, True) if pack == "auto" else (pack,)
    if pack == "auto" and (given is not None or not timed):
        able = can_pack(model_in(kinds[0]))
        # Nothing to choose: all layers have 4-bit weights, or no clock may decide.
        packs = (False, True) if able and timed else (able,)

    def make(config: LevelConfig) -> Any:
        if plain is not None and not config.pack and not config.compile:
            return plain
        model = model_in(config.dtype)
        return HuggingFaceLevel(model, pack=config.pack, compile=config.compile)

    def chosen(candidates: Sequence[LevelConfig]) -> Any:
        shape = _digest(config, () if given is None else given.modules())
        level, choice = choose(make, candidates, widths, compile=compile, shape=shape)
        level.choice = choice
        return level

    if tuple(dtypes) == (None,) and kinds == [torch.bfloat16]:
        # A target, whose text would depend on the passes' widths were its bits to.
        with contextlib.suppress(ValueError):
            level = chosen([LevelConfig(torch.bfloat16, True)])
            if level.varies == ():
                return level
        models.clear()
        kinds = [torch.float32]
    return chosen([LevelConfig(kind, each) for kind in kinds for each in packs])


def _digest(config: Any, modules: Iterable[torch.nn.Module]) -> str:
    told = {key: value for key, value in config.to_dict().items() if key not in _ASIDE}
    for module in modules:
        if isinstance(module, QuantizedLinear):
            told["int4"] = told.get("int4", 0) + 1
        elif isinstance(module, TrimmedHead):
            told["drawn"] = len(module.drawn)
    return hashlib.sha256(repr(sorted(told.items())).encode()).hexdigest()[:16]
