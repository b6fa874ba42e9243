"""Requests of a plan, elements of its chains, and measurements on the user's prompts: the target's
texts, seconds of steps and prefills in chains, and acceptance between every two levels.

Acceptance comes from the distributions of all levels along the target's texts: one pass per level
and text covers every window (`theory`).
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from .. import arguments, progress
from ..arguments import Switch
from ..chain import Chain
from ..drafters import Context, Drafter, DraftModel, elements, is_drafter, resolve
from ..drafters.words import head_of, is_copy, original
from ..inputs import Ends, Parameters
from ..levels import InputBlock, Level, Options, PromptBatch, batched
from ..levels.base import id_map_of
from ..sampling import Sampling, fresh_seed, processed_scores
from ..stats import LevelStats, Stats, merge
from ..tensors import RowCounts
from .theory import Acceptance, Floats, Proposals, batches

WINDOWS = (1, 3, 7, 14)  # of the lowest level in timed chains
MOST = 16  # tokens of a draft
MOST_ABOVE = 2 * (MOST + 1)  # the largest window of a level above the lowest
LEAST = 4  # rounds of a call that is cut short
_REPEATS = 2  # of every call, if there is time
_BOUNDS = 2  # turns of `measure` that run however long they take: largest and smallest windows
_WARMING = 0.25  # share of the time for untimed calls
_TIMED = 0.6  # share of the time for timed calls; the rest is for texts of further prompts
_ALIKE = 64  # rounds at which a chain's trial weighs as much as the mean of all trials
# Prefixes, then a path, an id or a word.
_WORDS = r"w4:|eagle:|dflash:|mtp:|translated:|(?:trim|paths):\d+:"
_SOURCE = re.compile(rf"((?:{_WORDS})*)(.*)")
_TURNS, _CONTEXT = 12, 64  # of `pass_seconds`
_LIMIT = 1.0  # seconds after which its passes are not repeated; each is measured at least twice
_MANY_IDS = 32000  # vocabulary size from which a draft with a trimmed vocabulary is tried
_SHARE = 4  # a trimmed vocabulary has 1 / _SHARE of the ids
_Pair = tuple[int, int]
_Prompt = TypeVar("_Prompt", bound=Sequence[int])


# ---- requests, and the elements of their chains --------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """The requests of a plan, in calls of `batch` prompts; `seed` is that of the first measured
    call."""

    max_new_tokens: int = 128
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.0))
    seed: int = 0
    eos_token_id: Ends | None = None
    batch: int = 1

    @classmethod
    def of(cls, max_new_tokens: int, batch: int, options: Parameters) -> Workload:
        """Return the requests of arguments of `plan`, checked."""
        given: dict[str, Any] = {"temperature": 0.0, "seed": 0, **options}
        seed, eos_token_id = given.pop("seed"), given.pop("eos_token_id", None)
        return cls(
            arguments.integer("max_new_tokens", max_new_tokens, low=2),
            Sampling(**given),
            arguments.integer("seed", fresh_seed() if seed is None else seed, arguments.SEED_MAX),
            eos_token_id,
            arguments.integer("batch", batch, arguments.SIZE_MAX, 1),
        )

    def options(self, number: int = 0) -> dict[str, Any]:
        """Return the arguments of `Chain.generate` for measured call `number`: its seed differs."""
        own = {"max_new_tokens": self.max_new_tokens, "eos_token_id": self.eos_token_id}
        return {**own, **asdict(self.sampling), "seed": (self.seed + number) % 2**64}


@dataclass(frozen=True)
class Part:
    """An element of the compared chains: a `Level` (`model`) or a drafter, a name for reports, and
    its path, id or word (None: it is a Python object)."""

    thing: Any
    name: str
    model: bool
    word: str | None = None

    @property
    def source(self) -> str:
        """Path, id or word of the element; a path is absolute."""
        match = _SOURCE.fullmatch(str(self.word))
        assert match is not None
        drafts = self.reads_states or isinstance(self.thing, DraftModel)
        loads = (self.model and self.reads_apart) or drafts  # else a drafter's word
        path = Path(match[2])
        return match[1] + str(path.absolute() if loads and path.exists() else match[2])

    @property
    def reads_apart(self) -> bool:
        """Whether its distributions can be computed along a text. The acceptance of a level in
        another level's cache is known from rounds only."""
        return bool(getattr(self.thing, "reads_apart", True))

    @property
    def trees(self) -> bool:
        """Whether it drafts trees: their verification is timed apart from that of blocks."""
        return self._drafts("trees")

    @property
    def reads_states(self) -> bool:
        """Whether it drafts from the hidden states of the level above."""
        return self._drafts("hidden_layers")

    def _drafts(self, capability: str) -> bool:
        capabilities = getattr(self.thing, "capabilities", None)
        return not self.model and bool(getattr(capabilities, capability, None))

    def drafts_below(self, above: Part, target: Part) -> bool:
        """Return whether it can draft for the level `above`: trees need a level that verifies
        trees; hidden states come from the target, or a copy in the target's cache."""
        if self.trees and not batched(above.thing).capabilities.trees:
            return False
        return not self.reads_states or above == target or not above.reads_apart


