"""One issuer's public keys, kept fresh: read in the background, and at once for a token whose key is not among them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from gateway import claims
from gateway.claims import PublicKey, SignedToken, UnusableKeys
from gateway.errors import AuthError
from gateway.tokens.places import TIMEOUT, NoKeys, Pace, Place

MOST_WAITING = 100  # requests that wait for one issuer to be asked for keys it may not have

log = logging.getLogger("sekisho")


class KeySource:
    """The public keys at one place, kept fresh. `changed` is called when keys are gone that tokens were verified with.

    Keys are read in tasks of this object: a caller that gives up waiting takes nothing with it.
    """

    def __init__(self, issuer: str, place: Place, pace: Pace, changed: Callable[[], None]) -> None:
        self._issuer, self._place, self._pace, self._changed = issuer, place, pace, changed
        self._keys: tuple[PublicKey, ...] | None = None  # None: never read, or too long ago
        self._document = b""  # that they were read from
        self._read_at = self._tried_at = 0.0  # steady clock
        self._failures = 0  # in a row
        self._pause = 0.0  # until the next reading that nobody asks for
        self._ask_at = 0.0  # before, a key that was asked for in vain is not asked for again, and a new one waits
        self._missed: set[str | None] = set()  # names asked for in vain since the last time that somebody asked
        self._wanted: list[str | None] = []  # names that requests are waiting for; None for tokens that name no key
        self._reading = asyncio.create_task(self._read())
        self._asking: asyncio.Task[None] | None = None
        self._running = asyncio.create_task(self._run())

    def stop(self) -> list[asyncio.Task[None]]:
        """Cancels its tasks and returns them."""
        tasks = [task for task in (self._running, self._reading, self._asking) if task is not None]
        for task in tasks:
            task.cancel()
        return tasks

    def refresh(self) -> None:
        """Has the keys read now, unless that was a moment ago: a reload is how an operator asks for it."""
        if time.monotonic() - self._tried_at > self._pace.shortest:
            self._start()

    # --- what tokens ask for
    async def ready(self) -> None:
        """Returns once there are keys, or the first attempt to read them is over."""
        if self._keys is None:
            await asyncio.wait({self._reading}, timeout=2 * TIMEOUT)

    def has_signed(self, token: SignedToken) -> bool:
        return claims.is_signed(token, self._keys or ())

    async def look_again(self, token: SignedToken) -> None:
        """Has the keys read for a token that none of them signed. All who wait share one reading.

        Raises: AuthError unless one of the keys has signed it then.
        """
        name, now = token.kid, time.monotonic()
        if name is not None and any(key.kid == name for key in self._keys or ()):
            raise AuthError("the token was not signed with the key that it names")
        if self._keys is None and self._failures and now < self._tried_at + self._pace.first_retry:
            raise self._refusal()
        if (name in self._missed and now < self._ask_at) or len(self._wanted) >= MOST_WAITING:
            raise self._refusal()
        self._wanted.append(name)
        try:
            await asyncio.wait({self._ask()}, timeout=self._place.asked + 2 * TIMEOUT)
        finally:
            self._wanted.remove(name)
        if not self.has_signed(token):
            self._missed.add(name)
            raise self._refusal()

    def _refusal(self) -> AuthError:
        if self._keys is None:
            return AuthError("the keys of the token's issuer cannot be read")
        return AuthError("the token was signed with none of its issuer's keys")

    def _ask(self) -> asyncio.Task[None]:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._look())
        return self._asking

    async def _look(self) -> None:
        await asyncio.sleep(max(0.0, self._ask_at - time.monotonic()))
        before = self._keys
        await asyncio.wait({self._reading})  # if one is running: it may have begun before the key was published
        if self._keys == before:
            self._missed.clear()
            self._ask_at = time.monotonic() + self._place.asked
            await asyncio.wait({self._start()})
        known = {key.kid for key in self._keys or () if key.kid is not None}
        if not known.isdisjoint(self._wanted):
            self._ask_at = 0.0  # not in vain: the next new key need not wait
        # Here and not by those who have waited: who comes before they wake up would begin the next look.
        self._missed.update(name for name in self._wanted if name is not None and name not in known)

    # --- reading
    async def _run(self) -> None:
        while True:
            await asyncio.wait({self._reading})
            await asyncio.sleep(self._pause)
            self._start()

    def _start(self) -> asyncio.Task[None]:
        if self._reading.done():
            self._reading = asyncio.create_task(self._read())
        return self._reading

    async def _read(self) -> None:
        try:
            document, self._pause = await self._place.read()
            if document != self._document:
                self._take(claims.read_keys(document))
                self._document = document
        except (NoKeys, UnusableKeys) as error:
            self._failed(str(error))
        except Exception:
            log.exception("the keys of issuer %s could not be read", self._issuer)
            self._failed("the gateway failed")
        else:
            if self._failures:
                log.info("the keys of issuer %s can be read again", self._issuer)
            self._failures, self._read_at = 0, time.monotonic()
        self._tried_at = time.monotonic()

    def _take(self, keys: tuple[PublicKey, ...]) -> None:
        if keys != self._keys:
            log.info("issuer %s: %d keys can be used", self._issuer, len(keys))
        gone = set(self._keys or ()) - set(keys)
        self._keys = keys
        if gone:
            self._changed()

    def _failed(self, reason: str) -> None:
        if not self._failures:
            known = len(self._keys or ())
            log.warning("the keys of issuer %s cannot be read, %d stay in use: %s", self._issuer, known, reason)
        self._failures += 1
        self._pause = min(self._pace.first_retry * 2.0 ** min(self._failures - 1, 30), self._place.last_retry)
        if self._keys is not None and time.monotonic() - self._read_at > self._pace.stale:
            log.error("the keys of issuer %s are too old and not used any more: %s", self._issuer, reason)
            self._keys, self._document = None, b""
            self._changed()
