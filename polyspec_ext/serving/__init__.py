"""Serving: requests that join and leave the batch of a chain."""

from .asynchronous import AsyncServer
from .server import Event, Server, ServerFull

__all__ = ["AsyncServer", "Event", "Server", "ServerFull"]
