"""The same requests to every real engine through a real gateway. Where one differs from the others, its case says so.

The last tests ask engines without the gateway and hold the doubles to what they answer: a difference there is a bug in
the double.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import math
import re
import struct
import time
from collections.abc import Callable, Iterable
from typing import Any

import openai
import pytest

from tests.doubles.dialects import DIALECTS, UPSTREAM_MODEL, USAGE
from tests.e2e.harness import eventually, together
from tests.e2e.wire import Answer, parse
from tests.engines.real import CHATTING, CONTEXT, EMBEDDING, KEY, KINDS, Fleet, RealEngine, settles

pytestmark = [pytest.mark.engines, pytest.mark.timeout(420)]  # the first test of an engine waits for its start

HELLO: Any = [{"role": "user", "content": "Say hello."}]
STORY: Any = [{"role": "user", "content": "Tell me a very long story about a river."}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "seed": 1}
EMOJI = "🎭🦊 naïve 漢字"

every = pytest.mark.parametrize("engine", CHATTING, indirect=True)


def only(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("engine", names, indirect=True)


def able(capability: str) -> pytest.MarkDecorator:
    """Engines that can do it."""
    return only(*(name for name in CHATTING if capability in KINDS[name].capabilities))


def unable(capability: str) -> pytest.MarkDecorator:
    return only(*(name for name in CHATTING if capability not in KINDS[name].capabilities))


def name_of(engine: RealEngine) -> str:
    return engine.kind.public


def refused(ask: Callable[[], Any]) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        ask()
    return caught.value


def text_of(chunks: Iterable[Any]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def finishes(chunks: Iterable[Any]) -> list[str]:
    return [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]


# --- chat
@every
def test_a_plain_answer_has_everything_the_sdk_reads(engine: RealEngine, sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(model=name_of(engine), messages=HELLO, **GREEDY)
    choice = answer.choices[0]
    assert answer.object == "chat.completion" and answer.id and answer.model == name_of(engine)
    assert choice.message.role == "assistant" and choice.message.content and choice.index == 0
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None and answer.usage.prompt_tokens > 5 and 0 < answer.usage.completion_tokens <= 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@every
def test_a_stream_is_the_plain_answer_in_pieces_without_usage(engine: RealEngine, sdk: openai.OpenAI) -> None:
    whole = sdk.chat.completions.create(model=name_of(engine), messages=HELLO, **GREEDY)
    chunks = list(sdk.chat.completions.create(model=name_of(engine), messages=HELLO, stream=True, **GREEDY))
    assert text_of(chunks) == whole.choices[0].message.content
    assert finishes(chunks) == [whole.choices[0].finish_reason]
    assert {chunk.model for chunk in chunks} == {name_of(engine)} and len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.choices for chunk in chunks), "a chunk without choices reached a client that did not ask for usage"
    assert [chunk.usage for chunk in chunks if chunk.usage] == []


@every
def test_usage_comes_last_for_those_who_ask(engine: RealEngine, sdk: openai.OpenAI) -> None:
    whole = sdk.chat.completions.create(model=name_of(engine), messages=HELLO, **GREEDY)
    *chunks, last = sdk.chat.completions.create(
        model=name_of(engine), messages=HELLO, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    assert last.choices == [] and last.usage is not None and whole.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )
    assert [chunk.usage for chunk in chunks if chunk.usage] == [] and len(finishes(chunks)) == 1


def cut_at(engine: RealEngine, sdk: openai.OpenAI, find: Callable[[str], str]) -> None:
    """Asks again with a piece of the answer as a stop sequence, plain and streamed."""
    ask: dict[str, Any] = {"model": name_of(engine), "messages": HELLO, **GREEDY}
    text = sdk.chat.completions.create(**ask).choices[0].message.content or ""
    stop = find(text)
    before = text[: text.index(stop)]
    cut = sdk.chat.completions.create(stop=[stop], **ask).choices[0]
    assert (cut.message.content, cut.finish_reason) == (before, "stop")
    chunks = list(sdk.chat.completions.create(stop=stop, stream=True, **ask))
    assert (text_of(chunks), finishes(chunks)) == (before, ["stop"])


@every
def test_a_word_as_a_stop_sequence(engine: RealEngine, sdk: openai.OpenAI) -> None:
    cut_at(engine, sdk, lambda text: re.findall(r" [a-z]{2,}", text)[1])


MLX_CUTS_OUT = "MLX LM takes a stop sequence that is not made of whole tokens out of the text and goes on"


@pytest.mark.parametrize(
    "engine",
    [pytest.param(name, marks=pytest.mark.xfail(name == "mlx", reason=MLX_CUTS_OUT)) for name in CHATTING],
    indirect=True,
)
def test_a_stop_sequence_across_tokens(engine: RealEngine, sdk: openai.OpenAI) -> None:
    cut_at(engine, sdk, lambda text: text[8:11])


@every
def test_the_limit_of_tokens_ends_an_answer(engine: RealEngine, sdk: openai.OpenAI) -> None:
    for field in ("max_tokens", "max_completion_tokens"):
        limit: Any = {field: 3}
        answer = sdk.chat.completions.create(model=name_of(engine), messages=STORY, temperature=0, **limit)
        assert answer.choices[0].finish_reason == "length", field
        assert answer.usage is not None and answer.usage.completion_tokens == 3, field


@every
def test_fields_that_are_no_part_of_openais_api_are_taken(engine: RealEngine, sdk: openai.OpenAI) -> None:
    extra = {"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
    answer = sdk.chat.completions.create(
        model=name_of(engine), messages=HELLO, temperature=0.8, seed=7, max_tokens=8, user="u-1", extra_body=extra
    )
    assert answer.choices[0].message.content


@every
def test_a_seed_repeats_an_answer(engine: RealEngine, sdk: openai.OpenAI) -> None:
    first, second = (
        sdk.chat.completions.create(model=name_of(engine), messages=STORY, temperature=1.2, seed=7, max_tokens=12)
        for _ in range(2)
    )
    assert first.choices[0].message.content == second.choices[0].message.content


@every
def test_characters_of_several_tokens_are_whole(engine: RealEngine, sdk: openai.OpenAI) -> None:
    """The model repeats badly, so what it says is compared with itself; only the very last character may be a half."""
    ask: dict[str, Any] = {
        "model": name_of(engine),
        "messages": [{"role": "user", "content": f"Repeat exactly: {EMOJI} 😀😀😀😀"}],
        "temperature": 0,
        "max_tokens": 48,
    }
    whole = sdk.chat.completions.create(**ask).choices[0].message.content or ""
    streamed = text_of(sdk.chat.completions.create(stream=True, **ask))
    assert streamed == whole and "\ufffd" not in whole.rstrip("\ufffd")


@able("json_schema")
def test_emoji_through_a_schema(engine: RealEngine, sdk: openai.OpenAI) -> None:
    """The one way to make a small model say them: it may say nothing else."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [EMOJI]}}}
    chunks = list(sdk.chat.completions.create(
        model=name_of(engine), messages=HELLO, response_format=form, stream=True, max_tokens=80, temperature=0
    ))  # fmt: skip
    assert json.loads(text_of(chunks)) == EMOJI and finishes(chunks) == ["stop"]


