"""``benchmarks kernels``: byte model, grid, inputs, statistics, targets, and a tiny run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import polyspec_ext as ps
from benchmarks import __main__ as cli
from benchmarks import (
    cost,
    grid,
    inputs,
    kernels,
    machine,
    peers,
    plot,
    targets,
    timing,
)
from benchmarks.grid import Case, Filters

TINY = Case("verify-token", 2, 3, 7, "float32", 0.7, Filters())

# --------------------------------------------------------------------------------------- byte model


def test_token_rule_bytes_by_hand() -> None:
    case = Case("verify-token", 2, 3, 100, "bfloat16", 0.7, Filters())
    out = 2 * (4 * (8 + 4 + 16) + 8 + 4)  # K+1 tokens, logprobs, distributions; count and status
    # Request 0 rejects its second token: target rows 0 and 1, draft row 1. Request 1: 4 rows.
    verified = (2 + 3) * (8 + 16 + 2)
    assert cost.token_rule_bytes(case, [1, 3]) == (2 + 4 + 1) * 200 + verified + out
    # Without distributions every verified draft row is read, and the residual's is one of them.
    assert (
        cost.token_rule_bytes(case, [1, 3], statistics=False) == (6 + 2 + 3) * 200 + verified + out
    )


def test_block_rule_bytes_by_hand() -> None:
    case = Case("verify-block", 1, 3, 100, "float32", 0.7, Filters())
    small = 3 * (8 + 16 + 4) + 4 * (8 + 4 + 16) + 8 + 4
    # S_1, S_2 need draft rows 1, 2; row 0 only where nothing stands; target row 3 is the bonus.
    assert [cost.block_rule_bytes(case, [n]) - small for n in (0, 2, 3)] == [2400, 2000, 2400]
    assert cost.block_rule_bytes(case, [2], statistics=False) - small == 2400


def test_sample_and_logsumexp_bytes() -> None:
    assert cost.sample_bytes(Case("sample", 3, 0, 50, "float16", 0, Filters())) == 3 * (100 + 32)
    assert cost.logsumexp_bytes(TINY) == 2 * 4 * (7 * 4 + 4)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_rows_that_the_model_does_not_count_do_not_matter(rule: str) -> None:
    """NaN in every row that costs nothing: the call must not notice."""
    case = Case("verify-token", 64, 4, 33, "float32", 0.7, Filters())
    feed = inputs.make(case, "cpu", 5, draws=1)
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
    bytes_of = cost.token_rule_bytes if rule == "token" else cost.block_rule_bytes
    model = bytes_of(case, good.num_accepted.tolist())
    assert counted * 33 * 4 < model < counted * 33 * 4 + 64 * (4 * 28 + 5 * 28 + 12) + 1


# --------------------------------------------------------------------------------------------- grid


def test_filters_text() -> None:
    assert Filters.parse("none") == Filters()
    cut = Filters.parse("top_k=50+top_p=.9")
    assert cut == grid.CUT
    assert str(cut) == "top_k=50+top_p=0.9"
    assert Filters.parse(str(cut)) == cut
    assert cut.given() == {"top_k": 50, "top_p": 0.9}
    for text in ("top_k=x", "topk=3", "top_p=1.5", "top_k=-1"):
        with pytest.raises(ValueError, match="--filters"):
            Filters.parse(text)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_default_grids_hold_the_cases_of_the_targets(device: str) -> None:
    for name in grid.OPERATORS:
        center = grid.base(name, device)
        cases = grid.star(center, device)
        assert len(cases) == len(set(cases))
        assert set(grid.quick(center)) <= set(cases)
        if device == "cuda":
            assert {1, 8, 64, 256} <= {c.batch for c in cases if c.filters == grid.CUT}
        axes = ("vocab", "dtype", "filters") + ("draft_len", "acceptance") * (name in grid.RULES)
        for axis in axes:
            assert len({getattr(case, axis) for case in cases}) > 1, axis


def test_product_grid() -> None:
    axes = {"batch": [1, 2], "draft_len": [3, 4], "vocab": [9], "dtype": None}
    assert len(grid.product(TINY, axes)) == 4
    sample = Case("sample", 1, 0, 7, "float32", 0, Filters())
    assert [case.batch for case in grid.product(sample, axes)] == [1, 2]
    with pytest.raises(ValueError, match="--dtype"):
        grid.product(TINY, {"dtype": ["int8"]})


# ------------------------------------------------------------------------------------------- inputs


@pytest.mark.parametrize("filters", [Filters(), Filters(top_k=50, top_p=0.9)])
@pytest.mark.parametrize("wanted", [0.3, 0.9])
def test_the_acceptance_is_the_one_asked(wanted: float, filters: Filters) -> None:
    case = Case("verify-token", 32, 5, 512, "float32", wanted, filters)
    feed = inputs.make(case, "cpu", 1, draws=32)
    assert feed.expected_acceptance == pytest.approx(wanted, abs=0.005)
    rate, blocks = inputs.measured_acceptance(feed, 1024)
    assert blocks == 1024
    trials = 1024 * (1 - wanted**5) / (1 - wanted)
    deviation = (wanted * (1 - wanted) / trials) ** 0.5
    assert abs(rate - wanted) < 5 * deviation + 0.005


def test_acceptance_rate_counts_rejections_not_windows() -> None:
    assert inputs.acceptance_rate(torch.tensor([[0, 2], [4, 4]]), 4) == pytest.approx(10 / 12)


def test_load_changes_tokens_and_seeds_in_place() -> None:
    feed = inputs.make(TINY, "cpu", 0, draws=8)
    feed.load(0)
    tokens, seeds = feed.tokens.clone(), feed.seeds.clone()
    address = feed.tokens.data_ptr()
    feed.load(1)
    assert feed.tokens.data_ptr() == address
    assert not torch.equal(tokens, feed.tokens)
    assert not set(seeds.tolist()) & set(feed.seeds.tolist())


# --------------------------------------------------------------------------------------- statistics


def test_summary_and_ratio() -> None:
    summary = timing.summary([4e-6, 1e-6, 2e-6, 3e-6, 10e-6])
    assert summary == pytest.approx({"median": 3, "q25": 2, "q75": 4, "mean": 4})
    assert list(timing.summary([2e-6]).values()) == pytest.approx([2] * 4)
    ratio = timing.ratio([2.0, 6.0, 12.0], [1.0, 2.0, 3.0])  # turn by turn: 2, 3, 4
    wanted = {"median": 3, "low": 2, "high": 4, "of_means": 20 / 6}
    assert ratio == pytest.approx(wanted)


@pytest.mark.parametrize(("count", "ranks"), [(1, (0, 0)), (6, (0, 5)), (9, (1, 7)), (30, (9, 20))])
def test_median_interval(count: int, ranks: tuple[int, int]) -> None:
    """The sign test's tables: of 30 values the 10th smallest and 10th largest."""
    assert timing.median_interval(count) == ranks


