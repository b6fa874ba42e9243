"""The rounds of a batch on its way through a chain.

Every row has its own `Scheduler`, which alone says what the row does next; the batch only lets
rows do together what they would do anyway. Rows that lag behind further down the chain go first,
so that the others find them at the same level. No token of a row depends on its neighbours, since
draws are keyed by the row's own seed and position (contract C3).

Where all levels are on one CUDA device, a round of the target is done there alone
(`device_rounds`). Else the host waits for nothing while a window is drafted; it reads tokens,
counts and status of a verification together, once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .. import ops
from .._C import StepKind
from ..drafters import DraftModel, proposals
from ..drafters.model import Draft, raise_for_draft
from ..errors import ERROR_BITS, RequestError, named
from ..levels import device_of
from ..returned import call
from ..sampling import Sampling
from ..stats import Books, LevelStats, Stats
from ..tensors import Parameters
from .prefill import prefill
from .reading import Reading, read
from .replay import Observer, replay
from .request import PendingLaws, Row, cut_at_eos
from .verification import Group, judge

if TYPE_CHECKING:
    from ..chain import Chain
    from ..integrations.processors import LawProcessors


class Batch:
    """B prompts on their way through a chain. The chain's caches belong to its latest batch.

    Args:
        chain: the levels and the rule.
        prompts: token ids, at least one each; the lists grow by what is generated.
        max_new_tokens: upper bounds of new tokens, >= 0.
        sampling: parameters, the same on every level of a row's chain.
        seeds: key the draws; in [0, 2**64).
        eos: ids that end each text.
        processors: change logits before they become a law, on every level alike (contract C1).
        observe: called with a row's number and the target's logits ``[e, V]``, processed, behind
            which its e committed tokens were emitted.

    Attributes:
        rows: one per request, in the order given.
        stats: the whole batch: counts added up, times and forward passes counted once.
    """

    def __init__(
        self,
        chain: Chain,
        prompts: Sequence[list[int]],
        *,
        max_new_tokens: Sequence[int],
        sampling: Sequence[Sampling],
        seeds: Sequence[int],
        eos: Sequence[frozenset[int]],
        processors: LawProcessors | None = None,
        observe: Observer | None = None,
    ) -> None:
        self.chain = chain
        self._processors, self._observe = processors, observe
        names = chain.names
        self.stats = Stats([LevelStats(name) for name in names])
        single = len(prompts) == 1
        self.rows: list[Row] = []
        for number, prompt in enumerate(prompts):
            stats = self.stats if single else Stats([LevelStats(name) for name in names])
            stats.num_prompt_tokens = len(prompt)
            self.rows.append(
                Row(
                    number,
                    prompt,
                    chain.window,
                    chain.rounds,
                    max_new_tokens[number],
                    sampling[number],
                    seeds[number],
                    eos[number],
                    stats,
                    proposals.for_request(chain.drafter, number, names[-1]),
                )
            )
        if not single:
            self.stats.num_prompt_tokens = sum(map(len, prompts))
            self.stats.num_requests = len(prompts)
        self._books = Books(self.stats)
        self._slots = list(self.rows)
        self._parameters = Parameters(sampling, seeds)
        count = len(chain.levels)
        self._read = [False] * count  # levels that have read the prompts
        self._pending = [PendingLaws(len(prompts), device_of(level)) for level in chain.levels]
        self._unread: Draft | None = None
        self._begun = False
        with chain.owner.work():
            if isinstance(chain.drafter, DraftModel):
                chain.drafter.forget()
                chain.drafter.processors = processors
            chain.owner.begin(self)

    @torch.inference_mode()
    def advance(self) -> list[tuple[int, list[int]]]:
        """Rounds until the target commits tokens: these, by the number of their row; nothing when
        every text is complete.

        Raises:
            RequestError: a row of logits has no law; names request, level and position.
            RuntimeError: the chain has begun another batch since, or this one failed; or it is at
            work for another call.
        """
        with self.chain.owner.work():
            return self._advance()

    @torch.inference_mode()
    def complete(self) -> None:
        """`advance` until every text is complete, with no other call in between."""
        with self.chain.owner.work():
            while self._advance():
                pass

    def _advance(self) -> list[tuple[int, list[int]]]:
        self.chain.owner.require(self)
        began = time.perf_counter()
        prefilled = self.stats.prefill_seconds
        try:
            committed = self._rounds()
        except BaseException:
            self.chain.owner.end(self)
            raise
        seconds = time.perf_counter() - began - (self.stats.prefill_seconds - prefilled)
        self._books.decoded([row.stats for row in self._slots], seconds)
        return committed

    def stop(self, number: int) -> None:
        """Row `number` is complete now; what is pending for it is forgotten."""
        self.rows[number].ended = True

    def _rounds(self) -> list[tuple[int, list[int]]]:
        if not self._begun:
            self._begun = True
            self._read = prefill(self.chain, self._slots, self._books)
        if all(row.ended for row in self._slots):
            return []
        self._leave()
        rounds = self.chain.device_rounds
        if rounds is not None and self._processors is None and rounds.ready(self._slots):
            out = rounds.run(self._slots, self._parameters)
            return replay(rounds, out, self._slots, self._books, self._observe)
        while True:
            drafting: list[tuple[Row, int]] = []
            judging: list[tuple[Row, int]] = []
            deepest = 0
            for row in self._slots:
                if row.ended:
                    continue
                step = row.scheduler.next()
                if step.kind == StepKind.DRAFT:
                    drafting.append((row, step.count))
                elif step.kind == StepKind.VERIFY:
                    if step.level > deepest:
                        deepest, judging = step.level, []
                    if step.level == deepest:
                        judging.append((row, step.count))
            if drafting:
                self._draft(drafting)
            elif judging:
                emitted = self._verify(deepest - 1, judging)
                if deepest == 1:
                    return emitted
            else:
                return []

    def _leave(self) -> None:
        """Rows that are complete leave the caches once they are a quarter of them: what stays is
        copied then."""
        slots = self._slots
        staying = [row for row in slots if not row.ended]
        if len(staying) == len(slots) or not staying or len(staying) * 4 > len(slots) * 3:
            return
        keep = [row.slot for row in staying]
        chain, group = self.chain, [(row, 0) for row in staying]
        for index, level in enumerate(chain.levels):
            if self._read[index]:
                with named(chain.names, index, group):
                    call(chain.names[index], level, "select", keep)
        for pending in self._pending:
            pending.select(keep)
        if isinstance(chain.drafter, DraftModel):
            with named(chain.names, -1, group):
                chain.drafter.select(keep)
        for slot, row in enumerate(staying):
            row.slot = slot
        self._slots = staying
        self._parameters = Parameters(
            [row.sampling for row in staying], [row.seed for row in staying]
        )

    # ---- drafting --------------------------------------------------------------------------------

    def _draft(self, group: Group) -> None:
        """One drafting round: up to so many tokens for each row's lowest level that verifies."""
        drafter = self.chain.drafter
        began = time.perf_counter()
        passes, prefill = proposals.counters(drafter)
        if isinstance(drafter, DraftModel):
            self._draft_together(group, drafter)
        else:
            for row, count in group:
                self._draft_alone(row, count)
        more_passes, more_prefill = proposals.counters(drafter)
        prefill = more_prefill - prefill  # of a drafter that is no model, and reads when asked
        self._books.prefilled([row.stats for row, _ in group], -1, prefill)
        self._book(group, -1, began + prefill, more_passes - passes)

    def _draft_together(self, group: Group, drafter: DraftModel) -> None:
        slots = self._slots
        counts = [0] * len(slots)
        for row, count in group:
            counts[row.slot] = count
        contexts = [row.context for row in slots]
        with named(self.chain.names, -1, group):
            draft = drafter.draft(contexts, counts, self._parameters)
        if draft.tokens is None:
            self._unread = draft
        width = draft.drawn.shape[1]
        pending = self._pending[-1]
        chunk = None if draft.logits is None else pending.chunk(draft.logits, draft.laws)
        for row, _ in group:
            count = draft.counts[row.slot]
            if draft.tokens is None:
                first = -1 - row.slot * width
                new, ended = list(range(first, first - count, -1)), False
            else:
                new = draft.tokens[row.slot]
                ended = bool(new) and new[-1] in row.eos
            if chunk is not None and new:
                pending.add(row.slot, chunk, len(new))
            self._drafted(row, count, new, ended)
        for row in slots:  # what is void for a row was cut, whether it took part or not
            row.context.valid = len(row.tokens)

    def _draft_alone(self, row: Row, count: int) -> None:
        drafter = row.drafter
        assert drafter is not None
        names, vocab = self.chain.names, self.chain.vocab_sizes
        with named(names, -1, [(row, count)]):
            length = len(row.tokens)
            proposal = drafter.propose(row.context, count)
            if len(row.tokens) != length:
                raise ValueError(
                    f"{names[-1]}: expected propose to leave context.tokens as they are, "
                    f"{length} ids, given {len(row.tokens)}"
                )
            tokens = proposals.proposed_tokens(
                proposal,
                count,
                name=names[-1],
                vocab_size=vocab[-1],
                target_vocab_size=vocab[0],
            )
        kept, ended = cut_at_eos(tokens, row.eos)
        pending = self._pending[-1]
        one = None
        if proposal.logits is not None and not row.sampling.greedy:
            one = pending.chunk(proposal.logits, proposal.laws)
        pending.add(row.slot, one, len(kept), 0)
        if len(self._slots) > 1:  # another row's drafter may use the same buffer
            pending.hold([row.slot])
        self._drafted(row, len(tokens), kept, ended)
        row.context.valid = len(row.tokens)

    def _drafted(self, row: Row, proposed: int, kept: list[int], ended: bool) -> None:
        row.context.round += 1
        row.tokens += kept
        self._books.proposed(row.stats, proposed)
        # Fewer than asked for, or none, closes the block: the level above judges what there is.
        row.scheduler.report(len(self.chain.names), len(kept), ended)

    # ---- verification ----------------------------------------------------------------------------

    def _verify(self, index: int, group: Group) -> list[tuple[int, list[int]]]:
        """Level `index` (from 0) judges the pending tokens of some rows. Returns what it emits for
        each, cut behind an EOS."""
        chain = self.chain
        began = time.perf_counter()
        with named(chain.names, index, group):
            slots, unread = self._slots, self._unread
            r, logits = judge(
                chain,
                index,
                group,
                slots,
                self._pending[index],
                self._parameters,
                None if unread is None else unread.drawn,
                self._processors,
            )
            look = self._look(r, index, group)
        above = self._pending[index - 1] if index > 0 and not self._parameters.greedy else None
        handed = None if above is None else above.chunk(logits, r.laws)
        out: list[tuple[int, list[int]]] = []
        cut: set[int] = set()  # levels whose caches hold something void
        for row, count in group:
            slot = row.slot
            accepted, start = look.accepted[slot], len(row.tokens) - count
            if look.status[slot] & ERROR_BITS:
                at = start + accepted
                raise RequestError(row.number, index + 1, at, look.status[slot])
            kept, ended = cut_at_eos(look.tokens[slot][: accepted + 1], row.eos)
            emitted = len(kept)
            accepted = min(accepted, emitted)
            row.rounds[index] += 1
            if above is not None and handed is not None:
                above.add(slot, handed, emitted)
            row.tokens[start:] = kept
            row.cached[index] = start + count
            cut |= row.cut(index, start + accepted)
            row.scheduler.report(index + 1, emitted, ended)
            self._books.judged(row.stats, index, count, accepted, emitted)
            if index == 0:
                row.logprobs += look.logprobs[slot][:emitted]
                self._books.committed(row.stats, emitted)
                if self._observe is not None:
                    self._observe(row.number, logits[slot, :emitted])
                row.ended = row.ended or row.scheduler.done
            out.append((row.number, kept))
        if above is not None and self._goes_deeper(index):
            above.hold([row.slot for row, _ in group if not row.sampling.greedy])
        for i in cut:
            if self._read[i]:
                with named(chain.names, i, group):
                    lengths = [row.cached[i] for row in slots]
                    call(chain.names[i], chain.levels[i], "rollback", lengths)
        self._book(group, index, began, 1)
        return out

    def _goes_deeper(self, index: int) -> bool:
        """Whether level `index` (from 0) may read again before the level above it judges."""
        steps = (row.scheduler.next() for row in self._slots if not row.ended)
        return any(step.kind == StepKind.DRAFT or step.level > index for step in steps)

    def _look(self, r: ops.VerifyResult, index: int, group: Group) -> Reading:
        """Tokens, counts and status on the host, in one reading."""
        draft, self._unread = self._unread, None
        look = read(r, draft, index == 0)
        if draft is not None and look.drafted is not None:
            counts = [0] * len(self._slots)
            for row, count in group:
                counts[row.slot] = count
            ends = [len(row.tokens) - n for row, n in zip(self._slots, counts, strict=True)]
            raise_for_draft(look.drafted, [row.context for row in self._slots], ends, counts)
        return look

    def _book(self, group: Group, index: int, began: float, passes: int) -> None:
        seconds = time.perf_counter() - began
        self._books.spent([row.stats for row, _ in group], index, seconds, passes)
