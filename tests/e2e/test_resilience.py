"""What clients and operators see of engines that fail, die, load, flap and come back: real sockets, no timed claims."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.doubles.dialects import DIALECTS
from tests.doubles.engine import Engine, Exchange
from tests.e2e.harness import PATIENCE, ROOT, Gateway, Lab, chat, digest, eventually, free_port, replica, together
from tests.e2e.wire import Answer, request

Start = Callable[..., Gateway]


def fails(status: int, **more: Any) -> Callable[[Exchange], None]:
    return lambda x: x.fail("out of order", status, **more)


def entry(lab: Lab, engine: Engine) -> dict[str, Any]:
    return next(found for found in lab.gateway.replicas() if found["address"] == f"127.0.0.1:{engine.port}")


def until(lab: Lab, engine: Engine, **wanted: Any) -> dict[str, Any]:
    """What is known of the engine's replica once it is as wanted."""

    def as_wanted() -> dict[str, Any]:
        found = entry(lab, engine)
        return found if found.items() >= wanted.items() else {}

    assert eventually(as_wanted), (wanted, entry(lab, engine))
    return entry(lab, engine)


# --- an engine that is killed
class Child:
    """An engine in a process of its own, which can be killed and started again on the same port."""

    def __init__(self) -> None:
        self.port = free_port()
        self.start()

    def start(self) -> None:
        script = str(ROOT / "tests" / "load" / "kill.py")
        self.process = subprocess.Popen([sys.executable, script, "--engine", str(self.port)], cwd=ROOT)
        assert eventually(self.asked), "the engine did not start"

    def asked(self) -> bool:
        try:
            return self.requests() >= 0
        except httpx.TransportError:
            return False

    def requests(self) -> int:
        """How many it was sent since it was started."""
        url = f"http://127.0.0.1:{self.port}/health"
        return int(httpx.get(url, timeout=PATIENCE, trust_env=False).json()["requests"])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def children() -> Iterator[list[Child]]:
    made = [Child() for _ in range(3)]
    yield made
    for child in made:
        child.kill()


class Load:
    """Clients that ask again and again until told to stop, streams and whole answers in turn."""

    def __init__(self, lab: Lab, clients: int) -> None:
        self._lab, self._over = lab, threading.Event()
        self.answers: list[Answer] = []
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        while not self._over.is_set() and len(self.answers) < 5000:
            number += 1
            self.answers.append(self._lab.stream() if number % 2 else self._lab.chat())

    def goes_on(self, answers: int = 40) -> None:
        wanted = len(self.answers) + answers
        assert eventually(lambda: len(self.answers) >= wanted)

    def stop(self) -> list[Answer]:
        self._over.set()
        for thread in self._threads:
            thread.join(60)
        return self.answers


def is_stream(answer: Answer) -> bool:
    return (answer.header("content-type") or "").startswith("text/event-stream")


def test_an_engine_killed_under_load_costs_no_request_its_answer_and_comes_back_by_itself(
    lab: Lab, children: list[Child]
) -> None:
    lab.serve({"m": [replica(f"http://127.0.0.1:{child.port}") for child in children]}, server={"expose_route": True})
    victim = children[0]
    address = f"127.0.0.1:{victim.port}"

    def seen() -> dict[str, Any]:
        return next(found for found in lab.gateway.replicas() if found["address"] == address)

    load = Load(lab, 24)
    try:
        load.goes_on(60)
        assert eventually(lambda: seen()["inflight"] >= 2)
        victim.kill()
        load.goes_on()
        assert eventually(lambda: not seen()["routable"])
        victim.start()
        assert eventually(lambda: seen()["routable"] and seen()["slow_start_s"] > 0)
        assert eventually(lambda: victim.requests() >= 10)
    finally:
        answers = load.stop()
    assert all(answer.status == 200 for answer in answers)
    for answer in filter(is_stream, answers):
        if not answer.ended_well():  # it was on the engine, and had begun
            assert answer.complete and answer.text()
            assert len(answer.stream_errors()) == 1 and answer.events()[-1] != "[DONE]"
            assert answer.header("x-sekisho-replica") == seen()["id"]
    cut = sum(not answer.ended_well() for answer in answers if is_stream(answer))
    assert cut + sum(answer.header("x-sekisho-attempts") != "1" for answer in answers) >= 2, "nobody was on the engine"
    assert lab.at_rest()


