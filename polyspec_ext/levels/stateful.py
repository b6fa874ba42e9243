"""Levels of models with a state that cannot be truncated at a token: recurrent models, hybrids of
recurrent layers and attention (Qwen3-Next, Granite 4, Nemotron-H, LFM2), and attention with an
index of its keys (DeepSeek V3.2).

A `StatefulLevel` keeps copies of the state (checkpoints) before its latest passes, and the inputs
of the functions that computed recurrent states. A rollback restores the newest checkpoint that is
short enough and advances it by the remaining tokens, with the recorded inputs alone. Without known
functions, the next pass reads the remaining tokens again.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import arguments, progress
from ..tensors import RowCounts
from .base import (
    Hidden,
    InputBlock,
    Ints,
    LevelCapabilities,
    LevelOutput,
    PromptBatch,
    reading,
)
from .fused import IN_MODULES, modules_with_states
from .models import ModelLevel, is_sharded
from .probe import Probe, Step

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Tensors of a layer that passes overwrite; keys and values are replaced by new tensors.
_OVERWRITTEN = ("conv_states", "recurrent_states")
# Maximum copies of a row, at the ends of prompts and of answers that a server saves.
_PINNED = 3


class SavedState(NamedTuple):
    """A copy of a row's state, which no pass overwrites."""

    length: int  # number of tokens read
    layers: list[dict[str, Any]]  # attributes of each layer of the cache
    kinds: list[type]  # of the layers, which some models append in their first pass


@dataclass(slots=True)
class _Pass:
    """A pass over a row.

    Attributes:
        before: the state before the pass.
        end: row length in tokens after the pass.
        calls: calls that computed recurrent states; None: not recorded.
        after: attributes of the layers after the pass; later passes overwrite recurrent states.
    """

    before: SavedState
    end: int = 0
    calls: list[Call] | None = None
    after: Sequence[dict[str, Any]] = ()


class RowState:
    """The state of a row in an empty cache and `modules_with_states`, with rollbacks to the latest
    `checkpoints` passes.

    Attributes:
        length: number of tokens that `past` has read.
        told: number of leading tokens with returned hidden states.
        passes: the latest passes, oldest first.
        pinned: copies at the ends of the latest prompts and of saved texts, oldest first.
    """

    def __init__(self, past: Any, checkpoints: int, modules: Sequence[nn.Module] = ()) -> None:
        self.past, self.length, self.told = past, 0, 0
        self._modules = modules
        # States of the modules, in the form of a cache layer.
        self._beside = [
            SimpleNamespace(**dict.fromkeys(IN_MODULES.intersection(vars(module))))
            for module in modules
        ]
        self.passes: deque[_Pass] = deque(maxlen=checkpoints)
        self.pinned: deque[SavedState] = deque(maxlen=_PINNED)
        self._empty = self._copy()

    @property
    def _layers(self) -> list[Any]:
        return [*self.past.layers, *self._beside]

    def _copy(self) -> SavedState:
        for layer in self.past.layers if self.length else ():
            if getattr(layer, "record_past", False):
                _cut(layer)
        layers = self._layers
        return SavedState(self.length, [_copied(vars(x)) for x in layers], list(map(type, layers)))

    def begin_pass(self) -> None:
        """Store a checkpoint for rollbacks, and load the row's states into the modules."""
        self.passes.append(_Pass(self._copy()))
        for module, states in zip(self._modules, self._beside, strict=True):
            vars(module).update(vars(states))

    def end_pass(self, count: int, calls: list[Call] | None) -> None:
        """Record a pass over `count` tokens, with its recorded calls."""
        for module, states in zip(self._modules, self._beside, strict=True):
            vars(states).update({name: vars(module)[name] for name in vars(states)})
        self.length += count
        latest = self.passes[-1]
        latest.end, latest.calls = self.length, calls
        if calls is not None:
            latest.after = [_copied(vars(layer), ()) for layer in self._layers]

    def pin(self) -> None:
        """Keep a copy of the current state, independent of later passes."""
        if self.length and all(state.length != self.length for state in self.pinned):
            self.pinned.append(self._copy())

    def restore(self, state: SavedState) -> None:
        """Restore a copy of the state, which stays unchanged."""
        self.length = state.length
        own = len(state.layers) - len(self._beside)
        del self.past.layers[own:]
        missing = state.kinds[len(self.past.layers) : own]
        self.past.layers += [object.__new__(kind) for kind in missing]
        for layer, stored in zip(self._layers, state.layers, strict=True):
            vars(layer).clear()
            vars(layer).update(_copied(stored))

    def rollback(self, length: int) -> bool:
        """Keep at most `length` tokens. Returns whether a checkpoint was advanced to `length`; else
        a shortened row has the tokens of the newest checkpoint."""
        self.told = min(self.told, length)
        if length >= self.length:
            return False
        while self.passes and self.passes[-1].before.length > length:
            self.passes.pop()
        pinned = [state for state in self.pinned if state.length <= length]
        self.pinned = deque(pinned, _PINNED)
        latest = self.passes[-1] if self.passes else None
        if latest is not None and latest.calls is not None and latest.before.length < length:
            self._advance(latest, latest.calls, length)
            return True
        states = [self._empty, *pinned, *(record.before for record in self.passes)]
        newest = max(states, key=lambda state: state.length)
        self.restore(newest)
        if latest is not None and latest.before is newest:  # the next pass stores it again
            self.passes.pop()
        return False

    def _advance(self, latest: _Pass, calls: Sequence[Call], length: int) -> None:
        left, befores = iter(calls), list(latest.before.layers)
        own = len(befores) - len(self._beside)
        befores[own:own] = [{}] * (len(latest.after) - len(befores))  # of layers that it appended
        for layer, before, after in zip(self._layers, befores, latest.after, strict=True):
            vars(layer).clear()
            vars(layer).update(_copied(after, ()))
            if length < latest.end:
                layer.crop(length - latest.end)
            for number, state in after.get("recurrent_states", {}).items():
                if state is None:
                    continue
                count = length - latest.before.length
                fresh = next(left).state(count, before.get("recurrent_states", {}).get(number))
                layer.recurrent_states[number] = fresh.to(state.dtype, copy=True)
        self.length = length


