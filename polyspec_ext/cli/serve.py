"""``python -m polyspec_ext serve``: serve a chain over OpenAI's HTTP API."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import os
import socket
import sys
from typing import Any

from . import API_KEY

_HEAD_SECONDS = 10.0  # limit for the headers of a request
_FLUSH_SECONDS = 5  # limit for clients to read answers when the server ends
_UNREAD_SECONDS = 60  # limit for a client that reads nothing


def run(args: argparse.Namespace) -> int:
    """Serve until a signal ends it."""
    if args.model is not None and args.target is not None:
        raise ValueError(f"target: expected one target, given {args.model} and {args.target}")
    args.target = args.model if args.target is None else args.target
    from ..serving import Server
    from .generate import build_chain, tokenizer_of

    try:
        from ..serving.api import Endpoint, Limits
    except ImportError as error:
        raise RuntimeError(str(error)) from error
    key = os.environ.get(API_KEY) if args.api_key is None else args.api_key
    if key is not None and not key.strip():
        name = "api_key" if args.api_key is not None else API_KEY
        raise ValueError(f"{name}: expected at least 1 character, given none: set it or remove it")
    hosts = None
    if _is_loopback(args.host):
        hosts = ["127.0.0.1", "localhost", args.host, *args.allow_host]
        if ":" in args.host:  # as printed and as clients shorten it
            hosts.append(str(ipaddress.ip_address(args.host)))
    elif key is None:
        print("note: anyone who reaches this machine may use it; --api-key", file=sys.stderr)
    listener = _listen(args.host, args.port)  # before models are loaded, which takes long
    chain = build_chain(args, looks_up=True)
    endpoint = Endpoint(
        Server(
            chain,
            args.slots,
            max_waiting=args.max_waiting,
            max_tokens=args.max_tokens,
            cache_tokens=args.cache_tokens,
        ),
        tokenizer_of(args),
        args.name or ("polyspec-tiny" if args.target is None else chain.names[0]),
        api_key=key,
        limits=Limits(args.max_body, args.max_prompt, args.timeout),
        hosts=hosts,
    )
    asyncio.run(_serve(endpoint, listener, args.verbose))
    return 0


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ValueError(
            f"port: expected a free one at an address of this machine, given {port} at {host}: "
            f"{error.strerror}"
        ) from error
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # milliseconds, inherited by connections
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_SECONDS * 1000)
    return listener


def protocol(seconds: float) -> Any:
    """Return uvicorn's HTTP protocol that closes a connection without the head of a request within
    `seconds` from its beginning, or from the end of its latest answer."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Protocol(H11Protocol):  # type: ignore[misc]
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.loop.call_later(seconds, self._require_head, None)

        def on_response_complete(self) -> None:
            self.loop.call_later(seconds, self._require_head, self.cycle)
            super().on_response_complete()

        def _require_head(self, latest: object) -> None:
            if self.cycle is latest:
                self.transport.close()

    return Protocol


async def _serve(endpoint: Any, listener: socket.socket, verbose: bool) -> None:
    """Serve until SIGINT or SIGTERM, then refuse new requests and finish running requests."""
    import uvicorn

    config = uvicorn.Config(
        endpoint.app,
        http=protocol(_HEAD_SECONDS),
        ws="none",
        log_level="info" if verbose else "warning",
        server_header=False,
        timeout_graceful_shutdown=_FLUSH_SECONDS,
    )
    server = uvicorn.Server(config)
    loop = asyncio.get_running_loop()

    def end(number: int, frame: object) -> None:
        if endpoint.ending:
            server.should_exit = server.force_exit = True
            return
        endpoint.ending = True
        asyncio.run_coroutine_threadsafe(_exit_when_idle(endpoint, server), loop)

    server.handle_exit = end
    address, port, *_ = listener.getsockname()
    shown = f"[{address}]" if ":" in address else address
    print(f"{endpoint.model.name} at http://{shown}:{port}", file=sys.stderr, flush=True)
    await server.serve([listener])


async def _exit_when_idle(endpoint: Any, server: Any) -> None:
    while endpoint.active:
        await asyncio.sleep(0.05)
    server.should_exit = True
