"""A folder in the Hugging Face layout (config.json beside safetensors), or one of its relatives, as a ModelFile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backends.base import ModelFormat
from backends.formats import hf_geometry, reading, shards
from backends.formats.model import ModelFile, Role, UnreadableModel
from backends.formats.quantisation import Quantisation, quantisation_of
from backends.formats.reading import mapping, printable, read_json, read_json_if_there, size_of

_DTYPES = {
    "float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "F32": "fp32", "F16": "fp16", "BF16": "bf16",
    "F8_E4M3": "fp8", "F8_E5M2": "fp8",
}  # fmt: skip
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length", "n_ctx")


def folder_name(folder: Path) -> str:
    """`org/model` inside a Hugging Face cache (models--org--model/snapshots/<commit>), else the folder's own name."""
    resolved = folder if folder.name not in ("", ".", "..") else folder.absolute()
    cache = resolved.parent.parent.name
    if resolved.parent.name == "snapshots" and cache.startswith("models--"):
        return printable(cache.removeprefix("models--").replace("--", "/")) or "?"
    return printable(resolved.name) or "?"


def inspect_hf(folder: Path, names: tuple[str, ...]) -> ModelFile:
    """config.json and safetensors.

    Raises: UnreadableModel.
    """
    config = read_json(folder / "config.json")
    present, missing = shards.weight_files(folder, names)
    if not present and not missing:
        return _without_safetensors(folder, names, config)
    metadata = shards.file_metadata(present[0]) if present else {}
    modelopt = read_json_if_there(folder / "hf_quant_config.json") or {}
    quantisation = quantisation_of(config, modelopt, metadata)
    weights = shards.weigh(present, missing, quantisation)
    language = hf_geometry.language_part(config)
    problems = (f"{len(missing)} weight files are missing, first {printable(missing[0])}",) if missing else ()
    whole = not problems
    return ModelFile(
        path=folder,
        name=folder_name(folder),
        format=quantisation.format,
        role=_role(config, names),
        quantisation=quantisation.label or _dtype(config, language, weights.bytes_by_dtype),
        method=quantisation.method,
        bits=quantisation.bits,
        architecture=_architecture(config),
        parameters=weights.parameters if whole else None,
        context_length=_context_length(language),
        weight_bytes=weights.bytes if whole else None,
        disk_bytes=weights.disk_bytes,
        files=present,
        chat_template=_has_template(folder, names),
        geometry=hf_geometry.geometry_of(language),
        notes=_notes(config, quantisation, weights.parameters),
        problems=problems,
    )


def _without_safetensors(folder: Path, names: tuple[str, ...], config: dict[str, Any]) -> ModelFile:
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth")) and "optimizer" not in name]
    if not pickled:
        raise UnreadableModel(folder, "config.json without weights")
    note = "pickled weights: loading them runs code from the file, convert them to safetensors"
    return unknown(folder, note, architecture=_architecture(config))


def unknown(path: Path, note: str, architecture: str | None = None) -> ModelFile:
    """Something recognised that no engine here serves."""
    return ModelFile(path, folder_name(path), None, Role.UNKNOWN, architecture=architecture, notes=(note,))


def inspect_peft(folder: Path, names: tuple[str, ...]) -> ModelFile:
    """adapter_config.json and adapter_model.safetensors: a LoRA adapter. Raises: UnreadableModel."""
    config = read_json(folder / "adapter_config.json")
    files = tuple(folder / name for name in names if name.startswith("adapter_") and name.endswith(".safetensors"))
    quantisation = Quantisation(ModelFormat.LORA)
    weights = shards.weigh(files, (), quantisation)
    base = printable(config.get("base_model_name_or_path"), 200)
    rank = reading.count(config.get("r"))
    method = printable(config.get("peft_type"), 32) or "LORA"
    return ModelFile(
        path=folder,
        name=folder_name(folder),
        format=ModelFormat.LORA,
        role=Role.ADAPTER,
        quantisation=_dtype({}, {}, weights.bytes_by_dtype),
        method=method.lower(),
        parameters=weights.parameters,
        weight_bytes=weights.bytes,
        disk_bytes=weights.disk_bytes,
        files=files,
        notes=tuple(note for note in (f"rank {rank}" if rank else "", f"made for {base}" if base else "") if note),
        problems=() if files else ("adapter_model.safetensors is missing",),
    )


def _architecture(config: dict[str, Any]) -> str | None:
    listed = config.get("architectures")
    first = listed[0] if isinstance(listed, list) and listed else None
    return printable(first, 64) or printable(config.get("model_type"), 64)


def _role(config: dict[str, Any], names: tuple[str, ...]) -> Role:
    architecture = _architecture(config) or ""
    if architecture.endswith("ForSequenceClassification"):
        return Role.RERANK
    if "modules.json" in names or "1_Pooling" in names:
        return Role.EMBEDDING
    encoder = hf_geometry.is_encoder(config.get("model_type")) and "CausalLM" not in architecture
    return Role.EMBEDDING if encoder else Role.MODEL


def _dtype(config: dict[str, Any], language: dict[str, Any], bytes_by_dtype: dict[str, int]) -> str | None:
    """What most of the weights are in; the configuration's word only where there are none to look at."""
    if bytes_by_dtype:
        most = max(bytes_by_dtype, key=lambda name: bytes_by_dtype[name])
        return _DTYPES.get(most) or printable(most.lower(), 16)
    given = config.get("dtype") or config.get("torch_dtype") or language.get("dtype") or language.get("torch_dtype")
    return _DTYPES.get(str(given))


def _context_length(language: dict[str, Any]) -> int | None:
    found = (reading.count(language.get(name)) for name in _CONTEXT)
    return next((length for length in found if length is not None), None)


def _has_template(folder: Path, names: tuple[str, ...]) -> bool:
    if "chat_template.jinja" in names or "chat_template.json" in names:
        return True
    if size_of(folder / "tokenizer_config.json") is None:
        return False
    try:
        return bool(read_json(folder / "tokenizer_config.json").get("chat_template"))
    except UnreadableModel:  # it says nothing about the weights, which are what matters here
        return False


def _notes(config: dict[str, Any], quantisation: Quantisation, parameters: int | None) -> tuple[str, ...]:
    notes = []
    if parameters is None:
        notes.append("parameter count unknown: layers are packed to different or unstated widths")
    labels = mapping(config.get("id2label"))
    if len(labels) > 1 and (_architecture(config) or "").endswith("ForSequenceClassification"):
        notes.append(f"a classifier with {len(labels)} labels")
    if config.get("auto_map"):
        notes.append("brings its own Python code: engines ask for trust_remote_code")
    if quantisation.format is ModelFormat.SAFETENSORS and quantisation.method:
        notes.append(f"quantised by {quantisation.method}")
    return tuple(notes)
