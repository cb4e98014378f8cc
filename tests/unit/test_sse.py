"""Stream taps: what passes, what is read off, for every way the same bytes can be cut."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.failures import FailureKind, read_failure
from gateway.sse import DONE, StreamTap, read_usage
from gateway.types import Usage

ASKED = "chat"
TOKENS = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}


# --- building streams
def event(value: object, style: tuple[str, str] = (",", ":")) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=style).encode() + b"\n\n"


def chunk(
    text: str | None = None, *, index: int = 0, finish: str | None = None, model: str = "engine", **more: Any
) -> dict[str, Any]:
    delta = {} if text is None else {"content": text}
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
    return {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": model, "choices": [choice]} | more


def usage_chunk(model: str = "engine") -> dict[str, Any]:
    return chunk(model=model) | {"choices": [], "usage": TOKENS}


def tap_of(asked: str = ASKED, *, strip: bool = True, max_event: int = 1 << 20) -> StreamTap:
    return StreamTap(asked, strip_usage=strip, max_event=max_event)


@dataclass
class Result:
    """All that a tap says of a stream, except `tokens`, which is an estimate."""

    out: bytes = b""
    usage: Usage | None = None
    complete: bool = False
    events: int = 0
    started: bool = False
    done: bool = False
    failure: FailureKind | None = None


def run(parts: Iterable[bytes], tap: StreamTap | None = None) -> Result:
    tap = tap or tap_of()
    out = b"".join([tap.feed(part) for part in parts])
    out += tap.end()
    kind = tap.failure.kind if tap.failure else None
    return Result(out, tap.usage, tap.complete, tap.events, tap.started, tap.done, kind)


def events_of(out: bytes) -> list[Any]:
    """As a strict client reads them: every event has data, and the data is JSON or [DONE]."""
    found = []
    for block in out.split(b"\n\n"):
        lines = [line for line in block.split(b"\n") if not line.startswith(b":")]
        data = [line[5:].strip() for line in lines if line.startswith(b"data:")]
        assert all(line.startswith((b"data:", b"event:")) for line in lines if line), block
        if data:
            assert data != [b""]
            found.append("DONE" if data == [b"[DONE]"] else json.loads(b"\n".join(data)))
    return found


# --- a reference: every event parsed, nothing learnt
@dataclass
class Reference:
    asked: str
    strip: bool
    result: Result = field(default_factory=Result)
    seen: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    ended: bool = False

    def run(self, payloads: Sequence[bytes]) -> Result:
        """`payloads`: the data of each event, one line each."""
        for payload in payloads:
            if not self.ended:
                self._event(payload)
        result = self.result
        result.complete = result.failure is None and bool(self.finished) and self.finished >= self.seen
        if result.complete and not result.done:
            result.out += DONE
            result.done = True
        return result

    def _event(self, payload: bytes) -> None:
        result = self.result
        if payload == b"[DONE]":
            self.ended = True
            if self.finished and self.finished >= self.seen:
                result.done = True
                result.out += b"data: [DONE]\n\n"
            else:
                result.failure = FailureKind.BROKEN
            return
        pairs = json.loads(payload, object_pairs_hook=list)
        value = json.loads(payload)
        if value.get("error"):
            self.ended, result.failure = True, read_failure(0, payload).kind
            return
        usage = value.get("usage")
        if usage:
            result.usage = Usage(usage["prompt_tokens"], usage["completion_tokens"])
            if not value["choices"] and self.strip:
                return
        for choice in value["choices"]:
            self.seen.add(choice["index"])
            if choice["finish_reason"]:
                self.finished.add(choice["index"])
            delta = choice.get("delta") or {}
            result.started |= bool(choice.get("text") or any(v for k, v in delta.items() if k != "role"))
        result.events += 1
        result.out += b"data: " + self._named(payload, pairs) + b"\n\n"

    def _named(self, payload: bytes, pairs: list[tuple[str, Any]]) -> bytes:
        """Renamed by search from the position of the top-level member, which the streams here spell plainly."""
        old = dict(pairs).get("model")
        if old is None:
            return payload
        position = len(payload) if not pairs else 0
        for style in (b'"model":', b'"model": '):
            place, depth, text = 0, 0, False
            while place < len(payload):
                byte = payload[place : place + 1]
                if not text and depth == 1 and payload.startswith(style + _quoted(old), place):
                    position = place + len(style)
                    return payload[:position] + _quoted(self.asked) + payload[position + len(_quoted(old)) :]
                if byte == b"\\":
                    place += 1
                elif byte == b'"':
                    text = not text
                elif not text:
                    depth += (byte in (b"{", b"[")) - (byte in (b"}", b"]"))
                place += 1
        raise AssertionError(payload)


def _quoted(text: str) -> bytes:
    return json.dumps(text, ensure_ascii=False).encode()


# --- streams made by chance
NASTY = st.sampled_from([
    'data: {"id":"', '"finish_reason":"stop"', '": ["', '"usage":{', '"error":', "\n\n", "\r\n", "data: [DONE]",
    "\\", '\\"', "🎭 漢字", "", " ", '},{"index":1', '{"index":0,', '"model":"engine"', "data: ", "\u2028", "a" * 300,
])  # fmt: skip
TEXTS = NASTY | st.text(st.characters(codec="utf-8"), max_size=12)
MODELS = st.sampled_from(["engine", "chat", 'quo"ted\\', "漢字-7B", "org/Big-7B", "Engine"])


@st.composite
def payloads(draw: st.DrawFn) -> list[bytes]:
    """The data lines of a stream as engines send it, in all the orders and habits they have."""
    style = draw(st.sampled_from([(",", ":"), (", ", ": ")]))
    model, choices = draw(MODELS), draw(st.integers(1, 3))
    always_usage, running_usage = draw(st.booleans()), draw(st.booleans())
    reorder, moving_clock, models_change = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    completions = draw(st.booleans())
    lines: list[bytes] = []

    def add(value: dict[str, Any]) -> None:
        if reorder:
            value = {key: value[key] for key in draw(st.permutations(list(value)))}
        lines.append(json.dumps(value, ensure_ascii=False, separators=style).encode())

    def one(choice: dict[str, Any]) -> dict[str, Any]:
        value = chunk(model=draw(MODELS) if models_change else model) | {"choices": [choice]}
        if moving_clock:
            value["created"] = draw(st.integers(1, 3))
        if running_usage:
            value["usage"] = {"prompt_tokens": 3, "completion_tokens": len(lines)}
        elif always_usage:
            value["usage"] = None
        return value

    def said(text: str) -> dict[str, Any]:
        if completions:
            return {"text": text}
        kinds: tuple[dict[str, Any], ...] = (
            {"content": text}, {"reasoning": text}, {"reasoning_content": text}, {"role": "assistant", "content": ""},
            {"tool_calls": [{"index": 0, "function": {"arguments": text}}, {"index": 1, "id": "x"}]}, {},
        )  # fmt: skip
        return {"delta": draw(st.sampled_from(kinds))}

    for _ in range(draw(st.integers(0, 8))):
        choice = {"index": draw(st.integers(0, choices - 1)), **said(draw(TEXTS)), "finish_reason": None}
        value = one(choice)
        if draw(st.integers(0, 9)) == 0:  # two choices in one event
            value["choices"].append({"index": draw(st.integers(0, choices - 1)), **said("b"), "finish_reason": None})
        add(value)
    for index in range(choices):
        if draw(st.integers(0, 9)):
            add(one({"index": index, **said(draw(TEXTS)), "finish_reason": draw(st.sampled_from(["stop", "length"]))}))
    if draw(st.booleans()):
        add(usage_chunk(model))
    if draw(st.booleans()):
        lines.append(b"[DONE]")
    if draw(st.integers(0, 4)) == 0:
        error = event({"error": {"message": "CUDA out of memory"}}, style)[6:-2]
        lines.insert(draw(st.integers(0, len(lines))), error)
    return lines


@st.composite
def cut(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """`data` in pieces: one byte each, or at any places."""
    if draw(st.integers(0, 4)) == 0:
        return [data[i : i + 1] for i in range(len(data))]
    places = sorted(draw(st.sets(st.integers(1, max(1, len(data) - 1)), max_size=12)))
    edges = [0, *places, len(data)]
    return [piece for start, end in pairwise(edges) if (piece := data[start:end])]


@given(st.data(), payloads(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_short_way_long_way_and_every_split_say_the_same(data: st.DataObject, lines: list[bytes], strip: bool) -> None:
    stream = b"".join(b"data: " + line + b"\n\n" for line in lines)
    expected = Reference(ASKED, strip).run(lines)
    assert run([stream] if stream else [], tap_of(strip=strip)) == expected
    assert run([b"data: " + line + b"\n\n" for line in lines], tap_of(strip=strip)) == expected
    assert run(data.draw(cut(stream)), tap_of(strip=strip)) == expected


FRAMES: dict[str, Callable[[bytes], bytes]] = {
    "plain": lambda line: b"data: " + line + b"\n\n",
    "crlf": lambda line: b"data: " + line + b"\r\n\r\n",
    "cr": lambda line: b"data: " + line + b"\r\r",
    "mixed line ends": lambda line: b"data: " + line + b"\r\n\n",
    "no space": lambda line: b"data:" + line + b"\n\n",
    "event line": lambda line: b"event: message\ndata: " + line + b"\n\n",
    "event line behind": lambda line: b"data: " + line + b"\nevent: message\n\n",
    "comment in front": lambda line: b": ping\ndata: " + line + b"\n\n",
    "comments between": lambda line: b": ping\n\ndata: " + line + b"\n\n:\n\n",
    "id and retry": lambda line: b"id: 7\nretry: 3000\ndata: " + line + b"\n\n",
    "retry alone": lambda line: b"retry: 3000\n\ndata: " + line + b"\n\n",
    "bare data": lambda line: b"data:\n\ndata: " + line + b"\n\ndata\n\n",
    "unknown field": lambda line: b"x: y\ndatabase: z\ndata: " + line + b"\n\n",
    "many blank lines": lambda line: b"\n\n\ndata: " + line + b"\n\n\n\n",
    "crlf, event and id": lambda line: b"event: m\r\nid: 1\r\ndata: " + line + b"\r\n\r\n",
}
LINES = [
    event(value)[6:-2]
    for value in (
        chunk() | {"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]},
        chunk('say ": ["'), chunk("naïve 🎭 漢字"), chunk("c"), chunk("d"), chunk(" e", finish="length"), usage_chunk(),
    )
]  # fmt: skip


@pytest.mark.parametrize("frame", FRAMES)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_legal_forms_of_a_stream_mean_the_same(frame: str, data: st.DataObject) -> None:
    stream = b"".join(FRAMES[frame](line) for line in [*LINES, b"[DONE]"])
    whole = run([stream])
    plain = Reference(ASKED, strip=True).run([*LINES, b"[DONE]"])
    assert events_of(whole.out) == events_of(plain.out)
    assert (whole.usage, whole.complete, whole.events) == (Usage(7, 5), True, len(LINES) - 1)
    assert run(data.draw(cut(stream))) == whole


@pytest.mark.parametrize("frame", FRAMES)
def test_legal_forms_byte_by_byte(frame: str) -> None:
    stream = b"".join(FRAMES[frame](line) for line in [*LINES, b"[DONE]"])
    assert run(stream[i : i + 1] for i in range(len(stream))) == run([stream])


def test_crlf_cut_between_its_two_characters() -> None:
    tap = tap_of("engine")
    line = event(chunk("a"))[:-2]
    assert tap.feed(line + b"\r") == b""
    assert tap.feed(b"\n\r") == line + b"\n\n"
    assert tap.feed(b"\n" + line + b"\r\n\r\n") == line + b"\n\n"


def test_ordinary_stream_passes_byte_for_byte_when_the_names_agree() -> None:
    parts = [event(chunk(text)) for text in "abc"] + [event(chunk(finish="stop")), DONE]
    assert run(parts, tap_of("engine")).out == b"".join(parts)


def test_each_chunk_leaves_as_soon_as_it_is_whole() -> None:
    tap = tap_of("engine")
    for text in ("a", "b", "c"):
        data = event(chunk(text))
        assert tap.feed(data[:-1]) == b""
        assert tap.feed(data[-1:]) == data


# --- names
@pytest.mark.parametrize("asked", ["chat", 'q"uo\\te', "漢字", "org/model:tag"])
def test_only_the_top_level_model_is_renamed(asked: str) -> None:
    text = 'I am "model":"engine", {"model": "engine"}'
    values = [chunk(text, extra={"model": "engine"}) for _ in range(3)] + [chunk(finish="stop")]
    out = events_of(run([event(value) for value in values], tap_of(asked)).out)
    assert out == [value | {"model": asked} for value in values] + ["DONE"]


def test_every_other_byte_stays_when_a_name_changes() -> None:
    line = (
        b'data: { "id" : "c" ,"model"\t:  "engine","choices":[{"index":0,"delta":{"content":"\\u00e9"},"x":1.50}] }\n\n'
    )
    assert tap_of().feed(line) == line.replace(b'"engine"', b'"chat"')


def test_a_name_in_other_case_or_behind_the_choices_is_renamed_too() -> None:
    behind = {"choices": chunk("b")["choices"], "model": "engine"}
    values = [chunk("a"), chunk("b", model="ENGINE"), behind, chunk("c"), chunk(finish="stop")]
    out = events_of(run([event(value) for value in values]).out)
    assert [value["model"] for value in out[:-1]] == [ASKED] * 5


def test_keys_that_only_look_like_the_model_stay() -> None:
    line = b'data: {"model_info":"engine","Model":"engine","choices":[],"model":"engine","models":"engine"}\n\n'
    assert tap_of().feed(line) == line.replace(b'"model":"engine"', b'"model":"chat"')


def test_a_chunk_without_a_name_gets_none() -> None:
    value = chunk("a")
    del value["model"]
    assert tap_of().feed(event(value)) == event(value)


# --- usage
@pytest.mark.parametrize("strip", [True, False])
def test_usage_event_is_shown_only_to_those_who_asked(strip: bool) -> None:
    values = [chunk("a"), chunk(finish="stop"), usage_chunk()]
    result = run([*(event(value) for value in values), DONE], tap_of("engine", strip=strip))
    assert result.usage == Usage(7, 5)
    assert events_of(result.out) == [*(values[:2] if strip else values), "DONE"]


def test_usage_inside_the_last_choice_is_read_and_stays() -> None:
    last = chunk(finish="stop", usage=TOKENS)
    result = run([event(chunk("a")), event(chunk("b")), event(last)], tap_of("engine"))
    assert result.usage == Usage(7, 5)
    assert last in events_of(result.out)


def test_the_last_of_continuous_usages_counts() -> None:
    values = [chunk(str(i), usage={"prompt_tokens": 3, "completion_tokens": i}) for i in range(1, 6)]
    assert run([event(value) for value in values]).usage == Usage(3, 5)


def test_an_early_event_without_choices_passes_and_ends_nothing() -> None:
    first = chunk() | {"choices": []}
    result = run([event(first), event(chunk("a")), event(chunk(finish="stop")), DONE], tap_of("engine"))
    assert result.complete
    assert events_of(result.out)[0] == first


def test_usage_object() -> None:
    given = TOKENS | {
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
    assert read_usage(given) == Usage(7, 5, 4, 2)
    assert read_usage({"prompt_tokens": 7, "prompt_tokens_details": None, "reasoning_tokens": 3}) == Usage(7, 0, 0, 3)
    assert read_usage({"prompt_tokens": -1, "completion_tokens": "5"}) is None
    assert read_usage({"prompt_tokens": 0, "completion_tokens": 0}) is None
    assert read_usage({"prompt_tokens": 0, "completion_tokens": 5}) == Usage(0, 5)
    assert read_usage(None) is None
    assert read_usage([1]) is None


# --- ends
def test_done_is_added_to_a_finished_stream_that_lacks_it_once() -> None:
    finished = [event(chunk("a")), event(chunk(finish="stop"))]
    assert run(finished).out.endswith(DONE)
    assert run([*finished, DONE]).out.count(DONE) == 1


def test_done_without_a_finish_is_a_failure() -> None:
    result = run([event(chunk("a")), DONE])
    assert result.failure is FailureKind.BROKEN
    assert b"[DONE]" not in result.out
    assert not result.complete


@pytest.mark.parametrize("parts", [[], [event(chunk("a"))], [event(chunk("a")), b": ping\n\n"]])
def test_an_end_without_a_finish_is_not_complete(parts: list[bytes]) -> None:
    result = run(parts)
    assert not result.complete
    assert b"[DONE]" not in result.out


@pytest.mark.parametrize("together", [True, False])
def test_every_choice_has_to_finish(together: bool) -> None:
    """A second choice that appears in the middle must not be overlooked, however the chunks arrive."""
    values = [chunk("a"), chunk("b"), chunk("c", index=1), chunk("d"), chunk(finish="stop")]
    parts = [event(value) for value in values]
    assert not run([b"".join(parts)] if together else parts).complete
    assert run([*parts, event(chunk(index=1, finish="stop"))]).complete


def test_a_second_choice_inside_one_event_has_to_finish_too() -> None:
    both = chunk("b")
    both["choices"] = [*both["choices"], *chunk("c", index=1)["choices"]]
    parts = [event(value) for value in (chunk("a"), chunk("b"), both, chunk(finish="stop"))]
    assert not run(parts).complete


def test_last_event_without_its_blank_line_still_counts() -> None:
    result = run([event(chunk("a")), event(chunk("b", finish="stop"))[:-2]], tap_of("engine"))
    assert result.complete
    assert result.out == event(chunk("a")) + event(chunk("b", finish="stop")) + DONE


def test_nothing_passes_after_the_end() -> None:
    tap = tap_of()
    tap.feed(event(chunk(finish="stop")) + DONE)
    assert tap.feed(event(chunk("more"))) == b""
    assert tap.end() == b""


# --- failures
@pytest.mark.parametrize("before", range(4))
@pytest.mark.parametrize("together", [True, False])
def test_an_error_event_ends_the_stream_wherever_it_stands(before: int, together: bool) -> None:
    good = [event(chunk(text)) for text in "abc"[:before]]
    error = event({"error": {"message": "CUDA out of memory", "code": 500}})
    parts = [*good, error, event(chunk(finish="stop")), DONE]
    tap = tap_of("engine")
    result = run([b"".join(parts)] if together else parts, tap)
    assert result.out == b"".join(good)  # the pipeline writes the client's error event
    assert result.failure is FailureKind.BROKEN
    assert tap.failure is not None
    assert tap.failure.message == "CUDA out of memory"
    assert not result.complete


def test_an_error_with_the_beginning_of_every_chunk_is_seen() -> None:
    parts = [event(chunk("a")), event(chunk("b")), event(chunk("c", error={"message": "context window exceeded"}))]
    assert run(parts).failure is FailureKind.CONTEXT_LENGTH


@pytest.mark.parametrize("junk", [b"hello", b"[1]", b'"text"', b'{"id":', b"5", b"null", b"\xff\xfe"])
def test_an_event_that_is_no_object_is_a_failure(junk: bytes) -> None:
    result = run([event(chunk("a")), b"data: " + junk + b"\n\n", event(chunk(finish="stop")), DONE])
    assert result.failure is FailureKind.BROKEN
    assert len(events_of(result.out)) == 1


@pytest.mark.parametrize(
    "odd", [{"choices": 5}, {"choices": True}, {"choices": "x"}, {"choices": [None, 3]}, {"choices": None},
            {"choices": [{"index": [1]}]}, {"choices": [{"index": "0", "delta": "x"}]}, {"usage": [1]}, {"model": 3}],
)  # fmt: skip
def test_odd_chunks_never_raise(odd: dict[str, Any]) -> None:
    result = run([event(chunk("a")), event(chunk() | odd), event(chunk(finish="stop")), DONE])
    assert result.failure is None
    assert result.done


def test_a_large_event_passes_whole() -> None:
    big = event(chunk("x" * (5 << 20)))
    stream = event(chunk("a")) + big + event(chunk(finish="stop")) + DONE
    tap = tap_of("engine", max_event=8 << 20)
    assert run((stream[i : i + 65536] for i in range(0, len(stream), 65536)), tap).out == stream


def test_an_endless_event_is_a_failure_and_is_let_go() -> None:
    tap = tap_of(max_event=10_000)
    assert tap.feed(b'data: {"x":"') == b""
    for _ in range(100):
        assert tap.feed(b"y" * 1000) == b""
    assert tap.failure is not None
    assert tap.failure.kind is FailureKind.BROKEN
    assert "10000" in tap.failure.message
    assert tap.end() == b""
    assert not tap.complete


# --- the estimate, and the first token
def test_first_token_is_the_first_text_reasoning_or_tool_call() -> None:
    for delta in ({"content": "a"}, {"reasoning": "a"}, {"reasoning_content": "a"}, {"tool_calls": [{"index": 0}]}):
        tap = tap_of()
        tap.feed(b": ping\n\n")
        tap.feed(event(chunk() | {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}))
        assert (tap.started, tap.tokens) == (False, 0)
        tap.feed(event(chunk() | {"choices": [{"index": 0, "delta": delta}]}))
        assert (tap.started, tap.tokens) == (True, 1)


def test_tokens_are_estimated_by_the_chunks_that_carry_something() -> None:
    tap = tap_of()
    for text in "abcdefgh":
        tap.feed(event(chunk(text)))
    tap.feed(event(chunk("ignored")) + event(chunk("too")))
    assert (tap.tokens, tap.events) == (10, 10)
