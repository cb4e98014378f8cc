"""Files made to break a parser: whatever the bytes, UnreadableModel or a model, in bounded time and memory."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.formats import ModelFile, UnreadableModel, estimate, gguf_header, inspect, support
from tests.unit._model_files import CONFIG, LLAMA, gguf, hf_folder, ollama_model, quantised, safetensors

MOST_MEMORY = 4 << 20  # bytes, for headers as small as these
FUZZ = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

VALID_GGUF = gguf(
    LLAMA | {"llama.attention.sliding_window_pattern": [True, False], "split.count": 1}, [("t", (256, 2), 1)])
VALID_SAFETENSORS = safetensors({"a.qweight": ("I32", (8, 8)), "b": ("BF16", (4,))}, {"format": "pt"})


def survives(path: Path) -> ModelFile | None:
    """Reads `path` under a memory limit; a model must also go through everything that is done with one."""
    tracemalloc.start()
    try:
        found = inspect(path)
        support(found)
        estimate(found, sequences=3)
        return found
    except UnreadableModel as error:
        assert error.reason and "\n" not in error.reason
        return None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MOST_MEMORY


def mutations(valid: bytes) -> st.SearchStrategy[bytes]:
    """Cut, overwrite or insert: also with the numbers that parsers fear."""
    feared = (0, 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1)
    fearful = st.sampled_from([struct.pack("<Q", number) for number in feared])

    def change(at: int, new: bytes, insert: bool, end: int) -> bytes:
        return (valid[:at] + new + valid[at if insert else at + len(new) :])[:end]

    places = st.integers(0, len(valid))
    return st.builds(change, places, st.binary(max_size=9) | fearful, st.booleans(), places | st.just(1 << 20))


@FUZZ
@given(data=st.binary(max_size=400).map(lambda tail: b"GGUF" + tail) | mutations(VALID_GGUF))
def test_gguf(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(data)
    survives(tmp_path / "m.gguf")


@FUZZ
@given(data=st.binary(max_size=400) | mutations(VALID_SAFETENSORS))
def test_safetensors(data: bytes, tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m", quantised({"quant_method": "awq", "bits": 4}))
    (folder / "model.safetensors").write_bytes(data)
    survives(folder)


VALID_INDEX = b'{"metadata": {"total_size": 272}, "weight_map": {"a.qweight": "model.safetensors"}}'


@FUZZ
@given(data=st.binary(max_size=100) | mutations(VALID_INDEX))
def test_indexes(data: bytes, tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_bytes(data)
    survives(folder)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = [*CONFIG, "text_config", "quantization", "quantization_config", "layer_types", "sliding_window", "head_dim",
          "kv_lora_rank", "id2label", "hybrid_override_pattern", "attn_layer_period", "attn_layer_offset", "dtype",
          "num_kv_shared_layers", "full_attention_interval", "multi_query", "global_head_dim", "max_window_layers",
          "linear_num_value_heads", "pretrained_config", "build_config", "mapping", "r", "auto_map"]  # fmt: skip
QUANTISATION = st.dictionaries(
    st.sampled_from(["quant_method", "bits", "group_size", "config_groups", "quant_algo", "format", "load_in_4bit"]),
    JSON | st.sampled_from(["awq", "gptq", "exl3", "compressed-tensors", "modelopt", 4]),
)


@FUZZ
@given(config=st.dictionaries(st.sampled_from(FIELDS), JSON | QUANTISATION), other=JSON)
def test_configurations(config: dict[str, Any], other: Any, tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m", CONFIG | config, None, None, hf_quant_config=other, tokenizer_config=other)
    survives(folder)
    (folder / "adapter_config.json").write_bytes(orjson.dumps(config))
    (folder / "rank0.engine").touch()
    survives(folder)


@FUZZ
@given(manifest=st.fixed_dictionaries({"layers": JSON | st.lists(JSON), "config": JSON}) | JSON)
def test_manifests(manifest: Any, tmp_path: Path) -> None:
    from backends.formats import scan

    ollama_model(tmp_path, "registry.ollama.ai/library/m/latest", {"model": VALID_GGUF})
    (tmp_path / "manifests/registry.ollama.ai/library/m/latest").write_bytes(orjson.dumps(manifest))
    list(scan([tmp_path]))


def test_every_truncation_of_a_header(tmp_path: Path) -> None:
    """Weights are not there, so nothing but the whole file may pass."""
    for valid, name in ((VALID_GGUF, "m.gguf"), (VALID_SAFETENSORS, "m.safetensors")):
        for end in range(0, len(valid), 3):
            (tmp_path / name).write_bytes(valid[:end])
            assert survives(tmp_path / name) is None


def head(version: int = 3, tensors: int = 0, pairs: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)


def pair(kind: int, value: bytes, key: bytes = b"k") -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


def tensor(dimensions: list[int], kind: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return struct.pack("<Q", 1) + b"t" + shape + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize(("data", "reason"), [
    (head(version=4), "GGUF version 4 is unknown"),
    (head(pairs=1_000_001), "claims 1000001 key-value pairs"),
    (head(tensors=2**63), "tensors"),
    (head(pairs=1) + pair(8, struct.pack("<Q", 16 << 20 | 1)), "a string of 16777217 bytes"),
    (head(pairs=1) + pair(8, struct.pack("<Q", 2**64 - 1)), "a string of"),
    (head(pairs=1) + struct.pack("<Q", 70_000), "a key of 70000 bytes"),
    (head(pairs=1) + pair(9, struct.pack("<IQ", 9, 1)), "an array of type 9"),
    (head(pairs=1) + pair(9, struct.pack("<IQ", 8, 2**40)), "arrays of 1099511627776 strings"),
    (head(pairs=1) + pair(9, struct.pack("<IQ", 4, 2**63)), "cut off in its header"),
    (head(pairs=1) + pair(99, b""), "value type 99 is unknown"),
    (head(pairs=1) + pair(4, struct.pack("<I", 0), b"general.alignment"), "general.alignment is 0"),
    (head(tensors=1) + tensor([2**40, 2**40]), "too large for any memory"),
    (head(tensors=1) + tensor([8] * 5), "5 dimensions"),
    (head(tensors=1) + tensor([8], kind=77), "tensor type 77 is unknown"),
    (head(tensors=1) + tensor([33], kind=2), "does not divide into blocks of Q4_0"),
    (head(tensors=1) + tensor([8], offset=2**63), "cut off: tensors end at byte"),
])  # fmt: skip
def test_gguf_limits(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(UnreadableModel) as caught:
        inspect(tmp_path / "m.gguf")
    assert reason in caught.value.reason


def test_header_larger_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_header, "MAX_HEADER_BYTES", 1 << 16)
    (tmp_path / "m.gguf").write_bytes(gguf(LLAMA | {"tokenizer.ggml.merges": ["x" * 100] * 1000}))
    with pytest.raises(UnreadableModel, match="header larger than 0 MiB"):
        inspect(tmp_path / "m.gguf")


def test_a_large_vocabulary_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    vocabulary = {"tokenizer.ggml.tokens": ["token"] * 200_000, "tokenizer.ggml.scores": [0.5] * 200_000}
    path.write_bytes(gguf(LLAMA | vocabulary))
    found = survives(path)
    assert found is not None and found.geometry.vocabulary == 200_000


def header(text: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text + data


def entry(**changes: Any) -> bytes:
    return orjson.dumps({"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes})


@pytest.mark.parametrize(("data", "reason"), [
    (struct.pack("<Q", 2**63), "cut off in its header"),
    (header(b"[]"), "not JSON"),
    (header(b'{"t": 5}'), "not JSON"),
    (header(b'{"t": {'), "not JSON"),
    (header(b'{"t": {"a": ' + b"[" * 60_000), "nested too deeply"),
    (header(b'{"t": {"a": "' + b"x" * 300_000), "too long"),
    (header(b'{"\xff": {}}'), "not UTF-8"),
    (header(b'{"__metadata__": {"a": [1]}}'), "metadata that is not text"),
    (header(entry(), b"1234"), "cut off: tensors end at byte 8 of the data, which has 4"),
    (header(entry(shape=[3]), b"12345678"), "shape and offsets disagree"),
    (header(entry(shape=[-1]), b"12345678"), "without dtype, shape or offsets"),
    (header(entry(shape=[2**60, 2**60]), b"12345678"), "too large for any memory"),
    (header(entry(data_offsets=[8, 0]), b"12345678"), "offsets that make no sense"),
    (header(entry(data_offsets=[True, 8]), b"12345678"), "without dtype, shape or offsets"),
    (header(b'{"t": {"shape": [' + b"9" * 5000 + b"]}}"), "not JSON"),
])  # fmt: skip
def test_safetensors_limits(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "m.safetensors").write_bytes(data)
    with pytest.raises(UnreadableModel) as caught:
        inspect(tmp_path / "m.safetensors")
    assert reason in caught.value.reason


def test_safetensors_header_over_the_limit(tmp_path: Path) -> None:
    with open(tmp_path / "m.safetensors", "wb") as file:
        file.write(struct.pack("<Q", 100_000_001))
        file.truncate(100_000_100)  # a hole: nothing is written
    with pytest.raises(UnreadableModel, match="header larger than 100 MB"):
        inspect(tmp_path / "m.safetensors")


EMPTY = b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'


@pytest.mark.parametrize("build", [
    lambda: b'{"__metadata__": {"log": "' + b"x" * 3_000_000 + b'"}, ' + EMPTY % 1 + b"}",
    lambda: b"{" + b" " * 3_000_000 + b"}",
    lambda: b"{" + b",".join(EMPTY % index for index in range(30_000)) + b"}",
])  # fmt: skip
def test_long_safetensors_headers_take_little_memory(tmp_path: Path, build: Callable[[], bytes]) -> None:
    (tmp_path / "m.safetensors").write_bytes(header(build()))
    tracemalloc.start()
    inspect(tmp_path / "m.safetensors")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


@pytest.mark.parametrize(("content", "reason"), [
    (b"{" + b" " * (16 << 20) + b"}", "larger than 16 MiB"),
    (b'{"a": [' + b"1," * 100_001 + b"1]}", "more than 100000 values"),
    (b'{"a": ' + b"[" * 50_000, "not JSON"),
    (b"\xff\xfe", "not JSON"),
])  # fmt: skip
def test_config_limits(tmp_path: Path, content: bytes, reason: str) -> None:
    folder = hf_folder(tmp_path / "m")
    (folder / "config.json").write_bytes(content)
    with pytest.raises(UnreadableModel) as caught:
        inspect(folder)
    assert reason in caught.value.reason
