"""The real Runner: a model file, a batcher for generation and an embedder, made from Options."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from backends.llamacpp.batcher import Batcher
from backends.llamacpp.embedder import Embedder, embedding_context, pooling_of
from backends.llamacpp.errors import EngineBroken, UsageProblem, failed, invalid, unsupported
from backends.llamacpp.hardware import available_memory, physical_cores
from backends.llamacpp.native import Bos, Model, last_errors
from backends.llamacpp.options import DEFAULT_CONTEXT, Options
from backends.llamacpp.protocol import Prompt, Sampling
from backends.llamacpp.runner import ModelInfo
from backends.llamacpp.templates import ChatTemplate
from backends.llamacpp.weights import checked

_GIB = 1 << 30
# metadata key under general.sampling -> field of Sampling
_FILE_SAMPLING = {"temp": "temperature", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repeat_penalty"}


class LlamaRunner:
    """Implements runner.Runner over llama.cpp."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._threads = options.threads or physical_cores()
        self._model: Model | None = None
        self._info: ModelInfo | None = None
        self._batcher: Batcher | None = None
        self._embedder: Embedder | None = None
        self._bos = Bos(None, "")

    @property
    def slots(self) -> int:
        """Sequences decoded together."""
        return self._options.parallel

    @property
    def kv_used(self) -> float:
        """Share of the KV cache that holds tokens."""
        batcher = self._batcher
        return batcher.tokens_held() / (batcher.context * self.slots) if batcher else 0.0

    def load(self) -> ModelInfo:
        """Verify, load, and create the context for generation. Raises: UsageProblem."""
        options = self._options
        with checked(options.path, options.sha256) as files:
            self._model = model = Model(options.path, files, options.gpu_layers)
        context = self._context(model)
        self._bos = model.bos()
        self._info = ModelInfo(
            context=context,
            embedding_context=embedding_context(model, context),
            generates=pooling_of(model) is None,
            n_embd=model.n_embd,
            n_vocab=model.n_vocab,
            sampling=_file_sampling(model),
            template=_template(model, self._bos.text),
            meta=_meta(model),
        )
        try:
            self._build()
        except EngineBroken as error:
            raise UsageProblem(f"{error}: {last_errors() or 'lower context_length or parallel'}") from None
        return self._info

    def encode(self, prompt: Prompt, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Tokens of a prompt."""
        model = self._loaded()
        if isinstance(prompt, str):
            return model.tokenize(prompt, add_special=add_special, parse_special=parse_special)
        self._check(prompt)
        return list(prompt)

    def encode_chat(self, messages: Sequence[Any], variables: Any) -> list[int]:
        """Tokens of a conversation, BOS in front if the model wants one and the template did not write it."""
        assert self._info is not None
        model = self._loaded()
        segments = self._info.template.render(messages, variables)
        written = bool(self._bos.text) and bool(segments) and segments[0].text.startswith(self._bos.text)
        tokens = [self._bos.token] if self._bos.token is not None and not written else []
        for segment in segments:
            tokens += model.tokenize(segment.text, add_special=False, parse_special=not segment.literal)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens."""
        self._check(tokens)
        return self._loaded().detokenize(tokens)

    def piece(self, token: int) -> bytes:
        """Bytes of one generated token."""
        return self._loaded().piece(token)

    def is_end(self, token: int) -> bool:
        """Whether generation ends with this token."""
        return self._loaded().is_end(token)

    def start(self, slot: int, prompt: Sequence[int], sampling: Sampling, grammar: str | None) -> None:
        """Occupy a slot."""
        if self._batcher is None:
            raise unsupported("model", "This model makes embeddings only.")
        self._batcher.start(slot, prompt, sampling, grammar)

    def step(self) -> list[tuple[int, int]]:
        """One decode over all slots."""
        return self._batcher.step() if self._batcher else []

    def stop(self, slot: int) -> None:
        """Empty a slot."""
        if self._batcher is not None:
            self._batcher.stop(slot)

    def embed(self, inputs: Sequence[Sequence[int]]) -> list[list[float]]:
        """Vectors of the first inputs."""
        assert self._info is not None
        if self._embedder is None:
            limit = self._info.embedding_context
            try:
                self._embedder = Embedder(self._loaded(), context=limit, threads=self._threads)
            except EngineBroken as error:  # generation goes on as before
                raise failed(f"Embeddings cannot be made: {error}") from None
        return self._embedder.embed(inputs)

    def reset(self) -> None:
        """Fresh contexts on the model that stays loaded."""
        self._drop_contexts()
        self._build()

    def close(self) -> None:
        """Free everything."""
        self._drop_contexts()
        if self._model is not None:
            self._model.free()
            self._model = None

    def _loaded(self) -> Model:
        if self._model is None:
            raise EngineBroken("the model is not loaded")
        return self._model

    def _check(self, tokens: Sequence[int]) -> None:
        size = self._loaded().n_vocab
        if any(not 0 <= token < size for token in tokens):
            raise invalid(f"Token ids must be between 0 and {size - 1}.", "prompt")

    def _build(self) -> None:
        model, info = self._loaded(), self._info
        assert info is not None
        if info.generates:
            self._batcher = Batcher(model, context=info.context, parallel=self.slots, threads=self._threads)

    def _drop_contexts(self) -> None:
        for owner in (self._batcher, self._embedder):
            if owner is not None:
                owner.close()
        self._batcher = self._embedder = None

    def _context(self, model: Model) -> int:
        """Tokens per sequence. Raises: UsageProblem when the model or the memory cannot take what was asked for."""
        asked, parallel = self._options.context_length, self.slots
        if asked is not None and asked > model.n_ctx_train:
            raise UsageProblem(f"context_length: {asked} is more than the model was trained for ({model.n_ctx_train})")
        context = asked or min(model.n_ctx_train, DEFAULT_CONTEXT)
        needed, free = model.kv_bytes_per_token() * context * parallel, available_memory()
        if self._options.gpu_layers == 0 and free is not None and needed > free and pooling_of(model) is None:
            raise UsageProblem(
                f"context_length: {context} tokens x {parallel} parallel need {needed / _GIB:.1f} GiB of KV cache, "
                f"{free / _GIB:.1f} GiB are free; lower context_length or parallel"
            )
        return context


def _template(model: Model, bos: str) -> ChatTemplate:
    return ChatTemplate(model.meta("tokenizer.chat_template"), bos, model.eos_text(), model.control_texts())


def _file_sampling(model: Model) -> Sampling:
    found: dict[str, Any] = {}
    for key, name in _FILE_SAMPLING.items():
        if (value := model.meta(f"general.sampling.{key}")) is not None:
            found[name] = float(value)
    if (top_k := model.meta("general.sampling.top_k")) is not None:
        found["top_k"] = int(top_k)
    return dataclasses.replace(Sampling(), **found)


def _meta(model: Model) -> dict[str, Any]:
    return {
        "n_ctx_train": model.n_ctx_train,
        "n_params": model.lib.llama_model_n_params(model.handle),
        "size": model.lib.llama_model_size(model.handle),
        "n_vocab": model.n_vocab,
        "n_embd": model.n_embd,
        "quantization": model.quantization(),
        "description": model.description(),
    }