def test_turns_rotate_and_failures_are_named() -> None:
    order: list[str] = []
    loaded: list[int] = []

    def note(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    def broken() -> None:
        raise RuntimeError("not here\nmore")

    made = [timing.Contender(n, note(n)) for n in "abc"] + [timing.Contender("d", broken)]
    timed, failures = timing.measure(made, loaded.append, 3, timing.CpuClock())
    assert "".join(order[3 * timing.WARM_UP :]) == "abcbcacab"
    assert loaded[-3:] == [0, 1, 2]
    assert [len(one.seconds) for one in timed] == [3, 3, 3]
    assert failures == {"d": "RuntimeError: not here"}


# ------------------------------------------------------------------------------------------ targets


def _case(operator: str, filters: Filters, rows: dict[str, tuple[float, float]]) -> dict[str, Any]:
    verifies = operator != "sample"
    return {
        "operator": operator, "batch": 1, "draft_len": 10 * verifies, "vocab": 128256,
        "dtype": "float32", "acceptance_asked": 0.7 * verifies, "filters": str(filters),
        "rows": [
            {"name": name, "ratio": {"median": m, "low": m, "high": m, "of_means": mean}}
            for name, (m, mean) in rows.items()
        ],
    }  # fmt: skip


def test_targets_need_median_and_mean() -> None:
    rows = {
        peers.TRANSFORMERS: (9.0, 7.5), peers.LOGSUMEXP: (1.0, 1.2), peers.VLLM: (2.9, 3.1)
    }  # fmt: skip
    found = targets.check([_case("verify-token", Filters(), rows)], "cpu")
    assert [target.met for target in found] == [False, True, False, None, None]
    rows = {peers.SORT: (10.0, 10.0), peers.WARPERS: (9.9, 11.0)}
    found = targets.check([_case("sample", grid.CUT, rows)], "cpu")
    assert [target.met for target in found] == [None, None, None, True, False]
    assert targets.check([_case("sample", Filters(), rows)], "cpu")[3].met is None


def test_a_busy_machine_verifies_nothing() -> None:
    wall, processor = timing.CpuClock(), timing.CpuClock(processor_time=True)
    assert machine.is_busy(1.0, 2, 2, wall)
    assert not machine.is_busy(0.3, 2, 2, wall)
    assert not machine.is_busy(1.0, 1, 2, wall)
    assert not machine.is_busy(9.0, 2, 2, processor)
    assert not machine.is_busy(None, 2, 2, wall)
    rows = {peers.TRANSFORMERS: (9.0, 9.0), peers.LOGSUMEXP: (2.0, 2.0)}
    cases = [_case("verify-token", Filters(), rows)]
    assert [target.met for target in targets.check(cases, "cpu")][:2] == [True, True]
    found = targets.check(cases, "cpu", busy=True)
    assert all(target.met is None for target in found)
    assert found[0].measured.startswith("9.00x")


@pytest.mark.parametrize(("load", "busy"), [(0.2, False), (9.25, True)])
def test_reports_say_what_the_load_does(load: float, busy: bool) -> None:
    report: dict[str, Any] = {
        "device": "cpu", "machine": {"threads": 2, "cores": 2, "torch": "2"},
        "load": {"before": load},
    }  # fmt: skip
    text = machine.conditions(report)
    assert f"load average {load:.1f} before" in text
    assert ("times may be too long, and ratios uncertain" in text) == busy
    assert "too long" not in machine.conditions({**report, "device": "cuda"})


@pytest.mark.parametrize(
    ("shares", "said"), [((0.9, None), ""), ((1.2, 13.8), "1,380 % of the copy")]
)
def test_more_than_memory_gives_is_said(shares: tuple[float | None, ...], said: str) -> None:
    assert said in " ".join(machine.contradiction(shares))
    assert bool(machine.contradiction(shares)) == bool(said)


def test_cuda_targets_are_all_listed() -> None:
    found = targets.check([], "cuda")
    assert len(found) == 4 * 6 + 1
    assert all(target.met is None for target in found)


# ------------------------------------------------------------------------------------------ command

SMALL = (
    "kernels", "--batch", "2", "--draft-len", "3", "--vocab", "64", "--repeats", "3",
    "--filters", "none,top_k=5+top_p=.9", "--no-compile",
)  # fmt: skip


@pytest.fixture
def quiet_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy bandwidth without its large buffers."""
    monkeypatch.setattr(timing, "copy_bandwidth", lambda *_: 50.0)


def test_a_report_says_that_its_shares_of_the_copy_are_no_memorys(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "copy_bandwidth", lambda *_: 1e-6)
    assert cli.main([*SMALL]) == 0
    assert " % of the copy bandwidth is more than memory gives" in capsys.readouterr().out


@pytest.mark.usefixtures("quiet_copy")
def test_tiny_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main([*SMALL, "--json", "--output", str(tmp_path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report.keys() == {
        "schema", "command", "date", "device", "machine", "settings", "load", "copy_gbs",
        "complete", "cases", "targets",
    }  # fmt: skip
    assert report["machine"].keys() >= {
        "cpu", "cores", "threads", "torch", "transformers", "commit", "device_name",
    }  # fmt: skip
    assert report["settings"]["clock"] == "wall time"
    assert len(report["cases"]) == 2 * len(grid.OPERATORS)
    for case in report["cases"]:
        ours, *others = case["rows"]
        assert ours["name"] == "polyspec"
        assert ours["ratio"] is None
        assert others, case
        for row in case["rows"]:
            assert row["repeats"] == 3
            assert 0 < row["q25_us"] <= row["median_us"] <= row["q75_us"]
            assert row["gbs"] == pytest.approx(row["bytes"] / row["median_us"] * 1e-3)
            assert row["percent_of_copy"] == pytest.approx(2 * row["gbs"])
        assert (case["acceptance"] is None) == (case["operator"] == "sample")
    assert str(Path.cwd()) not in json.dumps(report)
    stem = f"cpu-{report['date']}"
    assert json.loads((tmp_path / f"{stem}.json").read_text()) == report
    assert "### verify-block, batch 2, K 3" in (tmp_path / f"{stem}.md").read_text()
    assert (tmp_path / f"{stem}.png").exists() == plot.available()


@pytest.mark.usefixtures("quiet_copy")
def test_markdown_and_missing_matplotlib(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plot, "available", lambda: False)
    assert cli.main([*SMALL, "--operators", "sample", "--output", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "pip install 'polyspec_ext[bench]'" in err
    assert "| polyspec |" in out
    assert "| target | measured | met |" in out
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".md"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--operators", "verfy"], "--operators: expected sample, verify-token"),
        (["--filters", "top_p=2"], "--filters: out of range"),
        (["--dtype", "int8"], "--dtype: expected one of float32"),
        (["--acceptance", "1.5"], "--acceptance: expected a number in [0, 1]"),
        (["--draft-len", "0"], "--draft-len: expected an integer >= 1"),
        (["--repeats", "-1"], "--repeats: expected an integer >= 1"),
    ],
)
def test_bad_options_are_one_line(
    capsys: pytest.CaptureFixture[str], options: list[str], text: str
) -> None:
    assert cli.main(["kernels", *options]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert text in err


@pytest.mark.usefixtures("quiet_copy")
def test_a_run_that_is_cut_short_leaves_its_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "report.json"
    words = [*SMALL, "--operators", "sample", "--no-peers", "--json-file", str(file)]
    measure, begun = kernels.measure_case, []

    def measure_once(case: Case, *args: Any, **options: Any) -> dict[str, Any]:
        begun.append(case)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return measure(case, *args, **options)

    monkeypatch.setattr(kernels, "measure_case", measure_once)
    with contextlib.suppress(KeyboardInterrupt):
        cli.main(words)
    report = json.loads(file.read_text())
    assert len(begun) == 2
    assert (len(report["cases"]), report["complete"]) == (1, False)
    begun.append(begun[0])
    assert cli.main(words) == 0
    report = json.loads(file.read_text())
    assert (len(report["cases"]), report["complete"]) == (2, True)
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("words", [["--help"], ["kernels", "--help"]])
def test_help(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    assert stopped.value.code == 0
    assert "usage: python -m benchmarks" in capsys.readouterr().out


def test_shipped_results_are_reports() -> None:
    folder = Path(__file__).parents[2] / "docs" / "results"
    assert list(folder.glob("*.json"))
    for path in folder.glob("*.json"):
        report = json.loads(path.read_text())
        assert report["schema"] >= 1, path.name
        assert report["schema"] == kernels.SCHEMA or report["command"] != "bench kernels", path.name
        assert path.name.startswith(f"{report['device']}-{report['date']}")
    for path in folder.rglob("*.json"):
        assert '"/' not in path.read_text(), f"{path.name}: a path of the machine"


@pytest.mark.gpu
@pytest.mark.usefixtures("quiet_copy")
def test_tiny_run_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SMALL, "--device", "cuda", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert all(case["rows"][0]["graph"] for case in report["cases"])
