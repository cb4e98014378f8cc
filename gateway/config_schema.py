"""The shape of the configuration file: one frozen model for each section, names as in the YAML.

Each field says its default and what follows from it; `config/schema.json` and the example file are held to these
models by tests. What concerns more than one section is in `config_checks`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator

from gateway.config_values import (
    Count,
    DatabaseUrl,
    EngineText,
    EngineUrl,
    FilePath,
    Glob,
    KeySha256,
    ListenHost,
    MediaHost,
    ModelName,
    Moment,
    NetworkField,
    Origin,
    RedisUrl,
    Secret,
    Sha256,
    TenantName,
    WebUrl,
    Weight,
    Whole,
    Word,
    quoted_number,
)
from gateway.units import Budgets, Bytes, PositiveSeconds, Rates, Seconds, WrongValue

Policy = Literal["least_load", "power_of_two", "round_robin", "weighted", "prefix_affinity", "session_affinity"]
Role = Literal["user", "operator", "admin"]
Algorithm = Literal["RS256", "RS384", "RS512", "ES256", "ES384", "ES512"]

# What makes sense only where the gateway loads the file itself, and only where it does not.
_EMBEDDED_ONLY = ("sha256", "parallel", "gpu_layers", "threads")
_REMOTE_ONLY = ("api_key", "ca_file", "client_cert_file", "client_key_file")


class Section(BaseModel):
    """What every section shares: immutable, no unknown keys, and no values in error texts."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class TlsConfig(Section):
    """TLS of the gateway's own port."""

    cert_file: FilePath = Field(description="Certificate chain in PEM. Required: clients are shown this certificate.")
    key_file: FilePath = Field(description="Private key in PEM. Required; keep it readable by the gateway alone.")
    client_ca_file: FilePath | None = Field(
        None,
        description="CA whose client certificates are demanded. Default null: clients need no certificate.",
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
        description="Longest wait for the next part of a request body. Default 60s; slower clients get a 408.",
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


class JwtConfig(Section):
    """One issuer whose signed tokens are accepted in place of keys."""

    issuer: EngineText = Field(description="Exact `iss` of the tokens. Required: tokens of other issuers are a 401.")
    audience: EngineText = Field(
        description="Exact `aud` the tokens must name. Required: tokens made for others are a 401.",
    )
    jwks_url: WebUrl | None = Field(
        None,
        description="Where the issuer publishes its public keys; https unless on loopback. Default null: `jwks_file`.",
    )
    jwks_file: FilePath | None = Field(
        None,
        description="The issuer's public keys in a file, read again when it changes. Default null: `jwks_url`.",
    )
    algorithms: tuple[Algorithm, ...] = Field(
        ("RS256", "ES256"),
        min_length=1,
        description=(
            "Signature algorithms accepted. Default [RS256, ES256]; shared-secret algorithms and `none` never are."
        ),
    )
    tenant_claim: EngineText = Field("tenant", description="Claim that names the tenant. Default tenant.")
    role_claim: EngineText = Field("role", description="Claim that names the role. Default role; without it: user.")
    models_claim: EngineText = Field(
        "models",
        description="Claim that lists the models allowed. Default models; without it: those of the tenant.",
    )
    leeway: Seconds = Field(30.0, description="Clock difference forgiven in `exp`, `nbf` and `iat`. Default 30s.")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.jwks_url is None) == (self.jwks_file is None):
            raise WrongValue("exactly one of `jwks_url` and `jwks_file` is needed", "write where the keys are")
        return self


class CertificateConfig(Section):
    """Client certificates that stand for a caller, where `server.tls.client_ca_file` is set."""

    san: EngineText | None = Field(
        None,
        description=(
            "Subject alternative name: a DNS name, an e-mail address or a URI such as spiffe://cluster/app. "
            "Default null: `subject`."
        ),
    )
    subject: EngineText | None = Field(
        None,
        description="Common name of the certificate's subject. Default null: `san`, which is the better choice.",
    )
    tenant: TenantName = Field(description="Tenant that pays. Required; of this file or the database.")
    role: Role = Field("user", description="What the holder may do. Default user.")
    models: tuple[Glob, ...] = Field(("*",), description='Public names, within the tenant\'s. Default ["*"].')

    @model_validator(mode="after")
    def _one_name(self) -> Self:
        if (self.san is None) == (self.subject is None):
            raise WrongValue("exactly one of `san` and `subject` is needed", "write which name has to match")
        return self


