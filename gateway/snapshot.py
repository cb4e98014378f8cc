"""The operator's will as one immutable value, compiled from the configuration. Requests keep the one they began on."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from ipaddress import ip_network
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

from backends.base import Backend, ModelFormat, Operation
from backends.formats import Level, UnreadableModel, inspect, support
from gateway.certificates import holders
from gateway.config import (
    Config,
    ConfigError,
    EngineAccess,
    ModelConfig,
    Problem,
    ReplicaConfig,
)
from gateway.media import MediaRules
from gateway.media.links import canonical_host
from gateway.people import People, compile_limits
from gateway.provenance import without_hash
from gateway.types import EmbeddedModel, Endpoint, Limits, Model, Network, Principal, Replica, Tenant, Timeouts

EMBEDDED = "llamacpp"
LONGEST_CONTEXT = 8192  # tokens an embedded sequence gets when nobody asked: memory grows with it
DEFAULT_COMPLETION = 512  # tokens reserved for an answer when neither request nor model sets a limit

_HEAD = (
    "POST {path} HTTP/1.1\r\nhost: {host}\r\n{content}"
    "accept: {accept}\r\naccept-encoding: identity\r\nuser-agent: sekisho\r\n{credentials}"
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything a request needs to know that does not change while it runs."""

    config: Config
    people: People
    keys: Mapping[bytes, Principal] = field(repr=False)  # the people's: SHA-256 of the whole key -> who it is
    holders: Mapping[str, Principal]  # name in a client certificate -> who it is
    anonymous: Principal | None
    models: Mapping[str, Model]
    names: Mapping[str, Model]  # names and aliases
    metrics_networks: tuple[Network, ...]
    trusted_proxies: tuple[Network, ...]
    media: MediaRules
    max_event: int  # bytes
    expose_route: bool
    hedge_after: float | None  # seconds without a first byte, then a second replica is asked

    def with_people(self, people: People) -> Snapshot:
        """With others who may call: what the database has learned since."""
        return replace(self, people=people, keys=people.keys, holders=_holders(self.config, people))

    def replicas(self) -> Iterator[Replica]:
        for model in self.models.values():
            yield from model.replicas


def compile_config(
    config: Config, load: Callable[[str], Backend], sockets: Path, file: str = "", people: People | None = None
) -> Snapshot:
    """Resolves all cross-references.

    Args:   load: kind -> adapter. sockets: folder for the sockets of embedded engines. file: named in problems.
            people: those of the database, whom the configuration's come on top of.
    Raises: ConfigError also for what cannot come true: a setting without effect would be a trap.
    """
    refused = (*_impossible(config), *without_hash(config))
    if problems := [Problem(file, None, path, message, hint) for path, message, hint in refused]:
        raise ConfigError(problems)
    now = int(time.time())
    models = {entry.name: _model(entry, load, sockets, now) for entry in config.models}
    names = {name: model for model in models.values() for name in (model.name, *model.aliases)}
    people = (people or People()).with_file(config.tenants)
    return Snapshot(
        config=config,
        people=people,
        keys=people.keys,
        holders=_holders(config, people),
        anonymous=None
        if config.auth.required
        else Principal(Tenant("anonymous"), "none", "user", ("*",), None, Limits()),
        models=MappingProxyType(models),
        names=MappingProxyType(names),
        metrics_networks=tuple(ip_network(str(cidr)) for cidr in config.metrics.allow),
        trusted_proxies=tuple(ip_network(str(cidr)) for cidr in config.server.trusted_proxies),
        media=_media(config),
        max_event=config.server.max_event,
        expose_route=config.server.expose_route,
        hedge_after=config.routing.hedge_after,
    )


def _media(config: Config) -> MediaRules:
    given = config.media
    return MediaRules(
        hosts=frozenset(host for name in given.allow_hosts if (host := canonical_host(str(name))) is not None),
        networks=tuple(ip_network(str(network)) for network in given.allow_networks),
        fetched=given.fetch == "gateway",
        max_size=given.max_size,
        timeout=given.timeout,
        max_total=config.server.max_body,
    )


def _holders(config: Config, people: People) -> Mapping[str, Principal]:
    return MappingProxyType(holders(config.auth.certificates, people.tenants))


def _impossible(config: Config) -> Iterator[tuple[str, str, str]]:
    """(path, what is wrong, what to write instead) for settings that would have no effect here."""
    if config.logging.content == "masked" and find_spec("phonenumbers") is None:
        yield "logging.content", "masking needs the library phonenumbers", "install sekisho[masking], or write none"
    for host in config.media.allow_hosts:
        if canonical_host(str(host)) is None:
            yield "media.allow_hosts", f"{host} is neither a name nor an address", "write addresses as in 10.0.5.7"
    for model in config.models:
        for replica in model.replicas:
            if replica.path is not None and replica.backend not in (None, EMBEDDED):
                yield f"models.{model.name}.replicas", f"{replica.backend} cannot be embedded", "write url, or llamacpp"


