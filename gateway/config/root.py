"""The shape of the configuration file: one frozen model for each section, names as in the YAML. Its sections are in
`server`, `access` and `models`.

Each field says its default and what follows from it; `config/schema.json` and the example file are held to these
models by tests. What concerns more than one section is in `checks`.
"""

from pydantic import Field

from gateway.config.access import AuthConfig, TenantConfig
from gateway.config.models import DiscoveryConfig, ModelConfig
from gateway.config.section import Section
from gateway.config.server import (
    LimitsStoreConfig,
    LoggingConfig,
    MediaConfig,
    MetricsConfig,
    ProvenanceConfig,
    RoutingConfig,
    ServerConfig,
    StateConfig,
    TracingConfig,
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
    tracing: TracingConfig = Field(TracingConfig(), description="OpenTelemetry spans. Default: none.")
    provenance: ProvenanceConfig = Field(
        ProvenanceConfig(),
        description="Which model files may be loaded. Default: any, checked where a hash is known.",
    )
