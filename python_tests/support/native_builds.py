"""Programs in C and C++ that tests build, and the tools for it."""

import contextlib
import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "csrc" / "examples"


def first_tool(variable: str, *names: str) -> str | None:
    return os.environ.get(variable) or next(filter(None, map(shutil.which, names)), None)


TOOLS = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
CMAKE = shutil.which("cmake", path=TOOLS)
CXX = first_tool("CXX", "c++", "g++", "clang++")
CC = first_tool("CC", "cc", "gcc", "clang")
STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]
needs_tools = pytest.mark.skipif(not (CMAKE and CXX), reason="needs cmake and a C++ compiler")


def run(*command, check=True, **variables) -> subprocess.CompletedProcess[str]:
    """Return the output of a command; `variables`: of its environment, None: absent."""
    words = [str(word) for word in command]
    every = {**os.environ, "PATH": TOOLS, "POLYSPEC_CUDA": "OFF", **variables}
    env = {name: value for name, value in every.items() if value is not None}
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", env=env)
    if check and done.returncode != 0:
        pytest.fail(f"{' '.join(words)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done


def loaded(path: Path) -> ModuleType:
    """Return a script as a module of its name, where its dataclasses look for their types."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cmake_build(source: Path, build: Path, *options: str) -> None:
    """Build without the slower optimisations: CTest tests the full optimisation."""
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=TOOLS) else []
    options = ("-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG", *options)
    run(CMAKE, "-S", source, "-B", build, *generator, *options)
    run(CMAKE, "--build", build, "--parallel", "2")


def snippets(language: str) -> list[str]:
    """The blocks of docs/cpp.md in ```language."""
    page = (ROOT / "docs" / "cpp.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.M | re.S)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder against other processes of one test run."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def installer(folder: Path) -> Callable[[str], Path]:
    """Return a function that builds the library without CUDA, "static" or "shared", at the first
    call, and returns its prefix. Both have the same objects. The prefix is moved after the
    installation: no file in it may name a folder."""

    def install(kind: str) -> Path:
        with locked(folder):
            if not (folder / kind).exists():
                shared = f"-DBUILD_SHARED_LIBS={'ON' if kind == 'shared' else 'OFF'}"
                cmake_build(ROOT, folder / "build", "-DCMAKE_INSTALL_LIBDIR=lib", shared)
                run(CMAKE, "--install", folder / "build", "--prefix", folder / "first")
                (folder / "first").rename(folder / kind)
        return folder / kind

    return install


def build_example(source: Path, prefix: Path, *options: str, engine: str = "") -> Path:
    """Return the folder of an example that is built on the installation at `prefix` once."""
    build = prefix.parent / source.name
    with locked(prefix.parent):
        cmake_build(source, build, f"-DCMAKE_PREFIX_PATH={prefix};{engine}", *options)
    return build
