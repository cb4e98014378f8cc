"""Vectors of whole inputs, in a llama_context of its own that is made when the first request asks for one."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

from backends.llamacpp.errors import EngineBroken
from backends.llamacpp.native import Model

_MEAN, _RANK = 1, 4  # LLAMA_POOLING_TYPE_*
_MAX_TOKENS = 2048  # per decode for models made to generate: a pooled input must go through in one piece
_MAX_INPUTS = 16  # per decode


def pooling_of(model: Model) -> int | None:
    """How the file says that token vectors become one; None for models that were made to generate."""
    declared = model.arch("pooling_type")
    return int(declared) if declared and declared.isdigit() and int(declared) else None


def embedding_context(model: Model, context: int) -> int:
    """Tokens one input may have."""
    return context if pooling_of(model) else min(context, _MAX_TOKENS)


class Embedder:
    """Owns one llama_context. All methods belong to the engine thread."""

    def __init__(self, model: Model, *, context: int, threads: int) -> None:
        """context: tokens per input. Raises: EngineBroken when the context cannot be made."""
        self._model = model
        self._lib = lib = model.lib
        self._room = context
        params = lib.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = -(-context // 256) * 256
        params.n_seq_max = _MAX_INPUTS
        params.kv_unified = True  # inputs of very different length share one decode
        params.n_threads = params.n_threads_batch = threads
        params.embeddings = True
        pooling = pooling_of(model)
        if pooling == _RANK:
            raise EngineBroken("this model ranks documents and has no embeddings")
        params.pooling_type = pooling or _MEAN
        self._ctx = lib.llama_init_from_model(model.handle, params)
        if not self._ctx:
            raise EngineBroken("llama.cpp could not create the context for embeddings")
        self._memory = lib.llama_get_memory(self._ctx)
        self._batch = lib.llama_batch_init(params.n_batch, 0, 1)

    def embed(self, inputs: Sequence[Sequence[int]]) -> list[list[float]]:
        """Unit vectors of as many inputs, from the front, as one decode can hold. Raises: EngineBroken."""
        count = self._fill(inputs)
        if status := self._lib.llama_decode(self._ctx, self._batch):
            raise EngineBroken(f"llama_decode returned {status}")
        vectors = [self._vector(number) for number in range(count)]
        if self._memory:
            self._lib.llama_memory_clear(self._memory, False)
        return vectors

    def close(self) -> None:
        """Free the context."""
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._ctx)

    def _fill(self, inputs: Sequence[Sequence[int]]) -> int:
        batch, row, count = self._batch, 0, 0
        for tokens in inputs[:_MAX_INPUTS]:
            if row + len(tokens) > self._room:
                break
            for position, token in enumerate(tokens):
                batch.token[row] = token
                batch.pos[row] = position
                batch.n_seq_id[row] = 1
                batch.seq_id[row][0] = count
                batch.logits[row] = 1
                row += 1
            count += 1
        batch.n_tokens = row
        return count

    def _vector(self, number: int) -> list[float]:
        found = self._lib.llama_get_embeddings_seq(self._ctx, number)
        if not found:
            raise EngineBroken("llama.cpp returned no embedding")
        values: list[float] = ctypes.cast(found, ctypes.POINTER(ctypes.c_float * self._model.n_embd)).contents[:]
        norm = math.sqrt(sum(value * value for value in values)) or 1.0
        return [value / norm for value in values]
