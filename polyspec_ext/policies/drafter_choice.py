"""Which of several drafters drafts, chosen while a chain runs, together with the windows.

Liu, Park and Shen (ACL 2025) predict a drafter's accuracy from features of the prompt by least
squares, and compare throughputs (their theorem 2). `AccuracyModel` is that; the bandit of
`DrafterChoice` needs no features, only rounds and their seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from .adaptive import Joint
from .base import RoundReport, WindowPolicy


class Switch(Protocol):
    """What is switched (`drafters.SwitchingDrafter`)."""

    active: int

    @property
    def members(self) -> Sequence[object]: ...


class PromptFeatures:
    """Features of prompts: 1, the logarithm of the length, the perplexity under a drafter, TF-IDF.

    Args:
        perplexity: of a prompt's tokens under a drafter; None: not a feature.
        tfidf: words of the TF-IDF vector, the most frequent token ids of the prompts fitted on; 0:
            not a feature. Needs scikit-learn.
        length: whether the length is a feature.

    Raises:
        ImportError: `tfidf` without scikit-learn.
    """

    def __init__(
        self,
        perplexity: Callable[[Sequence[int]], float] | None = None,
        tfidf: int = 0,
        *,
        length: bool = True,
    ) -> None:
        self._perplexity, self._tfidf, self._length = perplexity, None, length
        if tfidf:
            try:
                from sklearn.feature_extraction.text import TfidfVectorizer
            except ImportError as error:
                raise ImportError(
                    "tfidf: expected scikit-learn, which is not installed; "
                    "pip install 'polyspec_ext[adaptation]' brings it"
                ) from error
            self._tfidf = TfidfVectorizer(max_features=tfidf, token_pattern=r"\d+")

    def fit(self, prompts: Sequence[Sequence[int]]) -> PromptFeatures:
        """Learns the vocabulary of TF-IDF. Returns itself."""
        if self._tfidf is not None:
            self._tfidf.fit([" ".join(map(str, prompt)) for prompt in prompts])
        return self

    def __call__(self, prompt: Sequence[int]) -> list[float]:
        """``[F]``, those of one prompt's token ids."""
        found = [1.0]
        if self._length:
            found.append(math.log(1 + len(prompt)))
        if self._perplexity is not None:
            found.append(self._perplexity(prompt))
        if self._tfidf is not None:
            found += self._tfidf.transform([" ".join(map(str, prompt))]).toarray()[0].tolist()
        return found


class AccuracyModel:
    """Accuracy of drafter c on a prompt: u . Z_c, with Z_c by least squares on a few prompts.

    Args:
        features: u.
    """

    def __init__(self, features: PromptFeatures) -> None:
        self.features = features
        self._z = np.zeros((0, 0))

    def fit(
        self, prompts: Sequence[Sequence[int]], accuracies: Sequence[Sequence[float]]
    ) -> AccuracyModel:
        """Returns itself.

        Args:
            prompts: N of them.
            accuracies: ``[N, C]``, of each drafter on each prompt.

        Raises:
            ValueError: another number of accuracies than of prompts.
        """
        if len(prompts) != len(accuracies) or not prompts:
            raise ValueError(
                f"accuracies: expected one row for each of {len(prompts)} prompts, at least 1, "
                f"given {len(accuracies)}"
            )
        self.features.fit(prompts)
        u = np.array([self.features(prompt) for prompt in prompts])
        # With fewer prompts than features, the solution of the least norm.
        self._z = np.linalg.lstsq(u, np.array(accuracies, dtype=float), rcond=None)[0]
        return self

    def predict(self, prompt: Sequence[int]) -> list[float]:
        """``[C]`` in [0, 1]."""
        found = np.array(self.features(prompt)) @ self._z
        return [float(a) for a in np.clip(found, 0.0, 1.0)]


def promised_throughput(accuracy: float, token: float, verify: float, most: int = 16) -> float:
    """Tokens per second with the best window: the maximum over 0 <= g <= `most` of equation 1 of
    Liu, Park and Shen, ``(1 - A^{g+1}) / ((1 - A) (g a + b))``.

    Args:
        accuracy: A, in [0, 1].
        token: a, seconds of a drafted token.
        verify: b, seconds of a verification, > 0.
        most: the largest window.
    """
    tokens, reach, best = 0.0, 1.0, 0.0
    for g in range(most + 1):
        tokens += reach
        reach *= accuracy
        best = max(best, tokens / (g * token + verify))
    return best


