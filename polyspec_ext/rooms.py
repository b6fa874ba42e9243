"""The rooms: parts of the package that a chain of models needs only where it uses them.

Modules of the core use a room by its names here, as in ``rooms.Graphs``, which imports the room at
the first use. They name no room elsewhere. `python_tests/system/test_structure.py` lists the rooms.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .chat import Answer as Answer
    from .chat import FittedPrompt as FittedPrompt
    from .chat import StopStrings as StopStrings
    from .chat import ends_of_turn as ends_of_turn
    from .chat import fitted_prompt as fitted_prompt
    from .chat import has_template as has_template
    from .chat import prompt_of_text as prompt_of_text
    from .chat import text_options as text_options
    from .drafters.checkpoint import serves_heads as serves_heads
    from .drafters.dflash import DFlash as DFlash
    from .drafters.eagle import Eagle as Eagle
    from .drafters.features import HiddenRing as HiddenRing
    from .drafters.features import HiddenWindow as HiddenWindow
    from .drafters.mtp import MTP as MTP
    from .drafters.translated import TranslatedLevel as TranslatedLevel
    from .drafters.trees import draw_paths as draw_paths
    from .drafters.trees import nodes_below as nodes_below
    from .drafters.trees import require_nodes as require_nodes
    from .drafters.words import WORDS as WORDS
    from .drafters.words import named_element as named_element
    from .files import replace_text as replace_text
    from .kv_cache.streaming import streaming_layers as streaming_layers
    from .levels.encoder_decoder import EncoderDecoderLevel as EncoderDecoderLevel
    from .levels.gguf import GgufFile as GgufFile
    from .levels.gguf import config_of as config_of
    from .levels.gguf import first_part as first_part
    from .levels.gguf import gguf_model as gguf_model
    from .levels.gguf import has_blocks as has_blocks
    from .levels.gguf import tokenizer_of as tokenizer_of
    from .levels.shared_cache import Member as Member
    from .levels.shared_cache import require_same_shape as require_same_shape
    from .levels.stateful import StatefulLevel as StatefulLevel
    from .levels.states import StateHooks as StateHooks
    from .levels.users import checked_level as checked_level
    from .ops.trees import TreeVerifyResult as TreeVerifyResult
    from .ops.trees import compact_tree as compact_tree
    from .ops.trees import layers_alike as layers_alike
    from .ops.trees import tree_positions as tree_positions
    from .ops.trees import tree_slots as tree_slots
    from .ops.trees import verify_tree as verify_tree
    from .planning.planner import load_or_plan as load_or_plan
    from .planning.store import ChainFile as ChainFile
    from .policies.adaptive import POLICIES as POLICIES
    from .policies.adaptive import Adaptive as Adaptive
    from .policies.adaptive import CachedFsm as CachedFsm
    from .policies.adaptive import DrafterChoice as DrafterChoice
    from .policies.adaptive import Fixed as Fixed
    from .policies.adaptive import Joint as Joint
    from .policies.adaptive import Online as Online
    from .policies.adaptive import RoundRecorder as RoundRecorder
    from .policies.adaptive import named as named
    from .quantization import early_exit as early_exit
    from .quantization import stored_w4 as stored_w4
    from .quantization import trim as trim
    from .rules import LogitsRules as LogitsRules
    from .rules import with_penalty as with_penalty
    from .runtime.forced import draft_behind as draft_behind
    from .runtime.forced import forced as forced
    from .runtime.forced import process as process
    from .runtime.forced import processed as processed
    from .runtime.graphs import CudaRecorder as CudaRecorder
    from .runtime.graphs import Graphs as Graphs
    from .runtime.graphs import MemoryKey as MemoryKey
    from .runtime.graphs import Passes as Passes
    from .runtime.graphs import PlannedStep as PlannedStep
    from .runtime.graphs import Queue as Queue
    from .runtime.graphs import few_sizes as few_sizes
    from .runtime.graphs import needs_host as needs_host
    from .runtime.graphs import queued_report as queued_report
    from .runtime.joining import OpenBatch as OpenBatch
    from .runtime.prefixes import Prefixes as Prefixes
    from .runtime.trees import PendingTree as PendingTree
    from .runtime.trees import TreePass as TreePass
    from .runtime.trees import append_tree as append_tree
    from .runtime.trees import keep_path as keep_path

NAMES = {
    "chat": (
        "Answer", "FittedPrompt", "StopStrings", "ends_of_turn", "fitted_prompt", "has_template",
        "prompt_of_text", "text_options",
    ),
    "drafters.checkpoint": ("serves_heads",),
    "drafters.dflash": ("DFlash",),
    "drafters.eagle": ("Eagle",),
    "drafters.features": ("HiddenRing", "HiddenWindow"),
    "drafters.mtp": ("MTP",),
    "drafters.translated": ("TranslatedLevel",),
    "drafters.trees": ("draw_paths", "nodes_below", "require_nodes"),
    "drafters.words": ("WORDS", "named_element"),
    "files": ("replace_text",),
    "kv_cache.streaming": ("streaming_layers",),
    "levels.encoder_decoder": ("EncoderDecoderLevel",),
    "levels.gguf": (
        "GgufFile", "config_of", "first_part", "gguf_model", "has_blocks", "tokenizer_of",
    ),
    "levels.shared_cache": ("Member", "require_same_shape"),
    "levels.states": ("StateHooks",),
    "levels.stateful": ("StatefulLevel",),
    "levels.users": ("checked_level",),
    "ops.trees": (
        "TreeVerifyResult", "compact_tree", "layers_alike", "tree_positions", "tree_slots",
        "verify_tree",
    ),
    "planning.planner": ("load_or_plan",),
    "planning.store": ("ChainFile",),
    "policies.adaptive": (
        "POLICIES", "Adaptive", "CachedFsm", "DrafterChoice", "Fixed", "Joint", "Online",
        "RoundRecorder", "named",
    ),
    "quantization": ("early_exit", "stored_w4", "trim"),
    "rules": ("LogitsRules", "with_penalty"),
    "runtime.forced": ("draft_behind", "forced", "process", "processed"),
    "runtime.joining": ("OpenBatch",),
    "runtime.prefixes": ("Prefixes",),
    "runtime.graphs": (
        "CudaRecorder", "Graphs", "MemoryKey", "Passes", "PlannedStep", "Queue", "few_sizes",
        "needs_host", "queued_report",
    ),
    "runtime.trees": ("PendingTree", "TreePass", "append_tree", "keep_path"),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    for module, names in NAMES.items():
        if name in names:
            value = getattr(importlib.import_module(f".{module}", __package__), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def has(name: str) -> bool:
    """Return whether the files of the room that has `name` are there."""
    module = next(module for module, names in NAMES.items() if name in names)
    return importlib.util.find_spec(f".{module}", __package__) is not None
