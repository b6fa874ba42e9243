"""Lossless polybasic speculative decoding: chains of models that answer exactly as the largest."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch  # before _C: it loads the libraries that _C needs

try:
    from polyspec_ext import _C
except ImportError as error:
    raise ImportError(
        f"the compiled part of polyspec_ext is missing or does not load ({error}); build it with: "
        "pip install --no-build-isolation -e ."
    ) from error

from polyspec_ext import policies
from polyspec_ext.errors import PolyspecError, RequestError, Status, raise_for_status
from polyspec_ext.ops import (
    CutVerifyResult,
    SampleResult,
    TreeVerifyResult,
    VerifyResult,
    has_cuda,
    sample,
    verify,
    verify_tree,
)
from polyspec_ext.seeds import row_seeds

if TYPE_CHECKING:
    from polyspec_ext.chain import Chain
    from polyspec_ext.drafters import (
        Context,
        Drafter,
        DraftModel,
        DynamicTree,
        Eagle,
        Hydra,
        Medusa,
        NGramTable,
        PromptLookup,
        Proposal,
        StaticTree,
        SuffixMatch,
        early_exit,
    )
    from polyspec_ext.integrations.transformers import custom_generate
    from polyspec_ext.kv_cache import RollbackCache
    from polyspec_ext.levels import HuggingFaceLevel, Level
    from polyspec_ext.outputs import Output, Stream
    from polyspec_ext.planned import plan
    from polyspec_ext.planning.planner import Plan
    from polyspec_ext.quantization import load_w4, quantize_w4, save_w4

# Imported when first asked for: they pull in transformers, which the operators do not need.
_LAZY = {
    "Chain": "polyspec_ext.chain",
    "Output": "polyspec_ext.outputs",
    "Stream": "polyspec_ext.outputs",
    "HuggingFaceLevel": "polyspec_ext.levels",
    "Level": "polyspec_ext.levels",
    "Context": "polyspec_ext.drafters",
    "DraftModel": "polyspec_ext.drafters",
    "Drafter": "polyspec_ext.drafters",
    "DynamicTree": "polyspec_ext.drafters",
    "Eagle": "polyspec_ext.drafters",
    "NGramTable": "polyspec_ext.drafters",
    "Hydra": "polyspec_ext.drafters",
    "Medusa": "polyspec_ext.drafters",
    "StaticTree": "polyspec_ext.drafters",
    "PromptLookup": "polyspec_ext.drafters",
    "Proposal": "polyspec_ext.drafters",
    "SuffixMatch": "polyspec_ext.drafters",
    "early_exit": "polyspec_ext.drafters",
    "Plan": "polyspec_ext.planning.planner",
    "plan": "polyspec_ext.planned",
    "RollbackCache": "polyspec_ext.kv_cache",
    "SwitchingDrafter": "polyspec_ext.drafters",
    "custom_generate": "polyspec_ext.integrations.transformers",
    "load_w4": "polyspec_ext.quantization",
    "quantize_w4": "polyspec_ext.quantization",
    "save_w4": "polyspec_ext.quantization",
}

Scheduler = _C.Scheduler
__version__ = str(_C.build_info()["version"])
__all__ = [
    "Chain",
    "Context",
    "CutVerifyResult",
    "DraftModel",
    "Drafter",
    "DynamicTree",
    "Eagle",
    "HuggingFaceLevel",
    "Hydra",
    "Level",
    "Medusa",
    "NGramTable",
    "Output",
    "Plan",
    "PolyspecError",
    "PromptLookup",
    "Proposal",
    "RequestError",
    "RollbackCache",
    "SampleResult",
    "Scheduler",
    "StaticTree",
    "Status",
    "Stream",
    "SuffixMatch",
    "SwitchingDrafter",
    "TreeVerifyResult",
    "VerifyResult",
    "custom_generate",
    "early_exit",
    "has_cuda",
    "load_w4",
    "plan",
    "policies",
    "quantize_w4",
    "raise_for_status",
    "row_seeds",
    "sample",
    "save_w4",
    "verify",
    "verify_tree",
]

del torch


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
