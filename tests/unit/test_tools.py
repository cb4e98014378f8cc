"""Tool policy: what requests may offer, what answers may call, for every way a stream can be cut and an engine can
make pieces of a call."""

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import load
from backends.base import Operation
from gateway.answers import read_answer
from gateway.call import Call, parse_call
from gateway.config.access import ToolsConfig
from gateway.errors import BadRequest, ToolCallNotAllowed, ToolNotAllowed
from gateway.sse import DONE, StreamTap
from gateway.tools import allows, compile_policy
from gateway.tools.offers import MOST_TOOLS, _says_all_once, admit
from gateway.tools.tap import FixingToolTap, Screening, ToolTap, mentions_calls, tap_for
from gateway.types import ToolPolicy, Usage
from tests.doubles.dialects import USAGE
from tests.unit.test_hot_path import TAP_CALLS, calls, chunk

SECRET = "rm_minus_rf"  # a name that never may get out, and arguments that never may
PAYLOAD = "THE-PAYLOAD"


def policy(**given: Any) -> ToolPolicy:
    made = compile_policy(ToolsConfig.model_validate(given))
    assert made is not None
    return made


REFUSE, STRIP = policy(deny=["rm_*"]), policy(deny=["rm_*"], on_violation="strip")


def function(name: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}} | more}


def ask(given: ToolPolicy, raw: bytes | None = None, **fields: Any) -> Call:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]} | fields
    call = parse_call(Operation.CHAT, raw or json.dumps(body).encode())
    admit(call, given)
    assert orjson.loads(call.raw) == call.body  # what is forwarded is what was read
    return call


def refused(given: ToolPolicy, **fields: Any) -> tuple[str | None, str]:
    """`param` and message of the 403."""
    with pytest.raises(ToolNotAllowed) as raised:
        ask(given, **fields)
    assert (raised.value.status, raised.value.code) == (403, "tool_not_allowed")
    return raised.value.param, raised.value.message


# --- the policy
def test_a_policy_that_lets_everything_pass_is_none() -> None:
    assert compile_policy(ToolsConfig()) is None
    assert compile_policy(ToolsConfig.model_validate({"allow": ["a", "*"], "on_violation": "strip"})) is None
    for narrow in ({"allow": []}, {"deny": ["x"]}, {"types": ["function"]}):
        assert compile_policy(ToolsConfig.model_validate(narrow)) is not None


@pytest.mark.parametrize(
    ("given", "kind", "name", "allowed"),
    [
        ({"allow": ["get_*"]}, "function", "get_weather", True),
        ({"allow": ["get_*"]}, "function", "Get_weather", False),
        ({"allow": ["get_*"]}, "function", " get_weather", False),
        ({"allow": ["*"], "deny": ["get_*"]}, "function", "get_weather", False),
        ({"allow": ["get_*"], "deny": ["get_secret"]}, "custom", "get_secret", False),
        ({"types": ["function"]}, "custom", "x", False),
        ({"types": ["function"]}, "web_search", "", False),
        ({"allow": ["get_*"]}, "web_search", "", False),  # a tool without a name goes by its type
        ({"allow": ["get_*", "web_search"]}, "web_search", "", True),
        ({"deny": ["code_interpreter"]}, "code_interpreter", "", False),
        ({"deny": ["x"]}, "function", "", False),
        ({"deny": ["x"]}, "function", "y" * 257, False),
        ({"deny": ["x"]}, "function", None, False),
        ({"deny": ["x"]}, 5, "y", False),
    ],
)
def test_what_a_policy_allows(given: dict[str, Any], kind: Any, name: Any, allowed: bool) -> None:
    assert allows(policy(**given), kind, [] if name == "" and kind not in ("function", "custom") else [name]) == allowed


# --- requests
FORBIDDEN = function(SECRET)
FINE = function("get_weather")
OFFERS: list[tuple[dict[str, Any], str]] = [
    ({"tools": [FINE, FINE | function("b"), FORBIDDEN]}, "tools[2]"),
    ({"tools": [{"function": {"name": SECRET}}]}, "tools[0]"),
    ({"tools": [{"type": "function", "name": SECRET}]}, "tools[0]"),
    ({"tools": [{"type": "custom", "custom": {"name": SECRET}}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": "fine"}, "custom": {"name": SECRET}}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": "fine"}, "name": SECRET}]}, "tools[0]"),
    ({"tools": [{"type": "odd", "odd": {"name": SECRET}}]}, "tools[0]"),
    ({"tools": [{"type": "rm_all"}]}, "tools[0]"),
    ({"functions": [{"name": "fine"}, {"name": SECRET}]}, "functions[1]"),
    (
        {"messages": [{"role": "user", "content": "x"}, {"role": "developer", "tools": [FORBIDDEN]}]},
        "messages[1].tools[0]",
    ),
    ({"chat_template_kwargs": {"tools": [FORBIDDEN]}}, "chat_template_kwargs.tools"),
    ({"chat_template_kwargs": {"custom_tools": "text"}}, "chat_template_kwargs.custom_tools"),
    ({"template_vars": {"builtin_functions": {"a": 1}}}, "template_vars.builtin_functions"),
]


