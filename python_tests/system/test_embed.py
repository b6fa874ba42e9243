"""The way in for C and C++: an installation, and csrc/examples/embed and the C test built on it.

The builds have nothing of the source tree on the include path, and no torch.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import native_builds
import pytest
from native_builds import (
    CC,
    CMAKE,
    CXX,
    EXAMPLES,
    ROOT,
    STRICT,
    build_example,
    needs_tools,
    run,
)

import polyspec_ext as ps

EXAMPLE = EXAMPLES / "embed"
C_EXAMPLE = EXAMPLES / "c" / "program.c"
STRICT_C = ["-std=c99", *STRICT]
DECLARED = r"^POLYSPEC_API [\w *:<>]*?(\w+)\("
pytestmark = needs_tools


@pytest.fixture(scope="module")
def program(prefix: Path) -> Path:
    return build_example(EXAMPLE, prefix) / "ngram_chain"


@pytest.fixture(scope="module")
def text() -> Path:
    """Return POLYSPEC_TEST_TEXT, else the text next to the example."""
    return Path(os.environ.get("POLYSPEC_TEST_TEXT") or EXAMPLE / "text.txt")


@pytest.fixture(scope="module")
def prompt(text: Path) -> str:
    """Two words and a space: a context long enough that the models differ, and much may follow."""
    return " ".join(text.read_text()[5000:5100].split()[1:3]) + " "


# The columns of the program's table.
COLUMNS = (
    *("order", "forward_passes", "verifications", "proposed", "accepted", "emitted"),
    "mean_acceptance_length",
)


def generate(program: Path, text: Path, *flags: object) -> Any:
    out = run(program, text, *flags).stdout
    body = re.search(r"--- chain ---\n(.*)\n--- end ---\n", out, re.DOTALL)
    assert body, out
    table = out[body.end() :]
    levels = []
    for line in re.findall(r"^\d+ +\d+ .*$", table, re.MULTILINE):
        numbers = [float(cell.replace("-", "0")) for cell in line.split()[1:8]]
        levels.append(SimpleNamespace(**dict(zip(COLUMNS, numbers, strict=True))))
    chain = re.search(r"^chain +(\d+) +([\d.]+) ", table, re.MULTILINE)
    assert chain, out
    rest = {"tokens": int(chain[1]), "passes_per_token": float(chain[2]), "output": out}
    return SimpleNamespace(text=body[1], levels=levels, **rest)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(
    ("orders", "windows"),
    [("5,3,2", "8,3"), ("5,3,1", "1,1"), ("4,2", "5"), ("6,4,3,2", "9,4,2"), ("5,3,2", "0,0")],
)
def test_greedy_is_plain_greedy(program, text, rule, orders, windows) -> None:
    flags = ["--orders", orders, "--windows", windows, "--rule", rule, "--tokens", 200]
    report = generate(program, text, *flags, "--temperature", 0)
    assert "identical tokens" in report.output
    assert report.tokens == 200
    alone = windows == "0,0"  # the target decodes alone
    assert report.passes_per_token == 1 if alone else report.passes_per_token < 1


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(
    "filters",
    [["--temperature", 1], ["--temperature", 0.8, "--top-k", 12, "--top-p", 0.9, "--min-p", 0.01]],
    ids=["plain", "filters"],
)
def test_sampled_distribution_is_the_targets(program, text, prompt, rule, filters) -> None:
    flags = ["--rule", rule, "--windows", "3,2", "--prompt", prompt, "--trials", 8000, "--seed", 5]
    report = generate(program, text, *flags, *filters)
    found = re.search(r"distributions: chain and plain agree .*\((\d+) cells", report.output)
    assert found, report.output
    assert int(found[1]) > 20


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_tail(program: Path, text: Path, prompt: str, rule: str) -> None:
    """Two tokens of the drafter after six of the middle; all drafts are kept."""
    flags = ["--orders", "4,4,4", "--windows", "6,2", "--tail", 2, "--rule", rule]
    top, middle, drafter = generate(program, text, *flags, "--tokens", 72).levels
    assert (top.verifications, top.proposed, top.accepted, top.emitted) == (8, 64, 64, 72)
    assert (middle.verifications, middle.proposed, middle.accepted) == (16, 32, 32)
    assert drafter.emitted == drafter.forward_passes == 48
    flags = ["--tail", 2, "--rule", rule]
    for policy in ([], ["--policy", "joint"]):
        report = generate(program, text, *flags, *policy, "--temperature", 0)
        assert "identical tokens" in report.output
    flags += ["--windows", "2,1", "--prompt", prompt, "--trials", 8000, "--seed", 5]
    assert "distributions: chain and plain agree" in generate(program, text, *flags).output


@pytest.mark.parametrize("temperature", [0, 1])
def test_stops_after_the_first_stop_byte(program: Path, text: Path, temperature: float) -> None:
    for seed in range(5):
        flags = ["--prompt", "a", "--stop", " ", "--seed", seed, "--temperature", temperature]
        report = generate(program, text, *flags, "--tokens", 400)
        assert report.text.index(" ") == len(report.text) - 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which text file"),
        (["{missing}"], "cannot open the text file"),
        (["{empty}"], "is empty"),
        (["{folder}"], "cannot read the text file"),
        (["{text}", "--frequency", "3"], "unknown option --frequency"),
        (["{text}", "--top-k"], "--top-k: a value is missing"),
        (["{text}", "--top-k", "many"], "--top-k: expected an integer, got 'many'"),
        (["{text}", "--rule", "typical"], "expected token or block"),
        (["{text}", "--orders", "9,3,2"], "must be 1 to 8, got 9"),
        (["{text}", "--policy", "best"], "--policy: expected online, fsm"),
        (["{text}", "--windows", "3"], "3 levels and 1 windows"),
        (["{text}", "--windows", "3,-1"], "got -1"),
        (["{text}", "--tail", "-1"], "tail must be >= 0, got -1"),
        (["{text}", "--orders", "4,2", "--windows", "3", "--tail", "1"], "a tail needs three"),
        (["{text}", "--prompt", "\x01"], "byte 0x01 does not occur"),
        (
            ["{text}", "--temperature", "-1"],
            "level 3, position 32: sampling parameter out of range",
        ),
    ],
)
def test_bad_input(program, text, tmp_path, arguments, message) -> None:
    (tmp_path / "empty").touch()
    places = {
        "missing": tmp_path / "missing",
        "empty": tmp_path / "empty",
        "folder": tmp_path,
        "text": text,
    }
    done = run(program, *(word.format(**places) for word in arguments), check=False)
    assert done.returncode == 2
    assert message in done.stderr


def test_needs_neither_torch_nor_python(program: Path) -> None:
    ldd = shutil.which("ldd")
    if ldd is None:
        pytest.skip("needs ldd")
    assert not re.search(r"torch|python|cuda", run(ldd, program).stdout)


def test_headers_stand_alone(prefix: Path, tmp_path: Path) -> None:
    folder = prefix / "include"
    headers = {str(path.relative_to(folder)) for path in folder.rglob("*.h*")}
    expected = ("polyspec.h", "sample.hpp", "verify.hpp", "scheduler.hpp", "engines/chain.hpp")
    assert {f"polyspec/{name}" for name in expected} <= headers
    for header in sorted(headers - {"polyspec/engines/llama.hpp"}):  # which needs llama.h
        source = tmp_path / "one.cpp"
        source.write_text(f'#include "{header}"\n#include "{header}"\n')
        run(CXX, "-std=c++17", *STRICT, "-fsyntax-only", "-I", prefix / "include", source)


def test_an_example_calls_every_operator(prefix: Path) -> None:
    run(build_example(EXAMPLE, prefix) / "operators")
    called = set(re.findall(r"polyspec::(\w+)\(", (EXAMPLE / "operators.cpp").read_text()))
    folder = prefix / "include" / "polyspec"
    headers = {path.name: path.read_text() for path in folder.glob("*.hpp")}
    umbrella = headers.pop("polyspec.hpp")
    assert set(re.findall(r'#include "polyspec/(.*)"', umbrella)) == headers.keys()
    assert set(re.findall(DECLARED, "".join(headers.values()), re.M)) <= called


@pytest.mark.skipif(CC is None, reason="needs a C compiler")
@pytest.mark.parametrize(
    "name", sorted(path.name for path in (ROOT / "csrc" / "tests").glob("*/c_api*_test.c"))
)
def test_c_interface(name: str, prefix: Path, tmp_path: Path) -> None:
    version = re.search(
        r"project\(polyspec VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text()
    )
    assert version
    tests = ROOT / "csrc" / "tests"
    (source,) = tests.glob(f"*/{name}")
    includes = ["-I", prefix / "include", "-I", tests]
    library = ["-L", prefix / "lib", "-lpolyspec", "-lstdc++", "-lm"]
    define = f'-DEXPECTED_VERSION="{version[1]}"'
    run(CC, *STRICT_C, define, *includes, source, "-o", tmp_path / "c_api", *library)
    run(tmp_path / "c_api")


C_SNIPPET = """
#include <stdio.h>
#include "polyspec/polyspec.h"
void snippet(int64_t vocab, const float* logits) {{
  int64_t token;
  float logprob;
  int32_t status;
  (void)vocab, (void)logits, (void)token, (void)logprob, (void)status;
{}}}
"""
CXX_SNIPPET = """
#include <cstdio>
#include "polyspec/int4.hpp"
void snippet(const void* file, int64_t bytes) {{
{}}}
"""


@pytest.mark.skipif(CC is None, reason="needs a C compiler")
def test_snippets_of_the_page_compile(prefix: Path, tmp_path: Path) -> None:
    """test_llama has the snippets with llama.cpp."""
    inside_c = native_builds.snippets("c")
    inside_cxx = [one for one in native_builds.snippets("cpp") if "Llama" not in one]
    assert (len(inside_c), len(inside_cxx)) == (1, 1)
    include = ["-fsyntax-only", "-I", prefix / "include"]
    for body in inside_c:
        (tmp_path / "snippet.c").write_text(C_SNIPPET.format(body))
        run(CC, *STRICT_C, *include, tmp_path / "snippet.c")
    for body in inside_cxx:
        (tmp_path / "snippet.cpp").write_text(CXX_SNIPPET.format(body))
        run(CXX, "-std=c++17", *STRICT, *include, tmp_path / "snippet.cpp")


FETCHES = """
cmake_minimum_required(VERSION 3.24)
project(engine LANGUAGES CXX)
add_executable(my_engine main.cpp)
{}"""


def test_fetch_content_as_the_page_has_it(tmp_path: Path) -> None:
    """The object of a program that includes a header; the library itself is built elsewhere."""
    (block,) = native_builds.snippets("cmake")
    assert "SOURCE_DIR /path/to/polyspec" in block
    lists = FETCHES.format(block.replace("/path/to/polyspec", str(ROOT)))
    (tmp_path / "CMakeLists.txt").write_text(lists)
    (tmp_path / "main.cpp").write_text(MAIN)
    make = ["-G", "Unix Makefiles"] if shutil.which("make") else []
    run(CMAKE, "-S", tmp_path, "-B", tmp_path / "build", *make)
    if make:
        makefile, built = (f"CMakeFiles/my_engine.dir/{x}" for x in ("build.make", "main.cpp.o"))
        run("make", "-C", tmp_path / "build", "-f", makefile, built)


CONSUMER = """
cmake_minimum_required(VERSION 3.24)
project(consumer LANGUAGES CXX)
find_package(polyspec {version} REQUIRED)
add_executable(consumer main.cpp)
target_link_libraries(consumer PRIVATE polyspec::polyspec)
"""
MAIN = """
#include <cstdio>
#include "polyspec/verify.hpp"
int main() {
  const float logits[4] = {0, 1, 5, 2};
  int64_t token = -1;
  float logprob = 0;
  int32_t status = -1;
  polyspec::SampleParams params;
  params.batch = 1;
  params.vocab = 4;
  params.logits = logits;
  params.sampling.temperature.value = 0.0f;
  params.tokens = &token;
  params.logprobs = &logprob;
  params.status = &status;
  if (!polyspec::sample(params).ok()) return 1;
  std::printf("%d %d", static_cast<int>(token), status);
}
"""


def test_the_package_is_found_and_of_its_version_only(tmp_path: Path, prefix: Path) -> None:
    public_headers = {p.name for p in (ROOT / "csrc" / "include" / "polyspec").iterdir()}
    assert {p.name for p in (prefix / "include" / "polyspec").iterdir()} == public_headers

    consumer = tmp_path / "consumer"
    consumer.mkdir()
    (consumer / "main.cpp").write_text(MAIN)

    def configure(version: str) -> subprocess.CompletedProcess[str]:
        (consumer / "CMakeLists.txt").write_text(CONSUMER.format(version=version))
        shutil.rmtree(consumer / "out", ignore_errors=True)
        where = f"-DCMAKE_PREFIX_PATH={prefix}"
        return run(CMAKE, "-S", consumer, "-B", consumer / "out", where, check=False)

    major, minor = ps.__version__.split(".")[:2]
    assert configure(f"{major}.{int(minor) + 1}").returncode != 0
    assert configure(f"{major}.{minor}").returncode == 0
    run(CMAKE, "--build", consumer / "out")
    assert run(consumer / "out" / "consumer").stdout == "2 0"


@pytest.mark.skipif(
    shutil.which("pkg-config") is None or shutil.which("cc") is None, reason="needs pkg-config, cc"
)
@pytest.mark.parametrize("kind", ["static", "shared"])
def test_pkg_config_serves_a_c_program(kind, tmp_path, installed) -> None:
    """As docs/installation.md has it; the C compiler does not know that C++ is inside."""
    libraries = installed(kind) / "lib"
    path = {"PKG_CONFIG_PATH": str(libraries / "pkgconfig")}
    asked = ["--static"] if kind == "static" else []
    flags = run("pkg-config", "--cflags", "--libs", *asked, "polyspec", **path)
    assert run("pkg-config", "--modversion", "polyspec", **path).stdout.strip() == ps.__version__
    program = tmp_path / "program"
    run("cc", *STRICT_C, C_EXAMPLE, *flags.stdout.split(), "-o", program)
    env = {"LD_LIBRARY_PATH": str(libraries)}
    greedy = run(program, **env).stdout
    assert re.search(r"^59 letters in [1-5]\d passes of the target$", greedy, re.MULTILINE)
    assert "the same text as plain decoding" in greedy
    assert run(program, "0.8", **env).stdout.splitlines()[0] != greedy.splitlines()[0]
    assert run(program, "warm", check=False, **env).returncode == 2
    refused = run(program, "-1", check=False, **env)
    assert refused.returncode == 1
    assert "sampling parameter out of range" in refused.stderr


@pytest.mark.skipif(
    shutil.which("nm") is None or shutil.which("readelf") is None, reason="needs nm, readelf"
)
def test_shared_library_has_a_version_and_exports_the_public_interface(installed) -> None:
    prefix = installed("shared")
    library = prefix / "lib" / "libpolyspec.so"
    assert library.resolve().name == f"libpolyspec.so.{ps.__version__}"
    soname = f"libpolyspec.so.{'.'.join(ps.__version__.split('.')[:2])}"
    assert f"[{soname}]" in run("readelf", "-d", library).stdout
    assert (prefix / "lib" / soname).exists()

    headers = [h.read_text() for h in (prefix / "include" / "polyspec").glob("*.h*")]
    public_functions = {name for text in headers for name in re.findall(DECLARED, text, re.M)}
    assert {"polyspec_verify", "verify", "append", "schedule_next"} <= public_functions
    members = {"Scheduler", "start", "next", "report", "set_windows", "set_tail", "pending"}
    expected = {n if n.startswith("polyspec_") else f"polyspec::{n}" for n in public_functions}
    expected |= {f"polyspec::Scheduler::{name}" for name in members}
    listed = run("nm", "-DC", "--defined-only", library).stdout.splitlines()
    assert {line.split(" ", 2)[2].split("(")[0] for line in listed} == expected


def test_microbenchmark(prefix: Path) -> None:
    bench = build_example(EXAMPLES / "bench", prefix) / "kernel_bench"
    shape = ["--vocab", 500, "--batch", 8, "--draft-len", 4, "--repeats", 40, "--acceptance", 0.6]
    for options in ([], ["--threads", 2], ["--top-k", 20, "--top-p", 0.9]):
        out = run(bench, *shape, *options).stdout
        assert "| | median | quartiles | mean | GB/s | % copy | x polyspec |" in out
        for name in ("sample", "verify-token", "verify-token-bare", "verify-block"):
            assert re.search(rf"^\| {name} \| \d", out, re.MULTILINE), out
        measured = re.search(r"acceptance 0.600 asked, (\S+) measured", out)
        # 320 blocks, more than 700 trials of probability 0.6: five deviations.
        assert abs(float(measured[1]) - 0.6) < 0.095
    assert run(bench, "--vocab", "x", check=False).returncode == 2
    assert "Usage: kernel_bench" in run(bench, "--help").stdout


def test_calls_allocate_nothing(prefix: Path, tmp_path: Path) -> None:
    """csrc/examples/bench: a row for each call and number of requests, counted by operator new."""
    bench = build_example(EXAMPLES / "bench", prefix) / "call_bench"
    small = ["--vocab", 500, "--repeats", 5, "--requests", "1,3"]
    rows = [json.loads(line) for line in run(bench, *small, "--json").stdout.splitlines()]
    assert [row["requests"] for row in rows] == sorted(row["requests"] for row in rows)
    by_call = {row["call"]: row["allocations"] for row in rows}
    assert len(rows) == 2 * len(by_call) == 20
    assert by_call.pop("a std::vector, for comparison") == 1
    assert {"sample", "verify_tree", "append", "Scheduler::next, report"} <= by_call.keys()
    assert set(by_call.values()) == {0}
    assert all(row["microseconds"] >= 0 for row in rows)
    assert re.search(r"^\| sample \| 1 \| [\d.]+ \|", run(bench, *small).stdout, re.M)
    assert "given 'x'" in run(bench, "--requests", "1,x", check=False).stderr
    assert "Usage: call_bench" in run(bench, "--help").stdout


PARENT = """
cmake_minimum_required(VERSION 3.24)
project(parent LANGUAGES CXX)
add_subdirectory("{root}" polyspec)
add_executable(program program.cpp)
target_link_libraries(program PRIVATE polyspec::polyspec)
install(TARGETS program)
"""


@pytest.mark.parametrize("asks", [False, True])
def test_within_a_project(asks: bool, tmp_path: Path) -> None:
    """`add_subdirectory` leaves the build type to the project that it is in, and adds nothing to
    its installation unless asked."""
    source, build = tmp_path / "source", tmp_path / "build"
    source.mkdir()
    (source / "CMakeLists.txt").write_text(PARENT.format(root=ROOT))
    (source / "program.cpp").write_text("int main() {}\n")
    options = ["-DPOLYSPEC_INSTALL=ON"] if asks else []
    run(CMAKE, "-S", source, "-B", build, *options)
    cache = (build / "CMakeCache.txt").read_text()
    assert re.findall(r"^CMAKE_BUILD_TYPE:.*=(.*)$", cache, re.M) == [""]
    scripts = "".join(script.read_text() for script in build.rglob("cmake_install.cmake"))
    assert "program" in scripts
    installed = [
        name for name in ("libpolyspec", "polyspec.pc", "include/polyspec") if name in scripts
    ]
    assert installed == (["libpolyspec", "polyspec.pc", "include/polyspec"] if asks else [])
