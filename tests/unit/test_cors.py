"""What browsers are told: only listed origins, only the API, and never a credentials mode."""

from __future__ import annotations

import pytest

from gateway.edge.cors import Cors, cors_for

LISTED = Cors(("https://app.example", "http://localhost:3000", "https://ported.example:443"))
ALLOW = b"access-control-allow-origin"


def allowed(cors: Cors, origin: bytes | None, path: bytes = b"/v1/models") -> bytes | None:
    lines = cors.lines(path, origin)
    assert len({name for name, _ in lines}) == len(lines)
    assert not any(name == b"access-control-allow-credentials" for name, _ in lines)
    return dict(lines).get(ALLOW)


@pytest.mark.parametrize("origin", [b"https://app.example", b"http://localhost:3000", b"https://ported.example"])
def test_a_listed_origin_is_named_in_the_answer(origin: bytes) -> None:
    assert allowed(LISTED, origin) == origin
    assert dict(LISTED.lines(b"/v1/models", origin))[b"vary"] == b"Origin"


@pytest.mark.parametrize(
    "origin",
    [None, b"null", b"", b"https://app.example.evil.test", b"https://evil.test", b"http://app.example", b"*",
     b"https://app.example:8443", b"https://app.example/", b"https://app.example, https://evil.test", b"app.example"],
)  # fmt: skip
def test_another_origin_is_not(origin: bytes | None) -> None:
    assert LISTED.lines(b"/v1/models", origin) == [(b"vary", b"Origin")]
    assert LISTED.preflight(b"/v1/models", preflight(origin or b"")) == [(b"vary", b"Origin")]


def test_a_star_admits_every_origin_and_caches_need_not_tell_them_apart() -> None:
    cors = Cors(("*", "https://app.example"))
    for origin in (b"https://evil.test", b"null", None):
        assert allowed(cors, origin) == b"*" and b"vary" not in dict(cors.lines(b"/v1/models", origin))


@pytest.mark.parametrize("path", [b"/metrics", b"/admin/v1/keys", b"/docs", b"/openapi.json", b"/", b"/v1", b"/v2/x"])
def test_only_the_api_is_opened(path: bytes) -> None:
    for cors in (LISTED, Cors(("*",))):
        assert cors.lines(path, b"https://app.example") == []
        assert cors.preflight(path, preflight(b"https://app.example")) is None


def preflight(origin: bytes, headers: bytes = b"authorization") -> dict[bytes, bytes]:
    return {
        b"origin": origin, b"access-control-request-method": b"POST", b"access-control-request-headers": headers,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (b"authorization,content-type,x-stainless-os", b"authorization,content-type,x-stainless-os"),
        (b"authorization, x-a", b"authorization, x-a"),
        (b"x: y", None), (b"a,,b", None), (b"", None), (b"a\r\nb", None), (b"a," * 4000 + b"a", None),
    ],
)  # fmt: skip
def test_a_preflight_allows_the_headers_that_were_asked_for_if_they_are_any(asked: bytes, told: bytes | None) -> None:
    answer = dict(LISTED.preflight(b"/v1/chat/completions", preflight(b"https://app.example", asked)) or ())
    usual = b"authorization, content-type, x-api-key, x-request-id, x-session-id"
    assert answer[b"access-control-allow-headers"] == (told or usual)
    assert answer[b"access-control-allow-methods"] == b"GET, POST" and answer[ALLOW] == b"https://app.example"


def test_what_is_no_preflight_is_not_answered_as_one() -> None:
    assert LISTED.preflight(b"/v1/models", {b"origin": b"https://app.example"}) is None
    assert LISTED.preflight(b"/v1/models", {b"access-control-request-method": b"GET"}) is None


def test_off_is_nothing_at_all() -> None:
    assert cors_for(()) is None and cors_for(("*",)) is not None
