"""A plan for people: the chains, Theorem 3.2 and the measurements, in 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from .. import columns
from .measure import Measured
from .parts import Part, Request
from .search import Candidate, Insertion


def verdict(one: Candidate, plain: Candidate) -> str:
    """Return the recommendation and its rate."""
    rate = f"{one.predicted_tokens_per_second:.1f} tokens/s predicted"
    if one.measured_tokens_per_second is not None:
        rate += f", {one.measured_tokens_per_second:.1f} measured"
    if not one.windows:
        return f"do not speculate: {one.levels[0]} alone, {rate}"
    over = one.predicted_tokens_per_second / plain.predicted_tokens_per_second
    text = f"recommended: {_described(one)}, rule {one.rule}; {rate}; {over:.2f}x plain"
    return columns.wrapped(text)


def rates(some: Sequence[Candidate], plain: Candidate, verbose: bool) -> str:
    """Return a table of every chain's rate, predicted and, where any was run, measured; `verbose`:
    also of decoding, without prefills."""
    heads = ["tokens/s", "+-", "over plain"]
    heads += ["measured", "over plain"] * any(one.measured_tokens_per_second for one in some)
    heads += ["decoding", "tokens/round"] * verbose
    rows = []
    for one in some:
        over = one.predicted_tokens_per_second / plain.predicted_tokens_per_second
        cells = [f"{one.predicted_tokens_per_second:.1f}", f"{100 * one.uncertainty:.1f} %"]
        cells.append(f"{over:.2f}")
        if "measured" in heads:
            rate, base = one.measured_tokens_per_second, plain.measured_tokens_per_second
            cells += [f"{rate:.1f}", f"{rate / base:.2f}"] if rate and base else ["-", "-"]
        if verbose:
            cells += [f"{one.predicted_decode_tokens_per_second:.1f}", f"{one.length:.2f}"]
        rows.append((_described(one), cells))
    return f"predicted for whole calls\n{columns.table('chain', heads, rows)}"


def measurements(measured: Measured, parts: Sequence[Part], request: Request) -> str:
    """Return times by part, acceptances, what chains at work took, and how levels run."""
    lines = [
        f"measured in {measured.spent:.0f} s on {len(measured.prompts)} texts of "
        f"{len(measured.remaining)} tokens, temperature {request.temperature:g}, batch "
        f"{measured.batch}; {measured.outside * 1e6:.0f} us per step outside the levels"
    ]
    for n, part in enumerate(parts):
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
        lines.append(f"  {part.name}: ms by tokens: {'; '.join(times)}")
    pairs = sorted({*measured.accept, *measured.proposals})
    shares = [f"{parts[a].name} from {parts[b].name} {measured.rate(a, b):.3f}" for a, b in pairs]
    lines += [f"  accepted per token: {', '.join(shares)}"] * bool(shares)
    lines += [
        f"  {', '.join(parts[n].name for n in chain)}: x{trial.factor:.2f} of that at work"
        for chain, trial in measured.trials.items()
    ]
    lines += [f"  {part.name}: {part.choice}" for part in parts if part.choice is not None]
    return columns.wrapped("\n".join(lines))


def insertions(tests: Sequence[Insertion]) -> str:
    """Return Theorem 3.2 as the rebuttal's table has it: both sides, verdict and speeds; "either"
    where now the one chain was measured to be faster, now the other."""
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


def _described(one: Candidate) -> str:
    if not one.windows:
        return f"{one.levels[0]} alone"
    text = f"{', '.join(one.levels)}; window {','.join(map(str, one.windows))}"
    text += f" tail {one.tail}" if one.tail else ""
    return text + (f" rounds {','.join(map(str, one.rounds))}" if one.rounds else "")


def _word(inserted: bool) -> str:
    return "insert" if inserted else "no"
