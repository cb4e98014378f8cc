"""What is known of prompt caches: chains that grow with a chat, and an index that claims nothing it has forgotten."""

from __future__ import annotations

import copy
import gc
import json
import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import Operation
from gateway.call import parse_call
from gateway.prefixes import (
    BLOCK,
    BYTES_PER_ENTRY,
    ENDS,
    LONGEST,
    NOTHING,
    Chain,
    PrefixIndex,
    chain_of,
    chat_text,
    completion_text,
)

TEXTS = st.text(max_size=20).map(lambda text: text * 40)  # long enough to fill blocks
CONTENTS = st.one_of(TEXTS, st.none(), st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS})))
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": CONTENTS},
        optional={"name": TEXTS, "tool_calls": st.lists(st.dictionaries(TEXTS, TEXTS, max_size=2), max_size=2)},
    ),
    min_size=1,
    max_size=6,
)


def chain(body: dict[str, Any], salt: str = "t") -> Chain:
    return chain_of(salt, chat_text(body))


def image(url: str) -> dict[str, Any]:
    parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": url}}]
    return {"messages": [{"role": "user", "content": parts}, {"role": "user", "content": "x" * 2 * BLOCK}]}


# --- chains
@given(MESSAGES, st.lists(st.dictionaries(TEXTS, TEXTS, max_size=2), max_size=2), st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_a_chat_that_grows_keeps_the_hashes_it_had(messages: list[Any], tools: list[Any], turns: int) -> None:
    whole = chain({"messages": messages, "tools": tools})
    before = chain({"messages": messages[:turns], "tools": tools})
    assert whole.hashes[: len(before.hashes)] == before.hashes and before.length <= whole.length


@given(MESSAGES)
@settings(max_examples=50, deadline=None)
def test_equal_messages_have_equal_chains_however_they_are_written(messages: list[Any]) -> None:
    body = {"model": "m", "messages": messages}
    given = copy.deepcopy(body)
    ways = [parse_call(Operation.CHAT, text.encode()) for text in (json.dumps(body), json.dumps(body, indent=3))]
    assert ways[0].find_prefix() == ways[1].find_prefix() == chain(body, "")
    assert body == given  # and reading them changes nothing


@given(st.text(min_size=1, max_size=50), st.text(max_size=10), st.text(max_size=10))
@settings(max_examples=100, deadline=None)
def test_tenants_have_nothing_in_common(text: str, one: str, other: str) -> None:
    ours, theirs = chain_of(one, text * 2 * BLOCK), chain_of(other, text * 2 * BLOCK)
    assert ours.hashes
    assert set(ours.hashes).isdisjoint(theirs.hashes) is (one != other)


@given(st.text(alphabet="ab", min_size=BLOCK, max_size=8 * BLOCK), st.data())
@settings(max_examples=50, deadline=None)
def test_a_hash_covers_everything_before_it(text: str, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(text) - 1))
    changed = text[:place] + ("b" if text[place] == "a" else "a") + text[place + 1 :]
    pairs = zip(chain_of("t", text).hashes, chain_of("t", changed).hashes, strict=True)
    assert [one == other for one, other in pairs] == [end <= place for end in ENDS if end <= len(text)]


