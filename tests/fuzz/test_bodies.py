"""Any JSON, and nearly JSON, as a body: an answer or a refusal in OpenAI's form, and the connection stays usable."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.doubles.dialects import UPSTREAM_MODEL, USAGE
from tests.doubles.engine import Exchange, answer
from tests.e2e.harness import Lab, chat, replica
from tests.e2e.wire import Answer, Wire, request
from tests.fuzz.conftest import SERVER

FUZZ = settings.get_profile("fuzz")
STATUSES = {200, 400, 404, 413}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat(
        stream=True, n=2, max_tokens=5, max_completion_tokens=5, stop=["x"], stream_options={"include_usage": True},
        tools=[{"type": "function", "function": {"name": "f"}}], response_format={"type": "json_object"},
    ),
    "/v1/completions": {"model": "m", "prompt": ["x", "y"], "stream": False, "max_tokens": 5, "echo": False, "n": 1},
    "/v1/embeddings": {"model": "m", "input": ["x", "y"], "encoding_format": "base64", "dimensions": 4},
    "/v1/rerank": {"model": "m", "query": "x", "documents": ["a", "b"], "top_n": 1},
    "/v1/tokenize": {"model": "m", "prompt": "x"},
    "/v1/detokenize": {"model": "m", "tokens": [1, 2]},
}  # fmt: skip

texts = st.text(st.characters(codec="utf-8"), max_size=12)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(10**30), 10**30), st.floats(), texts,
    st.sampled_from(["m", "", "model", "\x00", "😀", "m@gguf", "m/../m", "http://127.0.0.1/", "data:,x", "file:///x"]),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["model", "type", "content", "role", "text", "url", "x"]) | texts, inner, max_size=4
        )
    ),
    max_leaves=12,
)


def answer_anything(x: Exchange) -> None:
    """A healthy engine that never complains of a request."""
    path = x.request.target
    if path.endswith("/rerank"):
        x.reply({"model": UPSTREAM_MODEL, "results": [{"index": 0, "relevance_score": 0.5}], "usage": USAGE})
    elif path.endswith("/detokenize"):
        x.reply({"prompt": "x"})
    elif path.endswith("/tokenize"):
        x.reply({"count": 2, "max_model_len": 64, "tokens": [1, 2]})
    else:
        answer(x)


@pytest.fixture
def wire(lab: Lab) -> Iterator[Wire]:
    engine = lab.engine(script=answer_anything)
    lab.serve({"m": [replica(engine)]}, server=SERVER | {"idle_timeout": "60s"})
    with lab.gateway.wire() as wire:
        yield wire
        last = wire.ask("POST", "/v1/chat/completions", chat(), key=lab.key).rest()  # the same connection, at the end
        assert last.status == 200 and last.complete


def check(got: Answer, sent: Any) -> None:
    try:
        assert got.complete and got.status in STATUSES, got.status
        if got.status != 200:
            got.error()
            assert got.header("content-type") == "application/json"
        elif (got.header("content-type") or "").startswith("text/event-stream"):
            assert got.ended_well() or len(got.stream_errors()) == 1
        else:
            assert isinstance(got.json(), dict)
    except (AssertionError, ValueError, KeyError) as error:
        raise AssertionError(f"sent {sent!r}, got {got.status} {got.body[:300]!r}") from error


def encoded(value: Any) -> bytes:
    """NaN and lone surrogates included: what other languages' libraries send."""
    return json.dumps(value).encode()


@pytest.mark.parametrize("path", BODIES)
def test_any_json(lab: Lab, wire: Wire, path: str) -> None:
    @settings(FUZZ, max_examples=60)
    @given(values)
    def run(value: Any) -> None:
        check(wire.ask("POST", path, encoded(value), key=lab.key).rest(), value)

    run()


