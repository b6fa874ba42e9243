"""Instructions per logit of the CUDA kernels' loops over a row, counted in what nvcc makes of them
for sm_90 (bfloat16)."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PER_VECTOR = 8  # logits in 16 bytes


class Loop(NamedTuple):
    per_logit: float
    vectors: int  # loaded before the first is used


# Most instructions per logit, and least vectors under way.
BUDGET = {
    "maximum": Loop(2.0, 4),
    "mass": Loop(21.0, 4),
    "residual": Loop(51.0, 2),
    "count_digit": Loop(19.0, 1),
    "mass_digit": Loop(44.0, 1),
}


def disassembler() -> Path | None:
    """nvdisasm of the toolkit, or of the package nvidia-cuda-nvdisasm."""
    found = shutil.which("nvdisasm")
    if found:
        return Path(found)
    try:
        files = metadata.files("nvidia-cuda-nvdisasm") or []
    except metadata.PackageNotFoundError:
        return None
    return next((Path(file.locate()) for file in files if file.name == "nvdisasm"), None)


def instructions(listing: str) -> Iterator[tuple[str, list[str]]]:
    """The kernels of a listing by name, each with its labels (``name:``) and instructions."""
    for part in re.split(r"^\.text\.", listing, flags=re.MULTILINE)[1:]:
        lines = re.findall(r"^\.(L_x_\d+:)|^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", part, re.MULTILINE)
        yield part.split(":", 1)[0], [label or code for label, code in lines]


def innermost_loop(code: list[str], residual: bool) -> Loop:
    """The shortest loop that loads vectors."""
    best: Loop | None = None
    for end, line in enumerate(code):
        jump = re.search(r"\bBRA\b.*\.(L_x_\d+)", line)
        if jump is None or f"{jump[1]}:" not in code[:end]:
            continue
        body = [each for each in code[code.index(f"{jump[1]}:") : end + 1] if each[-1] != ":"]
        vectors = sum("LDG.E.128" in each for each in body)
        if vectors == 0:
            continue
        logits = PER_VECTOR * (1 if residual else vectors)
        loop = Loop(len(body) / logits, vectors)
        best = loop if best is None or loop < best else best
    assert best is not None, "no loop with loads of 16 bytes"
    return best


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Loop]:
    nvcc, nvdisasm = shutil.which("nvcc"), disassembler()
    if nvcc is None or nvdisasm is None:
        pytest.skip("needs nvcc and nvdisasm")
    cubin = tmp_path_factory.mktemp("probes") / "probes.cubin"
    source = ROOT / "csrc" / "tests" / "gpu" / "loop_probes.cu"
    includes = [f"-I{ROOT / 'csrc' / name}" for name in ("src", "include")]
    options = ["-std=c++17", "-O3", "-arch=sm_90", "-fmad=false", "-cubin", "-o", str(cubin)]
    subprocess.run([nvcc, *options, *includes, str(source)], check=True, capture_output=True)
    listing = subprocess.run(
        [str(nvdisasm), "-c", str(cubin)], check=True, capture_output=True, text=True
    ).stdout
    found = {}
    for symbol, code in instructions(listing):
        name = next((name for name in BUDGET if f"{len(name)}{name}E" in symbol), None)
        if name is not None:
            found[name] = innermost_loop(code, name == "residual")
    return found


@pytest.mark.parametrize("name", BUDGET)
def test_instructions_per_logit(name: str, loops: dict[str, Loop]) -> None:
    loop, most = loops[name], BUDGET[name]
    assert loop.per_logit <= most.per_logit, f"{loop.per_logit:.1f} instructions per logit"
    assert loop.vectors >= most.vectors, f"{loop.vectors} vectors under way"
