"""The frozen nouns of the gateway. Nothing here does anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from itertools import count
from typing import NamedTuple, TypeAlias

from backends.base import Backend, Operation

Network: TypeAlias = IPv4Network | IPv6Network
Address: TypeAlias = IPv4Address | IPv6Address


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits in seconds on one attempt against one replica; None = no limit."""

    connect: float = 3.0
    first_byte: float = 300.0  # from the request being sent to the first byte of the answer
    idle: float = 60.0  # between two reads once the answer has begun
    total: float | None = None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an engine listens. Equal endpoints share a connection pool."""

    host: str
    port: int
    tls: bool = False
    unix: str | None = None  # path of a Unix socket; host and port are then only for the Host header
    ca_file: str | None = None
    client_cert_file: str | None = None
    client_key_file: str | None = None

    @property
    def authority(self) -> str:
        """The Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """What an embedded engine is started with."""

    path: str
    sha256: str | None
    context_length: int | None
    parallel: int
    gpu_layers: int
    threads: int | None
    max_waiting: int
    max_wait: float  # seconds


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine endpoint that serves a model."""

    id: str  # unique in the fleet, stable over reloads, says nothing about the address
    model: str
    backend: Backend
    endpoint: Endpoint
    prefix: str  # path in front of every route of the engine, "" or "/..."
    upstream_model: str
    timeouts: Timeouts
    heads: Mapping[Operation, bytes] = field(repr=False)  # request head up to the per-request headers
    format: str | None = None
    quantization: str | None = None
    context_length: int | None = None  # tokens
    capabilities: tuple[str, ...] = ()
    max_inflight: int | None = None
    weight: float = 1.0
    api_key: str | None = field(default=None, repr=False)
    embedded: EmbeddedModel | None = None
    tenant: str | None = None  # the only tenant it serves


@dataclass(frozen=True, slots=True)
class Limit:
    """At most `count` units in any `seconds`, or in each calendar `period` (UTC)."""

    count: int
    seconds: int
    unit: str  # "requests" or "tokens"
    scope: str  # "tenant", "key" or "model": who shares it, for messages
    period: str = ""  # "day" or "month"; empty = a sliding window


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """What applies to one principal or model, each with the name of the counter it draws from. Compared by identity."""

    requests: tuple[tuple[str, Limit], ...] = ()
    tokens: tuple[tuple[str, Limit], ...] = ()
    concurrency: tuple[tuple[str, int], ...] = ()
    made: int = field(default_factory=count().__next__)  # of two that name the same counter the later one is in force

    def __bool__(self) -> bool:
        return bool(self.requests or self.tokens or self.concurrency)

    def __add__(self, other: Limits) -> Limits:
        return Limits(
            self.requests + other.requests, self.tokens + other.tokens, self.concurrency + other.concurrency
        )


@dataclass(frozen=True, slots=True)
class Model:
    """A public name and what stands behind it."""

    name: str
    aliases: tuple[str, ...]
    policy: str
    format_preference: tuple[str, ...]
    fallbacks: tuple[str, ...]
    replicas: tuple[Replica, ...]
    max_tokens_default: int  # completion tokens reserved when the request sets no limit
    created: int  # Unix seconds
    context_length: int | None = None
    capabilities: tuple[str, ...] = ()
    limits: Limits | None = None  # of all callers together
    max_waiting: int = 0  # requests that may wait when every replica is full
    max_wait: float = 0.0  # seconds


@dataclass(frozen=True, slots=True)
class ToolPolicy:
    """Which tools a tenant may use, as globs, and what becomes of the others."""

    allow: tuple[str, ...]  # names
    deny: tuple[str, ...]  # names; stronger than `allow`
    types: tuple[str, ...]
    strip: bool  # they are taken out; else requests and answers with them are refused


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who pays."""

    name: str
    weight: float = 1.0
    priority: int = 0
    salt: str = ""  # keeps its prompts apart in the prefix caches of engines
    tools: ToolPolicy | None = None  # None = every tool


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls: a key of a tenant, the subject of a token or certificate, or the anonymous caller of a gateway
    without authentication."""

    tenant: Tenant
    key: str  # the key's id or name, or the subject's; never the key
    role: str
    models: tuple[str, ...]  # allow lists: every one of them has to match
    key_models: tuple[str, ...] | None
    limits: Limits
    expires: float | None = None  # Unix seconds
    digest: bytes = field(default=b"", repr=False)
    networks: tuple[Network, ...] = ()  # where it may call from; empty = anywhere
    # Public names resolved for this principal; filled on first use, bounded by the names that exist.
    seen: dict[str, Model] = field(default_factory=dict, repr=False, compare=False)


class Usage(NamedTuple):
    """Tokens of one answer. (A tuple: made once a request, and a frozen dataclass takes four times as long to make.)"""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    reasoning: int = 0
    source: str = "engine"  # "engine", or "estimate" where the engine did not say

    @property
    def total(self) -> int:
        return self.prompt + self.completion
