"""Builders of small model files: headers as their writers make them, with holes where the weights would be."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_WIDTHS = {"I64": 8, "I32": 4, "U32": 4, "F32": 4, "F16": 2, "BF16": 2, "I16": 2, "U8": 1, "I8": 1, "F8_E4M3": 1}
_BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 8: (32, 34), 12: (256, 144), 14: (256, 210), 30: (1, 2)}

LLAMA: dict[str, Any] = {
    "general.architecture": "llama", "general.name": "Tiny", "llama.context_length": 4096,
    "llama.embedding_length": 256, "llama.block_count": 4, "llama.feed_forward_length": 512,
    "llama.attention.head_count": 8, "llama.attention.head_count_kv": 2, "tokenizer.ggml.tokens": ["a", "b", "c"],
    "tokenizer.chat_template": "{{ messages }}",
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_size": 256,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 512,
    "max_position_embeddings": 4096, "vocab_size": 1000,
}  # fmt: skip


def gguf(
    pairs: Mapping[str, Any],
    tensors: Sequence[tuple[str, Sequence[int], int]] = (("token_embd.weight", (256, 1000), 1),),
    *,
    version: int = 3,
    big_endian: bool = False,
    data: bool = True,
) -> bytes:
    """A whole file. `tensors`: name, dimensions (fastest first), ggml type. `data=False` leaves the weights out."""
    order, long = ">" if big_endian else "<", "I" if version == 1 else "Q"

    def pack(code: str, *values: Any) -> bytes:
        return struct.pack(order + code, *values)

    def string(text: str) -> bytes:
        raw = text.encode()
        return pack(long, len(raw)) + raw

    def value(item: Any, typed: bool = True) -> bytes:
        if isinstance(item, bool):
            return (pack("I", 7) if typed else b"") + pack("?", item)
        if isinstance(item, int):
            return (pack("I", 4) if typed else b"") + pack("I", item)
        if isinstance(item, float):
            return (pack("I", 6) if typed else b"") + pack("f", item)
        if isinstance(item, str):
            return (pack("I", 8) if typed else b"") + string(item)
        kind = {bool: 7, int: 4, float: 6, str: 8}[type(item[0])] if item else 4
        return pack("I", 9) + pack("I", kind) + pack(long, len(item)) + b"".join(value(one, False) for one in item)

    out = b"GGUF" + pack("I", version) + pack(long, len(tensors)) + pack(long, len(pairs))
    for key, item in pairs.items():
        out += string(key) + value(item)
    offset = 0
    for name, dimensions, kind in tensors:
        out += string(name) + pack("I", len(dimensions)) + pack(long * len(dimensions), *dimensions)
        out += pack("I", kind) + pack("Q", offset)
        elements = 1
        for length in dimensions:
            elements *= length
        block, size = _BLOCKS[kind]
        offset += -(-(elements // block * size) // 32) * 32
    out += b"\0" * (-len(out) % 32)
    return out + (b"\0" * offset if data else b"")


def safetensors(
    tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str] | None = None, *, data: bool = True
) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata is not None else {}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        size = _WIDTHS[dtype]
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + (b"\0" * offset if data else b"")


def hf_folder(
    folder: Path,
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, tuple[str, Sequence[int]]] | None = None,
    metadata: Mapping[str, str] | None = None,
    **files: Any,
) -> Path:
    """config.json, model.safetensors, and more JSON files by keyword: `hf_quant_config={...}`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    weights = {"model.embed_tokens.weight": ("BF16", (1000, 256))} if tensors is None else tensors
    (folder / "model.safetensors").write_bytes(safetensors(weights, metadata))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def quantised(method: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {**CONFIG, "quantization_config": dict(method), **more}


def ollama_model(
    store: Path, name: str, layers: Mapping[str, bytes], config: Mapping[str, Any] | None = None
) -> dict[str, Path]:
    """A manifest under `name` (host/namespace/model/tag) and its blobs, which are returned by kind of layer."""
    blobs, listed = {}, []
    for kind, content in layers.items():
        blob = _blob(store, content)
        blobs[kind] = blob
        digest = blob.name.replace("-", ":")
        media = f"application/vnd.ollama.image.{kind}"
        listed.append({"mediaType": media, "digest": digest, "size": len(content)})
    described = _blob(store, json.dumps(config or {}).encode())
    manifest = store / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    reference = {"digest": described.name.replace("-", ":")}
    manifest.write_text(json.dumps({"schemaVersion": 2, "config": reference, "layers": listed}))
    return blobs


def _blob(store: Path, content: bytes) -> Path:
    blob = store / "blobs" / f"sha256-{hashlib.sha256(content).hexdigest()}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    return blob
