"""The tool calls of one stream, held against a tenant's policy chunk by chunk. No I/O.

A call is held back until its name is whole, which is when its arguments begin or its choice ends; then it goes on in
one piece, or not at all. Calls that go on are numbered here, and named once. So, whatever pieces an engine makes of
names and whatever it numbers, a client puts together the names that were checked and no others. Text is never held.
"""

from __future__ import annotations

from typing import Any

from gateway.errors import ToolCallNotAllowed
from gateway.tools import CALLING, LONGEST_NAME, NAMED_KINDS, TRACES, allows, kind_of
from gateway.types import ToolPolicy

JSON = dict[str, Any]

_BODIES = ("arguments", "input")  # of a function's call, and of a custom tool's
_MOST_PENDING = 1024  # calls of one choice whose names are not whole


class CallScreen:
    """Reads the chunks of one stream in order."""

    def __init__(self, policy: ToolPolicy) -> None:
        self._policy = policy
        self._calls: dict[tuple[int, bool], _Calls] = {}  # by choice, and whether in the old form
        self.refused = False  # the stream has held what ends it

    def read(self, chunk: JSON) -> bool:
        """Takes out of a chunk what must not go on, in place, and puts in what was held; whether it has changed.

        Raises: ToolCallNotAllowed, where the policy is to refuse. Nothing of the chunk may go on then.
        """
        choices = chunk.get("choices")
        found = choices if isinstance(choices, list) else ()
        try:
            changed = [self._choice(choice) for choice in found if isinstance(choice, dict)]
        except ToolCallNotAllowed:
            self.refused = True
            raise
        return True in changed

    def _choice(self, choice: JSON) -> bool:
        delta = choice.get("delta")
        delta = delta if isinstance(delta, dict) else {}
        whole = choice.pop("message", None) is not None  # no place for one, and calls could stand in it
        new, old = delta.get("tool_calls"), delta.get("function_call")
        ended = bool(choice.get("finish_reason"))
        number = choice.get("index")
        number = number if isinstance(number, int) else 0
        tools, functions = self._of(number, old=False), self._of(number, old=True)
        if not (new or old or (ended and (tools.seen or functions.seen))):
            return whole
        if new or tools.seen:
            _put(delta, "tool_calls", tools.take(choice, _listed(new), ended=ended))
        if old or functions.seen:
            pieces = functions.take(choice, [{"function": old}] if old else [], ended=ended)
            _put(delta, "function_call", pieces[0]["function"] if pieces else None)
        if delta:
            choice["delta"] = delta
        if choice.get("finish_reason") in CALLING and not tools.passed and not functions.passed:
            choice["finish_reason"] = "stop"
        return True

    @property
    def stripped(self) -> int:
        return sum(calls.stripped for calls in self._calls.values())

    def _of(self, number: int, *, old: bool) -> _Calls:
        found = self._calls.get((number, old))
        if found is None:
            found = self._calls[number, old] = _Calls(self._policy, most=1 if old else None)
        return found


def says_nothing(chunk: JSON) -> bool:
    """Whether a chunk that has lost its calls is not worth sending."""
    if isinstance(chunk.get("usage"), dict):
        return False
    return all(
        isinstance(choice, dict)
        and not choice.get("finish_reason")
        and not choice.get("logprobs")
        and not any((choice.get("delta") or {}).values())
        for choice in chunk.get("choices") or ()
    )


class _Call:
    """One call while its pieces arrive."""

    __slots__ = ("held", "identity", "index", "name", "passes")

    def __init__(self) -> None:
        self.identity = self.name = ""
        self.passes: bool | None = None  # None until its name is whole
        self.index = 0  # the client's
        self.held: JSON = {}  # its pieces so far, as one

    def hold(self, piece: JSON) -> None:
        for key, value in piece.items():
            if key in NAMED_KINDS and isinstance(value, dict):
                self.held[key] = {**self.held.get(key, {}), **value}
            elif value is not None:
                self.held[key] = value
        name = _name_in(piece)
        if name != self.name:  # some engines repeat it, others send it in parts
            self.name = (self.name + name)[: LONGEST_NAME + 1]  # too long is not allowed anyway