@pytest.mark.parametrize(("fields", "param"), OFFERS)
def test_a_forbidden_offer_is_a_403_that_names_it(fields: dict[str, Any], param: str) -> None:
    found, message = refused(REFUSE, **fields)
    assert found == param and ("rm_" in message or param in message)


@pytest.mark.parametrize(("fields", "param"), OFFERS)
def test_or_it_is_taken_out(fields: dict[str, Any], param: str) -> None:
    call = ask(STRIP, **fields)
    assert call.withheld == 1 and call.tools is STRIP
    for hidden in (b"rm_", b"custom_tools", b"builtin_functions"):
        assert hidden not in call.raw
    if param == "tools[2]":
        assert [tool["function"]["name"] for tool in call.body["tools"]] == ["get_weather", "b"]


def test_types_are_refused_by_name() -> None:
    given = policy(types=["function"])
    assert refused(given, tools=[FINE, {"type": "mcp", "server_url": "https://x"}])[0] == "tools[1]"
    assert "'web_search'" in refused(given, web_search_options={})[1]
    call = ask(policy(types=["function"], on_violation="strip"), web_search_options={"a": 1}, tools=[FINE])
    assert call.body["tools"] == [FINE] and "web_search_options" not in call.body


def test_with_the_last_tool_go_the_fields_that_speak_of_it() -> None:
    call = ask(STRIP, tools=[FORBIDDEN], tool_choice="auto", parallel_tool_calls=True, seed=1)
    assert sorted(call.body) == ["messages", "model", "seed"]
    call = ask(STRIP, functions=[{"name": SECRET}], function_call="auto", parallel_tool_calls=True)
    assert sorted(call.body) == ["messages", "model", "parallel_tool_calls"]
    assert ask(STRIP, tools=[], tool_choice="auto").body["tools"] == []  # nothing was taken out


CHOICES = [
    {"type": "function", "function": {"name": SECRET}},
    {"type": "function", "name": SECRET},
    {"type": "custom", "custom": {"name": SECRET}},
    {"type": "rm_all"},
    SECRET,
]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("given", [REFUSE, STRIP])
def test_a_choice_that_demands_a_forbidden_tool_cannot_be_honoured(given: ToolPolicy, choice: Any) -> None:
    assert refused(given, tools=[FINE], tool_choice=choice)[0] == "tool_choice"


@pytest.mark.parametrize("given", [REFUSE, STRIP])
def test_nor_can_other_demands_for_what_is_gone(given: ToolPolicy) -> None:
    assert refused(given, functions=[{"name": "f"}], function_call={"name": SECRET})[0] == "function_call"
    for forced in ("required", "any", {"type": "required"}):
        param, _ = refused(given, tools=[FORBIDDEN], tool_choice=forced)
        assert param == ("tool_choice" if given is STRIP else "tools[0]")
    subset = {"mode": "required", "tools": [FORBIDDEN]}
    for choice in ({"type": "allowed_tools", "allowed_tools": subset}, {"type": "allowed_tools", **subset}):
        refused(given, tools=[FINE], tool_choice=choice)


def test_a_choice_among_some_loses_the_forbidden_ones() -> None:
    def choose(*tools: Any, mode: str = "auto") -> Any:
        chosen = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}
        call = ask(STRIP, tools=[FINE, FORBIDDEN], tool_choice=chosen)
        assert call.withheld == 1
        return call.body["tool_choice"]

    left = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [FINE]}}
    assert choose(FINE, FORBIDDEN, mode="required") == left
    assert choose(FORBIDDEN) == "none"


def test_what_is_allowed_passes() -> None:
    fields = {
        "tools": [FINE, {"type": "custom", "custom": {"name": "c"}}],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "functions": [{"name": "f"}],
        "function_call": {"name": "f"},
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"enable_thinking": False, "tools_in_user_message": True, "tools": None},
    }
    call = ask(REFUSE, **fields)
    assert call.withheld == 0 and {name: call.body[name] for name in fields} == fields
    for choice in ("none", "auto", "required", {"type": "auto"}):
        ask(REFUSE, tools=[FINE], tool_choice=choice)


def test_calls_of_earlier_turns_are_history() -> None:
    called = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": SECRET}}]}
    raw = json.dumps({"model": "m", "messages": [called, {"role": "tool", "tool_call_id": "1", "content": "x"}]})
    call = ask(REFUSE, raw.encode())
    assert call.raw == raw.encode()


