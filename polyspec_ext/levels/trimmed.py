"""Output heads with logits of a part of the ids only."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .gguf import BlockLinear, head_rows
from .quantized import Int4Linear, Int4Weights, head_of
from .replacement import shallow


class TrimmedHead(nn.Module):
    """The rows of an output head that belong to some ids.

    Args:
        linear: with those rows alone.
        drawn: ``[outputs of linear]`` int64, increasing: the ids.
        vocab_size: of the whole head.
    """

    drawn: torch.Tensor

    def __init__(self, linear: nn.Module, drawn: torch.Tensor, vocab_size: int) -> None:
        super().__init__()
        self.linear, self.vocab_size = linear, vocab_size
        self.register_buffer("drawn", drawn)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.linear(x)
        return logits


def with_trimmed_head(model: Any, drawn: torch.Tensor) -> Any:
    """A copy of `model` that has logits of the ids `drawn` alone, ``[Vd]`` int64, increasing, and
    shares all other weights with it.

    Raises:
        ValueError: its head is no linear layer of torch, of this package's 4 bits or of a GGUF
            file.
    """
    head = model.get_output_embeddings()
    path = head_of(model)
    rows = None if path is None else _rows(model, head, drawn)
    if path is None or rows is None:
        raise ValueError(
            f"model: expected an output head that is a linear layer, given {type(head).__name__}"
        )
    made = part = shallow(model)
    *above, last = path.split(".")
    for name in above:
        own = shallow(getattr(part, name))
        setattr(part, name, own)
        part = own
    setattr(part, last, TrimmedHead(rows, drawn.to(model.device), head.out_features))
    return made


def _rows(model: Any, head: Any, drawn: torch.Tensor) -> nn.Module | None:
    """A head with these rows alone; None: of a kind that is not known here."""
    bias = getattr(head, "bias", None)
    bias = None if bias is None else bias.detach()[drawn.to(bias.device)]
    if isinstance(head, BlockLinear):
        return head_rows(model.name_or_path, drawn)
    if isinstance(head, Int4Linear):
        own = head.weights()
        parts = (own.values[drawn], own.scales[drawn], own.zeros[drawn])
        return Int4Linear(Int4Weights(*parts), bias)
    if type(head) is not nn.Linear:
        return None
    weight = head.weight.detach()[drawn.to(head.weight.device)]
    made = nn.Linear(head.in_features, len(drawn), bias=False, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made.eval()
