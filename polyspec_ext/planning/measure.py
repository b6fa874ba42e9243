"""What the planner measures on the user's prompts: the target's texts, seconds of every kind of
step where it happens (`runs`), what a call costs beside its steps, and how likely each level
accepts what each level below proposes.

Acceptances are read off the distributions of all levels along the target's own texts, so that one
pass per level and text tells what every window would give (`theory.renewal`).
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..drafters import Context, Drafter
from ..levels import InputBlock, PromptBatch, batched
from ..levels.base import id_map_of
from .context import FAR, ContextCost, Sample, context_costs
from .parts import Part, Request
from .runs import MOST, Run, StepTime, Verified, in_turns, timed_runs
from .theory import Acceptance, Floats, Proposals, batches, starts

OWN = -1  # the chain itself, where its time stands among those of parts
# A trial's steps weigh as much as all other trials of the part where it has so many: times of a
# part differ from chain to chain by a few hundredths, those of a step by a quarter or so, and steps
# that follow each other are slow or fast together.
_ALIKE = 64
# And as much as what is expected of their number, where that comes from rounds with other windows.
_FEW = 16
_NEAR = 1.5  # trees that were asked for with windows so many times larger or smaller are alike


_Pair = tuple[int, int]
_Samples = dict[int, list[float]]  # seconds by number of tokens


class Times(NamedTuple):
    """Seconds of a step by its number of tokens."""

    # Means, which do not fall as tokens become more. All that was measured is in them.
    seconds: Mapping[int, float]
    error: float  # relative standard error of one of them, typically

    def times(self, factor: float) -> Times:
        """The same, longer or shorter."""
        return Times({n: own * factor for n, own in self.seconds.items()}, self.error)

    def at(self, tokens: int) -> float:
        """Between measured numbers, and beyond the last two, on a straight line."""
        known = sorted(self.seconds)
        if tokens > known[-1] and len(known) > 1:
            low, high = known[-2:]
            slope = (self.seconds[high] - self.seconds[low]) / (high - low)
            return self.seconds[high] + max(slope, 0.0) * (tokens - high)
        return float(np.interp(tokens, known, [self.seconds[n] for n in known]))


class PartTrial(NamedTuple):
    """Of a part of a chain that was run."""

    measured: float  # seconds that it spent, per token of the text
    expected: float  # those that the tables of steps say of as many steps
    steps: int  # that were run
    factor: float = 1.0  # of these, over as many as were expected


class Trial(NamedTuple):
    """A chain that was run with windows of its own."""

    parts: Mapping[int, PartTrial]  # by part, and `OWN`
    prefills: Mapping[int, PartTrial]  # by part, in seconds of all calls
    error: float  # relative standard error of its rate, over its rounds


def _over(trials: Sequence[PartTrial]) -> float:
    expected = sum(one.expected for one in trials)
    return sum(one.measured for one in trials) / expected if expected > 0 else 1.0


@dataclass
class Measured:
    """All of it, for parts numbered from the target's 0. Pairs are of an upper and a lower part.
    Times are in seconds, of calls of `batch` rows."""

    remaining: Any  # [P], as `theory.Acceptance` has it
    room: Any = None  # [P], likewise
    prompts: list[int] = field(default_factory=list)  # tokens of each text's prompt
    batch: int = 1
    accept: dict[_Pair, Floats] = field(default_factory=dict)  # [P]
    proposals: dict[_Pair, Proposals] = field(default_factory=dict)  # of drafters
    # Pairs whose acceptance is that of rounds, since no distribution of the lower one could be read
    # along the texts.
    observed: set[_Pair] = field(default_factory=set)
    # The rounds by which trees of a window's size are known: a small tree has more than one branch
    # at every level, a deep one few.
    trees: dict[_Pair, list[Verified]] = field(default_factory=dict)
    # By part and `StepTime.again`, and by tokens verified, or asked for; 0: plain decoding.
    verify: dict[tuple[int, bool], Times] = field(default_factory=dict)
    draft: dict[tuple[int, bool], Times] = field(default_factory=dict)
    verify_trees: dict[_Pair, Times] = field(default_factory=dict)  # by the depth asked for
    # By part, how these times, which are those at its mean, depend on the tokens before.
    context: dict[int, ContextCost] = field(default_factory=dict)
    # By part and number of rows below `batch`, the factor of its times.
    fewer_rows: dict[int, dict[int, float]] = field(default_factory=dict)
    prefill: dict[int, Times] = field(default_factory=dict)  # by tokens of a call's longest prompt
    # By part, what its first step of a text takes beyond others; by `OWN`, what of the first round
    # is of no level.
    first: dict[int, float] = field(default_factory=dict)
    own: float = 0.0  # outside the levels for each step of a chain
    own_round: float = 0.0  # and for each round beside that
    own_call: float = 0.0  # and for each call, before its first round
    trials: dict[tuple[int, ...], Trial] = field(default_factory=dict)  # by parts of a chain
    texts: int = 0
    spent: float = 0.0  # that all of this took

    def acceptance(self, parts: Sequence[int], window: int = MOST) -> Acceptance:
        """Of the chain of these parts.

        Args:
            window: of its lowest level, which decides what trees are like.
        """
        pairs = list(itertools.pairwise(parts))
        proposals = self.proposals.get(pairs[-1]) if pairs else None
        if pairs and pairs[-1] in self.trees:
            rounds = self.trees[pairs[-1]]
            alike = [r for r in rounds if 1 / _NEAR <= window / max(r.asked, 1) <= _NEAR]
            proposals = _observed(alike or rounds, len(self.remaining))
        none = np.zeros(len(self.remaining))
        own = tuple(self.accept.get(pair, none) for pair in pairs)
        tail: Proposals | Floats | None = None
        if len(pairs) > 1:
            ends = parts[0], parts[-1]
            tail = self.proposals[ends] if ends in self.proposals else self.accept.get(ends)
        return Acceptance(own, self.remaining, proposals, tail, self.room)

    @property
    def calls(self) -> NDArray[np.int64]:
        """``[G, batch]``, the texts of every call."""
        return batches(self.texts, self.batch)

    def context_factors(self, parts: Sequence[int]) -> Floats:
        """``[G, n]``, of the times of each level's steps, by the length of each call's texts."""
        contexts = np.array(self.prompts) + self.remaining[starts(self.remaining)] / 2
        each = contexts[self.calls].mean(1).tolist()
        return np.array([[self.context_cost(n).factor(one) for n in parts] for one in each])

    def context_cost(self, part: int) -> ContextCost:
        """None where no step of the part was timed but the first of texts."""
        return self.context.get(part, ContextCost())

    def rate(self, upper: int, lower: int) -> float:
        """Share of tokens that part `upper` accepts from `lower`, for people: of a drafter that is
        no model, of its first tokens where it has one."""
        if (upper, lower) in self.accept:
            return float(self.accept[upper, lower].mean())
        table = self.proposals[upper, lower]
        has = table.counts > 0
        return float(table.accept[has, 0].mean()) if has.any() else 0.0

    def correction(self, parts: Sequence[int], part: int) -> float:
        """Of the times of a part in the chain of `parts`: what steps took in chains at work over
        what the tables say. Where that chain was run, by its own steps, and by those of all chains
        in which the part does the same, verify or draft, the less the more its own are. Where none
        has the part, as of all parts."""
        chains = self.trials.items()
        has = {chain: trial.parts[part] for chain, trial in chains if part in trial.parts}
        drafts = parts[-1] == part
        same = [one for chain, one in has.items() if (chain[-1] == part) == drafts]
        some = same or list(has.values())
        some = some or [one for _, trial in chains for one in trial.parts.values()]
        own = has.get(tuple(parts))
        if own is None:
            return _over(some)
        weight = own.steps / (own.steps + _ALIKE)
        return weight * _over([own]) + (1 - weight) * _over(some)

    def prefill_correction(self, part: int) -> float:
        """Of the times of a part's prefill: what those of all trials took over what the tables say;
        of a part that none has, as of all parts. Prefills compute where steps read memory, so what
        changes the one need not change the other."""
        each = [trial.prefills for trial in self.trials.values()]
        own = [one[part] for one in each if part in one]
        return _over(own or [one for some in each for one in some.values()])

    def steps_factors(self, parts: Sequence[int]) -> Floats:
        """``[n]``, of the number of each level's steps: other than 1 where acceptances come from
        rounds and the chain was run, whose own rounds tell more of it."""
        trial = self.trials.get(tuple(parts))
        if trial is None or self.observed.isdisjoint(itertools.pairwise(parts)):
            return np.ones(len(parts))
        none = PartTrial(0.0, 0.0, 0)
        own = [trial.parts.get(n, none) for n in parts]
        return np.array([1 + (one.factor - 1) * one.steps / (one.steps + _FEW) for one in own])


@dataclass
class MeasuredSeconds:
    """Steps of the chain of `parts`, as `theory.PassSeconds`."""

    measured: Measured
    parts: Sequence[int]
    # Of every part's times, and of `OWN`; to see what depends on them.
    factors: Mapping[int, float] = field(default_factory=dict)
    scale: dict[int, float] = field(init=False)  # these, and `Measured.correction`

    def __post_init__(self) -> None:
        self.scale = {
            n: self.measured.correction(self.parts, n) * self.factors.get(n, 1.0)
            for n in (*self.parts, OWN)
        }

    def verify(self, level: int, pending: int, rows: int = 1, again: bool = False) -> float:
        found, part = self.measured, self.parts[level - 1]
        tree = found.verify_trees.get((part, self.parts[min(level, len(self.parts) - 1)]))
        if tree is not None and pending:
            seconds = tree.at(pending)
        else:
            table = found.verify.get((part, again)) or found.verify[part, False]
            seconds = table.at(pending)
        own = found.own + (found.own_round if level == 1 else 0.0)
        return self._of(part, seconds, rows) + own * self.scale[OWN]

    def draft(self, tokens: int, rows: int = 1, again: bool = False) -> float:
        found, part = self.measured, self.parts[-1]
        table = found.draft.get((part, again)) or found.draft[part, False]
        return self._of(part, table.at(tokens), rows) + found.own * self.scale[OWN]

    def first(self) -> Floats:
        """``[n]``, seconds that the first steps of a call take beyond others; those of the chain
        itself are the target's."""
        found = np.array([self.measured.first.get(n, 0.0) * self.scale[n] for n in self.parts])
        found[0] += self.measured.first.get(OWN, 0.0) * self.scale[OWN]
        return found

    def prefills(self) -> Floats:
        """``[G, n]``, seconds of each call."""
        found = self.measured
        longest = np.array(found.prompts)[found.calls].max(1).tolist()
        scale = [found.prefill_correction(n) * self.factors.get(n, 1.0) for n in self.parts]
        return np.array([[found.prefill[n].at(one) for n in self.parts] for one in longest]) * scale

    def before(self) -> Floats:
        """``[G]``, seconds of each call before its first round."""
        return np.asarray(self.measured.own_call * self.scale[OWN] + self.prefills().sum(1))

    def own(self, steps: Floats) -> Floats:
        """``[G, n]``, seconds of the chain itself while it decodes, of so many steps, but for what
        its first rounds take beyond others."""
        seconds = self.measured.own * steps
        seconds[:, 0] += self.measured.own_round * steps[:, 0]
        return np.asarray(seconds * self.scale[OWN])

    def _of(self, part: int, seconds: float, rows: int) -> float:
        seconds *= self.scale[part]
        fewer = self.measured.fewer_rows.get(part)
        if fewer and rows < self.measured.batch:
            known = sorted([*fewer, self.measured.batch])
            seconds *= float(np.interp(rows, known, [fewer.get(n, 1.0) for n in known]))
        return seconds


