"""GET requests to engines off the hot path: probes and discovery. Answers are bounded in time and size."""

from __future__ import annotations

import asyncio
import ssl

import httpx

from gateway.tls import EngineTls
from gateway.types import Endpoint

TIMEOUT = 3.0  # seconds for one answer
LARGEST_ANSWER = 4 * 1024 * 1024  # bytes; what is longer is cut off


class EngineClient:
    """One httpx client per endpoint, kept while the endpoint is wanted."""

    def __init__(self) -> None:
        self._clients: dict[Endpoint, tuple[ssl.SSLContext | None, httpx.AsyncClient]] = {}
        self._tls = EngineTls()

    async def get(self, endpoint: Endpoint, path: str, api_key: str | None) -> tuple[int, bytes]:
        """Status and body. Raises: httpx.HTTPError, OSError, TimeoutError, TlsFileError."""
        client = await self._client(endpoint)
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        async with asyncio.timeout(TIMEOUT), client.stream("GET", path, headers=headers) as answer:
            body = b""
            async for part in answer.aiter_bytes():
                body += part
                if len(body) > LARGEST_ANSWER:
                    break
            return answer.status_code, body

    async def _client(self, endpoint: Endpoint) -> httpx.AsyncClient:
        """Another one when the files of its TLS have changed. Raises: TlsFileError."""
        context = self._tls.context(endpoint) if endpoint.tls else None
        known = self._clients.get(endpoint)
        if known is not None and known[0] is context:
            return known[1]
        client = _client(endpoint, context)
        self._clients[endpoint] = context, client
        if known is not None:
            await known[1].aclose()
        return client

    async def forget(self, wanted: set[Endpoint]) -> None:
        """Closes the clients of all other endpoints."""
        for endpoint in [endpoint for endpoint in self._clients if endpoint not in wanted]:
            await self._clients.pop(endpoint)[1].aclose()


def _client(endpoint: Endpoint, context: ssl.SSLContext | None) -> httpx.AsyncClient:
    scheme = "https" if endpoint.tls else "http"
    return httpx.AsyncClient(
        base_url=f"{scheme}://{endpoint.authority}",
        timeout=TIMEOUT,
        trust_env=False,  # a proxy from the environment has no business between a gateway and its engines
        transport=httpx.AsyncHTTPTransport(
            uds=endpoint.unix, verify=context if context is not None else False, trust_env=False
        ),
    )