def _cut(layer: Any) -> None:
    layer.crop(0)  # needed only by rollbacks into the latest pass
    for number, states in getattr(layer, "conv_states", {}).items():
        if states is not None:
            # Some models overwrite the states in single-token passes, and need the full width.
            missing = layer.conv_kernel_size[number] - states.shape[-1]
            layer.conv_states[number] = F.pad(states, (max(missing, 0), 0)).clone()


def _copied(values: dict[str, Any], overwritten: Sequence[str] = _OVERWRITTEN) -> dict[str, Any]:
    """Return the attributes of a layer, with copies of tensors that passes overwrite."""
    copies = dict(values)
    for name, value in copies.items():
        if isinstance(value, dict):
            copies[name] = dict(value)
    for name in overwritten:
        states = copies.get(name)
        if isinstance(states, Tensor):
            copies[name] = states.clone()
        elif isinstance(states, dict):
            copies[name] = {key: copy.deepcopy(state) for key, state in states.items()}
    return copies


# ---- calls that compute a state ------------------------------------------------------------------


class _Inputs(NamedTuple):
    """Names of the arguments ``[B, T, ...]`` by token, and of the initial state."""

    by_token: tuple[str, ...]
    state: str


_DELTA_RULE = _Inputs(("query", "key", "value", "g", "beta"), "initial_state")
# By name in modeling modules. Each returns its output and the state after all tokens.
_FUNCTIONS = {
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
    "chunk_kimi_delta_attention": _DELTA_RULE,
    "mamba2_chunk_scan": _Inputs(("hidden_states", "dt", "B", "C"), "initial_states"),
}


class Call(NamedTuple):
    """A call of a function of `_FUNCTIONS`, with its arguments by name."""

    function: Callable[..., Any]
    inputs: _Inputs
    arguments: dict[str, Any]

    def state(self, count: int, before: Tensor | None) -> Tensor:
        """Return the state after the first `count` tokens, from the initial state `before`."""
        prefix = {name: self.arguments[name][:, :count] for name in self.inputs.by_token}
        arguments = {**self.arguments, **prefix, self.inputs.state: before}
        state: Tensor = self.function(**arguments)[1]
        return state


