"""Multi-token prediction heads (MTP), which models bring with them: one more decoder layer of their
kind, which reads the embedding of a token and the target's last hidden state, behind its final
norm, of the token before. It shares embeddings and output head with the target, and drafts as EAGLE
heads do (`heads`): each further step of a draft reads the state of the step before. Where there are
several, each step has a head of its kind (`mtp_heads`).

Checkpoints name the tensors in four ways (`_LAYOUTS`). The layer is a module of the target's class.
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
from torch import nn

from .. import arguments
from ..kv_cache import RollbackCache
from ..levels.fused import layer_operators
from ..levels.models import ModelLevel, cache_name, decoder_layers
from ..ops.decoder import LayerOperators
from . import checkpoint
from .checkpoint import Target
from .features import LAST
from .heads import HeadDrafter, HeadNetwork, HeadPasses
from .mtp_heads import SeveralNetwork, SeveralPasses
from .trees import Tree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PARTS = ("embed_norm", "state_norm", "fc", "norm")  # of the network
_NUMBERED = re.compile(r"layers\.(\d+)\.")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
_SCALE = "_scale_inv"  # behind the name of a matrix of 8-bit floats: a factor for each block
_ATTENDS = "full_attention"


@dataclass(frozen=True, slots=True)
class _Layout:
    """Names of a checkpoint's tensors.

    Attributes:
        family: of models that have it, for messages.
        begin: of every name; {n} is the number of the target's layers and of the heads before,
            {k} of these alone.
        parts: names behind it of `_PARTS`; {last} is the number of a head's last layer.
        numbered: other names have the number of a layer, else they are of one layer. Heads count
            their layers on, and share the parts that have none.
        states_first: `fc` reads the state in front of the embedding.
        unused: names behind `begin` of copies of the target's tensors.
        kinds: what the `model_type` of such models begins with.
    """

    family: str
    begin: str
    parts: tuple[str, str, str, str]
    numbered: bool = False
    states_first: bool = False
    unused: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()

    def prefix(self, count: int, head: int = 0) -> str:
        """Return what the names of a head for a target of `count` layers begin with."""
        return self.begin.format(n=count + head, k=head)

    def named(self, rest: str, head: int, blocks: int) -> str | None:
        """Return the network's name of the tensor that is called `rest` behind `begin`; None: it
        is of another head than number `head`, each of `blocks` layers, or not read."""
        if self.numbered and (match := _NUMBERED.match(rest)):
            number = int(match[1]) - head * blocks
            if not 0 <= number < blocks:
                return None
            rest = f"layers.{number}.{rest[match.end() :]}"
        if rest.removesuffix(_SCALE) in self.unused or rest.endswith(".rotary_emb.inv_freq"):
            return None
        for part, name in zip(self.parts, _PARTS, strict=True):
            begin = part.format(last=blocks - 1) + "."
            if rest.startswith(begin):
                return f"{name}.{rest.removeprefix(begin)}"
        return rest if self.numbered else f"layers.0.{rest}"

    def published(self, name: str, count: int, blocks: int) -> str:
        """Return the name in a checkpoint of the network's tensor `name`."""
        part, _, rest = name.partition(".")
        if part in _PARTS:
            part = self.parts[_PARTS.index(part)].format(last=blocks - 1)
            return f"{self.prefix(count)}{part}.{rest}"
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
class MTPConfig:
    """A multi-token prediction head.

    Attributes:
        layer: configuration of the layers of its cache.
        blocks: configuration of its decoder layers, those of all heads.
        states_first: `fc` reads the state in front of the embedding.
        hidden_size: of the target's states and the head's.
        heads: how many draft a token each.
        hidden_layers: the target's last states, behind its final norm.
    """

    layer: Any
    blocks: Any
    states_first: bool
    hidden_size: int
    heads: int = 1
    hidden_layers: tuple[int, ...] = (LAST,)

    @property
    def target_hidden_size(self) -> int:
        return self.hidden_size

    @property
    def feature_size(self) -> int:
        return self.hidden_size