def test_requests_that_wait_on_the_engine_that_dies_are_all_answered_by_others(lab: Lab) -> None:
    """Thirty at once, none of which has seen a byte: more than the breaker needs and fewer than the budget allows."""
    die, release = threading.Event(), threading.Event()
    doomed = lab.engine(script=lambda x: (x.wait(die), x.reset())[1])
    others = [lab.engine(script=lambda x: (x.wait(release), x.stream())[1]) for _ in range(2)]
    lab.serve({"m": [replica(engine) for engine in (doomed, *others)]})

    def play() -> None:
        eventually(lambda: sum(engine.running for engine in (doomed, *others)) == 30)
        die.set()
        eventually(lambda: sum(engine.running for engine in others) == 30)
        release.set()

    watcher = threading.Thread(target=play)
    watcher.start()
    answers = together([lab.stream] * 30)
    watcher.join()
    assert all(answer.ended_well() and answer.text() == "Hello, world" for answer in answers)
    assert Counter(answer.header("x-sekisho-attempts") for answer in answers) == {"1": 20, "2": 10}
    # Those that failed with it say nothing new: one short pause.
    assert 0 < entry(lab, doomed)["paused_s"] <= 5


# --- engines that fail
def test_of_a_hundred_callers_none_notices_an_engine_that_always_fails_at_once(lab: Lab) -> None:
    bad, good = lab.engine(script=fails(503)), lab.engine()
    lab.serve({"m": {"policy": "round_robin", "replicas": [replica(bad), replica(good)]}})
    assert {lab.chat().status for _ in range(100)} == {200}
    assert 0 < len(bad.requests) <= 5
    state = entry(lab, bad)
    assert not state["routable"] and state["breaker"] == "open" and state["health"] == "up"  # alive, and not able
    assert state["reason"].startswith("set aside after failures")


def test_an_engine_that_fails_every_second_time_is_set_aside_too(lab: Lab) -> None:
    def half(x: Exchange) -> None:
        fails(500)(x) if len(x.engine.requests) % 2 else x.reply(x.dialect.completion())

    bad, good = lab.engine(script=half), lab.engine()
    lab.serve({"m": {"policy": "round_robin", "replicas": [replica(bad), replica(good)]}})
    assert {lab.chat().status for _ in range(60)} == {200} and 2 < len(bad.requests) <= 20
    assert entry(lab, bad)["breaker"] == "open"


def test_an_engine_that_recovers_is_found_by_one_request(lab: Lab) -> None:
    bad, good = lab.engine(script=fails(500)), lab.engine()
    lab.serve({"m": [replica(bad, weight=100), replica(good)]})
    assert eventually(lambda: lab.chat().status == 200 and entry(lab, bad)["breaker"] == "open")
    until(lab, bad, breaker="trial")
    release, before = threading.Event(), len(bad.requests)
    bad.script = lambda x: (x.wait(release), x.reply(x.dialect.completion()))[1]
    with lab.gateway.wire() as wire:
        wire.send(request("POST", "/v1/chat/completions", chat(), key=lab.key))
        assert eventually(lambda: bad.running == 1)
        assert entry(lab, bad)["reason"] == "set aside after failures, one request is trying it"
        assert [lab.chat().status for _ in range(5)] == [200] * 5 and len(bad.requests) == before + 1
        release.set()
        assert wire.answer().rest().status == 200
    state = until(lab, bad, breaker="closed", routable=True)
    assert state["slow_start_s"] > 0