def test_other_operations_and_bodies_without_offers_keep_their_bytes() -> None:
    raw = b'{ "model":"m","messages":[{"role":"user","content":"tools"}], "x":1.0e2 }'
    assert ask(REFUSE, raw).raw is raw


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [FINE] * 2}, "tools[1]"),
        ({"tools": [function(None)]}, "tools[0]"),
        ({"tools": [function(["x"])]}, "tools[0]"),
        ({"tools": [function("")]}, "tools[0]"),
        ({"tools": [function("x" * 257)]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": "x"}]}, "tools[0].function"),
        ({"tools": [{"type": ["function"]}]}, "tools[0].type"),
        ({"tools": [{"type": "x" * 300}]}, "tools[0].type"),
        ({"tools": [function(str(number)) for number in range(MOST_TOOLS + 1)]}, "tools"),
        ({"functions": [{"name": 5}]}, "functions[0]"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools"),
        ({"Tools": [FORBIDDEN]}, "Tools"),
        ({"tool\u017f": [FORBIDDEN]}, "tool\u017f"),  # a long s: to some parsers an s
        ({"tools": [{"type": "function", "function": {"name": "fine", "Name": SECRET}}]}, "tools[0].Name"),
        (
            {"tools": [{"type": "function", "Function": {"name": SECRET}, "function": {"name": "x"}}]},
            "tools[0].Function",
        ),
    ],
)
@pytest.mark.parametrize("given", [REFUSE, STRIP])
def test_offers_that_cannot_be_read_are_a_400(given: ToolPolicy, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as raised:
        ask(given, **fields)
    assert raised.value.param == param


def test_of_two_equal_keys_only_the_one_that_was_checked_goes_on() -> None:
    raw = (
        b'{"model":"m","messages":[{}],"tools":[{"type":"function","function":{"name":"%b","name":"fine"}}]}'
        % SECRET.encode()
    )
    assert SECRET.encode() not in ask(REFUSE, raw).raw


def test_of_two_equal_keys_in_a_message_too() -> None:
    raw = (
        b'{"model":"m","messages":[{"role":"developer","tools":[{"type":"function","function":{"name":"%b"}}],"tools":[]}]}'
        % SECRET.encode()
    )
    assert SECRET.encode() not in ask(REFUSE, raw).raw


def test_what_is_allowed_keeps_its_bytes() -> None:
    messages = b'[{"content":"\\u65e5 \\" \xe6\x97\xa5"}]'
    raw = b'{"model":"m", "messages":%b,"tools":[ {"function" :{"name":"fine","x":1.0e2}}]}' % messages
    assert ask(REFUSE, raw).raw is raw


class Pairs(list[Any]):
    """An object as a list of pairs, so that it can have equal keys."""


KEYS = st.sampled_from(["a", "name", 'q"'])
PAIRS = st.recursive(
    st.sampled_from([1, '"', "\\u0022", "x"]),
    lambda inner: st.lists(inner, max_size=2) | st.lists(st.tuples(KEYS, inner), max_size=3).map(Pairs),
    max_leaves=6,
)


def _written(value: Any, escape: bool) -> str:
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{_written(key, escape)}:{_written(one, escape)}" for key, one in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_written(one, escape) for one in value) + "]"
    text = json.dumps(value)
    return text[0] + text[1:-1].replace('\\"', "\\u0022") + text[-1] if escape and isinstance(value, str) else text


def _keys(value: Any) -> int:
    if isinstance(value, dict):
        return len(value) + sum(map(_keys, value.values()))
    if isinstance(value, Pairs):
        return len(value) + sum(_keys(one) for _, one in value)
    return sum(map(_keys, value)) if isinstance(value, list) else 0


@given(PAIRS, st.booleans())
@settings(max_examples=500)
def test_equal_keys_are_noticed_wherever_they_are(value: Any, escape: bool) -> None:
    raw = b'{"x":%b}' % _written(value, escape).encode()
    body = orjson.loads(raw)
    if _keys(body) != _keys(value) + 1:
        assert not _says_all_once(raw, body)
    elif not escape and b"u0022" not in raw:
        assert _says_all_once(raw, body)


NAMES = st.sampled_from(["get_a", "get_b", "rm_a", "Rm_a", "rm_", "x"])
TOOLS = st.lists(NAMES, unique=True, max_size=5)


@given(TOOLS, st.sampled_from([None, "auto", "none", "required"]))
def test_what_is_left_of_a_request_is_what_is_allowed_in_order(names: list[str], choice: str | None) -> None:
    fields: dict[str, Any] = {"tools": [function(name) for name in names]} | ({"tool_choice": choice} if choice else {})
    left = [name for name in names if not name.startswith("rm_")]
    if names and not left and choice == "required":
        refused(STRIP, **fields)
        return
    call = ask(STRIP, **fields)
    assert [tool["function"]["name"] for tool in call.body.get("tools", [])] == left
    assert call.withheld == len(names) - len(left)
    assert ("tool_choice" in call.body) == bool(choice and (left or not names))
    if call.withheld:
        refused(REFUSE, **fields)
    else:
        assert ask(REFUSE, **fields).body == call.body


# --- whole answers
def called(name: Any, arguments: Any = PAYLOAD, **more: Any) -> dict[str, Any]:
    return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}} | more


