"""From a file to the values that are validated: overrides, `${NAME}`, `*_file`, empty sections, in that order.

Works on any pydantic model; what the fields mean is not known here. Every value keeps its origin, so that an error in
a variable is reported on the variable. Values that came from the environment or from secret files are marked hidden and
are never repeated in a message.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from gateway.config.shape import FILE_FORM, Shape, shape_of
from gateway.config.yaml import ConfigError, Document, KeyPath, Problem, dotted, read_document
from gateway.units import WrongValue

PREFIX = "SEKISHO__"
_MAX_VALUE_FILE_BYTES = 64 << 10
_VARIABLE = re.compile(r"\$(\$?)\{([^}]*)(\}?)")
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(slots=True)
class Source:
    """Values ready to validate, and where each came from."""

    document: Document
    folder: Path  # what relative paths start from
    data: Any
    shape: Shape
    origins: dict[KeyPath, str] = field(default_factory=dict)  # variable or option that replaced the file's value
    hidden: set[KeyPath] = field(default_factory=set)
    value_files: dict[KeyPath, Path] = field(default_factory=dict)  # by the field whose value each holds
    problems: list[Problem] = field(default_factory=list)

    def problem(self, path: KeyPath, message: str, hint: str = "") -> Problem:
        """A Problem at `path`, on the line of the nearest key that the file has."""
        for end in range(len(path), 0, -1):
            if origin := self.origins.get(path[:end]):
                return Problem(origin, None, dotted(path), message, hint)
            if line := self.document.lines.get(path[:end]):
                return Problem(self.document.file, line, dotted(path), message, hint)
        return Problem(self.document.file, 1, dotted(path), message, hint)

    def report(self, path: KeyPath, message: str, hint: str = "") -> None:
        self.problems.append(self.problem(path, message, hint))

    def show(self, path: KeyPath, value: str) -> str:
        """`value` for use in a message, or a placeholder when it may be a secret."""
        return "(not shown)" if path in self.hidden else f"`{value}`"

    def written(self, path: KeyPath) -> KeyPath:
        """`path` without the index of an item which stands there alone, not in a list."""
        here = self.data
        try:
            for key in path[:-1]:
                here = here[key]
        except (KeyError, IndexError, TypeError):  # a default, or the pydantic name of a choice
            return path
        return path[:-1] if path and isinstance(path[-1], int) and not isinstance(here, list) else path

    def shape_at(self, path: KeyPath) -> Shape | None:
        found: Shape | None = self.shape
        for key in path:
            found = None if found is None else found.child(key)
        return found


def read_source(
    path: Path, model: type[BaseModel], environ: Mapping[str, str], overrides: Mapping[str, object]
) -> Source:
    """Read `path` for `model`, with `SEKISHO__…` variables and then `overrides` ("server.port": 9090) put over it.

    Raises: ConfigError: with everything found wrong before validation.
    """
    document = read_document(path)
    source = Source(document, path.absolute().parent, document.data, shape_of(model))
    if not isinstance(document.data, dict):
        hint = "write sections such as `server:` and `models:`"
        raise ConfigError([Problem(document.file, 1, "", "not a mapping", hint)])
    _override_all(source, environ, overrides)
    source.data = _fill(source, source.data, (), environ)
    source.data = _settle(source, source.data, source.shape, ())
    if source.problems:
        raise ConfigError(sorted(source.problems, key=lambda problem: (problem.line or 0, problem.path)))
    return source


def nearest(word: str, candidates: Iterable[str]) -> str:
    """ "did you mean `x`?" for the closest candidate; "" when none is close."""
    close = difflib.get_close_matches(word.lower(), list(candidates), n=1, cutoff=0.6)
    return f"did you mean `{close[0]}`?" if close else ""


# Overrides


def _override_all(source: Source, environ: Mapping[str, str], overrides: Mapping[str, object]) -> None:
    ours = [name for name in environ if name.upper().startswith(PREFIX)]
    for name in sorted(ours, key=_natural):
        _override(source, name[len(PREFIX) :].split("__"), environ[name], name)
    for name, value in overrides.items():
        _override(source, name.split("."), value, f"--{name.rpartition('.')[2]}")


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts list index 10 after 2, since an index may append only at the end."""
    return [(int(part), "") if part.isdecimal() and len(part) < 9 else (-1, part.lower()) for part in name.split("__")]


