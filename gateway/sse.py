"""Taps: what the gateway reads off an answer's stream while its bytes pass through. No I/O.

A tap is fed whatever the socket held and returns what may go on to the client: whole events, each as it came, save for
the model's name, events nobody asked for, and lines that would break clients. The ordinary chunk takes the short way:
once the beginning that all chunks of a stream share has been learnt from one of them, a read is recognised by counting
that beginning, with no parsing. Whatever looks different is parsed.

That the short way is exact rests on two facts of JSON: a quotation mark inside a string is always escaped, so raw bytes
such as `"finish_reason":"` or `data: {"id":"` cannot be part of a text; and a string holds no raw newline, so newlines
count lines.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from backends.failures import Failure, FailureKind, read_failure
from gateway import jsonscan
from gateway.errors import GatewayError, from_failure
from gateway.types import Usage

MAX_EVENT = 32 * 1024 * 1024
DONE = b"data: [DONE]\n\n"
_FIELD = re.compile(rb"(data|event)(?::|$) ?")
_CHOICE = re.compile(rb'"choices":( ?)\[\{(?:"finish_reason":\1null, ?)?"index":\1\d+,')


class StreamTap:
    """Reads one event stream.

    Args:   asked: the model name to show, as the client wrote it. strip_usage: take out the usage event, since only
            the gateway asked for it. max_event: bytes after which an event without an end is given up.
    """

    __slots__ = (
        "_held", "_marks", "_model", "_new", "_old", "_prefix", "_skip_newline", "_suffix", "asked", "done", "events",
        "failure", "finish_reasons", "identity", "max_event", "seen", "started", "strip_usage", "tokens", "usage",
    )  # fmt: skip

    def __init__(self, asked: str, *, strip_usage: bool, max_event: int = MAX_EVENT) -> None:
        self.asked, self.strip_usage, self.max_event = asked, strip_usage, max_event
        self.failure: Failure | None = None  # the engine said so inside the stream, or the stream made no sense
        self.usage: Usage | None = None
        self.events = 0  # data events passed on
        self.tokens = 0  # events that carried text, reasoning or tool calls: an estimate of completion tokens
        self.started = False  # the first such event has been seen
        self.done = False
        self._held = bytearray()  # an event whose end has not arrived
        self._skip_newline = False  # the last read ended in CR: a following LF belongs to it
        self.seen: set[int] = set()  # choice indexes
        self.finish_reasons: dict[int, Any] = {}  # of those that have come to their end
        self.identity: tuple[Any, Any] | None = None  # id and model of the answer, as its first chunk says
        self._prefix = b""  # how every ordinary chunk of this stream begins; empty until it has been learnt
        self._suffix = b"\n\n"  # and how it ends
        self._old = self._new = b""  # which of the two holds the name, and how it shall read
        self._marks: tuple[bytes, ...] = ()  # of what needs a closer look: an end, usage, an error, a choice more
        self._model = orjson.dumps(asked)

    @property
    def complete(self) -> bool:
        """Whether every choice came to its end. `[DONE]` alone does not say so: engines send it after errors too."""
        return self.failure is None and bool(self.finish_reasons) and self.finish_reasons.keys() >= self.seen

    def error(self) -> GatewayError:
        """The failure, once there is one, as the client's error."""
        assert self.failure is not None
        return from_failure(self.failure)

    def feed(self, data: bytes) -> bytes:
        """What can go to the client of all that has arrived."""
        if self.done or self.failure:
            return b""
        prefix, suffix = self._prefix, self._suffix
        if prefix and data.startswith(prefix) and data.endswith(suffix) and not self._held and not self._skip_newline:
            lines = data.count(b"\n")
            finish, usage, error, further = self._marks
            # One event, or as many beginnings and ends as events.
            if (
                (lines == 2 or data.count(prefix) * 2 == lines == data.count(suffix) * 2)
                and finish not in data
                and usage not in data
                and error not in data
                and further not in data
            ):
                count = lines // 2
                self.events += count
                self.tokens += count
                return data if self._old is self._new else data.replace(self._old, self._new)
        if b"\r" in data or self._skip_newline:
            data = self._normalise(data)
        if self._held or not data.endswith(b"\n\n"):
            data = self._whole_events(data)
            if not data:
                return b""
        return self._read(data)

    def cut(self) -> None:
        """The stream will not go on: an event that is held will never be whole."""
        self._held.clear()

    def end(self) -> bytes:
        """The last bytes for the client once the engine has ended the stream. Look at `complete` afterwards."""
        rest = b""
        if self._held and not self.done and self.failure is None:
            self._prefix = b""  # it may be cut off in the middle: no short way
            rest = self._read(bytes(self._held).rstrip(b"\n") + b"\n\n")
            self._held.clear()
        if self.complete and not self.done:
            self.done = True
            return rest + DONE
        return rest

    def _normalise(self, data: bytes) -> bytes:
        """All legal line ends as LF. A CR at the end counts at once; an LF that follows in the next read is dropped."""
        if self._skip_newline and data.startswith(b"\n"):
            data = data[1:]
        self._skip_newline = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _whole_events(self, data: bytes) -> bytes:
        """The events that are complete with `data`; the rest is held."""
        held = self._held
        search_from = max(0, len(held) - 1)
        held += data
        boundary = held.rfind(b"\n\n", search_from)
        if boundary < 0:
            if len(held) > self.max_event:
                self.failure = Failure(
                    FailureKind.BROKEN, f"An event of the stream is larger than {self.max_event} bytes."
                )
                held.clear()
            return b""
        whole = bytes(held[: boundary + 2])
        del held[: boundary + 2]
        return whole

    def _read(self, data: bytes) -> bytes:
        """The long way: block by block."""
        passed = []
        for block in data.split(b"\n\n"):
            if self._is_ordinary(block):
                self.events += 1
                self.tokens += 1
                passed.append((block + b"\n\n").replace(self._old, self._new))
            elif block and not block.isspace():
                passed.append(self._block(block))
                if self.done or self.failure:
                    break
        return b"".join(passed)

    def _is_ordinary(self, block: bytes) -> bool:
        """The short way for one event that arrived together with others."""
        return (
            bool(self._prefix)
            and block.startswith(self._prefix)
            and block.endswith(self._suffix[:-2])
            and b"\n" not in block
            and not any(mark in block for mark in self._marks)
        )

    def _block(self, block: bytes) -> bytes:
        lines = [line for line in block.split(b"\n") if line]
        if all(line.startswith(b":") for line in lines):
            return b"\n".join(lines) + b"\n\n"
        kept, payload = [], []
        for line in lines:
            # `id` and `retry` would make clients dispatch events without data later on; they mean nothing here.
            field = _FIELD.match(line)
            if field:
                kept.append(line)
                if field[1] == b"data":
                    payload.append(line[field.end() :])
        text = b"\n".join(payload)
        if not text.strip():
            return b""
        if len(payload) > 1:  # one object over several data lines: one line says the same and can be edited
            kept = [b"data: " + b" ".join(payload)]
        return self._event(b"\n".join(kept) + b"\n\n", text, simple=len(kept) == 1)

    def _event(self, block: bytes, text: bytes, *, simple: bool) -> bytes:
        if text.strip() == b"[DONE]":
            return self._last(block)
        chunk = self._parse(text)
        if chunk is None or not self._book(chunk):
            return b""
        return self._named(block, chunk, simple)

    def _parse(self, text: bytes) -> dict[str, Any] | None:
        """A chunk; None when it is an error or makes no sense, which ends the stream."""
        try:
            chunk = orjson.loads(text)
        except orjson.JSONDecodeError:
            chunk = None
        if not isinstance(chunk, dict):
            self.failure = Failure(FailureKind.BROKEN, "The engine sent an event that is not a JSON object.")
            return None
        if chunk.get("error") or chunk.get("object") == "error":  # the second: flat errors of older vLLM and SGLang
            self.failure = self._read_failure(text)
            return None
        return chunk

    def _read_failure(self, text: bytes) -> Failure:
        return read_failure(0, text)

    def _book(self, chunk: dict[str, Any]) -> bool:
        """Reads what a chunk says of usage and choices; whether the client is to see it."""
        if self.identity is None:
            self.identity = chunk.get("id"), chunk.get("model")
        choices = chunk.get("choices") or []
        usage = read_usage(chunk.get("usage"))
        if usage is not None:
            self.usage = usage
            if not choices and self.strip_usage:
                return False
        if self._read_choices(choices):
            self.tokens += 1
            self.started = True
        self.events += 1
        return True

    def _last(self, block: bytes) -> bytes:
        if not self.complete:
            self.failure = Failure(FailureKind.BROKEN, "The engine ended the stream before the answer was finished.")
            return b""
        self.done = True
        return block

    def _read_choices(self, choices: Any) -> bool:
        """Notes which choices are finished; whether any of them carries something for the reader."""
        carries = False
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict):
                continue
            index = choice.get("index")
            if not isinstance(index, int):
                index = 0
            self.seen.add(index)
            if reason := choice.get("finish_reason"):
                self.finish_reasons[index] = reason
            delta = choice.get("delta")
            if choice.get("text") or (isinstance(delta, dict) and any(v for k, v in delta.items() if k != "role")):
                carries = True
        return carries

    def _named(self, block: bytes, chunk: dict[str, Any], simple: bool) -> bytes:
        """The block with the name the client asked for; learns the frame of chunks of the simple form."""
        model = chunk.get("model")
        if not isinstance(model, str):
            return block
        if simple and self.started and block.startswith(b"data: {"):
            self._learn(block, model == self.asked)
        return block if model == self.asked else self._renamed_block(block)

    def _learn(self, block: bytes, same: bool) -> None:
        """Most engines write the name in front of the choices: what is common lies at the beginning. llama.cpp's server
        writes it behind them: there the common end is remembered as well."""
        choices_end = 0
        for member in jsonscan.walk(block, block.index(b"{")):
            if member.key == "choices":
                choices_end = member.end
            elif member.key == "model":
                break
        else:
            return
        # The beginning reaches over the choice's index: a choice that was never read could never be missed at the end.
        choice = _CHOICE.search(block, 0 if choices_end else member.end)
        if choice is None or b'"finish_reason" ' in block:
            return
        self._marks = tuple(
            mark.replace(b" ", choice[1]) for mark in (b'"finish_reason": "', b'"usage": {', b'"error": ', b'}, {"')
        )
        self._prefix = block[: choice.end()]
        self._suffix = block[choices_end:] if choices_end else b"\n\n"
        self._old = self._suffix if choices_end else self._prefix
        start = choices_end or 0
        self._new = (
            self._old
            if same
            else (block[start : member.value] + self._model + block[member.end : start + len(self._old)])
        )

    def _renamed_block(self, block: bytes) -> bytes:
        for member in jsonscan.walk(block, block.index(b"{")):
            if member.key == "model":
                return block[: member.value] + self._model + block[member.end :]
        return block


def read_usage(usage: Any) -> Usage | None:
    """Tokens from an OpenAI usage object; None when there is none or it is not one."""
    if not isinstance(usage, dict):
        return None
    if "prompt_tokens" not in usage and "completion_tokens" not in usage:
        return None
    prompt, completion = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    if not prompt and not completion:
        return None  # nothing was counted: some engines write zeros into every chunk until the last
    cached = usage.get("prompt_tokens_details")
    details = usage.get("completion_tokens_details")
    reasoning = details.get("reasoning_tokens") if isinstance(details, dict) else usage.get("reasoning_tokens")
    return Usage(
        prompt, completion, _count(cached.get("cached_tokens")) if isinstance(cached, dict) else 0, _count(reasoning)
    )


def _count(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0
