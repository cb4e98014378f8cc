"""What adapters share for putting requests and answers into shape. Values in, values out."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import orjson

from backends.base import JSON, REMOVE, positive


def json_object(body: bytes) -> JSON:
    """The object in `body`; an empty one when it holds none."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def new_id(prefix: str) -> str:
    """For answers of engines that give none, or the same one twice."""
    return prefix + secrets.token_hex(12)


def as_max_tokens(body: JSON) -> dict[str, Any]:
    """Edits that say `max_completion_tokens` by its older name, for engines that would read over it."""
    newer = body.get("max_completion_tokens")
    if "max_completion_tokens" not in body:
        return {}
    return {"max_completion_tokens": REMOVE} if newer is None else {
        "max_completion_tokens": REMOVE, "max_tokens": newer,
    }  # fmt: skip


def choice_index(choice: JSON) -> int:
    index = choice.get("index")
    return index if isinstance(index, int) else 0


def tokens_answer(tokens: Sequence[Any], limit: int | None = None) -> JSON:
    return {"count": len(tokens), "max_model_len": limit, "tokens": list(tokens)}


def rerank_answer(results: Sequence[tuple[Any, Any]], body: JSON, tokens: int | None) -> JSON:
    """`results` as (index of the document, score), of whatever type the engine sent. Sorted, cut to `top_n`,
    with the texts unless they are unwanted."""
    documents, most = body["documents"], body.get("top_n")
    ranked = sorted(
        ((index, score) for index, score in results if isinstance(index, int) and isinstance(score, int | float)),
        key=lambda result: -result[1],
    )
    if positive(most):
        ranked = ranked[:most]
    shown: list[JSON] = []
    for index, score in ranked:
        entry: JSON = {"index": index, "relevance_score": score}
        if body.get("return_documents") is not False and 0 <= index < len(documents):
            document = documents[index]
            entry["document"] = document if isinstance(document, dict) else {"text": document}
        shown.append(entry)
    answer: JSON = {"id": new_id("rerank-"), "model": body.get("model"), "results": shown}
    if tokens is not None:
        answer["usage"] = {"prompt_tokens": tokens, "total_tokens": tokens}
    return answer


class ToolIndexes:
    """Gives every tool call of a stream an index of its own, and keeps it, where engines number all of them 0 or none
    at all. Numbers that are right stay as they are."""

    def __init__(self) -> None:
        self._by_id: dict[tuple[int, str], int] = {}
        self._open: dict[tuple[int, object], int] = {}  # (choice, the engine's index) -> ours
        self._count: dict[int, int] = {}

    def fix(self, choice: int, calls: object) -> None:
        for call in calls if isinstance(calls, list) else ():
            if isinstance(call, dict):
                call["index"] = self._index(choice, call)

    def _index(self, choice: int, call: JSON) -> int:
        given, identity = call.get("index"), call.get("id")
        given = given if isinstance(given, int) else None
        function = call.get("function")
        begins = bool(identity) or (isinstance(function, dict) and bool(function.get("name")))
        if isinstance(identity, str) and (choice, identity) in self._by_id:
            return self._by_id[choice, identity]
        if not begins and (choice, given) in self._open:
            return self._open[choice, given]
        index = self._count.get(choice, 0)
        self._count[choice] = index + 1
        if not identity:
            call["id"] = identity = new_id("call_")
        self._by_id[choice, str(identity)] = self._open[choice, given] = self._open[choice, None] = index
        call.setdefault("type", "function")
        return index
