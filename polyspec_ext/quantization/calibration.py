"""What a model's linear layers are given on texts: the Hessians of their squared errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .. import arguments, progress
from ..levels import tokenizer_at


def token_ids(
    model: Any, calibration: Sequence[Any], name: str = "calibration"
) -> list[torch.Tensor]:
    """Texts, or token ids of each text, as int64 tensors; texts are read by the tokenizer that
    lies beside the model's weights.

    Raises:
        TypeError, ValueError: what is given is neither; the message begins with `name`.
    """
    given = arguments.entries(name, calibration)
    if given is None:
        raise TypeError(
            f"{name}: expected a list of texts or of token ids, given "
            f"{arguments.shown(calibration)}"
        )
    calibration = given
    texts = [text for text in calibration if isinstance(text, str)]
    if texts:
        if len(texts) != len(calibration):
            raise TypeError(f"{name}: expected texts or token ids, given both")
        try:
            tokenizer = tokenizer_at(model.name_or_path, local=True)
        except ValueError:
            raise ValueError(
                f"{name}: expected token ids of a model without a tokenizer beside its "
                "weights, given texts"
            ) from None
        calibration = tokenizer(texts)["input_ids"]
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    found = []
    for row in calibration:
        ids = arguments.row_integers(name, row)
        if not ids:
            raise ValueError(f"{name}: expected at least 1 token of each text, given none")
        arguments.require_ids(name, ids, vocab_size)
        found.append(torch.tensor(ids))
    if not found:
        raise ValueError(f"{name}: expected at least one text, given none")
    return found


class Hessians:
    """``X^T X`` of the inputs X of linear layers, by the layer's name; layers that are given the
    same tensor share one."""

    def __init__(self, layers: Mapping[str, nn.Linear]) -> None:
        self.layers = layers
        self.sums: dict[str, torch.Tensor] = {}
        self.shared: dict[str, str] = {}  # layer -> the one that counts for it
        self._last: tuple[str, torch.Tensor] | None = None

    def _seen(self, name: str, x: torch.Tensor) -> None:
        last = self._last
        if last is not None and last[1] is x and self.shared.get(name, last[0]) == last[0]:
            self.shared[name] = last[0]
            return
        self._last = name, x
        self.shared[name] = name
        rows = x.detach().flatten(0, -2).float()
        if name not in self.sums:
            width = rows.shape[1]
            self.sums[name] = torch.zeros(width, width, device=rows.device)
        self.sums[name].addmm_(rows.T, rows)

    @torch.inference_mode()
    def read(self, model: Any, texts: Sequence[torch.Tensor]) -> None:
        """Runs the texts through the model, once each."""
        handles = [
            layer.register_forward_pre_hook(
                lambda _, inputs, name=name: self._seen(name, inputs[0])
            )
            for name, layer in self.layers.items()
        ]
        try:
            for ids in progress.bar(texts, desc="calibration", leave=False):
                model(input_ids=ids[None].to(model.device), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
            self._last = None

    def of(self, name: str) -> torch.Tensor:
        """Of a layer.

        Raises:
            KeyError: no text has reached it.
        """
        return self.sums[self.shared[name]]
