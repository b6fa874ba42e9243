"""A driver that checks every pass of a RollbackCache against each row alone."""

from typing import Any

import torch
from small_models import FAMILIES, sharp
from transformers import AutoModelForCausalLM, DynamicCache

from polyspec_ext.kv_cache.rollback import RollbackCache

VOCAB = 97
CONFIGS = {name: FAMILIES[name](3, VOCAB) for name in ("llama", "qwen2", "gpt2", "opt", "pythia")}
# Gemma's sliding and full layers take turns.
WINDOWED = {name: FAMILIES[f"{name}, sliding window"](3, VOCAB) for name in ("mistral", "gemma2")}


def build(config: Any, attention: str = "sdpa") -> Any:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return sharp(model.eval())  # a wrong mask has to show


class Alone:
    """Each row by itself: the tokens it keeps, and the logits a fresh DynamicCache gives."""

    def __init__(self, model: Any, rows: int) -> None:
        self.model = model
        self.tokens: list[list[int]] = [[] for _ in range(rows)]

    def logits(self, row: int) -> torch.Tensor:
        ids = torch.tensor([self.tokens[row]])
        return self.model(ids, past_key_values=DynamicCache(), use_cache=True).logits[0]


class Driver:
    """Runs the batch and checks the logits of every forward pass."""

    def __init__(self, model: Any, cache: RollbackCache) -> None:
        self.model, self.cache = model, cache
        self.alone = Alone(model, cache.batch_size)
        self.random = torch.Generator().manual_seed(7)

    def forward(self, counts: list[int], tokens: int | None = None, tensor: bool = False) -> None:
        tokens = tokens or max(counts)
        ids = torch.randint(3, VOCAB, (len(counts), tokens), generator=self.random)
        given = torch.tensor(counts) if tensor else counts
        out = self.model(
            ids, past_key_values=self.cache, use_cache=True, **self.cache.inputs(tokens, given)
        )
        assert out.logits.isfinite().all()
        for row, count in enumerate(counts):
            self.alone.tokens[row] += ids[row, :count].tolist()
            if count:
                expected = self.alone.logits(row)[-count:]
                torch.testing.assert_close(out.logits[row, :count], expected, rtol=0, atol=2e-5)
        assert self.cache.lengths.tolist() == [len(t) for t in self.alone.tokens]
        assert not self.cache.status.any()

    def rollback(self, lengths: list[int], tensor: bool = False) -> None:
        for row, length in enumerate(lengths):
            del self.alone.tokens[row][length:]
        self.cache.rollback(torch.tensor(lengths) if tensor else lengths)
        assert self.cache.lengths.tolist() == [len(t) for t in self.alone.tokens]


def run_ragged(driver: Driver) -> None:
    driver.forward([9, 4, 6])  # ragged prompts
    driver.forward([4, 4, 4])
    driver.rollback([11, 5, 10])
    driver.forward([1, 3, 2], tokens=5)  # padding in every row
    driver.rollback([12, 20, 8], tensor=True)  # 20: no more than there is
    driver.forward([2, 0, 4], tensor=True)  # a row that waits
    driver.rollback([3, 0, 50])
    driver.forward([3, 2, 1])
    for _ in range(4):
        driver.forward([1, 1, 1])
