"""EAGLE heads (`heads`): the network, and published checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from .. import arguments
from ..arguments import shown
from ..kv_cache import RollbackCache
from ..kv_cache.layers import attend
from ..levels.fused import layer_operators
from ..levels.models import ModelLevel
from ..ops.decoder import LayerOperators
from . import checkpoint
from .checkpoint import Target
from .heads import (
    Attention,
    HeadAttention,
    HeadConfig,
    HeadDrafter,
    HeadLayer,
    HeadPasses,
    RotaryNetwork,
    Where,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Eagle", "EagleConfig", "EagleNetwork", "HeadPasses"]


class EagleNetwork(RotaryNetwork):
    """The layers of a head (EAGLE-3's `midlayer` is `layers.0`). In EAGLE-1 the first layer has no
    norm before its attention; in EAGLE-3 it reads embedding and state, concatenated. Arguments: as
    for `RotaryNetwork`."""

    config: EagleConfig

    def __init__(self, config: EagleConfig, **tied: bool) -> None:
        super().__init__(config, **tied)
        layer, width, eps = config.layer, config.hidden_size, config.layer.rms_norm_eps
        first, third = config.version == 1, config.version == 3
        if first or config.fuse:
            inner = 2 * width if first else config.feature_size
            self.fc = nn.Linear(inner, width, bias=config.fc_bias)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(config.feature_size, eps)
        if config.fc_norm:
            norms = [nn.RMSNorm(config.target_hidden_size, eps) for _ in config.hidden_layers]
            self.fc_norm = nn.ModuleList(norms)
        biases, self.layers = (config.qkv_bias, config.output_bias), nn.ModuleList()
        self._numbers = tuple(range(layer.num_hidden_layers))
        for i in self._numbers:
            inner = 2 * width if third and i == 0 else width
            attention = HeadAttention(layer, i, inner, biases)
            self.layers.append(HeadLayer(layer, attention, bare=first and i == 0))
        if third:
            self.layers[0].hidden_norm = nn.RMSNorm(width, eps)
            self.norm = nn.RMSNorm(width, eps)

    def fuse(self, features: Tensor) -> Tensor:
        config = self.config
        if not config.fuse:
            return features
        if config.norm_before_fc:
            features = self.input_norm(features)
        if config.fc_norm:
            states = features.split(config.target_hidden_size, -1)
            normed = [norm(state) for norm, state in zip(self.fc_norm, states, strict=True)]
            features = torch.cat(normed, -1)
        fused: Tensor = self.fc(features)
        return fused

    def forward(
        self, embeds: Tensor, states: Tensor, positions: Tensor, attention: Attention
    ) -> Tensor:
        """Return the state after each token, ``[B, T, H]``, before the final norm of EAGLE-3, as
        `read` does, at positions ``[B or 1, T or 1]`` and with attention over all pairs."""
        cos, _, sin = self.rotation(states, positions)
        rotation = cos[:, None], sin[:, None]
        for number, layer in enumerate(self.layers):
            first = None
            if number == 0:
                states, first = self._entering(layer, embeds, states)
            states = layer(states, rotation, attention, first)
        return states

    def _entering(self, layer: Any, embeds: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        if self.config.version == 1:
            states = self.fc(torch.cat([embeds, states], -1))
            return states, states
        normed = layer.hidden_norm(states)
        first = torch.cat([layer.input_layernorm(embeds), normed], -1)
        return normed if self.config.norm_before_residual else states, first

    def read(self, embeds: Tensor, states: Tensor, where: Where, cache: RollbackCache) -> Tensor:
        positions, mask = where
        if embeds.shape[1] > self.longest:
            attention = partial(attend, cache, [mask] * len(self._numbers))
            out: Tensor = self(embeds, states, positions, attention)
            return out
        cos, sin, _ = self.rotation(states, positions.expand(-1, embeds.shape[1]))
        states, first = self._entering(self.layers[0], embeds, states)
        return self.through_layers(states, (cos, sin), mask, cache, self._numbers, first)

    def fused(self) -> LayerOperators | None:
        return layer_operators(list(self.layers), all_known=True)

    def carried(self, states: Tensor) -> Tensor:
        normed: Tensor = self.norm(states) if self.config.norm_output else states
        return normed

    def before_head(self, states: Tensor) -> Tensor:
        normed: Tensor = states if self.config.version == 1 else self.norm(states)
        return normed


def load_head(
    location: str | Path, target: ModelLevel | PreTrainedModel, dtype: torch.dtype | None = None
) -> HeadPasses:
    """Load the head in a directory."""
    return HeadPasses(*load_network(location, target, dtype, parse, EagleNetwork))


class Eagle(HeadDrafter):
    """An EAGLE-1, EAGLE-2 or EAGLE-3 head (arXiv 2401.15077, 2406.16858, 2503.01840) as the drafter
    of a chain. Arguments: as for `HeadDrafter`."""

    kind = "eagle"
    _load = staticmethod(load_head)
    config: EagleConfig


# ---- checkpoints ---------------------------------------------------------------------------------


# Keys of a layer's configuration: sizes, and others that determine shapes and rotary positions.
SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "vocab_size",
)  # fmt: skip
_POSITIVE = ("rms_norm_eps", "rope_theta")
_LAYER = (*SIZES, *_POSITIVE, "hidden_act", "rope_scaling", "rope_parameters")
_LONG = ("max_position_embeddings", "vocab_size")  # at most one dimension of a product
_SIZE_MAX = 2**20  # of a width: the size of a product of two fits torch's integers
REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_EAGLE3 = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator")
_LAST = -1  # the last hidden state of a model, after its final norm
_AUX_LAYERS = 3  # the default of a configuration
# Values that the network assumes: a configuration may have no others.
_FIXED = {"partial_rotary_factor": 1.0}
_FIXED_3 = {
    "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "parallel_draft_step": 1,
}  # fmt: skip
# Keys without an effect on drafts.
_IGNORED = (
    "architectures", "attention_dropout", "auto_map", "bos_token_id", "dtype", "eos_token_id",
    "initializer_range", "model_type", "_name_or_path", "pad_token_id", "pretraining_tp",
    "speculators_config", "speculators_version", "target_model_type", "torch_dtype",
    "transformers_version", "use_cache",
)  # fmt: skip
_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})
# Prefixes of tensors' names by format, and the network's.
_NAMES = (("midlayer.", "layers.0."), ("fusion_fc.", "fc."), ("transformer.", "layers.0."))
# Tensors for training only, or derived from others.
_UNUSED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
_UNUSED_END = ".rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class EagleConfig(HeadConfig):
    """The configuration of an EAGLE head.

    Attributes:
        version: 1 (EAGLE-1 and EAGLE-2) or 3.
        layer: shape and number of the layers; `vocab_size` is the target's.
        target_hidden_size: width of the target's hidden states.
        hidden_layers: the target's hidden states that the head reads; k is the state after k
            layers, -1 the last state, after the final norm.
        draft_vocab_size: number of ids of the checkpoint's output head; None: the target's.
        fuse: whether `fc` projects the target's states to the head's width (EAGLE-3), before the
            first step of a draft only.
        fc_bias, qkv_bias, output_bias: whether these products have a bias.
        norm_before_fc: norm the target's concatenated states; `fc_norm`: norm each state
            (EAGLE-3.1). Never both.
        norm_before_residual: the first layer's residual is the normed state.
        norm_output: the next step reads the state after the final norm.
    """

    version: int
    layer: LlamaConfig
    target_hidden_size: int
    hidden_layers: tuple[int, ...]
    draft_vocab_size: int | None = None
    fuse: bool = False
    fc_bias: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False


# ---- the configuration ---------------------------------------------------------------------------


def parse(
    config: Mapping[str, Any], tensors: Collection[str], target_layers: int, name: str
) -> EagleConfig:
    """Read the config.json of the checkpoint `name`. An error names the invalid key.

    Args:
        tensors: names of the tensors, which distinguish EAGLE-3 from EAGLE-1 if the configuration
            is a plain Llama's.
        target_layers: n, decoder layers of the target. The default of EAGLE-3 heads is to read the
            inputs of layers 2, n // 2 and n - 3.
    """
    top = Reader(name, config)
    kind = top.of("speculators_model_type")
    if kind not in (None, "eagle", "eagle3"):
        raise top.error("speculators_model_type", "'eagle' or 'eagle3'", kind)
    published = kind is None
    layer = top if published else top.nested("transformer_layer_config")
    layer.read_full_attention()
    layer.refuse_tied(tensors)
    # speculators writes only values other than a Llama's defaults.
    count = checkpoint.count_of(tensors, "layers.")
    shape = layer.shape(REQUIRED if published else (), count)
    bias = layer.flag("attention_bias", False)
    biases: dict[str, bool] = {
        "qkv_bias": layer.flag("qkv_bias", bias or layer.of("model_type") == "qwen2"),
        "output_bias": bias,
    }
    third = kind == "eagle3"
    if published:
        third = any(arch in _EAGLE3 for arch in checkpoint.architectures(config)) or any(
            key.endswith(".hidden_norm.weight") for key in tensors
        )
    if not third:
        if not published and top.flag("layernorms", False):
            raise top.error("layernorms", "false, a head without norms around its layer", True)
        fc_bias = top.flag("bias", True) if published else top.flag("fusion_bias", False)
        head = EagleConfig(1, shape, shape.hidden_size, (_LAST,), fc_bias=fc_bias, **biases)
        layer.require_all_read({})
        top.require_all_read({})
        return head
    # Keys of EAGLE-3 are at the top, or nested in `eagle_config`.
    inner = top.nested("eagle_config", optional=True)
    fields = inner.before(top)
    fuse = fields.flag("use_aux_hidden_state", True)
    head = EagleConfig(
        3,
        shape,
        fields.size("target_hidden_size") or shape.hidden_size,
        _aux_layers(fields, target_layers) if fuse else (_LAST,),
        draft_vocab_size=fields.size("draft_vocab_size"),
        fuse=fuse,
        norm_before_fc=fields.flag("norm_before_fc", False),
        fc_norm=fields.flag("fc_norm", False),
        # speculators' heads without this key were trained with it.
        norm_before_residual=fields.flag("norm_before_residual", not published),
        norm_output=fields.flag("norm_output", False),
        **biases,
    )
    if head.norm_before_fc and head.fc_norm:
        raise ValueError(f"{name}: expected norm_before_fc or fc_norm, given both")
    for reader in (top, layer, inner):
        reader.require_all_read(_FIXED_3)
    return head


def _aux_layers(reader: Reader, target_layers: int) -> tuple[int, ...]:
    key = "eagle_aux_hidden_state_layer_ids"
    value, count = reader.of(key), reader.size("num_aux_hidden_states")
    if value is None:
        if (count or _AUX_LAYERS) != _AUX_LAYERS:
            raise reader.error(key, f"{count} layers, as num_aux_hidden_states says", None)
        value = [2, target_layers // 2, target_layers - 3]
    return reader.layers(key, value, target_layers, count)


class Reader:
    """Keys of a configuration's dictionaries; the first dictionary with a key has precedence."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self.name = name
        self._sources = [(config, set[str]())]  # dictionaries, and their keys read

    def before(self, other: Reader) -> Reader:
        """Return a reader of this reader's dictionaries, then of another's."""
        joined = Reader(self.name, {})
        joined._sources = self._sources + other._sources
        return joined

    def nested(self, key: str, optional: bool = False) -> Reader:
        inner = self.of(key)
        if inner is None and optional:
            inner = {}
        if not isinstance(inner, Mapping):
            raise self.error(key, "a dictionary", inner)
        return Reader(self.name, inner)

    def error(self, key: str, expected: str, given: object) -> ValueError:
        return ValueError(f"{self.name}: {key}: expected {expected}, given {shown(given)}")

    def of(self, key: str) -> Any:
        for config, read in self._sources:
            read.add(key)
            if (value := config.get(key)) is not None:
                return value
        return None

    def flag(self, key: str, default: bool) -> bool:
        value = self.of(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, "true or false", value)
        return default if value is None else value

    def size(self, key: str, most: int = _SIZE_MAX) -> int | None:
        value = self.of(key)
        if value is None:
            return None
        if type(value) is not int or value < 1:
            raise self.error(key, "a number >= 1", value)
        if value > most:
            raise self.error(key, f"at most {most}", value)
        return value

    def number(self, key: str, default: float) -> float:
        value = self.of(key)
        if value is None:
            return default
        if type(value) not in (int, float) or not 0 <= value < 1e30:
            raise self.error(key, "a number >= 0", value)
        return float(value)

    def layers(self, key: str, given: Any, most: int, count: int | None = None) -> tuple[int, ...]:
        """Check and return layer numbers in [0, most] of the target; `count` of them, or any."""
        layers = tuple(given) if isinstance(given, list | tuple) else ()
        whole = all(type(number) is int and 0 <= number <= most for number in layers)
        if not layers or not whole or (count or len(layers)) != len(layers):
            expected = f"{count or 'some'} layers in [0, {most}] of the target"
            raise ValueError(f"{self.name}: {key}: expected {expected}, given {given}")
        return layers

    def refuse_tied(self, tensors: Collection[str]) -> None:
        """Refuse embeddings that are also the output head."""
        tied = self.of("tie_word_embeddings") and "embed_tokens.weight" in tensors
        if tied and "lm_head.weight" not in tensors:
            raise self.error(
                "tie_word_embeddings",
                "false for a head with embeddings and without an output head",
                True,
            )

    def require_all_read(self, fixed: Mapping[str, Any], ignored: Collection[str] = ()) -> None:
        """Refuse a key with an effect that was not read. Allowed are also the values `fixed`,
        beside `_FIXED`, and the keys `ignored`, beside `_IGNORED`."""
        known = {**_FIXED, **fixed}
        for config, read in self._sources:
            for key, value in config.items():
                if key in known and value != known[key] and value is not None:
                    raise self.error(key, known[key], value)
                followed = key in known or key in read or key in (*_IGNORED, *ignored)
                if not followed and value not in _NOTHING:
                    raise self.error(key, "no such key, which is not followed", value)

    def read_full_attention(self) -> None:
        """Mark keys of a sliding window as read if they mean full attention."""
        ((config, read),) = self._sources
        # Qwen's configurations have an unused window.
        if config.get("use_sliding_window") is False:
            read |= {"sliding_window", "max_window_layers"}
        if set(config.get("layer_types") or ()) <= {"full_attention"}:
            read.add("layer_types")

    def shape(self, required: Collection[str], layers: int) -> LlamaConfig:
        """Read the shape of the layers; the file has tensors of `layers` layers."""
        for key in SIZES:
            value = self.size(key, arguments.SIZE_MAX if key in _LONG else _SIZE_MAX)
            if value is None and key in required:
                raise self.error(key, "a number >= 1", None)
        values = {key: self.of(key) for key in _LAYER if self.of(key) is not None}
        values["mlp_bias"] = self.flag("mlp_bias", False)
        for key in _POSITIVE:
            if key in values:
                if type(values[key]) not in (int, float) or not 0 < values[key] < 1e30:
                    raise self.error(key, "a number > 0", values[key])
                values[key] = float(values[key])
        for key in ("rope_scaling", "rope_parameters"):
            rope = values.get(key)
            factor = rope.get("partial_rotary_factor") if isinstance(rope, Mapping) else None
            if factor not in (None, 1.0):
                raise self.error(f"{key}.partial_rotary_factor", "1.0", factor)
        if values.get("hidden_act", "silu") != "silu":
            raise self.error("hidden_act", "'silu'", values["hidden_act"])
        count = values.setdefault("num_hidden_layers", 1)
        if count != layers:
            raise self.error("num_hidden_layers", f"{layers}, as the tensors have", count)
        try:
            shape = LlamaConfig(**values)
            if not LlamaRotaryEmbedding(shape).inv_freq.isfinite().all():
                raise ValueError("rope_parameters: expected finite rotations")
        # Errors of transformers' checks, which name the field, or any error of its rotations.
        except Exception as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"{self.name}: expected the configuration of a Llama's layer: {reason}"
            ) from error
        heads, keys, dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        if heads % keys:
            expected = f"a divisor of num_attention_heads, {heads}"
            raise self.error("num_key_value_heads", expected, keys)
        if dim % 2 or heads * dim > _SIZE_MAX:
            expected = f"an even number, and at most {_SIZE_MAX} for all of {heads} heads"
            raise self.error("head_dim", expected, dim)
        return shape


