"""Sound in and out: forms, binary answers and subtitles on their way through the gateway."""

from __future__ import annotations

import contextlib
import json
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.doubles.engine import Engine, Exchange, PeerGone
from tests.e2e.harness import Lab, replica

SOUND = b"RIFF\x24\0\0\0WAVE" + bytes(range(256)) * 300
TEXT = "Good morning."
URL = "/v1/audio/transcriptions"


@pytest.fixture
def sdk(lab: Lab) -> Iterator[openai.OpenAI]:
    url = f"http://127.0.0.1:{lab.gateway.port}/v1"
    with openai.OpenAI(base_url=url, api_key=lab.key, max_retries=0, timeout=30) as client:
        yield client


def form(model: str = "m", **fields: str) -> dict[str, Any]:
    return {"data": {"model": model} | fields, "files": {"file": ("a.wav", SOUND, "audio/wav")}}


def send(lab: Lab, path: str = URL, *, key: str | None = None, **options: Any) -> httpx.Response:
    options = options or form()
    return lab.gateway.http.post(path, headers={"authorization": f"Bearer {key or lab.key}"}, **options)


def fields_of(engine: Engine) -> dict[str, bytes]:
    """The form as the engine got it."""
    request = engine.last()
    boundary = request.values("content-type")[0].partition("boundary=")[2].encode()
    parts = [part.partition(b"\r\n\r\n") for part in request.body.split(b"--" + boundary)[1:-1]]
    return {head.split(b'name="')[1].split(b'"')[0].decode(): value[:-2] for head, _, value in parts}


def says(x: Exchange) -> None:
    x.reply({"text": TEXT})


# --- sound to text
@pytest.mark.parametrize("kind", ["vllm", "openai_compatible", "llama_server", "ollama", "sglang"])
def test_transcription(lab: Lab, sdk: openai.OpenAI, kind: str) -> None:
    engine = lab.engine(kind, says)
    lab.serve({"m": [replica(engine, backend=kind, model="engine/whisper")]})
    answer = sdk.audio.transcriptions.create(model="m", file=("a.wav", SOUND, "audio/wav"), language="en")
    assert answer.text == TEXT
    got, request = fields_of(engine), engine.last()
    assert got == {"model": b"engine/whisper", "language": b"en", "file": SOUND}
    assert request.target == URL and request.values("content-length") == [str(len(request.body))]
    assert len(request.values("content-type")) == 1 and lab.key not in request.raw_head.decode()


def test_a_name_that_stays_changes_no_byte(lab: Lab) -> None:
    engine = lab.engine("vllm", says)
    lab.serve({"m": [replica(engine, model="m")]})
    client = httpx.Request("POST", "http://x/", **form(prompt="名前", temperature="0"))
    raw = client.read()
    headers = {"authorization": f"Bearer {lab.key}", "content-type": client.headers["content-type"]}
    answer = lab.gateway.http.post(URL, content=raw, headers=headers)
    assert answer.status_code == 200 and engine.last().body == raw
    assert engine.last().values("content-type") == [client.headers["content-type"]]


def test_translation(lab: Lab, sdk: openai.OpenAI) -> None:
    engine = lab.one("vllm", says)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert sdk.audio.translations.create(model="m", file=("a.wav", SOUND)).text == TEXT
    assert engine.last().target == "/v1/audio/translations"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("text/plain; charset=utf-8", "Guten Morgen, 世界\n".encode()),
        ("text/vtt", b"WEBVTT\n\n00:00.000 --> 00:01.000\nHi\n"),
        ("application/x-subrip", b"1\n00:00:00,000 --> 00:00:01,000\nHi\n"),
        ("application/json", b'{ "text" : "a" }'),
        ("application/json; charset=utf-8", b'"a bare string"'),
    ],
)
def test_text_passes_byte_for_byte_under_its_type(lab: Lab, kind: str, body: bytes) -> None:
    lab.one("vllm", lambda x: x.reply(body, content_type=kind))
    answer = send(lab)
    assert answer.status_code == 200 and answer.content == body
    assert answer.headers["content-type"] == kind and answer.headers["content-length"] == str(len(body))
    assert answer.headers["x-request-id"]


def test_the_answers_model_is_the_one_asked_for(lab: Lab) -> None:
    lab.one("vllm", lambda x: x.reply({"text": TEXT, "model": "engine/whisper", "duration": 1.0}))
    assert send(lab).json() == {"text": TEXT, "model": "m", "duration": 1.0}


