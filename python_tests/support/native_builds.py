"""Programs in C and C++ that tests build, and the tools for it."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "csrc" / "examples"


def first_tool(variable: str, *names: str) -> str | None:
    return os.environ.get(variable) or next(filter(None, map(shutil.which, names)), None)


TOOLS = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
CMAKE = shutil.which("cmake", path=TOOLS)
CXX = first_tool("CXX", "c++", "g++", "clang++")
CC = first_tool("CC", "cc", "gcc", "clang")
needs_tools = pytest.mark.skipif(not (CMAKE and CXX), reason="needs cmake and a C++ compiler")


def run(*command: object, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    env = {**os.environ, "PATH": TOOLS, "POLYSPEC_CUDA": "OFF", **variables}
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", env=env)
    if check and done.returncode != 0:
        pytest.fail(f"{' '.join(words)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done


def cmake_build(source: Path, build: Path, *options: str) -> None:
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=TOOLS) else []
    run(CMAKE, "-S", source, "-B", build, *generator, "-DCMAKE_BUILD_TYPE=Release", *options)
    run(CMAKE, "--build", build, "--parallel", "2")


def snippets(language: str) -> list[str]:
    """The blocks of docs/cpp.md in ```language."""
    page = (ROOT / "docs" / "cpp.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.M | re.S)


def installer(folder: Path) -> Callable[[str], Path]:
    """Where the library is installed without CUDA, "static" or "shared"; built when first asked
    for. The prefix is moved after the installation: nothing in it may name a place."""

    @functools.cache
    def install(kind: str) -> Path:
        build = folder / f"build-{kind}"
        options = ["-DCMAKE_INSTALL_LIBDIR=lib"]
        if kind == "static":  # what is optimised in full is tested by CTest, and takes longer
            options += ["-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG"]
        else:
            options += ["-DBUILD_SHARED_LIBS=ON", "-DCMAKE_BUILD_TYPE=Debug"]
        cmake_build(ROOT, build, *options)
        run(CMAKE, "--install", build, "--prefix", folder / "first")
        return (folder / "first").rename(folder / kind)

    return install
