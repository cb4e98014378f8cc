"""The way to the child process and back: a thread that writes frames into its pipe, and one that takes its lines.

Nothing here waits where a request could notice. A child that dies is started again, first after a second and then after
longer and longer pauses; what it had not answered is lost and counted, and so is what comes in between.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Final

from gateway.children import command
from gateway.content.frames import Header, buffers

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before a child that has died is replaced
STEADY = 60.0  # seconds of work after which a death counts as the first one again
DRAIN = 2.0  # seconds for what is left at the end
_READ = 256 * 1024  # bytes of one read from the child
_MOST_BUFFERS = 512  # of one gathering write; the system takes 1024
_FAILED: Final = b"-"[0]

log = logging.getLogger("sekisho.content")


@dataclass(slots=True)
class Tally:
    """What has become of the records of this process. Each number is changed under `lock`."""

    written: int = 0
    failed: int = 0  # only the fact was written
    dropped: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, *, written: int = 0, failed: int = 0, dropped: int = 0) -> None:
        with self.lock:
            self.written += written
            self.failed += failed
            self.dropped += dropped


class Parcel:
    """One record to be sent."""

    __slots__ = ("answered", "asked", "header")

    def __init__(self, header: Header, asked: bytes, answered: Sequence[bytes]) -> None:
        self.header, self.asked, self.answered = header, asked, answered


class _Child:
    """One process and the thread that reads from it."""

    def __init__(self, deliver: Callable[[bytes, int], bool], tally: Tally) -> None:
        self._deliver, self._tally = deliver, tally
        self.sent = self._got = 0  # records; each number is changed by one thread
        self.begun = time.monotonic()
        self._process = subprocess.Popen(
            command("gateway.content"),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
        )  # fmt: skip
        self.reader = threading.Thread(target=self._read, name="content-lines", daemon=True)
        self.reader.start()

    def write(self, parcel: Parcel) -> None:
        """Raises: OSError when the child is gone."""
        assert self._process.stdin is not None
        left = buffers(parcel.header, parcel.asked, parcel.answered)
        descriptor = self._process.stdin.fileno()
        self.sent += 1
        while left:
            done = os.writev(descriptor, left[:_MOST_BUFFERS])
            while left and done >= len(left[0]):
                done -= len(left.pop(0))
            if done:
                left[0] = memoryview(left[0])[done:]  # type: ignore[call-overload]

    def finish(self) -> None:
        """Lets it do what it has, and end."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def kill(self) -> None:
        self._process.kill()

    def _read(self) -> None:
        assert self._process.stdout is not None
        rest = b""
        while data := os.read(self._process.stdout.fileno(), _READ):
            whole, newline, rest = (rest + data).rpartition(b"\n")
            if newline:
                self._take(whole.split(b"\n"))
        self._process.stdout.close()
        self._process.wait()
        self._tally.add(dropped=self.sent - self._got)

    def _take(self, lines: list[bytes]) -> None:
        self._got += len(lines)
        failed = sum(line[0] == _FAILED for line in lines)
        if self._deliver(b"".join([b"%b\n" % line[1:] for line in lines]), len(lines)):
            self._tally.add(written=len(lines) - failed, failed=failed)
        else:
            self._tally.add(dropped=len(lines))


class Courier:
    """Owns the queue, the child and the threads. `send` and `close` are called by the event loop's thread."""

    def __init__(self, deliver: Callable[[bytes, int], bool], tally: Tally, sent: Callable[[Parcel], None]) -> None:
        """`deliver`: takes lines and their number, says whether they will be written. `sent`: told of each parcel that
        need not be kept any longer, from another thread."""
        self._deliver, self._tally, self._sent = deliver, tally, sent
        self._queue: SimpleQueue[list[Parcel] | None] = SimpleQueue()
        self._child: _Child | None = None
        self._pause, self._start_at = FIRST_PAUSE, 0.0
        self._closing = False
        self._writer = threading.Thread(target=self._write, name="content-frames", daemon=True)
        self._writer.start()

    def send(self, parcels: list[Parcel]) -> None:
        self._queue.put(parcels)

    def close(self) -> None:
        """Gives what is left `DRAIN` seconds. What is not written by then is lost and counted."""
        deadline = time.monotonic() + DRAIN
        self._queue.put(None)
        self._writer.join(DRAIN)
        child = self._child
        if child is not None:
            child.reader.join(max(0.0, deadline - time.monotonic()))
            if child.reader.is_alive():
                self._closing = True
                child.kill()
                child.reader.join(DRAIN)
        self._closing = True
        self._writer.join(DRAIN)

    def _write(self) -> None:
        while (parcels := self._queue.get()) is not None:
            for parcel in parcels:
                if self._closing or not self._put(parcel):
                    self._tally.add(dropped=1)
                self._sent(parcel)
        if self._child is not None:
            self._child.finish()

    def _put(self, parcel: Parcel) -> bool:
        """Whether a child has it. One that dies later is told of by its reader."""
        child = self._child or self._start()
        if child is None:
            return False
        try:
            child.write(parcel)
        except OSError:
            self._bury(child)
        return True

    def _start(self) -> _Child | None:
        if time.monotonic() < self._start_at:
            return None
        try:
            self._child = _Child(self._deliver, self._tally)
        except OSError as problem:
            self._wait_longer()
            log.error("the process for the content log cannot be started (%s)", problem.strerror)
            return None
        return self._child

    def _bury(self, child: _Child) -> None:
        self._child = None
        child.kill()
        child.reader.join(DRAIN)
        if time.monotonic() - child.begun > STEADY:
            self._pause = FIRST_PAUSE
        log.error("the process for the content log has ended; starting it again in %g s", self._pause)
        self._wait_longer()

    def _wait_longer(self) -> None:
        self._start_at = time.monotonic() + self._pause
        self._pause = min(self._pause * 2, LONGEST_PAUSE)