class _Indexed:
    """A cache as layers see it that choose the keys to attend to by keys of an index (DeepSeek
    V3.2): these lie in `count` layers more.

    Args:
        cache: of twice as many layers.
        count: of the head's layers.
    """

    def __init__(self, cache: RollbackCache, count: int) -> None:
        self._cache, self._count = cache, count

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache.update(keys, values, layer)

    def update_indexer(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        single = keys[:, None]
        return self._cache.update(single, single[..., :1], layer + self._count)[0][:, 0]


class MTPNetwork(HeadNetwork):
    """A head with layers of the target's class.

    Args:
        config: of the head.
        target: whose modules it has more of, and whose rotary positions it reads.
        number: of the head.
    """

    config: MTPConfig

    def __init__(self, config: MTPConfig, target: Target, number: int = 0) -> None:
        super().__init__()
        self.config, width = config, config.hidden_size
        body, layers = decoder_layers(target.model, target.text.num_hidden_layers)
        norm = next(each for each in body.children() if type(each).__name__.endswith("Norm"))
        self.embed_norm, self.state_norm, self.norm = (copy.deepcopy(norm) for _ in range(3))
        self.fc = nn.Linear(2 * width, width, bias=False)
        kind: Any = type(layers[-1])
        count = config.blocks.num_hidden_layers // config.heads
        numbers = range(number * count, (number + 1) * count)
        self.layers = nn.ModuleList(kind(config.blocks, layer) for layer in numbers)
        # In a list, so that it is no submodule: its tensors are not the checkpoint's.
        self._rotary: list[Any] = [getattr(body, "rotary_emb", None)]
        self._cache_name = cache_name(self.layers[0])

    def paired(self, embeds: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return what `fc` reads, ``[B, T, 2 * H]``."""
        pair = [self.embed_norm(embeds), self.state_norm(states)]
        return torch.cat(pair[::-1] if self.config.states_first else pair, -1)

    def read(
        self,
        embeds: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        cache: RollbackCache,
    ) -> torch.Tensor:
        x = self.fc(self.paired(embeds, states))
        positions = positions.expand(x.shape[:2])
        if x.shape[1] <= self.longest:
            rotation = self._rotary[0](x, positions)
            layers: Any = self.layers
            numbers = tuple(layer.self_attn.layer_idx for layer in layers)
            fused: torch.Tensor = self.norm(self.through_layers(x, rotation, mask, cache, numbers))
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
        normed: torch.Tensor = self.norm(x)
        return normed

    def fused(self) -> LayerOperators | None:
        return layer_operators(list(self.layers)) if self._rotary[0] is not None else None


def _is_indexed(text: Any) -> bool:
    return getattr(text, "index_topk", None) is not None


def _layer_config(text: Any, kinds: Sequence[str], sparse: bool) -> Any:
    """Return the configuration of layers of some `kinds`: as the target's, with experts where they
    are `sparse`."""
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
    place: str | Path,
    target: ModelLevel | PreTrainedModel,
    dtype: torch.dtype | None = None,
    most: int | None = None,
) -> HeadPasses:
    """Load the heads that lie among the weights of the target's checkpoint, at most so many."""
    model = Target(target)
    folder = checkpoint.folder_of(place)
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
    found = checkpoint.read_folder(folder, lambda key: _plain(key).removesuffix(_SCALE) in known)
    found = {_plain(key): value for key, value in found.items()}
    settings = checkpoint.read_config(folder).get("quantization_config") or {}
    found = _scaled(found, settings.get("weight_block_size"), name)
    tensors = [_stacked({head[key]: found[key] for key in head if key in found}) for head in heads]
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
    """Make a head for a target, in float32, out of torch's generator. Its layer has the weights of
    the target's last one where these fit.

    Returns:
        The head, and the names of its tensors in a checkpoint: those of the target's family, or
        MiMo's for families without heads.
    """
    model = Target(target)
    kinds = _kinds(model)
    count, family = model.text.num_hidden_layers, str(model.text.model_type)
    known = (each for each in _LAYOUTS if each.kinds and family.startswith(each.kinds))
    layout = next(known, next(each for each in _LAYOUTS if not each.kinds))
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
    """Return the configuration of heads, each with layers of these kinds, by the `names` of the
    first one's tensors."""
    sparse = any(".experts." in name for name in names)
    blocks = list(kinds) * heads
    layers = len(blocks) * (1 + _is_indexed(model.text)) + heads - 1  # those of states last
    return MTPConfig(
        _layer_config(model.text, [_ATTENDS] * layers, sparse),
        _layer_config(model.text, blocks, sparse),
        layout.states_first,
        model.hidden_size,
        heads,
    )


def _heads(layout: _Layout, names: Sequence[str], count: int, blocks: int) -> list[dict[str, str]]:
    """Return the network's names of the tensors of each head, by their names in the checkpoint."""
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
    wanted = ", ".join(f"{each.first(count)} ({each.family})" for each in _LAYOUTS)
    raise ValueError(
        f"{name}: expected the weights of an MTP head for a target of {count} layers, as one of "
        f"{wanted}, given {', '.join(like[:3]) or 'none'}"
    )


def _scaled(
    tensors: Mapping[str, torch.Tensor], block: Sequence[int] | None, name: str
) -> dict[str, torch.Tensor]:
    """Return matrices of 8-bit floats times the factors of their blocks, and others as they are."""
    found = {key: value for key, value in tensors.items() if not key.endswith(_SCALE)}
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
        found[key.removesuffix(_SCALE)] = weight.to(scales.dtype) * factors
    return found


def _stacked(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the matrices of experts stacked by number, gates above the others, as the classes of
    transformers have them."""
    found: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for key, value in tensors.items():
        if match := _EXPERT.fullmatch(key):
            begin, number, product = match.groups()
            experts.setdefault(f"{begin}.{product}", {})[int(number)] = value
        else:
            found[key] = value
    for key, matrices in experts.items():
        found[key] = torch.stack([matrices[number] for number in sorted(matrices)])
    for key in [key for key in experts if key.endswith(".gate_proj")]:
        gates, begin = found.pop(key), key.removesuffix("gate_proj")
        if (ups := found.pop(f"{begin}up_proj", None)) is not None:
            gates = torch.cat([gates, ups], 1)
        found[f"{begin}gate_up_proj"] = gates
    return found


def _exact(model: Target) -> set[str]:
    """Return names of the network's tensors whose like the target keeps in float32 beside weights
    of fewer bits, such as those that route to experts."""
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
    state of the step before. Head k drafts token k, and the last head all tokens behind, so that
    a single one drafts any number. Arguments are those of `HeadDrafter`."""

    kind = "mtp"

    @classmethod
    def from_pretrained(
        cls,
        place: str | Path,
        target: ModelLevel | PreTrainedModel,
        *,
        tree: Tree | None = None,
        dtype: torch.dtype | None = None,
        name: str | None = None,
    ) -> MTP:
        """Load the heads that lie among a model's weights, and nothing else of them; for trees the
        first alone.

        Args:
            place: the directory of the target's checkpoint, or its id on the Hugging Face hub.
            target: the model of that checkpoint: it gives embeddings, output head and rotary
                positions. Below a level with packed weights the head runs on packed ones too.
            tree: see `MTP`.
            dtype: of the head; None: the target's.
            name: for messages; None: "mtp".

        Raises:
            TypeError: an argument is none of these.
            ValueError: no such directory, no head in it for a model of that many layers, tensors
                that are missing, unknown or of another shape, a target of another width; names
                what was expected and what came.
        """
        arguments.instance("tree", tree, Tree)
        arguments.dtype("dtype", dtype)
        arguments.label("name", name)
        return cls(load_mtp(place, target, dtype, None if tree is None else 1), tree, name)
