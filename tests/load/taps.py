"""What a chunk costs in each tap, without sockets: CPU microseconds, best of several rounds.

    .venv/bin/python tests/load/taps.py
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import backends
from backends.base import Operation
from gateway.dialect_tap import FixingTap
from gateway.sse import StreamTap

CHUNKS, ROUNDS = 20_000, 7
HEAD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "engine"}


def sse(number: int, **more: object) -> bytes:
    choice = {"index": 0, "delta": {"content": f" word{number}"}, "logprobs": None, "finish_reason": None}
    return b"data: " + json.dumps(HEAD | more | {"choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"


def with_role(number: int) -> bytes:
    choice = {"index": 0, "delta": {"role": "assistant", "content": f" word{number}"}, "finish_reason": None}
    return b"data: " + json.dumps(HEAD | {"choices": [choice]}).encode() + b"\n\n"


def ndjson(number: int) -> bytes:
    message = {"role": "assistant", "content": f" word{number}"}
    line = {"model": "engine", "created_at": "2026-08-21T10:00:00.123456789Z", "message": message, "done": False}
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def fixing(kind: str) -> StreamTap:
    backend = backends.load(kind)
    fixer = backend.stream_fixer(Operation.CHAT)
    assert fixer is not None
    return FixingTap(backend, fixer, "chat", strip_usage=True, max_event=1 << 20)


def plain() -> StreamTap:
    return StreamTap("chat", strip_usage=True)


CASES: dict[str, tuple[Callable[[], StreamTap], Callable[[int], bytes]]] = {
    "short way (vLLM, llama-server, SGLang, TensorRT-LLM, LM Studio)": (plain, sse),
    "long way, same tap (`\"usage\":{...}` in every chunk)": (
        plain, lambda number: sse(number, usage={"prompt_tokens": 5, "completion_tokens": number}),
    ),
    "TabbyAPI": (lambda: fixing("tabbyapi"), sse),
    "mlx_lm": (lambda: fixing("mlx_lm"), with_role),
    "Ollama, NDJSON to events": (lambda: fixing("ollama"), ndjson),
}  # fmt: skip


def cost(make: Callable[[], StreamTap], chunk: Callable[[int], bytes]) -> float:
    """Microseconds of CPU a chunk."""
    data = [chunk(number) for number in range(CHUNKS)]
    best = float("inf")
    for _ in range(ROUNDS):
        feed = make().feed
        begun = time.process_time()
        for piece in data:
            feed(piece)
        best = min(best, time.process_time() - begun)
    return best / CHUNKS * 1e6


def main() -> None:
    for name, (make, chunk) in CASES.items():
        print(f"{cost(make, chunk):6.2f}  {name}")


if __name__ == "__main__":
    main()
