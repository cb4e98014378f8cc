"""What the fields of a pydantic model take, read from annotations, for code that handles values not yet validated."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from gateway.config.yaml import KeyPath
from gateway.units import one_or_more

FILE_FORM = "_file"  # `x_file` names a file that holds the value of the text field `x`


@dataclass(frozen=True, slots=True)
class Shape:
    """What a field takes: a `section` of its own fields, a `list` or `map` of `item`, or a `scalar`."""

    kind: Literal["section", "list", "map", "scalar"]
    nullable: bool = False
    text: bool = False  # a scalar read as text, which may therefore come from `x_file`
    single: bool = False  # a list that may be written as its only item
    model: type[BaseModel] | None = None
    item: Any = None

    def child(self, key: str | int) -> "Shape | None":
        """The shape under `key`, None when there is no such place."""
        if self.model is not None:
            info = self.model.model_fields.get(str(key))
            return None if info is None else _shape_of_field(info)
        right_kind = isinstance(key, int) if self.kind == "list" else self.kind == "map"
        return shape_of(self.item) if right_kind else None

    def names(self) -> tuple[str, ...]:
        """Keys a section takes, the `_file` forms of its text fields after the fields themselves."""
        if self.model is None:
            return ()
        fields = self.model.model_fields
        readable = (name + FILE_FORM for name, info in fields.items() if shape_of(info.annotation).text)
        return (*fields, *(name for name in readable if name not in fields))


def _shape_of_field(info: FieldInfo) -> Shape:
    shape = shape_of(info.annotation)
    single = any(getattr(one, "func", None) is one_or_more for one in info.metadata)
    return replace(shape, single=True) if single else shape


def shape_of(annotation: Any) -> Shape:
    """The shape of a type annotation as pydantic keeps it, with Annotated and None taken off."""
    members = [_bare(one) for one in _members(_bare(annotation))]
    nullable = NoneType in members
    main = next(one for one in members if one is not NoneType)
    origin = get_origin(main)
    if isinstance(main, type) and issubclass(main, BaseModel):
        return Shape("section", nullable, model=main)
    if origin is tuple:
        return Shape("list", nullable, item=get_args(main)[0])
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return Shape("map", nullable, item=get_args(main)[1])
    return Shape("scalar", nullable, text=main in (str, SecretStr))


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _bare(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def walk_sections(value: BaseModel, path: KeyPath = ()) -> Iterator[tuple[KeyPath, BaseModel]]:
    """Every section below `value`, itself first, with its path."""
    yield path, value
    for name in type(value).model_fields:
        item = getattr(value, name)
        if isinstance(item, BaseModel):
            yield from walk_sections(item, (*path, name))
        elif isinstance(item, tuple):
            for index, one in enumerate(item):
                if isinstance(one, BaseModel):
                    yield from walk_sections(one, (*path, name, index))
