"""What somebody tries who wants more than he was given: other routes and headers, names that come back, restarts,
floods of questions. And whether the books agree with each other afterwards."""

from __future__ import annotations

import base64
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.engine import Engine, Exchange
from tests.doubles.issuer import Issuer
from tests.e2e.harness import ADMIN, Gateway, Lab, base_config, chat, digest, eventually, replica
from tests.e2e.test_admin import OPERATOR, Office, refused, used
from tests.e2e.test_admin import office as office  # a fixture
from tests.e2e.test_stores import postgres as postgres  # another
from tests.e2e.wire import Wire, request
from tests.servers.postgres import Postgres

Start = Callable[..., Gateway]


# --- ways around the guard
PATHS = (
    "/admin/v1/keys", "/admin/v1/%6beys", "/%61dmin/v1/keys", "/admin//v1/keys", "//admin/v1/keys", "/admin/v1/keys/",
    "/ADMIN/v1/keys", "/health/../admin/v1/keys", "/health/%2e%2e/admin/v1/keys", "/admin/v1/keys?x=/health",
    "/admin/v1/keys#/health", "/admin/v1/keys;/health", "/admin/v1/./keys", "/admin/v1/usage/../keys",
    "http://gateway.test/admin/v1/keys", "http://gateway.test/health/../admin/v1/keys", "/admin/v1/keys%00",
    "/admin/v1/keys%0a", "/admin%2fv1%2fkeys", "/admin/v1/keys/%2e%2e/keys", "/v1/models/../../admin/v1/keys",
)  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_no_spelling_of_a_path_shows_keys_to_those_who_may_not_see_them(lab: Lab, office: Office, path: str) -> None:
    made = office.make()
    for key, statuses in ((None, {400, 401, 404}), (made["key"], {400, 403, 404})):
        for method in ("GET", "HEAD", "POST", "OPTIONS"):
            answer = lab.call(None, path, method=method, key=key)
            assert answer.status in statuses | ({405} if key else set()), (method, answer.status)
            assert made["id"].encode() not in answer.body


OVERRIDES = ("x-http-method-override", "x-method-override", "x-http-method", "_method", "x-original-method")


def test_a_method_is_what_the_request_line_says(lab: Lab, office: Office) -> None:
    made = office.make()
    path = f"/admin/v1/keys/{made['id']}"
    headers = [*(f"{name}: DELETE" for name in OVERRIDES), "x-original-url: /health", "x-rewrite-url: /health"]
    assert lab.call(None, path, method="GET", key=OPERATOR, headers=headers).status == 200
    assert lab.call(None, f"{path}?_method=DELETE", method="GET", key=OPERATOR, headers=headers).status == 200
    assert lab.call({}, path, method="POST", key=ADMIN, headers=headers).status == 405
    assert lab.call(None, path, method="GET", key=None, headers=headers).status == 401
    assert office.status(made["key"]) == 200


FIELDS = ("id", "tenant", "digest", "sha256", "key", "revoked_at", "created_at", "rotated_from", "source")


@pytest.mark.parametrize("field", FIELDS)
def test_a_change_touches_nothing_but_what_may_be_changed(office: Office, field: str) -> None:
    made = office.make()
    for path in (f"/keys/{made['id']}", f"/keys/{made['id']}/rotate", "/keys"):
        method = "PATCH" if path.endswith(made["id"]) else "POST"
        if (method, path, field) != ("POST", "/keys", "tenant"):
            body = {field: "x", "tenant": made["tenant"]} if path == "/keys" else {field: "x"}
            refused(office.ask(method, path, body), 400, field)
    assert office.good("GET", f"/keys/{made['id']}") == {name: made[name] for name in made if name != "key"}


