"""Draft models with the most frequent ids only in their heads (FR-Spec, arXiv 2502.14856)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .. import arguments
from ..levels.gguf import BlockLinear, head_rows
from ..levels.models import eos_ids
from ..levels.products import TrimmedHead, shallow
from .calibration import token_ids
from .weights import Int4Linear, Int4Weights, head_of


def trim(model: Any, texts: Sequence[Any] | None, size: int) -> Any:
    """Copy a causal language model with logits of its `size` most frequent ids only, for the lowest
    level of a chain. Where the head is most of what a pass reads, as in small models of
    large vocabularies, that makes drafting cheaper.

    The copy reads every id and draws those alone. What it hands up is the distribution over them
    that it has drawn from, so the chain stays exact. A token of another id is never drafted.

    Args:
        model: a Hugging Face model in eval mode, also one of `quantize_w4` or of a GGUF file; it is
            not touched.
        texts: texts or lists of token ids, of the kind that will be decoded, whose ids are counted.
            Of ids that are as frequent the lower is taken, and ids that end a text come first.
            None: the lowest ids, which in vocabularies of byte pairs are about the most frequent.
        size: ids, from 1 to as many as the model has.

    Returns:
        The copy; it shares all weights but the head's with `model`.

    Raises:
        TypeError, ValueError: an argument is none of these, or the head is no linear layer; the
            message names the argument.
    """
    arguments.model("model", model)
    head = model.get_output_embeddings()
    if isinstance(head, TrimmedHead):
        raise ValueError("model: expected one with all of its ids, given one that was trimmed")
    vocab_size = int(model.config.get_text_config(decoder=True).vocab_size)
    vocab_size = getattr(head, "out_features", vocab_size)
    size = arguments.integer("size", size, vocab_size, 1)
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    if texts is not None:
        for row in token_ids(model, texts, "texts"):
            counts += torch.bincount(row, minlength=vocab_size)
    ends = [id for id in eos_ids(model) if 0 <= id < vocab_size]  # -1 stands for none
    counts[ends] = torch.iinfo(torch.int64).max
    drawn = counts.argsort(descending=True, stable=True)[:size].sort().values
    return _with_head(model, head, drawn)


def _with_head(model: Any, head: Any, drawn: torch.Tensor) -> Any:
    path, rows = head_of(model), _rows(model, head, drawn)
    if path is None or rows is None:
        raise ValueError(
            f"model: expected an output head that is a linear layer, given {type(head).__name__}"
        )
    made = parent = shallow(model)
    *above, last = path.split(".")
    for name in above:
        child = shallow(getattr(parent, name))
        setattr(parent, name, child)
        parent = child
    setattr(parent, last, TrimmedHead(rows, drawn.to(model.device), head.out_features))
    return made


def _rows(model: Any, head: Any, drawn: torch.Tensor) -> nn.Module | None:
    """Return a head with these rows alone; None: of a kind that is not known here."""
    bias = getattr(head, "bias", None)
    bias = None if bias is None else bias.detach()[drawn.to(bias.device)]
    if isinstance(head, BlockLinear):
        return head_rows(model.name_or_path, drawn)
    if isinstance(head, Int4Linear):
        return Int4Linear(Int4Weights(*(x[drawn] for x in head.weights().tensors)), bias)
    if type(head) is not nn.Linear:
        return None
    weight = head.weight.detach()[drawn.to(head.weight.device)]
    made = nn.Linear(head.in_features, len(drawn), bias=False, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made.eval()