def answer_of(given: ToolPolicy, *messages: dict[str, Any], finish: str = "tool_calls", **more: Any) -> Any:
    choices = [
        {"index": number, "message": {"role": "assistant", "content": None} | message, "finish_reason": finish} | more
        for number, message in enumerate(messages)
    ]
    document = {"id": "c", "model": "engine", "choices": choices, "usage": USAGE}
    return read_answer(ask(given), json.dumps(document).encode())


FORBIDDEN_MESSAGES: list[dict[str, Any]] = [
    {"tool_calls": [called(SECRET)]},
    {"tool_calls": [called(SECRET, type=None)]},
    {"tool_calls": [{"id": "1", "type": "custom", "custom": {"name": SECRET, "input": PAYLOAD}}]},
    {"tool_calls": [{"id": "1", "type": "function", "name": SECRET, "arguments": PAYLOAD}]},
    {"tool_calls": [called("fine", custom={"name": SECRET, "input": PAYLOAD})]},
    {"tool_calls": [called(None)]},
    {"tool_calls": [called("")]},
    {"tool_calls": [{"id": "1", "function": PAYLOAD}]},
    {"tool_calls": [PAYLOAD]},
    {"tool_calls": {"0": PAYLOAD}},
    {"function_call": {"name": SECRET, "arguments": PAYLOAD}},
    {"function_call": {"arguments": PAYLOAD}},
    {"function_call": PAYLOAD},
]


@pytest.mark.parametrize("message", FORBIDDEN_MESSAGES)
def test_a_forbidden_call_is_an_error_or_is_taken_out(message: dict[str, Any]) -> None:
    answer = answer_of(REFUSE, {"content": "hi"}, message)
    assert isinstance(answer.error, ToolCallNotAllowed) and answer.body == b""
    assert answer.usage == Usage(USAGE["prompt_tokens"], USAGE["completion_tokens"])

    answer = answer_of(STRIP, message, logprobs={"content": [{"token": PAYLOAD}]}, token_ids=[1, 2])
    (choice,) = json.loads(answer.body)["choices"]
    assert answer.stripped == 1 and SECRET.encode() not in answer.body and PAYLOAD.encode() not in answer.body
    assert choice["message"] == {"role": "assistant", "content": ""} and choice["finish_reason"] == "stop"
    assert choice["logprobs"] is choice["token_ids"] is None


def test_the_calls_that_are_left_stay_as_they_are() -> None:
    calls_ = [called("a"), called(SECRET, "{}"), called("b")]
    answer = answer_of(STRIP, {"tool_calls": calls_}, {"content": "hi"})
    document = json.loads(answer.body)
    assert answer.stripped == 1 and document["model"] == "m" and document["usage"] == USAGE
    first, second = document["choices"]
    assert first["message"] == {"role": "assistant", "content": None, "tool_calls": [calls_[0], calls_[2]]}
    assert first["finish_reason"] == "tool_calls" and second["message"]["content"] == "hi"


def test_an_answer_without_forbidden_calls_is_the_engines_own_bytes() -> None:
    choice = {"message": {"content": None, "tool_calls": [called("a")]}, "finish_reason": "tool_calls"}
    body = json.dumps({"choices": [choice]}, indent=1).encode()
    assert read_answer(ask(REFUSE), body).body is body


# --- streams
def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


def piece(delta: Any, *, index: int = 0, finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish} | more
    return {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "engine", "choices": [choice]}


def tap_of(given: ToolPolicy, engine: str = "openai_compatible") -> StreamTap:
    backend = load(engine)
    fixer = backend.stream_fixer(Operation.CHAT) if Operation.CHAT in backend.fixes else None
    return tap_for(given, backend, fixer, "asked", strip_usage=True, max_event=1 << 20)


def pass_through(tap: StreamTap, parts: Iterable[bytes]) -> bytes:
    out = b"".join([tap.feed(part) for part in parts])
    return out + tap.end()


def client(out: bytes) -> dict[int, dict[str, Any]]:
    """What a client makes of a stream, as the openai package accumulates it: texts of one index are joined."""
    found: dict[int, dict[str, Any]] = {}
    for block in out.split(b"\n\n"):
        if not block.startswith(b"data: {"):
            continue
        document = json.loads(block[6:])
        assert document["model"] == "asked"
        for choice in document["choices"]:
            seen = found.setdefault(choice["index"], {"text": "", "calls": {}, "function": {}, "finish": None})
            delta = choice["delta"]
            seen["text"] += delta.get("content") or ""
            seen["finish"] = choice["finish_reason"] or seen["finish"]
            for call in delta.get("tool_calls") or ():
                _join(seen["calls"].setdefault(call["index"], {}), call)
            if delta.get("function_call"):
                _join(seen["function"], delta["function_call"])
    return found


