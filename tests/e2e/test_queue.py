"""Waiting for a place: order, bounds, leaving, handing over, and what the client and the operator see of it."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest

import backends
from backends.base import Operation
from gateway import state
from gateway.config import load
from gateway.edge.cycle import HotCycle
from gateway.logs import AccessLog
from gateway.metrics import Metrics
from gateway.pipeline import serve
from gateway.snapshot import compile_config
from gateway.upstream import Upstream
from tests.doubles.engine import Engine, Exchange
from tests.e2e.harness import ADMIN, Gateway, Lab, base_config, chat, digest, eventually, free_port, replica
from tests.e2e.wire import Answer, Wire, parse, request

LOADING = {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}


class Desk:
    """An engine that answers when it is told to, and clients that line up for it."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.gates = lab, list[threading.Event]()
        self.engine = lab.engine(script=self._answer)
        self._stack = ExitStack()
        self.sent = 0

    def _answer(self, x: Exchange) -> None:
        gate = threading.Event()
        self.gates.append(gate)
        x.wait(gate)
        self.reply(x)

    def reply(self, x: Exchange) -> None:
        if x.request.json().get("stream"):
            x.stream()
        else:
            x.reply(x.dialect.completion())

    def serve(self, queue: dict[str, Any] | None = None, most: int = 1, **more: Any) -> Desk:
        entry = {"queue": queue or {}, "replicas": [replica(self.engine, max_inflight=most)]}
        self.lab.serve({"m": entry | more.pop("model", {})} | more.pop("models", {}), **more)
        self.lab.gateway.wait_for_replica()
        return self

    def send(self, name: str, key: str | None = None, **more: Any) -> Wire:
        """A client's request, which the engine will know by its name. Nothing is read yet."""
        wire = self._stack.enter_context(self.lab.gateway.wire())
        body = chat(**more) | {"user": name}
        wire.send(request("POST", "/v1/chat/completions", body, key=key or self.lab.key))
        self.sent += 1
        return wire

    def runs(self, name: str, **more: Any) -> Wire:
        """The same, and it has reached the engine."""
        before = len(self.gates)
        wire = self.send(name, **more)
        assert eventually(lambda: len(self.gates) > before)
        return wire

    def waits(self, name: str, key: str | None = None, **more: Any) -> Wire:
        """The same, and it stands in the queue."""
        before = self.depth()
        wire = self.send(name, key, **more)
        assert eventually(lambda: self.depth() > before), (name, before)
        return wire

    def depth(self, model: str = "m") -> float:
        return self.lab.gateway.metric("sekisho_queue_depth", model=model)

    def finish(self, number: int) -> None:
        """Lets the engine answer its request of that number."""
        assert eventually(lambda: len(self.gates) > number)
        self.gates[number].set()

    def finish_all(self, count: int) -> None:
        for number in range(count):
            self.finish(number)

    def order(self) -> list[str]:
        return [entry.json()["user"] for entry in self.engine.requests]

    def close(self) -> None:
        for gate in self.gates:
            gate.set()
        self._stack.close()


@pytest.fixture
def desk(lab: Lab) -> Iterator[Desk]:
    made = Desk(lab)
    yield made
    made.close()


def rest(wire: Wire) -> Answer:
    return wire.answer().rest()


def tenant(name: str, **more: Any) -> tuple[dict[str, Any], str]:
    key = f"sk-{name}-" + "q" * 40
    return {"name": name, "keys": [{"name": "test", "sha256": digest(key)}]} | more, key


# --- order
def test_requests_beyond_the_bound_wait_and_are_served_in_order(desk: Desk) -> None:
    desk.serve()
    wires = [desk.runs("1"), *(desk.waits(name) for name in "234")]
    desk.finish_all(4)
    assert [rest(wire).status for wire in wires] == [200] * 4
    assert desk.order() == list("1234") and desk.engine.most_running == 1
    assert desk.depth() == 0 and desk.lab.at_rest()


def test_a_tenant_that_floods_does_not_keep_the_others_waiting(desk: Desk) -> None:
    other, key = tenant("quiet")
    desk.serve(tenants=[other])
    desk.runs("first")
    for number in range(8):
        desk.waits(f"flood-{number}")
    desk.waits("quiet", key)
    desk.finish_all(10)
    assert eventually(lambda: len(desk.order()) == 10)
    assert desk.order().index("quiet") <= 2


def test_weights_share_the_places_and_priorities_come_first(desk: Desk) -> None:
    heavy, heavy_key = tenant("heavy", weight=3)
    first, first_key = tenant("first", priority=5)
    desk.serve(tenants=[heavy, first])
    desk.runs("0")
    for _ in range(8):
        desk.waits("light", max_tokens=100)
    for _ in range(6):
        desk.waits("heavy", heavy_key, max_tokens=100)
    desk.waits("first", first_key)
    desk.waits("first", first_key)
    desk.finish_all(11)
    assert eventually(lambda: len(desk.order()) >= 11)
    assert desk.order()[1:3] == ["first", "first"]
    assert desk.order()[3:11].count("heavy") == 6


