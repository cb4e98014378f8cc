"""Signed tokens of other issuers (JWT): verified once, and then known like a key until they expire."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.config import JwtConfig
from gateway.errors import AuthError
from gateway.people import TenantPolicy
from gateway.types import Principal


class Tokens:
    """The issuers' keys and the tokens verified with them."""

    def __init__(self) -> None:
        self.known: dict[bytes, Principal] | None = None  # SHA-256 of the whole token -> who it is; None: no issuers

    def adopt(self, issuers: tuple[JwtConfig, ...]) -> None:
        """Takes another configuration, or the same with other tenants: what was verified is forgotten."""
        self.known = {} if issuers else None

    async def verify(self, token: bytes, tenants: Mapping[str, TenantPolicy]) -> Principal:
        """Who presents `token`. Raises: AuthError."""
        raise AuthError("unknown issuer")

    async def close(self) -> None: ...
