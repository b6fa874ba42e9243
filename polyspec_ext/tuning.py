"""Choice of packed or plain weights for a level's model, by timing on this processor.

The faster candidate on one processor is the slower on the next, so candidates are timed for a
moment on the machine that runs them, and the choice is stored for later processes. The level's
logits are those of its model in the named data type, with any choice.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from . import arguments, processor
from .files import cache_folder, replace_text
from .levels import ELEMENTS, InputBlock, Level, ModelSource, Options, PromptBatch, batched
from .levels.fused import can_pack
from .levels.models import is_sharded
from .levels.products import QuantizedLinear, TrimmedHead
from .levels.sources import level_class
from .tensors import RowCounts

_Level = TypeVar("_Level", bound=Level)
Switch = bool | Literal["auto"]
REPEATS, CONTEXT = 12, 64
LIMIT = 1.0  # seconds after which passes are not repeated; each is measured at least twice
# A candidate must be faster by this share than the earlier candidates: less is within the noise,
# and the earlier candidates are simpler.
MARGIN = 0.03
# Under load from other processes times do not repeat, or are longer than on any processor.
_REPEATS = 1.5  # greatest plausible ratio of two measurements
_LONGEST = (0.1, 1e-8)  # greatest plausible seconds: per pass, and per byte of weights and token
SCHEMA = 5  # version of stored choices and of the timed products
# Fields of a configuration that do not change the cost of a pass, or belong to a candidate.
_ASIDE = ("_name_or_path", "dtype", "torch_dtype", "transformers_version")


# ---- a store -------------------------------------------------------------------------------------


class Store:
    """A store of values by key, shared between processes; both are JSON objects.

    A value is in a file of `folder`, which is named by a digest of its key and replaced as a whole,
    so that any number of processes may read and write at once. Without a readable and writable
    folder, values are in memory only.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._known: dict[str, Any] = {}

    def get(self, key: Mapping[str, Any]) -> Any | None:
        """Return the value of `key`, or None."""
        name = _digest(key)
        if name not in self._known and self.folder is not None:
            try:
                held = json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
                if held["key"] == key:
                    self._known[name] = held["value"]
            except (OSError, ValueError, KeyError, TypeError):
                return None
        return self._known.get(name)

    def put(self, key: Mapping[str, Any], value: Any) -> None:
        """Store `value`, replacing an older value."""
        name = _digest(key)
        self._known[name] = value
        if self.folder is None:
            return
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"key": key, "value": value}, indent=1)
            replace_text(self.folder / f"{name}.json", text)

    def clear(self) -> None:
        """Remove all values; files that cannot be removed stay."""
        self._known.clear()
        for file in [] if self.folder is None else list(self.folder.glob("*.json")):
            with contextlib.suppress(OSError):
                file.unlink()


