"""Levels of GGUF files: they multiply with the file's blocks, and are the file's model."""

import contextlib
import itertools
import random
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_models
import torch
import transformers as hf

import polyspec_ext as ps
from benchmarks.engines import write_checkpoint
from polyspec_ext.levels import load, tokenizer_at
from polyspec_ext.levels.gguf import BlockLinear

pytest.importorskip("gguf")
import gguf
from gguf_blocks import TYPES, write_model
from native_builds import run

PROMPT = [5, 17, 80, 3, 3, 41]
# As llama.cpp mixes them: other types for values, down projections, and the head.
MIXED = {"": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q5_0", "output": "Q8_0", "token_embd": "Q6_K"}
KINDS = pytest.mark.parametrize("types", [MIXED, {"": "F16"}], ids=["blocks", "dequantised"])


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=ids).logits
    return found


def is_near(file: Path) -> None:
    """The level is transformers' dequantised model, but for activations of 8 bits."""
    whole = hf.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float64
    )
    ids = torch.tensor([PROMPT])
    level, wanted = load(file), logits(whole, ids)
    assert (logits(level.model, ids).double() - wanted).norm() < 0.06 * wanted.norm()
    dequantised = logits(load(file, blocks=False).model, ids).double()
    assert (dequantised - wanted).norm() < 1e-5 * wanted.norm()
    own, other = level.model.config, whole.config
    for name in ("num_key_value_heads", "rms_norm_eps", "rope_parameters", "tie_word_embeddings"):
        assert getattr(own, name) == getattr(other, name)


@pytest.mark.parametrize("name", TYPES)
def test_every_type(tmp_path: Path, name: str) -> None:
    write_model(tmp_path / "model.gguf", "qwen2", {"": name, "attn_k": "F16"})
    is_near(tmp_path / "model.gguf")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_mixed_types(tmp_path: Path, family: str, tied: bool) -> None:
    """Llama's files have other rows of queries; a tied head has the embeddings' blocks."""
    file = tmp_path / "model.gguf"
    write_model(file, family, MIXED, tied)
    is_near(file)
    model = load(file).model
    assert isinstance(model.get_output_embeddings(), BlockLinear)
    linear = [module for module in model.modules() if isinstance(module, BlockLinear)]
    assert len(linear) == 1 + 2 * 2  # projections of one input are one, which is no module
    assert not any(type(module) is torch.nn.Linear for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TYPES)
def test_embeddings_are_the_dequantised_bits(tmp_path: Path, name: str, dtype: Any) -> None:
    """Also embeddings that Gemma 3 scales, and embeddings that share blocks with the head."""

    def norms(tensors: dict[str, Any]) -> None:
        for i, name in itertools.product(range(2), ("post_attention", "post_ffw")):
            tensors[f"blk.{i}.{name}_norm.weight"] = tensors["output_norm.weight"]
        for i, name in itertools.product(range(2), "qk"):
            tensors[f"blk.{i}.attn_{name}_norm.weight"] = np.ones(64, np.float32), None

    file = tmp_path / "model.gguf"
    ids = torch.randint(320, (4, 9))[:, ::2]
    for family, change in (("llama", None), ("gemma3", norms)):
        write_model(file, family, {"": name}, tied=True, change=change)
        embeds = load(file, dtype).model.get_input_embeddings()
        whole = load(file, dtype, blocks=False).model.get_input_embeddings()
        assert isinstance(whole, torch.nn.Embedding)
        assert not isinstance(embeds, torch.nn.Embedding)
        assert embeds(ids).dtype == dtype
        assert embeds(ids).equal(whole(ids))
        assert embeds(ids[:0]).shape == (0, 5, 256)
        for id in (-1, 320):
            with pytest.raises(RuntimeError, match="rows: expected 0 to 319"):
                embeds(torch.tensor([id]))


MEMORY = """
import sys
from pathlib import Path
from polyspec_ext.levels.gguf import GgufFile, gguf_model
import torch

def memory():
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return [int(status[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM")]

gguf_model(GgufFile(sys.argv[1]), torch.float32)
before = memory()
model = gguf_model(GgufFile(sys.argv[2]), torch.float32)
print(*(after - size for after, size in zip(memory(), before)))
"""


