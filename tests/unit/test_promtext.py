"""Prometheus text: exact names, sums over label sets, and lines that are not numbers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import promtext

PAGE = b"""\
# HELP vllm:num_requests_waiting Number of requests waiting.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="a} b"} 2.0
vllm:num_requests_waiting{engine="1",model_name="a{ b"} 3.0 1700000000000
vllm:num_requests_waiting_by_reason{reason="x"} 99.0
plain 7
plain_with_time 8 1700000000000
spaced   9
not_a_number NaN
nonsense abc
empty
tiny 1e-3
"""


@pytest.mark.parametrize(
    ("name", "value"),
    [("vllm:num_requests_waiting", 5.0), ("plain", 7.0), ("plain_with_time", 8.0), ("spaced", 9.0), ("tiny", 0.001)],
)
def test_values(name: str, value: float) -> None:
    assert promtext.read(PAGE, [name]) == {name: value}


@pytest.mark.parametrize("name", ["missing", "not_a_number", "nonsense", "empty", "vllm:num_requests", "#", "HELP", ""])
def test_what_is_not_there_is_absent_and_not_zero(name: str) -> None:
    assert promtext.read(PAGE, [name]) == {}


def test_several_at_once_and_crlf() -> None:
    assert promtext.read(PAGE.replace(b"\n", b"\r\n"), ["plain", "tiny", "x"]) == {"plain": 7.0, "tiny": 0.001}
    assert promtext.read(b"", ["plain"]) == {}


@given(st.binary(max_size=100), st.text(max_size=5))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_read(body: bytes, name: str) -> None:
    promtext.read(body + b"\n" + name.encode("utf-8", "replace") + b" 1", [name])


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8))
@settings(max_examples=50, deadline=None)
def test_samples_are_summed(values: list[int]) -> None:
    body = b"".join(b'm{i="%d"} %d\nn{i="0"} 1\n' % (i, value) for i, value in enumerate(values))
    assert promtext.read(body, ["m"]) == {"m": float(sum(values))}
