"""Ollama's answers as OpenAI's."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import orjson

from backends.base import JSON, Operation, positive
from backends.shaping import new_id


def _usage(line: JSON) -> JSON | None:
    """Counts of zero are left out by Ollama, so a missing one next to the other is a zero."""
    prompt, completion = line.get("prompt_eval_count"), line.get("eval_count")
    if prompt is None and completion is None:
        return None
    prompt, completion = positive(prompt) or 0, positive(completion) or 0
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _message(line: JSON) -> JSON:
    message = line.get("message")
    return message if isinstance(message, dict) else {}


def _finish(line: JSON) -> str:
    return "length" if line.get("done_reason") == "length" else "stop"  # others (load, unload) are not OpenAI's


def _created(line: JSON) -> int:
    try:
        return max(0, int(datetime.fromisoformat(str(line.get("created_at"))).timestamp()))
    except (ValueError, OverflowError, OSError):
        return 0


def _calls(given: object, first: int) -> list[JSON]:
    calls: list[JSON] = []
    for call in given if isinstance(given, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            arguments = orjson.dumps(function.get("arguments") or {}).decode()
            identity = call.get("id") or new_id("call_")
            told = {"name": function.get("name", ""), "arguments": arguments}
            calls.append({"index": first + len(calls), "id": identity, "type": "function", "function": told})
    return calls


def _logprobs(line: JSON) -> JSON | None:
    rows = line.get("logprobs")
    return {"content": rows} if isinstance(rows, list) and rows else None


def whole(operation: Operation, answer: JSON) -> JSON:
    if answer.get("done") is not True:
        return answer  # not an answer's end: the gateway finds no choices in it and says so
    finish = _finish(answer)
    message = _message(answer)
    choice: JSON = {"index": 0, "logprobs": _logprobs(answer)}
    if operation is Operation.CHAT:
        told: JSON = {"role": "assistant", "content": message.get("content") or ""}
        if message.get("thinking"):
            told["reasoning"] = message["thinking"]
        if calls := _calls(message.get("tool_calls"), 0):
            for call in calls:
                del call["index"]
            told["tool_calls"], finish = calls, "tool_calls"
        choice["message"] = told
    else:
        choice["text"] = answer.get("response") or ""
    choice["finish_reason"] = finish
    document = _head(operation, _created(answer), answer.get("model")) | {"choices": [choice]}
    if operation is Operation.CHAT:
        document["object"] = "chat.completion"
    usage = _usage(answer)
    return document if usage is None else document | {"usage": usage}


def _head(operation: Operation, created: int, model: object) -> JSON:
    if operation is Operation.CHAT:
        return {"id": new_id("chatcmpl-"), "object": "chat.completion.chunk", "created": created, "model": model}
    return {"id": new_id("cmpl-"), "object": "text_completion", "created": created, "model": model}


def embeddings(answer: JSON) -> JSON:
    vectors = answer.get("embeddings")
    if not isinstance(vectors, list):
        return answer
    data = [{"object": "embedding", "index": place, "embedding": vector} for place, vector in enumerate(vectors)]
    tokens = positive(answer.get("prompt_eval_count")) or 0
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": answer.get("model"), "usage": usage}


class Stream:
    """Ollama's lines as OpenAI's chunks: one id for all of them, role first, the finish and the usage on their own."""

    def __init__(self, operation: Operation) -> None:
        self._operation = operation
        self._head: JSON = {}
        self._calls = 0
        self._begun = False

    def fix(self, chunk: JSON) -> Sequence[JSON]:
        head = self._head
        if not head:
            head = self._head = _head(self._operation, _created(chunk), chunk.get("model"))
        chunks = [self._told(chunk)] if self._operation is Operation.COMPLETIONS else self._said(chunk)
        if chunk.get("done") is True:
            finish = "tool_calls" if self._calls else _finish(chunk)
            last: JSON = {"delta": {}} if self._operation is Operation.CHAT else {"text": ""}
            chunks.append({"index": 0, **last, "logprobs": None, "finish_reason": finish})
        told: list[JSON] = [{**head, "choices": [choice]} for choice in chunks if choice is not None]
        if chunk.get("done") is True and (usage := _usage(chunk)) is not None:
            told.append({**head, "choices": [], "usage": usage})
        return told

    def _told(self, line: JSON) -> JSON | None:
        text = line.get("response")
        if not text:
            return None
        return {"index": 0, "text": text, "logprobs": _logprobs(line), "finish_reason": None}

    def _said(self, line: JSON) -> list[JSON | None]:
        message = _message(line)
        delta: JSON = {}
        if not self._begun:
            self._begun = True
            delta = {"role": "assistant", "content": ""}
        if message.get("thinking"):
            delta["reasoning"] = message["thinking"]
        if message.get("content"):
            delta["content"] = message["content"]
        if calls := _calls(message.get("tool_calls"), self._calls):
            self._calls += len(calls)
            delta["tool_calls"] = calls
        if not delta:
            return []
        return [{"index": 0, "delta": delta, "logprobs": _logprobs(line), "finish_reason": None}]
