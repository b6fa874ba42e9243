"""A new head for a target: EAGLE, MTP, or a drafter of blocks (DFlash, DSpark). Its configuration,
its first weights, the drafts that blocks learn from, and its files in published formats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from polyspec_ext.drafters import dflash, eagle
from polyspec_ext.drafters.dflash import DFlashNetwork
from polyspec_ext.drafters.eagle import EagleNetwork
from polyspec_ext.drafters.mtp import MTPNetwork
from polyspec_ext.files import replacing

from .unrolled import Draft, Drafts, States, Teacher

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
    config = eagle.parse(given, ["layers.0."], target_layers, "head")
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


def block_config(
    target: Any, layer: dict[str, Any], block_size: int, layers: int, rank: int
) -> dict[str, Any]:
    """Return the config.json of a drafter, as speculators' checkpoints have it.

    Args:
        target: configuration of the model that it drafts for.
        layer: of an EAGLE-3 head for that target, of the same widths (`heads.head_config`).
        block_size: tokens of a block.
        layers: of the drafter.
        rank: of the Markov head; 0: a DFlash without one.
    """
    text, kind = target.get_text_config(decoder=True), "dspark" if rank else "dflash"
    count, ends = text.num_hidden_layers, text.eos_token_id
    nested = {key: value for key, value in layer.items() if key not in ("architectures", "bias")}
    drawn = nested.pop("draft_vocab_size")
    nested |= {"model_type": "qwen3", "num_hidden_layers": layers}
    nested["head_dim"] = nested["hidden_size"] // nested["num_attention_heads"]
    # Nothing is drafted behind the end of a text, so that its embedding is free.
    mask = (ends[0] if isinstance(ends, list) else ends) or 0
    proposal = {"proposal_type": "greedy", "speculative_tokens": block_size - (not rank)}
    return {
        "architectures": ["DSparkSpeculator" if rank else "DFlashSpeculator"],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "architectures": list(target.architectures or ()),
                "name_or_path": target.name_or_path or None,
            },
        },
        "aux_hidden_state_layer_ids": [2, count // 2, count - 3],
        "block_size": block_size,
        "draft_vocab_size": drawn,
        "mask_token_id": mask,
        "sample_from_anchor": bool(rank),
        "target_hidden_size": nested["hidden_size"],
        "transformer_layer_config": nested,
        **({"markov_rank": rank, "markov_head_type": "vanilla"} if rank else {}),
        **({"enable_confidence_head": False} if rank else {}),
    }


def make_blocks(given: dict[str, Any], target_layers: int) -> DFlashNetwork:
    """Make a drafter of that configuration, its weights at random out of torch's generator, in
    float32. Its layers add little at first, and the Markov head nothing."""
    count = given["transformer_layer_config"]["num_hidden_layers"]
    head = DFlashNetwork(
        dflash.parse(given, [f"layers.{i}." for i in range(count)], target_layers, "head")
    )
    for layer in head.layers:
        own: Any = layer
        for part in (own.self_attn.o_proj, own.mlp.down_proj):
            nn.init.normal_(part.weight, std=0.3 * part.in_features**-0.5)
    if head.config.markov_rank:
        nn.init.zeros_(head.markov_head.markov_w2.weight)
    return head


class Blocks(Drafts):
    """A drafter of blocks behind some tokens of a text: one in each stretch of a block's length."""

    head: DFlashNetwork

    def drafts(self, rows: States, every: bool = False) -> Iterator[Draft]:
        head, tokens, config = self.head, rows.tokens, self.head.config
        (count, length), size = tokens.shape, config.block_size
        begin = 0 if every else int(torch.randint(min(size, length - 1), ()))
        anchors = torch.arange(begin, length - 1, 1 if every else size)
        ids = torch.full((count, len(anchors), size), config.mask_token_id)
        ids[:, :, 0] = tokens[:, anchors]
        embeds = F.embedding(ids.flatten(1), self.teacher.embed.weight).to(rows.features.dtype)
        positions = (anchors[:, None] + torch.arange(size)).flatten()
        context = list(head.remember(rows.features, torch.arange(length)[None]))
        # A block sees what is in front of its first token, and itself.
        blocks = torch.arange(len(positions)) // size
        before = torch.arange(length) < anchors[blocks][:, None]
        mask = torch.cat([before, blocks[:, None] == blocks], 1)

        def attention(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
        ) -> torch.Tensor:
            keys, values = (torch.cat(x, 2) for x in zip(context[layer], (k, v), strict=True))
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
            return out.transpose(1, 2)

        states = head(embeds, positions[None], attention).unflatten(1, (-1, size))
        about = torch.cat([rows.learnt[:, 1:], rows.learnt[:, -1:]], 1)
        first = not config.from_anchor
        for step in range(self.steps):
            # Those that the text is long enough for.
            at = anchors[anchors + step < length] + step
            out = states[:, : len(at), first + step]
            yield Draft(out, out, rows.last[:, at], about[:, at], tokens[:, at])

    def logits(self, draft: Draft) -> torch.Tensor:
        logits = super().logits(draft)
        if self.head.config.markov_rank == 0:
            return logits
        bias: torch.Tensor = self.head.markov_head(draft.previous[draft.some])
        return logits + bias.float()


@torch.no_grad()
def begin_blocks(head: DFlashNetwork, teacher: Teacher) -> None:
    """Give the states of a new drafter the sizes of the target's."""
    head.norm.weight.copy_(teacher.gain)
    nn.init.normal_(head.fc.weight, std=head.fc.in_features**-0.5)
