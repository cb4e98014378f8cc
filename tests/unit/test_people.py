"""Who may call: the configuration and the database as one, whatever changes in which order."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from ipaddress import ip_network
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.config import LimitsConfig, TenantConfig
from gateway.config.access import ToolsConfig
from gateway.people import People, compile_limits, member
from gateway.records import Changes, KeyRecord, TenantRecord
from gateway.types import Limit, Limits, Principal, ToolPolicy

NAMES = ["red", "green", "blue", "grey"]
MODELS = st.sampled_from([("*",), ("small", "llama-*"), ()])


def digest(number: int) -> bytes:
    return hashlib.sha256(b"sk-%d" % number).digest()


def limits_of(count: int | None) -> LimitsConfig:
    return LimitsConfig.model_validate({"requests": f"{count}/min", "concurrency": count} if count else {})


LIMITS = st.builds(limits_of, st.none() | st.integers(1, 3))


# --- what is compared: everything about a caller, with limits by content
def content(limits: Limits) -> tuple[object, ...]:
    return limits.requests, limits.tokens, limits.concurrency


def described(one: Principal) -> tuple[object, ...]:
    return (
        one.tenant, one.key, one.role, one.models, one.key_models, content(one.limits), one.expires, one.digest,
        one.networks,
    )  # fmt: skip


def everybody(people: People) -> dict[str, Any]:
    return {
        "keys": {found: described(principal) for found, principal in people.keys.items()},
        "tenants": {
            name: (policy.tenant, policy.models, content(policy.limits)) for name, policy in people.tenants.items()
        },
        "records": (dict(people.stored_tenants), dict(people.stored_keys)),
    }


# --- a database and a configuration over time
def tenants(names: list[str]) -> st.SearchStrategy[TenantRecord]:
    return st.builds(
        TenantRecord,
        name=st.sampled_from(names),
        models=MODELS,
        limits=LIMITS,
        weight=st.sampled_from([1.0, 2.0]),
        deleted_at=st.sampled_from([None, None, None, 5.0]),
    )


KEYS = st.builds(
    KeyRecord,
    id=st.sampled_from([f"key_{number}" for number in range(6)]),
    tenant=st.sampled_from(NAMES),
    name=st.sampled_from(["ci", "laptop"]),
    digest=st.builds(digest, st.integers(0, 7)),
    role=st.sampled_from(["user", "admin"]),
    models=st.none() | MODELS,
    limits=LIMITS,
    allow_from=st.sampled_from([(), (ip_network("10.0.0.0/8"),)]),
    expires_at=st.sampled_from([None, 1e9]),
    revoked_at=st.sampled_from([None, None, None, 5.0]),
)
BATCHES = st.tuples(st.lists(tenants(NAMES), max_size=4), st.lists(KEYS, max_size=5))


@st.composite
def configurations(draw: st.DrawFn) -> list[TenantConfig]:
    """Tenants of a file. Some of their keys are in the database too."""
    free = draw(st.permutations(range(10)))[:4]
    return [
        TenantConfig.model_validate({
            "name": name,
            "models": list(draw(MODELS)),
            "limits": {"requests": f"{draw(st.integers(7, 9))}/s"},
            "keys": [{"name": f"file-{number}", "sha256": digest(number).hex()} for number in free[2 * i : 2 * i + 2]],
        })
        for i, name in enumerate(draw(st.permutations(NAMES))[: draw(st.integers(0, 2))])
    ]  # fmt: skip


class Database:
    """What is stored. As in every database of keys, no two that are valid have the same digest."""

    def __init__(self) -> None:
        self.tenants: dict[str, TenantRecord] = {}
        self.keys: dict[str, KeyRecord] = {}
        self.version = 0

    def take(self, batch: tuple[list[TenantRecord], list[KeyRecord]]) -> Changes:
        self.version += 1
        changed_tenants = {tenant.name: tenant for tenant in batch[0]}
        changed_keys: dict[str, KeyRecord] = {}
        for key in batch[1]:
            others = [one for one in {**self.keys, **changed_keys}.values() if one.id != key.id]
            taken = any(one.digest == key.digest and one.revoked_at is None for one in others)
            if key.revoked_at is not None or not taken:
                changed_keys[key.id] = key
        self.tenants |= changed_tenants
        self.keys |= changed_keys
        return Changes(self.version, list(changed_tenants.values()), list(changed_keys.values()))

    def whole(self) -> Changes:
        return Changes(self.version, list(self.tenants.values()), list(self.keys.values()))


@given(configurations(), st.lists(st.one_of(BATCHES, configurations()), max_size=12))
@settings(max_examples=400, deadline=None)
def test_change_by_change_comes_to_the_same_as_compiling_everything_anew(
    configuration: list[TenantConfig],
    steps: list[tuple[list[TenantRecord], list[KeyRecord]] | list[TenantConfig]],
) -> None:
    database, people = Database(), People().with_file(configuration)
    for step in steps:
        if isinstance(step, list):
            configuration = step
            people = people.with_file(configuration)
        else:
            people = people.with_changes(database.take(step))
        anew = everybody(People().with_file(configuration).with_changes(database.whole()))
        assert everybody(people) == anew
        assert everybody(People().with_changes(database.whole()).with_file(configuration)) == anew
        assert {found: (one.tenant.name, one.key) for found, one in people.keys.items()} == holders(
            configuration, database
        )


def holders(configuration: list[TenantConfig], database: Database) -> dict[bytes, tuple[str, str]]:
    """Whose each key is, in the plainest words there are."""
    known = {one.name for one in configuration} | {one.name for one in database.tenants.values() if not one.deleted_at}
    stored = {
        key.digest: (key.tenant, key.id)
        for key in database.keys.values()
        if key.revoked_at is None and key.tenant in known
    }
    return stored | {
        bytes.fromhex(key.sha256): (tenant.name, key.name) for tenant in configuration for key in tenant.keys
    }


@given(BATCHES, BATCHES)
@settings(max_examples=100, deadline=None)
def test_people_never_change_once_made(
    first: tuple[list[TenantRecord], list[KeyRecord]], second: tuple[list[TenantRecord], list[KeyRecord]]
) -> None:
    """Requests that run keep those they began with."""
    database = Database()
    people = People().with_changes(database.take(first))
    before = everybody(people)
    people.with_changes(database.take(second))
    people.with_file([])
    assert everybody(people) == before
    mappings: tuple[Any, ...] = (people.keys, people.tenants)
    for mapping in mappings:
        with pytest.raises(TypeError):
            mapping["x"] = None


# --- the file wins
STORED = TenantRecord("red", models=("stored",), limits=limits_of(1), weight=5.0)
FILE = TenantConfig.model_validate(
    {"name": "red", "models": ["small"], "limits": {"requests": "9/s"}, "keys": [{"name": "ci", "sha256": "aa" * 32}]}
)
KEY = KeyRecord("key_1", "red", "laptop", digest(1))


def stored(*keys: KeyRecord, tenants: tuple[TenantRecord, ...] = (STORED,)) -> Changes:
    return Changes(1, tenants, keys)


@pytest.mark.parametrize("order", ["file first", "database first"])
def test_a_tenant_of_the_file_hides_one_of_the_database_and_keeps_its_keys(order: str) -> None:
    people = People()
    steps = [lambda: people.with_file([FILE]), lambda: people.with_changes(stored(KEY))]
    for step in steps if order == "file first" else reversed(steps):
        people = step()
    assert (people.tenants["red"].models, people.tenants["red"].tenant.weight) == (("small",), 1.0)
    assert people.keys[digest(1)].models == ("small",)
    assert people.keys[digest(1)].limits.requests == (("tenant:red:requests/1", Limit(9, 1, "requests", "tenant")),)
    people = people.with_changes(stored(tenants=(replace(STORED, models=("other",)),)))
    assert people.keys[digest(1)].models == ("small",)
    people = people.with_file([])  # taken out of the file: the database's is there again
    assert people.keys[digest(1)].models == ("other",)
    assert bytes.fromhex("aa" * 32) not in people.keys


def test_a_key_of_the_file_outlives_one_of_the_database_with_the_same_digest() -> None:
    same = replace(KEY, digest=bytes.fromhex("aa" * 32), role="admin")
    people = People().with_file([FILE]).with_changes(stored(same))
    assert (people.keys[same.digest].key, people.keys[same.digest].role) == ("ci", "user")
    people = people.with_changes(stored(replace(same, revoked_at=5.0)))
    assert people.keys[same.digest].key == "ci"


# --- keys and tenants of the database
def test_a_revoked_key_and_the_keys_of_a_deleted_tenant_are_nobodys() -> None:
    people = People().with_changes(stored(KEY, replace(KEY, id="key_2", digest=digest(2))))
    assert set(people.keys) == {digest(1), digest(2)}
    people = people.with_changes(stored(replace(KEY, revoked_at=5.0), tenants=()))
    assert set(people.keys) == {digest(2)} and "key_1" not in people.stored_keys
    people = people.with_changes(stored(tenants=(replace(STORED, deleted_at=6.0),)))
    assert not people.keys and not people.tenants


def test_keys_wait_for_their_tenant() -> None:
    people = People().with_changes(stored(KEY, tenants=()))
    assert not people.keys
    assert set(people.with_changes(stored()).keys) == {digest(1)}


def test_a_changed_tenant_changes_its_keys_and_nobody_elses() -> None:
    other = KeyRecord("key_9", "blue", "ci", digest(9))
    people = People().with_changes(stored(KEY, other, tenants=(STORED, TenantRecord("blue"))))
    changed = people.with_changes(stored(tenants=(replace(STORED, models=("new",), limits=limits_of(2)),)))
    assert changed.keys[digest(1)].models == ("new",)
    assert content(changed.keys[digest(1)].limits) == content(compile_limits(limits_of(2), "tenant", "red"))
    assert changed.keys[digest(9)] is people.keys[digest(9)]  # with what it has looked up already


def test_a_key_has_what_its_record_says_within_its_tenant() -> None:
    key = replace(
        KEY, role="operator", models=("small",), limits=limits_of(3), allow_from=(ip_network("::1"),), expires_at=9.0
    )
    found = People().with_changes(stored(key)).keys[digest(1)]
    assert (found.tenant.name, found.key, found.role, found.expires) == ("red", "key_1", "operator", 9.0)
    assert (found.models, found.key_models, found.networks) == (("stored",), ("small",), (ip_network("::1"),))
    assert found.limits.concurrency == (("tenant:red", 1), ("key:red/key_1", 3))


def test_tenants_are_kept_apart_in_prefix_caches_by_a_salt_that_stays() -> None:
    first = People().with_changes(stored(tenants=(STORED, TenantRecord("blue"))))
    salts = {name: policy.tenant.salt for name, policy in first.tenants.items()}
    assert len(set(salts.values())) == 2 and all(len(salt) == 32 for salt in salts.values())
    again = People().with_file([FILE])
    assert again.tenants["red"].tenant.salt == salts["red"]


def test_a_member_has_its_tenants_limits_and_no_digest() -> None:
    policy = People().with_changes(stored()).tenants["red"]
    found = member(policy, "jwt:someone", "user", ("small",), 9.0, b"d" * 32)
    assert (found.tenant, found.models, found.key_models) == (policy.tenant, ("stored",), ("small",))
    assert found.limits is policy.limits and found.expires == 9.0


# --- counters
def test_counters_are_named_after_their_owner_and_window() -> None:
    given = LimitsConfig.model_validate({
        "requests": ["10/s", "600/min"], "tokens": "200000/min", "token_budget": ["20000000/day", "500000000/month"],
        "concurrency": 32,
    })  # fmt: skip
    assert content(compile_limits(given, "tenant", "research")) == (
        (
            ("tenant:research:requests/1", Limit(10, 1, "requests", "tenant")),
            ("tenant:research:requests/60", Limit(600, 60, "requests", "tenant")),
        ),
        (
            ("tenant:research:tokens/60", Limit(200_000, 60, "tokens", "tenant")),
            ("tenant:research:budget/day", Limit(20_000_000, 86400, "tokens", "tenant", "day")),
            ("tenant:research:budget/month", Limit(500_000_000, 86400, "tokens", "tenant", "month")),
        ),
        (("tenant:research", 32),),
    )


@given(st.lists(st.tuples(st.sampled_from(["tenant", "key", "model"]), st.text("ab:/.@", min_size=1, max_size=6))))
def test_counters_of_different_owners_never_meet(owners: list[tuple[str, str]]) -> None:
    every = LimitsConfig.model_validate(
        {"requests": ["1/s", "1/min"], "tokens": ["1/s", "1/day"], "token_budget": ["1/day", "1/month"]}
    )
    compiled: Mapping[tuple[str, str], Limits] = {owner: compile_limits(every, *owner) for owner in owners}
    names = [name for limits in compiled.values() for name, _ in (*limits.requests, *limits.tokens)]
    assert len(names) == 6 * len(compiled) == len(set(names))


def test_a_tenants_callers_have_its_tool_policy() -> None:
    given = {"deny": ["rm_*"], "on_violation": "strip"}
    policy = ToolPolicy(("*",), ("rm_*",), ("*",), strip=True)
    entry = {"name": "file", "tools": given, "keys": [{"name": "k", "sha256": digest(1).hex()}]}
    people = People().with_file([TenantConfig.model_validate(entry)])
    assert people.keys[digest(1)].tenant.tools == policy == member(
        people.tenants["file"], "cert:x", "user", ("*",), None, b""
    ).tenant.tools  # fmt: skip
    key = KeyRecord("id", "stored", "k", digest(2))
    plain = TenantRecord("stored")
    people = people.with_changes(Changes(1, [plain], [key]))
    assert people.keys[digest(2)].tenant.tools is None
    people = people.with_changes(Changes(2, [replace(plain, tools=ToolsConfig.model_validate(given))], []))
    assert people.keys[digest(2)].tenant.tools == policy
    assert people.with_changes(Changes(3, [plain], [])).keys[digest(2)].tenant.tools is None
