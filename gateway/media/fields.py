"""Names of fields in requests: which hold links, media or content, and which hold text that nobody follows."""

from __future__ import annotations

import re
from enum import Enum, auto
from functools import lru_cache


class Kind(Enum):
    """What a text under a name is for."""

    LINK = auto()  # `image_url`, `url`: an address and nothing else
    MEDIA = auto()  # `image`, `ref_audio`: an address, a path or the content, depending on the engine
    CONTENT = auto()  # `data`, `voice`: never an address in engines that are known, and it has to stay so
    OTHER = auto()


_LONGEST = 64  # characters of a name that means anything to an engine

_LINK = re.compile(r".*(?:url|uri)s?|(?:.*[_-])?(?:href|link|src)s?")
_MEDIA = re.compile(
    r"(?:.*[_-])?(?:image|img|picture|photo|audio|video|media|wav|file|path|source)s?"
    r"|.*(?:image|audio|video|media|file|model|lora|adapter|tokenizer|template)_?(?:path|file|dir)s?"
    r"|(?:image|audio|video|mm|multi_?modal)_?data"
)
_CONTENT = re.compile(
    r"(?:.*[_-])?(?:data|embeds|base64|b64|b64_json|voice|chat_template|tokenizer|adapters?|draft_model)"
)

# Text in messages and their parts.
TEXTS = frozenset(
    "type role text name refusal thinking reasoning reasoning_content signature tool_call_id id format detail uuid"
    " title filename file_id media_type prefix instruction query prompt_string".split()
)
# What is quoted in messages: arguments of calls, sources of an earlier answer. No engine follows what is in there.
QUOTED = frozenset("tool_calls function_call arguments annotations citations cache_control".split())
PLAIN = TEXTS | QUOTED
MESSAGE = PLAIN | {"content"}  # of which the content is looked at by itself

# Text, or objects with text and media in them.
PROMPTS = frozenset({"input", "prompt"})

# Objects that may hold a JSON schema.
SCHEMAS = frozenset("tools functions response_format json_schema guided_json structured_outputs format".split())

# Top-level fields that cannot name an address. `messages` are looked at by themselves, all others are looked through.
KNOWN_TOP = frozenset(
    (
        # OpenAI's
        "model messages stream stream_options max_tokens max_completion_tokens temperature top_p n stop seed user"
        " tool_choice"
        " parallel_tool_calls presence_penalty frequency_penalty logit_bias logprobs top_logprobs"
        " reasoning reasoning_effort reasoning_summary verbosity metadata store echo suffix best_of encoding_format"
        " dimensions function_call modalities prediction service_tier safety_identifier prompt_cache_key"
        " prompt_cache_retention web_search_options speed instructions stream_format language timestamp_granularities"
        # texts and samplers of engines
        " query documents top_n return_documents max_tokens_per_doc truncate_prompt_tokens tokens add_special_tokens"
        " add_generation_prompt continue_final_message return_token_strs chat_template_kwargs template_vars ref_text"
        " min_tokens top_k min_p top_a tfs typical typical_p repetition_penalty rep_pen repeat_penalty repeat_last_n"
        " length_penalty early_stopping ignore_eos ban_eos_token stop_token_ids include_stop_str_in_output"
        " skip_special_tokens spaces_between_special_tokens allowed_token_ids bad_words banned_strings banned_tokens"
        " allowed_tokens guided_regex guided_choice guided_grammar guided_decoding_backend"
        " guided_whitespace_pattern grammar regex ebnf regex_pattern grammar_string"
        " dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_probability"
        " xtc_threshold mirostat mirostat_mode mirostat_tau mirostat_eta dynatemp_range dynatemp_exponent samplers"
        " n_predict n_keep n_probs cache_prompt id_slot return_tokens response_fields timings_per_token keep_alive"
        " options think cache_salt request_id rid priority include_reasoning separate_reasoning"
        " stream_reasoning thinking enable_thinking thinking_budget reasoning_budget_tokens response_prefix"
        " prompt_logprobs return_tokens_as_token_ids no_stop_trim return_hidden_states speculative"
    ).split()
)


def kind_of(name: str) -> Kind:
    """By the name alone, in whatever case: some engines read names without regard to it."""
    return _kind(name.lower()) if len(name) <= _LONGEST else Kind.OTHER


@lru_cache(maxsize=1024)
def _kind(name: str) -> Kind:
    if _LINK.fullmatch(name):
        return Kind.LINK
    if _MEDIA.fullmatch(name):
        return Kind.MEDIA
    return Kind.CONTENT if _CONTENT.fullmatch(name) else Kind.OTHER
