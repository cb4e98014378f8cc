"""What the soak (tests/load/soak) calls unexpected: its own judgement has to be right before it can judge a gateway."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.load.soak import verdict
from tests.load.soak.books import Row, compare
from tests.load.soak.clients import Line
from tests.load.soak.engine import PROMPT_TOKENS, token
from tests.load.soak.verdict import Asked, Deeds, judge
from tests.load.soak.watch import Life, Look
from tests.load.soak.wire import Answer

ASKED = Asked("red", "sk-k", "chat", "n1", 3, stream=True)
PORT = 40001


def answer(body: bytes, status: int = 200, complete: bool = True, **headers: str) -> Answer:
    given = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    problem = "" if complete else "lost"
    return Answer(PORT, 10.0, 20.0, 21.0, 30.0, status, given, bytearray(body), complete, problem=problem)


def chunk(text: str | None, reason: str | None = None, model: str = "chat") -> dict[str, Any]:
    delta = {} if text is None else {"content": text}
    return {"model": model, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def stream(*documents: dict[str, Any], done: bool = True) -> bytes:
    events = [b"data: " + json.dumps(one).encode() + b"\n\n" for one in documents]
    return b"".join(events) + (b"data: [DONE]\n\n" if done else b"")


TOKENS = [chunk(token("n1", place, 2)) for place in range(3)]
LAST = chunk(None, "stop")
ERROR = {"error": {"message": "gone", "type": "upstream_error", "param": None, "code": "engine_connection_lost"}}
USAGE = {"model": "chat", "choices": [], "usage": {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 3}}
KILLED = Deeds(engines={2: [25.0]})


def outcome(body: bytes, deeds: Deeds | None = None, asked: Asked = ASKED, **more: Any) -> str:
    return judge(asked, answer(body, **more), deeds or Deeds())[0]


def test_a_whole_stream_is_complete() -> None:
    assert outcome(stream(*TOKENS, LAST)) == verdict.COMPLETE
    assert outcome(b": keepalive\n\n" + stream(*TOKENS, LAST)) == verdict.COMPLETE


@pytest.mark.parametrize(
    "documents",
    [
        [*TOKENS[:2], LAST],
        [*TOKENS, TOKENS[2], LAST],
        [TOKENS[1], TOKENS[0], TOKENS[2], LAST],
        [*TOKENS[:2], chunk(token("n1", 2, 3)), LAST],
        [*TOKENS[:2], chunk(token("n2", 2, 2)), LAST],
        [*TOKENS],
        [*TOKENS, LAST, LAST],
        [*TOKENS, chunk(None, "length")],
        [*TOKENS, chunk(None, "stop", model="m")],
        [*TOKENS, LAST, USAGE],
        [LAST],
        [*TOKENS, ERROR],
    ],
    ids=["one missing", "one twice", "order", "two engines", "another's", "no reason", "two reasons", "length",
         "another name", "usage unasked", "empty", "an error for no reason"],
)  # fmt: skip
def test_every_other_stream_is_unexpected(documents: list[dict[str, Any]]) -> None:
    assert outcome(stream(*documents)) == verdict.UNEXPECTED


def test_a_stream_without_its_end_is_unexpected() -> None:
    assert outcome(stream(*TOKENS, LAST, done=False)) == verdict.UNEXPECTED
    assert outcome(stream(*TOKENS, LAST) + stream(LAST)) == verdict.UNEXPECTED


def test_a_killed_engine_excuses_one_error_and_no_clean_end() -> None:
    begun = [*TOKENS[:2], ERROR]
    assert outcome(stream(*begun, done=False), KILLED) == verdict.ENGINE_KILLED
    assert outcome(stream(*begun, done=True), KILLED) == verdict.UNEXPECTED
    assert outcome(stream(*begun, ERROR, done=False), KILLED) == verdict.UNEXPECTED
    assert outcome(stream(*TOKENS[:2], LAST, ERROR, done=False), KILLED) == verdict.UNEXPECTED
    assert outcome(stream(ERROR, done=False), KILLED) == verdict.UNEXPECTED, "nothing was shown: another could answer"
    assert outcome(stream(*begun, done=False), Deeds(engines={3: [25.0]})) == verdict.UNEXPECTED
    assert outcome(stream(*begun, done=False), Deeds(engines={2: [19.0, 31.0]})) == verdict.UNEXPECTED


def test_a_killed_worker_excuses_what_was_connected_to_it() -> None:
    lost = {"complete": False}
    assert outcome(b"", Deeds(ports={PORT: [25.0]}), **lost) == verdict.WORKER_KILLED
    assert outcome(b"", Deeds(ports={PORT: [9.0]}), **lost) == verdict.UNEXPECTED
    assert outcome(b"", Deeds(ports={PORT + 1: [25.0]}), **lost) == verdict.UNEXPECTED


def test_only_who_has_a_small_limit_may_be_refused() -> None:
    small = Asked("small", "sk-k", "chat", "n1", 3, stream=False, may_be_limited=True)
    assert outcome(b"{}", asked=small, status=429, retry_after="3") == verdict.LIMITED
    assert outcome(b"{}", asked=small, status=429) == verdict.UNEXPECTED
    assert outcome(b"{}", status=429, retry_after="3") == verdict.UNEXPECTED


def line(request_id: str, came: str = verdict.COMPLETE, ended: float = 30.0) -> Line:
    return Line(came, "red", "quiet", request_id, 200, 3, 20.0, ended, PORT, 10.0, 0.1)


ROW = Row("r1", 200, "red", PROMPT_TOKENS, 3, "engine")


def test_the_books_agree_row_by_row() -> None:
    assert compare([ROW], [line("r1")], Deeds())[0] == []
    assert compare([], [line("r1")], Deeds())[0]
    assert compare([ROW, ROW], [line("r1")], Deeds())[0]
    assert compare([ROW._replace(completion=2)], [line("r1")], Deeds())[0]
    assert compare([ROW._replace(tenant="blue")], [line("r1")], Deeds())[0]
    assert compare([ROW, ROW._replace(request_id="r2")], [line("r1")], Deeds())[0]


def test_only_the_last_moment_of_a_killed_worker_may_be_missing() -> None:
    wrong, figures = compare([], [line("r1")], Deeds(workers=[30.5]))
    assert (wrong, figures["rows lost with killed workers"]) == ([], 1)
    assert compare([], [line("r1")], Deeds(workers=[40.0]))[0]
    assert compare([], [line("r1")], Deeds(workers=[29.0]))[0]


@pytest.mark.parametrize(("grown", "flat"), [(0.0, True), (0.005, True), (0.05, False)])
def test_memory_that_grows_steadily_is_not_flat(grown: float, flat: bool) -> None:
    """`grown`: MiB a second."""
    life = Life("worker", [Look(at, 100 + at * grown, 10, 5, 0.0) for at in range(0, 1200, 5)])
    assert life.is_flat is flat


def test_warming_up_is_not_growth() -> None:
    life = Life("worker", [Look(at, 100 + min(at, 300) * 0.2, 10, 5, 0.0) for at in range(0, 1200, 5)])
    assert life.is_flat
