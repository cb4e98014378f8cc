"""What the engine thread drives: the seam between scheduling (engine.py) and llama.cpp (batcher.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from backends.llamacpp.protocol import Prompt, Sampling
from backends.llamacpp.templates import ChatTemplate


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is known once the model is loaded."""

    context: int  # tokens per sequence
    embedding_context: int  # tokens per input of /v1/embeddings
    generates: bool  # False for models that only embed
    n_embd: int
    n_vocab: int
    sampling: Sampling  # defaults: ours with what the file says
    template: ChatTemplate
    meta: dict[str, Any] = field(default_factory=dict)  # for the model card


class Texts(Protocol):
    """Text and tokens. Any thread may call."""

    def encode(self, prompt: Prompt, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Tokens of a prompt. Token ids pass through. Raises: ApiError for ids outside the vocabulary."""

    def encode_chat(self, messages: Sequence[Any], variables: Any) -> list[int]:
        """Tokens of a conversation. Raises: ApiError when the template refuses it."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, control tokens spelled out."""

    def piece(self, token: int) -> bytes:
        """Bytes of one generated token."""

    def is_end(self, token: int) -> bool:
        """Whether generation ends with this token."""


class Runner(Texts, Protocol):
    """One model on one thread: apart from `Texts`, every method is called by the engine thread only."""

    @property
    def slots(self) -> int:
        """Sequences that can be decoded together. Known before loading."""

    def load(self) -> ModelInfo:
        """Blocks for as long as it takes. Raises: UsageProblem."""

    def start(self, slot: int, prompt: Sequence[int], sampling: Sampling, grammar: str | None) -> None:
        """Occupy a free slot. No computing yet. Raises: ApiError when the sampling options do not fit the model."""

    def step(self) -> list[tuple[int, int]]:
        """Advance all slots by one decode: (slot, token) for those that produced one. Raises: anything, if it broke."""

    def stop(self, slot: int) -> None:
        """Empty a slot; nothing of it stays behind for the next."""

    def embed(self, inputs: Sequence[Sequence[int]]) -> list[list[float]]:
        """Unit vectors of the first inputs, as many as fit one decode and at least one."""

    def reset(self) -> None:
        """Rebuild the contexts after a failure; all slots are empty then. Raises: anything, if that fails too."""

    def close(self) -> None:
        """Free everything."""

    @property
    def kv_used(self) -> float:
        """Share of the KV cache that holds tokens, 0.0-1.0."""
