"""The thread that puts usage rows on the disk. A disk that hangs or is full stalls nobody else."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from pathlib import Path

from gateway.spool.buffer import Batch, Buffer, joined
from gateway.spool.folder import Claim, Parcel, Segment, claim_new

MOST_ROWS = 5000  # written and synced in one go
MOST_BYTES = 2 * 1024 * 1024  # of a segment, about; it is read in one piece
LOOK_EVERY = 1.0  # seconds between two tries at a disk that fails

log = logging.getLogger("sekisho")


class Writer:
    """Takes rows out of the buffer and appends them to segments; finished segments go to `parcels`."""

    def __init__(self, folder: Path, buffer: Buffer, parcels: deque[Parcel], rotate_after: float) -> None:
        self._folder, self._buffer, self._parcels = folder, buffer, parcels
        self.rotate_after = rotate_after  # seconds; may be changed while it runs
        self.failing = False
        self.written = 0  # rows that outlive this process, whatever becomes of it
        self._claim: Claim | None = None
        self._segment: Segment | None = None
        self._number = 0
        self._thread = threading.Thread(target=self._run, name="usage-spool", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout: float) -> None:
        """Writes what is left and finishes the segment, for at most `timeout` seconds."""
        self._buffer.close()
        self._thread.join(timeout)

    def release(self) -> None:
        """After `close`: what is left on the disk is for others, such as the next start."""
        if self._claim is not None and not self._thread.is_alive():
            self._claim.release()
            self._claim = None

    def _run(self) -> None:
        while not self._buffer.closed:
            self._buffer.wait(self._patience(), only_closed=self.failing)
            self._write()
            if self._is_due():
                self._finish_segment()
        self._write()
        self._finish_segment()

    def _write(self) -> None:
        while taken := self._buffer.take(MOST_ROWS):
            batch = joined(taken)
            try:
                self._append(batch)
            except OSError as error:
                self._buffer.put_back(taken)
                self._finish_segment()
                self._fail(error)
                return
            self._buffer.ease()
            self.written += batch.rows
            if self.failing:
                self.failing = False
                log.info("the spool for usage records can be written again")
            if self._segment is not None and self._segment.size >= MOST_BYTES:
                self._finish_segment()

    def _append(self, batch: Batch) -> None:
        if self._claim is None:
            self._claim = claim_new(self._folder)
        if self._segment is None:
            self._number += 1
            self._segment = self._new_segment(self._claim)
        self._segment.append(*batch)

    def _new_segment(self, claim: Claim) -> Segment:
        try:
            return Segment(claim, self._number)
        except FileNotFoundError:  # somebody has removed the folder: it is made again, with a lock, the next time
            claim.release()
            self._claim = None
            raise

    def _patience(self) -> float | None:
        if self.failing:
            return LOOK_EVERY
        return min(LOOK_EVERY, self.rotate_after) if self._segment else None

    def _is_due(self) -> bool:
        return self._segment is not None and time.monotonic() - self._segment.begun >= self.rotate_after

    def _finish_segment(self) -> None:
        segment, self._segment = self._segment, None
        if segment is not None and (parcel := segment.close()) is not None:
            self._parcels.append(parcel)

    def _fail(self, error: OSError) -> None:
        if not self.failing:
            self.failing = True
            log.error("usage records cannot be spooled, they wait in memory: %s", error.strerror or error)
