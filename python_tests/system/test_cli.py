"""The command line, on a chain of untrained models of POLYSPEC_TINY."""

import argparse
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import transformers

import polyspec_ext as ps
from benchmarks.__main__ import make_parser as benchmarks_parser
from polyspec_ext import cli, tiny
from training import tiny_models
from training.__main__ import make_parser as training_parser

pytestmark = pytest.mark.usefixtures("tiny_untrained")


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.main(arguments)
    out = capsys.readouterr()
    return status, out.out, out.err


def test_levels_are_shown_by_colours(capsys: pytest.CaptureFixture[str]) -> None:
    command = ("generate", "x", "--max-new-tokens", "30", "--temperature", "1.5", "--seed", "3")
    plain = call(capsys, *command)[1]
    status, shown, notes = call(capsys, *command, "--show-levels")
    assert status == 0
    assert re.sub(r"\x1b\[[\d;]*m", "", shown) == plain
    codes = set(re.findall(r"\x1b\[([\d;]*)m", shown))
    assert {"32", "4"} <= codes
    assert codes & {"36", "36;4"}
    assert "target, middle (cyan), drafter (green); underlined" in notes
    status, _, error = call(capsys, "generate", "x", "--show-levels", "--json")
    assert status == 2
    assert error.startswith("error: show-levels: expected one text")


def test_options_of_a_text_are_those_of_a_chain(capsys: pytest.CaptureFixture[str]) -> None:
    command = ("generate", "x", "y", "--n", "2", "--max-new-tokens", "9", "--temperature", "1.5")
    more = ["--seed", "3", "--repetition-penalty", "2", "--presence-penalty", "1,0.5"]
    more += ["--frequency-penalty", "-0.5", "--stop", "e", "--stop", "a"]
    rows = json.loads(call(capsys, *command, *more, "--json")[1])["requests"]
    rules = [ps.LogitsRules(2.0, presence, -0.5) for presence in (1, 0.5)]
    asked = {"n": 2, "temperature": 1.5, "seed": 3, "rules": rules, "stop": ["e", "a"]}
    out = tiny.chain().generate(tiny.prompt_ids(["x", "y"]), 9, **asked)
    assert [row["tokens"] for row in rows] == out.new_tokens
    assert [row["text"] for row in rows] == out.text
    assert [row["finish_reason"] for row in rows] == out.finish_reasons
    printed = call(capsys, *command, *more)[1]
    assert printed == "\n".join(
        f"==> {text} <==\n{answer}\n" for text, answer in zip("xxyy", out.text, strict=True)
    )
    seeds = ("--seed", ",".join(map(str, out.seeds)))
    again = json.loads(call(capsys, *command, *more, *seeds, "--json")[1])["requests"]
    assert [row["tokens"] for row in again] == out.new_tokens
    status, _, error = call(capsys, "generate", "x", "--stop", "")
    assert (status, error) == (2, "error: --stop: expected at least 1 character, given ''\n")


def test_stop_strings_have_escapes() -> None:
    for text, stop in (
        (r"\n", "\n"),
        (r"\\n", r"\n"),
        (r"a\tb\r", "a\tb\r"),
        ("\\d\\", "\\d\\"),
        ("é", "é"),
    ):
        args = cli.make_parser().parse_args(["generate", "x", "--stop", text])
        assert args.stop == [stop]