@every
def test_two_streams_at_once(engine: RealEngine, sdk: openai.OpenAI) -> None:
    def tell(about: str) -> tuple[str, list[str]]:
        messages: Any = [{"role": "user", "content": f"Tell me about {about}."}]
        chunks = list(sdk.chat.completions.create(
            model=name_of(engine), messages=messages, stream=True, temperature=0, max_tokens=30
        ))  # fmt: skip
        return text_of(chunks), finishes(chunks)

    (first, first_end), (second, second_end) = together([lambda: tell("Paris"), lambda: tell("the moon")])
    assert first and second and first != second and len(first_end) == len(second_end) == 1


# --- other operations
@every
def test_completions_plain_and_stream(engine: RealEngine, sdk: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": name_of(engine), "prompt": "The sky is", "max_tokens": 8, "temperature": 0}
    answer = sdk.completions.create(**ask)
    assert answer.object == "text_completion" and answer.model == name_of(engine) and answer.choices[0].text
    assert answer.usage is not None and answer.usage.completion_tokens == 8
    chunks = list(sdk.completions.create(stream=True, **ask))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == answer.choices[0].text
    assert finishes(chunks) == [answer.choices[0].finish_reason] == ["length"]
    assert {chunk.model for chunk in chunks} == {name_of(engine)}
    with_usage = list(sdk.completions.create(stream=True, stream_options={"include_usage": True}, **ask))
    told = [chunk.usage for chunk in with_usage if chunk.usage is not None]
    assert [usage.completion_tokens for usage in told] == [8]


@pytest.mark.parametrize("engine", EMBEDDING, indirect=True)
def test_embeddings_in_both_forms(engine: RealEngine, sdk: openai.OpenAI) -> None:
    texts = ["A cat sits on the mat.", "A cat is sitting on a mat.", "Quarterly revenue grew."]
    floats = sdk.embeddings.create(model=name_of(engine), input=texts, encoding_format="float")
    vectors = [entry.embedding for entry in floats.data]
    assert floats.model == name_of(engine) and floats.usage.prompt_tokens > 10
    assert [entry.index for entry in floats.data] == [0, 1, 2] and {len(vector) for vector in vectors} == {576}

    def alike(a: list[float], b: list[float]) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))

    assert alike(vectors[0], vectors[1]) > alike(vectors[0], vectors[2])
    packed: Any = sdk.embeddings.create(model=name_of(engine), input=texts[0], encoding_format="base64").data[0]
    given = packed.embedding
    unpacked = list(struct.unpack("<576f", base64.b64decode(given))) if isinstance(given, str) else given
    assert alike(unpacked, vectors[0]) > 0.999
    by_default = sdk.embeddings.create(model=name_of(engine), input=texts[0]).data[0].embedding  # base64 on the wire
    assert alike(by_default, vectors[0]) > 0.999