def _join(known: dict[str, Any], given: dict[str, Any]) -> None:
    for key, value in given.items():
        if isinstance(value, dict):
            _join(known.setdefault(key, {}), value)
        elif isinstance(value, str) and key != "type":
            known[key] = known.get(key, "") + value
        elif value is not None:
            known[key] = value


def tool(index: int | None, name: str | None = None, arguments: Any = None, **more: Any) -> dict[str, Any]:
    inner = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    number = {} if index is None else {"index": index}
    return number | ({"function": inner} if inner else {}) | more


def stream(*deltas: Any, finish: str | None = "tool_calls") -> bytes:
    chunks = [piece({"role": "assistant", "content": ""}), *(piece(delta) for delta in deltas)]
    ends = [piece({}, finish=finish)] if finish else []
    return b"".join(map(event, [*chunks, *ends])) + DONE


def result(given: ToolPolicy, *deltas: Any, finish: str = "tool_calls") -> dict[str, Any]:
    tap = tap_of(given)
    out = pass_through(tap, [stream(*deltas, finish=finish)])
    assert tap.failure is None and out.endswith(DONE)
    return client(out)[0]


def test_a_call_that_is_allowed_reaches_the_client_whole() -> None:
    pieces = [tool(0, "get", "", id="a", type="function"), tool(0, None, "{"), tool(0, None, "}")]
    seen = result(REFUSE, *({"tool_calls": [one]} for one in pieces))
    assert seen["calls"] == {
        0: {"index": 0, "id": "a", "type": "function", "function": {"name": "get", "arguments": "{}"}}
    }
    assert seen["finish"] == "tool_calls"


