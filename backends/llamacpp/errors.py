"""What can go wrong in the embedded engine, and how each looks to the client.

EngineProblem
├── ApiError       one request: HTTP status and OpenAI's error object
├── UsageProblem   the process cannot start until the user changes something (exit code 2)
└── EngineBroken   llama.cpp failed; the context is rebuilt, or the process ends with code 1
"""

from __future__ import annotations

from typing import Any

RETRY_AFTER_S = 1  # what `retry-after` says: queues of a small engine move within seconds


class EngineProblem(Exception):
    """Base of everything this package raises on purpose."""


class UsageProblem(EngineProblem):
    """The message says what is wrong and what to write instead."""


class EngineBroken(EngineProblem):
    """llama.cpp returned an error or an impossible value."""


class ApiError(EngineProblem):
    """An answer that is not a success."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | int | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None, code: str | None = None) -> ApiError:
    """A request the client has to change."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, message: str | None = None) -> ApiError:
    """A field that would change the answer and that this engine cannot honour: refused, never dropped."""
    text = (
        message or f"{param!r} is not supported by the embedded llama.cpp engine; leave it out or use another backend"
    )
    return invalid(text, param, "unsupported_value")


def too_long(limit: int, prompt: int, completion: int, param: str) -> ApiError:
    """The prompt, or the prompt and what was asked for, does not fit. All counts are tokens."""
    wanted = f"{prompt + completion} tokens ({prompt} in the prompt, {completion} for the completion)"
    requested = wanted if completion else f"{prompt} tokens in the prompt"
    message = f"This model's maximum context length is {limit} tokens, but you requested {requested}."
    return invalid(message, param, "context_length_exceeded")


def overloaded(message: str) -> ApiError:
    """The queue is full, or a request waited in it for too long."""
    return ApiError(503, message, type="overloaded_error", code="engine_overloaded", retry_after=RETRY_AFTER_S)


def loading() -> ApiError:
    """llama-server's words, which probes already know; `code` is its number."""
    return ApiError(503, "Loading model", type="unavailable_error", code=503, retry_after=RETRY_AFTER_S)


def failed(message: str) -> ApiError:
    """The engine broke while it worked on this request."""
    return ApiError(500, message, type="server_error", code="engine_error")