def _digest(key: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


def default_store() -> Store:
    """Return the store in the user's cache folder, below ``polyspec_ext/levels``."""
    folder = cache_folder()
    return _store(folder and folder / "levels")


@functools.cache
def _store(folder: Path | None) -> Store:
    return Store(folder)  # cached, so that the process keeps values that cannot be written


# ---- times ---------------------------------------------------------------------------------------


def pass_seconds(
    levels: Sequence[Level],
    widths: Sequence[int],
    *,
    repeats: int = REPEATS,
    limit: float = LIMIT,
    clock: Callable[[], float] | None = None,
) -> list[dict[int, float]]:
    """Time passes of a single sequence through each level, in turns, so that a change in the
    machine's load affects all levels. A pass has `CONTEXT` cached tokens, fewer if a level has no
    room for them. The levels begin another batch and are left in it.

    Args:
        levels: timed in turns.
        widths: numbers of tokens of a pass, >= 1 each.
        repeats: number of turns, after an untimed turn.
        limit: seconds for each of `levels`; once they are over, the turns end after the second.
        clock: seconds from any origin. None: wall time; if torch has a single thread, its processor
            time, which does not run while other processes have the processor.

    Returns:
        by level and width, the seconds of the fastest pass: other processes only add time.
    """
    if not levels or not widths or min(widths) < 1 or repeats < 1:
        counts = f"{len(levels)} levels, widths {list(widths)} and {repeats} repeats"
        raise ValueError(f"expected levels, widths >= 1 and repeats >= 1, given {counts}")
    devices = [torch.device(getattr(level, "device", "cpu")) for level in levels]
    if clock is None:
        on_cpu = all(device.type == "cpu" for device in devices)
        alone = torch.get_num_threads() == 1 and on_cpu
        clock = time.thread_time if alone else time.perf_counter
    fastest: list[dict[int, float]] = [{} for _ in levels]
    longest = max(widths)
    rooms = [getattr(level, "max_length", None) for level in levels]
    context = max(min([CONTEXT, *(room - longest for room in rooms if room is not None)]), 0)
    blocks, called = [], [batched(level) for level in levels]
    for level, device in zip(called, devices, strict=True):
        tokens = torch.arange(context + longest, device=device)
        blocks.append((tokens % level.vocab_size)[None])
        level.prefill(PromptBatch(blocks[-1][:, :context], None, context + longest))
    lengths = RowCounts([context])
    began = clock()
    for turn in range(repeats + 1):
        if turn == 1:  # the untimed turn is over
            began = clock()
        elif turn > 2 and clock() - began > limit * len(levels):
            break
        for width in widths:
            for first in range(len(levels)):
                number = (first + turn) % len(levels)
                level, tokens = called[number], blocks[number][:, context : context + width]
                started = clock()
                level.forward(InputBlock(tokens, width))
                seconds = clock() - started
                level.rollback(lengths)
                if turn > 0:
                    fastest[number][width] = min(fastest[number].get(width, seconds), seconds)
    return fastest


def widths_of(window: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the tokens per pass of each level of a chain, target first: 1 to decode or draft, and
    window + 1 to verify."""
    return [*((1, size + 1) if size else (1,) for size in window), (1,)]


# ---- a choice ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LevelConfig:
    """Data type of a level's model, and `pack` of `HuggingFaceLevel`."""

    dtype: torch.dtype
    pack: bool = False

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.") + " packed" * self.pack


@dataclass(frozen=True)
class Choice:
    """The fastest candidate, and the seconds of a pass by candidate and number of tokens (empty for
    a single candidate). `cached`: measured earlier; `steady`: the times are plausible and repeated,
    so that they were stored."""

    config: LevelConfig
    seconds: Mapping[LevelConfig, Mapping[int, float]]
    cached: bool = False
    steady: bool = True

    def __str__(self) -> str:
        if not self.seconds:
            return f"{self.config} (as given)"
        texts = [
            f"{config} " + "/".join(f"{value * 1e3:.2f}" for value in times.values())
            for config, times in self.seconds.items()
        ]
        sizes = "/".join(map(str, next(iter(self.seconds.values()))))
        when = "measured earlier" if self.cached else "measured now"
        when += "" if self.steady else ", not kept: the machine is busy"
        return f"{self.config} (ms per pass of {sizes} tokens, {when}: {', '.join(texts)})"


def choose(
    make: Callable[[LevelConfig], _Level],
    candidates: Sequence[LevelConfig],
    widths: Sequence[int],
    *,
    shape: str = "",
) -> tuple[_Level, Choice]:
    """Build the level with the least time of passes, summed over a pass of each width.

    Everything is timed twice. The choice is stored in `default_store`, by processor, instruction
    sets, threads, versions and the arguments, if both times agree and are plausible. Candidates for
    which `make` or the first passes raise an error are left out, unless none is left. `candidates`
    are in order, the simplest first; a later candidate must be faster by `MARGIN`. `shape`
    identifies models by the cost of their passes.
    """
    if len(candidates) == 1:
        return make(candidates[0]), Choice(candidates[0], {})
    store = default_store()
    key = {"schema": SCHEMA, **processor.facts(), "shape": shape, "widths": list(widths)}
    key["candidates"] = [str(config) for config in candidates]
    known = _read(store.get(key), candidates)
    if known is not None:
        with contextlib.suppress(ValueError, RuntimeError):  # `make` may fail by now
            return make(known.config), known
    processor.note_load()
    levels: dict[LevelConfig, _Level] = {}
    errors: list[Exception] = []
    for config in candidates:
        try:
            level = make(config)
            pass_seconds([level], widths, repeats=1)
            levels[config] = level
        except Exception as error:  # e.g. by oneDNN: try the next candidate
            errors.append(error)
    if not levels:
        raise errors[-1]
    twice = [pass_seconds(list(levels.values()), widths, repeats=REPEATS // 2) for _ in range(2)]
    first, second = (dict(zip(levels, times, strict=True)) for times in twice)
    seconds = {
        config: {width: min(first[config][width], second[config][width]) for width in widths}
        for config in levels
    }
    best = _best(seconds)
    steady = _best(first) == _best(second) == best and all(
        abs(math.log(first[config][width] / second[config][width])) < math.log(_REPEATS)
        and seconds[config][width] < _longest(level, width)
        for config, level in levels.items()
        for width in widths
    )
    if steady:
        measured = {str(config): times for config, times in seconds.items()}
        store.put(key, {"chosen": str(best), "measured": measured})
    return levels[best], Choice(best, seconds, steady=steady)


def _best(seconds: Mapping[LevelConfig, Mapping[int, float]]) -> LevelConfig:
    best, *later = seconds
    for config in later:
        if sum(seconds[config].values()) < (1 - MARGIN) * sum(seconds[best].values()):
            best = config
    return best


def _longest(level: Level, width: int) -> float:
    model = getattr(level, "model", None)
    if not isinstance(model, torch.nn.Module):
        return math.inf
    size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    return _LONGEST[0] + _LONGEST[1] * size * width


def _read(value: Any, candidates: Sequence[LevelConfig]) -> Choice | None:
    """Return the stored choice; None if `value` has another form."""
    configs = {str(config): config for config in candidates}
    try:
        seconds = {
            configs[name]: {int(width): float(duration) for width, duration in times.items()}
            for name, times in value["measured"].items()
        }
        return Choice(configs[value["chosen"]], seconds, cached=True)
    except (TypeError, ValueError, KeyError, AttributeError):
        return None


# ---- a level -------------------------------------------------------------------------------------


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
    """Load an element of a chain (`levels.ELEMENTS`): return a level, or a drafter without a level.

    For a model in float32 on the CPU, "auto" is decided by timing (`choose`); the level's `choice`
    has the decision and the times. Models in other data types are packed if they can be: packed
    products round differently there, and a clock should not decide a text. With a target that is
    sharded over processes, which must decide alike, nothing is timed either. On CUDA "auto" packs
    bfloat16 models with layers that are fused there. A level is returned unchanged, as is the level
    of a model with a cache that other levels share.

    Args:
        widths: numbers of tokens of the level's passes.
        dtype: data type of a model loaded here. "auto" and None: as for `levels.load`. But on the
            CPU None is bfloat16 for a checkpoint in bfloat16, if the processor has products of it;
            for a target also the packed level's logits must not depend on the tokens beside a
            token (`HuggingFaceLevel.varies`); else None is float32.
        name: name of `thing` in messages.
        above: the levels above it, target first.

    Raises:
        ValueError: `pack` is not True, False or "auto".
        TypeError, ValueError: as for `Registry.resolve`.
    """
    arguments.switch("pack", pack)
    chooses = isinstance(pack, str) or (pack and dtype is None and isinstance(thing, str | Path))
    timed = not any(map(is_sharded, (thing, *above[:1])))
    fastest = partial(_fastest, widths, dtype, pack, timed, bool(above)) if chooses else None
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
    """Return the fastest level that can be built from a model on the CPU. Not `timed`: a packed
    level if possible."""
    loaded, models, plain = source.model, {}, None
    kind: Any

    def model_in(dtype: torch.dtype | str | None) -> Any:
        if dtype not in models:
            models[dtype] = source.level(dtype, False).model
        return models[dtype]

    if loaded is None:
        config = source.config()
        if config.is_encoder_decoder:  # a single candidate
            return source.level(dtype, False)
        # A configuration without a data type: loading determines "auto".
        if dtype == "auto":
            dtype = config.dtype or model_in("auto").dtype
        half = config.dtype == torch.bfloat16 and pack and processor.multiplies_bfloat16()
        kind = dtype or (torch.bfloat16 if half else torch.float32)
    else:
        plain = source.level(None, False)
        if not plain.reads_apart:
            return plain
        config, dtype = loaded.config, loaded.dtype
        models[dtype] = loaded
        kind = dtype

    def make(config: LevelConfig) -> Any:
        if plain is not None and not config.pack:
            return plain
        model = model_in(config.dtype)
        return level_class(model)(model, pack=config.pack)

    def chosen(*packs: bool) -> Any:
        candidates = [LevelConfig(kind, packed) for packed in packs]
        shape = _shape(config, () if loaded is None else loaded.modules())
        level, choice = choose(make, candidates, widths, shape=shape)
        level.choice = choice
        return level

    if dtype is None and kind == torch.bfloat16:
        # A target's logits must not depend on the width of a pass, or its text would.
        with contextlib.suppress(ValueError):
            level = chosen(True)
            if drafts or level.varies == ():
                return level
        models.clear()
        kind = torch.float32
    if pack != "auto":
        return chosen(pack)
    by_clock = timed and kind == torch.float32
    # There is no choice if all layers have 4-bit weights.
    if (loaded is None and by_clock) or can_pack(model_in(kind)):
        if by_clock:
            return chosen(False, True)
        with contextlib.suppress(ValueError, RuntimeError):  # oneDNN may fail to pack
            return chosen(True)
    return chosen(False)


def _shape(config: Any, modules: Iterable[torch.nn.Module]) -> str:
    facts = {key: value for key, value in config.to_dict().items() if key not in _ASIDE}
    for module in modules:
        if isinstance(module, QuantizedLinear):
            facts["int4"] = facts.get("int4", 0) + 1
        elif isinstance(module, TrimmedHead):
            facts["drawn"] = len(module.drawn)
    return hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()[:16]
