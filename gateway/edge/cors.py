"""Which pages of other origins may call the API: the header lines by which browsers are told (Fetch standard, CORS).

There is no credentials mode: pages have to send a key of their own. Only the API is opened, not administration, metrics
or documentation, which browsers may reach without a key where the operator has opened them to networks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

Lines = list[tuple[bytes, bytes]]

_OPEN = (b"/v1/", b"/health", b"/ready")
_LIMITS = (
    b"x-ratelimit-%b-%b" % (what, of) for of in (b"requests", b"tokens") for what in (b"limit", b"remaining", b"reset")
)
_EXPOSED = b", ".join((b"x-request-id", b"retry-after", *_LIMITS))
_METHODS = b"GET, POST"
_HEADERS = b"authorization, content-type, x-api-key, x-request-id, x-session-id"
_NAMES = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+(?:[ \t]*,[ \t]*[!#$%&'*+.^_`|~0-9A-Za-z-]+)*")
_LONGEST = 4096  # bytes of a list of header names
_KEPT = b"600"  # seconds a browser may remember the answer to a preflight
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class Cors:
    """The origins that are admitted; `*` among them admits every one."""

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(_as_browsers_write(origin) for origin in origins)
        self._every = b"*" in self._origins

    def lines(self, path: bytes, origin: bytes | None) -> Lines:
        """Header lines for the answer to a request from `origin`, if it came from one."""
        if not path.startswith(_OPEN):
            return []
        if self._every:
            return [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", _EXPOSED)]
        vary = (b"vary", b"Origin")  # on every answer: a cache has to keep them apart
        if origin is None or origin.lower() not in self._origins:
            return [vary]
        return [vary, (b"access-control-allow-origin", origin), (b"access-control-expose-headers", _EXPOSED)]

    def preflight(self, path: bytes, headers: Mapping[bytes, bytes]) -> Lines | None:
        """What a browser that asks first, with OPTIONS, is told; None when this is no such question. It is the same
        for every path, and needs no key: browsers send none with it."""
        origin, method = headers.get(b"origin"), headers.get(b"access-control-request-method")
        if origin is None or method is None or not path.startswith(_OPEN):
            return None
        found = self.lines(path, origin)
        if any(name == b"access-control-allow-origin" for name, _ in found):
            asked = headers.get(b"access-control-request-headers", b"")
            names = asked if len(asked) <= _LONGEST and _NAMES.fullmatch(asked) else _HEADERS
            found += [
                (b"access-control-allow-methods", _METHODS),
                (b"access-control-allow-headers", names),
                (b"access-control-max-age", _KEPT),
            ]
        return found


def cors_for(origins: tuple[str, ...]) -> Cors | None:
    """None when no page of another origin may call."""
    return Cors(origins) if origins else None


def _as_browsers_write(origin: str) -> bytes:
    """Without a port that the scheme implies."""
    return origin.lower().removesuffix(_DEFAULT_PORTS.get(origin.partition(":")[0].lower(), "\0")).encode()
