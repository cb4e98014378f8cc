"""Options for a tenant's tools, and what they say as the `tools` of a body."""

from typing import Annotated, Any

import typer

from gateway.commands.limits import NONE

AllowOption = Annotated[
    list[str] | None, typer.Option(metavar="GLOB", help="Tools it may use, by name; `none`: no tool. Repeatable.")
]
DenyOption = Annotated[
    list[str] | None, typer.Option(metavar="GLOB", help="Tools it may not use, stronger than the above. Repeatable.")
]
TypesOption = Annotated[
    list[str] | None, typer.Option(metavar="GLOB", help="Types of tools it may use, such as function. Repeatable.")
]
ViolationOption = Annotated[
    str | None, typer.Option(metavar="refuse|strip", help="What becomes of others: an error, or they are taken out.")
]


def given_tools(
    allow: list[str] | None, deny: list[str] | None, types: list[str] | None, violation: str | None
) -> dict[str, Any]:
    """What was named on the command line; `none` is an empty list."""
    lists = {"allow": allow, "deny": deny, "types": types}
    found: dict[str, Any] = {name: [] if given == [NONE] else given for name, given in lists.items() if given}
    if violation is not None:
        found["on_violation"] = violation
    return found
