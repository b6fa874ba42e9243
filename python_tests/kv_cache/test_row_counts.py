"""Numbers of rows, on the host where it knows them and on the device."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from polyspec_ext.levels import RowCounts

CPU, META = torch.device("cpu"), torch.device("meta")


def test_of_the_host() -> None:
    counts = RowCounts([3, 0, 5])
    assert counts.host == (3, 0, 5)
    assert isinstance(counts, Sequence)
    assert (list(counts), len(counts), counts[2], max(counts)) == ([3, 0, 5], 3, 5, 5)
    made = counts.on(CPU)
    assert (made.dtype, made.tolist()) == (torch.int64, [3, 0, 5])
    assert counts.on(CPU) is made
    assert torch.as_tensor(counts).tolist() == [3, 0, 5]  # as users' drafters have it
    assert RowCounts.of(counts) is counts
    assert counts.less(1).host == (2, 0, 4)
    assert counts.less(1, 3).host == (2, 0, 3)
    assert RowCounts([4, 4]).all(4)
    assert not RowCounts([4, 3]).all(4)


def test_of_the_device_nothing_is_read() -> None:
    """A tensor of the meta device has no values to read."""
    counts = RowCounts.of(torch.empty(3, dtype=torch.int32, device=META))
    for own in (counts, counts.less(1), counts.less(0, 1)):
        assert own.host is None
        assert (own.on(META).dtype, own.on(META).shape) == (torch.int64, (3,))
        assert not own.all(0)
        assert len(own) == 3
    counts = RowCounts(None, torch.tensor([3, 0, 5]))
    assert counts.less(1, 3).on(CPU).tolist() == [2, 0, 3]
    assert list(counts) == [3, 0, 5]
    assert counts[0] == 3


@pytest.mark.parametrize("on_host", [False, True])
def test_read_of_a_tensor(on_host: bool) -> None:
    tensor = torch.tensor([2, 7])
    counts = RowCounts.read(tensor, on_host)
    assert counts.host == ((2, 7) if on_host else None)
    assert counts.on(CPU) is tensor
