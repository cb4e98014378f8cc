"""The HTTP face of the engine: OpenAI's routes and a few of llama-server's, as one ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import orjson
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from backends.llamacpp import protocol
from backends.llamacpp.answers import Answer, Piece, embeddings_body, sse
from backends.llamacpp.engine import Engine
from backends.llamacpp.errors import ApiError, failed, invalid, loading, too_long, unsupported
from backends.llamacpp.fields import Fields, wrong_type
from backends.llamacpp.runner import ModelInfo
from backends.llamacpp.sampling import compile_schema

MAX_BODY = 32 << 20  # bytes
_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
T = TypeVar("T")


class Call:
    """One request while it is answered."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self.started = False

    @property
    def tenant(self) -> str:
        """Whose queue the request stands in."""
        return self._headers.get(b"x-sekisho-tenant", b"").decode("latin-1")

    async def json(self) -> Any:
        """The body. Raises: ApiError 400 or 413; asyncio.CancelledError when the client leaves while sending."""
        chunks, size, more = [], 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise asyncio.CancelledError
            chunks.append(message.get("body", b""))
            more, size = message.get("more_body", False), size + len(chunks[-1])
            if size > MAX_BODY:
                raise ApiError(413, f"The body is larger than {MAX_BODY} bytes.", code="body_too_large")
        try:
            return orjson.loads(b"".join(chunks))
        except orjson.JSONDecodeError as error:
            raise invalid(f"The body is not valid JSON: {error}", None) from None

    async def disconnected(self) -> None:
        """Returns when the client is gone. Only after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def reply(self, body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """A whole JSON answer."""
        await self.begin(
            status, {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
        )
        await self.write(body, last=True)

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Status and headers."""
        self.started = True
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """A part of the body; waits while the client reads slowly."""
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def fail(self, error: ApiError) -> None:
        """The error as a body, or as the last event of a stream, which then ends without its end mark."""
        if self.started:
            await self.write(sse(error.body()), last=True)
            return
        headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
        await self.reply(orjson.dumps(error.body()), error.status, headers)


class Endpoint:
    """A POST route: reads JSON, runs `answer`, cancels it when the client leaves, renders errors."""

    def __init__(self, answer: Callable[[Call, Any], Awaitable[None]], ready: Callable[[], object]) -> None:
        self._answer = answer
        self._ready = ready

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(scope, receive, send)
        try:
            self._ready()
            body = await call.json()
            await _unless_gone(self._answer(call, body), call.disconnected())
        except ApiError as error:
            await call.fail(error)
        except Exception as error:
            await call.fail(failed("Internal error of the engine's server."))
            raise error


