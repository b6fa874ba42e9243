"""Medusa and Hydra heads against their forward passes written down plainly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from last_state_heads import KINDS, Weights, drafter, hydra, save
from small_models import make
from told import draft_input, told
from unsafe_code import Code

import polyspec_ext as ps

HIDDEN, V = 32, 64
TEXTS = [[3, 9, 27, 17], [5, 6], [8]]


@pytest.fixture(scope="module")
def target() -> Any:
    return make("llama", 2, vocab=V)


def gated(weights: Weights, key: str, x: torch.Tensor) -> torch.Tensor:
    inner = weights[f"{key}.weight"] @ x + weights[f"{key}.bias"]
    return inner * torch.sigmoid(inner)


def plain_medusa(weights: Weights, head: int, blocks: int, x: torch.Tensor) -> torch.Tensor:
    for j in range(blocks):
        x = x + gated(weights, f"{head}.{j}.linear", x)
    return weights[f"{head}.{blocks}.weight"] @ x


def plain_hydra(weights: Weights, head: int, blocks: int, x: torch.Tensor) -> torch.Tensor:
    key = f"hydra_mlp.{head}.0"
    residual = weights[f"{key}.res_connection.weight"] @ x + weights[f"{key}.res_connection.bias"]
    x = residual + gated(weights, f"{key}.linear", x)
    for j in range(1, blocks):
        x = x + gated(weights, f"hydra_mlp.{head}.{j}.linear", x)
    out = weights[f"hydra_lm_head.{head}.weight"] @ x
    return out + weights.get(f"hydra_lm_head.{head}.bias", torch.zeros(V))


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize(
    ("kind", "blocks", "bias"),
    [("medusa", 1, True), ("medusa", 2, True), ("hydra", 1, True), ("hydra", 2, False)],
)
def test_against_the_plain_heads(kind, blocks, bias, pack, target, tmp_path) -> None:
    level = ps.HuggingFaceLevel(target, pack=pack)
    tree = ps.StaticTree([[0], [1], [0, 0], [0, 1], [1, 0], [0, 1, 1], [1, 0, 0]])
    drafts, make_weights = KINDS[kind]
    weights = make_weights(3, blocks, **({} if bias else {"bias": False}))
    drafter = drafts.from_pretrained(save(kind, weights, tmp_path), level, tree=tree)
    assert drafter.num_heads == 3
    assert drafter.capabilities.hidden_layers == (-1,)
    generator = torch.Generator().manual_seed(1)
    states = [torch.randn(max(len(t) - 1, 1), HIDDEN, generator=generator) for t in TEXTS]
    hidden = told([-1], states, [0, 0, 0])
    hidden.counts[2] = 0  # a text of one token has no state
    block = drafter.draft(draft_input(TEXTS, [3, 2, 3], hidden))
    assert block.counts.tolist() == [7, 5, 0]
    embeddings = target.model.embed_tokens.weight.data
    for b in range(2):
        paths: dict[int, list[int]] = {-1: [TEXTS[b][-1]]}
        for i in range(int(block.counts[b])):
            parent = tree.parents[i]
            assert int(block.parents[b, i]) == parent
            if kind == "medusa":
                rows = plain_medusa(weights, tree.depths[i] - 1, blocks, states[b][-1])
            else:
                read = torch.cat([states[b][-1], *[embeddings[token] for token in paths[parent]]])
                rows = plain_hydra(weights, tree.depths[i] - 1, blocks, read)
            assert int(block.tokens[b, i]) == int(rows.topk(3).indices[tree.ranks[i]])
            paths[i] = [*paths[parent], int(block.tokens[b, i])]


def test_no_deeper_than_there_are_heads(target: Any, tmp_path: Path) -> None:
    heads = drafter("medusa", target, tmp_path, 2)
    hidden = told([-1], [torch.randn(3, HIDDEN)], [0])
    block = heads.draft(draft_input(TEXTS[:1], [5], hidden))
    depths: list[int] = []
    for parent in block.parents[0, : int(block.counts[0])].tolist():
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    assert max(depths) == 2
    wide = ps.Medusa.from_pretrained(tmp_path, target, tree=ps.DynamicTree(3, 60))
    block = wide.draft(draft_input(TEXTS[:1], [5], hidden))
    assert wide.capabilities.tree_size(5).nodes == block.tokens.shape[1] == 3 + 3 * 3
    block = heads.draft(draft_input([[3]], [5], None))
    assert block.counts.tolist() == [0]


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("medusa", {"x": Code()}, r"medusa_lm_head.pt: .*code.*refused"),
    ("medusa", {"1.0.linear.bias": None}, r"1.0.linear.bias: expected shape \[32\], given none"),
    ("medusa", {"0.1.weight": torch.zeros(9, 32)}, r"0.1.weight: .* \[64, 32\], given \[9, 32\]"),
    ("medusa", {"odd.weight": torch.zeros(1)}, r"odd.weight: expected no tensor"),
    ("hydra", {"x": Code()}, r"hydra_lm_head.pt: .*code.*refused"),
    ("hydra", {"hydra_mlp.1.0.linear.weight": None}, r"1.0.linear.weight: .*\[32, 96\], .*none"),
    ("hydra", {"hydra_attn.weight": torch.zeros(1)}, r"hydra_attn.weight: expected no tensor"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "change", "text"), WRONG, ids=[text for *_, text in WRONG])
def test_files_that_cannot_be_read(kind, change, text, target, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    drafts, make_weights = KINDS[kind]
    weights = {**make_weights(), **change}
    place = save(kind, {key: w for key, w in weights.items() if w is not None}, tmp_path)
    with pytest.raises(ValueError, match=text):
        drafts.from_pretrained(place, target)
    assert not (tmp_path / "ran").exists()


def test_heads_of_another_kind(target: Any, tmp_path: Path) -> None:
    other: dict[str, Any] = {"fc.weight": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"expected Medusa's tensors.*given fc.weight"):
        ps.Medusa.from_pretrained(save("medusa", other, tmp_path), target)
    with pytest.raises(ValueError, match=r"expected Hydra's tensors.*given fc.weight"):
        ps.Hydra.from_pretrained(save("hydra", other, tmp_path), target)
    with pytest.raises(ValueError, match=r"hydra_head_arch: expected 'mlp', given 'prefix-mlp'"):
        ps.Hydra.from_pretrained(save("hydra", hydra(), tmp_path, "prefix-mlp"), target)
    (tmp_path / "medusa_lm_head.pt").unlink()
    with pytest.raises(ValueError, match=r"medusa_lm_head.pt: expected"):
        ps.Medusa.from_pretrained(tmp_path, target)
