"""Request bodies: what is refused, what is read, and the bytes an engine gets."""

import json
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import backends
from backends.base import REMOVE, Operation
from gateway.attempt import request_bytes
from gateway.call import Call, estimate_prompt, parse_call
from gateway.errors import BadRequest, InvalidBody
from gateway.jsonscan import members
from gateway.types import EmbeddedModel, Endpoint, Replica, Tenant, Timeouts

CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
HEAD: dict[Operation, dict[str, Any]] = {
    Operation.CHAT: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    Operation.COMPLETIONS: {"model": "m", "prompt": "hi"},
    Operation.EMBEDDINGS: {"model": "m", "input": "hi"},
    Operation.RERANK: {"model": "m", "query": "hi", "documents": ["ho"]},
    Operation.TOKENIZE: {"model": "m", "prompt": "hi"},
    Operation.DETOKENIZE: {"model": "m", "tokens": [1]},
    Operation.TRANSCRIPTIONS: {"model": "m"},
    Operation.TRANSLATIONS: {"model": "m"},
    Operation.SPEECH: {"model": "m", "input": "hi"},
}


def chat(more: str) -> bytes:
    return CHAT[:-1] + b"," + more.encode() + b"}"


def parse(raw: bytes, operation: Operation = Operation.CHAT) -> Call:
    return parse_call(operation, raw)


def refused(raw: bytes, operation: Operation = Operation.CHAT) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse_call(operation, raw)
    assert caught.value.status == 400
    assert caught.value.type == "invalid_request_error"
    return caught.value


# --- what an engine gets
FIELDS = (
    b'{ "top_k":20 ,"min_p":0.0500,'
    b'"t":1e5, "model" : "m","messages":[{"role":"user","content":"\\u00e9 \\ud83c\\udfad"}]'
    b","
    b'"stop":null,"chat_template_kwargs":{"enable_thinking":false,"model":"m"},"future_field":{"x":[1,null]},'
    b'"seed":12345678901234567890123,"user":"model" }\n'
)


def test_an_unchanged_body_is_the_clients_own_bytes() -> None:
    call = parse(FIELDS)
    assert call.for_engine("m", {}) is call.raw
    assert call.raw == FIELDS


def test_a_new_name_changes_that_value_alone() -> None:
    assert parse(FIELDS).for_engine("org/Big", {}) == FIELDS.replace(b'"model" : "m"', b'"model" : "org/Big"')


@pytest.mark.parametrize("number", ["0.0500", "1e5", "1E+5", "-0.0", "1.0", "123456789012345678901234567890", "1e-400"])
def test_number_forms_survive_every_change(number: str) -> None:
    call = parse(chat(f'"x":{number},"stream":true'))
    assert f'"x":{number}'.encode() in call.for_engine("m", {})
    assert f'"x":{number}'.encode() in call.for_engine("other", {"temperature": 1})


@pytest.mark.parametrize(
    "raw",
    [
        rb'{"mod\u0065l":"m","messages":[{}],"metadata":{"model":"inner"}}',
        rb'{"metadata":{"model":"inner"},"messages":[{}],"\u006dodel":"m"}',
        rb'{"metadata":{"model":"m"},"messages":[{}],"model":"m"}',
        rb'{"messages":[{"content":"\"model\":\"m\""}],"model":"m"}',
        rb'{"messages":[{"content":"model"}],"user":"model","model":"m"}',
        rb'{"messages":[{}],"model":"\u006d"}',
        b'{"model"\n:\t"m" ,"messages":[{}]}',
        b'{"messages":[{}],"x":"' + b"y" * 300_000 + b'","metadata":{"model":"inner"},"model":"m"}',
    ],
)
def test_the_top_level_name_is_the_one_that_changes(raw: bytes) -> None:
    call = parse(raw)
    assert call.model == "m"
    assert orjson.loads(call.for_engine('n"ew', {})) == orjson.loads(raw) | {"model": 'n"ew'}


@pytest.mark.parametrize(
    ("options", "asked", "sent"),
    [
        ("", False, {"include_usage": True}),
        (',"stream_options":null', False, {"include_usage": True}),
        (',"stream_options":{}', False, {"include_usage": True}),
        (',"stream_options":{"include_usage":false}', False, {"include_usage": True}),
        (',"stream_options":{"include_usage":null,"x":1}', False, {"include_usage": True, "x": 1}),
        (',"stream_options":{"include_usage":true}', True, {"include_usage": True}),
    ],
)
def test_streams_are_always_asked_for_usage(options: str, asked: bool, sent: dict[str, Any]) -> None:
    call = parse(chat('"stream":true' + options))
    body = orjson.loads(call.for_engine("m", {}))
    assert call.wants_usage is asked
    assert body == orjson.loads(call.raw) | {"stream_options": sent}


