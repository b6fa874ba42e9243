"""The models of a run, by the names that they have in the keys of methods."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import chains
from benchmarks.weights import parameters
from polyspec_ext import progress, tiny
from polyspec_ext.drafters import DynamicTree, Eagle, Hydra, NGramTable, PromptLookup, SuffixMatch
from polyspec_ext.levels import HuggingFaceLevel, load_model, tokenizer_at
from polyspec_ext.quantization.stored import copy_prefix, original
from polyspec_ext.tuning import level_for

from .engines import Engine, Variant

TARGET, W4 = "target", "w4"
EAGLE2, EAGLE3, HYDRA = "eagle2", "eagle3", "hydra"
HEADS = (EAGLE2, EAGLE3, HYDRA)
AS_CHAIN = "-chain"  # behind an EAGLE head's name: it drafts one token behind the other
WORDS: dict[str, Callable[[], Any]] = {
    "prompt-lookup": PromptLookup,
    "suffix": SuffixMatch,
    "ngram": NGramTable,
}
_WIDTHS = (1, 6)  # tokens of the passes by which it is chosen how a level runs


class Tree(NamedTuple):
    """How a head drafts: `DynamicTree` as deep as `depth`."""

    top_k: int = 10
    total_tokens: int = 60
    depth: int = 6


@dataclass(frozen=True)
class Places:
    """What to load.

    Attributes:
        target: directory or id; None: the shipped target.
        models: of draft levels by name, the dearest first.
        heads: of `HEADS`, by name; of the shipped models they grow with the target.
        tree: how the heads draft.
        times: how many times as wide the shipped target is made (`tiny.grown`).
        w4: directory where the 4-bit copy is kept; None: it is made anew.
        engines: others that answer as well.
        functions: that make the user's methods, by name (`methods.user_call`).
    """

    target: str | Path | None = None
    models: Mapping[str, str | Path] = field(default_factory=dict)
    heads: Mapping[str, str | Path] = field(default_factory=dict)
    tree: Tree | None = None
    times: int = 1
    w4: Path | None = None
    engines: Sequence[Engine] = ()
    functions: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Of all that can stand below the target."""
        return [W4, *self.models, *self.drafters]

    @property
    def drafters(self) -> list[str]:
        """Of what can only be the last: heads, drafting trees or chains, and words."""
        chains = [name + AS_CHAIN for name in self.heads if name != HYDRA]
        return [*self.heads, *chains, *WORDS]

    @property
    def variants(self) -> dict[str, tuple[Engine, Variant]]:
        """What other engines do, by key."""
        return {own.key: (engine, own) for engine in self.engines for own in engine.variants}

    def tree_of(self, name: str) -> Tree | None:
        """How a level drafts; None: no tree."""
        return self.tree if name in self.heads else None


def shipped(times: int = 1, w4: Path | None = None) -> Places:
    """The shipped models."""
    models = {name: tiny.path(name) for name in tiny.LEVELS[1:]}
    heads = {name: tiny.root() / name for name in tiny.HEADS}
    # (Models that somebody trained without a head are as good.)
    heads = {name: place for name, place in heads.items() if place.is_dir()}
    # A pass of many tokens is dear on a CPU: a small tree.
    tree = Tree(chains.SHAPE.top_k, chains.SHAPE.total_tokens, 5)
    return Places(None, models, heads, tree, times, w4)


