"""What goes to the engine and what comes back, when it is one document: values, lengths, names, errors."""

from __future__ import annotations

import base64
import json
import re
import struct
from typing import Any

import pytest

from tests.doubles.dialects import DIALECTS, NAMED, UPSTREAM_MODEL, compact, error_body
from tests.doubles.engine import VECTORS, Exchange, embeddings, gzipped
from tests.e2e.harness import Lab, chat, replica
from tests.e2e.wire import Answer


# --- the request
@pytest.mark.parametrize("dialect", NAMED)
def test_unknown_and_engine_specific_parameters_arrive_as_they_were_sent(lab: Lab, dialect: str) -> None:
    """Every value, null and number form, in the client's own order."""
    engine = lab.one(dialect)
    constraint = b'"grammar":"x"' if dialect == "llama_server" else b'"structured_outputs":{"regex":"[ab]"}'
    sent = (
        b'{"chat_template_kwargs":{"enable_thinking":false},"top_k":20,"min_p":0.0500,"temperature":1.0,'
        + constraint
        + b',"seed":7,"stop":null,"future_field":{"x":[1,null,1e3,-0.0]},'
        b'"big":12345678901234567890,"metadata":{"model":"other"},"text":"\\u65e5\\/ \xf0\x9f\x8e\xad",'
        b'  "model" : "m" ,"messages":[{"role":"user","content":"hi"}]}'
    )
    assert lab.call(sent).status == 200
    received = re.sub(rb'^{"cache_salt":"[0-9a-f]{32}",', b"{", engine.last().body)  # what the gateway adds itself
    assert received == sent.replace(b'"model" : "m"', b'"model" : "%b"' % UPSTREAM_MODEL.encode())


def test_a_stream_adds_the_request_for_usage_and_changes_nothing_else(lab: Lab) -> None:
    engine = lab.one()
    body = (
        b'{"model":"m","stream":true,"stream_options":{"continuous_usage_stats":true},'
        b'"messages":[{"role":"user"}],"p":0.10}'
    )
    assert lab.call(body).status == 200
    got = engine.last().json()
    assert got.pop("stream_options") == {"continuous_usage_stats": True, "include_usage": True}
    got.pop("cache_salt")
    assert got == {"model": UPSTREAM_MODEL, "stream": True, "messages": [{"role": "user"}], "p": 0.1}
    assert b'"p":0.10' in engine.last().body


@pytest.mark.parametrize("upstream", ["x", "a/very/long/name/" + "y" * 300, 'quoted "name"', "日本語"])
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_lengths_fit_when_the_models_name_gets_shorter_or_longer(lab: Lab, upstream: str, stream: bool) -> None:
    engine = lab.engine()
    lab.serve({"middling-name": [replica(engine, model=upstream)]})
    answer = lab.call(chat("middling-name", stream=stream))
    request = engine.last()
    assert answer.status == 200 and request.json()["model"] == upstream
    assert request.values("content-length") == [str(len(request.body))]
    assert not request.values("transfer-encoding")
    if not stream:
        assert answer.header("content-length") == str(len(answer.body)) and answer.json()["model"] == "middling-name"


@pytest.mark.parametrize("encode", [gzipped], ids=["gzip"])
@pytest.mark.parametrize("status", [200, 400])
def test_a_compressed_document_is_passed_on_in_readable_form(lab: Lab, encode: Any, status: int) -> None:
    document = compact(DIALECTS["vllm"].completion("naïve")) if status == 200 else error_body("A", "bad value", 400)
    lab.one(script=lambda x: x.reply(encode(document), status, content_encoding="gzip"))
    answer = lab.chat()
    assert answer.status == status and answer.header("content-encoding") is None
    assert answer.header("content-length") == str(len(answer.body))
    assert answer.json()["model"] == "m" if status == 200 else "bad value" in answer.error()["message"]


def test_an_answer_without_a_length_is_ended_by_its_connection(lab: Lab) -> None:
    def script(x: Exchange) -> None:
        x.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + compact(x.dialect.completion()))
        x.close()

    lab.one(script=script)
    assert lab.chat().json()["choices"][0]["message"]["content"] == "Hello, world"


def test_an_answer_in_chunks(lab: Lab) -> None:
    def script(x: Exchange) -> None:
        x.begin(content_type="application/json")
        document = x.dialect.dump(x.dialect.completion())
        for place in range(0, len(document), 50):
            x.part(document[place : place + 50])
        x.end()

    lab.one(script=script)
    answer = lab.chat()
    assert answer.json()["usage"]["total_tokens"] == 16 and answer.header("content-length") == str(len(answer.body))


