"""The memory estimate: its arithmetic, and how close it comes to what llama.cpp allocates."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from backends.base import ModelFormat
from backends.formats import Geometry, KvType, LayerCache, ModelFile, Role, estimate, inspect

DEMO = Path(__file__).resolve().parents[2] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
MIB = 1 << 20
GEOMETRY = Geometry(layers=4, hidden=256, feed_forward=512, vocabulary=1000, cache=(LayerCache(4, 128),))
MODEL = ModelFile(
    Path("m.gguf"), "m", ModelFormat.GGUF, context_length=4096, weight_bytes=1_000_000, geometry=GEOMETRY)  # fmt: skip


def kv(model: ModelFile, context: int, sequences: int = 1, kind: KvType = KvType.F16) -> int | None:
    found = estimate(model, context=context, sequences=sequences, kv=kind)
    assert found is not None
    return found.kv_cache


def test_kv_cache() -> None:
    assert kv(MODEL, 1024) == 4 * 128 * 1024 * 2
    assert kv(MODEL, 1000, 3) == 3 * 4 * 128 * 1024 * 2  # llama.cpp pads each sequence to 256
    assert kv(MODEL, 1024, kind=KvType.FP8) == 4 * 128 * 1024
    assert kv(MODEL, 1024, kind=KvType.Q8_0) == 4 * 128 * 1024 * 34 // 32
    assert kv(replace(MODEL, format=ModelFormat.SAFETENSORS), 1000) == 4 * 128 * 1008 * 2  # blocks of 16


def test_sliding_windows() -> None:
    windowed = replace(MODEL, geometry=replace(GEOMETRY, cache=(LayerCache(3, 128, window=512), LayerCache(1, 128))))
    assert kv(windowed, 512) == 4 * 128 * 512 * 2
    assert kv(windowed, 4096) == 3 * 128 * (512 + 512) * 2 + 128 * 4096 * 2
    paged = replace(windowed, format=ModelFormat.SAFETENSORS)
    assert kv(paged, 4096) == 3 * 128 * (2560 + 16) * 2 + 128 * 4096 * 2


def test_default_context_and_total() -> None:
    found = estimate(MODEL)
    assert found is not None and found.context == 4096
    assert found.compute == 512 * 4 * 3 * (512 + 256) + 512 * 2 * 4096 + 4 * 1000  # the layer is the larger moment
    assert found.total == 1_000_000 + (found.kv_cache or 0) + found.compute
    long = estimate(replace(MODEL, context_length=1 << 20))
    assert long is not None and long.context == 8192


def test_recurrent_state_does_not_grow_with_the_context() -> None:
    recurrent = replace(MODEL, geometry=replace(GEOMETRY, cache=(), state_elements=1000))
    short, long = estimate(recurrent, context=100, sequences=2), estimate(recurrent, context=4000, sequences=2)
    assert short is not None and long is not None
    assert (short.state, short.kv_cache, short.total) == (8000, 0, long.total)


def test_unknown_is_not_zero() -> None:
    unsure = estimate(replace(MODEL, geometry=replace(GEOMETRY, cache=None)))
    assert unsure is not None and (unsure.kv_cache, unsure.total) == (None, None)
    assert unsure.weights == 1_000_000


def test_what_is_not_served_by_itself_has_no_estimate() -> None:
    for role in (Role.ADAPTER, Role.PROJECTOR, Role.UNKNOWN):
        assert estimate(replace(MODEL, role=role)) is None
    assert estimate(replace(MODEL, format=None)) is None
    with pytest.raises(ValueError, match="positive"):
        estimate(MODEL, sequences=0)


# In a process of its own: llama.cpp's log callback is global.
MEASURE = """
import ctypes, json, re, sys
import llama_cpp as lib
lines = []
@lib.llama_log_callback
def log(level, text, data): lines.append(text.decode("utf-8", "replace"))
lib.llama_log_set(log, ctypes.c_void_p(0))
def total(*kinds):
    return sum(float(size) for kind in kinds for size in re.findall(rf"^[^~]*{kind} buffer size\\s*= +([0-9.]+) MiB",
                                                                    "".join(lines), re.M))
model = lib.llama_model_load_from_file(sys.argv[1].encode(), lib.llama_model_default_params())
weights, measured = total("model"), []
for context, sequences, kv in json.loads(sys.argv[2]):
    lines.clear()
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.n_batch = context * sequences, sequences, 512
    params.swa_full, params.type_k, params.type_v = False, kv, kv
    made = lib.llama_init_from_model(model, params)
    measured.append([weights, total("KV"), total("compute", "output")])
    lib.llama_free(made)
print(json.dumps(measured))
"""


@pytest.mark.skipif(not DEMO.is_file() or find_spec("llama_cpp") is None, reason="needs the demo model and llama.cpp")
def test_against_llama_cpp() -> None:
    cases = [(512, 1, 1), (2048, 1, 1), (8192, 1, 1), (4096, 8, 1), (1024, 16, 1), (8192, 2, 8)]  # 1 = f16, 8 = q8_0
    command = [sys.executable, "-c", MEASURE, str(DEMO), json.dumps(cases)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    model = inspect(DEMO)
    for (context, sequences, kv), (weights, cache, compute) in zip(cases, json.loads(answer.stdout), strict=True):
        kind = KvType.Q8_0 if kv == 8 else KvType.F16
        found = estimate(model, context=context, sequences=sequences, kv=kind)
        assert found is not None and found.weights is not None and found.total is not None
        assert weights * cache * compute > 0
        assert found.weights / MIB == pytest.approx(weights, rel=0.01)
        assert (found.kv_cache or 0) / MIB == pytest.approx(cache, rel=0.01)
        assert found.total / MIB == pytest.approx(weights + cache + compute, rel=0.05)
