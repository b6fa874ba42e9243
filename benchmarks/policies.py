"""Window policies of Liu, Park and Shen (ACL 2025) that lose on every set of prompts
(docs/benchmarks.md, "Window policies"), for the comparison; and all policies by name."""

from __future__ import annotations

from dataclasses import dataclass

from polyspec_ext._C import PolicyKind
from polyspec_ext.policies import Adaptive, CachedFsm, Fixed, Joint, Online


@dataclass(eq=False)
class Fsm(Adaptive):
    """A state machine per level: one up after a block that was accepted whole, one down after one
    of which less than half was."""

    name, _kind = "fsm", PolicyKind.FSM


@dataclass(eq=False)
class QLearning(Adaptive):
    """Tabular Q-learning of one up, stay, or one down per level; the reward is tokens per second
    over their running mean.

    Args:
        learning_rate: step size, in (0, 1].
        discount: in [0, 1).
        exploration: share of random actions, in [0, 1].
        seed: of these.
    """

    name, _kind = "q-learning", PolicyKind.Q_LEARNING
    learning_rate: float = 0.2
    discount: float = 0.5
    exploration: float = 0.1
    seed: int = 0


POLICIES: dict[str, type[Adaptive]] = {
    kind.name: kind for kind in (Fixed, Online, Fsm, CachedFsm, QLearning, Joint)
}
