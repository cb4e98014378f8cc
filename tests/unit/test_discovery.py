"""What discovery makes of what it finds, without engines: rules, collisions, and room for files."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from backends.formats import estimate, inspect
from gateway.config import Config
from gateway.discovery import Discovery, Room, available_memory
from tests.unit._model_files import LLAMA, gguf, hf_folder, ollama_model

GIB = 1 << 30


def config(folder: Path, models: list[dict[str, Any]] | None = None, **more: Any) -> Config:
    return Config.model_validate({"models": models or [], "discovery": [{"scan": str(folder)} | more]})


def look(discovery: Discovery, given: Config) -> Config:
    async def once() -> Config:
        try:
            return await discovery.look(given)
        finally:
            await discovery.close()

    return asyncio.run(once())


def names(found: Config) -> list[str]:
    return [model.name for model in found.models]


def test_files_of_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "Tiny Model.Q4.gguf").write_bytes(gguf(LLAMA))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\xff")
    (tmp_path / "cut.gguf").write_bytes(gguf(LLAMA, data=False))
    hf_folder(tmp_path / "weights")
    found = look(Discovery(), config(tmp_path, name_prefix="disk/"))
    assert names(found) == ["disk/Tiny-Model.Q4"]
    (replica,) = found.models[0].replicas
    assert (replica.backend, replica.path) == ("llamacpp", tmp_path / "Tiny Model.Q4.gguf")
    lines = [record.message for record in caplog.records]
    assert len(lines) == 3 and all("is left out" in line for line in lines)
    assert any("vllm" in line for line in lines)


def test_embedding_files_say_so(tmp_path: Path) -> None:
    header = {name: value for name, value in LLAMA.items() if name != "tokenizer.chat_template"}
    (tmp_path / "e.gguf").write_bytes(gguf(header | {"llama.pooling_type": 1}))
    found = look(Discovery(lambda: None), config(tmp_path))
    assert found.models[0].replicas[0].capabilities == ("embeddings",)


def test_ollamas_own_store(tmp_path: Path) -> None:
    ollama_model(tmp_path, "registry.ollama.ai/library/llama3/latest", {"model": gguf(LLAMA)})
    assert names(look(Discovery(), config(tmp_path))) == ["llama3:latest"]


def test_a_file_that_the_configuration_loads_is_not_loaded_twice(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(gguf(LLAMA))
    (tmp_path / "link.gguf").symlink_to(tmp_path / "a.gguf")
    own = {"name": "mine", "replicas": [{"path": str(tmp_path / "a.gguf")}]}
    assert names(look(Discovery(), config(tmp_path, [own]))) == ["mine"]


def test_what_does_not_fit_is_left_out_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.gguf").write_bytes(gguf(LLAMA))
    memory = estimate(inspect(tmp_path / "a.gguf"), context=4096, sequences=4)
    assert memory is not None and memory.total is not None
    room = memory.total * 5 // 2
    discovery, given = Discovery(lambda: room), config(tmp_path)
    for _ in range(3):
        assert names(look(discovery, given)) == ["a", "b"]
    assert [record.message.split()[0] for record in caplog.records] == ["c"]
    (tmp_path / "a.gguf").unlink()
    look(discovery, given)
    assert names(look(discovery, given)) == ["b", "c"]


def test_nothing_found_changes_nothing(tmp_path: Path) -> None:
    given = config(tmp_path)
    assert look(Discovery(), given) is given


def test_collisions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf(LLAMA))
    own = {"name": "m", "replicas": [{"backend": "vllm", "url": "http://h:1"}]}
    discovery, given = Discovery(), config(tmp_path, [own])
    for _ in range(3):
        assert len(look(discovery, given).models[0].replicas) == 1
    caplog_lines = [record.message for record in caplog.records]
    assert len(caplog_lines) == 1 and "join: true" in caplog_lines[0]
    joined = look(Discovery(), config(tmp_path, [own], join=True))
    assert [replica.backend for replica in joined.models[0].replicas] == ["vllm", "llamacpp"]
    nick = own | {"name": "x", "aliases": ["m"]}
    joined = look(Discovery(), config(tmp_path, [nick], join=True))
    assert names(joined) == ["x"] and len(joined.models[0].replicas) == 2


# --- room
def test_room() -> None:
    a, b, c = Path("a"), Path("b"), Path("c")
    free = 10 * GIB
    room = Room(lambda: free)
    for path, size in ((a, 6 * GIB), (b, 5 * GIB), (c, None)):
        room.needs(path, size)
    assert room.claim(a) is None and room.claim(a) is None
    assert "5.0 GiB" in str(room.claim(b))  # although the system still shows 10: a is not loaded yet
    assert "header" in str(room.claim(c))
    free = 4 * GIB  # now it is, and stays
    assert room.claim(a) is None and room.claim(b) is not None
    room.keep({b})
    free = 10 * GIB
    assert room.claim(b) is None


def test_room_counts_what_the_configuration_loads() -> None:
    room = Room(lambda: 10 * GIB)
    room.needs(Path("a"), 6 * GIB)
    room.reserved = 5 * GIB
    assert room.claim(Path("a")) is not None


def test_without_a_figure_everything_is_let_in() -> None:
    assert Room(lambda: None).claim(Path("a")) is None


def test_this_machine() -> None:
    found = available_memory()
    assert found is None or found > 1 << 20


def test_several_lines_of_a_log_are_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a\nb.gguf").write_bytes(b"x")
    with caplog.at_level(logging.WARNING):
        look(Discovery(), config(tmp_path))
    assert len(caplog.records) == 1 and "\n" not in caplog.records[0].message
