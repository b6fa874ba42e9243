"""Whether a model's cached passes give the logits that one pass over the whole text gives.

A model may take every argument that a level passes and still use them wrongly: place tokens by
their slot and not by their position, take causality from the shape of its keys, fail when several
tokens are read behind a cache. So a level of a Hugging Face model is tried once, when it is made,
with the calls that a chain makes: a prompt, passes of several tokens, rollbacks, and for batches
rows of different lengths of which some wait, and a tree. That is at most twelve passes over at most
two rows of a few tokens, in a cache of their own, and one more of a model with quantised layers; on
every rank of a sharded model alike.

Not covered: what a model does only behind longer texts, but for what its configuration says of that
(`switch_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from ..tensors import RowCounts, padded
from .base import InputBlock, LevelOutput
from .describe import has_quantised_layers
from .prefill import Reader

# How far a row of logits may be from its reference, as a fraction of its own spread: this, or a
# few times what the model's own rounding does to it when another row is read beside it, which is
# much where activations are quantised by the pass. A wrong mask or position does more.
_TOLERANCE, _TOLERANCE_HALF = 0.02, 0.1
_TIMES, _MOST = 4.0, 0.3
# Quantised layers may round activations to 8 bits, where a difference in the last bit of a float
# moves a value by a whole step. Few passes see that, so embeddings are moved by this part of
# themselves, in so many rows: enough for some values to take such a step, and nothing to a float.
_NUDGE, _NUDGED = 1e-4, 4
# Logits so far below the largest do not matter, and those of masked ids are not finite.
_REACH = 60.0

_SHORTEST = 14  # tokens; the context of a model that is not probed is shorter


class Step(NamedTuple):
    """One pass: row b appends ``counts[b]`` tokens, and then keeps ``kept[b]`` in all."""

    counts: tuple[int, ...]
    kept: tuple[int, ...]


class Probed(Reader, Protocol):
    """What is used of a `HuggingFaceLevel`."""

    model: Any

    @property
    def vocab_size(self) -> int: ...

    def run(self, block: InputBlock) -> LevelOutput: ...

    def rollback(self, lengths: Sequence[int]) -> Sequence[int]: ...

    def keep_path(
        self, begin: Sequence[int], path: torch.Tensor, lengths: Sequence[int]
    ) -> object: ...


class Probe:
    """Passes of one level, compared with one pass of its model without a cache.

    Args:
        level: whose cache is replaced meanwhile.
        new_cache: an empty cache of so many rows and tokens, that keeps every token.
        longest: tokens that the model's context holds; None: any number.
    """

    def __init__(
        self, level: Probed, new_cache: Callable[[int, int], Any], longest: int | None
    ) -> None:
        self._level, self._new_cache = level, new_cache
        head = 17 if longest is None else min(17, longest - 4)
        self._head, self._informative = head, longest is None or longest >= _SHORTEST
        self._text = self._reference = torch.empty(0)
        self._tolerance, self._ids = 0.0, 1

    def single(self) -> str | None:
        """Why one prompt cannot be continued; None: it can."""
        return self._compare((6,), [Step((5,), (9,)), Step((5,), (14,))])

    def ragged(self) -> str | None:
        """Why rows of different lengths cannot be continued together; None: they can."""
        head = self._head
        return self._compare(
            (head, 2),
            [
                Step((3, 5), (head + 2, 6)),
                Step((0, 6), (head + 2, 10)),
                Step((2, 2), (head + 4, 12)),
            ],
        )

    def tree(self) -> str | None:
        """Why a tree of tokens cannot be read; None: it can."""
        return self._checked(self._worst_of_tree)

    def _compare(self, prompts: tuple[int, ...], steps: Sequence[Step]) -> str | None:
        return self._checked(lambda: self._worst(prompts, steps))

    @torch.inference_mode()
    def _checked(self, differ: Callable[[], float]) -> str | None:
        if not self._informative:
            return None

        def both() -> tuple[float, float]:
            if self._reference.numel() == 0:
                self._refer()
            return differ(), self._tolerance

        before = self._level.cache
        try:
            return failure(both)
        finally:
            self._level.adopt(before)

    def _worst(self, prompts: tuple[int, ...], steps: Sequence[Step]) -> float:
        """The largest difference of any row of logits behind a token that was kept."""
        level = self._level
        rows, text = len(prompts), self._text.tolist()
        level.adopt(self._new_cache(rows, len(text)))
        even = len(set(prompts)) == 1
        level.append(self._padded([text[:n] for n in prompts]), None if even else prompts)
        have, worst = list(prompts), 0.0
        # What is rolled back is another text, so that it shows if it stays.
        wrong = [(token + 1) % self._ids for token in text]
        keep = 2
        for counts, kept in steps:
            input_ids = [
                text[begin:end] + wrong[end : begin + count]
                for begin, count, end in zip(have, counts, kept, strict=True)
            ]
            new = [end - begin for begin, end in zip(have, kept, strict=True)]
            first = [max(n - keep, 0) for n in new]
            own = RowCounts([len(row) for row in input_ids])
            block = InputBlock(self._padded(input_ids), keep, own, RowCounts(first))
            logits = level.run(block).logits
            have, before = list(level.rollback(RowCounts(kept))), have
            for b, (start, n) in enumerate(zip(first, new, strict=True)):
                for j in range(start, n):
                    given, wanted = logits[b, j - start], self._reference[before[b] + j]
                    worst = max(worst, relative_difference(given, wanted))
        return worst

    def _worst_of_tree(self) -> float:
        """Two rows of different lengths, a tree in which the text itself is one path between
        others, and a pass behind that path."""
        level, text, prompts = self._level, self._text.tolist(), (6, 3)
        level.adopt(self._new_cache(2, len(text)))
        level.append(self._padded([text[:n] for n in prompts]), prompts)
        path, worst = [1, 2, 4], 0.0
        parents = torch.tensor([[-1, -1, 1, 1, 2]] * 2).to(level.device)
        input_ids = []
        for n in prompts:
            nodes = [(token + 1) % self._ids for token in text[n : n + 5]]
            for depth, node in enumerate(path):
                nodes[node] = text[n + depth]
            input_ids.append(nodes)
        logits = level.run(InputBlock(self._padded(input_ids), 5, parents=parents)).logits
        for b, n in enumerate(prompts):
            for depth, node in enumerate(path):
                given = relative_difference(logits[b, node], self._reference[n + depth])
                worst = max(worst, given)
        have = [n + len(path) for n in prompts]
        level.keep_path(RowCounts(prompts), torch.tensor([path, path]), RowCounts(have))
        logits = level.run(InputBlock(self._padded([text[n : n + 1] for n in have]), 1)).logits
        for b, n in enumerate(have):
            worst = max(worst, relative_difference(logits[b, 0], self._reference[n]))
        return worst

    def _refer(self) -> None:
        """A text, the model's logits behind each of its tokens, and how much they may differ."""
        level, length = self._level, max(self._head + 4, _SHORTEST)
        self._ids = ids_of(level.model, level.vocab_size)
        text = self._text = text_of(length, self._ids)
        ids = torch.stack([text, (text + 1) % self._ids]).to(level.device)
        whole, beside = (
            level.model(input_ids=rows, use_cache=False, return_dict=True).logits[0]
            for rows in (ids[:1], ids)
        )
        rounding = _TIMES * max(map(relative_difference, beside, whole))
        if has_quantised_layers(level.model):
            with _nudged(level.model):
                rows = ids[:1].expand(_NUDGED, -1)
                moved = level.model(input_ids=rows, use_cache=False, return_dict=True).logits
            rounding = max(
                rounding, *(float(max(map(relative_difference, own, whole))) for own in moved)
            )
        self._reference = whole
        self._tolerance = max(tolerance(whole.dtype), min(rounding, _MOST))

    def _padded(self, rows: Sequence[list[int]]) -> torch.Tensor:
        return padded(rows, self._level.device)[0]


