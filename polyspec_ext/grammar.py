"""Grammars of answers: a JSON schema, a regular expression or a Lark grammar, compiled by
llguidance (``pip install polyspec_ext[grammar]``).

A forbidden token has probability 0 on every level of a chain (contract C1), so the text has exactly
the distribution of the target's masked logits. Rows after the first invalid draft token are not
masked: the token is never accepted, so nothing is drawn from them.
"""

from __future__ import annotations

import itertools
import json
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from . import arguments
from .sampling import MaskSource, Words

# Tokenizers in llguidance's form (up to a second each), by tokenizer and vocabulary size.
_TOKENIZERS: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()

_NOTHING: Words = np.zeros(1, np.int32)  # a mask of no id


class Grammar:
    """A compiled grammar of the generated text. It is immutable, and serves any number of requests
    and threads at once.

    Args:
        source: a grammar in llguidance's form, usually from a class method.
        tokenizer: the target's fast tokenizer of transformers.
        name: of the argument in messages.

    Raises:
        ImportError: llguidance is missing; says how to install it.
        TypeError: the tokenizer is no fast tokenizer.
        ValueError: the grammar is not valid, has no text, or uses a feature that llguidance does
            not support; the tokenizer has no EOS id.
    """

    def __init__(self, source: str, tokenizer: Any, *, name: str = "source") -> None:
        library = _llguidance()
        arguments.instance(name, source, str, none=False)
        form = _tokenizer(tokenizer)
        failed, messages = library.LLMatcher.validate_grammar_with_warnings(source, form)
        if failed:
            message = messages[0].strip()
            if "coerce_one_of" in message:  # an option of llguidance, which no caller has
                message = (
                    "the branches of oneOf must exclude each other, by a required property with "
                    "another constant in each: use anyOf"
                )
            raise ValueError(f"{name}: expected a valid grammar: {message}")
        self._eos = frozenset(form.eos_tokens)
        # The state of the empty text; each request gets a copy, which shares the compiled grammar.
        self._start = library.LLMatcher(form, source, log_level=0)
        self._start.compute_bitmask()
        if self._start.is_error():
            raise ValueError(f"{name}: expected a grammar with a text: {_message(self._start)}")

    @classmethod
    def json_schema(
        cls, schema: Mapping[str, Any] | str, tokenizer: Any, *, whitespace: bool = True
    ) -> Grammar:
        """Compile a JSON schema, as a mapping or as JSON text.

        Args:
            whitespace: allow white space between the elements, at most 20 characters in a row,
                since some models would write it without end; False: none.

        Raises:
            TypeError, ValueError, ImportError: as for `Grammar`; the text is no JSON.
        """
        arguments.flag("whitespace", whitespace)
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError as error:
                raise ValueError(f"schema: expected JSON: {error}") from error
        if not isinstance(schema, Mapping):
            actual = arguments.shown(schema)
            raise TypeError(f"schema: expected a mapping or its JSON text, given {actual}")
        overrides: dict[str, Any] = {"whitespace_flexible": whitespace}
        if whitespace:
            overrides["whitespace_pattern"] = r"[\x20\x0A\x0D\x09]{0,20}"
        source = _llguidance().LLMatcher.grammar_from_json_schema(
            json.dumps(_tagged(dict(schema))), overrides=overrides
        )
        return cls(source, tokenizer, name="schema")

    @classmethod
    def json_object(cls, tokenizer: Any, *, whitespace: bool = True) -> Grammar:
        """Compile the grammar of any JSON object. Arguments and errors as for `json_schema`."""
        schema = {"type": "object"}
        return cls.json_schema(schema, tokenizer, whitespace=whitespace)

    @classmethod
    def regex(cls, pattern: str, tokenizer: Any) -> Grammar:
        """Compile a regular expression for the whole text, in the syntax of Rust's `regex` without
        look-around. Arguments and errors as for `Grammar`."""
        arguments.instance("pattern", pattern, str, none=False)
        source = _llguidance().LLMatcher.grammar_from_regex(pattern)
        return cls(source, tokenizer, name="pattern")

    @classmethod
    def lark(cls, grammar: str, tokenizer: Any) -> Grammar:
        """Compile a context-free grammar in llguidance's variant of Lark's syntax. Arguments and
        errors as for `Grammar`."""
        arguments.instance("grammar", grammar, str, none=False)
        source = _llguidance().LLMatcher.grammar_from_lark(grammar)
        return cls(source, tokenizer, name="grammar")

    def for_request(self, prompt_length: int, eos: Collection[int] = ()) -> GrammarMatcher:
        """Return the initial state of a request.

        Args:
            prompt_length: tokens of its prompt, to which the grammar does not apply.
            eos: ids that end its text, allowed after a complete text; empty: the tokenizer's.
        """
        length = arguments.integer("prompt_length", prompt_length)
        ends = frozenset(eos) or self._eos
        return GrammarMatcher(self._start, self._eos, ends, length)


