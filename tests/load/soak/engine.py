"""One engine of the soak: `python -m tests.load.soak.engine PORT NUMBER`, a process that can be killed at any moment.

It does what the prompt tells it, as JSON: {"nonce": str, "tokens": int, "pace": seconds between two tokens, "wait":
seconds before the first}. Every token names the request, its place and the engine, so a caller can tell whether it got
all of its own answer and nothing of another's.
"""

from __future__ import annotations

import asyncio
import json
import sys

import uvloop

PROMPT_TOKENS = 11
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n%b\r\n\r\n"
MODELS = b'{"object":"list","data":[{"id":"m","object":"model","max_model_len":32768}]}'
LOAD = 'vllm:num_requests_running{model_name="m"} %d\nvllm:num_requests_waiting{model_name="m"} 0\n'


def token(nonce: str, place: int, engine: int) -> str:
    return f" {nonce}.{place}@{engine}"


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Connection(asyncio.Protocol):
    running = 0  # requests in progress at this engine

    def __init__(self, number: int) -> None:
        self._number, self._buffer = number, b""
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, mark, body = self._buffer.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        if not mark or len(body) < length:
            return
        self._buffer = body[length:]
        if head.startswith(b"GET"):
            self._look_up(head.split(b" ", 2)[1])
        else:
            self._task = asyncio.get_running_loop().create_task(self._answer(json.loads(body)))

    def _look_up(self, path: bytes) -> None:
        text = (LOAD % Connection.running).encode() if path == b"/metrics" else MODELS
        kind = b"text/plain" if path == b"/metrics" else b"application/json"
        self._write(HEAD % (kind, b"content-length: %d" % len(text)) + text)

    async def _answer(self, asked: dict) -> None:
        order = json.loads(asked["messages"][-1]["content"])
        Connection.running += 1
        try:
            if asked.get("stream"):
                await self._stream(order, usage=bool((asked.get("stream_options") or {}).get("include_usage")))
            else:
                await asyncio.sleep(order["wait"])
                self._document(order)
        finally:
            Connection.running -= 1

    def _document(self, order: dict) -> None:
        text = "".join(token(order["nonce"], place, self._number) for place in range(order["tokens"]))
        message = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        answer = self._chunk(order) | {"object": "chat.completion", "choices": [message], "usage": self._usage(order)}
        data = json.dumps(answer).encode()
        self._write(HEAD % (b"application/json", b"content-length: %d" % len(data)) + data)

    async def _stream(self, order: dict, *, usage: bool) -> None:
        self._write(HEAD % (b"text/event-stream", b"transfer-encoding: chunked"))
        chunk, rest = self._chunk(order), {"logprobs": None, "finish_reason": None}
        await asyncio.sleep(order["wait"])
        for place in range(order["tokens"]):
            delta = {"index": 0, "delta": {"content": token(order["nonce"], place, self._number)}}
            self._event(chunk | {"choices": [delta | rest]})
            await asyncio.sleep(order["pace"])
        self._event(chunk | {"choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]})
        if usage:
            self._event(chunk | {"choices": [], "usage": self._usage(order)})
        self._write(framed(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    def _event(self, document: dict) -> None:
        self._write(framed(b"data: " + json.dumps(document).encode() + b"\n\n"))

    @staticmethod
    def _chunk(order: dict) -> dict:
        return {"id": order["nonce"], "object": "chat.completion.chunk", "created": 1700000000, "model": "m"}

    @staticmethod
    def _usage(order: dict) -> dict:
        made = order["tokens"]
        return {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": made, "total_tokens": PROMPT_TOKENS + made}

    def _write(self, data: bytes) -> None:
        self._transport.write(data)


async def run(port: int, number: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(number), "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(run(int(sys.argv[1]), int(sys.argv[2])))