# Recorded calls of this thread; None: they are not recorded.
_calls: ContextVar[list[Call] | None] = ContextVar("calls", default=None)


def watch(model: nn.Module) -> None:
    """Wrap the functions of `_FUNCTIONS` in the modules of a model's classes, each once. A wrapped
    function behaves differently only inside `recorded`."""
    modules = {sys.modules[type(module).__module__] for module in model.modules()}
    for module in modules:
        for name, inputs in _FUNCTIONS.items():
            function = vars(module).get(name)
            if function is not None and not hasattr(function, "recorded"):
                setattr(module, name, _watched(function, inputs))


def _watched(function: Callable[..., Any], inputs: _Inputs) -> Callable[..., Any]:
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*values: Any, **options: Any) -> Any:
        if (calls := _calls.get()) is not None:
            arguments = {**dict(zip(names, values, strict=False)), **options}
            calls.append(Call(function, inputs, arguments))
        return function(*values, **options)

    call.recorded = True  # type: ignore[attr-defined]
    return call


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """Record this thread's calls of watched functions in the returned list, in order."""
    calls: list[Call] = []
    token = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(token)


# Maximum tokens to read again within the next pass; more are read in a pass before it, with a
# checkpoint after them, so that steady rejections do not read the same tokens again and again.
_RIDE = 8
# Maximum tokens of a pass with recorded inputs: inputs of prompts would take much memory.
_RECORDED = 64
# Modes to try in turn: whether rollbacks advance, and whether the level reads token by token.
_WAYS = ((True, False), (False, False), (False, True))


