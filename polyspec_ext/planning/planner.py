"""Which chain of the models at hand decodes the user's prompts fastest on this machine."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .. import arguments, inputs
from ..drafters import BatchedDrafter, Drafter, DraftModel, drafter_named
from ..levels import Level
from ..stats import Stats, merge
from . import processor
from .choice import Switch
from .level import level_for
from .measure import Measured, measure
from .parts import Part, Request
from .profile import pass_seconds
from .runs import Clock
from .search import (
    Candidate,
    Insertion,
    LevelWork,
    Sensitivity,
    Work,
    candidates,
    insertions,
    observed_work,
    sensitivities,
)
from .store import Store, default_store
from .theory import batches

SCHEMA = 3  # of what is kept
RUNNERS_UP = 3  # beside the recommendation and plain decoding, with `verify`
_WIDTHS = (1, 4, 6)  # of a pass, by which packing is chosen before windows are known
Make = Callable[..., Any]


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
    make: Make = field(repr=False)

    @property
    def plain(self) -> Candidate:
        """The target alone."""
        return next(one for one in self.candidates if not one.windows)

    @property
    def speculate(self) -> bool:
        """Whether any chain is expected to be faster than the target alone."""
        return len(self.recommended.parts) > 1

    def chain(self, candidate: Candidate | None = None, **options: Any) -> Any:
        """The recommended `Chain`, or that of another candidate; `options` are `Chain`'s."""
        one = candidate or self.recommended
        return self.make(
            [self.parts[n].thing for n in one.parts],
            list(one.windows),
            **{"rounds": list(one.rounds), "rule": one.rule, "tail": one.tail, **options},
        )

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
                    "without": _plain(one.without),
                    "with": _plain(one.with_new),
                }
                for one in self.insertions
            ],
            "sensitivities": [dict(one.__dict__) for one in self.sensitivities],
            "choices": {part.name: str(how) for part, how in self._choices()},
            "texts": self.measured.texts,
            "tokens": len(self.measured.remaining),
            "measuring_seconds": self.measured.spent,
        }

    def _choices(self) -> list[tuple[Part, Any]]:
        each = [(part, getattr(part.thing, "choice", None)) for part in self.parts]
        return [(part, choice) for part, choice in each if choice is not None]

    def __str__(self) -> str:
        """For people: the chains, the measurements, the tests, and what they depend on."""
        sections = [self._verdict(), self._table(), self._measurements()]
        ran = [one for one in self.candidates if one.work and one.measured_work]
        if ran:
            sections.append(work_table(ran))
        if self.insertions:
            sections.append(insertion_table(self.insertions))
        if self.sensitivities:
            sections.append(self._sensitivity())
        return "\n\n".join(sections)

    def _verdict(self) -> str:
        one = self.recommended
        rate = f"{one.predicted_tokens_per_second:.1f} tokens/s predicted"
        if one.measured_tokens_per_second is not None:
            rate += f", {one.measured_tokens_per_second:.1f} measured"
        if not self.speculate:
            return f"do not speculate: {one.levels[0]} alone, {rate}"
        over = one.predicted_tokens_per_second / self.plain.predicted_tokens_per_second
        return f"recommended: {_described(one)}, rule {one.rule}; {rate}; {over:.2f}x plain"

    def _table(self) -> str:
        heads = ("predicted", "+-", "measured", "pred./meas.", "over plain", "measured",
                 "decoding", "measured", "tokens/round", "measured")  # fmt: skip
        rows = [self._cells(one) for one in self.candidates]
        widths = [max(map(len, own)) for own in zip(heads, *rows, strict=True)]
        first = max(len(_described(one)) for one in self.candidates)
        lines = ["tokens per second of whole calls, and of decoding without prefills"]
        names = ["chain", *map(_described, self.candidates)]
        for name, cells in zip(names, [heads, *rows], strict=True):
            each = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
            lines.append(f"{name:{first}}  {'  '.join(each)}")
        return "\n".join(lines)

    def _cells(self, one: Candidate) -> tuple[str, ...]:
        plain = self.plain
        over = one.predicted_tokens_per_second / plain.predicted_tokens_per_second
        measured, base = one.measured_tokens_per_second, plain.measured_tokens_per_second
        return (
            f"{one.predicted_tokens_per_second:.1f}",
            f"{100 * one.uncertainty:.1f} %",
            _shown(measured, ".1f"),
            _shown(one.error if one.error is None else 1 + one.error, ".2f"),
            f"{over:.2f}",
            _shown(None if measured is None or not base else measured / base, ".2f"),
            f"{one.predicted_decode_tokens_per_second:.1f}",
            _shown(one.measured_decode_tokens_per_second, ".1f"),
            f"{one.length:.2f}",
            _shown(one.measured_length, ".2f"),
        )

    def _measurements(self) -> str:
        found = self.measured
        lines = [
            f"measured in {found.spent:.0f} s on {found.texts} texts of {len(found.remaining)} "
            f"tokens, temperature {self.request.temperature:g}, batch {found.batch}; the chain's "
            f"own time {found.own * 1e6:.0f} us per step, {found.own_round * 1e6:.0f} us per round"
        ]
        for n, part in enumerate(self.parts):
            times = []
            for what, tables in (("verify", found.verify), ("draft", found.draft)):
                for again in (False, True):
                    table = tables.get((n, again))
                    if table is not None:
                        shown = [m for m in (0, 1, 2, 4, 8, 16) if m in table.seconds]
                        each = ", ".join(f"{m}: {table.seconds[m] * 1e3:.2f}" for m in shown)
                        times.append(f"{what}{' again' if again else ''} {each}")
            read = found.prefill[n].seconds
            some = sorted({min(read), max(read)})
            times.append("prefill " + ", ".join(f"{m}: {read[m] * 1e3:.1f}" for m in some))
            lines.append(f"  {part.name}: ms by tokens: {'; '.join(times)}")
        pairs = sorted({*found.accept, *found.proposals})
        shares = [
            f"{self.parts[a].name} from {self.parts[b].name} {found.rate(a, b):.3f}"
            for a, b in pairs
        ]
        if shares:
            lines.append(f"  accepted per token: {', '.join(shares)}")
        lines += [f"  {part.name}: {choice}" for part, choice in self._choices()]
        return "\n".join(lines)

    def _sensitivity(self) -> str:
        lines = ["the recommendation stands while each of these, alone, is off by no more than"]
        for one in self.sensitivities:
            ends = []
            for factor, rival in zip((one.lower, one.upper), one.rivals, strict=True):
                if factor is not None:
                    ends.append(f"x{factor:.2f} (then {rival})")
            lines.append(f"  {one.quantity}: {'; '.join(ends) or 'nothing within x0.2 ... x5'}")
        return "\n".join(lines)


