"""Chains of levels on CUDA without a GPU (`fake_cuda.py`), and launches of their steps."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple
from unittest import mock

import fake_cuda
import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import polyspec_ext as ps
from polyspec_ext.drafters.eagle import EagleConfig, EagleNetwork, HeadPasses
from polyspec_ext.drafters.features import FeatureCache
from polyspec_ext.levels import fused, hugging_face, models
from polyspec_ext.levels.products import stacked_bias
from polyspec_ext.quantization.weights import CudaInt4Linear, Int4Weights
from polyspec_ext.runtime import engine
from polyspec_ext.runtime.engine import Clock
from polyspec_ext.runtime.graphs import Queue, planned

VOCAB, KV_HEADS, WIDTH = 97, 2, 64


def model(family: str, layers: int = 2, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Any:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](
        **{
            "vocab_size": VOCAB,
            "hidden_size": 128,
            "intermediate_size": 192,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": KV_HEADS,
            "head_dim": WIDTH,
            "sliding_window": None,
            **more,
        }
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def fused_copy(given: Any) -> Any:
    """Return the copy that passes of a packed level run, or of a 4-bit one."""
    made = fused.pack_layers(given)
    fused.use_grouped(made)
    return made


def in_four_bits(given: Any) -> Any:
    """Return a copy as of `ps.quantize_w4`, with weights without numbers."""

    def make(layers: Any) -> CudaInt4Linear:
        inputs = layers[0].in_features
        outputs = sum(layer.out_features for layer in layers)
        weights = Int4Weights(
            torch.empty(outputs, inputs, dtype=torch.uint8, device="meta"),
            *(torch.empty(outputs, inputs // 32, device="meta") for _ in range(2)),
        )
        made = CudaInt4Linear(weights, stacked_bias(layers), device="meta")
        made.packed = torch.empty(made.packed.shape, dtype=torch.uint8, device="cuda")
        return made

    head = given.get_output_embeddings()
    return fused.replaced(given, lambda x: type(x) is torch.nn.Linear and x is not head, make)


def head(target: Any, version: int = 1, layers: int = 1) -> HeadPasses:
    """An EAGLE-2 or EAGLE-3 head of the target's sizes."""
    text = target.model.config
    layer = LlamaConfig(**{**text.to_dict(), "num_hidden_layers": layers, "architectures": None})
    config = EagleConfig(1, layer, text.hidden_size, (-1,), fc_bias=True)
    if version == 3:
        config = EagleConfig(3, layer, text.hidden_size, (0, 1, 2), fuse=True)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            network = EagleNetwork(config).eval()
    finally:
        torch.set_default_dtype(before)
    return HeadPasses(network, target)


class _Untried:
    """Replaces `levels.probe.BatchProbe` and `Unchanged`."""

    one_scale = False

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def single(self) -> None: ...
    def ragged(self) -> None: ...
    def tree(self) -> None: ...
    def prepared(self) -> None: ...
    def require(self, _: None = None) -> None: ...


@contextmanager
def launches(fuses: bool = True, zeros: bool = False) -> Iterator[fake_cuda.Launches]:
    """Run levels and chains on fake tensors, and count launches. `fuses`: the layers of all levels
    are fused; `zeros`: of `fake_cuda.Launches`."""

    def runs(model: Any, *_: object) -> fused.Runs:
        return fused.Runs(fused_copy(model) if fuses else model, ())

    replaced = {
        (hugging_face, "BatchProbe"): _Untried,
        (models, "Unchanged"): _Untried,
        (models, "packed"): runs,
        (models, "unpacked"): runs,
        (engine, "Clock"): _HostClock,
        (torch.Tensor, "pin_memory"): lambda self: self,
        (FakeTensor, "data_ptr"): lambda self: self.untyped_storage()._cdata,
        (torch.cuda, "synchronize"): lambda *_: None,
        (torch.cuda, "graph_pool_handle"): lambda: None,
        (torch.cuda, "current_stream"): mock.MagicMock(),
        (torch.cuda, "Stream"): mock.MagicMock(),
        (torch.cuda, "stream"): mock.MagicMock(),
    }
    with ExitStack() as patches:
        counted = patches.enter_context(fake_cuda.launches(zeros))
        for (place, name), other in replaced.items():
            patches.enter_context(mock.patch.object(place, name, other, create=True))

        def tolist(self: FakeTensor) -> Any:  # a prompt's tokens are read once
            counted.reads.append(f"tolist {list(self.shape)}")
            return np.zeros(self.shape, int).tolist()

        patches.enter_context(mock.patch.object(FakeTensor, "tolist", tolist))
        patches.enter_context(torch.no_grad())
        yield counted


