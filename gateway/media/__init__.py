"""Links inside a request that would make somebody's server fetch an address: images, sounds, videos, files.

Without a rule, a caller could let the engine read from inside the network, or from its own disk. Data URIs carry their
content and pass; http(s) links to hosts the operator has named pass, or are fetched by the gateway; everything else is
refused before any connection is made. Which engine reads which field is in docs/media.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from gateway.errors import BadRequest, InvalidBody
from gateway.jsonplaces import Ambiguous, Way, replace, replaced, spelt
from gateway.media.fields import KNOWN_TOP, MESSAGE, PLAIN, PROMPTS, QUOTED, SCHEMAS, TEXTS, Kind, kind_of
from gateway.media.links import Target, is_data, literal, may_connect, read_link
from gateway.types import Address, Network

MOST_LINKS = 16  # of one request
_INLINE = 64  # characters from which on a text without marks of a path is taken for content in base64
_LONG_PATH = 256  # characters from which on a text that begins with / is no path: JPEG in base64 does so

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]{0,30}:[/\\]", re.IGNORECASE)
_PLACE = re.compile(r"(?:[a-z][a-z0-9+.-]{0,30}:|[/\\~.])", re.IGNORECASE)
_MARKS = (":", ".", "\\", "~", "%")  # of links and paths; base64 has none of them
_REFERENCES = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})


@dataclass(frozen=True, slots=True)
class MediaRules:
    """What links may do, compiled from the configuration."""

    hosts: frozenset[str] = frozenset()  # canonical
    networks: tuple[Network, ...] = ()  # open beside the public Internet
    fetched: bool = True  # by the gateway; else they go on to the engine
    max_size: int = 20 << 20  # bytes of one file
    timeout: float = 10.0  # seconds for one file
    max_total: int = 32 << 20  # bytes of a request with its files

    def permits(self, target: Target) -> bool:
        """Whether the host is on the list. An address as the host has to be one that may be connected to."""
        if target.host not in self.hosts:
            return False
        address = literal(target.host)
        return address is None or self.reaches(address, target)

    def reaches(self, address: Address, target: Target) -> bool:
        """Whether a connection may be made to `address` for the sake of `target`."""
        return may_connect(address, self.networks, named=target.host == str(address))


class Link(NamedTuple):
    """One link that leads to a permitted host, and its place in the request."""

    way: Way
    target: Target

    @property
    def param(self) -> str:
        return _param(self.way)


def find_links(body: Mapping[str, Any], raw: bytes, rules: MediaRules) -> list[Link]:
    """The links of a request that have to be followed. The usual request has none and costs a few look-ups.

    Raises: BadRequest naming the part, for a link that may not be followed.
    """
    found: list[Link] = []
    messages = body.get("messages")
    if isinstance(messages, list):
        for number, message in enumerate(messages):
            if isinstance(message, dict):
                content = message.get("content")
                if content.__class__ is not str or len(message) != 2 or "role" not in message:
                    _look_at_message(message, content, number, rules, found)
    if not body.keys() <= KNOWN_TOP:
        _look_beside(body, raw, rules, found)
    if len(found) > MOST_LINKS:
        raise _refusal(found[MOST_LINKS].way, f"a request may have {MOST_LINKS} links; send the others as data: URIs")
    return found


def put_in(raw: bytes, body: Mapping[str, Any], contents: Mapping[Way, str]) -> tuple[bytes, dict[str, Any]]:
    """The request with data: URIs in place of links. No other byte changes.

    Raises: InvalidBody.
    """
    try:
        changed = replace(raw, {way: b'"%b"' % link.encode() for way, link in contents.items()})
    except Ambiguous as error:
        raise InvalidBody(f"The body has two equal keys '{error}' where a link is.") from None
    document: dict[str, Any] = replaced(body, contents)
    return changed, document


def check_form(names: Iterable[str]) -> None:
    """Fields of a form, those of files left out: a link there is refused whatever it says, since a field may come
    several times and engines differ in which of them counts. Raises: BadRequest."""
    for name in names:
        if kind_of(name.partition("[")[0]) in (Kind.LINK, Kind.MEDIA):
            raise BadRequest(
                f"The field '{name[:60]}' is not taken; send the sound itself, as the file.",
                param=name[:60],
                code="unsupported_value",
            )


def _look_at_message(
    message: Mapping[str, Any], content: object, number: int, rules: MediaRules, found: list[Link]
) -> None:
    if isinstance(content, list):
        for place, part in enumerate(content):
            if isinstance(part, dict):
                if not part.keys() <= PLAIN:
                    _look(part, ("messages", number, "content", place), rules, found)
            elif isinstance(part, list):
                _look(part, ("messages", number, "content", place), rules, found, None)
    elif isinstance(content, dict):
        _look(content, ("messages", number, "content"), rules, found)
    if not message.keys() <= MESSAGE:
        for name in message.keys() - MESSAGE:
            _look({name: message[name]}, ("messages", number), rules, found)


def _look_beside(body: Mapping[str, Any], raw: bytes, rules: MediaRules, found: list[Link]) -> None:
    """All but the messages."""
    for name, value in body.items():
        if name in PROMPTS:
            if isinstance(value, list | dict) and raw.count(b"{") > 1:  # there are objects in the request
                _look(value, (name,), rules, found, None)
        elif name not in KNOWN_TOP and name not in SCHEMAS:
            _look({name: value}, (), rules, found)
    if not SCHEMAS.isdisjoint(body) and (b"$" in raw or b"\\u00" in raw):
        _check_references(body)
    if "tools" in body:
        _check_tools(body["tools"])


# --- one value and all that is in it
def _look(value: object, way: Way, rules: MediaRules, found: list[Link], kind: Kind | None = Kind.OTHER) -> None:
    """Judges every text in `value`, in order. (A stack of its own: JSON may be nested deeper than calls may, and as
    wide, so nothing is made for a value that is in order.)

    Args: kind: of a text that `value` is, or that stands in a list there; None = text that may say anything.
    """
    steps: list[str | int] = []
    levels: list[tuple[Iterator[tuple[str | int, object]], Kind | None, bool]] = [(_entries(value), kind, False)]
    while levels:
        entries, kind, inside = levels[-1]
        for step, given in entries:
            own, within = (kind_of(step), kind is Kind.LINK) if isinstance(step, str) else (kind, inside)
            if step in QUOTED or (step in TEXTS and isinstance(given, str)):
                continue
            if isinstance(given, str):
                verdict = _judge(given, own, rules)
                if verdict is not None:
                    found.append(_link((*way, *steps, step), verdict, rules))
            elif isinstance(given, dict | list):
                if own is Kind.LINK and _is_no_place(step, given, within=within):
                    raise _not_a_link((*way, *steps, step), rules)
                steps.append(step)
                levels.append((_entries(given), own, within))
                break
            elif given is not None and own is Kind.LINK:
                raise _not_a_link((*way, *steps, step), rules)
        else:
            levels.pop()
            if steps:
                steps.pop()


def _entries(value: object) -> Iterator[tuple[str | int, object]]:
    return iter(value.items()) if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ())


def _is_no_place(step: str | int, given: object, *, within: bool) -> bool:
    """Whether an object or list is where a link should be: `{"image_url": {"url": {...}}}`, `{"url": [...]}`."""
    return within if isinstance(given, dict) else isinstance(step, str) and not step.lower().endswith("s")


def _judge(text: str, kind: Kind | None, rules: MediaRules) -> Target | str | None:
    """None for what may pass, a Target for a link that may be followed, or why it may not be there; "" = no link."""
    if kind is None:
        return None
    if text[:1].isspace() and kind is not Kind.LINK:  # who reads it may take no notice of blanks
        text = text.lstrip()
    if kind is Kind.OTHER:
        return "it is not read as a link; leave it out" if _SCHEME.match(text) else None
    if is_data(text):
        return None
    if kind is Kind.CONTENT:
        if _PLACE.match(text) and not (text[:1] == "/" and len(text) >= _LONG_PATH):
            return "it has to be the content itself, in base64"
        return None
    if kind is Kind.MEDIA and _is_inline(text):
        return None
    target = read_link(text)
    return target if target is not None and rules.permits(target) and (rules.fetched or text.isascii()) else ""


def _link(way: Way, verdict: Target | str, rules: MediaRules) -> Link:
    """Raises: BadRequest."""
    if isinstance(verdict, Target):
        return Link(way, verdict)
    raise _refusal(way, verdict) if verdict else _not_a_link(way, rules)


def _is_inline(text: str) -> bool:
    """Whether a text is content in base64 and nothing that could be the name of a file."""
    if len(text) < _INLINE or any(mark in text for mark in _MARKS):
        return False
    return text[0] != "/" or len(text) >= _LONG_PATH


def _check_references(body: Mapping[str, Any]) -> None:
    """A schema that refers to another document would make some libraries fetch it. Raises: BadRequest."""
    for name in SCHEMAS & body.keys():
        for steps, step, text in _texts(body[name]):
            if step in _REFERENCES and not text.startswith("#"):
                why = "a schema may refer to itself only; write the other one into it, under $defs"
                raise _refusal((name, *steps, step), why)


def _check_tools(tools: object) -> None:
    """Tools that are no functions are servers the engine is to call. Raises: BadRequest."""
    for number, tool in enumerate(tools if isinstance(tools, list) else ()):
        if isinstance(tool, dict) and tool.get("type") != "function":
            for steps, step, text in _texts(tool):
                if _SCHEME.match(text) or (isinstance(step, str) and text and kind_of(step) is Kind.LINK):
                    why = "the engine is not to call other servers; leave the tool out"
                    raise _refusal(("tools", number, *steps, step), why)


def _texts(value: object) -> Iterator[tuple[list[str | int], str | int, str]]:
    """The texts in a value: the way to what holds each, which is good until the next one; the last step; the text."""
    steps: list[str | int] = []
    levels = [_entries(value)]
    while levels:
        for step, given in levels[-1]:
            if isinstance(given, str):
                yield steps, step, given
            elif isinstance(given, dict | list):
                steps.append(step)
                levels.append(_entries(given))
                break
        else:
            levels.pop()
            if steps:
                steps.pop()


def _param(way: Way) -> str:
    """OpenAI's clients know the part as `...image_url`, whether the link is in there or a level below."""
    shown = way[:-1] if len(way) > 1 and way[-1] == "url" and isinstance(way[-2], str) else way
    return spelt(shown)[:200]


def _refusal(way: Way, why: str) -> BadRequest:
    param = _param(way)
    return BadRequest(f"'{param}' is not supported: {why}.", param=param, code="unsupported_value")


def _not_a_link(way: Way, rules: MediaRules) -> BadRequest:
    param = _param(way)
    more = ", or an http(s) link to one of the hosts that this gateway's operator has named" if rules.hosts else ""
    return BadRequest(
        f"'{param}' has to be a data: URI{more}. Nothing is fetched from elsewhere.",
        param=param,
        code="unsupported_value",
    )
