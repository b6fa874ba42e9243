"""What a request cost and how much of each level's draft was accepted. The names are those of
vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class LevelStats:
    """One level's share of a request.

    A *draft* is one block handed to this level for verification. The drafter verifies nothing: its
    draft counts stay 0 and `num_proposed_tokens` holds what it drew.

    Attributes:
        name: what messages call the level.
        num_forward_passes: forward passes while decoding; the prefill is not one of them.
        seconds: wall time of decoding spent in this level: forward passes and its sampling or
            verification.
        prefill_seconds: wall time of reading the prompt.
        num_verifications: blocks judged, plain decoding steps (an empty block) included.
        num_drafts: blocks judged that had at least one token.
        num_draft_tokens: tokens judged.
        num_accepted_tokens: of these, accepted (and not behind an EOS).
        num_emitted_tokens: tokens handed up, or committed by the target; corrections and bonus
            tokens included.
        num_proposed_tokens: tokens drawn by a drafter.
        num_accepted_tokens_per_pos: [i] = number of blocks whose token i was accepted.
        acceptance_histogram: [a] = number of blocks of which exactly a tokens were accepted.
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
    num_proposed_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)

    def judged(self, drafted: int, accepted: int, emitted: int) -> None:
        """Count one verification of `drafted` tokens."""
        self.num_verifications += 1
        self.num_emitted_tokens += emitted
        if drafted == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        histogram = self.acceptance_histogram
        if len(histogram) <= drafted:
            histogram.extend([0] * (drafted + 1 - len(histogram)))
        histogram[accepted] += 1

    @property
    def num_accepted_tokens_per_pos(self) -> list[int]:
        tail, counts = 0, []
        for blocks in reversed(self.acceptance_histogram[1:]):
            tail += blocks
            counts.append(tail)
        return counts[::-1]

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted tokens per block: tokens gained by one verification, bonus included. NaN
        without a block."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else float("nan")

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted share of the tokens judged. NaN without one."""
        return (
            self.num_accepted_tokens / self.num_draft_tokens
            if self.num_draft_tokens
            else float("nan")
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, with None for what is not defined."""
        plain: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        plain["acceptance_histogram"] = list(self.acceptance_histogram)
        plain["num_accepted_tokens_per_pos"] = self.num_accepted_tokens_per_pos
        for name in ("mean_acceptance_length", "draft_acceptance_rate"):
            value = getattr(self, name)
            plain[name] = value if value == value else None
        return plain


@dataclass(slots=True)
class Stats:
    """One request. `levels[0]` is the target, the last one the drafter. Prefill and decoding are
    timed apart."""

    levels: list[LevelStats]
    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    decode_seconds: float = 0.0

    @property
    def prefill_seconds(self) -> float:
        return sum(level.prefill_seconds for level in self.levels)

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of decoding. NaN before the first."""
        return (
            self.num_new_tokens / self.decode_seconds if self.decode_seconds > 0 else float("nan")
        )

    @property
    def overhead_seconds(self) -> float:
        """Decoding time outside the levels: the loop, the scheduler and the bookkeeping."""
        return self.decode_seconds - sum(level.seconds for level in self.levels)

    def to_dict(self) -> dict[str, Any]:
        rate = self.tokens_per_second
        return {
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_new_tokens": self.num_new_tokens,
            "tokens_per_second": rate if rate == rate else None,
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds,
            "overhead_seconds": self.overhead_seconds,
            "levels": [level.to_dict() for level in self.levels],
        }


def merge(requests: Sequence[Stats]) -> Stats:
    """Counts and times of several requests of one chain, added up."""
    if not requests:
        raise ValueError("expected the statistics of at least one request, given none")
    total = Stats([LevelStats(level.name) for level in requests[0].levels])
    for stats in requests:
        total.num_prompt_tokens += stats.num_prompt_tokens
        total.num_new_tokens += stats.num_new_tokens
        total.decode_seconds += stats.decode_seconds
        for into, level in zip(total.levels, stats.levels, strict=True):
            for name in LevelStats.__slots__:
                if name not in ("name", "acceptance_histogram"):
                    setattr(into, name, getattr(into, name) + getattr(level, name))
            longer = len(level.acceptance_histogram) - len(into.acceptance_histogram)
            into.acceptance_histogram.extend([0] * max(0, longer))
            for accepted, blocks in enumerate(level.acceptance_histogram):
                into.acceptance_histogram[accepted] += blocks
    return total
