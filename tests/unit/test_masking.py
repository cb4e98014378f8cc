"""What is masked and what stays: check digits, spellings, cuts, JSON, and texts made to take long."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.masking import find, mask
from gateway.masking.documents import mask_document
from gateway.masking.folding import fold
from gateway.masking.numbers import is_card, is_iban, is_my_number, luhn, my_number_check
from gateway.masking.spans import Span, settle
from tests.masking.measure import ALL, measure
from tests.masking.sample import load

CARD = "4111 1111 1111 1111"


def masked(text: str) -> str:
    return mask(text, Counter())[0]


# --- single rules
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("電話番号は０９０－１２３４－５６７８です", "電話番号は[PHONE]です"),
        ("a@example.com と b@example.org", "[EMAIL] と [EMAIL]"),
        (f"({CARD})", "([CARD])"),
        ("マイナンバー 123456789018", "マイナンバー [MY_NUMBER]"),
        ("123456789018", "123456789018"),  # nothing says that it is one
        ("IBAN DE89 3704 0044 0532 0130 00 bitte", "IBAN [IBAN] bitte"),
        ("192.0.2.1 and 2001:db8::1", "[IP] and [IP]"),
        ("version 1.2.3.4 at 127.0.0.1", "version 1.2.3.4 at 127.0.0.1"),
        ("password=a@example.com!", "password=[EMAIL]"),  # nothing of a value stays, whichever rule has found more
        ("Authorization: Bearer abc123def456ghi789", "Authorization: Bearer [SECRET]"),
        ("-----BEGIN PRIVATE" + " KEY-----\nabc\ncut", "[SECRET]"),
        ("", ""),
    ],
)
def test_labels(text: str, wanted: str) -> None:
    assert masked(text) == wanted


def test_own_keys() -> None:
    from gateway.keys import new_key

    for _ in range(200):
        assert masked(f"use {new_key()} now") == "use [SECRET] now"


def test_check_digits() -> None:
    assert luhn("4111111111111111") and not luhn("4111111111111112")
    assert is_card("378282246310005") and not is_card("1111222233334444")
    assert not is_card("41111111111111110") and not is_card("0000000000000000")
    assert my_number_check("12345678901") == 8
    assert is_my_number("123456789018") and not is_my_number("123456789010")
    assert is_iban("GB82WEST12345698765432") and not is_iban("GB82WEST12345698765433")
    assert not is_iban("XX82WEST12345698765432")


@given(st.text(alphabet="0123456789", min_size=11, max_size=11))
def test_a_wrong_digit_of_a_my_number_is_noticed(eleven: str) -> None:
    right = my_number_check(eleven)
    assert [digit for digit in range(10) if is_my_number(eleven + str(digit))] == [right]


# --- properties
@given(st.text())
def test_folding_keeps_every_place(text: str) -> None:
    assert len(fold(text)) == len(text)


@given(st.text(alphabet=st.sampled_from("aA1 @.:-/=+(,\"'\n0９－パスワード key[]_"), max_size=200))
def test_spans_are_in_order_and_apart(text: str) -> None:
    place = 0
    for start, end, _ in find(text):
        assert place <= start < end <= len(text)
        place = end


@given(st.lists(st.builds(Span, st.integers(0, 20), st.integers(21, 40), st.sampled_from(["A", "B"]))))
def test_whatever_was_found_is_covered(spans: list[Span]) -> None:
    covered = {place for span in settle(spans) for place in range(span.start, span.end)}
    assert covered == {place for span in spans for place in range(span.start, span.end)}


VALUES = (
    "taro@example.jp",
    CARD,
    "+44 20 7946 0958",
    "０９０－１２３４－５６７８",
    "192.0.2.1",
    "GB82WEST12345698765432",
)


@given(
    st.text(alphabet="あいう。、「」 \n日本語", max_size=40),
    st.sampled_from(VALUES),
    st.text(alphabet="はです。\n ", max_size=20),
)
def test_values_are_found_in_any_japanese_text(before: str, value: str, after: str) -> None:
    text = masked(before + value + after)
    assert value not in text
    assert text.startswith(before[:-1]) and text.endswith(after)


@given(st.integers(0, 60), st.sampled_from(VALUES))
def test_no_cut_shows_a_part_of_a_value(until: int, value: str) -> None:
    text = f"あ 0 あ {value} う {value} え"
    shown, reached = mask(text, Counter(), min(until, len(text)))
    assert reached >= min(until, len(text))
    places = [text.index(value), text.rindex(value)]
    for place in places:
        assert not place < reached < place + len(value)
    assert value[:6] not in shown


# --- JSON
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6) + 1, 10**6 - 1) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


def shape(value: Any) -> Any:
    match value:
        case dict():
            return [shape(one) for one in value.values()]
        case list():
            return [shape(one) for one in value]
    return isinstance(value, str)


@given(st.lists(JSON, max_size=4), st.sampled_from(VALUES), st.booleans())
def test_json_stays_json(values: list[Any], secret: str, escaped: bool) -> None:
    document = {"list": values, "note": f"x {secret}", "deep": [{"password": "rosebud"}]}
    text = mask_document(json.dumps(document, ensure_ascii=escaped), Counter())
    assert text is not None
    found = json.loads(text)
    assert shape(found) == shape(document)
    assert secret not in text and "rosebud" not in text
    assert json.loads(text)["deep"] == [{"password": "[SECRET]"}]


def test_documents() -> None:
    assert mask_document('{"a" : 1.50, "b":"x" }', Counter()) == '{"a" : 1.50, "b":"x" }'  # as it came
    assert mask_document('{"pan": 4111111111111111}', Counter()) == '{"pan": "[CARD]"}'
    assert mask_document('{"個人番号": "123456789018"}', Counter()) == '{"個人番号": "[MY_NUMBER]"}'
    assert mask_document('{"max_tokens": 4096, "token": null}', Counter()) == '{"max_tokens": 4096, "token": null}'
    assert mask_document('{"password": {"type": "string"}}', Counter()) == '{"password": {"type": "string"}}'
    inner = json.dumps({"arguments": json.dumps({"api_key": "abcd"})})
    found = mask_document(inner, Counter())
    assert found is not None and json.loads(json.loads(found)["arguments"]) == {"api_key": "[SECRET]"}
    for text in ("", "x", "{", '{"a":1} x', "12", "[" * 100_000):
        assert mask_document(text, Counter()) is None


# --- texts made to take long
ADVERSARIAL = [
    "a", "@", "a@a.", "1", "1 ", "1-", "0-", "+1 ", "(0)", "00 44 ", "090-1234-5678 ", CARD + " ", "DE89 ", "1.2.3.",
    "a:b:", ":", "eyJaaaaaaaaa.", "eyJaaaaaaaaa-", "sk-", "xoxb-", "xoxb-aaaaaaaaaa-", "gh-glpat-", "github_pat_",
    "SG.aaaaaaaaaaaaaaaa.",
    "-----BEGIN PRIVATE" + " KEY-----", "-----BEGIN ", "password=", 'password="', "token: ", "api key ", "://a:b", "://",
    "bearer ", "authorization: ", " -u a:", "-", "０－", "パスワード", '"', "discord.com/api/webhooks/a", " ", "1(0)-.",
    "tel 1",
    "マイナ 123456789018 ", "call 12 ", "secret aaaaaaaaaaaaaaaaaaaaaaaa-", "\\", '{"a":',
]  # fmt: skip
CHILD = """
import resource, sys
from collections import Counter
resource.setrlimit(resource.RLIMIT_CPU, (90, 90))
from gateway.masking import mask
from gateway.masking.documents import mask_document
seed = sys.stdin.buffer.read().decode()
text = (seed * (2**20 // len(seed) + 1))[: 2**20]
mask(text, Counter())
mask_document('["' + text, Counter())
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", ADVERSARIAL)
def test_a_megabyte_made_to_take_long(seed: str) -> None:
    """Most take well under a second, the worst a few. A rule of quadratic time would need hours: the limit of 90 CPU
    seconds is no measurement."""
    done = subprocess.run([sys.executable, "-c", CHILD], input=seed.encode(), timeout=110, check=False)
    assert done.returncode == 0


# --- the sample
@pytest.mark.parametrize("half", ["tuned", "held_out"])
def test_precision_and_recall_on_the_sample(half: str) -> None:
    measured = measure(load(half))
    least = 0.98 if half == "tuned" else 0.95
    overall = measured.scores.pop(ALL)
    assert overall.recall >= least and overall.precision >= least
    for kind, score in measured.scores.items():
        assert score.wanted >= 15, kind
        assert score.recall >= 0.9 and score.precision >= 0.9, kind
    assert measured.clean >= 0.97 * measured.negatives


def test_the_sample_is_large_enough() -> None:
    cases = [*load("tuned"), *load("held_out")]
    assert sum(len(case.spans) for case in cases) >= 300
    assert sum(not case.spans for case in cases) >= 300
    texts = [case.text for case in cases]
    assert len(texts) - len(set(texts)) < 10
