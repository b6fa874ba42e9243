"""``chains`` and ``benchmarks int4``: what is combined, the verdict on sampled texts, and a run of
each."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import polyspec_ext as ps
from benchmarks import chains, int4, shapes
from benchmarks.__main__ import main
from benchmarks.measuring import Z_LIMIT, verdict
from benchmarks.shapes import SHAPES, Shape, growth_of
from polyspec_ext import tiny


def test_every_chain_in_the_order_of_cost() -> None:
    names = chains.combinations()
    assert len(names) == 4 + 6 + 4 + 4 == len(set(names))
    assert ("target", "W4 copy", "EAGLE tree") in names
    assert ("target", "W4 copy", "drafter") in names
    assert ("target", "drafter", "W4 copy") not in names


def test_texts_of_another_distribution_are_seen() -> None:
    target = tiny.levels(["target"], pack=False)["target"].model
    drafter = tiny.levels(["drafter"], pack=False, dtype=torch.float32)["drafter"].model
    prompt = [0, 5, 6, 7]

    def deviations(model: Any, temperature: float) -> float:
        rows = ps.Chain([model]).generate([prompt] * 8, 30, temperature, seed=3, eos_token_id=[])
        texts = dict(enumerate(rows.sequences[:, 4:].tolist()))
        found = verdict(target, [prompt] * 8, {}, texts, 1.0)
        assert found.deviations is not None
        assert found.lossless == (abs(found.deviations) < Z_LIMIT)
        assert ("NOT the target's" in str(found)) != found.lossless
        return found.deviations

    assert abs(deviations(target, 1.0)) < 4
    assert deviations(target, 0.6) > Z_LIMIT
    assert deviations(drafter, 1.0) < -Z_LIMIT


def test_a_run_of_chains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "chains", "--prompts", "1", "--repeats", "1", "--max-new-tokens", "6", "--json",
        "--w4", str(tmp_path),
    ]  # fmt: skip
    # A copy that lies there is not calibrated anew.
    ps.save_w4(ps.quantize_w4(tiny.grown(1)), tmp_path)
    # Without time for a plan.
    one = ["--times", "1", "--temperature", "0", "--plan-seconds", "0", "--chains", "drafter;EAGLE"]
    assert main([*command, *one]) == 0
    report = json.loads(capsys.readouterr().out)
    (result,) = report["results"]
    rows = result["rows"]
    assert report["overlap"]["target"] == pytest.approx(1, abs=1e-3)
    assert 0.8 < report["overlap"]["W4 copy"] < 1
    assert [row["label"] for row in rows] == [
        "plain decoding", "transformers generate", "transformers assisted: drafter",
        "target <- drafter", "target <- EAGLE",
    ]  # fmt: skip
    assert all("1 of 1" in row["verdict"] or "part" in row["verdict"] for row in rows)
    assert [row["window"] for row in rows[3:]] == [[4]] * 2
    assert all(row["predicted_tokens_per_second"] is None for row in rows)
    assert result["choice"] is None
    json.dumps(report, allow_nan=False)  # JSON has no NaN
    # Grown: the head grows along. Windows are the planner's now.
    ps.save_w4(ps.quantize_w4(tiny.grown(2)), tmp_path)
    some = ["--times", "2", "--temperature", "1", "--plan-seconds", "1"]
    some += ["--chains", "EAGLE tree;n-gram"]
    assert main([*command, *some]) == 0
    report = json.loads(capsys.readouterr().out)
    (result,) = report["results"]
    rows = result["rows"]
    planned = (rows[0], *rows[3:])
    assert [row["label"] for row in planned[1:]] == ["target <- EAGLE tree", "target <- n-gram"]
    for row in planned:
        off = row["predicted_tokens_per_second"] / row["tokens_per_second"]
        assert row["predicted_over_measured"] == pytest.approx(off)
    fastest = max(planned, key=lambda row: row["x_plain"]["median"])
    chosen = max(planned, key=lambda row: row["predicted_tokens_per_second"])
    choice = result["choice"]
    assert (choice["chosen"], choice["fastest"]) == (chosen["label"], fastest["label"])
    assert 0 < choice["of_fastest"] <= 1
    text = chains.markdown(report)
    assert "at most 1 seconds" in text
    assert f"By prediction: {chosen['label']}; the fastest: {fastest['label']}" in text
    assert main([*command, "--chains", "drafter,W4 copy"]) == 2
    assert "expected chains among" in capsys.readouterr().err


def test_a_trained_chain_at_a_published_shape(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A small one here: twice as wide, 12 layers, one pair of key heads."""
    small = Shape("llama2-7b", 512, 1300, 12, 4, 1, 32000)
    monkeypatch.setitem(SHAPES, small.name, small)
    made: list[Any] = []
    grown = tiny.grown

    def watched(*args: Any, **options: Any) -> Any:
        made.append(grown(*args, **options))
        return made[-1]

    monkeypatch.setattr(tiny, "grown", watched)
    command = [
        "chains", "--shape", small.name, "--prompts", "1", "--repeats", "1",
        "--max-new-tokens", "6", "--temperature", "0", "--plan-seconds", "0", "--chains",
        "EAGLE tree;W4 copy;W4 copy,EAGLE tree;W4 copy,drafter",
    ]  # fmt: skip
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "a trained small model at the cost of llama2-7b" in text
    assert "| target <- W4 copy <- EAGLE tree |" in text
    for model in made:
        config = model.config
        assert config.hidden_size == small.hidden
        assert config.intermediate_size == small.inner
        assert config.num_hidden_layers == small.layers
        assert config.num_key_value_heads * config.head_dim == small.kv_heads * small.head_dim
    monkeypatch.undo()
    own = tiny.grown(1)
    with pytest.raises(ValueError, match="hidden: expected a multiple of 256"):
        growth_of(replace(small, hidden=500), own)
    # What the others have to be grown to.
    for shape in SHAPES.values():
        if shape.kind == "llama":
            growth = growth_of(shape, own)
            assert growth["times"] * 256 == shape.hidden
            heads = 4 * growth["times"]
            assert heads * own.config.head_dim == shape.heads * shape.head_dim
            assert heads % growth["key_value_heads"] == 0


def test_a_shape_that_has_no_room(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shapes, "memory_free", lambda _: 8e9)
    assert main(["chains", "--shape", "llama2-70b"]) == 2
    assert "free on cpu for 80 layers of llama2-70b" in capsys.readouterr().err


def test_a_run_of_products(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["int4", "--shapes", "32x128", "--tokens", "1,3", "--repeats", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(int4, "COLD", 1 << 14)
        patch.setattr(int4.timing, "copy_bandwidth", lambda *_: 1.0)
        assert main(command) == 0
    out = capsys.readouterr().out
    assert "## 32 outputs, 128 inputs" in out
    assert "| polyspec | " in out
    assert main(["int4", "--shapes", "32x100"]) == 2
    assert "--shapes: expected inputs that 128 divides, or several" in capsys.readouterr().err
