"""A thread that steps a server, for the tasks of event loops."""

import asyncio
import contextlib
import threading
from typing import Any

import pytest

import polyspec_ext as ps
from polyspec_ext import tiny


def server_of(slots: int = 3, **options: Any) -> ps.Server:
    return ps.Server(tiny.chain(pack=True), slots, **options)


REQUESTS: list[dict[str, Any]] = [
    {"prompt": [i, 2, 3], "max_new_tokens": 10 + i, "temperature": 1.0, "seed": i} for i in range(9)
]


async def read(server: ps.AsyncServer, request: dict[str, Any]) -> list[int]:
    stream = server.stream(**request)
    return [token async for event in stream for token in event.tokens]


def test_streams_are_those_of_the_chain() -> None:
    chain = tiny.chain(pack=True)
    wanted = [
        chain.generate([one["prompt"]], one["max_new_tokens"], 1.0, seed=one["seed"]).new_tokens[0]
        for one in REQUESTS
    ]

    async def main() -> list[list[int]]:
        async with ps.AsyncServer(server_of()) as server:
            return await asyncio.gather(*(read(server, one) for one in REQUESTS))

    before = threading.active_count()
    assert asyncio.run(main()) == wanted
    assert threading.active_count() == before


def test_a_consumer_that_leaves_aborts_its_request() -> None:
    async def main() -> None:
        async with ps.AsyncServer(server_of()) as server:
            endless = {"prompt": [1], "max_new_tokens": 400, "eos_token_id": []}
            stream: Any = server.stream(**endless)
            await anext(stream)
            await stream.aclose()
            task = asyncio.create_task(read(server, endless))
            other = asyncio.create_task(read(server, REQUESTS[0]))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(await other) == REQUESTS[0]["max_new_tokens"]
            for _ in range(200):
                if server.server.running == 0:
                    break
                await asyncio.sleep(0.01)
            assert server.server.running == server.server.waiting == 0

    asyncio.run(main())


def test_errors_reach_the_caller() -> None:
    async def main() -> None:
        server = ps.AsyncServer(server_of(1, max_waiting=0))
        with pytest.raises(RuntimeError, match="given one that was stopped"):
            await read(server, REQUESTS[0])
        async with server:
            with pytest.raises(ValueError, match=r"^temperature: expected"):
                await read(server, {"prompt": [1], "temperature": -1.0})
            stream: Any = server.stream([1], max_new_tokens=400, eos_token_id=[])
            await anext(stream)
            with pytest.raises(ps.ServerFull):
                await read(server, REQUESTS[0])
            await stream.aclose()
        with pytest.raises(RuntimeError, match="given one that has"):
            server.start()

    asyncio.run(main())


@pytest.mark.parametrize("finish", [True, False])
def test_stopping(finish: bool) -> None:
    async def main() -> list[Any]:
        server = ps.AsyncServer(server_of(1))
        server.start()
        tasks = [asyncio.create_task(read(server, one)) for one in REQUESTS[:3]]
        await asyncio.sleep(0.02)
        await asyncio.to_thread(server.stop, finish)
        with pytest.raises(RuntimeError, match="given one that was stopped"):
            await read(server, REQUESTS[0])
        return await asyncio.gather(*tasks)

    lengths = list(map(len, asyncio.run(main())))
    wanted = [one["max_new_tokens"] for one in REQUESTS[:3]]
    assert lengths == wanted if finish else sum(lengths) < sum(wanted)


def test_a_thread_that_fails_tells_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        server = ps.AsyncServer(server_of())
        chain = server.server.chain
        server.start()
        stream: Any = server.stream([1], max_new_tokens=400, eos_token_id=[])
        await anext(stream)
        chain.generate([[1]], 1)  # takes the caches away
        events = [event async for event in stream]
        assert events[-1].finish_reason == "error"
        assert "has failed" in str(events[-1].error)
        with pytest.raises(RuntimeError, match="given one that was stopped"):
            await read(server, REQUESTS[0])

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with contextlib.suppress(RuntimeError):  # the two calls may meet
        asyncio.run(main())
