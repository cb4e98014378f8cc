"""The errors clients see: one shape, fitting statuses, nothing that should not be told."""

import json
from collections.abc import Iterator

import pytest

from backends.failures import Failure, FailureKind
from gateway import errors
from gateway.errors import (
    AuthError,
    BadRequest,
    ClientGone,
    Conflict,
    ContextTooLong,
    EngineBusy,
    GatewayError,
    Internal,
    ModelNotFound,
    QuotaExceeded,
    RateLimited,
    ShuttingDown,
    StoreUnavailable,
    UnsupportedOperation,
    UpstreamError,
    UpstreamFailed,
    UpstreamTimeout,
    VariantNotFound,
    from_failure,
)


def every(kind: type[GatewayError]) -> Iterator[type[GatewayError]]:
    yield kind
    for below in kind.__subclasses__():
        if below.__module__ == errors.__name__:
            yield from every(below)


EVERY = list(every(GatewayError))


def make(kind: type[GatewayError]) -> GatewayError:
    try:
        return kind()  # type: ignore[call-arg]
    except TypeError:
        return kind("name", "variant", ("gguf",)) if kind is VariantNotFound else kind("text")  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", EVERY)
def test_every_error_has_openais_shape(kind: type[GatewayError]) -> None:
    error = make(kind)
    document = json.loads(errors.body(error))
    assert list(document) == ["error"]
    assert list(document["error"]) == ["message", "type", "param", "code"]
    assert document["error"]["message"]
    assert document["error"]["type"] in (
        "invalid_request_error", "permission_error", "rate_limit_error", "insufficient_quota", "server_error",
    )  # fmt: skip
    if kind is not GatewayError and kind is not BadRequest:
        assert document["error"]["code"]
    assert 400 <= error.status < 600
    assert (error.status >= 500) <= (error.type == "server_error")


@pytest.mark.parametrize("kind", EVERY)
def test_the_last_event_of_a_stream_holds_the_same_object(kind: type[GatewayError]) -> None:
    error = make(kind)
    event = errors.event(error)
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    assert json.loads(event[6:]) == json.loads(errors.body(error))
    assert b"[DONE]" not in event


def test_a_message_with_line_ends_stays_one_event() -> None:
    assert errors.event(BadRequest('a\r\n\n"b"\u2028')).count(b"\n") == 2


def test_codes_are_unique_enough_to_tell_errors_apart() -> None:
    codes = [kind.code for kind in every(GatewayError) if kind.code]
    inherited = {"upstream_error"}
    assert {code for code in codes if codes.count(code) > 1} <= inherited


# --- headers
@pytest.mark.parametrize(
    ("wait", "header"), [(7, b"7"), (22.1, b"23"), (0.01, b"1"), (0, b"1"), (60.0, b"60"), (-3, b"1")]
)
def test_retry_after_is_in_whole_seconds_and_never_too_early(wait: float, header: bytes) -> None:
    assert errors.headers(RateLimited("x", retry_after=wait)) == [(b"retry-after", header)]


def test_headers_only_where_they_mean_something() -> None:
    assert errors.headers(BadRequest("x")) == []
    assert errors.headers(AuthError()) == [(b"www-authenticate", b"Bearer")]
    assert errors.headers(ShuttingDown()) == [(b"retry-after", b"2")]


def test_a_reason_to_refuse_a_caller_is_in_no_answer() -> None:
    error = AuthError("key ci of research has expired")
    assert error.reason == "key ci of research has expired"
    told = errors.body(error) + errors.event(error) + errors.header_lines(error) + str(error).encode()
    assert b"ci" not in told.replace(b"Incorrect", b"") and b"expired" not in told
    assert errors.body(error) == errors.body(AuthError())


def test_a_spent_budget_says_so_as_openai_does() -> None:
    error = QuotaExceeded("x", retry_after=3599.2)
    assert (error.status, error.type, error.code) == (429, "insufficient_quota", "insufficient_quota")
    assert isinstance(error, RateLimited) and errors.headers(error) == [(b"retry-after", b"3600")]


def test_a_store_out_of_reach_and_a_taken_name_have_statuses_of_their_own() -> None:
    assert (StoreUnavailable("x").status, StoreUnavailable("x").code) == (503, "store_unavailable")
    assert (Conflict("x").status, Conflict("x").type, Conflict("x").code) == (409, "invalid_request_error", "conflict")


