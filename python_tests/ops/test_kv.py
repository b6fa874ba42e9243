"""The cache operators through torch's dispatcher: results, refusals, opcheck, torch.compile."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from polyspec_ext.ops import decoder as cache_ops
from polyspec_ext.ops import trees


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
    stale = trees.pointers([torch.zeros(1, 1, 4, 4)], values)
    with pytest.raises(RuntimeError, match="pointers"):
        trees.compact_tree(keys, values, stale, lengths, path)
    both = [*keys, torch.zeros(1, 1, 8, 4)[:, :, ::2]]
    with pytest.raises(RuntimeError, match="strides"):
        trees.compact_tree(both, both, trees.pointers(both, both), lengths, path)


def test_lengths_are_cut_and_increased(device: torch.device) -> None:
    """The lengths before the new tokens are kept."""
    given, most, counts = (torch.randint(-2, 9, (5, 40), device=device) for _ in range(3))
    for before, cut, new in zip(given, most, counts, strict=True):
        lengths, base = before.clone(), torch.zeros_like(before)
        cache_ops.update_lengths(lengths, base, cut, new, 4)
        assert base.equal(torch.minimum(before, cut).clamp_min(0))
        assert lengths.equal(base + new.clamp(0, 4))
        cache_ops.update_lengths(lengths, None, None, None, 3)
        assert lengths.equal(base + new.clamp(0, 4) + 3)


def test_tokens_that_a_level_above_has_read_are_skipped(device: torch.device) -> None:
    """Up to the first token with logits."""
    given, above, counts, first = torch.randint(0, 9, (4, 40), device=device)
    lengths, base = given.clone(), torch.zeros_like(given)
    rest = torch.zeros(3, 40, dtype=torch.int64, device=device)
    cache_ops.update_lengths(lengths, base, None, counts, 8, above, first, rest)
    skipped = (above - given).clamp_min(0).minimum(counts).minimum(first)
    assert lengths.equal(given + counts)
    assert base.equal(given + skipped)
    assert rest.equal(torch.stack([skipped, counts - skipped, first - skipped]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_rows_from_a_position(dtype: torch.dtype, device: torch.device) -> None:
    """Out of slots, out of a ring, and into a ring with its window."""
    random = torch.Generator().manual_seed(3)

    def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape or (5,), generator=random).to(device)

    for size, width, count in ((7, 3, 9), (4, 6, 2), (9, 9, 1)):
        ring, new = numbers(0, 99, 5, size, count).to(dtype), numbers(0, 99, 5, width, count)
        new, at, less = new.to(dtype), numbers(-9, 20), numbers(0, 5)
        positions = (at - less)[:, None] + 2 + torch.arange(width, device=device)
        index = positions[..., None].expand(-1, -1, count)
        for slots, wraps in ((index.clamp(0, size - 1), False), (index % size, True)):
            taken = cache_ops.take_rows(ring, at, less, 2, width, wraps)
            assert taken.equal(ring.gather(1, slots))
            single = cache_ops.take_rows(ring[..., 0], at, less, 2, width, wraps)
            assert single.equal(taken[..., 0])
        part, skip, table, kept = numbers(0, 2), numbers(0, 3), numbers(0, 20, 5, 3), numbers(0, 20)
        begin, end = numbers(0, 20), numbers(0, 20)
        wanted, begins, ends = ring.clone(), begin.clone(), end.clone()
        for row in range(5):
            for j in range(width) if part[row] else ():
                at_j = int(positions[row, j])
                if j >= max(width - size, int(skip[row])) and at_j >= table[row, 1]:
                    wanted[row, at_j % size] = new[row, j]
            if part[row]:
                begins[row], ends[row] = min(int(positions[row, 0]), int(begin[row])), kept[row]
        cache_ops.put_rows(ring, new, at, less, 2, part, skip, table[:, 1], begin, end, kept)
        assert ring.equal(wanted)
        assert (begin.equal(begins), end.equal(ends)) == (True, True)


def test_opcheck() -> None:
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
    given = (keys, values, trees.pointers(keys, values), a["lengths"], path)
    with FakeTensorMode(allow_non_fake_inputs=True):  # pointers are of these tensors, no copies
        results = ops.compact_tree.default(*given)
    assert [(x.shape, x.dtype) for x in results] == [((2,), torch.int64), ((2,), torch.int32)]
    table = torch.zeros(2, 2, dtype=torch.int32)
    given = (a["cache_keys"], a["cache_values"], table, a["keys"], a["values"], a["lengths"], None)
    torch.library.opcheck(ops.append_paged.default, given, test_utils=tests)
    held = torch.zeros(2, dtype=torch.int64)
    given = (held.clone(), held.clone(), held, None, 2)
    torch.library.opcheck(ops.update_lengths.default, given, test_utils=tests)
    rows = torch.zeros(2, 4, 3)
    for given in ((rows, held, None, 1, 2, True), (rows[..., 0], None, held, 0, 5, False)):
        torch.library.opcheck(ops.take_rows.default, given, test_utils=tests)
    given = (rows, rows[:, :2].clone(), held, *[None] * 1, 0, *[None] * 3, held.clone(), None, None)
    torch.library.opcheck(ops.put_rows.default, given, test_utils=tests)
    free, count = torch.arange(3, dtype=torch.int32), torch.tensor([3])
    for op in (ops.reserve_pages.default, ops.truncate_pages.default):
        torch.library.opcheck(
            op, (table, held, free, count, torch.tensor([3, 1]), 2), test_utils=tests
        )


def test_pages() -> None:
    ops, new = torch.ops.polyspec, torch.tensor([1.0, 2.0, 3.0]).view(1, 1, 3, 1)
    keys, values = torch.zeros(2, 3, 1, 2, 1)  # 3 pages of 2 slots
    table, held = torch.full((1, 2), -1, dtype=torch.int32), torch.tensor([0])
    pool = (table, held, torch.arange(3, dtype=torch.int32), torch.tensor([3]))
    assert not ops.reserve_pages(*pool, torch.tensor([3]), 2).any()
    assert (table.tolist(), held.tolist(), pool[3].tolist()) == ([[2, 1]], [2], [1])
    cache = (keys, values, table, new, -new, torch.tensor([0]), torch.tensor([3]))
    assert [x.tolist() for x in ops.append_paged(*cache)] == [[3], [0]]
    assert keys.flatten().tolist() == [0, 0, 3, 0, 1, 2]
    assert values.equal(-keys)
    assert not ops.truncate_pages(*pool, torch.tensor([1]), 2).any()
    assert (table.tolist(), held.tolist(), pool[3].tolist()) == ([[2, -1]], [1], [2])
