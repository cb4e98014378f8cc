"""How engines word their answers: chunk order, framing, where usage and the finish go, and the shapes of errors.

Values only. `engine.py` puts them on a socket. Names of fields and their order follow what each engine was seen to
send; a dialect that is not a backend of its own reaches the gateway as `openai_compatible`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

JSON = dict[str, Any]
UPSTREAM_MODEL = "org/Engine-Model-7B"
DONE = b"[DONE]"
USAGE = {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16}
Finish = Literal["with_text", "separate", "with_usage"]


def compact(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def spaced(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


@dataclass(frozen=True)
class Dialect:
    """One engine's manners."""

    name: str
    backend: str = "openai_compatible"  # what an operator would configure
    owned_by: str | None = "organization"
    role: JSON | None = field(default_factory=lambda: {"role": "assistant", "content": ""})
    role_in_every_delta: bool = False
    finish: Finish = "separate"
    choices_first: bool = False  # "choices" before "id" and "model"
    choice: tuple[str, ...] = ("index", "delta", "logprobs", "finish_reason")  # its keys in their order
    spaces: bool = False  # JSON with a space after every colon and comma
    crlf: bool = False
    trailing_space: bool = False  # after the role chunk's JSON
    ping: bytes | None = None  # a comment during prefill
    null_usage: bool = False  # "usage":null in all other chunks
    nulls_in_deltas: bool = False
    usage_object: str | None = None  # `object` of the usage chunk where it differs from the others
    text_usage: Literal["alone", "with_finish"] = "alone"  # where streamed completions carry it
    reasoning: str = "reasoning_content"
    chunk_extras: Mapping[str, Any] = field(default_factory=dict)
    error_shape: str = "D"
    done_after_error: bool = False

    # --- streams
    def dump(self, value: Any) -> bytes:
        return spaced(value) if self.spaces else compact(value)

    def frame(self, payload: Any, *, space: bool = False) -> bytes:
        """One SSE event."""
        data = payload if isinstance(payload, bytes) else self.dump(payload)
        end = b"\r\n\r\n" if self.crlf else b"\n\n"
        return b"data: " + data + (b" " if space else b"") + end

    def chunk(
        self, delta: JSON, finish: str | None = None, *, index: int = 0, usage: JSON | None = None, **more: Any
    ) -> JSON:
        if self.role_in_every_delta:
            delta = {"role": "assistant"} | delta
        if self.nulls_in_deltas:
            delta = {"role": None, "content": None, "reasoning_content": None, "tool_calls": None} | delta
        fields = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        return self._chunk([{key: fields[key] for key in self.choice}], usage, **more)

    def _chunk(self, choices: list[JSON], usage: JSON | None, **more: Any) -> JSON:
        head: JSON = {
            "id": "chatcmpl-7f3a",
            "object": "chat.completion.chunk",
            "created": 1760000000,
            "model": UPSTREAM_MODEL,
        }
        body: JSON = {"choices": choices} | head if self.choices_first else head | {"choices": choices}
        if usage is not None or self.null_usage:
            body["usage"] = usage
        return body | dict(self.chunk_extras) | more

    def usage_chunk(self, usage: JSON) -> JSON:
        return self._chunk([], usage, **({"object": self.usage_object} if self.usage_object else {}))

    def chunks(
        self,
        pieces: Sequence[str | JSON] = ("Hel", "lo, ", "world"),
        finish: str = "stop",
        *,
        usage: JSON | None = None,
        n: int = 1,
    ) -> list[JSON]:
        """The chunks of a whole answer. A piece is text, or a delta of its own. `usage` only when it was asked for."""
        deltas: list[JSON] = [{"content": piece} if isinstance(piece, str) else piece for piece in pieces]
        every = range(n)
        out = [] if self.role is None else [self.chunk(self.role, index=index) for index in every]
        for place, delta in enumerate(deltas):
            last = self.finish == "with_text" and place == len(deltas) - 1
            out += [self.chunk(delta, finish if last else None, index=index) for index in every]
        if self.finish == "separate":
            out += [self.chunk({}, finish, index=index) for index in every]
        if self.finish == "with_usage":  # the usage rides on the finishing chunk
            out += [self.chunk({}, finish, index=index, usage=usage) for index in every]
        elif usage is not None:
            out.append(self.usage_chunk(usage))
        return out

    def stream(self, pieces: Sequence[str | JSON] = ("Hel", "lo, ", "world"), **options: Any) -> bytes:
        """The body of an event stream, from the first chunk to `[DONE]`."""
        frames = [self.frame(chunk) for chunk in self.chunks(pieces, **options)]
        if self.trailing_space and frames:
            frames[0] = self.frame(self.chunks(pieces, **options)[0], space=True)
        return (self.ping or b"") + b"".join(frames) + self.frame(DONE)

    def text_stream(self, pieces: Sequence[str], *, usage: JSON | None = None) -> bytes:
        """The body of a /v1/completions stream."""
        head: JSON = {"id": "cmpl-1", "object": "text_completion", "created": 1760000000, "model": UPSTREAM_MODEL}

        def chunk(choices: list[JSON], **more: Any) -> JSON:
            body = {"choices": choices} | head if self.choices_first else head | {"choices": choices}
            return body | dict(self.chunk_extras) | more

        def choice(text: str, finish: str | None = None) -> list[JSON]:
            return [{"index": 0, "text": text, "logprobs": None, "finish_reason": finish}]

        *firsts, last = pieces if self.finish == "with_text" else (*pieces, "")
        ending: JSON = {"usage": usage} if usage is not None and self.text_usage == "with_finish" else {}
        chunks = [*(chunk(choice(text)) for text in firsts), chunk(choice(last, "stop"), **ending)]
        if usage is not None and self.text_usage == "alone":
            chunks.append(chunk([], usage=usage, object=self.usage_object or head["object"]))
        return b"".join(map(self.frame, chunks)) + self.frame(DONE)

    # --- whole documents
    def completion(self, text: str = "Hello, world", *, usage: JSON | None = None, **message: Any) -> JSON:
        return {
            "id": "chatcmpl-7f3a",
            "object": "chat.completion",
            "created": 1760000000,
            "model": UPSTREAM_MODEL,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": text} | message,
                    "logprobs": None,
                    "finish_reason": "stop",
                }
            ],
            "usage": USAGE if usage is None else usage,
        } | dict(self.chunk_extras)

    def text_completion(self, text: str = "Hello, world") -> JSON:
        return {
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 1760000000,
            "model": UPSTREAM_MODEL,
            "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": "stop"}],
            "usage": USAGE,
        }

    def models(self, names: Sequence[str]) -> JSON:
        entry: JSON = {"object": "model", "created": 1760000000}
        if self.owned_by is not None:
            entry["owned_by"] = self.owned_by
        entries = [{"id": name} | entry for name in names]
        if self.owned_by == "vllm":
            entries = [entry | {"root": "/srv/weights", "parent": None, "max_model_len": 32768} for entry in entries]
        if self.owned_by == "llamacpp":
            entries = [entry | {"meta": {"n_ctx_train": 8192, "n_ctx": 4096, "ftype": "Q4_K_M"}} for entry in entries]
        return {"object": "list", "data": entries}

    # --- errors
    def error(self, message: str, status: int, *, type_: str = "BadRequestError", **more: Any) -> bytes:
        return error_body(self.error_shape, message, status, type_=type_, **more)


