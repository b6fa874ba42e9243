"""``benchmarks kernels``: byte model, grid, inputs, statistics of the clock, and a tiny run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import polyspec_ext as ps
from benchmarks import __main__ as cli
from benchmarks import int4, measuring, operators, output
from benchmarks.operators import Case, Filters, bytes_of

TINY = Case("verify-token", 2, 3, 7, "float32", 0.7, Filters())


def test_bytes_by_hand() -> None:
    # K+1 tokens, log-probabilities and distributions; count and status.
    out = 2 * (4 * (8 + 4 + 16) + 8 + 4)
    # Request 0 rejects its second token: target rows 0 and 1, draft row 1. Request 1: 4 rows.
    verified = (2 + 3) * (8 + 16 + 2)
    case = Case("verify-token", 2, 3, 100, "bfloat16", 0.7, Filters())
    assert bytes_of(case, [1, 3]) == (2 + 4 + 1) * 200 + verified + out
    # Without distributions every verified draft row is read, and the residual's is one of them.
    case = Case("verify-token-bare", 2, 3, 100, "bfloat16", 0.7, Filters())
    assert bytes_of(case, [1, 3]) == (6 + 2 + 3) * 200 + verified + out
    case = Case("verify-block", 1, 3, 100, "float32", 0.7, Filters())
    small = 3 * (8 + 16 + 4) + 4 * (8 + 4 + 16) + 8 + 4
    # S_1, S_2 need draft rows 1, 2; row 0 only where nothing is accepted; target row 3 for a bonus.
    assert [bytes_of(case, [n]) - small for n in (0, 2, 3)] == [2400, 2000, 2400]
    assert bytes_of(Case("sample", 3, 0, 50, "float16", 0, Filters()), []) == 3 * (100 + 32)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_rows_that_the_model_does_not_count_do_not_matter(rule: str) -> None:
    """Put NaN into every row that costs nothing: the call must not notice."""
    case = Case(f"verify-{rule}", 64, 4, 33, "float32", 0.7, Filters())
    feed = operators.make(case, "cpu", 5, draws=1)
    feed.load(0)

    def verify(target: torch.Tensor, draft: torch.Tensor) -> ps.VerifyResult:
        return ps.verify(
            target, feed.tokens, draft, draft_statistics=feed.statistics, seed=feed.seeds, rule=rule
        )

    good = verify(feed.target, feed.draft)
    assert good.num_accepted.unique().numel() > 2
    target, draft = feed.target.clone(), feed.draft.clone()
    counted = 0
    for b, n in enumerate(good.num_accepted.tolist()):
        needed = n + 1 if rule == "token" else 4 + (n == 4)
        target[b, needed:] = torch.nan
        kept = {n} if rule == "token" else {1, 2, 3} | ({0} if n == 0 else set())
        for i in set(range(4)) - kept:
            # All but the drafted token's logit, which is a gather and not a row.
            z = draft[b, i, feed.tokens[b, i]].clone()
            draft[b, i] = torch.nan
            draft[b, i, feed.tokens[b, i]] = z
        counted += needed + len(kept - {4})
    again = verify(target, draft)
    assert not again.status.any()
    assert torch.equal(good.tokens, again.tokens)
    model = bytes_of(case, good.num_accepted.tolist())
    assert counted * 33 * 4 < model < counted * 33 * 4 + 64 * (4 * 28 + 5 * 28 + 12) + 1


def test_filters_text() -> None:
    assert Filters.parse("none") == Filters()
    cut = Filters.parse("top_k=50+top_p=.9")
    assert str(cut) == "top_k=50+top_p=0.9"
    assert Filters.parse(str(cut)) == cut
    assert cut.options() == {"top_k": 50, "top_p": 0.9}
    for text in ("top_k=x", "topk=3", "top_p=1.5", "top_k=-1"):
        with pytest.raises(ValueError, match="--filters"):
            Filters.parse(text)


@pytest.mark.parametrize("filters", [Filters(), Filters(top_k=50, top_p=0.9)])
@pytest.mark.parametrize("wanted", [0.3, 0.9])
def test_the_acceptance_is_the_one_asked(wanted: float, filters: Filters) -> None:
    case = Case("verify-token", 32, 5, 512, "float32", wanted, filters)
    feed = operators.make(case, "cpu", 1, draws=32)
    assert feed.acceptance == pytest.approx(wanted, abs=0.005)
    counts = operators.accepted_counts(feed, operators.call_of(case.operator, feed), 32)
    accepted = torch.tensor(counts)
    # By token verified: every block but those accepted whole has one rejection.
    rate = float(accepted.sum() / (accepted.sum() + (accepted < 5).sum()))
    trials = 1024 * (1 - wanted**5) / (1 - wanted)
    deviation = (wanted * (1 - wanted) / trials) ** 0.5
    assert abs(rate - wanted) < 5 * deviation + 0.005


def test_load_changes_tokens_and_seeds_in_place() -> None:
    feed = operators.make(TINY, "cpu", 0, draws=8)
    feed.load(0)
    tokens, seeds = feed.tokens.clone(), feed.seeds.clone()
    address = feed.tokens.data_ptr()
    feed.load(1)
    assert feed.tokens.data_ptr() == address
    assert not torch.equal(tokens, feed.tokens)
    assert not set(seeds.tolist()) & set(feed.seeds.tolist())


def test_summary_and_ratio() -> None:
    summary = measuring.summary([4e-6, 1e-6, 2e-6, 3e-6, 10e-6])
    assert summary == pytest.approx({"median": 3, "q25": 2, "q75": 4, "mean": 4})
    ratio = measuring.ratio([2.0, 6.0, 12.0], [1.0, 2.0, 3.0])  # turn by turn: 2, 3, 4
    assert ratio == pytest.approx({"median": 3, "low": 2, "high": 4})


@pytest.mark.parametrize(("count", "ranks"), [(1, (0, 0)), (6, (0, 5)), (9, (1, 7)), (30, (9, 20))])
def test_median_interval(count: int, ranks: tuple[int, int]) -> None:
    """Compare with the sign test's tables: of 30 values the 10th smallest and 10th largest."""
    assert measuring.median_interval(count) == ranks


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
    assert loaded[-4:] == [1, 2, 2, 2]
    assert [len(one.seconds) for one in made] == [3, 3, 3, 0]
    assert made[3].error == "RuntimeError: not here"
    told = measuring.Contender("e", lambda: 7.5)
    assert [one.seconds for one in measuring.turns([told], 1, measuring.Clock(None))] == [[7.5]]


