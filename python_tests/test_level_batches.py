"""Batches of a Hugging Face level: every row is what it would be alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rollback_driver import build
from test_levels import FAMILIES, V, make
from transformers import DynamicCache

from polyspec_ext.levels import HuggingFaceLevel
from polyspec_ext.rollback_cache import RollbackCache

BATCH_FAMILIES = [name for name in FAMILIES if name != "gemma2, sliding window"]


class Alone:
    """What a batch must give: rows as lists of tokens, each run without a cache."""

    def __init__(self, level: Any, prompts: list[list[int]], tolerance: float = 1e-4) -> None:
        self.level, self.tolerance = level, tolerance
        self.rows = [list(prompt) for prompt in prompts]
        self.random = torch.Generator().manual_seed(11)
        longest = max(map(len, prompts))
        padded = torch.tensor([[*p, *[0] * (longest - len(p))] for p in prompts])
        level.prefill(padded, [len(p) for p in prompts])

    def forward(
        self,
        counts: list[int] | None,
        keep: int,
        first: list[int] | None = None,
        width: int | None = None,
    ) -> torch.Tensor:
        batch = len(self.rows)
        width = width or (max(counts) if counts is not None else keep)
        tokens = torch.randint(3, V, (batch, width), generator=self.random)
        logits = self.level.forward(tokens, keep, counts, first)
        assert logits.shape == (batch, keep, V)
        assert logits.isfinite().all()
        for b in range(batch):
            count = width if counts is None else counts[b]
            at = len(self.rows[b])
            self.rows[b] += tokens[b, :count].tolist()
            if not self.rows[b]:
                continue
            start = width - keep if first is None else first[b]
            whole = self.level.model(
                input_ids=torch.tensor([self.rows[b]]), use_cache=False
            ).logits[0]
            for j in range(keep):
                if start + j < count:
                    torch.testing.assert_close(
                        logits[b, j],
                        whole[at + start + j],
                        rtol=self.tolerance,
                        atol=self.tolerance,
                    )
        assert self.level.cache.lengths.tolist() == [len(row) for row in self.rows]
        assert not self.level.cache.status.any()
        return logits

    def rollback(self, lengths: list[int]) -> None:
        self.level.rollback(lengths)
        for row, length in zip(self.rows, lengths, strict=True):
            del row[length:]

    def select(self, rows: list[int]) -> None:
        self.level.select(rows)
        self.rows = [self.rows[i] for i in rows]


PROMPTS = [[5, 17, 80, 3, 3, 41], [9], [], [30, 31, 32, 33]]


def ragged_life(alone: Alone) -> None:
    """Catching up at different offsets, waiting, being cut, leaving, and walking in step."""
    alone.forward([3, 4, 1, 2], 2, [1, 2, 0, 0])
    alone.rollback([7, 4, 1, 6])
    alone.forward([1, 0, 4, 3], 1, [0, 0, 3, 2])  # row 1 waits
    alone.forward([2, 2, 2, 2], 2)
    alone.rollback([8, 3, 0, 7])  # row 2 starts over
    alone.forward([0, 0, 3, 0], 2, [0, 0, 1, 0], width=5)
    alone.select([3, 0, 2])
    alone.forward([5, 1, 2], 3, [2, 0, 0])
    alone.select([1])
    for keep in (1, 3, 2):  # alone, so in step
        alone.forward(None, keep)
        alone.forward(None, 1, [keep - 1], width=keep + 1)
    alone.rollback([4])
    alone.forward(None, 4)


@torch.inference_mode()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", BATCH_FAMILIES)
def test_ragged_rows_equal_each_row_alone(family: str, attention: str) -> None:
    model = make(family)
    model.set_attn_implementation(attention)
    level = HuggingFaceLevel(model, step=4)
    assert level.supports_batches
    ragged_life(Alone(level, PROMPTS))
    ragged_life(Alone(level, PROMPTS))  # the same cache again


@torch.inference_mode()
def test_gemma_caps_what_it_returns() -> None:
    """Scores and logits are capped by the model; a batch's logits come from its own head."""
    model = make("gemma2, sliding window")
    model.set_attn_implementation("eager")
    model.config.final_logit_softcapping = 0.5
    alone = Alone(HuggingFaceLevel(model), PROMPTS)
    ragged_life(alone)
    assert alone.forward([2, 1, 1], 1, [0, 0, 0]).abs().max() <= 0.5 if len(alone.rows) == 3 else 1
