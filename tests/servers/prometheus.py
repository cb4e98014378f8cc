"""A Prometheus of the tests' own: real, on a loopback port, with its data in a temporary folder; and its promtool."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from tests.e2e.harness import PATIENCE, eventually, free_port


class Refused(Exception):
    """What Prometheus says of a query that it does not understand."""


class Prometheus:
    """A server that nobody else uses. `config` is what stands in prometheus.yml."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log, self.port = folder / "log", free_port()
        file = folder / "prometheus.yml"
        file.write_text(json.dumps(config))  # JSON is YAML
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(
                [
                    "prometheus", f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self.port}", "--enable-feature=exemplar-storage",
                    "--log.level=warn",
                ],
                cwd=folder, stdout=out, stderr=out,
            )  # fmt: skip
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=PATIENCE, trust_env=False)
        if not eventually(self._is_ready):
            self.close()
            raise RuntimeError(f"prometheus did not start:\n{self.log()}")

    @staticmethod
    def available() -> bool:
        return shutil.which("prometheus") is not None and shutil.which("promtool") is not None

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _is_ready(self) -> bool:
        if self._process.poll() is not None:
            raise RuntimeError(f"prometheus ended with {self._process.returncode}:\n{self.log()}")
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def close(self) -> None:
        self._http.close()
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    # --- asking
    def ask(self, path: str, **parameters: Any) -> Any:
        """`data` of an answer. Raises: Refused."""
        answer = self._http.get(f"/api/v1/{path}", params=parameters).json()
        if answer["status"] != "success":
            raise Refused(answer["error"])
        return answer["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Series with their `value` of now."""
        found: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        return found

    def values(self, expression: str, seconds: float = 60.0) -> list[float]:
        """Every value of the last while, of all series, in steps of a second. What is no number is left out."""
        now = time.time()
        data = self.ask("query_range", query=expression, start=now - seconds, end=now, step=1)
        every = (float(value) for series in data["result"] for _, value in series["values"])
        return [value for value in every if value == value]

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self.ask("rules")["groups"] for rule in group["rules"]]


def promtool(*words: str | Path, given: bytes = b"") -> str:
    """What it says. Raises: AssertionError when it is not content."""
    done = subprocess.run(["promtool", *map(str, words)], input=given, capture_output=True, timeout=120)
    said = (done.stdout + done.stderr).decode(errors="replace")
    assert done.returncode == 0, said
    return said
