"""``shapes``: sizes of published models, their memory, passes, and the predicted grid."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import polyspec_ext as ps
from benchmarks import chosen, memory, shapes
from benchmarks.__main__ import main
from benchmarks.published_shapes import SHAPES, Shape, config_of
from benchmarks.random_models import random_head, random_model
from polyspec_ext import tiny
from polyspec_ext.levels import HuggingFaceLevel
from polyspec_ext.planning.measure import Times
from polyspec_ext.tensors import RowCounts

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
    """Refused before anything is made, with what is needed and what there is."""
    free = {"cuda": 139 * GIB, "cpu": 139 * GIB}
    monkeypatch.setattr(memory, "memory_free", free.__getitem__)
    memory.require_memory(SHAPES["llama2-7b"], torch.bfloat16, "cuda")
    with pytest.raises(ValueError, match=r"expected \d+\.\d GB free on cuda for 80 layers of "):
        shapes.measure(SHAPES["llama2-70b"], device="cuda", widths=(1,))
    free["cpu"] = 8e9
    with pytest.raises(ValueError, match=r"free on cpu.*target \d+\.\d.*given 8\.0 GB"):
        shapes.measure(SHAPES["llama2-7b"])
    # What passes through the host counts there.
    free["cpu"] = 2e9
    with pytest.raises(ValueError, match="free on cpu for 32 layers"):
        memory.require_memory(SHAPES["llama2-7b"], torch.bfloat16, "cuda")


@pytest.mark.parametrize("name", list(SHAPES))
def test_memory_is_no_less_than_the_weights(name: str) -> None:
    for layers in (2, SHAPES[name].layers):
        shape = replace(SHAPES[name], layers=layers)
        needed = memory.memory_needed(shape, torch.bfloat16, "cpu")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config_of(shape))
        count = sum(p.numel() for p in model.parameters())
        assert needed["target"] == pytest.approx(2 * count, rel=1e-3)
        assert needed["W4 copy"] > shape.layers * shape.layer_weights / 2


@pytest.mark.parametrize("layers", [0, 5])
def test_no_more_layers_than_there_are(layers: int) -> None:
    with pytest.raises(
        ValueError, match=rf"layers: expected an integer in \[1, 4\], given {layers}"
    ):
        shapes.measure(TINY, layers=layers)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("layers", [None, 2])
def test_a_measurement(kind: str, layers: int | None) -> None:
    # (W4 wants inputs that 128 divides.)
    shape = replace(TINY, hidden=128, kind=kind)
    found = shapes.measure(shape, layers=layers, widths=(4,), repeats=1)
    assert found["left_out"] == []
    passes = found["passes"]
    assert {row["what"] for row in passes} == {shapes.TARGET, shapes.W4, shapes.HEAD, shapes.TREE}
    for name in (shapes.TARGET, shapes.W4, shapes.HEAD):
        assert {row["tokens"] for row in passes if row["what"] == name} == {1, 4}
    assert all(row["ms"] > 0 for row in passes)
    long = {row["what"]: row["whole_ms"] for row in found["behind_long_context"]}
    assert set(long) == {shapes.TARGET, shapes.W4}
    assert min(*long.values(), found["rollback_us"]) > 0
    assert set(found["verify_ms"]) == set(map(str, shapes.CHECKED))
    counted = layers or 4
    matrices = counted * shape.layer_weights
    head = shape.vocab * shape.hidden
    norms = 2 * shape.hidden * (2 * counted + 1)
    biases = 0 if kind == "llama" else 2 * counted * (shape.hidden + 2 * 2 * shape.head_dim)
    expected = 2 * (matrices + head) + norms + biases  # and the rotary frequencies
    sizes = found["weight_bytes"]
    assert sizes[shapes.TARGET] == pytest.approx(expected, rel=1e-3)
    assert sizes[shapes.W4] < sizes[shapes.TARGET]
    for row in passes:
        if layers is None or row["what"] in (shapes.HEAD, shapes.TREE):
            assert row["whole_ms"] == row["ms"]
        else:
            assert row["ms"] <= row["whole_ms"] <= 2 * row["ms"]


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
        one = shapes.level_pass(level, 3, 10, fixed)
        for _ in range(2):
            torch.testing.assert_close(one(), plain, rtol=1e-4, atol=1e-4)
    head = random_head(shape, model)
    head.begin(1, 64)
    head.extend(
        torch.zeros(1, 9, dtype=torch.int64), torch.zeros(1, 9, shape.hidden), RowCounts([9])
    )
    step, tree = shapes.head_pass(head, 3, 9), shapes.tree_draft(head, 9, depth=3)
    first, drafted = step().clone(), tree()
    assert first.shape == (1, 3, shape.vocab)
    # Each of the tokens sees the context and itself, so tokens alike are alike.
    torch.testing.assert_close(first[:, 0], first[:, 2])
    assert drafted.shape == (1, 59)
    torch.testing.assert_close(step(), first)
    assert torch.equal(tree(), drafted)


def constant(seconds: float) -> Times:
    return Times({1: seconds, 64: seconds})


def test_two_levels_are_the_closed_form() -> None:
    target = Times({1: 10.0, 2: 10.5, 4: 11.0, 8: 14.0, 12: 20.0})
    copy, head, check = constant(3.0), constant(0.7), Times({0: 0.1, 4: 0.3, 8: 0.4})
    rows = shapes.predicted(target, copy, head, check, outer=(0.9, 0.97), inner=(0.6, 0.8))
    assert [(row["outer"], row["inner"]) for row in rows] == [
        (0.9, 0.6), (0.9, 0.8), (0.97, 0.6), (0.97, 0.8),
    ]  # fmt: skip

    def speedup(a: float, k: int, draft: float) -> float:
        tau = (1 - a ** (k + 1)) / (1 - a)
        spent = target.at(k + 1) + check.at(k) + k * draft
        return tau / spent * (target.at(1) + 0.1)

    for row in rows:
        for name, a, draft in (("head", row["inner"], 0.7), ("copy", row["outer"], 3.0)):
            by_window = {(k,): speedup(a, k, draft) for (k,) in shapes.TWO}
            best = max(by_window, key=lambda w: by_window[w])
            assert row[name] == pytest.approx(by_window[best], rel=1e-9)
            assert tuple(row[f"{name}_windows"]) == best
        better = max(row["head"], row["copy"])
        assert row["both_over_two"] == pytest.approx(row["both"] / better)


def simulated(
    windows: tuple[int, int], accept: tuple[float, float], seconds: tuple[float, float, float],
    check: float, rounds: int,
) -> float:  # fmt: skip
    """Tokens per second of the staged rule with three models, by drawing who accepts what."""
    draw = random.Random(0)

    def taken(most: int, a: float) -> int:
        return next((n for n in range(most) if draw.random() >= a), most)

    tokens, spent = 0, 0.0
    for _ in range(rounds):
        pending = 0
        while pending < windows[0]:
            spent += windows[1] * seconds[2] + seconds[1] + check
            pending += taken(windows[1], accept[1]) + 1
        spent += seconds[0] + check
        tokens += taken(pending, accept[0]) + 1
    return tokens / spent


def test_three_levels_are_those_of_a_simulation() -> None:
    times, check = (22.0, 7.0, 1.0), 0.2
    rows = shapes.predicted(*(constant(t) for t in (*times, check)), outer=(0.95,), inner=(0.7,))
    windows = (rows[0]["both_windows"][0], rows[0]["both_windows"][1])
    expected = simulated(windows, (0.95, 0.7), times, check, 40_000) * 22.2
    assert rows[0]["both"] == pytest.approx(expected, rel=0.02)
    others = [simulated(w, (0.95, 0.7), times, check, 4_000) * 22.2 for w in shapes.THREE]
    assert rows[0]["both"] >= 0.98 * max(others)


def test_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.setitem(SHAPES, "llama2-7b", replace(TINY, hidden=128))
    monkeypatch.setattr(shapes, "THREE", ((4, 2),))
    monkeypatch.setattr(shapes, "LONG", 80)
    file = tmp_path / "shapes.json"
    words = ["shapes", "--shape", "llama2-7b", "--tokens", "4", "--repeats", "1"]
    assert main([*words, "--layers", "2", "--json-file", str(file)]) == 0
    text = capsys.readouterr().out
    assert "2 of 4 layers were measured; the whole is extrapolated by layer count" in text
    assert "A prediction from measured times; random weights say nothing about acceptance" in text
    report = json.loads(file.read_text())
    (table,) = report["predictions"]
    assert len(table["rows"]) == len(shapes.OUTER) * len(shapes.INNER)
    for row in report["passes"]:
        if row["what"] != shapes.TREE:
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
    """Rounds of a target whose text is `text`, over drafts of `window` tokens of a table."""
    agrees, position, rounds = text == drafts, begin, 0
    while position < end:
        accepted = agrees[position : position + window].int().cumprod(0).sum()
        position, rounds = position + int(accepted) + 1, rounds + 1
    return rounds


def test_chains_accept_what_was_chosen() -> None:
    """Texts are the target's table. Chains of two levels have the rounds that their tables give;
    those of three the expected number of tokens for each."""
    tokens = 160
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
