"""Links in requests: what may be fetched by an engine, and what is refused before anybody connects."""

import tracemalloc
from dataclasses import replace
from ipaddress import ip_address, ip_network
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import Operation
from gateway.call import parse_call
from gateway.errors import BadRequest, InvalidBody
from gateway.formcall import parse_form
from gateway.jsonplaces import spelt
from gateway.media import MOST_LINKS, Link, MediaRules, find_links, put_in
from gateway.media.links import may_connect

ALLOWED = MediaRules(hosts=frozenset({"images.example", "10.0.0.7", "169.254.169.254"}))
ENGINE = replace(ALLOWED, fetched=False)
NONE = MediaRules()
BASE64 = "iVBORw0KGgo" * 30


def links_of(given: dict[str, Any], rules: MediaRules = ALLOWED) -> list[Link]:
    return find_links(given, orjson.dumps(given), rules)


def body(link: Any, kind: str = "image_url", *, flat: bool = False, typed: bool = True) -> dict[str, Any]:
    part = {kind: link if flat else {"url": link}}
    if typed:
        part["type"] = kind
    return {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "user", "content": [{"type": "text", "text": "x"}, part]},
        ]
    }


INSIDE = [
    "http://169.254.169.254/latest/", "http://127.0.0.1:9/", "http://[::ffff:10.0.0.1]/", "http://2130706433/",
    "http://0x7f.1/", "http://localhost/", "file:///etc/passwd", "ftp://images.example/x", "gopher://images.example/",
    "https://example.com/cat.png", "//images.example/x", "images.example/x", "", " ", "x", "datas:x", "/etc/passwd",
    " data:image/png;base64,AA", "javascript:1", "http://", "http:///images.example", "http://[", "http://[::1",
]  # fmt: skip
DISGUISED = [
    "http://images.example@evil.example/",
    "http://images.example:80@evil.example/",
    "http://evil.example#@images.example/",
    "http://evil.example/@images.example",
    "http://evil.example?@images.example",
    "http://evil.example\\@images.example/",
    "http://images.example\\.evil.example/",
    "http://images.example.evil.example/",
    "http://evil.images.example/",
    "http://user@images.example/",
    "http://images.example /",
    "http://images.example\n.evil.example/",
    "http://images.example\t/",
    "http://images.example%2eevil.example/",
    "http://images.example\u3002evil.example/",
]
DATA = [
    "data:image/png;base64,AAAA",
    "DATA:image/png;base64,AAAA",
    "data:,",
    "data:video/mp4;base64," + "A" * 3_000_000,
]


def refused(given: dict[str, Any], rules: MediaRules = ALLOWED) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        links_of(given, rules)
    assert caught.value.status == 400 and caught.value.code == "unsupported_value"
    return caught.value


@pytest.mark.parametrize("link", INSIDE + DISGUISED)
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("typed", [True, False])
def test_other_links_are_refused(link: str, flat: bool, typed: bool) -> None:
    """With and without a type: engines take a bare `{"image_url": ...}` as well."""
    for rules in (NONE, ALLOWED, ENGINE):
        error = refused(body(link, flat=flat, typed=typed), rules)
        assert error.param == "messages[1].content[1].image_url"
        assert not link or len(link) < 4 or link not in error.message


@pytest.mark.parametrize("link", DATA)
@pytest.mark.parametrize("flat", [True, False])
def test_data_uris_pass(link: str, flat: bool) -> None:
    assert not links_of(body(link, flat=flat), NONE)


@pytest.mark.parametrize(
    "link",
    ["https://images.example/a.png", "http://IMAGES.example:8080/a?b#c", "HTTPS://images.example", "http://10.0.0.7/x",
     "http://images.example./"],
)  # fmt: skip
def test_hosts_the_operator_named_pass(link: str) -> None:
    for rules in (ALLOWED, ENGINE):
        found = links_of(body(link), rules)
        assert [one.param for one in found] == ["messages[1].content[1].image_url"]
        assert [spelt(one.way) for one in found] == ["messages[1].content[1].image_url.url"]
    refused(body(link), NONE)


