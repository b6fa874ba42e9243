"""Statistics of finished requests for Prometheus, through `prometheus-client` (an optional extra:
``pip install polyspec_ext[metrics]``).

    collector = RequestCollector()
    prometheus_client.REGISTRY.register(collector)
    ...
    collector.add(chain.generate(input_ids).stats)

Names follow vLLM's, with this package's prefix; the labels ``level`` (1 is the target) and
``model`` identify a level. The mean acceptance length over any time is
``1 + rate(..._num_accepted_tokens_total) / rate(..._num_drafts_total)``.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..stats import Stats, merge

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_NAME = "polyspec_spec_decode"
# Counters of a level: attribute and help text.
_LEVEL = (
    ("num_forward_passes", "Forward passes while decoding."),
    ("num_verifications", "Blocks verified, empty ones included."),
    ("num_drafts", "Blocks verified that had at least one token."),
    ("num_draft_tokens", "Draft tokens verified."),
    ("num_accepted_tokens", "Draft tokens accepted."),
    ("num_emitted_tokens", "Tokens handed up, or committed by the target."),
    ("num_proposals", "Times that the drafter was asked."),
    ("num_proposed_tokens", "Tokens drawn by the drafter."),
    ("num_tails", "Blocks verified that ended in a tail."),
    ("num_tail_tokens", "Draft tokens verified that only the drafter had seen before."),
    ("num_accepted_tail_tokens", "Of these, accepted."),
    ("seconds", "Decoding time spent in the level."),
    ("prefill_seconds", "Time the level spent reading prompts."),
)
_LEVEL_POSITIONS = (
    ("num_draft_tokens_per_pos", "Blocks that had a token at this position."),
    ("num_accepted_tokens_per_pos", "Blocks whose token at this position was accepted."),
)
_TOTALS = (
    ("num_requests", "Requests finished."),
    ("num_prompt_tokens", "Prompt tokens of finished requests."),
    ("num_cached_tokens", "Of these, tokens that were in the caches already."),
    ("num_new_tokens", "Tokens generated."),
    ("decode_seconds", "Decoding time."),
    ("overhead_seconds", "Decoding time outside the levels."),
)


class RequestCollector:
    """A collector of prometheus-client over the requests passed to `add`. Threads may add and
    scrape at the same time.

    Raises:
        ImportError: prometheus-client is missing; says how to install it.
    """

    def __init__(self) -> None:
        try:
            from prometheus_client import core
        except ImportError as error:
            raise ImportError(
                "Prometheus metrics need the package prometheus-client; install it with: "
                "pip install prometheus-client"
            ) from error
        self._core = core
        self._lock = threading.Lock()
        # In total, and by level and model of all chains. One assignment replaces both (interrupts).
        self._sums: tuple[Stats, dict[tuple[str, str], Stats]] = Stats([], num_requests=0), {}

    def add(self, stats: Stats) -> None:
        """Count a finished request or batch: ``out.stats``, not each of ``out.requests``, because
        their times overlap."""
        with self._lock:
            total, known = self._sums
            levels = dict(known)
            for number, level in enumerate(stats.levels, 1):
                key, added = (str(number), level.name), Stats([level])
                levels[key] = merged = merge([levels[key], added] if key in levels else [added])
                # The list would grow with every text.
                merged.levels[0].emitted_per_verification = None
            self._sums = merge([total, replace(stats, levels=[])]), levels

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that a scrape reads."""
        total, by_level = self._sums  # sums are replaced, never changed
        levels = {key: stats.levels[0] for key, stats in by_level.items()}
        total = replace(total, levels=list(levels.values()))
        counter, labels = self._core.CounterMetricFamily, ["level", "model"]
        for name, text in _TOTALS:
            # Clocks are read at different times, so differences may be slightly below 0.
            yield counter(f"polyspec_{name}", text, value=max(0, getattr(total, name)))
        for name, text in _LEVEL:
            # "..._seconds" alone is taken by the totals.
            full = f"polyspec_level_{name}" if "seconds" in name else f"{_NAME}_{name}"
            family = counter(full, text, labels=labels)
            for key, level in levels.items():
                family.add_metric(key, getattr(level, name))
            yield family
        for name, text in _LEVEL_POSITIONS:
            family = counter(f"{_NAME}_{name}", text, labels=[*labels, "position"])
            for key, level in levels.items():
                for position, count in enumerate(getattr(level, name)):
                    family.add_metric([*key, str(position)], count)
            yield family
        name, text = f"{_NAME}_accepted_tokens_per_draft", "Draft tokens accepted of a block."
        family = self._core.HistogramMetricFamily(name, text, labels=labels)
        for key, level in levels.items():
            if level.num_drafts:
                below = list(itertools.accumulate(level.acceptance_histogram))
                buckets = [(str(float(n)), float(count)) for n, count in enumerate(below)]
                family.add_metric(key, [*buckets, ("+Inf", below[-1])], level.num_accepted_tokens)
        yield family


