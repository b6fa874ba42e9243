"""Packed levels and 4-bit copies: a token's logits are the same bits in any batch and pass."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from small_models import wide

import polyspec_ext as ps

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="packed levels multiply with oneDNN here",
)
PROMPT, TOKENS = 12, 34
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


model = partial(wide, num_hidden_layers=3)


def level(dtype: torch.dtype, **options: Any) -> ps.HuggingFaceLevel:
    return ps.HuggingFaceLevel(model(dtype=dtype), pack=True, **options)


def copy(dtype: torch.dtype, **options: Any) -> ps.HuggingFaceLevel:
    return ps.HuggingFaceLevel(ps.quantize_w4(model(dtype=dtype), 32, head=True), **options)


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
def test_a_prompt_has_the_same_keys_alone_in_a_batch_and_token_by_token(dtype: torch.dtype) -> None:
    text = torch.randint(0, 97, (1, 151), generator=torch.Generator().manual_seed(2))
    for make, length in itertools.product((level, copy), (2, 33, 150)):
        made, short = make(dtype), 1 + length // 2

        def behind(made: ps.HuggingFaceLevel = made) -> torch.Tensor:
            last = text[:, -1:].expand(len(made.cache.lengths), -1)
            return made.forward(last, 1)[0].clone()

        prompt = text[:, :length]
        made.prefill(prompt)
        wanted = behind()
        made.prefill(torch.cat([prompt, prompt.flip(1)]), [length, short])
        assert behind().equal(wanted)
        made.prefill(prompt[:, :1])
        for place in range(1, length):
            made.forward(prompt[:, place : place + 1], 1)
        assert behind().equal(wanted)
        pieces = make(dtype, prefill_chunk=40)
        pieces.prefill(prompt)
        assert behind(pieces).equal(wanted)


KINDS = {"packed": level, "w4": copy, "packed w4": partial(copy, pack=True)}


@DTYPES
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_has_the_same_logits_in_every_block_and_batch(kind, dtype) -> None:
    made = KINDS[kind](dtype)
    assert made.varies == ()
    assert "block-invariant" in repr(made)
    assert made.model.config._attn_implementation == "sdpa"  # it is not touched
    together = logits(made, ids(3), [4] * 5 + [2])
    for row in range(3):
        for sizes in (SINGLE, *BLOCKS):
            assert logits(made, ids(3)[row : row + 1], sizes)[0].equal(together[row])


@DTYPES
def test_texts_drafted_by_the_first_layers_are_the_same_alone_and_in_a_batch(dtype) -> None:
    """The draft level multiplies with the target's packed weights."""
    target = level(dtype)
    chain = ps.Chain([target, "early-exit:2"], [3])
    drafter: Any = chain.drafter
    assert drafter.level.varies == ()
    assert drafter.level.output_head is target.output_head
    prompts = [row[: 3 + n].tolist() for n, row in enumerate(ids(12))]
    options: dict[str, Any] = {"temperature": 1.0, "eos_token_id": []}
    together = chain.generate(prompts, 20, seed=list(range(12)), **options)
    for seed, (prompt, text) in enumerate(zip(prompts, together.new_tokens, strict=True)):
        assert chain.generate(prompt, 20, seed=seed, **options).new_tokens == [text]


def test_what_varies_is_told() -> None:
    def told(made: ps.HuggingFaceLevel) -> str:
        return repr(made).rsplit(", ", 1)[1].rstrip(")")

    small = {"num_attention_heads": 8, "head_dim": 16}  # of 16, which the operator does not read
    assert told(level(torch.float32)) == "block-invariant"
    assert told(ps.HuggingFaceLevel(model(dtype=torch.float32))) == "cpu"  # not checked yet
    narrow = ps.HuggingFaceLevel(model(dtype=torch.bfloat16, **small), pack=True)
    assert told(narrow) == "block-invariant but for attention"
    assert narrow.varies == ("attention",)
    part = ps.quantize_w4(model(dtype=torch.bfloat16), 32, head=False)
    assert told(ps.HuggingFaceLevel(part)) == "block-invariant but for head"
    assert told(ps.HuggingFaceLevel(part, pack=True)) == "block-invariant"
    odd = ps.quantize_w4(model(dtype=torch.float32, intermediate_size=200, **small), 32)
    assert told(ps.HuggingFaceLevel(odd)) == "block-invariant but for attention and products"