def plan(
    make: Make,
    levels: Sequence[Any],
    prompts: inputs.Prompt,
    request: Request,
    *,
    pack: Switch = "auto",
    compile: Switch = False,
    limit: float = 40.0,
    verify: bool = False,
    theorem: bool = False,
    runners_up: int = RUNNERS_UP,
    repeats: int = 3,
    clock: Clock | None = None,
) -> Plan:
    """See `ps.plan`; `make` is `Chain`."""
    clock = clock or time.perf_counter
    parts = _in_order(parts_of(levels, pack=pack, compile=compile), clock)
    rows = _checked(prompts, parts[0])
    measured = measure(make, parts, rows, request, limit=limit, clock=clock)
    found = candidates(measured, parts)
    best = found[0]
    made = Plan(found, best, [], [], measured, parts, request, make)
    if request.temperature > 0 and best.windows:
        best = found[0] = _with_rule(made, best, rows)
    some = list(dict.fromkeys([*found[: 1 + runners_up], made.plain])) if verify else []
    if theorem:
        tests = insertions(measured, found)
        both = [one for test in tests for one in (test.without, test.with_new)]
        some = list(dict.fromkeys([*some, *both]))
    if some:
        for one, after in zip(some, run(made, some, rows, repeats), strict=True):
            found[found.index(one)] = after
        best = max(found, key=lambda one: one.measured_tokens_per_second or 0.0)
    made.candidates, made.recommended = found, best
    made.insertions = insertions(measured, found)
    made.sensitivities = sensitivities(measured, parts, found)
    return made


