"""Options for limits, and what they say as the `limits` of a body."""

from typing import Annotated, Any

import typer

NONE = "none"  # takes a limit away

RequestsOption = Annotated[
    list[str] | None, typer.Option(metavar="RATE", help="Requests per window, as in 600/min. Repeatable.")
]
TokensOption = Annotated[
    list[str] | None, typer.Option(metavar="RATE", help="Tokens per window, as in 200000/min. Repeatable.")
]
BudgetOption = Annotated[
    list[str] | None, typer.Option(metavar="RATE", help="Tokens of a UTC day or month, as in 20000000/day.")
]
ConcurrencyOption = Annotated[str | None, typer.Option(metavar="N", help="Requests open at once.")]


def given_limits(
    requests: list[str] | None, tokens: list[str] | None, budget: list[str] | None, concurrency: str | None
) -> dict[str, Any]:
    """The limits that were named on the command line; `none` is no limit."""
    rates = {"requests": requests, "tokens": tokens, "token_budget": budget}
    found: dict[str, Any] = {name: [] if given == [NONE] else given for name, given in rates.items() if given}
    if concurrency is not None:
        found["concurrency"] = None if concurrency == NONE else concurrency
    return found
