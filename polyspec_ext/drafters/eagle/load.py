"""Published EAGLE heads, from a directory to a network fitted to its target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ... import arguments
from ...levels import HuggingFaceLevel
from .. import checkpoint
from ..target import Target
from .config import EagleConfig, names_a_head, parse
from .network import EagleNetwork
from .passes import HeadPasses

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Names that differ between the formats.
_NAMES = (("midlayer.", "layers.0."), ("fusion_fc.", "fc."), ("transformer.", "layers.0."))
# Tensors that are for training only, or follow from others.
_ASIDE = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
_ASIDE_ENDS = (".rotary_emb.inv_freq",)


def is_head(place: str | Path) -> bool:
    """Whether a directory holds an EAGLE head: its configuration says so, or it is that of a Llama
    of one layer, and the weights have the product that fuses states."""
    folder = Path(place)
    if not (folder / "config.json").is_file():
        return False
    given = checkpoint.read_config(folder)
    if names_a_head(given) or "draft_vocab_size" in given:
        return True
    if given.get("num_hidden_layers") != 1 or given.get("model_type", "llama") not in (
        "llama",
        "qwen2",
    ):
        return False
    try:
        files = checkpoint.weight_files(folder)
    except ValueError:
        return False
    return any("fc.weight" in checkpoint.names_in(file) for file in files)


_PREFIX = "eagle:"


def head_place(thing: Any) -> str | None:
    """The directory or id of an EAGLE head, if a chain's element is one: "eagle:" in front of
    either, or a directory that holds one."""
    if not isinstance(thing, str | Path):
        return None
    text = str(thing)
    if text.startswith(_PREFIX):
        return text.removeprefix(_PREFIX)
    return text if is_head(thing) else None


def load_head(
    place: str | Path,
    target: HuggingFaceLevel | PreTrainedModel,
    dtype: torch.dtype | None = None,
) -> HeadPasses:
    """See `Eagle.from_pretrained`."""
    own = Target(target)
    arguments.dtype("dtype", dtype)
    folder = checkpoint.folder_of(place)
    given = checkpoint.read_config(folder)
    read, name = checkpoint.read_folder(folder), str(folder)
    mask = read.get("t2d")
    tensors = renamed(read, name)
    text = own.text
    config = parse(given, tensors, text.num_hidden_layers, name)
    _require_target(config, text, name)
    offsets = tensors.pop("d2t", None)
    embeds, heads = "embed_tokens.weight" in tensors, "lm_head.weight" in tensors
    network = own.load(
        lambda: EagleNetwork(config, embeds=embeds, heads=heads), tensors, dtype, name
    )
    if not hasattr(network, "embed_tokens") and config.hidden_size != text.hidden_size:
        raise ValueError(
            f"{name}: embed_tokens.weight: expected shape [{text.vocab_size}, "
            f"{config.hidden_size}], given none, and the target's embeddings have "
            f"{text.hidden_size} columns"
        )
    if config.draft_vocab_size is not None and not hasattr(network, "lm_head"):
        raise ValueError(
            f"{name}: lm_head.weight: expected shape [{config.draft_vocab_size}, "
            f"{config.hidden_size}], given none"
        )
    ids = _ids(config, offsets, text.vocab_size, name)
    if mask is not None:
        _require_mask(mask, ids, text.vocab_size, name)
    if ids is None:
        return HeadPasses(network, target)
    # Entries in the order of their ids, whatever order they were stored in.
    ids, order = ids.sort()
    if not torch.equal(order, torch.arange(len(order))):
        with torch.no_grad():
            weight = network.lm_head.weight
            weight.copy_(weight[order.to(weight.device)])
    return HeadPasses(network, target, ids.to(own.device))


def renamed(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """Under the network's names, without what is not read."""
    found: dict[str, torch.Tensor] = {}
    for key, value in tensors.items():
        if key in _ASIDE or key.endswith(_ASIDE_ENDS):
            continue
        for old, new in _NAMES:
            if key.startswith(old):
                key = new + key.removeprefix(old)
        if key in found:
            raise ValueError(f"{name}: {key}: expected one tensor of this name, given two")
        found[key] = value
    return found


def _require_target(config: EagleConfig, text: Any, name: str) -> None:
    if config.target_hidden_size != text.hidden_size:
        raise ValueError(
            f"{name}: expected a target with hidden states of {config.target_hidden_size} "
            f"numbers, given one with {text.hidden_size}"
        )
    if not config.fuse and config.hidden_size != config.target_hidden_size:
        raise ValueError(
            f"{name}: hidden_size: expected the target's, {config.target_hidden_size}, where no "
            f"product brings one to the other, given {config.hidden_size}"
        )
    if config.layer.vocab_size != text.vocab_size:
        raise ValueError(
            f"{name}: vocab_size: expected the target's, {text.vocab_size}, given "
            f"{config.layer.vocab_size}"
        )


def _ids(
    config: EagleConfig, offsets: torch.Tensor | None, vocab_size: int, name: str
) -> torch.Tensor | None:
    """The target's ids of the draft vocabulary: `d2t` holds their distances."""
    size = config.draft_vocab_size
    if offsets is None:
        if size not in (None, vocab_size):
            raise ValueError(f"{name}: d2t: expected shape [{size}], given none")
        return None
    if size is None:
        raise ValueError(
            f"{name}: d2t: expected no such tensor without draft_vocab_size, given shape "
            f"{list(offsets.shape)}"
        )
    if tuple(offsets.shape) != (size,):
        raise ValueError(f"{name}: d2t: expected shape [{size}], given {list(offsets.shape)}")
    if offsets.dtype not in (torch.int64, torch.int32, torch.int16):
        raise ValueError(f"{name}: d2t: expected integers, given {offsets.dtype}")
    ids = torch.arange(size) + offsets.to(torch.int64)
    known = ids[(ids >= 0) & (ids < vocab_size)]
    if known.unique().shape[0] != size:
        raise ValueError(
            f"{name}: d2t: expected offsets to {size} different ids in [0, {vocab_size}), given "
            f"{known.unique().shape[0]}"
        )
    return ids


def _require_mask(mask: torch.Tensor, ids: torch.Tensor | None, vocab_size: int, name: str) -> None:
    """Refuse a `t2d`, whether the draft vocabulary has an id, that says otherwise than `ids`."""
    if tuple(mask.shape) != (vocab_size,):
        raise ValueError(f"{name}: t2d: expected shape [{vocab_size}], given {list(mask.shape)}")
    known = (
        torch.ones(vocab_size, dtype=torch.bool)
        if ids is None
        else torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    )
    differ = (known != mask.bool()).nonzero().flatten()
    if len(differ):
        i = int(differ[0])
        raise ValueError(
            f"{name}: t2d: expected the {int(known.sum())} ids of d2t, given one that differs in "
            f"{len(differ)} (first: id {i}, which d2t has{'' if known[i] else ' not'})"
        )
