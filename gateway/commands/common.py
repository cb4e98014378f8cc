"""What commands share: finding the configuration, options that say where the records are, tables, endings."""

import functools
import inspect
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from gateway.commands.client import Client

DEFAULT_CONFIGS = (Path("gateway.yaml"), Path("config/gateway.yaml"))
_WIDTH_OF_A_PIPE = 200  # columns: rich takes 80 where there is no terminal, and would cut names

_CONFIG_HELP = "YAML file. Default: $SEKISHO_CONFIG, then gateway.yaml, then config/gateway.yaml."
_URL_HELP = "Ask this running gateway. The key comes from $SEKISHO_ADMIN_KEY or --key-file."
_DATABASE_HELP = "Work on this database, without a configuration, which is the better place for a password."
ConfigOption = Annotated[Path | None, typer.Option("--config", help=_CONFIG_HELP)]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON, as the HTTP API answers.")]
_PLACE_OPTIONS: dict[str, Any] = {
    "config": ConfigOption,
    "database": Annotated[str | None, typer.Option(help=_DATABASE_HELP)],
    "url": Annotated[str | None, typer.Option(help=_URL_HELP)],
    "key_file": Annotated[Path | None, typer.Option(help="File that holds the key for --url.")],
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where the records are: behind a gateway, in a database, or where the configuration says."""

    config: Path | None
    database: str | None
    url: str | None
    key_file: Path | None

    def open(self) -> "AbstractContextManager[Client]":
        """Raises: ConfigError, StartupError, GatewayError."""
        if self.url is not None:
            if self.config is not None or self.database is not None:
                stop("--url asks a gateway: leave out --config and --database")
            from gateway.commands.remote import remote

            return remote(self.url, self.key_file)
        if self.key_file is not None:
            stop("--key-file goes with --url")
        from gateway.commands.direct import connect

        return connect(None if self.database else config_path(self.config), self.database)


def placed(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of a `Place` to a command, which gets the place as its first argument."""

    @functools.wraps(command)
    def run(**options: Any) -> None:
        command(Place(**{name: options.pop(name) for name in _PLACE_OPTIONS}), **options)

    _, *own = inspect.signature(command).parameters.values()
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in _PLACE_OPTIONS.items()
    ]
    parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*own, *added)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def given(body: dict[str, Any]) -> dict[str, Any]:
    """What was said on the command line. An empty text was: a script whose variable is unset must not get a key that
    never ends."""
    return {field: value for field, value in body.items() if value is not None and value != [] and value != {}}


def config_path(option: Path | None) -> Path:
    """Ends the command when there is no configuration."""
    named = option or (Path(os.environ["SEKISHO_CONFIG"]) if os.environ.get("SEKISHO_CONFIG") else None)
    for path in (named,) if named else DEFAULT_CONFIGS:
        if named or path.is_file():
            return path
    stop("no configuration: there is no gateway.yaml or config/gateway.yaml here, write one or name it with --config")


def stop(message: str) -> NoReturn:
    """Print why the user must change something, one line for each problem, and end with 2."""
    typer.echo(message, err=True)
    raise typer.Exit(2)


def print_json(document: object) -> None:
    import orjson

    typer.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())


def print_tables(*tables: "Table") -> None:
    from rich.console import Console

    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else _WIDTH_OF_A_PIPE)
    for table in tables:
        if table.row_count:
            console.print(table)
