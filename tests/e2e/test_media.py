"""Links in requests from end to end: what the engine gets, what nobody fetches, and when."""

from __future__ import annotations

import base64
import re
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import openai
import pytest

from tests.doubles import files
from tests.doubles.dialects import UPSTREAM_MODEL
from tests.doubles.engine import Engine
from tests.doubles.files import GIF, PNG, WAV, FileServer, page, redirect
from tests.doubles.kinds import KINDS
from tests.e2e.harness import Gateway, Lab, eventually, replica, together
from tests.e2e.wire import Answer, request

LOOPBACK = ["127.0.0.0/8", "::1"]
NAME = b'"%b"' % UPSTREAM_MODEL.encode()


@pytest.fixture
def server() -> Iterator[FileServer]:
    found = FileServer({"/a.png": page(PNG), "/b.gif": page(GIF, "image/gif"), "/c.wav": page(WAV, "audio/wav")})
    yield found
    found.stop()


def data(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def parts(*links: str, **more: Any) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "text", "text": "what is it"}]
    content += [{"type": "image_url", "image_url": {"url": link}} for link in links]
    return {"model": "m", "messages": [{"role": "user", "content": content}]} | more


def serve(lab: Lab, dialect: str = "vllm", limits: Mapping[str, Any] | None = None, **media: Any) -> Engine:
    engine = lab.engine(dialect)
    media = {"allow_hosts": ["127.0.0.2", "localhost"], "timeout": "20s"} | media
    lab.serve({"m": [replica(engine)], "other": [replica(engine)]}, media=media, allowed=["m"], limits=limits)
    return engine


def sent(engine: Engine) -> bytes:
    """What the engine got, but for the salt of the tenant."""
    return re.sub(rb'"cache_salt":"[^"]*",', b"", engine.last().body)


def refused(answer: Answer, code: str = "media_unavailable") -> dict[str, Any]:
    assert answer.status == 400
    error = answer.error()
    assert error["code"] == code and error["type"] == "invalid_request_error"
    assert error["param"] == "messages[0].content[1].image_url"
    for secret in ("127.0.0", "Error", "Traceback"):
        assert secret not in error["message"]
    return error


# --- what the engine gets
@pytest.mark.parametrize("stream", [False, True])
def test_a_link_becomes_content_and_nothing_else_changes(lab: Lab, server: FileServer, stream: bool) -> None:
    engine = serve(lab)
    link = f"{server.url}/a.png?x=y"
    more = b', "stream":true,"stream_options":{"include_usage":true}' if stream else b""
    raw = (
        b'{"model":"m","seed":1.50,"messages":[{"role":"user","content":[{"image_url" : {"url": "%b","detail":null}}'
        b',{"type":"text","text":"\\u00e9"}]}]%b}' % (link.encode(), more)
    )
    assert lab.call(raw).status == 200
    expected = raw.replace(link.encode(), data(PNG).encode()).replace(b'"m"', NAME)
    assert sent(engine) == expected
    assert server.visits[0].target == "/a.png?x=y"


def test_several_links_in_one_request(lab: Lab, server: FileServer) -> None:
    engine = serve(lab)
    pixel = data(GIF, "image/gif")
    body = parts(f"{server.url}/a.png", pixel, f"{server.url}/b.gif", f"{server.url}/a.png")
    body["messages"].append({"role": "user", "content": [{"type": "audio_url", "audio_url": f"{server.url}/c.wav"}]})
    assert lab.call(body).status == 200
    got = engine.last().json()["messages"]
    assert got[0]["content"][1:] == parts(data(PNG), pixel, pixel, data(PNG))["messages"][0]["content"][1:]
    assert got[1]["content"][0]["audio_url"] == data(WAV, "audio/wav")
    assert sorted(visit.target for visit in server.visits) == ["/a.png", "/b.gif", "/c.wav"]


def test_engines_that_take_content_only_get_it(lab: Lab, server: FileServer) -> None:
    """Ollama reads no links, and its adapter translates what is parsed and not the bytes."""
    engine = KINDS["ollama"].engine()
    try:
        lab.serve({"m": [replica(engine) | {"backend": "ollama"}]}, media={"allow_hosts": ["127.0.0.2"]})
        assert lab.call(parts(f"{server.url}/a.png")).status == 200
        assert engine.last().json()["messages"][-1]["images"] == [base64.b64encode(PNG).decode()]
    finally:
        engine.stop()


def test_embeddings_with_pictures(lab: Lab, server: FileServer) -> None:
    engine = serve(lab, "sglang")
    answer = lab.call({"model": "m", "input": [{"text": "x", "image": f"{server.url}/a.png"}]}, "/v1/embeddings")
    assert answer.status == 200
    assert engine.last().json()["input"] == [{"text": "x", "image": data(PNG)}]


