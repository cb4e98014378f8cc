"""The engine and its HTTP face over a runner that asserts what llama.cpp would crash on."""

from __future__ import annotations

import asyncio
import base64
import struct
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import orjson
import pytest

from backends.llamacpp.engine import Engine
from backends.llamacpp.errors import EngineBroken, UsageProblem, invalid
from backends.llamacpp.protocol import Prompt, Sampling
from backends.llamacpp.runner import ModelInfo
from backends.llamacpp.server import Server
from backends.llamacpp.templates import ChatTemplate

END = 256
CONTEXT = 64


class FakeRunner:
    """Tokens are bytes. Says "ok" and ends, unless the prompt is in `says`; the gate stands for slow native code."""

    def __init__(self, slots: int = 2) -> None:
        self.slots = slots
        self.kv_used = 0.0
        self.says: dict[bytes, bytes] = {}
        self.gate = threading.Event()  # step() waits for it
        self.gate.set()
        self.stepping = threading.Event()  # a step is at the gate
        self.load_gate = threading.Event()
        self.load_gate.set()
        self.problem: Exception | None = None
        self.load_problem: Exception | None = None
        self.started: list[bytes] = []
        self.resets = 0
        self.closed = False
        self.slots_used: dict[int, list[int]] = {}
        self._inside = threading.Lock()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        assert self._inside.acquire(blocking=False), "entered twice"
        assert threading.current_thread().name == "engine"
        try:
            yield
        finally:
            self._inside.release()

    def load(self) -> ModelInfo:
        with self._alone():
            self.load_gate.wait()
            if self.load_problem:
                raise self.load_problem
            template = ChatTemplate("{{ messages[-1].content }}", "", "", [])
            return ModelInfo(CONTEXT, 16, True, 3, 257, Sampling(), template, {"quantization": "F0"})

    def encode(self, prompt: Prompt, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        return list(prompt.encode()) if isinstance(prompt, str) else list(prompt)

    def encode_chat(self, messages: Sequence[Any], variables: Any) -> list[int]:
        return list(messages[-1]["content"].encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode()

    def piece(self, token: int) -> bytes:
        return bytes([token]) if token < END else b""

    def is_end(self, token: int) -> bool:
        return token == END

    def start(self, slot: int, prompt: Sequence[int], sampling: Sampling, grammar: str | None) -> None:
        with self._alone():
            assert slot not in self.slots_used and 0 <= slot < self.slots
            if sampling.seed == 666:
                raise invalid("no such seed", "seed")
            self.started.append(bytes(prompt))
            self.slots_used[slot] = [*self.says.get(bytes(prompt), b"ok"), END]

    def step(self) -> list[tuple[int, int]]:
        with self._alone():
            self.stepping.set()
            self.gate.wait()
            if self.problem:
                raise self.problem
            return [(slot, left.pop(0)) for slot, left in sorted(self.slots_used.items())]

    def stop(self, slot: int) -> None:
        with self._alone():
            del self.slots_used[slot]

    def embed(self, inputs: Sequence[Sequence[int]]) -> list[list[float]]:
        with self._alone():
            if self.problem:
                raise self.problem
            return [[float(len(tokens)), 0.5, -1.0] for tokens in inputs[:2]]

    def reset(self) -> None:
        with self._alone():
            self.resets += 1
            self.slots_used.clear()

    def close(self) -> None:
        with self._alone():
            self.closed = True


class Reply:
    """One request against the application, its answer message by message."""

    def __init__(self, app: Any, method: str, path: str, body: bytes, tenant: str) -> None:
        self.messages: list[Any] = []
        self.status = 0
        self.headers: dict[str, str] = {}
        self.begun = asyncio.Event()
        self._gone = asyncio.Event()
        self._bodies = [body]
        headers = [(b"x-sekisho-tenant", tenant.encode())]
        scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": b""}
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._bodies:
            return {"type": "http.request", "body": self._bodies.pop(), "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.messages.append(message)
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.begun.set()

    def leave(self) -> None:
        """The client closes the connection."""
        self._gone.set()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def events(self) -> list[Any]:
        lines = [line for line in self.body.split(b"\n\n") if line]
        assert all(line.startswith(b"data: ") for line in lines)
        return [line[6:] if line == b"data: [DONE]" else orjson.loads(line[6:]) for line in lines]


class Bench:
    """An engine over a fake runner, and ways to ask it."""

    def __init__(self, runner: FakeRunner, **limits: Any) -> None:
        self.runner = runner
        self.engine = Engine(runner, **{"max_waiting": 64, "max_wait_s": 60.0, **limits})
        self.app = Server(self.engine, "m").app

    def ask(self, path: str, body: Any = None, tenant: str = "", method: str = "POST") -> Reply:
        raw = body if isinstance(body, bytes) else orjson.dumps(body)
        return Reply(self.app, method, path, raw, tenant)

    def chat(self, content: str = "hi", tenant: str = "", **fields: Any) -> Reply:
        return self.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields}, tenant)

    async def done(self, reply: Reply) -> Reply:
        await reply.task
        return reply

    async def get(self, path: str) -> Reply:
        return await self.done(self.ask(path, method="GET"))


def run(test: Callable[[Bench], Awaitable[None]], runner: FakeRunner | None = None, **limits: Any) -> None:
    async def body() -> None:
        bench = Bench(runner or FakeRunner(), **limits)
        bench.engine.start()
        if bench.runner.load_gate.is_set() and bench.runner.load_problem is None:
            await bench.engine.loaded
        try:
            await test(bench)
        finally:
            bench.runner.load_gate.set()
            bench.runner.gate.set()
            bench.engine.close()
            await asyncio.wait([bench.engine.stopped])
            bench.engine.stopped.exception()

    asyncio.run(body())


async def until(condition: Callable[[], Any]) -> None:
    while not condition():  # noqa: ASYNC110 - what is awaited happens in another thread
        await asyncio.sleep(0.001)


def test_a_whole_chat_answer() -> None:
    async def test(bench: Bench) -> None:
        answer = (await bench.done(bench.chat("four"))).json
        assert answer["object"] == "chat.completion"
        assert answer["id"].startswith("chatcmpl-") and len(answer["id"]) == 9 + 24
        assert answer["model"] == "m"
        choice = answer["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("ok", "stop")
        assert answer["usage"] == {
            "prompt_tokens": 4,
            "completion_tokens": 3,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 0},
        }

    run(test)


def test_a_stream_has_one_id_one_role_one_finish_and_ends() -> None:
    async def test(bench: Bench) -> None:
        bench.runner.says[b"hi"] = "é🎭 fin".encode()
        reply = await bench.done(bench.chat(stream=True, n=2, stream_options={"include_usage": True}))
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert (reply.headers["cache-control"], reply.headers["x-accel-buffering"]) == ("no-cache", "no")
        *chunks, usage, done = reply.events
        assert done == b"[DONE]"
        assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 2 * 11)
        assert len({(chunk["id"], chunk["created"], chunk["object"]) for chunk in chunks}) == 1
        for index in (0, 1):
            mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            assert not any("role" in choice["delta"] for choice in mine[1:])
            assert "".join(choice["delta"].get("content", "") for choice in mine) == "é🎭 fin"
            assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["stop"]

    run(test)


