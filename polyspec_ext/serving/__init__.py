"""Serving: requests that join and leave the batch of a chain."""

from .server import AsyncServer, Event, Server, ServerFull

__all__ = ["AsyncServer", "Event", "Server", "ServerFull"]
