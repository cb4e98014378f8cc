"""Sampler chains: llama.cpp's own samplers, built once for each choice, so that a token costs one call from Python."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from backends.llamacpp.errors import ApiError, invalid
from backends.llamacpp.native import Model
from backends.llamacpp.protocol import Sampling

_RANDOM = 0xFFFFFFFF  # LLAMA_DEFAULT_SEED: seeded by the system
_MAX_SCHEMA = 65536  # bytes of JSON; compiling grows faster than the schema
_SHORTHAND = re.compile(r"\\[bBdDsSwW]")  # escapes the grammar language does not know
_REPEAT = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_MAX_REPEAT = 1000  # the converter writes repetitions out
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems")
# The converter writes characters beyond U+FFFF as JSON does, in two halves; to llama.cpp these are two characters.
_HALVES = re.compile(r"(?<!\\)((?:\\\\)*)\\u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})", re.IGNORECASE)
# The converter lets control characters stand bare inside strings, which is not JSON.
_LOOSE_CHAR, _JSON_CHAR = 'char ::= [^"\\\\] |', 'char ::= [^"\\\\\\x7F\\x00-\\x1F] |'


def compile_schema(schema: Any) -> str:
    """A JSON schema as a GBNF grammar. Slow for large schemas: not on the event loop.

    Raises: ApiError 400 for schemas outside the supported subset.
    """
    text = json.dumps(schema, ensure_ascii=False)
    if len(text) > _MAX_SCHEMA:
        raise invalid(f"The JSON schema is larger than {_MAX_SCHEMA} characters.", "response_format")
    return _compile(text)


@lru_cache(maxsize=64)
def _compile(text: str) -> str:
    from llama_cpp.llama_grammar import json_schema_to_gbnf

    try:
        _check(json.loads(text))
        grammar: str = json_schema_to_gbnf(text)
    except ApiError:
        raise
    except Exception as error:  # the converter asserts; what it raises is not documented
        raise _refused(str(error) or type(error).__name__) from None
    return _HALVES.sub(_joined, grammar.replace(_LOOSE_CHAR, _JSON_CHAR))


def _joined(halves: re.Match[str]) -> str:
    high, low = int(halves[2], 16), int(halves[3], 16)
    return f"{halves[1]}\\U{0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00):08X}"


def _check(schema: Any) -> None:
    """Refuse what would grow without bounds, or what llama.cpp would only complain about on stderr."""
    if isinstance(schema, list):
        for item in schema:
            _check(item)
    if not isinstance(schema, dict):
        return
    for name, value in schema.items():
        if name == "pattern" and isinstance(value, str):
            _check_pattern(value)
        elif name in _COUNTS and isinstance(value, int) and value > _MAX_REPEAT:
            raise _refused(f"{name} may be {_MAX_REPEAT} at most")
        elif name in ("enum", "anyOf", "oneOf") and value == []:
            raise _refused(f"{name} must not be empty")
        else:
            _check(value)


def _check_pattern(pattern: str) -> None:
    if shorthand := _SHORTHAND.search(pattern):
        raise _refused(f"patterns may not use {shorthand.group()}; write a class such as [0-9]")
    counts = (max(int(low), int(high or 0), 1) for low, high in _REPEAT.findall(pattern))
    if math.prod(counts) > _MAX_REPEAT:  # they multiply when nested
        raise _refused(f"the repetitions in a pattern may come to {_MAX_REPEAT} at most")


def _refused(why: str) -> ApiError:
    message = f"The JSON schema in 'response_format' is not supported: {why[:300]}"
    return invalid(message, "response_format", "unsupported_value")


def build_grammar(model: Model, grammar: str) -> Any:
    """A sampler for a GBNF text; free it with `llama_sampler_free`. Raises: ApiError 400 when llama.cpp refuses it."""
    sampler = model.lib.llama_sampler_init_grammar(model.vocab, grammar.encode(), b"root")
    if not sampler:
        raise _refused("llama.cpp cannot use the grammar made of it; it may repeat too often or be recursive")
    return sampler


def build_chain(model: Model, sampling: Sampling, prompt: Sequence[int], window: int) -> Any:
    """A sampler chain; free it with `llama_sampler_free`.

    prompt: token ids, which `repeat_penalty` looks at too. window: tokens that penalties look back on.
    Raises: ApiError 400 for token ids the vocabulary does not have.
    """
    lib = model.lib
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    try:
        for link in _links(model, sampling, prompt, window):
            lib.llama_sampler_chain_add(chain, link)  # the chain owns it from here
    except BaseException:
        lib.llama_sampler_free(chain)
        raise
    return chain


def _links(model: Model, s: Sampling, prompt: Sequence[int], window: int) -> Iterator[Any]:
    lib = model.lib
    if s.logit_bias or s.ignore_eos:
        yield _bias(model, s)
    if s.repeat_penalty != 1:
        link = lib.llama_sampler_init_penalties(model.n_vocab, window, s.repeat_penalty, 0.0, 0.0)
        for token in prompt[-window:]:
            lib.llama_sampler_accept(link, token)
        yield link
    if s.presence_penalty or s.frequency_penalty:
        penalties = (1.0, s.frequency_penalty, s.presence_penalty)
        yield lib.llama_sampler_init_penalties(model.n_vocab, window, *penalties)
    if s.temperature == 0:
        yield lib.llama_sampler_init_greedy()
        return
    if s.top_k:
        yield lib.llama_sampler_init_top_k(s.top_k)
    if s.min_p:
        yield lib.llama_sampler_init_min_p(s.min_p, 1)
    if s.top_p < 1:
        yield lib.llama_sampler_init_top_p(s.top_p, 1)
    yield lib.llama_sampler_init_temp(s.temperature)
    yield lib.llama_sampler_init_dist(_RANDOM if s.seed is None else s.seed % _RANDOM)


def _bias(model: Model, s: Sampling) -> Any:
    biases = dict(s.logit_bias)
    if any(not 0 <= token < model.n_vocab for token in biases):
        raise invalid(f"'logit_bias' names a token outside the vocabulary of {model.n_vocab}.", "logit_bias")
    if s.ignore_eos:
        biases.update(dict.fromkeys(model.end_tokens(), float("-inf")))
    array = (model.lib.llama_logit_bias * len(biases))()
    for slot, (token, bias) in zip(array, biases.items(), strict=True):
        slot.token, slot.bias = token, bias
    return model.lib.llama_sampler_init_logit_bias(model.n_vocab, len(biases), array)
