"""Tenants and keys: what is stored comes back, names are unique among the living, rotation overlaps."""

from __future__ import annotations

import ipaddress
import json
import time

import pytest

from gateway.config.access import LimitsConfig
from gateway.errors import Conflict, NotFound
from gateway.records import TenantRecord
from tests.store.harness import ADMIN, Bench, key

LIMITS = LimitsConfig.model_validate(
    {"requests": ["10/s", "600/min"], "tokens": "5000/hour", "token_budget": "1000000/day", "concurrency": 4}
)
ACME = TenantRecord("acme", ("chat-*", "みかん"), LIMITS, weight=2.5, priority=-3)
NETWORKS = (ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_network("2001:db8::/32"))
SOON = time.time() + 3600


# --- tenants
def test_a_tenant_comes_back_as_it_was_stored(store: Bench) -> None:
    before = time.time()
    made = store.create_tenant(ACME, ADMIN)
    assert store.tenants() == [made]
    assert before <= made.created_at <= time.time()
    assert (made.name, made.models, made.limits, made.weight, made.priority) == (
        "acme", ("chat-*", "みかん"), LIMITS, 2.5, -3,
    )  # fmt: skip


def test_living_tenants_come_by_name_as_code_points_order_it(store: Bench) -> None:
    for name in ("b", "A", "a", "B", "_"):
        store.create_tenant(TenantRecord(name), ADMIN)
    assert [tenant.name for tenant in store.tenants()] == ["A", "B", "_", "a", "b"]


def test_a_living_tenants_name_is_taken(store: Bench) -> None:
    made = store.create_tenant(ACME, ADMIN)
    with pytest.raises(Conflict, match="acme"):
        store.create_tenant(TenantRecord("acme", weight=9.0), ADMIN)
    assert store.tenants() == [made]


def test_an_update_changes_what_it_names_and_nothing_else(store: Bench) -> None:
    made = store.create_tenant(ACME, ADMIN)
    changed = store.update_tenant("acme", {"models": ("*",), "priority": 7}, ADMIN)
    assert store.tenants() == [changed]
    assert (changed.models, changed.priority) == (("*",), 7)
    assert (changed.limits, changed.weight, changed.created_at) == (made.limits, made.weight, made.created_at)


def test_an_update_to_the_same_values_is_no_change(store: Bench) -> None:
    made = store.create_tenant(ACME, ADMIN)
    version = store.version()
    assert store.update_tenant("acme", {"weight": 2.5}, ADMIN) == made
    assert store.version() == version
    assert len(store.audit()) == 1


@pytest.mark.parametrize("name", ["nobody", "zero\0", "half\ud800"])
def test_unknown_tenants_are_not_found(store: Bench, name: str) -> None:
    with pytest.raises(NotFound):
        store.update_tenant(name, {"weight": 1.0}, ADMIN)
    with pytest.raises(NotFound):
        store.delete_tenant(name, ADMIN)


def test_only_what_an_administrator_may_change_can_be_changed(store: Bench) -> None:
    store.create_tenant(ACME, ADMIN)
    store.create_key(key("k1"), ADMIN)
    with pytest.raises(ValueError, match="name"):
        store.update_tenant("acme", {"name": "other"}, ADMIN)
    with pytest.raises(ValueError, match="digest"):
        store.update_key("k1", {"digest": b"0" * 32}, ADMIN)


def test_deleting_a_tenant_revokes_its_keys_and_no_others(store: Bench) -> None:
    for tenant in ("acme", "other"):
        store.create_tenant(TenantRecord(tenant), ADMIN)
        store.create_key(key(f"{tenant}-key", tenant), ADMIN)
    store.delete_tenant("acme", ADMIN)
    assert [tenant.name for tenant in store.tenants()] == ["other"]
    assert [one.id for one in store.keys()] == ["other-key"]
    assert store.key("acme-key").revoked_at is not None
    with pytest.raises(NotFound):
        store.delete_tenant("acme", ADMIN)


def test_a_deleted_tenant_can_be_created_again_and_its_old_keys_stay_revoked(store: Bench) -> None:
    store.create_tenant(ACME, ADMIN)
    store.create_key(key("old"), ADMIN)
    store.delete_tenant("acme", ADMIN)
    again = store.create_tenant(TenantRecord("acme", weight=1.5), ADMIN)
    assert (again.deleted_at, again.weight, again.limits) == (None, 1.5, LimitsConfig())
    assert store.tenants() == [again]
    assert store.keys() == []
    assert [one.id for one in store.keys("acme", revoked=True)] == ["old"]


# --- keys
def test_a_key_comes_back_as_it_was_stored(store: Bench) -> None:
    given = key("k1", role="admin", models=(), limits=LIMITS, allow_from=NETWORKS, expires_at=SOON)
    made = store.create_key(given, ADMIN)
    assert store.key("k1") == made
    assert store.keys("acme") == [made]
    assert (made.digest, made.role, made.models, made.limits, made.allow_from, made.expires_at) == (
        given.digest, "admin", (), LIMITS, NETWORKS, SOON,
    )  # fmt: skip


