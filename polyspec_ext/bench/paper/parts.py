"""The models of a run, by the names that they have in the keys of methods."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from polyspec_ext import progress, tiny
from polyspec_ext.bench import chains
from polyspec_ext.bench.paper.engines import Engine, Variant
from polyspec_ext.bench.weights import parameters
from polyspec_ext.drafters import (
    DynamicTree,
    Eagle,
    Hydra,
    NGramTable,
    PromptLookup,
    SuffixMatch,
)
from polyspec_ext.levels import HuggingFaceLevel, load, tokenizer_at
from polyspec_ext.quantization.stored import copy_prefix, original
from polyspec_ext.tuning import level_for

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


@dataclass(frozen=True)
class Tree:
    """How a head drafts: `DynamicTree` as deep as `depth`; None: a chain."""

    top_k: int = 10
    total_tokens: int = 60
    depth: int = 6

    def to_dict(self) -> dict[str, int]:
        return {"top_k": self.top_k, "total_tokens": self.total_tokens, "depth": self.depth}


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
    """

    target: str | Path | None = None
    models: Mapping[str, str | Path] = field(default_factory=dict)
    heads: Mapping[str, str | Path] = field(default_factory=dict)
    tree: Tree | None = None
    times: int = 1
    w4: Path | None = None
    engines: Sequence[Engine] = ()

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
    shape = chains.SHAPE
    return Places(None, models, heads, Tree(shape.top_k, shape.total_tokens, 5), times, w4)


