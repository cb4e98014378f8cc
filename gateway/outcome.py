"""What is recorded of one request, gathered while it runs."""

from __future__ import annotations

from gateway.errors import GatewayError
from gateway.tracing.trace import Trace
from gateway.types import Model, Principal, Replica, Usage

ABORTED = 499


class Outcome:
    """One request from its first byte to its settled usage. Times: seconds of a steady clock; 0.0 = never got there."""

    # Defaults live on the class: an instance stores only what happened.
    principal: Principal | None = None
    model: Model | None = None
    replica: Replica | None = None
    asked = ""  # the model name as the client wrote it; for the log only, never a label
    stream = False
    status = ABORTED  # until told more
    error: GatewayError | None = None
    begun = False  # the head of an answer had gone out when the request failed
    usage: Usage | None = None
    tools_stripped = 0  # tools taken out of the request, and calls out of the answer
    trace: Trace | None = None  # while tracing is on
    content: object | None = None  # what is kept for the content log, while there is one
    attempts = 0
    waited_for_body = 0.0  # seconds spent on the client's side of reading the body
    queued = 0.0  # seconds spent waiting for a place at a replica
    sent = 0.0  # the last attempt's request went to the engine
    first_token = 0.0
    upstream_ended = 0.0
    ended = 0.0

    def __init__(self, operation: str, request_id: str, started: float) -> None:
        self.operation, self.request_id, self.started = operation, request_id, started

    @property
    def tenant_name(self) -> str:
        return self.principal.tenant.name if self.principal else "unknown"

    @property
    def model_name(self) -> str:
        return self.model.name if self.model else "unknown"
