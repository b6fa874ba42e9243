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

from .. import arguments
from ..arguments import shown
from ..kv_cache.factory import device_of
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


def names_in(file: Path) -> set[str]:
    """Return the names of a file's tensors; a ``.safetensors`` file's tensors are not read."""
    names: set[str] = set()
    read_file(file, names.add)  # `add` returns None: no tensor is wanted
    return names


# ---- directories with a head ---------------------------------------------------------------------


HEADS = {"eagle": "EAGLE", "dflash": "DFlash"}  # kinds of directories with a head


def head_kind(location: str | Path) -> str | None:
    """Return the kind in `HEADS` of a directory's head, by its configuration, or by a Llama's with
    a single layer and the tensor of the product that fuses states; None: no head."""
    folder = Path(location)
    if not (folder / "config.json").is_file():
        return None
    config = read_config(folder)
    names = f"{architectures(config)} {config.get('speculators_model_type')}".lower()
    if any(name in names for name in ("dflash", "dspark")) or "target_layer_ids" in config:
        return "dflash"
    if "eagle" in names or "draft_vocab_size" in config:
        return "eagle"
    kind = config.get("model_type", "llama")
    if config.get("num_hidden_layers") != 1 or kind not in ("llama", "qwen2"):
        return None
    try:
        files = weight_files(folder)
    except ValueError:
        return None
    return "eagle" if any("fc.weight" in names_in(file) for file in files) else None


def head_of(thing: Any) -> tuple[str, str] | None:
    """Return the kind and the directory or id of a head, if a chain's element is "KIND:" and a
    directory or id, or the directory of a head; None: no head."""
    if not isinstance(thing, str | Path):
        return None
    kind, _, source = str(thing).partition(":")
    if source and kind in HEADS:
        return kind, source
    head = head_kind(thing)
    return None if head is None else (head, str(thing))


def architectures(config: Mapping[str, Any]) -> list[Any]:
    """Return the architectures in a configuration."""
    names = config.get("architectures")
    return names if isinstance(names, list) else []