@only("vllm", "mlx")
def test_embeddings_of_an_engine_without_them(engine: RealEngine, sdk: openai.OpenAI) -> None:
    error = refused(lambda: sdk.embeddings.create(model=name_of(engine), input="a"))
    assert (error.status_code, error.code) == (400, "unsupported_value")


@able("json_schema")
def test_a_schema_holds(engine: RealEngine, sdk: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}, "sure": {"type": "boolean"}},
        "required": ["colour", "sure"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    question: Any = [{"role": "user", "content": "What colour is grass? Answer as JSON."}]
    answer = sdk.chat.completions.create(
        model=name_of(engine), messages=question, response_format=form, max_tokens=80, temperature=0
    )
    value = json.loads(answer.choices[0].message.content or "")
    assert value["colour"] in ("red", "green") and isinstance(value["sure"], bool) and len(value) == 2


@only("mlx")
def test_a_schema_that_would_not_hold_is_refused(engine: RealEngine, sdk: openai.OpenAI) -> None:
    """Only where the adapter knows: behind `openai_compatible` nobody can tell that it is ignored."""
    if engine.kind.backend == "openai_compatible":
        pytest.skip("there is no adapter of its own for MLX LM")
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    error = refused(
        lambda: sdk.chat.completions.create(model="mlx", messages=HELLO, response_format=form, max_tokens=8)
    )
    assert (error.status_code, error.code, error.param) == (400, "unsupported_value", "response_format")


TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Today's weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]
WEATHER: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


@able("tools")
def test_tools_are_taken_and_calls_well_formed(engine: RealEngine, sdk: openai.OpenAI) -> None:
    """Whether so small a model calls one is chance; that the request passes and a call is whole is not."""
    ask: dict[str, Any] = {"model": name_of(engine), "messages": WEATHER, "tools": TOOLS, "temperature": 0}
    answer = sdk.chat.completions.create(max_tokens=40, **ask).choices[0]
    chunks = list(sdk.chat.completions.create(max_tokens=40, stream=True, **ask))
    assert answer.finish_reason in ("stop", "length", "tool_calls") and finishes(chunks) == [answer.finish_reason]
    for call in answer.message.tool_calls or ():
        assert call.type == "function" and call.function.name == "weather" and json.loads(call.function.arguments)


@able("named_tool")
def test_a_named_tool_is_called(engine: RealEngine, sdk: openai.OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": name_of(engine), "messages": WEATHER, "tools": TOOLS, "temperature": 0, "max_tokens": 60,
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    }  # fmt: skip
    (call,) = sdk.chat.completions.create(**ask).choices[0].message.tool_calls or [None]
    assert call.function.name == "weather" and json.loads(call.function.arguments)
    chunks = list(sdk.chat.completions.create(stream=True, **ask))
    pieces = [piece for chunk in chunks for choice in chunk.choices for piece in choice.delta.tool_calls or ()]
    assert {piece.index for piece in pieces} == {0}
    assert [piece.function.name for piece in pieces if piece.function and piece.function.name] == ["weather"]
    arguments = "".join(piece.function.arguments or "" for piece in pieces if piece.function)
    assert arguments == call.function.arguments


@unable("tools")
def test_tools_of_an_engine_without_them(engine: RealEngine, sdk: openai.OpenAI) -> None:
    error = refused(lambda: sdk.chat.completions.create(model=name_of(engine), messages=WEATHER, tools=TOOLS))
    assert error.status_code == 400 and error.param == "tools"


@able("n")
def test_two_choices(engine: RealEngine, sdk: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": name_of(engine), "messages": STORY, "n": 2, "max_tokens": 6, "temperature": 1}
    assert [choice.index for choice in sdk.chat.completions.create(**ask).choices] == [0, 1]
    chunks = list(sdk.chat.completions.create(stream=True, **ask))
    assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1} and len(finishes(chunks)) == 2


@able("logprobs")
def test_logprobs(engine: RealEngine, sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model=name_of(engine), messages=HELLO, logprobs=True, top_logprobs=2, max_tokens=3, temperature=0
    )
    found = answer.choices[0].logprobs
    assert found is not None and found.content is not None and len(found.content) == 3
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in found.content)