class GrammarMatcher(MaskSource):
    """The grammar state of a request, a `RowProcessor`, for its text and drafts. Each call goes
    back to the longest common prefix with the text of the previous call, so that it costs only the
    new tokens.

    Args:
        start: llguidance's matcher at the empty text; it takes the ids `known` for its end.
    """

    def __init__(
        self, start: Any, known: frozenset[int], eos: frozenset[int], prompt_length: int
    ) -> None:
        self._start, self._matcher = start, start.deep_copy()
        self._known, self._eos, self._begin = sorted(known), eos, prompt_length
        self._reason = ""  # why llguidance takes no token after the text of the latest call
        self._tokens: list[int] = []  # valid tokens that the matcher has consumed
        # Masks by number of consumed tokens, cached because every level asks for the same masks.
        self._masks: list[Words | None] = [None]

    def masks(self, prefix: Sequence[int], count: int) -> list[Words | None]:
        """Return the allow-masks of `count` successive tokens, the last of which is the token
        after `prefix`, prompt first: ``[W]`` int32, bit 1 is an allowed id, and ids past the
        last word are forbidden. None: after an invalid token, or within the prompt. At a dead
        end, or where the grammar is too complex for llguidance, no id is allowed.
        """
        self._reason = ""
        text = list(prefix[self._begin :])
        matched = 0
        for consumed, token in zip(self._tokens, text, strict=False):
            if consumed != token:
                break
            matched += 1
        end = len(prefix) - self._begin
        masks: list[Words | None] = []
        for length in range(end - count + 1, end + 1):
            if length < 0:
                masks.append(None)
                continue
            if length > matched or self._masks[length] is None:
                matched = self._move(text[:length], min(matched, length))
            if self._reason:
                return [*masks, _NOTHING, *[None] * (end - length)]
            if length <= matched:
                masks.append(self._masks[length])
                continue
            # Only EOS is allowed after an EOS of a complete text.
            ended = self._eos.issuperset(text[len(self._tokens) : length])
            masks.append(_mask_of(self._eos) if ended and self._matcher.is_accepting() else None)
        return masks

    def forced(self, prefix: Sequence[int], most: int) -> list[int]:
        """Return at most `most` tokens, each the only token that may follow `prefix`, prompt first,
        and the tokens before it."""
        (mask,) = self.masks(prefix, 1)
        # After an EOS the matcher's state is not at the end of the text.
        if mask is None or len(self._tokens) < len(prefix) - self._begin:
            return []
        tokens: list[int] = self._matcher.compute_ff_tokens()[:most]
        return list(itertools.takewhile(lambda token: token not in self._eos, tokens))

    def apply(self, logits: torch.Tensor, prefix: torch.Tensor, row: int = 0) -> torch.Tensor:
        """Return the logits with -inf at forbidden ids, as `LogitsProcessors.apply`."""
        return masked(logits, stacked(self.masks(prefix.tolist(), len(logits)), logits.shape[1]))

    def forbidding(self, prefix: Sequence[int]) -> dict[str, str]:
        """Return the grammar with llguidance's reason, as `RequestProcessors.forbidding`."""
        self.masks(prefix, 1)
        return {"grammar": self._reason and f"llguidance: {self._reason}"}

    def _move(self, text: list[int], matched: int) -> int:
        """Move the matcher from the common prefix of `matched` tokens to the end of `text`, or of
        its valid tokens; return the number of consumed tokens."""
        if len(self._tokens) > matched:
            self._matcher.rollback(len(self._tokens) - matched)
            del self._tokens[matched:], self._masks[matched + 1 :]
        rest = text[matched:]
        # An EOS is not consumed: the matcher could not distinguish it from another end.
        ends = [i for i, token in enumerate(rest) if token in self._eos]
        taken = self._matcher.try_consume_tokens(rest[: ends[0]] if ends else rest) if rest else 0
        self._tokens += rest[:taken]
        self._masks += [None] * taken
        if taken == len(rest) and self._masks[-1] is None:
            self._masks[-1] = self._current_mask()
        if self._matcher.is_error():  # for good: the next text needs another matcher
            self._reason = _message(self._matcher)
            self._matcher = self._start.deep_copy()
            self._tokens, self._masks = [], [None]
        return len(self._tokens)

    def _current_mask(self) -> Words:
        # An id that ends the request is allowed only after a complete text.
        words = np.frombuffer(self._matcher.compute_bitmask(), np.int32).copy()
        ends = _mask_of([*self._known, *self._eos], len(words))
        words = np.pad(words, (0, len(ends) - len(words))) & ~ends
        if self._matcher.is_accepting():
            words |= _mask_of(self._eos, len(words))
        return words


