"""What the gateway's side of the content log does: it keeps references while a request runs, and hands them over.

With `logging.content: none` there is no `ContentLog`, and `serve` tests one attribute. With it a request costs a few
references, a piece of a stream one entry of a list. Reading, masking and writing happen in another process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator

import orjson
from prometheus_client.core import Metric

from backends.base import Operation
from gateway.call import Call
from gateway.config.server import LoggingConfig
from gateway.content.courier import Courier, Parcel, Tally
from gateway.content.frames import Header
from gateway.edge.cycle import HotCycle
from gateway.logs import AccessLog
from gateway.metrics import counter
from gateway.outcome import ABORTED, Outcome

MOST_HELD = 128 * 1024 * 1024  # bytes of prompts and answers that are kept, of running requests and of waiting records
MOST_WAITING = 10_000  # records
_PER_LIMIT = 64  # bytes of a stream for each byte of its text: events repeat a frame for every token
_LEAST_KEPT = 256 * 1024
_BY_SIZE = frozenset({Operation.EMBEDDINGS, Operation.RERANK, Operation.TOKENIZE})  # answers that are numbers
_COMPLAIN_EVERY = 60.0  # seconds

log = logging.getLogger("sekisho.content")


class Kept:
    """What one request asked and what its client has got, as far as it is kept."""

    __slots__ = ("answered", "asked", "asked_size", "asked_type", "kept", "kind", "most", "owner", "size")

    def __init__(self, owner: ContentLog, call: Call, most: int) -> None:
        self.owner, self.most = owner, most
        self.asked_size, self.asked_type = len(call.raw), "application/json"
        self.asked: bytes | Call = call.raw
        if call.operation.takes_form:
            self.asked, self.asked_type = call, "multipart/form-data"  # its fields say all that is shown
        self.answered: list[bytes] = []
        self.kind = b""  # media type of the answer
        self.size = self.kept = 0  # bytes

    def add(self, data: bytes) -> None:
        size = len(data)
        self.size += size
        if self.kept == self.size - size and self.kept + size <= self.most and self.owner.holds(size):
            self.kept += size
            self.answered.append(data)


class WatchedCycle(HotCycle):
    """A cycle that also keeps what it sends. A cycle becomes one when its request is read, so that the others need not
    ask whether they are."""

    kept: Kept

    def begin_raw(self, content_type: bytes, length: int | None, *, events: bool) -> None:
        self.kept.kind = content_type
        if not events:
            self.kept.most = 0  # sound
        super().begin_raw(content_type, length, events=events)

    def received(self, data: bytes) -> None:
        self.kept.add(data)
        super().received(data)

    def end(self, data: bytes = b"") -> None:
        if data:
            self.kept.add(data)
        super().end(data)

    def answer(self, status: int, body: bytes, headers: bytes = b"", content_type: bytes = b"application/json") -> None:
        self.kept.kind = content_type
        self.kept.most = 0 if self.operation in _BY_SIZE else len(body)
        self.kept.add(body)
        super().answer(status, body, headers, content_type)


class ContentLog:
    """Where finished requests leave what was kept of them. `mode` and `limit` change with a reload."""

    def __init__(self, access_log: AccessLog, config: LoggingConfig, tally: Tally) -> None:
        self._style, self._offset = config.format, time.time() - time.monotonic()
        self._tally = tally
        self._taken = self._given = 0  # bytes; the first is changed by the event loop, the second by the courier
        self._sent = self._left = 0  # records, likewise
        self._complained, self._told = 0.0, 0
        self.adopt(config)
        self._courier = Courier(access_log.write, tally, self._gone)

    def adopt(self, config: LoggingConfig) -> None:
        self.mode, self.limit = config.content, config.content_limit
        self._most = max(_PER_LIMIT * self.limit, _LEAST_KEPT)

    # --- while a request runs
    def watch(self, cycle: HotCycle, call: Call, outcome: Outcome) -> None:
        """From here on, what the client gets is kept."""
        kept = outcome.content = Kept(self, call, self._most)
        cycle.__class__ = WatchedCycle
        assert isinstance(cycle, WatchedCycle)
        cycle.kept = kept
        self._taken += kept.asked_size  # whatever there is room for: the request itself holds it

    def holds(self, size: int) -> bool:
        """Takes room for so many bytes, if there is room."""
        if self._taken - self._given + size > MOST_HELD:
            return False
        self._taken += size
        return True

    # --- afterwards, a few times a second
    def add(self, finished: Iterable[Outcome]) -> None:
        parcels = []
        for outcome in finished:
            kept = outcome.content
            if not isinstance(kept, Kept) or kept.owner is not self:
                continue
            if self._taken - self._given > MOST_HELD or self._sent - self._left >= MOST_WAITING:
                self._give_up(kept)
            else:
                self._sent += 1
                parcels.append(self._parcel(outcome, kept))
        if parcels:
            self._courier.send(parcels)
        self._complain()

    def close(self) -> None:
        """Writes what is left, for at most two seconds."""
        self._courier.close()
        self._complained = 0.0
        self._complain()

    def _parcel(self, outcome: Outcome, kept: Kept) -> Parcel:
        error, principal, asked = outcome.error, outcome.principal, kept.asked
        header = Header(
            mode=self.mode,
            limit=self.limit,
            style=self._style,
            time=outcome.ended + self._offset,
            request_id=outcome.request_id,
            operation=str(outcome.operation),
            status=outcome.status,
            tenant=outcome.tenant_name,
            key=principal.key if principal else None,
            model=outcome.model_name,
            stream=outcome.stream,
            aborted=outcome.status == ABORTED or outcome.begun,
            error=(error.code or error.type) if error is not None else None,
            asked_type=kept.asked_type,
            asked_size=kept.asked_size,
            answered_type=(kept.kind or b"text/event-stream").partition(b";")[0].strip().lower().decode("latin-1"),
            answered_size=kept.size,
            answered_kept=kept.kept,
        )
        fields = asked if isinstance(asked, bytes) else orjson.dumps(asked.body)
        return Parcel(header, fields, kept.answered)

    def _give_up(self, kept: Kept) -> None:
        self._taken -= kept.asked_size + kept.kept
        self._tally.add(dropped=1)

    def _gone(self, parcel: Parcel) -> None:
        self._given += parcel.header.asked_size + parcel.header.answered_kept
        self._left += 1

    def _complain(self) -> None:
        dropped, now = self._tally.dropped, time.monotonic()
        if dropped > self._told and now - self._complained > _COMPLAIN_EVERY:
            log.warning("content log: %d records could not be written in time and are lost", dropped - self._told)
            self._told, self._complained = dropped, now


class Contents:
    """The content log over reloads: whether there is one, and what has become of its records."""

    def __init__(self, access_log: AccessLog) -> None:
        self._access_log, self._tally = access_log, Tally()
        self._log: ContentLog | None = None
        self._leaving: list[threading.Thread] = []

    def adopt(self, config: LoggingConfig) -> ContentLog | None:
        """The log that the configuration asks for. One that ends writes what it has, in a thread."""
        if config.content == "none":
            if self._log is not None:
                leaving = threading.Thread(target=self._log.close, name="content-end", daemon=True)
                leaving.start()
                self._leaving = [*(thread for thread in self._leaving if thread.is_alive()), leaving]
            self._log = None
        elif self._log is None:
            self._log = ContentLog(self._access_log, config, self._tally)
        else:
            self._log.adopt(config)
        return self._log

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
        for thread in self._leaving:
            thread.join(2)

    def families(self) -> Iterator[Metric]:
        tally = self._tally
        rows = {("written",): tally.written, ("failed",): tally.failed, ("dropped",): tally.dropped}
        yield counter("content_records", "Records of the content log, by what became of them", ("result",), rows)
