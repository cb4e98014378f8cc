"""`sekisho scan`: the table, the JSON, problems on stderr, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command_line import Run, runner
from tests.unit._model_files import LLAMA, gguf, hf_folder, quantised


@pytest.fixture(name="run")
def _run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    return runner(capsys, "scan")


@pytest.fixture(name="models")
def _models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "tiny.gguf").write_bytes(gguf(LLAMA))
    (folder / "mmproj-tiny.gguf").write_bytes(gguf({"general.architecture": "clip", "general.name": "Eyes"}))
    awq = quantised({"quant_method": "awq", "bits": 4, "group_size": 128})
    hf_folder(folder / "Tiny-AWQ", awq, {"l.qweight": ("I32", (512, 512))})
    return folder


def rows(table: str) -> dict[str, list[str]]:
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if line.startswith("│")]
    return {row[0]: row[1:] for row in cells}


def test_table(run: Run, models: Path) -> None:
    code, out, err = run("models", "--context", "2048", "--sequences", "4")
    assert (code, err) == (0, "")
    assert rows(out) == {
        "Tiny": ["gguf", "F16", "256k", "4096", "500.0 KiB", "llamacpp, llama_server, ollama, lmstudio", "vllm, sglang",
                 "15.0 MiB at 2048 tokens x 4"],
        "Eyes": ["gguf (projector)", "F16", "256k", "", "500.0 KiB", "llama_server, ollama, lmstudio", "", ""],
        "Tiny-AWQ": ["awq", "awq 4-bit g128", "2.1M", "4096", "1.0 MiB", "vllm, sglang", "tensorrt_llm, mlx_lm",
                     "19.0 MiB at 2048 tokens x 4"],
    }  # fmt: skip


def test_json(run: Run, models: Path) -> None:
    code, out, err = run("--json", "models/tiny.gguf", "--context", "1024")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    (model,) = answer["models"]
    assert answer["problems"] == []
    assert (model["format"], model["quantisation"], model["parameters"]) == ("gguf", "F16", 256_000)
    assert model["engines"]["llamacpp"] == {"level": "native", "note": ""}
    assert model["engines"]["vllm"]["level"] == "experimental"
    assert model["geometry"]["cache"] == [{"layers": 4, "elements": 128, "window": None}]
    memory = model["memory_bytes"]
    assert (memory["context"], memory["weights"], memory["kv_cache"]) == (1024, 512_000, 4 * 128 * 1024 * 2)
    assert memory["total"] == memory["weights"] + memory["kv_cache"] + memory["state"] + memory["compute"]


def test_problems_go_to_stderr(run: Run, models: Path) -> None:
    (models / "broken.gguf").write_bytes(b"GGUF\3")
    (models / "part-00001-of-00002.gguf").write_bytes(gguf(LLAMA | {"general.name": "Half"}))
    code, out, err = run("models")
    assert code == 0
    assert err.splitlines() == [
        "models/broken.gguf: cut off in its header",
        "models/part-00001-of-00002.gguf: 1 of 2 parts are missing, first part-00002-of-00002.gguf"]
    assert rows(out)["Half"][5] == "none"
    code, out, err = run("models", "--json")
    assert [problem["reason"] for problem in json.loads(out)["problems"]] == [
        "cut off in its header", "1 of 2 parts are missing, first part-00002-of-00002.gguf"]


def test_exit_codes(run: Run, models: Path, tmp_path: Path) -> None:
    assert run("absent")[::2] == (2, "absent: no such file or directory\n")
    code, out, err = run("models", "absent")
    assert (code, err) == (2, "absent: no such file or directory\n")
    assert "Tiny" in rows(out)
    (tmp_path / "empty").mkdir()
    assert run("empty") == (2, "", "no models in empty\n")
    (tmp_path / "x\x1b.gguf").write_text("hello")
    assert run("x\x1b.gguf")[::2] == (2, "x?.gguf: not a GGUF file\n")
    assert run()[0] == 2
    assert run("models", "--context", "0")[0] == 2
    assert run("models", "--sequences", "0")[0] == 2
