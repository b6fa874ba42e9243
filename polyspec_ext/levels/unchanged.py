"""Refuse a call of a level whose model changed behind it: what a level asks of its model when it is
made is asked again once per call."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..kv_cache.factory import device_of

# Hooks of transformers record outputs that somebody asked for, and those of this package come and
# go within a pass.
_PASSING = ("transformers.", "polyspec_ext.")
_SAMPLED = 4  # rows and columns of a packed matrix that are compared


def require_no_autocast(device: torch.device, name: str) -> None:
    """Refuse `torch.autocast` on `device`.

    Raises:
        ValueError: it is on; the message begins with `name`, of the level.
    """
    if torch.is_autocast_enabled(device.type):
        raise ValueError(
            f"{name}: expected a call outside torch.autocast, given one inside "
            f"torch.autocast({device.type!r}), where layers and caches have several data types; "
            "load the model in the type that is wanted"
        )


class Unchanged:
    """The modes, sizes and types of a model at the time that its level is made.

    Args:
        model: of the level.
        name: of the level, for messages.
        copied: passes run a copy of the model's modules, without its later hooks and modules, and
            with copies of its linear weights. These are compared as well then.
    """

    def __init__(self, model: Any, name: str, *, copied: bool = False) -> None:
        self._model, self._name, self._device = model, name, device_of(model)
        self._copied = copied
        self._modules: list[nn.Module] = list(model.modules())
        # Views of some weights that were packed.
        self._sampled: dict[torch.dtype, list[torch.Tensor]] = {}
        # Modules whose weights the passes do not look for again.
        self._bound = [layer for layer in self._modules if copied and type(layer) is nn.Linear]
        for own in (weight for layer in self._bound for weight in layer.parameters(recurse=False)):
            steps = [max(1, size // _SAMPLED) for size in own.shape]
            view = own.detach()[tuple(slice(None, None, step) for step in steps)]
            self._sampled.setdefault(own.dtype, []).append(view)
        self._before = self._facts()

    def require(self) -> None:
        """Refuse a call of a changed model, and one under `torch.autocast`.

        Raises:
            ValueError: names the level and what changed.
        """
        require_no_autocast(self._device, self._name)
        now = self._facts()
        if now == self._before:
            return
        what = next(key for key, value in now.items() if value != self._before[key])
        hint = "make the level anew"
        if what == "training modes" and self._model.training:
            hint = "call model.eval()"
        elif what in ("hooks", "modules", "weights"):
            hint += ", without pack where they are to change between calls"
        raise ValueError(
            f"{self._name}: expected the model as it was when its level was made, given one with "
            f"other {what}; {hint}"
        )

    def _facts(self) -> dict[str, Any]:
        model, modules = self._model, self._modules
        head, embeds = model.get_output_embeddings(), model.get_input_embeddings()
        sizes = getattr(head, "out_features", None), getattr(embeds, "num_embeddings", None)
        facts = {
            "training modes": [module.training for module in modules],
            "embeddings": (head, *sizes),
            "data types or devices": (model.dtype, device_of(model)),
        }
        if self._copied:
            tables = (
                table for one in modules for table in (one._forward_pre_hooks, one._forward_hooks)
            )
            facts["hooks"] = [n for table in tables for n, hook in table.items() if _stays(hook)]
            facts["modules"] = [(dict(m._modules), m.__dict__.get("forward")) for m in modules]
            facts["weights"] = self._weights()
        return facts

    def _weights(self) -> tuple[list[int], list[bytes]]:
        bound = (own for module in self._bound for own in module.parameters(recurse=False))
        places = [own.data_ptr() for own in bound]
        with torch.inference_mode():
            some = [torch.cat([view.flatten() for view in own]) for own in self._sampled.values()]
        return places, [own.cpu().view(torch.uint8).numpy().tobytes() for own in some]


def _stays(hook: Any) -> bool:
    return not str(getattr(hook, "__module__", "")).startswith(_PASSING)
