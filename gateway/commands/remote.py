"""Commands through the HTTP API of a running gateway."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import httpx

from gateway.commands.client import Query
from gateway.config import StartupError
from gateway.config.values import split_url
from gateway.errors import GatewayError
from gateway.records import JSON
from gateway.units import WrongValue

PATIENCE = 60.0  # seconds for one answer of a gateway
KEY_VARIABLE = "SEKISHO_ADMIN_KEY"
_LARGEST_KEY_FILE = 4096  # bytes


class Remote:
    """Asks a gateway, whose address is in error texts without what else its URL may hold."""

    def __init__(self, http: httpx.Client, where: str) -> None:
        self._http, self._where = http, where

    def tenants(self) -> JSON:
        return self._ask("GET", "/tenants")

    def tenant(self, name: str) -> JSON:
        return self._ask("GET", f"/tenants/{_part(name)}")

    def create_tenant(self, body: JSON) -> JSON:
        return self._ask("POST", "/tenants", body=body)

    def update_tenant(self, name: str, body: JSON) -> JSON:
        return self._ask("PATCH", f"/tenants/{_part(name)}", body=body)

    def delete_tenant(self, name: str, query: Query) -> JSON:
        return self._ask("DELETE", f"/tenants/{_part(name)}", query)

    def keys(self, query: Query) -> JSON:
        return self._ask("GET", "/keys", query)

    def key(self, identity: str) -> JSON:
        return self._ask("GET", f"/keys/{_part(identity)}")

    def create_key(self, body: JSON) -> JSON:
        return self._ask("POST", "/keys", body=body)

    def update_key(self, identity: str, body: JSON, query: Query) -> JSON:
        return self._ask("PATCH", f"/keys/{_part(identity)}", query, body)

    def rotate_key(self, identity: str, body: JSON) -> JSON:
        return self._ask("POST", f"/keys/{_part(identity)}/rotate", body=body)

    def revoke_key(self, identity: str, query: Query) -> JSON:
        return self._ask("DELETE", f"/keys/{_part(identity)}", query)

    def usage(self, query: Query) -> JSON:
        return self._ask("GET", "/usage", query)

    def usage_csv(self, query: Query) -> str:
        return self._send("GET", "/usage", {**query, "format": "csv"}, None).text

    def audit(self, query: Query) -> JSON:
        return self._ask("GET", "/audit", query)

    def verify_audit(self, query: Query) -> JSON:
        return self._ask("GET", "/audit/verify", query)

    def _ask(self, method: str, path: str, query: Query | None = None, body: JSON | None = None) -> JSON:
        answer = self._send(method, path, query, body)
        try:
            document = answer.json()
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise self._stranger()
        return document

    def _send(self, method: str, path: str, query: Query | None, body: JSON | None) -> httpx.Response:
        """Raises: GatewayError: the gateway's own, or that there is none."""
        try:
            answer = self._http.request(method, f"/admin/v1{path}", params=query, json=body)
        except httpx.RequestError as error:
            why = str(error) or type(error).__name__
            raise GatewayError(f"no answer from {self._where}: {why}", status=503) from None
        if answer.is_success:
            return answer
        raise self._refusal(answer)

    def _refusal(self, answer: httpx.Response) -> GatewayError:
        try:
            said = answer.json()["error"]
            return GatewayError(
                str(said["message"]), status=answer.status_code, param=said.get("param"), code=said.get("code")
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return self._stranger()

    def _stranger(self) -> GatewayError:
        return GatewayError(f"what answers at {self._where} is no Sekisho gateway", status=502)


@contextlib.contextmanager
def remote(url: str, key_file: Path | None) -> Iterator[Remote]:
    """A client of the gateway at `url`.

    Raises: StartupError for a wrong URL or key.
    """
    try:
        parts = split_url(url, ("http", "https"), "write http://host:port or https://host:port")
    except WrongValue as wrong:
        raise StartupError(f"--url: {wrong}, {wrong.hint}") from None
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise StartupError("--url: write only scheme, host, port and path; the key has a place of its own")
    headers = {"authorization": f"Bearer {_key(key_file)}"}
    base = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
    with httpx.Client(base_url=base, headers=headers, timeout=PATIENCE, follow_redirects=False) as http:
        yield Remote(http, parts.netloc)


def _key(file: Path | None) -> str:
    """Raises: StartupError."""
    if file is None:
        text, source = os.environ.get(KEY_VARIABLE, ""), f"${KEY_VARIABLE}"
    else:
        source = str(file)
        try:
            with file.open("rb") as stream:
                text = stream.read(_LARGEST_KEY_FILE).decode("ascii", "replace").strip()
        except OSError as error:
            raise StartupError(f"{file} cannot be read ({error.strerror})") from None
    if not text:
        raise StartupError(f"no key: set {KEY_VARIABLE}, or name a file that holds one with --key-file")
    if not text.isascii() or not text.isprintable() or " " in text:
        raise StartupError(f"{source} holds no key")
    return text


def _part(text: str) -> str:
    """As one part of a path: whatever it is, it stays behind the route's own name. Keys of the file hold a slash."""
    return quote(text, safe="")
