"""Fetches what requests link to, so that no engine has to: from permitted hosts, at checked addresses, within bounds.

A name is resolved once. Every address it has must be permitted, and the connection is made to one of exactly these, so
an answer that changes between the check and the connection changes nothing. TLS verifies the name all the same.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from base64 import b64encode
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from ipaddress import ip_address
from urllib.parse import urljoin

import httpx

from gateway.errors import BadRequest, GatewayError
from gateway.jsonplaces import Way
from gateway.media import Link, MediaRules
from gateway.media.filetypes import agree, sniff
from gateway.media.links import Target, literal, read_link
from gateway.types import Address

MOST_REDIRECTS = 3
MOST_ADDRESSES = 3  # of one host, that are tried
AT_ONCE = 64  # connections for all requests together
MOST_HELD = 512 << 20  # bytes in base64 that all running requests have by their links; memory takes about twice that
RETRY_AFTER = 2.0  # seconds
_REDIRECTS = (301, 302, 303, 307, 308)
_ENCODED_AT_ONCE = 3 << 18  # bytes; a multiple of three, or there would be padding in the middle
_HEADERS = {
    "accept": "image/*, audio/*, video/*",
    "accept-encoding": "identity",  # no decoder, no bomb
    "user-agent": "sekisho",
    "connection": "close",
}

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]  # name and port to addresses. Raises: OSError

log = logging.getLogger("sekisho.media")
_places = asyncio.Semaphore(AT_ONCE)


class Unavailable(Exception):
    """Why a link cannot be fetched, in words for the client: they hold no address."""


class Crowded(Unavailable):
    """Other requests hold too much at the moment."""


class Held:
    """What one request has by its links, until it lets go. All of them together are bounded: a request of a hundred
    bytes may be one of many megabytes then, and wait with them for an engine."""

    together = 0  # bytes, of all requests of this process

    def __init__(self) -> None:
        self._size = 0

    def take(self, size: int) -> None:
        """Raises: Crowded."""
        self._size += size
        Held.together += size
        if Held.together > MOST_HELD and Held.together > self._size:
            raise Crowded

    def let_go(self) -> None:
        Held.together -= self._size
        self._size = 0


class Budget:
    """Bytes that the files of one request may still have together."""

    def __init__(self, left: int, held: Held | None = None) -> None:
        self.left, self._held = left, held

    def take(self, size: int) -> None:
        """Raises: Unavailable."""
        self.left -= size
        if self.left < 0:
            raise Unavailable("the request would become too large with all that it links to")
        if self._held is not None:
            self._held.take(size)


async def resolve(host: str, port: int) -> Sequence[str]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


async def fetch_links(
    links: Sequence[Link], size: int, rules: MediaRules, resolver: Resolve = resolve, held: Held | None = None
) -> dict[Way, str]:
    """The data: URI for each link. All are fetched at once, each address once.

    Args:   size: bytes of the request itself. held: counts what is fetched, whether it succeeds or not.
    Raises: BadRequest naming the first link in the request's order that has failed so far; GatewayError, a 503, when
            other requests hold too much.
    """
    budget = Budget(rules.max_total - size, held)
    wanted = list(dict.fromkeys(link.target for link in links))
    tasks: dict[Target, asyncio.Task[str]] = {}
    try:
        async with asyncio.TaskGroup() as group:
            for target in wanted:
                uses = sum(link.target == target for link in links)
                tasks[target] = group.create_task(_fetch(target, rules, budget, uses, resolver))
    except BaseExceptionGroup as failed:
        if failed.split(Unavailable)[1] is not None:
            raise
        raise _failure(links, tasks) from None
    return {link.way: tasks[link.target].result() for link in links}


def _failure(links: Sequence[Link], tasks: dict[Target, asyncio.Task[str]]) -> GatewayError:
    for link in links:
        task = tasks[link.target]
        error = task.exception() if task.done() and not task.cancelled() else None
        if isinstance(error, Crowded):
            what = "Other requests have many files under way at the moment. Send the request again later."
            return GatewayError(what, param=link.param, code="media_busy", status=503, retry_after=RETRY_AFTER)
        if isinstance(error, Unavailable):
            return BadRequest(f"'{link.param}' cannot be used: {error}.", param=link.param, code="media_unavailable")
    raise AssertionError("a group failed without a task that did")


async def _fetch(target: Target, rules: MediaRules, budget: Budget, uses: int, resolver: Resolve) -> str:
    """Raises: Unavailable."""
    try:
        async with asyncio.timeout(rules.timeout), _places:
            said, content = await _follow(target, rules, budget, uses, resolver)
    except TimeoutError:
        raise Unavailable(f"it was not there within {rules.timeout:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:  # ssl's errors are OSErrors
        log.info("media: %s cannot be fetched: %s", target.host, type(error).__name__)
        raise Unavailable("its host cannot be reached, or does not speak HTTP as it should") from None
    found = sniff(content)
    kind = agree(said, found) if found is not None else None
    if kind is None:
        raise Unavailable("it is no image, sound or video, or not what its server says it is")
    return await _data_uri(kind, content)


async def _follow(target: Target, rules: MediaRules, budget: Budget, uses: int, resolver: Resolve) -> tuple[str, bytes]:
    """Content type and content, behind at most `MOST_REDIRECTS` redirects."""
    for _ in range(MOST_REDIRECTS + 1):
        answer, client = await _ask(target, rules, resolver)
        try:
            if answer.status_code in _REDIRECTS:
                target = _redirected(target, answer.headers.get("location", ""), rules)
                continue
            if answer.status_code != 200:
                raise Unavailable(f"its host answered {answer.status_code}")
            content = await _read(answer, rules.max_size, budget, uses)
            return answer.headers.get("content-type", ""), content
        finally:
            await answer.aclose()
            await client.aclose()
    raise Unavailable(f"it is redirected more than {MOST_REDIRECTS} times")


def _redirected(target: Target, location: str, rules: MediaRules) -> Target:
    """Checked like a link in a request. From TLS there is no way back to plain HTTP."""
    further = read_link(urljoin(target.url, location)) if location else None
    if further is None or not rules.permits(further) or (target.scheme == "https" and further.scheme != "https"):
        raise Unavailable("it is redirected to where this gateway fetches nothing from")
    return further


async def _ask(target: Target, rules: MediaRules, resolver: Resolve) -> tuple[httpx.Response, httpx.AsyncClient]:
    """The head of the answer, from the first address that takes the connection."""
    addresses = await _addresses(target, rules, resolver)
    for place, address in enumerate(addresses, 1):
        client = _client(target, rules.timeout)
        try:
            return await client.send(_request(client, target, address), stream=True), client
        except (httpx.ConnectError, httpx.ConnectTimeout):
            await client.aclose()
            if place == len(addresses):
                raise
        except BaseException:
            await client.aclose()
            raise
    raise Unavailable("its host has no address")


async def _addresses(target: Target, rules: MediaRules, resolver: Resolve) -> list[Address]:
    """All of them permitted, or none is used: a host that mixes both is not to be trusted with a choice."""
    own = literal(target.host)
    if own is not None:
        return [own]  # `permits` has judged it
    addresses = [ip_address(text.partition("%")[0]) for text in await resolver(target.host, target.port)]
    if not all(rules.reaches(address, target) for address in addresses):
        _warn(target.host)
        raise Unavailable("its host leads to an address that this gateway fetches nothing from")
    return addresses[:MOST_ADDRESSES]


@cache  # once for each of the operator's hosts
def _warn(host: str) -> None:
    log.warning("media: %s leads to an address that is not public, nor in media.allow_networks", host)


@cache
def _verified() -> ssl.SSLContext:
    return ssl.create_default_context()


def _client(target: Target, timeout: float) -> httpx.AsyncClient:
    """One for each request: a connection that is kept would have been verified for one name only."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(timeout, connect=timeout / MOST_ADDRESSES),
        trust_env=False,  # a proxy would resolve the name anew
        follow_redirects=False,
        verify=_verified() if target.scheme == "https" else False,
    )


