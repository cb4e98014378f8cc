"""What a client connection leaves behind when it is gone: nothing that would have to wait for the cycle collector."""

import asyncio
import contextlib
import gc
import weakref

import pytest
import uvicorn

from gateway.config import Config
from gateway.edge.cycle import HotCycle
from gateway.edge.protocol import Edge
from gateway.edge.settings import edge_settings

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}"
OTHER = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
PATIENCE = 10.0  # seconds


async def app(scope, receive, send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"{}"})


async def answer(cycle: HotCycle) -> None:
    cycle.answer(200, b"{}")


async def begin(cycle: HotCycle) -> None:
    """A stream that its client leaves. As the pipeline does, it ends without an error then."""
    cycle.begin()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(3600)


async def left_over(serve, request: bytes) -> object:
    """What is left of the connection once the client has gone, None if nothing is."""
    loop = asyncio.get_running_loop()
    edge = Edge(serve, edge_settings(Config()))
    config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None, access_log=False)
    config.load()
    state, made = uvicorn.Server(config).server_state, []

    def protocol() -> asyncio.Protocol:
        made.append(edge.protocol(config=config, server_state=state, app_state={}))
        return made[-1]

    listener = await loop.create_server(protocol, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
    writer.write(request)
    await reader.readuntil(b"\r\n\r\n")
    writer.transport.abort()
    gone = asyncio.Event()
    known = weakref.ref(made.pop(), lambda _: gone.set())
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(gone.wait(), PATIENCE)
    listener.close()
    return known()


@pytest.mark.parametrize(
    ("serve", "request_"), [(answer, HEAD), (begin, HEAD), (answer, OTHER)], ids=["answered", "left", "other route"]
)
def test_a_connection_that_is_gone_leaves_nothing_behind(serve, request_: bytes) -> None:
    gc.disable()
    try:
        assert asyncio.run(left_over(serve, request_)) is None
    finally:
        gc.enable()
