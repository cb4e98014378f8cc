"""The child process: frames on standard input, on standard output one line for each, behind a mark of how it went.

It ends when its input does, so it never outlives the gateway. It ignores the signals that end the gateway: what is left
in the pipe then is still to be written. Errors are not printed, as they could repeat what was being read.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from types import FrameType

from gateway.content.frames import Frame, read_frame
from gateway.content.record import failure, line

WRITTEN, FAILED = b"+", b"-"
LONGEST = 5.0  # seconds for one record
NICE = 5  # requests come first


class TooLong(BaseException):
    """A record takes more time than it is worth. No error like others, which would be taken for the record's own."""


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, _give_up)
    with contextlib.suppress(OSError):
        os.nice(NICE)
    gc.freeze()
    source, target = sys.stdin.buffer, sys.stdout.buffer
    try:
        while (frame := read_frame(source)) is not None:
            target.write(_line(frame))
            target.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains when it ends
    return 0


def _line(frame: Frame) -> bytes:
    signal.setitimer(signal.ITIMER_REAL, LONGEST)
    try:
        text, whole = line(frame)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except TooLong:
        return FAILED + failure(frame.header, "it took too long")
    return (WRITTEN if whole else FAILED) + text


def _give_up(_number: int, _frame: FrameType | None) -> None:
    raise TooLong


if __name__ == "__main__":
    sys.exit(main())
