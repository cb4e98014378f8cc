"""Models that are found rather than listed: at engines and in folders. And variants of one model."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.doubles.engine import Engine, Exchange
from tests.e2e.harness import ROOT, Gateway, Lab, base_config, chat, digest, eventually, free_port, replica
from tests.unit._model_files import LLAMA, gguf, hf_folder, quantised

GGUF = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
FAST = "200ms"
needs_weights = pytest.mark.skipif(not GGUF.exists(), reason="the demo model is not there; `make model` fetches it")


class Finds:
    """An engine whose list of models a test can change."""

    def __init__(self, engine: Engine, path: str, models: list[dict[str, Any]], key: str) -> None:
        self.engine, self.models, self._path, self._key = engine, models, path, key
        self.status = 200
        engine.probe = self._probe

    def _probe(self, x: Exchange) -> None:
        if x.request.target == self._path:
            x.reply({self._key: self.models, "object": "list"}, self.status)
        else:
            x.reply({"status": "ok", "version": "1"})


def ollama(lab: Lab, *names: str, **details: Any) -> Finds:
    return Finds(lab.engine("ollama"), "/api/tags", [ollama_entry(name, **details) for name in names], "models")


def ollama_entry(name: str, capabilities: tuple[str, ...] = ("completion", "tools"), **details: Any) -> dict[str, Any]:
    given = {"format": "gguf", "quantization_level": "Q4_K_M", "context_length": 8192} | details
    return {"name": name, "model": name, "size": 1, "details": given, "capabilities": list(capabilities)}


def vllm(lab: Lab, *names: str) -> Finds:
    entries = [{"id": name, "object": "model", "owned_by": "vllm", "max_model_len": 32768} for name in names]
    return Finds(lab.engine("vllm"), "/v1/models", entries, "data")


def entry(finds: Finds, backend: str, **more: Any) -> dict[str, Any]:
    return {"backend": backend, "url": finds.engine.url, "interval": FAST} | more


def listed(lab: Lab) -> dict[str, dict[str, Any]]:
    data = lab.gateway.get("/v1/models", key=lab.key).json()["data"]
    return {one["id"]: one for one in data}


def names_become(lab: Lab, *names: str) -> bool:
    return eventually(lambda: set(listed(lab)) == set(names))


def facts(model: dict[str, Any]) -> tuple[Any, ...]:
    return model["format"], model["quantization"], model["context_length"], model["capabilities"]


def lines(gateway: Gateway, text: str) -> int:
    return gateway.log().count(text)


# --- engines
def test_ollama(lab: Lab) -> None:
    finds = ollama(lab, "llama3:latest", "llama3:8b")
    finds.models.append(ollama_entry("nomic:latest", ("embedding",), quantization_level="F16", context_length=2048))
    lab.serve({}, discovery=[entry(finds, "ollama")])
    assert names_become(lab, "llama3:latest", "llama3:8b", "nomic:latest")
    # The window is not pinned to the longest one there is: the list shows it once the engine has been asked for it.
    assert eventually(lambda: listed(lab)["nomic:latest"]["context_length"] == 2048)
    assert eventually(lambda: facts(listed(lab)["llama3:8b"]) == ("gguf", "Q4_K_M", 8192, ["completion", "tools"]))
    assert facts(listed(lab)["nomic:latest"]) == ("gguf", "F16", 2048, ["embeddings"])


def test_a_name_without_a_tag_means_latest_and_no_other(lab: Lab) -> None:
    finds = ollama(lab, "llama3:latest", "llama3:8b", "qwen3:8b")
    finds.engine.script = lambda x: x.reply(
        {
            "model": x.request.json()["model"],
            "message": {"role": "assistant", "content": x.request.json()["model"]},
            "done": True,
            "done_reason": "stop",
        }
    )
    lab.serve({}, discovery=[entry(finds, "ollama")])
    assert names_become(lab, "llama3:latest", "llama3:8b", "qwen3:8b")
    answer = lab.chat("llama3").json()
    assert answer["model"] == "llama3" and answer["choices"][0]["message"]["content"] == "llama3:latest"
    assert "num_ctx" not in json.dumps(finds.engine.last().json())
    assert lab.chat("qwen3").error()["code"] == "model_not_found"
    finds.models.pop(0)
    assert names_become(lab, "llama3:8b", "qwen3:8b")
    assert lab.chat("llama3").status == 404


def test_lm_studio(lab: Lab) -> None:
    def model(key: str, **more: Any) -> dict[str, Any]:
        return {
            "type": "llm",
            "key": key,
            "quantization": {"name": "Q8_0"},
            "max_context_length": 4096,
            "format": "gguf",
            "capabilities": {"vision": True, "trained_for_tool_use": False},
        } | more

    finds = Finds(
        lab.engine("openai_compatible"),
        "/api/v1/models",
        [model("org/one"), model("mlx", format="mlx"), model("e", type="embedding")],
        "models",
    )
    lab.serve({}, discovery=[entry(finds, "lmstudio")])
    assert names_become(lab, "org/one", "mlx", "e")
    found = listed(lab)
    assert facts(found["org/one"]) == ("gguf", "Q8_0", 4096, ["vision"])
    assert found["mlx"]["format"] == "mlx" and found["e"]["capabilities"] == ["embeddings"]
    answer = lab.chat("org/one")
    assert answer.status == 200 and finds.engine.last().json()["model"] == "org/one"


def test_vllm_and_a_llama_server_that_is_a_router(lab: Lab) -> None:
    one = vllm(lab, "org/base")
    router = Finds(
        lab.engine("llama_server"),
        "/v1/models",
        [
            {
                "id": "a",
                "owned_by": "llamacpp",
                "status": {"value": "loaded"},
                "meta": {"n_ctx": 2048, "ftype": "Q4_0"},
            },
            {"id": "b", "owned_by": "llamacpp", "status": {"value": "unloaded"}},
        ],
        "data",
    )
    lab.serve({}, discovery=[entry(one, "vllm"), entry(router, "llama_server")])
    assert names_become(lab, "org/base", "a", "b")
    found = listed(lab)
    assert facts(found["org/base"]) == ("safetensors", None, 32768, [])
    assert facts(found["a"]) == ("gguf", "Q4_0", 2048, []) and facts(found["b"]) == ("gguf", None, None, [])
    assert lab.chat("b").status == 200 and router.engine.last().json()["model"] == "b"
    assert lab.stream("org/base").ended_well()


def test_models_come_and_go(lab: Lab) -> None:
    finds = vllm(lab, "a")
    lab.serve({}, discovery=[entry(finds, "vllm")])
    assert names_become(lab, "a")
    finds.models.append({"id": "b"})
    assert names_become(lab, "a", "b") and lab.chat("b").status == 200
    del finds.models[0]
    assert names_become(lab, "b") and lab.chat("a").error()["code"] == "model_not_found"


def test_prefix_allow_and_deny(lab: Lab) -> None:
    finds = vllm(lab, "llama-a", "llama-b", "qwen", "not a name", "at@sign")
    rules = {"name_prefix": "lab/", "allow": ["llama-*", "not?a?name", "*@*"], "deny": ["*-b"]}
    lab.serve({}, discovery=[entry(finds, "vllm", **rules)])
    assert names_become(lab, "lab/llama-a")
    answer = lab.chat("lab/llama-a")
    assert answer.json()["model"] == "lab/llama-a" and finds.engine.last().json()["model"] == "llama-a"
    assert lab.chat("llama-a").status == 404
    assert eventually(lambda: lines(lab.gateway, "'not a name', whose name") == 1)


def test_a_name_that_is_taken_is_left_out_with_one_line(lab: Lab) -> None:
    finds, mine = vllm(lab, "taken", "nick", "free"), lab.engine()
    lab.serve({"taken": {"replicas": [replica(mine)], "aliases": ["nick"]}}, discovery=[entry(finds, "vllm")])
    assert names_become(lab, "taken", "nick", "free")
    asked = len(finds.engine.probes)
    assert eventually(lambda: len(finds.engine.probes) > asked + 3)  # several rounds
    lab.chat("taken"), lab.chat("nick")
    assert len(mine.requests) == 2 and not finds.engine.requests
    for name in ("taken", "nick"):
        assert lines(lab.gateway, f"{name} is found again by the vllm at {finds.engine.url}") == 1


def test_join_makes_replicas_of_one_model(lab: Lab) -> None:
    finds, mine = vllm(lab, "m"), lab.engine()
    lab.serve(
        {"m": {"replicas": [replica(mine)], "policy": "round_robin"}}, discovery=[entry(finds, "vllm", join=True)]
    )
    assert eventually(lambda: len(lab.gateway.replicas()) == 2)
    assert {lab.chat("m").status for _ in range(4)} == {200}
    assert mine.requests and finds.engine.requests


def test_join_does_not_add_what_is_there_already(lab: Lab) -> None:
    finds = vllm(lab, "m", "other")
    own = {"backend": "vllm", "url": finds.engine.url}
    lab.serve({"m": [own]}, discovery=[entry(finds, "vllm", join=True)])
    assert names_become(lab, "m", "other")
    assert len(lab.gateway.replicas()) == 2


def test_an_engine_that_stops_answering_keeps_its_models(lab: Lab) -> None:
    finds = vllm(lab, "a")
    lab.serve({}, discovery=[entry(finds, "vllm")])
    assert names_become(lab, "a")
    finds.status = 500
    asked = len(finds.engine.probes)
    assert eventually(lambda: len(finds.engine.probes) > asked + 3)
    assert set(listed(lab)) == {"a"} and lab.chat("a").status == 200
    finds.engine.stop()
    assert eventually(lambda: lab.chat("a").status == 503)
    assert set(listed(lab)) == {"a"}
    lab.gateway.reload()
    assert set(listed(lab)) == {"a"} and lab.chat("a").status == 503


def test_an_engine_that_starts_late_is_found(lab: Lab) -> None:
    port = free_port()
    lab.serve({}, discovery=[{"backend": "openai_compatible", "url": f"http://127.0.0.1:{port}", "interval": FAST}])
    assert listed(lab) == {} and lab.chat("a").status == 404
    assert eventually(lambda: lines(lab.gateway, f"127.0.0.1:{port} does not list its models") == 1)


def test_a_reload_keeps_what_was_found(lab: Lab) -> None:
    finds = vllm(lab, "a")
    lab.serve({}, discovery=[entry(finds, "vllm", interval="1h")])
    assert names_become(lab, "a")
    finds.engine.once(lambda x: (x.begin(), x.delta("a"), x.pause(1.0), x.delta({}, "stop"), x.done()))  # type: ignore[arg-type, return-value, func-returns-value]
    with lab.gateway.wire() as wire:
        running = wire.ask("POST", "/v1/chat/completions", chat("a", stream=True), key=lab.key).until(1)
        finds.status = 503
        assert lab.gateway.reload().status_code == 200
        assert set(listed(lab)) == {"a"} and lab.chat("a").status == 200
        assert running.rest().ended_well()


def test_a_reload_that_fails_keeps_what_was_found(lab: Lab, tmp_path: Path) -> None:
    finds = vllm(lab, "a")
    lab.serve({}, discovery=[entry(finds, "vllm")])
    assert names_become(lab, "a")
    finds.status = 503
    broken = lab.config({"x": [{"path": str(hf_folder(tmp_path / "weights"))}]})
    lab.gateway.write(broken)
    assert lab.gateway.reload().status_code == 400
    asked = len(finds.engine.probes)
    assert eventually(lambda: len(finds.engine.probes) > asked + 3)
    assert set(listed(lab)) == {"a"} and lab.chat("a").status == 200


def test_allow_lists_hold_for_what_is_found(lab: Lab) -> None:
    finds = vllm(lab, "llama-a", "llama-b", "secret")
    lab.serve({}, allowed=["llama-*"], discovery=[entry(finds, "vllm")])
    assert names_become(lab, "llama-a", "llama-b")
    refused = lab.chat("secret").error()
    unknown = lab.chat("nothing").error()
    assert refused["code"] == unknown["code"] == "model_not_found"
    assert refused["message"].replace("secret", "nothing") == unknown["message"]
    assert lab.chat("llama-a").status == 200


def test_the_key_of_an_entry_is_sent(lab: Lab) -> None:
    finds = vllm(lab, "a")
    lab.serve({}, discovery=[entry(finds, "vllm", api_key="engine-key")])
    assert names_become(lab, "a") and lab.chat("a").status == 200
    assert finds.engine.last().values("authorization") == ["Bearer engine-key"]
    assert finds.engine.probes[0].values("authorization") == ["Bearer engine-key"]


# --- variants
@pytest.fixture
def mixed(lab: Lab) -> Iterator[tuple[Lab, dict[str, Engine]]]:
    """One model on five engines that differ in format and kind."""
    kinds = {"gguf": "llama_server", "awq": "vllm", "fp8": "vllm", "exl3": "openai_compatible", "mlx": "sglang"}
    engines = {name: lab.engine(kind) for name, kind in kinds.items()}
    replicas = [
        replica(engine, format=name, **({"quantization": "Q4_K_M"} if name == "gguf" else {}))
        | {"backend": kinds[name]}
        for name, engine in engines.items()
    ]
    lab.serve({"m": {"replicas": replicas, "aliases": ["nick"]}, "closed": replicas[:1]}, allowed=["m"])
    yield lab, engines


@pytest.mark.parametrize(
    ("variant", "able"),
    [
        ("gguf", {"gguf"}),
        ("GGUF", {"gguf"}),
        ("awq", {"awq"}),
        ("fp8", {"fp8"}),
        ("exl3", {"exl3"}),
        ("mlx", {"mlx"}),
        ("vllm", {"awq", "fp8"}),
        ("llama_server", {"gguf"}),
        ("q4_k_m", {"gguf"}),
        ("sglang", {"mlx"}),
    ],
)
def test_a_variant_is_served_by_the_replicas_that_match(
    mixed: tuple[Lab, dict[str, Engine]], variant: str, able: set[str]
) -> None:
    lab, engines = mixed
    for name in ("m", "nick"):
        for _ in range(4):
            answer = lab.chat(f"{name}@{variant}")
            assert answer.status == 200 and answer.json()["model"] == f"{name}@{variant}"
    assert lab.stream(f"m@{variant}").chunks_json()[0]["model"] == f"m@{variant}"
    assert {name for name, engine in engines.items() if engine.requests} <= able
    page = lab.gateway.metrics_page()
    assert "m@" not in page and "nick" not in page
    line = lab.gateway.access_line(str(answer.header("x-request-id")))
    assert (line["model"], line["asked"]) == ("m", f"nick@{variant}")


def test_an_unknown_variant_is_a_404_that_lists_what_exists(mixed: tuple[Lab, dict[str, Engine]]) -> None:
    lab, _ = mixed
    answer = lab.chat("m@exl2")
    assert (answer.status, answer.error()["code"]) == (404, "variant_not_found")
    for word in ("gguf", "q4_k_m", "llama_server", "awq", "vllm", "fp8", "exl3", "mlx", "sglang"):
        assert word in answer.error()["message"]


@pytest.mark.parametrize("variant", ["gguf", "nothing"])
def test_a_variant_of_a_model_one_may_not_use_does_not_exist(
    mixed: tuple[Lab, dict[str, Engine]], variant: str
) -> None:
    lab, _ = mixed
    refused, unknown = (lab.chat(f"{name}@{variant}") for name in ("closed", "absent"))
    assert (refused.status, unknown.status) == (404, 404)
    assert refused.error() | {"message": ""} == unknown.error() | {"message": ""}
    assert refused.error()["message"].replace("closed", "absent") == unknown.error()["message"]
    assert "llama_server" not in refused.error()["message"]


def test_a_variant_that_is_away_is_a_503_that_lists_what_exists(mixed: tuple[Lab, dict[str, Engine]]) -> None:
    lab, engines = mixed
    engines["exl3"].stop()
    answer = lab.chat("m@exl3")
    for _ in range(5):  # from "refuses connections" to "known to be down"
        answer = lab.chat("m@exl3")
        assert answer.status == 503 and answer.header("retry-after")
        assert "gguf" in answer.error()["message"] and "exl3" in answer.error()["message"]
    assert lab.chat("m").status == 200
    assert lab.chat("m@gguf").status == 200


def test_a_variant_has_an_entry_of_its_own(mixed: tuple[Lab, dict[str, Engine]]) -> None:
    lab, _ = mixed
    found = lab.gateway.get("/v1/models/m@awq", key=lab.key).json()
    assert (found["id"], found["format"]) == ("m@awq", "awq")
    assert lab.gateway.get("/v1/models/m@nope", key=lab.key).status_code == 404
    assert lab.gateway.get("/v1/models/closed@gguf", key=lab.key).json()["error"]["code"] == "model_not_found"


def test_variants_of_what_was_found(lab: Lab) -> None:
    small, full = ollama(lab, "m"), vllm(lab, "m")
    lab.serve({}, discovery=[entry(full, "vllm"), entry(small, "ollama", join=True)])
    assert eventually(lambda: len(lab.gateway.replicas()) == 2)
    assert lab.chat("m@safetensors").status == 200 and full.engine.requests and not small.engine.requests
    assert "q4_k_m" in lab.chat("m@x").error()["message"]


# --- files
KEY = "sk-files-" + "f" * 40
Start = Callable[..., Gateway]


def files_config(models: dict[str, Any], **more: Any) -> dict[str, Any]:
    tenant = {"name": "t", "models": ["*"], "keys": [{"name": "k", "sha256": digest(KEY)}]}
    return base_config(models, [tenant], **more)


def names(gateway: Gateway) -> set[str]:
    return {one["id"] for one in gateway.get("/v1/models", key=KEY).json()["data"]}


def says(gateway: Gateway, model: str) -> httpx.Response:
    body = chat(model, max_tokens=2, temperature=0)
    return gateway.http.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {KEY}"})


@needs_weights
def test_a_folder_is_published_and_served(start: Start, tmp_path: Path) -> None:
    """A GGUF answers; what does not fit and what the embedded engine cannot load is named in the log and left out."""
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "smol one.gguf").symlink_to(GGUF)
    wide = [("token_embd.weight", (256, 1 << 31), 1)]
    (folder / "huge.gguf").write_bytes(gguf(LLAMA, wide, data=False))
    with (folder / "huge.gguf").open("r+b") as sparse:
        sparse.truncate((1 << 40) + (1 << 20))
    hf_folder(folder / "awq-model", quantised({"quant_method": "awq", "bits": 4}))
    gateway = start(files_config({}, discovery=[{"scan": str(folder), "name_prefix": "disk/", "interval": "300ms"}]))
    (name,) = eventually(lambda: names(gateway))
    assert name == "disk/smol-one"
    found = gateway.get(f"/v1/models/{name}", key=KEY).json()
    assert (found["format"], found["quantization"], found["context_length"]) == ("gguf", "Q4_1", 8192)
    assert eventually(lambda: says(gateway, name).status_code == 200, timeout=60)
    answer = says(gateway, f"{name}@gguf").json()
    assert answer["model"] == f"{name}@gguf" and answer["usage"]["completion_tokens"] == 2
    log = gateway.log()
    assert log.count("is left out: it takes about 1024") == 1 and "memory" in log
    (line,) = [line for line in log.splitlines() if "awq-model" in line]
    assert "vllm" in line and "sglang" in line
    (folder / "smol one.gguf").unlink()
    assert eventually(lambda: not names(gateway)) or names(gateway) == set()
    assert gateway.process.poll() is None


@needs_weights
def test_a_found_file_that_cannot_be_loaded_does_not_end_the_gateway(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "bad.gguf").write_bytes(gguf(LLAMA))  # a header that is in order, and nothing that llama.cpp could load
    gateway = start(files_config({}, discovery=[{"scan": str(folder), "interval": "300ms"}]))
    assert eventually(lambda: names(gateway)) and eventually(lambda: "is down" in gateway.log())
    assert says(gateway, names(gateway).pop()).status_code == 503  # at once: nobody waits for what cannot come
    time.sleep(1)
    assert gateway.process.poll() is None


@needs_weights
def test_a_path_without_a_backend_is_served_by_its_format(start: Start, tmp_path: Path) -> None:
    """As Ollama keeps its files: named by their digest."""
    blob = tmp_path / "sha256-0123abcd"
    blob.symlink_to(GGUF)
    gateway = start(files_config({"smol": [{"path": str(blob), "context_length": 512, "parallel": 1}]}))
    assert eventually(lambda: says(gateway, "smol").status_code == 200, timeout=60)
    found = gateway.get("/v1/models/smol", key=KEY).json()
    assert (found["format"], found["quantization"], found["context_length"]) == ("gguf", "Q4_1", 512)


def test_a_path_that_the_embedded_engine_cannot_load_ends_the_start_and_names_engines(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "weights")
    config = tmp_path / "gateway.json"
    config.write_text(json.dumps(files_config({"m": [{"path": str(folder)}]})))
    for command in ("check", "serve"):
        done = subprocess.run(
            [sys.executable, "-m", "gateway", command, "--config", str(config)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 2, done
        assert "safetensors" in done.stderr and "vllm" in done.stderr and "Traceback" not in done.stderr