class _HostClock:
    @staticmethod
    def of(device: torch.device) -> Clock:
        return Clock(time.perf_counter)


def chain(parts, window, layers=2, *, pack=True, head_layers=1, graphs=False, **options):
    """Return a chain of "target", "W4" (a copy in the target's cache), "draft", "lookup", "EAGLE",
    "EAGLE-3" and "tree" (of EAGLE's). `pack`: the head runs fused layers as its target does."""
    with torch.device("cuda"):
        given = model("llama", layers)
    target = ps.HuggingFaceLevel(given, name="target", pack=pack)
    made: list[Any] = []
    for part in parts:
        if part == "target":
            made.append(target)
        elif part == "W4":
            copy = in_four_bits(given)
            made.append(ps.HuggingFaceLevel(copy, name=part, shares_cache_with=target))
        elif part == "draft":
            with torch.device("cuda"):
                small = model("llama", layers)
            made.append(ps.HuggingFaceLevel(small, name=part))
        elif part == "lookup":
            made.append(ps.PromptLookup())
        else:
            tree = ps.DynamicTree(3, 9) if part == "tree" else None
            version = 3 if part == "EAGLE-3" else 1
            made.append(ps.Eagle(head(target, version, head_layers), tree))
    return ps.Chain(made, window, graphs=graphs, **options)


class Step(NamedTuple):
    """A step of a round.

    Attributes:
        level, tokens: n drafts, the others verify; at most so many tokens.
        launches, uploads: of it.
        beside: launches outside of a model's pass.
    """

    level: int
    tokens: int
    launches: Counter[str]
    uploads: list[str]
    beside: Counter[str]


_PASSES = ((hugging_face.HuggingFaceLevel, "forward"), (HeadPasses, "extend"),
           (HeadPasses, "next"), (HeadPasses, "step"), (HeadPasses, "logits"))  # fmt: skip


def steps_of_a_round(chain: ps.Chain, rows: int = 1, temperature: float = 1.0) -> list[Step]:
    """Return the steps of a round after a first one."""
    steps: list[Step] = []
    inside: list[Counter[str]] = []
    run = Queue.run

    def watched(self: Queue, *arguments: Any) -> Any:
        # A tick comes before the first step and after each of them.
        plan, *others, _ = arguments
        due, current = iter(planned(plan)), ExitStack()
        counting: list[fake_cuda.Launches] = []

        def tick() -> float:
            current.close()
            if counting:
                own, step = counting.pop(), next(due)
                beside = own.counts - sum(inside, Counter[str]())
                steps.append(Step(step.level, step.most, own.counts, own.uploads, beside))
            inside.clear()
            waits = mock.Mock(side_effect=fake_cuda.HostRead("tolist"))
            current.enter_context(mock.patch.object(FakeTensor, "tolist", waits))
            counting.append(current.enter_context(fake_cuda.Launches()))
            return 0.0

        with current:
            return run(self, plan, *others, tick)

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def passes(*arguments: Any, **options: Any) -> Any:
            with fake_cuda.Launches() as own:
                made = call(*arguments, **options)
            inside.append(own.counts)
            return made

        return passes

    begin = FeatureCache.begin

    def allocated(self: FeatureCache, batch: int, capacity: int) -> None:
        begin(self, batch, capacity)
        like = torch.zeros(batch, KV_HEADS, 1, WIDTH, dtype=self.dtype, device=self.device)
        for layer in self.cache.layers:
            layer.lazy_initialization(like, like)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(Queue, "run", watched))
        # Else no round follows a first round with results for the host.
        patches.enter_context(mock.patch.object(FeatureCache, "begin", allocated))
        for kind, name in _PASSES:
            call = counted(getattr(kind, name))
            patches.enter_context(mock.patch.object(kind, name, call))
        prompts = [[3, 1, 4, 1, 5, 9][row:] for row in range(rows)]
        chain.batch(prompts, 64, temperature=temperature, seed=list(range(rows)), eos_token_id=[])
        patches.enter_context(torch.inference_mode())
        for _ in range(2):
            steps.clear()
            with suppress(fake_cuda.HostRead):
                chain.engine.round()
    return steps