def test_a_streamed_text_ends_in_front_of_a_stop_string(capsys: pytest.CaptureFixture[str]) -> None:
    command = ("generate", "x", "--max-new-tokens", "9")
    whole = call(capsys, *command)[1].removesuffix("\n")
    stop = whole[len(whole) // 2 :][:2]
    assert call(capsys, *command, "--stop", stop)[1] == whole[: whole.index(stop)] + "\n"


@pytest.mark.parametrize("prompts", [("x",), ("x", "y")])
def test_without_a_seed_the_command_says_which_it_drew(prompts, capsys) -> None:
    command = ("generate", *prompts, "--max-new-tokens", "12", "--temperature", "1.5")

    def rows(*options: str) -> list[dict[str, Any]]:
        report = json.loads(call(capsys, *command, "--json", *options)[1])
        return list(report.get("requests", [report]))

    drawn, others = rows(), rows()
    seeds = ",".join(str(row["seed"]) for row in drawn)
    assert [row["tokens"] for row in drawn] != [row["tokens"] for row in others]
    assert [row["tokens"] for row in rows("--seed", seeds)] == [row["tokens"] for row in drawn]
    _, out, err = call(capsys, *command)
    *_, option, seeds = err.split()
    assert option == "--seed"
    assert call(capsys, *command, "--seed", seeds)[1] == out
    for chosen in (("--seed", "3"), ("--temperature", "0")):
        assert "--seed" not in call(capsys, *command, *chosen)[2]


def test_generate_streams_the_text_that_json_has(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["generate", "3 apples", "--raw", "--max-new-tokens", "12"]
    options += ["--temperature", "1.2", "--top-k", "40", "--seed", "0"]
    report = json.loads(call(capsys, *options, "--json")[1])
    assert report["prompt"] == "3 apples"
    _, out, err = call(capsys, *options)
    assert out == report["text"] + "\n"
    assert "tokens/s" in err
    assert "level 2 middle" in err
    _, out, err = call(capsys, *options, "--stats")
    assert out == report["text"] + "\n"
    table = err.splitlines()
    assert table[2].endswith("tokens/s")
    assert [line.split()[1] for line in table[6:9]] == [*tiny.LEVELS]


def test_answers_of_the_shipped_models_say_what_they_are(capsys, monkeypatch, untrained) -> None:
    def says(*words: str) -> bool:
        monkeypatch.setattr("sys.stdin", io.StringIO("/quit\n"))
        _, out, err = call(capsys, *words)
        return "expect wrong sums. The text is exactly the target's own" in " ".join(
            (out + err).split()
        )

    for words in (("generate", "x", "--max-new-tokens", "2"), ("chat",)):
        assert says(*words)
    own = ("--target", str(untrained / "target"))
    for words in (("generate", "x", "--max-new-tokens", "2"), ("chat",)):
        assert not says(*words, *own)


def test_generate_with_a_chain_of_ones_own(capsys, untrained) -> None:
    target, middle, drafter = (str(untrained / level) for level in tiny.LEVELS)
    request = ("--raw", "--json", "--max-new-tokens", "10")
    plain = json.loads(call(capsys, "generate", "x", "--target", target, *request)[1])
    chains: list[list[str]] = [
        ["--draft", drafter, "--window", "3"],
        ["--middle", middle, "--draft", drafter, "--window", "4,2", "--rule", "block"],
        ["--middle", middle, "--middle", drafter, "--draft", "prompt-lookup", "--window", "3,2,1"],
        ["--middle", middle, "--draft", drafter, "--window", "9,2", "--rounds", "3"],
        ["--middle", middle, "--draft", drafter, "--window", "4,2", "--tail", "2"],
        ["--draft", "prompt-lookup"],
    ]
    for options in chains:
        # Without --target it is the shipped one.
        for own in (["--target", target], []):
            status, out, err = call(capsys, "generate", "x", *own, *options, *request)
            assert status == 0, err
            report = json.loads(out)
            assert report["tokens"] == plain["tokens"]
            assert report["prompt"] == "x"
            assert len(report["stats"]["levels"]) == len(options) // 2 + 1 - uncounted(options)


def uncounted(options: list[str]) -> int:
    """Return the options that name no level."""
    return sum(word.startswith("--") and word not in ("--middle", "--draft") for word in options)


@pytest.mark.parametrize("options", [["--raw"], [], ["--system", "x"]])
@pytest.mark.parametrize(("text", "shown"), [("", "''"), (" \n", "' \\n'")])
def test_a_prompt_without_text_is_refused(capsys, options, text, shown) -> None:
    found = call(capsys, "generate", text, *options)
    assert found == (2, "", f"error: prompt: expected text, given {shown}\n")
    status, _, err = call(capsys, "generate", "x", text, *options)
    assert (status, err) == (2, f"error: prompt: expected text, given {shown} as prompt 2 of 2\n")


def test_several_prompts_are_one_batch_with_values_for_each(capsys) -> None:
    options = ("--max-new-tokens", "4,7", "--temperature", "0,1", "--seed", "1,5")
    status, out, _ = call(capsys, "generate", "3 apples", "4 apples", *options, "--json")
    assert status == 0
    report = json.loads(out)
    assert report["stats"]["num_requests"] == 2
    for prompt, new, heat, seed, row in zip(
        ("3 apples", "4 apples"), "47", "01", "15", report["requests"], strict=True
    ):
        alone = ("--max-new-tokens", new, "--temperature", heat, "--seed", seed, "--json")
        single = json.loads(call(capsys, "generate", prompt, *alone)[1])
        assert single["tokens"] == row["tokens"]
        assert (single["prompt"], single["text"]) == (row["prompt"], row["text"])
    status, out, err = call(capsys, "generate", "3 apples", "4 apples", *options)
    first, second = report["requests"]
    assert out == f"==> 3 apples <==\n{first['text']}\n\n==> 4 apples <==\n{second['text']}\n"
    assert "tokens/s" in err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--top-p", "1.5"], "--top-p: expected a number in [0, 1]"),
        (["--top-p", ".9,.9"], "--top-p: expected one value, or as many as prompts (1), given 2"),
        (["--temperature", "nan"], "--temperature: expected a number >= 0"),
        (["--top-k", "2.9"], "--top-k: expected an integer >= 0"),
        (["--seed", "-1"], "--seed: expected an integer in [0, 18446744073709551615]"),
        (["--threads", "0"], "--threads: expected an integer >= 1, given '0'"),
        (["--max-new-tokens", "9999"], "max_new_tokens=9999"),
        (["--window", "4"], "--window: expected 2 integers >= 0 for 3 levels, given [4]"),
        (["--window", "4,a"], "--window: expected an integer >= 0, or several with commas"),
        (["--rounds", "4,1"], "--rounds: expected 1 integers >= 0 for 3 levels, given [4, 1]"),
        (["--tail", "-1"], "--tail: expected an integer >= 0, given '-1'"),
        (["--draft", "../no"], "--draft: expected a model id"),
        (["--dtype", "float99"], "--dtype: expected torch.float32"),
        (["--dtype", "int8"], "--dtype: expected torch.float32"),
        (["--device", "quark"], "--device: expected"),
        (["--target", "./nowhere"], "--target: expected a model id, the directory of a model"),
        (["--target", "/a/b/c"], "--target: expected a model id, the directory of a model"),
        (["--target", "{empty}"], "--target: expected a directory with a config.json"),
        (["--target", "{model}", "--draft", "../no"], "--draft: expected a model id"),
        (["--target", "{model}", "--middle", "../no"], "--middle: expected a model id"),
        (["--target", "prompt-lookup"], "--target of 1: expected a model, given the drafter"),
        (["-", "-"], "prompt: expected one '-'"),
        (["--system", "x"], "--system: expected a conversation that the chat template takes"),
        (["--system", "x", "--raw"], "--system: expected no --raw"),
        (["--rule", "tree"], "--rule: invalid choice"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_bad_input_is_one_line(capsys, untrained, tmp_path, options, text) -> None:
    places = {"{empty}": str(tmp_path), "{model}": str(untrained / "target")}
    prompt = [] if options[0] == "-" else ["x"]
    status, out, err = call(
        capsys, "generate", *prompt, *(places.get(word, word) for word in options)
    )
    assert (status, out) == (2, "")
    assert text in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (
            OSError("no such model\nCheck your connection."),
            (2, "", "error: no such model Check your connection.\n"),
        ),
        (KeyboardInterrupt(), (130, "", "")),  # the status of shells
    ],
)
def test_an_error_is_one_line_and_ctrl_c_none(capsys, monkeypatch, error, result) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(tiny, "chain", fails)
    assert call(capsys, "generate", "x") == result


@pytest.mark.parametrize("words", [("generate", "x"), ("plan",)])
def test_a_command_runs_on_as_many_threads_as_it_is_told(capsys, monkeypatch, words) -> None:
    before, seen = torch.get_num_threads(), []

    def noted(*_: Any, **__: Any) -> Any:
        seen.append(torch.get_num_threads())
        raise KeyboardInterrupt

    for name in ("chain", "tokenizer"):
        monkeypatch.setattr(tiny, name, noted)
    try:
        status, out, _ = call(capsys, *words, "--threads", str(before + 1))
        assert (status, out) == (130, "")
    finally:
        torch.set_num_threads(before)
    assert seen == [before + 1]


def test_stdin_is_a_prompt(capsys, monkeypatch) -> None:
    options = ("--raw", "--json", "--max-new-tokens", "3")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("3 äpfel".encode()), "utf-8"))
    status, out, _ = call(capsys, "generate", "-", *options)
    assert (status, json.loads(out)["prompt"]) == (0, "3 äpfel")


