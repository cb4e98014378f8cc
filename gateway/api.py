"""Every route that is not hot: models, health, metrics, documentation. FastAPI behind one gatekeeper.

The inference routes are described here for the documentation only; the edge takes them before FastAPI sees them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import HTMLResponse
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import errors, metrics
from gateway.addresses import is_inside
from gateway.catalog import resolve, visible
from gateway.docs_page import documented_operations, render, with_refusals
from gateway.edge.cycle import new_request_id
from gateway.edge.routes import HOT_ROUTES
from gateway.errors import Forbidden, GatewayError, Internal, MethodNotAllowed, NotFound
from gateway.replica_state import Health
from gateway.state import Gateway, caller_address
from gateway.types import Model, Principal
from gateway.workers.peers import Peers

OPEN_PATHS = frozenset({"/health", "/ready"})
DOCUMENTATION = frozenset({"/docs", "/openapi.json"})
PROMETHEUS = "/metrics"


class Gatekeeper:
    """Lets in who has a key, and others only to what the operator has opened. Plain ASGI: bodies pass untouched."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app, self._gateway = app, gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope["state"]
        state["request_id"] = request_id = new_request_id()

        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
                if "cors" in state:
                    message["headers"] += state["cors"]
            await send(message)

        if "preflight" in state:  # it bears no key, and is told nothing but what the operator allows
            await tagged({"type": "http.response.start", "status": 204, "headers": state["preflight"]})
            await send({"type": "http.response.body"})
            return
        try:
            await self._admit(scope)
        except GatewayError as error:
            await respond(error)(scope, receive, tagged)
            return
        await self._app(scope, receive, tagged)

    async def _admit(self, scope: Scope) -> None:
        """Raises: AuthError, Forbidden."""
        now, path = self._gateway.snapshot, scope["path"]
        if path in OPEN_PATHS or (path in DOCUMENTATION and now.config.server.public_docs):
            return
        visitor = Visitor(scope)
        if path == PROMETHEUS and is_inside(caller_address(visitor, now), now.metrics_networks):
            return
        principal = await self._gateway.identify(visitor, now)
        if path == PROMETHEUS and principal.role != "admin":
            raise Forbidden("Metrics need a key with the admin role, or an address listed in metrics.allow.")
        scope["state"] |= {"principal": principal, "address": str(caller_address(visitor, now) or "")}


def respond(error: GatewayError) -> Response:
    headers = {name.decode(): value.decode() for name, value in errors.headers(error)}
    return Response(errors.body(error), error.status, headers, media_type="application/json")


class Visitor:
    """The sender of a request that came through ASGI: a `state.Caller`."""

    def __init__(self, scope: Scope) -> None:
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.peer: str | None = scope["client"][0] if scope.get("client") else None
        self.certificate: tuple[str, ...] = scope["state"].get("certificate", ())


router = APIRouter()


def gateway_of(request: Request) -> Gateway:
    found: Gateway = request.app.state.gateway
    return found


def principal_of(request: Request) -> Principal:
    found: Principal = request.state.principal
    return found


@router.get("/health", tags=["operations"], summary="Whether the process is alive", openapi_extra={"security": []})
async def health() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/ready", tags=["operations"], summary="Whether a request would be served", openapi_extra={"security": []})
async def ready(request: Request, response: Response) -> dict[str, str]:
    status = readiness(gateway_of(request))
    if status != "ready":
        response.status_code = HTTPStatus.SERVICE_UNAVAILABLE
        response.headers["retry-after"] = "2"
    return {"status": status}


def readiness(gateway: Gateway) -> str:
    """`ready`, or the reason why not in a word."""
    if gateway.draining:
        return "draining"
    now = time.monotonic()
    if any(state.routable(now) and state.health is Health.UP for state in gateway.fleet):
        return "ready"
    waiting = any(state.health in (Health.UNKNOWN, Health.LOADING) for state in gateway.fleet)
    return "starting" if waiting else "unavailable"


@router.get(PROMETHEUS, tags=["operations"], summary="Prometheus metrics", response_class=Response)
async def prometheus(request: Request) -> Response:
    gateway = gateway_of(request)
    gateway.book()
    peers: Peers = request.app.state.peers
    page = await peers.page(gateway.metrics.collect())
    text, kind = metrics.page(page, request.headers.get("accept", ""))
    return Response(text, headers={"content-type": kind, "vary": "accept"})


@router.get("/v1/models", tags=["models"], summary="The models this key may use")
async def list_models(request: Request) -> dict[str, Any]:
    names = visible(principal_of(request), gateway_of(request).snapshot.models)
    return {"object": "list", "data": [model_entry(name, model, gateway_of(request)) for name, model in names]}


@router.get("/v1/models/{name:path}", tags=["models"], summary="One of them")
async def get_model(request: Request, name: str) -> dict[str, Any]:
    model = resolve(name, principal_of(request), gateway_of(request).snapshot.names)
    return model_entry(name, model, gateway_of(request))


def model_entry(name: str, model: Model, gateway: Gateway) -> dict[str, Any]:
    """OpenAI's fields, and what decides where a model can run. Models whose replicas are all down are listed too: a
    client's menu should not flicker with an engine's health, and a request then says 503."""
    cards = [state.card for state in map(gateway.fleet.of, model.replicas) if state.card is not None]
    replicas: list[Any] = [*model.replicas, *cards]  # what the operator wrote counts before what engines say
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "sekisho",
        "format": _first(entry.format for entry in replicas),
        "quantization": _first(entry.quantization for entry in replicas),
        "context_length": model.context_length or _first(entry.context_length for entry in replicas),
        "capabilities": list(model.capabilities or _first(entry.capabilities for entry in replicas) or ()),
    }


def _first(values: Iterable[Any]) -> Any:
    return next((value for value in values if value), None)


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> dict[str, Any]:
    return documented(request.app)


@router.get("/docs", include_in_schema=False, response_class=HTMLResponse)
async def docs(request: Request) -> HTMLResponse:
    return HTMLResponse(render(documented(request.app)))


def documented(app: FastAPI) -> dict[str, Any]:
    """FastAPI's description of its routes, with the hot ones added."""
    schema = app.openapi()
    if "/v1/chat/completions" not in schema["paths"]:
        schema["paths"] = documented_operations() | with_refusals(schema["paths"])
        schema["components"] = {
            **schema.get("components", {}),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        }
        schema["security"] = [{"key": []}]
    return schema


def create_app(gateway: Gateway, version: str, routers: Iterator[APIRouter] | list[APIRouter]) -> FastAPI:
    app = FastAPI(
        title="Sekisho", version=version, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    app.state.gateway = gateway
    for one in (router, *routers):
        app.include_router(one)
    app.add_middleware(Gatekeeper, gateway=gateway)

    @app.exception_handler(GatewayError)
    async def known(_: Request, error: GatewayError) -> Response:
        return respond(error)

    @app.exception_handler(HTTPException)
    async def by_framework(request: Request, error: HTTPException) -> Response:
        hot = request.scope["path"].encode() in HOT_ROUTES
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED or hot:
            answer = respond(MethodNotAllowed("This path does not take this method."))
            answer.headers["allow"] = "POST" if hot else (error.headers or {}).get("Allow", "GET")
            return answer
        return respond(NotFound("There is nothing at this path. See /docs for what there is."))

    @app.exception_handler(Exception)
    async def unknown(_: Request, error: Exception) -> Response:
        return respond(Internal())

    return app
