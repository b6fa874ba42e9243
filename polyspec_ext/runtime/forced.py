"""Processors in a round: the logits of a verification after them, with the allow-masks of grammars;
and forced tokens before a draft, which are certain, so that every level accepts them. The drafter
reads them, and drafts after them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from .. import rooms
from ..drafters.base import BatchedDrafter, DraftBlock, DraftInput, RowBuffer
from ..grammar import masked, stacked
from ..sampling import RequestProcessors
from ..tensors import IdMap, RowCounts
from .rows import Rows, Step


def process(
    rows: Rows,
    processors: RequestProcessors,
    step: Step,
    tree: rooms.pending_trees.PendingTree | None,
    logits: torch.Tensor,
    observed: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the logits of a verification after the processors, and an allow-mask that remains to
    be applied: none if the logits are `observed`, or a level above reads them."""
    unchanged = logits
    if not processors.only_masks:
        logits = logits.to(torch.float32, copy=True)
        for slot, span, prefix in _texts(rows, step, tree):
            logits[slot, span] = processors.apply(
                unchanged[slot, span], prefix.to(logits.device), rows.requests[slot]
            )
    else:
        batch, width, vocab_size = logits.shape
        words = stacked([None] * (batch * width), vocab_size).reshape(batch, width, -1)
        for slot, span, prefix in _texts(rows, step, tree):
            masks = processors.masks(prefix.tolist(), span.stop - span.start, rows.requests[slot])
            words[slot, span] = stacked(masks, vocab_size)
        if step.level == 1 and not observed:
            return logits, torch.from_numpy(words).to(logits.device)
        logits = masked(logits, words)
    if step.level > 1 and logits is not unchanged:
        # If every id is forbidden, keep the logits: the target alone decides about dead ends.
        logits = unchanged.where(logits.isneginf().all(-1, keepdim=True), logits)
    return logits, None


def _texts(
    rows: Rows, step: Step, tree: rooms.pending_trees.PendingTree | None
) -> Iterator[tuple[int, slice, torch.Tensor]]:
    """Yield for each slot of a step: the slot, a slice of rows of the level's logits, and the text
    that the last of these rows follows."""
    assert step.host is not None
    for slot in step.host.group:
        text, length = rows.state.text(slot), step.host.lengths[slot]
        if tree is None:
            yield slot, slice(0, length + 1), text
        else:
            for span, prefix in tree.texts(slot, text[: len(text) - length]):
                yield slot, span, prefix


def processed(
    rows: torch.Tensor,
    inputs: DraftInput,
    left: Sequence[int],
    drafted: torch.Tensor,
    id_map: IdMap,
    vocab_size: int,
) -> torch.Tensor:
    """Apply the requests' processors to rows of logits ``[B, n, Vd]``, of ids below `vocab_size`,
    after the draft tokens `drafted`, ``[B, n, N]``, in rows with tokens `left` to draw."""
    assert inputs.text is not None
    assert inputs.processors is not None
    logits = rows if id_map.drawn is None else id_map.spread(rows, vocab_size)
    out = logits.to(torch.float32, copy=True)  # the dtype of processors' results
    for b, count in enumerate(left):
        for j, tokens in enumerate(drafted[b] if count else ()):
            prefix, at = torch.cat([inputs.text(b).to(logits.device), tokens]), slice(j, j + 1)
            changed = inputs.processors.apply(logits[b, at], prefix, inputs.requests[b])
            # If every id is forbidden, the token is drawn without processors (from the logits in
            # `out`): the target alone decides about dead ends.
            if not bool(changed.isneginf().all()):
                out[b, at] = changed
    return id_map.gather(out, rows.shape[2])


def forced(
    rows: Rows, processors: RequestProcessors, lengths: Sequence[int], vocab_size: int
) -> list[list[int]]:
    """Return the tokens forced by a grammar in each row, at most the row's draft length."""
    runs: list[list[int]] = []
    for slot, length in enumerate(lengths):
        number = rows.requests[slot]
        forces = length and processors.forces(number)
        known = processors.forced(rows.state.text(slot).tolist(), length, number) if forces else ()
        runs.append(list(itertools.takewhile(vocab_size.__gt__, known)))
    return runs