def measure(
    parts: Sequence[Part], prompts: Sequence[Sequence[int]], request: Request, *, limit: float
) -> Measured:
    """Measure all that the chains of `parts` depend on.

    Args:
        parts: target first, each cheaper than the one before it; what only drafts last.
        prompts: token ids.
        limit: seconds that this may take, of which everything gets a share; it takes longer only
            where a single call does.
    """
    began = time.perf_counter()
    runs = timed_runs(parts, request)
    texts = in_turns(runs, prompts, request.batch, 0.8 * limit)
    most = request.max_new_tokens
    found = Measured(
        np.concatenate([np.arange(len(new), 0, -1) for _, new in texts]),
        np.concatenate([np.arange(most, most - len(new), -1) for _, new in texts]),
        [len(prompt) for prompt, _ in texts],
        request.batch,
        texts=len(texts),
    )
    _steps(found, parts, runs)
    timed = {n for n, again in found.draft if not again}
    verify = {n for run in runs for n in run.chain[1:-1]}
    verify -= {n for n, _ in (*found.verify, *found.verify_trees)}
    untimed = [part.name for n, part in enumerate(parts) if n and (n not in timed or n in verify)]
    if untimed:
        raise ValueError(
            f"max_new_tokens: expected texts of more rounds, by which levels can be timed, given "
            f"{request.max_new_tokens}, with which {', '.join(untimed)} ended none before the last"
        )
    _beginnings(found, runs)
    _own(found, runs)
    seen: dict[_Pair, list[Verified]] = defaultdict(list)
    for run in runs:
        for pair, own in run.turns.verified.items() if run.turns is not None else ():
            seen[pair] += own
    _acceptances(found, parts, texts, request, seen)
    found.spent = time.perf_counter() - began
    return found


