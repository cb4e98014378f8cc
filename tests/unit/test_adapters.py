"""What is special about each adapter: the requests it changes or refuses, the answers it fixes, the errors it knows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import orjson
import pytest

import backends
from backends.base import CONSTRAINTS, REMOVE, Capability, EngineLoad, ModelCard, ModelFormat, Operation
from backends.failures import FailureKind, read_failure
from backends.shaping import ToolIndexes, rerank_answer
from gateway.answers import read_answer
from gateway.call import parse_call
from gateway.config import DiscoveryConfig
from gateway.dialect_tap import FixingTap
from gateway.discovery import _of_card
from gateway.errors import UnsupportedOperation
from gateway.fit import looks_cut, too_long
from gateway.sse import DONE
from gateway.types import Usage

CHAT, TEXT, EMBED = Operation.CHAT, Operation.COMPLETIONS, Operation.EMBEDDINGS
HI = [{"role": "user", "content": "hi"}]


def edits(kind: str, operation: Operation = CHAT, **body: Any) -> dict[str, Any]:
    first = {"messages": HI} if operation is CHAT else {"prompt": "hi"} if operation is TEXT else {}
    return dict(backends.load(kind).edits(operation, {"model": "m"} | first | body))


def refusal(kind: str, operation: Operation = CHAT, **body: Any) -> str | None:
    first = {"messages": HI} if operation is CHAT else {"prompt": "hi"} if operation is TEXT else {}
    found = backends.load(kind).refuse(operation, {"model": "m"} | first | body)
    return found.field if found else None


def fixed(kind: str, operation: Operation, answer: Any, **body: Any) -> Any:
    return backends.load(kind).fix_answer(operation, answer, {"model": "m"} | body)


# --- formats and capabilities
def test_what_each_engine_loads() -> None:
    formats = {kind: backends.load(kind).formats for kind in backends.kinds()}
    assert ModelFormat.EXL3 in formats["tabbyapi"] and ModelFormat.MLX in formats["mlx_lm"]
    assert formats["ollama"] == {ModelFormat.GGUF} and ModelFormat.TENSORRT in formats["tensorrt_llm"]


@pytest.mark.parametrize("kind", backends.kinds())
def test_paths_and_capabilities_agree(kind: str) -> None:
    backend = backends.load(kind)
    for operation, capability in ((Operation.RERANK, Capability.RERANK), (Operation.TOKENIZE, Capability.TOKENISE)):
        if operation in backend.paths:
            assert capability in backend.capabilities
        elif kind != "llamacpp":
            assert capability not in backend.capabilities


# --- requests
def test_a_plain_request_costs_no_edit_but_where_the_engine_needs_one() -> None:
    for kind in set(backends.kinds()) - {"tabbyapi"}:
        assert edits(kind, temperature=0.5, stream=True) == {} and refusal(kind, temperature=0.5) is None
    assert edits("tabbyapi", stream=True) == {}
    assert edits("tabbyapi") == {"stream_options": {"include_usage": True}}


@pytest.mark.parametrize("kind", ["lmstudio", "tensorrt_llm"])
def test_the_older_name_of_the_limit(kind: str) -> None:
    new = {"max_completion_tokens": REMOVE, "max_tokens": 5}
    assert edits(kind, max_completion_tokens=5) == edits(kind, max_completion_tokens=5, max_tokens=9) == new
    assert edits(kind, max_completion_tokens=None) == {"max_completion_tokens": REMOVE}


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llama_server", "mlx_lm", "tabbyapi"])
def test_who_reads_the_newer_name_gets_it(kind: str) -> None:
    assert not {"max_tokens", "max_completion_tokens"} & edits(kind, max_completion_tokens=5).keys()


def test_a_constraint_is_never_dropped_in_silence() -> None:
    for kind in set(backends.kinds()) - {"openai_compatible", "llamacpp"}:
        for name in CONSTRAINTS:
            changed = edits(kind, **{name: {"a": 1}})
            assert refusal(kind, **{name: {"a": 1}}) == name or changed.get(name) is not REMOVE or len(changed) > 1


def test_tabby() -> None:
    assert edits("tabbyapi", stream=True, response_format={"type": "json_object"}) == {
        "response_format": {"type": "json"}
    }
    tool = {"type": "function", "function": {"name": "f", "description": None, "strict": True}}
    whole = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
    (first, second) = edits("tabbyapi", stream=True, tools=[tool, whole])["tools"]
    assert first["function"] == {"name": "f", "strict": True, "description": "",
                                 "parameters": {"type": "object", "properties": {}}}  # fmt: skip
    assert second is whole and "tools" not in edits("tabbyapi", stream=True, tools=[whole])
    assert edits("tabbyapi", Operation.TOKENIZE, messages=HI)["text"] == HI
    assert edits("tabbyapi", Operation.TOKENIZE, prompt="x", add_special_tokens=False)["add_bos_token"] is False
    assert refusal("tabbyapi", TEXT, echo=True) == "echo" and refusal("tabbyapi", TEXT, suffix="x") == "suffix"


def test_mlx() -> None:
    changed = edits("mlx_lm", temperature=None, stop=None, xtc_probability=1, tools=[{}], tool_choice="none")
    assert changed == {"temperature": REMOVE, "stop": REMOVE, "xtc_probability": 1.0, "tools": REMOVE}
    assert refusal("mlx_lm", TEXT, logprobs=5) == "logprobs" and refusal("mlx_lm", logprobs=True) is None
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}]
    assert refusal("mlx_lm", messages=picture) == "messages"
    assert refusal("mlx_lm", tool_choice="none") is refusal("mlx_lm", response_format={"type": "text"}) is None
    assert refusal("mlx_lm", tool_choice={"type": "function"}) == "tool_choice"


def test_tensorrt() -> None:
    body = {"store": True, "metadata": {}, "parallel_tool_calls": True, "future": None, "stream_options": {}}
    assert refusal("tensorrt_llm", **body) is None
    assert edits("tensorrt_llm", **body) == dict.fromkeys(body, REMOVE)
    assert edits("tensorrt_llm", stream=True, stream_options={}) == {}
    assert refusal("tensorrt_llm", future=1) == "future" == refusal("tensorrt_llm", EMBED, input="x", future=0)
    assert refusal("tensorrt_llm", TEXT, suffix="x") == "suffix"
    assert refusal("tensorrt_llm", TEXT, top_logprobs=3) == "top_logprobs"  # a chat's field


def test_vllm() -> None:
    assert edits("vllm", guided_choice=["a"], structured_outputs={"regex": "x"}) == {"guided_choice": REMOVE}
    assert edits("vllm", session_id="x") == edits("sglang", session_id="x") == {"session_id": REMOVE}
    assert edits("vllm", guided_regex="a", cache_salt="x") == {
        "guided_regex": REMOVE, "cache_salt": REMOVE, "structured_outputs": {"regex": "a"},
    }  # fmt: skip
    assert edits("sglang", guided_regex="a", rid="1") == {"guided_regex": REMOVE, "regex": "a", "rid": REMOVE}


def test_salts_go_only_where_the_engines_request_has_the_field() -> None:
    """TensorRT-LLM answers 400 to a field it does not know, and knows this one in chats alone."""
    salted = {kind: backends.load(kind).salted for kind in backends.kinds()}
    assert {kind for kind in salted if salted[kind]} == {"vllm", "sglang", "tensorrt_llm"}
    assert salted["vllm"] == {CHAT, TEXT, EMBED, Operation.RERANK}
    assert salted["sglang"] == {CHAT, TEXT} and salted["tensorrt_llm"] == {CHAT}


def test_vllms_names_for_media_are_refused() -> None:
    part = {"type": "image_url", "image_url": None}
    named = [*HI, {"role": "user", "content": [{"type": "text", "text": "x"}, {**part, "uuid": "somebody's"}]}]
    assert refusal("vllm", messages=named) == "messages"
    assert refusal("vllm", messages=[{"content": [{**part, "uuid": None}, "uuid", 5]}]) is None
    assert refusal("vllm", messages=[{"content": "uuid", "uuid": "x"}, {}]) is None


def test_lmstudio() -> None:
    sent = edits("lmstudio", response_format={"type": "json_object"})["response_format"]
    assert sent["type"] == "json_schema" and sent["json_schema"]["schema"] == {"type": "object"}
    cards = backends.load("lmstudio").read_models(
        b'{"models":[{"type":"llm","key":"a/b","max_context_length":4096},{"key":5},7]}'
    )
    assert [(card.id, card.context_length) for card in cards] == [("a/b", 4096)]


# --- Ollama's language
def asked(operation: Operation = CHAT, context: int | None = None, **body: Any) -> dict[str, Any]:
    first = {"messages": HI} if operation is CHAT else {"prompt": "hi"} if operation is TEXT else {"input": "hi"}
    return backends.load("ollama").translate(operation, {"model": "m"} | first | body, context)


def test_ollama_options() -> None:
    request = asked(context=8192, temperature=0, top_k=5, stop="x", max_tokens=3, max_completion_tokens=7, user="u",
                    options={"num_ctx": 1, "num_gpu": 0, "mirostat": 1}, keep_alive=0)  # fmt: skip
    assert request == {
        "messages": HI, "stream": False, "truncate": False, "shift": False,
        "options": {"temperature": 0, "top_k": 5, "stop": ["x"], "num_predict": 7, "num_ctx": 8192, "mirostat": 1},
    }  # fmt: skip
    assert asked()["options"] == {} and asked(stream=True)["stream"] is True
    assert asked(EMBED, 512, dimensions=8) == {
        "input": "hi", "truncate": False, "options": {"num_ctx": 512}, "dimensions": 8,
    }  # fmt: skip
    assert asked(TEXT, suffix="x", logprobs=2)["suffix"] == "x"


def test_ollama_forms_and_thinking() -> None:
    schema = {"type": "object"}
    assert asked(response_format={"type": "json_schema", "json_schema": {"schema": schema}})["format"] == schema
    assert asked(response_format={"type": "json_object"})["format"] == "json"
    assert "format" not in asked(response_format={"type": "text"})
    for wrong in ({"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}, {"type": "regex"}, "json", 5):
        assert refusal("ollama", response_format=wrong) == "response_format"
    thinks = {"none": False, "minimal": "low", "high": "high", "xhigh": "max"}
    assert {effort: asked(reasoning_effort=effort)["think"] for effort in thinks} == thinks
    assert refusal("ollama", reasoning_effort="huge") == "reasoning_effort"
    assert asked(chat_template_kwargs={"enable_thinking": False})["think"] is False
    assert "tools" not in asked(tools=[{}], tool_choice="none") and asked(tools=[{}])["tools"] == [{}]


def test_ollama_messages() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
    ]
    assert asked(messages=messages)["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "", "thinking": "hm",
         "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "5", "tool_call_id": "c1", "tool_name": "f"},
    ]  # fmt: skip
    broken = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]
    assert refusal("ollama", messages=broken) == "messages[0].tool_calls[0].function.arguments"
    assert refusal("ollama", TEXT, prompt=["a", "b"]) == "prompt"
    assert refusal("ollama", EMBED, input=[1, 2]) == "input" and refusal("ollama", EMBED, input=["a", "b"]) is None


WHEN = "2026-08-21T10:00:00.123456789Z"


def test_ollama_answers() -> None:
    told = {"model": "e", "created_at": WHEN, "message": {"role": "assistant", "content": "x", "thinking": "hm"},
            "done": True, "done_reason": "length", "prompt_eval_count": 3, "eval_count": 4}  # fmt: skip
    answer = fixed("ollama", CHAT, told)
    assert answer["created"] == 1787306400 and answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "x", "reasoning": "hm"}
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert "usage" not in fixed("ollama", CHAT, {"done": True, "message": {}})
    assert fixed("ollama", CHAT, {"done": False, "message": {"content": "half"}}) == {
        "done": False, "message": {"content": "half"},
    }  # fmt: skip
    assert fixed("ollama", CHAT, told)["id"] != answer["id"]
    assert fixed("ollama", CHAT, told | {"done_reason": "load", "created_at": 5})["created"] == 0
    rows = [{"token": "x", "logprob": -0.5}]
    assert fixed("ollama", CHAT, told | {"logprobs": rows})["choices"][0]["logprobs"] == {"content": rows}


# --- taps
def line(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


def tap(kind: str, operation: Operation = CHAT, strip: bool = False) -> FixingTap:
    backend = backends.load(kind)
    fixer = backend.stream_fixer(operation)
    assert fixer is not None
    return FixingTap(backend, fixer, "asked", strip_usage=strip, max_event=1000)


def told(tap: FixingTap, parts: Sequence[bytes]) -> list[Any]:
    out = b"".join([tap.feed(part) for part in parts]) + tap.end()
    events = [block.removeprefix(b"data: ") for block in out.split(b"\n\n") if block and not block.startswith(b":")]
    return ["DONE" if event == b"[DONE]" else json.loads(event) for event in events]


def cuts(data: bytes) -> list[list[bytes]]:
    places = range(1, len(data))
    singly = [data[start:end] for start, end in pairwise([0, *places, len(data)])]
    return [[data[:place], data[place:]] for place in places] + [singly]


OLLAMA_STREAM = b"".join(
    line({"model": "e", "created_at": WHEN} | more)
    for more in (
        {"message": {"role": "assistant", "content": "naïve 🎭"}, "done": False},
        {"message": {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
         "done": False},
        {"message": {"role": "assistant", "content": "!"}, "done": True, "done_reason": "stop", "eval_count": 2},
    )
)  # fmt: skip


def test_ollamas_lines_become_events_however_they_are_cut() -> None:
    for parts in cuts(OLLAMA_STREAM):
        events = told(reader := tap("ollama"), parts)
        assert events[-1] == "DONE" and reader.complete and reader.done and reader.usage == Usage(0, 2)
        deltas = [choice["delta"] for event in events[:-1] for choice in event["choices"]]
        assert deltas[0] == {"role": "assistant", "content": "naïve 🎭"} and deltas[2] == {"content": "!"}
        assert deltas[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
        assert [event["choices"] for event in events[:-1]].count([]) == 1
        assert {event["model"] for event in events[:-1]} == {"asked"}
        assert [c["finish_reason"] for event in events[:-1] for c in event["choices"]][-1] == "tool_calls"


def test_ollamas_silent_end_is_no_end() -> None:
    reader = tap("ollama")
    assert told(reader, [OLLAMA_STREAM[: OLLAMA_STREAM.rindex(b"{\"model")]])[-1] != "DONE"
    assert not reader.complete and reader.usage is None


def test_ollamas_last_line_may_lack_its_end() -> None:
    assert told(tap("ollama"), [OLLAMA_STREAM.rstrip(b"\n")])[-1] == "DONE"
    assert told(tap("ollama"), [OLLAMA_STREAM.replace(b"\n", b"\r\n")])[-1] == "DONE"


def test_errors_in_a_fixed_stream() -> None:
    for bad in (line({"error": "cudaMalloc failed: out of memory"}), b"not json\n", b"5\n", b"x" * 2000):
        reader = tap("ollama")
        reader.feed(OLLAMA_STREAM[: OLLAMA_STREAM.index(b"\n") + 1])
        reader.feed(bad)
        assert reader.failure is not None and reader.failure.kind is FailureKind.BROKEN and not reader.complete
        assert reader.feed(OLLAMA_STREAM) == b""
    reader = tap("tabbyapi")
    assert reader.feed(b"data: [DONE]\n\n") == b"" and reader.failure is not None


def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": more.pop("index", 0), "delta": delta, "finish_reason": finish}
    return b"data: " + orjson.dumps({"id": "c", "model": "e", "choices": [choice]} | more) + b"\r\n\r\n"


def test_tabbys_usage_gets_an_event_of_its_own() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_time": 0.5}
    stream = chunk({"content": "a"}) + chunk({"content": "b"}, index=1) + chunk({}, "stop", index=1)
    stream += chunk({}, "stop", usage=usage) + DONE
    events = told(reader := tap("tabbyapi"), [stream])
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": "a"}
    assert events[1]["choices"][0]["delta"] == {"role": "assistant", "content": "b"}
    assert events[3]["choices"][0]["finish_reason"] == "stop" and "usage" not in events[3]
    assert (events[4]["choices"], events[4]["usage"], events[5]) == ([], usage, "DONE")
    assert reader.usage == Usage(3, 4) and reader.complete
    stripped = told(reader := tap("tabbyapi", strip=True), [stream])
    assert len(stripped) == 5 and reader.usage == Usage(3, 4)
    for parts in cuts(stream):
        assert told(tap("tabbyapi"), parts) == events


def test_mlx_says_its_role_once() -> None:
    stream = chunk({"role": "assistant", "content": "a"}, object="chat.completion.chunk")
    stream += chunk({"role": "assistant", "content": "b"}) + chunk({"role": "assistant"}, "stop")
    stream += b'data: {"id":"c","model":"e","object":"chat.completion","choices":[],"usage":{"prompt_tokens":1}}\n\n'
    events = told(tap("mlx_lm"), [b": keepalive 1/2\n\n", stream, DONE])
    assert [c["delta"] for e in events[:3] for c in e["choices"]] == [
        {"role": "assistant", "content": "a"}, {"content": "b"}, {},
    ]  # fmt: skip
    assert {event["object"] for event in events[:-1]} == {"chat.completion.chunk"}
    told_of_host = {"choices": [], "system_fingerprint": "0.32-Linux-6.18"}
    assert fixed("mlx_lm", CHAT, told_of_host) == {"choices": []}
    (only,) = told(tap("mlx_lm"), [b"data: " + orjson.dumps(told_of_host) + b"\n\n"])
    assert "system_fingerprint" not in only


def indexes(*rounds: list[dict[str, Any]]) -> list[int]:
    numbering, found = ToolIndexes(), []
    for calls in rounds:
        numbering.fix(0, calls)
        found += [call["index"] for call in calls]
    return found


def test_tool_calls_get_indexes_that_stay() -> None:
    a, b = {"id": "a", "function": {"name": "f"}}, {"id": "b", "function": {"name": "f"}}
    assert indexes([{**a, "index": 0}], [{**b, "index": 1}], [{"index": 0}, {"index": 1}]) == [0, 1, 0, 1]
    assert indexes([{**a, "index": 0}], [{**b, "index": 0}]) == [0, 1]  # whole calls, all number 0
    assert indexes([dict(a), dict(b)]) == [0, 1]  # no number at all
    assert indexes([dict(a)], [{"function": {"arguments": "{"}}], [dict(b)], [{}]) == [0, 0, 1, 1]
    assert indexes([{**a, "index": 0}], [{**a, "index": 0}]) == [0, 0]  # an id that is repeated in every fragment
    nameless: list[dict[str, Any]] = [{"function": {"name": "f"}}, {"function": {"name": "f"}}]
    assert indexes(nameless) == [0, 1] and nameless[0]["id"] != nameless[1]["id"]
    assert indexes([{"id": "a", "index": []}, {"id": 5, "index": "x"}]) == [0, 1]


# --- answers
def test_ranks_are_sorted_cut_and_shown() -> None:
    body = {"model": "m", "documents": ["a", {"text": "b"}, "c"], "top_n": 2}
    answer = rerank_answer([(0, 0.1), (1, 0.9), (2, 0.5), ("x", 1), (1, None)], body, 7)
    assert answer["results"] == [{"index": 1, "relevance_score": 0.9, "document": {"text": "b"}},
                                 {"index": 2, "relevance_score": 0.5, "document": {"text": "c"}}]  # fmt: skip
    assert "document" not in rerank_answer([(0, 1)], body | {"return_documents": False}, None)["results"][0]


@pytest.mark.parametrize(
    ("operation", "document", "usage"),
    [
        (Operation.RERANK, {"results": [], "usage": {"total_tokens": 9}}, Usage(9)),
        (Operation.RERANK, {"results": []}, None), (Operation.TOKENIZE, {"tokens": [1]}, None),
        (Operation.DETOKENIZE, {"prompt": ""}, None),
    ],
)  # fmt: skip
def test_what_the_newer_operations_answer(operation: Operation, document: dict[str, Any], usage: Usage | None) -> None:
    asked = {"model": "m", "query": "q", "documents": ["d"], "prompt": "p", "tokens": [1]}
    call = parse_call(operation, orjson.dumps(asked))
    answer = read_answer(call, orjson.dumps(document))
    assert (answer.failure, answer.usage, answer.body) == (None, usage, orjson.dumps(document))
    for wrong in (b"{}", b"[]", b"null", b'{"results":5,"tokens":5,"prompt":5}'):
        assert read_answer(call, wrong, backends.load("sglang")).failure is not None or wrong == b"[]"


# --- errors
def kind_of(kind: str, status: int, body: Any) -> FailureKind:
    return backends.load(kind).read_failure(status, body if isinstance(body, bytes) else orjson.dumps(body)).kind


def test_ollamas_runner_speaks_inside_a_string() -> None:
    inner = {"error": {"code": 400, "message": "request (5000 tokens) exceeds the available context size",
                       "type": "exceed_context_size_error"}}  # fmt: skip
    for text in (json.dumps(inner), "POST predict: " + json.dumps(inner)):
        for body in ({"error": text}, {"error": {"message": text, "type": "api_error"}}):
            failure = read_failure(500, orjson.dumps(body))
            assert failure.kind is FailureKind.CONTEXT_LENGTH
            assert failure.message == "request (5000 tokens) exceeds the available context size"
    for text in ('{"error": broken', 'x {"error":} y', '{"error":'):
        assert read_failure(500, orjson.dumps({"error": text})).kind is FailureKind.BROKEN


def test_mlx_answers_404_to_everything() -> None:
    assert kind_of("mlx_lm", 404, {"error": "[metal] out of memory"}) is FailureKind.BROKEN
    assert kind_of("mlx_lm", 404, b"Not Found") is FailureKind.UNSUPPORTED


def test_llama_servers_500_for_the_callers_faults() -> None:
    def nested(message: str) -> dict[str, Any]:
        return {"error": {"code": 500, "message": message, "type": "server_error"}}

    assert kind_of("llama_server", 500, nested("image input is not supported")) is FailureKind.UNSUPPORTED
    assert kind_of("llama_server", 500, nested("[json.exception.type_error.302] x")) is FailureKind.BAD_REQUEST
    large = "input is too large to process. increase the physical batch size"
    assert kind_of("llama_server", 500, nested(large)) is FailureKind.CONTEXT_LENGTH
    assert kind_of("vllm", 500, nested("[json.exception.type_error.302] x")) is FailureKind.BROKEN


def test_tensorrts_400_for_its_own_faults() -> None:
    flat = {"object": "error", "message": "CUDA error", "type": "BadRequestError", "code": 400}
    assert kind_of("tensorrt_llm", 400, flat) is FailureKind.BROKEN
    assert kind_of("tensorrt_llm", 400, flat | {"message": "n has to be 1"}) is FailureKind.BAD_REQUEST


def test_an_event_that_says_its_status() -> None:
    """Older SGLang reports the caller's mistake in an event, under a 200."""
    assert read_failure(0, b'{"error":{"message":"bad n","code":400}}').kind is FailureKind.BAD_REQUEST
    assert read_failure(0, b'{"error":{"message":"oops","code":500}}').kind is FailureKind.BROKEN
    assert read_failure(0, b'{"error":{"message":"oops","code":"x"}}').kind is FailureKind.BROKEN