# --- what is wrong with a request
@every
def test_an_unknown_model_is_the_gateways_own_answer(engine: RealEngine, sdk: openai.OpenAI) -> None:
    error = refused(lambda: sdk.chat.completions.create(model=f"{name_of(engine)}-2", messages=HELLO))
    assert (error.status_code, error.code, error.param) == (404, "model_not_found", "model")


@every
def test_a_prompt_that_does_not_fit(engine: RealEngine, sdk: openai.OpenAI) -> None:
    if not engine.kind.context_is_checked:
        pytest.skip(f"{name_of(engine)} knows no limit of its own")
    messages: Any = [{"role": "user", "content": "word " * (CONTEXT + 500)}]
    for stream in (False, True):
        error = refused(
            lambda stream=stream: list(
                sdk.chat.completions.create(model=name_of(engine), messages=messages, max_tokens=4, stream=stream)
            )
        )
        assert (error.status_code, error.code, error.type) == (400, "context_length_exceeded", "invalid_request_error")


@every
def test_a_limit_of_tokens_beyond_the_context(engine: RealEngine, sdk: openai.OpenAI) -> None:
    """vLLM and the embedded engine refuse as OpenAI does, the others give what there is room for: either is an answer,
    and never a failure."""
    ask: dict[str, Any] = {"model": name_of(engine), "messages": HELLO, "temperature": 0, "max_tokens": 100_000}
    if name_of(engine) in ("vllm", "embedded"):
        error = refused(lambda: sdk.chat.completions.create(**ask))
        assert (error.status_code, error.code) == (400, "context_length_exceeded")
    else:
        assert sdk.chat.completions.create(**ask, stop=[".", "!"]).choices[0].finish_reason in ("stop", "length")


@every
def test_a_parameter_of_the_wrong_type(engine: RealEngine, sdk: openai.OpenAI) -> None:
    error = refused(
        lambda: sdk.chat.completions.create(
            model=name_of(engine), messages=HELLO, max_tokens=4, extra_body={"temperature": "hot"}
        )
    )
    assert (error.status_code, error.type) == (400, "invalid_request_error") and "temperature" in error.message
    assert error.param in ("temperature", None)
    # And it is not held against the replica.
    assert sdk.chat.completions.create(model=name_of(engine), messages=HELLO, max_tokens=2).choices


