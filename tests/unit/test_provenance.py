"""Hashes of model files: manifests, the lock file, what a configuration may load, and `sekisho models lock`."""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.formats import UnreadableModel
from backends.formats.manifest import MAX_DEPTH, fingerprint
from backends.llamacpp.errors import EngineBroken, UsageProblem
from backends.llamacpp.weights import checked
from gateway.config import Config, ConfigError
from gateway.discovery import Discovery
from gateway.provenance import Reading, beyond_reach, without_hash
from gateway.provenance.lockfile import LockedFile, LockedModel, key_of, read_lock, render, write_lock, written
from gateway.snapshot import compile_config
from tests.command_line import Run, runner
from tests.unit._model_files import LLAMA, gguf, hf_folder
from tests.unit.test_discovery import look, names

TINY = gguf(LLAMA)
SPLIT = "tiny-0000{}-of-00002.gguf"


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def shell(script: str, folder: Path) -> str:
    """The first word that a command prints, which is the hash."""
    done = subprocess.run(["bash", "-c", script], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.split()[0]


def split(folder: Path) -> Path:
    """A model in two parts, as far as headers tell."""
    for part in (1, 2):
        pairs = LLAMA if part == 1 else {}
        (folder / SPLIT.format(part)).write_bytes(gguf(pairs, [(f"blk.{part}.weight", (256, part), 1)]))
    return folder / SPLIT.format(1)


# --- manifests
def test_a_file_goes_by_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"abc")
    (tmp_path / "link.gguf").symlink_to("a.gguf")
    found = fingerprint(tmp_path / "a.gguf")
    assert (found.sha256, found.size, [one.name for one in found.files]) == (sha(b"abc"), 3, ["a.gguf"])
    assert fingerprint(tmp_path / "link.gguf").sha256 == sha(b"abc")


def test_the_shell_comes_to_the_same_for_a_folder(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "model")
    for name in ("a/b", "a-b", "a b", ".hidden", "ünï/模型", "a/é", "Z", "'quote'", "*", "empty"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("" if name == "empty" else name)
    (folder / "link").symlink_to("a/b")
    (folder / "nothing" / "here").mkdir(parents=True)
    script = r"find -L . -type f -printf '%P\0' | LC_ALL=C sort -z | xargs -0 sha256sum -- | sha256sum"
    found = fingerprint(folder)
    assert found.sha256 == shell(script, folder)
    listed = [one.name for one in found.files]
    assert "link" in listed and ".hidden" in listed and listed == sorted(listed, key=str.encode)


def test_the_shell_comes_to_the_same_for_a_split_file(tmp_path: Path) -> None:
    first = split(tmp_path)
    expected = shell("sha256sum tiny-*-of-00002.gguf | sha256sum", tmp_path)
    assert fingerprint(first).sha256 == expected
    assert fingerprint(tmp_path / SPLIT.format(2)).sha256 == expected


@given(st.dictionaries(st.text("ab/é模-. ", min_size=1, max_size=6), st.binary(max_size=3), min_size=1, max_size=5))
def test_every_change_of_a_folder_changes_its_hash(tmp_path_factory: Any, files: dict[str, bytes]) -> None:
    folder = tmp_path_factory.mktemp("model")
    for number, (name, content) in enumerate(files.items()):
        # A folder of its own for each: one file's name must not be another one's folder.
        path = folder / str(number) / name.replace("/", "_").replace(".", "·")
        path.parent.mkdir()
        path.write_bytes(content)
    before = fingerprint(folder).sha256
    assert fingerprint(folder).sha256 == before
    victim = sorted(path for path in folder.rglob("*") if path.is_file())[0]
    content = victim.read_bytes()
    victim.write_bytes(content + b"x")
    assert fingerprint(folder).sha256 != before
    victim.write_bytes(content)
    renamed = victim.rename(victim.with_name("renamed"))
    assert fingerprint(folder).sha256 != before
    renamed.rename(victim)
    (folder / "more").write_bytes(b"")
    assert fingerprint(folder).sha256 != before
    (folder / "more").unlink()
    assert fingerprint(folder).sha256 == before


def test_exchanged_parts_are_another_model(tmp_path: Path) -> None:
    first, second = split(tmp_path), tmp_path / SPLIT.format(2)
    before = fingerprint(first)
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two), second.write_bytes(one)
    after = fingerprint(first)
    assert {file.sha256 for file in after.files} == {file.sha256 for file in before.files}
    assert after.sha256 != before.sha256


