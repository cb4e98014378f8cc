"""The configuration: `load` reads and checks a file, `schema` describes it, the `*Config` models are what it becomes.

    yaml    file -> values with lines               values   names, URLs, paths, networks
    source  environment, `*_file`, overrides        shape    what a field takes
    root    the whole file; its sections are in server, access and models, which are made of `section`
    checks  what sections must agree on

`python -m gateway.config --schema` prints the JSON Schema (`json_schema`), `--docs` the page about the configuration
(`docs`).
"""

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from pathlib import Path
from types import MappingProxyType

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gateway.config.access import (
    AuthConfig,
    CertificateConfig,
    JwtConfig,
    KeyConfig,
    LimitsConfig,
    Role,
    TenantConfig,
    ToolsConfig,
)
from gateway.config.checks import Finding, check
from gateway.config.json_schema import schema
from gateway.config.models import (
    DiscoveryConfig,
    EngineAccess,
    ModelConfig,
    Policy,
    QueueConfig,
    ReplicaConfig,
    TimeoutsConfig,
)
from gateway.config.root import Config
from gateway.config.server import (
    LimitsStoreConfig,
    LoggingConfig,
    MediaConfig,
    MetricsConfig,
    ProvenanceConfig,
    RoutingConfig,
    ServerConfig,
    StateConfig,
    TlsConfig,
    TracingConfig,
)
from gateway.config.source import Source, nearest, read_source
from gateway.config.yaml import ConfigError, Problem, StartupError
from gateway.units import Rate

__all__ = [
    "AuthConfig",
    "CertificateConfig",
    "Config",
    "ConfigError",
    "DiscoveryConfig",
    "EngineAccess",
    "JwtConfig",
    "KeyConfig",
    "LimitsConfig",
    "LimitsStoreConfig",
    "LoggingConfig",
    "MediaConfig",
    "MetricsConfig",
    "ModelConfig",
    "Policy",
    "Problem",
    "ProvenanceConfig",
    "QueueConfig",
    "Rate",
    "ReplicaConfig",
    "Role",
    "RoutingConfig",
    "ServerConfig",
    "StartupError",
    "StateConfig",
    "TenantConfig",
    "TimeoutsConfig",
    "TlsConfig",
    "ToolsConfig",
    "TracingConfig",
    "load",
    "schema",
]

_NOTHING: Mapping[str, object] = MappingProxyType({})
_WORDS = {  # pydantic error type -> what is wrong, what to write instead
    "missing": ("missing", "this key is required"),
    "int_parsing": ("not a whole number", "write digits only"),
    "int_type": ("not a whole number", "write digits only"),
    "int_from_float": ("not a whole number", "write digits only"),
    "float_parsing": ("not a number", "write digits only"),
    "float_type": ("not a number", "write digits only"),
    "finite_number": ("out of range", "write a finite number"),
    "bool_parsing": ("neither true nor false", "write one of them"),
    "bool_type": ("neither true nor false", "write one of them"),
    "string_type": ("not text", "put it in quotes"),
    "tuple_type": ("not a list", "write [a, b] or lines that begin with -"),
    "mapping_type": ("not a mapping", "write `key: value`"),
    "model_type": ("not a section", "write its keys on indented lines, or {key: value}"),
    "too_short": ("an empty list", "at least one item is needed"),
}


def load(
    path: Path | str,
    *,
    kinds: Collection[str],
    environ: Mapping[str, str] = os.environ,
    overrides: Mapping[str, object] = _NOTHING,
    more_checks: Iterable[Callable[[Config, Source], Iterable[Finding]]] = (),
) -> Config:
    """Read, complete and check a configuration file.

    Args:    path: YAML or JSON. kinds: the backends there are. environ: for `${NAME}` and `SEKISHO__…`.
             overrides: scalars by dotted path, such as {"server.port": 9090}; they win over the environment.
             more_checks: for who knows more than the file says; they run beside the cross checks.
    Returns: the configuration with absolute paths; every replica's `backend` is one of `kinds`.
    Raises:  ConfigError: with all problems of the first stage (file, values, cross checks) that has any.
    """
    path = Path(path)
    source = read_source(path, Config, environ, overrides)
    try:
        config = Config.model_validate(source.data, context={"folder": source.folder})
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=True)
        # A list is also "too short" once its only item is wrong; that says nothing new.
        wrong = [one for one in details if one["type"] != "too_short" or not one["input"]]
        raise ConfigError(_sorted(_translate(source, one) for one in wrong)) from None
    findings = (check(config, kinds, source.show), *(more(config, source) for more in more_checks))
    found = [source.problem(one.path, one.message, one.hint) for one in chain.from_iterable(findings)]
    if found:
        raise ConfigError(_sorted(found))
    return config


def _sorted(problems: Iterable[Problem]) -> list[Problem]:
    return sorted(problems, key=lambda problem: (problem.line or 0, problem.path))


def _translate(source: Source, error: ErrorDetails) -> Problem:
    """A pydantic error in the words of this file's users, without the value it complains about."""
    path, kind, context = source.written(tuple(error["loc"])), error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        shape = source.shape_at(path[:-1])
        names = shape.names() if shape is not None else ()
        return source.problem(path, "unknown key", nearest(str(path[-1]), names) or "remove it")
    if kind == "literal_error":
        choices = [choice.strip("'") for choice in context["expected"].replace(" or ", ", ").split(", ")]
        guess = nearest(str(error["input"]), choices)
        return source.problem(path, "not one of the choices", guess or f"write one of {', '.join(choices)}")
    if kind == "value_error":
        return source.problem(path, str(context["error"]), getattr(context["error"], "hint", ""))
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        return source.problem(path, "out of range", error["msg"].replace("Input should be", "write a value"))
    return source.problem(path, *_WORDS.get(kind, (error["msg"], "")))
