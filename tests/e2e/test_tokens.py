"""Tokens of an identity provider through the front door: accepted ones, forged ones, and keys that change."""

from __future__ import annotations

import hmac
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.engine import Engine
from tests.doubles.issuer import Issuer, Signer, compact
from tests.e2e.harness import Lab, chat, eventually, replica, together
from tests.e2e.wire import Answer

LEEWAY = 5


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    with Issuer() as one:
        yield one


class Site:
    """A gateway that trusts one issuer, and an engine behind it."""

    def __init__(self, lab: Lab, issuer: Issuer) -> None:
        self.lab, self.issuer = lab, issuer
        self.engine: Engine = lab.engine()
        self.serve()

    def serve(self, *entries: dict[str, Any], **more: Any) -> None:
        trusted = list(entries) or [self.issuer.entry(leeway=f"{LEEWAY}s")]
        models = {"m": [replica(self.engine)], "other": [replica(self.engine)]}
        self.lab.serve(models, **({"auth": {"jwt": trusted}} | more))

    def token(self, **claims: Any) -> str:
        return self.issuer.token(**({"tenant": self.lab.tenant} | claims))

    def ask(self, token: str, model: str = "m", **options: Any) -> Answer:
        return self.lab.call(chat(model), key=token, **options)

    def listed(self, token: str) -> Answer:
        return self.lab.call(None, "/v1/models", method="GET", key=token)

    def accepted(self, token: str) -> dict[str, Any]:
        """What the access log says of a request that is served."""
        answer = self.ask(token)
        assert answer.status == 200, (answer.body, self.lab.gateway.log()[-2000:])
        return self.line(answer)

    def refused(self, token: str) -> str:
        """The reason, which stands in the access log and nowhere else."""
        served = len(self.engine.requests)
        answer, listed, unknown = self.ask(token), self.listed(token), self.ask("sk-unknown")
        assert (answer.status, listed.status) == (401, 401)
        assert answer.body == listed.body == unknown.body
        assert len(self.engine.requests) == served
        line = self.line(answer)
        reason: str = line["reason"]
        shown = json.dumps(line) + answer.body.decode() + str(answer.headers)
        for part in token.split("."):
            assert not any(part[at : at + 8] in shown for at in range(len(part) - 7)), shown
        assert (line["tenant"], line["key"]) == ("unknown", None) and reason not in answer.body.decode()
        return reason

    def line(self, answer: Answer) -> dict[str, Any]:
        return self.lab.gateway.access_line(answer.header("x-request-id") or "")


@pytest.fixture
def site(lab: Lab, issuer: Issuer) -> Site:
    return Site(lab, issuer)


# --- accepted
@pytest.mark.parametrize("algorithm", ["RS256", "RS384", "RS512", "ES256", "ES384", "ES512"])
def test_a_token_is_served_like_a_key_of_its_tenant(lab: Lab, algorithm: str) -> None:
    with Issuer(algorithm) as issuer:
        site = Site(lab, issuer)
        site.serve(issuer.entry(algorithms=[algorithm]))
        token = site.token(sub="reports")
        for _ in range(3):
            line = site.accepted(token)
            assert (line["tenant"], line["key"]) == (lab.tenant, "jwt:reports")
        assert site.listed(token).status == 200
        assert lab.call(chat(), key=None, headers=[f"x-api-key: {token}"]).status == 200
        assert lab.booked(44, 20)
        assert issuer.requests == 1


def test_the_engine_never_sees_the_token(site: Site) -> None:
    token = site.token()
    site.accepted(token)
    (request,) = site.engine.requests
    assert token.encode() not in request.raw_head + request.body


def test_tokens_and_keys_of_a_tenant_share_its_limits(site: Site) -> None:
    site.serve(limits={"requests": "2/min"})
    assert site.ask(site.token(sub="a")).status == 200 and site.ask(site.lab.key).status == 200
    assert site.ask(site.token(sub="b")).status == 429


