"""Prompts and answers in the log: what a record says, what it never says, and a log that cannot keep up."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tests.doubles.engine import Exchange
from tests.e2e.harness import Gateway, Lab, base_config, digest, eventually, replica

MAIL, PHONE, PASSWORD = "taro@example.jp", "０９０－１２３４－５６７８", "hunter2!x"
MASKED, FULL = {"content": "masked"}, {"content": "full"}


def record(gateway: Gateway, request_id: str) -> dict[str, Any]:
    """The content record of one request."""
    found = eventually(
        lambda: [
            line for line in gateway.access_lines() if line["event"] == "content" and line["request_id"] == request_id
        ]
    )
    assert len(found) == 1, f"{len(found)} content records for {request_id}"
    one: dict[str, Any] = found[0]
    return one


def asked(lab: Lab, logging: dict[str, Any], script: Any = None, **body: Any) -> dict[str, Any]:
    """The record of a chat with a fresh engine."""
    engine = lab.engine("vllm", script)
    lab.serve({"m": [replica(engine)]}, logging=logging)
    answer = lab.chat(**body)
    assert answer.status == 200, answer.body
    return record(lab.gateway, answer.header("x-request-id") or "")


def children(gateway: Gateway) -> list[psutil.Process]:
    """The processes that make content records."""
    found = psutil.Process(gateway.process.pid).children(recursive=True)
    return [child for child in found if child.is_running() and "gateway.content" in child.cmdline()]


def says(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def output(gateway: Gateway) -> str:
    return (gateway.folder / "stdout").read_text() + gateway.log()


# --- what a record says
def test_masked_prompts_and_answers(lab: Lab) -> None:
    def script(x: Exchange) -> None:
        x.reply(x.dialect.completion(f"Your address is {MAIL}, dial {PHONE}."))

    line = asked(lab, MASKED, script, messages=says(f"私は{MAIL}、電話番号は{PHONE}です。 password={PASSWORD}"))
    assert line["asked"]["messages"] == says("私は[EMAIL]、電話番号は[PHONE]です。 password=[SECRET]")
    choice = line["answered"]["choices"][0]
    assert choice["content"] == "Your address is [EMAIL], dial [PHONE]."
    assert choice["finish_reason"] == "stop"
    assert line["masked"] == {"EMAIL": 2, "PHONE": 2, "SECRET": 1}
    assert (line["tenant"], line["key"], line["model"], line["content"]) == (lab.tenant, "test", "m", "masked")
    assert (line["status"], line["aborted"], line["asked_left_out"], line["answered_left_out"]) == (200, False, 0, 0)
    for secret in (MAIL, PHONE, PASSWORD):
        assert secret not in output(lab.gateway)


def test_what_comes_in_pieces_is_masked_as_a_whole(lab: Lab) -> None:
    pieces = ["mail ta", "ro@exam", "ple.jp or call 090-1", "234-56", "78"]
    line = asked(lab, MASKED, lambda x: x.stream(pieces), stream=True, messages=says("who"))
    choice = line["answered"]["choices"][0]
    assert (choice["content"], choice["finish_reason"]) == ("mail [EMAIL] or call [PHONE]", "stop")
    assert line["stream"] is True


def test_full_says_everything(lab: Lab) -> None:
    line = asked(lab, FULL, messages=says(f"{MAIL} {PASSWORD}"))
    assert line["asked"]["messages"] == says(f"{MAIL} {PASSWORD}")
    assert "masked" not in line


def test_arguments_of_tools_stay_json(lab: Lab) -> None:
    arguments = json.dumps({"to": MAIL, "n": 3, "auth": {"password": "rosebud"}, "pan": 4111111111111111})
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "send", "arguments": arguments[:20]}}
    rest = {"index": 0, "function": {"arguments": arguments[20:]}}
    pieces = [{"tool_calls": [call]}, {"tool_calls": [rest]}]
    tools = [{"type": "function", "function": {"name": "send", "description": MAIL, "parameters": {}}}]
    line = asked(lab, MASKED, lambda x: x.stream(pieces), stream=True, messages=says("send"), tools=tools)
    (made,) = line["answered"]["choices"][0]["tool_calls"]
    assert made["name"] == "send"
    wanted = {"to": "[EMAIL]", "n": 3, "auth": {"password": "[SECRET]"}, "pan": "[CARD]"}
    assert json.loads(made["arguments"]) == wanted
    assert line["asked"]["tools"] == ["send"]


def test_media_are_a_type_and_a_size(lab: Lab) -> None:
    parts = [
        {"type": "text", "text": "what is it"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUFB" * 100}},
    ]
    line = asked(lab, FULL, messages=[{"role": "user", "content": parts}])
    shown = line["asked"]["messages"][0]["content"]
    assert shown[0] == {"type": "text", "text": "what is it"}
    assert shown[1] == {"type": "image_url", "media": "image/png", "bytes": 300}
    assert "QUFBQUFB" not in output(lab.gateway)


def test_reasoning_is_kept_apart(lab: Lab) -> None:
    pieces = [{"reasoning_content": "think "}, {"reasoning_content": MAIL}, "done"]
    line = asked(lab, MASKED, lambda x: x.stream(pieces), stream=True, messages=says("x"))
    choice = line["answered"]["choices"][0]
    assert (choice["reasoning"], choice["content"]) == ("think [EMAIL]", "done")


def test_long_texts_are_cut_and_the_rest_is_counted(lab: Lab) -> None:
    long = "あ" * 1000 + MAIL
    line = asked(lab, MASKED | {"content_limit": "1KiB"}, lambda x: x.stream(["b" * 700] * 3), stream=True,
                 messages=says(long))  # fmt: skip
    shown = line["asked"]["messages"][0]["content"]
    assert set(shown) == {"あ"}
    assert len(shown.encode()) + line["asked_left_out"] == len(long.encode())
    text = line["answered"]["choices"][0]["content"]
    assert set(text) == {"b"}
    assert 900 < len(text) <= 1024
    assert len(text) + line["answered_left_out"] >= 2100


def test_a_value_on_the_cut_is_not_shown_in_part(lab: Lab) -> None:
    words = "x" * 980
    for shift in range(0, 60, 7):
        text = words + " " * shift + " card 4111 1111 1111 1111 " + "y" * 200
        line = asked(lab, MASKED | {"content_limit": "1KiB"}, messages=says(text))
        shown = line["asked"]["messages"][0]["content"]
        assert "4111" not in shown, shown


def test_other_operations(lab: Lab) -> None:
    engine = lab.engine()
    lab.serve({"m": [replica(engine)]}, logging=MASKED)
    one = lab.call({"model": "m", "prompt": [f"a {MAIL}", "b"]}, "/v1/completions")
    line = record(lab.gateway, one.header("x-request-id") or "")
    assert line["asked"]["prompt"] == ["a [EMAIL]", "b"]
    assert isinstance(line["answered"]["choices"][0]["text"], str)
    two = lab.call({"model": "m", "input": f"c {MAIL}"}, "/v1/embeddings")
    line = record(lab.gateway, two.header("x-request-id") or "")
    assert line["asked"]["input"] == "c [EMAIL]"
    assert set(line["answered"]) == {"media", "bytes"}


def test_refused_requests_and_errors_say_what_was_asked(lab: Lab) -> None:
    engine = lab.engine("vllm", lambda x: x.fail(f"no {MAIL}", 400))
    lab.serve({"m": [replica(engine)]}, logging=MASKED)
    line = record(lab.gateway, lab.chat(messages=says(MAIL)).header("x-request-id") or "")
    assert (line["status"], line["asked"]["messages"], line["answered"]) == (400, says("[EMAIL]"), {})
    assert line["error"]


def test_a_stream_that_breaks_or_is_left_is_marked(lab: Lab) -> None:
    def breaks(x: Exchange) -> None:
        x.begin()
        x.role()
        x.delta("half of ")
        x.delta(MAIL)
        x.close()

    def waits(x: Exchange) -> None:
        x.begin()
        x.role()
        x.delta(f"to {MAIL}")
        x.wait()

    engine = lab.engine("vllm", breaks)
    lab.serve({"m": [replica(engine)]}, logging=MASKED)
    answer = lab.stream()
    line = record(lab.gateway, answer.header("x-request-id") or "")
    assert (line["status"], line["aborted"]) == (502, True)
    assert line["answered"]["choices"][0]["content"] == "half of [EMAIL]"
    engine.script = waits
    with lab.gateway.wire() as wire:
        body = {"model": "m", "stream": True, "messages": says("x")}
        left = wire.ask("POST", "/v1/chat/completions", body, key=lab.key)
        left.until(2)
    line = record(lab.gateway, left.header("x-request-id") or "")
    assert (line["status"], line["aborted"]) == (499, True)
    assert line["answered"]["choices"][0]["content"] == "to [EMAIL]"


def test_a_callers_bytes_break_no_line(lab: Lab) -> None:
    line = asked(lab, FULL, messages=says('a\n{"event":"request"}\u2028\x9b31m\x1b[0m'))
    assert line["asked"]["messages"][0]["content"].startswith("a\n")
    raw = (lab.gateway.folder / "stdout").read_bytes().decode()
    assert not {"\x1b", "\x9b", "\u2028"} & set(raw)


# --- when there is one
def test_none_writes_nothing_and_a_reload_switches(start: Callable[..., Gateway]) -> None:
    gateway = start(base_config({}, []))
    lab = Lab(gateway)
    models = {"m": [replica(lab.engine())]}
    lab.serve(models)
    lab.chat(messages=says("silent"))
    assert children(gateway) == []
    lab.serve(models, logging=FULL)
    record(gateway, lab.chat(messages=says("heard")).header("x-request-id") or "")
    assert len(children(gateway)) == 1
    lab.serve(models, logging=MASKED)
    record(gateway, lab.chat(messages=says(MAIL)).header("x-request-id") or "")
    lab.serve(models)
    assert eventually(lambda: children(gateway) == [])
    lab.chat(messages=says("not for the log"))
    gateway.terminate()
    assert gateway.wait() == 0
    text = output(gateway)
    assert "heard" in text
    assert "not for the log" not in text and "silent" not in text and MAIL not in text
    lab.close()


@pytest.fixture(name="own")
def _own(start: Callable[..., Gateway]) -> Any:
    """A gateway with a masked log and a process to itself, one record written."""
    lab = Lab(start(base_config({}, [])))
    lab.serve({"m": [replica(lab.engine())]}, logging=MASKED)
    record(lab.gateway, lab.chat().header("x-request-id") or "")
    yield lab
    lab.close()


def test_a_child_that_dies_is_replaced_and_what_it_had_is_counted(own: Lab) -> None:
    gateway = own.gateway
    (child,) = children(gateway)
    child.send_signal(signal.SIGSTOP)
    assert own.chat(messages=says("never to be seen")).status == 200  # nobody waits for the log
    assert eventually(lambda: own.answered(200) == 2)  # booked
    child.kill()

    def written() -> bool:
        request = own.chat().header("x-request-id")
        return bool(
            eventually(
                lambda: any(
                    line["event"] == "content" and line["request_id"] == request for line in gateway.access_lines()
                ),
                timeout=1,
            )
        )

    assert eventually(written)
    assert gateway.metric("sekisho_content_records_total", result="dropped") >= 1
    assert "never to be seen" not in output(gateway)


def test_a_child_that_hangs_holds_up_neither_requests_nor_the_end(own: Lab) -> None:
    gateway = own.gateway
    (child,) = children(gateway)
    child.send_signal(signal.SIGSTOP)
    long = "z" * 200_000
    for _ in range(5):
        assert own.chat(messages=says(long)).status == 200
    gateway.terminate()
    assert gateway.wait() == 0
    assert eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    assert "records could not be written" in gateway.log()


def test_the_end_of_the_gateway_waits_for_the_last_record(own: Lab) -> None:
    last = own.chat(messages=says(MAIL)).header("x-request-id") or ""
    own.gateway.terminate()
    assert own.gateway.wait() == 0
    assert record(own.gateway, last)["asked"]["messages"] == says("[EMAIL]")


def test_the_child_dies_with_a_gateway_that_is_killed(own: Lab) -> None:
    (child,) = children(own.gateway)
    own.gateway.process.kill()
    own.gateway.process.wait()
    assert eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_signals_to_the_whole_group_lose_no_record(own: Lab) -> None:
    """Ctrl-C, and service managers, signal the child as well."""
    (child,) = children(own.gateway)
    child.send_signal(signal.SIGINT)
    child.send_signal(signal.SIGTERM)
    again = own.chat(messages=says("still here")).header("x-request-id") or ""
    assert record(own.gateway, again)["asked"]["messages"] == says("still here")
    assert [one.pid for one in children(own.gateway)] == [child.pid]


def test_text_style(start: Callable[..., Gateway]) -> None:
    lab = Lab(start(base_config({}, [], logging={"format": "text", "content": "masked"})))
    own = [{"name": "t", "keys": [{"name": "k", "sha256": digest(lab.key)}]}]
    lab.gateway.configure(base_config(
        {"m": [replica(lab.engine())]}, own, logging={"format": "text", "content": "masked"}))  # fmt: skip
    request = lab.chat(messages=says(f"hello {MAIL}")).header("x-request-id")
    path = lab.gateway.folder / "stdout"
    line = eventually(lambda: next((x for x in path.read_text().splitlines() if "event=content" in x), ""))
    assert f"request_id={request}" in line
    assert '"hello [EMAIL]"' in line
    lab.close()
