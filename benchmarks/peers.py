"""The peers of each operator, as far as they can be imported.

Each starts from the same logits in the same dtype and does the work of the same call. Where a peer
needs less than a whole call would (its drafts filtered beforehand, one batch of filters where the
library calls them per position), it gets the benefit.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from benchmarks import cost, rules, vllm_kernels
from benchmarks.grid import Filters
from benchmarks.inputs import Feed
from benchmarks.timing import Contender

LOOP_LIMIT = 8  # largest batch at which a batch-1 peer is called once per request

TRANSFORMERS = "transformers _speculative_sampling"
WARPERS = "transformers warpers + multinomial"
LOGSUMEXP = "torch.logsumexp, K+1 rows"
SORT = "torch.sort filter + multinomial"
MULTINOMIAL = "torch softmax + multinomial"
EAGER = "eager torch"
COMPILED = "torch.compile"
FLASHINFER = "FlashInfer"
VLLM = vllm_kernels.NAME


def contenders(feed: Feed, *, compiled: bool) -> tuple[list[Contender], list[str]]:
    """The peers of a case's operator on these inputs, and notes on those that are left out."""
    notes: list[str] = []
    if feed.case.operator == "sample":
        made = _sampling(feed, compiled)
    else:
        made = _verifying(feed, compiled)
    if feed.case.operator == "verify-block":
        return made, notes
    libraries = {TRANSFORMERS: _transformers, VLLM: _vllm, FLASHINFER: _flashinfer}
    for name, make in libraries.items():
        try:
            made += make(feed)
        except Exception as error:  # a wheel for another torch fails in its own ways
            notes.append(f"{name}: {error}".splitlines()[0])
    return made, notes


def warpers(filters: Filters) -> Callable[[torch.Tensor], torch.Tensor]:
    """transformers' logits processors for the filters, on scores [n, V] fp32."""
    from transformers.generation import logits_process

    chain: list[Any] = []
    if filters.top_k:
        chain.append(logits_process.TopKLogitsWarper(filters.top_k))
    if filters.top_p < 1:
        chain.append(logits_process.TopPLogitsWarper(filters.top_p))
    if filters.min_p:
        chain.append(logits_process.MinPLogitsWarper(filters.min_p))

    def apply(scores: torch.Tensor) -> torch.Tensor:
        for warper in chain:
            scores = warper(None, scores)
        return scores

    return apply


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()  # shapes seen before count against its limit; past it, it runs eagerly
    return torch.compile(function, dynamic=False, fullgraph=True)


def _sampling(feed: Feed, compiled: bool) -> list[Contender]:
    logits, filters = feed.target[:, -1], feed.case.filters
    made = []
    if filters.off:
        made.append(Contender(MULTINOMIAL, lambda: logits.float().softmax(-1).multinomial(1)))
    else:
        warp = warpers(filters)
        made.append(Contender(SORT, lambda: rules.sort_sample(logits, filters)))
        made.append(
            Contender(WARPERS, lambda: warp(logits.float()).softmax(-1).multinomial(1), graph=False)
        )
    made.append(Contender(EAGER, lambda: rules.sample(logits, filters)))
    if compiled:
        quick = _compile(lambda z: rules.sample(z, filters))
        made.append(Contender(COMPILED, partial(quick, logits)))
    return made


def _verifying(feed: Feed, compiled: bool) -> list[Contender]:
    filters = feed.case.filters
    rule = rules.block_rule if feed.case.operator == "verify-block" else rules.token_rule
    by_name: dict[str, Callable[..., Any]] = {EAGER: lambda z, y, w: rule(z, y, w, filters)}
    if compiled:
        by_name[COMPILED] = _compile(by_name[EAGER])
    moved = cost.logsumexp_bytes(feed.case)
    return [
        Contender(LOGSUMEXP, lambda: feed.target.logsumexp(-1), bytes=moved),
        *(
            Contender(
                name, partial(call, feed.target, feed.tokens, feed.draft), accepted=itemgetter(1)
            )
            for name, call in by_name.items()
        ),
    ]


def transformers_rule(feed: Feed) -> Callable[[], list[tuple[torch.Tensor, torch.Tensor]]]:
    """transformers' token rule over a feed, one request after the other: (tokens [1, n+1], n) each.

    ImportError where this release has it no more: it is not a public function.
    """
    from transformers.generation.utils import _speculative_sampling

    case = feed.case
    k = case.draft_len
    warp = warpers(case.filters)
    draft = warp(feed.draft.float().flatten(0, 1)).view_as(feed.draft)

    def call() -> list[tuple[torch.Tensor, torch.Tensor]]:
        verified = []
        for i in range(case.batch):
            target = warp(feed.target[i].float())
            verified.append(
                _speculative_sampling(feed.tokens[i : i + 1], draft[i : i + 1], k, target[None])
            )
        return verified

    return call


def _transformers(feed: Feed) -> list[Contender]:
    if feed.case.operator == "sample" or feed.case.batch > LOOP_LIMIT:
        return []
    name = TRANSFORMERS if feed.case.batch == 1 else f"{TRANSFORMERS}, one by one"

    def counts(verified: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        return torch.stack([n for _, n in verified])

    return [Contender(name, transformers_rule(feed), graph=False, accepted=counts)]


def _vllm(feed: Feed) -> list[Contender]:
    if feed.case.draft_len == 0 or feed.target.device.type != "cpu":
        return []
    call = vllm_kernels.verifier(vllm_kernels.load(), feed)
    return [Contender(VLLM, call, graph=False, accepted=itemgetter(1))]


def _flashinfer(feed: Feed) -> list[Contender]:
    if feed.target.device.type != "cuda":
        return []
    sampling = importlib.import_module("flashinfer.sampling")
    if feed.case.operator == "sample":
        return [Contender(FLASHINFER, partial(_flashinfer_sample, sampling, feed))]
    if feed.case.filters.min_p:
        raise ValueError("min-p has no renormalisation for chain_speculative_sampling")
    call = partial(_flashinfer_verify, sampling, feed)
    return [Contender(FLASHINFER, call, accepted=itemgetter(2))]


def _flashinfer_sample(sampling: Any, feed: Feed) -> Any:
    logits, filters = feed.target[:, -1].float(), feed.case.filters
    if filters.off:
        return sampling.sampling_from_logits(logits)
    if filters.top_k and not filters.min_p:
        return sampling.top_k_top_p_sampling_from_logits(logits, filters.top_k, filters.top_p)
    probs = _flashinfer_renorm(sampling, logits.softmax(-1), filters)
    if filters.min_p:
        return sampling.min_p_sampling_from_probs(probs, filters.min_p)
    return sampling.sampling_from_probs(probs)


def _flashinfer_renorm(sampling: Any, probs: torch.Tensor, filters: Filters) -> torch.Tensor:
    flat = probs.view(-1, probs.shape[-1])
    if filters.top_k:
        flat = sampling.top_k_renorm_probs(flat, filters.top_k)
    if filters.top_p < 1:
        flat = sampling.top_p_renorm_probs(flat, filters.top_p)
    return flat.view_as(probs)


def _flashinfer_verify(sampling: Any, feed: Feed) -> Any:
    target = _flashinfer_renorm(sampling, feed.target.float().softmax(-1), feed.case.filters)
    draft = _flashinfer_renorm(sampling, feed.draft.float().softmax(-1), feed.case.filters)
    return sampling.chain_speculative_sampling(draft, feed.tokens.int(), target)
