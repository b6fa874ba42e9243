"""What the planner measures on the user's prompts: the target's texts, seconds of every kind of
step where it happens, and how likely each level accepts what each level below proposes.

Times are those of chains at work, not of passes alone: between two passes of one level another
level has used the caches of the processor. Acceptances are read off the distributions of all levels
along the target's own texts, so that one pass per level and text tells what every window would give
(`theory.renewal`).
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import arguments
from ..drafters import Context, Drafter
from ..levels import BatchedLevel, InputBlock, LevelAdapter, PromptBatch
from ..policies.base import RoundReport
from ..stats import Stats
from .theory import Acceptance, Proposals
from .theory.lengths import Floats

Clock = Callable[[], float]
TEMPERATURE_MAX = 2.0**120
WINDOWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)  # whose steps are timed
MOST = WINDOWS[-1]
_ENOUGH = 16  # times of every window


@dataclass(frozen=True)
class Request:
    """What the user will ask for, as `Chain.generate` takes it."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    eos_token_id: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        arguments.integer("max_new_tokens", self.max_new_tokens)
        if self.max_new_tokens < 2:
            raise ValueError(
                f"max_new_tokens: expected an integer >= 2, given {self.max_new_tokens}"
            )
        arguments.real("temperature", self.temperature, TEMPERATURE_MAX)

    def options(self, number: int = 0) -> dict[str, Any]:
        """As arguments of `Chain.generate`. Prompts that are measured have seeds of their own, by
        `number`: with one and the same their texts would tell less."""
        return {**self.__dict__, "seed": (self.seed + number) % 2**64}


@dataclass(frozen=True)
class Part:
    """An element of the chains that are compared.

    Attributes:
        thing: a `Level`, or a drafter.
        name: for people.
        model: whether it is a level; a drafter can only be the last.
    """

    thing: Any
    name: str
    model: bool

    @property
    def trees(self) -> bool:
        """Whether it drafts trees, whose verification takes other times than a chain's."""
        return bool(getattr(getattr(self.thing, "capabilities", None), "trees", False)) and not (
            self.model
        )

    def drafts_below(self, above: Part, target: Part) -> bool:
        """Whether it can stand below a part. A drafter that reads hidden states was made for the
        target's: it drafts for that, or for a copy in its cache."""
        own = getattr(self.thing, "capabilities", None)
        if self.model or not getattr(own, "hidden_layers", ()):
            return True
        return above == target or not getattr(above.thing, "reads_apart", True)


class Times(NamedTuple):
    """Seconds of a step by its number of tokens.

    Attributes:
        seconds: medians.
        error: relative standard error of one of them, typically.
    """

    seconds: Mapping[int, float]
    error: float

    def at(self, tokens: int) -> float:
        """Between measured numbers, and beyond the last two, on a straight line."""
        known = sorted(self.seconds)
        if tokens > known[-1] and len(known) > 1:
            low, high = known[-2:]
            slope = (self.seconds[high] - self.seconds[low]) / (high - low)
            return self.seconds[high] + max(slope, 0.0) * (tokens - high)
        return float(np.interp(tokens, known, [self.seconds[n] for n in known]))


