"""``benchmarks model``: its arithmetic by hand, and that docs/gpu.md has what it prints. (A test of
the passes holds its counts, python_tests/levels/test_cuda_chains.py.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import model
from benchmarks.__main__ import make_parser
from benchmarks.shapes import Shape

PAGE = Path(__file__).resolve().parents[2] / "docs/gpu.md"
SHAPE = Shape("small", 10, 20, 4, 1, 1, 30)
WAY = model.Way("by hand", model.Launches(5, 4, 1, 2, 3, 7, 6), 0.5)


def test_seconds_are_launches_and_bytes() -> None:
    seconds = model.Seconds(SHAPE, WAY, 1000.0, 1.0, True)
    weights, head = 4 * (4 * 100 + 600), 10 * 30
    reads = 2 * (weights + head) / 850
    assert seconds.verify(1, 0) == pytest.approx(4 * 5 + 1 + reads)
    assert seconds.verify(1, 10) == pytest.approx(4 * 5 + 2 + 1.06 * reads)
    copy = 0.53125 * weights / 500 + 2 * head / 850
    assert seconds.verify(2, 10) == pytest.approx(4 * 4 + 3 + 1.1 * copy)
    step = 2 * (200 + 1000 + head) / 850
    assert seconds.draft(3) == pytest.approx(7 + 2 * 6 + 3 * step)


def test_the_page_has_what_it_prints() -> None:
    report = model.report_of(make_parser().parse_args(["model"]))
    first, *lines = model.markdown(report).splitlines()
    assert first.startswith("**Estimate, not measured**")
    page = PAGE.read_text(encoding="utf-8")
    for line in filter(None, [first, *lines]):
        assert line in page, line
    eager, _, last = report["rows"]
    assert eager["both"]["times"] < eager["head"]["times"]  # why the passes are fused
    assert last["both"]["times"] > last["head"]["times"]
