"""Multi-token prediction heads (MTP), published with a model's weights: one more decoder layer of
the model's class, which reads the embedding of a token and the target's last hidden state, after
its final norm, of the token before. It shares embeddings and output head with the target, and
drafts as EAGLE heads do (`heads`): each later step of a draft reads the state of the step before.
With several heads, each step has a separate head.

Checkpoints name the tensors in four ways (`_LAYOUTS`).
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..kv_cache import RollbackCache
from ..levels.fused import layer_operators
from ..levels.models import ModelLevel, cache_name, decoder_layers
from ..ops.decoder import LayerOperators
from ..tensors import RowCounts
from . import checkpoint
from .checkpoint import Target
from .features import LAST, FeatureCache
from .heads import HeadConfig, HeadDrafter, HeadNetwork, HeadPasses, Where

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PARTS = ("embed_norm", "state_norm", "fc", "norm")  # modules of the network
_NUMBERED = re.compile(r"layers\.(\d+)\.")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
_SCALE = "_scale_inv"  # suffix of the scales of a matrix of 8-bit floats, a factor for each block
_ATTENDS = "full_attention"


@dataclass(frozen=True, slots=True)
class _Layout:
    """Names of a checkpoint's tensors.

    Attributes:
        family: families of models with this layout, for messages.
        begin: prefix of every name; {k} is the number of heads before, {n} this number plus the
            number of the target's layers.
        parts: names of the modules `_PARTS`, after `begin`; {last} is the index of a head's last
            layer.
        numbered: names of layers have an index, else there is a single layer. Indices continue
            from head to head; heads share tensors without an index.
        states_first: `fc` reads the state before the embedding.
        unused: names, after `begin`, of copies of the target's tensors.
        kinds: prefixes of the models' `model_type`.
    """

    family: str
    begin: str
    parts: tuple[str, str, str, str]
    numbered: bool = False
    states_first: bool = False
    unused: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()

    def prefix(self, count: int, head: int = 0) -> str:
        """Return the prefix of the names of a head for a target of `count` layers."""
        return self.begin.format(n=count + head, k=head)

    def named(self, rest: str, head: int, blocks: int) -> str | None:
        """Return the network's name of the tensor ``{begin}{rest}``; None: the tensor is of a head
        other than number `head`, each of `blocks` layers, or not read."""
        if self.numbered and (match := _NUMBERED.match(rest)):
            number = int(match[1]) - head * blocks
            if not 0 <= number < blocks:
                return None
            rest = f"layers.{number}.{rest[match.end() :]}"
        if rest.removesuffix(_SCALE) in self.unused or rest.endswith(".rotary_emb.inv_freq"):
            return None
        for pattern, name in zip(self.parts, _PARTS, strict=True):
            begin = pattern.format(last=blocks - 1) + "."
            if rest.startswith(begin):
                return f"{name}.{rest.removeprefix(begin)}"
        return rest if self.numbered else f"layers.0.{rest}"

    def published(self, name: str, count: int, blocks: int) -> str:
        """Return the checkpoint's name of the network's tensor `name`."""
        begin, _, rest = name.partition(".")
        if begin in _PARTS:
            begin = self.parts[_PARTS.index(begin)].format(last=blocks - 1)
            return f"{self.prefix(count)}{begin}.{rest}"
        return self.prefix(count) + (name if self.numbered else name.removeprefix("layers.0."))

    def first(self, count: int) -> str:
        """Return the name of a tensor that every head for a target of `count` layers has."""
        return f"{self.prefix(count)}{self.parts[2]}.weight"


_LAYOUTS = (
    _Layout(
        "DeepSeek V3, GLM 4",
        "model.layers.{n}.",
        ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
        unused=("embed_tokens.weight", "shared_head.head.weight"),
        kinds=("deepseek", "glm4"),
    ),
    _Layout(
        "Qwen3-Next, Qwen3.5",
        "mtp.",
        ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
        numbered=True,
        kinds=("qwen3_next", "qwen3_5"),
    ),
    _Layout(
        "MiMo",
        "model.mtp_layers.{k}.",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        states_first=True,
    ),
    _Layout(
        "Nemotron-H",
        "mtp.",
        ("layers.0.enorm", "layers.0.hnorm", "layers.0.eh_proj", "layers.{last}.final_layernorm"),
        numbered=True,
        kinds=("nemotron_h",),
    ),
)


@dataclass(frozen=True, slots=True)
class MTPConfig(HeadConfig):
    """Configuration of multi-token prediction heads."""

    layer: Any  # configuration of the layers of the cache
    blocks: Any  # configuration of the decoder layers of all heads
    states_first: bool  # `fc` reads the state before the embedding
    target_hidden_size: int  # width of the target's states and the head's
    heads: int = 1  # number of heads, each for a step of a draft
    hidden_layers: tuple[int, ...] = (LAST,)  # the target's last states, after its final norm
    draft_vocab_size: None = None


class _Indexed:
    """The interface of a cache for layers that select keys by the keys of an index (DeepSeek V3.2):
    index keys are in layers `count` to 2 `count` - 1 of the cache, after the head's `count`."""

    def __init__(self, cache: RollbackCache, count: int) -> None:
        self._cache, self._count = cache, count

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        return self._cache.update(keys, values, layer)

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        single = keys[:, None]
        return self._cache.update(single, single[..., :1], layer + self._count)[0][:, 0]


