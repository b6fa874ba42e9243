"""A saved run as the tables read it."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..record import Run, Turn
from . import printed
from .statistics import Key, Turns


class Saved:
    """A run's settings and its turns by method.

    Args:
        label: what it is called beside other runs.
        run: as it was read.

    Raises:
        ValueError: not one of the methods is the baseline.
    """

    def __init__(self, label: str, run: Run) -> None:
        self.label, self.about, self.lines = label, run.facts, run.turns
        self.methods: dict[str, Mapping[str, Any]] = {
            method["name"]: method for method in run.methods
        }
        baselines = [name for name, method in self.methods.items() if method["baseline"]]
        if len(baselines) != 1:
            raise ValueError(
                f"{label}: expected one method that is the baseline, given {len(baselines)}"
            )
        self.baseline = baselines[0]

    @functools.cached_property
    def turns(self) -> dict[str, dict[Key, Turn]]:
        """Of each method, those that did not fail."""
        found: dict[str, dict[Key, Turn]] = {name: {} for name in self.methods}
        for turn in self.lines:
            if turn.ok:
                found[turn.method][turn.question_id, turn.turn, turn.repeat] = turn
        return found

    @functools.cached_property
    def failed(self) -> dict[str, list[Turn]]:
        """Of each method."""
        found: dict[str, list[Turn]] = {name: [] for name in self.methods}
        for turn in self.lines:
            if not turn.ok:
                found[turn.method].append(turn)
        return found

    def of_task(self, method: str, task: str) -> Turns:
        """The turns of a task that a method did not fail; all tasks' if it is `OVERALL`."""
        turns = self.turns[method]
        if task == printed.OVERALL:
            return turns
        return {key: turn for key, turn in turns.items() if turn.task == task}

    @property
    def tasks(self) -> list[str]:
        """That there are turns of, in the papers' order."""
        there = {turn.task for turn in self.lines}
        known = [task for task in printed.TASKS if task in there]
        return known + sorted(there - set(known))

    @property
    def target(self) -> Mapping[str, Any]:
        """What run.json says of the target, the first of the baseline's levels: the model of that
        name, perhaps with how it runs in front ("eager target")."""
        name = self.methods[self.baseline]["levels"][0]
        models: Sequence[Mapping[str, Any]] = self.about["models"]
        own = [model for model in models if str(model["name"]).split(" ")[-1] == name]
        return (own or list(models))[0]

    @property
    def target_name(self) -> str:
        """For headings."""
        return str(self.target.get("place") or self.target["name"])

    @property
    def temperature(self) -> float:
        return float(self.about["settings"]["temperature"])

    @property
    def sampling(self) -> str:
        """ "greedy" or "sampled"."""
        return "sampled" if self.temperature > 0 else "greedy"

    @property
    def models_key(self) -> str:
        """The same for runs of the same models."""
        keep = ("name", "place", "parameters", "dtype")
        models = [{name: model.get(name) for name in keep} for model in self.about["models"]]
        return json.dumps(models, sort_keys=True)

    @property
    def key(self) -> str:
        """The same for runs of the same models and settings on the same kind of machine, whose
        numbers may stand side by side."""
        machine = self.about["machine"]
        own = [machine.get(name) for name in ("device_name", "cpu", "threads")]
        return json.dumps([self.models_key, self.about["settings"], own], sort_keys=True)
