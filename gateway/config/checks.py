"""What one section of the configuration cannot know about another, and what only the machine can tell: files.

Each check yields what it finds; none stops the next, so a user sees everything at once.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TypeAlias

from gateway.config.models import ReplicaConfig
from gateway.config.root import Config
from gateway.config.shape import walk_sections
from gateway.config.source import nearest
from gateway.config.values import is_loopback
from gateway.config.yaml import KeyPath

Show: TypeAlias = Callable[[KeyPath, str], str]  # a value for a message, hidden when it may be a secret

# What a reload leaves as it is. Sections stand for all of their keys.
RESTART_ONLY = ("server.host", "server.port", "server.workers", "state", "logging.format", "logging.level")
SWITCHED_BY_RESTART = ("server.tls",)  # its files and options change with a reload


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing wrong at `path`."""

    path: KeyPath
    message: str
    hint: str


def check(config: Config, kinds: Collection[str], show: Show) -> Iterator[Finding]:
    """Everything wrong between the sections of `config`. `kinds` are the backends there are."""
    yield from _server(config)
    yield from _model_names(config, show)
    yield from _fallbacks(config, show)
    yield from _same_replicas(config)
    yield from _tenants(config, show)
    yield from _issuers(config)
    yield from _backends(config, kinds, show)
    yield from _files(config)


def stays(old: Config, new: Config) -> Iterator[str]:
    """What `new` changes and a running gateway does not take over, in words for the log."""
    for path in RESTART_ONLY:
        if attrgetter(path)(old) != attrgetter(path)(new):
            yield f"{path} changes only with a restart"
    for path in SWITCHED_BY_RESTART:
        if (attrgetter(path)(old) is None) != (attrgetter(path)(new) is None):
            yield f"{path} is switched on or off only with a restart"


def _server(config: Config) -> Iterator[Finding]:
    if config.server.workers > 1 and config.state.redis is None:
        yield Finding(("server", "workers"), "several workers without a shared store", "set `state.redis` or write 1")
    if not config.auth.required and not is_loopback(config.server.host):
        hint = "write true, or let `server.host` be 127.0.0.1"
        yield Finding(("auth", "required"), "false while `server.host` can be reached from other machines", hint)


def _model_names(config: Config, show: Show) -> Iterator[Finding]:
    seen: dict[str, KeyPath] = {}
    for index, model in enumerate(config.models):
        base: KeyPath = ("models", index)
        paths = [(model.name, (*base, "name")), *((one, (*base, "aliases", i)) for i, one in enumerate(model.aliases))]
        yield from _repeated("model name or alias", paths, seen, show)


def _repeated(what: str, named: list[tuple[str, KeyPath]], seen: dict[str, KeyPath], show: Show) -> Iterator[Finding]:
    for name, path in named:
        if name in seen:
            yield Finding(path, f"{what} {show(path, name)} is used twice", "rename or remove one")
        seen.setdefault(name, path)


def _fallbacks(config: Config, show: Show) -> Iterator[Finding]:
    known = {name for model in config.models for name in (model.name, *model.aliases)}
    prefixes = tuple(found.name_prefix for found in config.discovery)
    for index, model in enumerate(config.models):
        for position, name in enumerate(model.fallbacks):
            path: KeyPath = ("models", index, "fallbacks", position)
            if name in (model.name, *model.aliases):
                yield Finding(path, "a model that falls back to itself", "name another model or remove it")
            elif name not in known and not name.startswith(prefixes):  # what discovery will find is not known yet
                hint = nearest(name, known - {model.name}) or "name a model of this file"
                yield Finding(path, f"unknown model {show(path, name)}", hint)


def _same_replicas(config: Config) -> Iterator[Finding]:
    for index, model in enumerate(config.models):
        seen: dict[tuple[object, ...], int] = {}
        for position, replica in enumerate(model.replicas):
            first = seen.setdefault(_place(replica), position)
            if first != position:
                hint = "remove one; `weight` and `max_inflight` say how much a replica takes"
                yield Finding(("models", index, "replicas", position), f"the same engine as replicas[{first}]", hint)


def _place(replica: ReplicaConfig) -> tuple[object, ...]:
    if replica.url is not None:
        return replica.url, replica.model
    return replica.path, replica.labels.get("tenant")  # each tenant may have a process of its own


def _tenants(config: Config, show: Show) -> Iterator[Finding]:
    tenants: dict[str, KeyPath] = {}
    digests: dict[str, KeyPath] = {}
    for index, tenant in enumerate(config.tenants):
        base: KeyPath = ("tenants", index)
        yield from _repeated("tenant name", [(tenant.name, (*base, "name"))], tenants, show)
        names: dict[str, KeyPath] = {}
        for position, key in enumerate(tenant.keys):
            path = (*base, "keys", position)
            yield from _repeated("key name", [(key.name, (*path, "name"))], names, show)
            if key.sha256 in digests:
                yield Finding((*path, "sha256"), "the same key twice", "remove one: a key belongs to one tenant")
            digests.setdefault(key.sha256, path)


def _issuers(config: Config) -> Iterator[Finding]:
    tls = config.server.tls
    if config.auth.certificates and (tls is None or tls.client_ca_file is None):
        hint = "set `server.tls.client_ca_file`"
        yield Finding(("auth", "certificates"), "client certificates that nobody asks for", hint)
    named: set[tuple[str | None, str | None]] = set()
    for index, one in enumerate(config.auth.certificates):
        if (one.san, one.subject) in named:
            yield Finding(("auth", "certificates", index), "the same name twice", "remove one: it is one caller's")
        named.add((one.san, one.subject))
    seen: set[tuple[str, str]] = set()
    for index, issuer in enumerate(config.auth.jwt):
        if (issuer.issuer, issuer.audience) in seen:
            yield Finding(("auth", "jwt", index), "the same issuer and audience twice", "remove one")
        seen.add((issuer.issuer, issuer.audience))


def _backends(config: Config, kinds: Collection[str], show: Show) -> Iterator[Finding]:
    choice = "write one of " + ", ".join(sorted(kinds))
    replicas = [
        (("models", i, "replicas", j), replica.backend)
        for i, model in enumerate(config.models)
        for j, replica in enumerate(model.replicas)
        if replica.path is None or replica.backend is not None  # the format of a file tells its engine later on
    ]
    found = [(("discovery", i), one.backend) for i, one in enumerate(config.discovery) if one.url is not None]
    for base, backend in [*replicas, *found]:
        path: KeyPath = (*base, "backend")
        if backend is None:
            yield Finding(path, "no `backend`", choice)
        elif backend not in kinds:
            hint = nearest(backend.replace("-", "_"), kinds) or choice
            yield Finding(path, f"unknown backend {show(path, backend)}", hint)


def _files(config: Config) -> Iterator[Finding]:
    for base, section in walk_sections(config):
        for name in type(section).model_fields:
            value = getattr(section, name)
            # The spool's folder is made when it is needed, and the lock file by a command that reads this file first.
            if isinstance(value, Path) and name not in ("spool", "lock_file") and (wrong := _file_problem(name, value)):
                yield Finding((*base, name), wrong, "correct the path; relative ones start at this file's folder")


def _file_problem(name: str, path: Path) -> str:
    try:
        if name == "scan":
            return "" if path.is_dir() else f"no such folder: {path}"
        if not path.exists():
            return f"no such file: {path}"
        return "" if path.is_file() or name == "path" else f"not a file: {path}"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