def _override(source: Source, parts: list[str], value: object, origin: str) -> None:
    """Put one value where `parts` point, case-insensitively, making what is missing on the way."""
    try:
        container, path, shape = _walk(source, parts)
    except WrongValue as wrong:
        source.problems.append(Problem(origin, None, "", str(wrong), wrong.hint))
        return
    if shape.kind != "scalar" and not shape.single:
        hint = "name a list index such as __0" if shape.kind == "list" else f"name one of its values, {origin}__…"
        source.problems.append(Problem(origin, None, dotted(path), f"a {shape.kind}, not a single value", hint))
        return
    key = path[-1]
    new = None if (shape.nullable or shape.single) and value in ("", "null", "~") else value
    if isinstance(container, list):
        container[int(key) : int(key) + 1] = [new]
    else:
        for rival in (f"{key}{FILE_FORM}", str(key).removesuffix(FILE_FORM)):  # `x` and `x_file` replace each other
            if rival != key and _is_file_form(source.shape_at(path[:-1]), {rival, str(key)}):
                container.pop(rival, None)
        container[key] = new
    source.origins[path] = origin
    source.hidden.add(path)


def _is_file_form(section: Shape | None, names: set[str]) -> bool:
    """True when, of a name and its `_file` form, only the shorter is a real field: the other reads it from a file."""
    fields = section.model.model_fields if section is not None and section.model is not None else {}
    return min(names, key=len) in fields and max(names, key=len) not in fields


def _walk(source: Source, parts: list[str]) -> tuple[Any, KeyPath, Shape]:
    """The container, full path and shape that `parts` name.

    Raises: WrongValue: no such field or list item, or the file has another kind of value on the way.
    """
    here, shape = source.data, source.shape
    path: KeyPath = ()
    for position, part in enumerate(parts):
        key, below = _step(shape, here, parts[position:] if shape.kind == "map" else [part], path)
        path = (*path, key)
        if position == len(parts) - 1 or shape.kind == "map":
            return here, path, below
        if below.kind == "scalar":
            raise WrongValue(f"`{dotted(path)}` is a single value", "end the name there")
        here = _enter(here, key, below, path)
        shape = below
    raise WrongValue("names no field", f"write {PREFIX}SERVER__PORT or the like")


def _step(shape: Shape, here: Any, parts: list[str], path: KeyPath) -> tuple[str | int, Shape]:
    if shape.kind == "list":
        index = int(parts[0]) if parts[0].isdecimal() and len(parts[0]) < 9 else -1
        if not 0 <= index <= len(here):
            raise WrongValue(f"`{dotted(path)}` has no item {parts[0]}", f"it has {len(here)}: write 0 to {len(here)}")
        return index, shape_of(shape.item)
    if shape.kind == "map":
        name = "__".join(parts).lower()
        return next((key for key in here if str(key).lower() == name), name), shape_of(shape.item)
    name = parts[0].lower()
    if name not in shape.names():
        hint = nearest(name, shape.names()) or f"write one of {', '.join(shape.names())}"
        raise WrongValue(f"names no field: there is no `{dotted((*path, name))}`", hint)
    return name, shape.child(name) or Shape("scalar", nullable=True, text=True)  # the `_file` form of a text field


def _enter(here: Any, key: str | int, shape: Shape, path: KeyPath) -> Any:
    """The container under `key`, made when it is missing or empty."""
    if isinstance(here, list) and isinstance(key, int) and key == len(here):
        here.append(None)
    inner = here.get(key) if isinstance(here, dict) else here[key]
    if inner is None:
        inner = here[key] = [] if shape.kind == "list" else {}
    if shape.single and not isinstance(inner, list | dict):
        inner = here[key] = [inner]
    if not isinstance(inner, list if shape.kind == "list" else dict):
        raise WrongValue(f"the file has no {shape.kind} at `{dotted(path)}`", "correct the file first")
    return inner