def test_a_key_says_where_it_may_be_used_whatever_its_forwarder_looks_like(lab: Lab) -> None:
    """Lines of the header are read in their order and under any spelling, on the hot routes and on the others."""
    bound = "sk-bound" + "b" * 40
    keys = [{"name": "bound", "sha256": digest(bound), "allow_from": ["192.0.2.0/24", "2001:db8::/32"]}]
    tenant = {"name": f"{lab.tenant}-b", "keys": keys}
    inside, outside = "192.0.2.7", "198.51.100.1"
    models = {"m": [replica(lab.engine())]}

    def statuses(*lines: str) -> set[int]:
        return {
            lab.call(chat(), key=bound, headers=lines).status,
            lab.call(None, "/v1/models", method="GET", key=bound, headers=lines).status,
        }

    lab.serve(models, tenants=[tenant])
    assert statuses(f"X-Forwarded-For: {inside}") == {401}
    lab.serve(models, tenants=[tenant], server={"trusted_proxies": ["127.0.0.0/8", "10.0.0.0/8"]})
    for lines, status in (
        ([f"X-Forwarded-For: {inside}"], 200),
        ([f"x-FORWARDED-for: {outside}", f"X-Forwarded-For: {inside}"], 200),
        ([f"X-Forwarded-For: {inside}", f"x-forwarded-for: {outside}"], 401),
        ([f"X-Forwarded-For: {inside}", "x-forwarded-for: 10.0.0.1", "X-FORWARDED-FOR: 10.0.0.2"], 200),
        ([f"X-Forwarded-For: {outside}", "x-forwarded-for: 10.0.0.1", f"Forwarded: for={inside}"], 401),
        ([f"x-real-ip: {inside}", f"true-client-ip: {inside}"], 401),
        (["X-Forwarded-For: ::ffff:192.0.2.7"], 200),
        (["X-Forwarded-For: 2001:db8::1%eth0"], 200),
        (["X-Forwarded-For: 10.0.0.1"], 401),
        ([f"X-Forwarded-For: {inside}," + "10.0.0.1," * 3000 + "10.0.0.1"], 401),
    ):
        assert statuses(*lines) == {status}, lines


def test_a_connection_from_before_proxies_were_trusted_is_not_read_the_old_way_for_long(lab: Lab) -> None:
    """Its parser would go on believing the last line alone."""
    models = {"m": [replica(lab.engine())]}
    lab.serve(models)
    for server in ({"trusted_proxies": ["127.0.0.0/8"]}, {}):
        with Wire(lab.gateway.port) as idle:
            assert idle.ask("POST", "/v1/chat/completions", chat(), key=lab.key).rest().status == 200
            lab.serve(models, server=server)
            assert idle.at_end()
        with Wire(lab.gateway.port) as fresh:
            for _ in range(2):
                assert fresh.ask("POST", "/v1/chat/completions", chat(), key=lab.key).rest().status == 200


# --- names that come back
def test_a_tenant_does_not_see_what_another_of_its_name_has_used(office: Office) -> None:
    tenant = office.tenant()
    old = office.make(tenant)
    assert office.status(old["key"]) == 200
    assert eventually(lambda: used(office, f"tenant={tenant}")[0]["requests"] == 1)
    office.good("DELETE", f"/tenants/{tenant}")
    office.good("POST", "/tenants", {"name": tenant})
    new = office.make(tenant)["key"]
    for query in ("", "from=2020-01-01", "from=2020-01-01&to=2020-02-01", "from=2020-01-01&group_by=day"):
        assert sum(one["requests"] for one in used(office, query, new)) == 0
    assert used(office, "from=2020-01-01&rows=true", new) == []
    assert office.status(new) == 200
    assert eventually(lambda: used(office, "from=2020-01-01", new)[0]["requests"] == 1)
    assert used(office, f"tenant={tenant}")[0]["requests"] == 2


def test_keys_of_a_tenant_that_left_the_configuration_do_not_come_to_life_with_another(lab: Lab) -> None:
    office = Office(lab.gateway)
    models = {"m": [replica(lab.engine())]}
    lab.serve(models)
    left = office.make(lab.tenant)
    lab.gateway.configure(base_config(models, []))
    error = refused(office.ask("POST", "/tenants", {"name": lab.tenant}), 409)
    assert "Revoke them" in error["message"] and office.status(left["key"]) == 401
    office.good("DELETE", f"/keys/{left['id']}")
    office.good("POST", "/tenants", {"name": lab.tenant})
    assert office.status(left["key"]) == 401 and office.status(office.make(lab.tenant)["key"]) == 200
    office.good("DELETE", f"/tenants/{lab.tenant}")


# --- questions without end
def test_long_questions_are_refused_at_their_first_mistake(office: Office) -> None:
    made = office.make()
    many = "&".join(f"{number:04x}=" for number in range(9000))
    for query, param in (
        (f"{many}&0000=", "0000"), (f"{many}&2327=", "2327"), ("group_by=" + "x," * 25_000, "group_by[0]"),
        ("group_by=" + "tenant," * 8_000, "group_by[8]"),
    ):  # fmt: skip
        refused(office.ask("GET", f"/usage?{query}", key=made["key"]), 400, param)