@pytest.mark.parametrize("stream", ["false", "null"])
def test_only_streams_are_asked_for_usage(stream: str) -> None:
    raw = chat(f'"stream":{stream}')
    assert parse(raw).for_engine("m", {}) == raw


def test_edits_of_an_adapter() -> None:
    raw = chat('"top_k":5, "x":0.10,"stream":true')
    call = parse(raw)
    out = call.for_engine("big", {"top_k": REMOVE, "seed": 7, "x": [1]})
    expected = orjson.loads(raw) | {"model": "big", "seed": 7, "x": [1], "stream_options": {"include_usage": True}}
    del expected["top_k"]
    assert orjson.loads(out) == expected
    assert call.body == orjson.loads(raw)  # never written to


SALT = "0123456789abcdef" * 2


@pytest.mark.parametrize("model", ["m", "org/Big"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_salt_stands_first_and_changes_no_other_byte(model: str, stream: bool) -> None:
    call = parse(FIELDS.replace(b'"seed"', b'"stream":true,"seed"') if stream else FIELDS)
    plain = call.for_engine(model, {})
    assert call.for_engine(model, {}, SALT) == plain.replace(b"{", b'{"cache_salt":"%b",' % SALT.encode(), 1)
    assert (b'"stream_options":{"include_usage":true}' in plain) is stream


@pytest.mark.parametrize("theirs", ['"cache_salt":"x"', r'"c\u0061che_salt":"x"', '"cache_salt":null'])
@pytest.mark.parametrize("stream", ["false", "true"])
def test_a_salt_takes_the_place_of_a_clients_own(theirs: str, stream: str) -> None:
    call = parse(chat(f'"stream":{stream},{theirs},"seed":1'))
    sent = call.for_engine("new", {"cache_salt": REMOVE}, SALT)
    assert [value for key, value in json.loads(sent, object_pairs_hook=list) if key == "cache_salt"] == [SALT]
    assert not [key for key in orjson.loads(call.for_engine("new", {"cache_salt": REMOVE})) if key == "cache_salt"]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["model", '"model":"m"', "m", "é\n", "\\"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["model", "stream", "a"]), inner, max_size=2)
    ),
    max_leaves=5,
)


@given(
    st.dictionaries(st.sampled_from(["user", "metadata", "x1", "ünï", "a b", "stop", "seed"]), VALUES, max_size=5),
    st.booleans(),
    st.sampled_from([None, 2]),
    st.randoms(use_true_random=False),
    st.booleans(),
    st.sampled_from(["", SALT]),
    st.sampled_from(["m", "new"]),
)
@settings(max_examples=300, deadline=None)
def test_any_body_reaches_the_engine_with_nothing_else_changed(
    more: dict[str, Any], ascii_only: bool, indent: int | None, random: Any, stream: bool, salt: str, model: str
) -> None:
    items = list((HEAD[Operation.CHAT] | more | ({"stream": True} if stream else {})).items())
    random.shuffle(items)
    raw = json.dumps(dict(items), ensure_ascii=ascii_only, indent=indent).encode()
    call = parse(raw)
    expected = dict(items) | {"model": model} | ({"stream_options": {"include_usage": True}} if stream else {})
    expected |= {"cache_salt": salt} if salt else {}
    out = call.for_engine(model, {}, salt)
    assert orjson.loads(out) == expected
    assert len(json.loads(out, object_pairs_hook=list)) == len(expected)


# --- equal keys
@pytest.mark.parametrize(
    "more",
    [
        '"model":"big"', '"model" : "big"', '"model"\n:"big"', r'"mod\u0065l":"big"',
        r'"\u006d\u006F\u0064\u0065\u006c":1',
        r'"m\u006fdel":null', '"messages":[]', '"user":"a","user":"a"', '"stream":true, "stream":false',
        r'"stre\u0061m":true,"stream":true', '"x1":1,"x1":2', r'"x1":1,"x\u0031":2', r'"top_k":1,"top\u005fk":2',
        r'"top_k":1,"top\u005Fk":2', r'"a/b":1,"a\/b":2', '"ü":1,"ü":2', r'"ü":1,"\u00fc":2',
        '"":1,"":2', '"a b":1,"a b":1',
        r'"Z":1,"\u005A":2', r'"z":1,"\u007a":2', r'"user":"model","us\u0065r":"x"', r'"🎭":1,"\ud83c\udfad":2',
    ],
)  # fmt: skip
@pytest.mark.parametrize("padding", [0, 300_000])
def test_two_equal_top_level_keys_are_refused_in_every_spelling(more: str, padding: int) -> None:
    filler = f'"filler":"{"x" * padding}",' if padding else ""
    assert isinstance(refused(chat(filler + more)), InvalidBody)
    assert isinstance(refused(b"{" + (filler + more).encode() + b"," + CHAT[1:]), InvalidBody)


