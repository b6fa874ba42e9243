"""Counts of an endpoint, as text for Prometheus in vLLM's names, and per answer in its format."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..stats import LevelStats, Stats, merge

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token.", _SECONDS),
    "inter_token_latency_seconds": ("From tokens to the next, by the number of these.", _SECONDS),
    "e2e_request_latency_seconds": ("From a request's arrival to its end.", _SECONDS),
    "request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS),
    "request_generation_tokens": ("New tokens of a request.", _TOKENS),
}
_REASONS = ("stop", "length", "abort", "error")
# Counters of levels: attribute of `LevelStats` and what it counts.
_LEVEL = (
    ("num_drafts", "Blocks verified that had at least one token."),
    ("num_draft_tokens", "Draft tokens verified."),
    ("num_accepted_tokens", "Draft tokens accepted."),
)


def speculative_decoding(requests: Sequence[Stats]) -> dict[str, Any]:
    """Return what the target accepted in the requests of an answer, in vLLM's format. Means of no
    draft are None."""
    target = merge(requests).levels[0]
    return {
        "mean_acceptance_length": _defined(target.mean_acceptance_length),
        "draft_acceptance_rate": _defined(target.draft_acceptance_rate),
        "acceptance_histogram": target.acceptance_histogram,
        "num_spec_steps": target.num_drafts,
        "num_accepted_draft_tokens": target.num_accepted_tokens,
        "num_draft_tokens": target.num_draft_tokens,
        "num_spec_tokens": max(0, len(target.acceptance_histogram) - 1),
    }


def _defined(value: float) -> float | None:
    return None if math.isnan(value) else value


class _Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def lines(self, name: str, labels: str) -> Iterator[str]:
        below = 0
        for bound, count in zip([*self.bounds, "+Inf"], self.counts, strict=True):
            below += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {below}'
        yield f"{name}_sum{{{labels}}} {self.sum}"
        yield f"{name}_count{{{labels}}} {below}"


class Metrics:
    """Counts of the requests of an endpoint.

    Args:
        model: name that labels every series.
        names: of the chain's levels.
    """

    def __init__(self, model: str, names: Sequence[str]) -> None:
        self._labels = f'model_name="{_escaped(model)}"'
        self._reasons = dict.fromkeys(_REASONS, 0)
        self._tokens = {"prompt": 0, "generation": 0}
        self._histograms = {name: _Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._sum = Stats([LevelStats(name) for name in names])

    def tokens(self, count: int, seconds: float, first: bool) -> None:
        """Count tokens that came so many seconds after those before them, or, the first of a
        request, after its arrival."""
        self._tokens["generation"] += count
        if first:
            self._histograms["time_to_first_token_seconds"].add(seconds)
        else:
            self._histograms["inter_token_latency_seconds"].add(seconds / count, count)

    def finished(
        self, reason: str, prompt: int, new: int, seconds: float, stats: Stats | None
    ) -> None:
        """Count a request that has ended, with tokens of its prompt and its answer."""
        self._reasons[reason] += 1
        self._tokens["prompt"] += prompt
        for name, value in (
            ("e2e_request_latency_seconds", seconds),
            ("request_prompt_tokens", prompt),
            ("request_generation_tokens", new),
        ):
            self._histograms[name].add(value)
        if stats is not None:
            self._sum = merge([self._sum, stats])
            for level in self._sum.levels:
                level.emitted_per_verification = None  # which grows with the text

    def text(self, running: int, waiting: int) -> str:
        """Return all in Prometheus's text format."""
        return "\n".join([*self._lines(running, waiting), ""])

    def _lines(self, running: int, waiting: int) -> Iterator[str]:
        label, total = self._labels, self._sum
        plain = ((label, running),)
        yield from _family("num_requests_running", "gauge", "Requests that run.", plain)
        plain = ((label, waiting),)
        yield from _family("num_requests_waiting", "gauge", "Requests that wait.", plain)
        for kind, count in self._tokens.items():
            text = f"Tokens of {'prompts' if kind == 'prompt' else 'answers'}."
            yield from _family(f"{kind}_tokens_total", "counter", text, ((label, count),))
        reasons = [
            (f'{label},finished_reason="{reason}"', count)
            for reason, count in self._reasons.items()
        ]
        yield from _family("request_success_total", "counter", "Requests that ended.", reasons)
        for name, count, text in (
            ("prefix_cache_queries_total", total.num_prompt_tokens, "Prompt tokens looked up."),
            ("prefix_cache_hits_total", total.num_cached_tokens, "Of these, in the caches."),
        ):
            yield from _family(name, "counter", text, ((label, count),))
        target = total.levels[0]
        for name, text in _LEVEL:
            values = [(label, getattr(target, name))]
            yield from _family(f"spec_decode_{name}_total", "counter", text, values)
            levels = [
                (f'{label},level="{number}",name="{_escaped(level.name)}"', getattr(level, name))
                for number, level in enumerate(total.levels, 1)
            ]
            yield from _family(f"level_{name}_total", "counter", text, levels, "polyspec")
        positions = [
            (f'{label},position="{position}"', count)
            for position, count in enumerate(target.num_accepted_tokens_per_pos)
        ]
        name, text = "spec_decode_num_accepted_tokens_per_pos_total", "Accepted, by position."
        yield from _family(name, "counter", text, positions)
        for name, histogram in self._histograms.items():
            yield from _family(name, "histogram", _HISTOGRAMS[name][0], ())
            yield from histogram.lines(f"vllm:{name}", label)


def _family(
    name: str,
    kind: str,
    text: str,
    values: Iterable[tuple[str, float]],
    prefix: str = "vllm",
) -> Iterator[str]:
    yield f"# HELP {prefix}:{name} {text}"
    yield f"# TYPE {prefix}:{name} {kind}"
    for labels, value in values:
        yield f"{prefix}:{name}{{{labels}}} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