@dataclass
class Measured:
    """All of it, for parts numbered from the target's 0.

    Attributes:
        remaining: ``[P]``, as `theory.Acceptance` has it.
        accept: ``[P]`` by (upper, lower) part.
        proposals: by (upper, lower) part, of drafters.
        verify: by part, seconds by tokens verified; 0: plain decoding.
        verify_trees: by (upper, lower) part, of drafters of trees, seconds by the tree's depth.
        draft: by part, seconds by tokens asked for.
        own: seconds outside the levels per step of a chain.
        alone: tokens per second of the target alone.
        alone_error: relative standard error of `alone`.
        texts: number of texts.
        spent: seconds that all of this took.
    """

    remaining: Any
    accept: dict[tuple[int, int], Floats] = field(default_factory=dict)
    proposals: dict[tuple[int, int], Proposals] = field(default_factory=dict)
    verify: dict[int, Times] = field(default_factory=dict)
    verify_trees: dict[tuple[int, int], Times] = field(default_factory=dict)
    draft: dict[int, Times] = field(default_factory=dict)
    own: float = 0.0
    alone: float = 0.0
    alone_error: float = 0.0
    texts: int = 0
    spent: float = 0.0

    def acceptance(self, parts: Sequence[int]) -> Acceptance:
        """Of the chain of these parts."""
        pairs = list(itertools.pairwise(parts))
        proposals = self.proposals.get(pairs[-1]) if pairs else None
        none = np.zeros(len(self.remaining))
        return Acceptance(
            tuple(self.accept.get(pair, none) for pair in pairs), self.remaining, proposals
        )

    def rate(self, upper: int, lower: int) -> float:
        """Share of tokens that part `upper` accepts from `lower`, for people: of a drafter that is
        no model, of its first tokens where it has one."""
        table = self.proposals.get((upper, lower))
        if (upper, lower) in self.accept:
            return float(self.accept[upper, lower].mean())
        assert table is not None
        has = table.counts > 0
        return float(table.accept[has, 0].mean()) if has.any() else 0.0


@dataclass
class MeasuredSeconds:
    """Steps of the chain of `parts`, as `theory.PassSeconds`.

    Attributes:
        factors: of every part's times, and of `own` behind them; to see what depends on them.
    """

    measured: Measured
    parts: Sequence[int]
    factors: Mapping[int, float] = field(default_factory=dict)

    def verify(self, level: int, pending: int, unread: int) -> float:
        part = self.parts[level - 1]
        tree = self.measured.verify_trees.get((part, self.parts[level]))
        if tree is not None and pending:
            seconds = tree.at(pending)
        else:
            seconds = self.measured.verify[part].at(pending + unread - 1)
        return seconds * self.factors.get(part, 1.0) + self._own()

    def draft(self, tokens: int, unread: int) -> float:
        part = self.parts[-1]
        seconds = self.measured.draft[part].at(tokens)
        return seconds * self.factors.get(part, 1.0) + self._own()

    def _own(self) -> float:
        return self.measured.own * self.factors.get(-1, 1.0)


class _Turns:
    """A policy that goes through windows in turns, whatever comes of them."""

    def __init__(self, windows: Sequence[int]) -> None:
        self.windows, self.turn = windows, 0

    @property
    def now(self) -> int:
        return self.windows[(self.turn - 1) % len(self.windows)]

    def next(self, report: RoundReport) -> Sequence[int]:
        self.turn += 1
        return [self.now]


class _Round(NamedTuple):
    """One round of a chain of two levels, or of the target alone."""

    asked: int
    verified: int
    accepted: int
    verify: float
    draft: float
    own: float


