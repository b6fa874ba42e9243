"""Published heads: reading a checkpoint's tensors without running its code, and the target of a
head."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from .. import arguments
from ..arguments import shown
from ..kv_cache import device_of
from ..levels.models import ModelLevel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_FILES = ("*.safetensors", "pytorch_model*.bin")
_Network = TypeVar("_Network", bound=torch.nn.Module)


def serves_heads(thing: object) -> bool:
    """Return whether an object is a level with hidden states and an output head."""
    return isinstance(thing, ModelLevel) and hasattr(thing, "output_head")


class Target:
    """The target of a head: a level or its model.

    Attributes:
        level: the level; None: a model was passed.
        text: configuration of the model's decoder.
        pack: whether heads run on packed weights, as the level does.
    """

    def __init__(self, target: ModelLevel | PreTrainedModel) -> None:
        level: Any = target if serves_heads(target) else None
        model: Any = target if level is None else level.model
        self.level, self.model = level, model
        arguments.model("target", self.model)
        self.text = self.model.config.get_text_config(decoder=True)
        self.hidden_size, self.vocab_size = int(self.text.hidden_size), int(self.text.vocab_size)
        self.device = device_of(self.model)
        self.pack: bool = getattr(self.level, "pack", False)

    @property
    def output_head(self) -> Any:
        head = getattr(self.level, "output_head", None)
        return self.model.get_output_embeddings() if head is None else head

    def load(
        self,
        make: Callable[[], _Network],
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype | None,
        name: str,
        exact: Collection[str] = (),
    ) -> _Network:
        """Load `tensors` of the checkpoint `name` into the module that `make` returns, on the
        model's device and in its dtype, or in `dtype`; tensors named in `exact` in float32."""
        dtype = arguments.dtype("dtype", dtype) or self.model.dtype
        with torch.device("meta"):
            network = make()
        expected = network.state_dict()
        for key, value in expected.items():
            _require_tensor(f"{name}: {key}", tensors.get(key), value)
        for key, value in tensors.items():
            if key not in expected:
                raise ValueError(
                    f"{name}: {key}: expected no tensor of this name with this configuration, "
                    f"given shape {list(value.shape)}"
                )

        def kind(key: str, value: Tensor) -> torch.dtype:
            if not value.is_floating_point():
                return value.dtype
            return torch.float32 if key in exact else dtype

        state = {
            key: tensors[key].to(self.device, kind(key, value)) for key, value in expected.items()
        }
        network.load_state_dict(state, assign=True)
        return network.eval().requires_grad_(False)


def _require_tensor(name: str, tensor: Tensor | None, like: Tensor) -> None:
    if tensor is None:
        raise ValueError(f"{name}: expected shape {list(like.shape)}, given none")
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        raise ValueError(f"{name}: expected plain numbers, given {shown(tensor)}")
    if tensor.shape != like.shape:
        raise ValueError(f"{name}: expected shape {list(like.shape)}, given {list(tensor.shape)}")
    if like.is_floating_point() and not tensor.is_floating_point():
        raise ValueError(f"{name}: expected floating point, given {tensor.dtype}")


def count_of(names: Iterable[str], begin: str) -> int:
    """Count the prefixes ``{begin}0.``, ``{begin}1.``, ... of names, up to the first gap."""
    rests = (name.removeprefix(begin) for name in names if name.startswith(begin))
    numbers = {rest.partition(".")[0] for rest in rests}
    return next(number for number in itertools.count() if str(number) not in numbers)


# ---- files ---------------------------------------------------------------------------------------


