"""Usage rows: who is charged for what, under which names, and at what cost."""

import gc
import math
import sys
from types import FrameType
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.base import OpenAICompatible, Operation
from gateway.errors import AuthError, ClientGone, ModelNotFound, RateLimited, UpstreamBroken
from gateway.outcome import Outcome
from gateway.records import UsageRow
from gateway.types import Endpoint, Limits, Model, Principal, Replica, Tenant, Timeouts, Usage
from gateway.usage import MOST_TOKENS, decode, encode, last_use, usage_rows

CALLS_PER_OUTCOME = 8  # tuple.__new__, append, four of int and two to spare; none of them Python's
REPLICA = Replica("m/vllm-1", "m", OpenAICompatible(kind="vllm"), Endpoint("h", 1), "", "m", Timeouts(), {})
MODEL = Model("m", ("chat",), "least_load", (), (), (REPLICA,), 512, 0)


def caller(key: str = "key_1", tenant: str = "research") -> Principal:
    return Principal(Tenant(tenant), key, "user", ("*",), None, Limits(), None, b"\x01" * 32)


def finished(**more: object) -> Outcome:
    outcome = Outcome(Operation.CHAT, "req_1", 100.0)
    outcome.principal, outcome.model, outcome.replica, outcome.asked = caller(), MODEL, REPLICA, "chat"
    outcome.status, outcome.attempts, outcome.stream, outcome.usage = 200, 1, True, Usage(10, 11, 4, 2)
    outcome.sent, outcome.first_token, outcome.ended = 100.01, 100.25, 101.5
    for name, value in more.items():
        setattr(outcome, name, value)
    return outcome


def row(**more: object) -> UsageRow:
    (made,) = usage_rows([finished(**more)], "p", 0, 0.0)
    return made


COUNTS = st.one_of(st.integers(0, 5000), st.just(2**63))
SOURCES = st.sampled_from(["engine", "estimate"])
OUTCOMES = st.builds(
    finished,
    principal=st.sampled_from([None, caller(), caller("ci", "ops"), caller("jwt:Åsa 日本")]),
    model=st.sampled_from([None, MODEL]),
    replica=st.sampled_from([None, REPLICA]),
    asked=st.sampled_from(["m", "chat", "m@q4", '"\n\r\\', ""]),
    usage=st.one_of(st.none(), st.builds(Usage, COUNTS, COUNTS, COUNTS, COUNTS, SOURCES)),
    error=st.sampled_from([None, ClientGone(), RateLimited("x"), ModelNotFound("x")]),
    first_token=st.sampled_from([0.0, 100.125]),
    ended=st.floats(100.0, 1e6),
    stream=st.booleans(),
)  # fmt: skip


def test_a_row_says_who_used_what_and_how_it_went() -> None:
    assert usage_rows([finished()], "abcd", 41, 1000.0) == [
        UsageRow(
            id="abcd-42", time=1101.5, request_id="req_1", tenant="research", key="key_1", model="m", asked="chat",
            replica="m/vllm-1", operation="chat", stream=1, status=200, code="", attempts=1, prompt=10, cached=4,
            completion=11, reasoning=2, source="engine", ttft_ms=250.0, duration_ms=1500.0,
        )
    ]  # fmt: skip


def test_both_names_are_kept_where_they_differ() -> None:
    assert (row(asked="chat").model, row(asked="chat").asked) == ("m", "chat")
    assert (row(asked="m@q4").model, row(asked="m@q4").asked) == ("m", "m@q4")
    assert (row(asked="m").model, row(asked="m").asked) == ("m", "")


def test_a_name_that_means_no_model_is_not_kept() -> None:
    made = row(model=None, replica=None, asked="sk-a-key-in-the-wrong-field", error=ModelNotFound("x"), status=404)
    assert (made.model, made.asked, made.replica, made.code) == ("unknown", "", "", "model_not_found")
    assert "sk-a-key" not in repr(made)


def test_refused_credentials_are_nobodys_and_a_refused_caller_is_somebody() -> None:
    stranger = finished(principal=None, model=None, usage=None, error=AuthError(), status=401)
    limited = finished(usage=None, error=RateLimited("slow down"), status=429, attempts=0)
    made = usage_rows([stranger, limited, stranger], "p", 0, 0.0)
    assert [(one.id, one.status, one.code, one.tenant) for one in made] == [
        ("p-1", 429, "rate_limit_exceeded", "research")
    ]


