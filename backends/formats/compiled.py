"""Formats of runtimes: TensorRT-LLM engines and checkpoints, ONNX.

Sources: TensorRT-LLM docs, architecture/checkpoint.md (config.json with `architecture`, `quantization.quant_algo`,
rank<N>.safetensors) and its engine folders (config.json with pretrained_config and build_config, rank<N>.engine).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from backends.base import ModelFormat
from backends.formats import hf_geometry, reading, shards
from backends.formats.folders import folder_name
from backends.formats.model import ModelFile, Role, UnreadableModel
from backends.formats.quantisation import Quantisation
from backends.formats.reading import mapping, opened, printable, read_json, read_json_if_there, size_of

_ENGINE = re.compile(r"rank\d+\.engine")
_RANK = re.compile(r"rank\d+\.safetensors")
_ONNX_DATA = (".onnx", ".onnx_data", ".onnx.data")


def is_engine(names: tuple[str, ...]) -> bool:
    return any(_ENGINE.fullmatch(name) for name in names)


def is_checkpoint(names: tuple[str, ...]) -> bool:
    return "config.json" in names and any(_RANK.fullmatch(name) for name in names)


def inspect_engine(folder: Path, names: tuple[str, ...]) -> ModelFile:
    """A built engine: tied to one kind of GPU and one version of TensorRT-LLM. Raises: UnreadableModel."""
    config = read_json_if_there(folder / "config.json") or {}
    pretrained, build = mapping(config.get("pretrained_config")), mapping(config.get("build_config"))
    files = tuple(folder / name for name in names if _ENGINE.fullmatch(name))
    size = sum(size_of(file) or 0 for file in files)
    problems = _rank_problems(pretrained, len(files))
    return ModelFile(
        path=folder,
        name=folder_name(folder),
        format=ModelFormat.TENSORRT,
        quantisation=_algorithm(pretrained),
        architecture=printable(pretrained.get("architecture"), 64),
        context_length=reading.count(build.get("max_seq_len")) or reading.count(build.get("max_input_len")),
        weight_bytes=None if problems else size,
        disk_bytes=size,
        files=files,
        geometry=hf_geometry.geometry_of(pretrained),
        notes=("built for one GPU type and one TensorRT-LLM version",),
        problems=problems,
    )


def inspect_checkpoint(folder: Path, names: tuple[str, ...]) -> ModelFile:
    """Converted weights, from which trtllm-build makes an engine. Raises: UnreadableModel."""
    config = read_json(folder / "config.json")
    files = tuple(folder / name for name in names if _RANK.fullmatch(name))
    weights = shards.weigh(files, (), Quantisation(ModelFormat.TENSORRT))
    problems = _rank_problems(config, len(files))
    algorithm = _algorithm(config)
    plain = algorithm in (None, "float16", "bfloat16", "float32")
    return ModelFile(
        path=folder,
        name=folder_name(folder),
        format=ModelFormat.TENSORRT,
        method="checkpoint",
        quantisation=algorithm,
        architecture=printable(config.get("architecture"), 64),
        parameters=weights.parameters if plain and not problems else None,
        context_length=reading.count(config.get("max_position_embeddings")),
        weight_bytes=None if problems else weights.bytes,
        disk_bytes=weights.disk_bytes,
        files=files,
        geometry=hf_geometry.geometry_of(config),
        notes=("a checkpoint: build an engine from it with trtllm-build",),
        problems=problems,
    )


def _rank_problems(config: dict[str, Any], found: int) -> tuple[str, ...]:
    ranks = reading.count(mapping(config.get("mapping")).get("world_size"), 10_000)
    return (f"{found} of {ranks} ranks are there",) if ranks is not None and found < ranks else ()


def _algorithm(config: dict[str, Any]) -> str | None:
    declared = printable(mapping(config.get("quantization")).get("quant_algo"), 32)
    return declared.lower() if declared else printable(config.get("dtype"), 16)


def inspect_onnx_file(path: Path) -> ModelFile:
    """Raises: UnreadableModel when the file does not begin as an ONNX model does."""
    with opened(path) as (file, size):
        if file.read(1) != b"\x08":  # protobuf field 1, ir_version, a number: always written first
            raise UnreadableModel(path, "not an ONNX model")
    return _onnx(path, (path,), size)


def inspect_onnx_folder(folder: Path, names: tuple[str, ...]) -> ModelFile:
    files = tuple(folder / name for name in names if name.endswith(_ONNX_DATA))
    return _onnx(folder, files, sum(size_of(file) or 0 for file in files))


def _onnx(path: Path, files: tuple[Path, ...], size: int) -> ModelFile:
    name = folder_name(path).removesuffix(".onnx")
    return ModelFile(path, name, ModelFormat.ONNX, Role.UNKNOWN, weight_bytes=size, disk_bytes=size, files=files)
