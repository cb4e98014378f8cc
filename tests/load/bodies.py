"""What others notice while ten bodies of 20 MB are sent at once, and whether the memory comes back.

    python -m tests.load.bodies [ROUNDS]

Prints, without and with the bodies: the slowest /health, the longest gap in a stream of an event every 10 ms, memory.
The engine, the senders and the listeners are children of their own; on two cores all of them share two cores.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from tests.doubles.engine import Engine, Exchange
from tests.e2e.harness import Gateway, base_config, chat, digest
from tests.e2e.wire import Wire, request

KEY, SIZE, SENDERS, TICK = "sk-" + "b" * 48, 20_000_000, 10, 0.01


def engine_process(pipe: Any) -> None:
    stop = threading.Event()

    def script(x: Exchange) -> None:
        if not x.request.json().get("stream"):
            x.engine.requests.clear()
            x.reply(x.dialect.completion())
            return
        x.begin()
        while not stop.wait(TICK) and not x.peer_closed():
            x.delta("tick")

    with Engine(script=script) as engine:
        pipe.send(engine.url)
        pipe.recv()
        stop.set()


def send(port: int, barrier: Any) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * SIZE}}
    data = request(
        "POST",
        "/v1/chat/completions",
        json.dumps(chat(messages=[{"role": "user", "content": [image]}])).encode(),
        key=KEY,
    )
    barrier.wait()
    wire = Wire(port)
    wire.send(data)
    assert wire.answer().rest().status == 200
    wire.close()


def listen(port: int, pipe: Any) -> None:
    """The slowest /health and the longest gap between events until told to stop, in milliseconds."""
    health, stream = Wire(port), Wire(port)
    answer = stream.ask("POST", "/v1/chat/completions", chat(stream=True), key=KEY)
    gaps, done = [0.0], threading.Event()

    def follow() -> None:
        last = time.monotonic()
        while not done.is_set() and answer.more():
            answer.body = b""
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=follow)
    thread.start()
    took = []
    while not pipe.poll():
        begun = time.monotonic()
        health.ask("GET", "/health").rest()
        took.append(time.monotonic() - begun)
        time.sleep(0.002)
    done.set()
    thread.join()
    took.sort()
    pipe.send((took[-1] * 1e3, took[int(len(took) * 0.99)] * 1e3, max(gaps) * 1e3))


def measure(port: int, bodies: int) -> tuple[float, float, float]:
    ours, theirs = multiprocessing.Pipe()
    listener = multiprocessing.Process(target=listen, args=(port, theirs))
    listener.start()
    time.sleep(0.5)
    if bodies:
        barrier = multiprocessing.Barrier(bodies)
        senders = [multiprocessing.Process(target=send, args=(port, barrier)) for _ in range(bodies)]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
    else:
        time.sleep(1)
    ours.send("stop")
    result: tuple[float, float, float] = ours.recv()
    listener.join()
    return result


def peak(pid: int) -> int:
    """The most memory that a process has had, in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) >> 10


def main() -> None:
    ours, theirs = multiprocessing.Pipe()
    engine = multiprocessing.Process(target=engine_process, args=(theirs,))
    engine.start()
    replica = {"backend": "vllm", "url": ours.recv(), "model": "x"}
    tenant = {"name": "t", "models": ["*"], "keys": [{"name": "k", "sha256": digest(KEY)}]}
    with tempfile.TemporaryDirectory() as folder:
        gateway = Gateway(Path(folder), base_config({"m": [replica]}, [tenant], state={"database": None}))
        process = psutil.Process(gateway.process.pid)
        for bodies in (0, *[SENDERS] * int(sys.argv[1] if len(sys.argv) > 1 else 3)):
            slowest, p99, gap = measure(gateway.port, bodies)
            memory = process.memory_info().rss >> 20
            health = f"/health slowest {slowest:.0f} ms, p99 {p99:.0f} ms"
            print(f"{bodies:2} bodies: {health}; stream gap {gap:.0f} ms; {memory} MiB, {peak(process.pid)} at most")
        gateway.stop()
    ours.send("stop")
    engine.join()


if __name__ == "__main__":
    main()