def test_a_trial_that_streams_lets_others_in_with_its_first_token(lab: Lab) -> None:
    engine = lab.one(script=fails(500), model={"queue": {"max_waiting": 0}})
    assert [lab.chat().status for _ in range(3)] == [502] * 3
    until(lab, engine, breaker="trial")
    more = threading.Event()

    def script(x: Exchange) -> None:
        x.begin()
        x.role()
        x.delta("a")
        x.wait(more)
        x.delta({}, "stop")
        x.done()

    engine.once(script)
    engine.script = lambda x: x.reply(x.dialect.completion())
    with lab.gateway.wire() as wire:
        answer = wire.ask("POST", "/v1/chat/completions", chat(stream=True), key=lab.key).until(2)
        assert entry(lab, engine)["breaker"] == "closed" and lab.chat().status == 200
        more.set()
        assert answer.rest().ended_well()
    assert lab.at_rest() and entry(lab, engine)["breaker"] == "closed"


@pytest.mark.parametrize("status", [400, 422])
def test_requests_that_are_wrong_never_set_an_engine_aside(lab: Lab, status: int) -> None:
    engine = lab.one(script=fails(status))
    assert {lab.chat().status for _ in range(20)} == {status}
    assert (entry(lab, engine)["failures_in_a_row"], entry(lab, engine)["breaker"]) == (0, "closed")
    engine.script = lambda x: x.reply(x.dialect.completion())
    assert lab.chat().status == 200


def test_an_engine_that_asks_for_a_pause_gets_it_and_is_not_held_to_have_failed(lab: Lab) -> None:
    busy, other = lab.engine(script=fails(429, retry_after="30")), lab.engine()
    lab.serve({"m": [replica(busy, weight=100), replica(other)]})
    assert eventually(lambda: lab.chat().status == 200 and busy.requests)
    assert {lab.chat().status for _ in range(20)} == {200} and len(busy.requests) == 1
    state = entry(lab, busy)
    assert 25 < state["paused_s"] <= 30 and state["reason"].startswith("asked to be left alone for ")
    assert (state["routable"], state["breaker"], state["failures_in_a_row"]) == (False, "closed", 0)


def test_after_the_asked_pause_the_engine_takes_requests_at_once(lab: Lab) -> None:
    engine = lab.one(script=fails(429, retry_after="1"), model={"queue": {"max_waiting": 0}})
    assert lab.chat().status == 429
    engine.script = lambda x: x.reply(x.dialect.completion())
    until(lab, engine, routable=True, paused_s=0.0, slow_start_s=0.0)
    assert lab.chat().status == 200


def test_a_storm_of_failures_is_not_made_larger_by_retries(start: Start) -> None:
    """Forty models whose engines all fail: their breakers open one by one, and only the budget holds all together."""
    with Engine(script=fails(500)) as engine:
        own = [replica(engine) | {"url": f"http://{host}:{engine.port}"} for host in ("127.0.0.1", "localhost")]
        models = [{"name": f"m{number}", "replicas": own, "queue": {"max_waiting": 0}} for number in range(40)]
        key = "sk-" + "s" * 40
        tenant = {"name": "t", "models": ["*"], "keys": [{"name": "k", "sha256": digest(key)}]}
        gateway = start({"models": models, "tenants": [tenant]})
        statuses = Counter[int]()
        for number in range(80):
            with gateway.wire() as wire:
                answer = wire.ask("POST", "/v1/chat/completions", chat(f"m{number % 40}"), key=key).rest()
                statuses[answer.status] += 1
        attempts = len(engine.requests)
    assert set(statuses) <= {502, 503}
    assert 80 < attempts <= 80 * 1.2 + 10 + 1


# --- what an answer tells
def test_every_answer_that_reached_an_engine_says_how_many_attempts_it_took(lab: Lab) -> None:
    good, bad, worse = lab.engine(), lab.engine(script=fails(500)), lab.engine(script=fails(500))
    lab.serve({
        "m": [replica(good)],
        "second": {"replicas": [replica(bad, weight=100), replica(good, weight=1)]},
        "never": [replica(bad), replica(worse)],
        "wrong": [replica(lab.engine(script=fails(400)))],
    })  # fmt: skip
    assert [lab.chat(name).header("x-sekisho-attempts") for name in ("m", "second", "never", "wrong")] == [
        "1", "2", "2", "1",
    ]  # fmt: skip
    assert lab.chat("nobody").header("x-sekisho-attempts") is None
    assert lab.stream().header("x-sekisho-attempts") == "1"


