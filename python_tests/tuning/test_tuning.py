"""How a level runs is chosen by measured times, and the answer is kept."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import llama

import polyspec_ext as ps
from polyspec_ext import processor, tiny, tuning
from polyspec_ext.tuning import LevelConfig, level_for, pass_seconds

PLAIN, PACKED = LevelConfig(torch.float32), LevelConfig(torch.float32, pack=True)
HALF = LevelConfig(torch.bfloat16)
HALF_PACKED = LevelConfig(torch.bfloat16, pack=True)
WIDTHS = (1, 6)


class Machine:
    """A clock, and levels whose passes take what `cost` says, in seconds per token."""

    def __init__(self, cost: dict[LevelConfig, float]) -> None:
        self.cost, self.now = cost, 0.0
        self.made: list[LevelConfig] = []
        self.passes: list[tuple[LevelConfig, int]] = []
        self.measured = 0.0
        self.busy: Iterator[float] = itertools.repeat(0.0)

    def make(self, config: LevelConfig) -> Any:
        if config not in self.cost:
            raise ValueError(f"{config}: not on this machine")
        self.made.append(config)
        return SlowLevel(self, config)

    def measure(
        self, levels: Sequence[Any], widths: Sequence[int], repeats: int = 12
    ) -> list[dict[int, float]]:
        self.measured += (repeats > 1) / 2  # each choice measures twice
        return pass_seconds(levels, widths, repeats=repeats, clock=lambda: self.now)


class SlowLevel:
    vocab_size, max_length = 11, 40

    def __init__(self, machine: Machine, config: LevelConfig) -> None:
        self.machine, self.config, self.length = machine, config, 0

    def prefill(self, tokens: torch.Tensor) -> None:
        self.length = tokens.shape[1]

    def forward(self, tokens: torch.Tensor, keep: int) -> torch.Tensor:
        assert int(tokens.max()) < self.vocab_size
        self.machine.now += self.machine.cost[self.config] * tokens.shape[1]
        self.machine.now += next(self.machine.busy)
        self.machine.passes.append((self.config, tokens.shape[1]))
        self.length += tokens.shape[1]
        assert self.length <= self.max_length
        return torch.zeros(1, keep, self.vocab_size)

    def rollback(self, lengths: Sequence[int]) -> None:
        self.length = lengths[0]


def choose(
    cost: dict[LevelConfig, float],
    candidates: Sequence[LevelConfig] | None = None,
    widths: Sequence[int] = WIDTHS,
    store: tuning.Store | None = None,
    **options: Any,
) -> tuple[Machine, tuning.Choice]:
    machine = Machine(cost)
    if candidates is None:
        candidates = list(cost)
    store = store or tuning.Store(None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("polyspec_ext.tuning.pass_seconds", machine.measure)
        patch.setattr("polyspec_ext.tuning.default_store", lambda: store)
        level, choice = tuning.choose(machine.make, candidates, widths, **options)
    assert level.config == choice.config
    return machine, choice


def test_measured_times_decide() -> None:
    assert choose({PLAIN: 2.0, PACKED: 1.0})[1].config == PACKED
    assert choose({PLAIN: 1.0, PACKED: 2.0})[1].config == PLAIN
    four = {PLAIN: 4.0, PACKED: 3.0, HALF: 2.0, HALF_PACKED: 2.5}
    assert choose(four)[1].config == HALF
    assert choose(four | {HALF_PACKED: 1.5})[1].config == HALF_PACKED
    # Faster by less than can be told from noise.
    assert choose({PLAIN: 1.0, PACKED: 0.99})[1].config == PLAIN
    _, choice = choose({PLAIN: 1.0, PACKED: 0.9})
    assert choice.seconds[PLAIN] == {1: pytest.approx(1.0), 6: pytest.approx(6.0)}
    assert str(choice) == (
        "float32 packed (ms per pass of 1/6 tokens, measured now: float32 1000.00/6000.00, "
        "float32 packed 900.00/5400.00)"
    )


def test_a_busy_machine_is_told_of_before_it_is_timed(capsys, monkeypatch) -> None:
    monkeypatch.setattr("polyspec_ext.progress.on_terminal", lambda: True)
    for load, busy in ((0.0, False), (99.0, True)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, load, load))
        choose({PLAIN: 2.0, PACKED: 1.0})
        assert ("load average 99.0 beside" in capsys.readouterr().err) == busy


def test_what_fails_is_left_out() -> None:
    candidates = [PLAIN, PACKED, HALF_PACKED]
    assert choose({PLAIN: 2.0, HALF_PACKED: 1.0}, candidates)[1].config == HALF_PACKED
    assert choose({PACKED: 2.0}, candidates)[1].config == PACKED
    with pytest.raises(ValueError, match="not on this machine"):
        choose({}, candidates)


def test_one_candidate_is_not_measured() -> None:
    machine, choice = choose({PACKED: 1.0}, [PACKED])
    assert machine.passes == []
    assert str(choice) == "float32 packed (as given)"


def test_passes_are_timed_in_turns() -> None:
    machine = Machine({PLAIN: 1.0, PACKED: 2.0})
    machine.busy = itertools.cycle([7.0, 0.0, 9.0])  # with something else, now and then
    levels = [machine.make(PLAIN), machine.make(PACKED)]
    found = tuning.pass_seconds(levels, (1, 2), repeats=9, limit=1e9, clock=lambda: machine.now)
    assert found == [{1: 1.0, 2: 2.0}, {1: 2.0, 2: 4.0}]
    order = [config for config, width in machine.passes if width == 1]
    assert order == [PLAIN, PACKED, PACKED, PLAIN] * 5
    assert all(level.length == 38 for level in levels)
    with pytest.raises(ValueError, match="widths >= 1"):
        tuning.pass_seconds(levels, (0,))


def test_time_asleep_is_not_counted_with_one_thread() -> None:
    class Sleepy(SlowLevel):
        def forward(self, tokens: torch.Tensor, keep: int) -> torch.Tensor:
            time.sleep(0.01)
            return super().forward(tokens, keep)

    level: Any = Sleepy(Machine({PLAIN: 1.0}), PLAIN)
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2):
            torch.set_num_threads(count)
            found += tuning.pass_seconds([level], (1,), repeats=3)
    finally:
        torch.set_num_threads(threads)
    assert found[0][1] < 0.01 <= found[1][1]


def test_slow_levels_are_timed_twice() -> None:
    machine = Machine({PLAIN: 3.0})
    tuning.pass_seconds([machine.make(PLAIN)], (1,), clock=lambda: machine.now)
    assert len(machine.passes) == 3  # and once untimed


COST = {PLAIN: 2.0, PACKED: 1.0}
SWAPPED = {PLAIN: 1.0, PACKED: 2.0}


def test_the_answer_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "not" / "there"
    first, choice = choose(COST, store=tuning.Store(folder))
    assert first.measured == 1
    assert not choice.cached
    # Another process, on which the times would be different.
    machine, known = choose(SWAPPED, store=tuning.Store(folder))
    assert machine.measured == 0
    assert machine.made == [PACKED]
    assert known == replace(choice, cached=True)
    assert "measured earlier" in str(known)

    def measured(**changed: Any) -> bool:
        machine, _ = choose(SWAPPED, store=tuning.Store(folder), **changed)
        return machine.measured > 0

    assert measured(widths=(1, 5))
    assert measured(shape="another model")
    assert measured(candidates=[PACKED, PLAIN])
    assert not measured()
    with monkeypatch.context() as patch:
        patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
        assert measured()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "99.0")
        assert measured()
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert measured()
    finally:
        torch.set_num_threads(threads)
    assert not measured()
    tuning.Store(folder).clear()
    assert measured()
    assert choose(COST, store=tuning.Store(folder))[1].config == PLAIN


@pytest.mark.parametrize(
    ("times", "size", "kept"),
    [
        ([(2.0, 1.0), (2.1, 1.1)], 10**9, True),
        ([(2.0, 1.0), (2.0, 1.9)], 10**9, False),  # which do not repeat
        ([(2.0, 1.0), (0.9, 1.0)], 10**9, False),  # nor the answer
        ([(2.0, 1.0), (2.1, 1.1)], 10**6, False),  # which no processor takes for such a model
    ],
)
def test_times_of_a_busy_machine_are_not_kept(tmp_path, monkeypatch, times, size, kept) -> None:
    model = torch.nn.Linear(size // 4, 1, bias=False, device="meta")
    monkeypatch.setattr(SlowLevel, "model", model, raising=False)
    measured = itertools.cycle(times)

    def measure(
        self: Machine, levels: Sequence[Any], widths: Sequence[int], repeats: int = 12
    ) -> list[dict[int, float]]:
        each = next(measured) if repeats > 1 else times[0]
        return [dict.fromkeys(widths, seconds) for seconds in each[: len(levels)]]

    monkeypatch.setattr(Machine, "measure", measure)
    store = tuning.Store(tmp_path)
    _, choice = choose(COST, store=store)
    assert choice.steady == kept
    assert ("not kept: the machine is busy" in str(choice)) != kept
    assert choose(COST, store=store)[1].cached == kept


def test_what_was_kept_and_cannot_be_made_now(tmp_path: Path) -> None:
    choose(COST, store=tuning.Store(tmp_path))
    machine, choice = choose({PLAIN: 1.0}, [PLAIN, PACKED], store=tuning.Store(tmp_path))
    assert choice.config == PLAIN
    assert machine.measured == 1


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[]",
        b'{"key": 1}',
        b'{"key": KEY, "value": null}',
        b'{"key": KEY, "value": {"chosen": 7, "measured": []}}',
        b'{"key": KEY, "value": {"chosen": "float32", "measured": {"int99": {}}}}',
        b'{"key": KEY, "value": {"chosen": "nn", "measured": {"float32": {"1": 2}}}}',
        b'{"key": KEY, "value": {"chosen": "float32", "measured": {"float32": {"x": 2}}}}',
        b'{"key": KEY, "value": {"chosen": "float32", "measured": 5}}',
    ],
)
def test_a_corrupt_file_is_as_good_as_none(tmp_path: Path, text: bytes) -> None:
    choose(COST, store=tuning.Store(tmp_path))
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    key = whole[whole.index(b"{", 1) : whole.index(b'"value"')].strip().rstrip(b",")
    file.write_bytes(text.replace(b"KEY", key))
    machine, choice = choose(SWAPPED, store=tuning.Store(tmp_path))
    assert machine.measured == 1
    assert choice.config == PLAIN
    assert choose(COST, store=tuning.Store(tmp_path))[1].cached


@pytest.mark.parametrize("folder", [None, "file/folder"])
def test_without_a_folder_one_process_remembers(tmp_path: Path, folder: str | None) -> None:
    """As in a home that is missing or cannot be written to."""
    (tmp_path / "file").touch()
    store = tuning.Store(None if folder is None else tmp_path / folder)
    assert choose(COST, store=store)[0].measured == 1
    assert choose(COST, store=store)[0].measured == 0
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert tuning.default_store().folder is None


def _write(folder: Path, number: int) -> None:
    store = tuning.Store(folder)
    for turn in range(100):
        store.put({"which": turn % 2}, [number] * 2000)


def test_processes_write_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(tmp_path, n)) for n in range(3)]
    for writer in writers:
        writer.start()
    seen = 0
    while any(writer.is_alive() for writer in writers):
        value = tuning.Store(tmp_path).get({"which": 0})
        if value is not None:
            seen += 1
            assert len(set(value)) == 1
            assert len(value) == 2000
        elif seen:
            pytest.fail("a value that was there has gone")
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert tuning.Store(tmp_path).get({"which": 1}) is not None
    assert len(list(tmp_path.iterdir())) == 2


def model(seed: int = 0, dtype: torch.dtype = torch.float32, inner: int = 48) -> Any:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    sizes = {"intermediate_size": inner, "max_position_embeddings": 128}
    return llama(seed, 1, 40, **heads, **sizes).to(dtype)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed passes take half the time, on a busy machine too."""

    def seconds(levels: Sequence[Any], widths: Sequence[int], **_: Any) -> list[dict[int, float]]:
        return [dict.fromkeys(widths, 1e-4 / (1 + level.pack)) for level in levels]

    monkeypatch.setattr("polyspec_ext.tuning.pass_seconds", seconds)


