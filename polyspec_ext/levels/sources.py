"""Models and tokenizers of what users name: a directory, an id on the hub, or a GGUF file."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import arguments, progress
from ..arguments import shown
from .gguf import GgufFile, begins, config_of, first_part, gguf_model, has_blocks, is_gguf, path_of

# What is to be done with a file that is none of a model, by how its name ends.
_BESIDE = "; the directory is wanted that holds it, with a config.json beside it"
_FILES = dict.fromkeys((".safetensors", ".bin", ".pt", ".pth", ".json"), _BESIDE)
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
_CONFIGS = ("config.json", "adapter_config.json")
_POINTER = b"version https://git-lfs"
COPIES = ("w4", "w8")  # a copy of 4 or 8 bits: of the target, or of what follows behind a colon


def is_copy(place: object) -> bool:
    """Return whether a chain's element is the quantised copy of a model, as ``w4:DIR``."""
    return isinstance(place, str) and place.startswith(tuple(f"{word}:" for word in COPIES))


def original(place: str | Path) -> str | Path:
    """Return the source of the model, which has the copy's tokenizer: `place` without ``w4:``."""
    return place[len(copy_prefix(place)) :] if isinstance(place, str) else place


def copy_prefix(place: object) -> str:
    """Return ``w4:`` or ``w8:`` if `place` is such a copy, else an empty string."""
    return str(place).partition(":")[0] + ":" if is_copy(place) else ""


