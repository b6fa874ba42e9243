"""Kilobytes of code of a launch of each operator, for sm_90 and bfloat16: instruction caches are
small, and a launch finds them cold."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from cubin import compiled

# By kernel and, of chains, rule: 0 by token, 1 by block. 64 are wanted.
BUDGET = {
    "verify_kernel 0": 153,
    "rows_kernel 0": 175,
    "verify_kernel 1": 165,
    "rows_kernel 1": 182,
    "tree_kernel": 178,
    "sample_kernel": 96,
}


@pytest.fixture(scope="module")
def kilobytes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("needs readelf")
    cubin: Path = compiled("code_probes.cu", tmp_path_factory.mktemp("code"))
    sections = subprocess.run(
        [readelf, "-SW", str(cubin)], check=True, capture_output=True, text=True
    ).stdout
    found = {}
    for name, size in re.findall(r"\.text\.(\S+) +PROGBITS +\w+ +\w+ +(\w+)", sections):
        kernel = re.search(r"\d([a-z_]+_kernel)I.*?(?:RuleE(\d)|ELi)", name)
        assert kernel is not None, name
        found[" ".join(part for part in kernel.groups() if part)] = int(size, 16) / 1024
    return found


@pytest.mark.parametrize("kernel", BUDGET)
def test_code_of_a_launch(kernel: str, kilobytes: dict[str, float]) -> None:
    assert kilobytes[kernel] <= BUDGET[kernel], f"{kilobytes[kernel]:.1f} KB"
