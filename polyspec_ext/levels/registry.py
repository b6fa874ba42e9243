"""What an element of a chain stands for: one table for `Chain`, `ps.plan` and the command line.

Each kind of element has a `Loader`. The modules that know a kind register it: models and levels of
users' own (`loader`), drafters and the words for what stands below a target (`drafters.words`).
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ..arguments import shown
from .hugging_face import HuggingFaceLevel


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A causal language model, of which a level can be made in several ways.

    Attributes:
        level: from data type (None: as `levels.load` has it) and `pack` to a level.
        config: of the model.
        model: None where it is loaded by `level`, in any data type.
    """

    level: Callable[[torch.dtype | str | None, bool], Any]
    config: Callable[[], Any]
    model: Any = None


@dataclass(frozen=True, slots=True)
class Options:
    """What a loader is told beside the element.

    Attributes:
        name: of the element, for messages.
        above: the levels above it, target first.
        dtype, device: of what is loaded, as `levels.load` takes them.
        pack: of the levels that are made (`HuggingFaceLevel`).
        choose: makes the level of a model on the CPU, whatever `pack` says; None: `pack` decides.
    """

    name: str = "level"
    above: Sequence[Any] = ()
    dtype: torch.dtype | str | None = None
    device: str | torch.device | None = None
    pack: bool = False
    choose: Callable[[ModelSource], Any] | None = None

    def target(self, what: str) -> HuggingFaceLevel:
        """The chain's target, which `what` needs to be a Hugging Face model.

        Raises:
            ValueError: it is none; `what` begins the message.
        """
        if self.above and isinstance(self.above[0], HuggingFaceLevel):
            return self.above[0]
        given = shown(self.above[0]) if self.above else "nothing above it"
        raise ValueError(f"{self.name}: expected {what}, given {given}")


class Loader(Protocol):
    """One kind of element.

    Attributes:
        expects: what it loads, for messages.
        gives: what `load` returns is of one of these types.
        words: what a user may write for it, as messages show it.
    """

    expects: str
    gives: tuple[type, ...]
    words: tuple[str, ...] = ()

    def matches(self, thing: object) -> bool:
        """Whether `thing`, which may be anything, is of this kind."""
        ...

    def load(self, thing: Any, options: Options) -> Any:
        """The level or drafter that `thing` stands for.

        Raises:
            TypeError, ValueError: it cannot be had; begins with ``options.name``.
        """
        ...


class Registry:
    """Loaders, of which the one registered last is asked first."""

    def __init__(self) -> None:
        self._loaders: list[Loader] = []

    def register(self, loader: Loader) -> None:
        """`loader` is asked from now on, before all that are known.

        Raises:
            TypeError, ValueError: it does not have the form of a `Loader`; names it.
        """
        _require_loader(loader)
        self._loaders.insert(0, loader)

    def remove(self, loader: Loader) -> None:
        """`loader` is not asked any more."""
        self._loaders.remove(loader)

    def resolve(self, thing: Any, options: Options) -> Any:
        """The level or drafter that an element of a chain stands for.

        Raises:
            TypeError: no loader knows it; tells what would do.
            TypeError, ValueError: it cannot be had.
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
        """What may have been meant by a word, if it is near one that is known: no model has such
        an id, and asking for one takes long."""
        if "/" in text or Path(text).exists():
            return None
        words = {_letters(word): word for loader in self._loaders for word in loader.words}
        found = difflib.get_close_matches(_letters(text), words, 1, 0.8)
        return f"did you mean {words[found[0]]}?" if found else None


def _letters(word: str) -> str:
    return re.sub(r"[^a-z]", "", word.lower().partition(":")[0])


def _require_loader(loader: Any) -> None:
    """Refuse what does not have the form of a `Loader`."""
    name = type(loader).__name__
    if isinstance(loader, type):
        raise TypeError(f"loader: expected an object, given the class {loader.__name__}")
    expects, words, gives = (getattr(loader, one, None) for one in ("expects", "words", "gives"))
    if not isinstance(expects, str) or not expects:
        raise TypeError(f"{name}.expects: expected what it loads in words, given {shown(expects)}")
    if not isinstance(words, tuple) or not all(isinstance(x, str) and _letters(x) for x in words):
        raise TypeError(f"{name}.words: expected a tuple of words, given {shown(words)}")
    if not isinstance(gives, tuple) or not gives or not all(isinstance(x, type) for x in gives):
        raise TypeError(f"{name}.gives: expected a tuple of types, given {shown(gives)}")
    for method, arguments in (("matches", 1), ("load", 2)):
        try:
            inspect.signature(getattr(loader, method)).bind(*[None] * arguments)
        except (AttributeError, TypeError) as error:
            raise TypeError(
                f"{name}: expected a method {method} of {arguments} arguments: {error}"
            ) from error
    for stranger in (None, 0, object(), object):
        if loader.matches(stranger) is not False:
            raise ValueError(
                f"{name}.matches: expected False of {shown(stranger)}, given "
                f"{shown(loader.matches(stranger))}"
            )


ELEMENTS = Registry()
