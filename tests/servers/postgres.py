"""A PostgreSQL server of the tests' own: real, on a loopback port, with its data in a temporary folder.

    postgres = Postgres()
    postgres.start()
    url = postgres.create()      # a new empty database; `url(name)` for one that exists
    postgres.restart()
    postgres.close()
"""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

USER, PASSWORD = "sekisho", "pw-7f3a-never-shown"  # the password is looked for in error texts
PATIENCE = 30.0  # seconds
_names = itertools.count(1)


def _binaries() -> Path | None:
    """The folder of the newest server installed: Debian keeps them out of PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[-3]))
    on_path = shutil.which("postgres")
    return found[-1].parent if found else Path(on_path).parent if on_path else None


class Postgres:
    """One server. `start` and `stop` keep the data and the port, so that clients find it again."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="sekisho-postgres-"))
        self._data = self._folder / "data"
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._initialise()

    @staticmethod
    def available() -> bool:
        return _binaries() is not None

    def _initialise(self) -> None:
        password = self._folder / "password"
        password.write_text(PASSWORD)
        if os.getuid() == 0:  # the server refuses to run as root
            owner = pwd.getpwnam("postgres")
            for path in (self._folder, password):
                os.chown(path, owner.pw_uid, owner.pw_gid)
        self._run(
            "initdb", "-D", str(self._data), "-U", USER, f"--pwfile={password}", "--auth=scram-sha-256",
            "--encoding=UTF8", "--locale=C.UTF-8", "--locale-provider=icu", "--icu-locale=en-US", "--no-sync",
        )  # fmt: skip

    def _command(self, program: str, *args: str) -> list[str]:
        folder = _binaries()
        assert folder is not None, "no PostgreSQL server is installed"
        other_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.getuid() == 0 else []
        return [*other_user, str(folder / program), *args]

    def _run(self, program: str, *args: str) -> str:
        environment = os.environ | {"PGPASSWORD": PASSWORD}
        done = subprocess.run(
            self._command(program, *args), env=environment, cwd="/", capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{program}: {done.stderr}"
        return done.stdout

    def start(self) -> None:
        options = {
            "listen_addresses": "127.0.0.1", "port": str(self.port), "unix_socket_directories": "",
            "fsync": "off", "synchronous_commit": "off", "max_connections": "60", "shared_buffers": "64MB",
        }  # fmt: skip
        settings = [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command("postgres", "-D", str(self._data), *settings), stdout=log, stderr=log, cwd="/"
            )
        deadline = time.monotonic() + PATIENCE
        while not self._is_ready():
            assert self._process.poll() is None and time.monotonic() < deadline, f"did not start:\n{self.log()}"
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        where = ["-h", "127.0.0.1", "-p", str(self.port)]
        done = subprocess.run(self._command("pg_isready", *where), cwd="/", capture_output=True, timeout=30)
        return done.returncode == 0

    def stop(self) -> None:
        """Ends all sessions and the server; what was committed stays."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(PATIENCE)
        self._process = None

    def restart(self) -> None:
        self.stop()
        self.start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A server that is there and does not answer: connections open, nothing comes of them."""
        assert self._process is not None
        server = psutil.Process(self._process.pid)
        frozen = [server, *server.children(recursive=True)]
        for process in frozen:
            process.suspend()
        try:
            yield
        finally:
            for process in frozen:
                process.resume()

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self._folder)

    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")

    def create(self) -> str:
        """The URL of a new empty database."""
        name = f"test{next(_names)}"
        self.sql(f"CREATE DATABASE {name}", "postgres")
        return self.url(name)

    def url(self, database: str) -> str:
        return f"postgresql://{USER}:{PASSWORD}@127.0.0.1:{self.port}/{database}"

    def dump(self, database: str) -> str:
        """Schema and data as SQL, the same for the same content."""
        text = self._run(
            "pg_dump", "-h", "127.0.0.1", "-p", str(self.port), "-U", USER, "-d", database
        )
        return "".join(line for line in text.splitlines(True) if not line.startswith(("\\restrict", "\\unrestrict")))

    def sql(self, statement: str, database: str) -> str:
        """Runs one statement past the gateway. Returns psql's plain output."""
        return self._run(
            "psql", "-h", "127.0.0.1", "-p", str(self.port), "-U", USER, "-d", database,
            "-v", "ON_ERROR_STOP=1", "-X", "-A", "-t", "-c", statement,
        )  # fmt: skip
