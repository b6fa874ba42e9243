"""OpenAI's API with vLLM's additional fields: read and check request bodies, and write the JSON
objects of answers."""

from __future__ import annotations

import difflib
import functools
import json
import math
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import arguments
from ..chat import StopStrings, chat_text, has_template, texts_after
from ..errors import RequestError
from ..grammar import Grammar
from ..rules import LogitsRules
from ..sampling import row_seeds
from ..stats import Stats, merge
from .server import Event

MOST_ALTERNATIVES = 20
_LONGEST = 600  # characters of an error message
MOST_TEXTS = 64  # stop strings, or bad words
_LEAST = -9999.0  # instead of -inf, which JSON cannot express
_NOTHING: dict[str, Any] = {}
_UNBOUNDED = 4096  # new tokens of a chat answer without a limit by request or context
_EVERY = object()  # in `_NEUTRAL`: every value
# Fields of OpenAI's API and other servers that are not read, each with the values that ask for
# nothing. Another value, and any other field, is refused.
_NEUTRAL: dict[str, Sequence[Any]] = {
    "user": [_EVERY], "safety_identifier": [_EVERY], "prompt_cache_key": [_EVERY],
    "metadata": [_EVERY], "service_tier": ["auto", "default"], "store": [False],
    "modalities": [["text"]], "tools": [[]], "tool_choice": ["none", "auto"],
    "parallel_tool_calls": [True], "functions": [[]], "function_call": ["none", "auto"],
    "best_of": [1], "suffix": [""], "verbosity": ["medium"], "echo": [False],
    "add_generation_prompt": [True], "documents": [[]],
    "cache_prompt": [True], "return_tokens_as_token_ids": [False], "return_token_ids": [False],
    "skip_special_tokens": [True], "spaces_between_special_tokens": [True],
    "include_stop_str_in_output": [False], "use_beam_search": [False], "num_beams": [1],
    "length_penalty": [1], "typical_p": [1], "mirostat": [0],
}  # fmt: skip
_NEUTRAL_OF_STREAMS = {"include_obfuscation": [False], "continuous_usage_stats": [False]}
# Options of `Server.add` with other names of their fields.
_FIELDS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "eos_token_id": "stop_token_ids",
}
RULES = (
    "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words",
)  # fmt: skip


class Refusal(Exception):
    """The HTTP error that answers a request, with OpenAI's error code and the seconds to the next
    attempt; `param`: name of the field, or else the field that the message begins with."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        message = message.encode("utf-8", "backslashreplace").decode()  # half of a character
        super().__init__(message if len(message) <= _LONGEST else f"{message[:_LONGEST]}...")
        field_name = re.match(r"([^\s:.\[]+)(\[\d+\])?(\.\S+)?: ", message)
        self.status, self.code, self.retry_after = status, code, retry_after
        self.param = field_name[1] if param is None and field_name else param

    def body(self) -> dict[str, Any]:
        """Return the error as OpenAI's API writes it."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, kind)
        shown = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": shown}


def wrong(error: TypeError | ValueError) -> Refusal:
    """Return the refusal for an error of `Server.add`, with the field's name for the option's."""
    name, colon, rest = str(error).partition(": ")
    return Refusal(400, f"{_FIELDS.get(name, name)}{colon}{rest}")


@dataclass(frozen=True)
class Model:
    """The served model.

    Attributes:
        ends: ids that end a chat answer (`chat.ends_of_turn`).
        eos: ids that end a completion.
        text_options: `Chain.text_options`.
        context: maximum tokens of prompt and answer; None: no limit.
        prompt_limit: maximum tokens of a prompt; None: no limit.
        choices: maximum choices of a request, prompts times `n`.
    """

    name: str
    tokenizer: Any
    ends: Sequence[int]
    eos: Sequence[int]
    text_options: Callable[..., Any]
    context: int | None = None
    prompt_limit: int | None = None
    choices: int = 128

    @functools.cached_property
    def longest(self) -> int:
        """Maximum characters of a token."""
        return max(map(len, self.tokenizer.get_vocab()))

    def encoded(self, name: str, text: str, **options: Any) -> list[int]:
        """Return the tokens of a text of a request.

        Raises:
            Refusal: the text is too long for the context, which needs no tokens.
        """
        limit = self.limit
        if limit is not None and len(text) > limit * self.longest:
            raise _too_long(name, limit, f"a text of {len(text)} characters")
        return list(self.tokenizer(text, **options)["input_ids"])

    @property
    def limit(self) -> int | None:
        """Maximum tokens of a prompt; None: no limit."""
        limits = [limit for limit in (self.context, self.prompt_limit) if limit is not None]
        return min(limits, default=None)


