"""A new head for a target: EAGLE, MTP, or a block drafter (DFlash, DSpark): its configuration, its
first weights, and the drafts for training block drafters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from polyspec_ext.drafters.dflash import DFlashNetwork
from polyspec_ext.drafters.eagle import EagleNetwork
from polyspec_ext.drafters.mtp import MTPNetwork

from .unrolled import Draft, Drafts, States, Teacher

_RIDGE = 0.1  # relative to the mean square of a predictor


@dataclass(frozen=True)
class Settings:
    """Settings of a run; a resumed run must have the same."""

    version: int = 3  # 1: EAGLE-2; 0: an MTP head
    steps: int = 3  # trained steps of a draft; for a block drafter all
    draft_vocab: int | None = None  # vocabulary of an EAGLE-3 or DFlash; None: all ids
    block_size: int = 0  # tokens of a block of a DFlash drafter; 0: an EAGLE head
    layers: int = 1  # of a DFlash drafter
    markov_rank: int = 0  # of a DSpark drafter; 0: a DFlash
    inner: int | None = None  # width of its MLP; None: the target's
    epochs: int = 3  # mean number of uses of a row
    length: int = 320  # tokens of a row
    batch: int = 4  # rows of a step
    block: int = 32  # rows per block of target states
    rate: float = 1e-3  # highest learning rate
    seed: int = 0  # of the first weights and the order of rows


def head_config(text: Any, settings: Settings) -> dict[str, Any]:
    """Return the config.json of a head in the format of SafeAILab's checkpoints. `text`:
    configuration of the target's decoder."""
    # Number of heads: the target's, or the next lower number with an even width per head.
    width, version = text.hidden_size, settings.version
    counts = range(text.num_attention_heads, 0, -1)
    heads = next((n for n in counts if width % n == 0 and width // n % 2 == 0), 1)
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if version == 3 or heads % kv_heads:
        # The token's embedding reaches an EAGLE-3 head only through the values: full width.
        kv_heads = heads
    inner = settings.inner or getattr(text, "intermediate_size", None)
    rotations = getattr(text, "rope_parameters", None) or {}
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM" if version == 1 else "LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": inner or 4 * width,
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
    drawn = settings.draft_vocab or text.vocab_size
    return config | ({"bias": False} if version == 1 else {"draft_vocab_size": drawn})


@torch.no_grad()
def begin_eagle3(head: EagleNetwork, teacher: Teacher, blocks: Sequence[States]) -> None:
    """Initialise an EAGLE-3 head with an attention to the current token that adds its embedding to
    the target's features: queries and keys are equal, values and output inverse to each other. A
    random layer would have to learn this first.

    The head starts as the linear function of features and embedding nearest to the target's next
    state over the blocks, by least squares; its final norm is the target's.
    """
    layer: Any = head.layers[0]
    width, attention, gain = head.config.hidden_size, layer.self_attn, teacher.gain
    nn.init.normal_(head.fc.weight, std=head.fc.in_features**-0.5)
    nn.init.normal_(attention.q_proj.weight, std=(2 * width) ** -0.5)
    attention.k_proj.weight.copy_(attention.q_proj.weight[: len(attention.k_proj.weight)])
    values = torch.empty(len(attention.v_proj.weight), width)
    nn.init.orthogonal_(values)
    attention.v_proj.weight.zero_()[:, :width] = values
    attention.o_proj.weight.copy_(values.T)
    for linear in (layer.mlp.gate_proj, layer.mlp.up_proj):
        nn.init.normal_(linear.weight, std=width**-0.5)
    nn.init.normal_(layer.mlp.down_proj.weight, std=0.3 * layer.mlp.down_proj.in_features**-0.5)

    def inputs(embeds: torch.Tensor, block: States) -> torch.Tensor:
        return torch.cat([block.features[:, :-1].float(), layer.input_layernorm(embeds)], -1)

    solution = _nearest(teacher, blocks, inputs, lambda block: block.last.float() / gain)
    if solution is None:
        return
    head.fc.weight.copy_(solution[:, :-width])
    attention.o_proj.weight.copy_(solution[:, -width:] @ values.T)
    head.norm.weight.copy_(gain)


@torch.no_grad()
def begin_mtp(head: MTPNetwork, teacher: Teacher, blocks: Sequence[States]) -> None:
    """Set the product of a new MTP head, a copy of the target's last layer, to the linear function
    of its inputs nearest to that layer's input at the next token."""

    def inputs(embeds: torch.Tensor, block: States) -> torch.Tensor:
        return head.paired(embeds, block.last[:, :-1].float())

    solution = _nearest(
        teacher, blocks, inputs, lambda block: teacher.passes(block.tokens, layers=[-2])[0].float()
    )
    if solution is not None:
        head.fc.weight.copy_(solution)


def _nearest(
    teacher: Teacher,
    blocks: Sequence[States],
    inputs: Callable[[torch.Tensor, States], torch.Tensor],
    goals: Callable[[States], torch.Tensor],
) -> torch.Tensor | None:
    """Return the least-squares matrix from the `inputs` of each token's embedding and the state
    before it to the token's `goals`. A few thousand tokens suffice, where an optimiser would need
    many more. None: no token is learnt."""
    squares = products = torch.zeros(1)
    count = 0
    for block in blocks:
        about = block.about[:, 1:]
        x = inputs(teacher.embed(block.tokens[:, 1:]).float(), block)[about]
        y = goals(block)[:, 1:][about]
        squares, products = squares + x.T @ x, products + x.T @ y
        count += len(x)
    if count == 0:
        return None
    squares.diagonal().add_(_RIDGE * count)
    matrix: torch.Tensor = torch.linalg.solve(squares, products)
    return matrix.T


def block_config(target: Any, layer: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Return the config.json of a block drafter in the format of speculators' checkpoints.

    Args:
        target: configuration of the target.
        layer: configuration of an EAGLE-3 head for the target, of the same widths (`head_config`).
    """
    size, rank = settings.block_size, settings.markov_rank
    text, kind = target.get_text_config(decoder=True), "dspark" if rank else "dflash"
    count, ends = text.num_hidden_layers, text.eos_token_id
    nested = {key: value for key, value in layer.items() if key not in ("architectures", "bias")}
    drawn = nested.pop("draft_vocab_size")
    nested |= {"model_type": "qwen3", "num_hidden_layers": settings.layers}
    nested["head_dim"] = nested["hidden_size"] // nested["num_attention_heads"]
    # Nothing is drafted after the end of a text, so EOS can be the mask token.
    mask = (ends[0] if isinstance(ends, list) else ends) or 0
    proposal = {"proposal_type": "greedy", "speculative_tokens": size - (not rank)}
    markov = {"markov_rank": rank, "markov_head_type": "vanilla", "enable_confidence_head": False}
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
        "block_size": size,
        "draft_vocab_size": drawn,
        "mask_token_id": mask,
        "sample_from_anchor": bool(rank),
        "target_hidden_size": nested["hidden_size"],
        "transformer_layer_config": nested,
        **(markov if rank else {}),
    }


class Blocks(Drafts):
    """A block drafter after some tokens of a text: a block in each stretch of a block's length."""

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
        # A block attends to the text before its first token, and to itself.
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
        first = not config.from_anchor
        for step in range(self.steps):
            # Blocks that reach this step within the text.
            at = anchors[anchors + step < length] + step
            out = states[:, : len(at), first + step]
            yield Draft(out, out, rows.last[:, at], rows.about[:, at], tokens[:, at])

    def logits(self, draft: Draft) -> torch.Tensor:
        logits = super().logits(draft)
        if self.head.config.markov_rank == 0:
            return logits
        bias: torch.Tensor = self.head.markov_head(draft.previous[draft.some])
        return logits + bias.float()


@torch.no_grad()
def begin_blocks(head: DFlashNetwork, teacher: Teacher, _: Sequence[States]) -> None:
    """Scale the states of a new drafter to the target's sizes. Its layers add little at first, and
    the Markov head nothing."""
    for layer in head.layers:
        module: Any = layer
        for linear in (module.self_attn.o_proj, module.mlp.down_proj):
            nn.init.normal_(linear.weight, std=0.3 * linear.in_features**-0.5)
    if head.config.markov_rank:
        nn.init.zeros_(head.markov_head.markov_w2.weight)
    head.norm.weight.copy_(teacher.gain)
    nn.init.normal_(head.fc.weight, std=head.fc.in_features**-0.5)
