"""Stubs of the compiled module; the documentation is in csrc/include/polyspec/*.hpp."""

import enum
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

class StepKind(enum.Enum):
    DRAFT = 0
    VERIFY = 1
    DONE = 2

class Step:
    @property
    def kind(self) -> StepKind: ...
    @property
    def level(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def of_tail(self) -> int: ...

class Scheduler:
    def __init__(self, windows: Sequence[int], rounds: Sequence[int] = ...) -> None: ...
    def start(self, max_new_tokens: int) -> None: ...
    def next(self) -> Step: ...
    def report(self, level: int, emitted: int, eos: bool = False) -> None: ...
    def set_windows(self, windows: Sequence[int]) -> None: ...
    def set_tail(self, tail: int) -> None: ...
    def pending(self, level: int) -> int: ...
    @property
    def levels(self) -> int: ...
    @property
    def windows(self) -> list[int]: ...
    @property
    def rounds(self) -> list[int]: ...
    @property
    def tail(self) -> int: ...
    @property
    def committed(self) -> int: ...
    @property
    def done(self) -> bool: ...

class RoundShape:
    TOTAL: int
    ROOM: int
    STOPPED: int
    STEP: int
    TAIL_WINDOW: int
    CACHED: int
    ROUND: int
    WINDOW: int
    BOUND: int
    PENDING: int
    BLOCKS: int
    CLOSED: int
    COUNT: int
    POSITION: int
    ACCEPTED: int
    EMITTED: int
    ENDED: int
    STATUS: int
    OF_TAIL: int
    PER_STEP: int
    def __init__(self, levels: int, steps: int, capacity: int) -> None: ...
    @property
    def levels(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    def level_at(self, level: int) -> int: ...
    @property
    def log_at(self) -> int: ...
    @property
    def text_at(self) -> int: ...
    @property
    def words(self) -> int: ...

class PolicyKind(enum.Enum):
    FIXED = 0
    ONLINE = 1
    FSM = 2
    CACHED_FSM = 3
    Q_LEARNING = 4
    JOINT = 5

class PolicyOptions:
    def __init__(self) -> None: ...
    kind: PolicyKind
    windows: list[int]
    max_windows: list[int]
    history: int
    max_acceptance: float
    forgetting: float
    ngram: int
    learning_rate: float
    discount: float
    exploration: float
    seed: int
    guard: bool
    guard_loss: float
    guard_hold: int

class WindowPolicy:
    def __init__(self, options: PolicyOptions) -> None: ...
    def next(
        self,
        request: int,
        begins: bool,
        steps: Sequence[tuple[int, int, int, int, int, float, bool]],
        tokens: Sequence[int],
    ) -> list[int]: ...
    def reset(self) -> None: ...
    @property
    def levels(self) -> int: ...

def renewal_round(
    acceptance: Sequence[float], windows: Sequence[int], rounds: Sequence[int] = ...
) -> tuple[float, list[float], list[float]]: ...

class HostStep:
    @property
    def level(self) -> int: ...
    @property
    def most(self) -> int: ...
    @property
    def group(self) -> list[int]: ...
    @property
    def counts(self) -> list[int]: ...
    @property
    def first(self) -> list[int]: ...
    @property
    def lengths(self) -> list[int]: ...
    @property
    def positions(self) -> list[int]: ...
    @property
    def rounds(self) -> list[int]: ...
    @property
    def of_tail(self) -> list[int]: ...
    @property
    def input_ids(self) -> npt.NDArray[np.int64]: ...
    @property
    def plan(self) -> npt.NDArray[np.int64]: ...

class HostReport:
    @property
    def entries(self) -> list[list[int]]: ...
    @property
    def kept(self) -> list[list[int]]: ...
    @property
    def slots(self) -> npt.NDArray[np.int64]: ...

class HostRounds:
    def __init__(
        self, shape: RoundShape, words: npt.NDArray[np.int64], eos: npt.NDArray[np.int64]
    ) -> None: ...
    def next(self) -> HostStep | None: ...
    def report(
        self,
        step: HostStep,
        tokens: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64] | None,
        status: npt.NDArray[np.int32] | None,
        padding: int,
        ends: bool = True,
    ) -> HostReport: ...

def build_info() -> dict[str, str | bool]: ...
def status_bits() -> dict[str, int]: ...
