"""Verification of trees as torch operator (its exactness: csrc/tests/exactness)."""

from typing import Any

import pytest
import torch
from calls import arguments_of, blocks, equal, ragged_trees, slotted

import polyspec_ext as ps

B, N, V = 6, 7, 40
PARENTS = [-1, -1, 0, 0, 1, 2, 2]


@pytest.fixture(params=["token", "block"])
def tree(device: torch.device, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return a tree: drawn children of the root and node 1, deterministic children elsewhere."""
    torch.manual_seed(5)
    # (The CPU's random numbers on each device: the tests count paths.)
    pool = torch.randn(B * (N + 1) + 2, V).to(device)
    rows = torch.randperm(B * (N + 1) + 2)[: B * (N + 1)].view(B, N + 1).to(device)
    target = pool[rows] + 1.2 * torch.randn(B, N + 1, V).to(device)
    likely = target.argsort(-1, descending=True)
    tokens = torch.zeros(B, N, dtype=torch.int64, device=device)
    tried: dict[int, int] = {}
    drawn = {0, 2}
    for node, parent in enumerate(PARENTS):
        row, sibling = parent + 1, tried.setdefault(parent, 0)
        tried[parent] += 1
        draft = ps.sample(pool[rows[:, row]], seed=9, position=row, node=sibling, level=2).tokens
        tokens[:, node] = draft if row in drawn else likely[:, row, sibling]
    keep = torch.tensor([row in drawn for row in range(N + 1)], device=device)
    return {
        "target_logits": target,
        "draft_tokens": tokens,
        "parents": torch.tensor(PARENTS, device=device).expand(B, N),
        "draft_logits": pool,
        "draft_rows": rows.masked_fill(~keep, -1),
        "seed": torch.arange(B, device=device),
        "counts": torch.tensor([N, N, N, 4, 0, N], device=device),
        "depth": 3,
        "rule": request.param,
    }


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_chain_with_draft_rows_gets_what_verify_gives(device: torch.device, rule: str) -> None:
    k = 4
    made = blocks(B, k, V, device=device)
    target, tokens, draft, statistics, *_ = made.values()
    shared: dict[str, Any] = {"position": 3, "round": 5, "top_p": 0.9, "temperature": 0.8}
    shared["rule"] = rule
    ids = torch.arange(B * k, device=device).view(B, k)
    rows = torch.nn.functional.pad(ids, (0, 1), value=-1)
    parents = (torch.arange(k, device=device) - 1).expand(B, k)
    target[::2, 2] = -torch.inf  # where no token may follow
    stood = 0
    for seed in range(20):
        ends: dict[str, Any] = {"eos": [1, 2, 3], "room": 3} if seed % 2 else {"room": 9}
        chain = ps.verify(target, tokens, draft, **shared, seed=seed, **ends)
        as_tree = ps.verify_tree(
            target,
            tokens,
            parents,
            draft.flatten(0, 1),
            draft_rows=rows,
            **shared,
            seed=seed,
            **ends,
        )
        for name in chain._fields:
            a, b = getattr(chain, name), getattr(as_tree, name)
            assert equal([a], [b]), name
        stood += int(chain.num_accepted.sum())
    assert stood > 20
    handed = ps.verify_tree(
        target, tokens, parents, draft.flatten(0, 1), draft_rows=rows,
        draft_statistics=statistics.flatten(0, 1), rule=rule,
    )  # fmt: skip
    assert equal(
        handed,
        ps.verify_tree(target, tokens, parents, draft.flatten(0, 1), draft_rows=rows, rule=rule),
    )


def test_a_path_of_more_drawn_nodes_than_fit_is_refused(device: torch.device) -> None:
    row = torch.zeros(1, 5, device=device)
    for nodes, status in ((32, 0), (33, int(ps.Status.BAD_TREE))):
        tokens = torch.zeros(1, nodes, dtype=torch.int64, device=device)
        r = ps.verify_tree(
            row.expand(1, nodes + 1, 5),
            tokens,
            torch.arange(nodes, device=device)[None] - 1,
            row,
            draft_rows=torch.zeros(1, nodes + 1, dtype=torch.int64, device=device),
            rule="block",
        )
        assert int(r.status) == status
        assert int(r.num_accepted) == 32
        assert bool((r.tokens == -1).all()) == bool(status)


def test_faults_are_of_their_request(tree: dict[str, Any]) -> None:
    good = ps.verify_tree(**tree)
    bits = ps.Status
    for name, at, value, bit in [
        ("parents", (2, 3), 3, bits.BAD_TREE),  # itself
        ("parents", (2, 3), 5, bits.BAD_TREE),  # a later node
        ("parents", (2, 3), -2, bits.BAD_TREE),
        ("draft_tokens", (2, 0), V, bits.TOKEN_OUT_OF_RANGE),
        ("draft_tokens", (2, 1), -1, bits.TOKEN_OUT_OF_RANGE),
        ("draft_rows", (2, 0), 10**6, bits.BAD_INDEX | bits.DRAFT_ROW),
        ("draft_rows", (2, 0), -2, bits.BAD_INDEX | bits.DRAFT_ROW),
        ("counts", (2,), N + 1, bits.BAD_LENGTH),
        ("target_logits", (2, 0, 4), torch.nan, bits.NAN),
    ]:
        wrong = tree[name].clone()
        wrong[at] = value
        r = ps.verify_tree(**{**tree, name: wrong})
        assert r.status[2] == bit, name
        assert (r.tokens[2] == -1).all()
        rest = [0, 1, 3, 4, 5]
        assert equal([t[rest] for t in r], [t[rest] for t in good]), name
    equal_siblings = tree["draft_tokens"].clone()
    equal_siblings[:, 1] = equal_siblings[:, 0]
    drawn = ps.verify_tree(**{**tree, "draft_tokens": equal_siblings})
    assert not (drawn.status & bits.BAD_TREE).any()  # may be drawn twice
    call = {**tree, "draft_tokens": equal_siblings, "draft_logits": None, "draft_rows": None}
    fixed = ps.verify_tree(**call)
    assert fixed.status.tolist() == [bits.BAD_TREE] * 4 + [0, bits.BAD_TREE]
    shallow = ps.verify_tree(**{**tree, "depth": 0})
    assert shallow.status.tolist() == [bits.BAD_TREE] * 4 + [0, bits.BAD_TREE]
    assert shallow.path.shape == (B, 0)


WAYS = [(ragged_trees,), (slotted,), (ragged_trees, slotted)]


@pytest.mark.parametrize("ways", WAYS, ids=lambda ways: "-".join(way.__name__ for way in ways))
def test_same_bits_however_the_rows_lie(tree: dict[str, Any], ways: Any) -> None:
    each = torch.arange(B, device=tree["seed"].device)
    stood = 0
    for seed in range(20):
        call = {**tree, "seed": each + 10 * seed, "position": 7 * each}
        call["temperature"] = 0.6 + 0.1 * each
        if seed % 2:
            call |= {"room": each, "eos": call["draft_tokens"][:, :2]}
        expected = ps.verify_tree(**call)
        stood += int(expected.num_accepted.sum())
        for way in ways:
            call = way(call)
        assert equal(ps.verify_tree(**call), expected)
    assert stood > 20


@pytest.mark.parametrize(
    ("way", "name", "value", "texts"),
    [
        (ragged_trees, "nodes", None, ["nodes", "most nodes", "None"]),
        (ragged_trees, "nodes", 2**14, ["N < 2**14", "16384"]),
        (ragged_trees, "counts", torch.zeros(B).long(), ["counts", "None with offsets"]),
        (ragged_trees, "parents", torch.zeros(B, N).long(), ["parents", "[M]"]),
        (ragged_trees, "draft_rows", torch.zeros(B, N + 1).long(), ["draft_rows", "[M]"]),
        (ragged_trees, "offsets", None, ["target_logits", "[B, N+1, V]"]),
        (ragged_trees, "slots", torch.zeros(B - 1).long(), ["slots", "[B]"]),
        (ragged_trees, "slots", torch.zeros(B).long(), ["slots", "[S]", "none"]),
        (dict, "target_logits", torch.randn(B, V), ["[B, N+1, V]"]),
        (dict, "draft_tokens", torch.zeros(B, N + 1).long(), ["[B, N]", "[6, 8]"]),
        (dict, "parents", torch.zeros(B, N), ["integer"]),
        (dict, "counts", torch.zeros(N).long(), ["[B]"]),
        (dict, "depth", N + 1, ["[0, 7]", "8"]),
        (dict, "nodes", N + 1, ["N = 7", "8"]),
        (dict, "draft_rows", None, ["both or none"]),
        (dict, "draft_rows", torch.zeros(B, N).long(), ["[B, N+1]"]),
        (dict, "draft_logits", torch.randn(2, V + 1), ["Vd <= V = 40", "41"]),
        (dict, "draft_statistics", torch.zeros(B, 2).long(), ["[R, 2]"]),
        (dict, "draws", torch.zeros(B, N + 1).long(), ["[B, N+D+1]"]),
        (dict, "rule", "blocks", ["'token' or 'block'", "'blocks'"]),
    ],
)
def test_wrong_arguments_are_named(tree, way, name, value, texts) -> None:
    call = {**way(tree), name: value}
    if name == "slots":
        call["seed"] = 0 if "none" in texts else torch.zeros(9).long()
    device = tree["seed"].device
    call = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in call.items()}
    with pytest.raises(TypeError if texts == ["integer"] else ValueError) as raised:
        ps.verify_tree(**call)
    for text in (name, *texts) if way is dict else texts:
        assert text in str(raised.value), raised.value


def test_opcheck_compile_and_fake(tree: dict[str, Any]) -> None:
    operator = torch.ops.polyspec.verify_tree.default
    call = {**tree, "temperature": 0.0, "depth": 3, "counts": None}
    call |= {"draft_logits": None, "draft_rows": None, "eos": 1, "parents": tree["parents"].clone()}
    call["draft_tokens"] = call["draft_tokens"].clone()
    for node, parent in enumerate(PARENTS):  # accepted paths of three: no NaN to compare
        best = call["target_logits"][:, parent + 1].argmax(-1)
        first = PARENTS.index(parent) == node
        call["draft_tokens"][:, node] = best if first else (best + 1) % V
    call["eos"] = -1
    (arguments,) = arguments_of(operator, lambda: ps.verify_tree(**call))
    assert ps.verify_tree(**call).num_accepted.tolist() == [3] * B
    torch.library.opcheck(operator, arguments)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda **c: tuple(ps.verify_tree(**c)), fullgraph=True, backend="eager"
    )
    for given in (tree, slotted(ragged_trees(tree))):
        assert equal(compiled(**given), ps.verify_tree(**given))
    whole = {**call, "counts": torch.full_like(tree["counts"], N), "draft_rows": tree["draft_rows"]}
    elsewhere = {**slotted(ragged_trees(whole)), "draft_rows": None}
    (arguments,) = arguments_of(operator, lambda: ps.verify_tree(**elsewhere))
    assert ps.verify_tree(**elsewhere).num_accepted.tolist() == [3] * B
    torch.library.opcheck(operator, arguments)
