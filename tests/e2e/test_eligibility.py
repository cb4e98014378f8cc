"""A model whose replicas differ: every request ends up where it can be answered, however busy the others are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.doubles.engine import Engine, Exchange
from tests.e2e.harness import Lab, chat, eventually, replica, together

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
PICTURE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
TOO_LONG = "This model's maximum context length is 8192 tokens. However, you requested 20000 tokens in the messages."


def prompt(words: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "four" * words}]


class Mixed:
    """GGUF on llama-server with a window of 8k, vLLM with 32k, and mlx_lm, which has neither forms nor pictures."""

    def __init__(self, lab: Lab, *, policy: str = "round_robin", **options: Any) -> None:
        self.gguf, self.vllm, self.mlx = lab.engine("llama_server"), lab.engine("vllm"), lab.engine()
        given: dict[Engine, dict[str, Any]] = {
            self.gguf: {"context_length": 8192, "format": "gguf", "capabilities": ["chat"]},
            self.vllm: {"context_length": 32768, "format": "safetensors", "capabilities": ["tools", "vision"]},
            self.mlx: {"context_length": 32768, "backend": "mlx_lm", "capabilities": ["chat"]},
        }
        replicas = [replica(engine, **more, **options) for engine, more in given.items()]
        lab.serve({"m": {"policy": policy, "replicas": replicas, "queue": {"max_waiting": 100, "max_wait": "20s"}}})

    def counts(self) -> tuple[int, int, int]:
        return len(self.gguf.requests), len(self.vllm.requests), len(self.mlx.requests)


REQUESTS: dict[str, dict[str, Any]] = {
    "tools": {"tools": TOOLS}, "pictures": {"messages": PICTURE}, "long and with tools": {"messages": prompt(9000)}
    | {"tools": TOOLS},
}  # fmt: skip


@pytest.mark.parametrize("policy", ["least_load", "power_of_two", "round_robin", "weighted"])
def test_what_only_one_can_do_goes_to_that_one_by_every_policy(lab: Lab, policy: str) -> None:
    mixed = Mixed(lab, policy=policy)
    for number, body in enumerate(REQUESTS.values(), start=1):
        assert lab.call(chat(**body)).status == 200 and mixed.counts() == (0, number, 0)


def test_forms_go_to_either_of_the_two_that_have_them_and_long_prompts_to_the_two_with_room(lab: Lab) -> None:
    mixed = Mixed(lab)
    assert {lab.chat(response_format=FORM).status for _ in range(6)} == {200} and mixed.counts() == (3, 3, 0)
    assert {lab.call(chat(messages=prompt(9000))).status for _ in range(6)} == {200} and mixed.counts() == (3, 6, 3)


def test_requests_for_some_do_not_disturb_the_turns_of_those_for_all(lab: Lab) -> None:
    """Turns that were shared would send every second request of a pair to the same replicas again and again."""
    mixed = Mixed(lab)
    for _ in range(6):
        assert lab.chat().status == 200 and lab.chat(response_format=FORM).status == 200
    plain = [sum(b"response_format" not in request.body for request in engine.requests)
             for engine in (mixed.gguf, mixed.vllm, mixed.mlx)]  # fmt: skip
    assert plain == [2, 2, 2] and mixed.counts() == (5, 5, 2)


def test_under_load_they_wait_for_the_one_that_can_and_fail_on_no_other(lab: Lab) -> None:
    mixed = Mixed(lab, policy="least_load", max_inflight=1)
    go = threading.Event()

    def waits(x: Exchange) -> None:
        x.wait(go)
        x.reply(x.dialect.completion())

    mixed.vllm.script = waits
    jobs = [lambda: lab.chat(tools=TOOLS)] * 6 + [lambda: lab.chat()] * 6

    def open_the_gate() -> Any:
        assert eventually(lambda: mixed.vllm.running == 1 and lab.gateway.metric("sekisho_queue_depth", model="m") >= 5)
        go.set()
        return lab.chat()

    assert {answer.status for answer in together([*jobs, open_the_gate])} == {200}
    assert sum(b'"tools"' in request.body for request in mixed.vllm.requests) == 6
    assert not any(b'"tools"' in request.body for request in mixed.gguf.requests + mixed.mlx.requests)


def test_a_second_try_goes_to_one_that_can_too(lab: Lab) -> None:
    mixed = Mixed(lab)
    mixed.vllm.script = lambda x: x.fail("a bug", 500)
    answer = lab.chat(tools=TOOLS)
    assert answer.status == 502 and mixed.counts() == (0, 1, 0)
    assert lab.chat(response_format=FORM).status == 200  # the other one of the two that can


def test_what_nobody_can_do_is_a_400_that_says_so_and_reaches_no_engine(lab: Lab) -> None:
    one, other = lab.engine(), lab.engine("llama_server")
    lab.serve({"m": [replica(one, backend="mlx_lm"), replica(other, capabilities=["chat"])]})
    answer = lab.call(chat(messages=PICTURE))
    error = answer.error()
    assert (answer.status, error["code"], error["param"]) == (400, "unsupported_value", "messages")
    assert "tools" in error["message"] and "vision" not in error["message"]
    assert not one.requests and not other.requests


def test_while_the_one_that_can_is_away_it_is_a_503(lab: Lab) -> None:
    mixed = Mixed(lab)
    mixed.vllm.stop()
    assert eventually(lambda: lab.chat(tools=TOOLS).status == 503)
    assert lab.chat().status == 200 and not any(b'"tools"' in request.body for request in mixed.gguf.requests)


def test_what_one_cannot_do_the_fallback_model_may(lab: Lab) -> None:
    small, large = lab.engine(), lab.engine()
    lab.serve({"m": {"replicas": [replica(small, backend="mlx_lm")], "fallbacks": ["big"]}, "big": [replica(large)]})
    assert lab.chat(response_format=FORM).status == 200 and (len(small.requests), len(large.requests)) == (0, 1)


# --- windows
def windows(lab: Lab, *lengths: int | None) -> list[Engine]:
    engines = [lab.engine() for _ in lengths]
    given = [{} if length is None else {"context_length": length} for length in lengths]
    replicas = [replica(engine, **more) for engine, more in zip(engines, given, strict=True)]
    lab.serve({"m": {"policy": "round_robin", "replicas": replicas}})
    return engines


def test_the_engines_own_word_on_its_window_is_heeded(lab: Lab) -> None:
    small, large = engines = lab.engine(), lab.engine()
    for engine, length in zip(engines, (2048, 32768), strict=True):
        engine.probe = _with_window(engine, length)
    lab.serve({"m": {"policy": "round_robin", "replicas": [replica(engine) for engine in engines]}})
    assert eventually(lambda: _goes_to(lab, large, prompt(3000)) and _goes_to(lab, large, prompt(3000)))
    before = len(small.requests)
    assert {lab.chat().status for _ in range(4)} == {200} and len(small.requests) == before + 2


def _with_window(engine: Engine, length: int) -> Callable[[Exchange], None]:
    listing = engine.dialect.models(engine.models)
    listing["data"][0]["max_model_len"] = length
    return lambda x: x.reply(listing)


def _goes_to(lab: Lab, engine: Engine, messages: list[dict[str, Any]]) -> bool:
    before = len(engine.requests)
    assert lab.call(chat(messages=messages)).status == 200
    return len(engine.requests) == before + 1


def test_what_seems_too_long_for_all_is_for_the_engine_with_the_longest_window_to_say(lab: Lab) -> None:
    small, large = windows(lab, 4096, 8192)
    assert lab.call(chat(messages=prompt(20_000))).status == 200  # it has counted, and it fits
    large.script = lambda x: x.fail(TOO_LONG, 400)
    answer = lab.call(chat(messages=prompt(20_000)))
    assert (answer.status, answer.error()["code"]) == (400, "context_length_exceeded")
    assert len(large.requests) == 2 and not small.requests


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_an_engine_that_counts_more_than_was_guessed_is_followed_by_one_with_more_room(
    lab: Lab, stream: bool
) -> None:
    engines = windows(lab, 8192, 8192, 32768)
    for engine in engines[:2]:
        engine.script = lambda x: x.fail(TOO_LONG, 400)
    answers = [lab.call(chat(messages=prompt(3000), stream=stream)) for _ in range(3)]
    assert [answer.status for answer in answers] == [200] * 3 and len(engines[2].requests) == 3
    assert [len(engine.requests) for engine in engines[:2]] == [1, 1]  # never both: the other has no more room
    assert all(entry["failures_in_a_row"] == 0 for entry in lab.gateway.replicas())


def test_those_with_no_more_room_than_the_one_that_refused_are_left_out(lab: Lab) -> None:
    engines = windows(lab, 8192, 8000, 32768)
    for engine in engines[:2]:
        engine.script = lambda x: x.fail(TOO_LONG, 400)
    answer = lab.call(chat(messages=prompt(3000)))
    assert answer.status == 200 and answer.header("x-sekisho-attempts") == "2"
    assert [len(engine.requests) for engine in engines] == [1, 0, 1]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_an_engine_that_refuses_what_nobody_knew_of_it_is_followed_by_one_of_another_kind(
    lab: Lab, stream: bool
) -> None:
    text, able = lab.engine("llama_server"), lab.engine("vllm")
    text.script = lambda x: x.fail("image input is not supported - hint: you may need to provide the mmproj", 500)
    lab.serve({"m": {"policy": "round_robin", "replicas": [replica(text), replica(able)]}})
    assert [lab.call(chat(messages=PICTURE, stream=stream)).status for _ in range(4)] == [200] * 4
    assert len(text.requests) == 2 and len(able.requests) == 4
    assert all(entry["failures_in_a_row"] == 0 for entry in lab.gateway.replicas())


def test_with_the_last_of_the_kinds_a_refusal_is_the_callers(lab: Lab) -> None:
    small, large = windows(lab, 8192, 32768)
    small.script = large.script = lambda x: x.fail(TOO_LONG, 400)
    for _ in range(2):
        answer = lab.call(chat(messages=prompt(3000)))
        assert (answer.status, answer.error()["code"]) == (400, "context_length_exceeded")
    assert len(small.requests) == 1 and len(large.requests) == 2


def test_where_all_are_of_one_kind_a_refusal_is_not_tried_elsewhere(lab: Lab) -> None:
    engines = windows(lab, None, None)
    for engine in engines:
        engine.script = lambda x: x.fail(TOO_LONG, 400)
    assert lab.call(chat(messages=prompt(3000))).status == 400 and sum(len(e.requests) for e in engines) == 1
