"""The model that a head drafts for, as far as heads ask for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from .. import arguments
from ..kv_cache.factory import device_of
from ..levels import HuggingFaceLevel
from . import checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_Network = TypeVar("_Network", bound=torch.nn.Module)


class Target:
    """A level or its model.

    Attributes:
        level: None where a model was given.
        text: configuration of the model's decoder.
        pack: whether heads run on packed weights, as the level does.
    """

    def __init__(self, given: HuggingFaceLevel | PreTrainedModel) -> None:
        model: Any = given.model if isinstance(given, HuggingFaceLevel) else given
        arguments.model("target", model)
        self.level = given if isinstance(given, HuggingFaceLevel) else None
        self.model, self.text = model, model.config.get_text_config(decoder=True)
        self.hidden_size, self.vocab_size = int(self.text.hidden_size), int(self.text.vocab_size)
        self.device = device_of(model)
        self.pack = self.level is not None and self.level.pack

    def load(
        self,
        make: Callable[[], _Network],
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype | None,
        name: str,
    ) -> _Network:
        """What `make` makes, with `tensors` as its own, on the model's device.

        Args:
            dtype: None: the model's.
            name: of the checkpoint, for messages.

        Raises:
            TypeError, ValueError: no such data type, or tensors that do not fit
                (`checkpoint.load_into`).
        """
        wanted = arguments.dtype("dtype", dtype) or self.model.dtype
        with torch.device("meta"):
            network = make()
        checkpoint.load_into(network, tensors, wanted, self.device, name)
        return network.eval().requires_grad_(False)
