"""A second replica for whoever waits long for a first byte: one answer, one bill, and nothing left behind."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.doubles.dialects import USAGE
from tests.doubles.engine import Engine, Exchange
from tests.e2e.harness import Gateway, Lab, base_config, chat, eventually, replica, together
from tests.e2e.wire import request

Script = Callable[[Exchange], None]
ROUTING = {"hedge_after": "150ms", "retry_budget": 1}


@pytest.fixture(scope="module")
def shared_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway of this file's own: these tests use up the budget for retries that others need."""
    gateway = Gateway(tmp_path_factory.mktemp("hedging"), base_config({}, []))
    yield gateway
    gateway.stop()
    assert "Traceback" not in gateway.log(), gateway.log()[-5000:]


def pair(lab: Lab, first: Script, second: Script | None = None, **more: Any) -> tuple[Engine, Engine]:
    """Two replicas of which a request takes the first, unless it is given a second one."""
    one, other = lab.engine(script=first), lab.engine(script=second)
    routing = ROUTING | more.pop("routing", {})
    replicas = [replica(one, weight=1000, **more), replica(other, weight=0.001, **more)]
    lab.serve({"m": {"policy": "least_load", "replicas": replicas}}, routing=routing)
    return one, other


def answers(x: Exchange, text: str) -> None:
    if x.request.json().get("stream"):
        x.stream([text])
    else:
        x.reply(x.dialect.completion(text))


def after(seconds: float, text: str) -> Script:
    def script(x: Exchange) -> None:
        x.pause(seconds)
        answers(x, text)

    return script


def never(x: Exchange) -> None:
    x.wait()


def text_of(answer: Any, stream: bool) -> str:
    if not stream:
        return str(answer.json()["choices"][0]["message"]["content"])
    assert answer.ended_well()
    return str(answer.text())


def settled(lab: Lab, *engines: Engine) -> bool:
    """Whether neither the gateway nor an engine holds anything any more, and nobody is blamed."""
    quiet = eventually(lambda: not any(engine.running for engine in engines)) and lab.at_rest()
    return quiet and all(entry["inflight"] == entry["failures_in_a_row"] == 0 for entry in lab.gateway.replicas())


both = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])


@both
def test_the_second_answers_for_a_first_that_is_slow_and_the_first_is_let_go(lab: Lab, stream: bool) -> None:
    slow, quick = pair(lab, never, lambda x: answers(x, "quick"))
    answer = lab.call(chat(stream=stream))
    assert answer.status == 200 and text_of(answer, stream) == "quick"
    assert answer.header("x-sekisho-attempts") == "2"
    assert slow.last().gone.wait(10) and settled(lab, slow, quick) and lab.booked(11, 5)
    line = lab.gateway.access_line(answer.header("x-request-id") or "")
    assert line["attempts"] == 2 and line["status"] == 200


def test_the_one_that_loses_is_told_to_stop_while_the_winner_still_writes(lab: Lab) -> None:
    def long(x: Exchange) -> None:
        x.begin()
        x.delta("a")
        x.wait(slow.last().gone)
        x.stream_body(["b"])

    slow, quick = pair(lab, never, long)
    answer = lab.stream()
    assert answer.ended_well() and answer.text() == "ab" and settled(lab, slow, quick)


@both
def test_the_first_may_still_win(lab: Lab, stream: bool) -> None:
    first, second = pair(lab, after(0.5, "first"), never)
    answer = lab.call(chat(stream=stream))
    assert text_of(answer, stream) == "first" and answer.header("x-sekisho-attempts") == "2"
    assert second.last().gone.wait(10) and settled(lab, first, second) and lab.booked(11, 5)


@both
def test_whoever_is_quick_enough_is_asked_alone(lab: Lab, stream: bool) -> None:
    first, second = pair(lab, lambda x: answers(x, "first"), routing={"hedge_after": "5s"})
    for _ in range(5):
        answer = lab.call(chat(stream=stream))
        assert text_of(answer, stream) == "first" and answer.header("x-sekisho-attempts") == "1"
    assert len(first.requests) == 5 and not second.requests


def test_a_stream_that_has_begun_is_left_in_peace_however_long_it_takes(lab: Lab) -> None:
    def long(x: Exchange) -> None:
        x.begin()
        for number in range(8):
            x.delta(f"{number} ")
            x.pause(0.1)
        x.stream_body(["end"])

    _, second = pair(lab, long)
    answer = lab.stream()
    assert answer.ended_well() and answer.text() == "0 1 2 3 4 5 6 7 end"
    assert not second.requests and answer.header("x-sekisho-attempts") == "1"


