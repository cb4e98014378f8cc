"""Processes that this program starts of its own modules."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gateway.children import command


@pytest.mark.parametrize("name", ["orjson", "signal", "gateway", "gateway/content"])
def test_code_in_the_working_folder_is_not_taken(tmp_path: Path, name: str) -> None:
    """Somebody else may be able to write there."""
    file = tmp_path / f"{name}.py" if "/" not in name else tmp_path / name / "__main__.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "gateway" / "__init__.py").touch() if "/" in name else None
    file.write_text("raise SystemExit('taken')")
    ended = subprocess.run(
        command("gateway.content"), cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
