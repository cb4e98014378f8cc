"""Pages of other origins: preflights without a key, and header lines with every answer of the API."""

from __future__ import annotations

from typing import Any

import pytest

from tests.doubles.engine import Exchange
from tests.e2e.harness import Lab, chat, replica
from tests.e2e.wire import Answer

PAGE, OTHER = "https://app.example", "https://evil.example"
CHAT = "/v1/chat/completions"


def failing(x: Exchange) -> None:
    if x.request.json()["messages"][0]["content"] == "fail":
        x.fail("no", 500)
    elif x.request.json().get("stream"):
        x.stream()
    else:
        x.reply(x.dialect.completion())


@pytest.fixture
def opened(lab: Lab) -> Lab:
    return lab.serve(
        {"m": [replica(lab.engine(script=failing))]}, limits={"requests": "1000/min"}, server={"cors_origins": [PAGE]}
    )


def said(text: str, **more: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": text}], **more)


def check(answer: Answer, origin: str | None) -> Answer:
    """`origin`: the one that may read it."""
    assert answer.header("access-control-allow-origin") == origin, answer.headers
    assert answer.header("vary") == "Origin" and answer.header("access-control-allow-credentials") is None
    exposed = answer.header("access-control-expose-headers") or ""
    assert ("x-request-id" in exposed and "x-ratelimit-reset-tokens" in exposed) == (origin is not None)
    assert len({name for name, _ in answer.headers}) == len(answer.headers)
    return answer


@pytest.mark.parametrize("origin", [PAGE, OTHER, None])
def test_every_answer_says_whether_a_page_may_read_it(opened: Lab, origin: str | None) -> None:
    headers = [f"origin: {origin}", "sec-fetch-site: cross-site"] if origin else []
    allowed = PAGE if origin == PAGE else None

    def ask(body: Any = None, path: str = CHAT, **options: Any) -> Answer:
        return check(opened.call(body, path, headers=headers, **options), allowed)

    answer = ask(said("x"))
    assert answer.status == 200 and answer.header("x-ratelimit-limit-requests") == "1000"
    assert ask(said("x", stream=True)).ended_well()
    assert ask(said("fail")).status == 502
    assert ask(said("x", model="unknown")).status == 404 and ask(b"{").status == 400
    assert ask(said("x"), key="sk-wrong").status == 401 and ask(said("x"), key=None).status == 401
    assert ask(path="/v1/models", method="GET").status == 200
    assert ask(path="/v1/models", method="GET", key=None).status == 401
    assert ask(path="/v1/nothing", method="GET").status == 404 and ask(path=CHAT, method="GET").status == 405
    assert ask(path="/health", method="GET", key=None).status == 200
    assert ask(b"", length=40 << 20).status == 413


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/v1/models/a/b", "/v1/nothing"])
@pytest.mark.parametrize("origin", [PAGE, OTHER])
def test_a_preflight_needs_no_key_and_is_the_same_for_every_path(opened: Lab, path: str, origin: str) -> None:
    headers = [f"origin: {origin}", "access-control-request-method: POST",
               "access-control-request-headers: authorization,content-type,x-stainless-lang"]  # fmt: skip
    with opened.gateway.wire() as wire:
        answer = check(wire.ask("OPTIONS", path, headers=headers).rest(), PAGE if origin == PAGE else None)
        assert answer.status == 204 and not answer.body and answer.header("x-request-id")
        wanted = "authorization,content-type,x-stainless-lang" if origin == PAGE else None
        assert answer.header("access-control-allow-headers") == wanted
        assert wire.ask("POST", CHAT, said("x"), key=opened.key).rest().status == 200  # the connection goes on


def test_administration_and_metrics_are_not_for_pages(opened: Lab) -> None:
    asked = [f"origin: {PAGE}", "access-control-request-method: POST"]
    for path in ("/admin/v1/keys", "/metrics", "/docs"):
        for method in ("OPTIONS", "GET"):
            answer = opened.call(path=path, method=method, headers=asked, key=None)
            assert answer.status == 401 and not any("access-control" in name for name, _ in answer.headers)


def test_an_identity_without_a_credential_is_still_not_for_pages(lab: Lab) -> None:
    lab.serve({"m": [replica(lab.engine())]}, server={"cors_origins": [PAGE]}, auth={"required": False})
    assert lab.call(said("x"), key=None).status == 200
    page = [f"origin: {PAGE}", "sec-fetch-site: cross-site"]
    assert check(lab.call(said("x"), key=None, headers=page), PAGE).status == 401


def test_a_star_is_every_origin(lab: Lab) -> None:
    lab.serve({"m": [replica(lab.engine())]}, server={"cors_origins": ["*"]})
    for origin in (PAGE, OTHER, "null"):
        answer = lab.call(said("x", stream=True), headers=[f"origin: {origin}"])
        assert answer.header("access-control-allow-origin") == "*" and answer.ended_well()


def test_off_is_the_default_and_says_nothing(lab: Lab) -> None:
    lab.serve({"m": [replica(lab.engine())]})
    asked = [f"origin: {PAGE}", "access-control-request-method: POST"]
    for answer in (lab.call(said("x"), headers=asked), lab.call(path=CHAT, method="OPTIONS", headers=asked)):
        assert answer.status in (200, 405) and answer.header("vary") is None
        assert not any("access-control" in name for name, _ in answer.headers)
