"""Code that a file of tensors must not contain."""

from __future__ import annotations

import os
from typing import Any


class Code:
    """Makes a directory "ran" when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)