def test_a_client_that_leaves_early_is_charged_what_it_was_given_as_an_estimate() -> None:
    made = row(status=499, error=ClientGone(), usage=Usage(7, 300, source="estimate"))
    assert (made.status, made.code, made.prompt, made.completion, made.source) == (
        499, "client_closed_request", 7, 300, "estimate",
    )  # fmt: skip


def test_a_request_that_never_reached_an_engine_is_charged_nothing() -> None:
    made = row(status=499, error=ClientGone(), usage=None, replica=None, attempts=0, first_token=0.0)
    assert (made.prompt, made.cached, made.completion, made.reasoning, made.source) == (0, 0, 0, 0, "")
    assert made.ttft_ms is None


def test_a_failure_has_its_code() -> None:
    assert row(status=502, error=UpstreamBroken("x")).code == "engine_connection_lost"


def test_numbers_that_no_engine_can_mean_are_cut_to_what_a_column_holds() -> None:
    made = row(usage=Usage(2**64 - 1, 5, 2**63, 3))
    assert (made.prompt, made.completion, made.cached, made.reasoning) == (MOST_TOKENS, 5, MOST_TOKENS, 3)


@given(st.lists(OUTCOMES, max_size=20), st.integers(0, 10**9))
def test_rows_add_up_to_what_the_callers_used_and_ids_go_on_without_gaps(outcomes: list[Outcome], made: int) -> None:
    rows = usage_rows(outcomes, "p", made, 0.0)
    known = [outcome for outcome in outcomes if outcome.principal is not None]
    assert [one.id for one in rows] == [f"p-{made + number}" for number in range(1, len(known) + 1)]
    used = [outcome.usage for outcome in known if outcome.usage is not None]
    assert sum(one.prompt for one in rows) == sum(min(usage.prompt, MOST_TOKENS) for usage in used)
    assert sum(one.completion for one in rows) == sum(min(usage.completion, MOST_TOKENS) for usage in used)
    assert [one.request_id for one in rows] == [outcome.request_id for outcome in known]


@given(st.lists(OUTCOMES, max_size=20))
def test_a_line_of_the_spool_gives_back_the_rows(outcomes: list[Outcome]) -> None:
    rows = usage_rows(outcomes, "p", 0, 1.7e9)
    line = encode(rows)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    back = decode(line)
    assert back == rows
    assert {type(value) for one in back for value in one} <= {str, int, float, type(None)}  # a database takes no enum


@given(st.floats(0, 1e5), st.floats(0, 1e5))
def test_times_are_right_to_the_hundredth_of_a_millisecond(first: float, more: float) -> None:
    made = row(started=50.0, first_token=50.0 + first, ended=50.0 + first + more)
    assert made.ttft_ms is not None
    assert math.isclose(made.ttft_ms, first * 1000, abs_tol=0.006)
    assert math.isclose(made.duration_ms, (first + more) * 1000, abs_tol=0.006)
    assert math.isclose(made.time, 50.0 + first + more, abs_tol=0.0006)


@pytest.mark.parametrize("line", [
    b"", b"[[1,2]]", b"[1]", b"null", b"7", b'[["a",1.0,"r"', b"\x00\x00\x00", b'{"a":1}',
    b"[" + orjson.dumps([0] * 21) + b"]", b"\xff\xfe",
])  # fmt: skip
def test_what_is_no_line_of_rows_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        decode(line)


def test_only_keys_of_the_database_are_marked_as_used_and_with_the_latest_moment() -> None:
    uses = [("key_1", 5.0), ("key_2", 9.0), ("key_1", 7.0), ("key_1", 6.0), ("ci", 8.0), ("jwt:key_3", 8.0)]
    outcomes = [finished(principal=caller(key), ended=ended) for key, ended in uses]
    assert last_use(usage_rows(outcomes, "p", 0, 100.0)) == {"key_1": 107.0, "key_2": 109.0}


def test_calls_for_one_more_outcome() -> None:
    """Exact where a timing is noisy. A change that raises the number has to be worth it."""

    def calls(outcomes: list[Outcome]) -> tuple[int, int]:
        """Calls of Python functions and of C functions."""
        counts = {"call": 0, "c_call": 0}

        def profile(_frame: FrameType, event: str, _arg: Any) -> None:
            counts[event] = counts.get(event, 0) + 1

        gc.disable()
        sys.setprofile(profile)
        try:
            encode(usage_rows(outcomes, "p", 0, 0.0))
        finally:
            sys.setprofile(None)
            gc.enable()
        return counts["call"], counts["c_call"]

    few, many = calls([finished()] * 10), calls([finished(error=RateLimited("x"))] * 110)
    assert many[0] == few[0]
    assert 0 < many[1] - few[1] <= 100 * CALLS_PER_OUTCOME
