"""What callers may send to the administration: bodies and queries, checked field by field.

Field types are the configuration's. A value that is refused is never repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic_core import ErrorDetails

from gateway.config.access import LimitsConfig, Role, ToolsConfig
from gateway.config.source import nearest
from gateway.config.values import Glob, NetworkField, TenantName, Weight, Whole
from gateway.config.yaml import dotted
from gateway.errors import BadRequest
from gateway.keybook.moments import Moment
from gateway.records import USAGE_GROUPS
from gateway.units import Seconds, WrongValue

MOST_ROWS = 10_000  # single usage records in one answer
MOST_ENTRIES = 1_000  # audit entries in one answer
LONGEST_OVERLAP = 366 * 86400.0
_LONGEST_PARAM = 40  # characters of a field's name in an error: keys, which end up anywhere, are longer


class Form(BaseModel):
    """What every form shares: immutable, no unknown fields, and no values in error texts."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


def _without_defaults(schema: dict[str, Any]) -> None:
    for field in schema["properties"].values():
        field.pop("default", None)


class Change(Form):
    """What is left out stays, so the defaults of these forms mean nothing; what is given replaces the old value."""

    model_config = ConfigDict(json_schema_extra=_without_defaults)

    def given(self) -> dict[str, object]:
        """The fields that were sent, by name."""
        return {name: getattr(self, name) for name in self.model_fields_set}


def _words(value: object) -> object:
    """`a,b` of a query as a list."""
    if not isinstance(value, str):
        return value
    # One more than there can be is enough to refuse it, and thousands of them take long to be refused one by one.
    return [word.strip() for word in value.split(",", len(USAGE_GROUPS))] if value else []


def _printable(value: str) -> str:
    if not value.isprintable():  # a database may refuse it in words of its own
        raise WrongValue("not printable", "write the name as answers show it")
    return value


def _group(value: object) -> object:
    if value not in USAGE_GROUPS:
        raise WrongValue("not something usage can be grouped by", f"write some of {','.join(USAGE_GROUPS)}")
    return value


Globs = Annotated[tuple[Glob, ...], Field(max_length=1000)]
Networks = Annotated[tuple[NetworkField, ...], Field(max_length=1000)]
Group = Annotated[str, BeforeValidator(_group)]
Groups = Annotated[tuple[Group, ...], BeforeValidator(_words), WithJsonSchema({"type": "string"})]
Filter = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_printable)]


# --- tenants and keys
class TenantForm(Form):
    """A new tenant."""

    name: TenantName = Field(description="Name in usage, metrics and tokens; unique.")
    models: Globs = Field(("*",), description="Public names it may use, as globs. Default: every model.")
    limits: LimitsConfig = Field(LimitsConfig(), description="Limits of all its keys together. Default: none.")
    weight: Weight = Field(1.0, description="Share of a model's queue when tenants contend for it.")
    priority: Whole = Field(0, ge=-1000, le=1000, description="Higher is served first, before any share.")
    tools: ToolsConfig = Field(ToolsConfig(), description="Tools its requests may use. Default: all.")


class TenantChange(Change):
    """Changes to a tenant."""

    models: Globs = ("*",)
    limits: LimitsConfig = LimitsConfig()
    weight: Weight = 1.0
    priority: Whole = Field(0, ge=-1000, le=1000)
    tools: ToolsConfig = ToolsConfig()


class KeyForm(Form):
    """A new key."""

    tenant: TenantName = Field(description="Tenant that the key belongs to, of the database or the configuration.")
    name: TenantName | None = Field(None, description="What people call it; unique in the tenant. Default: its id.")
    role: Role = "user"
    models: Globs | None = Field(None, description="Globs within the tenant's models. Default null: all of them.")
    limits: LimitsConfig = Field(LimitsConfig(), description="Limits of this key alone. Default: only the tenant's.")
    allow_from: Networks = Field((), description="Networks it may be used from. Default: from anywhere.")
    expires_at: Moment | None = Field(None, description="From when on it is refused. Default null: never.")


class KeyChange(Change):
    """Changes to a key."""

    name: TenantName = ""
    role: Role = "user"
    models: Globs | None = None
    limits: LimitsConfig = LimitsConfig()
    allow_from: Networks = ()
    expires_at: Moment | None = None


