"""Elements of a chain by name: words, and directories of heads."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from .. import rooms
from ..levels import HuggingFaceLevel, Options, load_model
from ..levels.fused import can_pack
from . import resolve, with_paths
from .base import BatchedDrafter, Drafter
from .model import BEAM

W4 = "w4"  # word of a 4-bit copy, of the target or of a model after a colon


def is_copy(location: object) -> bool:
    """Return whether a chain's element is the quantised copy of a named model, as ``w4:DIR``."""
    return isinstance(location, str) and location.startswith(f"{W4}:")


def original(location: str | Path) -> str | Path:
    """Return the location of the copied model, which has the tokenizer, without ``w4:``."""
    return location.removeprefix(f"{W4}:") if isinstance(location, str) else location


def copy_prefix(location: object) -> str:
    """Return ``w4:`` if `location` names a copy, else an empty string."""
    return f"{W4}:" if is_copy(location) else ""


@contextmanager
def _named(options: Options) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(f"{options.name}: {error}") from error


def _load_copy(word: str, options: Options) -> Any:
    """Load a copy of a model or head with 4-bit weights; "w4" without a model copies the target and
    shares its cache."""
    name = options.name
    if is_copy(word) and head_of(original(word)):
        return _load_head(original(word), options, w4=True)
    if is_copy(word):
        # With the checkpoint's data type, unless the caller names another.
        dtype = options.dtype or "auto"
        whole = load_model(original(word), dtype, options.device, blocks=False, name=name)
        return _resolve(rooms.quantization.stored_w4(whole, name), options)
    target = options.target(f"{word!r} below a Hugging Face model as the target")
    copy = rooms.quantization.stored_w4(target.model, name)
    pack = target.pack and can_pack(copy)
    return HuggingFaceLevel(copy, shares_cache_with=target, pack=pack, name=word)


def _load_trimmed(word: str, options: Options) -> Any:
    _, size, source = word.split(":", 2)
    if head_of(original(source)):
        return _load_head(original(source), options, w4=is_copy(source), ids=int(size))
    whole = resolve(source, replace(options, pack=False))
    if not isinstance(whole, HuggingFaceLevel | rooms.stateful.StatefulLevel):
        raise ValueError(f"{options.name}: expected a model to trim, given {source!r}")
    with _named(options):
        copy = rooms.quantization.trim(whole.model, None, int(size))
    return _resolve(copy, options)


def _load_translated(text: str, options: Options) -> Any:
    if not options.above:
        raise ValueError(f"{options.name}: expected {text!r} below a target, given none above it")
    level = resolve(text.partition(":")[2], options)
    with _named(options):
        return rooms.translated.TranslatedLevel(level, options.above[0])


def _load_paths(word: str, options: Options) -> Any:
    _, paths, source = word.split(":", 2)
    return with_paths(source, int(paths), BEAM, options)


def _resolve(model: Any, options: Options) -> Any:
    return resolve(model, replace(options, dtype=None, device=None))


def _load_early_exit(word: str, options: Options) -> HuggingFaceLevel:
    target = options.target("a target that is a Hugging Face model")
    with _named(options):
        return rooms.quantization.early_exit(target, int(word.partition(":")[2]))


HEADS = {"eagle": "EAGLE", "dflash": "DFlash", "mtp": "MTP"}  # kinds of heads