# ---- tensors and ids -----------------------------------------------------------------------------


def load_network(
    location: str | Path,
    target: ModelLevel | PreTrainedModel,
    dtype: torch.dtype | None,
    parse: Callable[..., Any],
    kind: Callable[..., Any],
    names: Sequence[tuple[str, str | None]] = (),
) -> tuple[Any, Any, Tensor | None]:
    """Load the network in a directory. Returns the arguments of `HeadPasses`.

    Args:
        parse: returns the configuration, as `parse` of this module does.
        kind: constructs the network, a `RotaryNetwork`.
        names: further prefixes of tensors' names, as `_NAMES`, and the network's; None: not
            read.
    """
    model = Target(target)
    folder = checkpoint.folder_of(location)
    name, text = str(folder), model.text
    content, read = checkpoint.read_config(folder), checkpoint.read_folder(folder)
    tensors = _renamed(read, name, (*_NAMES, *names))
    config = parse(content, tensors, text.num_hidden_layers, name)
    _require_target(config, text, name)
    offsets = tensors.pop("d2t", None)
    has = {key: f"{key}.weight" in tensors for key in ("embed_tokens", "lm_head")}
    network: Any = model.load(
        lambda: kind(config, embeds=has["embed_tokens"], heads=has["lm_head"]), tensors, dtype, name
    )
    size, width = config.draft_vocab_size, config.hidden_size
    if not has["embed_tokens"] and width != text.hidden_size:
        raise ValueError(
            f"{name}: embed_tokens.weight: expected shape [{text.vocab_size}, {width}], given "
            f"none, and the target's embeddings have {text.hidden_size} columns"
        )
    if size is not None and not has["lm_head"]:
        raise ValueError(f"{name}: lm_head.weight: expected shape [{size}, {width}], given none")
    ids = _draft_ids(size, offsets, read.get("t2d"), text.vocab_size, name)
    if ids is not None:
        ids = _in_order(ids, network.drawn_weights).to(model.device)
    return network, target, ids