@pytest.mark.parametrize("status", [100, 102, 103])
def test_interim_answers_are_no_answers(lab: Lab, status: int) -> None:
    def script(x: Exchange) -> None:
        for _ in range(3):
            x.send(b"HTTP/1.1 %d Interim\r\nlink: </a>\r\n\r\n" % status)
        x.reply(x.dialect.completion())

    engine = lab.one(script=script)
    assert [lab.chat().status for _ in range(3)] == [200] * 3
    assert {request.connection for request in engine.requests} == {engine.requests[0].connection}


# --- embeddings
def vectors(answer: Answer) -> list[list[float]]:
    found = [entry["embedding"] for entry in answer.json()["data"]]
    return [list(struct.unpack("<4f", base64.b64decode(one))) if isinstance(one, str) else one for one in found]


PACKED = [base64.b64encode(struct.pack("<4f", *vector)).decode() for vector in VECTORS]


@pytest.mark.parametrize("engine_sends", ["lists", "base64"])
@pytest.mark.parametrize(
    ("asked", "form"),
    [({"encoding_format": "base64"}, str), ({"encoding_format": "float"}, list), ({}, list),
     ({"encoding_format": None}, list)],
    ids=["base64", "float", "absent", "null"],
)  # fmt: skip
def test_embeddings_come_in_the_form_that_was_asked_for(
    lab: Lab, asked: dict[str, Any], form: type, engine_sends: str
) -> None:
    def script(x: Exchange) -> None:
        answer = embeddings(x.request.json())
        if engine_sends == "base64":
            for entry, packed in zip(answer["data"], PACKED, strict=True):
                entry["embedding"] = packed
        x.reply(answer)

    engine = lab.one(script=script)
    answer = lab.call({"model": "m", "input": ["a", "b"]} | asked, "/v1/embeddings")
    assert vectors(answer) == VECTORS and all(isinstance(entry["embedding"], form) for entry in answer.json()["data"])
    assert [entry["index"] for entry in answer.json()["data"]] == [0, 1]
    assert answer.json()["usage"]["prompt_tokens"] == 4 and answer.json()["model"] == "m"
    assert engine.last().target == "/v1/embeddings" and lab.booked(4, 0)


@pytest.mark.parametrize("wrong", ["int8", "", 5, ["float"]])
def test_another_encoding_is_refused(lab: Lab, wrong: Any) -> None:
    engine = lab.one()
    answer = lab.call({"model": "m", "input": "a", "encoding_format": wrong}, "/v1/embeddings")
    assert answer.status == 400 and answer.error()["param"] == "encoding_format" and not engine.requests


@pytest.mark.parametrize(
    "extra", [{"stream_options": "x"}, {"stream_options": []}, {"n": "x"}, {"max_tokens": "x"}, {"stream": False}],
    ids=str,
)  # fmt: skip
def test_fields_that_mean_nothing_to_embeddings_do_no_harm(lab: Lab, extra: dict[str, Any]) -> None:
    lab.one()
    assert lab.call({"model": "m", "input": "a"} | extra, "/v1/embeddings").status in (200, 400)


def test_embeddings_are_never_a_stream(lab: Lab) -> None:
    lab.one()
    assert lab.call({"model": "m", "input": "a", "stream": True}, "/v1/embeddings").status in (200, 400)


# --- names
def test_a_name_without_a_tag_means_latest_and_never_another_tag(lab: Lab) -> None:
    latest, other = lab.engine("openai_compatible"), lab.engine("openai_compatible")
    lab.serve({
        "llama3:8b": [replica(other, model="llama3:8b")],
        "llama3:latest": [replica(latest, model="llama3:latest")],
        "qwen3:8b": [replica(other, model="qwen3:8b")],
    })  # fmt: skip
    answer = lab.chat("llama3")
    assert answer.status == 200 and answer.json()["model"] == "llama3" and not other.requests
    assert latest.last().json()["model"] == "llama3:latest"
    assert lab.chat("qwen3").status == 404 and lab.chat("llama3:7b").status == 404 and not other.requests


def test_records_keep_both_names(lab: Lab) -> None:
    lab.one(model={"aliases": ["chat"]})
    line = lab.gateway.access_line(lab.chat("chat").header("x-request-id") or "")
    assert (line["asked"], line["model"]) == ("chat", "m") and line["replica"].startswith("m/")