def error_body(
    shape: str, message: str, status: int, *, type_: str = "BadRequestError", param: str | None = None, **more: Any
) -> bytes:
    """The document an engine of this shape sends. A: nested with a numeric code. B: flat. C: a string. D: OpenAI's.
    E: FastAPI's `detail`. F: plain text."""
    if shape == "A":
        return compact({"error": {"message": message, "type": type_, "param": param, "code": status} | more})
    if shape == "B":
        return compact({"object": "error", "message": message, "type": type_, "param": param, "code": status} | more)
    if shape == "C":
        return compact({"error": message})
    if shape == "D":
        return compact({"error": {"message": message, "type": type_, "param": param, "code": None} | more})
    if shape == "E":
        return compact({"detail": message})
    return message.encode()


DIALECTS = {
    dialect.name: dialect
    for dialect in (
        Dialect("vllm", "vllm", "vllm", finish="with_text", reasoning="reasoning", error_shape="A",
                done_after_error=True),
        Dialect("llama_server", "llama_server", "llamacpp", role={"role": "assistant", "content": None},
                choices_first=True, choice=("finish_reason", "index", "delta"), text_usage="with_finish",
                ping=b":\n\n", chunk_extras={"system_fingerprint": "b10488-4df29be4"}, error_shape="A"),
        Dialect("openai_compatible", spaces=True, null_usage=True, chunk_extras={"system_fingerprint": "fp_1"}),
        Dialect("sglang", owned_by="sglang", nulls_in_deltas=True, error_shape="B", done_after_error=True),
        Dialect("ollama", owned_by="library", role=None, reasoning="reasoning", role_in_every_delta=True,
                chunk_extras={"system_fingerprint": "fp_ollama"}),
        Dialect("tabbyapi", owned_by="tabbyAPI", role=None, finish="with_usage", crlf=True, spaces=True,
                ping=b": ping - 2026-01-01 00:00:00\r\n\r\n", error_shape="E"),
        Dialect("tensorrt_llm", role={"role": "assistant"}, trailing_space=True, nulls_in_deltas=True,
                error_shape="B"),
        Dialect("mlx_lm", owned_by=None, role=None, role_in_every_delta=True, spaces=True,
                choice=("index", "finish_reason", "delta"), ping=b": keepalive 512/2048\n\n",
                usage_object="chat.completion", reasoning="reasoning",
                chunk_extras={"system_fingerprint": "0.32.2-0.32.4-Linux-x86_64"}, error_shape="C"),
    )
}  # fmt: skip
# The dialects of the kinds a configuration can name; the others are look-alikes behind `openai_compatible`.
NAMED = ("vllm", "llama_server", "openai_compatible")