def _renamed(
    tensors: Mapping[str, Tensor], name: str, names: Sequence[tuple[str, str | None]]
) -> dict[str, Tensor]:
    renamed: dict[str, Tensor] = {}
    for key, value in tensors.items():
        if key in _UNUSED or key.endswith(_UNUSED_END):
            continue
        new_key: str | None = key
        for old, new in names:
            if new_key is not None and new_key.startswith(old):
                new_key = None if new is None else new + new_key.removeprefix(old)
        if new_key in renamed:
            raise ValueError(f"{name}: {new_key}: expected one tensor of this name, given two")
        if new_key is not None:
            renamed[new_key] = value
    return renamed


def _require_target(config: Any, text: Any, name: str) -> None:
    """Refuse a head for a target other than that with the decoder's configuration `text`."""
    if config.target_hidden_size != text.hidden_size:
        raise ValueError(
            f"{name}: expected a target with hidden states of {config.target_hidden_size} "
            f"numbers, given one with {text.hidden_size}"
        )
    if config.layer.vocab_size != text.vocab_size:
        raise ValueError(
            f"{name}: vocab_size: expected the target's, {text.vocab_size}, given "
            f"{config.layer.vocab_size}"
        )
    fuses = not isinstance(config, EagleConfig) or config.fuse
    if not fuses and config.hidden_size != config.target_hidden_size:
        raise ValueError(
            f"{name}: hidden_size: expected the target's, {config.target_hidden_size}, where no "
            f"product brings one to the other, given {config.hidden_size}"
        )


