"""The official SDK against the gateway: what an ordinary user's program sees."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import openai
import pytest

from tests.doubles.dialects import NAMED, USAGE
from tests.doubles.engine import VECTORS, Exchange
from tests.e2e.harness import Lab, eventually, replica

HELLO: Any = [{"role": "user", "content": "Say hello."}]


@pytest.fixture
def sdk(lab: Lab) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{lab.gateway.port}/v1"
    with openai.OpenAI(base_url=url, api_key=lab.key, max_retries=0, timeout=30) as client:
        yield client


def in_async(lab: Lab, work: Callable[[openai.AsyncOpenAI], Any]) -> Any:
    """Runs `work` with an asynchronous client."""

    async def run() -> Any:
        url = f"http://127.0.0.1:{lab.gateway.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=lab.key, max_retries=0, timeout=30) as client:
            return await work(client)

    return asyncio.run(run())


@pytest.mark.parametrize("dialect", NAMED)
def test_chat_plain(lab: Lab, sdk: openai.OpenAI, dialect: str) -> None:
    lab.one(dialect)
    answer = sdk.chat.completions.create(model="m", messages=HELLO)
    assert answer.choices[0].message.content == "Hello, world"
    assert answer.model == "m" and answer.usage is not None and answer.usage.total_tokens == USAGE["total_tokens"]
    assert answer._request_id


@pytest.mark.parametrize("dialect", NAMED)
def test_chat_stream(lab: Lab, sdk: openai.OpenAI, dialect: str) -> None:
    lab.one(dialect)
    chunks = list(sdk.chat.completions.create(model="m", messages=HELLO, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello, world"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert {chunk.model for chunk in chunks} == {"m"}


def test_chat_stream_with_usage(lab: Lab, sdk: openai.OpenAI) -> None:
    lab.one()
    *_, last = sdk.chat.completions.create(
        model="m", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == USAGE["completion_tokens"]


def test_async_chat_plain_and_stream_side_by_side(lab: Lab) -> None:
    lab.one()

    async def work(client: openai.AsyncOpenAI) -> tuple[str, str]:
        async def streamed() -> str:
            stream = await client.chat.completions.create(model="m", messages=HELLO, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        plain, text = await asyncio.gather(client.chat.completions.create(model="m", messages=HELLO), streamed())
        return plain.choices[0].message.content or "", text

    assert in_async(lab, work) == ("Hello, world", "Hello, world")


def test_async_program_that_loses_interest_frees_the_engine(lab: Lab) -> None:
    def endless(x: Exchange) -> None:
        x.begin()
        x.delta("a")
        x.wait()

    engine = lab.one(script=endless)

    async def work(client: openai.AsyncOpenAI) -> None:
        stream = await client.chat.completions.create(model="m", messages=HELLO, stream=True)
        chunks: AsyncIterator[Any] = aiter(stream)
        await anext(chunks)
        await stream.close()

    in_async(lab, work)
    assert engine.last().gone.wait(20) and lab.at_rest()


def test_completions_plain_and_stream(lab: Lab, sdk: openai.OpenAI) -> None:
    lab.one()
    answer = sdk.completions.create(model="m", prompt="Say")
    assert answer.choices[0].text == "Hello, world" and answer.model == "m"
    chunks = list(sdk.completions.create(model="m", prompt="Say", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_embeddings_as_the_sdk_asks_by_default(lab: Lab, sdk: openai.OpenAI) -> None:
    """The SDK asks for base64 and decodes it, while the engine knows only lists."""
    engine = lab.one()
    answer = sdk.embeddings.create(model="m", input=["a", "b"])
    assert engine.last().json()["encoding_format"] == "base64"
    assert [entry.embedding for entry in answer.data] == VECTORS and [entry.index for entry in answer.data] == [0, 1]
    assert answer.usage.prompt_tokens == 4


def test_embeddings_in_both_forms_by_name(lab: Lab, sdk: openai.OpenAI) -> None:
    lab.one()
    floats = sdk.embeddings.create(model="m", input="a", encoding_format="float")
    packed: Any = sdk.embeddings.create(model="m", input="a", encoding_format="base64").data[0].embedding
    assert floats.data[0].embedding == VECTORS[0]
    assert list(struct.unpack("<4f", base64.b64decode(packed))) == VECTORS[0]


def test_models_list_and_retrieve(lab: Lab, sdk: openai.OpenAI) -> None:
    engine = lab.engine()
    lab.serve({"org/model-a": [replica(engine)], "qwen3:8b": [replica(engine)]})
    assert [model.id for model in sdk.models.list()] == ["org/model-a", "qwen3:8b"]
    assert sdk.models.retrieve("org/model-a").id == "org/model-a"
    assert sdk.models.retrieve("qwen3:8b").object == "model"
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("org/other")


# --- errors: each status the gateway gives, as the exception a program catches
def test_wrong_key(lab: Lab) -> None:
    lab.one()
    with (
        openai.OpenAI(base_url=f"http://127.0.0.1:{lab.gateway.port}/v1", api_key="sk-wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        client.chat.completions.create(model="m", messages=HELLO)
    assert caught.value.code == "invalid_api_key" and caught.value.type == "invalid_request_error"


def test_wrong_model(lab: Lab, sdk: openai.OpenAI) -> None:
    lab.one()
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.chat.completions.create(model="other", messages=HELLO)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_limits_are_rate_limit_errors_with_a_hint_when_to_come_back(lab: Lab, sdk: openai.OpenAI) -> None:
    engine = lab.engine()
    lab.serve({"m": [replica(engine)]}, limits={"requests": "1/min"})
    sdk.chat.completions.create(model="m", messages=HELLO)
    with pytest.raises(openai.RateLimitError) as caught:
        sdk.chat.completions.create(model="m", messages=HELLO)
    assert caught.value.code == "rate_limit_exceeded" and 1 <= int(caught.value.response.headers["retry-after"]) <= 61


ENGINE_ERRORS: list[tuple[int, str, type[openai.APIStatusError], str]] = [
    (400, "temperature must be non-negative", openai.BadRequestError, "invalid_value"),
    (400, "This model's maximum context length is 2048 tokens", openai.BadRequestError, "context_length_exceeded"),
    (401, "Unauthorized", openai.InternalServerError, "engine_error"),
    (403, "Forbidden", openai.InternalServerError, "engine_error"),
    (409, "conflict", openai.ConflictError, "invalid_value"),
    (422, "one validation error", openai.UnprocessableEntityError, "invalid_value"),
    (429, "slow down", openai.RateLimitError, "engine_busy"),
    (500, "the engine has a bug", openai.InternalServerError, "engine_error"),
    (501, "not implemented", openai.BadRequestError, "unsupported_value"),
    (503, "starting", openai.InternalServerError, "engine_error"),
]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize(("status", "message", "exception", "code"), ENGINE_ERRORS)
def test_engine_errors_become_the_exceptions_of_the_sdk(
    lab: Lab, sdk: openai.OpenAI, status: int, message: str, exception: type[openai.APIStatusError], code: str,
    stream: bool,
) -> None:  # fmt: skip
    lab.one(script=lambda x: x.fail(message, status))
    with pytest.raises(exception) as caught:
        sdk.chat.completions.create(model="m", messages=HELLO, stream=stream)
    assert type(caught.value) is exception and caught.value.code == code and caught.value.request_id


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_an_engine_that_is_not_there_is_a_503(lab: Lab, sdk: openai.OpenAI, stream: bool) -> None:
    engine = lab.one()
    engine.stop()
    with pytest.raises(openai.InternalServerError) as caught:
        sdk.chat.completions.create(model="m", messages=HELLO, stream=stream)
    assert caught.value.status_code == 503 and caught.value.response.headers["retry-after"]


def test_a_body_beyond_the_limit_is_a_413(lab: Lab, sdk: openai.OpenAI) -> None:
    lab.serve({"m": [replica(lab.engine())]}, server={"max_body": "64KiB"})
    with pytest.raises(openai.APIStatusError) as caught:
        sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 100_000}])
    assert caught.value.status_code == 413


def test_a_stream_that_breaks_raises_in_the_sdk(lab: Lab, sdk: openai.OpenAI) -> None:
    """A bare close would look like a normal end to the SDK; the error event does not."""

    def breaks(x: Exchange) -> None:
        x.begin()
        x.role()
        x.delta("The answer")
        x.half_chunk()

    lab.one(script=breaks)
    seen: list[str | None] = []
    stream = sdk.chat.completions.create(model="m", messages=HELLO, stream=True)
    with pytest.raises(openai.APIError) as caught:
        seen.extend(chunk.choices[0].delta.content for chunk in stream)
    assert seen == ["", "The answer"] and caught.value.code == "engine_connection_lost"


# --- tools
def fragments(call: int, id_: str, name: str, arguments: str) -> list[dict[str, Any]]:
    """One tool call as engines stream it: id and name first, then three characters at a time."""
    first = {"index": call, "id": id_, "type": "function", "function": {"name": name, "arguments": ""}}
    pieces = [arguments[place : place + 3] for place in range(0, len(arguments), 3)]
    return [{"tool_calls": [first]}] + [
        {"tool_calls": [{"index": call, "function": {"arguments": piece}}]} for piece in pieces
    ]


ARGUMENTS = ('{"city": "Zürich 🎭", "days": [1, 2]}', '{"query": "data: [DONE]\\n\\n"}')


@pytest.mark.parametrize("dialect", NAMED)
def test_interleaved_tool_calls_accumulate_in_the_sdk(lab: Lab, sdk: openai.OpenAI, dialect: str) -> None:
    first, second = fragments(0, "call_a", "weather", ARGUMENTS[0]), fragments(1, "call_b", "search", ARGUMENTS[1])
    mixed = [piece for pair in zip(first, second, strict=False) for piece in pair]
    mixed += first[len(second) :] + second[len(first) :]
    lab.one(dialect, lambda x: x.stream(mixed, finish="tool_calls"))
    with sdk.chat.completions.stream(model="m", messages=HELLO) as stream:
        final = stream.get_final_completion()
    calls: Any = final.choices[0].message.tool_calls
    assert [(call.id, call.function.name) for call in calls] == [("call_a", "weather"), ("call_b", "search")]
    assert tuple(call.function.arguments for call in calls) == ARGUMENTS
    assert all(json.loads(call.function.arguments) for call in calls)
    assert final.choices[0].finish_reason == "tool_calls"


def test_tool_calls_sent_whole_pass_as_they_are(lab: Lab, sdk: openai.OpenAI) -> None:
    call = {"index": 0, "id": "call_a", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS[0]}}
    lab.one("openai_compatible", lambda x: x.stream([{"tool_calls": [call]}], finish="tool_calls"))
    with sdk.chat.completions.stream(model="m", messages=HELLO) as stream:
        calls: Any = stream.get_final_completion().choices[0].message.tool_calls
    assert [call.function.arguments for call in calls] == [ARGUMENTS[0]]


def test_comments_and_odd_fields_between_chunks_do_not_reach_the_sdk_as_events(lab: Lab, sdk: openai.OpenAI) -> None:
    """`id:`, `retry:` and a bare `data:` make the SDK parse an empty event; ours never leave."""

    def odd(x: Exchange) -> None:
        x.begin()
        for part in (b": ping\n\n", b"id: 7\n\n", b"retry: 3000\n\n", b"data:\n\n", b": ping\n\n", b"event: x\n\n"):
            x.delta("a")
            x.part(part)
        x.delta({}, "stop")
        x.done()

    lab.one(script=odd)
    chunks = list(sdk.chat.completions.create(model="m", messages=HELLO, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "aaaaaa"


def test_our_own_keepalives_do_not_reach_the_sdk_as_events(lab: Lab, sdk: openai.OpenAI) -> None:
    waited = threading.Event()

    def slow(x: Exchange) -> None:
        x.wait(waited)
        x.stream()

    engine = lab.engine(script=slow)
    lab.serve({"m": [replica(engine)]}, server={"keepalive_interval": "200ms"})
    stream = sdk.chat.completions.create(model="m", messages=HELLO, stream=True)  # returns once a comment has come
    waited.set()
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Hello, world"
    assert eventually(lambda: engine.running == 0)
