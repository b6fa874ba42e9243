"""Test of a new level: whether cached passes give the logits of a single pass over the whole text.

A model may accept every argument that a level passes and still take positions from cache slots,
causality from the shape of its keys, or fail when several tokens follow cached tokens. So a new
level is tried once with the calls of a chain: a prompt, passes of several tokens, rollbacks, rows
of different lengths with some idle, and a tree, on a few tokens. Behaviour that occurs only in
longer texts is not covered, except as the configuration states it (`switch_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..tensors import RowCounts, padded
from .base import InputBlock
from .models import has_quantised_layers

# Maximum difference of a row of logits from its reference, as a fraction of its spread: the
# tolerance, or a few times the model's rounding difference when a batch has another row, which is
# large where a pass quantises activations. A wrong mask or position causes more.
_TOLERANCE, _TOLERANCE_HALF = 0.02, 0.1
_TIMES, _MOST = 4.0, 0.3
# Quantised layers may round activations to 8 bits, where a last-bit difference of a float moves a
# value by a whole step. Few passes show that, so embeddings are changed by this fraction, in so
# many rows: enough to move some values by a step, negligible in floats. So few rows do not show the
# maximum: a model of 1.5B parameters was refused for 1.3 times as much.
_NUDGE, _NUDGED, _MARGIN = 1e-4, 4, 2.0
# Logits so far below the largest do not matter, and logits of masked ids are not finite.
_REACH = 60.0

_SHORTEST = 14  # tokens; a model with a shorter context is not tested


class Step(NamedTuple):
    """A pass of a test: row b reads up to ``kept[b]`` tokens, then ``wrong[b]`` wrong tokens, which
    a rollback removes; with `again`, after a further pass over so many wrong tokens."""

    kept: tuple[int, ...]
    wrong: tuple[int, ...]
    again: int = 0


class Probe:
    """Comparison of a level's cached passes with a single pass of its model over a text.

    Args:
        level: a `BatchedLevel` of a model of `transformers`.
        begin: empties the cache for a number of rows and tokens.
        whole: returns the logits ``[B, T, V]`` of a single pass over ids ``[B, T]``.
        length: number of tokens of the text.
    """

    def __init__(
        self, level: Any, begin: Callable[[int, int], Any], whole: Callable[[Tensor], Tensor],
        length: int,
    ) -> None:  # fmt: skip
        self._level, self._begin, self._whole = level, begin, whole
        # Ids that both embeddings and head have.
        embeddings = level.model.get_input_embeddings()
        size: int = level.vocab_size
        self._ids = min(getattr(embeddings, "num_embeddings", size), size)
        self._text = torch.arange(1, length + 1) * 7919 % self._ids
        self._reference: Tensor | None = None
        self._tolerance = 0.0

    @torch.inference_mode()
    def failure(self, differ: Callable[[], float]) -> str | None:
        """Return why a model fails: `differ` returns too large a difference of logits, or raises an
        exception; None: the model passes."""
        try:
            if self._reference is None:
                self._reference = self._refer()
            worst = differ()
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:  # models may raise any exception
            return f"{type(error).__name__}: {error}".strip().splitlines()[0]
        most = self._tolerance
        return None if worst <= most else f"a relative difference of {worst:.2g}, above {most:.2g}"

    def require(self, found: str | None) -> None:
        """Refuse a model that does not continue a cached text; `found` is the result of
        `failure`."""
        if found is not None:
            model = self._level.model
            raise ValueError(
                f"{self._level.name}: expected passes behind a cache that was rolled back to give "
                f"the logits of one pass over the whole text; {type(model).__name__} "
                f"({model.config.model_type}) does not: {found}"
            )

    def worst(self, prompts: tuple[int, ...], steps: Sequence[Step]) -> float:
        """Return the maximum difference of rows of logits after kept tokens."""
        level, text, worst = self._level, self._text.tolist(), 0.0
        # Tokens to be rolled back are wrong, so that it shows if they stay.
        wrong = [(token + 1) % self._ids for token in text]
        self._begin(len(prompts), len(text))
        level.read(self._padded([text[:n] for n in prompts]), prompts)
        have = list(prompts)
        for kept, more, again in steps:
            ids = [
                text[begin:end] + wrong[end : end + count]
                for begin, end, count in zip(have, kept, more, strict=True)
            ]
            new = [end - begin for begin, end in zip(have, kept, strict=True)]
            counts, first = RowCounts(list(map(len, ids))), RowCounts([0] * len(ids))
            logits = level.forward(InputBlock(self._padded(ids), max(new), counts, first)).logits
            differences = [
                self._difference(logits[b, j], have[b] + j)
                for b, n in enumerate(new)
                for j in range(n)
            ]
            worst = max(worst, *differences)
            if again:  # then roll back over two passes, and into a pass
                level.read(self._padded([wrong[:again]]), [again])
                level.rollback(RowCounts([end + 1 for end in kept]))
            have = list(level.rollback(RowCounts(kept)))
        return worst

    def _difference(self, logits: Tensor, at: int) -> float:
        assert self._reference is not None
        return relative_difference(logits, self._reference[at])

    def _refer(self) -> Tensor:
        logits = self._whole(self._text[None].to(self._level.device))[0]
        self._tolerance = _tolerance(logits.dtype)
        return logits

    def _padded(self, rows: Sequence[list[int]]) -> Tensor:
        return padded(rows, self._level.device)[0]


class BatchProbe(Probe):
    """The tests of a `HuggingFaceLevel`: at most twelve passes over two rows, and another pass of a
    model with quantised layers; on every rank of a sharded model alike.

    Args:
        begin: as of `Probe`, with a cache that keeps every token.
        longest: the model's context in tokens; None: no limit.

    Attributes:
        one_scale: whether quantised layers give a token other logits beside another row: after a
            comparison.
    """

    one_scale = False

    def __init__(self, level: Any, begin: Callable[[int, int], Any], longest: int | None) -> None:
        self._head = 17 if longest is None else min(17, longest - 4)
        self._informative = longest is None or longest >= _SHORTEST

        def whole(ids: Tensor) -> Tensor:
            logits: Tensor = level.model(input_ids=ids, use_cache=False, return_dict=True).logits
            return logits

        super().__init__(level, begin, whole, max(self._head + 4, _SHORTEST))

    def failure(self, differ: Callable[[], float]) -> str | None:
        return super().failure(differ) if self._informative else None

    def single(self) -> str | None:
        """Return why a single prompt cannot be continued; None: it can."""
        return self.failure(lambda: self.worst((6,), [Step((9,), (2,)), Step((14,), (0,))]))

    def ragged(self) -> str | None:
        """Return why rows of different lengths cannot be continued together; None: they can."""
        n = self._head
        steps = Step((n + 2, 6), (1, 1)), Step((n + 2, 10), (0, 2)), Step((n + 4, 12), (0, 0))
        return self.failure(lambda: self.worst((n, 2), steps))

    def tree(self) -> str | None:
        """Return why a tree of tokens cannot be read; None: it can."""
        return self.failure(self._worst_of_tree)

    def prepared(self) -> str | None:
        """Return how inputs of the model's `prepare_inputs_for_generation` change the logits of a
        pass over ids alone; None: no change."""
        from transformers import GenerationMixin

        model, name = self._level.model, "prepare_inputs_for_generation"
        if getattr(type(model), name, None) in (None, getattr(GenerationMixin, name)):
            return None

        def differ() -> float:
            ids = self._text[None].to(self._level.device)
            inputs = model.prepare_inputs_for_generation(
                ids, attention_mask=torch.ones_like(ids), use_cache=False, is_first_iteration=True
            )
            logits = model(**{**inputs, "return_dict": True}).logits[0]
            return max(self._difference(row, at) for at, row in enumerate(logits))

        return self.failure(differ)

    def _worst_of_tree(self) -> float:
        """Return the maximum difference in two rows of different lengths, for a tree with the text
        among its paths, and for a pass after this path."""
        level, text, prompts = self._level, self._text.tolist(), (6, 3)
        self._begin(2, len(text))
        level.read(self._padded([text[:n] for n in prompts]), prompts)
        path = [1, 2, 4]
        parents = torch.tensor([[-1, -1, 1, 1, 2]] * 2).to(level.device)
        input_ids = []
        for n in prompts:
            nodes = [(token + 1) % self._ids for token in text[n : n + 5]]
            for depth, node in enumerate(path):
                nodes[node] = text[n + depth]
            input_ids.append(nodes)
        # `run`, since `forward` refuses trees of more tokens than its passes may have.
        logits = level.run(InputBlock(self._padded(input_ids), 5, parents=parents)).logits
        differences = [
            self._difference(logits[b, node], n + depth)
            for b, n in enumerate(prompts)
            for depth, node in enumerate(path)
        ]
        have = [n + len(path) for n in prompts]
        level.keep_path(RowCounts(prompts), torch.tensor([path, path]), RowCounts(have))
        logits = level.forward(InputBlock(self._padded([text[n : n + 1] for n in have]), 1)).logits
        return max(*differences, *(self._difference(logits[b, 0], n) for b, n in enumerate(have)))

    def _refer(self) -> Tensor:
        """Also measure the tolerance."""
        level, text = self._level, self._text
        ids = torch.stack([text, (text + 1) % self._ids]).to(level.device)
        whole, beside = (self._whole(rows)[0] for rows in (ids[:1], ids))
        difference = max(map(relative_difference, beside, whole))
        rounding = _TIMES * difference
        if has_quantised_layers(level.model):
            self.one_scale = difference > _tolerance(whole.dtype)
            hook = level.model.get_input_embeddings().register_forward_hook(_nudge)
            try:
                moved = self._whole(ids[:1].expand(_NUDGED, -1))
            finally:
                hook.remove()
            worst = (float(max(map(relative_difference, row, whole))) for row in moved)
            rounding = max(rounding, _MARGIN * max(worst))
        self._tolerance = max(_tolerance(whole.dtype), min(rounding, _MOST))
        return whole


def _nudge(module: object, inputs: object, states: Tensor) -> Tensor:
    # Each row differently.
    size = max(_NUDGE, torch.finfo(states.dtype).eps)
    waves = torch.arange(states.numel(), device=states.device).sin().view_as(states)
    return (states * (1 + size * waves)).to(states.dtype)


def _tolerance(dtype: torch.dtype) -> float:
    return _TOLERANCE if dtype == torch.float32 else _TOLERANCE_HALF


def relative_difference(given: Tensor, wanted: Tensor) -> float:
    """Compare two rows of logits ``[V]``, up to a constant, relative to the spread of `wanted`.

    Returns 0 if `wanted` is not a distribution (NaN, +inf): the request then reports it.
    """

    def centred(row: Tensor) -> Tensor:
        row = row.double()
        row = (row - row.max()).clamp_min(-_REACH)
        return row - row.mean()

    wanted, given = centred(wanted), centred(given)
    if not bool(wanted.isfinite().all()):
        return 0.0
    distance = float((given - wanted).norm())
    # Centred rows of equal logits have only rounding errors, hence the lower bound.
    return float("inf") if distance != distance else distance / max(float(wanted.norm()), 1e-4)


# Rotary embeddings with the same frequencies for texts of any length.
_STATIC_ROPE = ("default", "linear", "llama3", "mrope", "proportional", "yarn")


def switch_of(config: Any) -> tuple[int, str] | None:
    """Return the maximum text length at which every pass of a model has the same rotary
    frequencies, and the reason; None: no limit.

    Beyond, a pass rotates its keys differently from the cached keys: `generate` of affected models
    drops the cache and reads the text again, or answers as no single pass would. Embeddings may
    differ by kind of layer.
    """
    limits: list[tuple[int, str]] = []
    for name in ("rope_parameters", "rope_scaling"):
        ropes = getattr(config, name, None) or {}
        several = [rope for rope in ropes.values() if isinstance(rope, Mapping)]
        for rope in several or [ropes]:
            kind = str(rope.get("rope_type", rope.get("type", "default")))
            if kind in _STATIC_ROPE:
                continue
            named = rope.get("original_max_position_embeddings")
            if named is None:
                named = getattr(config, "original_max_position_embeddings", None)
            if named is None or "dynamic" in kind:
                # A shorter pass resets frequencies that a longer pass has set.
                named = int(config.max_position_embeddings) - 1
            limits.append((int(named), f"{kind} embeddings change beyond them"))
    return min(limits, default=None)
