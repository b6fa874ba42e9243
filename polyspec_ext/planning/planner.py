"""Choice of the chain that decodes the user's prompts fastest on this machine (`ps.plan`): the best
windows of each chain, its predicted speed, trials of the fastest chains, and reports."""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .. import arguments, columns, inputs, processor, progress
from ..arguments import Switch
from ..chain import Chain, Prediction
from ..drafters import elements
from ..inputs import Parameters, Prompt
from ..levels.models import is_sharded, level_line
from ..runtime.plan import default_rounds
from .measure import (
    MOST,
    MOST_ABOVE,
    Call,
    Measured,
    Part,
    Runner,
    Setting,
    Trial,
    Workload,
    considered,
    in_order,
    load,
    load_all,
    measure,
    merged,
    owners_above,
    representative,
    steps_of,
    with_considered,
)
from .store import ChainFile, Element, default_store
from .theory import Acceptance, Expectation, Proposals, expectation, starts

if TYPE_CHECKING:
    from typing_extensions import Unpack

_SHOWN = 10  # chains in a short report
RUNNERS_UP = 3  # chains run with `verify`, beside the recommendation and plain decoding
_MEASURING = 0.75  # share of the time; the rest is for trials
_TRYING = 0.25  # share of the time, in addition, for both rules
_MAKING = 0.25  # share of the time, in addition, to load the elements of `consider`
_GAIN = 1.02  # least speedup by the block rule, in both halves of the calls
LONGEST = 4  # levels of a chain: there are many longer chains, and few would be tried
TRIED = 4  # number of the fastest chains with a trial, beside plain decoding
_POSITIONS = 400  # positions of texts for the choice of windows
_SETTINGS = 200  # maximum predictions per chain
_EXTRA = (0, 1, None)  # rounds beyond the number that fills a window; None: unbounded
_REPEATS = 2  # of every call of a trial, if there is time
_TRIALS = 0.25  # least share of the time for trials
_Chain = TypeVar("_Chain", bound=Chain)


# ---- the best setting of each chain --------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A chain with its prediction and measurements.

    Attributes:
        parts, levels: indices and names of its elements, target first.
        predicted_tokens_per_second: of whole calls, prefills included.
        predicted_decode_tokens_per_second: of decoding alone, as `Stats.tokens_per_second`.
        uncertainty: relative; twice the standard error: of the chain's trial over its rounds, else
            from the spread of the texts.
        length: tokens per round of the target.
        measured_tokens_per_second, measured_decode_tokens_per_second: medians of the repeats;
            measured_length: mean. None: not run.
    """

    parts: tuple[int, ...]
    levels: tuple[str, ...]
    windows: tuple[int, ...]
    rounds: tuple[int, ...]
    predicted_tokens_per_second: float
    predicted_decode_tokens_per_second: float
    uncertainty: float
    length: float
    rule: str = "token"
    tail: int = 0
    measured_tokens_per_second: float | None = None
    measured_decode_tokens_per_second: float | None = None
    measured_length: float | None = None

    @property
    def setting(self) -> Setting:
        """The arguments of `Chain`."""
        return Setting(self.parts, self.windows, self.rounds, self.tail, self.rule)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, ready for JSON."""
        values = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}
        del values["parts"]
        return {**values, "tokens_per_round": values.pop("length")}


def chains(parts: Sequence[Part]) -> Iterator[tuple[int, ...]]:
    """Yield every chain of at most `LONGEST` elements, in order: the target, any other models, and
    at most a single drafter."""
    models = [n for n, element in enumerate(parts) if element.model and n > 0]
    drafters = [n for n, element in enumerate(parts) if not element.model and n > 0]
    for count in range(min(len(models), LONGEST - 1) + 1):
        for subset in itertools.combinations(models, count):
            chain = (0, *subset)
            if not owners_above([parts[n] for n in chain]):
                continue
            yield chain
            for last in drafters if count < LONGEST - 1 else ():
                if parts[last].drafts_below(parts[chain[-1]], parts[0]):
                    yield (*chain, last)


def candidates(measured: Measured, parts: Sequence[Part]) -> list[Candidate]:
    """Return each chain with its best windows, the fastest first."""
    settings = (
        best_setting(measured, chain, tails=not parts[chain[-1]].trees) for chain in chains(parts)
    )
    return fastest_first(candidate(measured, parts, s) for s in settings)


