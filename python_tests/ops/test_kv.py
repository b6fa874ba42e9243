"""The cache operators through torch's dispatcher: results, refusals, opcheck, torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from polyspec_ext.ops import decoder as cache_ops
from polyspec_ext.ops.decoder import CacheStatus

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]


def numbers(*shape: int, dtype: torch.dtype, device: Any = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-99, 99, shape, generator=generator).to(dtype).to(device)


def guarded(*shape: int, dtype: torch.dtype, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A view with other memory around every vector, and that memory."""
    whole = numbers(*[n + 2 for n in shape], dtype=dtype, device=device)
    return whole[tuple(slice(1, -1) for _ in shape)], whole


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_are_reserved_filled_and_given_back(dtype: torch.dtype, device: torch.device) -> None:
    b, h, t, d, pages, size, most = 3, 2, 5, 8, 8, 4, 4
    keys, whole_keys = guarded(pages, h, size, d, dtype=dtype, device=device)
    values, whole_values = guarded(pages, h, size, d, dtype=dtype, device=device)
    table = torch.full((b, most), -1, dtype=torch.int32, device=device)
    held = torch.zeros(b, dtype=torch.int64, device=device)
    free = torch.arange(pages, dtype=torch.int32, device=device)
    free_count = torch.tensor([pages], device=device)
    lengths = torch.tensor([6, 0, 3], device=device)
    counts = torch.tensor([5, 5, 1], device=device)
    pool = (table, held, free, free_count)
    assert not torch.ops.polyspec.reserve_pages(*pool, lengths + counts, size).any()
    assert table.tolist() == [[7, 6, 5, -1], [4, 3, -1, -1], [2, -1, -1, -1]]
    assert held.tolist() == [3, 2, 1]
    assert free_count.tolist() == [2]
    new_keys = numbers(b, h, t, d, dtype=dtype, device=device)
    expected_keys, expected_values = whole_keys.clone(), whole_values.clone()
    for row, (length, count) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
        for i in range(count):
            page = int(table[row, (length + i) // size])
            expected_keys[page + 1, 1:-1, (length + i) % size + 1, 1:-1] = new_keys[row, :, i]
            expected_values[page + 1, 1:-1, (length + i) % size + 1, 1:-1] = new_keys[row, :, i]
    new_lengths, status = torch.ops.polyspec.append_paged(
        keys, values, table, new_keys, new_keys, lengths, counts
    )
    assert not status.any()
    assert new_lengths.tolist() == [11, 5, 4]
    assert torch.equal(whole_keys, expected_keys)
    assert torch.equal(whole_values, expected_values)
    assert not torch.ops.polyspec.truncate_pages(
        *pool, torch.tensor([4, 5, 0], device=device), size
    ).any()
    assert table.tolist() == [[7, -1, -1, -1], [4, 3, -1, -1], [-1, -1, -1, -1]]
    assert free[: int(free_count)].tolist() == [0, 1, 6, 5, 2]
    status = torch.ops.polyspec.reserve_pages(*pool, torch.tensor([16, 5, 16], device=device), size)
    assert status.tolist() == [0, 0, int(CacheStatus.CACHE_FULL)]  # three pages went to row 0
    assert held.tolist() == [4, 2, 0]


def arguments() -> dict[str, Any]:
    return {
        "cache_keys": torch.zeros(2, 2, 8, 4),
        "cache_values": torch.zeros(2, 2, 8, 4),
        "keys": torch.ones(2, 2, 3, 4),
        "values": torch.ones(2, 2, 3, 4),
        "lengths": torch.zeros(2, dtype=torch.int64),
        "counts": None,
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("keys", torch.ones(2, 2, 3, 5)),
        ("keys", torch.ones(2, 3, 3, 4)),
        ("keys", torch.ones(2, 2, 3, 4, dtype=torch.float16)),
        ("keys", torch.ones(2, 2, 4, 3).transpose(2, 3)),
        ("values", torch.ones(2, 2, 2, 4)),
        ("values", torch.ones(2, 3, 4)),
        ("lengths", torch.zeros(3, dtype=torch.int64)),
        ("lengths", torch.zeros(2, dtype=torch.int32)),
        ("lengths", torch.zeros(4, dtype=torch.int64)[::2]),
        ("counts", torch.zeros(1, dtype=torch.int64)),
        ("cache_values", torch.zeros(2, 2, 7, 4)),
        ("cache_keys", torch.zeros(1, 2, 8, 4)),
    ],
)
def test_append_refuses_by_name(name: str, value: torch.Tensor) -> None:
    given = {**arguments(), name: value}
    with pytest.raises(RuntimeError, match="expected"):
        cache_ops.append(**given)
    assert not given["cache_keys"].any()


def test_sizes_and_pointers_are_refused() -> None:
    wide = {
        k: v.double() if v is not None and v.is_floating_point() else v
        for k, v in arguments().items()
    }
    with pytest.raises(RuntimeError, match="element_size: expected 1, 2 or 4, given 8"):
        cache_ops.append(**wide)
    with pytest.raises(RuntimeError, match="sinks: expected"):
        cache_ops.append(**arguments(), ring=True, sinks=8)
    keys, values = [torch.zeros(1, 1, 4, 4)], [torch.zeros(1, 1, 4, 4)]
    lengths, path = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
    stale = cache_ops.pointers([torch.zeros(1, 1, 4, 4)], values)
    with pytest.raises(RuntimeError, match="pointers"):
        cache_ops.compact_tree(keys, values, stale, lengths, path)
    both = [*keys, torch.zeros(1, 1, 8, 4)[:, :, ::2]]
    with pytest.raises(RuntimeError, match="strides"):
        cache_ops.compact_tree(both, both, cache_ops.pointers(both, both), lengths, path)


def test_lengths_are_cut_and_increased(device: torch.device) -> None:
    """In place; the lengths before the new tokens are kept."""
    given, most, counts = (torch.randint(-2, 9, (5, 40), device=device) for _ in range(3))
    for before, cut, new in zip(given, most, counts, strict=True):
        lengths, base = before.clone(), torch.zeros_like(before)
        cache_ops.update_lengths(lengths, base, cut, new, 4)
        assert base.equal(torch.minimum(before, cut).clamp_min(0))
        assert lengths.equal(base + new.clamp(0, 4))
        cache_ops.update_lengths(lengths, None, None, None, 3)
        assert lengths.equal(base + new.clamp(0, 4) + 3)


def test_opcheck() -> None:
    """Schemas name the written arguments, and fake implementations agree with the real ones."""
    ops = torch.ops.polyspec
    tests = ("test_schema", "test_faketensor")
    a = arguments()
    given = (
        a["cache_keys"],
        a["cache_values"],
        a["keys"],
        a["values"],
        a["lengths"],
        None,
        False,
        0,
    )
    torch.library.opcheck(ops.append.default, given, test_utils=tests)
    keys, values = [a["cache_keys"]], [a["cache_values"]]
    path = torch.tensor([[0, 1, -1], [1, -1, -1]])
    given = (keys, values, cache_ops.pointers(keys, values), a["lengths"], path)
    with FakeTensorMode(allow_non_fake_inputs=True):  # pointers are of these tensors, no copies
        results = ops.compact_tree.default(*given)
    assert [(x.shape, x.dtype) for x in results] == [((2,), torch.int64), ((2,), torch.int32)]
    table = torch.zeros(2, 2, dtype=torch.int32)
    given = (a["cache_keys"], a["cache_values"], table, a["keys"], a["values"], a["lengths"], None)
    torch.library.opcheck(ops.append_paged.default, given, test_utils=tests)
    held = torch.zeros(2, dtype=torch.int64)
    given = (held.clone(), held.clone(), held, None, 2)
    torch.library.opcheck(ops.update_lengths.default, given, test_utils=tests)
    free, count = torch.arange(3, dtype=torch.int32), torch.tensor([3])
    for op in (ops.reserve_pages.default, ops.truncate_pages.default):
        torch.library.opcheck(
            op, (table, held, free, count, torch.tensor([3, 1]), 2), test_utils=tests
        )


def test_under_torch_compile() -> None:
    def step(
        keys: torch.Tensor, values: torch.Tensor, new: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        after, _ = cache_ops.append(keys, values, new * 2, new + 1, lengths)
        return after + keys[:, :, 0, 0].sum().to(torch.int64) * 0

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    a, b = arguments(), arguments()
    lengths = torch.tensor([1, 4])
    assert torch.equal(step(a["cache_keys"], a["cache_values"], a["keys"], lengths), lengths + 3)
    assert torch.equal(
        compiled(b["cache_keys"], b["cache_values"], b["keys"], lengths), lengths + 3
    )
    assert torch.equal(a["cache_keys"], b["cache_keys"])
    assert a["cache_keys"].any()