def test_a_busy_machine_is_named() -> None:
    for load, busy in ((0.2, False), (9.25, True)):
        report: dict[str, Any] = {
            "device": "cpu", "machine": {"threads": 2, "cores": 2, "torch": "2"},
            "load": {"before": load},
        }  # fmt: skip
        text = output.conditions(report)
        assert f"load average {load:.1f} before" in text
        assert ("times may be too long, and ratios uncertain" in text) == busy
        assert "too long" not in output.conditions({**report, "device": "cuda"})


@pytest.mark.parametrize(
    ("shares", "said"), [((0.9, None), ""), ((1.2, 13.8), "1,380 % of the copy")]
)
def test_more_than_memory_gives_is_said(shares: tuple[float | None, ...], said: str) -> None:
    assert said in " ".join(output.contradiction(shares))
    assert bool(output.contradiction(shares)) == bool(said)


SMALL = (
    "kernels", "--batch", "2", "--draft-len", "3", "--vocab", "64", "--repeats", "3",
    "--filters", "none,top_k=5+top_p=.9", "--no-compile",
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
    monkeypatch.setattr(measuring, "copy_bandwidth", lambda *_: 50.0)  # without its large buffers
    file = tmp_path / "report.json"
    saved = []
    save = operators.output.save
    monkeypatch.setattr(
        operators.output, "save", lambda *args: (save(*args), saved.append(file.read_text()))
    )
    assert cli.main([*SMALL, "--device", device, "--json", "--json-file", str(file)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert json.loads(file.read_text()) == report
    assert (len(report["cases"]), report["complete"]) == (2 * len(operators.OPERATORS), True)
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
            assert row["gbs"] == pytest.approx(case["bytes"] / row["median_us"] * 1e-3)
            assert row["percent_of_copy"] == pytest.approx(2 * row["gbs"])
    assert str(Path.cwd()) not in json.dumps(report)
    report["copy_gbs"] = 1e-6
    report["cases"][0]["rows"][0]["percent_of_copy"] = 1e6
    text = operators.markdown(report)
    dtype = "float32" if device == "cpu" else "bfloat16"
    assert f"### verify-block, batch 2, K 3, acceptance 0.7, V 64, {dtype}, filters none" in text
    assert " % of the copy bandwidth is more than memory gives" in text


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
