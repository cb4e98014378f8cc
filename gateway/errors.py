"""Every error a client can see, and the only place that renders one.

    GatewayError
    ├── BadRequest 400
    │   ├── InvalidBody            the bytes are not a request
    │   ├── ContextTooLong
    │   ├── UnsupportedOperation
    │   ├── BodyTooLarge 413
    │   └── Conflict 409           the name is taken, or the configuration owns it
    ├── AuthError 401
    ├── Forbidden 403
    │   ├── ToolNotAllowed         in the request
    │   └── ToolCallNotAllowed     in the answer
    ├── NotFound 404
    │   ├── ModelNotFound
    │   └── VariantNotFound
    ├── MethodNotAllowed 405
    ├── RequestTimeout 408
    ├── RateLimited 429
    │   ├── QuotaExceeded          a budget is spent
    │   └── EngineBusy             every replica asked for a pause
    ├── ClientGone 499             nobody is left to read it
    ├── Internal 500
    ├── UpstreamError 502
    │   ├── UpstreamUnreachable    no connection
    │   ├── UpstreamBroken         the answer stopped or made no sense
    │   ├── UpstreamFailed         the engine answered with an error of its own
    │   └── UpstreamTimeout 504
    ├── StoreUnavailable 503       the database or the limit store is out of reach
    └── NoReplica 503
        ├── ModelBusy              all replicas are full
        └── ShuttingDown

Messages say what to do next. They never hold a key, an address or a trace.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import orjson

from backends.failures import Failure, FailureKind


class GatewayError(Exception):
    """An answer other than success, in OpenAI's terms."""

    status = 500
    type = "server_error"
    code: str | None = None
    retryable = False  # on another replica, as long as the client has seen nothing
    counts_against_replica = False

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after  # seconds
        if code is not None:
            self.code = code
        if status is not None:
            self.status = status

    def forget_frames(self) -> None:
        """Lets go of the frames it came through. An error that is kept is part of a circle with them, and they hold
        the bodies of the request and the answer: megabytes, until the cycle collector happens to pass by."""
        self.__traceback__ = self.__context__ = self.__cause__ = None


class BadRequest(GatewayError):
    status = 400
    type = "invalid_request_error"


class InvalidBody(BadRequest):
    code = "invalid_body"


class ContextTooLong(BadRequest):
    code = "context_length_exceeded"


class UnsupportedOperation(BadRequest):
    code = "unsupported_value"


class BodyTooLarge(BadRequest):
    status = 413
    code = "body_too_large"