# --- the trail
def test_a_reload_by_signal_is_in_the_log_where_there_is_no_trail(start: Start) -> None:
    with Engine() as engine:
        gateway = start(base_config({"m": [replica(engine)]}, [], state={"database": None}))
        gateway.process.send_signal(signal.SIGHUP)
        lines: list[dict[str, Any]] = eventually(lambda: [
            json.loads(line) for line in gateway.log().splitlines() if '"audit"' in line
        ])  # fmt: skip
    assert [(line["action"], line["target"], line["actor"]) for line in lines] == [
        ("config.reload", "configuration", "system:signal")
    ]


# --- the books
@pytest.fixture
def own(start: Start, tmp_path: Path) -> Iterator[tuple[Gateway, Engine, dict[str, Any]]]:
    """A gateway with a database of its own, so that it can be killed and started again."""
    with Engine() as engine, Engine() as spare:
        spare_model = {"replicas": [replica(spare)], "limits": {"token_budget": "100000/day"}}
        models = {"m": {"replicas": [replica(engine)], "fallbacks": ["spare"]}, "spare": spare_model}
        state = {"database": f"sqlite:///{tmp_path}/s.db", "spool": str(tmp_path / "spool")}
        config = base_config(models, [], state=state)
        yield start(config), engine, config


def left(gateway: Gateway, key: str, model: str = "m") -> int:
    """Tokens that are left of the tightest budget, by what the gateway says to a request that is refused."""
    with Wire(gateway.port) as wire:
        answer = wire.ask("POST", "/v1/chat/completions", chat(model, max_tokens=10**9), key=key).rest()
    assert answer.status == 429, answer.body
    return int(answer.header("x-ratelimit-remaining-tokens") or -1)


def cut(x: Exchange) -> None:
    x.begin()
    x.delta("one ")
    x.delta("two ")
    x.reset()


def hang(x: Exchange) -> None:
    x.begin()
    x.delta("one ")
    x.wait()


def requests_of_every_kind(gateway: Gateway, engine: Engine, key: str) -> list[int]:
    """Sends them one after the other; the statuses that have to be in the books."""
    found: list[int] = []

    def one(body: Any, script: Callable[[Exchange], None] | None = None, leaves: bool = False) -> None:
        if script is not None:
            engine.once(script)
        with Wire(gateway.port) as wire:
            wire.send(request("POST", "/v1/chat/completions", body, key=key))
            if leaves:
                wire.answer().until(1)
                found.append(499)
            else:
                answer = wire.answer().rest()
                found.append(502 if answer.status == 200 and b'"error"' in answer.body else answer.status)

    one(chat())
    one(chat(stream=True))
    one(chat(stream=True, stream_options={"include_usage": True}))
    one(chat(stream=True), cut)
    one(chat(stream=True), hang, leaves=True)
    one(chat(), lambda x: x.fail("no", 400))
    one(chat(), lambda x: x.fail("bug", 500))  # the fallback answers
    one(chat(stream=True), lambda x: x.fail("bug", 500))  # and here
    one(chat("nothing"))
    one(b"{")
    one(chat(max_tokens=10**9))
    return found


def test_each_request_is_one_row_and_budgets_are_what_the_rows_add_up_to(
    own: tuple[Gateway, Engine, dict[str, Any]], start: Start
) -> None:
    """Whatever became of the requests; also in the next process, although this one is killed."""
    gateway, engine, config = own
    office = Office(gateway)
    tenant = office.tenant(limits={"token_budget": "50000/day"})
    made = office.make(tenant, limits={"token_budget": "40000/day", "tokens": "90000/hour"})
    statuses = requests_of_every_kind(gateway, engine, made["key"])
    assert eventually(lambda: len(used(office, f"tenant={tenant}&rows=true")) == len(statuses))
    rows = sorted(used(office, f"tenant={tenant}&rows=true"), key=lambda row: int(row["id"].rpartition("-")[2]))
    assert [row["status"] for row in rows] == statuses == [200, 200, 200, 502, 499, 400, 200, 200, 404, 400, 429]
    assert [row["attempts"] for row in rows] == [1, 1, 1, 1, 1, 1, 2, 2, 0, 0, 0]
    assert [row["replica"].partition("/")[0] for row in rows] == ["m"] * 6 + ["spare"] * 2 + [""] * 3
    sources = ["engine"] * 3 + ["estimate"] * 2 + [""] + ["engine"] * 2 + [""] * 3
    assert [row["source"] for row in rows] == sources
    spent = sum(row["prompt"] + row["completion"] for row in rows)
    assert all(row["prompt"] + row["completion"] > 0 for row, source in zip(rows, sources, strict=True) if source)
    assert left(gateway, made["key"]) == 40000 - spent

    with Wire(gateway.port) as wire:  # one more, which the database has not heard of when the process is killed
        last = wire.ask("POST", "/v1/chat/completions", chat(), key=made["key"]).rest().json()["usage"]["total_tokens"]
    folder = Path(config["state"]["spool"])
    assert eventually(lambda: len(used(office, f"tenant={tenant}&rows=true")) + _spooled(folder) >= len(statuses) + 2)
    gateway.process.kill()
    gateway.process.wait()
    second = start(config)
    assert left(second, made["key"]) == 40000 - spent - last