def _request(client: httpx.AsyncClient, target: Target, address: Address) -> httpx.Request:
    host = f"[{address}]" if address.version == 6 else str(address)
    return client.build_request(
        "GET",
        f"{target.scheme}://{host}:{target.port}{target.path}",
        headers={"host": target.authority, **_HEADERS},
        extensions={"sni_hostname": target.host},
    )


async def _read(answer: httpx.Response, most: int, budget: Budget, uses: int) -> bytes:
    """The content, as it came. What is too large is known as soon as it is."""
    if answer.headers.get("content-encoding", "identity").lower() not in ("identity", ""):
        raise Unavailable("its host sends it compressed although that was not asked for")
    length = answer.headers.get("content-length", "")
    if length.isdigit() and int(length) > most:
        raise Unavailable(f"it is larger than {most} bytes")
    content = bytearray()
    async for piece in answer.aiter_raw():
        content += piece
        if len(content) > most:
            raise Unavailable(f"it is larger than {most} bytes")
        budget.take(uses * (4 * len(piece) // 3 + 1))
    return bytes(content)


async def _data_uri(kind: str, content: bytes) -> str:
    pieces = [f"data:{kind};base64,"]
    for start in range(0, len(content), _ENCODED_AT_ONCE):
        pieces.append(b64encode(content[start : start + _ENCODED_AT_ONCE]).decode())
        await asyncio.sleep(0)  # others' chunks go first
    return "".join(pieces)