def test_no_models_of_its_own_differs_from_an_empty_list(store: Bench) -> None:
    store.create_key(key("all", models=None), ADMIN)
    store.create_key(key("none", models=()), ADMIN)
    assert (store.key("all").models, store.key("none").models) == (None, ())


def test_keys_are_listed_by_tenant(store: Bench) -> None:
    for identity, tenant in (("k1", "acme"), ("k2", "acme"), ("k3", "other")):
        store.create_key(key(identity, tenant), ADMIN)
    assert [one.id for one in store.keys("acme")] == ["k1", "k2"]
    assert [one.id for one in store.keys()] == ["k1", "k2", "k3"]
    assert store.keys("nobody\0") == []


def test_a_living_keys_name_is_taken_within_its_tenant(store: Bench) -> None:
    store.create_key(key("k1", name="ci"), ADMIN)
    with pytest.raises(Conflict, match="ci"):
        store.create_key(key("k2", name="ci"), ADMIN)
    store.create_key(key("k3", "other", name="ci"), ADMIN)
    store.create_key(key("k4", name="build"), ADMIN)
    with pytest.raises(Conflict):
        store.update_key("k4", {"name": "ci"}, ADMIN)


@pytest.mark.parametrize("end", ["revoked", "expired"])
def test_a_dead_keys_name_is_free(store: Bench, end: str) -> None:
    store.create_key(key("k1", name="ci", expires_at=time.time() - 1 if end == "expired" else None), ADMIN)
    if end == "revoked":
        store.revoke_key("k1", ADMIN)
    assert store.create_key(key("k2", name="ci"), ADMIN).name == "ci"


def test_an_expired_key_does_not_come_back_beside_its_namesake(store: Bench) -> None:
    store.create_key(key("k1", name="ci", expires_at=time.time() - 1), ADMIN)
    store.create_key(key("k2", name="ci"), ADMIN)
    with pytest.raises(Conflict):
        store.update_key("k1", {"expires_at": None}, ADMIN)
    store.revoke_key("k2", ADMIN)
    assert store.update_key("k1", {"expires_at": None}, ADMIN).expires_at is None


@pytest.mark.parametrize("dead", [False, True])
def test_the_same_key_is_stored_once_and_the_refusal_does_not_show_it(store: Bench, dead: bool) -> None:
    first = store.create_key(key("k1"), ADMIN)
    if dead:
        store.revoke_key("k1", ADMIN)
    with pytest.raises(Conflict) as refused:
        store.create_key(key("k2", "other", digest=first.digest), ADMIN)
    assert first.digest.hex() not in str(refused.value)
    with pytest.raises(Conflict):
        store.create_key(key("k1", "other", name="n", digest=b"x" * 32), ADMIN)


def test_revoking_is_final_and_can_be_repeated(store: Bench) -> None:
    store.create_key(key("k1"), ADMIN)
    revoked = store.revoke_key("k1", ADMIN)
    version = store.version()
    assert revoked.revoked_at is not None
    assert store.revoke_key("k1", ADMIN) == revoked == store.key("k1")
    assert store.version() == version
    with pytest.raises(NotFound):
        store.update_key("k1", {"role": "admin"}, ADMIN)
    with pytest.raises(NotFound):
        store.rotate_key("k1", key("k2"), SOON, ADMIN)


def test_unknown_keys_are_not_found(store: Bench) -> None:
    for attempt in (
        lambda: store.key("nobody\0"),
        lambda: store.update_key("nobody", {"role": "user"}, ADMIN),
        lambda: store.revoke_key("nobody", ADMIN),
        lambda: store.rotate_key("nobody", key("k2"), SOON, ADMIN),
    ):
        with pytest.raises(NotFound):
            attempt()


# --- rotation
def test_after_a_rotation_both_keys_work_until_the_old_one_ends(store: Bench) -> None:
    store.create_key(key("k1", name="ci"), ADMIN)
    fresh = store.rotate_key("k1", key("k2", "stranger", name="ignored"), SOON, ADMIN)
    assert (fresh.tenant, fresh.name, fresh.rotated_from) == ("acme", "ci", "k1")
    assert [(one.id, one.expires_at) for one in store.keys("acme")] == [("k1", SOON), ("k2", None)]
    with pytest.raises(Conflict):
        store.create_key(key("k3", name="ci"), ADMIN)


def test_a_rotation_never_lengthens_a_keys_life(store: Bench) -> None:
    store.create_key(key("k1", expires_at=SOON - 1000), ADMIN)
    store.rotate_key("k1", key("k2"), SOON, ADMIN)
    assert store.key("k1").expires_at == SOON - 1000


def test_rotating_goes_on_with_the_successor(store: Bench) -> None:
    store.create_key(key("k1"), ADMIN)
    store.rotate_key("k1", key("k2"), SOON, ADMIN)
    with pytest.raises(Conflict, match="successor"):
        store.rotate_key("k1", key("k3"), SOON, ADMIN)
    assert store.rotate_key("k2", key("k3"), SOON, ADMIN).name == "k1"
    assert [one.rotated_from for one in store.keys()] == [None, "k1", "k2"]