@pytest.mark.parametrize("tied", [False, True])
def test_memory_of_a_file(tmp_path: Path, tied: bool) -> None:
    """1.25 times its size, and 1.4 times while it is read; embeddings alone would be 7 times."""
    files = [tmp_path / "small.gguf", tmp_path / "large.gguf"]
    for file, ids in zip(files, (320, 300_000), strict=True):
        write_model(file, "qwen2", {"": "Q4_K"}, tied, ids=ids)
    done = run(sys.executable, "-c", MEMORY, *files, OMP_NUM_THREADS="1")
    resident, peak = map(int, done.stdout.split())
    size = files[1].stat().st_size
    assert 0.9 * size < resident < 1.25 * size
    assert peak < 1.4 * size


@KINDS
def test_factors_of_frequencies(tmp_path: Path, types: dict[str, str]) -> None:
    """As in files of Llama 3.1: `transformers` leaves them out."""
    plain, scaled = tmp_path / "plain.gguf", tmp_path / "scaled.gguf"
    factors = np.linspace(1, 8, 32, dtype=np.float32)
    write_model(plain, "llama", types)
    write_model(scaled, "llama", types, factors=factors)
    ids = torch.tensor([PROMPT])
    without, found = (logits(load(file).model, ids) for file in (plain, scaled))
    model = load(plain).model
    model.model.rotary_emb.inv_freq /= torch.from_numpy(factors)
    assert logits(model, ids).equal(found)
    assert not found.equal(without)


@KINDS
@pytest.mark.parametrize(
    "header",
    [
        lambda w: w.add_float32("llama.rope.scale_linear", 4.0),
        lambda w: w.add_rope_scaling_factor(4.0),
        lambda w: (w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR),
                   w.add_rope_scaling_factor(4.0)),
    ],
    ids=["scale_linear", "factor", "type and factor"],
)  # fmt: skip
def test_linear_scaling_of_positions(tmp_path, types, header) -> None:
    plain, scaled = tmp_path / "plain.gguf", tmp_path / "scaled.gguf"
    write_model(plain, "llama", types)
    write_model(scaled, "llama", types, header=header)
    ids, quarters = torch.tensor([PROMPT]), torch.arange(len(PROMPT))[None] / 4
    model = load(plain).model
    with torch.inference_mode():
        wanted = model(input_ids=ids, position_ids=quarters).logits
    assert torch.allclose(logits(load(scaled).model, ids), wanted, atol=0.02 * wanted.std().item())
    assert not torch.allclose(logits(model, ids), wanted, atol=0.02 * wanted.std().item())


@KINDS
def test_other_rotations_are_refused(tmp_path: Path, types: dict[str, str]) -> None:
    file = tmp_path / "model.gguf"
    write_model(
        file, "qwen2", types, header=lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    )
    with pytest.raises(
        ValueError, match=r"qwen2\.rope\.scaling\.type: expected linear, given 'yarn'"
    ):
        load(file)
    for family, size in (("llama", 16), ("qwen2", 32)):
        write_model(file, family, types, factors=np.ones(size, dtype=np.float32))
        with pytest.raises(ValueError, match=rf"rope_freqs\.weight.*given .*\[{size}\]"):
            load(file)


def header_keys() -> list[str]:
    """All that the package gguf knows of, by the names that a Llama's file has."""

    def texts(of: type) -> set[str]:
        parts = [getattr(of, name) for name in vars(of) if not name.startswith("_")]
        inner = [texts(part) for part in parts if isinstance(part, type)]
        return {part for part in parts if isinstance(part, str)}.union(*inner)

    forms = {key for key in texts(gguf.Keys) if key.startswith("{arch}.")}
    return sorted(key.replace("{arch}", "llama") for key in forms)


FOLLOWED = {
    "vocab_size": 320, "context_length": 512, "embedding_length": 256, "block_count": 2,
    "feed_forward_length": 512, "attention.head_count": 4, "attention.head_count_kv": 2,
    "attention.key_length": 64, "attention.value_length": 64, "attention.causal": True,
    "attention.layer_norm_rms_epsilon": 1e-6, "rope.dimension_count": 64, "rope.freq_base": 1e4,
    "rope.scaling.type": "none", "rope.scaling.factor": 1.0, "rope.scaling.attn_factor": 1.0,
    "rope.scaling.finetuned": True, "expert_count": 0, "expert_used_count": 0,
    "nextn_predict_layers": 0, "tensor_data_layout": "Meta AI original pth",
}  # fmt: skip


