"""Tenants and keys as rows, and as the JSON that the audit log keeps of them."""

from __future__ import annotations

import ipaddress
import json
from functools import lru_cache
from typing import Any

from sqlalchemy import Row

from gateway.config.access import LimitsConfig, ToolsConfig
from gateway.records import JSON, KeyRecord, TenantRecord
from gateway.store.chain import canonical
from gateway.types import Network


def tenant_values(record: TenantRecord) -> dict[str, Any]:
    """Columns of a tenant, but for `changed`."""
    return {
        "name": record.name,
        "models": canonical(record.models),
        "limits": canonical(_limits_json(record.limits)),
        "weight": record.weight,
        "priority": record.priority,
        "created_at": record.created_at,
        "deleted_at": record.deleted_at,
        "tools": canonical(tools) if (tools := _tools_json(record.tools)) else None,
    }


def tenant_record(row: Row[Any]) -> TenantRecord:
    return TenantRecord(
        name=row.name,
        models=_models(row.models),
        limits=_limits(row.limits),
        weight=row.weight,
        priority=row.priority,
        tools=ToolsConfig() if row.tools is None else _tools(row.tools),
        created_at=row.created_at,
        deleted_at=row.deleted_at,
    )


def tenant_json(record: TenantRecord) -> JSON:
    limits, tools = _limits_json(record.limits), _tools_json(record.tools)
    return tenant_values(record) | {"models": record.models, "limits": limits, "tools": tools}


def key_values(record: KeyRecord) -> dict[str, Any]:
    """Columns of a key, but for `changed`."""
    return {
        "id": record.id,
        "tenant": record.tenant,
        "name": record.name,
        "digest": record.digest,
        "role": record.role,
        "models": None if record.models is None else canonical(record.models),
        "limits": canonical(_limits_json(record.limits)),
        "allow_from": canonical(_networks_json(record.allow_from)),
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "revoked_at": record.revoked_at,
        "rotated_from": record.rotated_from,
    }


def key_record(row: Row[Any]) -> KeyRecord:
    return KeyRecord(
        id=row.id,
        tenant=row.tenant,
        name=row.name,
        digest=row.digest,
        role=row.role,
        models=None if row.models is None else _models(row.models),
        limits=_limits(row.limits),
        allow_from=_networks(row.allow_from),
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
        rotated_from=row.rotated_from,
        last_used_at=row.last_used_at,
    )


def key_json(record: KeyRecord) -> JSON:
    """Without the digest: the log is for more eyes than the keys."""
    columns = key_values(record)
    del columns["digest"]
    limits, networks = _limits_json(record.limits), _networks_json(record.allow_from)
    return columns | {"models": record.models, "limits": limits, "allow_from": networks}


def _limits_json(limits: LimitsConfig) -> JSON:
    return limits.model_dump(mode="json", exclude_defaults=True)


def _tools_json(tools: ToolsConfig) -> JSON:
    return tools.model_dump(mode="json", exclude_defaults=True)


def _networks_json(networks: tuple[Network, ...]) -> list[str]:
    return [str(network) for network in networks]


# Thousands of keys share a few texts, and what is made of them is never written to.
@lru_cache(maxsize=4096)
def _models(text: str) -> tuple[str, ...]:
    return tuple(json.loads(text))


@lru_cache(maxsize=4096)
def _limits(text: str) -> LimitsConfig:
    return LimitsConfig.model_validate_json(text)


@lru_cache(maxsize=4096)
def _tools(text: str) -> ToolsConfig:
    return ToolsConfig.model_validate_json(text)


@lru_cache(maxsize=4096)
def _networks(text: str) -> tuple[Network, ...]:
    return tuple(ipaddress.ip_network(network) for network in json.loads(text))
