"""Lossless polybasic speculative decoding: chains of models that answer exactly as the largest."""

from __future__ import annotations

import importlib
import itertools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyspec_ext import ops as ops
    from polyspec_ext import policies as policies
    from polyspec_ext import tiny as tiny
    from polyspec_ext.chain import Chain as Chain
    from polyspec_ext.drafters import Context as Context
    from polyspec_ext.drafters import Drafter as Drafter
    from polyspec_ext.drafters import DraftModel as DraftModel
    from polyspec_ext.drafters import Proposal as Proposal
    from polyspec_ext.drafters.dflash import DFlash as DFlash
    from polyspec_ext.drafters.eagle import Eagle as Eagle
    from polyspec_ext.drafters.features import Hydra as Hydra
    from polyspec_ext.drafters.features import Medusa as Medusa
    from polyspec_ext.drafters.lookup import NGramTable as NGramTable
    from polyspec_ext.drafters.lookup import PromptLookup as PromptLookup
    from polyspec_ext.drafters.lookup import SuffixMatch as SuffixMatch
    from polyspec_ext.drafters.mtp import MTP as MTP
    from polyspec_ext.drafters.switching import SwitchingDrafter as SwitchingDrafter
    from polyspec_ext.drafters.trees import DynamicTree as DynamicTree
    from polyspec_ext.drafters.trees import StaticTree as StaticTree
    from polyspec_ext.errors import PolyspecError as PolyspecError
    from polyspec_ext.errors import RequestError as RequestError
    from polyspec_ext.errors import Status as Status
    from polyspec_ext.errors import raise_for_status as raise_for_status
    from polyspec_ext.grammar import Grammar as Grammar
    from polyspec_ext.integrations.draft_chain import DraftChain as DraftChain
    from polyspec_ext.integrations.transformers import attach as attach
    from polyspec_ext.integrations.transformers import custom_generate as custom_generate
    from polyspec_ext.integrations.transformers import detach as detach
    from polyspec_ext.kv_cache import RollbackCache as RollbackCache
    from polyspec_ext.levels import HuggingFaceLevel as HuggingFaceLevel
    from polyspec_ext.levels import Level as Level
    from polyspec_ext.ops import CutVerifyResult as CutVerifyResult
    from polyspec_ext.ops import SampleResult as SampleResult
    from polyspec_ext.ops import TreeVerifyResult as TreeVerifyResult
    from polyspec_ext.ops import VerifyResult as VerifyResult
    from polyspec_ext.ops import has_cuda as has_cuda
    from polyspec_ext.ops import sample as sample
    from polyspec_ext.ops import verify as verify
    from polyspec_ext.ops import verify_tree as verify_tree
    from polyspec_ext.outputs import Output as Output
    from polyspec_ext.outputs import Stream as Stream
    from polyspec_ext.planning.planner import Plan as Plan
    from polyspec_ext.planning.planner import plan as plan
    from polyspec_ext.quantization import early_exit as early_exit
    from polyspec_ext.quantization import load_w4 as load_w4
    from polyspec_ext.quantization import quantize_w4 as quantize_w4
    from polyspec_ext.quantization import save_w4 as save_w4
    from polyspec_ext.quantization import trim as trim
    from polyspec_ext.rules import LogitsRules as LogitsRules
    from polyspec_ext.sampling import row_seeds as row_seeds
    from polyspec_ext.serving import AsyncServer as AsyncServer
    from polyspec_ext.serving import Server as Server
    from polyspec_ext.serving import ServerFull as ServerFull

    __version__: str

# Public names by module, which is imported at the first use of a name: most modules import
# transformers, which the operators do not need, and the command line's help needs no torch.
_NAMES = {
    "chain": ("Chain",),
    "drafters": ("Context", "DraftModel", "Drafter", "Proposal"),
    "drafters.dflash": ("DFlash",),
    "drafters.eagle": ("Eagle",),
    "drafters.features": ("Hydra", "Medusa"),
    "drafters.lookup": ("NGramTable", "PromptLookup", "SuffixMatch"),
    "drafters.mtp": ("MTP",),
    "drafters.switching": ("SwitchingDrafter",),
    "drafters.trees": ("DynamicTree", "StaticTree"),
    "errors": ("PolyspecError", "RequestError", "Status", "raise_for_status"),
    "grammar": ("Grammar",),
    "integrations.draft_chain": ("DraftChain",),
    "integrations.transformers": ("attach", "custom_generate", "detach"),
    "kv_cache": ("RollbackCache",),
    "levels": ("HuggingFaceLevel", "Level"),
    "ops": (
        "CutVerifyResult", "SampleResult", "TreeVerifyResult", "VerifyResult", "has_cuda", "sample",
        "verify", "verify_tree",
    ),
    "outputs": ("Output", "Stream"),
    "planning.planner": ("Plan", "plan"),
    "quantization": ("early_exit", "load_w4", "quantize_w4", "save_w4", "trim"),
    "rules": ("LogitsRules",),
    "sampling": ("row_seeds",),
    "serving": ("AsyncServer", "Server", "ServerFull"),
}  # fmt: skip

_MODULES = ("ops", "policies", "tiny")

__all__ = sorted([*_MODULES, *itertools.chain.from_iterable(_NAMES.values())])


def _compiled() -> Any:
    importlib.import_module("torch")  # loads the libraries that _C needs
    try:
        return importlib.import_module(f"{__name__}._C")
    except ImportError as error:
        raise ImportError(
            f"the compiled part of polyspec_ext is missing or does not load ({error}); build it "
            "with: pip install --no-build-isolation -e ."
        ) from error


def __getattr__(name: str) -> Any:
    if name == "_C":
        return _compiled()
    if name == "__version__":
        return str(_compiled().build_info()["version"])
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    for module, names in _NAMES.items():
        if name in names:
            value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names, for `dir` and for completion."""
    return [*__all__, "__version__"]
