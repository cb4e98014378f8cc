"""OpenAI request bodies to typed values. Pure; the only place that knows which fields exist.

Three groups of fields: those read below; REFUSED, which would change the answer and cannot be honoured here, so a
request that uses one gets a 400 naming it; and everything else, which has no effect. IGNORED lists the fields of
OpenAI and of other engines that are known to be in the last group; names nobody knows are ignored like them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from backends.llamacpp.errors import ApiError, invalid, unsupported
from backends.llamacpp.fields import Fields, is_tokens, wrong_type

MAX_CHOICES = 8
MAX_INPUTS = 2048
MAX_STOPS = 16

IGNORED = frozenset(
    {
        "include_reasoning", "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention",
        "reasoning", "reasoning_effort", "safety_identifier", "service_tier", "store", "user", "verbosity",
    }
)  # fmt: skip

# field -> values, besides null, that ask for nothing and are let through
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "audio": (), "best_of": (1,), "chat_template": (), "continue_final_message": (False,), "documents": ([],),
    "echo": (False,), "function_call": ("none", "auto"), "functions": ([],), "grammar": ("",), "guided_choice": (),
    "guided_grammar": (), "guided_json": (), "guided_regex": (), "json_schema": (), "length_penalty": (1, 1.0),
    "logits_processors": ([],), "logprobs": (False,), "min_tokens": (0,), "modalities": (["text"],),
    "prediction": (), "prompt_logprobs": (0,), "stop_token_ids": ([],), "structured_outputs": (), "suffix": ("",),
    "tool_choice": ("none", "auto"), "tools": ([],), "top_logprobs": (0,), "use_beam_search": (False,),
    "web_search_options": (),
}  # fmt: skip

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
Prompt: TypeAlias = "str | tuple[int, ...]"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. Defaults are OpenAI's, except min_p: quantised weights are noisy in the tail.

    Keys `general.sampling.*` of the model file replace these defaults, the request replaces both.
    """

    temperature: float = 1.0  # 0 = always the likeliest token
    top_p: float = 1.0
    top_k: int = 0  # 0 = all
    min_p: float = 0.05  # share of the likeliest token's probability; 0 = off
    seed: int | None = None  # choice k of a request uses seed + k
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_penalty: float = 1.0  # counts the prompt too, as other engines do
    logit_bias: tuple[tuple[int, float], ...] = ()
    ignore_eos: bool = False
    schema: Any = None  # JSON schema the text must satisfy; None = free text


@dataclass(frozen=True, slots=True)
class Wanted:
    """What chat and completions have in common."""

    sampling: Sampling
    stops: tuple[str, ...]
    max_tokens: int | None  # None = the rest of the context
    n: int
    stream: bool
    include_usage: bool


@dataclass(frozen=True, slots=True)
class Chat:
    """POST /v1/chat/completions."""

    messages: tuple[Mapping[str, Any], ...]  # content is a plain string
    variables: Mapping[str, Any]  # chat_template_kwargs
    wanted: Wanted


@dataclass(frozen=True, slots=True)
class Completion:
    """POST /v1/completions."""

    prompts: tuple[Prompt, ...]
    wanted: Wanted


@dataclass(frozen=True, slots=True)
class Embeddings:
    """POST /v1/embeddings."""

    inputs: tuple[Prompt, ...]
    base64: bool
    dimensions: int | None


def parse_chat(body: Any, served_name: str, defaults: Sampling) -> Chat:
    """Raises: ApiError 400 or 404 with the field at fault."""
    fields = _open(body, served_name)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("'messages' must be a non-empty list.", "messages")
    return Chat(
        tuple(_message(message, i) for i, message in enumerate(messages)),
        fields.mapping("chat_template_kwargs"),
        _wanted(fields, defaults),
    )


def parse_completion(body: Any, served_name: str, defaults: Sampling) -> Completion:
    """Raises: ApiError 400 or 404 with the field at fault."""
    fields = _open(body, served_name)
    return Completion(parse_prompts(fields.get("prompt"), "prompt"), _wanted(fields, defaults))


def parse_embeddings(body: Any, served_name: str) -> Embeddings:
    """Raises: ApiError 400 or 404 with the field at fault."""
    fields = _open(body, served_name)
    encoding = fields.get("encoding_format")
    if encoding not in (None, "float", "base64"):
        raise invalid("'encoding_format' must be 'float' or 'base64'.", "encoding_format")
    return Embeddings(
        parse_prompts(fields.get("input"), "input"), encoding == "base64", fields.integer("dimensions", 1)
    )


