"""``draft_statistics`` of another row: an error, and never a token of probability 0."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import polyspec_ext as ps

N, K, V = 200, 3, 50
RULES = ("token", "block")
Forger = Callable[[np.ndarray, np.random.Generator], None]


def call(seed: int, **sampling: Any) -> tuple[dict[str, Any], np.ndarray]:
    """Arguments of ps.verify and their statistics, [N, K, 2] int64; some tokens have none."""
    rng = np.random.default_rng(seed)
    target, draft = rng.normal(0, 2, (N, K + 1, V)), rng.normal(0, 2, (N, K, V))
    target[rng.random(target.shape) < 0.5] = -np.inf
    draft[rng.random(draft.shape) < 0.2] = -np.inf
    target[..., 0] = draft[..., 1] = 0.0
    logits = torch.from_numpy(draft).float()
    options = {**sampling, "seed": torch.from_numpy(rng.integers(0, 2**62, N))}
    drawn = [ps.sample(logits[:, i], **options, position=i, level=2) for i in range(K)]
    statistics = torch.stack([d.statistics for d in drawn], 1).numpy()
    tokens = torch.stack([d.tokens for d in drawn], 1)
    return {
        "target_logits": torch.from_numpy(target).float(),
        "draft_tokens": tokens,
        "draft_logits": logits,
        **options,
    }, statistics


def floats(statistics: np.ndarray) -> np.ndarray:
    """Return max and threshold, [N, K, 2] float32, as a view."""
    return statistics.view(np.float32)[..., :2]


def put(column: int | None, *values: float) -> Forger:
    """Have each token's maximum, threshold (columns 0 and 1) or mass (None) one of the values."""

    def forge(statistics: np.ndarray, rng: np.random.Generator) -> None:
        at = statistics[..., 1] if column is None else floats(statistics)[..., column]
        at[...] = rng.choice(np.asarray(values, at.dtype), at.shape)

    return forge


def random(column: int | None) -> Forger:
    def forge(statistics: np.ndarray, rng: np.random.Generator) -> None:
        at = statistics[..., 1] if column is None else floats(statistics)[..., column]
        at[...] = np.frombuffer(rng.bytes(at.size * at.itemsize), at.dtype).reshape(at.shape)

    return forge


def random_bits(statistics: np.ndarray, rng: np.random.Generator) -> None:
    statistics[:] = rng.integers(0, 2**64, statistics.shape, np.uint64).view(np.int64)


def roll(statistics: np.ndarray, rng: np.random.Generator) -> None:
    statistics[:] = np.roll(statistics, 1, axis=int(rng.integers(2)))


def lower_max(statistics: np.ndarray, rng: np.random.Generator) -> None:
    floats(statistics)[..., 0] -= rng.choice(
        np.asarray([1e-3, 0.1, 2, 100, 1e9], np.float32), (N, K)
    )


S = 2 ** (62 - 6)  # the mass of the largest logit, V = 50
# Seen in any row.
CAUGHT: dict[str, Forger] = {
    "zeros": lambda statistics, rng: statistics.fill(0),
    "negative": lambda statistics, rng: np.negative(statistics, out=statistics),
    "NaN maximum": put(0, np.nan, -np.nan),
    "infinite maximum": put(0, np.inf, -np.inf),
    "far maximum": put(0, -3e38, 3e38, -1e4, 1e4),
    "NaN threshold": put(1, np.nan),
    "infinite threshold": put(1, np.inf),
    "a threshold without a filter": put(1, -50.0, -1e30),
    "mass 0, 1 or less than the maximum's": put(None, 0, 1, 2, S - 1),
    "more mass than a row has": put(None, V * S + 1, 2**62 + 1, -1, -(2**63)),
}
# Another row's, and possible for any row.
SLIPPERY: dict[str, Forger] = {
    "random bits": random_bits,
    "another row's": roll,
    "random maximum": random(0),
    "random threshold": random(1),
    "lower maximum": lower_max,
    "random mass": random(None),
    "possible mass": put(None, S, S + 1, 2 * S, V * S),
}


def assert_possible(r: ps.VerifyResult, target: torch.Tensor) -> None:
    """Check for any status: tokens in range, each with a probability under the target."""
    emitted = r.tokens >= 0
    assert (r.tokens < V).all()
    logits = target.gather(2, r.tokens.clamp_min(0)[..., None])[..., 0]
    assert (logits[emitted] > -torch.inf).all(), "a token of probability 0 was emitted"
    assert r.logprobs[emitted].isfinite().all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", CAUGHT)
def test_laws_that_no_row_can_have_are_an_error(name: str, rule: str) -> None:
    arguments, statistics = call(1)
    CAUGHT[name](statistics, np.random.default_rng(2))
    r = ps.verify(**arguments, draft_statistics=torch.from_numpy(statistics), rule=rule)
    assert (r.status == int(ps.Status.DRAFT_STATISTICS_MISMATCH)).all()
    assert not r.num_accepted.any()
    assert (r.tokens == -1).all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", [*SLIPPERY, *CAUGHT])
@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.02}, {"temperature": 5.0, "top_p": 0.9, "min_p": 0.01}, {"top_k": 9}],
    ids=str,
)
def test_no_distribution_brings_out_a_token_without_probability(sampling, name, rule) -> None:
    for seed in range(2):
        arguments, statistics = call(seed, **sampling)
        {**SLIPPERY, **CAUGHT}[name](statistics, np.random.default_rng(seed))
        r = ps.verify(**arguments, draft_statistics=torch.from_numpy(statistics), rule=rule)
        assert_possible(r, arguments["target_logits"])


@pytest.mark.parametrize("rule", RULES)
def test_a_token_that_the_draft_lacks_was_not_drawn_from_its_row(rule: str) -> None:
    draft = torch.zeros(1, 1, 4)
    for token, known in ((3, True), (4, False), (7, False)):
        r = ps.verify(torch.zeros(1, 2, 8), torch.tensor([[token]]), draft, rule=rule)
        assert r.status.tolist() == [0 if known else int(ps.Status.DRAFT_STATISTICS_MISMATCH)]
