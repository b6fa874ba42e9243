"""Attention over a cache through torch: float64, invariance of bits, refusals, opcheck."""

import hashlib
from typing import Any

import instruction_sets
import pytest
import torch

from polyspec_ext.ops.decoder import attention

LOWEST = {dtype: torch.finfo(dtype).min for dtype in (torch.float32, torch.bfloat16)}


def inputs(batch, heads, tokens, length, widths=(32, 32), dtype=torch.float32):
    """Queries as a model makes them, keys and values as they lie in a cache: a part of more."""
    random = torch.Generator().manual_seed(length)
    query = torch.randn(batch, tokens, heads[0], widths[0], generator=random).transpose(1, 2)
    key, value = (
        torch.randn(batch, heads[1], length + 5, width, generator=random)[:, :, :length]
        for width in widths
    )
    return 2 * query.to(dtype), key.to(dtype), value.to(dtype)


def causal(tokens: int, length: int, dtype: torch.dtype, hidden: float | None = None) -> Any:
    mask = torch.full((tokens, length), LOWEST[dtype] if hidden is None else hidden, dtype=dtype)
    return mask.triu_(length - tokens + 1)[None, None]


def reference(query, key, value, mask, scale) -> torch.Tensor:
    share = query.shape[1] // key.shape[1]
    keys, values = (x.double().repeat_interleave(share, 1) for x in (key, value))
    scores = scale * query.double() @ keys.transpose(2, 3)
    if mask is not None:
        scores = scores + mask.double()
    return (scores.softmax(-1) @ values).transpose(1, 2)


def bound(value: torch.Tensor, dtype: torch.dtype) -> float:
    """Weights and sums are float32 with relative errors of some 1e-6 at these scores."""
    largest = float(value.abs().amax())
    return largest * (5e-6 + (2**-8 if dtype == torch.bfloat16 else 0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)], ids=str)
def test_is_attention(heads: tuple[int, int], dtype: torch.dtype) -> None:
    for tokens, length, widths in (
        (1, 1, (32, 32)),
        (1, 130, (64, 96)),
        (3, 15, (96, 64)),
        (6, 129, (64, 64)),
        (7, 300, (32, 256)),
        (33, 260, (128, 128)),
        (3, 1300, (64, 64)),
    ):
        query, key, value = inputs(2, heads, tokens, length, widths, dtype)
        tree = torch.rand(2, 1, tokens, length) < 0.5
        tree[..., 0] = False
        for mask in (
            None,
            causal(tokens, length, dtype),
            torch.zeros(tree.shape, dtype=dtype).masked_fill_(tree, -torch.inf),
            torch.randn(2, 1, tokens, length).to(dtype),
        ):
            made = attention(query, key, value, mask, 0.2)
            assert made.dtype == dtype
            assert made.is_contiguous()
            wanted = reference(query, key, value, mask, 0.2)
            difference = (made.double() - wanted).abs().amax()
            assert made.shape == wanted.shape
            assert difference <= bound(value, dtype)


def test_scores_of_any_size() -> None:
    query, key, value = inputs(1, (2, 1), 2, 400)
    rising = torch.linspace(-300, 300, 400)[None, None, None].expand(1, 1, 2, 400).contiguous()
    for mask in (rising, rising.flip(-1).contiguous(), rising - 1000, 1e4 * rising):
        made = attention(query, key, value, mask, 0.2)
        wanted = reference(query, key, value, mask, 0.2)
        # A score of size s is off by some 1e-7 s.
        assert (made.double() - wanted).abs().amax() <= 1e-3
        assert made.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [270, 1034])  # within a span of keys, and across two
