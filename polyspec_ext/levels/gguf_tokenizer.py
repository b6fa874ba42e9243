"""The tokenizer that the header of a GGUF file describes, with llama.cpp's ids.

A header names the rule by which text is cut before its pieces are merged. Text is refused where the
rule is not known here, since another rule gives another prompt.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arguments import shown
from .gguf import GgufFile

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