class Client:
    """What `serve` needs of a client's connection."""

    peer: str | None = "127.0.0.1"
    certificate: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.loop: Any = asyncio.get_running_loop()
        self.transport: Any = self
        self.sent = b""

    def write(self, data: bytes) -> None:
        self.sent += data

    def date_header(self) -> bytes:
        return b""

    def is_paused(self) -> bool:
        return False

    def finished(self, cycle: HotCycle) -> None: ...


def test_whoever_ends_hands_its_place_on_itself(lab: Lab, tmp_path: Path) -> None:
    """Without the housekeeping that looks for free places four times a second: answers, failures and leavers."""
    engine = lab.engine()
    engine.once(lambda x: x.fail("bug", 500), lambda x: x.wait())
    file = tmp_path / "gateway.yaml"
    config = base_config({"m": [replica(engine, max_inflight=1)]}, [], auth={"required": False})
    file.write_text(json.dumps(config))
    snapshot = compile_config(load(file, kinds=backends.kinds(), overrides={}), backends.load, tmp_path)

    async def asked(gateway: state.Gateway) -> list[bytes]:
        clients, tasks = [Client() for _ in range(6)], []
        for client in clients:
            cycle = HotCycle(client, Operation.CHAT, {}, True, True)
            cycle.body, cycle.more_body = [json.dumps(chat()).encode()], False
            tasks.append(asyncio.create_task(serve(gateway, cycle)))
        while len(engine.requests) < 2:  # noqa: ASYNC110 (the engine is a thread)
            await asyncio.sleep(0.01)
        assert gateway.waiting.depth == 4
        tasks[1].cancel()
        await asyncio.gather(*tasks)
        assert (gateway.waiting.depth, [one.inflight for one in gateway.fleet]) == (0, [0])
        return [client.sent[9:12] for client in clients]

    async def scene() -> list[bytes]:
        upstream, log = Upstream(1 << 20), AccessLog("json", io.BytesIO())
        gateway = state.Gateway(snapshot, Metrics("0"), log, upstream)
        gateway.fleet.adopt(snapshot.replicas())
        try:
            return await asyncio.wait_for(asked(gateway), 20)
        finally:
            upstream.close()
            await asyncio.sleep(0)
            log.close()

    assert asyncio.run(scene()) == [b"502", b"503", b"200", b"200", b"200", b"200"]


# --- bounds
def test_the_queue_is_bounded_and_a_refusal_says_when_to_come_back(desk: Desk) -> None:
    desk.serve({"max_waiting": 2})
    wires = [desk.runs("1"), desk.waits("2"), desk.waits("3")]
    refused = desk.lab.chat()
    assert (refused.status, refused.error()["code"]) == (503, "model_busy")
    assert int(refused.header("retry-after") or 0) >= 1
    desk.finish_all(3)
    assert [rest(wire).status for wire in wires] == [200] * 3 and "refused" not in desk.order()


def test_a_full_queue_is_shared_too(desk: Desk) -> None:
    """One tenant has filled it: another's request takes the place of its newest, which is told so."""
    other, key = tenant("small")
    desk.serve({"max_waiting": 3}, tenants=[other])
    desk.runs("0")
    flood = [desk.waits(name) for name in "123"]
    desk.send("other", key)
    refused = rest(flood[2])
    assert (refused.status, refused.error()["code"]) == (503, "model_busy") and refused.header("retry-after")
    assert desk.depth() == 3
    desk.finish_all(4)
    assert eventually(lambda: sorted(desk.order()) == ["0", "1", "2", "other"])


def test_nobody_waits_longer_than_the_limit(desk: Desk) -> None:
    desk.serve({"max_wait": "300ms"})
    first = desk.runs("1")
    late = rest(desk.send("2"))
    assert (late.status, late.error()["code"]) == (503, "model_busy") and late.header("retry-after")
    assert desk.depth() == 0
    desk.finish(0)
    assert rest(first).status == 200 and desk.order() == ["1"]


# --- leaving
def test_whoever_leaves_the_queue_is_forgotten_at_once(desk: Desk) -> None:
    desk.serve()
    desk.runs("1")
    leaver, stays = desk.waits("2"), desk.waits("3")
    leaver.reset()
    assert eventually(lambda: desk.depth() == 1)
    assert eventually(lambda: desk.lab.answered(499) == 1)
    desk.finish_all(2)
    assert rest(stays).status == 200 and desk.order() == ["1", "3"]
    assert desk.lab.tokens("prompt") > 0 and desk.lab.at_rest()


