"""The shape of the configuration file, part one: the gateway's own port, what it keeps, and what it writes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, SecretStr

from gateway.config.section import Section
from gateway.config.values import (
    CollectorUrl,
    Count,
    DatabaseUrl,
    EngineText,
    FilePath,
    HeaderName,
    HeaderValue,
    ListenHost,
    MediaHost,
    NetworkField,
    Origin,
    RedisUrl,
    Whole,
    quoted_number,
)
from gateway.units import Bytes, PositiveSeconds, Seconds


class TlsConfig(Section):
    """TLS of the gateway's own port."""

    cert_file: FilePath = Field(description="Certificate chain in PEM. Required: clients are shown this certificate.")
    key_file: FilePath = Field(description="Private key in PEM. Required; keep it readable by the gateway alone.")
    client_ca_file: FilePath | None = Field(
        None,
        description="CA that signs client certificates. Default null: clients are asked for none.",
    )
    client_certificates: Literal["required", "optional"] = Field(
        "required",
        description=(
            "With `client_ca_file`: required (default) ends a handshake without a valid certificate, optional also "
            "takes callers that show none."
        ),
    )
    min_version: Annotated[Literal["1.2", "1.3"], BeforeValidator(quoted_number)] = Field(
        "1.2",
        description='Oldest TLS version accepted. Default "1.2"; "1.3" turns older clients away.',
    )


