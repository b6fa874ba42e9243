"""The form of a chain and its requirements on levels and drafter; the plan of a round: steps and
sizes, known before the tokens, and the rows of the round."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch

from .. import rooms
from ..drafters.base import BatchedDrafter, DrafterCapabilities, TreeSize
from ..levels.base import BatchedLevel
from ..ops import verification
from ..tensors import IdMap
from .rows import Row, Rows, StateRows

_CAPACITY = 256  # minimum tokens allocated per text; beyond that a power of two
_TRUSTED = 1 << 15  # maximum new tokens allocated in advance; longer texts reallocate their rows
_KEPT = 4  # batch sizes with rows that stay allocated
_STEPS = 16  # steps of a round are allocated in multiples
_USEFUL = 64  # windows up to this size are not reduced near the end of a text


@dataclass(frozen=True, slots=True)
class Operators:
    """The operators that draw tokens, as in `ops.verification`. Exact enumeration and measurements
    replace them."""

    draw: Callable[..., Any] = verification.draw
    verify: Callable[..., Any] = verification.verify
    verify_tree: Callable[..., Any] | None = None  # None: `ps.verify_tree`


@dataclass(frozen=True, slots=True)
class ChainConfig:
    """The form of a chain, without its models.

    Attributes:
        names: names of the n levels, target first, drafter last.
        vocab_sizes: exclusive upper bounds of the ids that each level draws; no level draws an id
            that the level above lacks.
        id_maps: between the ids of the text, the target's, and the ids of each level.
        windows: tokens that level i waits for, i = 1 ... n-1.
        rounds: maximum blocks that level i waits for, i = 1 ... n-1; 0: no bound.
        tail: maximum unverified draft tokens that the drafter appends to the target's block.
        rule: "token" or "block".
        device: the target's device.
        operators: draw the tokens.
    """

    names: tuple[str, ...]
    vocab_sizes: tuple[int, ...]
    id_maps: tuple[IdMap, ...]
    windows: tuple[int, ...]
    rounds: tuple[int, ...]
    rule: str
    device: torch.device
    operators: Operators = Operators()
    tail: int = 0

    @property
    def levels(self) -> int:  # n
        return len(self.names)


Member = BatchedLevel | BatchedDrafter

# Required attributes of a level or drafter, by capability.
_STATED = {
    "continues": ("open", "extend", "admit", "save", "restore"),
    "keeps_lengths": ("reserve_span", "note_lengths"),
}


def _refuse(name: str, expected: str, actual: str) -> NoReturn:
    raise ValueError(f"{name}: expected {expected}, given {actual}")


def check_parts(
    config: ChainConfig, levels: Sequence[BatchedLevel], drafter: BatchedDrafter | None
) -> set[int]:
    """Refuse levels and a drafter that cannot form a chain. Returns the numbers of the levels that
    output hidden states for the drafter."""
    target, drawn = levels[0], config.id_maps[0].drawn
    if drawn is not None:
        drawing = f"a target that draws all of its {target.vocab_size} ids"
        _refuse(target.name, drawing, f"one that draws {len(drawn)}; only levels below it may")
    parts: list[Member] = [*levels, *([] if drafter is None else [drafter])]
    for member in parts:
        _require_stated(member)
    for i in range(1, config.levels):
        if config.id_maps[i].entries_below(config.vocab_sizes[i - 1]) == 0:
            drawing = f"a level that draws some id of {config.names[i - 1]}, the level above it"
            _refuse(config.names[i], drawing, "one that draws none of them")
    if drafter is None:
        return set()
    if drafter.capabilities.trees:
        above_it = levels[-1]
        if not above_it.capabilities.trees:
            reason = getattr(above_it, "no_trees", f"{type(above_it).__name__} does not")
            reading = f"a level that reads trees, as {drafter.name} drafts them"
            _refuse(above_it.name, reading, f"one that does not: {reason}")
        if config.tail:
            _refuse("tail", f"0 with {drafter.name}, which drafts trees", str(config.tail))
    return _levels_with_hidden(levels, drafter)


def _require_stated(member: Member) -> None:
    for capability, names in _STATED.items():
        holders = member, getattr(member, "level", member)  # a wrapper has all attributes
        lacks = [name for name in names if not all(hasattr(holder, name) for holder in holders)]
        if lacks and getattr(member.capabilities, capability):
            stated = f"an attribute `{lacks[0]}` beside capabilities with `{capability}`"
            _refuse(member.name, stated, "none")


def _levels_with_hidden(levels: Sequence[BatchedLevel], drafter: BatchedDrafter) -> set[int]:
    """Return the numbers of the levels with hidden states of the drafter's width and layers.
    Refuses a target without them, and any level without hidden states."""
    needs, numbers = drafter.capabilities, set()
    for number, level in enumerate(levels if needs.hidden_layers else (), 1):
        can = level.capabilities
        if not can.hidden_states:
            giving = f"a level that gives hidden states, as {drafter.name} wants them"
            _refuse(level.name, giving, "one that does not")
        fits = len({needs.hidden_size, can.hidden_size} - {None}) < 2
        deepest = max(needs.hidden_layers)
        deep = can.num_layers is None or can.num_layers >= deepest
        if fits and deep:
            numbers.add(number)
        elif number == 1:
            kind = f"of {needs.hidden_size} values" if deep else f"of layer {deepest}"
            actual = str(can.hidden_size) if deep else f"{can.num_layers} layers"
            _refuse(level.name, f"hidden states {kind}, as {drafter.name} reads them", actual)
    return numbers


# ---- rounds --------------------------------------------------------------------------------------


class RoundPlan(NamedTuple):
    """A round of the target.

    Attributes:
        windows: tokens that level 1 ... n-1 waits for.
        steps: the level of each step in order, n for a draft; the last is 1. None: the order
            depends on the tokens, because a level waits for its window without a bound of blocks.
        max_pending: maximum pending tokens of level 1 ... n-1.
        asked: the levels of the round, from 1 on.
        tail: maximum tokens of the round's last draft among the pending tokens of level 1.
    """

    windows: tuple[int, ...]
    steps: tuple[int, ...] | None
    max_pending: tuple[int, ...]
    asked: tuple[int, ...]
    tail: int = 0

    @property
    def levels(self) -> int:
        return len(self.windows) + 1

    @property
    def drafts(self) -> int:  # maximum tokens of a draft
        return max(self.windows[-1], self.max_pending[-1])

    @property
    def ahead(self) -> int:
        """Return the maximum tokens of a text after its committed tokens."""
        return self.levels + sum(self.max_pending) + self.drafts + 1

    @property
    def hidden_width(self) -> int:  # tokens of a row with hidden states that the drafter reads
        return 2 * (self.levels - 1) + max(self.max_pending)

    def lag(self, level: int) -> int:
        """Return the maximum committed tokens that `level` has not read when a round begins: its
        last emitted token, the bonus of every level above, and a tail, which only the target and
        the drafter have read."""
        return level + (self.tail if 1 < level < self.levels else 0)


@functools.lru_cache(maxsize=1024)
def round_plan(windows: tuple[int, ...], rounds: tuple[int, ...], tail: int = 0) -> RoundPlan:
    """Return the round of a chain with `windows`, `rounds` and `tail` (`ChainConfig`)."""
    count = len(windows)
    max_pending = [0] * count
    bounded = True

    def gather(level: int) -> list[int]:
        """Return the steps that fill the window of `level`."""
        nonlocal bounded
        window = windows[level - 1]
        if window == 0:
            return []
        if level == count:
            max_pending[level - 1] = window
            return [count + 1]
        below = [*gather(level + 1), level + 1]
        block, bound = max_pending[level] + 1, rounds[level - 1]
        bounded = bounded and bound > 0
        max_pending[level - 1] = window - 1 + block
        if bound:
            max_pending[level - 1] = min(bound * block, max_pending[level - 1])
        return below * max(bound, 1)

    gathered = gather(1)
    # As in the state rows (round_state.hpp), a tail has at most as many tokens as a draft.
    tail = min(tail, windows[-1]) if gathered and count > 1 else 0
    max_pending[0] += tail
    steps = (*gathered, *([count + 1] if tail else []), 1)
    levels = tuple(sorted(set(steps)))
    return RoundPlan(windows, steps if bounded else None, tuple(max_pending), levels, tail)


def default_rounds(windows: Sequence[int]) -> list[int]:
    """Return the rounds of the level below that fill each window if all tokens are accepted. A
    verification of m tokens emits up to m + 1."""
    pairs = itertools.pairwise(windows)
    return [max(1, -(-window // (below + 1))) for window, below in pairs]


class RoundPlanner:
    """Planner of the rounds of a chain of `parts`, target first, and owner of their rows. `can` are
    the drafter's capabilities. If steps are `captured`, the windows of a policy are rounded up to
    few sizes."""

    def __init__(
        self,
        config: ChainConfig,
        parts: Sequence[Member],
        can: DrafterCapabilities,
        captured: bool = False,
    ) -> None:
        self._config, self._parts, self._captured = config, parts, captured
        self._hidden, self._tree_size = bool(can.hidden_layers), can.tree_size
        self._usual = round_plan(config.windows, config.rounds, config.tail)
        self._kept: dict[Hashable, Rows] = {}

    def plan(self, state: StateRows, active: Sequence[Row]) -> RoundPlan:
        """Return the round with the largest windows of the rows `active`."""
        count = len(self._config.windows)
        sizes = {state.windows[row.slot] for row in active}
        largest = tuple(map(max, zip(*sizes, strict=True)))
        windows, rounds = largest[:count], largest[count:]
        room = max(row.room for row in active)
        # The last token of a text needs no draft, and no window reaches past the end of all texts;
        # in powers of two, for few different plans.
        useful = max(_USEFUL, 1 << room.bit_length()) if room > 1 else 0
        if max(windows, default=0) > useful:
            windows = tuple(min(window, useful) for window in windows)
        plan = round_plan(windows, rounds, self._config.tail)
        return rooms.graphs.few_sizes(plan, self._usual) if self._captured else plan

    def tree_size(self, plan: RoundPlan) -> TreeSize:
        """Return the size of the trees of a round."""
        size = self._tree_size
        return TreeSize(0, 0, 0) if size is None or not plan.drafts else size(plan.drafts)

    def rows(self, plan: RoundPlan, on_host: bool, slots: Sequence[Row], before: Rows) -> Rows:
        """Return rows for the next rounds of the requests `slots`, with the state of `before`. The
        host reads the rows after each step if `on_host`."""
        # Multiples, because reallocated rows invalidate all captured steps.
        steps = 1 if on_host else -(-len(plan.steps or ()) // _STEPS) * _STEPS
        longest = max(row.committed for row in slots)
        width = plan.hidden_width if self._hidden and not on_host else 0
        # (The batch and its EOS ids have not changed.)
        if (
            before.on_host == on_host
            and before.state.fits(steps, longest + plan.ahead + 1)
            and (before.hidden is None or before.hidden.width >= width)
        ):
            return before
        # The whole text up to its limit, of which at most _TRUSTED new tokens.
        capacity = longest + min(max(row.room for row in slots), _TRUSTED) + plan.ahead
        eos = max(1, *[len(row.request.eos) for row in slots])
        greedy = all(row.request.sampling.greedy for row in slots)
        key = (on_host, len(slots), steps, eos, greedy)
        rows = self._kept.pop(key, None)
        if rows is None or not rows.state.fits(steps, capacity):
            room = max(_CAPACITY, 1 << (capacity - 1).bit_length())
            device = torch.device("cpu") if on_host else self._config.device
            state = StateRows(plan.levels, len(slots), steps, room, eos, device)
            rows = Rows(state, on_host)
        self._kept[key] = rows
        while len(self._kept) > _KEPT:
            del self._kept[next(iter(self._kept))]
        rows.write(slots, before, self._config.tail, width)
        return rows

    def lasting(
        self, plan: RoundPlan, rows: Rows, slots: Sequence[Row], active: Sequence[Row]
    ) -> int:
        """Return the number of rounds that a plan is valid for if no row ends and no window
        changes."""
        # If rows differ, or draft in some rounds only, the lags of their caches differ.
        steady = len({rows.state.windows[row.slot] for row in active}) == 1
        if not steady or (min(plan.windows) == 0 and len(plan.asked) > 1):
            return 1
        # A round begins with room for all pending tokens in the texts, the rows and the contexts;
        # windows reduced to the room of a text change with it.
        if max(plan.windows) > _USEFUL:
            return 1
        longest = max(row.committed for row in slots)
        room = min(row.room for row in active)
        limits = [self._parts[number - 1].max_length for number in plan.asked]
        ends = [rows.state.shape.capacity - 1, *[end for end in limits if end is not None]]
        left = min(room, min(ends) - longest) - plan.ahead
        return 1 + max(0, left // (plan.max_pending[0] + 1))