WAYS: dict[str, list[dict[str, Any]]] = {
    "whole": [tool(0, SECRET, PAYLOAD, id="a")],
    "fragments": [tool(0, SECRET, "", id="a"), tool(0, None, PAYLOAD)],
    "name in parts": [tool(0, "rm_mi", id="a"), tool(0, "nus_rf", ""), tool(0, None, PAYLOAD)],
    "name with the arguments": [tool(0, id="a", type="function"), tool(0, SECRET, PAYLOAD)],
    "no arguments": [tool(0, SECRET, "", id="a")],
    "no index": [tool(None, SECRET, "", id="a"), tool(None, None, PAYLOAD)],
    "arguments first": [tool(0, None, PAYLOAD, id="a"), tool(0, SECRET)],
    "as an object": [tool(0, SECRET, {"x": PAYLOAD}, id="a")],
    "custom": [
        {"index": 0, "type": "custom", "custom": {"name": SECRET, "input": ""}},
        {"index": 0, "custom": {"input": PAYLOAD}},
    ],
    "flat": [{"index": 0, "name": SECRET, "arguments": PAYLOAD}],
    "both": [tool(0, "get", "", custom={"name": SECRET, "input": PAYLOAD})],
    "both in turn": [tool(0, "get", id="a"), {"index": 0, "custom": {"name": SECRET, "input": PAYLOAD}}],
    "name in a list": [{"index": 0, "function": {"name": [SECRET], "arguments": PAYLOAD}}],
    "no object": [PAYLOAD, [PAYLOAD]],  # type: ignore[list-item]
    "repeated": [tool(0, SECRET, "", id="a"), tool(0, SECRET, PAYLOAD)],
    "too long": [tool(0, "x" * 300 + SECRET, PAYLOAD)],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("together", [True, False])
def test_no_way_to_send_a_forbidden_call_gets_it_through(way: str, together: bool) -> None:
    pieces = WAYS[way]
    deltas = [{"tool_calls": pieces}] if together else [{"tool_calls": [one]} for one in pieces]
    body = stream({"content": "hi"}, *deltas)
    tap = tap_of(STRIP)
    out = pass_through(tap, [body])
    assert SECRET.encode() not in out and PAYLOAD.encode() not in out and b"rm_" not in out
    assert client(out)[0] == {"text": "hi", "calls": {}, "function": {}, "finish": "stop"} and out.endswith(DONE)
    assert tap.complete and tap.failure is None

    tap = tap_of(REFUSE)
    out = pass_through(tap, [body])
    assert isinstance(tap.error(), ToolCallNotAllowed) and not tap.complete
    assert out == pass_through(tap_of(REFUSE), [stream({"content": "hi"}, finish=None)])[: len(out)]
    assert client(out)[0]["text"] == "hi" and b"tool_calls" not in out


def test_the_old_form_of_calls() -> None:
    parts = [{"name": SECRET, "arguments": ""}, {"arguments": PAYLOAD}]
    seen = result(STRIP, *({"function_call": one} for one in parts), finish="function_call")
    assert seen == {"text": "", "calls": {}, "function": {}, "finish": "stop"}
    parts = [{"name": "get", "arguments": ""}, {"arguments": "{"}, {"arguments": "}"}]
    seen = result(STRIP, *({"function_call": one} for one in parts), finish="function_call")
    assert seen["function"] == {"name": "get", "arguments": "{}"} and seen["finish"] == "function_call"
    seen = result(
        STRIP,
        {"function_call": {"name": "get", "arguments": "{}"}},
        {"function_call": {"name": "put", "arguments": "{}"}},
        finish="function_call",
    )
    assert seen["function"] == {"name": "get", "arguments": "{}"}  # there is no place for two


def test_calls_that_are_left_are_numbered_anew() -> None:
    begun = [tool(0, "a", "", id="0"), tool(1, SECRET, "", id="1"), tool(2, "b", "", id="2")]
    rest = [tool(index, None, text) for text in ("{", "}") for index in range(3)]
    seen = result(STRIP, *({"tool_calls": [one]} for one in [*begun, *rest]))
    assert [(index, call["id"], call["function"]) for index, call in seen["calls"].items()] == [
        (0, "0", {"name": "a", "arguments": "{}"}),
        (1, "2", {"name": "b", "arguments": "{}"}),
    ]


def test_engines_that_number_every_call_0_or_none_are_understood() -> None:
    for index in (0, None):
        seen = result(STRIP, *({"tool_calls": [tool(index, name, "{}", id=name)]} for name in ("a", SECRET, "b")))
        assert [call["function"]["name"] for call in seen["calls"].values()] == ["a", "b"]


def test_a_name_that_an_engine_repeats_is_told_once() -> None:
    seen = result(REFUSE, *({"tool_calls": [tool(0, "get", text)]} for text in ("", "{", "}")))
    assert seen["calls"][0]["function"] == {"name": "get", "arguments": "{}"}


def test_text_goes_on_at_once_while_a_call_is_held() -> None:
    tap = tap_of(REFUSE)
    tap.feed(event(piece({"role": "assistant"})))
    assert tap.feed(event(piece({"tool_calls": [tool(0, "get", "", id="a")]}))) == b""
    held = tap.feed(event(piece({"content": "meanwhile", "tool_calls": [tool(0, None, "")]})))
    assert b"meanwhile" in held and b"get" not in held
    assert b"later" in tap.feed(event(piece({"content": "later"})))
    assert b'"name":"get"' in tap.feed(event(piece({"tool_calls": [tool(0, None, "{}")]})))


def test_a_call_that_never_ends_is_never_delivered() -> None:
    tap = tap_of(REFUSE)
    out = pass_through(tap, [event(piece({"tool_calls": [tool(0, "get", "", id="a")]}))])
    assert out == b"" and not tap.complete


def test_other_choices_and_usage_are_left_alone() -> None:
    chunks = [piece({"role": "assistant"}, index=index) for index in range(2)]
    both = piece({"tool_calls": [tool(0, SECRET, PAYLOAD)]})
    both["choices"] += piece({"content": "hi"}, index=1)["choices"]
    ends = [piece({}, finish="tool_calls"), piece({}, index=1, finish="length")]
    usage = piece({}) | {"choices": [], "usage": USAGE}
    for strip in (True, False):
        tap = ToolTap(STRIP, "asked", strip_usage=strip, max_event=1 << 20)
        out = pass_through(tap, [b"".join(map(event, [*chunks, both, *ends, usage])) + DONE])
        seen = client(out)
        assert (seen[0]["finish"], seen[1]["finish"], seen[1]["text"]) == ("stop", "length", "hi")
        assert tap.usage == Usage(USAGE["prompt_tokens"], USAGE["completion_tokens"])
        assert (b"prompt_tokens" in out) == (not strip)


def test_running_usage_of_a_chunk_that_lost_its_call_is_kept() -> None:
    running = {"usage": USAGE}
    tap = tap_of(STRIP)
    out = tap.feed(event(piece({"tool_calls": [tool(0, SECRET, PAYLOAD)]}) | running))
    assert json.loads(out[6:])["usage"] == USAGE and PAYLOAD.encode() not in out


def test_logprobs_go_with_their_call() -> None:
    def logged(text: str) -> dict[str, Any]:
        return {"logprobs": {"content": [{"token": text}]}, "token_ids": [len(text)]}

    def told(name: str, given: ToolPolicy) -> list[str]:
        tap = tap_of(given)
        out = pass_through(
            tap,
            [
                event(piece({"content": "hi"}, **logged("hi"))),
                event(piece({"tool_calls": [tool(0, name, "", id="a")]}, **logged("NAME"))),
                event(piece({"tool_calls": [tool(0, None, "{}")]}, **logged("BODY"))),
                event(piece({}, finish="tool_calls")),
                DONE,
            ],
        )
        found = [json.loads(block[6:]) for block in out.split(b"\n\n") if block.startswith(b"data: {")]
        return [
            entry["token"]
            for one in found
            for choice in one["choices"]
            if choice["logprobs"]
            for entry in choice["logprobs"]["content"]
        ]

    assert told("get", STRIP) == ["hi", "NAME", "BODY"]
    assert told(SECRET, STRIP) == ["hi"]


# --- every cut, every order
@st.composite
def turns(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """Deltas of one choice as engines send them, and the calls they make: (name, arguments)."""
    names = draw(st.lists(st.sampled_from(["get", "put", SECRET, "rm_", 'r"m', "漢字"]), min_size=1, max_size=4))
    made = [(name, draw(st.sampled_from(["{}", '{"a":"}{"}', PAYLOAD, '"tool_calls":[']))) for name in names]
    numbering = draw(st.sampled_from(["right", "zero", "none"]))
    queues: list[list[dict[str, Any]]] = []
    for place, (name, text) in enumerate(made):
        cut = draw(st.integers(0, len(name)))
        index = {"right": place, "zero": 0, "none": None}[numbering]
        parts = [tool(index, name[:cut] or None, "", id=f"id{place}", type="function")]
        if name[cut:]:
            parts = (
                [tool(index, name, "", id=f"id{place}")]
                if not name[:cut] or numbering != "right"
                else [*parts, tool(index, name[cut:], draw(st.sampled_from(["", None])))]
            )
        step = draw(st.integers(1, len(text)))
        queues.append([*parts, *(tool(index, None, text[at : at + step]) for at in range(0, len(text), step))])
    order = list(itertools.chain(*queues))
    if numbering == "right" and draw(st.booleans()):
        order = [one for row in itertools.zip_longest(*queues) for one in row if one is not None]
    deltas: list[dict[str, Any]] = []
    for one in order:
        if deltas and draw(st.booleans()) and "tool_calls" in deltas[-1]:
            deltas[-1]["tool_calls"].append(one)
        else:
            deltas.append({"tool_calls": [one]})
        if draw(st.integers(0, 3)) == 0:
            deltas.append({"content": draw(st.sampled_from(["t", '"tool_calls":[', "\n", "data: "]))})
    return deltas, made


@given(turns(), st.data())
@settings(max_examples=400, deadline=None)
def test_the_client_gets_the_allowed_calls_whatever_the_pieces_and_cuts(
    turn: tuple[list[dict[str, Any]], list[tuple[str, str]]], data: st.DataObject
) -> None:
    deltas, made = turn
    body = stream(*deltas)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=12)))
    parts = [body[left:right] for left, right in itertools.pairwise([0, *cuts, len(body)])]
    tap = tap_of(STRIP)
    out = pass_through(tap, parts)
    seen = client(out)[0]
    allowed = [(name, text) for name, text in made if not name.startswith("rm_")]
    found = [(call["function"]["name"], call["function"]["arguments"]) for call in seen["calls"].values()]
    assert sorted(found) == sorted(allowed) and list(seen["calls"]) == list(range(len(allowed)))
    assert seen["text"] == "".join(delta.get("content", "") for delta in deltas)
    assert seen["finish"] == ("tool_calls" if allowed else "stop")
    assert isinstance(tap, Screening) and tap.stripped == len(made) - len(allowed)
    assert out == pass_through(tap_of(STRIP), [body])  # cuts make no difference
    assert b"rm_" not in out

    tap = tap_of(REFUSE)
    out = pass_through(tap, parts)
    if len(allowed) == len(made):
        assert client(out)[0] == seen
    else:
        assert isinstance(tap.error(), ToolCallNotAllowed) and b"rm_" not in out and not out.endswith(DONE)