def test_a_missing_word_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys)
    assert (status, out) == (2, "")
    assert "usage: " in err


def python(*words: str, stdout: Any = subprocess.PIPE, **more: str) -> subprocess.Popen[bytes]:
    """Run the command line in a separate process, with pipes for its output."""
    # Output is buffered, as it is for most users.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"} | more
    command = [sys.executable, "-m", "polyspec_ext", *words]
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, env=environment)


@pytest.mark.parametrize("words", [["generate", "x", "--max-new-tokens", "9"], ["--help"]])
def test_a_reader_that_leaves_is_no_error(words: list[str]) -> None:
    with python(*words) as process:
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait() == 141
    assert b"rror" not in err
    assert b"Traceback" not in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_one_line() -> None:
    with Path("/dev/full").open("wb") as full, python("--version", stdout=full) as process:
        _, err = process.communicate()
    assert process.returncode == 2
    assert err.startswith(b"error: ")
    assert err.count(b"\n") == 1


def test_a_terminal_without_the_characters_gets_replacements() -> None:
    # Byte tokens: not all are ASCII.
    options = ["--raw", "--max-new-tokens", "40", "--temperature", "3"]
    with python("generate", "x", "y", *options, PYTHONIOENCODING="ascii") as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert out.isascii()
    assert b"?" in out


