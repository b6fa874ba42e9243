"""Whether two calls of an operator gave the same."""

from __future__ import annotations

from typing import Any


def equal(a: Any, b: Any) -> bool:
    """All tensors bitwise, with NaN equal to itself, wherever they lie."""
    pairs = zip(a, b, strict=True)
    return all(x.cpu().nan_to_num(99.0).equal(y.cpu().nan_to_num(99.0)) for x, y in pairs)
