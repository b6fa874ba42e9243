"""Rounds without host synchronisation, and the reads of the host."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from recorder import READS
from torch.utils._python_dispatch import TorchDispatchMode

import polyspec_ext as ps
from polyspec_ext.runtime.graphs import Queue
from polyspec_ext.runtime.rows import Record
from polyspec_ext.stats import LevelStats

# Methods of a tensor that give the host a value.
READING = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")


@contextmanager
def counted() -> Iterator[list[Record]]:
    """The rounds without synchronisation meanwhile, as the host reads them."""
    seen: list[Record] = []
    read = Queue.read

    def watched(self: Queue, record: torch.Tensor, *rest: Any) -> Record:
        seen.append(read(self, record, *rest))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Queue, "read", watched)
        yield seen


def same(a: ps.Output, b: ps.Output) -> None:
    assert a.sequences.equal(b.sequences)
    for mine, theirs in zip(a.logprobs, b.logprobs, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)
    for mine, theirs in zip([a.stats, *a.requests], [b.stats, *b.requests], strict=True):
        same_counts(mine, theirs)


def same_counts(a: Any, b: Any) -> None:
    """Compare all but seconds and passes, of which rounds without the host do more."""
    assert a.num_new_tokens == b.num_new_tokens
    for mine, theirs in zip(a.levels, b.levels, strict=True):
        for name in LevelStats.__slots__:
            if "seconds" in name or name == "num_forward_passes":
                continue
            one, other = getattr(mine, name), getattr(theirs, name)
            if name == "emitted_per_verification":  # rows of a batch in any order
                one, other = sorted(one), sorted(other)
            assert one == other, name


def same_without_the_host(followed, alone, prompts, *arguments, **options):
    """Return the texts of `alone`, as `followed` generates them, and its rounds without the
    host."""
    with counted() as rounds:
        wanted = followed.generate(prompts, *arguments, **options)
    assert not rounds
    with counted() as rounds:
        got = alone.generate(prompts, *arguments, **options)
    same(got, wanted)
    return got, rounds


class Unseeing(TorchDispatchMode):
    """Refuses reads of a tensor's value on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in READS, name
        return func(*args, **(kwargs or {}))


@dataclass
class Seen:
    """Rounds that the host has read, and how often it has read a tensor in them before."""

    reads: int = 0
    synchronisations: int = 0


@contextmanager
def watched(chain: ps.Chain) -> Iterator[Seen]:
    """Counts the host's reads in rounds without synchronisation, and refuses others."""
    seen, inside = Seen(), False
    engine: Any = chain.engine
    run, read = engine._run_steps, Queue.read

    def blind(*arguments: Any) -> Any:
        nonlocal inside
        if engine.rows.on_host:
            return run(*arguments)
        inside = True
        with Unseeing():
            return run(*arguments)

    def reading(self: Queue, record: torch.Tensor, *rest: Any) -> Record:
        nonlocal inside
        inside, seen.reads = False, seen.reads + 1
        assert record.dtype == torch.int32
        return read(self, record, *rest)

    with pytest.MonkeyPatch.context() as patch:
        for name in READING:
            real: Callable[..., Any] = getattr(torch.Tensor, name)

            def synchronising(self: Any, *a: Any, real: Callable[..., Any] = real, **k: Any) -> Any:
                seen.synchronisations += inside
                return real(self, *a, **k)

            patch.setattr(torch.Tensor, name, synchronising)
        patch.setattr(engine, "_run_steps", blind)
        patch.setattr(Queue, "read", reading)
        yield seen
    assert not inside