@contextmanager
def _nudged(model: Any) -> Iterator[None]:
    """Meanwhile the embeddings of every row are a little off, each in its own way."""

    def nudge(module: object, given: object, states: torch.Tensor) -> torch.Tensor:
        size = max(_NUDGE, torch.finfo(states.dtype).eps)
        waves = torch.arange(states.numel(), device=states.device).sin().view_as(states)
        return (states * (1 + size * waves)).to(states.dtype)

    hook = model.get_input_embeddings().register_forward_hook(nudge)
    try:
        yield
    finally:
        hook.remove()


def failure(differ: Callable[[], tuple[float, float]]) -> str | None:
    """What is wrong with a model whose logits differ by the first number, where at most the second
    is right, or that raises something; None: nothing."""
    try:
        worst, most = differ()
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # whatever a model may raise
        return f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return None if worst <= most else f"a relative difference of {worst:.2g}, above {most:.2g}"


def require_continued(found: str | None, model: Any, name: str) -> None:
    """Refuse a model that does not continue a text behind a cache as it should.

    Args:
        found: by `failure`.

    Raises:
        ValueError: names the level.
    """
    if found is not None:
        raise ValueError(
            f"{name}: expected passes behind a cache that was rolled back to give the logits of "
            f"one pass over the whole text; {type(model).__name__} ({model.config.model_type}) "
            f"does not: {found}"
        )


def tolerance(dtype: torch.dtype) -> float:
    """Difference of logits of this type that is none."""
    return _TOLERANCE if dtype == torch.float32 else _TOLERANCE_HALF


def ids_of(model: Any, vocab_size: int) -> int:
    """Ids below this are known to the model's embeddings and to its head."""
    return min(getattr(model.get_input_embeddings(), "num_embeddings", vocab_size), vocab_size)


def text_of(length: int, ids: int) -> torch.Tensor:
    """A text of tokens below `ids`, ``[length]`` int64."""
    return torch.arange(1, length + 1) * 7919 % ids


def relative_difference(given: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of two rows of logits ``[V]``, up to a constant, relative to the spread of `wanted`.

    0 where `wanted` is not a distribution (NaN, +inf): then it is for the request to say so.
    """

    def centred(row: torch.Tensor) -> torch.Tensor:
        row = row.double()
        row = (row - row.max()).clamp_min(-_REACH)
        return row - row.mean()

    wanted, given = centred(wanted), centred(given)
    if not bool(wanted.isfinite().all()):
        return 0.0
    distance = float((given - wanted).norm())
    # Rows of equal logits tell nothing; what is left of them is rounding.
    return float("inf") if distance != distance else distance / max(float(wanted.norm()), 1e-4)


# Rotary embeddings whose frequencies are the same for a text of any length.
_STATIC_ROPE = ("default", "linear", "llama3", "mrope", "proportional", "yarn")


def switch_of(config: Any) -> tuple[int, str] | None:
    """Return the tokens up to which every pass of a model has the same rotary frequencies, and the
    reason; None: any number.

    Beyond, a pass rotates its keys otherwise than the cached ones: `generate` of such models drops
    the cache and reads the text again, or answers as no single pass would.

    Args:
        config: of the text model. Embeddings may differ by kind of layer.
    """
    found: list[tuple[int, str]] = []
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
                # A pass that is shorter than this resets frequencies that a longer one has left.
                named = int(config.max_position_embeddings) - 1
            found.append((int(named), f"{kind} embeddings change beyond them"))
    return min(found, default=None)
