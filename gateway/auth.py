"""Who calls: request headers and the snapshot's keys to a Principal."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from gateway.errors import AuthError
from gateway.types import Principal

_LONGEST = 512  # bytes of a credential; nothing of ours is longer


def presented_key(headers: Mapping[bytes, bytes]) -> bytes | None:
    """The credential of a request: `Authorization: Bearer`, else `x-api-key`. Names are lower case.

    Raises: AuthError for a scheme that is not Bearer.
    """
    authorization = headers.get(b"authorization")
    if authorization is None:
        return headers.get(b"x-api-key")
    if authorization[:7].lower() != b"bearer ":
        raise AuthError
    return authorization[7:].strip()


def authenticate(
    headers: Mapping[bytes, bytes], keys: Mapping[bytes, Principal], anonymous: Principal | None, now: float
) -> Principal:
    """The caller.

    Args:   keys: SHA-256 of the whole key (32 bytes) -> principal. anonymous: who callers without a known key are; None
            where a key is required. now: Unix seconds.
    Raises: AuthError, the same for every reason.

    Only digests are compared: guessing a key byte by byte learns nothing from how long a look-up takes, and the final
    comparison takes the same time wherever they differ.
    """
    try:
        return _known(presented_key(headers), keys, now)
    except AuthError:
        if anonymous is None:
            raise
        return anonymous


def _known(key: bytes | None, keys: Mapping[bytes, Principal], now: float) -> Principal:
    if not key or len(key) > _LONGEST:
        raise AuthError
    digest = hashlib.sha256(key).digest()
    principal = keys.get(digest)
    if principal is None or not hmac.compare_digest(principal.digest, digest):
        raise AuthError
    if principal.expires is not None and principal.expires <= now:
        raise AuthError
    return principal