# --- models
def test_models_are_what_the_key_can_call_each_once_public_names_only(lab: Lab) -> None:
    engines = [lab.engine(), lab.engine(), lab.engine("openai_compatible")]
    gone = lab.engine()
    lab.serve(
        {
            "org/model-a": [replica(engine) for engine in engines],
            "qwen3:8b": {"aliases": ["chat"], "replicas": [replica(engines[0], format="gguf", quantization="Q4_K_M")]},
            "hidden": [replica(engines[0])],
            "down": [replica(gone)],
        },
        allowed=["org/*", "qwen3:8b", "down"],
    )
    gone.stop()
    listing = lab.call(path="/v1/models", method="GET").json()
    assert listing["object"] == "list"
    ids = [entry["id"] for entry in listing["data"]]
    assert ids == ["org/model-a", "qwen3:8b", "chat", "down"]  # a menu does not flicker with an engine's health
    text = json.dumps(listing)
    assert UPSTREAM_MODEL not in text and "127.0.0.1" not in text and "hidden" not in text
    fields = {"id", "object", "created", "owned_by", "format", "quantization", "context_length", "capabilities"}
    assert all(fields <= set(entry) for entry in listing["data"])
    assert [(entry["format"], entry["quantization"]) for entry in listing["data"][1:2]] == [("gguf", "Q4_K_M")]
    for path in ("org/model-a", "org%2Fmodel-a", "qwen3:8b", "qwen3%3A8b", "chat"):
        answer = lab.call(path=f"/v1/models/{path}", method="GET")
        assert answer.status == 200 and answer.json()["object"] == "model", path
    hidden, unknown = (lab.call(path=f"/v1/models/{name}", method="GET") for name in ("hidden", "nowhere"))
    assert (hidden.status, unknown.status) == (404, 404)
    assert hidden.body.replace(b"hidden", b"?") == unknown.body.replace(b"nowhere", b"?")
    assert hidden.error()["code"] == "model_not_found"


