"""Stored values, and seconds of passes."""

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from polyspec_ext.planning.measure import pass_seconds
from polyspec_ext.planning.store import Store, default_store

KEY = {"which": 0}


class SlowLevel:
    """A level with passes of `cost` seconds per token."""

    vocab_size, max_length = 11, 40
    now = 0.0  # of all levels
    busy: Iterator[float] = itertools.repeat(0.0)
    passes: list[tuple[float, int]]

    def __init__(self, cost: float) -> None:
        self.cost, self.length = cost, 0

    def prefill(self, tokens: torch.Tensor) -> None:
        self.length = tokens.shape[1]

    def forward(self, tokens: torch.Tensor, keep: int) -> torch.Tensor:
        assert int(tokens.max()) < self.vocab_size
        SlowLevel.now += self.cost * tokens.shape[1] + next(self.busy)
        self.passes.append((self.cost, tokens.shape[1]))
        self.length += tokens.shape[1]
        assert self.length <= self.max_length
        return torch.zeros(1, keep, self.vocab_size)

    def rollback(self, lengths: Sequence[int]) -> None:
        self.length = lengths[0]


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlowLevel, "now", 0.0)
    monkeypatch.setattr(SlowLevel, "passes", [], raising=False)


def test_passes_are_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = itertools.cycle([7.0, 0.0, 9.0])  # with something else, now and then
    monkeypatch.setattr(SlowLevel, "busy", busy)
    levels: list[Any] = [SlowLevel(1.0), SlowLevel(2.0)]
    found = pass_seconds(levels, (1, 2), repeats=9, limit=1e9, clock=lambda: SlowLevel.now)
    assert found == [{1: 1.0, 2: 2.0}, {1: 2.0, 2: 4.0}]
    order = [cost for cost, width in SlowLevel.passes if width == 1]
    assert order == [1.0, 2.0, 2.0, 1.0] * 5
    assert all(level.length == 38 for level in levels)
    with pytest.raises(ValueError, match="widths >= 1"):
        pass_seconds(levels, (0,))


def test_time_asleep_is_not_counted_with_one_thread() -> None:
    class Sleepy(SlowLevel):
        def forward(self, tokens: torch.Tensor, keep: int) -> torch.Tensor:
            time.sleep(0.01)
            return super().forward(tokens, keep)

    level: Any = Sleepy(1.0)
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2):
            torch.set_num_threads(count)
            found += pass_seconds([level], (1,), repeats=3)
    finally:
        torch.set_num_threads(threads)
    assert found[0][1] < 0.01 <= found[1][1]


def test_slow_levels_are_timed_twice() -> None:
    level: Any = SlowLevel(3.0)
    pass_seconds([level], (1,), clock=lambda: SlowLevel.now)
    assert len(SlowLevel.passes) == 3  # and once untimed


def test_values_outlive_the_process(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    Store(folder).put(KEY, [1, 2])
    assert Store(folder).get(KEY) == [1, 2]
    assert Store(folder).get({"which": 1}) is None
    Store(folder).put(KEY, [3])
    assert Store(folder).get(KEY) == [3]
    Store(folder).clear()
    assert Store(folder).get(KEY) is None


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe\x00", b"[]", b'{"key": {"which": 0}}'])
def test_a_corrupt_file_is_as_good_as_none(tmp_path: Path, text: bytes) -> None:
    Store(tmp_path).put(KEY, 1)
    (file,) = tmp_path.iterdir()
    file.write_bytes(text)
    assert Store(tmp_path).get(KEY) is None
    Store(tmp_path).put(KEY, 2)
    assert Store(tmp_path).get(KEY) == 2


@pytest.mark.parametrize("folder", [None, "file/folder"])
def test_without_a_folder_one_process_remembers(tmp_path: Path, folder: str | None) -> None:
    """As in a home that is missing or cannot be written to."""
    (tmp_path / "file").touch()
    store = Store(None if folder is None else tmp_path / folder)
    store.put(KEY, 1)
    assert store.get(KEY) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert default_store().folder is None