class ServerConfig(Section):
    """The gateway's own port and what one client may ask of it."""

    host: ListenHost = Field(
        "127.0.0.1",
        description=(
            "Address to listen on. Default 127.0.0.1: this machine only; 0.0.0.0 or :: opens every interface."
        ),
    )
    port: Whole = Field(8080, ge=1, le=65535, description="TCP port to listen on. Default 8080.")
    workers: Whole = Field(
        1,
        ge=1,
        le=256,
        description=(
            "Processes that share the port. Default 1; more needs `state.redis`, which then holds the limits."
        ),
    )
    tls: TlsConfig | None = Field(None, description="Certificate of the port. Default null: plain HTTP.")
    max_body: Bytes = Field(32 << 20, description="Largest request body. Default 32MiB; a larger one is a 413.")
    max_header: Bytes = Field(
        64 << 10,
        description="Largest request head, all headers together. Default 64KiB; a larger one is a 431.",
    )
    header_timeout: PositiveSeconds = Field(
        15.0,
        description="Time a client has to send its headers. Default 15s; slower connections are closed.",
    )
    body_timeout: PositiveSeconds = Field(
        60.0,
        description="Time for the next 4 KiB of a request body, or the rest. Default 60s; slower clients get a 408.",
    )
    idle_timeout: PositiveSeconds = Field(
        75.0,
        description=(
            "How long a kept-alive connection may stay silent between requests. Default 75s, then it is closed."
        ),
    )
    max_connections: Whole = Field(
        10_000,
        ge=1,
        description="Open client connections per worker. Default 10000; more are refused with a 503.",
    )
    max_connections_per_address: Count | None = Field(
        None,
        description=(
            "Open connections of one address per worker, `trusted_proxies` excepted. Default null: half of "
            "`max_connections`; more are refused with a 503."
        ),
    )
    max_response: Bytes = Field(
        64 << 20,
        description=(
            "Largest answer that is not a stream. Default 64MiB; an engine that sends more gets its request a 502."
        ),
    )
    max_event: Bytes = Field(
        32 << 20,
        description=(
            "Largest single event of a stream. Default 32MiB; a larger one ends the stream with an error event."
        ),
    )
    shutdown_grace: Seconds = Field(
        30.0,
        description="How long running requests may finish after a stop signal. Default 30s, then they are cut.",
    )
    keepalive_interval: Seconds = Field(
        15.0,
        description="Pause between SSE comments while a prompt is prefilled. Default 15s; 0s sends none.",
    )
    cors_origins: tuple[Origin, ...] = Field(
        (),
        description="Web origins whose pages may call the API. Default none: browsers refuse; `*` admits every page.",
    )
    trusted_proxies: tuple[NetworkField, ...] = Field(
        (),
        description="Networks whose X-Forwarded-For is believed. Default none: the peer's own address counts.",
    )
    public_docs: bool = Field(False, description="Open /docs and /openapi.json without a key. Default false.")
    expose_route: bool = Field(
        False,
        description=(
            "Add x-sekisho-replica and x-sekisho-policy to answers. Default false: clients learn nothing of the fleet."
        ),
    )

    @property
    def scheme(self) -> str:
        """Of the port's URL."""
        return "http" if self.tls is None else "https"

    @property
    def url(self) -> str:
        """Of the port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


class MetricsConfig(Section):
    """Who may read /metrics."""

    allow: tuple[NetworkField, ...] = Field(
        (),
        description="Networks that may read /metrics without a key. Default none: the admin role is needed.",
    )


class MediaConfig(Section):
    """Images and audio that requests point to instead of carrying."""

    allow_hosts: tuple[MediaHost, ...] = Field(
        (),
        description=(
            "Hosts whose http(s) image and audio URLs may be used. Default none: only data: URIs, the rest is a 400."
        ),
    )
    fetch: Literal["gateway", "engine"] = Field(
        "gateway",
        description=(
            "Who follows such a URL: gateway (default) fetches it from a checked address and sends the engine a data: "
            "URI; engine leaves it to the engine, which may be led elsewhere by redirects and names."
        ),
    )
    allow_networks: tuple[NetworkField, ...] = Field(
        (),
        description=(
            "Private networks that the hosts may be in. Default none: names that lead to private, loopback or "
            "link-local addresses are refused."
        ),
    )
    max_size: Bytes = Field(20 << 20, description="Largest file fetched. Default 20MiB; a larger one is a 400.")
    timeout: PositiveSeconds = Field(10.0, description="Time one file may take. Default 10s; a slower one is a 400.")


class LimitsStoreConfig(Section):
    """How limits behave when their shared store fails."""

    on_store_failure: Literal["local", "allow", "refuse"] = Field(
        "local",
        description=(
            "When Redis cannot be reached: local (default) counts in each worker, allow lets all pass, refuse is a 503."
        ),
    )


class StateConfig(Section):
    """Where tenants, keys, usage and shared limits are kept."""

    database: DatabaseUrl | None = Field(
        SecretStr("sqlite:///sekisho.db"),
        validate_default=True,
        json_schema_extra={"default": "sqlite:///sekisho.db"},  # pydantic would print asterisks
        description=(
            "Tenants, keys, usage and audit. Default sqlite:///sekisho.db beside this file; "
            "postgresql://user:password@host:5432/name when several hosts share it; null: only this file counts, and "
            "no usage is kept."
        ),
    )
    spool: FilePath | None = Field(
        None,
        description=(
            "Folder for usage records that the database has not taken yet. Default null: `sekisho-spool` beside the "
            "SQLite file, or beside this file."
        ),
    )
    usage_retention: PositiveSeconds | None = Field(
        400 * 86400.0,
        description="How long usage records are kept. Default 400d; null: for ever.",
    )
    redis: RedisUrl | None = Field(
        None,
        description=(
            "redis:// or rediss:// store that shares limits between workers and hosts. "
            "Default null: each process counts."
        ),
    )

    def spool_in(self, folder: Path) -> Path:
        """Where the spool lies. `folder`: of the configuration file."""
        file = self.database.get_secret_value().removeprefix("sqlite:///") if self.database is not None else ""
        beside = folder if "://" in file or file in ("", ":memory:") else Path(file).parent
        return self.spool or beside / "sekisho-spool"


class RoutingConfig(Section):
    """What the choice of replicas remembers, and how often another one is tried."""

    prefix_index: Bytes = Field(
        64 << 20,
        description=(
            "Memory for what the prompt caches of replicas hold, used by prefix_affinity. Default 64MiB: about 170000 "
            "blocks of prompts; the ones used longest ago are forgotten first."
        ),
    )
    retry_budget: float = Field(
        0.2,
        ge=0,
        le=1,
        description=(
            "Further attempts after failures, as a share of the requests of the last seconds. Default 0.2: a fifth "
            "more load at most; a few are always allowed."
        ),
    )
    hedge_after: PositiveSeconds | None = Field(
        None,
        description=(
            "Wait for the first byte of an answer after which a second replica is asked too; the first to answer wins. "
            "Default null: never."
        ),
    )


class LoggingConfig(Section):
    """What the gateway writes: events on standard error, one access line a request on standard output."""

    format: Literal["json", "text"] = Field(
        "json",
        description="json (default): one object per line; text: for people.",
    )
    level: Literal["debug", "info", "warning", "error"] = Field(
        "info",
        description=(
            "Least severe event written. Default info: start, reloads and replica changes; access lines always are."
        ),
    )
    content: Literal["none", "masked", "full"] = Field(
        "none",
        description=(
            "Prompts and answers in the log: none (default), masked (personal data and secrets "
            "replaced), full (everything)."
        ),
    )
    content_limit: Bytes = Field(
        64 << 10,
        description="Most that is logged of one prompt or answer. Default 64KiB; the rest is left out and counted.",
    )


class TracingConfig(Section):
    """Spans of requests for an OpenTelemetry collector. Needs the extra `otel`."""

    endpoint: CollectorUrl | None = Field(
        None,
        description=(
            "Where spans are sent, OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces. Default null: no tracing."
        ),
    )
    headers: Mapping[HeaderName, HeaderValue] = Field({}, description="Headers for the collector. Default none.")
    sample: float = Field(
        1.0,
        ge=0,
        le=1,
        description=(
            "Share of the traces begun here that is recorded. Default 1; requests that bring a traceparent follow it."
        ),
    )
    service_name: EngineText = Field("sekisho", description="Name of this service in traces. Default sekisho.")


class ProvenanceConfig(Section):
    """Which model files may be loaded."""

    require_hashes: bool = Field(
        False,
        description=(
            "Load only model files whose SHA-256 is given by `sha256` or the lock file. Default false: any file."
        ),
    )
    lock_file: FilePath | None = Field(
        None,
        description=(
            "File written by `sekisho models lock`. Default null: models.lock beside this file, if there is one. "
            "A file that differs from it is not loaded."
        ),
    )
