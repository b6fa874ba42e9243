"""Logits processors, applied before the distribution: repetition penalties, banned words, grammars.

A processor changes the distribution, so it must be applied on every level and at every position
alike (contract C1), also at drafted positions that are rejected later. This requires a result that
is a function of the prefix and the scores. `LogitsProcessors` is a chain's interface for
processors; `TransformersProcessors` adapts the `LogitsProcessorList` of `generate` to it, and
`take_apart` removes the warpers that the operators apply themselves.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence, Sized
from typing import Any, NamedTuple

import torch
from transformers import (
    LogitNormalization,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..errors import add_note
from ..sampling import Sampling, processed_scores

# Processors of transformers that a chain cannot apply to drafted positions, with the reason.
REFUSED_PROCESSORS = {
    "ClassifierFreeGuidanceLogitsProcessor": "it mixes the rows of a batch",
    "DiaClassifierFreeGuidanceLogitsProcessor": "it mixes the rows of a batch",
    "DiaEOSChannelFilterLogitsProcessor": "it mixes the rows of a batch",
    "DiaEOSDelayPatternLogitsProcessor": "it counts its calls",
    "HammingDiversityLogitsProcessor": "it compares beams",
    "SynthIDTextWatermarkLogitsProcessor": "it remembers the tokens of its earlier calls",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": (
        "it runs a model (guidance_scale) whose cache follows its calls"
    ),
    "WhisperNoSpeechDetection": "it runs a model",
}
_NEGATIVE = -float("inf")
# Warpers that the operators apply, last to first, and their parameters of `Sampling`.
_WARPERS = (
    (MinPLogitsWarper, "min_p"),
    (TopPLogitsWarper, "top_p"),
    (TopKLogitsWarper, "top_k"),
    (TemperatureLogitsWarper, "temperature"),
)


def _of_transformers(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "transformers"


def require_applicable(processor: Any) -> None:
    """Refuse a processor that cannot be applied out of order: one that is no callable of input_ids
    and scores (TypeError), whose result depends on more than them, or a user's that does not state
    by `function_of_prefix` that it does not (ValueError)."""
    name = type(processor).__name__
    if not callable(processor):
        raise TypeError(f"logits_processor: expected callables, given {name}")
    for base in type(processor).__mro__:
        reason = REFUSED_PROCESSORS.get(base.__name__)
        if reason is not None and _of_transformers(base):
            raise ValueError(
                f"{name}: expected a function of prefix and scores, which a chain can "
                f"apply to drafted positions; {reason}"
            )
    if getattr(processor, "_num_beams", 1) not in (None, 1):
        raise ValueError(f"{name}: expected 1 beam, given {processor._num_beams}")
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(processor).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind not in kinds]
    if len(needed) > 2:
        names = ", ".join(p.name for p in needed[2:])
        raise TypeError(
            f"{name}: expected arguments input_ids and scores, given one that needs {names} as well"
        )
    own = processor
    if _of_transformers(type(processor)):
        own, name = (
            getattr(processor, "_prefix_allowed_tokens_fn", None),
            "prefix_allowed_tokens_fn",
        )
    if own is not None and not getattr(own, "function_of_prefix", False):
        raise ValueError(
            f"{name}: a chain calls it for drafted positions too, row by row; if its result "
            "follows from a row's prefix and scores alone, set its attribute function_of_prefix = "
            "True"
        )


class Parts(NamedTuple):
    """A split processor list: the processors to apply, the sampling of the operators, and whether
    the shown scores are log-probabilities (which changes no distribution)."""

    processors: list[Any]
    sampling: Sampling
    normalize: bool


def take_apart(processors: Sequence[Any], do_sample: bool) -> Parts:
    """Split the processor list that `generate` has prepared.

    The operators' temperature, top-k, top-p and min-p equal transformers' warpers of the same names
    in this order, except for ties at the edge of top-p: the operators keep all tied tokens, the
    warper an arbitrary subset that depends on its sort. Warpers at the end of the list in this
    order are removed. If a processor after or between them needs their result (typical_p,
    eta_cutoff, a watermark, ...), all stay and are applied as processors.

    Args:
        do_sample: False is greedy decoding: temperature 0.

    Raises:
        TypeError, ValueError: as `require_applicable`.
    """
    left = list(processors)
    for processor in left:
        require_applicable(processor)
    normalize = bool(left) and type(left[-1]) is LogitNormalization
    if normalize:
        left.pop()
    if not do_sample:
        return Parts(left, Sampling(temperature=0.0), normalize)
    parameters = {}
    for kind, name in _WARPERS:
        last = left[-1] if left else None
        usual = getattr(last, "filter_value", _NEGATIVE) == _NEGATIVE
        if type(last) is kind and usual and getattr(last, "min_tokens_to_keep", 1) == 1:
            parameters[name] = getattr(left.pop(), name)
    return Parts(left, Sampling(**parameters), normalize)


def shown_scores(logits: torch.Tensor, parts: Parts) -> torch.Tensor:
    """Return scores ``[e, V]`` float32 as `generate` shows them (`processed_scores`)."""
    scores = processed_scores(logits, parts.sampling)
    return scores.log_softmax(-1) if parts.normalize else scores


class _Step(NamedTuple):
    """A processor for a single row. `rows`: number of rows that it is called with."""

    call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    rows: int
    name: str


class TransformersProcessors:
    """Processors of `transformers` as `LogitsProcessors`.

    Their inputs are the same as in `generate`: float32 scores of the target's vocabulary, on the
    device of input_ids, and prefixes padded on the left. A row's scores must follow from its prefix
    and scores alone, which a user's processor states by the attribute `function_of_prefix`.
    Processors of transformers with an entry for each row are called with copies of the row for the
    whole batch.

    A draft level's smaller vocabulary is padded with -inf. If a processor fails on a drafted text,
    or leaves a draft level no token, the level drafts from its unprocessed logits. This is exact:
    drafts may have any distribution that is known, and the target verifies by its processed logits.

    Args:
        processors: in the order of application, those of `take_apart`.
        vocab_size: V of the target.
        padding: per row ``[P_b]`` int64, P_b >= 0: ids left of the prompt.
        committed: per row, the number of tokens that the target has committed, at first those of
            the prompt; the caller updates it. Later positions are drafted.
        eos: the ids that end a text.
        keep: store the unprocessed logits of the latest call per row in `given`.
    """

    def __init__(
        self,
        processors: Sequence[Any],
        *,
        vocab_size: int,
        padding: Sequence[torch.Tensor],
        committed: Sequence[int],
        eos: frozenset[int],
        keep: bool = False,
    ) -> None:
        self._vocab_size, self._eos = vocab_size, eos
        self._padding = [ids.to(torch.int64) for ids in padding]
        self._prompts, self._committed = list(committed), committed
        self._device = padding[0].device
        rows = range(len(padding))
        self._steps = [[_step(p, row, len(padding)) for p in processors] for row in rows]
        self._keep, self.given = keep, dict[int, torch.Tensor]()

    # The chain runs in inference mode, but processors cache tensors and may be used outside of it.
    @torch.inference_mode(False)
    @torch.no_grad()
    def apply(self, logits: torch.Tensor, prefix: torch.Tensor, row: int) -> torch.Tensor:
        """Apply the processors as `LogitsProcessors.apply`; float32.

        Raises:
            ValueError: a processor does not return scores. A processor's errors are raised with a
                note of processor, request and position, unless no text can reach the position.
        """
        count, width = logits.shape
        if self._keep:
            self.given[row] = logits
        # A copy: processors may write into it, and the level reads its logits again.
        plain = logits.to(self._device, torch.float32, copy=True)
        short = self._vocab_size - width
        scores = torch.nn.functional.pad(plain, (0, short), value=_NEGATIVE) if short else plain
        ids = torch.cat([self._padding[row], prefix.to(self._device, torch.int64)])[None]
        first = ids.shape[1] - count + 1  # length of the first row's prefix
        failed: Exception | None = None
        for step in self._steps[row]:
            done: list[torch.Tensor] = []
            for i in range(scores.shape[0]):
                try:
                    seen = ids[:, : first + i].repeat(step.rows, 1)
                    repeated = scores[i : i + 1].repeat(step.rows, 1)
                    out = self._call(step, seen, repeated, row, first + i)
                except Exception as error:
                    failed = error
                    break
                done.append(out[row : row + 1] if step.rows > 1 else out)
            scores = torch.cat(done) if done else scores[:0]
        scores = scores[:, :width]
        drafting = short > 0 or first - len(self._padding[row]) > self._committed[row]
        if failed is not None:
            if not drafting and not self._void(scores, ids[0], first, row):
                raise failed
            scores = torch.cat([scores, plain[scores.shape[0] :]])
        if drafting:
            scores = torch.where(torch.isneginf(scores).all(-1, keepdim=True), plain, scores)
        return scores.to(logits.device)

    def _call(
        self, step: _Step, ids: torch.Tensor, scores: torch.Tensor, row: int, length: int
    ) -> torch.Tensor:
        try:
            out = step.call(ids, scores)
            if not isinstance(out, torch.Tensor) or out.shape != scores.shape:
                shape = list(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
                raise ValueError(
                    f"{step.name}: expected to return scores of shape {list(scores.shape)}, given "
                    f"{shape}"
                )
        except Exception as error:
            position = length - len(self._padding[row])
            add_note(error, f"in {step.name}, request {row}, position {position}")
            raise
        return out.float()

    def _void(self, scores: torch.Tensor, ids: torch.Tensor, first: int, row: int) -> bool:
        reached = first + len(scores)
        begin = len(self._padding[row]) + self._prompts[row]
        if not self._eos.isdisjoint(ids[begin:reached].tolist()):
            return True
        drafted = ids[first:reached, None]
        return bool(torch.isneginf(scores.gather(1, drafted)).any())


def _step(processor: Any, row: int, count: int) -> _Step:
    """Return the step of a processor for row `row` of `count`."""
    name, rows = type(processor).__name__, 1
    if _of_transformers(type(processor)):
        ignored = getattr(processor, "prompt_ignore_length", None)
        if isinstance(ignored, torch.Tensor) and ignored.shape == (count,):
            processor = copy.copy(processor)
            processor.prompt_ignore_length = int(ignored[row])
        allowed = getattr(processor, "_prefix_allowed_tokens_fn", None)
        if allowed is not None and hasattr(processor, "_num_beams"):
            processor = copy.copy(processor)
            processor._prefix_allowed_tokens_fn = lambda _, sent: allowed(row, sent)
        elif any(_by_row(value, count) for value in vars(processor).values()):
            rows = count
    return _Step(processor, rows, name)


def _by_row(value: Any, count: int) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() > 0 and value.shape[0] == count
    return callable(value) or (isinstance(value, Sized) and len(value) == count)
