"""GGUF headers: versions, byte orders, splits, and the numbers read from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backends.base import ModelFormat
from backends.formats import LayerCache, ModelFile, Role, UnreadableModel, inspect
from tests.unit._model_files import LLAMA, gguf


def read(tmp_path: Path, pairs: Any = None, *tensors: Any, name: str = "m.gguf", **more: Any) -> ModelFile:
    path = tmp_path / name
    path.write_bytes(gguf(LLAMA if pairs is None else pairs, *tensors, **more))
    return inspect(path)


def keys(architecture: str, **fields: Any) -> dict[str, Any]:
    """`a__b` stands for a.b."""
    base = {"block_count": 6, "embedding_length": 256, "attention__head_count": 8, "attention__head_count_kv": 2}
    named = {f"{architecture}.{key.replace('__', '.')}": value for key, value in {**base, **fields}.items()}
    return {"general.architecture": architecture, **{key: value for key, value in named.items() if value is not None}}


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("big_endian", [False, True])
def test_versions_and_byte_orders(tmp_path: Path, version: int, big_endian: bool) -> None:
    found = read(tmp_path, version=version, big_endian=big_endian)
    assert (found.format, found.role, found.name) == (ModelFormat.GGUF, Role.MODEL, "Tiny")
    assert (found.version, found.big_endian) == (version, big_endian)
    assert (found.architecture, found.context_length, found.quantisation) == ("llama", 4096, "F16")
    assert (found.parameters, found.weight_bytes) == (256_000, 512_000)
    assert found.chat_template
    geometry = found.geometry
    assert (geometry.layers, geometry.hidden, geometry.heads, geometry.kv_heads) == (4, 256, 8, 2)
    assert (geometry.key_length, geometry.value_length, geometry.vocabulary) == (32, 32, 3)
    assert geometry.cache == (LayerCache(4, 2 * 2 * 32),)


@pytest.mark.parametrize(("file_type", "label"), [(15, "Q4_K_M"), (1024 + 7, "Q8_0"), (38, "MXFP4_MOE"), (33, "Q4_K")])
def test_quantisation_label(tmp_path: Path, file_type: int, label: str) -> None:
    """The last one is a number that llama.cpp has taken back: then most weights decide."""
    tensors = [("a", (256, 8), 12), ("b", (256, 2), 14), ("c", (256,), 0)]
    found = read(tmp_path, LLAMA | {"general.file_type": file_type}, tensors)
    assert found.quantisation == label
    assert found.weight_bytes == 8 * 144 + 2 * 210 + 1024
    assert found.bits == pytest.approx((8 * 144 + 2 * 210 + 1024) * 8 / 2816, abs=0.01)


def test_label_from_the_name_when_there_is_nothing_else(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA, [], name="Tiny.Q5_K_M.gguf").quantisation == "Q5_K_M"


def test_heads_per_layer_and_sizes_of_their_own(tmp_path: Path) -> None:
    pairs = keys("openelm", attention__head_count=[4, 4, 8, 8, 8, 8], attention__head_count_kv=[1, 1, 2, 2, 2, 0],
                 attention__key_length=64, attention__value_length=32)  # fmt: skip
    geometry = read(tmp_path, pairs).geometry
    assert (geometry.heads, geometry.kv_heads) == (8, 2)
    assert geometry.cache == (LayerCache(2, 96), LayerCache(3, 192))


@pytest.mark.parametrize(("architecture", "pattern", "windowed"), [
    ("gemma3", None, 5),  # what llama.cpp assumes
    ("gemma3", 3, 4),  # the file's own period
    ("anything", [True, True, False], 4),  # layer by layer, repeated
    ("llama", None, 0),  # llama.cpp knows no pattern and ignores the window
])  # fmt: skip
def test_sliding_windows(tmp_path: Path, architecture: str, pattern: Any, windowed: int) -> None:
    pairs = keys(architecture, attention__sliding_window=512, attention__sliding_window_pattern=pattern)
    cache = read(tmp_path, pairs).geometry.cache
    assert cache is not None
    assert sum(group.layers for group in cache if group.window == 512) == windowed
    assert sum(group.layers for group in cache) == 6


def test_latent_attention_caches_no_values(tmp_path: Path) -> None:
    pairs = keys("deepseek2", attention__head_count_kv=1, attention__key_length=576, attention__value_length=512,
                 attention__key_length_mla=192, attention__kv_lora_rank=512)  # fmt: skip
    geometry = read(tmp_path, pairs).geometry
    assert geometry.latent == 512
    assert geometry.cache == (LayerCache(6, 576),)


def test_layers_without_a_cache_of_their_own(tmp_path: Path) -> None:
    assert read(tmp_path, keys("glm4moe", nextn_predict_layers=1)).geometry.cache == (LayerCache(5, 128),)
    assert read(tmp_path, keys("gemma3n", attention__shared_kv_layers=2)).geometry.cache == (LayerCache(4, 128),)
    assert read(tmp_path, keys("bert", attention__causal=False)).geometry.cache == ()


def test_recurrent_state(tmp_path: Path) -> None:
    ssm = {"ssm__inner_size": 512, "ssm__state_size": 16, "ssm__conv_kernel": 4}
    pure = read(tmp_path, keys("mamba", attention__head_count=0, attention__head_count_kv=None, **ssm)).geometry
    assert (pure.cache, pure.state_elements) == ((), 6 * (3 * 512 + 16 * 512))
    hybrid = read(tmp_path, keys("qwen3next", full_attention_interval=3, **ssm)).geometry
    assert (hybrid.cache, hybrid.state_elements) == ((LayerCache(2, 128),), 4 * (3 * 512 + 16 * 512))
    assert read(tmp_path, keys("rwkv7", attention__head_count=0, wkv__head_size=64)).geometry.state_elements > 0
    assert read(tmp_path, keys("lfm2", shortconv__l_cache=3)).geometry.state_elements > 0


def test_experts(tmp_path: Path) -> None:
    pairs = keys("qwen3moe", expert_count=128, expert_used_count=8, expert_feed_forward_length=768)
    geometry = read(tmp_path, pairs).geometry
    assert (geometry.experts, geometry.experts_used, geometry.feed_forward) == (128, 8, 8 * 768)


@pytest.mark.parametrize(("more", "name", "role"), [
    ({"general.type": "adapter", "adapter.type": "lora"}, "m.gguf", Role.ADAPTER),
    ({"general.type": "mmproj"}, "m.gguf", Role.PROJECTOR),
    ({"general.architecture": "clip"}, "m.gguf", Role.PROJECTOR),
    ({}, "mmproj-Tiny.gguf", Role.PROJECTOR),
    ({"llama.pooling_type": 3, "tokenizer.chat_template": ""}, "m.gguf", Role.EMBEDDING),
    ({"llama.pooling_type": 3}, "m.gguf", Role.MODEL),
    ({"llama.pooling_type": 4}, "m.gguf", Role.RERANK),
    ({"llama.attention.causal": False}, "m.gguf", Role.EMBEDDING),
])  # fmt: skip
def test_roles(tmp_path: Path, more: dict[str, Any], name: str, role: Role) -> None:
    assert read(tmp_path, LLAMA | more, name=name).role is role


def split(folder: Path, parts: int) -> list[Path]:
    paths = [folder / f"big-{part:05}-of-{parts:05}.gguf" for part in range(1, parts + 1)]
    for index, path in enumerate(paths):
        pairs = (LLAMA if index == 0 else {}) | {"split.no": index, "split.count": parts}
        path.write_bytes(gguf(pairs, [(f"t{index}", (256, 10), 1)]))
    return paths


def test_split_files_are_one_model(tmp_path: Path) -> None:
    paths = split(tmp_path, 3)
    found = inspect(paths[1])
    assert (found.path, found.files) == (paths[0], tuple(paths))
    assert (found.parameters, found.weight_bytes) == (3 * 2560, 3 * 5120)
    assert found.disk_bytes == sum(path.stat().st_size for path in paths)
    assert found == inspect(tmp_path)


def test_missing_parts(tmp_path: Path) -> None:
    paths = split(tmp_path, 3)
    paths[2].unlink()
    found = inspect(paths[0])
    assert found.problems == ("1 of 3 parts are missing, first big-00003-of-00003.gguf",)
    assert (found.parameters, found.weight_bytes) == (None, None)
    paths[0].unlink()
    with pytest.raises(UnreadableModel, match=r"the first part, big-00001-of-00003\.gguf, is missing"):
        inspect(paths[1])


def test_a_split_under_another_name(tmp_path: Path) -> None:
    split(tmp_path, 2)[0].rename(tmp_path / "renamed.gguf")
    assert "header says 2 parts" in inspect(tmp_path / "renamed.gguf").problems[0]


def test_names_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    found = read(tmp_path, LLAMA | {"general.name": "a\x1b[2Jb\nc"})
    assert found.name == "a?[2Jb?c"
