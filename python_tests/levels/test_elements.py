"""Tests of the kinds of elements of a chain, and of the words for them."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from small_models import make
from toy import ToyLevel

import polyspec_ext as ps
from polyspec_ext.levels import tokenizer_at


@pytest.mark.parametrize("thing", [None, 3, object(), ToyLevel, b"w4", {"model": 1}])
def test_a_stranger_is_told_what_would_do(thing: Any) -> None:
    with pytest.raises(TypeError, match=r"^levels\[1\]: expected one of: ") as error:
        ps.Chain([ToyLevel(5, 1), thing])
    for known in ("causal model", "a model id", "GGUF", "rollback", "'prompt-lookup'", "'w4'",
                  "eagle:", "early-exit", "propose"):  # fmt: skip
        assert known in str(error.value)


def test_what_stands_for_a_level(tmp_path: Path) -> None:
    model = make("llama")
    model.save_pretrained(tmp_path)
    given = [model, ps.Level(model), str(tmp_path), tmp_path, ps.DraftModel(ps.Level(model))]
    texts = [ps.Chain([thing]).generate([1, 2, 3], 12).sequences for thing in given]
    assert all(text.equal(texts[0]) for text in texts)


def test_special_tokens_alone_are_no_tokenizer(tmp_path: Path) -> None:
    """transformers makes a tokenizer of a configuration's name, which reads no text."""
    make("qwen2").config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="expected a tokenizer beside the model, given none"):
        tokenizer_at(tmp_path)


@pytest.mark.parametrize(
    ("weights", "config", "message"),
    [
        (lambda w: {k: v for k, v in w.items() if k != "lm_head.weight"}, {},
         r"expected the weights lm_head\.weight, given none"),
        (None, {"num_hidden_layers": 3}, r"the weights model\.layers\.2\..* more, given none"),
        (lambda w: {f"base_model.model.{k}": v for k, v in w.items()}, {}, "expected the weights "),
        (lambda w: {k.replace("q_proj.", "q_proj.base_layer."): v for k, v in w.items()}, {},
         "expected the weights .*q_proj"),
        (None, {"num_hidden_layers": 1}, r"expected no weights model\.layers\.1\."),
        (lambda w: {**w, "model.extra.weight": w["lm_head.weight"].clone()}, {},
         r"expected no weights model\.extra\.weight"),
        (None, {"intermediate_size": 64}, "expected weights of the model's shapes, given others"),
        (None, {"vocab_size": 64}, "expected weights of the model's shapes, given others"),
    ],
)  # fmt: skip
def test_weights_that_are_not_the_models(weights, config, message, tmp_path) -> None:
    """Refuse weights that are missing: they were random, and the chain answered."""
    make("llama").save_pretrained(tmp_path)
    file, about = tmp_path / "model.safetensors", tmp_path / "config.json"
    if weights is not None:
        save_file(weights(load_file(file)), file, metadata={"format": "pt"})
    about.write_text(json.dumps({**json.loads(about.read_text()), **config}))
    with pytest.raises(ValueError, match=rf"^levels\[0\]: expected the id, .*{message}"):
        ps.Chain([tmp_path], pack=False)


def test_files_by_their_first_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    from gguf_blocks import write_model

    write_model(tmp_path / "model.gguf", "llama", {"": "Q4_0"})
    monkeypatch.setenv("HOME", str(tmp_path))
    names = ["MODEL.GGUF", "sha256-0123", "blob.bin"]
    for name in names:
        (tmp_path / name).symlink_to(tmp_path / "model.gguf")
    for place in (*names, "model.gguf"):
        chain = ps.Chain([f"~/{place}", tmp_path / place], pack=False)
        assert chain.generate([1, 2, 3], 4).sequences.shape == (1, 7)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    make("llama").save_pretrained(tmp_path / "folder")
    for file in (tmp_path / "small.gguf", tmp_path / "folder" / "model.safetensors"):
        file.write_text(pointer)
        place = file if file.suffix == ".gguf" else file.parent
        with pytest.raises(
            ValueError, match=r"^levels\[0\]: expected weights .*git-lfs.*`git lfs pull`"
        ):
            ps.Chain([place])
    (tmp_path / "folder" / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"^levels\[0\]: expected the id, directory or GGUF file"):
        ps.Chain([tmp_path / "folder"])


def test_adapters_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    for options in ({}, {"pack": True}):
        with pytest.raises(
            ValueError, match=r"an adapter.* pack=False, or merge it .*merge_and_un"
        ):
            ps.Chain([tmp_path], **options)
