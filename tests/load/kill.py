"""What clients notice when engines die: three engines as processes, the gateway, a steady load over loopback.

    python tests/load/kill.py [kill] [instant] [half] [storm] [--rate 200] [--seconds 30] [--json out.json]

    kill      one engine is killed (SIGKILL) after a third of the time and started again after two thirds
    instant   one engine answers every request with 503 within a millisecond
    half      one engine answers every second request with 500
    storm     all engines answer every request with 500

Half of the requests are streams of twenty tokens. Without arguments all four are played, one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
KEY = "sk-load-0000000000000000000000000000000000000000"
GATEWAY, ENGINES = 8181, (9181, 9182, 9183)
TOKENS, TOKEN_TIME, ANSWER_TIME = 20, 0.02, 0.1  # seconds
HEAD = b"HTTP/1.1 %d X\r\ncontent-type: %b\r\n%b\r\n\r\n"
CHUNK = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
USAGE = {"prompt_tokens": 5, "completion_tokens": TOKENS, "total_tokens": 5 + TOKENS}
MESSAGE = {"index": 0, "message": {"role": "assistant", "content": "Hello."}, "finish_reason": "stop"}
ANSWER = json.dumps(
    {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [MESSAGE], "usage": USAGE}
).encode()
SCENARIOS = ("kill", "instant", "half", "storm")


# --- the engine
def event(choices: list[object], **more: object) -> bytes:
    data = b"data: " + json.dumps(CHUNK | {"choices": choices} | more).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


class Engine:
    """Takes the time of an engine that is not busy; `mode` is how it fails."""

    def __init__(self, mode: str) -> None:
        self.mode, self.requests = mode, 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
                body = await reader.readexactly(length)
                if head.startswith(b"GET"):
                    self.document(writer, 200, json.dumps({"requests": self.requests}).encode())
                else:
                    await self.answer(writer, b'"stream"' in body)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def answer(self, writer: asyncio.StreamWriter, stream: bool) -> None:
        self.requests += 1
        if self.mode == "instant":
            self.document(writer, 503, b'{"error":{"message":"out of order","type":"x","code":503}}')
        elif self.mode == "storm" or (self.mode == "half" and self.requests % 2):
            self.document(writer, 500, b'{"error":{"message":"a bug","type":"x","code":500}}')
        elif stream:
            await self.stream(writer)
        else:
            await asyncio.sleep(ANSWER_TIME)
            self.document(writer, 200, ANSWER)

    async def stream(self, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD % (200, b"text/event-stream", b"transfer-encoding: chunked"))
        for _ in range(TOKENS):
            await asyncio.sleep(TOKEN_TIME)
            writer.write(event([{"index": 0, "delta": {"content": " token"}, "finish_reason": None}]))
        writer.write(event([{"index": 0, "delta": {}, "finish_reason": "stop"}]) + event([], usage=USAGE))
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def document(self, writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        writer.write(HEAD % (status, b"application/json", b"content-length: %d" % len(body)) + body)


async def run_engine(port: int, mode: str) -> None:
    server = await asyncio.start_server(Engine(mode).serve, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


# --- the clients
def request(stream: bool) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello?"}]} | ({"stream": True} if stream else {})
    data = json.dumps(body)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n{data}".encode()


@dataclass
class Seen:
    """What clients saw."""

    began: float = field(default_factory=time.monotonic)
    outcomes: Counter[str] = field(default_factory=Counter)
    replicas: dict[int, Counter[str]] = field(default_factory=dict)  # by second
    attempts: Counter[str] = field(default_factory=Counter)

    def note(self, head: bytes, outcome: str) -> None:
        self.outcomes[outcome] += 1
        lines = dict(line.split(": ", 1) for line in head.decode().lower().split("\r\n")[1:] if ": " in line)
        self.attempts[lines.get("x-sekisho-attempts", "none")] += 1
        second = int(time.monotonic() - self.began)
        self.replicas.setdefault(second, Counter())[lines.get("x-sekisho-replica", "none")] += 1


class Clients:
    """Requests at a steady rate, whether or not earlier ones are answered. Connections are kept."""

    def __init__(self, rate: float, seen: Seen) -> None:
        self.rate, self.seen = rate, seen
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def run(self, seconds: float) -> None:
        begun = time.monotonic()
        tasks = []
        for number in range(int(seconds * self.rate)):
            await asyncio.sleep(begun + number / self.rate - time.monotonic())
            tasks.append(asyncio.create_task(self.one(number % 2 == 1)))
        await asyncio.gather(*tasks)
        for _, writer in self._idle:
            writer.close()

    async def one(self, stream: bool) -> None:
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection("127.0.0.1", GATEWAY)
        writer.write(request(stream))
        async with asyncio.timeout(30):
            head = await reader.readuntil(b"\r\n\r\n")
            chunked = b"chunked" in head.lower()
            if chunked:
                body = await reader.readuntil(b"\r\n0\r\n\r\n")
            else:
                body = await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]))
        self.seen.note(head, what_came(head, body, chunked))
        if b"connection: close" in head.lower():
            writer.close()
        else:
            self._idle.append((reader, writer))


def what_came(head: bytes, body: bytes, stream: bool) -> str:
    status = head.split(b" ", 2)[1].decode()
    if not stream:
        return "document" if status == "200" else f"error {status}"
    errors, tokens, done = body.count(b'data: {"error"'), body.count(b" token"), body.count(b"[DONE]")
    if (errors, tokens, done) == (0, TOKENS, 1):
        return "stream"
    if errors == 1 and not done:
        return "stream with one error event" if tokens else "stream with an error event and nothing before"
    return f"stream with {errors} errors, {tokens} tokens, {done} ends"


# --- a scenario
def spawn(*args: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, *args], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def engine(port: int, mode: str = "good") -> subprocess.Popen[bytes]:
    return spawn(str(Path(__file__).resolve()), "--engine", str(port), "--mode", mode)


async def answers(port: int) -> bytes:
    """The body of GET /health; waits until there is one."""
    deadline = time.monotonic() + 15
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            body = await reader.readexactly(length)
            writer.close()
            return body
        except OSError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.05)


def configured(folder: str) -> str:
    """The path of a configuration for three engines."""
    replicas = [{"backend": "vllm", "url": f"http://127.0.0.1:{port}", "model": "m"} for port in ENGINES]
    key = {"name": "load", "sha256": sha256(KEY.encode()).hexdigest()}
    config = {
        "server": {"expose_route": True},
        "models": [{"name": "m", "replicas": replicas}],
        "tenants": [{"name": "load", "models": ["*"], "keys": [key]}],
    }
    file = Path(folder, "gateway.yaml")
    file.write_text(json.dumps(config))
    return str(file)


async def play(scenario: str, rate: float, seconds: float) -> dict[str, object]:
    modes = [scenario if scenario == "storm" or (place == 0 and scenario != "kill") else "good" for place in range(3)]
    engines = [engine(port, mode) for port, mode in zip(ENGINES, modes, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        gateway = spawn("-m", "gateway", "serve", "--config", configured(folder), "--port", str(GATEWAY))
        try:
            for port in (*ENGINES, GATEWAY):
                await answers(port)
            await asyncio.sleep(2)  # first probes
            seen = Seen()
            load = asyncio.create_task(Clients(rate, seen).run(seconds))
            if scenario == "kill":
                await asyncio.sleep(seconds / 3)
                engines[0].kill()
                engines[0].wait()
                await asyncio.sleep(seconds / 3)
                engines[0] = engine(ENGINES[0])
            await load
            counts = [json.loads(await answers(port))["requests"] for port in ENGINES]
        finally:
            for process in (*engines, gateway):
                process.kill()
                process.wait()
    return report(scenario, seen, counts)


def report(scenario: str, seen: Seen, counts: list[int]) -> dict[str, object]:
    requests = sum(seen.outcomes.values())
    figures: dict[str, object] = {
        "requests": requests, "outcomes": dict(seen.outcomes), "x-sekisho-attempts": dict(seen.attempts),
        "attempts per engine": counts,
    }  # fmt: skip
    if scenario == "kill":
        names = sorted({name for second in seen.replicas.values() for name in second} - {"none"})
        figures["answers per second and replica"] = [
            [seen.replicas[second][name] for name in names] for second in sorted(seen.replicas)
        ]
    else:
        figures["share of the bad engine"] = round(counts[0] / requests, 4)
        figures["attempts per request"] = round(sum(counts) / requests, 4)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", choices=[[], *SCENARIOS], default=[])
    parser.add_argument("--rate", type=float, default=200)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--mode", default="good", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        asyncio.run(run_engine(args.engine, args.mode))
        return
    figures = {name: asyncio.run(play(name, args.rate, args.seconds)) for name in args.scenarios or SCENARIOS}
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + os.linesep)
    for name, found in figures.items():
        print(name, *(f"  {figure}: {value}" for figure, value in found.items()), sep="\n")


if __name__ == "__main__":
    main()
