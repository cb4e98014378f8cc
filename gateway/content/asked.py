"""What was asked, out of a request's body: texts in full, media by type and size, tools by name, tokens by number."""

from __future__ import annotations

from typing import Any

from gateway.content.shown import Shown, media

JSON = dict[str, Any]

_TEXTS = ("text", "refusal", "transcript", "input_text")
_MEDIA = ("image_url", "video_url", "audio_url", "input_audio", "file", "input_image")
_HOLDERS = ("url", "data", "file_data")


def asked(body: JSON, shown: Shown) -> JSON:
    """`body`: as the client sent it; of a form the fields that are text."""
    found: JSON = {}
    if isinstance(messages := body.get("messages"), list):
        found["messages"] = [message(entry, shown) for entry in shown.entries(messages)]
    for name in ("prompt", "suffix", "input", "query", "documents", "instructions", "language", "voice"):
        if body.get(name) is not None:
            found[name] = content(body[name], shown)
    if isinstance(tokens := body.get("tokens"), list):
        found["tokens"] = len(tokens)
    if names := [shown.word(name) for name in shown.entries(_tool_names(body))]:
        found["tools"] = names
    return found


def message(given: object, shown: Shown) -> JSON:
    """A message of a conversation or of an answer."""
    if not isinstance(given, dict):
        return {}
    found: JSON = {"role": shown.word(given["role"])} if given.get("role") else {}
    if given.get("name"):
        found["name"] = shown.word(given["name"])
    for name, keys in (("reasoning", ("reasoning", "reasoning_content")), ("refusal", ("refusal",))):
        text = next((given[key] for key in keys if isinstance(given.get(key), str) and given[key]), None)
        if text is not None:
            found[name] = shown.text(text)
    if given.get("content") is not None:
        found["content"] = content(given["content"], shown)
    if isinstance(sound := given.get("audio"), dict):
        found["audio"] = _part({"type": "audio"} | sound, shown)
    if calls := [tool_call(call, shown) for call in shown.entries(_calls(given))]:
        found["tool_calls"] = calls
    return found


def content(given: object, shown: Shown) -> Any:
    """A text, or a list of texts, parts and prompts of tokens."""
    if isinstance(given, str):
        return shown.text(given)
    if isinstance(given, dict):
        return _part(given, shown)
    if not isinstance(given, list):
        return None
    if given and isinstance(given[0], int):
        return {"tokens": len(given)}
    return [content(part, shown) for part in shown.entries(given) if not isinstance(part, int)]


def tool_call(call: object, shown: Shown) -> JSON:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return {}
    arguments = function.get("arguments")
    found = {"name": shown.word(function.get("name"))}
    return found | {"arguments": shown.text(arguments)} if isinstance(arguments, str) else found


def _calls(given: JSON) -> list[Any]:
    calls = given.get("tool_calls")
    old = given.get("function_call")
    return [*(calls if isinstance(calls, list) else ()), *([old] if isinstance(old, dict) else ())]


def _tool_names(body: JSON) -> list[Any]:
    tools = body.get("tools") or body.get("functions")
    named = [tool.get("function", tool) for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    return [function.get("name") for function in named if isinstance(function, dict)]


def _part(given: JSON, shown: Shown) -> JSON:
    kind = given.get("type") if isinstance(given.get("type"), str) else ""
    found: JSON = {"type": shown.word(kind)} if kind else {}
    for name in _TEXTS:
        if isinstance(given.get(name), str):
            found[name] = shown.text(given[name])
    for holder in (given, *(given[name] for name in _MEDIA if name in given)):
        data = holder if isinstance(holder, str) else _held(holder)
        if data is not None:
            found |= media(kind or "unknown", data)
    return found


def _held(holder: object) -> str | None:
    if not isinstance(holder, dict):
        return None
    return next((holder[name] for name in _HOLDERS if isinstance(holder.get(name), str)), None)
