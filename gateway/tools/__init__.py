"""Which tools a tenant may use: the policy as a value, and whole answers held against it. No I/O.

`offers` holds requests against the same policy, `calls` and `tap` streams.

What cannot be read counts as not allowed, such as a call without a name. Where a tool or a call could be known by
several names, each of them has to be allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from gateway.config.access import ToolsConfig
from gateway.errors import ToolCallNotAllowed
from gateway.types import ToolPolicy

JSON = dict[str, Any]

LONGEST_NAME = 256  # characters; OpenAI allows 64
NAMED_KINDS = ("function", "custom")  # types of tools that have names of their own
CALLING = ("tool_calls", "function_call")  # finish reasons of an answer that ends with a call
# What a choice says of the tokens that it is made of, and so of a call that is taken out of it.
TRACES = ("logprobs", "token_ids")


def compile_policy(given: ToolsConfig) -> ToolPolicy | None:
    """None for a policy that lets everything pass, which then costs nothing."""
    if not given.deny and "*" in given.allow and "*" in given.types:
        return None
    return ToolPolicy(given.allow, given.deny, given.types, strip=given.on_violation == "strip")


def allows_type(policy: ToolPolicy, kind: str) -> bool:
    return _listed(kind, policy.types)


def allows_name(policy: ToolPolicy, name: object) -> bool:
    """Whether a tool may be called so. Names are compared exactly, upper and lower case apart."""
    return (
        isinstance(name, str)
        and 0 < len(name) <= LONGEST_NAME
        and _listed(name, policy.allow)
        and not _listed(name, policy.deny)
    )


def allows(policy: ToolPolicy, kind: object, names: Iterable[object]) -> bool:
    """`names`: every name that the tool or call could be known by."""
    found = list(names)
    if not isinstance(kind, str) or len(kind) > LONGEST_NAME:
        return False
    if kind not in NAMED_KINDS:
        found.append(kind)  # such as web_search: a tool without a name goes by its type
    return allows_type(policy, kind) and bool(found) and all(allows_name(policy, name) for name in found)


def kind_of(tool: Mapping[str, Any]) -> object:
    """The type of a tool or call; those without one are functions in every engine."""
    kind = tool.get("type")
    if kind is None:
        return "custom" if "custom" in tool and "function" not in tool else "function"
    return kind


def _listed(text: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(text, pattern) for pattern in patterns)


# --- whole answers
def screen_answer(document: JSON, policy: ToolPolicy) -> int:
    """Takes forbidden calls out of a chat completion, in place; how many there were.

    Raises: ToolCallNotAllowed, where the policy is to refuse.
    """
    choices = document.get("choices")
    found = [_screen_choice(choice, policy) for choice in choices if isinstance(choice, dict)] if choices else []
    return sum(found)


def _screen_choice(choice: JSON, policy: ToolPolicy) -> int:
    message = choice.get("message")
    if not isinstance(message, dict):
        return 0
    stripped = _screen_calls(message, policy) + _screen_function_call(message, policy)
    if not stripped:
        return 0
    if not policy.strip:
        raise ToolCallNotAllowed
    for name in TRACES:
        if choice.get(name) is not None:
            choice[name] = None  # which of the tokens made the call is not to be told
    if "tool_calls" not in message and "function_call" not in message:
        message["content"] = message.get("content") or ""  # without calls a message needs a text to be sent back
        if choice.get("finish_reason") in CALLING:
            choice["finish_reason"] = "stop"
    return stripped


def _screen_calls(message: JSON, policy: ToolPolicy) -> int:
    calls = message.get("tool_calls")
    if not calls:
        return 0
    if not isinstance(calls, list):
        del message["tool_calls"]
        return 1
    kept = [call for call in calls if isinstance(call, dict) and allows(policy, kind_of(call), _names(call))]
    if kept:
        message["tool_calls"] = kept
    else:
        del message["tool_calls"]
    return len(calls) - len(kept)


def _screen_function_call(message: JSON, policy: ToolPolicy) -> int:
    call = message.get("function_call")
    if not call or (isinstance(call, dict) and allows(policy, "function", [call.get("name")])):
        return 0
    del message["function_call"]
    return 1


def _names(call: JSON) -> list[object]:
    found = [part.get("name") for part in map(call.get, NAMED_KINDS) if isinstance(part, dict)]
    return [*found, call["name"]] if "name" in call else found
