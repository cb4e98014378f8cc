"""How much memory a model takes, from its own numbers: weights + KV cache + recurrent state + compute buffers.

Every formula names its source; docs/formats.md compares the sums with what engines report.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from backends.base import ModelFormat
from backends.formats.model import Geometry, ModelFile, Role

DEFAULT_CONTEXT = 8192  # tokens, where the model allows as many

_GGUF_BATCH = 512  # tokens: llama.cpp's default n_ubatch
_GGUF_BLOCK = 256  # tokens: llama.cpp pads a sequence's cache to this
_PAGED_BATCH = 2048  # tokens: vLLM's and SGLang's usual prefill chunk
_PAGED_BLOCK = 16  # tokens: vLLM's block on GPUs
_PAGED_LOGIT_ROWS = 256  # vLLM profiles with max_num_seqs rows of logits


class KvType(Enum):
    """Bytes that one number of the KV cache takes. Sources: ggml's blocks (34 bytes for 32 numbers), IEEE sizes."""

    F32 = 4.0
    F16 = 2.0  # bf16 too
    FP8 = 1.0
    Q8_0 = 34 / 32
    Q4_0 = 18 / 32


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes. None = the headers do not say enough, which is never the same as zero."""

    context: int | None  # tokens of each sequence
    sequences: int
    weights: int | None
    kv_cache: int | None
    state: int
    compute: int | None

    @property
    def total(self) -> int | None:
        if self.weights is None or self.kv_cache is None or self.compute is None:
            return None
        return self.weights + self.kv_cache + self.state + self.compute


def estimate(
    model: ModelFile, *, context: int | None = None, sequences: int = 1, kv: KvType = KvType.F16
) -> Estimate | None:
    """Memory for `sequences` requests of `context` tokens each at the same time.

    Args:    context: tokens; None takes the model's own length, at most DEFAULT_CONTEXT. kv: type of the KV cache.
    Returns: None for what is not served by itself: adapters, projectors, formats that no engine here loads.
    Raises:  ValueError when context or sequences are not positive.
    """
    if sequences < 1 or (context is not None and context < 1):
        raise ValueError("context and sequences must be positive")
    if model.role in (Role.ADAPTER, Role.PROJECTOR, Role.UNKNOWN) or model.format is None:
        return None
    tokens = context or min(model.context_length or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    gguf = model.format is ModelFormat.GGUF
    geometry = model.geometry
    return Estimate(
        context=tokens,
        sequences=sequences,
        weights=model.weight_bytes,
        kv_cache=kv_bytes(geometry, tokens, sequences, kv, gguf=gguf),
        state=4 * geometry.state_elements * sequences,
        compute=_ggml_compute(model, tokens, sequences) if gguf else _paged_compute(model, sequences),
    )


def kv_bytes(geometry: Geometry, context: int, sequences: int, kv: KvType, *, gguf: bool) -> int | None:
    """Sum over layers of tokens kept x numbers per token x bytes per number; None where the layers are unknown.

    A layer that sees everything keeps the context. One with a window keeps the window and the batch in flight:
    llama.cpp min(n_ctx, n_swa + n_ubatch) padded to 256 (llama-kv-cache-iswa.cpp), vLLM min(max_model_len,
    window - 1 + max_num_batched_tokens) and one block more (SlidingWindowSpec.max_admission_blocks_per_request).
    """
    if geometry.cache is None:
        return None
    block, batch = (_GGUF_BLOCK, _GGUF_BATCH) if gguf else (_PAGED_BLOCK, _PAGED_BATCH)
    total = 0.0
    for group in geometry.cache:
        tokens = _padded(context, block)
        if group.window is not None:
            kept = group.window + batch if gguf else group.window - 1 + batch
            tokens = min(tokens, _padded(kept, block) + (0 if gguf else block))
        total += group.layers * group.elements * tokens * kv.value
    return int(total) * sequences


def _ggml_compute(model: ModelFile, context: int, sequences: int) -> int | None:
    """llama.cpp's scratch memory for one batch, the larger of two moments, and its buffer for logits.

    At the end: f32 logits for every token of the batch, beside two rows of the hidden state. In a layer: three rows as
    wide as the feed-forward part and three of the hidden state, beside the f16 mask of batch x context. The allocator
    reuses one buffer for both. Source: fitted to ggml's own reservation (sched_reserve) over eight shapes.
    """
    geometry = model.geometry
    hidden, logits = geometry.hidden, _logits(model)
    if hidden is None or logits is None:
        return None
    wide = geometry.feed_forward or (4 * hidden if geometry.cache else 2 * hidden)
    mask = _padded(context, _GGUF_BLOCK) if geometry.cache else 0
    last = _GGUF_BATCH * 4 * (logits + 2 * hidden)
    layer = _GGUF_BATCH * (4 * 3 * (wide + hidden) + 2 * mask)
    return max(last, layer) + 4 * logits * sequences


def _paged_compute(model: ModelFile, sequences: int) -> int | None:
    """Activations of vLLM-like engines: 16-bit rows of a prefill chunk, and f32 logits where tokens are sampled.

    Source: the shapes that vLLM's profile run allocates. Not checked on a GPU; libraries and CUDA graphs come on top.
    """
    hidden, logits = model.geometry.hidden, _logits(model)
    if hidden is None or logits is None:
        return None
    wide = model.geometry.feed_forward or 4 * hidden
    return 2 * _PAGED_BATCH * 3 * (wide + hidden) + 4 * logits * max(sequences, _PAGED_LOGIT_ROWS)


def _logits(model: ModelFile) -> int | None:
    """Numbers in one row of output: the vocabulary, or the vector of a model that does not generate."""
    return model.geometry.vocabulary if model.role is Role.MODEL else model.geometry.hidden


def _padded(tokens: int, block: int) -> int:
    return -(-tokens // block) * block
