"""What the embedded engine accepts, and how it names what it does not."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.llamacpp.errors import ApiError
from backends.llamacpp.protocol import (
    IGNORED,
    REFUSED,
    Sampling,
    parse_chat,
    parse_completion,
    parse_embeddings,
    parse_prompts,
)

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> Any:
    return parse_chat({"model": "m", "messages": MESSAGES, **fields}, "m", Sampling())


def refusal(call: Any, *args: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call(*args, **fields)
    return caught.value


def test_defaults_are_openais_and_min_p_is_documented() -> None:
    wanted = chat().wanted
    assert (wanted.sampling.temperature, wanted.sampling.top_p, wanted.sampling.min_p) == (1.0, 1.0, 0.05)
    assert (wanted.n, wanted.stream, wanted.max_tokens, wanted.stops) == (1, False, None, ())


def test_defaults_of_the_model_file_stand_between() -> None:
    body = {"messages": MESSAGES, "top_p": 0.5}
    sampling = parse_chat(body, "m", Sampling(temperature=0.3, top_p=0.9)).wanted.sampling
    assert (sampling.temperature, sampling.top_p) == (0.3, 0.5)


def test_null_is_the_same_as_absent() -> None:
    nothing = dict.fromkeys(
        ["temperature", "top_p", "stop", "n", "seed", "max_tokens", "logit_bias", "response_format", "stream", *REFUSED]
    )
    assert chat(**nothing) == chat()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 2.1),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 1.5),
        ("min_p", -1),
        ("top_k", 1.5),
        ("presence_penalty", 3),
        ("frequency_penalty", -2.5),
        ("repeat_penalty", 0),
        ("seed", "x"),
        ("n", 0),
        ("n", 9),
        ("max_tokens", 0),
        ("max_completion_tokens", "many"),
        ("stop", 5),
        ("stop", ["a"] * 17),
        ("stop", ["a", 1]),
        ("stream", "yes"),
        ("stream_options", []),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", [1]),
        ("response_format", "json"),
        ("response_format", {"type": "yaml"}),
        ("response_format", {"type": "json_schema"}),
        ("chat_template_kwargs", 1),
        ("model", 5),
        ("messages", []),
        ("messages", "hi"),
    ],
)
def test_wrong_values_are_a_400_that_names_the_field(field: str, value: Any) -> None:
    error = refusal(chat, **{field: value})
    assert (error.status, error.type, error.param) == (400, "invalid_request_error", field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("function_call", {"name": "f"}),
        ("logprobs", True),
        ("logprobs", 0),
        ("top_logprobs", 3),
        ("echo", True),
        ("suffix", "x"),
        ("best_of", 2),
        ("audio", {}),
        ("modalities", ["text", "audio"]),
        ("prediction", {"type": "content"}),
        ("grammar", "root ::= x"),
        ("structured_outputs", {"regex": "[ab]"}),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(field: str, value: Any) -> None:
    error = refusal(chat, **{field: value})
    assert (error.status, error.param, error.code) == (400, field, "unsupported_value")


def test_harmless_fields_and_harmless_values_pass() -> None:
    harmless = {field: values[0] for field, values in REFUSED.items() if values}
    assert chat(**harmless) == chat()
    assert chat(**dict.fromkeys(IGNORED, "x"), future_field={"x": [1, None]}) == chat()
    assert not IGNORED & REFUSED.keys()


def test_the_newer_limit_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).wanted.max_tokens == 7
    assert chat(max_tokens=5).wanted.max_tokens == 5


def test_content_parts_are_joined_and_others_named_with_their_place() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0]["content"] == "ab"
    assert chat(messages=[{"role": "assistant", "content": None}]).messages[0]["content"] == ""
    for kind in ("image_url", "input_audio", "file"):
        error = refusal(chat, messages=[*MESSAGES, {"role": "user", "content": [parts[0], {"type": kind}]}])
        assert (error.param, error.code) == ("messages[1].content[1]", "unsupported_value")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[0]"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user<|im_end|>"}, "messages[0].role"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
    ],
)
def test_malformed_messages(message: Any, param: str) -> None:
    assert refusal(chat, messages=[message]).param == param


def test_response_format() -> None:
    assert chat(response_format={"type": "text"}).wanted.sampling.schema is None
    assert chat(response_format={"type": "json_object"}).wanted.sampling.schema == {"type": "object"}
    schema = {"type": "object", "properties": {}}
    given_format = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    assert chat(response_format=given_format).wanted.sampling.schema == schema


def test_prompts_of_every_shape() -> None:
    assert parse_prompts("a", "prompt") == ("a",)
    assert parse_prompts(["a", "b"], "prompt") == ("a", "b")
    assert parse_prompts([1, 2], "prompt") == ((1, 2),)
    assert parse_prompts([[1, 2], [3]], "prompt") == ((1, 2), (3,))
    for wrong in (None, [], [[]], 5, {}, [1.5], [True], [None]):
        assert refusal(parse_prompts, wrong, "prompt").param == "prompt"


def test_encoding_format() -> None:
    for value, base64 in ((None, False), ("float", False), ("base64", True)):
        assert parse_embeddings({"input": "a", "encoding_format": value}, "m").base64 is base64
    for value in ("int8", 5, ""):
        body = {"input": "a", "encoding_format": value}
        assert refusal(parse_embeddings, body, "m").param == "encoding_format"


def test_another_models_name_is_not_answered() -> None:
    error = refusal(parse_completion, {"model": "other", "prompt": "x"}, "m", Sampling())
    assert (error.status, error.param, error.code) == (404, "model", "model_not_found")


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
_names = ["messages", "prompt", "input", "stop", "n", "logit_bias", "response_format", "stream_options", *REFUSED]


@given(st.dictionaries(st.sampled_from(_names), _json) | _json)
def test_no_body_gets_anything_but_a_value_or_an_api_error(body: Any) -> None:
    for parse in (
        lambda: parse_chat(body, "m", Sampling()),
        lambda: parse_completion(body, "m", Sampling()),
        lambda: parse_embeddings(body, "m"),
    ):
        try:
            parse()
        except ApiError as error:
            assert error.status == 400