class MTPNetwork(HeadNetwork):
    """Head `number`, with layers of the target's class and the target's rotary positions."""

    config: MTPConfig

    def __init__(self, config: MTPConfig, target: Target, number: int = 0) -> None:
        super().__init__()
        self.config, width = config, config.hidden_size
        body, layers = decoder_layers(target.model, target.text.num_hidden_layers)
        norm = next(child for child in body.children() if type(child).__name__.endswith("Norm"))
        self.embed_norm, self.state_norm, self.norm = (copy.deepcopy(norm) for _ in range(3))
        self.fc = nn.Linear(2 * width, width, bias=False)
        kind: Any = type(layers[-1])
        count = config.blocks.num_hidden_layers // config.heads
        numbers = range(number * count, (number + 1) * count)
        self.layers = nn.ModuleList(kind(config.blocks, layer) for layer in numbers)
        # In a list, so that it is no submodule: its tensors are not the checkpoint's.
        self._rotary: list[Any] = [getattr(body, "rotary_emb", None)]
        self._cache_name = cache_name(self.layers[0])

    def paired(self, embeds: Tensor, states: Tensor) -> Tensor:
        """Return the inputs of `fc`, ``[B, T, 2 * H]``."""
        pair = [self.embed_norm(embeds), self.state_norm(states)]
        return torch.cat(pair[::-1] if self.config.states_first else pair, -1)

    def read(self, embeds: Tensor, states: Tensor, where: Where, cache: RollbackCache) -> Tensor:
        x, (positions, mask) = self.fc(self.paired(embeds, states)), where
        positions = positions.expand(x.shape[:2])
        if x.shape[1] <= self.longest:
            rotation = self._rotary[0](x, positions)
            layers: Any = self.layers
            numbers = tuple(layer.self_attn.layer_idx for layer in layers)
            fused: Tensor = self.norm(self.through_layers(x, rotation, mask, cache, numbers))
            return fused
        options: dict[str, Any] = {self._cache_name: cache, "position_ids": positions}
        if _is_indexed(self.config.blocks):
            options[self._cache_name] = _Indexed(cache, self.config.blocks.num_hidden_layers)
            if mask is None:
                mask = x.new_zeros(1, 1, 1, cache.rows.span)
            mask = mask.expand(*x.shape[:1], 1, x.shape[1], -1)
        if self._rotary[0] is not None:
            options["position_embeddings"] = self._rotary[0](x, positions)
        for layer in self.layers:
            x = layer(x, attention_mask=mask, **options)
        normed: Tensor = self.norm(x)
        return normed

    def fused(self) -> LayerOperators | None:
        return layer_operators(list(self.layers)) if self._rotary[0] is not None else None


