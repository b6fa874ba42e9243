"""Check a caller's values and convert them to plain Python: numbers, containers, flags, dtypes,
devices.

Several values are a list, a tuple or another sequence, a numpy array or a tensor; a number is
Python's, numpy's or a tensor of no dimensions, and never a bool. Errors begin with the argument's
name. TypeError: wrong type. ValueError: wrong number, shape or range.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch

from polyspec_ext import _C

SIZE_MAX = 2**31 - 1
TEMPERATURE_MAX = 2.0**120  # see polyspec/sample.hpp
INT64_MAX = 2**63 - 1
ROUND_MAX = 2**32 - 1
SEED_MAX = 2**64 - 1
LEVEL_MAX = 2**16 - 1
NODE_MAX = 2**14 - 1

LOGITS_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))
INT_DTYPES = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))
RULES = {"token": 0, "block": 1}


def kind_of(value: object) -> str:
    """Return the type or dtype of a value, for a message."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of dtype {value.dtype}"
    return type(value).__name__


def wrong_kind(name: str, expected: str, value: object) -> NoReturn:
    """Raise a TypeError with the type or dtype of a value."""
    raise TypeError(f"{name}: expected {expected}, given {kind_of(value)}")


def shown(value: object) -> str:
    """Return a short description of `value` for an error."""
    if isinstance(value, torch.Tensor):
        # A nested tensor has no shape.
        shape = "" if value.is_nested else f" of shape {list(value.shape)}"
        return f"a {value.dtype} tensor{shape}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, Path):
        value = str(value)
    if value is None or isinstance(value, bool | int | float | str):
        text = repr(value)
        return text if len(text) <= 80 else f"{text[:77]}..."
    return type(value).__name__


def entries(name: str, value: Any) -> list[Any] | None:
    """Return the entries of a sequence, array or tensor; None for any other value. Entries of
    arrays and tensors are Python's numbers, or lists for several dimensions."""
    if isinstance(value, list | tuple):
        return list(value)
    if hasattr(value, "__array__") and hasattr(value, "tolist"):
        listed = _read(name, value)
        return listed if isinstance(listed, list) else None
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview):
        return list(value)
    return None


def listed(name: str, value: Any, of: str) -> list[Any]:
    """Require a sequence, array or tensor, and return its entries; `of`: their name in errors."""
    items = entries(name, value)
    if items is None:
        raise TypeError(f"{name}: expected a list of {of}, given {shown(value)}")
    return items


def _read(name: str, value: Any) -> Any:
    try:
        return value.tolist()
    except (RuntimeError, TypeError) as error:  # on the meta device, sparse, nested
        raise TypeError(
            f"{name}: expected values that can be read on the host, given {shown(value)}"
        ) from error


def _scalar(name: str, value: Any) -> Any:
    return _read(name, value) if hasattr(value, "__array__") else value


def real(name: str, value: Any, high: float = 1.0) -> float:
    """Require a number in [0, high]."""
    return float(number(name, _scalar(name, value), high))


def number(name: str, value: Any, high: float = 1.0) -> float:
    """Require a number in [0, high] that is Python's or numpy's."""
    if type(value) is not float and type(value) is not int:
        if type(value) is bool or not isinstance(value, numbers.Real):
            wrong_kind(name, "a number or a floating-point tensor", value)
        value = float(value)
    if not 0.0 <= value <= high:
        bound = f"a finite number >= 0, at most {high:.4g}" if high > 1.0 else "a number in [0, 1]"
        raise ValueError(f"{name}: expected {bound}, given {value}")
    return value  # type: ignore[no-any-return]


def between(name: str, value: Any, low: float, high: float) -> float:
    """Require a number in [low, high]."""
    plain = _scalar(name, value)
    if isinstance(plain, bool) or not isinstance(plain, numbers.Real):
        raise TypeError(f"{name}: expected a number, given {shown(value)}")
    number: Any = plain  # of any size: `float` raises an OverflowError
    if not low <= number <= high:
        expected = f"expected a number in [{low:g}, {high:g}]"
        raise ValueError(f"{name}: {expected}, given {shown(plain)}")
    return float(number)