def test_what_has_no_hash(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()

    def refused(words: str) -> None:
        with pytest.raises(UnreadableModel, match=words):
            fingerprint(folder)

    refused("an empty folder")
    (folder / "a").write_bytes(b"a")
    odd = folder / "odd"

    os.mkfifo(odd)
    refused("odd: neither a file nor a folder")
    odd.unlink()

    (tmp_path / "outside").write_bytes(b"x")
    for target in ("../outside", "/etc/passwd"):
        odd.symlink_to(target)
        refused("odd: a link that leads out of the model's folder")
        odd.unlink()

    (folder / "inner").mkdir()
    odd.symlink_to("inner")
    refused("odd: a link to a folder")
    odd.unlink()

    odd.symlink_to("nowhere")
    refused("no such file")
    odd.unlink()

    for name in (b"back\\slash", b"new\nline", b"\xff\xfe", b"del\x7f"):
        path = os.path.join(os.fsencode(folder), name)
        with open(path, "wb"):
            pass
        refused("its name holds")
        os.unlink(path)

    deep = folder.joinpath(*["d"] * (MAX_DEPTH + 1))
    deep.mkdir(parents=True)
    refused("folders deep")
    with pytest.raises(UnreadableModel, match="no such file"):
        fingerprint(tmp_path / "nowhere.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(UnreadableModel, match="not a regular file"):
        fingerprint(tmp_path / "pipe.gguf")


def test_a_missing_part(tmp_path: Path) -> None:
    first = split(tmp_path)
    (tmp_path / SPLIT.format(2)).unlink()
    with pytest.raises(UnreadableModel, match="00002-of-00002"):
        fingerprint(first)


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(bytes(3 << 20))

    def grow(_: int) -> None:
        with path.open("ab") as file:
            file.write(b"x")

    with pytest.raises(UnreadableModel, match="changed while it was read"):
        fingerprint(path, grow)
    seen: list[int] = []
    fingerprint(path, seen.append)
    assert sum(seen) == path.stat().st_size and len(seen) > 2


def test_hashing_can_be_given_up(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(bytes(64 << 20))
    seen: list[int] = []

    def interrupt(count: int) -> None:
        seen.append(count)
        if len(seen) == 3:
            raise KeyboardInterrupt
        time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        fingerprint(tmp_path, interrupt)
    assert len(seen) < 60  # one file alone is 64 pieces


# --- what the engine loads
def test_without_a_hash_any_file_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(TINY)
    with checked(str(tmp_path / "tiny.gguf"), None) as files:
        assert files == (str(tmp_path / "tiny.gguf"),)
    with checked(str(tmp_path), None) as files:
        assert files == (str(tmp_path / "tiny.gguf"),)


def test_another_model_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(TINY)
    for wrong in (TINY[:-1], TINY[:-1] + b"\1", TINY + b"\0"):
        path.write_bytes(wrong)
        with pytest.raises(UsageProblem, match=sha(wrong)), checked(str(path), sha(TINY)):
            raise AssertionError("was let in")
    path.write_bytes(TINY)
    with checked(str(path), sha(TINY).upper()) as (name,):
        assert Path(name).read_bytes() == TINY


def test_a_file_that_is_put_in_its_place_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(TINY)
    loaded: list[bytes] = []
    with pytest.raises(EngineBroken, match="changed"), checked(str(path), sha(TINY)) as (name,):
        (tmp_path / "evil").write_bytes(b"GGUF evil")
        (tmp_path / "evil").rename(path)
        loaded.append(Path(name).read_bytes())  # as llama.cpp would
    assert path.read_bytes() == b"GGUF evil" and loaded == [TINY]


def test_a_file_that_is_put_in_its_place_is_noticed_where_it_could_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backends.llamacpp.weights._DESCRIPTORS", tmp_path / "no-proc")
    path = tmp_path / "tiny.gguf"
    path.write_bytes(TINY)
    with checked(str(path), sha(TINY)) as (name,):
        assert name == str(path)
    with pytest.raises(EngineBroken, match="changed while it was loaded"), checked(str(path), sha(TINY)):
        (tmp_path / "evil").write_bytes(TINY)
        (tmp_path / "evil").rename(path)


def test_a_file_that_is_written_to_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(TINY)
    times = path.stat()
    with pytest.raises(EngineBroken, match="changed while it was loaded"), checked(str(path), sha(TINY)):
        with path.open("r+b") as file:
            file.write(b"GGUF")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # the time of the last change stays


def test_all_parts_and_all_files_of_a_folder_count(tmp_path: Path) -> None:
    first = split(tmp_path)
    hashes = {str(first): fingerprint(first).sha256, str(tmp_path): fingerprint(tmp_path).sha256}
    for path, known in hashes.items():
        with checked(path, known) as files:
            assert [Path(name).read_bytes() for name in files] == [
                (tmp_path / SPLIT.format(part)).read_bytes() for part in (1, 2)
            ]
    second = tmp_path / SPLIT.format(2)
    second.write_bytes(second.read_bytes()[:-1] + b"x")
    for path, known in hashes.items():
        with pytest.raises(UsageProblem, match="sha256"), checked(path, known):
            raise AssertionError("was let in")


# --- the lock file
def entry(path: str = "a.gguf", **more: Any) -> LockedModel:
    return LockedModel(path=path, sha256=sha(b"a"), size=1, **more)


names_of_files = st.text(st.characters(blacklist_categories=("Cs",)), min_size=1, max_size=20)


@given(names_of_files, names_of_files)
def test_any_name_comes_back(tmp_path_factory: Any, name: str, label: str) -> None:
    one = entry("/" + name.replace("\0", ""), quantization=label)
    parsed = tomllib.loads(render([one]))["model"][0]
    assert (parsed["path"], parsed["quantization"]) == (one.path, label)


def test_text_does_not_depend_on_order(tmp_path: Path) -> None:
    one, other = entry("b"), entry("a")
    assert render([one, other]) == render([other, one])
    assert write_lock(tmp_path / "l", render([one])) and not write_lock(tmp_path / "l", render([one]))
    assert list(tmp_path.iterdir()) == [tmp_path / "l"]
    assert set(read_lock(tmp_path / "l")) == {str(tmp_path / "b")}


def test_the_mode_of_a_lock_file_stays(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_lock(tmp_path / "l", "a")
        assert (tmp_path / "l").stat().st_mode & 0o777 == 0o640
        (tmp_path / "l").chmod(0o604)
        write_lock(tmp_path / "l", "b")
        assert (tmp_path / "l").stat().st_mode & 0o777 == 0o604
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("key", "folder", "name"),
    [
        ("/srv/sekisho/models/a", "/srv/sekisho", "models/a"),
        ("/srv/models/a", "/srv/sekisho", "../models/a"),
        ("/data/models/a", "/srv/sekisho", "/data/models/a"),
        ("/models/a", "/etc", "/models/a"),
        ("/etc/a", "/etc", "a"),
    ],
)
def test_names_in_a_lock_file(key: str, folder: str, name: str) -> None:
    assert written(key, Path(folder)) == name
    assert key_of(name, Path(folder)) == key


FILES = (LockedFile(name="a", size=1, sha256=sha(b"a")),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("version = 1\n[[model]\n", "models.lock:2: not TOML"),
        ("", "version: this version of Sekisho reads 1 only"),
        ("version = 2\n", "version: this version of Sekisho reads 1 only, update"),
        ("version = 1\nmodels = []\n", "models.lock: models: extra inputs"),
        ("version = 1\n[[model]]\npath = 'a'\nsha256 = 'x'\nsize = 1\n", "model.0.sha256"),
        ("version = 1\n[[model]]\npath = 'a'\nsize = 1\n", "model.0.sha256"),
        (render([entry("a"), entry("./a")]), "the same path twice"),
        (render([entry("a", files=FILES)]), "is not that of its `files`"),
        ("version = 1\n# \xff", "not UTF-8"),
    ],
)
def test_damaged_lock_files(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "models.lock").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
        read_lock(tmp_path / "models.lock")
    assert words in str(caught.value) and len(str(caught.value).splitlines()) == 1


# --- what a configuration may load
CONFIG = """\
models:
  - name: m
    replicas:
      - {path: tiny.gguf, context_length: 512SHA}
provenance: {PROVENANCE}
"""


@pytest.fixture(name="home")
def _home(tmp_path: Path) -> Path:
    (tmp_path / "tiny.gguf").write_bytes(TINY)
    return tmp_path


def read(home: Path, provenance: str = "", own: str | None = None, more: str = "") -> Config:
    text = CONFIG.replace("PROVENANCE", provenance).replace("SHA", f", sha256: '{own}'" if own else "")
    (home / "gateway.yaml").write_text(text + more)
    return Reading().config(home / "gateway.yaml", {"llamacpp", "vllm"}, {})


def hash_in(config: Config) -> str | None:
    return config.models[0].replicas[0].sha256


def lock(home: Path, content: bytes = TINY, name: str = "models.lock", path: str = "tiny.gguf") -> None:
    one = LockedModel(path=path, sha256=sha(content), size=len(content))
    write_lock(home / name, render([one]))


def test_the_lock_file_gives_the_hash(home: Path) -> None:
    assert hash_in(read(home)) is None
    lock(home)
    config = read(home)
    assert hash_in(config) == sha(TINY) and config.provenance.lock_file == home / "models.lock"
    assert hash_in(read(home, "require_hashes: true")) == sha(TINY)
    assert hash_in(read(home, own=sha(TINY))) == sha(TINY)
    (home / "models.lock").rename(home / "other.toml")
    assert hash_in(read(home)) is None
    assert hash_in(read(home, "lock_file: other.toml")) == sha(TINY)


def test_a_folder_below_and_a_link_have_hashes_of_their_own(home: Path) -> None:
    (home / "link.gguf").symlink_to("tiny.gguf")
    lock(home, path="link.gguf")
    assert hash_in(read(home)) is None


@pytest.mark.parametrize(
    ("provenance", "own", "locked", "line"),
    [
        ("require_hashes: true", None, None, "gateway.yaml:4: models[0].replicas[0].path: "),
        ("require_hashes: true", None, "renamed.gguf", "no SHA-256 is known for it, give its `sha256`"),
        ("lock_file: nowhere.lock", None, None, "gateway.yaml:5: provenance.lock_file: no such file"),
        ("", "f" * 64, "tiny.gguf", "gateway.yaml:4: models[0].replicas[0].sha256: the lock file has another hash"),
    ],
)
def test_what_is_refused(home: Path, provenance: str, own: str | None, locked: str | None, line: str) -> None:
    if locked:
        lock(home, path=locked)
    with pytest.raises(ConfigError) as caught:
        read(home, provenance, own)
    assert line in str(caught.value) and len(caught.value.problems) == 1


@pytest.mark.parametrize("own", [None, sha(TINY)])
def test_a_file_that_was_cut_is_found_without_hashing_it(home: Path, own: str | None) -> None:
    lock(home)
    (home / "tiny.gguf").write_bytes(TINY[:-5])
    with pytest.raises(ConfigError, match=rf"it has {len(TINY) - 5} bytes, not the {len(TINY)} of the lock file"):
        read(home, own=own)


def test_nothing_without_a_hash_gets_past_the_compiler(home: Path) -> None:
    config = read(home)
    strict = config.model_copy(
        update={"provenance": config.provenance.model_copy(update={"require_hashes": True})}
    )
    assert not list(without_hash(config)) and len(list(without_hash(strict))) == 1
    with pytest.raises(ConfigError, match=r"no SHA-256 is known"):
        compile_config(strict, lambda _: None, home)  # type: ignore[arg-type, return-value]


def test_what_cannot_be_covered_is_said(home: Path) -> None:
    url = "discovery: [{backend: vllm, url: 'http://127.0.0.1:1'}]\n"
    assert beyond_reach(read(home, more=url)) == ""
    assert beyond_reach(read(home, "require_hashes: true", sha(TINY))) == ""
    said = beyond_reach(read(home, "require_hashes: true", sha(TINY), url))
    assert said.startswith("require_hashes does not cover 1 discovery entry(s) reached by url")


# --- folders
def scanned(home: Path, **provenance: Any) -> Config:
    return Config.model_validate({"discovery": [{"scan": str(home)}], "provenance": provenance})


def test_discovery_publishes_what_is_known(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    (home / "new.gguf").write_bytes(TINY)
    lock(home)
    file = str(home / "models.lock")
    discovery = Discovery(lambda: None)
    strict = scanned(home, require_hashes=True, lock_file=file)
    for _ in range(2):
        found = look(discovery, strict)
        assert names(found) == ["tiny"] and hash_in(found) == sha(TINY)
    assert [record.message for record in caplog.records] == [
        f"{home}/new.gguf is left out: no SHA-256 is known for it, give its `sha256`, or write it into the lock file "
        "with `sekisho models lock`"
    ]
    found = look(discovery, scanned(home, lock_file=file))
    assert {model.name: model.replicas[0].sha256 for model in found.models} == {"new": None, "tiny": sha(TINY)}


def test_discovery_leaves_out_what_was_cut_and_what_nobody_locked(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lock(home, TINY + b"x")
    given = scanned(home, lock_file=str(home / "models.lock"))
    assert names(look(Discovery(lambda: None), given)) == []
    assert names(look(Discovery(lambda: None), scanned(home, require_hashes=True))) == []
    assert [f"{len(TINY)} bytes" in caplog.text, "no SHA-256" in caplog.text] == [True, True]


def test_a_damaged_lock_file_leaves_discovery_as_it_was(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock(home)
    given, discovery = scanned(home, require_hashes=True, lock_file=str(home / "models.lock")), Discovery(lambda: None)
    assert names(look(discovery, given)) == ["tiny"]
    (home / "models.lock").write_text("damaged")
    assert names(look(discovery, given)) == ["tiny"]
    assert "not TOML" in caplog.text


# --- the command
@pytest.fixture(name="run")
def _run(capsys: pytest.CaptureFixture[str], home: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(home)
    monkeypatch.delenv("SEKISHO_CONFIG", raising=False)
    return runner(capsys)


@pytest.fixture(name="fleet")
def _fleet(home: Path) -> Path:
    """A configured file, and a scanned folder with a split one, a folder and something broken."""
    (home / "more").mkdir()
    split(home / "more")
    hf_folder(home / "more" / "weights")
    (home / "more" / "broken.gguf").write_bytes(b"GGUF\xff")
    read(home, more="discovery: [{scan: more}]\n")
    return home / "models.lock"


def test_lock_and_check(run: Run, fleet: Path, home: Path) -> None:
    code, out, err = run("models", "lock")
    assert (code, out) == (0, f"{fleet}: 3 model(s), 5 file(s)\n")
    assert err.startswith(f"{home}/more/broken.gguf is left out") and len(err.splitlines()) == 1
    text = fleet.read_text()
    given = tomllib.loads(text)["model"]
    assert [one["path"] for one in given] == ["more/tiny-00001-of-00002.gguf", "more/weights", "tiny.gguf"]
    assert given[2] == {
        "path": "tiny.gguf", "sha256": sha(TINY), "size": len(TINY), "format": "gguf", "quantization": "F16",
    }  # fmt: skip
    assert given[0]["sha256"] == shell("sha256sum tiny-*-of-00002.gguf | sha256sum", home / "more")
    code, out, _ = run("models", "lock", "--check")
    assert (code, out) == (0, f"{fleet}: 3 model(s), 5 file(s) are as they were\n")
    code, out, _ = run("models", "lock")
    assert code == 0 and "nothing has changed" in out and fleet.read_text() == text
    assert run("check")[0] == 0


def test_check_names_every_difference(run: Run, fleet: Path, home: Path) -> None:
    run("models", "lock")
    (home / "tiny.gguf").write_bytes(TINY[:-1])
    part = home / "more" / SPLIT.format(2)
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    (home / "more" / "weights" / "extra.json").write_text("{}")
    (home / "more" / "new.gguf").write_bytes(TINY)
    before = fleet.read_text()
    code, out, err = run("models", "lock", "--check")
    lines = [line for line in err.splitlines() if "is left out" not in line]
    assert (code, out, len(lines)) == (1, "", 4) and fleet.read_text() == before
    assert lines[0] == "more/new.gguf: not in the lock file"
    assert lines[1].startswith(f"more/tiny-00001-of-00002.gguf: {part.name}: has sha256 {sha(part.read_bytes())}, not ")
    assert lines[2] == "more/weights: extra.json was not there"
    assert lines[3] == f"tiny.gguf: has {len(TINY) - 1} bytes, not {len(TINY)}"
    (home / "more" / "weights" / "extra.json").unlink()
    (home / "more" / "weights").rename(home / "more" / "renamed")
    _, _, err = run("models", "lock", "--check")
    assert "more/renamed: not in the lock file\n" in err and "more/weights: in the lock file, and not in use\n" in err


def test_a_wrong_hash_in_the_configuration_is_not_locked_away(run: Run, home: Path) -> None:
    read(home, own="f" * 64)
    code, _, err = run("models", "lock")
    assert code == 1 and f"has {sha(TINY)}, and the configuration says {'f' * 64}" in err
    assert not (home / "models.lock").exists()


def test_what_the_command_needs(run: Run, home: Path) -> None:
    code, _, err = run("models", "lock")
    assert code == 2 and "no configuration" in err
    read(home)
    code, _, err = run("models", "lock", "--check")
    assert code == 2 and "models.lock: cannot be read" in err and len(err.splitlines()) == 1
    code, _, err = run("models", "lock", "--output", "nowhere/x")
    assert code == 2 and "name another file with --output" in err and len(err.splitlines()) == 1
    (home / "gateway.yaml").write_text(CONFIG.replace("PROVENANCE", "lock_file: locks.toml").replace("SHA", ""))
    code, out, _ = run("models", "lock")
    assert code == 0 and out.startswith(f"{home}/locks.toml: ")
    code, out, _ = run("models", "lock", "--output", "elsewhere.lock")
    assert code == 0 and (home / "elsewhere.lock").read_text() == (home / "locks.toml").read_text()
