"""Hidden states of models of `transformers`, which heads read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from .base import Hidden
from .models import decoder_layers


class StateHooks:
    """Hidden states of a `transformers` model, read by hooks in the thread of a pass: at the inputs
    of its `count` decoder layers and after the final norm."""

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config(decoder=True)
        self._width, self._dtype = int(config.hidden_size), model.dtype
        body, self._layers = decoder_layers(model, int(config.num_hidden_layers))
        # Both end with the final norm: in some models the layers are nested deeper, in others the
        # base model is never called. If both are called, the outer module ends last.
        self._bodies = [
            module for module in dict.fromkeys((body, model.base_model)) if module is not model
        ]
        self.count = len(self._layers)

    def require(self, layers: Sequence[int], name: str) -> None:
        """Refuse layers that the model does not have."""
        if layers and not self.count:
            raise ValueError(
                f"{name}: expected a model whose decoder layers are one list of modules, to give "
                "hidden states, given another"
            )
        if not all(-1 <= layer <= self.count for layer in layers):
            raise ValueError(
                f"{name}: hidden_layers: expected -1 to {self.count}, given {list(layers)}"
            )

    @contextmanager
    def taken(self, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Record the states of `layers` in passes of the model in this thread, in the returned
        dict: k in [0, L] the state after k decoder layers, -1 the state after the final norm."""
        states: dict[int, Tensor] = {}
        thread = threading.get_ident()

        def keeper(layer: int, read: Callable[..., Any]) -> Callable[..., None]:
            def hook(*arguments: Any) -> None:
                if threading.get_ident() == thread:  # other threads may run the model
                    states[layer] = read(*arguments[1:])

            return hook

        with ExitStack() as hooks:
            for layer in dict.fromkeys(layers):
                if layer == -1:
                    hook = keeper(layer, _behind)
                    handles = [body.register_forward_hook(hook) for body in self._bodies]
                elif layer == self.count:
                    last = self._layers[layer - 1]
                    handles = [last.register_forward_hook(keeper(layer, _behind))]
                else:
                    hook = keeper(layer, _entering)
                    entered = self._layers[layer]
                    handles = [entered.register_forward_pre_hook(hook, with_kwargs=True)]
                for handle in handles:
                    hooks.callback(handle.remove)
            yield states

    def padded(self, hidden: Hidden, layers: Sequence[int], tokens: Tensor) -> dict[int, Tensor]:
        """Pad hidden states to the width of `tokens`, ``[B, T]``, since rows may have fewer."""
        rows, width = tokens.shape
        none = torch.zeros(rows, 0, self._width, dtype=self._dtype).to(tokens.device)
        whole = {layer: hidden.get(layer, none) for layer in layers}
        for layer, states in whole.items():
            if states.shape[1] < width:
                missing = (0, 0, 0, width - states.shape[1])
                whole[layer] = torch.nn.functional.pad(states, missing)
        return whole


def _entering(arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return arguments[0] if arguments else options["hidden_states"]


def _behind(arguments: tuple[Any, ...], output: Any) -> Any:
    if isinstance(output, Tensor):
        return output
    last = getattr(output, "last_hidden_state", None)
    return output[0] if last is None else last