def test_which_replica_answered_is_told_only_where_the_operator_wants_it(lab: Lab) -> None:
    engine = lab.one()
    assert lab.chat().header("x-sekisho-replica") is None and lab.chat().header("x-sekisho-policy") is None
    lab.serve({"m": [replica(engine)]}, server={"expose_route": True})
    for answer in (lab.chat(), lab.stream()):
        assert answer.header("x-sekisho-replica") == entry(lab, engine)["id"]
        assert answer.header("x-sekisho-policy") == "least_load"


def test_retries_are_counted_in_the_metrics(lab: Lab) -> None:
    bad, good = lab.engine(script=fails(500)), lab.engine()
    lab.serve({"m": [replica(bad, weight=100), replica(good)]})
    before = lab.gateway.metric("sekisho_retries_total")
    assert eventually(lambda: lab.chat().header("x-sekisho-attempts") == "2")
    assert lab.gateway.metric("sekisho_retries_total") == before + 1


def test_operators_see_what_each_choice_is_made_from(lab: Lab) -> None:
    engine = lab.engine()
    page = ("num_requests_running 0", "prefix_cache_queries_total 200", "prefix_cache_hits_total 50")
    engine.metrics = "".join(f"vllm:{line}\n" for line in page)
    silent = lab.engine()
    lab.serve({"m": [replica(engine), replica(silent)]})
    until(lab, engine, health="up")
    until(lab, silent, health="up")
    assert eventually(lambda: lab.stream().ended_well() and entry(lab, engine)["tpot_s"] is not None)
    found = entry(lab, engine)
    assert (found["reason"], found["breaker"], found["failing"]) == ("takes requests", "closed", 0)
    assert found["expected_wait_s"] > 0 and found["service_s"] > 0 and found["ttft_s"] > 0
    assert found["engine"]["prefix_hits"] == 0.25 and found["engine"]["age_s"] >= 0
    # What an engine does not publish is unknown, and not zero.
    unknown = {"running": None, "waiting": None, "kv_used": None, "prefix_hits": None, "age_s": None}
    assert entry(lab, silent)["engine"] == unknown
    assert lab.gateway.get("/admin/v1/replicas").json()["retries_left"] >= 10


def test_decisions_are_in_the_log_with_their_reasons_where_it_is_that_detailed(start: Start) -> None:
    with Engine(script=fails(500)) as bad, Engine() as good:
        key = "sk-" + "d" * 40
        tenant = {"name": "t", "models": ["*"], "keys": [{"name": "k", "sha256": digest(key)}]}
        replicas = [replica(bad, weight=100), replica(good)]
        config = {"models": [{"name": "m", "replicas": replicas}], "tenants": [tenant]}
        gateway = start(config | {"logging": {"level": "debug"}})
        with gateway.wire() as wire:
            assert wire.ask("POST", "/v1/chat/completions", chat(), key=key).rest().status == 200
        quiet = start(config)
        with quiet.wire() as wire:
            assert wire.ask("POST", "/v1/chat/completions", chat(), key=key).rest().status == 200
    decisions = [line for line in gateway.log().splitlines() if "sekisho.routing" in line]
    assert len(decisions) == 2 and all("m by least_load, of: " in line for line in decisions)
    assert "tried already" in decisions[1] and "tried already" not in decisions[0]
    assert gateway.log().count("attempt 1 goes to") == 1 and gateway.log().count("attempt 2 goes to") == 1
    assert "sekisho.routing" not in quiet.log() and "goes to" not in quiet.log()


# --- probes
def test_news_of_replicas_and_reloads_do_not_start_the_round_again(lab: Lab) -> None:
    engines = [lab.engine() for _ in range(3)]
    models = {"m": {"policy": "round_robin", "replicas": [replica(engine) for engine in engines]}}
    for _ in range(12):
        lab.serve(models)
        assert lab.chat().status == 200
    assert [len(engine.requests) for engine in engines] == [4, 4, 4]


