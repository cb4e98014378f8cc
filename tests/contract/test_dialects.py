"""One suite over all adapters: each engine's double behind the real gateway, the official SDK in front of it.

A caller must not be able to tell engines apart, save by what an engine cannot do, which is a 400 that says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest

import backends
from backends.base import Capability
from tests.doubles.dialects import UPSTREAM_MODEL, USAGE
from tests.doubles.engine import Engine, Exchange, by_bytes
from tests.doubles.kinds import CALLS, KINDS, SCORES, TOKENS, Kind, line, ollama_lines
from tests.e2e.harness import Lab, chat, eventually, replica

HELLO: Any = [{"role": "user", "content": "Say hello."}]
TOOLS: Any = [{"type": "function", "function": {"name": "weather"}}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def engine(lab: Lab, kind: Kind) -> Engine:
    return behind(lab, kind)


def behind(lab: Lab, kind: Kind, **options: Any) -> Engine:
    """The kind's double behind the model `m`. `options`: of its replica."""
    engine = kind.engine()
    lab._engines.append(engine)
    lab.serve({"m": [replica(engine, backend=kind.backend, **options)]})
    return engine


@pytest.fixture
def sdk(lab: Lab) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{lab.gateway.port}/v1"
    with openai.OpenAI(base_url=url, api_key=lab.key, max_retries=0, timeout=30) as client:
        yield client


def can(kind: Kind, *capabilities: Capability) -> bool:
    return backends.load(kind.backend).capabilities >= set(capabilities)


def test_every_kind_has_a_double() -> None:
    assert set(KINDS) == set(backends.kinds()) - {"llamacpp"}  # the embedded engine is tested as it is


# --- chat
def test_chat(engine: Engine, sdk: openai.OpenAI, lab: Lab) -> None:
    answer = sdk.chat.completions.create(model="m", messages=HELLO, max_completion_tokens=5)
    choice = answer.choices[0]
    assert (choice.message.content, choice.message.role, choice.finish_reason) == ("Hello, world", "assistant", "stop")
    assert answer.object == "chat.completion" and answer.model == "m" and answer.id.startswith("chatcmpl-")
    assert answer.usage is not None and answer.usage.total_tokens == USAGE["total_tokens"]
    assert lab.booked(11, 5)
    assert engine.last().json()["model"] == UPSTREAM_MODEL
    assert 5 in _values(engine.last().json())  # the limit, by whatever name


