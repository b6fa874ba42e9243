"""Models whose state cannot be cut at a token, as levels: recurrent ones, hybrids of recurrent
layers and attention (Qwen3-Next, Granite 4, Nemotron-H, LFM2), and attention with an index of its
keys (DeepSeek V3.2).

A level keeps copies of the state (checkpoints) in front of its latest passes. A rollback restores
the newest one that is short enough, and the tokens behind it are read again with the next pass.
"""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .. import arguments
from ..kv_cache import factory as caches
from ..tensors import RowCounts
from .base import Hidden, InputBlock, LevelCapabilities, LevelOutput, PromptBatch, reading
from .cpu import packed, unpacked
from .models import (
    ModelLevel,
    Unchanged,
    cache_name,
    failure,
    ids_of,
    is_sharded,
    relative_difference,
    require_continued,
    require_no_autocast,
    text_of,
    tolerance,
)
from .products import without_wrapper

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Tensors of a layer that passes overwrite; keys and values are replaced by new tensors.
_OVERWRITTEN = ("conv_states", "recurrent_states")
# So many tokens are read again within the next pass; more in a pass before it, with a checkpoint
# behind them, so that steady rejections do not have the same tokens read again and again.
_RIDE = 8


class _Row:
    """The state of one row.

    Attributes:
        length: tokens that `past` has read.
        checkpoints: lengths and copies of the layers, oldest first.
    """

    def __init__(self, past: Any, checkpoints: int) -> None:
        self.past, self.length = past, 0
        self.checkpoints: deque[tuple[int, list[dict[str, Any]]]] = deque(maxlen=checkpoints)

    def checkpoint(self) -> None:
        """Keep a copy of the state as it is."""
        if self.length:
            self.checkpoints.append((self.length, [_copied(layer) for layer in self.past.layers]))

    def rollback(self, length: int, empty: Any) -> None:
        """Restore the newest checkpoint of at most `length` tokens; `empty`: an empty cache."""
        if length >= self.length:
            return
        while self.checkpoints and self.checkpoints[-1][0] > length:
            self.checkpoints.pop()
        if self.checkpoints:
            self.length, layers = self.checkpoints.pop()
            for layer, kept in zip(self.past.layers, layers, strict=True):
                vars(layer).clear()
                vars(layer).update(kept)
        else:
            self.past, self.length = empty, 0


def _copied(layer: Any) -> dict[str, Any]:
    """Return what a layer of a cache holds, with copies of what passes overwrite."""
    kept = dict(vars(layer))
    for name, value in kept.items():
        if isinstance(value, dict):
            kept[name] = dict(value)
    for name in _OVERWRITTEN:
        states = kept.get(name)
        if isinstance(states, torch.Tensor):
            kept[name] = states.clone()
        elif isinstance(states, dict):
            kept[name] = {key: copy.deepcopy(state) for key, state in states.items()}
    return kept