def _too_long(name: str, limit: int, given: str) -> Refusal:
    text = f"{name}: expected at most {limit} tokens, given {given}"
    return Refusal(400, text, code="context_length_exceeded")


@dataclass
class Wanted:
    """A parsed request of the chat or the completions endpoint.

    Attributes:
        prompts: token ids of each prompt.
        options: keyword arguments of `Server.add` for each choice, prompt by prompt; `Server.add`
            checks their values.
        logprobs: number of alternatives for each token; None: no log-probabilities.
        grammar: name of the field with the grammar.
        echoes: for each prompt the text to repeat before its answers.
        levels: add the level of each token to the answer, for the page.
    """

    chat: bool
    prompts: list[list[int]]
    options: list[dict[str, Any]] = field(default_factory=list)
    stop: list[str] = field(default_factory=list)
    logprobs: int | None = None
    grammar: str = "grammar"
    echoes: list[str] = field(default_factory=list)
    stream: bool = False
    include_usage: bool = False
    levels: bool = False

    def of(self, choice: int) -> int:
        """Return the number of the prompt that a choice answers."""
        return choice * len(self.prompts) // len(self.options)


def parse(body: bytes) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        Refusal: the body is no JSON object in UTF-8.
    """
    expected = "body: expected a JSON object in UTF-8"
    try:
        parsed = json.loads(body.decode("utf-8"), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise Refusal(400, f"{expected}, given other bytes at {error.start}") from None
    except RecursionError:
        raise Refusal(400, f"{expected}, given one nested too deeply") from None
    except ValueError as error:
        raise Refusal(400, f"{expected}, given something else: {error}") from None
    if not isinstance(parsed, dict):
        raise Refusal(400, f"{expected}, given {arguments.shown(parsed)}")
    return parsed


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


class _Body:
    """Unread fields of a body, or of the object in its field `name`. A null field counts as
    absent."""

    def __init__(self, body: Mapping[str, Any], name: str = "") -> None:
        self._left = {name: value for name, value in body.items() if value is not None}
        self._names: list[str] = []
        self._prefix = f"{name}." if name else ""

    def take(
        self, name: str, read: Callable[[str, Any], Any] | None = None, default: Any = None
    ) -> Any:
        """Return a field as `read` returns it, by its whole name and value."""
        self._names.append(name)
        if name not in self._left:
            return default
        value = self._left.pop(name)
        return value if read is None else read(self._prefix + name, value)

    def end(self, neutral: Mapping[str, Sequence[Any]] = _NOTHING) -> None:
        """Refuse unread fields, except for the values of `neutral`, which ask for nothing."""
        for name, value in self._left.items():
            if any(other is _EVERY or _same(value, other) for other in neutral.get(name, ())):
                continue
            expected = " or ".join([*map(json.dumps, neutral.get(name, ())), "no such field"])
            near = difflib.get_close_matches(name, self._names, 1, 0.8)
            hint = f"; did you mean {near[0]}?" if near else ""
            shown = arguments.shown(value)
            raise Refusal(400, f"{self._prefix}{name}: expected {expected}, given {shown}{hint}")


def _same(value: Any, other: Any) -> bool:
    # In Python, True equals 1.
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a string, given {arguments.shown(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{name}: expected text, given half of a character") from None
    return value


def _texts(name: str, value: Any) -> list[str]:
    texts = [_text(name, text) for text in arguments.strings(name, value)]
    if len(texts) > MOST_TEXTS or "" in texts:
        shown = "''" if "" in texts else len(texts)
        raise ValueError(
            f"{name}: expected at most {MOST_TEXTS} strings, none empty, given {shown}"
        )
    return texts


def _kind(expected: str, *kinds: type) -> Callable[[str, Any], Any]:
    """Return a reader that requires one of `kinds`; a bool is no number."""

    def read(name: str, value: Any) -> Any:
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise TypeError(f"{name}: expected {expected}, given {arguments.shown(value)}")
        return value

    return read


_object, _number = _kind("an object", dict), _kind("a number", int, float)


def _choice(name: str, value: Any) -> str:
    if value not in ("auto", "none"):
        shown = arguments.shown(value)
        raise ValueError(
            f"{name}: expected auto or none, since calls are not forced, given {shown}"
        )
    return str(value)


def _count(low: int, high: int) -> Callable[[str, Any], int]:
    def read(name: str, value: Any) -> int:
        return arguments.integer(name, arguments.integers(name, [value])[0], high, low)

    return read


def read(body: Mapping[str, Any], model: Model, chat: bool) -> Wanted:
    """Read a request of the chat or the completions endpoint.

    Raises:
        Refusal: a field is invalid or unknown, or the model's context is too short.
    """
    fields = _Body(body)
    try:
        name = fields.take("model", _text, model.name)
        if name != model.name:
            raise Refusal(
                404, f"model: expected {model.name!r}, given {name!r}", code="model_not_found"
            )
        wanted = (_read_chat if chat else _read_text)(fields, model)
        _read_options(fields, model, wanted)
        fields.end(_NEUTRAL)
    except RecursionError:
        raise Refusal(400, "body: expected JSON that is nested less deeply") from None
    except (TypeError, ValueError) as error:
        raise wrong(error) from error
    return wanted


def _read_chat(fields: _Body, model: Model) -> Wanted:
    messages = fields.take("messages")
    if not has_template(model.tokenizer):
        raise ValueError("messages: expected a model with a chat template; /v1/completions needs "
                         "none")  # fmt: skip
    if not isinstance(messages, list) or not messages:
        raise TypeError(
            f"messages: expected a list of at least one, given {arguments.shown(messages)}"
        )
    conversation = [_message(number, message) for number, message in enumerate(messages)]
    variables = dict(fields.take("chat_template_kwargs", _object, _NOTHING))
    tools = fields.take("tools", lambda name, tools: [
        _object(name, tool) for tool in arguments.listed(name, tools, "objects")
    ])  # fmt: skip
    if fields.take("tool_choice", _choice, "auto") != "none" and tools:
        variables["tools"] = tools
    for name in ("enable_thinking", "add_generation_prompt"):
        if (value := fields.take(name, arguments.flag)) is not None:
            variables[name] = value
    if variables.get("add_generation_prompt") is True:  # as without it
        del variables["add_generation_prompt"]
    begun = ""
    if fields.take("continue_final_message", arguments.flag, False):
        begun = _begun(conversation)
        variables.pop("add_generation_prompt", None)  # the answer has begun
    try:
        text = chat_text(model.tokenizer, conversation, variables=variables) + begun
    except ValueError as error:  # of the template
        raise Refusal(422, str(error)) from error
    wanted = Wanted(True, [model.encoded("messages", text, add_special_tokens=False)])
    alternatives = fields.take("top_logprobs", _count(0, MOST_ALTERNATIVES), 0)
    if fields.take("logprobs", arguments.flag, False):
        wanted.logprobs = alternatives
    elif alternatives:
        raise ValueError(f"top_logprobs: expected logprobs beside it, given {alternatives} alone")
    return wanted


def _begun(conversation: list[dict[str, Any]]) -> str:
    """Pop the last message, an answer to be continued, and return its text."""
    last = conversation[-1]
    if last["role"] != "assistant" or len(conversation) < 2 or last.get("tool_calls"):
        raise ValueError(
            "continue_final_message: expected a last message of the role 'assistant' with text, "
            "after another message"
        )
    return str(conversation.pop()["content"])


def _message(number: int, message: Any) -> dict[str, Any]:
    """Return a chat message, its text parts joined."""
    name = f"messages[{number}]"
    fields = {key: value for key, value in _object(name, message).items() if value is not None}
    content = fields.get("content")
    if isinstance(content, list):
        content = "".join(_part(name, part) for part in content)
    if content is not None or not fields.get("tool_calls"):
        fields["content"] = _text(name, content)
    return {**fields, "role": _text(f"{name}: role", fields.get("role"))}


def _part(name: str, part: Any) -> str:
    fields = _Body(_object(name, part), name)
    if (kind := fields.take("type")) != "text":
        raise ValueError(f"{name}: expected parts of type 'text', given {arguments.shown(kind)}")
    text = fields.take("text")
    fields.end()
    return _text(name, text)


def _read_text(fields: _Body, model: Model) -> Wanted:
    prompt = fields.take("prompt")
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    entries = prompt if several else [prompt]
    if len(entries) > model.choices:
        raise ValueError(f"prompt: expected at most {model.choices}, given {len(entries)}")
    prompts = [_prompt(entry, model) for entry in entries]
    wanted = Wanted(False, prompts)
    wanted.logprobs = fields.take("logprobs", _count(0, MOST_ALTERNATIVES))
    if fields.take("echo", arguments.flag, False):
        if wanted.logprobs is not None:
            raise ValueError("echo: expected no logprobs beside it, which prompts have not")
        wanted.echoes = [
            entry
            if isinstance(entry, str)
            else str(model.tokenizer.decode(ids, skip_special_tokens=True))
            for entry, ids in zip(entries, prompts, strict=True)
        ]
    return wanted


def _prompt(prompt: Any, model: Model) -> list[int]:
    if isinstance(prompt, str):
        ids = model.encoded("prompt", _text("prompt", prompt))
    elif isinstance(prompt, list):
        if model.limit is not None and len(prompt) > model.limit:
            raise _too_long("prompt", model.limit, str(len(prompt)))
        ids = arguments.token_ids("prompt", prompt, len(model.tokenizer))
    else:
        raise TypeError(
            f"prompt: expected text or token ids, or several in a list, given "
            f"{arguments.shown(prompt)}"
        )
    if not ids:
        raise ValueError("prompt: expected at least 1 token, given none")
    return ids


# Options of both endpoints, with their readers and defaults.
OPTIONS: dict[str, tuple[Callable[[str, Any], Any], Any]] = {
    "stream": (arguments.flag, False),
    "polyspec": (arguments.flag, False),
    "stop": (_texts, []),
    "temperature": (_number, None),
    "do_sample": (arguments.flag, None),
    "top_p": (_number, None),
    "min_p": (_number, None),
    "top_k": (_count(-1, 2**31 - 1), None),
    "priority": (_count(-(2**31), 2**31 - 1), 0),
    "speculation": (_kind("a bool or the most tokens of a window", bool, int), True),
    "ignore_eos": (arguments.flag, False),
    "stop_token_ids": (arguments.row_integers, []),
    "seed": (_count(-(2**63), arguments.SEED_MAX), None),
}


def _read_options(fields: _Body, model: Model, wanted: Wanted) -> None:
    """Read the options of both endpoints."""
    extras = _Body(fields.take("stream_options", _object, _NOTHING), "stream_options")
    wanted.include_usage = extras.take("include_usage", arguments.flag, False)
    extras.end(_NEUTRAL_OF_STREAMS)
    given = {name: fields.take(name, read, default) for name, (read, default) in OPTIONS.items()}
    wanted.stream, wanted.levels, wanted.stop = given["stream"], given["polyspec"], given["stop"]
    StopStrings(model.tokenizer, wanted.stop)  # checks them
    n = fields.take("n", _count(1, model.choices), 1)
    count = n * len(wanted.prompts)
    if count > model.choices:
        raise ValueError(f"n: expected at most {model.choices} choices in all, given {count}")
    hot, samples = given["temperature"], given["do_sample"]
    if None not in (hot, samples) and samples != (hot != 0):
        raise ValueError(f"do_sample: expected {hot != 0} beside temperature {hot}: remove one")
    ends = [] if given["ignore_eos"] else [*(model.ends if wanted.chat else model.eos)]
    top_k = given["top_k"]
    options = {
        "priority": given["priority"],
        "speculation": given["speculation"],
        # The log-probability of a greedy token comes with its alternatives.
        "logprobs": 0 if wanted.logprobs is None else max(1, wanted.logprobs),
        "eos_token_id": [*ends, *given["stop_token_ids"]],
        **model.text_options(
            temperature=0.0 if samples is False else hot,
            top_k=None if top_k is None else max(0, top_k),
            top_p=given["top_p"],
            min_p=given["min_p"],
            rules=_rules(fields, model, wanted),
            default_temperature=1.0,
        ),
    }
    seed = given["seed"]
    seeds = [None] * count if seed is None else row_seeds(seed % (arguments.SEED_MAX + 1), count)
    limits = _limits(fields, model, wanted)
    wanted.options = [
        {**options, "seed": seeds[choice], "max_new_tokens": limits[choice // n]}
        for choice in range(count)
    ]


def _limits(fields: _Body, model: Model, wanted: Wanted) -> list[int]:
    """Return the maximum number of new tokens for each prompt."""
    name = "max_tokens"
    limit = fields.take(name, _count(1, 2**31 - 1))
    if wanted.chat:
        newer = fields.take("max_completion_tokens", _count(1, 2**31 - 1))
        if None not in (limit, newer) and limit != newer:
            raise ValueError(f"max_completion_tokens: expected no other max_tokens, given {limit}")
        name, limit = (name, limit) if newer is None else ("max_completion_tokens", newer)
    usual, limits = _UNBOUNDED if wanted.chat else 16, []
    for ids in wanted.prompts:
        most = model.prompt_limit
        if most is not None and len(ids) > most:
            raise _too_long("prompt", most, str(len(ids)))
        room = None if model.context is None else model.context - len(ids)
        new = limit
        if new is None:
            new = usual if room is None else max(1, room if wanted.chat else min(usual, room))
        if room is not None and new > room:
            raise Refusal(
                400,
                f"{name}: expected prompt and answer of at most {model.context} tokens, given a "
                f"prompt of {len(ids)} and an answer of up to {new}",
                code="context_length_exceeded",
            )
        limits.append(new)
    return limits


def _rules(fields: _Body, model: Model, wanted: Wanted) -> LogitsRules:
    rules = {name: fields.take(name) for name in RULES}
    rules["min_new_tokens"] = fields.take("min_tokens")
    rules["grammar"] = _grammar_of(fields, model, wanted)
    if isinstance(biases := rules["logit_bias"], dict):
        for name in biases:
            if not re.fullmatch("[0-9]{1,18}", name):
                shown = arguments.shown(name)
                raise ValueError(f"logit_bias: expected token ids as names, given {shown}")
        rules["logit_bias"] = {int(name): bias for name, bias in biases.items()}
    if rules["bad_words"] is not None:
        # A word has one tokenization at the start of a text and another after a space.
        rules["bad_words"] = [
            model.encoded("bad_words", written, add_special_tokens=False)
            for text in _texts("bad_words", rules["bad_words"])
            for written in dict.fromkeys((text.lstrip(), " " + text.lstrip()))
        ]
    return LogitsRules(**{name: value for name, value in rules.items() if value is not None})


# Fields of "structured_outputs"; "guided_" + name is a field of the body as well.
GRAMMARS = ("json", "regex", "choice", "grammar")


def _grammar_of(fields: _Body, model: Model, wanted: Wanted) -> Grammar | None:
    """Return the grammar of a request; None: no grammar."""
    grammars = [_form(fields)]
    structured = fields.take("structured_outputs", _object)
    inner = _Body(structured or _NOTHING, "structured_outputs")
    for name in GRAMMARS:
        grammars.append((f"structured_outputs.{name}", name, inner.take(name)))
        grammars.append((f"guided_{name}", name, fields.take(f"guided_{name}")))
    if inner.take("json_object", arguments.flag, False):
        grammars.append(("structured_outputs.json_object", "json", {"type": "object"}))
    inner.end({"disable_any_whitespace": [False]})
    grammars = [row for row in grammars if row[2] is not None]
    if structured is not None and not any(name.startswith("structured") for name, _, _ in grammars):
        raise ValueError(f"structured_outputs: expected one of {', '.join(GRAMMARS)}, given none")
    if len(grammars) > 1:
        raise ValueError(f"{grammars[1][0]}: expected one grammar, given {grammars[0][0]} as well")
    if not grammars:
        return None
    wanted.grammar = grammars[0][0]
    return _grammar(*grammars[0], model.tokenizer)


def _form(fields: _Body) -> tuple[str, str, Any]:
    """Return the name, the kind and the source of the grammar of "response_format"; the source is
    None for plain text."""
    name = "response_format"
    if (value := fields.take(name, _object)) is None:
        return name, "json", None
    form = _Body(value, name)
    kind = form.take("type")
    source: dict[str, Any] | None = None
    if kind == "json_schema":
        inner = _Body(form.take(kind, _object, _NOTHING), f"{name}.{kind}")
        for about in ("name", "description"):
            inner.take(about, _text, "")
        inner.take("strict", arguments.flag, True)  # the grammar holds either way
        source = inner.take("schema", _object)
        inner.end()
        if source is None:
            raise ValueError(f"{name}.{kind}: expected an object with the field schema, given none")
    elif kind == "json_object":
        source = {"type": "object"}
    elif kind != "text":
        raise ValueError(
            f"{name}: expected the type text, json_object or json_schema, given "
            f"{arguments.shown(kind)}"
        )
    form.end()
    return name, "json", source


def _grammar(name: str, kind: str, source: Any, tokenizer: Any) -> Grammar:
    if kind == "choice":
        texts = _texts(name, source)
        if not texts:
            raise ValueError(f"{name}: expected at least 1 string, given none")
        kind, source = "regex", "|".join(map(re.escape, texts))
    if kind != "json":
        source = _text(name, source)
    elif isinstance(source, str):
        try:
            source = parse(_text(name, source).encode())
        except Refusal as error:
            raise ValueError(f"{name}: {str(error).removeprefix('body: ')}") from None
    else:
        source = _object(name, source)
    try:
        if kind == "json":
            return Grammar.json_schema(source, tokenizer)
        return (Grammar.regex if kind == "regex" else Grammar.lark)(source, tokenizer)
    except ImportError as error:  # of the optional package
        raise Refusal(400, f"{name}: {error}") from error
    except (TypeError, ValueError) as error:
        raise Refusal(422, f"{name}: {error}") from error


# ---- answers -------------------------------------------------------------------------------------


@dataclass
class Token:
    """A token of an answer: its new text, and for log-probabilities its text alone, and the words
    of the likeliest tokens."""

    text: str
    level: int
    corrected: bool
    word: str = ""
    logprob: float = math.nan
    alternatives: list[tuple[str, float]] = field(default_factory=list)


@dataclass
class Piece:
    """New text of a choice; `finish_reason`, `stop_reason` as in vLLM; `read`: of a prompt that is
    being read, the tokens so far."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    read: int | None = None


