"""All attacks in their order, and what has to be true after them."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.attacks import engines, floods, leaks, smuggling
from tests.attacks.target import Target
from tests.e2e.harness import eventually

Attack = Callable[[Target], None]
ATTACKS: tuple[Attack, ...] = (*smuggling.ALL, *floods.ALL, *leaks.ALL, *engines.ALL)
PRICE = 64  # MiB that all of it may leave behind
MOST_SERIES = 6000


class Before:
    """How the gateway was before anybody attacked it."""

    def __init__(self, target: Target) -> None:
        target.works()
        self._files, self._threads = target.process.num_fds(), target.process.num_threads()
        self._memory = target.process.memory_info().rss

    def look_again(self, target: Target) -> dict[str, str]:
        """What is left of the attacks, for the table. Raises: AssertionError for what should not be."""
        process, gateway = target.process, target.gateway
        assert gateway.process.poll() is None, "the gateway has ended"
        assert target.at_rest(), "a request was never let go"
        # Connections to engines are kept for half a minute.
        assert eventually(lambda: process.num_fds() <= self._files + 3, 45), (self._files, process.num_fds())
        # A pool of the event loop grows to six when a configuration is loaded.
        assert process.num_threads() <= self._threads + 6, (self._threads, process.num_threads())
        grown = (process.memory_info().rss - self._memory) >> 20
        assert grown <= PRICE, f"{grown} MiB were never given back"
        begun = time.monotonic()
        for _ in range(200):
            assert gateway.http.get("/health").status_code == 200
        each = (time.monotonic() - begun) / 200 * 1000
        series = len([line for line in gateway.metrics_page().splitlines() if not line.startswith("#")])
        assert series <= MOST_SERIES, series
        assert "Traceback" not in gateway.log(), gateway.log()[-5000:]
        target.works()
        return {
            "files": f"{self._files} before, {process.num_fds()} after",
            "threads": f"{self._threads} before, {process.num_threads()} after",
            "memory": f"{grown:+} MiB",
            "/health": f"{each:.2f} ms each",
            "metrics": f"{series} series",
        }
