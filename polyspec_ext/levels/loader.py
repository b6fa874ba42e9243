"""Levels from what users have: models, ids or paths of models, and levels of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from .. import arguments, progress
from . import base
from .encoder_decoder import EncoderDecoderLevel, is_encoder_decoder
from .hugging_face import HuggingFaceLevel, level_of
from .sources import Source, found


@runtime_checkable
class Level(base.Level, Protocol):
    """`levels.base.Level`, which see. ``Level(model, ...)`` itself is short for
    ``HuggingFaceLevel(model, ...)``, whose arguments it takes: ``Level(copy,
    shares_cache_with=target)``, ``Level(draft, streaming=256)``, or for an `EncoderDecoderLevel`.
    Of an id or path the model is loaded first, with `dtype` and `device` as `load` takes them. (A
    type checker that makes no protocols wants the long name.)"""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        # Classes that name the protocol as their base are made as any other.
        if cls is not Level:
            return super().__new__(cls)
        if args and isinstance(args[0], str | Path):
            where = {name: options.pop(name, None) for name in ("dtype", "device")}
            args = (load(args[0], **where, name="model").model, *args[1:])
        both = args and is_encoder_decoder(args[0])
        return (EncoderDecoderLevel if both else HuggingFaceLevel)(*args, **options)


def load(
    place: str | Path,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    *,
    pack: bool = False,
    compile: bool = False,
    name: str = "place",
) -> HuggingFaceLevel | EncoderDecoderLevel:
    """A level from a model id, directory or GGUF file.

    Args:
        place: a directory with a config.json; a GGUF file, whose weights are dequantised, for which
            the packages gguf and accelerate are needed; or else a model id, for which
            `transformers` looks in its cache and may ask the network. What can only be a path (a
            `Path`, a string with more than one slash, a dot or a tilde in front) never gets that
            far.
        dtype: one, its name, or "auto" for the checkpoint's own. None: float32 on the CPU, where
            half precision is slow, and "auto" elsewhere.
        device: None: the CPU.
        pack, compile: see `HuggingFaceLevel`.
        name: of `place`, for messages.

    Raises:
        TypeError: `dtype` or `device` is none.
        ValueError: no model there, a data type or device that the operators do not read.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    where = arguments.device("device", device) or torch.device("cpu")
    own: Any = torch.float32 if where.type == "cpu" else "auto"
    wanted = arguments.loaded_dtype("dtype", dtype) or own
    with found(name, place) as source, progress.loading():
        both = not _is_adapter(source) and source.config().is_encoder_decoder
        model = source.model(AutoModelForSeq2SeqLM if both else AutoModelForCausalLM, wanted)
    if both:
        return EncoderDecoderLevel(model.to(where).eval())
    return HuggingFaceLevel(model.to(where).eval(), pack=pack, compile=compile)


def _is_adapter(source: Source) -> bool:
    folder = Path(source.place)
    return source.file is None and folder.is_dir() and not (folder / "config.json").is_file()


def as_level(
    thing: Any,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    *,
    pack: bool = False,
    compile: bool = False,
    name: str = "level",
) -> base.Level:
    """A chain's element as a level: a Level as it is, a model wrapped, an id or path loaded.
    `pack`, `compile`: of the levels made here (`HuggingFaceLevel`); `name`: for messages.

    Raises:
        TypeError: it is none of these.
        ValueError: its vocabulary or its device is none that the operators know.
    """
    if isinstance(thing, str | Path):
        return load(thing, dtype, device, pack=pack, compile=compile, name=name)
    if isinstance(thing, base.Level) and not isinstance(thing, type):
        _require_readable(thing, name)
        return thing
    if is_encoder_decoder(thing):
        return EncoderDecoderLevel(thing)
    if isinstance(thing, torch.nn.Module) and hasattr(thing, "config"):
        return level_of(thing, pack, compile)
    raise TypeError(
        f"{name}: expected a Hugging Face causal model, a model id or path, or an object with "
        f"vocab_size, prefill, forward and rollback, given {arguments.shown(thing)}"
    )


def _require_readable(level: base.Level, name: str) -> None:
    """What a level says of its logits must be something that the operators can read."""
    name = f"{name}, {getattr(level, 'name', type(level).__name__)}"
    if not 1 <= arguments.integer(f"{name}: vocab_size", level.vocab_size) <= arguments.SIZE_MAX:
        raise ValueError(
            f"{name}: vocab_size: expected 1 to {arguments.SIZE_MAX}, given {level.vocab_size}"
        )
    arguments.place(f"{name}: device", getattr(level, "device", "cpu"))
