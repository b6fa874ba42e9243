"""What an EAGLE head learns from is what it does in use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from eagle_heads import Reference, Variant, save, weights_of
from small_models import make

from polyspec_ext.drafters.eagle import load_head
from training.states import States, Teacher
from training.unrolled import Unrolled


@pytest.mark.parametrize(
    "v",
    [
        Variant("first", hidden=32, vocab=64),
        Variant("third", version=3, hidden=32, vocab=64, own_head=True, aux=(0, 1, 3)),
    ],
    ids=lambda v: v.name,
)
@torch.no_grad()
def test_steps_of_a_draft_at_every_token(v: Variant, tmp_path: Path) -> None:
    """Drafts of the text itself, of three tokens, begun at every token at once."""
    target = make("llama", 4, vocab=64)
    weights = weights_of(v, 4)
    head = load_head(save(v, weights, tmp_path), target).network
    text = [3, 9, 27, 17, 51, 25, 11]
    layers = v.aux_layers(4)
    features = torch.randn(
        1, len(text), 32 * len(layers), generator=torch.Generator().manual_seed(1)
    )
    reference = Reference(
        v, weights, target.model.embed_tokens.weight.data, target.lm_head.weight.data
    )
    teacher = Teacher(target, head.config, None)
    if v.third:
        teacher.head = head.lm_head.weight
    rows = States(torch.tensor([text]), torch.ones(1, len(text)), features, features)
    found = {
        step: teacher.readout(before)[0].double()
        for step, _, before in Unrolled(head, teacher, 3).outputs(rows)
    }
    for t in range(len(text) - 1):
        pairs = [(text[i + 1], reference.fused(features[0, i].double())) for i in range(t + 1)]
        for step in range(3):
            logits, state = reference.behind(pairs)
            if t < found[step].shape[0]:
                assert (found[step][t] - logits).abs().max() < 1e-4 * logits.abs().max()
            if t + 2 + step >= len(text):
                break
            pairs.append((text[t + 2 + step], state))
