"""The nouns: what is known of a model file or folder, and how reading one can fail."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from backends.base import ModelFormat


class UnreadableModel(Exception):
    """A path that is not a model, or whose headers are damaged, hostile or too large. Nothing else is ever raised."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The same as a value, in the results of `scan`."""

    path: Path
    reason: str


class Role(StrEnum):
    """What the weights are for."""

    MODEL = "model"  # generates text
    EMBEDDING = "embedding"
    RERANK = "rerank"
    ADAPTER = "adapter"  # LoRA: loaded on top of a model
    PROJECTOR = "projector"  # mmproj: what lets a model see or hear
    UNKNOWN = "unknown"  # recognised well enough to say that nothing here serves it


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Layers whose KV cache has the same size."""

    layers: int
    elements: int  # numbers kept for one token in one layer, keys and values together
    window: int | None = None  # tokens that attention looks back; None = the whole context


@dataclass(frozen=True, slots=True)
class Geometry:
    """The numbers in a header that decide how much memory a model takes. None = the header does not say."""

    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None  # the largest of all layers
    kv_heads: int | None = None  # the largest of all layers
    key_length: int | None = None  # per head
    value_length: int | None = None  # per head
    latent: int | None = None  # kv_lora_rank of multi-head latent attention
    window: int | None = None  # tokens
    feed_forward: int | None = None  # width that one token passes through: with experts, all that are active
    vocabulary: int | None = None
    experts: int | None = None
    experts_used: int | None = None
    cache: tuple[LayerCache, ...] | None = None  # empty = needs none, as an encoder; None = unknown
    state_elements: int = 0  # f32 numbers of recurrent state per sequence, all layers together


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One model as its headers describe it."""

    path: Path  # what an engine is given: file, first part of a split, or folder
    name: str
    format: ModelFormat | None  # None = nothing that an engine here could load
    role: Role = Role.MODEL
    quantisation: str | None = None  # for people: "Q4_K_M", "awq 4-bit g128", "bf16"
    method: str | None = None  # the configuration's quant_method, verbatim
    bits: float | None = None  # per quantised weight
    architecture: str | None = None
    parameters: int | None = None  # logical weights, not packed words; None = cannot be told from headers
    context_length: int | None = None  # tokens the model was trained for
    weight_bytes: int | None = None  # sum of the tensors, which is what stays in memory
    disk_bytes: int | None = None
    files: tuple[Path, ...] = ()  # that hold weights
    chat_template: bool = False
    big_endian: bool = False
    version: int | None = None  # of the file format, where engines differ in what they accept
    geometry: Geometry = field(default_factory=Geometry)
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()  # why no engine can load it as it is: missing parts