async def _unless_gone(work: Awaitable[None], gone: Awaitable[None]) -> None:
    """Run `work` to its end, or cancel it once `gone` returns."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Server:
    """The routes. `app` is the ASGI application."""

    def __init__(self, engine: Engine, served_name: str) -> None:
        self._engine = engine
        self._name = served_name
        # Templates and tokenising of long prompts take milliseconds and release the GIL.
        self._texts = ThreadPoolExecutor(2, thread_name_prefix="texts")
        posts = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._completions,
            "/v1/embeddings": self._embeddings,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }
        gets = {"/health": self._health, "/v1/models": self._models, "/load": self._load}
        routes = [Route(path, Endpoint(answer, self._info), methods=["POST"]) for path, answer in posts.items()]
        routes += [Route(path, _get(answer), methods=["GET"]) for path, answer in gets.items()]
        self.app = Starlette(routes=routes, exception_handlers={404: _no_route, 405: _no_route})

    def _info(self) -> ModelInfo:
        if self._engine.info is None:
            raise loading()
        return self._engine.info

    def _health(self) -> dict[str, Any]:
        self._info()
        return {"status": "ok"}

    def _load(self) -> dict[str, Any]:
        return self._engine.load()

    def _models(self) -> dict[str, Any]:
        info = self._info()
        card: dict[str, Any] = {"id": self._name, "object": "model", "created": 0, "owned_by": "llamacpp"}
        if not info.generates:
            card["capabilities"] = ["embeddings"]
        return {"object": "list", "data": [{**card, "max_model_len": info.context, "meta": info.meta}]}

    async def _chat(self, call: Call, body: Any) -> None:
        info = self._info()
        chat = protocol.parse_chat(body, self._name, info.sampling)
        prompt = await self._aside(self._engine.runner.encode_chat, chat.messages, chat.variables)
        await self._generate(call, [prompt], chat.wanted, "messages")

    async def _completions(self, call: Call, body: Any) -> None:
        request = protocol.parse_completion(body, self._name, self._info().sampling)
        prompts = await self._aside(self._encode_all, request.prompts, True)
        await self._generate(call, prompts, request.wanted, "prompt")

    async def _generate(
        self, call: Call, prompts: Sequence[Sequence[int]], wanted: protocol.Wanted, param: str
    ) -> None:
        info, asked = self._info(), wanted.max_tokens or 0
        if not info.generates:
            raise unsupported("model", "This model makes embeddings only.")
        for prompt in prompts:
            if not prompt:
                raise invalid(f"{param!r} must not be empty.", param)
            if len(prompt) >= info.context or len(prompt) + asked > info.context:
                raise too_long(info.context, len(prompt), asked, param)
        grammar = None
        if wanted.sampling.schema is not None:
            grammar = await self._aside(compile_schema, wanted.sampling.schema)
        answer = Answer(
            chat=param == "messages",
            model=self._name,
            choices=len(prompts) * wanted.n,
            prompt_tokens=sum(map(len, prompts)),
            include_usage=wanted.include_usage,
        )
        async with self._engine.generate(call.tenant, prompts, wanted, grammar) as pieces:
            async for some in pieces:
                if wanted.stream:
                    await self._stream(call, answer, some)
                else:
                    for piece in some:
                        answer.add(piece)
        if wanted.stream:
            await call.write(b"", last=True)
        else:
            await call.reply(answer.whole())

    async def _stream(self, call: Call, answer: Answer, pieces: Sequence[Piece]) -> None:
        """One write for all that arrived together. Headers wait for the first token: errors keep their status."""
        data = b"".join(map(answer.events, pieces))
        if answer.finished:
            data += answer.end()
        if not call.started:
            await call.begin(200, _STREAM_HEADERS)
        if data:
            await call.write(data)

    async def _embeddings(self, call: Call, body: Any) -> None:
        info = self._info()
        request = protocol.parse_embeddings(body, self._name)
        if request.dimensions not in (None, info.n_embd):
            raise unsupported("dimensions", f"This model's embeddings have {info.n_embd} dimensions, no other number.")
        inputs = await self._aside(self._encode_all, request.inputs, False)
        for tokens in inputs:
            if not tokens:
                raise invalid("'input' must not be empty.", "input")
            if len(tokens) > info.embedding_context:
                raise too_long(info.embedding_context, len(tokens), 0, "input")
        vectors = await self._engine.embed(call.tenant, inputs)
        make = partial(embeddings_body, vectors, self._name, sum(map(len, inputs)), as_base64=request.base64)
        await call.reply(make())

    async def _tokenize(self, call: Call, body: Any) -> None:
        fields = Fields(body)
        name = "prompt" if fields.get("content") is None else "content"
        if (text := fields.text(name)) is None:
            raise wrong_type("content", "a string")
        encode = partial(self._engine.runner.encode, text, add_special=fields.boolean("add_special"))
        tokens = await self._aside(encode)
        await call.reply(orjson.dumps({"tokens": tokens, "count": len(tokens)}))

    async def _detokenize(self, call: Call, body: Any) -> None:
        tokens = Fields(body).get("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise wrong_type("tokens", "a list of token ids")
        text = await self._aside(self._engine.runner.decode, tokens)
        await call.reply(orjson.dumps({"content": text}))

    def _encode_all(self, prompts: Sequence[protocol.Prompt], parse_special: bool) -> list[list[int]]:
        return [self._engine.runner.encode(prompt, parse_special=parse_special) for prompt in prompts]

    async def _aside(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._texts, call, *args)


def _get(answer: Callable[[], dict[str, Any]]) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    class Get:  # a class, since Starlette takes functions for endpoints of another kind
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            call = Call(scope, receive, send)
            try:
                await call.reply(orjson.dumps(answer()))
            except ApiError as error:
                await call.fail(error)

    return Get()


async def _no_route(request: Any, error: Exception) -> Any:
    from starlette.responses import JSONResponse

    status = getattr(error, "status_code", 404)
    known = ApiError(status, f"{request.method} {request.url.path} is not a route of this engine.", code="unknown_url")
    return JSONResponse(known.body(), status)
