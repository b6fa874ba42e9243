"""Levels from what users have: models, ids or paths of models, and levels of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from .. import arguments, progress
from ..kv_cache.factory import device_of
from . import base
from .encoder_decoder import EncoderDecoderLevel, is_encoder_decoder
from .gguf import gguf_model, has_blocks
from .gguf_file import GgufFile
from .hugging_face import HuggingFaceLevel, level_of
from .registry import ELEMENTS, Loader, ModelSource, Options
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
            args = (load_model(args[0], **where, name="model"), *args[1:])
        both = args and is_encoder_decoder(args[0])
        return (EncoderDecoderLevel if both else HuggingFaceLevel)(*args, **options)


def load(
    place: str | Path,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    *,
    pack: bool = False,
    blocks: bool = True,
    name: str = "place",
) -> HuggingFaceLevel | EncoderDecoderLevel:
    """A level from a model id, directory or GGUF file.

    Args:
        place, dtype, device, blocks, name: as of `load_model`.
        pack: see `HuggingFaceLevel`.

    Raises:
        TypeError, ValueError: as of `load_model`.
    """
    model = load_model(place, dtype, device, blocks=blocks, name=name)
    if is_encoder_decoder(model):
        return EncoderDecoderLevel(model)
    return HuggingFaceLevel(model, pack=pack)


def load_model(
    place: str | Path,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    *,
    blocks: bool = True,
    name: str = "place",
) -> Any:
    """The model of an id, directory or GGUF file, in eval mode.

    Args:
        place: a directory with a config.json; a GGUF file, for which the package gguf is needed
            (of a model that was split any one, with the others beside it); or else a model id, for
            which `transformers` looks in its cache and may ask the network. What can only be a path
            (a `Path`, a string with more than one slash, a dot or a tilde in front) never gets that
            far.
        dtype: one, its name, or "auto" for the checkpoint's own. None: float32 on the CPU, where
            half precision is slow, and "auto" elsewhere.
        device: None: the CPU.
        blocks: multiply with the blocks of a GGUF file as they lie, where that can be done
            (`levels.gguf`), in float32 by default. False: dequantise them.
        name: of `place`, for messages.

    Raises:
        TypeError: `dtype` or `device` is none.
        ValueError: no model there, one whose weights are not all there and all read, or a data type
            or device that the operators do not read.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    where = arguments.device("device", device) or torch.device("cpu")
    own: Any = torch.float32 if where.type == "cpu" else "auto"
    wanted = arguments.loaded_dtype("dtype", dtype) or own
    with found(name, place) as source, progress.loading():
        model = _of_file(source, wanted, blocks and where.type == "cpu", name)
        if model is None:
            both = not source.is_adapter and source.config().is_encoder_decoder
            model = source.model(AutoModelForSeq2SeqLM if both else AutoModelForCausalLM, wanted)
    return model.to(where).eval()


def _of_file(source: Source, dtype: torch.dtype | str | None, blocks: bool, name: str) -> Any:
    """Return the model of a GGUF file. None: there is no such file."""
    if source.file is None:
        return None
    file = GgufFile(source.file)
    as_blocks = blocks and has_blocks(file)
    if blocks and not as_blocks:
        progress.note(f"{name}: dequantising {source.file.name}: no tensor in blocks")
    own = torch.float32 if as_blocks else torch.bfloat16
    return gguf_model(file, dtype if isinstance(dtype, torch.dtype) else own, as_blocks)


class _Place(Loader):
    """A model id, directory or GGUF file."""

    expects = "a model id, or the directory or GGUF file of a model"
    gives = (HuggingFaceLevel, EncoderDecoderLevel)

    def matches(self, thing: object) -> bool:
        return isinstance(thing, str | Path)

    def load(self, thing: str | Path, options: Options) -> Any:
        name, device = options.name, arguments.device("device", options.device)
        near = ELEMENTS.near(thing) if isinstance(thing, str) else None
        if near is not None:
            raise ValueError(
                f"{name}: expected a model or a drafter's word, given {thing!r}; {near}"
            )

        def level(dtype: torch.dtype | str | None, pack: bool) -> Any:
            return load(thing, dtype, device, pack=pack, name=name)

        def config() -> Any:
            with found(name, thing) as source:
                return source.config()

        with found(name, thing) as source:
            if source.is_adapter and (options.choose is not None or options.pack):
                raise ValueError(
                    "an adapter, whose layers are not packed: pack=False, or merge it "
                    "(PeftModel.from_pretrained(model, folder).merge_and_unload()) and save that"
                )
            in_blocks = source.file is not None and has_blocks(GgufFile(source.file))
        if options.choose is not None and (device is None or device.type == "cpu"):
            if in_blocks:  # whose weights are what they are
                model = load_model(thing, options.dtype, device, name=name)
                return ELEMENTS.resolve(model, replace(options, dtype=None, device=None))
            return options.choose(ModelSource(level, config))
        return level(options.dtype, options.pack)


class _OwnLevel(Loader):
    """A level, which is one already."""

    expects = "an object with vocab_size, prefill, forward and rollback"
    gives = (base.Level,)

    def matches(self, thing: object) -> bool:
        return isinstance(thing, base.Level) and not isinstance(thing, type)

    def load(self, thing: base.Level, options: Options) -> base.Level:
        """What it says of its logits must be something that the operators can read."""
        name = f"{options.name}, {getattr(thing, 'name', type(thing).__name__)}"
        size = arguments.integer(f"{name}: vocab_size", thing.vocab_size)
        if not 1 <= size <= arguments.SIZE_MAX:
            raise ValueError(
                f"{name}: vocab_size: expected 1 to {arguments.SIZE_MAX}, given {thing.vocab_size}"
            )
        arguments.place(f"{name}: device", getattr(thing, "device", "cpu"))
        return thing


class _EncoderDecoder(Loader):
    expects = "a Hugging Face encoder-decoder model"
    gives = (EncoderDecoderLevel,)

    def matches(self, thing: object) -> bool:
        return is_encoder_decoder(thing)

    def load(self, thing: Any, options: Options) -> EncoderDecoderLevel:
        return EncoderDecoderLevel(thing)


class _Model(Loader):
    expects = "a Hugging Face causal model"
    gives = (HuggingFaceLevel,)

    def matches(self, thing: object) -> bool:
        return isinstance(thing, torch.nn.Module) and hasattr(thing, "config")

    def load(self, thing: Any, options: Options) -> Any:
        def level(dtype: torch.dtype | str | None, pack: bool) -> Any:
            return level_of(thing, pack)

        if options.choose is not None and device_of(thing).type == "cpu":
            return options.choose(ModelSource(level, lambda: thing.config, thing))
        return level(None, options.pack)


for _loader in (_Model(), _EncoderDecoder(), _OwnLevel(), _Place()):
    ELEMENTS.register(_loader)
