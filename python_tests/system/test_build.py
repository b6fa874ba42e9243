"""The build: stubs that match the module, the source distribution, the error of a missing tool."""

import ast
import functools
import inspect
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import native_builds
import pytest
import torch
from native_builds import CMAKE, ROOT, TOOLS

import polyspec_ext as ps
from polyspec_ext import _C

needs_cmake = pytest.mark.skipif(CMAKE is None, reason="needs cmake")


run = functools.partial(native_builds.run, check=False)


# -------------------------------------------------------------------------------------------- stubs


def stub_classes() -> tuple[dict[str, ast.ClassDef], dict[str, ast.FunctionDef]]:
    tree = ast.parse((ROOT / "polyspec_ext" / "_C.pyi").read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    return classes, functions


def stub_parameters(function: ast.FunctionDef) -> list[str]:
    return [a.arg for a in function.args.args]


def module_parameters(function: Any) -> list[str]:
    """Parameter names from the signature that pybind11 writes as the first line of a docstring."""
    signature = re.match(r"\w+\((.*?)\)(?: ->|$)", (function.__doc__ or "").splitlines()[0])
    assert signature is not None, function
    depth_free = re.sub(r"\[[^\]]*\]|'[^']*'", "", signature.group(1))
    return [part.split(":")[0].split("=")[0].strip() for part in depth_free.split(",") if part]


def public(members: Any) -> set[str]:
    return {name for name in members if not name.startswith("_")}


def test_stub_names_are_the_modules() -> None:
    classes, functions = stub_classes()
    assert public(vars(_C)) == set(classes) | set(functions)


def test_stub_members_are_the_modules() -> None:
    classes, functions = stub_classes()
    for name, node in functions.items():
        assert stub_parameters(node) == module_parameters(getattr(_C, name)), name
    for name, node in classes.items():
        real = getattr(_C, name)
        if name in ("StepKind", "PolicyKind"):
            values = {t.id for a in node.body if isinstance(a, ast.Assign) for t in a.targets}
            assert values == set(real.__members__)
            continue
        methods = {m.name: m for m in node.body if isinstance(m, ast.FunctionDef)}
        constants = [m.target for m in node.body if isinstance(m, ast.AnnAssign)]
        names = {t.id for t in constants if isinstance(t, ast.Name)}
        assert public(vars(real)) == public(methods) | names, name
        static = {n for n in names if not isinstance(vars(real)[n], property)}
        assert all(isinstance(getattr(real, constant), int) for constant in static)
        for method, definition in methods.items():
            attribute = inspect.getattr_static(real, method)
            is_property = any(getattr(d, "id", "") == "property" for d in definition.decorator_list)
            assert isinstance(attribute, property) == is_property, f"{name}.{method}"
            if not is_property:
                assert stub_parameters(definition) == module_parameters(attribute), method


def test_version_is_the_builds() -> None:
    text = (ROOT / "CMakeLists.txt").read_text()
    found = re.search(r"project\(polyspec VERSION ([0-9.]+)", text)
    assert ps.__version__ == found.group(1)


@pytest.mark.builds
def test_has_cuda_is_an_answer_not_an_error() -> None:
    code = "import polyspec_ext as ps; print(ps.has_cuda())"
    done = run(sys.executable, "-c", code, CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(ROOT))
    assert done.stdout.strip() == "False", done.stderr


def test_importing_the_operators_does_not_import_transformers() -> None:
    code = "import sys, polyspec_ext; polyspec_ext.sample; print('transformers' in sys.modules)"
    done = run(sys.executable, "-c", code, PYTHONPATH=str(ROOT))
    assert done.stdout.strip() == "False", done.stderr


# ------------------------------------------------------------------------------------ missing tools


def build_with(tmp_path: Path, blocked: str = "", tools: str = "") -> str:
    """Return the output of setup.py if `blocked` cannot be imported and PATH holds only `tools`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in tools.split():
        found = shutil.which(tool, path=TOOLS)
        (folder / tool).symlink_to(found or "/bin/true")
    code = (
        f"import sys; sys.executable = {str(folder / 'python')!r}\n"
        "import importlib.util as u; find = u.find_spec\n"
        f"u.find_spec = lambda n, *a: None if n == {blocked!r} else find(n, *a)\n"
        "sys.argv = ['setup.py', 'build_ext', '--inplace']\n"
        "names = {'__file__': 'setup.py', '__name__': '__main__'}\n"
        "exec(compile(open('setup.py').read(), 'setup.py', 'exec'), names)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PATH": str(folder), "POLYSPEC_BUILD_DIR": str(tmp_path / "build")},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("missing", "install"),
    [("torch", "'torch>=2.11'"), ("pybind11", "pybind11"), ("cmake", "cmake"), ("ninja", "ninja")],
)
def test_a_missing_tool_is_named_with_the_remedy(missing, install, tmp_path) -> None:
    tools = " ".join({"cmake", "ninja"} - {missing})
    text = build_with(tmp_path, blocked=missing, tools=tools)
    assert f"polyspec_ext cannot be built: {missing} not found" in text, text
    assert f"pip install {install}\n" in text, text


@needs_cmake
def test_a_torch_with_cuda_and_no_nvcc_is_built_without_kernels(tmp_path: Path) -> None:
    """With a warning that pip's silence does not hide, each time; unless kernels were asked for."""
    (tmp_path / "torch").mkdir()
    fake = "__version__ = '2.13.0+cu130'\nclass version:\n    cuda = '13.0'\n"
    (tmp_path / "torch" / "__init__.py").write_text(fake)
    build = tmp_path / "build"
    command = [CMAKE, "-S", ROOT, "-B", build, "-DPOLYSPEC_BUILD_PYTHON=ON"]
    command.append(f"-DPython_EXECUTABLE={sys.executable}")

    def configured(cuda: str | None) -> tuple[int, str]:
        paths = {"PYTHONPATH": str(tmp_path), "CUDACXX": str(tmp_path / "nvcc")}
        done = run(*command, POLYSPEC_CUDA=cuda, **paths)
        report = f"import setup, pathlib; setup.report_left_out(pathlib.Path({str(build)!r}))"
        code = f"import setuptools; setuptools.setup = lambda **options: None; {report}"
        told = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT, capture_output=True, text=True, start_new_session=True,
        )  # fmt: skip
        assert told.returncode == 0, told.stderr
        return done.returncode, " ".join(f"{done.stdout} {done.stderr} {told.stderr}".split())

    for _ in range(2):
        status, text = configured(None)
        assert status == 0, text
        assert "CUDA kernels OFF" in text
        assert text.count("built WITHOUT CUDA KERNELS and runs on the CPU only") == 2
    status, text = configured("OFF")
    assert (status, "WITHOUT CUDA KERNELS" in text) == (0, False)
    status, text = configured("ON")
    assert status != 0
    assert "no CUDA compiler (nvcc) was found. Install the CUDA toolkit" in text
    assert "POLYSPEC_CUDA=OFF" in text