def test_names_are_resolved(lab: Lab) -> None:
    server = FileServer({"/a.png": page(PNG)}, "127.0.0.1")
    try:
        link = f"http://LocalHost.:{server.port}/a.png"
        engine = serve(lab, allow_networks=LOOPBACK)
        assert lab.call(parts(link)).status == 200
        assert engine.last().json()["messages"] == parts(data(PNG))["messages"]
        engine = serve(lab)  # the name is on the list, its address is not public
        refused(lab.call(parts(link)))
        assert not engine.requests and len(server.visits) == 1
    finally:
        server.stop()


def test_content_of_three_megabytes_passes_untouched(lab: Lab) -> None:
    engine = serve(lab)
    link = data(PNG + bytes(3_000_000))
    raw = b'{"model" :"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"%b"}}]}]}'
    raw %= link.encode()
    assert lab.call(raw).status == 200
    assert sent(engine) == raw.replace(b'"m"', NAME)


def test_the_official_client(lab: Lab, server: FileServer) -> None:
    engine = serve(lab)
    with openai.OpenAI(
        api_key=lab.key, base_url=f"http://127.0.0.1:{lab.gateway.port}/v1", max_retries=0, timeout=30
    ) as client:
        body: Any = parts(f"{server.url}/a.png")
        assert client.chat.completions.create(**body).choices
        assert engine.last().json()["messages"][0]["content"][1]["image_url"]["url"] == data(PNG)
        body = parts(f"{server.url}/gone.png")
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**body)
    assert caught.value.code == "media_unavailable" and "answered 404" in caught.value.message


# --- what is refused
@pytest.mark.parametrize(
    "link",
    ["http://169.254.169.254/latest/", "http://127.0.0.1:9/", "http://[::ffff:10.0.0.1]/", "http://2130706433/",
     "file:///etc/passwd", "https://example.com/cat.png", "http://[::ffff:127.0.0.2]:{port}/a.png",
     "http://0x7f000002:{port}/a.png", "http://127.2:{port}/a.png",
     "http://user@127.0.0.2:{port}/a.png", "/etc/passwd", "a.png"],
)  # fmt: skip
@pytest.mark.parametrize("fetch", ["gateway", "engine"])
def test_other_links_reach_nobody(lab: Lab, server: FileServer, link: str, fetch: str) -> None:
    engine = serve(lab, fetch=fetch)
    refused(lab.call(parts(link.format(port=server.port))), "unsupported_value")
    assert not engine.requests and not server.connections


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("embeddings", {"input": [{"image": "file:///etc/passwd"}]}, "input[0].image"),
        ("embeddings", {"input": "x", "messages": [{"role": "user", "content": [{"image_url": "http://x/"}]}]},
         "messages[0].content[0].image_url"),
        ("completions", {"prompt": "x", "image_data": ["http://127.0.0.1/"]}, "image_data[0]"),
        ("rerank", {"query": "x", "documents": [{"content": [{"image_url": "http://x/"}]}]}, "documents"),
        ("tokenize", {"messages": [{"role": "user", "content": [{"image_url": "http://x/"}]}]},
         "messages[0].content[0].image_url"),
        ("chat/completions", {"messages": [{"content": "x"}], "mm_processor_kwargs": {"path": "/etc/x"}},
         "mm_processor_kwargs.path"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}],
                              "response_format": {"json_schema": {"schema": {"$ref": "http://127.0.0.1/"}}}},
         "response_format.json_schema.schema.$ref"),
        ("audio/speech", {"input": "x", "voice": "x", "ref_audio": "http://127.0.0.1/"}, "ref_audio"),
    ],
)  # fmt: skip
def test_every_operation_is_looked_through(lab: Lab, path: str, body: dict[str, Any], param: str) -> None:
    engine = serve(lab)
    answer = lab.call({"model": "m", **body}, f"/v1/{path}")
    assert answer.status == 400 and answer.error()["param"] == param
    assert not engine.requests


def test_forms_have_no_links(lab: Lab, server: FileServer) -> None:
    engine = serve(lab)
    with lab.gateway.http.stream(
        "POST", "/v1/audio/transcriptions", headers={"authorization": f"Bearer {lab.key}"},
        data={"model": "m", "url": f"{server.url}/c.wav"}, files={"file": ("a.wav", WAV)},
    ) as answer:  # fmt: skip
        answer.read()
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "url"
    assert not engine.requests and not server.connections