def _is_indexed(text: Any) -> bool:
    return getattr(text, "index_topk", None) is not None


def _layer_config(text: Any, kinds: Sequence[str], sparse: bool) -> Any:
    """Return the target's configuration `text` with layers of `kinds`, with experts if they are
    `sparse`."""
    config = copy.deepcopy(text)
    values: dict[str, Any] = {
        "layer_types": list(kinds),
        "mlp_layer_types": ["sparse" if sparse else "dense"] * len(kinds),
        "first_k_dense_replace": 0 if sparse else len(kinds),
        "mlp_only_layers": [] if sparse else list(range(len(kinds))),
        "decoder_sparse_step": 1,
        "sliding_window": None,
        "num_hidden_layers": len(kinds),
    }
    if getattr(text, "_attn_implementation", None) != "eager":
        values["_attn_implementation"] = "sdpa"  # takes masks of any pattern
    for key, value in values.items():
        if getattr(config, key, value) != value:
            setattr(config, key, value)
    return config


# ---- the checkpoint ------------------------------------------------------------------------------


def load_mtp(
    location: str | Path,
    target: ModelLevel | PreTrainedModel,
    dtype: torch.dtype | None = None,
    most: int | None = None,
) -> HeadPasses:
    """Load the heads in the target's checkpoint, at most `most`."""
    model = Target(target)
    folder = checkpoint.folder_of(location)
    name, count = str(folder), model.text.num_hidden_layers
    names = set[str]().union(*map(checkpoint.names_in, checkpoint.weight_files(folder)))
    plain = list(map(_plain, names))
    layout = _layout(plain, count, name)
    kinds = _kinds(model)
    types = getattr(model.text, "layer_types", None) or ()
    if layout.kinds and "sliding_attention" in types:
        raise ValueError(
            f"{name}: expected a target without sliding windows, which are not followed in MTP "
            f"heads, given layers of {', '.join(sorted(set(types)))}"
        )
    heads = _heads(layout, plain, count, len(kinds))[:most]
    known = set[str]().union(*heads)
    saved = checkpoint.read_folder(folder, lambda key: _plain(key).removesuffix(_SCALE) in known)
    saved = {_plain(key): value for key, value in saved.items()}
    settings = checkpoint.read_config(folder).get("quantization_config") or {}
    saved = _scaled(saved, settings.get("weight_block_size"), name)
    tensors = [_stacked({head[key]: saved[key] for key in head if key in saved}) for head in heads]
    width = tensors[0]["fc.weight"].shape[0]
    if width != model.hidden_size:
        raise ValueError(
            f"{name}: expected a target with hidden states of {width} numbers, given one with "
            f"{model.hidden_size}"
        )
    config = _config(model, layout, kinds, tensors[0], len(heads))
    networks = [
        model.load(
            functools.partial(MTPNetwork, config, model, number),
            tensors[number],
            dtype,
            f"{name}: {layout.prefix(count, number)}",
            _exact(model),
        )
        for number in range(len(heads))
    ]
    if len(heads) == 1:
        return HeadPasses(networks[0], target)
    return SeveralPasses(SeveralNetwork(config, networks), target)


def new_mtp(target: PreTrainedModel) -> tuple[MTPNetwork, dict[str, str]]:
    """Create a head for a target, in float32, from torch's generator. Its layer begins with the
    weights of the target's last layer if the shapes are equal.

    Returns:
        The head, and by name its tensors' names in a checkpoint: in the layout of the target's
        family, or MiMo's for families without heads.
    """
    model = Target(target)
    kinds = _kinds(model)
    count, family = model.text.num_hidden_layers, str(model.text.model_type)
    known = (layout for layout in _LAYOUTS if layout.kinds and family.startswith(layout.kinds))
    layout = next(known, next(layout for layout in _LAYOUTS if not layout.kinds))
    last = decoder_layers(model.model, count)[1][-1].state_dict()
    config = _config(model, layout, kinds, last, 1)
    attention = getattr(config.blocks, "_attn_implementation", None)
    if attention != "sdpa":
        raise ValueError(
            f"target: expected attention by sdpa, for the masks of training, given {attention}"
        )
    network = MTPNetwork(config, model).float().requires_grad_(True)
    for layer in network.layers:
        shapes = {key: value.shape for key, value in layer.state_dict().items()}
        if shapes == {key: value.shape for key, value in last.items()}:
            layer.load_state_dict(last)
            continue
        for weight in layer.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)
    names = network.state_dict()
    return network, {name: layout.published(name, count, len(kinds)) for name in names}


