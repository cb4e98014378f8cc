"""From named paths to models: folders of files, Ollama's store, and file systems laid as traps."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from backends.base import ModelFormat
from backends.formats import ModelFile, Role, Unreadable, UnreadableModel, inspect, reading, scan, walk
from tests.unit._model_files import LLAMA, gguf, hf_folder, ollama_model, safetensors

LIBRARY = "registry.ollama.ai/library"


def found(*paths: Path) -> tuple[list[ModelFile], list[Unreadable]]:
    results = list(scan(paths))
    unreadable = [one for one in results if isinstance(one, Unreadable)]
    return [one for one in results if isinstance(one, ModelFile)], unreadable


def test_everything_below_a_folder(tmp_path: Path) -> None:
    hf_folder(tmp_path / "b" / "hf")
    (tmp_path / "a.gguf").write_bytes(gguf(LLAMA))
    (tmp_path / "mmproj-a.gguf").write_bytes(gguf({"general.architecture": "clip"}))
    (tmp_path / "c").mkdir()
    for part in (1, 2):
        (tmp_path / "c" / f"s-{part:05}-of-00002.gguf").write_bytes(gguf(LLAMA, [("t", (256, 2), 1)]))
    (tmp_path / "c" / "broken.gguf").write_bytes(b"GGUF")
    (tmp_path / "c" / "notes.txt").write_text("not a model")
    (tmp_path / "c" / "lone.safetensors").write_bytes(safetensors({"x": ("F16", (2, 2))}))
    models, unreadable = found(tmp_path)
    assert [(model.path.relative_to(tmp_path).as_posix(), model.role) for model in models] == [
        ("a.gguf", Role.MODEL),
        ("mmproj-a.gguf", Role.PROJECTOR),
        ("b/hf", Role.MODEL),
        ("c/s-00001-of-00002.gguf", Role.MODEL),
        ("c/lone.safetensors", Role.UNKNOWN),
    ]
    assert [(one.path.name, one.reason) for one in unreadable] == [("broken.gguf", "cut off in its header")]


def test_one_folder_one_model(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(gguf(LLAMA))
    (tmp_path / "mmproj.gguf").write_bytes(gguf(LLAMA))
    assert inspect(tmp_path).path == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(gguf(LLAMA))
    with pytest.raises(UnreadableModel, match="holds 2 GGUF models: name one"):
        inspect(tmp_path)


def test_named_files_that_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("hello")
    models, unreadable = found(tmp_path / "x.txt", tmp_path / "absent", tmp_path / "nul\0byte")
    assert models == []
    assert [one.reason for one in unreadable] == ["not a model file", "no such file or directory", "embedded null byte"]


def test_ollama_store(tmp_path: Path) -> None:
    model = gguf(LLAMA | {"tokenizer.chat_template": ""})
    blobs = ollama_model(tmp_path, f"{LIBRARY}/llama3/latest", {"model": model, "template": b"x", "projector": b"y"})
    ollama_model(tmp_path, "registry.ollama.ai/me/tuned/8b", {"model": model})
    ollama_model(tmp_path, "hub.example/team/other/q4", {"model": model})
    config = {"model_family": "qwen3", "file_type": "bf16", "context_length": 40960}
    ollama_model(tmp_path, f"{LIBRARY}/tensors/latest", {"tensor": b"12345678"}, config)
    ollama_model(tmp_path, f"{LIBRARY}/cloud/latest", {}, {"remote_host": "https://far.example"})
    models, unreadable = found(tmp_path)
    by_name = {model.name: model for model in models}
    assert set(by_name) == {
        "llama3:latest", "me/tuned:8b", "hub.example/team/other:q4", "tensors:latest", "cloud:latest"}
    llama = by_name["llama3:latest"]
    assert (llama.path, llama.format, llama.chat_template) == (blobs["model"], ModelFormat.GGUF, True)
    assert llama.notes == ("with a projector layer",)
    assert not by_name["me/tuned:8b"].chat_template
    tensors = by_name["tensors:latest"]
    assert (tensors.format, tensors.weight_bytes, tensors.context_length) == (ModelFormat.SAFETENSORS, 8, 40960)
    assert (by_name["cloud:latest"].format, by_name["cloud:latest"].notes) == (None, ("runs at https://far.example",))
    assert unreadable == []
    assert {model.name for model in found(tmp_path.parent)[0]} >= set(by_name)  # found below a folder too
    with pytest.raises(UnreadableModel, match="several models"):
        inspect(tmp_path)


def test_damaged_ollama_store(tmp_path: Path) -> None:
    blobs = ollama_model(tmp_path, f"{LIBRARY}/gone/latest", {"model": gguf(LLAMA)})
    blobs["model"].unlink()
    manifests = tmp_path / "manifests" / LIBRARY / "bad"
    manifests.mkdir()
    layer = '{"mediaType": "application/vnd.ollama.image.model", "digest": "../../x"}'
    (manifests / "escape").write_text(f'{{"layers": [{layer}]}}')
    (manifests / "shape").write_text('{"layers": 7, "config": []}')
    (manifests / "text").write_text("hello")
    (tmp_path / "manifests" / "loop").symlink_to(tmp_path / "manifests")
    models, unreadable = found(tmp_path)
    assert [model.notes for model in models] == [("holds no weights",)]
    assert sorted(one.reason for one in unreadable)[1:] == [
        "its blob sha256-" + blobs["model"].name[7:19] + "... is missing", "not JSON"]
    assert sorted(one.reason for one in unreadable)[0] == "a layer without a sha256 digest"


def test_pipes_and_devices_are_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "zero.gguf").symlink_to("/dev/zero")
    folder = hf_folder(tmp_path / "hf")
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    models, unreadable = found(tmp_path)
    assert models == []
    assert {(one.path.name, one.reason) for one in unreadable} == {
        (name, "not a regular file") for name in ("pipe.gguf", "zero.gguf", "config.json")}


def test_loops_of_links(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "m.gguf").write_bytes(gguf(LLAMA))
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "self.gguf").symlink_to(tmp_path / "self.gguf")
    models, unreadable = found(tmp_path, tmp_path)
    assert [model.path.name for model in models] == ["m.gguf"]
    assert [one.path.name for one in unreadable] == ["self.gguf"]


def test_depth_and_size_of_folders_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path.joinpath(*"abcdefghijklmn")
    deep.mkdir(parents=True)
    (deep / "m.gguf").write_bytes(gguf(LLAMA))
    assert found(tmp_path) == ([], [])
    monkeypatch.setattr(reading, "MAX_FOLDER_ENTRIES", 3)
    for index in range(5):
        (tmp_path / f"f{index}").touch()
    assert [one.reason for one in found(tmp_path)[1]] == ["more than 3 entries"]
    monkeypatch.undo()
    monkeypatch.setattr(walk, "MAX_ENTRIES", 3)
    assert [one.reason for one in found(tmp_path)[1]] == ["stopped after 3 entries"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_what_may_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf(LLAMA))
    (tmp_path / "m.gguf").chmod(0)
    (tmp_path / "closed").mkdir(mode=0)
    assert {one.reason for one in found(tmp_path)[1]} == {"permission denied"}
