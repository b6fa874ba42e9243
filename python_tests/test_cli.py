"""The command line, on a chain of untrained models behind POLYSPEC_TINY."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from polyspec_ext import cli, demo, tiny
from polyspec_ext.tiny import corpus

TEXT = [tiny.prompt_of("How many apples are 3 apples and 4 apples?") + " 3 + 4 = 7 apples.\n#### 7"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chain of three random models with a real tokenizer."""
    root = tmp_path_factory.mktemp("tiny")
    tokenizer = corpus.train_tokenizer(TEXT)
    for seed, (level, layers) in enumerate((("target", 2), ("middle", 1), ("drafter", 1))):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=2,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
        model = LlamaForCausalLM(config)
        model.save_pretrained(root / level)
        tokenizer.save_pretrained(root / level)
    return root


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYSPEC_TINY", str(folder))


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.main(arguments)
    out = capsys.readouterr()
    return status, out.out, out.err


def test_generate_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(
        capsys,
        "generate",
        "How many?",
        "--json",
        "--max-new-tokens",
        "9",
        "--temperature",
        "1",
        "--seed",
        "3",
    )
    assert status == 0
    report = json.loads(out)
    assert report["prompt"] == "Question: How many?\nAnswer:"
    assert len(report["tokens"]) == report["stats"]["num_new_tokens"] <= 9
    assert [level["name"] for level in report["stats"]["levels"]] == ["target", "middle", "drafter"]
    again = json.loads(
        call(
            capsys,
            "generate",
            "How many?",
            "--json",
            "--max-new-tokens",
            "9",
            "--temperature",
            "1",
            "--seed",
            "3",
        )[1]
    )
    assert again["tokens"] == report["tokens"]


def test_generate_streams_the_text_that_json_has(capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "generate",
        "3 apples",
        "--raw",
        "--max-new-tokens",
        "12",
        "--temperature",
        "1.2",
        "--top-k",
        "40",
    )
    report = json.loads(call(capsys, *options, "--json")[1])
    assert report["prompt"] == "3 apples"
    _, out, err = call(capsys, *options)
    assert out == report["text"] + "\n"
    assert "tokens/s" in err
    assert "level 2 middle" in err
    _, out, err = call(capsys, *options, "--stats")
    assert out == report["text"] + "\n"
    table = err.splitlines()
    assert table[0].endswith("tokens/s")
    assert [line.split()[1] for line in table[4:7]] == [*tiny.LEVELS]


def test_generate_with_a_chain_of_ones_own(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    target, middle, drafter = (str(folder / level) for level in tiny.LEVELS)
    plain = json.loads(
        call(capsys, "generate", "x", "--target", target, "--json", "--max-new-tokens", "10")[1]
    )
    chains: list[list[str]] = [
        ["--drafter", drafter, "--window", "3"],
        ["--middle", middle, "--drafter", drafter, "--window", "4,2", "--rule", "block"],
        ["--middle", middle, "--middle", drafter, "--drafter", drafter, "--window", "3,2,1"],
        ["--middle", middle, "--drafter", drafter, "--window", "9,2", "--rounds", "3"],
        ["--drafter", "prompt-lookup"],
    ]
    for options in chains:
        status, out, _ = call(
            capsys,
            "generate",
            "x",
            "--target",
            target,
            *options,
            "--json",
            "--max-new-tokens",
            "10",
        )
        assert status == 0
        assert json.loads(out)["tokens"] == plain["tokens"]
        assert json.loads(out)["prompt"] == "x"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--top-p", "1.5"], "top_p: expected a number in [0, 1], given 1.5"),
        (["--window", "4"], "window: expected 2 numbers >= 0 for 3 levels, given [4]"),
        (["--rounds", "4,1"], "rounds: expected 1 numbers >= 0 for 3 levels, given [4, 1]"),
        (["--drafter", "x"], "expected a --target"),
        (["--dtype", "float99"], "--dtype: expected a torch dtype"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], options: list[str], text: str
) -> None:
    status, _, err = call(capsys, "generate", "x", *options)
    assert status == 2
    assert text in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_bad_window_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["generate", "x", "--window", "4,a"])
    assert (
        "expected numbers >= 0 with commas between, as in 8,4, given '4,a'"
        in capsys.readouterr().err
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_demo_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(
        capsys, "demo", "--prompts", "2", "--repeats", "1", "--max-new-tokens", "8", "--json"
    )
    assert status == 0
    report = json.loads(out)
    labels = [row["label"] for row in report["configurations"]]
    assert len(labels) == 8
    assert sum(label.endswith(demo.DRAFTS_COMPILED) for label in labels) == 3
    assert report["configurations"][0]["ratio_to_generate"] == 1.0
    assert report["configurations"][1]["ratio"] == 1.0
    assert report["configurations"][1]["decoding_ratio"] == 1.0
    for row in report["configurations"]:
        assert row["tokens_per_second"] > 0
        assert row["new_tokens"] > 0
        assert row["differences"] == row["ties"]
    assert {"cpu", "cores", "torch"} <= report["machine"].keys()
    assert len(report["texts"]) == 2


def test_demo_says_when_the_text_differs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from polyspec_ext import chain as chain_module

    generate = chain_module.Chain.generate

    def wrong(self: Any, *args: Any, **options: Any) -> Any:
        out = generate(self, *args, **options)
        if len(self.names) == 3:
            out.sequences[0, -1] ^= 1
        return out

    monkeypatch.setattr(chain_module.Chain, "generate", wrong)
    status, out, _ = call(
        *(capsys, "demo", "--prompts", "1", "--repeats", "1", "--max-new-tokens", "6"),
        *("--compile", "none"),
    )
    assert status == 1
    assert "DIFFERENT" in out


def test_module_and_help() -> None:
    for arguments in (["--help"], ["generate", "--help"], ["demo", "--help"]):
        done = subprocess.run(
            [sys.executable, "-m", "polyspec_ext", *arguments],
            capture_output=True,
            text=True,
            env=os.environ,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "usage: python -m polyspec_ext" in done.stdout
