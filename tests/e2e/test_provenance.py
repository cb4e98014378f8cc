"""Hashes of model files through the front door: what starts, what does not, and what others may do with our files."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sqlite3
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backends.formats.manifest import fingerprint
from tests.e2e.harness import ROOT, Gateway, base_config, chat, digest, eventually
from tests.e2e.test_llamacpp_real import MODEL, Child
from tests.unit._model_files import LLAMA, gguf

KEY = "sk-" + "p" * 48
needs_weights = [
    pytest.mark.engines,
    pytest.mark.skipif(MODEL is None, reason="the demo model is not there; `make model` fetches it"),
    pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed"),
]


def weights(test: Any) -> Any:
    for mark in needs_weights:
        test = mark(test)
    return test


def config(path: Path | None, own: str | None = None, **sections: Any) -> dict[str, Any]:
    replica = {"path": str(path), "context_length": 256, "parallel": 1, "threads": 1} | ({"sha256": own} if own else {})
    tenant = {"name": "t", "keys": [{"name": "k", "sha256": digest(KEY)}]}
    return base_config({"m": [replica]} if path else {}, [tenant], **sections)


def command(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gateway", *args], cwd=folder, capture_output=True, text=True, timeout=60,
        env={name: value for name, value in os.environ.items() if not name.startswith("SEKISHO")}
        | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def ends(folder: Path, given: dict[str, Any]) -> tuple[int, list[str]]:
    """Exit code of a start that fails, and what it says outside of the log."""
    gateway = Gateway(folder, given, wait_for=None)
    try:
        code = gateway.wait(60)
    finally:
        gateway.stop()
    return code, [line for line in gateway.log().splitlines() if not line.startswith("{")]


@pytest.fixture(name="model")
def _model(tmp_path: Path) -> Path:
    """The demo model in a folder of its own. A hard link would let a test write to the original."""
    assert MODEL is not None
    folder = tmp_path / "models"
    folder.mkdir()
    return Path(shutil.copyfile(MODEL, folder / "smol.gguf"))


def answers(gateway: Gateway, model: str = "m") -> bool:
    answer = gateway.http.post(
        "/v1/chat/completions", json=chat(model, max_tokens=2), headers={"authorization": f"Bearer {KEY}"}
    )
    return answer.status_code == 200


# --- with a real model
@weights
def test_a_wrong_hash_ends_the_start(tmp_path: Path, model: Path) -> None:
    code, said = ends(tmp_path, config(model, "0" * 64))
    assert code == 2 and len(said) == 1
    assert said[0].startswith(f"m: sha256: {model} has ") and "0" * 64 in said[0]


@weights
def test_one_changed_byte_ends_the_start(tmp_path: Path, model: Path) -> None:
    (tmp_path / "gateway.yaml").write_text("discovery: [{scan: models}]\n")
    assert command(tmp_path, "models", "lock").returncode == 0
    with model.open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        old = file.read(1)
        file.seek(-1000, os.SEEK_END)
        file.write(bytes([old[0] ^ 1]))
    code, said = ends(tmp_path, config(model))
    assert code == 2 and len(said) == 1 and "this is not the model that was expected" in said[0]


@weights
def test_the_lock_file_is_followed_while_the_gateway_runs(tmp_path: Path, model: Path) -> None:
    given = config(model, provenance={"require_hashes": True}, discovery=[{"scan": "models", "interval": "200ms"}])
    code, said = ends(tmp_path, given)
    assert code == 2 and len(said) == 1
    assert "models[0].replicas[0].path" in said[0] and "no SHA-256 is known for it" in said[0]
    assert command(tmp_path, "models", "lock").returncode == 0
    gateway = Gateway(tmp_path, given, wait_for="/ready")
    try:
        assert answers(gateway)
        shutil.copyfile(model, model.with_name("second.gguf"))
        assert eventually(lambda: "second.gguf is left out: no SHA-256 is known for it" in gateway.log())
        assert gateway.get("/v1/models", key=KEY).json()["data"][0]["id"] == "m"
        assert command(tmp_path, "models", "lock").returncode == 0
        assert eventually(lambda: "configuration reloaded" in gateway.log())
        assert eventually(lambda: answers(gateway, "second"), 60)
    finally:
        gateway.stop()


@weights
@pytest.mark.parametrize("whole_folder", [False, True])
def test_a_split_model_is_loaded_as_it_was_hashed(tmp_path: Path, whole_folder: bool) -> None:
    assert MODEL is not None
    first, second = split(MODEL, tmp_path)
    path = tmp_path if whole_folder else first
    known = fingerprint(path).sha256

    def event(**options: Any) -> Any:
        child = Child(str(sockets), path=str(path), context_length=256, parallel=1, **options)
        try:
            found = child.event()
            if found == {"event": "ready"}:
                with child.client() as client:
                    body = {"model": "smollm2", "prompt": "1 2 3", "max_tokens": 2}
                    assert client.post("/v1/completions", json=body).status_code == 200
            return found
        finally:
            child.end()

    sockets = tmp_path.with_name(tmp_path.name + "-sockets")
    sockets.mkdir()
    assert event() == {"event": "ready"}
    assert event(sha256=known) == {"event": "ready"}
    if whole_folder:
        (tmp_path / "README").write_text("new")
    else:
        with second.open("ab") as file:
            file.write(b"\0")
    told = event(sha256=known)
    assert told["event"] == "failed" and "this is not the model that was expected" in told["message"]


def split(source: Path, folder: Path) -> tuple[Path, Path]:
    """A model in two parts, as llama.cpp's own tool makes them: the description in the first, tensors in both."""
    data = source.read_bytes()
    tensors, pairs = struct.unpack_from("<QQ", data, 8)
    end = 24
    for _ in range(pairs):
        end = _after_value(data, _after_string(data, end))
    description = data[24:end]
    infos: list[tuple[bytes, int]] = []
    at = end
    for _ in range(tensors):
        begin = at
        at = _after_string(data, at)
        (dimensions,) = struct.unpack_from("<I", data, at)
        at += 4 + 8 * dimensions + 4
        infos.append((data[begin:at], *struct.unpack_from("<Q", data, at)))
        at += 8
    base = -(-at // 32) * 32
    begins = sorted(offset for _, offset in infos)
    ends = dict(zip(begins, [*begins[1:], len(data) - base], strict=True))
    paths = []
    for number, chosen in enumerate((infos[: tensors // 2], infos[tensors // 2 :])):
        path = folder / f"smol-{number + 1:05}-of-00002.gguf"
        own = _pair("split.no", 2, "H", number) + _pair("split.count", 2, "H", 2)
        own += _pair("split.tensors.count", 5, "i", tensors)
        head = b"GGUF" + struct.pack("<IQQ", 3, len(chosen), 3 + (pairs if number == 0 else 0))
        head += own + (description if number == 0 else b"")
        body = b""
        for info, offset in chosen:
            head += info + struct.pack("<Q", len(body))
            tensor = data[base + offset : base + ends[offset]]
            body += tensor + b"\0" * (-len(tensor) % 32)
        path.write_bytes(head + b"\0" * (-len(head) % 32) + body)
        paths.append(path)
    return paths[0], paths[1]


def _pair(name: str, kind: int, code: str, value: int) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + struct.pack(f"<{code}", value)


def _after_string(data: bytes, at: int) -> int:
    return at + 8 + int(struct.unpack_from("<Q", data, at)[0])


def _after_value(data: bytes, at: int) -> int:
    widths = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    (kind,) = struct.unpack_from("<I", data, at)
    at += 4
    if kind == 8:
        return _after_string(data, at)
    if kind != 9:
        return at + widths[kind]
    inner, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if inner != 8:
        return at + int(count) * widths[inner]
    for _ in range(count):
        at = _after_string(data, at)
    return at


# --- without one
def test_a_cut_file_and_a_lock_file_nobody_can_read(tmp_path: Path) -> None:
    tiny = gguf(LLAMA)
    (tmp_path / "tiny.gguf").write_bytes(tiny)
    (tmp_path / "gateway.yaml").write_text("models: [{name: m, replicas: [{path: tiny.gguf}]}]\n")
    assert command(tmp_path, "models", "lock").returncode == 0
    (tmp_path / "tiny.gguf").write_bytes(tiny[:-1])
    given = config(tmp_path / "tiny.gguf")
    code, said = ends(tmp_path, given)
    assert code == 2 and len(said) == 1 and f"it has {len(tiny) - 1} bytes, not the {len(tiny)}" in said[0]
    (tmp_path / "models.lock").write_text("<<<<<<< ours\n")
    code, said = ends(tmp_path, given)
    assert code == 2 and len(said) == 1 and said[0].startswith(f"{tmp_path}/models.lock:1: not TOML")


def test_check_says_what_it_cannot_cover(tmp_path: Path) -> None:
    (tmp_path / "gateway.yaml").write_text(
        "models: [{name: m, replicas: [{backend: vllm, url: 'http://127.0.0.1:1'}]}]\n"
        "provenance: {require_hashes: true}\n"
    )
    done = command(tmp_path, "check")
    assert done.returncode == 0 and done.stderr == (
        "require_hashes does not cover 1 replica(s) reached by url: those engines load their own files\n"
    )


@pytest.fixture(name="careless")
def _careless() -> Iterator[None]:
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def test_what_the_gateway_makes_is_closed_to_others(
    tmp_path: Path, careless: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the umask: this test and the gateway it starts have none."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    gateway = Gateway(tmp_path, config(None))
    try:
        assert not answers(gateway)
        database = [tmp_path / f"sekisho.db{suffix}" for suffix in ("", "-wal", "-shm")]
        spool, sockets = tmp_path / "sekisho-spool", next((tmp_path / "tmp").glob("sekisho-*"))
        assert eventually(lambda: all(path.exists() for path in database) and list(spool.glob("*.lock")))
        made = [*database, spool, *spool.iterdir(), sockets, *sockets.iterdir()]
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in made}
        assert {name: oct(mode) for name, mode in modes.items() if mode & 0o077} == {}
    finally:
        gateway.stop()


def test_what_is_open_is_said_once_and_the_start_goes_on(tmp_path: Path) -> None:
    database = tmp_path / "sekisho.db"
    sqlite3.connect(database).close()
    database.touch()
    folders = [tmp_path, *tmp_path.parents]
    opened = [folder for folder in folders if not folder.stat().st_mode & stat.S_IXOTH]
    modes = [folder.stat().st_mode for folder in opened]
    database.chmod(0o644)
    for folder in opened:
        folder.chmod(folder.stat().st_mode | 0o001)
    gateway = None
    try:
        gateway = Gateway(tmp_path, config(None))
        gateway.reload()
        assert gateway.log().count(f"{database} can be read by everybody on this machine: chmod o-r {database}") == 1
    finally:
        if gateway is not None:
            gateway.stop()
        for folder, mode in zip(opened, modes, strict=True):
            folder.chmod(mode)