def test_it_is_off_by_default(lab: Lab) -> None:
    _, other = pair(lab, after(0.6, "slow"), routing={"hedge_after": None})
    assert text_of(lab.stream(), True) == "slow" and not other.requests


def test_a_comment_of_an_engine_is_no_first_byte(lab: Lab) -> None:
    def reads(x: Exchange) -> None:
        x.begin()
        for _ in range(100):
            x.part(b": still reading\n\n")
            x.pause(0.05)

    slow, quick = pair(lab, reads, lambda x: answers(x, "quick"))
    answer = lab.stream()
    assert text_of(answer, True) == "quick" and slow.last().gone.wait(10) and settled(lab, slow, quick)


def test_the_head_of_a_stream_tells_who_won(lab: Lab) -> None:
    """The slow engine sends its headers at once, as many do: they are not the client's yet."""

    def reads(x: Exchange) -> None:
        x.begin()
        x.wait()

    slow, quick = lab.engine(script=reads), lab.engine()
    replicas = [replica(slow, weight=1000), replica(quick, weight=0.001)]
    lab.serve({"m": {"replicas": replicas}}, routing=ROUTING, server={"expose_route": True})
    answer = lab.stream()
    _, second = lab.gateway.replicas()
    assert answer.header("x-sekisho-replica") == second["id"] and answer.header("x-sekisho-attempts") == "2"


def test_without_a_second_replica_the_head_goes_out_and_the_first_goes_on(lab: Lab) -> None:
    go = threading.Event()

    def reads(x: Exchange) -> None:
        x.begin()
        x.wait(go)
        x.stream_body(["first"])

    lab.one(script=reads)
    lab.serve({"m": [replica(lab._engines[0])]}, routing=ROUTING)
    with lab.gateway.wire() as wire:
        answer = wire.ask("POST", "/v1/chat/completions", chat(stream=True), key=lab.key)  # returns with the head
        go.set()
        assert answer.rest().ended_well() and answer.text() == "first"
    assert answer.header("x-sekisho-attempts") == "1"


def test_a_second_replica_that_is_full_is_not_asked(lab: Lab) -> None:
    go = threading.Event()

    def waits(x: Exchange) -> None:
        x.wait(go)
        answers(x, "done")

    first, second = pair(lab, waits, waits, max_inflight=1)

    def let_go() -> None:
        assert eventually(lambda: first.running == second.running == 1)
        threading.Event().wait(0.5)  # both would be hedged by now
        go.set()

    together([lambda: lab.stream(), lambda: lab.stream(), lambda: let_go()])  # type: ignore[list-item, return-value]
    assert len(first.requests) == len(second.requests) == 1 and settled(lab, first, second)


def test_second_requests_are_retries_and_limited_like_them(lab: Lab) -> None:
    first, second = pair(lab, after(0.8, "first"), after(0.8, "second"), routing={"retry_budget": 0})
    found = together([lambda: lab.stream()] * 30)
    assert all(answer.ended_well() for answer in found)
    assert len(first.requests) == 30 and len(second.requests) <= 20  # a few are always allowed
    assert [answer.header("x-sekisho-attempts") for answer in found].count("2") == len(second.requests)


def test_sound_is_never_asked_for_twice(lab: Lab) -> None:
    def speaks(x: Exchange) -> None:
        x.pause(0.6)
        x.reply(b"RIFFdata", content_type="audio/wav")

    one, other = lab.engine(script=speaks), lab.engine()
    replicas = [replica(one, weight=1000, backend="openai_compatible"), replica(other, backend="openai_compatible")]
    lab.serve({"m": {"replicas": replicas}}, routing=ROUTING)
    answer = lab.call({"model": "m", "input": "hello", "voice": "a"}, "/v1/audio/speech")
    assert answer.body == b"RIFFdata" and not other.requests


def test_a_request_that_one_replica_alone_can_honour_has_no_second(lab: Lab) -> None:
    able, other = lab.engine(script=after(0.6, "able")), lab.engine()
    replicas = [replica(able), replica(other, backend="mlx_lm", weight=10)]
    lab.serve({"m": {"replicas": replicas}}, routing=ROUTING)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    assert text_of(lab.chat(response_format=form), False) == "able" and not other.requests


# --- failures
def fails(seconds: float, status: int, **more: Any) -> Script:
    def script(x: Exchange) -> None:
        x.pause(seconds)
        x.fail("a bug", status, **more)

    return script