VALUES = st.recursive(
    st.sampled_from([None, "", "get", "rm_x", SECRET, PAYLOAD, 0, 1, True, {}, []]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from("index id type function custom name arguments input".split()), inner, max_size=4
        )
    ),
    max_leaves=8,
)


@given(
    st.lists(
        st.dictionaries(st.sampled_from(["tool_calls", "function_call", "content"]), VALUES, max_size=2), max_size=5
    )
)
@settings(max_examples=400, deadline=None)
def test_whatever_an_engine_sends_no_call_of_a_forbidden_name_comes_of_it(deltas: list[dict[str, Any]]) -> None:
    """Also where nothing is as it should be."""
    tap = tap_of(STRIP)
    out = pass_through(tap, [stream(*deltas)])
    assert tap.failure is None and tap.complete
    for block in out.split(b"\n\n"):
        if block.startswith(b"data: {"):
            for choice in json.loads(block[6:])["choices"]:
                for call in choice["delta"].get("tool_calls") or ():
                    assert not str(call.get("function", {}).get("name", "")).startswith("rm_")
    for choice in json.loads(json.dumps([{"delta": delta} for delta in _joined_calls(out)])):
        name = choice["delta"].get("function", {}).get("name", "")
        assert name and not name.startswith("rm_")


def _joined_calls(out: bytes) -> list[dict[str, Any]]:
    calls_: dict[int, dict[str, Any]] = {}
    for block in out.split(b"\n\n"):
        if block.startswith(b"data: {"):
            for choice in json.loads(block[6:])["choices"]:
                for call in choice["delta"].get("tool_calls") or ():
                    known = calls_.setdefault(call["index"], {"function": {"name": ""}})
                    for part in ("function", "custom"):
                        known["function"]["name"] += (call.get(part) or {}).get("name") or ""
    return list(calls_.values())


