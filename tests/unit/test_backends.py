"""The adapters: what each engine's answers mean. Promises that all share are in the contract suite."""

import json

import pytest

import backends
from backends.base import EngineLoad, ModelFormat, OpenAICompatible, Operation
from backends.failures import FailureKind

GENERIC, VLLM, LLAMA = (backends.load(kind) for kind in ("openai_compatible", "vllm", "llama_server"))


def test_kinds_are_the_modules() -> None:
    assert {"llama_server", "llamacpp", "openai_compatible", "vllm"} <= set(backends.kinds())
    assert not {"base", "failures", "promtext", "__init__"} & set(backends.kinds())
    assert list(backends.kinds()) == sorted(backends.kinds())


@pytest.mark.parametrize("kind", ["", "base", "failures", "os", "vllm.x", "..", "VLLM", "nope"])
def test_other_names_are_no_kinds(kind: str) -> None:
    with pytest.raises(LookupError, match=r"known: .*vllm"):
        backends.load(kind)


@pytest.mark.parametrize("kind", ["openai_compatible", "vllm", "llama_server"])
def test_what_the_http_adapters_say_of_themselves(kind: str) -> None:
    backend = backends.load(kind)
    assert backend.kind == kind
    missing = {"vllm": {Operation.SPEECH}, "llama_server": {Operation.SPEECH, Operation.TRANSLATIONS}}
    assert set(backend.paths) == set(Operation) - missing.get(kind, set())
    assert backend.probes.models == "/v1/models"
    for operation in set(Operation) - {Operation.TOKENIZE}:
        body = {"model": "m", "stream": True, "future": None}
        assert not backend.edits(operation, body) and backend.refuse(operation, body) is None
        assert body == {"model": "m", "stream": True, "future": None}


def test_formats() -> None:
    assert (GENERIC.formats, VLLM.formats, LLAMA.formats) == (
        frozenset(), frozenset({ModelFormat.SAFETENSORS}), frozenset({ModelFormat.GGUF}),
    )  # fmt: skip


@pytest.mark.parametrize(("status", "ready"), [(200, True), (401, True), (404, True), (500, False), (503, False)])
def test_ready(status: int, ready: bool) -> None:
    for backend in (GENERIC, VLLM, LLAMA):
        assert backend.is_ready(status, b'{"error":{"message":"Loading model"}}') is ready


def test_only_text_is_generated() -> None:
    assert [operation for operation in Operation if operation.generates] == [Operation.CHAT, Operation.COMPLETIONS]


# --- model lists
def test_models() -> None:
    listing = {
        "data": [{"id": "a", "max_model_len": 4096}, {"id": "b", "max_model_len": None}, {"no": "id"}, 5, {"id": 3}]
    }
    cards = VLLM.read_models(json.dumps(listing).encode())
    assert [(card.id, card.context_length) for card in cards] == [("a", 4096), ("b", None)]
    assert cards[0].details == {"id": "a", "max_model_len": 4096}


def test_llama_server_tells_the_trained_context() -> None:
    listing = {
        "data": [{"id": "a", "meta": {"n_ctx_train": 8192}}, {"id": "b", "meta": None}, {"id": "c", "max_model_len": 5}]
    }
    cards = LLAMA.read_models(json.dumps(listing).encode())
    assert [card.context_length for card in cards] == [8192, None, 5]


@pytest.mark.parametrize("body", [b"", b"x", b"[]", b"{}", b'{"data":{}}', b'{"data":null}', b"null", b"\xff"])
def test_what_is_no_model_list(body: bytes) -> None:
    for backend in (GENERIC, VLLM, LLAMA):
        with pytest.raises(ValueError):
            backend.read_models(body)


# --- load
VLLM_PAGE = b"""\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 50.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
"""


def test_vllm_load_is_summed_and_its_share_averaged() -> None:
    expected = EngineLoad(running=6, waiting=1, kv_used=0.375)
    assert VLLM.read_load(VLLM_PAGE) == expected
    without_type = VLLM_PAGE.split(b"\n", 1)[1]
    assert VLLM.read_load(without_type) == expected


def test_vllm_before_0_10() -> None:
    assert VLLM.read_load(b"vllm:gpu_cache_usage_perc 0.5\n") == EngineLoad(kv_used=0.5)


def test_llama_server_load() -> None:
    page = b"llamacpp:requests_processing 3\nllamacpp:requests_deferred 0\nllamacpp:kv_cache_usage_ratio 0.25\n"
    assert LLAMA.read_load(page) == EngineLoad(3, 0, 0.25)
    assert LLAMA.read_load(page[:32]) == EngineLoad(running=3)


@pytest.mark.parametrize("body", [b"", b"{}", b"<html>", b"\xff", b"x 1"])
def test_unknown_is_never_zero(body: bytes) -> None:
    for backend in (GENERIC, VLLM, LLAMA):
        assert backend.read_load(body) == EngineLoad(None, None, None)


def test_failures_are_read_by_the_shared_reader() -> None:
    for backend in (GENERIC, VLLM, LLAMA):
        failure = backend.read_failure(
            503, b'{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}'
        )
        assert failure.kind is FailureKind.LOADING


def test_an_adapter_is_its_differences() -> None:
    assert OpenAICompatible(kind="x").paths == GENERIC.paths
    assert hasattr(VLLM, "__dataclass_fields__")
