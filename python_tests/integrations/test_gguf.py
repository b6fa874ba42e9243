"""GGUF files: what transformers reads back is what was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import small_models
import torch
import transformers

import polyspec_ext as ps
from polyspec_ext import cli
from polyspec_ext.integrations.gguf import write_gguf
from polyspec_ext.levels import tokenizer_at

gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize("tied", [False, True])
def test_read_back(tmp_path: Path, tied: bool) -> None:
    model = small_models.make("llama")
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    write_gguf(model, tmp_path / "model.gguf")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")
    ids = torch.tensor([[1, 5, 2, 9, 40]])
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected the architecture llama, given qwen2"):
        write_gguf(small_models.make("qwen2"), tmp_path / "model.gguf")
    scaled = small_models.make("llama")
    scaled.config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ValueError, match="expected rotary embeddings unscaled, given linear"):
        write_gguf(scaled, tmp_path / "model.gguf")


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, file = tmp_path / "model", tmp_path / "model.gguf"
    small_models.make("llama").save_pretrained(folder)
    assert cli.main(["export", "gguf", str(folder), str(file)]) == 0
    assert capsys.readouterr().out == f"{file}\n"
    reader = gguf.GGUFReader(file)
    assert {tensor.name for tensor in reader.tensors} >= {"token_embd.weight", "output.weight"}


@pytest.mark.parametrize("pack", [False, "auto"])
def test_a_file_is_a_level(tmp_path: Path, pack: Any) -> None:
    """By its path: its text is that of the model that was written."""
    model = small_models.make("llama")
    file = tmp_path / "model.gguf"
    write_gguf(model, file)
    chain = ps.Chain([file, "prompt-lookup"], pack=pack)
    assert chain.names == ["model.gguf", "prompt lookup"]
    found = chain.generate([1, 5, 2, 9], 16).sequences
    assert found.equal(ps.Chain([model]).generate([1, 5, 2, 9], 16).sequences)


def test_a_files_own_tokenizer(tmp_path: Path) -> None:
    write_gguf(small_models.make("llama"), tmp_path / "model.gguf")
    with pytest.raises(ValueError, match=r"expected a tokenizer .*model\.gguf"):
        tokenizer_at(tmp_path / "model.gguf")
