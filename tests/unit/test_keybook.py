"""The administration without HTTP: what is accepted, what is refused and how, and what is never shown again."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import time
from collections.abc import Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.config.access import TenantConfig
from gateway.errors import BadRequest, Conflict, GatewayError, NotFound
from gateway.keybook import Keybook
from gateway.keybook.forms import KeyForm, TenantForm, UsageForm, read
from gateway.keybook.moments import iso, read_moment
from gateway.keybook.usage import SUMS, Report
from gateway.keys import digest
from gateway.people import People
from gateway.records import Actor, KeyRecord, UsageRow
from gateway.store import Store
from gateway.units import WrongValue

T = TypeVar("T")
ACTOR = Actor("ops/key_of_the_admin", "192.0.2.7")
FILE_KEY = "sk-file" + "f" * 44
FILE = People().with_file([
    TenantConfig.model_validate({"name": "written", "models": ["a*"], "keys": [
        {"name": "ci", "sha256": digest(FILE_KEY), "limits": {"requests": "5/min"}}]}),
])  # fmt: skip


class Desk:
    """A keybook on a database of its own, without the awaiting."""

    def __init__(self, folder: Path) -> None:
        self._runner = asyncio.Runner()
        self.store = self.run(Store.open(f"sqlite:///{folder}/book.db"))
        self.book = Keybook(self.store, FILE)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def tenant(self, name: str = "t", **more: Any) -> dict[str, Any]:
        return self.run(self.book.create_tenant({"name": name, **more}, ACTOR))

    def key(self, **more: Any) -> dict[str, Any]:
        return self.run(self.book.create_key({"tenant": "t", **more}, ACTOR))

    def stored(self, identity: str) -> KeyRecord:
        return self.run(self.store.key(identity))

    def everything_shown(self) -> str:
        """All documents there are but those that make keys, and the reprs of what they are made from."""
        documents = [
            self.run(self.book.tenants()), self.run(self.book.keys({"revoked": True})),
            self.run(self.book.audit({})), self.run(self.book.usage(read(UsageForm, {}))).document(),
        ]  # fmt: skip
        return json.dumps(documents) + repr([*self.run(self.store.keys(revoked=True)), *FILE.file_keys.values()])

    def close(self) -> None:
        self.run(self.store.close())
        self._runner.close()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.close()


# --- keys
def test_a_new_key_is_shown_once_and_known_by_its_digest(desk: Desk) -> None:
    desk.tenant()
    made = desk.key(name="ci", role="operator", models=["a*"], limits={"requests": "600/min", "concurrency": 3},
                    allow_from=["10.0.0.0/8", "::1"], expires_at="2100-01-31")  # fmt: skip
    secret = made.pop("key")
    assert made == desk.run(desk.book.key(made["id"])) == desk.run(desk.book.keys({"tenant": "t"}))["data"][0]
    assert made.pop("created_at").endswith("Z")
    assert made == {
        "id": made["id"], "object": "key", "tenant": "t", "name": "ci", "role": "operator", "models": ["a*"],
        "limits": {"requests": ["600/min"], "tokens": [], "token_budget": [], "concurrency": 3},
        "allow_from": ["10.0.0.0/8", "::1/128"], "expires_at": "2100-01-31T00:00:00Z", "revoked_at": None,
        "rotated_from": None, "last_used_at": None, "source": "database",
    }  # fmt: skip
    assert len(secret) == 51 and desk.stored(made["id"]).digest.hex() == digest(secret)


def test_neither_a_key_nor_its_digest_is_ever_shown_again(desk: Desk) -> None:
    desk.tenant()
    made = desk.key(name="a")
    turned = desk.run(desk.book.rotate_key(made["id"], {}, ACTOR))
    desk.run(desk.book.update_key(turned["id"], {"role": "admin"}, ACTOR))
    desk.run(desk.book.revoke_key(turned["id"], ACTOR))
    shown = desk.everything_shown()
    assert made["id"] in shown and turned["id"] in shown
    for secret in (made["key"], turned["key"], FILE_KEY):
        body, stored = secret.removeprefix("sk-"), digest(secret)
        parts = {text[at : at + 8] for text in (body, stored) for at in range(len(text) - 7)}
        parts |= {repr(bytes.fromhex(stored))[2:10]}
        assert not [part for part in parts if part in shown]


def test_a_key_without_a_name_is_called_by_its_id(desk: Desk) -> None:
    desk.tenant()
    made = desk.key()
    assert made["name"] == made["id"] and made["role"] == "user" and made["models"] is None


def test_a_change_leaves_alone_what_it_does_not_name(desk: Desk) -> None:
    desk.tenant()
    made = desk.key(name="ci", models=["a"], limits={"requests": "5/s"}, expires_at="2100-01-01")
    del made["key"]
    changed = desk.run(desk.book.update_key(made["id"], {"models": None, "expires_at": None}, ACTOR))
    assert changed == made | {"models": None, "expires_at": None}
    changed = desk.run(desk.book.update_key(made["id"], {"limits": {"concurrency": 1}}, ACTOR))
    assert changed["limits"] == {"requests": [], "tokens": [], "token_budget": [], "concurrency": 1}
    tenant = desk.run(desk.book.tenant("t"))
    assert desk.run(desk.book.update_tenant("t", {"priority": 7}, ACTOR)) == tenant | {"priority": 7}


@pytest.mark.parametrize(("overlap", "seconds"), [(None, 86400), ("0s", 0), ("90m", 5400), (2.5, 2.5)])
def test_a_rotated_key_works_on_for_the_overlap(desk: Desk, overlap: Any, seconds: float) -> None:
    desk.tenant()
    old = desk.key(name="ci", role="admin", models=["a"], limits={"requests": "5/s"}, allow_from=["10.0.0.0/8"])
    before = time.time()
    fresh = desk.run(desk.book.rotate_key(old["id"], {} if overlap is None else {"overlap": overlap}, ACTOR))
    ends = desk.stored(old["id"]).expires_at
    assert ends is not None and before + seconds <= ends <= time.time() + seconds
    assert fresh["rotated_from"] == old["id"] and fresh["key"] != old["key"] and fresh["id"] != old["id"]
    same = ("tenant", "name", "role", "models", "limits", "allow_from", "expires_at")
    assert {name: fresh[name] for name in same} == {name: old[name] for name in same}


def test_a_successor_ends_with_the_old_key_unless_told_otherwise(desk: Desk) -> None:
    desk.tenant()
    first = desk.key(expires_at="2100-01-01")
    second = desk.run(desk.book.rotate_key(first["id"], {}, ACTOR))
    third = desk.run(desk.book.rotate_key(second["id"], {"expires_at": "2101-01-01"}, ACTOR))
    fourth = desk.run(desk.book.rotate_key(third["id"], {"expires_at": None}, ACTOR))
    ends = [key["expires_at"] for key in (second, third, fourth)]
    assert ends == ["2100-01-01T00:00:00Z", "2101-01-01T00:00:00Z", None]


def test_revoking_twice_is_revoking_once(desk: Desk) -> None:
    desk.tenant()
    identity = desk.key()["id"]
    first = desk.run(desk.book.revoke_key(identity, ACTOR))
    assert first["revoked_at"] and first == desk.run(desk.book.revoke_key(identity, ACTOR))
    assert desk.run(desk.book.keys({"tenant": "t"}))["data"] == []
    assert desk.run(desk.book.keys({"tenant": "t", "revoked": "true"}))["data"] == [first]
    for change in (desk.book.update_key(identity, {"role": "admin"}, ACTOR), desk.book.rotate_key(identity, {}, ACTOR)):
        with pytest.raises(NotFound):
            desk.run(change)


class Meanwhile:
    """A store in which somebody else gets in between: `first` happens just before `method`."""

    def __init__(self, store: Store, method: str, first: Any) -> None:
        self._store, self._method, self._first = store, method, first

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._store, name)
        if name != self._method:
            return real

        async def later(*args: Any) -> Any:
            await self._first()
            return await real(*args)

        return later


def test_a_key_made_while_its_tenant_is_deleted_does_not_wait_for_the_next_of_that_name(desk: Desk) -> None:
    desk.tenant()
    store: Any = Meanwhile(desk.store, "create_key", lambda: desk.store.delete_tenant("t", ACTOR))
    with pytest.raises(NotFound):
        desk.run(Keybook(store, FILE).create_key({"tenant": "t"}, ACTOR))
    desk.tenant()
    assert desk.run(desk.store.keys("t")) == []


def test_a_key_rotated_while_it_loses_its_role_has_lost_it(desk: Desk) -> None:
    desk.tenant()
    old = desk.key(role="admin")
    demotion = {"role": "user", "models": ("a",)}
    store: Any = Meanwhile(desk.store, "rotate_key", lambda: desk.store.update_key(old["id"], demotion, ACTOR))
    fresh = desk.run(Keybook(store, FILE).rotate_key(old["id"], {}, ACTOR))
    stored = desk.stored(fresh["id"])
    assert (fresh["role"], fresh["models"], stored.role, stored.models) == ("user", ["a"], "user", ("a",))


# --- the configuration's
def test_what_the_file_defines_is_listed_and_belongs_to_the_file(desk: Desk) -> None:
    desk.tenant()
    tenants = desk.run(desk.book.tenants())["data"]
    assert [(one["name"], one["source"]) for one in tenants] == [("written", "file"), ("t", "database")]
    (key,) = desk.run(desk.book.keys({}))["data"]
    assert (key["id"], key["source"], key["limits"]["requests"]) == ("written/ci", "file", ["5/min"])
    assert desk.run(desk.book.key("written/ci")) == key
    for refused in (
        desk.book.create_tenant({"name": "written"}, ACTOR),
        desk.book.update_tenant("written", {"weight": 2}, ACTOR),
        desk.book.delete_tenant("written", ACTOR),
        desk.book.update_key("written/ci", {"role": "admin"}, ACTOR),
        desk.book.revoke_key("written/ci", ACTOR),
        desk.book.rotate_key("written/ci", {}, ACTOR),
        desk.book.create_key({"tenant": "written", "name": "ci"}, ACTOR),
    ):
        with pytest.raises(Conflict, match="configuration"):
            desk.run(refused)


def test_a_tenant_of_the_file_may_have_keys_in_the_database(desk: Desk) -> None:
    made = desk.run(desk.book.create_key({"tenant": "written", "name": "more"}, ACTOR))
    listed = desk.run(desk.book.keys({"tenant": "written"}))["data"]
    assert [one["id"] for one in listed] == ["written/ci", made["id"]]


# --- what is refused
@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "tenant", "missing_required_parameter"),
        ({"tenant": "nowhere"}, "tenant", "tenant_not_found"),
        ({"tenant": "t", "tennant": "u"}, "tennant", "unknown_parameter"),
        ({"tenant": "t", "name": "a b"}, "name", "invalid_value"),
        ({"tenant": "t", "role": "root"}, "role", "invalid_value"),
        ({"tenant": "t", "models": "a"}, "models", "invalid_value"),
        ({"tenant": "t", "models": ["a", "[b"]}, "models[1]", "invalid_value"),
        ({"tenant": "t", "limits": {"requests": ["5/s", "many"]}}, "limits.requests[1]", "invalid_value"),
        ({"tenant": "t", "limits": {"request": "5/s"}}, "limits.request", "unknown_parameter"),
        ({"tenant": "t", "limits": {"token_budget": "5/week"}}, "limits.token_budget[0]", "invalid_value"),
        ({"tenant": "t", "limits": {"concurrency": 0}}, "limits.concurrency", "invalid_value"),
        ({"tenant": "t", "limits": {"concurrency": True}}, "limits.concurrency", "invalid_value"),
        ({"tenant": "t", "limits": None}, "limits", "invalid_value"),
        ({"tenant": "t", "allow_from": ["10.0.0.1/8"]}, "allow_from[0]", "invalid_value"),
        ({"tenant": "t", "expires_at": "tomorrow"}, "expires_at", "invalid_value"),
        ({"tenant": "t", "expires_at": "2020-01-01"}, "expires_at", "invalid_value"),
        ({"tenant": "t", "expires_at": 1e300}, "expires_at", "invalid_value"),
        ({"tenant": "t", "sha256": "0" * 64}, "sha256", "unknown_parameter"),
    ],
)
def test_a_wrong_field_is_named(desk: Desk, body: dict[str, Any], param: str, code: str) -> None:
    desk.tenant()
    with pytest.raises(GatewayError) as refused:
        desk.run(desk.book.create_key(body, ACTOR))
    assert (refused.value.param, refused.value.code) == (param, code) and refused.value.status in (400, 404)
    assert desk.run(desk.store.keys()) == []


@pytest.mark.parametrize("field", ["limits.requets", "tenannt"])
def test_a_misspelt_field_gets_the_right_one_suggested(field: str) -> None:
    body: dict[str, Any] = {"tenant": "t"} | ({"limits": {"requets": "5/s"}} if "." in field else {field: "x"})
    with pytest.raises(BadRequest, match=r"did you mean `(requests|tenant)`"):
        read(KeyForm, body)


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*TenantForm.model_fields, *KeyForm.model_fields]), JSONS))
def test_whatever_is_sent_is_read_or_refused_and_nothing_else(body: dict[str, Any]) -> None:
    for form in (TenantForm, KeyForm):
        try:
            read(form, body)
        except BadRequest as refused:
            assert refused.param and refused.message.endswith(".")


@given(
    st.sampled_from(["name", "role", "models", "allow_from", "expires_at", "requests", "token_budget", "concurrency"]),
    st.text(st.characters(min_codepoint=33, max_codepoint=1000), min_size=8).filter(lambda text: len({*text}) > 4),
    st.booleans(),
)
def test_a_refused_value_is_not_repeated(field: str, value: str, alone: bool) -> None:
    """It may be a key that was pasted into the wrong place."""
    sent: Any = value if alone else [value]
    within = field in ("requests", "token_budget", "concurrency")
    body = {"tenant": "t"} | ({"limits": {field: sent}} if within else {field: sent})
    try:
        read(KeyForm, body)
    except BadRequest as refused:
        assert value not in refused.message and value not in str(refused.param)
        assert refused.__cause__ is None and refused.__suppress_context__


@pytest.mark.parametrize("identity", ["sk-" + "s" * 48, "key_short", "", "../tenants", "key_0123456789abcde\0", "a/b"])
def test_an_id_that_is_none_is_not_found_and_not_repeated(desk: Desk, identity: str) -> None:
    book = desk.book
    for work in (book.key(identity), book.revoke_key(identity, ACTOR), book.rotate_key(identity, {}, ACTOR)):
        with pytest.raises(NotFound) as refused:
            desk.run(work)
        assert not identity or identity not in refused.value.message


@pytest.mark.parametrize("name", ["nobody", "", "a b", "\0", "x" * 65, "\ud800"])
def test_a_tenant_that_is_none_is_not_found(desk: Desk, name: str) -> None:
    book = desk.book
    for work in (book.tenant(name), book.update_tenant(name, {"weight": 2}, ACTOR), book.delete_tenant(name, ACTOR)):
        with pytest.raises(NotFound):
            desk.run(work)


def test_an_empty_change_is_refused(desk: Desk) -> None:
    desk.tenant()
    identity = desk.key()["id"]
    for work in (desk.book.update_tenant("t", {}, ACTOR), desk.book.update_key(identity, {}, ACTOR)):
        with pytest.raises(BadRequest, match="at least one field"):
            desk.run(work)


def test_a_name_is_taken_once_in_a_tenant(desk: Desk) -> None:
    desk.tenant()
    desk.tenant("u")
    desk.key(name="ci")
    other = desk.run(desk.book.create_key({"tenant": "u", "name": "ci"}, ACTOR))
    assert other["name"] == "ci"
    book = desk.book
    for work in (book.create_key({"tenant": "t", "name": "ci"}, ACTOR), book.create_tenant({"name": "t"}, ACTOR)):
        with pytest.raises(Conflict):
            desk.run(work)


# --- moments
@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("2027-01-31", "2027-01-31T00:00:00Z"), ("20270131", "2027-01-31T00:00:00Z"),
        ("2027-01-31T18:00", "2027-01-31T18:00:00Z"), ("2027-01-31T18:00:00+02:00", "2027-01-31T16:00:00Z"),
        ("1800000000", "2027-01-15T08:00:00Z"), (1800000000, "2027-01-15T08:00:00Z"),
        (1800000000.9, "2027-01-15T08:00:00Z"),
    ],
)  # fmt: skip
def test_how_a_moment_may_be_written(written: object, meant: str) -> None:
    assert iso(read_moment(written)) == meant


@given(JSONS | st.floats() | st.text(st.sampled_from("0123456789-:TZ+. W")))
def test_a_moment_is_read_or_refused(value: object) -> None:
    try:
        moment = read_moment(value)
    except WrongValue:
        return
    assert read_moment(iso(moment)) == int(moment)


# --- usage
def usage_row(number: int, **more: Any) -> UsageRow:
    plain: dict[str, Any] = {
        "id": f"row-{number:04}", "time": 1_900_000_000.0 + number // 3, "request_id": f"r{number}", "tenant": "t",
        "key": "key_0123456789abcdef", "model": "m", "asked": "", "replica": "m/vllm-1", "operation": "chat",
        "stream": 0, "status": 200, "code": "", "attempts": 1, "prompt": 10, "cached": 0, "completion": 5,
        "reasoning": 0, "source": "engine", "ttft_ms": None, "duration_ms": 12.5,
    }  # fmt: skip
    return UsageRow(**plain | more)


PERIOD = {"from": "1900000000", "to": "1900001000"}


def ask(desk: Desk, query: Mapping[str, str]) -> Report:
    return desk.run(desk.book.usage(read(UsageForm, {**PERIOD, **query})))


def test_usage_is_added_up_by_what_was_asked_for(desk: Desk) -> None:
    failed, other = {"status": 500, "prompt": 0, "completion": 0}, {"model": "n", "tenant": "written", "key": "ci"}
    desk.run(desk.store.add_usage([usage_row(1), usage_row(2, **failed), usage_row(3, **other)]))
    report = ask(desk, {"group_by": "tenant, model"})
    assert report.columns == ("tenant", "model", *SUMS)
    shown = [[line[name] for name in ("tenant", "model", "requests", "failed", "tokens")] for line in report.lines]
    assert shown == [["t", "m", 2, 1, 15], ["written", "n", 1, 0, 15]]
    assert report.document()["from"] == "2030-03-17T17:46:40Z"
    assert [line["requests"] for line in ask(desk, {"key": "written/ci"}).lines] == [1]
    assert [line["requests"] for line in ask(desk, {"model": "m", "tenant": "t", "operation": "chat"}).lines] == [2]


def test_the_usual_period_is_thirty_days_up_to_now(desk: Desk) -> None:
    now, day = time.time(), 86400
    ages = (29, 31)
    desk.run(desk.store.add_usage([usage_row(age, time=now - age * day) for age in ages]))
    report = desk.run(desk.book.usage(read(UsageForm, {})))
    assert [line["requests"] for line in report.lines] == [1]
    until = iso(now - 30 * day)
    earlier = desk.run(desk.book.usage(read(UsageForm, {"to": until})))
    assert [line["requests"] for line in earlier.lines] == [1] and earlier.until - earlier.since == 30 * day


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(count=st.integers(0, 25), limit=st.integers(1, 9))
def test_paging_shows_every_row_once_whatever_the_size_of_a_page(desk: Desk, count: int, limit: int) -> None:
    desk.run(desk.store.forget_usage(2e9))
    desk.run(desk.store.add_usage([usage_row(number) for number in range(count)]))
    seen: list[object] = []
    query = {"rows": "true", "limit": str(limit)}
    for _ in range(count + 2):
        page = ask(desk, query)
        assert len(page.lines) <= limit
        seen += [line["id"] for line in page.lines]
        if page.next is None:
            break
        query["after"] = page.next
    else:
        pytest.fail("paging did not end")
    assert seen == [f"row-{number:04}" for number in range(count)]


def test_rows_as_csv_have_a_header_and_open_safely_in_a_spreadsheet(desk: Desk) -> None:
    evil = ["=cmd|'/c calc'!A1", "+1+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1"]
    asked = [*evil, "plain", 'with "quotes", commas\nand lines']
    desk.run(desk.store.add_usage([usage_row(number, asked=text) for number, text in enumerate(asked)]))
    text = ask(desk, {"rows": "true"}).csv()
    header, *lines = csv.reader(io.StringIO(text, newline=""))
    assert tuple(header) == UsageRow._fields
    cells = [line[header.index("asked")] for line in lines]
    assert cells == [*(f"'{one}" for one in evil), *asked[len(evil) :]]
    assert lines[0][header.index("time")] == "2030-03-17T17:46:40.000Z"
    assert [line[header.index("ttft_ms")] for line in lines] == [""] * len(asked)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"from": "2030-01-02", "to": "2030-01-02"}, "from"),
        ({"from": "yesterday"}, "from"),
        ({"group_by": "tenant,colour"}, "group_by[1]"),
        ({"group_by": "tenant,tenant"}, "group_by"),
        ({"group_by": "tenant", "rows": "true"}, "group_by"),
        ({"limit": "5"}, "rows"),
        ({"rows": "true", "limit": "10001"}, "limit"),
        ({"rows": "true", "after": "nonsense"}, "after"),
        ({"rows": "perhaps"}, "rows"),
        ({"format": "xml"}, "format"),
        ({"tennant": "t"}, "tennant"),
        ({"tenant": "a\0b"}, "tenant"),
        ({"tenant": "t", "key": "u/ci"}, "key"),
    ],
)
def test_a_wrong_question_about_usage_names_its_parameter(desk: Desk, query: dict[str, str], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        desk.run(desk.book.usage(read(UsageForm, query)))
    assert refused.value.param == param


# --- audit
def test_every_change_leaves_an_entry_that_says_who_and_what(desk: Desk) -> None:
    desk.tenant()
    identity = desk.key(name="ci")["id"]
    desk.run(desk.book.update_key(identity, {"role": "operator"}, ACTOR))
    fresh = desk.run(desk.book.rotate_key(identity, {}, ACTOR))["id"]
    desk.run(desk.book.revoke_key(fresh, ACTOR))
    desk.run(desk.book.update_tenant("t", {"weight": 2}, ACTOR))
    desk.run(desk.book.delete_tenant("t", ACTOR))
    entries = desk.run(desk.book.audit({}))["data"]
    assert [one["action"] for one in entries] == [
        "tenant.create", "key.create", "key.update", "key.rotate", "key.revoke", "tenant.update", "tenant.delete",
        *(one["action"] for one in entries[7:])]  # fmt: skip
    assert {(one["actor"], one["address"]) for one in entries} == {("ops/key_of_the_admin", "192.0.2.7")}
    assert (entries[2]["before"]["role"], entries[2]["after"]["role"]) == ("user", "operator")
    verdict = desk.run(desk.book.verify_audit({}))
    assert verdict["ok"] and verdict["entries"] == len(entries) and verdict["head"] == entries[-1]["hash"]
    assert desk.run(desk.book.verify_audit({"expect": entries[2]["hash"]}))["ok"]
    assert not desk.run(desk.book.verify_audit({"expect": "0" * 64}))["ok"]


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("limit", [1, 3, 5, 6])
def test_the_audit_trail_is_listed_page_by_page_in_both_orders(desk: Desk, order: str, limit: int) -> None:
    for number in range(5):
        desk.tenant(f"t{number}")
    seen: list[int] = []
    query = {"order": order, "limit": limit}
    for _ in range(7):
        page = desk.run(desk.book.audit(query))
        seen += [one["seq"] for one in page["data"]]
        if page["next"] is None:
            break
        query["after"] = page["next"]
    assert seen == ([1, 2, 3, 4, 5] if order == "asc" else [5, 4, 3, 2, 1])


@pytest.mark.parametrize("query", [{"order": "up"}, {"limit": 0}, {"limit": 1001}, {"after": -1}, {"before": 3}])
def test_a_wrong_question_about_the_audit_trail_is_refused(desk: Desk, query: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as refused:
        desk.run(desk.book.audit(query))
    assert refused.value.param == next(iter(query))


# --- tools of tenants
def test_tools_are_told_in_full_and_replaced_as_a_whole(desk: Desk) -> None:
    everything = {"allow": ["*"], "deny": [], "types": ["*"], "on_violation": "refuse"}
    assert desk.tenant("plain")["tools"] == everything
    made = desk.tenant("t", tools={"deny": ["rm_*"], "on_violation": "strip"})
    assert made["tools"] == everything | {"deny": ["rm_*"], "on_violation": "strip"}
    assert desk.run(desk.book.update_tenant("t", {"weight": 2}, ACTOR))["tools"] == made["tools"]
    changed = desk.run(desk.book.update_tenant("t", {"tools": {"allow": ["get_*"]}}, ACTOR))
    assert changed["tools"] == everything | {"allow": ["get_*"]} == desk.run(desk.book.tenant("t"))["tools"]
    assert desk.run(desk.book.update_tenant("t", {"tools": {}}, ACTOR))["tools"] == everything


@pytest.mark.parametrize(
    ("tools", "param", "said"),
    [
        ({"alow": []}, "tools.alow", "allow"),
        ({"allow": ["["]}, "tools.allow[0]", "glob"),
        ({"deny": ["x"] * 1001}, "tools.deny", "1000"),
        ({"on_violation": "ignore"}, "tools.on_violation", "strip"),
        ([], "tools", ""),
    ],
)
def test_wrong_tools_are_refused_by_name(desk: Desk, tools: Any, param: str, said: str) -> None:
    desk.tenant("t")
    for work in (
        desk.book.create_tenant({"name": "n", "tools": tools}, ACTOR),
        desk.book.update_tenant("t", {"tools": tools}, ACTOR),
    ):
        with pytest.raises(BadRequest) as raised:
            desk.run(work)
        assert raised.value.param == param and said in raised.value.message