def test_an_old_setuptools_is_named_with_the_remedy() -> None:
    """65 comes with a fresh environment of Python 3.11."""
    code = "import setuptools; setuptools.__version__ = '65.5.0'; import setup"
    failed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert failed.returncode != 0
    assert "expected setuptools >= 77" in failed.stderr
    assert "-m pip install 'setuptools>=77'\n" in failed.stderr


def test_pages_name_what_an_installation_needs() -> None:
    required = re.search(r"requires = \[(.*)\]", (ROOT / "pyproject.toml").read_text())
    names = re.findall(r'"([^"]+)"', required.group(1))
    for page in ("README.md", "docs/installation.md"):
        command = re.search(r"^pip install (.*)\n(?=pip install --no-build-isolation)", (
            ROOT / page).read_text(), re.M)  # fmt: skip
        assert command is not None, page
        assert sorted(command.group(1).replace('"', "").split()) == sorted(names), page


def test_readme_and_cmake_ask_for_the_same_nvcc() -> None:
    cmake = (ROOT / "csrc" / "cmake" / "PolyspecCuda.cmake").read_text()
    enforced = re.search(r"CMAKE_CUDA_COMPILER_VERSION VERSION_LESS ([0-9.]+)\)", cmake)
    wanted = enforced.group(1)
    assert set(re.findall(r"CUDA(?: toolkit)? >= ([0-9.]+[0-9])", cmake)) == {wanted}
    assert re.findall(r"nvcc ([0-9.]+[0-9])", (ROOT / "README.md").read_text()) == [wanted]


