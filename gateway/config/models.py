"""The shape of the configuration file, part three: public models and the engines behind them."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from gateway.config.access import LimitsConfig
from gateway.config.section import Section
from gateway.config.values import (
    Count,
    EngineText,
    EngineUrl,
    FilePath,
    Glob,
    ModelName,
    Secret,
    Sha256,
    Weight,
    Whole,
    Word,
)
from gateway.units import PositiveSeconds, Seconds, WrongValue

Policy = Literal["least_load", "power_of_two", "round_robin", "weighted", "prefix_affinity", "session_affinity"]

# What makes sense only where the gateway loads the file itself, and only where it does not.
_EMBEDDED_ONLY = ("sha256", "parallel", "gpu_layers", "threads")
_REMOTE_ONLY = ("api_key", "ca_file", "client_cert_file", "client_key_file")


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
        description=(
            "SHA-256 the file at `path` must have, or the manifest of a folder or split file. Default null: as the "
            "lock file says, else not checked; a mismatch stops the start."
        ),
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
            "Tokens of prompt and answer together for one request. Default null: what the engine says; Ollama is "
            "given the model's, and a file at `path` has its own, at most 8192."
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
        description="Layers the embedded engine keeps on the GPU. Default -1: all; 0 is CPU only.",
    )
    threads: Count | None = Field(
        None,
        description="CPU threads of the embedded engine. Default null: the cores it may use, no hyper-threads.",
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
            "Tokens of prompt and answer together, as /v1/models shows it; requests are held against the replicas' "
            "own. Default null: the longest of those."
        ),
    )
    limits: LimitsConfig = Field(
        LimitsConfig(),
        description="Limits of all callers of the model together. Default: only those of tenants and keys.",
    )
    max_tokens_default: Count | None = Field(
        None,
        description=(
            "Completion tokens set aside for requests that give no max_tokens; the engine is not told. "
            "Default null: 512."
        ),
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
