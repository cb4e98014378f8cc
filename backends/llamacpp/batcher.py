"""Continuous batching over llama.cpp: every step is one llama_decode over all sequences that have something to do.

Sequences that generate put in one token each; what remains of the batch goes to prompts, first come first served, in
chunks that adapt to the machine so that a step stays short: others keep their pace, and a cancelled prompt is gone
after one step. The KV cache is split evenly (`kv_unified` off): a sequence cannot take room from another, and attention
does not read past its own tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from backends.llamacpp.errors import EngineBroken
from backends.llamacpp.grammars import GrammarSampler
from backends.llamacpp.native import Model
from backends.llamacpp.protocol import Sampling
from backends.llamacpp.sampling import build_chain, build_grammar

N_BATCH = 512  # tokens in one llama_decode at most
_CHUNK_MIN = 64  # prompt tokens in a step at least: smaller ones waste the matrix kernels
_STEP_S = 0.25  # seconds a step with prompt tokens should take at most


class Slot:
    """One sequence: its prompt while that is read, then the token to decode next."""

    __slots__ = ("chain", "grammar", "pending", "position", "prompt")

    def __init__(self, prompt: Sequence[int], chain: Any, grammar: Any) -> None:
        self.prompt = prompt
        self.chain = chain
        self.grammar = grammar  # None = free text
        self.position = 0  # tokens in the KV cache
        self.pending: int | None = None  # sampled, not decoded yet; None while the prompt is read


class Batcher:
    """Owns one llama_context for generation. All methods belong to the engine thread."""

    def __init__(self, model: Model, *, context: int, parallel: int, threads: int) -> None:
        """context: tokens per sequence. Raises: EngineBroken when the context cannot be made."""
        self._model = model
        self._lib = lib = model.lib
        self.context = context
        self._slots: dict[int, Slot] = {}  # in order of arrival
        self._chunk = N_BATCH
        params = lib.llama_context_default_params()
        params.n_ctx = -(-context // 256) * 256 * parallel
        params.n_batch = params.n_ubatch = N_BATCH
        params.n_seq_max = parallel
        params.n_threads = params.n_threads_batch = threads
        params.swa_full = False  # sequences are only ever removed whole, so windows may be kept small
        self._ctx = lib.llama_init_from_model(model.handle, params)
        if not self._ctx:
            raise EngineBroken("llama.cpp could not create the context")
        self._memory = lib.llama_get_memory(self._ctx)
        self._batch = lib.llama_batch_init(N_BATCH, 0, 1)
        self._grammars = GrammarSampler(model)

    def start(self, slot: int, prompt: Sequence[int], sampling: Sampling, grammar: str | None) -> None:
        """Occupy a slot. Raises: ApiError."""
        rules = None if grammar is None else build_grammar(self._model, grammar)
        try:
            chain = build_chain(self._model, sampling, prompt, self.context)
        except BaseException:
            self._free(rules)
            raise
        self._slots[slot] = Slot(prompt, chain, rules)

    def stop(self, slot: int) -> None:
        """Forget a sequence: its KV cells and its sampler."""
        gone = self._slots.pop(slot)
        self._free(gone.chain, gone.grammar)
        self._lib.llama_memory_seq_rm(self._memory, slot, -1, -1)

    def step(self) -> list[tuple[int, int]]:
        """One decode. Returns (slot, sampled token). Raises: EngineBroken."""
        outputs, prompt_tokens = self._fill()
        if not self._batch.n_tokens:
            return []
        began = time.perf_counter()
        if status := self._lib.llama_decode(self._ctx, self._batch):
            raise EngineBroken(f"llama_decode returned {status}")
        if prompt_tokens:
            self._adapt(prompt_tokens, time.perf_counter() - began)
        return [self._sample(slot, row) for slot, row in outputs]

    def tokens_held(self) -> int:
        """Tokens in the KV cache."""
        return sum(slot.position for slot in tuple(self._slots.values()))

    def close(self) -> None:
        """Free the context and all samplers."""
        for slot in self._slots.values():
            self._free(slot.chain, slot.grammar)
        self._slots.clear()
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._ctx)

    def _fill(self) -> tuple[list[tuple[int, int]], int]:
        """Put this step's tokens into the batch. Returns (slot, row whose logits are wanted), and prompt tokens."""
        takes = {number: 1 for number, slot in self._slots.items() if slot.pending is not None}
        room = min(self._chunk, N_BATCH - len(takes))
        for number, slot in self._slots.items():
            if slot.pending is None and room:
                takes[number] = min(room, len(slot.prompt) - slot.position)
                room -= takes[number]
        outputs, prompt_tokens = [], 0
        self._batch.n_tokens = 0
        # llama.cpp computes runs of consecutive sequence ids together, so the order matters.
        for number in sorted(takes):
            slot = self._slots[number]
            if slot.pending is not None:
                self._put(number, slot.position, (slot.pending,))
                slot.position += 1
            else:
                end = slot.position + takes[number]
                self._put(number, slot.position, slot.prompt[slot.position : end])
                slot.position, prompt_tokens = end, prompt_tokens + takes[number]
            if slot.position >= len(slot.prompt):
                row = self._batch.n_tokens - 1
                self._batch.logits[row] = 1
                outputs.append((number, row))
        return outputs, prompt_tokens

    def _put(self, number: int, position: int, tokens: Sequence[int]) -> None:
        batch, row = self._batch, self._batch.n_tokens
        for offset, token in enumerate(tokens):
            batch.token[row + offset] = token
            batch.pos[row + offset] = position + offset
            batch.n_seq_id[row + offset] = 1
            batch.seq_id[row + offset][0] = number
            batch.logits[row + offset] = 0
        batch.n_tokens = row + len(tokens)

    def _sample(self, number: int, row: int) -> tuple[int, int]:
        slot = self._slots[number]
        if slot.grammar is None:
            token: int = self._lib.llama_sampler_sample(slot.chain, self._ctx, row)
        else:
            token = self._grammars.sample(slot.chain, slot.grammar, self._ctx, row)
        slot.pending = token
        return number, token

    def _free(self, *samplers: Any) -> None:
        for sampler in samplers:
            if sampler is not None:
                self._lib.llama_sampler_free(sampler)

    def _adapt(self, tokens: int, took: float) -> None:
        """Choose the next chunk so that a step takes about _STEP_S seconds."""
        if took > _STEP_S:
            self._chunk = max(_CHUNK_MIN, self._chunk // 2)
        elif tokens >= self._chunk and took < _STEP_S / 2:
            self._chunk = min(N_BATCH, self._chunk * 2)
