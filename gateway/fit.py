"""Whether a request fits an engine that would shorten its prompt in silence, and whether one has done so. Estimates.

Counting tokens is the engine's business. The gateway has a rule of thumb only, so it speaks up where that leaves no
doubt, and leaves every closer case to the engine.
"""

from __future__ import annotations

from gateway.call import Call
from gateway.errors import ContextTooLong
from gateway.types import Usage

_DOUBTLESS = 1.25  # times the window
_LONG = 512  # tokens of a prompt whose shortening would be seen in the counts


def too_long(call: Call, context_length: int) -> ContextTooLong | None:
    """The refusal of a request that clearly exceeds the window."""
    if not call.operation.generates:
        return None  # inputs are separate from one another
    prompt, completion = call.prompt_tokens, call.max_tokens or 0
    if prompt + completion <= context_length * _DOUBTLESS:
        return None
    return ContextTooLong(
        f"This model's maximum context length is {context_length} tokens. The request asks for about"
        f" {prompt + completion}: {prompt} in the prompt and {completion} for the answer.",
        param="messages" if "messages" in call.body else "prompt",
    )


def looks_cut(call: Call, usage: Usage) -> bool:
    """Whether the engine has read less than half of what was sent. A picture's size says nothing about its tokens."""
    if usage.source != "engine" or call.prompt_tokens < _LONG or usage.prompt * 2 >= call.prompt_tokens:
        return False
    messages = call.body.get("messages") or ()
    return all(isinstance(message.get("content"), str | None) for message in messages)
