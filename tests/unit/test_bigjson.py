"""Large bodies read in parts are what orjson makes of the whole, and what is no JSON stays none."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backends.base import Operation
from gateway import bigjson, jsonscan
from gateway.bigjson import LARGE, load
from gateway.call import parse_call
from gateway.errors import InvalidBody

GIANT, PIECE = 12, 16  # bytes, so that small documents have both
CHUNKS = [
    "A" * 16, "plain text ", "/+==", "é", "中文字", "🎭🎪", "\n", "\t", '"', "\\", "\\\\", '\\"',
    "\x7f", "\u2028", "{[", "}],:", "\\u0041",
]  # fmt: skip
TEXT = st.lists(st.sampled_from(CHUNKS), max_size=12).map("".join)
SCALAR = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.sampled_from([0.5, -1e30]) | TEXT
VALUE = st.recursive(SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3))
INSERTED = [
    b"\x00", b"\n", b'"', b"\\", b"\\u", b"\\ud83d", b"\\udfad", b"\\x", b"\xff", b"\xc3", b"\xed\xa0\x80", b"}",
    b",", b" " * 20, b"1" * 20, b"true", b"\\/", b"\\u4e2d", b'":"', b'","', b"[[1,2]]",
]  # fmt: skip


def render(value: Any, spelling: st.DrawFn) -> str:
    """JSON text, each string in a spelling of its own; an object may get a key twice."""
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=spelling(st.booleans()))
        return text.replace("/", "\\/") if spelling(st.booleans()) else text
    if isinstance(value, list):
        return "[" + ", ".join(render(item, spelling) for item in value) + "]"
    if isinstance(value, dict):
        members = [f"{render(key, spelling)}:{render(item, spelling)}" for key, item in value.items()]
        if members and spelling(st.integers(0, 5)) == 0:
            members.append(f"{render(next(iter(value)), spelling)} : {render(spelling(TEXT), spelling)}")
        return "{" + ",".join(members) + "}"
    return json.dumps(value)


@st.composite
def texts(draw: st.DrawFn) -> bytes:
    """JSON, or what is left after something was put in, cut off or hung on."""
    text = render(draw(VALUE | st.dictionaries(TEXT, VALUE, min_size=1, max_size=4)), draw).encode()
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(text)))
        kind = draw(st.sampled_from(["in", "off", "out", "on"]))
        if kind == "in":
            text = text[:at] + draw(st.sampled_from(INSERTED)) + text[at:]
        elif kind == "off":
            text = text[:at]
        elif kind == "out":
            text = text[:at] + text[at + draw(st.integers(1, 4)) :]
        else:
            text += draw(st.sampled_from(INSERTED))
    return text


def ordinary(text: bytes) -> tuple[Any, str]:
    """What orjson says: the document or the error. `repr` tells types and the order of keys."""
    try:
        return repr(orjson.loads(text)), ""
    except orjson.JSONDecodeError as error:
        return None, str(error)


def in_parts(text: bytes) -> tuple[Any, str]:
    try:
        document, plain = load(text, len, GIANT, PIECE)
    except orjson.JSONDecodeError as error:
        return None, str(error)
    if isinstance(document, dict):
        assert [one[1:] for one in jsonscan.members(plain)] == [one[1:] for one in jsonscan.members(text)]
    return repr(document), ""


@pytest.fixture(autouse=True)
def close_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bigjson, "_BREAK_WITHIN", 40)
    monkeypatch.setattr(bigjson, "_PAUSE", 0)


@settings(max_examples=700, deadline=None)
@given(texts())
@example(b'{"a":"%b","a":1}' % (b"A" * 40))
@example(b'{"a":1,"a":"%b"}' % (b"A" * 40))
@example(b'{"%b":"x"}' % (b"A" * 40))
@example(b'"a"%b"b"' % (b"A" * 40))
@example(b'["a",%b,"b"]' % b",".join([b"1"] * 40))
@example(b'"%b"' % (b"A" * 40))
@example(b'{"a":"%b' % (b"A" * 40))
@example(b'["\\"%b"]' % (b"A" * 40))
@example(b'["%b\\""]' % (b"A" * 40))
@example(b'["%b\\\\"]' % (b"A" * 40))
@example(b'["%b\x1f%b"]' % (b"A" * 40, b"B" * 40))
@example(b'["%b\\ud83d%b\\udfad%b"]' % (b"A" * 30, b"B" * 30, b"C" * 30))
@example(b'\xef\xbb\xbf["%b"]' % (b"A" * 40))
def test_what_is_read_in_parts_is_what_orjson_reads(text: bytes) -> None:
    assert in_parts(text) == ordinary(text)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(CHUNKS), min_size=30, max_size=60).map("".join), st.booleans(), st.integers(0, 15))
def test_a_string_may_be_broken_anywhere(text: str, ascii_only: bool, shift: int) -> None:
    """Wherever a piece ends, between letters, in an escape, in a character of four bytes."""
    raw = b'{"x":"%b","y":%b}' % (
        b"." * shift,
        json.dumps(text.replace('"', ""), ensure_ascii=ascii_only).encode(),
    )
    assert in_parts(raw) == ordinary(raw)


@pytest.mark.parametrize(
    "string",
    [
        b"A" * 400,
        b"A" * 62 * 5 + b"\\/" + b"A" * 62 * 5,
        b"\\n".join([b"line of text"] * 40),
        "中文".encode() * 80,
        b"\\u4e2d\\u6587" * 40,
        "plain, then é".encode() * 40,
        b"abcd\\u4e2d" * 60,
        b"\xf0\x9f\x8e\xad" * 100,
        b'He said \\"no\\". ' * 30,
        b'\\"' * 200,
        b'\\\\\\"a' * 80,
    ],
)
@pytest.mark.parametrize(
    "around", [b'{"model":"m","x":["%b"]}', b'["%b"]', b'{"a":{"b":[{"c":"%b"},1]}}', b' { "a" : "%b" } ']
)
def test_giant_strings_are_cut_out(string: bytes, around: bytes) -> None:
    text = around % string
    parsed: list[bytes] = []
    document, _ = load(text, parsed.append, GIANT, PIECE)
    assert repr(document) == repr(orjson.loads(text))
    assert len(parsed) == 1 and len(parsed[0]) < 100 and string not in parsed[0]


@pytest.mark.parametrize(
    "text",
    [
        b'["A", 1]',  # nothing giant
        b'{"%b":1}' % (b"A" * 400),  # a key
        b'{"a":"%b","a":2}' % (b"A" * 400),  # what a later member has replaced
        b'["a",%b,"b"]' % b",".join([b"1"] * 400),  # no string
        b'["%b","%b"]' % (b"A" * 100, b'","'.join([b"xyz"] * 100)),  # too little of it is giant
        b'["%b"]' % (b"\\ud83c\\udfad" * 40),  # nowhere to break it
        b'["%b"]' % (b"\\\\" * 200),
    ],
)
def test_the_rest_is_read_whole(text: bytes) -> None:
    parsed: list[bytes] = []
    document, plain = load(text, parsed.append, GIANT, PIECE)
    assert parsed[-1] is plain and len(plain) == len(text) and repr(document) == repr(orjson.loads(text))


def test_what_is_checked_is_what_is_parsed() -> None:
    seen: list[bytes] = []
    load(b'["%b"]' % (b"[" * 400), seen.append, GIANT, PIECE)
    assert [text.count(b"[") for text in seen] == [1]
    load(b'["\\"%b"%b]' % (b"A" * 400, b",[]" * 3), seen.append, GIANT, PIECE)
    assert seen[-1].count(b"[") == 4

    def refuse(text: bytes) -> None:
        raise InvalidBody("no")

    with pytest.raises(InvalidBody):
        load(b'["%b"' % (b"A" * 400), refuse, GIANT, PIECE)  # before it is found to be no JSON


# --- the request it is made for
def big(string: str, more: str = "") -> bytes:
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": string}}]}
    return json.dumps({"model": "m", "messages": [message]})[:-1].encode() + more.encode() + b"}"


def test_a_request_with_a_giant_image() -> None:
    image = "data:image/png;base64," + "Ab+/" * LARGE
    call = parse_call(Operation.CHAT, big(image))
    assert call.large and call.body == json.loads(big(image))
    assert call.body["messages"][0]["content"][0]["image_url"]["url"] == image


@pytest.mark.parametrize("key", ["model", "\\u006dodel", "m\\u006fdel"])
def test_a_key_that_comes_twice_is_found_beside_a_giant_string(key: str) -> None:
    with pytest.raises(InvalidBody, match="two equal"):
        parse_call(Operation.CHAT, big("A" * LARGE, f', "{key}": "other"'))


def test_too_many_objects_are_found_beside_a_giant_string() -> None:
    with pytest.raises(InvalidBody, match="objects and lists"):
        parse_call(Operation.CHAT, big("A" * 8_000_000, ', "x": [' + "[]," * 500_000 + "1]"))
    with pytest.raises(InvalidBody, match="objects and lists"):
        parse_call(Operation.CHAT, big("A" * 80, ', "x": [' + "[]," * 500_000 + "1]"))
    assert parse_call(Operation.CHAT, big("[" * 600_000)).large  # these are none


def test_a_large_request_that_is_no_json_says_where() -> None:
    raw = big("A" * LARGE)[:-1]
    with pytest.raises(orjson.JSONDecodeError) as found:
        orjson.loads(raw)
    with pytest.raises(InvalidBody) as refused:
        parse_call(Operation.CHAT, raw)
    assert str(found.value) in str(refused.value)


@pytest.mark.parametrize("edits", [{}, {"top_k": 5}, {"user": None}])
@pytest.mark.parametrize(
    "more", ["", ', "stream": true', ', "stream": true, "stream_options": {"include_usage": false}']
)
@pytest.mark.parametrize(("model", "salt"), [("m", ""), ("org/Big", "s" * 20)])
def test_the_pieces_of_a_large_request_are_what_a_small_one_becomes(
    edits: dict[str, Any], more: str, model: str, salt: str
) -> None:
    call = parse_call(Operation.CHAT, big("A" * LARGE, more + ', "user": "u"'))
    pieces = call.pieces_for_engine(model, edits, salt)
    assert orjson.loads(b"".join(pieces)) == orjson.loads(call.for_engine(model, edits, salt))
    assert sum(len(piece) for piece in pieces if isinstance(piece, bytes) and piece is not call.raw) < 200