def _steps(found: Measured, parts: Sequence[Part], runs: Sequence[Run]) -> None:
    """The tables of times of steps."""
    verify: dict[tuple[int, bool], _Samples] = defaultdict(lambda: defaultdict(list))
    trees: dict[_Pair, _Samples] = defaultdict(lambda: defaultdict(list))
    draft: dict[tuple[int, bool], _Samples] = defaultdict(lambda: defaultdict(list))

    def table(step: StepTime) -> _Samples:
        if step.part == step.below:
            return draft[step.part, step.again]
        if step.tokens and parts[step.below].trees:
            return trees[step.part, step.below]
        return verify[step.part, step.again]

    every = [step for run in runs for step in run.steps]
    steps = [step for step in every if step.rows == found.batch]
    later = [step for step in steps if not step.begins]
    found.context = context_costs(
        (one.part, Sample((one.below, one.tokens, one.again), one.context, one.seconds))
        for one in later
    )

    def enter(some: Iterable[StepTime]) -> None:
        for step in some:
            usual = found.context_cost(step.part).factor(step.context)
            table(step)[step.tokens].append(step.seconds / usual)

    enter(later)
    # Texts that end within a round have first steps alone.
    enter([step for step in steps if step.begins and not table(step)])
    found.verify = {key: times_of(times) for key, times in verify.items()}
    found.verify_trees = {pair: times_of(times) for pair, times in trees.items()}
    found.draft = {key: times_of(times) for key, times in draft.items()}
    fewer: dict[int, _Samples] = defaultdict(lambda: defaultdict(list))
    for step in every:
        if not step.begins and step.rows < found.batch:
            fewer[step.part][step.rows].append(step.seconds / _usual(found, step))
    found.fewer_rows = {
        part: {rows: statistics.median(own) for rows, own in samples.items()}
        for part, samples in fewer.items()
    }


