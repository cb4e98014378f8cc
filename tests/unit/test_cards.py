"""What engines say of their models, in their own words, and what becomes of it."""

import json
from typing import Any

import pytest

import backends
from backends import cards

Facts = tuple[str, int | None, str | None, str | None, tuple[str, ...]]


def read(kind: str, listing: Any) -> list[Facts]:
    found = backends.load(kind).read_models(json.dumps(listing).encode())
    return [(card.id, card.context_length, card.format, card.quantization, card.capabilities) for card in found]


def openai_list(*entries: dict[str, Any], owned_by: str = "x") -> dict[str, Any]:
    head = {"object": "model", "created": 1, "owned_by": owned_by}
    return {"object": "list", "data": [head | one for one in entries]}


def test_ollama() -> None:
    def entry(name: str, details: dict[str, Any], **more: Any) -> dict[str, Any]:
        family = {"parent_model": "", "family": "llama", "families": ["llama"], "parameter_size": "8.0B"}
        head = {"name": name, "model": name, "modified_at": "2026-08-21T10:00:00Z", "size": 1, "digest": "ab"}
        return head | {"details": family | details} | more

    listing = {
        "models": [
            entry(
                "llama3:latest",
                {"format": "gguf", "quantization_level": "Q4_K_M", "context_length": 8192},
                capabilities=["completion", "tools", "thinking"],
            ),
            entry(
                "nomic-embed-text:latest",
                {"format": "gguf", "quantization_level": "F16", "context_length": 2048},
                capabilities=["embedding"],
            ),
            entry("old:7b", {"format": "gguf", "quantization_level": "Q4_0"}),
            entry("mlx:latest", {"format": "safetensors", "quantization_level": "nvfp4"}, capabilities=["vision"]),
            entry("odd", {"format": 5, "quantization_level": "unknown", "context_length": "x"}, capabilities="tools"),
            {"name": "bare"},
            entry("big:cloud", {}, remote_model="big", remote_host="https://example.com:443"),
            {"no": "name"},
            7,
        ]
    }
    assert read("ollama", listing) == [
        ("llama3:latest", 8192, "gguf", "Q4_K_M", ("completion", "tools", "reasoning")),
        ("nomic-embed-text:latest", 2048, "gguf", "F16", ("embeddings",)),
        ("old:7b", None, "gguf", "Q4_0", ()),
        ("mlx:latest", None, "safetensors", "nvfp4", ("vision",)),
        ("odd", None, None, None, ()),
        ("bare", None, None, None, ()),
    ]


def test_lm_studio() -> None:
    def entry(key: str, **more: Any) -> dict[str, Any]:
        return {
            "type": "llm",
            "publisher": "p",
            "key": key,
            "display_name": "D",
            "architecture": "a",
            "quantization": {"name": "Q4_K_M", "bits_per_weight": 4},
            "size_bytes": 1,
            "params_string": "7B",
            "loaded_instances": [],
            "max_context_length": 131072,
            "format": "gguf",
            "capabilities": {"vision": False, "trained_for_tool_use": True},
        } | more

    loaded = [{"id": "a", "config": {"context_length": 8192}}, {"id": "b", "config": {"context_length": 4096}}]
    listing = {
        "models": [
            entry("qwen/qwen3-8b"),
            entry("loaded", loaded_instances=loaded),
            entry("mlx/gemma", format="mlx", quantization={"name": "4bit"}, capabilities={"vision": True}),
            entry("nomic", type="embedding", max_context_length=2048, capabilities=None),
            entry("bare", format=None, quantization=None, capabilities=None, max_context_length=None),
            {"key": 3},
            None,
        ]
    }
    assert read("lmstudio", listing) == [
        ("qwen/qwen3-8b", 131072, "gguf", "Q4_K_M", ("tools",)),
        ("loaded", 4096, "gguf", "Q4_K_M", ("tools",)),
        ("mlx/gemma", 131072, "mlx", "4bit", ("vision",)),
        ("nomic", 2048, "gguf", "Q4_K_M", ("embeddings",)),
        ("bare", None, None, None, ()),
    ]
    assert read("lmstudio", openai_list({"id": "jan"})) == [("jan", None, None, None, ())]