def integer(name: str, value: Any, high: int = INT64_MAX, low: int = 0) -> int:
    """Require an integer in [low, high]."""
    return whole(name, _scalar(name, value), high, low)


def whole(name: str, value: Any, high: int = INT64_MAX, low: int = 0) -> int:
    """Require an integer in [low, high] that is Python's or numpy's."""
    if type(value) is not int:
        value = index(name, value)
    if not low <= value <= high:
        raise ValueError(f"{name}: expected an integer in [{low}, {high}], given {value}")
    return value  # type: ignore[no-any-return]


def index(name: str, value: Any) -> int:
    try:
        if not isinstance(value, (bool, torch.Tensor)):
            return operator.index(value)
    except TypeError:  # classes and arrays have an `__index__` that raises
        pass
    wrong_kind(name, "an integer or an integer tensor", value)


def rule(value: Any) -> int:
    """Return the number of a rule in the operators."""
    number = RULES.get(value) if isinstance(value, str) else None
    if number is None:
        raise ValueError(f"rule: expected 'token' or 'block', given {value!r}")
    return number


def integers(name: str, values: Sequence[Any]) -> list[int]:
    """Require integers of any size and sign, and return them as Python's."""
    if all(type(value) is int for value in values):
        return list(values)
    ints = []
    for value in values:
        plain = _scalar(name, value)
        number: Any = None if isinstance(plain, bool) else plain
        try:
            ints.append(operator.index(number))
        except TypeError:
            raise TypeError(f"{name}: expected an integer, given {shown(plain)}") from None
    return ints


def int64(name: str, value: Any) -> int:
    """Require an integer in [-2**63, 2**63)."""
    number = integers(name, [value])[0]
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{name}: expected an integer in [-2**63, 2**63), given {number}")
    return number


def token_ids(name: str, values: Sequence[Any], vocab_size: int) -> list[int]:
    """Require ids in [0, vocab_size)."""
    ids = integers(name, values)
    require_ids(name, ids, vocab_size)
    return ids


def require_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Refuse integers outside [0, vocab_size)."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        bad = next(token for token in ids if not 0 <= token < vocab_size)
        raise ValueError(f"{name}: expected token ids in [0, {vocab_size}), given {bad}")


def sizes(name: str, value: Any, count: int, of: int) -> list[int]:
    """Require `count` integers >= 0, for a chain of `of` levels."""
    items = entries(name, value)
    expected = f"{name}: expected {count} integers >= 0 for {of} levels"
    if items is None:
        raise TypeError(f"{expected} in a list, tuple, array or tensor, given {shown(value)}")
    if len(items) != count:
        raise ValueError(f"{expected}, given {items}")
    return [integer(name, item, SIZE_MAX) for item in items]


def row_integers(name: str, value: Any) -> list[int]:
    """Require integers in a container, an integer per row."""
    items = entries(name, value)
    if items is None:
        raise TypeError(f"{name}: expected integers in a list, given {shown(value)}")
    return integers(name, items)


def per_row(name: str, value: Any, count: int) -> list[Any]:
    """Return `count` values, a value per row; repeat a single value."""
    items = entries(name, value)
    if items is None:
        return [value] * count
    if len(items) != count:
        raise ValueError(
            f"{name}: expected one value or one for each of {count} prompts, given {len(items)}"
        )
    return items


def bit(name: str, value: Any) -> bool:
    """Require 0 or 1, of any type."""
    value = _scalar(name, value)
    if not isinstance(value, bool | int | float) or value not in (0, 1):
        raise ValueError(f"{name}: expected 0 or 1, given {shown(value)}")
    return bool(value)


def strings(name: str, value: Any) -> list[str]:
    """Require a string or several; None: none."""
    if value is None:
        return []
    texts = [value] if isinstance(value, str) else entries(name, value)
    if texts is None or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{name}: expected a string or a list of strings, given {shown(value)}")
    return texts


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, given {shown(value)}")
    return value


