"""Answers of the endpoint: tokens to text, and the JSON objects of OpenAI's API."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..chat import StopStrings
from ..stats import Stats
from .metrics import speculative_decoding
from .protocol import Model, Refusal, Wanted
from .server import Event

_LEAST = -9999.0  # instead of -inf, which JSON cannot express


@dataclass
class Token:
    """A token of an answer, and the text that it completes."""

    id: int
    text: str
    logprob: float
    level: int
    corrected: bool
    alternatives: list[tuple[int, float]]


@dataclass
class Piece:
    """New text of a choice.

    Attributes:
        text: new text.
        tokens: new tokens.
        finish_reason, stop_reason: as in vLLM; None while the choice goes on.
    """

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Choice:
    """A choice of an answer: its tokens as text, up to a stop string.

    Attributes:
        ended: whether the text is complete.
        count: number of tokens.
        stats: statistics of the request, after its end.
    """

    def __init__(self, wanted: Wanted, model: Model) -> None:
        self._text = StopStrings(model.tokenizer, wanted.stop)
        self._ends = {*model.ends, *model.eos}
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
            # A ValueError is the client's: the same request would fail again.
            status = 422 if isinstance(event.error, ValueError) else 500
            status = 503 if event.finish_reason == "abort" else status
            raise Refusal(status, f"the request has failed: {event.error or 'aborted'}")
        for number, token in enumerate(event.tokens):
            piece.tokens.append(_token(event, number, self._text.add(token)))
            self.count, self._last = self.count + 1, token
            if self._text.stopped is not None:
                break
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


def _token(event: Event, number: int, text: str) -> Token:
    return Token(
        event.tokens[number],
        text,
        event.logprobs[number],
        event.levels[number],
        event.corrected[number],
        event.alternatives[number] if event.alternatives else [],
    )


class Answers:
    """JSON objects of an answer: whole, or in chunks.

    Args:
        wanted: the request.
        model: the served model.
    """

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
        answer = {**self._object(shown), "usage": self._usage(choices)}
        answer.update(self._measured(choices))
        return answer

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the chunk before the text of a choice; None: no such chunk."""
        if self._wanted.chat:
            shown = {"index": index, "delta": {"role": "assistant", "content": ""}}
            return self._chunk({**shown, "logprobs": None, "finish_reason": None})
        if not self._wanted.echoes:
            return None
        return self._chunk(self._choice(index, Piece()))

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
            return {"content": [self._chat_logprobs(token) for token in tokens], "refusal": None}
        logprobs: dict[str, list[Any]] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [],
        }  # fmt: skip
        for token in tokens:
            logprobs["tokens"].append(self._text(token.id))
            logprobs["token_logprobs"].append(max(token.logprob, _LEAST))
            best = dict(token.alternatives)
            best.setdefault(token.id, token.logprob)
            logprobs["top_logprobs"].append(
                {self._text(other): max(value, _LEAST) for other, value in best.items()}
            )
            logprobs["text_offset"].append(self._offsets[index])
            self._offsets[index] += len(token.text)
        return logprobs

    def _chat_logprobs(self, token: Token) -> dict[str, Any]:
        best = [self._entry(other, value) for other, value in token.alternatives]
        return {**self._entry(token.id, token.logprob), "top_logprobs": best}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        # The bytes of a partial character are unknown.
        encoded = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, _LEAST), "bytes": encoded}

    def _text(self, token: int) -> str:
        return str(self._model.tokenizer.decode([token]))

    def _usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        read = sum(map(len, self._wanted.prompts))
        new = sum(choice.count for choice in choices)
        cached = sum(c.stats.num_cached_tokens for c in choices if c.stats is not None)
        return {
            "prompt_tokens": read,
            "completion_tokens": new,
            "total_tokens": read + new,
            "prompt_tokens_details": {"cached_tokens": min(cached, read)},
        }

    def _measured(self, choices: Sequence[Choice]) -> dict[str, Any]:
        requests = [choice.stats for choice in choices if choice.stats is not None]
        if not requests:
            return {}
        measured: dict[str, Any] = {
            "metrics": {"speculative_decoding": speculative_decoding(requests)}
        }
        if self._wanted.levels:
            measured["polyspec"] = [stats.to_dict() for stats in requests]
        return measured