class StatefulLevel(ModelLevel):
    """A `transformers` causal language model with a state that cannot be cut. Each row of a batch
    has its cache and its passes.

    Args:
        model: in eval mode.
        name: for messages and statistics; None: the model's name or class.
        pack: as of `HuggingFaceLevel`.
        checkpoints: copies of a row's state that are kept. A rollback by more passes reads more
            tokens again.
        prefill_chunk: tokens that one pass reads at most.

    Attributes:
        stepwise: the model drops its state in passes of several tokens, so that every token behind
            the first pass is a pass. Such a level can draft, and gains nothing as a target.
        num_replayed: tokens that were read again behind checkpoints.
        revision: see `levels.base.Continuing`.

    Raises:
        TypeError: not a causal language model, or an argument is none of the above.
        ValueError: in training mode or under `torch.autocast`, weights on the meta device, logits
            that the operators do not read, or the logits behind a restored state are not those of
            one pass over the text. The message names the level.
    """

    supports_batches = True
    one_at_a_time = None
    reads_apart = True
    no_trees = "its state reads tokens in order"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        name: str | None = None,
        pack: bool = False,
        checkpoints: int = 8,
        prefill_chunk: int = 1024,
    ) -> None:
        arguments.model("model", model)
        model = without_wrapper(model)
        arguments.label("name", name)
        arguments.flag("pack", pack)
        self._checkpoints = arguments.integer("checkpoints", checkpoints, arguments.SIZE_MAX, 1)
        self.prefill_chunk = arguments.integer(
            "prefill_chunk", prefill_chunk, arguments.SIZE_MAX, 1
        )
        super().__init__(model, name or caches.name_of(model))
        require_no_autocast(self.device, self.name)
        self.pack, self.choice = pack, None
        self._runs, self.varies = packed(model, self.name) if pack else unpacked(model)
        self._unchanged = Unchanged(model, self.name, copied=self._runs is not model)
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = cache_name(model)
        self._slices, self._placed = "logits_to_keep" in parameters, "position_ids" in parameters
        self.capabilities = LevelCapabilities(
            batches=True,
            reads_apart=True,
            admits=True,
            continues=True,
            checked=True,
            sharded=is_sharded(model),
            id_map=self.id_map,
        )
        self._rows: list[_Row] = []
        self.revision = 0
        self.stepwise, self.num_replayed = False, 0
        self._probe()

    def __reduce__(self) -> tuple[Any, ...]:
        """Have `copy` and `pickle` make the level anew over a copy of its model."""
        options: dict[str, Any] = {
            "name": self.name,
            "pack": self.pack,
            "checkpoints": self._checkpoints,
            "prefill_chunk": self.prefill_chunk,
        }
        return partial(type(self), **options), (self.model,)

    def _row(self) -> _Row:
        return _Row(self._empty(), self._checkpoints)

    def _empty(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    # ---- passes ----------------------------------------------------------------------------------

    def _pass(self, row: _Row, tokens: torch.Tensor, keep: int) -> torch.Tensor:
        """Append tokens ``[1, T]`` to a row; return the logits ``[keep, V]`` behind the last."""
        options: dict[str, Any] = {"use_cache": True, "return_dict": True}
        if self._placed:  # some models count from 0 in every pass
            places = torch.arange(row.length, row.length + tokens.shape[1], device=tokens.device)
            options["position_ids"] = places[None]
        if self._slices:
            options["logits_to_keep"] = max(keep, 1)
        row.checkpoint()
        options[self._cache_name] = row.past
        logits: torch.Tensor = self._runs(input_ids=tokens, **options).logits
        row.length += tokens.shape[1]
        return logits[0, logits.shape[1] - keep :]

    def _append(self, row: _Row, tokens: torch.Tensor, keep: int) -> torch.Tensor:
        """Append tokens ``[1, T]`` in as many passes as that takes; return the logits ``[keep, V]``
        behind the last."""
        total = tokens.shape[1]
        ends = list(range(self.prefill_chunk, total, self.prefill_chunk))
        if row.length and total - keep > _RIDE:
            ends.append(total - keep)
        if self.stepwise and row.length:
            ends = list(range(1, total))
        elif self.stepwise:
            ends = list(range(max(total - keep, 1), total))
        kept, begin = [], 0
        for end in [*sorted(set(ends)), total]:
            wanted = max(0, end - max(begin, total - keep))
            logits = self._pass(row, tokens[:, begin:end], wanted)
            if wanted:
                kept.append(logits)
            begin = end
        return torch.cat(kept) if len(kept) > 1 else kept[0] if kept else logits[:0]

    @torch.inference_mode()
    def prefill(self, prompts: PromptBatch) -> None:
        self._unchanged.require()
        self.revision += 1
        if prompts.hidden_layers:
            raise ValueError(f"{self.name}: expected no hidden states to be asked for")
        if prompts.held is None:
            self._rows = [self._row() for _ in prompts.tokens]
        self.read(prompts.tokens, prompts.counts or [prompts.tokens.shape[1]] * len(self._rows))

    @torch.inference_mode()
    def forward(self, block: InputBlock) -> LevelOutput:
        self.revision += 1
        tokens, keep = block.tokens, block.keep
        if block.parents is not None:
            raise ValueError(f"{self.name}: expected no tree, given one: {self.no_trees}")
        batch, width = tokens.shape
        counts = [width] * batch if block.counts is None else list(block.counts)
        first = [width - keep] * batch if block.first is None else list(block.first)
        found = []
        for row, ids, count, begin in zip(self._rows, tokens, counts, first, strict=True):
            wanted = max(count - begin, 0)
            found.append(self._append(row, ids[None, :count], wanted)[:keep] if count else None)
        if batch == 1 and found[0] is not None and len(found[0]) == keep:
            return LevelOutput(found[0][None])
        known = next(one for one in found if one is not None)
        logits = known.new_zeros(batch, keep, known.shape[1])
        for into, one in zip(logits, found, strict=True):
            if one is not None:
                into[: len(one)] = one
        return LevelOutput(logits)

    def read(self, tokens: torch.Tensor, counts: Sequence[int]) -> None:
        if tokens.shape[1] and max(counts):
            block = reading(tokens, counts)
            block.keep, block.first = 1, RowCounts(list(counts))
            self.forward(block)

    @torch.inference_mode()
    def rollback(self, lengths: Sequence[int]) -> Sequence[int]:
        self.revision += 1
        for row, length in zip(self._rows, lengths, strict=True):
            if length < row.length:
                row.rollback(length, self._empty())
                self.num_replayed += length - row.length
        return [row.length for row in self._rows]

    def keep_path(self, begin: RowCounts, path: torch.Tensor, lengths: RowCounts) -> Sequence[int]:
        raise ValueError(f"{self.name}: expected no tree to have been read: {self.no_trees}")

    def select(self, rows: Sequence[int]) -> None:
        self.revision += 1
        self._rows = [self._rows[row] for row in rows]

    # ---- rows that join the batch (`Admitting`) --------------------------------------------------

    def open(self, capacity: int) -> _Row:
        self._unchanged.require()
        return self._row()

    @torch.inference_mode()
    def extend(
        self, sequence: _Row, tokens: torch.Tensor, layers: tuple[int, ...] = ()
    ) -> Hidden | None:
        if tokens.shape[1]:
            self._append(sequence, tokens, 0)
        return None

    def admit(
        self,
        sequences: Sequence[_Row],
        lengths: Sequence[int],
        capacity: int,
        rows: Sequence[int] | None,
    ) -> None:
        self.revision += 1
        if rows is None:
            self._rows = list(sequences)
            return
        for row, sequence in zip(rows, sequences, strict=True):
            self._rows[row : row + 1] = [sequence]

    def save(self, row: int, begin: int, end: int) -> None:
        """Return None: a state has nothing of some tokens apart."""

    def restore(self, sequence: _Row, saved: Any) -> None:
        raise ValueError(f"{self.name}: expected no copy of some tokens, given one")

    # ---- whether the model continues a text ------------------------------------------------------

    @torch.inference_mode()
    def _probe(self) -> None:
        """Compare a text in passes that are rolled back with one pass (`levels.models`), in blocks
        and, if these are wrong, token by token."""
        known = ids_of(self.model, self.vocab_size)
        text = text_of(24, known)[None].to(self.device)
        wrong = (text + 1) % known

        def differ() -> tuple[float, float]:
            self._rows = [self._row()]
            whole = self._runs(input_ids=text, use_cache=False, return_dict=True).logits[0]
            self.read(text[:, :7], [7])
            logits, at = [], 7
            for end in (12, 13, 17, 24):
                begin = self._rows[0].length
                ids = torch.cat([text[:, begin:end], wrong[:, end : end + 3]], 1)
                keep = ids.shape[1] - (at - begin)
                logits.append(self.forward(InputBlock(ids, keep)).logits[0, : end - at])
                self.rollback([end])
                at = end
            worst = max(map(relative_difference, torch.cat(logits), whole[7:]))
            return worst, tolerance(whole.dtype)

        try:
            found = failure(differ)
            if found is not None:
                self.stepwise = True
                found = failure(differ)
            require_continued(found, self.model, self.name)
        finally:
            self._rows, self.num_replayed = [], 0
