"""Early exit: the target's first layers as a level, over its own weights and its own cache."""

from __future__ import annotations

import pytest
import torch
import toy
from small_models import PROMPT, make

import polyspec_ext as ps


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2, sliding window"])
def test_its_rows_are_those_of_the_layers_alone(family: str) -> None:
    """Logits are the head's behind layer k, whatever the target has read; weights are shared."""
    model = make(family, layers=3)
    owner = ps.Level(model)
    level = ps.early_exit(owner, 2)
    states: list[torch.Tensor] = []
    part = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))[1]
    hook = part.register_forward_hook(
        lambda _, __, out: states.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.inference_mode():
        alone = level.model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits
        model(input_ids=torch.tensor([PROMPT]), use_cache=False)
        assert states[0].equal(states[1])
        hook.remove()
        for tokens in (owner, level):
            tokens.prefill(torch.tensor([PROMPT[:4]]))
        got = level.forward(torch.tensor([PROMPT[4:]]), 2)
    torch.testing.assert_close(got, alone[:, 4:], rtol=1e-4, atol=1e-4)
    own = {parameter.data_ptr() for parameter in level.model.parameters()}
    assert own < {parameter.data_ptr() for parameter in model.parameters()}
    assert model.config.num_hidden_layers == 3  # the target is as it was


def test_refusals() -> None:
    model = make("llama", layers=3)
    with pytest.raises(ValueError, match=r"levels\[1\]: layers: expected 1 to 2, of 3, given 9"):
        ps.Chain([model, "early-exit:9"])
    with pytest.raises(TypeError, match="target: expected a level of a Hugging Face model"):
        ps.early_exit(toy.ToyLevel(5, 1), 1)
    with pytest.raises(ValueError, match=r"levels\[1\]: expected a target that is a Hugging Face"):
        ps.Chain([toy.ToyLevel(5, 1), "early-exit:1"])