@pytest.mark.usefixtures("no_clock")
def test_a_chain_chooses(home: Path) -> None:
    models = [model(0), model(1)]
    plain = ps.Chain(models, [3], check_vocabulary=False)
    chain = ps.Chain(models, [3], check_vocabulary=False, pack="auto")
    wanted = plain.generate([1, 2, 3], 30, eos_token_id=[]).sequences
    assert chain.generate([1, 2, 3], 30, eos_token_id=[]).sequences.equal(wanted)
    # A model of the user's keeps its data type, whatever would be faster.
    choice: Any = chain.levels[0].choice  # type: ignore[attr-defined]
    assert list(choice.seconds) == [PLAIN, PACKED]
    assert list(choice.seconds[PLAIN]) == [1, 4]
    drafter: Any = chain.drafter
    assert list(drafter.level.choice.seconds[PLAIN]) == [1]
    assert repr(chain).count("chosen float32") == 2
    assert "measured now" in repr(chain)
    assert "chosen" not in repr(plain)
    again = ps.Chain(models, [3], check_vocabulary=False, pack="auto")
    assert repr(again).count("measured earlier") == 2
    level = again.levels[0]
    assert level.pack == (choice.config == PACKED)  # type: ignore[attr-defined]
    assert ("packed" in repr(level).split(", chosen")[0]) == level.pack  # type: ignore[attr-defined]


