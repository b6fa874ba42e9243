"""Draft models with a part of their ids in the head, and with the target's first layers alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from small_models import PROMPT, make, rough

import polyspec_ext as ps
from polyspec_ext.levels import load

V = 97


def drawn(model: Any) -> list[int]:
    ids: list[int] = model.get_output_embeddings().drawn.tolist()
    return ids


def test_the_most_frequent_ids_are_taken() -> None:
    model = make("llama", vocab=V)
    texts = [[5, 5, 5, 80, 80], [7, 80, 5, 7, 9, 3]]
    assert drawn(ps.trim(model, texts, 3)) == [5, 7, 80]
    assert drawn(ps.trim(model, texts, 4)) == [3, 5, 7, 80]  # of 3 and 9 the lower
    assert drawn(ps.trim(model, texts, 6)) == [0, 3, 5, 7, 9, 80]
    assert drawn(ps.trim(model, None, 4)) == [0, 1, 2, 3]
    model.generation_config.eos_token_id = [90, 60]
    assert drawn(ps.trim(model, texts, 3)) == [5, 60, 90]
    model.generation_config.eos_token_id = [90, -1, V]  # some configurations name none with -1
    assert drawn(ps.trim(model, texts, 3)) == [5, 80, 90]


@pytest.mark.parametrize("kind", ["dense", "tied", "4 bits", "packed"])
def test_logits_are_those_of_the_model(kind: str) -> None:
    model = make("qwen2", vocab=V)
    if kind == "tied":
        model.config.tie_word_embeddings = True
        model.tie_weights()
    if kind == "4 bits":
        model = ps.quantize_w4(model, 32, head=True)
    copy = ps.trim(model, [PROMPT], 20)
    ids = torch.tensor([PROMPT])
    if kind == "packed":
        copy = ps.HuggingFaceLevel(copy, pack=True).model
    with torch.inference_mode():
        whole, part = model(input_ids=ids).logits, copy(input_ids=ids).logits
    assert part.shape[-1] == 20
    assert torch.allclose(part, whole[..., drawn(copy)], atol=1e-5)
    assert model(input_ids=ids).logits.shape[-1] == V


def test_heads_of_gguf_files(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from gguf_blocks import write_model

    for tied in (False, True):
        file = tmp_path / f"{tied}.gguf"
        write_model(file, "llama", {"": "Q4_K", "output": "Q6_K", "token_embd": "Q8_0"}, tied)
        model = load(file).model
        copy = ps.trim(model, [[5, 9, 9, 200]], 3)
        ids = torch.tensor([PROMPT])
        with torch.inference_mode():
            whole, part = model(input_ids=ids).logits, copy(input_ids=ids).logits
        assert part.equal(whole[..., drawn(copy)])
        chain = ps.Chain([file, f"trim:40:{file}"], [3], pack="auto")
        out = chain.generate(PROMPT, 16, eos_token_id=[])
        assert out.sequences.equal(ps.Chain([file]).generate(PROMPT, 16).sequences)


def test_what_cannot_be_trimmed_is_refused() -> None:
    model = make("llama", vocab=V)
    for size in (0, V + 1):
        with pytest.raises(ValueError, match="size: expected"):
            ps.trim(model, None, size)
    with pytest.raises(ValueError, match="model: expected one with all of its ids"):
        ps.trim(ps.trim(model, None, 9), None, 5)
    with pytest.raises(ValueError, match=r"texts: .*97"):
        ps.trim(model, [[V]], 5)
    with pytest.raises(ValueError, match="only levels below it may"):
        ps.Chain([ps.trim(model, None, 9), rough(model)], [2])


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2, sliding window"])
def test_an_early_exit_has_the_rows_of_the_layers_alone(family: str) -> None:
    """Logits are the head's after layer k, however far the target has read; weights are shared."""
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


def test_early_exits_that_are_refused() -> None:
    model = make("llama", layers=3)
    with pytest.raises(ValueError, match=r"levels\[1\]: layers: expected 1 to 2, of 3, given 9"):
        ps.Chain([model, "early-exit:9"])
    with pytest.raises(TypeError, match="target: expected a level of a Hugging Face model"):
        ps.early_exit(toy.ToyLevel(5, 1), 1)
    with pytest.raises(ValueError, match=r"levels\[1\]: expected a target that is a Hugging Face"):
        ps.Chain([toy.ToyLevel(5, 1), "early-exit:1"])