def test_a_stream_without_usage_does_not_mention_it() -> None:
    async def test(bench: Bench) -> None:
        reply = await bench.done(bench.chat(stream=True))
        assert b"usage" not in reply.body and reply.body.endswith(b"data: [DONE]\n\n")

    run(test)


def test_stop_strings_and_limits() -> None:
    async def test(bench: Bench) -> None:
        bench.runner.says[b"hi"] = b"one two three"
        stopped = (await bench.done(bench.chat(stop=[" tw"]))).json["choices"][0]
        assert (stopped["message"]["content"], stopped["finish_reason"]) == ("one", "stop")
        short = (await bench.done(bench.chat(max_tokens=5))).json
        assert (short["choices"][0]["message"]["content"], short["choices"][0]["finish_reason"]) == ("one t", "length")
        assert short["usage"]["completion_tokens"] == 5
        streamed = await bench.done(bench.chat(stop="three", stream=True))
        texts = [event["choices"][0]["delta"].get("content", "") for event in streamed.events[:-1]]
        assert "".join(texts) == "one two "

    run(test)


def test_generation_ends_with_the_context() -> None:
    async def test(bench: Bench) -> None:
        bench.runner.says[b"hi"] = b"x" * 500
        answer = (await bench.done(bench.chat())).json
        assert answer["usage"]["total_tokens"] == CONTEXT
        assert answer["choices"][0]["finish_reason"] == "length"

    run(test)


