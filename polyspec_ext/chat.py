"""Prompts of conversations by the tokenizer's chat template, text of tokens, and answers."""

from __future__ import annotations

import bisect
import contextlib
import functools
import inspect
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from . import arguments, rooms
from .inputs import Parameters

if TYPE_CHECKING:
    from .outputs import Stream
    from .stats import Stats

_IN_FRONT = ("system", "developer")  # roles of messages that are never left out
_MARK = "polyspec{:08}"  # instead of the content of a message
_LINKS = ("tool_call_id",)  # fields of messages that order expresses as well
# Fields of messages that templates leave out of earlier turns.
_REASONING = ("reasoning_content", "reasoning", "thinking")
# Parameters of `apply_chat_template` that a template reads.
_VARIABLES = ("tools", "documents", "add_generation_prompt")
_WINDOW = 8  # tokens decoded again with each new token, since they may change its text
_BYTE = re.compile("<0x[0-9A-F]{2}>")  # a byte token of a vocabulary with byte fallback
# Ends of texts that `clean_up_tokenization` of transformers may still join to the next token.
_UNTIDIED = re.compile(r"(?: n? ?'?|'| '[rv])$")


class ChatPrompt(NamedTuple):
    """A conversation in the template's form, up to the beginning of the answer, and its tokens."""

    text: str
    input_ids: list[int]


def has_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def chat_prompt(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], system: str | None = None
) -> ChatPrompt:
    """Return the prompt for the next answer of a conversation, as `chat_text`."""
    return _tokenized(tokenizer, chat_text(tokenizer, messages, system))


