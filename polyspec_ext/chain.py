"""`Chain`: a target, the levels below it and a drafter, generating with the target's law.

The staged rule (Wang et al., ICML 2025, algorithm 1, made exact): level i < n waits for
window[i-1] tokens from below and judges them, with the processed law of level i+1 as q for every
one of them. The C++ `Scheduler` says who is next; `request.py` does it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import vocabulary
from .drafters import Drafter, DraftModel, Proposal
from .levels import Level, as_level
from .request import Request
from .sampling import Sampling
from .stats import Stats

RULES = ("token", "block")


@dataclass(slots=True)
class Output:
    """What `Chain.generate` returns: ``sequences`` ``[1, N]`` int64, prompt and new tokens, and the
    statistics."""

    sequences: torch.Tensor
    stats: Stats


class Stream:
    """Iterator over new tokens, as the target commits them; `stats` is up to date after each."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._ready: list[int] = []
        self._next = 0

    @property
    def stats(self) -> Stats:
        return self.request.stats

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self._next == len(self._ready):
            self.request.chain.require_current(self.request)
            self._ready, self._next = self.request.advance(), 0
            if not self._ready:
                raise StopIteration
        self._next += 1
        return self._ready[self._next - 1]


class Chain:
    """A polybasic chain of models.

    Args:
        levels: target first, drafter last. Hugging Face causal models, model ids or paths, or
            `Level` objects; the last may be a `Drafter` instead. One element alone decodes
            plainly, which is the honest baseline.
        window: ``window[i]`` tokens are gathered for level i+1 before it verifies (``[mu, K]`` for
            three levels), each >= 0; 0 lets that level decode alone. Default: 4 at the bottom,
            doubled at every level above.
        rule: "token" (Leviathan et al. 2023) or "block" (Sun et al. 2024), on every level.
        dtype, device: for models loaded here; float32 on the CPU and the checkpoint's own
        elsewhere by default. check_vocabulary: compare the tokenizers that lie beside the models.

    Raises:
        TypeError: an element is none of the above.
        ValueError: windows, rule or vocabularies do not fit, or a level's cache cannot roll back;
        the message
            names the level.
    """

    def __init__(
        self,
        levels: Sequence[Any],
        window: Sequence[int] | None = None,
        *,
        rule: str = "token",
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        check_vocabulary: bool = True,
    ) -> None:
        if isinstance(levels, str | Path) or len(levels) == 0:
            raise ValueError(f"levels: expected a list of at least one model, given {levels!r}")
        if rule not in RULES:
            raise ValueError(f"rule: expected one of {', '.join(RULES)}, given {rule!r}")
        count = len(levels)
        if window is None:
            window = [4 * 2**i for i in reversed(range(count - 1))]
        self.window = [int(w) for w in window]
        if len(self.window) != count - 1 or any(w < 0 for w in self.window):
            raise ValueError(
                f"window: expected {count - 1} numbers >= 0 for {count} levels, given "
                f"{list(window)}"
            )
        self.rule = rule
        self.drafter: Drafter | None = None
        made: list[Level] = []
        for place, thing in enumerate(levels):
            if isinstance(thing, DraftModel):
                thing = thing.level  # the chain makes its own, fitted to its vocabulary
            is_drafter = isinstance(thing, Drafter) and not isinstance(thing, Level)
            if is_drafter and 0 < place == count - 1:
                self.drafter = thing
            elif is_drafter:
                raise TypeError(
                    f"level {place + 1} of {count}: expected a model, given the drafter "
                    f"{type(thing).__name__}; "
                    "a drafter can only be the last of at least two"
                )
            else:
                made.append(as_level(thing, dtype, device))
        names = _distinct([getattr(level, "name", type(level).__name__) for level in made])
        if check_vocabulary:
            vocabulary.require_same(names, made)
        # A level never draws an id that the level above it does not have.
        self.vocab_sizes = [level.vocab_size for level in made]
        for i in range(1, len(made)):
            self.vocab_sizes[i] = min(self.vocab_sizes[i], self.vocab_sizes[i - 1])
        self._limits = [
            (n, getattr(level, "max_length", None)) for n, level in zip(names, made, strict=True)
        ]
        if self.drafter is None and count > 1:
            self.drafter = DraftModel(made.pop(), self.vocab_sizes.pop())
        elif self.drafter is not None:
            names.append(getattr(self.drafter, "name", type(self.drafter).__name__))
        self.levels = made  # those that verify; the target is levels[0]
        self.names = names
        self._current: Request | None = None

    def device(self, index: int) -> torch.device:
        """Where the logits of verifying level `index` (from 0) are."""
        return torch.device(getattr(self.levels[index], "device", "cpu"))

    def stream(
        self,
        input_ids: torch.Tensor | Sequence[int],
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        eos_token_id: int | Sequence[int] | None = None,
    ) -> Stream:
        """Like `generate`, but yields each new token when the target has committed it.

        A chain works on one request at a time: starting another ends this one.
        """
        prompt = _prompt(input_ids, self.vocab_sizes[0])
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens: expected a number >= 0, given {max_new_tokens}")
        for name, limit in self._limits:
            if limit is not None and len(prompt) + max_new_tokens > limit:
                raise ValueError(
                    f"{name}: expected at most {limit} tokens in its context, given a prompt of "
                    f"{len(prompt)} and "
                    f"max_new_tokens={max_new_tokens}"
                )
        sampling = Sampling(float(temperature), int(top_k), float(top_p), float(min_p))
        if eos_token_id is None:
            eos_token_id = getattr(self.levels[0], "eos_token_ids", ())
        eos = frozenset([eos_token_id] if isinstance(eos_token_id, int) else eos_token_id or ())
        self._current = Request(self, prompt, max_new_tokens, sampling, seed % 2**64, eos)
        return Stream(self._current)

    def generate(
        self,
        input_ids: torch.Tensor | Sequence[int],
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        eos_token_id: int | Sequence[int] | None = None,
    ) -> Output:
        """Continue one prompt with exactly the target's law.

        Args:
            input_ids: ``[N]`` or ``[1, N]``, N >= 1.
            max_new_tokens: never exceeded.
            temperature, top_k, top_p, min_p: make the law out of the logits, alike on every level;
                temperature 0 is the target's argmax.
            seed: the same seed and inputs give the same tokens.
            eos_token_id: id or ids that end the text (and are kept); None: the target's own, []:
                none.

        Raises:
            ValueError: bad input; names what was expected and what was given.
            RequestError: a row of logits has no law (NaN, +inf, all -inf); names request, level
            and position. The
                chain stays usable.
        """
        stream = self.stream(
            input_ids, max_new_tokens, temperature, top_k, top_p, min_p, seed, eos_token_id
        )
        try:
            for _ in stream:
                pass
        finally:
            self._current = None
        device = input_ids.device if isinstance(input_ids, torch.Tensor) else None
        return Output(
            torch.tensor([stream.request.tokens], dtype=torch.int64, device=device), stream.stats
        )

    def require_current(self, request: Request) -> None:
        """The caches belong to the latest request; an older stream must not go on with them."""
        if request is not self._current:
            raise RuntimeError("this stream has ended: its chain has begun another request since")

    def drafter_counters(self) -> tuple[int, float]:
        """Forward passes and prefill seconds the drafter has counted so far, over all requests."""
        drafter = self.drafter
        return getattr(drafter, "num_forward_passes", 0), getattr(drafter, "prefill_seconds", 0.0)

    def check_proposal(self, proposal: Proposal, count: int) -> list[int]:
        """The tokens of a proposal, if it is one that the chain can judge.

        Raises:
            ValueError: too many tokens, an id out of range or rows that do not fit; names the
                drafter.
            NotImplementedError: a tree.
        """
        given = proposal.tokens
        tokens: list[int] = given.tolist() if isinstance(given, torch.Tensor) else list(given)
        name, vocab = self.names[-1], self.vocab_sizes[-1]
        if proposal.parents is not None:
            raise NotImplementedError(
                f"{name}: expected a chain of tokens, given a tree; trees are not judged yet"
            )
        if len(tokens) > count:
            raise ValueError(f"{name}: expected at most {count} tokens, given {len(tokens)}")
        rows = proposal.logits
        if tokens and not (min(tokens) >= 0 and max(tokens) < vocab):
            place, bad = next(
                (i, token) for i, token in enumerate(tokens) if not 0 <= token < vocab
            )
            if rows is not None or not 0 <= bad < self.vocab_sizes[0]:
                raise ValueError(f"{name}: expected token ids in [0, {vocab}), given {bad}")
            # A deterministic proposal may quote a token that only levels further up have: it ends
            # before it.
            tokens = tokens[:place]
        if rows is not None and (
            rows.dim() != 3 or rows.shape[0] != 1 or rows.shape[1] != len(tokens)
        ):
            raise ValueError(
                f"{name}: expected draft logits of shape [1, {len(tokens)}, Vd], given "
                f"{list(rows.shape)}"
            )
        return tokens