def _usual(found: Measured, step: StepTime) -> float:
    """Seconds of such a step behind the first of a text."""
    chain = (step.part,) if step.part == step.below else (step.part, step.below)
    times = MeasuredSeconds(found, chain)  # (nothing is known of its own time yet)
    if step.part == step.below:
        seconds = times.draft(step.tokens, found.batch, step.again)
    else:
        seconds = times.verify(1, step.tokens, found.batch, step.again)
    return seconds * found.context_cost(step.part).factor(step.context)


def _beginnings(found: Measured, runs: Sequence[Run]) -> None:
    """What a call costs before its first step, and that step beyond others."""
    prefill: dict[int, _Samples] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for text in run.texts:
            for part, seconds in text.prefill.items():
                prefill[part][text.prompt].append(seconds)
    for part, samples in prefill.items():
        times = times_of(samples)
        shortest = min(times.seconds)
        if shortest > 1:  # few lengths were seen: down to a pass of one token, with none before it
            table, tokens = (found.draft[part, False], 1) if part else (found.verify[0, False], 0)
            least = table.at(tokens) * found.context_cost(part).factor(0)
            times = Times({1: min(least, times.seconds[shortest]), **times.seconds}, times.error)
        found.prefill[part] = times
    first: dict[int, list[float]] = defaultdict(list)
    for step in (step for run in runs for step in run.steps):
        if step.begins and step.rows == found.batch:
            first[step.part].append(step.seconds - _usual(found, step))
    found.first = {part: statistics.median(own) for part, own in first.items()}


def _own(found: Measured, runs: Sequence[Run]) -> None:
    """The chains' own time: of a round of one step, the target's alone, and of one of two. Where a
    policy looks at the rounds they take longer."""
    free = [run for run in runs if run.turns is None]
    each = [
        statistics.median(
            [one.own for one in run.rounds if not one.begins] or [one.own for one in run.rounds]
        )
        for run in free
    ]
    found.own_round = each[0]
    if len(each) > 1:
        found.own = each[1] - each[0] if each[1] > each[0] else each[1] / 2
        found.own_round = max(0.0, each[0] - found.own)
    found.first[OWN] = statistics.median(
        one.own - usual
        for run, usual in zip(free, each, strict=True)
        for one in run.rounds
        if one.begins
    )
    found.own_call = statistics.median(text.outside for run in free for text in run.texts)


