"""Bodies that are not copied on their way: what an engine gets is what the client sent, whichever way it is reached."""

import json
import random
import string
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.bigjson import LARGE
from tests.doubles.dialects import UPSTREAM_MODEL
from tests.doubles.engine import Certificates, Engine
from tests.e2e.harness import Lab, chat, replica

SIZE = 6_000_000
IMAGE = "data:image/png;base64," + "".join(
    random.Random(1).choices(string.ascii_letters + string.digits + "+/", k=SIZE)
)
TEXTS = {
    "base64": IMAGE,
    "lines": "A line of text, 'quoted'.\n" * (SIZE // 26),
    "Chinese": "中文字符，" * (SIZE // 15),
    "quotes": 'He said "no". ' * (SIZE // 14),
}


def body(text: str, **more: Any) -> dict[str, Any]:
    if text is IMAGE:
        return chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": text}}]}], **more)
    return chat(messages=[{"role": "user", "content": text}], **more)


@pytest.fixture(params=["tcp", "unix", "tls"])
def reached(request: pytest.FixtureRequest, lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """An engine and its way."""
    if request.param == "tls":
        certificates: Certificates = request.getfixturevalue("certificates")
        engine = lab.engine(tls=certificates)
        lab.serve({"m": [replica(engine, ca_file=str(certificates.ca_file))]})
    else:
        folder: Path | None = tmp_path_factory.mktemp("s") if request.param == "unix" else None
        engine = lab.engine(unix=folder / "e.sock" if folder is not None else None)
        lab.serve({"m": [replica(engine)]})
    lab.gateway.wait_for_replica()
    return engine


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_giant_image_arrives_whole(lab: Lab, reached: Engine, stream: bool) -> None:
    sent = body(IMAGE, stream=stream)
    answer = lab.call(sent)
    assert answer.ended_well() if stream else answer.status == 200
    got = reached.last().json()
    assert got.pop("stream_options", None) == ({"include_usage": True} if stream else None)
    assert got.pop("cache_salt")  # of the tenant
    same = got == sent | {"model": UPSTREAM_MODEL}  # or a failure prints all of it
    assert same


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("ascii_only", [False, True], ids=["utf8", "escaped"])
def test_every_text_arrives_byte_for_byte(lab: Lab, kind: str, ascii_only: bool) -> None:
    engine = lab.one()
    raw = json.dumps(body(TEXTS[kind]), ensure_ascii=ascii_only).encode()
    assert lab.call(raw).status == 200
    same = engine.last().body.endswith(raw[raw.index(b'"messages"') :])
    assert same


def test_a_connection_that_went_stale_is_replaced_and_the_body_sent_again(lab: Lab) -> None:
    engine = lab.one()
    lab.gateway.wait_for_replica()
    for _ in range(3):
        assert lab.call(body(IMAGE)).status == 200
        engine.drop_idle()
    assert len(engine.requests) == 3 and len({len(request.body) for request in engine.requests}) == 1


def test_the_next_replica_gets_the_whole_body_too(lab: Lab) -> None:
    engines = lab.engine(), lab.engine()
    lab.serve({"m": [replica(engine) for engine in engines]})
    for engine in engines:
        engine.once(lambda x: x.fail("no", 500))
    lab.call(body(IMAGE))
    got = [request.json()["messages"] == body(IMAGE)["messages"] for engine in engines for request in engine.requests]
    assert len(got) >= 2 and all(got)


@pytest.mark.parametrize("renamed", [False, True], ids=["same", "renamed"])
def test_a_form_with_a_large_file_arrives_whole(lab: Lab, renamed: bool) -> None:
    engine = lab.engine(script=lambda x: x.reply({"text": "hello"}))
    lab.serve({"m": [replica(engine, model="m") if not renamed else replica(engine)]})
    sound = random.Random(2).randbytes(4 * LARGE)
    answer = lab.gateway.http.post(
        "/v1/audio/transcriptions",
        headers={"authorization": f"Bearer {lab.key}"},
        data={"model": "m"},
        files={"file": ("a.wav", sound, "audio/wav")},
    )
    assert answer.status_code == 200, answer.text
    whole, told = sound in engine.last().body, UPSTREAM_MODEL.encode() in engine.last().body
    assert whole and told == renamed


@pytest.mark.parametrize("cut", [1, 100, SIZE // 2])
def test_a_large_body_that_is_cut_short_is_refused(lab: Lab, cut: int) -> None:
    engine = lab.one()
    raw = orjson.dumps(body(IMAGE))[:-cut]
    answer = lab.call(raw)
    assert answer.status == 400 and "not valid UTF-8 JSON" in answer.error()["message"] and not engine.requests


def test_a_link_behind_a_giant_image_is_seen(lab: Lab) -> None:
    engine = lab.one()
    sent = body(IMAGE)
    sent["messages"][0]["content"].append({"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}})
    answer = lab.call(sent)
    assert answer.status == 400 and answer.error()["param"] == "messages[0].content[1].image_url"
    assert not engine.requests