def measure(
    make: Callable[..., Any],
    parts: Sequence[Part],
    prompts: Sequence[Sequence[int]],
    request: Request,
    *,
    limit: float = 40.0,
    clock: Clock = time.perf_counter,
) -> Measured:
    """Measure all that the chains of `parts` depend on.

    Args:
        make: `Chain`.
        parts: target first, each cheaper than the one before it; drafters without models last.
        prompts: token ids.
        limit: seconds that this may take, of which everything gets a share; it takes longer only
            where a single text does.
        clock: seconds from any origin.
    """
    began = clock()
    models = [n for n, part in enumerate(parts) if part.model]
    pairs = [(a, b) for a, b in itertools.combinations(range(len(parts)), 2) if parts[a].model]
    runs = [_Run(make, parts, pair, request) for pair in [None, *_timed_pairs(parts)]]
    texts = _in_turns(runs, prompts, 0.8 * limit, clock)
    alone = runs[0].rounds
    remaining = np.concatenate([np.arange(len(new), 0, -1) for _, new in texts])
    found = Measured(remaining, texts=len(texts))
    verify: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    trees: dict[tuple[int, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    draft: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    own: list[float] = []
    for one in runs:
        if one.pair is not None:
            upper, lower = one.pair
            of_trees = parts[lower].trees
            for done in one.rounds:
                table = trees[one.pair] if of_trees and done.verified else verify[upper]
                table[done.verified].append(done.verify)
                draft[lower][done.asked].append(done.draft)
                own.append(done.own / 2)
    verify[0][0] += [done.verify for done in alone]
    found.own = statistics.median(own or [done.own for done in alone])
    found.verify = {part: _times(times) for part, times in verify.items()}
    found.verify_trees = {pair: _times(times) for pair, times in trees.items()}
    found.draft = {part: _times(times) for part, times in draft.items()}
    step = _times({0: [done.verify + done.own for done in alone]})
    found.alone, found.alone_error = 1 / step.seconds[0], step.error
    seen = {one.pair: one.rounds for one in runs if one.pair is not None}
    _acceptances(found, parts, models, pairs, texts, request, seen)
    found.spent = clock() - began
    return found


def _timed_pairs(parts: Sequence[Part]) -> list[tuple[int, int]]:
    """Pairs whose rounds are timed: neighbours, and every drafter under the target."""
    models = [n for n, part in enumerate(parts) if part.model]
    drafters = [n for n, part in enumerate(parts) if not part.model]
    pairs = list(itertools.pairwise(models)) + [(0, n) for n in drafters]
    if len(models) > 1:  # the last model verifies as well
        below = [n for n in drafters if parts[n].drafts_below(parts[models[-1]], parts[0])]
        pairs += [(models[-1], n) for n in below[:1]]
    return pairs


class _Run:
    """A chain whose rounds are timed: the target alone, or a pair with all windows in turns."""

    def __init__(
        self,
        make: Callable[..., Any],
        parts: Sequence[Part],
        pair: tuple[int, int] | None,
        request: Request,
    ) -> None:
        self.pair, self.request = pair, request
        self.rounds: list[_Round] = []
        self._turns: _Turns | None = None
        if pair is None:
            self.chain = make([parts[0].thing])
        else:
            self._turns = _Turns([*WINDOWS[::2], *WINDOWS[1::2]])
            things = [parts[n].thing for n in pair]
            self.chain = make(things, [MOST], policy=self._turns)

    @property
    def enough(self) -> bool:
        return self.pair is not None and len(self.rounds) >= _ENOUGH * len(WINDOWS)

    def warm_up(self, prompt: Sequence[int]) -> None:
        """Passes of every size, untimed: some are made when they first run."""
        tokens = 4 if self.pair is None else min(sum(WINDOWS), self.request.max_new_tokens)
        options = {**self.request.options(), "max_new_tokens": tokens}
        self.chain.generate(list(prompt), **options)

    def text(self, prompt: Sequence[int], number: int) -> list[int]:
        """Continue a prompt, every round timed; its new tokens."""
        batch = self.chain.batch([list(prompt)], **self.request.options(number))
        stats: Stats = batch.stats
        top, last = stats.levels[0], stats.levels[-1]

        def now() -> tuple[float, ...]:
            below = last.seconds if self.pair is not None else 0.0
            return (
                top.num_draft_tokens, top.num_accepted_tokens, top.seconds, below,
                stats.decode_seconds, top.num_forward_passes,
            )  # fmt: skip

        before, found = now(), []
        while batch.advance():
            after = now()
            verified, accepted, verify, draft, whole, passes = (
                b - a for a, b in zip(before, after, strict=True)
            )
            before = after
            if passes == 1:
                asked = 0 if self._turns is None else self._turns.now
                own = whole - verify - draft
                found.append(_Round(asked, int(verified), int(accepted), verify, draft, own))
        self.rounds += found[1:]  # the first of a text meets other caches
        new: list[int] = batch.rows[0].tokens[len(prompt) :]
        return new


def _in_turns(
    runs: Sequence[_Run], prompts: Sequence[Sequence[int]], limit: float, clock: Clock
) -> list[tuple[list[int], list[int]]]:
    """All runs continue one prompt after the other, so that a change in the machine's load meets
    all; as many prompts as there is time for, again and again while rounds are missing. The
    target's texts."""
    for run in runs:
        run.warm_up(prompts[0])
    texts: list[tuple[list[int], list[int]]] = []
    began = clock()
    for number in range(3 * len(prompts)):
        again = number >= len(prompts)
        if (texts and clock() - began > limit) or (again and all(run.enough for run in runs[1:])):
            break
        prompt = prompts[number % len(prompts)]
        new = runs[0].text(prompt, number)
        if new and not again:
            texts.append((list(prompt), new))
        for run in runs[1:]:
            if not (again and run.enough):
                run.text(prompt, number)
    if not runs[0].rounds:
        raise ValueError(
            "prompts: expected one that the target continues with two tokens or more, given none"
        )
    return texts


def _times(samples: Mapping[int, Sequence[float]]) -> Times:
    medians = {tokens: statistics.median(own) for tokens, own in samples.items() if own}
    errors = []
    for tokens, own in samples.items():
        if len(own) > 2:
            middle = medians[tokens]
            spread = statistics.median(abs(one - middle) for one in own) * 1.4826
            errors.append(1.25 * spread / middle / len(own) ** 0.5 if middle else 0.0)
    return Times(medians, statistics.median(errors) if errors else 0.1)


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
    """``[len(new), vocab]``, what a level would draw every new token from."""
    level = thing if isinstance(thing, BatchedLevel) else LevelAdapter(thing)
    tokens = torch.tensor([[*prompt, *new]], device=level.device)
    own = level.vocab_size
    tokens = tokens.where(tokens < own, 0)
    start, end = len(prompt) - 1, tokens.shape[1] - 1
    level.prefill(PromptBatch(tokens[:, :start], None, end + 1))
    logits = level.forward(InputBlock(tokens[:, start:end], end - start)).logits[0, :, :vocab]
    rows = processed(logits, request).cpu()
    if rows.shape[1] < vocab:
        rows = torch.nn.functional.pad(rows, (0, vocab - rows.shape[1]))
    return rows


def _acceptances(
    found: Measured,
    parts: Sequence[Part],
    models: Sequence[int],
    pairs: Sequence[tuple[int, int]],
    texts: Sequence[tuple[list[int], list[int]]],
    request: Request,
    seen: Mapping[tuple[int, int], Sequence[_Round]],
) -> None:
    vocab = int(parts[0].thing.vocab_size)
    pieces: dict[tuple[int, int], list[Any]] = defaultdict(list)
    # A level in another's cache, or a drafter that needs a chain, is known by its rounds only.
    apart = [n for n in models if n == 0 or getattr(parts[n].thing, "reads_apart", True)]
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
            elif proposals.get(lower) is not None and upper in rows:
                pieces[upper, lower].append(_matches(proposals[lower], rows[upper], new, upper))
    for pair in pairs:
        own = pieces.get(pair, [])
        if len(own) == len(texts) and isinstance(own[0], Proposals):
            found.proposals[pair] = Proposals(
                np.concatenate([one.accept for one in own]),
                np.concatenate([one.counts for one in own]),
            )
        elif len(own) == len(texts):
            found.accept[pair] = np.concatenate(own)
        else:
            observed = seen.get(pair) or seen.get((0, pair[1])) or []
            found.proposals[pair] = _observed(observed, len(found.remaining))
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
    proposals: Sequence[Sequence[int]] | None,
    upper: torch.Tensor,
    new: Sequence[int],
    number: int,
) -> Proposals:
    """Acceptance of proposals: by the target, whether they are the text; by another level, with its
    probability of the token."""
    assert proposals is not None
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


def _share(rounds: Sequence[_Round]) -> float:
    """Accepted of the tokens that were tested."""
    accepted = sum(one.accepted for one in rounds)
    rejected = sum(one.accepted < one.verified for one in rounds)
    return accepted / max(accepted + rejected, 1)


def _observed(rounds: Sequence[_Round], places: int) -> Proposals:
    """Acceptance by position in the block, or by depth in the tree, of rounds that were run, the
    same at every place."""
    tried, passed = np.zeros(MOST), np.zeros(MOST)
    for one in rounds:
        tried[: min(one.accepted + 1, one.verified)] += 1
        passed[: one.accepted] += 1
    whole = _share(rounds)
    # Where few were tried, nearly as everywhere.
    hazards = (passed + 4 * whole) / (tried + 4)
    # A tree may end before the window does.
    most = max((one.verified for one in rounds), default=MOST)
    return Proposals(np.tile(hazards, (places, 1)), np.full(places, most, np.int64))