@dataclass(frozen=True)
class Source:
    """Where a model is loaded from.

    Attributes:
        place: a directory, an id or a GGUF file.
        file: the (first) GGUF file; None: a checkpoint of transformers' format.
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
            names = sorted(map(str, about.get(key) or ()))
            if key == "unexpected_keys":
                names = [name for name in names if not _is_of_head(name, names)]
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                raise ValueError(f"expected {expected.format(names[0] + more)}")
        return made


def _is_of_head(name: str, names: Sequence[str]) -> bool:
    # Of multi-token heads (`drafters.MTP`): apart, or a layer more with a product of embedding and
    # state.
    layer = re.match(r".*\blayers\.\d+\.", name)
    return bool(re.match(r"(.+\.)?mtp(_layers)?\.", name)) or (
        layer is not None and f"{layer[0]}eh_proj.weight" in names
    )


@contextmanager
def found(name: str, place: str | Path) -> Iterator[Source]:
    """Resolve `place` as `transformers` takes it, whose errors become one that says `name`."""
    source = model_source(name, place)
    try:
        yield source
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # broken files raise whatever their bytes lead to
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise _no_model(name, place, first) from error


def model_source(name: str, place: str | Path) -> Source:
    """Return the source at `place`: a directory with a model, a GGUF file, or what may be an id.

    Raises:
        ValueError: it is none of these; says `name`.
    """
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        HFValidationError,
        validate_repo_id,
    )

    text, path = str(place), path_of(place)
    if path.is_dir():
        # An adapter's directory says itself which model it adapts.
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
        return Source(str(path), first_part(path))
    try:
        validate_repo_id(text)
        local = isinstance(place, Path) or path.exists()
    except HFValidationError:
        local = True
    # The name of a file can be an id as well, which no model has.
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
    """Return what to load an id from: the id, or where the hub cannot be reached the folder of its
    cached files, since `transformers` would try for minutes.

    Raises:
        ValueError: the hub cannot be reached, and no file of the model is in the cache.
    """
    import huggingface_hub as hub
    from huggingface_hub.errors import HfHubHTTPError

    try:
        hub.file_exists(model_id, _CONFIGS[0])
    except HfHubHTTPError:  # the hub answered, and so it will `transformers`
        return model_id
    except Exception:  # of the HTTP client, of which releases of the hub have several
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
        place: a directory with a config.json; a GGUF file, for which the package gguf is needed
            (of a model that was split any one, with the others beside it); or else a model id, for
            which `transformers` looks in its cache and may ask the network. What can only be a path
            (a `Path`, a string with more than one slash, a dot or a tilde in front) never gets that
            far.
        dtype: one, its name, or "auto" for the checkpoint's. None: float32 on the CPU, where half
            precision is slow, and "auto" elsewhere.
        device: None: the CPU.
        blocks: multiply with the blocks of a GGUF file as they lie, where that can be done
            (`levels.gguf`), in float32 by default. False: dequantise them.
        name: of `place`, for messages.

    Raises:
        TypeError: `dtype` or `device` is none.
        ValueError: no model there, one whose weights are not all there and all read, or a data type
            or device that the operators do not read.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    where = arguments.device("device", device) or torch.device("cpu")
    default: Any = torch.float32 if where.type == "cpu" else "auto"
    wanted = arguments.loaded_dtype("dtype", dtype) or default
    with found(name, place) as source, progress.loading():
        if source.file is not None:
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
    """Load the tokenizer beside a model's weights, or in its GGUF file. With `local`, the network
    is never asked.

    Raises:
        ValueError: none that loads, or, of a folder without one's files, only what transformers
            makes of the configuration's name: special tokens, with which no text can be read.
    """
    from transformers import AutoTokenizer

    path = path_of(place)
    try:
        if is_gguf(path):
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
    # It takes seconds to make.
    return tokenizer_of(GgufFile(file))


# Of GGUF files the tokenizer is the one that the header describes, and the ids are llama.cpp's. A
# header names the rule by which text is cut before its pieces are merged. Text is refused where the
# rule is not known here, since another rule gives another prompt.

# Types of tokens in `tokenizer.ggml.token_type`.
_UNKNOWN, _CONTROL, _USER = 2, 3, 4
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_ENDS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
_LLAMA3, _QWEN2 = (rf"{_WORDS}|\p{{N}}{{1,3}}{_ENDS}",), (rf"{_WORDS}|\p{{N}}{_ENDS}",)
_DIGITS, _GPT2 = (r"\p{N}",), ()
# By `tokenizer.ggml.pre`: expressions that cut one behind the other (then GPT-2's own where there
# are none or digits alone), whether whole words that are tokens skip the merges, and whether a text
# begins with BOS unless the header says otherwise.
_PRE = {
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"), (_LLAMA3, True, True)
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx"), (_LLAMA3, False, False)),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"), (_QWEN2, False, False)
    ),
    "tekken": ((_TEKKEN,), True, True),
    "deepseek-coder": (_CODER, False, False),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b", "exaone"),
        (_DIGITS, False, False),
    ),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "olmo", "gigachat", "a.x-4.0", "mellum", "trillion", "granite-docling"),
        (_GPT2, False, False),
    ),
}
# What a header may say besides: ids of special tokens, and what is read here.
_READ = {
    f"tokenizer.ggml.{key}"
    for key in (
        "model", "pre", "tokens", "scores", "token_type", "merges", "token_type_count",
        "add_bos_token", "add_eos_token", "add_space_prefix",
    )
}  # fmt: skip


def tokenizer_of(file: GgufFile) -> Any:
    """Return the tokenizer that a file's header describes.

    Raises:
        ValueError: there is none, or something in the header that is not known here; names it.
    """
    from tokenizers import AddedToken, Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    about = file.metadata
    for key, value in about.items():
        beside = key in _READ or key.endswith("_token_id") or value is False
        if key.startswith("tokenizer.ggml.") and not beside:
            raise ValueError(f"expected a header without {key}, given {shown(value)}")
    kind = about.get("tokenizer.ggml.model")
    if kind not in ("llama", "gpt2"):
        raise ValueError(f"tokenizer.ggml.model: expected llama or gpt2, given {shown(kind)}")
    texts = [text.decode() for text in _array(about, "tokens", list)]
    kinds = _array(about, "token_type", np.ndarray).tolist()
    if not texts or len(kinds) != len(texts) or len({*texts}) != len(texts):
        raise ValueError(
            f"tokenizer.ggml.tokens: expected different tokens with a type each, given "
            f"{len(texts)} ({len({*texts})} of them different) and {len(kinds)} types"
        )
    make = _sentencepiece if kind == "llama" else _bytes
    model, parts, begins = make(about, texts)
    made = Tokenizer(model)
    for name, part in parts.items():
        setattr(made, name, part)
    for special, members in ((True, (_CONTROL, _UNKNOWN)), (False, (_USER,))):
        own = [text for text, each in zip(texts, kinds, strict=True) if each in members]
        add = made.add_special_tokens if special else made.add_tokens
        add([AddedToken(text, normalized=False, special=special) for text in own])
    defaults = {"bos": 1, "eos": 2, "unknown": 0} if kind == "llama" else {}
    names = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = about.get(f"tokenizer.ggml.{key}_token_id", defaults.get(key))
        if type(number) is int and 0 <= number < len(texts):
            names[f"{name}_token"] = texts[number]
    around = ["$A"]
    if about.get("tokenizer.ggml.add_bos_token", begins):
        around.insert(0, _required(names, "bos_token"))
    if about.get("tokenizer.ggml.add_eos_token", False):
        around.append(_required(names, "eos_token"))
    made.post_processor = processors.TemplateProcessing(
        single=around, special_tokens=[(text, texts.index(text)) for text in around if text != "$A"]
    )
    # Without these, transformers has tokens of its own for them.
    names = {name: names.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        clean_up_tokenization_spaces=False,
        chat_template=about.get("tokenizer.chat_template"),
        **names,
    )


def _array(about: dict[str, Any], name: str, kind: type) -> Any:
    found = about.get(f"tokenizer.ggml.{name}")
    if not isinstance(found, kind):
        raise ValueError(f"tokenizer.ggml.{name}: expected an array, given {shown(found)}")
    return found


def _required(names: dict[str, str], name: str) -> str:
    if name not in names:
        raise ValueError(f"tokenizer.ggml.{name}_id: expected the id of a token, given none")
    return names[name]


def _sentencepiece(about: dict[str, Any], texts: list[str]) -> tuple[Any, dict[str, Any], bool]:
    """Return a model whose merges follow the scores, what goes around it, and that a text begins
    with BOS."""
    from tokenizers import decoders, models, normalizers

    scores = _array(about, "scores", np.ndarray).tolist()
    ids = {text: i for i, text in enumerate(texts)}
    # Each way to put a token together from two others: the best scores first.
    pairs = [
        (-score, i, left, text[cut:])
        for i, (text, score) in enumerate(zip(texts, scores, strict=True))
        for cut in range(1, len(text))
        if (left := text[:cut]) in ids and text[cut:] in ids
    ]
    unknown = about.get("tokenizer.ggml.unknown_token_id", 0)
    model = models.BPE(
        ids,
        [(left, right) for *_, left, right in sorted(pairs, key=lambda pair: pair[:2])],
        unk_token=texts[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    prefix = about.get("tokenizer.ggml.add_space_prefix", True)
    spaces: list[Any] = [normalizers.Replace(" ", "▁")]
    back: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        spaces.insert(0, normalizers.Prepend("▁"))
        back.append(decoders.Strip(" ", 1, 0))
    parts = {"normalizer": normalizers.Sequence(spaces), "decoder": decoders.Sequence(back)}
    return model, parts, True


def _bytes(about: dict[str, Any], texts: list[str]) -> tuple[Any, dict[str, Any], bool]:
    """Return a model of bytes with the file's merges, what goes around it, and whether a text
    begins with BOS."""
    from tokenizers import Regex, decoders, models, pre_tokenizers

    pre = about.get("tokenizer.ggml.pre")
    if pre not in _PRE:
        raise ValueError(f"tokenizer.ggml.pre: expected one of {', '.join(_PRE)}, given {pre!r}")
    cuts, whole, begins = _PRE[pre]
    merges = [tuple(text.decode().split(" ")) for text in _array(about, "merges", list)]
    ids = {text: i for i, text in enumerate(texts)}
    if not all(len(pair) == 2 and pair[0] + pair[1] in ids for pair in merges):
        raise ValueError("tokenizer.ggml.merges: expected pairs that make tokens, given others")
    model = models.BPE(ids, merges, ignore_merges=whole)
    own = cuts in (_DIGITS, _GPT2)
    steps: list[Any] = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in cuts]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own))
    parts = {"pre_tokenizer": pre_tokenizers.Sequence(steps), "decoder": decoders.ByteLevel()}
    return model, parts, begins