def test_a_row_is_what_it_is_alone(length: int, dtype: torch.dtype) -> None:
    """With any other rows in the call, and any keys after the visible keys."""
    tokens = 20
    query, key, value = inputs(2, (6, 2), tokens, length, (64, 32), dtype)
    for hidden in (LOWEST[dtype], -torch.inf):
        whole = attention(query, key, value, causal(tokens, length, dtype, hidden), 0.2)
        for begin, end in ((0, 1), (3, 9), (7, 20)):
            mask = causal(tokens, length, dtype, hidden)[:, :, begin:end]
            part = attention(query[:, :, begin:end], key, value, mask, 0.2)
            assert part.equal(whole[:, begin:end])
        for token in (0, 11, 19):
            seen = length - tokens + 1 + token
            alone = attention(
                query[:, :, token : token + 1], key[:, :, :seen], value[:, :, :seen], None, 0.2
            )
            assert alone.equal(whole[:, token : token + 1])
    for row in range(2):
        mask = causal(tokens, length, dtype)
        each = [x[row : row + 1] for x in (query, key, value)]
        assert attention(*each, mask, 0.2).equal(attention(query, key, value, mask, 0.2)[row][None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_causality_is_what_its_mask_is(dtype: torch.dtype) -> None:
    for tokens, length in ((1, 40), (7, 7), (5, 300), (70, 70), (150, 280)):
        given = inputs(2, (6, 2), tokens, length, (64, 32), dtype)
        wanted = attention(*given, causal(tokens, length, dtype), 0.2)
        assert attention(*given, None, 0.2, causal=True).equal(wanted)
        hidden = torch.rand(2, 1, tokens, length, generator=torch.Generator().manual_seed(0)) < 0.3
        both = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, LOWEST[dtype])
        lower = (both + causal(tokens, length, dtype)).clamp_min(LOWEST[dtype])
        assert attention(*given, both, 0.2, causal=True).equal(attention(*given, lower, 0.2))
    with pytest.raises(RuntimeError, match="key: expected at least the tokens of query"):
        attention(*inputs(1, (2, 1), 5, 4), None, 0.2, causal=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lengths_are_what_their_mask_is(dtype: torch.dtype) -> None:
    for tokens, length in ((1, 40), (5, 300), (3, 1100)):
        query, key, value = inputs(3, (6, 2), tokens, length, (64, 32), dtype)
        lengths = torch.tensor([0, length // 2, length - 1])
        last = lengths[:, None] + torch.arange(tokens)
        hidden = (torch.arange(length) > last[..., None])[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, LOWEST[dtype])
        wanted = attention(query, key, value, mask, 0.2)
        assert attention(query, key, value, None, 0.2, lengths=lengths).equal(wanted)
    none = attention(query, key, value, None, 0.2, lengths=torch.tensor([-1, -7, 2]))
    assert none[:2].eq(0).all()
    for wrong, message in (
        ({"causal": True, "lengths": lengths}, "lengths: expected none where causal"),
        ({"lengths": lengths[:2]}, "lengths: expected size 3 in dimension 0, got 2"),
        ({"lengths": lengths.int()}, "lengths: expected int64"),
    ):
        with pytest.raises(RuntimeError, match=message):
            attention(query, key, value, None, 0.2, **wrong)


def digest() -> str:
    found = hashlib.sha256()
    for dtype in (torch.float32, torch.bfloat16):
        for tokens, length in ((1, 33), (5, 300), (2, 700)):
            query, key, value = inputs(1, (6, 2), tokens, length, (96, 64), dtype)
            made = attention(query, key, value, causal(tokens, length, dtype), 0.2)
            found.update(made.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_instruction_sets_change_nothing(isa: str) -> None:
    assert instruction_sets.printed(isa, "test_attention", "digest()") == digest()


def test_denormals_are_kept_whatever_the_thread_does() -> None:
    query, key, value = inputs(1, (2, 1), 2, 40)
    value = value * 1e-39
    wanted = attention(query, key, value, None, 0.2)
    assert 0 < wanted.abs().amax() < 1e-38
    torch.set_flush_denormal(True)
    try:
        made = attention(query, key, value, None, 0.2)
    finally:
        torch.set_flush_denormal(False)
    assert made.equal(wanted)  # (which takes denormals for zeros meanwhile)


def test_a_row_that_sees_nothing_is_zero() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        query, key, value = inputs(1, (4, 2), 3, 200, dtype=dtype)
        mask = causal(3, 200, dtype)
        wanted = attention(query, key, value, mask, 0.2)
        for hidden in (LOWEST[dtype], -torch.inf):
            mask[:, :, 1] = hidden
            made = attention(query, key, value, mask, 0.2)
            assert (made[:, 1] == 0).all()
            assert made[:, ::2].equal(wanted[:, ::2])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scores_that_are_not_finite(bad: float) -> None:
    query, key, value = inputs(1, (4, 2), 3, 200)
    wanted = attention(query, key, value, None, 0.2)
    for place in (0, 77, 199):
        mask = torch.zeros(1, 1, 3, 200)
        mask[:, :, 1, place] = bad
        made = attention(query, key, value, mask, 0.2)
        assert made[:, 1].isnan().all()
        assert made[:, ::2].equal(wanted[:, ::2])
    # A NaN of any payload.
    query.view(torch.int32)[0, 3, 2, 5] = 0x7F800001
    made = attention(query, key, value, None, 0.2)
    assert made[0, 2, 3].isnan().all()
    assert made.isnan().sum() == made.shape[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_that_the_mask_hides_are_not_read(dtype: torch.dtype) -> None:
    """Between first and last keys, as in a window: neither their values nor NaNs change a bit."""
    query, key, value = inputs(2, (6, 2), 3, 1300, dtype=dtype)
    for hidden in (LOWEST[dtype], -torch.inf):
        mask = causal(3, 1300, dtype, hidden).repeat(2, 1, 1, 1)
        mask[..., 5:1100] = hidden
        wanted = attention(query, key, value, mask, 0.2)
        for bad in (0.0, torch.nan):
            keys, values = key.clone(), value.clone()
            keys[:, :, 128:1024] = values[:, :, 128:1024] = bad
            assert attention(query, keys, values, mask, 0.2).equal(wanted)
        mask[1, :, 2, 700] = 0  # a block that one query sees
        assert not attention(query, key, value, mask, 0.2)[1, 2].equal(wanted[1, 2])


def test_refusals() -> None:
    query, key, value = inputs(1, (4, 2), 3, 20)
    mask = causal(3, 20, torch.float32)
    for given, message in (
        ((query[0], key, value, None), "query: expected 4 dimensions, got 3"),
        ((query, key[:, :, :, :16], value, None), "key: expected size 32 in dimension 3, got 16"),
        ((query, key, value[:, :, :9], None), "value: expected size 20 in dimension 2, got 9"),
        ((query, key, value[..., :8], None), "value: expected a multiple of 32 up to 256"),
        ((query[:, :3], key, value, None), "key: expected a size in dimension 1 that divides"),
        ((query, key[:, :, :0], value[:, :, :0], None), "key: expected size >= 1 in dimension 2"),
        ((query.double(), key, value, None), "query: expected float32 or bfloat16"),
        ((query, key.bfloat16(), value, None), "key: expected the dtype of query"),
        ((query, key, value, mask.bool()), "mask: expected the dtype of query"),
        ((query, key, value, mask[0]), "mask: expected 4 dimensions, got 3"),
        ((query, key, value, mask[..., :9]), "mask: expected size 20 in dimension 3, got 9"),
        ((query, key, value, mask.expand(1, 4, 3, 20)), "mask: expected size 1 in dimension 1"),
        (
            (query, key.transpose(2, 3).contiguous().transpose(2, 3), value, None),
            "key: expected unit stride in the last dimension",
        ),
    ):
        with pytest.raises(RuntimeError, match=message):
            attention(*given, 0.2)


def test_the_operator() -> None:
    query, key, value = inputs(2, (4, 2), 3, 20, (64, 32))
    lengths = torch.tensor([4, 17])
    for mask, more in (
        (None, (True, None)),
        (None, (False, lengths)),
        (causal(3, 20, torch.float32), (False, None)),
    ):
        torch.library.opcheck(
            torch.ops.polyspec.attention.default, (query, key, value, mask, 0.2, *more)
        )
    assert attention(query[:, :, :0], key, value, None, 0.2).shape == (2, 0, 4, 32)