def fastest_first(some: Iterable[Candidate]) -> list[Candidate]:
    return sorted(some, key=lambda c: -c.predicted_tokens_per_second)


def candidate(measured: Measured, parts: Sequence[Part], setting: Setting) -> Candidate:
    """Return the prediction for a chain."""
    expected = predict(measured, setting)
    return Candidate(
        setting.parts,
        tuple(parts[n].name for n in setting.parts),
        setting.windows,
        setting.rounds,
        expected.whole_tokens_per_second,
        expected.tokens_per_second,
        _uncertainty(measured, setting.parts, expected),
        expected.length,
        tail=setting.tail,
    )


def predict(measured: Measured, setting: Setting, positions: int | None = None) -> Expectation:
    """Return the renewal model's expectation of a chain on the measured texts; if they have more
    than `positions`, on their first whole batches, with at least half of `positions`."""
    chain = setting.parts
    acceptance = measured.acceptance(chain, *setting.windows[-1:])
    if positions is not None:
        acceptance = _first(acceptance, positions, measured.batch)
    seconds, factor = partial(measured.seconds, chain), measured.factor(chain)
    expected = expectation(
        setting.windows, setting.rounds, acceptance, seconds, measured.batch, setting.tail
    )
    before = measured.before(chain)[: len(expected.tokens)]
    return replace(expected, seconds=expected.seconds * factor, before=before * factor)