ANY = {
    ("context_length", int), ("attention.layer_norm_rms_epsilon", int),
    ("attention.layer_norm_rms_epsilon", float), ("rope.freq_base", int), ("rope.freq_base", float),
    ("rope.scaling.factor", float), ("rope.scale_linear", float),
    *(("rope.scaling.finetuned", kind) for kind in (int, float, str, list, bool)),
}  # fmt: skip


def put(writer: Any, key: str, value: Any) -> None:
    for shard in writer.kv_data:
        shard.pop(key, None)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
           str: writer.add_string, list: writer.add_array}  # fmt: skip
    add[type(value)](key, value)


def test_what_a_header_says_is_followed_or_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    known = [*header_keys(), "llama.anything"]
    assert {f"llama.{key}" for key in FOLLOWED} <= {*known}
    for key in known:
        usual = FOLLOWED.get(key.removeprefix("llama."))
        if usual is not None:
            write_model(file, "llama", {"": "F16"}, header=lambda w: put(w, key, usual))  # noqa: B023
            load(file)
        for value in (3, 0.7, "x", [2, 4], False):
            if (key.removeprefix("llama."), type(value)) in ANY or value == usual:
                continue
            write_model(file, "llama", {"": "F16"}, header=lambda w: put(w, key, value))  # noqa: B023
            with pytest.raises(ValueError, match=rf"llama\.{key.split('.')[1]}|shape \[3"):
                load(file)


@pytest.mark.parametrize(
    "key",
    ["context_length", "embedding_length", "block_count", "feed_forward_length",
     "attention.head_count", "attention.layer_norm_rms_epsilon"],
)  # fmt: skip
def test_what_a_header_must_say(tmp_path: Path, key: str) -> None:
    file = tmp_path / "model.gguf"
    write_model(file, "qwen2", {"": "F16"}, header=lambda w: w.kv_data[0].pop(f"qwen2.{key}"))
    with pytest.raises(ValueError, match=rf"qwen2\.{key}: expected .*, given None"):
        load(file)


def test_a_number_for_each_layer_is_no_length(tmp_path: Path) -> None:
    """An array was read as its length: two groups of keys for any contents."""
    file = tmp_path / "model.gguf"
    key = "llama.attention.head_count_kv"
    write_model(file, "llama", {"": "Q4_0"}, header=lambda w: put(w, key, [2, 2]))
    load(file)
    write_model(file, "llama", {"": "Q4_0"}, header=lambda w: put(w, key, [2, 1]))
    with pytest.raises(ValueError, match="head_count_kv: expected an integer"):
        load(file)


