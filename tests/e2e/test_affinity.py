"""Prompts and sessions on real sockets: they come back to the replica that knows them, and do without it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest

from tests.doubles.engine import Engine, Exchange, Request, answer
from tests.e2e.harness import Lab, chat, digest, eventually, replica, together

SYSTEM = "You answer questions about one long document. " * 100
PROMPTS = 12


class Trio:
    """Model `m` with three equal engines."""

    def __init__(self, lab: Lab, policy: str, tenants: Sequence[Mapping[str, Any]] = ()) -> None:
        self.lab = lab
        self.engines = [lab.engine() for _ in range(3)]
        entry = {"policy": policy, "replicas": [replica(engine) for engine in self.engines]}
        lab.serve({"m": entry}, tenants=tenants)
        assert eventually(lambda: [one["health"] for one in lab.gateway.replicas()] == ["up"] * 3)

    def ask(self, body: dict[str, Any], **options: Any) -> Engine:
        """Which engine has answered."""
        before = {engine: len(engine.requests) for engine in self.engines}
        assert self.lab.call(body, **options).status == 200
        (one,) = [engine for engine, count in before.items() if len(engine.requests) > count]
        return one


    def spread(self) -> dict[int, Engine]:
        """Sends the first turns of conversations that are open at the same time, so that every engine gets some."""
        all_there = threading.Event()

        def hold(x: Exchange) -> None:
            if sum(engine.running for engine in self.engines) == PROMPTS:
                all_there.set()
            x.wait(all_there)
            answer(x)

        for engine in self.engines:
            engine.script = hold
        together([partial(self.lab.call, conversation(0, number)) for number in range(PROMPTS)])
        for engine in self.engines:
            engine.script = answer
        homes = {subject(request): engine for engine in self.engines for request in engine.requests}
        assert len(homes) == PROMPTS and set(homes.values()) == set(self.engines)
        return homes


def subject(request: Request) -> int:
    return int(request.json()["messages"][0]["content"].partition(":")[0])


def conversation(turns: int, subject: object = "hats") -> dict[str, Any]:
    said = [{"role": "system", "content": f"{subject}: {SYSTEM}"}]
    for number in range(turns):
        said += [
            {"role": "user", "content": f"Question {number}"},
            {"role": "assistant", "content": f"{number} it is. " * 30},
        ]
    return chat(messages=[*said, {"role": "user", "content": "And now?"}])


@pytest.mark.parametrize("stream", [False, True])
def test_the_turns_of_a_chat_come_to_the_same_replica(lab: Lab, stream: bool) -> None:
    trio = Trio(lab, "prefix_affinity")
    found = {trio.ask(conversation(turns) | {"stream": stream}) for turns in range(8)}
    assert len(found) == 1


def test_a_tenant_is_not_drawn_to_what_others_have_sent(lab: Lab) -> None:
    other, key = f"{lab.tenant}-other", "sk-other-affinity" + "o" * 40
    trio = Trio(lab, "prefix_affinity", [{"name": other, "keys": [{"name": "app", "sha256": digest(key)}]}])
    ours = trio.spread()
    assert [trio.ask(conversation(1, number)) for number in range(PROMPTS)] == [ours[n] for n in range(PROMPTS)]
    theirs = [trio.ask(conversation(1, number), key=key) for number in range(PROMPTS)]
    assert theirs != [ours[number] for number in range(PROMPTS)]


def test_a_chat_whose_replica_dies_goes_on_elsewhere_and_stays_there(lab: Lab) -> None:
    trio = Trio(lab, "prefix_affinity")
    first = trio.ask(conversation(0))
    first.stop()
    found = {trio.ask(conversation(turns)) for turns in range(1, 6)}
    assert len(found) == 1 and first not in found


@pytest.mark.parametrize("way", ["header", "user"])
def test_a_session_sticks(lab: Lab, way: str) -> None:
    trio = Trio(lab, "session_affinity")
    homes = []
    for number in range(PROMPTS):
        name = f"session {number}"
        options: dict[str, Any] = {"headers": [f"x-session-id: {name}"]} if way == "header" else {}
        bodies = [chat(messages=[{"role": "user", "content": f"Turn {turn}"}]) for turn in range(3)]
        found = {trio.ask(body | ({"user": name} if way == "user" else {}), **options) for body in bodies}
        assert len(found) == 1
        homes += found
    assert len(set(homes)) > 1


def test_the_header_counts_more_than_the_user(lab: Lab) -> None:
    trio = Trio(lab, "session_affinity")
    found = {trio.ask(chat(user=f"u{number}"), headers=["x-session-id: s"]) for number in range(PROMPTS)}
    assert len(found) == 1


def test_only_the_sessions_of_a_dead_replica_move(lab: Lab) -> None:
    trio = Trio(lab, "session_affinity")
    before = [trio.ask(chat(user=f"u{number}")) for number in range(PROMPTS)]
    gone = before[0]
    gone.stop()
    after = [trio.ask(chat(user=f"u{number}")) for number in range(PROMPTS)]
    assert gone not in after
    assert [new for new, old in zip(after, before, strict=True) if old is not gone] == [
        old for old in before if old is not gone
    ]


def test_a_session_is_not_told_to_the_engine(lab: Lab) -> None:
    trio = Trio(lab, "session_affinity")
    engine = trio.ask(chat(), headers=["x-session-id: a-name-of-ours"])
    assert b"a-name-of-ours" not in engine.last().raw_head + engine.last().body