# --- the short way
def test_ordinary_text_stays_on_the_short_way() -> None:
    tap = ToolTap(REFUSE, "engine", strip_usage=True, max_event=1 << 20)
    tap.feed(chunk(0))
    assert calls(tap.feed, chunk(1)) <= TAP_CALLS + 10 and tap._prefix  # one look more
    assert tap.feed(chunk(2) * 3) == chunk(2) * 3


@pytest.mark.parametrize("spaces", [True, False])
def test_so_it_does_where_an_engine_writes_nulls(spaces: bool) -> None:
    style = (", ", ": ") if spaces else (",", ":")
    nulls = {"content": 'a "tool_calls": [', "tool_calls": None, "function_call": None}
    data = b"data: " + json.dumps(piece(nulls), separators=style).encode() + b"\n\n"
    assert not mentions_calls(data * 2)
    call = (
        b"data: " + json.dumps(piece({"tool_calls": [tool(0, SECRET, PAYLOAD)]}), separators=style).encode() + b"\n\n"
    )
    assert mentions_calls(call) and mentions_calls(data + call)
    tap = tap_of(STRIP)
    for _ in range(3):
        assert tap.feed(data) and tap._prefix
        out = tap.feed(data + call + data)
        assert out.count(b"data: ") == 2 and PAYLOAD.encode() not in out


# --- engines whose streams are rewritten
@pytest.mark.parametrize("engine", ["mlx_lm", "tabbyapi"])
def test_rewritten_streams_are_held_against_the_policy_too(engine: str) -> None:
    deltas = [{"content": "hi"}, {"tool_calls": [tool(0, SECRET, PAYLOAD, id="a"), tool(0, "get", "{}", id="b")]}]
    tap = tap_of(STRIP, engine)
    assert isinstance(tap, FixingToolTap)
    out = pass_through(tap, [stream(*deltas)])
    seen = client(out)[0]
    assert [call["function"]["name"] for call in seen["calls"].values()] == ["get"] and seen["text"] == "hi"
    tap = tap_of(REFUSE, engine)
    out = pass_through(tap, [stream(*deltas)])
    assert isinstance(tap.error(), ToolCallNotAllowed) and PAYLOAD.encode() not in out and b"get" not in out


class Twice:
    """An adapter that makes two chunks of each."""

    def fix(self, chunk: dict[str, Any]) -> list[dict[str, Any]]:
        return [chunk, piece({"content": "after"})]


def test_nothing_follows_what_was_refused() -> None:
    tap = FixingToolTap(REFUSE, load("mlx_lm"), Twice(), "asked", strip_usage=True, max_event=1 << 20)
    out = tap.feed(event(piece({"content": "hi"})) + event(piece({"tool_calls": [tool(0, SECRET, PAYLOAD)]})))
    assert client(out)[0]["text"] == "hiafter" and tap.feed(event(piece({"content": "x"}))) == tap.end() == b""


def ollama(*messages: dict[str, Any]) -> bytes:
    lines: Sequence[dict[str, Any]] = [
        *(
            {"model": "engine", "message": {"role": "assistant", "content": ""} | one, "done": False}
            for one in messages
        ),
        {
            "model": "engine",
            "message": {"role": "assistant", "content": ""},
            "done": True,
            "done_reason": "stop",
            "prompt_eval_count": 3,
            "eval_count": 4,
        },
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def test_so_are_those_that_are_translated() -> None:
    calls_ = [{"function": {"name": name, "arguments": {"x": name}}} for name in (SECRET, "get")]
    out = pass_through(tap_of(STRIP, "ollama"), [ollama({"content": "hi"}, {"tool_calls": calls_})])
    seen = client(out)[0]
    assert [call["function"]["name"] for call in seen["calls"].values()] == ["get"] and seen["finish"] == "tool_calls"
    seen = client(pass_through(tap_of(STRIP, "ollama"), [ollama({"tool_calls": calls_[:1]})]))[0]
    assert seen["calls"] == {} and seen["finish"] == "stop"
