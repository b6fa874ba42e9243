"""Hydra heads in their published format against their forward pass written down plainly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from last_state_heads import hydra as weights
from last_state_heads import save_hydra as save
from small_models import make
from told import draft_input, told
from unsafe_code import Code

import polyspec_ext as ps

HIDDEN, V = 32, 64
TEXTS = [[3, 9, 27, 17], [5, 6], [8]]


@pytest.fixture(scope="module")
def target() -> Any:
    return make("llama", 2, vocab=V)


def plain(found: dict[str, torch.Tensor], head: int, blocks: int, x: torch.Tensor) -> torch.Tensor:
    key = f"hydra_mlp.{head}.0"
    own = found[f"{key}.linear.weight"] @ x + found[f"{key}.linear.bias"]
    x = found[f"{key}.res_connection.weight"] @ x + found[f"{key}.res_connection.bias"]
    x = x + own * torch.sigmoid(own)
    for j in range(1, blocks):
        key = f"hydra_mlp.{head}.{j}.linear"
        own = found[f"{key}.weight"] @ x + found[f"{key}.bias"]
        x = x + own * torch.sigmoid(own)
    out = found[f"hydra_lm_head.{head}.weight"] @ x
    return out + found.get(f"hydra_lm_head.{head}.bias", torch.zeros(V))


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize(("blocks", "bias"), [(1, True), (2, False)])
def test_against_the_plain_heads(
    blocks: int, bias: bool, pack: bool, target: Any, tmp_path: Path
) -> None:
    level = ps.HuggingFaceLevel(target, pack=pack)
    found = weights(3, blocks, bias)
    tree = ps.StaticTree([[0], [1], [0, 0], [0, 1], [1, 0], [0, 1, 1], [1, 0, 0]])
    hydra = ps.Hydra.from_pretrained(save(found, tmp_path), level, tree=tree)
    generator = torch.Generator().manual_seed(1)
    states = [torch.randn(max(len(t) - 1, 1), HIDDEN, generator=generator) for t in TEXTS]
    hidden = told([-1], states, [0, 0, 0])
    hidden.counts[2] = 0
    block = hydra.draft(draft_input(TEXTS, [3, 2, 3], hidden))
    assert block.counts is not None
    assert block.parents is not None
    assert block.counts.tolist() == [7, 5, 0]
    embeddings = target.model.embed_tokens.weight.data
    for b in range(2):
        line: dict[int, list[int]] = {-1: [TEXTS[b][-1]]}
        for i in range(int(block.counts[b])):
            parent = tree.parents[i]
            assert int(block.parents[b, i]) == parent
            given = torch.cat([states[b][-1], *[embeddings[token] for token in line[parent]]])
            rows = plain(found, tree.depths[i] - 1, blocks, given)
            assert int(block.tokens[b, i]) == int(rows.topk(3).indices[tree.ranks[i]])
            line[i] = [*line[parent], int(block.tokens[b, i])]


def test_files_that_cannot_be_read(
    target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def load(found: dict[str, Any], form: str = "mlp") -> None:
        ps.Hydra.from_pretrained(save(found, tmp_path / "heads", form), target)

    with pytest.raises(ValueError, match=r"hydra_lm_head.pt: .*code.*refused"):
        load({**weights(), "x": Code()})
    assert not (tmp_path / "ran").exists()
    with pytest.raises(ValueError, match=r"hydra_head_arch: expected 'mlp', given 'prefix-mlp'"):
        load(weights(), "prefix-mlp")
    rest = weights()
    del rest["hydra_mlp.1.0.linear.weight"]
    with pytest.raises(ValueError, match=r"hydra_mlp.1.0.linear.weight: .*\[32, 96\], given none"):
        load(rest)
    with pytest.raises(ValueError, match=r"hydra_attn.weight: expected no tensor"):
        load({**weights(), "hydra_attn.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"expected Hydra's tensors.*given fc.weight"):
        load({"fc.weight": torch.zeros(1)})
