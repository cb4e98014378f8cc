"""The error dialects of engines, read into one vocabulary.

Engines answer errors as `{"error": {...}}`, flat `{"object": "error", ...}`, `{"error": "text"}`, `{"detail": ...}`
or plain text, with types and codes of their own. `read_failure` knows all of them, because a server that calls itself
OpenAI-compatible may be any of these underneath.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson


class FailureKind(StrEnum):
    """Why an engine did not answer; decides status, retry and whether the replica's health is touched."""

    CONTEXT_LENGTH = "context_length"  # the prompt does not fit: the caller's fault everywhere
    BAD_REQUEST = "bad_request"  # the caller's fault
    UNSUPPORTED = "unsupported"  # the caller asks for what this engine cannot do
    MODEL_MISSING = "model_missing"  # the engine does not serve what the operator configured
    CREDENTIALS = "credentials"  # the engine refused the gateway's key, not the caller's
    OVERLOADED = "overloaded"  # the engine is healthy and full
    LOADING = "loading"  # the engine is not ready yet
    BROKEN = "broken"  # anything else


RETRYABLE = frozenset(
    {
        FailureKind.MODEL_MISSING,
        FailureKind.CREDENTIALS,
        FailureKind.OVERLOADED,
        FailureKind.LOADING,
        FailureKind.BROKEN,
    }
)
UNHEALTHY = frozenset({FailureKind.MODEL_MISSING, FailureKind.CREDENTIALS, FailureKind.LOADING, FailureKind.BROKEN})


@dataclass(frozen=True, slots=True)
class Failure:
    """One refusal or breakdown of an engine, as a value."""

    kind: FailureKind
    message: str  # safe to show: no addresses, paths or traces
    status: int = 0  # the engine's HTTP status; 0 when it came inside a stream
    param: str | None = None

    @property
    def retryable(self) -> bool:
        """Whether another replica may do better."""
        return self.kind in RETRYABLE

    @property
    def counts_against_replica(self) -> bool:
        """Whether this is a sign of ill health. The caller's mistakes and a full queue are not."""
        return self.kind in UNHEALTHY


_CONTEXT = re.compile(
    r"exceed_context_size|context_length_exceeded|maximum context length|model's context length|longer than the context"
    r"|input length exceeds|exceed(s|ed)? (the )?context|context length of only|context window|max_model_len"
    r"|maximum model length",
    re.IGNORECASE,
)
_LOADING = re.compile(r"loading model|model is loading|no models are currently loaded|still loading", re.IGNORECASE)
_FULL = re.compile(r"server busy|queue is full|model limit reached|overloaded|too many requests", re.IGNORECASE)
_NO_MODEL = re.compile(r"model .{0,200}(not found|does not exist|is not loaded)", re.IGNORECASE | re.DOTALL)
_CANNOT = re.compile(r"does not support|not supported|unsupported|not_supported_error", re.IGNORECASE)


def read_failure(status: int, body: bytes) -> Failure:
    """What an engine's error answer means.

    Args:   status: the HTTP status; 0 for an error event inside a stream. body: the answer or the event's JSON.
    """
    text, type_, param, code = _fields(body)
    told = status or (int(code) if _STATUS.fullmatch(code) else 0)  # an event has no status but often says one
    return Failure(classify(told, f"{type_} {code} {text}"), clean(text) or _FALLBACK, status, param)


_STATUS = re.compile(r"[45]\d\d")
_INNER = re.compile(r'\{\s*"error"\s*:', re.DOTALL)  # Ollama passes on what its runner said, document and all
_FALLBACK = "The engine answered with an error and no explanation."


def classify(status: int, text: str) -> FailureKind:
    """The kind of a failure from its status and all of its words. Order matters: the most telling sign comes first."""
    if status in (401, 403):
        return FailureKind.CREDENTIALS
    if _CONTEXT.search(text):
        return FailureKind.CONTEXT_LENGTH
    if status == 429 or _FULL.search(text):
        return FailureKind.OVERLOADED
    if _LOADING.search(text):
        return FailureKind.LOADING
    if status == 503:
        return FailureKind.BROKEN
    if status in (400, 404) and _NO_MODEL.search(text):
        return FailureKind.MODEL_MISSING
    if status == 404:  # the route itself is missing: this engine was started for another task
        return FailureKind.UNSUPPORTED
    if status == 501 or (400 <= status < 500 and _CANNOT.search(text)):
        return FailureKind.UNSUPPORTED
    if 400 <= status < 500:
        return FailureKind.BAD_REQUEST
    return FailureKind.BROKEN


def _fields(body: bytes) -> tuple[str, str, str | None, str]:
    """(message, type, param, code) from any dialect; the texts are empty where the engine gave none."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return _plain(body), "", None, ""
    if not isinstance(answer, dict):
        return "", "", None, ""
    error: Any = answer.get("error", answer)
    if isinstance(error, str):
        return _inner(error) or (error, "", None, "")
    if not isinstance(error, dict):
        return "", "", None, ""
    message = error.get("message")
    if message is None and "detail" in answer:
        message = _detail(answer["detail"])
    if isinstance(message, str) and (inner := _inner(message)) is not None:
        return inner
    param = error.get("param")
    return (
        message if isinstance(message, str) else "",
        str(error.get("type") or ""),
        param.removeprefix("body.") if isinstance(param, str) else None,  # vLLM names the place in the whole request
        str(error.get("code") or ""),
    )


def _inner(text: str) -> tuple[str, str, str | None, str] | None:
    """The fields of a document that stands inside an error's text."""
    found = _INNER.search(text)
    if found is None:
        return None
    try:
        answer = orjson.loads(text[found.start() : text.rindex("}") + 1])
    except ValueError:
        return None
    error = answer.get("error")
    return _fields(orjson.dumps(answer)) if isinstance(error, dict) else (str(error), "", None, "")


def _detail(detail: object) -> str:
    """FastAPI's `detail`: a text, or a list of {loc, msg} of which the first says enough."""
    if isinstance(detail, list) and detail and isinstance(detail[0], dict):
        place = detail[0].get("loc")
        where = ".".join(str(part) for part in place if part != "body") if isinstance(place, list) else ""
        return f"{where}: {detail[0].get('msg', '')}" if where else str(detail[0].get("msg", ""))
    return detail if isinstance(detail, str) else ""


def _plain(body: bytes) -> str:
    text = body[:2000].decode("utf-8", "replace").strip()
    return "" if text.startswith("<") else text  # an HTML error page says nothing to an API client


_TRACE = re.compile(r"\s*Traceback \(most recent call last\).*", re.DOTALL)
_SECRETS = re.compile(
    r"""(?:[a-z][a-z0-9+.-]*://[^\s'"<>]+)                      # URLs
      | (?:\[[0-9a-f:.]{2,}\](?::\d+)?)                         # IPv6 in brackets
      | (?:\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b)                # IPv4, with or without a port
      | (?:\b[a-z0-9-]+(?:\.[a-z0-9-]+)*:\d{2,5}\b)             # host:port
      | (?:(?<![\w/.])(?:/[\w.@+-]+){2,}/?)                     # absolute paths
      | (?:\b(?:sk|hf|Bearer)[-_\s][\w-]{8,})                   # credentials
    """,
    re.VERBOSE | re.IGNORECASE,
)


def clean(text: str, limit: int = 600) -> str:
    """An engine's message without what a client must not see: addresses, file paths, keys, stack traces."""
    text = _TRACE.sub("", text[: limit * 4])
    text = _SECRETS.sub("[removed]", text).strip()
    return text if len(text) <= limit else text[:limit] + "..."
