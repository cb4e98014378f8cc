"""Tells a service manager how the gateway is doing: ready, reloading, stopping, alive.

The protocol is that of sd_notify(3): one datagram of NAME=value lines to the Unix socket in $NOTIFY_SOCKET. A manager
that wants signs of life says so with $WATCHDOG_USEC, and with $WATCHDOG_PID whose. Without these variables every method
does nothing, and whatever goes wrong with the socket is the manager's business: it never hurts the gateway.
Source: https://www.freedesktop.org/software/systemd/man/latest/sd_notify.html
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Mapping

MOST_STATUS = 200  # characters of a status line


class Notifier:
    """Made once in each process, and closed at its end. Cheap enough for an event loop: a datagram never waits."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._address = _address(environ.get("NOTIFY_SOCKET", ""))
        self._socket = _datagram_socket() if self._address else None
        self.watchdog_interval = _watchdog_interval(environ)  # seconds between two `alive`; None = nobody wants them

    def ready(self, status: str = "") -> None:
        """The gateway serves, after its start or after a reload that `reloading` began. `status`: one line that the
        manager shows to people. No secrets: every user of the machine may read it."""
        self._send("READY=1", *_status(status))

    def reloading(self) -> None:
        """A reload begins. `ready` has to follow, also when it fails and the old configuration stays."""
        # The manager leaves aside what was sent before its own request to reload; hence the time.
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send("RELOADING=1", f"MONOTONIC_USEC={now_us}")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def alive(self) -> None:
        """A sign of life for the watchdog."""
        self._send("WATCHDOG=1")

    async def keep_alive(self) -> None:
        """Signs of life from the event loop, until cancelled: one that hangs gives none."""
        while self.watchdog_interval is not None:
            self.alive()
            await asyncio.sleep(self.watchdog_interval)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, *lines: str) -> None:
        if self._socket is None:
            return
        with contextlib.suppress(OSError):
            self._socket.sendto("\n".join(lines).encode(), self._address)


def _address(name: str) -> str:
    """What to send to, or "" where there is nobody. `@` begins a name without a file (an abstract socket)."""
    if name.startswith("@"):
        return "\0" + name[1:]
    return name if name.startswith("/") else ""  # vsock:... and other families are for virtual machines


def _datagram_socket() -> socket.socket | None:
    try:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    except OSError:
        return None
    made.setblocking(False)  # a manager that is stuck loses messages, the gateway no time
    return made


def _status(text: str) -> tuple[str, ...]:
    line = " ".join(text.split())[:MOST_STATUS]  # a line end would begin another field
    return (f"STATUS={line}",) if line else ()


def _watchdog_interval(environ: Mapping[str, str]) -> float | None:
    """Half of what the manager allows, as sd_watchdog_enabled(3) advises."""
    try:
        allowed = int(environ.get("WATCHDOG_USEC", "0"))
        meant = int(environ.get("WATCHDOG_PID", "") or os.getpid())
    except ValueError:
        return None
    return allowed / 2e6 if allowed > 0 and meant == os.getpid() else None
