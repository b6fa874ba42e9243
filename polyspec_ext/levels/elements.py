"""Resolve elements of chains, with a common registry for `Chain`, `ps.plan` and the command line.

Each kind of element has a `Loader`, registered by the module that knows the kind: models and users'
levels here, drafters and the words for levels below a target in `drafters.named`.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from .. import arguments
from ..arguments import shown
from ..kv_cache.factory import device_of, is_stateful
from . import base
from .fused import fuses_on_cuda
from .hugging_face import HuggingFaceLevel, level_of
from .models import ModelLevel, is_encoder_decoder
from .sources import found, load_model

if TYPE_CHECKING:
    from .stateful import EncoderDecoderLevel, StatefulLevel


def load(
    place: str | Path,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    *,
    pack: bool = False,
    blocks: bool = True,
    name: str = "place",
) -> HuggingFaceLevel | EncoderDecoderLevel | StatefulLevel:
    """Load a level from a model id, directory or GGUF file. Arguments and errors are as in
    `load_model`; `pack` as in `HuggingFaceLevel`."""
    model = load_model(place, dtype, device, blocks=blocks, name=name)
    options = {} if is_encoder_decoder(model) else {"pack": pack}
    level: HuggingFaceLevel | EncoderDecoderLevel | StatefulLevel
    level = level_class(model)(model, **options)
    return level


def level_class(model: Any) -> Any:
    """Return the class of level for a model of `transformers`."""
    if is_encoder_decoder(model):
        from .stateful import EncoderDecoderLevel

        return EncoderDecoderLevel
    if is_stateful(model):
        from .stateful import StatefulLevel

        return StatefulLevel
    return HuggingFaceLevel


@runtime_checkable
class Level(base.Level, Protocol):
    """The protocol `levels.base.Level`. ``Level(model, ...)`` itself is short for
    ``HuggingFaceLevel(model, ...)`` and takes its arguments:
    ``Level(copy, shares_cache_with=target)``, ``Level(draft, streaming=256)``, or for an
    `EncoderDecoderLevel` or a `StatefulLevel`. A model id or path is loaded first, with `dtype` and
    `device` as in `load`. (Type checkers that reject calls of protocols need the long name.)"""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        # Subclasses of the protocol are constructed as usual.
        if cls is not Level:
            return super().__new__(cls)
        if args and isinstance(args[0], str | Path):
            where = {name: options.pop(name, None) for name in ("dtype", "device")}
            args = (load_model(args[0], **where, name="model"), *args[1:])
        kind = level_class(args[0]) if args else HuggingFaceLevel
        return kind(*args, **options)


# ---- elements of chains --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A causal language model, for levels of different data types and packing.

    Attributes:
        level: function of data type (None: as in `levels.load`) and `pack` that returns a level.
        config: returns the model's configuration.
        model: the model; None: `level` loads it, in any data type.
    """

    level: Callable[[torch.dtype | str | None, bool], Any]
    config: Callable[[], Any]
    model: Any = None


@dataclass(frozen=True, slots=True)
class Options:
    """Arguments of a loader beside the element.

    Attributes:
        name: name of the element, for messages.
        above: levels above the element, target first.
        dtype, device: of loaded models, as in `levels.load`.
        pack: of new levels (`HuggingFaceLevel`).
        choose: returns the level of a model on the CPU, regardless of `pack`, and has a model on
            CUDA packed if that fuses its layers; None: `pack` decides.
    """

    name: str = "level"
    above: Sequence[Any] = ()
    dtype: torch.dtype | str | None = None
    device: str | torch.device | None = None
    pack: bool = False
    choose: Callable[[ModelSource], Any] | None = None

    def target(self, what: str) -> HuggingFaceLevel:
        """Return the target, a Hugging Face model; `what` is the expectation in the error."""
        if self.above and isinstance(self.above[0], HuggingFaceLevel):
            return self.above[0]
        given = shown(self.above[0]) if self.above else "nothing above it"
        raise ValueError(f"{self.name}: expected {what}, given {given}")


class Loader(Protocol):
    """A loader for a kind of element.

    Attributes:
        expects: description of the elements, for messages.
        gives: types of the results of `load`.
        words: words that a user may write for an element, as messages show them.
    """

    expects: str
    gives: tuple[type, ...]
    words: tuple[str, ...] = ()

    def matches(self, thing: object) -> bool:
        """Return whether `thing`, any object, is of this kind."""
        ...

    def load(self, thing: Any, options: Options) -> Any:
        """Return the level or drafter of `thing`.

        Raises:
            TypeError, ValueError: `thing` cannot be loaded; begins with ``options.name``.
        """
        ...


class Registry:
    """Loaders, asked from the last registered to the first."""

    def __init__(self) -> None:
        self._loaders: list[Loader] = []

    def register(self, loader: Loader) -> None:
        """Add `loader`, which is asked before all known loaders."""
        _require_loader(loader)
        self._loaders.insert(0, loader)

    def remove(self, loader: Loader) -> None:
        """Remove `loader`."""
        self._loaders.remove(loader)

    def resolve(self, thing: Any, options: Options) -> Any:
        """Return the level or drafter of an element of a chain.

        Raises:
            TypeError: no loader matches it; the message lists the accepted elements.
            TypeError, ValueError: it cannot be loaded.
        """
        for loader in self._loaders:
            if loader.matches(thing):
                made = loader.load(thing, options)
                if not isinstance(made, loader.gives):
                    kinds = " or ".join(kind.__name__ for kind in loader.gives)
                    raise TypeError(
                        f"{options.name}: expected {type(loader).__name__}.load to return {kinds}, "
                        f"given {shown(made)}"
                    )
                return made
        known = "; ".join(loader.expects for loader in reversed(self._loaders))
        raise TypeError(f"{options.name}: expected one of: {known}; given {shown(thing)}")

    def near(self, text: str) -> str | None:
        """Return a hint if `text` resembles a known word: no model has the text as its id, and
        looking it up takes long; else None."""
        if "/" in text or Path(text).exists():
            return None
        words = {_letters(word): word for loader in self._loaders for word in loader.words}
        close = difflib.get_close_matches(_letters(text), words, 1, 0.8)
        return f"did you mean {words[close[0]]}?" if close else None


