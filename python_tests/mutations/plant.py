#!/usr/bin/env python3
"""Plant faults in a copy of the tree, one at a time, and see that the tests catch them.

    python python_tests/mutations/plant.py                 every fault of faults.py
    python python_tests/mutations/plant.py NAME...         these
    python python_tests/mutations/plant.py --search NAME   which tests catch it, of those that `make test` runs in
                                                           the folders of the fault; --all: of all tests

A fault is caught when the tests that faults.py names for it fail. Faults of csrc are built first, in the copy. Exit
status 1 and their names: some were not caught.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", "-rfE", "--tb=no")
CATCHES = re.compile(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - |$)", re.M)


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


def build(tree: Path) -> None:
    """Build what is older than its sources: the module without CUDA kernels, and CTest's programs."""
    variables = os.environ | {"POLYSPEC_CUDA": "OFF"}
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables["PATH"] = tools
    folder = tree / "build"
    commands = (
        ["cmake", "-S", tree, "-B", folder, "-G", "Ninja", "-DPOLYSPEC_BUILD_PYTHON=ON",
         "-DPOLYSPEC_BUILD_TESTS=ON", f"-DPython_EXECUTABLE={sys.executable}"],
        ["cmake", "--build", folder, "--", "-k", "0"],
        ["cmake", "--install", folder, "--component", "python", "--prefix", tree / "polyspec_ext"],
    )  # fmt: skip
    for command in commands:
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{command}: {done.stdout[-3000:]}{done.stderr}")


def caught(tree: Path, tests: list[str], stop: bool = True) -> tuple[bool, list[str]]:
    """Run tests in the copy; return whether one failed, and the names of those that did."""
    programs = [test.removeprefix("ctest ") for test in tests if test.startswith("ctest ")]
    nodes = [test for test in tests if not test.startswith("ctest ")]
    failed = []
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    for name in programs:
        words = ["ctest", "--test-dir", tree / "build", "-R", f"^{re.escape(name)}$"]
        tool = Path(sys.executable).with_name("ctest")
        words[0] = str(tool) if tool.exists() else "ctest"
        if subprocess.run(words, env=variables, capture_output=True).returncode:
            failed.append(f"ctest {name}")
    if nodes and not (stop and failed):
        done = subprocess.run(
            [sys.executable, *PYTEST, *(["-x"] if stop else []), *nodes],
            cwd=tree, env=variables, capture_output=True, text=True,
        )  # fmt: skip
        # 4: a test that a fault names is not there. 5: none was selected.
        if done.returncode in (4, 5):
            raise SystemExit(f"{nodes}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        failed += CATCHES.findall(done.stdout)
        if done.returncode and not failed:  # not even collected
            failed.append("collection")
    return bool(failed), failed


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
    missed = []
    with tempfile.TemporaryDirectory(prefix="polyspec-mutations-") as folder:
        tree = copied(Path(folder))
        native = [fault for fault in chosen if fault.file.startswith("csrc/")]
        if native:
            build(tree)
        # What is built last is the module of the last fault, so those of Python come first.
        for fault in sorted(chosen, key=native.__contains__):
            began = time.perf_counter()
            path, before = planted(fault, tree)
            try:
                if fault in native:
                    build(tree)
                if args.search:
                    every = [] if args.all else ["-m", "not slow"]
                    tests = [f"python_tests/{area}" for area in fault.areas]
                    found, names = caught(tree, [*every, *tests], stop=False)
                else:
                    found, names = caught(tree, list(fault.tests))
            finally:
                path.write_text(before)
            seconds = time.perf_counter() - began
            verdict = "caught" if found else "NOT CAUGHT"
            print(f"{verdict:10} {seconds:6.1f} s  {fault.name}", flush=True)
            if args.search:
                for name in names:
                    print(f"             {name}")
            if not found:
                missed.append(fault.name)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} faults caught")
    if missed:
        print(f"not caught: {', '.join(missed)}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