@KINDS
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2"])
def test_every_tensor_is_there_and_read(tmp_path: Path, family: str, types: dict[str, str]) -> None:
    file = tmp_path / "model.gguf"
    tensors: dict[str, Any] = {}
    write_model(file, family, types, change=tensors.update)
    for name, (values, kind) in tensors.items():

        def narrow(given: dict[str, Any], name: str = name) -> None:
            given[name] = given[name][0][: len(given[name][0]) // 2], given[name][1]

        changes = [("expected", narrow)]
        if not name.endswith(".bias") and name != "output.weight":
            changes.append(("expected", lambda given, name=name: given.pop(name)))
        twins = [f"{name}.scale", name.replace("blk.1", "blk.7"), name.replace("weight", "bias")]
        for twin in (twin for twin in twins if twin not in tensors):
            if family == "llama" and twin.endswith(".bias") and twin.startswith("blk."):
                continue
            changes.append(("expected no|block_count|given", lambda given, twin=twin,
                            own=(values, kind): given.update({twin: own})))  # fmt: skip
        for message, change in changes:
            write_model(file, family, types, change=change)
            with pytest.raises(ValueError, match=message):
                load(file)


@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
@pytest.mark.parametrize("names", [["q", "k", "v", "output"], ["q", "k", "v"], ["gate", "down"]])
def test_biases_of_llama(tmp_path: Path, kind: str, names: list[str]) -> None:
    """As of InternLM and Bielik. Biases that a file lacks are 0."""
    file = tmp_path / "model.gguf"
    part = "ffn" if "down" in names else "attn"
    biases = [f"blk.{i}.{part}_{name}" for i in range(2) for name in names]

    def change(tensors: dict[str, Any]) -> None:
        for number, name in enumerate(biases):
            drawn = np.random.default_rng(number).normal(size=len(tensors[f"{name}.weight"][0]))
            tensors[f"{name}.bias"] = drawn.astype(np.float32), None

    write_model(file, "llama", {"": kind}, change=change)
    level, whole = load(file), load(file, blocks=False).model
    ids = torch.tensor([PROMPT])
    given, wanted = logits(level.model, ids), logits(whole, ids)
    assert (given - wanted).norm() < 0.06 * wanted.norm()
    found = dict(whole.named_parameters())
    for name in biases:
        own = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
        path = next(p for p in found if own.get_name(p, (".bias",)) == f"{name}.bias")
        assert found[path].abs().max() > 1
    assert sum(bool(p.any()) for name, p in found.items() if name.endswith("bias")) == len(biases)
    wanted = ps.Chain([load(file).model], pack=False).generate([PROMPT], 16).sequences
    chain = ps.Chain([file, "prompt-lookup"], pack=False)
    assert chain.generate([PROMPT], 16).sequences.equal(wanted)


@KINDS
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_model_in_several_files(tmp_path: Path, family: str, types: dict[str, str]) -> None:
    whole = load(*write_model(tmp_path / "whole.gguf", family, types)).model
    files = write_model(tmp_path / "model.gguf", family, types, parts=3)
    ids = torch.tensor([PROMPT])
    for file in files:
        assert logits(load(file).model, ids).equal(logits(whole, ids))
    chain = ps.Chain([files[1]], pack=False)
    assert chain.generate(PROMPT, 8).sequences.equal(
        ps.Chain([whole]).generate(PROMPT, 8).sequences
    )
    second = files[1].read_bytes()
    third_place = files[2].rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(
        ValueError, match=r"all 3 files of a split model, given no .*00003-of-00003"
    ):
        load(files[0])
    with pytest.raises(
        ValueError, match=r"expected part 1 of 1.*given split\.no 2 and split\.count 3"
    ):
        load(third_place)
    files[2].write_bytes(second)
    with pytest.raises(ValueError, match=r"expected part 3 of 3.*split\.no 1"):
        load(files[0])


def damaged(whole: bytes) -> dict[str, bytes]:
    def behind(key: str) -> int:
        return whole.index(struct.pack("<Q", len(key)) + key.encode()) + 8 + len(key)

    def value(key: str, form: str, *values: Any, at: int = 0) -> bytes:
        begin = behind(key) + at
        end = begin + struct.calcsize(f"<{form}")
        return whole[:begin] + struct.pack(f"<{form}", *values) + whole[end:]

    norm, gate = "blk.0.attn_norm.weight", "blk.0.ffn_gate.weight"
    down, layers = "blk.1.ffn_down.weight", "qwen2.block_count"
    numbers = {
        f"{key} {number}": value(f"qwen2.{key}", "I", number, at=4)
        for key in ("block_count", "embedding_length", "attention.head_count",
                    "attention.head_count_kv", "feed_forward_length")
        for number in (0, 3, 2**31 - 1, 2**32 - 1)
    }  # fmt: skip
    return numbers | {
        "a norm of another width": value(norm, "Q", 512, at=4),
        "a norm of one feature": value(norm, "Q", 1, at=4),
        "a norm of none": value(norm, "Q", 0, at=4),
        "no axes": value(norm, "I", 0),
        "many axes": value(norm, "I", 2**32 - 1),
        "fewer outputs": value(gate, "Q", 256, at=12),
        "more than there are": value(gate, "Q", 2**62, at=12),
        "an odd number of inputs": value(gate, "Q", 33, at=4),
        "whole numbers": value(down, "I", 24, at=20),
        "an unknown type": value(down, "I", 99, at=20),
        "an offset within a tensor": value(down, "Q", 1, at=24),
        "an offset behind the end": value(down, "Q", 2**62, at=24),
        "a value of an unknown type": value(layers, "I", 77),
        "many strings": value(layers, "IIQ", 9, 8, 2**63),
        "many numbers": value(layers, "IIQ", 9, 4, 2**62),
        "arrays of arrays": value(layers, "IIQ", 9, 9, 1),
        "a long string": value("tokenizer.ggml.model", "Q", 2**63, at=4),
        "a long string of two": value(layers, "IIQQ", 9, 8, 2, 2**63),
        "many values": whole[:16] + struct.pack("<Q", 2**63) + whole[24:],
        "many tensors": whole[:8] + struct.pack("<Q", 2**63) + whole[16:],
        "an earlier version": whole[:4] + struct.pack("<I", 1) + whole[8:],
        "another kind": b"GGML" + whole[4:],
        "a header that is cut": whole[:100],
        "a tensor that is cut": whole[:-100],
        "nothing": b"",
    }


@pytest.mark.parametrize("types", [{"": "Q4_0", "ffn_down": "Q8_0"}, {"": "F16"}])
def test_headers_that_contradict_their_file(tmp_path: Path, types: dict[str, str]) -> None:
    """An error that says so, before anything is allocated."""
    file = tmp_path / "model.gguf"
    write_model(file, "qwen2", types)
    for content in damaged(file.read_bytes()).values():
        file.write_bytes(content)
        with pytest.raises(ValueError, match="location: expected the id, directory or GGUF file"):
            load(file)


def test_damaged_headers_never_give_another_error(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_model(file, "llama", {"": "F16"}, factors=np.ones(32, dtype=np.float32))
    whole, draw = file.read_bytes(), random.Random(0)
    end = whole.index(b"output_norm.weight") + 60
    for _ in range(150):
        content = bytearray(whole)
        for _ in range(draw.choice((1, 1, 4))):
            content[draw.randrange(end)] = draw.randrange(256)
        file.write_bytes(content)
        with contextlib.suppress(ValueError):
            load(file)


@pytest.mark.parametrize("tied", [False, True])
def test_a_file_in_float32_is_its_model(tmp_path: Path, tied: bool) -> None:
    model, file = small_models.make("llama"), tmp_path / "model.gguf"
    model.config.tie_word_embeddings = tied
    model.tie_weights()
    write_checkpoint(model, file, "llama")
    chain = ps.Chain([file, "prompt-lookup"], pack=False)
    assert chain.names == ["model.gguf", "prompt lookup"]
    wanted = ps.Chain([model]).generate(PROMPT, 16).sequences
    assert chain.generate(PROMPT, 16).sequences.equal(wanted)
    with pytest.raises(ValueError, match=r"expected a tokenizer .*model\.gguf"):
        tokenizer_at(file)


def test_other_files_are_dequantised_with_a_word(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("polyspec_ext.progress.on_terminal", lambda: True)
    file = tmp_path / "model.gguf"
    write_model(file, "llama", {"": "F16"})
    level = load(file)
    assert not any(isinstance(module, BlockLinear) for module in level.model.modules())
    assert "dequantising model.gguf: no tensor in blocks" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
def test_an_adapter_is_no_model(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "adapter.gguf"
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_type("adapter")
    writer.add_block_count(1)
    raw = gguf.quantize(np.zeros((4, 32), np.float32), gguf.GGMLQuantizationType[kind])
    writer.add_tensor("blk.0.attn_q.weight.lora_a", raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"general\.type: expected a model, given 'adapter'"):
        load(file)


@pytest.mark.parametrize("kind", ["Q4_0", "F16"])
def test_ends_of_a_turn(tmp_path: Path, kind: str) -> None:
    """The header's ids, and tokens that end turns everywhere, if they are no text."""
    file = tmp_path / "model.gguf"

    def header(writer: Any) -> None:
        writer.add_eos_token_id(2)
        writer.add_eot_token_id(7)
        writer.add_uint32("tokenizer.ggml.eom_token_id", 9)
        texts = [f"t{i}" for i in range(320)]
        texts[11], texts[12] = "<|eot_id|>", "<end_of_turn>"
        writer.add_token_list(texts)
        writer.add_token_types([1] * 12 + [3] + [1] * 307)

    write_model(file, "llama", {"": kind}, header=header)
    assert load(file).eos_token_ids == (2, 7, 9, 12)
