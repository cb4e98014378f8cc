"""Client certificates: who a genuine one stands for, and that no other gets past the handshake."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509

from tests.doubles.authority import DAY, Authority, Identity
from tests.doubles.engine import Engine
from tests.e2e.harness import PATIENCE, Gateway, base_config, chat, digest, replica

KEY = "sk-certificates" + "c" * 40
SPIFFE = "spiffe://cluster/app"


class Site:
    """A gateway that demands certificates, an engine behind it, and the authorities of both sides."""

    def __init__(self, folder: Path) -> None:
        self.engine = Engine()
        self.clients, self.servers = Authority(folder, "clients"), Authority(folder, "servers")
        self.server = self.servers.issue("gateway", x509.IPAddress(ip_address("127.0.0.1")))
        self.someone = self.clients.issue("nobody in particular")
        gateway_folder = folder / "gateway"
        gateway_folder.mkdir()
        self.gateway = Gateway(
            gateway_folder, self.config(), scheme="https", verify=self.context(self.someone), wait_for="/health"
        )

    def config(self, *certificates: Mapping[str, Any]) -> dict[str, Any]:
        tenants = [
            {"name": "by-key", "keys": [{"name": "test", "sha256": digest(KEY)}]},
            {"name": "by-certificate"},
            {"name": "narrow", "models": ["other"]},
        ]
        tls = {name: str(path) for name, path in self.server._asdict().items()}
        models = {"m": [replica(self.engine)], "other": [replica(self.engine)]}
        server = {"tls": tls | {"client_ca_file": str(self.clients.ca_file)}}
        return base_config(models, tenants, server=server, auth={"certificates": list(certificates)})

    def accept(self, *certificates: Mapping[str, Any]) -> None:
        self.gateway.configure(self.config(*certificates))

    def context(self, identity: Identity | None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.servers.ca_file))
        if identity is not None:
            context.load_cert_chain(*identity)
        return context

    @contextlib.contextmanager
    def caller(self, identity: Identity | None) -> Iterator[httpx.Client]:
        url = f"https://127.0.0.1:{self.gateway.port}"
        with httpx.Client(base_url=url, verify=self.context(identity), trust_env=False, timeout=PATIENCE) as client:
            yield client

    def ask(self, identity: Identity | None, model: str = "m", **headers: str) -> httpx.Response:
        with self.caller(identity) as client:
            return client.post("/v1/chat/completions", json=chat(model), headers=headers)

    def tenant(self, answer: httpx.Response) -> tuple[str, str]:
        """Tenant and key that the access log names for an answer."""
        line = self.gateway.access_line(answer.headers["x-request-id"])
        return line["tenant"], line["key"]

    def close(self) -> None:
        self.gateway.stop()
        self.engine.stop()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("site"))
    yield site
    site.close()
    assert "Traceback" not in site.gateway.log(), site.gateway.log()[-5000:]


NAMES: dict[str, tuple[dict[str, str], str | None, tuple[x509.GeneralName, ...]]] = {
    "uri": ({"san": SPIFFE}, None, (x509.UniformResourceIdentifier(SPIFFE),)),
    "dns": ({"san": "app.example"}, "app", (x509.DNSName("www.example"), x509.DNSName("app.example"))),
    "email": ({"san": "app@example.com"}, "app", (x509.RFC822Name("app@example.com"),)),
    "subject": ({"subject": "The app"}, "The app", ()),
    "subject beside others": ({"subject": "The app"}, "The app", (x509.DNSName("app.example"),)),
}


@pytest.mark.parametrize("kind", NAMES)
def test_a_certificate_stands_for_the_tenant_that_its_name_belongs_to(site: Site, kind: str) -> None:
    entry, common_name, sans = NAMES[kind]
    site.accept(entry | {"tenant": "by-certificate"})
    with site.caller(site.clients.issue(common_name, *sans)) as client:
        for _ in range(2):  # the second request comes on the same connection
            answer = client.post("/v1/chat/completions", json=chat())
            assert answer.status_code == 200, answer.text
            assert site.tenant(answer) == ("by-certificate", "cert:" + next(iter(entry.values())))
        listed = client.get("/v1/models")
        assert listed.status_code == 200 and [model["id"] for model in listed.json()["data"]] == ["m", "other"]
        with client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as stream:
            assert stream.status_code == 200 and "[DONE]" in stream.read().decode()


@pytest.mark.parametrize(
    "strange",
    [None, x509.DNSName("other.example"), x509.UniformResourceIdentifier(SPIFFE + "/more"), x509.DNSName(SPIFFE),
     x509.RFC822Name("app@example.com")],
)  # fmt: skip
def test_a_genuine_certificate_with_another_name_is_nobody(site: Site, strange: x509.GeneralName | None) -> None:
    site.accept(
        {"san": SPIFFE, "tenant": "by-certificate"},
        {"subject": "app@example.com", "tenant": "by-certificate"},
        {"san": "nobody", "tenant": "by-certificate"},  # which is somebody's common name
    )
    with site.caller(site.clients.issue("nobody", *([strange] if strange else []))) as client:
        for answer in (client.post("/v1/chat/completions", json=chat()), client.get("/v1/models")):
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("who", ["no certificate", "another authority", "self-signed", "expired"])
def test_no_other_certificate_gets_past_the_handshake(site: Site, who: str, tmp_path: Path) -> None:
    site.accept({"san": SPIFFE, "tenant": "by-certificate"})
    uri = x509.UniformResourceIdentifier(SPIFFE)
    identities = {
        "no certificate": None,
        "another authority": site.servers.issue("app", uri),
        "self-signed": Authority(tmp_path, "clients").issue("app", uri),  # of the same name, with another key
        "expired": site.clients.issue("app", uri, valid=-DAY),
    }
    before = len(site.engine.requests)
    with pytest.raises(httpx.TransportError):
        site.ask(identities[who])
    with pytest.raises(httpx.TransportError), site.caller(identities[who]) as client:
        client.get("/health", headers={"authorization": f"Bearer {KEY}"})
    assert len(site.engine.requests) == before
    assert site.ask(site.clients.issue("app", uri)).status_code == 200


def test_a_key_counts_before_the_certificate_and_a_wrong_one_is_wrong_beside_it(site: Site) -> None:
    site.accept({"san": SPIFFE, "tenant": "by-certificate"})
    app = site.clients.issue("app", x509.UniformResourceIdentifier(SPIFFE))
    for good in ({"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}):
        assert site.tenant(site.ask(app, **good)) == ("by-key", "test")
    for wrong in (
        {"authorization": f"Bearer {KEY}x"}, {"x-api-key": "sk-wrong"}, {"authorization": f"Basic {KEY}"},
        {"authorization": ""}, {"x-api-key": ""}, {"authorization": "Bearer a.b.c"},
    ):  # fmt: skip
        answer = site.ask(app, **wrong)
        assert answer.status_code == 401, wrong
        with site.caller(app) as client:
            assert client.get("/v1/models", headers=wrong).status_code == 401


@pytest.mark.parametrize("where", ["cross-site", "same-site"])
def test_a_page_of_another_site_cannot_borrow_the_certificate_of_its_browser(site: Site, where: str) -> None:
    site.accept({"san": SPIFFE, "tenant": "by-certificate"})
    app = site.clients.issue("app", x509.UniformResourceIdentifier(SPIFFE))
    assert site.ask(app, **{"sec-fetch-site": where}).status_code == 401
    with site.caller(app) as client:
        assert client.get("/v1/models", headers={"sec-fetch-site": where}).status_code == 401
    assert site.tenant(site.ask(app, **{"sec-fetch-site": "none"})) == ("by-certificate", f"cert:{SPIFFE}")
    assert site.tenant(site.ask(app, authorization=f"Bearer {KEY}", **{"sec-fetch-site": where})) == ("by-key", "test")


def test_a_certificate_without_a_holder_needs_a_key(site: Site) -> None:
    site.accept()
    assert site.ask(site.someone).status_code == 401
    assert site.tenant(site.ask(site.someone, authorization=f"Bearer {KEY}")) == ("by-key", "test")


def test_role_and_models_are_the_entrys_within_the_tenants(site: Site) -> None:
    site.accept(
        {"san": "ops.example", "tenant": "by-certificate", "role": "admin", "models": ["m"]},
        {"san": "app.example", "tenant": "narrow"},
    )
    ops = site.clients.issue("ops", x509.DNSName("ops.example"))
    app = site.clients.issue("app", x509.DNSName("app.example"))
    with site.caller(ops) as client:
        assert client.get("/metrics").status_code == 200
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["m"]
    with site.caller(app) as client:
        assert client.get("/metrics").status_code == 403
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["other"]
    assert site.ask(app, "m").status_code == 404 and site.ask(app, "other").status_code == 200


def test_an_entry_that_is_taken_out_ends_with_the_next_request_on_the_same_connection(site: Site) -> None:
    site.accept({"san": SPIFFE, "tenant": "by-certificate"})
    with site.caller(site.clients.issue("app", x509.UniformResourceIdentifier(SPIFFE))) as client:
        assert client.post("/v1/chat/completions", json=chat()).status_code == 200
        site.accept()
        assert client.post("/v1/chat/completions", json=chat()).status_code == 401
        site.accept({"san": SPIFFE, "tenant": "of-the-database"})  # a tenant that does not exist yet
        assert client.post("/v1/chat/completions", json=chat()).status_code == 401
