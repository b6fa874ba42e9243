"""Levels of GGUF files: they multiply with the file's blocks, and are the file's model."""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import polyspec_ext as ps
from polyspec_ext.levels import load, tokenizer_at
from polyspec_ext.levels.gguf import BlockLinear, block_model

pytest.importorskip("gguf")
import gguf
from gguf_blocks import TYPES, write_model

PROMPT = [5, 17, 80, 3, 3, 41]
# As llama.cpp mixes them: other types for values, for what leads back, and for the head.
MIXED = {"": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q5_0", "output": "Q8_0", "token_embd": "Q6_K"}
REAL = Path(os.environ.get("POLYSPEC_TEST_GGUF", "")) / "qwen0.5b.gguf"


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=ids).logits
    return found


def is_near(file: Path) -> None:
    """The file's level is its model, dequantised by transformers and in float64, but for
    activations of 8 bits."""
    level, whole = load(file), load(file, blocks=False)
    ids = torch.tensor([PROMPT])
    given, wanted = logits(level.model, ids), logits(whole.model.double(), ids)
    assert (given.double() - wanted).norm() < 0.06 * wanted.norm()
    own, other = level.model.config, whole.model.config
    for name in ("num_key_value_heads", "rms_norm_eps", "rope_parameters", "tie_word_embeddings"):
        assert getattr(own, name) == getattr(other, name)


@pytest.mark.parametrize("name", TYPES)
def test_every_type(tmp_path: Path, name: str) -> None:
    write_model(tmp_path / "model.gguf", "qwen2", {"": name})
    is_near(tmp_path / "model.gguf")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_mixed_types(tmp_path: Path, family: str, tied: bool) -> None:
    """Rows of queries and keys lie in another order in files of Llama; a tied head multiplies with
    the embeddings' blocks."""
    file = tmp_path / "model.gguf"
    write_model(file, family, MIXED, tied)
    is_near(file)
    model = load(file).model
    assert isinstance(model.get_output_embeddings(), BlockLinear)
    linear = [module for module in model.modules() if isinstance(module, BlockLinear)]
    assert len(linear) == 1 + 2 * 2  # projections of one input are one, which is no module
    assert not any(type(module) is torch.nn.Linear for module in model.modules())


