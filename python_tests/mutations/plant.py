#!/usr/bin/env python3
"""Plant faults in a copy of the tree, one at a time, and see that the tests catch them.

    python python_tests/mutations/plant.py                 every fault of faults.py
    python python_tests/mutations/plant.py NAME...         these
    python python_tests/mutations/plant.py --search NAME   the tests that catch it, of all that
                                                           `make test` runs in the files of its
                                                           tests; --all: of all tests there

A fault is caught when a test that faults.py names for it fails, or takes longer than the limit,
since some faults are endless loops. Faults of csrc are built first, in the copy: only the targets
that the named tests need, for the plainest processor, because optimised loops for several
processors take five times as long to compile. Exit status 1 and their names: some were not caught.
"""

import argparse
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}  # before torch is imported

# Imported once: each fault's tests run in a fork.
import pytest
import torch  # noqa: F401
import transformers  # noqa: F401
from faults import FAULTS, Fault
from transformers import LlamaForCausalLM  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
PYTEST = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "-rfE", "--tb=no")
CATCHES = re.compile(r"^(?:FAILED|ERROR) (?:python_tests/)?(\S+?(?:\[.*?\])?)(?: - |$)", re.M)
SECONDS = 300  # of the tests of a fault
TOOLS = Path(sys.executable).parent
# No LTO, no copies of loops for other processors than the plainest.
PLAIN = (
    "-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=generic",
    "-DPOLYSPEC_HAS_TSAN_EXITCODE=1", "-DCMAKE_CXX_FLAGS_RELEASE=-O1",
    "-DCMAKE_INTERPROCEDURAL_OPTIMIZATION=OFF",
)  # fmt: skip


def copied(folder: Path) -> Path:
    """Copy the files that git knows, and the compiled module, into `folder`."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    modules = [str(path.relative_to(ROOT)) for path in ROOT.glob("polyspec_ext/_C*.so")]
    for name in filter(None, [*names, *modules]):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def build(tree: Path, tests: Iterable[str]) -> None:
    """Build the targets that `tests` need: programs of CTest, or the module."""
    programs = {test.partition("ctest ")[2] or "_C" for test in tests}
    paths = f"{TOOLS}{os.pathsep}{os.environ['PATH']}"
    variables = os.environ | {"POLYSPEC_CUDA": "OFF", "PATH": paths}
    folder = tree / "build"
    commands = [["cmake", "--build", folder, "--target", *programs]]
    if not (folder / "build.ninja").exists():
        python = f"-DPython_EXECUTABLE={sys.executable}"
        options = (python, "-DPOLYSPEC_BUILD_PYTHON=ON", "-DPOLYSPEC_BUILD_TESTS=ON", *PLAIN)
        commands.insert(0, ["cmake", "-S", tree, "-B", folder, "-G", "Ninja", *options])
    for command in commands:
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{command}: {done.stdout[-3000:]}{done.stderr}")
    for module in folder.glob("_C*.so"):
        shutil.copy2(module, tree / "polyspec_ext")


def _in_fork(tree: Path, words: Sequence[str], log: Path) -> None:
    os.setsid()  # programs that tests start end with them
    os.chdir(tree)
    sys.path[0], sys.dont_write_bytecode = str(tree), True  # files change within a second
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        code = pytest.main([*PYTEST, *words])
        sys.stdout.flush()
    os._exit(code)


def caught(tree: Path, tests: Sequence[str], options: Sequence[str]) -> list[str]:
    """Run tests in the copy, with pytest's `options`; return the names of failed tests."""
    failed = []
    nodes = [f"python_tests/{test}" for test in tests if not test.startswith("ctest ")]
    for name in (test.removeprefix("ctest ") for test in tests if test.startswith("ctest ")):
        program: dict[str, Any] = {"check": True, "capture_output": True, "timeout": SECONDS}
        try:
            subprocess.run([tree / "build" / name], **program)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            failed.append(f"ctest {name}")
    if not nodes or (failed and "-x" in options):
        return failed
    log = tree / "pytest.log"
    words = (tree, [*options, *nodes], log)
    fork = multiprocessing.get_context("fork").Process(target=_in_fork, args=words)
    fork.start()
    fork.join(SECONDS)
    if fork.is_alive():
        os.killpg(fork.pid or 0, signal.SIGKILL)
        return [*failed, "no end"]
    said = log.read_text()
    if fork.exitcode in (4, 5):  # a test that a fault names is not there, or none was selected
        print(said[-1000:])
        return failed
    found = CATCHES.findall(said)
    return failed + (found or (["collection"] if fork.exitcode else []))


def planted(fault: Fault, tree: Path) -> tuple[Path, str]:
    """Write the fault into the copy; return the file and its text before."""
    path = tree / fault.file
    before = path.read_text()
    if before.count(fault.text) != 1:
        found = before.count(fault.text)
        raise SystemExit(f"{fault.name}: its text is in {fault.file} {found} times, not once")
    path.write_text(before.replace(fault.text, fault.planted))
    return path, before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults (default: all)")
    parser.add_argument("--search", action="store_true", help="list the tests that catch it")
    parser.add_argument("--all", action="store_true", help="search the slow tests as well")
    args = parser.parse_args()
    unknown = set(args.names) - {fault.name for fault in FAULTS}
    if unknown:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    chosen = [fault for fault in FAULTS if not args.names or fault.name in args.names]
    options = ["-x"] if not args.search else [] if args.all else ["-m", "not slow"]
    missed = []
    with tempfile.TemporaryDirectory(prefix="polyspec-mutations-") as folder:
        tree = copied(Path(folder))
        # The last build is the module of the last fault, so faults in Python come first.
        for fault in sorted(chosen, key=lambda fault: fault.file.startswith("csrc/")):
            began = time.perf_counter()
            tests = fault.tests
            if args.search:  # all tests of their files
                tests = tuple(dict.fromkeys(test.partition("::")[0] for test in tests))
            path, before = planted(fault, tree)
            try:
                if fault.file.startswith("csrc/"):
                    build(tree, tests)
                names = caught(tree, tests, options)
            finally:
                path.write_text(before)
            seconds = time.perf_counter() - began
            verdict = "caught" if names else "NOT CAUGHT"
            print(f"{verdict:10} {seconds:6.1f} s  {fault.name}", flush=True)
            for name in names if args.search else ():
                print(f"             {name}")
            if not names:
                missed.append(fault.name)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} faults caught")
    if missed:
        print(f"not caught: {', '.join(missed)}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
