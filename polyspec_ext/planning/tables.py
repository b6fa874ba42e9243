"""A plan for people: the chains, the measurements, the tests, and what they depend on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .. import columns
from .measure import OWN, Measured
from .parts import Part, Request
from .search import Candidate, Insertion, LevelWork, Sensitivity, Work

_SIZES = (0, 1, 2, 4, 8, 16)  # tokens of the steps that are shown


def verdict(one: Candidate, plain: Candidate) -> str:
    """What is recommended, and its rate."""
    rate = f"{one.predicted_tokens_per_second:.1f} tokens/s predicted"
    if one.measured_tokens_per_second is not None:
        rate += f", {one.measured_tokens_per_second:.1f} measured"
    if not one.windows:
        return f"do not speculate: {one.levels[0]} alone, {rate}"
    over = one.predicted_tokens_per_second / plain.predicted_tokens_per_second
    text = f"recommended: {_described(one)}, rule {one.rule}; {rate}; {over:.2f}x plain"
    return columns.wrapped(text)


def short_rates(found: Sequence[Candidate], plain: Candidate) -> str:
    """Return a table of every chain's rate, predicted and, where any was run, measured."""
    heads, places = ["tokens/s", "+-", "over plain"], [0, 1, 4]
    if any(one.measured_tokens_per_second for one in found):
        heads, places = [*heads, "measured", "over plain"], [*places, 2, 5]
    rows = [(_described(one), [_rates(one, plain)[n] for n in places]) for one in found]
    return f"predicted for whole calls\n{columns.table('chain', heads, rows)}"


def rates(found: Sequence[Candidate], plain: Candidate) -> str:
    """Every chain with what is predicted and what was measured."""
    heads = ("predicted", "+-", "measured", "pred./meas.", "over plain", "measured", "pred./meas.",
             "decoding", "measured", "tokens/round", "measured")  # fmt: skip
    table = columns.table("chain", heads, [(_described(one), _rates(one, plain)) for one in found])
    return f"tokens per second of whole calls, and of decoding without prefills\n{table}"


def _rates(one: Candidate, plain: Candidate) -> tuple[str, ...]:
    over = one.predicted_tokens_per_second / plain.predicted_tokens_per_second
    measured, base = one.measured_tokens_per_second, plain.measured_tokens_per_second
    gain = None if measured is None or not base else measured / base
    return (
        f"{one.predicted_tokens_per_second:.1f}",
        f"{100 * one.uncertainty:.1f} %",
        _shown(measured, ".1f"),
        _shown(one.error if one.error is None else 1 + one.error, ".2f"),
        f"{over:.2f}",
        _shown(gain, ".2f"),
        _shown(None if gain is None else over / gain, ".2f"),
        f"{one.predicted_decode_tokens_per_second:.1f}",
        _shown(one.measured_decode_tokens_per_second, ".1f"),
        f"{one.length:.2f}",
        _shown(one.measured_length, ".2f"),
    )


def measurements(found: Measured, parts: Sequence[Part], request: Request) -> str:
    """Times by part, acceptances, what chains at work took, and how levels run."""
    lines = [
        f"measured in {found.spent:.0f} s on {found.texts} texts of {len(found.remaining)} "
        f"tokens, temperature {request.temperature:g}, batch {found.batch}; the chain's "
        f"own time {found.own * 1e6:.0f} us per step, {found.own_round * 1e6:.0f} us per round"
    ]
    for n, part in enumerate(parts):
        times = []
        for what, tables in (("verify", found.verify), ("draft", found.draft)):
            for again in (False, True):
                table = tables.get((n, again))
                if table is not None:
                    shown = [m for m in _SIZES if m in table.seconds]
                    each = ", ".join(f"{m}: {table.seconds[m] * 1e3:.2f}" for m in shown)
                    times.append(f"{what}{' again' if again else ''} {each}")
        cost = found.context_cost(n)
        if cost.share > 0:
            times.append(f"{100 * cost.share:.0f} % of that for the {cost.mean:.0f} tokens before")
        read = found.prefill[n].seconds
        some = sorted({min(read), max(read)})
        times.append("prefill " + ", ".join(f"{m}: {read[m] * 1e3:.1f}" for m in some))
        lines.append(f"  {part.name}: ms by tokens: {'; '.join(times)}")
    pairs = sorted({*found.accept, *found.proposals})
    shares = [f"{parts[a].name} from {parts[b].name} {found.rate(a, b):.3f}" for a, b in pairs]
    if shares:
        lines.append(f"  accepted per token: {', '.join(shares)}")
    if found.trials:
        lines.append("  times of chains at work over these, by which predictions go:")
    for chain in found.trials:
        over = [f"{parts[n].name} x{found.correction(chain, n):.2f}" for n in chain]
        lines.append(f"    {', '.join(over)}; own x{found.correction(chain, OWN):.2f}")
    lines += [f"  {part.name}: {part.choice}" for part in parts if part.choice is not None]
    return columns.wrapped("\n".join(lines))