class RotateForm(Form):
    """How one key takes over from another."""

    overlap: Seconds = Field(86400.0, le=LONGEST_OVERLAP, description="Time the old key still works; 0s: none.")
    expires_at: Moment | None = Field(None, description="End of the new key. Default: the old one's.")


# --- queries
class ForceQuery(Form):
    """Options of a change to a tenant or key."""

    force: bool = Field(False, description="Also when it takes away the access of the key that asks for it.")


class KeyQuery(Form):
    """Which keys to list."""

    tenant: TenantName | None = None
    revoked: bool = Field(False, description="Revoked ones too.")


class AuditQuery(Form):
    """Which part of the audit trail to list."""

    after: int = Field(
        0, ge=0, le=2**31 - 1, description="Number of the last entry already seen; 0: from the beginning."
    )
    limit: int = Field(100, ge=1, le=MOST_ENTRIES)
    order: Literal["asc", "desc"] = Field("asc", description="desc: the newest first.")


class VerifyQuery(Form):
    """What the audit trail has to hold."""

    expect: str | None = Field(
        None, pattern="^[0-9a-f]{64}$", description="Hash of an entry that was noted earlier and must be in the chain."
    )


class UsageForm(Form):
    """Which usage to report."""

    since: Moment | None = Field(None, alias="from", description="Default: 30 days before the end.")
    until: Moment | None = Field(None, alias="to", description="The moment before which it ends. Default: now.")
    group_by: Groups = Field((), description=f"Comma separated: {', '.join(USAGE_GROUPS)}. Default: one total.")
    tenant: Filter | None = None
    key: Filter | None = Field(None, description="Id of a key; tenant/name for one of the configuration.")
    model: Filter | None = None
    operation: Filter | None = None
    format: Literal["json", "csv"] = "json"
    rows: bool = Field(False, description="Single requests in place of sums.")
    limit: int = Field(1000, ge=1, le=MOST_ROWS, description="Most rows of one answer.")
    after: Filter | None = Field(None, description="The `next` of the answer before.")

    @property
    def where(self) -> Mapping[str, str]:
        """Field of a usage record -> the value it has to have."""
        wanted = {name: getattr(self, name) for name in ("tenant", "key", "model", "operation")}
        if self.key is not None and "/" in self.key:
            wanted["tenant"], _, wanted["key"] = self.key.partition("/")
        return {name: value for name, value in wanted.items() if value is not None}


# --- reading
F = TypeVar("F", bound=Form)


def read(form: type[F], data: object) -> F:
    """`data` as a form.

    Raises: BadRequest for the first thing wrong; its `param` is the field, as in `limits.requests[0]`.
    """
    try:
        return form.model_validate(data)
    except ValidationError as error:
        raise refusal(form, error) from None


def refusal(form: type[BaseModel], error: ValidationError) -> BadRequest:
    """The first thing that is wrong, without the value."""
    first = error.errors(include_url=False, include_input=False)[0]
    path, kind = first["loc"], first["type"]
    param = shown_name(dotted(path))
    if kind == "missing":
        return BadRequest(f"'{param}' is required.", param=param, code="missing_required_parameter")
    if kind == "extra_forbidden":
        what = f"'{param}' here{_guess(form, path)}" if param else "of that name here"
        return BadRequest(f"There is no field {what}.", param=param, code="unknown_parameter")
    return BadRequest(f"'{param}': {_what_is_wrong(first)}.", param=param, code="invalid_value")


def shown_name(name: str) -> str | None:
    """What an error may say of a field's name, which is the caller's own text when there is no such field."""
    return name if 0 < len(name) <= _LONGEST_PARAM else None


def _guess(form: type[BaseModel], path: tuple[int | str, ...]) -> str:
    inner = ToolsConfig if path[0] == "tools" else LimitsConfig
    names = (form if len(path) == 1 else inner).model_fields
    close = nearest(str(path[-1]), [info.alias or name for name, info in names.items()])
    return f", {close.rstrip('?')}" if close else ""


def _what_is_wrong(error: ErrorDetails) -> str:
    problem = error.get("ctx", {}).get("error")
    if isinstance(problem, WrongValue):
        return f"{problem}, {problem.hint}" if problem.hint else str(problem)
    return error["msg"][:1].lower() + error["msg"][1:]