class _Calls:
    """The calls of one choice."""

    def __init__(self, policy: ToolPolicy, most: int | None) -> None:
        self._policy, self._most = policy, most
        self._open: dict[int, _Call] = {}  # by the engine's index
        self._latest: _Call | None = None
        self._pending: list[_Call] = []
        self._traces: JSON = {}  # what was said of the tokens of pending calls
        self._ended = self._lost = False
        self.seen = False
        self.passed = self.stripped = 0

    def take(self, choice: JSON, pieces: list[Any], *, ended: bool) -> list[JSON]:
        """What goes on with this chunk of the choice; its logprobs go the way of the calls they belong to."""
        self.seen, self._lost = True, False
        self._ended = self._ended or ended
        out = [ready for piece in pieces for ready in self._piece(piece)]
        if self._ended:
            for call in list(self._pending):
                out += self._decide(call)
        self._settle(choice)
        return out

    def _piece(self, piece: Any) -> list[JSON]:
        if not _is_readable(piece) or len(self._pending) > _MOST_PENDING:
            return self._strip()
        call = self._call_of(piece)
        if call.passes is None:
            call.hold(piece)
            return self._decide(call) if _has_body(piece) else []
        if not call.passes:
            self._lost = True
            return []
        return [_renamed({**piece, "index": call.index}, None)]

    def _call_of(self, piece: JSON) -> _Call:
        index, identity, name = piece.get("index"), piece.get("id") or "", _name_in(piece)
        call = self._open.get(index) if isinstance(index, int) else self._latest
        if call is None or (name and _is_another(call, identity, name)):
            call = _Call()
            self._pending.append(call)
            if isinstance(index, int):
                self._open[index] = call
        call.identity = call.identity or identity
        self._latest = call
        return call

    def _decide(self, call: _Call) -> list[JSON]:
        """The name of a call is whole: the call as one piece, or nothing."""
        self._pending.remove(call)
        held, call.held = call.held, {}
        known = len([key for key in NAMED_KINDS if key in held]) == 1 and self.passed != self._most
        call.passes = known and allows(self._policy, kind_of(held), [call.name])
        if not call.passes:
            return self._strip()
        call.index, self.passed = self.passed, self.passed + 1
        return [_renamed({**held, "index": call.index}, call.name)]

    def _strip(self) -> list[JSON]:
        if not self._policy.strip:
            raise ToolCallNotAllowed
        self.stripped += 1
        self._lost = True
        return []

    def _settle(self, choice: JSON) -> None:
        """What tells of tokens waits with a call, goes with it, and is dropped when in doubt."""
        given = {name: choice[name] for name in TRACES if choice.get(name) is not None}
        if not given and not self._traces:
            return
        self._traces = {} if self._lost else _joined(self._traces, given)
        kept = {} if self._pending else self._traces
        choice.update(dict.fromkeys(given) | kept)
        if kept:
            self._traces = {}


def _is_another(call: _Call, identity: str, name: str) -> bool:
    """Whether a piece with a name begins another call under the same index, as some engines number all of them 0."""
    return bool(identity and call.identity and identity != call.identity) or (
        call.passes is not None and name != call.name
    )


def _is_readable(piece: Any) -> bool:
    """Whether a piece looks as OpenAI's do: with what it says of the call in one place."""
    if not isinstance(piece, dict) or any(piece.get(key) is not None for key in ("name", *_BODIES)):
        return False
    parts = [piece[key] for key in NAMED_KINDS if piece.get(key) is not None]
    return (
        len(parts) < 2
        and all(isinstance(part, dict) and isinstance(part.get("name"), str | None) for part in parts)
        and isinstance(piece.get("id"), str | None)
    )


def _part_of(piece: JSON) -> JSON:
    return next((piece[key] for key in NAMED_KINDS if isinstance(piece.get(key), dict)), {})


def _name_in(piece: JSON) -> str:
    return _part_of(piece).get("name") or ""


def _has_body(piece: JSON) -> bool:
    return any(_part_of(piece).get(key) for key in _BODIES)


def _renamed(piece: JSON, name: str | None) -> JSON:
    """A piece with the call's name; without one for None, where it was sent before."""
    for key in NAMED_KINDS:
        if isinstance(piece.get(key), dict):
            rest = {field: value for field, value in piece[key].items() if field != "name"}
            piece[key] = rest if name is None else {"name": name, **rest}
    return piece


def _listed(pieces: Any) -> list[Any]:
    return pieces if isinstance(pieces, list) else [pieces] if pieces else []


def _put(delta: JSON, field: str, value: Any) -> None:
    if value:
        delta[field] = value
    else:
        delta.pop(field, None)


def _joined(first: JSON, second: JSON) -> JSON:
    """Logprobs or token ids of two chunks as those of one."""
    out = {**first, **second}
    for name in first.keys() & second.keys():
        left, right = first[name], second[name]
        if isinstance(left, list) and isinstance(right, list):
            out[name] = left + right
        elif isinstance(left, dict) and isinstance(right, dict):
            out[name] = _joined(left, right)
    return out
