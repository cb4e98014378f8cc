"""The `sekisho` command: exit codes, single-line errors, and what it prints."""

import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config import ConfigError, Problem, StartupError, load
from gateway.keys import digest, new_key
from tests.command_line import Run, runner
from tests.unit._model_files import LLAMA, gguf

ROOT = Path(__file__).resolve().parents[2]
FLEET = """\
tenants:
  - {name: research, models: ["smol*"], keys: [{name: ci, sha256: "%s"}]}
models:
  - name: smollm2
    aliases: [chat]
    context_length: 4096
    replicas:
      - {path: tiny.gguf, parallel: 3}
      - {backend: vllm, url: "http://gpu-1:8000/prefix", api_key: topsecret, format: awq, max_inflight: 7}
""" % digest("sk-x")  # noqa: UP031



@pytest.fixture(name="run")
def _run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in an empty folder; gives exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SEKISHO_CONFIG", raising=False)
    return runner(capsys)


@pytest.fixture(name="fleet")
def _fleet(tmp_path: Path) -> Path:
    (tmp_path / "tiny.gguf").write_bytes(gguf(LLAMA))
    (tmp_path / "fleet.yaml").write_text(FLEET)
    return tmp_path / "fleet.yaml"


@pytest.fixture(name="served")
def _served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, dict[str, Any]]]:
    """Puts a recorder in place of gateway.app; the calls it got."""
    calls: list[tuple[Path, dict[str, Any]]] = []

    def run(path: Path, overrides: dict[str, Any]) -> int:
        calls.append((path, overrides))
        if path.name == "taken.yaml":
            raise StartupError("port 8080 is in use, write another `server.port`")
        if path.name == "wrong.yaml":
            raise ConfigError([Problem("wrong.yaml", 3, "server.port", "out of range", "write 1 to 65535")])
        if path.name == "bug.yaml":
            raise RuntimeError("surprise\nin two lines")
        return 1 if path.name == "failed.yaml" else 0

    app = types.ModuleType("gateway.app")
    app.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "gateway.app", app)
    return calls


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("nonsense",),
        ("serve", "--bogus"),
        ("serve", "--port", "x"),
        ("check", "--config"),
        ("check", "extra"),
        ("keys",),
        ("keys", "create"),
        ("keys", "create", "--print", "--name", "a b"),
        ("check",),
        ("serve",),
        ("check", "--config", "nowhere.yaml"),
    ],
)
def test_wrong_usage_is_one_line_and_2(run: Run, args: tuple[str, ...]) -> None:
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and len(err) > 10


def test_help(run: Run) -> None:
    code, out, err = run("--help")
    assert (code, err) == (0, "")
    assert {"serve", "check", "keys", "version"} <= set(out.split())


def test_version(run: Run) -> None:
    code, out, _ = run("version")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["sekisho", "python", "llama.cpp"]
    assert sys.version.split()[0] in out