def _tagged(schema: Any) -> Any:
    """Return a schema in which the branches of a `oneOf` with a discriminator require it, as
    pydantic does, which leaves out properties with defaults: so the branches exclude each other."""
    if isinstance(schema, list):
        return [_tagged(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    node = {key: _tagged(value) for key, value in schema.items()}
    tag, branches = node.get("discriminator"), node.get("oneOf")
    if isinstance(branches, list) and isinstance(tag, dict) and "propertyName" in tag:
        required = {"required": [tag["propertyName"]]}
        node["oneOf"] = [{"allOf": [branch, required]} for branch in branches]
    return node


def _mask_of(ids: Collection[int], least: int = 0) -> Words:
    bits = np.zeros(32 * max(least, max(ids) // 32 + 1), np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ImportError(
            "grammars need the package llguidance, which is not installed; install it with: "
            "pip install polyspec_ext[grammar], or pip install llguidance"
        ) from error
    return llguidance


def _tokenizer(tokenizer: Any) -> Any:
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        actual = arguments.shown(tokenizer)
        raise TypeError(f"tokenizer: expected a fast tokenizer of transformers, given {actual}")
    if tokenizer.eos_token_id is None:
        raise ValueError("tokenizer: expected one with an EOS token, given one without")
    forms, size = _TOKENIZERS.setdefault(tokenizer, {}), len(tokenizer)
    if size not in forms:
        from llguidance.hf import from_tokenizer

        forms[size] = from_tokenizer(tokenizer)
    return forms[size]


def _message(matcher: Any) -> str:
    # The parser's state follows the message.
    return str(matcher.get_error()).split("\n<state>")[0].strip()


def stacked(masks: Sequence[Words | None], vocab_size: int) -> Words:
    """Return masks (`GrammarMatcher.masks`) as rows of `vocab_size` ids, ``[k, ceil(V / 32)]``."""
    rows = np.full((len(masks), -(-vocab_size // 32)), -1, np.int32)
    last = np.int32(-1 if vocab_size % 32 == 0 else (1 << vocab_size % 32) - 1)
    for row, words in zip(rows, masks, strict=True):
        if words is None:
            continue
        known = min(len(words), len(row))
        row[:known], row[known:] = words[:known], 0
        row[-1] &= last
    return rows


def masked(logits: torch.Tensor, allowed: Words) -> torch.Tensor:
    """Return logits ``[.., V]`` with -inf at the ids that the masks of `stacked` forbid."""
    bits = np.unpackbits(allowed.view(np.uint8), axis=-1, count=logits.shape[-1], bitorder="little")
    return logits.masked_fill(torch.from_numpy(bits == 0).to(logits.device), -torch.inf)