def test_roles_and_models_come_from_claims(site: Site) -> None:
    assert site.lab.call(None, "/metrics", method="GET", key=site.token()).status == 403
    assert site.lab.call(None, "/metrics", method="GET", key=site.token(role=["user", "admin"])).status == 200
    narrow = site.token(models=["oth*"])
    assert [model["id"] for model in site.listed(narrow).json()["data"]] == ["other"]
    assert site.ask(narrow, "m").status == 404 and site.ask(narrow, "other").status == 200


def test_claims_may_be_nested_and_keys_may_be_in_a_file(site: Site, tmp_path: Path) -> None:
    site.accepted(site.token())
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": site.issuer.published}))
    entry = site.issuer.entry(jwks_file=str(file), tenant_claim="realm_access.tenant")
    del entry["jwks_url"]
    site.serve(entry)
    asked = site.issuer.requests
    nested = {"realm_access": {"tenant": site.lab.tenant}}
    site.accepted(site.token(**nested))
    site.issuer.rotate("ES256")
    file.write_text(json.dumps({"keys": site.issuer.published}))
    site.accepted(site.token(**nested))
    assert site.issuer.requests == asked


# --- forged or not meant for us
Forge = Callable[[Site], str]


def hmac_token(site: Site, algorithm: str = "HS256") -> str:
    """The old trick: the published key, which everybody has, as the shared secret."""
    secret = site.issuer.signers[0].pem()
    claims = site.issuer.claims(tenant=site.lab.tenant)
    return compact({"alg": algorithm, "kid": "key-0"}, claims, lambda data: hmac.digest(secret, data, "sha256"))


def unsigned(algorithm: str) -> Forge:
    return lambda site: compact({"alg": algorithm, "typ": "JWT"}, site.issuer.claims(tenant=site.lab.tenant))


def by_stranger(**header: Any) -> Forge:
    stranger = Signer("RS256", 7, "key-0")
    return lambda site: stranger.token(site.issuer.claims(tenant=site.lab.tenant), **header)


def saying(**claims: Any) -> Forge:
    return lambda site: site.token(**claims)


FORGED: dict[str, tuple[Forge, str]] = {
    "none": (unsigned("none"), "algorithm"),
    "None": (unsigned("None"), "algorithm"),
    "nOnE": (unsigned("nOnE"), "algorithm"),
    "hs256": (hmac_token, "algorithm"),
    "hs256 in disguise": (lambda site: hmac_token(site, "RS256"), "not signed"),
    "signed by a stranger": (by_stranger(), "not signed"),
    "key in the header": (by_stranger(jwk=Signer("RS256", 7, "key-0").jwk()), "not signed"),
    "demands an extension": (lambda site: by_stranger(crit=["exp"])(site), "extension"),
    "another algorithm": (lambda site: Signer("RS512", 0, "key-0").token(site.issuer.claims()), "algorithm"),
    "wrong audience": (saying(aud="other"), "audience"),
    "no audience": (saying(aud=None), "audience"),
    "wrong issuer": (saying(iss="https://other.test"), "issuer"),
    "no issuer": (saying(iss=None), "issuer"),
    "never expires": (saying(exp=None), "never expires"),
    "unknown tenant": (saying(tenant="nobody"), "tenant"),
    "no tenant": (saying(tenant=None), "tenant"),
    "malformed models": (saying(models={"m": True}), "models"),
    "changed": (lambda site: site.token()[:-40] + "A" * 40, "not"),
    "cut": (lambda site: site.token()[:-1], "not"),
}


@pytest.mark.parametrize("name", FORGED)
def test_what_is_forged_or_for_others_is_one_and_the_same_401(site: Site, name: str) -> None:
    forge, reason = FORGED[name]
    assert reason in site.refused(forge(site))
    site.accepted(site.token())


def test_addresses_of_keys_in_a_header_are_not_asked(site: Site) -> None:
    with Issuer() as trap:
        for name in ("jku", "x5u"):
            assert site.refused(by_stranger(**{name: trap.url})(site))
        assert trap.requests == 0


