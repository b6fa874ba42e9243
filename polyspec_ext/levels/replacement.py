"""Copies of a model's modules in which other layers stand for the linear ones.

A copy shares every parameter and buffer that is not replaced with the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..ops.decoder import Matrix

# Projections of one and the same input: one product with their weights one below the other.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class RowProduct(nn.Module):
    """``x W^T + b`` of a matrix that is laid out for it, ``[.., in]`` to ``[.., out]``."""

    in_features: int
    out_features: int
    bias: torch.Tensor | None
    late = False  # the bias is added to the product after it was rounded

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """``[M, in]`` to ``[M, out]``, without `late_bias`."""
        raise NotImplementedError

    def matrices(self) -> Sequence[Matrix]:
        """The weights as `ops.decoder` multiplies with them, one below the other; none where it
        does not."""
        return ()

    @property
    def late_bias(self) -> torch.Tensor | None:
        return self.bias if self.late else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.product(x.flatten(0, -2))
        if self.late and self.bias is not None:
            y += self.bias
        return y.view(*x.shape[:-1], self.out_features)


class Merged:
    """Sibling projections as one product. The model calls them one by one, with the same tensor:
    the first call multiplies, the others take their part."""

    def __init__(self, linear: nn.Module, sizes: Sequence[int]) -> None:
        self.linear, self.sizes = linear, list(sizes)
        # An input and the parts of its product, always replaced together: another thread may run
        # the same model between any two steps of this one.
        self.latest: tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None = None

    def part(self, x: torch.Tensor, place: int) -> torch.Tensor:
        """What the projection at `place` gives for `x`."""
        latest = self.latest
        if latest is None or latest[0] is not x:
            latest = self.latest = x, self.linear(x).split(self.sizes, -1)
        if place == len(self.sizes) - 1:
            self.latest = None
        return latest[1][place]


class Part(nn.Module):
    """One of several merged projections."""

    def __init__(self, merged: Merged, place: int, in_features: int) -> None:
        super().__init__()
        self.merged, self.place = merged, place
        self.in_features, self.out_features = in_features, merged.sizes[place]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.merged.part(x, self.place)


def without_wrapper(model: Any) -> Any:
    """Return the model of `transformers` that one of `peft` wraps, whose layers have the adapters;
    `model` itself where it is none, or adds tokens of its own to the prompt."""
    config = getattr(model, "active_peft_config", None)
    if config is None or getattr(config, "is_prompt_learning", False):
        return model
    return model.get_base_model()


def with_adapters(model: nn.Module) -> bool:
    """Return whether layers of `peft` stand in for some of the model's."""
    return any(type(module).__module__.startswith("peft.") for module in model.modules())


def is_plain(module: nn.Module) -> bool:
    """A linear layer and nothing more: no subclass, hooks or replaced forward."""
    if type(module) is not nn.Linear or module.weight.numel() == 0:
        return False
    return not hooked(module) and "forward" not in module.__dict__


def hooked(module: nn.Module) -> bool:
    """Whether it has hooks, which only calls of the module itself run."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def stacked_bias(layers: Sequence[nn.Linear]) -> torch.Tensor | None:
    """The biases of layers that all have one, or all have none, one behind the other."""
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    return torch.cat(biases) if biases else None


def shallow(module: Any) -> Any:
    """The module with tables of its own, of the same parameters, buffers, children and hooks. (A
    hook of one is none of the other's: transformers hangs some on a model when it is first asked
    for hidden states, which would record each of them twice.)"""
    made = copy.copy(module)
    for name, table in vars(module).items():
        if isinstance(table, dict) and name.startswith("_"):
            made.__dict__[name] = copy.copy(table)
    return made


def replaced(
    module: Any,
    wanted: Callable[[nn.Module], bool],
    make: Callable[[Sequence[nn.Linear]], nn.Module],
    merge: bool = True,
) -> Any:
    """A copy of `module` with ``make([layer])`` for every layer that is `wanted`; with `merge`,
    ``make(siblings)`` for projections of one input, whose outputs follow each other."""
    made: dict[int, nn.Module] = {}  # by id, since a module may stand in several places

    def copied(module: Any) -> nn.Module:
        if id(module) in made:
            return made[id(module)]
        if wanted(module):
            made[id(module)] = make([module])
            return made[id(module)]
        twin = made[id(module)] = shallow(module)
        children = twin._modules
        for names in SIBLINGS if merge else ():
            layers: list[Any] = [children.get(name) for name in names]
            if all(layer is not None and wanted(layer) for layer in layers) and _alike(layers):
                merged = Merged(make(layers), [layer.out_features for layer in layers])
                width = layers[0].in_features
                made.update((id(layer), Part(merged, i, width)) for i, layer in enumerate(layers))
        for name, child in children.items():
            if child is not None:
                children[name] = copied(child)
        return made[id(module)]

    return copied(module)


def _alike(layers: Sequence[Any]) -> bool:
    kinds = {(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in layers}
    return len(kinds) == 1 and len({id(layer) for layer in layers}) == len(layers)
