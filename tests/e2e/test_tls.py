"""TLS of the gateway's port and towards engines: what is spoken, what is refused and how, and certificates that change
while answers run."""

from __future__ import annotations

import contextlib
import json
import re
import select
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509

from tests.doubles.authority import DAY, Authority, Identity
from tests.doubles.engine import Engine, Exchange
from tests.e2e.harness import PATIENCE, ROOT, Gateway, base_config, chat, digest, eventually, replica, together
from tests.servers.redis import Redis

KEY = "sk-tls" + "t" * 42
LOOPBACK = x509.IPAddress(ip_address("127.0.0.1"))
SUITES_OF_12 = {
    f"ECDHE-{signed}-{cipher}"
    for signed in ("ECDSA", "RSA")
    for cipher in ("AES128-GCM-SHA256", "AES256-GCM-SHA384", "CHACHA20-POLY1305")
}


class Site:
    """A gateway with TLS on its port, an engine behind it, and the authorities of both sides."""

    def __init__(self, folder: Path, redis: Redis | None = None, **server: Any) -> None:
        self.folder = folder
        self.state = {"database": None} | ({"redis": redis.url} if redis is not None else {})
        self.engine = Engine()
        self.clients, self.servers = Authority(folder, "clients"), Authority(folder, "servers")
        self.server = Identity(folder / "port.crt", folder / "port.key")
        self.install(self.issue())
        self.server_options = server  # of every configuration
        (folder / "gateway").mkdir()
        self.gateway = Gateway(
            folder / "gateway", self.config(), scheme="https", verify=self.context(), wait_for="/health"
        )

    def issue(self) -> Identity:
        return self.servers.issue("gateway", LOOPBACK)

    def install(self, identity: Identity) -> int:
        """Puts it where the gateway looks. Its serial number."""
        for source, target in zip(identity, self.server, strict=True):
            fresh = target.with_suffix(".new")
            shutil.copyfile(source, fresh)
            fresh.replace(target)
        return serial(identity)

    def config(self, models: Mapping[str, Any] | None = None, tls: Any = (), **server: Any) -> dict[str, Any]:
        files = {name: str(path) for name, path in self.server._asdict().items()}
        tenants = [{"name": "t", "keys": [{"name": "test", "sha256": digest(KEY)}]}]
        own = {"tls": files | dict(tls) if tls is not None else None} | self.server_options | server
        models = {"m": [replica(self.engine)]} if models is None else models
        return base_config(models, tenants, server=own, state=self.state)

    def context(self, identity: Identity | None = None, version: ssl.TLSVersion | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.servers.ca_file))
        if version is not None:
            context.set_ciphers("ALL:@SECLEVEL=0")
            context.minimum_version = context.maximum_version = version
        if identity is not None:
            context.load_cert_chain(*identity)
        return context

    @contextlib.contextmanager
    def connect(self, context: ssl.SSLContext | None = None) -> Iterator[ssl.SSLSocket]:
        with (
            socket.create_connection(("127.0.0.1", self.gateway.port), timeout=PATIENCE) as plain,
            (context or self.context()).wrap_socket(plain, server_hostname="127.0.0.1") as wrapped,
        ):
            yield wrapped

    def serial(self) -> int:
        """Of the certificate that a new connection sees."""
        with self.connect() as sock:
            shown = sock.getpeercert(binary_form=True)
        assert shown is not None
        return x509.load_der_x509_certificate(shown).serial_number

    def ask(self, model: str = "m") -> httpx.Response:
        url = f"https://127.0.0.1:{self.gateway.port}/v1/chat/completions"
        headers = {"authorization": f"Bearer {KEY}"}
        return httpx.post(
            url, json=chat(model), headers=headers, verify=self.context(), timeout=PATIENCE, trust_env=False
        )

    def refusal(self, context: ssl.SSLContext) -> str | None:
        """What the client is told, in the words of its own OpenSSL, when it connects and asks for something."""
        try:
            with self.connect(context) as sock:
                sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                assert b"200" in sock.recv(1 << 16)
        except ssl.SSLError as error:
            return error.reason
        return None

    def reloads(self, result: str) -> float:
        return self.gateway.metric("sekisho_config_reloads_total", result=result)

    def close(self) -> None:
        self.gateway.stop()
        self.engine.stop()


def serial(identity: Identity) -> int:
    return x509.load_pem_x509_certificate(identity.cert_file.read_bytes()).serial_number


