"""README, docs and examples: programs run, commands parse, links lead, tables are filled."""

import argparse
import os
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import native_builds
import pytest
import torch
from transformers import DynamicCache, GenerationConfig

import polyspec_ext as ps
from benchmarks.__main__ import make_parser as benchmarks_parser
from polyspec_ext import cli, tiny
from polyspec_ext.integrations import processors
from polyspec_ext.integrations import transformers as generation_checks
from training import tiny_models
from training.__main__ import make_parser as training_parser

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        *sorted(DOCS.rglob("*.md")),
    ]
    if DOCS / "results" not in path.parents
}
README = PAGES["README.md"]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
WORDS, LINES, README_LINES = 30, 180, 180


class Block(NamedTuple):
    """A fenced block: its page, its language ("": none is named), and its text."""

    page: str
    language: str
    text: str


BLOCKS = [
    Block(page, language, body)
    for page, text in PAGES.items()
    for language, body in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
]
PYTHON = [block for block in BLOCKS if block.language == "python"]

# ---- programs ------------------------------------------------------------------------------------

# The blocks' statements of their results, by a name that the block has.
CLAIMS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "r": lambda names: names["r"].tokens.shape == (2, 5),
    "same_text": lambda names: names["same_text"],
    "plan": lambda names: names["plan"].recommended.predicted_tokens_per_second > 0,
}


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.page)
def test_a_python_block_runs_by_itself(block: Block) -> None:
    """Run it as a reader would paste it, with the shipped models and the requirements of the
    page."""
    if block.page == "docs/grammar.md":
        pytest.importorskip("llguidance")
    names: dict[str, Any] = {}
    exec(compile(block.text, block.page, "exec"), names)
    for name, holds in CLAIMS.items():
        assert name not in names or holds(names)


def test_the_claims_of_the_python_blocks_are_looked_at() -> None:
    assert len(PYTHON) >= 7
    for name in CLAIMS:
        assert any(re.search(rf"^{name} = ", block.text, re.M) for block in PYTHON), name


def test_no_program_stands_in_two_places() -> None:
    texts = [block.text for block in PYTHON]
    assert len(set(texts)) == len(texts)


# The last line that each prints, or its begin.
PRINTED = {
    "fits_in_memory": "passes of the target: ",
    "in_generate": "as without a chain: True",
    "mixed_batch": "row 1 alone has the same tokens: True",
    "one_screen": "as ps.Chain: True",
    "own_drafter": "as plain decoding: True",
    "three_levels": "target: ",
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_prints_what_it_shows(path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(path)])
    monkeypatch.setenv("XDG_CACHE_HOME", os.environ.get("XDG_CACHE_HOME", ""))  # one sets it
    runpy.run_path(str(path), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(PRINTED[path.stem]) for line in lines), lines


def test_architecture_opens_with_the_one_screen() -> None:
    source = (ROOT / "examples" / "one_screen.py").read_text(encoding="utf-8")
    [block] = [block for block in PYTHON if block.page == "docs/architecture.md"]
    assert block.text in source
    screen = block.text[block.text.index("def generate") :]
    assert screen.rstrip().endswith("return text[len(prompt) :]")
    lines = screen.count("\n")
    assert lines <= 60
    assert f"on one screen: {lines} lines" in README


def test_every_example_stands_on_a_page() -> None:
    assert {path.stem for path in EXAMPLES} == set(PRINTED)
    for path in EXAMPLES:
        assert any(f"examples/{path.name})" in text for text in PAGES.values()), path.name


# ---- commands ------------------------------------------------------------------------------------


# The files that a command's options look for: a model, and a program that `make` builds.
STAND_INS = {
    "DIR": tiny.path("target"),
    "build/llama/program/polyspec_llama": Path(__file__),
    "build/llama/server/bin/llama-server": Path(__file__),
    "build/vllm/bin/python": Path(__file__),
}


PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "polyspec_ext": cli.make_parser,
    "benchmarks": benchmarks_parser,
    "training": training_parser,
    "training.tiny_models": tiny_models.make_parser,
}


def commands() -> list[str]:
    """Every call of the command line, in blocks and in running text, once each."""
    shell = [block.text for block in BLOCKS if not block.language]
    lines = [line.rpartition(" | ")[2] for text in shell for line in text.splitlines()]
    for text in PAGES.values():
        inline = re.findall(r"`([^`]*)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))
        lines += [" ".join(code.split()) for code in inline]
    found = [
        line
        for line in lines
        if re.match(r"(python -m (polyspec_ext|benchmarks|training)|polyspec)[ .]\S", line)
    ]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("line", commands())
def test_commands_parse(line: str) -> None:
    for placeholder, path in STAND_INS.items():
        line = line.replace(placeholder, str(path))
    words = shlex.split(line)
    module, words = (words[2], words[3:]) if words[0] == "python" else ("polyspec_ext", words[1:])
    parser = PARSERS[module]()
    if words == ["--version"]:
        with pytest.raises(SystemExit, match="0"):
            parser.parse_args(words)
        return
    args = parser.parse_args(words)
    assert callable(args.run)
    assert "show_help" not in repr(args.run)


def test_readme_begins_with_a_model_and_the_two_commands() -> None:
    texts = [block.text for block in BLOCKS if block.page == "README.md"][:2]
    serve, found = (
        [line.partition("#")[0].strip() for line in text.splitlines()] for text in texts
    )
    assert "polyspec serve model.gguf --draft small.gguf" in serve
    assert found == ["make demo", "make test"]


def test_both_schemes_of_a_picture_exist_and_are_small() -> None:
    found = re.findall(r'(?:srcset|src)="([^"]+)"', README)
    assert len(found) == 4
    assert all((ROOT / name).stat().st_size < 60_000 for name in found)


def test_the_targets_of_make_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for text in PAGES.values():
        for name in re.findall(r"(?:`|^)make ([a-z0-9-]+)", text, re.M):
            assert re.search(rf"^{name}:", makefile, re.M), name


# ---- links, lengths, tables ----------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if re.match(r"\w+:", target):
            continue
        place, _, anchor = target.partition("#")
        path = (ROOT / page).parent / place if place else ROOT / page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path.read_text(encoding="utf-8")), target


