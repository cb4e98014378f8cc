"""From start to stop: what keeps it from starting, reloading under load, draining, and its own TLS."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.engine import Certificates, Engine, Exchange
from tests.e2e.harness import ADMIN, ROOT, Gateway, Lab, base_config, chat, digest, eventually, free_port, replica
from tests.e2e.wire import Answer, Wire

KEY = "sk-life" + "l" * 41
TENANT = {"name": "alpha", "keys": [{"name": "ci", "sha256": digest(KEY)}]}
Start = Callable[..., Gateway]


def config(models: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return base_config(models, [TENANT], **sections)


def ask(gateway: Gateway, body: Any = None, key: str | None = KEY) -> Answer:
    with Wire(gateway.port) as wire:
        return wire.ask("POST", "/v1/chat/completions", body or chat(), key=key).rest()


class Held:
    """An engine whose streams go on until they are released, and clients that read them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.release = threading.Event()
        engine.script = self.script
        self.wires: list[Wire] = []
        self.answers: list[Answer] = []

    def script(self, x: Exchange) -> None:
        x.begin()
        x.delta("before ")
        x.wait(self.release)
        x.delta("after", "stop")
        x.done()

    def open(self, gateway: Gateway, count: int, model: str = "m", key: str = KEY) -> None:
        for _ in range(count):
            wire = Wire(gateway.port)
            self.wires.append(wire)
            answer = wire.ask("POST", "/v1/chat/completions", chat(model, stream=True), key=key).until(1)
            assert answer.text() == "before "
            self.answers.append(answer)

    def all_finish(self) -> bool:
        self.release.set()
        done = [answer.rest().text() == "before after" and answer.ended_well() for answer in self.answers]
        self.close()
        return all(done)

    def close(self) -> None:
        for wire in self.wires:
            wire.close()


# --- reload
@pytest.mark.parametrize("how", ["SIGHUP", "file watch", "admin path"])
def test_a_reload_leaves_running_streams_alone(start: Start, how: str) -> None:
    """The replica in use goes, another comes, a key is replaced; a wrong file changes nothing."""
    with Engine() as old, Engine() as new:
        gateway = start(config({"m": [replica(old)]}), wait_for="/ready")
        held = Held(old)
        held.open(gateway, 20)
        other = "sk-next" + "n" * 41
        rotated = {"name": "alpha", "keys": [{"name": "ci", "sha256": digest(other)}]}
        gateway.write(base_config({"m": [replica(new)], "n": [replica(new)]}, [rotated]))
        if how == "SIGHUP":
            gateway.process.send_signal(signal.SIGHUP)
        elif how == "admin path":
            assert gateway.reload().json()["result"] == "success"
        assert eventually(lambda: ask(gateway, chat("n"), other).status == 200)
        assert ask(gateway).status == 401 and ask(gateway, chat("m"), other).status == 200
        assert len(old.requests) == 20 and old.running == 20

        failures = gateway.metric("sekisho_config_reloads_total", result="failure")
        gateway.write({"nonsense": True})
        if how == "SIGHUP":
            gateway.process.send_signal(signal.SIGHUP)
        elif how == "admin path":
            refused = gateway.reload()
            assert refused.status_code == 400 and "nonsense" in refused.json()["error"]["message"]
        assert eventually(lambda: gateway.metric("sekisho_config_reloads_total", result="failure") > failures)
        assert "nonsense" in gateway.log()
        assert ask(gateway, chat("n"), other).status == 200 and held.all_finish()


def test_a_reload_forgets_neither_limits_nor_health(lab: Lab) -> None:
    bad, good = lab.engine(script=lambda x: x.fail("bug", 500)), lab.engine()
    models = {"m": [replica(bad), replica(good)]}
    lab.serve(models, limits={"requests": "1000/min"})
    while sum(state["failures_in_a_row"] for state in lab.gateway.replicas()) < 3:
        assert lab.chat().status == 200
    left = int(lab.chat().header("x-ratelimit-remaining-requests") or 0)
    lab.serve(models, limits={"requests": "1000/min"})
    assert not any(state["routable"] for state in lab.gateway.replicas() if state["failures_in_a_row"])
    assert lab.chat().header("x-ratelimit-remaining-requests") == str(left - 1)


