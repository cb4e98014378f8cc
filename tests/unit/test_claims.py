"""One token against given keys: what is accepted, every forgery there is a name for, and whom a token stands for."""

from __future__ import annotations

import hashlib
import hmac
import json
import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import claims
from gateway.claims import MOST_TRIED, PublicKey, UnusableKeys, parse, read_keys
from gateway.config import JwtConfig
from gateway.errors import AuthError
from gateway.people import People
from gateway.records import Changes, TenantRecord
from gateway.types import Principal
from tests.doubles.issuer import Signer, b64, compact

NOW = 1_800_000_000.0
ISSUER, AUDIENCE = "https://id.test", "sekisho"
LEEWAY = 5.0
ALGORITHMS = ("RS256", "RS384", "RS512", "ES256", "ES384", "ES512")
SIGNER = Signer("RS256", 0, "one")
CURVED = Signer("ES256", 0, "two")
STRANGER = Signer("RS256", 1, "one")
TENANTS = People().with_changes(Changes(1, [TenantRecord("t1", ("small", "llama-*")), TenantRecord("t2")], [])).tenants


def config(**more: Any) -> JwtConfig:
    given = {"issuer": ISSUER, "audience": AUDIENCE, "jwks_url": "https://id.test/keys", "leeway": LEEWAY}
    return JwtConfig.model_validate(given | {"algorithms": ALGORITHMS} | more)


def said(**more: Any) -> dict[str, Any]:
    given = {"iss": ISSUER, "aud": AUDIENCE, "sub": "app", "exp": NOW + 60, "tenant": "t1"} | more
    return {name: value for name, value in given.items() if value is not ...}


def key_set(*entries: dict[str, Any]) -> tuple[PublicKey, ...]:
    return read_keys(json.dumps({"keys": entries}).encode())


KEYS = key_set(SIGNER.jwk(), CURVED.jwk())


def verify(token: str | bytes, *entries: JwtConfig, keys: tuple[PublicKey, ...] = KEYS, now: float = NOW) -> Principal:
    """All the steps, in the order in which tokens.py takes them."""
    parsed = parse(token.encode() if isinstance(token, str) else token)
    (entry,) = claims.addressed(parsed, entries or [config()])
    expires = claims.check_times(parsed, entry, now)
    if not claims.is_signed(parsed, keys):
        raise AuthError("signed with none of the keys")
    return claims.subject(parsed, entry, TENANTS, expires)


def refused(token: str | bytes, *entries: JwtConfig, **options: Any) -> str:
    """The reason, which never holds a part of the token."""
    with pytest.raises(AuthError) as caught:
        verify(token, *entries, **options)
    reason = caught.value.reason
    text = token if isinstance(token, str) else token.decode("latin-1")
    assert reason and not any(reason[at : at + 8] in text for at in range(len(reason) - 7)), reason
    return reason


# --- accepted
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_that_is_configured_verifies_with_its_own_key(algorithm: str) -> None:
    signer = Signer(algorithm, 0, "k")
    token = signer.token(said())
    assert verify(token, keys=key_set(signer.jwk())).tenant.name == "t1"
    assert refused(token, keys=key_set(Signer(algorithm, 2, "k").jwk()))


def test_a_token_becomes_a_caller_of_its_tenant() -> None:
    token = SIGNER.token(said(iat=NOW, nbf=NOW))
    found = verify(token)
    assert (found.tenant.name, found.key, found.role, found.models) == ("t1", "jwt:app", "user", ("small", "llama-*"))
    assert found.key_models is None and found.networks == ()
    assert found.expires == NOW + 60 + LEEWAY
    assert found.digest == hashlib.sha256(token.encode()).digest()
    assert found.limits is TENANTS["t1"].limits


def test_nothing_of_a_token_or_key_shows_in_their_text() -> None:
    text = repr(parse(SIGNER.token(said(tenant="hush-hush")).encode())) + repr(KEYS)
    assert "hush" not in text and SIGNER.jwk()["n"][:12] not in text


# --- the algorithm
@pytest.mark.parametrize("algorithm", ["none", "None", "nOnE", "NONE", "", "HS256", "hs256", "HS512", "PS256",
                                       "EdDSA", "rs256", "RS256 ", "RS1", "dir", None, 5, ["RS256"], {"RS256": 1},
                                       True])  # fmt: skip