def _with_rule(made: Plan, one: Candidate, prompts: Sequence[Sequence[int]]) -> Candidate:
    """By the faster rule, both run. The block rule never accepts less, and costs a little more;
    what it gains depends on whole blocks of tokens, which the replay of a text does not have."""
    rules = [replace(one, rule=rule) for rule in ("token", "block")]
    token, block = run(made, rules, prompts, 1)
    rates = [one.measured_decode_tokens_per_second or 1.0 for one in (token, block)]
    if rates[1] <= rates[0] * 1.02:
        return one
    decode = one.predicted_decode_tokens_per_second
    faster = decode * rates[1] / rates[0]
    return replace(
        one,
        rule="block",
        predicted_tokens_per_second=1
        / (1 / one.predicted_tokens_per_second - 1 / decode + 1 / faster),
        predicted_decode_tokens_per_second=faster,
        length=one.length * (block.measured_length or 1.0) / (token.measured_length or 1.0),
    )


def _checked(prompts: Any, target: Part) -> list[list[int]]:
    rows = inputs.rows_of("prompts", prompts)
    return inputs.prompts("prompts", rows, int(target.thing.vocab_size))


def run(
    made: Plan, some: Sequence[Candidate], prompts: Sequence[Sequence[int]], repeats: int
) -> list[Candidate]:
    """Each with its tokens per second of whole calls and of decoding, in turns; medians of
    `repeats`."""
    built = [made.chain(one) for one in some]
    used, batch = prompts[: made.measured.texts], made.request.batch
    calls = [[list(used[n]) for n in own] for own in batches(len(used), batch).tolist()]
    for one in built:
        one.generate(calls[0], **{**made.request.options(), "max_new_tokens": 16})
    totals: list[list[tuple[float, Stats]]] = [[] for _ in built]
    for repeat in range(repeats):
        kept: list[list[tuple[float, Stats]]] = [[] for _ in built]
        for turn, call in enumerate(calls):
            options = made.request.options(turn + repeat * len(calls))
            for place in range(len(built)):
                number = (place + turn + repeat) % len(built)
                began = time.perf_counter()
                stats = built[number].generate(call, **options).stats
                kept[number].append((time.perf_counter() - began, stats))
        for total, own in zip(totals, kept, strict=True):
            total.append((sum(spent for spent, _ in own), merge([stats for _, stats in own])))
    return [_ran(one, own) for one, own in zip(some, totals, strict=True)]


def _ran(one: Candidate, repeats: Sequence[tuple[float, Stats]]) -> Candidate:
    work = observed_work(merge([stats for _, stats in repeats]))
    return replace(
        one,
        measured_tokens_per_second=statistics.median(
            stats.num_new_tokens / spent for spent, stats in repeats
        ),
        measured_decode_tokens_per_second=statistics.median(
            stats.tokens_per_second for _, stats in repeats
        ),
        measured_length=1 / work.levels[0].steps,
        measured_work=work,
    )


def parts_of(levels: Sequence[Any], *, pack: Switch, compile: Switch) -> list[Part]:
    """What `ps.plan` was given, made ready: levels of what is loaded or given as models, each
    running as is fastest for a few tokens.

    Raises:
        TypeError, ValueError: as `Chain` has it.
    """
    things = arguments.entries("levels", levels)
    if things is None or not things:
        raise TypeError(
            f"levels: expected a list of models, the target first, given {arguments.shown(levels)}"
        )
    made: list[Part] = []
    for place, thing in enumerate(things):
        if isinstance(thing, DraftModel):
            thing = thing.level
        thing = drafter_named(thing, [part.thing for part in made], f"levels[{place}]")
        drafts = isinstance(thing, Drafter | BatchedDrafter)
        drafts = drafts and not isinstance(thing, Level | type)
        if drafts and place == 0:
            raise TypeError(f"levels[0]: expected a model, given {type(thing).__name__}")
        if not drafts:
            thing = level_for(thing, _WIDTHS, pack=pack, compile=compile, name=f"levels[{place}]")
        made.append(Part(thing, str(getattr(thing, "name", type(thing).__name__)), not drafts))
    return _named(made)