def parse_prompts(value: Any, name: str) -> tuple[Prompt, ...]:
    """A string, token ids, or a list of either."""
    if isinstance(value, str):
        prompts: tuple[Prompt, ...] = (value,)
    elif is_tokens(value):
        prompts = (tuple(value),)
    elif isinstance(value, list) and value and all(isinstance(item, str) or is_tokens(item) for item in value):
        prompts = tuple(item if isinstance(item, str) else tuple(item) for item in value)
    else:
        raise wrong_type(name, "a non-empty string, list of strings, list of token ids or list of such lists")
    if len(prompts) > MAX_INPUTS:
        raise invalid(f"{name!r} may hold at most {MAX_INPUTS} items, got {len(prompts)}.", name)
    return prompts


def _open(body: Any, served_name: str) -> Fields:
    fields = Fields(body)
    if fields.text("model") not in (None, served_name):
        raise ApiError(404, f"The model {fields.get('model')!r} does not exist.", param="model", code="model_not_found")
    for name, harmless in REFUSED.items():
        value = fields.get(name)
        if value is None or any(value == item and type(value) is type(item) for item in harmless):
            continue
        raise unsupported(name)
    return fields


def _wanted(fields: Fields, defaults: Sampling) -> Wanted:
    limit, older = fields.integer("max_completion_tokens", 1), fields.integer("max_tokens", 1)
    return Wanted(
        sampling=_sampling(fields, defaults),
        stops=_stops(fields.get("stop")),
        max_tokens=older if limit is None else limit,
        n=fields.integer("n", 1, MAX_CHOICES) or 1,
        stream=fields.boolean("stream"),
        include_usage=Fields(fields.mapping("stream_options")).boolean("include_usage"),
    )


def _sampling(fields: Fields, defaults: Sampling) -> Sampling:
    top_k = fields.integer("top_k", -1)
    repeat = "repeat_penalty" if fields.get("repeat_penalty") is not None else "repetition_penalty"
    return dataclasses.replace(
        defaults,
        temperature=fields.number("temperature", defaults.temperature, 0, 2),
        top_p=fields.number("top_p", defaults.top_p, 0, 1),
        top_k=defaults.top_k if top_k is None else max(top_k, 0),
        min_p=fields.number("min_p", defaults.min_p, 0, 1),
        seed=fields.integer("seed", -(1 << 63), (1 << 63) - 1),
        presence_penalty=fields.number("presence_penalty", 0, -2, 2),
        frequency_penalty=fields.number("frequency_penalty", 0, -2, 2),
        repeat_penalty=fields.number(repeat, defaults.repeat_penalty, 0.01, 10),
        logit_bias=_logit_bias(fields.mapping("logit_bias")),
        ignore_eos=fields.boolean("ignore_eos"),
        schema=_schema(fields.mapping("response_format")),
    )


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise wrong_type("stop", "a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise invalid(f"'stop' may hold at most {MAX_STOPS} strings, got {len(stops)}.", "stop")
    return tuple(stop for stop in stops if stop)


def _logit_bias(given: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    biases = Fields(given)
    try:
        return tuple((int(token), biases.number(token, 0.0, -100, 100)) for token in given)
    except (ValueError, ApiError):
        raise invalid("'logit_bias' must map token ids to numbers between -100 and 100.", "logit_bias") from None


def _schema(given: Mapping[str, Any]) -> Any:
    kind = given.get("type")
    if not given or kind == "text":
        return None
    if kind == "json_object":
        return given.get("schema") or {"type": "object"}
    if kind != "json_schema":
        raise invalid("'response_format.type' must be text, json_object or json_schema.", "response_format")
    wrapper = given.get("json_schema")
    schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
    if not isinstance(schema, dict):
        raise invalid("'response_format.json_schema.schema' must be an object.", "response_format")
    return schema


def _message(message: Any, i: int) -> Mapping[str, Any]:
    at = f"messages[{i}]"
    if not isinstance(message, dict):
        raise wrong_type(at, "an object")
    if not isinstance(role := message.get("role"), str) or role not in ROLES:
        raise invalid(f"'{at}.role' must be one of {', '.join(sorted(ROLES))}.", f"{at}.role")
    return {**message, "content": _content(message.get("content"), f"{at}.content")}


def _content(content: Any, at: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise wrong_type(at, "a string or a list of parts")
    return "".join(_part(part, f"{at}[{j}]") for j, part in enumerate(content))


def _part(part: Any, at: str) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise wrong_type(at, "an object with a 'type'")
    kind = "text" if part["type"] in ("text", "input_text", "output_text") else part["type"]
    if kind == "refusal":
        kind, part = "text", {"text": part.get("refusal")}
    if kind != "text":
        raise unsupported(at, f"'{at}': content of type {kind!r} is not supported, this model reads text only")
    if not isinstance(part.get("text"), str):
        raise wrong_type(f"{at}.text", "a string")
    return str(part["text"])