def draft_behind(
    drafter: BatchedDrafter,
    inputs: DraftInput,
    runs: Sequence[Sequence[int]],
    id_map: IdMap,
    trees: bool,
) -> tuple[DraftBlock, bool]:
    """Draft chains or `trees` after the forced tokens of each row (`runs`, at most its draft
    length). Returns the block with the forced tokens first, and whether the drafter drafted."""
    inputs = _behind(inputs, runs, id_map)
    drafts = inputs.most > 0
    if drafts:
        block = drafter.draft(inputs)
    else:  # every draft is fully forced: the drafter only reads the tokens
        drafter.read(inputs.tokens, list(inputs.counts))
        none = inputs.tokens.new_empty((len(runs), 0))
        block = DraftBlock(none, none.new_zeros(len(runs)), parents=none if trees else None)
    return _in_front(block, runs, inputs.lengths, id_map, inputs.vocab_size), drafts


def _behind(inputs: DraftInput, runs: Sequence[Sequence[int]], id_map: IdMap) -> DraftInput:
    """Return the input of the drafts after forced tokens; a fully forced draft's last token is not
    read."""
    text = inputs.text
    assert text is not None
    left = [length - len(run) for length, run in zip(inputs.lengths, runs, strict=True)]
    read = [list(run) if rest else list(run[:-1]) for run, rest in zip(runs, left, strict=True)]
    added = [len(run) for run in read]
    counts = list(map(int.__add__, inputs.counts, added))
    tokens = torch.nn.functional.pad(inputs.tokens, (0, max(added)))
    for row, (end, run) in enumerate(zip(counts, read, strict=True)):
        tokens[row, end - len(run) : end] = id_map.to_below(tokens.new_tensor(run))

    def whole(row: int) -> torch.Tensor:
        before = text(row)
        return torch.cat([before, before.new_tensor(read[row])])

    return replace(
        inputs,
        tokens=tokens[:, : max(counts)],
        counts=RowCounts(counts),
        lengths=RowCounts(left),
        most=max(left),
        positions=inputs.positions + inputs.positions.new_tensor(added),
        text=whole,
    )


def _in_front(
    block: DraftBlock,
    runs: Sequence[Sequence[int]],
    lengths: Sequence[int],
    id_map: IdMap,
    size: int,
) -> DraftBlock:
    """Return a block with the forced tokens first, then each row's `lengths` draft tokens. Logits
    of a chain cover all ids below `size` then; a forced token's logits allow its id alone."""
    drafted, width = block.tokens, block.tokens.shape[1]
    sizes = [min(width, length) for length in lengths]
    if block.counts is not None:
        sizes = block.counts.tolist()
    most = max(1, *[len(run) + count for run, count in zip(runs, sizes, strict=True)])
    tree = block.parents is not None
    tokens = drafted.new_full((len(runs), most), -1)
    parents = tokens.clone() if tree else None
    rows: torch.Tensor | None = None
    drawn: torch.Tensor | None = None
    if block.rows is not None:
        logits = block.rows.logits
        if not tree and id_map.drawn is not None:
            logits = id_map.spread(logits[..., : id_map.entries_below(size)], size)
        elif not tree:
            missing = max(0, size - logits.shape[2])
            logits = torch.nn.functional.pad(logits[..., :size], (0, missing), value=-torch.inf)
        rows = logits.new_zeros(len(runs), most + tree, logits.shape[2])
        drawn = torch.zeros(rows.shape[:2], dtype=torch.bool, device=rows.device)
    for row, (run, count) in enumerate(zip(runs, sizes, strict=True)):
        begin, end = len(run), len(run) + count
        tokens[row, :begin] = tokens.new_tensor(run)
        tokens[row, begin:end] = drafted[row, :count]
        if parents is not None and block.parents is not None:
            parents[row, :begin] = torch.arange(-1, begin - 1)
            parents[row, begin:end] = block.parents[row, :count] + begin
        if rows is not None and drawn is not None:
            rows[row, :begin] = -torch.inf
            if not tree:
                rows[row, range(begin), run] = 0
            rows[row, begin : end + tree] = logits[row, : count + tree]
            drawn[row, begin : end + tree] = True
            if block.drawn is not None:
                drawn[row, begin : end + tree] = block.drawn[row, : count + tree]
    counts = None
    if block.counts is not None:
        counts = block.counts + block.counts.new_tensor([len(run) for run in runs])
    buffer = None if rows is None else RowBuffer(rows, None)
    return DraftBlock(tokens, counts, None, buffer, parents, drawn if tree else None)