def test_completions_of_several_prompts_keep_their_order() -> None:
    async def test(bench: Bench) -> None:
        bench.runner.says.update({b"a": b"1", b"b": b"2", b"c": b"3"})
        reply = await bench.done(bench.ask("/v1/completions", {"prompt": ["a", "b", "c"], "n": 2}))
        answer = reply.json
        assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-")
        assert [(c["index"], c["text"]) for c in answer["choices"]] == list(enumerate("112233"))
        tokens = await bench.done(bench.ask("/v1/completions", {"prompt": [[97], [98]]}))
        assert [choice["text"] for choice in tokens.json["choices"]] == ["1", "2"]

    run(test)


@pytest.mark.parametrize(("content", "fields"), [("x" * CONTEXT, {}), ("x" * 500, {}), ("hi", {"max_tokens": CONTEXT})])
def test_what_does_not_fit_the_context(content: str, fields: dict[str, Any]) -> None:
    async def test(bench: Bench) -> None:
        reply = await bench.done(bench.chat(content, **fields))
        error = reply.json["error"]
        assert reply.status == 400
        assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
        assert error["param"] == "messages" and str(CONTEXT) in error["message"]
        assert not bench.runner.started

    run(test)


def test_embeddings_as_floats_and_as_base64() -> None:
    async def test(bench: Bench) -> None:
        inputs = ["a", "bb", "ccc", "dddd", "eeeee"]
        floats = (await bench.done(bench.ask("/v1/embeddings", {"input": inputs}))).json
        assert [entry["index"] for entry in floats["data"]] == [0, 1, 2, 3, 4]
        assert [entry["embedding"][0] for entry in floats["data"]] == [1, 2, 3, 4, 5]
        assert floats["usage"] == {"prompt_tokens": 15, "total_tokens": 15}
        body = {"input": inputs, "encoding_format": "base64"}
        packed = (await bench.done(bench.ask("/v1/embeddings", body))).json["data"]
        unpacked = [list(struct.unpack("<3f", base64.b64decode(entry["embedding"]))) for entry in packed]
        assert unpacked == [entry["embedding"] for entry in floats["data"]]
        long = await bench.done(bench.ask("/v1/embeddings", {"input": "x" * 17}))
        assert (long.status, long.json["error"]["code"]) == (400, "context_length_exceeded")
        dimensions = await bench.done(bench.ask("/v1/embeddings", {"input": "x", "dimensions": 2}))
        assert (dimensions.status, dimensions.json["error"]["param"]) == (400, "dimensions")

    run(test)


def test_tokenize_and_back() -> None:
    async def test(bench: Bench) -> None:
        for body in ({"content": "hé"}, {"prompt": "hé", "add_special": True}):
            found = (await bench.done(bench.ask("/tokenize", body))).json
            assert found == {"tokens": list("hé".encode()), "count": 3}
        assert (await bench.done(bench.ask("/detokenize", {"tokens": found["tokens"]}))).json == {"content": "hé"}
        assert (await bench.done(bench.ask("/detokenize", {"tokens": "x"}))).json["error"]["param"] == "tokens"
        assert (await bench.done(bench.ask("/tokenize", {}))).status == 400

    run(test)


def test_while_loading_everything_says_so() -> None:
    async def test(bench: Bench) -> None:
        health = await bench.get("/health")
        assert (health.status, health.json["error"]["message"], health.json["error"]["code"]) == (
            503,
            "Loading model",
            503,
        )
        assert health.json["error"]["type"] == "unavailable_error"
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
            reply = await bench.done(bench.ask(path, {}))
            assert reply.status == 503 and int(reply.headers["retry-after"]) > 0
        bench.runner.load_gate.set()
        await bench.engine.loaded
        assert (await bench.get("/health")).json == {"status": "ok"}
        card = (await bench.get("/v1/models")).json["data"][0]
        assert (card["id"], card["owned_by"], card["max_model_len"]) == ("m", "llamacpp", CONTEXT)

    runner = FakeRunner()
    runner.load_gate.clear()
    run(test, runner)


