"""Host values and tensors on their way to a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyspec_ext.tensors import moved


class Copied:
    """Records how it is copied, as there may be no device to copy from."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)

    def to(self, device: torch.device, non_blocking: bool) -> tuple[torch.device, bool]:
        return device, non_blocking


@pytest.mark.parametrize(
    ("source", "target", "ahead"),
    [("cuda:0", "cpu", False), ("cpu", "cuda:0", False), ("cuda:0", "cuda:1", True)],
)
def test_the_host_waits_for_what_comes_to_it(source: str, target: str, ahead: bool) -> None:
    """A copy to the host's memory that is not waited for is read before it is there."""
    copied: Any = moved(Copied(source), torch.device(target))  # type: ignore[arg-type]
    assert copied == (torch.device(target), ahead)
    here: Any = Copied(source)
    assert moved(here, here.device) is here
