"""A new EAGLE or MTP head for a target, its first weights, and its files in published formats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from polyspec_ext.drafters.eagle import EagleNetwork
from polyspec_ext.drafters.eagle_format import parse
from polyspec_ext.drafters.mtp import MTPNetwork
from polyspec_ext.files import replacing

from .states import States, Teacher

_RIDGE = 0.1  # of the mean square of a predictor


def head_config(
    text: Any, version: int, draft_vocab: int | None, inner: int | None
) -> dict[str, Any]:
    """Return the config.json of a head, as SafeAILab's checkpoints have it.

    Args:
        text: configuration of the target's decoder.
        version: 1 (EAGLE-2) or 3.
        draft_vocab: ids that an EAGLE-3 head knows; None: all.
        inner: width of its MLP; None: the target's.
    """
    # As many as the target's, or the next lower number that divides the states into parts of an
    # even width.
    width = text.hidden_size
    counts = range(text.num_attention_heads, 0, -1)
    heads = next((n for n in counts if width % n == 0 and width // n % 2 == 0), 1)
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if version == 3 or heads % kv_heads:
        # The token's embedding reaches an EAGLE-3 head through its values only: as wide as it is.
        kv_heads = heads
    rotations = getattr(text, "rope_parameters", None) or {}
    given: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM" if version == 1 else "LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": inner or getattr(text, "intermediate_size", None) or 4 * width,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6),
        "rope_theta": rotations.get("rope_theta", 10000.0),
        "max_position_embeddings": text.max_position_embeddings,
        "vocab_size": text.vocab_size,
        "bos_token_id": text.bos_token_id,
        "eos_token_id": text.eos_token_id,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    if version == 1:
        given["bias"] = False
    else:
        given["draft_vocab_size"] = draft_vocab or text.vocab_size
    return given


def make_head(given: dict[str, Any], target_layers: int) -> EagleNetwork:
    """Make a head of that configuration, its weights at random out of torch's generator, in
    float32.

    An EAGLE-3 head begins with an attention that looks at its own token, and adds that token's
    embedding to what it reads of the target: queries and keys are alike, values and output inverse
    to each other. What a random layer would have to find first is there then.
    """
    third = "draft_vocab_size" in given
    config = parse(given, ["layers.0."], target_layers, "head")
    head = EagleNetwork(config)
    if third:
        with torch.no_grad():
            own: Any = head.layers[0]
            width, attention = config.hidden_size, own.self_attn
            nn.init.normal_(head.fc.weight, std=head.fc.in_features**-0.5)
            nn.init.normal_(attention.q_proj.weight, std=(2 * width) ** -0.5)
            attention.k_proj.weight.copy_(attention.q_proj.weight[: len(attention.k_proj.weight)])
            values = torch.empty(len(attention.v_proj.weight), width)
            nn.init.orthogonal_(values)
            attention.v_proj.weight.zero_()[:, :width] = values
            attention.o_proj.weight.copy_(values.T)
            for part in (own.mlp.gate_proj, own.mlp.up_proj):
                nn.init.normal_(part.weight, std=width**-0.5)
            nn.init.normal_(
                own.mlp.down_proj.weight, std=0.3 * config.layer.intermediate_size**-0.5
            )
    return head


@torch.no_grad()
def begin_linear(head: EagleNetwork, teacher: Teacher, blocks: Sequence[States]) -> None:
    """Set a new EAGLE-3 head, whose attention adds the embedding of its token, to the linear
    function of features and embedding that is nearest to the target's next state.

    Args:
        head: of `make_head`.
        teacher: whose final norm `head` takes.
        blocks: at least one.
    """
    own: Any = head.layers[0]
    width, gain = head.config.hidden_size, teacher.gain

    def pairs() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for block in blocks:
            embeds = own.input_layernorm(teacher.embed(block.tokens[:, 1:]).float())
            given = torch.cat([block.features[:, :-1].float(), embeds], -1)
            about = torch.cat([block.learnt[:, 2:], block.learnt[:, -1:]], 1)
            yield given[about], block.last[:, 1:][about].float() / gain

    found = _nearest(pairs())
    if found is None:
        return
    head.fc.weight.copy_(found[:, :-width])
    # The attention's values are an orthogonal image of the embedding.
    values = own.self_attn.v_proj.weight[:, :width]
    own.self_attn.o_proj.weight.copy_(found[:, -width:] @ values.T)
    head.norm.weight.copy_(gain)


@torch.no_grad()
def begin_mtp(head: MTPNetwork, teacher: Teacher, blocks: Sequence[States]) -> None:
    """Set the product of a new MTP head, whose layer is the target's last one, to the linear
    function of its inputs that is nearest to what that layer reads of the next token."""

    def pairs() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for block in blocks:
            embeds = teacher.embed(block.tokens[:, 1:]).float()
            given = head.paired(embeds, block.last[:, :-1].float())
            about = torch.cat([block.learnt[:, 2:], block.learnt[:, -1:]], 1)
            yield given[about], teacher.entering(block.tokens)[:, 1:][about]

    found = _nearest(pairs())
    if found is not None:
        head.fc.weight.copy_(found)


def _nearest(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor | None:
    """Return the matrix that is nearest to bringing x ``[n, F]`` to y ``[n, H]``, by least squares:
    what a few thousand tokens tell, and steps of an optimiser would need many more for. None:
    there are no pairs."""
    squares = products = torch.zeros(1)
    count = 0
    for x, y in pairs:
        squares, products = squares + x.T @ x, products + x.T @ y
        count += len(x)
    if count == 0:
        return None
    squares.diagonal().add_(_RIDGE * count)
    matrix: torch.Tensor = torch.linalg.solve(squares, products)
    return matrix.T


def save_head(
    place: Path,
    given: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    ids: torch.Tensor | None,
) -> None:
    """Save config and tensors under the published names, in bfloat16. What lies there is replaced
    when the new file is whole.

    Args:
        tensors: of the head, with `lm_head.weight` where it has one.
        ids: of the draft vocabulary, ascending.
    """
    place.mkdir(parents=True, exist_ok=True)
    third = given["architectures"] == ["LlamaForCausalLMEagle3"]
    named = {
        (key.replace("layers.0.", "midlayer.") if third else key): value.to(torch.bfloat16)
        for key, value in tensors.items()
    }
    if ids is not None:
        # Offsets, and which ids of the target are known.
        named["d2t"] = ids - torch.arange(len(ids))
        size = given.get("transformer_layer_config", given)["vocab_size"]
        named["t2d"] = torch.zeros(size, dtype=torch.bool)
        named["t2d"][ids] = True
    whole = {key: value.contiguous() for key, value in named.items()}
    with replacing(place / "model.safetensors") as part:
        save_file(whole, part, {"format": "pt"})
    text = json.dumps(given, indent=2) + "\n"
    config = place / "config.json"
    if not config.exists() or config.read_text() != text:
        config.write_text(text)
