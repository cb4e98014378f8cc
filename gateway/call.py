"""The client's body becomes a Call: the only JSON parse of a request, and the bytes each engine gets.

The client's bytes are forwarded as they came. Where the model's name or an option has to change, that one value is
replaced inside the original bytes, so unknown fields, nulls, number forms and key order survive.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import orjson

from backends.base import REMOVE, SALT_FIELD, Edits, Operation
from gateway import bigjson, jsonscan
from gateway.errors import BadRequest, InvalidBody
from gateway.jsonscan import Member
from gateway.prefixes import Chain, chain_of, chat_text, completion_text
from gateway.types import Tenant, ToolPolicy

JSON = dict[str, Any]

_MOST_KEYS = 48  # each is counted in all of the body: many keys are found faster by walking over them
_MOST_NODES = 500_000  # objects and lists of one body; each takes twenty times the bytes it is written with
_ESCAPED_LETTER = re.compile(rb"\\u00(?:3[0-9]|[46][1-9a-fA-F]|[57][0-9aA]|5[fF])")  # another way to spell a key
_QUOTED = {
    key: b'"%b"' % key.encode()
    for key in (
        "model messages prompt input stream stream_options max_tokens max_completion_tokens temperature top_p n stop"
        " seed user tools tool_choice response_format presence_penalty frequency_penalty logit_bias logprobs"
        " top_logprobs encoding_format dimensions parallel_tool_calls reasoning_effort metadata store echo suffix"
        " best_of top_k min_p repetition_penalty chat_template_kwargs"
    ).split()
}
_USAGE_OPTION = b'"stream_options":{"include_usage":true},'
_SALT = b'"%b":%%b,' % SALT_FIELD.encode()
_CHARACTERS_PER_TOKEN = 4  # rule of thumb for English; used only where no engine has counted yet
_TOKENS_PER_MESSAGE = 4  # role and separators
_TOKENS_PER_MEDIA = 1000  # an image or sound, whose size in bytes says nothing


class Call:
    """One parsed request.

    `raw` is the body as it came and `body` its parsed form, which is never written to: what changes, changes in bytes.
    Only a tool policy and fetched links put others in the place of both.
    """

    __slots__ = (
        "_prompt_tokens",
        "answers",
        "body",
        "large",
        "max_tokens",
        "members",
        "model",
        "operation",
        "prefix",
        "raw",
        "session_id",
        "stream",
        "tenant",
        "tools",
        "wants_usage",
        "withheld",
    )  # fmt: skip

    def __init__(self, operation: Operation, raw: bytes, body: JSON) -> None:
        self.operation, self.raw, self.body = operation, raw, body
        self.large = len(raw) > bigjson.LARGE  # work on all of it is not for the event loop
        self.members: list[Member] | None = None  # of a large one, found once
        self.model: str = body["model"]
        self.stream: bool = body.get("stream") is True and operation.generates
        options = body.get("stream_options")
        self.wants_usage: bool = options is not None and options.get("include_usage") is True
        limit = body.get("max_completion_tokens")
        self.max_tokens: int | None = body.get("max_tokens") if limit is None else limit
        self.answers: int = (body.get("n") or 1) * _prompts(operation, body)
        self._prompt_tokens = -1
        self.tenant: Tenant | None = None  # who asks, and the session it says it belongs to: what affinity goes by
        self.session_id = b""
        self.tools: ToolPolicy | None = None  # what its answer may call; None = anything
        self.withheld = 0  # tools that were taken out of the request
        self.prefix: Chain | None = None  # once a policy has asked for it

    def find_prefix(self) -> Chain:
        """How the prompt begins, for the index of what replicas have read. Computed once, and only on demand."""
        if self.prefix is None:
            if self.operation is Operation.CHAT:
                text = chat_text(self.body)
            else:
                text = completion_text(self.body["prompt"]) if self.operation is Operation.COMPLETIONS else ""
            self.prefix = chain_of(self.tenant.salt if self.tenant is not None else "", text)
        return self.prefix

    def replace(self, raw: bytes, body: JSON) -> None:
        """The request is another now. Takes its time over a large one."""
        self.raw, self.body, self.large = raw, body, len(raw) > bigjson.LARGE
        self.members = jsonscan.members(raw) if self.large else None

    @property
    def session(self) -> bytes:
        """The tenant's session in 8 bytes: of the header `x-session-id`, else of the body's `user`; empty if neither
        says one."""
        user = self.body.get("user")
        name = self.session_id or (user.encode() if isinstance(user, str) else b"")
        if not name:
            return b""
        tenant = self.tenant.name.encode() if self.tenant is not None else b""
        return blake2b(b"%b\0%b" % (tenant, name), digest_size=8).digest()

    @property
    def prompt_tokens(self) -> int:
        """An estimate from the prompt's length; counted once, and only when somebody asks."""
        if self._prompt_tokens < 0:
            self._prompt_tokens = estimate_prompt(self.operation, self.body)
        return self._prompt_tokens

    def for_engine(self, model: str, edits: Edits, salt: str = "") -> bytes:
        """The body for an engine that calls the model `model`.

        Streams are always asked for their usage, since every request is booked; a tap takes the extra event out again
        when the client did not ask for it. `salt` becomes `cache_salt`, unless it is empty; a client's own is among
        the `edits` of every engine that has the field.
        """
        asks = self.stream and not self.wants_usage
        if edits or (asks and "stream_options" in self.body):
            return b"".join(jsonscan.pieces(self.raw, self.raw, self._changes(model, edits, asks, salt)))
        added = _SALT % orjson.dumps(salt) if salt else b""
        if asks:
            added += _USAGE_OPTION
        raw = self.raw
        opening = raw.index(b"{") + 1 if added else 0
        if model != self.model:
            start, end = jsonscan.text_span(raw, "model")
            return b"%b%b%b%b%b" % (raw[:opening], added, raw[opening:start], orjson.dumps(model), raw[end:])
        return b"%b%b%b" % (raw[:opening], added, raw[opening:]) if added else raw

    def pieces_for_engine(self, model: str, edits: Edits, salt: str = "") -> list[bytes | memoryview]:
        """The same of a large one: what does not change is not copied."""
        changes = self._changes(model, edits, self.stream and not self.wants_usage, salt)
        return jsonscan.pieces(self.raw, memoryview(self.raw), changes, self.members) if changes else [self.raw]

    def _changes(self, model: str, edits: Edits, asks: bool, salt: str) -> dict[str, bytes | None]:
        changes: dict[str, bytes | None] = {
            key: None if value is REMOVE else orjson.dumps(value) for key, value in edits.items()
        }
        if model != self.model:
            changes["model"] = orjson.dumps(model)
        if asks:
            options = edits.get("stream_options", self.body.get("stream_options")) or {}
            changes["stream_options"] = orjson.dumps({**options, "include_usage": True})
        if salt:
            changes[SALT_FIELD] = orjson.dumps(salt)
        return changes


