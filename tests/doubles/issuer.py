"""An identity provider on a real socket: publishes a key set, signs tokens, and misbehaves as a test says.

    issuer = Issuer()
    token = issuer.token(tenant="t1")                   # every claim can be replaced, None takes it out
    issuer.rotate("ES256")                              # from now on another key signs; the old ones stay published
    issuer.fault = "status"                             # see `_FAULTS`

Forged tokens are put together with `compact`, which signs whatever it is given or nothing.
"""

from __future__ import annotations

import base64
import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jose import jwk

AUDIENCE = "sekisho"
HOLD = 30.0  # seconds after which a slow answer goes on, so that no thread outlives its test
_CURVES: dict[str, ec.EllipticCurve] = {"ES256": ec.SECP256R1(), "ES384": ec.SECP384R1(), "ES512": ec.SECP521R1()}
_numbers = itertools.count(1)


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def compact(header: Any, claims: Any, sign: Callable[[bytes], bytes] | None = None) -> str:
    """A token of whatever parts; bytes go in as they are, everything else as JSON."""
    parts = [b64(part if isinstance(part, bytes) else json.dumps(part).encode()) for part in (header, claims)]
    signed = ".".join(parts)
    return f"{signed}.{b64(sign(signed.encode()) if sign else b'')}"


@lru_cache
def private_key(kind: str, number: int, bits: int) -> Any:
    """The `number`-th key of that kind, "RSA" or an ES algorithm. Made once in a process: RSA keys take their time."""
    if kind in _CURVES:
        return ec.generate_private_key(_CURVES[kind])
    return rsa.generate_private_key(65537, bits)


class Signer:
    """One key pair."""

    def __init__(self, algorithm: str = "RS256", number: int = 0, kid: str | None = None, bits: int = 2048) -> None:
        self.algorithm, self.kid = algorithm, kid
        self._key = private_key(algorithm if algorithm in _CURVES else "RSA", number, bits)

    def sign(self, data: bytes) -> bytes:
        signature: bytes = jwk.construct(self._key, self.algorithm).sign(data)
        return signature

    def token(self, claims: Any, **header: Any) -> str:
        """Signed with this key. `header`: members that are added, or replaced; None takes one out."""
        given = {"alg": self.algorithm, "typ": "JWT", "kid": self.kid} | header
        return compact({name: value for name, value in given.items() if value is not None}, claims, self.sign)

    def jwk(self, **more: Any) -> dict[str, Any]:
        """The public half as a key set has it."""
        public: dict[str, Any] = jwk.construct(self._key.public_key(), self.algorithm).to_dict()
        named = {} if self.kid is None else {"kid": self.kid}
        return public | {"use": "sig"} | named | more

    def pem(self) -> bytes:
        pem: bytes = jwk.construct(self._key.public_key(), self.algorithm).to_pem()
        return pem


class Asked(NamedTuple):
    """One request for keys."""

    time: float  # steady clock
    path: str
    headers: Mapping[str, str]


class Issuer:
    """See the module's docstring. Use as a context manager, or call `stop`."""

    def __init__(self, algorithm: str = "RS256", *, name: str = "") -> None:
        number = next(_numbers)
        self.name = name or f"https://issuer-{number}.test"
        self.signers: list[Signer] = []  # the last one signs
        self.published: list[dict[str, Any]] = []
        self.fault = ""
        self.cache_control = ""
        self.go_on = threading.Event()  # lets a slow answer go on
        self.asked: list[Asked] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.rotate(algorithm)

    def __enter__(self) -> Issuer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.go_on.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    # --- for tests
    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/keys"

    @property
    def requests(self) -> int:
        return len(self.asked)

    def entry(self, **more: Any) -> dict[str, Any]:
        """What the gateway's configuration says of this issuer."""
        return {"issuer": self.name, "audience": AUDIENCE, "jwks_url": self.url} | more

    def rotate(self, algorithm: str = "RS256", *, publish: bool = True, forget: bool = False) -> Signer:
        """Another key signs from now on. `forget`: it is the only one that is published."""
        number = len(self.signers)
        signer = Signer(algorithm, number, f"key-{number}")
        self.signers.append(signer)
        if forget:
            self.published = []
        if publish:
            self.published = [*self.published, signer.jwk()]
        return signer

    def claims(self, **more: Any) -> dict[str, Any]:
        now = time.time()
        given = {
            "iss": self.name, "aud": AUDIENCE, "sub": "app", "iat": int(now), "exp": int(now) + 600, "tenant": "t1",
        } | more  # fmt: skip
        return {name: value for name, value in given.items() if value is not None}

    def token(self, **claims: Any) -> str:
        return self.signers[-1].token(self.claims(**claims))

    # --- the server
    def _handler(self) -> type[BaseHTTPRequestHandler]:
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                headers = {name.lower(): value for name, value in self.headers.items()}
                issuer.asked.append(Asked(time.monotonic(), self.path, headers))
                status, body, headers = _FAULTS.get(issuer.fault, _keys)(issuer)
                if issuer.fault == "slow":  # what it says was true when it was asked
                    issuer.go_on.wait(HOLD)
                self.send_response(status)
                if issuer.cache_control:
                    self.send_header("cache-control", issuer.cache_control)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(body)))
                self.send_header("connection", "close")  # idle connections would outlive the test
                self.close_connection = True
                self.end_headers()
                self.wfile.write(body)

            def handle(self) -> None:
                try:
                    super().handle()
                except ConnectionError:  # the gateway hung up: it has read enough or waited too long
                    self.close_connection = True

            def log_message(self, *_: Any) -> None: ...

        return Handler


Reply = tuple[int, bytes, dict[str, str]]


def _keys(issuer: Issuer) -> Reply:
    return 200, json.dumps({"keys": issuer.published}).encode(), {}


def _padded(issuer: Issuer) -> Reply:
    return 200, json.dumps({"keys": issuer.published, "padding": "x" * (1 << 21)}).encode(), {}


def _elsewhere(issuer: Issuer) -> Reply:
    """A redirect to a place that has the very keys."""
    return 302, b"", {"location": issuer.url + "/elsewhere"}


_FAULTS: dict[str, Callable[[Issuer], Reply]] = {
    "status": lambda issuer: (500, _keys(issuer)[1], {}),
    "garbage": lambda issuer: (200, b"\xff\x00 no JSON", {}),
    "html": lambda issuer: (200, b"<html>Sign in</html>", {"content-type": "text/html"}),
    "list": lambda issuer: (200, json.dumps(issuer.published).encode(), {}),
    "object": lambda issuer: (200, json.dumps({"keys": {"0": issuer.published[0]}}).encode(), {}),
    "text": lambda issuer: (200, b'{"keys": "all of them"}', {}),
    "empty": lambda issuer: (200, b"", {}),
    "huge": _padded,
    "redirect": _elsewhere,
    "packed": lambda issuer: (200, _keys(issuer)[1], {"content-encoding": "gzip"}),
}
FAULTS = tuple(_FAULTS)
