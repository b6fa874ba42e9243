"""Windows alone, the drafter alone, and both, chosen while a chain runs: replays of recorded texts
behind the shipped target with three drafters, one of them without a model (`replay`).

What is fixed before a run, and the model of accuracies by features of the prompt, comes from the
texts for tuning.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from polyspec_ext import policies
from polyspec_ext.bench.replay import Costs, Members, Run, Trace, replay, replay_choice
from polyspec_ext.bench.traces import LOOKUP, Text
from polyspec_ext.policies import AccuracyModel, DrafterChoice, PromptFeatures

DRAFTERS = ("drafter", "middle", LOOKUP)
MAX_WINDOW = 12  # tokens of a window
WORDS = 16  # of TF-IDF
FOR_GOOD = 10**9  # rounds: the drafter of a request's first stays
GROUPS = ("length", "perplexity", "tf-idf")


class Field:
    """Texts as each drafter of `DRAFTERS` sees them, and what its steps cost.

    Args:
        seconds: as `Traces` has them.
    """

    def __init__(self, texts: Sequence[Text], seconds: dict[str, dict[int, float]]) -> None:
        self.texts = [[Trace(text, ("target", name)) for name in DRAFTERS] for text in texts]
        self.costs = [
            Costs([seconds["target"], seconds[name]], at_once=name == LOOKUP) for name in DRAFTERS
        ]

    def alone(self, drafter: int, window: int) -> Run:
        """One drafter and one window."""
        return replay([own[drafter] for own in self.texts], self.costs[drafter], None, [window])

    def adapted(self, drafter: int, window: int) -> Run:
        """One drafter, windows by `joint`."""
        policy = policies.Joint(max_windows=[MAX_WINDOW])
        return replay([own[drafter] for own in self.texts], self.costs[drafter], policy, [window])

    def chosen(
        self,
        first: int,
        window: int,
        policy: Callable[[], policies.WindowPolicy],
        model: AccuracyModel | None = None,
        stay: int = 4,
    ) -> Run:
        """The drafter chosen while it runs; `first` is at work at first."""
        members = Members(DRAFTERS, first)
        choice = DrafterChoice(members, policy, model=model, stay=stay)
        return replay_choice(self.texts, self.costs, choice, members, [window])

    def best(self) -> tuple[int, int]:
        """The drafter and window of the most tokens per second on these texts."""
        pairs = [(d, w) for d in range(len(DRAFTERS)) for w in range(MAX_WINDOW + 1)]
        return max(pairs, key=lambda pair: self.alone(*pair).speed)


def features_of(groups: Sequence[str], texts: Sequence[Text]) -> PromptFeatures:
    """The features of some of `GROUPS`; perplexities are those recorded."""
    known = {tuple(text.prompt): text.perplexity for text in texts}
    return PromptFeatures(
        (lambda prompt: known[tuple(prompt)]) if "perplexity" in groups else None,
        WORDS if "tf-idf" in groups else 0,
        length="length" in groups,
    )


def fitted(
    groups: Sequence[str], tuning: Sequence[Text], others: Sequence[Text], field: Field
) -> AccuracyModel:
    """The model by features of some of `GROUPS`, by least squares.

    Args:
        tuning: texts that it is fitted on; `field`: of these.
        others: those that it will be asked about.
    """
    accuracies = [[trace.accuracy for trace in traces] for traces in field.texts]
    model = AccuracyModel(features_of(groups, [*tuning, *others]))
    # A request's report has the prompt alone, as it begins.
    return model.fit([text.prompt for text in tuning], accuracies)


def drafter_ablation(
    tuning: Sequence[Text], texts: Sequence[Text], seconds: dict[str, dict[int, float]]
) -> dict[str, dict[str, float]]:
    """Tokens per second on `texts`, by what is chosen, and with both chosen by the features of the
    accuracy model; without scikit-learn none of TF-IDF."""
    prior, field = Field(tuning, seconds), Field(texts, seconds)
    drafter, window = prior.best()
    groups: tuple[str, ...] = GROUPS[:-1]
    with contextlib.suppress(ImportError):
        features_of(GROUPS, tuning)
        groups = GROUPS

    def model(chosen: Sequence[str]) -> AccuracyModel:
        return fitted(chosen, tuning, texts, prior)

    def joint() -> policies.WindowPolicy:
        return policies.Joint(max_windows=[MAX_WINDOW])

    def least_squares(chosen: Sequence[str], policy: Callable[[], policies.WindowPolicy]) -> float:
        return field.chosen(drafter, window, policy, model(chosen), FOR_GOOD).speed

    fixed, every = policies.Fixed, list(groups)
    best_of_each = [
        max(_every_choice(field, traces), key=lambda run: run.speed) for traces in field.texts
    ]
    what = {
        f"{name}, window {best}": field.alone(number, best).speed
        for number, name in enumerate(DRAFTERS)
        for best in [max(range(MAX_WINDOW + 1), key=lambda w: prior.alone(number, w).speed)]
    }
    what |= {
        f"window only ({DRAFTERS[drafter]})": field.adapted(drafter, window).speed,
        "drafter only, bandit": field.chosen(drafter, window, fixed).speed,
        "drafter only, least squares": least_squares(every, fixed),
        "both, bandit": field.chosen(drafter, window, joint).speed,
        "both, least squares": least_squares(every, joint),
        "both, least squares, then bandit": field.chosen(
            drafter, window, joint, model(every)
        ).speed,
        "best drafter and window of each text, in hindsight": _together(best_of_each),
    }
    sets: list[list[str]] = [[], *([one] for one in every)]
    sets += [[other for other in every if other != one] for one in every] if len(every) > 2 else []
    sets.append(every)
    by_features = {" + ".join(each) or "none": least_squares(each, joint) for each in sets}
    return {"chosen": what, "features": by_features}


def _every_choice(field: Field, traces: Sequence[Trace]) -> list[Run]:
    """One text, as each drafter sees it, with every drafter and window."""
    return [
        replay([trace], costs, None, [window])
        for trace, costs in zip(traces, field.costs, strict=True)
        for window in range(MAX_WINDOW + 1)
    ]


def _together(runs: Sequence[Run]) -> float:
    return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)