def parse_call(operation: Operation, raw: bytes) -> Call:
    """The request in `raw`.

    Raises: InvalidBody, BadRequest; each names the field and what to write instead.
    """
    members: list[Member] | None = None
    try:
        if len(raw) > bigjson.LARGE:
            body, plain = bigjson.load(raw, _check_nodes)
            members = jsonscan.members(plain) if isinstance(body, dict) else None
        else:
            body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidBody(f"The body is not valid UTF-8 JSON: {error}.") from None
    if not isinstance(body, dict):
        raise InvalidBody("The body has to be a JSON object.")
    unique = len(members) == len(body) if members is not None else _keys_are_unique(raw, body)
    if not unique:
        raise InvalidBody("The body has two equal top-level keys; which of them counts would be a guess.")
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise BadRequest(
            "You must provide a model: a non-empty string.", param="model", code="missing_required_parameter"
        )
    _CHECKS[operation](body)
    call = Call(operation, raw, body)
    call.members = members
    return call


def _check_nodes(text: bytes) -> None:
    if len(text) > _MOST_NODES and text.count(b"{") + text.count(b"[") > _MOST_NODES:
        raise InvalidBody(f"The body has more than {_MOST_NODES} objects and lists. Send several smaller requests.")


def _keys_are_unique(raw: bytes, body: JSON) -> bool:
    """Whether no top-level key occurs twice; the parser kept the last one of each.

    A key that occurs once as a quoted string anywhere in the body occurs once as a key. Anything less clear is counted
    exactly.
    """
    spelt_out = b"\\u00" in raw and _ESCAPED_LETTER.search(raw)
    if len(body) <= _MOST_KEYS and not spelt_out:
        for key in body:
            quoted = _QUOTED.get(key)
            if quoted is None:
                if not (key.isascii() and key.isidentifier()):
                    break
                quoted = b'"%b"' % key.encode()
            if raw.count(quoted) != 1:
                break
        else:
            return True
    return len(jsonscan.members(raw)) == len(body)


def _wrong(body: JSON, field: str, what: str) -> BadRequest:
    missing = body.get(field) is None
    return BadRequest(
        f"'{field}' has to be {what}.", param=field, code="missing_required_parameter" if missing else "invalid_type"
    )


def _check_common(body: JSON) -> None:
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise _wrong(body, "stream", "true or false")
    options = body.get("stream_options")
    if options is not None:
        if not isinstance(options, dict):
            raise _wrong(body, "stream_options", "an object")
        if not isinstance(options.get("include_usage"), bool | None):
            raise BadRequest(
                "'stream_options.include_usage' has to be true or false.",
                param="stream_options.include_usage",
                code="invalid_type",
            )
    for field in ("max_tokens", "max_completion_tokens"):
        value = body.get(field)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 2**31):
            raise _wrong(body, field, "a whole number of tokens")
    n = body.get("n")
    if n is not None and (not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= 128):
        raise _wrong(body, "n", "a whole number from 1 to 128")