@both
@pytest.mark.parametrize("late", [0.3, 0.9], ids=["during", "after"])
def test_one_that_fails_leaves_the_race_to_the_other(lab: Lab, stream: bool, late: float) -> None:
    first, second = pair(lab, fails(0.3, 500), after(late - 0.15, "second"))
    answer = lab.call(chat(stream=stream))
    assert text_of(answer, stream) == "second" and answer.header("x-sekisho-attempts") == "2"
    assert lab.at_rest() and (len(first.requests), len(second.requests)) == (1, 1) and lab.booked(11, 5)


@both
def test_a_second_that_fails_at_once_does_not_disturb_the_first(lab: Lab, stream: bool) -> None:
    first, second = pair(lab, after(0.6, "first"), fails(0, 500))
    assert text_of(lab.call(chat(stream=stream)), stream) == "first"
    assert lab.gateway.metric("sekisho_upstream_failures_total", replica=lab.gateway.replicas()[1]["id"]) == 1
    assert (len(first.requests), len(second.requests)) == (1, 1)


@both
@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [((0.3, 500), (0.3, 429), 429), ((0.3, 400), (0.4, 500), 400), ((0.4, 500), (0, 400), 400)],
)
def test_when_both_fail_the_more_useful_error_is_told(
    lab: Lab, one: Any, other: Any, wanted: int, stream: bool
) -> None:
    more = {"retry_after": "7"}
    first, second = pair(lab, fails(*one, **(more if one[1] == 429 else {})),
                         fails(*other, **(more if other[1] == 429 else {})))  # fmt: skip
    answer = lab.call(chat(stream=stream))
    assert answer.status == wanted and answer.header("x-sekisho-attempts") == "2"
    assert wanted != 429 or answer.header("retry-after") == "7"
    assert lab.at_rest() and (len(first.requests), len(second.requests)) == (1, 1)


def test_after_both_have_failed_a_third_is_tried(lab: Lab) -> None:
    engines = [lab.engine(script=fails(0.3, 500)), lab.engine(script=fails(0.3, 500)), lab.engine()]
    replicas = [replica(engine, weight=weight) for engine, weight in zip(engines, (1000, 1, 0.001), strict=True)]
    lab.serve({"m": {"replicas": replicas}}, routing=ROUTING)
    answer = lab.stream()
    assert answer.ended_well() and answer.header("x-sekisho-attempts") == "3"
    assert [len(engine.requests) for engine in engines] == [1, 1, 1]


def test_a_winner_that_dies_ends_the_stream_and_nobody_begins_anew(lab: Lab) -> None:
    def dies(x: Exchange) -> None:
        x.begin()
        x.delta("The answer")
        x.pause(0.2)
        x.reset()

    slow, quick = pair(lab, after(0.6, "slow"), dies)
    answer = lab.stream()
    assert answer.text() == "The answer" and len(answer.stream_errors()) == 1 and answer.complete
    assert slow.last().gone.wait(10) and len(quick.requests) == 1 and lab.at_rest()


# --- the client
@both
def test_a_client_that_leaves_takes_both_with_it_and_pays_for_one(lab: Lab, stream: bool) -> None:
    first, second = pair(lab, never, never)
    with lab.gateway.wire() as wire:
        wire.send(request("POST", "/v1/chat/completions", chat(stream=stream), key=lab.key))
        assert eventually(lambda: second.running)
        wire.reset()
    assert first.last().gone.wait(10) and second.last().gone.wait(10) and settled(lab, first, second)
    assert eventually(lambda: lab.tokens("prompt") > 0) and lab.tokens("prompt") < 11  # one estimate, not two
    assert lab.tokens("completion") == 0


def test_a_slow_reader_slows_the_winner_down(lab: Lab) -> None:
    taken: list[int] = []

    def floods(x: Exchange) -> None:
        x.begin()
        x.delta("a")
        block = b": " + b"x" * 65_000 + b"\n\n"
        taken.append(x.push(b"%x\r\n%b\r\n" % (len(block), block), 256 << 20))
        x.close()

    slow, quick = pair(lab, never, floods)
    with lab.gateway.wire(receive_buffer=4096) as wire:
        wire.ask("POST", "/v1/chat/completions", chat(stream=True), key=lab.key).until(1)
        assert quick.last().ended.wait(30) and 0 < taken[0] < 64 << 20
    assert slow.last().gone.wait(10) and lab.at_rest()


