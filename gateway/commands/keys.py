"""`sekisho keys`: make, list, show, change, rotate and revoke API keys."""

import re
import secrets
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.commands.common import JsonOption, Place, given, placed, print_json, print_tables, stop
from gateway.commands.limits import BudgetOption, ConcurrencyOption, RequestsOption, TokensOption, given_limits

if TYPE_CHECKING:
    from gateway.commands.client import Client

keys_app = typer.Typer(help="API keys.", rich_markup_mode=None)

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The key's id, as `sekisho keys list` shows it.")]
RoleOption = Annotated[str | None, typer.Option(metavar="ROLE", help="user, operator or admin.")]
ModelOption = Annotated[list[str] | None, typer.Option("--model", metavar="GLOB", help="Public models. Repeatable.")]
NetworkOption = Annotated[list[str] | None, typer.Option("--allow-from", metavar="CIDR", help="Repeatable.")]
ExpiresOption = Annotated[str | None, typer.Option(metavar="WHEN", help="A date or time (UTC), or 90d.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Also the key that this command uses itself.")]


@keys_app.command("create")
@placed
def create_key(
    place: Place,
    tenant: Annotated[str | None, typer.Option(help="Tenant that the key belongs to.")] = None,
    name: Annotated[str | None, typer.Option(help="What people call the key. Default: its id.")] = None,
    role: RoleOption = None,
    model: ModelOption = None,
    requests: RequestsOption = None,
    tokens: TokensOption = None,
    budget: BudgetOption = None,
    concurrency: ConcurrencyOption = None,
    allow_from: NetworkOption = None,
    expires: ExpiresOption = None,
    create_tenant: Annotated[bool, typer.Option("--create-tenant", help="Create the tenant if it is new.")] = False,
    print_: Annotated[bool, typer.Option("--print", help="Only print a key and its line for the file.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Make a key. It is shown once; only its digest is kept."""
    body: dict[str, Any] = {"tenant": tenant, "name": name, "role": role, "models": model, "allow_from": allow_from}
    body["limits"] = given_limits(requests, tokens, budget, concurrency)
    body["expires_at"] = None if expires is None else _moment(expires)
    body = given(body)
    if print_:
        _print_line(body)
        return
    if tenant is None:
        stop("name the key's tenant with --tenant, or use --print and paste the line into the configuration")
    with place.open() as client:
        document = _created(client, body, create_tenant)
    _show_secret(document, as_json)


def _created(client: "Client", body: dict[str, Any], create_tenant: bool) -> dict[str, Any]:
    """The first key of a new installation brings its tenant along; later a new name may be a typing mistake."""
    from gateway.errors import GatewayError, NotFound
    from gateway.keybook import NO_TENANT

    name = body["tenant"]
    try:
        return client.create_key(body)
    except GatewayError as error:
        if error.code != NO_TENANT:
            raise
        if not create_tenant and client.tenants()["data"]:
            hint = f"create it with `sekisho tenants create {name}`, or add --create-tenant"
            raise NotFound(f"there is no tenant {name}: {hint}") from None
    client.create_tenant({"name": name})
    typer.echo(f"Created the tenant {name}, which may use every model.", err=True)
    return client.create_key(body)


def _show_secret(document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(document)
        return
    typer.echo(document["key"])
    what = f"{document['id']}, {document['name']} of tenant {document['tenant']}, role {document['role']}"
    typer.echo(f"The key is shown only now. It is {what}.", err=True)


def _print_line(body: dict[str, Any]) -> None:
    """A key and its entry for the configuration, checked as one."""
    import yaml
    from pydantic import ValidationError

    from gateway.config.access import KeyConfig
    from gateway.config.values import tenant_name
    from gateway.keybook.forms import refusal
    from gateway.keys import digest, new_key
    from gateway.units import WrongValue

    key = new_key()
    fields = {"expires" if field == "expires_at" else field: value for field, value in body.items()}
    tenant = fields.pop("tenant", None)
    name = fields.pop("name", f"key-{secrets.token_hex(4)}")  # not of the digest: names are in logs and usage
    entry = {"name": name, "sha256": digest(key), **fields}
    try:
        if tenant is not None:
            tenant_name(tenant)
        KeyConfig.model_validate(entry)
    except WrongValue as wrong:
        stop(f"--tenant: {wrong}, {wrong.hint}")
    except ValidationError as error:
        raise refusal(KeyConfig, error) from None
    typer.echo(key)
    typer.echo(f"- {yaml.safe_dump(entry, default_flow_style=True, sort_keys=False, width=10_000).strip()}")
    owner = f"tenant {tenant}" if tenant else "its tenant"
    typer.echo(f"The key is shown only now. The line goes under `keys:` of {owner} in the configuration.", err=True)


@keys_app.command("list")
@placed
def list_keys(
    place: Place,
    tenant: Annotated[str | None, typer.Option(help="Only keys of this tenant.")] = None,
    revoked: Annotated[bool, typer.Option("--revoked", help="Revoked ones too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List keys, without what they are made of."""
    query = {"revoked": "true"} if revoked else {}
    with place.open() as client:
        document = client.keys(query if tenant is None else {**query, "tenant": tenant})
    _show(document, document["data"], as_json)


@keys_app.command("show")
@placed
def show_key(place: Place, identity: IdArgument, as_json: JsonOption = False) -> None:
    """Show one key, without what it is made of."""
    with place.open() as client:
        document = client.key(identity)
    _show(document, [document], as_json)


@keys_app.command("update")
@placed
def update_key(
    place: Place,
    identity: IdArgument,
    name: Annotated[str | None, typer.Option(help="What people call the key.")] = None,
    role: RoleOption = None,
    model: ModelOption = None,
    requests: RequestsOption = None,
    tokens: TokensOption = None,
    budget: BudgetOption = None,
    concurrency: ConcurrencyOption = None,
    allow_from: NetworkOption = None,
    expires: ExpiresOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Change a key; what is left out stays. `none` takes a limit, the models, the networks or the end away."""
    body: dict[str, Any] = {"name": name, "role": role, "models": model, "allow_from": allow_from}
    body = given(body)
    if model == ["none"]:
        body["models"] = None
    if allow_from == ["none"]:
        body["allow_from"] = []
    if expires is not None:
        body["expires_at"] = None if expires == "none" else _moment(expires)
    limits = given_limits(requests, tokens, budget, concurrency)
    with place.open() as client:
        if limits:
            body["limits"] = client.key(identity)["limits"] | limits
        document = client.update_key(identity, body, _forced(force))
    _show(document, [document], as_json)


@keys_app.command("rotate")
@placed
def rotate_key(
    place: Place,
    identity: IdArgument,
    overlap: Annotated[str, typer.Option(help="How long the old key still works; 0s: not at all.")] = "24h",
    expires: ExpiresOption = None,
    as_json: JsonOption = False,
) -> None:
    """Replace a key by a new one, which is shown once."""
    body = {"overlap": overlap} | ({} if expires is None else {"expires_at": _moment(expires)})
    with place.open() as client:
        document = client.rotate_key(identity, body)
    _show_secret(document, as_json)


@keys_app.command("revoke")
@placed
def revoke_key(place: Place, identity: IdArgument, force: ForceOption = False, as_json: JsonOption = False) -> None:
    """Refuse a key from now on, for good."""
    with place.open() as client:
        document = client.revoke_key(identity, _forced(force))
    _show(document, [document], as_json)


def _show(document: dict[str, Any], keys: list[dict[str, Any]], as_json: bool) -> None:
    from gateway.commands.tables import keys_table

    if as_json:
        print_json(document)
    else:
        print_tables(keys_table(keys))


def _forced(force: bool) -> dict[str, str]:
    return {"force": "true"} if force else {}


def _moment(text: str) -> str:
    """`90d` as the time that is 90 days from now; anything else as it is."""
    from gateway.keybook.moments import iso
    from gateway.units import WrongValue, parse_duration

    if not re.search("[smhd]$", text):
        return text
    try:
        return iso(time.time() + parse_duration(text))
    except (WrongValue, ValueError, OverflowError):
        return text
