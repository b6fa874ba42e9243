"""EOS and length cuts inside ``verify`` through torch (see csrc/tests/api/cuts_test.cpp)."""

from typing import Any

import pytest
import torch
from calls import blocks

import polyspec_ext as ps


@pytest.fixture
def block(device: torch.device) -> dict[str, Any]:
    return {**blocks(6, 3, 11, device=device), "draft_lengths": None}  # few ids: an EOS occurs


def test_ids_in_every_form(block: dict[str, Any]) -> None:
    block["temperature"] = 0.0
    device = block["seed"].device
    first = int(ps.verify(**block).tokens[0, 0])
    as_tensor = torch.tensor([first], device=device, dtype=torch.int32)
    for eos in (first, [first], (-1, first), as_tensor, as_tensor.expand(6, 1)):
        r = ps.verify(**block, eos=eos)
        assert r.num_emitted[0] == 1
        assert r.ended[0] == 1


def test_a_fault_behind_the_end_is_not_reported(device: torch.device) -> None:
    target = torch.zeros(2, 3, 4, device=device)
    target[:, 0, 2] = 9.0
    target[:, 1] = torch.nan
    tokens = torch.full((2, 2), 2, device=device)
    room = torch.tensor([1, 5], device=device)
    r = ps.verify(target, tokens, temperature=0.0, room=room)
    assert r.status.tolist() == [0, ps.Status.NAN]
    assert r.tokens.tolist() == [[2, -1, -1], [2, -1, -1]]
    assert ps.verify(target, tokens, temperature=0.0, eos=2).status.tolist() == [0, 0]
    bad = ps.verify(target, tokens, room=torch.tensor([-1, 0], device=device))
    assert bad.status.tolist() == [ps.Status.BAD_PARAMETER, 0]


def test_errors_name_the_argument(block: dict[str, Any]) -> None:
    device = block["seed"].device
    with pytest.raises(TypeError, match="eos: expected"):
        ps.verify(**block, eos=1.5)
    with pytest.raises(TypeError, match="eos: expected"):
        ps.verify(**block, eos=torch.zeros(2, device=device))
    with pytest.raises(ValueError, match=r"eos: expected ids >= 0.*given \[-2\]"):
        ps.verify(**block, eos=-2)
    with pytest.raises(ValueError, match=r"eos: expected shape \[E\] or \[B, E\] = \[6, E\]"):
        ps.verify(**block, eos=torch.zeros(5, 2, dtype=torch.int64, device=device))
    with pytest.raises(ValueError, match="room: expected an integer in"):
        ps.verify(**block, room=-1)
    with pytest.raises(ValueError, match="room: expected shape"):
        ps.verify(**block, room=torch.zeros(5, dtype=torch.int64, device=device))