class Parts:
    """Levels and drafters, each made when it is first asked for.

    Args:
        places: what to load.
        device, dtype: of the models; None: as `tuning.level_for` has it, but float32 of the shipped
            target on the CPU; of one that is grown, what is fastest.
        compile: on the CPU the target and the draft levels decode through `torch.compile`.
    """

    def __init__(
        self,
        places: Places,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        compile: bool = False,
    ) -> None:
        self.places, self.device, self.dtype, self.compile = places, device, dtype, compile
        self.on_cpu = torch.device(device).type == "cpu"
        self._levels: dict[str, HuggingFaceLevel] = {}
        self._assistants: dict[str, Any] = {}
        self._heads: set[str] = set()

    def _once(self, key: str, make: Callable[[], Any]) -> HuggingFaceLevel:
        if key not in self._levels:
            self._levels[key] = make()
            self._levels[key].name = key.split(" ")[-1]
        return self._levels[key]

    @property
    def eager(self) -> HuggingFaceLevel:
        """The target, not compiled."""
        return self._once(f"eager {TARGET}", self._load_target)

    @property
    def compiled(self) -> HuggingFaceLevel:
        """The target, compiled: the same model."""
        return self._once(f"compiled {TARGET}", lambda: _compiled(self.eager))

    @property
    def target(self) -> HuggingFaceLevel:
        """The target of the chains. (On CUDA their passes are captured, not compiled.)"""
        return self.compiled if self.compile and self.on_cpu else self.eager

    @property
    def tokenizer(self) -> Any:
        """Of the target.

        Raises:
            ValueError: none lies beside it.
        """
        try:
            return tokenizer_at(original(self.places.target or tiny.path(TARGET)))
        except ValueError as error:
            raise ValueError(f"--target: {error}") from error

    def _load_target(self) -> Any:
        shipped, times = self.places.target is None, self.places.times
        if times > 1:
            if self.dtype is None and self.on_cpu:
                return chains.faster_target(times=times)[0]
            model = tiny.grown(times, dtype=self.dtype, device=self.device)
            return _level(model, name="--target")
        dtype = torch.float32 if self.dtype is None and self.on_cpu and shipped else self.dtype
        place = self.places.target or tiny.path(TARGET)
        return _level(place, dtype, self.device, name="--target")

    def model(self, name: str) -> HuggingFaceLevel:
        """A draft level, or the 4-bit copy."""
        return self._once(name, self._quantised if name == W4 else lambda: self._load_model(name))

    def _load_model(self, name: str) -> Any:
        place = self.places.models[name]
        level = _level(place, self.dtype, self.device, name=f"--draft {name}")
        return _compiled(level) if self.compile and self.on_cpu else level

    def _quantised(self) -> HuggingFaceLevel:
        def texts() -> list[torch.Tensor] | None:
            if self.places.target is not None:
                return None
            grown = self.places.times > 1
            same = load_model(tiny.path(TARGET)) if grown else self.eager.model
            return chains.calibration_texts(same)

        copy = chains.w4_copy(self.eager.model, self.places.w4, texts)
        return chains.packed(copy, name=W4, shares_cache_with=self.target)

    def apart(self, name: str) -> HuggingFaceLevel:
        """A draft level with a cache of its own, to be timed alone."""
        level = self.model(name)
        return level if level.reads_apart else chains.packed(level.model, name=W4)

    def thing(self, name: str) -> Any:
        """An element of a chain; a drafter is a new one, since it keeps what it has read."""
        if name == TARGET:
            return self.target
        if name not in self.places.drafters:
            return self.model(name)
        made = WORDS[name]() if name in WORDS else self._head(name)
        made.name = name
        return made

    @property
    def _head_dtype(self) -> torch.dtype:
        """As the cheapest draft model runs, where there is one on the CPU."""
        models = list(self.places.models)
        level = self.model(models[-1]) if models and self.on_cpu else self.eager
        dtype: torch.dtype = level.model.dtype
        return dtype

    def _head(self, name: str) -> Any:
        base, shape = name.removesuffix(AS_CHAIN), self.places.tree_of(name)
        self._heads.add(base)
        tree = None if shape is None else DynamicTree(shape.top_k, shape.total_tokens)
        kind, place = Hydra if base == HYDRA else Eagle, self.places.heads[base]
        with tempfile.TemporaryDirectory() as folder:
            if self.places.times > 1:
                place = tiny.grown_head(base, self.places.times, folder)
            return kind.from_pretrained(place, self.target, tree=tree, dtype=self._head_dtype)

    def assistant(self, name: str) -> Any:
        """A draft model for transformers, in the target's data type."""
        level, dtype = self.model(name), self.eager.model.dtype
        if level.model.dtype == dtype:
            return level.model
        if name not in self._assistants:
            with progress.loading():
                self._assistants[name] = load_model(self.places.models[name], dtype, self.device)
        return self._assistants[name]

    def facts(self) -> Iterator[dict[str, Any]]:
        """What was made, for ``run.json``; names no path."""

        def fact(name: str, level: HuggingFaceLevel, **more: Any) -> dict[str, Any]:
            words = ["packed"] * level.pack
            return {"name": name, **more, "runs": " ".join(words) or "as it is"}

        times = self.places.times
        for key, level in self._levels.items():
            place = self.places.models.get(level.name) or self.places.target
            yield fact(
                key,
                level,
                place=_shown(place, level.name, times),
                parameters=parameters(self.eager.model if level.name == W4 else level.model),
                dtype=str(level.model.dtype).removeprefix("torch."),
            )
        for name in sorted(self._heads):  # which run as the target does
            place, dtype = _shown(self.places.heads[name], name, times), str(self._head_dtype)
            dtype = dtype.removeprefix("torch.")
            yield fact(name, self.target, place=place, parameters=None, dtype=dtype)


def _level(thing: Any, *options: Any, name: str) -> Any:
    with progress.loading():
        return level_for(thing, _WIDTHS, *options, pack="auto", name=name)


def _compiled(level: HuggingFaceLevel) -> Any:
    return level


def _shown(place: str | Path | None, name: str, times: int) -> str:
    if place is None or Path(place).parent == tiny.root():
        grown = f", grown {times} times" if times > 1 and name in (TARGET, W4, *HEADS) else ""
        return f"shipped {TARGET if name == W4 else name}{grown}"
    folder = Path(original(place))
    return f"{copy_prefix(place)}{folder.name}" if folder.exists() else str(place)
