"""Toy levels of batches with logits that follow the row's cache, and rows that differ."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import toy

import polyspec_ext as ps
from polyspec_ext.levels import RowCounts
from polyspec_ext.levels.base import InputBlock, LevelCapabilities, LevelOutput, PromptBatch

VOCAB = 20


class Output:
    """A buffer for all logits that a level returns; a pass overwrites the last."""

    def __init__(self) -> None:
        self.buffer = torch.empty(0, 0, 0)

    def view(self, logits: torch.Tensor) -> torch.Tensor:
        batch, keep, vocab = logits.shape
        if self.buffer.shape[0] < batch or self.buffer.shape[1] < keep:
            self.buffer = torch.empty(batch, max(keep, 16), vocab)
        # Some distribution, as no NaN would be: an error is not the symptom that a user would see.
        self.buffer.copy_(torch.linspace(-2, 2, vocab).expand_as(self.buffer))
        view = self.buffer[:batch, :keep]
        view.copy_(logits)
        return view


class Rows(toy.ToyLevel):
    """A toy level with one cache per row. Meaningless values come back as NaN."""

    supports_batches = True

    def prefill(self, tokens: torch.Tensor, counts: Sequence[int] | None = None) -> None:
        counts = counts or [tokens.shape[1]] * tokens.shape[0]
        self.caches = [row[:n] for row, n in zip(tokens.tolist(), counts, strict=True)]
        self.most = 0

    def forward(self, tokens, keep, counts=None, first=None) -> torch.Tensor:
        batch, width = tokens.shape
        assert batch == len(self.caches)
        counts = counts or [width] * batch
        first = first or [width - keep] * batch
        out = torch.full((batch, keep, self.vocab_size), math.nan)
        for b, row in enumerate(tokens.tolist()):
            before = len(self.caches[b])
            self.caches[b] += row[: counts[b]]
            for j in range(keep):
                if 0 <= first[b] + j < counts[b]:
                    out[b, j] = self.row(self.caches[b][: before + first[b] + j + 1])
        self.most = max(self.most, batch)
        return out

    def rollback(self, lengths: Sequence[int]) -> None:
        for cache, length in zip(self.caches, lengths, strict=True):
            assert 0 <= length <= len(cache)
            del cache[length:]

    def select(self, rows: Sequence[int]) -> None:
        self.caches = [self.caches[row] for row in rows]


def make(count: int) -> list[Any]:
    return [Rows(VOCAB, 11 + i, scale=1.5) for i in range(count)]


# Everything differs between rows: prompt, length, parameters, EOS, seed.
ROWS: list[dict[str, Any]] = [
    {"prompt": [1], "max_new_tokens": 25, "temperature": 1.0, "seed": 3, "eos": []},
    {"prompt": [4, 2, 7, 1, 1], "max_new_tokens": 9, "temperature": 0.0, "seed": 4, "eos": [5]},
    {"prompt": [3] * 12, "max_new_tokens": 0, "temperature": 0.5, "seed": 5, "eos": []},
    {"prompt": [8, 9], "max_new_tokens": 1, "temperature": 0.7, "seed": 2**64 - 1, "eos": []},
    {"prompt": [8, 9], "max_new_tokens": 40, "temperature": 1.3, "top_k": 5, "seed": 7, "eos": [2]},
    {"prompt": [0, 1, 2], "max_new_tokens": 30, "temperature": 1.0, "top_p": 0.8, "seed": 8},
    {"prompt": [5, 5, 5], "max_new_tokens": 17, "temperature": 0.9, "min_p": 0.1, "seed": 9},
]


def arguments(rows: list[dict[str, Any]]) -> dict[str, Any]:
    names = {
        "max_new_tokens": 0, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0
    }  # fmt: skip
    made = {name: [row.get(name, default) for row in rows] for name, default in names.items()}
    return {**made, "eos_token_id": [row.get("eos", []) for row in rows]}


def run(chain: ps.Chain, rows: list[dict[str, Any]]) -> ps.Output:
    return chain.generate([row["prompt"] for row in rows], **arguments(rows))


class Staying(Rows):
    """The same level as on a device, where its lengths may stay for a round."""

    max_length = None
    device = torch.device("cpu")
    capabilities = LevelCapabilities(batches=True, device_lengths=True, keeps_lengths=True)

    def prefill(self, prompts: PromptBatch) -> None:
        with torch._C.DisableTorchFunction():
            super().prefill(prompts.tokens, prompts.counts)

    def forward(self, block: InputBlock) -> LevelOutput:
        with torch._C.DisableTorchFunction():
            logits = super().forward(block.tokens, block.keep, block.counts, block.first)
            return LevelOutput(logits)

    def read(self, tokens: torch.Tensor, counts: Sequence[int]) -> None:
        with torch._C.DisableTorchFunction():
            super().forward(tokens, 1, counts)

    def rollback(self, lengths: RowCounts) -> RowCounts:
        with torch._C.DisableTorchFunction():
            super().rollback(lengths)
        return lengths

    def keep_path(self, begin: RowCounts, path: torch.Tensor, lengths: RowCounts) -> RowCounts:
        raise NotImplementedError("reads no trees")

    def reserve_span(self, tokens: int) -> int:
        assert max(map(len, self.caches)) <= tokens
        return tokens

    def note_lengths(self, lengths: Sequence[int]) -> None:
        """Check the lengths passed to the host."""
        assert [len(cache) for cache in self.caches] == list(lengths)


class Admitting(Staying):
    """A toy level with batch rows that can join."""

    capabilities = LevelCapabilities(
        batches=True, device_lengths=True, keeps_lengths=True, admits=True, reads_together=True
    )

    most = 0

    def open(self, capacity: int) -> list[int]:
        return []

    def extend(self, sequence: list[int], tokens: torch.Tensor, layers: Any) -> None:
        sequence += tokens[0].tolist()

    def extend_together(self, sequences, tokens, counts, layers) -> None:
        for sequence, row, count in zip(sequences, tokens.tolist(), counts, strict=True):
            assert not sequence
            sequence += row[:count]

    def admit(self, sequences, lengths, capacity, rows) -> None:
        assert [len(one) for one in sequences] == list(lengths)
        self.caches = [] if rows is None else self.caches
        for row, sequence in zip(rows or range(len(lengths)), sequences, strict=True):
            self.caches[row : row + 1] = [list(sequence)]

    def save(self, row: int, begin: int, end: int) -> list[int]:
        return self.caches[row][begin:end]

    def restore(self, sequence: list[int], saved: list[int], count: int) -> None:
        assert 0 < count <= len(saved)
        sequence += saved[:count]