class AuthError(GatewayError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"

    def __init__(self, reason: str = "") -> None:
        """`reason` is for the log alone."""
        # One text for unknown, malformed, revoked and missing keys: the difference is nobody's business.
        super().__init__("Incorrect API key provided. Send a valid one in the Authorization header.")
        self.reason = reason


class Forbidden(GatewayError):
    status = 403
    type = "permission_error"
    code = "forbidden"


class ToolNotAllowed(Forbidden):
    """The request offers or demands a tool that its tenant may not use."""

    code = "tool_not_allowed"


class ToolCallNotAllowed(Forbidden):
    """The model has called such a tool. No 5xx: clients would send those again by themselves, to the same end."""

    code = "tool_call_not_allowed"

    def __init__(self) -> None:
        # What was called is the model's text, and a part of what must not get out.
        super().__init__(
            "The model called a tool that is not allowed for this tenant, so its answer was not delivered. Change the "
            "prompt or the tools in the request, or ask an administrator to allow the tool."
        )


class NotFound(GatewayError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"

    def __init__(self, name: str) -> None:
        shown = name if len(name) <= 120 else name[:120] + "..."
        super().__init__(f"The model '{shown}' does not exist or you do not have access to it.", param="model")


class VariantNotFound(NotFound):
    code = "variant_not_found"

    def __init__(self, name: str, variant: str, known: Iterable[str]) -> None:
        super().__init__(
            f"The model '{name}' has no variant '{variant[:60]}'. It has: {', '.join(known) or 'none'}.", param="model"
        )


class MethodNotAllowed(GatewayError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class RequestTimeout(GatewayError):
    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class RateLimited(GatewayError):
    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class QuotaExceeded(RateLimited):
    type = "insufficient_quota"
    code = "insufficient_quota"


class EngineBusy(RateLimited):
    type = "server_error"
    code = "engine_busy"
    retryable = True


class ClientGone(GatewayError):
    status = 499
    code = "client_closed_request"

    def __init__(self) -> None:
        super().__init__("The client closed the connection.")


class Internal(GatewayError):
    code = "internal_error"

    def __init__(self) -> None:
        super().__init__("The gateway failed to handle this request. The request id helps its operator find out why.")


class UpstreamError(GatewayError):
    status = 502
    code = "upstream_error"
    retryable = True
    counts_against_replica = True
    kind = "error"  # label of sekisho_upstream_failures_total


class UpstreamUnreachable(UpstreamError):
    status = 503
    code = "engine_unreachable"
    kind = "connect"


class UpstreamBroken(UpstreamError):
    code = "engine_connection_lost"
    kind = "broken"


class UpstreamFailed(UpstreamError):
    code = "engine_error"
    kind = "status"


class UpstreamTimeout(UpstreamError):
    status = 504
    code = "engine_timeout"
    kind = "timeout"


class NoReplica(GatewayError):
    status = 503
    code = "no_replica"


class Conflict(BadRequest):
    status = 409
    code = "conflict"


class StoreUnavailable(GatewayError):
    """The database or the shared limit store cannot be reached."""

    status = 503
    code = "store_unavailable"


class ModelBusy(NoReplica):
    """Replicas are up and full: waiting helps."""

    code = "model_busy"

    def __init__(self, retry_after: float = 1.0) -> None:
        super().__init__(
            "Every replica of this model is at its limit. Send the request again shortly.", retry_after=retry_after
        )


class ShuttingDown(NoReplica):
    code = "shutting_down"

    def __init__(self) -> None:
        super().__init__("The gateway is shutting down. Send the request again.", retry_after=2)


def from_failure(failure: Failure, retry_after: float | None = None) -> GatewayError:
    """The gateway's error for what an engine said. The table: canonical translation, docs/architecture.md."""
    message, kind = failure.message, failure.kind
    if kind is FailureKind.CONTEXT_LENGTH:
        return ContextTooLong(message, param=failure.param or "messages")
    if kind is FailureKind.UNSUPPORTED and failure.status == 404:  # the route is missing: "Not Found" says too little
        return UnsupportedOperation("The engine of this model does not offer this operation.", param="model")
    if kind is FailureKind.UNSUPPORTED:
        return UnsupportedOperation(message, param=failure.param)
    if kind is FailureKind.BAD_REQUEST:
        status = failure.status if failure.status in (404, 409, 413, 415, 422) else 400
        return BadRequest(message, param=failure.param, code="invalid_value", status=status)
    if kind is FailureKind.OVERLOADED and failure.status == 429:
        return EngineBusy("The engine is at its limit. Wait and send the request again.", retry_after=retry_after or 1)
    if kind is FailureKind.OVERLOADED:
        return _engine_says("The engine is full. Wait and send the request again.", 503, retry_after or 1, healthy=True)
    if kind is FailureKind.LOADING:
        return _engine_says("The model is still loading.", 503, retry_after or 5)
    if kind is FailureKind.CREDENTIALS:
        return _engine_says("The engine refused the gateway's credentials. Its operator has to mend this.", 502)
    if kind is FailureKind.MODEL_MISSING:
        return _engine_says("The engine does not serve the configured model. Its operator has to mend this.", 502)
    if failure.status == 503:
        return _engine_says(f"The engine is not available: {message}", 503, retry_after or 1)
    return _engine_says(f"The engine failed: {message}", 502)


def _engine_says(
    message: str, status: int, retry_after: float | None = None, *, healthy: bool = False
) -> UpstreamFailed:
    error = UpstreamFailed(message, status=status, retry_after=retry_after)
    error.counts_against_replica = not healthy
    return error


def body(error: GatewayError) -> bytes:
    """The JSON document of an error."""
    return orjson.dumps(
        {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}
    )


def event(error: GatewayError) -> bytes:
    """The same object as the last event of a stream. No `[DONE]` follows: it would look like a normal end."""
    return b"data: " + body(error) + b"\n\n"


def header_lines(error: GatewayError) -> bytes:
    return b"".join(b"%b: %b\r\n" % line for line in headers(error))


def headers(error: GatewayError) -> list[tuple[bytes, bytes]]:
    """Headers that belong to an error besides the content's."""
    found: list[tuple[bytes, bytes]] = []
    if error.retry_after is not None:
        found.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after))))
    if error.status == 401:
        found.append((b"www-authenticate", b"Bearer"))
    return found
