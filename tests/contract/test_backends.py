"""One suite for every kind of engine: what `Backend` promises, each adapter keeps. A new adapter is found by itself."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import backends
from backends.base import REMOVE, SALT_FIELD, Backend, EngineLoad, ModelCard, ModelFormat, Operation, Probes
from backends.failures import Failure, FailureKind
from gateway import errors
from gateway.call import parse_call
from tests.doubles.dialects import DIALECTS, error_body

KINDS = backends.kinds()
SHAPES = "ABCDEF"
K = FailureKind
DIFFERENT = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=KINDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return backends.load(request.param)


# --- what it is
def test_it_is_named_after_its_module(backend: Backend) -> None:
    assert backend.kind in KINDS and backends.load(backend.kind) is backend
    assert backend.kind.isidentifier() and backend.kind == backend.kind.lower()


def test_it_is_a_value(backend: Backend) -> None:
    """The same object serves every replica, so nothing can be set on it."""
    with pytest.raises((AttributeError, TypeError)):
        backend.kind = "other"  # type: ignore[misc]


def test_formats_are_formats(backend: Backend) -> None:
    assert isinstance(backend.formats, frozenset) and all(isinstance(one, ModelFormat) for one in backend.formats)


def is_path(path: object) -> bool:
    return (
        isinstance(path, str)
        and path.startswith("/")
        and not path.endswith("/")
        and "//" not in path
        and ".." not in path
        and path.isascii()
        and not any(character.isspace() for character in path)
    )


def test_paths_are_paths_of_operations(backend: Backend) -> None:
    assert backend.paths and all(isinstance(operation, Operation) for operation in backend.paths)
    assert all(is_path(path) for path in backend.paths.values())
    assert len(set(backend.paths.values())) == len(backend.paths)


def test_probes_are_paths_that_are_safe_to_ask(backend: Backend) -> None:
    """None of them is an inference path, and none says by its words that it changes something."""
    probes = backend.probes
    assert isinstance(probes, Probes)
    asked = [path for path in (probes.health, probes.models, probes.load) if path is not None]
    assert asked and all(is_path(path) for path in asked)
    assert not set(asked) & set(backend.paths.values())
    changing = ("generate", "unload", "delete", "flush", "sleep", "wake")
    assert not any(word in path for path in asked for word in changing)


# --- requests
BODIES: dict[Operation, dict[str, Any]] = {
    Operation.CHAT: {
        "model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True, "max_completion_tokens": 5,
        "response_format": {"type": "json_object"}, "tools": [{"type": "function", "function": {"name": "f"}}],
        "future_field": {"x": [1, None]}, "stop": None,
    },
    Operation.COMPLETIONS: {"model": "m", "prompt": "x", "max_tokens": 5, "future_field": None},
    Operation.EMBEDDINGS: {"model": "m", "input": ["x"], "encoding_format": "base64", "dimensions": 8},
    Operation.RERANK: {"model": "m", "query": "x", "documents": ["a", {"text": "b"}], "top_n": 1},
    Operation.TOKENIZE: {"model": "m", "prompt": "x", "add_special_tokens": False},
    Operation.DETOKENIZE: {"model": "m", "tokens": [1, 2]},
    Operation.TRANSCRIPTIONS: {"model": "m", "language": "en"},
    Operation.TRANSLATIONS: {"model": "m", "prompt": "x"},
    Operation.SPEECH: {"model": "m", "input": "x", "voice": "a", "response_format": "mp3"},
}  # fmt: skip


@pytest.mark.parametrize("operation", Operation)
def test_edits_are_top_level_values_and_leave_the_request_alone(backend: Backend, operation: Operation) -> None:
    """Never the model's name nor the request for usage: those are the gateway's business."""
    if operation not in backend.paths:
        pytest.skip("not an operation of this engine")
    body = BODIES[operation]
    before = json.dumps(body)
    edits = backend.edits(operation, body)
    assert isinstance(edits, Mapping) and json.dumps(body) == before
    assert all(isinstance(key, str) and key for key in edits) and not {"model", "stream"} & set(edits)
    if body.get("stream"):
        assert "include_usage" not in str(edits.get("stream_options", ""))
    json.dumps({key: value for key, value in edits.items() if value is not REMOVE})
    assert backend.edits(operation, body) == edits


SALTS = ('"cache_salt":"theirs"', '"cache_salt":null', r'"cache\u005fsalt":"theirs"', '"cache_salt":["a","b"]', "")


SALTED = [(kind, operation) for kind in KINDS for operation in sorted(backends.load(kind).salted)]


@pytest.mark.parametrize("theirs", SALTS)
@pytest.mark.parametrize(("kind", "operation"), SALTED)
def test_where_the_gateway_sets_a_salt_a_clients_own_is_gone(kind: str, operation: Operation, theirs: str) -> None:
    """Otherwise there would be two, and which of them counts the engine's guess."""
    backend = backends.load(kind)
    assert operation in backend.paths and not operation.takes_form and not backend.translates
    body = {key: value for key, value in BODIES[operation].items() if key != "future_field"}
    raw = json.dumps(body).encode()[:-1] + (b"," + theirs.encode() if theirs else b"") + b"}"
    call = parse_call(operation, raw)
    sent = call.for_engine("engine", backend.edits(operation, call.body), "ours")
    assert [value for key, value in json.loads(sent, object_pairs_hook=list) if key == SALT_FIELD] == ["ours"]
    plain = parse_call(operation, json.dumps(body).encode()).for_engine("engine", backend.edits(operation, body))
    assert json.loads(sent) == json.loads(plain) | {SALT_FIELD: "ours"}


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("odd", [None, 5, "x", [], {}, [None], {"type": None}, True])
def test_edits_survive_fields_of_any_type(backend: Backend, operation: Operation, odd: Any) -> None:
    """Only the fields the gateway has checked are what they should be."""
    if operation not in backend.paths:
        pytest.skip("not an operation of this engine")
    checked = {"model", "messages", "prompt", "input", "stream", "max_tokens", "max_completion_tokens", "n", "query",
               "documents", "top_n", "tokens"}  # fmt: skip
    extra = ("temperature", "top_p", "seed", "user", "tool_choice", "logit_bias", "reasoning_effort", "options")
    body = {key: value if key in checked else odd for key, value in BODIES[operation].items()}
    backend.edits(operation, body | dict.fromkeys(extra, odd))
    backend.refuse(operation, body | dict.fromkeys(extra, odd))
    for name in ("response_format", "tools", "logprobs", "options", "stop", "format", "chat_template_kwargs", "suffix"):
        given = BODIES[operation] | {name: odd, "stream": False}
        backend.edits(operation, given)
        if backend.refuse(operation, given) is None and backend.translates and not operation.passes:
            backend.translate(operation, given, 4096)