def _first(acceptance: Acceptance, positions: int, batch: int) -> Acceptance:
    remaining = acceptance.remaining
    assert remaining is not None
    begins = starts(remaining)
    texts = -(-int(np.searchsorted(begins, positions // 2)) // batch) * batch
    if len(remaining) <= positions or texts >= len(begins):
        return acceptance
    cut = int(begins[texts])

    def first(values: Any) -> Any:
        if isinstance(values, Proposals):
            return Proposals(*map(first, values))
        return None if values is None else values[:cut]

    fields = (remaining, acceptance.proposals, acceptance.tail, acceptance.room)
    return Acceptance(tuple(map(first, acceptance.levels)), *map(first, fields))


def best_setting(measured: Measured, chain: tuple[int, ...], *, tails: bool = True) -> Setting:
    """Return the setting with the most tokens per second, with `tails` or without, as a drafter of
    trees needs. With two levels all windows are tried; with more, coordinate descent changes a
    number at a time until no change helps."""
    count = len(chain) - 1
    if count == 0:
        return Setting(chain)
    known: dict[Setting, float] = {}

    def rate(sizes: Sequence[int], extra: Sequence[int | None]) -> float:
        *windows, tail = sizes
        rounds = _rounds(windows, extra)
        setting = Setting(chain, tuple(windows), rounds, min(tail, windows[-1]))
        if setting not in known:
            expected = predict(measured, setting, _POSITIONS)
            known[setting] = expected.tokens_per_second
        return known[setting]

    if count == 1:
        for window in range(1, MOST + 1):
            rate((window, 0), ())
        return max(known, key=known.__getitem__)
    sizes = (*(min(3 * 2**i, MOST) for i in reversed(range(count))), 0)  # windows, and the tail
    extra: tuple[int | None, ...] = (1,) * (count - 1)
    best, moved = rate(sizes, extra), True
    while moved and len(known) < _SETTINGS:
        moved = False
        for at, step in itertools.product(range(count + tails), (1, -1, 3, -3)):
            size = sizes[at] + step
            largest = (*[MOST_ABOVE] * (count - 1), MOST, sizes[count - 1])[at]
            if not (1 if at < count else 0) <= size <= largest:
                continue
            other = (*sizes[:at], size, *sizes[at + 1 :])
            if rate(other, extra) > best:
                sizes, best, moved = other, rate(other, extra), True
        for at, surplus in itertools.product(range(count - 1), _EXTRA):
            bounds = (*extra[:at], surplus, *extra[at + 1 :])
            if rate(sizes, bounds) > best:
                extra, best, moved = bounds, rate(sizes, bounds), True
    return max(known, key=known.__getitem__)


def _rounds(windows: Sequence[int], extra: Sequence[int | None]) -> tuple[int, ...]:
    return tuple(
        0 if surplus is None else bound + surplus
        for bound, surplus in zip(default_rounds(windows), extra, strict=True)
    )


def _uncertainty(measured: Measured, chain: Sequence[int], expected: Expectation) -> float:
    trial = measured.trials.get(tuple(chain))
    if trial is not None:
        return 2 * trial.error
    spent = expected.seconds.sum(1) + expected.before
    count = len(spent)
    if count < 2:
        return 0.2
    apart = expected.tokens - expected.whole_tokens_per_second * spent
    return 2 * float((count / (count - 1) * (apart**2).sum()) ** 0.5 / expected.tokens.sum())


# ---- trials --------------------------------------------------------------------------------------


def with_rates(some: Sequence[Candidate], runner: Runner, repeats: int) -> list[Candidate]:
    """Run all calls `repeats` times with each candidate, and return candidates with the rates."""
    ran, size = [], len(runner.groups)
    for candidate, calls in zip(some, runner.run([c.setting for c in some], repeats), strict=True):
        turns = [calls[turn * size : (turn + 1) * size] for turn in range(repeats)]
        rates = [
            (
                merged(turn).num_new_tokens / sum(c.seconds for c in turn),
                merged(turn).tokens_per_second,
            )
            for turn in turns
        ]
        whole, decoding = map(statistics.median, zip(*rates, strict=True))
        stats = merged(calls)
        length = stats.num_new_tokens / stats.levels[0].num_verifications
        measured = {
            "tokens_per_second": whole,
            "decode_tokens_per_second": decoding,
            "length": length,
        }
        ran.append(replace(candidate, **{f"measured_{name}": v for name, v in measured.items()}))
    return ran


def with_trials(
    measured: Measured,
    some: Sequence[Candidate],
    runner: Runner,
    limit: float,
    most: int | None = TRIED,
) -> list[Candidate]:
    """Run the `most` fastest candidates and plain decoding for a moment, enter `Measured.trials`,
    and return all candidates with corrected predictions.

    Windows are chosen by measured times, so chains with times too short by chance are chosen more
    often than chains with times too long: without trials, predictions are biased.

    Args:
        limit: seconds for all measurements; trials have at least a quarter of them.
    """
    began = time.perf_counter()
    plain = next(c for c in some if not c.windows)
    tried = list(dict.fromkeys([*some[:most], plain]))
    untried = replace(measured, trials={})
    while tried:
        left = max(limit - measured.spent - (time.perf_counter() - began), _TRIALS * limit)
        calls = runner.run([c.setting for c in tried], _REPEATS, left)
        for contender, runs in zip(tried, calls, strict=True):
            measured.trials[contender.parts] = _trial(untried, contender.setting, runs)
        some = fastest_first(candidate(measured, runner.parts, c.setting) for c in some)
        # The recommended chain needs a trial.
        tried = [c for c in some[:1] if c.parts not in measured.trials]
    measured.spent += time.perf_counter() - began
    return list(some)


def _trial(untried: Measured, setting: Setting, calls: Sequence[Call]) -> Trial:
    """Return the measured seconds of calls over the seconds predicted for as many steps of each
    level; for as many tokens if acceptances come from rounds, which the calls measure better."""
    stats, expected = merged(calls), predict(untried, setting)
    ran = np.arange(len(calls)) % len(expected.tokens)
    done = steps_of(stats, untried.batch) / np.maximum(expected.batch_steps[ran].sum(0), 1e-9)
    if not untried.observed.keys().isdisjoint(itertools.pairwise(setting.parts)):
        done[:] = stats.num_new_tokens / expected.tokens[ran].sum()
    before = untried.before(setting.parts)[: len(expected.tokens)][ran].sum()
    predicted = float(expected.seconds[ran].sum(0) @ done + before)
    # The relative standard error of tokens per second: of a ratio of two sums, over rounds.
    rounds = np.array([sample for call in calls for sample in call.rounds])
    (tokens, seconds), rows = rounds.sum(0), len(rounds)
    apart = rounds[:, 0] - tokens / seconds * rounds[:, 1]
    error = float((rows / max(rows - 1, 1) * (apart**2).sum()) ** 0.5 / tokens)
    return Trial(sum(call.seconds for call in calls) / predicted, error, rows)


# ---- plans ---------------------------------------------------------------------------------------


@dataclass
class Plan:
    """The result of `ps.plan`.

    Attributes:
        candidates: every chain with its best windows, the fastest by prediction first.
        recommended: with `verify` the fastest chain by measurement, else the first
            candidate; the target alone if speculation does not pay.
        measured: the measurements that the predictions follow from.
    """

    candidates: list[Candidate]
    recommended: Candidate
    measured: Measured
    parts: list[Part]
    request: Workload

    @property
    def plain(self) -> Candidate:
        """The candidate of the target alone."""
        return next(c for c in self.candidates if not c.windows)

    @property
    def speculate(self) -> bool:
        """Whether any chain is expected to be faster than the target alone."""
        return len(self.recommended.parts) > 1

    def chain(self, candidate: Candidate | None = None, **options: Any) -> Chain:
        """Return the `Chain` of `candidate` (None: recommended); `options` are `Chain`'s."""
        return (candidate or self.recommended).setting.chain(self.parts, **options)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, ready for JSON."""
        return {
            "machine": processor.facts(),
            "request": {**self.request.options(), "batch": self.request.batch},
            "speculate": self.speculate,
            "recommended": self.recommended.to_dict(),
            "candidates": [c.to_dict() for c in self.candidates],
            "trials": [
                {"levels": [self.parts[n].name for n in chain], **trial._asdict()}
                for chain, trial in self.measured.trials.items()
            ],
            "texts": len(self.measured.prompts),
            "tokens": len(self.measured.remaining),
            "measuring_seconds": self.measured.spent,
        }

    def report(self, verbose: bool = False) -> str:
        """Return the recommendation and a table of the chains, in 80 columns; `verbose`: also rates
        of decoding and the measurements."""
        heads, rows = _rows(self.candidates, self.plain, verbose)
        title = "predicted for whole calls"
        if len(rows) < len(self.candidates):
            title += f": {len(rows)} of {len(self.candidates)} chains, all with --verbose"
        table = f"{title}\n{columns.table('chain', heads, rows)}"
        sections = [_verdict(self.recommended, self.plain), table]
        if verbose:
            sections.append(_measurements(self.measured, self.parts, self.request))
        return "\n\n".join(sections)

    def __str__(self) -> str:
        """Return the whole report."""
        return self.report(verbose=True)

    def __repr__(self) -> str:
        """Return the verdict and the fastest chains."""
        return self.report()

    def _repr_html_(self) -> str:
        heads, rows = _rows(self.candidates, self.plain, False)
        return columns.html("chain", heads, rows, _verdict(self.recommended, self.plain))

    def sources(self) -> list[str]:
        """Return the path, id or word of each element of the recommended chain.

        Raises:
            ValueError: an element is a Python object, without a path, id or word; names it.
        """
        sources = []
        for element in map(self.parts.__getitem__, self.recommended.parts):
            if element.word is None:
                raise ValueError(
                    f"{element.name}: expected an element by its path, id or word, given "
                    f"{type(element.thing).__name__}, which a file cannot hold"
                )
            sources.append(element.source)
        return sources

    def save(self, path: str | Path) -> None:
        """Write the recommended chain to a file for `Chain.from_plan` and ``--chain``.

        Raises:
            TypeError, ValueError: `path` is no path; as for `sources`.
            OSError: the file cannot be written.
        """
        path, best = arguments.path("path", path), self.recommended
        saved = []
        for source, n in zip(self.sources(), best.parts, strict=True):
            level = self.parts[n].thing
            dtype = getattr(getattr(level, "model", None), "dtype", None)
            packed = bool(getattr(level, "pack", False))
            dtype_name = dtype and str(dtype).removeprefix("torch.")
            device = str(getattr(level, "device", "cpu"))
            saved.append(Element(source, dtype_name, packed, None if device == "cpu" else device))
        prediction = (best.predicted_tokens_per_second, best.uncertainty, self.request.batch)
        ChainFile(
            saved, list(best.windows), list(best.rounds), best.tail, best.rule, prediction
        ).write(path)


def plan(
    levels: Sequence[Any],
    prompts: Prompt,
    max_new_tokens: int = 128,
    *,
    batch: int = 1,
    pack: Switch = "auto",
    seconds: float = 40.0,
    verify: bool = False,
    repeats: int = 3,
    trials: int | None = TRIED,
    consider: bool = False,
    **options: Unpack[Parameters],
) -> Plan:
    """Predict the speed of every chain of `levels` on the user's prompts and this machine, and
    recommend the fastest, or the target alone.

    Measured are seconds of prefills and steps in running chains, and the acceptance between every
    two levels along the target's texts. The renewal model (`planning.theory`) predicts every chain
    with its best windows, rounds and tail. The fastest chains are then run for a moment in turns
    with the target alone, and the predictions corrected. Rates are for whole calls, so a level is
    left out if its prefill costs more than it gains. If the request samples, the rule is chosen by
    running both.

    Args:
        levels: as for `Chain`, with any number of candidates between target and drafter, and
            several drafters without a model. The target is first; the others are sorted by time.
        prompts: token ids, typical of later requests; measurements are averages over them.
        max_new_tokens, options: of the requests to come, as for `Chain.generate`, without rules.
            Measured calls have different seeds, from `seed` (default: 0) on; None: from a seed of
            torch's generator.
        batch: prompts per call. The rows of a call share every step and wait for each other.
        pack: as for `Chain`.
        seconds: time for measurements; slow chains and the search take more.
        verify: also run the recommendation, the runners-up and the target alone, and recommend
            the fastest.
        repeats: repetitions of the runs of `verify`.
        trials: number of the fastest chains that are run for a moment; None: all.
        consider: add elements: prompt lookup and suffixes, the multi-token head in the target's
            directory, the target's 4-bit copy in its cache, and, of drafts named by directory,
            4-bit copies and copies with a quarter of the ids of a large vocabulary. Elements that
            cannot be loaded are left out. Loading may take a quarter of `seconds` in addition.

    Raises:
        TypeError, ValueError: as for `Chain` and `Chain.generate`.
    """
    for name, value in (("verify", verify), ("consider", consider)):
        arguments.flag(name, value)
    arguments.switch("pack", pack)
    seconds = arguments.real("seconds", seconds, sys.float_info.max)
    repeats = arguments.integer("repeats", repeats, low=1)
    if trials is not None:
        trials = arguments.integer("trials", trials)
    inputs.refuse(plan, options, lacks=["rules"])
    request = Workload.of(max_new_tokens, batch, options)
    parts = load_all(levels, pack)
    if consider:
        parts = with_considered(elements(levels), parts, pack, _MAKING * seconds)
    rows = representative(_checked(prompts, request, parts[0]), request.batch)
    parts = in_order(parts)
    processor.note_load()
    names = ", ".join(element.name for element in parts)
    progress.note(f"plan: measuring {names}")
    measured = measure(parts, rows, request, limit=_MEASURING * seconds)
    ranked = candidates(measured, parts)
    progress.note(f"plan: trying the fastest of {len(ranked)} chains")
    runner = Runner(parts, rows[: len(measured.prompts)], request)
    ranked = with_trials(measured, ranked, runner, seconds, trials)
    if not request.sampling.greedy and ranked[0].windows:
        ranked[0] = _with_rule(ranked[0], runner, _TRYING * seconds)
    best = ranked[0]
    # Plain decoding runs too: it shows a change in the machine's load.
    plain = next(c for c in ranked if not c.windows)
    if verify:
        ran = list(dict.fromkeys([*ranked[: 1 + RUNNERS_UP], plain]))
        for before, after in zip(ran, with_rates(ran, runner, repeats), strict=True):
            ranked[ranked.index(before)] = after
        best = max(ranked, key=lambda c: c.measured_tokens_per_second or 0.0)
    return Plan(ranked, best, measured, parts, request)


def _with_rule(candidate: Candidate, runner: Runner, limit: float) -> Candidate:
    """Return the candidate with the faster rule; run both. The block rule never accepts less and
    costs a little more; its gain depends on whole blocks, which the replay of a text lacks."""
    rules = [replace(candidate, rule=rule) for rule in ("token", "block")]
    settings = [c.setting for c in rules]
    calls = runner.run(settings, 1 if len(runner.groups) > 3 else 2, limit)
    if min(map(len, calls)) < 2:
        return candidate
    # The block rule must be faster in both halves of the calls: a single win may be luck.
    token, block = ([merged(runs[half::2]) for half in (0, 1)] for runs in calls)
    gains = [b.tokens_per_second / t.tokens_per_second for t, b in zip(token, block, strict=True)]
    if min(gains) <= _GAIN:
        return candidate
    decode = candidate.predicted_decode_tokens_per_second
    rounds = [s[1].levels[0].num_verifications / s[1].num_new_tokens for s in (token, block)]
    saved = 1 / decode - 1 / (decode * gains[1])
    return replace(
        rules[1],
        predicted_tokens_per_second=1 / (1 / candidate.predicted_tokens_per_second - saved),
        predicted_decode_tokens_per_second=decode * gains[1],
        length=candidate.length * rounds[0] / rounds[1],
    )


def _checked(prompts: Any, request: Workload, target: Part) -> list[list[int]]:
    """Return the checked prompts; check the EOS ids of the request by the target's vocabulary."""
    if is_sharded(target.thing):
        raise ValueError(
            f"{target.name}: expected a target in one process, given one that is sharded over "
            "several: each of them would time, and choose, for itself"
        )
    vocab_size = int(target.thing.vocab_size)
    if request.eos_token_id is not None:
        inputs.eos_sets(request.eos_token_id, 1, vocab_size)
    return inputs.prompts("prompts", inputs.rows_of("prompts", prompts), vocab_size)


def load_or_plan(
    kind: type[_Chain],
    levels: Sequence[Any],
    prompts: Prompt,
    max_new_tokens: int,
    options: Parameters,
    *,
    pack: Switch,
    seconds: float,
    consider: bool,
    batch: int,
) -> _Chain:
    """Return the recommended chain, planned once per machine; see `Chain.planned`."""
    request, store = Workload.of(max_new_tokens, batch, options), default_store()
    parts = load_all(levels, pack)
    rows, known = _checked(prompts, request, parts[0]), elements(levels)
    key = {
        **processor.facts(),
        "parts": [_fingerprint(element) for element in parts],
        "prompts": rows,
        "request": {**request.options(), "batch": request.batch},
    }
    if consider:
        key["considered"] = considered(known)
    chain = _stored_chain(kind, parts, store.get(key), pack, request.batch)
    if chain is None:
        if consider:
            parts = with_considered(known, parts, pack, _MAKING * seconds)
        things = [element.thing for element in parts]
        planned = plan(
            things, rows, max_new_tokens, batch=batch, pack=pack, seconds=seconds, **options
        )
        best = planned.recommended
        chosen = [things.index(planned.parts[n].thing) for n in best.parts]
        value = {
            # Elements of `consider` by their words, since the next call may not have loaded them.
            "parts": [n if n < len(known) else parts[n].word for n in chosen],
            "windows": list(best.windows),
            "rounds": list(best.rounds),
            "prediction": [best.predicted_tokens_per_second, best.uncertainty],
            "rule": best.rule,
            "tail": best.tail,
        }
        store.put(key, value)
        chain = _stored_chain(kind, parts, value, pack, request.batch)
        assert chain is not None
    return chain


def _stored_chain(
    kind: type[_Chain], parts: Sequence[Part], value: Any, pack: Switch, batch: int
) -> _Chain | None:
    """Return the chain stored as `value`; None if it has other elements."""
    known = {element.word: element.thing for element in parts if element.word is not None}
    try:
        things: list[Any] = []
        for entry in value["parts"]:
            if not isinstance(entry, str):
                things.append(parts[int(entry)].thing)
            else:
                things.append(known.get(entry) or load(entry, entry, things, pack).thing)
        options = {name: value[name] for name in ("rounds", "rule", "tail")}
        chain = kind(things, value["windows"], **options)
        rate, uncertainty = map(float, value["prediction"])
        chain.prediction = Prediction(rate, uncertainty, batch)
    except (TypeError, ValueError, KeyError, IndexError):
        return None
    return chain


def _fingerprint(element: Part) -> list[Any]:
    config = getattr(getattr(element.thing, "model", None), "config", None)
    described = repr(config.to_dict()) if config is not None else type(element.thing).__name__
    return [element.name, described, level_line(element.thing) if element.model else ""]


# ---- reports in 80 columns -----------------------------------------------------------------------


def _verdict(best: Candidate, plain: Candidate) -> str:
    """Return the recommendation and its rate."""
    rate = f"{best.predicted_tokens_per_second:.1f} tokens/s predicted"
    if best.measured_tokens_per_second is not None:
        rate += f", {best.measured_tokens_per_second:.1f} measured"
    if not best.windows:
        return f"do not speculate: {best.levels[0]} alone, {rate}"
    over = best.predicted_tokens_per_second / plain.predicted_tokens_per_second
    text = f"recommended: {_described(best)}, rule {best.rule}; {rate}; {over:.2f}x plain"
    return columns.wrapped(text)


def _rows(
    ranked: Sequence[Candidate], plain: Candidate, verbose: bool
) -> tuple[list[str], list[columns.Row]]:
    """Return heads and rows of a table of the chains' rates, predicted and, if any chain was run,
    measured: of the fastest and the fastest of each size. `verbose`: of all, with rates of
    decoding, without prefills."""
    if not verbose:
        sizes = {len(c.parts): c for c in reversed(ranked)}.values()
        ranked = [c for n, c in enumerate(ranked) if n < _SHOWN or any(c is s for s in sizes)]
    heads = ["tokens/s", "+-", "over plain"]
    heads += ["measured", "over plain"] * any(c.measured_tokens_per_second for c in ranked)
    heads += ["decoding", "tokens/round"] * verbose
    rows: list[columns.Row] = []
    for c in ranked:
        over = c.predicted_tokens_per_second / plain.predicted_tokens_per_second
        cells = [f"{c.predicted_tokens_per_second:.1f}", f"{100 * c.uncertainty:.1f} %"]
        cells.append(f"{over:.2f}")
        if "measured" in heads:
            rate, base = c.measured_tokens_per_second, plain.measured_tokens_per_second
            cells += [f"{rate:.1f}", f"{rate / base:.2f}"] if rate and base else ["-", "-"]
        if verbose:
            cells += [f"{c.predicted_decode_tokens_per_second:.1f}", f"{c.length:.2f}"]
        rows.append((_described(c), cells))
    return heads, rows


def _measurements(measured: Measured, parts: Sequence[Part], request: Workload) -> str:
    """Return times by element, acceptances, trials of chains, and packing of levels."""
    lines = [
        f"measured in {measured.spent:.0f} s on {len(measured.prompts)} texts of "
        f"{len(measured.remaining)} tokens, temperature {request.sampling.temperature:g}, batch "
        f"{measured.batch}; {measured.outside * 1e6:.0f} us per step outside the levels"
    ]
    for n, element in enumerate(parts):
        tables = {
            f"verify trees of {parts[m].name}" if m else "verify": measured.verify[above, m]
            for above, m in sorted(measured.verify)
            if above == n
        }
        if n in measured.draft:
            tables["draft"] = measured.draft[n]
        times = []
        for name, table in tables.items():
            seconds = sorted(table.seconds.items())
            times.append(name + " " + ", ".join(f"{m}: {1e3 * s:.2f}" for m, s in seconds))
        read = measured.prefill[n].seconds
        ends = sorted({min(read), max(read)})
        times.append("prefill " + ", ".join(f"{size}: {read[size] * 1e3:.1f}" for size in ends))
        lines.append(f"  {element.name}: ms by tokens: {'; '.join(times)}")
    pairs = sorted({*measured.accept, *measured.proposals})
    shares = [f"{parts[a].name} from {parts[b].name} {measured.rate(a, b):.3f}" for a, b in pairs]
    lines += [f"  accepted per token: {', '.join(shares)}"] * bool(shares)
    lines += [
        f"  {', '.join(parts[n].name for n in chain)}: x{trial.factor:.2f} of that at work"
        for chain, trial in measured.trials.items()
    ]
    lines += [f"  {level.name}: {level_line(level.thing)}" for level in parts if level.model]
    return columns.wrapped("\n".join(lines))


def _described(candidate: Candidate) -> str:
    if not candidate.windows:
        return f"{candidate.levels[0]} alone"
    text = f"{', '.join(candidate.levels)}; window {','.join(map(str, candidate.windows))}"
    text += f" tail {candidate.tail}" if candidate.tail else ""
    return text + (f" rounds {','.join(map(str, candidate.rounds))}" if candidate.rounds else "")