def times_of(samples: Mapping[int, Sequence[float]]) -> Times:
    """Of seconds by number of tokens. What is far from the others comes at any step, so it says
    nothing of one number of tokens, and all pay for it alike: the steps of `samples` take as long
    by the answer as they took."""
    means, errors = {}, []
    for tokens, own in samples.items():
        middle = statistics.median(own)
        means[tokens] = statistics.fmean(one for one in own if one <= FAR * middle)
        if len(own) > 2:
            spread = statistics.median(abs(one - middle) for one in own) * 1.4826
            errors.append(1.25 * spread / middle / len(own) ** 0.5 if middle else 0.0)
    counts = {tokens: len(own) for tokens, own in samples.items()}
    means = rising(means, counts)
    whole = sum(map(sum, samples.values()))
    usual = sum(counts[tokens] * mean for tokens, mean in means.items())
    seconds = {tokens: mean * whole / usual if usual else mean for tokens, mean in means.items()}
    return Times(seconds, statistics.median(errors) if errors else 0.1)


def rising(means: Mapping[int, float], counts: Mapping[int, int]) -> dict[int, float]:
    """The nearest values, by counts, that do not fall as tokens become more (isotonic regression,
    pooling adjacent violators). A pass could be padded, so where more tokens took less the
    difference is chance, and the best of many windows would be chosen by it."""
    pools: list[tuple[float, int, list[int]]] = []  # mean, count, numbers of tokens
    for tokens in sorted(means):
        mean, count, some = means[tokens], counts[tokens], [tokens]
        while pools and pools[-1][0] > mean:
            other, more, before = pools.pop()
            mean = (mean * count + other * more) / (count + more)
            count, some = count + more, before + some
        pools.append((mean, count, some))
    return {tokens: mean for mean, _, some in pools for tokens in some}


# ---- acceptances ---------------------------------------------------------------------------------


def processed(logits: torch.Tensor, request: Request) -> torch.Tensor:
    """``[N, V]``, the distributions that tokens are drawn from, of rows of logits; as `ps.sample`
    forms them, up to rounding."""
    rows = logits.float()
    if request.temperature == 0:
        return torch.nn.functional.one_hot(rows.argmax(-1), rows.shape[-1]).float()
    weights = torch.softmax(rows / request.temperature, -1)
    if 0 < request.top_k < weights.shape[-1]:
        edge = weights.topk(request.top_k, -1).values[:, -1:]
        weights = weights.where(weights >= edge, 0)
        weights = weights / weights.sum(-1, keepdim=True)
    if request.top_p < 1:
        ordered, _ = weights.sort(-1, descending=True)
        inside = (ordered.cumsum(-1) - ordered < request.top_p) & (ordered > 0)
        edge = ordered.gather(-1, (inside.sum(-1, keepdim=True) - 1).clamp_min(0))
        weights = weights.where(weights >= edge, 0)
    if request.min_p > 0:
        weights = weights.where(weights >= request.min_p * weights.amax(-1, keepdim=True), 0)
    return weights / weights.sum(-1, keepdim=True)


@torch.inference_mode()
def _distributions(
    thing: Any, vocab: int, prompt: Sequence[int], new: Sequence[int], request: Request
) -> torch.Tensor:
    """``[len(new), vocab]``, what a level would draw every new token from: nothing of other ids
    than its own."""
    level = batched(thing)
    tokens = torch.tensor([[*prompt, *new]], device=level.device)
    own = level.vocab_size
    tokens = tokens.where(tokens < own, 0)
    start, end = len(prompt) - 1, tokens.shape[1] - 1
    level.prefill(PromptBatch(tokens[:, :start], None, end + 1))
    logits = level.forward(InputBlock(tokens[:, start:end], end - start)).logits
    id_map = id_map_of(level)
    logits = logits[..., : id_map.entries_below(vocab)]
    return processed(id_map.spread(logits, vocab)[0], request).cpu()


