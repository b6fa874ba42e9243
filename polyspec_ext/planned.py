"""`plan`, and `Chain`, which asks the planner for `Chain.planned`."""

from __future__ import annotations

from .chain import Chain as Chain
from .chain import plan_with
from .planning.planner import load_or_plan
from .planning.planner import plan as plan

plan_with(load_or_plan)
