"""The rows of a batch. A state row has a request's tokens and, for each level, cached length,
pending draft tokens, window and round count. Pending rows are the logits of pending draft tokens.

The two executors differ in `StateRows.next`: either the host reads the rows between steps and
computes the next step from them, or the steps follow a plan and the host reads once per round.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..arguments import require_ids
from ..drafters.base import DraftBlock, HiddenStates, RowBuffer
from ..drafters.trees import require_parents
from ..kv_cache.masks import ancestors
from ..levels.base import EncodedInput, Hidden, IdMap
from ..ops import schedule, unchecked
from ..ops.schedule import HostRounds, HostStep, Plan, RoundShape
from ..sampling import LogitsProcessors, RequestProcessors, RowProcessor, Sampling, Words, stacked
from ..stats import Stats
from ..tensors import Place, RowCounts, RowParameters, moved, on_device

_CPU = torch.device("cpu")


@dataclass(slots=True)
class Row:
    """A request on the host.

    Attributes:
        number: index of the request in the batch, for messages.
        tokens: prompt and committed tokens.
        encoded: input of the encoder in a chain of encoder-decoder models.
        slot: row in the caches, which changes when other rows leave.
        logprobs: log-probabilities of committed tokens under the target's processed distribution.
        ended: whether the text is complete.
        paused: whether the row idles in the next rounds.
        origins: origins of the committed tokens (`trace.origins`), if traced.
        window_bound: maximum window of the row; None: no bound.
        policy_number: number of the row for the policy; numbers of removed rows are reused.
        num_reported: committed tokens reported to the policy.
        error: why the request has failed.
        processors: logits processors, in the order of application.
        kept: committed tokens at the last copy to the prefix cache; 0: no copy.
    """

    number: int
    tokens: list[int]
    max_new_tokens: int
    sampling: Sampling
    seed: int
    eos: frozenset[int]
    stats: Stats
    encoded: EncodedInput | None = None
    slot: int = 0
    logprobs: list[float] = field(default_factory=list)
    ended: bool = False
    paused: bool = False
    origins: list[Any] = field(default_factory=list)
    window_bound: int | None = None
    policy_number: int = 0
    num_reported: int = 0
    error: Exception | None = None
    processors: list[RowProcessor] = field(default_factory=list)
    kept: int = 0

    def __post_init__(self) -> None:
        self.slot = self.policy_number = self.number
        self.num_reported = len(self.tokens)
        self.ended = self.max_new_tokens == 0

    @property
    def committed(self) -> int:
        return len(self.tokens)

    @property
    def active(self) -> bool:
        return not self.ended and not self.paused

    @property
    def room(self) -> int:  # remaining new tokens
        return 0 if self.ended or self.paused else self.max_new_tokens - len(self.logprobs)


# ---- steps ---------------------------------------------------------------------------------------

# A step in one row (`RoundShape::Log`): tokens to draft or verify (-1: the row idled), position of
# the first, accepted tokens, emitted tokens, 1 if the last emitted token ends the text, status
# bits, tail tokens among the tokens to draft or verify.
Entry = Sequence[int]


class PlannedStep(NamedTuple):
    """A step before its tokens are known: as `Step`; a row reads at most `width` tokens."""

    level: int
    most: int
    width: int
    tail: bool


class Step(NamedTuple):
    """A step of a round: the tokens that its level drafts or verifies in every row.

    Attributes:
        level: n for a draft.
        most: maximum tokens that a row drafts or verifies.
        lag: maximum tokens that a row reads before the tokens to draft or verify.
        tail: whether any row may draft a tail.
        input_ids: ``[B, T]`` int64, tokens to read, left-aligned in each row.
        table: ``[7, B]`` int64; plan: its rows. The next step may overwrite them.
        host: the same as lists, if the host reads the rows.
        numbers: 1, 2, ... on the rows' device, if the host does not read the rows.
    """

    level: int
    most: int
    lag: int
    tail: bool
    input_ids: torch.Tensor
    table: torch.Tensor
    plan: Plan
    host: HostStep | None
    numbers: torch.Tensor | None = None

    def on(self, device: torch.device) -> Plan:
        """Return `plan` on `device`."""
        if self.table.device == device:
            return self.plan
        return Plan._make(moved(self.table, device).unbind())

    def by_row(self, name: str) -> RowCounts:
        """Return the row `name` of `plan`, with host values where the host knows them."""
        host = None if self.host is None else getattr(self.host, name)
        return RowCounts(host, getattr(self.plan, name))

    def pending(self, device: torch.device) -> torch.Tensor:
        """Return the tokens to verify among `input_ids`, ``[B, most]`` on `device`."""
        if self.host is not None:
            tokens = torch.from_numpy(self.host.pending())
            return tokens if tokens.device == device else tokens.to(device)
        input_ids = moved(self.input_ids, device)
        numbers = self.numbers
        if numbers is None or numbers.device != device:
            numbers = torch.arange(1, self.most + 1, device=device)
        reach = self.on(device).first[:, None] + numbers[: self.most]
        # Ids past a row's last token are ignored, so the clamped last column may repeat.
        return input_ids.gather(1, reach.clamp_max(input_ids.shape[1] - 1))


class Report(NamedTuple):
    """The effect of a step on the state rows: `slots`, the index ``[B, W]`` int64 of each emitted
    token among the pending tokens of the level above (None: not requested); `kept`, the remaining
    cached lengths by level, as arguments of `RowCounts`; `entries` by row, empty if the host does
    not read them (`status` is 0 then); and `cut`, the levels from the step's downwards with a
    longer cache (None: any level may have it)."""

    slots: torch.Tensor | None
    kept: Sequence[tuple[Any, ...]]
    entries: Sequence[Entry] = ()
    cut: Sequence[int] | None = None
    status: int = 0


class Record(NamedTuple):
    """A round on the host: the entries of every step by row; and by row the target's tokens, of
    which the entry's emitted count is valid, with their log-probabilities."""

    entries: Sequence[Sequence[Entry]]
    tokens: list[list[int]]
    logprobs: list[list[float]]


