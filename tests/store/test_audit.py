"""The audit log: it can be added to and nothing else, and whatever is done to it past the gateway is found."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.records import Actor, AuditEntry, TenantRecord
from gateway.store import AuditVerdict
from gateway.store.chain import GENESIS, Walk, canonical, entry_hash
from tests.store.harness import ADMIN, Bench, Place

COUNT = 6  # entries in the log that is tampered with


def fill(store: Bench, count: int = COUNT) -> list[AuditEntry]:
    for number in range(count):
        store.append_audit("replica.drain", f"replica-{number}", ADMIN, {"up": True, "n": number}, {"up": False})
    entries: list[AuditEntry] = store.audit(limit=count)
    return entries


def stored(entry: AuditEntry) -> dict[str, object]:
    """The row of an entry, columns in order."""
    row = {name: getattr(entry, name) for name in AuditEntry.__slots__}
    texts = {name: None if row[name] is None else canonical(row[name]) for name in ("before", "after")}
    return row | texts


def insert(entry: AuditEntry) -> str:
    """The statement that stores an entry."""
    shown = ["NULL" if value is None else f"'{value}'" if isinstance(value, str) else repr(value)
             for value in stored(entry).values()]  # fmt: skip
    return f"INSERT INTO audit VALUES ({', '.join(shown)})"


def forged(seq: int, previous: str, **more: object) -> AuditEntry:
    """An entry whose hash is right."""
    fields = {
        "seq": seq, "time": 1.0, "actor": "mallory", "address": "", "action": "key.create", "target": "k",
        "before": None, "after": {"role": "admin"}, "previous": previous,
    } | more  # fmt: skip
    return AuditEntry(**fields, hash=entry_hash(fields))  # type: ignore[arg-type]


# --- writing and reading
def test_an_empty_log_is_fine(store: Bench) -> None:
    assert store.verify_audit() == AuditVerdict(True, 0, GENESIS)


def test_entries_come_back_as_they_were_appended(store: Bench) -> None:
    appended = [
        store.append_audit("config.reload", "", Actor("cli:me")),
        store.append_audit("a.b", "木", ADMIN, {"list": (1, 2.5, None), "text": "\0 \ud800 \""}, {}),
        store.append_audit("with\0zero", "half\ud800", ADMIN),
    ]
    assert store.audit() == appended
    assert [entry.seq for entry in appended] == [1, 2, 3]
    assert appended[1].before == {"list": [1, 2.5, None], "text": "\0 \ud800 \""}
    verdict = store.verify_audit()
    assert verdict == AuditVerdict(True, 3, appended[-1].hash)


def test_the_hash_covers_the_canonical_json_of_everything_else(store: Bench) -> None:
    """So that others can check a log without this program."""
    for entry in fill(store):
        fields = {name: getattr(entry, name) for name in AuditEntry.__slots__ if name != "hash"}
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        assert hashlib.sha256(text.encode()).hexdigest() == entry.hash


def test_paging_in_both_directions(store: Bench) -> None:
    fill(store)

    def seqs(**options: object) -> list[int]:
        return [entry.seq for entry in store.audit(**options)]

    assert seqs(limit=2) == [1, 2]
    assert seqs(after=2, limit=3) == [3, 4, 5]
    assert seqs(after=COUNT) == []
    assert seqs(newest_first=True, limit=2) == [6, 5]
    assert seqs(newest_first=True, after=5, limit=3) == [4, 3, 2]
    assert seqs(newest_first=True, after=1) == []


@pytest.mark.parametrize("page", [1, 5, COUNT, COUNT + 1])
def test_a_log_of_any_number_of_pages_is_checked_to_its_end(
    store: Bench, place: Place, monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    monkeypatch.setattr("gateway.store.audit._PAGE", page)
    entries = fill(store)
    assert store.verify_audit() == AuditVerdict(True, COUNT, entries[-1].hash)
    place.unlock_audit()
    place.sql(f"UPDATE audit SET actor = 'x' WHERE seq = {COUNT}")
    assert store.verify_audit().broken_at == COUNT


# --- what the database itself refuses
@pytest.mark.parametrize("statement", [
    "UPDATE audit SET actor = 'x' WHERE seq = 2",
    "UPDATE audit SET hash = hash",
    "DELETE FROM audit WHERE seq = 6",
    "DELETE FROM audit",
])
def test_the_database_refuses_to_change_the_log(store: Bench, place: Place, statement: str) -> None:
    entries = fill(store)
    with pytest.raises(AssertionError, match="append-only"):
        place.sql(statement)
    assert store.audit() == entries


def test_the_database_refuses_to_replace_or_empty_the_log(store: Bench, place: Place) -> None:
    entries = fill(store)
    empty, replace = "TRUNCATE audit", insert(entries[0]) + " ON CONFLICT (seq) DO UPDATE SET actor = 'x'"
    if place.kind == "sqlite":
        empty = insert(entries[0]).replace("INSERT", "INSERT OR REPLACE", 1)
    for statement in (empty, replace):
        with pytest.raises(AssertionError, match="append-only"):
            place.sql(statement)
    assert store.audit() == entries


# --- tampering, the triggers out of the way
FORGERIES = {
    "seq": "7", "time": "time + 0.001", "actor": "'x'", "address": "''", "action": "'x'", "target": "'x'",
    "before": "'{\"n\":3,\"up\":false}'", "after": "NULL", "previous": f"'{'1' * 64}'", "hash": f"'{'2' * 64}'",
}  # fmt: skip


@pytest.mark.parametrize("seq", [1, COUNT])
@pytest.mark.parametrize("field", AuditEntry.__slots__)
def test_an_edited_field_is_found(store: Bench, place: Place, field: str, seq: int) -> None:
    fill(store)
    place.unlock_audit()
    place.sql(f'UPDATE audit SET "{field}" = {FORGERIES[field]} WHERE seq = {seq}')
    verdict = store.verify_audit()
    assert (verdict.ok, verdict.broken_at, verdict.entries) == (False, seq, seq - 1)
    assert verdict.problem


@pytest.mark.parametrize("text", ['{"up":false,"up":true,"n":3}', '{"n":3, "up":true}', "no json", "[NaN]"])
def test_json_that_reads_differently_than_it_was_written_is_found(store: Bench, place: Place, text: str) -> None:
    fill(store)
    place.unlock_audit()
    place.sql(f"UPDATE audit SET before = '{text}' WHERE seq = 4")
    assert store.verify_audit().broken_at == 4


def test_values_of_a_wrong_type_are_found(store: Bench, place: Place) -> None:
    if place.kind != "sqlite":
        pytest.skip("PostgreSQL keeps no value of a wrong type")
    fill(store)
    place.unlock_audit()
    for column, value in (("actor", "x'00ff'"), ("time", "'soon'"), ("hash", "1.5"), ("after", "x'7b7d'")):
        place.sql(f"UPDATE audit SET {column} = {value} WHERE seq = 3")
        assert store.verify_audit().broken_at == 3


@pytest.mark.parametrize("seq", range(1, COUNT + 1))
def test_a_deleted_entry_is_found_be_it_the_last(store: Bench, place: Place, seq: int) -> None:
    fill(store)
    place.unlock_audit()
    place.sql(f"DELETE FROM audit WHERE seq = {seq}")
    verdict = store.verify_audit()
    assert (verdict.ok, verdict.broken_at) == (False, seq)
    assert "missing" in verdict.problem


def test_an_emptied_log_is_found(store: Bench, place: Place) -> None:
    fill(store)
    place.unlock_audit()
    place.sql("DELETE FROM audit")
    assert store.verify_audit().broken_at == 1


def test_reordered_entries_are_found(store: Bench, place: Place) -> None:
    fill(store)
    place.unlock_audit()
    for change in ("SET seq = 99 WHERE seq = 3", "SET seq = 3 WHERE seq = 4", "SET seq = 4 WHERE seq = 99"):
        place.sql(f"UPDATE audit {change}")
    assert store.verify_audit().broken_at == 3


@pytest.mark.parametrize("seq", [-1, 0, COUNT + 1, COUNT + 2])
def test_an_inserted_entry_is_found_however_well_it_fits(store: Bench, place: Place, seq: int) -> None:
    entries = fill(store)
    place.sql(insert(forged(seq, entries[-1].hash if seq > 0 else GENESIS)))  # no trigger is in the way of that
    verdict = store.verify_audit()
    assert not verdict.ok
    assert verdict.problem


def test_an_entry_inserted_between_two_is_found(store: Bench, place: Place) -> None:
    entries = fill(store)
    place.unlock_audit()
    for seq in (6, 5, 4):
        place.sql(f"UPDATE audit SET seq = {seq + 1} WHERE seq = {seq}")
    place.sql(insert(forged(4, entries[2].hash)))
    assert store.verify_audit().broken_at == 5


def test_a_count_that_was_corrected_too_is_found_by_the_last_hash(store: Bench, place: Place) -> None:
    fill(store)
    place.unlock_audit()
    place.sql(f"DELETE FROM audit WHERE seq = {COUNT}")
    place.sql(f"UPDATE state SET audit_entries = {COUNT - 1}")
    assert not store.verify_audit().ok


def test_a_log_that_was_forged_as_a_whole_is_found_by_a_hash_kept_elsewhere(store: Bench, place: Place) -> None:
    kept = fill(store)[3].hash
    assert store.verify_audit(expect=kept).ok
    place.unlock_audit()
    place.sql("DELETE FROM audit")
    head = GENESIS
    for seq in range(1, COUNT + 1):
        place.sql(insert(entry := forged(seq, head)))
        head = entry.hash
    place.sql(f"UPDATE state SET audit_head = '{head}'")
    assert store.verify_audit().ok  # what the chain alone cannot tell
    verdict = store.verify_audit(expect=kept)
    assert not verdict.ok and "expected hash" in verdict.problem


def test_the_log_goes_on_after_it_was_cut_and_stays_suspect(store: Bench, place: Place) -> None:
    fill(store)
    place.unlock_audit()
    place.sql(f"DELETE FROM audit WHERE seq = {COUNT}")
    store.create_tenant(TenantRecord("acme"), ADMIN)
    assert store.verify_audit().broken_at == COUNT


# --- the chain by itself
rows = st.lists(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.none(), max_size=3),
                min_size=1, max_size=8)  # fmt: skip


@given(contents=rows, data=st.data())
def test_every_order_but_the_written_one_is_found(contents: list[dict[str, object]], data: st.DataObject) -> None:
    entries: list[AuditEntry] = []
    for number, content in enumerate(contents, 1):
        entries.append(forged(number, entries[-1].hash if entries else GENESIS, after=content))
    order = data.draw(st.permutations(range(len(entries))))
    walk = Walk()
    # Renumbered as well, which is what somebody would do who moves entries.
    moved = [stored(entries[place]) | {"seq": seq} for seq, place in enumerate(order, 1)]
    problems = [problem for row in moved if (problem := walk.step(row))]
    right = order == list(range(len(entries)))
    assert (not problems and not walk.finish(len(entries), entries[-1].hash)) == right