class Choice:
    """Choice `number` of an answer: its tokens as text, up to a stop string.

    Attributes:
        ended: whether the text is complete.
        count: number of tokens, up to the end of the stop string.
        stats: statistics of the request, after its end.
    """

    def __init__(self, wanted: Wanted, model: Model, number: int = 0) -> None:
        self._text = StopStrings(model.tokenizer, wanted.stop)
        self._ends = {*model.ends, *model.eos}
        self._tokenizer, self._logprobs = model.tokenizer, wanted.logprobs
        self._before = list(wanted.prompts[wanted.of(number)])
        self._fields = {**_FIELDS, "grammar": wanted.grammar}
        self.ended, self.count = False, 0
        self.stats: Stats | None = None
        self._last: int | None = None

    def add(self, event: Event) -> Piece:
        """Return the new text of an event.

        Raises:
            Refusal: the request has failed.
        """
        self.stats = event.stats or self.stats
        piece = Piece()
        if self.ended:
            return piece
        if event.finish_reason in ("error", "abort"):
            raise self._refusal(event)
        for number, token in enumerate(event.tokens):
            new = Token(self._text.add(token), event.levels[number], event.corrected[number])
            piece.tokens.append(new)
            if self._logprobs is not None:
                new.logprob = event.logprobs[number]
                likely = event.alternatives[number][: self._logprobs]
                ids = [token, *(other for other, _ in likely)]
                new.word, *words = texts_after(self._tokenizer, self._before, ids)
                values = [value for _, value in likely]
                new.alternatives = list(zip(words, values, strict=True))
            self._before.append(token)
            self._last = token
            if self._text.stopped is not None:
                break
        added, self.count = self.count + len(piece.tokens), self._text.num_tokens
        # Later tokens decided the text of the stop string.
        del piece.tokens[max(0, len(piece.tokens) - added + self.count) :]
        if event.finish_reason is not None and piece.tokens and self._text.stopped is None:
            piece.tokens[-1].text += self._text.rest()
        piece.text = "".join(token.text for token in piece.tokens)
        if event.finish_reason is not None and not piece.tokens:
            piece.text = self._text.rest()
        if self._text.stopped is not None:
            piece.finish_reason, piece.stop_reason = "stop", self._text.stopped
        elif event.finish_reason is not None:
            piece.finish_reason = event.finish_reason
            if event.finish_reason == "stop" and self._last not in self._ends:
                piece.stop_reason = self._last
        self.ended = piece.finish_reason is not None
        return piece

    def _refusal(self, event: Event) -> Refusal:
        error = event.error
        if event.finish_reason == "abort":
            return Refusal(503, "the request has failed: aborted")
        if not isinstance(error, RequestError):
            # A ValueError is the client's: the same request would fail again.
            status = 422 if isinstance(error, ValueError) else 500
            return Refusal(status, f"the request has failed: {error}")
        if not error.rules:  # a fault of a model
            return Refusal(500, f"the request has failed: {error}")
        names = [self._fields.get(name, name) for name in error.rules]
        reasons = [f" ({why})" if why else "" for why in error.rules.values()]
        shown = " and ".join(map("".join, zip(names, reasons, strict=True)))
        text = f"{shown}: no token can follow the text: change {' or '.join(names)}"
        return Refusal(422, text, names[0])