def test_a_reload_in_which_a_stream_holds_its_tenants_place(lab: Lab) -> None:
    held = Held(lab.engine())
    models = {"m": [replica(held.engine)]}
    lab.serve(models, limits={"concurrency": 1})
    held.open(lab.gateway, 1, key=lab.key)
    lab.serve(models, limits={"concurrency": 1})
    assert lab.chat().status == 429
    lab.serve({"n": models["m"]}, limits={"concurrency": 2})
    assert held.all_finish()
    assert eventually(lambda: lab.stream("n").status == 200)


def test_settings_of_the_edge_follow_a_reload(lab: Lab) -> None:
    models = {"m": [replica(lab.engine())]}
    large = chat(messages=[{"role": "user", "content": "x" * 50_000}])
    for limit, status in (("10KiB", 413), ("1MiB", 200), ("10KiB", 413)):
        lab.serve(models, server={"max_body": limit})
        assert lab.call(large).status == status


# --- stop
def refused_or_closed(gateway: Gateway) -> bool:
    try:
        answer = ask(gateway)
    except (OSError, EOFError):
        return True
    return answer.status == 503 and answer.error()["code"] == "shutting_down" and bool(answer.header("retry-after"))


def test_a_stop_lets_running_answers_finish(start: Start) -> None:
    with Engine() as engine:
        gateway = start(config({"m": [replica(engine)]}, server={"shutdown_grace": "30s"}), wait_for="/ready")
        held = Held(engine)
        held.open(gateway, 5)
        gateway.terminate()

        def not_ready() -> bool:
            try:
                return gateway.get("/ready", None).status_code == 503
            except OSError:
                return True

        assert eventually(not_ready) and refused_or_closed(gateway)
        assert gateway.process.poll() is None and engine.running == 5
        assert held.all_finish() and gateway.wait() == 0
        statuses = [line["status"] for line in gateway.access_lines() if line["stream"]]
        assert statuses == [200] * 5 and "Traceback" not in gateway.log()


def test_a_stop_ends_what_outlasts_the_grace_with_an_error_event(start: Start) -> None:
    with Engine() as engine:
        gateway = start(config({"m": [replica(engine)]}, server={"shutdown_grace": "1s"}), wait_for="/ready")
        held = Held(engine)
        held.open(gateway, 3)
        begun = time.monotonic()
        gateway.terminate()
        for answer in held.answers:
            (error,) = answer.rest().stream_errors()
            assert answer.complete and error["code"] == "shutting_down" and "[DONE]" not in answer.events()
        held.close()
        assert gateway.wait() == 0 and 1.0 <= time.monotonic() - begun < 15
        lines = [line for line in gateway.access_lines() if line["stream"]]
        assert [(line["status"], line["completion_tokens"]) for line in lines] == [(503, 1)] * 3
        assert all(request.gone.wait(5) for request in engine.requests) and "Traceback" not in gateway.log()


def test_a_second_signal_ends_at_once(start: Start) -> None:
    with Engine() as engine:
        gateway = start(config({"m": [replica(engine)]}, server={"shutdown_grace": "60s"}), wait_for="/ready")
        held = Held(engine)
        held.open(gateway, 1)
        gateway.terminate()
        assert eventually(lambda: "stopping" in gateway.log())
        gateway.process.send_signal(signal.SIGINT)
        assert gateway.wait(15) == 0 and len(held.answers[0].rest().stream_errors()) == 1
        held.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_stop_with_nothing_to_do_is_quick_and_clean(start: Start, number: signal.Signals) -> None:
    gateway = start(config({}))
    with Wire(gateway.port):  # an idle client holds nothing up
        gateway.process.send_signal(number)
        assert gateway.wait() == 0