@pytest.mark.parametrize("path", BODIES)
def test_good_bodies_with_a_field_or_two_of_any_kind(lab: Lab, wire: Wire, path: str) -> None:
    fields = st.sampled_from(
        sorted({name for body in BODIES.values() for name in body} | {"logit_bias", "temperature"})
    )

    @settings(FUZZ, max_examples=90)
    @given(st.dictionaries(fields, values, min_size=1, max_size=2))
    def run(changes: dict[str, Any]) -> None:
        body = BODIES[path] | changes
        check(wire.ask("POST", path, encoded(body), key=lab.key).rest(), body)

    run()


@pytest.mark.parametrize("path", BODIES)
def test_messages_and_lists_of_any_kind(lab: Lab, wire: Wire, path: str) -> None:
    """One level further down, where engines' own parsers would be met."""
    place = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/embeddings": "input",
             "/v1/rerank": "documents", "/v1/tokenize": "messages", "/v1/detokenize": "tokens"}[path]  # fmt: skip
    parts = st.fixed_dictionaries(
        {}, optional={"role": values, "content": values, "tool_calls": values, "name": values}
    )

    @settings(FUZZ, max_examples=60)
    @given(st.lists(parts | values, max_size=3))
    def run(entries: list[Any]) -> None:
        body = BODIES[path] | {place: entries}
        check(wire.ask("POST", path, encoded(body), key=lab.key).rest(), body)

    run()


@pytest.mark.parametrize("path", BODIES)
def test_damaged_json(lab: Lab, wire: Wire, path: str) -> None:
    whole = encoded(BODIES[path] | {"text": 'naïve 😀 \\ " /', "nested": {"model": "x", "a": [1, {"b": None}]}})
    for seed in range(120):
        choice, data = random.Random(seed), bytearray(whole)
        for _ in range(choice.randint(1, 3)):
            start = choice.randrange(len(data))
            piece = data[start : start + choice.randint(1, 12)]
            where = choice.randrange(len(data))
            action = choice.randrange(4)
            if action == 0:
                data[where] = choice.choice(b'{}[]",:\\\x00\xff \n0eE-.u')
            elif action == 1:
                data[where:where] = piece
            elif action == 2:
                del data[where : where + len(piece)]
            else:
                data[where:where] = choice.choice(
                    [b"\\ud83d", b"\\u0000", b"NaN", b"1e999", b'"model":"m",', b"\xef\xbb\xbf"]
                )
        sent = bytes(data) or b"x"
        check(wire.ask("POST", path, sent, key=lab.key).rest(), sent)


DEEP = [b"[" * 30000, b'{"a":' * 9000, b'{"model":"m","messages":' + b"[" * 20000 + b"]" * 20000 + b"}",
        b'{"model":"m","messages":[{"role":"user","content":' + b'[{"x":' * 800 + b"1" + b"}]" * 800 + b"}]}",
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"x":' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"n":' + b"9" * 5000 + b"}",
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"x":' + b"9" * 5000 + b"}",
        b'{"model":"' + b"m" * 60000 + b'","messages":[{}]}',
        b"", b" ", b"\x00", b"null", b"\xef\xbb\xbf{}"]  # fmt: skip


@pytest.mark.parametrize("number", range(len(DEEP)))
def test_deep_long_and_empty_bodies(lab: Lab, wire: Wire, number: int) -> None:
    for path in BODIES:
        check(wire.ask("POST", path, DEEP[number], key=lab.key).rest(), DEEP[number][:100])


def test_too_large_a_body(lab: Lab, wire: Wire) -> None:
    with lab.gateway.wire() as other:
        other.send(request("POST", "/v1/chat/completions", b"x" * 70_000, key=lab.key))
        got = other.answer().rest()
        assert got.status == 413 and got.error()["code"] == "body_too_large"


@pytest.mark.parametrize("content", [5, True, {}, 0.5])
def test_content_that_engines_choke_on_does_not_reach_them(lab: Lab, wire: Wire, content: Any) -> None:
    """MLX LM answers it with an error that looks like a broken engine."""
    body = chat(messages=[{"role": "system", "content": "x"}, {"role": "user", "content": content}])
    got = wire.ask("POST", "/v1/chat/completions", body, key=lab.key).rest()
    assert (got.status, got.error()["param"]) == (400, "messages[1].content")
