"""Load models from a directory, an id on the hub, or a GGUF file, and make them levels."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from .. import arguments, progress, rooms
from ..arguments import Switch, shown
from ..kv_cache import device_of, is_stateful
from . import base
from .fused import can_pack, fuses_on_cuda
from .hugging_face import HuggingFaceLevel, level_of
from .models import begins, is_encoder_decoder, is_gguf, path_of
from .products import packs_by_default

# Advice for files that are no models, by the end of their names.
_BESIDE = "; the directory is wanted that holds it, with a config.json beside it"
_FILES = dict.fromkeys((".safetensors", ".bin", ".pt", ".pth", ".json"), _BESIDE)
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
_CONFIGS = ("config.json", "adapter_config.json")
_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class Source:
    """A location to load a model from."""

    location: str  # a directory, an id or a GGUF file
    file: Path | None = None  # the (first) GGUF file; None: a checkpoint of transformers' format

    @property
    def is_adapter(self) -> bool:
        """Whether it is the directory of an adapter (LoRA), without the adapted model."""
        folder = Path(self.location)
        return folder.is_dir() and not (folder / "config.json").is_file()

    def config(self) -> Any:
        """Return the model's configuration."""
        from transformers import AutoConfig

        if self.file is not None:
            return rooms.gguf.config_of(rooms.gguf.GgufFile(self.file), torch.float32)
        return AutoConfig.from_pretrained(self.location)

    def model(self, kind: Any, dtype: Any) -> Any:
        """Return the model of a checkpoint, of the class `kind`."""
        loaded, about = kind.from_pretrained(
            self.location, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
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
                rest = f" and {len(names) - 1} more" if len(names) > 1 else ""
                raise ValueError(f"expected {expected.format(names[0] + rest)}")
        return loaded


def _is_of_head(name: str, names: Sequence[str]) -> bool:
    # Weights of multi-token heads (`drafters.MTP`): separate, or an additional layer with a product
    # of embedding and state.
    layer = re.match(r".*\blayers\.\d+\.", name)
    return bool(re.match(r"(.+\.)?mtp(_layers)?\.", name)) or (
        layer is not None and f"{layer[0]}eh_proj.weight" in names
    )


@contextmanager
def found(name: str, location: str | Path) -> Iterator[Source]:
    """Resolve `location` as `transformers` does; errors become a ValueError that says `name`."""
    source = model_source(name, location)
    try:
        yield source
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # broken files may raise any exception
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise _no_model(name, location, first) from error


def model_source(name: str, location: str | Path) -> Source:
    """Return the source at `location`: a model's directory, a GGUF file, or a possible id.

    Raises:
        ValueError: `location` is no source of a model; says `name`.
    """
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        HFValidationError,
        validate_repo_id,
    )

    text, path = str(location), path_of(location)
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
        return Source(str(path), rooms.gguf.first_part(path))
    try:
        validate_repo_id(text)
        local = isinstance(location, Path) or path.exists()
    except HFValidationError:
        local = True
    # The name of a file can be a valid id as well, which no model has.
    if local or path.suffix.lower() in (*_FILES, ".gguf"):
        state = "a file" if path.exists() else "not there"
        raise ValueError(
            f"{name}: expected a model id, the directory of a model or a GGUF file, given "
            f"{text!r}, which is {state}{_FILES.get(path.suffix, '')}"
        )
    if "/" not in text:
        progress.note(f"{name}: no directory {text!r} here: looking for a model of this id")
    try:
        return Source(_on_the_hub(text))
    except ValueError as error:
        raise _no_model(name, location, error) from None