def test_an_engine_that_loads_gets_nothing_until_it_is_ready_and_is_found_without_help(lab: Lab) -> None:
    def loading(x: Exchange) -> None:
        x.fail("Loading model", 503)

    engine = lab.engine("llama_server", script=loading)
    engine.probe = loading
    lab.serve({"m": {"replicas": [replica(engine)], "queue": {"max_waiting": 0}}})
    until(lab, engine, health="loading", routable=False)
    answer = lab.chat()
    assert answer.status == 503 and int(answer.header("retry-after") or 0) >= 1 and not engine.requests
    engine.probe, engine.script = None, lambda x: x.reply(x.dialect.completion())
    until(lab, engine, health="up", routable=True)
    assert lab.chat().status == 200


def test_an_engine_too_busy_to_answer_probes_is_not_down(lab: Lab) -> None:
    """A long prefill holds up the health path as well; what it streams meanwhile is not cut."""
    release = threading.Event()

    def script(x: Exchange) -> None:
        x.begin()
        x.delta("a")
        x.wait(release)
        x.delta("b")
        x.delta({}, "stop")
        x.done()

    engine = lab.one(script=script)
    until(lab, engine, health="up")
    engine.probe = lambda x: x.reset()
    with lab.gateway.wire() as wire:
        answer = wire.ask("POST", "/v1/chat/completions", chat(stream=True), key=lab.key).until(1)
        failed = len(engine.probes)
        assert eventually(lambda: len(engine.probes) >= failed + 4)
        assert entry(lab, engine)["health"] == "up" and entry(lab, engine)["routable"]
        release.set()
        assert answer.rest().ended_well() and answer.text() == "ab"
    until(lab, engine, health="down")  # and with nothing running it is
    engine.probe = None
    until(lab, engine, health="up", routable=True)


def test_probes_that_hang_hold_up_nobody_elses(lab: Lab) -> None:
    hang = threading.Event()
    hanging = [lab.engine() for _ in range(6)]
    for engine in hanging:
        engine.probe = lambda x: x.wait(hang)
    fresh = lab.engine()
    lab.serve({"m": [replica(engine) for engine in (*hanging, fresh)]})
    assert eventually(lambda: all(engine.probes for engine in hanging))
    until(lab, fresh, health="up")
    assert all(entry(lab, engine)["health"] == "unknown" for engine in hanging)  # still waiting for their answers
    hang.set()


def test_metrics_that_hang_do_not_make_an_engine_down(lab: Lab) -> None:
    hang = threading.Event()

    def probe(x: Exchange) -> None:
        if x.request.target == "/metrics":
            x.wait(hang)
        x.reply(b"") if x.request.target == "/health" else x.reply(x.dialect.models(x.engine.models))

    engine = lab.engine()
    engine.healthy = False
    lab.serve({"m": [replica(engine)]})
    until(lab, engine, health="down")
    engine.probe = probe
    until(lab, engine, health="up", routable=True)
    hang.set()


SAFE = {"/health", "/v1/models", "/v1/model", "/api/v1/models", "/api/version", "/api/tags", "/metrics",
        "/v1/loads?include=core", "/prometheus/metrics"}  # fmt: skip


def test_probes_ask_only_what_neither_loads_a_model_nor_generates(lab: Lab) -> None:
    engines = [lab.engine(dialect) for dialect in DIALECTS]
    lab.serve({"m": [replica(engine) for engine in engines]})
    for engine in engines:
        until(lab, engine, health="up")
    asked = [len(engine.probes) for engine in engines]
    assert eventually(lambda: all(len(engine.probes) > n for engine, n in zip(engines, asked, strict=True)))
    for engine in engines:
        assert {probe.target for probe in engine.probes} <= SAFE and not engine.requests
        assert all(probe.method == "GET" and not probe.body for probe in engine.probes)
