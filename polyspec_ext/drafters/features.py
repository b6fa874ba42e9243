"""Drafters that read a verifier's hidden states: the cache of drafters with keys and values, Medusa
and Hydra heads, which have no cache, and the states that a drafter has not read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import arguments, rooms
from ..kv_cache import RollbackCache
from ..kv_cache.layers import DEVICE_BUCKET, additive, visible_slots
from ..levels.base import Hidden
from ..levels.fused import pack_layers
from ..levels.models import ModelLevel
from ..ops.decoder import put_rows, take_rows, update_lengths
from ..ops.trees import tree_slots
from ..tensors import Plan, RowCounts
from . import checkpoint
from .base import DraftBlock, DrafterCapabilities, DraftInput, HiddenStates, TreeSize
from .checkpoint import Target, count_of
from .trees import DynamicTree, Nodes, Tree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LAST = -1  # the last hidden state of a model, after its final norm
_STEP = 256  # pairs per row that the cache grows by

# `Append` appends pairs: from tokens [B, W] int64, features [B, W, F] and the number of pairs of
# each row to the state after each row's last pair, [B, 1, H].
Pairs = Sequence[tuple[Tensor, Tensor]]  # keys and values [H, N, D] by layer
Append = Callable[[Tensor, Tensor, RowCounts], Tensor]


class FeatureCache:
    """Key-value cache of a drafter that reads pairs of a hidden state and a token, in rounds with
    and without host synchronisation.

    Pair t of a row is the state after token t and token t + 1, in slot t. Pairs with a verifier's
    states are kept. Tokens read only by a verifier without matching states form pairs with the
    drafter's states, also kept. Drafted pairs are removed when the next draft begins.

    Args:
        config: configuration of the drafter's decoder layers, as `RollbackCache` reads it.
        feature_size: F, total width of the verifier's states in a pair.
        hidden_size: H, width of the drafter's states.
        dtype, device: dtype and device of keys, values and states.
    """

    def __init__(
        self,
        config: Any,
        feature_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._config, self.dtype, self.device = config, dtype, device
        self._feature_size, self._size = feature_size, hidden_size
        self.cache: RollbackCache = cast(Any, None)  # before the first batch
        # Number of pairs of each row; after a round without host synchronisation only the device
        # knows it, at a fixed address.
        self._pairs = RowCounts([])
        self._memory = torch.zeros(0, dtype=torch.int64, device=device)
        self._states = torch.empty(0)  # [B, 1, H], after each row's last pair, for the host
        self._zero = torch.zeros((), dtype=dtype, device=device)

    @property
    def in_one_place(self) -> bool:
        """Whether the numbers of pairs can stay on the device in the current batch."""
        return self.cache is not None and bool(self.cache.in_one_place)

    def begin(self, batch: int, capacity: int) -> None:
        """Begin an empty batch of `batch` rows, the longest of `capacity` tokens."""
        self._pairs = RowCounts([0] * batch)
        self._states = torch.zeros(batch, 1, self._size, dtype=self.dtype, device=self.device)
        if self.cache is None or not self.cache.refit(batch):
            self.cache = self._empty(batch, capacity)

    def allocate(self, groups: int, width: int) -> None:
        """Allocate keys and values, ``[B, groups, C, width]``, before the first pass."""
        shape = self.cache.rows.batch, groups, 0, width
        empty = torch.empty(shape, dtype=self.dtype, device=self.device)
        for layer in self.cache.layers:
            if not layer.is_initialized:
                layer.lazy_initialization(empty, empty)

    def _empty(self, batch: int, capacity: int) -> RollbackCache:
        return RollbackCache(
            self._config,
            batch,
            dtype=self.dtype,
            device=self.device,
            capacity=-(-max(capacity, 1) // _STEP) * _STEP,
            step=_STEP,
            bucket=1 if self.device.type == "cpu" else DEVICE_BUCKET,
        )

    def admit(self, rows: Sequence[int]) -> None:
        """Empty these rows; append empty rows for numbers after the last row."""
        pairs = self._on_host()
        new = max(0, rows[-1] + 1 - len(pairs))
        left = [0 if row in rows else n for row, n in enumerate((*pairs, *[0] * new))]
        self._pairs = RowCounts(left)
        empty = self._states.new_zeros(new, *self._states.shape[1:])
        self._states = torch.cat([self._states, empty])
        self._states[list(rows)] = 0
        self.cache.admit(rows)

    def save(self, row: int, begin: int, end: int) -> Pairs:
        """Return copies of the pairs [begin, end) of a row, by layer."""
        return self.cache.save(row, begin, end)

    def fill(self, row: int, pairs: Sequence[Pairs]) -> None:
        """Replace the pairs of a row by concatenated copies."""
        count = sum(copy[0][0].shape[1] for copy in pairs)
        single = self._empty(1, count)
        for copy in pairs:
            single.restore(copy, copy[0][0].shape[1])
        if count:
            self.cache.take(single, [row])
        counts = list(self._on_host())
        counts[row] = count
        self._pairs = RowCounts(counts)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        pairs = self._on_host()
        self._pairs = RowCounts([pairs[row] for row in rows])
        self._states = self._states[list(rows)]
        self.cache.select(rows)

    def _on_host(self) -> Sequence[int]:
        # Waits for the device after a round without host synchronisation.
        if self._pairs.host is None:
            self._pairs = RowCounts(list(self._pairs))
            self.cache.note_lengths(self._pairs)
            self.cache.rows.assign(self._pairs)  # drafted pairs may follow
        assert self._pairs.host is not None
        return self._pairs.host

    def keep(self, pairs: RowCounts, new: Tensor | None = None, most: int = 0) -> None:
        """Keep the first ``pairs[b]`` >= 0 pairs of row b, and no drafted pairs. The host knows
        the numbers, except in a round without host synchronisation (`reserve_span`). There
        ``new[b]`` pairs, at most `most`, are kept as well, which the next pass appends."""
        rows = self.cache.rows
        if pairs.host is None:
            # The cache has these pairs and the drafted pairs.
            update_lengths(self._memory, rows.lengths, pairs.on(self.device), new, most)
            rows.host = None
            return
        self._pairs = RowCounts(list(map(min, self._on_host(), pairs.host)))
        self.cache.rollback(self._pairs)

    def rollback(self, lengths: Sequence[int] | Tensor) -> None:
        """Keep the pairs of the first ``lengths[b]`` tokens of row b: n tokens have n - 1. Lengths
        unknown to the host are ignored, since the next draft calls `keep`."""
        counts = RowCounts.of(lengths)
        if counts.host is not None:
            self.keep(counts.less(1))

    def appended(self, counts: Sequence[int] | Tensor) -> None:
        """Keep the ``counts[b]`` pairs that the last pass appended to row b. Numbers unknown to
        the host are ignored, since `keep` has added them."""
        new = RowCounts.of(counts)
        if new.host is not None:
            self._pairs = RowCounts(list(map(int.__add__, self._on_host(), new.host)))

    def reserve_span(
        self, tokens: int, more: Hashable = None, followed: bool = False
    ) -> rooms.graphs.MemoryKey | None:
        """Begin a round without host synchronisation (`DeviceLengths`) in which no row gets longer
        than `tokens`, drafted pairs included. `more`: further dependencies of the passes beside
        the cache. `followed`: a single call, after which the caller notes the cache's lengths."""
        if followed:
            span = self.cache.reserve_span(tokens, more, [self._zero])
            self.cache.rows.host = None  # or a graph would have this call's lengths as constants
            return span
        if self._pairs.host is not None:
            if self._memory.shape[0] != len(self._pairs):
                self._memory = self._memory.new_zeros(len(self._pairs))
            self._memory.copy_(self._pairs.on(self.device), non_blocking=True)
            self._pairs = RowCounts(None, self._memory)
        return self.cache.reserve_span(tokens, more, [self._memory, self._zero])

    # ---- passes ----------------------------------------------------------------------------------

    def inputs(
        self, width: int, counts: RowCounts | None, masked: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Prepare the cache for a pass that appends the first ``counts[b]`` of `width` pairs to row
        b (None: all), and return positions and additive mask. Not `masked`: the mask is None,
        since the pass looks up how many slots a pair sees."""
        cache = self.cache
        inputs = cache.inputs(width, counts, masked=masked)
        mask, positions = inputs["attention_mask"], inputs["position_ids"]
        if masked and mask is None and width > 1:  # causal, which a model implies
            slots = torch.arange(cache.rows.span, device=self.device)[None]
            mask = additive(visible_slots(positions, slots), self.dtype)
        return positions, mask

    def tree_inputs(self, width: int, depth: int, ancestors: Tensor) -> tuple[Tensor, Tensor]:
        """Prepare a pass over a tree level, whose pairs stay until `keep`; return as `inputs` does.

        Args:
            width: n, nodes of the level.
            depth: depth of the nodes; 1: children of the root.
            ancestors: ``[B or 1, n, m]`` bool, which of the latest m pairs each node sees; the last
                n are the nodes.
        """
        cache, nodes = self.cache, ancestors.shape[2]
        rows = cache.rows
        cache.prepare(width)
        if rows.at is not None:
            begin = rows.at + width - nodes
            seen = tree_slots(begin, ancestors, rows.span)
            positions = torch.full((1, width), begin + depth - 1, device=self.device)
            return positions, additive(seen, self.dtype)
        # Lengths by row, possibly known to the device only. For few operators: a visibility column
        # for all slots before the tree, a column for each node, and a column for all slots after.
        before = (rows.lengths - nodes)[:, None]
        columns = F.pad(F.pad(ancestors, (1, 0), value=True), (0, 1), value=False)
        index = (torch.arange(1, rows.span + 1, device=self.device) - before).clamp_(0, nodes + 1)
        index = index[:, None].expand(-1, width, -1)
        seen = columns.expand(rows.batch, -1, -1).gather(2, index)
        mask = torch.where(seen, self._zero, torch.finfo(self.dtype).min)
        return before + (depth - 1), mask[:, None]

    # ---- reading new pairs -----------------------------------------------------------------------

    def read(
        self, inputs: DraftInput, layers: Sequence[int], extend: Append, follow: Append
    ) -> Tensor:
        """Append all new pairs.

        Args:
            inputs: inputs of the draft.
            layers: layers of a verifier whose concatenated states are a feature.
            extend: appends pairs with a verifier's features.
            follow: appends pairs with the drafter's states, F = H, at most one per row and call.
                Unused in rounds without host synchronisation, where every level has states.

        Returns:
            ``[B, 1, H]``, the state after each row's last pair.
        """
        hidden = inputs.hidden
        assert hidden is not None
        if hidden.layers:
            apart = [hidden.layers[layer] for layer in layers]
            features = apart[0]
            if len(apart) > 1:
                on_host = inputs.counts.host is not None
                features = torch.cat(apart, -1) if on_host else _side_by_side(apart)
        else:  # all texts have a single token
            features = torch.zeros(len(inputs.tokens), 0, self._feature_size, dtype=self.dtype)
        # (The counts of hidden states are on the state rows' device.)
        num_states = hidden.counts
        counts = inputs.counts.on(num_states.device)
        if inputs.counts.host is None:
            # Keep at most as many pairs as tokens before the new states, in inactive rows too.
            # (No level has read the last token of an unfinished text.)
            fresh, width = torch.minimum(num_states, counts), features.shape[1]
            self.keep(RowCounts(None, hidden.positions), fresh, width)
            return extend(inputs.tokens[:, 1 : width + 1], features, RowCounts(None, fresh))
        # (The state after the last token is in no pair yet.)
        fresh = torch.minimum(num_states, counts - 1).clamp_min(0)
        ends = inputs.positions.to(num_states.device) - 1  # pairs of each text
        pairs = torch.where(num_states > 0, hidden.positions, ends)
        pairs = torch.where(counts > 0, pairs, torch.iinfo(torch.int64).max)
        self.keep(RowCounts.read(pairs, True))
        # Tokens that no verifier with states has read.
        rest = (ends - fresh - self._pairs.on(ends.device)) * (counts > 0)
        # A text of a single token has no pair: the token is read with a state of zeros, until the
        # next draft.
        alone = ((ends == 0) & (counts > 0)).long()
        has_single = bool(alone.any())
        new = RowCounts.read(torch.maximum(fresh, alone), True)
        if width := max(new):
            tokens, states = inputs.tokens[:, 1 : width + 1], features[:, :width]
            if has_single:
                rows = alone.to(self.device)[:, None]
                at = torch.arange(1, width + 1, device=self.device) - rows
                tokens = inputs.tokens.gather(1, at.clamp_max(inputs.tokens.shape[1] - 1))
                shape = len(alone), width, self._feature_size
                told_states = states.to(self.device).where(rows[..., None] == 0, 0)
                states = torch.zeros(shape, dtype=self.dtype, device=self.device)
                states[:, : told_states.shape[1]] = told_states
            self._note(extend(tokens, states, new), new)
        for step in range(int(rest.max())):
            at = (counts - rest + step).clamp(0, inputs.tokens.shape[1] - 1)
            ids = inputs.tokens.gather(1, at[:, None].to(self.device))
            new = RowCounts.read((rest > step).long(), True)
            self._note(follow(ids, self._states, new), new)
        if has_single:
            self._pairs = RowCounts.read(self._pairs.on(ends.device) * (1 - alone), True)
        return self._states

    def _note(self, states: Tensor, counts: RowCounts) -> None:
        if all(counts.host or ()):
            self._states = states
        else:
            read = counts.on(self.device)[:, None, None] > 0
            self._states = torch.where(read, states, self._states)


def _side_by_side(apart: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along the last dimension; a view if they are adjacent in memory."""
    first, sizes = apart[0], [x.shape[2] for x in apart]
    if (first.storage_offset(), first.stride(1)) == (0, sum(sizes)):
        shape = (*first.shape[:2], sum(sizes))
        whole = first.as_strided(shape, first.stride())
        if all(map(Tensor.is_set_to, whole.split(sizes, -1), apart)):
            return whole
    return torch.cat(list(apart), -1)


# ---- heads that read a single state --------------------------------------------------------------


class Block(nn.Module):
    """x + silu(W x), or R x + silu(W x) with a `residual` R, under the published names."""

    def __init__(self, linear: nn.Linear, residual: nn.Linear | None = None) -> None:
        super().__init__()
        self.linear = linear
        self.res_connection: nn.Module = nn.Identity() if residual is None else residual

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.res_connection(x) + F.silu(self.linear(x))
        return out


class MedusaHeads(nn.Module):
    """Medusa heads, with tensors under the published names. Head i has blocks x + silu(W x + b) and
    a product to the vocabulary. It predicts the token i + 2 positions after the token of the state.
    `count` is the number of heads in the checkpoint's `tensors`, 0 if no name is of this kind."""

    # Name of the checkpoint's file, prefix of the heads' numbers, and the first tensor.
    FILE, BEGIN, FIRST = "medusa_lm_head.pt", "", "0.0.linear.weight"

    def __init__(self, tensors: Mapping[str, Tensor], target: Target) -> None:
        super().__init__()
        self.hidden_size, self.vocab_size = width, _ = target.hidden_size, target.vocab_size
        # Keys: {head}.{block}.linear.weight and .bias, {head}.{blocks}.weight. (Several blocks
        # share their weights, and keys repeat.)
        self.count = count_of(tensors, self.BEGIN)
        blocks = count_of((key for key in tensors if ".linear." in key), "0.")
        for i in range(self.count):
            head = [Block(nn.Linear(width, width)) for _ in range(blocks)]
            last = nn.Linear(width, self.vocab_size, bias=False)
            self.add_module(str(i), nn.Sequential(*head, last))

    def below(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Return the next head's inputs ``[B, n, S]`` after the drafted tokens ``[B, n]``, from the
        inputs of the head that drafted them; the first head's is the verifier's state."""
        return states

    def logits(self, states: Tensor, head: int) -> Tensor:
        out: Tensor = self.get_submodule(str(head))(states)
        return out

    def tensors(self) -> list[Tensor]:
        return [*self.parameters(), *self.buffers()]


class HydraHeads(nn.Module):
    """Hydra heads, as `MedusaHeads`. Head i reads x, the state and the target's embeddings of the
    i + 1 tokens after it, concatenated. Its first block is R x + silu(W x), and the others are
    x + silu(W x)."""

    FILE, BEGIN, FIRST = "hydra_lm_head.pt", "hydra_lm_head.", "hydra_lm_head.0.weight"

    def __init__(self, tensors: Mapping[str, Tensor], target: Target) -> None:
        super().__init__()
        self.hidden_size, self.vocab_size = width, size = target.hidden_size, target.vocab_size
        # In a list, so that it is no submodule: its tensors are not the checkpoint's.
        self._embed: list[nn.Module] = [target.model.get_input_embeddings()]
        self.count = count_of(tensors, self.BEGIN)

        def product(key: str, inner: int, outer: int) -> nn.Linear:
            return nn.Linear(inner, outer, bias=f"{key}.bias" in tensors)

        self.hydra_mlp, self.hydra_lm_head = nn.ModuleList(), nn.ModuleList()
        for i in range(self.count):
            key, wide = f"hydra_mlp.{i}", (i + 2) * width
            residual = product(f"{key}.0.res_connection", wide, width)
            blocks = [Block(product(f"{key}.0.linear", wide, width), residual)]
            for j in range(1, count_of(tensors, f"{key}.")):
                blocks.append(Block(product(f"{key}.{j}.linear", width, width)))
            self.hydra_mlp.append(nn.Sequential(*blocks))
            self.hydra_lm_head.append(product(f"hydra_lm_head.{i}", width, size))

    def below(self, states: Tensor, tokens: Tensor) -> Tensor:
        return torch.cat([states, self._embed[0](tokens).to(states.dtype)], -1)

    def logits(self, states: Tensor, head: int) -> Tensor:
        out: Tensor = self.hydra_lm_head[head](self.hydra_mlp[head](states))
        return out

    def tensors(self) -> list[Tensor]:
        parts = (self, *self._embed)
        return [x for module in parts for x in (*module.parameters(), *module.buffers())]


LastStateHeads = MedusaHeads | HydraHeads
_Drafter = TypeVar("_Drafter", bound="LastStateDrafter")


class LastStateDrafter:
    """Drafter with heads that read one state of the verifier: the last hidden state of the second
    to last token, from which the verifier emitted the last. They draft trees of likeliest tokens.

    Args:
        tree: cut at a depth of the number of heads.
        pack: on the CPU, run the heads on packed copies of their weights (`levels.fused`), in
            additional memory of the same size; later changes of linear weights have no effect.
    """

    HEADS: ClassVar[type[LastStateHeads]]

    def __init__(self, heads: LastStateHeads, tree: Tree, name: str, pack: bool = False) -> None:
        self._heads, self._pack = heads, pack
        self.tree, self.name = tree, name
        self._runs = pack_layers(heads) if pack else heads
        weight = next(heads.parameters())
        self.device, self._dtype = weight.device, weight.dtype
        self.vocab_size = heads.vocab_size
        self.max_length: int | None = None
        self.num_forward_passes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the type and its arguments, for `copy` and `pickle`."""
        return type(self), (self._heads, self.tree, self.name, self._pack)

    @classmethod
    def from_pretrained(
        cls: type[_Drafter],
        location: str | Path,
        target: ModelLevel | PreTrainedModel,
        *,
        tree: Tree | None = None,
        dtype: torch.dtype | None = None,
    ) -> _Drafter:
        """Load published heads. Other arguments, and errors: as for `Eagle.from_pretrained`.

        Args:
            location: a directory with the heads' file (`medusa_lm_head.pt`, `hydra_lm_head.pt`) and
                an optional config.json; or an id on the Hugging Face hub.
            tree: a `DynamicTree` or `StaticTree`; None: `DynamicTree()`.
        """
        model = Target(target)
        arguments.instance("tree", tree, Tree)
        arguments.dtype("dtype", dtype)
        folder = checkpoint.folder_of(location, (cls.HEADS.FILE, "*.json"))
        if cls.HEADS is HydraHeads and (folder / "config.json").is_file():
            form = checkpoint.read_config(folder).get("hydra_head_arch", "mlp")
            if form != "mlp":
                raise ValueError(f"{folder}: hydra_head_arch: expected 'mlp', given {form!r}")
        name = str(folder / cls.HEADS.FILE)
        tensors = checkpoint.read_file(folder / cls.HEADS.FILE)
        if not count_of(tensors, cls.HEADS.BEGIN):
            raise ValueError(
                f"{name}: expected {cls.__name__}'s tensors, {cls.HEADS.FIRST} and so on, given "
                f"{', '.join(sorted(tensors)[:3]) or 'none'}"
            )
        heads = model.load(lambda: cls.HEADS(tensors, model), tensors, dtype, name)
        return cls(heads, tree or DynamicTree(), Path(str(location)).name, model.pack)

    @property
    def num_heads(self) -> int:
        """Number of heads, and so of tokens drafted ahead."""
        return self._heads.count

    @property
    def capabilities(self) -> DrafterCapabilities:
        return DrafterCapabilities(
            device_lengths=True,
            reads_apart=True,
            keeps_lengths=True,
            checked=True,
            admits=True,
            continues=True,
            hidden_layers=(LAST,),
            hidden_size=self._heads.hidden_size,
            trees=True,
            tree_size=self._tree_size,
        )

    def _tree_size(self, depth: int) -> TreeSize:
        return self.tree.size(min(depth, self.num_heads), self.vocab_size)

    def _nothing(self, *_: Any) -> None: ...

    # The drafter has no cache.
    prefill = read = open = extend = admit = save = restore = select = note_lengths = _nothing

    def rollback(self, lengths: RowCounts) -> RowCounts:
        return lengths

    def reserve_span(self, tokens: int) -> Hashable:
        return rooms.graphs.MemoryKey(self._runs, self._runs.tensors())

    @torch.inference_mode()
    def draft(self, inputs: DraftInput) -> DraftBlock:
        """Draft as `BatchedDrafter.draft`. A text of a single token has no state and no draft."""
        heads, depth, entries = self._runs, min(inputs.most, self.num_heads), inputs.vocab_size

        def expand(
            tokens: Tensor, above: Tensor, depth: int, ancestors: Tensor | None
        ) -> tuple[Tensor, Tensor]:
            states = heads.below(above, tokens)
            return states, heads.logits(states, depth)[..., :entries]

        def grown(state: Tensor, token: Tensor, lengths: Tensor) -> Nodes:
            first, logits = expand(token, state, 0, None)
            return self.tree.grow(logits[:, 0], first, lengths, depth, expand)

        state, known = self._state(inputs)
        lengths = torch.where(known, inputs.lengths.on(self.device), 0)
        last = inputs.counts.less(1).on(self.device)
        token = inputs.tokens.gather(1, last[:, None]).clamp(0, self.vocab_size - 1)
        tensors = state, token, lengths
        if inputs.passes is None:
            nodes = grown(*tensors)
        else:
            (table,) = inputs.passes.call(
                "a draft", (depth, entries), self.reserve_span, tensors,
                lambda *x: (grown(*x).table(),),
            )  # fmt: skip
            nodes = Nodes.of(table.cpu())
        self.num_forward_passes += self._tree_size(depth).passes
        return DraftBlock(nodes.tokens, nodes.counts, parents=nodes.parents)

    def _state(self, inputs: DraftInput) -> tuple[Tensor, Tensor]:
        """Return the state of the second to last token of each text, ``[B, 1, H]``, zeros if
        unknown, and whether it is known, ``[B]`` bool."""
        hidden, device, batch = inputs.hidden, self.device, len(inputs.tokens)
        if hidden is None or not hidden.layers:  # all texts have a single token
            size = self._heads.hidden_size
            state = torch.zeros(batch, 1, size, dtype=self._dtype, device=device)
            return state, torch.zeros(batch, dtype=torch.bool, device=device)
        layer = hidden.layers[LAST]
        at = inputs.positions.to(device) - 2 - hidden.positions.to(device)
        known = (at >= 0) & (at < hidden.counts.to(device))
        index = at.clamp(0, layer.shape[1] - 1)[:, None, None].expand(-1, 1, layer.shape[2])
        state = layer.gather(1, index.to(layer.device)).to(device, self._dtype)
        return torch.where(known[:, None, None], state, 0), known


class Medusa(LastStateDrafter):
    """Medusa heads (arXiv 2401.10774) as the drafter of a chain. The depth of its tree is at most
    the number of heads; Medusa's is a `StaticTree` of its paths. The paper's "typical acceptance"
    changes the target's distribution; verification by a chain's rule does not."""

    HEADS = MedusaHeads


class Hydra(LastStateDrafter):
    """Hydra heads (arXiv 2402.05109), mlp form, as the drafter of a chain: like Medusa's, but each
    also reads the tokens drafted before. The depth of its tree is at most the number of heads."""

    HEADS = HydraHeads


# ---- hidden states on the way to a drafter -------------------------------------------------------


class HiddenWindow:
    """Hidden states of consecutive tokens per row, from several passes; a later pass overwrites.
    On the CPU, where the host reads the counts, of any number of tokens.

    Args:
        batch: rows, B.
        device: device of `begin` and `end`.

    Attributes:
        begin, end: ``[B]`` int64, positions of the first token of each row and after the last. The
            drafter has read all states before `begin`.
        width: maximum tokens of a row; 0: any number.
    """

    width = 0

    def __init__(self, batch: int, device: torch.device) -> None:
        self.begin = torch.zeros(batch, dtype=torch.int64, device=device)
        self.end = torch.zeros_like(self.begin)
        self._layers: dict[int, Tensor] = {}

    def empty(self, batch: int, device: torch.device, width: int) -> HiddenWindow:
        """Return an empty window of at most `width` tokens per row; 0: any number."""
        return HiddenRing(batch, device, width) if width else HiddenWindow(batch, device)

    @property
    def counts(self) -> Tensor:
        """Return ``[B]`` int64, tokens of each row."""
        return self.end - self.begin

    def write(self, other: HiddenWindow) -> None:
        """Copy the states of `other`. Waits for its device if the devices differ."""
        device, source = self.begin.device, other.states()
        self.begin.copy_(other.begin)
        self.end.copy_(other.begin)
        if source.layers:
            layers = {at: x[:, : self.width or None].clone() for at, x in source.layers.items()}
            self.add(layers, other.begin.to(device), source.counts.to(device, copy=True))

    def add(
        self, layers: Hidden, begin: Tensor, counts: Tensor, skipped: Tensor | None = None
    ) -> None:
        """Add the states ``[B, T, H]`` of a pass, maybe without a copy, and drop earlier states
        after them. Row b has ``counts[b]`` tokens from position ``begin[b]`` on, of which the first
        ``skipped[b]`` keep their earlier states (`LevelOutput.skipped`); a count of 0 leaves the
        row unchanged."""
        active, known = counts > 0, self.end > self.begin
        if not active.any():
            return
        if skipped is None and not known.any():
            # No earlier states to merge.
            self._layers = dict(layers)
            self.begin = torch.where(active, begin, self.begin)
            self.end = self.begin + counts
            return
        own_begin, first, end = self._span_with(begin, counts, skipped)
        width = max(1, int((end - first).max()))
        positions = first[:, None] + torch.arange(width)
        index = positions - begin[:, None]
        fresh = active[:, None] & (positions >= own_begin[:, None]) & (index < counts[:, None])
        before = positions - self.begin[:, None]
        for layer, states in layers.items():
            stored = self._layers.get(layer)
            if stored is None:
                stored = states.new_zeros(len(first), width, states.shape[2])
            dtype = torch.promote_types(stored.dtype, states.dtype)  # rounds no state
            new, old = _at(states, index).to(stored.device, dtype), _at(stored, before).to(dtype)
            merged = torch.where(fresh[..., None].to(stored.device), new, old)
            if stored.shape == merged.shape and stored.dtype == dtype:
                self._layers[layer] = stored.copy_(merged)
            else:
                self._layers[layer] = merged
        self.begin.copy_(first)
        self.end.copy_(end)

    def _span_with(
        self, begin: Tensor, counts: Tensor, skipped: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        # The position of the first state that a pass adds, and begin and end of the window with it.
        active, known, end, own_begin = counts > 0, self.end > self.begin, begin + counts, begin
        if skipped is not None:
            own_begin = torch.minimum(begin + skipped.to(begin.device), end)
        first = torch.where(known, torch.minimum(self.begin, own_begin), own_begin)
        first = torch.where(active, first, self.begin)
        return own_begin, first, torch.where(active, end, self.end)

    def add_pass(
        self,
        plan: Plan,
        kept: Sequence[RowCounts],
        level: int,
        layers: Hidden | None,
        skipped: Tensor | None,
        above: Tensor | None,
    ) -> None:
        """Add the states of a verification by `level` (`layers` and `skipped` of its output); if
        its output has none, drop the states of rejected tokens. `kept` are the remaining cached
        lengths of the verifying levels. The target's states, up to its cached lengths `above`
        ``[B]``, take precedence over the level's."""
        device = plan.part.device
        if layers is None:
            lengths = kept[level - 1].on(device)
            self.cut(torch.where(plan.part > 0, lengths, torch.iinfo(lengths.dtype).max))
            return
        begin = plan.positions - (plan.counts - plan.lengths)
        if above is not None:
            read = (above - begin).clamp_min(0)
            skipped = read if skipped is None else read.maximum(skipped.to(read.device))
        # (Idle rows have no states.)
        self.add(layers, begin, (kept[level - 1].on(device) - begin) * plan.part, skipped)

    def states(self) -> HiddenStates:
        """Return the states, which a later pass may overwrite."""
        return HiddenStates(self._layers, self.begin, self.end - self.begin)

    def cut(self, lengths: Tensor) -> None:
        """Drop states after the first ``lengths[b]`` tokens of row b, ``[B]`` int64."""
        torch.minimum(self.end, lengths, out=self.end)
        torch.minimum(self.begin, lengths, out=self.begin)

    def forget(self, part: Tensor, ended: Sequence[bool], counts: Tensor) -> None:
        """Drop the `counts` states of rows with `part` 1, ``[B]`` int64, else 0, after the drafter
        has read them, and maybe of rows that have `ended`. Rows that idle in this round keep
        their states."""
        torch.where((part > 0) | torch.tensor(ended), self.end, self.begin, out=self.begin)
        if not (self.end > self.begin).any():
            self._layers = {}  # states of a prompt may be large

    def select(self, rows: Sequence[int | None]) -> None:
        """Keep the rows `rows`, in that order; None: a row without states."""
        index = [0 if row is None else row for row in rows]
        fresh = torch.tensor([row is None for row in rows], dtype=torch.bool)
        self.begin = self.begin[index].masked_fill(fresh, 0)
        self.end = self.end[index].masked_fill(fresh, 0)
        self._layers = {layer: states[index] for layer, states in self._layers.items()}

    def fits(self, rows: Sequence[int], width: int) -> bool:
        """Return whether all of `rows` have states, and every row at most `width`."""
        counts = self.counts
        return bool(counts[list(rows)].all()) and int(counts.max()) <= width


class HiddenRing(HiddenWindow):
    """A window of at most `width` tokens per row, W, at a fixed address, for captured steps: a pass
    begins within the window or at its end, and has at most 2 W tokens. All verifying levels output
    states."""

    def __init__(self, batch: int, device: torch.device, width: int) -> None:
        super().__init__(batch, device)
        self.width = width
        # A ring ``[B, 6 W, sum of H]`` of the concatenated layers.
        self._ring: Tensor | None = None
        self._sizes: dict[int, int] = {}

    @property
    def tensors(self) -> list[Tensor]:
        """All memory, for the keys of captured graphs."""
        ring = [] if self._ring is None else [self._ring]
        return [self.begin, self.end, *ring]

    def add(
        self, layers: Hidden, begin: Tensor, counts: Tensor, skipped: Tensor | None = None
    ) -> None:
        _, first, end = self._span_with(begin, counts, skipped)
        self._put(layers, begin, None, 0, (counts > 0).long(), skipped, *[None] * 4)
        self.begin.copy_(first)
        self.end.copy_(end)

    def _put(self, layers: Hidden, at: Tensor, *others: Tensor | int | None) -> None:
        """Write the states of a pass to the ring: arguments of `put_rows` from `at` on."""
        self._sizes = self._sizes or {layer: states.shape[2] for layer, states in layers.items()}
        apart, ring, device = [layers[layer] for layer in self._sizes], self._ring, at.device
        states = torch.cat(apart, -1) if len(apart) > 1 else apart[0]
        if ring is None:
            ring = states.new_zeros(len(at), 6 * self.width, states.shape[2], device=device)
        dtype = torch.promote_types(ring.dtype, states.dtype)  # rounds no state
        ring = self._ring = ring.to(dtype)
        put_rows(ring, states.to(device, dtype), at, *others)

    def add_pass(
        self,
        plan: Plan,
        kept: Sequence[RowCounts],
        level: int,
        layers: Hidden | None,
        skipped: Tensor | None,
        above: Tensor | None,
    ) -> None:
        """Add as `HiddenWindow.add_pass`, in few operators."""
        if layers is None:
            super().add_pass(plan, kept, level, layers, skipped, above)
            return
        lengths = kept[level - 1].on(plan.part.device)
        given = plan.positions, plan.first, -1, plan.part, skipped, above
        self._put(layers, *given, self.begin, self.end, lengths)

    def states(self) -> HiddenStates:
        """Return a copy of the states."""
        layers, ring = {}, self._ring
        if ring is not None:
            states = take_rows(ring, self.begin, None, 0, self.width, True)
            parts = states.split(list(self._sizes.values()), -1)
            layers = dict(zip(self._sizes, parts, strict=True))
        return HiddenStates(layers, self.begin, self.end - self.begin)

    def forget(self, part: Tensor, ended: Sequence[bool], counts: Tensor) -> None:
        self.begin.addcmul_(counts, part)  # one operator

    def select(self, rows: Sequence[int | None]) -> None:
        super().select(rows)
        index = [0 if row is None else row for row in rows]
        self._ring = None if self._ring is None else self._ring[index]


def _at(states: Tensor, indices: Tensor) -> Tensor:
    indices = indices.to(states.device).clamp(0, states.shape[1] - 1)
    return states.gather(1, indices[..., None].expand(-1, -1, states.shape[2]))