def _kinds(model: Target) -> list[str]:
    return list(getattr(model.text, "mtp_layers_block_type", None) or [_ATTENDS])


def _config(
    model: Target, layout: _Layout, kinds: Sequence[str], names: Iterable[str], heads: int
) -> MTPConfig:
    """Return the configuration of `heads` heads, each with layers of these kinds, by the `names` of
    the first head's tensors."""
    sparse = any(".experts." in name for name in names)
    blocks = list(kinds) * heads
    layers = len(blocks) * (1 + _is_indexed(model.text)) + heads - 1  # states last
    return MTPConfig(
        _layer_config(model.text, [_ATTENDS] * layers, sparse),
        _layer_config(model.text, blocks, sparse),
        layout.states_first,
        model.hidden_size,
        heads,
    )


def _heads(layout: _Layout, names: Sequence[str], count: int, blocks: int) -> list[dict[str, str]]:
    """Return for each head the network's names of its tensors by the checkpoint's names."""
    heads: list[dict[str, str]] = []
    while True:
        begin, read = layout.prefix(count, len(heads)), dict[str, str]()
        for key in names:
            if key.startswith(begin):
                name = layout.named(key.removeprefix(begin), len(heads), blocks)
                read |= {} if name is None else {key: name}
        if heads and not {name.partition(".")[0] for name in read.values()} >= {"fc", "layers"}:
            return heads
        heads.append(read)


def _plain(key: str) -> str:
    return key.replace("language_model.", "", 1)


def _layout(names: Sequence[str], count: int, name: str) -> _Layout:
    """Return the layout of the head for a target of `count` layers in the checkpoint `name`."""
    for layout in _LAYOUTS:
        if layout.first(count) in names:
            return layout
    like = sorted(key for key in names if key.startswith("mtp.") or ".mtp" in key)
    like = sorted(key for key in names if key.endswith("eh_proj.weight")) or like
    expected = ", ".join(f"{layout.first(count)} ({layout.family})" for layout in _LAYOUTS)
    raise ValueError(
        f"{name}: expected the weights of an MTP head for a target of {count} layers, as one of "
        f"{expected}, given {', '.join(like[:3]) or 'none'}"
    )


def _scaled(
    tensors: Mapping[str, Tensor], block: Sequence[int] | None, name: str
) -> dict[str, Tensor]:
    """Multiply matrices of 8-bit floats by the factors of their blocks; others are unchanged."""
    scaled = {key: value for key, value in tensors.items() if not key.endswith(_SCALE)}
    for key, scales in tensors.items():
        if not key.endswith(_SCALE):
            continue
        weight = tensors.get(key.removesuffix(_SCALE))
        if weight is None or weight.dim() != 2 or block is None or len(block) != 2:
            raise ValueError(
                f"{name}: {key}: expected a matrix beside it and weight_block_size in config.json, "
                f"given {'none' if weight is None else list(weight.shape)} and {block}"
            )
        rows, columns = weight.shape
        factors = scales.repeat_interleave(block[0], 0)[:rows]
        factors = factors.repeat_interleave(block[1], 1)[:, :columns]
        if factors.shape != weight.shape:
            raise ValueError(
                f"{name}: {key}: expected a factor for each block of {list(block)} of "
                f"{[rows, columns]}, given {list(scales.shape)}"
            )
        scaled[key.removesuffix(_SCALE)] = weight.to(scales.dtype) * factors
    return scaled