def test_addresses_on_the_list_are_meant_but_for_link_local_ones() -> None:
    assert links_of(body("http://10.0.0.7/x"))
    refused(body("http://169.254.169.254/latest/"))
    refused(body("http://[::ffff:10.0.0.7]/"))  # another spelling is another host
    opened = replace(ALLOWED, networks=(ip_network("169.254.0.0/16"),))
    assert links_of(body("http://169.254.169.254/latest/"), opened)
    refused(body("http://10.0.0.8/"), replace(ALLOWED, networks=(ip_network("10.0.0.0/8"),)))  # not on the list


def test_hosts_that_an_engine_might_map_in_another_way_do_not_go_on_to_it() -> None:
    assert links_of(body("http://images\u3002example/"), ALLOWED)[0].target.host == "images.example"
    refused(body("http://images\u3002example/"), ENGINE)


@pytest.mark.parametrize("kind", ["image_url", "audio_url", "video_url", "file_url", "url", "some_new_url"])
def test_every_kind_of_link_counts(kind: str) -> None:
    refused(body("http://127.0.0.1/", kind))
    refused(body("http://127.0.0.1/", kind, flat=True))
    refused(body("http://127.0.0.1/", kind.upper()))  # some engines read names in any case
    assert not links_of(body("data:,", kind), NONE)


@pytest.mark.parametrize("link", [5, True, ["http://127.0.0.1/"], [{"url": "data:,"}], {"url": "data:,"}])
def test_links_that_are_no_text_are_refused(link: Any) -> None:
    refused(body(link))


@pytest.mark.parametrize(
    "given",
    [
        {}, {"messages": None}, {"messages": "x"}, {"messages": [{}]}, {"messages": [{"content": None}]},
        {"messages": [{"content": "see http://127.0.0.1/"}]}, {"messages": ["x", 1, None]}, {"prompt": "http://x"},
        {"messages": [{"content": ["http://127.0.0.1/", 5, None, {}]}]},
        {"messages": [{"content": [{"type": "text", "text": "http://127.0.0.1/"}]}]},
        {"messages": [{"content": [{"type": "image_url", "image_url": None}]}]},
        {"messages": [{"content": [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}]}]},
    ],
)  # fmt: skip
def test_requests_without_links_pass(given: dict[str, Any]) -> None:
    assert not links_of(given, NONE)


def test_the_first_bad_part_is_named_wherever_it_stands() -> None:
    messages = [
        {"content": [{"type": "text", "text": "x"}]},
        {"content": [{"image_url": "data:,"}, {"image_url": "http://x"}]},
    ]
    assert refused({"messages": messages}).param == "messages[1].content[1].image_url"


@given(st.text(max_size=30) | st.builds("http://{}".format, st.text(max_size=20)))
@settings(max_examples=150, deadline=None)
def test_no_text_at_all_passes_without_a_named_host(link: str) -> None:
    if not link.lower().startswith("data:"):
        refused(body(link), NONE)


# --- other places
PARTS: list[tuple[dict[str, Any], str]] = [  # a part with a link, and the field that names it
    ({"type": "image", "image": "{}"}, "image"),
    ({"type": "image", "image": {"url": "{}"}}, "image"),
    ({"type": "image", "source": {"type": "url", "url": "{}"}}, "source"),
    ({"type": "image", "path": "{}"}, "path"),
    ({"type": "video", "video": ["{}"]}, "video[0]"),
    ({"type": "audio", "audio_url": {"url": "{}", "x": 1}}, "audio_url"),
    ({"type": "input_audio", "input_audio": {"url": "{}"}}, "input_audio"),
    ({"type": "input_audio", "input_audio": {"data": "{}", "format": "wav"}}, "input_audio.data"),
    ({"type": "file", "file": {"file_data": "{}"}}, "file.file_data"),
    ({"type": "input_file", "file_url": "{}"}, "file_url"),
    ({"type": "image_url", "imageUrl": "{}"}, "imageUrl"),
    ({"type": "tool_result", "content": [{"type": "image_url", "image_url": "{}"}]}, "content[0].image_url"),
    ({"type": "image_url", "image_urls": ["data:,", "{}"]}, "image_urls[1]"),
    ({"type": "new", "new": {"newer": "{}"}}, "new.newer"),
]


