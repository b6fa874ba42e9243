"""What the configuration of an EAGLE head says, in the two formats in which heads are published.

* SafeAILab's (also SpecForge's): the configuration of a one-layer Llama, with a few keys beside it;
* speculators': `speculators_model_type`, and the layer's configuration nested in
  `transformer_layer_config`.

EAGLE-1 and EAGLE-2 (arXiv 2401.15077, 2406.16858) are one network; EAGLE-3 is arXiv 2503.01840.

A key that says something and is not read here is refused by name: a head that left it out would
draft worse, and nothing would show it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ... import arguments
from ...arguments import shown
from ..checkpoint import count_of

# Of a layer's configuration: what the layer's shape and rotary positions depend on.
_LAYER = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings",
    "rope_theta", "rope_scaling", "rope_parameters", "vocab_size",
)  # fmt: skip
_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "vocab_size",
)  # fmt: skip
_LONG = ("max_position_embeddings", "vocab_size")  # no width of a product beside another
_POSITIVE = ("rms_norm_eps", "rope_theta")
_SIZE_MAX = 2**20  # of a width: a product of two has a size that torch can tell
_REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_EAGLE3 = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator")
LAST = -1  # the last hidden state of a model, after its final norm
_AUX_LAYERS = 3  # unless the configuration says otherwise
# What the network does whatever the configuration says, so that it must say that.
_FIXED = {"partial_rotary_factor": 1.0}
_FIXED_3 = {
    "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "parallel_draft_step": 1,
}  # fmt: skip
# What no number of a draft depends on.
_BESIDE = (
    "architectures", "attention_dropout", "auto_map", "bos_token_id", "dtype", "eos_token_id",
    "initializer_range", "model_type", "_name_or_path", "pad_token_id", "pretraining_tp",
    "speculators_config", "speculators_version", "target_model_type", "torch_dtype",
    "transformers_version", "use_cache",
)  # fmt: skip
_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """An EAGLE head.

    Attributes:
        version: 1 (EAGLE-1 and EAGLE-2) or 3.
        layer: shape of its layers and their number; `vocab_size` is the target's.
        target_hidden_size: width of the target's hidden states.
        hidden_layers: of the target, whose states the head reads; k is the state after k layers,
            -1 the last one, after the final norm.
        draft_vocab_size: ids that its own head knows; None: all of the target's.
        fuse: whether `fc` brings the target's states to the head's width (EAGLE-3), before the
            first step of a draft only.
        fc_bias, qkv_bias, output_bias, mlp_bias: which products have one.
        norm_before_fc: one norm over all of the target's states, side by side; `fc_norm`: one over
            each of them (EAGLE-3.1). Never both.
        norm_before_residual: the first layer's residual is the normed state.
        norm_output: the state that the next step reads is the one behind the final norm.
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
    mlp_bias: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False

    @property
    def hidden_size(self) -> int:
        return int(self.layer.hidden_size)

    @property
    def head_dim(self) -> int:
        own = getattr(self.layer, "head_dim", None)
        return int(own or self.hidden_size // self.layer.num_attention_heads)

    @property
    def feature_size(self) -> int:
        """Width of what the head reads of a token: the states of `hidden_layers`, side by side."""
        return self.target_hidden_size * len(self.hidden_layers)


def parse(
    given: Mapping[str, Any], tensors: Collection[str], target_layers: int, name: str
) -> EagleConfig:
    """The head that a checkpoint holds.

    Args:
        given: its config.json.
        tensors: names of its tensors, which tell EAGLE-3 from EAGLE-1 where the configuration is
            that of a plain Llama.
        target_layers: decoder layers of the target; EAGLE-3 heads that do not name their layers
            read the states that enter layers 2, n // 2 and n - 3.
        name: of the checkpoint, for messages.

    Raises:
        ValueError: a key is missing, of another kind or not known, or the head is of another
            architecture; names it.
    """
    made, readers = _parsed(given, tensors, target_layers, name)
    for reader in readers:
        reader.require_read(_FIXED_3 if made.version == 3 else {})
    return made


def _parsed(
    given: Mapping[str, Any], tensors: Collection[str], target_layers: int, name: str
) -> tuple[EagleConfig, list[_Reader]]:
    """Return the head, and what its keys were read by."""
    reader = _Reader(given, name)
    kind = reader.of("speculators_model_type")
    if kind not in (None, "eagle", "eagle3"):
        raise ValueError(
            f"{name}: speculators_model_type: expected 'eagle' or 'eagle3', given {kind!r}"
        )
    layer = reader.nested("transformer_layer_config") if kind is not None else reader
    layer.require_full_attention()
    tied = layer.of("tie_word_embeddings") and "embed_tokens.weight" in tensors
    if tied and "lm_head.weight" not in tensors:
        raise ValueError(
            f"{name}: tie_word_embeddings: expected false for a head with embeddings and without "
            "an output head, given true"
        )
    third = kind == "eagle3" if kind is not None else _is_third(given, tensors)
    # speculators writes only what differs from a Llama's defaults.
    shape = layer.shape(() if kind is not None else _REQUIRED, count_of(tensors, "layers."))
    attention_bias = layer.flag("attention_bias", False)
    biases: dict[str, bool] = {
        "qkv_bias": layer.flag("qkv_bias", attention_bias or layer.of("model_type") == "qwen2"),
        "output_bias": attention_bias,
        "mlp_bias": layer.flag("mlp_bias", False),
    }
    if not third:
        if kind is not None and reader.flag("layernorms", False):
            raise ValueError(
                f"{name}: layernorms: expected false, a head without norms around its layer, "
                "given true"
            )
        bias = reader.flag("bias", True) if kind is None else reader.flag("fusion_bias", False)
        made = EagleConfig(1, shape, shape.hidden_size, (LAST,), fuse=False, fc_bias=bias, **biases)
        return made, [reader, layer]
    # Keys of EAGLE-3 stand at the top, or nested in `eagle_config`.
    inner = reader.nested("eagle_config", optional=True)
    both = (inner, reader)
    uses = _flag(both, "use_aux_hidden_state", True)
    layers: tuple[int, ...] = (LAST,)
    if uses:
        layers = _aux_layers(both, target_layers, name)
    before, each = _flag(both, "norm_before_fc", False), _flag(both, "fc_norm", False)
    if before and each:
        raise ValueError(f"{name}: expected norm_before_fc or fc_norm, given both")
    made = EagleConfig(
        3,
        shape,
        _size(both, "target_hidden_size", shape.hidden_size) or shape.hidden_size,
        layers,
        draft_vocab_size=_size(both, "draft_vocab_size", None),
        fuse=uses,
        norm_before_fc=before,
        fc_norm=each,
        # speculators' heads have been trained with it where they do not say.
        norm_before_residual=_flag(both, "norm_before_residual", kind is not None),
        norm_output=_flag(both, "norm_output", False),
        **biases,
    )
    return made, [reader, layer, inner]


def _is_third(given: Mapping[str, Any], tensors: Collection[str]) -> bool:
    if any(one in _EAGLE3 for one in _architectures(given)):
        return True
    return any(one.endswith(".hidden_norm.weight") for one in tensors)


def names_a_head(given: Mapping[str, Any]) -> bool:
    """Whether a config.json says by itself that it is that of an EAGLE head."""
    if str(given.get("speculators_model_type", "")).startswith("eagle"):
        return True
    return any("eagle" in str(one).lower() for one in _architectures(given))


def _architectures(given: Mapping[str, Any]) -> list[Any]:
    named = given.get("architectures")
    return named if isinstance(named, list) else []


def _aux_layers(both: Sequence[_Reader], target_layers: int, name: str) -> tuple[int, ...]:
    given = _of(both, "eagle_aux_hidden_state_layer_ids")
    count = _size(both, "num_aux_hidden_states", None)
    if given is None:
        if (count or _AUX_LAYERS) != _AUX_LAYERS:
            raise ValueError(
                f"{name}: eagle_aux_hidden_state_layer_ids: expected {count} layers, as "
                "num_aux_hidden_states says, given none"
            )
        given = [2, target_layers // 2, target_layers - 3]
    layers = tuple(given) if isinstance(given, list | tuple) else ()
    whole = all(type(one) is int and 0 <= one <= target_layers for one in layers)
    if not layers or not whole or (count or len(layers)) != len(layers):
        raise ValueError(
            f"{name}: eagle_aux_hidden_state_layer_ids: expected {count or 'some'} layers in [0, "
            f"{target_layers}] of the target, given {given}"
        )
    return layers


def _of(readers: Sequence[_Reader], key: str) -> Any:
    return next((own.of(key) for own in readers if own.of(key) is not None), None)


def _flag(readers: Sequence[_Reader], key: str, default: bool) -> bool:
    for own in readers:
        if own.of(key) is not None:
            return own.flag(key, default)
    return default


def _size(readers: Sequence[_Reader], key: str, default: int | None) -> int | None:
    for own in readers:
        if own.of(key) is not None:
            return own.size(key)
    return default


class _Reader:
    """Keys of a configuration, or of a dictionary nested in it."""

    def __init__(self, given: Mapping[str, Any], name: str) -> None:
        self._given, self._name = given, name
        self._read: set[str] = set()

    def of(self, key: str) -> Any:
        self._read.add(key)
        return self._given.get(key)

    def require_read(self, fixed: Mapping[str, Any]) -> None:
        """Refuse a key that says something and was not read; `fixed` are values that it may have
        beside those of every head."""
        known = {**_FIXED, **fixed}
        for key, value in self._given.items():
            if key in known and value != known[key] and value is not None:
                raise ValueError(
                    f"{self._name}: {key}: expected {known[key]}, given {shown(value)}"
                )
            followed = key in known or key in self._read or key in _BESIDE
            if not followed and value not in _NOTHING:
                raise ValueError(
                    f"{self._name}: {key}: expected no such key, which is not followed, given "
                    f"{shown(value)}"
                )

    def require_full_attention(self) -> None:
        """Refuse layers that see a window alone."""
        # Qwen's configurations have a width that is not in use.
        if self.of("use_sliding_window") is False:
            self._read |= {"sliding_window", "max_window_layers"}
        elif self._given.get("use_sliding_window"):
            self._read.discard("use_sliding_window")
        if set(self._given.get("layer_types") or ()) <= {"full_attention"}:
            self._read.add("layer_types")

    def nested(self, key: str, optional: bool = False) -> _Reader:
        own = self.of(key)
        if own is None and optional:
            own = {}
        if not isinstance(own, Mapping):
            raise ValueError(f"{self._name}: {key}: expected a dictionary, given {own!r}")
        return _Reader(own, self._name)

    def flag(self, key: str, default: bool) -> bool:
        own = self.of(key)
        if own is None:
            return default
        if not isinstance(own, bool):
            raise ValueError(f"{self._name}: {key}: expected true or false, given {own!r}")
        return own

    def size(self, key: str, most: int = _SIZE_MAX) -> int:
        own = self.of(key)
        if type(own) is not int or own < 1:
            raise ValueError(f"{self._name}: {key}: expected a number >= 1, given {shown(own)}")
        if own > most:
            raise ValueError(f"{self._name}: {key}: expected at most {most}, given {shown(own)}")
        return own

    def positive(self, key: str) -> float:
        own = self.of(key)
        if type(own) not in (int, float) or not 0 < own < 1e30:
            raise ValueError(f"{self._name}: {key}: expected a number > 0, given {shown(own)}")
        return float(own)

    def shape(self, required: Sequence[str], layers: int) -> LlamaConfig:
        """Of the layers, of which the file has so many."""
        for key in _SIZES:
            if key in required or self.of(key) is not None:
                self.size(key, arguments.SIZE_MAX if key in _LONG else _SIZE_MAX)
        for key in _POSITIVE:
            if self.of(key) is not None:
                self.positive(key)
        for key in ("rope_scaling", "rope_parameters"):
            rope = self.of(key)
            part = rope.get("partial_rotary_factor") if isinstance(rope, Mapping) else None
            if part not in (None, 1.0):
                raise ValueError(
                    f"{self._name}: {key}.partial_rotary_factor: expected 1.0, given {shown(part)}"
                )
        act = self.of("hidden_act")
        if act not in (None, "silu"):
            raise ValueError(f"{self._name}: hidden_act: expected 'silu', given {shown(act)}")
        own = {key: self.of(key) for key in _LAYER if self.of(key) is not None}
        own.update((key, float(own[key])) for key in _POSITIVE if key in own)
        count = own.setdefault("num_hidden_layers", 1)
        if count != layers:
            raise ValueError(
                f"{self._name}: num_hidden_layers: expected {layers}, as the tensors have, given "
                f"{count}"
            )
        try:
            made = LlamaConfig(**own)
            if not LlamaRotaryEmbedding(made).inv_freq.isfinite().all():
                raise ValueError("rope_parameters: expected finite rotations")
        # Of transformers' checks, which name the field; of its rotations, whatever they meet.
        except Exception as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"{self._name}: expected the configuration of a Llama's layer: {reason}"
            ) from error
        self._require_heads(made)
        return made

    def _require_heads(self, shape: LlamaConfig) -> None:
        heads, keys = shape.num_attention_heads, shape.num_key_value_heads
        dim = shape.head_dim
        if heads % keys:
            raise ValueError(
                f"{self._name}: num_key_value_heads: expected a divisor of num_attention_heads, "
                f"{heads}, given {keys}"
            )
        if dim % 2 or heads * dim > _SIZE_MAX:
            raise ValueError(
                f"{self._name}: head_dim: expected an even number, and at most {_SIZE_MAX} for all "
                f"of {heads} heads, given {dim}"
            )