# ---- an endpoint ---------------------------------------------------------------------------------


_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("From the arrival of a request to its first token.", _SECONDS),
    "inter_token_latency_seconds": ("Between two tokens of a request.", _SECONDS),
    "e2e_request_latency_seconds": ("From the arrival of a request to its end.", _SECONDS),
    "request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS),
    "request_generation_tokens": ("New tokens of a request.", _TOKENS),
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of finished requests.",
    "generation_tokens": "New tokens.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "spec_decode_num_drafts": "Blocks verified by the target that had at least one token.",
    "spec_decode_num_draft_tokens": "Draft tokens verified by the target.",
    "spec_decode_num_accepted_tokens": "Draft tokens accepted by the target.",
}


class Metrics:
    """Metrics of the endpoint of a `Server`: vLLM's, labelled with the name `model`, and those of
    `RequestCollector` for each level."""

    def __init__(self, model: str, server: Any) -> None:
        import prometheus_client as client  # of the extra `server`

        self._client, self._registry = client, client.CollectorRegistry()
        self._levels = RequestCollector()
        self._registry.register(self._levels)

        def series(kind: Any, name: str, text: str, label: str = "", **options: Any) -> Any:
            labels = ["model_name", label] if label else ["model_name"]
            family = kind(f"vllm:{name}", text, labels, registry=self._registry, **options)
            return family if label else family.labels(model)

        for name, text in (("running", "Requests that run."), ("waiting", "Requests that wait.")):
            gauge = series(client.Gauge, f"num_requests_{name}", text)
            gauge.set_function(lambda name=name: getattr(server, name))
        self._model = model
        self._counters = {
            name: series(client.Counter, name, text) for name, text in _COUNTERS.items()
        }
        self._histograms = {
            name: series(client.Histogram, name, text, buckets=bounds)
            for name, (text, bounds) in _HISTOGRAMS.items()
        }
        text, label = "Requests that ended.", "finished_reason"
        self._reasons = series(client.Counter, "request_success", text, label)
        for reason in ("stop", "length", "abort", "error"):
            self._reasons.labels(model, reason)  # 0 before the first
        name, text = "spec_decode_num_accepted_tokens_per_pos", "Accepted, by position in a draft."
        self._positions = series(client.Counter, name, text, "position")

    def tokens(self, count: int, seconds: float, first: bool) -> None:
        """Count tokens that arrived together, `seconds` after the tokens before; the `first` of a
        request, after its arrival."""
        self._counters["generation_tokens"].inc(count)
        if first:
            self._histograms["time_to_first_token_seconds"].observe(seconds)
            return
        for _ in range(count):
            self._histograms["inter_token_latency_seconds"].observe(seconds / count)

    def finished(
        self, reason: str, prompt: int, new: int, seconds: float, stats: Stats | None
    ) -> None:
        """Count a request that has ended by `reason` (`Event.finish_reason`) after `seconds`, with
        `prompt` and `new` tokens; `stats`: None where it did not run to its end."""
        self._reasons.labels(self._model, reason).inc()
        for name, value in (
            ("e2e_request_latency_seconds", seconds),
            ("request_prompt_tokens", prompt),
            ("request_generation_tokens", new),
        ):
            self._histograms[name].observe(value)
        counts = {"prompt_tokens": prompt}
        if stats is not None:
            target = stats.levels[0]
            counts["prefix_cache_queries"] = stats.num_prompt_tokens
            counts["prefix_cache_hits"] = stats.num_cached_tokens
            for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
                counts[f"spec_decode_{name}"] = getattr(target, name)
            for position, accepted in enumerate(target.num_accepted_tokens_per_pos):
                self._positions.labels(self._model, position).inc(accepted)
            self._levels.add(stats)
        for name, count in counts.items():
            self._counters[name].inc(count)

    def text(self) -> str:
        """Return all series in Prometheus's text format."""
        text: bytes = self._client.generate_latest(self._registry)
        return text.decode()
