"""The configuration while the gateway runs: its file, what discovery adds to it, and how a change comes into force."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path

import backends
from gateway.config import Config, ConfigError, Problem
from gateway.config.checks import stays
from gateway.discovery import Discovery
from gateway.notify import Notifier
from gateway.people import People
from gateway.provenance import Reading
from gateway.provenance.lockfile import NAME
from gateway.provenance.permissions import complaints, look, own_groups
from gateway.snapshot import Snapshot, compile_config
from gateway.tls import EngineTls, Stamp, TlsFileError, Watch, port_problem, stamp, tls_files

WATCH_EVERY = 1.0  # seconds between two looks at the configuration file

log = logging.getLogger("sekisho")


class Files:
    """Where the configuration comes from."""

    def __init__(self, path: Path, overrides: Mapping[str, object], sockets: Path) -> None:
        self._path, self._overrides, self._sockets = path, overrides, sockets
        self._lock = self.path.parent / NAME  # of the model files
        self._told: set[str] = set()
        self.complaints: list[str] = []  # on files that others could read or change; of the last reading, new ones only

    def read(self) -> Config:
        """Raises: ConfigError."""
        reading = Reading()
        config = reading.config(self._path, backends.kinds(), self._overrides)
        self.check_port(config)
        self._lock = config.provenance.lock_file or self.path.parent / NAME
        found = complaints(look(reading.places), own_groups())
        self.complaints = [line for line in found if line not in self._told]
        self._told = set(found)
        return config

    def read_again(self) -> Config:
        """As `read`, for a gateway that is serving: there a file without content is no wish for a gateway without
        models, but a write that has failed. Raises: ConfigError."""
        with contextlib.suppress(OSError):  # `read` says what is wrong with it
            if not self._path.read_bytes().strip():
                raise ConfigError([Problem(str(self._path), None, "", "the file is empty", "write the configuration")])
        return self.read()

    def complain(self) -> None:
        for line in self.complaints:
            log.warning("%s", line)

    def check_port(self, config: Config) -> None:
        """Raises: ConfigError when the files of the port's TLS cannot be used."""
        if problem := port_problem(config.server.tls):
            raise ConfigError([Problem(str(self._path), None, *problem)])

    @property
    def path(self) -> Path:
        return self._path.absolute()

    def compile(self, config: Config, people: People | None = None) -> Snapshot:
        """Raises: ConfigError. `people`: those of the database."""
        return compiled(config, self._sockets, self._path, people)

    def stamp(self) -> Stamp | None:
        """Changes when the file or the lock file does; None while the former is gone, as during a careless save."""
        found = stamp((self._path, self._lock))
        return found if found[0] is not None else None


def compiled(config: Config, sockets: Path, path: Path, people: People | None = None) -> Snapshot:
    """Raises: ConfigError. `sockets`: folder of the embedded engines' sockets. `path`: named in problems."""
    snapshot = compile_config(config, backends.load, sockets, str(path), people)
    if problems := [Problem(str(path), None, *problem) for problem in _unreadable_certificates(snapshot)]:
        raise ConfigError(problems)
    return snapshot


def _unreadable_certificates(snapshot: Snapshot) -> Iterator[tuple[str, str, str]]:
    """(path, what is wrong, what to write instead) for engines that could only fail once a request comes."""
    engines = EngineTls()
    for replica in snapshot.replicas():
        try:
            if replica.endpoint.tls:
                engines.context(replica.endpoint)
        except TlsFileError as error:
            yield f"models.{replica.model}.replicas.{error.field}", error.problem, error.hint


class Keeper:
    """Follows the file and what discovery finds, and publishes what they come to: all of it or nothing."""

    def __init__(
        self,
        files: Files,
        first: Snapshot,
        publish: Callable[[Snapshot], Awaitable[None]],
        people: Callable[[], People | None],
        reloads: dict[str, int],
        notifier: Notifier,
    ) -> None:
        """Args: publish: puts a snapshot into force. people: those of the database. reloads: counts by result."""
        self._files, self._publish, self._people, self._reloads = files, publish, people, reloads
        self._notifier = notifier
        self.config = first.config  # as the file says
        self.served = first.config  # with the discovered models in addition
        self._discovery = Discovery()
        self._one_at_a_time = asyncio.Lock()

    async def reload(self) -> None:
        """The old configuration stays until the new one is complete. Running requests keep the old one.

        Raises: ConfigError.
        """
        async with self._one_at_a_time:
            self._notifier.reloading()
            try:
                await self._reload()
            except ConfigError as error:
                self._reloads["failure"] += 1
                log.error("the changed configuration was not loaded, the old one stays: %s", error)
                raise
            finally:
                self._notifier.ready()

    async def _reload(self) -> None:
        """Raises: ConfigError."""
        config = await asyncio.get_running_loop().run_in_executor(None, self._files.read_again)
        snapshot = await self._compiled(await self._discovery.look(config))
        self._warn_of_what_stays(config)
        self.config = config
        await self._put_in_force(snapshot)
        await self._discovery.forget(config)
        self._reloads["success"] += 1
        log.info("configuration reloaded")
        self._files.complain()

    async def reload_quietly(self) -> bool:
        """For changes nobody waits for. Whether it worked; if not, that has been logged and counted."""
        with contextlib.suppress(ConfigError):
            await self.reload()
            return True
        return False

    async def renew(self) -> None:
        """Takes changed files of certificates and keys, of the port and of engines: all of them or none."""
        async with self._one_at_a_time:
            try:
                await asyncio.get_running_loop().run_in_executor(None, self._files.check_port, self.served)
                snapshot = await self._compiled(self.served)
            except ConfigError as error:
                self._reloads["failure"] += 1
                log.error("the changed certificates were not loaded, the old ones stay: %s", error)
                return
            await self._put_in_force(snapshot)
            self._reloads["success"] += 1
            log.info("certificates reloaded")

    async def discover(self) -> None:
        """Looks at once and then now and then; a look that finds nothing new changes nothing."""
        while True:
            if self.config.discovery:
                try:
                    async with self._one_at_a_time:
                        found = await self._discovery.look(self.config, due_only=True)
                        if found.models != self.served.models:
                            await self._put_in_force(await self._compiled(found))
                            log.info("discovery: %d models are published now", len(found.models))
                except ConfigError as error:
                    log.error("what discovery found cannot be used, the old models stay: %s", error)
                except Exception:
                    log.exception("discovery failed, the old models stay")
            await asyncio.sleep(self._discovery.pause(self.config))

    async def watch(self, changed: Callable[[], Awaitable[None]]) -> None:
        """Calls `changed` when the file has changed and come to rest, and looks after the files of certificates. Half
        a file may be valid: without the tenants that are still to be written, every key would be refused."""
        acted = last = self._files.stamp()
        certificates = Watch(tls_files(self.served))
        while True:
            await asyncio.sleep(WATCH_EVERY)
            before, last = last, self._files.stamp()
            if last is not None and last != acted and last == before:
                acted = last
                await changed()
            if certificates.changed(tls_files(self.served)):
                await self.renew()

    async def close(self) -> None:
        await self._discovery.close()

    async def _put_in_force(self, snapshot: Snapshot) -> None:
        self.served = snapshot.config
        await self._publish(snapshot)

    async def _compiled(self, config: Config) -> Snapshot:
        return await asyncio.get_running_loop().run_in_executor(None, self._files.compile, config, self._people())

    def _warn_of_what_stays(self, new: Config) -> None:
        for line in stays(self.config, new):
            log.warning("%s", line)