@torch.no_grad()
def _in_order(ids: Tensor, weights: Sequence[Tensor]) -> Tensor:
    # Ascending; the rows of `weights`, a row for each id, are reordered alike.
    ids, order = ids.sort()
    if not torch.equal(order, torch.arange(len(order))):
        for weight in weights:
            weight.copy_(weight[order.to(weight.device)])
    return ids


def _draft_ids(
    size: int | None, offsets: Tensor | None, mask: Tensor | None, vocab_size: int, name: str
) -> Tensor | None:
    """Return the target's ids of the `size` entries of the draft vocabulary; None: all. `offsets`
    (d2t) are ids minus entries, and `mask` (t2d), over the target's `vocab_size` ids, must be True
    at the same ids."""
    ids = None
    if offsets is None:
        if size not in (None, vocab_size):
            raise ValueError(f"{name}: d2t: expected shape [{size}], given none")
    elif size is None:
        raise ValueError(
            f"{name}: d2t: expected no such tensor without draft_vocab_size, given shape "
            f"{list(offsets.shape)}"
        )
    else:
        if tuple(offsets.shape) != (size,):
            raise ValueError(f"{name}: d2t: expected shape [{size}], given {list(offsets.shape)}")
        if offsets.dtype not in (torch.int64, torch.int32, torch.int16):
            raise ValueError(f"{name}: d2t: expected integers, given {offsets.dtype}")
        ids = torch.arange(size) + offsets.to(torch.int64)
        count = ids[(ids >= 0) & (ids < vocab_size)].unique().shape[0]
        if count != size:
            raise ValueError(
                f"{name}: d2t: expected offsets to {size} different ids in [0, {vocab_size}), "
                f"given {count}"
            )
    if mask is None:
        return ids
    if tuple(mask.shape) != (vocab_size,):
        raise ValueError(f"{name}: t2d: expected shape [{vocab_size}], given {list(mask.shape)}")
    known = torch.full((vocab_size,), ids is None)
    if ids is not None:
        known.index_fill_(0, ids, True)
    differ = (known != mask.bool()).nonzero().flatten()
    if len(differ):
        first = int(differ[0])
        raise ValueError(
            f"{name}: t2d: expected the {int(known.sum())} ids of d2t, given one that differs in "
            f"{len(differ)} (first: id {first}, which d2t has{'' if known[first] else ' not'})"
        )
    return ids
