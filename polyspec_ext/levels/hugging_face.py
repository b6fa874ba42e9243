"""Levels of Hugging Face causal models."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from .. import arguments, progress, rooms
from .. import kv_cache as caches
from ..kv_cache import SequenceState
from ..ops.decoder import take_rows
from ..tensors import RowCounts
from .base import (
    Hidden,
    InputBlock,
    Ints,
    Layers,
    LevelCapabilities,
    LevelOutput,
    PromptBatch,
    reading,
)
from .fused import stacked_pass
from .models import ModelLevel, gathering, is_sharded
from .probe import BatchProbe, switch_of
from .products import without_wrapper

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel


# Attention with additive masks of any pattern, for rows of different lengths.
_MASKED = ("eager", "sdpa")

# Fixed cost of a pass in tokens: the model's Python on a CPU, the reading of its weights on a
# device.
_PASS = {"cpu": 64}
_PASS_ELSEWHERE = 512

# Levels that share their model's cache, by the model's id, so that a chain of the model finds them.
# A level keeps its model alive, so that no id is reused while it is in here.
_owners: weakref.WeakValueDictionary[int, HuggingFaceLevel] = weakref.WeakValueDictionary()


def level_of(model: PreTrainedModel, pack: bool = False) -> HuggingFaceLevel:
    """Return the level of `model` that shares its cache with others, or else a new level."""
    owner = _owners.get(id(without_wrapper(model)))
    return owner or HuggingFaceLevel(model, pack=pack)


class HuggingFaceLevel(ModelLevel):
    """A `transformers` causal language model with a cache that rolls back.

    Batches need `RollbackCache`, which is the default where the model's layers allow it, with eager
    or sdpa attention. The next batch of the same size reuses the cache.

    Args:
        model: in eval mode. For a model of `peft` with adapters in its layers, as LoRA's, the level
            runs the wrapped model, adapters included.
        name: for messages and statistics; None: the model's name or class.
        new_cache: returns the empty cache of a batch: a callable with the batch size as its only
            required argument, or with none for caches of a single sequence. The default keeps every
            key and value, also of models with sliding-window attention (their mask hides tokens out
            of the window), so that any rollback is exact.
        streaming: attention sinks and a window instead (`RollbackCache.streaming`), so that the
            cost of a draft level does not grow with the context: the window, or a dict of window,
            sinks and slack. With `shares_cache_with`, the keys of the shared cache that the level
            reads: window and sinks.
        shares_cache_with: a level above in the chain, or its model, of which this model is a
            quantised or pruned copy: it reads that level's keys and values, and writes keys and
            values only after them (`levels.shared_cache`). A copy with fewer layers finds its
            layers' keys by their `layer_idx`.
        prefill_chunk: maximum tokens of a row per pass. A pass of c tokens after n cached tokens
            needs memory for c rows of activations and for masks of c * (n + c) elements; this, and
            not the square of the prompt, is the memory of a prefill beside the cache.
        pack: on the CPU, multiply with packed weights (`levels.fused`). On some processors a pass
            of several tokens then costs hardly more than a pass of a single token, on others every
            pass takes longer: `Chain(pack="auto")` decides. Packed weights take additional memory,
            a later change of the model's weights is an error, and logits may round differently. On
            CUDA, fused layers of known families in float32 or bfloat16: at most 10 launches each;
            the weights of projections of the same input become views of a common matrix.
        cache_options: of the default cache: capacity, step, bucket (`RollbackCache`).

    Attributes:
        one_at_a_time: reason why it accepts no batches, or None.
        why_no_longer: reason why `max_length` is less than the model's context, or None.
        cache: cache of the current batch (`SequenceState`).
        output_head: the module from the last states to logits, packed where the passes are.
        varies: operations with results for a token that may depend on the other tokens of a pass:
            "attention", "products", "head". Empty: logits are bit-identical alone, in a
            verification and in a batch. None: unknown, of a model that runs unmodified.

    Raises:
        TypeError: not a causal language model, or an argument of another type.
        ValueError: in training mode or under `torch.autocast`, the cache cannot roll back (contract
            C7), weights on the meta device, logits of a type or on a device that the operators do
            not read, or logits with a cache that differ from a single pass over the text
            (`levels.probe`). Also of `prefill` and `open`, if the model has changed since.
    """

    _one_scale = False  # `BatchProbe.one_scale`

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        name: str | None = None,
        new_cache: Callable[..., Cache] | None = None,
        streaming: int | Mapping[str, int] | None = None,
        shares_cache_with: HuggingFaceLevel | PreTrainedModel | None = None,
        prefill_chunk: int = 1024,
        pack: bool = False,
        **cache_options: Any,
    ) -> None:
        chunk = arguments.integer("prefill_chunk", prefill_chunk, arguments.SIZE_MAX, 1)
        self.prefill_chunk = chunk
        if shares_cache_with is not None and not isinstance(shares_cache_with, HuggingFaceLevel):
            arguments.model("shares_cache_with", shares_cache_with)
            shares_cache_with = level_of(shares_cache_with)
        options = {"new_cache": new_cache, "streaming": streaming, "prefill_chunk": chunk}
        options |= cache_options
        super().__init__(model, name, arguments.flag("pack", pack), shares_cache_with, **options)
        model = self.model
        caches.require_rollback(model, self.name)
        text_config = model.config.get_text_config(decoder=True)
        self.why_no_longer: str | None = None
        if (switch := switch_of(text_config)) is not None and switch[0] < (
            self.max_length or switch[0] + 1
        ):
            self.max_length, self.why_no_longer = switch
        self._sharded = is_sharded(model)  # checks every weight, which takes milliseconds
        self.output_head = self._runs.get_output_embeddings()
        # Positions and causality follow from the cache, so that passes over rows of equal length
        # need no other arguments.
        self._arguments: dict[str, Any] = {"use_cache": True, "return_dict": True}
        masked = getattr(text_config, "_attn_implementation", None) in _MASKED
        masks = self._placed and masked
        window = streaming if shares_cache_with is None else None
        self._make, self._makes_batches = caches.factory(
            model, self.name, new_cache, window, cache_options, wanted=masks
        )
        with torch.inference_mode():
            self.adopt(self._make(1))
        prepared = isinstance(self._past, caches.RollbackCache)
        self._stacked = stacked_pass(self._runs) if prepared else None
        self._chunk = min(chunk, self.cache.longest_pass)
        self._member: rooms.shared_cache.Member | None = None
        self._near: tuple[int, int] | None = None  # keys of the shared cache that it reads
        # Memory of the model's weights; None: to be determined again for a new batch.
        self._weights: rooms.graphs.MemoryKey | None = None
        # Reason why batches are refused, or None.
        self.one_at_a_time = self._without(masked)
        self.no_trees: str | None = None
        self._probe(new_cache, masks)
        if shares_cache_with is not None:
            if new_cache is not None or cache_options:
                raise ValueError(
                    f"{self.name}: expected shares_cache_with or a cache of its own, given both"
                )
            self._share(shares_cache_with, streaming)

    def _without(self, masked: bool) -> str | None:
        """Return a requirement of batches that this level lacks; None: it meets all."""
        if not self._placed:
            return f"{type(self.model).__name__} takes no position_ids"
        if not masked:
            return f"attention with masks is needed ({' or '.join(_MASKED)})"
        if not (self.cache.batches and self._makes_batches):
            return f"a RollbackCache is needed, not {type(self._past).__name__}"
        return None

    def _probe(self, new_cache: Callable[..., Cache] | None, masks: bool) -> None:
        """Test whether the model continues cached texts correctly (`levels.probe`)."""
        # A ring of keys drops tokens, so that a full cache is tested instead.
        rings, before = not self.cache.keeps_all, self.cache
        make, _ = caches.factory(
            self.model, self.name, None if rings else new_cache, None, {}, wanted=masks
        )
        probe = BatchProbe(self, lambda *size: self.adopt(make(*size)), self.max_length)
        kind = type(self.model).__name__
        try:
            if self.supports_batches and (failure := probe.ragged()) is not None:
                self.one_at_a_time = (
                    f"{kind} gives rows of different lengths other logits than each of them alone "
                    f"({failure})"
                )
            if not self.supports_batches:
                self.no_trees = self.one_at_a_time
            elif not before.takes_rows:
                self.no_trees = (
                    "a cache that keeps every token in one run of slots per row is needed"
                )
            elif (failure := probe.tree()) is not None:
                self.no_trees = (
                    f"{kind} gives the nodes of a tree other logits than the texts that lead to "
                    f"them ({failure})"
                )
            if rings and not self.supports_batches:
                raise ValueError(
                    f"{self.name}: expected a model that can do with a cache of a window what "
                    f"batches ask for, given one at a time: {self.one_at_a_time}"
                )
            probe.require(probe.single())
        finally:
            self.adopt(before)
        self._one_scale = probe.one_scale
        if (failure := probe.prepared()) is not None:
            raise ValueError(
                f"{self.name}: expected a model that `generate` calls with ids, positions and a "
                f"mask; {kind}.prepare_inputs_for_generation adds what changes the logits "
                f"({failure})"
            )

    def _share(self, owner: HuggingFaceLevel, streaming: int | Mapping[str, int] | None) -> None:
        near = None if streaming is None else rooms.streaming.near_of(streaming, self.name)
        rooms.shared_cache.require_same_shape(self.model, owner.model, self.name)
        for level in (self, owner):
            if not level.supports_batches or not level.cache.takes_rows:
                raise ValueError(
                    f"{level.name}: expected a level over a full RollbackCache to share, given "
                    f"{type(level._past).__name__}"
                )
        if owner._member is None:
            owner._member = rooms.shared_cache.Member(owner)
            _owners[id(owner.model)] = owner
        self._member = rooms.shared_cache.Member(self, owner._member.owner)
        self.adopt(owner.cache)
        self._near = near
        self._options["shares_cache_with"] = owner

    def __reduce__(self) -> tuple[Any, ...]:
        return *super().__reduce__(), {"max_length": self.max_length}

    @property
    def supports_batches(self) -> bool:
        return self.one_at_a_time is None

    @property
    def only_drafts(self) -> str | None:
        """Reason why logits depend on the passes that have read a text, so that only plain decoding
        has the level's distribution; or None."""
        if self._one_scale:
            return "its activations are quantised by one scale for all tokens of a pass"
        return None if self.cache is None else self.cache.only_drafts

    @property
    def reads_apart(self) -> bool:
        """Whether its prefill uses no data that another level reads or writes."""
        return self._member is None

    @property
    def cache_owner(self) -> HuggingFaceLevel:
        """The level that owns its cache: itself, or the highest level that shares the cache."""
        owner: HuggingFaceLevel = self if self._member is None else self._member.owner.level
        return owner

    def begin_batch(self) -> None:
        """Clear the state of another batch in this level and in the levels that share its cache."""
        if self._member is not None:
            self._member.forget()

    @property
    def capabilities(self) -> LevelCapabilities:
        cache = self.cache  # None: the last allocation failed
        batches = self.supports_batches and cache is not None
        member = self._member is None or self._member.ready
        return LevelCapabilities(
            batches=self.supports_batches,
            device_lengths=batches and member and bool(cache.in_one_place),
            reads_apart=self.reads_apart,
            hidden_states=self.num_layers > 0,
            trees=self.no_trees is None,
            keeps_lengths=True,
            checked=True,
            admits=batches and bool(cache.takes_rows),
            reads_together=batches and bool(cache.takes_rows),
            continues=cache is not None and bool(cache.keeps_all) and self.only_drafts is None,
            sharded=self._sharded,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            id_map=self.id_map,
        )

    @torch.inference_mode()
    def prefill(self, prompts: PromptBatch | Tensor, counts: Sequence[int] | None = None) -> Any:
        """Begin a batch (`BatchedLevel.prefill`), in passes of at most `prefill_chunk` tokens. Also
        accepts tokens ``[B, T]`` with their counts (`Level.prefill`)."""
        if isinstance(prompts, Tensor):
            prompts = PromptBatch(prompts, counts)
        self._unchanged.require()
        self._weights = None  # weights may have moved between batches
        tokens, counts, layers = prompts.tokens, prompts.counts, prompts.hidden_layers
        if self._member is not None:
            return self._member.prefill(prompts)
        rows, longest = tokens.shape
        if counts is not None:
            longest = max(counts, default=0)
        self.adopt(self.fresh(rows, max(prompts.capacity, longest)))
        hidden = self._read_prompts(tokens[:, :longest], counts, layers)
        return self.states.padded(hidden, layers, tokens) if layers else None

    # ---- rows that join the batch (`Admitting`) ---------------------------------------

    def open(self, capacity: int) -> Any:
        if not (self.capabilities.admits or self.capabilities.continues):
            self._refuse_rows()
        self._unchanged.require()
        return self._make(1, capacity) if self._owns_cache else None

    @torch.inference_mode()
    def extend(self, sequence: Any, tokens: Tensor, layers: tuple[int, ...] = ()) -> Hidden | None:
        if sequence is None:  # the owner of the cache has read the tokens
            return None
        # As in a separate batch, without other rows in its passes.
        with self._over(sequence):
            hidden = self.append(tokens, None, layers)
        return hidden if layers else None

    @torch.inference_mode()
    def extend_together(
        self, sequences: Sequence[Any], tokens: Tensor, counts: Ints, layers: Layers = ()
    ) -> Hidden | None:
        if sequences[0] is None:
            return None
        with self._over(self._make(len(sequences), max(counts))):
            hidden = self._read_prompts(tokens, counts, layers)
            copies = [self.cache.save(row, 0, count) for row, count in enumerate(counts)]
        for sequence, copy, count in zip(sequences, copies, counts, strict=True):
            sequence.restore(copy, count)
        return self.states.padded(hidden, layers, tokens) if layers else None

    @torch.inference_mode()
    def admit(
        self, sequences: Sequence[Any], lengths: Ints, capacity: int, rows: Ints | None
    ) -> None:
        if not self.capabilities.admits:
            if rows is not None:
                self._refuse_rows()
            self._weights = None
            self.adopt(sequences[0])
        elif self._owns_cache:
            if rows is None:
                self._weights = None
                self.adopt(self.fresh(len(sequences), capacity))
            else:
                self.cache.admit(rows)
            numbers = range(len(sequences)) if rows is None else rows
            for row, sequence in zip(numbers, sequences, strict=True):
                if sequence.rows.bound:
                    self.cache.take(sequence, [row])
        if self._member is not None:
            self._member.admit(lengths, rows)

    @torch.inference_mode()
    def save(self, row: int, begin: int, end: int) -> Any:
        return self.cache.save(row, begin, end) if self._owns_cache else None

    @torch.inference_mode()
    def restore(self, sequence: Any, saved: Any, count: int) -> None:
        sequence.restore(saved, count)

    @property
    def _owns_cache(self) -> bool:
        return self._member is None or self._member.rank == 0

    def _refuse_rows(self) -> NoReturn:
        raise ValueError(
            f"{self.name}: expected a level with batches and a cache that keeps every token in "
            "one run of slots per row, given another to admit rows to"
        )

    def _read_prompts(
        self, tokens: Tensor, counts: Sequence[int] | None, layers: tuple[int, ...]
    ) -> dict[int, Tensor]:
        """Read the first ``counts[b]`` of `tokens`, ``[B, T]``, into row b of the empty batch;
        None: all. Rows of similar length are read together, with little padding.

        Returns:
            Hidden states ``[B, T, H]`` by layer; undefined beyond a row's tokens.
        """
        whole = self.cache
        several: list[list[int]] = []
        if counts is not None and whole.takes_rows:
            several = groups(counts, self.device.type)
        if counts is None or len(several) < 2:
            return self.append(tokens, counts, layers)
        cache: Any = None
        hidden: dict[int, Tensor] = {}
        for group in several:  # the longest rows first
            lengths = [counts[b] for b in group]
            if cache is None or not cache.refit(len(group)):
                cache = self._make(len(group), max(lengths))
            rows = torch.tensor(group).to(tokens.device, non_blocking=True)
            with self._over(cache):
                states = self.append(tokens[rows, : max(lengths)], lengths, layers)
            whole.take(cache, group)
            for layer, of_group in states.items():
                if layer not in hidden:
                    hidden[layer] = of_group.new_zeros(*tokens.shape, of_group.shape[2])
                hidden[layer][rows.to(of_group.device), : of_group.shape[1]] = of_group
        return hidden

    def fresh(self, rows: int, capacity: int) -> Any:
        """Return an empty cache: the current cache, cleared, if it fits, else a new cache."""
        cache = self.cache  # None: the last allocation failed
        if cache is not None and not cache.failed and cache.refit(rows, capacity):
            return cache
        if rows != 1 and not self.supports_batches:
            raise ValueError(
                f"{self.name}: expected one sequence, given a batch of {rows}: {self.one_at_a_time}"
            )
        cache = None
        self.adopt(None)  # before the next is allocated
        return self._make(rows, capacity)

    def _drop(self) -> None:
        if self.cache is not None:  # for all levels that share it
            self.cache.failed = True

    def adopt(self, cache: SequenceState | None) -> None:
        """Set the level's cache."""
        self.cache: Any = cache
        past = None if cache is None else cache.past
        self._past: Any = cache if past is None else past

    @contextmanager
    def _over(self, cache: Any) -> Iterator[None]:
        whole = self.cache
        self.adopt(cache)
        try:
            yield
        finally:
            self.adopt(whole)

    def read(self, tokens: Tensor, counts: Sequence[int]) -> None:
        self.forward(reading(tokens, counts))

    def append(
        self, tokens: Tensor, counts: Sequence[int] | None, layers: tuple[int, ...] = ()
    ) -> dict[int, Tensor]:
        """Append prompt tokens, without logits. Returns hidden states by layer, ``[B, T, H]``;
        empty for an empty prompt."""
        if layers:
            self.states.require(layers, self.name)
        if not tokens.shape[1]:
            return {}
        known = None if counts is None else RowCounts.of(counts)
        try:
            return dict(self.run(InputBlock(tokens, 1, known, hidden_layers=layers)).hidden or {})
        except BaseException:
            self._drop()
            raise

    def forward(
        self,
        block: InputBlock | Tensor,
        keep: int = 1,
        counts: Sequence[int] | None = None,
        first: Sequence[int] | None = None,
    ) -> Any:
        """Append a block (`BatchedLevel.forward`). Also accepts tokens ``[B, T]``, with `keep`,
        `counts` and `first` as in `InputBlock`: then returns logits alone (`Level.forward`)."""
        if isinstance(block, Tensor):
            known, begin = (None if x is None else RowCounts.of(x) for x in (counts, first))
            return self.forward(InputBlock(block, keep, known, begin)).logits
        if not torch.is_inference_mode_enabled():  # chains call in inference mode
            with torch.inference_mode():
                return self.forward(block)
        if block.hidden_layers:
            self.states.require(block.hidden_layers, self.name)
        if block.parents is not None:
            self._require_tree(block)
        try:
            return self.run(block) if self._member is None else self._member.forward(block)
        except BaseException:
            self._drop()
            raise

    def _require_tree(self, block: InputBlock) -> None:
        if self.no_trees is not None:
            raise ValueError(
                f"{self.name}: expected a chain of tokens, given a tree: {self.no_trees}"
            )
        if block.tokens.shape[1] > self._chunk:
            raise ValueError(
                f"{self.name}: expected a tree of at most {self._chunk} tokens, those of one pass, "
                f"given {block.tokens.shape[1]}"
            )

    def run(self, block: InputBlock) -> LevelOutput:
        """Append a block to the cached tokens, in a single pass of the model or in pieces."""
        tokens, counts, first, keep = block.tokens, block.counts, block.first, block.keep
        longest, inputs = tokens.shape[1], {}
        known = counts is None or counts.host is not None
        if longest > self._chunk and known and block.parents is None:
            return self._in_pieces(block)
        if self.one_at_a_time is None:
            options: dict[str, Any] = {"parents": block.parents, "depth": block.depth}
            options["near"] = self._near
            if self._stacked is not None and self._stacked.longest:
                options["masked"] = self._stacked.needs_mask(self._past, longest)
            inputs = self.cache.inputs(longest, counts, **options)
        elif counts is not None and not counts.all(longest):
            raise ValueError(f"{self.name}: expected rows in step, given counts {list(counts)}")
        rows = None
        if first is not None and not first.all(longest - keep):
            rows = first.on(tokens.device)
        if self._stacked is not None and self.one_at_a_time is None:
            return self._stacked(tokens, inputs, self._past, keep, rows, block.hidden_layers)
        return self._run_model(block, inputs, rows)

    def _run_model(
        self, block: InputBlock, inputs: Mapping[str, Any], rows: Tensor | None
    ) -> LevelOutput:
        """Run a block by the model's forward, with logits of the last tokens or of `rows`."""
        keep = block.keep
        arguments = {
            **self._arguments, **inputs, "input_ids": block.tokens, self._cache_name: self._past
        }  # fmt: skip
        if self._slices:
            arguments["logits_to_keep"] = keep if rows is None else 0
        hidden: dict[int, Tensor] | None = None
        if rows is None and not block.hidden_layers:
            out = self._runs(**arguments)
        else:
            layers = block.hidden_layers
            taken = self.states.taken(layers) if layers else nullcontext(hidden)
            with taken as hidden, gathering(self.output_head, rows, keep):
                out = self._runs(**arguments)
        logits = out.logits
        if logits.shape[1] != keep:
            if rows is None:
                logits = logits[:, -keep:]
            else:
                begin = rows.to(logits.device, non_blocking=True)
                logits = take_rows(logits, begin, None, 0, keep, False)
        return LevelOutput(logits, hidden or None)

    def _in_pieces(self, block: InputBlock) -> LevelOutput:
        """Run a block with more tokens than a pass may have."""
        tokens, keep, layers, first = block.tokens, block.keep, block.hidden_layers, block.first
        begin = tokens.shape[1] - keep if first is None else min(first)
        logits: list[Tensor] = []
        states: list[Hidden] = []
        with progress.reading(self.name, tokens.shape[1]) as read:
            for start in range(0, tokens.shape[1], self._chunk):
                piece = tokens[:, start : start + self._chunk]
                end = start + piece.shape[1]
                counts = None if block.counts is None else block.counts.less(start, end - start)
                needed = max(end - max(begin, start), 0)
                out = self.run(InputBlock(piece, max(needed, 1), counts, hidden_layers=layers))
                states.append(out.hidden or {})
                if needed:
                    logits.append(out.logits)
                read(end - start)
        rows = torch.cat(logits, 1)
        if first is not None:
            rows = take_rows(rows, first.on(rows.device), None, -begin, keep, False)
        hidden = {layer: torch.cat([piece[layer] for piece in states], 1) for layer in layers}
        return LevelOutput(rows, hidden or None)

    @torch.inference_mode()
    def rollback(self, lengths: Sequence[int]) -> Sequence[int]:
        cached: Sequence[int] = (self._member or self.cache).rollback(lengths)
        return cached

    @torch.inference_mode()
    def keep_path(
        self, begin: Sequence[int], path: Tensor, lengths: Sequence[int]
    ) -> Sequence[int]:
        cached: Sequence[int] = (self._member or self.cache).keep_path(begin, path, lengths)
        return cached

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> None:
        (self._member or self.cache).select(rows)

    # ---- rounds without host synchronisation (`DeviceLengths`) -----------------------

    def reserve_span(self, tokens: int) -> rooms.graphs.MemoryKey | None:
        if self._weights is None:
            self._weights = rooms.graphs.MemoryKey(
                self._runs, itertools.chain(self._runs.parameters(), self._runs.buffers())
            )
        lengths, ready = ([], ()) if self._member is None else self._member.reserve_span()
        angles = None
        if self._stacked is not None:
            weight = self._runs.model.norm.weight
            angles = self._stacked.angles.key(self.cache.rows.capacity, weight)
        span: rooms.graphs.MemoryKey | None = self.cache.reserve_span(
            tokens, (ready, self._weights, angles), lengths
        )
        return span

    def note_lengths(self, lengths: Sequence[int]) -> None:
        self.cache.note_lengths(lengths)
        if self._member is not None:
            self._member.note_lengths(lengths)


def groups(counts: Sequence[int], device: str) -> list[list[int]]:
    """Group rows that are read together, for the least total time: each group costs its longest row
    times its rows, and a fixed cost per pass. Rows without tokens are in no group; `device` is the
    device type of the model."""
    cost = _PASS.get(device, _PASS_ELSEWHERE)
    rows = sorted((b for b, n in enumerate(counts) if n), key=lambda b: -counts[b])
    # best[i]: minimum cost of the i longest rows, and the begin of its last group.
    best = [(0, 0)]
    for end in range(1, len(rows) + 1):
        best.append(min((best[s][0] + cost + counts[rows[s]] * (end - s), s) for s in range(end)))
    cuts = [len(rows)]
    while cuts[-1]:
        cuts.append(best[cuts[-1]][1])
    return [sorted(rows[a:b]) for a, b in itertools.pairwise(reversed(cuts))]
