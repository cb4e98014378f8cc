"""The page about the configuration: an introduction somebody has written, and tables made from the models.

`python -m gateway.config --docs` prints it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from gateway.config.checks import RESTART_ONLY, SWITCHED_BY_RESTART
from gateway.config.root import Config
from gateway.config.shape import Shape, shape_of
from gateway.units import format_duration, format_size

INTRODUCTION = Path(__file__).parent.parent.parent / "docs" / "configuration.intro.md"  # in the sources only

_WORDS = {  # what checks a value -> what people write
    "parse_duration": "duration",
    "parse_size": "size",
    "parse_rate": "rate",
    "parse_budget": "budget",
    "_no_boolean": "whole number",
    "_model_name": "model name",
    "tenant_name": "name",
    "_word": "word",
    "_engine_text": "text",
    "_sha256": "64 hex digits",
    "_key_sha256": "64 hex digits",
    "_glob": "glob",
    "_network": "network",
    "_listen_host": "address or host name",
    "_media_host": "host",
    "_origin": "web origin",
    "_engine_url": "engine's URL",
    "_web_url": "URL",
    "_collector_url": "URL",
    "_database_url": "database URL",
    "_redis_url": "Redis URL",
    "_secret": "secret",
    "_header_value": "secret",
    "_file_path": "path",
    "_expires": "moment",
}
_PLAIN = {bool: "`true` or `false`", float: "number", str: "text"}
_RESTART, _SWITCH = " *Restart.*", " *Restart to switch it on or off.*"


def page(introduction: str) -> str:
    """The whole of docs/configuration.md."""
    places = dict(_places(Config, ""))
    tables = [_table(model, paths, places) for model, paths in places.items() if model is not Config]
    return "\n\n".join([introduction.rstrip(), _contents(places), *tables]) + "\n"


def _places(model: type[BaseModel], path: str) -> dict[type[BaseModel], list[str]]:
    """Every section with all the places where it may stand, in the order in which they are met."""
    found = {model: [path]}
    for name, info in model.model_fields.items():
        shape = shape_of(info.annotation)
        inner = _section(shape)
        if inner is not None:
            below = f"{path}.{name}".lstrip(".") + ("[]" if shape.kind == "list" else "")
            for one, paths in _places(inner, below).items():
                found.setdefault(one, []).extend(paths)
    return found


def _section(shape: Shape) -> type[BaseModel] | None:
    return shape.model or (shape_of(shape.item).model if shape.kind == "list" else None)


def _contents(places: Mapping[type[BaseModel], Sequence[str]]) -> str:
    rows = [
        f"| {_link(paths[0])} | {_cell(str(Config.model_fields[paths[0].removesuffix('[]')].description))} |"
        for paths in places.values() if paths[0] and "." not in paths[0]
    ]  # fmt: skip
    return "\n".join(["| section | |", "|---|---|", *rows])


def _table(
    model: type[BaseModel], paths: Sequence[str], places: Mapping[type[BaseModel], Sequence[str]]
) -> str:
    path, *others = paths
    about = " ".join(str(model.__doc__).split())
    if others:
        about += f" The same in {', '.join(f'`{other}`' for other in others)}."
    rows = [
        f"| `{name}` | {_kind(info, places)} | {_meaning(info)}{_restart(path, name)} |"
        for name, info in model.model_fields.items()
    ]
    head = [f"### Section `{path}`", "", _cell(about), "", "| key | value | meaning |", "|---|---|---|"]
    return "\n".join([*head, *rows])


def _link(path: str) -> str:
    anchor = re.sub(r"[^a-z0-9_ -]", "", f"section {path}".lower()).replace(" ", "-")
    return f"[`{path}`](#{anchor})"


def _restart(path: str, name: str) -> str:
    full = f"{path}.{name}"
    if full in SWITCHED_BY_RESTART:
        return _SWITCH
    return _RESTART if full in RESTART_ONLY or path in RESTART_ONLY else ""


# --- what a key takes
def _kind(info: FieldInfo, places: Mapping[type[BaseModel], Sequence[str]]) -> str:
    shape = shape_of(info.annotation)
    if model := _section(shape):
        link = _link(places[model][0])
        text = f"list of {link}" if shape.kind == "list" else link
    elif shape.kind == "list":
        text = _list_of(_scalar(shape.item, ()), "one_or_more" in _checkers(info.metadata))
    elif shape.kind == "map":
        text = f"map of {_plural(_scalar(shape.item, ()))}"
    else:
        text = _scalar(info.annotation, info.metadata)
    return f"{text}, or `null`" if shape.nullable else text


def _list_of(word: str, single: bool) -> str:
    return f"{word}, or a list of {_plural(word)}" if single else f"list of {_plural(word)}"


def _plural(word: str) -> str:
    return word if word.endswith("s") or word.startswith("`") else f"{word}s"


def _scalar(annotation: Any, metadata: Sequence[Any]) -> str:
    """One value in words, with its bounds. `metadata` is what pydantic has taken out of the annotation."""
    if get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        metadata = [*metadata, *more]
    if (members := get_args(annotation)) and type(None) in members:
        (annotation,) = (one for one in members if one is not type(None))
        return _scalar(annotation, metadata)
    if get_origin(annotation) is Literal:
        *most, last = (f"`{_choice(choice)}`" for choice in get_args(annotation))
        return f"{', '.join(most)} or {last}"
    words = [_WORDS[name] for name in _checkers(metadata) if name in _WORDS]
    word = _PLAIN[annotation] if not words or (annotation is float and words == ["whole number"]) else words[0]
    return word + _bounds(metadata, word)


def _choice(value: object) -> str:
    """A choice as YAML wants it: one that looks like a number needs its quotes."""
    return f'"{value}"' if re.fullmatch(r"[0-9]+(\.[0-9]+)?", str(value)) else str(value)


def _checkers(metadata: Sequence[Any]) -> list[str]:
    return [one.func.__name__ for one in metadata if hasattr(one, "func")]


def _bounds(metadata: Sequence[Any], word: str) -> str:
    limits = [limit for one in metadata for limit in (one.metadata if isinstance(one, FieldInfo) else (one,))]
    low = next((one.ge for one in limits if isinstance(one, Ge)), None)
    above = next((one.gt for one in limits if isinstance(one, Gt)), None)
    high = next((one.le for one in limits if isinstance(one, Le)), None)
    if low is not None and high is not None:
        return f", {low:g} to {high:g}" if abs(float(str(high))) < 1e6 else f" from {low}"
    if above is not None and word != "size":
        return f" above {above}"
    return f" from {low}" if low is not None else ""


# --- what a key means
def _meaning(info: FieldInfo) -> str:
    """The description, with the default in it made to stand out."""
    text = str(info.description)
    for form in default_forms(info):
        plain = re.escape(form)
        marked = re.sub(rf"(?<![\w`]){plain} \(default\)", f"`{form}` (default)", text, count=1)
        if form != "none":
            marked = re.sub(rf"\b([Dd]efault) {plain}(?![\w\]])", rf"\1 `{form}`", marked, count=1)
        if marked != text:
            return _cell(marked)
    return _cell(text)


def default_forms(info: FieldInfo) -> Iterator[str]:
    """How the default of a key may be written in its description; nothing for sections and for what is required."""
    extra, shape = info.json_schema_extra, shape_of(info.annotation)
    value = extra["default"] if isinstance(extra, dict) and "default" in extra else info.default
    if value is PydanticUndefined or (_section(shape) is not None and value is not None):
        return
    checkers = _checkers([*info.metadata, *_nested(info.annotation)])
    if value in ((), {}, "", None):
        yield "none"
    if "parse_duration" in checkers and isinstance(value, float):
        yield f"{value:g}s"
        yield format_duration(value)
    elif "parse_size" in checkers and isinstance(value, int):
        yield format_size(value)
    else:
        yield _written(value)


def _nested(annotation: Any) -> Iterator[Any]:
    """The metadata inside of `X | None`."""
    for member in get_args(annotation):
        yield from getattr(member, "__metadata__", ())


def _written(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_item, value))}]"
    if isinstance(value, int | float):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return "{}" if isinstance(value, Mapping) else _choice(value)


def _item(value: object) -> str:
    return str(value) if re.fullmatch(r"\w+", str(value)) else f'"{value}"'


def _cell(text: str) -> str:
    """`text` for a cell of a table: outside of `code` nothing of it is Markdown."""
    parts = text.split("`")
    parts[::2] = (re.sub(r"[|*<]", r"\\\g<0>", part) for part in parts[::2])
    return "`".join(parts)
