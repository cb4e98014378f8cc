"""Usage: rows count once, sums agree with a plain reference on both databases, old rows go."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from gateway.errors import BadRequest
from gateway.records import USAGE_GROUPS, UsageQuery, UsageRow
from gateway.store.usage import MOST_TOKENS
from tests.store.harness import Bench

NEW_YEAR = datetime(2027, 1, 1, tzinfo=UTC).timestamp()
ALWAYS = UsageQuery(0.0, 1e11)
FORMATS = {"hour": "%Y-%m-%dT%H:00Z", "day": "%Y-%m-%d", "month": "%Y-%m"}


def row(identity: str, time: float = NEW_YEAR, **more: Any) -> UsageRow:
    usual = UsageRow(
        identity, time, f"req-{identity}", "acme", "key1", "chat", "", "replica-1", "chat", 1, 200, "", 1,
        100, 10, 50, 5, "engine", 12.5, 1000.25,
    )  # fmt: skip
    return usual._replace(**more)


def many(count: int = 400) -> list[UsageRow]:
    """Rows of all kinds, crowded around the boundaries of hours, days and months."""
    chance = random.Random(11)
    edges = [NEW_YEAR, NEW_YEAR + 3600, NEW_YEAR - 86400, datetime(2026, 3, 1, tzinfo=UTC).timestamp()]
    return [
        row(
            f"id-{chance.random()}",
            chance.choice(edges) + chance.choice([0.0, -0.0004, -0.0006, -1e-6, 0.5, chance.uniform(-9000, 9000)]),
            tenant=chance.choice(["acme", "Zeta", "other", "木"]),
            key=chance.choice(["key1", "key2", "KEY2"]),
            model=chance.choice(["chat", "embed"]),
            operation=chance.choice(["chat", "embeddings"]),
            status=chance.choice([200, 200, 399, 400, 429, 503]),
            prompt=chance.randrange(10_000),
            cached=chance.randrange(100),
            completion=chance.randrange(5_000),
            reasoning=chance.randrange(50),
            source=chance.choice(["engine", "estimate", ""]),
            ttft_ms=chance.choice([None, 3.5]),
        )
        for _ in range(count)
    ]


def reference(rows: Sequence[UsageRow], query: UsageQuery) -> list[dict[str, Any]]:
    def group(one: UsageRow) -> tuple[Any, ...]:
        shown = {name: datetime.fromtimestamp(one.time, UTC).strftime(form) for name, form in FORMATS.items()}
        return tuple(shown.get(name) or getattr(one, name) for name in query.group_by)

    chosen = [
        one for one in rows
        if query.since <= one.time < query.until
        and all(getattr(one, name) == value for name, value in query.where.items())
    ]  # fmt: skip
    groups = {() for _ in [0] if not query.group_by} | {group(one) for one in chosen}
    found = []
    for which in sorted(groups):
        its = [one for one in chosen if group(one) == which]
        kinds = ("prompt", "cached", "completion", "reasoning")
        sums = {kind: sum(getattr(one, kind) for one in its) for kind in kinds}
        found.append(
            dict(zip(query.group_by, which, strict=True))
            | {"requests": len(its), "failed": sum(one.status >= 400 for one in its)}
            | sums
            | {"tokens": sums["prompt"] + sums["completion"], "estimated": sum(one.source == "estimate" for one in its)}
        )
    return found


def test_a_row_comes_back_as_it_was_stored(store: Bench) -> None:
    rows = [row("a", asked="alias", code="engine_error", status=502), row("b", ttft_ms=None, time=NEW_YEAR + 0.1)]
    store.add_usage(rows)
    assert store.usage_rows(ALWAYS, limit=10) == rows


def test_a_row_that_is_stored_twice_counts_once(store: Bench) -> None:
    store.add_usage([row("a"), row("b")])
    store.add_usage([row("b", prompt=1), row("c"), row("c")])
    store.add_usage([])
    assert store.usage_rows(ALWAYS, limit=10) == [row("a"), row("b"), row("c")]
    assert store.usage(ALWAYS)[0]["requests"] == 3


def test_a_batch_is_stored_as_a_whole_or_not_at_all(store: Bench) -> None:
    with pytest.raises(Exception, match=r"failed|NOT NULL|null"):
        store.add_usage([row("a"), row("b", duration_ms=None)])
    assert store.usage_rows(ALWAYS, limit=10) == []
    store.add_usage([row("a")])
    assert len(store.usage_rows(ALWAYS, limit=10)) == 1


def test_what_clients_and_engines_make_up_is_stored_in_a_form_that_fits(store: Bench) -> None:
    store.add_usage([row("a", asked="zero\0half\ud800", request_id="\0", prompt=10**30, completion=-5), row("b")])
    made_up, plain = store.usage_rows(ALWAYS, limit=10)
    assert plain == row("b")
    assert made_up.asked == "zero\N{REPLACEMENT CHARACTER}half?"
    assert (made_up.prompt, made_up.completion) == (MOST_TOKENS, 0)
    assert store.usage(ALWAYS)[0]["tokens"] == MOST_TOKENS + 150


GROUPINGS = [
    (), *((name,) for name in USAGE_GROUPS), *itertools.permutations(("tenant", "day"), 2),
    ("month", "key", "status"), ("hour", "model", "operation"), USAGE_GROUPS,
]  # fmt: skip


def test_sums_agree_with_a_plain_reference(store: Bench) -> None:
    rows = many()
    store.add_usage(rows)
    wheres: list[dict[str, str]] = [{}, {"tenant": "Zeta"}, {"key": "key2", "model": "chat"}, {"operation": "none"}]
    spans = [(0.0, 1e11), (NEW_YEAR, NEW_YEAR + 3600), (NEW_YEAR - 0.0005, NEW_YEAR)]
    for group_by, where, (since, until) in itertools.product(GROUPINGS, wheres, spans):
        query = UsageQuery(since, until, group_by, where)
        assert store.usage(query) == reference(rows, query), query


def test_numbers_are_whole_numbers_on_both_databases(store: Bench) -> None:
    store.add_usage([row("a")])
    (total,) = store.usage(ALWAYS)
    assert {type(value) for value in total.values()} == {int}


def test_no_usage_is_one_total_of_zeros_and_no_groups(store: Bench) -> None:
    assert store.usage(ALWAYS) == reference([], ALWAYS)
    assert store.usage(UsageQuery(0.0, 1e11, ("tenant",))) == []


def test_unknown_groups_and_filters_are_refused(store: Bench) -> None:
    for query in (UsageQuery(0, 1, ("id",)), UsageQuery(0, 1, (), {"status": "200"})):
        with pytest.raises(BadRequest):
            store.usage(query)
    with pytest.raises(BadRequest):
        store.usage_rows(UsageQuery(0, 1, (), {"asked": "x"}), limit=1)


def test_a_filter_that_no_text_could_match_finds_nothing(store: Bench) -> None:
    store.add_usage([row("a")])
    assert store.usage_rows(UsageQuery(0, 1e11, (), {"tenant": "acme\0"}), limit=1) == []


def test_more_groups_than_anybody_reads_are_refused(store: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.store.usage.MOST_GROUPS", 3)
    store.add_usage([row(f"{number}", key=f"key_{number % 3}") for number in range(9)])
    query = UsageQuery(0.0, 1e11, ("key",))
    assert [(one["key"], one["requests"]) for one in store.usage(query)] == [("key_0", 3), ("key_1", 3), ("key_2", 3)]
    store.add_usage([row("more", key="key_3")])
    with pytest.raises(BadRequest, match="shorter period"):
        store.usage(query)


@pytest.mark.parametrize("page", [1, 7, 1000])
def test_pages_of_rows_are_all_rows_once_in_order(store: Bench, page: int) -> None:
    rows = many(60) + [row(name, NEW_YEAR) for name in ("B", "a", "A", "b", "_")]
    store.add_usage(rows)
    found: list[UsageRow] = []
    while part := store.usage_rows(ALWAYS, limit=page, after=(found[-1].time, found[-1].id) if found else None):
        assert len(part) <= page
        found += part
    assert found == sorted(rows, key=lambda one: (one.time, one.id))


@pytest.mark.parametrize("days", [3, 10_000])
def test_what_was_spent_between_two_moments(store: Bench, days: int) -> None:
    rows, until = many(200), NEW_YEAR + days * 86400
    store.add_usage([*rows, row("free", tenant="free", prompt=0, completion=0)])
    expected: dict[tuple[str, str, str], int] = {}
    for one in rows:
        if NEW_YEAR <= one.time < until:
            owner = (one.tenant, one.key, one.replica.rpartition("/")[0] or one.model)
            expected[owner] = expected.get(owner, 0) + one.prompt + one.completion
    spent = store.spent(NEW_YEAR, until)
    assert spent == sorted((*owner, tokens) for owner, tokens in expected.items())
    assert {type(entry[3]) for entry in spent} == {int}


def test_tokens_are_spent_by_the_model_that_served(store: Bench) -> None:
    """A fallback's limits are charged for its answers, and not those of the model that was asked for."""
    given = [("org/m", "org/m/vllm-1"), ("org/m", "spare/sglang-2"), ("spare", "spare/sglang-2"), ("old", "")]
    store.add_usage([row(f"{place}", model=model, replica=one) for place, (model, one) in enumerate(given)])
    spent = store.spent(0.0, 1e11)
    (tokens,) = {entry[3] for entry in spent if entry[2] == "org/m"}
    assert [entry[2:] for entry in spent] == [("old", tokens), ("org/m", tokens), ("spare", 2 * tokens)]


def test_retention_deletes_the_oldest_in_portions(store: Bench) -> None:
    store.add_usage([row(f"{number:02}", float(number)) for number in range(20)])
    assert store.forget_usage(12.0, at_most=5) == 5
    assert [one.time for one in store.usage_rows(ALWAYS, limit=3)] == [5.0, 6.0, 7.0]
    assert store.forget_usage(12.0) == 7
    assert store.forget_usage(12.0) == 0
    assert [one.time for one in store.usage_rows(ALWAYS, limit=1)] == [12.0]
