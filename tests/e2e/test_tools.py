"""Tool policy through the front door: what an engine is asked, what a client gets, and from when on."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.doubles.dialects import USAGE
from tests.doubles.engine import Engine, Exchange
from tests.doubles.issuer import Issuer
from tests.doubles.kinds import CALLS, KINDS
from tests.e2e.harness import ADMIN, Lab, chat, digest, eventually, replica
from tests.e2e.wire import Answer

HELLO: Any = [{"role": "user", "content": "hi"}]
SECRET, PAYLOAD = "rm_all", "THE-PAYLOAD"
_numbers = itertools.count(1)


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


def called(name: str, arguments: str = PAYLOAD) -> dict[str, Any]:
    return {"id": f"id_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


def streamed(index: int, name: str, *parts: str) -> list[dict[str, Any]]:
    first = {**called(name, ""), "index": index}
    rest = [{"index": index, "function": {"arguments": part}} for part in parts]
    return [{"tool_calls": [one]} for one in [first, *rest]]


class Shop:
    """A tenant with a policy, and an engine whose answers call what the test says."""

    def __init__(self, lab: Lab, **tools: Any) -> None:
        self.lab, self.name = lab, f"shop-{next(_numbers)}"
        self.key = f"sk-{self.name}-" + "s" * 40
        self.tools = {"deny": ["rm_*"]} | tools
        self.engine = lab.engine()
        self.serve()

    def serve(self, *more: dict[str, Any], **sections: Any) -> None:
        tenant = {"name": self.name, "tools": self.tools, "keys": [{"name": "k", "sha256": digest(self.key)}]}
        self.lab.serve({"m": [replica(self.engine), *more]}, tenants=[tenant], **sections)

    def answers(self, *calls: dict[str, Any], **message: Any) -> None:
        def script(x: Exchange) -> None:
            document = x.dialect.completion(None, tool_calls=list(calls), **message)  # type: ignore[arg-type]
            document["choices"][0]["finish_reason"] = "tool_calls"
            x.reply(document)

        self.engine.script = script

    def streams(self, *deltas: Any) -> None:
        self.engine.script = lambda x: x.stream(deltas, finish="tool_calls")

    def ask(self, **more: Any) -> Answer:
        return self.lab.call(chat(**more), key=self.key)

    def metric(self, name: str, **labels: str) -> float:
        return self.lab.gateway.metric(f"sekisho_{name}", tenant=self.name, **labels)

    def sdk(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.lab.gateway.port}/v1", api_key=self.key, timeout=30)


@pytest.fixture
def shop(lab: Lab) -> Shop:
    return Shop(lab)


@pytest.fixture
def lenient(lab: Lab) -> Shop:
    """Takes out instead of refusing."""
    return Shop(lab, on_violation="strip")


# --- requests
def test_a_forbidden_tool_never_reaches_an_engine(shop: Shop) -> None:
    answer = shop.ask(tools=[function("get"), function(SECRET)])
    error = answer.error()
    assert (answer.status, error["code"], error["param"]) == (403, "tool_not_allowed", "tools[1]")
    assert error["type"] == "permission_error" and SECRET in error["message"]
    assert shop.engine.requests == []
    assert eventually(lambda: shop.metric("rejected_total", reason="tool_not_allowed")) == 1
    assert shop.ask(tools=[function("get")]).status == 200


def test_or_is_taken_out_on_its_way(lenient: Shop) -> None:
    for stream in (False, True):
        answer = lenient.ask(tools=[function("get"), function(SECRET)], tool_choice="auto", stream=stream, seed=7)
        assert answer.status == 200 and answer.header("x-sekisho-tools-withheld") == "1"
        sent = lenient.engine.requests[-1].json()
        assert sent["tools"] == [function("get")] and (sent["tool_choice"], sent["seed"]) == ("auto", 7)
    answer = lenient.ask(tools=[function(SECRET)], tool_choice="auto", parallel_tool_calls=True)
    assert sorted(lenient.engine.requests[-1].json()) == ["cache_salt", "messages", "model"]
    answer = lenient.ask(tools=[function("get")])
    assert answer.header("x-sekisho-tools-withheld") is None


def test_tenants_without_a_policy_are_not_concerned(shop: Shop) -> None:
    shop.answers(called(SECRET))
    answer = shop.lab.chat(tools=[function(SECRET)], tool_choice="required")
    assert answer.status == 200 and answer.json()["choices"][0]["message"]["tool_calls"] == [called(SECRET)]
    assert shop.engine.requests[-1].json()["tools"] == [function(SECRET)]
    shop.streams(*streamed(0, SECRET, PAYLOAD))
    assert PAYLOAD.encode() in shop.lab.stream().body


def test_a_body_of_megabytes_is_held_against_the_policy_too(lenient: Shop) -> None:
    answer = lenient.ask(
        messages=[{"role": "user", "content": "x" * 2_000_000}], tools=[function(SECRET), function("a")]
    )
    assert answer.status == 200 and lenient.engine.requests[-1].json()["tools"] == [function("a")]


# --- whole answers
def test_an_answer_with_a_forbidden_call_is_refused_once(shop: Shop) -> None:
    shop.answers(called("get"), called(SECRET))
    answer = shop.ask(tools=[function("get")])
    error = answer.error()
    assert (answer.status, error["code"], error["type"]) == (403, "tool_call_not_allowed", "permission_error")
    assert PAYLOAD.encode() not in answer.body and SECRET.encode() not in answer.body
    assert len(shop.engine.requests) == 1  # no second try: the engine did what it was asked
    assert eventually(lambda: shop.metric("tokens_total", kind="completion")) == USAGE["completion_tokens"]
    assert shop.metric("tokens_total", kind="prompt") == USAGE["prompt_tokens"]
    labels = {"status": "403", "code": "tool_call_not_allowed"}
    assert shop.metric("requests_total", **labels) == 1
    assert shop.lab.gateway.metric("sekisho_upstream_failures_total", replica=shop.lab.gateway.replicas()[0]["id"]) == 0


def test_or_it_loses_the_call_and_says_so(lenient: Shop) -> None:
    lenient.answers(called("get", "{}"), called(SECRET), called("rm_x"))
    answer = lenient.ask()
    assert answer.status == 200 and answer.header("x-sekisho-tools-stripped") == "2"
    assert lenient.lab.gateway.access_line(answer.header("x-request-id") or "")["tools_stripped"] == 2
    (choice,) = answer.json()["choices"]
    assert choice["message"]["tool_calls"] == [called("get", "{}")] and choice["finish_reason"] == "tool_calls"
    assert answer.json()["usage"] == USAGE
    lenient.answers(called(SECRET))
    (choice,) = lenient.ask().json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": ""} and choice["finish_reason"] == "stop"


# --- streams
def test_a_stream_with_a_forbidden_call_ends_with_an_error(shop: Shop) -> None:
    shop.streams("Let me see.", *streamed(0, "get", "{}"), *streamed(1, SECRET, PAYLOAD[:4], PAYLOAD[4:]))
    answer = shop.ask(stream=True)
    (error,) = answer.stream_errors()
    assert answer.status == 200 and error["code"] == "tool_call_not_allowed" and answer.text() == "Let me see."
    assert answer.events()[-1] != "[DONE]" and "error" in json.loads(answer.events()[-1])
    assert SECRET.encode() not in answer.body and PAYLOAD[:4].encode() not in answer.body
    assert b'"name":"get"' in answer.body
    assert len(shop.engine.requests) == 1
    assert eventually(lambda: shop.metric("tokens_total", kind="completion")) > 0
    assert shop.metric("requests_total", code="tool_call_not_allowed") == 1


def test_one_that_begins_with_it_delivers_nothing_but_the_error(shop: Shop) -> None:
    shop.engine.script = lambda x: x.raw_stream(
        b"".join(x.dialect.frame(x.dialect.chunk(delta, None)) for delta in streamed(0, SECRET, PAYLOAD))
    )
    answer = shop.ask(stream=True)
    error = answer.error() if answer.status == 403 else answer.stream_errors()[0]
    assert error["code"] == "tool_call_not_allowed" and b"tool_calls" not in answer.body
    assert len(shop.engine.requests) == 1
    assert eventually(lambda: shop.metric("tokens_total", kind="prompt")) > 0


def test_or_it_goes_on_without_the_call(lenient: Shop) -> None:
    lenient.streams("Let me see.", *streamed(0, SECRET, PAYLOAD), *streamed(1, "get", "{", "}"))
    answer = lenient.ask(stream=True, stream_options={"include_usage": True})
    assert answer.ended_well() and answer.finishes() == ["tool_calls"] and answer.text() == "Let me see."
    assert PAYLOAD.encode() not in answer.body and SECRET.encode() not in answer.body
    assert [chunk["usage"] for chunk in answer.chunks_json() if chunk.get("usage")] == [USAGE]
    lenient.streams(*streamed(0, SECRET, PAYLOAD))
    answer = lenient.ask(stream=True, tools=[function(SECRET), function("get")])
    assert answer.ended_well() and answer.finishes() == ["stop"]
    assert lenient.lab.gateway.access_line(answer.header("x-request-id") or "")["tools_stripped"] == 2
    assert eventually(lambda: lenient.metric("tokens_total", kind="completion")) == 2 * USAGE["completion_tokens"]


def test_every_packet_of_a_byte(lenient: Shop) -> None:
    """The stream arrives byte by byte."""
    deltas = [*streamed(0, SECRET, PAYLOAD), "text", *streamed(1, "get", "{}")]
    lenient.engine.script = lambda x: x.raw_stream(
        x.dialect.stream(deltas, finish="tool_calls"), lambda body: (body[at : at + 1] for at in range(len(body)))
    )
    answer = lenient.ask(stream=True)
    assert answer.ended_well() and answer.text() == "text" and PAYLOAD.encode() not in answer.body
    assert b'"name":"get"' in answer.body


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("stream", [False, True])
def test_the_answers_of_every_engine(lab: Lab, kind: str, stream: bool) -> None:
    """Each in its own dialect, with two calls of the same tool."""
    engine = KINDS[kind].engine()
    shop = Shop(lab)
    lab._engines.append(engine)

    def ask(**tools: Any) -> Answer:
        tenant = {"name": shop.name, "tools": tools, "keys": [{"name": "k", "sha256": digest(shop.key)}]}
        lab.serve({"m": [{"backend": kind, "url": engine.url, "model": "upstream"}]}, tenants=[tenant])
        return shop.ask(stream=stream, tools=[function("search")])

    def calls(answer: Answer) -> list[Any]:
        if not stream:
            return answer.json()["choices"][0]["message"].get("tool_calls") or []
        return [call for choice in answer.choices() for call in choice["delta"].get("tool_calls") or ()]

    def finish(answer: Answer) -> list[str]:
        return answer.finishes() if stream else [choice["finish_reason"] for choice in answer.json()["choices"]]

    answer = ask(deny=["rm_*"])
    assert [name for call in calls(answer) if (name := call["function"].get("name"))] == [call[1] for call in CALLS]
    for place, wanted in enumerate(call[2] for call in CALLS):
        own = [call for call in calls(answer) if call["index"] == place] if stream else calls(answer)[place : place + 1]
        assert json.loads("".join(call["function"].get("arguments") or "" for call in own)) == wanted
    assert finish(answer) == ["tool_calls"] and answer.complete

    answer = ask(allow=["search"], on_violation="strip")
    assert (calls(answer), finish(answer)) == ([], ["stop"]) and b"weather" not in answer.body
    answer = ask(allow=["search"])
    error = answer.error() if answer.status == 403 else answer.stream_errors()[0]
    assert error["code"] == "tool_call_not_allowed" and b"weather" not in answer.body and b"Oslo" not in answer.body


# --- the openai package
def test_the_openai_package_sees_plain_errors_and_plain_answers(shop: Shop, lenient: Shop) -> None:
    lenient.serve()
    lenient.answers(called("get", "{}"), called(SECRET))
    with lenient.sdk() as sdk:
        whole = sdk.chat.completions.create(model="m", messages=HELLO)
        assert [call.function.name for call in whole.choices[0].message.tool_calls or ()] == ["get"]  # type: ignore[union-attr]
        lenient.streams(*streamed(0, SECRET, PAYLOAD), *streamed(1, "get", "{", "}"))
        with sdk.chat.completions.stream(model="m", messages=HELLO) as stream:
            message = stream.get_final_completion().choices[0].message
        assert [call.function.arguments for call in message.tool_calls or ()] == ["{}"]
    shop.serve()
    shop.answers(called(SECRET))
    with shop.sdk() as sdk:
        with pytest.raises(openai.PermissionDeniedError) as caught:
            sdk.chat.completions.create(model="m", messages=HELLO)
        assert caught.value.code == "tool_call_not_allowed" and len(shop.engine.requests) == 1  # not sent again
        shop.streams("text", *streamed(0, SECRET, PAYLOAD))
        with pytest.raises(openai.APIError) as ended:
            for chunk in sdk.chat.completions.create(model="m", messages=HELLO, stream=True):
                assert not chunk.choices[0].delta.tool_calls
        assert ended.value.code == "tool_call_not_allowed"


# --- with two replicas in a race
def test_a_race_of_two_replicas_keeps_to_the_policy(shop: Shop) -> None:
    other = shop.lab.engine()
    for engine in (shop.engine, other):
        engine.script = lambda x: (x.pause(0.3), x.stream(streamed(0, SECRET, PAYLOAD), finish="tool_calls"))  # type: ignore[func-returns-value]
    shop.serve(replica(other), routing={"hedge_after": "50ms"})
    for stream in (True, False):
        answer = shop.ask(stream=stream) if stream else shop.ask(stream=True, n=1)
        error = answer.error() if answer.status != 200 else answer.stream_errors()[0]
        assert error["code"] == "tool_call_not_allowed" and PAYLOAD.encode() not in answer.body


# --- tenants of the database
class Office:
    def __init__(self, lab: Lab) -> None:
        self.lab, self.name = lab, f"tooled-{next(_numbers)}"

    def ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        headers = {"authorization": f"Bearer {ADMIN}"}
        return self.lab.gateway.http.request(method, f"/admin/v1{path}", json=body, headers=headers)

    def good(self, method: str, path: str, body: Any = None) -> Any:
        answer = self.ask(method, path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture
def office(lab: Lab) -> Iterator[Office]:
    office = Office(lab)
    yield office
    office.ask("DELETE", f"/tenants/{office.name}")


def test_a_policy_of_the_database_is_in_force_when_it_is_answered(lab: Lab, office: Office) -> None:
    lab.one()
    made = office.good("POST", "/tenants", {"name": office.name})
    assert made["tools"] == {"allow": ["*"], "deny": [], "types": ["*"], "on_violation": "refuse"}
    key = office.good("POST", "/keys", {"tenant": office.name})["key"]

    def status() -> int:
        return lab.call(chat(tools=[function("get"), function(SECRET)]), key=key).status

    assert status() == 200
    changed = office.good("PATCH", f"/tenants/{office.name}", {"tools": {"deny": ["rm_*"]}})
    assert changed["tools"]["deny"] == ["rm_*"] and status() == 403
    office.good("PATCH", f"/tenants/{office.name}", {"weight": 2})
    assert status() == 403
    office.good("PATCH", f"/tenants/{office.name}", {"tools": {"deny": ["rm_*"], "on_violation": "strip"}})
    assert status() == 200
    entries = office.good("GET", "/audit?order=desc&limit=10")["data"]
    tools = [
        (entry["before"]["tools"], entry["after"]["tools"])
        for entry in entries
        if entry["action"] == "tenant.update" and entry["target"] == office.name
    ]
    strict, lenient = {"deny": ["rm_*"]}, {"deny": ["rm_*"], "on_violation": "strip"}
    assert tools == [(strict, lenient), (strict, strict), ({}, strict)]
    wrong = office.ask("PATCH", f"/tenants/{office.name}", {"tools": {"alow": []}})
    assert wrong.status_code == 400 and "allow" in wrong.json()["error"]["message"]


def test_signed_tokens_are_held_against_their_tenants_policy(lab: Lab, office: Office) -> None:
    engine: Engine = lab.engine()
    office.good("POST", "/tenants", {"name": office.name})
    with Issuer() as issuer:
        lab.serve({"m": [replica(engine)]}, auth={"jwt": [issuer.entry()]})
        token = issuer.token(tenant=office.name)

        def status() -> int:
            return lab.call(chat(tools=[function(SECRET)]), key=token).status

        assert status() == 200
        office.good("PATCH", f"/tenants/{office.name}", {"tools": {"allow": []}})
        assert status() == 403
