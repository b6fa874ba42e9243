"""``benchmarks kernels``: grid, inputs, statistics of the clock, and a tiny run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as cli
from benchmarks import int4, measuring, operators
from benchmarks.operators import Case, Filters


@pytest.mark.parametrize("filters", [Filters(), Filters(top_k=50, top_p=0.9)])
@pytest.mark.parametrize("wanted", [0.3, 0.9])
def test_the_acceptance_is_the_one_asked(wanted: float, filters: Filters) -> None:
    case = Case("verify-token", 32, 5, 512, "float32", wanted, filters)
    feed = operators.make(case, "cpu", 1, draws=32)
    assert feed.acceptance == pytest.approx(wanted, abs=0.005)
    verify, counts = operators.call_of(case.operator, feed), []
    for turn in range(32):
        feed.load(turn)
        counts.append(verify().num_accepted)
    accepted = torch.stack(counts)
    # By token verified: a block has one rejection, or none if fully accepted.
    rate = float(accepted.sum() / (accepted.sum() + (accepted < 5).sum()))
    trials = 1024 * (1 - wanted**5) / (1 - wanted)
    deviation = (wanted * (1 - wanted) / trials) ** 0.5
    assert abs(rate - wanted) < 5 * deviation + 0.005


def test_quartiles_and_ratio() -> None:
    assert measuring.quartiles([4, 1, 2, 3, 10]) == {"q25": 2, "median": 3, "q75": 4}
    ratio = measuring.ratio([2.0, 6.0, 12.0], [1.0, 2.0, 3.0])  # turn by turn: 2, 3, 4
    assert ratio == pytest.approx({"q25": 2.5, "median": 3, "q75": 3.5})


def test_turns_rotate_and_failures_are_named() -> None:
    order: list[str] = []
    loaded: list[int] = []

    def note(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    def broken() -> None:
        raise RuntimeError("not here\nmore")

    made = [measuring.Contender(n, note(n)) for n in "abc"] + [measuring.Contender("d", broken)]
    called = [
        one.name for one in measuring.turns(made, 3, measuring.Clock("cpu"), loaded.append, 1)
    ]
    assert "".join(called) == "abcdbcacab"
    assert "".join(order) == "aabbccbcacab"  # the first calls are not counted
    assert [*loaded[:3], *loaded[-4:]] == [-1, -1, 0, 1, 2, 2, 2]
    assert [len(one.seconds) for one in made] == [3, 3, 3, 0]
    assert made[3].error == "RuntimeError: not here"
    told = measuring.Contender("e", lambda: 7.5)
    assert [one.seconds for one in measuring.turns([told], 1, measuring.Clock(None))] == [[7.5]]


SMALL = (
    "kernels", "--batch", "2", "--draft-len", "3", "--vocab", "64", "--repeats", "3",
    "--filters", "none,top_k=5+top_p=.9",
)  # fmt: skip


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], ids=["cpu", "cuda"]
)
def test_tiny_run(
    device: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "report.json"
    saved = []
    save = operators.output.save
    monkeypatch.setattr(
        operators.output, "save", lambda *args: (save(*args), saved.append(file.read_text()))
    )
    assert cli.main([*SMALL, "--device", device, "--json", "--json-file", str(file)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert json.loads(file.read_text()) == report
    assert (len(report["cases"]), report["complete"]) == (2 * (1 + len(operators.RULES)), True)
    first = json.loads(saved[0])  # a run that is cut short leaves its cases
    assert (len(first["cases"]), first["complete"]) == (1, False)
    for case in report["cases"]:
        ours, *others = case["rows"]
        assert ours["name"] == "polyspec"
        assert ours["ratio"] is None
        assert ours["graph"] == (device == "cuda")
        assert others[0]["name"] == "polyspec, allowed="
        for row in case["rows"]:
            assert 0 < row["q25_us"] <= row["median_us"] <= row["q75_us"]
    assert str(Path.cwd()) not in json.dumps(report)
    text = operators.markdown(report)
    dtype = "float32" if device == "cpu" else "bfloat16"
    assert f"### verify-block, batch 2, K 3, acceptance 0.7, V 64, {dtype}, filters none" in text


def test_shipped_results_are_reports() -> None:
    folder = Path(__file__).parents[2] / "docs" / "results"
    assert list(folder.glob("*.json"))
    for path in folder.glob("*.json"):
        report = json.loads(path.read_text())
        assert report["schema"] >= 1, path.name
        assert path.name.startswith(f"{report['device']}-{report['date']}")
    for path in folder.rglob("*.json"):
        assert '"/' not in path.read_text(), f"{path.name}: a path of the machine"


def test_a_run_of_products(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["int4", "--shapes", "32x128", "--tokens", "1,3", "--repeats", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(int4, "COLD", 1 << 14)
        patch.setattr(int4.measuring, "copy_bandwidth", lambda *_: 1.0)
        assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert "## 32 outputs, 128 inputs" in out
    assert "| polyspec | " in out