def test_a_matrix_of_another_type_is_dequantised(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_model(file, "llama", {"": "Q4_0", "attn_k": "F16", "ffn_down": "F16"})
    is_near(file)


@pytest.mark.parametrize("types", [MIXED, {"": "F16"}], ids=["blocks", "dequantised"])
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


@pytest.mark.parametrize("types", [MIXED, {"": "F16"}], ids=["blocks", "dequantised"])
def test_other_rotations_are_refused(tmp_path: Path, types: dict[str, str]) -> None:
    file = tmp_path / "model.gguf"
    write_model(file, "qwen2", types, scaling=gguf.RopeScalingType.YARN)
    with pytest.raises(ValueError, match=r"without qwen2\.rope\.scaling\.type, given yarn"):
        load(file)
    write_model(file, "llama", types, factors=np.ones(16, dtype=np.float32))
    with pytest.raises(
        ValueError, match=r"rope_freqs\.weight: expected shape \[32\].*given \[16\]"
    ):
        load(file)


def test_no_weight_is_rounded_again(tmp_path: Path) -> None:
    """The head's products of activations that are exact in 8 bits are the file's weights."""
    file = tmp_path / "model.gguf"
    write_model(file, "qwen2", {"": "Q4_K"})
    head = load(file).model.get_output_embeddings()
    whole = load(file, blocks=False).model.get_output_embeddings().weight
    with torch.inference_mode():
        found = head(torch.eye(256))
    assert torch.allclose(found.T, whole, rtol=2**-20, atol=1e-8)


@pytest.mark.parametrize("pack", [False, "auto"])
def test_chains_of_files(tmp_path: Path, pack: Any) -> None:
    """A level's logits are the same bits in every pass, and so are greedy texts."""
    target, draft = tmp_path / "target.gguf", tmp_path / "draft.gguf"
    write_model(target, "llama", MIXED)
    write_model(draft, "llama", {**MIXED, "ffn_up": "Q5_K"})
    plain = ps.Chain([target], pack=pack)
    chain = ps.Chain([target, draft, "prompt-lookup"], pack=pack)
    assert chain.levels[0].varies == ()
    wanted = plain.generate([PROMPT, PROMPT[:3]], 24).sequences
    assert chain.generate([PROMPT, PROMPT[:3]], 24).sequences.equal(wanted)


def test_other_files_are_dequantised_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("polyspec_ext.progress.on_terminal", lambda: True)
    file = tmp_path / "model.gguf"
    write_model(file, "llama", {"": "F16"})
    assert block_model(file, torch.float32) == "no tensor in blocks"
    level = load(file)
    assert not any(isinstance(module, BlockLinear) for module in level.model.modules())
    assert "dequantising model.gguf: no tensor in blocks" in capsys.readouterr().err


def test_what_is_no_file(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_model(file, "llama", {"": "Q4_0"})
    whole = file.read_bytes()
    for part in (whole[:100], whole[:-100], b"GGML" + whole[4:], b""):
        file.write_bytes(part)
        with pytest.raises(ValueError, match="place: expected the id, directory or GGUF file"):
            load(file)


def test_a_value_of_an_unknown_type(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQQcI", 3, 0, 1, 1, b"a", 77))
    with pytest.raises(ValueError, match="expected values of known types, given type 77"):
        load(file)


@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
def test_an_adapter_is_no_model(tmp_path: Path, kind: str) -> None:
    """With Q8_0 it was a KeyError; with F16 a model of random weights was loaded."""
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
    with pytest.raises(ValueError, match=r"expected a tensor token_embd\.weight in the file"):
        load(file)


def test_a_files_tokenizer_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds; what one caller does to it no other sees."""
    calls: list[dict[str, Any]] = []

    def made(place: str, **options: Any) -> dict[str, int]:
        calls.append(options)
        return {"made": len(calls)}

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", made)
    file = tmp_path / "model.gguf"
    write_model(file, "qwen2", {"": "Q4_0"})
    first, second = tokenizer_at(file), tokenizer_at(file)
    assert first == second == {"made": 1}
    assert first is not second
    assert calls == [{"gguf_file": "model.gguf", "tokenizer_type": "qwen2"}]
    write_model(file, "llama", {"": "Q4_1"})
    assert tokenizer_at(file) == {"made": 2}
    assert calls[1:] == [{"gguf_file": "model.gguf"}]
    monkeypatch.setattr("transformers.TokenizersBackend.from_pretrained", lambda *_, **__: "own")
    write_model(file, "llama", {"": "Q4_K"}, tokenizer="gpt2")
    assert tokenizer_at(file) == "own"


@pytest.mark.skipif(not REAL.is_file(), reason="no qwen0.5b.gguf in POLYSPEC_TEST_GGUF")
def test_a_real_file() -> None:
    text = Path(__file__).parents[2].joinpath("docs", "architecture.md").read_text()
    ids = torch.tensor([tokenizer_at(REAL)(text)["input_ids"][:512]])
    level = load(REAL)
    given, wanted = logits(level.model, ids), logits(load(REAL, blocks=False).model, ids)

    def perplexity(rows: torch.Tensor) -> float:
        return math.exp(torch.nn.functional.cross_entropy(rows[0, :-1], ids[0, 1:]).item())

    assert perplexity(given) == pytest.approx(perplexity(wanted), rel=0.01)
    assert (given.argmax(-1) == wanted.argmax(-1)).float().mean() > 0.95
    prompt = ids[0, :40].tolist()
    plain = ps.Chain([level]).generate(prompt, 48).sequences
    assert ps.Chain([level, "prompt-lookup"]).generate(prompt, 48).sequences.equal(plain)
