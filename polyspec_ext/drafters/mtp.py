"""Multi-token prediction heads (MTP), published with a model's weights: one more decoder layer of
the model's class, which reads the embedding of a token and the target's last hidden state, after
its final norm, of the token before. It shares embeddings and output head with the target, and
drafts as EAGLE heads do (`heads`): each later step of a draft reads the state of the step before.
Of several heads in a checkpoint the first is read.

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
from ..levels.fused import Angles, CachedLayers, cached_layers
from ..levels.models import ModelLevel, cache_name, decoder_layers
from . import checkpoint
from .checkpoint import Target
from .features import LAST
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
        begin: prefix of every name; {n} is the number of the target's layers.
        parts: names of the modules `_PARTS`, after `begin`; {last} is the index of the head's last
            layer.
        numbered: names of layers have an index, else there is a single layer. Indices after the
            head's are of further heads.
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

    def prefix(self, count: int) -> str:
        """Return the prefix of the names of the head for a target of `count` layers."""
        return self.begin.format(n=count)

    def named(self, rest: str, blocks: int) -> str | None:
        """Return the network's name of the tensor ``{begin}{rest}``; None: the tensor is not read,
        or of a head after the first, of `blocks` layers."""
        match = _NUMBERED.match(rest)
        if self.numbered and match and int(match[1]) >= blocks:
            return None
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
        """Return the name of a tensor that the head for a target of `count` layers has."""
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
        "model.mtp_layers.0.",
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
    """Configuration of a multi-token prediction head."""

    layer: Any
    blocks: Any  # configuration of the decoder layers; `layer` is that of the cache's
    states_first: bool  # `fc` reads the state before the embedding
    target_hidden_size: int
    hidden_layers: tuple[int, ...] = (LAST,)
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
    """A head, with layers of the target's class and the target's rotary positions."""

    config: MTPConfig

    def __init__(self, config: MTPConfig, target: Target) -> None:
        super().__init__()
        self.config, width = config, config.hidden_size
        body, layers = decoder_layers(target.model, target.text.num_hidden_layers)
        norm = next(child for child in body.children() if type(child).__name__.endswith("Norm"))
        self.embed_norm, self.state_norm, self.norm = (copy.deepcopy(norm) for _ in range(3))
        self.fc = nn.Linear(2 * width, width, bias=False)
        kind: Any = type(layers[-1])
        numbers = range(config.blocks.num_hidden_layers)
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
        if self.operators is not None:
            assert self.angles is not None
            rotation = self.angles.rotation(x, positions, cache.rows)
            fused: Tensor = self.norm(self.operators.run(x, rotation, mask, cache)[0])
            return fused
        assert positions is not None
        positions = positions.expand(x.shape[:2])
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

    def fused(self) -> CachedLayers | None:
        rotary, numbers = self._rotary[0], range(len(self.layers))
        layers = None if rotary is None else cached_layers(self, self.layers, numbers)
        self.angles = None if layers is None else Angles(rotary, rotary.rope_type)
        return layers


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
) -> HeadPasses:
    """Load the first head in the target's checkpoint."""
    model = Target(target)
    folder = checkpoint.folder_of(location)
    name, count = str(folder), model.text.num_hidden_layers
    names: set[str] = set()
    for file in checkpoint.weight_files(folder):
        checkpoint.read_file(file, names.add)  # `add` returns None: no tensor is read
    plain = list(map(_plain, names))
    layout = _layout(plain, count, name)
    kinds = _kinds(model)
    types = getattr(model.text, "layer_types", None) or ()
    if layout.kinds and "sliding_attention" in types:
        raise ValueError(
            f"{name}: expected a target without sliding windows, which are not followed in an MTP "
            f"head, given layers of {', '.join(sorted(set(types)))}"
        )
    begin = layout.prefix(count)
    keys = [key for key in plain if key.startswith(begin)]
    known = {key: layout.named(key.removeprefix(begin), len(kinds)) for key in keys}
    saved = checkpoint.read_folder(
        folder, lambda key: known.get(_plain(key).removesuffix(_SCALE)) is not None
    )
    saved = {_plain(key): value for key, value in saved.items()}
    settings = checkpoint.read_config(folder).get("quantization_config") or {}
    saved = _scaled(saved, settings.get("weight_block_size"), name)
    tensors = _stacked({str(known[key]): tensor for key, tensor in saved.items()})
    width = tensors["fc.weight"].shape[0]
    if width != model.hidden_size:
        raise ValueError(
            f"{name}: expected a target with hidden states of {width} numbers, given one with "
            f"{model.hidden_size}"
        )
    config = _config(model, layout, kinds, tensors)
    make = functools.partial(MTPNetwork, config, model)
    return HeadPasses(model.load(make, tensors, dtype, f"{name}: {begin}", _exact(model)), target)


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
    config = _config(model, layout, kinds, last)
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
    model: Target, layout: _Layout, kinds: Sequence[str], names: Iterable[str]
) -> MTPConfig:
    """Return the configuration of a head with layers of these kinds, by the `names` of its
    tensors."""
    sparse = any(".experts." in name for name in names)
    layers = len(kinds) * (1 + _is_indexed(model.text))
    return MTPConfig(
        _layer_config(model.text, [_ATTENDS] * layers, sparse),
        _layer_config(model.text, kinds, sparse),
        layout.states_first,
        model.hidden_size,
    )


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
    """A multi-token prediction head as the drafter of a chain. Each step but the first reads the
    state of the step before. Arguments: as for `HeadDrafter`.

    `from_pretrained` loads only the first head from the target's checkpoint; the target is also
    used for rotary positions.
    """

    kind, in_target = "mtp", True
    _load = staticmethod(load_mtp)
    config: MTPConfig
