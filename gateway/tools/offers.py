"""Chat requests held against a tenant's tool policy: which tools they offer to the model, wherever they do it.

What goes on to the engine is what was checked here: a request in which an object has two equal keys, of which another
parser may take the other, is written anew.
"""

from __future__ import annotations

from typing import Any

import orjson

from gateway import jsonscan
from gateway.call import Call
from gateway.errors import BadRequest, ToolNotAllowed
from gateway.tools import LONGEST_NAME, NAMED_KINDS, allows, allows_type, kind_of
from gateway.types import ToolPolicy

JSON = dict[str, Any]

MOST_TOOLS = 1024  # in one list
_LISTS = ("tools", "functions")
_CHOICES = {"tools": "tool_choice", "functions": "function_call"}
_SEARCH = "web_search_options"  # offers OpenAI's web search without an entry in `tools`
_VARIABLES = ("chat_template_kwargs", "template_vars")  # of chat templates: vLLM lets them replace the tools
_FIELDS = frozenset({*_LISTS, *_CHOICES.values(), _SEARCH, *_VARIABLES, "messages"})
_MODES = ("none", "auto", "required", "any")
_FORCING = ("required", "any")
_PLAIN = frozenset({"type", "name", *NAMED_KINDS})
_SHOWN = 64  # characters of a name in an error


def admit(call: Call, policy: ToolPolicy) -> None:
    """Holds a request against the policy, and its answer later on: `call.tools`.

    Takes out what is not allowed, where the policy says so; `call.withheld` counts it.
    Raises: ToolNotAllowed; BadRequest for offers that cannot be read.
    """
    call.tools = policy
    _refuse_other_spellings(call.body, _FIELDS, "")
    if _FIELDS.isdisjoint(call.body):
        return
    review = _Review(call.body, policy)
    review.run()
    call.withheld = review.withheld
    changes = review.changes
    once = _says_all_once(call.raw, call.body)
    if not once:
        changes.setdefault("messages", call.body["messages"])  # they were looked at too
    if review.altered or not once:
        raw = jsonscan.splice(
            call.raw, {name: None if value is None else orjson.dumps(value) for name, value in changes.items()}
        )
        call.replace(raw, {name: value for name, value in (call.body | changes).items() if name not in review.removed})


class _Review:
    """One request. `changes`: what its fields become, None for those that go, which are in `removed`.

    `altered`: whether that is anything new.
    """

    def __init__(self, body: JSON, policy: ToolPolicy) -> None:
        self._body, self._policy = body, policy
        self.changes: dict[str, Any] = {}
        self.removed: set[str] = set()
        self.withheld = 0
        self.altered = False

    def run(self) -> None:
        for name in _LISTS:
            emptied = self._offers(name)
            self._choice(_CHOICES[name], emptied=emptied)
            if emptied:
                self._remove(name, _CHOICES[name], *(["parallel_tool_calls"] if name == "tools" else []))
        if self._body.get(_SEARCH) is not None:
            if not allows(self._policy, "web_search", []):
                self._withhold(_SEARCH, "web_search", [])
                self._remove(_SEARCH)
        for name in _VARIABLES:
            self._variables(name)
        self._messages()

    def _remove(self, *names: str) -> None:
        for name in names:
            if name in self._body:
                self.changes[name] = None
                self.removed.add(name)

    def _withhold(self, param: str, kind: str, names: list[str]) -> None:
        """Counts something that is taken out. Raises: ToolNotAllowed where the policy is to refuse."""
        if not self._policy.strip:
            raise _forbidden(self._policy, param, kind, names)
        self._take_out()

    def _take_out(self) -> None:
        self.withheld += 1
        self.altered = True

    # --- offers
    def _offers(self, field: str) -> bool:
        """Whether nothing is left of a list that had tools in it."""
        given = self._body.get(field)
        if given is None:
            return False
        kept = self._kept(given, field, legacy=field == "functions")
        self.changes[field] = kept
        return bool(given) and not kept

    def _kept(self, given: object, param: str, *, legacy: bool) -> list[JSON]:
        if not isinstance(given, list):
            raise BadRequest(f"'{param}' has to be an array of tools.", param=param, code="invalid_type")
        if len(given) > MOST_TOOLS:
            raise BadRequest(f"'{param}' has more than {MOST_TOOLS} tools.", param=param, code="invalid_value")
        kept, seen = [], set[str]()
        for place, tool in enumerate(given):
            where = f"{param}[{place}]"
            kind, names = _identified({"function": tool} if legacy else tool, where)
            if not seen.isdisjoint(names):
                raise BadRequest(
                    f"'{where}' has the name of another tool in the list: give each a name of its own.",
                    param=where, code="invalid_value",
                )  # fmt: skip
            seen.update(names)
            if allows(self._policy, kind, names):
                kept.append(tool)
            else:
                self._withhold(where, kind, names)
        return kept

    def _messages(self) -> None:
        """Some engines take tools from a message of the system or the developer. Calls of earlier turns are history."""
        messages = self._body["messages"]
        changed = {}
        for place, message in enumerate(messages):
            offered = [name for name in _LISTS if message.get(name)]
            if offered:
                told = {name: value for name, value in message.items() if name not in offered}
                for name in offered:
                    if kept := self._kept(message[name], f"messages[{place}].{name}", legacy=name == "functions"):
                        told[name] = kept
                changed[place] = told
        if changed:
            self.changes["messages"] = [changed.get(place, message) for place, message in enumerate(messages)]

    def _variables(self, field: str) -> None:
        """A template's variables may stand for tools under any name, and what they hold only the template knows."""
        given = self._body.get(field)
        if not isinstance(given, dict):
            return
        kept = {}
        for name, value in given.items():
            if _may_offer(name, value):
                if not self._policy.strip:
                    param = f"{field}.{name[:_SHOWN]}"
                    raise ToolNotAllowed(f"'{param}' could offer tools that this tenant may not use. Leave it out, and "
                                         "write the tools into 'tools'.", param=param)  # fmt: skip
                self._take_out()
            else:
                kept[name] = value
        self.changes[field] = kept

    # --- choices
    def _choice(self, field: str, *, emptied: bool) -> None:
        """Raises: ToolNotAllowed, whatever the policy does otherwise, for a choice that cannot be honoured."""
        choice = self._body.get(field)
        if choice is None:
            return
        self.changes[field] = choice
        if isinstance(choice, dict) and choice.get("type") in _MODES and "name" not in choice:
            choice = choice["type"]
        if choice in _MODES:
            if emptied and choice in _FORCING:
                raise ToolNotAllowed(
                    f"'{field}' demands a tool, and none of those in the request may be used by this tenant.",
                    param=field,
                )
        elif isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            self._allowed_tools(field, choice)
        else:
            self._named_choice(field, choice)

    def _named_choice(self, field: str, choice: object) -> None:
        if isinstance(choice, str) or (field == "function_call" and isinstance(choice, dict)):
            named = {"name": choice} if isinstance(choice, str) else choice
            kind, names = _identified({"function": named}, field)
        else:
            kind, names = _identified(choice, field)
        if not allows(self._policy, kind, names):
            raise _forbidden(self._policy, field, kind, names)

    def _allowed_tools(self, field: str, choice: JSON) -> None:
        """A choice among some of the tools. OpenAI nests it in chat requests, and does not elsewhere."""
        nested = isinstance(choice.get("allowed_tools"), dict)
        subset = choice["allowed_tools"] if nested else choice
        _refuse_other_spellings(subset, frozenset({"tools", "mode"}), field)
        given, withheld = subset.get("tools"), self.withheld
        kept = self._kept(given, f"{field}.allowed_tools.tools" if nested else f"{field}.tools", legacy=False)
        self.withheld = withheld  # a choice is no offer
        if given and not kept:
            if subset.get("mode") in _FORCING:
                raise ToolNotAllowed(f"'{field}' demands one of some tools, and this tenant may use none of them.",
                                     param=field)  # fmt: skip
            self.changes[field] = "none"
        else:
            chosen = {**subset, "tools": kept}
            self.changes[field] = {**choice, "allowed_tools": chosen} if nested else chosen


