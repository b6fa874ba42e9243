"""What hooks do in a pass of a model, in the thread that runs it: hidden states are read where they
are computed, at the entries of decoder layers and behind the final norm, and those of a few tokens
are gathered in front of the head, whose logits of all would be large. What a model does to its
logits still happens to them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


class HiddenStates:
    """Where a `transformers` model computes its hidden states.

    Args:
        model: a causal language model.

    Attributes:
        count: decoder layers, L.
    """

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config(decoder=True)
        body, self._layers = decoder_layers(model, int(config.num_hidden_layers))
        # Either ends with the final norm: in some models the layers are a part of a part, in others
        # the whole is never called. Where both are, the outer one ends last.
        self._bodies = [one for one in dict.fromkeys((body, model.base_model)) if one is not model]
        self.count = len(self._layers)

    def __bool__(self) -> bool:
        """Whether they were found."""
        return self.count > 0

    def require(self, layers: Sequence[int], name: str) -> None:
        """Refuse layers that the model does not have.

        Raises:
            ValueError: names the level.
        """
        if not self:
            raise ValueError(
                f"{name}: expected a model whose decoder layers are one list of modules, to give "
                "hidden states, given another"
            )
        wrong = [layer for layer in layers if not -1 <= layer <= self.count]
        if wrong:
            raise ValueError(
                f"{name}: hidden_layers: expected -1 to {self.count}, given {list(layers)}"
            )

    @contextmanager
    def taken(self, layers: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
        """Meanwhile a pass of the model, in this thread, leaves its states of `layers` here: k in
        [0, L] the state after k decoder layers, -1 the last one behind the final norm."""
        found: dict[int, torch.Tensor] = {}
        thread = threading.get_ident()

        def keeper(layer: int, read: Callable[..., Any]) -> Callable[..., None]:
            def hook(*arguments: Any) -> None:
                if threading.get_ident() == thread:  # others may run the same model
                    found[layer] = read(*arguments[1:])

            return hook

        with ExitStack() as hooks:
            for layer in dict.fromkeys(layers):
                if layer == -1:
                    for body in self._bodies:
                        hooks.callback(body.register_forward_hook(keeper(layer, _last)).remove)
                    continue
                if layer == self.count:
                    last = self._layers[layer - 1]
                    handle = last.register_forward_hook(keeper(layer, _result))
                else:
                    handle = self._layers[layer].register_forward_pre_hook(
                        keeper(layer, _entering), with_kwargs=True
                    )
                hooks.callback(handle.remove)
            yield found


def decoder_layers(model: nn.Module, count: int) -> tuple[nn.Module, Sequence[nn.Module]]:
    """The decoder layers, the first list of as many modules as the configuration says, and the
    module that they are a part of; the model and none where there is no such list."""
    for module in model.modules():
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return module, list(child)
    return model, ()


def _entering(arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return arguments[0] if arguments else options["hidden_states"]


def _result(arguments: tuple[Any, ...], output: Any) -> Any:
    return output if isinstance(output, torch.Tensor) else output[0]


def _last(arguments: tuple[Any, ...], output: Any) -> Any:
    last = getattr(output, "last_hidden_state", None)
    return output[0] if last is None else last


def gather(states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``states[b, rows[b, j]]``, ``[B, keep, H]``.

    Args:
        states: ``[B, T, H]``.
        rows: ``[B, keep]`` int64 in [0, T), on any device.
    """
    index = rows.to(states.device, non_blocking=True)[..., None]
    return states.gather(1, index.expand(-1, -1, states.shape[2]))


@contextmanager
def gathering(head: torch.nn.Module, rows: torch.Tensor | None) -> Iterator[None]:
    """Meanwhile `head` is given the hidden states of `rows` alone (see `gather`); None: of all."""
    if rows is None:
        yield
        return
    wanted: list[torch.Tensor] = [rows]
    thread = threading.get_ident()

    def hook(module: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        # Once: a hook that an interrupt has left behind must not change later passes. And here:
        # chains of other threads may run the same model.
        if not wanted or threading.get_ident() != thread:
            return arguments
        return (gather(arguments[0], wanted.pop()), *arguments[1:])

    handle = None
    try:
        handle = head.register_forward_pre_hook(hook, prepend=True)
        yield
    finally:
        wanted.clear()
        if handle is not None:
            handle.remove()
