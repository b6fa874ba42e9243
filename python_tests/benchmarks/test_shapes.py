"""``shapes``: sizes of published models, their memory, and chosen acceptances."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import polyspec_ext as ps
from benchmarks import chosen, shapes, traces
from benchmarks.__main__ import main
from benchmarks.shapes import SHAPES, Shape, config_of

TINY = Shape("tiny", 64, 128, 4, 4, 2, 160)
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


def test_memory_comes_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refuse a shape before the allocation, with the memory needed and the memory there."""
    memory = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 139e9}
    monkeypatch.setattr(os, "sysconf", memory.__getitem__)
    shapes.require_memory(SHAPES["llama2-7b"], "cpu")
    with pytest.raises(ValueError, match=r"expected \d+\.\d GB on cpu for 80 layers of "):
        shapes.require_memory(SHAPES["llama2-70b"], "cpu")
    memory["SC_PHYS_PAGES"] = 8e9
    assert main(["shapes", "--device", "cpu", "--shape", "llama2-7b"]) == 2
    assert re.search(r"expected 3\d\.\d GB on cpu.*8\.0 GB", capsys.readouterr().err)


def test_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.setitem(SHAPES, "llama2-7b", replace(TINY, hidden=128))
    file = tmp_path / "shapes.json"
    words = ["shapes", "--shape", "llama2-7b", "--max-new-tokens", "4", "--repeats", "1"]
    assert main([*words, "--acceptance", ".9:.6", "--layers", "1", "--json-file", str(file)]) == 0
    text = capsys.readouterr().out
    assert "1 of 4 layers; acceptance is chosen, not measured" in text
    report = json.loads(file.read_text())
    assert f"{1e-6 * report['weight_bytes'] / report['copy_gbs']:.3f} ms, its weights" in text
    assert len(report["rows"]) == 6


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


@pytest.mark.parametrize("pair", [(0.9, 0.6), "shipped"])
def test_chains_accept_what_was_chosen(pair: chosen.Chosen) -> None:
    """Texts are the target's table. Chains of two levels have the rounds that their tables fix;
    chains of three the expected number of tokens for each. A trace has its bits."""
    tokens = 96
    begin = 32
    chains = chosen.ChosenChains(SMALL, DRAFT, "cpu", begin, tokens, sync=True)
    *before, rows = chosen.measure(chains, [pair], 1)
    assert [row["error"] for row in rows] == [None] * len(rows)
    assert {len(some) for some in before} == {len(rows)} == {1 + len(before)}
    assert all(row["same_text"] for row in rows)
    tables, end = chains.tables, begin + tokens
    if isinstance(pair, str):
        bits = traces.recorded()[pair][chosen.W4]
        found = (tables.below[chosen.W4] == tables.target).tolist()
        assert "".join(map(str, map(int, found))).startswith(bits * 2)
    chain = ps.Chain([chains.target])
    (plain,) = chain.generate([[3] * begin], tokens, eos_token_id=[]).sequences
    assert torch.equal(plain[begin:], tables.target[begin:end])
    for row in rows[1:]:
        if len(row["levels"]) == 2:
            table = tables.below[row["levels"][1]["name"]]
            expected = rounds_of(tables.target, table, row["window"][0], begin, end)
            assert row["levels"][0]["passes"] == expected
            # One draw of the tables: its rounds' time is divided by the tokens that are expected.
            luck = chosen.at_expected_length(row)
            spent = row["ms_per_token"] * tokens / expected
            assert luck["expected_ms"] * row["expected_length"] == pytest.approx(spent, rel=0.05)
        else:
            assert row["length"] == pytest.approx(row["expected_length"], rel=0.3)


@pytest.mark.parametrize("batch", [1, 3])
def test_each_text_of_a_batch_follows_the_table(batch: int) -> None:
    """Texts of a batch have the table's tokens after a prompt of any length, and each chain of
    ``--chains`` alone."""
    chains = chosen.ChosenChains(SMALL, DRAFT, "cpu", 5, 24, ["w4+eagle"])
    *_, rows = chosen.measure(chains, [(0.9, 0.6)], 1, [batch])
    assert [row["label"] for row in rows] == [
        chosen.PLAIN, f"target <- {chosen.W4} <- {chosen.HEAD}"
    ]  # fmt: skip
    assert all(row["same_text"] and row["batch"] == batch for row in rows)
    for text in chains.latest[-1].output.sequences:
        assert torch.equal(text[5:], chains.tables.target[5:29])


def test_replays_of_a_trace() -> None:
    """Nodes of one launch are a replay; the same nodes are one row; single kernels are none."""

    def node(name: str, launch: int, begin: float, time: float) -> dict[str, Any]:
        arguments = {"correlation": launch}
        return {"cat": "kernel", "name": name, "ts": begin, "dur": time, "args": arguments}

    events = [{"cat": "cpu_op", "name": "aten::add", "ts": 0.0, "dur": 9.0}]
    for launch, begin in enumerate((0.0, 100.0, 200.0)):
        # The profiler exports nodes in any order.
        events += [node("b", launch, begin + 7, 2.0 + launch), node("a", launch, begin + 1, 4.0)]
    events += [node("a", 9, 300.0, 1.0), node("c", 10, 310.0, 50.0), node("c", 10, 360.0, 50.0)]
    longest, other = chosen.replays(events)
    assert longest["by_name"] == {"c": [2, 100.0]}
    assert longest["gaps_us"] == 0
    assert other.pop("by_name") == {"a": [1, 4.0], "b": [1, 3.0]}
    assert other == {"replays": 3, "nodes": 2, "us": 9.0, "gaps_us": 2.0}
    assert chosen.replays(chosen.trace_of(lambda: torch.ones(8).add(1))) == []


def test_a_chain_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    chains = chosen.ChosenChains(SMALL, DRAFT, "cpu", 32, 8)

    def failing(*arguments: object) -> None:
        raise RuntimeError("no head today\nand more")

    monkeypatch.setattr(type(chains.by_name[chosen.HEAD][0]), "draft", failing)
    *_, rows = chosen.measure(chains, [(0.9, 0.6)], 1)
    assert {row["error"] for row in rows if chosen.HEAD in row["label"]} == {
        "RuntimeError: no head today"
    }
    assert all(row["same_text"] for row in rows if chosen.HEAD not in row["label"])
