"""The shape of the configuration file, part two: who is let in, and what they may use."""

from typing import Literal, Self

from pydantic import Field, model_validator

from gateway.config.section import Section
from gateway.config.values import (
    Count,
    EngineText,
    FilePath,
    Glob,
    KeySha256,
    Moment,
    NetworkField,
    TenantName,
    WebUrl,
    Weight,
    Whole,
)
from gateway.units import Budgets, Rates, Seconds, WrongValue

Role = Literal["user", "operator", "admin"]
Algorithm = Literal["RS256", "RS384", "RS512", "ES256", "ES384", "ES512"]


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


class ToolsConfig(Section):
    """Which tools a tenant's requests may offer to a model, and which of them an answer may call."""

    allow: tuple[Glob, ...] = Field(
        ("*",),
        max_length=1000,
        description=(
            "Names of functions and custom tools, as globs; a tool of another type, such as web_search, goes by its "
            'type. Default ["*"]: every one; [] is none.'
        ),
    )
    deny: tuple[Glob, ...] = Field((), max_length=1000, description="Such names, stronger than `allow`. Default none.")
    types: tuple[Glob, ...] = Field(
        ("*",),
        max_length=1000,
        description='Types of tools, such as function or web_search. Default ["*"]: every one.',
    )
    on_violation: Literal["refuse", "strip"] = Field(
        "refuse",
        description=(
            "What is not allowed: refuse (default) is a 403, or ends the answer with an error; strip takes the tool "
            "out of the request, and the call out of the answer."
        ),
    )


class TenantConfig(Section):
    """Who pays: a group of keys with shared limits."""

    name: TenantName = Field(description="Name in usage, metrics and tokens. Required and unique.")
    models: tuple[Glob, ...] = Field(
        ("*",),
        description='Public names the tenant may use, as globs. Default ["*"]: every model; [] is none.',
    )
    limits: LimitsConfig = Field(LimitsConfig(), description="Limits of all its keys together. Default: none.")
    tools: ToolsConfig = Field(ToolsConfig(), description="Tools its requests may use. Default: all.")
    weight: Weight = Field(1.0, description="Share of a model's queue when tenants contend for it. Default 1.")
    priority: Whole = Field(0, ge=-1000, le=1000, description="Higher is served first, before any share. Default 0.")
    keys: tuple[KeyConfig, ...] = Field(
        (),
        description="Keys of the tenant. Default none here: the database may hold some.",
    )
