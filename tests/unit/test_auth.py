"""Who calls: headers in all their forms, one answer for every reason to refuse."""

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.auth import authenticate, presented_key
from gateway.errors import AuthError, body
from gateway.types import Limits, Principal, Tenant

KEY = b"sk-" + b"a" * 48
NOW = 1_000_000.0
Headers = dict[bytes, bytes]


def principal(key: bytes = KEY, expires: float | None = None) -> Principal:
    return Principal(Tenant("t"), "ci", "user", ("*",), None, Limits(), expires, hashlib.sha256(key).digest())


KNOWN = principal()
KEYS = {KNOWN.digest: KNOWN}
ANYBODY = Principal(Tenant("anonymous"), "none", "user", ("*",), None, Limits())


def bearer(key: bytes, scheme: bytes = b"Bearer ") -> Headers:
    return {b"host": b"x", b"authorization": scheme + key}


def refused(headers: Headers, keys: dict[bytes, Principal] = KEYS) -> AuthError:
    with pytest.raises(AuthError) as caught:
        authenticate(headers, keys, None, NOW)
    return caught.value


@pytest.mark.parametrize(
    "headers",
    [
        bearer(KEY), bearer(KEY, b"bearer "), bearer(KEY, b"BEARER   "), bearer(KEY + b" "), {b"x-api-key": KEY},
        {b"x-api-key": b"sk-other", **bearer(KEY)},
    ],
)  # fmt: skip
def test_a_known_key_in_every_form(headers: Headers) -> None:
    assert authenticate(headers, KEYS, None, NOW) is KNOWN


BAD: list[Headers] = [
    {}, bearer(b""), bearer(b" "), bearer(KEY[:-1]), bearer(KEY + b"a"), bearer(KEY[3:]), bearer(KEY.upper()),
    bearer(KEY, b""), bearer(KEY, b"Basic "), bearer(KEY, b"Bearer\t"), bearer(KEY, b"Bearer"), bearer(KEY, b"Token "),
    {b"authorization": b""}, {b"authorization": b"Bearer"}, {b"x-api-key": b""}, {b"api-key": KEY},
    {**bearer(b"sk-other"), b"x-api-key": KEY}, {b"authorization": b"", b"x-api-key": KEY},
    bearer(hashlib.sha256(KEY).digest()), bearer(hashlib.sha256(KEY).hexdigest().encode()), bearer(KEY + b"," + KEY),
    bearer(b"\xff\x00" * 20), bearer(b"k" * 1_000_000), {b"cookie": b"authorization=Bearer " + KEY},
]  # fmt: skip


@pytest.mark.parametrize("headers", BAD)
def test_everything_else_is_refused_in_the_same_words(headers: Headers) -> None:
    error = refused(headers)
    assert (error.status, error.code) == (401, "invalid_api_key")
    assert body(error) == body(AuthError())


@pytest.mark.parametrize("headers", BAD)
def test_where_no_key_is_required_everybody_is_anonymous(headers: Headers) -> None:
    assert authenticate(headers, KEYS, ANYBODY, NOW) is ANYBODY
    assert authenticate(bearer(KEY), KEYS, ANYBODY, NOW) is KNOWN


def test_a_key_ends_at_its_moment() -> None:
    for expires, accepted in ((NOW + 0.1, True), (NOW, False), (NOW - 0.1, False), (None, True)):
        known = principal(expires=expires)
        if accepted:
            assert authenticate(bearer(KEY), {known.digest: known}, None, NOW) is known
        else:
            assert body(refused(bearer(KEY), {known.digest: known})) == body(refused({}))


def test_the_digest_of_the_principal_has_the_last_word() -> None:
    other = principal(b"sk-other")
    refused(bearer(KEY), {hashlib.sha256(KEY).digest(): other})


@given(st.binary(max_size=600), st.sampled_from([b"authorization", b"x-api-key"]))
@settings(max_examples=150, deadline=None)
def test_no_other_bytes_open_the_door(value: bytes, name: bytes) -> None:
    error = refused({name: value})
    assert value not in body(error) or len(value) < 8


def test_a_principal_prints_no_digest() -> None:
    assert KNOWN.digest.hex() not in repr(KNOWN)
    assert repr(KNOWN.digest) not in repr(KNOWN)


def test_presented_key_without_any() -> None:
    assert presented_key({b"host": b"x"}) is None