@given(st.text("modelMODEL019_z", min_size=1, max_size=8), st.data())
@settings(max_examples=150, deadline=None)
def test_equal_keys_are_found_however_they_are_escaped(key: str, data: st.DataObject) -> None:
    def spelled() -> str:
        return "".join(f"\\u{ord(c):04x}" if data.draw(st.booleans()) else c for c in key)

    first, second = spelled(), spelled()
    refused(f'{{"model":"m","messages":[{{}}],"{first}":"m","{second}":"m"}}'.encode())


@pytest.mark.parametrize(
    "more",
    [
        '"metadata":{"model":"x","messages":1}', '"tools":[{"model":1},{"model":2}]', '"user":"model"',
        r'"user":"\"model\":\"x\""', r'"user":"mod\u0065l"', '"Model":1,"MODEL":2',
        '"model ":1', '"metadata":{"a":1,"a":2}',
        '"stop":["model","messages","stop"]',
    ],
)  # fmt: skip
def test_the_same_word_elsewhere_is_no_second_key(more: str) -> None:
    assert parse(chat(more)).model == "m"


# --- what is not a request
@pytest.mark.parametrize(
    "raw",
    [
        b"", b" ", b"x", b"{", b"[]", b'"m"', b"null", b"1", CHAT + b"x", CHAT + CHAT, b"\xef\xbb\xbf" + CHAT,
        CHAT.replace(b"hi", b"\xff"), CHAT.replace(b"hi", b"\xed\xa0\x80"), CHAT.replace(b"hi", rb"\ud800"),
        chat('"x":NaN'), chat('"x":Infinity'), chat('"x":-Infinity'), chat('"x":1E400'), chat('"x":01'), chat('"x":1,'),
        chat("'x':1"), CHAT.replace(b"hi", b"a\nb"), b"[" * 100_000, b'{"a":' * 100_000,
        chat('"x":' + "[" * 5000 + "]" * 5000),
        CHAT.decode().encode("utf-16"), CHAT[:-1],
    ],
)  # fmt: skip
def test_bytes_that_are_no_json_object(raw: bytes) -> None:
    assert refused(raw).code == "invalid_body"


@given(st.binary(max_size=60) | st.text(max_size=40).map(str.encode))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_either_a_call_or_a_bad_request(raw: bytes) -> None:
    for operation in Operation:
        try:
            parse_call(operation, raw)
        except BadRequest as error:
            assert error.status == 400


ODD = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
ANYTHING = st.recursive(
    ODD, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
)


@given(
    st.sampled_from(Operation),
    st.dictionaries(
        st.sampled_from(
            "model messages prompt input stream stream_options n max_tokens max_completion_tokens"
            " encoding_format".split()
        ),
        ANYTHING,
        max_size=4,
    ),
)
@settings(max_examples=200, deadline=None)
def test_any_json_is_either_a_call_that_can_be_used_or_a_bad_request(
    operation: Operation, more: dict[str, Any]
) -> None:
    try:
        call = parse_call(operation, json.dumps(HEAD[operation] | more).encode("utf-8", "surrogatepass"))
    except BadRequest:
        return
    assert call.prompt_tokens >= 0
    assert call.answers >= 1
    assert call.max_tokens is None or call.max_tokens >= 0
    call.for_engine("new", {})


