"""Calls that wait inside a chain, in another thread, until a test lets them go on."""

import threading
from collections.abc import Callable
from typing import Any

import torch
import toy_rows

import polyspec_ext as ps

PROMPTS = [[1, 2, 3], [4], [5, 6]]

OPTIONS: dict[str, Any] = {"temperature": 1.0, "seed": [3, 4, 5], "eos_token_id": []}


class Gate:
    """Has a call wait at its n-th passage, until it is opened."""

    def __init__(self) -> None:
        self.left = -1
        self.reached, self.opened = threading.Event(), threading.Event()

    def close(self, at: int) -> None:
        self.left = at
        self.reached.clear()
        self.opened.clear()

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def passing(*args: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                self.reached.set()
                assert self.opened.wait(60)
            return call(*args)

        return passing


class Waiting:
    """A call in another thread, which waits at a gate inside of it."""

    def __init__(self, gate: Gate, at: int, call: Callable[[], Any]) -> None:
        gate.close(at)
        self.gate, self.call = gate, call
        self.result: Any = None

    def _run(self) -> None:
        try:
            self.result = self.call()
        except BaseException as error:
            self.result = error

    def __enter__(self) -> Any:
        self.thread = threading.Thread(target=self._run, name="the first")
        self.thread.start()
        assert self.gate.reached.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self.gate.opened.set()
        self.thread.join(60)
        assert not self.thread.is_alive()


def setting(faulty: int, method: str) -> tuple[ps.Chain, Gate]:
    levels, gate = toy_rows.make(3), Gate()
    setattr(levels[faulty], method, gate.before(getattr(levels[faulty], method)))
    return ps.Chain(levels, [3, 2]), gate


def generate(chain: ps.Chain) -> torch.Tensor:
    return chain.generate(PROMPTS, 12, **OPTIONS).sequences
