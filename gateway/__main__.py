"""The `sekisho` command: serve, check, scan, models, keys, tenants, usage, audit, version.

Exit codes: 0 fine, 1 failed while running, 2 the user must change something. Errors are single lines on stderr.
Commands import what they need themselves, so that `sekisho version` does not wait for the gateway to load.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.exceptions import TyperException

from gateway.commands.common import ConfigOption, config_path, print_tables, stop
from gateway.commands.keys import keys_app
from gateway.commands.models import models_app
from gateway.commands.reports import audit_app, usage
from gateway.commands.tenants import tenants_app

if TYPE_CHECKING:
    from rich.table import Table

    from gateway.config import Config, ModelConfig, ReplicaConfig

app = typer.Typer(
    name="sekisho",
    help="One OpenAI-compatible front door for self-hosted models.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(keys_app, name="keys")
app.add_typer(tenants_app, name="tenants")
app.add_typer(models_app, name="models")
app.command()(usage)
app.add_typer(audit_app, name="audit")


@app.command()
def serve(
    config: ConfigOption = None,
    host: Annotated[str | None, typer.Option(help="Listen here instead of server.host.")] = None,
    port: Annotated[int | None, typer.Option(help="Listen here instead of server.port.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes, instead of server.workers.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
) -> None:
    """Run the gateway."""
    from gateway.config import ConfigError, StartupError

    given = {"server.host": host, "server.port": port, "server.workers": workers, "logging.level": log_level}
    path = config_path(config)
    try:
        from gateway.app import run

        code = run(path, {name: value for name, value in given.items() if value is not None})
    except (ConfigError, StartupError) as error:
        stop(str(error))
    raise typer.Exit(code)


@app.command()
def check(config: ConfigOption = None) -> None:
    """Validate the configuration and print the fleet it describes."""
    from gateway.config import ConfigError
    from gateway.configured import Files
    from gateway.provenance import beyond_reach

    files = Files(config_path(config), {}, Path())
    try:
        loaded = files.read()
        files.compile(loaded)
    except ConfigError as error:
        stop(str(error))
    print_tables(_models_table(loaded), _tenants_table(loaded))
    for line in (*files.complaints, *filter(None, [beyond_reach(loaded)])):
        typer.echo(line, err=True)


@app.command()
def scan(
    paths: Annotated[list[Path], typer.Argument(help="Model files, folders, or an Ollama store.")],
    as_json: Annotated[bool, typer.Option("--json", help="Everything that is known, as JSON.")] = False,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens of a request, for the memory estimate.")] = None,
    sequences: Annotated[int, typer.Option(min=1, help="Requests at a time, for the memory estimate.")] = 1,
) -> None:
    """List models with format, size, engines that can serve them, and a memory estimate."""
    from gateway.scan import run

    raise typer.Exit(run(paths, as_json=as_json, context=context, sequences=sequences))


@app.command()
def version() -> None:
    """Print the versions of the gateway, Python and llama.cpp."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        ours = installed("sekisho")
    except PackageNotFoundError:  # run from a source tree that was never installed
        ours = "unknown (not installed)"
    typer.echo(f"sekisho {ours}")
    typer.echo(f"python {sys.version.split()[0]}")
    typer.echo(f"llama.cpp {_llama_build()}")


def main(args: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; the console script's entry point. Never shows a traceback."""
    try:
        code = app(args=list(sys.argv[1:] if args is None else args), prog_name="sekisho", standalone_mode=False)
    except TyperException as error:
        message = " ".join(error.format_message().split()).rstrip(".")
        typer.echo(f"sekisho: {message}, see `sekisho --help`", err=True)
        return error.exit_code
    except typer.Abort:
        return 1
    except BrokenPipeError:  # `sekisho check | head`: whoever read has seen enough
        sys.stdout = open(os.devnull, "w")  # or Python complains again when it flushes at exit
        return 1
    except Exception as error:
        return _report(error)
    return code if isinstance(code, int) else 0


def _report(error: Exception) -> int:
    """Prints what ended a command and returns the exit code."""
    from gateway.config import ConfigError, StartupError
    from gateway.errors import GatewayError

    if isinstance(error, ConfigError | StartupError):
        typer.echo(str(error), err=True)
        return 2
    if isinstance(error, GatewayError):
        typer.echo(f"sekisho: {' '.join(error.message.split())}", err=True)
        return 2 if error.status < 500 else 1
    typer.echo(f"sekisho: {_unexpected(error)}", err=True)
    return 1


def _unexpected(error: Exception) -> str:
    """One line on an error nobody foresaw: what, and where in the code, which is what a bug report needs."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})" if trace is not None else ""
    return " ".join(f"{type(error).__name__}: {error}{where}".split())


def _llama_build() -> str:
    """Version of llama-cpp-python and of the ggml library in it, whose loading takes about a millisecond."""
    import ctypes
    from importlib.metadata import version as installed
    from importlib.util import find_spec

    spec = find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        return 'not installed (the extra "llamacpp")'
    parts = [f"llama-cpp-python {installed('llama_cpp_python')}"]
    library = next(iter(sorted(Path(spec.origin).parent.glob("lib/libggml-base.*"))), None)
    try:
        ggml = ctypes.CDLL(str(library))
        for label, function in (("ggml", ggml.ggml_version), ("commit", ggml.ggml_commit)):
            function.restype = ctypes.c_char_p
            parts.append(f"{label} {function().decode()}")
    except (OSError, AttributeError):  # another layout of the package: its own version still says enough
        pass
    return ", ".join(parts)


def _models_table(config: "Config") -> "Table":
    from rich.table import Table

    table = Table(title="models", title_justify="left")
    for column in ("model", "aliases", "policy", "replica", "format", "context", "max_inflight"):
        table.add_column(column, overflow="fold")
    for model in config.models:
        for index, replica in enumerate(model.replicas):
            head = (model.name, ", ".join(model.aliases), model.policy) if index == 0 else ("", "", "")
            table.add_row(*head, *_replica_cells(model, replica))
    for found in config.discovery:
        source = f"{found.backend} {_place(found.url)}" if found.url else f"files in {found.scan}"
        table.add_row(f"{found.name_prefix}*", "", "", f"discovered: {source}", "", "", "")
    return table


def _replica_cells(model: "ModelConfig", replica: "ReplicaConfig") -> tuple[str, str, str, str]:
    place = replica.path.name if replica.path is not None else _place(replica.url or "")
    suffix = replica.path.suffix.lower().lstrip(".") if replica.path is not None else ""
    context = replica.context_length or model.context_length
    inflight = replica.max_inflight or (replica.parallel if replica.path is not None else None)
    return f"{replica.backend} {place}", replica.format or suffix, str(context or ""), str(inflight or "")


def _place(url: str) -> str:
    """Host and port of an engine, or its socket: all of a URL that a person looks for."""
    return url if url.startswith("unix:") else url.partition("://")[2].partition("/")[0]


def _tenants_table(config: "Config") -> "Table":
    from rich.table import Table

    table = Table(title="tenants", title_justify="left")
    for column in ("tenant", "keys", "models"):
        table.add_column(column, overflow="fold")
    for tenant in config.tenants:
        table.add_row(tenant.name, str(len(tenant.keys)), ", ".join(tenant.models))
    return table


if __name__ == "__main__":
    sys.exit(main())
