"""The error dialects of engines, and what of their words a client may see."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.failures import Failure, FailureKind, clean, read_failure

K = FailureKind


def read(status: int, answer: Any) -> Failure:
    return read_failure(status, answer if isinstance(answer, bytes) else json.dumps(answer).encode())


@pytest.mark.parametrize(
    ("answer", "message", "param"),
    [
        ({"error": {"message": "bad", "type": "BadRequestError", "param": "n", "code": 400}}, "bad", "n"),
        ({"object": "error", "message": "bad", "type": "x", "param": None, "code": 400}, "bad", None),
        ({"error": "bad"}, "bad", None),
        ({"detail": "bad"}, "bad", None),
        ({"detail": [{"loc": ["body", "messages", 0], "msg": "bad", "type": "x"}]}, "messages.0: bad", None),
        ({"detail": [{"loc": ["body"], "msg": "bad"}]}, "bad", None),
        ({"detail": [{"loc": None, "msg": "bad"}]}, "bad", None),
        ({"detail": [{"loc": 5, "msg": "bad"}]}, "bad", None),
        ({"message": "bad"}, "bad", None),
        (b"bad", "bad", None),
        (b"  bad\n", "bad", None),
    ],
)
def test_every_dialect_is_understood(answer: Any, message: str, param: str | None) -> None:
    failure = read(400, answer)
    assert (failure.message, failure.param, failure.status, failure.kind) == (message, param, 400, K.BAD_REQUEST)


@pytest.mark.parametrize(
    "answer",
    [b"", b"<html><h1>502 Bad Gateway</h1>", [], 5, None, {}, {"error": None}, {"error": []},
     {"error": {}}, {"detail": []},
     {"error": {"message": {"a": 1}}}, {"detail": 5}],
)  # fmt: skip
def test_without_words_there_is_still_a_sentence(answer: Any) -> None:
    failure = read(500, answer)
    assert failure.message == "The engine answered with an error and no explanation."
    assert failure.kind is K.BROKEN


@pytest.mark.parametrize(
    ("status", "answer", "kind"),
    [
        (400, {"error": {"message": "This model's maximum context length is 2048 tokens."}}, K.CONTEXT_LENGTH),
        (
            400,
            {"error": {"code": 400, "message": "the request exceeds", "type": "exceed_context_size_error"}},
            K.CONTEXT_LENGTH,
        ),
        (400, {"error": {"message": "x", "code": "context_length_exceeded"}}, K.CONTEXT_LENGTH),
        (500, {"error": "input length exceeds the context"}, K.CONTEXT_LENGTH),
        (0, {"error": {"message": "exceeds the context window"}}, K.CONTEXT_LENGTH),
        (401, {"error": {"message": "maximum context length"}}, K.CREDENTIALS),
        (403, b"", K.CREDENTIALS),
        (429, b"", K.OVERLOADED),
        (503, {"error": {"message": "server busy, please try again"}}, K.OVERLOADED),
        (500, {"error": "queue is full"}, K.OVERLOADED),
        (503, {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}, K.LOADING),
        (503, b"", K.BROKEN),
        (404, {"error": {"message": "The model `x` does not exist.", "type": "NotFoundError"}}, K.MODEL_MISSING),
        (404, {"error": 'model "x" not found, try pulling it first'}, K.MODEL_MISSING),
        (404, {"detail": "Not Found"}, K.UNSUPPORTED),
        (501, {"error": {"message": "This server does not support embeddings."}}, K.UNSUPPORTED),
        (400, {"error": {"message": "tool choice is not supported"}}, K.UNSUPPORTED),
        (400, {"error": {"message": "temperature must be positive"}}, K.BAD_REQUEST),
        (422, {"detail": [{"loc": ["body", "n"], "msg": "not an int"}]}, K.BAD_REQUEST),
        (500, {"error": {"message": "CUDA out of memory"}}, K.BROKEN),
        (502, b"<html>", K.BROKEN),
        (0, {"error": {"message": "EngineCore died"}}, K.BROKEN),
        (302, b"", K.BROKEN),
    ],
)
def test_kinds(status: int, answer: Any, kind: FailureKind) -> None:
    assert read(status, answer).kind is kind


@pytest.mark.parametrize("kind", FailureKind)
def test_the_callers_mistakes_touch_nobody(kind: FailureKind) -> None:
    failure = Failure(kind, "x", 400)
    mistakes = {K.CONTEXT_LENGTH, K.BAD_REQUEST, K.UNSUPPORTED}
    assert failure.retryable == (kind not in mistakes)
    assert failure.counts_against_replica == (kind not in mistakes | {K.OVERLOADED})


@pytest.mark.parametrize(
    "secret",
    [
        "http://10.0.0.5:8000/v1", "https://gpu-7.internal/x", "unix:///run/engine.sock", "10.0.0.5", "10.0.0.5:8000",
        "gpu-7.cluster.local:8000", "localhost:8000", "[fe80::1]:8000", "/srv/models/secret/model.gguf",
        "/home/alice/.cache/huggingface", "sk-abcdefgh12345678", "hf_abcdefgh12345678", "Bearer abcdefgh12345678",
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", ["{}", "failed at {} today", "('{}', 1)", 'open("{}")', "x={}"])
def test_addresses_paths_and_keys_are_taken_out(secret: str, form: str) -> None:
    text = clean(form.format(secret))
    assert secret not in text
    assert "[removed]" in text
    if form == "failed at {} today":
        assert text == "failed at [removed] today"


@pytest.mark.parametrize(
    "text",
    ["This model's maximum context length is 2048 tokens, however you requested 5000 (4000 in the messages).",
     "temperature must be in [0, 2], got 3.5", "Ratio 1/2 and/or 3/4", "tools[0].function.name: required", "漢字 🎭"],
)  # fmt: skip
def test_ordinary_words_stay(text: str) -> None:
    assert clean(text) == text


def test_a_trace_is_cut_off() -> None:
    assert clean('Boom.\n Traceback (most recent call last):\n  File "/srv/x.py", line 1') == "Boom."


def test_messages_are_bounded() -> None:
    assert len(clean("word " * 100_000)) <= 610
    assert len(read(500, b"x" * 1_000_000).message) <= 610


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["error", "message", "detail", "loc", "msg", "type", "code", "param"]), inner)
    ),
    max_leaves=10,
)


@given(
    ANY_JSON.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=50),
    st.sampled_from([0, 200, 400, 404, 429, 500]),
)
@settings(max_examples=200, deadline=None)
def test_whatever_an_engine_says_it_is_a_failure_with_words(answer: bytes, status: int) -> None:
    failure = read_failure(status, answer)
    assert failure.message
    assert failure.status == status
