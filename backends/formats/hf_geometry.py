"""From config.json to the numbers that decide memory.

Sources: transformers' configuration classes for the names; vLLM's kv_cache_interface (FullAttentionSpec,
SlidingWindowSpec, MLAAttentionSpec) for what is cached.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from backends.formats import reading
from backends.formats.ggml_types import WINDOW_PATTERNS
from backends.formats.model import Geometry, LayerCache
from backends.formats.reading import MAX_LAYERS, mapping

_MAX_WIDTH = 1 << 24
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
_PATTERNS = WINDOW_PATTERNS | {"gemma3_text": 6, "gemma3n_text": 5, "gpt_oss": 2}
_ENCODERS = ("bert", "roberta", "deberta", "mpnet", "nomic_bert", "xlm", "electra", "gte")


def language_part(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's own section where a model that sees or hears wraps one; at most two levels down."""
    for _ in range(2):
        nested = next((inner for name in _NESTED if (inner := mapping(config.get(name)))), None)
        if nested is None:
            break
        config = nested
    return config


def is_encoder(model_type: object) -> bool:
    """Reads a text whole and generates none, so it keeps no KV cache."""
    return isinstance(model_type, str) and any(name in model_type for name in _ENCODERS)


def geometry_of(config: dict[str, Any]) -> Geometry:
    """`config` is the language part."""
    layers = _first(config, "num_hidden_layers", "n_layer", "num_layers", "n_layers", highest=MAX_LAYERS)
    hidden = _first(config, "hidden_size", "n_embd", "d_model")
    heads = _first(config, "num_attention_heads", "n_head", "n_heads", "num_heads")
    kv_heads = _kv_heads(config, layers, heads)
    derived = hidden // heads if hidden and heads else None
    key = _first(config, "head_dim", "head_size", "attention_head_size", "kv_channels") or derived
    value = _first(config, "v_head_dim") or key
    used = _first(config, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "num_selected_experts")
    experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    latent = _first(config, "kv_lora_rank")
    dense = _first(config, "intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim") or 4 * (hidden or 0)
    shared = _first(config, "n_shared_experts") or 0
    expert_width = _first(config, "moe_intermediate_size") or (dense if experts else 0)
    return Geometry(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=max(kv_heads) if kv_heads else None,
        key_length=key,
        value_length=value,
        latent=latent,
        window=_window(config),
        feed_forward=max(dense, ((used or 0) + shared) * expert_width) or None,
        vocabulary=_first(config, "vocab_size", "padded_vocab_size"),
        experts=experts,
        experts_used=used,
        cache=_cache(config, layers, kv_heads, key, value, latent),
        state_elements=_state(config, layers),
    )


def _cache(
    config: dict[str, Any],
    layers: int | None,
    kv_heads: tuple[int, ...] | None,
    key: int | None,
    value: int | None,
    latent: int | None,
) -> tuple[LayerCache, ...] | None:
    if is_encoder(config.get("model_type")):
        return ()
    rope = _first(config, "qk_rope_head_dim")
    if layers is None or (latent is None and (kv_heads is None or key is None or value is None)):
        return None
    window, kinds = _window(config), _kinds(config, layers)
    full_key, full_heads = _first(config, "global_head_dim"), _first(config, "num_global_key_value_heads")
    own = max(0, layers - (_first(config, "num_kv_shared_layers") or 0))
    alike: Counter[tuple[int, int | None]] = Counter()
    for index in range(own):
        reach = window if kinds[index] == "window" else None
        if latent is not None:
            elements = latent + (rope or 0)
        else:
            assert kv_heads is not None and key is not None and value is not None
            elements = kv_heads[index] * (key + value)
            if kinds[index] == "full" and window and (full_key or full_heads):
                elements = (full_heads or kv_heads[index]) * 2 * (full_key or key)
        if elements and kinds[index] != "state":
            alike[elements, reach] += 1
    return tuple(LayerCache(count, elements, reach) for (elements, reach), count in alike.items())


