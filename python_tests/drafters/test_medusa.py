"""Medusa heads in their published format against their forward pass written down plainly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from last_state_heads import medusa as weights
from last_state_heads import save_medusa as save
from small_models import make, plain_greedy
from told import draft_input, told
from transformers import LlamaConfig, LlamaForCausalLM
from unsafe_code import Code

import polyspec_ext as ps

HIDDEN, V = 32, 64
TEXTS = [[3, 9, 27, 17], [5, 6], [8]]


@pytest.fixture(scope="module")
def target() -> Any:
    return make("llama", 2, vocab=V)


def plain(found: dict[str, torch.Tensor], head: int, blocks: int, x: torch.Tensor) -> torch.Tensor:
    for j in range(blocks):
        own = found[f"{head}.{j}.linear.weight"] @ x + found[f"{head}.{j}.linear.bias"]
        x = x + own * torch.sigmoid(own)
    return found[f"{head}.{blocks}.weight"] @ x


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("blocks", [1, 2])
def test_against_the_plain_heads(blocks: int, pack: bool, target: Any, tmp_path: Path) -> None:
    found = weights(3, blocks)
    level = ps.HuggingFaceLevel(target, pack=pack)
    tree = ps.StaticTree([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 1, 1]])
    medusa = ps.Medusa.from_pretrained(save(found, tmp_path), level, tree=tree)
    assert medusa.num_heads == 3
    assert medusa.capabilities.hidden_layers == (-1,)
    generator = torch.Generator().manual_seed(1)
    states = [torch.randn(max(len(t) - 1, 1), HIDDEN, generator=generator) for t in TEXTS]
    hidden = told([-1], states, [0, 0, 0])
    hidden.counts[2] = 0  # a text of one token has no state
    block = medusa.draft(draft_input(TEXTS, [3, 2, 3], hidden))
    assert block.counts is not None
    assert block.counts.tolist() == [7, 6, 0]
    for b in range(2):
        best = [plain(found, i, blocks, states[b][-1]).topk(3).indices.tolist() for i in range(3)]
        for i in range(int(block.counts[b])):
            depth, rank = tree.depths[i], tree.ranks[i]
            assert int(block.tokens[b, i]) == best[depth - 1][rank]
        assert block.parents is not None
        assert block.parents[b].tolist() == tree.parents


def test_no_deeper_than_there_are_heads(target: Any, tmp_path: Path) -> None:
    medusa = ps.Medusa.from_pretrained(save(weights(2), tmp_path), target)
    hidden = told([-1], [torch.randn(3, HIDDEN)], [0])
    block = medusa.draft(draft_input(TEXTS[:1], [5], hidden))
    assert block.parents is not None
    assert block.counts is not None
    depths: list[int] = []
    for parent in block.parents[0, : int(block.counts[0])].tolist():
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    assert max(depths) == 2
    wide = ps.Medusa.from_pretrained(tmp_path, target, tree=ps.DynamicTree(3, 60))
    block = wide.draft(draft_input(TEXTS[:1], [5], hidden))
    assert wide.capabilities.tree_size is not None
    assert wide.capabilities.tree_size(5).nodes == block.tokens.shape[1] == 3 + 3 * 3
    block = medusa.draft(draft_input([[3]], [5], None))
    assert block.counts is not None
    assert block.counts.tolist() == [0]


def test_below_a_model_of_another_width(target: Any, tmp_path: Path) -> None:
    """What that one accepted has no state: there is no draft until the target has verified it."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    torch.manual_seed(1)
    wide = LlamaForCausalLM(
        LlamaConfig(vocab_size=V, hidden_size=64, intermediate_size=96, **sizes)
    ).eval()
    medusa = ps.Medusa.from_pretrained(save(weights(), tmp_path), target)
    levels = [ps.HuggingFaceLevel(target), ps.HuggingFaceLevel(wide)]
    chain = ps.Chain([*levels, medusa], [4, 2])
    out = chain.generate(TEXTS, 10, eos_token_id=[])
    for b, prompt in enumerate(TEXTS):
        own = out.sequences[b][: len(prompt) + 10].tolist()
        assert own == plain_greedy(target, prompt, 10)
    assert out.stats.levels[2].num_proposed_tokens > 0
    with pytest.raises(ValueError, match=r"^small: expected hidden states of 32 values.*given 64$"):
        ps.Chain([ps.HuggingFaceLevel(wide, name="small"), medusa])


def test_files_that_cannot_be_read(
    target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def load(found: dict[str, Any]) -> None:
        ps.Medusa.from_pretrained(save(found, tmp_path / "heads"), target)

    with pytest.raises(ValueError, match=r"medusa_lm_head.pt: .*code.*refused"):
        load({**weights(), "x": Code()})
    assert not (tmp_path / "ran").exists()
    rest = weights()
    del rest["1.0.linear.bias"]
    with pytest.raises(ValueError, match=r"1.0.linear.bias: expected shape \[32\], given none"):
        load(rest)
    with pytest.raises(ValueError, match=r"0.1.weight: expected shape \[64, 32\], given \[9, 32\]"):
        load({**weights(), "0.1.weight": torch.zeros(9, 32)})
    with pytest.raises(ValueError, match=r"odd.weight: expected no tensor"):
        load({**weights(), "odd.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"expected Medusa's tensors.*given fc.weight"):
        load({"fc.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"medusa_lm_head.pt: expected"):
        ps.Medusa.from_pretrained(tmp_path, target)
