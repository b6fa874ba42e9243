"""What the steps of a batch keep at its place from round to round, where captured ones find it."""

from __future__ import annotations

import torch

from ..drafters.base import RowBuffer
from ..tensors import Parameters, Place, moved
from .plan import RoundPlan
from .state import StateRows
from .told import StatesWindow
from .trees import Tree


class Buffers:
    """What one batch size keeps at its place from round to round.

    Args:
        state: the state rows.
        sync_each_step: whether the host reads them after each step.
        plan: of the round.
        parameters: of the rows.
    """

    def __init__(
        self, state: StateRows, sync_each_step: bool, plan: RoundPlan, parameters: Parameters
    ) -> None:
        self.state, self.sync_each_step = state, sync_each_step
        self.plan, self.parameters = plan, parameters
        self.tree: Tree | None = None  # pending for the level above the drafter
        self.told: StatesWindow | None = None  # without host synchronisation
        # By the level that will verify them: what the pending tokens were drawn from, in memory
        # that stays, or where the level below has left its logits.
        self.rows: dict[int, RowBuffer | None] = {}
        self.direct: dict[int, RowBuffer] = {}
        # Whether the statistics of all rows that are pending for the target are known.
        self.known = True

    def handed_up(self, number: int, device: torch.device) -> RowBuffer | None:
        """Rows of the tokens that are pending for level `number`, which is on `device`."""
        rows = self.direct.get(number) or self.rows.get(number)
        if rows is None:
            return None
        statistics = rows.statistics if number > 1 or self.known else None
        return RowBuffer(
            moved(rows.logits, device), None if statistics is None else moved(statistics, device)
        )

    def keep_tree(self, tree: Tree) -> Tree:
        """`tree`, pending from now on, where the last one was if that is of its shape: captured
        steps find it there."""
        now = self.tree
        forms = [[None if one is None else one.shape for one in each] for each in (now or (), tree)]
        if now is None or forms[0] != forms[1]:
            drawn = None if tree.drawn is None else tree.drawn.clone()  # the drafter's own
            self.tree = tree._replace(drawn=drawn)
            return self.tree
        for own, new in zip(now, tree, strict=True):
            if own is not None and new is not None:
                own.copy_(new)
        return now

    def place(self) -> Place:
        """All of it that captured steps use."""
        tuples = [*self.rows.values(), self.tree]
        rows = [t for own in tuples if own is not None for t in own if t is not None]
        told = [] if self.told is None else self.told.tensors
        parameters = self.parameters.on(self.state.device).values()
        return Place(self, [*self.state.tensors, *parameters, *rows, *told])
