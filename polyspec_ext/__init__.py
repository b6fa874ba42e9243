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
        SwitchingDrafter,
        early_exit,
    )
    from polyspec_ext.integrations.transformers import custom_generate
    from polyspec_ext.kv_cache import RollbackCache
    from polyspec_ext.levels import HuggingFaceLevel, Level
    from polyspec_ext.outputs import Output, Stream
    from polyspec_ext.planned import plan
    from polyspec_ext.planning.planner import Plan
    from polyspec_ext.quantization import load_w4, quantize_w4, save_w4

# Modules by the names that they are asked for: imported when one first is, since they pull in
# transformers, which the operators do not need.
_LAZY = {
    "chain": ("Chain",),
    "drafters": (
        "Context", "DraftModel", "Drafter", "DynamicTree", "Eagle", "Hydra", "Medusa", "NGramTable",
        "PromptLookup", "Proposal", "StaticTree", "SuffixMatch", "SwitchingDrafter", "early_exit",
    ),
    "integrations.transformers": ("custom_generate",),
    "kv_cache": ("RollbackCache",),
    "levels": ("HuggingFaceLevel", "Level"),
    "outputs": ("Output", "Stream"),
    "planned": ("plan",),
    "planning.planner": ("Plan",),
    "quantization": ("load_w4", "quantize_w4", "save_w4"),
}  # fmt: skip

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
    for module, names in _LAZY.items():
        if name in names:
            value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