def test_a_made_up_key_name_reaches_the_issuer_once(site: Site) -> None:
    site.accepted(site.token())
    token = by_stranger(kid="made up")(site)
    assert [answer.status for answer in together([lambda: site.ask(token)] * 20)] == [401] * 20
    assert site.refused(token) and site.issuer.requests == 2


def test_without_issuers_no_token_is_accepted(site: Site) -> None:
    site.serve(auth={"jwt": []})
    assert site.refused(site.token())


# --- clocks
@pytest.mark.parametrize(("claim", "offset"), [("iat", 2), ("nbf", 2), ("exp", -2)])
def test_two_seconds_of_difference_are_forgiven(site: Site, claim: str, offset: int) -> None:
    site.accepted(site.token(**{claim: int(time.time()) + offset}))


@pytest.mark.parametrize(("claim", "offset"), [("iat", 60), ("nbf", 60), ("exp", -60), ("exp", -LEEWAY - 0.01)])
def test_more_than_the_leeway_is_not(site: Site, claim: str, offset: float) -> None:
    assert site.refused(site.token(**{claim: time.time() + offset}))


def test_a_known_token_expires_by_the_clock(site: Site) -> None:
    site.serve(site.issuer.entry(leeway="0s"))
    token = site.token(exp=time.time() + 2)
    site.accepted(token)
    assert eventually(lambda: site.ask(token).status == 401)
    assert "expired" in site.refused(token)


# --- keys that change
def test_a_key_added_a_minute_ago_works_without_a_restart(site: Site) -> None:
    old = site.token(sub="old")
    site.accepted(site.token())
    site.issuer.rotate("ES256")
    site.accepted(site.token())
    site.accepted(old)
    assert site.issuer.requests == 2


def test_many_tokens_of_a_new_key_are_one_request_to_the_issuer(site: Site) -> None:
    site.accepted(site.token())
    site.issuer.rotate()
    jobs = [lambda sub=f"app-{n}": site.ask(site.token(sub=sub)) for n in range(20)]  # type: ignore[misc]
    assert [answer.status for answer in together(jobs)] == [200] * 20
    assert site.issuer.requests == 2


def test_an_issuer_that_is_down_does_not_stop_those_whose_keys_are_known(site: Site) -> None:
    known = site.token()
    site.accepted(known)
    site.issuer.fault = "status"
    site.accepted(known)
    site.accepted(site.token(sub="new"))
    site.serve()  # a reload keeps the keys
    site.accepted(known)


def test_an_issuer_that_was_never_reached_is_said_so_in_the_log_only(site: Site) -> None:
    with Issuer() as gone:
        entry, token = gone.entry(), gone.token(tenant=site.lab.tenant)
    site.serve(site.issuer.entry(), entry)
    assert "cannot be read" in site.refused(token)
    assert gone.name in site.lab.gateway.log() and token not in site.lab.gateway.log()
    site.accepted(site.token())  # the other issuer is not affected


# --- people and configurations that change
def test_tokens_of_a_tenant_that_is_gone_are_refused_at_once(site: Site) -> None:
    gone = f"{site.lab.tenant}-gone"
    site.serve(tenants=[{"name": gone}])
    token = site.token(tenant=gone)
    site.accepted(token)
    site.serve()
    assert "tenant" in site.refused(token)


def test_changed_limits_count_for_a_token_that_is_known(site: Site) -> None:
    token = site.token()
    site.accepted(token)
    site.serve(limits={"requests": "1/min"})
    assert [site.ask(token).status for _ in range(2)] == [200, 429]


def test_an_issuer_that_is_taken_out_is_not_trusted_any_more(site: Site) -> None:
    with Issuer() as other:
        site.serve(site.issuer.entry(), other.entry())
        token = site.token()
        site.accepted(token)
        site.serve(other.entry())
        assert "issuer" in site.refused(token)
        site.accepted(other.token(tenant=site.lab.tenant))
