"""OpenAI's requests in Ollama's own language."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from backends.base import JSON, Operation, Unsupported

# OpenAI's name -> Ollama's option. Anything else of a request stays behind: keep_alive (whose model is thrown out),
# num_ctx, num_gpu and num_thread (a value other than the loaded one makes Ollama load the model again for everybody).
OPTIONS = {
    "temperature": "temperature", "top_p": "top_p", "seed": "seed", "top_k": "top_k", "min_p": "min_p",
    "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
    "repeat_penalty": "repeat_penalty", "repetition_penalty": "repeat_penalty",
}  # fmt: skip
# Of its own `options`, those that concern one answer and not the loaded model.
CLIENT_OPTIONS = frozenset(
    "temperature top_p top_k min_p typical_p seed stop repeat_penalty repeat_last_n presence_penalty frequency_penalty"
    " num_predict mirostat mirostat_tau mirostat_eta".split()
)
EFFORTS = {"none": False, "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "max",
            "max": "max"}  # fmt: skip
_PICTURE = ("data:image/jpeg;base64,", "data:image/jpg;base64,", "data:image/png;base64,", "data:image/webp;base64,",
            "data:;base64,")  # fmt: skip


def refuse(operation: Operation, body: JSON) -> Unsupported | None:
    """What cannot be said in Ollama's language."""
    effort = body.get("reasoning_effort")
    if effort is not None and (not isinstance(effort, str) or effort not in EFFORTS):
        return Unsupported("reasoning_effort", f"it takes {', '.join(EFFORTS)}")
    wanted = body.get("response_format")
    if wanted is not None and not _is_form(wanted):
        return Unsupported("response_format", "it takes text, json_object, and json_schema with a schema")
    if operation is Operation.CHAT:
        for number, message in enumerate(body["messages"]):
            if why := _unspeakable(message):
                return Unsupported(f"messages[{number}].{why[0]}", why[1])
    return None


def translate(operation: Operation, body: JSON, context_length: int | None) -> JSON:
    """The body of `/api/chat`, `/api/generate` or `/api/embed`, without the model's name."""
    options = {} if context_length is None else {"num_ctx": context_length}
    if operation is Operation.EMBEDDINGS:
        request: JSON = {"input": body["input"], "truncate": False, "options": options}
        return request | ({"dimensions": body["dimensions"]} if body.get("dimensions") is not None else {})
    request = {"stream": body.get("stream") is True, "options": _options(body) | options, "truncate": False,
               "shift": False}  # fmt: skip
    wanted = _format(body)
    if wanted is not None:
        request["format"] = wanted
    if body.get("logprobs"):
        request["logprobs"] = True
        request["top_logprobs"] = body.get("top_logprobs") or 0
    think = _thinking(body)
    if think is not None:
        request["think"] = think
    if operation is Operation.COMPLETIONS:
        request["prompt"] = body["prompt"]
        if body.get("suffix"):
            request["suffix"] = body["suffix"]
        return request
    request["messages"] = _messages(body["messages"])
    if body.get("tools") and body.get("tool_choice") != "none":
        request["tools"] = body["tools"]
    return request


def _options(body: JSON) -> JSON:
    own = body.get("options")
    options = {k: v for k, v in own.items() if k in CLIENT_OPTIONS} if isinstance(own, dict) else {}
    options |= {new: body[old] for old, new in OPTIONS.items() if body.get(old) is not None}
    limit = body.get("max_completion_tokens")
    limit = body.get("max_tokens") if limit is None else limit
    if limit is not None:
        options["num_predict"] = limit
    stop = body.get("stop")
    if stop is not None:
        options["stop"] = [stop] if isinstance(stop, str) else stop
    return options


def _format(body: JSON) -> object:
    wanted = body.get("response_format")
    if not isinstance(wanted, dict):
        return body.get("format")
    if wanted.get("type") == "json_object":
        return "json"
    schema = wanted.get("json_schema")
    return schema.get("schema") if wanted.get("type") == "json_schema" and isinstance(schema, dict) else None


def _is_form(wanted: object) -> bool:
    if not isinstance(wanted, dict):
        return False
    schema = wanted.get("json_schema")
    if wanted.get("type") == "json_schema":
        return isinstance(schema, dict) and isinstance(schema.get("schema"), dict)
    return wanted.get("type") in ("text", "json_object")


def _thinking(body: JSON) -> object:
    """Its `think`, from OpenAI's reasoning_effort, the usual template switch, or its own field."""
    effort = body.get("reasoning_effort")
    if effort is not None:
        return EFFORTS[effort]
    template = body.get("chat_template_kwargs")
    if isinstance(template, dict) and isinstance(template.get("enable_thinking"), bool):
        return template["enable_thinking"]
    return body.get("think")


def _unspeakable(message: JSON) -> tuple[str, str] | None:
    """(field, why) of what cannot be said in Ollama's messages."""
    content = message.get("content")
    for place, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "image_url" and not _link(part).startswith(_PICTURE):
            return f"content[{place}].image_url", "it takes JPEG, PNG and WebP pictures as base64 data: URIs"
        if kind not in ("image_url", "text"):
            return f"content[{place}]", "it takes text and pictures"
    calls = message.get("tool_calls")
    for place, call in enumerate(calls if isinstance(calls, list) else ()):
        if _arguments(call) is None:
            return f"tool_calls[{place}].function.arguments", "they have to be a JSON object"
    return None


def _link(part: JSON) -> str:
    link = part.get("image_url")
    link = link.get("url") if isinstance(link, dict) else link
    return link if isinstance(link, str) else ""


def _arguments(call: object) -> JSON | None:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return None
    given = function.get("arguments")
    if isinstance(given, dict):
        return given
    if given in (None, ""):
        return {}
    try:
        value = orjson.loads(given) if isinstance(given, str) else None
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _messages(messages: Sequence[JSON]) -> list[JSON]:
    names: dict[object, object] = {}  # of the functions behind call ids
    return [_message(message, names) for message in messages]


def _message(message: JSON, names: dict[object, object]) -> JSON:
    role, content = message.get("role", "user"), message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    told: JSON = {
        "role": "system" if role == "developer" else role,
        "content": "\n".join(str(part.get("text", "")) for part in parts if part.get("type") == "text"),
    }
    images = [_link(part).partition(",")[2] for part in parts if part.get("type") == "image_url"]
    if images:
        told["images"] = images
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(thoughts, str):
        told["thinking"] = thoughts
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        told["tool_calls"] = []
        for call in calls:
            name = call["function"].get("name")
            if isinstance(call.get("id"), str):
                names[call["id"]] = name
            told["tool_calls"].append({"id": call.get("id"), "function": {"name": name, "arguments": _arguments(call)}})
    if role == "tool":
        identity = message.get("tool_call_id")
        told["tool_call_id"] = identity
        told["tool_name"] = message.get("name") or (names.get(identity) if isinstance(identity, str) else None)
    return {key: value for key, value in told.items() if value is not None}
