"""Draft models with the most frequent ids only in their heads (FR-Spec, arXiv 2502.14856)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import arguments
from ..levels.checkpoint import eos_ids
from ..levels.trimmed import TrimmedHead, with_trimmed_head
from .calibration import token_ids


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
    return with_trimmed_head(model, drawn)
