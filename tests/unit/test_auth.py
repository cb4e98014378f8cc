"""Who calls: headers in all their forms, one answer for every reason to refuse."""

import hashlib
from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.auth import UnverifiedToken, authenticate, check_address, presented_key
from gateway.errors import AuthError, body
from gateway.types import Limits, Network, Principal, Tenant

KEY = b"sk-" + b"a" * 48
TOKEN = b"eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJ4In0.c2lnbmF0dXJl"
NOW = 1_000_000.0
Headers = dict[bytes, bytes]


def principal(key: bytes = KEY, expires: float | None = None, networks: tuple[Network, ...] = ()) -> Principal:
    digest = hashlib.sha256(key).digest()
    return Principal(Tenant("t"), "ci", "user", ("*",), None, Limits(), expires, digest, networks)


KNOWN = principal()
KEYS = {KNOWN.digest: KNOWN}


def bearer(key: bytes, scheme: bytes = b"Bearer ") -> Headers:
    return {b"host": b"x", b"authorization": scheme + key}


def refused(
    headers: Headers, keys: dict[bytes, Principal] = KEYS, tokens: dict[bytes, Principal] | None = None
) -> AuthError:
    with pytest.raises(AuthError) as caught:
        authenticate(headers, keys, tokens, NOW)
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
    bearer(b"\xff\x00" * 20), bearer(b"k" * 1_000_000), bearer(TOKEN), {b"cookie": b"authorization=Bearer " + KEY},
]  # fmt: skip


@pytest.mark.parametrize("headers", BAD)
def test_everything_else_is_refused_in_the_same_words(headers: Headers) -> None:
    error = refused(headers)
    assert (error.status, error.code) == (401, "invalid_api_key")
    assert body(error) == body(AuthError())


def test_a_key_ends_at_its_moment() -> None:
    for expires, accepted in ((NOW + 0.1, True), (NOW, False), (NOW - 0.1, False), (None, True)):
        known = principal(expires=expires)
        if accepted:
            assert authenticate(bearer(KEY), {known.digest: known}, None, NOW) is known
        else:
            assert body(refused(bearer(KEY), {known.digest: known})) == body(refused({}))


# --- signed tokens
def verified(token: bytes = TOKEN, expires: float | None = NOW + 60) -> dict[bytes, Principal]:
    holder = principal(token, expires)
    return {holder.digest: holder}


@pytest.mark.parametrize("headers", [bearer(TOKEN), {b"x-api-key": TOKEN}])
def test_a_token_nobody_has_verified_is_handed_on_whole_and_prints_nothing(headers: Headers) -> None:
    with pytest.raises(UnverifiedToken) as caught:
        authenticate(headers, KEYS, {}, NOW)
    assert caught.value.token == TOKEN
    assert TOKEN.decode() not in f"{caught.value!r} {caught.value}"


def test_a_verified_token_is_known_until_it_expires() -> None:
    known = verified()
    assert authenticate(bearer(TOKEN), KEYS, known, NOW) is next(iter(known.values()))
    assert body(refused(bearer(TOKEN), tokens=verified(expires=NOW))) == body(AuthError())


@pytest.mark.parametrize("headers", [one for one in BAD if one != bearer(TOKEN)])
def test_what_has_not_the_form_of_a_token_is_never_handed_on(headers: Headers) -> None:
    assert body(refused(headers, tokens=verified())) == body(AuthError())


def test_tokens_may_be_long_and_keys_may_not() -> None:
    long = b"a" * 8000 + b"." + b"b" * 8000 + b"." + b"c" * 300
    with pytest.raises(UnverifiedToken):
        authenticate(bearer(long), KEYS, {}, NOW)
    refused(bearer(long))  # where no issuer is configured
    refused(bearer(long + b"c" * 200), tokens={})
    refused(bearer(b"k" * 513), {hashlib.sha256(b"k" * 513).digest(): principal(b"k" * 513)})
    known = principal(b"k" * 512)
    assert authenticate(bearer(b"k" * 512), {known.digest: known}, None, NOW) is known


def test_a_key_with_two_dots_is_still_a_key() -> None:
    known = principal(b"team.service.key")
    assert authenticate(bearer(b"team.service.key"), {known.digest: known}, {}, NOW) is known


# --- where from
OFFICE = (ip_network("10.0.0.0/8"), ip_network("fd00::/8"))


@pytest.mark.parametrize("address", ["10.9.9.9", "fd00::1"])
def test_a_key_may_be_used_from_its_networks(address: str) -> None:
    check_address(principal(networks=OFFICE), ip_address(address))


@pytest.mark.parametrize("address", ["11.0.0.1", "::1", None])
def test_from_elsewhere_a_key_is_as_unknown_as_any(address: str | None) -> None:
    with pytest.raises(AuthError) as caught:
        check_address(principal(networks=OFFICE), ip_address(address) if address else None)
    assert body(caught.value) == body(AuthError())
    check_address(principal(), ip_address(address) if address else None)


# --- reasons
def test_reasons_name_the_key_and_never_show_a_credential() -> None:
    expired = principal(expires=NOW - 1)
    errors = [refused(headers) for headers in BAD] + [refused(bearer(KEY), {expired.digest: expired})]
    assert {error.reason for error in errors} == {
        "no bearer token", "no credential", "unknown key", "too long for a credential", "key ci of t has expired",
    }  # fmt: skip
    assert all(error.reason not in body(error).decode() and error.reason not in str(error) for error in errors)


def test_the_digest_of_the_principal_has_the_last_word() -> None:
    other = principal(b"sk-other")
    refused(bearer(KEY), {hashlib.sha256(KEY).digest(): other})


@given(st.binary(max_size=600), st.sampled_from([b"authorization", b"x-api-key"]), st.booleans())
@settings(max_examples=150, deadline=None)
def test_no_other_bytes_open_the_door(value: bytes, name: bytes, issuers: bool) -> None:
    try:
        authenticate({name: value}, KEYS, verified() if issuers else None, NOW)
    except AuthError as error:
        assert value not in body(error) or len(value) < 8
    except UnverifiedToken as error:
        assert issuers and error.token in value
    else:
        pytest.fail("let in")


def test_a_principal_prints_no_digest() -> None:
    assert KNOWN.digest.hex() not in repr(KNOWN)
    assert repr(KNOWN.digest) not in repr(KNOWN)


def test_presented_key_without_any() -> None:
    assert presented_key({b"host": b"x"}) is None