def test_a_place_of_somebody_who_leaves_while_served_goes_to_the_next(desk: Desk) -> None:
    desk.serve()
    leaver, stays = desk.runs("1"), desk.waits("2")
    leaver.close()
    desk.finish(1)
    assert rest(stays).status == 200 and desk.engine.requests[0].gone.wait(10)


def test_a_storm_of_clients_that_leave_costs_no_place(desk: Desk) -> None:
    random = Random(7)
    desk.serve({"max_waiting": 1000}, most=3)
    desk.engine.script = lambda x: (x.pause(0.01), desk.reply(x))[1]
    for number in range(150):
        wire = desk.send(str(number), stream=bool(random.getrandbits(1)))
        if random.random() < 0.7:
            wire.reset() if random.getrandbits(1) else wire.close()
    assert eventually(lambda: desk.depth() == 0) and desk.lab.at_rest()
    assert desk.engine.most_running <= 3
    assert [desk.lab.stream().ended_well() for _ in range(6)] == [True] * 6


# --- what else frees a place
def test_a_request_waits_for_a_model_that_is_loading(lab: Lab, desk: Desk) -> None:
    engine = lab.engine("llama_server")
    engine.probe = lambda x: x.reply(LOADING, 503)
    lab.serve({"m": [replica(engine)]})
    lab.gateway.wait_for_replica("loading")
    wires = [desk.waits("1"), desk.waits("2")]
    assert not engine.requests
    engine.probe = None
    assert [rest(wire).status for wire in wires] == [200, 200]


def test_a_model_that_does_not_load_in_time_is_a_503_that_says_when_to_come_back(lab: Lab) -> None:
    engine = lab.engine("llama_server")
    engine.probe = lambda x: x.reply(LOADING, 503)
    lab.serve({"m": {"queue": {"max_wait": "300ms"}, "replicas": [replica(engine)]}})
    lab.gateway.wait_for_replica("loading")
    answer = lab.chat()
    assert (answer.status, answer.error()["code"]) == (503, "no_replica") and answer.header("retry-after")
    assert not engine.requests


def test_nobody_waits_for_a_model_that_is_down(lab: Lab) -> None:
    lab.serve({"m": [replica(f"http://127.0.0.1:{free_port()}")]})
    lab.gateway.wait_for_replica("down")
    answer = lab.chat()
    assert (answer.status, answer.error()["code"]) == (503, "no_replica") and answer.header("retry-after")


def test_a_reload_that_raises_the_bound_frees_places(desk: Desk) -> None:
    desk.serve()
    wires = [desk.runs("1"), desk.waits("2"), desk.waits("3")]
    desk.serve(most=3)
    assert eventually(lambda: len(desk.gates) == 3) and desk.depth() == 0
    desk.finish_all(3)
    assert [rest(wire).status for wire in wires] == [200] * 3


def test_those_who_wait_for_a_model_that_a_reload_removes_are_served(desk: Desk) -> None:
    desk.serve()
    wires = [desk.runs("1"), desk.waits("2"), desk.waits("3")]
    desk.lab.serve({"another": [replica(desk.engine)]})
    desk.finish_all(3)
    assert [rest(wire).status for wire in wires] == [200] * 3 and desk.engine.most_running == 1
    assert desk.lab.chat().status == 404


def test_a_replica_that_takes_requests_again_gets_those_who_wait(lab: Lab, desk: Desk) -> None:
    """Of two replicas one is drained and the other full: whoever waits goes where there is room first."""
    other = lab.engine()
    replicas = [replica(desk.engine, max_inflight=1), replica(other, max_inflight=1)]
    lab.serve({"m": replicas})
    assert eventually(lambda: [entry["health"] for entry in lab.gateway.replicas()] == ["up", "up"])
    name = replica_at(lab, other)
    assert admin(lab, f"/admin/v1/replicas/{name}/drain") == 200
    first, second = desk.runs("1"), desk.waits("2")
    assert admin(lab, f"/admin/v1/replicas/{name}/undrain") == 200
    assert rest(second).status == 200 and len(other.requests) == 1
    desk.finish(0)
    assert rest(first).status == 200


def replica_at(lab: Lab, engine: Engine) -> str:
    """Its id."""
    return next(str(entry["id"]) for entry in lab.gateway.replicas() if str(engine.port) in str(entry))


def admin(lab: Lab, path: str) -> int:
    return lab.call(None, path, key=ADMIN).status


# --- other replicas and other models
def test_a_fallback_that_has_room_answers_before_anybody_waits(lab: Lab, desk: Desk) -> None:
    other = lab.engine()
    desk.serve(model={"fallbacks": ["f"]}, models={"f": [replica(other, max_inflight=1)]})
    desk.runs("1")
    assert lab.chat().status == 200 and len(other.requests) == 1