@pytest.mark.parametrize(
    ("operation", "field", "values"),
    [
        (Operation.CHAT, "model", ["5", "null", '""', "[]", "{}", "true"]),
        (Operation.CHAT, "messages", ["null", "[]", '"hi"', "{}", "1"]),
        (Operation.COMPLETIONS, "prompt", ["null", "1", "{}", "true"]),
        (Operation.EMBEDDINGS, "input", ["null", "1", "{}", '""', "[]"]),
        (Operation.RERANK, "query", ["null", "1", '""', "[]"]),
        (Operation.RERANK, "documents", ["null", "[]", '"x"', "[1]", '[{"image_url":"x"}]', '[{"text":1}]']),
        (Operation.RERANK, "top_n", ["-1", "1.5", "true", '"1"']),
        (Operation.TOKENIZE, "prompt", ["null", "1", "{}"]),
        (Operation.TOKENIZE, "messages", ["[]", '"hi"', "1"]),
        (Operation.DETOKENIZE, "tokens", ["null", "1", '"x"', '["x"]', "[true]", "[[1]]"]),
        (Operation.EMBEDDINGS, "encoding_format", ['"hex"', "1", "[]", '"BASE64"', "true"]),
        (Operation.CHAT, "stream", ["1", '"true"', "[]", "0"]),
        (Operation.CHAT, "stream_options", ["true", "[]", '"x"', "1"]),
        (Operation.CHAT, "stream_options.include_usage", ["1", '"true"', "[]"]),
        (Operation.CHAT, "max_tokens", ["-1", "1.5", '"5"', "true", "[]", "4294967296"]),
        (Operation.COMPLETIONS, "max_completion_tokens", ["-1", "1.0", '"5"', "false"]),
        (Operation.COMPLETIONS, "n", ["0", "-1", "129", "1.0", '"1"', "true"]),
    ],
)
def test_wrong_types_name_the_field(operation: Operation, field: str, values: list[str]) -> None:
    key, _, inner = field.partition(".")
    for value in values:
        body = {name: orjson.dumps(given).decode() for name, given in HEAD[operation].items()}
        body[key] = f'{{"{inner}":{value}}}' if inner else value
        error = refused(("{" + ",".join(f'"{k}":{v}' for k, v in body.items()) + "}").encode(), operation)
        assert error.param == field, value
        assert error.code in ("missing_required_parameter", "invalid_type", "invalid_value")


def test_missing_fields_are_called_missing() -> None:
    assert refused(b"{}").param == "model"
    fields = ("messages", "prompt", "input", "query", "prompt", "tokens")
    for operation, field in [*zip(HEAD, fields, strict=False), (Operation.SPEECH, "input")]:  # forms: test_formcall.py
        error = refused(b'{"model":"m"}', operation)
        assert (error.param, error.code) == (field, "missing_required_parameter")


def test_a_message_that_is_no_object_is_named() -> None:
    assert refused(b'{"model":"m","messages":[{},"x"]}').param == "messages[1]"


def test_nulls_mean_absent() -> None:
    call = parse(chat('"stream":null,"n":null,"max_tokens":null,"max_completion_tokens":null,"stream_options":null'))
    assert (call.stream, call.answers, call.max_tokens, call.wants_usage) == (False, 1, None, False)


def test_user_may_be_a_role_and_a_field() -> None:
    call = parse(chat('"user":"alice"'))
    assert call.body["user"] == "alice"
    assert call.body["messages"][0]["role"] == "user"


def test_the_newer_name_of_the_token_limit_wins() -> None:
    assert parse(chat('"max_tokens":5,"max_completion_tokens":9')).max_tokens == 9
    assert parse(chat('"max_tokens":5')).max_tokens == 5
    assert parse(chat('"max_tokens":0')).max_tokens == 0


# --- estimates
@pytest.mark.parametrize(
    ("operation", "body", "tokens"),
    [
        (Operation.CHAT, {"messages": [{"content": "x" * 400}]}, 104),
        (Operation.CHAT, {"messages": [{"content": "x" * 400}, {"content": None}, {}]}, 112),
        (Operation.CHAT, {"messages": [{"content": [{"type": "text", "text": "x" * 400}]}]}, 104),
        (Operation.CHAT, {"messages": [{"content": [{"type": "image_url", "image_url": {"url": "data:xyz"}}]}]}, 1004),
        (Operation.CHAT, {"messages": [{"content": "hi"}], "prompt": "x" * 4000}, 4),
        (Operation.COMPLETIONS, {"prompt": "x" * 400}, 101),
        (Operation.COMPLETIONS, {"prompt": ["x" * 400, "x" * 40]}, 112),
        (Operation.COMPLETIONS, {"prompt": [1, 2, 3]}, 3),
        (Operation.COMPLETIONS, {"prompt": [[1, 2, 3], [4]]}, 4),
        (Operation.COMPLETIONS, {"prompt": "x" * 400, "messages": []}, 101),
        (Operation.EMBEDDINGS, {"input": ["x" * 400]}, 101),
        (Operation.RERANK, {"query": "x" * 40, "documents": ["x" * 400, {"text": "x" * 40}]}, 11 + 101 + 11 + 10),
        (Operation.TOKENIZE, {"prompt": "x" * 400}, 101),
        (Operation.TOKENIZE, {"messages": [{"content": "x" * 400}]}, 104),
        (Operation.DETOKENIZE, {"tokens": [1, 2, 3]}, 3),
        (Operation.EMBEDDINGS, {"input": "x" * 400, "messages": ["x"], "prompt": ""}, 101),
    ],
)  # fmt: skip
def test_estimates_count_what_the_operation_reads(operation: Operation, body: dict[str, Any], tokens: int) -> None:
    assert estimate_prompt(operation, body) == tokens
    call = parse_call(operation, orjson.dumps({"model": "m", **body}))
    assert call.prompt_tokens == call.prompt_tokens == tokens