def _named(parts: Sequence[Part]) -> list[Part]:
    names = [part.name for part in parts]
    return [
        part if names.count(part.name) == 1 else replace(part, name=f"{part.name} ({n})")
        for n, part in enumerate(parts)
    ]


def _in_order(parts: Sequence[Part], clock: Clock) -> list[Part]:
    """The target, the other models from the slowest to the fastest, then drafters."""
    target, others = parts[0], [part for part in parts[1:] if part.model]
    apart = [part for part in others if getattr(part.thing, "reads_apart", True)]
    cost = {}
    if len(others) > 1 and apart:
        times = pass_seconds([part.thing for part in apart], (1,), repeats=6, clock=clock)
        cost = {part.name: own[1] for part, own in zip(apart, times, strict=True)}
    # What shares the target's cache is a copy of it.
    others.sort(key=lambda part: -cost.get(part.name, float("inf")))
    return [target, *others, *(part for part in parts[1:] if not part.model)]


def kept(
    make: Make,
    levels: Sequence[Any],
    prompts: inputs.Prompt,
    request: Request,
    *,
    pack: Switch = "auto",
    compile: Switch = False,
    limit: float = 40.0,
    store: Store | None = None,
) -> Any:
    """See `Chain.planned`: the recommended chain, planned once per machine."""
    store = default_store() if store is None else store
    parts = parts_of(levels, pack=pack, compile=compile)
    rows = _checked(prompts, parts[0])
    key = {
        "plan": SCHEMA,
        **processor.facts(),
        "parts": [_fingerprint(part) for part in parts],
        "prompts": rows,
        "request": {**request.options(), "batch": request.batch},
    }
    value = store.get(key)
    try:
        assert value is not None
        things = [parts[int(n)].thing for n in value["parts"]]
        options = {name: value[name] for name in ("rounds", "rule", "tail")}
        return make(things, value["windows"], **options)
    except (AssertionError, TypeError, ValueError, KeyError, IndexError):
        pass
    things = [part.thing for part in parts]
    found = plan(make, things, rows, request, pack=pack, compile=compile, limit=limit)
    best = found.recommended
    numbers = [things.index(found.parts[n].thing) for n in best.parts]
    fields = {"windows": list(best.windows), "rounds": list(best.rounds)}
    store.put(key, {"parts": numbers, **fields, "rule": best.rule, "tail": best.tail})
    return found.chain()


def _fingerprint(part: Part) -> list[Any]:
    model = getattr(part.thing, "model", None)
    config = getattr(model, "config", None)
    told = repr(config.to_dict()) if config is not None else type(part.thing).__name__
    return [part.name, told, str(getattr(part.thing, "choice", None) and part.thing.choice.config)]


# ---- for people ----------------------------------------------------------------------------------


def _described(one: Candidate) -> str:
    if not one.windows:
        return f"{one.levels[0]} alone"
    text = f"{', '.join(one.levels)}; window {','.join(map(str, one.windows))}"
    text += f" tail {one.tail}" if one.tail else ""
    return text + (f" rounds {','.join(map(str, one.rounds))}" if one.rounds else "")


