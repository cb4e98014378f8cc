"""What /docs and /openapi.json say about the inference routes, and the page itself.

The page is plain HTML made here: the usual documentation pages load their scripts from the internet, which a gateway in
a closed network cannot offer and a security team does not want.
"""

from __future__ import annotations

import json
from html import escape
from typing import Any

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_MODEL = {"type": "string", "minLength": 1, "description": "A name from /v1/models."}
_LIMIT = {"type": ["integer", "null"], "minimum": 0, "description": "Most tokens of the answer."}
_STREAMING = {
    "stream": {"type": ["boolean", "null"], "description": "Answer as server-sent events."},
    "stream_options": {"type": ["object", "null"], "properties": {"include_usage": {"type": ["boolean", "null"]}}},
    "max_tokens": _LIMIT,
    "n": {"type": ["integer", "null"], "minimum": 1, "maximum": 128},
}
_MESSAGES = {"type": "array", "minItems": 1, "items": {"type": "object"}}
_TEXT = {"type": "string"}
_FILE = {"type": "string", "format": "binary"}
_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array"}]}
_OPERATIONS: tuple[tuple[str, str, dict[str, Any], list[str]], ...] = (
    (
        "/v1/chat/completions",
        "Answer a conversation",
        {"messages": _MESSAGES, "max_completion_tokens": _LIMIT, **_STREAMING},
        ["messages"],
    ),
    ("/v1/completions", "Continue a text", {"prompt": _TEXTS, **_STREAMING}, ["prompt"]),
    (
        "/v1/embeddings",
        "Turn texts into vectors",
        {"input": _TEXTS, "encoding_format": {"enum": ["float", "base64", None]}},
        ["input"],
    ),
    (
        "/v1/rerank",
        "Sort documents by what they say about a query",
        {"query": {"type": "string"}, "documents": {"type": "array", "minItems": 1}, "top_n": {"type": "integer"}},
        ["query", "documents"],
    ),
    ("/v1/tokenize", "Count a text's tokens", {"prompt": _TEXTS, "messages": _MESSAGES}, []),
    ("/v1/detokenize", "Tokens back to text", {"tokens": {"type": "array", "items": {"type": "integer"}}}, ["tokens"]),
    (
        "/v1/audio/transcriptions",
        "Turn speech into text",
        {"file": _FILE, "response_format": _TEXT, "stream": {"type": "boolean"}},
        ["file"],
    ),
    ("/v1/audio/translations", "Turn speech into English text", {"file": _FILE, "response_format": _TEXT}, ["file"]),
    (
        "/v1/audio/speech",
        "Turn text into speech",
        {"input": _TEXT, "voice": _TEXT, "response_format": _TEXT},
        ["input"],
    ),
)
_FORMS = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
_PASSING = _FORMS | {"/v1/audio/speech"}


def documented_operations() -> dict[str, Any]:
    """OpenAPI path items of the hot routes. Fields that are not listed are passed on to the engine as they are."""
    return {path: {"post": _operation(path, summary, fields, needed)} for path, summary, fields, needed in _OPERATIONS}


def _operation(path: str, summary: str, fields: dict[str, Any], needed: list[str]) -> dict[str, Any]:
    body = {
        "type": "object",
        "required": ["model", *needed],
        "properties": {"model": _MODEL, **fields},
        "additionalProperties": True,
    }
    refusals = {
        "400": "The request is wrong; `param` names the field.",
        "401": "No valid key.",
        "404": "No such model for this key.",
        "408": "The body did not arrive in time.",
        "413": "The body is too large.",
        "422": "The engine refuses the request.",
        "429": "A limit is reached; retry-after says how long to wait.",
        "502": "The engine failed.",
        "503": "No engine can answer now; retry-after says how long to wait.",
        "504": "The engine took too long.",
    }
    error = {"application/json": {"schema": _ERROR}}
    return {
        "tags": ["inference"],
        "summary": summary,
        "requestBody": {
            "required": True,
            "content": {"multipart/form-data" if path in _FORMS else "application/json": {"schema": body}},
        },
        "responses": {
            "200": {
                "description": "The engine's answer, unchanged but for the model's name.",
                "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}}
                | ({"text/plain": {}, "audio/*": {}} if path in _PASSING else {}),
            }
        }
        | {status: {"description": text, "content": error} for status, text in refusals.items()},
    }


def with_refusals(paths: dict[str, Any]) -> dict[str, Any]:
    """The other routes as FastAPI describes them, with what the gateway answers instead of FastAPI's own errors."""
    error = {"application/json": {"schema": _ERROR}}
    for path, item in paths.items():
        for operation in item.values():
            refusals = {}
            if operation.get("security") != []:
                refusals["401"] = "No valid key."
            if path.startswith("/admin/") or path == "/metrics":
                refusals["403"] = "The key's role does not allow it."
            if "{" in path:
                refusals["404"] = "There is nothing of that name for this key."
            if path.endswith("/reload"):
                refusals["400"] = "The new configuration is wrong; the old one stays."
            responses = operation["responses"]
            responses.pop("422", None)
            responses |= {status: {"description": text, "content": error} for status, text in refusals.items()}
            if path == "/ready":
                responses["503"] = {**responses["200"], "description": "Not now; the status says why."}
            elif path == "/metrics":
                responses["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    return paths


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Sekisho API</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
code, pre {{ font: 14px/1.5 ui-monospace, monospace; background: #f3f3f0; }} code {{ padding: .1rem .3rem; }}
pre {{ padding: .8rem; overflow-x: auto; }} summary {{ cursor: pointer; padding: .4rem 0; }}
b {{ display: inline-block; min-width: 4rem; color: #7a2e1d; }} h2 {{ border-bottom: 1px solid #ddd; }}
td, th {{ text-align: left; vertical-align: top; padding: .2rem 1rem .2rem 0; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #1b1b1a; color: #ddd; }} code, pre {{ background: #2a2a28; }}
  b {{ color: #e59a86; }} h2 {{ border-color: #444; }} }}
</style></head><body>
<h1>Sekisho {version}</h1>
<p>One OpenAI-compatible front door for self-hosted models. Point an OpenAI SDK's <code>base_url</code> at
<code>/v1</code> of this address and send your key as <code>Authorization: Bearer sk-...</code>. Machines read
<a href="openapi.json">openapi.json</a>.</p>
{sections}
</body></html>
"""


def render(schema: dict[str, Any]) -> str:
    """The page for people, from the OpenAPI document."""
    groups: dict[str, list[str]] = {}
    for path, item in schema["paths"].items():
        for method, operation in item.items():
            tag = (operation.get("tags") or ["other"])[0]
            groups.setdefault(tag, []).append(_entry(method.upper(), path, operation))
    sections = "".join(f"<h2>{escape(tag.title())}</h2>{''.join(entries)}" for tag, entries in groups.items())
    return _PAGE.format(version=escape(schema["info"]["version"]), sections=sections)


def _entry(method: str, path: str, operation: dict[str, Any]) -> str:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    example = f"<p>Body</p><pre>{escape(json.dumps(body, indent=2))}</pre>" if body else ""
    rows = "".join(
        f"<tr><th>{escape(status)}</th><td>{escape(answer.get('description', ''))}</td></tr>"
        for status, answer in operation.get("responses", {}).items()
    )
    summary = escape(operation.get("summary", ""))
    return (
        f"<details><summary><b>{method}</b> <code>{escape(path)}</code> {summary}</summary>"
        f"{example}<table>{rows}</table></details>"
    )
