"""What the database keeps: values that print no secret, cannot be changed, and come back as they were written."""

import json
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import LimitsConfig
from gateway.records import USAGE_GROUPS, KeyRecord, TenantRecord, UsageRow

DIGEST = bytes(range(32))
WINDOWS = st.sampled_from(["s", "min", "hour", "day", "30s", "12hour"])
RATES = st.lists(st.tuples(st.integers(1, 10**12), WINDOWS), max_size=4, unique_by=lambda rate: rate[1])
BUDGETS = st.lists(
    st.tuples(st.integers(1, 10**12), st.sampled_from(["day", "month"])), max_size=2, unique_by=lambda rate: rate[1]
)


def test_a_key_record_prints_no_digest() -> None:
    record = KeyRecord("key_1", "research", "ci", DIGEST)
    assert DIGEST.hex() not in repr(record) and repr(DIGEST) not in repr(record)
    assert "key_1" in repr(record)


def test_records_cannot_be_changed_but_copied_with_a_change() -> None:
    record: Any = TenantRecord("research")
    with pytest.raises(FrozenInstanceError):
        record.weight = 2.0
    assert replace(record, weight=2.0).weight == 2.0 and record.weight == 1.0


def test_a_record_of_which_nothing_is_said_limits_nobody() -> None:
    tenant, key = TenantRecord("research"), KeyRecord("key_1", "research", "ci", DIGEST)
    assert (tenant.models, tenant.limits, key.limits) == (("*",), LimitsConfig(), LimitsConfig())
    assert (key.role, key.models, key.allow_from, key.expires_at, key.revoked_at) == ("user", None, (), None, None)


@given(RATES, RATES, BUDGETS, st.none() | st.integers(1, 10**6))
def test_limits_come_back_from_json_as_they_were_written(
    requests: list[tuple[int, str]],
    tokens: list[tuple[int, str]],
    budgets: list[tuple[int, str]],
    concurrency: int | None,
) -> None:
    limits = LimitsConfig.model_validate({
        "requests": [f"{count}/{window}" for count, window in requests],
        "tokens": [f"{count}/{window}" for count, window in tokens],
        "token_budget": [f"{count}/{period}" for count, period in budgets],
        "concurrency": concurrency,
    })  # fmt: skip
    stored = json.dumps(limits.model_dump(mode="json"))
    assert LimitsConfig.model_validate_json(stored) == limits
    assert json.loads(limits.model_dump_json(exclude_defaults=True)).keys() <= {
        "requests", "tokens", "token_budget", "concurrency",
    }  # fmt: skip


def test_usage_is_grouped_by_what_a_row_says_or_by_its_time() -> None:
    assert set(USAGE_GROUPS) - {"hour", "day", "month"} <= set(UsageRow._fields)