def test_nothing_is_timed_where_there_is_nothing_to_pack(home: Path) -> None:
    """All layers of this copy are in 4 bits."""
    whole = ps.quantize_w4(model(inner=64), 32, head=True)
    made: Any = level_for(whole, [1, 4])
    assert made.choice.seconds == {}
    assert not made.pack
    part: Any = level_for(ps.quantize_w4(model(inner=64), 32, head=False), [1, 4])
    assert list(part.choice.seconds) == [PLAIN, PACKED]


@pytest.mark.parametrize("multiplies", [True, False])
@pytest.mark.parametrize("pack", [None, "auto"])
def test_no_clock_chooses_a_data_type(home, multiplies, pack, monkeypatch) -> None:
    """Nor how a level in another than float32 is packed: both change texts."""
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: multiplies)
    for number, name in enumerate(tiny.LEVELS):
        model(number, torch.bfloat16).save_pretrained(home / name)
    paths = [home / name for name in tiny.LEVELS]

    def choices(**options: Any) -> list[Any]:
        chain = ps.Chain(paths, check_vocabulary=False, pack=pack, **options)
        drafter: Any = chain.drafter
        levels: list[Any] = [*chain.levels, drafter.level]
        for level in levels:
            assert level.model.dtype == level.choice.config.dtype
        return [level.choice for level in levels]

    target, *drafts = choices()
    assert target.config.dtype == torch.float32  # since packed it varies with a pass's width
    for choice in drafts:
        if multiplies:
            assert (choice.config, choice.seconds) == (HALF_PACKED, {})
        else:
            assert list(choice.seconds) == [PLAIN, PACKED]
    for choice in choices(dtype=torch.float32):
        assert list(choice.seconds) == [PLAIN, PACKED]
    for choice in choices(dtype="bfloat16"):
        assert (choice.config, choice.seconds) == (HALF_PACKED, {})
    given: Any = level_for(model(0, torch.bfloat16), [1])
    assert (given.choice.config, given.choice.seconds) == (HALF_PACKED, {})


def test_levels_of_the_users_own_stay() -> None:
    level = ps.HuggingFaceLevel(model())
    draft = ps.HuggingFaceLevel(model(1), pack=True)
    chain = ps.Chain([level, draft], [2], check_vocabulary=False, pack="auto")
    assert chain.levels[0] is level
    assert level.choice is None
    copy = ps.HuggingFaceLevel(model(2), shares_cache_with=level)
    chain = ps.Chain([level.model, copy], [2], check_vocabulary=False, pack="auto")
    assert chain.levels[0] is level


@pytest.mark.usefixtures("no_clock")
def test_the_shipped_chain_chooses(home: Path) -> None:
    made = tiny.levels()
    half = torch.bfloat16 if processor.multiplies_bfloat16() else torch.float32
    assert [level.model.dtype for level in made.values()] == [torch.float32, half, half]
    assert list(made["target"].choice.seconds) == [PLAIN, PACKED]
    assert list((home / "cache" / "polyspec_ext" / "levels").iterdir())
    given = tiny.levels(dtype=torch.float32, pack=False)
    assert all("as given" in str(level.choice) or level.choice is None for level in given.values())
