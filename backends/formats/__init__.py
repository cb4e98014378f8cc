"""What a model file or folder is, from its headers alone: format, quantisation, sizes, engines, memory.

    inspect(path) -> ModelFile                one file or folder; raises UnreadableModel and nothing else
    scan(paths)   -> ModelFile | Unreadable   everything at or below the paths, Ollama's stores included
    support(model) -> {engine: Support}       who can serve it, with the conditions
    estimate(model, context=, sequences=)     memory it will take

Files are taken to be hostile: only regular files are opened, and counts, lengths, depths and offsets are bounded
before anything is read or allocated. Limits are constants of `reading`, `gguf_header`, `safetensors` and `walk`.
"""

from backends.formats.engines import ENGINES, Level, Support, support
from backends.formats.memory import Estimate, KvType, estimate
from backends.formats.model import Geometry, LayerCache, ModelFile, Role, Unreadable, UnreadableModel
from backends.formats.walk import inspect, scan

__all__ = [
    "ENGINES",
    "Estimate",
    "Geometry",
    "KvType",
    "LayerCache",
    "Level",
    "ModelFile",
    "Role",
    "Support",
    "Unreadable",
    "UnreadableModel",
    "estimate",
    "inspect",
    "scan",
    "support",
]