def _acceptances(
    found: Measured,
    parts: Sequence[Part],
    texts: Sequence[tuple[list[int], list[int]]],
    request: Request,
    seen: Mapping[_Pair, Sequence[Verified]],
) -> None:
    vocab = int(parts[0].thing.vocab_size)
    pieces: dict[_Pair, list[Any]] = defaultdict(list)
    pairs = [(a, b) for a, b in itertools.combinations(range(len(parts)), 2) if parts[a].verifies]
    # A level in another's cache, or a drafter that needs a chain, is known by its rounds only.
    apart = [n for n, part in enumerate(parts) if part.model and (n == 0 or part.reads_apart)]
    for prompt, new in texts:
        rows = {n: _distributions(parts[n].thing, vocab, prompt, new, request) for n in apart}
        chosen = torch.tensor(new)
        proposals = {
            n: _proposed(part.thing, prompt, new, request)
            for n, part in enumerate(parts)
            if not part.model and isinstance(part.thing, Drafter)
        }
        for upper, lower in pairs:
            if lower in rows and upper in rows:
                pieces[upper, lower].append(_agreement(rows[upper], rows[lower], chosen, upper))
            elif upper in rows and (proposed := proposals.get(lower)) is not None:
                pieces[upper, lower].append(_matches(proposed, rows[upper], new, upper))
    for pair in pairs:
        own = pieces.get(pair, [])
        if len(own) == len(texts) and isinstance(own[0], Proposals):
            found.proposals[pair] = Proposals(*map(np.concatenate, zip(*own, strict=True)))
        elif len(own) == len(texts):
            found.accept[pair] = np.concatenate(own)
        else:
            observed = seen.get(pair) or seen.get((0, pair[1])) or []
            found.observed.add(pair)
            found.proposals[pair] = _observed(observed, len(found.remaining))
            if parts[pair[1]].trees:
                found.trees[pair] = list(observed)
            if parts[pair[1]].model:  # which may stand between two others as well
                found.accept[pair] = np.full(len(found.remaining), _share(observed))


def _agreement(
    upper: torch.Tensor, lower: torch.Tensor, chosen: torch.Tensor, number: int
) -> Floats:
    """``[L]``, acceptance of a model's tokens: by the target, given the token that stands there;
    by another level, on average over what it draws."""
    if number > 0:
        return np.asarray(torch.minimum(upper, lower).sum(-1).double().numpy())
    at = chosen[:, None]
    p, q = upper.gather(1, at)[:, 0].double(), lower.gather(1, at)[:, 0].double()
    # A pass over a whole text may round another argmax than the pass that chose the token.
    return np.asarray((q / p.clamp_min(1e-30)).clamp_max(1).numpy())


def _proposed(
    drafter: Any, prompt: Sequence[int], new: Sequence[int], request: Request
) -> list[list[int]] | None:
    """What a drafter proposes before every new token; None where it draws."""
    own = drafter.fork() if hasattr(drafter, "fork") else drafter
    context, found = Context(list(prompt), seed=request.seed), []
    for token in new:
        proposal = own.propose(context, MOST)
        if proposal.logits is not None:
            return None
        found.append([int(one) for one in proposal.tokens])
        context.valid = len(context.tokens)
        context.tokens.append(token)
    return found


def _matches(
    proposals: Sequence[Sequence[int]], upper: torch.Tensor, new: Sequence[int], number: int
) -> Proposals:
    """Acceptance of proposals: by the target, whether they are the text; by another level, with its
    probability of the token."""
    length = len(new)
    accept, counts = np.zeros((length, MOST)), np.zeros(length, np.int64)
    for place, tokens in enumerate(proposals):
        counts[place] = len(tokens)
        for j, token in enumerate(tokens[: length - place]):
            if number == 0:
                accept[place, j] = float(token == new[place + j])
            elif token < upper.shape[1]:
                accept[place, j] = float(upper[place + j, token])
    return Proposals(accept, counts)


def _share(rounds: Iterable[Verified]) -> float:
    """Accepted of the tokens that were tested."""
    own = list(rounds)
    accepted = sum(one.accepted for one in own)
    rejected = sum(one.accepted < one.asked for one in own)
    return accepted / max(accepted + rejected, 1)


def _observed(rounds: Sequence[Verified], places: int) -> Proposals:
    """Acceptance by position in the block, or by depth in the tree, of rounds that were run, the
    same at every place. Where a drafter had no more to propose, or a tree ended before its window
    did, the next token is not accepted."""
    rounds = [one for one in rounds if not one.cut] or rounds
    tried, passed = np.zeros(MOST), np.zeros(MOST)
    for one in rounds:
        tried[: min(one.accepted + 1, one.asked)] += 1
        passed[: one.accepted] += 1
    whole = _share(rounds)
    # Where few were tried, nearly as everywhere.
    hazards = (passed + 4 * whole) / (tried + 4)
    # No tree is deeper than any that there was.
    most = max((one.tokens for one in rounds), default=MOST)
    return Proposals(np.tile(hazards, (places, 1)), np.full(places, most, np.int64))