def instance(name: str, value: Any, kind: type, none: bool = True) -> None:
    """Require an object of a class or protocol, or None where `none` allows it."""
    if (value is not None or not none) and (isinstance(value, type) or not isinstance(value, kind)):
        other = " or None" if none else ""
        raise TypeError(f"{name}: expected a {kind.__name__}{other}, given {shown(value)}")


def function(name: str, value: Any, none: bool = False) -> None:
    """Require a callable, or None where `none` allows it."""
    if not callable(value) and not (none and value is None):
        other = " or None" if none else ""
        raise TypeError(f"{name}: expected a function{other}, given {shown(value)}")


def label(name: str, value: Any) -> None:
    """Require a string that is not empty, or None."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name}: expected a string or None, given {shown(value)}")
    if value == "":
        raise ValueError(f"{name}: expected a string or None, given ''")


Switch = bool | Literal["auto"]


def switch(name: str, value: Any) -> None:
    """Require True, False or "auto"."""
    if not isinstance(value, bool) and not (isinstance(value, str) and value == "auto"):
        raise ValueError(f'{name}: expected True, False or "auto", given {shown(value)}')


def dtype(name: str, value: Any) -> torch.dtype | None:
    """Return a data type of logits from a dtype or its name; None stays None."""
    kind = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if kind is None and value is None:
        return None
    if isinstance(kind, torch.dtype) and kind in LOGITS_DTYPES:
        return kind
    wrong = ValueError if isinstance(value, torch.dtype | str) else TypeError
    text = value if isinstance(value, torch.dtype) else shown(value)
    raise wrong(
        f"{name}: expected torch.float32, torch.bfloat16, torch.float16, the name of one, or None, "
        f"given {text}"
    )


def loaded_dtype(name: str, value: Any) -> torch.dtype | Literal["auto"] | None:
    """Return `dtype`, or "auto", the data type of the checkpoint."""
    return "auto" if isinstance(value, str) and value == "auto" else dtype(name, value)


def path(name: str, value: Any) -> Path:
    """Return a path, whether or not it exists."""
    if not isinstance(value, str | Path):
        raise TypeError(f"{name}: expected a path, given {shown(value)}")
    if not str(value) or "\0" in str(value):
        raise ValueError(f"{name}: expected a path, given {shown(str(value))}")
    return Path(value)


def model(name: str, value: Any) -> None:
    """Require a loaded causal language model of `transformers`, or a wrapper of such a model."""
    if isinstance(value, torch.nn.Module) and hasattr(value, "config"):
        return
    hint = ""
    if isinstance(value, str | Path):
        hint = "; transformers.AutoModelForCausalLM.from_pretrained loads it"
    raise TypeError(f"{name}: expected a loaded model of transformers, given {shown(value)}{hint}")


def supported_device(name: str, value: Any) -> torch.device:
    """Return a device of a type that the operators support: CPU, or CUDA in a CUDA build."""
    expected = f"{name}: expected a torch.device or a name such as 'cpu' or 'cuda:0', given"
    if not isinstance(value, str | torch.device):
        raise TypeError(f"{expected} {shown(value)}")
    try:
        dev = torch.device(value)
    except RuntimeError:
        raise ValueError(f"{expected} {value!r}") from None
    if dev.type not in ("cpu", "cuda"):
        raise ValueError(f"{name}: expected cpu or cuda, given {dev}")
    if dev.type == "cuda" and not _C.build_info()["cuda"]:
        raise ValueError(
            f"{name}: expected the CPU, given {dev}: polyspec_ext was built without CUDA kernels; "
            "reinstall it with POLYSPEC_CUDA=1 in the environment"
        )
    return dev


def device(name: str, value: Any) -> torch.device | None:
    """Return an available device that the operators support; None stays None."""
    if value is None:
        return None
    dev = supported_device(name, value)
    if dev.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (dev.index or 0) >= count:
            build = "" if torch.version.cuda else " and a build of torch without CUDA"
            raise ValueError(
                f"{name}: expected a device of this machine, given {dev} with {count} CUDA "
                f"devices that torch can use{build}"
            )
    return dev
