"""Signed tokens of other issuers (JWT): verified once, and then known like a key until they expire.

What makes a token good is decided in claims.py. Here are the issuers' keys and the memory of what was verified.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

import httpx

from gateway import claims
from gateway.claims import SignedToken
from gateway.config import JwtConfig
from gateway.errors import AuthError
from gateway.people import TenantPolicy
from gateway.tokens.places import FilePlace, Pace, Place, RemotePlace, new_client
from gateway.tokens.sources import KeySource
from gateway.types import Principal

MOST_KNOWN = 10_000  # verified tokens that are remembered


class Tokens:
    """The issuers' keys and the tokens verified with them."""

    def __init__(self, pace: Pace | None = None, client: Callable[[], httpx.AsyncClient] = new_client) -> None:
        self.known: dict[bytes, Principal] | None = None  # SHA-256 of the whole token -> who it is; None: no issuers
        self._pace, self._new_client = pace or Pace(), client
        self._client: httpx.AsyncClient | None = None
        self._issuers: tuple[JwtConfig, ...] = ()
        self._sources: dict[str, KeySource] = {}  # by URL or path
        self._ended: list[asyncio.Task[None]] = []

    def adopt(self, issuers: tuple[JwtConfig, ...]) -> None:
        """Takes another configuration, or the same with other tenants: what was verified is forgotten, keys stay.

        Needs a running event loop where there are issuers.
        """
        self.known, self._issuers = {} if issuers else None, issuers
        wanted = {_where(issuer): issuer for issuer in issuers}
        self._ended = [task for task in self._ended if not task.done()]
        for where in self._sources.keys() - wanted.keys():
            self._ended += self._sources.pop(where).stop()
        for source in self._sources.values():
            source.refresh()
        for where in wanted.keys() - self._sources.keys():
            place = self._place(wanted[where])
            self._sources[where] = KeySource(wanted[where].issuer, place, self._pace, self._forget)

    async def verify(self, token: bytes, tenants: Mapping[str, TenantPolicy]) -> Principal:
        """Who presents `token`. Waits where its issuer's keys have to be read first, for seconds. Raises: AuthError."""
        known = self.known
        if known is None:
            raise AuthError("no issuer of tokens is configured")
        signed = claims.parse(token)
        failure = AuthError()
        for issuer in claims.addressed(signed, self._issuers):
            try:
                return await self._verify(signed, issuer, tenants, known)
            except AuthError as error:
                failure = error
        raise failure

    async def _verify(
        self, token: SignedToken, issuer: JwtConfig, tenants: Mapping[str, TenantPolicy], known: dict[bytes, Principal]
    ) -> Principal:
        expires = claims.check_times(token, issuer, time.time())  # first: a token that is no good is no reason to read
        source = self._sources.get(_where(issuer))
        if source is None:  # a reload has taken the issuer away while the token was checked against another
            raise AuthError("the token's issuer is not configured any more")
        await source.ready()
        if (found := known.get(token.digest)) is not None:  # another request has brought it while this one waited
            return found
        if not source.has_signed(token):
            await source.look_again(token)
        found = claims.subject(token, issuer, tenants, expires)
        _remember(known, found)  # which nobody looks at any more if it was replaced meanwhile
        return found

    async def close(self) -> None:
        tasks = self._ended + [task for source in self._sources.values() for task in source.stop()]
        self._sources.clear()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()

    def _place(self, issuer: JwtConfig) -> Place:
        if issuer.jwks_file is not None:
            return FilePlace(issuer.jwks_file, self._pace)
        if self._client is None:
            self._client = self._new_client()
        return RemotePlace(self._client, str(issuer.jwks_url), self._pace)

    def _forget(self) -> None:
        if self.known is not None:
            self.known.clear()


def _where(issuer: JwtConfig) -> str:
    return str(issuer.jwks_url or issuer.jwks_file)


def _remember(known: dict[bytes, Principal], principal: Principal) -> None:
    """Makes room by dropping what has expired, and where that is not enough the oldest tenth."""
    if len(known) >= MOST_KNOWN:
        now = time.time()
        for digest in [digest for digest, one in known.items() if one.expires is None or one.expires <= now]:
            del known[digest]
        for digest in list(known)[: max(0, len(known) - MOST_KNOWN * 9 // 10)]:
            del known[digest]
    known[principal.digest] = principal
