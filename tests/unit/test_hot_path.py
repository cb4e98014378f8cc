"""What one streamed chunk costs, in calls: exact where a timing is noisy.

The numbers are what the path needs today. A change that lowers one should lower it here too; a change that raises one
has to be worth it.
"""

import asyncio
import gc
import json
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from backends.base import OpenAICompatible, Operation
from gateway.attempt import Attempt
from gateway.call import parse_call
from gateway.edge.cycle import HotCycle
from gateway.outcome import Outcome
from gateway.replica_state import ReplicaState
from gateway.reply import Reply
from gateway.sse import StreamTap
from gateway.types import Endpoint, Replica, Timeouts
from gateway.upstream import Connection

TAP_CALLS = 4  # feed, endswith, startswith, count: one Python call, three of C
TAP_CALLS_RENAMED = 5  # and replace
PATH_CALLS = 18  # from the engine's socket to the client's
CHUNKS = 10_000


def chunk(number: int, model: str = "engine") -> bytes:
    choice = {"index": 0, "delta": {"content": f" word{number}"}, "logprobs": None, "finish_reason": None}
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": model}
    return b"data: " + json.dumps(head | {"choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"


def calls(act: Callable[[bytes], object], data: bytes) -> int:
    """Calls of Python and C functions that `act(data)` makes, itself included."""
    count = 0

    def profile(_frame: FrameType, event: str, _arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # a collection would run other people's callbacks
    sys.setprofile(profile)
    try:
        act(data)
    finally:
        sys.setprofile(None)
        gc.enable()
    return count - 1  # setprofile itself


def test_the_counter_counts() -> None:
    assert calls(len, b"x") == 1
    assert calls(lambda data: data.find(data), b"x") == 2


# --- the tap
@pytest.mark.parametrize(("asked", "most"), [("engine", TAP_CALLS), ("chat", TAP_CALLS_RENAMED)])
@pytest.mark.parametrize("together", [1, 3])
def test_calls_of_the_tap(asked: str, most: int, together: int) -> None:
    """Also when several chunks arrive together: two more counts then, and not one for each."""
    tap = StreamTap(asked, strip_usage=True)
    tap.feed(chunk(0))
    most += 2 * (together > 1)
    assert calls(tap.feed, chunk(1) * together) <= most


def test_the_last_chunk_costs_what_the_hundredth_did() -> None:
    for asked in ("engine", "chat"):
        tap, costs = StreamTap(asked, strip_usage=True), {}
        for number in range(CHUNKS):
            if number in (99, CHUNKS - 1):
                costs[number] = calls(tap.feed, chunk(number))
            else:
                tap.feed(chunk(number))
        assert costs[99] == costs[CHUNKS - 1]
        assert tap.events == CHUNKS


def test_a_tap_keeps_nothing_of_what_has_passed() -> None:
    tap = StreamTap("chat", strip_usage=True)

    def kept() -> int:
        slots = [getattr(tap, name) for name in StreamTap.__slots__]
        return sum(sys.getsizeof(value) for value in slots if not isinstance(value, int))

    tap.feed(chunk(0))
    tap.feed(chunk(0)[:-1])
    tap.feed(b"\n")
    before = kept()
    for number in range(CHUNKS):
        data = chunk(number)
        tap.feed(data[:50])
        tap.feed(data[50:])
    assert kept() <= before + 1024


# --- from socket to socket
class Transport:
    """Both sides' transport: keeps the last write, sends nothing."""

    def __init__(self) -> None:
        self.last = b""
        self.writes = 0

    def write(self, data: bytes) -> None:
        self.last = data
        self.writes += 1

    def abort(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class Client:
    """What a cycle needs of the client's connection."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self.transport = loop, Transport()

    def date_header(self) -> bytes:
        return b""

    def is_paused(self) -> bool:
        return False


class Engine:
    """What a connection needs of its pool."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop

    def keep(self, connection: Connection) -> None: ...
    def forget(self, connection: Connection) -> None: ...


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def path_costs(asked: str) -> tuple[list[int], Transport]:
    """Calls per chunk through the gateway's own objects, the 100th to the last."""
    loop = asyncio.get_running_loop()
    replica = Replica("r", "m", OpenAICompatible(), Endpoint("h", 80), "", "engine", Timeouts(), {})
    body = json.dumps({"model": asked, "stream": True, "messages": [{}]}).encode()
    client: Any = Client(loop)
    pool: Any = Engine(loop)
    transport: Any = Transport()
    cycle = HotCycle(client, Operation.CHAT, {}, True, True)
    gateway: Any = None
    attempt = Attempt(
        gateway, parse_call(Operation.CHAT, body), cycle, Outcome("chat", "req_1", 0.0), ReplicaState(replica)
    )
    attempt.tap = StreamTap(asked, strip_usage=True)
    connection = Connection(pool)
    connection.connection_made(transport)
    reply = Reply(connection, Timeouts(), loop.time(), 1 << 20, set())
    connection.send(reply, b"POST / HTTP/1.1\r\n\r\n")
    connection.data_received(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n" + framed(chunk(0))
    )
    relay = asyncio.ensure_future(reply.relay(attempt))
    await asyncio.sleep(0)
    costs = []
    for number in range(1, CHUNKS):
        data = framed(chunk(number))
        if number < 99:
            connection.data_received(data)
        else:
            costs.append(calls(connection.data_received, data))
    assert not relay.done()
    relay.cancel()
    await asyncio.gather(relay, return_exceptions=True)
    return costs, client.transport


@pytest.mark.parametrize(("asked", "renames"), [("engine", 0), ("chat", 1)])
def test_calls_of_the_whole_path(asked: str, renames: int) -> None:
    costs, transport = asyncio.run(path_costs(asked))
    assert max(costs) <= PATH_CALLS + renames
    assert len(set(costs)) == 1  # the last chunk costs what the hundredth did
    assert transport.writes == CHUNKS  # one write for each read
    assert transport.last == framed(chunk(CHUNKS - 1, asked))
