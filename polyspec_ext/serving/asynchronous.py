"""`AsyncServer`: a thread that steps a `Server`, and its events as asynchronous iterators."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from ..inputs import Tokenized
from .server import Event, Server

_Put = Callable[[Event], None]


class AsyncServer:
    """Steps a server in a thread of its own, for the tasks of event loops.

        async with AsyncServer(ps.Server(chain)) as server:
            async for event in server.stream(prompt, max_new_tokens=64):
                ...

    Args:
        server: nobody else steps it meanwhile.

    Raises:
        RuntimeError: of `start`: the thread has been started already.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self._wake = threading.Condition()
        self._put: dict[int, _Put] = {}
        self._accepting = self._running = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        if self._thread is not None:
            raise RuntimeError("expected a server that has not been started, given one that has")
        self._accepting = self._running = True
        self._thread = threading.Thread(target=self._run, name="polyspec server", daemon=True)
        self._thread.start()

    def stop(self, finish: bool = True) -> None:
        """Take no more requests, and stop the thread: behind the requests that run and wait, or,
        without `finish`, behind the step under way, aborting them. Waits for the thread."""
        with self._wake:
            self._accepting = False
            if not finish:
                for request in self._put:
                    self.server.abort(request)
            self._running = False
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join()

    async def __aenter__(self) -> AsyncServer:
        self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.stop, error[0] is None)

    async def stream(self, prompt: Tokenized, *args: Any, **options: Any) -> AsyncIterator[Event]:
        """Add a request (`Server.add`) and yield its events. A consumer that leaves early, or whose
        task is cancelled, aborts the request.

        Raises:
            TypeError, ValueError, ServerFull: as of `Server.add`.
            RuntimeError: the server has been stopped, or its thread has failed.
        """
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def put(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(queue.put_nowait, event)

        with self._wake:
            if not self._accepting:
                raise RuntimeError("expected a server that runs, given one that was stopped")
            request = self.server.add(prompt, *args, **options)
            self._put[request] = put
            self._wake.notify_all()
        finished = False
        try:
            while not finished:
                event = await queue.get()
                finished = event.finish_reason is not None
                yield event
        finally:
            if not finished:
                with self._wake:
                    self.server.abort(request)
                    self._wake.notify_all()

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    while self._running and not self._put:
                        self._wake.wait()
                    if not self._put:
                        return
                self._deliver(self.server.step())
        except BaseException as failure:
            with self._wake:
                self._accepting = False
                left = list(self._put)
            error = RuntimeError(f"the server's thread has failed: {failure!r}")
            self._deliver([Event(one, finish_reason="error", error=error) for one in left])
            raise

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            with self._wake:
                put = self._put.get(event.request)
                if event.finish_reason is not None:
                    self._put.pop(event.request, None)
            if put is not None:
                put(event)