class AuthConfig(Section):
    """Who is let in."""

    required: bool = Field(
        True,
        description="Demand a key or token. Default true; false is accepted only with a loopback `server.host`.",
    )
    jwt: tuple[JwtConfig, ...] = Field((), description="Token issuers. Default none: only keys are accepted.")
    certificates: tuple[CertificateConfig, ...] = Field(
        (),
        description="Client certificates accepted in place of a key. Default none; needs `server.tls.client_ca_file`.",
    )


class LimitsConfig(Section):
    """What a tenant, key or model may use. All limits that concern a request apply to it at once."""

    requests: Rates = Field(
        (),
        description="Requests per window, as in 600/min, or several, as in [10/s, 600/min]. Default none: no limit.",
    )
    tokens: Rates = Field(
        (),
        description="Prompt and completion tokens per window, as in 200000/min, or several. Default none: no limit.",
    )
    token_budget: Budgets = Field(
        (),
        description=(
            "Tokens of a UTC day or month, as in 20000000/day, or both; spent is a 429 until the next one begins. "
            "Default none: no limit."
        ),
    )
    concurrency: Count | None = Field(
        None,
        description="Requests open at once. Default null: no limit; one more is a 429.",
    )


class KeyConfig(Section):
    """One API key, known only by its digest."""

    name: TenantName = Field(description="What logs and usage call the key. Required; unique within the tenant.")
    sha256: KeySha256 = Field(
        repr=False,
        description=(
            "SHA-256 of the whole key, 64 hex characters. Required; `sekisho keys create --print` makes the line."
        ),
    )
    role: Role = Field(
        "user",
        description="user (default) calls models, operator also reads, drains and reloads, admin does everything.",
    )
    models: tuple[Glob, ...] = Field(
        ("*",),
        description=(
            "Public names the key may use, as globs, within its tenant's. Default [\"*\"]: all of the tenant's."
        ),
    )
    limits: LimitsConfig = Field(LimitsConfig(), description="Limits of this key alone. Default: only the tenant's.")
    allow_from: tuple[NetworkField, ...] = Field(
        (),
        description="Networks the key may be used from. Default none named: from anywhere.",
    )
    expires: Moment | None = Field(
        None,
        description="Date (its first instant, UTC) or time from which the key is refused. Default null: never.",
    )


class TenantConfig(Section):
    """Who pays: a group of keys with shared limits."""

    name: TenantName = Field(description="Name in usage, metrics and tokens. Required and unique.")
    models: tuple[Glob, ...] = Field(
        ("*",),
        description='Public names the tenant may use, as globs. Default ["*"]: every model; [] is none.',
    )
    limits: LimitsConfig = Field(LimitsConfig(), description="Limits of all its keys together. Default: none.")
    weight: Weight = Field(1.0, description="Share of a model's queue when tenants contend for it. Default 1.")
    priority: Whole = Field(0, ge=-1000, le=1000, description="Higher is served first, before any share. Default 0.")
    keys: tuple[KeyConfig, ...] = Field(
        (),
        description="Keys of the tenant. Default none here: the database may hold some.",
    )


class QueueConfig(Section):
    """What happens to requests when every replica of a model is full."""

    max_waiting: Whole = Field(
        64,
        ge=0,
        description="Requests that may wait. Default 64; one more is a 503, 0 never waits.",
    )
    max_wait: Seconds = Field(30.0, description="Longest wait for a replica. Default 30s, then a 503 with retry-after.")


class TimeoutsConfig(Section):
    """How long an engine may take."""

    connect: PositiveSeconds = Field(
        3.0,
        description="Opening a connection. Default 3s, then another replica is tried.",
    )
    first_byte: PositiveSeconds = Field(
        300.0,
        description="From the request to the first byte of the answer, prefill included. Default 300s, then a 504.",
    )
    idle: PositiveSeconds = Field(
        60.0,
        description="Silence within an answer. Default 60s, then the stream ends in an error.",
    )
    total: PositiveSeconds | None = Field(
        None,
        description="The whole answer. Default null: as long as it keeps coming.",
    )


