"""Administration without HTTP: checks what callers send, makes keys, keeps them in the store, answers with documents.

    moments   points in time, in and out        forms   bodies and queries
    views     records as documents              usage   reports, as JSON and CSV

The HTTP routes and the command line both work on a `Keybook`.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from gateway import keys
from gateway.errors import BadRequest, Conflict, NotFound
from gateway.keybook.forms import (
    AuditQuery,
    Change,
    KeyChange,
    KeyForm,
    KeyQuery,
    RotateForm,
    TenantChange,
    TenantForm,
    UsageForm,
    VerifyQuery,
    read,
)
from gateway.keybook.usage import Report, report
from gateway.keybook.views import entry_document, key_document, listed, public_id, tenant_document
from gateway.people import People
from gateway.records import JSON, Actor, KeyRecord, TenantRecord

if TYPE_CHECKING:
    from gateway.store import Store

NO_TENANT = "tenant_not_found"
_RIGHTS = ("role", "models", "limits", "allow_from")
_KEY_ID = re.compile(r"key_[A-Za-z0-9_-]{16}")
_FILE_OWNS = "The configuration file defines {}: change it there and reload."


class Keybook:
    """Tenants, keys, usage and audit of one database, beside the people of the configuration, who are read-only here.

    Methods take decoded JSON and return documents. They raise BadRequest (naming the field), NotFound, Conflict and
    StoreUnavailable.
    """

    def __init__(self, store: Store, people: People) -> None:
        self._store, self._people = store, people

    # --- tenants
    async def tenants(self) -> JSON:
        """Those of the configuration first. One that it defines hides one of that name in the database."""
        stored = [tenant for tenant in await self._store.tenants() if tenant.name not in self._people.file_tenants]
        return listed([tenant_document(tenant) for tenant in (*self._people.file_tenants.values(), *stored)])

    async def tenant(self, name: str) -> JSON:
        return tenant_document(await self._tenant(name))

    async def create_tenant(self, body: object, actor: Actor) -> JSON:
        form = read(TenantForm, body)
        self._not_of_file(form.name)
        wanted = TenantRecord(form.name, form.models, form.limits, form.weight, form.priority, form.tools)
        return tenant_document(await self._store.create_tenant(wanted, actor))

    async def update_tenant(self, name: str, body: object, actor: Actor) -> JSON:
        tenant = await self._changeable_tenant(name)
        changes = _changes(read(TenantChange, body))
        return tenant_document(await self._store.update_tenant(tenant.name, changes, actor))

    async def delete_tenant(self, name: str, actor: Actor) -> JSON:
        """Its keys are revoked with it."""
        tenant = await self._changeable_tenant(name)
        await self._store.delete_tenant(tenant.name, actor)
        return {"object": "tenant", "name": tenant.name, "deleted": True}

    # --- keys
    async def keys(self, query: object) -> JSON:
        """Keys of the configuration first."""
        form = read(KeyQuery, query)
        of_file = [key for key in self._people.file_keys.values() if form.tenant in (None, key.tenant)]
        stored = await self._store.keys(form.tenant, revoked=form.revoked)
        return listed(await asyncio.to_thread(lambda: [key_document(key) for key in (*of_file, *stored)]))

    async def key(self, identity: str) -> JSON:
        of_file = self._file_key(identity)
        return key_document(of_file or await self._store.key(_key_id(identity)))

    async def create_key(self, body: object, actor: Actor) -> JSON:
        """The only document besides `rotate_key`'s that holds the key itself, under "key"."""
        form = read(KeyForm, body)
        _lies_ahead(form.expires_at)
        tenant = await self._tenant(form.tenant, "tenant")
        identity, secret = new_key_id(), keys.new_key()
        wanted = KeyRecord(
            id=identity,
            tenant=tenant.name,
            name=form.name or identity,
            digest=bytes.fromhex(keys.digest(secret)),
            role=form.role,
            models=form.models,
            limits=form.limits,
            allow_from=form.allow_from,
            expires_at=form.expires_at,
        )
        self._name_is_free(wanted)
        made = await self._store.create_key(wanted, actor)
        await self._still_there(made, actor)
        return {**key_document(made), "key": secret}

    async def update_key(self, identity: str, body: object, actor: Actor) -> JSON:
        key = await self._changeable_key(identity)
        form = read(KeyChange, body)
        changes = _changes(form)
        _lies_ahead(form.expires_at)
        if "name" in changes:
            self._name_is_free(replace(key, name=form.name))
        return key_document(await self._store.update_key(key.id, changes, actor))

    async def revoke_key(self, identity: str, actor: Actor) -> JSON:
        """Revoking again changes nothing."""
        key = await self._changeable_key(identity)
        return key_document(await self._store.revoke_key(key.id, actor))

    async def rotate_key(self, identity: str, body: object, actor: Actor) -> JSON:
        """A new key in the place of an old one, which works on for the overlap. The document holds the new key."""
        key = await self._changeable_key(identity)
        form = read(RotateForm, body)
        _lies_ahead(form.expires_at)
        secret = keys.new_key()
        fresh = replace(
            key,
            id=new_key_id(),
            digest=bytes.fromhex(keys.digest(secret)),
            expires_at=form.expires_at if "expires_at" in form.model_fields_set else key.expires_at,
            created_at=None,
            last_used_at=None,
            rotated_from=key.id,
        )
        made = await self._store.rotate_key(key.id, fresh, time.time() + form.overlap, actor)
        made = await self._with_rights_of(key, made, actor)
        return {**key_document(made), "key": secret}

    # --- reports
    async def usage(self, form: UsageForm) -> Report:
        return await report(self._store, form, time.time())

    async def own_usage(self, form: UsageForm, tenant: str) -> Report:
        """What a tenant may know: its own usage, but for what another of that name used before it was made, and without
        the replica: what the fleet looks like is not for tenants."""
        stored = None if tenant in self._people.file_tenants else self._people.stored_tenants.get(tenant)
        begin = stored.created_at or 0.0 if stored is not None else 0.0
        found = await report(self._store, form.model_copy(update={"tenant": tenant}), time.time(), begin)
        return await asyncio.to_thread(found.without, "replica")

    async def audit(self, query: object) -> JSON:
        """Entries in order of their numbers; `next` is the `after` that continues the list, null at its end."""
        form = read(AuditQuery, query)
        newest_first = form.order == "desc"
        entries = await self._store.audit(after=form.after, limit=form.limit, newest_first=newest_first)
        more = len(entries) == form.limit and (not newest_first or entries[-1].seq > 1)
        return {**listed([entry_document(entry) for entry in entries]), "next": entries[-1].seq if more else None}

    async def verify_audit(self, query: object) -> JSON:
        verdict = await self._store.verify_audit(read(VerifyQuery, query).expect)
        return {
            "object": "audit.verdict",
            "ok": verdict.ok,
            "entries": verdict.entries,
            "head": verdict.head,
            "problem": verdict.problem or None,
            "broken_at": verdict.broken_at,
        }

    # --- what the configuration has to say
    async def _tenant(self, name: str, param: str = "name") -> TenantRecord:
        """Raises: NotFound, without repeating what was sent: it may be a key in the wrong place."""
        known = self._people.file_tenants.get(name)
        stored = () if known else await self._store.tenants()
        found = known or next((tenant for tenant in stored if tenant.name == name), None)
        if found is None:
            raise NotFound("There is no tenant of that name. Create it first.", param=param, code=NO_TENANT)
        return found

    async def _still_there(self, made: KeyRecord, actor: Actor) -> None:
        """A tenant may be deleted while a key of it is being made. The key must not come to life with a later tenant of
        that name."""
        try:
            await self._tenant(made.tenant, "tenant")
        except NotFound:
            await self._store.revoke_key(made.id, actor)
            raise

    async def _with_rights_of(self, old: KeyRecord, made: KeyRecord, actor: Actor) -> KeyRecord:
        """The old key may be changed while its successor is being made. A right that it has lost must not live on."""
        now = await self._store.key(old.id)
        lost = {name: getattr(now, name) for name in _RIGHTS if getattr(now, name) != getattr(old, name)}
        return await self._store.update_key(made.id, lost, actor) if lost else made

    async def _changeable_tenant(self, name: str) -> TenantRecord:
        """Raises: NotFound; Conflict when the configuration owns it."""
        self._not_of_file(name)
        return await self._tenant(name)

    async def _changeable_key(self, identity: str) -> KeyRecord:
        """A key, revoked or not. Raises: NotFound; Conflict when the configuration owns it."""
        if self._file_key(identity) is not None:
            raise Conflict(_FILE_OWNS.format(f"the key '{identity}'"))
        return await self._store.key(_key_id(identity))

    def _file_key(self, identity: str) -> KeyRecord | None:
        return next((key for key in self._people.file_keys.values() if public_id(key) == identity), None)

    def _not_of_file(self, name: str) -> None:
        if name in self._people.file_tenants:
            raise Conflict(_FILE_OWNS.format(f"the tenant '{name}'"), param="name")

    def _name_is_free(self, key: KeyRecord) -> None:
        if self._file_key(f"{key.tenant}/{key.name}") is not None:
            raise Conflict(f"The configuration has a key of that name in '{key.tenant}': choose another.", param="name")


def new_key_id() -> str:
    return "key_" + secrets.token_urlsafe(12)


def _key_id(identity: str) -> str:
    """Raises: NotFound, without repeating what was sent: people paste keys where ids belong."""
    if not _KEY_ID.fullmatch(identity):
        pasted = identity.startswith("sk-")
        hint = "That is a key itself: write its id." if pasted else "List the keys to see their ids."
        raise NotFound(f"There is no such key. {hint}", param="id")
    return identity


def _changes(form: Change) -> dict[str, object]:
    """Raises: BadRequest when there are none."""
    if not (given := form.given()):
        raise BadRequest("Nothing to change: name at least one field.", code="missing_required_parameter")
    return given


def _lies_ahead(moment: float | None) -> None:
    if moment is not None and moment <= time.time():
        raise BadRequest("'expires_at': that is past already.", param="expires_at", code="invalid_value")