@pytest.mark.parametrize("signature", [b"", b"\0" * 256])
def test_no_other_algorithm_is_taken_in_any_spelling(algorithm: object, signature: bytes) -> None:
    assert "algorithm" in refused(compact({"alg": algorithm, "kid": "one"}, said(), lambda _: signature))


@pytest.mark.parametrize("algorithm", ["HS256", "HS384", "HS512"])
@pytest.mark.parametrize("secret", [SIGNER.pem(), SIGNER.pem().strip(), SIGNER.jwk()["n"].encode(), b""])
def test_a_public_key_is_no_shared_secret(algorithm: str, secret: bytes) -> None:
    digest = {"HS256": "sha256", "HS384": "sha384", "HS512": "sha512"}[algorithm]
    token = compact({"alg": algorithm, "kid": "one"}, said(), lambda data: hmac.digest(secret, data, digest))
    assert "algorithm" in refused(token)


def test_a_shared_secret_in_the_key_set_is_no_key() -> None:
    secret = b"s" * 32
    published = {"kty": "oct", "k": b64(secret), "kid": "one", "use": "sig"}
    keys = key_set(published, published | {"alg": "RS256"}, published | {"alg": "HS256"})
    assert keys == ()
    token = compact({"alg": "HS256", "kid": "one"}, said(), lambda data: hmac.digest(secret, data, "sha256"))
    assert "algorithm" in refused(token, keys=keys)


def test_an_algorithm_that_the_issuer_is_not_configured_for_is_refused() -> None:
    token = SIGNER.token(said())
    assert "algorithm" in refused(token, config(algorithms=["ES256"]))
    assert verify(token, config(algorithms=["RS256"]))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_key_verifies_only_what_its_type_curve_and_algorithm_fit(algorithm: str) -> None:
    """The header says one algorithm, the signature is of another, with every key in the set."""
    signers = [Signer(name, 0, "k") for name in ALGORITHMS]
    keys = key_set(*(signer.jwk() for signer in signers))
    for signer in signers:
        if signer.algorithm != algorithm:
            assert refused(signer.token(said(), alg=algorithm), keys=keys)


def test_a_key_without_an_algorithm_serves_all_of_its_type_and_one_with_it_only_that() -> None:
    free = {name: value for name, value in SIGNER.jwk().items() if name != "alg"}
    assert {key.algorithms for key in key_set(free)} == {("RS256", "RS384", "RS512")}
    for algorithm in ("RS256", "RS384", "RS512"):
        token = Signer(algorithm, 0, "one").token(said())
        assert verify(token, keys=key_set(free)) and verify(token, keys=key_set(free | {"alg": algorithm}))
        for other in {"RS256", "RS384", "RS512"} - {algorithm}:
            assert refused(token, keys=key_set(free | {"alg": other}))


# --- the header
@pytest.mark.parametrize("name", ["jwk", "jku", "x5u", "x5c", "x5t"])
def test_keys_that_the_header_brings_along_are_not_used(name: str) -> None:
    forger = Signer("RS256", 1, "forged")
    values: dict[str, Any] = {"jwk": forger.jwk(), "x5c": [b64(forger.pem())], "x5t": "eA"}
    value = values.get(name, "http://127.0.0.1:1/keys")
    for kid in ("one", "forged", None):
        assert refused(forger.token(said(), kid=kid, **{name: value}))
    assert verify(SIGNER.token(said(), **{name: value})).tenant.name == "t1"  # nor do they do any harm


def test_extensions_that_a_token_demands_are_refused() -> None:
    for crit in (["exp"], [], ["b64"], None, "exp"):
        header = {"alg": "RS256", "kid": "one", "crit": crit, "b64": False}
        assert "extension" in refused(compact(header, said(), SIGNER.sign))


@pytest.mark.parametrize("kid", [5, ["one"], {"one": 1}, True, 1.5])
def test_a_key_name_has_to_be_text(kid: object) -> None:
    assert refused(SIGNER.token(said(), kid=kid))


def test_the_named_key_is_the_only_one_that_counts() -> None:
    assert refused(SIGNER.token(said(), kid="two"))
    assert refused(SIGNER.token(said(), kid="three"))
    assert refused(STRANGER.token(said()))
    assert verify(SIGNER.token(said(), kid=None))


