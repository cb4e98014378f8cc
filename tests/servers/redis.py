"""Real Redis servers on ports and folders of their own: one, a cluster of three, and one with TLS and an ACL user."""

from __future__ import annotations

import datetime
import ipaddress
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.e2e.harness import free_port

PATIENCE = 20.0  # seconds
# What the gateway's user needs and nothing else: docs/adr/0008-shared-limits.md shows the same line.
ACL_USER = (
    "ACL", "SETUSER", "gateway", "on", ">s3cret", "~sekisho:*", "&sekisho:*", "+@connection", "+info", "+evalsha",
    "+eval", "+time", "+hget", "+hset", "+hmget", "+hdel", "+hgetall", "+hincrby", "+pexpire", "+zadd", "+zrem",
    "+zcard", "+zremrangebyscore", "+publish", "+subscribe", "+unsubscribe",
)  # fmt: skip
T = TypeVar("T")


class Redis:
    """A server that nobody else uses. It keeps nothing over a restart unless `keeps` is set."""

    def __init__(self, folder: Path, *options: str, keeps: bool = False, tls: bool = False) -> None:
        self.folder, self.port = folder, free_port()
        folder.mkdir(parents=True, exist_ok=True)
        self.tls = tls
        self._process: subprocess.Popen[bytes] | None = None
        ports = ("--port", "0", "--tls-port", str(self.port)) if tls else ("--port", str(self.port))
        self._command = [
            "redis-server", *ports, "--bind", "127.0.0.1", "--dir", str(folder), "--daemonize", "no",
            "--unixsocket", str(self.socket), "--save", "", "--appendonly", "yes" if keeps else "no",
            "--appendfsync", "always", *options,
        ]  # fmt: skip
        if tls:
            write_certificate(folder)
            self._command += ["--tls-cert-file", str(folder / "server.pem"), "--tls-key-file", str(folder / "key.pem")]
            self._command += ["--tls-ca-cert-file", str(folder / "server.pem"), "--tls-auth-clients", "no"]
        self.start()

    def __enter__(self) -> Redis:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def socket(self) -> Path:
        return self.folder / "redis.sock"

    @property
    def url(self) -> str:
        if self.tls:
            return f"rediss://gateway:s3cret@127.0.0.1:{self.port}/0?ssl_ca_certs={self.folder / 'server.pem'}"
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def start(self) -> None:
        with (self.folder / "log").open("ab") as out:
            self._process = subprocess.Popen(self._command, stdout=out, stderr=out)
        if not _eventually(self._answers):
            self.stop()
            raise RuntimeError(f"redis-server did not start:\n{(self.folder / 'log').read_text()}")

    def stop(self) -> None:
        """Ends it at once: connections break, new ones are refused."""
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        self.stop()
        self.start()

    def pause(self) -> None:
        """Connections stay open and new ones are taken by the kernel, but nothing is answered."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        if self._process is not None:
            self.resume()
            self.stop()

    def ask(self, *command: str | int) -> Any:
        """The answer to one command, through the server's own socket and as its administrator."""
        with redis.Redis(unix_socket_path=str(self.socket), decode_responses=True) as client:
            return client.execute_command(*command)

    def commands(self) -> int:
        """How many scripts it has run since it started."""
        with redis.Redis(unix_socket_path=str(self.socket), decode_responses=True) as client:
            stats: Any = client.info("commandstats")
        return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("evalsha", "eval"))

    def _answers(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"redis-server ended:\n{(self.folder / 'log').read_text()}")
        try:
            return bool(self.ask("PING"))
        except (redis.ConnectionError, OSError):
            return False


class Cluster:
    """Three masters that share the slots."""

    def __init__(self, folder: Path) -> None:
        buses = [free_port() for _ in range(3)]
        self.nodes = [
            Redis(
                folder / str(number), "--cluster-enabled", "yes", "--cluster-node-timeout", "2000",
                "--cluster-port", str(bus),
            )
            for number, bus in enumerate(buses)
        ]  # fmt: skip
        for number, node in enumerate(self.nodes):
            node.ask("CLUSTER", "ADDSLOTSRANGE", number * 16384 // 3, (number + 1) * 16384 // 3 - 1)
            self.nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", node.port, buses[number])
        if not _eventually(lambda: all(self._is_whole(node) for node in self.nodes)):
            self.close()
            raise RuntimeError("the cluster did not come together")

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    @property
    def url(self) -> str:
        return self.nodes[0].url

    def ask(self, *command: str | int) -> Any:
        """The answer of the node that has the key; to KEYS that of all of them."""
        if command[0] == "KEYS":
            return [key for node in self.nodes for key in node.ask(*command)]
        for node in self.nodes:
            try:
                return node.ask(*command)
            except redis.exceptions.MovedError:
                continue
        raise RuntimeError("no node has this key")

    def move(self, key: str) -> None:
        """Gives the slot of a key, and all that is in it, to another node."""
        slot = self.nodes[0].ask("CLUSTER", "KEYSLOT", key)
        old = self.nodes[int(slot) * 3 // 16384]
        new = self.nodes[self.nodes.index(old) - 1]
        names = {node.port: node.ask("CLUSTER", "MYID") for node in (old, new)}
        new.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", names[old.port])
        old.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", names[new.port])
        for present in old.ask("CLUSTER", "GETKEYSINSLOT", slot, 100):
            old.ask("MIGRATE", "127.0.0.1", new.port, present, 0, 5000)
        for node in (new, old, *self.nodes):
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", names[new.port])

    @staticmethod
    def _is_whole(node: Redis) -> bool:
        lines = str(node.ask("CLUSTER", "INFO")).split()
        return {"cluster_state:ok", "cluster_slots_ok:16384", "cluster_known_nodes:3"} <= set(lines)


def write_certificate(folder: Path) -> None:
    """A self-signed certificate for 127.0.0.1."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "redis")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    (folder / "server.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))  # fmt: skip


def _eventually(check: Callable[[], T]) -> T:
    deadline = time.monotonic() + PATIENCE
    while not (value := check()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return value