# ${NAME}


def _fill(source: Source, value: Any, path: KeyPath, environ: Mapping[str, str]) -> Any:
    """`value` with variables replaced in every string that the file holds; text from overrides stays as it is."""
    if path in source.origins:
        return value
    if isinstance(value, dict):
        return {key: _fill(source, item, (*path, key), environ) for key, item in value.items()}
    if isinstance(value, list):
        return [_fill(source, item, (*path, index), environ) for index, item in enumerate(value)]
    if not isinstance(value, str) or "${" not in value:
        return value
    try:
        filled = _VARIABLE.sub(lambda match: _variable(match, environ), value)
    except WrongValue as wrong:
        source.report(path, str(wrong), wrong.hint)
        return value
    if filled != value.replace("$${", "${"):
        source.hidden.add(path)
    return filled


def _variable(match: re.Match[str], environ: Mapping[str, str]) -> str:
    escaped, name, closed = match.groups()
    escape = "write $${ for the characters themselves"
    if escaped:
        return match[0][1:]
    if not closed or not _VARIABLE_NAME.fullmatch(name):
        raise WrongValue("`${` without a variable's name and `}`", f"write ${{NAME}}, or {escape}")
    if name not in environ:
        raise WrongValue(f"the environment variable {name} is not set", f"set it, or {escape}")
    return environ[name]


# *_file and empty sections


def _settle(source: Source, value: Any, shape: Shape, path: KeyPath) -> Any:
    """`value` with `x_file` read into `x`, and sections, lists and maps left empty dropped so that defaults apply."""
    if isinstance(value, list) and shape.kind == "list":
        return [_settle(source, item, shape_of(shape.item), (*path, index)) for index, item in enumerate(value)]
    if not isinstance(value, dict) or shape.model is None:
        return value
    settled: dict[str, Any] = {}
    for key, item in value.items():
        below = shape.child(key)
        target = key.removesuffix(FILE_FORM)
        if below is None and key in shape.names():
            if value.get(target) is not None:
                source.report((*path, key), f"`{target}` is given too", "keep one of them")
            elif item is not None:
                settled[target] = _read_value(source, item, (*path, key), (*path, target))
        elif below is None or below.kind == "scalar":
            if item is not None or key not in settled:  # `x: null` beside `x_file` leaves what the file said
                settled[key] = item
        elif item is not None or below.nullable:
            settled[key] = _settle(source, item, below, (*path, key))
    return settled


def _read_value(source: Source, item: Any, path: KeyPath, target: KeyPath) -> str | None:
    """The stripped text of the file that `item` at `path` names; what is wrong is reported and gives None."""
    source.hidden.add(target)
    source.document.lines.setdefault(target, source.document.lines.get(path, 1))
    if origin := source.origins.get(path):
        source.origins[target] = origin
    try:
        source.value_files[target] = file = _value_file(source.folder, item)
        return _read_text(file)
    except WrongValue as wrong:
        source.report(path, str(wrong), wrong.hint)
        return None


def _value_file(folder: Path, name: Any) -> Path:
    if not isinstance(name, str) or not name or "\0" in name:
        raise WrongValue("not a path", "write the path of a file that holds the value")
    return Path(folder, Path(name).expanduser() if name.startswith("~") else name)


def _read_text(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            raw = stream.read(_MAX_VALUE_FILE_BYTES + 1)
        text = raw.decode().strip()
    except UnicodeDecodeError:
        raise WrongValue(f"{file} is not UTF-8 text", "name a file that holds one value") from None
    except OSError as error:
        raise WrongValue(f"{file} cannot be read ({error.strerror})", "correct the path or its permissions") from None
    if len(raw) > _MAX_VALUE_FILE_BYTES:
        raise WrongValue(f"{file} is larger than 64 KiB", "name a file that holds one value")
    return text
