"""Statistics by level, request and position; as a table, as JSON and for Prometheus."""

import json
import math
import sys

import pytest
import toy

import polyspec_ext as ps
from polyspec_ext import columns, tiny
from polyspec_ext.integrations.prometheus import RequestCollector
from polyspec_ext.policies import StepReport
from polyspec_ext.policies.adaptive import RoundRecorder
from polyspec_ext.runtime.rows import Origin, origins
from polyspec_ext.stats import LevelStats, Stats, merge


def level(*blocks: tuple[int, int], name: str = "target") -> LevelStats:
    """Of blocks of (drafted, accepted) tokens."""
    made = LevelStats(name)
    for drafted, accepted in blocks:
        made.verified(drafted, accepted, accepted + 1)
    return made


def test_positions() -> None:
    made = level((3, 3), (3, 0), (1, 1), (0, 0), (5, 2))
    assert made.num_verifications == 5
    assert made.emitted_per_verification == [4, 1, 2, 1, 3]
    assert made.num_drafts == 4
    assert made.acceptance_histogram == [1, 1, 1, 1, 0, 0]
    assert made.draft_length_histogram == [0, 1, 0, 2, 0, 1]
    assert made.num_draft_tokens_per_pos == [4, 3, 3, 1, 1]
    assert made.num_accepted_tokens_per_pos == [3, 2, 1, 0, 0]
    assert made.draft_acceptance_rate_per_pos == [3 / 4, 2 / 3, 1 / 3, 0.0, 0.0]
    assert sum(made.num_draft_tokens_per_pos) == made.num_draft_tokens == 12
    assert sum(made.num_accepted_tokens_per_pos) == made.num_accepted_tokens == 6
    assert made.mean_acceptance_length == 1 + 6 / 4
    assert made.draft_acceptance_rate == 6 / 12
    assert math.isnan(LevelStats().mean_acceptance_length)


def test_origins_name_the_level_and_the_corrections() -> None:
    def entry(tokens: int, accepted: int, emitted: int, of_tail: int = 0) -> list[list[int]]:
        return [[tokens, 0, accepted, emitted, 0, 0, of_tail]]

    draft, between = entry(2, 0, 2), entry(2, 1, 2)
    by_drafter, corrected, bonus = Origin(3, False), Origin(2, True), Origin(1, False)
    steps = [draft, between, entry(2, 2, 3)]
    assert origins(3, [3, 2, 1], steps, 0) == [by_drafter, corrected, bonus]
    steps = [draft, between, entry(2, 1, 2)]
    assert origins(3, [3, 2, 1], steps, 0) == [by_drafter, Origin(1, True)]
    # A tail follows the tokens that the level between has passed up.
    steps = [draft, between, entry(1, 0, 1, 1), entry(3, 3, 4, 1)]
    assert origins(3, [3, 2, 3, 1], steps, 0) == [by_drafter, corrected, by_drafter, bonus]


def test_merge_adds_and_leaves_the_parts_alone() -> None:
    parts = [
        Stats([level((2, 1))], 3, 2, 1.0),
        Stats([level((4, 4), (1, 0))], 5, 6, 2.0, num_requests=3),
    ]
    whole = merge(parts)
    assert (whole.num_requests, whole.num_prompt_tokens, whole.num_new_tokens) == (4, 8, 8)
    assert whole.decode_seconds == 3.0
    assert whole.levels[0].acceptance_histogram == [1, 1, 0, 0, 1]
    assert whole.levels[0].draft_length_histogram == [0, 1, 1, 0, 1]
    assert parts[0].levels[0].acceptance_histogram == [0, 1, 0]
    assert whole.levels[0].emitted_per_verification == [2, 5, 1]
    assert parts[0].levels[0].emitted_per_verification == [2]
    assert merge([whole, whole]).levels[0].num_draft_tokens == 14


def test_a_policy_is_told_once_of_a_step_and_of_what_was_read() -> None:
    rows, total = ([Stats([LevelStats("a"), LevelStats("b")]) for _ in range(n)] for n in (2, 1))
    recorder = RoundRecorder(*total)
    recorder.follow(rows)
    recorder.prefilled(1, 0.5)
    recorder.spent(1, 0.25, 1)
    recorder.verified(0, [[3, 0, 1, 2, 0, 0, 1]] * 2, 0.1)
    for row, repeated in zip(rows, (False, True), strict=True):
        assert recorder.take(row) == [
            StepReport(2, 0, 0, 0, 1, 0.75, True),
            StepReport(1, 2, 1, 3, 2, 0.1, repeated),
        ]
        assert not recorder.take(row)


def test_to_dict_is_json_and_a_copy() -> None:
    out = ps.Chain(toy.make_levels(3, vocab=20), [4, 2]).generate([1], 30, temperature=1.0)
    plain = out.stats.to_dict()
    json.dumps(plain, allow_nan=False)
    for number, made in enumerate(out.stats.levels):
        told = plain["levels"][number]
        assert told["num_draft_tokens_per_pos"] == made.num_draft_tokens_per_pos
        assert told["draft_acceptance_rate_per_pos"] == made.draft_acceptance_rate_per_pos
        assert len(told["draft_acceptance_rate_per_pos"]) == len(told["acceptance_histogram"][1:])
        for name in ("acceptance_histogram", "draft_length_histogram"):
            assert told[name] == getattr(made, name)
            assert told[name] is not getattr(made, name)
    json.dumps(Stats([LevelStats()]).to_dict(), allow_nan=False)
    assert Stats([LevelStats()]).to_dict()["tokens_per_second"] is None


