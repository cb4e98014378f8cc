"""Where issuers publish their keys: a URL or a file, read within bounds of time and size."""

from __future__ import annotations

import asyncio
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx

TIMEOUT = 5.0  # seconds for one answer of an issuer
LARGEST_SET = 1024 * 1024  # bytes of a key set


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds between two looks at an issuer's keys."""

    usual: float = 600.0  # where the issuer does not say how long its keys may be kept
    shortest: float = 60.0  # and the bounds of what it may say
    longest: float = 3600.0
    file: float = 1.0  # the same for a file
    asked: float = 10.0  # after a token named an unknown key in vain: made-up names must not become a flood of requests
    first_retry: float = 1.0  # after a failure; doubles
    last_retry: float = 300.0
    stale: float = 86400.0  # keys that could not be read again for so long are not used any more


class NoKeys(Exception):
    """Why an issuer's keys cannot be read, in words for the log."""


class Place(Protocol):
    """Where an issuer's keys are."""

    asked: float  # seconds, as in Pace
    last_retry: float

    async def read(self) -> tuple[bytes, float]:
        """A key set, and for how many seconds it may be kept. Raises: NoKeys."""


def new_client() -> httpx.AsyncClient:
    return httpx.AsyncClient(
        timeout=TIMEOUT,
        trust_env=False,  # a proxy from the environment is not to decide who may call
        follow_redirects=False,  # nor is another host
        verify=ssl.create_default_context(),
        headers={"accept": "application/json", "accept-encoding": "identity", "user-agent": "sekisho"},
    )


class RemotePlace:
    """Keys that the issuer publishes under a URL."""

    def __init__(self, client: httpx.AsyncClient, url: str, pace: Pace) -> None:
        self._client, self._url, self._pace = client, url, pace
        self.asked, self.last_retry = pace.asked, pace.last_retry

    async def read(self) -> tuple[bytes, float]:
        try:
            async with asyncio.timeout(TIMEOUT), self._client.stream("GET", self._url) as answer:
                if answer.status_code != 200:
                    raise NoKeys(f"the issuer answered {answer.status_code}")
                return await _body(answer), self._kept_for(answer.headers.get("cache-control", ""))
        except (TimeoutError, httpx.TimeoutException):
            raise NoKeys(f"the issuer did not answer within {TIMEOUT:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise NoKeys(f"the issuer cannot be reached ({type(error).__name__})") from None

    def _kept_for(self, cache_control: str) -> float:
        if re.search(r"\bno-(?:store|cache)\b", cache_control, re.IGNORECASE):
            return self._pace.shortest
        said = re.search(r"\bmax-age=(\d{1,9})\b", cache_control, re.IGNORECASE)
        wanted = float(said[1]) if said else self._pace.usual
        return min(max(wanted, self._pace.shortest), self._pace.longest)


async def _body(answer: httpx.Response) -> bytes:
    """Unpacked it could be a thousand times as long as it is on the wire, so a packed answer is not taken."""
    if answer.headers.get("content-encoding", "identity").lower() != "identity":
        raise NoKeys("the issuer's answer is compressed, which was not asked for")
    body = b""
    async for part in answer.aiter_raw():
        body += part
        if len(body) > LARGEST_SET:
            raise NoKeys("the issuer's key set is too large")
    return body


class FilePlace:
    """Keys in a file. It is read whole each time: small, and cheaper than to trust its time stamp."""

    def __init__(self, path: Path, pace: Pace) -> None:
        self._path = path
        self._every = self.asked = self.last_retry = pace.file

    async def read(self) -> tuple[bytes, float]:
        return await asyncio.to_thread(self._read), self._every

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                content = file.read(LARGEST_SET + 1)
        except OSError as error:
            raise NoKeys(f"the file cannot be read ({type(error).__name__})") from None
        if len(content) > LARGEST_SET:
            raise NoKeys("the file is too large")
        return content