def test_sglangs_load_in_every_form() -> None:
    read = backends.load("sglang").read_load
    assert read(b'[{"dp_rank":0,"num_reqs":5,"num_waiting_reqs":2}]') == EngineLoad(waiting=2)
    assert read(b"sglang:num_running_reqs 3\nsglang:num_queue_reqs 1\n") == EngineLoad(3, 1)
    assert read(b'{"loads":[]}') == EngineLoad()


# --- fit
def call(**body: Any) -> Any:
    return parse_call(CHAT, orjson.dumps({"model": "m"} | body))


def test_only_what_clearly_does_not_fit_is_refused() -> None:
    near, far = [{"content": "x" * 4 * 1200}], [{"content": "x" * 4 * 1300}]
    assert too_long(call(messages=near), 1000) is None
    error = too_long(call(messages=far, max_tokens=10), 1000)
    assert error is not None and (error.code, error.param) == ("context_length_exceeded", "messages")
    assert too_long(call(messages=HI, max_tokens=2000), 1000) is not None
    embed = parse_call(EMBED, orjson.dumps({"model": "m", "input": ["x" * 9000]}))
    assert too_long(embed, 10) is None


def test_a_prompt_that_looks_cut() -> None:
    long = call(messages=[{"content": "x" * 4 * 9000}])
    assert looks_cut(long, Usage(4096)) and not looks_cut(long, Usage(5000))
    assert not looks_cut(long, Usage(5, source="estimate")) and not looks_cut(call(messages=HI), Usage(1))
    pictures = [{"content": [{"type": "image_url"}] * 20}]
    assert not looks_cut(call(messages=pictures), Usage(500))


def test_the_refusal_is_a_bad_request_with_a_code() -> None:
    assert UnsupportedOperation("x", param="n").code == "unsupported_value"


def test_discovery_never_asks_for_the_longest_window() -> None:
    """Ollama lists what a model was trained for; sent as num_ctx, that would fill the machine's memory."""
    cards = backends.load("ollama").read_models(
        b'{"models":[{"name":"llama3:8b","details":{"format":"gguf","context_length":131072}}]}'
    )
    entry = DiscoveryConfig(backend="ollama", url="http://127.0.0.1:11434")
    assert "context_length" not in _of_card(entry, cards[0])
    served = DiscoveryConfig(backend="vllm", url="http://127.0.0.1:8000")
    assert _of_card(served, ModelCard("m", 32768))["context_length"] == 32768
