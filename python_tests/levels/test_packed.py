"""Levels with packed weights: the model's logits for every family; the weights' memory."""

import gc
import itertools
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_models
import torch
from calls import arguments_of
from small_models import wide as model
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import polyspec_ext as ps
from polyspec_ext import tiny
from polyspec_ext.levels import fused, products, sources
from polyspec_ext.levels.products import in_huge_pages

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch without oneDNN"
)

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {"sliding_window": 8}, "qwen2": {}, "qwen3": {}, "gemma2": {},
    "phi3": {"pad_token_id": 0}, "opt": {"ffn_dim": 192, "word_embed_proj_dim": 128},
    "gpt_neox": {}, "gpt2": {},
}  # fmt: skip


def count(module: nn.Module, kind: type[nn.Module]) -> int:
    return sum(isinstance(child, kind) for child in module.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_keeps_its_logits(family: str) -> None:
    plain = ps.HuggingFaceLevel(model(family, **FAMILIES[family]))
    level = ps.HuggingFaceLevel(plain.model, pack=True)
    assert count(level._runs, nn.Linear) == 0
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]])
    for each in (plain, level):
        each.prefill(tokens[:, :4])
    for start, end in ((4, 5), (5, 9), (9, 12)):
        piece = tokens[:, start:end]
        wanted = plain.forward(piece, end - start)
        torch.testing.assert_close(level.forward(piece, end - start), wanted, rtol=1e-4, atol=1e-5)
    for each in (plain, level):
        each.rollback([6])
    torch.testing.assert_close(
        level.forward(tokens[:, :3], 1), plain.forward(tokens[:, :3], 1), rtol=1e-4, atol=1e-5
    )


def test_projections_of_one_input_are_one_product() -> None:
    made = ps.HuggingFaceLevel(model(), pack=True)._runs
    layer = made.model.layers[0]
    assert layer.self_attn.q_proj.merged is layer.self_attn.v_proj.merged
    assert layer.mlp.gate_proj.merged is layer.mlp.up_proj.merged
    product = torch.ops.polyspec.dense_product.default
    calls = arguments_of(product, lambda: made(input_ids=torch.tensor([[1, 2, 3]])))
    assert len({packed.data_ptr() for _, packed, *_ in calls}) == 2 * 4 + 1 == len(calls)


class Crossed(nn.Module):
    """Siblings with different inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(6, n) for n in (6, 3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.v_proj(x), self.q_proj(2 * x), self.k_proj(x), self.q_proj(x)], -1)


@torch.inference_mode()
def test_siblings_with_different_inputs_are_told_apart() -> None:
    torch.manual_seed(0)
    module = Crossed()
    made = products.replaced(module, products.is_plain, products.pack_linear)
    for rows in (1, 5):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(made(x), module(x))


class Between:
    """Makes a call before the n-th executed line of `code`, as another thread may."""

    def __init__(self, code: Any, at: int, call: Callable[[], object]) -> None:
        self._code, self._left, self._call = code, at, call

    @property
    def called(self) -> bool:
        return self._left <= 0

    def __enter__(self) -> Any:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        if frame.f_code is not self._code:
            return None
        if event == "line":
            self._left -= 1
            if self._left == 0:
                self._call()
        return self._trace


@torch.inference_mode()
def test_threads_may_run_one_model_at_once() -> None:
    torch.manual_seed(0)
    made = products.replaced(Crossed(), products.is_plain, products.pack_linear)
    siblings = [made.q_proj, made.k_proj, made.v_proj]
    x, others = torch.randn(2, 6), torch.randn(2, 6)
    wanted = [one(x) for one in siblings]
    for count in (1, 2, 3):
        for at in itertools.count(1):
            code = products.Merged.part.__code__
            begun = siblings[:count]
            with Between(code, at, lambda begun=begun: [one(others) for one in begun]) as between:
                given = [one(x) for one in siblings]
            assert all(map(torch.equal, given, wanted))
            if not between.called:
                break
        assert at > 3


@torch.inference_mode()
def test_siblings_that_differ_stay_apart() -> None:
    module = Crossed()
    module.k_proj = nn.Linear(6, 3, bias=False)
    made = products.replaced(module, products.is_plain, products.pack_linear)
    assert count(made, products.PackedLinear) == 3
    x = torch.randn(4, 6)
    torch.testing.assert_close(made(x), module(x))


class Reading(nn.Linear):
    """A layer that uses more of the plain one within it than a packed one has."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__(inner.in_features, inner.out_features, bias=False)
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert callable(self.inner.reset_parameters)
        return self.inner(x.to(self.inner.weight.dtype))