def _stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stack the matrices of experts by number, gates before up projections, as in transformers."""
    stacked: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for key, value in tensors.items():
        if match := _EXPERT.fullmatch(key):
            begin, number, product = match.groups()
            experts.setdefault(f"{begin}.{product}", {})[int(number)] = value
        else:
            stacked[key] = value
    for key, matrices in experts.items():
        stacked[key] = torch.stack([matrices[number] for number in sorted(matrices)])
    for key in [key for key in experts if key.endswith(".gate_proj")]:
        gates, begin = stacked.pop(key), key.removesuffix("gate_proj")
        if (ups := stacked.pop(f"{begin}up_proj", None)) is not None:
            gates = torch.cat([gates, ups], 1)
        stacked[f"{begin}gate_up_proj"] = gates
    return stacked


def _exact(model: Target) -> set[str]:
    """Return names of the network's tensors that the target's layers keep in float32 beside weights
    of fewer bits, for example expert routers."""
    _, layers = decoder_layers(model.model, model.text.num_hidden_layers)
    return {
        f"layers.{number}.{key}"
        for layer in layers
        for key, value in layer.state_dict().items()
        if value.dtype == torch.float32 != model.model.dtype
        for number in range(len(layers))
    }


class MTP(HeadDrafter):
    """Multi-token prediction heads as the drafter of a chain. Each step but the first reads the
    state of the step before. Head k drafts token k, and the last head all later tokens, so that a
    single head drafts any number. Arguments: as for `HeadDrafter`.

    `from_pretrained` loads only the heads from the target's checkpoint, for trees only the first
    head; the target is also used for rotary positions.
    """

    kind, in_target = "mtp", True
    _load = staticmethod(load_mtp)
    config: MTPConfig


# ---- several heads -------------------------------------------------------------------------------


_DIGITS = (65536, 256, 1)  # digits of an id to base 256: every dtype of a cache represents them


class SeveralNetwork(HeadNetwork):
    """Several heads in order; `read` runs the first."""

    def __init__(self, config: HeadConfig, heads: Sequence[HeadNetwork]) -> None:
        super().__init__()
        self.config, self.heads = config, nn.ModuleList(heads)
        first, self.new_cache = heads[0], functools.partial(SeveralCache, len(heads))
        self.key_shape, self.longest = first.key_shape, first.longest

    def packed(self) -> SeveralNetwork:
        heads: Any = self.heads
        return type(self)(self.config, [head.packed() for head in heads])

    def read(self, embeds: Tensor, states: Tensor, where: Where, cache: RollbackCache) -> Tensor:
        first: Any = self.heads[0]
        out: Tensor = first.read(embeds, states, where, cache)
        return out


class SeveralCache(FeatureCache):
    """Key-value cache of several heads, and the inputs of later heads: for each head but the last a
    layer with its states, the first of these layers also with the tokens.

    The pairs of the first head are as in `FeatureCache`. A row has the same number of slots for
    every head; a later head may not have read the latest pairs.

    Arguments: the number of heads, then as for `FeatureCache`. The layers of states are the last of
    the configuration.
    """

    def __init__(self, heads: int, config: Any, *args: Any) -> None:
        super().__init__(config, *args)
        self._later, self._first = heads - 1, config.num_hidden_layers - heads + 1
        # By head after the first: number of pairs of each row that the head has read.
        self._known: list[list[int]] = []

    @property
    def in_one_place(self) -> bool:
        """False: the host counts the pairs that each head has read."""
        return False

    def begin(self, batch: int, capacity: int) -> None:
        super().begin(batch, capacity)
        self._known = [[0] * batch for _ in range(self._later)]

    def allocate(self, groups: int, width: int) -> None:
        for number, layer in enumerate(self.cache.layers[self._first :]):
            self._hold(layer, 1, self._size, 1 if number else len(_DIGITS))
        super().allocate(groups, width)

    def admit(self, rows: Sequence[int]) -> None:
        super().admit(rows)
        zeros = [0] * (len(self._states) - len(self._known[0]))
        self._known = [
            [0 if row in rows else n for row, n in enumerate((*known, *zeros))]
            for known in self._known
        ]

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self._known = [[known[row] for row in rows] for known in self._known]

    def keep(self, pairs: Sequence[int] | Tensor) -> None:
        super().keep(pairs)
        counts = self._on_host()
        # The last `head` pairs of a head have tokens after the kept pairs.
        self._known = [
            [min(n, max(count - head, 0)) for n, count in zip(known, counts, strict=True)]
            for head, known in enumerate(self._known, 1)
        ]
        if self.cache.rows.host != list(counts):  # after an interrupted pass
            self.cache.rows.assign(self._pairs)

    def note(self, head: int, states: Tensor, tokens: Tensor | None = None) -> None:
        """Append the states ``[B, W, H]`` of a head's pass; for the first head also its tokens
        ``[B, W]``."""
        if head == self._later:
            return
        digits = states[..., :1]
        if tokens is not None:
            digits = torch.stack([tokens // size % 256 for size in _DIGITS], -1).to(states.dtype)
        self.cache.update(states[:, None], digits[:, None], self._first + head)

    def later(
        self, head: int, some: RowCounts, drafted: Tensor
    ) -> tuple[Tensor, Tensor, RowCounts]:
        """Begin a pass of a head after the first over its unread pairs.

        Args:
            some: ``[B]``, 1 for active rows, else 0.
            drafted: ``[B, head]`` int64, the latest draft tokens.

        Returns:
            Tokens ``[B, W]`` int64, states ``[B, W, H]``, and the number of each row's pairs. Call
            `note` and `has_read` after the pass.
        """
        rows = self.cache.rows
        assert rows.host is not None
        ends, known = list(rows.host), self._known[head - 1]
        begins = [n if on else end for n, on, end in zip(known, some, ends, strict=True)]
        counts = RowCounts(list(map(int.__sub__, ends, begins)))
        rows.assign(RowCounts(begins))
        first = self.cache.layers[self._first]
        before = self.cache.layers[self._first + head - 1]
        pairs = RowCounts(begins).on(self.device)[:, None]
        pairs = pairs + torch.arange(max(counts), device=self.device)
        behind = RowCounts(ends).on(self.device)[:, None]
        slots = pairs.minimum(behind - 1).clamp_min(0)[:, None, :, None]
        states = before.keys.gather(2, slots.expand(-1, -1, -1, before.keys.shape[3]))[:, 0]
        slots = (pairs + head).minimum(behind - 1).clamp_min(0)[:, None, :, None]
        digits = first.values.gather(2, slots.expand(-1, -1, -1, len(_DIGITS)))[:, 0].long()
        tokens = (digits * torch.tensor(_DIGITS, device=self.device)).sum(-1)
        new = pairs + head - behind
        tokens = tokens.where(new < 0, drafted.gather(1, new.clamp(0, head - 1)))
        return tokens, states, counts

    def has_read(self, head: int, some: RowCounts) -> None:
        """Record the pairs of the pass of `later` as read."""
        assert self.cache.rows.host is not None
        read = zip(self._known[head - 1], some, self.cache.rows.host, strict=True)
        self._known[head - 1] = [end if on else n for n, on, end in read]


class SeveralPasses(HeadPasses):
    """Passes of several heads, and the cache of a batch. Only the first head drafts trees.
    Arguments: as for `HeadPasses`."""

    network: SeveralNetwork
    features: SeveralCache

    def __init__(self, network: SeveralNetwork, *args: Any) -> None:
        super().__init__(network, *args)
        self._drafted = torch.empty(0, 0)

    def _pass(self, tokens: Tensor, states: Tensor, where: Where, head: int = 0) -> Tensor:
        out = super()._pass(tokens, states, where, head)
        self.features.note(head, out, None if head else tokens)
        return out

    def next(self, step: int, tokens: Tensor, states: Tensor, counts: RowCounts) -> Tensor:
        head = min(step, len(self.network.heads) - 1)
        if step > head:
            return self._behind(False, tokens, states, counts, head)
        self._drafted = tokens if step == 1 else torch.cat([self._drafted, tokens], 1)
        out = self._behind(False, *self.features.later(head, counts, self._drafted), head)
        self.features.has_read(head, counts)
        return out
