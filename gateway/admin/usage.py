"""Usage: sums or single requests, as JSON or CSV. Users see their own tenant's."""

from __future__ import annotations

import asyncio

import orjson
from fastapi import APIRouter, Request, Response

from gateway.admin.access import keybook_of, query_of
from gateway.admin.described import refusals, takes
from gateway.api import principal_of
from gateway.errors import Forbidden
from gateway.keybook.forms import UsageForm, read
from gateway.keybook.usage import Report
from gateway.types import Principal

router = APIRouter(responses=refusals(400, 403, 503))

_CSV = "text/csv"
_EITHER = {"application/json": {"schema": {"type": "object"}}, _CSV: {"schema": {"type": "string"}}}


@router.get(
    "/usage",
    summary="Usage of a period, in sums or single requests",
    responses={200: {"content": _EITHER}},
    response_class=Response,
    openapi_extra=takes(query=UsageForm),
)
async def usage(request: Request) -> Response:
    principal = principal_of(request)
    form = read(UsageForm, query_of(request))
    if principal.role == "user":
        report = await keybook_of(request).own_usage(form, _own(form, principal))
    else:
        report = await keybook_of(request).usage(form)
    if form.format == "csv":
        headers = {"x-sekisho-next": report.next} if report.next else {}
        return Response(await asyncio.to_thread(report.csv), headers=headers, media_type=_CSV)
    return Response(await asyncio.to_thread(_json, report), media_type="application/json")


def _own(form: UsageForm, principal: Principal) -> str:
    """The caller's tenant. Raises: Forbidden when another tenant's usage is asked for."""
    own = principal.tenant.name
    if form.where.get("tenant", own) != own:
        raise Forbidden("A key with the user role sees the usage of its own tenant only.")
    return own


def _json(report: Report) -> bytes:
    return orjson.dumps(report.document())
