"""Folders: what config.json and the headers of safetensors say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backends.base import ModelFormat
from backends.formats import LayerCache, Role, UnreadableModel, inspect
from tests.unit._model_files import CONFIG, hf_folder, quantised, safetensors

PACKED_INT32 = {
    "l.weight_packed": ("I32", (64, 32)), "l.weight_scale": ("BF16", (64, 2)), "l.weight_shape": ("I64", (2,)),
}  # fmt: skip


def test_plain(tmp_path: Path) -> None:
    found = inspect(hf_folder(tmp_path / "Tiny", tokenizer_config={"chat_template": "x"}))
    assert (found.format, found.role, found.name) == (ModelFormat.SAFETENSORS, Role.MODEL, "Tiny")
    assert (found.quantisation, found.architecture, found.context_length) == ("bf16", "LlamaForCausalLM", 4096)
    assert (found.parameters, found.weight_bytes) == (256_000, 512_000)
    assert found.chat_template
    assert found.geometry.cache == (LayerCache(4, 128),)


@pytest.mark.parametrize(("config", "tensors", "format_", "label", "parameters"), [
    ({"quant_method": "awq", "bits": 4, "group_size": 128},
     {"l.qweight": ("I32", (256, 32)), "l.qzeros": ("I32", (2, 32)), "l.scales": ("F16", (2, 256))},
     ModelFormat.AWQ, "awq 4-bit g128", 256 * 256),
    ({"w_bit": 4, "q_group_size": 64}, {"l.qweight": ("I32", (256, 32))}, ModelFormat.AWQ, "awq 4-bit g64", 256 * 256),
    ({"quant_method": "gptq", "bits": 3, "group_size": 128},
     {"l.qweight": ("I32", (24, 256)), "l.g_idx": ("I32", (256,)), "l.bias": ("F16", (256,))},
     ModelFormat.GPTQ, "gptq 3-bit g128", 256 * 256 + 256),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*": {"bits": 8}}}, {"l.qweight": ("I32", (32, 256))},
     ModelFormat.GPTQ, "gptq", None),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]},
     {"l.weight": ("F8_E4M3", (256, 256)), "l.weight_scale_inv": ("F32", (2, 2))},
     ModelFormat.FP8, "fp8", 256 * 256),
    ({"quant_method": "fbgemm_fp8"}, {"l.weight": ("F8_E4M3", (8, 8))}, ModelFormat.FP8, "fbgemm_fp8", 64),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized",
      "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}, PACKED_INT32,
     ModelFormat.COMPRESSED_TENSORS, "compressed-tensors pack-quantized 4-bit", 64 * 256),
    ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
      "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}, {"l.weight_packed": ("U8", (64, 32))},
     ModelFormat.COMPRESSED_TENSORS, "compressed-tensors nvfp4-pack-quantized 4-bit", 64 * 64),
    ({"quant_method": "compressed-tensors", "format": "mixed-precision",
      "config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}}}, PACKED_INT32,
     ModelFormat.COMPRESSED_TENSORS, "compressed-tensors mixed-precision", None),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
     {"l.weight": ("U8", (128, 1)), "l.weight.absmax": ("U8", (4,)), "l.weight.quant_map": ("F32", (16,)),
      "l.weight.quant_state.bitsandbytes__nf4": ("U8", (90,))},
     ModelFormat.BITSANDBYTES, "bitsandbytes nf4", 256),
    ({"load_in_8bit": True}, {"l.weight": ("I8", (16, 16)), "l.SCB": ("F32", (16,))},
     ModelFormat.BITSANDBYTES, "bitsandbytes int8", 256),
    ({"quant_method": "mxfp4"},
     {"e.gate_up_proj_blocks": ("U8", (2, 8, 4, 16)), "e.gate_up_proj_scales": ("U8", (2, 8, 4))},
     ModelFormat.MXFP4, "mxfp4", 2 * 8 * 4 * 32),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"},
     {"l.weight": ("U8", (16, 8)), "l.weight_scale": ("F8_E4M3", (16, 1)), "l.weight_scale_2": ("F32", ())},
     ModelFormat.NVFP4, "modelopt nvfp4", 256),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, {"l.weight": ("F8_E4M3", (8, 8))},
     ModelFormat.FP8, "modelopt fp8", 64),
    ({"quant_method": "exl2", "bits": 4.25}, {"l.q_weight": ("I32", (32, 256)), "l.q_scale": ("I32", (2, 32))},
     ModelFormat.EXL2, "exl2 4.25bpw", None),
    ({"quant_method": "exl3", "bits": 3.0, "head_bits": 6},
     {"l.trellis": ("I16", (16, 16, 48)), "l.suh": ("F16", (256,)), "l.svh": ("F16", (256,)), "l.mcg": ("I32", ())},
     ModelFormat.EXL3, "exl3 3bpw", 256 * 256),
    ({"quant_method": "auto-round", "bits": 4}, {"l.qweight": ("I32", (32, 8))},
     ModelFormat.SAFETENSORS, "auto-round 4-bit", 2048),
    ({"quant_method": "aqlm"}, {"l.codes": ("I16", (8, 8))}, ModelFormat.SAFETENSORS, "aqlm", None),
])  # fmt: skip
def test_quantisation(
    tmp_path: Path,
    config: dict[str, Any],
    tensors: dict[str, Any],
    format_: ModelFormat,
    label: str,
    parameters: int | None,
) -> None:
    found = inspect(hf_folder(tmp_path, quantised(config), tensors))
    assert (found.format, found.quantisation, found.parameters) == (format_, label, parameters)
    assert any("parameter count unknown" in note for note in found.notes) is (parameters is None)


def test_quantisation_in_other_places(tmp_path: Path) -> None:
    nested = {"model_type": "wrapped", "text_config": quantised({"quant_method": "awq", "bits": 4})}
    found = inspect(hf_folder(tmp_path / "a", nested, {"l.qweight": ("I32", (8, 8))}))
    assert (found.format, found.context_length, found.geometry.layers) == (ModelFormat.AWQ, 4096, 4)
    modelopt = {"quantization": {"quant_algo": "FP8"}}
    assert inspect(hf_folder(tmp_path / "b", hf_quant_config=modelopt)).format is ModelFormat.FP8


def test_mlx(tmp_path: Path) -> None:
    given = {"group_size": 64, "bits": 4, "lm_head": {"group_size": 64, "bits": 8}}
    config = CONFIG | {"quantization": given, "quantization_config": given}
    tensors = {"l.weight": ("U32", (64, 8)), "l.scales": ("F16", (64, 1)), "l.biases": ("F16", (64, 1)),
               "lm_head.weight": ("U32", (64, 8))}  # fmt: skip
    found = inspect(hf_folder(tmp_path / "q", config, tensors))
    assert (found.format, found.quantisation) == (ModelFormat.MLX, "mlx 4-bit g64 (layers differ)")
    assert found.parameters == 64 * 64 + 64 * 32
    mode = CONFIG | {"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}
    assert inspect(hf_folder(tmp_path / "m", mode, tensors)).quantisation == "mlx 4-bit g32 mxfp4"
    plain = inspect(hf_folder(tmp_path / "p", CONFIG, None, {"format": "mlx"}))
    assert (plain.format, plain.quantisation) == (ModelFormat.MLX, "bf16")


@pytest.mark.parametrize(("more", "cache"), [
    ({"sliding_window": 64, "use_sliding_window": False, "max_window_layers": 4}, ((4, 128, None),)),
    ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3}, ((3, 128, None), (1, 128, 64))),
    ({"model_type": "mistral", "sliding_window": 64}, ((4, 128, 64),)),
    ({"model_type": "gemma2", "sliding_window": 64}, ((2, 128, 64), (2, 128, None))),
    ({"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention", "linear_attention", "conv"]},
     ((1, 128, 64), (1, 128, None))),
    ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, ((4, 576, None),)),
    ({"head_dim": 64, "v_head_dim": 32}, ((4, 192, None),)),
    ({"num_key_value_heads": [1, 1, 2, 2]}, ((2, 64, None), (2, 128, None))),
    ({"num_key_value_heads": None, "multi_query": True}, ((4, 64, None),)),
    ({"num_key_value_heads": None}, ((4, 512, None),)),
    ({"num_kv_shared_layers": 3}, ((1, 128, None),)),
    ({"full_attention_interval": 4}, ((1, 128, None),)),
    ({"hybrid_override_pattern": "M-*-"}, ((1, 128, None),)),
    ({"attn_layer_period": 4, "attn_layer_offset": 1}, ((1, 128, None),)),
    ({"model_type": "xlm-roberta"}, ()),
])  # fmt: skip
def test_cache(tmp_path: Path, more: dict[str, Any], cache: tuple[Any, ...]) -> None:
    geometry = inspect(hf_folder(tmp_path, CONFIG | more)).geometry
    assert geometry.cache == tuple(LayerCache(*group) for group in cache)


def test_state_of_linear_attention(tmp_path: Path) -> None:
    linear = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
              "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "full_attention_interval": 4}  # fmt: skip
    geometry = inspect(hf_folder(tmp_path, CONFIG | linear)).geometry
    assert geometry.state_elements == 3 * (4 * 8 * 8 + 3 * (2 * 2 * 8 + 4 * 8))


def shards(folder: Path, count: int, index: bool = True) -> list[Path]:
    hf_folder(folder)
    (folder / "model.safetensors").unlink()
    paths = [folder / f"model-{part:05}-of-{count:05}.safetensors" for part in range(1, count + 1)]
    for path in paths:
        path.write_bytes(safetensors({path.stem: ("BF16", (10, 10))}))
    if index:
        content = {"weight_map": {path.stem: path.name for path in paths}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    return paths


@pytest.mark.parametrize("index", [True, False])
def test_shards(tmp_path: Path, index: bool) -> None:
    paths = shards(tmp_path, 3, index)
    (tmp_path / "consolidated.safetensors").write_bytes(safetensors({"same": ("BF16", (30, 10))}))
    assert (inspect(tmp_path).parameters, inspect(tmp_path).files) == (300, tuple(paths))
    paths[1].unlink()
    found = inspect(tmp_path)
    assert found.problems == ("1 weight files are missing, first model-00002-of-00003.safetensors",)
    assert found.weight_bytes is None


@pytest.mark.parametrize(("index", "reason"), [
    ('{"weight_map": {"a": "../../etc/secret.safetensors"}}', "outside its folder"),
    ('{"weight_map": {"a": {}}}', "outside its folder"),
    ('{"weight_map": ["a"]}', "not JSON"),
    ('{"metadata": {"total_size": 1}, "weight_map"', "not JSON"),
    (json.dumps({"weight_map": {str(part): f"{part}.safetensors" for part in range(1001)}}), "more than 1000"),
])  # fmt: skip
def test_index_limits(tmp_path: Path, index: str, reason: str) -> None:
    shards(tmp_path, 2)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UnreadableModel, match=reason):
        inspect(tmp_path)


def test_roles(tmp_path: Path) -> None:
    rerank = CONFIG | {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "no", "1": "yes"}}
    found = inspect(hf_folder(tmp_path / "r", rerank))
    assert (found.role, found.notes) == (Role.RERANK, ("a classifier with 2 labels",))
    assert inspect(hf_folder(tmp_path / "e", modules=[])).role is Role.EMBEDDING
    bert = CONFIG | {"model_type": "bert", "architectures": ["BertModel"]}
    assert inspect(hf_folder(tmp_path / "b", bert)).role is Role.EMBEDDING


def test_peft_adapter(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 16, "base_model_name_or_path": "org/m"}')
    (tmp_path / "adapter_model.safetensors").write_bytes(safetensors({"a.lora_A.weight": ("F16", (16, 64))}))
    found = inspect(tmp_path)
    assert (found.format, found.role, found.parameters) == (ModelFormat.LORA, Role.ADAPTER, 1024)
    assert found.notes == ("rank 16", "made for org/m")


def test_tensorrt(tmp_path: Path) -> None:
    engine, checkpoint = tmp_path / "engine", tmp_path / "checkpoint"
    engine.mkdir()
    pretrained = {"architecture": "LlamaForCausalLM", "dtype": "float16", "quantization": {"quant_algo": "FP8"},
                  "mapping": {"world_size": 2}, "num_hidden_layers": 4}  # fmt: skip
    config = {"pretrained_config": pretrained, "build_config": {"max_seq_len": 2048}}
    (engine / "config.json").write_text(json.dumps(config))
    (engine / "rank0.engine").write_bytes(b"\0" * 1000)
    found = inspect(engine)
    assert (found.format, found.quantisation, found.context_length) == (ModelFormat.TENSORRT, "fp8", 2048)
    assert found.problems == ("1 of 2 ranks are there",)
    checkpoint.mkdir()
    described = {"architecture": "OPTForCausalLM", "dtype": "float16", "max_position_embeddings": 512}
    (checkpoint / "config.json").write_text(json.dumps(described))
    (checkpoint / "rank0.safetensors").write_bytes(safetensors({"w": ("F16", (8, 8))}))
    found = inspect(checkpoint)
    assert (found.format, found.method, found.parameters) == (ModelFormat.TENSORRT, "checkpoint", 64)


def test_onnx(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"\x08\x07" + b"\0" * 98)
    (tmp_path / "model.onnx_data").write_bytes(b"\0" * 900)
    (tmp_path / "genai_config.json").write_text("{}")
    assert (inspect(tmp_path).format, inspect(tmp_path).weight_bytes) == (ModelFormat.ONNX, 1000)
    assert inspect(tmp_path / "model.onnx").weight_bytes == 100
    (tmp_path / "other.onnx").write_bytes(b"hello")
    with pytest.raises(UnreadableModel, match="not an ONNX model"):
        inspect(tmp_path / "other.onnx")


def test_recognised_and_served_by_nobody(tmp_path: Path) -> None:
    diffusers, pickled = tmp_path / "d", tmp_path / "p"
    diffusers.mkdir()
    (diffusers / "model_index.json").write_text("{}")
    pickled.mkdir()
    (pickled / "config.json").write_text(json.dumps(CONFIG))
    (pickled / "pytorch_model.bin").write_bytes(b"PK")
    for folder, word in ((diffusers, "diffusers"), (pickled, "pickled")):
        found = inspect(folder)
        assert (found.format, found.role) == (None, Role.UNKNOWN)
        assert word in found.notes[0]


def test_name_inside_a_hugging_face_cache(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "models--org--Tiny-1B" / "snapshots" / "abc123")
    assert inspect(folder).name == "org/Tiny-1B"


def test_folders_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(UnreadableModel, match="not a model folder"):
        inspect(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    (tmp_path / "model.safetensors").write_bytes(safetensors({}))
    with pytest.raises(UnreadableModel, match="not a JSON object"):
        inspect(tmp_path)
