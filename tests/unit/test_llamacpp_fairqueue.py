"""Turns between tenants, first in first out within one."""

from hypothesis import given
from hypothesis import strategies as st

from backends.llamacpp.fairqueue import FairQueue


def drain(queue: FairQueue[str]) -> list[str]:
    out = []
    while (item := queue.peek()) is not None:
        out.append(item)
        queue.turn(done=True)
    return out


def test_a_crowd_does_not_keep_others_waiting() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        queue.push(item[0], item)
    assert drain(queue) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_an_item_that_is_not_done_stays_first_of_its_tenant() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "b1"):
        queue.push(item[0], item)
    queue.turn(done=False)
    assert drain(queue) == ["b1", "a1", "a2"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5)), max_size=30), st.sets(st.integers(0, 29)))
def test_nothing_is_lost_repeated_or_reordered_within_a_tenant(items: list[tuple[str, int]], removed: set[int]) -> None:
    queue: FairQueue[str] = FairQueue()
    names = [f"{tenant}{i}" for i, (tenant, _) in enumerate(items)]
    for name in names:
        queue.push(name[0], name)
    for i in removed:
        if i < len(names):
            queue.remove(names[i][0], names[i])
            queue.remove(names[i][0], names[i])
    left = [name for i, name in enumerate(names) if i not in removed]
    assert len(queue) == len(left)
    out = drain(queue)
    for tenant in "abc":
        assert [name for name in out if name[0] == tenant] == [name for name in left if name[0] == tenant]