def test_embeddings_are_never_a_stream_and_know_no_stray_options() -> None:
    raw = b'{"model":"m","input":"x","stream":true}'
    call = parse(raw, Operation.EMBEDDINGS)
    assert call.stream is False
    assert call.for_engine("m", {}) == raw
    assert refused(b'{"model":"m","input":"x","stream_options":[1]}', Operation.EMBEDDINGS).param == "stream_options"


# --- head and body together
def sent_to(kind: str, tenant: Tenant, headers: dict[bytes, bytes], embedded: EmbeddedModel | None = None) -> bytes:
    heads = {Operation.CHAT: b"POST /v1/chat/completions HTTP/1.1\r\n"}
    replica = Replica(
        "r", "m", backends.load(kind), Endpoint("h", 80), "", "engine", Timeouts(), heads, embedded=embedded
    )
    cycle: Any = SimpleNamespace(headers=headers, request_id="req_1")  # all that is read of it
    return request_bytes(replica, parse(chat('"user":"other"')), cycle, tenant)


CLAIMED = dict.fromkeys((b"x-sekisho-tenant", b"x-tenant", b"openai-organization", b"authorization"), b"other")


def test_the_embedded_engine_learns_the_tenant_from_the_gateway_alone() -> None:
    """Its queue is fair between the names it is given: a client that chose one would stand in another's place."""
    model = EmbeddedModel("/f", None, None, 1, 0, None, 1, 1.0)
    head, _, body = sent_to("llamacpp", Tenant("acme", salt=SALT), CLAIMED, model).partition(b"\r\n\r\n")
    assert head.count(b"tenant") == 1 and b"\r\nx-sekisho-tenant: acme" in head and b"other" not in head
    assert "cache_salt" not in orjson.loads(body)


@pytest.mark.parametrize(("kind", "salted"), [("vllm", True), ("sglang", True), ("openai_compatible", False)])
def test_other_engines_learn_no_names_and_a_salt_only_where_they_have_one(kind: str, salted: bool) -> None:
    head, _, body = sent_to(kind, Tenant("acme", salt=SALT), CLAIMED).partition(b"\r\n\r\n")
    assert b"acme" not in head + body and b"other" not in head
    assert orjson.loads(body).get("cache_salt") == (SALT if salted else None)
    assert b"salt" not in sent_to(kind, Tenant("anonymous"), CLAIMED)


@pytest.mark.parametrize(
    ("prompt", "answers"),
    [("one", 1), (["one"], 1), (["one", "two", "three"], 3), ([1, 2, 3], 1), ([[1, 2], [3]], 2)],
)
def test_every_prompt_gets_its_answers(prompt: object, answers: int) -> None:
    for n in (1, 4):
        raw = json.dumps({"model": "m", "prompt": prompt, "n": n}).encode()
        assert parse_call(Operation.COMPLETIONS, raw).answers == answers * n


def test_tools_are_part_of_the_prompt() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "d" * 4000, "parameters": {}}}]
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    plain, offering = (parse_call(Operation.CHAT, json.dumps(one).encode()) for one in (body, body | {"tools": tools}))
    assert offering.prompt_tokens - plain.prompt_tokens > 900


# --- bodies that cost more than they weigh
@pytest.mark.parametrize("keys", [47, 60, 3000])
def test_many_keys_are_walked_over_once(keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting each of 15,000 in all of the body took a second."""
    walks = []
    monkeypatch.setattr("gateway.call.jsonscan.members", lambda raw: walks.append(raw) or members(raw))
    raw = chat("".join(f', "k{number}": 1' for number in range(keys - 2)).removeprefix(", "))
    assert len(parse_call(Operation.CHAT, raw).body) == keys
    assert len(walks) == (keys > 48)


@pytest.mark.parametrize("node", [b"[]", b"{}"])
def test_objects_and_lists_are_bounded_before_they_are_made(node: bytes) -> None:
    for count, good in ((499_000, True), (500_001, False)):
        raw = CHAT[:-1] + b', "x": [' + b",".join([node] * count) + b"]}"
        if good:
            assert parse_call(Operation.CHAT, raw).model
        else:
            assert "500000" in refused(raw).message
