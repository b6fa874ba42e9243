"""What the steps of a batch keep at its place from round to round, where captured ones find it."""

from __future__ import annotations

import torch

from ..drafters.base import RowBuffer
from ..tensors import Place, RowParameters, moved
from .hidden import HiddenWindow
from .plan import RoundPlan
from .state import StateRows
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
        self, state: StateRows, sync_each_step: bool, plan: RoundPlan, parameters: RowParameters
    ) -> None:
        self.state, self.sync_each_step = state, sync_each_step
        self.plan, self.parameters = plan, parameters
        self.tree: Tree | None = None  # pending for the level above the drafter
        # Of drafts of trees without host synchronisation, by their size: each where it stays.
        self._trees: dict[int, tuple[Tree, RowBuffer | None]] = {}
        self.hidden_window: HiddenWindow | None = None  # without host synchronisation
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
        known = number > 1 or self.known or rows.statistics is None
        if known and rows.logits.device == device:
            return rows
        statistics = rows.statistics if known else None
        return RowBuffer(
            moved(rows.logits, device), None if statistics is None else moved(statistics, device)
        )

    def padding(self, number: int) -> int:
        """Where among the rows that are pending for level `number` those go that are of no token:
        behind as many as can be pending."""
        if self.parameters.greedy:  # no rows are kept
            return 0
        most, rows = self.plan.max_pending[number - 1], self.rows.get(number)
        return most if rows is None else max(most, rows.logits.shape[1] - 1)

    def begin_draft(self, most: int) -> None:
        """A draft of `most` tokens comes, or of trees as deep, of which a replay writes those that
        are at their place."""
        kept, self.tree = self._trees.get(most), None
        if kept is not None:
            self.tree, self.rows[self.plan.levels - 1] = kept

    def keep_tree(self, tree: Tree, rows: RowBuffer | None, most: int) -> Tree:
        """`tree`, drafted as the one of `most`, pending from now on: where the last of this size
        was if that is of its shape, so that captured steps find it there.

        Args:
            rows: what it was drawn from, which its drafter has left at their place.
        """
        now = self._trees[most][0] if most in self._trees else None
        forms = [[None if one is None else one.shape for one in each] for each in (now or (), tree)]
        if now is None or forms[0] != forms[1]:
            drawn = None if tree.drawn is None else tree.drawn.clone()  # the drafter's own
            now = tree._replace(drawn=drawn)
        else:
            for own, new in zip(now, tree, strict=True):
                if own is not None and new is not None:
                    own.copy_(new)
        self._trees[most] = now, rows
        return now

    def place(self, number: int, tail: bool, hidden: bool) -> Place:
        """What a captured step of level `number` uses of it.

        Args:
            tail: whether it may draft a tail.
            hidden: whether the drafter is told hidden states of its level.
        """
        levels, tensors = self.plan.levels, [*self.state.tensors]
        parameters = self.parameters.on(self.state.device).values()
        tensors += [own for own in parameters if isinstance(own, torch.Tensor)]
        form: tuple[int | bool, ...] = (number == 1 and not self.known,)
        # Those of what is verified, and of what is handed up; a tail goes to the target.
        for own in {number, number - 1, 1} if tail else {number, number - 1}:
            tensors += [t for t in self.rows.get(own) or () if t is not None]
        if number >= levels - 1 and self.tree is not None:
            tensors += [t for t in self.tree if t is not None]
        if self.hidden_window is not None and (number == levels or hidden):
            tensors += self.hidden_window.tensors
            form = (*form, self.hidden_window.width)
        return Place(self, tensors, form)