def test_events_pass(lab: Lab, sdk: openai.OpenAI) -> None:
    events = [{"type": "transcript.text.delta", "delta": word} for word in ("Good ", "morning.")]
    events.append({"type": "transcript.text.done", "text": TEXT})
    raw = b"".join(b"event: %b\ndata: %b\n\n" % (one["type"].encode(), json.dumps(one).encode()) for one in events)

    def script(x: Exchange) -> None:
        x.begin()
        for place in range(0, len(raw), 7):
            x.part(raw[place : place + 7])
        x.end()

    engine = lab.one("vllm", script)
    stream = sdk.audio.transcriptions.create(model="m", file=("a.wav", SOUND), stream=True)
    assert [event.type for event in stream] == [str(one["type"]) for one in events]
    answer = send(lab, **form(stream="true"))
    assert answer.content == raw and answer.headers["content-type"].startswith("text/event-stream")
    assert fields_of(engine)["stream"] == b"true"
    line = lab.gateway.access_line(answer.headers["x-request-id"])
    assert (line["operation"], line["stream"], line["completion_tokens"]) == ("transcriptions", True, 3)


def test_events_that_break_off_end_in_an_error_event(lab: Lab) -> None:
    def script(x: Exchange) -> None:
        x.begin()
        x.part(b'data: {"type":"transcript.text.delta","delta":"Goo')
        x.close()

    lab.one("vllm", script)
    answer = send(lab, **form(stream="true"))
    *_, last = [line for line in answer.text.splitlines() if line]
    assert (
        answer.status_code == 200
        and json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_connection_lost"
    )


# --- text to sound
def test_speech(lab: Lab, sdk: openai.OpenAI) -> None:
    engine = lab.one("openai_compatible", lambda x: x.reply(SOUND, content_type="audio/mpeg"))
    answer = sdk.audio.speech.create(model="m", voice="alloy", input="こんにちは", response_format="mp3")
    assert answer.read() == SOUND
    assert answer.response.headers["content-type"] == "audio/mpeg"
    assert answer.response.headers["content-length"] == str(len(SOUND))
    assert engine.last().json() == {
        "model": "org/Engine-Model-7B",
        "voice": "alloy",
        "input": "こんにちは",
        "response_format": "mp3",
    }


def test_speech_is_sent_on_as_it_comes(lab: Lab) -> None:
    go_on = threading.Event()

    def script(x: Exchange) -> None:
        x.begin(content_type="audio/wav")
        x.part(SOUND[:1000])
        x.wait(go_on)
        x.part(SOUND[1000:])
        x.end()

    lab.one("openai_compatible", script)
    with lab.gateway.wire() as wire:
        body = {"model": "m", "input": "x", "voice": "a"}
        answer = wire.ask("POST", "/v1/audio/speech", body, key=lab.key)
        assert answer.header("content-type") == "audio/wav" and answer.header("transfer-encoding") == "chunked"
        assert answer.more() == SOUND[:1000]
        go_on.set()
        assert answer.rest().body == SOUND and answer.complete
        # The connection is good for another one.
        assert wire.ask("POST", "/v1/audio/speech", body, key=lab.key).rest().body == SOUND


@pytest.mark.parametrize("with_length", [True, False])
def test_sound_that_breaks_off_is_seen_to_be_incomplete(lab: Lab, with_length: bool) -> None:
    def script(x: Exchange) -> None:
        if with_length:
            x.send(b"HTTP/1.1 200 OK\r\ncontent-type: audio/wav\r\ncontent-length: 5000\r\n\r\n" + SOUND[:100])
        else:
            x.begin(content_type="audio/wav")
            x.part(SOUND[:100])
        x.pause(0.3)
        x.close()

    lab.one("openai_compatible", script)
    with lab.gateway.wire() as wire:
        answer = wire.ask("POST", "/v1/audio/speech", {"model": "m", "input": "x"}, key=lab.key).rest()
        assert not answer.complete and b"error" not in answer.body
    assert lab.at_rest()
    assert lab.gateway.access_line(str(answer.header("x-request-id")))["status"] == 502


# --- the same way as every other request
def test_who_may_do_what(lab: Lab) -> None:
    engine = lab.one("vllm", says)
    lab.serve({"m": [replica(engine)], "other": [replica(engine)]}, allowed=["m"])
    assert send(lab, key="sk-wrong").status_code == 401
    assert send(lab, **form("other")).json()["error"]["code"] == "model_not_found"
    assert send(lab, **form("m@nope")).json()["error"]["code"] == "variant_not_found"
    assert send(lab, **form("m@vllm")).status_code == 200
    assert len(engine.requests) == 1
    assert lab.gateway.http.get(URL, headers={"authorization": f"Bearer {lab.key}"}).status_code == 405


