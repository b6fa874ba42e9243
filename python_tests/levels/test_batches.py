"""Batches of a Hugging Face level: every row is what it would be alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from small_models import FAMILIES, V, make, plain_greedy

import polyspec_ext as ps
from polyspec_ext.levels import HuggingFaceLevel

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
def test_what_a_model_does_to_its_logits_still_happens() -> None:
    """Gemma 2 caps its scores and its logits. Only the head's hidden states are gathered."""
    model = make("gemma2, sliding window")
    model.set_attn_implementation("eager")
    model.config.final_logit_softcapping = 0.5
    ragged_life(Alone(HuggingFaceLevel(model), PROMPTS))
    capped = Alone(HuggingFaceLevel(model), PROMPTS).forward([3, 4, 1, 2], 2, [1, 2, 0, 0])
    assert 0.3 < capped.abs().max() <= 0.5


class Headless(torch.nn.Module):
    """A head that keeps count of the hidden states it is given."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.head, self.seen = head, [0]
        self.out_features = head.out_features

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        self.seen.append(states.shape[0] * states.shape[1])
        return self.head(states)  # type: ignore[no-any-return]


@torch.inference_mode()
def test_the_head_sees_no_more_than_is_kept() -> None:
    model = make("llama")
    model.set_output_embeddings(Headless(model.get_output_embeddings()))
    level = HuggingFaceLevel(model)
    alone = Alone(level, PROMPTS)
    seen = model.get_output_embeddings().seen
    for counts, keep, first in (([3, 4, 1, 2], 2, [1, 2, 0, 0]), (None, 3, None)):
        seen.clear()
        ids = torch.randint(3, V, (4, 4), generator=alone.random)
        level.forward(ids, keep, counts, first)
        assert seen == [4 * keep]


@torch.inference_mode()
def test_a_row_of_nan_stays_its_own() -> None:
    """What one row has in its cache does not reach its neighbours, nor the next batch."""
    model = make("llama")
    level = HuggingFaceLevel(model)
    alone = Alone(level, PROMPTS)
    for layer in level.cache.layers:
        layer.keys[1].fill_(float("nan"))
        layer.values[1].fill_(float("nan"))
    logits = level.forward(torch.tensor([[4, 5]] * 4), 1, [2, 0, 1, 2], [1, 0, 0, 1])
    assert logits[[0, 2, 3]].isfinite().all()
    alone = Alone(level, PROMPTS)
    alone.forward([1, 1, 1, 1], 1)


@torch.inference_mode()
def test_rows_at_the_end_of_learned_positions_can_wait() -> None:
    model = make("gpt2")  # 128 positions
    level = HuggingFaceLevel(model)
    level.prefill(torch.full((2, 128), 7), [128, 3])
    logits = level.forward(torch.tensor([[1, 2], [3, 4]]), 1, [0, 2], [0, 1])
    whole = model(torch.tensor([[7, 7, 7, 3, 4]]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(logits[1, 0], whole, rtol=1e-4, atol=1e-4)


def test_one_sequence_in_a_cache_of_ones_own() -> None:
    model = make("llama")
    level = HuggingFaceLevel(model, new_cache=hf.DynamicCache)
    assert not level.supports_batches
    with pytest.raises(ValueError, match="expected one sequence, given a batch of 2"):
        level.prefill(torch.tensor([[1, 2], [3, 4]]))
    out = ps.Chain([level, make("llama", 1)], [3]).generate([5, 6, 7], 12, eos_token_id=[])
    assert out.sequences.tolist() == [plain_greedy(model, [5, 6, 7], 12)]


def test_bad_arguments() -> None:
    model = make("llama")
    for options, text in (({"new_cache": hf.DynamicCache, "streaming": 8}, "given both"),):
        with pytest.raises(ValueError, match=text):
            ps.Level(model, **options)
    with pytest.raises(ValueError, match="rotary positions of a known layout"):
        ps.Level(make("gpt2"), streaming=8)


def test_level_is_a_protocol_and_makes_levels() -> None:
    assert isinstance(ps.Level(make("llama")), ps.Level)

    class Mine(ps.Level):
        vocab_size = 3

        def __init__(self, name: str) -> None:
            self.name = name

    assert Mine("mine").name == "mine"
    assert not isinstance(object(), ps.Level)
