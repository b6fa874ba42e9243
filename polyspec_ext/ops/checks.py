"""Checks on the host of the operators' arguments; errors name the expected and the actual value.

Every call of ``sample`` and ``verify`` pays for the checks, so messages are formatted only before a
raise. TypeError: wrong type or dtype. ValueError: wrong shape, stride, device or range.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from .. import _C, arguments
from ..arguments import kind_of, wrong_kind
from ..errors import PolyspecError

_CPU = torch.device("cpu")
_BUILT_WITH_CUDA = bool(_C.build_info()["cuda"])

Common = tuple[int, torch.device]  # batch size and device of all tensors of a call
Real = tuple[float, torch.Tensor | None]  # a scalar and None, or an unused one and a tensor [B]
Int = tuple[int, torch.Tensor | None]


class Form:
    """Names in messages: `letter`, the maximum draft tokens of a request; `rows`, of all requests
    with offsets; `most`, the argument with the maximum then; `drafted`, draft tokens. Shapes of the
    target's logits and the draft tokens without offsets (`even`) and with offsets (`ragged`)."""

    def __init__(self, letter: str, rows: str, most: str, drafted: str) -> None:
        self.letter, self.most, self.drafted = letter, most, drafted
        self.even = f"[B, {letter}+1, V]", f"[B, {letter}]"
        self.ragged = f"[{rows}, V] (with offsets)", f"[{rows}]"


BLOCK = Form("K", "N", "draft_len", "draft tokens")
TREE = Form("N", "M", "nodes", "nodes")


class Layout(NamedTuple):
    """Batch size and device of a verification, maximum target rows of a request, the target's
    vocabulary size, shape of the draft tokens (`text`: in messages), and offsets ``[B+1]`` int64,
    the first row of each request; None: ``[B, K+1]`` rows."""

    common: Common
    rows: int
    vocab: int
    tokens: tuple[int, ...]
    text: str
    offsets: torch.Tensor | None


def _wrong_shape(name: str, expected: str, tensor: torch.Tensor) -> NoReturn:
    raise ValueError(f"{name}: expected shape {expected}, given {list(tensor.shape)}")


def logits(name: str, value: Any, shape: str, rank: int) -> Common:
    """Require a tensor of `rank` dimensions in fp32, bf16 or fp16, with unit stride along the
    vocabulary; return its batch and device. `shape` is for messages, such as "[B, V]"."""
    if not isinstance(value, torch.Tensor) or value.dtype not in arguments.LOGITS_DTYPES:
        wrong_kind(name, "a float32, bfloat16 or float16 tensor", value)
    sizes = value.shape
    if len(sizes) != rank:
        _wrong_shape(name, shape, value)
    vocab, device = sizes[-1], value.device
    if not 1 <= vocab < 2**31:
        _wrong_shape(name, f"{shape} with 1 <= V < 2**31", value)
    # (The strides of numpy's empty arrays are 0.)
    if vocab > 1 and value.stride(-1) != 1 and value.numel() > 0:
        raise ValueError(
            f"{name}: expected unit stride along the vocabulary, given stride {value.stride(-1)}; "
            "call .contiguous() on it"
        )
    if device != _CPU:
        _require_backend(name, device)
    return sizes[0], device


def _require_backend(name: str, device: torch.device) -> None:
    if device.type == "cuda":
        if not _BUILT_WITH_CUDA:
            raise PolyspecError(
                f"{name} is on {device}, but polyspec_ext was built without CUDA kernels: "
                "reinstall with POLYSPEC_CUDA=1 in the environment"
            )
    elif device.type not in ("cpu", "meta"):
        raise ValueError(f"{name}: expected a tensor on cpu or cuda, given one on {device}")