def filled(value: Any, link: str) -> Any:
    if isinstance(value, dict):
        return {name: filled(inner, link) for name, inner in value.items()}
    if isinstance(value, list):
        return [filled(inner, link) for inner in value]
    return link if value == "{}" else value


@pytest.mark.parametrize(("part", "field"), PARTS)
@pytest.mark.parametrize("link", ["http://127.0.0.1/x.png", "file:///etc/passwd", "https://evil.example/"])
def test_every_part_that_could_be_a_link_is_judged(part: dict[str, Any], field: str, link: str) -> None:
    given = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, filled(part, link)]}]}
    for rules in (NONE, ALLOWED, ENGINE):
        assert refused(given, rules).param == f"messages[0].content[1].{field}"
    given["messages"][0]["content"][1] = filled(part, "data:image/png;base64,AAAA")
    assert not links_of(given, NONE)


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "etc/passwd", "../x.png", "./x", "~/x", "x.png", "C:\\x", "\\\\host\\x", "photo"]
)
@pytest.mark.parametrize("name", ["image", "video", "audio", "path", "image_path", "media", "ref_audio"])
def test_paths_are_refused(path: str, name: str) -> None:
    refused({"messages": [{"role": "user", "content": [{"type": "image", name: path}]}]})


@pytest.mark.parametrize("path", ["/etc/passwd", "../x.wav", "file:/x", "http://10.0.0.7/", "~/x"])
def test_content_that_is_a_path_is_refused(path: str) -> None:
    refused({"messages": [{"content": [{"type": "input_audio", "input_audio": {"data": path, "format": "wav"}}]}]})
    refused({"input": "hello", "voice": path})
    refused({"messages": [], "chat_template": path})


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": BASE64},
        {"type": "image", "image": "/9j/" + BASE64},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "input_audio", "input_audio": {"data": "//uQ" + BASE64, "format": "mp3"}},
        {"type": "text", "text": "http://127.0.0.1/ and file:///etc/passwd"},
        {"type": "refusal", "refusal": "http://x/"},
        {"type": "thinking", "thinking": "https://x/"},
        {"type": "image_url", "image_url": {"url": None, "detail": "low"}},
        {"type": "text", "text": "x", "annotations": [{"url_citation": {"url": "https://x/", "title": "x"}}]},
        {"type": "file", "file": {"file_id": "file-1", "filename": "a/b.pdf"}},
        {"type": "text", "text": {"a": 1}},
    ],
)
def test_content_and_text_pass(part: dict[str, Any]) -> None:
    assert not links_of({"messages": [{"role": "user", "content": [part]}]}, NONE)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "x", "images": ["http://127.0.0.1/"]}, {"role": "user", "images": ["/etc/passwd"]},
        {"content": "x", "image_url": "http://127.0.0.1/"}, {"role": "user", "content": {"image_url": "http://x/"}},
        {"role": "tool", "content": [{"image_url": "http://x/"}]},
        {"role": "user", "content": None, "audio": {"url": "http://x"}},
    ],
)  # fmt: skip
def test_links_beside_the_content_are_judged(message: dict[str, Any]) -> None:
    refused({"messages": [{"role": "user", "content": "x"}, message]}, NONE)