def _letters(word: str) -> str:
    # Text for comparison: without capitals, hyphens, spaces and text after a colon.
    return re.sub(r"[^a-z]", "", word.lower().partition(":")[0])


def _require_loader(loader: Any) -> None:
    """Refuse an object without the form of a `Loader`."""
    name = type(loader).__name__
    if isinstance(loader, type):
        raise TypeError(f"loader: expected an object, given the class {loader.__name__}")
    expects, words, gives = (getattr(loader, x, None) for x in ("expects", "words", "gives"))
    if not isinstance(expects, str) or not expects:
        raise TypeError(f"{name}.expects: expected what it loads in words, given {shown(expects)}")
    if not isinstance(words, tuple) or not all(isinstance(x, str) and _letters(x) for x in words):
        raise TypeError(f"{name}.words: expected a tuple of words, given {shown(words)}")
    if not isinstance(gives, tuple) or not gives or not all(isinstance(x, type) for x in gives):
        raise TypeError(f"{name}.gives: expected a tuple of types, given {shown(gives)}")
    for method, count in (("matches", 1), ("load", 2)):
        try:
            inspect.signature(getattr(loader, method)).bind(*[None] * count)
        except (AttributeError, TypeError) as error:
            raise TypeError(
                f"{name}: expected a method {method} of {count} arguments: {error}"
            ) from error
    for stranger in (None, 0, object(), object):
        answer = loader.matches(stranger)
        if answer is not False:
            raise ValueError(
                f"{name}.matches: expected False of {shown(stranger)}, given {shown(answer)}"
            )


ELEMENTS = Registry()


@dataclass(slots=True)
class Kind:
    """A kind of elements, with the attributes and methods of a `Loader`."""

    expects: str
    gives: tuple[type, ...]
    matches: Callable[[object], bool]
    load: Callable[[Any, Options], Any]
    words: tuple[str, ...] = ()


def _load_path(thing: str | Path, options: Options) -> Any:
    name, device = options.name, arguments.device("device", options.device)
    near = ELEMENTS.near(thing) if isinstance(thing, str) else None
    if near is not None:
        raise ValueError(f"{name}: expected a model or a drafter's word, given {thing!r}; {near}")

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
        in_blocks = source.in_blocks
    on_cpu = device is None or device.type == "cpu"
    if options.choose is None or (options.pack and not on_cpu):
        return level(options.dtype, options.pack)
    if in_blocks or not on_cpu:  # the weights have a fixed format, or nothing is timed
        model = load_model(thing, options.dtype, device, name=name)
        return ELEMENTS.resolve(model, replace(options, dtype=None, device=None))
    return options.choose(ModelSource(level, config))


def _load_users_level(thing: base.Level, options: Options) -> base.Level:
    # The operators must be able to read its logits.
    name = f"{options.name}, {getattr(thing, 'name', type(thing).__name__)}"
    size = arguments.integer(f"{name}: vocab_size", thing.vocab_size)
    if not 1 <= size <= arguments.SIZE_MAX:
        raise ValueError(
            f"{name}: vocab_size: expected 1 to {arguments.SIZE_MAX}, given {thing.vocab_size}"
        )
    arguments.place(f"{name}: device", getattr(thing, "device", "cpu"))
    return thing


def _load_model(thing: Any, options: Options) -> Any:
    def level(dtype: torch.dtype | str | None, pack: bool) -> Any:
        kind = level_class(thing)
        return level_of(thing, pack) if kind is HuggingFaceLevel else kind(thing, pack=pack)

    if options.choose is not None and device_of(thing).type == "cpu":
        return options.choose(ModelSource(level, lambda: thing.config, thing))
    if options.choose is not None and not options.pack and fuses_on_cuda(thing):
        with contextlib.suppress(ValueError):  # adapters, or a replaced forward
            return level(None, True)
    return level(None, options.pack)


for _kind in (
    Kind(
        "a Hugging Face causal model",
        (ModelLevel,),
        lambda thing: isinstance(thing, torch.nn.Module) and hasattr(thing, "config"),
        _load_model,
    ),
    Kind(
        "a Hugging Face encoder-decoder model",
        (ModelLevel,),
        is_encoder_decoder,
        lambda thing, options: level_class(thing)(thing),
    ),
    Kind(
        "an object with vocab_size, prefill, forward and rollback",
        (base.Level,),
        lambda thing: isinstance(thing, base.Level) and not isinstance(thing, type),
        _load_users_level,
    ),
    Kind(
        "a model id, or the directory or GGUF file of a model",
        (ModelLevel,),
        lambda thing: isinstance(thing, str | Path),
        _load_path,
    ),
):
    ELEMENTS.register(_kind)
