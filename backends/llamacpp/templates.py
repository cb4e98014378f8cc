"""Chat messages to one prompt, by the template that came with the model file.

The template is rendered in jinja2's immutable sandbox. Text of a client that spells a control token
(`<|im_start|>` and the like) must not become one, or a user could speak in another role: such spellings are
swapped for marks before rendering, and `Segment.literal` tells the tokeniser to take them as plain text.
Assistant messages are left alone, since a model's own earlier output may rightly hold such tokens.
"""

from __future__ import annotations

import datetime
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from backends.llamacpp.errors import invalid, unsupported

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the prompt. `literal`: spellings of control tokens in it are just text."""

    text: str
    literal: bool


class ChatTemplate:
    """One compiled template. Thread-safe: rendering keeps no state."""

    def __init__(self, source: str | None, bos: str, eos: str, control: Iterable[str]) -> None:
        """source: None = ChatML. bos, eos: texts of these tokens. control: texts of all control tokens."""
        self._fixed = {"bos_token": bos, "eos_token": eos, "add_generation_prompt": True}
        self._mentions_developer = source is not None and "developer" in source
        self._problem: str | None = None
        texts = sorted((text for text in control if text), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, texts))) if texts else None
        try:
            self._template = _environment().from_string(source or CHATML)
        except jinja2.TemplateError as error:
            # Another template would give wrong prompts in silence; completions still work without one.
            self._problem = f"the chat template in the model file cannot be compiled: {error}"

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> list[Segment]:
        """The prompt, ready to be tokenised piece by piece.

        messages:  as validated by protocol.py, content already plain text.
        variables: the client's `chat_template_kwargs`; they cannot replace what the engine itself provides.
        Raises:    ApiError 400 when the template refuses the messages or fails on them.
        """
        if self._problem is not None:
            raise unsupported("messages", self._problem)
        nonce, marks = secrets.token_hex(8), []

        def hide(match: re.Match[str]) -> str:
            marks.append(match.group())
            return f"\ue000{nonce}:{len(marks) - 1}\ue001"

        shown = [self._prepare(message, hide) for message in messages]
        try:
            prompt = self._template.render({**variables, "messages": shown, **self._fixed})
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            raise invalid(f"the model's chat template cannot render these messages: {error}", "messages") from None
        return _segments(prompt, nonce, marks)

    def _prepare(self, message: Mapping[str, Any], hide: Any) -> dict[str, Any]:
        prepared = dict(message)
        if prepared["role"] == "developer" and not self._mentions_developer:
            prepared["role"] = "system"  # OpenAI's newer name for the same thing, unknown to most templates
        if self._control is not None and prepared["role"] != "assistant":
            prepared["content"] = self._control.sub(hide, prepared["content"])
            if isinstance(name := prepared.get("name"), str):
                prepared["name"] = self._control.sub(hide, name)
        return prepared


def _segments(prompt: str, nonce: str, marks: Sequence[str]) -> list[Segment]:
    if not marks:
        return [Segment(prompt, literal=False)]
    # re.split with one group: even items are the template's text, odd ones the numbers of the marks.
    parts = re.split(f"\ue000{nonce}:(\\d+)\ue001", prompt)
    pieces = [Segment(marks[int(part)] if i % 2 else part, literal=i % 2 == 1) for i, part in enumerate(parts)]
    return [piece for piece in pieces if piece.text]


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    """jinja2's own filter escapes for HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