def head_of(thing: Any) -> tuple[str, str] | None:
    """Return the kind and the directory or id of a head, if a chain's element is "KIND:" and a
    directory or id, "mtp" (the target's: no id), or the directory of a head; None: no head. A
    directory has a head by its config.json, or has a Llama's with a single layer and the tensor of
    the product that fuses states."""
    if not isinstance(thing, str | Path):
        return None
    kind, _, source = str(thing).partition(":")
    if kind in HEADS and (source or thing == "mtp"):
        return kind, source
    folder = Path(thing)
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        names = f"{config.get('architectures')} {config.get('speculators_model_type')}".lower()
        if any(name in names for name in ("dflash", "dspark")) or "target_layer_ids" in config:
            return "dflash", str(thing)
        if "eagle" in names or "draft_vocab_size" in config:
            return "eagle", str(thing)
        layers, kind = config.get("num_hidden_layers"), config.get("model_type", "llama")
        if layers != 1 or kind not in ("llama", "qwen2"):
            return None
        for file in [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
            with file.open("rb") as opened:
                if b"fc.weight" in opened.read(2**20):  # both formats begin with the names
                    return "eagle", str(thing)
    except (OSError, ValueError, AttributeError):
        pass  # no directory of a model
    return None


def _load_head(element: Any, options: Options, **form: Any) -> BatchedDrafter:
    kind, source = head_of(element) or ("mtp", "")
    label = repr(element) if kind == "mtp" else f"the {HEADS[kind]} head {source!r}"
    target: Any = options.above[0] if options.above else None
    if not rooms.checkpoint.serves_heads(target):
        target = options.target(f"{label} below a Hugging Face model as the target")
    dtype = options.dtype if isinstance(options.dtype, torch.dtype) else None
    source = source or str(getattr(target.model, "name_or_path", "") or "")
    if not source:
        raise ValueError(
            f"{options.name}: expected a target with the checkpoint that it was loaded from, or "
            f"'mtp:' in front of that, given {element!r} below {target.name}"
        )
    head = getattr(getattr(rooms, kind), {**HEADS, "eagle": "Eagle"}[kind])
    return cast(BatchedDrafter, head.from_pretrained(source, target, dtype=dtype, **form))


def _make_lookup(word: str, options: Options) -> Drafter:
    from . import lookup

    return cast(Drafter, getattr(lookup, _LOOKUPS[word])())


_LOOKUPS = {"prompt-lookup": "PromptLookup", "suffix": "SuffixMatch", "ngram": "NGramTable"}


class _Word(NamedTuple):
    """The loader of a word, the pattern of the text after the word, and its form in messages."""

    load: Callable[[Any, Options], Any]
    rest: str
    form: str


WORDS: dict[str, _Word] = {
    **{word: _Word(_make_lookup, "", repr(word)) for word in _LOOKUPS},
    "mtp": _Word(_load_head, "(:.+)?", "'mtp', the head of the target's checkpoint, or 'mtp:DIR'"),
    "eagle": _Word(_load_head, ":.+", "'eagle:DIR', or the directory of a head"),
    "dflash": _Word(_load_head, ":.+", "'dflash:DIR', or the directory of a head"),
    "early-exit": _Word(_load_early_exit, r":\d+", "'early-exit:K' with K layers"),
    "w4": _Word(_load_copy, "(:.+)?", "'w4' below the target, or 'w4:' and a model or head"),
    "trim": _Word(_load_trimmed, r":\d+:.+", "'trim:N:MODEL' with N ids, as 'trim:32000:DIR'"),
    "translated": _Word(_load_translated, ":.+", "'translated:MODEL', of another tokenizer"),
    "paths": _Word(_load_paths, r":[1-9]\d*:.+", "'paths:K:MODEL' with K paths, as 'paths:3:DIR'"),
}


def named_element(thing: str | Path, options: Options) -> Any:
    """Return the level or drafter of a word or of the directory of a head; None: any other text or
    path.

    Raises:
        ValueError: it cannot be loaded, or resembles a word; begins with ``options.name``.
    """
    word = WORDS.get(thing.partition(":")[0]) if isinstance(thing, str) else None
    if word is not None and re.fullmatch(f"[^:]+{word.rest}", str(thing)):
        return word.load(thing, options)
    if head_of(thing):
        return _load_head(thing, options)
    _require_no_typo(str(thing), options.name)
    return None


def _require_no_typo(text: str, name: str) -> None:
    """Refuse a text that resembles a word: no model has that id, and looking takes long."""
    if "/" in text or Path(text).exists():
        return
    words = {_letters(word): word for word in WORDS}
    close = difflib.get_close_matches(_letters(text), words, 1, 0.8)
    if close:
        form = WORDS[words[close[0]]].form
        raise ValueError(
            f"{name}: expected a model or a drafter's word, given {text!r}; did you mean {form}?"
        )


def _letters(word: str) -> str:
    # Text for comparison: without capitals, hyphens, spaces and text after a colon.
    return re.sub(r"[^a-z]", "", word.lower().partition(":")[0])
