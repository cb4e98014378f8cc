"""Finding and replacing top-level members without touching another byte."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.jsonscan import members, splice, text_span

SPACE = st.text(" \t\n\r", max_size=3)
TEXT = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(
    ['"', "\\", '\\"', "{", "}]", '","model":"x', "a\\\\", "\n", "🎭"]
)
SCALAR = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.sampled_from([0.5, -1e30, 1e-7]) | TEXT
VALUE = st.recursive(SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3))
KEY = TEXT | st.sampled_from(["model", "stream", "user", ""])


def _text(draw: st.DrawFn, text: str) -> str:
    """A string in one of its spellings: escaped or not, some letters as \\uXXXX."""
    if draw(st.booleans()):
        return json.dumps(text, ensure_ascii=draw(st.booleans()))
    return '"' + "".join(f"\\u{ord(c):04x}" if ord(c) < 0x10000 else json.dumps(c)[1:-1] for c in text) + '"'


def _render(draw: st.DrawFn, value: Any) -> str:
    def space() -> str:
        return draw(SPACE)

    if isinstance(value, str):
        return _text(draw, value)
    if isinstance(value, list):
        return (
            "["
            + ",".join(space() + _render(draw, item) + space() for item in value)
            + (space() if not value else "")
            + "]"
        )
    if isinstance(value, dict):
        return _object(draw, list(value.items()))[0]
    return json.dumps(value)


def _object(draw: st.DrawFn, pairs: list[tuple[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
    """The text, and each member's key with its value's text."""
    rendered = [(key, _text(draw, key), _render(draw, value)) for key, value in pairs]
    body = ",".join(
        draw(SPACE) + key_text + draw(SPACE) + ":" + draw(SPACE) + value_text + draw(SPACE)
        for _, key_text, value_text in rendered
    )
    return "{" + (body or draw(SPACE)) + "}", [(key, value_text) for key, _, value_text in rendered]


@st.composite
def objects(draw: st.DrawFn) -> tuple[bytes, list[tuple[str, bytes]]]:
    """An object with repeated keys, escapes and any whitespace; and what is in it."""
    pairs = draw(st.lists(st.tuples(KEY, VALUE), max_size=6))
    text, parts = _object(draw, pairs)
    return (draw(SPACE) + text + draw(SPACE)).encode(), [(key, value.encode()) for key, value in parts]


CHANGES = st.dictionaries(KEY, VALUE.map(lambda value: json.dumps(value).encode()) | st.none(), max_size=4)


@given(objects())
@settings(max_examples=200, deadline=None)
def test_members_are_found_in_order_with_repeats(made: tuple[bytes, list[tuple[str, bytes]]]) -> None:
    text, expected = made
    found = members(text)
    assert [(member.key, text[member.value : member.end]) for member in found] == expected
    assert all(text[member.start : member.start + 1] == b'"' for member in found)


@given(objects(), CHANGES)
@settings(max_examples=200, deadline=None)
def test_splice_changes_what_it_is_told_and_nothing_else(
    made: tuple[bytes, list[tuple[str, bytes]]], changes: dict[str, bytes | None]
) -> None:
    text, parts = made
    before, after = json.loads(text), json.loads(splice(text, changes))
    wanted = before | {key: json.loads(value) for key, value in changes.items() if value is not None}
    for key, value in changes.items():
        if value is None:
            wanted.pop(key, None)
    assert after == wanted
    kept = [(key, value) for key, value in parts if key not in changes]
    out = splice(text, changes)
    assert [(m.key, out[m.value : m.end]) for m in members(out) if m.key not in changes] == kept


@given(objects(), st.dictionaries(KEY, VALUE.map(lambda value: json.dumps(value).encode()), max_size=3))
@settings(max_examples=200, deadline=None)
def test_without_removals_every_other_byte_stays(
    made: tuple[bytes, list[tuple[str, bytes]]], changes: dict[str, bytes]
) -> None:
    text, _ = made
    found = members(text)
    present = {member.key for member in found}
    pieces, position = [text[: text.index(b"{") + 1]], text.index(b"{") + 1
    added = [
        json.dumps(key, ensure_ascii=False).encode() + b":" + v for key, v in changes.items() if key not in present
    ]
    if added:
        out = splice(text, changes)
        assert {key for key, _ in json.loads(out, object_pairs_hook=list)} == present | set(changes)
        changes = {key: value for key, value in changes.items() if key in present}
    for member in found:
        if member.key in changes:
            pieces += [text[position : member.value], changes[member.key]]
            position = member.end
    assert splice(text, changes) == b"".join([*pieces, text[position:]])


@pytest.mark.parametrize(
    ("text", "changes", "expected"),
    [
        (b"{}", {"a": b"1"}, b'{"a":1}'),
        (b" { } ", {"a": b"1", "b": b"[]"}, b' {"a":1,"b":[] } '),
        (b'{"b":2}', {"a": b"1"}, b'{"a":1,"b":2}'),
        (b'{"a" : 0.50 , "b":1e5}', {"a": b"null"}, b'{"a" : null , "b":1e5}'),
        (b'{"a":1,"b":2,"c":3}', {"b": None}, b'{"a":1,"c":3}'),
        (b'{"a":1}', {"a": None}, b"{}"),
        (b'{"a":1}', {"z": None}, b'{"a":1}'),
        (b'{"a":1,"b":2}', {"a": None, "b": b"3", "c": b"4"}, b'{"c":4,"b":3}'),
        (b'{"a":1,"a":2}', {"a": b"3"}, b'{"a":3,"a":3}'),
        (b'{"x":{"a":1},"a":[{"a":2}]}', {"a": b"0"}, b'{"x":{"a":1},"a":0}'),
        (b'{"\\u0061":1}', {"a": b"2"}, b'{"\\u0061":2}'),
    ],
)
def test_splice_examples(text: bytes, changes: dict[str, bytes | None], expected: bytes) -> None:
    assert splice(text, changes) == expected


def test_members_of_an_object_inside() -> None:
    text = b'data: {"a":{"b":1}}'
    assert [member.key for member in members(text, 6)] == ["a"]
    assert [member.key for member in members(text, 7)] == ["b"]


@pytest.mark.parametrize("make", [lambda n: b"x" * n, lambda n: b'\\"' * (n // 2), lambda n: b"\\\\" * (n // 2)])
def test_large_strings_are_stepped_over(make: Callable[[int], bytes]) -> None:
    text = b'{"a":"' + make(200_000) + b'","b":{"c":["' + make(100_000) + b'"]},"d":1}'
    assert [member.key for member in members(text)] == ["a", "b", "d"]
    assert json.loads(splice(text, {"d": b"2"}))["d"] == 2


@settings(max_examples=300)
@given(objects(), TEXT)
def test_a_text_is_found_where_it_is(given: tuple[bytes, list[tuple[str, bytes]]], name: str) -> None:
    text, pairs = given
    if any(key == "model" for key, _ in pairs):
        return
    for spelt in ('"model"', '"\\u006dodel"'):
        rest = text[text.index(b"{") + 1 :]
        whole = b"{" + spelt.encode() + b" : " + json.dumps(name).encode() + (b"," if pairs else b"") + rest
        start, end = text_span(whole, "model")
        assert json.loads(whole[start:end]) == name
        assert (start, end) == next((one.value, one.end) for one in members(whole) if one.key == "model")
