"""Levels from what users have: models, ids or paths of models, and levels of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from .. import arguments, progress
from . import base
from .encoder_decoder import EncoderDecoderLevel, is_encoder_decoder
from .hugging_face import HuggingFaceLevel, level_of


@runtime_checkable
class Level(base.Level, Protocol):
    """`levels.base.Level`, which see. ``Level(model, ...)`` itself is short for
    ``HuggingFaceLevel(model, ...)``, whose arguments it takes: ``Level(copy,
    shares_cache_with=target)``, ``Level(draft, streaming=256)``, or for an `EncoderDecoderLevel`.
    (A type checker that makes no protocols wants the long name.)"""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        # Classes that name the protocol as their base are made as any other.
        if cls is not Level:
            return super().__new__(cls)
        both = args and is_encoder_decoder(args[0])
        return (EncoderDecoderLevel if both else HuggingFaceLevel)(*args, **options)


def load(
    place: str | Path,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    *,
    pack: bool = False,
    compile: bool = False,
    name: str = "place",
) -> HuggingFaceLevel | EncoderDecoderLevel:
    """A level from a model id or directory.

    Args:
        place: a directory with a config.json, or else a model id, for which `transformers` looks
            in its cache and may ask the network. What can only be a path (a `Path`, a string with
            more than one slash, a dot or a tilde in front) never gets that far.
        dtype: None: float32 on the CPU, where half precision is slow, and the checkpoint's own
            elsewhere.
        device: None: the CPU.
        pack, compile: see `HuggingFaceLevel`.
        name: of `place`, for messages.

    Raises:
        TypeError: `dtype` or `device` is none.
        ValueError: no model there, a data type or device that the operators do not read.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    where = arguments.device("device", device) or torch.device("cpu")
    own: Any = torch.float32 if where.type == "cpu" else "auto"
    wanted = arguments.dtype("dtype", dtype) or own
    with found(name, place) as source, progress.loading():
        folder = Path(source)
        whole = folder.is_dir() and not (folder / "config.json").is_file()  # of an adapter
        both = not whole and AutoConfig.from_pretrained(source).is_encoder_decoder
        kind = AutoModelForSeq2SeqLM if both else AutoModelForCausalLM
        model = kind.from_pretrained(source, dtype=wanted)
    if both:
        return EncoderDecoderLevel(model.to(where).eval())
    return HuggingFaceLevel(model.to(where).eval(), pack=pack, compile=compile)


@contextmanager
def found(name: str, place: str | Path) -> Iterator[str]:
    """`place` as `transformers` takes it, whose errors become one that says `name`."""
    source = _source(name, place)
    try:
        yield source
    except (OSError, ValueError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(
            f"{name}: expected the id or directory of a causal language model, given {source!r}: "
            f"{first}"
        ) from error


def _source(name: str, place: str | Path) -> str:
    """`place` as a string, if it is a directory with a model or may be a model id."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        HFValidationError,
        validate_repo_id,
    )

    source = str(place)
    folder = Path(source)
    if folder.is_dir():
        # An adapter's directory says itself which model it adapts.
        if not any((folder / one).is_file() for one in ("config.json", "adapter_config.json")):
            raise ValueError(
                f"{name}: expected a directory with a config.json, as save_pretrained writes it, "
                f"given {source!r}, which has none"
            )
        return source
    try:
        validate_repo_id(source)
        local = isinstance(place, Path) or folder.exists()
    except HFValidationError:
        local = True
    if local:
        found = "a file" if folder.exists() else "not there"
        raise ValueError(
            f"{name}: expected a model id or the directory of a model, given {source!r}, which is "
            f"{found}"
        )
    return source


def as_level(
    thing: Any,
    dtype: torch.dtype | None = None,
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