def test_where_the_fallbacks_are_full_too_the_first_model_is_waited_for(lab: Lab, desk: Desk) -> None:
    other = Desk(lab)
    limits = {"limits": {"concurrency": 2}}  # a place among those of a model is taken and given back with each move
    fallback = limits | {"replicas": [replica(other.engine, max_inflight=1)]}
    desk.serve(model=limits | {"fallbacks": ["f"]}, models={"f": fallback})
    desk.runs("1")
    other.runs("2")
    wire = desk.waits("3")
    assert (desk.depth("m"), desk.depth("f")) == (1, 0)
    other.close()
    desk.finish_all(2)
    assert rest(wire).status == 200 and desk.order() == ["1", "3"]


def test_a_second_attempt_waits_before_the_tenants_other_requests(lab: Lab, desk: Desk) -> None:
    broken, failing = lab.engine(), threading.Event()
    broken.script = lambda x: (x.wait(failing), x.reset())[1]
    lab.serve({"m": [replica(desk.engine, max_inflight=1), replica(broken, max_inflight=1)]})
    assert eventually(lambda: [entry["health"] for entry in lab.gateway.replicas()] == ["up", "up"])
    desk.send("a"), desk.send("b")
    assert eventually(lambda: broken.running == 1 and desk.engine.running == 1)
    desk.waits("behind")
    again = broken.requests[0].json()["user"]
    assert admin(lab, f"/admin/v1/replicas/{replica_at(lab, broken)}/drain") == 200  # nobody is sent there meanwhile
    failing.set()
    assert eventually(lambda: desk.depth() == 2)
    desk.finish_all(3)
    assert eventually(lambda: len(desk.order()) == 3)
    assert desk.order()[1:] == [again, "behind"]


# --- what is seen of it
def test_a_stream_that_waits_gets_comments_and_then_its_answer(desk: Desk) -> None:
    desk.serve(server={"keepalive_interval": "250ms"})
    desk.runs("1")
    answer = desk.waits("2", stream=True).answer()
    answer.more()
    assert answer.status == 200 and parse(answer.body).comments and not parse(answer.body).events
    desk.finish_all(2)
    assert answer.rest().ended_well() and answer.text() == "Hello, world"


@pytest.mark.parametrize("interval", ["100ms", "0s"])
def test_a_wait_in_vain_ends_in_an_event_only_after_comments(desk: Desk, interval: str) -> None:
    desk.serve({"max_wait": "1s"}, server={"keepalive_interval": interval})
    desk.runs("1")
    answer = rest(desk.send("2", stream=True))
    if interval == "0s":
        assert (answer.status, answer.error()["code"]) == (503, "model_busy")
    else:
        assert answer.status == 200 and [error["code"] for error in answer.stream_errors()] == ["model_busy"]
        assert answer.complete and "[DONE]" not in answer.events()


def test_the_wait_is_measured_and_not_taken_for_the_gateways_own_time(desk: Desk) -> None:
    desk.serve()
    gateway = desk.lab.gateway

    def figures() -> tuple[float, float, float]:
        return (
            gateway.metric("sekisho_queue_wait_seconds_count", model="m"),
            gateway.metric("sekisho_queue_wait_seconds_sum", model="m"),
            gateway.metric("sekisho_overhead_seconds_sum", phase="request"),
        )

    before = figures()
    wires = [desk.runs("1"), desk.waits("2")]
    threading.Event().wait(0.5)
    desk.finish_all(2)
    assert [rest(wire).status for wire in wires] == [200, 200]
    assert eventually(lambda: figures()[0] == before[0] + 1)
    _, waited, overhead = (now - then for now, then in zip(figures(), before, strict=True))
    assert waited >= 0.5 > overhead


def test_whoever_waits_when_the_gateway_stops_is_told_so(lab: Lab, start: Callable[..., Gateway]) -> None:
    gate = threading.Event()
    engine: Engine = lab.engine(script=lambda x: (x.wait(gate), x.stream())[1])
    own, key = tenant("own")
    models = {"m": [replica(engine, max_inflight=1)]}
    gateway = start(base_config(models, [own], server={"shutdown_grace": "500ms"}))
    gateway.wait_for_replica()
    with gateway.wire() as running, gateway.wire() as waiting:
        body = request("POST", "/v1/chat/completions", chat(), key=key)
        running.send(body)
        assert eventually(lambda: engine.running == 1)
        waiting.send(body)
        assert eventually(lambda: gateway.metric("sekisho_queue_depth", model="m") == 1)
        gateway.terminate()
        answer = rest(waiting)
        assert (answer.status, answer.error()["code"]) == (503, "shutting_down")
        assert gateway.wait() == 0
    gate.set()
