"""Who else could read or change the gateway's files: the rules over plain values, and where the files lie."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.configured import Files
from gateway.provenance.permissions import Need, Place, Seen, complaints, look
from tests.unit._model_files import LLAMA, gguf

US, THEM = 100, 200  # groups
PRIVATE, UNCHANGED = Need.PRIVATE, Need.UNCHANGED


def lines(*seen: Seen) -> list[str]:
    return complaints(seen, {US})


def one(need: Need, mode: int, group: int = US, *, to_group: bool = True, to_all: bool = True) -> list[str]:
    return lines(Seen(Place(Path("/f"), need), mode, group, to_group, to_all))


@pytest.mark.parametrize(
    ("need", "mode", "group", "line"),
    [
        (PRIVATE, 0o600, US, ""),
        (PRIVATE, 0o640, THEM, ""),  # a group of its own for the secret
        (PRIVATE, 0o660, US, ""),
        (PRIVATE, 0o644, US, "/f can be read by everybody on this machine: chmod o-r /f"),
        (PRIVATE, 0o666, US, "/f can be read and changed by everybody on this machine: chmod o-rw /f"),
        (PRIVATE, 0o602, US, "/f can be changed by everybody on this machine: chmod o-w /f"),
        (PRIVATE, 0o660, THEM, "/f can be changed by group 200: chmod g-w /f"),
        (PRIVATE, 0o701, US, ""),
        (UNCHANGED, 0o644, US, ""),
        (UNCHANGED, 0o444, THEM, ""),
        (UNCHANGED, 0o664, US, ""),
        (UNCHANGED, 0o664, THEM, "/f can be changed by group 200: chmod g-w /f"),
        (UNCHANGED, 0o666, US, "/f can be changed by everybody on this machine: chmod o-w /f"),
        (UNCHANGED, 0o777, THEM, "/f can be changed by everybody on this machine: chmod o-w /f"),
    ],
)
def test_modes(need: Need, mode: int, group: int, line: str) -> None:
    assert one(need, mode, group) == ([line] if line else [])


def test_a_closed_folder_above_is_enough() -> None:
    assert one(PRIVATE, 0o666, to_all=False) == []
    assert one(PRIVATE, 0o666, THEM, to_group=False, to_all=False) == []
    assert one(UNCHANGED, 0o664, THEM, to_group=False) == []
    assert one(UNCHANGED, 0o666, THEM, to_all=False) == ["/f can be changed by group 200: chmod g-w /f"]


def test_many_files_of_a_folder_make_one_line() -> None:
    folder = Path("/models")
    inside = [Seen(Place(folder / name, UNCHANGED, folder), 0o666, US) for name in "abc"]
    assert lines(*inside) == [
        "3 files in /models, such as a, can be changed by everybody on this machine: chmod -R o-w /models"
    ]
    assert lines(inside[0]) == ["/models/a can be changed by everybody on this machine: chmod o-w /models/a"]
    assert lines(Seen(Place(folder, UNCHANGED), 0o777, US), *inside) == [
        "/models can be changed by everybody on this machine: chmod o-w /models"
    ]


def test_names_are_safe_to_print_and_to_paste() -> None:
    (line,) = lines(Seen(Place(Path("/a b'\x1b[2J"), UNCHANGED), 0o666, US))
    assert "\x1b" not in line and line.endswith("chmod o-w '/a b'\"'\"'?[2J'")


# --- with real files
CONFIG = """\
server: {tls: {cert_file: tls.crt, key_file: tls.key}}
state: {database_file: secrets/database}
tenants:
  - {name: t, keys: [{name: k, sha256_file: secrets/digest}]}
models:
  - name: m
    replicas:
      - {path: models/tiny.gguf, context_length: 512}
      - {backend: vllm, url: "https://127.0.0.1:1", api_key_file: secrets/engine, client_cert_file: engine.pem}
discovery: [{scan: models}]
"""


@pytest.fixture(name="home")
def _home() -> Iterator[Path]:
    """Everything a configuration can name, closed; the folders above are open to all, which pytest's own are not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield _filled(Path(folder))


