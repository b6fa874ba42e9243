"""Tensors of a published checkpoint: read without running code that lies in it, and fitted to the
module that they are for."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from .. import arguments
from ..arguments import shown

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_FILES = ("*.safetensors", "pytorch_model*.bin")


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a directory.

    Raises:
        ValueError: there is none, or it is no JSON object; names it.
    """
    return _read_json(folder / "config.json")


def _read_json(place: Path) -> dict[str, Any]:
    try:
        given = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{place}: expected a readable {place.name}: {error}") from error
    if not isinstance(given, dict):
        raise ValueError(f"{place}: expected a JSON object, given {type(given).__name__}")
    return given


def weight_files(folder: Path) -> list[Path]:
    """The files of tensors of a directory: whole, or as many as an index names.

    Raises:
        ValueError: there are none, or the index names others than files beside it.
    """
    for one in _WEIGHTS:
        if (folder / one).is_file():
            return [folder / one]
        index = folder / f"{one}.index.json"
        if index.is_file():
            return [folder / part for part in _shards(index)]
    raise ValueError(f"{folder}: expected {' or '.join(_WEIGHTS)}, given neither")


def _shards(index: Path) -> list[str]:
    """The files that an index names."""
    places = _read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(
            f"{index}: weight_map: expected the file of every tensor, given {shown(places)}"
        )
    for key, part in places.items():
        # A path would lead out of the folder.
        if not isinstance(part, str) or part in ("", "..") or PureWindowsPath(part).name != part:
            raise ValueError(
                f"{index}: weight_map: {key}: expected the name of a file beside it, given "
                f"{shown(part)}"
            )
    return sorted(set(places.values()))


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory, by name, on the CPU."""
    found: dict[str, torch.Tensor] = {}
    for file in weight_files(folder):
        found.update(read_file(file))
    return found


def read_file(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a ``.safetensors`` file, or of one that `torch.save` wrote. The latter may
    hold Python objects that run code when they are read: such a file is refused.

    Raises:
        ValueError: the file cannot be read, or holds something else than tensors; names it.
    """
    if file.suffix == ".safetensors":
        try:
            return dict(load_file(file))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file}: expected a safetensors file: {error}") from error
    try:
        given = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{file}: expected a checkpoint of tensors only, given one with Python objects in it, "
            f"which may run code when it is read; refused: {reason}"
        ) from error
    except Exception as error:  # a broken pickle raises whatever its bytes lead to
        raise ValueError(
            f"{file}: expected a checkpoint as torch.save writes it: {error}"
        ) from error
    if not isinstance(given, Mapping) or not all(
        isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in given.items()
    ):
        raise ValueError(f"{file}: expected tensors by name, given {type(given).__name__}")
    return dict(given)


def load_into(
    module: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
    name: str,
) -> None:
    """`module`, which may lie on the meta device, takes `tensors` as its own.

    Raises:
        ValueError: a tensor is missing, unknown, or of another shape; names it, the shape expected
            and the one found.
    """
    wanted = module.state_dict()
    for key, value in wanted.items():
        if key not in tensors:
            raise ValueError(f"{name}: {key}: expected shape {list(value.shape)}, given none")
        found = tensors[key]
        if found.layout != torch.strided or found.is_meta or found.is_quantized:
            raise ValueError(f"{name}: {key}: expected plain numbers, given {shown(found)}")
        if found.shape != value.shape:
            raise ValueError(
                f"{name}: {key}: expected shape {list(value.shape)}, given {list(found.shape)}"
            )
        if value.is_floating_point() and not found.is_floating_point():
            raise ValueError(f"{name}: {key}: expected floating point, given {found.dtype}")
    for key, found in tensors.items():
        if key not in wanted:
            raise ValueError(
                f"{name}: {key}: expected no tensor of this name with this configuration, given "
                f"shape {list(found.shape)}"
            )
    taken = {
        key: tensors[key].to(device, dtype if value.is_floating_point() else value.dtype)
        for key, value in wanted.items()
    }
    module.load_state_dict(taken, assign=True)


def count_of(names: Iterable[str], begin: str) -> int:
    """How many parts there are, ``{begin}0.``, ``{begin}1.`` and so on, without a gap."""
    rests = (name.removeprefix(begin) for name in names if name.startswith(begin))
    found = {rest.partition(".")[0] for rest in rests}
    return next(number for number in itertools.count() if str(number) not in found)


def names_in(file: Path) -> set[str]:
    """Names of a file's tensors, of a ``.safetensors`` file without reading them."""
    if file.suffix != ".safetensors":
        return set(read_file(file))
    try:
        with safe_open(file, "pt") as opened:
            return set(opened.keys())
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file}: expected a safetensors file: {error}") from error


def folder_of(place: str | Path, files: Sequence[str] = ("*.json", *_FILES)) -> Path:
    """A directory, or what the hub has under this id.

    Raises:
        TypeError: it is no path.
        ValueError: it is neither; names it.
    """
    folder = arguments.path("place", place)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(place), allow_patterns=list(files)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(
            f"{place}: expected a directory, or the id of a checkpoint on the hub: {reason}"
        ) from error