def _distinct(names: list[str]) -> list[str]:
    """Names, numbered where two levels share one."""
    return [n if names.count(n) == 1 else f"{n} (level {i + 1})" for i, n in enumerate(names)]


def _prompt(input_ids: torch.Tensor | Sequence[int], vocab_size: int) -> list[int]:
    """The prompt as a fresh list of ids."""
    if isinstance(input_ids, torch.Tensor):
        if input_ids.dtype.is_floating_point or input_ids.dtype == torch.bool:
            raise TypeError(f"input_ids: expected an integer dtype, given {input_ids.dtype}")
        if input_ids.dim() not in (1, 2) or (input_ids.dim() == 2 and input_ids.shape[0] != 1):
            raise ValueError(
                "input_ids: expected one prompt of shape [N] or [1, N], given "
                f"{list(input_ids.shape)}; "
                "several prompts at once are not supported yet"
            )
        prompt: list[int] = input_ids.reshape(-1).tolist()
    else:
        prompt = list(input_ids)
        if not all(isinstance(token, int) for token in prompt):
            raise TypeError(
                "input_ids: expected token ids of one prompt, given something else in the list"
            )
    if not prompt:
        raise ValueError("input_ids: expected at least 1 token, given 0")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        bad = next(token for token in prompt if not 0 <= token < vocab_size)
        raise ValueError(f"input_ids: expected token ids in [0, {vocab_size}), given {bad}")
    return prompt
