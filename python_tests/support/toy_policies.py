"""Window policies that follow the text, as laws are enumerated with."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polyspec_ext import policies
from polyspec_ext._C import PolicyKind
from polyspec_ext.policies import Adaptive, RoundReport


@dataclass(eq=False)
class Fsm(Adaptive):
    """A kind of the library that Python has no public name for, as `QLearning`."""

    name, _kind = "fsm", PolicyKind.FSM


@dataclass(eq=False)
class QLearning(Adaptive):
    name, _kind = "q-learning", PolicyKind.Q_LEARNING


POLICIES: dict[str, type[Adaptive]] = {**policies.POLICIES, "fsm": Fsm, "q-learning": QLearning}


class Random:
    """A random function of the request, the text and `seed`, each window in 0 ... `largest`.

    Attributes:
        seen: the windows chosen, by request.
    """

    def __init__(self, seed: int = 0, largest: int = 3) -> None:
        self.seed, self.largest = seed, largest
        self.seen: dict[int, list[list[int]]] = {}
        self.reports: list[RoundReport] = []

    def next(self, report: RoundReport) -> Sequence[int]:
        chance = random.Random(str((self.seed, report.request, list(report.text))))
        windows = [chance.randint(0, self.largest) for _ in report.windows]
        self.seen.setdefault(report.request, []).append(windows)
        self.reports.append(report._replace(text=list(report.text)))
        return windows


class Listed:
    """The windows of a list, one after another and from the beginning again."""

    def __init__(self, windows: Sequence[Sequence[int]]) -> None:
        self.windows, self.at = windows, 0

    def next(self, report: RoundReport) -> Sequence[int]:
        if report.committed == 0:
            self.at = 0
        self.at += 1
        return self.windows[(self.at - 1) % len(self.windows)]


class Clock:
    """Passes times to a policy that follow the tokens, so that windows depend on both."""

    def __init__(self, policy: Adaptive) -> None:
        self.policy = policy

    def next(self, report: RoundReport) -> Sequence[int]:
        if report.committed == 0:
            self.policy.reset()  # one run of the enumeration knows nothing of another
        steps = [
            step._replace(seconds=1e-3 * (1 + (sum(report.text) + 3 * i) % 5 + step.tokens))
            for i, step in enumerate(report.steps)
        ]
        return self.policy.next(report._replace(steps=steps))


class Turns(Random):
    """Also switches drafters at random, by the text, and lets them sit out now and then."""

    def __init__(self, drafter: Any) -> None:
        super().__init__()
        self.drafter, self.drafters = drafter, set[int]()

    def next(self, report: RoundReport) -> Sequence[int]:
        self.drafter.active = random.Random(str(list(report.text))).randrange(
            len(self.drafter.members)
        )
        self.drafters.add(self.drafter.active)
        return super().next(report)