def test_a_rotation_can_be_taken_back(store: Bench) -> None:
    store.create_key(key("k1"), ADMIN)
    store.rotate_key("k1", key("k2"), SOON, ADMIN)
    store.revoke_key("k2", ADMIN)
    with pytest.raises(Conflict):
        store.create_key(key("k3", name="k1"), ADMIN)
    assert store.update_key("k1", {"expires_at": None}, ADMIN).expires_at is None
    assert store.rotate_key("k1", key("k4"), SOON, ADMIN).name == "k1"


def test_the_old_key_can_still_be_edited_while_both_work(store: Bench) -> None:
    store.create_key(key("k1"), ADMIN)
    store.rotate_key("k1", key("k2"), SOON, ADMIN)
    assert store.update_key("k1", {"expires_at": SOON + 60}, ADMIN).expires_at == SOON + 60


def test_expired_keys_are_not_rotated(store: Bench) -> None:
    store.create_key(key("k1", expires_at=time.time() - 1), ADMIN)
    with pytest.raises(NotFound):
        store.rotate_key("k1", key("k2"), SOON, ADMIN)
    assert [one.id for one in store.keys()] == ["k1"]


def test_a_rotation_to_a_known_key_leaves_the_old_one_as_it_was(store: Bench) -> None:
    before = store.create_key(key("k1"), ADMIN)
    with pytest.raises(Conflict):
        store.rotate_key("k1", key("k2", digest=before.digest), SOON, ADMIN)
    assert store.key("k1") == before


# --- last use
def test_last_use_never_goes_backwards(store: Bench) -> None:
    store.create_key(key("k1"), ADMIN)
    store.create_key(key("k2"), ADMIN)
    store.mark_used({"k1": 200.0})
    store.mark_used({"k1": 100.0, "k2": 150.0})
    store.mark_used({})
    assert [one.last_used_at for one in store.keys()] == [200.0, 150.0]
    assert store.key("k1").last_used_at == 200.0


def test_last_use_is_neither_a_change_nor_an_entry_of_the_log(store: Bench) -> None:
    store.create_key(key("k1"), ADMIN)
    mark = store.mark()
    store.mark_used({"k1": 200.0})
    assert store.mark() == mark and store.news(mark) is None
    assert len(store.audit()) == 1


# --- what the log says
def test_every_change_leaves_one_entry_with_what_was_and_what_is(store: Bench) -> None:
    store.create_tenant(ACME, ADMIN)
    store.update_tenant("acme", {"weight": 1.0}, ADMIN)
    store.create_key(key("k1", allow_from=NETWORKS, models=("a",)), ADMIN)
    store.update_key("k1", {"role": "admin"}, ADMIN)
    store.rotate_key("k1", key("k2"), SOON, ADMIN)
    store.revoke_key("k2", ADMIN)
    store.delete_tenant("acme", ADMIN)
    entries = store.audit()
    assert [(entry.action, entry.target) for entry in entries] == [
        ("tenant.create", "acme"), ("tenant.update", "acme"), ("key.create", "k1"), ("key.update", "k1"),
        ("key.rotate", "k1"), ("key.revoke", "k2"), ("tenant.delete", "acme"),
    ]  # fmt: skip
    assert {(entry.actor, entry.address) for entry in entries} == {(ADMIN.name, ADMIN.address)}
    created, updated, key_created, key_updated, rotated, revoked, deleted = entries
    assert created.before is None and created.after["limits"] == LIMITS.model_dump(mode="json", exclude_defaults=True)
    assert (updated.before["weight"], updated.after["weight"]) == (2.5, 1.0)
    assert key_created.after["allow_from"] == ["10.0.0.0/8", "2001:db8::/32"]
    assert (key_updated.before["role"], key_updated.after["role"]) == ("user", "admin")
    assert (rotated.after["id"], rotated.after["rotated_from"], rotated.after["old_expires_at"]) == ("k2", "k1", SOON)
    assert revoked.before["revoked_at"] is None and revoked.after["revoked_at"] is not None
    assert deleted.after["deleted_at"] is not None and deleted.after["revoked_keys"] == ["k1"]


def test_digests_are_in_no_entry(store: Bench) -> None:
    made = store.create_key(key("k1"), ADMIN)
    store.update_key("k1", {"role": "admin"}, ADMIN)
    store.rotate_key("k1", key("k2"), SOON, ADMIN)
    store.revoke_key("k1", ADMIN)
    text = json.dumps([(entry.before, entry.after) for entry in store.audit()])
    assert "digest" not in text and made.digest.hex() not in text


def test_a_refused_change_leaves_no_entry(store: Bench) -> None:
    store.create_tenant(ACME, ADMIN)
    for attempt in (
        lambda: store.create_tenant(ACME, ADMIN),
        lambda: store.update_tenant("nobody", {"weight": 1.0}, ADMIN),
        lambda: store.revoke_key("nobody", ADMIN),
    ):
        with pytest.raises((Conflict, NotFound)):
            attempt()
    assert (store.version(), len(store.audit())) == (1, 1)