def test_what_a_conversation_quotes_is_text() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"url": "http://127.0.0.1/"}}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call], "audio": {"id": "audio_1"}, "refusal": None},
        {"role": "tool", "tool_call_id": "c", "content": "http://127.0.0.1/"},
        {"role": "assistant", "content": "x", "annotations": [{"url_citation": {"url": "http://x/"}}]},
        {"role": "user", "content": "x", "name": "http://x/"},
    ]
    assert not links_of({"messages": messages}, NONE)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"input": [{"image": "http://127.0.0.1/"}]}, "input[0].image"),
        ({"input": ["x", {"text": "x", "video": "/etc/passwd"}]}, "input[1].video"),
        (
            {"input": [{"content": [{"type": "image_url", "image_url": {"url": "http://x/"}}]}]},
            "input[0].content[0].image_url",
        ),
        ({"input": {"image": "file:///x"}}, "input.image"),
        ({"prompt": {"prompt_string": "x", "multimodal_data": ["http://127.0.0.1/"]}}, "prompt.multimodal_data[0]"),
        ({"prompt": ["x", [{"image": "http://127.0.0.1/"}]]}, "prompt[1][0].image"),
        ({"prompt": "x", "image_data": "http://127.0.0.1/"}, "image_data"),
        ({"prompt": "x", "image_data": [{"url": "/etc/passwd"}]}, "image_data[0].url"),
        ({"prompt": "x", "mm_processor_kwargs": {"images": ["http://x/"]}}, "mm_processor_kwargs.images[0]"),
        ({"prompt": "x", "media_io_kwargs": {"video": {"url": "http://x/"}}}, "media_io_kwargs.video"),
        ({"prompt": "x", "lora_path": "/models/x"}, "lora_path"),
        ({"prompt": "x", "draft_model": "/models/x"}, "draft_model"),
        ({"prompt": "x", "extra_body": {"deep": [{"image_url": "http://x/"}]}}, "extra_body.deep[0].image_url"),
        ({"prompt": "x", "callback": "http://127.0.0.1/"}, "callback"),
        ({"prompt": "x", "webhook_url": "x"}, "webhook_url"),
        ({"prompt": "x", "kv_transfer_params": {"remote": "tcp://10.0.0.1:80"}}, "kv_transfer_params.remote"),
        ({"input": "x", "ref_audio": "file:///voice.wav"}, "ref_audio"),
        ({"input": "x", "voice": "http://x/"}, "voice"),
        ({"messages": [], "tools": [{"type": "mcp", "server_url": "https://x/"}]}, "tools[0].server_url"),
        ({"messages": [], "integrations": [{"type": "mcp", "server_url": "https://x/"}]}, "integrations[0].server_url"),
    ],
)
def test_links_outside_messages_are_judged(given: dict[str, Any], param: str) -> None:
    for rules in (NONE, ALLOWED):
        assert refused(given, rules).param == param


@pytest.mark.parametrize(
    "given",
    [
        {"input": ["http://127.0.0.1/", "/etc/passwd", "{}"]},
        {"prompt": ["http://127.0.0.1/ {", "{"]},
        {"prompt": "http://127.0.0.1/"},
        {"input": [1, 2, 3]},
        {"prompt": [[1, 2], [3]]},
        {"query": "http://x/", "documents": ["http://x/"]},
        {"documents": [{"text": "http://x/"}], "query": "x"},
        {"stop": ["http://"], "prompt": "x"},
        {"input": "x", "voice": "af_bella+af(2)"},
        {"metadata": {"url": "https://app.example/"}, "prompt": "x"},
        {"guided_choice": ["https://a/", "file:///b"], "prompt": "x"},
        {"grammar": "root ::= x", "user": "https://x/", "prompt": "x"},
        {"new_option": "some/text: x", "prompt": "x"},
        {"new_option": {"a": [1, None, True, "x"]}, "prompt": "x"},
        {"profile": "fast", "prompt": "x"},
        {
            "media_io_kwargs": {"video": {"num_frames": 8}},
            "mm_processor_kwargs": {"fps": 2, "mode": "RGB"},
            "prompt": "x",
        },
        {"chat_template": "{% for m in messages %}x{% endfor %}", "messages": []},
        {"draft_model": "org/name", "prompt": "x"},
        {"audio": {"voice": "alloy", "format": "wav"}, "messages": []},
        {
            "tools": [{"type": "function", "function": {"name": "f", "description": "http://x/", "parameters": {}}}],
            "messages": [],
        },
        {"tools": [{"type": "web_search"}], "messages": []},
        {"tools": "x", "messages": []},
    ],
)
def test_text_that_looks_like_a_link_is_text(given: dict[str, Any]) -> None:
    assert not links_of(given, NONE)


