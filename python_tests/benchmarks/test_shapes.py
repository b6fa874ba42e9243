"""``shapes``: sizes of published models, their memory, their passes, and chosen acceptances."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import polyspec_ext as ps
from benchmarks import chosen, passes, shapes
from benchmarks.__main__ import main
from benchmarks.shapes import SHAPES, Shape, config_of, random_head, random_model
from polyspec_ext import tiny
from polyspec_ext.levels import HuggingFaceLevel

TINY = Shape("tiny", 64, 128, 4, 4, 2, 160)
GIB = 2.0**30
# As the models' publishers have them.
PARAMETERS = {
    "llama2-7b": 6_738_415_616,
    "vicuna-7b": 6_738_415_616,
    "vicuna-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "qwen2.5-0.5b": 494_032_768 + 151_936 * 896,  # (the published one ties its two matrices)
    "qwen2-7b": 7_615_616_512,
}


@pytest.mark.parametrize("name", list(SHAPES))
def test_shapes_are_the_published_ones(name: str) -> None:
    shape = SHAPES[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(shape))
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    matrices = sum(p.numel() for n, p in model.named_parameters() if p.dim() > 1 and "layers" in n)
    assert matrices == shape.layers * shape.layer_weights


def test_memory_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse a shape before anything is made, with what is needed and what is free."""
    free = {"cuda": 139 * GIB, "cpu": 139 * GIB}
    monkeypatch.setattr(shapes, "memory_free", free.__getitem__)
    shapes.require_memory(SHAPES["llama2-7b"], torch.bfloat16, "cuda")
    with pytest.raises(ValueError, match=r"expected \d+\.\d GB free on cuda for 80 layers of "):
        passes.published(SHAPES["llama2-70b"], torch.bfloat16, "cuda", (1,), 64)
    free["cpu"] = 8e9
    with pytest.raises(ValueError, match=r"free on cpu.*target \d+\.\d.*given 8\.0 GB"):
        passes.published(SHAPES["llama2-7b"], torch.bfloat16, "cpu", (1,), 64)
    # What passes through the host counts there.
    free["cpu"] = 2e9
    with pytest.raises(ValueError, match="free on cpu for 32 layers"):
        shapes.require_memory(SHAPES["llama2-7b"], torch.bfloat16, "cuda")


@pytest.mark.parametrize("name", list(SHAPES))
def test_memory_is_no_less_than_the_weights(name: str) -> None:
    for layers in (2, SHAPES[name].layers):
        shape = replace(SHAPES[name], layers=layers)
        needed = shapes.memory_needed(shape, torch.bfloat16, "cpu")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config_of(shape))
        count = sum(p.numel() for p in model.parameters())
        assert needed["target"] == pytest.approx(2 * count, rel=1e-3)
        assert needed["W4 copy"] > shape.layers * shape.layer_weights / 2


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_weights_that_a_pass_reads(kind: str) -> None:
    # (W4 wants inputs that 128 divides.)
    shape = replace(TINY, hidden=128, kind=kind)
    kinds, sizes = passes.published(shape, torch.bfloat16, "cpu", (1, 4), 16)
    wanted = {
        (name, tokens) for name in (passes.TARGET, passes.W4, passes.HEAD) for tokens in (1, 4)
    }
    wanted |= {(passes.VERIFY, tokens) for tokens in passes.CHECKED} | {(passes.TREE, 60)}
    keys = [key for calls in kinds for key in calls]
    assert {(what, tokens) for what, _, tokens in keys} == wanted
    matrices = shape.layers * shape.layer_weights + shape.vocab * shape.hidden
    norms = 2 * shape.hidden * (2 * shape.layers + 1)
    biases = 2 * shape.layers * (shape.hidden + 4 * shape.head_dim) * (kind == "qwen2")
    # And the rotary frequencies.
    assert sizes[passes.TARGET] == pytest.approx(2 * matrices + norms + biases, rel=1e-3)
    assert sizes[passes.W4] < sizes[passes.TARGET]


@torch.inference_mode()
def test_passes_leave_the_cache_as_it_was() -> None:
    shape = replace(TINY, hidden=128)
    model = random_model(shape, torch.float32, "cpu")
    level = HuggingFaceLevel(model)
    tokens = torch.arange(10)[None]
    level.reserve(32)
    level.prefill(tokens)
    plain = model(input_ids=torch.cat([tokens, torch.arange(10, 13)[None]], 1)).logits[:, -3:]
    for fixed in (False, True):
        one = passes.level_pass(level, 3, 10, fixed)
        for _ in range(2):
            torch.testing.assert_close(one(), plain, rtol=1e-4, atol=1e-4)
    head = random_head(shape, model)
    passes.read_pairs(head, 9, 55)
    step, tree = passes.head_pass(head, 3, 9), passes.tree_draft(head, 9, depth=3)
    first, drafted = step().clone(), tree()
    assert first.shape == (1, 3, shape.vocab)
    # Each of the tokens sees the context and itself, so tokens alike are alike.
    torch.testing.assert_close(first[:, 0], first[:, 2])
    assert drafted.shape == (1, 59)
    torch.testing.assert_close(step(), first)
    assert torch.equal(tree(), drafted)


