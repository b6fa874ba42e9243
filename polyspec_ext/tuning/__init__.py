"""Measured times of a level's passes, and what follows from them."""

from .choice import Choice, LevelConfig, Switch, choose, widths_of
from .level import level_for
from .profile import pass_seconds
from .store import Store, default_store

__all__ = [
    "Choice",
    "LevelConfig",
    "Store",
    "Switch",
    "choose",
    "default_store",
    "level_for",
    "pass_seconds",
    "widths_of",
]
