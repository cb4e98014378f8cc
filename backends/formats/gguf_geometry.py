"""From GGUF keys to the numbers that decide memory, the way llama.cpp reads them.

Sources: llama.cpp src/llama-hparams.cpp (n_embd_k_gqa, n_embd_r, n_embd_s, set_swa_pattern), llama-kv-cache.cpp (no V
cache with latent attention), checked against its logs: docs/formats.md.
"""

from __future__ import annotations

from collections import Counter

from backends.formats import reading
from backends.formats.ggml_types import WINDOW_PATTERNS
from backends.formats.gguf_header import Value
from backends.formats.model import Geometry, LayerCache
from backends.formats.reading import MAX_LAYERS

_MAX_WIDTH = 1 << 24  # heads, head sizes, widths of layers


class Fields:
    """The keys of one architecture, read by what follows its name; anything implausible counts as not given."""

    def __init__(self, pairs: dict[str, Value], architecture: str) -> None:
        self._pairs = pairs
        self.architecture = architecture

    def get(self, key: str) -> Value | None:
        return self._pairs.get(f"{self.architecture}.{key}")

    def count(self, key: str, highest: int = reading.MAX_COUNT) -> int | None:
        return reading.count(self.get(key), highest)

    def width(self, key: str) -> int | None:
        return self.count(key, _MAX_WIDTH)

    def per_layer(self, key: str, layers: int) -> tuple[int, ...] | None:
        """One number for each layer, given as an array or once for all; 0 is a value here."""
        value = self.get(key)
        if isinstance(value, tuple):
            fits = len(value) >= layers and all(isinstance(item, int) and 0 <= item <= _MAX_WIDTH for item in value)
            return tuple(int(item) for item in value[:layers]) if fits else None
        return (value,) * layers if isinstance(value, int) and 0 <= value <= _MAX_WIDTH else None


def geometry_of(fields: Fields, vocabulary: int | None) -> Geometry:
    blocks = fields.count("block_count", MAX_LAYERS)
    # Layers for predicting several tokens at once hold weights, but llama.cpp gives them no cache.
    layers = max(0, blocks - (fields.count("nextn_predict_layers", MAX_LAYERS) or 0)) if blocks else None
    hidden = fields.width("embedding_length")
    heads = fields.per_layer("attention.head_count", layers) if layers else None
    kv_heads = (fields.per_layer("attention.head_count_kv", layers) or heads) if layers else None
    head = hidden // max(heads) if hidden and heads and max(heads) else None
    key, value = fields.width("attention.key_length") or head, fields.width("attention.value_length") or head
    used, expert_width = fields.width("expert_used_count") or 0, fields.width("expert_feed_forward_length") or 0
    dense = fields.per_layer("feed_forward_length", layers) if layers else None
    shared = fields.width("expert_shared_count") or 0
    return Geometry(
        layers=blocks,
        hidden=hidden,
        heads=max(heads) if heads else None,
        kv_heads=max(kv_heads) if kv_heads else None,
        key_length=key,
        value_length=value,
        latent=fields.width("attention.kv_lora_rank"),
        window=fields.count("attention.sliding_window"),
        feed_forward=max(max(dense, default=0) if dense else 0, (used + shared) * expert_width) or None,
        vocabulary=fields.count("vocab_size") or reading.count(vocabulary),
        experts=fields.count("expert_count"),
        experts_used=fields.count("expert_used_count"),
        cache=_cache(fields, layers, kv_heads, key, value) if layers else None,
        state_elements=_state(fields, layers, hidden, kv_heads) if layers else 0,
    )


def _cache(
    fields: Fields, layers: int, kv_heads: tuple[int, ...] | None, key: int | None, value: int | None
) -> tuple[LayerCache, ...] | None:
    if fields.get("attention.causal") is False:
        return ()  # an encoder sees the whole input at once and keeps nothing
    if kv_heads is None or not any(kv_heads):
        return () if _has_state(fields) else None
    if key is None or value is None:
        return None
    if fields.get("attention.key_length_mla") is not None:
        value = 0  # keys hold the latent vector, and values are read from it
    window = fields.count("attention.sliding_window")
    windowed = _windowed(fields, layers) if window else (False,) * layers
    swa_key = fields.width("attention.key_length_swa") or key
    swa_value = fields.width("attention.value_length_swa") or value
    own = layers - (fields.count("attention.shared_kv_layers", layers) or 0)
    alike: Counter[tuple[int, int | None]] = Counter()
    for index in range(own):
        elements = kv_heads[index] * (swa_key + swa_value if windowed[index] else key + value)
        if elements and _attends(fields, index):
            alike[elements, window if windowed[index] else None] += 1
    return tuple(LayerCache(count, elements, reach) for (elements, reach), count in alike.items())


def _windowed(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Which layers look back only a window. A period n means that every n-th layer sees everything."""
    pattern = fields.get("attention.sliding_window_pattern")
    if isinstance(pattern, tuple) and pattern:
        return tuple(bool(pattern[index % len(pattern)]) for index in range(layers))
    known = WINDOW_PATTERNS.get(fields.architecture)
    period = pattern if isinstance(pattern, int) and not isinstance(pattern, bool) else known
    if period is None:  # llama.cpp ignores the window of an architecture that it knows no pattern for
        return (False,) * layers
    return tuple(period <= 0 or index % period < period - 1 for index in range(layers))


def _attends(fields: Fields, index: int) -> bool:
    """False for the recurrent layers of a hybrid model."""
    recurrent = fields.get("attention.recurrent_layers")
    if isinstance(recurrent, tuple) and index < len(recurrent):
        return not recurrent[index]
    interval = fields.count("full_attention_interval")
    return interval is None or (index + 1) % interval == 0


def _has_state(fields: Fields) -> bool:
    return any(fields.get(key) is not None for key in ("ssm.inner_size", "wkv.head_size", "shortconv.l_cache"))


def _state(fields: Fields, layers: int, hidden: int | None, kv_heads: tuple[int, ...] | None) -> int:
    """f32 numbers that recurrent layers keep for one sequence, however long it is."""
    attention = sum(1 for index in range(layers) if kv_heads and kv_heads[index] and _attends(fields, index))
    recurrent = layers - attention or layers  # where every layer attends, as in falcon-h1, every layer has a state too
    inner, state = fields.width("ssm.inner_size"), fields.width("ssm.state_size")
    if inner and state:
        convolved = inner + 2 * (fields.width("ssm.group_count") or 0) * state
        return recurrent * (((fields.width("ssm.conv_kernel") or 1) - 1) * convolved + state * inner)
    if hidden and (head := fields.width("wkv.head_size")):
        return layers * hidden * (head + 2)
    if hidden and (taps := fields.width("shortconv.l_cache")):
        return recurrent * hidden * (taps - 1)
    return 0
