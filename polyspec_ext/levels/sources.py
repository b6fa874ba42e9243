"""Load models and tokenizers from a directory, an id on the hub, or a GGUF file."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import arguments, progress
from ..files import begins, is_gguf, path_of

# Advice for files that are no models, by the end of their names.
_BESIDE = "; the directory is wanted that holds it, with a config.json beside it"
_FILES = dict.fromkeys((".safetensors", ".bin", ".pt", ".pth", ".json"), _BESIDE)
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
_CONFIGS = ("config.json", "adapter_config.json")
_POINTER = b"version https://git-lfs"
COPIES = ("w4", "w8")  # words of 4-bit and 8-bit copies, of the target or of a model after a colon


def is_copy(place: object) -> bool:
    """Return whether a chain's element is the quantised copy of a named model, as ``w4:DIR``."""
    return isinstance(place, str) and place.startswith(tuple(f"{word}:" for word in COPIES))


def original(place: str | Path) -> str | Path:
    """Return the source of the copied model, which has the tokenizer: `place` without ``w4:``."""
    return place[len(copy_prefix(place)) :] if isinstance(place, str) else place


def copy_prefix(place: object) -> str:
    """Return ``w4:`` or ``w8:`` if `place` names a copy, else an empty string."""
    return str(place).partition(":")[0] + ":" if is_copy(place) else ""


@dataclass(frozen=True)
class Source:
    """A location to load a model from."""

    place: str  # a directory, an id or a GGUF file
    file: Path | None = None  # the (first) GGUF file; None: a checkpoint of transformers' format

    @property
    def is_adapter(self) -> bool:
        """Whether it is the directory of an adapter (LoRA), without the adapted model."""
        folder = Path(self.place)
        return folder.is_dir() and not (folder / "config.json").is_file()

    @property
    def in_blocks(self) -> bool:
        """Whether it is a GGUF file with blocks of weights that levels multiply directly."""
        if self.file is None:
            return False
        from .gguf import GgufFile, has_blocks

        return has_blocks(GgufFile(self.file))

    def config(self) -> Any:
        """Return the model's configuration."""
        from transformers import AutoConfig

        if self.file is not None:
            from .gguf import GgufFile, config_of

            return config_of(GgufFile(self.file), torch.float32)
        return AutoConfig.from_pretrained(self.place)

    def model(self, kind: Any, dtype: Any) -> Any:
        """Return the model of a checkpoint, of the class `kind`."""
        made, about = kind.from_pretrained(
            self.place, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
        for key, expected in (
            ("missing_keys", "the weights {}, given none"),
            ("unexpected_keys", "no weights {}, which the model does not read, given some"),
            ("mismatched_keys", "weights of the model's shapes, given others: {}"),
        ):
            # transformers lists tensor names, or names with two shapes.
            names = sorted(map(str, about.get(key) or ()))
            if key == "unexpected_keys":
                names = [name for name in names if not _is_of_head(name, names)]
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                raise ValueError(f"expected {expected.format(names[0] + more)}")
        return made


def _is_of_head(name: str, names: Sequence[str]) -> bool:
    # Weights of multi-token heads (`drafters.MTP`): separate, or an additional layer with a product
    # of embedding and state.
    layer = re.match(r".*\blayers\.\d+\.", name)
    return bool(re.match(r"(.+\.)?mtp(_layers)?\.", name)) or (
        layer is not None and f"{layer[0]}eh_proj.weight" in names
    )


@contextmanager
def found(name: str, place: str | Path) -> Iterator[Source]:
    """Resolve `place` as `transformers` does; errors become a ValueError that says `name`."""
    source = model_source(name, place)
    try:
        yield source
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # broken files may raise any exception
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise _no_model(name, place, first) from error


def model_source(name: str, place: str | Path) -> Source:
    """Return the source at `place`: a model's directory, a GGUF file, or a possible id.

    Raises:
        ValueError: `place` is no source of a model; says `name`.
    """
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        HFValidationError,
        validate_repo_id,
    )

    text, path = str(place), path_of(place)
    if path.is_dir():
        # An adapter's directory names the model that it adapts.
        if not any((path / config).is_file() for config in _CONFIGS):
            raise ValueError(
                f"{name}: expected a directory with a config.json, as save_pretrained writes it, "
                f"given {text!r}, which has none"
            )
        for file in (file for end in _WEIGHTS for file in sorted(path.glob(end))):
            _require_weights(name, file)
        return Source(str(path))
    if path.is_file():
        _require_weights(name, path)
    if is_gguf(path):
        from .gguf import first_part

        return Source(str(path), first_part(path))
    try:
        validate_repo_id(text)
        local = isinstance(place, Path) or path.exists()
    except HFValidationError:
        local = True
    # The name of a file can be a valid id as well, which no model has.
    if local or path.suffix.lower() in (*_FILES, ".gguf"):
        what = "a file" if path.exists() else "not there"
        raise ValueError(
            f"{name}: expected a model id, the directory of a model or a GGUF file, given "
            f"{text!r}, which is {what}{_FILES.get(path.suffix, '')}"
        )
    if "/" not in text:
        progress.note(f"{name}: no directory {text!r} here: looking for a model of this id")
    try:
        return Source(_on_the_hub(text))
    except ValueError as error:
        raise _no_model(name, place, error) from None