def chat_text(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    system: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Return a conversation in the form of the tokenizer's chat template, up to the beginning of
    the next answer. It has the content of every message.

    Args:
        tokenizer: of transformers. If it has several templates, its "default" is used, or
            "tool_use" with tools.
        messages: the oldest first, each a mapping with "role" and "content", strings, and other
            fields that the template reads, for example "tool_calls", with which "content" may be
            None. The role "developer" counts as "system" where the template does not know it.
        variables: variables of the template, for example "tools" and "enable_thinking".

    Raises:
        TypeError: `messages` has another form; the template does not read a field of a message or
            a variable.
        ValueError: the tokenizer has no template; the template refuses the conversation, as some
            templates refuse a system prompt, or leaves out the content of a message.
    """
    return _read_by(tokenizer, messages, system, variables or {})[1]


def _special_words(tokenizer: Any) -> dict[str, int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    ids = [*getattr(tokenizer, "all_special_ids", ()), *(n for n in added if added[n].special)]
    return dict(zip(tokenizer.convert_ids_to_tokens(ids), ids, strict=True)) if ids else {}


_Conversation = list[dict[str, Any]]


def _read_by(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    system: str | None,
    variables: Mapping[str, Any],
) -> tuple[_Conversation, str, Callable[[_Conversation], str]]:
    """Return a conversation as the template reads it, its text, and a function that returns the
    text of other conversations."""
    conversation = _conversation(messages)
    if system is not None:
        conversation.insert(0, {"role": "system", "content": system})
    if not has_template(tokenizer):
        raise ValueError("tokenizer: expected one with a chat template, given one without")
    template = tokenizer.get_chat_template(tools=variables.get("tools"))
    parameters = inspect.signature(tokenizer.apply_chat_template).parameters
    for name in variables:
        known = name not in parameters or name in _VARIABLES
        if not known or not re.search(rf"\b{re.escape(name)}\b", template):
            raise TypeError(f"{name}: no variable that the chat template reads: remove it")
    if "developer" not in template:
        for message in conversation:
            if message["role"] == "developer":
                message["role"] = "system"
    name = "messages" if system is None else "system"
    text_of = partial(_text_of, tokenizer, name, {"add_generation_prompt": True, **variables})
    conversation, text = _with_arguments(conversation, text_of)
    _require_contents(conversation, system is not None, text_of)
    _require_fields(conversation, text, template, system is not None, text_of)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{name}: expected text, given half of a character") from None
    return conversation, text, text_of


def _text_of(
    tokenizer: Any, name: str, variables: Mapping[str, Any], conversation: _Conversation
) -> str:
    from jinja2 import TemplateError

    try:
        text: str = tokenizer.apply_chat_template(conversation, tokenize=False, **variables)
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise ValueError(
            f"{name}: expected a conversation that the chat template takes, given one that it "
            f"refuses: {error}"
        ) from error
    return text


def _tokenized(tokenizer: Any, text: str) -> ChatPrompt:
    # The template writes the special tokens itself.
    return ChatPrompt(text, tokenizer(text, add_special_tokens=False)["input_ids"])


def _with_arguments(
    conversation: _Conversation, text_of: Callable[[_Conversation], str]
) -> tuple[_Conversation, str]:
    """Return a conversation and its text. Arguments of calls, which are JSON text in OpenAI's
    format, are objects for a template that would write the text as a JSON string, or refuses it."""
    texts: list[str] = []

    def parsed(value: Any, name: str = "") -> Any:
        if isinstance(value, list):
            return [parsed(item) for item in value]
        if isinstance(value, dict):
            return {key: parsed(item, key) for key, item in value.items()}
        if name == "arguments" and isinstance(value, str) and value.lstrip().startswith("{"):
            texts.append(value)
            return json.loads(value)
        return value

    try:
        other = [
            {key: parsed(value) if key == "tool_calls" else value for key, value in message.items()}
            for message in conversation
        ]
    except ValueError:  # no JSON
        texts.clear()
    if not texts:
        return conversation, text_of(conversation)
    with contextlib.suppress(ValueError):
        text = text_of(conversation)
        if not any(json.dumps(value, ensure_ascii=False) in text for value in texts):
            return conversation, text
    return other, text_of(other)


def _require_contents(
    conversation: _Conversation, system: bool, text_of: Callable[[_Conversation], str]
) -> None:
    """Require that the template writes the content of every message, by the text of marks instead:
    a template may trim contents, or leave out their reasoning."""
    marked = [
        {**message, "content": _MARK.format(number)}
        if message.get("content", "").strip()
        else message
        for number, message in enumerate(conversation)
    ]
    text = text_of(marked).lower()
    for number, message in enumerate(marked):
        if message is not conversation[number] and message["content"] not in text:
            raise ValueError(
                f"{_name(number, system)}: the chat template leaves out the content of this "
                f"message, of the role {conversation[number]['role']!r}: use another role"
            )


def _require_fields(
    conversation: _Conversation,
    text: str,
    template: str,
    system: bool,
    text_of: Callable[[_Conversation], str],
) -> None:
    """Require that every field of messages, by role, changes the text."""
    read = [name for name in _REASONING if re.search(rf"[.'\"]{name}\b", template)]
    fields: dict[tuple[str, str], int] = {}
    for number, message in enumerate(conversation):
        for key in message:
            if key not in ("role", "content", *_LINKS, *read):
                fields.setdefault((message["role"], key), number)
    for (role, key), number in fields.items():
        less = [
            {name: m[name] for name in m if m["role"] != role or name != key} for m in conversation
        ]
        try:
            same = text_of(less) == text
        except ValueError:
            same = False
        if same:
            raise TypeError(
                f"{_name(number, system)}.{key}: no field that the chat template reads for the "
                f"role {role!r}: remove it"
            )


def _name(number: int, system: bool) -> str:
    return "system" if system and not number else f"messages[{number - system}]"


def prompt_of_text(
    tokenizer: Any, text: str, system: str | None = None, raw: bool = False
) -> ChatPrompt:
    """Return the prompt for an answer to `text`, through the chat template if there is a template
    and not `raw`.

    Raises:
        ValueError: no token; or a system prompt without a template, or refused by the template.
    """
    if not raw and has_template(tokenizer):
        return chat_prompt(tokenizer, [{"role": "user", "content": text}], system)
    if system is not None:
        raise ValueError("system: expected a target with a chat template, given one without")
    ids: list[int] = tokenizer(text)["input_ids"]
    if not ids:
        raise ValueError(f"prompt: expected at least 1 token, given none in {text[:20]!r}")
    return ChatPrompt(text, ids)


def ends_of_turn(tokenizer: Any, level: Any) -> list[int]:
    """Return the ids that end an answer: EOS ids of the level's configurations and the tokenizer's
    EOS id, the end of a turn in its template, which fine-tunes may set in the tokenizer only."""
    ends = {*getattr(level, "eos_token_ids", ()), getattr(tokenizer, "eos_token_id", None)}
    return sorted(i for i in ends if i is not None and 0 <= i < level.vocab_size)


class FittedPrompt(NamedTuple):
    """A prompt of the messages that leave room for an answer."""

    prompt: ChatPrompt
    left_out: int  # the oldest messages
    limit: int  # maximum tokens of the answer
    context: int | None  # maximum tokens of prompt and answer; None: no limit


def fitted_prompt(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    system: str | None,
    limit: int,
    context: int | None,
) -> FittedPrompt:
    """Return the prompt for an answer of `limit` tokens in a context of `context` tokens; None: no
    limit. While it does not fit, the oldest exchange is left out, a question with all messages up
    to the next question; then the answer may have fewer tokens.

    Raises:
        TypeError, ValueError: as for `chat_prompt`; the last exchange alone is too long.
    """
    conversation, text, text_of = _read_by(tokenizer, messages, system, {})
    prompt = _tokenized(tokenizer, text)
    if context is None:
        return FittedPrompt(prompt, 0, limit, None)
    roles = [message["role"] for message in conversation]
    begin = next((number for number, role in enumerate(roles) if role not in _IN_FRONT), 0)
    # Messages at which the prompt may continue after the system messages: questions, not messages
    # within an exchange, since templates refuse tool results without their call.
    questions = [
        number
        for number in range(begin + 1, len(roles))
        if roles[number] == "user" != roles[number - 1]
    ]
    cuts = [begin, *questions]

    @functools.cache
    def prompt_from(number: int) -> ChatPrompt:
        rest = [*conversation[:begin], *conversation[cuts[number] :]]
        return _tokenized(tokenizer, text_of(rest)) if number else prompt

    def fits(number: int) -> bool:
        return len(prompt_from(number).input_ids) + limit <= context

    last = len(cuts) - 1
    few = 0 if fits(0) else min(1 + bisect.bisect_left(range(1, last), True, key=fits), last)
    prompt = prompt_from(few)
    room = context - len(prompt.input_ids)
    if room < 1:
        raise ValueError(
            f"message: expected fewer than {context} tokens with the chat template, given "
            f"{len(prompt.input_ids)}"
        )
    return FittedPrompt(prompt, cuts[few] - begin, min(limit, room), context)


def texts_after(tokenizer: Any, before: Sequence[int], tokens: Sequence[int]) -> list[str]:
    """Return the text of each token directly after the tokens `before`, with special tokens. Alone,
    a token of SentencePiece kinds loses its leading space. The text of a part of a character is
    U+FFFD."""
    context = list(before[-_WINDOW:])
    front = str(tokenizer.decode(context))
    texts = []
    for token in tokens:
        text = str(tokenizer.decode([*context, token]))
        piece = text[len(front) :] if text.startswith(front) else ""
        texts.append(piece or str(tokenizer.decode([token])))
    return texts


class TextDecoder:
    """A streaming decoder: pieces of text by token, which together are the text of all tokens.

    Each token costs a decode of the last few tokens only. Text that later tokens may change is
    delayed: unfinished characters, runs of byte tokens and, if the tokenizer cleans up spaces,
    spaces before a possible contraction or punctuation. If a tokenizer changes other text, the
    pieces continue after the common prefix of both texts.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokens: list[int] = []
        self._tokenizer = tokenizer
        self._tidies = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        self._begin, self._due = 0, 0  # first token of the window, number of tokens to decode at
        self._in_bytes = False
        self._shown = ""  # the returned text of the window

    @property
    def text(self) -> str:
        """Text of all tokens, without special tokens."""
        return self.decoded(0)

    def add(self, token: int) -> str:
        """Add a token, and return the new text that later tokens cannot change."""
        self.tokens.append(token)
        # Bytes that prove to be invalid UTF-8 change the text of their whole run. Special tokens do
        # not end a run.
        if _BYTE.fullmatch(str(self._tokenizer.convert_ids_to_tokens(token))):
            self._in_bytes = True
        elif self._in_bytes and self.decoded(-1):
            self._in_bytes = False
        if self._in_bytes or len(self.tokens) < self._due:
            return ""
        text = self.decoded(self._begin)
        settled = len(text.rstrip("\ufffd"))  # the text of unfinished characters
        untidied = _UNTIDIED.search(text, 0, settled) if self._tidies else None
        piece = self._show(text[: settled if untidied is None else untidied.start()])
        size = len(self.tokens) - self._begin
        if size >= 2 * _WINDOW and not self._move_window(text):
            self._due = len(self.tokens) + size // 4  # all decodes together stay linear
        return piece

    def rest(self) -> str:
        """Return all text that was not returned before."""
        return self._show(self.decoded(self._begin))

    def decoded(self, begin: int, end: int | None = None) -> str:
        """Return the text of a span of tokens, without special tokens."""
        return str(self._tokenizer.decode(self.tokens[begin:end], skip_special_tokens=True))

    def _show(self, text: str) -> str:
        if self._shown.startswith(text):
            return ""
        same = zip(self._shown, text, strict=False)
        common = next((n for n, (old, new) in enumerate(same) if old != new), len(self._shown))
        self._shown = text
        return text[common:]

    def _move_window(self, text: str) -> bool:
        """Shorten the window to `_WINDOW` tokens if their text ends like `text`, from a character
        before the delayed text on; return whether. Beginnings may differ: decoders strip spaces."""
        held = len(text) - len(self._shown)
        begin = len(self.tokens) - _WINDOW
        short = self.decoded(begin)
        if not 0 <= held < len(text) or not short.endswith(text[-held - 1 :]):
            return False
        self._begin, self._shown = begin, short[: len(short) - held]
        return True


class StopStrings:
    """A streaming decoder like `TextDecoder` that ends at a stop string: the first complete stop
    string; of several with the same end, the longest. The word of a special token, which the text
    leaves out, is a stop string as well. Text that may begin a stop string is delayed until it
    cannot.

    Raises:
        ValueError: a stop string is empty, or has a special token beside other text.

    Attributes:
        stopped: the stop string that has ended the text, or None.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        for stop in stops:
            if not stop:
                raise ValueError("stop: expected strings of at least 1 character, given ''")
        self.stopped: str | None = None
        self._decoder = TextDecoder(tokenizer)
        special = _special_words(tokenizer) if stops else {}
        self._special = {special[stop]: stop for stop in stops if stop in special}
        self._stops = tuple(stop for stop in stops if stop not in special)
        for stop, word in itertools.product(self._stops, special):
            if word in stop:
                raise ValueError(
                    f"stop: expected text or a special token alone, given {stop!r} with {word}"
                )
        self._end = 0  # number of tokens, once stopped
        self._text, self._waiting = "", ""  # returned text, and delayed text

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far, up to the end of the stop string."""
        return len(self._decoder.tokens) if self.stopped is None else self._end

    @property
    def tokens(self) -> list[int]:
        """Tokens so far, with the tokens of the stop string."""
        return self._decoder.tokens[: self.num_tokens]

    @property
    def text(self) -> str:
        """Text so far, returned or not, without special tokens."""
        return self._text if self.stopped is not None else self._decoder.text

    def add(self, token: int) -> str:
        """Add a token, and return the new text that later tokens cannot change and that cannot
        belong to a stop string; "" after a stop."""
        if self.stopped is not None:
            return ""
        piece = self._decoder.add(token)
        if token not in self._special:
            return self._show(piece, self._num_waiting)
        piece = self._show(piece + self._decoder.rest(), lambda text: 0)
        if self.stopped is None:
            self.stopped, self._end = self._special[token], len(self._decoder.tokens)
        return piece

    def rest(self) -> str:
        """Return all text that was not returned before, after the last token."""
        return "" if self.stopped is not None else self._show(self._decoder.rest(), lambda text: 0)

    def _show(self, piece: str, num_waiting: Callable[[str], int]) -> str:
        text = self._waiting + piece
        begins = [(text.find(stop), stop) for stop in self._stops]
        ends = [(at + len(stop), at, stop) for at, stop in begins if at >= 0]
        if ends:
            end, begin, stop = min(ends)
            self._end = self._num_tokens_of(self._text + text[:end])
            shown, self._waiting, self.stopped = text[:begin], "", stop
            self._text += shown
            return shown
        shown = text[: len(text) - num_waiting(text)]
        self._text, self._waiting = self._text + shown, text[len(shown) :]
        return shown

    def _num_waiting(self, text: str) -> int:
        # The longest end of the text that begins a stop string.
        longest = max(map(len, self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0

    def _num_tokens_of(self, text: str) -> int:
        decoded = self._decoder.decoded  # the least number of tokens whose text begins with `text`
        counts = range(len(self._decoder.tokens))
        return bisect.bisect_left(counts, True, key=lambda n: decoded(0, n).startswith(text))


def _conversation(messages: Sequence[Mapping[str, Any]]) -> _Conversation:
    expected = 'messages: expected mappings with "role" and "content", both strings'
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise TypeError(f"{expected}, in a list, given {arguments.shown(messages)}")
    if not messages:
        raise ValueError(f"{expected}, at least one, given none")
    for message in messages:
        if not isinstance(message, Mapping) or not (
            isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str | None)
            and (message.get("content") is not None or message.get("tool_calls"))
        ):
            raise TypeError(f"{expected}, given {arguments.shown(message)}")
    # Empty fields say nothing, but templates may ask whether a message has them.
    return [
        {
            key: value
            for key, value in message.items()
            if value not in (None, "", [], {}) or (key in ("role", "content") and value is not None)
        }
        for message in messages
    ]


# ---- parameters ----------------------------------------------------------------------------------


def text_options(
    file: Mapping[str, Any], default_temperature: float, options: Parameters
) -> tuple[Parameters, dict[str, Any]]:
    """Return the parameters of `Chain.text_options` for a generation_config.json, and its fields
    that are not followed."""
    others = dict(file)
    of_file = {"temperature": default_temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    if others.pop("do_sample", False):
        of_file["temperature"] = others.get("temperature", 1.0)
    others.pop("temperature", None)
    names = ("top_k", "top_p", "min_p")
    of_file |= {name: others.pop(name) for name in names if name in others}
    penalty = others.pop("repetition_penalty", None)
    given = {
        name: value
        for name, value in options.items()
        if value is not None or name not in Parameters.__annotations__
    }
    if penalty is not None:
        given["rules"] = rooms.rules.with_penalty(options.get("rules"), penalty)
    return cast(Parameters, of_file | given), others


# ---- answers -------------------------------------------------------------------------------------


class Answer:
    """Iterator over an answer's text, in pieces as the target commits them (`Chain.chat`).

    Attributes:
        prompt: prompt of the conversation.
        left_out: number of the oldest messages that were left out.
        limit: maximum tokens of the answer.
        context: maximum tokens of prompt and answer; None: no limit.
        stream: stream of the answer's tokens.
    """

    def __init__(
        self, tokenizer: Any, fitted: FittedPrompt, stream: Stream, stops: Sequence[str] = ()
    ) -> None:
        self.prompt, self.left_out, self.limit, self.context = fitted
        self.stream = stream
        self._reader = StopStrings(tokenizer, stops)
        self._pieces = self._read()

    @property
    def text(self) -> str:
        """Text so far, up to a stop string."""
        return self._reader.text

    @property
    def tokens(self) -> list[int]:
        """Tokens so far, with the tokens that end the answer."""
        return self._reader.tokens

    @property
    def stopped(self) -> str | None:
        """The stop string that has ended the answer, or None."""
        return self._reader.stopped

    @property
    def ends(self) -> Collection[int]:
        """Ids that end the answer."""
        return self.stream.batch.rows[0].request.eos

    @property
    def message(self) -> dict[str, str]:
        """The answer so far as a message, to continue the conversation."""
        return {"role": "assistant", "content": self.text}

    @property
    def stats(self) -> Stats:
        """Statistics, updated with each piece."""
        return self.stream.stats

    @property
    def seeds(self) -> list[int]:
        """As `Output.seeds`, a single seed."""
        return self.stream.seeds

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def rest(self) -> str:
        """Return the text that an interrupted iteration has not yielded."""
        return self._reader.rest()

    def _read(self) -> Iterator[str]:
        for token in self.stream:
            if piece := self._reader.add(token):
                yield piece
        if piece := self.rest():
            yield piece
