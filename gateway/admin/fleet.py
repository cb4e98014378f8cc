"""Routes for the fleet: models, replicas and their state, draining, reloading."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from gateway.admin.access import Operators, answer, note
from gateway.api import gateway_of
from gateway.config import ConfigError, ModelConfig
from gateway.errors import BadRequest, NotFound
from gateway.keybook.views import limits_document, listed
from gateway.replica_state import ReplicaState
from gateway.state import Gateway
from gateway.types import Model
from gateway.workers.peers import Peers

router = APIRouter(dependencies=[Operators])


@router.get("/models", summary="Every public name, its policy and its replicas")
async def models(request: Request) -> Response:
    gateway, now = gateway_of(request), time.monotonic()
    configured = {entry.name: entry for entry in gateway.snapshot.config.models}
    found = gateway.snapshot.models.values()
    return answer(listed([model_entry(model, configured[model.name], gateway, now) for model in found]))


@router.get("/replicas", summary="Every replica and what is known of it")
async def replicas(request: Request) -> Response:
    gateway = gateway_of(request)
    entries = together(replica_entries(gateway), await peers_of(request).replicas())
    return answer(listed(entries) | {"retries_left": round(gateway.retries.left, 1)})


@router.post("/replicas/{replica:path}/drain", summary="Send it no new requests; running ones finish")
async def drain(request: Request, replica: str) -> Response:
    return await _set_draining(request, replica, True)


@router.post("/replicas/{replica:path}/undrain", summary="Send it requests again")
async def undrain(request: Request, replica: str) -> Response:
    return await _set_draining(request, replica, False)


@router.post("/reload", summary="Read the configuration again: all of it or nothing")
async def reload(request: Request) -> Response:
    try:
        await peers_of(request).reload()
    except ConfigError as error:
        # Its words name files and fields of the operator's own configuration, and never values.
        raise BadRequest(f"Not reloaded, the old configuration stays: {error}", code="invalid_configuration") from None
    await note(request, "config.reload", "configuration", None, None)
    return answer({"object": "reload", "result": "success"})


async def _set_draining(request: Request, replica: str, draining: bool) -> Response:
    known = gateway_of(request).fleet.named(replica)
    if known is None:
        raise NotFound(f"There is no replica '{replica[:120]}'. GET /admin/v1/replicas lists them.", param="replica")
    before = known.draining
    known.set_draining(draining, time.monotonic())
    await peers_of(request).set_draining(replica, draining)
    action = "replica.drain" if draining else "replica.undrain"
    await note(request, action, replica, {"draining": before}, {"draining": draining})
    return answer(replica_entry(known, time.monotonic()))


def peers_of(request: Request) -> Peers:
    found: Peers = request.app.state.peers
    return found


def replica_entries(gateway: Gateway) -> list[dict[str, Any]]:
    now = time.monotonic()
    return [replica_entry(state, now) for state in gateway.fleet]


def together(own: list[dict[str, Any]], others: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What all workers have open at each replica; the rest is this worker's own view of it."""
    for entry in own:
        entry["inflight"] += sum(one["inflight"] for page in others for one in page if one["id"] == entry["id"])
    return own


def model_entry(model: Model, configured: ModelConfig, gateway: Gateway, now: float) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "aliases": list(model.aliases),
        "policy": model.policy,
        "format_preference": list(model.format_preference),
        "fallbacks": list(model.fallbacks),
        "limits": limits_document(configured.limits),
        "queue": configured.queue.model_dump(mode="json"),
        "max_tokens_default": model.max_tokens_default,
        "context_length": model.context_length,
        "capabilities": list(model.capabilities),
        "replicas": [replica_entry(gateway.fleet.of(replica), now) for replica in model.replicas],
    }


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
        "routable": state.routable(now) and state.has_room(),
        "reason": state.reason(now),
        "draining": state.draining,
        "inflight": state.inflight,
        "max_inflight": state.replica.max_inflight,
        "breaker": breaker(state, now),
        "failures_in_a_row": state.failures,
        "failing": round(state.failing, 3),
        "paused_s": round(max(0.0, state.paused_until - now), 1),
        "slow_start_s": round(max(0.0, state.slow_until - now), 1),
        "expected_wait_s": round(state.wait, 6),
        "service_s": rounded(state.service),
        "ttft_s": rounded(state.ttft),
        "tpot_s": rounded(state.tpot),
        "engine": {
            "running": load.running,
            "waiting": load.waiting,
            "kv_used": load.kv_used,
            "prefix_hits": rounded(load.prefix_hits),
            "age_s": round(now - state.load_read_at, 1) if state.load_read_at else None,
        },
    }


def breaker(state: ReplicaState, now: float) -> str:
    """closed: failures are only counted; open: it gets nothing; trial: the next request, or one that runs, decides."""
    if not state.broken:
        return "closed"
    return "trial" if state.trying or now >= state.paused_until else "open"


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
