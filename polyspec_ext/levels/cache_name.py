"""What a model of transformers calls the cache among its arguments and outputs."""

from __future__ import annotations

import inspect
from typing import Any


def cache_name(model: Any) -> str:
    """``cache`` from transformers 5.24 on, ``past_key_values`` before it and of a user's own."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names and "past_key_values" not in names else "past_key_values"
