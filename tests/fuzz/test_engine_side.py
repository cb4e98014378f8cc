"""Engines that send damaged HTTP and damaged streams: the client gets a whole answer, whatever came."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.doubles.dialects import DIALECTS, USAGE, Dialect
from tests.doubles.engine import Exchange, by_bytes
from tests.e2e.harness import Lab, chat, replica
from tests.e2e.wire import Answer
from tests.fuzz.conftest import SERVER

STATUSES = {200, 400, 413, 422, 429, 502, 503, 504}
ROUNDS = 70  # for each kind of answer
# Short patience: a damaged length makes the gateway wait for what never comes.
TIMEOUTS = {"first_byte": "1s", "idle": "1s", "total": "5s"}

JUNK = [
    b"\r\n",
    b"\n\n",
    b"\x00",
    b"\xff",
    b"data: ",
    b"data: [DONE]\n\n",
    b": comment\n\n",
    b"event: error\n",
    b"id: 1\n",
    b"retry: 1\n",
    b"data: {}\n\n",
    b'data: {"error":null}\n\n',
    b'data: {"choices":[{"index":0}]}\n\n',
    b"data: null\n\n",
    b'data: {"choices":null}\n\n',
    b'data: {"error":{"message":5}}\n\n',
    b"0\r\n\r\n",
    b"FFFFFFFF\r\n",
    b"\xf0\x9f",
    b"transfer-encoding: chunked\r\n",
    b"content-length: 3\r\n",
    b"content-encoding: gzip\r\n",
    b'"',
    b"{",
    b"}",
    b"\\ud83d",
    b"HTTP/1.1 200 OK\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
    b"content-type: text/html\r\n",
    b"connection: upgrade\r\nupgrade: h2c\r\n",
    b"[" * 3000,
]


def document(dialect: Dialect, status: str = "200 OK") -> bytes:
    body = dialect.dump(dialect.completion())
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def stream(dialect: Dialect) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    parts = [dialect.frame(chunk) for chunk in dialect.chunks(["Hel", "lo ", "naïve 😀"], usage=USAGE)]
    return (
        head
        + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in [*parts, dialect.frame(b"[DONE]")])
        + b"0\r\n\r\n"
    )


def unframed(dialect: Dialect) -> bytes:
    """As HTTP/1.0 servers stream: to the end of the connection."""
    return b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + dialect.stream(usage=USAGE)


def refusal(dialect: Dialect) -> bytes:
    body = dialect.error("temperature must be non-negative", 400)
    head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def damaged(whole: bytes, seed: int) -> bytes:
    choice, data = random.Random(seed), bytearray(whole)
    head = whole.index(b"\r\n\r\n")
    for _ in range(choice.randint(1, 3)):
        if not data:
            break
        start = 0 if choice.random() < 0.25 else min(head, len(data) - 1)
        place = choice.randrange(start, len(data))
        action = choice.randrange(6)
        if action == 0:
            data[place] = choice.randrange(256)
        elif action == 1:
            del data[place : place + choice.choice([1, 2, 7, 40])]
        elif action == 2:
            data[place:place] = choice.choice(JUNK)
        elif action == 3:
            data[place:place] = data[place : place + choice.choice([3, 30, 200])]
        elif action == 4:
            del data[place:]
        else:
            other = choice.randrange(len(data))
            data[place : place + 9], data[other : other + 9] = data[other : other + 9], data[place : place + 9]
    return bytes(data)


def check(answer: Answer, sent: bytes, *, opaque: bool = False) -> str:
    """What the answer was, after a look at whether it is one.

    Args:   opaque: damage in the middle of an ordinary chunk may pass, for chunks are told by how they begin and end.
    """
    try:
        assert answer.complete and answer.status in STATUSES
        if answer.status != 200:
            assert answer.error()["code"] != "internal_error"
            return "refused"
        if not (answer.header("content-type") or "").startswith("text/event-stream"):
            assert isinstance(answer.json()["choices"], list)
            return "document"
        if opaque:
            answer.body = without_garbled(answer.body)
        errors = answer.stream_errors()
        if errors:
            assert len(errors) == 1 and "error" in answer.chunks_json()[-1] and answer.events()[-1] != "[DONE]"
            assert set(errors[0]) == {"message", "type", "param", "code"} and errors[0]["code"] != "internal_error"
            return "error event"
        assert answer.ended_well() and answer.events().count("[DONE]") == 1
        return "stream"
    except (AssertionError, ValueError, KeyError, TypeError) as error:
        raise AssertionError(f"engine sent {sent!r}, client got {answer.status} {answer.body!r}") from error


def without_garbled(body: bytes) -> bytes:
    """The stream without chunks that begin as they should and are no JSON."""

    def is_whole(event: bytes) -> bool:
        try:
            return not event.startswith(b'data: {"') or bool(json.loads(event[6:]))
        except ValueError:
            return False

    return b"".join(event + b"\n\n" for event in body.split(b"\n\n")[:-1] if is_whole(event))


KINDS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "document": ("vllm", document, {}),
    "vLLM's stream": ("vllm", stream, {"stream": True}),
    "llama-server's stream": ("llama_server", stream, {"stream": True}),
    "a stream without a length": ("openai_compatible", unframed, {"stream": True}),
    "an error": ("llama_server", refusal, {"stream": True}),
}


@pytest.mark.parametrize("cut", [None, 7], ids=["at once", "in pieces"])
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_answers(lab: Lab, kind: str, cut: int | None) -> None:
    """Every case has a model of its own, so that no replica is given up before its turn."""
    name, make, more = KINDS[kind]
    dialect = DIALECTS[name]
    offset = 0 if cut is None else 10_000
    sent = {
        f"m{number}": damaged(make(dialect), offset + number)
        for number in range(ROUNDS if cut is None else ROUNDS // 4)
    }

    def script(x: Exchange) -> None:
        data = sent.get(x.request.json()["model"])
        if data is None:
            x.stream() if more else x.reply(x.dialect.completion())
            return
        for piece in (data,) if cut is None else by_bytes(cut)(data):
            x.send(piece)
        x.close()

    engine = lab.engine(name, script)
    models = {model: [replica(engine, model=model, timeouts=TIMEOUTS)] for model in (*sent, "good")}
    lab.serve(models, server=SERVER)
    outcomes = [check(lab.call(chat(model, **more)), data, opaque=True) for model, data in sent.items()]
    assert len(set(outcomes)) > 1 or cut is not None or kind == "an error", outcomes[0]
    last = lab.call(chat("good", **more))
    assert last.status == 200 and (last.ended_well() if more else last.json()["choices"])


# --- single faults, everywhere
@pytest.mark.parametrize("make", [document, stream, unframed], ids=["document", "stream", "unframed"])
def test_an_answer_that_stops_at_any_byte(lab: Lab, make: Any) -> None:
    whole = make(DIALECTS["vllm"])
    lengths = list(range(0, len(whole), max(1, len(whole) // 90)))
    sent = {f"m{length}": whole[:length] for length in lengths}

    def script(x: Exchange) -> None:
        x.send(sent[x.request.json()["model"]])
        x.close()

    engine = lab.engine(script=script)
    lab.serve({model: [replica(engine, model=model, timeouts=TIMEOUTS)] for model in sent}, server=SERVER)
    more = {} if make is document else {"stream": True}
    outcomes = [check(lab.call(chat(model, **more)), data) for model, data in sent.items()]
    assert outcomes[0] == "refused" and "document" not in outcomes
    for outcome, data in zip(outcomes, sent.values(), strict=True):
        assert outcome != "stream" or b'"finish_reason":"stop"' in data


def test_bytes_after_an_answer_are_nobodys(lab: Lab) -> None:
    """They must not become the answer to the next request on that connection."""

    def script(x: Exchange) -> None:
        whole = document(x.dialect)
        x.send(whole + whole.replace(b"Hello, world", b"FORGED THING"))

    engine = lab.one(script=script)
    answers = [lab.chat() for _ in range(20)]
    assert {answer.status for answer in answers} == {200}
    assert not any(b"FORGED" in answer.body for answer in answers)
    assert engine.connections >= 20


VALUES: list[Any] = [None, True, 0, -1, 1e308, "", "x", [], {}, [None], {"x": None}, "😀", "a" * 5000, [[[]]]]


@pytest.mark.parametrize("field", ["id", "object", "created", "model", "choices", "usage", "error", "delta", "role",
                                   "finish_reason", "index", "content", "tool_calls", "prompt_tokens"])  # fmt: skip
def test_fields_of_any_kind_in_a_stream(lab: Lab, field: str) -> None:
    """Valid JSON in which one value is not what it should be, in the middle of a good stream."""

    def put(node: Any, value: Any) -> Any:
        if isinstance(node, dict):
            return {key: value if key == field else put(inner, value) for key, inner in node.items()} | (
                {field: value} if field in ("error", "tool_calls", "usage") and "delta" in node else {}
            )
        return [put(inner, value) for inner in node] if isinstance(node, list) else node

    dialect = DIALECTS["vllm"]

    def script(x: Exchange) -> None:
        value = VALUES[int(x.request.json()["model"][1:])]
        chunks = x.dialect.chunks(["a", "b", "c", "d"], usage=USAGE)
        chunks[2] = put(chunks[2], value)
        chunks[-1] = put(chunks[-1], value)
        x.raw_stream(b"".join(map(x.dialect.frame, chunks)) + x.dialect.frame(b"[DONE]"))

    engine = lab.engine(script=script)
    lab.serve({f"m{number}": [replica(engine, model=f"m{number}")] for number in range(len(VALUES))}, server=SERVER)
    for number, value in enumerate(VALUES):
        check(lab.stream(f"m{number}"), json.dumps(put(dialect.chunk({"content": "x"}), value)).encode())


@pytest.mark.parametrize("field", ["id", "model", "choices", "usage", "error", "message", "finish_reason", "index",
                                   "content", "prompt_tokens", "data", "embedding", "object"])  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
def test_fields_of_any_kind_in_a_document(lab: Lab, path: str, field: str) -> None:
    def put(node: Any, value: Any) -> Any:
        if isinstance(node, dict):
            return {key: value if key == field else put(inner, value) for key, inner in node.items()}
        return [put(inner, value) for inner in node] if isinstance(node, list) else node

    chatting = path == "/v1/chat/completions"

    def script(x: Exchange) -> None:
        vectors = {"object": "list", "data": [{"index": 0, "embedding": [0.5]}], "model": "x", "usage": USAGE}
        whole = x.dialect.completion() if chatting else vectors
        x.reply(put(whole, VALUES[int(x.request.json()["model"][1:])]) | ({"error": {}} if field == "error" else {}))

    engine = lab.engine(script=script)
    lab.serve({f"m{number}": [replica(engine, model=f"m{number}")] for number in range(len(VALUES))}, server=SERVER)
    for number, value in enumerate(VALUES):
        body = chat(f"m{number}") if chatting else {"model": f"m{number}", "input": "x", "encoding_format": "base64"}
        answer = lab.call(body, path)
        assert answer.complete and answer.status in (200, 502), (value, answer.status)
        if answer.status == 200:
            assert isinstance(answer.json(), dict)
        else:
            assert answer.error()["code"] == "engine_error", value