def layout(form: Form, target_logits: Any, offsets: Any, most: Any) -> Layout:
    """Require the target's logits, ``[B, K+1, V]``, or with offsets ``[N, V]``."""
    letter = form.letter
    if offsets is None:
        common = logits("target_logits", target_logits, form.even[0], 3)
        batch, rows, vocab = target_logits.shape
        if rows < 1:
            raise ValueError(
                f"target_logits: expected {letter}+1 >= 1 rows, given {list(target_logits.shape)}"
            )
        if most is not None and most != rows - 1:
            raise ValueError(f"{form.most}: expected {letter} = {rows - 1} or None, given {most}")
        return Layout(common, rows, vocab, (batch, rows - 1), form.even[1], None)
    count, device = logits("target_logits", target_logits, form.ragged[0], 2)
    if not isinstance(offsets, torch.Tensor) or offsets.dim() != 1 or offsets.shape[0] < 1:
        described = list(offsets.shape) if isinstance(offsets, torch.Tensor) else kind_of(offsets)
        raise ValueError(f"offsets: expected an integer tensor [B+1], given {described}")
    batch = offsets.shape[0] - 1
    offsets = table("offsets", offsets, (batch, device), (batch + 1,), "[B+1]", torch.int64)
    if most is None:
        raise ValueError(f"{form.most}: expected the most {form.drafted} of a request, given None")
    limit, _ = integer(form.most, most, (batch, device))
    vocab = target_logits.shape[1]
    return Layout((batch, device), limit + 1, vocab, (count,), form.ragged[1], offsets)


def holders(slots: Any, common: Common, *values: Any) -> tuple[torch.Tensor | None, Common]:
    """Return the slots as int64 [B], and (number, device) of the parameters at slots; their number
    is the length of the first tensor in `values`. Without slots: None and `common`."""
    if slots is None:
        return None, common
    slots = table("slots", slots, common, (common[0],), "[B]", torch.int64)
    for value in values:
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return slots, (value.shape[0], common[1])
    raise ValueError("slots: expected parameters that lie at slots, [S] tensors, given none")


def on_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Require a tensor on the device of the logits."""
    if tensor.device != device:
        raise ValueError(f"{name}: expected the logits' device {device}, given {tensor.device}")


def _per_request(name: str, tensor: Any, common: Common, dtype: torch.dtype) -> torch.Tensor:
    batch, device = common
    if tensor.shape != (batch,):
        _wrong_shape(name, f"[{batch}] (a value per request or slot) or a Python scalar", tensor)
    on_device(name, tensor, device)
    return _gathered(tensor, dtype)


def _gathered(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (tensor if tensor.dtype is dtype else tensor.to(dtype)).contiguous()


def per_request(
    common: Common,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    seed: Any,
    position: Any,
    round: Any,
) -> tuple[Any, ...]:
    """Return the sampling parameters in the operators' form: each as a scalar, and None or a tensor
    that overrides the scalar."""
    return (
        *real("temperature", temperature, common, arguments.TEMPERATURE_MAX),
        *integer("top_k", top_k, common),
        *real("top_p", top_p, common),
        *real("min_p", min_p, common),
        *_seed(seed, common),
        *integer("position", position, common),
        *integer("round", round, common, arguments.ROUND_MAX),
    )


def real(name: str, value: Any, common: Common, high: float = 1.0) -> Real:
    """Require a number in [0, high], or a floating tensor [B]."""
    if type(value) is float and 0.0 <= value <= high:  # the usual case, without another call
        return value, None
    if isinstance(value, torch.Tensor):
        if not value.dtype.is_floating_point:
            wrong_kind(name, "a number or a floating-point tensor", value)
        return 0.0, _per_request(name, value, common, torch.float32)
    return arguments.number(name, value, high), None


def integer(
    name: str, value: Any, common: Common, high: int = arguments.INT64_MAX, low: int = 0
) -> Int:
    """Require an integer in [low, high], or an integer tensor [B]."""
    if type(value) is int and low <= value <= high:
        return value, None
    if isinstance(value, torch.Tensor):
        if value.dtype not in arguments.INT_DTYPES:
            wrong_kind(name, "an integer or an integer tensor", value)
        return 0, _per_request(name, value, common, torch.int64)
    return arguments.whole(name, value, high, low), None


def _seed(value: Any, common: Common) -> Int:
    if isinstance(value, torch.Tensor):
        if value.dtype == torch.uint64:
            value = value.view(torch.int64)
        return integer("seed", value, common)
    bits, _ = integer("seed", value, common, arguments.SEED_MAX)
    return (bits if bits <= arguments.INT64_MAX else bits - 2**64), None


def table(
    name: str, value: Any, common: Common, shape: tuple[int, ...], text: str, dtype: torch.dtype
) -> torch.Tensor:
    """Require an integer tensor of an exact shape on the logits' device; return it contiguous, of
    `dtype`."""
    if not isinstance(value, torch.Tensor) or value.dtype not in arguments.INT_DTYPES:
        wrong_kind(name, "an integer tensor", value)
    if value.shape != shape:
        _wrong_shape(name, f"{text} = {list(shape)}", value)
    on_device(name, value, common[1])
    return _gathered(value, dtype)


def allowed(value: Any, common: Common, shape: tuple[int, ...], vocab: int, text: str) -> Any:
    """Return an allow-mask as contiguous int32 words ``[*shape, ceil(V / 32)]``, or None."""
    if value is None:
        return None
    if not isinstance(value, torch.Tensor) or value.dtype != torch.int32:
        wrong_kind("allowed", "an int32 tensor of 32 ids a word, or None", value)
    return table("allowed", value, common, (*shape, -(-vocab // 32)), text, torch.int32)


def ids(name: str, value: Any, common: Common) -> torch.Tensor:
    """Return token ids as int64 [1, E] (the same for all requests) or [B, E] on the logits' device,
    of an integer, integers (-1 is no id), or an integer tensor [E] or [B, E]."""
    batch, device = common
    if not isinstance(value, torch.Tensor):
        listed = list(value) if isinstance(value, Sequence) else [value]
        tokens = [arguments.index(name, entry) for entry in listed]
        if any(not -1 <= token <= arguments.INT64_MAX for token in tokens):
            raise ValueError(f"{name}: expected ids >= 0, or -1 for none, given {tokens}")
        return torch.tensor([tokens], dtype=torch.int64, device=device)
    if value.dtype not in arguments.INT_DTYPES:
        wrong_kind(name, "an integer, a sequence of integers or an integer tensor", value)
    if value.dim() == 1:
        value = value.unsqueeze(0)
    elif value.dim() != 2 or value.shape[0] != batch:
        _wrong_shape(name, f"[E] or [B, E] = [{batch}, E]", value)
    on_device(name, value, device)
    return _gathered(value, torch.int64)


def draws(value: Any, common: Common, count: int, text: str) -> torch.Tensor | None:
    """Require the caller's 64-bit draws as int64 (or uint64) bits, [B, count]."""
    if value is None:
        return None
    if not isinstance(value, torch.Tensor) or value.dtype not in (torch.int64, torch.uint64):
        wrong_kind("draws", "an int64 tensor of 64-bit draws", value)
    if value.dtype == torch.uint64:
        value = value.view(torch.int64)
    return table("draws", value, common, (common[0], count), text, torch.int64)