def _values(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for inner in value.values():
            yield from _values(inner)
    else:
        yield value


@pytest.mark.parametrize("asks", [False, True], ids=["without-usage", "with-usage"])
def test_stream(engine: Engine, sdk: openai.OpenAI, lab: Lab, asks: bool) -> None:
    more: Any = {"stream_options": {"include_usage": True}} if asks else {}
    chunks = list(sdk.chat.completions.create(model="m", messages=HELLO, stream=True, **more))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == "Hello, world"
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
    assert choices[0].delta.role == "assistant" and not any(choice.delta.role for choice in choices[1:])
    assert {chunk.model for chunk in chunks} == {"m"} and len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    counted = [chunk for chunk in chunks if chunk.usage is not None]
    assert len(counted) == asks and all(not chunk.choices for chunk in counted)
    assert not asks or (chunks[-1].usage is not None and chunks[-1].usage.total_tokens == USAGE["total_tokens"])
    assert lab.booked(11, 5)


@pytest.mark.parametrize("size", [1, 7])
def test_a_stream_in_small_pieces_is_the_same_stream(kind: Kind, engine: Engine, lab: Lab, size: int) -> None:
    whole = lab.stream()
    text = "naïve 🎭 漢字"

    def script(x: Exchange) -> None:
        kind.begin(x)
        lines = ollama_lines()
        lines[0]["message"]["content"] = text
        stream = b"".join(map(line, lines)) if kind.native else x.dialect.stream([text, "lo, ", "world"])
        for piece in by_bytes(size)(stream):
            x.part(piece)
        kind.stop(x)

    engine.once(script)
    cut = lab.stream()
    assert whole.ended_well() and cut.ended_well()
    assert whole.text() == "Hello, world" and cut.text() == text + "lo, world" and "\ufffd" not in cut.text()
    assert len(whole.events()) == len(cut.events())


def test_completions(engine: Engine, sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(model="m", prompt="Say hello.", max_tokens=5)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Hello, world", "stop")
    assert answer.object == "text_completion" and answer.usage is not None and answer.usage.prompt_tokens == 11
    chunks = list(sdk.completions.create(model="m", prompt="Say hello.", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello"
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]


# --- tools
def called(calls: Sequence[Any] | None) -> list[tuple[str, str, Any]]:
    return [(call.id, call.function.name, json.loads(call.function.arguments)) for call in calls or ()]


def test_tools(engine: Engine, sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(model="m", messages=HELLO, tools=TOOLS)
    assert answer.choices[0].finish_reason == "tool_calls"
    assert called(answer.choices[0].message.tool_calls) == list(CALLS)
    assert engine.last().json()["tools"][0]["function"]["name"] == "weather"


def test_parallel_tool_calls_in_a_stream(engine: Engine, sdk: openai.OpenAI) -> None:
    """Interleaved fragments, whole calls that are all number 0, whole calls without a number: one result."""
    with sdk.chat.completions.stream(model="m", messages=HELLO, tools=TOOLS) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == "tool_calls"
    assert called(final.choices[0].message.tool_calls) == list(CALLS)


def test_a_conversation_with_tool_results_is_understood(kind: Kind, engine: Engine, sdk: openai.OpenAI) -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}]
    messages: Any = [*HELLO, {"role": "assistant", "content": None, "tool_calls": calls},
                     {"role": "tool", "tool_call_id": "c1", "content": "rain"}]  # fmt: skip
    assert sdk.chat.completions.create(model="m", messages=messages, tools=TOOLS).choices
    sent = engine.last().json()["messages"]
    assert sent[2]["content"] == "rain" and len(sent) == 3
    arguments = sent[1]["tool_calls"][0]["function"]["arguments"]
    assert (arguments if kind.native else json.loads(arguments)) == {"city": "Oslo"}


# --- what not every engine can do
def refused(call: Any, field: str, kind: Kind) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        call()
    error: Any = caught.value.body
    assert (error["code"], error["param"]) == ("unsupported_value", field) and kind.backend in error["message"]


def test_json_schema(kind: Kind, engine: Engine, sdk: openai.OpenAI) -> None:
    def ask() -> Any:
        return sdk.chat.completions.create(model="m", messages=HELLO, response_format=FORM)

    if not can(kind, Capability.JSON_SCHEMA):
        refused(ask, "response_format", kind)
        assert not engine.requests
        return
    assert ask().choices
    sent = engine.last().json()
    assert (sent["format"] if kind.native else sent["response_format"]["json_schema"]["schema"]) == SCHEMA


def test_json_object(kind: Kind, engine: Engine, sdk: openai.OpenAI) -> None:
    def ask() -> Any:
        return sdk.chat.completions.create(model="m", messages=HELLO, response_format={"type": "json_object"})

    if not can(kind, Capability.JSON_OBJECT):
        refused(ask, "response_format", kind)
        return
    assert ask().choices
    sent = engine.last().json()
    names = {"tabbyapi": "json", "lmstudio": "json_schema"}
    wanted = names.get(kind.backend, "json_object")
    assert (sent["format"] == "json") if kind.native else (sent["response_format"]["type"] == wanted)


LIMITS: list[tuple[Capability, str, Any]] = [
    (Capability.N, "n", 2), (Capability.TOOL_CHOICE, "tool_choice", "required"),
    (Capability.LOGIT_BIAS, "logit_bias", {"1": 5}), (Capability.LOGPROBS, "logprobs", True),
]  # fmt: skip


@pytest.mark.parametrize(("capability", "field", "value"), LIMITS, ids=[field for _, field, _ in LIMITS])
def test_what_cannot_be_honoured_is_refused_by_name(
    kind: Kind, engine: Engine, lab: Lab, capability: Capability, field: str, value: Any
) -> None:
    answer = lab.chat(tools=TOOLS, **{field: value})
    if can(kind, capability):
        assert answer.status == 200
        assert kind.native or engine.last().json()[field] == value
        return
    error = answer.error()
    assert (answer.status, error["code"], error["param"]) == (400, "unsupported_value", field)
    assert kind.backend in error["message"] and not engine.requests
    assert all(state["failures_in_a_row"] == 0 for state in lab.gateway.replicas())


DANGERS: dict[str, dict[str, Any]] = {
    "vllm": {"kv_transfer_params": {"remote_host": "x"}, "cache_salt": "other", "priority": -5, "session_id": "x"},
    "sglang": {"bootstrap_host": "x", "bootstrap_room": 1, "rid": "other", "extra_key": "x", "cache_salt": "other",
               "session_id": "x"},
    "llama_server": {"id_slot": 0, "sse_ping_interval": 0, "verbose": True, "return_tokens": True,
                     "response_fields": ["x"], "n_probs": 5},
    "ollama": {"keep_alive": 0, "options": {"num_gpu": 0, "num_ctx": 64, "num_thread": 1, "top_k": 5}},
    "tabbyapi": {"logging": {"log_prompt": True}},
    "mlx_lm": {"role_mapping": {"user": "x"}, "num_draft_tokens": 3},
    "lmstudio": {"ttl": 1},
    "tensorrt_llm": {"cache_salt": "other", "priority": 1.0},
    "openai_compatible": {},
}  # fmt: skip
CODE: dict[str, dict[str, Any]] = {
    "vllm": {"chat_template": "{{ x }}", "logits_processors": ["os.system"], "regex": "a"},
    "sglang": {"custom_logit_processor": "x", "lora_path": "/etc", "input_ids": [1], "structured_outputs": {}},
    "llama_server": {"lora": [{"id": 0, "scale": 1}], "guided_json": {}},
    "ollama": {"template": "x", "grammar": "root ::= x", "structured_outputs": {"regex": "x"}},
    "tabbyapi": {"guided_regex": "x"},
    "mlx_lm": {"adapters": "/srv/x", "draft_model": "org/any", "grammar": "x"},
    "lmstudio": {"draft_model": "x", "guided_json": {}},
    "tensorrt_llm": {"lora_request": {"path": "/x"}, "chat_template": "x", "guided_json": {}, "future_field": 1},
    "openai_compatible": {},
}


def test_options_that_are_nobodys_business_but_the_operators_never_arrive(
    kind: Kind, engine: Engine, lab: Lab
) -> None:
    given = DANGERS[kind.backend]
    assert lab.chat(**given).status == 200
    sent = engine.last().json()
    assert sent.get("cache_salt") != "other"  # the tenant's own is the gateway's doing
    assert not (given.keys() - {"options", "cache_salt"}) & sent.keys()
    assert set(sent.get("options", {})) <= {"top_k"}


def test_code_files_and_unknown_constraints_are_refused(kind: Kind, engine: Engine, lab: Lab) -> None:
    for field, value in CODE[kind.backend].items():
        answer = lab.chat(**{field: value})
        assert answer.status == 400 and answer.error()["param"].partition(".")[0] == field, field
        assert lab.chat(**{field: None}).status == 200, field  # null means absent
    assert len(engine.requests) == len(CODE[kind.backend])


def test_another_engine_takes_what_one_cannot_honour(lab: Lab) -> None:
    small, able = KINDS["mlx_lm"].engine(), KINDS["vllm"].engine()
    lab._engines += [small, able]
    replicas = [replica(small, backend="mlx_lm", weight=10), replica(able, backend="vllm")]
    lab.serve({"m": {"replicas": replicas}})
    for _ in range(4):
        assert lab.chat(response_format=FORM).status == 200
    assert len(able.requests) == 4 and not small.requests
    assert eventually(lambda: lab.chat().status == 200 and small.requests)  # the other takes what it can
    able.stop()
    assert eventually(lambda: lab.chat(response_format=FORM).status == 503)  # it is away, and not impossible


# --- vectors, ranks, tokens
def test_embeddings(kind: Kind, engine: Engine, sdk: openai.OpenAI, lab: Lab) -> None:
    if kind.embeddings is None:
        with pytest.raises(openai.BadRequestError) as caught:
            sdk.embeddings.create(model="m", input="a")
        assert caught.value.code == "unsupported_value"
        return
    packed = sdk.embeddings.create(model="m", input=["a", "b"])  # base64, as the SDK asks by default
    plain = sdk.embeddings.create(model="m", input=["a", "b"], encoding_format="float")
    assert [row.embedding for row in packed.data] == [row.embedding for row in plain.data]
    assert [row.index for row in plain.data] == [0, 1] and plain.data[0].embedding[0] == 0.5
    assert plain.model == "m" and plain.usage.prompt_tokens == 4 and lab.booked(8, 0)


def test_rerank(kind: Kind, engine: Engine, lab: Lab) -> None:
    body = {"model": "m", "query": "q", "documents": ["a", "b"], "top_n": 2}
    answer = lab.call(body, "/v1/rerank")
    if kind.rerank is None:
        assert (answer.status, answer.error()["code"]) == (400, "unsupported_value")
        return
    told = answer.json()
    assert answer.status == 200 and told["model"] == "m" and told["id"]
    assert [row["index"] for row in told["results"]] == [1, 0]
    assert [row["relevance_score"] for row in told["results"]] == [SCORES[1], SCORES[0]]
    assert [row["document"]["text"] for row in told["results"]] == ["b", "a"]
    assert told["usage"]["total_tokens"] == 9 and lab.booked(9, 0)


def test_tokens(kind: Kind, engine: Engine, lab: Lab) -> None:
    answer = lab.call({"model": "m", "prompt": "Hello, world"}, "/v1/tokenize")
    if kind.tokenize is None:
        assert (answer.status, answer.error()["code"]) == (400, "unsupported_value")
        assert lab.call({"model": "m", "tokens": [1]}, "/v1/detokenize").status == 400
        return
    told = answer.json()
    assert (told["count"], told["tokens"]) == (3, TOKENS) and "max_model_len" in told
    assert lab.call({"model": "m", "tokens": TOKENS}, "/v1/detokenize").json() == {"prompt": "Hello, world"}
    in_chat = lab.call({"model": "m", "messages": HELLO}, "/v1/tokenize")
    if can(kind, Capability.CHAT_TOKENISE):
        assert in_chat.json()["count"] == 3
    else:
        assert (in_chat.status, in_chat.error()["param"]) == (400, "messages")


# --- errors
EXPECTED: dict[str, tuple[int, str, bool]] = {  # status, code, held against the replica
    "context": (400, "context_length_exceeded", False),
    "bad": (400, "invalid_value", False),
    "unsupported": (400, "unsupported_value", False),
    "key": (502, "engine_error", True),
    "model": (502, "engine_error", True),
    "full": (503, "engine_error", False),
    "broken": (502, "engine_error", True),
    "loading": (503, "engine_error", True),
}
FAULTS = [(name, cause) for name, kind in KINDS.items() for cause in kind.faults]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize(("name", "cause"), FAULTS)
def test_errors_mean_the_same_from_every_engine(lab: Lab, name: str, cause: str, stream: bool) -> None:
    kind = KINDS[name]
    engine = behind(lab, kind)
    lab.gateway.wait_for_replica()
    engine.once(kind.fails(cause))
    answer = lab.call(chat(stream=stream))
    status, code, held = EXPECTED[cause]
    if (name, cause) == ("openai_compatible", "full"):
        status, code = 429, "engine_busy"
    if (name, cause) == ("tabbyapi", "broken"):
        status = 503
    if (name, cause) == ("tabbyapi", "bad"):
        status = 422
    error = answer.error()
    assert (answer.status, error["code"]) == (status, code), error
    assert error["type"] == ("invalid_request_error" if status in (400, 422) else "server_error")
    assert bool(answer.header("retry-after")) == (status in (429, 503))
    (state,) = lab.gateway.replicas()
    assert bool(state["failures_in_a_row"]) == held, state


def test_an_error_in_the_middle_of_a_stream(kind: Kind, engine: Engine, lab: Lab) -> None:
    """Event, line, or just the end; with `[DONE]` behind it or not: always one error event, and never `[DONE]`."""

    def script(x: Exchange) -> None:
        kind.some(x)
        kind.error_event(x, "CUDA out of memory at 10.1.2.3:8000")
        kind.stop(x)

    engine.once(script)
    answer = lab.stream()
    (error,) = answer.stream_errors()
    assert answer.text() == "Hello" and answer.complete and "[DONE]" not in answer.events()
    assert error["type"] == "server_error" and error["code"] in ("engine_error", "engine_connection_lost")
    assert "10.1.2.3" not in error["message"]
    if kind.backend not in ("tensorrt_llm", "mlx_lm"):
        assert "CUDA out of memory" in error["message"]
    assert not answer.finishes() and lab.tokens("completion") >= 2


@pytest.mark.parametrize("how", ["end", "reset"])
def test_a_stream_that_just_ends_is_an_error(kind: Kind, engine: Engine, lab: Lab, how: str) -> None:
    def script(x: Exchange) -> None:
        kind.some(x)
        x.pause(0.1)
        kind.stop(x) if how == "end" else x.reset()

    engine.once(script)
    answer = lab.stream()
    assert len(answer.stream_errors()) == 1 and "[DONE]" not in answer.events() and answer.text() == "Hello"


def test_an_error_document_under_a_200_is_an_error(kind: Kind, engine: Engine, lab: Lab) -> None:
    document = {"error": "the model failed"} if kind.native else {"error": {"message": "the model failed"}}
    engine.once(lambda x: x.reply(document), lambda x: x.reply(document))
    assert lab.chat().status == 502 and lab.stream().status == 502


def test_a_page_of_html_is_an_error(engine: Engine, lab: Lab) -> None:
    engine.once(lambda x: x.html(502), lambda x: x.html(200))
    assert lab.chat().status == 502 and lab.chat().status == 502


# --- readiness and load
def test_readiness(kind: Kind, lab: Lab) -> None:
    """503 on every route while it loads; then it recovers by itself, and nobody has generated or loaded anything."""
    engine = kind.engine()
    engine.healthy = False
    lab._engines.append(engine)
    lab.serve({"m": [replica(engine, backend=kind.backend)]})
    assert eventually(lambda: lab.gateway.replicas()[0]["health"] in ("down", "loading"))
    engine.healthy = True
    lab.gateway.wait_for_replica()
    assert not engine.requests and {request.method for request in engine.probes} == {"GET"}
    assert lab.chat().status == 200


def test_load(kind: Kind, engine: Engine, lab: Lab) -> None:
    def load() -> dict[str, Any]:
        found: dict[str, Any] = lab.gateway.replicas()[0]["engine"]
        return found

    lab.gateway.wait_for_replica()
    if kind.load is None:
        assert set(load().values()) == {None}  # unknown, never zero
        return
    assert eventually(lambda: load()["running"] == 3)
    assert load()["waiting"] == 1 and load()["kv_used"] == (None if kind.backend == "llama_server" else 0.5)


def test_probes_ask_only_what_is_cheap(lab: Lab) -> None:
    """SGLang's and TensorRT-LLM's health paths can generate; TabbyAPI's stays red for good after one error."""
    for name, path in (("sglang", "/v1/models"), ("tabbyapi", "/v1/model"), ("ollama", "/api/version")):
        engine = behind(lab, KINDS[name])
        lab.gateway.wait_for_replica()
        assert path in {request.target for request in engine.probes}
        assert not {"/health", "/health_generate", "/api/ps"} & {request.target for request in engine.probes}


# --- Ollama
def test_the_configured_window_really_applies(lab: Lab) -> None:
    engine = behind(lab, KINDS["ollama"], context_length=16384)
    long = "The code word is heron.\n" + "word " * 9000
    assert lab.chat(messages=[{"role": "user", "content": long}], options={"num_ctx": 512}).status == 200
    sent = engine.last().json()
    assert sent["options"]["num_ctx"] == 16384 and sent["truncate"] is False and sent["shift"] is False
    assert sent["messages"] == [{"role": "user", "content": long}]
    lab.call({"model": "m", "prompt": "x"}, "/v1/completions")
    assert engine.last().json()["options"]["num_ctx"] == 16384  # one value on every route: another one would reload
    lab.call({"model": "m", "input": "x"}, "/v1/embeddings")
    assert engine.last().json()["options"]["num_ctx"] == 16384 and engine.last().json()["truncate"] is False


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_cut(lab: Lab) -> None:
    engine = behind(lab, KINDS["ollama"], context_length=4096)
    for body in ({"content": "word " * 9000}, {"content": "hi"}):
        more = {"max_tokens": 50_000} if body["content"] == "hi" else {}
        answer = lab.chat(messages=[{"role": "user"} | body], **more)
        error = answer.error()
        assert (answer.status, error["code"]) == (400, "context_length_exceeded") and "4096" in error["message"]
        assert error["type"] == "invalid_request_error" and error["param"] == "messages"
    assert not engine.requests


def test_a_prompt_that_was_cut_all_the_same_is_noticed(lab: Lab) -> None:
    behind(lab, KINDS["ollama"], context_length=16384)
    assert lab.chat(messages=[{"role": "user", "content": "word " * 9000}]).status == 200  # counts 11 tokens
    (state,) = lab.gateway.replicas()
    assert lab.gateway.metric("sekisho_suspected_prompt_cuts_total", replica=state["id"]) == 1
    assert "context window may be too small" in lab.gateway.log()
    assert lab.chat().status == 200
    assert lab.gateway.metric("sekisho_suspected_prompt_cuts_total", replica=state["id"]) == 1


def test_thinking_is_reasoning(lab: Lab) -> None:
    engine = behind(lab, KINDS["ollama"])
    engine.once(lambda x: KINDS["ollama"]._send(x, b"".join(map(line, ollama_lines(thinking=["Hm", "m."])))))
    answer = lab.stream(reasoning_effort="high")
    assert "".join(choice["delta"].get("reasoning", "") for choice in answer.choices()) == "Hmm."
    assert answer.text() == "Hello, world" and engine.last().json()["think"] == "high"


def test_pictures_and_what_is_none(lab: Lab) -> None:
    engine = behind(lab, KINDS["ollama"])

    def ask(part: dict[str, Any]) -> Any:
        return lab.chat(messages=[{"role": "user", "content": [{"type": "text", "text": "what is it"}, part]}])

    assert ask({"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}).status == 200
    assert engine.last().json()["messages"] == [{"role": "user", "content": "what is it", "images": ["aGk="]}]
    for part in ({"type": "input_audio", "input_audio": {}},
                 {"type": "image_url", "image_url": {"url": "data:image/tiff;base64,aGk="}}):  # fmt: skip
        answer = ask(part)
        assert answer.status == 400 and answer.error()["param"].startswith("messages[0].content[1]")


def test_legacy_constraints_become_structured_outputs(lab: Lab) -> None:
    engine = behind(lab, KINDS["vllm"])
    lab.chat(guided_json=SCHEMA, guided_regex=None)
    sent = engine.last().json()
    assert sent["structured_outputs"] == {"json": SCHEMA} and not {"guided_json", "guided_regex"} & sent.keys()
    engine = behind(lab, KINDS["sglang"])
    lab.chat(guided_json=SCHEMA)
    assert engine.last().json()["response_format"]["json_schema"]["schema"] == SCHEMA


def test_pings_and_line_ends_do_no_harm(kind: Kind, engine: Engine, lab: Lab) -> None:
    if kind.native:
        pytest.skip("no server-sent events")

    def script(x: Exchange) -> None:
        kind.begin(x)
        x.part(b": ping\n\n" + b"retry: 3000\n\n" + b"data:\n\n")
        x.part(x.dialect.stream(["Hel", "lo"]).replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"))
        kind.stop(x)

    engine.once(script)
    answer = lab.stream()
    assert answer.ended_well() and answer.text() == "Hello"
