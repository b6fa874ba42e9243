"""Packed levels on x86: the logits of a token are the same bits, whatever tokens stand in its pass
and whatever rows stand beside its own; compiled passes give them too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import polyspec_ext as ps

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512")
    or torch.cpu._is_amx_tile_supported(),
    reason="packed levels multiply with oneDNN here",
)
PROMPT, TOKENS = 12, 34
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def level(dtype: torch.dtype, **options: Any) -> ps.HuggingFaceLevel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    return ps.HuggingFaceLevel(model, pack=True, **options)


def ids(rows: int = 1) -> torch.Tensor:
    return torch.randint(0, 97, (rows, TOKENS), generator=torch.Generator().manual_seed(1))


def logits(made: ps.HuggingFaceLevel, tokens: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """[B, TOKENS - PROMPT, vocab] by passes of `sizes` tokens."""
    made.prefill(tokens[:, :PROMPT])
    found, at = [], PROMPT
    for size in sizes:
        found.append(made.forward(tokens[:, at : at + size], size).clone())
        at += size
    assert at == TOKENS
    made.rollback([0] * len(tokens))
    return torch.cat(found, 1)


SINGLE = [1] * (TOKENS - PROMPT)
BLOCKS = ([5, 5, 12], [22], [2, 16, 1, 3])


@DTYPES
def test_a_token_has_the_same_logits_alone_and_in_a_block(dtype: torch.dtype) -> None:
    made = level(dtype)
    alone = logits(made, ids(), SINGLE)
    for sizes in BLOCKS:
        assert logits(made, ids(), sizes).equal(alone)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_passes_give_them_too() -> None:
    wanted = logits(level(torch.bfloat16), ids(), SINGLE)
    made = level(torch.bfloat16, compile=True)
    for sizes in (SINGLE, *BLOCKS):
        assert logits(made, ids(), sizes).equal(wanted)


@DTYPES
def test_rows_beside_a_row_do_not_change_it(dtype: torch.dtype) -> None:
    made = level(dtype)
    together = logits(made, ids(3), [4] * 5 + [2])
    for row in range(3):
        for sizes in (SINGLE, *BLOCKS):
            assert logits(level(dtype), ids(3)[row : row + 1], sizes)[0].equal(together[row])


@DTYPES
def test_a_prompt_has_the_same_keys_alone_in_a_batch_and_token_by_token(dtype: torch.dtype) -> None:
    made, text = level(dtype), ids()[:, :30]

    def behind() -> torch.Tensor:
        return made.forward(ids()[:1, 30:31].expand(len(made.cache.lengths), -1), 1)[0].clone()

    made.prefill(text)
    wanted = behind()
    made.prefill(torch.cat([text, text.flip(1)]), [30, 19])
    assert behind().equal(wanted)
    made.prefill(text[:, :1])
    for place in range(1, 30):
        made.forward(text[:, place : place + 1], 1)
    assert behind().equal(wanted)