def _no_model(name: str, place: object, reason: object) -> ValueError:
    return ValueError(
        f"{name}: expected the id, directory or GGUF file of a causal language model, given "
        f"{str(place)!r}: {reason}"
    )


def _require_weights(name: str, file: Path) -> None:
    if begins(file, _POINTER):
        raise ValueError(
            f"{name}: expected weights in {file}, given a pointer of git-lfs to them; `git lfs "
            "pull` brings them"
        )


@functools.cache
def _on_the_hub(model_id: str) -> str:
    """Return the id to load, or the folder of its cached files if the hub cannot be reached,
    because `transformers` would try for minutes."""
    import huggingface_hub as hub
    from huggingface_hub.errors import HfHubHTTPError

    try:
        hub.file_exists(model_id, _CONFIGS[0])
    except HfHubHTTPError:  # the hub has answered, and will answer `transformers`
        return model_id
    except Exception:  # of the HTTP client, which depends on the hub's release
        for name in _CONFIGS:
            file = hub.try_to_load_from_cache(model_id, name)
            if isinstance(file, str):
                return str(Path(file).parent)
        raise ValueError(
            "no such folder here, no model of this id in the cache, and the hub cannot be reached"
        ) from None
    return model_id


def load_model(
    place: str | Path,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    *,
    blocks: bool = True,
    name: str = "place",
) -> Any:
    """Load the model of an id, directory or GGUF file, in eval mode.

    Args:
        place: a directory with a config.json; a GGUF file, which needs the package gguf (of a split
            model any file, with the others beside it); or else a model id, which `transformers`
            looks up in its cache and may request from the network. A path by its form (a `Path`, a
            string with two or more slashes, or a dot or a tilde first) is never looked up as an id.
        dtype: a data type, its name, or "auto" for the checkpoint's. None: float32 on the CPU,
            where half precision is slow, and "auto" elsewhere.
        device: None: the CPU.
        blocks: multiply directly with the blocks of a GGUF file, where possible (`levels.gguf`), in
            float32 by default. False: dequantise them.
        name: name of `place`, for messages.

    Raises:
        TypeError: `dtype` is no data type, or `device` no device.
        ValueError: no model at `place`, missing or unread weights, or a data type or device that
            the operators do not read.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    where = arguments.device("device", device) or torch.device("cpu")
    default: Any = torch.float32 if where.type == "cpu" else "auto"
    wanted = arguments.loaded_dtype("dtype", dtype) or default
    with found(name, place) as source, progress.loading():
        if source.file is not None:
            from .gguf import GgufFile, gguf_model, has_blocks

            file = GgufFile(source.file)
            blocks = blocks and where.type == "cpu"
            as_blocks = blocks and has_blocks(file)
            if blocks and not as_blocks:
                progress.note(f"{name}: dequantising {source.file.name}: no tensor in blocks")
            default = torch.float32 if as_blocks else torch.bfloat16
            kind = wanted if isinstance(wanted, torch.dtype) else default
            model = gguf_model(file, kind, as_blocks)
        else:
            both = not source.is_adapter and source.config().is_encoder_decoder
            model = source.model(AutoModelForSeq2SeqLM if both else AutoModelForCausalLM, wanted)
    return model.to(where).eval()


# ---- tokenizers ----------------------------------------------------------------------------------


def tokenizer_at(place: str | Path, local: bool = False) -> Any:
    """Load the tokenizer beside a model's weights, or in its GGUF file. With `local`, never use the
    network.

    Raises:
        ValueError: no tokenizer loads, or it has special tokens alone, as transformers constructs
            it from the configuration of a folder without a tokenizer's files.
    """
    from transformers import AutoTokenizer

    path = path_of(place)
    try:
        if is_gguf(path):
            from .gguf import first_part

            file = first_part(path)
            about = file.stat()
            return copy.deepcopy(_in_file(file.resolve(), about.st_mtime_ns, about.st_size))
        source = str(path if path.exists() else place)
        found = AutoTokenizer.from_pretrained(source, local_files_only=local)
    except (OSError, ValueError, KeyError, TypeError, ImportError, NotImplementedError) as error:
        raise ValueError(
            f"expected a tokenizer beside the model, given none that loads in {place}: {error}"
        ) from error
    if len(found) <= len(found.all_special_tokens):
        raise ValueError(f"expected a tokenizer beside the model, given none in {place}")
    return found


@functools.lru_cache(maxsize=4)
def _in_file(file: Path, *_: int) -> Any:
    # Cached, since construction takes seconds.
    from .gguf import GgufFile, tokenizer_of

    return tokenizer_of(GgufFile(file))
