"""Tenants and keys of the configuration and of the database, compiled into what authentication looks up.

The configuration wins: a tenant that it defines hides one of the same name in the database, whose keys it keeps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType

from gateway.config.access import KeyConfig, LimitsConfig, TenantConfig
from gateway.records import Changes, KeyRecord, TenantRecord
from gateway.tools import compile_policy
from gateway.types import Limit, Limits, Principal, Tenant


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """What a tenant's callers share."""

    tenant: Tenant
    models: tuple[str, ...]
    limits: Limits


@dataclass(frozen=True, slots=True)
class People:
    """Everybody who may call, at one moment. Never written to after it was made."""

    keys: Mapping[bytes, Principal] = field(default_factory=dict, repr=False)  # SHA-256 of the whole key -> who it is
    tenants: Mapping[str, TenantPolicy] = field(default_factory=dict, repr=False)
    file_tenants: Mapping[str, TenantRecord] = field(default_factory=dict, repr=False)
    file_keys: Mapping[bytes, KeyRecord] = field(default_factory=dict, repr=False)  # by digest
    stored_tenants: Mapping[str, TenantRecord] = field(default_factory=dict, repr=False)
    stored_keys: Mapping[str, KeyRecord] = field(default_factory=dict, repr=False)  # by id

    def with_file(self, tenants: Iterable[TenantConfig]) -> People:
        """With another configuration. Everything is compiled anew: models and limits may have changed."""
        entries = list(tenants)
        file_tenants = {entry.name: _tenant_record(entry) for entry in entries}
        file_keys = {key.digest: key for entry in entries for key in _key_records(entry)}
        policies = {name: _policy(record) for name, record in {**self.stored_tenants, **file_tenants}.items()}
        keys = dict(_principals([*self.stored_keys.values(), *file_keys.values()], policies))
        return People(
            MappingProxyType(keys),
            MappingProxyType(policies),
            file_tenants,
            file_keys,
            self.stored_tenants,
            self.stored_keys,
        )

    def with_changes(self, changes: Changes) -> People:
        """With what has changed in the database. Only those concerned are compiled anew."""
        stored_tenants, stored_keys = dict(self.stored_tenants), dict(self.stored_keys)
        policies, keys = dict(self.tenants), dict(self.keys)
        concerned = {key.id for key in changes.keys}
        touched = {tenant.name for tenant in changes.tenants} - self.file_tenants.keys()
        concerned.update(key.id for key in stored_keys.values() if touched and key.tenant in touched)
        gone = {stored_keys[identity].digest for identity in concerned & stored_keys.keys()}
        for digest in gone:
            keys.pop(digest, None)
        for tenant in changes.tenants:
            stored_tenants.pop(tenant.name, None)
            if tenant.deleted_at is None:
                stored_tenants[tenant.name] = tenant
        for key in changes.keys:
            stored_keys.pop(key.id, None)
            if key.revoked_at is None:
                stored_keys[key.id] = key
        for name in touched:
            policies.pop(name, None)
            if name in stored_tenants:
                policies[name] = _policy(stored_tenants[name])
        fresh = [stored_keys[identity] for identity in concerned & stored_keys.keys()]
        # The file's own keys once more: one of the database with the same digest neither replaces nor removes them.
        fresh += [self.file_keys[digest] for digest in gone.union(key.digest for key in fresh) & self.file_keys.keys()]
        keys.update(_principals(fresh, policies))
        return People(
            MappingProxyType(keys),
            MappingProxyType(policies),
            self.file_tenants,
            self.file_keys,
            stored_tenants,
            stored_keys,
        )


def _principals(
    records: Iterable[KeyRecord], policies: Mapping[str, TenantPolicy]
) -> Iterator[tuple[bytes, Principal]]:
    """Callers by digest. Keys whose tenant is gone are nobody's."""
    for key in records:
        policy = policies.get(key.tenant)
        if policy is not None:
            yield key.digest, _principal(key, policy)


def _principal(key: KeyRecord, policy: TenantPolicy) -> Principal:
    own = compile_limits(key.limits, "key", f"{key.tenant}/{key.id}")
    return Principal(
        tenant=policy.tenant,
        key=key.id,
        role=key.role,
        models=policy.models,
        key_models=key.models,
        limits=policy.limits + own if own else policy.limits,
        expires=key.expires_at,
        digest=key.digest,
        networks=key.allow_from,
    )


def member(
    policy: TenantPolicy, name: str, role: str, models: tuple[str, ...] | None, expires: float | None, digest: bytes
) -> Principal:
    """A caller of a tenant who has no key: the subject of a token or certificate, called `name` in logs."""
    return Principal(policy.tenant, name, role, policy.models, models, policy.limits, expires, digest)


def _policy(record: TenantRecord) -> TenantPolicy:
    salt = hashlib.blake2b(record.name.encode(), key=b"sekisho prefix cache", digest_size=16).hexdigest()
    tenant = Tenant(record.name, record.weight, record.priority, salt, compile_policy(record.tools))
    return TenantPolicy(tenant, record.models, compile_limits(record.limits, "tenant", record.name))


def compile_limits(given: LimitsConfig, scope: str, name: str) -> Limits:
    """The counters are named after their owner and window, so a reload finds them again."""
    owner = f"{scope}:{name}"
    windows = [
        (f"{owner}:{unit}/{rate.seconds}", Limit(rate.count, rate.seconds, unit, scope))
        for unit, rates in (("requests", given.requests), ("tokens", given.tokens))
        for rate in rates
    ]
    budgets = [
        (f"{owner}:budget/{one.period}", Limit(one.count, 86400, "tokens", scope, one.period))
        for one in given.token_budget
    ]
    return Limits(
        requests=tuple(pair for pair in windows if pair[1].unit == "requests"),
        tokens=(*(pair for pair in windows if pair[1].unit == "tokens"), *budgets),
        concurrency=((owner, given.concurrency),) if given.concurrency is not None else (),
    )


# --- the configuration's tenants as records
def _tenant_record(entry: TenantConfig) -> TenantRecord:
    return TenantRecord(
        entry.name, entry.models, entry.limits, entry.weight, entry.priority, entry.tools, source="file"
    )


def _key_records(entry: TenantConfig) -> Iterator[KeyRecord]:
    for key in entry.keys:
        yield KeyRecord(
            id=key.name,
            tenant=entry.name,
            name=key.name,
            digest=bytes.fromhex(key.sha256),
            role=key.role,
            models=_key_models(key),
            limits=key.limits,
            allow_from=key.allow_from,
            expires_at=_seconds(key.expires),
            source="file",
        )


def _key_models(key: KeyConfig) -> tuple[str, ...] | None:
    return tuple(key.models) if "models" in key.model_fields_set else None


def _seconds(moment: datetime | None) -> float | None:
    return moment.timestamp() if moment is not None else None