ODD_MESSAGES: list[Any] = [
    {}, {"role": None}, {"role": "user", "content": None}, {"role": "user", "content": [None]},
    {"role": "user", "content": [{"type": "image_url"}]}, {"role": "user", "content": [{"type": "text", "text": None}]},
    {"role": "assistant", "tool_calls": [None]}, {"role": "assistant", "tool_calls": [{"function": {}}]},
    {"role": "assistant", "tool_calls": [{"id": 5, "function": {"name": 5, "arguments": "{"}}]},
    {"role": "tool", "tool_call_id": [], "content": "x"}, {"role": 5, "content": 5}, {"content": {}},
]  # fmt: skip


@pytest.mark.parametrize("message", ODD_MESSAGES, ids=str)
def test_messages_of_any_kind_are_refused_or_said(backend: Backend, message: dict[str, Any]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}, message]}
    if Operation.CHAT in backend.paths and backend.refuse(Operation.CHAT, body) is None:
        backend.edits(Operation.CHAT, body)
        if backend.translates:
            json.dumps(backend.translate(Operation.CHAT, body, None))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2)
    | st.dictionaries(
        st.sampled_from("choices delta tool_calls index id function name usage message content done error response"
                        " tokens results embeddings role score prompt_eval_count created_at".split()),
        inner, max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@DIFFERENT
@given(answer=JSON_VALUES)
def test_answers_of_any_kind_are_fixed_or_left(backend: Backend, answer: Any) -> None:
    """What an engine sends must never be an exception of the gateway's."""
    for operation in backend.fixes:
        backend.fix_answer(operation, json.loads(json.dumps(answer)), BODIES[operation])
        fixer = backend.stream_fixer(operation)
        if fixer is not None and isinstance(answer, dict):
            for chunk in fixer.fix(json.loads(json.dumps(answer))):
                json.dumps(chunk)


def test_fixes_are_of_operations_it_has(backend: Backend) -> None:
    assert backend.fixes <= set(backend.paths) and isinstance(backend.capabilities, frozenset)
    for operation in backend.fixes:
        assert operation.generates or backend.stream_fixer(operation) is None or backend.translates
    assert backend.stream_type in (b"text/event-stream", b"application/x-ndjson")


# --- readiness
@pytest.mark.parametrize(("status", "ready"), [(200, True), (500, False), (502, False), (503, False)])
def test_only_an_engine_that_answers_is_ready(backend: Backend, status: int, ready: bool) -> None:
    for body in (b"", b'{"status":"ok"}'):
        assert backend.is_ready(status, body) is ready


def test_loading_is_told_from_broken(backend: Backend) -> None:
    body = b'{"error":{"message":"Loading model","type":"unavailable_error","code":503}}'
    assert backend.is_ready(503, body) is False and backend.read_failure(503, body).kind is K.LOADING


# --- models
@pytest.mark.parametrize("dialect", DIALECTS)
def test_models_are_read_from_any_list(backend: Backend, dialect: str) -> None:
    names = ["org/a-7b", "b:8b", "日本"]
    cards = backend.read_models(json.dumps(DIALECTS[dialect].models(names)).encode())
    assert isinstance(cards, tuple) and [card.id for card in cards] == names
    for card in cards:
        assert isinstance(card, ModelCard) and isinstance(card.details, dict)
        assert card.context_length is None or (isinstance(card.context_length, int) and card.context_length > 0)


def test_an_empty_list_is_a_list(backend: Backend) -> None:
    assert backend.read_models(b'{"object":"list","data":[]}') == ()


NO_LISTS = [b"", b"null", b"5", b'"x"', b"[]", b"{", b"<html></html>", b"\xff\xfe", b'{"data":null}', b'{"data":{}}',
            b'{"object":"list"}', b'{"error":{"message":"x"}}', b"[" * 5000]  # fmt: skip


@pytest.mark.parametrize("body", NO_LISTS, ids=range(len(NO_LISTS)))
def test_what_is_no_list_is_a_value_error(backend: Backend, body: bytes) -> None:
    with pytest.raises(ValueError):
        backend.read_models(body)


@pytest.mark.parametrize(
    "entry", [None, 5, "x", [], {}, {"id": None}, {"id": 5}, {"id": "a", "max_model_len": "x", "meta": []},
              {"id": "a", "max_model_len": -1, "meta": None}, {"id": "a", "meta": {"n_ctx_train": "x"}}],
    ids=str,
)  # fmt: skip
def test_odd_entries_of_a_list_are_skipped_or_read_without_their_nonsense(backend: Backend, entry: Any) -> None:
    cards = backend.read_models(json.dumps({"data": [entry, {"id": "good"}]}).encode())
    assert cards[-1].id == "good" and all(card.id in ("a", "good") and card.context_length is None for card in cards)


# --- load
# An answer of each engine's load path, whole, and the same with every figure missing.
LOADS: dict[str, tuple[bytes, EngineLoad, bytes]] = {
    "vllm": (
        b"# HELP vllm:num_requests_running x\n# TYPE vllm:num_requests_running gauge\n"
        b'vllm:num_requests_running{engine="0",model_name="a"} 3.0\n'
        b'vllm:num_requests_running{engine="1",model_name="a"} 4.0\n'
        b'vllm:num_requests_waiting{engine="0",model_name="a"} 2.0\n'
        b'vllm:num_requests_waiting{engine="1",model_name="a"} 0.0\n'
        b'vllm:num_requests_waiting_by_reason{engine="0",model_name="a",reason="capacity"} 2.0\n'
        b'vllm:kv_cache_usage_perc{engine="0",model_name="a"} 0.25\n'
        b'vllm:kv_cache_usage_perc{engine="1",model_name="a"} 0.75\n',
        EngineLoad(7, 2, 0.5),
        b'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 2.0\nprocess_cpu_seconds_total 5\n',
    ),
    "llama_server": (
        b"# HELP llamacpp:requests_processing x\nllamacpp:requests_processing 2\nllamacpp:requests_deferred 1\n"
        b"llamacpp:kv_cache_usage_ratio 0.5\nllamacpp:n_decode_total 500\n",
        EngineLoad(2, 1, 0.5),
        b"llamacpp:n_decode_total 500\n",
    ),
    "sglang": (
        b'{"timestamp":"x","version":"0.5","loads":[{"dp_rank":0,"num_running_reqs":3,"num_waiting_reqs":2,'
        b'"token_usage":0.25},{"dp_rank":1,"num_running_reqs":4,"num_waiting_reqs":0,"token_usage":0.75}]}',
        EngineLoad(7, 2, 0.5),
        b'{"loads":[{"dp_rank":0}]}',
    ),
    "tensorrt_llm": (
        b'trtllm_num_requests_running{model_name="m",engine_type="pytorch"} 3.0\n'
        b'trtllm_num_requests_waiting{model_name="m",engine_type="pytorch"} 2.0\n'
        b'trtllm_kv_cache_utilization{model_name="m",engine_type="pytorch"} 0.5\n',
        EngineLoad(3, 2, 0.5),
        b"trtllm_request_success_total 5\n",
    ),
    "llamacpp": (b'{"running":1,"waiting":0,"kv_used":0.125}', EngineLoad(1, 0, 0.125), b"{}"),
}


def test_every_engine_with_a_load_path_has_an_example_here(backend: Backend) -> None:
    assert (backend.probes.load is None) or backend.kind in LOADS


@pytest.mark.parametrize("kind", LOADS)
def test_load_is_the_engines_own_word(kind: str) -> None:
    whole, expected, _ = LOADS[kind]
    assert backends.load(kind).read_load(whole) == expected


def all_unknown(load: EngineLoad) -> bool:
    return all(getattr(load, field.name) is None for field in fields(load))


def test_what_an_engine_does_not_say_is_unknown_and_never_zero(backend: Backend) -> None:
    if backend.kind in LOADS:
        assert all_unknown(backend.read_load(LOADS[backend.kind][2]))
    assert all_unknown(backend.read_load(b"{}" if backend.kind == "llamacpp" else b""))


def test_zero_is_zero_when_the_engine_says_so(backend: Backend) -> None:
    if backend.kind not in LOADS:
        pytest.skip("publishes no load")
    text = LOADS[backend.kind][0].decode()
    for number in ("3.0", "4.0", "2.0"):
        text = text.replace(f"}} {number}", "} 0")
    zero = text.replace("processing 2", "processing 0").replace('"running":1', '"running":0')
    zero = zero.replace('running_reqs":3', 'running_reqs":0').replace('running_reqs":4', 'running_reqs":0')
    assert backend.read_load(zero.encode()).running == 0


GARBAGE_LOADS = [b"", b"null", b"<html></html>", b"\xff\xfe", b"{", b"[]", b'"x"', b"vllm:num_requests_running\n",
                 b"vllm:num_requests_running{ NaN\n", b"llamacpp:requests_processing x\n",
                 b"vllm:num_requests_running NaN\n", b"vllm:num_requests_running +Inf\n",
                 b"llamacpp:requests_processing -Inf\n", b'{"running":"x","waiting":[],"kv_used":{}}',
                 b'{"running":null}', b'{"loads":[5,{"num_running_reqs":"x","token_usage":null}]}',
                 b'[{"num_reqs":1}]', b'{"loads":{}}']  # fmt: skip


@pytest.mark.parametrize("body", GARBAGE_LOADS, ids=range(len(GARBAGE_LOADS)))
def test_garbage_on_the_load_path_is_unknown_load(backend: Backend, body: bytes) -> None:
    assert all_unknown(backend.read_load(body))


def in_range(load: EngineLoad) -> bool:
    counts = all(value is None or (isinstance(value, int) and value >= 0) for value in (load.running, load.waiting))
    return counts and (load.kv_used is None or math.isfinite(load.kv_used))


@DIFFERENT
@given(body=st.binary(max_size=300))
def test_load_of_any_bytes_is_a_load(backend: Backend, body: bytes) -> None:
    assert in_range(backend.read_load(body))


# --- failures
# cause: (status, message, type, the kind it means). The canonical translation, engine by engine.
CAUSES: dict[str, tuple[int, str, str, FailureKind]] = {
    "gateway's key refused, 401": (401, "Unauthorized", "", K.CREDENTIALS),
    "gateway's key refused, 403": (403, "Forbidden", "", K.CREDENTIALS),
    "context, vLLM": (400, "This model's maximum context length is 2048 tokens.", "BadRequestError", K.CONTEXT_LENGTH),
    "context, SGLang": (400, "The input (5000 tokens) is longer than the model's context length (2048 tokens).",
                        "BadRequestError", K.CONTEXT_LENGTH),
    "context, Ollama": (400, "the input length exceeds the context length", "invalid_request_error", K.CONTEXT_LENGTH),
    "context, llama-cpp-python": (400, "Requested tokens (5000) exceed context window of 2048", "", K.CONTEXT_LENGTH),
    "context, as a 500": (500, "Requested tokens (5000) exceed context window of 2048", "", K.CONTEXT_LENGTH),
    "bad parameter": (400, "temperature must be non-negative", "BadRequestError", K.BAD_REQUEST),
    "bad parameter, 422": (422, "Input should be a valid integer", "UnprocessableEntityError", K.BAD_REQUEST),
    "too large for the engine": (413, "payload too large", "", K.BAD_REQUEST),
    "unknown model, vLLM": (404, "The model `x` does not exist.", "NotFoundError", K.MODEL_MISSING),
    "unknown model, Ollama": (404, "model 'x' not found", "not_found_error", K.MODEL_MISSING),
    "unknown model, router": (400, "model 'x' not found", "invalid_request_error", K.MODEL_MISSING),
    "not loaded, router": (400, "model is not loaded", "invalid_request_error", K.MODEL_MISSING),
    "no such route": (404, "Not Found", "", K.UNSUPPORTED),
    "not implemented": (501, "This server does not support metrics", "not_supported_error", K.UNSUPPORTED),
    "cannot do tools, Ollama": (400, "x does not support tools", "invalid_request_error", K.UNSUPPORTED),
    "full, Ollama": (503, "server busy, please try again.", "", K.OVERLOADED),
    "full, SGLang": (503, "The request queue is full.", "", K.OVERLOADED),
    "full, router": (500, "model limit reached, try again later", "server_error", K.OVERLOADED),
    "full, any": (429, "slow down", "", K.OVERLOADED),
    "loading, llama-server": (503, "Loading model", "unavailable_error", K.LOADING),
    "loading, TabbyAPI": (503, "No models are currently loaded.", "", K.LOADING),
    "starting, no words": (503, "", "", K.BROKEN),
    "engine dead, vLLM": (500, "EngineCore encountered an issue.", "InternalServerError", K.BROKEN),
    "a bug": (500, "Internal server error: list index out of range", "InternalServerError", K.BROKEN),
    "bad gateway": (502, "bad gateway", "", K.BROKEN),
    "gateway timeout": (504, "timeout", "", K.BROKEN),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_is_read_from_every_shape_of_error(backend: Backend, cause: str, shape: str) -> None:
    status, message, type_, kind = CAUSES[cause]
    failure = backend.read_failure(status, error_body(shape, message, status, type_=type_))
    assert isinstance(failure, Failure) and failure.kind is kind and failure.status == status
    assert failure.message and (not message or message[:20] in failure.message)


# kind: (status, type, code, tried elsewhere, held against the replica)
CANONICAL: dict[FailureKind, tuple[set[int], str, str, bool, bool]] = {
    K.CONTEXT_LENGTH: ({400}, "invalid_request_error", "context_length_exceeded", False, False),
    K.BAD_REQUEST: ({400, 413, 422}, "invalid_request_error", "invalid_value", False, False),
    K.UNSUPPORTED: ({400}, "invalid_request_error", "unsupported_value", False, False),
    K.MODEL_MISSING: ({502}, "server_error", "engine_error", True, True),
    K.CREDENTIALS: ({502}, "server_error", "engine_error", True, True),
    K.OVERLOADED: ({429, 503}, "server_error", "", True, False),
    K.LOADING: ({503}, "server_error", "engine_error", True, True),
    K.BROKEN: ({502, 503}, "server_error", "engine_error", True, True),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_what_the_client_is_told(backend: Backend, cause: str) -> None:
    status, message, type_, kind = CAUSES[cause]
    error = errors.from_failure(backend.read_failure(status, error_body("A", message, status, type_=type_)))
    statuses, shown_type, code, retryable, held_against = CANONICAL[kind]
    shown = json.loads(errors.body(error))["error"]
    assert error.status in statuses and shown["type"] == shown_type and shown["code"] == (code or shown["code"])
    assert (error.retryable, error.counts_against_replica) == (retryable, held_against)
    if error.status in (429, 503):
        assert dict(errors.headers(error))[b"retry-after"]
    assert error.status not in (401, 403)  # the gateway's own credentials are never the caller's affair


def test_fields_of_llama_servers_own_context_error(backend: Backend) -> None:
    sizes = {"n_prompt_tokens": 5000, "n_ctx": 2048}
    message = "the request exceeds the available context size"
    body = error_body("A", message, 400, type_="exceed_context_size_error", **sizes)
    assert backend.read_failure(400, body).kind is K.CONTEXT_LENGTH


def test_openais_own_code_for_a_prompt_that_is_too_long(backend: Backend) -> None:
    error = {"message": "too many", "type": "x", "param": "messages", "code": "context_length_exceeded"}
    failure = backend.read_failure(400, json.dumps({"error": error}).encode())
    assert (failure.kind, failure.param) == (K.CONTEXT_LENGTH, "messages")


def test_frameworks_validation_errors_name_the_field(backend: Backend) -> None:
    body = json.dumps({"detail": [{"loc": ["body", "messages", 0], "msg": "Field required", "type": "missing"}]})
    failure = backend.read_failure(422, body.encode())
    assert failure.kind is K.BAD_REQUEST and failure.message == "messages.0: Field required"


ODD_ERRORS = [b"", b"null", b"[]", b"5", b"{}", b'{"error":null}', b'{"error":[]}', b'{"error":{}}', b'{"detail":[]}',
              b'{"detail":[{}]}', b'{"detail":[{"loc":5,"msg":{}}]}',
              b'{"error":{"message":{"a":1},"code":[],"type":5}}',
              b"<html>nginx</html>", b"\xff\xfe\x00", b"{" * 3000, b'{"error":' * 3000]  # fmt: skip


@pytest.mark.parametrize("body", ODD_ERRORS, ids=range(len(ODD_ERRORS)))
@pytest.mark.parametrize("status", [0, 400, 404, 429, 500, 503])
def test_errors_without_sense_still_have_a_message(backend: Backend, body: bytes, status: int) -> None:
    failure = backend.read_failure(status, body)
    assert failure.message and "<" not in failure.message
    assert isinstance(errors.from_failure(failure), errors.GatewayError)


@pytest.mark.parametrize("shape", SHAPES)
def test_addresses_paths_keys_and_traces_are_not_in_a_message(backend: Backend, shape: str) -> None:
    secrets = ("http://10.0.0.5:8000/v1", "10.0.0.6:8000", "gpu-7.internal:8000", "/srv/weights/private/model",
               "sk-abcdefghijklmnop", "hf_abcdefghijklmnop", "[fd00::1]:8000")  # fmt: skip
    text = f"failed: {' '.join(secrets)}\nTraceback (most recent call last):\n  File x, line 3"
    message = backend.read_failure(500, error_body(shape, text, 500)).message
    assert message.startswith("failed") and not [secret for secret in (*secrets, "Traceback") if secret in message]


def test_a_message_is_short(backend: Backend) -> None:
    assert len(backend.read_failure(400, error_body("D", "long " * 10_000, 400)).message) < 1000


@DIFFERENT
@given(status=st.integers(0, 599), body=st.binary(max_size=200))
def test_any_answer_is_some_failure(backend: Backend, status: int, body: bytes) -> None:
    failure = backend.read_failure(status, body)
    assert failure.kind in FailureKind and failure.message and failure.status == status
    assert errors.from_failure(failure).status >= 400
