"""A level that reads every text anew with every pass: no cache that could be wrong, and hidden
states of any layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from polyspec_ext.levels import RowCounts
from polyspec_ext.levels.base import (
    Hidden,
    InputBlock,
    LevelCapabilities,
    LevelOutput,
    PromptBatch,
)


class RecomputedLevel:
    """A batched level of a Hugging Face causal model, one text after another."""

    def __init__(self, model: Any, name: str = "recomputed") -> None:
        self.model, self.name = model, name
        self.vocab_size: int = model.config.vocab_size
        self.max_length: int | None = None
        self.device = torch.device("cpu")
        self.rows: list[list[int]] = []

    @property
    def capabilities(self) -> LevelCapabilities:
        return LevelCapabilities(batches=True, hidden_states=True)

    @torch.inference_mode()
    def _states(self, row: Sequence[int], layers: Sequence[int]) -> tuple[torch.Tensor, Hidden]:
        out = self.model(input_ids=torch.tensor([row]), output_hidden_states=True)
        return out.logits[0], {layer: out.hidden_states[layer][0] for layer in layers}

    def _all(self, begin: Sequence[int], width: int, layers: tuple[int, ...]) -> Hidden:
        """States of the tokens behind ``begin[b]``."""
        size = self.model.config.hidden_size
        found = {layer: torch.zeros(len(self.rows), width, size) for layer in layers}
        for b, row in enumerate(self.rows):
            if row and layers:
                for layer, own in self._states(row, layers)[1].items():
                    found[layer][b, : len(row) - begin[b]] = own[begin[b] :]
        return found

    def prefill(self, prompts: PromptBatch) -> Hidden | None:
        counts = prompts.counts or [prompts.tokens.shape[1]] * prompts.tokens.shape[0]
        rows = prompts.tokens.tolist()
        self.rows = [row[:n] for row, n in zip(rows, counts, strict=True)]
        return self._all([0] * len(rows), prompts.tokens.shape[1], prompts.hidden_layers)

    def forward(self, block: InputBlock) -> LevelOutput:
        batch, width = block.tokens.shape
        counts: Any = [width] * batch if block.counts is None else block.counts
        first: Any = [width - block.keep] * batch if block.first is None else block.first
        begin = [len(row) for row in self.rows]
        logits = torch.zeros(batch, block.keep, self.vocab_size)
        for b, (row, count, at) in enumerate(zip(self.rows, counts, first, strict=True)):
            row += block.tokens[b, :count].tolist()
            if count:
                behind = self._states(row, ())[0][begin[b] + at :]
                logits[b, : min(len(behind), block.keep)] = behind[: block.keep]
        hidden = self._all(begin, width, block.hidden_layers) if block.hidden_layers else None
        return LevelOutput(logits, hidden)

    def read(
        self, tokens: torch.Tensor, counts: Sequence[int], hidden_layers: tuple[int, ...] = ()
    ) -> Hidden | None:
        begin = [len(row) for row in self.rows]
        for row, own, count in zip(self.rows, tokens.tolist(), counts, strict=True):
            row += own[:count]
        return self._all(begin, tokens.shape[1], hidden_layers)

    def rollback(self, lengths: RowCounts) -> RowCounts:
        for row, length in zip(self.rows, lengths, strict=True):
            del row[int(length) :]
        return lengths

    def keep_path(self, begin: RowCounts, path: torch.Tensor, lengths: RowCounts) -> RowCounts:
        raise NotImplementedError

    def select(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]
