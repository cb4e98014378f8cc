"""No row that was safe is lost, and none counts twice: real processes, killed with SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.spool import UsageSink
from gateway.spool.folder import Parcel, claim_dead, claim_new
from tests.usage.children import Child, add_and_close, child, keep_adding, meet_a_size_limit
from tests.usage.doubles import PATIENCE, QUICK, Database, eventually, names, outcomes, run

MOST_STEPS = 400


def recover(folder: Path, database: Database) -> None:
    """What the next start does."""

    async def work() -> None:
        sink = UsageSink(folder, lambda: database, None, QUICK)
        sink.start()
        await eventually(lambda: left_in(folder) == [])
        await sink.close()

    run(work)


def left_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.exists() else []


def stored_once(database: Database, *safe: tuple[str, int]) -> None:
    """Each of the rows that were safe is there; no row is there twice. Rows that were not safe may be there."""
    counts = Counter(database.request_ids())
    assert [name for name, count in counts.items() if count > 1] == []
    missing = [one for name, count in safe for one in names(name, 0, count) if one not in counts]
    assert missing == []


def soon(check: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not check():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_killed_at_any_step_a_process_loses_nothing_that_was_safe(tmp_path: Path) -> None:
    """At every system call of the spool's, before it, after it, and in the middle of a write."""
    died = 0
    for step in range(MOST_STEPS):
        folder, path = tmp_path / f"spool-{step}", tmp_path / f"{step}.db"
        with child(add_and_close, folder, path, "a", step) as process:
            code = process.wait()
        died += code == -signal.SIGKILL
        database = Database(path)
        recover(folder, database)
        stored_once(database, ("a", process.safe))
        if code == 0:
            assert process.safe == 15
            break
        assert code == -signal.SIGKILL
    else:
        pytest.fail("it never came to its end")
    assert died > 60


@given(
    st.lists(st.tuples(st.floats(0, 0.15), st.integers(1, 60), st.booleans()), min_size=1, max_size=3),
    st.booleans(),
)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_killed_at_any_moment_alone_or_beside_others_processes_lose_nothing_that_was_safe(
    lives: list[tuple[float, int, bool]], together: bool
) -> None:
    with tempfile.TemporaryDirectory() as place, ExitStack() as living:
        folder, path = Path(place) / "spool", Path(place) / "usage.db"
        database = Database(path)
        processes: list[Child] = []
        for number, (seconds, size, down) in enumerate(lives):
            process = living.enter_context(child(keep_adding, folder, path, f"p{number}", size, down))
            assert process.listen(PATIENCE)
            processes.append(process)
            if not together:
                time.sleep(seconds)
                process.kill()
        if together:
            for process, (seconds, _, _) in zip(processes, lives, strict=True):
                time.sleep(seconds)
                process.kill()
        recover(folder, database)
        stored_once(database, *((f"p{number}", process.safe) for number, process in enumerate(processes)))


def test_a_living_process_keeps_its_segments_and_a_dead_ones_go_to_another(tmp_path: Path) -> None:
    folder, path = tmp_path / "spool", tmp_path / "usage.db"
    database = Database(path)
    with (
        child(keep_adding, folder, path, "patient", 10, True) as patient,
        child(keep_adding, folder, path, "busy", 10, False) as busy,
    ):
        soon(lambda: patient.listen(0.1) and patient.safe >= 100)
        soon(lambda: busy.listen(0.1) and any(name.startswith("busy") for name in database.request_ids()))
        assert claim_dead(folder) == []  # both live
        before = [name for name in database.request_ids() if name.startswith("patient")]
        patient.kill()
        soon(lambda: set(names("patient", 0, patient.safe)) <= set(database.request_ids()))
        busy.kill()
    assert before == []
    recover(folder, database)
    stored_once(database, ("patient", patient.safe), ("busy", busy.safe))


# --- full disks
@pytest.mark.parametrize("stubborn", [False, True])
def test_a_file_that_may_not_grow_takes_rows_later_and_each_once(
    tmp_path: Path, stubborn: bool, caplog: pytest.LogCaptureFixture
) -> None:
    folder, database = tmp_path / "spool", Database(tmp_path / "usage.db")
    with child(meet_a_size_limit, folder, tmp_path / "usage.db", "a", stubborn) as process:
        assert process.wait() == -signal.SIGKILL
    assert process.safe == 310
    recover(folder, database)
    assert sorted(database.request_ids()) == sorted(names("a", 0, 310))
    assert ("torn line(s)" in caplog.text) == stubborn  # half a line is taken back where the disk lets us


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a file system, and not everywhere")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_keeps_rows_in_memory_until_there_is_room(small_disk: Path, tmp_path: Path) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * 240 * 1024)
    database = Database(tmp_path / "usage.db", down=True)
    folder = small_disk / "spool"

    async def work() -> None:
        sink = UsageSink(folder, lambda: database, None, QUICK)
        sink.start()
        for number in range(10):
            sink.add(outcomes("a", number * 100, number * 100 + 100))
        await eventually(lambda: sink._writer is not None and sink._writer.failing)
        assert sink.safe < 1000
        assert sink.waiting == 1000
        assert sink.dropped == 0
        filler.unlink()
        await eventually(lambda: sink.safe == 1000)
        await sink.close()

    run(work)
    assert database.request_ids() == []
    database.down = False
    recover(folder, database)
    assert sorted(database.request_ids()) == sorted(names("a", 0, 1000))


# --- locks
def test_of_many_that_look_for_the_dead_at_once_exactly_one_finds_each(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    for _ in range(10):
        dead = set()
        for _ in range(5):
            claim = claim_new(folder)
            (folder / f"{claim.name}-00000001-3.rows").write_bytes(b"")
            dead.add(claim.name)
            claim.release()
        start = threading.Barrier(6)

        def look(start: threading.Barrier = start) -> list[Parcel]:
            start.wait(PATIENCE)
            return claim_dead(folder)

        with ThreadPoolExecutor(6) as pool:
            found = [parcel for looking in [pool.submit(look) for _ in range(6)] for parcel in looking.result()]
        assert sorted(parcel.claim.name for parcel in found) == sorted(dead)
        for parcel in found:
            parcel.remove()
        assert left_in(folder) == []


def test_a_new_name_is_never_taken_for_a_dead_one(tmp_path: Path) -> None:
    """Somebody who looks for the dead may come between the making of a lock's file and its being locked."""
    folder = tmp_path / "spool"
    folder.mkdir()
    done = threading.Event()

    def look() -> int:
        stolen = 0
        while not done.is_set():
            stolen += len(claim_dead(folder))
        return stolen

    with ThreadPoolExecutor(2) as pool:
        looking = [pool.submit(look) for _ in range(2)]
        try:
            for _ in range(300):
                claim = claim_new(folder)
                segment = folder / f"{claim.name}-00000001.open"
                segment.write_bytes(b"")
                assert f"{claim.name}.lock" in left_in(folder)
                segment.unlink()
                claim.release()
        finally:
            done.set()
        assert [one.result() for one in looking] == [0, 0]
    assert left_in(folder) == []
