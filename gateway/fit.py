"""Which replicas could honour a request at all, apart from how they are doing; and whether a prompt has been cut.

Replicas of a model that answer alike are of one `Kind`, and a request is held against kinds, not against replicas. What
is not known of a replica is allowed: only what is known to be missing keeps a request away from it. Counting tokens is
the engine's business: the gateway has a rule of thumb, by which it prefers, and refuses only what is beyond doubt.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from backends.base import ASKING, Backend, Capability, ModelCard, Need, Operation, first_unmet, needs_of
from gateway.call import Call, estimate_prompt
from gateway.errors import ContextTooLong, GatewayError, UnsupportedOperation
from gateway.types import Replica, Usage

_DOUBTLESS = 1.25  # times the window; and times the prompt, where another replica has more room
_LONG = 512  # tokens of a prompt whose shortening would be seen in the counts
_SHOWN = (
    Capability.TOOLS, Capability.TOOL_CHOICE, Capability.JSON_OBJECT, Capability.JSON_SCHEMA, Capability.VISION,
    Capability.LOGPROBS, Capability.LOGIT_BIAS, Capability.N, Capability.ECHO, Capability.SUFFIX,
)  # fmt: skip


class Kind(NamedTuple):
    """What decides whether a request fits a replica."""

    backend: Backend
    window: int | None  # tokens of prompt and answer together; None = not known
    missing: frozenset[Capability]  # known to be missing, beyond what the engine itself cannot do
    needs: tuple[Need, ...]  # the same, as what to look for in a request


def kind_of(replica: Replica, card: ModelCard | None, named: Collection[str] = ()) -> Kind:
    """`card`: the engine's word on its model. `named`: capabilities that the operator has listed for any replica of the
    model: a list without one of them says that it is missing."""
    window = replica.context_length
    if window is None and card is not None and not replica.backend.translates:
        window = card.context_length  # where requests set the window, a card names the longest possible one
    missing = _missing(replica, card, named)
    return Kind(replica.backend, window, missing, needs_of(missing))


def _missing(replica: Replica, card: ModelCard | None, named: Collection[str]) -> frozenset[Capability]:
    """The operator's word counts before the engine's; a list that is empty says nothing."""
    told, words = set(replica.backend.tells), replica.capabilities
    if words:
        told |= {Capability.VISION, *(one for one in Capability if one in named)}
    elif card is not None:
        words = card.capabilities
    return frozenset(one for one in told if one not in words) if words else frozenset()


def refusal(kind: Kind, call: Call) -> GatewayError | None:
    """Why a replica of this kind cannot honour the request."""
    backend = kind.backend
    unmet = backend.refuse(call.operation, call.body)
    if unmet is None and kind.needs and call.operation.generates:
        unmet = first_unmet(kind.needs, call.body)
    if unmet is not None:
        message = f"'{unmet.field}' cannot be used with this model: its engine is {backend.kind}, and {unmet.why}."
        return UnsupportedOperation(message, param=unmet.field)
    if backend.cuts_prompts and kind.window is not None:
        return too_long(call, kind.window)
    return None


def fitting(kinds: Sequence[Kind], call: Call) -> tuple[list[Kind], list[Kind]]:
    """The kinds that fit, and those that might although their window seems small: for when none of the first is there.

    Raises: UnsupportedOperation, ContextTooLong when no kind can honour the request.
    """
    able = []
    first: GatewayError | None = None
    for kind in kinds:
        refused = refusal(kind, call)
        if refused is None:
            able.append(kind)
        else:
            first = first or refused
    if first is not None and not able:
        raise _with_abilities(first, kinds) if call.operation.generates else first
    if len(able) < 2 or len({kind.window for kind in able}) == 1:
        return able, []
    return _roomy(able, call)


def _with_abilities(error: GatewayError, kinds: Sequence[Kind]) -> GatewayError:
    """Adds what the model could be asked for instead."""
    if error.param in ASKING:
        able = {name for kind in kinds for name in kind.backend.capabilities - kind.missing}
        error.message += f" It can be asked for: {', '.join(one for one in _SHOWN if one in able) or 'text only'}."
    return error


def _roomy(kinds: list[Kind], call: Call) -> tuple[list[Kind], list[Kind]]:
    """By their windows. A request that seems to fit nowhere goes to the longest: its engine counts better."""
    known = [kind.window for kind in kinds if kind.window is not None]
    prompt, completion = _longest(call), (call.max_tokens or 1) if call.operation.generates else 0
    wanted = prompt * _DOUBTLESS + completion
    if wanted <= min(known):
        return kinds, []
    sure = [kind for kind in kinds if kind.window is not None and kind.window >= wanted]
    best = sure or [kind for kind in kinds if kind.window is None or kind.window == max(known)]
    perhaps = [kind for kind in kinds if kind.window is None or kind.window >= prompt + completion]
    return best, [kind for kind in perhaps if kind not in best]


def _longest(call: Call) -> int:
    """Tokens of what the engine has to read in one piece, by estimate."""
    body = call.body
    if call.operation is Operation.EMBEDDINGS and isinstance(body["input"], list):
        if not isinstance(body["input"][0], int):
            return max(estimate_prompt(call.operation, {"input": [one]}) for one in body["input"])
    elif call.operation is Operation.RERANK:
        query = body["query"]
        return max(estimate_prompt(call.operation, {"query": query, "documents": [one]}) for one in body["documents"])
    return call.prompt_tokens


def fails_alike(kind: Kind, failed: Kind, error: GatewayError) -> bool:
    """Whether a replica of `kind` would refuse what one of the kind `failed` has refused with `error`."""
    if kind is failed:
        return True
    if not isinstance(error, ContextTooLong):
        return False
    return kind.window is not None and failed.window is not None and kind.window <= failed.window


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