def test_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.setitem(SHAPES, "llama2-7b", replace(TINY, hidden=128))
    file = tmp_path / "shapes.json"
    words = ["shapes", "--shape", "llama2-7b", "--tokens", "4", "--repeats", "1"]
    assert main([*words, "--layers", "2", "--context", "16", "--json-file", str(file)]) == 0
    text = capsys.readouterr().out
    assert "random weights, 2 of 4 layers" in text
    assert "Milliseconds after 16 tokens (times the floor), medians of 1 turns" in text
    report = json.loads(file.read_text())
    assert report["left_out"] == []
    for row in report["passes"]:
        assert row["ms"] > 0
        if row["what"] in report["weight_bytes"]:
            floor = report["weight_bytes"][row["what"]] / report["copy_gbs"] / 1e6
            assert row["floor_ms"] == pytest.approx(floor)
            assert row["over_floor"] == pytest.approx(row["ms"] / floor)
    assert main([*words, "--layers", "9"]) == 2
    assert "--layers: expected an integer in [1, 4], given 9" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([*words, "--device", "cuda"]) == 2
    assert "--device: expected cpu" in capsys.readouterr().err
    chains = ["--chains", "--max-new-tokens", "4", "--repeats", "1", "--acceptance", ".9:.6"]
    assert main([*words[:3], *chains, "--layers", "1", "--json-file", str(file)]) == 0
    assert "1 of 4 layers; acceptance is chosen, not measured" in capsys.readouterr().out
    assert len(json.loads(file.read_text())["rows"]) == 8
    assert main([*words[:3], *chains[:-1], "1:.5"]) == 2
    assert "expected two numbers in (0, 1) with a colon between" in capsys.readouterr().err
    assert main(["shapes", "--shape", "gpt"]) == 2
    error = capsys.readouterr().err
    assert all(name in error for name in SHAPES)


SMALL, DRAFT = (
    Shape("small", 32, 64, 2, 2, 2, 256),
    Shape("draft", 32, 64, 1, 2, 1, 9, kind="qwen2"),
)


def rounds_of(text: torch.Tensor, drafts: torch.Tensor, window: int, begin: int, end: int) -> int:
    """Count the rounds of a target that verifies `window` tokens of a table at a time."""
    agrees, position, rounds = text == drafts, begin, 0
    while position < end:
        accepted = agrees[position : position + window].int().cumprod(0).sum()
        position, rounds = position + int(accepted) + 1, rounds + 1
    return rounds


def test_chains_accept_what_was_chosen() -> None:
    """Texts are the target's table. Chains of two levels have the rounds that their tables give;
    those of three the expected number of tokens for each."""
    tokens = 96
    chains = chosen.ChosenChains(SMALL, DRAFT, "cpu", tokens)
    saved: list[int] = []
    rows = chosen.measure(chains, [(0.9, 0.6)], 1, lambda rows: saved.append(len(rows)))
    assert [row["error"] for row in rows] == [None] * len(rows)
    assert saved == [len(rows)] * len(rows)
    assert all(row["same_text"] for row in rows)
    tables, begin = chains.tables, chosen.PROMPT
    end = begin + tokens
    (plain,) = ps.Chain([chains.target]).generate([[3] * begin], tokens, eos_token_id=[]).sequences
    assert torch.equal(plain[begin:], tables.target[begin:end])
    for row in rows[1:]:
        if len(row["levels"]) == 2:
            table = tables.second if row["levels"][1]["name"] == chosen.W4 else tables.below
            expected = rounds_of(tables.target, table, row["window"][0], begin, end)
            assert row["levels"][0]["passes"] == expected
        else:
            assert row["length"] == pytest.approx(row["expected_length"], rel=0.3)


def test_a_chain_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    chains = chosen.ChosenChains(SMALL, DRAFT, "cpu", 8)

    def failing(*arguments: object) -> None:
        raise RuntimeError("no head today\nand more")

    monkeypatch.setattr(type(chains.heads[0]), "draft", failing)
    rows = chosen.measure(chains, [(0.9, 0.6)], 1)
    assert {row["error"] for row in rows if chosen.HEAD in row["label"]} == {
        "RuntimeError: no head today"
    }
    assert all(row["same_text"] for row in rows if chosen.HEAD not in row["label"])


@pytest.mark.usefixtures("tiny_untrained")
def test_the_shipped_models_by_how_they_run(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["shapes", "--shape", "tiny", "--repeats", "2", "--tokens", "1,3"]
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {row["what"] for row in report["passes"]} == set(tiny.LEVELS)
    for name in tiny.LEVELS:
        rows = [row for row in report["passes"] if row["what"] == name]
        assert {row["tokens"] for row in rows} == {1, 3}
        known = {f"{d}{p}" for d in ("float32", "bfloat16") for p in ("", " packed")}
        assert {"float32", "bfloat16"} <= {row["runs"] for row in rows} <= known
    assert all(row["ms"] > 0 for row in report["passes"])
    assert main(words) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(report["passes"]) / 2
    assert lines[0].split("|")[2:4] == [" 1 token ", " 3 tokens "]
    assert main([*words, "--layers", "1"]) == 2
    assert "--layers, --device: expected neither" in capsys.readouterr().err
