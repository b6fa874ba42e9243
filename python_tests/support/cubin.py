"""CUDA sources compiled for sm_90 as the library compiles them, to count in what comes of them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def compiled(source: str, folder: Path) -> Path:
    """Return the cubin of a file below csrc; without nvcc the test is skipped."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    cubin = folder / "code.cubin"
    includes = [f"-I{ROOT / 'csrc' / name}" for name in ("src", "include")]
    options = ["-std=c++17", "-O3", "-arch=sm_90", "-fmad=false", "-cubin", "-o", str(cubin)]
    path = ROOT / "csrc" / source
    subprocess.run([nvcc, *options, *includes, str(path)], check=True, capture_output=True)
    return cubin
