"""Prefills that overlap, with streams that record their waits."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from small_models import make

import polyspec_ext as ps
from polyspec_ext.runtime.prefill import SideStreams

GPU = torch.device("cuda", 0)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]]


def level(seed: int, layers: int, name: str) -> ps.HuggingFaceLevel:
    return ps.HuggingFaceLevel(make("llama", layers, seed), name=name)


class Stream:
    def __init__(self) -> None:
        self.done: set[str] = set()  # the operations before the next operation

    def work(self, name: str) -> set[str]:
        """Queue something; return the operations done when it begins."""
        before = set(self.done)
        self.done.add(name)
        return before

    def record_event(self) -> set[str]:
        return set(self.done)

    def wait_event(self, event: set[str]) -> None:
        self.done |= event

    def wait_stream(self, other: Any) -> None:
        self.done |= other.done


class Cuda:
    def __init__(self) -> None:
        self.main: dict[torch.device, Stream] = {}
        self.made: list[Stream] = []
        self._inside: list[Stream] = []

    def current_stream(self, device: torch.device) -> Stream:
        return self._inside[-1] if self._inside else self.main.setdefault(device, Stream())

    def Stream(self, device: torch.device) -> Stream:
        self.made.append(Stream())
        return self.made[-1]

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self._inside.append(stream)
        try:
            yield
        finally:
            self._inside.pop()


def test_side_streams_follow_what_was_queued_and_not_each_other() -> None:
    cuda = Cuda()
    streams = SideStreams(cuda)
    main = cuda.current_stream(GPU)
    for call in ("first", "second"):
        before = main.work(f"{call} before")
        with streams.open([GPU, GPU, torch.device("cpu")]):
            main.work(f"{call} target")
            for number in (1, 2):
                with streams.stream(GPU, number):
                    assert cuda.current_stream(GPU) is not main
                    seen = cuda.current_stream(GPU).work(f"{call} stream {number}")
                # Operations queued before, all of the last call, and none of this one.
                assert {*before, f"{call} before"} <= seen
                assert not {f"{call} target", f"{call} stream {3 - number}"} & seen
            with streams.stream(torch.device("cpu"), 3):
                assert cuda.current_stream(GPU) is main
        after = main.work(f"{call} after")
        assert {f"{call} target", f"{call} stream 1", f"{call} stream 2"} <= after
    assert len(cuda.made) == 2  # streams are kept


def test_side_streams_are_joined_after_an_exception() -> None:
    cuda = Cuda()
    streams = SideStreams(cuda)

    def fails() -> None:
        cuda.current_stream(GPU).work("half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), streams.open([GPU]), streams.stream(GPU, 1):
        fails()
    assert "half" in cuda.current_stream(GPU).work("next")
    with streams.open([GPU]):
        pass
    assert not streams._used


def test_levels_of_one_cache_read_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy may have the cache grow, which copies keys that the target has written."""
    target = level(0, 2, "target")
    copy = ps.HuggingFaceLevel(level(0, 2, "copy").model, shares_cache_with=target)
    chain = ps.Chain([target, copy, level(2, 1, "drafter")], [4, 2])
    used: list[int] = []
    real = SideStreams.stream

    def watched(self: SideStreams, device: torch.device, number: int) -> Any:
        used.append(number)
        return real(self, device, number)

    monkeypatch.setattr(SideStreams, "stream", watched)
    chain.generate(PROMPTS, 5, eos_token_id=[])
    assert used == [3]  # the drafter alone


class OnDevice(SideStreams):
    """The levels stay on the CPU, and are said to be on a device for as long as they prefill."""

    def open(self, devices: Sequence[torch.device]) -> Any:
        return super().open([GPU] * len(devices))

    def stream(self, device: torch.device, number: int) -> Any:
        assert device.type == "cpu"
        return super().stream(GPU, number)


@pytest.mark.parametrize("count", [1, 3])
def test_every_level_below_the_target_prefills_in_a_side_stream(count, monkeypatch) -> None:
    chain = ps.Chain([level(i, 1, f"level {i}") for i in range(3)], [4, 2])
    cuda = Cuda()
    seen: dict[str, set[str]] = {}
    lengths: list[list[int]] = []
    drafter: Any = chain.drafter
    for each in (*chain.levels, drafter.level):

        def watched(prompts: Any, level: Any = each, read: Any = each.prefill) -> None:
            seen[level.name] = cuda.current_stream(GPU).work(level.name)
            read(prompts)
            lengths.append(level.cache.lengths.tolist())

        monkeypatch.setattr(each, "prefill", watched)
    monkeypatch.setattr(chain.engine.caches, "streams", OnDevice(cuda))
    chain.batch(PROMPTS[:count], 9, eos_token_id=[]).advance()
    assert seen == {f"level {i}": set() for i in range(3)}  # no level waits
    assert cuda.current_stream(GPU).work("decoding") == set(seen)
    assert len(cuda.made) == 2
    assert lengths == [[len(prompt) - 1 for prompt in PROMPTS[:count]]] * 3
