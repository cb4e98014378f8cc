"""A YAML (or JSON) file as plain values that remember their lines, with every way it can be refused.

The text is composed into nodes and built here rather than by `yaml.safe_load`, which forgets positions, takes the last
of two equal keys, and expands aliases without a bound.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import TypeAlias

import yaml
from yaml.reader import ReaderError

MAX_FILE_BYTES = 4 << 20
MAX_NODES = 200_000  # counted after aliases are expanded, so an anchor bomb stops here

KeyPath: TypeAlias = tuple[str | int, ...]

_TAG = "tag:yaml.org,2002:"
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing the user must change. `line` counts from 1, None when no line is to blame; `path` is as in `dotted`."""

    file: str
    line: int | None
    path: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        what = f"{self.message}, {self.hint}" if self.hint else self.message
        return _CONTROL.sub(" ", ": ".join(part for part in (where, self.path, what) if part))


class ConfigError(Exception):
    """The configuration cannot be used. `problems` is never empty; str() is one line for each."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(map(str, self.problems)))


class StartupError(Exception):
    """The configuration is fine but the gateway cannot start with it here: a port taken, a host that is not ours."""


@dataclass(slots=True)
class Document:
    """The values of one file. `lines` knows the line of every mapping key and list item."""

    file: str
    data: object
    lines: dict[KeyPath, int]


def dotted(path: KeyPath) -> str:
    """`models[0].replicas[1].url` for ("models", 0, "replicas", 1, "url")."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


def read_document(path: Path) -> Document:
    """Read and build one file.

    Raises: ConfigError: missing, unreadable, not UTF-8, too large, not YAML, or with duplicate keys.
    """
    return parse_document(_read_text(path), str(path))


def parse_document(text: str, file: str) -> Document:
    """Build values from YAML text; `file` is only for messages. An empty text is an empty mapping.

    Raises: ConfigError: not YAML, more than MAX_NODES values, recursive aliases, duplicate keys, foreign tags.
    """
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        builder = _Builder(loader, file)
        data = {} if root is None else builder.build(root, ())
    except _Refused as refused:
        raise ConfigError([Problem(file, refused.line, "", refused.message, refused.hint)]) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError([Problem(file, mark.line + 1 if mark else None, "", _syntax(error))]) from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError([Problem(file, line, "", "not YAML: a control character", "remove it")]) from None
    except RecursionError:
        raise ConfigError([Problem(file, None, "", "nested too deeply", "use the shape of the example file")]) from None
    if builder.problems:
        raise ConfigError(builder.problems)
    return Document(file, {} if data is None else data, builder.lines)


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        text = raw.decode("utf-8-sig")
    except FileNotFoundError:
        problem = Problem(str(path), None, "", "no such file", "write one or name another with --config")
    except OSError as error:
        problem = Problem(str(path), None, "", f"cannot be read ({error.strerror})")
    except UnicodeDecodeError as error:
        problem = Problem(str(path), raw.count(b"\n", 0, error.start) + 1, "", "not UTF-8 text", "save it as UTF-8")
    else:
        if len(raw) <= MAX_FILE_BYTES:
            return text
        problem = Problem(str(path), None, "", "larger than 4 MiB", "a configuration is text of a few pages")
    raise ConfigError([problem])


def _syntax(error: yaml.MarkedYAMLError) -> str:
    """PyYAML's own words without its snippet, which could show a secret."""
    return "not valid YAML: " + ", ".join(part for part in (error.context, error.problem) if part)


class _Refused(Exception):
    """Stops the build at once: what follows cannot be trusted or would cost too much."""

    def __init__(self, node: yaml.Node | None, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.line = node.start_mark.line + 1 if node else None
        self.message, self.hint = message, hint


class _Loader(yaml.SafeLoader):
    """SafeLoader that stops composing at MAX_NODES: 4 MiB of brackets would otherwise take minutes."""

    composed = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.composed += 1
        if self.composed > MAX_NODES:
            raise _Refused(parent, f"more than {MAX_NODES} values", "split the fleet over several gateways")
        return super().compose_node(parent, index)


@dataclass(slots=True)
class _Builder:
    """Turns nodes into dicts, lists and scalars, noting lines and collecting duplicate keys."""

    loader: _Loader
    file: str
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    built: int = 0
    open: set[int] = field(default_factory=set)  # ids of nodes being built: an alias inside its own anchor shows here

    def build(self, node: yaml.Node, path: KeyPath) -> object:
        self.built += 1
        if self.built > MAX_NODES:
            raise _Refused(node, f"more than {MAX_NODES} values once aliases are expanded", "use fewer aliases")
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node)
        if id(node) in self.open:
            raise _Refused(node, "an alias inside its own anchor", "write the value out")
        if node.tag not in (_TAG + "map", _TAG + "seq"):
            raise _Refused(node, "a tag that is not plain YAML", "remove the tag")
        self.open.add(id(node))
        value = self.mapping(node, path) if isinstance(node, yaml.MappingNode) else self.sequence(node, path)
        self.open.discard(id(node))
        return value

    def scalar(self, node: yaml.ScalarNode) -> object:
        try:
            value = self.loader.construct_object(node)
        except (ValueError, OverflowError):  # 2027-13-45, or a number of ten thousand digits
            raise _Refused(node, "looks like a number or a date and is none", "put text in quotes") from None
        if value is None or isinstance(value, str | int | float | date):
            return value
        raise _Refused(node, "a tag that is not plain YAML", "remove the tag")

    def sequence(self, node: yaml.Node, path: KeyPath) -> list[object]:
        items: list[object] = []
        for index, item in enumerate(node.value):
            items.append(self.build(item, (*path, index)))
            self.lines[(*path, index)] = item.start_mark.line + 1
        return items

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, object]:
        values: dict[str, object] = {}
        for source in self.merged(node):  # `<<: *defaults` first, so that the mapping's own keys win
            inherited = self.build(source, path)
            values = {**inherited, **values} if isinstance(inherited, dict) else values
        own: dict[str, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _TAG + "merge":
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise _Refused(key_node, "a key that is not text", "write `key: value`")
            key, line = key_node.value, key_node.start_mark.line + 1
            if key in own:
                hint = f"it is already on line {own[key]}: keep one"
                self.problems.append(Problem(self.file, line, dotted((*path, key)), "duplicate key", hint))
            own[key] = line
            values[key] = self.build(value_node, (*path, key))
            self.lines[(*path, key)] = line
        return values

    def merged(self, node: yaml.MappingNode) -> Iterator[yaml.Node]:
        for key_node, value_node in node.value:
            if key_node.tag == _TAG + "merge":
                yield from value_node.value if isinstance(value_node, yaml.SequenceNode) else (value_node,)
