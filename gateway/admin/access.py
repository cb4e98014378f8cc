"""What every route of the administration needs: who may, what was sent, where it is kept, how it is answered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from fastapi import Depends, Request, Response
from starlette.requests import ClientDisconnect

from gateway import jsonscan
from gateway.api import gateway_of, principal_of
from gateway.errors import (
    BadRequest,
    BodyTooLarge,
    ClientGone,
    Forbidden,
    GatewayError,
    InvalidBody,
    RequestTimeout,
    StoreUnavailable,
)
from gateway.keybook import Keybook
from gateway.keybook.forms import shown_name
from gateway.records import JSON, Actor
from gateway.store import Store

LARGEST_BODY = 256 << 10  # bytes

log = logging.getLogger("sekisho.admin")


# --- who may
async def operators_only(request: Request) -> None:
    if principal_of(request).role not in ("operator", "admin"):
        raise Forbidden("This path needs a key with the operator or admin role.")


async def admins_only(request: Request) -> None:
    if principal_of(request).role != "admin":
        raise Forbidden("This needs a key with the admin role.")


Operators, Admins = Depends(operators_only), Depends(admins_only)


def actor_of(request: Request) -> Actor:
    principal = principal_of(request)
    return Actor(f"{principal.tenant.name}/{principal.key}", request.state.address)


# --- what was sent
async def body_of(request: Request) -> JSON:
    """The body as an object; an empty body is an empty one.

    Raises: InvalidBody, BodyTooLarge, RequestTimeout, ClientGone.
    """
    raw = await _read(request)
    try:
        body = orjson.loads(raw) if raw.strip() else {}
    except orjson.JSONDecodeError as error:
        raise InvalidBody(f"The body is not valid UTF-8 JSON: {error}.") from None
    if not isinstance(body, dict):
        raise InvalidBody("The body has to be a JSON object.")
    if body and len(jsonscan.members(raw)) != len(body):
        raise InvalidBody("The body has two equal top-level keys; which of them counts would be a guess.")
    return body


async def _read(request: Request) -> bytes:
    raw = bytearray()
    try:
        async with asyncio.timeout(gateway_of(request).snapshot.config.server.body_timeout):
            async for part in request.stream():
                raw += part
                if len(raw) > LARGEST_BODY:
                    raise BodyTooLarge(f"Bodies of the administration may have {LARGEST_BODY} bytes.")
    except TimeoutError:
        raise RequestTimeout("The body did not arrive in time.") from None
    except ClientDisconnect:
        raise ClientGone from None
    return bytes(raw)


def query_of(request: Request) -> dict[str, str]:
    """Raises: BadRequest for a parameter that is given twice."""
    pairs = request.query_params.multi_items()
    found: dict[str, str] = {}
    for name, value in pairs:
        if name in found:
            raise BadRequest("A parameter is given twice.", param=shown_name(name), code="invalid_value")
        found[name] = value
    return found


# --- where it is kept
def store_of(request: Request) -> Store:
    """Raises: StoreUnavailable."""
    store: Store | None = request.app.state.stores.directory.store
    if store is not None:
        return store
    if gateway_of(request).snapshot.config.state.database is None:
        raise StoreUnavailable("This gateway has no database: set state.database in its configuration.")
    raise StoreUnavailable("The database cannot be reached. Try again.", retry_after=2)


def keybook_of(request: Request) -> Keybook:
    """Raises: StoreUnavailable."""
    return Keybook(store_of(request), gateway_of(request).snapshot.people)


async def take_effect(request: Request) -> None:
    """A change that is stored comes into force here before it is answered. What was stored stays stored even if the
    database goes away at this moment: the answer may hold a key that is shown only once."""
    refresh: Callable[[], Awaitable[None]] = request.app.state.stores.refresh
    try:
        await refresh()
    except GatewayError as error:
        log.warning("a change is stored and will be in force when the database answers again: %s", error.message)


async def note(request: Request, action: str, target: str, before: JSON | None, after: JSON | None) -> None:
    """Puts what has happened, and is no change of the database, into the audit trail or else into the log."""
    await request.app.state.stores.note(action, actor_of(request), target, before, after)


# --- how it is answered
def answer(document: Mapping[str, Any]) -> Response:
    """Not left to FastAPI, which takes long for long lists."""
    return Response(orjson.dumps(document), media_type="application/json")
