"""Hessians of the squared errors of a model's linear layers, from their inputs on texts, and
rounding of weights by them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import arguments, progress
from ..levels import tokenizer_at
from ..levels.models import decoder_layers
from ..levels.sources import multiplies_bfloat16
from .weights import Int4Weights, joined, round_to_nearest

_LEAST_ROWS = 1024  # minimum inputs per addition, which reads and writes a whole sum
_COLUMNS = 1024


def token_ids(model: Any, calibration: Sequence[Any], name: str = "calibration") -> list[Tensor]:
    """Return texts, or token ids of each text, as int64 tensors; the tokenizer beside the model's
    weights reads texts."""
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
    tokens = []
    for row in calibration:
        ids = arguments.row_integers(name, row)
        if not ids:
            raise ValueError(f"{name}: expected at least 1 token of each text, given none")
        arguments.require_ids(name, ids, vocab_size)
        tokens.append(torch.tensor(ids))
    if not tokens:
        raise ValueError(f"{name}: expected at least one text, given none")
    return tokens


class Hessians:
    """``X^T X`` of the inputs X of linear layers on texts, by the layer's name; layers with the
    same input tensor share a Hessian.

    They are computed on request for a decoder layer at a time, and dropped with the next request
    beyond it: the Hessians of a whole model would be several times its size. The layer's outputs on
    each text are kept meanwhile, so that no layer reads a text twice. Linear layers elsewhere are
    read with the last decoder layer.

    Args:
        layers: linear layers by name, in the model's order.
        texts: int64 tensors of token ids.
    """

    def __init__(
        self, model: Any, layers: Mapping[str, nn.Linear], texts: Sequence[Tensor]
    ) -> None:
        self._model, self._texts = model, texts
        count = model.config.get_text_config(decoder=True).num_hidden_layers
        _, self._blocks = decoder_layers(model, count)
        numbers = {id(x): at for at, block in enumerate(self._blocks) for x in block.modules()}
        self._layers: list[dict[str, nn.Linear]] = [{} for _ in self._blocks]  # by decoder layer
        for name, layer in layers.items():
            self._layers[numbers.get(id(layer), count - 1)][name] = layer
        self._outputs: list[Any] = []  # by text: output of the last decoder layer that has run
        self._read = 0  # number of decoder layers that have run
        self._sums: dict[str, Tensor] = {}
        self._shared: dict[str, str] = {}  # layer -> layer with its sum
        self._last: tuple[str, Tensor] | None = None  # layer and input
        self._rows: dict[str, list[Tensor]] = {}  # inputs that are not in the sums yet

    def of(self, name: str) -> Tensor:
        """Return the Hessian of a layer, ``[K, K]`` float32. KeyError: no text reached the
        layer."""
        while name not in self._shared and self._read < len(self._blocks):
            self._run(self._layers[self._read])
        return self._sums[self._shared[name]]

    @torch.inference_mode()
    def _run(self, layers: Mapping[str, nn.Linear]) -> None:
        """Run the texts through the next decoder layer, the last with the rest of the model."""
        self._sums, self._shared, self._last, self._rows = {}, {}, None, {}
        outputs: list[Any] = []
        hooks = [
            layer.register_forward_pre_hook(lambda _, x, name=name: self._note(name, x[0]))
            for name, layer in layers.items()
        ]

        def stop(module: nn.Module, inputs: Any, *output: Any) -> None:
            outputs.extend(output)  # empty before a module
            raise _Stopped

        head = self._model.get_output_embeddings()
        if self._read < len(self._blocks) - 1:
            hooks.append(self._blocks[self._read].register_forward_hook(stop))
        elif head is not None:  # its output is unused, too
            hooks.append(head.register_forward_pre_hook(stop))
        done = self._blocks[: self._read]
        before = [vars(block).get("forward") for block in done]  # accelerate replaces forward
        try:
            for at, ids in enumerate(progress.bar(self._texts, desc="calibration", leave=False)):
                for block in done:  # only the last layer's output is used
                    block.forward = lambda *_, at=at, **__: self._outputs[at]
                with contextlib.suppress(_Stopped):
                    self._model(input_ids=ids[None].to(self._model.device), use_cache=False)
            self._end()
        finally:
            for hook in hooks:
                hook.remove()
            for block, forward in zip(done, before, strict=True):
                vars(block).pop("forward", None)
                if forward is not None:
                    block.forward = forward
        self._outputs, self._read = outputs, self._read + 1

    def _note(self, name: str, x: Tensor) -> None:
        """Record `x` as an input of layer `name`."""
        last = self._last
        if last is not None and last[1] is x and self._shared.get(name, last[0]) == last[0]:
            self._shared[name] = last[0]
            return
        self._last = name, x
        self._shared[name] = name
        rows = self._rows.setdefault(name, [])
        rows.append(x.detach().flatten(0, -2))
        if sum(map(len, rows)) >= _LEAST_ROWS:
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
        # The matrix is symmetric: until `_end`, the entries from the diagonal on suffice. (Sums in
        # bfloat16 take no longer, but leave some Hessians without a Cholesky factor.)
        with bfloat16_factors() if exact else contextlib.nullcontext():
            for at in range(0, width, _COLUMNS):
                columns = rows[:, at : at + _COLUMNS]
                self._sums[name][at : at + _COLUMNS, at:].addmm_(columns.T, rows[:, at:])


@contextlib.contextmanager
def bfloat16_factors() -> Iterator[None]:
    """Let torch round the factors of float32 products to bfloat16 in the block, if the processor
    multiplies that: half the time. Sums stay float32."""
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    if multiplies_bfloat16():
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


class _Stopped(Exception):
    """Stop of a pass after the last required decoder layer."""


# ---- rounding with feedback ----------------------------------------------------------------------

DAMPING = 0.01  # added to the Hessian's diagonal, as a share of its mean
_AT_ONCE = 1 << 14  # rows with errors in memory at once


def with_feedback(weight: Tensor, hessian: Tensor, group: int) -> Int4Weights:
    """Round ``weight [N, K]`` column by column, and compensate each rounding error in the later
    columns that are correlated with it (GPTQ, Frantar et al. 2023, arXiv 2210.17323, algorithm 1).
    Groups of the largest inputs come first, while most columns are left to compensate their errors.

    With ``H = L L^T``, L lower triangular, errors E cost ``|E L|^2``, and column j of ``E L`` has
    no error before j. So, from the last column to the first, ``w_j + (E L)_j / L_jj`` is best for
    column j, and no inverse of H is needed.

    Args:
        hessian: H, ``[K, K]`` float32, symmetric: the inputs' ``X^T X`` up to a factor.
    """
    importance = hessian.diagonal().cpu().view(-1, group)
    order = importance.sum(1).argsort()
    indices = order.to(hessian.device)
    by_group = hessian.view(len(order), group, len(order), group)
    damped = torch.empty_like(hessian)
    for row, rows in zip(order.tolist(), damped.view(by_group.shape), strict=True):
        torch.index_select(by_group[row], 1, indices, out=rows)
    damped.diagonal().add_(DAMPING * importance.mean().clamp_min(1e-30))
    factor = torch.linalg.cholesky(damped, upper=True).mT
    importance = importance[order].flatten()
    ordered = weight.unflatten(1, (-1, group)).index_select(1, order.to(weight.device)).flatten(1)
    w4 = joined([_fed_back(rows, importance, factor, group) for rows in ordered.split(_AT_ONCE)])
    back = order.argsort()
    values = w4.values.unflatten(1, (-1, group)).index_select(1, back).flatten(1)
    return Int4Weights(values, w4.scales.index_select(1, back), w4.zeros.index_select(1, back))


def _fed_back(weight: Tensor, importance: Tensor, factor: Tensor, group: int) -> Int4Weights:
    """Round some rows, which do not depend on each other (`with_feedback`)."""
    exact = weight.float()
    owed = torch.zeros_like(exact)  # E L, of the errors so far
    unit = torch.eye(group, device=exact.device)
    groups = []
    for begin in reversed(range(0, exact.shape[1], group)):
        span = slice(begin, begin + group)
        # Row j: compensation of an error of column j in the columns before it.
        feedback = torch.linalg.solve_triangular(factor[span, span], unit, upper=False)
        rest = exact[:, span] + owed[:, span] @ feedback
        # The range of a group is the range of its compensated weights.
        _, scales, zeros = round_to_nearest(rest.cpu(), group, importance[span])
        scale, zero = scales[:, 0].to(rest.device), zeros[:, 0].to(rest.device)
        columns = rest.T.contiguous()
        rounded = torch.empty_like(columns, dtype=torch.uint8)
        for j in reversed(range(group)):
            rounded[j] = ((columns[j] - zero) / scale + 8).round_().clamp_(0, 15)
            value = (rounded[j] - 8.0) * scale + zero
            error = (columns[j] - value) / feedback[j, j]
            columns[:j].addr_(feedback[j, :j], error, alpha=-1)
            columns[j] = value
        groups.append((rounded.T.cpu(), scales, zeros))
        errors = exact[:, span] - columns.T
        with bfloat16_factors():  # 8 bits of an error suffice
            owed[:, :begin].addmm_(errors, factor[span, :begin])
    return Int4Weights(*(torch.cat(tensors[::-1], 1) for tensors in zip(*groups, strict=True)))
