"""`Chain`: a target, the levels below it and a drafter, generating with the target's law.

The staged rule (Wang et al., ICML 2025, algorithm 1, made exact): level i < n waits for
window[i-1] tokens from below and judges them, with the processed law of level i+1 as q for every
one of them. The C++ `Scheduler` says who is next; `batch.py` does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import requests, vocabulary
from .batch import Batch
from .device_program import default_rounds
from .device_replay import Observer
from .device_rounds import DeviceRounds
from .drafters import Drafter, DraftModel
from .graphs import CudaRecorder, Graphs
from .levels import Level, device_of
from .output import Output, Stream
from .ownership import CacheOwner
from .planning import Switch, level_for, widths_of
from .prefill import Lanes
from .requests import Floats, Ints, Prompt
from .sampling import Sampling
from .shown import level_line

if TYPE_CHECKING:
    from .processors import LawProcessors

RULES = ("token", "block")


class Chain:
    """A polybasic chain of models.

    Args:
        levels: target first, drafter last. Hugging Face causal models, model ids or paths, or
            `Level` objects; the last may be a `Drafter` instead. One element alone decodes
            plainly, which is the honest baseline.
        window: ``window[i]`` tokens are gathered for level i+1 before it verifies (``[mu, K]`` for
            three levels), each >= 0; 0 lets that level decode alone. Default: 4 at the bottom,
            doubled at every level above.
        rounds: ``rounds[i]`` bounds how often level i+1 waits: it verifies once so many blocks have
            come from level i+2, full window or not. For every level above the lowest that verifies
            (one number for three levels); 0: no bound, as in the paper. Default: as many as fill
            the window if all is accepted, ceil(window[i] / (window[i+1] + 1)). Bounded rounds have
            the rows of a batch keep step, and let a CUDA device do a round of the target
            without a look of the host in between.
        rule: "token" (Leviathan et al. 2023) or "block" (Sun et al. 2024), on every level.
        dtype, device: for models loaded here; float32 on the CPU and the checkpoint's own
            elsewhere by default.
        check_vocabulary: compare the tokenizers that lie beside the models.
        graphs: capture drafting and verification as CUDA graphs. None: where all levels are on one
            CUDA device; never on the CPU. Drafts are captured with bounded `rounds` only.
        pack, compile: of the models given here (`HuggingFaceLevel`): weights packed for the CPU's
            matrix kernels; decoding through `torch.compile`. "auto": whichever is faster on this
            processor for one sequence. It is timed once, which takes about a second per level of
            small models, longer the larger they are, with the memory of all candidates, and the
            answer kept (`planning.choose`); compiling takes a minute per candidate. ``pack="auto"``
            also tries bfloat16 for draft levels that are loaded here without a `dtype`.

    Attributes:
        names: of the levels, target first, as in messages and statistics.
        levels: those that verify, as `Level` objects.
        drafter: the lowest level; None where the target decodes alone.
        vocab_sizes: ids that each level of a model may draw are below them.
        window, rounds, rule: as above, with what was chosen by default.

    Raises:
        TypeError: an element is none of the above.
        ValueError: windows, rule or vocabularies do not fit, or a level's cache cannot roll back;
            the message names the level.
    """

    def __init__(
        self,
        levels: Sequence[Any],
        window: Sequence[int] | None = None,
        *,
        rounds: Sequence[int] | None = None,
        rule: str = "token",
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        check_vocabulary: bool = True,
        graphs: bool | None = None,
        pack: Switch = False,
        compile: Switch = False,
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
        if rounds is None:
            rounds = default_rounds(self.window)
        self.rounds = [int(r) for r in rounds]
        if len(self.rounds) != max(count - 2, 0) or any(r < 0 for r in self.rounds):
            raise ValueError(
                f"rounds: expected {max(count - 2, 0)} numbers >= 0 for {count} levels, given "
                f"{list(rounds)}"
            )
        self.rule = rule
        self.drafter: Drafter | None = None
        made: list[Level] = []
        widths = widths_of(self.window)
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
                # A draft's dtype costs speed only; the target's is part of its distribution.
                either = pack == "auto" and dtype is None and place > 0
                dtypes = [dtype, torch.bfloat16] if either else [dtype]
                made.append(
                    level_for(thing, widths[place], dtypes, device, pack=pack, compile=compile)
                )
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
        self.owner = CacheOwner()
        self.graphs = self._graphs(graphs)
        # On the CPU looking at tokens costs nothing, and saves what the rounds above do in vain.
        on_device = device_of(made[0]).type != "cpu"
        self.lanes = Lanes()
        self.device_rounds = DeviceRounds.of(self) if on_device else None

    def __repr__(self) -> str:
        """A line per level, target first, then what decides when each verifies, and how."""
        lines = [level_line(level) for level in self.levels]
        if isinstance(self.drafter, DraftModel):
            lines.append(level_line(self.drafter.level))
        elif self.drafter is not None:
            lines.append(f"{type(self.drafter).__name__}, no model")
        shown = [f"  {name}: {line}" for name, line in zip(self.names, lines, strict=True)]
        settings = f"  window={self.window}, rounds={self.rounds}, rule={self.rule!r}"
        return "\n".join(["Chain(", *shown, settings, ")"])

    def _graphs(self, wanted: bool | None) -> Graphs | None:
        devices = {device_of(level) for level in self.levels}
        if isinstance(self.drafter, DraftModel):
            devices.add(self.drafter.device)
        device = devices.pop()
        possible = not devices and device.type == "cuda"
        if wanted is False or (wanted is None and not possible):
            return None
        if not possible:
            raise ValueError(
                "graphs: expected all levels on one CUDA device, given "
                + ", ".join(sorted(map(str, {device, *devices})))
            )
        return Graphs(CudaRecorder(device))

    def stream(
        self,
        input_ids: Prompt,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        eos_token_id: int | Sequence[int] | None = None,
    ) -> Stream:
        """Like `generate` for one prompt, but yields each new token when the target has committed
        it.

        A chain works on one batch at a time: starting another ends this one.
        """
        prompts = requests.prompts(input_ids, self.vocab_sizes[0])
        if len(prompts) != 1:
            raise ValueError(
                f"input_ids: expected one prompt to stream, given {len(prompts)}; use batch() for "
                "several"
            )
        return Stream(
            self.batch(
                prompts, max_new_tokens, temperature, top_k, top_p, min_p, seed, eos_token_id
            )
        )

    def batch(
        self,
        prompts: Sequence[list[int]],
        max_new_tokens: Ints = 256,
        temperature: Floats = 0.0,
        top_k: Ints = 0,
        top_p: Floats = 1.0,
        min_p: Floats = 0.0,
        seed: Ints = 0,
        eos_token_id: int | Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        processors: LawProcessors | None = None,
        observe: Observer | None = None,
    ) -> Batch:
        """A batch of token lists, to be moved on by ``advance()`` as the caller likes.

        Arguments are those of `generate`; the lists are copied. `processors` and `observe` are
        those of `Batch`.
        """
        rows = [list(prompt) for prompt in prompts]
        count = len(rows)
        requests.require_batches(self, count)
        limits = requests.per_row("max_new_tokens", max_new_tokens, count)
        for prompt, limit in zip(rows, limits, strict=True):
            requests.require_room(self._limits, len(prompt), limit)
        values = [
            requests.per_row(name, value, count)
            for name, value in (
                ("temperature", temperature),
                ("top_k", top_k),
                ("top_p", top_p),
                ("min_p", min_p),
            )
        ]
        if eos_token_id is None:
            eos_token_id = getattr(self.levels[0], "eos_token_ids", ())
        return Batch(
            self,
            rows,
            max_new_tokens=limits,
            sampling=[
                Sampling(float(t), int(k), float(p), float(m))
                for t, k, p, m in zip(*values, strict=True)
            ],
            seeds=requests.seeds(seed, count),
            eos=requests.eos_sets(eos_token_id, count),
            processors=processors,
            observe=observe,
        )

    def generate(
        self,
        input_ids: Prompt,
        max_new_tokens: Ints = 256,
        temperature: Floats = 0.0,
        top_k: Ints = 0,
        top_p: Floats = 1.0,
        min_p: Floats = 0.0,
        seed: Ints = 0,
        eos_token_id: int | Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        pad_token_id: int | None = None,
    ) -> Output:
        """Continue prompts with exactly the target's law.

        Args:
            input_ids: one prompt, ``[N]`` or ``[1, N]``; or several, ``[B, N]`` with
                `attention_mask` or a list of lists; N >= 1 each.
            max_new_tokens: never exceeded. This and what follows: one value, or one per row.
            temperature, top_k, top_p, min_p: make the law out of the logits, alike on every level;
                temperature 0 is the target's argmax.
            seed: the same seed and inputs give the same tokens, whatever the rest of the batch.
                One value s for B rows means s, s + 1, ... s + B - 1.
            eos_token_id: id or ids that end a text (and are kept), or such a list per row; None:
                the target's own, []: none.
            attention_mask: ``[B, N]``, 0 where a row of `input_ids` is padding, on either side.
            pad_token_id: fills the ends of short rows of the output. None: the first EOS id, or 0.

        Raises:
            ValueError: bad input; names what was expected and what was given.
            RequestError: a row of logits has no law (NaN, +inf, all -inf); names request, level
                and position. The chain stays usable.
        """
        prompts = requests.prompts(input_ids, self.vocab_sizes[0], attention_mask)
        batch = self.batch(
            prompts, max_new_tokens, temperature, top_k, top_p, min_p, seed, eos_token_id
        )
        try:
            while batch.advance():
                pass
        finally:
            self.owner.end(batch)
        if pad_token_id is None:
            pad_token_id = min(batch.rows[0].eos, default=0)
        return Output(
            requests.padded(input_ids, prompts, [row.tokens for row in batch.rows], pad_token_id),
            batch.stats,
            [row.stats for row in batch.rows],
            [row.logprobs for row in batch.rows],
        )


def _distinct(names: list[str]) -> list[str]:
    """Names, numbered where two levels share one."""
    return [n if names.count(n) == 1 else f"{n} (level {i + 1})" for i, n in enumerate(names)]