def folder_of(location: str | Path, files: Sequence[str] = ("*.json", *_FILES)) -> Path:
    """Return a directory, or the directory of a download from the hub by its id."""
    folder = arguments.path("location", location)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(location), allow_patterns=list(files)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(
            f"{location}: expected a directory, or the id of a checkpoint on the hub: {reason}"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a directory, which must be a JSON object."""
    return _read_json(folder / "config.json")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: expected a readable {file.name}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: expected a JSON object, given {type(content).__name__}")
    return content


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a directory's tensors: a single file, or the files of an index."""
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            return [folder / shard for shard in _shards(index)]
    raise ValueError(f"{folder}: expected {' or '.join(_WEIGHTS)}, given neither")


def _shards(index: Path) -> list[str]:
    files = _read_json(index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ValueError(
            f"{index}: weight_map: expected the file of every tensor, given {shown(files)}"
        )
    for key, file in files.items():
        # A path would lead out of the folder.
        if not isinstance(file, str) or file in ("", "..") or PureWindowsPath(file).name != file:
            raise ValueError(
                f"{index}: weight_map: {key}: expected the name of a file beside it, given "
                f"{shown(file)}"
            )
    return sorted(set(files.values()))


def read_folder(
    folder: Path, wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, Tensor]:
    """Read a directory's tensors with `wanted` names, by name, to the CPU."""
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        tensors.update(read_file(file, wanted))
    return tensors


def read_file(file: Path, wanted: Callable[[str], object] = lambda name: True) -> dict[str, Tensor]:
    """Read the tensors with `wanted` names from a file, ``.safetensors`` or of `torch.save`. The
    latter may contain Python objects that run code when they are read: a file with Python objects
    is refused."""
    if file.suffix == ".safetensors":
        try:
            with safe_open(file, "pt") as opened:
                return {key: opened.get_tensor(key) for key in opened.keys() if wanted(key)}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file}: expected a safetensors file: {error}") from error
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{file}: expected a checkpoint of tensors only, given one with Python objects in it, "
            f"which may run code when it is read; refused: {reason}"
        ) from error
    except Exception as error:  # a broken pickle may raise any exception
        raise ValueError(
            f"{file}: expected a checkpoint as torch.save writes it: {error}"
        ) from error
    if not isinstance(content, Mapping) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in content.items()
    ):
        raise ValueError(f"{file}: expected tensors by name, given {type(content).__name__}")
    return {key: value for key, value in content.items() if wanted(key)}


def architectures(config: Mapping[str, Any]) -> list[Any]:
    """Return the architectures in a configuration."""
    names = config.get("architectures")
    return names if isinstance(names, list) else []


# ---- configurations ------------------------------------------------------------------------------

# Keys of a layer's configuration: sizes, and others that determine shapes and rotary positions.
SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "vocab_size",
)  # fmt: skip
REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_LONG = ("max_position_embeddings", "vocab_size")  # at most one dimension of a product
_SIZE_MAX = 2**20  # of a width: the size of a product of two fits torch's integers
_FIXED = {"partial_rotary_factor": 1.0}  # assumed by networks, which read no other value
# Keys without an effect on drafts.
_IGNORED = (
    "architectures", "attention_dropout", "auto_map", "bos_token_id", "dtype", "eos_token_id",
    "initializer_range", "model_type", "_name_or_path", "pad_token_id", "pretraining_tp",
    "speculators_config", "speculators_version", "target_model_type", "torch_dtype",
    "transformers_version", "use_cache",
)  # fmt: skip
_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})


