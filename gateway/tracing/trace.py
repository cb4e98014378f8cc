"""What is noted for tracing while a request runs: ids, and one `Leg` for each attempt at an engine.

No span is made here. Ids are decided at the start, since engines are told them; everything else is a few references and
times, and `spans` are made of them once the request is over.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from random import getrandbits
from typing import Any, NamedTuple, Protocol

from gateway.call import Call
from gateway.errors import GatewayError
from gateway.sse import StreamTap
from gateway.tracing.context import SAMPLED, header_lines
from gateway.types import Replica, Usage

ERROR = "error"  # finish reason of a choice that did not come to its end
# Members of a request that are told in its spans. Never what a caller or a model has written.
PARAMETERS = (
    "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "n", "seed", "presence_penalty",
    "frequency_penalty", "reasoning_effort", "encoding_format", "dimensions",
)  # fmt: skip
_LONGEST_WORD = 32  # characters of an option
_LONGEST_NAME = 256  # of what an engine says


def new_span_id() -> str:
    return f"{getrandbits(64) or 1:016x}"


class Record(Protocol):
    """What is gathered of an attempt for other reasons; `Outcome` is one."""

    sent: float
    first_token: float
    usage: Usage | None


class Said(NamedTuple):
    """What an engine's answer says of itself."""

    id: str | None = None
    model: str | None = None
    finish_reasons: tuple[str, ...] = ()  # one for each choice


class Leg:
    """One attempt at one engine. Times: seconds of the steady clock; 0.0 = never got there."""

    # Defaults live on the class: an instance stores only what happened.
    sent = 0.0
    first_token = 0.0
    ended = 0.0
    status = 0  # of the engine's answer; 0 = none came
    code = ""  # of the error the attempt ended with
    cancelled = False  # nobody wanted the answer any more
    usage: Usage | None = None
    said = Said()

    def __init__(self, trace: Trace, replica: Replica) -> None:
        self.replica, self.span_id = replica, new_span_id()
        parent = f"00-{trace.trace_id}-{self.span_id}-{trace.flags:02x}"
        self.headers = header_lines(parent.encode(), trace.state)
        self.started = time.monotonic()

    def end(self, record: Record, status: int, tap: StreamTap | None, error: BaseException | None) -> None:
        """`error`: what the attempt ends with; its name is kept, and nothing that it refers to."""
        self.ended = time.monotonic()
        self.sent, self.first_token, self.usage = record.sent, record.first_token, record.usage
        self.status = status
        if isinstance(error, GatewayError):
            self.code = error.code or error.type
        elif isinstance(error, Exception):
            self.code = "internal_error"
        else:
            self.cancelled = error is not None
        if tap is not None and tap.identity is not None:
            identity, model = tap.identity
            reasons = tuple(_word(tap.finish_reasons.get(index)) or ERROR for index in sorted(tap.seen))
            self.said = Said(_word(identity), _word(model), reasons)


def said_by(document: Mapping[str, Any]) -> Said:
    """What a whole answer says of itself."""
    choices = document.get("choices")
    found = [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []
    reasons = tuple(_word(choice.get("finish_reason")) or ERROR for choice in found)
    return Said(_word(document.get("id")), _word(document.get("model")), reasons)


def _word(value: object) -> str | None:
    return value if isinstance(value, str) and 0 < len(value) <= _LONGEST_NAME else None


class Trace:
    """One request's place in a trace."""

    __slots__ = ("flags", "legs", "parameters", "parent_id", "span_id", "state", "trace_id")

    def __init__(self, trace_id: str, parent_id: str, flags: int, state: bytes) -> None:
        """Args: parent_id: the caller's span, empty where the trace begins here. state: what engines get as
        `tracestate`."""
        self.trace_id, self.parent_id, self.flags, self.state = trace_id, parent_id, flags, state
        self.span_id = new_span_id()
        self.legs: list[Leg] = []
        self.parameters: dict[str, Any] = {}

    @property
    def sampled(self) -> bool:
        return bool(self.flags & SAMPLED)

    def begin(self, call: Call, replica: Replica) -> Leg:
        """An attempt begins."""
        leg = Leg(self, replica)
        if self.flags & SAMPLED:
            if not self.legs:
                body = call.body
                self.parameters = {name: body[name] for name in PARAMETERS if _is_short(body.get(name))}
            self.legs.append(leg)
        return leg


class Finished(NamedTuple):
    """A request that is over, without anything that would keep its body in memory."""

    trace: Trace
    operation: str
    request_id: str
    status: int
    begun: bool
    code: str
    tenant: str | None
    key: str | None
    model: str | None
    replica: str | None
    stream: bool
    attempts: int
    queued: float  # seconds
    usage_source: str | None
    started: float  # steady clock, as the others
    first_token: float
    ended: float


def _is_short(value: object) -> bool:
    """Whether it is a number, or a word as options are. Nothing longer is to be kept alive."""
    return type(value) in (int, float) or (isinstance(value, str) and len(value) <= _LONGEST_WORD)
