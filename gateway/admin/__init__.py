"""The administration over HTTP, below /admin/v1.

access   who may, what was sent, how it is answered     fleet    models, replicas, drain, reload
people   tenants and keys                               usage    sums, single requests, CSV
audit    the trail of changes                           described   for /openapi.json
"""

from __future__ import annotations

from fastapi import APIRouter

from gateway.admin import audit, fleet, people, usage

router = APIRouter(prefix="/admin/v1", tags=["admin"])
for part in (fleet, people, usage, audit):
    router.include_router(part.router)