# --- what the class says and what one error overrides
def test_one_error_may_differ_from_its_class() -> None:
    error = BadRequest("x", param="p", code="c", status=431)
    assert (error.status, error.code, error.param, str(error)) == (431, "c", "p", "x")
    assert (BadRequest.status, BadRequest.code) == (400, None)


@pytest.mark.parametrize("kind", EVERY)
def test_only_engines_are_blamed_and_only_their_failures_retried(kind: type[GatewayError]) -> None:
    assert kind.counts_against_replica == issubclass(kind, UpstreamError)
    assert kind.retryable == issubclass(kind, UpstreamError | EngineBusy)


def test_statuses() -> None:
    assert ModelNotFound("x").status == 404
    assert ClientGone().status == 499
    assert UpstreamTimeout("x").status == 504
    assert UpstreamError("x").status == 502
    assert "trace" not in Internal().message.lower()


# --- what engines say
def failure(kind: FailureKind, status: int = 0, param: str | None = None) -> Failure:
    return Failure(kind, "words", status, param)


@pytest.mark.parametrize(
    ("given", "kind", "status", "param"),
    [
        (failure(FailureKind.CONTEXT_LENGTH, 400), ContextTooLong, 400, "messages"),
        (failure(FailureKind.CONTEXT_LENGTH, 500, "prompt"), ContextTooLong, 400, "prompt"),
        (failure(FailureKind.CONTEXT_LENGTH), ContextTooLong, 400, "messages"),
        (failure(FailureKind.UNSUPPORTED, 501, "tools"), UnsupportedOperation, 400, "tools"),
        (failure(FailureKind.UNSUPPORTED, 404), UnsupportedOperation, 400, "model"),
        (failure(FailureKind.BAD_REQUEST, 400, "n"), BadRequest, 400, "n"),
        (failure(FailureKind.BAD_REQUEST, 422), BadRequest, 422, None),
        (failure(FailureKind.BAD_REQUEST, 413), BadRequest, 413, None),
        (failure(FailureKind.BAD_REQUEST, 418), BadRequest, 400, None),
        (failure(FailureKind.BAD_REQUEST), BadRequest, 400, None),
        (failure(FailureKind.OVERLOADED, 429), EngineBusy, 429, None),
        (failure(FailureKind.OVERLOADED, 503), UpstreamFailed, 503, None),
        (failure(FailureKind.LOADING, 503), UpstreamFailed, 503, None),
        (failure(FailureKind.CREDENTIALS, 401), UpstreamFailed, 502, None),
        (failure(FailureKind.MODEL_MISSING, 404), UpstreamFailed, 502, None),
        (failure(FailureKind.BROKEN, 503), UpstreamFailed, 503, None),
        (failure(FailureKind.BROKEN, 500), UpstreamFailed, 502, None),
        (failure(FailureKind.BROKEN), UpstreamFailed, 502, None),
    ],
)
def test_translation(given: Failure, kind: type[GatewayError], status: int, param: str | None) -> None:
    error = from_failure(given)
    assert (type(error), error.status, error.param) == (kind, status, param)


@pytest.mark.parametrize("kind", FailureKind)
@pytest.mark.parametrize("status", [0, 400, 404, 429, 500, 503])
def test_blame_and_retry_agree_with_the_failure(kind: FailureKind, status: int) -> None:
    given = failure(kind, status)
    error = from_failure(given)
    assert error.retryable == given.retryable
    assert error.counts_against_replica == given.counts_against_replica


@pytest.mark.parametrize("kind", [FailureKind.OVERLOADED, FailureKind.LOADING, FailureKind.BROKEN])
def test_the_engines_own_hint_is_passed_on(kind: FailureKind) -> None:
    assert from_failure(failure(kind, 503), 7.0).retry_after == 7.0
    assert from_failure(failure(kind, 503)).retry_after  # a 503 never comes without one


def test_a_429_keeps_its_hint() -> None:
    assert errors.headers(from_failure(failure(FailureKind.OVERLOADED, 429), 7)) == [(b"retry-after", b"7")]


def test_the_engines_credentials_are_nobodys_business() -> None:
    assert "words" not in from_failure(failure(FailureKind.CREDENTIALS, 401)).message