# --- models and replicas
def _model(entry: ModelConfig, load: Callable[[str], Backend], sockets: Path, now: int) -> Model:
    replicas = tuple(_replica(entry, _with_file_facts(entry, replica), load, sockets) for replica in entry.replicas)
    return Model(
        name=entry.name,
        aliases=tuple(entry.aliases),
        policy=entry.policy,
        format_preference=tuple(entry.format_preference),
        fallbacks=tuple(entry.fallbacks),
        replicas=replicas,
        max_tokens_default=entry.max_tokens_default or DEFAULT_COMPLETION,
        created=now,
        context_length=entry.context_length or max((r.context_length or 0 for r in replicas), default=0) or None,
        capabilities=tuple(
            entry.capabilities or dict.fromkeys(name for r in entry.replicas for name in r.capabilities)
        ),
        limits=compile_limits(entry.limits, "model", entry.name) or None,
        max_waiting=entry.queue.max_waiting,
        max_wait=entry.queue.max_wait,
    )


def _with_file_facts(entry: ModelConfig, given: ReplicaConfig) -> ReplicaConfig:
    """What the file's header says, for all that the operator has not. Raises: ConfigError when it cannot be loaded."""
    if given.path is None:
        return given
    try:
        file = inspect(given.path)
    except UnreadableModel as error:
        raise _cannot_load(entry, given, error.reason) from None
    if file.format is not ModelFormat.GGUF or file.problems:
        engines = sorted(name for name, how in support(file).items() if how.level is not Level.NO and name != EMBEDDED)
        hint = f"serve it with {', '.join(engines)} and write its url" if engines else "no engine here loads it"
        what = "; ".join(file.problems) or f"the embedded engine does not load {file.format or 'unknown'} models"
        raise _cannot_load(entry, given, what, hint)
    return given.model_copy(
        update={
            "backend": EMBEDDED,
            "format": given.format or str(file.format),
            "quantization": given.quantization or file.quantisation,
            "context_length": given.context_length or min(file.context_length or LONGEST_CONTEXT, LONGEST_CONTEXT),
        }
    )


def _cannot_load(entry: ModelConfig, given: ReplicaConfig, what: str, hint: str = "name a GGUF file") -> ConfigError:
    return ConfigError([Problem("", None, f"models.{entry.name}.replicas", f"{given.path}: {what}", hint)])


def _replica(entry: ModelConfig, given: ReplicaConfig, load: Callable[[str], Backend], sockets: Path) -> Replica:
    backend = load(given.backend or EMBEDDED)
    embedded = _embedded(entry, given) if given.path is not None else None
    upstream_model = given.model or (Path(str(given.path)).stem if given.path is not None else entry.name)
    if embedded is not None:
        owner = given.labels.get("tenant")  # a process of its own for whoever the replica is kept for
        identity = hashlib.sha256(repr((embedded, upstream_model, owner)).encode()).hexdigest()[:8]
        endpoint, prefix = Endpoint("localhost", 80, unix=str(sockets / f"{identity}.sock")), ""
    else:
        identity = hashlib.sha256(f"{given.url} {upstream_model}".encode()).hexdigest()[:8]
        endpoint, prefix = engine_endpoint(given)
    api_key = given.api_key.get_secret_value() if given.api_key is not None else None
    formats = [str(name) for name in backend.formats]
    return Replica(
        id=f"{entry.name}/{backend.kind}-{identity}",
        model=entry.name,
        backend=backend,
        endpoint=endpoint,
        prefix=prefix,
        upstream_model=upstream_model,
        timeouts=Timeouts(given.timeouts.connect, given.timeouts.first_byte, given.timeouts.idle, given.timeouts.total),
        heads={
            operation: _head(endpoint, prefix + path, api_key, operation) for operation, path in backend.paths.items()
        },
        format=given.format or (formats[0] if len(formats) == 1 else None),
        quantization=given.quantization,
        # An engine whose window is set with each request gets the model's where the replica has none of its own.
        context_length=given.context_length or (entry.context_length if backend.translates else None),
        capabilities=tuple(given.capabilities or entry.capabilities),
        max_inflight=given.max_inflight or (given.parallel if embedded else None),
        weight=given.weight,
        api_key=api_key,
        embedded=embedded,
        tenant=given.labels.get("tenant"),
    )


def _embedded(entry: ModelConfig, given: ReplicaConfig) -> EmbeddedModel:
    return EmbeddedModel(
        path=str(given.path),
        sha256=given.sha256,
        context_length=given.context_length,
        parallel=given.parallel,
        gpu_layers=given.gpu_layers,
        threads=given.threads,
        max_waiting=entry.queue.max_waiting,
        max_wait=entry.queue.max_wait,
    )


def engine_endpoint(given: EngineAccess) -> tuple[Endpoint, str]:
    """Where an engine's URL leads, and the path in front of its routes. The URL has been checked when it was read."""
    url = str(given.url)
    if url.startswith("unix:"):
        return Endpoint("localhost", 80, unix=url.removeprefix("unix:")), ""
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    files = [
        str(file) if file is not None else None
        for file in (given.ca_file, given.client_cert_file, given.client_key_file)
    ]
    endpoint = Endpoint(parts.hostname or "", parts.port or (443 if tls else 80), tls, None, *files)
    return endpoint, parts.path.rstrip("/").removesuffix("/v1")


def _head(endpoint: Endpoint, path: str, api_key: str | None, operation: Operation) -> bytes:
    """Forms bring a content type of their own with each request."""
    credentials = f"authorization: Bearer {api_key}\r\n" if api_key else ""
    content = "" if operation.takes_form else "content-type: application/json\r\n"
    accept = "*/*" if operation.passes else "application/json, text/event-stream"
    return _HEAD.format(
        path=path, host=endpoint.authority, content=content, accept=accept, credentials=credentials
    ).encode()
