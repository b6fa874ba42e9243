"""`DraftChain`: the levels below a target that runs in another engine or a custom loop.

The levels are a chain with the largest level at the top. Its committed tokens follow the top
level's distribution q and are draft tokens for the target, which verifies them exactly with
`ps.verify`. Each text is then set to the tokens that the target has emitted.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .. import _C, arguments, inputs
from ..chain import Chain
from ..inputs import Parameters, Request
from ..levels.base import require_same_vocabulary
from ..policies import RoundReport, StepReport, WindowPolicy
from ..policies.adaptive import named
from ..runtime.joining import OpenBatch, Reading
from ..runtime.rows import Row
from ..stats import Stats
from ..tensors import common_prefix

if TYPE_CHECKING:
    from typing_extensions import Unpack

_AHEAD = 512  # room for new tokens per text, by which caches are allocated
# The target's draws have the same positions and levels, so drafts need another seed: the seed of a
# row number that no batch has.
_SEED_AT = 1 << 62
_CHUNK = 512  # maximum tokens of a prefill pass


class Pending(NamedTuple):
    """The draft tokens of a text that the target has yet to verify.

    Attributes:
        tokens: m ids.
        logits: ``[m, Vd]``, the draft logits of `ps.verify`: one row per token, before temperature
            and filters, on the device of the chain's first level. None: m is 0.
        round: round in the key of the target's draws: how often the text's drafts were used up or
            dropped so far.
    """

    tokens: list[int]
    logits: torch.Tensor | None
    round: int


@dataclass(slots=True)
class _Text:
    """A text and its drafts."""

    number: int
    request: Request  # ids that the chain cannot read are 0
    tokens: list[int]  # of the prompt, and committed by the target
    row: Row | None = None  # of the chain, with the text and its drafts; None: not joined
    differs: bool = False  # the row has another text than `tokens`, and no draft is pending
    logits: list[torch.Tensor] = field(default_factory=list)  # [Vd] of each draft token
    round: int = 0  # as in `Pending`
    error: Exception | None = None
    windows: list[int] = field(default_factory=list)  # last choice of the policy
    steps: list[StepReport] = field(default_factory=list)  # of the target since the choice
    reported: int | None = None  # length of the text in the last report to the policy
    chosen: bool = False  # whether `windows` apply to the next draft

    @property
    def drafts(self) -> list[int]:
        return [] if self.row is None or self.differs else self.row.tokens[len(self.tokens) :]


class DraftChain:
    """Drafts for the texts of a target in another engine. The caller names each text by a key, such
    as a request id. The drafts of a text depend on the calls for this text alone.

    Args:
        chain: the levels below the target, largest first, for exclusive use. A single level drafts
            alone.
        policy: chooses all windows of a text before it is drafted: the number of tokens pending
            for the target, and the windows of the chain's rounds. `observe` reports the target's
            passes to it. None: `propose` sets the number of pending tokens.
        vocab_size: exclusive upper bound of the target's ids. None: the chain's first level's.
        tokenizer: the target's, compared with the levels' tokenizers. None: vocabularies are
            compared by size alone.
        max_tokens: maximum length of a text with its drafts. None: the context of the levels.

    Raises:
        TypeError, ValueError: an argument of another type or out of range, vocabularies differ, a
            level has an encoder, the drafter reads hidden states, or `chain` has a policy as well.
    """

    def __init__(
        self,
        chain: Chain,
        *,
        policy: WindowPolicy | str | None = None,
        vocab_size: int | None = None,
        tokenizer: Any = None,
        max_tokens: int | None = None,
    ) -> None:
        arguments.instance("chain", chain, Chain)
        if isinstance(policy, str):
            policy = named(policy)
        if policy is not None:
            arguments.instance("policy", policy, WindowPolicy)
            if chain.policy is not None:
                raise ValueError("policy: expected none of the chain's beside this one")
        self.chain, self.policy = chain, policy
        self._drawn = chain.vocab_sizes[0]
        if vocab_size is None:
            vocab_size = self._drawn
        self.vocab_size = arguments.integer("vocab_size", vocab_size, arguments.SIZE_MAX, 1)
        target = SimpleNamespace(vocab_size=self.vocab_size, tokenizer=lambda: tokenizer)
        # The chain has compared its lower levels with the first.
        names = ["in the other engine", chain.names[0]]
        require_same_vocabulary(names, [target, chain.levels[0]])
        if getattr(chain.levels[0], "reads_encoder_input", False):
            raise ValueError(f"chain: expected decoder-only levels, given {chain.names[0]}")
        limits = [m.max_length for m in chain.engine.parts if m.max_length is not None]
        if max_tokens is not None:
            limits.append(arguments.integer("max_tokens", max_tokens, arguments.SIZE_MAX, 1))
        self.max_tokens = min(limits, default=None)
        self._texts: dict[Hashable, _Text] = {}
        self._running: dict[int, _Text] = {}  # by row number
        self._batch = OpenBatch(
            chain.engine,
            chain.owner,
            [],
            policy=chain.policy,
            processors=_Below(self.vocab_size) if self._drawn > self.vocab_size else None,
            observe=self._keep,
            isolates=True,
            reports=policy is not None,
        )
        self._batch.rewind([], [])  # an unsupported rewind fails here, not in `propose`

    @property
    def stats(self) -> Stats:
        """Statistics of all texts, without the target."""
        return self._batch.stats

    @property
    def lengths(self) -> dict[Hashable, int]:
        """Number of tokens of each text, without its drafts."""
        return {key: len(text.tokens) for key, text in self._texts.items()}

    def add(self, key: Hashable, tokens: Sequence[int], **options: Unpack[Parameters]) -> None:
        """Add a text. The levels read it at the first `propose` that needs drafts.

        Args:
            tokens: ids of the text, at least 1.
            options: as for `Chain.generate`, without rules. Temperature and filters are the same as
                in the target's verification, by default temperature 1. Draws of drafts are
                independent of the target's draws with the same seed, by default 0. No draft follows
                a pending EOS id; by default there are no EOS ids.

        Raises:
            TypeError, ValueError: an argument of another type or out of range, the key has a text
                already, or a level does not take several texts.
        """
        if key in self._texts:
            raise ValueError(f"key: expected one without a text, given {key!r} again")
        inputs.require_batches(self.chain.names, self.chain.engine.parts, len(self._texts) + 1)
        ids = self._ids(tokens)
        if not ids:
            raise ValueError("tokens: expected at least 1, given 0")
        inputs.refuse(self.add, options, lacks=["rules"])
        usual: Parameters = {"temperature": 1.0, "seed": 0}
        [request] = inputs.requests([self._read_as(ids)], 0, {**usual, **options}, self.vocab_size)
        seed = _C.row_seed(request.seed, _SEED_AT)
        used = {text.number for text in self._texts.values()}
        number = next(n for n in itertools.count() if n not in used)
        self._texts[key] = _Text(number, replace(request, seed=seed), list(request.tokens))

    def propose(self, wanted: Mapping[Any, int]) -> None:
        """Draft until each text has at least the wanted number of pending tokens. Fewer are
        pending if the policy chooses fewer, a draft token ends the text, the context has no room,
        or the text has failed.

        Raises:
            KeyError: a key without a text.
            RuntimeError: the chain has begun another batch since.
        """
        targets = [
            (self._text(key), arguments.integer("wanted", count, arguments.SIZE_MAX))
            for key, count in wanted.items()
        ]
        with self.chain.owner.work(self._batch):  # the chain has begun no other batch
            pass
        if self.policy is not None:
            targets = self._chosen(self.policy, targets)

        def lacking() -> list[_Text]:
            return [text for text, count in targets if self._lacks(text, count)]

        self._rewind([text for text in lacking() if text.row is not None])
        self._join([text for text in lacking() if text.row is None])
        for text in lacking():
            if text.row is not None and text.windows[1:]:
                self._batch.set_windows(text.row, text.windows[1:])
        while texts := lacking():
            rows = {text.row.number: text.row for text in texts if text.row is not None}
            rest = [row for row in self._batch.rows if row.number not in rows]
            idle = [row for row in rest if not row.ended]
            if any(row.paused for row in rows.values()) or not all(row.paused for row in idle):
                self._batch.pause(idle)
            self._batch.advance()
            for text in texts:
                if text.row is not None and text.row.error is not None:
                    self._fail(text, text.row.error)

    def pending(self, key: Hashable) -> Pending:
        """Return the drafts of a text. KeyError: no text has the key."""
        text = self._text(key)
        drafts = text.drafts
        return Pending(drafts, torch.stack(text.logits) if drafts else None, text.round)

    def observe(self, verified: Mapping[Any, tuple[int, int]], seconds: float = 0.0) -> None:
        """Report a pass of the target to the policy.

        Args:
            verified: per text, the numbers of its draft tokens that were verified and accepted.
            seconds: wall time of the pass. 0: not measured, for example in a pass with a prompt.

        Raises:
            KeyError: a key without a text.
            TypeError, ValueError: a number of another type or out of range.
        """
        seconds = arguments.real("seconds", seconds, sys.float_info.max)
        width = max((tokens for tokens, _ in verified.values()), default=0)
        steps: list[tuple[_Text, StepReport]] = []
        for key, (tokens, accepted) in verified.items():
            text = self._text(key)
            tokens = arguments.integer("verified", tokens, arguments.SIZE_MAX)
            accepted = arguments.integer("accepted", accepted, tokens)
            report = 1, tokens, accepted, width, len(verified), seconds, bool(steps)
            steps.append((text, StepReport(*report)))
        if self.policy is not None:
            for text, step in steps:
                text.steps.append(step)

    def commit(self, key: Hashable, tokens: Sequence[int]) -> None:
        """Append tokens emitted by the target to a text. Drafts equal to them are used up, others
        are dropped. Tokens may be split over several calls.

        Raises:
            KeyError: a key without a text. TypeError, ValueError: `tokens` are no ids.
        """
        text = self._text(key)
        ids, drafts = self._ids(tokens), text.drafts
        used = common_prefix(drafts, ids)
        differs = text.differs or used < len(ids)
        logits = [] if differs else text.logits[used:]
        if drafts and not logits:
            text.round += 1
        text.differs = True  # an interrupt leaves no draft pending
        text.tokens += self._read_as(ids)
        text.chosen = text.chosen and bool(logits)
        text.logits, text.differs = logits, differs

    def remove(self, key: Hashable) -> None:
        """Remove a text and its drafts. KeyError: no text has the key."""
        self._leave(self._text(key))
        del self._texts[key]

    def error(self, key: Hashable) -> Exception | None:
        """Return the error that ended drafting for a text; None: no error."""
        return self._text(key).error

    # ---- texts -----------------------------------------------------------------------------------

    def _text(self, key: Hashable) -> _Text:
        if key not in self._texts:
            raise KeyError(f"key: expected that of a text, given {key!r}")
        return self._texts[key]

    def _ids(self, tokens: Any) -> list[int]:
        ids = arguments.row_integers("tokens", tokens)
        arguments.require_ids("tokens", ids, self.vocab_size)
        return ids

    def _read_as(self, ids: Sequence[int]) -> list[int]:
        return [token if token < self._drawn else 0 for token in ids]

    def _room(self, length: int) -> int:
        return _AHEAD if self.max_tokens is None else min(_AHEAD, self.max_tokens - length)

    def _lacks(self, text: _Text, count: int) -> bool:
        drafts, row, eos = text.drafts, text.row, text.request.eos
        if text.error is not None or len(drafts) >= count or not eos.isdisjoint(drafts):
            return False
        if row is not None and not text.differs:
            return not row.ended
        return (row is None or not row.ended) and self._room(len(text.tokens)) > 0

    # ---- windows ---------------------------------------------------------------------------------

    def _chosen(
        self, policy: WindowPolicy, asked: Sequence[tuple[_Text, int]]
    ) -> list[tuple[_Text, int]]:
        """Return the number of tokens to keep pending for each text, at most as in `asked`."""
        config = self.chain.engine.config
        inner = config.windows[: config.levels - 1]
        due = [(text, count) for text, count in asked if count and not text.chosen]
        for text, count in due:
            now = text.windows or [count, *inner]
            new = 0 if text.reported is None else len(text.tokens) - text.reported
            steps = () if text.reported is None else self._steps(text)
            report = RoundReport(text.number, now, text.tokens, new, steps, len(due))
            name = f"policy ({type(policy).__name__})"
            windows = arguments.sizes(name, policy.next(report), len(now), len(now) + 1)
            text.windows, text.chosen = [min(windows[0], count), *windows[1:]], True
            text.reported, text.steps = len(text.tokens), []
        return [(text, min(text.windows[0], count)) for text, count in asked if count]

    def _steps(self, text: _Text) -> list[StepReport]:
        """Return the steps of a text since the last choice; the chain's levels count from 2."""
        steps = [] if text.row is None else self._batch.steps(text.row)
        if self.chain.engine.config.levels == 1 and steps:  # a pass per token
            seconds = sum(step.seconds for step in steps)
            count, rows = len(steps), max(step.batch for step in steps)
            drafted = StepReport(2, count, 0, count, rows, seconds, steps[0].repeated)
            return [drafted, *text.steps]
        return [*(step._replace(level=step.level + 1) for step in steps), *text.steps]

    # ---- rows of the chain -----------------------------------------------------------------------

    def _keep(self, number: int, logits: torch.Tensor) -> None:
        self._running[number].logits += logits[:, : self.vocab_size].clone().unbind()

    def _rewind(self, texts: Sequence[_Text]) -> None:
        """Set the rows to the target's texts, and extend their room for drafts."""
        rows, tokens = [], []
        for text in texts:
            row = text.row
            assert row is not None
            new = text.tokens if text.differs else row.tokens
            room = self._room(len(new))
            if text.differs or row.room < min(_AHEAD // 2, room):
                row.max_new_tokens = room
                rows.append(row)
                tokens.append(new)
        if rows:
            self._batch.rewind(rows, tokens)
        for text in texts:
            if text.differs:
                text.logits.clear()
            text.differs = False

    def _join(self, texts: Sequence[_Text]) -> None:
        """Add texts to the batch, prefilled separately where the levels support it."""
        ready: list[_Text] = []
        readings: list[Reading] = []
        for text in texts:
            room = self._room(len(text.tokens))
            request = replace(
                text.request, tokens=text.tokens, max_new_tokens=room, eos=frozenset()
            )
            text.row = row = Row(text.number, request, self.chain.names)
            text.differs = False
            self._running[text.number] = text
            try:
                if self._batch.admits:
                    reading = self._batch.open(row)
                    while reading.left:
                        self._batch.read(reading, _CHUNK)
                    readings.append(reading)
                ready.append(text)
            except Exception as error:
                self._fail(text, error)
        rows = [text.row for text in ready if text.row is not None]
        if not rows:
            return
        try:
            self._batch.join(rows, readings)
        except Exception as error:
            for text in ready:
                self._fail(text, error)

    def _fail(self, text: _Text, error: Exception) -> None:
        self._leave(text)
        text.error = error

    def _leave(self, text: _Text) -> None:
        row, text.row = text.row, None
        text.logits.clear()
        if row is None:
            return
        del self._running[row.number]
        self._batch.end(row)
        self._batch.leave(row)


class _Below:
    """Processor that masks the ids from `size` on, which the target lacks."""

    def __init__(self, size: int) -> None:
        self._size = size

    def apply(self, logits: torch.Tensor, prefix: torch.Tensor, row: int) -> torch.Tensor:
        logits = logits.clone()
        logits[:, self._size :] = -torch.inf
        return logits