def test_table() -> None:
    drafter = LevelStats("drafter", num_forward_passes=7, seconds=0.1, num_proposed_tokens=7)
    target = level((4, 4), (3, 0), (3, 3))
    target.num_forward_passes, target.seconds = 3, 0.3
    stats = Stats([target, drafter], 11, 10, 0.5)
    lines = columns.of_stats(stats).splitlines()
    assert lines[0] == "11 prompt tokens, 10 new tokens, 20.0 tokens/s"
    assert "100.0 ms (20.0 %) outside the levels" in lines[1]
    rows = {line.split()[1]: line.split()[2:] for line in lines if line[:1].isdigit()}
    assert lines[4].split()[1:] == [
        "target", "3", "100.00", "60.0", "3", "10", "7", "0.70", "3.33"
    ]  # fmt: skip
    assert rows["drafter"] == ["7", "14.29", "20.0", "7"]
    assert lines[-1].split() == ["1", "target", "67", "67", "67", "100"]


def test_results_are_a_few_lines_and_a_table_in_notebooks() -> None:
    chain = tiny.chain()
    out = chain.generate(tiny.prompt_ids(list(tiny.QUESTIONS[:2])), max_new_tokens=8, seed=[3, 4])
    for thing, names in ((out, ["0", "1"]), (out.stats, chain.names), (chain, chain.names)):
        assert len(repr(thing)) < 500
        assert all(name in repr(thing) for name in names)
        html = thing._repr_html_()
        assert [f"<tr><td>{name}</td>" in html for name in names] == [True] * len(names)
        assert html.count("<tr>") == len(names) + 1
    assert "row 1: 8 tokens, length, seed" in repr(out)


def test_table_fits_a_screen() -> None:
    wide = level(*[(60, n) for n in range(61)], name="a/very-long-organisation/and-a-model-name")
    levels = [wide, *[level((9, 3), name=f"middle {i}") for i in range(5)], LevelStats("drafter")]
    lines = columns.of_stats(Stats(levels, 10**6, 10**6, 10**4)).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= columns.STATS_WIDTH
    assert "(the first 14 of 60)" in "\n".join(lines)
    empty = columns.of_stats(Stats([LevelStats("target")]))
    assert "nan" not in empty
    assert "position" not in empty


def samples(*requests: Stats) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    prometheus = pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    collector, registry = RequestCollector(), prometheus.CollectorRegistry(auto_describe=False)
    registry.register(collector)
    assert registry.get_sample_value("polyspec_num_requests_total") == 0
    for stats in requests:
        collector.add(stats)
    return {
        (one.name, tuple(sorted(one.labels.items()))): one.value
        for family in text_string_to_metric_families(prometheus.generate_latest(registry).decode())
        for one in family.samples
    }


def test_metrics_have_the_counts_of_all_requests() -> None:
    chain = ps.Chain(toy.make_levels(3, vocab=20), [4, 2])
    outs = [chain.generate([1, 2], 20, temperature=1.0, seed=i).stats for i in range(3)]
    read = samples(*outs)
    total = merge(outs)
    assert read["polyspec_num_requests_total", ()] == 3
    assert read["polyspec_num_new_tokens_total", ()] == 60
    assert read["polyspec_decode_seconds_total", ()] == pytest.approx(total.decode_seconds)
    for number, made in enumerate(total.levels, 1):
        labels = (("level", str(number)), ("model", made.name))
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            assert read[f"polyspec_spec_decode_{name}_total", labels] == getattr(made, name)
        for i, count in enumerate(made.num_accepted_tokens_per_pos):
            at = (*labels, ("position", str(i)))
            assert read["polyspec_spec_decode_num_accepted_tokens_per_pos_total", at] == count
        if made.num_drafts:
            name = "polyspec_spec_decode_accepted_tokens_per_draft"
            assert read[f"{name}_count", labels] == made.num_drafts
            assert read[f"{name}_sum", labels] == made.num_accepted_tokens
            below = (("le", "1.0"), *labels)
            assert read[f"{name}_bucket", below] == sum(made.acceptance_histogram[:2])
    assert all(math.isfinite(value) for value in read.values())


def test_a_model_at_one_place_of_two_chains_is_one_series() -> None:
    two = Stats([level((2, 1)), LevelStats("small", num_proposed_tokens=2)], num_requests=8)
    three = Stats([level((5, 5)), level((2, 2), name="middle"), LevelStats("small")])
    read = samples(two, three)
    name = "polyspec_spec_decode_num_draft_tokens_total"
    assert read[name, (("level", "1"), ("model", "target"))] == 7
    assert read[name, (("level", "2"), ("model", "middle"))] == 2
    assert read[name, (("level", "2"), ("model", "small"))] == 0
    assert read["polyspec_num_requests_total", ()] == 8 + 1


def test_without_prometheus_client_the_error_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match="pip install prometheus-client"):
        RequestCollector()