def test_layers_of_which_more_is_used_are_refused_by_name() -> None:
    own = model()
    own.model.layers[0].mlp.up_proj = Reading(own.model.layers[0].mlp.up_proj)
    with pytest.raises(
        ValueError, match=r"LlamaForCausalLM: .*nothing but their weights.*use pack=False"
    ):
        ps.HuggingFaceLevel(own, pack=True)
    assert ps.Chain([own], pack="auto").generate([1, 2], 3).sequences.shape == (1, 5)


def test_models_with_adapters() -> None:
    peft = pytest.importorskip("peft")
    options = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    config = peft.LoraConfig(task_type="CAUSAL_LM", **options)
    own = peft.get_peft_model(model(), config).eval()
    ids = torch.tensor([[1, 2, 3]])
    wanted = own.generate(input_ids=ids, max_new_tokens=12, do_sample=False)
    chain = ps.Chain([own, model(seed=1)], [3], check_vocabulary=False)
    assert chain.generate(ids, 12).sequences.equal(wanted)
    given = {"input_ids": ids, "max_new_tokens": 12, "do_sample": False, "chain": chain}
    assert own.generate(**given, custom_generate=ps.custom_generate).equal(wanted)
    with ps.attach(own, chain):
        assert own.generate(input_ids=ids, max_new_tokens=12, do_sample=False).equal(wanted)
        with pytest.raises(ValueError, match="num_beams: expected its default with a chain"):
            own.generate(input_ids=ids, num_beams=2)
    base = own.get_base_model()
    for levels in ([own, base], [base, own], [own, ps.Level(base, pack=False)]):
        with pytest.raises(ValueError, match=r"levels\[1\]: .* load the base model once for each"):
            ps.Chain(levels, [3])
    with pytest.raises(ValueError, match=r"use merge_and_unload\(\) or pack=False"):
        ps.Chain([own], pack=True)
    with pytest.raises(ValueError, match=r"merge_and_unload\(\) gives such a model"):
        ps.quantize_w4(own)
    merged = own.merge_and_unload()
    assert ps.Chain([merged, "w4"], [3], pack=True).generate(ids, 12).sequences.equal(wanted)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("LoraConfig", {"alora_invocation_tokens": [5, 6]}, "alora_invocation_tokens"),
        ("PolyConfig", {"n_tasks": 2}, "POLY"),
    ],
)
def test_adapters_that_their_wrapper_takes_part_in(kind: str, options: Any, said: str) -> None:
    peft = pytest.importorskip("peft")
    options = {"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj"], **options}
    own = peft.get_peft_model(model(), getattr(peft, kind)(**options)).eval()
    with pytest.raises(ValueError, match=f"PeftModelForCausalLM: .*'default' .*{said}"):
        ps.Chain([own])


class Computed(torch.Tensor):
    """Weights that only products read, as in torchao."""

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)
        made.values = values
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            return func(args[0], args[1].values, *args[2:])
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values)
        raise NotImplementedError(func)


@pytest.mark.parametrize("some", [True, False], ids=["some", "all"])
def test_weights_that_are_no_plain_tensors(some: bool) -> None:
    own = model()
    wanted = ps.Chain([model()]).generate([1, 2, 3], 8).new_tokens
    for name, layer in own.named_modules():
        if type(layer) is nn.Linear and not (some and "up_proj" in name):
            values = layer.weight.detach()
            layer.weight = nn.Parameter(Computed(values), requires_grad=False)
    assert ps.Chain([own]).generate([1, 2, 3], 8).new_tokens == wanted
    if some:
        assert ps.Chain([own, "w4"], pack=True).generate([1, 2, 3], 8).new_tokens == wanted
        return
    with pytest.raises(ValueError, match="expected linear layers in a dtype that is multiplied"):
        ps.Chain([own], pack=True)
    with pytest.raises(ValueError, match="expected linear layers whose inputs are a multiple"):
        ps.quantize_w4(own)


def test_parametrized_layers() -> None:
    own = model()
    for layer in own.model.layers:
        nn.utils.parametrizations.weight_norm(layer.mlp.up_proj)
    wanted = ps.Chain([own]).generate([1, 2, 3], 8).new_tokens
    assert ps.Chain([own, "w4"], pack=True).generate([1, 2, 3], 8).new_tokens == wanted


def test_which_product_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    projections = 2 * 2 + 1  # projections of one input are one, which is no module of the model
    for dtype in (torch.float32, torch.bfloat16):
        made = ps.HuggingFaceLevel(model("qwen2", dtype=dtype), pack=True)._runs
        assert count(made, products.DenseLinear) == projections
        assert count(made, products.PackedLinear) == projections
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    made = ps.HuggingFaceLevel(model("qwen2"), pack=True)._runs
    assert count(made, products.OneDnnLinear) == projections


