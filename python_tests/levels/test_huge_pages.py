"""Packed weights in memory of their own."""

import gc
import threading
from pathlib import Path

import pytest
import torch
from resident import resident_bytes

from polyspec_ext.levels.products import DenseLinear, in_huge_pages

HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MIB = 1 << 20


def random_bytes(size: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=random)


def huge_bytes() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("AnonHugePages"):
            return int(line.split()[1]) << 10
    return 0


def test_copies_are_the_bytes_and_do_not_overlap() -> None:
    sizes = [1, 63, 64, 65, 4097, 3 * MIB, 70 * MIB, 5]
    given = [random_bytes(size, seed) for seed, size in enumerate(sizes)]
    kept = [in_huge_pages(one) for one in given]
    for one, copy in zip(given, kept, strict=True):
        assert torch.equal(one, copy)
        assert copy.data_ptr() % 64 == 0
        assert copy.data_ptr() != one.data_ptr()
    kept[0].fill_(7)
    assert all(torch.equal(*both) for both in list(zip(given, kept, strict=True))[1:])


@pytest.mark.skipif(
    not HUGE.is_file() or "[never]" in HUGE.read_text(), reason="the system gives no huge pages"
)
def test_pages_are_huge() -> None:
    before = huge_bytes()
    kept = [in_huge_pages(random_bytes(20 * MIB, seed)) for seed in range(3)]
    # What is at the ends of the memory may lie in small ones.
    assert huge_bytes() - before >= 50 * MIB
    assert kept[0].numel() == 20 * MIB


def test_memory_goes_with_the_tensors() -> None:
    before = resident_bytes()
    layer = DenseLinear([torch.nn.Linear(4096, 8192)])  # 128 MiB
    assert resident_bytes() - before > 120 * MIB
    del layer
    gc.collect()
    assert resident_bytes() - before < 40 * MIB


def test_threads_get_parts_of_their_own() -> None:
    made: dict[int, list[torch.Tensor]] = {}

    def work(number: int) -> None:
        made[number] = [
            in_huge_pages(torch.full((1000,), number, dtype=torch.uint8)) for _ in range(200)
        ]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, parts in made.items():
        assert all((part == number).all() for part in parts)