class StatefulLevel(ModelLevel):
    """A `transformers` causal language model with a state that cannot be truncated. Each row of a
    batch has a separate cache and separate passes.

    Args:
        model: in eval mode.
        name: for messages and statistics; None: the model's name or class.
        pack: as in `HuggingFaceLevel`.
        checkpoints: number of copies of a row's state. A rollback by more passes reads more tokens
            again.
        advance: rollbacks advance a checkpoint by the remaining tokens, where the model's functions
            allow it; for this, the inputs of passes of up to 64 tokens are kept. Else the remaining
            tokens are read again.
        prefill_chunk: maximum tokens per pass.

    Attributes:
        stepwise: the model drops its state in passes of several tokens, so that every token after
            the first pass is a pass. A stepwise level can draft, and gains nothing as a target.
        advances: whether rollbacks advance checkpoints.
        num_advanced: number of rollbacks that advanced a checkpoint.
        num_replayed: number of tokens read again after checkpoints.
        output_head: the module from the last states to logits, packed where the passes are.

    Raises:
        TypeError: not a causal language model, or an argument of another type.
        ValueError: in training mode or under `torch.autocast`, weights on the meta device, logits
            that the operators do not read, or logits after a restored state that differ from a
            single pass over the text. The message names the level.
    """

    supports_batches = True
    one_at_a_time = None
    reads_apart = True
    no_trees = "its state reads tokens in order"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        name: str | None = None,
        pack: bool = False,
        checkpoints: int = 8,
        advance: bool = True,
        prefill_chunk: int = 1024,
    ) -> None:
        self._advance = arguments.flag("advance", advance)
        self._checkpoints = arguments.integer("checkpoints", checkpoints, arguments.SIZE_MAX, 1)
        chunk = arguments.integer("prefill_chunk", prefill_chunk, arguments.SIZE_MAX, 1)
        options: dict[str, Any] = {"checkpoints": checkpoints, "advance": advance}
        options["prefill_chunk"] = self.prefill_chunk = chunk
        super().__init__(model, name, arguments.flag("pack", pack), **options)
        self._keepers = modules_with_states(self._runs)
        self.output_head = self._runs.get_output_embeddings()
        self.capabilities = LevelCapabilities(
            batches=True,
            reads_apart=True,
            admits=True,
            continues=True,
            saves_rows=True,
            checked=True,
            hidden_states=self.num_layers > 0,
            sharded=is_sharded(self.model),
            id_map=self.id_map,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
        )
        self._rows: list[RowState] = []
        self.stepwise, self.advances = False, advance
        self.num_replayed = self.num_advanced = 0
        watch(self._runs)
        self._probe()
        if not (self.advances or self.stepwise):
            self.capabilities = replace(self.capabilities, replays=_RIDE)

    def _row(self, checkpoints: int | None = None) -> RowState:
        from transformers import DynamicCache

        past = DynamicCache(config=self.model.config)
        if self.advances:
            past.activate_past_recording()
        return RowState(past, checkpoints or self._checkpoints, self._keepers)

    # ---- passes ----------------------------------------------------------------------------------

    def _pass(
        self, row: RowState, tokens: Tensor, keep: int, layers: tuple[int, ...]
    ) -> tuple[Tensor, Hidden]:
        """Append tokens ``[1, T]`` to a row; return the logits ``[keep, V]`` after the last `keep`
        tokens, and hidden states ``[1, T, H]`` by layer."""
        options: dict[str, Any] = {"use_cache": True, "return_dict": True}
        if self._placed:  # some models count from 0 in every pass
            positions = torch.arange(row.length, row.length + tokens.shape[1], device=tokens.device)
            options["position_ids"] = positions[None]
        if self._slices:
            options["logits_to_keep"] = max(keep, 1)
        options[self._cache_name] = row.past
        row.begin_pass()
        with self.states.taken(layers) as hidden, recorded() as calls:
            logits: Tensor = self._runs(input_ids=tokens, **options).logits
        records = self.advances and 1 < tokens.shape[1] <= _RECORDED
        row.end_pass(tokens.shape[1], calls if records else None)
        expected = [*tokens.shape, self.hidden_size]
        for layer, states in hidden.items():
            if list(states.shape) != expected:
                raise ValueError(
                    f"{self.name}: expected hidden states {expected} of layer {layer}, given "
                    f"{list(states.shape)}"
                )
        return logits[0, logits.shape[1] - keep :], hidden

    def _append(
        self, row: RowState, tokens: Tensor, keep: int, layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, Hidden]:
        """Append tokens ``[1, T]`` in as many passes as needed; return the results of `_pass`."""
        total = tokens.shape[1]
        ends = list(range(self.prefill_chunk, total, self.prefill_chunk))
        if row.length and total - keep > _RIDE:
            ends.append(total - keep)
        if self.stepwise and row.length:
            ends = list(range(1, total))
        elif self.stepwise:
            ends = list(range(max(total - keep, 1), total))
        rows, states, begin = [], [], 0
        with progress.reading(self.name, total) as read:
            for end in sorted({*ends, total}):
                count = max(0, end - max(begin, total - keep))
                logits, hidden = self._pass(row, tokens[:, begin:end], count, layers)
                states.append(hidden)
                if count:
                    rows.append(logits)
                read(end - begin)
                begin = end
        if layers:
            row.told = row.length
        whole = {layer: torch.cat([h[layer] for h in states], 1) for layer in layers}
        return torch.cat(rows) if rows else logits[:0], whole

    @torch.inference_mode()
    def prefill(self, prompts: PromptBatch) -> Hidden | None:
        self._unchanged.require()
        self._rows = [self._row() for _ in prompts.tokens]
        counts = prompts.counts or [prompts.tokens.shape[1]] * len(self._rows)
        layers = prompts.hidden_layers
        self.states.require(layers, self.name)
        hidden = self._blocks(prompts.tokens, counts, counts, 0, layers).hidden
        for row in self._rows:
            row.pin()
        return hidden

    @torch.inference_mode()
    def forward(self, block: InputBlock) -> LevelOutput:
        tokens, keep = block.tokens, block.keep
        if block.parents is not None:
            raise ValueError(f"{self.name}: expected no tree, given one: {self.no_trees}")
        if block.hidden_layers:
            self.states.require(block.hidden_layers, self.name)
        batch, width = tokens.shape
        counts = [width] * batch if block.counts is None else list(block.counts)
        first = [width - keep] * batch if block.first is None else list(block.first)
        return self._blocks(tokens, counts, first, keep, block.hidden_layers)

    def _blocks(
        self,
        tokens: Tensor,
        counts: Sequence[int],
        first: Sequence[int],
        keep: int,
        layers: tuple[int, ...],
    ) -> LevelOutput:
        """Append ``counts[b]`` of `tokens`, ``[B, T]``, to row b; see `forward`."""
        batch, width = tokens.shape
        logits = torch.empty(batch, keep, 0)
        hidden: dict[int, Tensor] = {}
        # Hidden states of skipped tokens were returned before a rollback.
        skipped = [max(0, row.told - row.length) for row in self._rows]
        rows = zip(self._rows, tokens, counts, first, strict=True)
        for number, (row, ids, count, begin) in enumerate(rows):
            if not count:
                continue
            needed = max(count - begin, 0)
            of_ids, states = self._append(row, ids[None, :count], needed, layers)
            if logits.shape[2] != of_ids.shape[1]:
                logits = of_ids.new_zeros(batch, keep, of_ids.shape[1])
            logits[number, : min(needed, keep)] = of_ids[:keep]
            for layer, of_row in states.items():
                if layer not in hidden:
                    hidden[layer] = of_row.new_zeros(batch, width, of_row.shape[2])
                hidden[layer][number, :count] = of_row[0]
        for layer in layers if not hidden else ():  # of empty prompts
            hidden[layer] = torch.zeros(batch, width, self.hidden_size, dtype=self.model.dtype)
        skips = torch.tensor(skipped) if layers and any(skipped) else None
        return LevelOutput(logits, hidden if layers else None, skips)

    def read(self, tokens: Tensor, counts: Sequence[int]) -> None:
        if tokens.shape[1] and max(counts):
            block = reading(tokens, counts)
            block.keep, block.first = 1, RowCounts(list(counts))
            self.forward(block)

    @torch.inference_mode()
    def rollback(self, lengths: Sequence[int]) -> Sequence[int]:
        for row, length in zip(self._rows, lengths, strict=True):
            before = min(length, row.length)
            self.num_advanced += row.rollback(length)
            self.num_replayed += before - row.length
        return [row.length for row in self._rows]

    def select(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]

    # ---- rows that join the batch (`Admitting`) --------------------------------------------------

    def open(self, capacity: int) -> RowState:
        self._unchanged.require()
        return self._row()

    @torch.inference_mode()
    def extend(
        self, sequence: RowState, tokens: Tensor, layers: tuple[int, ...] = ()
    ) -> Hidden | None:
        if not tokens.shape[1]:
            return None
        self.states.require(layers, self.name)
        _, hidden = self._append(sequence, tokens, 0, layers)
        return hidden or None

    def admit(
        self, sequences: Sequence[RowState], lengths: Ints, capacity: int, rows: Ints | None
    ) -> None:
        for sequence in sequences:
            sequence.pin()
        if rows is None:
            self._rows = list(sequences)
            return
        for row, sequence in zip(rows, sequences, strict=True):
            self._rows[row : row + 1] = [sequence]

    @torch.inference_mode()
    def save(self, row: int, begin: int, end: int) -> SavedState | None:
        """Return a copy of a row's first `end` tokens; None: no checkpoint at this length."""
        current = self._rows[row]
        if begin == 0 and current.length == end:
            current.pin()
        pinned = (state for state in current.pinned if begin == 0 and state.length == end)
        return next(pinned, None)

    @torch.inference_mode()
    def restore(self, sequence: RowState, saved: SavedState, count: int) -> None:
        sequence.restore(saved)

    # ---- whether the model continues a text ------------------------------------------------------

    def _probe(self) -> None:
        """Compare passes with rollbacks to a single pass over a text (`levels.probe`): with
        checkpoints that advance, then without, then token by token."""

        def begin(*_: int) -> None:
            self._rows = [self._row(checkpoints=8)]

        def whole(ids: Tensor) -> Tensor:
            logits: Tensor = self._runs(input_ids=ids, use_cache=False, return_dict=True).logits
            return logits

        probe = Probe(self, begin, whole, 24)
        steps = [Step((end,), (3,), 2 if end == 13 else 0) for end in (12, 13, 17, 24)]

        def differ() -> float:
            worst = probe.worst((7,), steps)
            return float("inf") if self.advances and self.num_replayed else worst

        try:
            for way in _WAYS[not self._advance :]:
                self.advances, self.stepwise = way
                self.num_replayed = 0
                failure = probe.failure(differ)
                if failure is None:
                    break
            probe.require(failure)
        finally:
            self._rows, self.num_replayed, self.num_advanced = [], 0, 0