def test_files_that_the_text_names_exist() -> None:
    places = r"(?:csrc|docs|examples|polyspec_ext|python_tests|\.ci)/[\w./-]*\w"
    for page, text in PAGES.items():
        for name in re.findall(rf"(?<![\w/$.(]){places}", text):
            if "NAME" not in name:
                assert (ROOT / name).exists(), f"{page}: {name}"


def test_every_page_stands_in_the_index() -> None:
    for page in PAGES.keys() - {"docs/index.md"}:
        if page.startswith("docs/"):
            index = "docs/drafters/" if re.match("docs/drafters/(?!index)", page) else "docs/"
            assert f"]({page.removeprefix(index)})" in PAGES[f"{index}index.md"], page


def test_pages_are_short() -> None:
    for page, text in PAGES.items():
        if page == "README.md":
            assert text.count("\n") <= README_LINES
        else:
            own = re.sub(r"^<!-- table.*?^<!-- end of table -->$", "", text, flags=re.M | re.S)
            assert own.count("\n") <= LINES, page


BLOCKS_AND_TABLES = r"^```.*?^```$|^<!-- table.*?^<!-- end of table -->$"


def sentences(text: str) -> list[str]:
    """Of the prose of a page: no code, tables, captions of tables or headings. Code is one word."""
    text = re.sub(BLOCKS_AND_TABLES, "", text, flags=re.M | re.S)
    text = re.sub(r"^[|#].*$", "", text, flags=re.M)
    text = re.sub(r"`[^`]*`", "code", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    parts = re.split(r"\n\s*\n|^\s*(?:-|\d+\.) ", text, flags=re.M)
    return [one for part in parts for one in re.split(r"(?<=[.:;?!])[*)]*\s+", part.strip()) if one]


@pytest.mark.parametrize("page", sorted(set(PAGES) - {"docs/cpp.md"}))
def test_sentences_are_short(page: str) -> None:
    long = [" ".join(one.split()) for one in sentences(PAGES[page]) if len(one.split()) > WORDS]
    assert not long


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    pytest.importorskip("pandas")
    return native_builds.loaded(DOCS / "tables.py")


def test_the_tables_are_those_of_the_committed_results(tables: ModuleType) -> None:
    assert tables.main(["--check"]) == 0, "run: python docs/tables.py"
    used = {name for text in PAGES.values() for name, _ in tables.BLOCK.findall(text)}
    assert used == set(tables.TABLES)


def test_a_number_that_somebody_typed_is_found(tables: ModuleType) -> None:
    page = PAGES["docs/shipped-models.md"]
    assert tables.stale(page) == []
    typed = page.replace("0.852", "0.952")
    assert tables.stale(typed) == ["shipped-models"]
    assert tables.filled(typed) == page


def test_the_chart_has_the_numbers_of_the_tables(tables: ModuleType) -> None:
    groups = tables.speeds()
    for (_, _, bars), name in zip(groups[1:4], list(tables.PAPER)[1:4], strict=True):
        cells = [line.split("|") for line in tables.made(name).splitlines() if line[:1] == "|"]
        assert {f"{speed:.2f}" for _, speed in bars} <= {row[4].split()[0] for row in cells}
    found = re.findall(r">(\d\.\d\d)</text>", tables.chart("light"))
    assert found == [f"{speed:.2f}" for _, _, bars in groups for _, speed in bars]


# ---- lists ---------------------------------------------------------------------------------------


def test_the_list_of_what_custom_generate_refuses_is_the_codes() -> None:
    text = PAGES["docs/transformers.md"]
    section = text.partition("What a chain cannot honour is refused by name")[2]
    options, call, own = section.split("\n- ")[1:]

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


def test_every_shipped_model_has_a_licence_note_beside_it() -> None:
    place = ROOT / "polyspec_ext" / "tiny"
    note = (place / "README.md").read_text(encoding="utf-8")
    shipped = [path.parent.name for path in place.glob("*/model.safetensors")]
    assert len(shipped) == 5
    for name in shipped:
        assert re.search(rf"^\| .*\b{name}\b", note, re.M), name
    assert "Apache-2.0" in note
    assert '"tiny/*.md"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_guarantees_are_numbered_from_one_to_eight_in_a_line_each() -> None:
    section = README.partition("\n## Guarantees\n")[2].partition("\n## ")[0]
    assert re.findall(r"^- \*\*(C\d+)\*\* \S", section, re.M) == [f"C{n}" for n in range(1, 9)]
    assert not re.search(r"^  ", section, re.M)


def test_public_names_in_the_text_exist() -> None:
    for page, text in PAGES.items():
        for name in set(re.findall(r"\bps\.(\w+)", text)):
            assert hasattr(ps, name), f"{page}: ps.{name}"