class Answers:
    """JSON objects of an answer: whole, or in chunks."""

    def __init__(self, wanted: Wanted, model: Model) -> None:
        self._wanted, self._model = wanted, model
        kind = "chat.completion" if wanted.chat else "text_completion"
        self._kind = f"{kind}.chunk" if wanted.chat and wanted.stream else kind
        self._id = f"{'chatcmpl' if wanted.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._offsets = [0] * len(wanted.options)

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": self._kind,
            "created": self._created,
            "model": self._model.name,
            "choices": choices,
        }

    def whole(self, pieces: Sequence[Piece], choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the answer with all choices."""
        shown = [self._choice(index, piece) for index, piece in enumerate(pieces)]
        usage = self._usage(choices)
        return {**self._object(shown), "usage": usage, **self._measured(choices)}

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the chunk before the text of a choice, if any."""
        if self._wanted.chat:
            shown = {"index": index, "delta": {"role": "assistant", "content": ""}}
            return self._chunk({**shown, "logprobs": None, "finish_reason": None})
        if not self._wanted.echoes:
            return None
        return self._chunk(self._choice(index, Piece()))

    def reading(self, index: int, read: int) -> dict[str, Any]:
        """Return the chunk that tells how many tokens of the prompt have been read."""
        tokens = len(self._wanted.prompts[self._wanted.of(index)])
        return {**self._object([]), "prompt": {"read": read, "tokens": tokens}}

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return the chunk with the new text of a choice."""
        return self._chunk(self._choice(index, piece))

    def last(self, chunk: dict[str, Any], choices: Sequence[Choice]) -> list[dict[str, Any]]:
        """Return the last chunk of the last choice with the usage and statistics of the answer: in
        a separate chunk if the client asked for the usage, else in the same one, because clients
        expect a choice in every chunk."""
        measured = self._measured(choices)
        if not self._wanted.include_usage:
            return [{**chunk, **measured}]
        return [chunk, {**self._object([]), "usage": self._usage(choices), **measured}]

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        usage = {"usage": None} if self._wanted.include_usage else {}
        return {**self._object([choice]), **usage}

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        wanted = self._wanted
        shown: dict[str, Any] = {"index": index}
        if wanted.chat:
            message = {"content": piece.text}
            if wanted.stream:
                shown["delta"] = message
            else:
                shown["message"] = {"role": "assistant", **message, "refusal": None}
        else:
            echo = wanted.echoes and self._offsets[index] == 0
            front = wanted.echoes[wanted.of(index)] if echo else ""
            shown["text"] = front + piece.text
            self._offsets[index] += len(front)
        shown["logprobs"] = None if wanted.logprobs is None else self._logprobs(index, piece.tokens)
        shown["finish_reason"] = piece.finish_reason
        shown["stop_reason"] = piece.stop_reason
        if wanted.levels:
            shown["polyspec"] = {
                "tokens": [token.text for token in piece.tokens],
                "levels": [token.level for token in piece.tokens],
                "corrected": [token.corrected for token in piece.tokens],
            }
        return shown

    def _logprobs(self, index: int, tokens: Iterable[Token]) -> dict[str, Any]:
        if self._wanted.chat:
            content = []
            for token in tokens:
                others = [_entry(word, value) for word, value in token.alternatives]
                content.append({**_entry(token.word, token.logprob), "top_logprobs": others})
            return {"content": content, "refusal": None}
        logprobs: dict[str, list[Any]] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [],
        }  # fmt: skip
        for token in tokens:
            logprobs["tokens"].append(token.word)
            logprobs["token_logprobs"].append(max(token.logprob, _LEAST))
            best = {token.word: max(token.logprob, _LEAST)}
            for word, value in token.alternatives:  # of ids with the same text the likeliest
                best.setdefault(word, max(value, _LEAST))
            likely = sorted(best.items(), key=lambda entry: entry[1], reverse=True)
            logprobs["top_logprobs"].append(dict(likely))
            logprobs["text_offset"].append(self._offsets[index])
            self._offsets[index] += len(token.text)
        return logprobs

    def _usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        read = sum(map(len, self._wanted.prompts))
        new = sum(choice.count for choice in choices)
        # A prompt of several choices counts once, as read by the choice that read most of it.
        cached = [0 if c.stats is None else c.stats.num_cached_tokens for c in choices]
        least: dict[int, int] = {}
        for index, count in enumerate(cached):
            prompt = self._wanted.of(index)
            least[prompt] = min(count, least.get(prompt, count))
        return {
            "prompt_tokens": read,
            "completion_tokens": new,
            "total_tokens": read + new,
            "prompt_tokens_details": {"cached_tokens": sum(least.values())},
        }

    def _measured(self, choices: Sequence[Choice]) -> dict[str, Any]:
        requests = [choice.stats for choice in choices if choice.stats is not None]
        if not requests:
            return {}
        levels = {"polyspec": [s.to_dict() for s in requests]} if self._wanted.levels else {}
        return {"metrics": {"speculative_decoding": speculative_decoding(requests)}, **levels}


def _entry(word: str, logprob: float) -> dict[str, Any]:
    # The bytes of a partial character are unknown.
    encoded = None if "\ufffd" in word else list(word.encode())
    return {"token": word, "logprob": max(logprob, _LEAST), "bytes": encoded}


def speculative_decoding(requests: Sequence[Stats]) -> dict[str, Any]:
    """Return the target's acceptance in the requests of an answer, in vLLM's format. Means over
    no drafts are None."""
    target = merge(requests).levels[0]
    names = ("mean_acceptance_length", "draft_acceptance_rate")
    means = {name: getattr(target, name) for name in names}
    return {
        **{name: None if math.isnan(mean) else mean for name, mean in means.items()},
        "acceptance_histogram": target.acceptance_histogram,
        "num_spec_steps": target.num_drafts,
        "num_accepted_draft_tokens": target.num_accepted_tokens,
        "num_draft_tokens": target.num_draft_tokens,
        "num_spec_tokens": max(0, len(target.acceptance_histogram) - 1),
    }
