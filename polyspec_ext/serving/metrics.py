"""Metrics of the endpoint under vLLM's names, through `prometheus-client`, and the speculation of
an answer in vLLM's format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..integrations.prometheus import RequestCollector
from ..stats import Stats, merge
from .server import Server

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


def speculative_decoding(requests: Sequence[Stats]) -> dict[str, Any]:
    """Return what the target accepted in the requests of an answer, in vLLM's format. Means over
    no drafts are None."""
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


class Metrics:
    """Metrics of an endpoint: vLLM's, and those of `RequestCollector` for each level.

    Args:
        model: name that labels every series of vLLM's.
        server: that runs the requests.
    """

    def __init__(self, model: str, server: Server) -> None:
        import prometheus_client as client  # of the extra `server`

        self._registry = client.CollectorRegistry()
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
        """Count tokens that arrived together.

        Args:
            count: >= 1.
            seconds: since the tokens before, or, of the `first`, since the request's arrival.
            first: of the request.
        """
        self._counters["generation_tokens"].inc(count)
        if first:
            self._histograms["time_to_first_token_seconds"].observe(seconds)
            return
        for _ in range(count):
            self._histograms["inter_token_latency_seconds"].observe(seconds / count)

    def finished(
        self, reason: str, prompt: int, new: int, seconds: float, stats: Stats | None
    ) -> None:
        """Count a request that has ended.

        Args:
            reason: `Event.finish_reason`.
            prompt, new: tokens of the prompt and of the answer.
            seconds: from arrival to end.
            stats: None where the request did not run to its end.
        """
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
        from prometheus_client import generate_latest

        text: bytes = generate_latest(self._registry)
        return text.decode()
