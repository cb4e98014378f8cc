"""`sekisho tenants`: who pays, what they may use and how much."""

from typing import Annotated, Any

import typer

from gateway.commands.common import JsonOption, Place, given, placed, print_json, print_tables
from gateway.commands.limits import BudgetOption, ConcurrencyOption, RequestsOption, TokensOption, given_limits
from gateway.commands.tools import AllowOption, DenyOption, TypesOption, ViolationOption, given_tools

tenants_app = typer.Typer(help="Tenants.", rich_markup_mode=None)

NameArgument = Annotated[str, typer.Argument(help="The tenant's name.")]
ModelOption = Annotated[list[str] | None, typer.Option("--model", metavar="GLOB", help="Public models. Repeatable.")]
WeightOption = Annotated[
    str | None, typer.Option(metavar="N", help="Share of a model's queue when tenants contend for it.")
]
PriorityOption = Annotated[str | None, typer.Option(metavar="N", help="Higher is served first, before any share.")]


@tenants_app.command("list")
@placed
def list_tenants(place: Place, as_json: JsonOption = False) -> None:
    """List the tenants of the configuration and the database."""
    with place.open() as client:
        document = client.tenants()
    _show(document, document["data"], as_json)


@tenants_app.command("create")
@placed
def create_tenant(
    place: Place,
    name: NameArgument,
    model: ModelOption = None,
    requests: RequestsOption = None,
    tokens: TokensOption = None,
    budget: BudgetOption = None,
    concurrency: ConcurrencyOption = None,
    weight: WeightOption = None,
    priority: PriorityOption = None,
    allow_tools: AllowOption = None,
    deny_tools: DenyOption = None,
    tool_types: TypesOption = None,
    tool_violation: ViolationOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a tenant. Without --model it may use every model."""
    body = _body(model, weight, priority) | {"limits": given_limits(requests, tokens, budget, concurrency)}
    if tools := given_tools(allow_tools, deny_tools, tool_types, tool_violation):
        body["tools"] = tools
    with place.open() as client:
        document = client.create_tenant({"name": name, **body})
    _show(document, [document], as_json)


@tenants_app.command("update")
@placed
def update_tenant(
    place: Place,
    name: NameArgument,
    model: ModelOption = None,
    requests: RequestsOption = None,
    tokens: TokensOption = None,
    budget: BudgetOption = None,
    concurrency: ConcurrencyOption = None,
    weight: WeightOption = None,
    priority: PriorityOption = None,
    allow_tools: AllowOption = None,
    deny_tools: DenyOption = None,
    tool_types: TypesOption = None,
    tool_violation: ViolationOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change a tenant; what is left out stays. `none` takes a limit away, or every glob of a list of tools."""
    body = _body(model, weight, priority)
    limits = given_limits(requests, tokens, budget, concurrency)
    tools = given_tools(allow_tools, deny_tools, tool_types, tool_violation)
    with place.open() as client:
        before = client.tenant(name) if limits or tools else {}
        if limits:
            body["limits"] = before["limits"] | limits
        if tools:
            body["tools"] = before.get("tools", {}) | tools
        document = client.update_tenant(name, body)
    _show(document, [document], as_json)


@tenants_app.command("delete")
@placed
def delete_tenant(
    place: Place,
    name: NameArgument,
    force: Annotated[bool, typer.Option("--force", help="Also the tenant of the key that is used here.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete a tenant and revoke its keys."""
    with place.open() as client:
        document = client.delete_tenant(name, {"force": "true"} if force else {})
    if as_json:
        print_json(document)
    else:
        typer.echo(f"Deleted the tenant {name} and revoked its keys.")


def _body(model: list[str] | None, weight: str | None, priority: str | None) -> dict[str, Any]:
    return given({"models": model, "weight": weight, "priority": priority})


def _show(document: dict[str, Any], tenants: list[dict[str, Any]], as_json: bool) -> None:
    from gateway.commands.tables import tenants_table

    if as_json:
        print_json(document)
    else:
        print_tables(tenants_table(tenants))
