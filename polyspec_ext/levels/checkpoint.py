"""What levels of `transformers` have alike: what a model says of itself beside its weights."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from .. import arguments
from ..kv_cache import factory as caches
from ..validate import LOGITS_DTYPES
from .describe import level_line
from .id_map import IdMap
from .sources import tokenizer_at
from .trimmed import TrimmedHead

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class ModelLevel:
    """A model of `transformers` whose logits `verify` can read.

    Args:
        model: in eval mode.
        name: for messages.

    Attributes:
        device: of tokens and logits.
        vocab_size: ids that it reads are below it.
        id_map: which of them it has logits of, where its head was trimmed; None: of all.
        max_length: longest context; None: no limit.

    Raises:
        ValueError: in training mode, without weights, or with logits that cannot be read; names the
            level.
    """

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self.model, self.name = model, name
        if model.training:
            raise ValueError(
                f"{name}: expected a model in eval mode, given one in training mode; call "
                "model.eval()"
            )
        self.device = caches.device_of(model)
        _require_logits(model, self.device, name)
        config = model.config.get_text_config(decoder=True)
        head = model.get_output_embeddings()
        self.id_map: IdMap | None = None
        self.vocab_size = int(getattr(head, "out_features", None) or config.vocab_size)
        if isinstance(head, TrimmedHead):
            self.vocab_size = head.vocab_size
            self.id_map = IdMap(head.vocab_size, head.drawn)
        longest = getattr(config, "max_position_embeddings", None)
        # Some configurations say -1 for any length.
        self.max_length: int | None = longest if longest is not None and longest > 0 else None

    def __repr__(self) -> str:
        kinds = type(self).__name__, type(self.model).__name__
        return f"{kinds[0]}({self.name}: {kinds[1]}, {level_line(self)})"

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text, from the generation configuration."""
        return eos_ids(self.model)

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer that lies beside the model's weights, or None. Never asks the network."""
        place, found = getattr(self.model, "name_or_path", ""), None
        with contextlib.suppress(ValueError):
            found = tokenizer_at(place, local=True) if place else None
        return found


def eos_ids(model: Any) -> tuple[int, ...]:
    """Ids that end a text, from the generation configuration or else the model's."""
    for config in (getattr(model, "generation_config", None), model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    return ()


def _require_logits(model: PreTrainedModel, device: torch.device, name: str) -> None:
    """Refuse a model whose logits `verify` cannot read, as far as its head tells."""
    # Weights that accelerate keeps elsewhere are on the meta device between passes.
    offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    missing = not offloaded and any(p.is_meta for p in model.parameters())
    if missing or device.type == "meta":
        raise ValueError(f"{name}: expected a model with its weights, given one on the meta device")
    arguments.place(f"{name}: device", device)
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    # A quantised head, which is of another class, multiplies in a type that its weights do not
    # tell.
    kind = weight.dtype if isinstance(weight, torch.Tensor) else torch.float32
    told = type(head) is torch.nn.Linear or kind == torch.float64
    if told and kind not in LOGITS_DTYPES:
        raise ValueError(
            f"{name}: expected a model whose logits are float32, bfloat16 or float16, given a head "
            f"of {kind}"
        )
