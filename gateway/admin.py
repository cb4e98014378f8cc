"""Routes for operators: the fleet's state, draining, reloading."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Depends, Request

from gateway.api import gateway_of, principal_of
from gateway.config import ConfigError
from gateway.errors import BadRequest, Forbidden, NotFound
from gateway.fleet import ReplicaState

Reload = Callable[[], Awaitable[None]]


async def operators_only(request: Request) -> None:
    if principal_of(request).role not in ("operator", "admin"):
        raise Forbidden("This path needs a key with the operator or admin role.")


router = APIRouter(prefix="/admin/v1", tags=["admin"], dependencies=[Depends(operators_only)])


@router.get("/replicas", summary="Every replica and what is known of it")
async def replicas(request: Request) -> dict[str, Any]:
    now = time.monotonic()
    return {"object": "list", "data": [replica_entry(state, now) for state in gateway_of(request).fleet]}


@router.post("/replicas/{replica:path}/drain", summary="Send it no new requests; running ones finish")
async def drain(request: Request, replica: str) -> dict[str, Any]:
    return _set_draining(request, replica, True)


@router.post("/replicas/{replica:path}/undrain", summary="Send it requests again")
async def undrain(request: Request, replica: str) -> dict[str, Any]:
    return _set_draining(request, replica, False)


@router.post("/reload", summary="Read the configuration again: all of it or nothing")
async def reload(request: Request) -> dict[str, Any]:
    again: Reload = request.app.state.reload
    try:
        await again()
    except ConfigError as error:
        # Its words name files and fields of the operator's own configuration, and never values.
        raise BadRequest(f"Not reloaded, the old configuration stays: {error}", code="invalid_configuration") from None
    return {"object": "reload", "result": "success"}


def _set_draining(request: Request, replica: str, draining: bool) -> dict[str, Any]:
    for state in gateway_of(request).fleet:
        if state.replica.id == replica:
            state.draining = draining
            return replica_entry(state, time.monotonic())
    raise NotFound(f"There is no replica '{replica[:120]}'. GET /admin/v1/replicas lists them.", param="replica")


def replica_entry(state: ReplicaState, now: float) -> dict[str, Any]:
    load = state.load
    return {
        "id": state.replica.id,
        "object": "replica",
        "model": state.replica.model,
        "backend": state.replica.backend.kind,
        "format": state.replica.format,
        "address": state.replica.endpoint.unix or state.replica.endpoint.authority,
        "health": state.health,
        "detail": state.detail or None,
        "routable": state.routable(now),
        "draining": state.draining,
        "inflight": state.inflight,
        "max_inflight": state.replica.max_inflight,
        "failures_in_a_row": state.failures,
        "paused_s": round(max(0.0, state.paused_until - now), 1),
        "ttft_s": round(state.ttft, 4) if state.ttft is not None else None,
        "engine": {
            "running": load.running,
            "waiting": load.waiting,
            "kv_used": load.kv_used,
            "age_s": round(now - state.load_read_at, 1) if state.load_read_at else None,
        },
    }
