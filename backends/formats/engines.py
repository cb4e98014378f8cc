"""Which engine can serve which format, how well, and on what condition.

Sources: the engines' own lists of quantisation methods and formats (vLLM 0.32 and SGLang: model_executor and srt
layers/quantization/__init__.py; TensorRT-LLM: features/quantization; TabbyAPI and mlx-lm: their loaders).
docs/formats.md shows the table for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from backends.base import ModelFormat
from backends.formats.model import ModelFile, Role

ENGINES = (
    "llamacpp", "llama_server", "ollama", "vllm", "sglang", "tabbyapi", "tensorrt_llm", "mlx_lm", "lmstudio",
)  # fmt: skip


class Level(StrEnum):
    NATIVE = "native"
    EXPERIMENTAL = "experimental"
    NO = "no"


@dataclass(frozen=True, slots=True)
class Support:
    level: Level
    note: str = ""  # the condition, or why not


_NATIVE = Support(Level.NATIVE)
_NO = Support(Level.NO)


def _maybe(note: str) -> Support:
    return Support(Level.EXPERIMENTAL, note)


def _no(note: str) -> Support:
    return Support(Level.NO, note)


_TABBY_DROPPED = _no("TabbyAPI refuses it since it dropped exllamav2")
_AS_GGUF = _no("only when converted to GGUF")
_TO_MLX = _maybe("converted to MLX's layout while loading")
_GPU = Support(Level.NATIVE, "on GPUs whose kernels know it")
_PACKED_4_BIT = {
    "vllm": _NATIVE, "sglang": _NATIVE, "tabbyapi": _TABBY_DROPPED, "mlx_lm": _TO_MLX,
    "tensorrt_llm": _maybe("checkpoints made by Model Optimizer are the tested ones"),
}  # fmt: skip
_FOUR_BIT_FLOAT = {
    "llamacpp": _AS_GGUF, "llama_server": _AS_GGUF, "vllm": _GPU, "sglang": _GPU, "tensorrt_llm": _GPU,
    "mlx_lm": _TO_MLX,
}  # fmt: skip

# Format -> engine -> how well. An engine that is not named cannot load it.
TABLE: Mapping[ModelFormat, Mapping[str, Support]] = {
    ModelFormat.GGUF: {
        "llamacpp": _NATIVE, "llama_server": _NATIVE, "ollama": _NATIVE, "lmstudio": _NATIVE,
        "vllm": _maybe("one file only, with a tokenizer from elsewhere; since 0.24 through vllm-gguf-plugin"),
        "sglang": _maybe("slow, and not for every architecture"),
    },
    ModelFormat.SAFETENSORS: {
        "vllm": _NATIVE, "sglang": _NATIVE, "tabbyapi": _NATIVE, "tensorrt_llm": _NATIVE, "mlx_lm": _NATIVE,
        "ollama": _maybe("through `ollama create`, which converts, or its MLX runner"),
        "llamacpp": _AS_GGUF, "llama_server": _AS_GGUF,
    },
    ModelFormat.AWQ: _PACKED_4_BIT,
    ModelFormat.GPTQ: _PACKED_4_BIT,
    ModelFormat.FP8: {"vllm": _GPU, "sglang": _GPU, "tensorrt_llm": _GPU},
    ModelFormat.COMPRESSED_TENSORS: {
        "vllm": _NATIVE, "sglang": _NATIVE,
        "tensorrt_llm": _maybe("depends on the scheme inside"),
        "mlx_lm": _maybe("int4 and nvfp4 schemes only"),
    },
    ModelFormat.BITSANDBYTES: {
        "vllm": _maybe("older versions only: 0.32 no longer has it"),
        "sglang": _maybe("borrows vLLM's kernels"),
    },
    ModelFormat.MXFP4: _FOUR_BIT_FLOAT,
    ModelFormat.NVFP4: _FOUR_BIT_FLOAT,
    ModelFormat.EXL2: {"tabbyapi": _TABBY_DROPPED},
    ModelFormat.EXL3: {"tabbyapi": _NATIVE},
    ModelFormat.MLX: {
        "mlx_lm": _NATIVE, "lmstudio": Support(Level.NATIVE, "on Apple hardware"),
        "ollama": _maybe("on Apple hardware, through its MLX runner"),
    },
    ModelFormat.TENSORRT: {
        "tensorrt_llm": Support(Level.NATIVE, "legacy TensorRT backend, on the GPU it was built for"),
    },
    ModelFormat.ONNX: {},
    ModelFormat.LORA: {
        "vllm": Support(Level.NATIVE, "beside its base model, with --enable-lora"),
        "sglang": Support(Level.NATIVE, "beside its base model, with --lora-paths"),
        "tensorrt_llm": _maybe("beside its base model"),
    },
}  # fmt: skip

# Methods without a member of ModelFormat, by who lists them among its own.
_OTHER_METHODS: Mapping[str, tuple[str, ...]] = {
    "quark": ("vllm", "sglang"), "torchao": ("vllm", "sglang"), "auto-round": ("vllm", "sglang"),
    "intel/auto-round": ("vllm", "sglang"), "experts_int8": ("vllm",), "fp_quant": ("vllm",), "moe_wna16": ("vllm",),
    "w8a8_int8": ("sglang",), "w8a8_fp8": ("sglang",), "qoq": ("sglang",), "blockwise_int8": ("sglang",),
    "modelopt": ("vllm", "sglang", "tensorrt_llm"), "modelopt_fp4": ("vllm", "sglang", "tensorrt_llm"),
    "modelopt_mixed": ("vllm",), "modelopt_mxfp8": ("vllm",),
}  # fmt: skip

_GGUF_BESIDE: Mapping[Role, Mapping[str, Support]] = {
    Role.ADAPTER: {
        "llama_server": Support(Level.NATIVE, "beside its model, with --lora"),
        "ollama": Support(Level.NATIVE, "beside its model, with ADAPTER in a Modelfile"),
    },
    Role.PROJECTOR: {
        "llama_server": Support(Level.NATIVE, "beside its model, with --mmproj"),
        "ollama": Support(Level.NATIVE, "beside its model, with FROM in a Modelfile"),
        "lmstudio": Support(Level.NATIVE, "beside its model"),
    },
}
# What engines can do with a model that does not generate; one that is not named cannot.
_BY_ROLE: Mapping[Role, Mapping[str, Level]] = {
    Role.EMBEDDING: {name: Level.NATIVE for name in ENGINES if name not in ("mlx_lm", "tensorrt_llm")}
    | {"tensorrt_llm": Level.EXPERIMENTAL},
    Role.RERANK: {
        "vllm": Level.NATIVE, "sglang": Level.NATIVE, "llama_server": Level.NATIVE, "tensorrt_llm": Level.EXPERIMENTAL,
    },
}  # fmt: skip


def support(model: ModelFile) -> dict[str, Support]:
    """How well each of ENGINES can serve a model, in that order."""
    return {engine: _support(model, engine) for engine in ENGINES}


def _support(model: ModelFile, engine: str) -> Support:
    if model.format is None or model.role is Role.UNKNOWN:
        return _NO
    if model.problems:
        return _no("incomplete")
    if model.format is ModelFormat.GGUF:
        return _with_role(model, engine, _gguf_support(model, engine))
    if model.format is ModelFormat.SAFETENSORS and model.method is not None:
        return _with_role(model, engine, _other_method(model.method, engine))
    if model.format is ModelFormat.TENSORRT and model.method == "checkpoint" and engine == "tensorrt_llm":
        return _maybe("build an engine from it first")
    return _with_role(model, engine, TABLE[model.format].get(engine, _NO))


def _gguf_support(model: ModelFile, engine: str) -> Support:
    if model.role in _GGUF_BESIDE:
        return _GGUF_BESIDE[model.role].get(engine, _NO)
    found = TABLE[ModelFormat.GGUF].get(engine, _NO)
    if found.level is Level.NO:
        return found
    if model.version == 1:
        return _no("GGUF version 1: llama.cpp dropped it, convert the model again")
    if engine == "vllm" and len(model.files) > 1:
        return _no("a split file: merge it first")
    return _maybe("big-endian: only on hosts of that byte order") if model.big_endian else found


def _other_method(method: str, engine: str) -> Support:
    if method == "ollama":
        return _maybe("through its MLX runner") if engine == "ollama" else _NO
    if engine in _OTHER_METHODS.get(method, ()):
        return _maybe(f"lists {method} among its methods")
    return _NO


def _with_role(model: ModelFile, engine: str, found: Support) -> Support:
    levels = _BY_ROLE.get(model.role)
    if levels is None or found.level is Level.NO:
        return found
    level = levels.get(engine, Level.NO)
    if level is Level.NO:
        return _no(f"has no route for {model.role} models")
    return found if level is Level.NATIVE else Support(level, found.note or f"{model.role} models are new to it")
