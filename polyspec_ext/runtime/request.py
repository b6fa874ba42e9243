"""What the host keeps of one request of a batch. Who waits for whom with which tokens stands in its
state row (`state`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..levels.base import EncodedInput
from ..sampling import Sampling
from ..stats import Stats


@dataclass(slots=True)
class Row:
    """One request.

    Attributes:
        number: its index in the batch, for messages.
        tokens: prompt and committed tokens.
        max_new_tokens: upper bound of new tokens.
        sampling, seed, eos: of the request.
        stats: its statistics.
        encoded: what an encoder reads, of a chain of encoder-decoder models.
        slot: its place in the caches, which changes when neighbours leave.
        logprobs: of the committed tokens, under the target's processed distribution.
        ended: the text is complete.
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

    def __post_init__(self) -> None:
        self.slot = self.number
        self.ended = self.max_new_tokens == 0

    @property
    def committed(self) -> int:
        """Tokens that stand for good: the prompt's and the target's."""
        return len(self.tokens)

    @property
    def room(self) -> int:
        """Tokens that the target may still emit."""
        return 0 if self.ended else self.max_new_tokens - len(self.logprobs)
