"""The administration over HTTP: who may do what, that it is in force at once, and how everything is answered."""

from __future__ import annotations

import csv
import io
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.doubles.engine import Engine, Exchange
from tests.e2e.harness import ADMIN, Gateway, Lab, base_config, chat, digest, eventually, replica, together
from tests.e2e.wire import Wire

OPERATOR = "sk-operator" + "o" * 40
Start = Callable[..., Gateway]
_numbers = itertools.count(1)


class Office:
    """A gateway as its administrators see it. Tenants that are made here are gone in the end."""

    def __init__(self, gateway: Gateway, key: str = ADMIN) -> None:
        self.gateway, self.key = gateway, key
        self._tenants: list[str] = []

    def ask(self, method: str, path: str, body: Any = None, key: str | None = None, **options: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key or self.key}"}
        return self.gateway.http.request(method, f"/admin/v1{path}", json=body, headers=headers, **options)

    def good(self, method: str, path: str, body: Any = None, **options: Any) -> dict[str, Any]:
        answer = self.ask(method, path, body, **options)
        assert answer.status_code == 200, answer.text
        document: dict[str, Any] = answer.json()
        return document

    def tenant(self, **more: Any) -> str:
        name = f"made-{next(_numbers)}"
        self.good("POST", "/tenants", {"name": name, **more})
        self._tenants.append(name)
        return name

    def make(self, tenant: str | None = None, **more: Any) -> dict[str, Any]:
        return self.good("POST", "/keys", {"tenant": tenant or self.tenant(), **more})

    def status(self, key: str, model: str = "m") -> int:
        """What a chat with that key is answered."""
        with Wire(self.gateway.port) as wire:
            return wire.ask("POST", "/v1/chat/completions", chat(model), key=key).rest().status

    def close(self) -> None:
        for name in self._tenants:
            self.ask("DELETE", f"/tenants/{name}")


@pytest.fixture
def office(lab: Lab) -> Iterator[Office]:
    """In front of an engine behind the models `m` and `n`, with an operator's key beside the test's and the admin's."""
    engine = lab.engine()
    operator = {"name": f"{lab.tenant}-ops", "models": [],
                "keys": [{"name": "operator", "sha256": digest(OPERATOR), "role": "operator"}]}  # fmt: skip
    lab.serve({"m": [replica(engine)], "n": [replica(engine)]}, tenants=[operator])
    office = Office(lab.gateway)
    yield office
    office.close()


