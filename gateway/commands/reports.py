"""`sekisho usage` and `sekisho audit`: what was used, and who changed what."""

from typing import Annotated

import typer

from gateway.commands.common import JsonOption, Place, placed, print_json, print_tables

audit_app = typer.Typer(help="The trail of administrative changes.", rich_markup_mode=None)


@placed
def usage(
    place: Place,
    from_: Annotated[str | None, typer.Option("--from", help="Date or time (UTC). Default: 30 days ago.")] = None,
    to: Annotated[str | None, typer.Option(help="The moment before which it ends. Default: now.")] = None,
    group_by: Annotated[
        str | None,
        typer.Option(help="Some of tenant,key,model,operation,status,hour,day,month. Default: tenant,model."),
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    key: Annotated[str | None, typer.Option(help="Only the key with this id.")] = None,
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    operation: Annotated[str | None, typer.Option(help="Only this operation, such as chat.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV with a header line.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Add up what was used."""
    from gateway.commands.tables import usage_table

    group_by = "tenant,model" if group_by is None else group_by
    given = {"from": from_, "to": to, "tenant": tenant, "key": key, "model": model, "operation": operation}
    query = {name: value for name, value in given.items() if value is not None} | {"group_by": group_by}
    with place.open() as client:
        if as_csv:
            typer.echo(client.usage_csv(query), nl=False)
            return
        document = client.usage(query)
    if as_json:
        print_json(document)
    else:
        print_tables(usage_table(document["data"]))


@audit_app.command("list")
@placed
def list_audit(
    place: Place,
    after: Annotated[int, typer.Option(min=0, help="Only entries after this number; in order desc, before it.")] = 0,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Most entries.")] = 50,
    order: Annotated[str, typer.Option(help="desc: the newest first; asc: the oldest first.")] = "desc",
    as_json: JsonOption = False,
) -> None:
    """List administrative changes."""
    from gateway.commands.tables import audit_table

    with place.open() as client:
        document = client.audit({"after": str(after), "limit": str(limit), "order": order})
    if as_json:
        print_json(document)
    else:
        print_tables(audit_table(document["data"]))


@audit_app.command("verify")
@placed
def verify_audit(
    place: Place,
    expect: Annotated[
        str | None, typer.Option(metavar="HASH", help="Head of an earlier check, which has to be in the chain.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check that no entry was changed, moved or taken out. Ends with 1 when one was."""
    with place.open() as client:
        verdict = client.verify_audit({} if expect is None else {"expect": expect})
    if as_json:
        print_json(verdict)
    elif verdict["ok"]:
        typer.echo(f"unbroken: {verdict['entries']} entries, head {verdict['head']}")
    else:
        typer.echo(f"broken: {verdict['problem']}", err=True)
    raise typer.Exit(0 if verdict["ok"] else 1)