class EngineAccess(Section):
    """How an engine that runs elsewhere is reached; shared by replicas and discovery."""

    backend: Word | None = Field(
        None,
        description="Kind of engine. Required with `url`; default null with `path`: decided by the file's format.",
    )
    url: EngineUrl | None = Field(
        None,
        description=(
            "Engine that already runs: http://host:port, https://host:port or unix:/path/to.sock, "
            "a path prefix allowed, a trailing /v1 dropped. Default null."
        ),
    )
    api_key: Secret | None = Field(None, description="Bearer token sent to the engine. Default null: none is sent.")
    ca_file: FilePath | None = Field(
        None,
        description="CA that signed the engine's certificate. Default null: the system's.",
    )
    client_cert_file: FilePath | None = Field(
        None,
        description="Certificate shown to the engine. Default null: none.",
    )
    client_key_file: FilePath | None = Field(
        None,
        description="Private key of that certificate. Default null: it is in the certificate's file.",
    )

    @model_validator(mode="after")
    def _tls_fits(self) -> Self:
        files = (self.ca_file, self.client_cert_file, self.client_key_file)
        if any(files) and self.url is not None and not self.url.startswith("https://"):
            raise WrongValue("certificates for an engine without TLS", "write an https:// url or remove them")
        if self.client_key_file and not self.client_cert_file:
            raise WrongValue("`client_key_file` without its certificate", "add `client_cert_file`")
        return self


class ReplicaConfig(EngineAccess):
    """One engine that serves a model: a running one (`url`) or a file the gateway loads itself (`path`)."""

    path: FilePath | None = Field(
        None,
        description="Model file or folder to load in the gateway. Default null: `url` names a running engine.",
    )
    model: EngineText | None = Field(
        None,
        description="Name of the model at the engine. Default null: the public name.",
    )
    sha256: Sha256 | None = Field(
        None,
        description="SHA-256 the file at `path` must have. Default null: not checked; a mismatch stops the start.",
    )
    format: Word | None = Field(
        None,
        description=(
            "Weights: gguf, safetensors, awq, gptq, fp8, exl2, exl3, mlx ... Default null: as the engine or file says."
        ),
    )
    quantization: EngineText | None = Field(
        None,
        description="Quantisation as shown in /v1/models, such as Q4_K_M. Default null: as the engine or file says.",
    )
    labels: Mapping[str, EngineText] = Field(
        {},
        description=(
            "Free names for people and dashboards, such as zone: a. Default none. One has a meaning: `tenant: NAME` "
            "keeps the replica for that tenant, which then gets no other replica of the model."
        ),
    )
    capabilities: tuple[Word, ...] = Field(
        (),
        description=(
            "What this replica can do, such as tools or vision. Default []: the model's, else what the engine says."
        ),
    )
    max_inflight: Count | None = Field(
        None,
        description=(
            "Requests the gateway keeps open there. Default null: no bound of ours, or `parallel` with `path`."
        ),
    )
    weight: Weight = Field(1.0, description="Share of load compared with the other replicas. Default 1.")
    timeouts: TimeoutsConfig = Field(TimeoutsConfig(), description="Patience with this engine. Default: see each.")
    context_length: Count | None = Field(
        None,
        description=(
            "Tokens of prompt and answer together for one request. Default null: the model's, else the engine's word."
        ),
    )
    parallel: Whole = Field(
        4,
        ge=1,
        le=64,
        description="Requests the embedded engine decodes at once. Default 4; each takes memory for its context.",
    )
    gpu_layers: Whole = Field(
        -1,
        ge=-1,
        description="Layers the embedded engine keeps on the GPU. Default -1: all that fit; 0 is CPU only.",
    )
    threads: Count | None = Field(
        None,
        description="CPU threads of the embedded engine. Default null: the machine's cores.",
    )

    @model_validator(mode="before")
    @classmethod
    def _backend_of_file(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("backend") is not None:
            return data
        is_gguf = str(data.get("path", "")).lower().endswith(".gguf")
        return {**data, "backend": "llamacpp"} if is_gguf else data

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.url is None) == (self.path is None):
            raise WrongValue(
                "exactly one of `url` and `path` is needed", "write `url` for an engine, `path` for a file"
            )
        foreign = _REMOTE_ONLY if self.url is None else _EMBEDDED_ONLY
        if extra := [name for name in foreign if name in self.model_fields_set and getattr(self, name) is not None]:
            kind = "`path`" if self.url is None else "`url`"
            raise WrongValue(f"`{extra[0]}` has no effect with {kind}", "remove it")
        return self