def drafted(
    logits_: Any,
    statistics: Any,
    target_to_draft: Any,
    common: Common,
    vocab: int,
    shape: tuple[int, int] | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Require draft logits (None: every proposal is deterministic); without them, no statistics and
    no `target_to_draft`. Return statistics and table, contiguous. `vocab`: the target's vocabulary
    size; `shape`: ``[B, K]`` of logits ``[B, K, Vd]``, None for a pool ``[R, Vd]``."""
    if logits_ is None:
        tensors = {"target_to_draft": target_to_draft, "draft_statistics": statistics}
        for name, value in tensors.items():
            if value is not None:
                raise ValueError(f"{name}: expected None without draft_logits, given a tensor")
        return None, None
    rank, form = (3, "[B, K, Vd]") if shape is not None else (2, "[R, Vd] (with draft_rows)")
    _, device = logits("draft_logits", logits_, form, rank)
    if device != common[1]:
        on_device("draft_logits", logits_, common[1])
    *rows, width = logits_.shape
    if shape is not None and tuple(rows) != shape:
        _wrong_shape("draft_logits", f"{form} = [{shape[0]}, {shape[1]}, Vd]", logits_)
    if width > vocab:
        raise ValueError(f"draft_logits: expected Vd <= V = {vocab}, given {width}")
    if statistics is not None:
        if not isinstance(statistics, torch.Tensor) or statistics.dtype != torch.int64:
            expected = "an int64 tensor of distributions from sample or verify"
            wrong_kind("draft_statistics", expected, statistics)
        form = "[R, 2]" if shape is None else "[B, K, 2]"
        statistics = table("draft_statistics", statistics, common, (*rows, 2), form, torch.int64)
    if target_to_draft is not None:
        target_to_draft = table(
            "target_to_draft", target_to_draft, common, (vocab,), "[V]", torch.int32
        )
    return statistics, target_to_draft