def test_without_names_the_keys_that_fit_are_tried_and_only_few() -> None:
    nameless = [Signer("RS256", number, None) for number in range(3)]
    assert verify(nameless[2].token(said()), keys=key_set(*(signer.jwk() for signer in nameless)))
    assert verify(SIGNER.token(said()), keys=key_set(Signer("RS256", 1, None).jwk(), Signer("RS256", 0, None).jwk()))
    curves = [Signer("ES256", number, None) for number in range(MOST_TRIED + 1)]
    keys = key_set(*(signer.jwk() for signer in curves))
    assert verify(curves[-2].token(said()), keys=keys) and refused(curves[-1].token(said()), keys=keys)
    named = Signer("ES256", 99, "named")
    assert verify(named.token(said()), keys=(*keys, *key_set(named.jwk()))), "the one that is named comes first"


def test_two_keys_of_one_name_are_both_tried() -> None:
    keys = key_set(Signer("ES256", 0, "k").jwk(), Signer("RS256", 1, "k").jwk(), Signer("RS256", 0, "k").jwk())
    assert verify(Signer("RS256", 0, "k").token(said()), keys=keys)
    assert verify(Signer("ES256", 0, "k").token(said()), keys=keys)


# --- key sets
@pytest.mark.parametrize(
    "change",
    [{"use": "enc"}, {"use": ["sig"]}, {"use": None}, {"key_ops": ["sign"]}, {"key_ops": "verify"}, {"key_ops": None},
     {"alg": "RSA-OAEP"}, {"alg": "ES256"}, {"alg": "HS256"}, {"alg": 5}, {"kty": "EC"}, {"kty": "oct"}, {"kty": None},
     {"kty": ["RSA"]}, {"kid": 5}, {"kid": ["one"]}, {"n": ""}, {"n": 5}, {"n": "é"}, {"n": "A" * 3000}, {"e": "AQ"},
     {"e": None}, {"e": "AQAC"}, {"e": "A" * 400}, {"d": "AQAB"}, {"n": "AQAB"}],
)  # fmt: skip
def test_keys_that_are_not_fit_for_signatures_are_left_out_and_the_others_stay(change: dict[str, Any]) -> None:
    keys = key_set(SIGNER.jwk(**change), CURVED.jwk())
    assert [key.kid for key in keys] == ["two"]


@pytest.mark.parametrize(
    "change", [{"crv": "P-384"}, {"crv": "secp256k1"}, {"crv": None}, {"crv": ["P-256"]}, {"x": "AQ"}, {"y": ""},
               {"x": "!"}, {"y": None}, {"kty": "RSA"}, {"kty": "OKP"}, {"alg": "ES384"}, {"d": "AQ"}])  # fmt: skip
def test_points_beside_their_curve_are_no_keys(change: dict[str, Any]) -> None:
    assert [key.kid for key in key_set(CURVED.jwk(**change), SIGNER.jwk())] == ["one"]


def test_short_rsa_keys_are_refused() -> None:
    assert key_set(Signer("RS256", 0, "k", bits=1024).jwk()) == ()
    assert key_set(Signer("RS256", 0, "k", bits=2048).jwk()) != ()


def test_marks_that_allow_verification_are_accepted() -> None:
    unmarked = {name: value for name, value in SIGNER.jwk().items() if name not in ("use", "alg")}
    for change in ({}, {"use": "sig"}, {"key_ops": ["verify"]}, {"key_ops": ["sign", "verify"]}, {"x5c": ["junk"]}):
        assert verify(SIGNER.token(said()), keys=key_set(unmarked | change))


@pytest.mark.parametrize(
    "document",
    [b"", b"[]", b"null", b"5", b'"keys"', b"{}", b'{"keys": {}}', b'{"keys": "x"}', b'{"keys": null}', b"\xff\xfe",
     b'{"keys": [' + b"[" * 5000, b"<html></html>", b'{"keys": [' + b"{}," * 5000 + b"{}]}"],
)  # fmt: skip
def test_what_is_no_key_set_is_said_to_be_none(document: bytes) -> None:
    with pytest.raises(UnusableKeys):
        read_keys(document)


def test_keys_are_equal_when_they_verify_the_same_tokens() -> None:
    assert key_set(SIGNER.jwk()) == key_set(SIGNER.jwk(x5t="eA"))
    for other in (SIGNER.jwk(kid="other"), STRANGER.jwk(), SIGNER.jwk(alg="RS512")):
        assert not set(key_set(SIGNER.jwk())) & set(key_set(other))


_numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
_scalars = st.none() | st.booleans() | _numbers | st.text(max_size=20)
_json = st.recursive(_scalars, lambda inner: st.lists(inner, max_size=4)
                     | st.dictionaries(st.text(max_size=5), inner, max_size=4), max_leaves=12)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_key_set_breaks_the_reader(data: st.DataObject) -> None:
    """Real entries in which any member was replaced by anything, and entries that are nothing at all."""
    names = ["kty", "use", "alg", "kid", "n", "e", "x", "y", "crv", "key_ops", "d"]
    entries: list[Any] = [SIGNER.jwk(), CURVED.jwk()]
    for entry in entries:
        entry.update(data.draw(st.dictionaries(st.sampled_from(names), _json, max_size=3)))
    entries += data.draw(st.lists(_json, max_size=3))
    for key in read_keys(json.dumps({"keys": entries}).encode()):
        assert set(key.verifiers) == set(key.algorithms) <= set(ALGORITHMS)


# --- issuer and audience
@pytest.mark.parametrize("iss", [..., None, "", ISSUER + "/", ISSUER.upper(), " " + ISSUER, [ISSUER], {"": ISSUER}, 5])
def test_another_issuer_is_refused(iss: object) -> None:
    assert "issuer" in refused(SIGNER.token(said(iss=iss)))


@pytest.mark.parametrize(
    "aud", [..., None, "", "other", AUDIENCE + " ", AUDIENCE.upper(), f"{AUDIENCE} other", [], ["other"], [[AUDIENCE]],
            [AUDIENCE, 5], [AUDIENCE, None], {AUDIENCE: 1}, 5, True, [None]])  # fmt: skip
def test_a_token_for_others_is_refused(aud: object) -> None:
    assert "audience" in refused(SIGNER.token(said(aud=aud)))


def test_one_of_several_audiences_is_enough() -> None:
    assert verify(SIGNER.token(said(aud=["other", AUDIENCE])))


def test_entries_of_one_issuer_are_told_apart_by_their_audience() -> None:
    entries = config(), config(audience="other", tenant_claim="org", leeway=0)
    assert verify(SIGNER.token(said(aud="other", org="t2")), *entries).tenant.name == "t2"
    assert verify(SIGNER.token(said(org="t2")), *entries).tenant.name == "t1"
    both = parse(SIGNER.token(said(aud=["other", AUDIENCE])).encode())
    assert claims.addressed(both, entries) == list(entries)


# --- time
@pytest.mark.parametrize(
    "moments",
    [{"exp": NOW - 2}, {"exp": NOW - LEEWAY + 0.01}, {"iat": NOW + 2}, {"nbf": NOW + 2}, {"iat": NOW + LEEWAY},
     {"nbf": NOW + LEEWAY}, {"exp": int(NOW) + 1, "iat": 0, "nbf": 0}, {"exp": NOW + 0.5}, {"exp": 1e300},
     {"exp": 2**63}, {"exp": 10**40}, {"iat": -5}],
)  # fmt: skip
def test_clocks_may_differ_by_the_leeway(moments: dict[str, Any]) -> None:
    found = verify(SIGNER.token(said(**moments)))
    assert found.expires == pytest.approx(moments.get("exp", NOW + 60) + LEEWAY) and found.expires > NOW


@pytest.mark.parametrize(
    ("moments", "reason"),
    [({"exp": NOW - LEEWAY}, "expired"), ({"exp": NOW - LEEWAY - 0.01}, "expired"), ({"exp": NOW - 3600}, "expired"),
     ({"exp": 0}, "expired"), ({"exp": -1e300}, "expired"),
     ({"iat": NOW + LEEWAY + 0.01}, "future"), ({"iat": NOW + 3600}, "future"),
     ({"nbf": NOW + LEEWAY + 0.01}, "not valid yet"), ({"nbf": NOW + 3600}, "not valid yet")],
)  # fmt: skip
def test_and_by_no_more(moments: dict[str, Any], reason: str) -> None:
    assert reason in refused(SIGNER.token(said(**moments)))


@pytest.mark.parametrize("moments", [{"exp": NOW - 0.5}, {"iat": NOW + 0.5}, {"nbf": NOW + 0.5}, {"exp": NOW}])
def test_without_leeway_every_moment_counts(moments: dict[str, Any]) -> None:
    assert refused(SIGNER.token(said(**moments)), config(leeway=0))


