"""Who calls: request headers and what the gateway knows to a Principal."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from gateway.addresses import is_inside
from gateway.errors import AuthError
from gateway.types import Address, Principal

_LONGEST_KEY = 512  # bytes of a key; nothing of ours is longer
_LONGEST_TOKEN = 16 * 1024  # bytes of a signed token, which carries its claims


class UnverifiedToken(Exception):
    """The credential is a signed token that nobody has verified yet."""

    def __init__(self, token: bytes) -> None:
        super().__init__()
        self.token = token


def presented_key(headers: Mapping[bytes, bytes]) -> bytes | None:
    """The credential of a request: `Authorization: Bearer`, else `x-api-key`. Names are lower case.

    Raises: AuthError for a scheme that is not Bearer.
    """
    authorization = headers.get(b"authorization")
    if authorization is None:
        return headers.get(b"x-api-key")
    if authorization[:7].lower() != b"bearer ":
        raise AuthError("no bearer token")
    return authorization[7:].strip()


def authenticate(
    headers: Mapping[bytes, bytes],
    keys: Mapping[bytes, Principal],
    tokens: Mapping[bytes, Principal] | None,
    now: float,
) -> Principal:
    """The caller.

    Args:   keys: SHA-256 of the whole key (32 bytes) -> principal. tokens: the same of verified tokens; None where no
            issuer is configured. now: Unix seconds.
    Raises: AuthError, the same for every reason, which is for the log only. UnverifiedToken.

    Only digests are compared: guessing a key byte by byte learns nothing from how long a look-up takes, and the final
    comparison takes the same time wherever they differ.
    """
    credential = presented_key(headers)
    if not credential:
        raise AuthError("no credential")
    if len(credential) > _LONGEST_KEY and (tokens is None or len(credential) > _LONGEST_TOKEN):
        raise AuthError("too long for a credential")
    digest = hashlib.sha256(credential).digest()
    principal = keys.get(digest)
    if principal is None:
        if tokens is None or credential.count(b".") != 2:  # a key has no dots, a signed token two
            raise AuthError("unknown key")
        principal = tokens.get(digest)
        if principal is None:
            raise UnverifiedToken(credential)
    if not hmac.compare_digest(principal.digest, digest):
        raise AuthError("unknown key")
    if principal.expires is not None and principal.expires <= now:
        raise AuthError(f"{_name(principal)} has expired")
    return principal


def check_address(principal: Principal, address: Address | None) -> None:
    """Raises: AuthError when the caller may not call from there: as if the key were unknown, which it is to whoever
    has stolen it."""
    if principal.networks and not is_inside(address, principal.networks):
        raise AuthError(f"{_name(principal)} may not be used from this address")


def _name(principal: Principal) -> str:
    return f"key {principal.key} of {principal.tenant.name}"