def _says_all_once(raw: bytes, body: JSON) -> bool:
    """Whether no object has two equal keys: the parser would have dropped one, and its quotation marks with it."""
    return b"\\u0022" not in raw and raw.count(b'"') == orjson.dumps(body).count(b'"')


def _identified(tool: object, param: str) -> tuple[str, list[str]]:
    """Type and all names of a tool. Raises: BadRequest when it cannot be told what an engine would take them for."""
    if not isinstance(tool, dict):
        raise BadRequest(f"'{param}' has to be an object.", param=param, code="invalid_type")
    _refuse_other_spellings(tool, _PLAIN, param)
    kind = kind_of(tool)
    if not isinstance(kind, str) or not 0 < len(kind) <= LONGEST_NAME:
        raise BadRequest(f"'{param}.type' has to be the type of a tool.", param=f"{param}.type", code="invalid_type")
    names = []
    for part in dict.fromkeys((*NAMED_KINDS, kind)):
        inner = tool.get(part)
        if isinstance(inner, dict):
            _refuse_other_spellings(inner, _PLAIN, param)
            if part in NAMED_KINDS or "name" in inner:
                names.append(_name(inner.get("name"), param))
        elif inner is not None and part in NAMED_KINDS:
            raise BadRequest(f"'{param}.{part}' has to be an object.", param=f"{param}.{part}", code="invalid_type")
    if "name" in tool:
        names.append(_name(tool["name"], param))
    if not names and kind in NAMED_KINDS:
        names.append(_name(None, param))
    return kind, names


def _name(given: object, param: str) -> str:
    if not isinstance(given, str) or not 0 < len(given) <= LONGEST_NAME:
        raise BadRequest(
            f"'{param}' needs a name: a string of 1 to {LONGEST_NAME} characters.", param=param, code="invalid_value"
        )
    return given


def _refuse_other_spellings(given: JSON, names: frozenset[str], param: str) -> None:
    """Engines written in Go read `Tools` as `tools`, and the last of all spellings counts. Raises: BadRequest."""
    for name in given:
        if name not in names and name.casefold() in names:
            where = f"{param}.{name}" if param else name
            raise BadRequest(
                f"'{where}' is another spelling of '{name.casefold()}': write it in lower case, and once.",
                param=where, code="unknown_parameter",
            )  # fmt: skip


def _may_offer(name: str, value: object) -> bool:
    """Whether a variable of a template could hold tools. Switches such as `tools_in_user_message` cannot."""
    folded = name.casefold()
    return ("tool" in folded or "function" in folded) and bool(value) and not isinstance(value, bool | int | float)


def _forbidden(policy: ToolPolicy, param: str, kind: str, names: list[str]) -> ToolNotAllowed:
    if not allows_type(policy, kind):
        what = f"Tools of the type '{kind[:_SHOWN]}' are"
    else:
        wrong = next((name for name in names if not allows(policy, kind, [name])), kind)
        what = f"The tool '{wrong[:_SHOWN]}' is"
    return ToolNotAllowed(
        f"{what} not allowed for this tenant. Leave it out of the request, or ask an administrator to allow it.",
        param=param,
    )