def work(ran: Sequence[Candidate]) -> str:
    """Predicted and measured, level by level: verifications per 100 tokens of the text (of the
    lowest level drafts, and tokens drafted), tokens handed up per verification, ms per step."""
    heads = ("steps/100", "measured", "tokens/100", "measured", "L", "measured", "ms/step",
             "measured")  # fmt: skip
    rows: list[tuple[str, Sequence[str]]] = []
    for one in ran:
        assert one.measured_work is not None
        rows.append((_described(one), ("",) * len(heads)))
        pairs = zip(one.levels, one.work.levels, one.measured_work.levels, strict=True)
        rows += [(f"  {name}", _work_of(both)) for name, *both in pairs]
        own = [f"{1e3 * work.own / _steps(work):.2f}" for work in (one.work, one.measured_work)]
        rows.append(("  outside the levels", (*("",) * (len(heads) - 2), *own)))
    title = "predicted and measured by level; a step verifies, of the lowest level drafts"
    return f"{columns.wrapped(title)}\n{columns.table('', heads, rows)}"


def _steps(work: Work) -> float:
    return sum(level.steps for level in work.levels)


def _work_of(both: Sequence[LevelWork]) -> list[str]:
    cells = [f"{100 * one.steps:.1f}" for one in both]
    cells += [f"{100 * one.tokens:.1f}" for one in both]
    cells += [_shown(one.length, ".2f") for one in both]
    return [*cells, *(f"{1e3 * one.seconds / max(one.steps, 1e-9):.2f}" for one in both)]


def insertions(tests: Sequence[Insertion]) -> str:
    """Theorem 3.2 as the rebuttal's table has it: both sides, verdict and speeds; "either" where
    now the one chain was measured to be faster, now the other."""
    heads = (
        "T_i", "L_i-new", "T_new", "L_new", "T_below", "L_i", "T_new/T_i", "< (1)", "< exact",
        "(1)", "exact", "renewal", "measured", "tokens/s",
    )  # fmt: skip
    title = (
        "Theorem 3.2: does a model belong between two others? (T in ms per pass; L: tokens that "
        "the model above hands up per pass; exact: T_new against Lemma 3.1 before and after)"
    )
    rows = [(f"{one.new} between {one.above} and {one.below}", _insertion(one)) for one in tests]
    return f"{columns.wrapped(title)}\n{columns.table('', heads, rows)}"


def _insertion(one: Insertion) -> tuple[str, ...]:
    test, (length, of_new, new_length) = one.test, one.lengths
    above, new, below = (seconds * 1e3 for seconds in one.seconds)
    before, after = (c.predicted_decode_tokens_per_second for c in (one.without, one.with_new))
    renewal, measured = _word(after > before), "-"
    first, second = (c.measured_decode_tokens_per_second for c in (one.without, one.with_new))
    if first is not None and second is not None:
        before, after = first, second
        measured = "either" if one.faster is None else _word(one.faster)
    return (
        f"{above:.2f}", f"{of_new:.2f}", f"{new:.2f}", f"{new_length:.2f}", f"{below:.2f}",
        f"{length:.2f}", f"{test.ratio_above:.3f}", f"{test.bound_above:.3f}",
        f"{test.exact_bound * 1e3:.2f}", _word(test.above), _word(test.exact), renewal, measured,
        f"{before:.1f} -> {after:.1f}",
    )  # fmt: skip


def sensitivities(found: Iterable[Sensitivity]) -> str:
    """How far measured quantities may be off."""
    lines = ["the recommendation stands while each of these, alone, is off by no more than"]
    for one in found:
        ends = []
        for factor, rival in zip((one.lower, one.upper), one.rivals, strict=True):
            if factor is not None:
                ends.append(f"x{factor:.2f} (then {rival})")
        lines.append(f"  {one.quantity}: {'; '.join(ends) or 'nothing within x0.2 ... x5'}")
    return columns.wrapped("\n".join(lines))


def _described(one: Candidate) -> str:
    if not one.windows:
        return f"{one.levels[0]} alone"
    text = f"{', '.join(one.levels)}; window {','.join(map(str, one.windows))}"
    text += f" tail {one.tail}" if one.tail else ""
    return text + (f" rounds {','.join(map(str, one.rounds))}" if one.rounds else "")


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _word(inserted: bool) -> str:
    return "insert" if inserted else "no"