def _kinds(config: dict[str, Any], layers: int) -> tuple[str, ...]:
    """For each layer "full", "window" or "state" (no KV cache)."""
    listed = config.get("layer_types", config.get("layers_block_type"))
    if isinstance(listed, list) and len(listed) >= layers:
        return tuple(_kind(str(name)) for name in listed[:layers])
    hybrid = config.get("hybrid_override_pattern")  # nemotron_h: M = mamba, - = feed-forward, * = attention
    if isinstance(hybrid, str) and len(hybrid) == layers:
        return tuple("full" if letter == "*" else "state" for letter in hybrid)
    if interval := _first(config, "full_attention_interval"):
        return tuple("full" if (index + 1) % interval == 0 else "state" for index in range(layers))
    if (period := _first(config, "attn_layer_period")) is not None:
        offset = config.get("attn_layer_offset", 0)
        return tuple("full" if index % period == offset else "state" for index in range(layers))
    if _window(config) is None:
        return ("full",) * layers
    if _first(config, "max_window_layers") and "use_sliding_window" in config:  # qwen2: the first ones see everything
        first = _first(config, "max_window_layers") or 0
        return tuple("window" if index >= first else "full" for index in range(layers))
    period = _first(config, "sliding_window_pattern", "_sliding_window_pattern")
    period = period or _PATTERNS.get(str(config.get("model_type")))
    return tuple("full" if period and (index + 1) % period == 0 else "window" for index in range(layers))


def _kind(name: str) -> str:
    if "sliding" in name or "chunked" in name or "local" in name:
        return "window"
    return "full" if name in ("full_attention", "attention", "global_attention", "global", "hybrid") else "state"


def _window(config: dict[str, Any]) -> int | None:
    if config.get("use_sliding_window") is False:
        return None
    return _first(config, "sliding_window", "attention_chunk_size", "sliding_window_size")


def _kv_heads(config: dict[str, Any], layers: int | None, heads: int | None) -> tuple[int, ...] | None:
    if layers is None:
        return None
    given = config.get("num_key_value_heads", config.get("num_kv_heads", config.get("multi_query_group_num")))
    if isinstance(given, list):
        fits = len(given) >= layers and all(reading.is_count(item, _MAX_WIDTH) for item in given[:layers])
        return tuple(given[:layers]) if fits else None
    number = reading.count(given, _MAX_WIDTH)
    if number is None:  # falcon and starcoder: one for all heads, or as many as there are
        number = 1 if config.get("multi_query") is True else heads
    return (number,) * layers if number else None


def _state(config: dict[str, Any], layers: int | None) -> int:
    """f32 numbers of recurrent state per sequence: qwen3_next's gated delta net, mamba 2; 0 for others."""
    recurrent = sum(1 for kind in _kinds(config, layers) if kind == "state") if layers else 0
    value_heads, key_width = _first(config, "linear_num_value_heads"), _first(config, "linear_key_head_dim")
    value_width, key_heads = _first(config, "linear_value_head_dim"), _first(config, "linear_num_key_heads")
    if value_heads and key_width and value_width and key_heads:
        convolved = 2 * key_heads * key_width + value_heads * value_width
        taps = (_first(config, "linear_conv_kernel_dim") or 1) - 1
        return recurrent * (value_heads * key_width * value_width + taps * convolved)
    heads, width = _first(config, "mamba_n_heads", "mamba_num_heads"), _first(config, "mamba_d_head", "mamba_head_dim")
    size = _first(config, "mamba_d_state", "ssm_state_size")
    if heads and width and size:
        groups = _first(config, "mamba_n_groups", "n_groups") or 1
        taps = (_first(config, "mamba_d_conv", "conv_kernel") or 1) - 1
        return recurrent * (heads * width * size + taps * (heads * width + 2 * groups * size))
    return 0


def _first(config: dict[str, Any], *names: str, highest: int = _MAX_WIDTH) -> int | None:
    """The first of several names that holds a positive whole number."""
    return next((found for name in names if (found := reading.count(config.get(name), highest)) is not None), None)
