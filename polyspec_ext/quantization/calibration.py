"""What a model's linear layers are given on texts: the Hessians of their squared errors."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import arguments, processor, progress
from ..levels import tokenizer_at
from ..levels.models import decoder_layers

_MEMORY = 2 << 30
_ROWS = 1024  # inputs that are added at a time, at least: a sum is read and written once for them
_COLUMNS = 1024


def token_ids(model: Any, calibration: Sequence[Any], name: str = "calibration") -> list[Tensor]:
    """Return texts, or token ids of each text, as int64 tensors; texts are read by the tokenizer
    that lies beside the model's weights."""
    calibration = arguments.listed(name, calibration, "texts or of token ids")
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
    """``X^T X`` of the inputs X of linear layers on texts, by the layer's name; layers that are
    given the same tensor share one.

    They are found out for as many decoder layers at a time as `memory` has room for, when one of
    them is asked for, and forgotten with the next ones: those of a model would be several times as
    large as it is. What a decoder layer has given for each text is kept meanwhile, so that no
    layer reads a text twice.

    Args:
        layers: of the model, in its order.
        texts: int64 tensors of token ids.
        memory: bytes of Hessians at a time.
    """

    def __init__(
        self,
        model: Any,
        layers: Mapping[str, nn.Linear],
        texts: Sequence[Tensor],
        memory: int = _MEMORY,
    ) -> None:
        self._model, self._texts = model, texts
        count = model.config.get_text_config(decoder=True).num_hidden_layers
        _, self._blocks = decoder_layers(model, count)
        self._spans = _spans(self._blocks, layers, memory)
        self._outputs: list[Any] = []  # by text: of the last decoder layer that has read them
        self._read = 0  # decoder layers that have
        self._sums: dict[str, Tensor] = {}
        self._shared: dict[str, str] = {}  # layer -> the one that counts for it
        self._last: tuple[str, Tensor] | None = None  # layer and input
        self._rows: dict[str, list[Tensor]] = {}  # inputs that are not added yet

    def of(self, name: str) -> Tensor:
        """Return the Hessian of a layer, ``[K, K]`` float32. KeyError: no text reached the
        layer."""
        while name not in self._shared and self._spans:
            end, layers = self._spans.pop(0)
            self._sums, self._shared = {}, {}
            self._run(end, layers)
        return self._sums[self._shared[name]]

    @torch.inference_mode()
    def _run(self, end: int, layers: Mapping[str, nn.Linear]) -> None:
        """Run the texts through the decoder layers below `end`, or through the rest of the model if
        these are its last."""
        self._last, self._rows = None, {}
        outputs: list[Any] = []
        hooks = [
            layer.register_forward_pre_hook(lambda _, x, name=name: self._note(name, x[0]))
            for name, layer in layers.items()
        ]

        def stop(module: nn.Module, inputs: Any, *output: Any) -> None:
            outputs.extend(output)  # none in front of a module
            raise _Stopped

        head = self._model.get_output_embeddings()
        if end < len(self._blocks):
            hooks.append(self._blocks[end - 1].register_forward_hook(stop))
        elif head is not None:  # what it would give is nobody's either
            hooks.append(head.register_forward_pre_hook(stop))
        done = self._blocks[: self._read]
        before = [vars(block).get("forward") for block in done]  # accelerate puts its own there
        try:
            for at, ids in enumerate(progress.bar(self._texts, desc="calibration", leave=False)):
                for block in done:  # what they give but the last is nobody's
                    block.forward = lambda *_, at=at, **__: self._outputs[at]
                with contextlib.suppress(_Stopped):
                    self._model(input_ids=ids[None].to(self._model.device), use_cache=False)
            self._end()
        finally:
            for hook in hooks:
                hook.remove()
            for block, own in zip(done, before, strict=True):
                vars(block).pop("forward", None)
                if own is not None:
                    block.forward = own
        self._outputs, self._read = outputs, end

    def _note(self, name: str, x: Tensor) -> None:
        """Layer `name` is given `x`."""
        last = self._last
        if last is not None and last[1] is x and self._shared.get(name, last[0]) == last[0]:
            self._shared[name] = last[0]
            return
        self._last = name, x
        self._shared[name] = name
        rows = self._rows.setdefault(name, [])
        rows.append(x.detach().flatten(0, -2))
        if sum(map(len, rows)) >= _ROWS:
            self._add(name)

    def _end(self) -> None:
        """Add the remaining rows, and mirror the sums."""
        self._last = None
        for name in self._rows:
            self._add(name)
        for total in self._sums.values():
            for at in range(0, len(total), _COLUMNS):
                end = at + _COLUMNS
                total[end:, at:end] = total[at:end, end:].T

    def _add(self, name: str) -> None:
        if not self._rows[name]:
            return
        rows = torch.cat(self._rows[name])
        self._rows[name].clear()
        exact = rows.dtype == torch.bfloat16
        rows = rows.float()
        width = rows.shape[1]
        if name not in self._sums:
            self._sums[name] = torch.zeros(width, width, device=rows.device)
        # The matrix is symmetric: from the diagonal on will do until `end`. (Sums in bfloat16 take
        # no longer, but leave some Hessians without a Cholesky factor.)
        with processor.bfloat16_factors() if exact else contextlib.nullcontext():
            for at in range(0, width, _COLUMNS):
                own = rows[:, at : at + _COLUMNS]
                self._sums[name][at : at + _COLUMNS, at:].addmm_(own.T, rows[:, at:])


class _Stopped(Exception):
    """The last decoder layer that is wanted has run."""


def _spans(
    blocks: Sequence[nn.Module], layers: Mapping[str, nn.Linear], memory: int
) -> list[tuple[int, dict[str, nn.Linear]]]:
    """Decoder layers that are calibrated together: the number of the one behind the last, and the
    linear layers. What lies outside of them goes with the last."""
    own = {id(part): at for at, block in enumerate(blocks) for part in block.modules()}
    last = len(blocks) - 1
    spans: list[tuple[int, dict[str, nn.Linear]]] = []
    room = -1
    for at in range(len(blocks)):
        found = {name: x for name, x in layers.items() if own.get(id(x), last) == at}
        size = sum(4 * layer.in_features**2 for layer in found.values())
        if size > room or not spans:
            spans.append((at + 1, {}))
            room = memory
        room -= size
        spans[-1] = at + 1, {**spans[-1][1], **found}
    return spans or [(0, dict(layers))]
