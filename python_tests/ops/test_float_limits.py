"""Logits and temperatures at the limits of float32, against the bounds of polyspec/types.hpp."""

import math
from typing import Any

import mpmath
import numpy as np
import pytest
import reference_rules as reference
import torch

import polyspec_ext as ps

LARGEST = 3.4028234663852886e38
TEMPERATURES = (1e-45, 2.0**-126, 1e-30, 1e-6, 0.7, 1.0, 30.0, 1e6, 1e20, 1e34, 2.0**120)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rows(vocab: int, dtype: torch.dtype, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """Return rows [V] of every kind, in the type's extremes."""
    most = torch.finfo(dtype).max
    tiny = torch.finfo(dtype).smallest_normal
    normal = rng.normal(0, 1, vocab)
    holes = np.where(rng.random(vocab) < 0.3, -np.inf, normal * most / 8)
    holes[0] = most
    made = {
        "normal": 3 * normal,
        "as wide as can be": np.clip(normal, -1, 1) * most,
        "wide, holes": holes,
        "wide, near the top": most * (1 - np.abs(normal) * 1e-6),
        "every size": np.exp(rng.uniform(math.log(tiny), math.log(most), vocab))
        * rng.choice([-1, 1], vocab),
        "denormal": normal * tiny / 4,
        "one": np.where(np.arange(vocab) == vocab // 2, -most, -np.inf),
    }
    return {
        name: torch.from_numpy(np.clip(row, -np.inf, most)).to(dtype).clamp_max(most)
        for name, row in made.items()
    }


def softmax(row: torch.Tensor, temperature: float) -> list[Any]:
    """The probabilities to 60 digits, of float32 logits at a float32 temperature."""
    with mpmath.workdps(60):
        hot = max(mpmath.mpf(float(np.float32(temperature))), mpmath.mpf(2) ** -126)
        top = mpmath.mpf(row.max().item())
        weights = [mpmath.exp((mpmath.mpf(z) - top) / hot) for z in row.tolist()]
        total = mpmath.fsum(weights)
        return [w / total for w in weights]


def assert_drawn_from(logits: torch.Tensor, temperature: float, distribution: Any) -> None:
    """The first and the last draw of each cell of the reference give its token."""
    ids = np.nonzero(distribution.masses)[0]
    ends = np.cumsum(distribution.masses, dtype=np.uint64)[ids]
    first, last = ends - distribution.masses[ids], ends - np.uint64(1)
    bits = [-(-(int(r) << 64) // distribution.mass) for r in (*first, *last)]
    draws = torch.from_numpy(np.array(bits, np.uint64).view(np.int64))[:, None]
    n = len(bits)
    r = ps.sample(logits.expand(n, len(logits)), temperature=temperature, draws=draws)
    assert not r.status.any()
    assert r.tokens.tolist() == [*ids, *ids]
    assert (r.statistics[:, 1] == distribution.mass).all()
    lowest = np.array([distribution.logprob(int(t)) for t in ids], np.float32)
    np.testing.assert_array_equal(r.logprobs[: len(ids)].numpy(), lowest)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_distribution_is_as_near_the_softmax_as_stated(temperature, dtype) -> None:
    vocab = 40
    for name, row in rows(vocab, dtype, np.random.default_rng(3)).items():
        distribution = reference.distribution(row.float().numpy(), temperature)
        assert_drawn_from(row, temperature, distribution)
        check_bounds(row.float(), temperature, distribution, name)


def check_bounds(row: torch.Tensor, temperature: float, distribution: Any, name: str) -> None:
    vocab, unit = len(row), 2.0 ** -(62 - (len(row) - 1).bit_length())
    bound = 2e-7 * math.log2(vocab) + 1e-7 + unit * vocab
    with mpmath.workdps(60):
        p = softmax(row, temperature)
        got = [mpmath.mpf(int(m)) / distribution.mass for m in distribution.masses]
        off = [abs(a - b) for a, b in zip(p, got, strict=True)]
        top = max(p)
        assert mpmath.fsum(off) / 2 <= bound, name
        for probability, error in zip(p, off, strict=True):
            below = mpmath.log(top / probability, 2) if probability > 0 else 0
            assert error <= probability * (2e-7 * below + 1e-7 + bound) + unit * top, name


@pytest.mark.parametrize("temperature", [2.0**120 * 1.001, 1e37, LARGEST])
def test_hotter_than_2_to_the_120_is_refused(temperature: float) -> None:
    row = torch.tensor([[LARGEST, -LARGEST]])
    with pytest.raises(ValueError, match=r"temperature: expected .* at most 1.329e\+36, given"):
        ps.sample(row, temperature=temperature)
    drawn = ps.sample(row, temperature=torch.tensor([temperature]))
    verified = ps.verify(
        row[None].expand(1, 2, 2), torch.tensor([[0]]), temperature=torch.tensor([temperature])
    )
    for r in (drawn, verified):
        assert r.status.tolist() == [int(ps.Status.BAD_PARAMETER)]
        assert (r.tokens == -1).all()


def test_colder_than_2_to_the_minus_126_counts_as_that() -> None:
    row = torch.tensor([[0.0, -1e-38, -1e-39, 0.0]]).expand(4096, 4)
    seeds = torch.arange(4096)
    least = ps.sample(row, temperature=2.0**-126, seed=seeds)
    assert set(least.tokens.tolist()) == {0, 1, 2, 3}
    for temperature in (1e-45, 1e-39):
        r = ps.sample(row, temperature=torch.full((4096,), temperature), seed=seeds)
        for a, b in zip(r, least, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_thread_that_flushes_denormals_draws_the_same() -> None:
    rng = torch.Generator().manual_seed(0)
    tiny = (torch.randn(64, 500, generator=rng) * 2e-5).half()  # denormal in float16
    wide = torch.randn(1, 40_000, generator=rng).half() * 2e-5  # rows shared by threads

    def draw() -> list[torch.Tensor]:
        hot: dict[str, Any] = {"temperature": 1e-5, "seed": 3}
        both = ps.sample(tiny, **hot), ps.sample(wide, **hot), ps.sample(tiny, temperature=0.0)
        return [field for r in both for field in r]

    plain = draw()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        flushed = draw()
    finally:
        torch.set_flush_denormal(False)
    for a, b in zip(plain, flushed, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
