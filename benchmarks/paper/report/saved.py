"""A saved run as the tables read it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..questions import OTHER, TASKS
from ..record import Run, Turn
from . import printed
from .statistics import Key, Turns


class Saved:
    """A run's settings and its turns by method.

    Args:
        label: what it is called beside other runs.
        run: as it was read.

    Attributes:
        about: ``run.json``; lines: all turns, in order.
        methods: of ``run.json``, by name.
        baseline: name of the method that speedups are over.
        turns: of each method, those that did not fail.
        failed: turns of all methods.
        tasks: that there are turns of, in the papers' order.
        target: what ``run.json`` says of the model of the baseline's first level.

    Raises:
        ValueError: not one of the methods is the baseline.
    """

    def __init__(self, label: str, run: Run) -> None:
        self.label, self.about, self.lines = label, run.facts, run.turns
        self.methods: dict[str, Mapping[str, Any]] = {
            method["name"]: method for method in self.about["methods"]
        }
        baselines = [name for name, method in self.methods.items() if method["baseline"]]
        if len(baselines) != 1:
            raise ValueError(
                f"{label}: expected one method that is the baseline, given {len(baselines)}"
            )
        (self.baseline,) = baselines
        self.turns: dict[str, dict[Key, Turn]] = {name: {} for name in self.methods}
        for turn in self.lines:
            if turn.ok:
                self.turns[turn.method][turn.question_id, turn.turn, turn.repeat] = turn
        self.failed = [turn for turn in self.lines if not turn.ok]
        there = {turn.task for turn in self.lines}
        self.tasks = [task for task in (*TASKS, OTHER) if task in there]
        # The model of that name, perhaps with how it runs in front ("eager target").
        name = self.methods[self.baseline]["levels"][0]
        self.target: Mapping[str, Any] = next(
            model for model in self.about["models"] if model["name"].split(" ")[-1] == name
        )

    def of_task(self, method: str, task: str) -> Turns:
        """The turns of a task that a method did not fail; all tasks' if it is `OVERALL`."""
        turns = self.turns[method]
        if task == printed.OVERALL:
            return turns
        return {key: turn for key, turn in turns.items() if turn.task == task}

    @property
    def target_name(self) -> str:
        """For headings."""
        return str(self.target["place"] or self.target["name"])

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
        return json.dumps([[model[name] for name in keep] for model in self.about["models"]])

    @property
    def key(self) -> str:
        """The same for runs of the same models and settings on the same kind of machine, whose
        numbers may stand side by side."""
        machine = [self.about["machine"].get(name) for name in ("device_name", "cpu", "threads")]
        settings = self.about["settings"]
        return json.dumps([self.models_key, settings, machine], sort_keys=True)