def test_a_model_that_cannot_be_loaded() -> None:
    async def test(bench: Bench) -> None:
        with pytest.raises(UsageProblem, match="not a GGUF"):
            await bench.engine.stopped
        assert (await bench.get("/health")).status == 503

    runner = FakeRunner()
    runner.load_problem = UsageProblem("path: x is not a GGUF file")
    run(test, runner)


def test_fifty_requests_never_enter_the_runner_twice() -> None:
    async def test(bench: Bench) -> None:
        replies = [bench.chat(f"p{i}", stream=i % 2 == 0) for i in range(50)]
        for reply in replies:
            assert (await bench.done(reply)).status == 200
        assert len(bench.runner.started) == 50
        assert not bench.runner.slots_used

    run(test)


def test_other_routes_answer_while_native_code_is_busy() -> None:
    async def test(bench: Bench) -> None:
        bench.runner.gate.clear()
        busy = bench.chat("slow")
        await until(bench.runner.stepping.is_set)
        assert (await bench.get("/health")).json == {"status": "ok"}
        load = (await bench.get("/load")).json
        assert (load["running"], load["waiting"], load["slots"]) == (1, 0, 2)
        bench.runner.gate.set()
        assert (await bench.done(busy)).status == 200
        assert (await bench.get("/load")).json["running"] == 0

    run(test)


def test_the_queue_is_bounded() -> None:
    async def test(bench: Bench) -> None:
        bench.runner.gate.clear()
        running = [bench.chat("a")]
        await until(bench.runner.stepping.is_set)
        running += [bench.chat(f"w{i}") for i in range(3)]  # one takes the second place once the step ends
        await until(lambda: bench.engine.load()["waiting"] == 3)
        refused = await bench.done(bench.chat("late"))
        assert refused.status == 503 and int(refused.headers["retry-after"]) > 0
        assert refused.json["error"]["code"] == "engine_overloaded"
        bench.runner.gate.set()
        for reply in running:
            assert (await bench.done(reply)).status == 200

    run(test, max_waiting=2)


def test_who_waits_too_long_is_told_so() -> None:
    async def test(bench: Bench) -> None:
        bench.runner.gate.clear()
        running = bench.chat("a")
        await until(bench.runner.stepping.is_set)
        waiting = await bench.done(bench.chat("b"))
        assert waiting.status == 503 and "retry-after" in waiting.headers
        assert bench.engine.load()["waiting"] == 0
        bench.runner.gate.set()
        assert (await bench.done(running)).status == 200
        assert bench.runner.started == [b"a"]

    run(test, FakeRunner(slots=1), max_wait_s=0.05)


