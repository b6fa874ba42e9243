"""Where a model lies: a directory, an id on the hub, or a GGUF file; and its tokenizer."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import progress
from . import hub
from .gguf_file import MAGIC, GgufFile, first_part
from .gguf_header import config_of
from .gguf_tokenizer import tokenizer_of

# What is to be done with a file that is none of a model, by how its name ends.
_BESIDE = "; the directory is wanted that holds it, with a config.json beside it"
_FILES = dict.fromkeys((".safetensors", ".bin", ".pt", ".pth", ".json"), _BESIDE)
_GGUF = ".gguf"
_WEIGHTS = ("*.safetensors", "*.bin", f"*{_GGUF}")
_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class Source:
    """Where a model is loaded from.

    Attributes:
        place: a directory, an id or a GGUF file.
        file: the (first) GGUF file; None: a checkpoint of transformers' own.
    """

    place: str
    file: Path | None = None

    @property
    def is_adapter(self) -> bool:
        """Whether it is the directory of an adapter (LoRA), without the model that it adapts."""
        folder = Path(self.place)
        return folder.is_dir() and not (folder / "config.json").is_file()

    def config(self) -> Any:
        """Return the model's configuration."""
        from transformers import AutoConfig

        if self.file is not None:
            return config_of(GgufFile(self.file), torch.float32)
        return AutoConfig.from_pretrained(self.place)

    def model(self, kind: Any, dtype: Any) -> Any:
        """Return the model of a checkpoint, of the class `kind`.

        Raises:
            ValueError: the checkpoint lacks weights of the model, or has others; names one.
        """
        made, about = kind.from_pretrained(
            self.place, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
        for key, expected in (
            ("missing_keys", "the weights {}, given none"),
            ("unexpected_keys", "no weights {}, which the model does not read, given some"),
            ("mismatched_keys", "weights of the model's shapes, given others: {}"),
        ):
            # transformers names one tensor, or one and its two shapes.
            found = sorted(map(str, about.get(key) or ()))
            if found:
                more = f" and {len(found) - 1} more" if len(found) > 1 else ""
                raise ValueError(f"expected {expected.format(found[0] + more)}")
        return made


def path_of(place: str | Path) -> Path:
    """Return a path, in the user's own folder where it begins with a tilde."""
    path = Path(place)
    try:
        return path.expanduser()
    except RuntimeError:  # no such user
        return path


def is_gguf(place: object) -> bool:
    """Whether a model's place is a GGUF file that is there, by its name or its first bytes."""
    if not isinstance(place, str | Path):
        return False
    path = path_of(place)
    return path.is_file() and (path.suffix.lower() == _GGUF or _begins(path, MAGIC))


def _begins(path: Path, first: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(first)) == first
    except OSError:
        return False


def source_of(place: str | Path) -> Source:
    """Of a place that is known to be one."""
    path = path_of(place)
    if is_gguf(path):
        return Source(str(path), first_part(path))
    return Source(str(path) if path.exists() else str(place))


def tokenizer_at(place: str | Path, local: bool = False) -> Any:
    """The tokenizer beside a model's weights, or in its GGUF file. With `local`, the network is
    never asked.

    Raises:
        ValueError: none that loads, or, of a folder without one's files, only what transformers
            makes of the configuration's name: special tokens, with which no text can be read.
    """
    from transformers import AutoTokenizer

    source = source_of(place)
    try:
        if source.file is not None:
            about = source.file.stat()
            made = _in_file(source.file.resolve(), about.st_mtime_ns, about.st_size)
            return copy.deepcopy(made)
        found = AutoTokenizer.from_pretrained(source.place, local_files_only=local)
    except (OSError, ValueError, KeyError, TypeError, ImportError, NotImplementedError) as error:
        raise ValueError(
            f"expected a tokenizer beside the model, given none that loads in {place}: {error}"
        ) from error
    if len(found) <= len(found.all_special_tokens):
        raise ValueError(f"expected a tokenizer beside the model, given none in {place}")
    return found


@functools.lru_cache(maxsize=4)
def _in_file(file: Path, *_: int) -> Any:
    """The tokenizer of a GGUF file, which takes seconds to make."""
    return tokenizer_of(GgufFile(file))


@contextmanager
def found(name: str, place: str | Path) -> Iterator[Source]:
    """`place` as `transformers` takes it, whose errors become one that says `name`."""
    source = model_source(name, place)
    try:
        yield source
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # broken files raise whatever their bytes lead to
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(
            f"{name}: expected the id, directory or GGUF file of a causal language model, given "
            f"{str(place)!r}: {first}"
        ) from error


def model_source(name: str, place: str | Path) -> Source:
    """`place`, if it is a directory with a model, a GGUF file, or may be a model id. ValueError
    where it is none; says `name`."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        HFValidationError,
        validate_repo_id,
    )

    source = str(place)
    folder = path_of(place)
    if folder.is_dir():
        # An adapter's directory says itself which model it adapts.
        if not any((folder / one).is_file() for one in ("config.json", "adapter_config.json")):
            raise ValueError(
                f"{name}: expected a directory with a config.json, as save_pretrained writes it, "
                f"given {source!r}, which has none"
            )
        for file in (file for end in _WEIGHTS for file in sorted(folder.glob(end))):
            _require_weights(name, file)
        return Source(str(folder))
    if folder.is_file():
        _require_weights(name, folder)
    if is_gguf(folder):
        return source_of(folder)
    try:
        validate_repo_id(source)
        local = isinstance(place, Path) or folder.exists()
    except HFValidationError:
        local = True
    # The name of a file can be an id as well, which no model has.
    if local or folder.suffix.lower() in (*_FILES, _GGUF):
        found = "a file" if folder.exists() else "not there"
        raise ValueError(
            f"{name}: expected a model id, the directory of a model or a GGUF file, given "
            f"{source!r}, which is {found}{_FILES.get(folder.suffix, '')}"
        )
    if "/" not in source:
        progress.note(f"{name}: no directory {source!r} here: looking for a model of this id")
    try:
        return Source(hub.place_of(source))
    except ValueError as error:
        raise ValueError(
            f"{name}: expected the id, directory or GGUF file of a causal language model, given "
            f"{source!r}: {error}"
        ) from None


def _require_weights(name: str, file: Path) -> None:
    if _begins(file, _POINTER):
        raise ValueError(
            f"{name}: expected weights in {file}, given a pointer of git-lfs to them; `git lfs "
            "pull` brings them"
        )
