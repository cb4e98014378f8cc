"""The JSON Schema of the configuration file, for editors and for whoever writes such files by program."""

from typing import Any

from pydantic import BaseModel

from gateway.config.root import Config
from gateway.config.shape import FILE_FORM, shape_of

_VARIABLE_JSON = {"type": "string", "pattern": r"\$\{"}


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