# --- errors
CONTEXT_WORDS = {
    "vllm": ("A", 400, "This model's maximum context length is 2048 tokens. However, you requested 5000 tokens."),
    "sglang": ("B", 400, "The input (5000 tokens) is longer than the model's context length (2048 tokens)."),
    "ollama": ("D", 400, "input length exceeds the context length"),
    "llama-cpp-python": ("D", 400, "Requested tokens (5000) exceed context window of 2048"),
    "string": ("C", 400, "the request is longer than the context length of 2048"),
    "framework": ("E", 400, "Prompt exceeds the context window of 2048"),
    "validation": ("B", 422, "maximum context length is 2048 tokens"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("words", CONTEXT_WORDS)
def test_a_prompt_that_is_too_long_is_the_same_400_from_every_engine(lab: Lab, words: str, stream: bool) -> None:
    """No retry, no fallback, the engine's health untouched."""
    shape, status, message = CONTEXT_WORDS[words]
    one, two, spare = (lab.engine(script=lambda x: x.fail(message, status, shape=shape)) for _ in range(3))
    lab.serve({"m": {"replicas": [replica(one), replica(two)], "fallbacks": ["spare"]}, "spare": [replica(spare)]})
    for attempt in range(1, 5):
        answer = lab.call(chat(stream=stream))
        error = answer.error()
        assert (answer.status, error["type"]) == (400, "invalid_request_error")
        assert error["code"] == "context_length_exceeded"
        assert "context" in error["message"] and "detail" not in answer.json()
        assert len(one.requests) + len(two.requests) == attempt and not spare.requests
    assert all(state["failures_in_a_row"] == 0 and state["routable"] for state in lab.gateway.replicas())


def test_the_sizes_an_engine_names_are_in_the_message(lab: Lab) -> None:
    message = "request (5000 tokens) exceeds the available context size (2048 tokens)"
    sizes = {"n_prompt_tokens": 5000, "n_ctx": 2048}
    body = error_body("A", message, 400, type_="exceed_context_size_error", **sizes)
    lab.one("llama_server", lambda x: x.reply(body, 400))
    error = lab.chat().error()
    assert error["code"] == "context_length_exceeded" and "5000" in error["message"] and "2048" in error["message"]


def test_too_long_told_inside_a_stream(lab: Lab) -> None:
    def script(x: Exchange) -> None:
        x.begin()
        x.event({"error": {"message": CONTEXT_WORDS["vllm"][2], "type": "BadRequestError", "code": 400}})
        x.done()

    engine = lab.one(script=script)
    answer = lab.stream()
    error = answer.stream_errors()[0] if answer.status == 200 else answer.error()
    assert error["code"] == "context_length_exceeded" and len(engine.requests) == 1
    (state,) = lab.gateway.replicas()
    assert state["failures_in_a_row"] == 0


ONE = b'{"model":"m","messages":[{"role":"user"}],'
BAD_BODIES: dict[str, tuple[bytes, int, str | None]] = {
    "empty": (b"", 400, None),
    "not JSON": (b"{", 400, None),
    "not UTF-8": (b'{"model":"m","messages":[{"role":"user","content":"\xff"}]}', 400, None),
    "an array": (b"[]", 400, None),
    "a string": (b'"m"', 400, None),
    "NaN": (b'{"model":"m","messages":[{"role":"user"}],"temperature":NaN}', 400, None),
    "trailing text": (b'{"model":"m","messages":[{"role":"user"}]} x', 400, None),
    "deeply nested": (b'{"model":"m","messages":' + b"[" * 5000 + b"]" * 5000 + b"}", 400, None),
    "no model": (b'{"messages":[{"role":"user","content":"x"}]}', 400, "model"),
    "model of a wrong type": (b'{"model":5,"messages":[{"role":"user","content":"x"}]}', 400, "model"),
    "empty model": (b'{"model":"","messages":[{"role":"user","content":"x"}]}', 400, "model"),
    "no messages": (b'{"model":"m"}', 400, "messages"),
    "messages of a wrong type": (b'{"model":"m","messages":"x"}', 400, "messages"),
    "a message of a wrong type": (b'{"model":"m","messages":["x"]}', 400, "messages[0]"),
    "stream of a wrong type": (ONE + b'"stream":"yes"}', 400, "stream"),
    "options of a wrong type": (ONE + b'"stream_options":[]}', 400, "stream_options"),
    "tokens of a wrong type": (ONE + b'"max_tokens":"9"}', 400, "max_tokens"),
    "tokens below zero": (ONE + b'"max_tokens":-1}', 400, "max_tokens"),
    "absurd n": (ONE + b'"n":100000}', 400, "n"),
    "the same key twice": (b'{"model":"m","messages":[{"role":"user"}],"n":1,"n":1}', 400, None),
    "the same key spelled two ways": (b'{"model":"m","mod\\u0065l":"m","messages":[{"role":"user"}]}', 400, None),
    "unknown model": (b'{"model":"other","messages":[{"role":"user","content":"x"}]}', 404, "model"),
    "lone surrogate": (b'{"model":"\\ud800","messages":[{"role":"user","content":"x"}]}', 400, None),
}


@pytest.mark.parametrize("case", BAD_BODIES)
def test_bodies_that_are_no_requests_get_the_same_envelope_and_reach_nobody(lab: Lab, case: str) -> None:
    body, status, param = BAD_BODIES[case]
    engine = lab.one()
    answer = lab.call(body)
    error = answer.error()
    assert (answer.status, error["type"]) == (status, "invalid_request_error") and error["code"]
    assert error["param"] == param or param is None
    assert answer.header("x-request-id") and answer.header("content-type") == "application/json" and not engine.requests


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("POST", "/v1/nothing", 404), ("GET", "/", 404), ("GET", "/v1", 404),
     ("GET", "/v1/chat/completions", 405), ("DELETE", "/v1/models", 405), ("POST", "/v1/models/m", 405),
     ("PUT", "/v1/embeddings", 405), ("PATCH", "/v1/completions", 405), ("POST", "/health", 405)],
)  # fmt: skip
def test_unknown_routes_and_methods_get_the_same_envelope(lab: Lab, method: str, path: str, status: int) -> None:
    lab.one()
    answer = lab.call(None, path, method=method)
    error = answer.error()
    assert (answer.status, error["type"]) == (status, "invalid_request_error") and error["code"]
    assert answer.header("x-request-id")


def test_a_missing_key_gets_the_same_envelope(lab: Lab) -> None:
    lab.one()
    answer = lab.call(chat(), key=None)
    assert answer.status == 401 and answer.error()["code"] == "invalid_api_key"
    assert answer.header("www-authenticate") == "Bearer"


