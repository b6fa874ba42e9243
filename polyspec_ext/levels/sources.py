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
from .gguf_file import GgufFile

# What is to be done with a file that is none of a model, by how its name ends.
_BESIDE = "; the directory is wanted that holds it, with a config.json beside it"
_FILES = dict.fromkeys((".safetensors", ".bin", ".pt", ".pth", ".json"), _BESIDE)
GGUF = ".gguf"
_TOKENIZERS = ("qwen2", "qwen3")  # families with a tokenizer of that name


@dataclass(frozen=True)
class Source:
    """What `transformers` loads from.

    Attributes:
        place: a directory or an id.
        file: name of a GGUF file in it; None: a checkpoint of transformers' own.
    """

    place: str
    file: str | None = None

    def config(self) -> Any:
        """The model's configuration."""
        from transformers import AutoConfig

        file = {} if self.file is None else {"gguf_file": self.file}
        return AutoConfig.from_pretrained(self.place, **file)

    def model(self, kind: Any, dtype: Any) -> Any:
        """The model, of the class `kind`. Blocks of a GGUF file are dequantised: weights of `dtype`
        or, with "auto", bfloat16."""
        if self.file is None:
            return kind.from_pretrained(self.place, dtype=dtype)
        from transformers import GgufConfig

        made = kind.from_pretrained(
            self.place,
            dtype=torch.bfloat16 if dtype == "auto" else dtype,
            quantization_config=GgufConfig(gguf_file=self.file, dequantize=True),
            gguf_file=self.file,
        )
        made.name_or_path = str(Path(self.place) / self.file)
        return made


def is_gguf(place: object) -> bool:
    """Whether a model's place is a GGUF file that is there."""
    return isinstance(place, str | Path) and (path := Path(place)).suffix == GGUF and path.is_file()


def source_of(place: str | Path) -> Source:
    """Of a place that is known to be one."""
    if is_gguf(place):
        path = Path(place)
        return Source(str(path.parent), path.name)
    return Source(str(place))


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
            file = Path(source.place, source.file).resolve()
            about = file.stat()
            return copy.deepcopy(_in_file(file, about.st_mtime_ns, about.st_size))
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
    from transformers import AutoTokenizer, TokenizersBackend

    about = GgufFile(file).metadata
    family, kind = about.get("general.architecture"), about.get("tokenizer.ggml.model")
    place, name = str(file.parent), file.name
    # Where the class is known: else transformers reads the whole header for a configuration first,
    # item by item.
    if family in _TOKENIZERS:
        return AutoTokenizer.from_pretrained(place, gguf_file=name, tokenizer_type=family)
    if (family, kind) == ("llama", "gpt2"):
        return TokenizersBackend.from_pretrained(place, gguf_file=name)
    return AutoTokenizer.from_pretrained(place, gguf_file=name)


@contextmanager
def found(name: str, place: str | Path) -> Iterator[Source]:
    """`place` as `transformers` takes it, whose errors become one that says `name`."""
    source = model_source(name, place)
    try:
        yield source
    except (OSError, ValueError, ImportError) as error:
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
    folder = Path(source)
    if folder.is_dir():
        # An adapter's directory says itself which model it adapts.
        if not any((folder / one).is_file() for one in ("config.json", "adapter_config.json")):
            raise ValueError(
                f"{name}: expected a directory with a config.json, as save_pretrained writes it, "
                f"given {source!r}, which has none"
            )
        return Source(source)
    if is_gguf(folder):
        return source_of(folder)
    try:
        validate_repo_id(source)
        local = isinstance(place, Path) or folder.exists()
    except HFValidationError:
        local = True
    # The name of a file can be an id as well, which no model has.
    if local or folder.suffix in (*_FILES, GGUF):
        found = "a file" if folder.exists() else "not there"
        raise ValueError(
            f"{name}: expected a model id, the directory of a model or a GGUF file, given "
            f"{source!r}, which is {found}{_FILES.get(folder.suffix, '')}"
        )
    if "/" not in source:
        progress.note(f"{name}: no directory {source!r} here: looking for a model of this id")
    return Source(source)
