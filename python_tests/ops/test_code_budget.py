"""Kilobytes of code of a launch of each operator, for sm_90: instruction caches are small, and a
launch finds them cold."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from cubin import compiled

RULES = {"0": "by token", "1": "by block"}
REQUESTS = {"0": "any", "1": "unfiltered", "2": "greedy"}

# By kernel, of chains the rule, and what is known of the requests, in bfloat16. 64 are wanted:
# greedy requests and plain sampling have it.
BUDGET = {
    "sample_kernel any": 95,
    "sample_kernel unfiltered": 41,
    "sample_kernel greedy": 10.5,
    "verify_kernel by token any": 147.5,
    "verify_kernel by token unfiltered": 83.5,
    "verify_kernel by token greedy": 16.5,
    "verify_kernel by block any": 158,
    "verify_kernel by block unfiltered": 90,
    "rows_kernel by token any": 170.5,
    "rows_kernel by token unfiltered": 104.5,
    "rows_kernel by token greedy": 32.5,
    "rows_kernel by block any": 176,
    "rows_kernel by block unfiltered": 107,
    "tree_kernel any": 168.25,
    "tree_kernel unfiltered": 100,
    "tree_kernel greedy": 27,
    "paths_kernel any": 185,
    "paths_kernel unfiltered": 113,
}


# Of a decoder layer: the largest of each kernel's types and sizes, by source.
LAYERS = {
    "layer": {
        "norm_kernel": 16.25,
        "rotary_kernel": 27.5,
        "rotary_append_kernel": 27.5,
        "gated_kernel": 3.75,
    },
    "attention": {"attention_kernel": 68.25, "merge_kernel": 7.75},
    "int4": {"int4_product_kernel": 20.5, "int4_pack_kernel": 9.75},
}


def sizes_of(source: str, folder: Path) -> list[tuple[str, float]]:
    """Return symbols and kilobytes of the kernels of a file below csrc."""
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("needs readelf")
    cubin = compiled(source, folder)
    sections = subprocess.run(
        [readelf, "-SW", str(cubin)], check=True, capture_output=True, text=True
    ).stdout
    pattern = r"\.text\.(\S+) +PROGBITS +\w+ +\w+ +(\w+)"
    return [(name, int(size, 16) / 1024) for name, size in re.findall(pattern, sections)]


@pytest.fixture(scope="module")
def kilobytes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    found = {}
    for name, size in sizes_of("tests/gpu/code_probes.cu", tmp_path_factory.mktemp("code")):
        kernel = re.search(r"\d([a-z_]+_kernel)I", name)
        rule, requests = (re.search(rf"{enum}E(\d)", name) for enum in ("4Rule", "8Requests"))
        assert kernel is not None, name
        assert requests is not None, name
        words = [kernel[1], *([RULES[rule[1]]] if rule else []), REQUESTS[requests[1]]]
        found[" ".join(words)] = size
    return found


@pytest.mark.parametrize("kernel", BUDGET)
def test_code_of_a_launch(kernel: str, kilobytes: dict[str, float]) -> None:
    assert kilobytes[kernel] <= BUDGET[kernel], f"{kilobytes[kernel]:.1f} KB"


@pytest.mark.parametrize("source", LAYERS)
def test_code_of_a_layer(source: str, tmp_path: Path) -> None:
    most = dict.fromkeys(LAYERS[source], 0.0)
    for name, size in sizes_of(f"src/cuda/{source}.cu", tmp_path):
        kernel = next(kernel for kernel in most if f"{len(kernel)}{kernel}" in name)
        most[kernel] = max(most[kernel], size)
    for kernel, budget in LAYERS[source].items():
        assert 0 < most[kernel] <= budget, f"{kernel}: {most[kernel]:.2f} KB"