def test_blocks_grow_with_the_prompt_and_their_number_is_bounded() -> None:
    assert ENDS[0] == BLOCK and ENDS[-1] == LONGEST and len(ENDS) <= 128
    assert all(0 < end - begin <= max(BLOCK, begin // 8) for begin, end in zip((0, *ENDS), ENDS, strict=False))
    endless = chain_of("t", "x" * (3 * LONGEST))
    assert endless.length == LONGEST and len(endless.hashes) == len(ENDS)


def test_what_comes_after_the_longest_prefix_is_not_read() -> None:
    one, other = ("x" * LONGEST + end for end in "ab")
    assert completion_text(one) == completion_text(other)
    many = {"messages": [{"role": "user", "content": "y" * 1000}] * 2000}
    assert len(chat_text(many)) == LONGEST


@pytest.mark.parametrize("change", [
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
    {"messages": [{"role": "system", "content": "x" * 600}]},
    {"messages": [{"role": "user", "content": "x" * 600, "name": "n"}]},
    {"messages": [{"role": "user", "content": "y" * 600}]},
])  # fmt: skip
def test_all_that_an_engine_reads_counts(change: dict[str, Any]) -> None:
    def last(body: dict[str, Any]) -> int:
        more = {"role": "user", "content": "z" * 600}
        return chain(body | {"messages": [*body["messages"], more]}).hashes[3]

    body = {"messages": [{"role": "user", "content": "x" * 600}]}
    assert last(body | change) != last(body)


def test_content_in_parts_is_the_same_text() -> None:
    whole = {"messages": [{"role": "user", "content": "ab" * 300}]}
    parts = [{"type": "text", "text": "ab" * 100}, {"type": "text", "text": "ab" * 200}]
    assert chain({"messages": [{"role": "user", "content": parts}]}) == chain(whole)


@pytest.mark.parametrize("size", [10, 1000, 9_000_000])
def test_an_image_counts_by_what_it_is_and_not_by_its_size(size: int) -> None:
    url = "data:image/png;base64," + "A" * size
    assert chain(image(url)) == chain(image("data:image/png;base64," + "A" * size))
    assert chain(image(url)).hashes[0] != chain(image(url[:-1] + "B")).hashes[0]
    assert len(chat_text(image(url))) < 4 * BLOCK


def test_tokens_are_a_prompt_too() -> None:
    tokens = list(range(5000))
    short, long = (chain_of("t", completion_text(tokens[:count])) for count in (1000, 5000))
    assert short.hashes and long.hashes[: len(short.hashes)] == short.hashes
    assert chain_of("t", completion_text([7, *tokens])).hashes[0] != short.hashes[0]


def test_of_several_prompts_the_first_counts() -> None:
    assert completion_text(["a", "b"]) == completion_text("a") == "a"
    assert completion_text([[1, 2], [3]]) == completion_text([1, 2]) == "1,2,"
    assert completion_text([]) == ""


def test_what_is_nested_too_deeply_to_be_written_is_left_out() -> None:
    deep: Any = "x"
    for _ in range(300):
        deep = [deep]
    assert chat_text({"messages": [{"role": "user", "content": "hi"}], "tools": deep}) == "\0user\1hi"


@pytest.mark.parametrize("operation", [Operation.EMBEDDINGS, Operation.RERANK])
def test_operations_without_a_prefix_cache_have_no_chain(operation: Operation) -> None:
    body = {"model": "m", "input": "x" * 1000, "query": "x", "documents": ["x" * 1000]}
    assert parse_call(operation, json.dumps(body).encode()).find_prefix() == NOTHING


# --- the index
def a_chain(*names: int) -> Chain:
    """A prompt of whole blocks, and half a block more."""
    return Chain(names, ENDS[len(names) - 1] + BLOCK // 2 if names else 0)


def room(entries: int) -> int:
    return entries * BYTES_PER_ENTRY


NAMES = st.sampled_from(["a", "b", "c", "d"])
CHAINS = st.lists(st.integers(0, 30), max_size=6, unique=True).map(lambda names: a_chain(*names))
STEPS = st.lists(st.tuples(st.sampled_from(["add", "add", "add", "forget", "tidy"]), NAMES, CHAINS), max_size=60)


class Naive:
    """What every replica has ever read, as plain sets."""

    def __init__(self) -> None:
        self.read: dict[str, set[int]] = {}

    def known(self, replica: str, chain: Chain) -> int:
        """Characters from the beginning."""
        blocks = 0
        while blocks < len(chain.hashes) and chain.hashes[blocks] in self.read.get(replica, ()):
            blocks += 1
        return ENDS[blocks - 1] if blocks else 0

    def warm(self, chain: Chain) -> dict[str, float]:
        known = {replica: self.known(replica, chain) for replica in self.read}
        return {replica: count / chain.length for replica, count in known.items() if count}


@given(STEPS)
@settings(max_examples=200, deadline=None)
def test_with_room_enough_the_index_knows_exactly_what_was_read(steps: list[tuple[str, str, Chain]]) -> None:
    index, naive = PrefixIndex(room(10_000)), Naive()
    for what, replica, given_chain in steps:
        if what == "add":
            assert index.add(replica, given_chain) == given_chain.length - naive.known(replica, given_chain)
            naive.read.setdefault(replica, set()).update(given_chain.hashes)
        elif what == "forget":
            index.forget(replica)
            naive.read.pop(replica, None)
        else:
            index.tidy(room(10_000))
            assert len(index) == sum(map(len, naive.read.values()))
        assert index.warm(given_chain) == naive.warm(given_chain)


@given(STEPS, st.integers(0, 25))
@settings(max_examples=200, deadline=None)
def test_with_little_room_it_claims_only_what_it_still_holds(steps: list[tuple[str, str, Chain]], most: int) -> None:
    index, naive = PrefixIndex(room(most)), Naive()
    for what, replica, given_chain in steps:
        if what == "add":
            index.add(replica, given_chain)
            naive.read.setdefault(replica, set()).update(given_chain.hashes)
        elif what == "forget":
            index.forget(replica)
            naive.read.pop(replica, None)
        else:
            index.tidy(room(most))
        assert len(index) <= most
        truth = naive.warm(given_chain)
        assert all(share <= truth.get(name, 0) for name, share in index.warm(given_chain).items())
    index.tidy(room(most))
    claimed = [name for block in range(31) for name in index.warm(a_chain(block))]
    assert len(claimed) == len(index)  # entries and claims are the same, replica by replica


@given(st.lists(st.integers(0, 200), min_size=1, max_size=300))
@settings(max_examples=100, deadline=None)
def test_what_was_used_last_is_forgotten_last(used: list[int]) -> None:
    index, other = PrefixIndex(room(64)), a_chain(1000, 1001)
    for name in used:
        index.add("a", a_chain(name))
        index.add("b", other)
    latest = list(dict.fromkeys(reversed(used)))[:14]  # of 32 that are this replica's share, nearly half
    assert all("a" in index.warm(a_chain(name)) for name in latest)
    assert index.warm(other).keys() == {"b"}


def test_a_replica_that_was_lost_knows_nothing_when_it_is_back() -> None:
    index = PrefixIndex(room(100))
    index.add("a", a_chain(1, 2, 3))
    index.add("b", a_chain(1, 2))
    index.forget("a")
    assert index.warm(a_chain(1, 2, 3)).keys() == {"b"}
    index.add("a", a_chain(7))
    assert index.warm(a_chain(1, 2, 3)).keys() == {"b"} and index.warm(a_chain(7)).keys() == {"a"}
    index.retain(["a"])
    assert index.warm(a_chain(1)) == {} and index.warm(a_chain(7)).keys() == {"a"}


def test_prompts_too_short_for_a_block_leave_nothing_behind() -> None:
    index, short = PrefixIndex(room(100)), chain_of("t", "Hello")
    tracemalloc.start()
    try:
        index.add("a", short)
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(1000):
            assert index.add("a", short) == 5 and index.warm(short) == {}
        assert tracemalloc.get_traced_memory()[0] - before < 2000
    finally:
        tracemalloc.stop()


def test_replicas_that_come_and_go_take_no_lasting_room() -> None:
    index = PrefixIndex(room(50))
    costs = []
    for number in range(300):
        name = f"r{number}"
        index.add(name, a_chain(number))
        index.forget(name)
        index.tidy(room(50))
        costs.append(len(index))
    assert set(costs) == {0}
    index.add("last", a_chain(1, 2))
    assert index.warm(a_chain(1, 2)).keys() == {"last"}


def test_a_smaller_bound_is_reached_step_by_step() -> None:
    index = PrefixIndex(room(20_000))
    for name in range(10_000):
        index.add("ab"[name % 2], a_chain(name))
    sizes = []
    while len(index) > 1000:
        index.tidy(room(1000))
        sizes.append(len(index))
        assert len(sizes) < 20
    assert len(sizes) > 2 and sizes == sorted(sizes, reverse=True)
    assert index.warm(a_chain(9_999)).keys() == {"b"}


@pytest.mark.parametrize(("replicas", "copies"), [(1, 1), (8, 1), (64, 3)])
def test_many_distinct_prompts_stay_below_the_configured_memory(replicas: int, copies: int) -> None:
    """In every moment, tables that are growing included. A million prompts at the default: docs/routing.md."""
    budget = 2 << 20
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        index = PrefixIndex(budget)
        for number in range(3000):
            for copy_of in range(copies):
                index.add(f"r{(number + copy_of) % replicas}", chain_of("t", f"{number} " + "words " * 400))
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert len(index) * BYTES_PER_ENTRY > budget * 0.9  # it was full
    assert peak < budget


def test_a_look_up_costs_the_same_before_two_replicas_and_before_sixty_four() -> None:
    prompt = a_chain(*range(40))
    costs = []
    for replicas in (2, 64):
        index = PrefixIndex(room(10_000))
        for number in range(replicas):
            index.add(f"r{number}", a_chain(number + 100))
        index.add("r0", prompt)
        costs.append(calls(lambda index=index: index.warm(prompt)))  # type: ignore[misc]
    assert costs[0] == costs[1] < 100


def calls(act: Callable[[], object]) -> int:
    count = 0

    def profile(_frame: FrameType, event: str, _arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count