class ModelConfig(Section):
    """One public name and the replicas that serve it."""

    name: ModelName = Field(
        description="Public name, what clients send as `model`. Required and unique, aliases included.",
    )
    aliases: tuple[ModelName, ...] = Field((), description="Other names for the same model. Default none.")
    policy: Policy = Field(
        "least_load",
        description=(
            "How a replica is chosen. Default least_load: the least busy; the affinities keep prompt caches warm."
        ),
    )
    format_preference: tuple[Word, ...] = Field(
        (),
        description="Order in which formats are tried when replicas differ. Default []: by load alone.",
    )
    fallbacks: tuple[ModelName, ...] = Field(
        (),
        description="Models tried in turn when no replica can answer. Default none: the client gets a 503.",
    )
    queue: QueueConfig = Field(QueueConfig(), description="Waiting when all replicas are full. Default: see each.")
    context_length: Count | None = Field(
        None,
        description=(
            "Tokens of prompt and answer together, as /v1/models shows it. Default null: the longest of the replicas'."
        ),
    )
    limits: LimitsConfig = Field(
        LimitsConfig(),
        description="Limits of all callers of the model together. Default: only those of tenants and keys.",
    )
    max_tokens_default: Count | None = Field(
        None,
        description="Completion tokens set aside for requests that give no max_tokens. Default null: 512.",
    )
    capabilities: tuple[Word, ...] = Field(
        (),
        description="What the model can do, such as tools or vision. Default []: what the engines say.",
    )
    replicas: tuple[ReplicaConfig, ...] = Field(
        min_length=1,
        description="Engines that serve it. Required, at least one.",
    )


class DiscoveryConfig(EngineAccess):
    """Models found rather than listed: all that an engine reports (`url`), or the files of a folder (`scan`)."""

    scan: FilePath | None = Field(
        None,
        description="Folder whose model files are published by their format. Default null: `url` names an engine.",
    )
    name_prefix: str = Field("", max_length=100, description="Put before every name found. Default none.")
    allow: tuple[Glob, ...] = Field(("*",), description='Names to publish, before the prefix, as globs. Default ["*"].')
    deny: tuple[Glob, ...] = Field((), description="Names not to publish, stronger than `allow`. Default none.")
    join: bool = Field(
        False,
        description=(
            "Add what is found to the model that already has its name, as one more replica. Default false: no."
        ),
    )

    interval: PositiveSeconds = Field(
        30.0,
        description="Time between two looks at what there is. Default 30s; models come and go that much later.",
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.url is None) == (self.scan is None):
            hint = "write `url` for an engine, `scan` for a folder"
            raise WrongValue("exactly one of `url` and `scan` is needed", hint)
        if self.scan is not None and any(getattr(self, name) is not None for name in ("backend", *_REMOTE_ONLY)):
            hint = "keep only name_prefix, allow, deny, join and interval"
            raise WrongValue("`scan` goes with none of the keys that reach an engine", hint)
        return self


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
            "Least severe line written. Default info: start, reloads, replica changes and one line per request."
        ),
    )
    content: Literal["none", "masked", "full"] = Field(
        "none",
        description=(
            "Prompts and answers in the log: none (default), masked (shape without words), full (everything)."
        ),
    )


class Config(Section):
    """The whole file. Every section may be left out."""

    server: ServerConfig = Field(ServerConfig(), description="The gateway's own port. Default: 127.0.0.1:8080.")
    metrics: MetricsConfig = Field(MetricsConfig(), description="Access to /metrics. Default: the admin role only.")
    media: MediaConfig = Field(MediaConfig(), description="Linked images and audio. Default: data: URIs only.")
    limits: LimitsStoreConfig = Field(LimitsStoreConfig(), description="Limits without their store. Default: local.")
    # {} and not StateConfig(): only validation resolves the default database against the file's folder.
    state: StateConfig = Field(
        {},
        validate_default=True,
        description="Database and Redis. Default: SQLite beside this file.",
    )
    auth: AuthConfig = Field(AuthConfig(), description="Who is let in. Default: holders of a key.")
    tenants: tuple[TenantConfig, ...] = Field(
        (),
        description="Tenants and keys. Default none here: the database holds them.",
    )
    models: tuple[ModelConfig, ...] = Field((), description="Public models. Default none: only what discovery finds.")
    discovery: tuple[DiscoveryConfig, ...] = Field((), description="Engines and folders to publish from. Default none.")
    routing: RoutingConfig = Field(RoutingConfig(), description="Choice of replicas. Default: see each.")
    logging: LoggingConfig = Field(
        LoggingConfig(),
        description="Log format and content. Default: JSON without content.",
    )
