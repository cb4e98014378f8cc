"""The `sekisho` command in the process of the test."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gateway.__main__ import main

Run = Callable[..., tuple[int, str, str]]


def runner(capsys: pytest.CaptureFixture[str], *first: str) -> Run:
    """Runs a command that begins with `first`; gives exit code, standard output, standard error."""

    def run(*args: str) -> tuple[int, str, str]:
        code = main((*first, *args))
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return run