class Parts:
    """Levels and drafters, each made when it is first asked for.

    Args:
        places: what to load.
        device, dtype: of the models; None: the target's as `levels.load` has it, but float32 of the
            shipped one on the CPU; of draft levels there, and of a target that is grown, what is
            fastest.
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
        self._made: dict[str, Any] = {}
        self._assistants: dict[str, Any] = {}
        self._heads: set[str] = set()

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._made:
            made = make()
            if isinstance(made, HuggingFaceLevel):
                made.name = name.removeprefix("eager ").removeprefix("compiled ")
            self._made[name] = made
        return self._made[name]

    @property
    def on_cpu(self) -> bool:
        return torch.device(self.device).type == "cpu"

    @property
    def eager(self) -> HuggingFaceLevel:
        """The target, not compiled."""
        level: HuggingFaceLevel = self._once(f"eager {TARGET}", self._load_target)
        return level

    @property
    def compiled(self) -> HuggingFaceLevel:
        """The target, compiled: the same model."""
        level: HuggingFaceLevel = self._once(f"compiled {TARGET}", self._compile_target)
        return level

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
        place = self.places.target or tiny.path(TARGET)
        try:
            return tokenizer_at(original(place))
        except ValueError as error:
            raise ValueError(f"--target: {error}") from error

    def _load_target(self) -> Any:
        place = self.places.target
        if place is None and self.places.times > 1:
            if self.dtype is None and self.on_cpu:
                return chains.faster_target(times=self.places.times)[0]
            model = tiny.grown(self.places.times, dtype=self.dtype, device=self.device)
            return level_for(model, _WIDTHS, pack="auto", compile=False, name="--target")
        dtype = (
            torch.float32 if self.dtype is None and self.on_cpu and place is None else self.dtype
        )
        with progress.loading():
            return level_for(
                place or tiny.path(TARGET),
                _WIDTHS,
                [dtype],
                self.device,
                pack="auto",
                compile=False,
                name="--target",
            )

    def _compile_target(self) -> Any:
        return _compiled(self.eager)

    def model(self, name: str) -> HuggingFaceLevel:
        """A draft level, or the 4-bit copy."""
        make = self._quantised if name == W4 else lambda: self._load_model(name)
        level: HuggingFaceLevel = self._once(name, make)
        return level

    def _load_model(self, name: str) -> Any:
        dtypes = [self.dtype]
        if self.dtype is None and self.on_cpu:
            dtypes.append(torch.bfloat16)
        with progress.loading():
            level = level_for(
                self.places.models[name],
                _WIDTHS,
                dtypes,
                self.device,
                pack="auto",
                compile=False,
                name=f"--draft {name}",
            )
        return _compiled(level) if self.compile and self.on_cpu else level

    def _quantised(self) -> Any:
        def texts() -> list[torch.Tensor] | None:
            if self.places.target is not None:
                return None
            grown = self.places.times > 1
            same = load(tiny.path(TARGET)).model if grown else self.eager.model
            return chains.calibration_texts(same)

        copy = chains.w4_copy(self.eager.model, self.places.w4, texts)
        return self._over(copy, shares_cache_with=self.target)

    def _over(self, copy: Any, **options: Any) -> HuggingFaceLevel:
        make = chains.packed if self.on_cpu else HuggingFaceLevel
        return make(copy, name=W4, **options)

    def apart(self, name: str) -> HuggingFaceLevel:
        """A draft level with a cache of its own, to be timed alone."""
        level = self.model(name)
        return level if level.reads_apart else self._over(level.model)

    def drafter(self, name: str) -> Any:
        """A drafter without a model, or a head: a new one, since it keeps what it has read."""
        made = WORDS[name]() if name in WORDS else self._head(name)
        made.name = name
        return made

    @property
    def _head_dtype(self) -> torch.dtype:
        """As the cheapest draft model was found to run fastest, where there is one on the CPU."""
        models = list(self.places.models)
        level = self.model(models[-1]) if models and self.on_cpu else self.eager
        dtype: torch.dtype = level.model.dtype
        return dtype

    def _head(self, name: str) -> Any:
        base, shape = name.removesuffix(AS_CHAIN), self.places.tree_of(name)
        self._heads.add(base)
        tree = None if shape is None else DynamicTree(shape.top_k, shape.total_tokens)
        if base == HYDRA:
            place = self.places.heads[base]
            return Hydra.from_pretrained(place, self.target, tree=tree, dtype=self._head_dtype)
        with tempfile.TemporaryDirectory() as folder:
            place = self.places.heads[base]
            if self.places.times > 1:
                place = tiny.grown_head(base, self.places.times, folder)
            return Eagle.from_pretrained(place, self.target, tree=tree, dtype=self._head_dtype)

    def thing(self, name: str) -> Any:
        """An element of a chain."""
        if name == TARGET:
            return self.target
        return self.drafter(name) if name in self.places.drafters else self.model(name)

    def assistant(self, name: str) -> Any:
        """A draft model for transformers, in the target's data type."""
        level, dtype = self.model(name), self.eager.model.dtype
        if level.model.dtype == dtype:
            return level.model
        if name not in self._assistants:
            with progress.loading():
                self._assistants[name] = load(self.places.models[name], dtype, self.device).model
        return self._assistants[name]

    def _parameters(self, level: HuggingFaceLevel) -> int:
        return parameters(self.eager.model if level.name == W4 else level.model)

    def facts(self) -> Iterator[dict[str, Any]]:
        """What was made, for ``run.json``; names no path."""
        for key, made in self._made.items():
            if isinstance(made, HuggingFaceLevel):
                given = self.places.models.get(made.name) or self.places.target
                words = ["packed"] * made.pack + ["compiled"] * made.compile
                yield {
                    "name": key,
                    "place": _shown(given, made.name, self.places.times),
                    "parameters": self._parameters(made),
                    "dtype": str(made.model.dtype).removeprefix("torch."),
                    "runs": " ".join(words) or "as it is",
                }
        for name in sorted(self._heads):
            place = self.places.heads[name]
            # As the target does.
            words = ["packed"] * self.target.pack + ["compiled"] * self.target.compile
            yield {
                "name": name,
                "place": _shown(place, name, self.places.times),
                "parameters": None,
                "dtype": str(self._head_dtype).removeprefix("torch."),
                "runs": " ".join(words) or "as it is",
            }


def _compiled(level: Any) -> Any:
    """The same model, packed where it was found to be faster without compilation: to compile every
    candidate would take minutes."""
    return level_for(level.model, _WIDTHS, pack=level.pack, compile=True, name=level.name)


def _shown(place: str | Path | None, name: str, times: int) -> str:
    if place is None or Path(place).parent == tiny.root():
        grown = f", grown {times} times" if times > 1 and name in (TARGET, W4, *HEADS) else ""
        return f"shipped {TARGET if name == W4 else name}{grown}"
    folder = Path(original(place))
    return f"{copy_prefix(place)}{folder.name}" if folder.exists() else str(place)
