"""A drafter of blocks (DFlash, DSpark) for a target: its configuration in speculators' format, its
first weights, and the drafts that it learns from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from polyspec_ext.drafters.dflash import DFlashNetwork
from polyspec_ext.drafters.dflash_format import parse

from .states import States, Teacher
from .unrolled import Draft, Drafts


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
        parse(given, [f"layers.{i}." for i in range(count)], target_layers, "head")
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
