"""Host values and tensors on their way to a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polyspec_ext.tensors import moved


@pytest.mark.parametrize(
    ("source", "target", "ahead"),
    [("cuda:0", "cpu", False), ("cpu", "cuda:0", False), ("cuda:0", "cuda:1", True)],
)
def test_the_host_waits_for_what_comes_to_it(source: str, target: str, ahead: bool) -> None:
    """A copy to the host's memory that is not waited for is read before it is there."""
    # Records how it is copied, as there may be no device to copy from.
    copied: Any = SimpleNamespace(device=torch.device(source), to=lambda *to, **how: (to, how))
    assert moved(copied, torch.device(target)) == ((torch.device(target),), {"non_blocking": ahead})
    assert moved(copied, copied.device) is copied
