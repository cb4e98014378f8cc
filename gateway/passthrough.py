"""Answers that are not OpenAI's JSON: text, subtitles, sound, and events of other kinds. They pass as they came."""

from __future__ import annotations

from time import monotonic

import orjson

from backends.failures import Failure, read_failure
from gateway import jsonscan
from gateway.edge.cycle import HotCycle
from gateway.errors import UpstreamBroken
from gateway.outcome import Outcome
from gateway.reply import Reply

EVENTS = "text/event-stream"
_JSON = "application/json"
_PASSED = frozenset(
    {_JSON, EVENTS, "text/plain", "text/vtt", "text/srt", "application/x-subrip", "application/octet-stream"}
)
_LONGEST_TYPE = 200  # bytes
_EVENT = b"data:"


def media_type(reply: Reply) -> str:
    """What an answer is. Raises: UpstreamBroken for what no client of these routes can expect, such as a web page."""
    given = reply.headers.get(b"content-type", b"")
    found = given.partition(b";")[0].strip().lower().decode("latin-1")
    if len(given) > _LONGEST_TYPE or not given.isascii() or not (found in _PASSED or found.startswith("audio/")):
        raise UpstreamBroken("The engine's answer is of a type that this operation does not have.")
    return found


def is_whole(kind: str) -> bool:
    """Whether an answer is collected before it is sent: JSON, whose errors have to be seen, and other text."""
    return kind != EVENTS and not kind.startswith("audio/") and kind != "application/octet-stream"


def read_document(body: bytes, asked: str) -> tuple[bytes, Failure | None]:
    """A JSON answer under the name the client asked for, or the error in it."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise UpstreamBroken("The engine's answer is not JSON, although it says so.") from None
    if not isinstance(document, dict):
        return body, None
    if document.get("error"):
        return b"", read_failure(0, body)
    if document.get("model", asked) != asked:
        return jsonscan.splice(body, {"model": orjson.dumps(asked)}), None
    return body, None


class Passing:
    """Between the engine's socket and the client's: the head when the first byte is there, then every byte."""

    __slots__ = ("_cycle", "_events", "_last", "_outcome", "_reply", "events")

    def __init__(self, cycle: HotCycle, outcome: Outcome, reply: Reply, kind: str) -> None:
        self._cycle, self._outcome, self._reply = cycle, outcome, reply
        self._events = kind == EVENTS
        self._last = b""
        self.events = 0

    def received(self, data: bytes) -> None:
        cycle = self._cycle
        if not cycle.started:
            self._outcome.first_token = monotonic()
            self._begin()
        if self._events:
            seen = self._last + data
            self.events += seen.count(_EVENT)
            self._last = seen[1 - len(_EVENT) :]  # an event's beginning may come in two pieces
        cycle.received(data)

    def ended(self) -> None:
        self._outcome.upstream_ended = monotonic()
        if not self._cycle.started:
            self._begin()
        self._cycle.end()

    def finish_event(self) -> None:
        """After a stream that broke: what follows has to be an event of its own."""
        if self._events and self._cycle.started and not self._last.endswith(b"\n\n"):
            self._cycle.received(b"\n\n")

    def _begin(self) -> None:
        headers = self._reply.headers
        length = headers.get(b"content-length", b"")
        known = length.isdigit() and b"content-encoding" not in headers
        self._cycle.begin_raw(headers[b"content-type"], int(length) if known else None, events=self._events)
