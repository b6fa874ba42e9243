"""Host values and tensors on their way to a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toy_rows

import polyspec_ext as ps
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


@pytest.mark.parametrize("sampling", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
def test_a_filter_of_one_row_stays_beside_rows_without_it(sampling: dict[str, float]) -> None:
    """A row that keeps the likeliest token alone has its greedy text."""
    ((name, value),) = sampling.items()
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}[name]
    chain, prompts = ps.Chain(toy_rows.make(2), [2]), [[1, 2], [1, 2], [3]]
    options: dict[str, Any] = {"eos_token_id": [], name: [off, value, off]}
    out = chain.generate(prompts, 30, temperature=1.0, seed=3, **options)
    plain = chain.generate(prompts, 30, eos_token_id=[])
    assert out.sequences[1].equal(plain.sequences[1])
    assert not out.sequences[0].equal(plain.sequences[0])