def test_a_token_has_to_expire() -> None:
    assert "never expires" in refused(SIGNER.token(said(exp=...)))


@pytest.mark.parametrize("name", ["exp", "nbf", "iat"])
@pytest.mark.parametrize("value", [None, True, False, "", str(int(NOW)), "soon", [NOW], {"": NOW}])
def test_moments_have_to_be_numbers(name: str, value: object) -> None:
    assert refused(SIGNER.token(said(**{name: value})))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "0x7fffffff", "1_000"])
def test_numbers_that_are_none_are_refused(number: str) -> None:
    text = json.dumps(said(exp="here")).replace('"here"', number).encode()
    assert "not readable" in refused(compact({"alg": "RS256", "kid": "one"}, text, SIGNER.sign))


# --- whom it stands for
@pytest.mark.parametrize("tenant", [..., None, "", "nobody", "T1", "t1 ", ["t1"], {"t1": "t1"}, 5, True])
def test_the_tenant_has_to_exist(tenant: object) -> None:
    assert "tenant" in refused(SIGNER.token(said(tenant=tenant)))


@pytest.mark.parametrize(
    ("path", "given", "tenant"),
    [("realm_access.tenant", {"realm_access": {"tenant": "t2"}}, "t2"),
     ("a.b.c", {"a": {"b": {"c": "t2"}}}, "t2"),
     ("https://id.test/tenant", {"https://id.test/tenant": "t2"}, "t2"),
     ("a.b", {"a.b": "t2", "a": {"b": "t1"}}, "t2"),  # the literal name is meant first
     ("a.b", {"a.b": None, "a": {"b": "t1"}}, None),
     ("a.b", {"a": {"b": ["t1"]}}, None), ("a.b", {"a": "t1"}, None), ("a.b", {"a": ["b"]}, None), ("a.b", {}, None),
     ("a.b.c", {"a": {"b": None}}, None), ("a.", {"a": "t1"}, None), (".", {"a": "t1"}, None)],
)  # fmt: skip
def test_claims_lie_under_their_name_or_at_the_end_of_a_path(path: str, given: dict[str, Any], tenant: str) -> None:
    token, entry = SIGNER.token(said(tenant=..., **given)), config(tenant_claim=path)
    if tenant is None:
        assert "tenant" in refused(token, entry)
    else:
        assert verify(token, entry).tenant.name == tenant


@pytest.mark.parametrize(
    ("claim", "role"),
    [(..., "user"), (None, "user"), ("user", "user"), ("operator", "operator"), ("admin", "admin"), ("root", "user"),
     ("Admin", "user"), ("admin user", "user"), (["user", "operator"], "operator"), (["operator", "admin"], "admin"),
     (["offline", "admin", "user"], "admin"), ([], "user"), (["root"], "user"),
     ([5, None, ["admin"], {}, "operator"], "operator"), ({"admin": True}, "user"),
     (True, "user"), (5, "user"), ([["admin"]], "user")],
)  # fmt: skip
def test_the_highest_known_role_counts(claim: object, role: str) -> None:
    assert verify(SIGNER.token(said(role=claim))).role == role


@pytest.mark.parametrize(
    ("claim", "models"),
    [(..., None), (["small"], ("small",)), (["a-*", "b?"], ("a-*", "b?")), ("small a-*", ("small", "a-*")), ([], ()),
     ("", ()), ("  small  ", ("small",))],
)  # fmt: skip
def test_models_are_a_list_or_words(claim: object, models: tuple[str, ...] | None) -> None:
    assert verify(SIGNER.token(said(models=claim))).key_models == models


@pytest.mark.parametrize(
    "claim", [None, 5, True, {"small": 1}, [5], ["small", None], [["small"]], ["open["], "open[", [""], ["a b"],
              ["a\n"], ["x" * 300], ["m"] * 101])  # fmt: skip
def test_a_restriction_that_cannot_be_read_is_not_dropped(claim: object) -> None:
    assert "models" in refused(SIGNER.token(said(models=claim)))


@pytest.mark.parametrize("sub", ["app", "a@b.example", "svc:ci-1", "A" * 64, "0"])
def test_a_harmless_subject_is_the_callers_name(sub: str) -> None:
    assert verify(SIGNER.token(said(sub=sub))).key == f"jwt:{sub}"