class Reader:
    """Keys of a configuration's dictionaries; the first dictionary with a key has precedence."""

    def __init__(self, name: str, *sources: tuple[Mapping[str, Any], set[str]]) -> None:
        self.name, self._sources = name, sources  # dictionaries, and their keys read

    def before(self, other: Reader) -> Reader:
        """Return a reader of this reader's dictionaries, then of another's."""
        return Reader(self.name, *self._sources, *other._sources)

    def nested(self, key: str, default: Any = None) -> Reader:
        """Read a dictionary; without a default it is required."""
        inner = self.of(key, default=default)
        if not isinstance(inner, Mapping):
            raise self.error(key, "a dictionary", inner)
        return Reader(self.name, (inner, set()))

    def error(self, key: str, expected: object, given: object) -> ValueError:
        return ValueError(f"{self.name}: {key}: expected {expected}, given {shown(given)}")

    def of(
        self,
        key: str,
        expected: str = "",
        valid: Callable[[Any], bool] = lambda value: True,
        default: Any = None,
    ) -> Any:
        """Read a key with a `valid` value; `default` if it is missing or null."""
        for config, read in self._sources:
            read.add(key)
            if (value := config.get(key)) is not None:
                if not valid(value):
                    raise self.error(key, expected, value)
                return value
        return default

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.of(key, "true or false", lambda x: isinstance(x, bool), default))

    def size(self, key: str, most: int = _SIZE_MAX) -> int | None:
        value: int | None = self.of(key, "a number >= 1", lambda x: type(x) is int and x >= 1)
        if value is not None and value > most:
            raise self.error(key, f"at most {most}", value)
        return value

    def number(self, key: str, default: float, positive: bool = False) -> float:
        def valid(x: Any) -> bool:
            return type(x) in (int, float) and 0 <= x < 1e30 and (x > 0 or not positive)

        return float(self.of(key, f"a number {'>' if positive else '>='} 0", valid, default))

    def layers(self, key: str, given: Any, most: int, count: int | None = None) -> tuple[int, ...]:
        """Check and return layer numbers in [0, most] of the target; `count` of them, or any."""
        layers = tuple(given) if isinstance(given, list | tuple) else ()
        whole = all(type(number) is int and 0 <= number <= most for number in layers)
        if not layers or not whole or (count or len(layers)) != len(layers):
            expected = f"{count or 'some'} layers in [0, {most}] of the target"
            raise ValueError(f"{self.name}: {key}: expected {expected}, given {given}")
        return layers

    def require_all_read(self, fixed: Mapping[str, Any], ignored: Collection[str] = ()) -> None:
        """Refuse a key with an effect that was not read. Allowed are also the values `fixed`,
        beside `_FIXED`, and the keys `ignored`, beside `_IGNORED`."""
        known = {**_FIXED, **fixed}
        for config, read in self._sources:
            for key, value in config.items():
                if key in known:
                    if value not in (known[key], None):
                        raise self.error(key, known[key], value)
                elif key not in {*read, *_IGNORED, *ignored} and value not in _NOTHING:
                    raise self.error(key, "no such key, which is not followed", value)

    def shape(self, required: Collection[str], tensors: Collection[str]) -> LlamaConfig:
        """Read the shape of the layers of a file with these `tensors`."""
        tied = self.of("tie_word_embeddings") and "embed_tokens.weight" in tensors
        if tied and "lm_head.weight" not in tensors:
            expected = "false for a head with embeddings and without an output head"
            raise self.error("tie_word_embeddings", expected, True)
        values: dict[str, Any] = {}
        for key in SIZES:
            values[key] = self.size(key, arguments.SIZE_MAX if key in _LONG else _SIZE_MAX)
            if values[key] is None and key in required:
                raise self.error(key, "a number >= 1", None)
        for key in ("rms_norm_eps", "rope_theta"):
            values[key] = None if self.of(key) is None else self.number(key, 0, True)
        for key in ("rope_scaling", "rope_parameters"):
            rope = values[key] = self.of(key)
            factor = rope.get("partial_rotary_factor") if isinstance(rope, Mapping) else None
            if factor not in (None, 1.0):
                raise self.error(f"{key}.partial_rotary_factor", "1.0", factor)
        values["mlp_bias"] = self.flag("mlp_bias", False)
        self.of("hidden_act", "'silu'", "silu".__eq__)
        layers = count_of(tensors, "layers.")
        count = values["num_hidden_layers"] = values["num_hidden_layers"] or 1
        if count != layers:
            raise self.error("num_hidden_layers", f"{layers}, as the tensors have", count)
        try:
            shape = LlamaConfig(**{key: x for key, x in values.items() if x is not None})
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


# ---- networks of the checkpoint ------------------------------------------------------------------

# Prefixes of tensors' names by format, and the network's.
_NAMES = (("midlayer.", "layers.0."), ("fusion_fc.", "fc."), ("transformer.", "layers.0."))
# Tensors for training only, or derived from others.
_UNUSED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
_UNUSED_END = ".rotary_emb.inv_freq"


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
        parse: returns the configuration from the content of config.json, the tensors' names, the
            number of the target's layers and the checkpoint's name.
        kind: constructs the network, a `RotaryNetwork`.
        names: further prefixes of tensors' names, as `_NAMES`, and the network's; None: not
            read.
    """
    model = Target(target)
    folder = folder_of(location)
    name, text = str(folder), model.text
    content, read = read_config(folder), read_folder(folder)
    tensors = _renamed(read, name, (*_NAMES, *names))
    config = parse(content, tensors, text.num_hidden_layers, name)
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
    if not getattr(config, "fuse", True) and config.hidden_size != text.hidden_size:
        raise ValueError(
            f"{name}: hidden_size: expected the target's, {text.hidden_size}, where no product "
            f"brings one to the other, given {config.hidden_size}"
        )
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
