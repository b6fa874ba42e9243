"""Stand-ins for what the SGLang plug-in uses, with SGLang's names and signatures, on the CPU."""

from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch


class HookType(Enum):
    AROUND = "around"


class HookRegistry:
    hooks: dict[str, tuple[Any, HookType]]

    @classmethod
    def register(cls, target: str, hook: Any, hook_type: HookType) -> None:
        cls.hooks[target] = hook, hook_type


def eagle_sample(
    verify_input: Any,
    batch: Any,
    logits_output: Any,
    grammar_mask: Any = None,
    uno_target_max_top_k: Any = None,
    *,
    watermark_state: Any = None,
    watermark_full_mask: bool = True,
) -> Any:
    return "original"


def apply_scaling_penalties(logits: torch.Tensor, scaling_penalties: torch.Tensor) -> None:
    logits[:] = torch.where(logits < 0, logits * scaling_penalties, logits / scaling_penalties)


def verify_tree_greedy_func(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = -1,
) -> Any:
    for row, wanted in enumerate(target_predict.tolist()):
        node, depth = 0, 0
        while True:
            index = int(retrieve_index[row, node])
            accept_index[row, depth], predicts[index] = index, wanted[node]
            child = int(retrieve_next_token[row, node])
            while child >= 0 and int(candidates[row, child]) != wanted[node]:
                child = int(retrieve_next_sibling[row, child])
            if child < 0:
                break
            node, depth = child, depth + 1
        accept_token_num[row] = depth
    return predicts, accept_index, accept_token_num


class CustomSpecAlgo:
    def is_ngram(self) -> bool:
        return False

    def is_eagle(self) -> bool:
        return False

    def has_draft_kv(self) -> bool:
        return True


class SpeculativeAlgorithm(Enum):
    EAGLE = "EAGLE"
    NGRAM = "NGRAM"

    @classmethod
    def register(
        cls,
        name: str,
        *,
        supports_overlap: bool = False,
        validate_server_args: Any = None,
        spec_class: Any = CustomSpecAlgo,
    ) -> Any:
        def decorate(factory: Any) -> Any:
            REGISTERED[name] = spec_class(), factory, supports_overlap
            return factory

        return decorate

    def is_ngram(self) -> bool:
        return self is SpeculativeAlgorithm.NGRAM

    def is_eagle(self) -> bool:
        return self is SpeculativeAlgorithm.EAGLE

    def has_draft_kv(self) -> bool:
        return not self.is_ngram()

    def create_future_map(self, device: Any) -> str:
        return f"{self.name} on {device}"


REGISTERED: dict[str, Any] = {}


def chain_input(drafts: torch.Tensor, seq_lens: torch.Tensor, **fields: Any) -> SimpleNamespace:
    """Return a verification's input of roots and drafts [B, K+1], one behind another."""
    count, width = drafts.shape
    following = torch.arange(1, width + 1).masked_fill(torch.arange(width) == width - 1, -1)
    return SimpleNamespace(
        draft_token=drafts.flatten(),
        draft_token_num=width,
        max_tree_depth=width,
        positions=(seq_lens[:, None] + torch.arange(width)).flatten(),
        retrieve_index=torch.arange(count * width).view(count, width),
        retrieve_next_token=following.expand(count, -1),
        retrieve_next_sibling=torch.full((count, width), -1),
        **{"tree_topk": 1, **fields},
    )


class NGRAMWorker:
    """The n-gram worker without its target pass: what it makes of the drafts."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        self.draft_token_num = server_args.speculative_num_draft_tokens
        self.device = "cpu"
        self.enable_overlap = server_args.overlap
        self.model_runner = target_worker.model_runner

    def _prepare_draft_tokens(self, batch: Any) -> tuple[np.ndarray, np.ndarray]:
        raise NotImplementedError

    def _prepare_for_speculative_decoding(self, batch: Any) -> None:
        ids, mask = self._prepare_draft_tokens(batch)
        width = self.draft_token_num
        assert mask.dtype == bool
        assert (mask.reshape(-1, width, width) == np.tri(width, dtype=bool)).all()
        drafts = torch.from_numpy(ids).view(-1, width)
        batch.forward_mode = ForwardMode(verify=True)
        batch.spec_info = chain_input(drafts, batch.seq_lens, tree_topk=-1)


class ForwardMode(SimpleNamespace):
    def is_idle(self) -> bool:
        return bool(getattr(self, "idle", False))

    def is_target_verify(self) -> bool:
        return bool(getattr(self, "verify", False))


def sampling_info(count: int, vocabulary: int, **fields: Any) -> SimpleNamespace:
    """Return a batch's parameters; a keyword argument is a number or a list."""

    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        given = fields.pop(name, default)
        return torch.tensor([given] * count if isinstance(given, float | int) else given).to(dtype)

    given = {
        "temperatures": column("temperatures", 1.0, torch.float32).view(-1, 1),
        "top_ks": column("top_ks", 1 << 30, torch.int32),
        "top_ps": column("top_ps", 1.0, torch.float32),
        "min_ps": column("min_ps", 0.0, torch.float32),
        "sampling_seed": torch.arange(count) * 31 + 7,
        "acc_additive_penalties": None,
        "acc_scaling_penalties": None,
        "logit_bias": None,
        "has_watermark_candidates": False,
    }
    return SimpleNamespace(**{**given, **fields})


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `import sglang...` find the stand-ins."""
    HookRegistry.hooks, broadcasts = {}, []
    REGISTERED.clear()
    group = SimpleNamespace(world_size=2, broadcast=lambda tensor, src: broadcasts.append(tensor))
    parallel = SimpleNamespace(tp_group=group, attn_tp_group=None, broadcasts=broadcasts)
    modules: dict[str, dict[str, Any]] = {
        "srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
        "srt.speculative.eagle_utils": {"eagle_sample": eagle_sample},
        "srt.speculative.spec_info": {"SpeculativeAlgorithm": SpeculativeAlgorithm},
        "srt.speculative.spec_registry": {"CustomSpecAlgo": CustomSpecAlgo},
        "srt.speculative.ngram_worker": {"NGRAMWorker": NGRAMWorker},
        "srt.sampling.penaltylib.repetition_penalty": {
            "apply_scaling_penalties": apply_scaling_penalties
        },
        "srt.layers.dp_attention": {"is_dp_attention_enabled": lambda: False},
        "srt.runtime_context": {"get_parallel": lambda: parallel},
        "kernels.ops.speculative.spec_tree": {"verify_tree_greedy_func": verify_tree_greedy_func},
    }
    for name, contents in modules.items():
        whole = f"sglang.{name}"
        parts = whole.split(".")
        for end in range(1, len(parts)):
            above = ".".join(parts[:end])
            if above not in sys.modules:
                monkeypatch.setitem(sys.modules, above, ModuleType(above))
        module = ModuleType(whole)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, whole, module)
        monkeypatch.setattr(sys.modules[whole.rpartition(".")[0]], parts[-1], module, raising=False)