def test_bad_files_are_the_callers_fault_and_no_engines(lab: Lab) -> None:
    victim = FileServer({"/b": page(PNG)}, "127.0.0.9")
    server = FileServer(
        {"/endless": files.endless, "/slow": files.dripping, "/page": page(b"<html>", "text/html"),
         "/zip": files.zipped,
         "/lie": page(b"secret=1", "image/png"), "/away": redirect(f"{victim.url}/b")},
    )  # fmt: skip
    try:
        engine = serve(lab, max_size="1MiB", timeout="500ms")
        paths = ("endless", "slow", "page", "zip", "lie", "away", "none")
        answers = together([partial(lab.call, parts(f"{server.url}/{path}")) for path in paths])
        messages = [refused(answer)["message"] for answer in answers]
        for message, word in zip(
            messages, ("larger", "within", "no image", "compressed", "no image", "redirected", "404"), strict=True
        ):
            assert word in message
        assert not engine.requests and not victim.connections
        assert lab.answered(400, "media_unavailable") == len(paths)
        assert eventually(lambda: all(visit.gone.is_set() for visit in server.visits if visit.target == "/slow"))
    finally:
        server.stop()
        victim.stop()


def test_the_whole_request_is_bounded_by_the_largest_body(lab: Lab) -> None:
    server = FileServer({f"/{number}": page(PNG + bytes(400_000)) for number in range(3)})
    try:
        engine = lab.engine()
        lab.serve({"m": [replica(engine)]}, media={"allow_hosts": ["127.0.0.2"]}, server={"max_body": "1MiB"})
        assert lab.call(parts(f"{server.url}/0")).status == 200
        answer = lab.call(parts(*[f"{server.url}/{number}" for number in range(3)]))
        assert answer.status == 400 and "too large with all" in answer.error()["message"]
        assert len(engine.requests) == 1
    finally:
        server.stop()


# --- when
def test_nothing_is_fetched_for_who_may_not_ask(lab: Lab, server: FileServer) -> None:
    engine = serve(lab, limits={"requests": "2/h"})
    body = parts(f"{server.url}/a.png")
    assert lab.call(body, key="sk-wrong").status == 401
    assert lab.call(body | {"model": "other"}).status == 404
    assert lab.call(body | {"model": "none"}).status in (404, 429)
    assert lab.call(body).status == 429
    assert not server.connections and not engine.requests


def test_nothing_is_fetched_beyond_the_budget_of_tokens(lab: Lab, server: FileServer) -> None:
    engine = serve(lab, limits={"tokens": "100/h"})
    assert lab.call(parts(f"{server.url}/a.png")).status == 429
    assert not server.connections and not engine.requests


def test_a_client_that_leaves_ends_the_fetch(lab: Lab) -> None:
    arrived = threading.Event()

    def answer(visit: files.Visit) -> None:
        arrived.set()
        files.dripping(visit)

    server = FileServer({"/x": answer})
    try:
        engine = serve(lab)
        with lab.gateway.wire() as wire:
            wire.send(request("POST", "/v1/chat/completions", parts(f"{server.url}/x"), key=lab.key))
            assert arrived.wait(20)
        assert server.visits[0].gone.wait(20) and lab.at_rest()
        assert not engine.requests
        assert eventually(lambda: lab.answered(499) == 1)
    finally:
        server.stop()


def test_the_time_of_others_is_not_the_gateways(lab: Lab, server: FileServer) -> None:
    """What a slow host of pictures takes does not show as overhead of the gateway."""
    waited = 2.0  # seconds

    def slow(visit: files.Visit) -> None:
        visit.server.stopping.wait(waited)
        page(PNG)(visit)

    def overhead() -> float:
        return lab.gateway.metric("sekisho_overhead_seconds_sum", phase="request")

    server.pages["/slow"] = slow
    serve(lab)
    assert lab.call(parts(f"{server.url}/a.png")).status == 200 and overhead() > 0
    before = overhead()
    assert lab.call(parts(f"{server.url}/slow")).status == 200
    assert 0 < overhead() - before < waited


# --- left to the engine
def test_links_may_be_left_to_the_engine(lab: Lab, server: FileServer) -> None:
    engine = serve(lab, fetch="engine")
    link = f"{server.url}/a.png"
    raw = b'{"model":"m", "messages":[{"role":"user","content":[{"image_url":{"url":"%b"}}]}]}' % link.encode()
    assert lab.call(raw).status == 200
    assert sent(engine) == raw.replace(b'"m"', NAME)
    assert not server.connections
    refused(lab.call(parts("http://127.0.0.9/")), "unsupported_value")


def test_hosts_that_are_none_are_refused_in_the_configuration(lab: Lab, shared_gateway: Gateway) -> None:
    config = lab.config({}, media={"allow_hosts": ["2130706433"]})
    shared_gateway.write(config)
    answer = shared_gateway.reload()
    assert answer.status_code == 400 and "media.allow_hosts" in answer.text
