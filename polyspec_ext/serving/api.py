"""The endpoint: routes of OpenAI's API over an `AsyncServer`, with limits and errors.

Needs the extra `server`: Starlette, prometheus-client, and uvicorn to run it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any

from ..chat import ends_of_turn, has_template
from ..integrations.prometheus import Metrics
from .protocol import Answers, Choice, Model, Piece, Refusal, Wanted, parse, read, wrong
from .server import AsyncServer, Event, Server, ServerFull

try:
    import prometheus_client  # noqa: F401
    import uvicorn  # noqa: F401
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
except ImportError as error:
    raise ImportError(
        "the endpoint needs Starlette and uvicorn, of Python 3.11 or newer, and "
        "prometheus-client; install them with: pip install polyspec_ext[server]"
    ) from error

_LOOPBACK = ("127.0.0.1", "localhost")
_BODY_SECONDS = 30.0  # limit of receiving a body
# The page loads nothing from other hosts, with any text of a model.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; " \
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; " \
    "frame-ancestors 'none'"  # fmt: skip
_Receive = Callable[[], Awaitable[Any]]
_Send = Callable[[Any], Awaitable[None]]


@dataclass(frozen=True)
class Limits:
    """Limits of a request: bytes of its body, tokens of a prompt (None: the model's context), and
    seconds from arrival to end."""

    body: int = 2 * 2**20
    prompt: int | None = None
    seconds: float = 600.0


class Endpoint:
    """OpenAI's HTTP API over a server.

    Args:
        server: for the exclusive use of the endpoint.
        tokenizer: the target's.
        name: model name in the API.
        api_key: bearer token that clients must send, not empty; None: no authentication.
        hosts: accepted names and addresses in Host headers; None: any.

    Attributes:
        app: the ASGI application. Its lifespan starts and stops the server's thread.
        ending: whether new requests are refused.
        active: number of requests that are being answered.
    """

    def __init__(
        self,
        server: Server,
        tokenizer: Any,
        name: str,
        *,
        api_key: str | None = None,
        limits: Limits | None = None,
        hosts: Sequence[str] | None = _LOOPBACK,
    ) -> None:
        chain = server.chain
        lengths = [server.max_tokens, *(member.max_length for member in chain.engine.parts)]
        target, vocab_size = chain.levels[0], chain.vocab_sizes[0]
        self.limits = limits or Limits()
        self.model = Model(
            name,
            tokenizer,
            ends_of_turn(tokenizer, target),
            [token for token in getattr(target, "eos_token_ids", ()) if 0 <= token < vocab_size],
            chain.text_options,
            min((length for length in lengths if length is not None), default=None),
            self.limits.prompt,
            min(128, server.slots + server.max_waiting),
        )
        self._server, self._engine = server, AsyncServer(server)
        self._metrics = Metrics(name, server)
        if api_key is not None and not api_key.strip():
            raise ValueError("api_key: expected at least 1 character, given none")
        self._key = None if api_key is None else api_key.encode()
        self._reader = ThreadPoolExecutor(1, "polyspec reader")  # tokenizers are not thread-safe
        self._created = int(time.time())
        self.ending, self.active, self._failed = False, 0, False
        self._complete: set[int] = set()  # requests ended by a stop string
        self.app = Starlette(
            routes=[
                Route("/", _page),
                Route("/health", self._health),
                Route("/metrics", self._counts),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._models),
                Route("/v1/completions", partial(self._reply, chat=False), methods=["POST"]),
                Route("/v1/chat/completions", partial(self._reply, chat=True), methods=["POST"]),
            ],
            middleware=[Middleware(_Hosts, hosts=hosts)] if hosts else [],
            exception_handlers={
                Refusal: _refused,
                HTTPException: _no_route,
                ClientDisconnect: _gone,
                Exception: _broken,
            },
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: object) -> AsyncGenerator[None, None]:
        self._engine.start()
        try:
            yield
        finally:
            self.ending = True
            await asyncio.to_thread(self._engine.stop, False)
            self._reader.shutdown(wait=False)

    # ---- routes ----------------------------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        return Response(status_code=503 if self.ending or self._failed else 200)

    async def _counts(self, request: Request) -> Response:
        self._require_key(request)
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def _models(self, request: Request) -> Response:
        self._require_key(request)
        model = {
            "id": self.model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "polyspec",
            "max_model_len": self.model.context,
            "levels": self._server.chain.names,
            "chat": has_template(self.model.tokenizer),
        }
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": [model]})
        if name != self.model.name:
            raise Refusal(
                404, f"model: expected {self.model.name!r}, given {name!r}", code="model_not_found"
            )
        return JSONResponse(model)

    # ---- requests --------------------------------------------------------------------------------

    def _require_key(self, request: Request) -> None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        same = self._key is None or hmac.compare_digest(token.strip().encode("latin-1"), self._key)
        if self._key is not None and not (same and scheme.lower() == "bearer"):
            raise Refusal(
                401,
                "authorization: expected the API key as a bearer token, given "
                f"{'another' if scheme else 'none'}",
                code="invalid_api_key",
            )

    async def _reply(self, request: Request, chat: bool) -> _Reply:
        """Read and check a request, and return its answer as an ASGI application.

        Raises:
            Refusal: the request is invalid, or the endpoint is full or ending.
        """
        began = time.perf_counter()
        self._require_key(request)
        self._require_running()
        # Twice the requests of the server: complete answers may wait for slow clients.
        most = 2 * (self._server.slots + self._server.max_waiting)
        if self.active >= most:
            raise _full(f"expected at most {most} requests at a time, given more")
        self.active += 1
        try:
            try:
                body = await asyncio.wait_for(self._body(request), _BODY_SECONDS)
            except asyncio.TimeoutError:
                raise Refusal(
                    408, f"body: expected it within {_BODY_SECONDS:.0f} seconds, given less of it"
                ) from None
            wanted = await asyncio.get_running_loop().run_in_executor(
                self._reader, lambda: read(parse(body), self.model, chat)
            )
            self._require_running()
        finally:
            self.active -= 1
        return _Reply(self, wanted, began)

    def _require_running(self) -> None:
        if self.ending:
            raise Refusal(503, "expected a server that runs, given one that ends", retry_after=5)

    async def _body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # Browsers let pages of other hosts send other types without a preflight request.
            raise Refusal(415, f"content-type: expected application/json, given {kind!r}")
        too_long = Refusal(413, f"body: expected at most {self.limits.body} bytes, given more")
        size = request.headers.get("content-length", "")
        if size.isdecimal() and int(size) > self.limits.body:
            raise too_long
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self.limits.body:
                raise too_long
        return bytes(body)

    async def events(self, wanted: Wanted, began: float) -> AsyncGenerator[tuple[int, Event], None]:
        """Run the requests of all choices, and yield (index of the choice, event). Closing the
        iterator aborts running requests.

        Raises:
            Refusal: the server is full, or refuses a request.
        """
        queue: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._pump(queue, wanted, index, began))
            for index in range(len(wanted.options))
        ]
        left = len(tasks)
        try:
            while left:
                index, item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                left -= item.finish_reason is not None
                yield index, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(
        self,
        queue: asyncio.Queue[tuple[int, Event | Exception]],
        wanted: Wanted,
        index: int,
        began: float,
    ) -> None:
        """Add the request of a choice, count its events and put them in the queue."""
        prompt = wanted.prompts[wanted.of(index)]
        last, count, number = began, 0, -1
        reason: str | None = "abort"
        stats = None
        try:
            stream: Any = self._engine.stream(prompt, **wanted.options[index])
            async with contextlib.aclosing(stream) as events:
                async for event in events:
                    now, number = time.perf_counter(), event.request
                    if event.tokens:
                        self._metrics.tokens(len(event.tokens), now - last, first=count == 0)
                        last, count = now, count + len(event.tokens)
                    if event.finish_reason is not None:
                        reason, stats = event.finish_reason, event.stats
                    queue.put_nowait((index, event))
        except Exception as error:
            reason = None  # the request did not run
            queue.put_nowait((index, self._refusal(error)))
        finally:
            if number in self._complete:
                self._complete.remove(number)
                reason = "stop"
            if reason is not None:
                seconds = time.perf_counter() - began
                self._metrics.finished(reason, len(prompt), count, seconds, stats)

    def _refusal(self, error: Exception) -> Refusal:
        if isinstance(error, ServerFull):
            return _full(str(error))
        if isinstance(error, TypeError | ValueError):
            return wrong(error)
        self._failed = not self.ending
        return Refusal(503, f"the server takes no requests: {error}", retry_after=5)

    def abort(self, request: int) -> None:
        """End a request at a stop string; its last event follows."""
        self._complete.add(request)
        self._server.abort(request)


class _Hosts:
    """A check of Host headers before the application."""

    def __init__(self, app: Any, hosts: Sequence[str]) -> None:
        self._app, self._hosts = app, {host.lower() for host in hosts}

    async def __call__(self, scope: Any, receive: _Receive, send: _Send) -> None:
        app = self._app
        if scope["type"] == "http":
            host = dict(scope["headers"]).get(b"host", b"").decode("latin-1").lower()
            name = re.sub(r":\d*$", "", host) if host.startswith("[") else host.partition(":")[0]
            if name.strip("[]") not in self._hosts:
                text = f"host: expected {' or '.join(sorted(self._hosts))}, given {host!r}"
                app = _error(Refusal(400, text))
        await app(scope, receive, send)


class _Reply:
    """The answer to a request, as an ASGI application; `began`: its arrival, of
    `time.perf_counter`."""

    def __init__(self, endpoint: Endpoint, wanted: Wanted, began: float) -> None:
        self._endpoint, self._wanted, self._began = endpoint, wanted, began
        self._answers = Answers(wanted, endpoint.model)
        count = len(wanted.options)
        self._choices = [Choice(wanted, endpoint.model, number) for number in range(count)]
        self._started = False  # whether the response headers have been sent

    async def __call__(self, scope: Any, receive: _Receive, send: _Send) -> None:
        """Answer until the text is complete, the client disconnects or the time limit passes."""
        endpoint, seconds = self._endpoint, self._endpoint.limits.seconds
        endpoint.active += 1
        answer = self._stream(send) if self._wanted.stream else self._whole(scope, receive, send)
        work = asyncio.create_task(self._guarded(answer, scope, receive, send))
        gone = asyncio.create_task(_until_gone(receive))
        left = seconds - (time.perf_counter() - self._began)
        try:
            await asyncio.wait({work, gone}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            late = not work.done() and not gone.done()
        finally:
            work.cancel()
            gone.cancel()
            results = await asyncio.gather(work, gone, return_exceptions=True)
            endpoint.active -= 1
        if late and not self._started:
            text = f"expected an answer within {seconds:g} seconds, which were over"
            await _error(Refusal(504, text))(scope, receive, send)
        elif isinstance(results[0], Exception):
            raise results[0]

    async def _guarded(
        self, answer: Coroutine[Any, Any, None], scope: Any, receive: _Receive, send: _Send
    ) -> None:
        try:
            await answer
        except Refusal as refusal:
            if not self._started:
                await _error(refusal)(scope, receive, send)
                return
            await self._send(send, _event(refusal.body()))
            await self._send(send, b"data: [DONE]\n\n", more=False)

    async def _pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        events = self._endpoint.events(self._wanted, self._began)
        async with contextlib.aclosing(events):
            async for index, event in events:
                choice = self._choices[index]
                if event.read is not None:
                    yield index, Piece(read=event.read)
                    continue
                was_ended = choice.ended
                piece = choice.add(event)
                if was_ended:
                    continue
                if choice.ended and event.finish_reason is None:  # at a stop string
                    self._endpoint.abort(event.request)
                yield index, piece

    async def _whole(self, scope: Any, receive: _Receive, send: _Send) -> None:
        sums = [Piece() for _ in self._choices]
        async with contextlib.aclosing(self._pieces()) as pieces:
            async for index, piece in pieces:
                if piece.read is not None:
                    continue
                total = sums[index]
                total.text += piece.text
                total.tokens += piece.tokens
                total.finish_reason, total.stop_reason = piece.finish_reason, piece.stop_reason
        for total, choice in zip(sums, self._choices, strict=True):
            del total.tokens[choice.count :]
        response = JSONResponse(self._answers.whole(sums, self._choices))
        self._started = True
        await response(scope, receive, send)

    async def _stream(self, send: _Send) -> None:
        answers, left, opened = self._answers, len(self._choices), set()
        chunk: dict[str, Any] = {}
        async with contextlib.aclosing(self._pieces()) as pieces:
            async for index, piece in pieces:
                if piece.read is not None:
                    if self._wanted.levels:
                        await self._send(send, _event(answers.reading(index, piece.read)))
                    continue
                if index not in opened:
                    opened.add(index)
                    if opening := answers.opening(index):
                        await self._send(send, _event(opening))
                if piece.text or piece.tokens or piece.finish_reason:
                    chunk = answers.chunk(index, piece)
                    left -= piece.finish_reason is not None
                    if left:
                        await self._send(send, _event(chunk))
        for last in answers.last(chunk, self._choices):
            await self._send(send, _event(last))
        await self._send(send, b"data: [DONE]\n\n", more=False)

    async def _send(self, send: _Send, body: bytes, more: bool = True) -> None:
        if not self._started:
            self._started = True
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": more})


def _event(data: dict[str, Any]) -> bytes:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return b"data: " + text.encode() + b"\n\n"


async def _until_gone(receive: _Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _full(text: str) -> Refusal:
    return Refusal(429, text, code="queue_full", retry_after=1)


def _error(refusal: Refusal) -> Any:
    headers = {} if refusal.retry_after is None else {"Retry-After": str(refusal.retry_after)}
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if refusal.status in (408, 413):  # the rest of the body is not read
        headers["Connection"] = "close"
    return JSONResponse(refusal.body(), refusal.status, headers)


async def _page(request: Request) -> Response:
    folder = resources.files(__package__)
    text = folder.joinpath("page.html").read_text(encoding="utf-8")
    marked = folder.joinpath("marked/marked.umd.js").read_text(encoding="utf-8")
    text = text.replace("/* marked */", marked)
    return Response(text, 200, {"Content-Security-Policy": _POLICY}, "text/html")


# Exception handlers: coroutines, because Starlette runs plain functions in threads.


async def _refused(request: Request, refusal: Refusal) -> Any:
    return _error(refusal)


async def _no_route(request: Request, error: Exception) -> Any:
    status = getattr(error, "status_code", 404)
    method = "GET" if request.method == "POST" else "POST"
    text = f"expected a {method} request" if status == 405 else "expected a path of the API"
    return _error(Refusal(status, f"{text}, given {request.method} {request.url.path}"))


async def _gone(request: Request, error: Exception) -> Any:
    return Response(status_code=499)


async def _broken(request: Request, error: Exception) -> Any:
    return _error(Refusal(500, "the server has failed; its log says more"))