def end(identity: Identity) -> float:
    """In Unix seconds."""
    return x509.load_pem_x509_certificate(identity.cert_file.read_bytes()).not_valid_after_utc.timestamp()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    yield from _closing(Site(tmp_path_factory.mktemp("tls")))


@pytest.fixture
def own_site(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    sites: list[Site] = []

    def make(**server: Any) -> Site:
        sites.append(Site(tmp_path, **server))
        return sites[-1]

    yield make
    for one in sites:
        yield from _closing(one, hand_out=False)


def _closing(site: Site, *, hand_out: bool = True) -> Iterator[Site]:
    if hand_out:
        yield site
    site.close()
    assert "Traceback" not in site.gateway.log(), site.gateway.log()[-5000:]


# --- what is spoken
@pytest.mark.parametrize("version", list(ssl.TLSVersion)[2:6], ids=str)
def test_only_tls_1_2_and_1_3_are_spoken_and_others_are_told(site: Site, version: ssl.TLSVersion) -> None:
    expected = "TLSV1_ALERT_PROTOCOL_VERSION" if version < ssl.TLSVersion.TLSv1_2 else None
    with pytest.warns(DeprecationWarning) if expected else contextlib.nullcontext():
        context = site.context(version=version)
    assert site.refusal(context) == expected


def test_of_1_2_only_forward_secret_suites_with_authenticated_encryption(site: Site) -> None:
    everything = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    everything.set_ciphers("ALL:COMPLEMENTOFALL:@SECLEVEL=0")
    offered = {suite["name"] for suite in everything.get_ciphers() if suite["protocol"] != "TLSv1.3"}
    assert offered > SUITES_OF_12 and len(offered) > 30

    def accepted(name: str) -> bool:
        context = site.context(version=ssl.TLSVersion.TLSv1_2)
        context.set_ciphers(f"{name}:@SECLEVEL=0")
        return site.refusal(context) is None

    assert {name for name in offered if accepted(name)} == {name for name in SUITES_OF_12 if "ECDSA" in name}


def test_protocol_of_the_application_is_http_1_1(site: Site) -> None:
    for offer, choice in ((["h2", "http/1.1"], "http/1.1"), (["h2"], None), ([], None)):
        context = site.context()
        if offer:
            context.set_alpn_protocols(offer)
        with site.connect(context) as sock:
            assert sock.selected_alpn_protocol() == choice and sock.compression() is None


def test_no_session_outlives_its_connection(site: Site) -> None:
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        context = site.context(version=version)
        with site.connect(context) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert sock.recv(1 << 16)
            assert sock.session is None or not sock.session.has_ticket


def test_openssl_sees_the_whole_chain_and_cannot_renegotiate(site: Site) -> None:
    command = shutil.which("openssl")
    if command is None:
        pytest.skip("no openssl command")
    asked = subprocess.run(
        [command, "s_client", "-connect", f"127.0.0.1:{site.gateway.port}", "-CAfile", str(site.servers.ca_file),
         "-verify_return_error", "-tls1_2", "-alpn", "h2,http/1.1"],
        input=b"R\n", capture_output=True, timeout=PATIENCE,
    )  # fmt: skip
    said = (asked.stdout + asked.stderr).decode()
    for line in (
        "Verification: OK",
        "ALPN protocol: http/1.1",
        "Compression: NONE",
        "Secure Renegotiation IS supported",
        "no renegotiation",
    ):
        assert line in said, said


@pytest.mark.parametrize("narrowed", [False, True], ids=["as it comes", "with config/openssl.cnf"])
def test_sslyze_finds_nothing_but_an_authority_it_does_not_know(
    narrowed: bool, own_site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command = shutil.which("sslyze")
    if command is None:
        pytest.skip("sslyze is not on the PATH; it needs an environment of its own, for it wants an older cryptography")
    if narrowed:
        monkeypatch.setenv("OPENSSL_CONF", str(ROOT / "config" / "openssl.cnf"))
    site = own_site()
    found = tmp_path / "sslyze.json"
    port = f"127.0.0.1:{site.gateway.port}"
    scan = subprocess.run(
        [command, "--mozilla_config=intermediate", f"--json_out={found}", port],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    verdict = scan.stdout.partition("COMPLIANCE AGAINST TLS CONFIGURATION")[2]
    issues = {line.strip(" *").partition(":")[0]: line for line in verdict.splitlines() if line.strip().startswith("*")}
    # Without the file OpenSSL's own list of groups holds two more than Mozilla's, neither of them weaker.
    assert set(issues) - {"tls_curves"} == {"certificate_path_validation"}, scan.stdout
    curves = set(re.findall(r"'(\w+)'", issues.get("tls_curves", "")))
    assert curves == (set() if narrowed else {"X448", "secp521r1"}), scan.stdout
    results = json.loads(found.read_text())["server_scan_results"][0]["scan_result"]
    assert results["heartbleed"]["result"] == {"is_vulnerable_to_heartbleed": False}
    assert results["openssl_ccs_injection"]["result"] == {"is_vulnerable_to_ccs_injection": False}
    assert results["robot"]["result"] == {"robot_result": "NOT_VULNERABLE_RSA_NOT_SUPPORTED"}
    assert results["tls_compression"]["result"] == {"supports_compression": False}
    assert results["tls_fallback_scsv"]["result"] == {"supports_fallback_scsv": True}
    renegotiation = results["session_renegotiation"]["result"]
    assert renegotiation["supports_secure_renegotiation"]
    assert not renegotiation["is_vulnerable_to_client_renegotiation_dos"]


# --- what comes in wrong
def test_plain_http_is_told_to_use_https(site: Site) -> None:
    answer = httpx.post(f"http://127.0.0.1:{site.gateway.port}/v1/chat/completions", json=chat(), trust_env=False)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "https_required")
    assert answer.headers["x-request-id"] and "https://" in answer.json()["error"]["message"]
    assert site.ask().status_code == 200


@pytest.mark.parametrize(
    "sent", [b"", b"\x00" * 500, b"SSH-2.0-OpenSSH_9.6\r\n", b"\x16\x03\x01\x40\x00" + b"\xff" * 600]
)
def test_what_is_no_handshake_ends_the_connection(site: Site, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", site.gateway.port), timeout=PATIENCE) as sock:
        sock.sendall(sent)
        sock.shutdown(socket.SHUT_WR)
        rest = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    assert len(rest) < 100  # an alert at most
    assert site.ask().status_code == 200


def test_an_answer_to_a_body_that_is_too_large_arrives(own_site: Callable[..., Site]) -> None:
    site = own_site(max_body="64KiB")
    big = b" " * (8 << 20)
    for _ in range(5):
        with site.connect() as sock:
            head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
            head += b"authorization: Bearer %b\r\ncontent-length: %d\r\n\r\n"
            with contextlib.suppress(OSError):
                sock.sendall(head % (KEY.encode(), len(big)) + big)
            assert sock.recv(12) == b"HTTP/1.1 413"


# --- how many, and for how long
def idle(site: Site, count: int) -> list[socket.socket]:
    """Connections that never begin their handshake."""
    return [socket.create_connection(("127.0.0.1", site.gateway.port), timeout=PATIENCE) for _ in range(count)]


def ended(sock: socket.socket) -> bool:
    readable, _, _ = select.select([sock], [], [], 0)
    try:
        return bool(readable) and sock.recv(1) == b""
    except OSError:
        return True


def test_a_handshake_that_gets_stuck_is_ended(own_site: Callable[..., Site]) -> None:
    site = own_site(header_timeout="1s")
    (silent,) = idle(site, 1)
    with silent:
        assert silent.recv(1) == b""
    with socket.create_connection(("127.0.0.1", site.gateway.port), timeout=PATIENCE) as halfway:
        halfway.sendall(b"\x16\x03\x01\x02\x00\x01")
        assert halfway.recv(1) == b""


def test_handshakes_count_as_connections(own_site: Callable[..., Site]) -> None:
    site = own_site(max_connections=4)
    site.gateway.http.close()  # its kept connection is one of the four
    assert eventually(lambda: site.ask().status_code == 200)
    waiting = idle(site, 4)
    try:
        assert eventually(lambda: site.ask().status_code == 503)
        answer = site.ask()
        assert answer.json()["error"]["code"] == "too_many_connections" and answer.headers["retry-after"]
        waiting += idle(site, 80)  # beyond some that are taken to be told, they are closed at once
        assert eventually(lambda: sum(map(ended, waiting)) >= 10)
    finally:
        for sock in waiting:
            sock.close()
    assert eventually(lambda: site.ask().status_code == 200)


# --- client certificates
ALERTS = {
    "none": "TLSV13_ALERT_CERTIFICATE_REQUIRED",
    "another authority's": "TLSV1_ALERT_UNKNOWN_CA",
    "expired": "SSLV3_ALERT_CERTIFICATE_EXPIRED",
    "good": None,
}


@pytest.mark.parametrize("demand", ["required", "optional"])
def test_client_certificates_are_demanded_or_welcome(own_site: Callable[..., Site], demand: str) -> None:
    site = own_site()
    site.gateway.configure(
        site.config(tls={"client_ca_file": str(site.clients.ca_file), "client_certificates": demand})
    )
    shown: dict[str, Identity | None] = {
        "none": None,
        "another authority's": site.servers.issue("app"),
        "expired": site.clients.issue("app", valid=-DAY),
        "good": site.clients.issue("app"),
    }
    told = {name: site.refusal(site.context(identity)) for name, identity in shown.items()}
    assert told == ALERTS | ({"none": None} if demand == "optional" else {})


# --- files that change
def drip(go_on: threading.Event) -> Callable[[Exchange], None]:
    def script(x: Exchange) -> None:
        x.begin()
        x.role()
        for _ in range(400):
            x.delta("word ")
            if go_on.is_set():
                break
            x.pause(0.05)
        x.delta("end", "stop")
        x.done()

    return script


def test_streams_run_on_while_the_certificate_is_replaced(own_site: Callable[..., Site]) -> None:
    site = own_site()
    enough = threading.Event()
    site.engine.script = drip(enough)
    refused: list[Exception] = []

    def stream() -> str:
        url = f"https://127.0.0.1:{site.gateway.port}/v1/chat/completions"
        with httpx.Client(verify=site.context(), trust_env=False, timeout=PATIENCE) as client:
            headers = {"authorization": f"Bearer {KEY}"}
            with client.stream("POST", url, json=chat(stream=True), headers=headers) as answer:
                return answer.read().decode()

    def knock() -> None:
        """New connections all the time: none may be refused."""
        while not enough.is_set():
            try:
                site.serial()
            except OSError as error:
                refused.append(error)

    def replace() -> None:
        assert eventually(lambda: site.engine.running == 50)
        try:
            for turn in range(5):
                wanted = site.install(site.issue())
                if turn % 2:
                    site.gateway.process.send_signal(signal.SIGHUP)
                assert eventually(lambda wanted=wanted: site.serial() == wanted)  # type: ignore[misc]
            assert site.engine.running == 50
        finally:
            enough.set()

    *answers, _, _ = together([stream] * 50 + [lambda: str(knock()), lambda: str(replace())])
    assert all("end" in answer and answer.endswith("data: [DONE]\n\n") for answer in answers)
    assert not refused


BREAKAGES: dict[str, Callable[[Identity, Site], None]] = {
    "no key in it": lambda files, _: files.key_file.write_text("-----BEGIN PRIVATE KEY-----\nnonsense\n"),
    "another certificate's key": lambda files, site: files.key_file.write_bytes(site.issue().key_file.read_bytes()),
    "half a certificate": lambda files, _: files.cert_file.write_bytes(files.cert_file.read_bytes()[:200]),
    "no file": lambda files, _: files.key_file.unlink(),
}


@pytest.mark.parametrize("kind", BREAKAGES)
def test_a_broken_pair_changes_nothing_and_is_counted(own_site: Callable[..., Site], kind: str) -> None:
    site = own_site()
    before = site.serial()
    BREAKAGES[kind](site.server, site)
    assert eventually(lambda: site.reloads("failure") == 1)
    assert "the changed certificates were not loaded, the old ones stay: " in site.gateway.log()
    assert "server.tls." in site.gateway.log()
    assert site.serial() == before and site.ask().status_code == 200
    reload = site.gateway.reload()
    assert reload.status_code == 400 and site.reloads("failure") == 2, reload.text
    wanted = site.install(site.issue())
    assert eventually(lambda: site.serial() == wanted)
    assert site.reloads("success") == 1


def test_a_reload_changes_what_new_connections_have_to_be(own_site: Callable[..., Site]) -> None:
    site = own_site()
    old = site.context(version=ssl.TLSVersion.TLSv1_2)
    with site.connect(old) as kept:
        site.gateway.configure(site.config(tls={"min_version": "1.3"}))
        assert site.refusal(old) == "TLSV1_ALERT_PROTOCOL_VERSION"
        kept.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200" in kept.recv(1 << 16)
    other = site.issue()
    named = {name: str(path) for name, path in other._asdict().items()}
    site.gateway.configure(site.config(tls=named))
    assert site.serial() == serial(other) and site.refusal(old) is None
    first, second = site.clients, Authority(site.folder, "later clients")
    ca_file = site.folder / "ca.pem"
    ca_file.write_bytes(first.ca_file.read_bytes())
    site.gateway.configure(site.config(tls={"client_ca_file": str(ca_file)}))
    apps = [site.context(authority.issue("app")) for authority in (first, second)]
    assert [site.refusal(app) for app in apps] == [None, "TLSV1_ALERT_UNKNOWN_CA"]
    ca_file.write_bytes(second.ca_file.read_bytes())
    assert eventually(lambda: site.refusal(apps[1]) is None)
    assert site.refusal(apps[0]) == "TLSV1_ALERT_UNKNOWN_CA"


def test_every_worker_takes_a_renewed_pair_and_none_a_broken_one(own_site: Callable[..., Site], tmp_path: Path) -> None:
    def serials() -> set[int]:
        return {site.serial() for _ in range(40)}  # the kernel deals them out by chance

    with Redis(tmp_path / "redis") as redis:
        site = own_site(redis=redis, workers=2)
        assert eventually(lambda: site.gateway.metric("sekisho_workers") == 2)
        for _ in range(2):
            wanted = site.install(site.issue())
            assert eventually(lambda wanted=wanted: serials() == {wanted})  # type: ignore[misc]
        assert (site.reloads("success"), site.reloads("failure")) == (2, 0)
        site.server.key_file.write_text("broken")
        assert eventually(lambda: site.reloads("failure") == 1)
        assert serials() == {wanted} and site.ask().status_code == 200
        assert site.gateway.metric("sekisho_workers") == 2


@pytest.mark.parametrize("workers", [1, 2])
def test_the_end_of_the_certificate_in_force_is_told(
    own_site: Callable[..., Site], tmp_path: Path, workers: int
) -> None:
    def told() -> float:
        return site.gateway.metric("sekisho_certificate_expiry_timestamp_seconds")

    with Redis(tmp_path / "redis") as redis:
        site = own_site(redis=redis, workers=workers)
        assert eventually(lambda: workers == 1 or site.gateway.metric("sekisho_workers") == workers)
        assert told() == end(site.server)
        for days in (90, 30):  # a later end, and an earlier one: not the first, not the last that there was
            renewed = site.servers.issue("gateway", LOOPBACK, valid=days * DAY)
            site.install(renewed)
            assert eventually(lambda renewed=renewed: told() == end(renewed))  # type: ignore[misc]
        site.server.key_file.write_text("broken")
        assert eventually(lambda: site.reloads("failure") == 1)
        assert told() == end(renewed)


def test_tls_is_not_switched_off_without_a_restart(own_site: Callable[..., Site]) -> None:
    site = own_site()
    before = site.serial()
    site.gateway.configure(site.config(tls=None))
    assert "server.tls is switched on or off only with a restart" in site.gateway.log()
    assert site.serial() == before


# --- engines
class Shown:
    """TLS of an engine double."""

    def __init__(self, identity: Identity, change: Callable[[ssl.SSLContext], None] = lambda _: None) -> None:
        self._identity, self._change = identity, change

    def server_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self._identity)
        self._change(context)
        return context


def _only_1_1(context: ssl.SSLContext) -> None:
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning):
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1


@contextlib.contextmanager
def plain_server() -> Iterator[int]:
    """Its port: whatever comes is answered like a request that is not understood."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                with sock, contextlib.suppress(OSError):
                    sock.recv(1 << 16)
                    sock.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE)


@contextlib.contextmanager
def speaker(shown: Shown | None) -> Iterator[int]:
    """The port of an engine that shows this, or that speaks no TLS."""
    if shown is None:
        with plain_server() as port:
            yield port
    else:
        with Engine(tls=shown) as engine:  # type: ignore[arg-type]
            yield engine.port


ENGINES: dict[str, tuple[Callable[[Site, Path], Shown | None], str]] = {
    "good": (lambda site, _: Shown(site.issue()), ""),
    "another host's": (lambda site, _: Shown(site.servers.issue("e", x509.DNSName("e.example"))), "for another"),
    "expired": (lambda site, _: Shown(site.servers.issue("e", LOOPBACK, valid=-DAY)), "has expired"),
    "unknown authority": (
        lambda _, folder: Shown(Authority(folder, "x").issue("e", LOOPBACK)),
        "not from an authority",
    ),
    "only 1.1": (lambda site, _: Shown(site.issue(), _only_1_1), "no TLS that is new enough"),
    "no TLS": (lambda *_: None, "does not speak TLS"),
}


@pytest.mark.parametrize("kind", ENGINES)
def test_an_engine_is_taken_at_its_certificate_and_the_error_says_what_is_wrong(
    site: Site, kind: str, tmp_path: Path
) -> None:
    make, words = ENGINES[kind]
    with speaker(make(site, tmp_path)) as port:
        place = replica(f"https://127.0.0.1:{port}", ca_file=str(site.servers.ca_file))
        site.gateway.configure(site.config({"m": [place]}))
        assert eventually(lambda: site.gateway.replicas()[0]["health"] in ("up", "down"))
        (entry,) = site.gateway.replicas()
        answer = site.ask()
    assert "127.0.0.1" not in answer.text and str(port) not in answer.text
    if not words:
        assert (entry["health"], answer.status_code) == ("up", 200)
    else:
        assert entry["health"] == "down" and words in entry["detail"], entry
        assert answer.status_code == 503, answer.text


def _demanding(site: Site, identity: Identity) -> Shown:
    def demand(context: ssl.SSLContext) -> None:
        context.load_verify_locations(str(site.clients.ca_file))
        context.verify_mode = ssl.CERT_REQUIRED

    return Shown(identity, demand)


def test_an_engine_that_wants_a_certificate_gets_the_one_that_is_in_the_file_now(site: Site, tmp_path: Path) -> None:
    own = Identity(tmp_path / "own.crt", tmp_path / "own.key")

    def install(identity: Identity) -> None:
        for source, target in zip(identity, own, strict=True):
            shutil.copyfile(source, target)

    with Engine(tls=_demanding(site, site.issue())) as engine:  # type: ignore[arg-type]
        engine.closing_idle = True  # every request comes on a connection of its own
        named = {"client_cert_file": str(own.cert_file), "client_key_file": str(own.key_file)}
        place = replica(f"https://127.0.0.1:{engine.port}", ca_file=str(site.servers.ca_file), **named)
        install(site.servers.issue("gateway"))
        site.gateway.configure(site.config({"m": [place]}))
        words = "did not accept the gateway's client certificate"
        assert eventually(lambda: words in (site.gateway.replicas()[0]["detail"] or "")), site.gateway.replicas()
        install(site.clients.issue("gateway"))
        assert eventually(lambda: site.ask().status_code == 200)
        assert eventually(lambda: site.gateway.replicas()[0]["health"] == "up")
        own.key_file.write_text("broken")
        failures = site.reloads("failure")
        assert eventually(lambda: site.reloads("failure") > failures)
        assert all(site.ask().status_code == 200 for _ in range(3))
        assert site.gateway.log().count("a changed file for TLS to engines cannot be used, the old one stays") <= 3


def test_an_authority_that_is_replaced_counts_for_new_connections(site: Site, tmp_path: Path) -> None:
    ca_file = tmp_path / "ca.pem"
    ca_file.write_bytes(site.clients.ca_file.read_bytes())
    with Engine(tls=Shown(site.issue())) as engine:  # type: ignore[arg-type]
        site.gateway.configure(site.config({"m": [replica(engine, ca_file=str(ca_file))]}))
        assert eventually(lambda: site.gateway.replicas()[0]["health"] == "down")
        assert site.ask().status_code == 503
        ca_file.write_bytes(site.servers.ca_file.read_bytes())
        assert eventually(lambda: site.gateway.replicas()[0]["health"] == "up")
        assert site.ask().status_code == 200


# --- the start
@pytest.mark.parametrize("kind", BREAKAGES)
def test_serve_and_check_say_which_file_is_wrong(site: Site, kind: str, tmp_path: Path) -> None:
    pair = Identity(tmp_path / "port.crt", tmp_path / "port.key")
    for source, target in zip(site.issue(), pair, strict=True):
        shutil.copyfile(source, target)
    BREAKAGES[kind](pair, site)
    named = {name: str(path) for name, path in pair._asdict().items()}
    (tmp_path / "gateway.yaml").write_text(json.dumps(site.config(tls=named)))
    for command in ("check", "serve"):
        ran = subprocess.run(
            [sys.executable, "-m", "gateway", command, "--config",
             str(tmp_path / "gateway.yaml")],
            cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE,
        )  # fmt: skip
        assert ran.returncode == 2, ran
        wrong = "cert_file" if "half" in kind else "key_file"
        assert ran.stderr.count("\n") == 1 and f"server.tls.{wrong}: " in ran.stderr, ran.stderr