def _filled(folder: Path) -> Path:
    (folder / "secrets").mkdir()
    (folder / "models").mkdir()
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
    command += " -keyout tls.key -out tls.crt -subj /CN=x"
    subprocess.run(shlex.split(command), cwd=folder, check=True, capture_output=True)
    files = {
        "gateway.yaml": CONFIG.encode(),
        "secrets/database": b"sqlite:///state.db",
        "secrets/digest": b"ab" * 32,
        "secrets/engine": b"sekrit",
        "engine.pem": (folder / "tls.crt").read_bytes() + (folder / "tls.key").read_bytes(),
        "models/tiny.gguf": gguf(LLAMA),
        "models.lock": b"version = 1\n",
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    for name in ("state.db", "state.db-wal", "state.db-shm"):
        (folder / name).touch()
    (folder / "sekisho-spool").mkdir()
    for path in folder.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    for path in (folder, folder / "secrets", folder / "models"):
        path.chmod(0o755)
    assert look_once(folder) == []
    return folder


def look_once(folder: Path) -> list[str]:
    files = Files(folder / "gateway.yaml", {}, Path())
    files.read()
    return files.complaints


READ = ["tls.key", "engine.pem", "secrets/engine", "state.db", "state.db-wal", "state.db-shm", "sekisho-spool"]
WRITE = ["gateway.yaml", "models.lock", "secrets/digest", "secrets/database", "models", "models/tiny.gguf"]


@pytest.mark.parametrize("name", READ)
def test_what_others_may_not_read(home: Path, name: str) -> None:
    path = home / name
    path.chmod(path.stat().st_mode | 0o005)
    (line,) = look_once(home)
    assert line == f"{path} can be read by everybody on this machine: chmod o-r {path}"
    subprocess.run(line.partition(": ")[2], shell=True, check=True)
    assert look_once(home) == []


@pytest.mark.parametrize("name", WRITE)
def test_what_others_may_read_and_not_change(home: Path, name: str) -> None:
    path = home / name
    path.chmod(path.stat().st_mode | 0o055)
    assert look_once(home) == []
    path.chmod(path.stat().st_mode | 0o002)
    (line,) = look_once(home)
    assert line == f"{path} can be changed by everybody on this machine: chmod o-w {path}"
    subprocess.run(line.partition(": ")[2], shell=True, check=True)
    assert look_once(home) == []


def test_a_closed_folder_keeps_them_safe(home: Path) -> None:
    (home / "tls.key").chmod(0o666)
    assert len(look_once(home)) == 1
    home.chmod(0o700)
    assert look_once(home) == []


def test_a_secret_in_the_configuration_itself(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = home / "gateway.yaml"
    config.chmod(0o644)
    config.write_text(CONFIG.replace("api_key_file: secrets/engine", "api_key: sekrit"))
    assert look_once(home) == [f"{config} can be read by everybody on this machine: chmod o-r {config}"]
    monkeypatch.setenv("ENGINE", "sekrit")
    config.write_text(CONFIG.replace("api_key_file: secrets/engine", "api_key: '${ENGINE}'"))
    assert look_once(home) == []
    tracing = "tracing: {endpoint: 'http://127.0.0.1:1/v1/traces', headers: {authorization: sekrit}}\n"
    config.write_text(CONFIG + tracing)
    assert len(look_once(home)) == 1
    config.write_text(CONFIG.replace("database_file: secrets/database", "database: 'postgresql://u:p@127.0.0.1/d'"))
    assert len(look_once(home)) == 1
    config.write_text(CONFIG.replace("database_file: secrets/database", "database: 'sqlite:///state.db'"))
    assert look_once(home) == []


def test_each_line_comes_once(home: Path) -> None:
    files = Files(home / "gateway.yaml", {}, Path())
    (home / "tls.key").chmod(0o644)
    files.read()
    assert len(files.complaints) == 1
    files.read()
    assert files.complaints == []
    (home / "tls.key").chmod(0o600)
    files.read()
    (home / "tls.key").chmod(0o644)
    files.read()
    assert len(files.complaints) == 1


def test_links_count_as_what_they_lead_to(home: Path) -> None:
    (home / "tls.key").rename(home / "real.key")
    (home / "tls.key").symlink_to("real.key")
    assert look_once(home) == []
    (home / "real.key").chmod(0o644)
    assert len(look_once(home)) == 1


def test_folders_where_nobody_can_replace_what_others_own(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o1777)
    assert complaints(look([Place(tmp_path, UNCHANGED)]), {US}) == []
    assert list(look([Place(tmp_path / "nowhere", UNCHANGED)])) == []
