"""Small random models, and a driver that checks every forward pass of a RollbackCache.

The reference is each row run alone with DynamicCache.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Qwen2Config,
)

from polyspec_ext.kv_cache.rollback import RollbackCache

VOCAB = 97
COMMON = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
GQA = {**COMMON, **SIZES, "num_key_value_heads": 2, "max_position_embeddings": 128}
CONFIGS = {
    "llama": LlamaConfig(**GQA),
    "qwen2": Qwen2Config(**GQA),
    "gpt2": GPT2Config(**COMMON, n_embd=32, n_layer=3, n_head=4, n_positions=64),
    "opt": OPTConfig(
        **COMMON,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
    ),
    "gpt_neox": GPTNeoXConfig(**COMMON, **SIZES, max_position_embeddings=128),
}
WINDOWED = {
    "mistral": MistralConfig(**GQA, sliding_window=7),
    "gemma2": Gemma2Config(
        **GQA, head_dim=8, sliding_window=7
    ),  # sliding and full layers take turns
}


def build(config: Any, attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    # The usual initialisation hardly tells positions apart; a wrong mask has to show.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.25)
    return model.to(dtype).eval()


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

    def __init__(self, model: Any, cache: RollbackCache, tolerance: float = 2e-5) -> None:
        self.model, self.cache, self.tolerance = model, cache, tolerance
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
                torch.testing.assert_close(
                    out.logits[row, :count], expected, rtol=0, atol=self.tolerance
                )
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
