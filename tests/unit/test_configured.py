"""When the configuration is read again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway import configured
from gateway.config import ConfigError
from gateway.configured import Files, Keeper

CONFIG: Any = SimpleNamespace(models=(), discovery=(), server=SimpleNamespace(tls=None))


class Looks:
    """What the file looks like, look by look; at the end the watch is ended."""

    def __init__(self, stamps: Sequence[Any]) -> None:
        self._stamps = list(stamps)

    def stamp(self) -> Any:
        if not self._stamps:
            raise asyncio.CancelledError
        return self._stamps.pop(0)


@pytest.mark.parametrize(
    ("looks", "times"),
    [
        ("aaaa", 0),
        ("abbb", 1),
        ("abcdd", 1),  # it is still being written
        ("abcd", 0),
        ("a-bb", 1),  # it was gone, as during a careless save
        ("a--", 0),
        ("abba", 1),
        ("abbaa", 2),  # back again: what is in force is `b`
    ],
)
def test_a_file_counts_once_it_has_come_to_rest(looks: str, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configured, "WATCH_EVERY", 0)
    files: Any = Looks([None if one == "-" else one for one in looks])
    first: Any = SimpleNamespace(config=CONFIG)
    unused: Any = None
    seen: list[None] = []

    async def changed() -> None:
        seen.append(None)

    keeper = Keeper(files, first, unused, unused, {}, unused)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(keeper.watch(changed))
    assert len(seen) == times


def test_a_file_that_was_emptied_is_not_put_into_force(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(" \n")
    files = Files(file, {}, tmp_path)
    with pytest.raises(ConfigError, match="the file is empty"):
        files.read_again()
    file.write_text("server: {port: 8081}\n")
    assert files.read_again().server.port == 8081
