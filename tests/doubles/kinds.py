"""One double for each kind of engine: its routes, its answers in its own words, and how strict it is with requests.

    kind = KINDS["ollama"]
    engine = kind.engine()            # an Engine that answers as Ollama does, on the routes that Ollama has
    engine.once(kind.fails("full"))   # the next request meets one of the causes in FAULTS

`dialects.py` knows how a chunk and an error look; this file knows what each engine does with a request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.doubles.dialects import DIALECTS, UPSTREAM_MODEL, USAGE, compact
from tests.doubles.engine import Engine, Exchange, Script, embeddings

JSON = dict[str, Any]
TOKENS = [1, 2, 3]
CALLS = (("call_a", "weather", {"city": "Oslo"}), ("call_b", "weather", {"city": "Rome"}))
SCORES = (0.125, 0.75)
OLLAMA_WHEN = "2026-08-21T10:00:00.123456789Z"


@dataclass(frozen=True)
class Kind:
    """What is special about one kind. Paths are the engine's own."""

    backend: str
    dialect: str
    chat: str = "/v1/chat/completions"
    completions: str = "/v1/completions"
    embeddings: str | None = "/v1/embeddings"
    rerank: str | None = None
    tokenize: str | None = None
    detokenize: str | None = None
    ready: str = "/health"
    load: tuple[str, bytes] | None = None
    native: bool = False  # NDJSON instead of server-sent events
    closes: bool = False  # every answer ends with its connection
    faults: Mapping[str, tuple[int, bytes]] = field(default_factory=dict)

    def engine(self, **options: Any) -> Engine:
        engine = Engine(self.dialect, self.answer, **options)
        engine.probe = self.probe
        return engine

    def fails(self, cause: str) -> Script:
        status, body = self.faults[cause]
        return lambda x: x.reply(body, status)

    # --- GET
    def probe(self, x: Exchange) -> None:
        path = x.request.target
        if not x.engine.healthy:
            status, body = self.faults["loading"]
            x.reply(body, status)
        elif self.load is not None and path == self.load[0]:
            x.reply(self.load[1], content_type="text/plain")
        elif path == "/v1/models":
            x.reply(x.dialect.models(x.engine.models))
        elif path == self.ready:
            x.reply({"id": UPSTREAM_MODEL, "status": "ok", "version": "1"})
        else:
            x.reply({"detail": "Not Found"}, 404)

    # --- POST
    def answer(self, x: Exchange) -> None:
        path, body = x.request.target, x.request.json()
        wrong = _CHECKS[self.backend](x, body) if self.backend in _CHECKS else None
        if wrong is not None:
            return wrong()
        if path == self.chat:
            return self._chat(x, body)
        if path == self.completions:
            return self._text(x, body)
        if path == self.embeddings:
            return x.reply(ollama_embeddings(body) if self.native else embeddings(body))
        if path == self.rerank:
            return x.reply(_RERANKS[self.backend](body))
        if path == self.tokenize:
            return x.reply(_TOKENIZED[self.backend](body))
        if path == self.detokenize:
            word = {"llama_server": "content", "tabbyapi": "text", "sglang": "text"}.get(self.backend, "prompt")
            return x.reply({word: "Hello, world"} if body["tokens"] else {word: ""})
        return x.reply(b"Not Found", 404, content_type="text/html")

    def _chat(self, x: Exchange, body: JSON) -> None:
        tools = bool(body.get("tools"))
        if not body.get("stream", self.native):
            return self._whole(x, ollama_whole(tools) if self.native else self._completion(x, body, tools))
        if self.native:
            return self._send(x, b"".join(map(line, ollama_lines(tools))))
        asked = x.wants_usage()
        pieces: Sequence[Any] = _TOOL_DELTAS[self.backend] if tools else ("Hel", "lo, ", "world")
        finish = "tool_calls" if tools else "stop"
        return self._send(x, x.dialect.stream(pieces, finish=finish, usage=USAGE if asked else None))

    def _completion(self, x: Exchange, body: JSON, tools: bool) -> JSON:
        document = x.dialect.completion()
        if tools:
            document["choices"][0] |= {"finish_reason": "tool_calls"}
            document["choices"][0]["message"] |= {"content": None, "tool_calls": whole_calls()}
        if self.backend == "tabbyapi" and not x.wants_usage():
            document["usage"] = None  # it counts only when asked, whole answers too
        return document

    def _text(self, x: Exchange, body: JSON) -> None:
        if self.native:
            lines = [_native(response=piece, done=False) for piece in ("Hel", "lo")]
            last = _native(response="", done=True, done_reason="stop", prompt_eval_count=11, eval_count=5)
            if body.get("stream", True):
                return self._send(x, b"".join(map(line, [*lines, last])))
            return self._whole(x, last | {"response": "Hello, world"})
        if body.get("stream"):
            return self._send(x, x.dialect.text_stream(["Hel", "lo"], usage=USAGE if x.wants_usage() else None))
        return self._whole(x, x.dialect.text_completion())

    def _whole(self, x: Exchange, document: JSON) -> None:
        if not self.closes:
            return x.reply(document)
        self._old_head(x, "application/json")
        x.part(x.dialect.dump(document))
        return x.close()

    def _send(self, x: Exchange, stream: bytes) -> None:
        self.begin(x)
        x.part(stream)
        x.close() if self.closes else x.end()

    # --- for scripts of tests
    def begin(self, x: Exchange) -> None:
        if self.closes:
            self._old_head(x, "text/event-stream")
        else:
            x.begin(content_type="application/x-ndjson" if self.native else "text/event-stream")

    def _old_head(self, x: Exchange, content_type: str) -> None:
        """HTTP/1.0: no length, no chunks; the body ends with the connection."""
        x._chunked = x.keep = False
        x.send(b"HTTP/1.0 200 OK\r\nServer: BaseHTTP/0.6 Python/3.12\r\nContent-type: %b\r\n\r\n"
               % content_type.encode())  # fmt: skip

    def some(self, x: Exchange) -> None:
        """The beginning of an answer: two pieces of text and no end."""
        self.begin(x)
        for text in ("Hel", "lo"):
            if self.native:
                x.part(line(_native(message={"role": "assistant", "content": text}, done=False)))
            else:
                x.delta(text)

    def stop(self, x: Exchange) -> None:
        x.close() if self.closes else x.end()

    def error_event(self, x: Exchange, message: str) -> None:
        """How the engine reports an error when the stream has begun; those that cannot end without a word."""
        if self.native:
            x.part(line({"error": message}))
        elif self.backend == "tabbyapi":
            x.event({"error": {"message": message, "trace": None}})
        elif self.backend not in ("tensorrt_llm", "mlx_lm"):
            error = json.loads(x.dialect.error(message, 500))
            x.event({"error": error.get("error", error)})
        if x.dialect.done_after_error:
            x.event(b"[DONE]")