# ------------------------------------------------------------------------------------------ .ci/gpu

GPU_STEPS = (
    "configure", "configure without Python", "build", "install", "imports",
    "chosen 7b", "bench int4", "counters 256x256", "dependent launch", "chosen 0.5b",
    "chosen trace", "chosen 7b-batch", "cuda_test", "graph_life_test", "chosen llama3-8b",
    "pytest gpu", "verify_shapes", "chosen context-4k", "chosen context-16k", "bench kernels",
    "rounds of the target", "bench paper",
    "sanitizer memcheck", "sanitizer racecheck", "sanitizer synccheck", "sanitizer initcheck",
)  # fmt: skip
# The results of a build: a module, and programs that end as `code` says.
BUILT = (
    "for one in cuda_test graph_life_test verify_shapes; do "
    'echo exit {code} >"$2/$one"; chmod +x "$2/$one"; done; touch "$2/_C.so"'
)


def gpu_script(tmp_path, steps=".*", **commands) -> tuple[int, list[list[str]], str, Path]:
    """Return the exit code, the table's rows as (step, result), the text below the table and OUT,
    of .ci/gpu with stubs for commands."""
    folder, out, build = tmp_path / "bin", tmp_path / "out", tmp_path / "build"
    folder.mkdir()
    for name, body in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    variables = {"DRY": "1", "STEPS": steps, "PYTHON": str(folder / "python"), "OUT": str(out)}
    variables |= {"BUILD": str(build), "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    done = run(ROOT / ".ci" / "gpu", **variables)
    table = (out / "table.txt").read_text()
    _, found, below = done.stdout.partition(table)
    assert found, done.stdout + done.stderr
    heads = [re.split(r"  +", line)[:2] for line in table.splitlines()[1:]]
    return done.returncode, heads, below, out


def cmake_stub(code: int = 0, configures: int = 0) -> str:
    build = BUILT.format(code=code)
    return (
        f'echo "$*"; case $1 in --install) exit 0 ;; --build) {build}; exit 0 ;; esac; '
        f"exit {configures}"
    )


def log_of(out: Path, step: str) -> str:
    with tarfile.open(out / "logs.tar.gz") as archive:
        log = archive.extractfile(f"logs/{step.replace(' ', '-')}.log")
        return log.read().decode()


def test_gpu_script_runs_every_step_whatever_failed_before(tmp_path: Path) -> None:
    cmake = cmake_stub(1, 1)
    code, rows, below, out = gpu_script(tmp_path, cmake=cmake, python="exit 5")
    assert code == 1
    assert tuple(name for name, _ in rows) == GPU_STEPS
    passed = {name for name, result in rows if not result.startswith("FAILED")}
    assert passed == {"build", "install"}
    assert len(list(out.iterdir())) <= 7
    assert "-DPOLYSPEC_WERROR=OFF" in log_of(out, "configure")
    again = "|".join(name for name in GPU_STEPS if name not in passed)
    assert below == f"next: STEPS='{again}' .ci/gpu\n"


@pytest.mark.parametrize("answers", [True, False])
def test_gpu_script_asks_the_device_after_a_step_that_is_late(tmp_path, answers) -> None:
    """Go on where it answers; else synccheck runs on one tiny case and nothing after it."""
    cases = f"*make_parser*) exit 124 ;; *torch.ones*) exit {1 - answers} ;;"
    python = f'case "$*" in {cases} esac; echo "$*"'
    code, rows, below, out = gpu_script(tmp_path, cmake=cmake_stub(), python=python)
    assert code == 1
    results = dict(rows)
    assert results["imports"] == "timed out"
    behind = GPU_STEPS[GPU_STEPS.index("imports") + 1 :]
    assert {results[name] for name in behind} == {"passed" if answers else "not run"}
    assert ("synccheck after a hang" in results) is not answers
    if answers:
        assert below == "next: STEPS='imports' .ci/gpu\n"
    else:
        log = log_of(out, "synccheck after a hang")
        assert log.split() == ["python_tests/support/sanitized.py", "cpu", "tiny"]
        assert "imports|chosen 7b|" in below


def test_what_the_sanitizer_runs_works_on_the_cpu() -> None:
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("polyspec::")]
    registered = {name.removeprefix("polyspec::").split(".")[0] for name in names}
    of_the_cpu = (
        "add_rms_norm", "attention", "block_", "decoder_", "dense_", "gated", "int4_", "rms_norm",
        "rotary",
    )  # fmt: skip
    registered -= {name for name in registered if name.startswith(of_the_cpu)}
    script = ROOT / "python_tests" / "support" / "sanitized.py"
    code = (
        "import runpy, sys, torch.utils._python_dispatch as d\n"
        "called = set()\n"
        "class Mode(d.TorchDispatchMode):\n"
        "    def __torch_dispatch__(self, func, types, args=(), kwargs=None):\n"
        "        called.add(str(func))\n"
        "        return func(*args, **(kwargs or {}))\n"
        "sys.argv = ['sanitized.py', 'cpu']\n"
        "with Mode():\n"
        f"    runpy.run_path({str(script)!r}, run_name='__main__')\n"
        "print(*sorted(called))"
    )
    done = run(sys.executable, "-c", code, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    called = {name.split(".")[1] for name in done.stdout.split() if name.startswith("polyspec.")}
    assert called == registered


# ------------------------------------------------------------------------------------------ package


@needs_cmake
def test_source_distribution_can_be_configured(tmp_path: Path) -> None:
    """Build from a copy without earlier builds, because setuptools would pack their files."""
    tree, out, unpacked = tmp_path / "tree", tmp_path / "out", tmp_path / "unpacked"
    written = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info", ".*", "build", "dist")
    shutil.copytree(ROOT, tree, ignore=written)
    code = "import sys; from setuptools import build_meta as b; b.build_sdist(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, out], cwd=tree, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    (archive,) = out.iterdir()
    unpacked.mkdir()
    assert run("tar", "-xf", archive, "-C", unpacked).returncode == 0
    (source,) = unpacked.iterdir()
    for folder in ("csrc", "polyspec_ext"):
        names = {p.relative_to(tree) for p in (tree / folder).rglob("*") if p.is_file()}
        assert {n for n in names if not (source / n).exists()} == set()
    options = [f"-DPython_EXECUTABLE={sys.executable}", "-DPOLYSPEC_BUILD_PYTHON=ON"]
    options += ["-DPOLYSPEC_BUILD_TESTS=ON", "-DPOLYSPEC_BUILD_EXAMPLES=ON"]
    done = run(CMAKE, "-S", source, "-B", tmp_path / "build", *options, POLYSPEC_CUDA="OFF")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_module_exports_only_its_entry() -> None:
    listed = run("nm", "-D", "--defined-only", _C.__file__).stdout
    assert re.findall(r" T (\S+)", listed) == ["PyInit__C"]


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
def test_wide_instructions_stay_in_their_own_functions() -> None:
    """A weak function in an object compiled for AVX could be the copy that every caller gets."""
    objects = list(ROOT.glob("build/*/CMakeFiles/polyspec_*_avx*/csrc/src/cpu/*.cpp.o"))
    if not objects:
        pytest.skip("no build folder with variants at hand")
    for path in objects:
        listed = run("nm", "--defined-only", "-C", path).stdout
        shared = [line for line in listed.splitlines() if re.search(r" [WVu] ", line)]
        core = f"core_{path.parts[-5].removesuffix('.dir').split('_')[2]}"
        assert [s for s in shared if core not in s] == [], path
