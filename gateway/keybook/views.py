"""Records of the database as the JSON documents that people and programs see. No digest is ever among it."""

from __future__ import annotations

from dataclasses import fields

from gateway.config.access import LimitsConfig
from gateway.keybook.moments import iso, iso_or_none
from gateway.records import JSON, AuditEntry, KeyRecord, TenantRecord

FILE = "file"  # the `source` of what the configuration defines


def tenant_document(tenant: TenantRecord) -> JSON:
    return {
        "object": "tenant",
        "name": tenant.name,
        "models": list(tenant.models),
        "limits": limits_document(tenant.limits),
        "weight": tenant.weight,
        "priority": tenant.priority,
        "tools": tenant.tools.model_dump(mode="json"),
        "created_at": iso_or_none(tenant.created_at),
        "source": tenant.source,
    }


def key_document(key: KeyRecord) -> JSON:
    return {
        "id": public_id(key),
        "object": "key",
        "tenant": key.tenant,
        "name": key.name,
        "role": key.role,
        "models": None if key.models is None else list(key.models),
        "limits": limits_document(key.limits),
        "allow_from": [str(network) for network in key.allow_from],
        "created_at": iso_or_none(key.created_at),
        "expires_at": iso_or_none(key.expires_at),
        "revoked_at": iso_or_none(key.revoked_at),
        "rotated_from": key.rotated_from,
        "last_used_at": iso_or_none(key.last_used_at),
        "source": key.source,
    }


def public_id(key: KeyRecord) -> str:
    """Keys of the configuration have names that only their tenant makes unique."""
    return f"{key.tenant}/{key.name}" if key.source == FILE else key.id


def limits_document(limits: LimitsConfig) -> JSON:
    """As the configuration writes them; a body may hold the same."""
    return limits.model_dump(mode="json")


def entry_document(entry: AuditEntry) -> JSON:
    plain = {field.name: getattr(entry, field.name) for field in fields(entry)}
    return {"object": "audit.entry", **plain, "time": iso(entry.time, "milliseconds")}


def listed(documents: list[JSON]) -> JSON:
    return {"object": "list", "data": documents}
