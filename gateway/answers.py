"""Answers that come as one JSON document: what they say, and the few values that change in them. No I/O."""

from __future__ import annotations

import base64
import re
import struct
from dataclasses import dataclass
from typing import Any

import orjson

from backends.base import Backend, Operation
from backends.failures import Failure, FailureKind, read_failure
from gateway import jsonscan
from gateway.call import Call
from gateway.errors import GatewayError, ToolCallNotAllowed
from gateway.sse import read_usage
from gateway.tools import screen_answer
from gateway.tracing.trace import Leg, said_by
from gateway.types import ToolPolicy, Usage

_VECTOR = re.compile(rb'"embedding"[ \t\n\r]*:[ \t\n\r]*(["\[])')


# What an answer of these operations is about.
_HOLDS = {Operation.RERANK: "results", Operation.TOKENIZE: "tokens", Operation.DETOKENIZE: "prompt"}


@dataclass(slots=True)
class Answer:
    """A document for the client, or why it cannot be one."""

    body: bytes
    usage: Usage | None = None
    failure: Failure | None = None
    error: GatewayError | None = None  # why its tenant may not have it
    stripped: int = 0  # calls that its tenant may not have


def read_answer(call: Call, body: bytes, backend: Backend | None = None, leg: Leg | None = None) -> Answer:
    """Checks an engine's 200, reads its usage and gives it the name the client asked for. `leg`: while tracing is on,
    where it is noted what the answer says of itself."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        document = None
    if isinstance(document, dict) and (document.get("error") or document.get("object") == "error"):
        return Answer(b"", failure=read_failure(0, body))
    if backend is not None and call.operation in backend.fixes:
        fixed = backend.fix_answer(call.operation, document, call.body)
        if fixed is not document:
            document, body = fixed, orjson.dumps(fixed)
    if not isinstance(document, dict):
        return Answer(b"", failure=Failure(FailureKind.BROKEN, "The engine's answer is not a JSON object."))
    usage = read_usage(document.get("usage"))
    if leg is not None:
        leg.said = said_by(document)
    if call.operation is Operation.EMBEDDINGS:
        converted = _with_encoding(body, document, call.body.get("encoding_format"))
        if converted is None:
            return Answer(
                b"", usage, Failure(FailureKind.BROKEN, "The engine's embeddings are not vectors of numbers.")
            )
        body = converted
    elif not call.operation.generates:
        usage = usage or _total(document.get("usage"))
        if not isinstance(document.get(_HOLDS[call.operation]), list | str):
            return Answer(b"", usage, Failure(FailureKind.BROKEN, "The engine's answer does not hold what was asked."))
    elif not _is_finished(document):
        return Answer(b"", usage, Failure(FailureKind.BROKEN, "The engine's answer holds no finished choice."))
    elif call.tools is not None:
        return _screened(call, body, document, call.tools, usage)
    return Answer(_named(body, document, call.model), usage)


def _screened(call: Call, body: bytes, document: dict[str, Any], policy: ToolPolicy, usage: Usage | None) -> Answer:
    try:
        stripped = screen_answer(document, policy)
    except ToolCallNotAllowed as error:
        return Answer(b"", usage, error=error)
    return Answer(_named(orjson.dumps(document) if stripped else body, document, call.model), usage, stripped=stripped)


def _total(usage: Any) -> Usage | None:
    """Rerankers that tell the total only: all of it is prompt."""
    total = usage.get("total_tokens") if isinstance(usage, dict) else None
    return Usage(total) if isinstance(total, int) and total > 0 else None


def _is_finished(document: dict[str, Any]) -> bool:
    choices = document.get("choices")
    return isinstance(choices, list) and bool(choices)


def _named(body: bytes, document: dict[str, Any], asked: str) -> bytes:
    name = document.get("model", asked)
    if name == asked:
        return body
    if not isinstance(name, str):
        return jsonscan.splice(body, {"model": orjson.dumps(asked)})
    start, end = jsonscan.text_span(body, "model")
    return b"%b%b%b" % (body[:start], orjson.dumps(asked), body[end:])


def _with_encoding(body: bytes, document: dict[str, Any], wanted: str | None) -> bytes | None:
    """Vectors as base64 of little-endian float32, or as lists of numbers, whichever was asked for.

    Engines that know only one of the two forms are common, and a client that gets the other decodes garbage.
    """
    found = _VECTOR.search(body)
    if found is None or (found[1] == b'"') == (wanted == "base64"):
        return body
    try:
        for entry in document["data"]:
            vector = entry["embedding"]
            entry["embedding"] = _packed(vector) if wanted == "base64" else _unpacked(vector)
    except (KeyError, TypeError, ValueError, OverflowError, struct.error):
        return None
    return orjson.dumps(document)


def _packed(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def _unpacked(vector: str) -> list[float]:
    data = base64.b64decode(vector, validate=True)
    return list(struct.unpack(f"<{len(data) // 4}f", data))
