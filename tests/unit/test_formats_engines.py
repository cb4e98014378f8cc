"""Who can serve what: the table, and the conditions that come on top of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from backends import kinds
from backends.base import ModelFormat
from backends.formats import ENGINES, Level, ModelFile, Role, support
from backends.formats.engines import TABLE

GGUF = ModelFile(Path("m.gguf"), "m", ModelFormat.GGUF, version=3, files=(Path("m.gguf"),))


def levels(model: ModelFile) -> dict[str, str]:
    """The first letter of each engine's level, those that cannot serve it left out."""
    return {name: found.level[0] for name, found in support(model).items() if found.level is not Level.NO}


@pytest.mark.parametrize(("format_", "expected"), [
    (ModelFormat.GGUF, "llamacpp=n llama_server=n ollama=n vllm=e sglang=e lmstudio=n"),
    (ModelFormat.SAFETENSORS, "ollama=e vllm=n sglang=n tabbyapi=n tensorrt_llm=n mlx_lm=n"),
    (ModelFormat.AWQ, "vllm=n sglang=n tensorrt_llm=e mlx_lm=e"),
    (ModelFormat.GPTQ, "vllm=n sglang=n tensorrt_llm=e mlx_lm=e"),
    (ModelFormat.FP8, "vllm=n sglang=n tensorrt_llm=n"),
    (ModelFormat.COMPRESSED_TENSORS, "vllm=n sglang=n tensorrt_llm=e mlx_lm=e"),
    (ModelFormat.BITSANDBYTES, "vllm=e sglang=e"),
    (ModelFormat.MXFP4, "vllm=n sglang=n tensorrt_llm=n mlx_lm=e"),
    (ModelFormat.NVFP4, "vllm=n sglang=n tensorrt_llm=n mlx_lm=e"),
    (ModelFormat.EXL2, ""),
    (ModelFormat.EXL3, "tabbyapi=n"),
    (ModelFormat.MLX, "ollama=e mlx_lm=n lmstudio=n"),
    (ModelFormat.TENSORRT, "tensorrt_llm=n"),
    (ModelFormat.ONNX, ""),
    (ModelFormat.LORA, "vllm=n sglang=n tensorrt_llm=e"),
])  # fmt: skip
def test_table(format_: ModelFormat, expected: str) -> None:
    found = levels(replace(GGUF, format=format_))
    assert " ".join(f"{name}={level}" for name, level in found.items()) == expected


def test_table_is_complete() -> None:
    assert set(TABLE) == set(ModelFormat)
    assert {engine for row in TABLE.values() for engine in row} <= set(ENGINES)
    known = set(kinds()) - {"openai_compatible"}  # adapters come one by one; none of them may be unknown here
    assert known <= set(ENGINES)
    for row in TABLE.values():
        assert all(found.note for found in row.values() if found.level is Level.EXPERIMENTAL)


def test_incomplete_models_are_served_by_nobody() -> None:
    assert levels(replace(GGUF, problems=("1 of 2 parts are missing",))) == {}
    assert support(replace(GGUF, problems=("x",)))["llamacpp"].note == "incomplete"
    assert levels(replace(GGUF, format=None, role=Role.UNKNOWN)) == {}


def test_gguf_conditions() -> None:
    assert "vllm" not in levels(replace(GGUF, files=(Path("a"), Path("b"))))
    assert set(levels(replace(GGUF, big_endian=True)).values()) == {"e"}
    assert levels(replace(GGUF, version=1)) == {}
    assert set(levels(replace(GGUF, role=Role.ADAPTER))) == {"llama_server", "ollama"}
    assert set(levels(replace(GGUF, role=Role.PROJECTOR))) == {"llama_server", "ollama", "lmstudio"}


def test_models_that_do_not_generate() -> None:
    assert "mlx_lm" not in levels(replace(GGUF, format=ModelFormat.SAFETENSORS, role=Role.EMBEDDING))
    assert levels(replace(GGUF, role=Role.RERANK)) == {"llama_server": "n", "vllm": "e", "sglang": "e"}
    plain = levels(replace(GGUF, format=ModelFormat.SAFETENSORS, role=Role.RERANK))
    assert plain == {"vllm": "n", "sglang": "n", "tensorrt_llm": "e"}


def test_methods_without_a_format_of_their_own() -> None:
    other = replace(GGUF, format=ModelFormat.SAFETENSORS)
    assert levels(replace(other, method="quark")) == {"vllm": "e", "sglang": "e"}
    assert levels(replace(other, method="aqlm")) == {}
    assert levels(replace(other, method="ollama")) == {"ollama": "e"}
    checkpoint = replace(GGUF, format=ModelFormat.TENSORRT, method="checkpoint")
    assert levels(checkpoint) == {"tensorrt_llm": "e"}
