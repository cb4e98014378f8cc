"""Routes for the audit trail: who changed what, and whether the record of it is whole."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from gateway.admin.access import Operators, answer, keybook_of, query_of
from gateway.admin.described import refusals, takes
from gateway.keybook.forms import AuditQuery, VerifyQuery

router = APIRouter(responses=refusals(400, 403, 503), dependencies=[Operators])


@router.get("/audit", summary="Administrative changes", openapi_extra=takes(query=AuditQuery))
async def audit(request: Request) -> Response:
    return answer(await keybook_of(request).audit(query_of(request)))


@router.get("/audit/verify", summary="Whether the trail is unbroken", openapi_extra=takes(query=VerifyQuery))
async def verify(request: Request) -> Response:
    return answer(await keybook_of(request).verify_audit(query_of(request)))