def _spooled(folder: Path) -> int:
    """Rows that wait on the disk."""
    count = 0
    for file in folder.glob("*"):
        if file.suffix in (".open", ".rows"):
            try:
                count += sum(len(json.loads(line)) for line in file.read_bytes().splitlines())
            except OSError:  # just delivered
                continue
    return count


# --- tokens
def test_no_part_of_a_token_is_told_to_anybody(start: Start, tmp_path: Path) -> None:
    """Good, forged and expired ones, at the debug level: in bodies, logs, metrics, usage and the trail."""
    with Engine() as engine, Issuer() as issuer:
        tenant = {"name": "research", "keys": []}
        gateway = start(
            base_config({"m": [replica(engine)]}, [tenant], auth={"jwt": [issuer.entry()]}),
            args=("--log-level", "debug"),
        )
        good = issuer.token(tenant="research", sub="worker", note="canary-of-the-claims")
        head, claims, signature = good.split(".")
        forged = f"{head}.{claims}.{signature[:-8]}AAAAAAAA"
        expired = issuer.token(tenant="research", exp=1_600_000_000, note="canary-of-the-claims")
        nowhere = issuer.token(tenant="nobody", note="canary-of-the-claims")
        shown = []
        for token in (good, forged, expired, nowhere):
            with Wire(gateway.port) as wire:
                shown.append(wire.ask("POST", "/v1/chat/completions", chat(), key=token).rest())
            shown += [
                gateway.get(path, token) for path in ("/v1/models", "/admin/v1/usage?rows=true", "/admin/v1/keys")
            ]
        office = Office(gateway)
        assert eventually(lambda: used(office, "tenant=research")[0]["requests"] == 1)
        texts = [str(answer.body if hasattr(answer, "body") else answer.text) for answer in shown]
        texts += [gateway.get(f"/admin/v1/{what}").text for what in ("usage?rows=true", "audit", "keys", "tenants")]
        texts.append(gateway.metrics_page())
        gateway.terminate()
        gateway.wait()
        texts += [gateway.log(), (gateway.folder / "stdout").read_text()]
    whole = "\n".join(texts)
    assert "jwt:worker" in whole  # what a line is traced by
    secrets = [part for token in (good, forged, expired, nowhere) for part in token.split(".")]
    secrets += [digest(token) for token in (good, forged, expired, nowhere)]
    pieces = {secret[at : at + 8] for secret in secrets for at in range(len(secret) - 7)}
    assert not [piece for piece in pieces if piece in whole] and "canary" not in whole
    assert base64.urlsafe_b64encode(b"canary").decode().rstrip("=")[:6] not in whole


def test_a_budget_outlives_a_crash_while_the_database_is_down(start: Start, tmp_path: Path, postgres: Postgres) -> None:
    """The rows of the process that died are on the disk only, until the database is back."""
    key = "sk-outlives" + "o" * 40
    tenant = {"name": "red", "limits": {"token_budget": "5000/day"}, "keys": [{"name": "ci", "sha256": digest(key)}]}
    state = {"database": postgres.create(), "spool": str(tmp_path / "spool")}
    with Engine() as engine:
        config = base_config({"m": [replica(engine)]}, [tenant], state=state)
        first = start(config)
        postgres.stop()
        try:
            spent = 0
            for _ in range(3):
                with Wire(first.port) as wire:
                    answer = wire.ask("POST", "/v1/chat/completions", chat(), key=key).rest()
                spent += answer.json()["usage"]["total_tokens"]
            assert eventually(lambda: _spooled(tmp_path / "spool") == 3)
            first.process.kill()
            first.process.wait()
            second = start(config)
            assert left(second, key) == 5000  # nobody can know better yet
        finally:
            postgres.start()
        assert eventually(lambda: left(second, key) == 5000 - spent, timeout=60)
