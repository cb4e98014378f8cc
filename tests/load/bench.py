"""What the gateway costs: CPU per request and per chunk, added latency, memory of open streams.

    python tests/load/bench.py [--seconds 4] [--streams 2000] [--hold 60] [--json out.json]

Starts a small engine and the gateway (tests/load/gateway.yaml: key, limits, accounting, metrics and access log on),
loads them from this process over loopback, and stops both. CPU is the gateway's own, from /proc, so other work on the
machine moves the figures less than it moves times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import uvloop

ROOT = Path(__file__).resolve().parent.parent.parent
KEY = "sk-bench-0000000000000000000000000000000000000000"
GATEWAY, ENGINE = 8080, 9000
TICKS = os.sysconf("SC_CLK_TCK")
CHUNK = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"mock","choices":'
    b'[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null}]}\n\n'
)
LAST = CHUNK.replace(b'"content":" token"', b"").replace(b"null}]", b'"stop"}]')
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":64,"total_tokens":73}}\n\n'
ANSWER = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1700000000,"model":"mock","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"The quick brown fox jumps over the lazy dog."},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":9,"completion_tokens":10,"total_tokens":19}}'
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n%b\r\n\r\n"
TOKENS = 64


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Engine(asyncio.Protocol):
    """Answers at once. `hold` streams send one chunk every five seconds until the client leaves."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.buffer, self.task = transport, b"", None

    def connection_lost(self, exc: Exception | None) -> None:
        if self.task:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, mark, body = self.buffer.partition(b"\r\n\r\n")
        if not mark:
            return
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        if len(body) < length:
            return
        self.buffer = body[length:]
        if b'"hold"' in body:
            self.task = asyncio.ensure_future(self.hold())
        elif b'"stream"' in body:
            self.task = asyncio.ensure_future(self.stream())
        else:
            content = ANSWER if length else b'{"object":"list","data":[]}'
            self.transport.write(HEAD % (b"application/json", b"content-length: %d" % len(content)) + content)

    async def stream(self) -> None:
        self.transport.write(HEAD % (b"text/event-stream", b"transfer-encoding: chunked"))
        for _ in range(TOKENS):
            self.transport.write(framed(CHUNK))
            await asyncio.sleep(0)
        self.transport.write(framed(LAST) + framed(USAGE) + framed(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async def hold(self) -> None:
        self.transport.write(HEAD % (b"text/event-stream", b"transfer-encoding: chunked"))
        while True:
            self.transport.write(framed(CHUNK))
            await asyncio.sleep(5)


def request(body: dict, credential: str = KEY) -> bytes:
    data = json.dumps({"model": "mock", "messages": [{"role": "user", "content": "Explain key-value caches."}], **body})
    key, length = f"authorization: Bearer {credential}", f"content-length: {len(data)}"
    lines = ("POST /v1/chat/completions HTTP/1.1", "host: localhost", key, length)
    return ("\r\n".join(lines) + "\r\n\r\n" + data).encode()


async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    head = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 " in head[:20], head
    if b"chunked" in head:
        await reader.readuntil(b"\r\n0\r\n\r\n")
    else:
        await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]))


def cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def rss_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


async def load(port: int, data: bytes, connections: int, seconds: float) -> list[float]:
    """Seconds that each request took."""
    until, took = time.monotonic() + seconds, []

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        while time.monotonic() < until:
            begun = time.perf_counter()
            await one(reader, writer, data)
            took.append(time.perf_counter() - begun)
        writer.close()

    await asyncio.gather(*(client() for _ in range(connections)))
    return sorted(took)


async def measure(args: argparse.Namespace, pid: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    plain, stream = request({}), request({"stream": True, "stream_options": {"include_usage": True}})
    for name, data, units in (("us_per_request", plain, 1), ("us_per_chunk", stream, TOKENS)):
        await load(GATEWAY, data, 32, 1)
        before = cpu(pid)
        took = await load(GATEWAY, data, 32, args.seconds)
        figures[name] = round((cpu(pid) - before) / len(took) / units * 1e6, 2)
    direct, through = [await load(port, plain, 1, args.seconds) for port in (ENGINE, GATEWAY)]
    for quantile in (0.5, 0.99):
        added = through[int(len(through) * quantile)] - direct[int(len(direct) * quantile)]
        figures[f"added_ms_p{int(quantile * 100)}"] = round(added * 1000, 3)
    if args.streams:
        figures |= await hold(args, pid)
    return figures


async def hold(args: argparse.Namespace, pid: int) -> dict[str, float]:
    base, held = rss_kib(pid), []
    data = request({"stream": True, "user": "hold"})
    for _ in range(args.streams):
        reader, writer = await asyncio.open_connection("127.0.0.1", GATEWAY)
        writer.write(data)
        held.append((reader, writer))
    for reader, _ in held:
        assert b" 200 " in (await reader.readuntil(b"\r\n\r\n"))[:20]
    await asyncio.sleep(args.hold)
    grown = rss_kib(pid) - base
    alive = sum(not reader.at_eof() for reader, _ in held)
    for _, writer in held:
        writer.close()
    await asyncio.sleep(2)
    after = round(rss_kib(pid) / 1024, 1)
    return {"streams_alive": alive, "kib_per_stream": round(grown / args.streams, 1), "rss_mib_after": after}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--hold", type=float, default=60)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", ENGINE, backlog=4096)
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", "gateway", "serve", "--config", str(ROOT / "tests/load/gateway.yaml")]
        gateway = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)  # noqa: ASYNC220 (nothing runs yet)
        try:
            for _ in range(100):
                await asyncio.sleep(0.1)
                try:
                    (await asyncio.open_connection("127.0.0.1", GATEWAY))[1].close()
                    break
                except OSError:
                    if gateway.poll() is not None:
                        log.seek(0)
                        sys.exit(f"the gateway ended: {log.read().decode()}")
            await asyncio.sleep(1)
            figures = await measure(args, gateway.pid)
        finally:
            gateway.terminate()
            gateway.wait(20)
            server.close()
    for name, value in figures.items():
        print(f"{name:18}{value:>10}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    uvloop.run(main())