def _no_model(name: str, source: object, reason: object) -> ValueError:
    return ValueError(
        f"{name}: expected the id, directory or GGUF file of a causal language model, given "
        f"{str(source)!r}: {reason}"
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
    location: str | Path,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    *,
    blocks: bool = True,
    name: str = "location",
) -> Any:
    """Load the model of an id, directory or GGUF file, in eval mode.

    Args:
        location: a directory with a config.json; a GGUF file, which needs the package gguf (of a
            split model any file, with the others beside it); or else a model id, which
            `transformers` looks up in its cache and may request from the network. A path by its
            form (a `Path`, a string with two or more slashes, or a dot or a tilde first) is never
            looked up as an id.
        dtype: a data type, its name, or "auto" for the checkpoint's. None: float32 on the CPU,
            where half precision is slow, and "auto" elsewhere.
        device: None: the CPU.
        blocks: multiply directly with the blocks of a GGUF file, where possible (`levels.gguf`), in
            float32 by default. False: dequantise them.
        name: name of `location`, for messages.

    Raises:
        TypeError: `dtype` is no data type, or `device` no device.
        ValueError: no model at `location`, missing or unread weights, or a data type or device that
            the operators do not read.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    where = arguments.device("device", device) or torch.device("cpu")
    default: Any = torch.float32 if where.type == "cpu" else "auto"
    choice = arguments.loaded_dtype("dtype", dtype) or default
    with found(name, location) as source, progress.loading(folder=source.location):
        if source.file is not None:
            file = rooms.gguf.GgufFile(source.file)
            blocks = blocks and where.type == "cpu"
            as_blocks = blocks and rooms.gguf.has_blocks(file)
            if blocks and not as_blocks:
                progress.note(f"{name}: dequantising {source.file.name}: no tensor in blocks")
            default = torch.float32 if as_blocks else torch.bfloat16
            kind = choice if isinstance(choice, torch.dtype) else default
            model = rooms.gguf.gguf_model(file, kind, as_blocks)
        else:
            encodes = not source.is_adapter and source.config().is_encoder_decoder
            model = source.model(AutoModelForSeq2SeqLM if encodes else AutoModelForCausalLM, choice)
    return model.to(where).eval()


# ---- levels of models ----------------------------------------------------------------------------


def load(
    location: str | Path,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    *,
    pack: bool = False,
    blocks: bool = True,
    name: str = "location",
) -> Any:
    """Load a level (`level_class`) from a model id, directory or GGUF file. Arguments and errors
    are as in `load_model`; `pack` as in `HuggingFaceLevel`."""
    model = load_model(location, dtype, device, blocks=blocks, name=name)
    return level_for(model, Options(pack=pack))


def level_class(model: Any) -> Any:
    """Return the class of level for a model of `transformers`."""
    if is_encoder_decoder(model):
        return rooms.encoder_decoder.EncoderDecoderLevel
    if is_stateful(model):
        return rooms.stateful.StatefulLevel
    return HuggingFaceLevel


@runtime_checkable
class Level(base.Level, Protocol):
    """The protocol `levels.base.Level`. ``Level(model, ...)`` itself is short for
    ``HuggingFaceLevel(model, ...)`` and takes its arguments:
    ``Level(copy, shares_cache_with=target)``, ``Level(draft, streaming=256)``, or for an
    `EncoderDecoderLevel` or a `StatefulLevel`. A model id or path is loaded first, with `dtype` and
    `device` as in `load`. (Type checkers that reject calls of protocols need the long name.)"""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        # Subclasses of the protocol are constructed as usual.
        if cls is not Level:
            return super().__new__(cls)
        if args and isinstance(args[0], str | Path):
            where = {name: options.pop(name, None) for name in ("dtype", "device")}
            args = (load_model(args[0], **where, name="model"), *args[1:])
        kind = level_class(args[0]) if args else HuggingFaceLevel
        return kind(*args, **options)


# ---- elements of chains --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Options:
    """Arguments of an element's loader beside the element.

    Attributes:
        name: name of the element, for messages.
        above: levels above the element, target first.
        dtype, device: of loaded models, as in `levels.load`.
        pack: of new levels (`HuggingFaceLevel`). "auto": on the CPU if `packs_by_default`, where a
            model has layers to pack; on CUDA bfloat16 models whose layers are fused there. Not
            False, without `dtype`: a bfloat16 checkpoint on the CPU stays bfloat16 if the processor
            has products of it; for a target also the packed level's logits must not depend on the
            tokens beside a token (`HuggingFaceLevel.varies`).
    """

    name: str = "level"
    above: Sequence[Any] = ()
    dtype: torch.dtype | str | None = None
    device: str | torch.device | None = None
    pack: Switch = False

    def target(self, what: str) -> HuggingFaceLevel:
        """Return the target, a Hugging Face model; `what` is the expectation in the error."""
        if self.above and isinstance(self.above[0], HuggingFaceLevel):
            return self.above[0]
        above = shown(self.above[0]) if self.above else "nothing above it"
        raise ValueError(f"{self.name}: expected {what}, given {above}")


def load_path(element: str | Path, options: Options) -> Any:
    """Return the level of a model id, or of the directory or GGUF file of a model."""
    name, device = options.name, arguments.device("device", options.device)
    with found(name, element) as source:
        if source.is_adapter and options.pack:
            raise ValueError(
                "an adapter, whose layers are not packed: pack=False, or merge it "
                "(PeftModel.from_pretrained(model, folder).merge_and_unload()) and save that"
            )
        in_bfloat16 = bool(options.pack) and options.dtype is None and _has_bfloat16(source, device)
    if in_bfloat16:
        with contextlib.suppress(ValueError):
            level = load(element, torch.bfloat16, device, pack=True, name=name)
            # A target's logits must not depend on the width of a pass, or its text would.
            if options.above or getattr(level, "varies", None) == ():
                return level
    return level_for(load_model(element, options.dtype, device, name=name), options)


def _has_bfloat16(source: Source, device: torch.device | None) -> bool:
    if (device is not None and device.type != "cpu") or source.file is not None:
        return False
    config = source.config()
    half = config.dtype == torch.bfloat16 and not config.is_encoder_decoder
    return half and multiplies_bfloat16()


def multiplies_bfloat16() -> bool:
    """Return whether the processor has products of bfloat16 (AVX512-BF16 or AMX) that torch may
    use: without them they take longer than those of float32."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def require_level(level: base.Level, options: Options) -> base.Level:
    """Return a level if the operators can read its logits; refuse others."""
    name = f"{options.name}, {getattr(level, 'name', type(level).__name__)}"
    size = arguments.integer(f"{name}: vocab_size", level.vocab_size)
    if not 1 <= size <= arguments.SIZE_MAX:
        raise ValueError(
            f"{name}: vocab_size: expected 1 to {arguments.SIZE_MAX}, given {level.vocab_size}"
        )
    arguments.supported_device(f"{name}: device", getattr(level, "device", "cpu"))
    return level


def level_for(model: Any, options: Options) -> Any:
    """Return the level of a model of `transformers`."""
    kind = level_class(model)
    if is_encoder_decoder(model):
        return kind(model)

    def level(pack: bool) -> Any:
        return level_of(model, pack) if kind is HuggingFaceLevel else kind(model, pack=pack)

    if isinstance(options.pack, bool):
        return level(options.pack)
    on_cpu = device_of(model).type == "cpu"
    if (on_cpu and packs_by_default(model.dtype) and can_pack(model)) or fuses_on_cuda(model):
        with contextlib.suppress(ValueError, RuntimeError):  # adapters, or oneDNN fails to pack
            return level(True)
    return level(False)