@pytest.mark.parametrize("shape", "ABCDEF")
@pytest.mark.parametrize(
    ("status", "message", "shown", "code"),
    [(400, "top_k must be positive", 400, "invalid_value"), (401, "Unauthorized", 502, "engine_error"),
     (404, "The model `x` does not exist.", 502, "engine_error"), (422, "bad field", 422, "invalid_value"),
     (500, "Internal server error: x", 502, "engine_error"), (503, "Loading model", 503, "engine_error")],
)  # fmt: skip
def test_every_shape_of_engine_error_becomes_one_envelope(
    lab: Lab, shape: str, status: int, message: str, shown: int, code: str
) -> None:
    lab.one("openai_compatible", lambda x: x.fail(message, status, shape=shape))
    answer = lab.chat()
    assert (answer.status, answer.error()["code"]) == (shown, code)
    assert answer.header("retry-after") if shown == 503 else True


@pytest.mark.parametrize("status", [200, 400, 404, 500, 502, 503])
def test_an_html_page_is_never_shown(lab: Lab, status: int) -> None:
    """A proxy between the gateway and the engine speaks up."""
    lab.one(script=lambda x: x.html(status))
    answer = lab.chat()
    assert answer.status >= 400 and answer.error() and b"<" not in answer.body and b"10.1.2.3" not in answer.body


def test_an_error_document_with_status_200_is_an_error(lab: Lab) -> None:
    lab.one(script=lambda x: x.reply({"error": {"message": "CUDA out of memory", "code": 500}}))
    answer = lab.chat()
    assert answer.status == 502 and "CUDA" in answer.error()["message"]


@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b"{}", b'{"choices":[]}', b'{"choices":{}}', b"{" * 2000, b"\xff\xfe"]
)
def test_a_document_that_is_no_answer_is_an_error(lab: Lab, body: bytes) -> None:
    lab.one(script=lambda x: x.reply(body))
    answer = lab.chat()
    assert answer.status == 502 and answer.error()["code"]


def test_addresses_paths_and_traces_of_the_engine_stay_inside(lab: Lab) -> None:
    message = (
        "could not read /srv/weights/secret/model.safetensors from http://10.0.0.5:8000/v1 (host gpu-7.internal:8000)"
        ' key sk-abcdefghijklmnop\nTraceback (most recent call last):\n  File "/opt/engine/run.py", line 3'
    )
    lab.one(script=lambda x: x.fail(message, 500))
    body = lab.chat().body.decode()
    for secret in ("/srv/weights", "10.0.0.5", "gpu-7", "sk-abc", "Traceback", "/opt/engine"):
        assert secret not in body


# --- images
PIXEL = "data:image/png;base64," + "iVBORw0KGgo" * 100


def image(url: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": "what is it"}, {"type": "image_url", "image_url": {"url": url}}]
    return {"model": "m", "messages": [{"role": "user", "content": parts}]}


@pytest.mark.parametrize(
    "url",
    ["http://169.254.169.254/latest/", "http://127.0.0.1:9/", "http://[::ffff:10.0.0.1]/", "http://2130706433/",
     "file:///etc/passwd", "https://example.com/cat.png", "HTTP://EXAMPLE.COM/", "//example.com/x", "/etc/passwd", "",
     5, None.__class__.__name__, "http://example.com\\@127.0.0.1/", "ftp://x/", "gopher://x/", " data:x"],
)  # fmt: skip
def test_links_to_images_are_refused_before_anybody_fetches_them(lab: Lab, url: Any) -> None:
    engine = lab.one()
    answer = lab.call(image(url))
    assert answer.status == 400 and (answer.error()["param"] or "").startswith("messages[0].content[1]")
    assert not engine.requests


def test_images_inside_the_request_pass_untouched(lab: Lab) -> None:
    engine = lab.one()
    big = "data:image/png;base64," + "A" * 3_000_000
    for url in (PIXEL, big):
        assert lab.call(image(url)).status == 200
        assert engine.last().json()["messages"] == image(url)["messages"]


def test_hosts_the_operator_has_named_may_be_linked(lab: Lab) -> None:
    engine = lab.engine()
    lab.serve({"m": [replica(engine)]}, media={"allow_hosts": ["images.example"], "fetch": "engine"})
    assert lab.call(image("https://images.example/cat.png")).status == 200
    for url in ("https://images.example.evil/", "https://evil@images.example:80@127.0.0.1/", "https://x.images.example/"):
        assert lab.call(image(url)).status == 400
    assert len(engine.requests) == 1
