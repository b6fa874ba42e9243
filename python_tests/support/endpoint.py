"""An endpoint over the shipped chain in a thread, and raw connections to it."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

import polyspec_ext as ps
from polyspec_ext import tiny
from polyspec_ext.serving import protocol
from polyspec_ext.serving.api import Endpoint

QUESTION = tiny.QUESTIONS[0]


class Served:
    """An endpoint that runs.

    Attributes:
        chain: serves, and must not be used meanwhile.
        alone: with the same levels as `chain`, for texts to compare with.
        url: of the endpoint.
    """

    def __init__(self, chain: ps.Chain, alone: ps.Chain, **options: Any) -> None:
        server_options = {
            name: options.pop(name) for name in ("slots", "max_waiting") & options.keys()
        }
        http = options.pop("http", "h11")
        self.chain, self.alone = chain, alone
        self.tokenizer = options.pop("tokenizer", None) or tiny.tokenizer()
        self.server = ps.Server(chain, **server_options)
        self.endpoint = Endpoint(self.server, self.tokenizer, "tiny", **options)
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(self.endpoint.app, log_level="critical", ws="none", http=http)
        self._uvicorn = uvicorn.Server(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=asyncio.run, args=(self._run(),))

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._uvicorn.serve([self.listener])

    def __enter__(self) -> Any:
        self._thread.start()
        wait_for(lambda: self._uvicorn.started)
        return self

    def __exit__(self, *error: object) -> None:
        self._uvicorn.should_exit = True
        self._thread.join()

    def counts(self) -> dict[str, int]:
        """Return the counts that a leak would raise."""
        return {
            "tasks": len(asyncio.all_tasks(self._loop)),
            "threads": threading.active_count(),
            "active": self.endpoint.active,
            "running": self.server.running,
            "waiting": self.server.waiting,
            "connections": len(self._uvicorn.server_state.connections),
        }

    def text_alone(self, prompt: str, **options: Any) -> str:
        """Return the text of a request that nothing else disturbs."""
        ids = self.tokenizer(prompt)["input_ids"]
        return str(self.alone.generate(ids, **options).text[0])


def model_of(tokenizer: Any, *ends: int, **options: Any) -> protocol.Model:
    """Return a served model without a generation_config.json."""

    def text_options(default_temperature: float, **given: Any) -> dict[str, Any]:
        known = {name: value for name, value in given.items() if value is not None}
        return {"temperature": default_temperature, **known}

    return protocol.Model("m", tokenizer, ends, ends, text_options, **options)


def wait_for(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "the condition does not hold in time"
        time.sleep(0.01)


@contextlib.contextmanager
def connection(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as one:
        yield one


def head(path: str, length: int, **headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {length}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "Content-Type: application/json", "", ""]).encode()


def post(path: str, body: dict[str, Any] | bytes) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head(path, len(data)) + data
