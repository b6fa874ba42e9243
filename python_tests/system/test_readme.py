"""README's examples run, its commands parse, and its lists are those of the code."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

import polyspec_ext as ps
from polyspec_ext import tiny
from polyspec_ext.cli import entry
from polyspec_ext.integrations import processors
from polyspec_ext.integrations import transformers_checks as generation_checks
from polyspec_ext.tiny import train

TEXT = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language; "" for those that name none."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    return [body for name, body in found if name == language]


def test_python_blocks_run_one_after_the_other() -> None:
    """As a reader would paste them, with the shipped models and nothing else."""
    names: dict[str, Any] = {}
    found = blocks("python")
    assert len(found) >= 4
    for number, block in enumerate(found, 1):
        exec(compile(block, f"README.md, Python block {number}", "exec"), names)
    assert names["r"].tokens.shape == (2, 5)
    assert names["same"], "README says that the drafters change nothing"
    assert isinstance(names["lookup"].drafter, ps.SuffixMatch)
    assert len(names["out"].sequences) == len(names["prompts"])


def commands() -> list[str]:
    """Every call of the command line, in blocks and in running text."""
    lines = [line for block in blocks("") for line in block.splitlines()]
    inline = re.findall(r"`([^`]*)`", re.sub(r"^```.*?^```$", "", TEXT, flags=re.M | re.S))
    every = [*lines, *(" ".join(text.split()) for text in inline)]
    return [line for line in every if re.match(r"(python -m polyspec_ext|polyspec)[ .]\S", line)]


@pytest.mark.parametrize("line", commands())
def test_commands_parse(line: str, tmp_path: Path) -> None:
    words = shlex.split(line.replace("DIR", str(tiny.path("target"))).partition(" < ")[0])
    if "polyspec_ext.tiny.train" in words:
        args = train.make_parser().parse_args(words[3:])
    else:
        words = words[3:] if words[0] == "python" else words[1:]
        if words == ["--version"]:
            with pytest.raises(SystemExit, match="0"):
                entry.make_parser().parse_args(words)
            return
        args = entry.make_parser().parse_args(words)
        assert args.run.__name__ != "show_help"
    assert callable(args.run)


def test_the_commands_that_newcomers_need_are_there() -> None:
    found = "\n".join(commands())
    for wanted in ("--version", "--threads", "prompt-lookup", "bench generate", "bench overhead"):
        assert wanted in found


def test_the_list_of_what_custom_generate_refuses_is_the_codes() -> None:
    section = TEXT.partition("What a chain cannot honour is refused by name")[2]
    options, call, own = section.partition("\n\n**")[0].split("\n- ")[1:]

    def names(text: str) -> set[str]:
        return set(re.findall(r"`(\w+)`", text))

    assert names(options) == set(generation_checks.REFUSED_OPTIONS)
    assert names(own) == set(processors.REFUSED_PROCESSORS)
    ids, cache = torch.tensor([[4, 5]]), DynamicCache()
    cache.update(*[torch.zeros(1, 1, 2, 4)] * 2, layer_idx=0)
    checks: dict[str, Callable[[], object]] = {
        "past_key_values": lambda: supported({"past_key_values": cache}),
        "position_ids": lambda: generation_checks.padding_of(ids, {"position_ids": ids}),
    }
    assert names(call) == set(checks)
    for name, refused in checks.items():
        with pytest.raises(ValueError, match=rf"^{name}: expected"):
            refused()
    with pytest.raises(ValueError, match=r"^attention_mask: expected padding on the left"):
        generation_checks.padding_of(ids, {"attention_mask": torch.tensor([[1, 0]])})
    with pytest.raises(ValueError, match=r"^pixel_values: expected token ids"):
        supported({"pixel_values": ids})


def supported(given: dict[str, Any]) -> None:
    generation_checks.require_supported(GenerationConfig(), given)


def test_the_guarantees_are_numbered_from_one_to_eight() -> None:
    section = TEXT.partition("\n## Guarantees\n")[2].partition("\n## ")[0]
    assert re.findall(r"^- \*\*(C\d+)\*\* \S", section, re.M) == [f"C{n}" for n in range(1, 9)]


def test_public_names_in_readme_exist() -> None:
    for name in set(re.findall(r"\bps\.(\w+)", TEXT)):
        assert hasattr(ps, name), name
