"""Which quantisation a configuration declares, and how many logical weights its packed tensors stand for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from backends.base import ModelFormat
from backends.formats.reading import mapping, printable
from backends.formats.safetensors import Tensor

_FORMATS = {
    "awq": ModelFormat.AWQ, "gptq": ModelFormat.GPTQ, "fp8": ModelFormat.FP8, "fbgemm_fp8": ModelFormat.FP8,
    "compressed-tensors": ModelFormat.COMPRESSED_TENSORS, "bitsandbytes": ModelFormat.BITSANDBYTES,
    "mxfp4": ModelFormat.MXFP4, "exl2": ModelFormat.EXL2, "exl3": ModelFormat.EXL3,
}  # fmt: skip
_BITS = {"fp8": 8.0, "fbgemm_fp8": 8.0, "mxfp4": 4.0}

# Tensors beside the packed weights: scales, zero points, permutations. No parameters of the model.
_BESIDE = {
    "qzeros", "g_idx", "scales", "scale", "biases", "weight_scale", "weight_scale_2", "weight_scale_inv",
    "input_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale", "input_global_scale",
    "absmax", "quant_map", "nested_absmax", "nested_quant_map", "SCB", "weight_format", "suh", "svh", "mcg", "mul1",
    "q_scale", "q_scale_max", "q_groups", "q_invperm", "q_perm", "k_scale", "v_scale",
}  # fmt: skip
_WORDS = {"I32": 32, "U32": 32, "I16": 16, "U16": 16, "U8": 8, "I8": 8}
_TRELLIS_BLOCK = 256  # weights: EXL3 packs tiles of 16 x 16


@dataclass(frozen=True, slots=True)
class Quantisation:
    """What config.json, or hf_quant_config.json in its place, says about the weights."""

    format: ModelFormat
    method: str | None = None  # None = not quantised
    label: str | None = None
    bits: float | None = None  # None where layers differ, or where it is not said
    bits_by_layer: dict[str, float] = field(default_factory=dict)

    def logical(self, tensor: Tensor) -> int | None:
        """How many parameters a tensor stands for; None when that cannot be told."""
        stem, _, last = tensor.name.rpartition(".")
        if self.method is None:
            return 0 if tensor.dtype in _WORDS or tensor.dtype in ("I64", "U64", "BOOL") else tensor.elements
        if last in _BESIDE or last.endswith("_scales") or ".quant_state." in tensor.name:
            return 0
        if last == "trellis":
            return tensor.shape[0] * tensor.shape[1] * _TRELLIS_BLOCK if len(tensor.shape) == 3 else None
        if tensor.dtype not in _WORDS:
            return 0 if tensor.dtype in ("I64", "U64", "BOOL") else tensor.elements
        bits = self.bits_by_layer.get(stem, self.bits)
        if bits is None or last == "q_weight" or not bits.is_integer() or not 1 <= bits <= 8:
            return None
        return tensor.elements * _WORDS[tensor.dtype] // int(bits)


def quantisation_of(config: dict[str, Any], modelopt: dict[str, Any], metadata: dict[str, str]) -> Quantisation:
    """From config.json, hf_quant_config.json and the metadata of the first safetensors file."""
    declared = mapping(config.get("quantization_config"))
    declared = declared or mapping(mapping(config.get("text_config")).get("quantization_config"))
    mlx = mapping(config.get("quantization"))
    if ("bits" in mlx and "quant_method" not in declared) or metadata.get("format") == "mlx":
        return _mlx(mlx)
    method = printable(declared.get("quant_method"), 32) or _implied(declared, modelopt)
    if method is None:
        return Quantisation(ModelFormat.SAFETENSORS)
    if method.startswith("modelopt"):
        return _modelopt(method, declared, modelopt)
    bits = _bits(method, declared)
    known = _FORMATS.get(method.removesuffix("_marlin"), ModelFormat.SAFETENSORS)
    return Quantisation(known, method, _label(method, bits, declared), bits)


def _implied(declared: dict[str, Any], modelopt: dict[str, Any]) -> str | None:
    """The method of files from before configurations named it."""
    if declared.get("load_in_4bit") or declared.get("load_in_8bit"):
        return "bitsandbytes"
    if "w_bit" in declared or "zero_point" in declared:
        return "awq"
    return "modelopt" if "quant_algo" in declared or modelopt else None


def _bits(method: str, declared: dict[str, Any]) -> float | None:
    if method in _BITS:
        return _BITS[method]
    if method == "compressed-tensors":
        groups = mapping(declared.get("config_groups")).values()
        widths = {_number(mapping(mapping(group).get("weights")).get("num_bits")) for group in groups}
        return widths.pop() if len(widths) == 1 else None
    if method == "bitsandbytes":
        return 4.0 if declared.get("load_in_4bit") else 8.0 if declared.get("load_in_8bit") else None
    if method == "gptq" and declared.get("dynamic"):  # GPTQModel: rules that give layers other widths
        return None
    return _number(declared.get("bits", declared.get("w_bit")))


def _label(method: str, bits: float | None, declared: dict[str, Any]) -> str:
    words = [method]
    if method in ("exl2", "exl3"):
        return f"{method} {bits:g}bpw" if bits else method
    if method == "bitsandbytes":
        kind = printable(declared.get("bnb_4bit_quant_type"), 16) if bits == 4 else "int8" if bits == 8 else None
        return f"{method} {kind}" if kind else method
    if method == "compressed-tensors":
        words.append(printable(declared.get("format"), 32) or "")
    if bits and method not in _BITS:
        words.append(f"{bits:g}-bit")
    group = _number(declared.get("group_size", declared.get("q_group_size")))
    if group and group > 0:
        words.append(f"g{group:g}")
    return " ".join(word for word in words if word)


def _modelopt(method: str, declared: dict[str, Any], modelopt: dict[str, Any]) -> Quantisation:
    """NVIDIA's Model Optimizer: quant_algo is FP8, NVFP4, W4A16_AWQ, MIXED_PRECISION, ..."""
    given = mapping(modelopt.get("quantization"))
    algorithm = (printable(declared.get("quant_algo") or given.get("quant_algo"), 32) or "").upper()
    if algorithm.startswith("FP8"):
        return Quantisation(ModelFormat.FP8, method, f"modelopt {algorithm.lower()}", 8.0)
    if "NVFP4" in algorithm:
        return Quantisation(ModelFormat.NVFP4, method, f"modelopt {algorithm.lower()}", 4.0)
    bits = 4.0 if algorithm.startswith("W4") else 8.0 if algorithm.startswith("W8") else None
    return Quantisation(ModelFormat.SAFETENSORS, method, f"modelopt {algorithm.lower()}".strip(), bits)


def _mlx(declared: dict[str, Any]) -> Quantisation:
    bits, group = _number(declared.get("bits")), _number(declared.get("group_size"))
    if bits is None:
        return Quantisation(ModelFormat.MLX)
    by_layer = {
        layer: width
        for layer, given in declared.items()
        if (width := _number(mapping(given).get("bits"))) is not None
    }
    mode = printable(declared.get("mode"), 16) or "affine"
    words = ["mlx", f"{bits:g}-bit", f"g{group:g}" if group else "", "" if mode == "affine" else mode]
    label = " ".join(word for word in words if word) + (" (layers differ)" if by_layer else "")
    return Quantisation(ModelFormat.MLX, f"mlx {mode}", label, bits, by_layer)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1 << 20:
        return None
    return float(value)
