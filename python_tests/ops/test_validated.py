"""``validate=True``: mistakes that no shape shows and that cost the target's distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import pooled, ragged, ragged_trees, slotted

import polyspec_ext as ps

B, K, V = 4, 3, 30
PARENTS = [-1, -1, 0]  # of the tree below


def block(temperature: Any = 0.7, drawn_at: Any = None) -> dict[str, Any]:
    """A call of `ps.verify` whose drafts were drawn at temperature `drawn_at`."""
    torch.manual_seed(3)
    target, draft = torch.randn(B, K + 1, V), torch.randn(B, K, V)
    seed, used = torch.arange(B), temperature if drawn_at is None else drawn_at
    drawn = [
        ps.sample(draft[:, i], used, top_p=0.9, seed=seed, position=i, level=2) for i in range(K)
    ]
    return {
        "target_logits": target,
        "draft_tokens": torch.stack([d.tokens for d in drawn], 1),
        "draft_logits": draft,
        "draft_statistics": torch.stack([d.statistics for d in drawn], 1),
        "draft_lengths": torch.tensor([K, 0, 2, K]),
        "temperature": temperature,
        "top_p": 0.9,
        "seed": seed,
        "validate": True,
    }


WAYS = {
    "side by side": lambda call: call,
    "pooled": pooled,
    "ragged": ragged,
    "ragged and pooled": lambda call: ragged(pooled(call)),
    "slotted": slotted,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "temperature", [0.0, 0.7, torch.tensor([0.5, 1.0, 0.0, 2.0])], ids=["greedy", "one", "each"]
)
def test_statistics_of_the_call_pass(way: str, temperature: Any) -> None:
    call = WAYS[way](block(temperature))
    plain = ps.verify(**{**call, "validate": False})
    checked = ps.verify(**call)
    assert not plain.status.any()
    assert torch.equal(plain.tokens, checked.tokens)


@pytest.mark.parametrize("way", WAYS)
def test_statistics_of_another_temperature(way: str) -> None:
    each = torch.tensor([0.7, 0.7, 0.8, 0.7])
    for call, request in ((block(0.7, 1.0), 0), (block(torch.full((B,), 0.7), each), 2)):
        given = WAYS[way](call)
        with pytest.raises(ValueError, match="draft_statistics: expected those") as raised:
            ps.verify(**given)
        assert f"(request {request})" in str(raised.value)
        ps.verify(**{**given, "validate": False})


def test_statistics_of_rows_that_are_not_verified_are_not_looked_at() -> None:
    call = block()
    call["draft_statistics"][1] = 0
    call["draft_statistics"][2, 2] = 0
    ps.verify(**call)
    call["draft_statistics"][2, 1] = 0
    with pytest.raises(ValueError, match="draft row 7 "):
        ps.verify(**call)


def tree(drawn_at: float = 0.7) -> dict[str, Any]:
    """Children of the root were drawn from row 2 b + 1 of a pool, that of node 0 was chosen."""
    torch.manual_seed(4)
    pool, target = torch.randn(2 * B, V), torch.randn(B, len(PARENTS) + 1, V)
    tokens = target.argmax(-1)[:, 1:].clone()
    drawn = ps.sample(pool, drawn_at, seed=1, level=2)
    tokens[:, :2] = drawn.tokens[1::2, None]
    rows = torch.full((B, len(PARENTS) + 1), -1)
    rows[:, 0] = 2 * torch.arange(B) + 1
    return {
        "target_logits": target,
        "draft_tokens": tokens,
        "parents": torch.tensor(PARENTS).expand(B, -1),
        "counts": torch.full((B,), len(PARENTS)),
        "draft_logits": pool,
        "draft_rows": rows,
        "draft_statistics": drawn.statistics,
        "temperature": 0.7,
        "seed": torch.arange(B),
        "validate": True,
    }


@pytest.mark.parametrize("way", [lambda call: call, ragged_trees, slotted])
def test_statistics_of_a_tree(way: Any) -> None:
    assert not ps.verify_tree(**way(tree())).status.any()
    with pytest.raises(ValueError, match=r"draft_statistics: expected .* draft row 1 \(request 0"):
        ps.verify_tree(**way(tree(0.9)))
    call = tree()
    call["draft_statistics"][0::2] = 0  # of rows that nobody was drawn from
    ps.verify_tree(**way(call))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_probabilities_are_no_logits(dtype: torch.dtype) -> None:
    call = {**block(), "draft_statistics": None}
    for name in ("target_logits", "draft_logits"):
        rows = call[name].to(dtype)
        with pytest.raises(ValueError, match=f"{name}: expected logits, given probabilities"):
            ps.verify(**{**call, name: rows.softmax(-1)})
        ps.verify(**{**call, name: rows.softmax(-1), "validate": False})
        ps.verify(**{**call, name: rows.log_softmax(-1)})
        ps.verify(**{**call, name: rows})
        forest = {**tree(), "draft_statistics": None}
        with pytest.raises(ValueError, match=f"{name}: expected logits, given probabilities"):
            ps.verify_tree(**{**forest, name: forest[name].to(dtype).softmax(-1)})
    rows = call["target_logits"][:, 0].to(dtype)
    with pytest.raises(ValueError, match="logits: expected logits, given probabilities"):
        ps.sample(rows.softmax(-1), validate=True)
    ps.sample(rows, validate=True)


def test_rows_that_only_look_like_probabilities() -> None:
    likely = torch.randn(3, V).softmax(-1)
    padded = torch.cat([likely, torch.zeros(1, V), torch.full((1, V), float("nan"))])
    with pytest.raises(ValueError, match="given probabilities"):
        ps.sample(padded, validate=True)
    ps.sample(torch.zeros(2, V), validate=True)  # padding alone
    ps.sample(torch.ones(2, 1), validate=True)  # a vocabulary of one
    ps.sample(torch.cat([likely, torch.randn(1, V)]), validate=True)
    ps.sample(likely + 0.1, validate=True)
    ps.sample(likely[:0], validate=True)


@pytest.mark.parametrize("flag", [1, "yes", torch.ones(2)], ids=repr)
def test_the_flag_itself(flag: Any) -> None:
    rows, ids = torch.randn(1, 2, 8), torch.zeros(1, 1, dtype=torch.int64)
    for call in (
        lambda: ps.sample(rows[:, 0], validate=flag),
        lambda: ps.verify(rows, ids, rows[:, :1], validate=flag),
    ):
        with pytest.raises(TypeError, match="validate: expected True or False, given"):
            call()
