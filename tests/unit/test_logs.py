"""Log lines: what they say, what they never say, and a log that is stuck."""

import io
import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from backends.base import OpenAICompatible
from gateway import logs
from gateway.errors import AuthError, ModelNotFound, RateLimited, UpstreamBroken
from gateway.logs import AccessLog, fields
from gateway.outcome import Outcome
from gateway.types import Endpoint, Limits, Model, Principal, Replica, Tenant, Timeouts, Usage

SECRET = "sk-super-secret-key"
REPLICA = Replica(
    "m/vllm-1", "m", OpenAICompatible(kind="vllm"), Endpoint("10.0.0.5", 8000), "", "m", Timeouts(), {}, api_key=SECRET
)
MODEL = Model("m", ("chat",), "least_load", (), (), (REPLICA,), 512, 0)
CALLER = Principal(Tenant("research"), "ci", "user", ("*",), None, Limits(), None, b"\x01" * 32)


def finished(**more: object) -> Outcome:
    outcome = Outcome("chat", "req_1", 100.0)
    outcome.principal, outcome.model, outcome.replica, outcome.asked = CALLER, MODEL, REPLICA, "chat"
    outcome.status, outcome.attempts, outcome.stream, outcome.usage = 200, 1, True, Usage(10, 11, 4, 2)
    outcome.sent, outcome.first_token, outcome.ended = 100.01, 100.25, 101.5
    for name, value in more.items():
        setattr(outcome, name, value)
    return outcome


def written(style: str, *outcomes: Outcome) -> str:
    stream = io.BytesIO()
    log = AccessLog(style, stream)
    log.add(outcomes)
    log.close()
    assert log.dropped == 0
    return stream.getvalue().decode()


def test_a_line_says_who_asked_for_what_and_how_it_went() -> None:
    assert fields(finished(), 1000.0) == {
        "time": 1101.5, "event": "request", "request_id": "req_1", "operation": "chat", "status": 200,
        "tenant": "research", "key": "ci", "model": "m", "asked": "chat", "replica": "m/vllm-1", "stream": True,
        "attempts": 1, "duration_ms": 1500.0, "ttft_ms": 250.0, "prompt_tokens": 10, "completion_tokens": 11,
        "usage": "engine", "cached_tokens": 4, "reasoning_tokens": 2,
    }  # fmt: skip


def test_an_estimate_is_called_one_and_a_failure_has_its_code() -> None:
    line = fields(finished(usage=Usage(5, 3, source="estimate"), error=UpstreamBroken("x"), status=502), 0.0)
    assert (line["usage"], line["error"], line["completion_tokens"]) == ("estimate", "engine_connection_lost", 3)
    assert "cached_tokens" not in line


@pytest.mark.parametrize("style", ["json", "text"])
def test_why_a_caller_was_refused_is_in_the_log(style: str) -> None:
    text = written(style, finished(principal=None, model=None, error=AuthError("key ci of t has expired"), status=401))
    assert '"key ci of t has expired"' in text and "invalid_api_key" in text
    for error in (AuthError(), RateLimited("x"), None):
        line = written(style, finished(error=error))
        assert '"reason"' not in line and " reason=" not in line


@pytest.mark.parametrize("style", ["json", "text"])
def test_a_reason_breaks_no_line_whatever_it_holds(style: str) -> None:
    """It may repeat what a token says of itself."""
    text = written(style, finished(error=AuthError('a"b\\\n{"event":"request"}\u2028 \x1b[0m\ud800'), status=401))
    assert text.count("\n") == 1 and "\x1b" not in text
    if style == "json":
        assert json.loads(text)["reason"].startswith('a"b')


def test_lines_in_order_one_each() -> None:
    lines = written("json", *(finished(request_id=f"req_{i}") for i in range(500))).splitlines()
    assert [json.loads(line)["request_id"] for line in lines] == [f"req_{i}" for i in range(500)]


def test_text_lines() -> None:
    (line,) = written("text", finished(usage=None, replica=None)).splitlines()
    assert " request_id=req_1 operation=chat status=200 tenant=research key=ci model=m" in line
    assert "None" not in line
    assert "replica=" not in line