# --- pieces of answers
def line(value: Any) -> bytes:
    return compact(value) + b"\n"


def whole_calls() -> list[JSON]:
    return [
        {"id": identity, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for identity, name, arguments in CALLS
    ]


def _fragments() -> list[JSON]:
    """Ids and names first, arguments in pieces of three characters, the two calls interleaved."""
    begun = [{**call, "index": index, "function": {**call["function"], "arguments": ""}}
             for index, call in enumerate(whole_calls())]  # fmt: skip
    texts = [call["function"]["arguments"] for call in whole_calls()]
    pieces = [
        {"index": index, "function": {"arguments": text[start : start + 3]}}
        for start in range(0, max(map(len, texts)), 3)
        for index, text in enumerate(texts)
        if text[start : start + 3]
    ]
    return [{"tool_calls": [piece]} for piece in [*begun, *pieces]]


_WHOLE_AT_ZERO = [{"tool_calls": [{**call, "index": 0}]} for call in whole_calls()]
_WHOLE_WITHOUT = [{"content": "Let me see."}, {"tool_calls": whole_calls()}]
_TOOL_DELTAS: dict[str, Sequence[JSON]] = dict.fromkeys(
    ("vllm", "sglang", "llama_server", "tensorrt_llm", "openai_compatible", "lmstudio"), _fragments()
) | {"mlx_lm": _WHOLE_AT_ZERO, "tabbyapi": _WHOLE_WITHOUT}


def _native(**fields: Any) -> JSON:
    return {"model": UPSTREAM_MODEL, "created_at": OLLAMA_WHEN} | fields


def _native_calls() -> list[JSON]:
    return [{"id": identity, "function": {"name": name, "arguments": arguments}} for identity, name, arguments in CALLS]


def ollama_lines(tools: bool = False, thinking: Sequence[str] = ()) -> list[JSON]:
    def said(**message: Any) -> JSON:
        return _native(message={"role": "assistant", "content": ""} | message, done=False)

    end = _native(message={"role": "assistant", "content": ""}, done=True, done_reason="stop", total_duration=5,
                  prompt_eval_count=11, eval_count=5)  # fmt: skip
    thoughts = [said(thinking=text) for text in thinking]
    if tools:
        return [*thoughts, *[said(tool_calls=[call]) for call in _native_calls()], end]
    return [*thoughts, *[said(content=text) for text in ("Hel", "lo, ", "world")], end]


def ollama_whole(tools: bool = False) -> JSON:
    message: JSON = {"role": "assistant", "content": "" if tools else "Hello, world"}
    if tools:
        message["tool_calls"] = _native_calls()
    return _native(message=message, done=True, done_reason="stop", prompt_eval_count=11, eval_count=5)


def ollama_embeddings(body: JSON) -> JSON:
    rows = embeddings(body)["data"]
    return {"model": UPSTREAM_MODEL, "embeddings": [row["embedding"] for row in rows], "prompt_eval_count": 4}


def _rerank_vllm(body: JSON) -> JSON:
    rows = [{"index": i, "document": {"text": body["documents"][i]}, "relevance_score": SCORES[i]} for i in (1, 0)]
    return {"id": "rerank-1", "model": UPSTREAM_MODEL, "usage": {"total_tokens": 9}, "results": rows}


def _rerank_llama(body: JSON) -> JSON:
    rows = [{"index": i, "relevance_score": SCORES[i]} for i in (0, 1)]
    usage = {"prompt_tokens": 9, "total_tokens": 9}
    return {"model": UPSTREAM_MODEL, "object": "list", "usage": usage, "results": rows}


def _rerank_sglang(body: JSON) -> Any:
    counts = (4, 5)
    texts = body["documents"]
    return [{"score": SCORES[i], "document": texts[i], "index": i, "meta_info": {"prompt_tokens": counts[i]}}
            for i in (1, 0)]  # fmt: skip


_RERANKS: dict[str, Callable[[JSON], Any]] = {
    "vllm": _rerank_vllm, "openai_compatible": _rerank_vllm, "llama_server": _rerank_llama, "sglang": _rerank_sglang,
}  # fmt: skip


def _tokens(body: JSON) -> JSON:
    assert "prompt" in body or "messages" in body
    return {"count": 3, "max_model_len": 32768, "tokens": TOKENS}


def _tokens_llama(body: JSON) -> JSON:
    assert isinstance(body["content"], str)
    return {"tokens": TOKENS}


def _tokens_tabby(body: JSON) -> JSON:
    assert isinstance(body["text"], str | list)
    return {"tokens": TOKENS, "length": 3}


_TOKENIZED: dict[str, Callable[[JSON], Any]] = {
    "vllm": _tokens, "sglang": _tokens, "openai_compatible": _tokens, "llama_server": _tokens_llama,
    "tabbyapi": _tokens_tabby,
}  # fmt: skip


# --- how strict they are: what happens instead of an answer, or None
Refusal = Callable[[], None] | None


def _check_trtllm(x: Exchange, body: JSON) -> Refusal:
    known = set(
        "model messages prompt stream stream_options temperature top_p top_k max_tokens n seed stop tools tool_choice"
        " response_format logprobs top_logprobs logit_bias input encoding_format dimensions user"
        " chat_template_kwargs".split()
    ) | ({"cache_salt"} if "messages" in body else set())
    extra = sorted(body.keys() - known)
    if extra or ("stream_options" in body and not body.get("stream")):
        return lambda: x.reply(compact({"error": f"Extra inputs are not permitted: {extra}"}), 400)
    return None


def _check_mlx(x: Exchange, body: JSON) -> Refusal:
    """A null or a value of the wrong type is an exception in its handler: the connection just ends."""
    if not x.request.values("content-length") or any(value is None for value in body.values()):
        return x.close
    if not isinstance(body.get("logprobs", False), bool) or not isinstance(body.get("xtc_probability", 0.0), float):
        return x.close
    return None


def _check_tabby(x: Exchange, body: JSON) -> Refusal:
    for tool in body.get("tools") or ():
        if not {"description", "parameters"} <= tool["function"].keys():
            where = ["body", "tools", 0, "function", "description"]
            detail = [{"loc": where, "msg": "Field required", "type": "missing"}]
            return lambda: x.reply({"detail": detail}, 422)
    return None


def _check_ollama(x: Exchange, body: JSON) -> Refusal:
    if not isinstance(body.get("prompt", ""), str) or not isinstance(body.get("options", {}), dict):
        return lambda: x.reply({"error": "json: cannot unmarshal array into Go struct field"}, 400)
    return None


_CHECKS: dict[str, Callable[[Exchange, JSON], Refusal]] = {
    "tensorrt_llm": _check_trtllm, "mlx_lm": _check_mlx, "tabbyapi": _check_tabby, "ollama": _check_ollama,
}  # fmt: skip


# --- faults, in each engine's words
def _nested(message: str, type_: str, status: int, **more: Any) -> bytes:
    return compact({"error": {"message": message, "type": type_, "param": None, "code": status} | more})


def _flat(message: str, type_: str, code: int) -> bytes:
    return compact({"object": "error", "message": message, "type": type_, "param": None, "code": code})


def _text(message: str) -> bytes:
    return compact({"error": message})


def _detail(message: Any) -> bytes:
    return compact({"detail": message})


_LLAMA_IN_OLLAMA = "POST predict: " + json.dumps(
    {"error": {"code": 400, "message": "the request exceeds the available context size", "type":
               "exceed_context_size_error", "n_prompt_tokens": 5000, "n_ctx": 4096}}
)  # fmt: skip

KINDS: dict[str, Kind] = {
    kind.backend: kind
    for kind in (
        Kind("vllm", "vllm", rerank="/v1/rerank", tokenize="/tokenize", detokenize="/detokenize",
             load=("/metrics", b"vllm:num_requests_running{engine=\"0\"} 3.0\n"
                               b"vllm:num_requests_waiting{engine=\"0\"} 1.0\n"
                               b"vllm:num_requests_waiting_by_reason{reason=\"capacity\"} 50\n"
                               b"vllm:kv_cache_usage_perc{engine=\"0\"} 0.5\n"),
             faults={
                 "context": (400, _nested("This model's maximum context length is 2048.", "BadRequestError", 400)),
                 "bad": (400, _nested("1 validation error: temperature", "Bad Request", 400, param="body.temperature")),
                 "key": (401, _text("Unauthorized")),
                 "broken": (500, _nested("EngineCore encountered an issue.", "InternalServerError", 500)),
                 "loading": (503, b""),
                 "unsupported": (501, _nested("not implemented", "NotImplementedError", 501)),
             }),
        Kind("sglang", "sglang", rerank="/v1/rerank", tokenize="/v1/tokenize", detokenize="/v1/detokenize",
             ready="/v1/models",
             load=("/v1/loads?include=core", b'{"loads":[{"dp_rank":0,"num_running_reqs":3,"num_waiting_reqs":1,'
                                             b'"token_usage":0.5}]}'),
             faults={
                 "context": (400, _flat("The input (5000 tokens) is longer than the model's context length (2048"
                                        " tokens).", "BadRequestError", 400)),
                 "bad": (400, _flat("temperature must be non-negative", "BadRequestError", 400)),
                 "key": (403, _text("Forbidden")),
                 "full": (503, _flat("The request queue is full.", "ServiceUnavailable", 503)),
                 "broken": (500, _flat("Internal server error: list index out of range", "InternalServerError", 500)),
                 "loading": (503, b""),
             }),
        Kind("llama_server", "llama_server", rerank="/v1/rerank", tokenize="/tokenize", detokenize="/detokenize",
             load=("/metrics", b"llamacpp:requests_processing 3\nllamacpp:requests_deferred 1\n"),
             faults={
                 "context": (400, _nested("the request exceeds the available context size", "exceed_context_size_error",
                                          400, n_prompt_tokens=5000, n_ctx=2048)),
                 "bad": (500, _nested("[json.exception.type_error.302] type must be number", "server_error", 500)),
                 "unsupported": (500, _nested("image input is not supported - hint: you may need to provide the mmproj",
                                              "server_error", 500)),
                 "key": (401, _nested("Invalid API Key", "authentication_error", 401)),
                 "full": (500, _nested("model limit reached, try again later", "server_error", 500)),
                 "model": (400, _nested("model 'x' not found", "invalid_request_error", 400)),
                 "broken": (500, _nested("failed to decode", "server_error", 500)),
                 "loading": (503, _nested("Loading model", "unavailable_error", 503)),
             }),
        Kind("ollama", "ollama", "/api/chat", "/api/generate", "/api/embed", ready="/api/version", native=True,
             faults={
                 "context": (400, _text(_LLAMA_IN_OLLAMA)),
                 "bad": (400, _text("invalid option: temperature")),
                 "unsupported": (400, _text('"m" does not support tools')),
                 "full": (503, _text("server busy, please try again.  maximum pending requests exceeded")),
                 "model": (404, _text("model 'x' not found")),
                 "broken": (500, _text("llama runner process has terminated: exit status 2")),
                 "loading": (503, b"starting"),
             }),
        Kind("tabbyapi", "tabbyapi", tokenize="/v1/token/encode", detokenize="/v1/token/decode", ready="/v1/model",
             faults={
                 "context": (400, compact({"error": {"message": "Prompt exceeds the available context", "type":
                             "invalid_request_error", "param": "messages", "code": "context_length_exceeded"}})),
                 "bad": (422, _detail([{"loc": ["body", "temperature"], "msg": "Input should be a valid number",
                                        "type": "float_parsing"}])),
                 "key": (401, _detail("Invalid API key")),
                 "broken": (503, _detail("Chat completion x aborted. Please check the server console.")),
                 "loading": (503, _detail("No models are currently loaded.")),
             }),
        Kind("mlx_lm", "mlx_lm", embeddings=None, closes=True,
             faults={
                 "bad": (400, _text("Invalid JSON in request body: Expecting value")),
                 "broken": (404, _text("[metal::malloc] Attempting to allocate too much memory")),
                 "unsupported": (404, b"Not Found"),
                 "loading": (503, b""),
             }),
        Kind("lmstudio", "openai_compatible", ready="/v1/models",
             faults={
                 "bad": (400, _text("'temperature' must be a number")),
                 "context": (400, _text("Trying to keep the first 5000 tokens when context the overflows. However, the"
                                        " model is loaded with context length of only 4096 tokens, which is not"
                                        " enough.")),
                 "broken": (500, _text("The model has crashed without additional information.")),
                 "loading": (503, b""),
             }),
        Kind("tensorrt_llm", "tensorrt_llm",
             load=("/prometheus/metrics", b'trtllm_num_requests_running{model_name="m"} 3.0\n'
                                          b'trtllm_num_requests_waiting{model_name="m"} 1.0\n'
                                          b'trtllm_kv_cache_utilization{model_name="m"} 0.5\n'),
             faults={
                 "context": (400, _flat("The prompt length (5000) exceeds the maximum model length",
                                        "BadRequestError", 400)),
                 "bad": (400, _text("1 validation error for ChatCompletionRequest")),
                 "broken": (400, _flat("CUDA error: an illegal memory access was encountered", "BadRequestError", 400)),
                 "loading": (503, b"Server is not ready"),
             }),
        Kind("openai_compatible", "openai_compatible", rerank="/v1/rerank", tokenize="/tokenize",
             detokenize="/detokenize", ready="/v1/models",
             faults={
                 "context": (400, _nested("too long", "invalid_request_error", 400, code="context_length_exceeded")),
                 "bad": (400, _nested("bad value", "invalid_request_error", 400, param="temperature")),
                 "full": (429, _nested("slow down", "rate_limit_error", 429)),
                 "broken": (502, b"<html>Bad Gateway</html>"),
                 "loading": (503, b""),
             }),
    )
}  # fmt: skip

assert {kind.dialect for kind in KINDS.values()} <= DIALECTS.keys()