@every
def test_a_wrong_message(engine: RealEngine, sdk: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": 5}]
    error = refused(lambda: sdk.chat.completions.create(model=name_of(engine), messages=messages, max_tokens=2))
    assert error.status_code == 400 and error.type == "invalid_request_error"


# --- load, health, accounts
def running(engine: RealEngine, fleet: Fleet) -> Callable[[], int | None]:
    """How many requests the engine says it works on; embedded engines say it to the gateway's probe."""
    if engine.process is None:
        return lambda: fleet.state_of(name_of(engine))["engine"]["running"]

    def ask() -> int | None:
        load = engine.load()
        return None if load is None else load.running

    return ask


@every
def test_a_client_that_leaves_ends_the_work(engine: RealEngine, sdk: openai.OpenAI, fleet: Fleet) -> None:
    before = fleet.booked()
    stream = sdk.chat.completions.create(
        model=name_of(engine), messages=STORY, stream=True, temperature=0, max_tokens=CONTEXT - 200,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    for _ in itertools.islice(stream, 3):
        pass
    if engine.backend.probes.load is None:
        stream.close()
        assert eventually(lambda: not engine.is_computing(), 10), "it goes on without a reader"
    else:
        count = running(engine, fleet)
        assert eventually(lambda: count() == 1, 10), f"its load said {count()} while it was at work"
        stream.close()
        left = time.monotonic()
        assert settles(count, 0, 8) == 0
        assert time.monotonic() - left < 7  # the whole answer would take longer on any of them
    assert settles(lambda: fleet.gateway.metric("sekisho_inflight_requests"), 0) == 0
    assert eventually(lambda: fleet.booked()[1] > before[1]), "leaving early was free"
    assert sdk.chat.completions.create(model=name_of(engine), messages=HELLO, max_tokens=2).choices


@every
def test_its_state_is_known(engine: RealEngine, fleet: Fleet) -> None:
    assert fleet.gateway.http.get("/ready").json() == {"status": "ready"}
    state = fleet.state_of(name_of(engine))
    assert (state["health"], state["routable"], state["backend"]) == ("up", True, engine.kind.backend)
    if engine.backend.probes.load is None:
        assert state["engine"]["running"] is None  # unknown, which is not zero
    else:
        assert eventually(lambda: fleet.state_of(name_of(engine))["engine"]["running"] == 0, 10)
        assert fleet.state_of(name_of(engine))["engine"]["waiting"] == 0
    if name_of(engine) in ("vllm", "embedded"):
        assert 0 <= fleet.state_of(name_of(engine))["engine"]["kv_used"] <= 1


@every
def test_what_is_booked_is_what_the_engine_counted(engine: RealEngine, sdk: openai.OpenAI, fleet: Fleet) -> None:
    ask: dict[str, Any] = {"model": name_of(engine), "messages": HELLO, **GREEDY}
    before = fleet.booked()
    usage = sdk.chat.completions.create(**ask).usage
    assert usage is not None
    once = (before[0] + usage.prompt_tokens, before[1] + usage.completion_tokens)
    assert settles(fleet.booked, once) == once
    for _ in sdk.chat.completions.create(stream=True, **ask):  # who does not ask for usage is booked all the same
        pass
    twice = (once[0] + usage.prompt_tokens, once[1] + usage.completion_tokens)
    assert settles(fleet.booked, twice) == twice


@pytest.mark.parametrize("engine", [name for name in KINDS if name != "embedded"], indirect=True)
def test_its_models_are_read(engine: RealEngine) -> None:
    """MLX LM lists what it finds in the user's cache and the model it was started with."""
    cards = engine.backend.read_models(engine.get("/v1/models").content)
    assert engine.name_there in [card.id for card in cards]
    if engine.kind.backend == "vllm":
        assert cards[0].context_length == CONTEXT


# --- the doubles
def manners(body: bytes) -> dict[str, Any]:
    """How a chat stream with usage is worded, without what it says."""
    chunks: list[dict[str, Any]] = [json.loads(event.data) for event in parse(body).events if event.data != "[DONE]"]
    first = next(event.data for event in parse(body).events)
    spoken = [chunk for chunk in chunks if chunk["choices"]]
    deltas = [chunk["choices"][0]["delta"] for chunk in spoken]
    finishing = next(chunk for chunk in spoken if chunk["choices"][0]["finish_reason"])
    usage = [chunk for chunk in chunks if chunk.get("usage")]
    return {
        "line ends": "CRLF" if b"\r\n" in body else "LF",
        "spaces": first.startswith(('{"id": ', '{"choices": ')),
        "role first": deltas[0] if set(deltas[0]) <= {"role", "content"} and not deltas[0].get("content") else None,
        "role everywhere": all("role" in delta for delta in deltas),
        "choices before the name": list(spoken[0]).index("choices") < list(spoken[0]).index("model"),
        "keys of a choice": [key for key in spoken[1]["choices"][0] if key in
                             ("index", "delta", "logprobs", "finish_reason")],
        "text with the finish": bool(finishing["choices"][0]["delta"].get("content")),
        "usage": [("on a choice" if chunk["choices"] else "alone", chunk["object"]) for chunk in usage],
        "usage elsewhere": any("usage" in chunk for chunk in spoken if not chunk.get("usage")),
        "fingerprint": "system_fingerprint" in spoken[0],
        "last": parse(body).events[-1].data,
    }  # fmt: skip


SHORT = GREEDY | {"max_tokens": 4}  # ends by its limit: at its own end vLLM has no text left for the last chunk
doubled = only(*(name for name in CHATTING if KINDS[name].dialect is not None))


@doubled
def test_the_double_streams_chats_like_the_engine(engine: RealEngine) -> None:
    body = {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}, **SHORT}
    dialect = DIALECTS[engine.kind.dialect or ""]
    assert manners(dialect.stream(usage=USAGE)) == manners(engine.post("/v1/chat/completions", body).content)


@doubled
def test_the_double_streams_texts_like_the_engine(engine: RealEngine) -> None:
    body = {"prompt": "The sky is", "stream": True, "stream_options": {"include_usage": True}, **SHORT}

    def wording(stream: bytes) -> dict[str, Any]:
        chunks = [json.loads(event.data) for event in parse(stream).events if event.data != "[DONE]"]
        ending = next(chunk for chunk in chunks if chunk["choices"] and chunk["choices"][0]["finish_reason"])
        usage = [chunk for chunk in chunks if chunk.get("usage")]
        return {
            "objects": {chunk["object"] for chunk in chunks},
            "choices before the name": list(chunks[0]).index("choices") < list(chunks[0]).index("model"),
            "text with the finish": bool(ending["choices"][0]["text"]),
            "usage": ["on a choice" if chunk["choices"] else "alone" for chunk in usage],
        }

    dialect = DIALECTS[engine.kind.dialect or ""]
    real = wording(engine.post("/v1/completions", body).content)
    assert wording(dialect.text_stream(["Hel", "lo"], usage=USAGE)) == real


@doubled
def test_the_double_words_errors_like_the_engine(engine: RealEngine) -> None:
    def shape(body: bytes) -> dict[str, str]:
        document = json.loads(body)
        error = document["error"]
        return {"error": "text"} if isinstance(error, str) else {
            key: type(error[key]).__name__ for key in ("message", "type", "code")
        }  # fmt: skip

    real = engine.post("/v1/chat/completions", {"messages": HELLO, "temperature": "hot"})
    assert real.status_code == 400
    assert shape(DIALECTS[engine.kind.dialect or ""].error("x", 400)) == shape(real.content)


@doubled
def test_the_double_lists_models_like_the_engine(engine: RealEngine) -> None:
    def described(entry: dict[str, Any]) -> dict[str, Any]:
        found = {key: type(entry[key]).__name__ for key in ("id", "object", "created", "max_model_len") if key in entry}
        return found | {"owned_by": entry.get("owned_by"), "meta": sorted(entry.get("meta") or ())}

    real = next(entry for entry in engine.get("/v1/models").json()["data"] if entry["id"] == engine.name_there)
    double = described(DIALECTS[engine.kind.dialect or ""].models([UPSTREAM_MODEL])["data"][0])
    seen = described(real)
    assert set(double.pop("meta")) <= set(seen.pop("meta")) and double == seen


# --- all of them
def test_a_fleet_of_all_engines_under_one_configuration(fleet: Fleet, sdk: openai.OpenAI) -> None:
    present = [name for name, kind in KINDS.items() if kind.missing() is None]
    if len(present) < 2:
        pytest.skip("fewer than two engines are installed")
    for name in present:
        fleet.get(name)
    assert {model.id for model in sdk.models.list()} == set(present)
    talking = [name for name in present if "chat" in KINDS[name].operations]

    def ask(name: str) -> tuple[str, str, list[str]]:
        with contextlib.closing(
            sdk.chat.completions.create(model=name, messages=HELLO, stream=True, **GREEDY)
        ) as stream:
            chunks = list(stream)
        return chunks[0].model, text_of(chunks), finishes(chunks)

    answers = together([lambda name=name: ask(name) for name in talking])
    for name, (model, text, ends) in zip(talking, answers, strict=True):
        assert model == name and text and len(ends) == 1, (name, text, ends)
    with fleet.gateway.wire() as wire:
        body = {"model": "nobody", "messages": HELLO}
        answer: Answer = wire.ask("POST", "/v1/chat/completions", body, key=KEY).rest()
    assert answer.status == 404 and answer.error()["code"] == "model_not_found"
    assert all(entry["health"] == "up" and entry["inflight"] == 0 for entry in fleet.gateway.replicas())