def test_packed_weights_go_with_their_level(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (products.DenseLinear, products.OneDnnLinear):
        level = ps.HuggingFaceLevel(model(), pack=True)
        assert isinstance(level._runs.lm_head, kind)
        held = weakref.ref(level._runs.lm_head.packed)
        del level
        gc.collect()
        assert held() is None
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")


def test_what_cannot_be_packed_is_refused() -> None:
    placed = model()
    placed.model.layers[1].forward = placed.model.layers[1].forward
    with pytest.raises(ValueError, match=r"draft: expected modules with .* at model\.layers\.1"):
        ps.HuggingFaceLevel(placed, name="draft", pack=True)
    doubles = model(dtype=torch.float64)
    with pytest.raises(ValueError, match="expected linear layers in a dtype that is multiplied"):
        fused.packed(doubles, "draft")


def test_wrong_logits_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = products.PackedLinear.__call__
    monkeypatch.setattr(products.PackedLinear, "__call__", lambda *a: real(*a) + 0.01)
    with pytest.raises(ValueError, match="relative difference"):
        ps.HuggingFaceLevel(model(), pack=True)


def test_projections_stay_apart_where_the_model_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def part(self: Any, x: torch.Tensor, place: int) -> torch.Tensor:
        raise RuntimeError("view size is not compatible with input tensor's size and stride")

    monkeypatch.setattr(products.Merged, "part", part)
    made = ps.HuggingFaceLevel(model("gemma2"), pack=True)._runs
    assert count(made, products.PackedLinear) == 2 * 7 + 1


@pytest.mark.parametrize("width", [8, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@torch.inference_mode()
def test_grouped_attention_is_sdpa(dtype: torch.dtype, width: int) -> None:
    attention = model().model.layers[0].self_attn
    torch.manual_seed(0)
    longest = 33
    query = torch.randn(3, longest, 4, width).to(dtype).transpose(1, 2)
    # As they lie in a cache: the first slots of more.
    key, value = (torch.randn(3, 2, 40, width).to(dtype)[:, :, :30] for _ in range(2))
    hidden = torch.rand(2, 3, 1, longest, 30) < 0.4
    hidden[..., 0] = False
    masks = torch.zeros(hidden.shape).masked_fill_(hidden, -6e4).to(dtype)
    near = 1e-5 if dtype == torch.float32 else 3e-2

    def check(rows: int, tokens: int, mask: torch.Tensor | None, scale: float | None = 0.3) -> None:
        given = (attention, query[:rows, :, :tokens], key[:rows], value[:rows], mask, 0.0, scale)
        wanted = sdpa_attention_forward(*given)[0]
        found = fused.grouped_attention(*given)[0]
        torch.testing.assert_close(found, wanted, rtol=near, atol=near)
        assert found.is_contiguous()

    for tokens in (1, 5, longest - 1, longest):
        check(3, tokens, None)
        check(1, tokens, None)
        for mask in masks[:, :, :, :tokens]:
            check(3, tokens, mask)
            check(1, tokens, mask[:1])
            check(2, tokens, mask[:2])
            check(3, tokens, mask[:1])  # the same for all rows
            check(3, tokens, mask, None)
            check(3, tokens, mask.expand(3, 4, tokens, 30))


@torch.inference_mode()
def test_what_is_more_than_a_mask_is_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "sdpa_attention_forward", lambda *a, **k: k["softcap"])
    states, mask = torch.randn(3, 4, 5, 8), torch.zeros(3, 1, 5, 5)
    more: Any = fused.grouped_attention
    assert more(model().model.layers[0].self_attn, *[states] * 3, mask, softcap=3.0) == 3.0


FAULTS = """
import resource, sys, torch
from polyspec_ext.levels.fused import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        blocks = [torch.empty(1 << 20).fill_(1.0) for _ in range(5)]  # 4 MiB each
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
faults()
before = faults()
keep_freed_memory()
faults()
print(before, faults())
"""


def test_freed_memory_is_kept() -> None:
    clean = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    clean.pop("LD_PRELOAD", None)
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env=clean, capture_output=True, text=True, check=True
    )
    before, after = map(int, done.stdout.split())
    if before < 1000:
        pytest.skip("this allocator keeps freed memory by itself")
    assert after < before / 10


@pytest.mark.parametrize(
    ("dtype", "tokens", "refused"),
    [(torch.bfloat16, 1, False), (torch.bfloat16, 7, True), (torch.float32, 1, True)],
)
def test_logits_of_one_token_may_be_moved_by_rounding(monkeypatch, dtype, tokens, refused) -> None:
    """States of some tokens are so large in some models that rounding to 16 bits changes all of
    their logits; where the logits of a whole text differ, the packed model is wrong."""

    def move(module: nn.Module, inputs: Any, output: Any) -> None:
        output.logits[0, -tokens:] *= 2

    monkeypatch.setattr(fused, "use_grouped", lambda made: made.register_forward_hook(move))
    own = small_models.make("llama").to(dtype)
    if not refused:
        assert fused.packed(own, "one")[0] is not own
        return
    with pytest.raises(ValueError, match="one: expected the packed model's logits to be"):
        fused.packed(own, "one")


HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MIB = 1 << 20


def random_bytes(size: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=random)


def huge_bytes() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("AnonHugePages"):
            return int(line.split()[1]) << 10
    return 0


@pytest.mark.skipif(
    not HUGE.is_file() or "[never]" in HUGE.read_text(), reason="the system gives no huge pages"
)
def test_pages_are_huge() -> None:
    before = huge_bytes()
    kept = [in_huge_pages(random_bytes(20 * MIB, seed)) for seed in range(3)]
    # The ends of the memory may lie in small allocations.
    assert huge_bytes() - before >= 50 * MIB
    assert kept[0].numel() == 20 * MIB


def small(seed: int = 0, dtype: torch.dtype = torch.float32, inner: int = 64) -> Any:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return small_models.llama(seed, 1, 40, intermediate_size=inner, **heads).to(dtype)


def forms(chain: ps.Chain) -> list[tuple[torch.dtype, bool]]:
    drafter: Any = chain.drafter
    levels: list[Any] = [*chain.levels, drafter.level]
    return [(level.model.dtype, level.pack) for level in levels]


@pytest.mark.parametrize(
    ("capability", "packs"), [("AVX512", True), ("AVX2", True), ("DEFAULT", False)]
)
def test_float32_is_packed_by_the_processor(capability, packs, monkeypatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    options: dict[str, Any] = {"check_vocabulary": False}
    chain = ps.Chain([small(), small(1)], [3], pack="auto", **options)
    assert forms(chain) == [(torch.float32, packs)] * 2
    assert forms(ps.Chain([small(), small(1)], [3], **options)) == [(torch.float32, False)] * 2
    plain = ps.Chain([small(), small(1)], [3], **options)
    texts = [x.generate([1, 2, 3], 30, eos_token_id=[]).sequences for x in (chain, plain)]
    assert texts[0].equal(texts[1])
    # All layers of this copy are in 4 bits, and nothing is left to pack.
    copy = ps.quantize_w4(small(), 32, head=True)
    assert not ps.Chain([copy], pack="auto").levels[0].pack


@pytest.mark.parametrize("multiplies", [True, False])
@pytest.mark.parametrize("pack", [None, "auto", True])
def test_the_data_type_follows_from_the_processor(tmp_path, multiplies, pack, monkeypatch) -> None:
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("bfloat16 is packed by the CPU's own product here")
    monkeypatch.setattr(sources, "multiplies_bfloat16", lambda: multiplies)
    half, whole = (torch.bfloat16, True), (torch.float32, True)
    paths = [tmp_path / name for name in ("target", "middle", "drafter")]
    for number, path in enumerate(paths):
        small(number, torch.bfloat16, 48).save_pretrained(path)

    def loaded(**options: Any) -> Any:
        return forms(ps.Chain(paths, check_vocabulary=False, pack=pack, **options))

    # This target's logits in bfloat16 vary with a pass's width.
    assert loaded() == [whole, *([half] * 2 if multiplies else [whole] * 2)]
    assert loaded(dtype=torch.float32) == [whole] * 3
    assert loaded(dtype="bfloat16") == [half] * 3
    given = ps.Chain([small(0, torch.bfloat16)], pack="auto").levels[0]
    assert given.pack


def test_levels_of_the_users_own_stay() -> None:
    level = ps.HuggingFaceLevel(small())
    draft = ps.HuggingFaceLevel(small(1), pack=True)
    chain = ps.Chain([level, draft], [2], check_vocabulary=False, pack="auto")
    assert chain.levels[0] is level
    assert not level.pack
    copy = ps.HuggingFaceLevel(small(2), shares_cache_with=level)
    chain = ps.Chain([level.model, copy], [2], check_vocabulary=False, pack="auto")
    assert chain.levels[0] is level


def test_the_shipped_chain_is_packed() -> None:
    made = tiny.levels()
    half = torch.bfloat16 if sources.multiplies_bfloat16() else torch.float32
    assert [level.model.dtype for level in made.values()] == [torch.float32, half, half]
    packs = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    assert made["target"].pack == packs
    assert not any(level.pack for level in tiny.levels(pack=False).values())
