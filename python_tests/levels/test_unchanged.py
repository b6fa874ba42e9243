"""A level with a changed model refuses the next call, until the change is undone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from failing import model
from torch import nn

import polyspec_ext as ps

PROMPT = [[3, 4, 5]]
Undo = Callable[[], object]


def texts(chain: ps.Chain) -> list[list[int]]:
    found: list[list[int]] = chain.generate(PROMPT, 6, eos_token_id=[]).sequences.tolist()
    return found


def training(own: Any) -> Undo:
    own.train()
    return own.eval


def one_training(own: Any) -> Undo:
    own.model.layers[0].mlp.train()
    return own.eval


def resized(own: Any) -> Undo:
    before = own.config.vocab_size
    own.resize_token_embeddings(before + 8, mean_resizing=False)
    return lambda: own.resize_token_embeddings(before)


def converted(own: Any) -> Undo:
    before = {name: tensor.clone() for name, tensor in own.state_dict().items()}
    own.to(torch.bfloat16)

    def undo() -> None:
        own.float().load_state_dict(before)

    return undo


def hooked(own: Any) -> Undo:
    return own.model.layers[0].register_forward_hook(lambda *_: None).remove


def hooked_before(own: Any) -> Undo:
    return own.lm_head.register_forward_pre_hook(lambda *_: None).remove


def replaced(own: Any) -> Undo:
    layer = own.model.layers[0]
    layer.mlp, before = nn.Identity(), layer.mlp
    return lambda: setattr(layer, "mlp", before)


def patched(own: Any) -> Undo:
    layer = own.model.layers[0]
    layer.forward = lambda *arguments, **options: arguments[0]
    return lambda: layer.__dict__.pop("forward")


def moved(own: Any) -> Undo:
    weight = own.model.layers[0].mlp.up_proj.weight
    before = weight.data
    weight.data = before * 2
    return lambda: setattr(weight, "data", before)


def written(own: Any) -> Undo:
    weight = own.model.layers[0].mlp.up_proj.weight
    before = weight.data.clone()
    weight.data += 0.1  # a change that torch does not count
    return lambda: weight.data.copy_(before)


@pytest.mark.parametrize(
    ("change", "what", "pack"),
    [
        (training, r"training modes; call model.eval\(\)", False),
        (training, r"training modes; call model.eval\(\)", True),
        (one_training, "training modes; make the level anew", False),
        (resized, "embeddings; make the level anew", False),
        (converted, "data types or devices; make the level anew", False),
        (hooked, "hooks; make the level anew, without pack", True),
        (hooked_before, "hooks", True),
        (replaced, "modules", True),
        (patched, "modules", True),
        (moved, "weights", True),
        (written, "weights", True),
    ],
)
@pytest.mark.parametrize("place", [0, 1], ids=["target", "draft"])
def test_a_changed_model_is_refused(change, what, pack, place) -> None:
    models = [model(seed, 2) for seed in range(2)]
    chain = ps.Chain(models, [2], pack=pack)
    wanted = texts(chain)
    undo = change(models[place])
    for _ in range(2):
        with pytest.raises(ValueError, match=f"LlamaForCausalLM.*with other {what}"):
            texts(chain)
    undo()
    if change is resized:  # the head is another module for good
        chain = ps.Chain(models, [2], pack=pack)
    assert texts(chain) == wanted


@pytest.mark.parametrize("first", [True, False], ids=["first call", "later call"])
def test_autocast_is_refused_by_name(first: bool) -> None:
    models = [model(seed, 1) for seed in range(2)]
    wanted = texts(ps.Chain(models, [2]))
    chain = ps.Chain(models, [2])
    if not first:
        texts(chain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(ValueError, match=r"expected a call outside torch\.autocast"):
            texts(chain)
        with pytest.raises(ValueError, match=r"expected a call outside torch\.autocast"):
            ps.Chain(models, [2])
    assert texts(chain) == wanted


def test_what_the_passes_follow_may_change() -> None:
    """Hooks and weights of a model that runs as it is; and outputs that transformers records."""
    own = model(0, 2)
    chain, packed = ps.Chain([own]), ps.Chain([own], pack=True)
    wanted = texts(packed)
    assert texts(chain) == wanted
    own(torch.tensor(PROMPT), output_hidden_states=True)
    assert texts(packed) == wanted
    seen: list[int] = []
    with torch.no_grad():
        own.lm_head.weight += torch.randn(own.lm_head.weight.shape)
    own.model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    assert texts(chain) == texts(ps.Chain([own])) != wanted
    assert seen


def steered(own: Any) -> Undo:
    steer = torch.randn(own.config.hidden_size) / 2
    attention = own.model.layers[0].self_attn
    return attention.register_forward_hook(lambda _, a, out: (out[0] + steer, *out[1:])).remove


def scaled(own: Any) -> Undo:
    """Adapters that act otherwise."""
    layer = own.model.layers[0].self_attn.v_proj
    before = dict(layer.scaling)
    layer.set_scale("default", -20.0)
    return lambda: layer.scaling.update(before)


def disabled(own: Any) -> Undo:
    layer = own.model.layers[0].self_attn.v_proj
    layer.enable_adapters(False)
    return lambda: layer.enable_adapters(True)


def added(own: Any) -> Undo:
    weight = own.model.layers[0].input_layernorm.weight
    weight += torch.randn(weight.shape)
    return lambda: None


@pytest.mark.parametrize("change", [steered, patched, moved, written, added, scaled, disabled])
@pytest.mark.parametrize("place", [0, 1], ids=["target", "draft"])
def test_kept_prompts_are_of_the_model_as_it_is(change: Callable[[Any], Undo], place: int) -> None:
    models = [model(0, 2), model(0, 2)]
    if change in (scaled, disabled):
        peft = pytest.importorskip("peft")
        lora = peft.LoraConfig(target_modules=["v_proj"], r=2, init_lora_weights=False)
        for one in models:
            torch.manual_seed(0)
            peft.inject_adapter_in_model(lora, one.eval())
    chain = ps.Chain([ps.Level(one, pack=False) for one in models], [2])
    text = [3, 4, 5, 6, 7, 8, 9, 3, 4, 5]

    def asked() -> tuple[list[int], int, int]:
        batch = chain.batch([text], 8, eos_token_id=[], cache_prompt=True)
        batch.complete()
        stats = batch.stats
        return batch.rows[0].tokens, stats.levels[0].num_accepted_tokens, stats.num_cached_tokens

    first = asked()
    assert asked() == (*first[:2], len(text) - 1)
    with torch.no_grad():
        undo = change(models[place])
    changed = asked()
    assert changed[2] == 0
    assert asked() == (*changed[:2], len(text) - 1)
    batch = chain.batch([text], 8, eos_token_id=[], cache_prompt=True)
    batch.advance()
    with torch.no_grad():
        undo()  # while a text runs with keys of both models
    batch.complete()
    assert asked() == (*first[:2], 0) or change is added