def refused(answer: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    """The error of an answer that has to be one."""
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(answer.json()) == {"error"} and set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    return error


# --- who may do what
READS = (
    "/tenants", "/tenants/{tenant}", "/keys", "/keys/{key}", "/usage", "/audit", "/audit/verify", "/models",
    "/replicas",
)  # fmt: skip
ROUTES: list[tuple[str, str, Any, tuple[int, int, int]]] = [  # answers to a user, an operator, an admin
    *(("GET", path, None, (403 if path != "/usage" else 200, 200, 200)) for path in READS),
    ("POST", "/replicas/{replica}/drain", None, (403, 200, 200)),
    ("POST", "/replicas/{replica}/undrain", None, (403, 200, 200)),
    ("POST", "/reload", None, (403, 200, 200)),
    ("POST", "/tenants", {"name": "{fresh}"}, (403, 403, 200)),
    ("PATCH", "/tenants/{tenant}", {"weight": 2}, (403, 403, 200)),
    ("DELETE", "/tenants/{tenant}", None, (403, 403, 200)),
    ("POST", "/keys", {"tenant": "{tenant}"}, (403, 403, 200)),
    ("PATCH", "/keys/{key}", {"role": "admin"}, (403, 403, 200)),
    ("POST", "/keys/{key}/rotate", {}, (403, 403, 200)),
    ("DELETE", "/keys/{key}", None, (403, 403, 200)),
]


@pytest.mark.parametrize(("method", "path", "body", "statuses"), ROUTES)
def test_what_a_role_may_do(
    lab: Lab, office: Office, method: str, path: str, body: Any, statuses: tuple[int, int, int]
) -> None:
    tenant = office.tenant()
    names = {"tenant": tenant, "key": office.make(tenant)["id"], "replica": lab.gateway.replicas()[0]["id"]}
    names["fresh"] = f"fresh-{next(_numbers)}"
    sent = None if body is None else json.loads(json.dumps(body).replace('"{', '"%(').replace('}"', ')s"') % names)
    before = office.good("GET", "/keys?revoked=true"), office.good("GET", "/tenants")
    for key, status in zip((lab.key, OPERATOR), statuses, strict=False):
        answer = office.ask(method, path.format(**names), sent, key=key)
        if status == 403:
            assert refused(answer, 403)["code"] == "forbidden"
        else:
            assert answer.status_code == 200, answer.text
    assert before == (office.good("GET", "/keys?revoked=true"), office.good("GET", "/tenants"))
    assert office.ask(method, path.format(**names), sent).status_code == statuses[2]
    anybody = lab.gateway.http.request(method, f"/admin/v1{path.format(**names)}", json=sent)
    assert refused(anybody, 401)["code"] == "invalid_api_key"
    office.ask("DELETE", f"/tenants/{names['fresh']}")


def test_a_role_is_asked_for_before_anything_that_was_sent_is_looked_at(lab: Lab, office: Office) -> None:
    for key in (lab.key, OPERATOR):
        for method, path in (("POST", "/keys"), ("PATCH", "/tenants/nobody"), ("DELETE", "/keys/nobody")):
            refused(office.ask(method, path, {"nonsense": 1}, key=key), 403)


# --- in force at once
def test_a_key_works_from_the_answer_that_shows_it_to_the_answer_that_revokes_it(office: Office) -> None:
    made = office.make()
    assert office.status(made["key"]) == 200
    assert office.good("DELETE", f"/keys/{made['id']}")["revoked_at"]
    assert office.status(made["key"]) == 401


def test_deleting_a_tenant_closes_all_its_keys_also_when_another_takes_its_name(office: Office) -> None:
    tenant = office.tenant()
    keys = [office.make(tenant)["key"] for _ in range(3)]
    assert [office.status(key) for key in keys] == [200] * 3
    assert office.good("DELETE", f"/tenants/{tenant}") == {"object": "tenant", "name": tenant, "deleted": True}
    assert [office.status(key) for key in keys] == [401] * 3
    office.good("POST", "/tenants", {"name": tenant})
    assert [office.status(key) for key in keys] == [401] * 3
    assert office.status(office.make(tenant)["key"]) == 200


def test_models_of_tenants_and_keys_change_at_once(office: Office) -> None:
    tenant = office.tenant()
    made = office.make(tenant)

    def reach() -> list[int]:
        return [office.status(made["key"], model) for model in ("m", "n")]

    assert reach() == [200, 200]
    office.good("PATCH", f"/keys/{made['id']}", {"models": ["n"]})
    assert reach() == [404, 200]
    office.good("PATCH", f"/tenants/{tenant}", {"models": ["m"]})
    assert reach() == [404, 404]
    office.good("PATCH", f"/keys/{made['id']}", {"models": None})
    assert reach() == [200, 404]


@pytest.mark.parametrize("of", ["tenant", "key"])
def test_limits_change_at_once_and_what_was_spent_stays_spent(office: Office, of: str) -> None:
    tenant = office.tenant()
    made = office.make(tenant)
    path = f"/tenants/{tenant}" if of == "tenant" else f"/keys/{made['id']}"
    office.good("PATCH", path, {"limits": {"requests": "5/hour"}})
    assert [office.status(made["key"]) for _ in range(3)] == [200] * 3
    office.good("PATCH", path, {"limits": {"requests": "4/hour"}})
    assert [office.status(made["key"]) for _ in range(2)] == [200, 429]
    office.good("PATCH", path, {"limits": {}})
    assert office.status(made["key"]) == 200


def test_networks_and_roles_change_at_once(office: Office) -> None:
    made = office.make(role="operator")
    path = f"/keys/{made['id']}"
    assert office.ask("GET", "/replicas", key=made["key"]).status_code == 200
    office.good("PATCH", path, {"role": "user"})
    assert office.ask("GET", "/replicas", key=made["key"]).status_code == 403
    office.good("PATCH", path, {"allow_from": ["192.0.2.0/24"]})
    assert office.status(made["key"]) == 401
    office.good("PATCH", path, {"allow_from": []})
    assert office.status(made["key"]) == 200


def test_a_rotated_key_and_its_successor_work_side_by_side_for_the_overlap_only(office: Office) -> None:
    first = office.make(name="ci")
    second = office.good("POST", f"/keys/{first['id']}/rotate")
    assert [office.status(key["key"]) for key in (first, second)] == [200, 200]
    third = office.good("POST", f"/keys/{second['id']}/rotate", {"overlap": "0s"})
    assert [office.status(key["key"]) for key in (first, second, third)] == [200, 401, 200]
    fourth = office.good("POST", f"/keys/{third['id']}/rotate", {"overlap": "400ms"})
    assert eventually(lambda: office.status(third["key"]) == 401) and office.status(fourth["key"]) == 200


def test_a_key_ends_when_its_time_has_come(office: Office) -> None:
    made = office.make(expires_at=time.time() + 1.5)
    assert office.status(made["key"]) == 200
    assert eventually(lambda: office.status(made["key"]) == 401)
    ends = datetime.fromisoformat(office.good("GET", f"/keys/{made['id']}")["expires_at"])
    assert ends <= datetime.now(UTC)


def test_a_stream_that_runs_when_its_key_is_revoked_is_left_to_finish(lab: Lab) -> None:
    release = threading.Event()

    def script(x: Exchange) -> None:
        x.begin()
        x.delta("before ")
        x.wait(release)
        x.delta("after", "stop")
        x.done()

    lab.one(script=script)
    office = Office(lab.gateway)
    made = office.make()
    with Wire(lab.gateway.port) as wire:
        answer = wire.ask("POST", "/v1/chat/completions", chat(stream=True), key=made["key"]).until(1)
        office.good("DELETE", f"/keys/{made['id']}")
        assert office.status(made["key"]) == 401
        release.set()
        assert answer.rest().text() == "before after" and answer.ended_well()
    office.close()


def test_of_two_who_take_the_same_name_at_once_one_gets_it(office: Office) -> None:
    tenant, name = office.tenant(), f"made-{next(_numbers)}"
    answers = together([lambda: office.ask("POST", "/tenants", {"name": name})] * 6)
    assert sorted(answer.status_code for answer in answers) == [200, *[409] * 5]
    answers = together([lambda: office.ask("POST", "/keys", {"tenant": tenant, "name": "ci"})] * 6)
    assert sorted(answer.status_code for answer in answers) == [200, *[409] * 5]
    office.ask("DELETE", f"/tenants/{name}")


# --- locking oneself out
def test_nobody_takes_their_own_access_away_by_mistake(office: Office) -> None:
    tenant = office.tenant()
    own = office.make(tenant, role="admin")
    path = f"/keys/{own['id']}"
    for method, target, body in (
        ("DELETE", path, None), ("PATCH", path, {"role": "operator"}), ("DELETE", f"/tenants/{tenant}", None),
    ):  # fmt: skip
        error = refused(office.ask(method, target, body, key=own["key"]), 409)
        assert error["code"] == "own_access" and "?force=true" in error["message"]
    assert office.ask("PATCH", path, {"role": "admin", "name": "me"}, key=own["key"]).status_code == 200
    assert office.ask("PATCH", path + "?force=true", {"role": "operator"}, key=own["key"]).status_code == 200
    refused(office.ask("DELETE", path + "?force=true", key=own["key"]), 403)
    office.good("PATCH", path, {"role": "admin"})
    assert office.ask("DELETE", path + "?force=true", key=own["key"]).status_code == 200
    refused(office.ask("GET", "/keys", key=own["key"]), 401)


# --- what the configuration owns
def test_what_the_configuration_defines_is_listed_and_cannot_be_changed_here(lab: Lab, office: Office) -> None:
    (key,) = office.good("GET", f"/keys?tenant={lab.tenant}")["data"]
    assert (key["id"], key["source"], key["created_at"]) == (f"{lab.tenant}/test", "file", None)
    assert office.good("GET", f"/tenants/{lab.tenant}")["source"] == "file"
    for path in (f"/keys/{key['id']}", f"/keys/{quote(key['id'], safe='')}"):
        assert office.good("GET", path) == key
        changes = ("PATCH", path, {"role": "admin"}), ("DELETE", path, None), ("POST", f"{path}/rotate", {})
        for method, target, body in changes:
            assert "configuration" in refused(office.ask(method, target, body), 409)["message"]
    for method, target, body in (
        ("POST", "/tenants", {"name": lab.tenant}), ("PATCH", f"/tenants/{lab.tenant}", {"weight": 2}),
        ("DELETE", f"/tenants/{lab.tenant}", None),
    ):  # fmt: skip
        refused(office.ask(method, target, body), 409, "name")
    assert office.status(lab.key) == 200
    more = office.make(lab.tenant)
    assert office.status(more["key"]) == 200
    office.good("DELETE", f"/keys/{more['id']}")


def test_a_tenant_that_leaves_the_configuration_takes_its_stored_keys_out_of_force(lab: Lab, office: Office) -> None:
    made = office.make(lab.tenant)
    models = {"m": [replica(lab.engine())]}
    lab.gateway.configure(base_config(models, []))
    assert office.status(made["key"]) == 401
    lab.serve(models)
    assert office.status(made["key"]) == 200
    office.good("DELETE", f"/keys/{made['id']}")


# --- what is sent wrongly
BIG = b'{"tenant": "' + b"x" * 300_000 + b'"}'


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("POST", "/keys", b"", 400, "tenant"),
        ("POST", "/keys", b"{", 400, None),
        ("POST", "/keys", b"[]", 400, None),
        ("POST", "/keys", b"\xff", 400, None),
        ("POST", "/keys", b'{"tenant": "a", "tenant": "b"}', 400, None),
        ("POST", "/keys", b'{"tenant": "a", "t\\u0065nant": "b"}', 400, None),
        ("POST", "/keys", b'{"tenant": NaN}', 400, None),
        ("POST", "/keys", BIG, 413, None),
        ("POST", "/keys", b'{"tenant": "nowhere"}', 404, "tenant"),
        ("POST", "/keys", b'{"tennant": "a"}', 400, "tenant"),
        ("POST", "/keys", b'{"tenant": "a", "roles": "user"}', 400, "roles"),
        ("POST", "/keys", b'{"tenant": "a", "limits": {"requests": ["x"]}}', 400, "limits.requests[0]"),
        ("POST", "/tenants", b'{"name": "a b"}', 400, "name"),
        ("POST", "/tenants", b'{"name": "a", "weight": 0}', 400, "weight"),
        ("POST", "/tenants", b'{"name": "a", "priority": 2000}', 400, "priority"),
        ("PATCH", "/tenants/nobody", b'{"weight": 1}', 404, "name"),
        ("PATCH", "/tenants/nobody", b"{}", 404, "name"),
        ("POST", "/keys/key_0123456789abcdef/rotate", b"", 404, None),
        ("PATCH", "/keys/nobody", b'{"role": "user"}', 404, "id"),
        ("GET", "/keys/key_0123456789abcdef", None, 404, None),
        ("GET", "/keys/a%00b", None, 404, "id"),
        ("GET", "/tenants/a%00b", None, 404, "name"),
        ("GET", "/keys?tennant=a", None, 400, "tennant"),
        ("GET", "/keys?tenant=a&tenant=b", None, 400, "tenant"),
        ("GET", "/keys?revoked=perhaps", None, 400, "revoked"),
        ("GET", "/usage?from=2030-01-01&to=2029-01-01", None, 400, "from"),
        ("GET", "/usage?group_by=colour", None, 400, "group_by[0]"),
        ("GET", "/audit?limit=0", None, 400, "limit"),
        ("GET", "/audit?after=99999999999999999999", None, 400, "after"),
        ("GET", "/audit/verify?expect=abc", None, 400, "expect"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_an_error_of_ours_that_names_the_field(
    office: Office, method: str, path: str, body: bytes | None, status: int, param: str | None
) -> None:
    headers = {"authorization": f"Bearer {ADMIN}"}
    answer = office.gateway.http.request(method, f"/admin/v1{path}", content=body, headers=headers)
    refused(answer, status, param)
    assert answer.headers["x-request-id"] and answer.headers["content-type"] == "application/json"


def test_a_method_that_a_path_does_not_take_is_a_405(office: Office) -> None:
    answer = office.ask("PUT", "/tenants", {})
    assert refused(answer, 405)["code"] == "method_not_allowed" and answer.headers["allow"]


def test_a_caller_that_leaves_in_the_middle_of_a_body_disturbs_nobody(office: Office) -> None:
    """The log is searched for traces when the shared gateway ends."""
    head = f"POST /admin/v1/keys HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ADMIN}\r\ncontent-length: 100\r\n\r\n{{"
    with Wire(office.gateway.port) as wire:
        wire.send(head.encode())
        time.sleep(0.1)  # until the gateway waits for the rest
    assert office.ask("GET", "/tenants").status_code == 200


# --- what is shown
def everywhere(office: Office, tenant: str, secret: str) -> list[str]:
    """What is answered to a credential, and to one that was pasted into the wrong place."""
    bodies = {"tenant": tenant, "role": secret}, {"tenant": f"{secret} "}, {"tenant": tenant, "expires_at": secret}
    places = ("GET", "/keys/"), ("DELETE", "/keys/"), ("DELETE", "/tenants/"), ("GET", "/usage?to="), ("GET", "/keys?")
    get = office.gateway.get
    return [
        *(get(path, secret).text for path in ("/admin/v1/keys", "/v1/models", "/admin/v1/usage", "/nothing")),
        get("/v1/models", None, headers={"x-api-key": secret}).text,
        *(office.ask(method, path + secret).text for method, path in places),
        *(office.ask("POST", "/keys", body).text for body in bodies),
    ]


def test_neither_bodies_nor_logs_nor_metrics_hold_any_part_of_a_key(start: Start) -> None:
    with Engine() as engine:
        gateway = start(base_config({"m": [replica(engine)]}, []), args=("--log-level", "debug"))
        office = Office(gateway)
        shown: list[str] = []
        tenant = office.tenant()
        made = office.make(tenant, role="admin", expires_at=time.time() + 1.2)
        turned = office.good("POST", f"/keys/{office.make(tenant)['id']}/rotate", {"overlap": "0s"})
        gone = office.make(tenant)
        office.good("DELETE", f"/keys/{gone['id']}")
        secrets = [made["key"], turned["key"], gone["key"], "sk-" + "Uq3nOwn7" * 6, "Zr4Bare8" * 6, "AIzaFo9e" * 6]
        assert office.status(turned["key"]) == 200
        assert eventually(lambda: office.status(made["key"]) == 401)
        for secret in secrets:
            shown += everywhere(office, tenant, secret)
        paths = ("/keys?revoked=true", "/tenants", "/audit?limit=1000", "/models", "/replicas", "/usage?rows=true")
        assert eventually(lambda: used(office, f"tenant={tenant}")[0]["requests"])
        shown += [office.ask("GET", path).text for path in paths]
        shown.append(gateway.metrics_page())
        gateway.terminate()
        gateway.wait()
        shown += [gateway.log(), (gateway.folder / "stdout").read_text()]
    whole = "\n".join(shown)
    texts = [text for secret in secrets for text in (secret, digest(secret))]
    parts = {text[at : at + 8] for text in texts for at in range(len(text) - 7)}
    assert not [part for part in parts if part in whole]


def test_a_key_lists_and_gets_exactly_the_models_it_can_call(lab: Lab, office: Office) -> None:
    names = ["org/model-a", "qwen3:8b", "hidden"]
    engine, dead = lab.engine(), lab.engine()
    dead.stop()
    models: dict[str, Any] = {name: [replica(engine), replica(dead)] for name in names}
    models["qwen3:8b"] = {"replicas": [replica(dead)], "aliases": ["chat"]}
    lab.serve(models)
    made = office.make(office.tenant(models=["org/*", "qwen3:8b", "chat"]), models=["org/model-a", "qwen3:8b", "chat"])
    listed = [one["id"] for one in lab.gateway.get("/v1/models", made["key"]).json()["data"]]
    assert sorted(listed) == ["chat", "org/model-a", "qwen3:8b"]
    for name in listed:
        for path in (name, quote(name, safe="")):
            assert lab.gateway.get(f"/v1/models/{path}", made["key"]).json()["id"] == name
    absent = [lab.gateway.get(f"/v1/models/{name}", made["key"]) for name in ("hidden", "unknown")]
    assert [answer.status_code for answer in absent] == [404, 404]
    assert absent[0].text.replace("hidden", "unknown") == absent[1].text
    assert office.status(made["key"], "org/model-a") == 200 and office.status(made["key"], "hidden") == 404
    office.good("PATCH", f"/keys/{made['id']}", {"models": ["org/*"]})
    assert [one["id"] for one in lab.gateway.get("/v1/models", made["key"]).json()["data"]] == ["org/model-a"]


def test_models_are_shown_with_their_policy_limits_and_replicas(lab: Lab, office: Office) -> None:
    engine = lab.engine()
    settings = {"aliases": ["chat"], "policy": "round_robin", "limits": {"requests": "600/min"}}
    lab.serve({"m": {**settings, "replicas": [replica(engine)]}})
    (model,) = office.good("GET", "/models")["data"]
    assert (model["id"], model["aliases"], model["policy"]) == ("m", ["chat"], "round_robin")
    assert model["limits"]["requests"] == ["600/min"]
    assert [one["id"] for one in model["replicas"]] == [one["id"] for one in lab.gateway.replicas()]
    assert {"health", "draining", "inflight"} <= set(model["replicas"][0])


# --- usage
def used(office: Office, query: str, key: str = ADMIN) -> list[dict[str, Any]]:
    data: list[dict[str, Any]] = office.good("GET", f"/usage?{query}", key=key)["data"]
    return data


def test_usage_is_added_up_listed_and_exported(office: Office) -> None:
    tenant = office.tenant()
    made, other = office.make(tenant), office.make(tenant)
    for model in ("m", "m", "n", "hidden"):
        office.status(made["key"], model)
    office.status(other["key"])
    assert eventually(lambda: used(office, f"tenant={tenant}")[0]["requests"] == 5)
    (total,) = used(office, f"tenant={tenant}")
    assert (total["failed"], total["tokens"]) == (1, total["prompt"] + total["completion"]) and total["tokens"] > 0
    by_model = used(office, f"tenant={tenant}&key={made['id']}&group_by=model")
    assert [(one["model"], one["requests"]) for one in by_model if one["model"] in "mn"] == [("m", 2), ("n", 1)]
    rows = used(office, f"tenant={tenant}&rows=true")
    assert len(rows) == 5 and {row["key"] for row in rows} == {made["id"], other["id"]}
    answer = office.ask("GET", f"/usage?tenant={tenant}&group_by=key,model&format=csv")
    assert answer.headers["content-type"].startswith("text/csv")
    header, *lines = csv.reader(io.StringIO(answer.text))
    assert header[:3] == ["key", "model", "requests"] and sum(int(line[2]) for line in lines) == 5
    pages, query = [], f"/usage?tenant={tenant}&rows=true&format=csv&limit=2"
    after = ""
    for _ in range(4):
        answer = office.ask("GET", query + after)
        pages.append(len(answer.text.splitlines()) - 1)
        if "x-sekisho-next" not in answer.headers:
            break
        after = f"&after={quote(answer.headers['x-sekisho-next'])}"
    assert pages == [2, 2, 1]


def test_a_user_sees_the_usage_of_its_own_tenant_and_nothing_of_the_fleet(office: Office) -> None:
    mine, other = office.tenant(), office.tenant()
    made = office.make(mine)
    office.status(made["key"])
    office.status(office.make(other)["key"])
    assert eventually(lambda: all(used(office, f"tenant={name}")[0]["requests"] == 1 for name in (mine, other)))
    for query in ("", f"tenant={mine}", "group_by=tenant", f"key={made['id']}"):
        assert [one["requests"] for one in used(office, query, made["key"])] == [1]
    (row,) = used(office, "rows=true", made["key"])
    assert row["tenant"] == mine and "replica" not in row
    assert "vllm" not in office.ask("GET", "/usage?rows=true&format=csv", key=made["key"]).text
    for query in (f"tenant={other}", f"key={other}/ci", "tenant=nobody"):
        refused(office.ask("GET", f"/usage?{query}", key=made["key"]), 403)


# --- audit
def test_every_change_leaves_an_entry_and_the_trail_is_whole(lab: Lab, office: Office) -> None:
    start = office.good("GET", "/audit?order=desc&limit=1")["data"][0]["seq"]
    tenant = office.tenant()
    own = office.make(tenant, role="admin", name="boss")
    boss = {"key": own["key"]}
    made = office.good("POST", "/keys", {"tenant": tenant}, **boss)
    office.good("PATCH", f"/keys/{made['id']}", {"limits": {"requests": "5/s"}}, **boss)
    target = lab.gateway.replicas()[0]["id"]
    office.good("POST", f"/replicas/{target}/drain", **boss)
    office.good("POST", f"/replicas/{target}/undrain", **boss)
    office.good("POST", "/reload", **boss)
    office.good("DELETE", f"/keys/{made['id']}", **boss)
    trail = office.good("GET", f"/audit?after={start}")["data"]
    # The gateway notices by itself, too, that a test has written its configuration.
    entries = [one for one in trail if not one["actor"].startswith("system:")]
    assert [(one["action"], one["target"], one["actor"]) for one in entries[1:]] == [
        ("key.create", own["id"], "operators/root"),
        *((action, what, f"{tenant}/{own['id']}") for action, what in (
            ("key.create", made["id"]), ("key.update", made["id"]), ("replica.drain", target),
            ("replica.undrain", target), ("config.reload", "configuration"), ("key.revoke", made["id"]))),
    ]  # fmt: skip
    assert {one["address"] for one in entries} == {"127.0.0.1"}
    assert (entries[4]["before"], entries[4]["after"]) == ({"draining": False}, {"draining": True})
    assert entries[3]["after"]["limits"] == {"requests": ["5/s"]}
    verdict = office.good("GET", "/audit/verify")
    assert verdict["ok"] and verdict["entries"] >= entries[-1]["seq"]
    for known in (entries[0]["hash"], entries[-1]["hash"], verdict["head"]):
        assert office.good("GET", f"/audit/verify?expect={known}")["ok"]
    assert not office.good("GET", f"/audit/verify?expect={'0' * 64}")["ok"]


def test_without_a_database_the_fleet_is_managed_and_the_log_keeps_the_trail(start: Start) -> None:
    with Engine() as engine:
        gateway = start(base_config({"m": [replica(engine)]}, [], state={"database": None}))
        office = Office(gateway)
        for method, path in (("GET", "/tenants"), ("POST", "/keys"), ("GET", "/usage"), ("GET", "/audit/verify")):
            error = refused(office.ask(method, path, {} if method == "POST" else None), 503)
            assert error["code"] == "store_unavailable" and "state.database" in error["message"]
        target = gateway.replicas()[0]["id"]
        assert office.good("POST", f"/replicas/{target}/drain")["draining"] is True
        office.good("POST", "/reload")
        lines = [json.loads(line) for line in gateway.log().splitlines() if '"audit"' in line]
    assert [(line["event"], line["action"], line["target"], line["actor"], line["address"]) for line in lines] == [
        ("audit", "replica.drain", target, "operators/root", "127.0.0.1"),
        ("audit", "config.reload", "configuration", "operators/root", "127.0.0.1")]  # fmt: skip
    assert (lines[0]["before"], lines[0]["after"]) == ({"draining": False}, {"draining": True})
