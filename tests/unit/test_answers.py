"""Whole answers: usage, the client's name for the model, the encoding of vectors, and what is no answer."""

import base64
import json
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import Operation
from backends.failures import FailureKind
from gateway.answers import Answer, read_answer
from gateway.call import parse_call
from gateway.types import Usage

CHOICE = {"index": 0, "message": {"role": "assistant", "content": 'model "engine"'}, "finish_reason": "stop"}
USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}


def chat(body: bytes, asked: str = "chat") -> Answer:
    return read_answer(parse_call(Operation.CHAT, json.dumps({"model": asked, "messages": [{}]}).encode()), body)


def embeddings(body: bytes, **more: Any) -> Answer:
    return read_answer(
        parse_call(Operation.EMBEDDINGS, json.dumps({"model": "e", "input": "x", **more}).encode()), body
    )


def document(*vectors: Any, **more: Any) -> bytes:
    data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
    return json.dumps({"object": "list", "data": data, "model": "e", "usage": {"prompt_tokens": 5}} | more).encode()


def packed(*numbers: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()


def test_the_clients_name_and_nothing_else_changes() -> None:
    body = (
        b'{ "id":"x","model" : "Engine","choices":['
        + json.dumps(CHOICE).encode()
        + b'],"x":0.10,"meta":{"model":"Engine"}}\n'
    )
    answer = chat(body)
    assert answer.failure is None
    assert answer.body == body.replace(b'"model" : "Engine"', b'"model" : "chat"')


def test_an_answer_with_the_right_name_or_none_is_the_engines_own_bytes() -> None:
    for extra in ({"model": "chat"}, {}):
        body = json.dumps({"choices": [CHOICE], "usage": USAGE} | extra, indent=1).encode()
        assert chat(body).body is body


def test_usage_is_read() -> None:
    assert chat(json.dumps({"choices": [CHOICE], "usage": USAGE}).encode()).usage == Usage(3, 4)
    assert chat(json.dumps({"choices": [CHOICE], "usage": None}).encode()).usage is None
    assert embeddings(document([1.0])).usage == Usage(5, 0)


@pytest.mark.parametrize(
    "body",
    [b"", b"hello", b"[]", b"null", b'"x"', b"{", b"<html>", b"{}", b'{"choices":[]}', b'{"choices":null}',
     b'{"choices":{}}', b'{"choices":"x"}'],
)  # fmt: skip
def test_what_is_no_answer_is_a_broken_engine(body: bytes) -> None:
    answer = chat(body)
    assert answer.failure is not None
    assert answer.failure.kind is FailureKind.BROKEN
    assert answer.body == b""


def test_an_error_inside_a_200_is_an_error() -> None:
    answer = chat(b'{"error":{"message":"maximum context length is 5"},"choices":[{}]}')
    assert answer.failure is not None
    assert answer.failure.kind is FailureKind.CONTEXT_LENGTH


# --- vectors
@given(
    st.lists(
        st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=5),
        min_size=1,
        max_size=3,
    )
)
@settings(max_examples=100, deadline=None)
def test_both_encodings_hold_the_same_vectors(vectors: list[list[float]]) -> None:
    from_lists = json.loads(embeddings(document(*vectors), encoding_format="base64").body)
    assert [entry["embedding"] for entry in from_lists["data"]] == [packed(*vector) for vector in vectors]
    assert [entry["index"] for entry in from_lists["data"]] == list(range(len(vectors)))
    from_base64 = document(*[packed(*vector) for vector in vectors])
    for wanted in ({}, {"encoding_format": "float"}, {"encoding_format": None}):
        got = json.loads(embeddings(from_base64, **wanted).body)
        assert [entry["embedding"] for entry in got["data"]] == vectors


def test_vectors_in_the_encoding_asked_for_pass_as_they_came() -> None:
    for body, wanted in ((document([0.5, 1]), {}), (document(packed(0.5)), {"encoding_format": "base64"})):
        assert embeddings(body, **wanted).body is body


def test_embeddings_keep_usage_and_take_the_clients_name() -> None:
    answer = embeddings(document([0.5], model="engine"), encoding_format="base64")
    assert json.loads(answer.body)["model"] == "e"
    assert json.loads(answer.body)["usage"] == {"prompt_tokens": 5}


@pytest.mark.parametrize(
    ("vector", "wanted"),
    [(["x"], "base64"), ([None], "base64"), ([[0.1]], "base64"), ([1e300], "base64"), ([True, {}], "base64"),
     ("!!!", "float"), ("AAA", "float"), ("AAAA", "float"), ("ä", "float")],
)  # fmt: skip
def test_vectors_that_are_none_are_a_broken_engine(vector: Any, wanted: str) -> None:
    answer = embeddings(document(vector), encoding_format=wanted)
    assert answer.failure is not None
    assert answer.failure.kind is FailureKind.BROKEN


@pytest.mark.parametrize("data", [{"embedding": [1]}, [{"embedding": [1]}, {}], [{"embedding": [1]}, 5]])
def test_lists_of_vectors_that_are_none_are_a_broken_engine(data: Any) -> None:
    answer = embeddings(json.dumps({"data": data}).encode(), encoding_format="base64")
    assert answer.failure is not None