@contextlib.contextmanager
def asleep(lab: Lab) -> Iterator[None]:
    """The gateway finds all that happens meanwhile at the same moment, when it wakes up."""
    process = lab.gateway.process
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


@both
def test_of_two_answers_in_the_same_read_of_the_sockets_the_client_gets_one(lab: Lab, stream: bool) -> None:
    go = threading.Event()

    def waits(x: Exchange) -> None:
        if stream:
            x.begin()  # both answers are being relayed when their first events come
        x.wait(go)
        x.stream_body(["done"], usage=USAGE) if stream else answers(x, "done")

    first, second = pair(lab, waits, waits)
    for number in range(5):
        with lab.gateway.wire() as wire:
            wire.send(request("POST", "/v1/chat/completions", chat(stream=stream), key=lab.key))
            assert eventually(lambda: first.running == second.running == 1)
            threading.Event().wait(0.1)  # the heads have been read
            with asleep(lab):
                go.set()
                assert first.last().ended.wait(10) and second.last().ended.wait(10)
            answer = wire.answer().rest()
            assert text_of(answer, stream) == "done"
            again = wire.ask("GET", "/health").rest()  # nothing of the other one is left on the connection
            assert again.status == 200 and again.json() == {"status": "ok"}
        go.clear()
        assert len(first.requests) == len(second.requests) == number + 1
    assert settled(lab, first, second) and lab.booked(5 * 11, 5 * 5)


@both
def test_a_first_byte_in_the_moment_when_the_second_is_asked_leaves_nothing_behind(lab: Lab, stream: bool) -> None:
    go = threading.Event()

    def waits(x: Exchange) -> None:
        x.wait(go)
        answers(x, "first")

    first, second = pair(lab, waits, routing={"hedge_after": "1s"})
    with lab.gateway.wire() as wire:
        wire.send(request("POST", "/v1/chat/completions", chat(stream=stream), key=lab.key))
        assert eventually(lambda: first.running)
        with asleep(lab):
            go.set()
            assert first.last().ended.wait(10)
            threading.Event().wait(1.2)  # past the moment for a second
        assert text_of(wire.answer().rest(), stream) == "first"
    assert settled(lab, first, second) and lab.booked(11, 5)


class Tie:
    """Two engines that answer at the same moment: each waits for the other, or for the client to be served."""

    def __init__(self, lab: Lab, seed: int) -> None:
        self.chance = random.Random(seed)
        self.meeting = threading.Barrier(2)
        options = {"routing": {"hedge_after": "20ms"}}
        self.first, self.second = pair(lab, self._script("first"), self._script("second"), **options)

    def _script(self, text: str) -> Script:
        def script(x: Exchange) -> None:
            with contextlib.suppress(threading.BrokenBarrierError):
                self.meeting.wait(10)
            x.pause(self.chance.choice((0, 0, 0.0005, 0.002)))
            answers(x, text)

        return script


@pytest.mark.parametrize("seed", range(3))
def test_of_two_that_answer_at_once_the_client_gets_one_clean_answer_and_one_bill(lab: Lab, seed: int) -> None:
    tie = Tie(lab, seed)
    for number in range(40):
        stream = number % 2 == 0
        answer = lab.call(chat(stream=stream))
        assert text_of(answer, stream) in ("first", "second") and answer.header("x-sekisho-attempts") == "2"
        if stream:
            assert answer.finishes() == ["stop"] and answer.events().count("[DONE]") == 1
    assert settled(lab, tie.first, tie.second) and len(tie.first.requests) == len(tie.second.requests) == 40
    assert lab.booked(40 * 11, 40 * 5) and lab.answered(200) == 40


@pytest.mark.parametrize("seed", range(2))
def test_clients_that_leave_at_that_very_moment_leave_nothing_behind(lab: Lab, seed: int) -> None:
    tie = Tie(lab, seed)
    for number in range(30):
        with lab.gateway.wire() as wire:
            wire.send(request("POST", "/v1/chat/completions", chat(stream=number % 2 == 0), key=lab.key))
            assert eventually(lambda: len(tie.second.requests) > number)  # noqa: B023
            wire.reset()
    assert settled(lab, tie.first, tie.second)
    assert eventually(lambda: lab.answered(499) + lab.answered(200) == 30)
    assert lab.tokens("prompt") <= 30 * 11 and lab.tokens("completion") <= 30 * 5
    tie.first.script = tie.second.script = lambda x: answers(x, "again")
    assert text_of(lab.stream(), True) == "again"