def test_tenants_take_turns() -> None:
    async def test(bench: Bench) -> None:
        bench.runner.gate.clear()
        replies = [bench.chat("first", "a")]
        await until(bench.runner.stepping.is_set)
        for tenant, content in (("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("b", "b2"), ("c", "c1")):
            replies.append(bench.chat(content, tenant))
            await until(lambda: bench.engine.load()["waiting"] == len(replies) - 1)
        bench.runner.gate.set()
        for reply in replies:
            await bench.done(reply)
        assert bench.runner.started == [b"first", b"a1", b"b1", b"c1", b"a2", b"b2", b"a3"]

    run(test, FakeRunner(slots=1))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(stream: bool) -> None:
    async def test(bench: Bench) -> None:
        bench.runner.gate.clear()
        gone = bench.chat("gone", stream=stream)
        await until(bench.runner.stepping.is_set)
        waiting = bench.chat("next")
        await until(lambda: bench.engine.load()["waiting"] == 1)
        gone.leave()
        await gone.task
        bench.runner.gate.set()
        assert (await bench.done(waiting)).status == 200
        assert gone.messages == []

    runner = FakeRunner(slots=1)
    runner.says[b"gone"] = b"x" * 50
    run(test, runner)


def test_a_client_that_leaves_the_queue_or_a_stream() -> None:
    async def test(bench: Bench) -> None:
        bench.runner.gate.clear()
        streaming = bench.chat("gone", stream=True)
        await until(bench.runner.stepping.is_set)
        queued = bench.chat("queued")
        await until(lambda: bench.engine.load()["waiting"] == 1)
        queued.leave()
        await queued.task
        assert bench.engine.load()["waiting"] == 0
        bench.runner.gate.set()
        await streaming.begun.wait()
        streaming.leave()
        await streaming.task
        await until(lambda: bench.engine.load()["running"] == 0)
        assert bench.runner.started == [b"gone"]

    runner = FakeRunner(slots=1)
    runner.says[b"gone"] = b"x" * 50
    run(test, runner)


def test_a_failing_step_ends_its_requests_and_nothing_else() -> None:
    async def test(bench: Bench) -> None:
        bench.runner.gate.clear()
        bench.runner.problem = EngineBroken("llama_decode returned -3")
        victims = [bench.chat("a"), bench.chat("b", stream=True)]
        await until(bench.runner.stepping.is_set)
        bench.runner.gate.set()
        await until(lambda: bench.runner.resets)
        bench.runner.problem = None
        for reply in victims:
            await bench.done(reply)
        failed = [reply for reply in victims if reply.status == 500]
        assert failed and all(reply.json["error"]["code"] == "engine_error" for reply in failed)
        assert "llama_decode" not in failed[0].body.decode()
        assert (await bench.done(bench.chat())).status == 200

    run(test)


def test_a_failure_in_mid_stream_is_an_event_and_no_end_mark() -> None:
    async def test(bench: Bench) -> None:
        bench.runner.says[b"hi"] = b"x" * 50
        reply = bench.chat(stream=True)
        await reply.begun.wait()
        bench.runner.problem = EngineBroken("boom")
        await reply.task
        bench.runner.problem = None
        assert reply.status == 200
        assert set(reply.events[-1]) == {"error"} and b"[DONE]" not in reply.body
        assert reply.messages[-1]["more_body"] is False

    runner = FakeRunner()
    step = runner.step

    def slow_step() -> list[tuple[int, int]]:
        threading.Event().wait(0.005)  # the answer must still be running when the runner breaks
        return step()

    runner.step = slow_step  # type: ignore[method-assign]
    run(test, runner)


def test_an_engine_that_keeps_failing_gives_up() -> None:
    async def test(bench: Bench) -> None:
        bench.runner.problem = EngineBroken("boom")
        for _ in range(3):
            assert (await bench.done(bench.chat())).status == 500
        with pytest.raises(EngineBroken, match="3 steps failed"):
            await asyncio.shield(bench.engine.stopped)
        assert bench.runner.closed
        assert (await bench.done(bench.chat())).status == 503

    run(test)


def test_a_refusal_by_the_runner_keeps_its_status() -> None:
    async def test(bench: Bench) -> None:
        reply = await bench.done(bench.chat(seed=666, stream=True, n=3))
        assert (reply.status, reply.json["error"]["param"]) == (400, "seed")
        assert bench.runner.resets == 0
        assert (await bench.done(bench.chat())).status == 200

    run(test)


def test_failing_embeddings_reach_the_caller() -> None:
    async def test(bench: Bench) -> None:
        bench.runner.problem = EngineBroken("boom")
        assert (await bench.done(bench.ask("/v1/embeddings", {"input": "a"}))).status == 500
        bench.runner.problem = invalid("not this model", "input")
        assert (await bench.done(bench.ask("/v1/embeddings", {"input": "a"}))).status == 400
        assert bench.runner.resets == 1

    run(test)


def test_closing_leaves_nobody_waiting() -> None:
    async def test(bench: Bench) -> None:
        bench.runner.gate.clear()
        replies = [bench.chat("a"), bench.chat("b")]
        await until(bench.runner.stepping.is_set)
        bench.engine.close()
        bench.runner.gate.set()
        for reply in replies:
            assert (await bench.done(reply)).status in (200, 503)
        await bench.engine.stopped
        assert bench.runner.closed

    runner = FakeRunner(slots=1)
    runner.says[b"a"] = b"x" * 50
    run(test, runner)


def test_bodies_that_are_not_requests() -> None:
    async def test(bench: Bench) -> None:
        for body in (b"", b"{", b"[]", b'"x"', b"\xff"):
            reply = await bench.done(bench.ask("/v1/chat/completions", body))
            assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")
        assert (await bench.done(bench.chat(""))).status == 400
        assert (await bench.get("/nope")).json["error"]["code"] == "unknown_url"
        assert (await bench.get("/v1/chat/completions")).status == 405

    run(test)
