"""Which chain of the models at hand decodes the user's prompts fastest on this machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from .. import arguments, inputs, progress
from ..chain import Chain, Prediction
from ..chain_file import ChainFile, Element
from ..drafters import elements, is_drafter
from ..inputs import Prompt
from ..levels.describe import is_sharded
from ..seeds import fresh_seed
from ..stats import merge
from ..tuning import Switch, default_store, level_for, pass_seconds, processor
from . import tables
from .considered import considered
from .measure import Measured, measure
from .parts import Part, Request
from .runs import representative
from .search import (
    Candidate,
    Insertion,
    Sensitivity,
    candidates,
    insertions,
    observed_work,
    sensitivities,
)
from .trials import TRIED, Runner, chain_of, corrected

SCHEMA = 5  # of what is kept
RUNNERS_UP = 3  # beside the recommendation and plain decoding, with `verify`
_MEASURING = 0.75  # of the time; the rest is for trials
_TRYING = 0.25  # of the time, beside, for both rules
_MAKING = 0.25  # as much may be spent beside on making what is considered
_WIDTHS = (1, 4, 6)  # of a row in a pass, by which packing is chosen before windows are known
_Chain = TypeVar("_Chain", bound=Chain)


@dataclass
class Plan:
    """The answer of `ps.plan`.

    Attributes:
        candidates: every chain with its best windows, the fastest first by prediction.
        recommended: the fastest of those that were run, else the first; the target alone where
            speculation does not pay.
        insertions: Theorem 3.2 for every chain of three levels or more.
        sensitivities: what the recommendation depends on.
        measured: what all of it follows from.
        parts: the levels and drafters.
        request: what was planned for.
    """

    candidates: list[Candidate]
    recommended: Candidate
    insertions: list[Insertion]
    sensitivities: list[Sensitivity]
    measured: Measured
    parts: list[Part]
    request: Request

    @property
    def plain(self) -> Candidate:
        """The target alone."""
        return next(one for one in self.candidates if not one.windows)

    @property
    def speculate(self) -> bool:
        """Whether any chain is expected to be faster than the target alone."""
        return len(self.recommended.parts) > 1

    def chain(self, candidate: Candidate | None = None, **options: Any) -> Chain:
        """The recommended `Chain`, or that of another candidate; `options` are `Chain`'s."""
        return chain_of(self.parts, candidate or self.recommended, **options)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, ready for JSON."""
        return {
            "machine": processor.facts(),
            "request": {**self.request.options(), "batch": self.request.batch},
            "speculate": self.speculate,
            "recommended": _plain(self.recommended),
            "candidates": [_plain(one) for one in self.candidates],
            "insertions": [
                {
                    "new": one.new,
                    "above": one.above,
                    "below": one.below,
                    "lengths": dict(zip(("L_i", "L_i_new", "L_new"), one.lengths, strict=True)),
                    "seconds": dict(zip(("T_i", "T_new", "T_below"), one.seconds, strict=True)),
                    **one.test._asdict(),
                    "holds_as_printed": one.test.printed,
                    "holds_exactly": one.test.exact,
                    "faster_measured": one.faster,
                    "without": _plain(one.without),
                    "with": _plain(one.with_new),
                }
                for one in self.insertions
            ],
            "sensitivities": [dict(one.__dict__) for one in self.sensitivities],
            "trials": [
                {
                    "levels": [self.parts[n].name for n in chain],
                    "factors": [self.measured.correction(chain, n) for n in chain],
                }
                for chain in self.measured.trials
            ],
            "choices": {p.name: str(p.choice) for p in self.parts if p.choice is not None},
            "texts": self.measured.texts,
            "tokens": len(self.measured.remaining),
            "measuring_seconds": self.measured.spent,
        }

    def report(self, verbose: bool = False) -> str:
        """Return the recommendation and a table of the chains for people, in 80 columns; `verbose`:
        also the measurements, the tests of Theorem 3.2, and what the recommendation depends on."""
        head = tables.verdict(self.recommended, self.plain)
        if not verbose:
            return f"{head}\n\n{tables.short_rates(self.candidates, self.plain)}"
        ran = [one for one in self.candidates if one.measured_work]
        sections = [
            head,
            tables.rates(self.candidates, self.plain),
            tables.measurements(self.measured, self.parts, self.request),
            tables.work(ran) if ran else "",
            tables.insertions(self.insertions) if self.insertions else "",
            tables.sensitivities(self.sensitivities) if self.sensitivities else "",
        ]
        return "\n\n".join(filter(None, sections))

    def __str__(self) -> str:
        """Return the whole report."""
        return self.report(verbose=True)

    def sources(self) -> list[str]:
        """Return the path, id or word of each element of the recommended chain.

        Raises:
            ValueError: one was a Python object, which no word stands for; names it.
        """
        sources = []
        for part in map(self.parts.__getitem__, self.recommended.parts):
            if part.word is None:
                raise ValueError(
                    f"{part.name}: expected an element by its path, id or word, given "
                    f"{type(part.thing).__name__}, which a file cannot hold"
                )
            sources.append(part.source)
        return sources

    def save(self, path: str | Path) -> None:
        """Write the recommended chain, as `Chain.from_plan` and ``--chain`` read it.

        Raises:
            TypeError, ValueError: no path; as of `sources`.
            OSError: the file cannot be written.
        """
        path, best = arguments.path("path", path), self.recommended
        elements = []
        for source, n in zip(self.sources(), best.parts, strict=True):
            level = self.parts[n].thing
            dtype = getattr(getattr(level, "model", None), "dtype", None)
            packed = bool(getattr(level, "pack", False))
            elements.append(Element(source, dtype and str(dtype).removeprefix("torch."), packed))
        prediction = (best.predicted_tokens_per_second, best.uncertainty, self.request.batch)
        ChainFile(
            elements, list(best.windows), list(best.rounds), best.tail, best.rule, prediction
        ).write(path)


def plan(
    levels: Sequence[Any],
    prompts: Prompt,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | None = 0,
    eos_token_id: int | Sequence[int] | None = None,
    *,
    batch: int = 1,
    pack: Switch = "auto",
    seconds: float = 40.0,
    verify: bool = False,
    theorem: bool = False,
    repeats: int = 3,
    trials: int | None = TRIED,
    consider: bool = False,
) -> Plan:
    """Measure, on these prompts and this machine, what a chain of some of `levels` would cost and
    gain, and recommend one, or none.

    Measured are the seconds of every level's prefills and of its steps by their number of tokens,
    in chains at work, the chain's own time, and how likely each level accepts what each other
    proposes along the target's texts; the renewal model (`planning.theory`) then predicts every
    chain, with the windows, rounds and tail that suit it best. The fastest by that are then run for
    a moment, beside the target alone, and what their steps take there is what predictions go by.
    Rates are of whole calls, so that a level whose prefill costs more than it gains in
    `max_new_tokens` is left out; those of decoding alone stand beside them. Where the request
    samples, the rule is chosen by running both.

    Args:
        levels: as `Chain` takes them, but with as many candidates between target and drafter as one
            likes, and several drafters without a model behind them. The target is the first; the
            others are put in order by their times.
        prompts: token ids, such as will be asked; what is measured is an average over them.
        max_new_tokens ... eos_token_id: of the requests to come. Calls that are measured have seeds
            of their own, from `seed` on; None: from one out of torch's generator.
        batch: prompts of one call, whose rows share every step and wait for each other; `prompts`
            are taken so many at a time.
        pack: as `Chain` has it.
        seconds: that measuring may take; the search takes a few more.
        verify: also run the recommendation, the runners-up and the target alone, and recommend
            the fastest.
        theorem: also run the chains that Theorem 3.2 compares, and try all of them.
        repeats: of these runs.
        trials: how many of the fastest chains are run for a moment before anything is recommended;
            None: all, so that every prediction goes by the chain's own steps.
        consider: also what `levels` do not name: the target's 4-bit copy in its cache; of drafts
            given by their directories 4-bit copies, and drafts with a quarter of the ids where they
            have many; prompt lookup and suffixes. What cannot be made is left out. Making them may
            take a quarter of `seconds` beside; one that was begun is completed.

    Returns:
        The predictions, what they follow from, and the recommended chain.

    Raises:
        TypeError, ValueError: as `Chain` and `Chain.generate` have it.
    """
    for name, value in (("verify", verify), ("theorem", theorem), ("consider", consider)):
        arguments.flag(name, value)
    arguments.switch("pack", pack)
    seconds = arguments.real("seconds", seconds, sys.float_info.max)
    repeats = arguments.integer("repeats", repeats, low=1)
    if trials is not None:
        trials = arguments.integer("trials", trials)
    seed = fresh_seed() if seed is None else seed
    request = Request(max_new_tokens, temperature, top_k, top_p, min_p, seed, eos_token_id, batch)
    ready = _Ready(pack, request.batch)
    parts = _parts_of(levels, ready)
    if consider:
        parts = _with_considered(elements(levels), parts, ready, _MAKING * seconds)
    rows = representative(_checked(prompts, request, parts[0]), request.batch)
    parts = _in_order(parts)
    processor.note_load()
    progress.note(f"plan: measuring {', '.join(part.name for part in parts)}")
    measured = measure(parts, rows, request, limit=_MEASURING * seconds)
    found = candidates(measured, parts)
    progress.note(f"plan: trying the fastest of {len(found)} chains")
    runner = Runner(parts, rows[: measured.texts], request)
    # Chains that are compared for the theorem are compared by what they have been seen to do.
    trials = None if theorem else trials
    found = corrected(measured, found, runner, seconds, trials)
    best = found[0]
    if request.temperature > 0 and best.windows:
        best = found[0] = _with_rule(best, runner, _TRYING * seconds)
    plain = next(one for one in found if not one.windows)
    some = [*found[: 1 + RUNNERS_UP], plain] if verify else []
    if theorem:
        tests = insertions(measured, found)
        # What a machine that changes in the meantime does to all of them, plain decoding shows.
        some += [one for test in tests for one in (test.without, test.with_new)] + [plain]
    if some:
        some = list(dict.fromkeys(some))
        for one, after in zip(some, runner.rates(some, repeats), strict=True):
            found[found.index(one)] = after
        best = max(found, key=lambda one: one.measured_tokens_per_second or 0.0)
    tests, depends = insertions(measured, found), sensitivities(measured, parts, found)
    return Plan(found, best, tests, depends, measured, parts, request)


def _with_rule(one: Candidate, runner: Runner, limit: float) -> Candidate:
    """By the faster rule, both run. The block rule never accepts less, and costs a little more;
    what it gains depends on whole blocks of tokens, which the replay of a text does not have."""
    rules = [replace(one, rule=rule) for rule in ("token", "block")]
    # Chosen where it is faster in both halves of the calls, since once may be luck.
    found = runner.run(rules, 1 if len(runner.calls) > 3 else 2, limit)
    each = [[call.stats for call in calls] for calls in found]
    if min(map(len, each)) < 2:
        return one
    token, block = ([merge(own[half::2]) for half in (0, 1)] for own in each)
    gains = [b.tokens_per_second / t.tokens_per_second for t, b in zip(token, block, strict=True)]
    if min(gains) <= 1.02:
        return one
    decode = one.predicted_decode_tokens_per_second
    faster = decode * gains[1]
    lengths = [observed_work(own[1]).levels[0].steps for own in (token, block)]
    return replace(
        one,
        rule="block",
        predicted_tokens_per_second=1
        / (1 / one.predicted_tokens_per_second - 1 / decode + 1 / faster),
        predicted_decode_tokens_per_second=faster,
        length=one.length * lengths[0] / lengths[1],
    )


def _checked(prompts: Any, request: Request, target: Part) -> list[list[int]]:
    """The prompts, and what of the request only the target can tell."""
    if is_sharded(target.thing):
        raise ValueError(
            f"{target.name}: expected a target in one process, given one that is sharded over "
            "several: each of them would time, and choose, for itself"
        )
    vocab_size = int(target.thing.vocab_size)
    if request.eos_token_id is not None:
        inputs.eos_sets(request.eos_token_id, 1, vocab_size)
    return inputs.prompts("prompts", inputs.rows_of("prompts", prompts), vocab_size)


@dataclass(frozen=True)
class _Ready:
    """How what is loaded is made ready; `batch` rows have their tokens in one pass."""

    pack: Switch
    batch: int = 1

    def part(self, thing: Any, name: str, above: Sequence[Any]) -> Part:
        widths = [self.batch * width for width in _WIDTHS]
        thing = level_for(thing, widths, pack=self.pack, name=name, above=above)
        named = str(getattr(thing, "name", type(thing).__name__))
        return Part(thing, named, not is_drafter(thing))


def _parts_of(levels: Sequence[Any], ready: _Ready) -> list[Part]:
    """What `ps.plan` was given, made ready: levels of what is loaded or given as models, each
    running as is fastest for a few tokens of each row.

    Raises:
        TypeError, ValueError: as `Chain` has it.
    """
    made: list[Part] = []
    for place, thing in enumerate(elements(levels)):
        name = f"levels[{place}]"
        if isinstance(thing, str | Path):
            progress.note(f"plan: loading {thing}")
        part = ready.part(thing, name, [part.thing for part in made])
        if not part.model and place == 0:
            raise TypeError(f"{name}: expected a model, given {type(part.thing).__name__}")
        if isinstance(thing, str | Path):
            part = replace(part, word=str(thing))
        made.append(part)
    return _named(made)


def _with_considered(
    given: Sequence[Any], parts: Sequence[Part], ready: _Ready, limit: float
) -> list[Part]:
    """`parts` of what was given, and those that are considered unasked, as far as they can be made;
    none is begun after `limit` seconds."""
    made, began = list(parts), time.perf_counter()
    words = considered(given)
    for number, word in enumerate(words):
        if time.perf_counter() - began > limit:
            progress.note(
                f"plan: no time for {', '.join(words[number:])}; more seconds are more time"
            )
            break
        try:
            progress.note(f"plan: making {word}")
            part = ready.part(word, word, [parts[0].thing])
        except ValueError:  # nothing to quantise, or a target without a cache to share
            continue
        name = word if part.model else part.name
        made.append(replace(part, name=name, word=word))
    return _named(made)


def _named(parts: Sequence[Part]) -> list[Part]:
    names = [part.name for part in parts]
    return [
        part if names.count(part.name) == 1 else replace(part, name=f"{part.name} ({n})")
        for n, part in enumerate(parts)
    ]


def _in_order(parts: Sequence[Part]) -> list[Part]:
    """The target, others that verify from the slowest to the fastest, then what only drafts."""
    target, others = parts[0], [part for part in parts[1:] if part.verifies]
    apart = [part for part in others if part.reads_apart]
    cost = {}
    if len(others) > 1 and apart:
        # By the clock of all that is measured here.
        clock = time.perf_counter
        times = pass_seconds([part.thing for part in apart], (1,), repeats=6, clock=clock)
        cost = {part.name: own[1] for part, own in zip(apart, times, strict=True)}
    # What shares the target's cache is a copy of it.
    others.sort(key=lambda part: -cost.get(part.name, float("inf")))
    return [target, *others, *(part for part in parts[1:] if not part.verifies)]


def load_or_plan(
    kind: type[_Chain],
    levels: Sequence[Any],
    prompts: Prompt,
    max_new_tokens: int,
    temperature: float,
    *,
    pack: Switch,
    seconds: float,
    consider: bool,
    batch: int,
) -> _Chain:
    """See `Chain.planned`: the recommended chain, planned once per machine."""
    request, store = Request(max_new_tokens, temperature, batch=batch), default_store()
    ready = _Ready(pack, request.batch)
    parts = _parts_of(levels, ready)
    rows = _checked(prompts, request, parts[0])
    key = {
        "plan": SCHEMA,
        **processor.facts(),
        "parts": [_fingerprint(part) for part in parts],
        "prompts": rows,
        "request": {**request.options(), "batch": request.batch},
    }
    given = elements(levels)
    if consider:
        key["considered"] = considered(given)
    value = store.get(key)
    chain = None if value is None else _stored_chain(kind, parts, value, ready)
    if chain is not None:
        return chain
    if consider:
        parts = _with_considered(given, parts, ready, _MAKING * seconds)
    things = [part.thing for part in parts]
    found = plan(
        things, rows, max_new_tokens, temperature,
        batch=batch, pack=pack, seconds=seconds,
    )  # fmt: skip
    best = found.recommended
    chosen = [things.index(found.parts[n].thing) for n in best.parts]
    value = {
        # Of what was considered unasked, the word: the next call may not have made it.
        "parts": [n if n < len(given) else parts[n].word for n in chosen],
        "windows": list(best.windows),
        "rounds": list(best.rounds),
        "prediction": [best.predicted_tokens_per_second, best.uncertainty],
        "rule": best.rule,
        "tail": best.tail,
    }
    store.put(key, value)
    chain = _stored_chain(kind, parts, value, ready)
    assert chain is not None
    return chain


def _stored_chain(
    kind: type[_Chain], parts: Sequence[Part], value: Any, ready: _Ready
) -> _Chain | None:
    """The chain that is stored as `value`; None where it stands for none of these parts. What was
    considered unasked is stored by its word, and made where it is not among them."""
    known = {part.word: part.thing for part in parts if part.word is not None}
    try:
        things: list[Any] = []
        for one in value["parts"]:
            if not isinstance(one, str):
                things.append(parts[int(one)].thing)
            elif one in known:
                things.append(known[one])
            else:
                things.append(ready.part(one, one, things).thing)
        options = {name: value[name] for name in ("rounds", "rule", "tail")}
        chain = kind(things, value["windows"], **options)
        rate, uncertainty = map(float, value["prediction"])
        chain.prediction = Prediction(rate, uncertainty, ready.batch)
    except (TypeError, ValueError, KeyError, IndexError):
        return None
    return chain


def _fingerprint(part: Part) -> list[Any]:
    model = getattr(part.thing, "model", None)
    config = getattr(model, "config", None)
    told = repr(config.to_dict()) if config is not None else type(part.thing).__name__
    return [part.name, told, str(part.choice and part.choice.config)]


def _plain(one: Candidate) -> dict[str, Any]:
    def lists(values: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values}

    found = asdict(one, dict_factory=lists)
    del found["parts"]
    return {**found, "tokens_per_round": found.pop("length")}