class Origin(NamedTuple):
    """The level that proposed a token, from 1, the target, to n, the drafter; and whether the token
    corrects a draft token that the level rejected."""

    level: int
    corrected: bool


def origins(
    levels: int, steps: Sequence[int], entries: Sequence[Sequence[Entry]], slot: int
) -> list[Origin]:
    """Return the origin of each token emitted by a round of the target in one row.

    Args:
        levels: n.
        steps: the level of each step in order; the last is the target's.
        entries: entries of each step, by row.
    """
    drafted = Origin(levels, False)
    pending: dict[int, list[Origin]] = {level: [] for level in range(levels + 1)}
    for level, by_row in zip(steps, entries, strict=False):  # a log may be longer
        asked, _, accepted, emitted, *_ = by_row[slot]
        if asked < 0:
            continue
        if level == levels and levels > 1:
            pending[level - 1] += [drafted] * emitted
            continue
        # A tail follows the tokens emitted by the level below.
        tokens = [*pending[level], *[drafted] * asked][:accepted]
        pending[level] = []
        pending[level - 1] += [*tokens, *[Origin(level, accepted < asked)] * (emitted - accepted)]
    return pending[0]


# ---- state rows ----------------------------------------------------------------------------------


class StateRows:
    """The state rows of one batch.

    Args:
        levels: n.
        batch: rows, B.
        steps: maximum steps entered before the host reads them.
        capacity: tokens per text.
        eos: maximum ids that end a text.

    Attributes:
        head: ``[B, shape.log_at]`` int64, header and levels of each row on the host: on the CPU
            the rows themselves, elsewhere the last copy that the host read.
        windows: windows of level 1 ... n-1, then their rounds, by row; as in `head`.
        numbers: ``[capacity]`` int64, 1, 2, ...
        queue: remaining planned steps of the round; None: the rows determine the next step.
        log: entries of the round's steps, if the host reads each step.
    """

    def __init__(
        self,
        levels: int,
        batch: int,
        steps: int = 1,
        capacity: int = 0,
        eos: int = 1,
        device: torch.device = _CPU,
    ) -> None:
        self.shape = shape = RoundShape(levels, steps, capacity)
        self.batch, self.device = batch, device
        self.words = torch.zeros(batch, shape.words, dtype=torch.int64, device=device)
        self.eos = torch.full((batch, eos), -1, dtype=torch.int64, device=device)
        self.numbers = torch.arange(1, capacity + 1, device=device)
        self.queue: Iterator[PlannedStep] | None = None
        self.log: list[Sequence[Entry]] = []
        self._levels = [shape.level_at(level) for level in range(1, levels + 1)]
        # Words of the windows of all levels but the drafter, of their bounds, and of lasting state.
        above, kept = self._levels[:-1], (shape.CACHED, shape.ROUND)
        self._sizes = [at + word for word in (shape.WINDOW, shape.BOUND) for at in above]
        self.windows = [(0,) * len(self._sizes)] * batch
        self._lasting = [*self._sizes, *(at + word for word in kept for at in self._levels)]
        self._drafted = self._levels[-1] + shape.CACHED  # word of the drafter's cached length
        if device.type == "cpu":  # the same memory
            host = self.words.numpy()
            self.head: npt.NDArray[np.int64] = host[:, : shape.log_at]
            self._rounds = HostRounds(shape, host, self.eos.numpy())
            self._table = torch.from_numpy(self._rounds.plan)
            self._plan = Plan._make(self._table.unbind())
        else:
            self.head = np.zeros((batch, shape.log_at), np.int64)

    def fits(self, steps: int, capacity: int) -> bool:
        return steps <= self.shape.steps and capacity <= self.shape.capacity

    def write(self, rows: Sequence[Row], before: StateRows, tail: int = 0) -> None:
        """Write `rows`, with windows, cached lengths and round counts of `before`, a
        tail window of `tail` tokens, and no pending tokens."""
        shape = self.shape
        table = torch.zeros(self.batch, shape.words, dtype=torch.int64)
        host = table.numpy()
        host[:, self._lasting] = before.head[:, self._lasting]
        self.windows = list(before.windows)
        host[:, shape.TAIL_WINDOW] = tail
        for words, row in zip(host, rows, strict=True):
            words[shape.TOTAL], words[shape.ROOM] = len(row.tokens), row.room
            words[shape.text_at : shape.text_at + len(row.tokens)] = row.tokens
        ends = [[*sorted(row.eos), *[-1] * (self.eos.shape[1] - len(row.eos))] for row in rows]
        if self.device.type != "cpu":
            self.head, table = host[:, : shape.log_at], table.pin_memory()
        self.words.copy_(table, non_blocking=True)
        self.eos.copy_(on_device(ends, torch.int64, self.device).view_as(self.eos))

    def select(self, rows: Sequence[int | None]) -> StateRows:
        """Return state rows with windows, cached lengths and round counts of `rows`, in that order;
        None: an empty row."""
        made = StateRows(self.shape.levels, len(rows))
        for place, row in enumerate(rows):
            if row is not None:
                made.head[place] = self.head[row]
                made.windows[place] = self.windows[row]
        return made

    @property
    def round_counts(self) -> npt.NDArray[np.int64]:
        """Return a copy of the round counts of each level by row, from `head`."""
        return self.head[:, [at + self.shape.ROUND for at in self._levels]]

    def begin_again(self, round_counts: npt.NDArray[np.int64]) -> None:
        """Set the round counts of each level, and empty all caches."""
        self.head[:, [at + self.shape.ROUND for at in self._levels]] = round_counts
        self.head[:, [at + self.shape.CACHED for at in self._levels]] = 0

    def set_windows(self, slot: int, sizes: Sequence[int]) -> None:
        """Set `windows` of one row from its next step on."""
        self.windows[slot] = tuple(sizes)
        self.head[slot, self._sizes] = sizes
        if self.device.type != "cpu":
            for word, size in zip(self._sizes, sizes, strict=True):
                self.words[slot, word] = size

    def cached(self, level: int) -> list[int]:
        """Return the cached lengths of `level` by row, from `head`."""
        lengths: list[int] = self.head[:, self._levels[level - 1] + self.shape.CACHED].tolist()
        return lengths

    def read_by(self, level: int) -> torch.Tensor:
        """Return the cached lengths of `level`, ``[B]`` int64 on the rows' device."""
        return self.words[:, self._levels[level - 1] + self.shape.CACHED]

    def set_cached(self, level: int, cached: Sequence[int]) -> None:
        """Set the cached lengths of `level` by row."""
        word = self._levels[level - 1] + self.shape.CACHED
        self.head[:, word] = cached
        if self.device.type != "cpu":
            self.words[:, word] = on_device(cached, torch.int64, self.device)

    def end(self, slot: int) -> None:
        """Exclude a row from all later steps."""
        self.words[slot, self.shape.ROOM] = 0

    def complete(self) -> torch.Tensor:
        """Return whether each row is complete, ``[B]`` bool."""
        return self.words[:, self.shape.ROOM] <= 0

    def text(self, slot: int) -> torch.Tensor:
        """Return the text of a row with its pending tokens, ``[N]`` int64 on the CPU."""
        begin = self.shape.text_at
        return self.words[slot, begin : begin + int(self.head[slot, self.shape.TOTAL])]

    def next(self, unread: torch.Tensor | None = None) -> Step | PlannedStep | None:
        """Return the next step: the next of the queue, independent of emitted tokens; without a
        queue the deepest verification that is due, or a draft, so that rows that lag catch up at
        the same level. None: all rows are complete. The drafter reads from position `unread`,
        ``[B]`` int64, or an earlier position on."""
        if self.queue is not None:
            return next(self.queue, None)
        if unread is not None:
            cached = self.words[:, self._drafted]
            before = cached.clone()
            torch.minimum(before, unread, out=cached)
        due = self._rounds.next()
        if unread is not None:
            cached.copy_(before)
        if due is None:  # every row is complete
            return None
        input_ids = torch.from_numpy(due.input_ids)
        return Step(due.level, due.most, due.lag, due.tail, input_ids, self._table, self._plan, due)

    def report(
        self,
        step: Step,
        tokens: torch.Tensor,
        counts: torch.Tensor | None,
        status: torch.Tensor | None,
        padding: int | None = None,
        ends: bool = True,
    ) -> Report:
        """Enter the tokens of a step (`schedule.report`), on any device if `next` returned the
        step. `status` None: a draft without errors; `padding` None: return no slots; `ends`:
        whether a token may end a text."""
        if step.host is None:
            if status is None:
                status = torch.zeros_like(tokens, dtype=torch.int32)
            eos, level = self.eos if ends else self.eos[:, :0], step.level
            slots, kept = schedule.report(
                self.words, self.shape, level, step.table, tokens, counts, status, eos, padding or 0
            )
            return Report(slots, list(zip(itertools.repeat(None), kept.unbind())))
        made = self._rounds.report(
            step.host,
            tokens.cpu().numpy(),
            None if counts is None else counts.cpu().numpy(),
            None if status is None else status.cpu().numpy(),
            padding or 0,
            ends,
        )
        entries = made.entries
        self.log.append(entries)
        wanted = None if padding is None else torch.from_numpy(made.slots)
        return Report(wanted, list(zip(made.kept)), entries, made.cut, made.status)

    def record(self, tokens: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
        """Return the record of a round for the host, ``[B, N]`` int64: the rows without their
        texts, the target's tokens, ``[B, W]`` int64, and log-probabilities, ``[B, W]`` float32."""
        bits = logprobs.view(torch.int32).to(torch.int64)
        return torch.cat([self.words[:, : self.shape.text_at], tokens, bits], 1)

    def read(self, record: torch.Tensor) -> Record:
        """Return a round's record on the host, and clear the log. Waits for the device."""
        self.words[:, self.shape.STEP].zero_()
        shape, table = self.shape, record.cpu()
        width = (table.shape[1] - shape.text_at) // 2
        probabilities = table[:, shape.text_at + width :].to(torch.int32).view(torch.float32)
        rows: list[list[int]] = table[:, : shape.text_at + width].tolist()
        if self.device.type != "cpu":
            self.head = table.numpy()[:, : shape.log_at]
        begins = range(shape.log_at, shape.text_at, shape.PER_STEP)
        return Record(
            [[words[at : at + shape.PER_STEP] for words in rows] for at in begins],
            [words[shape.text_at :] for words in rows],
            probabilities.tolist(),
        )


# ---- trees of draft tokens -----------------------------------------------------------------------


class Tree(NamedTuple):
    """The pending trees of a batch.

    Attributes:
        tokens, parents: ``[B, N]`` int64, as in `DraftBlock`; 0 and -1 after the nodes of a row.
        counts: ``[B]`` int64, nodes of each row.
        longest: ``[B, D]`` int64, tokens of a longest path, then -1.
        depths: ``[B]`` int64, length of the longest path.
        drawn: as in `DraftBlock`.
        again: ``[B, N]`` bool, childless nodes equal to an earlier sibling, which count as draws
            and are never accepted; None: no repeats, or not computed.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    counts: torch.Tensor
    longest: torch.Tensor
    depths: torch.Tensor
    drawn: torch.Tensor | None
    again: torch.Tensor | None = None

    def proposal(
        self, rows: RowBuffer | None, most: int, device: torch.device
    ) -> tuple[tuple[torch.Tensor | None, ...], dict[str, Any]]:
        """Return the arguments of `ops.verify_tree` after the target's logits, for paths of at most
        `most` nodes. `rows` are ``[B, N + 1, Vd]``, distributions of the children of the root and
        of each node, except where `drawn` is False; None: all children are deterministic."""
        batch, nodes = self.tokens.shape
        pool = ids = statistics = None
        if rows is not None:
            # The rows of all requests in sequence.
            pool = rows.logits.reshape(-1, rows.logits.shape[2])
            ids = torch.arange(batch * (nodes + 1), device=device).view(batch, nodes + 1)
            if self.drawn is not None:
                ids = torch.where(self.drawn.to(device), ids, -1)
            statistics = None if rows.statistics is None else rows.statistics.reshape(-1, 2)
        return (self.tokens.to(device), self.parents.to(device), pool), {
            "counts": self.counts.to(device),
            "draft_rows": ids,
            "draft_statistics": statistics,
            "depth": min(most, nodes),
        }

    def path_to(self, row: int, node: int) -> list[int]:
        """Return the tokens from the root's child to `node`."""
        tokens, parents, path = self.tokens[row], self.parents[row], []
        while node >= 0:
            path.append(int(tokens[node]))
            node = int(parents[node])
        return path[::-1]


def require_tree(name: str, block: DraftBlock, lengths: Sequence[int], vocab_size: int) -> None:
    """Refuse trees of a drafter that the level above, with `vocab_size` ids, cannot verify. Reads
    the trees on the host. Paths have at most ``lengths[b]`` nodes; 0: the row idles."""
    assert block.parents is not None
    batch, nodes = block.tokens.shape
    if tuple(block.parents.shape) != (batch, nodes):
        raise ValueError(
            f"{name}: expected parents of shape {[batch, nodes]}, as of the tokens, given "
            f"{list(block.parents.shape)}"
        )
    if block.rows is not None and tuple(block.rows.logits.shape[:2]) != (batch, nodes + 1):
        raise ValueError(
            f"{name}: expected draft logits of a tree of shape [B, N+1, Vd] = "
            f"[{batch}, {nodes + 1}, Vd], given {list(block.rows.logits.shape)}"
        )
    counts = [nodes] * batch if block.counts is None else block.counts.tolist()
    for tokens, parents, count, most in zip(
        block.tokens.tolist(), block.parents.tolist(), counts, lengths, strict=True
    ):
        if not 0 <= count <= nodes:
            raise ValueError(f"{name}: expected 0 to {nodes} nodes, given {count}")
        if most:
            require_ids(name, tokens[:count], vocab_size)
            require_parents(name, parents[:count], most)


def pending_tree(block: DraftBlock, lengths: torch.Tensor, most: int) -> Tree:
    """Return the trees of a draft on the device of `lengths`, ``[B]`` int64: maximum nodes of a
    path, at most `most`, D; 0: the row idles."""
    assert block.parents is not None
    (batch, nodes), device = block.tokens.shape, lengths.device
    index = torch.arange(nodes, device=device)
    counts = torch.full_like(lengths, nodes) if block.counts is None else block.counts.to(device)
    counts = torch.where(lengths > 0, counts, 0)
    known = index < counts[:, None]
    tokens = torch.where(known, block.tokens.to(device), 0)
    parents = torch.where(known, block.parents.to(device), -1)
    longest = tokens.new_full((batch, most + 1), -1)
    depths = torch.zeros_like(counts)
    if nodes:
        seen = ancestors(parents, most)
        depth = torch.where(known, seen.sum(-1), 0)
        last = (depth * nodes - index).argmax(1, keepdim=True)  # the first of equal depths
        depths = depth.gather(1, last)[:, 0]
        line = seen.gather(1, last[..., None].expand(-1, -1, nodes))[:, 0] & known
        # The extra last column takes the nodes that are not on the path.
        longest.scatter_(1, torch.where(line, depth - 1, most).clamp_max(most), tokens)
    return Tree(tokens, parents, counts, longest[:, :most].contiguous(), depths, block.drawn)


def with_repeats(tree: Tree) -> Tree:
    """Return the tree with its repeated nodes (`Tree.again`). Reads the tree on the host."""
    tokens, parents = tree.tokens, tree.parents
    index = torch.arange(tokens.shape[1])
    known = index < tree.counts[:, None]
    alike = (tokens[:, :, None] == tokens[:, None]) & (parents[:, :, None] == parents[:, None])
    earlier = alike & (index[:, None] > index)
    inner = (parents[:, None] == index[:, None]) & known[:, None]
    again = earlier.any(2) & known & ~inner.any(2)
    return tree._replace(again=again) if bool(again.any()) else tree


class TreePass(NamedTuple):
    """Input of a level that reads a tree: in each row a chain of unread tokens, then the nodes.

    Attributes:
        tokens, parents: ``[B, T]`` int64, as in `InputBlock`.
        counts: ``[B]`` int64, tokens of each row; lags: ``[B]``, tokens before the tree.
        lag: maximum of `lags`.
        places: ``[B, N]`` int64, index of each node of the tree among the nodes in the pass; None:
            the pass has all nodes.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    counts: torch.Tensor
    lags: torch.Tensor
    lag: int
    places: torch.Tensor | None = None

    def by_node(self, logits: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the logits after the root and every node of the tree, ``[B, N + 1, V]``."""
        rows = torch.nn.functional.pad(places + 1, (1, 0)).to(logits.device)
        return logits[torch.arange(len(rows), device=rows.device)[:, None], rows]

    def placed(self, path: torch.Tensor) -> torch.Tensor:
        """Return a path ``[B, D]`` as indices among the nodes in the pass; -1 stays."""
        if self.places is None or not self.places.shape[1]:
            return path
        places = self.places.to(path.device).gather(1, path.clamp_min(0))
        return torch.where(path >= 0, places, -1)

    @property
    def first(self) -> torch.Tensor:
        """Return the index of the token before the tree, by row; its logits are the root's."""
        return (self.lags - 1).clamp_min(0)

    def along(
        self,
        logits: torch.Tensor,
        hidden: Mapping[int, torch.Tensor] | None,
        result: Any,
        path: torch.Tensor,
    ) -> tuple[torch.Tensor, Mapping[int, torch.Tensor] | None]:
        """Return logits and hidden states of the accepted path, in text order; `result` is the
        result of `verify_tree`, and `path` its path from `placed`."""
        drawn = result.rows.clamp_min(0)[..., None]
        logits = logits.gather(1, drawn.expand(-1, -1, logits.shape[2]))
        if hidden is not None:
            hidden = {
                layer: self._in_text_order(states, path.to(states.device))
                for layer, states in hidden.items()
            }
        return logits, hidden

    def _in_text_order(self, states: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
        # Select lag and path from the states [B, T, H]: [B, lag + D, H].
        lags = self.lags.to(states.device)[:, None]
        reach = torch.arange(self.lag + path.shape[1], device=states.device)[None]
        nodes = path.gather(1, (reach - lags).clamp(0, path.shape[1] - 1)) if path.shape[1] else 0
        at = torch.where(reach < lags, reach, lags + nodes).clamp(0, states.shape[1] - 1)
        return states.gather(1, at[..., None].expand(-1, -1, states.shape[2]))


def tree_pass(
    input_ids: torch.Tensor, counts: torch.Tensor, lengths: torch.Tensor, tree: Tree, lag: int
) -> TreePass:
    """Return the pass that verifies `tree`. `input_ids` ``[B, T]`` are the level's unread tokens,
    `counts` ``[B]`` in each row, of which the last `lengths` ``[B]`` are a longest path of the
    tree; each row has at most `lag` tokens before the tree."""
    if tree.again is not None:
        return _without_repeats(input_ids, counts, lengths, tree, lag)
    nodes, device = tree.tokens.shape[1], input_ids.device
    lags = counts - lengths
    own = torch.where(counts > 0, tree.counts, 0)[:, None]
    reach = torch.arange(lag + nodes, device=device)
    place = reach - lags[:, None]  # index of the node in each column
    inside = (place >= 0) & (place < own)
    given = input_ids[:, reach.clamp_max(input_ids.shape[1] - 1)]
    at = place.clamp(0, max(nodes - 1, 0))
    tokens, parents = torch.where(place < 0, given, 0), (reach - 1).expand_as(given)
    if nodes:
        tokens = torch.where(inside, tree.tokens.gather(1, at), tokens)
        # The root's children follow the last token of the lag.
        parents = torch.where(inside, tree.parents.gather(1, at) + lags[:, None], parents)
    return TreePass(tokens, parents, lags + own[:, 0], lags, lag)


def _without_repeats(
    input_ids: torch.Tensor, counts: torch.Tensor, lengths: torch.Tensor, tree: Tree, lag: int
) -> TreePass:
    """Return the pass without repeated nodes, in their order."""
    assert tree.again is not None
    index = torch.arange(tree.tokens.shape[1])
    read = ~tree.again & (index < tree.counts[:, None])
    order = (~read).to(torch.uint8).sort(dim=1, stable=True).indices
    left = read.sum(1)
    order = order[:, : int(left.max())]
    places = (read.cumsum(1) - 1).clamp_min(0)
    parents = tree.parents.gather(1, order)
    above = places.gather(1, parents.clamp_min(0))
    small = tree._replace(
        tokens=tree.tokens.gather(1, order),
        parents=torch.where(parents >= 0, above, -1),
        counts=left,
        again=None,
    )
    return tree_pass(input_ids, counts, lengths, small, lag)._replace(places=places)


# ---- hidden states -------------------------------------------------------------------------------


class HiddenWindow:
    """Hidden states of consecutive tokens per row, from several passes; a later pass overwrites.

    Args:
        batch: rows, B.
        device: device of `begin` and `end`.
        width: maximum tokens of a row, W, at a fixed address, for captured steps: a pass begins
            within the window or at its end, and has at most 2 W tokens. 0: any number, on the
            CPU, where the host reads the counts.

    Attributes:
        begin, end: ``[B]`` int64, positions of the first token of each row and after the last. The
            drafter has read all states before `begin`.
    """

    def __init__(self, batch: int, device: torch.device, width: int = 0) -> None:
        self.width = width
        self.begin = torch.zeros(batch, dtype=torch.int64, device=device)
        self.end = torch.zeros_like(self.begin)
        self._layers: dict[int, torch.Tensor] = {}  # without a width
        # With a width a ring ``[B, size + 1, sum of H]`` of the concatenated layers: position p is
        # in slot p % size, and the last slot takes discarded states.
        self._ring: torch.Tensor | None = None
        self._sizes: dict[int, int] = {}
        self._size = 6 * width
        self._reach = torch.arange(-1, self._size, device=device)
        self._rows = torch.arange(batch, device=device)[:, None]

    @property
    def counts(self) -> torch.Tensor:
        """Return ``[B]`` int64, tokens of each row."""
        return self.end - self.begin

    @property
    def tensors(self) -> list[torch.Tensor]:
        ring = [] if self._ring is None else [self._ring]
        return [self.begin, self.end, self._reach, self._rows, *ring, *self._layers.values()]

    def write(self, other: HiddenWindow) -> None:
        """Copy the states of `other`. Waits for its device if the devices differ."""
        device, told = self.begin.device, other.states()
        self.begin.copy_(other.begin)
        self.end.copy_(other.begin)
        if told.layers:
            layers = told.layers
            if self.width:
                layers = {layer: states[:, : self.width] for layer, states in layers.items()}
            elif not other.width:  # `other` may overwrite its states
                layers = {layer: states.clone() for layer, states in layers.items()}
            self.add(layers, other.begin.to(device), told.counts.to(device, copy=True))

    def add(
        self,
        layers: Hidden,
        begin: torch.Tensor,
        counts: torch.Tensor,
        skipped: torch.Tensor | None = None,
    ) -> None:
        """Add the states ``[B, T, H]`` of a pass, maybe without a copy, and drop earlier states
        after them. Row b has ``counts[b]`` tokens from position ``begin[b]`` on, of which the first
        ``skipped[b]`` keep their earlier states (`LevelOutput.skipped`); a count of 0 leaves the
        row unchanged."""
        part, known, end, own_begin = counts > 0, self.end > self.begin, begin + counts, begin
        if skipped is not None:
            own_begin = torch.minimum(begin + skipped.to(begin.device), end)
        if self.width:
            first = torch.where(known, torch.minimum(self.begin, own_begin), own_begin)
            torch.where(part, first, self.begin, out=self.begin)
            self._put(layers, 1 + torch.where(part, begin, self.end), skipped, None)
            torch.where(part, end, self.end, out=self.end)
            return
        if not part.any():
            return
        if skipped is None and not known.any():
            # No earlier states to merge.
            self._layers = dict(layers)
            self.begin = torch.where(part, begin, self.begin)
            self.end = self.begin + counts
            return
        first = torch.where(known, torch.minimum(self.begin, own_begin), own_begin)
        first = torch.where(part, first, self.begin)
        end = torch.where(part, end, self.end)
        width = max(1, int((end - first).max()))
        positions = first[:, None] + torch.arange(width)
        place = positions - begin[:, None]
        fresh = part[:, None] & (positions >= own_begin[:, None]) & (place < counts[:, None])
        before = positions - self.begin[:, None]
        for layer, states in layers.items():
            own = self._layers.get(layer)
            if own is None:
                own = states.new_zeros(len(first), width, states.shape[2])
            dtype = torch.promote_types(own.dtype, states.dtype)  # rounds no state
            new, old = _at(states, place).to(own.device, dtype), _at(own, before).to(dtype)
            both = torch.where(fresh[..., None].to(own.device), new, old)
            if own.shape == both.shape and own.dtype == dtype:
                self._layers[layer] = own.copy_(both)
            else:
                self._layers[layer] = both
        self.begin.copy_(first)
        self.end.copy_(end)

    def _put(
        self,
        layers: Hidden,
        second: torch.Tensor,
        skipped: torch.Tensor | None,
        above: torch.Tensor | None,
    ) -> torch.Tensor:
        """Write the states of a pass to the ring, but not `skipped` states and states before
        position `above`; in few operators, for captured steps. Returns the positions of the first
        tokens, ``second - 1``; in an idle row a position whose state the drafter has not read."""
        self._sizes = self._sizes or {layer: states.shape[2] for layer, states in layers.items()}
        apart, ring = [layers[layer] for layer in self._sizes], self._ring
        device = apart[0].device if ring is None else ring.device
        apart = [x.to(device) for x in apart]
        states = torch.cat(apart, -1) if len(apart) > 1 else apart[0]
        positions = second[:, None] + self._reach[: states.shape[1]]
        slots, begin, own = positions % self._size, positions[:, 0], above
        if skipped is not None:
            own = begin + skipped.to(begin.device)
            own = own if above is None else own.maximum(above)
        if own is not None:
            slots.masked_fill_(positions < own[:, None], self._size)
        if ring is None:
            ring = states.new_zeros(len(second), self._size + 1, states.shape[2])
        dtype = torch.promote_types(ring.dtype, states.dtype)  # rounds no state
        ring = self._ring = ring.to(dtype)
        ring[self._rows.to(device), slots.to(device)] = states.to(dtype)
        return begin

    def add_pass(
        self,
        plan: Plan,
        kept: Sequence[RowCounts],
        level: int,
        layers: Hidden | None,
        skipped: torch.Tensor | None,
        above: torch.Tensor | None,
    ) -> None:
        """Add the states of a verification by `level` (`layers` and `skipped` of its output); if
        its output has none, drop the states of rejected tokens. `kept` are the remaining cached
        lengths of the verifying levels; with a width all of them output states, so the window ends
        at the longest. The target's states, up to its cached lengths `above` ``[B]``, take
        precedence over the level's."""
        device = plan.part.device
        if layers is None:
            lengths = kept[level - 1].on(device)
            self.cut(torch.where(plan.part > 0, lengths, torch.iinfo(lengths.dtype).max))
            return
        if self.width:
            begin = self._put(layers, plan.positions - plan.first, skipped, above)
            torch.minimum(self.begin, begin, out=self.begin)
            first, *others = [each.on(device) for each in kept]
            *between, last = others or [first]
            torch.maximum(functools.reduce(torch.maximum, between, first), last, out=self.end)
            return
        begin = plan.positions - (plan.counts - plan.lengths)
        if above is not None:
            read = (above - begin).clamp_min(0)
            skipped = read if skipped is None else read.maximum(skipped.to(read.device))
        # (Idle rows have no states.)
        self.add(layers, begin, (kept[level - 1].on(device) - begin) * plan.part, skipped)

    def states(self) -> HiddenStates:
        """Return the states; with a width a copy."""
        layers, ring = self._layers, self._ring
        if ring is not None:
            slots = (self.begin[:, None] + self._reach[1 : self.width + 1]) % self._size
            states = ring[self._rows.to(ring.device), slots.to(ring.device)]
            parts = states.split(list(self._sizes.values()), -1)
            layers = dict(zip(self._sizes, parts, strict=True))
        return HiddenStates(layers, self.begin, self.end - self.begin)

    def cut(self, lengths: torch.Tensor) -> None:
        """Drop states after the first ``lengths[b]`` tokens of row b, ``[B]`` int64."""
        torch.minimum(self.end, lengths, out=self.end)
        torch.minimum(self.begin, lengths, out=self.begin)

    def forget(self, part: torch.Tensor, counts: torch.Tensor | None = None) -> None:
        """Drop the states of rows with nonzero `part`, ``[B]`` int64, after the drafter has read
        them. With the `counts` of `states`, `part` is 0 or 1, and one operator suffices."""
        if counts is not None:
            self.begin.addcmul_(counts, part)
            return
        torch.where(part > 0, self.end, self.begin, out=self.begin)
        if not self.width and not (self.end > self.begin).any():
            self._layers = {}  # states of a prompt may be large

    def select(self, rows: Sequence[int | None]) -> None:
        """Keep the rows `rows`, in that order; None: a row without states."""
        index = [0 if row is None else row for row in rows]
        fresh = torch.tensor([row is None for row in rows], dtype=torch.bool)
        self.begin = self.begin[index].masked_fill(fresh, 0)
        self.end = self.end[index].masked_fill(fresh, 0)
        self._rows = torch.arange(len(index), device=self.begin.device)[:, None]
        self._layers = {layer: states[index] for layer, states in self._layers.items()}
        self._ring = None if self._ring is None else self._ring[index]

    def fits(self, rows: Sequence[int], width: int) -> bool:
        """Return whether all of `rows` have states, and every row at most `width`."""
        counts = self.counts
        return bool(counts[list(rows)].all()) and int(counts.max()) <= width


def _at(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    places = places.to(states.device).clamp(0, states.shape[1] - 1)
    return states.gather(1, places[..., None].expand(-1, -1, states.shape[2]))


# ---- pending draft tokens ------------------------------------------------------------------------


class PendingRows:
    """The draft logits q of all pending tokens, by the level that verifies them (contract C1).

    Rows of a verification are copied into a table with a fixed address: blocks of several passes
    are pending at once, and the next pass of a level may overwrite its logits. Rows of a drafter
    stay in its buffer.

    Attributes:
        max_pending: maximum pending tokens of level 1 ... n-1.
        tables: rows by level; a drafter's are in its buffer. Empty if all rows are greedy.
        tail_has_statistics: whether the statistics of all rows for the target are known.
        tree: pending trees for the level above the drafter; None: a chain of tokens.
    """

    def __init__(self) -> None:
        self.max_pending: Sequence[int] = ()
        self.tables: dict[int, RowBuffer | None] = {}
        self.tail_has_statistics = True
        self.tree: Tree | None = None
        # Trees drafted without host synchronisation, by depth, with their rows.
        self._trees: dict[int, tuple[Tree, RowBuffer | None]] = {}

    def take(self, level: int, device: torch.device) -> RowBuffer | None:
        """Return the rows of the tokens that `level`, on `device`, verifies, ``[B, N, Vd]``; None:
        a deterministic draft."""
        rows = self.tables.get(level)
        if rows is None:
            return None
        logits, statistics = rows
        if level == 1 and not self.tail_has_statistics:
            statistics = None
        if logits.device == device:
            return rows if statistics is rows.statistics else RowBuffer(logits, None)
        return RowBuffer(
            moved(logits, device), None if statistics is None else moved(statistics, device)
        )

    def padding(self, level: int) -> int:
        """Return the slot of rows without a token, after all slots of pending tokens."""
        most, rows = self.max_pending[level - 1], self.tables.get(level)
        return most if rows is None else max(most, rows.logits.shape[1] - 1)

    def append(
        self,
        level: int,
        logits: torch.Tensor,
        statistics: torch.Tensor,
        slots: torch.Tensor,
        padding: int,
    ) -> None:
        """Append the rows from which the level below drew or accepted its emitted tokens: logits
        ``[B, W, V]``, their statistics ``[B, W, 2]``, and slots ``[B, W]`` int64, the index of each
        token among the pending tokens; `padding` for rows without a token."""
        (batch, _, vocab), device = logits.shape, logits.device
        old = self.tables.get(level)
        # Windows may change: reuse a large enough table, whose address earlier graphs have.
        if (
            old is None
            or old.logits.shape[1] <= padding
            or (*old.logits.shape[::2], old.logits.device) != (batch, vocab, device)
            or torch.promote_types(old.logits.dtype, logits.dtype) != old.logits.dtype
        ):
            # Zeros: the operator also reads rows without a token, which must be harmless.
            zeros = statistics.new_zeros(batch, padding + 1, 2)
            old = RowBuffer(logits.new_zeros(batch, padding + 1, vocab), zeros)
            self.tables[level] = old
        table, known = old
        logits, slots = logits.to(table.dtype), slots.to(device)
        unchecked.put_rows(table, known, logits, statistics, slots, padding)

    def append_tail(
        self,
        tokens: torch.Tensor,
        rows: RowBuffer | None,
        slots: torch.Tensor,
        of_tail: torch.Tensor,
        id_map: IdMap,
    ) -> None:
        """Append the rows ``[B, at least W, Vd]`` of a tail for the target, after the rows of the
        level below the target. `tokens` ``[B, W]`` are the draft; `rows` None: it is deterministic.
        `of_tail` ``[B]`` is 0 in a row that drafts no tail."""
        table = self.tables.get(1)
        if table is None:  # no row has tokens pending for the target
            return
        width, vocab = tokens.shape[1], table.logits.shape[2]
        device, padding = table.logits.device, table.logits.shape[1] - 1
        slots = slots.where(of_tail[:, None] > 0, padding)
        if rows is None:
            logits = table.logits.new_full((*tokens.shape, vocab), -float("inf"))
            ids = tokens.to(device).clamp_min(0)[..., None]
            statistics, logits = None, logits.scatter_(2, ids, 0.0)
        else:
            logits, statistics = rows
            logits = logits[:, :width]
            if logits.shape[2] < vocab:  # the statistics cover fewer ids
                logits, statistics = id_map.spread(logits, vocab), None
        logits = logits.to(device)
        dtype = torch.promote_types(table.logits.dtype, logits.dtype)
        if dtype != table.logits.dtype:  # promote, to round no logits
            table = self.tables[1] = RowBuffer(table.logits.to(dtype), table.statistics)
        statistics = None if statistics is None else statistics[:, :width].to(device)
        known = None if statistics is None else table.statistics
        logits, slots = logits.to(dtype), slots.to(device)
        unchecked.put_rows(table.logits, known, logits, statistics, slots, padding)
        self.tail_has_statistics = self.tail_has_statistics and statistics is not None

    def append_tree(self, name: str, block: DraftBlock, step: Step, vocab_size: int) -> None:
        """Append the trees of a draft: checked if the host reads the rows, else copied to a fixed
        address. `name` is the drafter's, `vocab_size` that of the level above."""
        if step.host is not None:
            require_tree(name, block, step.host.lengths, vocab_size)
            self.tree = pending_tree(block, step.plan.lengths, step.most)
            if block.rows is not None:
                self.tree = with_repeats(self.tree)
            return
        tree = pending_tree(block, step.plan.lengths, step.most)
        kept = self._trees[step.most][0] if step.most in self._trees else None
        shapes = [[None if x is None else x.shape for x in each] for each in (kept or (), tree)]
        if kept is None or shapes[0] != shapes[1]:
            drawn = None if tree.drawn is None else tree.drawn.clone()  # the drafter overwrites it
            kept = tree._replace(drawn=drawn)
        else:
            for into, new in zip(kept, tree, strict=True):
                if into is not None and new is not None:
                    into.copy_(new)
        self.tree = kept
        self._trees[step.most] = kept, block.rows

    def begin_draft(self, level: int, most: int) -> None:
        """Set the current trees to the memory of a replayed draft of depth `most` for `level`."""
        kept, self.tree = self._trees.get(most), None
        if kept is not None:
            self.tree, self.tables[level] = kept


# ---- all rows ------------------------------------------------------------------------------------


class Rows:
    """The lasting state of a batch by row, at fixed addresses, so that CUDA graphs can be replayed.
    If the host reads the state rows after each step (`on_host`), `requests`, `eos` and `text` have
    request numbers, ids that end each text, and texts."""

    def __init__(self, state: StateRows, on_host: bool = True) -> None:
        self.state, self.on_host = state, on_host
        self.parameters = RowParameters(state.batch, state.device)
        self.pending = PendingRows()
        self.hidden = HiddenWindow(state.batch, _CPU)
        self.requests: Sequence[int] = ()
        self.eos: Sequence[frozenset[int]] | None = None
        self.text: Callable[[int], torch.Tensor] | None = state.text if on_host else None

    def write(self, slots: Sequence[Row], before: Rows, tail: int, width: int) -> None:
        """Write the requests of a batch (`StateRows.write`), and the hidden states of `before`, at
        most `width` per row."""
        self.state.write(slots, before.state, tail)
        if not width or self.hidden.width < width:
            self.hidden = HiddenWindow(self.state.batch, self.state.device, width)
        self.hidden.write(before.hidden)
        self.parameters.write([row.sampling for row in slots], [row.seed for row in slots])
        if self.on_host:
            self.requests, self.eos = [row.number for row in slots], [row.eos for row in slots]

    def fill(self, step: PlannedStep) -> Step:
        """Return a planned step with its tokens, without host synchronisation. Rows that are due
        for another step idle."""
        state, (level, most, width, tail) = self.state, step
        if level == state.shape.levels and self.hidden.width:
            # Tokens with a new hidden state, and the last emitted token.
            width = max(width, self.hidden.width + 1)
            # The shorter length stays, to capture few operators; the draft's report sets it again.
            cached = state.read_by(level)
            torch.minimum(cached, self.hidden.begin, out=cached)
        input_ids, table = schedule.next_step(state.words, state.shape, level, width)
        plan = Plan._make(table.unbind())
        return Step(level, most, width - most, tail, input_ids, table, plan, None, state.numbers)

    def select(self, keep: Sequence[int | None]) -> Rows:
        """Return rows with windows, cached lengths and hidden states of the rows `keep`, in that
        order; None: an empty row. Pending tokens are dropped."""
        rows = Rows(self.state.select(keep))
        window = HiddenWindow(self.state.batch, _CPU)
        window.write(self.hidden)
        window.select(keep)
        rows.hidden = window
        return rows

    def process(
        self, processors: LogitsProcessors, logits: torch.Tensor, step: Step, tree: Tree | None
    ) -> torch.Tensor:
        """Return the logits of a verification after the processors, float32."""
        changed = logits.to(torch.float32, copy=True)
        for slot, rows, prefix in self._texts(step, tree):
            changed[slot, rows] = processors.apply(
                logits[slot, rows], prefix.to(logits.device), self.requests[slot]
            )
        return changed

    def allowed(
        self, processors: RequestProcessors, shape: Sequence[int], step: Step, tree: Tree | None
    ) -> Words:
        """Return the allow-masks ``[B, W, ceil(V / 32)]`` for a verification with logits of `shape`
        ``[B, W, V]``."""
        batch, width, vocab_size = shape
        allowed = stacked([None] * (batch * width), vocab_size).reshape(batch, width, -1)
        for slot, rows, prefix in self._texts(step, tree):
            count = rows.stop - rows.start
            masks = processors.masks(prefix.tolist(), count, self.requests[slot])
            allowed[slot, rows] = stacked(masks, vocab_size, step.level > 1)
        return allowed

    def _texts(self, step: Step, tree: Tree | None) -> Iterator[tuple[int, slice, torch.Tensor]]:
        """Yield for each slot of a step: the slot, a slice of rows of the level's logits, and the
        text that the last of these rows follows."""
        assert step.host is not None
        for slot in step.host.group:
            text, length = self.state.text(slot), step.host.lengths[slot]
            if tree is None:
                yield slot, slice(0, length + 1), text
                continue
            root = text[: len(text) - length]
            for node in range(-1, int(tree.counts[slot])):
                path = root.new_tensor(tree.path_to(slot, node))
                yield slot, slice(node + 1, node + 2), torch.cat([root, path])

    def place(self, level: int, tail: bool, hidden: bool) -> Place:
        """Return the memory of a captured step of `level`, which may draft a `tail` or output
        `hidden` states for the drafter."""
        pending, levels = self.pending, self.state.shape.levels
        parameters = self.parameters.on(self.state.device).values()
        tensors = [self.state.words, self.state.eos, self.state.numbers]
        tensors += [value for value in parameters if isinstance(value, torch.Tensor)]
        # Rows that the step verifies and rows that it appends; a tail's are the target's.
        for at in {level, level - 1, 1} if tail else {level, level - 1}:
            tensors += [tensor for tensor in pending.tables.get(at) or () if tensor is not None]
        if level >= levels - 1 and pending.tree is not None:
            tensors += [tensor for tensor in pending.tree if tensor is not None]
        form: tuple[int | bool, ...] = (level == 1 and not pending.tail_has_statistics,)
        if self.hidden.width and (level == levels or hidden):
            tensors += self.hidden.tensors
            form = (*form, self.hidden.width)
        return Place(self, tensors, form)