class DrafterChoice:
    """A window policy that also sets which drafter is active: of the highest throughput, tokens per
    second of its latest rounds, with the bonus of an upper confidence bound for what was tried
    seldom, so that all are tried and a drafter that has become better is found. Each drafter has a
    window policy of its own, which is told of the rounds with that drafter.

    With a `model`, the drafter of a request's first rounds is that of the highest throughput by its
    predicted accuracy and the seconds that its drafts and verifications have taken so far; those
    that have not drafted yet come first, the one of the highest accuracy before the others.

    For a batch there is one active drafter; it may change before each `stay`-th round.

    Args:
        drafter: of the chain.
        policy: makes the window policy of one drafter. Default: `Joint`.
        model: predicts accuracies where a request begins. None: the drafter at work goes on.
        stay: rounds of the target between choices, >= 1.
        forgetting: weight of a round relative to the one after it, in (0, 1].
        confidence: weight of the bonus, >= 0; as a share of the throughput. (The tokens of a round
            deviate from their mean by about half of it, so with much less a drafter whose first
            rounds were unlucky is not tried again.)
    """

    def __init__(
        self,
        drafter: Switch,
        policy: Callable[[], WindowPolicy] = Joint,
        *,
        model: AccuracyModel | None = None,
        stay: int = 4,
        forgetting: float = 0.98,
        confidence: float = 0.5,
    ) -> None:
        if stay < 1:
            raise ValueError(f"stay: expected >= 1, given {stay}")
        if not 0 < forgetting <= 1:
            raise ValueError(f"forgetting: expected a number in (0, 1], given {forgetting}")
        if confidence < 0:
            raise ValueError(f"confidence: expected >= 0, given {confidence}")
        self.drafter, self.model = drafter, model
        self.stay, self.forgetting, self.confidence = stay, forgetting, confidence
        count = len(drafter.members)
        self.policies = [policy() for _ in range(count)]
        self._rounds, self._tokens, self._seconds = ([0.0] * count for _ in range(3))
        # Of each drafter: drafted tokens and their seconds, drafts and the seconds of all else.
        self._drafted, self._draft_seconds, self._drafts, self._else_seconds = (
            [0.0] * count for _ in range(4)
        )
        self._left = stay
        self._first: int | None = None  # the request that reports first of its batch
        self._at_work: dict[int, int] = {}  # the drafter of each request's latest round
        self._windows: dict[int, Sequence[int]] = {}  # of each request's first round

    def throughput(self) -> list[float]:
        """Tokens per second of each drafter; NaN where none is known."""
        pairs = zip(self._tokens, self._seconds, strict=True)
        return [tokens / seconds if seconds > 0 else math.nan for tokens, seconds in pairs]

    def next(self, report: RoundReport) -> Sequence[int]:
        """See `WindowPolicy.next`."""
        begins = report.committed == 0 and not report.steps
        if begins:
            self._windows[report.request] = list(report.windows)
            self._at_work.pop(report.request, None)
        else:
            self._learn(report)
        if begins and report.request == 0:
            self._first = 0
            if self.model is not None:
                self._set(self._promising(self.model.predict(report.text)))
        elif self._leads(report):
            self._left -= 1
            if self._left <= 0:
                self._set(self._best())
        return self._choose(report)

    def _leads(self, report: RoundReport) -> bool:
        """Whether the report is the first before a round; rows come in one order."""
        if self._first is None or report.request <= self._first:
            self._first = report.request
        return report.request == self._first

    def _learn(self, report: RoundReport) -> None:
        at = self.drafter.active
        seconds = sum(step.seconds for step in report.steps)
        if seconds <= 0 or len(report.steps) < 2:
            return  # plain decoding says nothing of a drafter
        for table in (self._rounds, self._tokens, self._seconds):
            table[:] = [self.forgetting * value for value in table]
        self._rounds[at] += 1
        self._tokens[at] += report.committed
        self._seconds[at] += seconds
        lowest = max(step.level for step in report.steps)
        drafts = [step for step in report.steps if step.level == lowest]
        spent = sum(step.seconds for step in drafts)
        for table, value in (
            (self._drafted, sum(step.tokens for step in drafts)),
            (self._draft_seconds, spent),
            (self._drafts, len(drafts)),
            (self._else_seconds, seconds - spent),
        ):
            table[at] = self.forgetting * table[at] + value

    def _promising(self, accuracies: Sequence[float]) -> int:
        """The drafter to begin a request with."""

        def rank(at: int) -> tuple[bool, float]:
            if self._drafts[at] == 0:
                return True, accuracies[at]
            token = self._draft_seconds[at] / max(self._drafted[at], 1.0)
            verify = self._else_seconds[at] / self._drafts[at]
            return False, promised_throughput(accuracies[at], token, verify)

        return max(range(len(accuracies)), key=rank)

    def _best(self) -> int:
        speeds, total = self.throughput(), sum(self._rounds)
        known = [speed for speed in speeds if not math.isnan(speed)]
        if not known:
            return self.drafter.active
        bonus = self.confidence * max(known) * math.sqrt(math.log(1 + total))

        def bound(at: int) -> float:
            if math.isnan(speeds[at]) or self._rounds[at] < 1e-3:
                return math.inf
            return speeds[at] + bonus / math.sqrt(self._rounds[at])

        return max(range(len(speeds)), key=bound)

    def _set(self, at: int) -> None:
        self.drafter.active, self._left = at, self.stay

    def _choose(self, report: RoundReport) -> Sequence[int]:
        """The windows of the drafter at work. The rounds of another are not told to its policy,
        which takes the request as one that begins."""
        at, number = self.drafter.active, report.request
        if self._at_work.get(number) != at:
            report = RoundReport(number, self._windows.get(number, report.windows), report.text, 0)
        self._at_work[number] = at
        return self.policies[at].next(report)