def owners_above(parts: Sequence[Part]) -> bool:
    """Return whether the owner of every shared cache is above the levels that share it."""
    levels = [element.thing for element in parts if element.model]
    owners = [getattr(level, "cache_owner", level) for level in levels]
    return all(
        any(owner is above for above in levels[: number + 1]) for number, owner in enumerate(owners)
    )


def considered(levels: Sequence[Any]) -> list[str]:
    """Return the elements that `plan(consider=True)` adds to `levels` (target first), as words."""
    words = ["prompt-lookup", "suffix", "w4"]  # the fastest to load first
    if isinstance(levels[0], str | Path) and Path(levels[0]).is_dir():
        words.insert(2, "mtp")
    for thing in levels[1:]:
        size = _vocabulary(original(thing))
        if size is not None:
            words += [] if is_copy(thing) else [f"w4:{thing}"]
            if size >= _MANY_IDS:
                words.append(f"trim:{size // _SHARE}:{thing}")
    return [word for word in words if word not in levels]


def _vocabulary(thing: Any) -> int | None:
    if not isinstance(thing, str | Path) or head_of(thing):
        return None
    try:
        config = json.loads((Path(thing) / "config.json").read_text(encoding="utf-8"))
        return int(config["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def load(thing: Any, name: str, above: Sequence[Any], pack: Switch) -> Part:
    """Load an element of a chain below the elements `above`; `name` is for errors."""
    thing = resolve(thing, Options(name, above, pack=pack))
    named = str(getattr(thing, "name", type(thing).__name__))
    return Part(thing, named, not is_drafter(thing))


def load_all(levels: Sequence[Any], pack: Switch) -> list[Part]:
    """Load the `levels` of `ps.plan`."""
    parts: list[Part] = []
    for number, thing in enumerate(elements(levels)):
        name, loads = f"levels[{number}]", isinstance(thing, str | Path)
        if loads:
            progress.note(f"plan: loading {thing}")
        element = load(thing, name, [element.thing for element in parts], pack)
        if not element.model and number == 0:
            raise TypeError(f"{name}: expected a model, given {type(element.thing).__name__}")
        parts.append(replace(element, word=str(thing)) if loads else element)
    return _named(parts)


def with_considered(
    levels: Sequence[Any], parts: Sequence[Part], pack: Switch, limit: float
) -> list[Part]:
    """Return `parts` of `levels`, and the `considered` elements that can be loaded; no loading
    begins after `limit` seconds."""
    parts, began = list(parts), time.perf_counter()
    words = considered(levels)
    for number, word in enumerate(words):
        if time.perf_counter() - began > limit:
            late = ", ".join(words[number:])
            progress.note(f"plan: no time for {late}; more seconds are more time")
            break
        try:
            progress.note(f"plan: making {word}")
            element = load(word, word, [parts[0].thing], pack)
        except ValueError:  # nothing to quantise, or a target without a cache to share
            continue
        parts.append(replace(element, name=word if element.model else element.name, word=word))
    return _named(parts)


def _named(parts: Sequence[Part]) -> list[Part]:
    names = [element.name for element in parts]
    return [
        member if names.count(member.name) == 1 else replace(member, name=f"{member.name} ({n})")
        for n, member in enumerate(parts)
    ]


def pass_seconds(
    levels: Sequence[Level],
    widths: Sequence[int],
    *,
    repeats: int = _TURNS,
    limit: float = _LIMIT,
    clock: Callable[[], float] | None = None,
) -> list[dict[int, float]]:
    """Time passes of a single sequence through each level, in turns, so that a change in the
    machine's load affects all levels. A pass has `_CONTEXT` cached tokens, fewer if a level has no
    room for them. The levels begin another batch and are left in it.

    Args:
        widths: numbers of tokens of a pass, >= 1 each.
        repeats: number of turns, after an untimed turn.
        limit: seconds for each of `levels`; once they are over, the turns end after the second.
        clock: None: wall time; if torch has a single thread, its processor time, which does not
            run while other processes have the processor.

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
    context = max(min([_CONTEXT, *(room - longest for room in rooms if room is not None)]), 0)
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


def in_order(parts: Sequence[Part]) -> list[Part]:
    """Return the target, the other models from the slowest to the fastest, then the drafters."""
    target, models = parts[0], [element for element in parts[1:] if element.model]
    apart = [element for element in models if element.reads_apart]
    cost = {}
    if len(models) > 1 and apart:
        clock = time.perf_counter  # wall time, as in all measurements of a plan
        times = pass_seconds([element.thing for element in apart], (1,), repeats=6, clock=clock)
        cost = {element.name: seconds[1] for element, seconds in zip(apart, times, strict=True)}
    # A level in the target's cache is a copy of the target: it comes first, untimed.
    models.sort(key=lambda element: -cost.get(element.name, float("inf")))
    return [target, *models, *(element for element in parts[1:] if not element.model)]


# ---- chains at work ------------------------------------------------------------------------------


class Setting(NamedTuple):
    """Arguments of a `Chain`; `parts` are indices of its elements, target first."""

    parts: tuple[int, ...]
    windows: tuple[int, ...] = ()
    rounds: tuple[int, ...] = ()
    tail: int = 0
    rule: str = "token"

    def chain(self, parts: Sequence[Part], **options: Any) -> Chain:
        """Return the `Chain`; `options` are its further arguments."""
        options = {"rounds": self.rounds, "rule": self.rule, "tail": self.tail, **options}
        return Chain([parts[n].thing for n in self.parts], list(self.windows), **options)


class Call(NamedTuple):
    """A measured call."""

    longest: int  # tokens of its longest prompt
    seconds: float
    stats: Stats
    rounds: list[tuple[int, float]]  # tokens and seconds of each
    texts: list[list[int]]  # new tokens of each prompt


@dataclass(frozen=True)
class Runner:
    """A runner of chains of `parts`, which take turns."""

    parts: Sequence[Part]
    prompts: Sequence[Sequence[int]]
    request: Workload

    @functools.cached_property
    def groups(self) -> list[list[list[int]]]:
        """Prompts by call."""
        rows = batches(len(self.prompts), self.request.batch).tolist()
        return [[list(self.prompts[n]) for n in row] for row in rows]

    def run(
        self, settings: Sequence[Setting], repeats: int, limit: float = float("inf"), every: int = 1
    ) -> list[list[Call]]:
        """Run all prompts `repeats` times with each setting, and return the calls by setting.

        Chains take turns, so that a change in the machine's load affects all of them. Once
        `limit` seconds are over, no turn begins after the first (with `every` the second), and one
        chain of the same elements is warmed up. A call that takes longer than its setting's share
        of `limit` is cut short. A bar counts the calls.

        Args:
            every: > 1: the first setting is never cut short, and at each prompt only every
                `every`-th of the other settings runs. A setting without a turn has no call.
        """
        chains = [setting.chain(self.parts) for setting in settings]
        share, turns = limit / len(settings), max(repeats * len(self.groups), every)
        calls: list[list[Call]] = [[] for _ in chains]
        warm: set[tuple[int, ...]] = set()
        total = len(chains) + turns * -(-len(chains) // every)
        with progress.bar(total=total, desc="measuring", unit="call", leave=False) as shown:
            start = time.perf_counter()
            for setting, chain in zip(settings, chains, strict=True):
                over = time.perf_counter() - start > _WARMING * limit
                if not over or setting.parts not in warm:
                    self.call(chain, 0, _WARMING * share, max_new_tokens=16)
                    warm.add(setting.parts)
                shown.update()
            start = time.perf_counter()
            for turn in range(turns):
                over = turn > 0 and time.perf_counter() - start > limit
                if over and turn >= min(every, _BOUNDS):
                    break
                for first in range(len(chains)):
                    at = (first + turn) % len(chains)
                    # The first setting has already run when the time is over.
                    if every > 1 and (over if at == 0 else at % every != turn % every):
                        continue
                    call_limit = share if at > 0 or every == 1 else float("inf")
                    calls[at].append(self.call(chains[at], turn, call_limit))
                    shown.update()
        return calls

    def call(self, chain: Chain, turn: int, limit: float, **options: Any) -> Call:
        """Run a call; after `limit` seconds only its first `LEAST` rounds still begin."""
        prompts = self.groups[turn % len(self.groups)]
        began = time.perf_counter()
        batch = chain.batch(prompts, **{**self.request.options(turn), **options})
        stats, tokens, seconds = batch.stats, 0, 0.0
        rounds: list[tuple[int, float]] = []
        while len(rounds) < LEAST or time.perf_counter() - began <= limit:
            if not batch.advance():
                break
            rounds.append((stats.num_new_tokens - tokens, stats.decode_seconds - seconds))
            tokens, seconds = stats.num_new_tokens, stats.decode_seconds
        spent = time.perf_counter() - began
        pairs = zip(batch.rows, prompts, strict=True)
        texts = [list(row.tokens[len(prompt) :]) for row, prompt in pairs]
        return Call(max(map(len, prompts)), spent, stats, rounds, texts)


def merged(calls: Sequence[Call]) -> Stats:
    return merge([call.stats for call in calls])


def steps_of(stats: Stats, batch: int) -> list[int]:
    """Return the number of steps of each level, counted once per batch: verifications, and drafts
    of the lowest level."""
    *above, lowest = stats.levels
    if batch > 1:
        counts = [level.num_forward_passes for level in above]
        return [*counts, counts[-1] if counts else lowest.num_forward_passes]
    last = lowest.num_proposals if above else lowest.num_verifications
    return [*(level.num_verifications for level in above), last]


def representative(prompts: Sequence[_Prompt], batch: int) -> list[_Prompt]:
    """Return the prompts in an order in which the first calls of `batch` prompts, however many,
    represent the lengths of all prompts. An incomplete call stays last."""
    whole = len(prompts) // batch * batch
    calls = [prompts[n : n + batch] for n in range(0, whole, batch)]
    calls.sort(key=lambda call: max(map(len, call)))
    # Multiples of the golden ratio are spread evenly, whatever their number.
    order = sorted(range(len(calls)), key=lambda n: (0.5 + 0.618034 * n) % 1)
    return [prompt for n in order for prompt in calls[n]] + list(prompts[whole:])


# ---- measurements --------------------------------------------------------------------------------


class Times(NamedTuple):
    """Seconds by number of tokens."""

    seconds: Mapping[int, float]

    def at(self, tokens: float) -> float:
        """Return the seconds, interpolated linearly; extrapolated beyond the largest number."""
        known = sorted(self.seconds)
        if tokens > known[-1] and len(known) > 1:
            low, high = known[-2:]
            slope = (self.seconds[high] - self.seconds[low]) / (high - low)
            return self.seconds[high] + max(slope, 0.0) * (tokens - high)
        return float(np.interp(tokens, known, [self.seconds[n] for n in known]))


def times_of(samples: Iterable[tuple[int, float, int]]) -> Times:
    """Return mean seconds by number of tokens, non-decreasing, from samples of (tokens, seconds,
    number of steps).

    The nearest monotone means (pooling adjacent violators): if more tokens took less time, that was
    chance, and the choice among many windows would select it.
    """
    sums: dict[int, Any] = defaultdict(lambda: np.zeros(2))
    for tokens, seconds, steps in samples:
        sums[tokens] += (seconds, steps)
    pools: list[tuple[Any, list[int]]] = []
    for tokens, total in sorted(sums.items()):
        pooled = [tokens]
        while pools and pools[-1][0][0] * total[1] > total[0] * pools[-1][0][1]:
            before, fewer = pools.pop()
            total, pooled = total + before, fewer + pooled
        pools.append((total, pooled))
    return Times({n: float(total[0] / total[1]) for total, pooled in pools for n in pooled})


class Trial(NamedTuple):
    """A run of a chain with its windows."""

    factor: float  # measured over predicted seconds
    error: float  # relative standard error of the tokens per second
    rounds: int  # of the target


@dataclass
class Measured:
    """Measurements of chain elements, by index (0: the target), in calls of `batch` rows.

    Attributes:
        remaining, room: ``[P]``, as in `theory.Acceptance`.
        prompts: tokens of each text's prompt.
        accept: ``[P]``, acceptance by (upper, lower) pair.
        proposals: acceptance of pairs with a lower element other than a model that can be read
            along a text.
        observed: for pairs known from rounds only, (window, statistics of the upper level).
        trees: pairs of `observed` with a drafter of trees. Small trees are wide and deep trees
            narrow, so only rounds with the nearest window predict a chain.
        verify: seconds by (element, drafter of the verified trees; 0: blocks) and tokens, or depth
            of the tree; 0 tokens: plain decoding.
        draft: seconds by element and tokens.
        prefill: seconds by element and tokens of a call's longest prompt.
        outside: seconds per step outside the levels.
        trials: trials by the elements of a chain.
        spent: seconds of all measurements.
    """

    remaining: Any
    room: Any = None
    prompts: list[int] = field(default_factory=list)
    batch: int = 1
    accept: dict[_Pair, Floats] = field(default_factory=dict)
    proposals: dict[_Pair, Proposals] = field(default_factory=dict)
    observed: dict[_Pair, list[tuple[int, LevelStats]]] = field(default_factory=dict)
    trees: set[_Pair] = field(default_factory=set)
    verify: dict[_Pair, Times] = field(default_factory=dict)
    draft: dict[int, Times] = field(default_factory=dict)
    prefill: dict[int, Times] = field(default_factory=dict)
    outside: float = 0.0
    trials: dict[tuple[int, ...], Trial] = field(default_factory=dict)
    spent: float = 0.0

    def acceptance(self, parts: Sequence[int], window: int = MOST) -> Acceptance:
        """Return the acceptance of a chain; `window` is that of its lowest level."""
        pairs = list(itertools.pairwise(parts))
        proposals = self.proposals.get(pairs[-1]) if pairs else None
        if pairs and pairs[-1] in self.trees:
            rounds = self.observed[pairs[-1]]
            sizes = sorted({size for size, _ in rounds})
            nearest = min(sizes, key=lambda size: max(size / window, window / size))
            alike = [(size, level) for size, level in rounds if size == nearest]
            _, proposals = _observed(alike, len(self.remaining))
        none = np.zeros(len(self.remaining))
        levels = tuple(self.accept.get(pair, none) for pair in pairs)
        ends = parts[0], parts[-1]
        tail = self.proposals.get(ends, self.accept.get(ends)) if len(pairs) > 1 else None
        return Acceptance(levels, self.remaining, proposals, tail, self.room)

    def rate(self, upper: int, lower: int) -> float:
        """Return the share of tokens of `lower` that `upper` accepts, for reports; of proposals,
        the share of first tokens."""
        if (upper, lower) in self.accept:
            return float(self.accept[upper, lower].mean())
        table = self.proposals[upper, lower]
        has = table.counts > 0
        return float(table.accept[has, 0].mean()) if has.any() else 0.0

    def factor(self, chain: Sequence[int]) -> float:
        """Return measured over predicted seconds of a chain: the mean of its trial, weighted by
        the trial's rounds, and of the mean of all trials."""
        if not self.trials:
            return 1.0
        mean = statistics.fmean(trial.factor for trial in self.trials.values())
        trial = self.trials.get(tuple(chain), Trial(mean, 0.0, 0))
        weight = trial.rounds / (trial.rounds + _ALIKE)
        return weight * trial.factor + (1 - weight) * mean

    def seconds(self, parts: Sequence[int], level: int, tokens: int) -> float:
        """Return the seconds of a step of a chain, as `theory.Seconds`."""
        if 1 < level == len(parts):
            return self.draft[parts[-1]].at(tokens) + self.outside
        pair = parts[level - 1], parts[min(level, len(parts) - 1)]
        # (A level that verifies only trees has no other timed pass.)
        trees = pair in self.trees and (tokens > 0 or (pair[0], 0) not in self.verify)
        return self.verify[pair if trees else (pair[0], 0)].at(tokens) + self.outside

    def before(self, parts: Sequence[int]) -> Floats:
        """Return ``[G]``, prefill seconds of each call of a chain."""
        groups = batches(len(self.prompts), self.batch)
        longest = np.array(self.prompts)[groups].max(1).tolist()
        return np.array([sum(self.prefill[n].at(size) for n in parts) for size in longest])


def timed_settings(parts: Sequence[Part]) -> list[Setting]:
    """Return the target alone and the chains to time, with every window: (target, next model),
    (target, two adjacent models), (target, drafter); (target, last model, drafter), since the last
    model verifies as well; (target, model, drafter of trees), since sizes of trees differ; and,
    since no text gives their acceptance, (target, level in its cache) and (target, level in its
    cache, drafter that reads its hidden states)."""
    models = [n for n, element in enumerate(parts) if element.model and n > 0]
    drafters = [n for n, element in enumerate(parts) if not element.model]
    chains = [(0, n) for n in models if n == models[0] or not parts[n].reads_apart]
    chains += [(0, n) for n in drafters]
    longer: list[tuple[int, ...]] = [(0, *pair) for pair in itertools.pairwise(models)]
    for model in models:
        below = [n for n in drafters if parts[n].drafts_below(parts[model], parts[0])]
        straight = [n for n in below if not parts[n].trees]
        longer += [(0, model, n) for n in straight[: model == models[-1]]]
        longer += [(0, model, n) for n in below if parts[n].trees or parts[n].reads_states]
    settings = [
        Setting(chain, (*[2 * (window + 1)] * (len(chain) - 2), window), (2,) * (len(chain) - 2))
        for chain in dict.fromkeys([*chains, *longer])
        if owners_above([parts[n] for n in chain])
        for window in WINDOWS
    ]
    return [Setting((0,)), *settings]


def measure(
    parts: Sequence[Part], prompts: Sequence[Sequence[int]], request: Workload, *, limit: float
) -> Measured:
    """Measure times and acceptances for the chains of `parts`.

    Args:
        parts: target first, in order of falling cost, drafters last.
        prompts: token ids.
        limit: seconds. Slow chains exceed them: of each the largest and the smallest window run
            for `LEAST` rounds. If time is short, further prompts are continued once, by the fastest
            chain: the target's texts have the same distribution with any chain.

    Raises:
        ValueError: the texts are too short to time the levels.
    """
    began = time.perf_counter()
    runner, settings = Runner(parts, prompts, request), timed_settings(parts)
    ran = runner.run(settings, _REPEATS, _TIMED * limit, len(WINDOWS))
    settings = [setting for setting, calls in zip(settings, ran, strict=True) if calls]
    ran = [calls for calls in ran if calls]
    groups, texts = runner.groups, ran[0][: len(runner.groups)]  # of the target alone
    rates = [merged(calls).tokens_per_second for calls in ran]
    fastest = settings[int(np.nanargmax(rates))].chain(parts)
    while len(texts) < len(groups) and time.perf_counter() - began < limit:
        texts.append(runner.call(fastest, len(texts), float("inf")))
    pairs = [
        (prompt, new)
        for group, call in zip(groups, texts, strict=False)
        for prompt, new in zip(group, call.texts, strict=True)
    ]
    pairs = [(prompt, new) for prompt, new in pairs[: len(prompts)] if new]
    if max((len(new) for _, new in pairs), default=0) < 2:
        raise ValueError(
            "prompts: expected one that the target continues with two tokens or more, given none"
        )
    most = request.max_new_tokens
    measured = Measured(
        np.concatenate([np.arange(len(new), 0, -1) for _, new in pairs]),
        np.concatenate([np.arange(most, most - len(new), -1) for _, new in pairs]),
        [len(prompt) for prompt, _ in pairs],
        request.batch,
    )
    seen = _enter_times(measured, parts, settings, ran)
    for n, element in enumerate(parts):
        drafts = any(setting.parts[-1] == n != 0 for setting in settings)
        verifies = any(n in setting.parts[1:-1] for setting in settings)
        timed = {above for above, _ in measured.verify}
        if (drafts and n not in measured.draft) or (verifies and n not in timed):
            raise ValueError(
                "max_new_tokens: expected texts of more rounds, by which levels can be timed, "
                f"given {most}, with which {element.name} ended none"
            )
    _acceptances(measured, parts, pairs, request, seen)
    measured.spent = time.perf_counter() - began
    return measured


def _enter_times(
    measured: Measured,
    parts: Sequence[Part],
    settings: Sequence[Setting],
    ran: Sequence[Sequence[Call]],
) -> dict[_Pair, list[tuple[int, LevelStats]]]:
    """Enter the times of all calls; return (window, statistics) by lowest pair."""
    verify, draft, prefill = (defaultdict(list) for _ in range(3))
    seen: dict[_Pair, list[tuple[int, LevelStats]]] = defaultdict(list)
    outside = np.zeros(2)  # seconds, steps
    for setting, calls in zip(settings, ran, strict=True):
        stats, chain = merged(calls), setting.parts
        steps = steps_of(stats, measured.batch)
        outside += (stats.overhead_seconds, sum(steps))
        for at, (number, level, count) in enumerate(zip(chain, stats.levels, steps, strict=True)):
            for call in calls:
                prefill[number].append((call.longest, call.stats.levels[at].prefill_seconds, 1))
            if not count:
                continue
            if at and at == len(chain) - 1:
                draft[number].append((setting.windows[-1], level.seconds, count))
                continue
            lowest = at == len(chain) - 2
            tree = chain[-1] if lowest and parts[chain[-1]].trees else 0
            tokens = round(level.num_draft_tokens / level.num_verifications)
            verify[number, tree].append(
                (setting.windows[-1] if tree else tokens, level.seconds, count)
            )
            if lowest:
                seen[number, chain[-1]].append((setting.windows[-1], level))
    measured.verify = {key: times_of(samples) for key, samples in verify.items()}
    measured.draft = {number: times_of(samples) for number, samples in draft.items()}
    measured.prefill = {number: times_of(samples) for number, samples in prefill.items()}
    measured.outside = float(outside[0] / outside[1])
    return seen


# ---- acceptances ---------------------------------------------------------------------------------


def processed(logits: torch.Tensor, request: Workload) -> torch.Tensor:
    """Return ``[N, V]``, the distributions of rows of logits after temperature and filters, as
    `ps.sample` computes them, up to rounding."""
    if request.sampling.greedy:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    return processed_scores(logits, request.sampling).softmax(-1)


@torch.inference_mode()
def _distributions(
    thing: Any, vocab: int, prompt: Sequence[int], new: Sequence[int], request: Workload
) -> torch.Tensor:
    """Return ``[len(new), vocab]``, a level's distribution of every new token; ids outside its
    vocabulary have probability 0."""
    level = batched(thing)
    tokens = torch.tensor([[*prompt, *new]], device=level.device)
    tokens = tokens.where(tokens < level.vocab_size, 0)
    start, end = len(prompt) - 1, tokens.shape[1] - 1
    level.prefill(PromptBatch(tokens[:, :start], None, end + 1))
    logits = level.forward(InputBlock(tokens[:, start:end], end - start)).logits
    id_map = id_map_of(level)
    logits = logits[..., : id_map.entries_below(vocab)]
    return processed(id_map.spread(logits, vocab)[0], request).cpu()


def _acceptances(
    measured: Measured,
    parts: Sequence[Part],
    texts: Sequence[tuple[list[int], list[int]]],
    request: Workload,
    seen: Mapping[_Pair, list[tuple[int, LevelStats]]],
) -> None:
    vocab = int(parts[0].thing.vocab_size)
    pieces: dict[_Pair, list[Any]] = defaultdict(list)
    pairs = [(a, b) for a, b in itertools.combinations(range(len(parts)), 2) if parts[a].model]
    apart = [n for n, level in enumerate(parts) if level.model and (n == 0 or level.reads_apart)]
    for prompt, new in texts:
        rows = {n: _distributions(parts[n].thing, vocab, prompt, new, request) for n in apart}
        at = torch.tensor(new)[:, None]
        proposals = {
            n: _proposed(element.thing, prompt, new, request)
            for n, element in enumerate(parts)
            if not element.model and isinstance(element.thing, Drafter)
        }
        for upper, lower in pairs:
            if lower in rows and upper == 0:
                p, q = (rows[n].gather(1, at)[:, 0].double() for n in (upper, lower))
                # By rounding, a pass over a whole text may have another argmax than the original.
                pieces[upper, lower].append((q / p.clamp_min(1e-30)).clamp_max(1).numpy())
            elif lower in rows and upper in rows:
                shared = torch.minimum(rows[upper], rows[lower]).sum(-1)
                pieces[upper, lower].append(shared.double().numpy())
            elif upper in rows and (proposed := proposals.get(lower)) is not None:
                pieces[upper, lower].append(_matches(proposed, rows[upper], new, upper))
    places = len(measured.remaining)
    for pair in pairs:
        read = pieces.get(pair, [])
        if len(read) == len(texts) and isinstance(read[0], Proposals):
            measured.proposals[pair] = Proposals(*map(np.concatenate, zip(*read, strict=True)))
        elif len(read) == len(texts):
            measured.accept[pair] = np.concatenate(read)
        else:
            rounds = measured.observed[pair] = seen.get(pair) or seen.get((0, pair[1])) or []
            share, measured.proposals[pair] = _observed(rounds, places)
            if parts[pair[1]].trees:
                measured.trees.add(pair)
            if parts[pair[1]].model:  # which may also verify between two other levels
                measured.accept[pair] = np.full(places, share)


def _proposed(
    drafter: Any, prompt: Sequence[int], new: Sequence[int], request: Workload
) -> list[list[int]] | None:
    """Return a drafter's proposal at every new token; None: it samples its proposals."""
    fork = drafter.fork() if hasattr(drafter, "fork") else drafter
    context, proposals = Context(list(prompt), seed=request.seed), []
    for token in new:
        proposal = fork.propose(context, MOST)
        if proposal.logits is not None:
            return None
        proposals.append([int(draft) for draft in proposal.tokens])
        context.valid = len(context.tokens)
        context.tokens.append(token)
    return proposals


def _matches(
    proposals: Sequence[Sequence[int]], upper: torch.Tensor, new: Sequence[int], number: int
) -> Proposals:
    """Return the acceptance of proposals: for the target (`number` 0) whether each token equals the
    text, for another level its probability of the token."""
    length = len(new)
    accept, counts = np.zeros((length, MOST)), np.zeros(length, np.int64)
    for start, tokens in enumerate(proposals):
        counts[start] = len(tokens)
        for j, token in enumerate(tokens[: length - start]):
            if number == 0:
                accept[start, j] = float(token == new[start + j])
            elif token < upper.shape[1]:
                accept[start, j] = float(upper[start + j, token])
    return Proposals(accept, counts)


def _observed(rounds: Sequence[tuple[int, LevelStats]], places: int) -> tuple[float, Proposals]:
    """Return the share of accepted tokens, and acceptance by position. If a proposal or a tree ends
    before its window, the next token counts as rejected."""
    tried, passed = np.zeros((2, MOST))
    for window, level in rounds:
        accepted = level.num_accepted_tokens_per_pos[:window]
        reached = [level.num_drafts, *accepted][:window]
        tried[: len(reached)] += reached
        passed[: len(accepted)] += accepted
    share = float(passed.sum() / max(tried.sum(), 1))
    hazards = (passed + 4 * share) / (tried + 4)  # near the mean if few were tested
    deepest = max((len(level.draft_length_histogram) - 1 for _, level in rounds), default=MOST)
    proposals = Proposals(np.tile(hazards, (places, 1)), np.full(places, deepest, np.int64))
    return share, proposals
