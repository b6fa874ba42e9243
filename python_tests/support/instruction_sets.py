"""Run a function of a test module in another process, with another instruction set and more
threads."""

import os
import subprocess
import sys
from pathlib import Path

import polyspec_ext


def printed(isa: str, module: str, call: str) -> str:
    """`call` of a test module of `ops` with the instruction set `isa`, on three threads."""
    folders = [Path(polyspec_ext.__file__).parents[1], Path(__file__).parents[1] / "ops"]
    code = f"import torch, {module} as m; torch.set_num_threads(3); print(m.{call})"
    path = os.pathsep.join([*map(str, folders), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"POLYSPEC_CPU_ISA": isa, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
