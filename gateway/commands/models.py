"""`sekisho models`: which bytes the model files have."""

from pathlib import Path
from typing import Annotated

import typer

from gateway.commands.common import ConfigOption, config_path, stop

models_app = typer.Typer(help="The hashes of model files.", rich_markup_mode=None)
_OUTPUT = "The lock file. Default: provenance.lock_file, or models.lock beside the configuration."


@models_app.command()
def lock(
    config: ConfigOption = None,
    output: Annotated[Path | None, typer.Option(help=_OUTPUT)] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; end with 1 if a file differs.")] = False,
) -> None:
    """Hash every model file of the configuration and its scanned folders, and write the lock file."""
    import backends
    from gateway.commands.locking import compare, gather
    from gateway.config import ConfigError, load
    from gateway.provenance.lockfile import NAME, read_lock, render, write_lock

    path = config_path(config)
    try:
        loaded = load(path, kinds=backends.kinds())
        target = (output or loaded.provenance.lock_file or path.parent / NAME).absolute()
        known = read_lock(target) if check else None
    except ConfigError as error:
        stop(str(error))
    found = gather(loaded, target.parent, known)
    problems = found.problems + (compare(known, found.models) if known is not None else [])
    for line in (*found.left_out, *problems):
        typer.echo(line, err=True)
    if problems:
        raise typer.Exit(1)
    total = f"{len(found.models)} model(s), {sum(max(1, len(one.files)) for one in found.models.values())} file(s)"
    if check:
        typer.echo(f"{target}: {total} are as they were")
        return
    try:
        changed = write_lock(target, render(found.models.values()))
    except OSError as error:
        stop(f"{target}: cannot be written ({error.strerror}), name another file with --output")
    typer.echo(f"{target}: {total}" if changed else f"{target}: {total}, nothing has changed")