@pytest.mark.parametrize(
    "reference", ["http://127.0.0.1/x", "https://json-schema.org/x", "other.json", "/etc/passwd", "file:///x", ""]
)
def test_schemas_refer_to_themselves_only(reference: str) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": reference}}}
    for field in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}, {"guided_json": schema},
        {"structured_outputs": {"json": schema}}, {"json_schema": schema}, {"format": schema},
    ):  # fmt: skip
        assert (refused({"messages": [], **field}).param or "").endswith(".$ref")
    escaped = orjson.dumps({"guided_json": schema}).replace(b"$", b"\\u0024")
    with pytest.raises(BadRequest):
        find_links(orjson.loads(escaped), escaped, NONE)


def test_schemas_that_refer_to_themselves_pass() -> None:
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://x/", "$defs": {"a": {}},
              "properties": {"$ref": {"$ref": "#/$defs/a"}, "b": {"$ref": "#"}}}  # fmt: skip
    assert not links_of({"guided_json": schema, "tools": [{"type": "function", "function": {"parameters": schema}}]})


def test_deep_bodies_are_judged_to_the_bottom() -> None:
    levels = 480  # of two each; the parser takes 1024
    raw = b'{"prompt":"x","option":' + b'{"x":[' * levels + b'{"image_url":"http://127.0.0.1/"}' + b"]}" * levels + b"}"
    with pytest.raises(BadRequest) as caught:
        find_links(orjson.loads(raw), raw, ALLOWED)
    assert (caught.value.param or "").startswith("option.x[0].x[0]") and len(caught.value.param or "") <= 200


def test_a_deep_link_is_replaced() -> None:
    levels = 480
    raw = b'{"option":' + b'{"x":[' * levels + b'{"image_url":"http://images.example/"}' + b"]}" * levels + b"}"
    links = find_links(orjson.loads(raw), raw, ALLOWED)
    changed, document = put_in(raw, orjson.loads(raw), {link.way: "data:," for link in links})
    assert changed == raw.replace(b"http://images.example/", b"data:,")
    assert len(links) == 1 and document["option"]["x"][0]["x"]


@pytest.mark.parametrize("leaf", [b'"a"', b'{"a":"b"}', b'["a"]'])
@pytest.mark.parametrize("name", [b"option", b"guided_json", b"prompt"])
def test_deep_and_wide_bodies_take_no_memory(leaf: bytes, name: bytes) -> None:
    """A way of a thousand steps for each of many values would be gigabytes."""
    inside = b"[" + b",".join([leaf] * 20_000) + b"]"
    raw = b'{"%b":' % name + b'[{"$y":' * 450 + inside + b"}]" * 450 + b"}"
    body = orjson.loads(raw)
    tracemalloc.start()
    try:
        assert not find_links(body, raw, ALLOWED)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


# --- several
def many(count: int) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": f"http://images.example/{number}"}} for number in range(count)]
    return {"messages": [{"role": "user", "content": parts}]}


def test_the_number_of_links_is_bounded() -> None:
    assert len(links_of(many(MOST_LINKS))) == MOST_LINKS
    error = refused(many(MOST_LINKS + 1))
    assert error.param == f"messages[0].content[{MOST_LINKS}].image_url" and str(MOST_LINKS) in error.message


def test_only_the_links_change() -> None:
    raw = (
        b' {"n" : 1.50, "x":null,"messages":[{"role":"user","content":"\\u00e9"},\n{"content":['
        b' {"type":"text","text":"a, ]}"},{"image_url" :{"detail":"low", '
        b'"url":"http:\\/\\/images.example/\\u0061" } }, '
        b'{"image":"https://images.example/b"}]}] ,"z":[1e5]} '
    )
    body = orjson.loads(raw)
    links = find_links(body, raw, ALLOWED)
    assert [link.target.path for link in links] == ["/a", "/b"]
    changed, document = put_in(raw, body, {link.way: f"data:,{number}" for number, link in enumerate(links)})
    assert changed == raw.replace(b'"http:\\/\\/images.example/\\u0061"', b'"data:,0"').replace(
        b'"https://images.example/b"', b'"data:,1"'
    )
    assert document == orjson.loads(changed) and body == orjson.loads(raw)


def test_a_link_with_two_meanings_is_refused() -> None:
    raw = b'{"messages":[{"content":[{"image_url":{"url":"http://127.0.0.1/","url":"http://images.example/"}}]}]}'
    body = orjson.loads(raw)
    links = find_links(body, raw, ALLOWED)
    with pytest.raises(InvalidBody, match="two equal keys 'url'"):
        put_in(raw, body, {link.way: "data:," for link in links})