def test_llama_server_alone() -> None:
    meta = {"n_vocab": 49152, "n_ctx": 4096, "n_ctx_train": 8192, "n_embd": 576, "ftype": "Q4_K - Medium"}
    modalities = {"input_modalities": ["text", "image", "audio"]}
    listing = openai_list({"id": "smol", "meta": meta, "architecture": modalities})
    listing["models"] = [{"name": "smol", "model": "smol", "capabilities": ["completion", "multimodal"]}]
    assert read("llama_server", listing) == [("smol", 4096, "gguf", "Q4_K_M", ("completion", "vision", "audio"))]
    older = openai_list({"id": "smol", "meta": {"n_ctx_train": 8192}}, {"id": "null", "meta": None})
    assert read("llama_server", older) == [("smol", 8192, "gguf", None, ()), ("null", None, "gguf", None, ())]


def test_llama_server_as_a_router() -> None:
    def entry(name: str, value: str, *args: str) -> dict[str, Any]:
        return {"id": name, "path": f"/srv/{name}.gguf", "status": {"value": value, "args": ["llama-server", *args]}}

    listing = openai_list(entry("a", "loaded"), entry("b", "unloaded"), entry("e", "sleeping", "--embeddings"))
    assert read("llama_server", listing) == [
        ("a", None, "gguf", None, ()),
        ("b", None, "gguf", None, ()),
        ("e", None, "gguf", None, ("embeddings",)),
    ]


def test_vllm_and_sglang() -> None:
    base = {"id": "org/base", "root": "/srv/w", "parent": None, "max_model_len": 32768}
    adapter = {"id": "adapter", "root": "/srv/l", "parent": "org/base", "max_model_len": None}
    assert read("vllm", openai_list(base, adapter, owned_by="vllm")) == [
        ("org/base", 32768, None, None, ()),
        ("adapter", 32768, None, None, ()),
    ]
    assert read("sglang", openai_list(base, owned_by="sglang")) == [("org/base", 32768, None, None, ())]


def test_tabbyapi() -> None:
    loaded = {
        "id": "Llama-exl3",
        "object": "model",
        "owned_by": "tabbyAPI",
        "parameters": {"max_seq_len": 16384, "cache_size": 65536, "use_vision": True},
    }
    assert read("tabbyapi", loaded) == [("Llama-exl3", 16384, None, None, ("vision",))]
    assert read("tabbyapi", openai_list({"id": "x", "parameters": None})) == [("x", None, None, None, ())]
    assert backends.load("tabbyapi").probes.models == "/v1/model"


def test_embedded() -> None:
    entry = {"id": "m", "max_model_len": 2048, "meta": {"n_ctx_train": 8192, "quantization": "Q4_1"}}
    assert read("llamacpp", openai_list(entry)) == [("m", 2048, "gguf", "Q4_1", ())]
    assert read("llamacpp", openai_list(entry | {"capabilities": ["embeddings"]}))[0][-1] == ("embeddings",)


def test_another_gateway() -> None:
    entry = {"id": "m", "format": "AWQ", "quantization": "awq 4-bit", "context_length": 4096, "capabilities": ["tools"]}
    assert read("openai_compatible", openai_list(entry)) == [("m", 4096, "awq", "awq 4-bit", ("tools",))]
    for kind in ("mlx_lm", "tensorrt_llm"):
        assert read(kind, openai_list({"id": "m"})) == [("m", None, None, None, ())]


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("Q4_K - Medium", "Q4_K_M"),
        ("Q3_K - Small", "Q3_K_S"),
        ("Q8_0", "Q8_0"),
        ("  F16 ", "F16"),
        ("unknown", None),
        ("", None),
        (None, None),
        (4, None),
        ("a\nb", None),
        ("x" * 65, None),
    ],
)
def test_quantisations(said: object, meant: str | None) -> None:
    assert cards.quantisation(said) == meant


@pytest.mark.parametrize("given", [None, 5, "tools", ["a b", "", 7, "x" * 80, "é"], {"tools": "yes", "vision": 1}])
def test_hostile_capabilities(given: object) -> None:
    assert cards.capabilities(given) == ()
