"""The rooms: parts of the package that a chain of models needs only where it uses them.

Modules of the core use a room's modules here, as in ``rooms.graphs.Graphs``, which imports the
module at the first use. The rooms are listed in `python_tests/system/test_structure.py`.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import chat as chat
    from . import columns as columns
    from . import files as files
    from . import quantization as quantization
    from . import rules as rules
    from .drafters import checkpoint as checkpoint
    from .drafters import dflash as dflash
    from .drafters import eagle as eagle
    from .drafters import features as features
    from .drafters import mtp as mtp
    from .drafters import translated as translated
    from .drafters import trees as _drafted
    from .drafters import words as words
    from .kv_cache import streaming as streaming
    from .levels import encoder_decoder as encoder_decoder
    from .levels import gguf as gguf
    from .levels import shared_cache as shared_cache
    from .levels import stateful as stateful
    from .levels import states as states
    from .levels import users as users
    from .ops import trees as _operators
    from .planning import planner as planner
    from .planning import store as store
    from .policies import adaptive as adaptive
    from .runtime import forced as forced
    from .runtime import graphs as graphs
    from .runtime import joining as joining
    from .runtime import prefixes as prefixes
    from .runtime import trees as _pending

    pending_trees, draft_trees, tree_operators = _pending, _drafted, _operators

# Modules by their names here.
NAMES = {
    "chat": "chat",
    "columns": "columns",
    "checkpoint": "drafters.checkpoint",
    "dflash": "drafters.dflash",
    "eagle": "drafters.eagle",
    "features": "drafters.features",
    "mtp": "drafters.mtp",
    "translated": "drafters.translated",
    "draft_trees": "drafters.trees",
    "words": "drafters.words",
    "files": "files",
    "streaming": "kv_cache.streaming",
    "encoder_decoder": "levels.encoder_decoder",
    "gguf": "levels.gguf",
    "shared_cache": "levels.shared_cache",
    "states": "levels.states",
    "stateful": "levels.stateful",
    "users": "levels.users",
    "tree_operators": "ops.trees",
    "planner": "planning.planner",
    "store": "planning.store",
    "adaptive": "policies.adaptive",
    "quantization": "quantization",
    "rules": "rules",
    "forced": "runtime.forced",
    "joining": "runtime.joining",
    "prefixes": "runtime.prefixes",
    "graphs": "runtime.graphs",
    "pending_trees": "runtime.trees",
}


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{NAMES[name]}", __package__)
    globals()[name] = module
    return module


def has(name: str) -> bool:
    """Return whether the file of the module `name` is there."""
    return importlib.util.find_spec(f".{NAMES[name]}", __package__) is not None