def test_limits_and_usage(lab: Lab) -> None:
    engine = lab.engine("vllm", says)
    lab.serve({"m": [replica(engine)]}, limits={"requests": "1/min"})
    first = send(lab)
    assert first.status_code == 200 and first.headers["x-ratelimit-remaining-requests"] == "0"
    assert send(lab).status_code == 429
    line = lab.gateway.access_line(first.headers["x-request-id"])
    assert (line["operation"], line["usage"], line["prompt_tokens"]) == ("transcriptions", "estimate", 1000)
    assert lab.tokens("prompt") == 1000
    assert (
        lab.gateway.metric("sekisho_requests_total", tenant=lab.tenant, operation="transcriptions", status="200") == 1
    )


@pytest.mark.parametrize("failure", ["reset", "status", "type"])
def test_another_replica_is_tried_before_the_first_byte(lab: Lab, failure: str) -> None:
    def fails(x: Exchange) -> None:
        if failure == "reset":
            x.reset()
        elif failure == "status":
            x.fail("broken", 500)
        else:
            x.html(200)

    engines = [lab.engine("vllm", fails), lab.engine("vllm", says)]
    lab.serve({"m": {"replicas": [replica(one) for one in engines], "policy": "round_robin"}})
    for _ in range(3):
        assert send(lab).json() == {"text": TEXT}
    assert engines[0].requests and fields_of(engines[0]) == fields_of(engines[1])


def test_errors_of_engines_are_translated(lab: Lab) -> None:
    engine = lab.one("vllm", lambda x: x.fail("Invalid or unsupported audio file.", 400))
    answer = send(lab)
    assert answer.status_code == 400 and "unsupported audio" in answer.json()["error"]["message"]
    engine.script = lambda x: x.reply({"error": {"message": "no", "type": "x", "code": 500}})
    assert send(lab).status_code >= 400
    engine.script = lambda x: x.reply(b"not json")
    assert send(lab).json()["error"]["code"] == "engine_connection_lost"


def test_an_engine_without_audio_is_a_400(lab: Lab) -> None:
    lab.one("vllm", says, backend="tabbyapi")
    assert send(lab).json()["error"]["code"] == "unsupported_value"
    lab.one("vllm", says)
    answer = send(lab, "/v1/audio/speech", json={"model": "m", "input": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_value")


def test_bad_forms(lab: Lab) -> None:
    engine = lab.one("vllm", says)
    assert send(lab, json={"model": "m"}).json()["error"]["code"] == "invalid_content_type"
    twice = {"data": {"model": ["m", "other"]}, "files": {"file": ("a", b"x")}}
    assert send(lab, **twice).json()["error"] | {"message": ""} == {
        "message": "",
        "type": "invalid_request_error",
        "param": "model",
        "code": "invalid_value",
    }
    assert send(lab, files={"file": ("a", b"x")}).json()["error"]["param"] == "model"
    assert not engine.requests


def test_a_file_above_the_limit_is_a_413(lab: Lab) -> None:
    engine = lab.engine("vllm", says)
    lab.serve({"m": [replica(engine)]}, server={"max_body": "50KiB"})
    with contextlib.suppress(httpx.TransportError):
        assert send(lab).status_code == 413
    assert not engine.requests


def test_a_client_that_leaves_frees_everything(lab: Lab) -> None:
    def script(x: Exchange) -> None:
        x.begin(content_type="audio/wav")
        with contextlib.suppress(PeerGone):
            while True:
                x.part(SOUND)
        raise PeerGone

    engine = lab.one("openai_compatible", script)
    with lab.gateway.wire() as wire:
        wire.ask("POST", "/v1/audio/speech", {"model": "m", "input": "x"}, key=lab.key).more()
    assert engine.last().gone.wait(10) and lab.at_rest()


def test_the_documentation_has_them(lab: Lab) -> None:
    paths = lab.gateway.get("/openapi.json").json()["paths"]
    content = paths["/v1/audio/transcriptions"]["post"]["requestBody"]["content"]
    assert list(content) == ["multipart/form-data"]
    assert "audio" in lab.gateway.get("/docs").text
