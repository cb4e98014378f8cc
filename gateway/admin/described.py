"""What /openapi.json says about the administration: bodies and queries from their forms, and the refusals."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from gateway.keybook.forms import Form

JSON = dict[str, Any]


class ErrorDetail(BaseModel):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The body of every refusal."""

    error: ErrorDetail


_REFUSALS = {
    400: "A field is wrong; `param` names it.",
    403: "The key's role does not allow it.",
    404: "There is nothing of that name.",
    408: "The body did not arrive in time.",
    409: "The name is taken, the configuration file owns it, or it would lock the caller out.",
    413: "The body is too large.",
    503: "The database cannot be reached.",
}


def refusals(*statuses: int) -> dict[int | str, JSON]:
    return {status: {"description": _REFUSALS[status], "model": ErrorAnswer} for status in statuses}


def takes(body: type[Form] | None = None, query: type[Form] | None = None) -> JSON:
    """The parts of an OpenAPI operation that describe what is sent."""
    described: JSON = {}
    if body is not None:
        described["requestBody"] = {"content": {"application/json": {"schema": _schema(body)}}}
    if query is not None:
        fields = _schema(query)["properties"]
        described["parameters"] = [{"name": name, "in": "query", "schema": schema} for name, schema in fields.items()]
    return described


def _schema(form: type[Form]) -> JSON:
    """A form's JSON Schema without references, which would lead nowhere in the larger document."""
    schema = form.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inlined(value: Any) -> Any:
        if isinstance(value, list):
            return [inlined(one) for one in value]
        if not isinstance(value, dict):
            return value
        target = definitions.get(value.get("$ref", "").rpartition("/")[2], {})
        return {name: inlined(one) for name, one in {**target, **value}.items() if name != "$ref"}

    return inlined(schema)  # type: ignore[no-any-return]
