"""The configuration: `load` reads and checks a file, `schema` describes it, the `*Config` models are what it becomes.

    config_yaml    file -> values with lines            config_values   names, URLs, paths, networks
    config_load    environment, `*_file`, overrides     config_shape    what a field takes
    config_schema  the models, section by section in config_server, config_access and config_models
    config_checks  what sections must agree on

`python -m gateway.config --schema` prints the JSON Schema, `--docs` the page about the configuration (`config_docs`).
"""

import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gateway.config_access import (
    AuthConfig,
    CertificateConfig,
    JwtConfig,
    KeyConfig,
    LimitsConfig,
    Role,
    TenantConfig,
    ToolsConfig,
)
from gateway.config_checks import Finding, check
from gateway.config_load import Source, nearest, read_source
from gateway.config_models import (
    DiscoveryConfig,
    EngineAccess,
    ModelConfig,
    Policy,
    QueueConfig,
    ReplicaConfig,
    TimeoutsConfig,
)
from gateway.config_schema import (
    Config,
)
from gateway.config_server import (
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
from gateway.config_shape import FILE_FORM, shape_of
from gateway.config_yaml import ConfigError, Problem, StartupError
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
_VARIABLE_JSON = {"type": "string", "pattern": r"\$\{"}


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


def schema() -> dict[str, Any]:
    """The JSON Schema of the file, `x_file` forms and `${NAME}` in place of numbers and choices included."""
    described = Config.model_json_schema()
    models = {model.__name__: model for model in _models(Config)}
    for name, section in {**described.pop("$defs"), "Config": described}.items():
        described.setdefault("$defs", {})[name] = section
        _widen(section, models[name])
    described["$defs"].pop("Config")
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Sekisho configuration"}
    return {**head, **{key: value for key, value in described.items() if key not in head}}


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


def _models(model: type[BaseModel]) -> list[type[BaseModel]]:
    """`model` and every section below it."""
    below = [shape_of(info.annotation) for info in model.model_fields.values()]
    inner = [one.model or shape_of(one.item).model for one in below if one.kind in ("section", "list")]
    return [model, *(found for one in inner if one is not None for found in _models(one))]


def _widen(section: dict[str, Any], model: type[BaseModel]) -> None:
    """Let a section's JSON Schema accept what loading accepts beyond the plain values of its model."""
    properties, required = section["properties"], section.pop("required", [])
    for name in tuple(properties):
        kind = shape_of(model.model_fields[name].annotation).kind
        if kind == "scalar":
            properties[name] = _or_variable(properties[name])
        elif "anyOf" not in properties[name] and name not in required:
            properties[name] = _split(properties[name], [{"type": "null"}])  # an empty section means its defaults
    file_forms = [name for name in shape_of(model).names() if name not in model.model_fields]
    for form in file_forms:
        name = form.removesuffix(FILE_FORM)
        properties[form] = {"type": "string", "description": f"File whose stripped content is the value of `{name}`."}
    always = [name for name in required if name + FILE_FORM not in file_forms]
    either = [name for name in required if name + FILE_FORM in file_forms]
    section.update({"required": always} if always else {})
    if either:
        section["allOf"] = [{"anyOf": [{"required": [name]}, {"required": [name + FILE_FORM]}]} for name in either]


def _or_variable(described: dict[str, Any]) -> dict[str, Any]:
    """A scalar's schema that also takes `${NAME}` where it would not take text."""
    options = described.get("anyOf", [described])
    if any(one.get("type") == "string" and "enum" not in one for one in options):
        return described
    return _split(described, [_VARIABLE_JSON])


def _split(described: dict[str, Any], more: list[dict[str, Any]]) -> dict[str, Any]:
    """`described` with further choices; what is said about the property stays outside of them."""
    outer = {key: value for key, value in described.items() if key in ("default", "description", "title")}
    inner = {key: value for key, value in described.items() if key not in outer}
    return {"anyOf": [*inner.get("anyOf", [inner]), *more], **outer}


def _documents(arguments: list[str]) -> str:
    """What the documents of the repository are made of. Raises: SystemExit."""
    if arguments == ["--schema"]:
        return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"
    if arguments == ["--docs"]:
        from gateway import config_docs  # only the sources have its introduction

        return config_docs.page(config_docs.INTRODUCTION.read_text("utf-8"))
    sys.exit("usage: python -m gateway.config --schema > config/schema.json, or --docs > docs/configuration.md")


if __name__ == "__main__":
    sys.stdout.write(_documents(sys.argv[1:]))