@pytest.mark.parametrize("style", ["json", "text"])
def test_keys_bodies_addresses_and_invented_names_are_never_written(style: str) -> None:
    text = written(
        style,
        finished(),
        finished(principal=None, model=None, asked=SECRET, error=AuthError(), status=401),
        finished(model=None, asked=SECRET, error=ModelNotFound(SECRET), status=404),
        finished(error=UpstreamBroken(f"told {SECRET}")),
    )
    assert len(text.splitlines()) == 4
    for secret in (SECRET, SECRET[:8], "10.0.0.5", CALLER.digest.hex(), repr(CALLER.digest)):
        assert secret not in text


# --- a log that cannot be written
class Stuck(io.BytesIO):
    """A pipe whose reader has stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()

    def write(self, data: object) -> int:
        self.free.wait(30)
        return super().write(data)  # type: ignore[arg-type]


def test_a_stuck_log_drops_lines_and_stalls_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_MOST_WAITING", 100)
    stream = Stuck()
    log = AccessLog("json", stream)
    for _ in range(50):  # never waits, although nothing is written
        log.add([finished()] * 10)
    assert 500 - log.dropped <= 100 + 2 * 10
    assert log.dropped > 0
    stream.free.set()
    log.add([finished()])
    log.close()
    assert len(stream.getvalue().splitlines()) + log.dropped == 501


class Broken(io.BytesIO):
    """A disk that is full for the first lines."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error: Exception | None = error

    def write(self, data: object) -> int:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return super().write(data)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [OSError(28, "No space left"), BrokenPipeError(), ValueError("closed file")])
def test_a_failed_write_loses_its_lines_and_no_more(error: Exception) -> None:
    stream = Broken(error)
    log = AccessLog("json", stream)
    log.add([finished()])
    log.add([finished(request_id="second")])
    log.close()
    assert log.dropped == 1
    assert [json.loads(line)["request_id"] for line in stream.getvalue().splitlines()] == ["second"]


@pytest.mark.parametrize(
    "more",
    [
        {}, {"asked": "m"}, {"asked": 'a"b\\c \u00e9'}, {"first_token": 0.0}, {"usage": None}, {"usage": Usage(1, 2)},
        {"error": RateLimited("x"), "status": 429, "replica": None},
        {"error": AuthError("key ci of t has expired"), "status": 401}, {"error": AuthError(), "status": 401},
        {"principal": None, "model": None, "replica": None},
        {"stream": False, "attempts": 3},
    ],
)  # fmt: skip
def test_the_line_put_together_by_hand_says_what_the_fields_say(more: dict[str, Any]) -> None:
    outcome = finished(**more)
    line = json.loads(written("json", outcome))
    wanted = {name: value for name, value in fields(outcome, 0.0).items() if name != "time"}
    assert line.pop("time") > 0
    assert {"asked": None} | line == wanted


def test_an_idle_log_writes_nothing() -> None:
    assert written("json") == ""


# --- events
@pytest.fixture(name="fresh_logging")
def _fresh_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    noisy = {name: logging.getLogger(name).level for name in ("httpx", "httpcore", "asyncio")}
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, before in noisy.items():
        logging.getLogger(name).setLevel(before)
    structlog.reset_defaults()


@pytest.mark.usefixtures("fresh_logging")
def test_events_are_json_lines_with_traces_inside() -> None:
    stream = io.StringIO()
    logs.setup("info", "json", stream)
    log = logging.getLogger("sekisho.test")
    log.debug("hidden")
    log.info("replica %s is %s", "a", "up")
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        log.exception("failed")
    logging.getLogger("httpx").info("chatter")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["event"], first["level"], first["logger"]) == ("replica a is up", "info", "sekisho.test")
    assert first["timestamp"].endswith("Z")
    assert "RuntimeError: boom" in second["exception"]


@pytest.mark.usefixtures("fresh_logging")
def test_events_as_text_have_no_colours_in_a_file() -> None:
    stream = io.StringIO()
    logs.setup("warning", "text", stream)
    logging.getLogger("sekisho.test").info("hidden")
    logging.getLogger("sekisho.test").warning("shown")
    assert "shown" in stream.getvalue()
    assert "hidden" not in stream.getvalue()
    assert "\x1b" not in stream.getvalue()