@pytest.mark.parametrize("sub", [..., "", "A" * 65, "a b", "line\nbreak", "é", "-x", "<script>", "auth0|5f7c"])
def test_any_other_subject_goes_by_a_fingerprint(sub: object) -> None:
    name = verify(SIGNER.token(said(sub=sub))).key
    assert name.startswith("jwt:") and len(name) == 16 and set(name[4:]) <= set(string.hexdigits.lower())
    assert name == verify(SIGNER.token(said(sub=sub, exp=NOW + 99))).key
    other = config(issuer="https://other.test")
    assert name != verify(SIGNER.token(said(sub=sub, iss=other.issuer)), other).key


@pytest.mark.parametrize("sub", [None, 5, ["app"], True])
def test_a_subject_has_to_be_text(sub: object) -> None:
    assert "subject" in refused(SIGNER.token(said(sub=sub)))


# --- the bytes
TOKEN = CURVED.token(said())
ALPHABET = string.ascii_letters + string.digits + "-_.=+/ \n%"


@settings(max_examples=500, deadline=None)
@given(st.integers(0, len(TOKEN) - 1), st.sampled_from(ALPHABET))
def test_a_token_in_which_one_character_was_changed_is_refused(place: int, character: str) -> None:
    changed = TOKEN[:place] + character + TOKEN[place + 1 :]
    if changed == TOKEN:
        assert verify(changed)
    else:
        refused_anyhow(changed.encode())


@pytest.mark.parametrize("signer", [SIGNER, CURVED])
def test_the_last_character_has_no_spare_spelling(signer: Signer) -> None:
    """256 and 64 bytes do not fill their last base64 character: its spare bits must be zero, or there would be several
    texts of one token."""
    token = signer.token(said())
    accepted = []
    for character in string.ascii_letters + string.digits + "-_":
        try:
            verify(token[:-1] + character)
        except AuthError:
            continue
        accepted.append(character)
    assert accepted == [token[-1]]


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(TOKEN)), st.sampled_from(ALPHABET), st.booleans())
def test_a_token_with_one_character_more_or_less_is_refused(place: int, character: str, more: bool) -> None:
    refused_anyhow((TOKEN[:place] + (character if more else "") + TOKEN[place + (not more) :]).encode(), whole=TOKEN)


def refused_anyhow(token: bytes, whole: str = "") -> None:
    if token.decode() != whole:
        with pytest.raises(AuthError):
            verify(token)


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200) | st.lists(st.binary(max_size=60), min_size=3, max_size=3).map(b".".join))
def test_bytes_of_any_kind_are_refused_and_nothing_else(token: bytes) -> None:
    with pytest.raises(AuthError):
        verify(token)


@settings(max_examples=300, deadline=None)
@given(_json, _json, st.binary(max_size=70))
def test_parts_of_any_kind_are_refused_and_nothing_else(header: Any, body: Any, signature: bytes) -> None:
    with pytest.raises(AuthError):
        verify(compact(header, body, lambda _: signature))


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(["iss", "aud", "exp", "nbf", "iat", "sub", "tenant", "role", "models"]), _json))
def test_properly_signed_nonsense_is_refused_or_harmless(strange: dict[str, Any]) -> None:
    try:
        found = verify(CURVED.token(said(**strange)))
    except AuthError:
        return
    assert found.tenant.name == "t1" and found.expires is not None and found.expires > NOW


@pytest.mark.parametrize(
    "token",
    ["", ".", "..", "...", "a.b", "a.b.c.d", TOKEN + ".", "." + TOKEN, TOKEN + "." + TOKEN, TOKEN + "=",
     TOKEN.replace(".", "=.", 1), TOKEN.replace("-", "+").replace("_", "/") + "\n", "[" * 4000 + ".e30."],
)  # fmt: skip
def test_other_shapes_are_refused(token: str) -> None:
    refused_anyhow(token.encode())


def test_what_is_too_long_is_not_even_taken_apart() -> None:
    assert verify(SIGNER.token(said(padding="x" * 9_000)))
    assert refused(SIGNER.token(said(padding="x" * 13_000))) == "not a signed token"


def test_deep_nesting_is_refused() -> None:
    deep = b'{"alg":"RS256","x":' + b"[" * 3000 + b"]" * 3000 + b"}"
    assert "header" in refused(compact(deep, said(), SIGNER.sign))
    assert "claims" in refused(compact({"alg": "RS256", "kid": "one"}, deep, SIGNER.sign))