def _check_chat(body: JSON) -> None:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong(body, "messages", "a non-empty array of messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise BadRequest(
                f"'messages[{index}]' has to be an object.", param=f"messages[{index}]", code="invalid_type"
            )
        if not isinstance(message.get("content"), str | list | None):  # engines fail on it in ways of their own
            raise BadRequest(
                f"'messages[{index}].content' has to be a string or an array of parts.",
                param=f"messages[{index}].content",
                code="invalid_type",
            )
    _check_common(body)


def _check_completions(body: JSON) -> None:
    if not isinstance(body.get("prompt"), str | list):
        raise _wrong(body, "prompt", "a string, an array of strings or an array of tokens")
    _check_common(body)


def _check_embeddings(body: JSON) -> None:
    if not isinstance(body.get("input"), str | list) or not body["input"]:
        raise _wrong(body, "input", "a non-empty string or array")
    if body.get("encoding_format") not in (None, "float", "base64"):
        raise BadRequest(
            "'encoding_format' has to be 'float' or 'base64'.", param="encoding_format", code="invalid_value"
        )
    _check_common(body)


def _check_rerank(body: JSON) -> None:
    if not isinstance(body.get("query"), str) or not body["query"]:
        raise _wrong(body, "query", "a non-empty string")
    documents = body.get("documents")
    if not isinstance(documents, list) or not documents or not all(_is_document(one) for one in documents):
        # Texts only: a link in a document would make the engine fetch it.
        raise _wrong(body, "documents", "a non-empty array of strings")
    most = body.get("top_n")
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 0):
        raise _wrong(body, "top_n", "a whole number of documents")
    _check_common(body)


def _is_document(given: object) -> bool:
    text = given.get("text") if isinstance(given, dict) and len(given) == 1 else given
    return isinstance(text, str)


def _check_tokenize(body: JSON) -> None:
    if body.get("messages") is not None:
        _check_chat(body)
    elif not isinstance(body.get("prompt"), str | list):
        raise _wrong(body, "prompt", "a string; or send 'messages'")
    _check_common(body)


def _check_detokenize(body: JSON) -> None:
    tokens = body.get("tokens")
    if not isinstance(tokens, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in tokens):
        raise _wrong(body, "tokens", "an array of token numbers")
    _check_common(body)


def _check_speech(body: JSON) -> None:
    if not isinstance(body.get("input"), str) or not body["input"]:
        raise _wrong(body, "input", "a non-empty string")
    _check_common(body)


def _refuse_json(body: JSON) -> None:
    raise BadRequest("This request has to be multipart/form-data, with its file in it.", code="invalid_content_type")


_CHECKS = {
    Operation.CHAT: _check_chat,
    Operation.COMPLETIONS: _check_completions,
    Operation.EMBEDDINGS: _check_embeddings,
    Operation.RERANK: _check_rerank,
    Operation.TOKENIZE: _check_tokenize,
    Operation.DETOKENIZE: _check_detokenize,
    Operation.TRANSCRIPTIONS: _refuse_json,
    Operation.TRANSLATIONS: _refuse_json,
    Operation.SPEECH: _check_speech,
}


def _prompts(operation: Operation, body: Mapping[str, Any]) -> int:
    """How many prompts are answered: `/v1/completions` takes several at once."""
    if operation is not Operation.COMPLETIONS:
        return 1
    prompt = body.get("prompt")
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1


def estimate_prompt(operation: Operation, body: Mapping[str, Any]) -> int:
    """Prompt tokens, by rule of thumb: four characters a token, a fixed price for each image or sound."""
    if operation is Operation.RERANK:  # the query is read together with each document
        query = _part_tokens(body["query"])
        return sum(query + _part_tokens(document) for document in body["documents"])
    if operation is Operation.DETOKENIZE:
        return len(body["tokens"])
    if operation is Operation.CHAT or (operation is Operation.TOKENIZE and body.get("messages") is not None):
        text = sum(_TOKENS_PER_MESSAGE + _content_tokens(message.get("content")) for message in body["messages"])
        tools = body.get("tools")  # part of the prompt in every template that knows them
        return text if not tools else text + len(orjson.dumps(tools)) // _CHARACTERS_PER_TOKEN
    prompt = body["input" if operation in (Operation.EMBEDDINGS, Operation.SPEECH) else "prompt"]
    if isinstance(prompt, str):
        return len(prompt) // _CHARACTERS_PER_TOKEN + 1
    if isinstance(prompt, list):
        return sum(_part_tokens(part) for part in prompt)
    return 1


def _content_tokens(content: object) -> int:
    if isinstance(content, str):
        return len(content) // _CHARACTERS_PER_TOKEN
    if isinstance(content, list):
        return sum(_part_tokens(part) for part in content)
    return 0


def _part_tokens(part: object) -> int:
    """A string, a token number, a list of tokens, or one part of a message's content."""
    if isinstance(part, str):
        return len(part) // _CHARACTERS_PER_TOKEN + 1
    if isinstance(part, list):
        return len(part)
    if isinstance(part, dict):
        text = part.get("text")
        return len(text) // _CHARACTERS_PER_TOKEN if isinstance(text, str) else _TOKENS_PER_MEDIA
    return 1