def test_the_command_line_starts_light() -> None:
    heavy = "fastapi uvicorn httpx sqlalchemy llama_cpp numpy jinja2 structlog prometheus_client rich".split()
    code = (
        "import sys, gateway.__main__, gateway.config\n"
        f"loaded = [name for name in {heavy!r} if name in sys.modules]\n"
        "assert not loaded, loaded\n"
        "sys.exit(gateway.__main__.main(['version']))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True)


def test_module_and_exit_code() -> None:
    done = subprocess.run([sys.executable, "-m", "gateway", "bogus"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("sekisho: No such command 'bogus'")


def test_check_prints_the_fleet(run: Run, fleet: Path) -> None:
    code, out, err = run("check", "--config", str(fleet))
    assert (code, err) == (0, "")
    rows = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in out.splitlines() if line[:1] in "│┃"]
    assert ["smollm2", "chat", "least_load", "llamacpp tiny.gguf", "gguf", "4096", "3"] in rows
    assert ["", "", "", "vllm gpu-1:8000", "awq", "4096", "7"] in rows
    assert ["research", "1", "smol*"] in rows
    assert "topsecret" not in out


def test_check_prints_problems(run: Run, fleet: Path) -> None:
    fleet.write_text(FLEET.replace("aliases", "alliases").replace("max_inflight: 7", "max_inflight: 0"))
    code, out, err = run("check", "--config", str(fleet))
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        f"{fleet}:5: models[0].alliases: unknown key, did you mean `aliases`?",
        f"{fleet}:9: models[0].replicas[1].max_inflight: out of range, write a value greater than or equal to 1",
    ]


def test_where_the_configuration_is_looked_for(
    run: Run, fleet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: list[tuple[Path, dict[str, Any]]]
) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "gateway.yaml").touch()
    run("serve")
    (tmp_path / "gateway.yaml").touch()
    run("serve")
    monkeypatch.setenv("SEKISHO_CONFIG", str(fleet))
    run("serve")
    run("serve", "--config", "other.yaml")
    assert [path for path, _ in served] == [
        Path("config/gateway.yaml"),
        Path("gateway.yaml"),
        fleet,
        Path("other.yaml"),
    ]


def test_serve_passes_options_as_overrides(run: Run, fleet: Path, served: list[tuple[Path, dict[str, Any]]]) -> None:
    code, out, err = run(
        "serve", "--config", str(fleet), "--host", "::1", "--port", "9", "--workers", "2", "--log-level", "debug"
    )
    assert (code, out, err) == (0, "", "")
    ((path, overrides),) = served
    assert overrides == {"server.host": "::1", "server.port": 9, "server.workers": 2, "logging.level": "debug"}
    overrides.pop("server.workers")
    config = load(path, kinds=("llamacpp", "ollama", "vllm"), environ={}, overrides=overrides)
    assert (config.server.host, config.server.port, config.logging.level) == ("::1", 9, "debug")


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("taken.yaml", 2, "port 8080 is in use, write another `server.port`\n"),
        ("wrong.yaml", 2, "wrong.yaml:3: server.port: out of range, write 1 to 65535\n"),
        ("failed.yaml", 1, ""),
        ("fine.yaml", 0, ""),
    ],
)
def test_how_serving_ends(run: Run, name: str, code: int, said: str) -> None:
    assert run("serve", "--config", name) == (code, "", said)


@pytest.mark.usefixtures("served")
def test_a_bug_is_one_line_that_says_where(run: Run) -> None:
    code, _, err = run("serve", "--config", "bug.yaml")
    assert code == 1
    assert re.fullmatch(r"sekisho: RuntimeError: surprise in two lines \(.*test_cli\.py:\d+\)\n", err)


@pytest.mark.parametrize("name", ["ci", "a:b", "yes-man", "null", "12", "no", "a@b.c", "2027-01-01", "1e3"])
def test_a_key_and_its_line(run: Run, name: str) -> None:
    code, out, err = run("keys", "create", "--print", "--name", name, "--tenant", "research")
    key, line = out.splitlines()
    (entry,) = yaml.safe_load(line)
    assert code == 0 and entry == {"name": name, "sha256": digest(key)}
    assert "research" in err and key not in err


def test_a_key_without_a_name_gets_one_that_tells_nothing_of_it(run: Run) -> None:
    """Names are in logs and usage, where no part of a key or its digest belongs."""
    key, line = run("keys", "create", "--print")[1].splitlines()
    (entry,) = yaml.safe_load(line)
    assert re.fullmatch("key-[0-9a-f]{8}", entry["name"])
    assert entry["sha256"] == digest(key) and entry["name"][4:] not in digest(key) + key


def test_keys() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(re.fullmatch(r"sk-[A-Za-z0-9_-]{48}", key) for key in keys)
    assert digest("sk-abc") == "1460db1b6902f8b1fc2a40d9381a24d0fd22c3bc1b2c6f999c521da73776fbe0"