def test_the_module_runs_as_a_command() -> None:
    with python("--version") as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert out.decode() == (
        f"polyspec_ext {ps.__version__} (torch {torch.__version__}, transformers "
        f"{transformers.__version__})\n"
    )


def test_the_console_script_is_the_same_command(capsys, monkeypatch) -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"polyspec": "polyspec_ext.cli:main"}
    monkeypatch.setattr("sys.argv", ["/some/bin/polyspec", "--help"])
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().out.startswith("usage: polyspec [-h]")


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from commands(sub)


@pytest.mark.parametrize("columns", ["40", "100"])
def test_every_help_renders(capsys, monkeypatch, columns) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    found = [*commands(cli.make_parser()), *commands(benchmarks_parser())]
    found += [*commands(training_parser()), tiny_models.make_parser()]
    assert len(found) > 10
    for parser in found:
        with pytest.raises(SystemExit) as stopped:
            parser.parse_args(["--help"])
        assert stopped.value.code == 0
        text = capsys.readouterr().out
        assert text.startswith(f"usage: {parser.prog}")
        assert "%" not in text


class Planned:
    """A plan that nothing was measured for."""

    parts: ClassVar[list[Any]] = []
    recommended = SimpleNamespace(windows=[3], rounds=[], tail=0, rule="token")

    def report(self, verbose: bool) -> str:
        return "table"

    def to_dict(self) -> dict[str, Any]:
        return {"chains": []}

    def sources(self) -> list[str]:
        return ["t", "d"]


def test_a_plan_says_which_questions_it_measured(capsys, monkeypatch) -> None:
    monkeypatch.setattr("polyspec_ext.cli.plan.plan", lambda *args, **options: Planned())
    words = ("plan", "--target", str(tiny.path("target")), "--only")
    out = " ".join(call(capsys, *words)[1].split())
    assert "Measured on 6 built-in questions, since no prompt was named: " in out
    assert all(question[:20] in out for question in tiny.QUESTIONS[:6])
    out = call(capsys, *words, "First", "Second\nline")[1]
    assert "Measured on 2 prompts: First; Second line\n" in out
    assert json.loads(call(capsys, *words, "First", "--json")[1])["questions"] == ["First"]


def test_a_plan_is_not_measured_for_a_file_that_cannot_be(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("polyspec_ext.cli.plan.plan", lambda *args, **options: 1 / 0)
    for place in (tmp_path / "none" / "chain.json", tmp_path):
        status, out, err = call(capsys, "plan", "--save", str(place))
        assert (status, out) == (2, "")
        assert err == f"error: --save: expected a file in a folder that exists, given {place}\n"
