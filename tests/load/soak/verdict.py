"""What may come of a request, and what must not: pure decisions over an answer and what was done to the gateway.

An answer is whole, or there is a reason for it that we have caused ourselves. Everything else is unexpected.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from tests.load.soak.engine import PROMPT_TOKENS, token
from tests.load.soak.wire import Answer

COMPLETE, LEFT, LIMITED = "complete", "left", "limited"
ENGINE_KILLED, WORKER_KILLED, UNEXPECTED = "engine killed", "worker killed", "unexpected"
MADE_BY = re.compile(r"@(\d+)")


@dataclass(frozen=True, slots=True)
class Asked:
    """One request to a model."""

    tenant: str
    key: str
    model: str  # name as the client writes it
    nonce: str
    tokens: int
    stream: bool
    wants_usage: bool = False
    may_be_limited: bool = False


@dataclass(slots=True)
class Deeds:
    """What was done to engines and workers. Times are seconds of a steady clock."""

    engines: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))  # number -> when it was killed
    workers: list[float] = field(default_factory=list)  # when one was killed
    ports: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))  # of clients at a killed worker

    def killed_worker(self, answer: Answer) -> bool:
        """Whether the worker that had this connection was killed while it was in use."""
        return any(answer.opened <= at <= answer.ended for at in self.ports.get(answer.port, ()))

    def killed_engine(self, number: int, answer: Answer) -> bool:
        return any(answer.began <= at <= answer.ended for at in self.engines.get(number, ()))


def judge(asked: Asked, answer: Answer, deeds: Deeds) -> tuple[str, str]:
    """(what came of it, why it is unexpected)."""
    if answer.left:
        return LEFT, ""
    if not answer.complete:
        if deeds.killed_worker(answer):
            return WORKER_KILLED, ""
        return UNEXPECTED, f"{answer.problem}; {len(answer.body)} bytes of {_begin(answer)}"
    if answer.status == 429 and asked.may_be_limited and answer.headers.get(b"retry-after", b"").isdigit():
        return LIMITED, ""
    if answer.status != 200:
        return UNEXPECTED, _begin(answer)
    try:
        return _judge_stream(asked, answer, deeds) if asked.stream else _judge_document(asked, answer)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        return UNEXPECTED, f"not what was asked for ({error!r}): {_begin(answer)}"


def _begin(answer: Answer) -> str:
    return f"status {answer.status} {bytes(answer.body[:200]).decode(errors='replace')!r}"


def _judge_document(asked: Asked, answer: Answer) -> tuple[str, str]:
    document = json.loads(answer.body)
    choice = document["choices"][0]
    wrong = _wrong_text(asked, choice["message"]["content"]) or _wrong_name(asked, {document["model"]})
    if choice["finish_reason"] != "stop" or not _counts(asked, document["usage"]):
        wrong = wrong or "finish reason or usage is not the engine's"
    return (UNEXPECTED, wrong) if wrong else (COMPLETE, "")


def _judge_stream(asked: Asked, answer: Answer, deeds: Deeds) -> tuple[str, str]:
    events = [part for part in bytes(answer.body).split(b"\n\n") if part and not part.startswith(b":")]
    done = [part == b"data: [DONE]" for part in events]
    documents = [json.loads(part.removeprefix(b"data: ")) for part, last in zip(events, done, strict=True) if not last]
    errors = [one["error"] for one in documents if "error" in one]
    chunks = [one for one in documents if "error" not in one]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    if errors:
        makers = {int(number) for number in MADE_BY.findall(text)}
        clean = any(done) or bool(reasons)
        if len(errors) == 1 and "error" in documents[-1] and not clean and len(makers) == 1:
            if deeds.killed_engine(makers.pop(), answer) and _is_beginning(asked, text):
                return ENGINE_KILLED, ""
        state = f"{len(errors)} errors, clean end: {clean}, {len(text)} characters before"
        return UNEXPECTED, f"an error in the stream ({state}): {errors[0]}"
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    wrong = _wrong_text(asked, text) or _wrong_name(asked, {chunk["model"] for chunk in chunks})
    if not wrong and (reasons != ["stop"] or done != [False] * (len(done) - 1) + [True]):
        wrong = f"ends with the reasons {reasons} and {sum(done)} times [DONE]"
    if not wrong and (len(usages) != asked.wants_usage or not all(_counts(asked, usage) for usage in usages)):
        wrong = f"usage is {usages}"
    return (UNEXPECTED, wrong) if wrong else (COMPLETE, "")


def _whole(asked: Asked, engine: int) -> str:
    return "".join(token(asked.nonce, place, engine) for place in range(asked.tokens))


def _wrong_text(asked: Asked, text: str) -> str:
    makers = {int(number) for number in MADE_BY.findall(text)}
    if len(makers) == 1 and text == _whole(asked, makers.pop()):
        return ""
    return f"not its own answer of {asked.tokens} tokens: {len(text)} characters, {text[:60]!r} ... {text[-60:]!r}"


def _is_beginning(asked: Asked, text: str) -> bool:
    return _whole(asked, int(MADE_BY.findall(text)[0])).startswith(text)


def _wrong_name(asked: Asked, names: set[str]) -> str:
    return "" if names == {asked.model} else f"asked for {asked.model}, told {names}"


def _counts(asked: Asked, usage: dict[str, Any]) -> bool:
    return (usage["prompt_tokens"], usage["completion_tokens"]) == (PROMPT_TOKENS, asked.tokens)