def work_table(ran: Sequence[Candidate]) -> str:
    """Predicted and measured, level by level: verifications per 100 tokens of the text (of the
    lowest level drafts, and tokens drafted), tokens handed up per verification, ms per step."""
    heads = ("steps/100", "measured", "tokens/100", "measured", "L", "measured", "ms/step",
             "measured")  # fmt: skip
    names, rows = [], []
    for one in ran:
        assert one.work is not None
        assert one.measured_work is not None
        names.append(_described(one))
        rows.append(("",) * len(heads))
        pairs = zip(one.levels, one.work.levels, one.measured_work.levels, strict=True)
        for name, *both in pairs:
            names.append(f"  {name}")
            rows.append(tuple(_cells(both)))
        own = [f"{1e3 * work.own / _steps(work):.2f}" for work in (one.work, one.measured_work)]
        names.append("  outside the levels")
        rows.append((*("",) * (len(heads) - 2), *own))
    widths = [max(map(len, own)) for own in zip(heads, *rows, strict=True)]
    first = max(map(len, names))
    lines = ["predicted and measured by level; a step verifies, of the lowest level drafts"]
    for name, cells in zip(["", *names], [heads, *rows], strict=True):
        each = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append(f"{name:{first}}  {'  '.join(each)}".rstrip())
    return "\n".join(lines)


def _steps(work: Work) -> float:
    return sum(level.steps for level in work.levels)


def _cells(both: Sequence[LevelWork]) -> list[str]:
    cells = [f"{100 * one.steps:.1f}" for one in both]
    cells += [f"{100 * one.tokens:.1f}" for one in both]
    cells += ["-" if math.isnan(one.length) else f"{one.length:.2f}" for one in both]
    return [*cells, *(f"{1e3 * one.seconds / max(one.steps, 1e-9):.2f}" for one in both)]


def insertion_table(tests: Sequence[Insertion]) -> str:
    """Theorem 3.2 as the rebuttal's table has it: both sides, verdict and speeds."""
    heads = (
        "T_i", "L_i-new", "T_new", "L_new", "T_below", "L_i", "T_new/T_i", "< (1)", "< exact",
        "(1)", "exact", "renewal", "measured", "tokens/s",
    )  # fmt: skip
    rows = [_insertion(one) for one in tests]
    names = [f"{one.new} between {one.above} and {one.below}" for one in tests]
    widths = [max(map(len, own)) for own in zip(heads, *rows, strict=True)]
    first = max(map(len, names))
    lines = [
        "Theorem 3.2: does a model belong between two others? (T in ms per pass; L: tokens per "
        "verification; exact: T_new against Lemma 3.1 before and after)"
    ]
    for name, cells in zip(["", *names], [heads, *rows], strict=True):
        each = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append(f"{name:{first}}  {'  '.join(each)}".rstrip())
    return "\n".join(lines)


def _insertion(one: Insertion) -> tuple[str, ...]:
    test, (length, of_new, new_length) = one.test, one.lengths
    above, new, below = (seconds * 1e3 for seconds in one.seconds)
    before, after = (c.predicted_decode_tokens_per_second for c in (one.without, one.with_new))
    renewal, measured = _word(after > before), "-"
    first, second = (c.measured_decode_tokens_per_second for c in (one.without, one.with_new))
    if first is not None and second is not None:
        before, after, measured = first, second, _word(second > first)
    return (
        f"{above:.2f}", f"{of_new:.2f}", f"{new:.2f}", f"{new_length:.2f}", f"{below:.2f}",
        f"{length:.2f}", f"{test.ratio_above:.3f}", f"{test.bound_above:.3f}",
        f"{test.exact_bound * 1e3:.2f}", _word(test.above), _word(test.exact), renewal, measured,
        f"{before:.1f} -> {after:.1f}",
    )  # fmt: skip


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _word(inserted: bool) -> str:
    return "insert" if inserted else "no"


def _plain(one: Candidate) -> dict[str, Any]:
    fields = ("levels", "windows", "rounds", "tail", "rule", "predicted_tokens_per_second",
              "predicted_decode_tokens_per_second", "uncertainty", "measured_tokens_per_second",
              "measured_decode_tokens_per_second", "measured_length")  # fmt: skip
    values = {name: getattr(one, name) for name in fields}
    each = {"work": one.work, "measured_work": one.measured_work}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()} | {
        "tokens_per_round": one.length,
        **{name: None if work is None else work.to_dict() for name, work in each.items()},
    }


__all__ = ["Plan", "Request", "insertion_table", "kept", "parts_of", "plan", "run"]
