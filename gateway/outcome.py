"""What is recorded of one request, gathered while it runs."""

from __future__ import annotations

from gateway.errors import GatewayError
from gateway.types import Model, Principal, Replica, Usage

ABORTED = 499


class Outcome:
    """One request from its first byte to its settled usage. Times: seconds of a steady clock; 0.0 = never got there."""

    __slots__ = (
        "asked", "attempts", "ended", "error", "first_token", "model", "operation", "principal", "replica",
        "request_id", "sent", "started", "status", "stream", "upstream_ended", "usage", "waited_for_body",
    )  # fmt: skip

    def __init__(self, operation: str, request_id: str, started: float) -> None:
        self.operation, self.request_id, self.started = operation, request_id, started
        self.principal: Principal | None = None
        self.model: Model | None = None
        self.replica: Replica | None = None
        self.asked = ""  # the model name as the client wrote it; for the log only, never a label
        self.stream = False
        self.status = ABORTED  # until told more
        self.error: GatewayError | None = None
        self.usage: Usage | None = None
        self.attempts = 0
        self.waited_for_body = 0.0  # seconds spent on the client's side of reading the body
        self.sent = 0.0  # the last attempt's request went to the engine
        self.first_token = 0.0
        self.upstream_ended = 0.0
        self.ended = 0.0

    @property
    def tenant_name(self) -> str:
        return self.principal.tenant.name if self.principal else "unknown"

    @property
    def model_name(self) -> str:
        return self.model.name if self.model else "unknown"
