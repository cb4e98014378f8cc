"""Routes for tenants and keys. Operators read, admins change; a change is in force before it is answered."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from gateway.admin.access import Admins, Operators, actor_of, answer, body_of, keybook_of, query_of, take_effect
from gateway.admin.described import refusals, takes
from gateway.api import gateway_of, principal_of
from gateway.errors import Conflict
from gateway.keybook.forms import (
    ForceQuery,
    KeyChange,
    KeyForm,
    KeyQuery,
    RotateForm,
    TenantChange,
    TenantForm,
    read,
)

router = APIRouter(responses=refusals(400, 403, 503))

_SENT = refusals(404, 408, 409, 413)
_TAKEN = refusals(404, 409)


# --- tenants
@router.get("/tenants", summary="Every tenant of the configuration and the database", dependencies=[Operators])
async def tenants(request: Request) -> Response:
    return answer(await keybook_of(request).tenants())


@router.post(
    "/tenants", summary="Create a tenant", dependencies=[Admins], responses=_SENT, openapi_extra=takes(TenantForm)
)
async def create_tenant(request: Request) -> Response:
    book = keybook_of(request)
    document = await book.create_tenant(await body_of(request), actor_of(request))
    await take_effect(request)
    return answer(document)


@router.get("/tenants/{name}", summary="One tenant", dependencies=[Operators], responses=refusals(404))
async def tenant(request: Request, name: str) -> Response:
    return answer(await keybook_of(request).tenant(name))


@router.patch(
    "/tenants/{name}",
    summary="Change a tenant; what is left out stays",
    dependencies=[Admins],
    responses=_SENT,
    openapi_extra=takes(TenantChange),
)
async def update_tenant(request: Request, name: str) -> Response:
    book = keybook_of(request)
    document = await book.update_tenant(name, await body_of(request), actor_of(request))
    await take_effect(request)
    return answer(document)


@router.delete(
    "/tenants/{name}",
    summary="Delete a tenant and revoke its keys",
    dependencies=[Admins],
    responses=_TAKEN,
    openapi_extra=takes(query=ForceQuery),
)
async def delete_tenant(request: Request, name: str) -> Response:
    of_file = gateway_of(request).snapshot.people.file_tenants
    if name == principal_of(request).tenant.name and name not in of_file:  # those cannot be deleted here anyway
        _insist(request, "This is the tenant of the key you are using.")
    document = await keybook_of(request).delete_tenant(name, actor_of(request))
    await take_effect(request)
    return answer(document)


# --- keys
@router.get("/keys", summary="Keys, without what they are made of", dependencies=[Operators],
            openapi_extra=takes(query=KeyQuery))  # fmt: skip
async def keys(request: Request) -> Response:
    return answer(await keybook_of(request).keys(query_of(request)))


@router.post(
    "/keys",
    summary="Create a key; only this answer shows it",
    dependencies=[Admins],
    responses=_SENT,
    openapi_extra=takes(KeyForm),
)
async def create_key(request: Request) -> Response:
    book = keybook_of(request)
    document = await book.create_key(await body_of(request), actor_of(request))
    await take_effect(request)
    return answer(document)


@router.post(
    "/keys/{identity:path}/rotate",
    summary="Replace a key; only this answer shows the new one",
    dependencies=[Admins],
    responses=_SENT,
    openapi_extra=takes(RotateForm),
)
async def rotate_key(request: Request, identity: str) -> Response:
    book = keybook_of(request)
    document = await book.rotate_key(identity, await body_of(request), actor_of(request))
    await take_effect(request)
    return answer(document)


@router.get("/keys/{identity:path}", summary="One key", dependencies=[Operators], responses=refusals(404))
async def key(request: Request, identity: str) -> Response:
    return answer(await keybook_of(request).key(identity))


@router.patch(
    "/keys/{identity:path}",
    summary="Change a key; what is left out stays",
    dependencies=[Admins],
    responses=_SENT,
    openapi_extra=takes(KeyChange, ForceQuery),
)
async def update_key(request: Request, identity: str) -> Response:
    book, body = keybook_of(request), await body_of(request)
    if identity == principal_of(request).key and body.get("role", "admin") != "admin":
        _insist(request, "This takes the admin role from the key you are using.")
    document = await book.update_key(identity, body, actor_of(request))
    await take_effect(request)
    return answer(document)


@router.delete(
    "/keys/{identity:path}",
    summary="Revoke a key for good",
    dependencies=[Admins],
    responses=_TAKEN,
    openapi_extra=takes(query=ForceQuery),
)
async def revoke_key(request: Request, identity: str) -> Response:
    if identity == principal_of(request).key:
        _insist(request, "This is the key you are using.")
    document = await keybook_of(request).revoke_key(identity, actor_of(request))
    await take_effect(request)
    return answer(document)


def _insist(request: Request, what: str) -> None:
    """Raises: Conflict when somebody is about to lock themselves out and has not said that this is what they want."""
    if not read(ForceQuery, query_of(request)).force:
        raise Conflict(f"{what} Use another, or add ?force=true.", code="own_access")
