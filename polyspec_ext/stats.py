"""Statistics of requests: times of each level, and accepted draft tokens, with vLLM's names.

Counts come from values that the host reads in any case, once per verification: statistics need no
additional synchronisation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from . import rooms

HISTOGRAMS = ("acceptance_histogram", "draft_length_histogram")
_DERIVED = (
    "num_accepted_tokens_per_pos", "num_draft_tokens_per_pos", "draft_acceptance_rate_per_pos",
    "mean_acceptance_length", "draft_acceptance_rate",
)  # fmt: skip

_NUMBERS = (
    "num_requests", "num_prompt_tokens", "num_cached_tokens", "num_new_tokens", "tokens_per_second",
    "prefill_seconds", "decode_seconds", "overhead_seconds",
)  # fmt: skip


@dataclass(slots=True)
class LevelStats:
    """Statistics of a level for a request.

    A *draft* is a block handed to this level for verification. The drafter verifies nothing: its
    draft counts stay 0; `num_proposals` and `num_proposed_tokens` count its work.

    Attributes:
        name: name of the level in messages.
        num_forward_passes: forward passes of decoding, without the prefill.
        seconds: wall time of decoding spent in this level: forward passes and its sampling or
            verification.
        prefill_seconds: wall time of reading the prompt.
        num_verifications: verified blocks, plain decoding steps (an empty block) included.
        num_drafts: verified blocks of at least 1 token.
        num_draft_tokens: verified tokens.
        num_accepted_tokens: accepted tokens, up to an EOS.
        num_emitted_tokens: tokens handed up, or committed by the target; corrections and bonus
            tokens included.
        num_proposals: drafts asked of a drafter, empty proposals included.
        num_proposed_tokens: tokens drawn by a drafter.
        num_tails: verified blocks that ended in a tail (``Chain(tail=)``).
        num_tail_tokens: tokens of tails in num_draft_tokens, seen by no level but the drafter;
            num_accepted_tail_tokens: accepted tokens of tails.
        num_accepted_tokens_per_pos: [i] = number of blocks with an accepted token i.
        acceptance_histogram: [a] = number of blocks with exactly a accepted tokens.
        draft_length_histogram: [m] = number of blocks of exactly m tokens; blocks end early at an
            EOS and if few tokens are left to generate.
        emitted_per_verification: tokens handed up or committed by each verification, in order;
            None: not recorded, because the list grows with every token, as in a server.
        num_draft_tokens_per_pos: [i] = number of blocks that had a token i.
        draft_acceptance_rate_per_pos: [i] = accepted share of the blocks that had a token i.
            (vLLM divides by all blocks, which is the same if all have equal lengths.)
    """

    name: str = ""
    num_forward_passes: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    num_verifications: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0
    num_proposals: int = 0
    num_proposed_tokens: int = 0
    num_tails: int = 0
    num_tail_tokens: int = 0
    num_accepted_tail_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    draft_length_histogram: list[int] = field(default_factory=list)
    emitted_per_verification: list[int] | None = field(default_factory=list)

    def verified(self, drafted: int, accepted: int, emitted: int, of_tail: int = 0) -> None:
        """Count a verification of `drafted` tokens, of which the last `of_tail` are a tail."""
        self.num_verifications += 1
        self.num_emitted_tokens += emitted
        if self.emitted_per_verification is not None:
            self.emitted_per_verification.append(emitted)
        if drafted == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        self.num_tails += of_tail > 0
        self.num_tail_tokens += of_tail
        self.num_accepted_tail_tokens += max(0, accepted - (drafted - of_tail))
        histogram, lengths = self.acceptance_histogram, self.draft_length_histogram
        if len(histogram) <= drafted:
            zeros = [0] * (drafted + 1 - len(histogram))
            histogram.extend(zeros)
            lengths.extend(zeros)
        histogram[accepted] += 1
        lengths[drafted] += 1

    @property
    def num_accepted_tokens_per_pos(self) -> list[int]:
        return _reaching(self.acceptance_histogram)

    @property
    def num_draft_tokens_per_pos(self) -> list[int]:
        return _reaching(self.draft_length_histogram)

    @property
    def draft_acceptance_rate_per_pos(self) -> list[float]:
        pairs = zip(self.num_accepted_tokens_per_pos, self.num_draft_tokens_per_pos, strict=True)
        return [accepted / drafted for accepted, drafted in pairs]

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted tokens per block: tokens gained by a verification, bonus included. NaN
        without a block."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else math.nan

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted share of the verified tokens. NaN without a token."""
        drafted = self.num_draft_tokens
        return self.num_accepted_tokens / drafted if drafted else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, None for undefined values; without `emitted_per_verification`,
        which grows with the text."""
        names = [name for name in self.__slots__ if name != "emitted_per_verification"]
        plain: dict[str, Any] = {name: getattr(self, name) for name in (*names, *_DERIVED)}
        for name, value in plain.items():
            if isinstance(value, list):
                plain[name] = list(value)
            elif isinstance(value, float) and math.isnan(value):
                plain[name] = None
        return plain


def _reaching(histogram: Sequence[int]) -> list[int]:
    tail, counts = 0, []
    for blocks in reversed(histogram[1:]):
        tail += blocks
        counts.append(tail)
    return counts[::-1]


@dataclass(slots=True)
class Stats:
    """Statistics of a request, or of several. `levels[0]` is the target, `levels[-1]` the drafter.
    Prefill and decoding are timed apart.

    Attributes:
        num_cached_tokens: prompt tokens that the target took from the prefix cache instead of
            reading them (``Chain.batch(cache_prompt=)``).
    """

    levels: list[LevelStats]
    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    decode_seconds: float = 0.0
    num_requests: int = 1
    num_cached_tokens: int = 0

    @property
    def prefill_seconds(self) -> float:
        return sum(level.prefill_seconds for level in self.levels)

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of decoding. NaN before the first token."""
        return self.num_new_tokens / self.decode_seconds if self.decode_seconds > 0 else math.nan

    @property
    def overhead_seconds(self) -> float:
        """Decoding time outside the levels: the loop, the scheduler and the bookkeeping."""
        return self.decode_seconds - sum(level.seconds for level in self.levels)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, ready for JSON, None for undefined values."""
        plain: dict[str, Any] = {name: getattr(self, name) for name in _NUMBERS}
        if math.isnan(self.tokens_per_second):
            plain["tokens_per_second"] = None
        return {**plain, "levels": [level.to_dict() for level in self.levels]}

    @property
    def speed(self) -> str:
        """Tokens and seconds in a line."""
        prefill, decoding = self.prefill_seconds * 1e3, self.decode_seconds * 1e3
        return (
            f"{self.num_new_tokens} tokens, {self.tokens_per_second:.1f} tokens/s "
            f"(prefill {prefill:.1f} ms, decoding {decoding:.1f} ms)"
        )

    def __repr__(self) -> str:
        """Return the speed, and a line per level."""
        lines = [self.speed]
        for number, level in enumerate(self.levels, 1):
            line = f"  level {number} {level.name}: {level.num_forward_passes} passes, "
            line += f"{level.seconds * 1e3:.1f} ms"
            if level.num_drafts:
                line += (
                    f", mean acceptance length {level.mean_acceptance_length:.2f}, "
                    f"rate {level.draft_acceptance_rate:.2f}"
                )
            lines.append(line)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        heads = ("passes", "ms", "drafts", "mean acceptance length", "rate")
        rows = []
        for level in self.levels:
            cells = [str(level.num_forward_passes), f"{level.seconds * 1e3:.1f}"]
            if level.num_drafts:
                cells += [str(level.num_drafts), f"{level.mean_acceptance_length:.2f}"]
                cells.append(f"{level.draft_acceptance_rate:.2f}")
            rows.append((level.name, cells))
        return rooms.columns.html("level", heads, rows, self.speed)


class StatsRecorder:
    """A recorder of the steps of a batch, in its total and in the statistics of each row that took
    part. Times and forward passes are the batch's, and count in full for each of its rows.

    Args:
        total: statistics of the batch; a single row may share them.

    Attributes:
        prefill_seconds: prefill seconds of the batch so far.
    """

    def __init__(self, total: Stats) -> None:
        self._total, self.prefill_seconds = total, 0.0
        self.follow(())

    def follow(self, rows: Sequence[Stats]) -> None:
        """Set the rows of later entries."""
        total, self._rows = self._total, rows
        # The statistics that a row's entry counts in: the row's, unless it is the total, and it.
        self._both = [(row,) if row is total else (row, total) for row in rows]
        self._all = list({id(stats): stats for stats in (total, *rows)}.values())

    def decoded(self, seconds: float) -> None:
        """Add the seconds of a round of the target."""
        for stats in self._all:
            stats.decode_seconds += seconds

    def prefilled(self, index: int, seconds: float, row: Stats | None = None) -> None:
        """Add the seconds of a level's prefill; of a single request outside the batch, `row`."""
        self.prefill_seconds += seconds
        both = () if row is None else (row, self._total)
        for stats in {id(stats): stats for stats in both}.values() if both else self._all:
            stats.levels[index].prefill_seconds += seconds

    def spent(self, index: int, seconds: float, passes: int) -> None:
        """Add the passes in which a level read tokens missing in its cache."""
        for stats in self._all:
            level = stats.levels[index]
            level.num_forward_passes += passes
            level.seconds += seconds

    def drafted(
        self,
        entries: Sequence[Sequence[int]],
        seconds: float,
        passes: int,
        nodes: Sequence[int] | None = None,
    ) -> None:
        """Add a draft: by row the `entries` of the state rows' log (`runtime.rows.Entry`) and the
        `nodes` of trees."""
        took = [self._total]
        for at, (pair, entry) in enumerate(zip(self._both, entries, strict=True)):
            if entry[0] < 0:
                continue
            for stats in pair:
                stats.levels[-1].num_proposals += 1
                stats.levels[-1].num_proposed_tokens += entry[3] if nodes is None else nodes[at]
            took += pair[:-1]
        for stats in took:
            stats.levels[-1].num_forward_passes += passes
            stats.levels[-1].seconds += seconds

    def verified(self, index: int, entries: Sequence[Sequence[int]], seconds: float) -> None:
        """Add a verification by a level, by row; the target's emitted tokens are committed."""
        took = [self._total]
        for pair, entry in zip(self._both, entries, strict=True):
            tokens, _, accepted, emitted, _, _, of_tail = entry
            if tokens < 0:
                continue
            for stats in pair:
                stats.levels[index].verified(tokens, accepted, emitted, of_tail)
                if index == 0:
                    stats.num_new_tokens += emitted
            took += pair[:-1]
        for stats in took:
            stats.levels[index].num_forward_passes += 1
            stats.levels[index].seconds += seconds


def merge(requests: Sequence[Stats]) -> Stats:
    """Return the sums of counts and times of several requests of a chain. (For requests that shared
    a batch use the batch's total: their times overlap.)"""
    if not requests:
        raise ValueError("expected the statistics of at least one request, given none")
    total = Stats([LevelStats(level.name) for level in requests[0].levels], num_requests=0)
    for stats in requests:
        for name in Stats.__slots__[1:]:
            setattr(total, name, getattr(total, name) + getattr(stats, name))
        for into, level in zip(total.levels, stats.levels, strict=True):
            for name in LevelStats.__slots__:
                if name not in ("name", "emitted_per_verification", *HISTOGRAMS):
                    setattr(into, name, getattr(into, name) + getattr(level, name))
            before, added = into.emitted_per_verification, level.emitted_per_verification
            lengths = None if before is None or added is None else [*before, *added]
            into.emitted_per_verification = lengths
            for name in HISTOGRAMS:
                pairs = zip_longest(getattr(into, name), getattr(level, name), fillvalue=0)
                setattr(into, name, [sums + blocks for sums, blocks in pairs])
    return total
