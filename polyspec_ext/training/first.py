"""First weights of an EAGLE-3 head, by least squares: what a few thousand tokens tell, and steps of
an optimiser would need many more for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..drafters.eagle import EagleNetwork
from .states import States, Teacher

_RIDGE = 0.1  # of the mean square of a predictor


@torch.no_grad()
def begin_linear(head: EagleNetwork, teacher: Teacher, blocks: Sequence[States]) -> None:
    """`head`, whose attention adds its own token's embedding, begins as the linear function of
    features and embedding that is nearest to the target's next state.

    Args:
        head: of `heads.make_head`.
        teacher: whose final norm `head` takes.
        blocks: at least one.
    """
    own: Any = head.layers[0]
    gain = teacher.gain
    width, size = head.config.hidden_size, head.config.feature_size + head.config.hidden_size
    squares, products, count = torch.zeros(size, size), torch.zeros(size, width), 0
    for block in blocks:
        embeds = own.input_layernorm(teacher.embed(block.tokens[:, 1:]).float())
        given = torch.cat([block.features[:, :-1].float(), embeds], -1)
        about = torch.cat([block.learnt[:, 2:], block.learnt[:, -1:]], 1)
        x, y = given[about], block.last[:, 1:][about].float() / gain
        squares += x.T @ x
        products += x.T @ y
        count += len(x)
    if count == 0:
        return
    squares.diagonal().add_(_RIDGE * count)
    found = torch.linalg.solve(squares, products).T
    head.fc.weight.copy_(found[:, :-width])
    # The attention's values are an orthogonal image of the embedding.
    values = own.self_attn.v_proj.weight[:, :width]
    own.self_attn.o_proj.weight.copy_(found[:, -width:] @ values.T)
    head.norm.weight.copy_(gain)
