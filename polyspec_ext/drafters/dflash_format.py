"""Published drafters of blocks: their configuration, in two formats.

* flat: z-lab's DFlash, DeepSeek's DSpark and transformers' Muse Glimmer assistant: the
  configuration of the layers, with a few keys beside it or in `dflash_config`;
* speculators' dflash and dspark, the layers' configuration nested in `transformer_layer_config`.

A key that says something and is not read here is refused by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig, Qwen3Config

from .. import arguments
from . import checkpoint
from .eagle_format import REQUIRED, SIZES, Reader

_SPECULATORS = ("dflash", "dspark")
_ASSISTANT = "muse_glimmer_assistant"
_DEFAULTS = {"qwen3": Qwen3Config, "llama": LlamaConfig}  # of keys that a configuration leaves out
_SLIDING = "sliding_attention"
_FLAT_BLOCK, _BLOCK = 16, 8  # tokens, of configurations that do not say
_RANK = 256  # of a dspark of speculators that does not say
_MOST = 256  # tokens of a block
# Values that the network has whatever the configuration says, so that it must say them.
_FIXED = {
    "markov_head_type": "vanilla", "projector_type": "dflash", "shift_label": False,
    "use_aux_hidden_state": True,
}  # fmt: skip
# Keys that no number of a draft depends on: of training, and of the confidence head.
_IGNORED = (
    "_attn_implementation", "auf", "ce_loss_alpha", "confidence_head_alpha",
    "confidence_head_with_markov", "emb_dim", "enable_confidence_head", "gru_hidden_dim",
    "l1_loss_alpha", "lambda_base_decay_ratio", "lambda_base_start", "loss_decay_gamma",
    "max_anchors", "max_window_layers", "num_anchors", "pure_draft_prefix_len",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """A drafter of blocks.

    Attributes:
        layer: shape of its layers and their number; `vocab_size` is the target's.
        hidden_layers: of the target, whose states it reads; k is the state after k layers.
        target_hidden_size: width of these states.
        block_size: tokens of a block, the last token of the text among them.
        mask_token_id: of the others.
        from_anchor: the first token is drafted from the state of the text's last token, else from
            that of the first mask.
        windows: of each layer, how many positions a token sees back, with its position; None: all.
        causal: of each layer, whether a token sees only those in front of it in the block.
        draft_vocab_size: ids that the checkpoint's output head draws; None: all of the target's.
        markov_rank: inner width of the Markov head; 0: none.
        embedding_scale, logit_scale: factors of embeddings and logits.
        logit_cap: bound of the logits, by a hyperbolic tangent; None: none.
    """

    layer: LlamaConfig
    hidden_layers: tuple[int, ...]
    target_hidden_size: int
    block_size: int
    mask_token_id: int
    from_anchor: bool
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    draft_vocab_size: int | None = None
    markov_rank: int = 0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None

    @property
    def hidden_size(self) -> int:
        return int(self.layer.hidden_size)

    @property
    def feature_size(self) -> int:
        return self.target_hidden_size * len(self.hidden_layers)

    @property
    def num_drafts(self) -> int:
        """Tokens that a block drafts."""
        return self.block_size - (not self.from_anchor)


def parse(
    config: Mapping[str, Any], tensors: Collection[str], target_layers: int, name: str
) -> DFlashConfig:
    """Read the config.json of the checkpoint `name`; a key that does not fit is named.

    Args:
        tensors: names.
        target_layers: decoder layers of the target.
    """
    top = Reader(name, config)
    kind = top.of("speculators_model_type")
    if kind not in (None, *_SPECULATORS):
        raise top.error("speculators_model_type", "'dflash' or 'dspark'", kind)
    flat = kind is None
    if flat:
        top = layer = Reader(name, _with_defaults(top, config, REQUIRED))
    else:
        top.nested("transformer_layer_config")
        nested = config["transformer_layer_config"]
        layer = Reader(name, _with_defaults(Reader(name, nested), nested, ()))
    inner = top.nested("dflash_config", optional=True)
    both = inner.before(layer).before(top)
    layer.refuse_tied(tensors)
    shape = layer.shape(REQUIRED if flat else (), checkpoint.count_of(tensors, "layers."))
    shape.attention_bias = layer.flag("attention_bias", False)
    assistant = layer.of("model_type") == _ASSISTANT
    windows = _windows(both, shape.num_hidden_layers)
    if flat:
        key = "target_layer_ids"
        # What a format has behind the last layer, in front of its norm or behind it, differs.
        numbers = both.layers(key, both.of(key), target_layers - 2)
        hidden_layers = tuple(number + 1 for number in numbers)
        if both.size("num_target_layers") not in (None, target_layers):
            expected = f"the target's {target_layers}"
            raise both.error("num_target_layers", expected, both.of("num_target_layers"))
    else:
        key = "aux_hidden_state_layer_ids"
        hidden_layers = both.layers(key, both.of(key), target_layers)
    spark = kind == "dspark" or any("DSpark" in str(n) for n in checkpoint.architectures(config))
    found = DFlashConfig(
        shape,
        hidden_layers,
        both.size("target_hidden_size") or shape.hidden_size,
        both.size("block_size", _MOST) or (_FLAT_BLOCK if flat else _BLOCK),
        _mask_id(both, shape.vocab_size),
        both.flag("sample_from_anchor", spark),
        # (A distance there, its end included.)
        tuple(window and window + assistant for window in windows),
        _causal(both, windows, flat, assistant),
        draft_vocab_size=both.size("draft_vocab_size", arguments.SIZE_MAX),
        markov_rank=_rank(both, _RANK if kind == "dspark" else 0),
        embedding_scale=both.number("input_embedding_scale", 1.0),
        logit_scale=both.number("output_multiplier", 1.0),
        logit_cap=both.number("final_logit_softcapping", 0.0) or None,
    )
    if found.draft_vocab_size == shape.vocab_size and "d2t" not in tensors:
        found = dataclasses.replace(found, draft_vocab_size=None)
    if found.num_drafts < 1:
        raise both.error("block_size", "at least 2 tokens, one of them drafted", found.block_size)
    for reader in (top, layer, inner):
        reader.require_all_read(_FIXED, _IGNORED)
    return found


def _with_defaults(reader: Reader, given: Mapping[str, Any], required: Collection[str]) -> Any:
    """Return a layer's configuration with the defaults of its class, but for `required` keys:
    formats may write what differs from these alone."""
    kind = reader.of("model_type") or "qwen3"
    if kind != _ASSISTANT and kind not in _DEFAULTS:
        raise reader.error("model_type", f"one of {', '.join((*_DEFAULTS, _ASSISTANT))}", kind)
    made = _DEFAULTS[kind]() if kind in _DEFAULTS else None
    keys = [key for key in (*SIZES, "rms_norm_eps") if key not in required]
    known = {key: getattr(made, key, None) for key in keys}
    known = {key: value for key, value in known.items() if value is not None}
    return {**known, **{key: value for key, value in given.items() if value is not None}}


def _windows(reader: Reader, count: int) -> tuple[int | None, ...]:
    kinds, window = reader.of("layer_types"), reader.size("sliding_window", arguments.SIZE_MAX)
    if kinds is None and reader.flag("use_sliding_window", False):
        raise reader.error("layer_types", f"the kind of each of {count} layers", None)
    kinds = ["full_attention"] * count if kinds is None else kinds
    known = isinstance(kinds, list) and set(kinds) <= {_SLIDING, "full_attention"}
    if not known or len(kinds) != count:
        expected = f"'full_attention' or '{_SLIDING}' for each of {count} layers"
        raise reader.error("layer_types", expected, kinds)
    if _SLIDING not in kinds or not reader.flag("use_sliding_window", True):
        return (None,) * count
    if window is None:
        raise reader.error("sliding_window", "a number >= 1 for sliding layers", None)
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def _causal(
    reader: Reader, windows: Sequence[int | None], flat: bool, assistant: bool
) -> tuple[bool, ...]:
    keys = ("is_causal", "causal") if flat else ()
    if key := next((key for key in keys if reader.of(key) is not None), None):
        return (reader.flag(key, False),) * len(windows)
    sliding = not (assistant or reader.flag("sliding_window_non_causal", False))
    return tuple(sliding and window is not None for window in windows)


def _mask_id(reader: Reader, vocab_size: int) -> int:
    value = reader.of("mask_token_id")
    if type(value) is not int or not 0 <= value < vocab_size:
        raise reader.error("mask_token_id", f"an id below {vocab_size}", value)
    return value


def _rank(reader: Reader, default: int) -> int:
    if reader.of("markov_rank") == 0:
        return 0
    return reader.size("markov_rank") or default
