"""A decoder layer between its products: float64, transformers, invariance, opcheck."""

import hashlib
from collections.abc import Callable

import instruction_sets
import pytest
import torch

from polyspec_ext.ops.decoder import CacheStatus, append, gated, rms_norm, rotary, rotary_append
from polyspec_ext.ops.decoder import add_rms_norm as add_norm

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
EPSILON = 1e-5
HEADS, GROUPS, WIDTH, ANGLES = 6, 2, 32, 60
NO_NORMS = None, None, 0.0


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def turns(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Angles of ANGLES positions."""
    angles = 20 * numbers(ANGLES, WIDTH // 2, seed=5)
    both = torch.cat([angles, angles], -1)
    return both.cos().to(dtype), both.sin().to(dtype)


def positions(rows: int, tokens: int) -> torch.Tensor:
    return torch.randint(ANGLES, (rows, tokens), generator=torch.Generator().manual_seed(6))


def product(rows: int, dtype: torch.dtype) -> torch.Tensor:
    return numbers(rows, (HEADS + 2 * GROUPS) * WIDTH, dtype=dtype)


def rounding(dtype: torch.dtype) -> float:
    return 2**-8 if dtype == torch.bfloat16 else 2**-22


@DTYPES
@pytest.mark.parametrize("width", [1, 7, 16, 50, 896])
def test_is_the_norm(width: int, dtype: torch.dtype) -> None:
    x, weight = 3 * numbers(5, width, dtype=dtype), numbers(width, dtype=dtype, seed=1)
    exact = x.double() / (x.double().square().mean(1, keepdim=True) + EPSILON).sqrt()
    wanted = weight.double() * exact
    made = rms_norm(x, weight, EPSILON)
    assert made.dtype == dtype
    assert ((made - wanted).abs() <= 2 * rounding(dtype) * wanted.abs()).all()
    residual = numbers(5, width, dtype=dtype, seed=2)
    total, normed = add_norm(x, residual, weight, EPSILON)
    assert total.equal(x + residual)
    assert normed.equal(rms_norm(total, weight, EPSILON))


@DTYPES
def test_heads_are_turned_as_transformers_turns_them(dtype: torch.dtype) -> None:
    from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb  # slow to load

    cosine, sine = turns(dtype)
    for batch, tokens, shape in ((1, 1, (1, 1)), (3, 4, (1, 4)), (2, 5, (2, 5)), (3, 2, (3, 1))):
        x, bias = product(batch * tokens, dtype), product(1, dtype)[0]
        at = positions(*shape)
        for given in (None, bias):
            whole = x if given is None else x + given
            each = whole.view(batch, tokens, -1, WIDTH).transpose(1, 2)
            query, key, value = each.split([HEADS, GROUPS, GROUPS], 1)
            wanted = (*apply_rotary_pos_emb(query, key, cosine[at], sine[at]), value)
            for same in (at, at.t().contiguous().t()):
                made = rotary(x, given, cosine, sine, same, batch, HEADS, GROUPS, *NO_NORMS)
                assert all(one.equal(other) for one, other in zip(made, wanted, strict=True))
                assert all(one.is_contiguous() for one in made)


def test_positions_outside_of_the_tables_are_the_nearest_inside() -> None:
    x, angles = product(4, torch.float32), turns(torch.float32)
    sizes = 1, HEADS, GROUPS, *NO_NORMS
    outside = torch.tensor([[-(2**63), -1, ANGLES, 2**63 - 1]])
    inside = outside.clamp(0, ANGLES - 1)
    made, wanted = (rotary(x, None, *angles, at, *sizes) for at in (outside, inside))
    assert all(one.equal(other) for one, other in zip(made, wanted, strict=True))


@DTYPES
def test_heads_have_norms_of_their_own(dtype: torch.dtype) -> None:
    x, bias, angles = product(6, dtype), product(1, dtype)[0], (*turns(dtype), positions(1, 3))
    norms = [3 * numbers(WIDTH, dtype=dtype, seed=seed) for seed in (6, 7)]
    query, key, value = (
        part.reshape(-1, WIDTH)
        for part in (x + bias).split([HEADS * WIDTH, GROUPS * WIDTH, GROUPS * WIDTH], 1)
    )
    normed = [rms_norm(part, norm, EPSILON) for part, norm in zip((query, key), norms, strict=True)]
    whole = torch.cat([part.view(6, -1) for part in (*normed, value)], 1)
    wanted = rotary(whole, None, *angles, 2, HEADS, GROUPS, *NO_NORMS)
    made = rotary(x, bias, *angles, 2, HEADS, GROUPS, *norms, EPSILON)
    assert all(one.equal(other) for one, other in zip(made, wanted, strict=True))


@DTYPES
def test_heads_are_appended_as_by_themselves(dtype: torch.dtype) -> None:
    x, bias, angles = product(12, dtype), product(1, dtype)[0], turns(dtype)
    norms = numbers(WIDTH, dtype=dtype, seed=6), numbers(WIDTH, dtype=dtype, seed=7), EPSILON
    lengths = torch.tensor([0, 5, 9])
    for given, counts, heads in (
        (None, None, NO_NORMS),
        (bias, torch.tensor([4, 1, 2]), NO_NORMS),
        (bias, torch.tensor([0, 4, 3]), norms),
    ):
        caches = [numbers(3, GROUPS, 11, 2 * WIDTH, dtype=dtype)[..., :WIDTH] for _ in range(4)]
        after = lengths[:, None] + torch.arange(4)
        at = positions(3, 4) if given is None else after
        query, key, value = rotary(x, given, *angles, at, 3, HEADS, GROUPS, *heads)
        _, wanted = append(*caches[:2], key, value, lengths, counts)
        stated = None if at is after else at
        status = torch.full((3,), 1, dtype=torch.int32)
        made = rotary_append(
            x, given, *angles, stated, *caches[2:], status, lengths, counts, HEADS, *heads
        )
        assert made.equal(query)
        assert status.equal(wanted | 1)
        assert caches[2].equal(caches[0])
        assert caches[3].equal(caches[1])
    assert CacheStatus(int(wanted[2])) == CacheStatus.CACHE_FULL
    good = x, None, *angles, None, *caches[:2], status, lengths, None, HEADS, *NO_NORMS
    for place, wrong, message in (
        (5, caches[0][0], "cache_keys: expected 4 dimensions, got 3"),
        (5, caches[0][..., :16], "cache_values: expected size 16 in dimension 3"),
        (6, caches[0].double(), "cache_values: expected the dtype of x"),
        (7, status[1:], "status: expected size 3 in dimension 0, got 2"),
        (8, lengths[1:], "lengths: expected size 3 in dimension 0, got 2"),
        (10, 0, "batch, heads, groups: expected"),
    ):
        with pytest.raises(RuntimeError, match=message):
            rotary_append(*good[:place], wrong, *good[place + 1 :])


@DTYPES
def test_is_the_gated_activation(dtype: torch.dtype) -> None:
    x = numbers(40, 2 * 301, dtype=dtype)
    x[:, :301] *= torch.logspace(-3, 1.8, 40)[:, None].to(dtype)
    gate, up = x.double().chunk(2, 1)
    wanted = torch.nn.functional.silu(gate) * up
    made = gated(x)
    assert ((made - wanted).abs() <= 2 * rounding(dtype) * wanted.abs() + 1e-36).all()
    theirs = torch.nn.functional.silu(x[:, :301]) * x[:, 301:]
    assert (made == theirs).float().mean() > (0.999 if dtype == torch.bfloat16 else 0.3)


def calls(dtype: torch.dtype, tokens: int) -> list[Callable[[slice], torch.Tensor]]:
    """Each on some of the tokens; outputs by token."""
    x, residual = numbers(tokens, 900, dtype=dtype), numbers(tokens, 900, dtype=dtype, seed=3)
    weight, wide = numbers(900, dtype=dtype, seed=4), product(tokens, dtype)
    angles, at = turns(dtype), positions(1, tokens)

    def turned(part: slice) -> torch.Tensor:
        made = rotary(wide[part], None, *angles, at[:, part], 1, HEADS, GROUPS, *NO_NORMS)
        return torch.cat([one[0].transpose(0, 1).flatten(1) for one in made], 1)

    return [
        lambda part: rms_norm(x[part], weight, EPSILON),
        lambda part: torch.cat(add_norm(x[part], residual[part], weight, EPSILON), 1),
        lambda part: gated(4 * x[part]),
        turned,
    ]


@DTYPES
def test_a_token_is_what_it_is_alone(dtype: torch.dtype) -> None:
    for call in calls(dtype, 50):
        whole = call(slice(0, 50))
        for begin, end in ((0, 1), (7, 8), (3, 12), (11, 50)):
            assert call(slice(begin, end)).equal(whole[begin:end])


def test_threads_change_nothing() -> None:
    threads = torch.get_num_threads()
    for call in calls(torch.bfloat16, 200):
        made = []
        try:
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                made.append(call(slice(0, 200)))
        finally:
            torch.set_num_threads(threads)
        assert all(one.equal(made[0]) for one in made)


def digest() -> str:
    found = hashlib.sha256()
    for dtype in (torch.float32, torch.bfloat16):
        for call in calls(dtype, 9):
            made = call(slice(0, 9)).contiguous()
            found.update(made.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_instruction_sets_change_nothing(isa: str) -> None:
    assert instruction_sets.printed(isa, "test_layer", "digest()") == digest()


@DTYPES
def test_numbers_that_are_not_finite(dtype: torch.dtype) -> None:
    x = numbers(3, 64, dtype=dtype)
    weight = torch.ones(64, dtype=dtype)
    for bad in (float("nan"), float("inf")):
        broken = x.clone()
        broken[1, 5] = bad
        made = rms_norm(broken, weight, EPSILON)
        assert made[1, 5].isnan()
        assert made[::2].equal(rms_norm(x, weight, EPSILON)[::2])
        made = gated(broken)
        assert made[1].isfinite().sum() == 31
        assert made[::2].equal(gated(x)[::2])
    limits = torch.tensor([[-3e38, 3e38, -200.0, -0.0, 1.0, 1.0, 1.0, 1.0]]).to(dtype)
    assert gated(limits).equal(torch.nn.functional.silu(limits[:, :4]))


def test_refusals() -> None:
    x, weight = numbers(3, 64), numbers(64)
    for given, message in (
        ((x[0], weight, 1.0), "x: expected 2 dimensions, got 1"),
        ((x, weight[1:], 1.0), "weight: expected size 64 in dimension 0, got 63"),
        ((x, weight.bfloat16(), 1.0), "weight: expected the dtype of x"),
        ((x[:, ::2], weight[:32], 1.0), "x: expected a contiguous tensor"),
        ((x.half(), weight.half(), 1.0), "x: expected float32 or bfloat16"),
        ((x, weight, 0.0), "epsilon: expected > 0, given 0"),
        ((x, weight, float("nan")), "epsilon: expected > 0, given nan"),
    ):
        with pytest.raises(RuntimeError, match=message):
            rms_norm(*given)
    with pytest.raises(RuntimeError, match="residual: expected size 3 in dimension 0, got 2"):
        add_norm(x, x[:2], weight, 1.0)
    with pytest.raises(RuntimeError, match="x: expected an even size in dimension 1, got 63"):
        gated(x[:, 1:].contiguous())
    wide, (cosine, sine), at = product(4, torch.float32), turns(torch.float32), positions(2, 2)
    few, sizes = [one[:, :3].contiguous() for one in (cosine, sine)], (2, HEADS, GROUPS)
    good = wide, None, cosine, sine, at, *sizes
    for given, message in (
        ((*good[:5], 3, HEADS, GROUPS), "x: expected as many rows for each of 3, got 4"),
        ((wide, None, cosine[0], sine, at, *sizes), "cosine: expected 2 dimensions, got 1"),
        ((wide, None, cosine, sine[1:], at, *sizes), "sine: expected size 60 in dimension"),
        ((wide, None, cosine[:0], sine[:0], at, *sizes), "angles: expected >= 1, given 0"),
        ((*good[:4], at[0], *sizes), "positions: expected 2 dimensions, got 1"),
        ((*good[:4], at.repeat(1, 2), *sizes), "positions: expected size 2 in dimension 1, got 4"),
        ((*good[:4], at.int(), *sizes), "positions: expected int64"),
        ((wide, wide[0, 1:], *good[2:]), "bias: expected size 320"),
        ((*good[:5], 2, 0, GROUPS), "batch, heads, groups: expected"),
        ((wide[:, :30].contiguous(), None, *few, *good[4:]), "width: expected an even number"),
        ((*good, cosine[0, 1:], cosine[0], 1.0), "query_norm: expected size 32 in dimension"),
        ((*good, cosine[0], None, 1.0), "key_norm: expected a pointer, given null"),
        ((*good, cosine[0], cosine[0], 0.0), "epsilon: expected > 0, given 0"),
    ):
        with pytest.raises(RuntimeError, match=message):
            rotary(*(*given, *NO_NORMS)[:11])


def test_the_operators() -> None:
    x, weight = numbers(3, 64), numbers(64)
    wide, angles = product(4, torch.float32), turns(torch.float32)
    own, check = torch.ops.polyspec, torch.library.opcheck
    check(own.rms_norm.default, (x, weight, EPSILON))
    check(own.add_rms_norm.default, (x, x + 1, weight, EPSILON))
    check(own.gated.default, (x,))
    norms = numbers(WIDTH), numbers(WIDTH, seed=1), EPSILON
    for bias, heads in ((None, (None, None, 0.0)), (wide[0].clone(), norms)):
        given = wide, bias, *angles, positions(2, 2), 2, HEADS, GROUPS, *heads
        check(own.rotary.default, given)
    caches = numbers(2, GROUPS, 8, WIDTH), numbers(2, GROUPS, 8, WIDTH, seed=1)
    lengths, status = torch.tensor([0, 3]), torch.zeros(2, dtype=torch.int32)
    check(
        own.rotary_append.default,
        (wide, None, *angles, None, *caches, status, lengths, None, HEADS, *norms),
    )
    assert rms_norm(x[:0], weight, EPSILON).shape == (0, 64)
    assert gated(x[:0]).shape == (0, 32)
    assert gated(x[:, :0].contiguous()).shape == (len(x), 0)
