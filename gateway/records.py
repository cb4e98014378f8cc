"""What the database keeps, as plain values: tenants, keys, usage, audit. The store's language, without SQL.

Moments are Unix seconds, None = never. Limits and tools are kept as the configuration writes them
(`LimitsConfig`, `ToolsConfig`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gateway.config.access import LimitsConfig, ToolsConfig
from gateway.types import Network

JSON = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TenantRecord:
    """Who pays."""

    name: str
    models: tuple[str, ...] = ("*",)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    weight: float = 1.0
    priority: int = 0
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    created_at: float | None = None
    deleted_at: float | None = None
    source: str = "database"  # or "file": defined in the configuration, read-only here


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """One key, known only by its digest."""

    id: str  # what logs, usage and audit call it; for keys of the file their name
    tenant: str
    name: str
    digest: bytes = field(repr=False)  # SHA-256 of the whole key, 32 bytes
    role: str = "user"
    models: tuple[str, ...] | None = None  # None = all of the tenant's
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    allow_from: tuple[Network, ...] = ()  # empty = from anywhere
    created_at: float | None = None
    expires_at: float | None = None
    revoked_at: float | None = None
    rotated_from: str | None = None  # id of the key that it replaces
    last_used_at: float | None = None
    source: str = "database"


class Changes(NamedTuple):
    """What has changed in the database since a version. Deleted tenants and revoked keys are among it."""

    version: int
    tenants: Sequence[TenantRecord]
    keys: Sequence[KeyRecord]


class Mark(NamedTuple):
    """Up to where somebody knows a database."""

    version: int  # of the last change to tenants or keys
    entries: int  # of the audit trail, which tells two histories with equal versions apart
    head: str  # hash of the last of them


class News(NamedTuple):
    """What a database holds beyond a mark."""

    mark: Mark
    changes: Changes
    whole: bool  # they are all that lives: what was known before counts no more


@dataclass(frozen=True, slots=True)
class Actor:
    """Who makes an administrative change."""

    name: str  # tenant/key id of the caller, `cli:USER`, or `system:...`
    address: str = ""  # where the caller was, empty when on this machine


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One administrative change. `hash` covers all other fields and the hash of the entry before."""

    seq: int  # 1, 2, 3 ... without gaps
    time: float
    actor: str
    address: str
    action: str  # tenant.create, tenant.update, tenant.delete, key.create, key.update, key.rotate, key.revoke, ...
    target: str  # the tenant's name, the key's id, the replica's id
    before: JSON | None
    after: JSON | None
    previous: str  # hash of entry seq - 1; 64 zeros for the first
    hash: str


class UsageRow(NamedTuple):
    """One finished request. The order of the fields is the order of the columns, of the spool and of the CSV."""

    id: str  # unique over all gateways and restarts: a row that is stored twice counts once
    time: float  # when it ended
    request_id: str
    tenant: str
    key: str
    model: str  # public name; "unknown" when none was resolved
    asked: str  # the name the client used: an alias or a variant; empty when it is the model's own
    replica: str
    operation: str
    stream: int  # 0 or 1
    status: int
    code: str  # of the error, empty when it went well
    attempts: int
    prompt: int  # tokens, cached ones included
    cached: int
    completion: int  # tokens, reasoning included
    reasoning: int
    source: str  # "engine", "estimate", or empty when nothing was used
    ttft_ms: float | None
    duration_ms: float


USAGE_GROUPS = ("tenant", "key", "model", "operation", "status", "hour", "day", "month")


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """Which usage to add up. `since` is included, `until` is not."""

    since: float
    until: float
    group_by: tuple[str, ...] = ()  # of USAGE_GROUPS; empty = one total
    where: Mapping[str, str] = field(default_factory=dict)  # tenant, key, model, operation -> exact value