# --- start
def run(*args: str, folder: Path) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SEKISHO")}
    return subprocess.run(
        [sys.executable, "-m", "gateway", *args], cwd=folder, capture_output=True, text=True, timeout=60,
        env=clean | {"PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip


def write(folder: Path, given: dict[str, Any] | str) -> str:
    file = folder / "gateway.yaml"
    file.write_text(given if isinstance(given, str) else json.dumps(given, indent=1))
    return str(file)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("start")


def test_a_port_that_is_taken_is_one_line_and_exit_2(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve", "--config", write(folder, config({})), "--port", str(port), folder=folder)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert str(port) in done.stderr and "--port" in done.stderr


def good_yaml(line: str) -> str:
    return f"models:\n  - name: m\n    replicas:\n      - {{backend: vllm, url: 'http://127.0.0.1:9'}}\n{line}\n"


WRONG: dict[str, tuple[str, str, str]] = {
    "unknown key": (good_yaml("serverr: {port: 1}"), ":5:", "serverr"),
    "unknown nested key": (good_yaml("server: {prot: 1}"), ":5:", "server.prot"),
    "wrong type": (good_yaml("server: {port: many}"), ":5:", "server.port"),
    "wrong duration": (good_yaml("server:\n  shutdown_grace: 5 parsecs"), ":6:", "server.shutdown_grace"),
    "unknown backend": ("models:\n  - name: m\n    replicas:\n      - {backend: vlm, url: 'http://h:9'}\n",
                        ":4:", "vllm"),
    "two with one name": (good_yaml("  - {name: m, replicas: [{backend: vllm, url: 'http://h:9'}]}"), ":5:", "twice"),
    "unknown fallback": (good_yaml("  - {name: n, fallbacks: [x], replicas: [{backend: vllm, url: 'http://h:9'}]}"),
                         ":5:", "fallbacks"),
    "no replica": ("models:\n  - {name: m, replicas: []}\n", ":2:", "replicas"),
    "not YAML": ("models: [\n", ":", ""),
    "a list": ("- a\n", ":1:", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("command", ["check", "serve"])
def test_a_wrong_configuration_is_exit_2_and_lines_that_say_where(folder: Path, command: str, case: str) -> None:
    text, place, word = WRONG[case]
    done = run(command, "--config", write(folder, text), folder=folder)
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and lines and "Traceback" not in done.stderr and not done.stdout
    assert any(f"gateway.yaml{place}" in line and word in line for line in lines), done.stderr


def test_a_file_that_is_not_there_is_exit_2(folder: Path) -> None:
    for args in (("check",), ("check", "--config", "nowhere.yaml"), ("serve", "--config", "nowhere.yaml")):
        done = run(*args, folder=folder)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1


def test_a_good_configuration_is_shown_as_a_table_without_secrets(folder: Path) -> None:
    given = config({"m": {"aliases": ["chat"], "replicas": [replica("http://gpu-1:8000/x", api_key="topsecret")]}})
    done = run("check", "--config", write(folder, given), folder=folder)
    assert done.returncode == 0 and not done.stderr
    assert all(word in done.stdout for word in ("m", "chat", "vllm", "gpu-1:8000", "alpha"))
    assert "topsecret" not in done.stdout and digest(KEY) not in done.stdout


def test_secrets_from_the_environment_are_read_and_never_shown(folder: Path) -> None:
    given = config({"m": [replica("http://127.0.0.1:9", api_key="${NO_SUCH_VARIABLE}")]})
    done = run("check", "--config", write(folder, given), folder=folder)
    assert done.returncode == 2 and "NO_SUCH_VARIABLE" in done.stderr


# --- its own TLS
def test_clients_over_tls(start: Start, certificates: Certificates) -> None:
    import ssl

    with Engine() as engine:
        tls = {"cert_file": str(certificates.cert_file), "key_file": str(certificates.key_file)}
        context = ssl.create_default_context(cafile=str(certificates.ca_file))
        gateway = start(config({"m": [replica(engine)]}, server={"tls": tls}), scheme="https", verify=context)
        headers = {"authorization": f"Bearer {KEY}"}
        plain = gateway.http.post("/v1/chat/completions", json=chat(), headers=headers)
        assert plain.json()["model"] == "m"
        with gateway.http.stream("POST", "/v1/chat/completions", json=chat(stream=True), headers=headers) as stream:
            assert b"".join(stream.iter_bytes()).endswith(b"data: [DONE]\n\n")
        assert gateway.http.post("/v1/chat/completions", json=chat()).status_code == 401
        with Wire(gateway.port) as wire:  # plain HTTP to a TLS port
            wire.send(b"GET /health HTTP/1.1\r\n\r\n")
            assert b" 400 " in wire.until(b"\r\n\r\n")
        gateway.terminate()
        assert gateway.wait() == 0


def test_the_shared_gateway_logs_each_request_once(lab: Lab) -> None:
    lab.one()
    answer = lab.chat()
    line = lab.gateway.access_line(answer.header("x-request-id") or "")
    assert line["tenant"] == lab.tenant and line["key"] == "test" and line["status"] == 200
    assert (line["prompt_tokens"], line["completion_tokens"], line["usage"]) == (11, 5, "engine")
    assert ADMIN not in lab.gateway.log() and free_port() > 0
