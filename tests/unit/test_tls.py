"""What TLS is made of: files that are wrong in their own ways, changes in two steps, and whose fault a failure is."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
import weakref
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import uvloop
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from backends.base import Operation
from gateway.config import TlsConfig
from gateway.edge.handshake import TlsConnection, TlsPort
from gateway.engine_client import EngineClient
from gateway.errors import UpstreamError, UpstreamUnreachable
from gateway.outcome import Outcome
from gateway.tls import EngineTls, ServerTls, TlsFileError, Watch, blame, port_problem, server_context
from gateway.types import Endpoint, Timeouts
from gateway.upstream import Upstream
from tests.doubles.authority import DAY, Authority, Identity
from tests.doubles.engine import Engine
from tests.e2e.test_tls import ENGINES, LOOPBACK, Shown, Site, _demanding, speaker

T = TypeVar("T")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "authority")


def given(files: Identity, **more: object) -> TlsConfig:
    return TlsConfig.model_validate(files._asdict() | more)


def copy(source: Identity, target: Identity) -> None:
    for one, other in zip(source, target, strict=True):
        other.write_bytes(one.read_bytes())


# --- files
def encrypted(files: Identity) -> None:
    key = serialization.load_pem_private_key(files.key_file.read_bytes(), None)
    secret = serialization.BestAvailableEncryption(b"secret")
    form = serialization.PrivateFormat.PKCS8
    files.key_file.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, secret))


def another(files: Identity) -> None:
    key = rsa.generate_private_key(65537, 2048)
    form = serialization.PrivateFormat.PKCS8
    plain = serialization.NoEncryption()
    files.key_file.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))


WRONG: dict[str, tuple[Callable[[Identity], object], str, str]] = {
    "encrypted": (encrypted, "key_file", "is encrypted; write a copy without its password"),
    "another key": (another, "key_file", "is not the key of"),
    "no key": (lambda files: files.key_file.write_text("hello"), "key_file", "holds no usable private key"),
    "no key file": (lambda files: files.key_file.unlink(), "key_file", "cannot be read (No such file or directory)"),
    "no certificate": (lambda files: files.cert_file.write_text("x"), "cert_file", "holds no usable certificate"),
    "a folder": (lambda files: (files.cert_file.unlink(), files.cert_file.mkdir()), "cert_file", "cannot be read"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_file_is_named_and_why(authority: Authority, kind: str) -> None:
    break_it, field, words = WRONG[kind]
    files = authority.issue("port", LOOPBACK)
    assert port_problem(given(files)) is None
    config = given(files)
    break_it(files)
    with pytest.raises(TlsFileError) as raised:
        server_context(config)
    assert raised.value.field == field and words in str(raised.value)
    problem = port_problem(config)
    assert problem is not None and problem[0] == f"server.tls.{field}"


def test_a_client_authority_that_is_none(authority: Authority, tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    with pytest.raises(TlsFileError, match=r"^client_ca_file: .*holds no usable certificate"):
        server_context(given(authority.issue("port"), client_ca_file=empty))


@pytest.mark.parametrize(
    ("more", "mode"),
    [({}, ssl.CERT_NONE), ({"client_certificates": "optional"}, ssl.CERT_NONE)],
)
def test_without_an_authority_nobody_is_asked(authority: Authority, more: dict[str, str], mode: ssl.VerifyMode) -> None:
    assert server_context(given(authority.issue("port"), **more)).verify_mode is mode


def test_expiry_is_said_when_a_certificate_is_taken(authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    said = {}
    for days in (-1, 3, 100):
        caplog.clear()
        ServerTls(given(authority.issue("port", valid=days * DAY)))
        said[days] = caplog.text
    assert "has expired" in said[-1] and "expires on" in said[3] and not said[100]


def test_refresh_takes_a_new_pair_and_keeps_the_old_one_when_it_is_broken(authority: Authority, tmp_path: Path) -> None:
    files = Identity(tmp_path / "port.crt", tmp_path / "port.key")
    copy(authority.issue("port"), files)
    tls = ServerTls(given(files))
    first = tls.context
    assert not tls.refresh() and tls.context is first
    files.key_file.write_text("broken")
    for _ in range(2):
        with pytest.raises(TlsFileError):
            tls.refresh()
        assert tls.context is first
    copy(authority.issue("port"), files)
    assert tls.refresh() and tls.context is not first
    second = tls.context
    assert tls.refresh(given(files, min_version="1.3")) and tls.context is not second
    assert not tls.refresh()


def test_a_change_is_told_once_and_only_after_it_has_come_to_rest(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("1")
    watch = Watch([one, two])
    assert not watch.changed([one, two])
    one.write_text("12")
    assert not watch.changed([one, two])
    two.write_text("2")  # the second file comes a look later
    assert not watch.changed([one, two])
    assert [watch.changed([one, two]) for _ in range(3)] == [True, False, False]
    one.unlink()
    one.symlink_to(two)
    assert [watch.changed([one, two]) for _ in range(3)] == [False, True, False]
    two.write_text("other paths are nothing new")
    assert [watch.changed([two]) for _ in range(3)] == [False, False, False]


# --- connections
class Quiet(asyncio.Protocol):
    """In place of HTTP."""

    def __init__(self, admitted: bool) -> None:
        self._admitted, self.transport, self.places = admitted, None, 0

    def admit(self, peer: str | None) -> bool:
        self.places += self._admitted
        return self._admitted

    def leave(self) -> None:
        self.places = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport


@pytest.mark.parametrize("ending", ["good", "failed", "broken off", "turned away"])
def test_a_connection_leaves_nothing_behind_for_the_cycle_collector(authority: Authority, ending: str) -> None:
    config = given(authority.issue("port", LOOPBACK))
    made: list[weakref.ref[object]] = []

    def http() -> Quiet:
        made.append(weakref.ref(quiet := Quiet(ending != "turned away")))
        return quiet

    others = set(range(1000)) if ending == "turned away" else set()
    settings = SimpleNamespace(header_timeout=5.0)
    edge: Any = SimpleNamespace(settings=settings, handshakes=others, date=b"", protocol=http)

    def knock(port: int) -> None:
        trusted = str(authority.ca_file) if ending == "good" else None
        with socket.create_connection(("127.0.0.1", port), timeout=5) as sock, contextlib.suppress(OSError):
            if ending == "broken off":
                sock.sendall(b"\x16\x03\x01")
            else:
                ssl.create_default_context(cafile=trusted).wrap_socket(sock, server_hostname="127.0.0.1").close()

    async def serve() -> None:
        port = TlsPort(edge, config)

        def accept() -> TlsConnection:
            connection = port.protocol()
            made.append(weakref.ref(connection))
            return connection

        loop = asyncio.get_running_loop()
        server = await loop.create_server(accept, "127.0.0.1", 0)
        for _ in range(3):
            await loop.run_in_executor(None, knock, server.sockets[0].getsockname()[1])
        for _ in range(200):
            if not any(one() for one in made):
                break
            await asyncio.sleep(0.02)
        server.close()

    gc.collect()
    gc.disable()
    try:
        run(serve())
        assert len(made) == 6 and not any(one() for one in made)
        assert len(edge.handshakes) == len(others)
    finally:
        gc.enable()


# --- engines
def test_contexts_are_shared_until_a_file_changes(authority: Authority, tmp_path: Path) -> None:
    files = Identity(tmp_path / "own.crt", tmp_path / "own.key")
    copy(authority.issue("own"), files)
    names = str(authority.ca_file), str(files.cert_file), str(files.key_file)
    tls = EngineTls()
    first = tls.context(Endpoint("a", 1, True, None, *names))
    assert tls.context(Endpoint("b", 2, True, None, *names)) is first
    assert tls.context(Endpoint("a", 1, True, None, names[0])) is not first
    files.key_file.write_text("broken")
    assert tls.context(Endpoint("a", 1, True, None, *names)) is first
    copy(authority.issue("own"), files)
    assert tls.context(Endpoint("a", 1, True, None, *names)) is not first
    with pytest.raises(TlsFileError, match="ca_file"):
        tls.context(Endpoint("a", 1, True, None, str(files.key_file)))


def run(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


class Sides:
    """As much of a `Site` as `ENGINES` needs."""

    def __init__(self, folder: Path) -> None:
        self.clients, self.servers = Authority(folder, "clients"), Authority(folder, "servers")

    issue = Site.issue


async def ask(endpoint: Endpoint) -> None:
    """Raises: UpstreamError."""
    upstream = Upstream(1 << 20)
    try:
        request = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
        outcome = Outcome(Operation.CHAT, "req_1", 0.0)
        reply = await upstream.open(endpoint, Timeouts(5.0, 5.0, 5.0, None), request, outcome)
        reply.close()
    finally:
        upstream.close()


async def probe(endpoint: Endpoint) -> str | None:
    client = EngineClient()
    try:
        await client.get(endpoint, "/health", None)
    except Exception as error:
        return blame(error)
    finally:
        await client.forget(set())
    return None


@pytest.mark.parametrize("kind", ENGINES)
def test_requests_and_probes_blame_the_same_side(kind: str, tmp_path: Path) -> None:
    sides = Sides(tmp_path)
    make, words = ENGINES[kind]
    with speaker(make(sides, tmp_path)) as port:  # type: ignore[arg-type]
        endpoint = Endpoint("127.0.0.1", port, True, None, str(sides.servers.ca_file))
        if not words:
            run(ask(endpoint))
            assert run(probe(endpoint)) is None
            return
        with pytest.raises(UpstreamUnreachable, match=words) as raised:
            run(ask(endpoint))
        assert "127.0.0.1" not in raised.value.message and str(port) not in raised.value.message
        assert words in (run(probe(endpoint)) or "")


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=str)
def test_an_engine_that_refuses_the_gateways_certificate_is_told_apart(newest: ssl.TLSVersion, tmp_path: Path) -> None:
    sides = Sides(tmp_path)

    class Demanding(Shown):
        def server_context(self) -> ssl.SSLContext:
            context = _demanding(sides, sides.issue()).server_context()  # type: ignore[arg-type]
            context.maximum_version = newest
            return context

    with Engine(tls=Demanding(sides.issue())) as engine:  # type: ignore[arg-type]
        for own in (None, sides.servers.issue("gateway")):
            names = (str(own.cert_file), str(own.key_file)) if own else (None, None)
            endpoint = Endpoint("127.0.0.1", engine.port, True, None, str(sides.servers.ca_file), *names)
            with pytest.raises(UpstreamError, match="client certificate"):
                run(ask(endpoint))