TEXT = st.text('pq"\\{}[], \u00e9\0', max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)


@given(st.lists(JSON, max_size=4), st.integers(0, 4), st.sampled_from([None, orjson.OPT_INDENT_2]))
@settings(max_examples=150, deadline=None)
def test_replacing_leaves_every_other_value_alone(others: list[Any], place: int, option: int | None) -> None:
    parts = [{"type": "text", "text": "x", "uuid": other} for other in others]
    parts.insert(place, {"type": "image_url", "image_url": {"url": "http://images.example/"}, "uuid": None})
    body = {"a": others, "messages": [{"role": "user", "content": parts}], "seed": 1}
    raw = orjson.dumps(body, option=option)
    links = find_links(orjson.loads(raw), raw, ALLOWED)
    changed, document = put_in(raw, orjson.loads(raw), {link.way: "data:," for link in links})
    assert document == orjson.loads(changed)
    assert changed.replace(b"data:,", b"http://images.example/") == raw


# --- forms and whole requests
def form(*fields: tuple[str, bytes]) -> bytes:
    begin = b'--b\r\nContent-Disposition: form-data; name="'
    parts = [b'%bfile"; filename="a.wav"\r\n\r\nRIFF\r\n' % begin]
    parts += [b'%b%b"\r\n\r\n%b\r\n' % (begin, name.encode(), value) for name, value in fields]
    return b"".join(parts) + b"--b--\r\n"


@pytest.mark.parametrize(
    "name", ["url", "file_url", "audio_url", "URL", "file", "urls[]", "audio", "path", "file[url]"]
)
@pytest.mark.parametrize("value", [b"http://127.0.0.1/", b"", b"x" * 70_000])
def test_forms_have_no_field_for_a_link(name: str, value: bytes) -> None:
    """Whatever it says: the last of two equal fields counts here, and the first one elsewhere."""
    with pytest.raises(BadRequest) as caught:
        parse_form(Operation.TRANSCRIPTIONS, form(("model", b"m"), (name, value)), b"multipart/form-data; boundary=b")
    assert caught.value.param == name and caught.value.code == "unsupported_value"


def test_other_fields_of_forms_pass() -> None:
    fields = [("model", b"m"), ("prompt", b"http://x/"), ("language", b"en"), ("timestamp_granularities[]", b"word")]
    call = parse_form(Operation.TRANSCRIPTIONS, form(*fields), b"multipart/form-data; boundary=b")
    assert not find_links(call.body, call.raw, NONE)


def test_documents_of_rerank_are_texts() -> None:
    for document in (
        {"image_url": "http://x/"},
        {"content": [{"image_url": "http://x/"}]},
        {"text": "x", "image": "http://x/"},
    ):
        with pytest.raises(BadRequest):
            parse_call(Operation.RERANK, orjson.dumps({"model": "m", "query": "x", "documents": [document]}))


LINKS = st.sampled_from(
    [
        *INSIDE,
        *DISGUISED,
        *DATA[:3],
        "http://images.example/",
        "http://10.0.0.7/",
        "http://169.254.169.254/",
        "/x",
        "text",
        BASE64,
    ]
) | st.text(max_size=20)
NAMES = st.sampled_from("image_url url image video data path text type content input_audio file x".split())
ANY = st.recursive(
    LINKS | st.none() | st.integers(-9, 9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=10,
)


@given(ANY, st.sampled_from(["messages", "input", "prompt", "option"]), st.sampled_from([ALLOWED, NONE, ENGINE]))
@settings(max_examples=400, deadline=None)
def test_whatever_is_to_be_followed_leads_to_a_permitted_host(value: Any, top: str, rules: MediaRules) -> None:
    given = {top: [{"role": "user", "content": [value]}] if top == "messages" else value}
    try:
        found = links_of(given, rules)
    except BadRequest:
        return
    for link in found:
        assert link.target.host in rules.hosts
        assert link.target.host == "images.example" or may_connect(ip_address(link.target.host), (), named=True)
