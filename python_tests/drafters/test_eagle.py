"""The EAGLE drafter in chains: what it drafts from, and that chains with it are lossless."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_heads import Reference, Variant, save, weights_of
from recomputed import RecomputedLevel
from small_models import make, plain_greedy

import polyspec_ext as ps

FIRST = Variant("first", hidden=32, vocab=64, own_head=False)
THIRD = Variant("third", version=3, hidden=32, vocab=64, draft_vocab=50, own_head=True)
PROMPTS = [[3, 9, 27, 17], [5, 6], [8, 1, 2, 3, 4, 5, 6], [11]]


@pytest.fixture(scope="module")
def target() -> Any:
    return make("llama", 4, vocab=64)


class Told(ps.Eagle):
    """Checks the first row of every draft against the plain forward pass over the whole text, with
    the target's states read anew."""

    reference: Reference
    model: Any
    checked = 0

    def _check(self, inputs: Any, block: Any) -> None:
        for b, length in enumerate(inputs.lengths):
            text = inputs.text(b).tolist()
            if not length or len(text) < 2:
                continue
            out = self.model(input_ids=torch.tensor([text[:-1]]), output_hidden_states=True)
            layers = self.capabilities.hidden_layers
            features = torch.cat([out.hidden_states[k][0] for k in layers], -1)
            rows = self.reference.draft(text, features, 1)
            given = block.rows.logits[b, 0].double()
            assert (given.nan_to_num(0, 0, 0) - rows[0].nan_to_num(0, 0, 0)).abs().max() < 1e-3
            type(self).checked += 1

    def draft(self, inputs: Any) -> Any:
        block = super().draft(inputs)
        with torch.no_grad():
            self._check(inputs, block)
        return block


@pytest.mark.parametrize("v", [FIRST, THIRD], ids=lambda v: v.name)
def test_drafts_read_the_targets_states(v: Variant, target: Any, tmp_path: Path) -> None:
    """Sampled, ragged, rows that leave: behind every rollback and refresh the draft's rows are
    those of the whole text read anew."""
    weights = weights_of(v, 4)
    drafter = Told.from_pretrained(save(v, weights, tmp_path), target)
    drafter.reference = Reference(
        v, weights, target.model.embed_tokens.weight.data, target.lm_head.weight.data
    )
    drafter.model = target
    Told.checked = 0
    chain = ps.Chain([RecomputedLevel(target), drafter], [3])
    chain.generate(PROMPTS, max_new_tokens=[12, 4, 9, 12], temperature=1.0, eos_token_id=[])
    assert Told.checked > 10


@pytest.mark.parametrize("v", [FIRST, THIRD], ids=lambda v: v.name)
@pytest.mark.parametrize("levels", [1, 2])
def test_greedy_chains_give_the_targets_text(
    v: Variant, levels: int, target: Any, tmp_path: Path
) -> None:
    drafter = ps.Eagle.from_pretrained(save(v, weights_of(v, 4), tmp_path), target)
    above = [RecomputedLevel(target, f"level {i}") for i in range(levels)]
    chain = ps.Chain([*above, drafter], [4, 2][2 - levels :])
    out = chain.generate(PROMPTS, max_new_tokens=10, eos_token_id=[])
    for b, prompt in enumerate(PROMPTS):
        own = out.sequences[b][: len(prompt) + 10].tolist()
        assert own == plain_greedy(target, prompt, 10)
    assert drafter.num_forward_passes > 0
